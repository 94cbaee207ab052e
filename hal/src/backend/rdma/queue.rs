//! A data queue of ours: which requests are on it, what their completions mean, and what is left when it breaks.
//!
//! Batches go through in order, each with one request at its end that tells: the arrival, written into the peer's ring with an
//! immediate, or a read of a word of the peer's, which returns only after the writes before it are visible. That request is
//! signalled, others are only every so often. A completion says that everything before it is complete too, so what a broken
//! queue did is known up to the request that failed; what came after it was not started and is posted again elsewhere. Only the
//! first failure says so: of those behind it each completes as flushed, and says nothing of what is before it.

use std::collections::{HashMap, VecDeque};

use super::cut::Cut;
use super::endpoint::{CONFIRM_LEN, Endpoint, OUT_DEPTH, RING_LEN};
use super::job::{Job, Last, Progress, progressed};
use super::link::{Attached, Known};
use super::memory::Local;
use super::message::{ARRIVAL_LEN, Arrival};
use super::record::Record;
use super::verbs::{Operation, SendRequest, Status};
use super::wire_id::{Id, Kind};
use crate::contract::{Access, FarEnd, Inbound, PostedMove, Refusal, TicketId};
use millpond_core::batch::RegionId;

/// One of so many requests is signalled at least.
const SIGNALLED_EVERY: u32 = OUT_DEPTH / 4;
/// A completion is asked for at least every so many bytes, to show progress.
const SIGNALLED_BYTES: u64 = 1 << 20;

pub(super) type Jobs = HashMap<TicketId, Job>;

/// What a request was for.
#[derive(Clone, Copy, Debug)]
enum What {
    /// Bytes of a move.
    Piece { index: usize, offset: u64, len: u32, is_last: bool },
    /// Whether what was written is visible.
    Confirm,
    /// The arrival, in that place of the ring.
    Arrival,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    ticket: TicketId,
    what: What,
}

/// What filling a queue looks at.
pub(super) struct View<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) peer: &'a Record,
    pub(super) attached: &'a HashMap<RegionId, Attached>,
    pub(super) local: &'a Local,
}

/// How a completion changed a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// It goes on.
    Going,
    /// It broke, and can be made anew.
    Broken,
    /// The peer is lost.
    Lost,
    /// The NIC failed the request, by this status.
    Failed,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) index: usize,
    pub(super) generation: u16,
    /// Whether it is connected.
    pub(super) is_ready: bool,
    /// Whether a request failed, and its link ends: no later completion means anything.
    is_broken: bool,
    entries: VecDeque<Entry>,
    /// Number of the first entry.
    first: u32,
    unsignalled: u32,
    unsignalled_bytes: u64,
    /// Batches that are not posted to their end.
    jobs: VecDeque<TicketId>,
    free_slots: Vec<u16>,
    arrivals: [Option<TicketId>; RING_LEN as usize],
    requests: Vec<SendRequest>,
}

enum Step {
    /// A request was added.
    Added,
    /// The batch got further without one.
    Moved,
    /// It waits for a place in the ring.
    Stuck,
    /// All of it is posted.
    Through,
}

impl Queue {
    pub(super) fn new(index: usize) -> Self {
        Self {
            index,
            generation: 0,
            is_ready: true,
            is_broken: false,
            entries: VecDeque::with_capacity(OUT_DEPTH as usize),
            first: 0,
            unsignalled: 0,
            unsignalled_bytes: 0,
            jobs: VecDeque::new(),
            free_slots: (0..RING_LEN).rev().collect(),
            arrivals: [None; RING_LEN as usize],
            requests: Vec::with_capacity(OUT_DEPTH as usize),
        }
    }

    pub(super) fn push(&mut self, ticket: TicketId) {
        self.jobs.push_back(ticket);
    }

    fn has_room(&self) -> bool {
        self.entries.len() < OUT_DEPTH as usize
    }

