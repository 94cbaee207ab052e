//! Copies between two regions neither of which is memory here: staged through registered buffers, pipelined.
//!
//! The way from a peer's memory into a file of this engine and back: the owner of the file moves the bytes. A [`Stager`] owns
//! its buffers; while some are being filled, others are being emptied. It chooses no path: each half is an ordinary batch. What
//! of a [`Batch`] is a copy goes the same way, through buffers of the engine: see `staging`. Invariant: a byte is written to a
//! target only after its piece was read as a whole.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use futures::StreamExt;
use futures::lock::{Mutex, MutexGuard};
use futures::stream;
use millpond_core::quiet::Far;
use millpond_core::time::{Duration, Instant};
use millpond_hal::fabric::AllocateOptions;

use super::batch::{Batch, Class, Via};
use super::core::Core;
use super::remote::RemoteExtent;
use super::submit::SubmitErrorKind;
use super::transfer::{Cause, Failure, Report, Shared, Status};
use super::{AllocateError, Backing, Engine, Region, RegionBytes};
use crate::runtime::Runtime;

/// Bytes of one buffer, and of what is read before it is written.
pub const STAGE_LEN: u64 = 2 << 20;
/// Buffers of a stager unless told otherwise.
pub const STAGES: u32 = 4;
/// Pieces of one buffer at most.
const PIECES_MAX: usize = 512;
/// Pieces begin as far into a unit of this length as their file range does, so that whole blocks need no further copy.
const ALIGN: u64 = 4096;

/// One copy: all of `source` onto all of `target`.
///
/// Example: `verify/tests/engine_file.rs` (`Copy`).
#[derive(Clone, Debug)]
pub struct Copy {
    /// Where the bytes come from.
    pub source: RemoteExtent,
    /// Where they go; as long as the source, at most.
    pub target: RemoteExtent,
}

/// Buffers through which copies go, and the engine that makes them. One call at a time; have several for more.
///
/// Example: `verify/tests/engine_file.rs` (`Stager`).
#[derive(Debug)]
pub struct Stager<R> {
    engine: Engine<R>,
    stages: Stages,
    class: Class,
}

/// Buffers of [`STAGE_LEN`] bytes.
#[derive(Debug)]
pub(super) struct Stages {
    region: Region,
    /// Held while a round uses the buffer of that number.
    buffers: Box<[Mutex<()>]>,
    /// Rounds take turns at them.
    rounds: AtomicUsize,
}

/// What the halves of copies are part of, and what they came to.
#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) class: Class,
    pub(super) progress_deadline: Option<Duration>,
    /// When all of it ends, done or not.
    pub(super) end: Option<Instant>,
    pub(super) parent: Option<Arc<Shared>>,
    /// The transport of the halves that join a peer.
    pub(super) via: Via,
    pub(super) used: parking_lot::Mutex<Option<Via>>,
    /// Over what buffers were filled, and over what they were emptied; each once.
    pub(super) legs: parking_lot::Mutex<Vec<(Via, Via)>>,
    pub(super) retries: AtomicU32,
    /// Why the named transport does not reach a peer, once that is known: what is left need not find out again.
    pub(super) unreached: parking_lot::Mutex<Option<Cause>>,
}

/// Who moves the halves.
#[derive(Debug)]
pub(super) struct Hands<'a, R> {
    pub(super) core: &'a Arc<Core>,
    pub(super) runtime: &'a R,
    pub(super) job: &'a Job,
}

/// A piece of a copy, in a buffer.
struct Piece {
    copy: usize,
    /// Where in the copy.
    at: u64,
    len: u64,
    /// Where in the buffer.
    place: u64,
}

impl Stages {
    pub(super) fn new(core: &Core, count: u32) -> Result<Self, AllocateError> {
        let count = count.max(1);
        let options = AllocateOptions::default().with_backing(Backing::Memfd);
        let region = core.locked(|shard| shard.fabric.allocate(u64::from(count) * STAGE_LEN, options))?;
        let buffers = (0..count).map(|_| Mutex::new(())).collect();
        Ok(Self { region, buffers, rounds: AtomicUsize::new(0) })
    }

