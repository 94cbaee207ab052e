//! One path to a peer: whether it is there, how well it works, what is under way on it.
//!
//! A path is a place for connections, one after the other: each is a *generation*, and opening one fences those before it
//! (`quiet`). The path outlives them: its rate and its breaker do too. It chooses nothing. Invariants: load is what was
//! posted and not finished; while writes of a lost generation may still land the path is in doubt, until it is opened
//! again or fenced otherwise.

use super::breaker::{Allows, Breaker};
use super::rate::{Rate, scaled};
use super::window::{Credit, Limits, Load, Window};
use super::{Config, Transport, Verdict};
use crate::seeded::{Bug, on};
use crate::time::{Duration, Instant};

/// A slice is as long as the path moves in this time, within its bounds.
pub const SLICE_SPAN: Duration = Duration::from_millis(4);
/// First wait after a failed dial; doubled up to [`REDIAL_MAX`].
pub const REDIAL_MIN: Duration = Duration::from_millis(20);
/// Longest wait after a failed dial.
pub const REDIAL_MAX: Duration = Duration::from_millis(500);

/// Who connects a path, and when.
///
/// Example: [`PathSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dialling {
    /// We do, when there is work for it.
    Ours,
    /// We do, when there is work for its transport, also while other paths of it work: it is another way there, over another
    /// NIC or to another address.
    OursBeside,
    /// We do, when the other paths of its transport are busy.
    OursWhenBusy,
    /// The peer does.
    Theirs,
}

/// What is known of a path before it is open.
///
/// ```
/// use millpond_core::transfer::{Credit, Dialling, PathSpec, Transport};
/// let tcp = Transport::new(1).unwrap();
/// let mut second_lane = PathSpec::new(tcp, 1);
/// second_lane.dialling = Dialling::OursWhenBusy;
/// assert!(second_lane.slice_len_min <= second_lane.slice_len_max);
/// assert_eq!(second_lane.credit, Credit::UNLIMITED);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathSpec {
    /// Its transport.
    pub transport: Transport,
    /// Smaller is better: a rank is used while a path of it works, even if its windows are full.
    pub rank: u8,
    /// Who connects it.
    pub dialling: Dialling,
    /// What may be under way on it. 64 MiB, 2^18 moves, 256 slices.
    pub window: Window,
    /// Shortest slice worth its overhead, unless the job has no more; also the length of a probe. 256 KiB.
    pub slice_len_min: u64,
    /// Longest slice. 16 MiB.
    pub slice_len_max: u64,
    /// Moves of one slice, at most. 1024.
    pub slice_moves_max: u32,
    /// What the receiver takes on a new connection before it gives more.
    pub credit: Credit,
}

impl PathSpec {
    /// The window of a path unless told otherwise.
    pub const WINDOW: Window = Window { bytes: 64 << 20, moves: 1 << 18, slices: 256 };

    /// A path that we dial, with the defaults.
    #[must_use]
    pub const fn new(transport: Transport, rank: u8) -> Self {
        Self {
            transport,
            rank,
            dialling: Dialling::Ours,
            window: Self::WINDOW,
            slice_len_min: 256 << 10,
            slice_len_max: 16 << 20,
            slice_moves_max: 1024,
            credit: Credit::UNLIMITED,
        }
    }
}

/// Why a path is closed.
///
/// ```
/// use millpond_core::transfer::PathDown;
/// assert_eq!(PathDown::Stalled.to_string(), "nothing moved on it while another path worked");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PathDown {
    /// Nothing moved on it for the stall span while the peer has another path.
    Stalled,
    /// A cancelled slice did not end within its grace.
    CancelLate,
}

impl core::fmt::Display for PathDown {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Stalled => "nothing moved on it while another path worked",
            Self::CancelLate => "a cancelled slice did not end in time",
        })
    }
}

