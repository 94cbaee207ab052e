//! One submitted batch inside the shard, and the slices that it is cut into.
//!
//! What a batch moves to or from one peer is a job of the scheduler; a slice of it is a part here, posted as one frame.
//! Pieces are cut off a job when the scheduler has found a path for them; what of a part failed with its link stays with
//! it. A request ends with its last piece. Invariants: every byte of a request is in a job's rest, in a part, or has ended;
//! a transfer is over exactly when no job of it is left.

use std::sync::Arc;

use millpond_core::batch::Extent;
use millpond_core::quiet::Far;
use millpond_core::slab::Handle;
use millpond_core::time::Instant;
use millpond_core::transfer::{self, Limits, Load, PathId};
use millpond_hal::fabric;

use super::batch::{Arrival, Batch, RawRange, Request, Settings, Via};
use super::statistics::Considered;
use super::transfer::{Cause, Failure, Outcome, Report, Shared, Status};
use super::{RegionBuf, RegionBytes, RemoteRegion};

/// A transfer as the shard sees it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) shared: Arc<Shared>,
    pub(super) outcomes: Vec<Outcome>,
    /// Emptied; goes back to the caller for its allocation.
    requests: Vec<Request>,
    pub(super) settings: Settings,
    /// The peers' regions it names, held until it ends so that they stay attached.
    pub(super) remotes: Vec<RemoteRegion>,
    /// Cut-off rests of buffers, by request and offset within it.
    rests: Vec<(u32, u64, RegionBuf)>,
    /// Remote regions that it writes, one each, if an arrival has to follow.
    pub(super) written: Vec<u32>,
    pub(super) start: Instant,
    pub(super) deadline: Instant,
    /// Jobs of the scheduler that have not ended.
    pub(super) jobs: u32,
    pub(super) retries: u32,
    pub(super) used: Option<Via>,
    /// What the scheduler thought of its first peer's paths, and who that is.
    pub(super) considered: Option<(Handle, Considered)>,
    /// The arrival, while it still has to be announced by a job of its own.
    pub(super) arrival: Option<Arrival>,
}

/// What of a transfer goes to one peer: a job of the scheduler, and the pieces that were not cut off it.
#[derive(Debug)]
pub(super) struct Row {
    /// The job, once it was submitted.
    pub(super) job: Handle,
    pub(super) work: Handle,
    pub(super) peer: Handle,
    pub(super) rest: Vec<Piece>,
    /// The first of them that is not cut off.
    pub(super) next: usize,
    pub(super) bytes: u64,
    pub(super) has_writes: bool,
    /// Some of it was cut off.
    pub(super) is_cut: bool,
    /// To be counted in that remote region; for a job without pieces.
    pub(super) arrival: Option<(u32, Arrival)>,
}

/// A slice: pieces for one peer that travel together.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) work: Handle,
    pub(super) peer: Handle,
    pub(super) pieces: Vec<Piece>,
    /// To be counted in that remote region once the writes are there.
    pub(super) arrival: Option<(u32, Arrival)>,
    pub(super) posted: Option<Posted>,
}

/// Where a part is under way.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) ticket: fabric::Ticket,
    pub(super) posting: transfer::Posting,
    pub(super) path: PathId,
}

/// (A part of) one request.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) request: u32,
    /// Index in [`Work::remotes`].
    pub(super) remote: u32,
    pub(super) remote_offset: u64,
    /// Offset of the piece in its request.
    pub(super) at: u64,
    pub(super) len: u64,
    /// Taken while posted.
    pub(super) local: Option<Local>,
}

/// The local side of a piece.
#[derive(Debug)]
pub(super) enum Local {
    Source(RegionBytes),
    Target(RegionBuf),
    RawSource(RawRange),
    RawTarget(RawRange),
}

impl Piece {
    /// As the fabric wants it, over a link where the remote region is attached as `region`.
    pub(super) fn as_request(&mut self, region: Handle) -> Option<fabric::Request> {
        let there = Extent::new(region, self.remote_offset, self.len);
        let raw = |range: &RawRange| range.region.extent(range.offset, self.len);
        match &self.local {
            Some(Local::RawSource(range)) => {
                return Some(fabric::Request::WriteRaw { source: raw(range), target: there });
            }
            Some(Local::RawTarget(range)) => {
                return Some(fabric::Request::ReadRaw { source: there, target: raw(range) });
            }
            _ => {}
        }
        Some(match self.local.take()? {
            Local::Source(source) => fabric::Request::Write { source, target: there },
            Local::Target(target) => fabric::Request::Read { source: there, target },
            Local::RawSource(_) | Local::RawTarget(_) => return None,
        })
    }

    /// Takes its memory back from the fabric. A raw range was lent, not given.
    pub(super) fn give_back(&mut self, request: fabric::Request) {
        match request {
            fabric::Request::Write { source, .. } => self.local = Some(Local::Source(source)),
            fabric::Request::Read { target, .. } => self.local = Some(Local::Target(target)),
            _ => {}
        }
    }
}

