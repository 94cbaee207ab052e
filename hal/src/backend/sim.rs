//! A simulated network in one process: delay, reordering, loss, stalls and death, from a seed, under virtual time.
//!
//! Any number of fabrics with a [`Sim`] device each are joined by [`SimNet::pair`]. Frames take as long as the seed says; time
//! is what the fabrics are polled with. It knows no policy: what is lost stays lost until the fabric's progress deadline ends
//! the link. The same seed and the same calls give the same run.
//!
//! Protocol: a move travels in pieces of at most [`PIECE_LEN`], each answered; the arrival follows when all are applied; a
//! cancel makes the owner discard pieces that come after it, and the batch ends when everything sent is answered. Pieces may
//! overtake each other. Each answer says how many pieces, and bytes of them, the owner takes of that link in all: there is no
//! message of credit that could be lost alone, and one that comes late changes nothing.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::{Credit, Grant, Takings};

use self::net::{End, Frame, Reply};
use super::tally::Tally;
use crate::contract::{
    Access, Completions, Connection, Device, DeviceLimits, Event, FarEnd, Inbound, LinkDownReason, LinkId, Memory,
    NotPosted, OpenError, Outcome, Post, PostRefusal, Refusal, RegionMemory, RegisterError, RemoteRange, TicketId,
    Transport, Turn, Wake,
};
use crate::copy::{copy, copy_in};
use crate::mapping::HeaderPage;

mod net;
#[cfg(test)]
mod tests;

pub use net::{Faults, Order, SimNet, SimPort};

/// Bounds of the simulated backend.
pub const LIMITS: DeviceLimits = DeviceLimits { moves_max: 65_536, bytes_max: 1 << 40, posts_max: 256, links_max: 64 };
/// Largest piece of a move, in bytes.
pub const PIECE_LEN: u64 = 64 << 10;
/// Pieces of one link that are sent and not answered.
pub const WINDOW: usize = 64;
/// Cancelled batches of the peer that a link remembers.
const CANCELLED_MAX: usize = 4096;

/// The backend. One per fabric.
///
/// ```
/// use millpond_core::time::Instant;
/// use millpond_hal::backend::sim::{Faults, Sim, SimNet};
/// use millpond_hal::fabric::{Fabric, FabricOptions, LinkOptions};
///
/// let net = SimNet::new(7, Faults::default());
/// let (one, two) = net.pair();
/// let mut fabrics = Vec::new();
/// for (connection, secret) in [(one, 1), (two, 2)] {
///     let mut fabric = Fabric::new(FabricOptions::new([secret; 32])).unwrap();
///     let sim = fabric.add_device(Box::new(Sim::new())).unwrap();
///     fabric.open(Instant::ZERO, sim, connection, LinkOptions::default()).unwrap();
///     fabrics.push(fabric);
/// }
/// ```
#[derive(Debug)]
pub struct Sim {
    links: BTreeMap<LinkId, Link>,
    takings: Takings,
}

impl Default for Sim {
    fn default() -> Self {
        Self::taking(Takings::UNLIMITED)
    }
}

#[derive(Debug)]
struct Link {
    end: End,
    attached: HashMap<RegionId, Attached>,
    batches: BTreeMap<TicketId, Flight>,
    /// Order of posting.
    order: Vec<TicketId>,
    outstanding: usize,
    /// Batches of the peer whose later pieces are discarded.
    cancelled: HashSet<TicketId>,
    closing: Option<LinkDownReason>,
    /// Ends that are reported a second time, and when.
    doubled: Vec<(Instant, TicketId)>,
    /// What the peer takes in all, and what it was sent.
    credit: Credit,
    asked: Credit,
    /// The peer's account.
    grant: Grant,
    /// What the peer may have open.
    share: Credit,
}

#[derive(Clone, Copy, Debug)]
struct Attached {
    capability: Capability,
    proven: bool,
}

