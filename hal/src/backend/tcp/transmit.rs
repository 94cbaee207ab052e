//! The sending half of a lane: a queue of frames, and as many of them in one system call as fit.
//!
//! A frame's head is bytes of ours; its data stays where it is, in lent local memory or in a region of ours that a peer
//! reads, which is resolved anew in every turn. Invariants: frames leave whole and in queue order; what answers a peer is
//! queued ahead of bulk that has not begun; a frame that has begun is finished, with zeros where its source was revoked.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::collections::VecDeque;

use millpond_core::transfer::Credit;
use millpond_core::wire::MOVES_MAX;
use millpond_core::wire::frame::{AckCode, Arrival, Frame, Tag, Trail, Trailer, WireExtent};

use super::STARVED_POSTS_MAX;
use super::serve::{Failure, Jobs, Place, advanced, note_failure, refusal_code, rest_of};
use super::socket::{self, Transfer, Vectors};
use super::ticket::{SliceState, Tickets};
use super::wire::Wire;
use crate::contract::{Access, Event, Inbound, LinkDownReason, LinkId, RemoteRange, TicketId};

/// Bytes that one frame moves, at most: small enough that an answer behind it does not wait long.
const FRAME_DATA_LEN_MAX: u64 = 4 << 20;
/// The same for frames with a checksum, which is taken in one go, and for data frames.
const FRAME_SHORT_LEN_MAX: u64 = 1 << 20;
/// Frames queued ahead of the socket from which on no bulk is added.
const FRAMES_AHEAD_MAX: usize = 16;
/// Bytes of data queued ahead of the socket from which on no bulk is added.
const DATA_AHEAD_LEN_MAX: u64 = 4 << 20;
/// Bytes of answers in one queued frame of heads.
const ANSWERS_LEN_MAX: usize = 16 << 10;
/// Bytes of answers waiting from which on the peer is not read from.
const CLOGGED_LEN_MIN: usize = 64 << 10;
/// Spare head buffers kept.
const SPARE_MAX: usize = 64;
/// The least that one system call is asked to send.
const SEND_LEN_MIN: u64 = 64 << 10;
/// Where zeros come from.
static ZEROS: [u8; 4096] = [0; 4096];

/// What a queued frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    /// One or more frames that are heads only, answers mostly.
    Heads,
    /// A slice of a batch of ours: a write with its data, or a read.
    Slice { ticket: TicketId, slice: u32 },
    /// Part of the answer to a peer's read; `closes` it when it is the last.
    Data { job: u64, closes: bool },
}

struct OutFrame {
    head: Vec<u8>,
    head_sent: usize,
    body: Body,
    data_len: u64,
    data_sent: u64,
    /// The next byte of data, in the slice's moves or the read's extents.
    place: Place,
    /// Padding, checksum, and for the last data of a read perhaps its ack.
    tail: [u8; 64],
    tail_len: usize,
    tail_sent: usize,
    /// How much of the tail is padding and checksum.
    trail_len: usize,
}

impl OutFrame {
    fn new(head: Vec<u8>, body: Body, trail: Trail, crc32c: Option<u32>) -> Self {
        let mut frame = Self {
            head,
            head_sent: 0,
            body,
            data_len: trail.data_len,
            data_sent: 0,
            place: Place::default(),
            tail: [0; 64],
            tail_len: usize_of(trail.pad_len()),
            tail_sent: 0,
            trail_len: 0,
        };
        if let Some(crc32c) = crc32c {
            let trailer = Trailer::new(crc32c).bytes();
            frame.tail[frame.tail_len..frame.tail_len + trailer.len()].copy_from_slice(&trailer);
            frame.tail_len += trailer.len();
        }
        frame.trail_len = frame.tail_len;
        frame
    }

    fn is_begun(&self) -> bool {
        self.head_sent > 0
    }

