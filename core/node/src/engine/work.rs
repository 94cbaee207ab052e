//! One submitted batch inside the shard, cut into parts that fit a link.
//!
//! A part goes to one peer and is posted as one frame; what of it failed with its link becomes a part again. A request ends
//! with its last piece. Invariants: every piece belongs to exactly one part or has ended; a transfer is over exactly when
//! no part of it is left.

use std::sync::Arc;

use millpond_core::batch::Extent;
use millpond_core::quiet::Far;
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
use millpond_hal::fabric;

use super::batch::{Arrival, Batch, Class, RawRange, Request, Settings, Via};
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
    pub(super) progress_deadline: Duration,
    pub(super) last_progress: Instant,
    /// Parts queued or posted.
    pub(super) parts: u32,
    /// Set once it is to end early; parts that come back are not tried again.
    pub(super) end: Option<Cause>,
    pub(super) retries: u32,
    pub(super) used: Option<Via>,
    /// The arrival, while it still has to be announced by a part of its own.
    pub(super) arrival: Option<Arrival>,
    /// How far `end` was enforced.
    pub(super) enforced: Enforced,
}

/// Steps of ending a transfer early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Enforced {
    /// Not at all.
    No,
    /// Its tickets were cancelled, at that time.
    Cancelled(Instant),
    /// Their links were closed: the end follows without the peer.
    Closed,
}

/// Pieces for one peer that travel together.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) work: Handle,
    pub(super) peer: Handle,
    pub(super) pieces: Vec<Piece>,
    pub(super) bytes: u64,
    pub(super) class: Class,
    pub(super) via: Via,
    /// To be counted in that remote region once the writes are there.
    pub(super) arrival: Option<(u32, Arrival)>,
    /// How often it was posted.
    pub(super) attempts: u8,
    pub(super) has_writes: bool,
    pub(super) posted: Option<Posted>,
}

/// Where a part is under way.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) link: millpond_hal::contract::LinkId,
    pub(super) ticket: fabric::Ticket,
    /// Bytes of it that had moved at the last look.
    pub(super) moved: u64,
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

/// What a link takes at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartLimits {
    pub(super) moves_max: usize,
    pub(super) bytes_max: u64,
}

/// Cuts a batch. Emptied pieces lists from `spare` are used again.
pub(super) struct Cutter<'a> {
    limits: PartLimits,
    work: &'a mut Work,
    parts: &'a mut Vec<Part>,
    spare: &'a mut Vec<Vec<Piece>>,
    /// Where this batch's parts begin.
    first: usize,
}

impl Work {
    pub(super) fn new(shared: Arc<Shared>, batch: Batch, now: Instant, progress_deadline: Duration) -> Self {
        let Batch { requests, settings, outcomes, remotes } = batch;
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
            progress_deadline: settings.progress_deadline.unwrap_or(progress_deadline),
            last_progress: now,
            parts: 0,
            end: None,
            retries: 0,
            used: None,
            arrival: settings.arrival,
            enforced: Enforced::No,
        }
    }

    /// Moves its requests into parts. `key` is its place in the shard's table.
    pub(super) fn cut(&mut self, key: Handle, limits: PartLimits, parts: &mut Vec<Part>, spare: &mut Vec<Vec<Piece>>) {
        let first = parts.len();
        let mut requests = std::mem::take(&mut self.requests);
        self.outcomes.reserve(requests.len());
        let mut cutter = Cutter { limits, work: self, parts, spare, first };
        for (index, request) in (0u32..).zip(requests.drain(..)) {
            cutter.add(key, index, request);
        }
        self.requests = requests;
        self.parts = u32::try_from(parts.len() - first).unwrap_or(u32::MAX);
        // One part into one region can carry the arrival itself; otherwise it follows when all writes are there.
        if let (Some(arrival), [part]) = (self.arrival, &mut parts[first..])
            && self.remotes.len() == 1
            && part.has_writes
        {
            part.arrival = Some((0, arrival));
            self.arrival = None;
            self.written.clear();
        }
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
        self.end_piece(piece, None);
    }

    /// A piece ended otherwise. The first failure of a request stays; the worst far end counts.
    pub(super) fn on_piece_failed(&mut self, piece: Piece, failure: Failure) {
        self.end_piece(piece, Some(failure));
    }

    fn end_piece(&mut self, piece: Piece, failure: Option<Failure>) {
        let Some(outcome) = self.outcomes.get_mut(piece.request as usize) else { return };
        match piece.local {
            Some(Local::Target(buffer)) if outcome.buffer.is_none() && piece.at == 0 => outcome.buffer = Some(buffer),
            Some(Local::Target(buffer)) => self.rests.push((piece.request, piece.at, buffer)),
            _ => {}
        }
        if failure.is_none() {
            self.shared.add_bytes(piece.len);
        }
        outcome.pieces -= 1;
        outcome.failed = match (outcome.failed.take(), failure) {
            (Some(first), Some(next)) => Some(Failure { far: worse(first.far, next.far), ..first }),
            (first, next) => first.or(next),
        };
        outcome.any_done |= outcome.failed.is_none();
        if outcome.pieces == 0 {
            outcome.status = match outcome.failed.take() {
                None => Status::Done,
                // Some pieces of it are there, some are not.
                Some(failure) if outcome.any_done => Status::Failed(Failure { far: Far::Unknown, ..failure }),
                Some(failure) => Status::Failed(failure),
            };
        }
    }

    /// Whether a request failed.
    pub(super) fn has_failed(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.failed.is_some() || matches!(outcome.status, Status::Failed(_)))
    }

    /// The writes are there, but their arrival could not be announced: whoever waits for it is not told, so neither may the
    /// caller believe in it.
    pub(super) fn fail_arrival(&mut self, failure: Failure) {
        for outcome in &mut self.outcomes {
            if outcome.status == Status::Done {
                outcome.status = Status::Failed(Failure { far: Far::Unknown, ..failure.clone() });
            }
        }
    }

    /// The report, once no part is left. Cut buffers are joined again.
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
        let batch = Batch { requests, settings, outcomes: Vec::new(), remotes };
        let (id, elapsed) = (self.shared.id, now.since(self.start));
        let report = Report { outcomes: self.outcomes, batch, id, elapsed, via: self.used, retries: self.retries };
        (self.shared, report)
    }
}