    /// Bytes of nothing, for a write that only announces.
    pub(super) fn nothing(&self) -> Option<RegionBytes> {
        self.region.carve(0, 0).ok().map(super::RegionBuf::freeze)
    }

    /// The next buffer, once it is free: where it begins.
    async fn take(&self) -> (u64, MutexGuard<'_, ()>) {
        let number = self.rounds.fetch_add(1, Relaxed) % self.buffers.len();
        let held = self.buffers[number].lock().await;
        (u64::try_from(number).unwrap_or(0) * STAGE_LEN, held)
    }
}

impl<R: Runtime> Stager<R> {
    /// One with `stages` buffers of [`STAGE_LEN`] bytes.
    pub fn new(engine: &Engine<R>, stages: u32) -> Result<Self, AllocateError> {
        Ok(Self { engine: engine.clone(), stages: Stages::new(&engine.core, stages)?, class: Class::default() })
    }

    /// Of that class from now on.
    #[must_use]
    pub fn class(self, class: Class) -> Self {
        Self { class, ..self }
    }

    /// Makes the copies; a status for each, in order. They end independently. Dropping it lets what was begun run on, and
    /// the next call refuses with [`Cause::Overload`] what would need a buffer that is still lent.
    pub async fn copy(&mut self, copies: &[Copy]) -> Vec<Status> {
        let job = Job { class: self.class, ..Job::default() };
        let hands = Hands { core: &self.engine.core, runtime: &self.engine.runtime, job: &job };
        hands.copy(&self.stages, copies).await
    }
}

