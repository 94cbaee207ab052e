//! The receiving half of a lane: bytes become frames, and their data goes straight to where it belongs.
//!
//! Heads, padding and checksums pass through a small buffer of ours; data that came along with a head is copied from there,
//! the rest goes from the socket into memory without a stop. Invariants: memory of ours that a peer writes is resolved anew
//! in every turn, and what is refused meanwhile is drained to nowhere; nothing a peer sends is looked at before it parsed.
#![allow(unsafe_code)]

use core::ptr::NonNull;

use millpond_core::transfer::{Credit, Grant, Overrun};
use millpond_core::wire::HEAD_LEN_MAX;
use millpond_core::wire::frame::{
    AckCode, Arrival, Frame, GoodbyeReason, HEADER_LEN, Parsed, TRAILER_LEN, Tag, Trail, Trailer, WireExtent, parse,
};

use super::serve::{Failure, Place, advanced, note_failure, refusal_code, rest_of};
use super::socket::{self, Transfer};
use super::ticket::ack_outcome;
use super::transmit::{Style, Tools, Transmitter};
use super::wire::Wire;
use crate::contract::{Access, End, Event, Inbound, LinkDownReason, Outcome, PostedArrival, Refusal, RemoteRange};

/// Bytes of the buffer: a whole head, and one more read behind it.
const STAGING_LEN: usize = HEAD_LEN_MAX + READ_AHEAD_LEN;
/// Bytes read with a head in the hope that its data is among them: one page and its head fit.
const READ_AHEAD_LEN: usize = 8 << 10;

/// The least that [`Receiver::pieces_max`] falls to.
const PIECES_MIN: usize = 16;

/// What data is being received for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    /// A write of the peer into memory of ours.
    Write { arrival: Option<Arrival> },
    /// A read of ours; the ticket is looked up for each piece.
    Read,
    /// A ticket that is over: late, counted, drained.
    Nobody,
}

/// A frame whose data is being received.
struct InFrame {
    what: For,
    tag: Tag,
    /// Write: the peer's table. Read: empty.
    extents: Vec<WireExtent>,
    /// Next byte of data: in `extents`, or in the slice of our read.
    place: Place,
    trail: Trail,
    data_rest: u64,
    /// Which moves of a read's slice this frame's data lies in, for when its checksum is wrong.
    pieces: core::ops::Range<u32>,
    failures: Vec<Failure>,
    digest: crc_fast::Digest,
}

/// Where the receiver stands in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Await {
    Head,
    Data,
    Tail,
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The socket has no more for now.
    All,
    /// There is more, in another turn.
    More,
    /// The link is over.
    Ended(LinkDownReason),
}

/// The receiving half of a lane.
pub(super) struct Receiver {
    style: Style,
    staging: Box<[u8]>,
    start: usize,
    end: usize,
    awaits: Await,
    frame: InFrame,
    /// Write and read frames of the peer, and what it was told it may send.
    pub(super) grant: Grant,
    goodbye: Option<LinkDownReason>,
    /// Pieces of memory to list for one call: about as many as the socket was found to fill, since each is resolved anew.
    pieces_max: usize,
    /// Bytes received, in all; and those that got a batch of ours further.
    pub(super) received_len: u64,
    pub(super) progress: u64,
    /// Batches of ours finished since this was last looked at.
    pub(super) finished: u32,
    /// Acks and data of tickets that were over.
    pub(super) late: u64,
}

enum Step {
    Continue,
    NeedBytes(usize),
}

type Fault = LinkDownReason;

fn violation(text: &'static str) -> Fault {
    LinkDownReason::Violation(text)
}