/// A batch of ours.
#[derive(Debug)]
struct Flight {
    post: Post,
    next_move: usize,
    next_offset: u64,
    /// Pieces, the arrival and the cancel that are sent and not answered.
    outstanding: usize,
    progress: Vec<Progress>,
    arrival: ArrivalState,
    cancelled: bool,
    /// When it is reported, once it is over.
    report_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    sent: u32,
    applied: u32,
    discarded: u32,
    refused: Option<Refusal>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArrivalState {
    None,
    Waiting,
    Sent,
    Counted,
    Refused(Refusal),
}

impl Sim {
    /// A backend without links, which takes whatever comes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One that takes so much of all links together. A link begins with the least that is promised to each; both ends of a
    /// pair have to be made with the same.
    #[must_use]
    pub fn taking(takings: Takings) -> Self {
        Self { links: BTreeMap::new(), takings }
    }

    fn divide(&mut self) {
        let share = self.takings.share(u32::try_from(self.links.len()).unwrap_or(u32::MAX));
        self.links.values_mut().for_each(|link| link.share = share);
    }
}

impl Flight {
    fn new(post: Post) -> Self {
        let arrival = if post.arrival.is_some() { ArrivalState::Waiting } else { ArrivalState::None };
        let progress = vec![Progress::default(); post.moves.len()];
        Self {
            post,
            next_move: 0,
            next_offset: 0,
            outstanding: 0,
            progress,
            arrival,
            cancelled: false,
            report_at: None,
        }
    }

    fn all_sent(&self) -> bool {
        self.next_move == self.post.moves.len()
    }

    fn is_over(&self) -> bool {
        self.outstanding == 0 && (self.cancelled || (self.all_sent() && self.arrival != ArrivalState::Waiting))
    }

    fn may_count(&self) -> bool {
        let clean =
            self.progress.iter().all(|progress| progress.refused.is_none() && progress.applied == progress.sent);
        self.arrival == ArrivalState::Waiting && !self.cancelled && self.all_sent() && self.outstanding == 0 && clean
    }

    /// A refused write: the arrival will never be sent.
    fn give_up_arrival(&mut self) {
        let refused = self.progress.iter().any(|progress| progress.refused.is_some());
        if refused && self.arrival == ArrivalState::Waiting {
            self.arrival = ArrivalState::None;
        }
    }

    /// How move `index` ended, if the batch ends now for `otherwise`.
    fn outcome(&self, index: usize, otherwise: fn(FarEnd) -> Outcome) -> Outcome {
        let (progress, posted) = (self.progress[index], self.post.moves[index]);
        let whole = index < self.next_move && progress.applied == progress.sent;
        let untouched = posted.access == Access::Read || progress.applied == 0;
        let known = progress.applied + progress.discarded == progress.sent;
        let far_end =
            if untouched && (known || posted.access == Access::Read) { FarEnd::Untouched } else { FarEnd::Unknown };
        match (progress.refused, whole) {
            (Some(refusal), _) => Outcome { far_end, ..Outcome::refused(refusal) },
            (None, true) => Outcome::DONE,
            (None, false) => otherwise(far_end),
        }
    }

