//! Two fabrics joined by shared memory, in one process.

use std::os::fd::OwnedFd;
use std::time::Instant as WallInstant;

use millpond_core::batch::Extent;
use millpond_core::time::{Duration, Instant};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{ShmDevice, ShmOptions};
use crate::contract::{Connection, End, FarEnd, Lane, LaneSide, LinkDownReason, LinkId, Refusal};
use crate::fabric::{
    AllocateOptions, Batch, Completion, DeviceId, Fabric, FabricEvent, FabricOptions, Grant, LinkOptions, PostOptions,
    ReadGrant, Request, Ticket,
};
use crate::region::{RegionBuf, RegionBytes};

struct End1 {
    fabric: Fabric,
    device: DeviceId,
    link: LinkId,
    start: WallInstant,
}

impl End1 {
    fn now(&self) -> Instant {
        Instant::ZERO + Duration::from(self.start.elapsed())
    }

    fn poll(&mut self) {
        self.fabric.poll(self.now());
    }

    fn post(&mut self, batch: Batch) -> Ticket {
        self.fabric.post(self.now(), self.link, batch, PostOptions::default()).unwrap()
    }

    fn filled(&mut self, len: usize, seed: u8) -> RegionBytes {
        let mut buf = self.empty(len);
        buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 % 251) as u8 ^ seed);
        buf.freeze()
    }

    fn empty(&mut self, len: usize) -> RegionBuf {
        let region = self.fabric.allocate(len as u64, AllocateOptions::default()).unwrap();
        region.carve(0, len as u64).unwrap()
    }

    fn granted(&mut self, len: usize) -> Grant {
        let target = self.empty(len);
        self.fabric.grant_write(vec![target]).unwrap()
    }
}

fn lane(side: LaneSide) -> Lane {
    Lane { side, generation: 5, incarnation: 1, peer_incarnation: 2 }
}

fn sockets() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
        .unwrap()
}

fn end(fd: OwnedFd, side: LaneSide, secret: u8) -> End1 {
    let mut fabric = Fabric::new(FabricOptions::new([secret; 32])).unwrap();
    let options = ShmOptions { progress_deadline: Duration::from_millis(300) };
    let device = fabric.add_device(Box::new(ShmDevice::new(options).unwrap())).unwrap();
    let connection = Connection::Stream { fd, read_ahead: Vec::new(), lane: lane(side) };
    let link = fabric.open(Instant::ZERO, device, connection, LinkOptions::default()).unwrap();
    End1 { fabric, device, link, start: WallInstant::now() }
}

fn pair() -> (End1, End1) {
    let (one, two) = sockets();
    (end(one, LaneSide::Dialed, 1), end(two, LaneSide::Accepted, 2))
}

fn finish(a: &mut End1, b: &mut End1, mut ticket: Ticket) -> Completion {
    for _ in 0..1_000_000 {
        a.poll();
        b.poll();
        match a.fabric.take(ticket) {
            Ok(completion) => return completion,
            Err(again) => ticket = again,
        }
    }
    panic!("the batch never ended");
}

fn write_into(a: &mut End1, grant: &Grant, source: RegionBytes) -> Batch {
    let token = grant.token();
    let remote = a.fabric.attach(token).unwrap();
    let mut batch = Batch::new();
    let len = source.len() as u64;
    batch.write(source, Extent::new(remote, token.offset, len));
    batch
}

#[test]
fn a_write_of_many_turns_arrives_whole_and_is_counted() {
    let (mut a, mut b) = pair();
    let len = (5 << 20) + 77;
    let grant = b.granted(len);
    let source = a.filled(len, 3);
    let expected = source.to_vec();
    let mut batch = write_into(&mut a, &grant, source);
    let remote = batch.requests()[0].remote().region;
    batch.arrival(remote, 9, 4);
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
    assert_eq!(b.fabric.arrived(grant.id(), 9), 4);
    assert_eq!(&b.fabric.close(grant)[0][..], &expected[..]);
}

#[test]
fn a_read_copies_what_was_granted_and_a_revoked_grant_is_stale() {
    let (mut a, mut b) = pair();
    let source = b.filled(600_000, 9);
    let grant = b.fabric.grant_read(vec![source.clone()]).unwrap();
    let token = grant.token();
    let remote = a.fabric.attach(token).unwrap();
    for round in 0..2 {
        let target = a.empty(600_000);
        let mut batch = Batch::new();
        batch.read(Extent::new(remote, token.offset, 600_000), target);
        let ticket = a.post(batch);
        let completion = finish(&mut a, &mut b, ticket);
        assert!(completion.is_done(), "round {round}: {:?}", completion.outcome(0));
    }
    b.fabric.revoke(grant);
    let target = a.empty(100);
    let mut batch = Batch::new();
    batch.read(Extent::new(remote, token.offset, 100), target);
    let ticket = a.post(batch);
    let completion = finish(&mut a, &mut b, ticket);
    assert_eq!(
        (completion.outcome(0).end, completion.outcome(0).far_end),
        (End::Refused(Refusal::Stale), FarEnd::Untouched)
    );
}

