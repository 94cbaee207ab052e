//! The asking side: publishes what our batches want, takes the answers, and copies what was read.
//!
//! A read is answered with the region to copy from; we copy, and then look at the owner's header page: only if the grant
//! still held after the last byte are the bytes right. The same holds of every later read, so once the owner has said which
//! bytes a proven grant admits, a batch of such reads is not asked for: we copy and look, and the owner need not run.
//! Invariant: a batch is finished once its reads are copied and the peer answered its end, if that was asked for, or once the
//! link is over; batches end in the order in which they were posted.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use millpond_core::batch::{Capability, RegionId, RegionToken};

use super::Regions;
use super::half::{Counter, Entry, Ring};
use super::link::{Shared, bits_of, region_of};
use crate::contract::{
    Access, End, Event, FarEnd, Inbound, LinkDownReason, Outcome, Post, PostedArrival, PostedMove, Refusal,
    RemoteRange, TURN_CHUNK_LEN,
};
use crate::copy::copy;
use crate::sync::full_fence;

/// A request in our ring.
pub(super) enum Request {
    /// "I know the capability of `region`."
    Prove { region: u64, capability: Capability },
    /// "Copy from my region into yours." With `end`, that was the batch: see [`packed_end`].
    Write { ticket: u64, source: u64, source_offset: u64, target: RemoteRange, index: u64, end: u64 },
    /// "May I copy from yours?"
    Read { ticket: u64, source: RemoteRange, index: u64 },
    /// "That was the batch."
    End { ticket: u64, arrival: Option<PostedArrival> },
}

impl Request {
    pub(super) fn to_entry(&self) -> Entry {
        match *self {
            Self::Prove { region, capability } => {
                let [low, high] = words_of(capability);
                [1, region, low, high, 0, 0, 0, 0]
            }
            Self::Write { ticket, source, source_offset, target, index, end } => {
                // The length and the index share a word: 46 bits are the longest region, 17 the longest batch.
                let packed = target.len << 17 | index;
                [2, ticket, source, source_offset, bits_of(target.region), target.offset, packed, end]
            }
            Self::Read { ticket, source, index } => {
                [3, ticket, 0, 0, bits_of(source.region), source.offset, source.len << 17 | index, 0]
            }
            Self::End { ticket, arrival } => match arrival {
                Some(PostedArrival { region, counter, amount }) => {
                    [4, ticket, 1, bits_of(region), counter, amount, 0, 0]
                }
                None => [4, ticket, 0, 0, 0, 0, 0, 0],
            },
        }
    }

    /// Any words give a request or `None`; nothing in it is to be trusted.
    pub(super) fn from_entry(entry: &Entry) -> Option<Self> {
        let [kind, ticket, ..] = *entry;
        let range = RemoteRange { region: region_of(entry[4]), offset: entry[5], len: entry[6] >> 17 };
        let index = entry[6] & ((1 << 17) - 1);
        Some(match kind {
            1 => Self::Prove { region: entry[1], capability: capability_of([entry[2], entry[3]]) },
            2 => Self::Write { ticket, source: entry[2], source_offset: entry[3], target: range, index, end: entry[7] },
            3 => Self::Read { ticket, source: range, index },
            4 => {
                let arrival = PostedArrival { region: region_of(entry[3]), counter: entry[4], amount: entry[5] };
                Self::End { ticket, arrival: (entry[2] == 1).then_some(arrival) }
            }
            _ => return None,
        })
    }
}

/// The end of a batch as a word of its last write: 0 if it does not fit, and an entry of its own follows. An arrival that
/// fits is of the region written to.
fn packed_end(arrival: Option<PostedArrival>, target: RegionId) -> u64 {
    match arrival {
        None => 1,
        Some(PostedArrival { region, counter, amount }) => {
            let fits = region == target && counter >> 32 == 0 && amount > 0 && amount >> 31 == 0;
            if fits { counter << 32 | amount << 1 | 1 } else { 0 }
        }
    }
}

/// What such a word says: `None` if more of the batch follows, and else its arrival.
pub(super) fn unpacked_end(end: u64, target: RegionId) -> Option<Option<PostedArrival>> {
    let amount = end >> 1 & ((1 << 31) - 1);
    let arrival = PostedArrival { region: target, counter: end >> 32, amount };
    (end & 1 == 1).then_some((amount > 0).then_some(arrival))
}