    fn is_sent(&self) -> bool {
        self.head_sent == self.head.len() && self.data_sent == self.data_len && self.tail_sent == self.tail_len
    }

    /// Puts the read's ack behind the last data, so that both leave in one call.
    fn add_ack(&mut self, tag: Tag) {
        if self.tail_len == self.trail_len
            && let Ok(len) = last_ack(tag).encode(&mut self.tail[self.trail_len..])
        {
            self.tail_len += len;
        }
    }

    /// Takes the ack out again. It cannot have begun while data is unsent.
    fn remove_ack(&mut self) {
        if self.data_sent < self.data_len || self.tail_sent == 0 {
            self.tail_len = self.trail_len;
        }
    }

    fn has_ack(&self) -> bool {
        self.tail_len > self.trail_len
    }
}

fn last_ack(tag: Tag) -> Frame<'static> {
    Frame::Ack { tag, code: AckCode::Done, extent_index: 0, extent_count: 0, touched: false, last: true }
}

/// How a lane's frames are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) generation: u64,
    pub(super) checksummed: bool,
    pub(super) link: LinkId,
    pub(super) lane_slot: u32,
    /// The lane ends when nobody used it for long.
    pub(super) retires: bool,
}

/// What a device lends to a lane while it takes its turn.
pub(super) struct Tools {
    pub(super) tickets: Tickets,
    pub(super) vectors: Vectors,
    pub(super) extents: Vec<WireExtent>,
    /// Where bytes go that nobody may have.
    pub(super) nowhere: Box<[u8]>,
    /// What the peer of each lane may have open.
    pub(super) share: Credit,
}

/// How a flush ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flushed {
    /// Nothing is left to send.
    All,
    /// The socket takes no more.
    Blocked,
    /// There is more to send, in another turn.
    More,
    /// The connection is broken.
    Broken(LinkDownReason),
}

/// The sending half of a lane.
pub(super) struct Transmitter {
    style: Style,
    frames: VecDeque<OutFrame>,
    spare: Vec<Vec<u8>>,
    /// Batches with moves not yet cut into frames.
    queued: VecDeque<TicketId>,
    pub(super) jobs: Jobs,
    jobs_next: bool,
    data_ahead_len: u64,
    /// What the peer takes of us in all, and what it was sent: frames are its slices.
    credit: Credit,
    asked: Credit,
    /// No frame of a batch is begun.
    is_held: bool,
    answers_len: usize,
    /// Reads of the peer whose data was sent and whose ack is to be queued.
    closing: Vec<u64>,
    /// Frames of the peer that were answered since its credit was last looked at, and their bytes.
    pub(super) answered: (u64, u64),
    /// Bytes of our own writes and reads handed to the socket, in all.
    pub(super) sent_len: u64,
}

impl Transmitter {
    pub(super) fn new(style: Style, credit: Credit) -> Self {
        Self {
            style,
            frames: VecDeque::new(),
            spare: Vec::new(),
            queued: VecDeque::new(),
            jobs: Jobs::new(),
            jobs_next: false,
            data_ahead_len: 0,
            credit,
            asked: Credit { bytes: 0, slices: 0 },
            is_held: false,
            answers_len: 0,
            closing: Vec::new(),
            answered: (0, 0),
            sent_len: 0,
        }
    }

    /// Whether something could be sent if the socket takes it; work that waits for credit does not count.
    pub(super) fn has_work(&self, tickets: &mut Tickets) -> bool {
        let ready = |id: &TicketId| tickets.get(*id).is_none_or(|ticket| ticket.has_next());
        !self.frames.is_empty()
            || self.jobs.has_uncut()
            || (self.has_credit() && self.queued.front().is_some_and(ready))
    }

    fn has_credit(&self) -> bool {
        self.credit.admits(self.asked) && !self.is_held
    }

    /// Whether as many batches as may wait for credit.
    pub(super) fn is_starved(&self) -> bool {
        self.queued.len() >= STARVED_POSTS_MAX && !self.credit.admits(self.asked)
    }