    /// Turns waiting batches into requests, as many as the queue has room for, to be posted by one doorbell. Batches that
    /// are over already go to `over`.
    pub(super) fn fill(&mut self, view: &View<'_>, jobs: &mut Jobs, over: &mut Vec<TicketId>) -> &[SendRequest] {
        self.requests.clear();
        if !self.is_ready {
            return &self.requests;
        }
        // Bounded by the queue's depth and its batches.
        while let Some(&ticket) = self.jobs.front().filter(|_| self.has_room()) {
            let Some(job) = jobs.get_mut(&ticket) else {
                self.jobs.pop_front();
                continue;
            };
            match self.step(view, job) {
                Step::Added | Step::Moved => {}
                Step::Stuck => break,
                Step::Through => {
                    self.jobs.pop_front();
                    if job.is_over() {
                        over.push(ticket);
                    }
                }
            }
        }
        &self.requests
    }

    /// Only the first `posted` requests of the last fill were taken: the link ends, and this is what may have been done.
    pub(super) fn forget_unposted(&mut self, posted: usize) {
        let kept = self.entries.len().saturating_sub(self.requests.len() - posted.min(self.requests.len()));
        self.entries.truncate(kept);
    }

    fn step(&mut self, view: &View<'_>, job: &mut Job) -> Step {
        if job.is_cancelled {
            job.call_off();
        }
        let Some(posted) = job.current().copied() else { return self.end(view, job) };
        if job.offset == 0 && !matches!(job.progress[job.next], Progress::Waiting | Progress::Sent) {
            job.advance();
            return Step::Moved;
        }
        match self.piece(view, job, &posted) {
            Ok(()) if posted.remote.len == 0 => Step::Moved,
            Ok(()) => Step::Added,
            Err(refusal) => {
                job.refuse_current(refusal);
                Step::Moved
            }
        }
    }

    /// Adds the next request of a move, after checking what the owner would refuse.
    fn piece(&mut self, view: &View<'_>, job: &mut Job, posted: &PostedMove) -> Result<(), Refusal> {
        let (rights, keys) = match view.attached.get(&posted.remote.region).map(|attached| &attached.known) {
            Some(Known::Keys(rights, keys)) => (*rights, keys),
            Some(Known::Refused(refusal)) => return Err(*refusal),
            _ => return Err(Refusal::NotProven),
        };
        let piece_len_max = view.endpoint.nic.options().piece_len_max.min(view.endpoint.nic.limits().message_len_max);
        let cut = Cut { keys, chunk_len: view.local.chunk_len(), piece_len_max };
        if job.offset == 0 {
            if !rights.allows(posted.access.right()) {
                return Err(Refusal::WrongRights);
            }
            if !cut.covers(posted.remote.offset, posted.remote.len) {
                return Err(Refusal::OutOfBounds);
            }
            if posted.remote.len == 0 {
                job.progress[job.next] = Progress::Received;
                job.advance();
                return Ok(());
            }
        }
        let (local, remote) = (posted.local_offset + job.offset, posted.remote.offset + job.offset);
        let piece = cut.first(local, remote, posted.remote.len - job.offset).ok_or(Refusal::OutOfBounds)?;
        let local_key = view.local.known_key(posted.local_region, piece.chunk).ok_or(Refusal::Failed)?;
        let key = keys[piece.key];
        let (index, offset) = (job.next, job.offset);
        job.progress[index] = Progress::Sent;
        job.offset += u64::from(piece.len);
        let is_last = job.offset == posted.remote.len;
        if is_last {
            job.advance();
        }
        job.has_written |= posted.access == Access::Write;
        let tells = job.current().is_none() && !job.has_written && job.post.arrival.is_none();
        let is_write = posted.access == Access::Write;
        let request = SendRequest {
            id: 0,
            operation: if is_write { Operation::Write } else { Operation::Read },
            local: posted.local.as_ptr().addr() as u64 + offset,
            len: piece.len,
            local_key,
            remote: key.address.wrapping_add(remote - key.offset),
            remote_key: key.remote_key,
            is_signalled: tells,
            is_inline: is_write && piece.len <= view.endpoint.out[self.index].inline_len_max,
        };
        self.add(job, What::Piece { index, offset, len: piece.len, is_last }, request);
        Ok(())
    }

