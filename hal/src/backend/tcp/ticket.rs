//! Batches on their way: how far each was cut into slices, and what became of them.
//!
//! A slice is what one frame moves: consecutive moves of one direction, or a piece of one large move. This module keeps
//! the books and says when a batch is over; it moves nothing. Invariants: a move is reported ended at most once; a batch
//! finishes only when no slice of it is on the wire or unanswered, or when its lane is gone.

use core::ops::Range;
use core::ptr::NonNull;

use millpond_core::wire::frame::{AckCode, Tag};

use super::serve::Place;
use crate::contract::{
    Access, End, Event, FarEnd, LinkDownReason, Outcome, Post, PostedArrival, PostedMove, Refusal, TicketId,
};

/// How far a slice is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SliceState {
    /// In the queue; not one byte was sent.
    Queued,
    /// On the wire, or sent and not answered.
    Begun,
    /// The last ack came.
    Ended,
    /// Taken out of the queue before a byte was sent.
    Dropped,
}

/// One frame's worth of a batch.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    pub(super) first_move: u32,
    pub(super) move_count: u32,
    /// Where in its move a slice begins that is part of one large move.
    pub(super) first_offset: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) state: SliceState,
    /// Whether an ack named a move of it.
    has_failures: bool,
    /// Read: bytes up to here came, or were left out as `gaps` says.
    pub(super) next_offset: u64,
}

/// A batch.
pub(super) struct Ticket {
    pub(super) id: TicketId,
    pub(super) lane_slot: u32,
    pub(super) attempt: u16,
    pub(super) moves: Vec<PostedMove>,
    pub(super) arrival: Option<PostedArrival>,
    pub(super) slices: Vec<Slice>,
    next_move: u32,
    next_offset: u64,
    open_slices: u32,
    /// Moves that were reported, as runs.
    ended: Vec<Range<u32>>,
    /// Read: moves whose data was left out, as (slice, moves); refused by the slice's last ack, or the peer lies.
    gaps: Vec<(u32, Range<u32>)>,
    failed: bool,
    cancelled: bool,
    /// How the count of a batch without moves was refused: no move can carry that outcome.
    count_refused: Option<Outcome>,
}

/// What the peer said makes no sense.
pub(super) type Nonsense = &'static str;

impl Ticket {
    fn new() -> Self {
        Self {
            id: TicketId::from_bits(0),
            lane_slot: 0,
            attempt: 0,
            moves: Vec::new(),
            arrival: None,
            slices: Vec::new(),
            next_move: 0,
            next_offset: 0,
            open_slices: 0,
            ended: Vec::new(),
            gaps: Vec::new(),
            failed: false,
            cancelled: false,
            count_refused: None,
        }
    }

    fn start(&mut self, lane_slot: u32, post: Post) {
        self.id = post.ticket;
        self.lane_slot = lane_slot;
        self.attempt = u16::try_from(post.attempt).unwrap_or(u16::MAX);
        self.moves = post.moves;
        self.arrival = post.arrival;
        self.slices.clear();
        (self.next_move, self.next_offset, self.open_slices) = (0, 0, 0);
        self.ended.clear();
        self.gaps.clear();
        (self.failed, self.cancelled, self.count_refused) = (false, false, None);
    }

    /// What frames of it carry.
    pub(super) fn tag(&self, generation: u64, slice: u32) -> Tag {
        Tag { generation, ticket: self.id.to_bits(), slice, attempt: self.attempt }
    }

    fn is_sliced(&self) -> bool {
        self.next_move as usize >= self.moves.len()
    }

    /// Whether a further slice can be cut now.
    pub(super) fn has_next(&self) -> bool {
        !self.cancelled && (!self.is_sliced() || (self.arrival.is_some() && self.open_slices == 0 && !self.failed))
    }

    /// Whether nothing is left to do or to wait for.
    pub(super) fn is_over(&self) -> bool {
        let cut = self.is_sliced() && (self.arrival.is_none() || self.failed);
        self.open_slices == 0 && (cut || self.cancelled)
    }

