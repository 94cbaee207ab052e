//! Moving values between the segment and client memory, in pieces.
//!
//! A piece is at most [`PIECE_LEN`] bytes, begins at a chunk's start, and is checked as soon as it came, while the next
//! pieces travel. At most two batches of [`BATCH_LEN`] bytes are under way, so that a value of any length needs no message
//! and no queue of its size.

use std::collections::VecDeque;

use millpond_core::time::Duration;
use millpond_core::wire::message::store::Range;
use millpond_hal::region::{RegionBuf, RegionBytes};

use super::checksum::{CHUNK_LEN, first_damaged};
use crate::engine::{Batch, Engine, RemoteRegion, Report, Transfer, Via};
use crate::runtime::Runtime;

/// Bytes of one piece, a multiple of [`CHUNK_LEN`].
const PIECE_LEN: usize = 16 * CHUNK_LEN;
/// Bytes of one batch.
const BATCH_LEN: usize = 2 * PIECE_LEN;
/// Batches under way.
const BATCHES_MAX: usize = 2;

/// Why a value did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MoveError {
    /// The transfer failed.
    #[error("{0}")]
    Transfer(String),
    /// A chunk's checksum is wrong.
    #[error("the checksum of chunk {0} is wrong: the bytes changed under way or while they were sent; send them again")]
    Damaged(usize),
    /// The ranges do not lie in the memory that was granted.
    #[error("the memory named does not fit: {0}")]
    Ranges(String),
}

/// How to move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way<'a> {
    pub(super) remote: &'a RemoteRegion,
    pub(super) via: Via,
    pub(super) progress_deadline: Duration,
}

impl Way<'_> {
    fn batch(&self) -> Batch {
        Batch::new().via(self.via).progress_deadline(self.progress_deadline)
    }
}

/// Walks over scattered ranges.
struct Cursor<'a> {
    ranges: &'a [Range],
    index: usize,
    done: u64,
}

impl<'a> Cursor<'a> {
    fn new(ranges: &'a [Range]) -> Self {
        Self { ranges, index: 0, done: 0 }
    }

    /// The next bytes, at most `max` of them, all of one range. The caller has compared the sums.
    fn take(&mut self, max: u64) -> Option<Range> {
        while self.ranges.get(self.index)?.len == self.done {
            (self.index, self.done) = (self.index + 1, 0);
        }
        let range = self.ranges[self.index];
        let taken = Range { offset: range.offset.checked_add(self.done)?, len: max.min(range.len - self.done) };
        self.done += taken.len;
        Some(taken)
    }
}

/// A value on its way into the segment.
pub(super) struct Incoming<'a> {
    pub(super) buf: RegionBuf,
    pub(super) source: &'a [Range],
    pub(super) checksums: &'a [u32],
}

/// A piece under way: which value, how many parts it was cut into.
struct Piece {
    value: usize,
    parts: usize,
}

/// Reads values out of client memory and checks them. A result per value, in order.
pub(super) async fn pull<R: Runtime>(
    engine: &Engine<R>,
    way: Way<'_>,
    values: Vec<Incoming<'_>>,
) -> Vec<Result<RegionBuf, MoveError>> {
    let mut results: Vec<Result<Option<RegionBuf>, MoveError>> = values.iter().map(|_| Ok(None)).collect();
    let expected: Vec<&[u32]> = values.iter().map(|value| value.checksums).collect();
    let mut under_way: VecDeque<(Transfer, Vec<Piece>)> = VecDeque::new();
    let (mut batch, mut pieces) = (way.batch(), Vec::new());
    for (index, value) in values.into_iter().enumerate() {
        let (mut rest, mut cursor) = (Some(value.buf), Cursor::new(value.source));
        while let Some(mut piece) = rest.take() {
            if piece.len() > PIECE_LEN {
                match piece.split_off(PIECE_LEN as u64) {
                    Ok(tail) => rest = Some(tail),
                    Err(error) => {
                        results[index] = Err(MoveError::Ranges(error.to_string()));
                        break;
                    }
                }
            }
            match push_reads(&mut batch, way.remote, piece, &mut cursor) {
                Ok(parts) => pieces.push(Piece { value: index, parts }),
                Err(error) => {
                    results[index] = Err(error);
                    break;
                }
            }
            if batch.bytes() >= BATCH_LEN as u64 {
                submit(
                    engine,
                    std::mem::replace(&mut batch, way.batch()),
                    std::mem::take(&mut pieces),
                    &mut under_way,
                    &mut results,
                );
            }
            while under_way.len() >= BATCHES_MAX {
                settle(&mut under_way, &expected, &mut results).await;
            }
        }
    }
    if !batch.is_empty() {
        submit(engine, batch, pieces, &mut under_way, &mut results);
    }
    while !under_way.is_empty() {
        settle(&mut under_way, &expected, &mut results).await;
    }
    let missing = || MoveError::Ranges("no bytes were named".to_owned());
    results.into_iter().map(|result| result.and_then(|buf| buf.ok_or_else(missing))).collect()
}