    /// All moves are posted: adds the request that tells.
    fn end(&mut self, view: &View<'_>, job: &mut Job) -> Step {
        let wanted = job.post.arrival.filter(|_| !job.is_cancelled && job.is_whole());
        let known = |region| view.attached.get(&region).map(|attached| &attached.known);
        let refusal = wanted.and_then(|arrival| match known(arrival.region) {
            Some(Known::Keys(..)) => None,
            Some(Known::Refused(refusal)) => Some(*refusal),
            _ => Some(Refusal::NotProven),
        });
        if let (Some(arrival), None) = (wanted, refusal) {
            let Some(slot) = self.free_slots.pop() else { return Step::Stuck };
            self.arrivals[usize::from(slot)] = Some(job.post.ticket);
            let record = Arrival { region: arrival.region, counter: arrival.counter, amount: arrival.amount };
            let request = SendRequest {
                id: 0,
                operation: Operation::WriteWithImmediate(u32::from(slot)),
                local: view.endpoint.fill_arrival(self.index, slot, &record.to_bytes()),
                len: u32::try_from(ARRIVAL_LEN).expect("short"),
                local_key: view.endpoint.local_key(),
                remote: Endpoint::ring_slot_there(view.peer, self.index, slot),
                remote_key: view.peer.ring_key,
                is_signalled: true,
                is_inline: ARRIVAL_LEN <= view.endpoint.out[self.index].inline_len_max as usize,
            };
            job.last = Last::Arriving;
            self.add(job, What::Arrival, request);
        } else {
            if job.has_written || job.is_unreported {
                let request = SendRequest {
                    id: 0,
                    operation: Operation::Read,
                    local: view.endpoint.landing(),
                    len: CONFIRM_LEN,
                    local_key: view.endpoint.local_key(),
                    remote: view.endpoint.word_there(view.peer),
                    remote_key: view.peer.ring_key,
                    is_signalled: true,
                    is_inline: false,
                };
                self.add(job, What::Confirm, request);
            }
            job.last = refusal.map_or(Last::Posted, |refusal| Last::Counted(Err(refusal)));
        }
        job.has_written = false;
        Step::Through
    }

    fn add(&mut self, job: &mut Job, what: What, mut request: SendRequest) {
        let number = self.first.wrapping_add(u32::try_from(self.entries.len()).expect("within the depth"));
        let index = u8::try_from(self.index).expect("few queues");
        request.id = Id::new(Kind::Out, index, self.generation, number).bits();
        self.unsignalled += 1;
        self.unsignalled_bytes += u64::from(request.len);
        let is_due = self.unsignalled >= SIGNALLED_EVERY || self.unsignalled_bytes >= SIGNALLED_BYTES;
        request.is_signalled |= is_due || self.entries.len() + 1 == OUT_DEPTH as usize;
        if request.is_signalled {
            (self.unsignalled, self.unsignalled_bytes) = (0, 0);
        }
        job.is_unreported = !request.is_signalled;
        job.on_the_way += 1;
        self.entries.push_back(Entry { ticket: job.post.ticket, what });
        self.requests.push(request);
    }

    /// A request completed, and all before it.
    pub(super) fn complete(
        &mut self,
        (number, status): (u32, Status),
        packet_len: u32,
        jobs: &mut Jobs,
        over: &mut Vec<TicketId>,
        inbound: &mut dyn Inbound,
    ) -> Settled {
        let before = number.wrapping_sub(self.first);
        if self.is_broken || before as usize >= self.entries.len() {
            // Flushed, of a queue that was made anew, or the NIC's invention; nothing of ours waits for it.
            return Settled::Going;
        }
        let done = before + u32::from(status == Status::Done);
        for _ in 0..done {
            let Some(entry) = self.take() else { break };
            settle(&entry, jobs, over, inbound);
        }
        let settled = match status {
            Status::Done => Settled::Going,
            Status::RemoteAccess => self.break_off(packet_len, jobs, over),
            Status::NoAnswer | Status::NotReady => Settled::Lost,
            Status::Flushed | Status::Other(_) => Settled::Failed,
        };
        self.is_broken = matches!(settled, Settled::Lost | Settled::Failed);
        settled
    }