fn read_of(a: &mut End1, grant: &ReadGrant, at: u64, len: u64) -> Batch {
    let token = grant.token();
    let remote = a.fabric.attach(token).unwrap();
    let mut batch = Batch::new();
    batch.read(Extent::new(remote, token.offset + at, len), a.empty(len as usize));
    batch
}

/// Turns of `a` alone.
fn finish_alone(a: &mut End1, mut ticket: Ticket) -> Result<Completion, Ticket> {
    for _ in 0..1000 {
        a.poll();
        match a.fabric.take(ticket) {
            Ok(completion) => return Ok(completion),
            Err(again) => ticket = again,
        }
    }
    Err(ticket)
}

#[test]
fn what_was_read_from_before_is_read_without_its_owner_and_never_once_it_was_revoked() {
    let (mut a, mut b) = pair();
    let source = b.filled(3 << 20, 9);
    let grant = b.fabric.grant_read(vec![source.clone()]).unwrap();
    let batch = read_of(&mut a, &grant, 0, 64);
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
    // From here on the owner stands still.
    let whole = read_of(&mut a, &grant, 0, 3 << 20);
    let ticket = a.post(whole);
    let completion = finish_alone(&mut a, ticket).expect("the owner is not asked");
    assert!(completion.is_done());
    let Some(Request::Read { target, .. }) = completion.into_batch().drain().next() else { panic!("it was a read") };
    assert!(target[..] == source[..]);
    let late = read_of(&mut a, &grant, 5, 100);
    b.fabric.revoke(grant);
    let ticket = a.post(late);
    let completion = finish_alone(&mut a, ticket).expect("the owner is not asked");
    assert_eq!(completion.outcome(0).end, End::Refused(Refusal::Stale));
}

#[test]
fn what_lies_between_the_ranges_of_a_grant_is_asked_for_and_refused() {
    let (mut a, mut b) = pair();
    let region = b.fabric.allocate(3 * 4096, AllocateOptions::default()).unwrap();
    let piece = |at: u64| region.carve(at * 4096, 4096).unwrap().freeze();
    let grant = b.fabric.grant_read(vec![piece(0), piece(2)]).unwrap();
    let batch = read_of(&mut a, &grant, 0, 4096);
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
    let between = read_of(&mut a, &grant, 4000, 200);
    let ticket = a.post(between);
    let ticket = finish_alone(&mut a, ticket).expect_err("only the owner knows the ranges");
    assert_eq!(finish(&mut a, &mut b, ticket).outcome(0).end, End::Refused(Refusal::OutOfBounds));
}

#[test]
fn an_owner_that_died_is_noticed_by_whoever_reads_on() {
    let (mut a, mut b) = pair();
    let source = b.filled(4096, 9);
    let grant = b.fabric.grant_read(vec![source]).unwrap();
    let batch = read_of(&mut a, &grant, 0, 64);
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
    let token = grant.token();
    drop((grant, b));
    let remote = a.fabric.attach(token).unwrap();
    let started = WallInstant::now();
    while std::iter::from_fn(|| a.fabric.next_event()).all(|event| !matches!(event, FabricEvent::LinkDown { .. })) {
        assert!(started.elapsed().as_secs() < 10, "never noticed");
        let mut batch = Batch::new();
        batch.read(Extent::new(remote, token.offset, 64), a.empty(64));
        let now = a.now();
        let posted = a.fabric.post(now, a.link, batch, PostOptions::default());
        a.poll();
        drop(posted);
    }
}

#[test]
fn nothing_lands_in_memory_whose_grant_was_closed() {
    let (mut a, mut b) = pair();
    let grant = b.granted(4 << 20);
    let source = a.filled(4 << 20, 1);
    let batch = write_into(&mut a, &grant, source);
    let ticket = a.post(batch);
    // One turn of the owner: part of the bytes are there.
    a.poll();
    b.poll();
    let mut back = b.fabric.close(grant);
    back[0].fill(0);
    let completion = finish(&mut a, &mut b, ticket);
    assert_eq!(completion.outcome(0).end, End::Refused(Refusal::Stale));
    assert!(back[0].iter().all(|&byte| byte == 0), "a closed grant was written to");
}

#[test]
fn more_moves_than_the_ring_holds_go_through_in_order() {
    let (mut a, mut b) = pair();
    let count = 5000;
    let grant = b.granted(count * 64);
    let source = a.filled(count * 64, 8);
    let token = grant.token();
    let remote = a.fabric.attach(token).unwrap();
    let mut batch = Batch::new();
    for at in 0..count {
        batch.write(source.slice(at * 64..(at + 1) * 64), Extent::new(remote, token.offset + at as u64 * 64, 64));
    }
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
    assert_eq!(&b.fabric.close(grant)[0][..], &source[..]);
}

