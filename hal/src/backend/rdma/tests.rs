//! The backend over a NIC that counts: conformance, and what Soft-RoCE hides.

use millpond_core::batch::{Extent, MemoryKind, RegionId, Rights};
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};

use super::fake::{Counts, FakeNic, Wire, gid};
use super::verbs::{NicEvent, Status};
use super::*;
use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, run};
use crate::contract::{End, FarEnd, Lane, LaneSide, LinkDownReason, Outcome, Refusal};
use crate::fabric::{
    AllocateOptions, Batch, Completion, DeviceId, Fabric, FabricEvent, FabricOptions, LinkError, LinkOptions,
    PostOptions, Ticket,
};
use crate::region::Region;

/// Two fabrics, each with a NIC on one wire, and a link between them.
struct Ends {
    here: Fabric,
    there: Fabric,
    nic: FakeNic,
    nic_there: FakeNic,
    opened: [Nic; 2],
    devices: [DeviceId; 2],
    link: LinkId,
    link_there: LinkId,
    now: Instant,
}

fn fabric(own: u8, nic: &Nic) -> (Fabric, DeviceId) {
    let mut fabric = Fabric::new(FabricOptions::new([own; 32])).unwrap();
    let device = fabric.add_device(Box::new(RdmaDevice::new(nic.clone()))).unwrap();
    (fabric, device)
}

fn lane(side: LaneSide) -> Lane {
    let (own, peer) = if side == LaneSide::Dialed { (1, 2) } else { (2, 1) };
    Lane { side, generation: 3, incarnation: own, peer_incarnation: peer }
}

/// Connects two NICs the way two nodes do: a record there, a record back.
fn connect(one: &Nic, two: &Nic) -> (Connection, Connection) {
    let (dialing, accepting) = (one.endpoint().unwrap(), two.endpoint().unwrap());
    let (record, record_back) = (dialing.record(), accepting.record());
    let accepted = accepting.connect(&record, lane(LaneSide::Accepted)).unwrap();
    (dialing.connect(&record_back, lane(LaneSide::Dialed)).unwrap(), accepted)
}

impl Ends {
    fn new(options: RdmaOptions, tweak: fn(&FakeNic)) -> Self {
        let wire = Wire::default();
        let (nic, nic_there) = (FakeNic::new(&wire), FakeNic::new(&wire));
        tweak(&nic);
        tweak(&nic_there);
        let opened = [&nic, &nic_there].map(|nic| Nic::new(Box::new(nic.clone()), options).unwrap());
        let ((here, device), (there, device_there)) = (fabric(1, &opened[0]), fabric(2, &opened[1]));
        let nobody = LinkId::new(Handle { slot: 0, epoch: 0 });
        let (devices, now) = ([device, device_there], Instant::ZERO);
        let mut ends = Self { here, there, nic, nic_there, opened, devices, link: nobody, link_there: nobody, now };
        (ends.link, ends.link_there) = ends.open().unwrap();
        ends
    }

    fn open(&mut self) -> Result<(LinkId, LinkId), LinkError> {
        let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
        let (connection, connection_there) = connect(&self.opened[0], &self.opened[1]);
        let link = self.here.open(self.now, self.devices[0], connection, options)?;
        Ok((link, self.there.open(self.now, self.devices[1], connection_there, options)?))
    }

    fn into_pair(self) -> Pair {
        Pair::new(self.here, self.link, self.there, self.link_there, Clock::Virtual(self.now))
    }