    fn take(&mut self) -> Option<Entry> {
        self.first = self.first.wrapping_add(1);
        self.entries.pop_front()
    }

    /// The first request found the peer's memory out of reach, and the queue pair is in error: refuses its move, and takes
    /// back what came after it.
    fn break_off(&mut self, packet_len: u32, jobs: &mut Jobs, over: &mut Vec<TicketId>) -> Settled {
        let Some(failed) = self.take() else { return Settled::Failed };
        let What::Piece { index, offset, len, .. } = failed.what else { return Settled::Lost };
        if let Some(job) = jobs.get_mut(&failed.ticket) {
            job.on_the_way -= 1;
            let is_write = job.post.moves[index].access == Access::Write;
            let is_whole = offset == 0 && len <= packet_len && !job.is_repeated;
            let far_end = if is_write && !is_whole { FarEnd::Unknown } else { FarEnd::Untouched };
            job.progress[index] = Progress::Refused(Refusal::Stale, far_end);
            if job.next == index {
                job.advance();
            }
        }
        let mut returned: Vec<TicketId> = Vec::new();
        while let Some(entry) = self.take() {
            let Some(job) = jobs.get_mut(&entry.ticket) else { continue };
            take_back(job, &entry);
            if returned.last() != Some(&entry.ticket) {
                returned.push(entry.ticket);
            }
        }
        for ticket in returned.into_iter().rev().filter(|ticket| !self.jobs.contains(ticket)).collect::<Vec<_>>() {
            self.jobs.push_front(ticket);
        }
        if jobs.get(&failed.ticket).is_some_and(Job::is_over) {
            over.push(failed.ticket);
        }
        self.free_slots = (0..RING_LEN).rev().collect();
        self.arrivals = [None; RING_LEN as usize];
        (self.unsignalled, self.unsignalled_bytes) = (0, 0);
        self.generation = self.generation.wrapping_add(1);
        self.is_ready = false;
        Settled::Broken
    }

    /// The owner answered the arrival in that place. `None`: there was none.
    pub(super) fn counted(&mut self, slot: u16) -> Option<TicketId> {
        let ticket = self.arrivals.get_mut(usize::from(slot))?.take()?;
        self.free_slots.push(slot);
        Some(ticket)
    }
}

fn settle(entry: &Entry, jobs: &mut Jobs, over: &mut Vec<TicketId>, inbound: &mut dyn Inbound) {
    let Some(job) = jobs.get_mut(&entry.ticket) else { return };
    job.on_the_way -= 1;
    if let What::Piece { index, len, is_last, .. } = entry.what {
        if is_last && job.progress[index] == Progress::Sent {
            job.progress[index] = Progress::Received;
        }
        progressed(entry.ticket, u64::from(len), inbound);
    }
    if job.is_over() {
        over.push(entry.ticket);
    }
}

/// A request that was never started goes back to its batch.
fn take_back(job: &mut Job, entry: &Entry) {
    job.on_the_way -= 1;
    job.is_repeated = true;
    match entry.what {
        What::Piece { index, offset, .. } => {
            let is_live = matches!(job.progress[index], Progress::Sent | Progress::Received);
            if is_live && (index, offset) < (job.next, job.offset) {
                (job.next, job.offset) = (index, offset);
            }
        }
        What::Confirm | What::Arrival => {}
    }
    // Whatever was written before is confirmed anew.
    job.has_written = true;
    job.last = Last::Waiting;
}