    /// Begins no frame of a batch, or does again. Answers go out all the same.
    pub(super) fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Whether so many answers wait that the peer should take them before it is read from.
    pub(super) fn is_clogged(&self) -> bool {
        self.answers_len >= CLOGGED_LEN_MIN
    }

    /// Whether a frame is half sent.
    pub(super) fn is_mid_frame(&self) -> bool {
        self.frames.front().is_some_and(OutFrame::is_begun)
    }

    /// A batch has something to cut.
    pub(super) fn queue(&mut self, id: TicketId) {
        if !self.queued.contains(&id) {
            self.queued.push_back(id);
        }
    }

    pub(super) fn on_credit(&mut self, credit: Credit) {
        self.credit.raise_to(credit);
    }

    /// Queues a frame without data, ahead of bulk that has not begun and behind answers queued before.
    pub(super) fn answer(&mut self, frame: &Frame<'_>) {
        let head_len = frame.head_len();
        let begun = usize::from(self.is_mid_frame());
        let waiting = self.frames.iter().skip(begun).take_while(|frame| frame.body == Body::Heads).count();
        let end = begun + waiting;
        let joins = waiting > 0 && self.frames[end - 1].head.len() + head_len <= ANSWERS_LEN_MAX;
        let index = if joins { end - 1 } else { end };
        if !joins {
            let head = self.spare.pop().unwrap_or_default();
            self.frames.insert(index, OutFrame::new(head, Body::Heads, Trail::default(), None));
        }
        let head = &mut self.frames[index].head;
        let start = head.len();
        head.resize(start + head_len, 0);
        let encoded = frame.encode(&mut head[start..]);
        debug_assert!(encoded.is_ok(), "an answer within all limits was refused: {encoded:?}");
        self.answers_len += head_len;
    }

    /// Acknowledges a frame of the peer: failures one by one, then the end.
    pub(super) fn acknowledge(&mut self, tag: Tag, failures: &[Failure], data_len: u64) {
        for failure in failures {
            let Failure { first: extent_index, count: extent_count, code, touched } = *failure;
            self.answer(&Frame::Ack { tag, code, extent_index, extent_count, touched, last: false });
        }
        self.answer(&last_ack(tag));
        self.count_answered(1, data_len);
    }

    fn count_answered(&mut self, frames: u64, data_len: u64) {
        self.answered.0 += frames;
        self.answered.1 += data_len;
    }

    /// The peer cancels: its reads up to that attempt are forgotten, but for a frame that has begun. Then it is quiet here.
    pub(super) fn on_cancel(&mut self, tag: Tag) {
        self.jobs.cancel(tag);
        let jobs = &self.jobs;
        let spare = &mut self.spare;
        let data_ahead_len = &mut self.data_ahead_len;
        self.frames.retain_mut(|frame| {
            let Body::Data { job, .. } = frame.body else { return true };
            if !jobs.is_cancelled(job) {
                return true;
            }
            if frame.is_begun() {
                frame.remove_ack();
                return true;
            }
            *data_ahead_len -= frame.data_len;
            recycle(spare, core::mem::take(&mut frame.head));
            false
        });
        let being_sent = self.frames.front().and_then(|frame| match frame.body {
            Body::Data { job, .. } => Some(job),
            _ => None,
        });
        let (count, len) = self.jobs.sweep(being_sent);
        self.count_answered(count, len);
        self.answer(&Frame::Quiet { tag });
    }

