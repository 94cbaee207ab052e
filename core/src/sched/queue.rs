//! The line before one prefill instance: what waits, in which order, and for how long.
//!
//! The router keeps one per instance from what it sent there, the instance itself keeps another from what it got; both
//! order it by the same [`Order`]. Times are predictions; the line never looks at a clock.
//!
//! Invariant: entries are sorted by rank, those of equal rank in the order in which they came.

use alloc::collections::VecDeque;

use crate::time::{Duration, Instant};

/// In which order a line is served.
///
/// ```
/// use millpond_core::sched::queue::Order;
/// use millpond_core::time::{Duration, Instant};
/// let second = Duration::from_secs(1);
/// // Whoever takes a second more lets those pass who come up to two seconds later.
/// let order = Order::ShortFirst { patience: 2.0, limit: Duration::from_secs(10) };
/// let (now, later) = (Instant::ZERO, Instant::ZERO + Duration::from_secs(2));
/// assert_eq!(order.rank(now, second), order.rank(later, Duration::ZERO));
/// assert_eq!(order.rank(now, Duration::from_secs(6)), order.rank(now, Duration::ZERO));
/// assert_eq!(Order::Fifo.rank(Instant::from_nanos(5), second), 5);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Order {
    /// First come, first served.
    #[default]
    Fifo,
    /// Shorter work first, within bounds: a request is ranked by its arrival plus `patience` times its own length, so it is
    /// passed only by those that arrive that much later. Long work keeps its place: it takes long enough as it is.
    ShortFirst {
        /// Seconds that a request lets others overtake it in, per second that it takes itself.
        patience: f64,
        /// Who would be overtaken for longer than that is not overtaken at all.
        limit: Duration,
    },
}

impl Order {
    /// What `millpond` serves by: requests of up to two seconds are passed by shorter ones. Found on the conversation trace
    /// at 1.5 times its speed: a longer limit gains a percent in the mean and loses as much in the 99th percentile.
    pub const SHORT_FIRST: Self = Self::ShortFirst { patience: 4.0, limit: Duration::from_secs(8) };

    /// The rank of a request that arrived `at` and takes `cost`; lower is served earlier.
    #[must_use]
    pub fn rank(self, at: Instant, cost: Duration) -> u64 {
        match self {
            Self::Fifo => at.as_nanos(),
            Self::ShortFirst { patience, limit } => {
                let own = nanos(patience * cost.as_nanos() as f64);
                at.as_nanos().saturating_add(if own > limit.as_nanos() { 0 } else { own })
            }
        }
    }
}

/// Whole nanoseconds, rounded down; zero for what is negative or not a number.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
pub(crate) const fn nanos(value: f64) -> u64 {
    value as u64
}

/// A request in a line.
///
/// Example: [`Line`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The caller's name for it.
    pub id: u64,
    /// From [`Order::rank`].
    pub rank: u64,
    /// How long it is predicted to take.
    pub cost: Duration,
}

/// What a request would find in a line, and do to it.
///
/// Example: [`Line`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// Until what is served before it is done.
    pub wait: Duration,
    /// Requests that it would push back.
    pub behind: u32,
}

/// The requests before one instance.
///
/// ```
/// use millpond_core::sched::queue::{Line, Waiting};
/// use millpond_core::time::{Duration, Instant};
/// let mut line = Line::default();
/// let second = Duration::from_secs(1);
/// line.on_busy(Instant::ZERO + second); // it works on something until then
/// line.push(Waiting { id: 1, rank: 10, cost: second });
/// line.push(Waiting { id: 2, rank: 30, cost: second });
/// let found = line.ahead(Instant::ZERO, 20);
/// assert_eq!((found.wait, found.behind), (Duration::from_secs(2), 1));
/// assert_eq!(line.take(|_| true).map(|first| first.id), Some(1));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Line {
    waiting: VecDeque<Waiting>,
    total: Duration,
    busy_until: Instant,
}

impl Line {
    /// Adds a request.
    pub fn push(&mut self, new: Waiting) {
        let place = self.waiting.partition_point(|old| old.rank <= new.rank);
        self.waiting.insert(place, new);
        self.total = self.total + new.cost;
    }

    /// What the instance works on is predicted to end then.
    pub const fn on_busy(&mut self, until: Instant) {
        self.busy_until = until;
    }

    /// When what the instance works on is predicted to end; in the past if it does nothing.
    #[must_use]
    pub const fn busy_until(&self) -> Instant {
        self.busy_until
    }

    /// Takes out the first request that `may` start. O(those before it).
    pub fn take(&mut self, mut may: impl FnMut(&Waiting) -> bool) -> Option<Waiting> {
        let place = self.waiting.iter().position(&mut may)?;
        let taken = self.waiting.remove(place)?;
        self.total = self.total - taken.cost;
        Some(taken)
    }

    /// What a request of that rank would find. O(those of lower rank, or the rest, whichever is longer).
    #[must_use]
    pub fn ahead(&self, now: Instant, rank: u64) -> Ahead {
        let residual = self.busy_until.since(now);
        let place = self.waiting.partition_point(|old| old.rank <= rank);
        let after = self.waiting.range(place..).fold(Duration::ZERO, |sum, old| sum + old.cost);
        let behind = u32::try_from(self.waiting.len() - place).unwrap_or(u32::MAX);
        Ahead { wait: residual + (self.total - after), behind }
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(id: u64, rank: u64, nanos: u64) -> Waiting {
        Waiting { id, rank, cost: Duration::from_nanos(nanos) }
    }

    #[test]
    fn equal_ranks_are_served_in_the_order_they_came() {
        let mut line = Line::default();
        [(1, 5), (2, 5), (3, 4), (4, 5)].into_iter().for_each(|(id, rank)| line.push(waiting(id, rank, 1)));
        let order: [u64; 4] = core::array::from_fn(|_| line.take(|_| true).unwrap().id);
        assert_eq!(order, [3, 1, 2, 4]);
        assert!(line.is_empty() && line.ahead(Instant::ZERO, 9) == Ahead::default());
    }

    #[test]
    fn the_wait_is_what_is_left_of_the_present_work_and_all_that_goes_first() {
        let mut line = Line::default();
        line.on_busy(Instant::from_nanos(100));
        [(1, 10, 7), (2, 20, 11), (3, 30, 13)]
            .into_iter()
            .for_each(|(id, rank, cost)| line.push(waiting(id, rank, cost)));
        let at = |now, rank| line.ahead(Instant::from_nanos(now), rank);
        assert_eq!(at(60, 20), Ahead { wait: Duration::from_nanos(40 + 7 + 11), behind: 1 });
        assert_eq!(at(160, 5), Ahead { wait: Duration::ZERO, behind: 3 });
    }

    #[test]
    fn who_may_not_start_is_passed_over_and_keeps_its_place() {
        let mut line = Line::default();
        [(1, 1), (2, 2), (3, 3)].into_iter().for_each(|(id, rank)| line.push(waiting(id, rank, 1)));
        assert_eq!(line.take(|first| first.id != 1).map(|taken| taken.id), Some(2));
        assert_eq!(line.take(|_| true).map(|taken| taken.id), Some(1));
        assert_eq!(line.len(), 1);
    }
}