    fn finish(self, down: Option<LinkDownReason>, inbound: &mut dyn Inbound) {
        let ticket = self.post.ticket;
        let otherwise =
            |far_end| down.map_or(Outcome::cancelled(far_end), |reason| Outcome::link_down(reason, far_end));
        let uncounted = match self.arrival {
            ArrivalState::Refused(refusal) => Some(Outcome { far_end: FarEnd::Done, ..Outcome::refused(refusal) }),
            ArrivalState::Waiting => Some(otherwise(FarEnd::Untouched)),
            ArrivalState::Sent => Some(otherwise(FarEnd::Unknown)),
            ArrivalState::None | ArrivalState::Counted => None,
        };
        let mut tally = Tally::default();
        for index in 0..self.post.moves.len() {
            let mut outcome = self.outcome(index, Outcome::cancelled);
            if let (crate::contract::End::Cancelled, far_end) = (outcome.end, outcome.far_end) {
                outcome = otherwise(far_end);
            }
            tally.push(ticket, outcome, inbound);
        }
        if let Some(outcome) = uncounted {
            return tally.finish_otherwise(ticket, outcome, self.post.moves, inbound);
        }
        let empty = if self.cancelled && !self.all_sent() { otherwise(FarEnd::Untouched) } else { Outcome::DONE };
        tally.finish(ticket, empty, self.post.moves, inbound);
    }
}

impl Link {
    /// Sends what the window allows, oldest batch first.
    fn send(&mut self, now: Instant, budget: &mut u64) -> bool {
        let mut worked = false;
        for ticket in &self.order {
            let Some(flight) = self.batches.get_mut(ticket) else { continue };
            while !flight.cancelled
                && !flight.all_sent()
                && self.outstanding < WINDOW
                && self.credit.admits(self.asked)
                && *budget > 0
            {
                let posted = flight.post.moves[flight.next_move];
                let len = (posted.remote.len - flight.next_offset).min(PIECE_LEN);
                prove(&mut self.attached, posted.remote.region, &mut self.end, now);
                let range = RemoteRange { offset: posted.remote.offset + flight.next_offset, len, ..posted.remote };
                // The whole move goes along, so that the owner refuses all of it or none.
                let (index, at) = (flight.next_move, flight.next_offset);
                let frame = match posted.access {
                    Access::Write => {
                        let data = read_local(&posted, at, len);
                        Frame::Write { ticket: *ticket, index, whole: posted.remote, range, data }
                    }
                    Access::Read => Frame::Read { ticket: *ticket, index, whole: posted.remote, range, at },
                };
                self.end.send(now, frame);
                worked = true;
                *budget = budget.saturating_sub(len.max(1));
                (self.asked.bytes, self.asked.slices) = (self.asked.bytes + len, self.asked.slices + 1);
                flight.progress[index].sent += 1;
                flight.outstanding += 1;
                self.outstanding += 1;
                flight.next_offset += len;
                if flight.next_offset == posted.remote.len {
                    (flight.next_move, flight.next_offset) = (index + 1, 0);
                }
            }
            flight.give_up_arrival();
            if let (true, Some(arrival)) = (flight.may_count() && self.outstanding < WINDOW, flight.post.arrival) {
                prove(&mut self.attached, arrival.region, &mut self.end, now);
                self.end.send(now, Frame::Arrive { ticket: *ticket, arrival });
                flight.arrival = ArrivalState::Sent;
                flight.outstanding += 1;
                self.outstanding += 1;
                worked = true;
            }
        }
        worked
    }

    fn cancel(&mut self, now: Instant, ticket: TicketId) -> bool {
        let Some(flight) = self.batches.get_mut(&ticket).filter(|flight| !flight.cancelled) else { return false };
        flight.cancelled = true;
        flight.outstanding += 1;
        self.outstanding += 1;
        self.end.send(now, Frame::Cancel { ticket });
        true
    }

    fn receive(&mut self, id: LinkId, now: Instant, budget: &mut u64, inbound: &mut dyn Inbound) -> bool {
        let mut worked = false;
        while *budget > 0 && self.closing.is_none() {
            let Some(frame) = self.end.receive(now) else { break };
            worked = true;
            *budget = budget.saturating_sub(frame.cost());
            match frame {
                Frame::Reply { ticket, reply, credit } => {
                    self.credit.raise_to(credit);
                    self.on_reply(ticket, reply, inbound);
                }
                Frame::Goodbye => self.closing = Some(LinkDownReason::PeerClosed),
                request => self.serve(id, now, request, inbound),
            }
        }
        worked
    }

    /// The peer asks for a piece, which is answered in the same turn: does it have the credit?
    fn takes(&mut self, len: u64) -> bool {
        let is_granted = self.grant.on_asked(len).is_ok();
        if is_granted {
            self.grant.on_answered(1, len);
            // What is granted goes along with the answer, whether it is new or not.
            let _ = self.grant.poll(self.share);
        } else {
            self.closing.get_or_insert(LinkDownReason::Violation("more pieces or bytes than it had credit for"));
        }
        is_granted
    }

