//! What is said to the scheduler and by it: plain values.

use super::window::Load;
use super::{Cause, Explanation, Failure};
use crate::quiet::Far;
use crate::slab::Handle;
use crate::time::Duration;

/// What a scheduler counted since it was made; it only grows.
///
/// ```
/// let counters = millpond_core::transfer::Counters::default();
/// assert_eq!(counters.submitted, counters.done + counters.failed); // when nothing is open
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Jobs accepted.
    pub submitted: u64,
    /// Jobs of which nothing failed.
    pub done: u64,
    /// Jobs of which something failed, or that ended early.
    pub failed: u64,
    /// Jobs not accepted.
    pub refused: u64,
    /// Slices posted, attempts included.
    pub posted: u64,
    /// Slices posted again.
    pub retries: u64,
    /// Posts that were refused.
    pub not_posted: u64,
    /// Bytes of moves that are done.
    pub bytes_done: u64,
    /// Slices that went over a transport although the peer has a better one.
    pub detours: u64,
    /// Completions that were late, unknown or duplicates.
    pub ignored: u64,
    /// Times a breaker opened.
    pub breakers_opened: u64,
    /// Paths closed because nothing moved.
    pub stalls: u64,
    /// Times a lost path left writes in doubt.
    pub doubts: u64,
}

/// A job was not accepted.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_core::transfer::SubmitError;
/// let busy = SubmitError::Busy { retry_after: Duration::from_millis(3) };
/// assert_eq!(busy.to_string(), "too much is under way to the peer; try again in 3ms");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmitError {
    /// A bound was reached.
    Busy {
        /// When there is likely to be room.
        retry_after: Duration,
    },
    /// The peer is gone.
    PeerGone,
    /// There is no such peer.
    UnknownPeer,
}

impl core::fmt::Display for SubmitError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Busy { retry_after } => write!(f, "too much is under way to the peer; try again in {retry_after}"),
            Self::PeerGone => f.write_str("the peer was restarted; open it again"),
            Self::UnknownPeer => f.write_str("there is no such peer; open it first"),
        }
    }
}

impl core::error::Error for SubmitError {}

/// No peer of that handle is in the table.
///
/// ```
/// let error = millpond_core::transfer::UnknownPeer;
/// assert_eq!(error.to_string(), "there is no such peer; open it first");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPeer;

impl core::fmt::Display for UnknownPeer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        SubmitError::UnknownPeer.fmt(f)
    }
}

impl core::error::Error for UnknownPeer {}

/// One attempt at one slice, as completions name it.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Posting {
    /// The slice.
    pub slice: Handle,
    /// Which attempt at it, from 1.
    pub attempt: u8,
}

/// What was carved for a new slice.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes.
    pub bytes: u64,
    /// Moves.
    pub moves: u32,
    /// Whether it changes the peer's memory.
    pub has_writes: bool,
    /// It is not posted again if it may have been applied: something counts how often it arrives.
    pub is_once: bool,
    /// Nothing of the job is left to carve.
    pub is_last: bool,
}

/// Why a slice did not come through.
///
/// Example: [`Outcome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Its path broke.
    PathLost,
    /// Nothing moved on its path, which was closed therefore.
    Stalled,
    /// The path is there, but the attempt failed; it may be repeated.
    Transient,
    /// It was cancelled.
    Cancelled,
}

/// How an attempt ended. Moves that are done or were refused have ended with it; the others are `kept` and may be tried
/// again.
///
/// ```
/// use millpond_core::quiet::Far;
/// use millpond_core::transfer::{Fault, Load, Outcome};
/// let kept = Load { bytes: 4096, moves: 1, slices: 0 };
/// let lost = Outcome { kept, refused: Load::NONE, fault: Some(Fault::PathLost), far: Far::Unknown };
/// assert!(lost != Outcome::DONE);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes and moves that did not come through, for `fault`.
    pub kept: Load,
    /// Bytes and moves that the peer refused for good.
    pub refused: Load,
    /// Why not all moves ended; `None`: they did.
    pub fault: Option<Fault>,
    /// What is known about the far end of what is kept.
    pub far: Far,
}

impl Outcome {
    /// All of it is done.
    pub const DONE: Self = Self { kept: Load::NONE, refused: Load::NONE, fault: None, far: Far::Done };
}

/// What becomes of the moves that an attempt left.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// There are none: the slice is over.
    Over,
    /// The slice will be posted again with those kept.
    Again,
    /// All are done, but an earlier attempt may still land: the slice ends with `Action::Settle` or `Action::Fail`. Its
    /// moves have not ended before.
    Arrived,
    /// The slice is over, and those kept failed.
    Failed(Failure),
}

/// Why a post did not succeed.
///
/// ```
/// use millpond_core::transfer::Refusal;
/// assert_ne!(Refusal::Full, Refusal::Never);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The device takes no more now.
    Full,
    /// The path is closed, or about to be.
    PathClosed,
    /// These moves can never be posted: the caller ends them, and the slice is over.
    Never,
}

/// A job that is over. All its slices ended before.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which.
    pub job: Handle,
    /// The caller's word.
    pub tag: u64,
    /// What was never carved failed with this; `None`: all of it was carved.
    pub rest: Option<Failure>,
    /// What it was ended by before its time.
    pub end: Option<Cause>,
    /// Which paths it took, and why.
    pub explanation: Explanation,
}
