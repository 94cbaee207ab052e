//! Copies between two regions neither of which is memory here: staged through registered buffers, pipelined.
//!
//! The way from a peer's memory into a file of this engine and back: the owner of the file moves the bytes. A [`Stager`]
//! owns the buffers; while some are being filled, others are being emptied. It chooses no path: each half is an ordinary
//! batch. Invariant: a byte is written to a target only after its piece was read as a whole.

use futures::StreamExt;
use futures::stream;
use millpond_core::quiet::Far;
use millpond_core::time::Duration;

use super::batch::{Batch, Class};
use super::remote::RemoteExtent;
use super::submit::SubmitErrorKind;
use super::transfer::{Cause, Failure, Report, Status};
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
    region: Region,
    class: Class,
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

impl<R: Runtime> Stager<R> {
    /// One with `stages` buffers of [`STAGE_LEN`] bytes.
    pub fn new(engine: &Engine<R>, stages: u32) -> Result<Self, AllocateError> {
        let region = engine.allocate(u64::from(stages.max(1)) * STAGE_LEN, Backing::Memfd)?;
        Ok(Self { engine: engine.clone(), region, class: Class::default() })
    }

    /// Of that class from now on.
    #[must_use]
    pub fn class(self, class: Class) -> Self {
        Self { class, ..self }
    }

    /// Makes the copies; a status for each, in order. They end independently. Dropping it lets what was begun run on, and
    /// the next call refuses with [`Cause::Overload`] what would need a buffer that is still lent.
    pub async fn copy(&mut self, copies: &[Copy]) -> Vec<Status> {
        let mut statuses: Vec<Ending> = copies.iter().map(|_| Ending::default()).collect();
        for (copy, status) in copies.iter().zip(&mut statuses) {
            if copy.source.len() != copy.target.len() {
                let cause = Cause::Refused { reason: super::RefusalReason::OutOfBounds };
                status.failed = Some(Failure { cause, far: Far::Untouched });
            }
        }
        let wanted: Vec<bool> = statuses.iter().map(|status| status.failed.is_none()).collect();
        let rounds = rounds(copies, |index| wanted[index]);
        let stages = usize::try_from(self.region.len() / STAGE_LEN).unwrap_or(1);
        let this = &*self;
        // A buffer is free again when its round has ended, so rounds take turns by buffer: each of these runs its own.
        let mut by_stage: Vec<Vec<Vec<Piece>>> = (0..stages).map(|_| Vec::new()).collect();
        for (number, round) in rounds.into_iter().enumerate() {
            by_stage[number % stages].push(round);
        }
        let ended = stream::iter(by_stage.into_iter().enumerate().map(|(stage, rounds)| async move {
            let mut ended = Vec::new();
            for round in rounds {
                let base = u64::try_from(stage).unwrap_or(0) * STAGE_LEN;
                ended.extend(this.round(copies, base, round).await);
            }
            ended
        }));
        let mut ended = ended.buffer_unordered(stages);
        while let Some(pieces) = ended.next().await {
            pieces.into_iter().for_each(|(copy, outcome)| statuses[copy].add(outcome));
        }
        statuses.into_iter().map(Ending::status).collect()
    }

    /// Reads the pieces into the buffer at `base`, then writes those that came.
    async fn round(&self, copies: &[Copy], base: u64, pieces: Vec<Piece>) -> Vec<(usize, Result<(), Failure>)> {
        let mut ended = Vec::new();
        let fail = |cause| Err(Failure { cause, far: Far::Untouched });
        let mut batch = Batch::with_capacity(pieces.len()).class(self.class);
        let mut read = Vec::new();
        for piece in pieces {
            let source = copies[piece.copy].source.slice(piece.at, piece.len);
            match (source, self.region.carve(base + piece.place, piece.len)) {
                (Ok(source), Ok(buffer)) => {
                    batch.push_read(source, buffer);
                    read.push(piece);
                }
                _ => ended.push((piece.copy, fail(Cause::Overload))),
            }
        }
        let mut report = match self.run(batch).await {
            Ok(report) => report,
            Err(cause) => {
                ended.extend(read.iter().map(|piece| (piece.copy, fail(cause.clone()))));
                return ended;
            }
        };
        let mut batch = Batch::with_capacity(read.len()).class(self.class);
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
                let outcomes = report.outcomes().iter().map(|outcome| match &outcome.status {
                    Status::Failed(failure) => Err(failure.clone()),
                    _ => Ok(()),
                });
                ended.extend(written.into_iter().zip(outcomes));
            }
            Err(cause) => ended.extend(written.into_iter().map(|copy| (copy, fail(cause.clone())))),
        }
        ended
    }

    /// Submits a batch, again after the hint when the engine is busy, until the progress deadline.
    async fn run(&self, mut batch: Batch) -> Result<Report, Cause> {
        let deadline = self.engine.runtime().now() + self.engine.options().progress_deadline;
        loop {
            if batch.is_empty() {
                return Ok(Report::empty());
            }
            let refused = match self.engine.submit(batch) {
                Ok(transfer) => return Ok(transfer.await),
                Err(refused) => refused,
            };
            batch = refused.batch;
            match refused.kind {
                SubmitErrorKind::Busy { retry_after } if self.engine.runtime().now() < deadline => {
                    self.engine.runtime().sleep(retry_after.max(Duration::from_millis(1))).await;
                }
                SubmitErrorKind::ShutDown => return Err(Cause::ShutDown),
                _ => return Err(Cause::Overload),
            }
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

/// The pieces of all copies, as many to a buffer as fit.
fn rounds(copies: &[Copy], is_wanted: impl Fn(usize) -> bool) -> Vec<Vec<Piece>> {
    let mut rounds: Vec<Vec<Piece>> = vec![Vec::new()];
    let mut free = 0;
    for (index, copy) in copies.iter().enumerate().filter(|(index, _)| is_wanted(*index)) {
        let mut at = 0;
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