    fn serve(&mut self, id: LinkId, now: Instant, request: Frame, inbound: &mut dyn Inbound) {
        if let Frame::Write { range, .. } | Frame::Read { range, .. } = &request
            && !self.takes(range.len)
        {
            return;
        }
        let (ticket, reply) = match request {
            // A refused proof shows when the region is named.
            Frame::Prove { region, capability } => {
                let _ = inbound.prove(id, region, capability);
                return;
            }
            Frame::Write { ticket, index, whole, range, data } => {
                let applied = if self.cancelled.contains(&ticket) {
                    Ok(false)
                } else {
                    apply(id, whole, range, &data, inbound).map(|()| true)
                };
                (ticket, Reply::Piece { index, applied, data: None })
            }
            Frame::Read { ticket, index, whole, range, at } => {
                let read = if self.cancelled.contains(&ticket) {
                    Ok(None)
                } else {
                    fetch(id, whole, range, inbound).map(Some)
                };
                let applied = read.as_ref().map(Option::is_some).map_err(|refusal| *refusal);
                (ticket, Reply::Piece { index, applied, data: read.ok().flatten().map(|data| (at, data)) })
            }
            Frame::Arrive { ticket, arrival } => {
                let counted = if self.cancelled.contains(&ticket) {
                    Ok(false)
                } else {
                    inbound.arrive(id, arrival).map(|()| true)
                };
                (ticket, Reply::Arrival(counted))
            }
            Frame::Cancel { ticket } => {
                // Where there is no room the pieces are applied: the batch then ends as done.
                if self.cancelled.len() < CANCELLED_MAX {
                    self.cancelled.insert(ticket);
                }
                (ticket, Reply::Cancelled)
            }
            Frame::Forget { ticket } => {
                self.cancelled.remove(&ticket);
                return;
            }
            Frame::Reply { .. } | Frame::Goodbye => return,
        };
        self.end.send(now, Frame::Reply { ticket, reply, credit: self.grant.granted() });
    }

    fn on_reply(&mut self, ticket: TicketId, reply: Reply, inbound: &mut dyn Inbound) {
        let Some(flight) = self.batches.get_mut(&ticket) else { return };
        flight.outstanding -= 1;
        self.outstanding -= 1;
        match reply {
            Reply::Piece { index, applied, data } => {
                let progress = &mut flight.progress[index];
                match applied {
                    Ok(true) => progress.applied += 1,
                    Ok(false) => progress.discarded += 1,
                    Err(refusal) => {
                        progress.discarded += 1;
                        progress.refused = Some(refusal);
                    }
                }
                let bytes = match data {
                    Some((at, data)) => {
                        write_local(&flight.post.moves[index], at, &data);
                        data.len() as u64
                    }
                    None => flight.post.moves[index].remote.len.min(PIECE_LEN),
                };
                inbound.event(Event::Progress { ticket, bytes });
            }
            Reply::Arrival(Ok(true)) => flight.arrival = ArrivalState::Counted,
            Reply::Arrival(Ok(false)) => flight.arrival = ArrivalState::Waiting,
            Reply::Arrival(Err(refusal)) => flight.arrival = ArrivalState::Refused(refusal),
            Reply::Cancelled => {}
        }
    }

    /// Reports what is over, in order of posting.
    fn finish(&mut self, now: Instant, inbound: &mut dyn Inbound) -> bool {
        let mut worked = false;
        let mut index = 0;
        self.doubled.retain(|(at, ticket)| {
            if *at <= now {
                worked = true;
                inbound.event(Event::Finished { ticket: *ticket, outcome: Outcome::DONE, moves: Vec::new() });
            }
            *at > now
        });
        while let Some(&ticket) = self.order.get(index) {
            let over = self.batches.get_mut(&ticket).is_none_or(|flight| {
                flight.give_up_arrival();
                flight.is_over() && *flight.report_at.get_or_insert_with(|| self.end.report_at(now)) <= now
            });
            if !over {
                index += 1;
                continue;
            }
            self.order.remove(index);
            let Some(flight) = self.batches.remove(&ticket) else { continue };
            if flight.cancelled {
                self.end.send(now, Frame::Forget { ticket });
            }
            flight.finish(None, inbound);
            self.doubled.extend(self.end.doubled_at(now).map(|at| (at, ticket)));
            worked = true;
        }
        worked
    }