/// Adds the reads of one piece: one per range it spans. Returns how many.
fn push_reads(
    batch: &mut Batch,
    remote: &RemoteRegion,
    mut piece: RegionBuf,
    cursor: &mut Cursor<'_>,
) -> Result<usize, MoveError> {
    let ranges = |error: &dyn std::fmt::Display| MoveError::Ranges(error.to_string());
    let mut reads = Vec::new();
    loop {
        let len = piece.len();
        let range = cursor.take(len as u64).ok_or_else(|| ranges(&"fewer bytes than the value has"))?;
        let extent = remote.extent(range.offset, range.len).map_err(|error| ranges(&error))?;
        let taken = usize::try_from(range.len).map_err(|error| ranges(&error))?;
        let tail = if taken < len { Some(piece.split_off(range.len).map_err(|error| ranges(&error))?) } else { None };
        reads.push((extent, piece));
        match tail {
            Some(tail) => piece = tail,
            None => break,
        }
    }
    let parts = reads.len();
    for (extent, buf) in reads {
        batch.push_read(extent, buf);
    }
    Ok(parts)
}

fn submit<R: Runtime>(
    engine: &Engine<R>,
    batch: Batch,
    pieces: Vec<Piece>,
    under_way: &mut VecDeque<(Transfer, Vec<Piece>)>,
    results: &mut [Result<Option<RegionBuf>, MoveError>],
) {
    match engine.submit(batch) {
        Ok(transfer) => under_way.push_back((transfer, pieces)),
        Err(error) => {
            for piece in pieces {
                results[piece.value] = Err(MoveError::Transfer(error.to_string()));
            }
        }
    }
}

/// Waits for the oldest batch, joins and checks its pieces.
async fn settle(
    under_way: &mut VecDeque<(Transfer, Vec<Piece>)>,
    expected: &[&[u32]],
    results: &mut [Result<Option<RegionBuf>, MoveError>],
) {
    let Some((transfer, pieces)) = under_way.pop_front() else { return };
    let mut report = transfer.await;
    let mut first = 0;
    for piece in pieces {
        let joined = join(&mut report, first, piece.parts);
        first += piece.parts;
        let before = std::mem::replace(&mut results[piece.value], Ok(None));
        results[piece.value] = before.and_then(|before| append(before, joined?, expected[piece.value]).map(Some));
    }
}

fn join(report: &mut Report, first: usize, parts: usize) -> Result<RegionBuf, MoveError> {
    let mut whole: Option<RegionBuf> = None;
    for index in first..first + parts {
        if let crate::engine::Status::Failed(failure) = &report.outcomes()[index].status {
            return Err(MoveError::Transfer(failure.to_string()));
        }
        let lost = || MoveError::Transfer("the transfer gave no buffer back".to_owned());
        let part = report.take_buffer(index).ok_or_else(lost)?;
        whole = Some(match whole {
            None => part,
            Some(before) => before.unsplit(part).map_err(|_| lost())?,
        });
    }
    whole.ok_or_else(|| MoveError::Transfer("an empty piece".to_owned()))
}

