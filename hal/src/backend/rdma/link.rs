//! One link: an endpoint, what its ends said to each other, and the batches on it.
//!
//! Life: opened → greeted (the peer's hello came; nothing is posted before) → down (closed here, by the peer, or broken) →
//! buried: its data queues are destroyed, which makes its memory quiet, its batches end, and only the goodbye lingers.
//! A key that was revoked breaks one data queue, which is made anew while the link lives; anything else that breaks ends it.
#![allow(unsafe_code)]

use core::num::NonZeroI32;
use std::collections::{HashMap, VecDeque};

use millpond_core::batch::{Capability, RegionId, RegionToken, Rights};
use millpond_core::time::{Duration, Instant};

use super::control::Control;
use super::endpoint::{Connected, Endpoint};
use super::job::{Job, Last, Progress};
use super::memory::{KEYS_PER_GRANT_MAX, Lending, Local, StillReachable};
use super::message::{Arrival, KEYS_MAX, Key, Message, Remade};
use super::nic::Count;
use super::queue::{Jobs, Queue, Settled, View};
use super::record::Record;
use super::verbs::{Completion, PostedSome, Status, VerbsError};
use super::wire_id::{Id, Kind};
use crate::contract::{Event, Inbound, Lane, LaneSide, LinkDownReason, LinkId, Post, PostedArrival, Refusal, TicketId};

/// A link that has batches says something at least so often: whoever is gone does not take it.
const BUSY_PING: Duration = Duration::from_millis(250);
/// An idle link does so too.
const IDLE_PING: Duration = Duration::from_secs(10);
/// How long a goodbye may take.
const PART_MAX: Duration = Duration::from_millis(200);
/// Rounds of completions in one turn.
const ROUNDS_MAX: u32 = 8;
/// Lists kept for reuse.
const SPARE_MAX: usize = 64;
const EIO: NonZeroI32 = NonZeroI32::new(5).unwrap();

/// What is known of a peer's region.
#[derive(Debug)]
pub(super) enum Known {
    /// Nothing yet; keys that came so far.
    Nothing(Vec<Key>),
    /// What we may do, and by which keys.
    Keys(Rights, Vec<Key>),
    /// Not for us.
    Refused(Refusal),
}

/// A region of the peer's that batches may name.
#[derive(Debug)]
pub(super) struct Attached {
    capability: Capability,
    uses: u32,
    /// Proofs that were not answered.
    asked: u32,
    pub(super) known: Known,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Link {
    pub(super) id: LinkId,
    pub(super) endpoint: Endpoint,
    peer: Record,
    lane: Lane,
    control: Control,
    is_greeted: bool,
    attached: HashMap<RegionId, Attached>,
    lending: Lending,
    jobs: Jobs,
    /// Batches that wait for an answer about a region.
    waiting: VecDeque<TicketId>,
    queues: Vec<Queue>,
    queue_next: usize,
    back_generations: Vec<u16>,
    over: Vec<TicketId>,
    spare: Vec<Vec<Progress>>,
    completions: Vec<Completion>,
    pub(super) down: Option<LinkDownReason>,
    pub(super) is_armed: bool,
    ping_at: Instant,
}

/// What is left of a link that ended, until its goodbye was heard.
#[derive(Debug)]
pub(super) struct Parting {
    endpoint: Endpoint,
    until: Instant,
    /// Number of the goodbye among the messages.
    goodbye: u32,
    completions: Vec<Completion>,
}

impl Link {
    pub(super) fn new(now: Instant, id: LinkId, connected: Connected) -> Self {
        let Connected { endpoint, peer, lane } = connected;
        let queues = endpoint.queues();
        let mut control = Control::default();
        if lane.side == LaneSide::Dialed {
            control.say(hello(&lane));
        }
        Self {
            id,
            endpoint,
            peer,
            lane,
            control,
            is_greeted: false,
            attached: HashMap::new(),
            lending: Lending::default(),
            jobs: Jobs::new(),
            waiting: VecDeque::new(),
            queues: (0..queues).map(Queue::new).collect(),
            queue_next: 0,
            back_generations: vec![0; queues],
            over: Vec::new(),
            spare: Vec::new(),
            completions: Vec::new(),
            down: None,
            is_armed: false,
            ping_at: now + BUSY_PING,
        }
    }