    /// When something is to be done next.
    fn next_at(&self) -> Option<Instant> {
        let reports = self.batches.values().filter(|flight| flight.is_over()).filter_map(|flight| flight.report_at);
        reports.chain(self.doubled.iter().map(|(at, _)| *at)).chain(self.end.next_at()).min()
    }

    fn bury(mut self, id: LinkId, now: Instant, reason: LinkDownReason, inbound: &mut dyn Inbound) {
        if reason != LinkDownReason::PeerClosed && reason != LinkDownReason::PeerGone {
            self.end.send(now, Frame::Goodbye);
        }
        self.end.close();
        for ticket in self.order {
            if let Some(flight) = self.batches.remove(&ticket) {
                flight.finish(Some(reason), inbound);
            }
        }
        inbound.event(Event::LinkDown { link: id, reason });
    }
}

fn prove(attached: &mut HashMap<RegionId, Attached>, region: RegionId, end: &mut End, now: Instant) {
    if let Some(attached) = attached.get_mut(&region).filter(|attached| !attached.proven) {
        attached.proven = true;
        end.send(now, Frame::Prove { region, capability: attached.capability });
    }
}

fn usize_of(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// A piece of a posted write's local bytes.
fn read_local(posted: &crate::contract::PostedMove, at: u64, len: u64) -> Vec<u8> {
    let mut data = vec![0; usize_of(len)];
    // SAFETY:
    // - the contract lends the posted range until `Finished`; `at + len` is inside it: both count its bytes.
    // - `data` is `len` bytes of our own.
    unsafe { copy(posted.local.as_ptr().add(usize_of(at)), data.as_mut_ptr(), data.len()) };
    data
}

/// Puts a piece of a posted read in its place; one that does not fit is not ours to believe.
fn write_local(posted: &crate::contract::PostedMove, at: u64, data: &[u8]) {
    if posted.access != Access::Read || at.checked_add(data.len() as u64).is_none_or(|end| end > posted.remote.len) {
        return;
    }
    // SAFETY:
    // - the contract lends the posted range until `Finished`; `at + len` is inside it: checked above.
    // - `data` is memory of our own.
    unsafe { copy_in(data, posted.local.as_ptr().add(usize_of(at))) };
}

fn apply(
    id: LinkId,
    whole: RemoteRange,
    range: RemoteRange,
    data: &[u8],
    inbound: &mut dyn Inbound,
) -> Result<(), Refusal> {
    inbound.resolve(id, whole, Access::Write)?;
    let target = inbound.resolve(id, range, Access::Write)?;
    debug_assert_eq!(data.len() as u64, range.len);
    // SAFETY: resolved in the line above for `range.len` bytes, in this poll; `data` is as long.
    unsafe { copy_in(data, target.as_ptr()) };
    Ok(())
}

fn fetch(id: LinkId, whole: RemoteRange, range: RemoteRange, inbound: &mut dyn Inbound) -> Result<Vec<u8>, Refusal> {
    inbound.resolve(id, whole, Access::Read)?;
    let source = inbound.resolve(id, range, Access::Read)?;
    let mut data = vec![0; usize_of(range.len)];
    // SAFETY: resolved in the line above for `range.len` bytes, in this poll; `data` is as long.
    unsafe { copy(source.as_ptr(), data.as_mut_ptr(), data.len()) };
    Ok(data)
}

// SAFETY:
// - local memory is touched in `read_local` and `write_local` only, for batches in `batches`; `Flight::finish` consumes them.
// - pointers from `resolve` are used in `apply` and `fetch`, in the poll that gave them, and not kept.
// - far ends are told from the owner's own answers; what was not answered is `Unknown`.
unsafe impl Memory for Sim {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        local == MemoryKind::Host && remote == MemoryKind::Host
    }

    fn share_header(&mut self, _header: &Arc<HeaderPage>) {}

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        if memory.kind == MemoryKind::Host { Ok(()) } else { Err(RegisterError::Kind(memory.kind)) }
    }

