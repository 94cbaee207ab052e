//! A batch on its way, and what became of it.
//!
//! A [`Transfer`] is a share in the outcome, not the work itself: dropping it changes nothing about the bytes under way
//! nor about the memory they hold, it only means that nobody will ask. Invariants: every transfer ends, by its progress
//! deadline at the latest; once it ended the engine touches none of its local memory any more.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::task::{Context, Poll, Waker};
use std::thread::Thread;

use millpond_core::quiet::Far;
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::Tally;
use parking_lot::Mutex;

use super::RegionBuf;
use super::batch::{Batch, Request, Via};
use super::core::Core;

/// Why a request did not end well.
///
/// ```
/// use millpond_node::engine::Cause;
/// assert!(Cause::NoProgress.to_string().contains("progress deadline"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Nothing moved for the progress deadline.
    #[error("nothing moved within the progress deadline; the peer is stopped, gone or cut off: try another one")]
    NoProgress,
    /// The total deadline came first.
    #[error("the deadline of the batch came before its end; give it longer or move less at once")]
    Deadline,
    /// Somebody called cancel.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// The link broke and no other could take over in time.
    #[error("the link to the peer broke and could not be replaced in time; open the peer again")]
    LinkLost,
    /// The peer refused: the grant was closed, or never covered these bytes, or lacks the right.
    #[error("the peer refused the request ({reason}); ask it for a fresh grant")]
    Refused {
        /// What the peer said.
        reason: RefusalReason,
    },
    /// The file, or what it lies on, failed.
    #[error("{fault}")]
    File {
        /// How.
        fault: FileFault,
    },
    /// The named transport does not reach this peer.
    #[error("{via} does not reach this peer ({why}); use `auto` or another transport")]
    NoPath {
        /// The transport that was asked for.
        via: Via,
        /// Why not.
        why: &'static str,
    },
    /// The work on a device that the batch was to follow failed.
    #[error("the work on a device that the batch was to follow has failed; nothing was moved")]
    Fence,
    /// The engine's tables filled up before it could begin.
    #[error("the engine has no room for it now; try again in a moment")]
    Overload,
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

/// How a file can fail.
///
/// ```
/// use millpond_node::engine::FileFault;
/// assert!(FileFault::NoSpace.to_string().contains("free space"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// The file system is full, or a quota is used up.
    #[error("the file system of the file is full; free space there")]
    NoSpace,
    /// Somebody cut the file.
    #[error("the file is shorter than its region, somebody cut it; open it again and fill what was lost")]
    Truncated,
    /// It could not be read or written.
    #[error("the file could not be read or written; look at its last error number and at the kernel's log")]
    Medium,
}

/// What a peer can hold against a request.
///
/// ```
/// use millpond_node::engine::RefusalReason;
/// assert_eq!(RefusalReason::Stale.to_string(), "stale: the grant or region is closed");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The region, grant or epoch named is not current any more.
    #[error("stale: the grant or region is closed")]
    Stale,
    /// The range lies outside what was granted.
    #[error("out of bounds: the range lies outside of what was granted")]
    OutOfBounds,
    /// The grant does not carry this right, or the capability is wrong.
    #[error("not allowed: the grant does not carry this right")]
    NotAllowed,
    /// The peer is out of room for it right now.
    #[error("busy: the peer has no room for it now")]
    Busy,
}

/// How one request ended.
///
/// ```
/// use millpond_node::engine::{Cause, Failure, Far};
/// let failure = Failure { cause: Cause::Cancelled, far: Far::Unknown };
/// assert!(failure.to_string().contains("cancelled"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause} (far end: {far:?})")]
pub struct Failure {
    /// Why.
    pub cause: Cause,
    /// What it means for the far end.
    pub far: Far,
}

/// Where one request of a running batch stands.
///
/// ```
/// use millpond_node::engine::Status;
/// assert!(!Status::Pending.is_final());
/// assert!(Status::Done.is_final());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    /// Queued or under way.
    Pending,
    /// All its bytes are where they should be, and visible there.
    Done,
    /// It ended without that.
    Failed(Failure),
}

impl Status {
    /// Whether it will not change any more.
    #[must_use]
    pub fn is_final(&self) -> bool {
        *self != Self::Pending
    }
}

/// One request of a finished batch.
///
/// Example: `verify/tests/engine.rs` (`status`).
#[derive(Debug)]
pub struct Outcome {
    /// How it ended: [`Status::Done`] or [`Status::Failed`].
    pub status: Status,
    /// Bytes it was to move.
    pub bytes: u64,
    /// The buffer of a read, filled if the status is `Done`, with undefined but initialised contents otherwise.
    pub buffer: Option<RegionBuf>,
    /// What of it was cut, and how that ended.
    pub(super) tally: Tally<Cause>,
}

