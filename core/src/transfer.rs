//! The transfer scheduler: which bytes of a batch go over which path, when they are tried again, and when they are given up.
//!
//! A caller [submits](Scheduler::submit) *jobs*: what one batch moves to or from one peer. The scheduler cuts a job into
//! *slices*, each posted as one frame on one *path* (a lane, a queue pair, a NIC), and says through
//! [`Action`]s what is to be done: post, cancel, close, dial, report. It is not a transport: it moves no byte, dials
//! nothing, knows no clock and sees no memory; the moves themselves stay with the caller, who carves them
//! ([`carve`]) when a slice is posted and keeps the account of each request in a [`Tally`].
//!
//! How it decides:
//! - *Between classes* by weight, in bytes ([`Class`]); within a class in order of arrival.
//! - *Between paths* by rank first (a transport that is better is used while it works), then by who would be done first:
//!   what is under way there, over the measured completion rate. A path whose breaker is open is left alone, then probed.
//! - *Slices* are as long as a path moves in [`SLICE_SPAN`], within the bounds of its transport; many small moves travel as
//!   one slice.
//! - *Windows* in bytes, moves and slices bound what is under way per path and per peer, and credit what the receiver takes;
//!   the receiver's side of it is [`Takings`] and [`Grant`].
//! - *A failed slice* goes to the same path, another path of its transport, another transport, in that order, four
//!   times at most and within the peer's budget; also when the post itself was refused. Work without a path waits for one
//!   until its own deadline.
//! - *Ends* have two ends: a job is over when nothing of it is under way here, and one that is done only when no earlier
//!   attempt of it can land any more. While a lost path is not fenced, writes of jobs that were submitted later wait.
//!
//! Invariants, checked by the driver in `fuzz/src/transfer.rs` over random histories: every job ends exactly once, and not
//! while a slice of it is posted; a completion that is late, unknown or a duplicate changes nothing but a counter; windows
//! and credit are never exceeded; when all jobs ended, nothing is under way anywhere.
//!
//! Nothing allocates: jobs, slices and peers live in tables of the caller. Every input is O(paths) plus what it touches,
//! except [`Scheduler::on_timer`] and the opening of a path that was in doubt, which look at the tables as a whole.

mod breaker;
mod explain;
mod grant;
mod job;
mod lapse;
mod path;
mod peer;
mod poll;
mod rate;
mod report;
mod scheduler;
mod share;
mod tally;
mod window;

#[cfg(test)]
mod tests;

pub use self::breaker::{BACKOFF_MAX, BACKOFF_MIN, FAILURES_MAX, HEALING_SPAN};
pub use self::explain::{Explanation, Verdict, Why};
pub use self::grant::{Grant, Overrun, Takings};
pub use self::job::{Job, JobSpec, Slice};
pub use self::lapse::{LAPSE_MIN, Lapse};
pub use self::path::{Dialling, PathDown, PathSpec, REDIAL_MAX, REDIAL_MIN, SLICE_SPAN};
pub use self::peer::Peer;
pub use self::report::{Answer, Counters, Cut, Fault, Finished, Outcome, Posting, Refusal, SubmitError, UnknownPeer};
pub use self::scheduler::Scheduler;
pub use self::share::SLICE_COST;
pub use self::tally::{Carved, Status, Tally, carve};
pub use self::window::{Credit, Limits, Load, Window};

use crate::quiet::Far;
use crate::slab::Handle;
use crate::time::Duration;

/// Paths that one peer may have, open or not.
pub const PATHS_PER_PEER_MAX: usize = 16;
/// Transports that one scheduler tells apart.
pub const TRANSPORTS_MAX: usize = 7;
/// Retries that a peer's budget holds when it is full.
pub const RETRY_BUDGET_MAX: u32 = 1024;
/// Finished slices that earn one retry.
pub const SLICES_PER_RETRY: u32 = 4;

const CLASSES: usize = 3;