impl<R: Runtime> Hands<'_, R> {
    /// Makes the copies through these buffers; a status for each, in order.
    pub(super) async fn copy(&self, stages: &Stages, copies: &[Copy]) -> Vec<Status> {
        let mut statuses: Vec<Ending> = copies.iter().map(|_| Ending::default()).collect();
        for (copy, status) in copies.iter().zip(&mut statuses) {
            if copy.source.len() != copy.target.len() {
                let cause = Cause::Refused { reason: super::RefusalReason::OutOfBounds };
                status.failed = Some(Failure { cause, far: Far::Untouched });
            }
        }
        let wanted: Vec<bool> = statuses.iter().map(|status| status.failed.is_none()).collect();
        let rounds = rounds(copies, |index| wanted[index], self.job.via != Via::Auto);
        let ended = stream::iter(rounds.into_iter().map(|round| async move {
            let (base, _held) = stages.take().await;
            self.round(&stages.region, base, copies, round).await
        }));
        // While the bytes of some are fetched, those of others are sent on.
        let mut ended = ended.buffer_unordered(stages.buffers.len());
        while let Some(pieces) = ended.next().await {
            pieces.into_iter().for_each(|(copy, outcome)| statuses[copy].add(outcome));
        }
        statuses.into_iter().map(Ending::status).collect()
    }

    /// Reads the pieces into the buffer at `base`, then writes those that came.
    async fn round(
        &self,
        region: &Region,
        base: u64,
        copies: &[Copy],
        pieces: Vec<Piece>,
    ) -> Vec<(usize, Result<(), Failure>)> {
        let mut ended = Vec::new();
        let fail = |cause| Err(Failure { cause, far: Far::Untouched });
        let mut batch = Batch::with_capacity(pieces.len());
        let mut read = Vec::new();
        for piece in pieces {
            let source = copies[piece.copy].source.slice(piece.at, piece.len);
            match (source, region.carve(base + piece.place, piece.len)) {
                (Ok(source), Ok(buffer)) => {
                    batch.push_read(source, buffer);
                    read.push(piece);
                }
                _ => ended.push((piece.copy, fail(Cause::Overload))),
            }
        }
        let mut report = match self.run(batch).await {
            Ok(report) => report,
            Err((cause, _)) => {
                ended.extend(read.iter().map(|piece| (piece.copy, fail(cause.clone()))));
                return ended;
            }
        };
        let filled_over = report.via();
        self.job.retries.fetch_add(report.retries(), Relaxed);
        let mut batch = Batch::with_capacity(read.len());
        let mut written = Vec::new();
        for (index, piece) in read.iter().enumerate() {
            let bytes: Option<RegionBytes> = report.take_buffer(index).map(super::RegionBuf::freeze);
            let target = copies[piece.copy].target.slice(piece.at, piece.len);
            match (&report.outcomes()[index].status, bytes, target) {
                (Status::Done, Some(bytes), Ok(target)) => {
                    batch.push_write(bytes, target);
                    written.push(piece.copy);
                }
                // Nothing of it was written, whatever was read.
                (Status::Failed(failure), ..) => ended.push((piece.copy, fail(failure.cause.clone()))),
                _ => ended.push((piece.copy, fail(Cause::Overload))),
            }
        }
        match self.run(batch).await {
            Ok(report) => {
                for (copy, outcome) in written.into_iter().zip(report.outcomes()) {
                    match &outcome.status {
                        Status::Failed(failure) => ended.push((copy, Err(failure.clone()))),
                        _ => {
                            self.job.on_bytes(outcome.bytes);
                            ended.push((copy, Ok(())));
                        }
                    }
                }
                self.job.on_half(&report);
                self.job.on_legs(filled_over, report.via());
            }
            Err((cause, _)) => ended.extend(written.into_iter().map(|copy| (copy, fail(cause.clone())))),
        }
        ended
    }

    /// Whether all of it has to end now.
    pub(super) fn check(&self) -> Result<(), Cause> {
        match self.job.end {
            _ if self.job.parent.as_ref().is_some_and(|parent| parent.is_cancelled()) => Err(Cause::Cancelled),
            Some(end) if self.runtime.now() >= end => Err(Cause::Deadline),
            _ if self.core.is_shut_down() => Err(Cause::ShutDown),
            _ => self.job.unreached.lock().clone().map_or(Ok(()), Err),
        }
    }

    /// Submits a batch, again after the hint when the engine is busy, until the progress deadline. It comes back if nothing
    /// of it was started.
    pub(super) async fn run(&self, batch: Batch) -> Result<Report, (Cause, Batch)> {
        let patience = self.job.progress_deadline.unwrap_or(self.core.options.progress_deadline);
        let deadline = self.runtime.now() + patience;
        let mut batch = batch.class(self.job.class);
        batch.settings.progress_deadline = self.job.progress_deadline;
        if self.job.via != Via::Auto && batch.requests.iter().all(|request| !request.remote().is_own()) {
            batch.settings.via = self.job.via;
        }
        // Bounded by the deadline: every further round sleeps.
        loop {
            if batch.is_empty() {
                return Ok(Report::empty());
            }
            if let Err(cause) = self.check() {
                return Err((cause, batch));
            }
            let now = self.runtime.now();
            batch.settings.deadline = self.job.end.map(|end| end.since(now));
            let refused = match self.core.submit(batch) {
                Ok(transfer) => {
                    if let Some(parent) = &self.job.parent {
                        parent.adopt(&transfer);
                    }
                    let report = transfer.await;
                    self.job.note_unreached(&report);
                    return Ok(report);
                }
                Err(refused) => refused,
            };
            batch = refused.batch;
            match refused.kind {
                SubmitErrorKind::Busy { retry_after } if now < deadline => {
                    self.runtime.sleep(retry_after.max(Duration::from_millis(1))).await;
                }
                SubmitErrorKind::NoPath { via, why } => return Err((Cause::NoPath { via, why }, batch)),
                SubmitErrorKind::ShutDown | SubmitErrorKind::Forked => return Err((Cause::ShutDown, batch)),
                _ => return Err((Cause::Overload, batch)),
            }
        }
    }
}

