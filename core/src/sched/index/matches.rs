//! What a look-up found, in tables that are used again.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use crate::prefix::{Holder, Holders};

/// How much of a chain each holder has. Made once, filled by [`Index::matches`](super::Index::matches) again and again.
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_core::prefix::Holder;
/// use millpond_core::sched::index::{Change, Event, Index, Limits};
/// let mut index: Index<RouteHash, 1> = Index::new(Limits { holders_max: 3, ..Limits::default() }, 7);
/// let chain = [1, 2, 3].map(RouteHash);
/// for (holder, blocks) in [(0, 1), (1, 3), (2, 1)] {
///     let change = Change::Stored(&chain[..blocks]);
///     index.on_event(&Event { holder: Holder(holder), life: 1, number: 1, change });
/// }
/// let mut matches = index.new_matches();
/// index.matches(&chain, &mut matches);
/// assert_eq!((matches.shared(), matches.longest()), (1, 3));
/// assert_eq!([0, 1, 2].map(|holder| matches.len_of(Holder(holder))), [1, 3, 1]);
/// assert!(matches.beyond().eq([(Holder(1), 3)]), "only who has more than all others is listed");
/// ```
#[derive(Clone, Debug)]
pub struct Matches<const W: usize> {
    pub(super) members: Holders<W>,
    pub(super) shared: u32,
    pub(super) longest: u32,
    /// By holder; 0 where it is no more than `shared`.
    lens: Box<[u32]>,
    beyond: Vec<Holder>,
}

impl<const W: usize> Matches<W> {
    pub(super) fn new(holders: u16) -> Self {
        let holders = usize::from(holders);
        Self {
            members: Holders::default(),
            shared: 0,
            longest: 0,
            lens: vec![0; holders].into(),
            beyond: Vec::with_capacity(holders),
        }
    }

    pub(super) fn reset(&mut self, members: Holders<W>) {
        for holder in self.beyond.drain(..) {
            self.lens[usize::from(holder.0)] = 0;
        }
        (self.members, self.shared, self.longest) = (members, 0, 0);
    }

    pub(super) fn push(&mut self, holder: Holder, len: u32) {
        self.lens[usize::from(holder.0)] = len;
        self.beyond.push(holder);
    }

    /// Blocks at the beginning of the chain that `holder` has; 0 for one that is unknown or gone.
    #[must_use]
    pub fn len_of(&self, holder: Holder) -> u32 {
        match self.lens.get(usize::from(holder.0)) {
            Some(len) if self.members.contains(holder) => self.shared.max(*len),
            _ => 0,
        }
    }

    /// Blocks at the beginning of the chain that every holder has. A holder that has nothing at all does not count.
    #[must_use]
    pub fn shared(&self) -> u32 {
        self.shared
    }

    /// Blocks that the best holder has.
    #[must_use]
    pub fn longest(&self) -> u32 {
        self.longest
    }

    /// The holders that have more than [`Self::shared`], with how much; the shortest first, equals in no order.
    pub fn beyond(&self) -> impl Iterator<Item = (Holder, u32)> + '_ {
        self.beyond.iter().map(|&holder| (holder, self.lens[usize::from(holder.0)]))
    }
}