    pub(super) fn posts(&self) -> usize {
        self.jobs.len()
    }

    /// Whether something is to be done that no completion announces.
    pub(super) fn has_work(&self) -> bool {
        let speaks = self.may_speak() && self.control.can_send();
        self.down.is_some() || speaks || !self.over.is_empty() || !self.completions.is_empty()
    }

    /// Whether it can make room for another.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.is_greeted && self.control.is_flushed()
    }

    /// Ends the link, for the first reason given. The peer is told if that needs no waiting.
    pub(super) fn end(&mut self, reason: LinkDownReason) {
        if self.down.is_none() {
            self.down = Some(reason);
            if !matches!(reason, LinkDownReason::PeerGone | LinkDownReason::PeerClosed) {
                self.control.part(self.endpoint.nic.verbs(), &self.endpoint);
            }
        }
    }

    fn end_by(&mut self, error: VerbsError) {
        self.end(LinkDownReason::System(NonZeroI32::new(error.code).unwrap_or(EIO)));
    }

    pub(super) fn attach(&mut self, token: &RegionToken) {
        let attached = self.attached.entry(token.region).or_insert(Attached {
            capability: token.capability,
            uses: 0,
            asked: 0,
            known: Known::Nothing(Vec::new()),
        });
        attached.uses += 1;
        let is_new = attached.uses == 1 || !attached.capability.matches(&token.capability);
        if is_new {
            attached.capability = token.capability;
            if matches!(attached.known, Known::Refused(_)) {
                attached.known = Known::Nothing(Vec::new());
            }
            self.ask(token.region);
        }
    }

    fn ask(&mut self, region: RegionId) {
        let Some(attached) = self.attached.get_mut(&region) else { return };
        attached.asked += 1;
        self.control.say(Message::Prove { region, capability: attached.capability.to_bytes() });
    }

    pub(super) fn detach(&mut self, region: RegionId) {
        if let Some(attached) = self.attached.get_mut(&region) {
            attached.uses -= 1;
            if attached.uses == 0 {
                self.attached.remove(&region);
            }
        }
    }

    /// Takes a batch whose local memory is registered, and posts what can be.
    pub(super) fn post(&mut self, local: &Local, post: Post) {
        let (ticket, spare) = (post.ticket, self.spare.pop().unwrap_or_default());
        for region in regions(&post).collect::<Vec<_>>() {
            // An owner that was short of something is asked again.
            if let Some(attached) = self.attached.get_mut(&region)
                && matches!(attached.known, Known::Refused(Refusal::Busy | Refusal::Failed))
            {
                attached.known = Known::Nothing(Vec::new());
                self.ask(region);
            }
        }
        self.jobs.insert(ticket, Job::new(post, spare));
        if self.is_resolved(ticket) {
            self.enqueue(ticket);
        } else {
            self.waiting.push_back(ticket);
        }
        self.push(local);
    }

    fn is_resolved(&self, ticket: TicketId) -> bool {
        let Some(job) = self.jobs.get(&ticket) else { return true };
        let open = |region| self.attached.get(&region).is_some_and(|it| matches!(it.known, Known::Nothing(_)));
        self.is_greeted && !regions(&job.post).any(open)
    }

    fn enqueue(&mut self, ticket: TicketId) {
        self.queue_next = (self.queue_next + 1) % self.queues.len();
        let index = (0..self.queues.len())
            .map(|step| (self.queue_next + step) % self.queues.len())
            .find(|index| self.queues[*index].is_ready)
            .unwrap_or(self.queue_next);
        if let Some(job) = self.jobs.get_mut(&ticket) {
            job.queue = index;
            self.queues[index].push(ticket);
        }
    }