/// Checks `piece` and joins it to what came before it.
fn append(before: Option<RegionBuf>, piece: RegionBuf, checksums: &[u32]) -> Result<RegionBuf, MoveError> {
    let first = before.as_ref().map_or(0, |before| before.len() / CHUNK_LEN);
    let end = (first + piece.len().div_ceil(CHUNK_LEN)).min(checksums.len());
    if let Some(chunk) = first_damaged(&piece, &checksums[first.min(end)..end]) {
        return Err(MoveError::Damaged(first + chunk));
    }
    match before {
        None => Ok(piece),
        Some(before) => before.unsplit(piece).map_err(|_| MoveError::Transfer("pieces came apart".to_owned())),
    }
}

/// A value on its way out of the segment.
pub(super) struct Outgoing<'a> {
    pub(super) bytes: RegionBytes,
    pub(super) target: &'a [Range],
}

/// Writes values into client memory. A result per value, in order.
pub(super) async fn push<R: Runtime>(
    engine: &Engine<R>,
    way: Way<'_>,
    values: Vec<Outgoing<'_>>,
) -> Vec<Result<(), MoveError>> {
    let mut results: Vec<Result<(), MoveError>> = values.iter().map(|_| Ok(())).collect();
    let mut under_way: VecDeque<(Transfer, Vec<usize>)> = VecDeque::new();
    let (mut batch, mut owners) = (way.batch(), Vec::new());
    for (index, value) in values.into_iter().enumerate() {
        let (mut cursor, mut done) = (Cursor::new(value.target), 0);
        while done < value.bytes.len() {
            let max = PIECE_LEN.min(value.bytes.len() - done);
            let range = cursor.take(max as u64).unwrap_or_default();
            let extent = match way.remote.extent(range.offset, range.len) {
                Ok(extent) if range.len > 0 => extent,
                Ok(_) => {
                    results[index] = Err(MoveError::Ranges("fewer bytes than were asked for".to_owned()));
                    break;
                }
                Err(error) => {
                    results[index] = Err(MoveError::Ranges(error.to_string()));
                    break;
                }
            };
            let end = done + usize::try_from(range.len).unwrap_or(max).min(max);
            batch.push_write(value.bytes.slice(done..end), extent);
            owners.push(index);
            done = end;
            if batch.bytes() >= BATCH_LEN as u64 {
                post(
                    engine,
                    std::mem::replace(&mut batch, way.batch()),
                    std::mem::take(&mut owners),
                    &mut under_way,
                    &mut results,
                );
            }
            while under_way.len() >= BATCHES_MAX {
                finish(&mut under_way, &mut results).await;
            }
        }
    }
    if !batch.is_empty() {
        post(engine, batch, owners, &mut under_way, &mut results);
    }
    while !under_way.is_empty() {
        finish(&mut under_way, &mut results).await;
    }
    results
}

fn post<R: Runtime>(
    engine: &Engine<R>,
    batch: Batch,
    owners: Vec<usize>,
    under_way: &mut VecDeque<(Transfer, Vec<usize>)>,
    results: &mut [Result<(), MoveError>],
) {
    match engine.submit(batch) {
        Ok(transfer) => under_way.push_back((transfer, owners)),
        Err(error) => owners.into_iter().for_each(|index| results[index] = Err(MoveError::Transfer(error.to_string()))),
    }
}

async fn finish(under_way: &mut VecDeque<(Transfer, Vec<usize>)>, results: &mut [Result<(), MoveError>]) {
    let Some((transfer, owners)) = under_way.pop_front() else { return };
    let report = transfer.await;
    for (outcome, index) in report.outcomes().iter().zip(owners) {
        if let crate::engine::Status::Failed(failure) = &outcome.status {
            results[index] = Err(MoveError::Transfer(failure.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_cuts_at_the_ends_of_ranges() {
        let ranges = [Range { offset: 10, len: 5 }, Range { offset: 90, len: 0 }, Range { offset: 50, len: 9 }];
        let mut cursor = Cursor::new(&ranges);
        let cuts: Vec<Range> = std::iter::from_fn(|| cursor.take(4)).collect();
        let expected = [(10, 4), (14, 1), (50, 4), (54, 4), (58, 1)];
        assert_eq!(cuts, expected.map(|(offset, len)| Range { offset, len }));
    }
}
