//! S3-FIFO: a small queue on probation, a main queue, and a memory of what left the small one.
//!
//! Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; sizes are in bytes here.

use super::ghost::{Ghost, Ghosts};
use super::queue::{Entry, Gone, Queues};
use super::{Object, Policy, Residents};
use crate::time::Instant;

const SMALL: u8 = 0;
const MAIN: u8 = 1;
/// The small queue's share of the resident bytes, as a divisor.
const SMALL_DIVISOR: u64 = 10;
const MARK_MAX: u8 = 3;

/// Evicts what was not used again soon after it came. New objects wait in a small queue of a tenth of the bytes; those
/// used twice there, or that come back soon after they left it, go to the main queue, where each use saves one round.
///
/// ```
/// use millpond_core::evict::{Entry, Ghost, Policy, S3Fifo};
/// assert_eq!(S3Fifo::new([Entry::EMPTY; 4], [Ghost::EMPTY; 4]).name(), "s3-fifo");
/// ```
#[derive(Clone, Debug)]
pub struct S3Fifo<S, G> {
    queues: Queues<S, 2>,
    ghosts: Ghosts<G, 1>,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>, G: AsRef<[Ghost]> + AsMut<[Ghost]>> S3Fifo<S, G> {
    /// A policy for as many slots as there are `entries`, that remembers as many evictions as there are `ghosts`.
    pub fn new(entries: S, ghosts: G) -> Self {
        Self { queues: Queues::new(entries), ghosts: Ghosts::new(ghosts) }
    }

    /// Looks at the oldest of the queue whose turn it is.
    fn turn(&mut self) -> Turn {
        let small_is_over = self.queues.len(SMALL) > self.queues.total_len() / SMALL_DIVISOR;
        let first = if small_is_over { [SMALL, MAIN] } else { [MAIN, SMALL] };
        let Some(slot) = first.into_iter().find_map(|queue| self.queues.back(queue)) else { return Turn::Empty };
        let is_small = self.queues.queue_of(slot) == Some(SMALL);
        let entry = self.queues.entry_mut(slot);
        if entry.mark <= u8::from(is_small) {
            return Turn::Named(slot);
        }
        entry.mark = if is_small { 0 } else { entry.mark - 1 };
        self.queues.move_front(MAIN, slot);
        Turn::Passed
    }
}

/// What one look at a queue's oldest object came to.
enum Turn {
    /// It goes.
    Named(u32),
    /// It was used; it moved on.
    Passed,
    /// Nothing is queued.
    Empty,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>, G: AsRef<[Ghost]> + AsMut<[Ghost]>> Policy for S3Fifo<S, G> {
    fn name(&self) -> &'static str {
        "s3-fifo"
    }

    fn on_stored(&mut self, now: Instant, slot: u32, object: Object) {
        self.on_removed(now, slot);
        let came_back = self.ghosts.take(object.fingerprint).is_some();
        self.queues.store(if came_back { MAIN } else { SMALL }, slot, object);
    }

    fn on_used(&mut self, _now: Instant, slot: u32) {
        if self.queues.queue_of(slot).is_some() {
            let entry = self.queues.entry_mut(slot);
            entry.mark = (entry.mark + 1).min(MARK_MAX);
        }
    }

    fn on_removed(&mut self, _now: Instant, slot: u32) {
        if let Gone::Evicted { queue: SMALL, object } = self.queues.remove(slot) {
            self.ghosts.insert(0, object, 0);
            // As many bytes are remembered as the main queue's share.
            let resident_len = self.queues.total_len();
            let remembered_len_max = resident_len - resident_len / SMALL_DIVISOR;
            while self.ghosts.len(0) > remembered_len_max && self.ghosts.forget_oldest(0) {}
        }
    }

    fn on_spared(&mut self, now: Instant, slot: u32) {
        self.queues.spare(slot);
        self.on_used(now, slot);
    }

    fn poll_victim(&mut self, _now: Instant, residents: &dyn Residents) -> Option<u32> {
        // Each turn that names nothing lowers a mark (at most 3 for each object) or passes what may not go.
        let turns = u64::from(self.queues.count(SMALL) + self.queues.count(MAIN)) * (u64::from(MARK_MAX) + 2);
        for _ in 0..turns {
            let candidate = match self.turn() {
                Turn::Named(slot) => slot,
                Turn::Passed => continue,
                Turn::Empty => return None,
            };
            if let Some(victim) = self.queues.victim_for(candidate, residents) {
                self.queues.propose(victim);
                return Some(victim);
            }
            self.queues.move_front(MAIN, candidate);
        }
        None
    }

    fn resident_len(&self) -> u64 {
        self.queues.total_len()
    }
}