    fn enqueue_resolved(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(ticket) = self.waiting.pop_front() else { break };
            if self.is_resolved(ticket) {
                self.enqueue(ticket);
            } else {
                self.waiting.push_back(ticket);
            }
        }
    }

    /// Posts what the queues have room for, one doorbell each, and sends messages.
    fn push(&mut self, local: &Local) {
        let view = View { endpoint: &self.endpoint, peer: &self.peer, attached: &self.attached, local };
        let mut failed = None;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let requests = queue.fill(&view, &mut self.jobs, &mut self.over);
            if requests.is_empty() {
                continue;
            }
            // SAFETY:
            // - local memory: pieces of posted moves, registered since `RdmaDevice::post`; the fabric lends them until their
            //   ticket is finished, which is after their completion (`Job::is_over`) or after `bury` destroyed the queue.
            //   Records and the landing word are the endpoint's, which destroys the queue first.
            // - inline: read before this returns.
            let posted = unsafe { self.endpoint.nic.verbs().post_send(self.endpoint.out[index].handle, requests) };
            if let Err(PostedSome { posted, code }) = posted {
                queue.forget_unposted(posted);
                failed = Some(VerbsError { verb: "ibv_post_send", code });
            }
        }
        if let Some(error) = failed {
            self.end_by(error);
        }
        self.flush();
    }

    /// Whether this end may speak: who was dialed keeps quiet until it was greeted, since the peer may not be connected yet.
    fn may_speak(&self) -> bool {
        self.down.is_none() && (self.is_greeted || self.lane.side == LaneSide::Dialed)
    }

    fn flush(&mut self) {
        if self.may_speak()
            && let Err(some) = self.control.flush(self.endpoint.nic.verbs(), &self.endpoint)
        {
            self.end_by(VerbsError { verb: "ibv_post_send", code: some.code });
        }
    }

    /// Asks a batch to end early.
    pub(super) fn cancel(&mut self, local: &Local, ticket: TicketId) -> bool {
        let Some(job) = self.jobs.get_mut(&ticket) else { return false };
        job.is_cancelled = true;
        if let Some(at) = self.waiting.iter().position(|waiting| *waiting == ticket) {
            self.waiting.remove(at);
            job.call_off();
            job.last = Last::Posted;
            self.over.push(ticket);
        }
        self.push(local);
        true
    }

    /// Takes back what peers hold keys to. `true` if this link's peer held any.
    pub(super) fn revoke(&mut self, exposure: RegionId) -> Result<bool, StillReachable> {
        let had_keys = self.lending.revoke(self.endpoint.nic.verbs(), exposure)?;
        if had_keys && self.down.is_none() {
            self.control.say(Message::Revoked { region: exposure });
            self.flush();
        }
        Ok(had_keys)
    }

    /// As [`Link::revoke`], where the NIC would not deregister: the link ends, and its peer reaches nothing more.
    pub(super) fn revoke_by_force(&mut self, exposure: RegionId) {
        self.end(LinkDownReason::System(EIO));
        self.endpoint.destroy_data_queues();
        let _ = self.lending.revoke(self.endpoint.nic.verbs(), exposure);
    }

    /// Looks for completions. Returns whether there are any to be handled.
    pub(super) fn look(&mut self) -> bool {
        if let Err(error) = self.endpoint.nic.verbs().poll(self.endpoint.completions, &mut self.completions) {
            self.end_by(error);
        }
        !self.completions.is_empty()
    }

    /// One turn. Returns whether anything was done.
    pub(super) fn turn(&mut self, now: Instant, local: &Local, inbound: &mut dyn Inbound) -> bool {
        let mut worked = false;
        for _ in 0..ROUNDS_MAX {
            if self.down.is_some() || !self.look() {
                break;
            }
            worked = true;
            self.handle_completions(local, inbound);
        }
        if self.down.is_none() {
            if worked {
                self.enqueue_resolved();
                self.push(local);
            } else if self.may_speak() && self.control.can_send() {
                self.flush();
                worked = true;
            }
            if now >= self.ping_at {
                if self.control.may_ping() {
                    self.control.say(Message::Ping);
                    self.flush();
                }
                worked = true;
            }
            if worked {
                let interval = if self.jobs.is_empty() { IDLE_PING } else { BUSY_PING };
                self.ping_at = now + interval;
            }
        }
        worked | self.finish_over(inbound)
    }

    /// A batch was posted: whoever is gone is to be found soon.
    pub(super) fn expect_answer(&mut self, now: Instant) {
        self.ping_at = self.ping_at.min(now + BUSY_PING);
    }

    pub(super) fn next_timer(&self) -> Instant {
        self.ping_at
    }

    fn finish_over(&mut self, inbound: &mut dyn Inbound) -> bool {
        let any = !self.over.is_empty();
        let mut over = core::mem::take(&mut self.over);
        for ticket in over.drain(..) {
            // Named twice, or not over any more since its queue broke.
            if !self.jobs.get(&ticket).is_some_and(Job::is_over) {
                continue;
            }
            let Some(job) = self.jobs.remove(&ticket) else { continue };
            let progress = job.finish(inbound);
            if self.spare.len() < SPARE_MAX {
                self.spare.push(progress);
            }
        }
        self.over = over;
        any
    }

    fn handle_completions(&mut self, local: &Local, inbound: &mut dyn Inbound) {
        let mut completions = core::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            let id = Id::from_bits(completion.id);
            match id.kind {
                Kind::ControlSend => self.on_control_end(completion.status),
                Kind::ControlReceive if completion.status == Status::Done => {
                    self.on_message(&completion, id.number, local, inbound);
                }
                Kind::ControlReceive => self.on_control_end(completion.status),
                Kind::Out => self.on_request_end(id, completion.status, inbound),
                // A queue of the peer's that it broke: it will ask for another.
                Kind::Back if completion.status != Status::Done => {}
                Kind::Back => self.on_arrival(id, completion.immediate, inbound),
            }
        }
        self.completions = completions;
    }

    fn on_control_end(&mut self, status: Status) {
        match status {
            Status::Done => {}
            Status::Other(_) | Status::RemoteAccess => self.end(LinkDownReason::System(EIO)),
            Status::NoAnswer | Status::NotReady | Status::Flushed => self.end(LinkDownReason::PeerGone),
        }
    }

    fn on_request_end(&mut self, id: Id, status: Status, inbound: &mut dyn Inbound) {
        let packet_len = self.endpoint.packet_len(&self.peer);
        let index = usize::from(id.index);
        let Some(queue) = self.queues.get_mut(index).filter(|queue| queue.generation == id.generation) else { return };
        let settled = queue.complete((id.number, status), packet_len, &mut self.jobs, &mut self.over, inbound);
        let generation = queue.generation;
        match settled {
            Settled::Going => {}
            Settled::Lost => self.end(LinkDownReason::PeerGone),
            Settled::Failed => self.end(LinkDownReason::System(EIO)),
            Settled::Broken if self.down.is_some() => {}
            Settled::Broken => {
                self.endpoint.nic.count(Count::QueueRemade);
                match self.endpoint.remake_out(index, generation) {
                    Ok(remade) => self.control.say(Message::Remake(remade)),
                    Err(error) => self.end_by(error),
                }
            }
        }
    }

    fn on_arrival(&mut self, id: Id, immediate: Option<u32>, inbound: &mut dyn Inbound) {
        let index = usize::from(id.index);
        if self.down.is_some() || self.back_generations.get(index) != Some(&id.generation) {
            return;
        }
        let record = immediate.and_then(|slot| Some((slot, self.endpoint.arrival(index, slot)?)));
        let Some((slot, Some(arrival))) = record.map(|(slot, bytes)| (slot, Arrival::parse(&bytes))) else {
            return self.end(LinkDownReason::Violation("an arrival that is none"));
        };
        let posted = PostedArrival { region: arrival.region, counter: arrival.counter, amount: arrival.amount };
        let code = inbound.arrive(self.id, posted).err().map_or(0, Refusal::code);
        // The slot is free again before the peer hears so.
        if let Err(some) = self.endpoint.receive_arrivals(index, id.generation, 1) {
            return self.end_by(VerbsError { verb: "ibv_post_recv", code: some.code });
        }
        let index = u16::from(id.index);
        let slot = u16::try_from(slot).unwrap_or(u16::MAX);
        self.control.say(Message::Counted { index, slot, generation: id.generation, code });
    }

    fn on_message(&mut self, completion: &Completion, slot: u32, local: &Local, inbound: &mut dyn Inbound) {
        if self.down.is_some() {
            return;
        }
        let Some(message) = self.control.take(self.endpoint.nic.verbs(), &self.endpoint, completion, slot) else {
            return self.end(LinkDownReason::Violation("a message that is none"));
        };
        let is_hello = matches!(message, Message::Hello { .. });
        if is_hello == self.is_greeted && !matches!(message, Message::Goodbye) {
            return self.end(LinkDownReason::Violation("a hello that is missing, or a second one"));
        }
        match message {
            Message::Hello { generation, incarnation } => self.on_hello(generation, incarnation),
            Message::Prove { region, capability } => self.on_proof(region, Capability::new(capability), local, inbound),
            Message::Keys { region, rights, total, first, keys } => self.on_keys(region, (rights, total, first), keys),
            Message::Refused { region, code } => self.on_refused(region, code),
            Message::Revoked { region } => {
                if let Some(attached) = self.attached.get_mut(&region) {
                    attached.known = Known::Refused(Refusal::Stale);
                }
            }
            Message::Counted { index, slot, generation, code } => self.on_counted(index, slot, generation, code),
            Message::Remake(remade) => self.on_remake(&remade),
            Message::Remade(remade) => self.on_remade(&remade),
            Message::Ping | Message::Credit => {}
            Message::Goodbye => self.end(LinkDownReason::PeerClosed),
        }
    }

    fn on_hello(&mut self, generation: u64, incarnation: u64) {
        if (generation, incarnation) != (self.lane.generation, self.lane.peer_incarnation) {
            return self.end(LinkDownReason::Violation("a hello of another lane"));
        }
        self.is_greeted = true;
        if self.lane.side == LaneSide::Accepted {
            self.control.say_first(hello(&self.lane));
        }
    }

    fn on_proof(&mut self, region: RegionId, capability: Capability, local: &Local, inbound: &mut dyn Inbound) {
        let scope = (self.endpoint.nic.verbs(), self.endpoint.domain());
        let proven = inbound.prove(self.id, region, capability).and_then(|_| inbound.lend(self.id, region));
        let lent = match proven {
            Ok(lent) => lent,
            Err(refusal) => return self.control.say(Message::Refused { region, code: refusal.code() }),
        };
        match self.lending.keys(scope, region, &lent, local) {
            Err(refusal) => self.control.say(Message::Refused { region, code: refusal.code() }),
            Ok(keys) => {
                let total = u32::try_from(keys.len()).expect("at most KEYS_PER_GRANT_MAX");
                let whole = if keys.is_empty() { vec![keys] } else { keys.chunks(KEYS_MAX).collect() };
                for (part, index) in whole.into_iter().zip(0u32..) {
                    let first = index * u32::try_from(KEYS_MAX).expect("few");
                    let keys = part.to_vec();
                    self.control.say(Message::Keys { region, rights: lent.rights, total, first, keys });
                }
            }
        }
    }

    fn on_keys(&mut self, region: RegionId, (rights, total, first): (Rights, u32, u32), keys: Vec<Key>) {
        let violation = LinkDownReason::Violation("keys that fit no region");
        let Some(attached) = self.attached.get_mut(&region) else { return };
        let Known::Nothing(known) = &mut attached.known else { return };
        let (known_len, total) = (known.len(), total as usize);
        let mut end = known.last().map_or(0, |key| key.offset + key.len);
        let is_sorted = keys.iter().all(|key| {
            let fits = key.len > 0 && key.offset >= end;
            end = key.offset.saturating_add(key.len);
            fits && end < u64::MAX && key.address.checked_add(key.len).is_some()
        });
        let is_part = first as usize == known_len && known_len + keys.len() <= total && total <= KEYS_PER_GRANT_MAX;
        if !is_sorted || !is_part || (keys.is_empty() && total > 0) {
            return self.end(violation);
        }
        known.extend(keys);
        if known.len() == total {
            attached.asked = attached.asked.saturating_sub(1);
            attached.known = Known::Keys(rights, core::mem::take(known));
        }
    }

    fn on_refused(&mut self, region: RegionId, code: u16) {
        let Some(attached) = self.attached.get_mut(&region) else { return };
        attached.asked = attached.asked.saturating_sub(1);
        // Another proof may still be on its way, and what was accepted before stays accepted.
        if attached.asked == 0 && matches!(attached.known, Known::Nothing(_)) {
            attached.known = Known::Refused(Refusal::from_code(code).unwrap_or(Refusal::Failed));
        }
    }

    fn on_counted(&mut self, index: u16, slot: u16, generation: u16, code: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return self.end(LinkDownReason::Violation("an answer for a queue that is none"));
        };
        if queue.generation != generation {
            return;
        }
        let Some(ticket) = queue.counted(slot) else {
            return self.end(LinkDownReason::Violation("an answer to no arrival"));
        };
        if let Some(job) = self.jobs.get_mut(&ticket) {
            let refusal = || Refusal::from_code(code).unwrap_or(Refusal::Failed);
            job.last = Last::Counted(if code == 0 { Ok(()) } else { Err(refusal()) });
            if job.is_over() {
                self.over.push(ticket);
            }
        }
    }

    fn on_remake(&mut self, remade: &Remade) {
        let known = self.back_generations.get_mut(usize::from(remade.index));
        let Some(known) = known.filter(|known| known.wrapping_add(1) == remade.generation) else {
            return self.end(LinkDownReason::Violation("a queue that is none, or out of turn"));
        };
        *known = remade.generation;
        match self.endpoint.remake_back(&self.peer, remade) {
            Ok(own) => self.control.say(Message::Remade(own)),
            Err(error) => self.end_by(error),
        }
    }

    fn on_remade(&mut self, remade: &Remade) {
        let queue = self.queues.get_mut(usize::from(remade.index));
        let Some(queue) = queue.filter(|queue| !queue.is_ready && queue.generation == remade.generation) else {
            return self.end(LinkDownReason::Violation("a queue that nobody asked for"));
        };
        queue.is_ready = true;
        if let Err(error) = self.endpoint.connect_out(&self.peer, remade) {
            self.end_by(error);
        }
    }

    /// Ends everything: destroys the data queues, which makes memory quiet on both ends, finishes the batches, tells.
    pub(super) fn bury(mut self, now: Instant, reason: LinkDownReason, inbound: &mut dyn Inbound) -> Parting {
        self.drain(inbound);
        let verbs = self.endpoint.nic.clone();
        self.endpoint.destroy_data_queues();
        self.lending.clear(verbs.verbs());
        self.finish_over(inbound);
        for (_, job) in self.jobs.drain() {
            job.bury(reason, inbound);
        }
        inbound.event(Event::LinkDown { link: self.id, reason });
        let said = !matches!(reason, LinkDownReason::PeerGone | LinkDownReason::PeerClosed);
        let until = if said { now + PART_MAX } else { now };
        Parting { endpoint: self.endpoint, until, goodbye: self.control.last_sent(), completions: Vec::new() }
    }

    /// Takes the link apart without telling anybody: its device is dropped.
    pub(super) fn discard(mut self) {
        self.endpoint.destroy_data_queues();
        self.lending.clear(self.endpoint.nic.verbs());
    }

    /// What completed before the end is told as it was.
    fn drain(&mut self, inbound: &mut dyn Inbound) {
        for _ in 0..ROUNDS_MAX {
            if !self.look() {
                break;
            }
            for completion in core::mem::take(&mut self.completions) {
                let id = Id::from_bits(completion.id);
                if id.kind == Kind::Out {
                    self.on_request_end(id, completion.status, inbound);
                }
            }
        }
    }
}

impl Parting {
    /// Whether it is over: the goodbye was delivered, or takes too long.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        if now >= self.until {
            return true;
        }
        self.completions.clear();
        let verbs = self.endpoint.nic.verbs();
        let polled = verbs.poll(self.endpoint.completions, &mut self.completions);
        let goodbye = self.goodbye;
        let is_told = |completion: &Completion| {
            let id = Id::from_bits(completion.id);
            id.kind == Kind::ControlSend && (id.number == goodbye || completion.status != Status::Done)
        };
        polled.is_err() || self.completions.iter().any(is_told)
    }

    pub(super) fn until(&self) -> Instant {
        self.until
    }
}

fn hello(lane: &Lane) -> Message {
    Message::Hello { generation: lane.generation, incarnation: lane.incarnation }
}

/// Regions of the peer that a batch names; neighbours that are the same count once.
fn regions(post: &Post) -> impl Iterator<Item = RegionId> + '_ {
    let mut last = None;
    let moves = post.moves.iter().map(|posted| posted.remote.region);
    moves.chain(post.arrival.map(|arrival| arrival.region)).filter(move |region| last.replace(*region) != Some(*region))
}