impl Receiver {
    /// `read_ahead` came with the hello. `None` if it is longer than a lane buffers.
    pub(super) fn new(style: Style, initial: Credit, read_ahead: &[u8]) -> Option<Self> {
        let mut staging = vec![0; STAGING_LEN].into_boxed_slice();
        staging.get_mut(..read_ahead.len())?.copy_from_slice(read_ahead);
        Some(Self {
            style,
            staging,
            start: 0,
            end: read_ahead.len(),
            awaits: Await::Head,
            frame: InFrame {
                what: For::Nobody,
                tag: Tag::default(),
                extents: Vec::new(),
                place: Place::default(),
                trail: Trail::default(),
                data_rest: 0,
                pieces: 0..0,
                failures: Vec::new(),
                digest: crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi),
            },
            grant: Grant::new(initial),
            goodbye: None,
            pieces_max: PIECES_MIN,
            received_len: 0,
            progress: 0,
            finished: 0,
            late: 0,
        })
    }

    /// Whether bytes wait in the buffer that were not looked at yet.
    pub(super) fn has_unread(&self) -> bool {
        self.end > self.start
    }

    /// Whether a frame is half received.
    pub(super) fn is_mid_frame(&self) -> bool {
        self.awaits != Await::Head || self.has_unread()
    }

    /// Whether everything that the peer asked for was answered.
    pub(super) fn has_answered(&self, out: &Transmitter) -> bool {
        self.grant.asked() == self.grant.answered() + out.answered.0
    }

    /// Write and read frames of the peer, in all.
    pub(super) fn asked(&self) -> u64 {
        self.grant.asked()
    }

    /// Takes what the socket has, at most about `budget` bytes, and acts on it.
    pub(super) fn turn(
        &mut self,
        wire: &mut Wire,
        budget: u64,
        tools: &mut Tools,
        out: &mut Transmitter,
        inbound: &mut dyn Inbound,
    ) -> Received {
        let start_len = self.received_len;
        // A short count says that the socket is empty: no need to ask again.
        let mut is_drained = false;
        // Bounded: every round uses bytes of a bounded budget, or returns.
        loop {
            let needed = loop {
                if out.is_clogged() {
                    return Received::All;
                }
                match self.step(tools, out, inbound) {
                    Ok(Step::Continue) => {}
                    Ok(Step::NeedBytes(needed)) => break needed,
                    Err(reason) => return Received::Ended(reason),
                }
            };
            let spent = self.received_len - start_len;
            if is_drained {
                return Received::All;
            }
            if spent >= budget {
                return Received::More;
            }
            match self.receive(wire, needed, budget - spent, tools, inbound) {
                (wanted, Transfer::Bytes(got)) => is_drained = got < wanted,
                (_, Transfer::Blocked) => return Received::All,
                (_, Transfer::End) => return Received::Ended(self.goodbye.unwrap_or(LinkDownReason::PeerGone)),
                (_, Transfer::Broken(reason)) => return Received::Ended(self.goodbye.unwrap_or(reason)),
            }
        }
    }

    /// Acts on what is in the buffer.
    fn step(&mut self, tools: &mut Tools, out: &mut Transmitter, inbound: &mut dyn Inbound) -> Result<Step, Fault> {
        match self.awaits {
            Await::Head => self.on_head(tools, out, inbound),
            Await::Data if self.frame.data_rest == 0 => {
                self.awaits = Await::Tail;
                Ok(Step::Continue)
            }
            Await::Data if self.has_unread() => {
                self.take_staged(tools, inbound);
                Ok(Step::Continue)
            }
            Await::Data => Ok(Step::NeedBytes(0)),
            Await::Tail => self.on_tail(tools, out, inbound),
        }
    }

    fn on_head(&mut self, tools: &mut Tools, out: &mut Transmitter, inbound: &mut dyn Inbound) -> Result<Step, Fault> {
        let staging = core::mem::take(&mut self.staging);
        let parsed = parse(&staging[self.start..self.end]);
        let step = match parsed {
            Ok(Parsed::Short { head_len }) => Ok(Step::NeedBytes(head_len)),
            Err(_) => Err(violation("bytes that are no frame")),
            Ok(Parsed::Frame { frame, head_len }) => {
                self.start += head_len;
                self.on_frame(&frame, tools, out, inbound).map(|()| Step::Continue)
            }
        };
        self.staging = staging;
        step
    }

    fn on_frame(
        &mut self,
        frame: &Frame<'_>,
        tools: &mut Tools,
        out: &mut Transmitter,
        inbound: &mut dyn Inbound,
    ) -> Result<(), Fault> {
        let generation = self.style.generation;
        if frame.generation() != generation {
            return Err(violation("a frame of another lane generation"));
        }
        if self.goodbye.is_some() {
            return Err(violation("a frame after goodbye"));
        }
        match *frame {
            Frame::Write { tag, extents, arrival, .. } => {
                self.on_asked(frame.trail().data_len)?;
                self.frame.extents.clear();
                self.frame.extents.extend_from_slice(extents);
                self.begin(For::Write { arrival }, tag, frame.trail(), Place::default());
            }
            Frame::Read { tag, extents, checksummed } => {
                self.on_asked(extents.iter().map(|extent| extent.len.get()).sum())?;
                out.jobs.add(tag, extents, checksummed);
            }
            Frame::Data { tag, offset, data_len, .. } => self.on_data(tag, offset, data_len, frame.trail(), tools)?,
            Frame::Ack { tag, .. } => self.on_ack(frame, tag, tools, out, inbound)?,
            Frame::Cancel { tag } => out.on_cancel(tag),
            Frame::Quiet { tag } => self.on_quiet(tag, tools, inbound),
            Frame::Ping { nonce, .. } => out.answer(&Frame::Pong { generation, nonce }),
            Frame::Pong { .. } => {}
            Frame::Credit { data_len_total, frame_count_total, .. } => {
                out.on_credit(Credit { bytes: data_len_total, slices: frame_count_total });
                self.progress += 1;
            }
            Frame::Goodbye { reason, .. } => {
                self.goodbye = Some(match reason {
                    GoodbyeReason::Replaced => LinkDownReason::Superseded,
                    _ => LinkDownReason::PeerClosed,
                });
            }
            // What a wrong proof is worth is said when it is used.
            Frame::Prove { proofs, .. } => {
                for proof in proofs {
                    let _ = inbound.prove(self.style.link, proof.region(), proof.capability());
                }
            }
        }
        Ok(())
    }

    /// The peer asks for something: does it have the credit?
    fn on_asked(&mut self, data_len: u64) -> Result<(), Fault> {
        self.grant.on_asked(data_len).map_err(|Overrun| violation("more frames or bytes than it had credit for"))
    }

    /// Gives the peer new credit, so that it may have its share open.
    pub(super) fn grant(&mut self, share: Credit, out: &mut Transmitter) {
        let (frames, data_len) = core::mem::take(&mut out.answered);
        if frames == 0 {
            return;
        }
        self.grant.on_answered(frames, data_len);
        if let Some(Credit { bytes: data_len_total, slices: frame_count_total }) = self.grant.poll(share) {
            let generation = self.style.generation;
            out.answer(&Frame::Credit { generation, data_len_total, frame_count_total });
        }
    }

    fn begin(&mut self, what: For, tag: Tag, trail: Trail, place: Place) {
        let frame = &mut self.frame;
        (frame.what, frame.tag, frame.trail, frame.data_rest, frame.place) = (what, tag, trail, trail.data_len, place);
        frame.failures.clear();
        if trail.checksummed {
            frame.digest.reset();
        }
        self.awaits = Await::Data;
    }

    fn on_data(&mut self, tag: Tag, offset: u64, len: u64, trail: Trail, tools: &mut Tools) -> Result<(), Fault> {
        let Some(ticket) = tools.tickets.named(self.style.lane_slot, &tag) else {
            self.late += 1;
            self.begin(For::Nobody, tag, trail, Place::default());
            return Ok(());
        };
        ticket.on_data(tag.slice, offset, len).map_err(violation)?;
        let place = ticket.place_in(tag.slice, offset);
        self.frame.pieces = ticket.moves_in(tag.slice, offset..offset + len);
        self.begin(For::Read, tag, trail, place);
        Ok(())
    }

    fn on_ack(
        &mut self,
        frame: &Frame<'_>,
        tag: Tag,
        tools: &mut Tools,
        out: &mut Transmitter,
        inbound: &mut dyn Inbound,
    ) -> Result<(), Fault> {
        let Frame::Ack { code, extent_index, extent_count, touched, last, .. } = *frame else { return Ok(()) };
        let Some(ticket) = tools.tickets.named(self.style.lane_slot, &tag) else {
            self.late += 1;
            return Ok(());
        };
        self.progress += 1;
        let id = ticket.id;
        if code != AckCode::Done {
            let extents = extent_index..extent_index + extent_count;
            let mut events = |event| inbound.event(event);
            ticket.on_refused(tag.slice, extents, ack_outcome(code, touched), &mut events).map_err(violation)?;
        }
        if !last {
            return Ok(());
        }
        let access = ticket.slices.get(tag.slice as usize).map(|slice| slice.access);
        let len = ticket.on_slice_ended(tag.slice).map_err(violation)?;
        if ticket.is_over() {
            self.finished += 1;
            tools.tickets.finish(id, End::Cancelled, &mut |event| inbound.event(event));
            return Ok(());
        }
        if access == Some(Access::Write) {
            inbound.event(Event::Progress { ticket: id, bytes: len });
        }
        if ticket.has_next() {
            out.queue(id);
        }
        Ok(())
    }

    /// Every frame of the batch was answered before: the peer is quiet.
    fn on_quiet(&mut self, tag: Tag, tools: &mut Tools, inbound: &mut dyn Inbound) {
        match tools.tickets.named(self.style.lane_slot, &tag) {
            Some(ticket) if ticket.is_cancelled() => {
                self.progress += 1;
                self.finished += 1;
                let id = ticket.id;
                tools.tickets.finish(id, End::Cancelled, &mut |event| inbound.event(event));
            }
            _ => self.late += 1,
        }
    }

    /// Copies data that lies in the buffer to where it belongs.
    fn take_staged(&mut self, tools: &mut Tools, inbound: &mut dyn Inbound) {
        let len = self.frame.data_rest.min((self.end - self.start) as u64);
        let bytes_end = self.start + usize_of(len);
        if self.frame.trail.checksummed {
            self.frame.digest.update(&self.staging[self.start..bytes_end]);
        }
        // Bounded: every round takes bytes, or passes an empty extent.
        while self.start < bytes_end {
            let Some((target, piece)) = self.next_target((bytes_end - self.start) as u64, tools, inbound) else {
                break;
            };
            let piece = usize_of(piece);
            let bytes = &self.staging[self.start..self.start + piece];
            if let Some(target) = target {
                // SAFETY: `next_target` just resolved that many bytes for writes, or they are lent to a read of ours;
                // the buffer is our own.
                unsafe { socket::copy_in(bytes, target) };
            }
            self.start += piece;
            self.took(piece as u64, tools, inbound);
        }
        // Data for a slice that vanished has no place: pass over it.
        if self.start < bytes_end {
            let piece = bytes_end - self.start;
            self.start = bytes_end;
            self.frame.data_rest -= piece as u64;
        }
    }

    /// Where the next bytes of data go, and how many in one piece, at most `len_max`. No target: to nowhere.
    fn next_target(
        &mut self,
        len_max: u64,
        tools: &mut Tools,
        inbound: &mut dyn Inbound,
    ) -> Option<(Option<NonNull<u8>>, u64)> {
        let frame = &mut self.frame;
        match frame.what {
            For::Nobody => Some((None, len_max.min(frame.data_rest))),
            For::Read => {
                let ticket = tools.tickets.named(self.style.lane_slot, &frame.tag)?;
                ticket.target(frame.tag.slice, frame.place).map(|(target, len)| (Some(target), len.min(len_max)))
            }
            For::Write { .. } => {
                // Empty extents are checked when they are passed.
                while let Some(range) = rest_of(&frame.extents, frame.place).filter(|range| range.len == 0) {
                    check_empty(frame, range, self.style, inbound);
                    frame.place = Place { index: frame.place.index + 1, offset: 0 };
                }
                let range = rest_of(&frame.extents, frame.place)?;
                let len = range.len.min(len_max);
                let index = frame.place.index;
                // What failed once stays failed: no later bytes into an extent with a hole.
                if frame.failures.last().is_some_and(|last| (last.first + last.count - 1) as usize == index) {
                    return Some((None, len));
                }
                match inbound.resolve(self.style.link, RemoteRange { len, ..range }, Access::Write) {
                    Ok(target) => Some((Some(target), len)),
                    Err(refusal) => {
                        note_failure(&mut frame.failures, index, refusal_code(refusal), frame.place.offset > 0);
                        Some((None, len))
                    }
                }
            }
        }
    }

    /// `len` bytes of data are where they belong.
    fn took(&mut self, len: u64, tools: &mut Tools, inbound: &mut dyn Inbound) {
        let frame = &mut self.frame;
        frame.data_rest -= len;
        match frame.what {
            For::Nobody => {}
            For::Write { .. } => frame.place = advanced(&frame.extents, frame.place, len),
            For::Read => {
                self.progress += 1;
                if let Some(ticket) = tools.tickets.named(self.style.lane_slot, &frame.tag) {
                    frame.place = ticket.advance(frame.tag.slice, frame.place, len);
                    inbound.event(Event::Progress { ticket: ticket.id, bytes: len });
                }
            }
        }
    }

    /// One system call: data to its place and more behind it into the buffer, or just into the buffer. Says how much was
    /// asked for.
    fn receive(
        &mut self,
        wire: &mut Wire,
        needed: usize,
        budget: u64,
        tools: &mut Tools,
        inbound: &mut dyn Inbound,
    ) -> (usize, Transfer) {
        self.make_room();
        tools.vectors.clear();
        let start = self.frame.place;
        let data = if self.awaits == Await::Data { self.list_targets(budget, tools, inbound) } else { 0 };
        self.frame.place = start;
        if data == 0 || data as u64 == self.frame.data_rest {
            let behind = if data == 0 { needed.max(READ_AHEAD_LEN) } else { READ_AHEAD_LEN };
            let end = (self.end + behind).min(self.staging.len());
            let free = &mut self.staging[self.end..end];
            // SAFETY: the rest of our own buffer, not looked at before the call is over.
            unsafe { tools.vectors.push(NonNull::from(&mut *free).cast(), free.len()) };
        }
        let wanted = tools.vectors.len();
        // SAFETY:
        // - valid for writes: targets were resolved in this poll, or are lent to reads of ours; `nowhere` and the buffer
        //   are our own and nobody looks at them meanwhile.
        let transfer = unsafe { wire.receive(&mut tools.vectors) };
        if let Transfer::Bytes(got) = transfer {
            self.received_len += got as u64;
            if got == wanted {
                self.pieces_max = (self.pieces_max * 2).min(socket::VECTORS_MAX);
            } else if got < wanted / 2 {
                self.pieces_max = (self.pieces_max / 2).max(PIECES_MIN);
            }
            let landed = got.min(data);
            if landed > 0 && self.frame.trail.checksummed {
                // SAFETY: the same pieces, in the same poll.
                unsafe { tools.vectors.digest(landed, &mut self.frame.digest) };
            }
            if landed > 0 {
                self.took(landed as u64, tools, inbound);
            }
            self.end += got - landed;
        }
        (wanted, transfer)
    }

    /// Lists where data goes, from the current place on; says how many bytes.
    fn list_targets(&mut self, budget: u64, tools: &mut Tools, inbound: &mut dyn Inbound) -> usize {
        let limit = self.frame.data_rest.min(budget.max(READ_AHEAD_LEN as u64));
        let (rest, mut listed) = (self.frame.data_rest, 0u64);
        for _ in 0..self.pieces_max {
            if listed >= limit {
                break;
            }
            let Some((target, len)) = self.next_target(limit - listed, tools, inbound) else { break };
            match target {
                // SAFETY: resolved or lent for writes of as many bytes, until this poll returns.
                Some(target) => unsafe { tools.vectors.push(target, usize_of(len)) },
                None => {
                    let len = usize_of(len).min(tools.nowhere.len());
                    // SAFETY: our own memory, which nobody looks at.
                    unsafe { tools.vectors.push(NonNull::from(&mut tools.nowhere[..len]).cast(), len) };
                    listed += len as u64;
                    // Once per call: a checksum over memory that was used twice would be wrong.
                    break;
                }
            }
            listed += len;
            self.frame.place = match self.frame.what {
                For::Nobody => self.frame.place,
                For::Write { .. } => advanced(&self.frame.extents, self.frame.place, len),
                For::Read => match tools.tickets.named(self.style.lane_slot, &self.frame.tag) {
                    Some(ticket) => ticket.advance(self.frame.tag.slice, self.frame.place, len),
                    None => break,
                },
            };
        }
        debug_assert!(listed <= rest);
        usize_of(listed)
    }

    fn make_room(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.staging.len() - self.end < READ_AHEAD_LEN.max(HEAD_LEN_MAX - (self.end - self.start)) {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }

    /// Padding and checksum of a frame are next; then it is complete.
    fn on_tail(&mut self, tools: &mut Tools, out: &mut Transmitter, inbound: &mut dyn Inbound) -> Result<Step, Fault> {
        let trail = self.frame.trail;
        let len = usize_of(trail.len() - trail.data_len);
        let Some(tail) = self.staging[self.start..self.end].get(..len) else { return Ok(Step::NeedBytes(len)) };
        let mut intact = true;
        if trail.checksummed
            && let Some(trailer) = tail.last_chunk::<TRAILER_LEN>()
        {
            let said = Trailer::parse(*trailer).map_err(|_| violation("a checksum that is none"))?;
            intact = u64::from(said.crc32c) == self.frame.digest.finalize();
        }
        self.start += len;
        self.awaits = Await::Head;
        match self.frame.what {
            For::Nobody => {}
            For::Read if intact => {}
            For::Read => {
                let (tag, moves) = (self.frame.tag, self.frame.pieces.clone());
                let outcome = Outcome::refused(Refusal::Damaged);
                if let Some(ticket) = tools.tickets.named(self.style.lane_slot, &tag) {
                    let mut events = |event| inbound.event(event);
                    ticket.on_refused(tag.slice, moves, outcome, &mut events).map_err(violation)?;
                }
            }
            For::Write { arrival } => self.on_written(intact, arrival, out, inbound),
        }
        Ok(Step::Continue)
    }

    /// A write of the peer came whole: check what has no bytes, count, acknowledge.
    fn on_written(&mut self, intact: bool, arrival: Option<Arrival>, out: &mut Transmitter, inbound: &mut dyn Inbound) {
        let (style, frame) = (self.style, &mut self.frame);
        while let Some(range) = rest_of(&frame.extents, frame.place) {
            check_empty(frame, range, style, inbound);
            frame.place = Place { index: frame.place.index + 1, offset: 0 };
        }
        let count = u32::try_from(frame.extents.len()).unwrap_or(u32::MAX);
        let all = |code| Failure { first: 0, count, code, touched: true };
        if !intact {
            frame.failures.clear();
            frame.failures.push(all(AckCode::BadChecksum));
        } else if let Some(Arrival { region, counter, amount }) = arrival
            && frame.failures.is_empty()
            && let Err(refusal) = inbound.arrive(style.link, PostedArrival { region, counter, amount })
        {
            frame.failures.push(all(refusal_code(refusal)));
        }
        out.acknowledge(frame.tag, &frame.failures, frame.trail.data_len);
    }
}

/// An extent without bytes still needs the right to be named.
fn check_empty(frame: &mut InFrame, range: RemoteRange, style: Style, inbound: &mut dyn Inbound) {
    debug_assert_eq!(range.len, 0, "data ended before the extents did");
    if let Err(refusal) = inbound.resolve(style.link, range, Access::Write)
        && frame.place.offset == 0
    {
        note_failure(&mut frame.failures, frame.place.index, refusal_code(refusal), false);
    }
}

fn usize_of(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

const _: () = assert!(HEADER_LEN <= READ_AHEAD_LEN);