    fn release(&mut self, _region: RegionId) {}

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        let Some(link) = self.links.get_mut(&link) else { return Ok(()) };
        let fresh = Attached { capability: token.capability, proven: false };
        let known = link.attached.entry(token.region).or_insert(fresh);
        if !known.capability.matches(&token.capability) {
            *known = fresh;
        }
        Ok(())
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        if let Some(link) = self.links.get_mut(&link) {
            link.attached.remove(&region);
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Transport for Sim {
    fn open(&mut self, _now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        let wrong = OpenError::WrongConnection { transport: "sim" };
        let Connection::Own(own) = connection else { return Err(wrong) };
        let port = own.into_any().downcast::<SimPort>().map_err(|_| wrong)?;
        if self.links.len() >= LIMITS.links_max as usize {
            return Err(OpenError::Full { transport: "sim", links_max: LIMITS.links_max });
        }
        let fresh = Link {
            end: port.into_end(),
            attached: HashMap::new(),
            batches: BTreeMap::new(),
            order: Vec::new(),
            outstanding: 0,
            cancelled: HashSet::new(),
            closing: None,
            doubled: Vec::new(),
            credit: self.takings.least,
            asked: Credit { bytes: 0, slices: 0 },
            grant: Grant::new(self.takings.least),
            share: self.takings.least,
        };
        self.links.insert(link, fresh);
        self.divide();
        Ok(())
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if let Some(link) = self.links.get_mut(&link) {
            link.closing.get_or_insert(reason);
        }
    }

    unsafe fn post(&mut self, now: Instant, post: Post) -> Result<(), NotPosted> {
        let Some(link) = self.links.get_mut(&post.link).filter(|link| link.closing.is_none()) else {
            return Err(NotPosted { post, reason: PostRefusal::LinkClosed });
        };
        if link.batches.len() >= LIMITS.posts_max as usize {
            return Err(NotPosted { post, reason: PostRefusal::Full });
        }
        link.order.push(post.ticket);
        link.batches.insert(post.ticket, Flight::new(post));
        link.send(now, &mut PIECE_LEN.clone());
        Ok(())
    }

    fn cancel(&mut self, now: Instant, ticket: TicketId) {
        // At most one link knows the ticket.
        let _ = self.links.values_mut().any(|link| link.cancel(now, ticket));
    }
}

// SAFETY: as for `Memory`.
unsafe impl Completions for Sim {
    fn poll(&mut self, now: Instant, mut budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let mut worked = false;
        let mut down = Vec::new();
        for (id, link) in &mut self.links {
            if link.end.peer_is_dead(now) {
                link.closing.get_or_insert(LinkDownReason::PeerGone);
            }
            worked |= link.receive(*id, now, &mut budget_bytes, inbound);
            if let Some(reason) = link.closing {
                down.push((*id, reason));
                continue;
            }
            worked |= link.send(now, &mut budget_bytes);
            worked |= link.finish(now, inbound);
        }
        for (id, reason) in down {
            worked = true;
            if let Some(link) = self.links.remove(&id) {
                link.bury(id, now, reason, inbound);
                self.divide();
            }
        }
        if worked { Turn::Worked } else { Turn::Idle }
    }

    fn arm(&mut self, now: Instant) -> Wake<'_> {
        if self.links.values().any(|link| link.closing.is_some()) {
            return Wake::Now;
        }
        let next = self.links.values().filter_map(Link::next_at).min();
        match next {
            Some(at) if at <= now => Wake::Now,
            Some(at) => Wake::After(at.since(now)),
            // Another fabric of this process may send at any time, and nothing but time announces it.
            None if !self.links.is_empty() => Wake::After(Duration::from_millis(1)),
            None => Wake::Idle,
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Device for Sim {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn limits(&self) -> DeviceLimits {
        LIMITS
    }
}