    fn step(&mut self) {
        let turns = [self.here.poll(self.now), self.there.poll(self.now)];
        if turns == [crate::contract::Turn::Idle; 2] {
            self.now = self.now + Duration::from_millis(1);
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..200_000 {
            if done(self) {
                return;
            }
            self.step();
        }
        panic!("gave up waiting for {what}");
    }

    fn settle(&mut self) {
        (0..50).for_each(|_| self.step());
    }

    /// A grant for writing of a whole region of `len` bytes at the other end, attached here.
    fn target(&mut self, len: u64) -> (Region, crate::fabric::Grant, RegionId) {
        let region = self.there.allocate(len, AllocateOptions::default()).unwrap();
        let grant = self.there.grant_write(vec![region.carve(0, len).unwrap()]).unwrap();
        let there = self.here.attach(grant.token()).unwrap();
        (region, grant, there)
    }

    fn source(&mut self, len: u64) -> Region {
        self.here.allocate(len, AllocateOptions::default()).unwrap()
    }

    fn post(&mut self, batch: Batch) -> Ticket {
        self.here.post(self.now, self.link, batch, PostOptions::default()).unwrap()
    }

    fn end(&mut self, ticket: Ticket) -> Completion {
        self.until("a ticket", |ends| ends.here.is_finished(&ticket));
        assert_eq!((self.here.stats().events_unknown, self.there.stats().events_unknown), (0, 0));
        self.here.take(ticket).unwrap()
    }

    fn run(&mut self, batch: Batch) -> Completion {
        let ticket = self.post(batch);
        self.end(ticket)
    }

    /// What the NIC here was asked for since `before`.
    fn asked_since(&self, before: Counts) -> Counts {
        let now = self.nic.counts();
        Counts {
            doorbells: now.doorbells - before.doorbells,
            requests: now.requests - before.requests,
            signalled: now.signalled - before.signalled,
            inline: now.inline - before.inline,
            writes: now.writes - before.writes,
            immediates: now.immediates - before.immediates,
            reads: now.reads - before.reads,
            messages: now.messages - before.messages,
            registrations: now.registrations - before.registrations,
            ..now
        }
    }
}

fn ends() -> Ends {
    Ends::new(RdmaOptions::default(), |_| {})
}

fn writes(source: &Region, there: RegionId, count: u64, len: u64) -> Batch {
    let mut batch = Batch::new();
    for at in 0..count {
        let mut bytes = source.carve(at * len, len).unwrap();
        bytes.fill(u8::try_from(at % 251).unwrap() + 1);
        batch.write(bytes.freeze(), Extent::new(there, at * len, len));
    }
    batch
}

fn check(target: &[u8], count: u64, len: usize) {
    for (piece, at) in target.chunks(len).zip(0..count) {
        assert!(piece.iter().all(|byte| u64::from(*byte) == at % 251 + 1), "piece {at}");
    }
}

#[test]
fn the_rdma_backend_conforms() {
    run(&mut || ends().into_pair());
}

#[test]
fn it_conforms_with_one_queue_short_pieces_and_a_device_that_registers_little() {
    let options = RdmaOptions { queues: 1, piece_len_max: 64 << 10, ..RdmaOptions::default() };
    run(&mut || Ends::new(options, |nic| nic.knobs().limits.registration_len_max = 256 << 10).into_pair());
}

#[test]
fn it_conforms_with_many_queues_and_a_nic_that_carries_nothing_inline() {
    let options = RdmaOptions { queues: 5, ..RdmaOptions::default() };
    run(&mut || Ends::new(options, |nic| nic.knobs().inline_len_max = 0).into_pair());
}

#[test]
fn a_batch_is_one_doorbell_and_one_signal() {
    let mut ends = ends();
    let (_region, grant, there) = ends.target(1 << 20);
    let source = ends.source(1 << 20);
    let batch = writes(&source, there, 1, 8);
    assert!(ends.run(batch).is_done());
    ends.settle();
    let before = ends.nic.counts();
    let mut batch = writes(&source, there, 20, 4096);
    assert!(ends.run(batch).is_done());
    let asked = ends.asked_since(before);
    // Twenty writes and the read that confirms them.
    assert_eq!((asked.doorbells, asked.requests, asked.signalled), (1, 21, 1));
    assert_eq!((asked.writes, asked.reads, asked.immediates, asked.inline), (20, 1, 0, 0));
    let before = ends.nic.counts();
    batch = writes(&source, there, 20, 4096);
    batch.arrival(there, 0, 1);
    assert!(ends.run(batch).is_done());
    let asked = ends.asked_since(before);
    // The arrival confirms: no read. It is short, so it goes inline.
    assert_eq!((asked.doorbells, asked.requests, asked.signalled), (1, 21, 1));
    assert_eq!((asked.writes, asked.reads, asked.immediates, asked.inline), (20, 0, 1, 1));
    check(&ends.there.close(grant)[0], 20, 4096);
}

#[test]
fn reads_tell_by_themselves() {
    let mut ends = ends();
    let region = ends.there.allocate(1 << 20, AllocateOptions::default()).unwrap();
    let bytes = region.carve(0, 1 << 20).unwrap().freeze();
    let grant = ends.there.grant_read(vec![bytes]).unwrap();
    let there = ends.here.attach(grant.token()).unwrap();
    let target = ends.source(1 << 20);
    let read = |count: u64| {
        let mut batch = Batch::new();
        for at in 0..count {
            batch.read(Extent::new(there, at * 100, 100), target.carve(at * 100, 100).unwrap());
        }
        batch
    };
    assert!(ends.run(read(1)).is_done());
    ends.settle();
    let before = ends.nic.counts();
    assert!(ends.run(read(10)).is_done());
    let asked = ends.asked_since(before);
    assert_eq!((asked.doorbells, asked.requests, asked.signalled, asked.reads), (1, 10, 1, 10));
    drop(grant);
}

#[test]
fn a_long_batch_is_signalled_every_so_often_and_never_overruns_the_queue() {
    let mut ends = ends();
    let (_region, grant, there) = ends.target(1 << 20);
    let source = ends.source(1 << 20);
    let batch = writes(&source, there, 5000, 200);
    assert!(ends.run(batch).is_done());
    let counts = ends.nic.counts();
    let share = u64::from(endpoint::OUT_DEPTH) / 4;
    assert!(counts.signalled >= 5000 / share && counts.signalled <= 5000 / share + 60, "{counts:?}");
    assert!(counts.longest_chain <= endpoint::OUT_DEPTH as usize && counts.doorbells < 5000 / 8, "{counts:?}");
    check(&ends.there.close(grant)[0], 5000, 200);
}

#[test]
fn small_writes_go_inline_up_to_what_the_nic_carries_and_not_beyond() {
    for (carries, longest) in [(220, 128), (64, 64), (0, 0)] {
        let mut ends = ends();
        ends.nic.knobs().inline_len_max = carries;
        (ends.link, ends.link_there) = ends.open().unwrap();
        let (_region, grant, there) = ends.target(1 << 20);
        let source = ends.source(1 << 20);
        let warm = writes(&source, there, 1, 8);
        assert!(ends.run(warm).is_done());
        ends.settle();
        for len in [0, 1, 63, 64, 65, 127, 128, 129, 220, 221, 4096] {
            let mut batch = Batch::new();
            let mut bytes = source.carve(0, len).unwrap();
            bytes.fill(7);
            batch.write(bytes.freeze(), Extent::new(there, len * 5, len));
            let before = ends.nic.counts();
            assert!(ends.run(batch).is_done(), "{len} bytes");
            // Messages go inline as well, but none is sent meanwhile.
            let asked = ends.asked_since(before);
            let goes = u64::from(len > 0 && len <= longest);
            assert_eq!((asked.messages, asked.inline), (0, goes), "{len} bytes of {carries}");
        }
        let target = ends.there.close(grant).pop().unwrap();
        assert!([1u64, 63, 64, 65, 127, 128, 129, 220, 221].iter().all(|len| {
            let len = usize::try_from(*len).unwrap();
            target[len * 5..len * 6].iter().all(|byte| *byte == 7)
        }));
    }
}

#[test]
fn memory_is_registered_at_first_use_once_and_in_chunks_the_device_takes() {
    let options = RdmaOptions::default();
    let mut ends = Ends::new(options, |nic| nic.knobs().limits.registration_len_max = 1 << 20);
    let own = ends.nic.registered();
    let (_region, grant, there) = ends.target(10 << 20);
    let source = ends.source(10 << 20);
    assert_eq!(ends.nic.registered(), own, "nothing was used yet");
    // At each edge of a chunk, and across it, on both sides.
    let mib = 1u64 << 20;
    for (local, remote) in [(0, 0), (mib - 1, 0), (0, mib - 1), (mib, 9 * mib), (2 * mib - 2048, 5 * mib - 100)] {
        let mut batch = Batch::new();
        let mut bytes = source.carve(local, 4096).unwrap();
        bytes.fill(9);
        batch.write(bytes.freeze(), Extent::new(there, remote, 4096));
        assert!(ends.run(batch).is_done(), "{local} to {remote}");
    }
    // Ten keys of the grant, three chunks here; a second use registers nothing.
    assert_eq!(ends.nic.registered(), own + 10 + 3);
    let before = ends.nic.counts();
    let batch = writes(&source, there, 1, 4096);
    assert!(ends.run(batch).is_done());
    assert_eq!(ends.asked_since(before).registrations, 0);
    let target = ends.there.close(grant).pop().unwrap();
    let at = |offset: u64| &target[usize::try_from(offset).unwrap()..][..4096];
    assert!(
        [0, mib - 1, 9 * mib, 5 * mib - 100]
            .into_iter()
            .all(|offset| { offset == 0 || at(offset).iter().all(|byte| *byte == 9) })
    );
    assert_eq!(ends.nic.registered(), own + 3, "a closed grant has no keys");
    ends.here.release(source).unwrap();
    assert_eq!(ends.nic.registered(), own);
}

#[test]
fn a_revoked_key_breaks_one_queue_which_is_made_anew_and_only_its_own_move_fails() {
    let options = RdmaOptions { queues: 1, ..RdmaOptions::default() };
    let mut ends = Ends::new(options, |_| {});
    let (_gone_region, gone, stale) = ends.target(1 << 20);
    let (_region, grant, there) = ends.target(1 << 20);
    let source = ends.source(3 << 20);
    for known in [there, stale] {
        let batch = writes(&source, known, 1, 8);
        assert!(ends.run(batch).is_done());
    }
    ends.settle();
    // Requests for both are on the queue when the grant ends, and the news has not come.
    ends.nic.knobs().is_frozen = true;
    let mut batch = Batch::new();
    for at in 0..8u64 {
        let mut bytes = source.carve((1 << 20) + at * 4096, 4096).unwrap();
        bytes.fill(5);
        let to = if at == 3 { stale } else { there };
        batch.write(bytes.freeze(), Extent::new(to, at * 4096, 4096));
    }
    let mut behind = Batch::new();
    let mut bytes = source.carve(2 << 20, 4096).unwrap();
    bytes.fill(6);
    behind.write(bytes.freeze(), Extent::new(there, 8 * 4096, 4096)).arrival(there, 0, 1);
    let (ticket, ticket_behind) = (ends.post(batch), ends.post(behind));
    let before = ends.there.close(gone)[0].to_vec();
    ends.nic.knobs().is_frozen = false;
    let completion = ends.end(ticket);
    for at in 0..8 {
        let outcome = completion.outcome(at);
        if at == 3 {
            // Four packets: the NIC does not say how many were applied before the key was void.
            assert_eq!(outcome, Outcome { end: End::Refused(Refusal::Stale), far_end: FarEnd::Unknown });
        } else {
            assert_eq!(outcome, Outcome::DONE, "move {at}");
        }
    }
    assert!(ends.end(ticket_behind).is_done());
    assert!(before.iter().skip(8).all(|byte| *byte == 0));
    assert_eq!((ends.there.arrived(grant.id(), 0), ends.opened[0].counts().queues_remade), (1, 1));
    let target = ends.there.close(grant).pop().unwrap();
    assert!((0..8).filter(|at| *at != 3).all(|at| target[at * 4096..][..4096].iter().all(|byte| *byte == 5)));
    assert!(target[8 * 4096..][..4096].iter().all(|byte| *byte == 6));
    assert!(ends.here.link(ends.link).is_some(), "the link lives on");
}

#[test]
fn when_queues_break_under_load_every_ticket_ends_once() {
    for step in 0..30 {
        let mut ends = ends();
        let (_region, grant, there) = ends.target(1 << 20);
        let source = ends.source(1 << 20);
        let warm = writes(&source, there, 1, 8);
        assert!(ends.run(warm).is_done());
        let tickets: Vec<_> = (0..20)
            .map(|at| {
                let mut batch = Batch::new();
                for part in 0..10u64 {
                    let offset = (at * 10 + part) * 512;
                    let mut bytes = source.carve(offset, 512).unwrap();
                    bytes.fill(3);
                    batch.write(bytes.freeze(), Extent::new(there, offset, 512));
                }
                batch.arrival(there, 0, 1);
                ends.post(batch)
            })
            .collect();
        (0..step).for_each(|_| ends.step());
        ends.nic.break_all();
        let mut done = 0;
        for ticket in tickets {
            let completion = ends.end(ticket);
            done += u64::from(completion.is_done());
            let fits = |end| matches!(end, End::Done | End::LinkDown(_));
            assert!((0..10).all(|at| fits(completion.outcome(at).end)), "{completion:?}");
        }
        assert!(ends.there.arrived(grant.id(), 0) >= done);
        let link = ends.link;
        ends.until("the link's end", |ends| ends.here.link(link).is_none());
        let downs = core::iter::from_fn(|| ends.here.next_event())
            .filter(|event| matches!(event, FabricEvent::LinkDown { .. }))
            .count();
        assert_eq!((downs, source.lease_count()), (1, 0));
    }
}

/// Every request behind the one that failed completes as flushed, which says nothing of those before it.
#[test]
fn a_write_that_was_flushed_is_never_done() {
    let (mut early, mut late) = (0, 0);
    for step in 0..30 {
        let mut ends = ends();
        let (_region, grant, there) = ends.target(1 << 20);
        let source = ends.source(1 << 20);
        let warm = writes(&source, there, 1, 8);
        assert!(ends.run(warm).is_done());
        source.carve(0, 1 << 20).unwrap().fill(9);
        let tickets: Vec<_> = (0..20u64)
            .map(|at| {
                let mut batch = Batch::new();
                for part in (at * 10)..(at * 10 + 10) {
                    batch.write(source.carve(part * 512, 512).unwrap().freeze(), Extent::new(there, part * 512, 512));
                }
                ends.post(batch)
            })
            .collect();
        (0..step).for_each(|_| ends.step());
        ends.nic.break_all();
        let done: Vec<_> = tickets.into_iter().map(|ticket| ends.end(ticket).is_done()).collect();
        (early, late) =
            done.iter().fold((early, late), |(no, yes), done| (no + u32::from(!done), yes + u32::from(*done)));
        let target = ends.there.close(grant).pop().unwrap();
        for (at, _) in done.iter().enumerate().filter(|(_, done)| **done) {
            let there = &target[at * 5120..(at + 1) * 5120];
            assert!(there.iter().all(|byte| *byte == 9), "step {step}: batch {at} is done and not there");
        }
    }
    assert!(early > 0 && late > 0, "{early} ended early, {late} were done: the test shows nothing");
}

#[test]
fn every_way_a_request_fails_ends_the_link_and_tells_no_lies() {
    for status in [Status::NoAnswer, Status::NotReady, Status::Other(4), Status::Flushed] {
        let mut ends = ends();
        let (_region, _grant, there) = ends.target(4096);
        let source = ends.source(4096);
        let warm = writes(&source, there, 1, 8);
        assert!(ends.run(warm).is_done());
        ends.nic.knobs().fails_next = Some(status);
        let batch = writes(&source, there, 4, 8);
        let completion = ends.run(batch);
        assert!(matches!(completion.outcome(0).end, End::LinkDown(_)), "{status:?}: {completion:?}");
        assert_eq!(completion.outcome(0).far_end, FarEnd::Unknown);
    }
}

#[test]
fn an_idle_link_whose_peer_is_gone_is_found_by_its_ping() {
    let mut ends = ends();
    ends.settle();
    let (before, start) = (ends.nic_there.counts().messages, ends.now);
    ends.nic_there.knobs().fails_next = Some(Status::NoAnswer);
    let link_there = ends.link_there;
    ends.until("the link's end", |ends| ends.there.link(link_there).is_none());
    assert!(ends.now.since(start) < Duration::from_secs(11), "after {}", ends.now.since(start));
    let events: Vec<_> = core::iter::from_fn(|| ends.there.next_event()).collect();
    let gone = LinkDownReason::PeerGone;
    assert_eq!(events, [FabricEvent::LinkDown { link: link_there, reason: gone }]);
    assert_eq!(ends.nic_there.counts().messages, before + 1);
}

#[test]
fn a_port_that_goes_down_ends_its_links_at_once_and_takes_none_until_it_is_up() {
    let mut ends = ends();
    let (_region, _grant, there) = ends.target(1 << 20);
    let source = ends.source(1 << 20);
    ends.nic.knobs().is_frozen = true;
    let batch = writes(&source, there, 4, 4096);
    let ticket = ends.post(batch);
    ends.nic.knobs().events.push_back(NicEvent::PortDown);
    // A wake-up by the NIC's descriptor is followed by a look at its events.
    let _ = ends.here.arm(ends.now);
    let completion = ends.end(ticket);
    let down = LinkDownReason::System(ENETDOWN);
    assert!((0..4).all(|at| completion.outcome(at).end == End::LinkDown(down)), "{completion:?}");
    assert!(matches!(ends.open(), Err(LinkError::Device(OpenError::System { code: 100, .. }))));
    ends.nic.knobs().is_frozen = false;
    ends.nic.knobs().events.extend([NicEvent::AddressesChanged, NicEvent::PortUp, NicEvent::QueuePairFailed]);
    // The address that is best now is another one, and the next endpoint has it.
    ends.nic.knobs().gids = vec![gid(9)];
    assert_eq!(ends.opened[0].endpoint().unwrap().record()[20..24], [10, 0, 0, 9]);
    (ends.link, ends.link_there) = ends.open().unwrap();
    drop(completion);
    let batch = writes(&source, there, 4, 4096);
    assert!(ends.run(batch).is_done());
    let counts = ends.opened[0].counts();
    assert_eq!((counts.port_downs, counts.port_ups, counts.address_changes, counts.queue_failures), (1, 1, 1, 1));
}

#[test]
fn an_idle_link_makes_room_and_a_busy_one_does_not() {
    let mut ends = Ends::new(RdmaOptions { links_max: 2, ..RdmaOptions::default() }, |_| {});
    let (first, _) = (ends.link, ends.link_there);
    ends.settle();
    ends.open().unwrap();
    ends.settle();
    // The third needs the place of one that is idle.
    (ends.link, ends.link_there) = ends.open().unwrap();
    ends.settle();
    let downs: Vec<_> = core::iter::from_fn(|| ends.here.next_event()).collect();
    let is_evicted =
        |event: &FabricEvent| matches!(event, FabricEvent::LinkDown { reason: LinkDownReason::Evicted, .. });
    assert_eq!(downs.iter().filter(|event| is_evicted(event)).count(), 1, "{downs:?}");
    assert_eq!(ends.opened[0].counts().evictions, 1);
    assert!(ends.here.link(ends.link).is_some());
    // Two busy links: the next one is refused, by name of the bound.
    let (_region, _grant, there) = ends.target(1 << 20);
    let source = ends.source(1 << 20);
    ends.nic.knobs().is_frozen = true;
    let links: Vec<_> = [first, ends.link]
        .into_iter()
        .chain((0..8).map(|slot| LinkId::new(Handle { slot, epoch: 1 })))
        .filter(|link| ends.here.link(*link).is_some())
        .collect();
    let mut tickets = Vec::new();
    for (link, at) in links.iter().zip(0u64..) {
        let mut batch = Batch::new();
        let bytes = source.carve(at * 8, 8).unwrap().freeze();
        batch.write(bytes, Extent::new(there, 0, 8));
        if let Ok(ticket) = ends.here.post(ends.now, *link, batch, PostOptions::default()) {
            tickets.push(ticket);
        }
    }
    let full = ends.open().unwrap_err();
    assert_eq!(full, LinkError::Device(OpenError::Full { transport: "rdma", links_max: 2 }));
    ends.nic.knobs().is_frozen = false;
    for ticket in tickets {
        ends.end(ticket);
    }
}

#[test]
fn a_grant_that_the_nic_will_not_deregister_costs_its_link_and_nothing_is_written() {
    let mut ends = ends();
    let (_region, grant, there) = ends.target(1 << 20);
    let source = ends.source(1 << 20);
    let warm = writes(&source, there, 1, 8);
    assert!(ends.run(warm).is_done());
    ends.nic.knobs().is_frozen = true;
    let batch = writes(&source, there, 4, 4096);
    let ticket = ends.post(batch);
    ends.nic_there.knobs().refuses_deregistering = true;
    let target = ends.there.close(grant).pop().unwrap();
    let before = target.to_vec();
    ends.nic.knobs().is_frozen = false;
    let completion = ends.end(ticket);
    assert!((0..4).all(|at| matches!(completion.outcome(at).end, End::LinkDown(_))), "{completion:?}");
    ends.settle();
    assert!(before == target[..]);
}

#[test]
fn gpu_memory_without_dmabuf_is_refused_by_name_and_host_memory_is_not_affected() {
    let wire = Wire::default();
    let fake = FakeNic::new(&wire);
    let nic = Nic::new(Box::new(fake.clone()), RdmaOptions::default()).unwrap();
    let mut device = RdmaDevice::new(nic);
    let bytes = Box::leak(Box::new([0u8; 8192]));
    let shared = std::sync::Arc::new(std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
    let kind = MemoryKind::Cuda { device: 1 };
    let id = Handle { slot: 1, epoch: 1 };
    let base = core::ptr::NonNull::from(bytes).cast();
    let memory = RegionMemory { id, base, len: 8192, kind, shared: Some(shared), file: None };
    // SAFETY: the memory is leaked, so it stays.
    let mut register = |memory: &RegionMemory| unsafe { device.register(memory) };
    assert_eq!(register(&memory), Err(RegisterError::NoDmabuf(kind)));
    assert_eq!(register(&RegionMemory { shared: None, ..memory.clone() }), Err(RegisterError::NoDmabuf(kind)));
    let file = RegionMemory { kind: MemoryKind::File, ..memory.clone() };
    assert_eq!(register(&file), Err(RegisterError::Kind(MemoryKind::File)));
    assert_eq!(register(&RegionMemory { kind: MemoryKind::Host, ..memory.clone() }), Ok(()));
    fake.knobs().takes_dmabuf = true;
    let before = fake.counts().registrations;
    assert_eq!(register(&RegionMemory { id: Handle { slot: 2, epoch: 1 }, ..memory }), Ok(()));
    assert_eq!(fake.counts().registrations, before + 1, "a GPU's memory is registered at once");
}

#[test]
fn keys_of_a_grant_have_its_rights_and_ranges_only() {
    let mut ends = ends();
    let region = ends.there.allocate(1 << 20, AllocateOptions::raw(Rights::REMOTE_READ)).unwrap();
    let token = ends.there.expose(&region).unwrap();
    let mut forged = token;
    forged.rights = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
    let there = ends.here.attach(forged).unwrap();
    let source = ends.source(4096);
    let batch = writes(&source, there, 1, 8);
    assert_eq!(ends.run(batch).outcome(0), Outcome::refused(Refusal::WrongRights));
    ends.there.release(region).unwrap();
    let batch = writes(&source, there, 1, 8);
    ends.settle();
    assert_eq!(ends.run(batch).outcome(0), Outcome::refused(Refusal::Stale));
}

#[test]
fn a_nic_that_cannot_be_used_says_why() {
    let nic = |tweak: fn(&FakeNic), options| {
        let fake = FakeNic::new(&Wire::default());
        tweak(&fake);
        Nic::new(Box::new(fake), options).err()
    };
    let options = RdmaOptions::default();
    assert_eq!(nic(|_| {}, options), None);
    let down = nic(|nic| nic.knobs().port.is_active = false, options);
    assert_eq!(down, Some(NicError::PortDown { nic: "fake0".into() }));
    assert!(matches!(nic(|nic| nic.knobs().gids.clear(), options), Some(NicError::NoGid { .. })));
    let wish = RdmaOptions { gid_index: Some(7), ..options };
    assert!(matches!(nic(|_| {}, wish), Some(NicError::NoGid { reason: gid::NoGid::Unknown { index: 7 }, .. })));
    assert_eq!(nic(|_| {}, RdmaOptions { queues: 0, ..options }), Some(NicError::Queues { queues: 0 }));
}

#[test]
fn ends_that_do_not_fit_are_told_before_anything_is_connected() {
    let wire = Wire::default();
    let nic =
        |queues| Nic::new(Box::new(FakeNic::new(&wire)), RdmaOptions { queues, ..RdmaOptions::default() }).unwrap();
    let (one, two) = (nic(2).endpoint().unwrap(), nic(3).endpoint().unwrap());
    let refused = one.connect(&two.record(), lane(LaneSide::Dialed)).unwrap_err();
    assert_eq!(refused, EndpointError::Record(RecordError::Queues { own: 2, peer: 3 }));
    let refused = two.connect(b"nonsense", lane(LaneSide::Accepted)).unwrap_err();
    assert_eq!(refused, EndpointError::Record(RecordError::Unreadable));
}

#[test]
fn nothing_is_left_on_the_nic_when_fabrics_are_gone() {
    let mut ends = ends();
    let (_region, _grant, there) = ends.target(1 << 20);
    let source = ends.source(1 << 20);
    let batch = writes(&source, there, 20, 4096);
    let _ticket = ends.post(batch);
    ends.step();
    let Ends { here, there, nic, opened, .. } = ends;
    drop((here, there, opened));
    assert_eq!((nic.queue_pairs(), nic.registered()), (0, 0));
    let counts = nic.counts();
    assert_eq!(counts.queue_pairs_made, counts.queue_pairs_destroyed);
}
