//! How fast a path completes what it is given.
//!
//! Measured while it is busy: the bytes of a completion over the time since the one before it, or since the path began to
//! work. Old measurements count half as much every [`MEMORY`] of busy time, so a spell of small slices, which says little
//! about the link, is soon outweighed by a large one. On a slow link that is no longer than a slice takes, and slices that
//! are under way together end together: then some of them are looked back at, however long they took.

use crate::time::{Duration, Instant};

/// Busy time after which what was measured counts half.
const MEMORY: Duration = Duration::from_millis(50);
/// What an idle path did so long before others were measured last says nothing any more: it may have been slow while it
/// failed. It is tried again, and the first that it completes then counts alone.
const OLD_SPAN: Duration = Duration::from_secs(5);
/// Completions that are looked back at, at least half of them.
const ENDS_MIN: u32 = 16;
/// Fewer bytes than this say nothing about a rate.
const BYTES_MIN: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    bytes: u64,
    nanos: u64,
    /// Completions that those are of.
    ends: u32,
    busy_since: Instant,
    measured_at: Instant,
    /// It was old when the path got work again.
    was_old: bool,
}

impl Rate {
    pub(super) const UNKNOWN: Self =
        Self { bytes: 0, nanos: 0, ends: 0, busy_since: Instant::ZERO, measured_at: Instant::ZERO, was_old: false };

    /// An idle path gets work.
    pub(super) fn on_busy(&mut self, now: Instant) {
        self.busy_since = now;
        self.was_old = self.is_old(now);
    }

    pub(super) fn on_done(&mut self, now: Instant, bytes: u64) {
        let span = now.since(self.busy_since).as_nanos();
        (self.busy_since, self.measured_at) = (now, now);
        if self.was_old && bytes >= BYTES_MIN {
            (self.bytes, self.nanos, self.ends, self.was_old) = (0, 0, 0, false);
        }
        // A clock that did not advance between two completions: the next span covers both.
        self.bytes = self.bytes.saturating_add(bytes);
        self.nanos = self.nanos.saturating_add(span);
        self.ends += 1;
        if self.nanos > 2 * MEMORY.as_nanos() && self.ends >= ENDS_MIN {
            self.bytes /= 2;
            self.nanos /= 2;
            self.ends /= 2;
        }
    }

    /// Time in which nobody looked whether something was completed is no busy time.
    pub(super) fn on_stopped(&mut self, now: Instant, span: Duration) {
        self.busy_since = (self.busy_since + span).min(now);
    }

    /// When something was completed last.
    pub(super) fn measured_at(&self) -> Instant {
        self.measured_at
    }

    /// Whether it says nothing any more where another path was measured at `newest`.
    pub(super) fn is_old(&self, newest: Instant) -> bool {
        newest.since(self.measured_at) > OLD_SPAN
    }

    /// Bytes per second; `None` before enough was measured.
    pub(super) fn per_second(&self) -> Option<u64> {
        (self.bytes >= BYTES_MIN && self.nanos > 0).then(|| scaled(self.bytes, 1_000_000_000, self.nanos))
    }

    /// Bytes that go through in `span`.
    pub(super) fn bytes_in(&self, span: Duration) -> Option<u64> {
        (self.bytes >= BYTES_MIN && self.nanos > 0).then(|| match self.bytes.checked_mul(span.as_nanos()) {
            Some(product) => product / self.nanos,
            None => scaled(self.bytes, span.as_nanos(), self.nanos),
        })
    }
}

/// `a * b / c` without overflow on the way; `u64::MAX` where the result does not fit.
pub(super) fn scaled(a: u64, b: u64, c: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b) / u128::from(c.max(1));
    u64::try_from(wide).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant::ZERO + Duration::from_micros(micros)
    }

    #[test]
    fn two_slices_under_way_at_once_are_measured_one_after_the_other() {
        let mut rate = Rate::UNKNOWN;
        rate.on_busy(at(0));
        rate.on_done(at(1_000), 1_000_000);
        rate.on_done(at(2_000), 1_000_000);
        assert_eq!(rate.per_second(), Some(1_000_000_000));
        assert_eq!(rate.bytes_in(Duration::from_millis(4)), Some(4_000_000));
    }

    #[test]
    fn time_without_work_does_not_count() {
        let mut rate = Rate::UNKNOWN;
        rate.on_busy(at(0));
        rate.on_done(at(100), 100_000);
        rate.on_busy(at(1_000_000));
        rate.on_done(at(1_000_100), 100_000);
        assert_eq!(rate.per_second(), Some(1_000_000_000));
    }

    #[test]
    fn what_was_long_ago_counts_less() {
        let mut rate = Rate::UNKNOWN;
        rate.on_busy(at(0));
        for millis in 1..=2_000 {
            rate.on_done(at(millis * 1_000), 1_000_000);
        }
        for millis in 2_001..=2_600 {
            rate.on_done(at(millis * 1_000), 4_000_000);
        }
        assert!(rate.per_second().is_some_and(|rate| rate > 3_900_000_000), "{rate:?}");
    }

    #[test]
    fn slices_that_end_together_on_a_slow_link_are_measured_together() {
        let mut rate = Rate::UNKNOWN;
        rate.on_busy(at(0));
        for pair in 1..=200 {
            rate.on_done(at(pair * 500_000), 250_000);
            rate.on_done(at(pair * 500_000), 250_000);
            let known = rate.per_second().unwrap();
            assert!(pair < 4 || (900_000..=1_100_000).contains(&known), "{known} after {pair} pairs");
        }
    }

    #[test]
    fn little_says_nothing() {
        let mut rate = Rate::UNKNOWN;
        rate.on_busy(at(0));
        rate.on_done(at(10), 4096);
        assert_eq!(rate.per_second(), None);
    }
}
