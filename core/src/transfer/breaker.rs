//! A circuit breaker: whether a path that fails is left alone for a while.
//!
//! Closed, it counts failures in a row. The third opens it: nothing is sent until a back-off ended, then one probe. A probe
//! that succeeds closes it; one that fails opens it again for twice as long. It does not know what is sent. Invariants: at
//! most one probe at a time; the back-off is within [`BACKOFF_MIN`] and [`BACKOFF_MAX`], and goes back to the former by one
//! halving per [`HEALING_SPAN`] of success.

use crate::time::{Duration, Instant};

/// Failures in a row that open a breaker.
pub const FAILURES_MAX: u8 = 3;
/// The first back-off; doubled each time that a probe fails.
pub const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// The longest back-off.
pub const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// How long a path has to work for its next back-off to be halved.
pub const HEALING_SPAN: Duration = Duration::from_secs(5);

/// Doublings after which the back-off is [`BACKOFF_MAX`]: 20 ms * 2^7 is above 2 s.
const LEVEL_MAX: u8 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { failures: u8 },
    Open { until: Instant },
    Probing,
}

/// What may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allows {
    All,
    /// One small slice, to see.
    Probe,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Breaker {
    state: State,
    level: u8,
    /// When `level` last changed.
    since: Instant,
}

impl Breaker {
    pub(super) const CLOSED: Self = Self { state: State::Closed { failures: 0 }, level: 0, since: Instant::ZERO };

    pub(super) fn allows(&self, now: Instant) -> Allows {
        match self.state {
            State::Closed { .. } => Allows::All,
            State::Open { until } if until <= now => Allows::Probe,
            State::Open { .. } | State::Probing => Allows::Nothing,
        }
    }

    /// Something is sent: the probe, if one was due.
    pub(super) fn on_post(&mut self) {
        if let State::Open { .. } = self.state {
            self.state = State::Probing;
        }
    }

    pub(super) fn on_success(&mut self, now: Instant) {
        self.state = State::Closed { failures: 0 };
        if self.level > 0 && now.since(self.since) >= HEALING_SPAN {
            self.level -= 1;
            self.since = now;
        }
    }

    /// Whether it opened.
    pub(super) fn on_failure(&mut self, now: Instant) -> bool {
        let failures = match self.state {
            State::Closed { failures } => failures + 1,
            State::Probing => FAILURES_MAX,
            // What was sent before it opened.
            State::Open { .. } => return false,
        };
        if failures < FAILURES_MAX {
            self.state = State::Closed { failures };
            return false;
        }
        self.state = State::Open { until: now + self.backoff() };
        self.level = (self.level + 1).min(LEVEL_MAX);
        self.since = now;
        true
    }

    /// What was sent ended without saying anything about the path. A probe is due again.
    pub(super) fn on_nothing(&mut self, now: Instant) {
        if self.state == State::Probing {
            self.state = State::Open { until: now };
        }
    }

    fn backoff(&self) -> Duration {
        BACKOFF_MIN.saturating_mul(1 << self.level).min(BACKOFF_MAX)
    }

    /// When a probe is due, if that is all one waits for.
    pub(super) fn opens_at(&self) -> Instant {
        if let State::Open { until } = self.state { until } else { Instant::NEVER }
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn the_third_failure_in_a_row_opens_it_and_a_success_in_between_does_not_count() {
        let mut breaker = Breaker::CLOSED;
        assert!(!breaker.on_failure(at(0)) && !breaker.on_failure(at(1)));
        breaker.on_success(at(2));
        assert!(!breaker.on_failure(at(3)) && !breaker.on_failure(at(4)) && breaker.on_failure(at(5)));
        assert_eq!((breaker.allows(at(24)), breaker.allows(at(25))), (Allows::Nothing, Allows::Probe));
    }

    #[test]
    fn one_probe_goes_at_a_time_and_a_failed_one_doubles_the_wait() {
        let mut breaker = Breaker::CLOSED;
        let opened = [0; 3].map(|_| breaker.on_failure(at(0)));
        assert_eq!(opened, [false, false, true]);
        breaker.on_post();
        assert_eq!(breaker.allows(at(1_000)), Allows::Nothing, "a probe is under way");
        assert!(breaker.on_failure(at(100)));
        assert_eq!((breaker.allows(at(139)), breaker.allows(at(140))), (Allows::Nothing, Allows::Probe));
        breaker.on_post();
        breaker.on_nothing(at(150));
        assert_eq!(breaker.allows(at(150)), Allows::Probe, "the last one said nothing");
        breaker.on_post();
        breaker.on_success(at(160));
        assert_eq!(breaker.allows(at(160)), Allows::All);
    }

    #[test]
    fn the_wait_is_bounded_and_heals_with_time() {
        let mut breaker = Breaker::CLOSED;
        let opened = [0; 3].map(|_| breaker.on_failure(at(0)));
        assert_eq!(opened, [false, false, true]);
        for _ in 0..20 {
            breaker.on_post();
            breaker.on_failure(at(0));
        }
        assert_eq!(breaker.opens_at(), Instant::ZERO + BACKOFF_MAX);
        // Seven levels heal in seven spans of 5 s.
        for span in 1..=7 {
            breaker.on_success(at(5_000 * span));
        }
        let opened = [0; 3].map(|_| breaker.on_failure(at(40_000)));
        assert_eq!(opened, [false, false, true]);
        assert_eq!(breaker.opens_at(), at(40_020));
    }
}