#[test]
fn a_cut_batch_tells_what_was_done() {
    let (mut a, mut b) = pair();
    let grant = b.granted(8 << 20);
    let source = a.filled(8 << 20, 2);
    let token = grant.token();
    let remote = a.fabric.attach(token).unwrap();
    let mut batch = Batch::new();
    for at in 0..8usize {
        batch.write(
            source.slice(at << 20..(at + 1) << 20),
            Extent::new(remote, token.offset + ((at as u64) << 20), 1 << 20),
        );
    }
    let ticket = a.post(batch);
    for _ in 0..4 {
        a.poll();
        b.poll();
    }
    let now = a.now();
    a.fabric.cancel(now, &ticket);
    let completion = finish(&mut a, &mut b, ticket);
    let done = (0..8).filter(|&at| completion.outcome(at).is_done()).count();
    assert!(done < 8, "the cancel came before the end");
    let back = b.fabric.close(grant);
    assert_eq!(back[0][..done << 20], source[..done << 20]);
    assert_eq!(completion.outcome(7).far_end, FarEnd::Untouched);
}

#[test]
fn a_peer_that_stands_still_is_given_up_at_the_progress_deadline() {
    let (mut a, mut b) = pair();
    let grant = b.granted(100);
    for _ in 0..10 {
        a.poll();
        b.poll();
    }
    let source = a.filled(100, 2);
    let batch = write_into(&mut a, &grant, source);
    let mut ticket = a.post(batch);
    let started = WallInstant::now();
    let completion = loop {
        a.poll();
        match a.fabric.take(ticket) {
            Ok(completion) => break completion,
            Err(again) => ticket = again,
        }
        assert!(started.elapsed().as_secs() < 10, "never given up");
    };
    assert_eq!(completion.outcome(0).end, End::LinkDown(LinkDownReason::Stalled));
    assert_eq!(completion.outcome(0).far_end, FarEnd::Unknown);
    // The stopped peer wakes up: it must not count what it copies from memory that may be somebody else's now.
    for _ in 0..100 {
        b.poll();
    }
    assert_eq!(b.fabric.arrived(grant.id(), 0), 0);
    let down = std::iter::from_fn(|| b.fabric.next_event()).any(|event| matches!(event, FabricEvent::LinkDown { .. }));
    assert!(down, "the peer learns that the link is over");
}

#[test]
fn a_peer_that_died_ends_the_link_at_once() {
    let (mut a, mut b) = pair();
    for _ in 0..10 {
        a.poll();
        b.poll();
    }
    let grant = b.granted(100);
    let source = a.filled(100, 2);
    let batch = write_into(&mut a, &grant, source);
    drop((grant, b));
    let ticket = a.post(batch);
    let (_, mut idle) = pair();
    let completion = finish(&mut a, &mut idle, ticket);
    assert!(matches!(completion.outcome(0).end, End::LinkDown(LinkDownReason::PeerGone | LinkDownReason::PeerClosed)));
}

#[test]
fn random_bytes_on_the_socket_end_this_link_only() {
    let (mut a, mut b) = pair();
    let (mine, theirs) = sockets();
    let connection = Connection::Stream { fd: theirs, read_ahead: Vec::new(), lane: lane(LaneSide::Accepted) };
    let (now, device) = (b.now(), b.device);
    let broken = b.fabric.open(now, device, connection, LinkOptions::default()).unwrap();
    rustix::io::write(&mine, &[0xA5; 640]).unwrap();
    for _ in 0..100 {
        b.poll();
    }
    let events: Vec<FabricEvent> = std::iter::from_fn(|| b.fabric.next_event()).collect();
    assert!(
        matches!(events[..], [FabricEvent::LinkDown { link, reason: LinkDownReason::Violation(_) }] if link == broken),
        "{events:?}"
    );
    let grant = b.granted(10);
    let source = a.filled(10, 1);
    let batch = write_into(&mut a, &grant, source);
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
}

/// Where none are reserved the same holds for ordinary pages, which is said.
#[test]
fn regions_of_huge_pages_on_a_node_are_moved_like_others() {
    use crate::mapping::{Backing, memory_nodes};
    let (mut a, mut b) = pair();
    let len = (2u64 << 20) + 77;
    let options = AllocateOptions::default().with_backing(Backing::PreferHugePages2MiB).on_node(memory_nodes()[0]);
    let (region, region_there) = (a.fabric.allocate(len, options).unwrap(), b.fabric.allocate(len, options).unwrap());
    if let Some(why) = region.downgrade().or(region_there.downgrade()) {
        eprintln!("SKIPPED: ordinary pages are moved instead of huge ones: {why}");
    }
    assert_eq!(region.node(), Some(memory_nodes()[0]));
    let mut source = region.carve(0, len).unwrap();
    source.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 % 251) as u8);
    let source = source.freeze();
    let grant = b.fabric.grant_write(vec![region_there.carve(0, len).unwrap()]).unwrap();
    let batch = write_into(&mut a, &grant, source.clone());
    let ticket = a.post(batch);
    assert!(finish(&mut a, &mut b, ticket).is_done());
    assert!(b.fabric.close(grant)[0][..] == source[..]);
}