    /// Takes back what was queued of a batch of ours and not begun.
    pub(super) fn drop_queued(&mut self, id: TicketId, tickets: &mut Tickets) {
        self.queued.retain(|queued| *queued != id);
        let (spare, asked, data_ahead_len) = (&mut self.spare, &mut self.asked, &mut self.data_ahead_len);
        self.frames.retain_mut(|frame| match frame.body {
            Body::Slice { ticket, slice: index } if ticket == id && !frame.is_begun() => {
                if let Some(ticket) = tickets.get(id) {
                    asked.slices -= 1;
                    asked.bytes -= ticket.slices[index as usize].len;
                    ticket.on_slice_dropped(index);
                }
                *data_ahead_len -= frame.data_len;
                recycle(spare, core::mem::take(&mut frame.head));
                false
            }
            _ => true,
        });
    }

    /// Sends what there is, at most about `budget` bytes. Without `inbound` nothing that a peer reads is sent.
    pub(super) fn flush(
        &mut self,
        wire: &mut Wire,
        budget: u64,
        tools: &mut Tools,
        mut inbound: Option<&mut dyn Inbound>,
    ) -> Flushed {
        let mut spent = 0;
        // Bounded: every round sends bytes of a bounded budget, or returns.
        loop {
            self.refill(tools, &mut inbound);
            if self.frames.is_empty() {
                return Flushed::All;
            }
            if spent >= budget {
                return Flushed::More;
            }
            let built = self.build((budget - spent).max(SEND_LEN_MIN), tools, &mut inbound);
            if built == 0 {
                return Flushed::More;
            }
            // SAFETY:
            // - valid for reads: heads and tails belong to queued frames, which stay as they are until `advance`; local
            //   memory is lent until the ticket is finished; resolved memory is good until the current poll returns.
            let sent = match unsafe { wire.send(&mut tools.vectors) } {
                Transfer::Bytes(sent) => sent,
                Transfer::Blocked | Transfer::End => return Flushed::Blocked,
                Transfer::Broken(reason) => return Flushed::Broken(reason),
            };
            self.advance(sent, tools, &mut inbound);
            spent += sent as u64;
            if sent < built {
                return Flushed::Blocked;
            }
        }
    }

    /// Cuts work into frames until enough is queued, peers' reads and our batches in turn.
    fn refill(&mut self, tools: &mut Tools, inbound: &mut Option<&mut dyn Inbound>) {
        while self.frames.len() < FRAMES_AHEAD_MAX && self.data_ahead_len < DATA_AHEAD_LEN_MAX {
            self.jobs_next = !self.jobs_next;
            let data_first = self.jobs_next && self.add_data(inbound);
            if !data_first && !self.add_slice(tools) && !self.add_data(inbound) {
                break;
            }
        }
    }

    /// Queues the next frame of our oldest batch that has one; false if there is none, or no credit.
    fn add_slice(&mut self, tools: &mut Tools) -> bool {
        while self.has_credit()
            && let Some(id) = self.queued.front().copied()
        {
            let Some(ticket) = tools.tickets.get(id).filter(|ticket| ticket.has_next()) else {
                self.queued.pop_front();
                continue;
            };
            let checksummed = self.style.checksummed;
            let len_max = if checksummed { FRAME_SHORT_LEN_MAX } else { FRAME_DATA_LEN_MAX };
            let index = ticket.cut(usize::from(MOVES_MAX), len_max);
            let arrival = ticket.take_arrival(index);
            let tag = ticket.tag(self.style.generation, index);
            let extents = &mut tools.extents;
            extents.clear();
            extents.extend(ticket.pieces(index).map(|(posted, offset, len)| WireExtent {
                region_slot: posted.remote.region.slot.into(),
                region_epoch: posted.remote.region.epoch.into(),
                offset: (posted.remote.offset + offset).into(),
                len: len.into(),
            }));
            let arrival = arrival.map(|arrival| {
                if extents.is_empty() {
                    let offset = ticket.arrival_offset(&arrival);
                    extents.push(millpond_core::batch::Extent::new(arrival.region, offset, 0).into());
                }
                Arrival { region: arrival.region, counter: arrival.counter, amount: arrival.amount }
            });
            let slice = &ticket.slices[index as usize];
            let (access, len) = (slice.access, slice.len);
            let frame = match access {
                Access::Write => Frame::Write { tag, extents, arrival, checksummed },
                Access::Read => Frame::Read { tag, extents, checksummed },
            };
            let digest = (checksummed && access == Access::Write).then(|| {
                let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
                for (posted, offset, len) in ticket.pieces(index) {
                    // SAFETY: lent for reads until the ticket finishes; the piece lies inside the move.
                    unsafe { socket::digest_memory(at(posted.local, offset), usize_of(len), &mut digest) };
                }
                crc32c(&digest)
            });
            let head = encoded(&mut self.spare, &frame);
            let mut queued = OutFrame::new(head, Body::Slice { ticket: id, slice: index }, frame.trail(), digest);
            queued.place = Place { index: 0, offset: ticket.slices[index as usize].first_offset };
            self.data_ahead_len += queued.data_len;
            self.asked.slices += 1;
            self.asked.bytes += len;
            self.frames.push_back(queued);
            return true;
        }
        false
    }

