//! First in, first out.

use super::queue::{Entry, Queues};
use super::{Object, Policy, Residents};
use crate::time::Instant;

/// Evicts what was stored first, however often it was used. The yardstick for the others.
///
/// ```
/// use millpond_core::evict::{Entry, Fifo, Policy};
/// assert_eq!(Fifo::new([Entry::EMPTY; 4]).name(), "fifo");
/// ```
#[derive(Clone, Debug)]
pub struct Fifo<S> {
    queues: Queues<S, 1>,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Fifo<S> {
    /// A policy for as many slots as there are `entries`.
    pub fn new(entries: S) -> Self {
        Self { queues: Queues::new(entries) }
    }
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Policy for Fifo<S> {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn on_stored(&mut self, _now: Instant, slot: u32, object: Object) {
        self.queues.remove(slot);
        self.queues.store(0, slot, object);
    }

    fn on_used(&mut self, _now: Instant, _slot: u32) {}

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
