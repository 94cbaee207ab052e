//! SIEVE: a queue in order of arrival and a hand that passes over what was used.
//!
//! Source: Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.

use super::queue::{Entry, Queues};
use super::{Object, Policy, Residents};
use crate::time::Instant;

/// Evicts what the hand meets unused; a use saves an object from one pass. Objects never move, so a use costs one write.
///
/// ```
/// use millpond_core::evict::{Entry, Policy, Sieve};
/// assert_eq!(Sieve::new([Entry::EMPTY; 4]).name(), "sieve");
/// ```
#[derive(Clone, Debug)]
pub struct Sieve<S> {
    queues: Queues<S, 1>,
    /// The next slot to look at; `None` starts at the back.
    hand: Option<u32>,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Sieve<S> {
    /// A policy for as many slots as there are `entries`.
    pub fn new(entries: S) -> Self {
        Self { queues: Queues::new(entries), hand: None }
    }

    /// Moves the hand off `slot`, which is about to leave the queue.
    fn leave(&mut self, slot: u32) {
        if self.hand == Some(slot) {
            self.hand = self.queues.younger(slot);
        }
    }
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>> Policy for Sieve<S> {
    fn name(&self) -> &'static str {
        "sieve"
    }

    fn on_stored(&mut self, now: Instant, slot: u32, object: Object) {
        self.on_removed(now, slot);
        self.queues.store(0, slot, object);
    }

    fn on_used(&mut self, _now: Instant, slot: u32) {
        if self.queues.queue_of(slot).is_some() {
            self.queues.entry_mut(slot).mark = 1;
        }
    }

    fn on_removed(&mut self, _now: Instant, slot: u32) {
        self.leave(slot);
        self.queues.remove(slot);
    }

    fn on_spared(&mut self, now: Instant, slot: u32) {
        self.queues.spare(slot);
        self.on_used(now, slot);
    }

    fn poll_victim(&mut self, _now: Instant, residents: &dyn Residents) -> Option<u32> {
        // The first round may only take marks back; the second finds what was not used, if it may go.
        for _ in 0..2 * u64::from(self.queues.count(0)) {
            let candidate = self.hand.or_else(|| self.queues.back(0))?;
            let is_marked = core::mem::take(&mut self.queues.entry_mut(candidate).mark) != 0;
            if !is_marked && let Some(victim) = self.queues.victim_for(candidate, residents) {
                self.leave(victim);
                self.queues.propose(victim);
                return Some(victim);
            }
            self.hand = self.queues.younger(candidate);
        }
        None
    }

    fn resident_len(&self) -> u64 {
        self.queues.total_len()
    }
}