impl Job {
    pub(super) fn on_bytes(&self, bytes: u64) {
        if let Some(parent) = &self.parent {
            parent.add_bytes(bytes);
        }
    }

    pub(super) fn on_half(&self, report: &Report) {
        self.retries.fetch_add(report.retries(), Relaxed);
        if report.via().is_some() {
            *self.used.lock() = report.via();
        }
    }
}

/// Pairs of transports that are told apart in an explanation, at most.
const LEGS_MAX: usize = 8;

impl Job {
    fn on_legs(&self, filled: Option<Via>, emptied: Option<Via>) {
        let (Some(filled), Some(emptied)) = (filled, emptied) else { return };
        let mut legs = self.legs.lock();
        if legs.len() < LEGS_MAX && !legs.contains(&(filled, emptied)) {
            legs.push((filled, emptied));
        }
    }

    fn note_unreached(&self, report: &Report) {
        let cause = |outcome: &super::Outcome| match &outcome.status {
            Status::Failed(Failure { cause: cause @ Cause::NoPath { .. }, .. }) => Some(cause.clone()),
            _ => None,
        };
        if self.via != Via::Auto
            && let Some(cause) = report.outcomes().iter().find_map(cause)
        {
            self.unreached.lock().get_or_insert(cause);
        }
    }
}

/// What a copy came to so far.
#[derive(Debug, Default)]
struct Ending {
    failed: Option<Failure>,
    any_done: bool,
}

impl Ending {
    fn add(&mut self, piece: Result<(), Failure>) {
        match piece {
            Ok(()) => self.any_done = true,
            Err(failure) => {
                let far = self.failed.as_ref().map_or(failure.far, |first| worse(first.far, failure.far));
                let first = self.failed.take().unwrap_or(failure);
                self.failed = Some(Failure { far, ..first });
            }
        }
    }

    fn status(self) -> Status {
        match self.failed {
            None => Status::Done,
            // Some pieces of it are there, some are not.
            Some(failure) if self.any_done => Status::Failed(Failure { far: Far::Unknown, ..failure }),
            Some(failure) => Status::Failed(failure),
        }
    }
}

fn worse(a: Far, b: Far) -> Far {
    if a == b { a } else { Far::Unknown }
}

/// The pieces of all copies, as many to a buffer as fit. `is_sorted`: a round joins a peer on the same side in all its copies.
fn rounds(copies: &[Copy], is_wanted: impl Fn(usize) -> bool, is_sorted: bool) -> Vec<Vec<Piece>> {
    let sides = |copy: &Copy| (copy.source.is_own(), copy.target.is_own());
    let mut rounds: Vec<Vec<Piece>> = vec![Vec::new()];
    let mut free = 0;
    for (index, copy) in copies.iter().enumerate().filter(|(index, _)| is_wanted(*index)) {
        let mut at = 0;
        let before = rounds.last().and_then(|round| round.last()).map(|piece| sides(&copies[piece.copy]));
        if is_sorted && before.is_some_and(|before| before != sides(copy)) {
            rounds.push(Vec::new());
            free = 0;
        }
        // Bounded by the length: every round of this loop takes a byte, or opens a buffer and takes one then.
        while at < copy.target.len() || copy.target.is_empty() && at == 0 {
            let skew = (copy.target.offset() + at) % ALIGN;
            let place = free + skew;
            let full = place >= STAGE_LEN || rounds.last().is_some_and(|round| round.len() == PIECES_MAX);
            if full {
                rounds.push(Vec::new());
                free = 0;
                continue;
            }
            let len = (copy.target.len() - at).min(STAGE_LEN - place);
            if let Some(round) = rounds.last_mut() {
                round.push(Piece { copy: index, at, len, place });
            }
            free = (place + len).next_multiple_of(ALIGN);
            at += len;
            if copy.target.is_empty() {
                break;
            }
        }
    }
    rounds.retain(|round| !round.is_empty());
    rounds
}
