//! Least often used goes first; among equals, the least recently used.

use super::queue::{Entry, Queues};
use super::{Object, Policy, Residents};
use crate::time::Instant;

/// Uses are counted up to here; one queue for each count.
const COUNT_MAX: u8 = 63;

/// Evicts what was used least often while resident. Counts stop at 63 and do not age: good for a fixed popular set, bad
/// when popularity moves.
///
/// ```
/// use millpond_core::evict::{Entry, Lfu, Policy};
/// assert_eq!(Lfu::new([Entry::EMPTY; 4]).name(), "lfu");
/// ```
#[derive(Clone, Debug)]
pub struct Lfu<S> {
    queues: Queues<S, { COUNT_MAX as usize + 1 }>,
    /// Which queues may have something in them.
    filled: u64,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Lfu<S> {
    /// A policy for as many slots as there are `entries`.
    pub fn new(entries: S) -> Self {
        Self { queues: Queues::new(entries), filled: 0 }
    }
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Policy for Lfu<S> {
    fn name(&self) -> &'static str {
        "lfu"
    }

    fn on_stored(&mut self, _now: Instant, slot: u32, object: Object) {
        self.queues.remove(slot);
        self.queues.store(0, slot, object);
        self.filled |= 1;
    }

    fn on_used(&mut self, _now: Instant, slot: u32) {
        if let Some(count) = self.queues.queue_of(slot) {
            let count = (count + 1).min(COUNT_MAX);
            self.queues.move_front(count, slot);
            self.filled |= 1 << count;
        }
    }

    fn on_removed(&mut self, _now: Instant, slot: u32) {
        self.queues.remove(slot);
    }

    fn on_spared(&mut self, now: Instant, slot: u32) {
        self.queues.spare(slot);
        self.filled |= self.queues.queue_of(slot).map_or(0, |count| 1 << count);
        self.on_used(now, slot);
    }

    fn poll_victim(&mut self, _now: Instant, residents: &dyn Residents) -> Option<u32> {
        let mut untried = self.filled;
        // At most one turn for each count.
        while untried != 0 {
            let count = untried.trailing_zeros().to_le_bytes()[0];
            untried &= untried - 1;
            if let Some(victim) = self.queues.propose_oldest(count, residents) {
                return Some(victim);
            }
            if self.queues.count(count) == 0 {
                self.filled &= !(1 << count);
            }
        }
        None
    }

    fn resident_len(&self) -> u64 {
        self.queues.total_len()
    }
}