fn worse(a: Far, b: Far) -> Far {
    if a == b { a } else { Far::Unknown }
}

impl Cutter<'_> {
    fn add(&mut self, key: Handle, index: u32, request: Request) {
        let len = request.remote().len();
        let region = &request.remote().region;
        let is_same = self.work.remotes.last().is_some_and(|last| Arc::ptr_eq(&last.inner, &region.inner));
        if !is_same {
            self.work.remotes.push(region.clone());
        }
        let remote = u32::try_from(self.work.remotes.len() - 1).unwrap_or(u32::MAX);
        let peer = region.peer().inner.key;
        let remote_offset = request.remote().offset;
        let is_write = matches!(request, Request::Write { .. } | Request::WriteRaw { .. });
        if is_write && self.work.arrival.is_some() {
            self.work.note_written(remote);
        }
        let mut local = Some(match request {
            Request::Write { source, .. } => Local::Source(source),
            Request::Read { target, .. } => Local::Target(target),
            Request::WriteRaw { source, .. } => Local::RawSource(source),
            Request::ReadRaw { target, .. } => Local::RawTarget(target),
        });
        let (mut pieces, mut at) = (0, 0);
        // Bounded by the length: every round takes a whole part, or ends.
        while let Some(mut head) = local.take() {
            let whole_len = len - at;
            local = if whole_len > self.limits.bytes_max { head.split_off(self.limits.bytes_max) } else { None };
            // A buffer that cannot be cut goes as it is: the link judges its size.
            let piece_len = if local.is_some() { self.limits.bytes_max } else { whole_len };
            let offset = remote_offset + at;
            let piece = Piece { request: index, remote, remote_offset: offset, at, len: piece_len, local: Some(head) };
            self.part_for(key, peer, piece_len).push(piece);
            pieces += 1;
            at += piece_len;
        }
        self.work.outcomes.push(Outcome::pending(len, pieces));
    }

    /// The last part to that peer, if there is room in it, or a new one; one peer in most batches.
    fn part_for(&mut self, key: Handle, peer: Handle, len: u64) -> &mut Part {
        let last = self.parts[self.first..].iter().rposition(|part| part.peer == peer);
        let has_room =
            |part: &Part| part.pieces.len() < self.limits.moves_max && part.bytes + len <= self.limits.bytes_max;
        let at = match last.map(|at| self.first + at).filter(|at| has_room(&self.parts[*at])) {
            Some(at) => at,
            None => {
                let pieces = self.spare.pop().unwrap_or_default();
                self.parts.push(Part::new(key, peer, pieces, &self.work.settings));
                self.parts.len() - 1
            }
        };
        &mut self.parts[at]
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

impl Part {
    pub(super) fn new(work: Handle, peer: Handle, pieces: Vec<Piece>, settings: &Settings) -> Self {
        Self {
            work,
            peer,
            pieces,
            bytes: 0,
            class: settings.class,
            via: settings.via,
            arrival: None,
            attempts: 0,
            has_writes: false,
            posted: None,
        }
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.bytes += piece.len;
        self.has_writes |= matches!(piece.local, Some(Local::Source(_) | Local::RawSource(_)));
        self.pieces.push(piece);
    }
}