impl Outcome {
    pub(super) fn pending(bytes: u64) -> Self {
        Self { status: Status::Pending, bytes, buffer: None, tally: Tally::new(bytes) }
    }
}

/// What became of a batch: an outcome per request, in the order of the batch.
///
/// Example: `verify/tests/engine.rs` (`into_buffers`).
#[derive(Debug)]
pub struct Report {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) batch: Batch,
    pub(super) id: TransferId,
    pub(super) elapsed: Duration,
    pub(super) via: Option<Via>,
    pub(super) retries: u32,
}

/// Names one batch of one engine, for logs and [`Engine::explain`](super::Engine::explain). Counts up from 1.
///
/// ```
/// use millpond_node::engine::TransferId;
/// assert_eq!(TransferId(7).to_string(), "transfer 7");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

impl std::fmt::Display for TransferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "transfer {}", self.0)
    }
}

/// A batch of which at least one request failed; the report says which, and still holds the buffers.
///
/// Example: `verify/tests/engine_links.rs` (`into_done`).
#[derive(Debug, thiserror::Error)]
#[error("{failed} of {} requests of {} failed, the first because {first}", .report.outcomes.len(), .report.id)]
pub struct TransferError {
    /// How many failed.
    pub failed: usize,
    /// The first failure in the order of the batch.
    pub first: Failure,
    /// The whole outcome.
    pub report: Report,
}

impl Report {
    /// Of a batch of nothing, which is never submitted.
    pub(super) fn empty() -> Self {
        let (id, elapsed) = (TransferId(0), Duration::ZERO);
        Self { outcomes: Vec::new(), batch: Batch::new(), id, elapsed, via: None, retries: 0 }
    }

    /// An outcome per request.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Whether every request is `Done`.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.outcomes.iter().all(|outcome| outcome.status == Status::Done)
    }

    /// From submission to the end of the last request.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// The transport that carried it, or the last one tried; `None` if none was.
    #[must_use]
    pub fn via(&self) -> Option<Via> {
        self.via
    }

    /// Slices that were posted more than once.
    #[must_use]
    pub fn retries(&self) -> u32 {
        self.retries
    }

    /// Names the batch for `explain`.
    #[must_use]
    pub fn id(&self) -> TransferId {
        self.id
    }

    /// The filled buffers of all reads in the order of the batch, or what went wrong.
    pub fn into_buffers(self) -> Result<Vec<RegionBuf>, TransferError> {
        let mut report = self.into_done()?;
        Ok(report.outcomes.iter_mut().filter_map(|outcome| outcome.buffer.take()).collect())
    }

    /// The report itself if every request is `Done`, or what went wrong.
    pub fn into_done(self) -> Result<Self, TransferError> {
        let mut failures = self.outcomes.iter().filter_map(|outcome| match &outcome.status {
            Status::Failed(failure) => Some(failure.clone()),
            _ => None,
        });
        let Some(first) = failures.next() else { return Ok(self) };
        Err(TransferError { failed: failures.count() + 1, first, report: self })
    }

    /// The buffer of the read at `index`, if it is one and was not taken before.
    pub fn take_buffer(&mut self, index: usize) -> Option<RegionBuf> {
        self.outcomes.get_mut(index)?.buffer.take()
    }

    /// The batch, emptied, with its settings and allocations, for the next one.
    #[must_use]
    pub fn into_batch(self) -> Batch {
        let mut outcomes = self.outcomes;
        outcomes.clear();
        Batch { outcomes, ..self.batch }
    }
}

/// A submitted batch: a future of its [`Report`].
///
/// Dropping it orphans the batch: it runs on to its end, and its memory is given back then.
///
/// Example: `verify/tests/engine.rs` (`submit`).
#[must_use = "dropping a transfer does not stop it; await it, or cancel it"]
pub struct Transfer {
    shared: Arc<Shared>,
    /// Until when polling it spins, once it was polled.
    spin_end: Option<Instant>,
}

/// The part of a transfer that caller and shard share.
pub(super) struct Shared {
    pub(super) id: TransferId,
    core: Arc<Core>,
    is_over: AtomicBool,
    is_cancelled: AtomicBool,
    bytes_done: AtomicU64,
    state: Mutex<State>,
    /// The transfers that it is made of, if it is staged.
    halves: Mutex<Vec<Arc<Shared>>>,
}

