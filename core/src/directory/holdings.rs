//! What one owner holds, page by page: the snapshot that a watcher of the stream takes after a gap.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Bound;

use super::{Answer, Directory, NodeId, Owner, Stamp};

/// Where a page of holdings ended: a segment of the owner and a slot in it.
///
/// ```
/// use millpond_core::directory::Place;
/// assert!(Place { segment: 1, slot: 0 } > Place { segment: 0, slot: 9 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Which of the owner's segments.
    pub segment: u32,
    /// The slot in it.
    pub slot: u32,
}

/// A page of the keys that one node holds. An object with replicas in two of its segments comes twice.
///
/// A snapshot that takes several pages sees changes that happen meanwhile, or not. Remember the stream's place before the
/// first page and read the events from there on once more: each says what is so from then on, so what comes out is right.
///
/// ```
/// use millpond_core::directory::{Commit, Config, Directory, Join, Key, Location, NodeId, Owner, SegmentFacts};
/// use millpond_core::time::Instant;
/// let now = Instant::ZERO;
/// let mut directory = Directory::new(now, Config::fresh(1));
/// let owner = Owner { node: NodeId([7; 16]), incarnation: 1 };
/// let segments = vec![SegmentFacts::dram(0, 1, 1 << 30)];
/// directory.on_join(now, Join { owner, address: "127.0.0.1:7000".into(), segments }).value.unwrap();
/// let at = Location { node: owner.node, segment: 0, epoch: 1, slot: 0, generation: 1 };
/// directory.on_commit(now, owner, &Commit::new(Key::new(b"kv/1").unwrap(), 5, at)).value.unwrap();
///
/// let page = directory.holdings(owner.node, b"kv/", None, 100).value;
/// assert_eq!((page.owner, &*page.keys[0], page.next), (Some(owner), b"kv/1".as_slice(), None));
/// assert_eq!(page.position, directory.position());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// The node's incarnation in the table; `None` if it is not there and holds nothing.
    pub owner: Option<Owner>,
    /// The keys, in order of segments and slots.
    pub keys: Vec<Arc<[u8]>>,
    /// Where this page ended, if there may be more: ask again from there.
    pub next: Option<Place>,
    /// The last event before this page was read.
    pub position: Stamp,
}

impl Directory {
    /// The keys of `node` that begin with `prefix`, behind the place `after`. Looks at `max` slots, at most
    /// `Limits::page_max` and at least 1: a page may be short, or empty, and not the last. O(slots looked at).
    #[must_use]
    pub fn holdings(&self, node: NodeId, prefix: &[u8], after: Option<Place>, max: usize) -> Answer<Holdings> {
        let max = max.clamp(1, self.limits.page_max);
        let row = self.owners.get(&node);
        let owner = row.map(|row| Owner { node, incarnation: row.incarnation });
        let first = after.map_or(0, |place| place.segment);
        let segments = row.into_iter().flat_map(|row| row.segments.range(first..));
        let slots = segments.flat_map(|(&segment, row)| {
            let from = match after {
                Some(place) if place.segment == segment => Bound::Excluded(place.slot),
                _ => Bound::Unbounded,
            };
            let held = row.slots.range((from, Bound::Unbounded));
            held.map(move |(&slot, held)| (Place { segment, slot }, &held.key))
        });
        let (mut keys, mut seen, mut last) = (Vec::new(), 0, None);
        for (place, key) in slots.take(max) {
            (seen, last) = (seen + 1, Some(place));
            if key.starts_with(prefix) {
                keys.push(key.clone());
            }
        }
        let next = if seen == max { last } else { None };
        self.answer(Holdings { owner, keys, next, position: self.position() })
    }
}
