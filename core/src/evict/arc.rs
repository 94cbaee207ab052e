//! ARC: recency and frequency, balanced by what comes back.
//!
//! Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003; all sizes are in bytes
//! here, and the capacity is what is resident when an object comes back.

use super::ghost::{Ghost, Ghosts};
use super::queue::{Entry, Gone, Queues};
use super::{Object, Policy, Residents};
use crate::time::Instant;

/// Used once since it came; ghosts of those that left.
const RECENT: u8 = 0;
/// Used again; ghosts of those that left.
const FREQUENT: u8 = 1;

/// Evicts from the objects used once or from those used again, whichever was seen to matter less: an object that comes
/// back soon after it left one of the two makes room for that one.
///
/// ```
/// use millpond_core::evict::{Arc, Entry, Ghost, Policy};
/// assert_eq!(Arc::new([Entry::EMPTY; 4], [Ghost::EMPTY; 4]).name(), "arc");
/// ```
#[derive(Clone, Debug)]
pub struct Arc<S, G> {
    queues: Queues<S, 2>,
    ghosts: Ghosts<G, 2>,
    /// Bytes that the objects used once should have.
    target_len: u64,
    /// The object stored last came back from the frequent ghosts: a tie then goes against the recent ones.
    frequent_came_back: bool,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>, G: AsRef<[Ghost]> + AsMut<[Ghost]>> Arc<S, G> {
    /// A policy for as many slots as there are `entries`, that remembers as many evictions as there are `ghosts`.
    pub fn new(entries: S, ghosts: G) -> Self {
        Self { queues: Queues::new(entries), ghosts: Ghosts::new(ghosts), target_len: 0, frequent_came_back: false }
    }

    /// By how much one ghost hit of `len` bytes moves the target: more when the other ghosts outweigh `own`.
    fn step(&self, own: u8, len: u64) -> u64 {
        let (own_len, other_len) = (self.ghosts.len(own) + len, self.ghosts.len(1 - own));
        let scaled = u128::from(len) * u128::from(other_len) / u128::from(own_len.max(1));
        u64::try_from(scaled).unwrap_or(u64::MAX).max(len)
    }

    /// Forgets ghosts until recent ones (resident or not) fit the capacity and all together fit twice of it.
    fn trim_ghosts(&mut self, capacity: u64) {
        while self.queues.len(RECENT) + self.ghosts.len(RECENT) > capacity && self.ghosts.forget_oldest(RECENT) {}
        while self.queues.total_len() + self.ghosts.len(RECENT) + self.ghosts.len(FREQUENT) > capacity * 2
            && self.ghosts.forget_oldest(FREQUENT)
        {}
    }
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>, G: AsRef<[Ghost]> + AsMut<[Ghost]>> Policy for Arc<S, G> {
    fn name(&self) -> &'static str {
        "arc"
    }

    fn on_stored(&mut self, now: Instant, slot: u32, object: Object) {
        self.on_removed(now, slot);
        let came_back = self.ghosts.take(object.fingerprint);
        match came_back {
            Some(RECENT) => {
                let step = self.step(RECENT, object.len);
                self.target_len = self.target_len.saturating_add(step).min(self.queues.total_len());
            }
            Some(_) => self.target_len = self.target_len.saturating_sub(self.step(FREQUENT, object.len)),
            None => {}
        }
        self.frequent_came_back = came_back == Some(FREQUENT);
        self.queues.store(if came_back.is_some() { FREQUENT } else { RECENT }, slot, object);
    }

    fn on_used(&mut self, _now: Instant, slot: u32) {
        if self.queues.queue_of(slot).is_some() {
            self.queues.move_front(FREQUENT, slot);
        }
    }

    fn on_removed(&mut self, _now: Instant, slot: u32) {
        if let Gone::Evicted { queue, object } = self.queues.remove(slot) {
            self.ghosts.insert(queue, object, queue);
            self.trim_ghosts(self.queues.total_len().saturating_add(object.len));
        }
    }

    fn on_spared(&mut self, now: Instant, slot: u32) {
        self.queues.spare(slot);
        self.on_used(now, slot);
    }

    fn poll_victim(&mut self, _now: Instant, residents: &dyn Residents) -> Option<u32> {
        let recent_len = self.queues.len(RECENT);
        let recent_first = recent_len > self.target_len || (self.frequent_came_back && recent_len == self.target_len);
        let order = if recent_first { [RECENT, FREQUENT] } else { [FREQUENT, RECENT] };
        order.into_iter().find_map(|queue| self.queues.propose_oldest(queue, residents))
    }

    fn resident_len(&self) -> u64 {
        self.queues.total_len()
    }
}
