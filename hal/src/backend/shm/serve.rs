//! The serving side: applies the peer's writes to our memory, and says where its reads may copy from.
//!
//! Only we write our memory: a write is a copy that we make, out of the peer's read-only mapped region into what
//! [`Inbound::resolve`] gives for this turn. Invariant: after each copy, and before anything is counted or answered, we look
//! whether the peer closed the link; if so, what was copied was perhaps no longer the peer's source.
#![allow(unsafe_code)]

use std::collections::BTreeMap;

use super::Regions;
use super::ask::{Reply, Request, unpacked_end};
use super::half::{Counter, Entry, Ring};
use super::link::{Shared, bits_of, region_of};
use crate::contract::{Access, Inbound, LinkDownReason, LinkId, PostedArrival, Refusal, RemoteRange, TURN_CHUNK_LEN};
use crate::copy::copy;
use millpond_core::batch::{Capability, Rights};

/// Refused proofs that are remembered, at most.
const REFUSED_MAX: usize = 1024;

/// What is known about the batch being served.
#[derive(Clone, Copy, Debug, Default)]
struct Current {
    ticket: u64,
    /// Moves that were handled: applied, or refused.
    handled: u64,
    /// Whether one was refused.
    refused: bool,
    /// Whether the first move not handled was begun.
    partial: bool,
    /// Whether the peer cut it short.
    cut: bool,
}

/// State of the serving side.
#[derive(Debug, Default)]
pub(super) struct Serving {
    consumed: u64,
    /// Bytes of the request at the front that were copied in earlier turns.
    offset: u64,
    applied: u64,
    current: Current,
    pending_reply: Option<Entry>,
    /// The batch whose last move was handled, and its arrival: its end is answered next.
    ending: Option<(u64, Option<PostedArrival>)>,
    refused_proofs: BTreeMap<u64, Refusal>,
}

/// What became of one request.
enum Step {
    /// Go on with the next.
    Next,
    /// More of this one in the next turn.
    Later,
    /// The link is over.
    Stop,
}

impl Serving {
    /// Whether a turn would find something to do.
    pub(super) fn has_work(&self, shared: &Shared) -> bool {
        let Some(peer) = &shared.peer else { return false };
        let waiting = peer.half.waiting(Ring::Requests, self.consumed).is_none_or(|waiting| waiting > 0);
        (waiting || self.pending_reply.is_some() || self.ending.is_some())
            && shared.room(Ring::Replies) > 0
            && shared.socket.is_flushed()
    }

    /// Serves requests until the budget is spent. Bounded by the ring's length.
    pub(super) fn turn(
        &mut self,
        shared: &mut Shared,
        left: &mut u64,
        regions: &Regions,
        inbound: &mut dyn Inbound,
    ) -> bool {
        let mut worked = false;
        while shared.down.is_none() && *left > 0 && shared.socket.is_flushed() && shared.room(Ring::Replies) > 0 {
            if let Some(reply) = self.pending_reply.take() {
                shared.publish(Ring::Replies, reply);
                worked = true;
                continue;
            }
            if let Some((ticket, arrival)) = self.ending.take() {
                self.end(shared.id, ticket, arrival, inbound);
                continue;
            }
            let Some(peer) = &shared.peer else { break };
            let entry = match peer.half.waiting(Ring::Requests, self.consumed) {
                Some(0) => break,
                Some(_) => peer.half.entry(Ring::Requests, self.consumed),
                None => {
                    shared.end(LinkDownReason::Violation("an impossible count of requests"));
                    break;
                }
            };
            worked = true;
            match self.serve(shared, &entry, left, regions, inbound) {
                Step::Next => {
                    self.consumed += 1;
                    self.offset = 0;
                }
                Step::Later => {}
                Step::Stop => {
                    // Not left to the socket: a request that waits for good would keep us from ever looking at it.
                    if shared.down.is_none() && shared.peer_closed() {
                        shared.end(LinkDownReason::PeerClosed);
                    }
                    break;
                }
            }
        }
        // After the answers, which somebody waits for.
        if worked {
            shared.own.set(Counter::RequestsConsumed, self.consumed);
            shared.own.set(Counter::BytesApplied, self.applied);
            shared.news = true;
        }
        worked
    }

    fn serve(
        &mut self,
        shared: &mut Shared,
        entry: &Entry,
        left: &mut u64,
        regions: &Regions,
        inbound: &mut dyn Inbound,
    ) -> Step {
        let Some(request) = Request::from_entry(entry) else {
            shared.end(LinkDownReason::Violation("a request of no known kind"));
            return Step::Stop;
        };
        match request {
            Request::Prove { region, capability } => self.prove(shared, region, capability, regions, inbound),
            Request::Write { ticket, source, source_offset, target, index, end } => {
                let step = match self.begin(shared, ticket) {
                    true => self.write(shared, (source, source_offset), target, index, left, inbound),
                    false => Step::Next,
                };
                if let (Step::Next, Some(arrival)) = (&step, unpacked_end(end, target.region)) {
                    self.ending = Some((ticket, arrival));
                }
                step
            }
            Request::Read { ticket, source, index } => {
                if self.begin(shared, ticket) {
                    let refusal = inbound.resolve(shared.id, source, Access::Read).err();
                    self.handled(source, index, refusal);
                }
                Step::Next
            }
            Request::End { .. } if shared.peer_closed() => Step::Stop,
            Request::End { ticket, arrival } => {
                self.end(shared.id, ticket, arrival, inbound);
                Step::Next
            }
        }
    }