/// What a job is for. Jobs of different classes share a peer's paths by weight, those of one class in order of arrival.
///
/// ```
/// use millpond_core::transfer::Class;
/// assert_eq!(Class::ALL.map(Class::weight), [8, 2, 1]); // shares of the bytes while all of them have work
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Class {
    /// Somebody waits for it: KV pages of a running request.
    #[default]
    Foreground,
    /// Nobody waits yet: prefetch, write-back.
    Background,
    /// Large and patient: weights, draining, repair.
    Bulk,
}

impl Class {
    /// All classes, the most urgent first.
    pub const ALL: [Self; CLASSES] = [Self::Foreground, Self::Background, Self::Bulk];

    /// Its share of the bytes while others have work too.
    #[must_use]
    pub const fn weight(self) -> u64 {
        match self {
            Self::Foreground => 8,
            Self::Background => 2,
            Self::Bulk => 1,
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::Foreground => 0,
            Self::Background => 1,
            Self::Bulk => 2,
        }
    }
}

/// A transport, by a small number of the caller's choice.
///
/// ```
/// use millpond_core::transfer::{TRANSPORTS_MAX, Transport};
/// assert_eq!(Transport::new(2).unwrap().index(), 2);
/// assert_eq!(Transport::new(TRANSPORTS_MAX), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Transport(u8);

impl Transport {
    /// The transport with that number; `None` if it is [`TRANSPORTS_MAX`] or more.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // below 7
    pub const fn new(index: usize) -> Option<Self> {
        if index < TRANSPORTS_MAX { Some(Self(index as u8)) } else { None }
    }

    /// Its number.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One of a peer's paths.
///
/// ```
/// use millpond_core::transfer::{PATHS_PER_PEER_MAX, PathId};
/// assert_eq!(PathId::new(3).unwrap().index(), 3);
/// assert_eq!(PathId::new(PATHS_PER_PEER_MAX), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(u8);

impl PathId {
    /// The path with that number; `None` if it is [`PATHS_PER_PEER_MAX`] or more.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // below 16
    pub const fn new(index: usize) -> Option<Self> {
        if index < PATHS_PER_PEER_MAX { Some(Self(index as u8)) } else { None }
    }

    /// Its number.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    const fn bit(self) -> u16 {
        1 << self.0
    }
}

/// Which transport a job may take.
///
/// Example: [`Scheduler`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Asked {
    /// The best one that works.
    #[default]
    Any,
    /// That one, or the job fails within the connect deadline.
    Only(Transport),
}

impl Asked {
    const fn queue(self) -> usize {
        match self {
            Self::Any => 0,
            Self::Only(transport) => transport.index() + 1,
        }
    }
}

/// Why something of a job did not end well.
///
/// ```
/// use millpond_core::transfer::Cause;
/// assert!(Cause::NoProgress.to_string().contains("progress deadline"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// Somebody cancelled the job.
    Cancelled,
    /// Its deadline came first.
    Deadline,
    /// Nothing of it moved for its progress deadline.
    NoProgress,
    /// The path broke, and it had been tried often enough.
    PathLost,
    /// The path broke, and the peer's budget of retries is spent.
    RetriesSpent,
    /// The path broke when a slice that may not be repeated could have been applied.
    NotRepeatable,
    /// All bytes arrived, but an earlier attempt could not be fenced in time: it may still land.
    Unfenced,
    /// The peer has no path of the transport asked for.
    NoPath,
    /// The transport asked for could not be connected within the connect deadline.
    CannotConnect,
    /// The peer is gone for good: restarted, or given up by the caller.
    PeerGone,
    /// The scheduler was shut down.
    ShutDown,
}

impl core::fmt::Display for Cause {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Cancelled => "it was cancelled",
            Self::Deadline => "its deadline came before its end; give it longer or move less at once",
            Self::NoProgress => "nothing moved within the progress deadline; the peer is stopped, gone or cut off",
            Self::PathLost => "its path broke and no other could take over; open the peer again",
            Self::RetriesSpent => {
                "its path broke and the peer's retry budget is spent; wait until some transfers succeed"
            }
            Self::NotRepeatable => "its path broke when it may have been applied, and it must not be applied twice",
            Self::Unfenced => "an earlier attempt could not be fenced in time and may still land",
            Self::NoPath => "the transport asked for does not join this peer; use another one",
            Self::CannotConnect => "the transport asked for could not be connected within the connect deadline",
            Self::PeerGone => "the peer was restarted or forgotten; open it again",
            Self::ShutDown => "the engine was shut down",
        })
    }
}