#[derive(Default)]
struct State {
    report: Option<Report>,
    waker: Option<Waker>,
    thread: Option<Thread>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.id)
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("id", &self.shared.id).field("is_over", &self.is_over()).finish()
    }
}

impl Shared {
    pub(super) fn new(id: TransferId, core: Arc<Core>) -> Self {
        Self {
            id,
            core,
            is_over: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
            bytes_done: AtomicU64::new(0),
            state: Mutex::default(),
            halves: Mutex::default(),
        }
    }

    /// A transfer that is part of this one: whoever cancels this one cancels it.
    pub(super) fn adopt(&self, half: &Transfer) {
        let mut halves = self.halves.lock();
        halves.retain(|other| !other.is_over.load(Acquire));
        halves.push(Arc::clone(&half.shared));
        drop(halves);
        if self.is_cancelled() {
            half.cancel();
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Relaxed)
    }

    pub(super) fn add_bytes(&self, bytes: u64) {
        self.bytes_done.fetch_add(bytes, Relaxed);
    }

    /// It is over; whoever waits is woken.
    pub(super) fn complete(&self, report: Report) {
        let mut state = self.state.lock();
        state.report = Some(report);
        self.is_over.store(true, Release);
        let (waker, thread) = (state.waker.take(), state.thread.take());
        drop(state);
        self.core.on_transfer_over();
        if let Some(waker) = waker {
            waker.wake();
        }
        if let Some(thread) = thread {
            thread.unpark();
        }
    }

    /// It ends before it began.
    pub(super) fn fail(&self, batch: Batch, cause: &Cause) {
        self.complete(Report::failed(batch, cause, self.id));
    }
}

impl Report {
    /// Of a batch that ended before it began.
    pub(super) fn failed(batch: Batch, cause: &Cause, id: TransferId) -> Self {
        let Batch { mut requests, settings, mut outcomes, remotes, after: _ } = batch;
        for request in requests.drain(..) {
            let mut outcome = Outcome::pending(request.remote().len());
            outcome.status = Status::Failed(Failure { cause: cause.clone(), far: Far::Untouched });
            if let Request::Read { target, .. } = request {
                outcome.buffer = Some(target);
            }
            outcomes.push(outcome);
        }
        let batch = Batch { requests, settings, outcomes: Vec::new(), remotes, after: None };
        Self { outcomes, batch, id, elapsed: Duration::ZERO, via: None, retries: 0 }
    }
}

impl Transfer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, spin_end: None }
    }

    /// Names it for `explain`.
    #[must_use]
    pub fn id(&self) -> TransferId {
        self.shared.id
    }

    /// Asks for its end: requests not finished yet fail with [`Cause::Cancelled`]. The transfer still has to be awaited for
    /// its memory, which comes back as soon as it is quiet here. Harmless when it is over.
    pub fn cancel(&self) {
        self.shared.is_cancelled.store(true, Relaxed);
        self.shared.halves.lock().iter().for_each(|half| half.is_cancelled.store(true, Relaxed));
        self.shared.core.look();
    }

    /// Whether awaiting it would not wait.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.shared.is_over.load(Acquire)
    }

    /// Bytes of requests finished so far.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        self.shared.bytes_done.load(Relaxed)
    }

    pub(super) fn take_report(&self) -> Option<Report> {
        if self.is_over() { self.shared.state.lock().report.take() } else { None }
    }

    pub(super) fn unpark_when_over(&self, thread: &Thread) {
        self.shared.state.lock().thread = Some(thread.clone());
    }
}

impl Future for Transfer {
    type Output = Report;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Report> {
        if !self.is_over() && self.shared.core.drive_once() {
            self.spin_end = None;
        }
        let mut state = self.shared.state.lock();
        if let Some(report) = state.report.take() {
            drop(state);
            self.shared.core.rearm_driver();
            return Poll::Ready(report);
        }
        assert!(!self.is_over(), "a transfer was polled after it had given its report");
        state.waker = Some(context.waker().clone());
        drop(state);
        // For a moment the task that waits moves things along itself; after that the driver does.
        let now = self.shared.core.now();
        let spin_end = self.spin_end.unwrap_or_else(|| self.shared.core.spin_end());
        self.spin_end = Some(spin_end);
        if now < spin_end {
            context.waker().wake_by_ref();
        } else if spin_end != Instant::ZERO {
            self.spin_end = Some(Instant::ZERO);
            self.shared.core.kick();
        }
        Poll::Pending
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.is_over() {
            self.shared.core.kick();
        } else {
            self.shared.core.rearm_driver();
        }
    }
}
