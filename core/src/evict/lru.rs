//! Least recently used goes first.

use super::queue::{Entry, Queues};
use super::{Object, Policy, Residents};
use crate::time::Instant;

/// Evicts what was not used for longest. One queue; every use moves to its front.
///
/// ```
/// use millpond_core::evict::{Entry, Lru, Policy};
/// assert_eq!(Lru::new([Entry::EMPTY; 4]).name(), "lru");
/// ```
#[derive(Clone, Debug)]
pub struct Lru<S> {
    queues: Queues<S, 1>,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Lru<S> {
    /// A policy for as many slots as there are `entries`.
    pub fn new(entries: S) -> Self {
        Self { queues: Queues::new(entries) }
    }
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Policy for Lru<S> {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn on_stored(&mut self, _now: Instant, slot: u32, object: Object) {
        self.queues.remove(slot);
        self.queues.store(0, slot, object);
    }

    fn on_used(&mut self, _now: Instant, slot: u32) {
        if self.queues.queue_of(slot).is_some() {
            self.queues.move_front(0, slot);
        }
    }

    fn on_removed(&mut self, _now: Instant, slot: u32) {
        self.queues.remove(slot);
    }

    fn on_spared(&mut self, _now: Instant, slot: u32) {
        self.queues.spare(slot);
    }

    fn poll_victim(&mut self, _now: Instant, residents: &dyn Residents) -> Option<u32> {
        self.queues.propose_oldest(0, residents)
    }

    fn resident_len(&self) -> u64 {
        self.queues.total_len()
    }
}