impl core::error::Error for Cause {}

/// How something ended that did not end well: why, and what it means for the far end.
///
/// ```
/// use millpond_core::quiet::Far;
/// use millpond_core::transfer::{Cause, Failure};
/// let failure = Failure { cause: Cause::Cancelled, far: Far::Untouched };
/// assert!(!failure.far.may_have_changed());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Failure {
    /// Why.
    pub cause: Cause,
    /// What it means for the far end.
    pub far: Far,
}

/// Bounds and spans of a scheduler.
///
/// ```
/// use millpond_core::transfer::Config;
/// let config = Config::default();
/// assert!(config.cancel_grace < config.stall_span && config.stall_span < config.progress_deadline);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// How long nothing of a job may move before it is given up, unless the job says otherwise. 5 s.
    pub progress_deadline: Duration,
    /// How long nothing may move on a path with work before it is closed in favour of another one. 2.5 s.
    pub stall_span: Duration,
    /// How long a cancelled slice may take before its path is closed. 100 ms.
    pub cancel_grace: Duration,
    /// How long a transport asked for by name may take to be connected. 900 ms.
    pub connect_deadline: Duration,
    /// What may be under way to one peer over all its paths.
    pub window_per_peer: Window,
    /// Bytes that may be queued or under way to one peer. 4 GiB.
    pub bytes_per_peer_max: u64,
    /// Where the share of chance in the waits between dials comes from: another number at each node, so that those who lost
    /// one peer do not come back to it in step.
    pub dial_seed: u64,
    /// Bytes under way on the paths of a transport from which another path of it is worth its dial. 8 MiB.
    pub spread_bytes: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            progress_deadline: Duration::from_secs(5),
            stall_span: Duration::from_millis(2_500),
            cancel_grace: Duration::from_millis(100),
            connect_deadline: Duration::from_millis(900),
            window_per_peer: Window { bytes: 1 << 30, moves: 1 << 22, slices: 1 << 12 },
            bytes_per_peer_max: 4 << 30,
            dial_seed: 0,
            spread_bytes: 8 << 20,
        }
    }
}

/// What the caller has to do next; see [`Scheduler::poll`].
///
/// Example: [`Scheduler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Post a slice. With `cut`, it is new: carve as much as that off the job and say so with [`Scheduler::on_cut`] before
    /// anything else. A post that does not succeed is [refused](Scheduler::on_refused).
    Post {
        /// Names this attempt in completions.
        posting: Posting,
        /// Whose slice it is.
        job: Handle,
        /// To whom.
        peer: Handle,
        /// Over which path.
        path: PathId,
        /// What to carve; `None`: the slice keeps the moves it has.
        cut: Option<Limits>,
    },
    /// All moves of a slice are done, and no earlier attempt of it can land any more.
    Settle {
        /// Which.
        slice: Handle,
        /// Whose.
        job: Handle,
    },
    /// A slice that is not posted ends, with all moves it still has.
    Fail {
        /// Which.
        slice: Handle,
        /// Whose.
        job: Handle,
        /// Why, and what of it the far end may have seen.
        failure: Failure,
    },
    /// Cancel what is posted; its completion still comes.
    Cancel {
        /// Which attempt.
        posting: Posting,
    },
    /// Close a path; the completions of what is posted there follow, and [`Scheduler::on_down`].
    Close {
        /// Whose.
        peer: Handle,
        /// Which.
        path: PathId,
        /// Why.
        why: PathDown,
    },
    /// Connect a path: [`Scheduler::on_open`] or [`Scheduler::on_dial_failed`] follows.
    Dial {
        /// Whose.
        peer: Handle,
        /// Which.
        path: PathId,
    },
    /// A job is over and forgotten.
    Finish(Finished),
}