    /// Queues the next data frame for the oldest read that has one.
    fn add_data(&mut self, inbound: &mut Option<&mut dyn Inbound>) -> bool {
        let Some(inbound) = inbound else { return false };
        let link = self.style.link;
        while let Some(job) = self.jobs.next_uncut() {
            let mut usable = |range| inbound.resolve(link, range, Access::Read).map(|_| ());
            let (place, offset, data_len) = job.cut(FRAME_SHORT_LEN_MAX, &mut usable);
            if data_len == 0 {
                // Nothing more of it can be had: what is queued of it is the last, or there is nothing to wait for.
                let (id, tag, len) = (job.id, job.tag, job.len());
                let of_job = |frame: &&mut OutFrame| matches!(frame.body, Body::Data { job, .. } if job == id);
                if let Some(last) = self.frames.iter_mut().rev().find(of_job) {
                    last.body = Body::Data { job: id, closes: true };
                } else {
                    let failures = core::mem::take(&mut job.failures);
                    self.jobs.remove(id);
                    self.acknowledge(tag, &failures, len);
                }
                continue;
            }
            let (id, tag, checksummed, closes) = (job.id, job.tag, job.checksummed, job.is_cut());
            let digest = checksummed.then(|| {
                let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
                for_each_piece(&job.extents, place, data_len, |range| {
                    if let Ok(base) = inbound.resolve(link, range, Access::Read) {
                        // SAFETY: resolved for reads in this poll, for as many bytes.
                        unsafe { socket::digest_memory(base, usize_of(range.len), &mut digest) };
                    }
                });
                crc32c(&digest)
            });
            let frame = Frame::Data { tag, offset, data_len, checksummed };
            let head = encoded(&mut self.spare, &frame);
            let mut queued = OutFrame::new(head, Body::Data { job: id, closes }, frame.trail(), digest);
            queued.place = place;
            self.data_ahead_len += data_len;
            self.frames.push_back(queued);
            return true;
        }
        false
    }