    /// The next slice: as many moves of one direction as fit `moves_max` and `len_max`, or a piece of one that alone is too
    /// large. Says its index. Call only if [`Ticket::has_next`].
    pub(super) fn cut(&mut self, moves_max: usize, len_max: u64) -> u32 {
        let first_move = self.next_move;
        let moves = &self.moves[first_move as usize..];
        let access = moves.first().map_or(Access::Write, |first| first.access);
        let (mut move_count, mut len, first_offset) = (0u32, 0u64, self.next_offset);
        for posted in moves.iter().take(moves_max).take_while(|posted| posted.access == access) {
            let rest = posted.remote.len - self.next_offset;
            if rest > len_max - len {
                if move_count == 0 {
                    // One move larger than a frame: this frame is a piece of it and nothing else.
                    (move_count, len) = (1, len_max);
                    self.next_offset += len_max;
                }
                break;
            }
            move_count += 1;
            len += rest;
            self.next_move += 1;
            self.next_offset = 0;
            if first_offset > 0 {
                break;
            }
        }
        self.slices.push(Slice {
            first_move,
            move_count,
            first_offset,
            len,
            access,
            state: SliceState::Queued,
            has_failures: false,
            next_offset: 0,
        });
        self.open_slices += 1;
        self.last_slice()
    }

    fn last_slice(&self) -> u32 {
        u32::try_from(self.slices.len() - 1).unwrap_or(u32::MAX)
    }

    /// The arrival to send with slice `index`: only when nothing else of the batch is outstanding, or all of it is in there.
    pub(super) fn take_arrival(&mut self, index: u32) -> Option<PostedArrival> {
        let slice = &self.slices[index as usize];
        let is_whole_batch = self.slices.len() == 1 && slice.access == Access::Write && self.is_sliced();
        let is_arrival_only = slice.move_count == 0;
        if is_whole_batch || is_arrival_only { self.arrival.take() } else { None }
    }

    /// The moves of slice `index`, each cut to what the slice moves of it: (move, offset in it, length).
    pub(super) fn pieces(&self, index: u32) -> impl Iterator<Item = (&PostedMove, u64, u64)> {
        let slice = &self.slices[index as usize];
        let moves = &self.moves[slice.first_move as usize..][..slice.move_count as usize];
        let (offset, len) = (slice.first_offset, slice.len);
        let single = slice.move_count == 1;
        moves.iter().map(move |posted| (posted, offset, if single { len } else { posted.remote.len }))
    }

    /// Where the arrival of a batch that needs a frame of its own is addressed to.
    pub(super) fn arrival_offset(&self, arrival: &PostedArrival) -> u64 {
        let found = self.moves.iter().rev().find(|posted| posted.remote.region == arrival.region);
        found.map_or(0, |posted| posted.remote.offset)
    }

    /// Says that `moves` ended with `outcome`, except those already reported.
    fn end_moves(&mut self, moves: Range<u32>, outcome: Outcome, events: &mut dyn FnMut(Event)) {
        let mut at = moves.start;
        // Bounded: every round moves `at` on, to the end of a run or of the range.
        while at < moves.end {
            if let Some(run) = self.ended.iter().find(|run| run.contains(&at)) {
                at = run.end;
                continue;
            }
            let next_run = self.ended.iter().map(|run| run.start).filter(|start| *start > at).min();
            let end = next_run.map_or(moves.end, |start| start.min(moves.end));
            self.ended.push(at..end);
            events(Event::Ended { ticket: self.id, first: at, count: end - at, outcome });
            at = end;
        }
    }

    /// Extents of a slice ended otherwise than well.
    pub(super) fn on_refused(
        &mut self,
        index: u32,
        extents: Range<u32>,
        outcome: Outcome,
        events: &mut dyn FnMut(Event),
    ) -> Result<(), Nonsense> {
        let slice = self.slices.get_mut(index as usize).ok_or("an ack of a slice that was never sent")?;
        self.failed = true;
        slice.has_failures = true;
        if slice.move_count == 0 {
            // The arrival itself was refused: the writes are there, but the batch is not what was asked for.
            let all = 0..u32::try_from(self.moves.len()).unwrap_or(u32::MAX);
            let outcome = Outcome { far_end: FarEnd::Done, ..outcome };
            self.count_refused = self.moves.is_empty().then_some(outcome);
            self.end_moves(all, outcome, events);
            return Ok(());
        }
        if extents.end > slice.move_count {
            return Err("an ack of extents that the frame did not have");
        }
        let first = slice.first_move;
        self.end_moves(first + extents.start..first + extents.end, outcome, events);
        Ok(())
    }