/// Writes that may still land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doubt {
    /// Jobs from that number on came later: their writes wait.
    pub(super) before: u64,
    /// The newest generation that such a write went over.
    generation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not connected; `is_dialling`: somebody was asked to.
    Down {
        is_dialling: bool,
    },
    Open,
    /// It is to be closed; nothing more is posted.
    Closing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) spec: PathSpec,
    pub(super) state: State,
    /// Of the connection that is open, or was last; 0 before the first.
    pub(super) generation: u64,
    /// Generations below it are fenced.
    pub(super) fenced_below: u64,
    /// Set while writes of a generation that is not fenced may still land.
    pub(super) doubt: Option<Doubt>,
    pub(super) load: Load,
    credit: Credit,
    /// Since this generation opened: bytes and slices.
    sent: Credit,
    pub(super) rate: Rate,
    pub(super) breaker: Breaker,
    pub(super) last_progress: Instant,
    /// The device said it is full; until something ends there, or that instant.
    full_until: Instant,
    failed_dials: u32,
    redial_at: Instant,
    failing_since: Option<Instant>,
    /// The last dial was refused: nobody listened.
    is_refused: bool,
}

impl Path {
    pub(super) const fn new(spec: PathSpec) -> Self {
        Self {
            spec,
            state: State::Down { is_dialling: false },
            generation: 0,
            fenced_below: 0,
            doubt: None,
            load: Load::NONE,
            credit: spec.credit,
            sent: Credit { bytes: 0, slices: 0 },
            rate: Rate::UNKNOWN,
            breaker: Breaker::CLOSED,
            last_progress: Instant::ZERO,
            full_until: Instant::ZERO,
            failed_dials: 0,
            redial_at: Instant::ZERO,
            failing_since: None,
            is_refused: false,
        }
    }

    pub(super) fn on_open(&mut self, now: Instant) {
        self.fence(self.generation);
        self.state = State::Open;
        self.generation += 1;
        self.credit = self.spec.credit;
        self.sent = Credit { bytes: 0, slices: 0 };
        self.full_until = Instant::ZERO;
        self.last_progress = now;
        (self.failed_dials, self.redial_at, self.failing_since) = (0, Instant::ZERO, None);
        self.is_refused = false;
    }

    /// Nothing of `generation` and those before it lands any more.
    pub(super) fn fence(&mut self, generation: u64) {
        // Of generations to come nobody knows anything.
        self.fenced_below = self.fenced_below.max(generation.min(self.generation) + 1);
        self.doubt = self.doubt.filter(|doubt| doubt.generation >= self.fenced_below);
    }

    /// A write of `generation` may still land. `next_job`: the number of the next job that is submitted.
    pub(super) fn on_doubt(&mut self, generation: u64, next_job: u64) {
        let doubt = self.doubt.get_or_insert(Doubt { before: next_job, generation });
        doubt.generation = doubt.generation.max(generation);
    }

    pub(super) fn on_down(&mut self) {
        self.state = State::Down { is_dialling: false };
    }

    /// `chance` is any number, another each time: the wait is between a half of what its doubling gives and the whole.
    pub(super) fn on_dial_failed(&mut self, now: Instant, is_refused: bool, chance: u64) {
        self.is_refused = is_refused;
        if let State::Down { is_dialling } = &mut self.state {
            *is_dialling = false;
        }
        let wait = REDIAL_MIN.saturating_mul(1 << self.failed_dials.min(5)).min(REDIAL_MAX);
        self.failed_dials = self.failed_dials.saturating_add(1);
        self.failing_since.get_or_insert(now);
        let half = wait.as_nanos() / 2;
        self.redial_at = now + Duration::from_nanos(half + scaled(half, chance >> 32, 1 << 32));
    }

    /// Whether it should be dialled now.
    pub(super) fn wants_dial(&self, now: Instant) -> bool {
        let is_ours = !matches!(self.spec.dialling, Dialling::Theirs);
        is_ours && self.state == State::Down { is_dialling: false } && self.redial_at <= now
    }

    /// Whether nobody listens at its other end, as far as is known before the next dial.
    pub(super) fn is_refused(&self, now: Instant) -> bool {
        self.is_refused && self.state == State::Down { is_dialling: false } && self.redial_at > now
    }

    /// When it may be dialled again.
    pub(super) fn redial_at(&self, now: Instant) -> Instant {
        let waits = self.state == State::Down { is_dialling: false } && self.redial_at > now;
        if waits { self.redial_at } else { Instant::NEVER }
    }

    /// Whether dialling it has failed for `deadline`; for one that only the peer dials, whether none came in that time.
    pub(super) fn is_hopeless(&self, now: Instant, heard_at: Instant, deadline: Duration) -> bool {
        if !matches!(self.state, State::Down { .. }) {
            return false;
        }
        match self.spec.dialling {
            Dialling::Theirs => now.since(heard_at) >= deadline,
            _ => self.failing_since.is_some_and(|since| now.since(since) >= deadline),
        }
    }