    /// Lists what to send next, at most about `len_max` bytes. Says how many; 0 if only a peer's read is next and there is
    /// no `inbound`.
    fn build(&mut self, len_max: u64, tools: &mut Tools, inbound: &mut Option<&mut dyn Inbound>) -> usize {
        let Tools { tickets, vectors, .. } = tools;
        let len_max = usize_of(len_max);
        vectors.clear();
        for frame in &mut self.frames {
            if vectors.len() >= len_max
                || !vectors.has_room()
                || matches!(frame.body, Body::Data { .. }) && inbound.is_none()
            {
                break;
            }
            // SAFETY: a queued frame's head stays as it is until `advance`, after the list was used.
            unsafe { push_bytes(vectors, &frame.head[frame.head_sent..]) };
            let rest = frame.data_len - frame.data_sent;
            let before = vectors.len();
            match (frame.body, inbound.as_deref_mut()) {
                (Body::Slice { ticket, slice }, _) if rest > 0 => {
                    let Some(ticket) = tickets.get(ticket) else { break };
                    for (number, (posted, offset, len)) in ticket.pieces(slice).enumerate().skip(frame.place.index) {
                        let skip = if number == frame.place.index { frame.place.offset - offset } else { 0 };
                        if vectors.len() >= len_max || !vectors.has_room() {
                            break;
                        }
                        let piece = usize_of(len - skip).min(len_max - vectors.len());
                        // SAFETY: lent for reads until the ticket finishes; the piece lies inside the move.
                        unsafe { vectors.push(at(posted.local, offset + skip), piece) };
                        if (piece as u64) < len - skip {
                            break;
                        }
                    }
                }
                (Body::Data { job, closes }, Some(inbound)) => {
                    let Some(job) = self.jobs.find(job) else { break };
                    let pushed = push_read(
                        vectors,
                        len_max,
                        self.style.link,
                        inbound,
                        &mut ReadPlace { extents: &job.extents, failures: &mut job.failures, place: frame.place, rest },
                    );
                    if !pushed {
                        break;
                    }
                    if job.cancelled || !job.failures.is_empty() {
                        frame.remove_ack();
                    } else if closes {
                        frame.add_ack(job.tag);
                    }
                }
                _ => {}
            }
            if ((vectors.len() - before) as u64) < rest {
                break;
            }
            // SAFETY: as for the head.
            unsafe { push_bytes(vectors, &frame.tail[frame.tail_sent..frame.tail_len]) };
        }
        vectors.len()
    }

    /// `sent` bytes of what was listed are with the kernel.
    fn advance(&mut self, sent: usize, tools: &mut Tools, inbound: &mut Option<&mut dyn Inbound>) {
        let mut rest = sent as u64;
        while rest > 0
            && let Some(frame) = self.frames.front_mut()
        {
            let was_begun = frame.is_begun();
            let head = rest.min((frame.head.len() - frame.head_sent) as u64);
            frame.head_sent += usize_of(head);
            rest -= head;
            let data = rest.min(frame.data_len - frame.data_sent);
            frame.data_sent += data;
            rest -= data;
            let tail = rest.min((frame.tail_len - frame.tail_sent) as u64);
            frame.tail_sent += usize_of(tail);
            rest -= tail;
            self.data_ahead_len -= data;
            match frame.body {
                Body::Heads => {}
                Body::Slice { ticket: id, slice } => {
                    self.sent_len += head + data;
                    if let Some(ticket) = tools.tickets.get(id) {
                        if !was_begun {
                            ticket.slices[slice as usize].state = SliceState::Begun;
                        }
                        frame.place = ticket.advance(slice, frame.place, data);
                        if data > 0
                            && (data < frame.data_len || slice > 0)
                            && let Some(inbound) = inbound
                        {
                            inbound.event(Event::Progress { ticket: id, bytes: data });
                        }
                    }
                }
                Body::Data { job, .. } => {
                    if let Some(job) = self.jobs.find(job) {
                        frame.place = advanced(&job.extents, frame.place, data);
                    }
                }
            }
            if !frame.is_sent() {
                break;
            }
            self.pop_front();
        }
        // Only now: an ack queued while the list is worked off would be taken for a part of it.
        while let Some(id) = self.closing.pop() {
            if let Some(job) = self.jobs.find(id) {
                let (tag, len) = (job.tag, job.len());
                let failures = core::mem::take(&mut job.failures);
                self.jobs.remove(id);
                self.acknowledge(tag, &failures, len);
            }
        }
    }