impl Work {
    pub(super) fn new(shared: Arc<Shared>, batch: Batch, now: Instant) -> Self {
        let Batch { requests, settings, outcomes, remotes, after: _ } = batch;
        Self {
            shared,
            outcomes,
            requests,
            settings,
            remotes,
            rests: Vec::new(),
            written: Vec::new(),
            start: now,
            deadline: settings.deadline.map_or(Instant::NEVER, |span| now + span),
            jobs: 0,
            retries: 0,
            used: None,
            considered: None,
            arrival: settings.arrival,
        }
    }

    /// Moves its requests into rows, one per peer. `key` is its place in the shard's table. Emptied lists from `spare` are
    /// used again.
    pub(super) fn rows(&mut self, key: Handle, rows: &mut Vec<Row>, spare: &mut Vec<Vec<Piece>>) {
        let mut requests = std::mem::take(&mut self.requests);
        self.outcomes.reserve(requests.len());
        for (index, request) in (0u32..).zip(requests.drain(..)) {
            let (peer, piece) = self.piece(index, request);
            // One peer in most batches.
            let at = match rows.iter().rposition(|row| row.peer == peer) {
                Some(at) => at,
                None => {
                    rows.push(Row::new(key, peer, spare.pop().unwrap_or_default()));
                    rows.len() - 1
                }
            };
            rows[at].bytes += piece.len;
            rows[at].has_writes |= piece.is_write();
            rows[at].rest.push(piece);
        }
        self.requests = requests;
    }

    /// All of a request as one piece, and the peer it is for.
    fn piece(&mut self, index: u32, request: Request) -> (Handle, Piece) {
        let len = request.remote().len();
        let region = &request.remote().region;
        let is_same = self.remotes.last().is_some_and(|last| Arc::ptr_eq(&last.inner, &region.inner));
        if !is_same {
            self.remotes.push(region.clone());
        }
        let remote = u32::try_from(self.remotes.len() - 1).unwrap_or(u32::MAX);
        let peer = region.peer().inner.key;
        let remote_offset = request.remote().offset;
        let local = match request {
            Request::Write { source, .. } => Local::Source(source),
            Request::Read { target, .. } => Local::Target(target),
            Request::WriteRaw { source, .. } => Local::RawSource(source),
            Request::ReadRaw { target, .. } => Local::RawTarget(target),
            Request::Copy { .. } => unreachable!("copies are staged, and their halves come here"),
        };
        let piece = Piece { request: index, remote, remote_offset, at: 0, len, local: Some(local) };
        if piece.is_write() && self.arrival.is_some() {
            self.note_written(remote);
        }
        self.outcomes.push(Outcome::pending(len));
        (peer, piece)
    }

    /// Remembers a region that the arrival is for, once per grant.
    fn note_written(&mut self, remote: u32) {
        let name =
            |at: u32| self.remotes.get(at as usize).map(|region| (region.peer().inner.key, region.inner.token.region));
        let named = name(remote);
        if self.written.last() != Some(&remote) && !self.written.iter().any(|other| name(*other) == named) {
            self.written.push(remote);
        }
    }

    /// A piece ended well.
    pub(super) fn on_piece_done(&mut self, piece: Piece) {
        let Some(outcome) = self.outcomes.get_mut(piece.request as usize) else { return };
        outcome.tally.on_done(piece.len);
        self.shared.add_bytes(piece.len);
        self.end_piece(piece);
    }

    /// A piece ended otherwise. The first failure of a request stays; the worst far end counts.
    pub(super) fn on_piece_failed(&mut self, piece: Piece, failure: Failure) {
        let Some(outcome) = self.outcomes.get_mut(piece.request as usize) else { return };
        outcome.tally.on_failed(failure.cause, failure.far);
        self.end_piece(piece);
    }

    /// What was not cut off a request never will be.
    pub(super) fn on_rest_failed(&mut self, piece: Piece, cause: Cause) {
        let Some(outcome) = self.outcomes.get_mut(piece.request as usize) else { return };
        outcome.tally.end(cause);
        self.end_piece(piece);
    }

    fn end_piece(&mut self, piece: Piece) {
        let Some(outcome) = self.outcomes.get_mut(piece.request as usize) else { return };
        match piece.local {
            Some(Local::Target(buffer)) if outcome.buffer.is_none() && piece.at == 0 => outcome.buffer = Some(buffer),
            Some(Local::Target(buffer)) => self.rests.push((piece.request, piece.at, buffer)),
            _ => {}
        }
        outcome.status = match outcome.tally.status() {
            transfer::Status::Pending => Status::Pending,
            transfer::Status::Done => Status::Done,
            transfer::Status::Failed { cause, far } => Status::Failed(Failure { cause, far }),
        };
    }