    /// When dialling it will have failed for long enough.
    pub(super) fn hopeless_at(&self, config: &Config) -> Instant {
        self.failing_since.map_or(Instant::NEVER, |since| since + config.connect_deadline)
    }

    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// What may be posted here now: whether it takes part, and if so what fits.
    pub(super) fn room(&self, now: Instant, wanted: Wanted) -> Result<Limits, Verdict> {
        if !self.is_open() {
            return Err(Verdict::NotOpen);
        }
        let allows = self.breaker.allows(now);
        if allows == Allows::Nothing || (allows == Allows::Probe && self.load.slices > 0) {
            return Err(Verdict::Backoff);
        }
        let has_credit = self.credit.admits(self.sent) || on(Bug::TransferIgnoresCredit);
        if self.full_until > now || !has_credit {
            return Err(Verdict::Full);
        }
        match wanted {
            Wanted::Cut { bytes } => {
                let len = if allows == Allows::Probe { self.spec.slice_len_min } else { self.slice_len() };
                let limits = Limits { bytes: len.max(1), moves: self.spec.slice_moves_max };
                self.spec.window.limit(self.load, bytes, limits).ok_or(Verdict::Full)
            }
            Wanted::Whole(load) if self.spec.window.fits(self.load, load) => {
                Ok(Limits { bytes: load.bytes, moves: load.moves })
            }
            Wanted::Whole(_) => Err(Verdict::Full),
        }
    }

    fn slice_len(&self) -> u64 {
        let (min, max) = (self.spec.slice_len_min, self.spec.slice_len_max);
        self.rate.bytes_in(SLICE_SPAN).map_or(max, |len| len.max(min).min(max))
    }

    /// Its bytes per second, beside paths of which the last was measured at `newest`; `None`: not known, or not any more.
    pub(super) fn rate_beside(&self, newest: Instant) -> Option<u64> {
        let is_old = self.load.slices == 0 && self.rate.is_old(newest);
        self.rate.per_second().filter(|_| !is_old)
    }

    /// Nanoseconds until `bytes` more are through at so many a second.
    pub(super) fn done_in(&self, bytes: u64, rate: u64) -> u64 {
        scaled(self.load.bytes.saturating_add(bytes), 1_000_000_000, rate)
    }

    pub(super) fn on_post(&mut self, now: Instant, load: Load) {
        if self.load.slices == 0 {
            self.rate.on_busy(now);
            self.last_progress = now;
        }
        self.breaker.on_post();
        self.on_more(load);
    }

    /// What was posted turns out to be that much more.
    pub(super) fn on_more(&mut self, load: Load) {
        self.load.add(load);
        self.sent.bytes = self.sent.bytes.saturating_add(load.bytes);
        self.sent.slices = self.sent.slices.saturating_add(u64::from(load.slices));
    }

    /// It did not go out after all. `full_until`: nothing else does either, before something ends there.
    pub(super) fn on_not_posted(&mut self, now: Instant, load: Load, full_until: Instant) {
        self.load.sub(load);
        self.sent.bytes = self.sent.bytes.saturating_sub(load.bytes);
        self.sent.slices = self.sent.slices.saturating_sub(u64::from(load.slices));
        self.full_until = full_until;
        self.breaker.on_nothing(now);
    }

    pub(super) fn on_finished(&mut self, now: Instant, load: Load, done: Load) {
        self.load.sub(load);
        self.full_until = Instant::ZERO;
        self.rate.on_done(now, done.bytes);
    }

    /// Nobody looked for `span`, which ends now.
    pub(super) fn on_stopped(&mut self, now: Instant, span: Duration) {
        self.last_progress = (self.last_progress + span).min(now);
        self.failing_since = self.failing_since.map(|since| (since + span).min(now));
        self.rate.on_stopped(now, span);
    }

    pub(super) fn on_credit(&mut self, credit: Credit) {
        self.credit.raise_to(credit);
    }

    pub(super) fn full_until(&self) -> Instant {
        if self.full_until == Instant::ZERO { Instant::NEVER } else { self.full_until }
    }
}

/// What room is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    /// A new slice, of a job that has that many bytes left.
    Cut { bytes: u64 },
    /// A slice as it is.
    Whole(Load),
}