    /// The first frame left whole.
    fn pop_front(&mut self) {
        let Some(frame) = self.frames.pop_front() else { return };
        match frame.body {
            Body::Heads => self.answers_len -= frame.head.len(),
            Body::Slice { .. } => {}
            Body::Data { job: id, closes } => {
                if let Some(job) = self.jobs.find(id)
                    && (closes || job.cancelled)
                {
                    if frame.has_ack() || job.cancelled {
                        let len = job.len();
                        self.jobs.remove(id);
                        self.count_answered(1, len);
                    } else {
                        self.closing.push(id);
                    }
                }
            }
        }
        recycle(&mut self.spare, frame.head);
    }
}

/// Where a read's frame stands while it is listed.
struct ReadPlace<'a> {
    extents: &'a [WireExtent],
    failures: &'a mut Vec<Failure>,
    place: Place,
    rest: u64,
}

/// Lists the rest of a data frame; false if it did not all fit. Memory that was revoked meanwhile is replaced by zeros, and
/// the read's acks will say so.
fn push_read(
    vectors: &mut Vectors,
    len_max: usize,
    link: LinkId,
    inbound: &mut dyn Inbound,
    read: &mut ReadPlace<'_>,
) -> bool {
    while read.rest > 0 {
        let Some(range) = rest_of(read.extents, read.place) else { return false };
        let room = len_max.saturating_sub(vectors.len()) as u64;
        if (room == 0 || !vectors.has_room()) && range.len > 0 {
            return false;
        }
        let mut len = range.len.min(read.rest).min(room);
        match inbound.resolve(link, RemoteRange { len, ..range }, Access::Read) {
            // SAFETY: resolved for reads until the current poll returns, which is after the list was used.
            Ok(base) => unsafe { vectors.push(base, usize_of(len)) },
            Err(refusal) => {
                note_failure(read.failures, read.place.index, refusal_code(refusal), true);
                len = len.min(ZEROS.len() as u64);
                // SAFETY: a static of as many bytes.
                unsafe { push_bytes(vectors, &ZEROS[..usize_of(len)]) };
            }
        }
        read.rest -= len;
        read.place = advanced(read.extents, read.place, len);
    }
    true
}

/// Calls `each` with the ranges that make up `len` bytes from `place` on.
fn for_each_piece(extents: &[WireExtent], mut place: Place, mut len: u64, mut each: impl FnMut(RemoteRange)) {
    while len > 0
        && let Some(range) = rest_of(extents, place)
    {
        let piece = range.len.min(len);
        each(RemoteRange { len: piece, ..range });
        len -= piece;
        place = advanced(extents, place, piece);
    }
}

fn encoded(spare: &mut Vec<Vec<u8>>, frame: &Frame<'_>) -> Vec<u8> {
    let mut head = spare.pop().unwrap_or_default();
    head.resize(frame.head_len(), 0);
    let encoded = frame.encode(&mut head);
    // The cut keeps to the limits of a frame; `fabric` saw to it that no range overflows.
    assert!(encoded.is_ok(), "a frame of ours breaks the protocol: {encoded:?}");
    head
}

fn recycle(spare: &mut Vec<Vec<u8>>, mut head: Vec<u8>) {
    if spare.len() < SPARE_MAX {
        head.clear();
        spare.push(head);
    }
}

/// # Safety
/// - As for [`Vectors::push`]: `bytes` is not changed before the list was used.
unsafe fn push_bytes(vectors: &mut Vectors, bytes: &[u8]) {
    // SAFETY: the caller's promise; sending only reads.
    unsafe { vectors.push(NonNull::from(bytes).cast(), bytes.len()) };
}

fn at(base: NonNull<u8>, offset: u64) -> NonNull<u8> {
    // Wrapping, so that computing an address is not an access; whoever uses it says why it is inside.
    NonNull::new(base.as_ptr().wrapping_add(usize_of(offset))).unwrap_or(base)
}

fn crc32c(digest: &crc_fast::Digest) -> u32 {
    u32::try_from(digest.finalize()).unwrap_or(0)
}

/// Lengths in memory fit: they were checked against mapped regions or small constants.
fn usize_of(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