    /// Whether a request failed.
    pub(super) fn has_failed(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.tally.has_failed() || matches!(outcome.status, Status::Failed(_)))
    }

    /// The writes are there, but their arrival could not be announced: whoever waits for it is not told, so neither may the
    /// caller believe in it.
    pub(super) fn fail_arrival(&mut self, failure: &Failure) {
        for outcome in &mut self.outcomes {
            if outcome.status == Status::Done {
                outcome.status = Status::Failed(Failure { far: Far::Unknown, ..failure.clone() });
            }
        }
    }

    /// The report, once no job is left. Cut buffers are joined again.
    pub(super) fn into_report(mut self, now: Instant) -> (Arc<Shared>, Report) {
        self.rests.sort_unstable_by_key(|(request, at, _)| (*request, *at));
        for (request, _, rest) in self.rests.drain(..) {
            let outcome = &mut self.outcomes[request as usize];
            outcome.buffer = match outcome.buffer.take() {
                // Neighbours of one buffer always join; if they did not, the second would go back to its region.
                Some(buffer) => Some(buffer.unsplit(rest).unwrap_or_else(|(first, _)| first)),
                None => Some(rest),
            };
        }
        self.remotes.clear();
        let Self { requests, settings, remotes, .. } = self;
        let batch = Batch { requests, settings, outcomes: Vec::new(), remotes, after: None };
        let (id, elapsed) = (self.shared.id, now.since(self.start));
        let report = Report { outcomes: self.outcomes, batch, id, elapsed, via: self.used, retries: self.retries };
        (self.shared, report)
    }
}

impl Row {
    pub(super) fn new(work: Handle, peer: Handle, rest: Vec<Piece>) -> Self {
        let (has_writes, is_cut) = (false, false);
        Self { job: Handle::default(), work, peer, rest, next: 0, bytes: 0, has_writes, is_cut, arrival: None }
    }

    /// Cuts the next slice off: as many whole pieces as `limits` allow, or the beginning of one that is longer.
    pub(super) fn carve(&mut self, outcomes: &mut [Outcome], limits: Limits, pieces: &mut Vec<Piece>) -> Load {
        let moves_max = usize::try_from(limits.moves.max(1)).unwrap_or(usize::MAX);
        let mut bytes = 0;
        let is_whole = !std::mem::replace(&mut self.is_cut, true);
        if is_whole && self.rest.len() <= moves_max && self.bytes <= limits.bytes {
            bytes = self.bytes;
            std::mem::swap(&mut self.rest, pieces);
        } else {
            // Bounded by the moves: each round takes one.
            while let Some(piece) = self.rest.get_mut(self.next).filter(|_| pieces.len() < moves_max) {
                let room = limits.bytes.saturating_sub(bytes);
                if piece.len > room && !pieces.is_empty() {
                    break;
                }
                let rest = if piece.len > room { piece.split_off(room.max(1)) } else { None };
                bytes += piece.len;
                let taken = Piece { local: piece.local.take(), ..*piece };
                match rest {
                    Some(rest) => *piece = rest,
                    None => self.next += 1,
                }
                pieces.push(taken);
            }
        }
        for piece in pieces.iter() {
            let cut = outcomes.get_mut(piece.request as usize).and_then(|outcome| outcome.tally.cut(piece.len));
            debug_assert_eq!(cut, Some((piece.at, piece.len)));
        }
        Load { bytes, moves: u32::try_from(pieces.len()).unwrap_or(u32::MAX), slices: 0 }
    }

    /// Whether all of it was cut off.
    pub(super) fn is_spent(&self) -> bool {
        self.next >= self.rest.len()
    }
}

impl Piece {
    pub(super) fn is_write(&self) -> bool {
        matches!(self.local, Some(Local::Source(_) | Local::RawSource(_)))
    }

    /// Keeps the first `len` bytes and gives the rest; `None` if it cannot be cut there: then it goes as it is, and the
    /// link judges its size.
    fn split_off(&mut self, len: u64) -> Option<Self> {
        let local = self.local.as_mut()?.split_off(len)?;
        let (remote_offset, at) = (self.remote_offset + len, self.at + len);
        let rest = Self { remote_offset, at, len: self.len - len, local: Some(local), ..*self };
        self.len = len;
        Some(rest)
    }
}

impl Local {
    /// Keeps the first `at` bytes and gives the rest; `None` if it cannot be cut there.
    fn split_off(&mut self, at: u64) -> Option<Self> {
        let place = usize::try_from(at).ok()?;
        match self {
            Self::Source(bytes) => {
                let rest = bytes.slice(place..);
                *bytes = bytes.slice(..place);
                Some(Self::Source(rest))
            }
            Self::Target(buffer) => buffer.split_off(at).ok().map(Self::Target),
            Self::RawSource(range) => Some(Self::RawSource(range.skip(at))),
            Self::RawTarget(range) => Some(Self::RawTarget(range.skip(at))),
        }
    }
}