fn words_of(capability: Capability) -> [u64; 2] {
    let whole = u128::from_le_bytes(capability.to_bytes());
    #[allow(clippy::cast_possible_truncation)] // the halves are taken apart on purpose
    [whole as u64, (whole >> 64) as u64]
}

fn capability_of([low, high]: [u64; 2]) -> Capability {
    Capability::new((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
}

/// An answer in our ring.
pub(super) enum Reply {
    /// The proof was heard; reads of `region` copy from `memory` (0: they cannot), those within `range` of it, a start and an
    /// end, without asking.
    Proved { region: u64, memory: u64, range: (u64, u64) },
    /// A move was refused.
    Refused { ticket: u64, index: u64, code: u64 },
    /// The batch is over: so many moves were handled, the next was begun if `partial` is 1, the arrival was refused if
    /// `code` is not 0.
    Done { ticket: u64, handled: u64, partial: u64, code: u64 },
}

impl Reply {
    pub(super) fn to_entry(&self) -> Entry {
        match *self {
            Self::Proved { region, memory, range: (start, end) } => [1, region, memory, start, end, 0, 0, 0],
            Self::Refused { ticket, index, code } => [2, ticket, index, code, 0, 0, 0, 0],
            Self::Done { ticket, handled, partial, code } => [3, ticket, handled, partial, code, 0, 0, 0],
        }
    }

    fn from_entry(entry: &Entry) -> Option<Self> {
        let [kind, first, second, third, fourth, ..] = *entry;
        Some(match kind {
            1 => Self::Proved { region: first, memory: second, range: (third, fourth) },
            2 => Self::Refused { ticket: first, index: second, code: third },
            3 => Self::Done { ticket: first, handled: second, partial: third, code: fourth },
            _ => return None,
        })
    }
}

fn refusal_of(code: u64) -> Refusal {
    u16::try_from(code).ok().and_then(Refusal::from_code).unwrap_or(Refusal::Busy)
}

/// The peer's word on a batch.
#[derive(Clone, Copy, Debug)]
struct Answer {
    handled: usize,
    partial: bool,
    arrival_refused: Option<Refusal>,
}

/// A batch of ours.
#[derive(Debug)]
struct Asked {
    post: Post,
    /// Moves published.
    published: usize,
    end_published: bool,
    /// It takes long enough that somebody asks how far it is.
    is_long: bool,
    /// Moves that were reported as ended already, ascending.
    reported: Vec<u32>,
    answer: Option<Answer>,
    /// Moves whose copies are behind us.
    copied: usize,
    copied_len: u64,
    cancelled: bool,
}

#[derive(Debug)]
struct Attached {
    capability: Capability,
    epoch_word: u32,
    proof_published: bool,
    memory: u64,
    /// What may be read of it without asking, `start..end`.
    range: (u64, u64),
}

impl Attached {
    fn admits(&self, range: &RemoteRange) -> bool {
        let end = range.offset.checked_add(range.len);
        self.memory != 0 && range.len > 0 && range.offset >= self.range.0 && end.is_some_and(|end| end <= self.range.1)
    }
}

/// State of the asking side.
#[derive(Debug, Default)]
pub(super) struct Asking {
    batches: VecDeque<Asked>,
    attached: BTreeMap<u64, Attached>,
    consumed: u64,
    applied_seen: u64,
}

impl Asking {
    /// Batches in flight.
    pub(super) fn len(&self) -> usize {
        self.batches.len()
    }

    /// Whether nothing is asked.
    pub(super) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// A region or grant that batches may name.
    pub(super) fn attach(&mut self, token: &RegionToken) {
        let attached = Attached {
            capability: token.capability,
            epoch_word: token.epoch_word,
            proof_published: false,
            memory: 0,
            range: (0, 0),
        };
        let known = self.attached.entry(bits_of(token.region)).or_insert(attached);
        if !known.capability.matches(&token.capability) {
            // Another token for the same region is proven too; what the owner has accepted before stays accepted.
            (known.capability, known.proof_published) = (token.capability, false);
        }
    }

    /// Forgets it.
    pub(super) fn detach(&mut self, bits: u64) {
        self.attached.remove(&bits);
    }

    /// Whether nothing that a batch does concerns the owner of what it names, and none before it waits for an answer.
    fn is_ours_alone(&self, post: &Post, shared: &Shared) -> bool {
        let admits = |posted: &PostedMove| {
            let attached = self.attached.get(&bits_of(posted.remote.region));
            let known = attached.filter(|attached| attached.admits(&posted.remote));
            posted.access == Access::Read && known.is_some_and(|known| shared.maps.contains_key(&known.memory))
        };
        let is_first = self.batches.back().is_none_or(|last| last.answer.is_some());
        is_first && post.arrival.is_none() && post.moves.iter().all(admits)
    }

    /// Makes a read now, if it concerns nobody else. False: it did not come to right bytes, for whatever reason.
    pub(super) fn read_at_once(&self, shared: &Shared, posted: &PostedMove) -> bool {
        let attached = self.attached.get(&bits_of(posted.remote.region));
        let Some(attached) = attached.filter(|attached| attached.admits(&posted.remote)) else { return false };
        let is_small = posted.access == Access::Read && posted.remote.len <= TURN_CHUNK_LEN;
        is_small && !shared.peer_closed() && copy_range(posted, (0, posted.remote.len), attached, shared).is_ok()
    }

    /// Takes a batch.
    pub(super) fn push(&mut self, post: Post, shared: &Shared) {
        let count = post.moves.len();
        let is_ours = count > 0 && self.is_ours_alone(&post, shared);
        let answer = Answer { handled: count, partial: false, arrival_refused: None };
        let is_long = post.moves.iter().map(|posted| posted.remote.len).sum::<u64>() > TURN_CHUNK_LEN;
        if let (true, Some(peer)) = (is_long && !self.batches.iter().any(|batch| batch.is_long), &shared.peer) {
            self.applied_seen = peer.half.value(Counter::BytesApplied);
        }
        self.batches.push_back(Asked {
            post,
            published: if is_ours { count } else { 0 },
            end_published: is_ours,
            is_long,
            reported: Vec::new(),
            answer: is_ours.then_some(answer),
            copied: 0,
            copied_len: 0,
            cancelled: false,
        });
    }

    /// Cuts a batch short. True if it is one of ours.
    pub(super) fn cancel(&mut self, shared: &mut Shared, ticket: u64) -> bool {
        let Some(batch) = self.batches.iter_mut().find(|batch| batch.post.ticket.to_bits() == ticket) else {
            return false;
        };
        batch.cancelled = true;
        shared.own.set(Counter::Cut, ticket);
        shared.news = true;
        true
    }

    /// Whether a turn would find something to do.
    pub(super) fn has_work(&self, shared: &Shared) -> bool {
        let Some(peer) = &shared.peer else { return false };
        let replies = peer.half.waiting(Ring::Replies, self.consumed).is_none_or(|waiting| waiting > 0);
        let publishable =
            shared.room(Ring::Requests) > 1 && self.batches.back().is_some_and(|batch| !batch.end_published);
        replies || publishable || self.batches.front().is_some_and(|batch| batch.answer.is_some())
    }

    /// Publishes as much as fits. Bounded by the ring's length.
    pub(super) fn publish(&mut self, shared: &mut Shared, regions: &Regions) -> bool {
        let mut worked = false;
        for batch in self.batches.iter_mut().filter(|batch| !batch.end_published) {
            while !batch.end_published {
                // Room for a proof and what needs it.
                if shared.down.is_some() || shared.room(Ring::Requests) < 2 || !shared.socket.is_flushed() {
                    return worked;
                }
                worked = true;
                let ticket = batch.post.ticket.to_bits();
                if batch.cancelled || batch.published == batch.post.moves.len() {
                    // A cancel that comes after the last move leaves the batch whole: it is then counted too.
                    let arrival = batch.post.arrival.filter(|_| batch.published == batch.post.moves.len());
                    if let Some(arrival) = arrival {
                        prove(&mut self.attached, shared, bits_of(arrival.region));
                    }
                    shared.publish(Ring::Requests, Request::End { ticket, arrival }.to_entry());
                    batch.end_published = true;
                    break;
                }
                let posted = batch.post.moves[batch.published];
                let source = bits_of(posted.local_region);
                let shown = posted.access == Access::Write && posted.remote.len > 0;
                if shown && regions.get(&source).is_some_and(|region| !shared.show(region)) {
                    return worked;
                }
                prove(&mut self.attached, shared, bits_of(posted.remote.region));
                let index = batch.published as u64;
                batch.published += 1;
                let request = match posted.access {
                    Access::Write => {
                        let is_last = batch.published == batch.post.moves.len();
                        let end = if is_last { packed_end(batch.post.arrival, posted.remote.region) } else { 0 };
                        batch.end_published = end != 0;
                        let source_offset = posted.local_offset;
                        Request::Write { ticket, source, source_offset, target: posted.remote, index, end }
                    }
                    Access::Read => Request::Read { ticket, source: posted.remote, index },
                };
                shared.publish(Ring::Requests, request.to_entry());
            }
        }
        worked
    }

    /// Takes the peer's answers. Bounded by the ring's length.
    pub(super) fn on_replies(&mut self, shared: &mut Shared, inbound: &mut dyn Inbound) -> bool {
        let Some(peer) = &shared.peer else { return false };
        let Some(waiting) = peer.half.waiting(Ring::Replies, self.consumed) else {
            shared.end(LinkDownReason::Violation("an impossible count of replies"));
            return true;
        };
        let mut bytes = 0;
        if let Some(batch) = self.batches.front().filter(|batch| batch.is_long) {
            let applied = peer.half.value(Counter::BytesApplied);
            bytes = applied.wrapping_sub(core::mem::replace(&mut self.applied_seen, applied));
            if bytes > 0 {
                inbound.event(Event::Progress { ticket: batch.post.ticket, bytes });
            }
        }
        for index in self.consumed..self.consumed + waiting {
            let entry = peer.half.entry(Ring::Replies, index);
            match Reply::from_entry(&entry) {
                Some(reply) => on_reply(&mut self.batches, &mut self.attached, reply, inbound),
                None => {
                    shared.end(LinkDownReason::Violation("a reply of no known kind"));
                    return true;
                }
            }
        }
        if waiting > 0 {
            self.consumed += waiting;
            shared.own.set(Counter::RepliesConsumed, self.consumed);
            shared.news = true;
        }
        waiting > 0 || bytes > 0
    }

    /// Copies what answered batches read, and reports the ones that are through.
    pub(super) fn finish(&mut self, shared: &mut Shared, left: &mut u64, inbound: &mut dyn Inbound) -> bool {
        let mut worked = false;
        while let Some(answer) = self.batches.front().and_then(|batch| batch.answer) {
            let Some(batch) = self.batches.front_mut() else { break };
            worked = true;
            if !copy_reads(batch, answer, &self.attached, shared, left, inbound) {
                return worked;
            }
            let Some(batch) = self.batches.pop_front() else { break };
            report(batch, answer, inbound);
        }
        worked
    }

    /// Reports everything in flight as ended with the link.
    pub(super) fn abandon(&mut self, reason: LinkDownReason, inbound: &mut dyn Inbound) {
        for batch in self.batches.drain(..) {
            let outcome = |index: usize, posted: &PostedMove| match (posted.access, batch.answer) {
                (Access::Write, Some(answer)) if index < answer.handled => Outcome::DONE,
                (Access::Read, _) if index < batch.copied => Outcome::DONE,
                (Access::Write, _) if index < batch.published => Outcome::link_down(reason, FarEnd::Unknown),
                _ => Outcome::link_down(reason, FarEnd::Untouched),
            };
            let last = Outcome::link_down(reason, FarEnd::Untouched);
            let outcomes: Vec<Outcome> =
                batch.post.moves.iter().enumerate().map(|(at, posted)| outcome(at, posted)).collect();
            report_each(&batch.post, &batch.reported, &outcomes, last, inbound);
            inbound.event(Event::Finished { ticket: batch.post.ticket, outcome: last, moves: batch.post.moves });
        }
    }
}

fn prove(attached: &mut BTreeMap<u64, Attached>, shared: &mut Shared, region: u64) {
    if let Some(attached) = attached.get_mut(&region).filter(|attached| !attached.proof_published) {
        attached.proof_published = true;
        let capability = attached.capability;
        shared.publish(Ring::Requests, Request::Prove { region, capability }.to_entry());
    }
}

fn on_reply(
    batches: &mut VecDeque<Asked>,
    attached: &mut BTreeMap<u64, Attached>,
    reply: Reply,
    inbound: &mut dyn Inbound,
) {
    // Answers about batches that we do not know (any more) are nothing to us.
    match reply {
        Reply::Proved { region, memory, range } => {
            // A later proof that is refused takes nothing back.
            if let Some(attached) = attached.get_mut(&region).filter(|_| memory != 0) {
                (attached.memory, attached.range) = (memory, range);
            }
        }
        Reply::Refused { ticket, index, code } => {
            let Some(batch) = batches.iter_mut().find(|batch| batch.post.ticket.to_bits() == ticket) else { return };
            let (Ok(first), Ok(at)) = (u32::try_from(index), usize::try_from(index)) else { return };
            let fresh = batch.reported.last().is_none_or(|&last| last < first);
            if batch.answer.is_none() && at < batch.published && fresh {
                batch.reported.push(first);
                let outcome = Outcome::refused(refusal_of(code));
                inbound.event(Event::Ended { ticket: batch.post.ticket, first, count: 1, outcome });
            }
        }
        Reply::Done { ticket, handled, partial, code } => {
            let Some(batch) = batches.iter_mut().find(|batch| batch.answer.is_none()) else { return };
            if batch.post.ticket.to_bits() == ticket && batch.end_published {
                let handled = usize::try_from(handled).unwrap_or(usize::MAX).min(batch.published);
                let arrival_refused = (code != 0).then(|| refusal_of(code));
                batch.answer = Some(Answer { handled, partial: partial == 1, arrival_refused });
            }
        }
    }
}

/// Copies the reads of a batch; false if the budget ran out first.
fn copy_reads(
    batch: &mut Asked,
    answer: Answer,
    attached: &BTreeMap<u64, Attached>,
    shared: &mut Shared,
    left: &mut u64,
    inbound: &mut dyn Inbound,
) -> bool {
    while batch.copied < answer.handled {
        let index = u32::try_from(batch.copied).unwrap_or(u32::MAX);
        let posted = batch.post.moves[batch.copied];
        let skip = posted.access == Access::Write || batch.reported.binary_search(&index).is_ok();
        if !skip && posted.remote.len > 0 {
            if *left == 0 || shared.down.is_some() {
                return false;
            }
            match copy_piece(batch, &posted, attached, shared, left) {
                Ok(copied_len) => {
                    inbound.event(Event::Progress { ticket: batch.post.ticket, bytes: copied_len });
                    if batch.copied_len < posted.remote.len {
                        continue;
                    }
                }
                Err(refusal) => {
                    let outcome = Outcome::refused(refusal);
                    inbound.event(Event::Ended { ticket: batch.post.ticket, first: index, count: 1, outcome });
                    let at = batch.reported.partition_point(|&reported| reported < index);
                    batch.reported.insert(at, index);
                }
            }
        }
        batch.copied += 1;
        batch.copied_len = 0;
    }
    true
}

fn copy_piece(
    batch: &mut Asked,
    posted: &PostedMove,
    attached: &BTreeMap<u64, Attached>,
    shared: &mut Shared,
    left: &mut u64,
) -> Result<u64, Refusal> {
    let region = posted.remote.region;
    let attached = attached.get(&bits_of(region)).ok_or(Refusal::NotProven)?;
    if !shared.maps.contains_key(&attached.memory) {
        shared.receive();
    }
    let piece = (posted.remote.len - batch.copied_len).min(TURN_CHUNK_LEN).min(*left);
    copy_range(posted, (batch.copied_len, piece), attached, shared)?;
    *left = left.saturating_sub(piece);
    batch.copied_len += piece;
    Ok(piece)
}

/// Copies `len` bytes of a read from `at` of it on, and then looks whether the grant still held.
fn copy_range(posted: &PostedMove, (at, len): (u64, u64), attached: &Attached, shared: &Shared) -> Result<(), Refusal> {
    let map = shared.maps.get(&attached.memory).ok_or(Refusal::NotShareable)?;
    let offset = posted.remote.offset.checked_add(at).ok_or(Refusal::OutOfBounds)?;
    let from = map.pointer(offset, len).ok_or(Refusal::OutOfBounds)?;
    let (done, len) = (usize::try_from(at).unwrap_or(0), usize::try_from(len).unwrap_or(0));
    // SAFETY:
    // - `from`: the map has `len` bytes there and lives in `shared.maps` through this call.
    // - `local`: the fabric lends it for the whole move, until `Finished` or for the length of `read_at_once` (contract), and
    //   both callers stay within it: `at + len <= remote.len`.
    // - they do not overlap: one is our read-only view of the peer's memory file, the other memory of ours.
    // - the owner may write its side meanwhile, with means outside of Rust's memory model; the check below then refuses.
    unsafe { copy(from, posted.local.as_ptr().add(done), len) };
    full_fence();
    let slot = usize::try_from(attached.epoch_word).unwrap_or(usize::MAX);
    let word = shared.peer.as_ref().map_or(0, |peer| peer.header.word(slot));
    if word == u64::from(posted.remote.region.epoch) { Ok(()) } else { Err(Refusal::Stale) }
}

/// Reports a batch that the peer answered and whose reads are copied.
fn report(batch: Asked, answer: Answer, inbound: &mut dyn Inbound) {
    let ticket = batch.post.ticket;
    let last = match answer.arrival_refused {
        Some(refusal) => Outcome { end: End::Refused(refusal), far_end: FarEnd::Done },
        None => Outcome::DONE,
    };
    if answer.handled < batch.post.moves.len() {
        let outcomes: Vec<Outcome> = batch
            .post
            .moves
            .iter()
            .enumerate()
            .map(|(index, posted)| match index {
                index if index < answer.handled => last,
                index if index == answer.handled && answer.partial && posted.access == Access::Write => {
                    Outcome::cancelled(FarEnd::Unknown)
                }
                _ => Outcome::cancelled(FarEnd::Untouched),
            })
            .collect();
        report_each(&batch.post, &batch.reported, &outcomes, last, inbound);
    }
    inbound.event(Event::Finished { ticket, outcome: last, moves: batch.post.moves });
}

/// Reports, in runs, every move that ended otherwise than `last` and was not reported before.
fn report_each(post: &Post, reported: &[u32], outcomes: &[Outcome], last: Outcome, inbound: &mut dyn Inbound) {
    let mut run: Option<(u32, u32, Outcome)> = None;
    for (index, outcome) in (0u32..).zip(outcomes) {
        let silent = *outcome == last || reported.binary_search(&index).is_ok();
        match &mut run {
            Some((_, count, same)) if !silent && same == outcome => *count += 1,
            _ => {
                if let Some((first, count, outcome)) = run.take() {
                    inbound.event(Event::Ended { ticket: post.ticket, first, count, outcome });
                }
                run = (!silent).then_some((index, 1, *outcome));
            }
        }
    }
    if let Some((first, count, outcome)) = run {
        inbound.event(Event::Ended { ticket: post.ticket, first, count, outcome });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_batch_goes_with_its_last_write_or_has_an_entry_of_its_own() {
        let (target, other) = (RegionId { slot: 3, epoch: 9 }, RegionId { slot: 4, epoch: 9 });
        let of = |region, counter, amount| Some(PostedArrival { region, counter, amount });
        assert_eq!(unpacked_end(0, target), None);
        for arrival in [None, of(target, 0, 1), of(target, u64::from(u32::MAX), (1 << 31) - 1)] {
            assert_eq!(unpacked_end(packed_end(arrival, target), target), Some(arrival));
        }
        for long in [of(other, 0, 1), of(target, 1 << 32, 1), of(target, 0, 1 << 31), of(target, 0, 0)] {
            assert_eq!(packed_end(long, target), 0, "{long:?}");
        }
    }
}