    /// Data of a read at `offset` of slice `index` is about to land.
    pub(super) fn on_data(&mut self, index: u32, offset: u64, len: u64) -> Result<(), Nonsense> {
        let slice = self.slices.get(index as usize).ok_or("data for a slice that was never sent")?;
        if slice.access != Access::Read || slice.state != SliceState::Begun {
            return Err("data for a slice that asked for none");
        }
        if offset < slice.next_offset || offset + len > slice.len {
            return Err("data out of order or beyond what was asked for");
        }
        let missing = slice.next_offset..offset;
        self.note_gap(index, missing);
        self.slices[index as usize].next_offset = offset + len;
        Ok(())
    }

    fn note_gap(&mut self, index: u32, missing: Range<u64>) {
        if missing.is_empty() {
            return;
        }
        let moves = self.moves_in(index, missing);
        let base = self.slices[index as usize].first_move;
        self.gaps.push((index, base + moves.start..base + moves.end));
    }

    /// The last ack of a slice. Says how many bytes it moved.
    pub(super) fn on_slice_ended(&mut self, index: u32) -> Result<u64, Nonsense> {
        let slice = self.slices.get(index as usize).ok_or("an ack of a slice that was never sent")?;
        if slice.state != SliceState::Begun {
            return Err("an ack of a slice that is not on its way");
        }
        let (len, next_offset, is_read) = (slice.len, slice.next_offset, slice.access == Access::Read);
        if is_read {
            self.note_gap(index, next_offset..len);
            let ended = &self.ended;
            let refused = |number| ended.iter().any(|run| run.contains(&number));
            let mut missing =
                self.gaps.iter().filter(|(slice, _)| *slice == index).flat_map(|(_, moves)| moves.clone());
            if !missing.all(refused) {
                return Err("a read was acknowledged before all its data came");
            }
            self.gaps.retain(|(slice, _)| *slice != index);
        }
        self.slices[index as usize].state = SliceState::Ended;
        self.open_slices -= 1;
        Ok(len)
    }

    /// The place of byte `offset` of slice `index`, in its moves.
    pub(super) fn place_in(&self, index: u32, offset: u64) -> Place {
        let start = Place { index: 0, offset: self.slices[index as usize].first_offset };
        self.advance(index, start, offset)
    }

    /// The place `len` bytes after `place` of slice `index`. A place in a slice counts from the start of its move.
    pub(super) fn advance(&self, index: u32, mut place: Place, mut len: u64) -> Place {
        if len == 0 {
            return place;
        }
        for (number, (_, offset, piece_len)) in self.pieces(index).enumerate().skip(place.index) {
            let rest = offset + piece_len - place.offset;
            if len < rest {
                place.offset += len;
                return place;
            }
            len -= rest;
            place = Place { index: number + 1, offset: 0 };
            if len == 0 {
                break;
            }
        }
        place
    }

    /// The local memory at `place` of slice `index`, and how many bytes of the slice lie there in one piece. Empty moves
    /// are passed over.
    pub(super) fn target(&self, index: u32, place: Place) -> Option<(NonNull<u8>, u64)> {
        let found = self.pieces(index).enumerate().skip(place.index).find(|(_, (_, _, len))| *len > 0);
        let (number, (posted, offset, len)) = found?;
        let at = if number == place.index { place.offset } else { offset };
        let base = posted.local.as_ptr().wrapping_add(usize::try_from(at).ok()?);
        Some((NonNull::new(base)?, offset + len - at))
    }

    /// The moves of slice `index` (counted within it) that its bytes `range` lie in.
    pub(super) fn moves_in(&self, index: u32, range: Range<u64>) -> Range<u32> {
        let (mut first, mut end, mut at) = (u32::MAX, 0, 0);
        for (number, (_, _, len)) in (0u32..).zip(self.pieces(index)) {
            if at < range.end && at + len > range.start {
                first = first.min(number);
                end = number + 1;
            }
            at += len;
        }
        first.min(end)..end
    }

    /// A queued slice was taken back.
    pub(super) fn on_slice_dropped(&mut self, index: u32) {
        let slice = &mut self.slices[index as usize];
        debug_assert_eq!(slice.state, SliceState::Queued);
        slice.state = SliceState::Dropped;
        self.open_slices -= 1;
    }

