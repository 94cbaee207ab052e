//! The obvious page table: a map from handles to states.

use std::collections::{BTreeMap, BTreeSet};

use millpond_core::page::{Counts, State};
use millpond_core::slab::Handle;

/// Pages as a map.
///
/// ```
/// use millpond_core::slab::Handle;
/// let mut pages = millpond_oracle::page::Pages::new(1);
/// let page = Handle { slot: 0, epoch: 1 };
/// pages.allocated(page).unwrap();
/// assert!(pages.allocated(page).is_err()); // handed out twice
/// ```
#[derive(Clone, Debug)]
pub struct Pages {
    total: u32,
    live: BTreeMap<Handle, State>,
    used: BTreeSet<Handle>,
}

impl Pages {
    /// `total` free pages.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self { total, live: BTreeMap::new(), used: BTreeSet::new() }
    }

    /// Pages that can be handed out.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.total - u32::try_from(self.live.len()).expect("no more pages than the total")
    }

    /// The product handed out `page`.
    ///
    /// # Errors
    /// Why it must not have.
    pub fn allocated(&mut self, page: Handle) -> Result<(), String> {
        if page.slot >= self.total || self.live.keys().any(|live| live.slot == page.slot) {
            return Err(format!("page {page} is taken or does not exist"));
        }
        if !self.used.insert(page) {
            return Err(format!("handle {page} was handed out before"));
        }
        self.live.insert(page, State::Filling);
        Ok(())
    }

    /// The state a handle stands for.
    #[must_use]
    pub fn state(&self, page: Handle) -> Option<State> {
        self.live.get(&page).copied()
    }

    /// Moves `page` to `after`, or frees it, if it is in a state `from` allows. Whether it did.
    pub fn step(&mut self, page: Handle, from: impl Fn(State) -> bool, after: impl Fn(State) -> Option<State>) -> bool {
        let Some(state) = self.state(page).filter(|&state| from(state)) else { return false };
        match after(state) {
            Some(after) => self.live.insert(page, after),
            None => self.live.remove(&page),
        };
        true
    }

    /// Whether `counts` are the counts of this table.
    #[must_use]
    pub fn agrees_with(&self, counts: Counts) -> bool {
        let count = |wanted: fn(&State) -> bool| {
            u32::try_from(self.live.values().filter(|state| wanted(state)).count()).expect("no more than the total")
        };
        counts.free == self.free_count()
            && counts.filling == count(|state| *state == State::Filling)
            && counts.sealed == count(|state| *state == State::Sealed)
            && counts.leased == count(|state| matches!(state, State::Leased(_)))
            && counts.quarantined == count(|state| *state == State::Quarantined)
            && counts.retired == 0
            && counts.total() == self.total
    }
}