    fn prove(
        &mut self,
        shared: &mut Shared,
        region: u64,
        capability: Capability,
        regions: &Regions,
        inbound: &mut dyn Inbound,
    ) -> Step {
        let answer = inbound.prove(shared.id, region_of(region), capability);
        let (memory, range) = match answer {
            Ok(proven) => {
                self.refused_proofs.remove(&region);
                let memory = regions.get(&bits_of(proven.memory)).filter(|memory| memory.shared.is_some());
                match memory {
                    Some(memory) if proven.rights.allows(Rights::REMOTE_READ) => {
                        // The record is sent before the reply is published: see `turn`.
                        shared.show(memory);
                        (memory.bits, proven.range.unwrap_or_default())
                    }
                    _ => (0, (0, 0)),
                }
            }
            Err(refusal) => {
                if self.refused_proofs.len() < REFUSED_MAX {
                    self.refused_proofs.insert(region, refusal);
                }
                (0, (0, 0))
            }
        };
        self.pending_reply = Some(Reply::Proved { region, memory, range }.to_entry());
        Step::Next
    }

    /// Takes up a batch, or goes on with it; false if the peer cut it short.
    fn begin(&mut self, shared: &Shared, ticket: u64) -> bool {
        if self.current.ticket != ticket {
            self.current = Current { ticket, ..Current::default() };
        }
        let cut = shared.peer.as_ref().is_some_and(|peer| peer.half.value(Counter::Cut) == ticket);
        if cut && !self.current.cut {
            self.current.cut = true;
            self.current.partial = self.offset > 0;
        }
        !self.current.cut
    }

    fn handled(&mut self, range: RemoteRange, index: u64, refusal: Option<Refusal>) {
        self.current.handled += 1;
        if let Some(refusal) = refusal {
            self.current.refused = true;
            let refusal = match refusal {
                Refusal::NotProven => self.refused_proofs.get(&bits_of(range.region)).copied().unwrap_or(refusal),
                other => other,
            };
            let code = u64::from(refusal.code());
            self.pending_reply = Some(Reply::Refused { ticket: self.current.ticket, index, code }.to_entry());
        }
    }

    fn write(
        &mut self,
        shared: &mut Shared,
        (source, source_offset): (u64, u64),
        target: RemoteRange,
        index: u64,
        left: &mut u64,
        inbound: &mut dyn Inbound,
    ) -> Step {
        let piece = (target.len - self.offset).min(TURN_CHUNK_LEN).min(*left);
        let (Some(target_at), Some(source_at)) =
            (target.offset.checked_add(self.offset), source_offset.checked_add(self.offset))
        else {
            self.handled(target, index, Some(Refusal::OutOfBounds));
            return Step::Next;
        };
        // The first time the whole of it is asked for, so that a move that does not fit changes nothing.
        let rest = RemoteRange { offset: target_at, len: piece, ..target };
        let to = match inbound.resolve(shared.id, if self.offset == 0 { target } else { rest }, Access::Write) {
            Ok(to) => to,
            Err(refusal) => {
                self.handled(target, index, Some(refusal));
                return Step::Next;
            }
        };
        if !shared.maps.contains_key(&source) {
            shared.receive();
        }
        let Some(from) = shared.maps.get(&source).and_then(|map| map.pointer(source_at, piece)) else {
            if shared.down.is_none() {
                shared.end(LinkDownReason::Violation("a source outside the regions it showed"));
            }
            return Step::Stop;
        };
        let piece_len = usize::try_from(piece).unwrap_or(0);
        // SAFETY:
        // - `from`: the map has `piece` bytes there (`pointer` above) and lives in `shared.maps` through this call.
        // - `to`: `resolve` gave it for at least `piece` bytes and for writing, in this very poll.
        // - they do not overlap: one lies in a mapping of the peer's region, the other in memory of ours. A peer that shares
        //   our own memory with us maps it a second time, at other addresses.
        // - the peer may write to its region meanwhile, with means outside of Rust's memory model.
        unsafe { copy(from, to.as_ptr(), piece_len) };
        if shared.peer_closed() {
            return Step::Stop;
        }
        *left = left.saturating_sub(piece);
        self.offset += piece;
        self.applied += piece;
        if self.offset < target.len {
            return Step::Later;
        }
        self.handled(target, index, None);
        Step::Next
    }

    /// Answers a batch. Nothing was copied since the peer was last seen not to have closed the link.
    fn end(&mut self, link: LinkId, ticket: u64, arrival: Option<PostedArrival>, inbound: &mut dyn Inbound) {
        // A cut that finds nothing left to drop changes nothing.
        let current = core::mem::take(&mut self.current);
        let current = if current.ticket == ticket { current } else { Current { ticket, ..Current::default() } };
        let mut code = 0;
        if let (Some(arrival), false, false) = (arrival, current.refused, current.cut) {
            code = inbound.arrive(link, arrival).err().map_or(0, |refusal| u64::from(refusal.code()));
        }
        let partial = u64::from(current.partial);
        self.pending_reply = Some(Reply::Done { ticket, handled: current.handled, partial, code }.to_entry());
    }
}