    /// No further slice is cut.
    pub(super) fn cancel(&mut self) {
        self.cancelled = true;
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled
    }

    /// Whether the peer may have touched memory for a write that was not acknowledged.
    fn far_end(&self) -> FarEnd {
        let open = |slice: &Slice| slice.access == Access::Write && slice.state == SliceState::Begun;
        if self.slices.iter().any(open) { FarEnd::Unknown } else { FarEnd::Untouched }
    }

    /// The events of its end: done if everything was, else `end` for all that was neither done nor reported.
    fn finish(&mut self, end: End, events: &mut dyn FnMut(Event)) {
        let everything = self.is_sliced() && self.open_slices == 0 && self.arrival.is_none();
        let nothing_dropped = self.slices.iter().all(|slice| slice.state == SliceState::Ended);
        let outcome = if everything && nothing_dropped {
            Outcome::DONE
        } else if self.failed && self.is_over() && !self.cancelled {
            // Some moves were refused and reported; the rest is done.
            Outcome::DONE
        } else {
            let far_end = self.far_end();
            self.end_done_slices(events);
            Outcome { end, far_end }
        };
        let outcome = self.count_refused.unwrap_or(outcome);
        let moves = core::mem::take(&mut self.moves);
        events(Event::Finished { ticket: self.id, outcome, moves });
    }

    /// Reports the moves of slices that were acknowledged, where the slice holds whole moves.
    fn end_done_slices(&mut self, events: &mut dyn FnMut(Event)) {
        for index in 0..self.slices.len() {
            let slice = self.slices[index].clone();
            let whole = slice.first_offset == 0
                && (slice.move_count > 1
                    || self.moves.get(slice.first_move as usize).is_some_and(|posted| posted.remote.len == slice.len));
            if slice.state == SliceState::Ended && whole {
                self.end_moves(slice.first_move..slice.first_move + slice.move_count, Outcome::DONE, events);
            }
        }
    }
}

/// All batches of a device, by the slot of their id.
pub(super) struct Tickets {
    slots: Vec<Option<Box<Ticket>>>,
    #[allow(clippy::vec_box, reason = "a box taken from here goes into a slot as it is")]
    spare: Vec<Box<Ticket>>,
}

/// Finished tickets kept for reuse.
const SPARE_MAX: usize = 256;

impl Tickets {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), spare: Vec::new() }
    }

    pub(super) fn insert(&mut self, lane_slot: u32, post: Post) -> &mut Ticket {
        let slot = post.ticket.handle().slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        let mut ticket = self.spare.pop().unwrap_or_else(|| Box::new(Ticket::new()));
        ticket.start(lane_slot, post);
        debug_assert!(self.slots[slot].is_none(), "a ticket was posted twice");
        self.slots[slot].insert(ticket)
    }

    pub(super) fn get(&mut self, id: TicketId) -> Option<&mut Ticket> {
        self.slots.get_mut(id.handle().slot as usize)?.as_deref_mut().filter(|ticket| ticket.id == id)
    }

    /// The batch that a peer's frame on `lane_slot` means; `None` if it is over or never was.
    pub(super) fn named(&mut self, lane_slot: u32, tag: &Tag) -> Option<&mut Ticket> {
        self.get(TicketId::from_bits(tag.ticket))
            .filter(|ticket| ticket.lane_slot == lane_slot && ticket.attempt == tag.attempt)
    }

    /// Ends a batch and forgets it.
    pub(super) fn finish(&mut self, id: TicketId, end: End, events: &mut dyn FnMut(Event)) {
        let slot = id.handle().slot as usize;
        let Some(mut ticket) = self.slots.get_mut(slot).and_then(|slot| slot.take_if(|ticket| ticket.id == id)) else {
            return;
        };
        ticket.finish(end, events);
        if self.spare.len() < SPARE_MAX {
            self.spare.push(ticket);
        }
    }
}

/// What an ack's code means here.
pub(super) fn ack_outcome(code: AckCode, touched: bool) -> Outcome {
    let far_end = if touched { FarEnd::Unknown } else { FarEnd::Untouched };
    let end = match code {
        AckCode::Done => return Outcome::DONE,
        AckCode::Cancelled => End::Cancelled,
        other => Refusal::from_code(other.code()).map_or(End::LinkDown(LinkDownReason::PeerGone), End::Refused),
    };
    Outcome { end, far_end }
}
