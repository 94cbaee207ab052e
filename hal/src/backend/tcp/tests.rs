//! The device against a small fabric of its own, with time as an argument: what the conformance suite cannot see.
#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation, reason = "offsets in small test memories")]

use core::ptr::NonNull;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use millpond_core::batch::{Capability, RegionId, Rights};
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};

use super::*;
use crate::contract::{
    Access, FarEnd, Lane as LaneFacts, LaneSide, Outcome, PostedArrival, PostedMove, Proven, Refusal, RemoteRange,
};

pub(super) const LINK: LinkId = LinkId::new(Handle { slot: 0, epoch: 1 });
pub(super) const REGION: RegionId = RegionId { slot: 5, epoch: 3 };
const CAPABILITY: Capability = Capability::new([9; 16]);

/// One region, and everything that the device said.
pub(super) struct Owner {
    pub(super) base: NonNull<u8>,
    pub(super) len: u64,
    pub(super) rights: Rights,
    /// Ranges from here on are refused: stands for a grant that is closed.
    pub(super) admitted: u64,
    pub(super) proven: bool,
    pub(super) arrivals: HashMap<u64, u64>,
    pub(super) ended: HashMap<TicketId, Vec<(u32, u32, Outcome)>>,
    pub(super) finished: HashMap<TicketId, Outcome>,
    pub(super) down: Vec<(LinkId, LinkDownReason)>,
}

// SAFETY: pointers resolved lie in `base .. base + len`, which lives as long as the `Node` that owns both.
unsafe impl Inbound for Owner {
    fn prove(&mut self, _: LinkId, region: RegionId, capability: Capability) -> Result<Proven, Refusal> {
        if region != REGION {
            return Err(Refusal::Stale);
        }
        self.proven = capability.matches(&CAPABILITY);
        if self.proven {
            Ok(Proven { memory: REGION, rights: self.rights, range: None })
        } else {
            Err(Refusal::WrongCapability)
        }
    }

    fn resolve(&mut self, _: LinkId, range: RemoteRange, access: Access) -> Result<NonNull<u8>, Refusal> {
        match range.offset.checked_add(range.len) {
            _ if range.region != REGION => Err(Refusal::Stale),
            _ if !self.proven => Err(Refusal::NotProven),
            _ if !self.rights.allows(access.right()) => Err(Refusal::WrongRights),
            Some(end) if end <= self.len && end <= self.admitted => {
                // SAFETY: checked in the line above.
                Ok(unsafe { self.base.add(usize::try_from(range.offset).unwrap()) })
            }
            _ => Err(Refusal::OutOfBounds),
        }
    }

    fn admit(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<RegionId, Refusal> {
        self.resolve(link, range, access).map(|_| REGION)
    }

    fn arrive(&mut self, _: LinkId, arrival: PostedArrival) -> Result<(), Refusal> {
        *self.arrivals.entry(arrival.counter).or_default() += arrival.amount;
        Ok(())
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Progress { .. } => {}
            Event::Ended { ticket, first, count, outcome } => {
                self.ended.entry(ticket).or_default().push((first, count, outcome));
            }
            Event::Finished { ticket, outcome, .. } => {
                assert!(self.finished.insert(ticket, outcome).is_none(), "a ticket finished twice");
            }
            Event::LinkDown { link, reason } => self.down.push((link, reason)),
        }
    }
}

pub(super) struct Node {
    pub(super) device: TcpDevice,
    pub(super) owner: Owner,
    pub(super) memory: NonNull<[u8]>,
    pub(super) now: Instant,
    next_ticket: u32,
}

// SAFETY: the memory belongs to this node alone. Tests move a node to a thread and back.
unsafe impl Send for Node {}

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: leaked in `new`, freed once.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}

impl Node {
    pub(super) fn new(len: usize, options: TcpOptions) -> Self {
        let memory = NonNull::from(Box::leak(vec![0u8; len].into_boxed_slice()));
        let owner = Owner {
            base: memory.cast(),
            len: len as u64,
            rights: Rights::REMOTE_READ | Rights::REMOTE_WRITE,
            admitted: u64::MAX,
            proven: true,
            arrivals: HashMap::new(),
            ended: HashMap::new(),
            finished: HashMap::new(),
            down: Vec::new(),
        };
        Self { device: TcpDevice::new(options).unwrap(), owner, memory, now: Instant::from_nanos(1), next_ticket: 0 }
    }

    pub(super) fn open(&mut self, link: LinkId, fd: OwnedFd, read_ahead: &[u8]) {
        let lane = Self::lane(LaneSide::Dialed);
        let connection = Connection::Stream { fd, read_ahead: read_ahead.to_vec(), lane };
        self.device.open(self.now, link, connection).unwrap();
    }

    pub(super) fn lane(side: LaneSide) -> LaneFacts {
        LaneFacts { side, generation: 1, incarnation: 1, peer_incarnation: 1 }
    }

    pub(super) fn bytes(&mut self, offset: usize, len: usize) -> &mut [u8] {
        // SAFETY: the node's own memory; the device is not polled while the borrow lives.
        unsafe { &mut self.memory.as_mut()[offset..offset + len] }
    }

    pub(super) fn posted(&self, local: usize, remote: u64, len: u64, access: Access) -> PostedMove {
        let remote = RemoteRange { region: REGION, offset: remote, len };
        // SAFETY: tests name offsets inside the node's memory.
        let base = unsafe { self.memory.cast::<u8>().add(local) };
        PostedMove { local: base, local_region: REGION, local_offset: local as u64, remote, access }
    }

    pub(super) fn post(&mut self, moves: Vec<PostedMove>, arrival: Option<PostedArrival>) -> TicketId {
        self.post_on(LINK, moves, arrival)
    }

    fn post_on(&mut self, link: LinkId, moves: Vec<PostedMove>, arrival: Option<PostedArrival>) -> TicketId {
        let ticket = TicketId::new(Handle { slot: self.next_ticket % 64, epoch: self.next_ticket / 64 * 2 + 1 });
        self.next_ticket += 1;
        let post = Post { ticket, link, attempt: 0, moves, arrival, sync: None, after: None };
        // SAFETY: the memory lives as long as the node, and tests do not touch it before the ticket finished.
        unsafe { self.device.post(self.now, post) }.unwrap();
        ticket
    }

    pub(super) fn poll(&mut self) -> Turn {
        self.device.poll(self.now, TURN_BYTES_MAX, &mut self.owner)
    }

    pub(super) fn outcome(&self, ticket: TicketId) -> Option<Outcome> {
        self.owner.finished.get(&ticket).copied()
    }
}

pub(super) fn tcp_pair() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialed.into(), listener.accept().unwrap().0.into())
}

pub(super) fn unix_pair() -> (OwnedFd, OwnedFd) {
    let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
    (a.into(), b.into())
}

fn nodes(len: usize, options: TcpOptions) -> (Node, Node) {
    let (a, b) = tcp_pair();
    let (mut left, mut right) = (Node::new(len, options), Node::new(len, options));
    left.open(LINK, a, &[]);
    right.open(LINK, b, &[]);
    (left, right)
}

/// Polls both until `ticket` of `left` finished.
pub(super) fn finish(left: &mut Node, right: &mut Node, ticket: TicketId) -> Outcome {
    for _ in 0..1_000_000 {
        left.poll();
        right.poll();
        if let Some(outcome) = left.outcome(ticket) {
            return outcome;
        }
    }
    panic!("ticket {ticket:?} never finished; down: {:?}, {:?}", left.owner.down, right.owner.down);
}

pub(super) fn fill(bytes: &mut [u8], seed: u64) {
    for (index, byte) in (0u64..).zip(bytes) {
        *byte = ((index + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).to_le_bytes()[0];
    }
}

pub(super) fn checksummed() -> TcpOptions {
    TcpOptions { checksum: Checksum::Crc32c, ..TcpOptions::default() }
}

#[test]
fn bytes_of_every_size_arrive_both_ways_with_and_without_checksums() {
    for options in [TcpOptions::default(), checksummed()] {
        for pair in [tcp_pair, unix_pair] {
            let (mut left, mut right) = (Node::new(24 << 20, options), Node::new(24 << 20, options));
            let (a, b) = pair();
            left.open(LINK, a, &[]);
            right.open(LINK, b, &[]);
            every_size_arrives_both_ways(&mut left, &mut right);
        }
    }
}

/// Writes and reads on an open link between nodes of 24 MiB.
pub(super) fn every_size_arrives_both_ways(left: &mut Node, right: &mut Node) {
    let lens = [0usize, 1, 7, 4096, 8191, 8192, 16_384, 16_385, 65_537, 1 << 20, (4 << 20) + 1, 11 << 20];
    for (round, len) in lens.into_iter().enumerate() {
        fill(left.bytes(0, len), round as u64);
        let moves = vec![left.posted(0, 64, len as u64, Access::Write)];
        let ticket = left.post(moves, None);
        assert_eq!(finish(left, right, ticket), Outcome::DONE, "write of {len}");
        let sent = left.bytes(0, len).to_vec();
        assert_eq!(right.bytes(64, len), sent, "write of {len}");
        let moves = vec![left.posted(12 << 20, 64, len as u64, Access::Read)];
        let ticket = left.post(moves, None);
        assert_eq!(finish(left, right, ticket), Outcome::DONE, "read of {len}");
        assert_eq!(left.bytes(12 << 20, len), sent, "read of {len}");
    }
    assert!(left.owner.down.is_empty() && right.owner.down.is_empty());
}

#[test]
fn a_mixed_batch_of_many_pages_lands_and_is_counted_once() {
    let (mut left, mut right) = nodes(16 << 20, TcpOptions::default());
    fill(left.bytes(0, 8 << 20), 1);
    fill(right.bytes(8 << 20, 4 << 20), 2);
    let mut moves: Vec<PostedMove> =
        (0..1500u64).map(|page| left.posted(page as usize * 4096, (1499 - page) * 4096, 4096, Access::Write)).collect();
    moves.extend(
        (0..64u64).map(|page| left.posted((10 << 20) + page as usize * 100, (8 << 20) + page * 100, 100, Access::Read)),
    );
    let arrival = PostedArrival { region: REGION, counter: 7, amount: 3 };
    let ticket = left.post(moves, Some(arrival));
    assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
    assert_eq!(right.owner.arrivals, HashMap::from([(7, 3)]));
    for page in 0..1500 {
        let sent = left.bytes(page * 4096, 4096).to_vec();
        assert_eq!(right.bytes((1499 - page) * 4096, 4096), sent, "page {page}");
    }
    let sent = right.bytes(8 << 20, 6400).to_vec();
    assert_eq!(left.bytes(10 << 20, 6400), sent);
}

#[test]
fn both_ends_post_at_the_same_time() {
    let (mut left, mut right) = nodes(16 << 20, TcpOptions::default());
    fill(left.bytes(0, 4 << 20), 1);
    fill(right.bytes(0, 4 << 20), 2);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for piece in 0..40u64 {
        let (at, access) = (piece * 100_000, if piece % 2 == 0 { Access::Write } else { Access::Read });
        let local = if access == Access::Write { at } else { at + (8 << 20) };
        let moves =
            vec![left.posted(local as usize, at + if access == Access::Write { 4 << 20 } else { 0 }, 100_000, access)];
        ours.push(left.post(moves, None));
        let moves =
            vec![right.posted(local as usize, at + if access == Access::Write { 4 << 20 } else { 0 }, 100_000, access)];
        theirs.push(right.post(moves, None));
    }
    for (ours, theirs) in ours.into_iter().zip(theirs) {
        assert_eq!(finish(&mut left, &mut right, ours), Outcome::DONE);
        assert_eq!(finish(&mut right, &mut left, theirs), Outcome::DONE);
    }
    for piece in 0..40usize {
        let (source, target) = (piece * 100_000, piece * 100_000 + if piece % 2 == 0 { 4 << 20 } else { 8 << 20 });
        let (sent, got) = (left.bytes(source, 100_000).to_vec(), right.bytes(target, 100_000).to_vec());
        assert!(sent == got, "piece {piece} of left");
        let (sent, got) = (right.bytes(source, 100_000).to_vec(), left.bytes(target, 100_000).to_vec());
        assert!(sent == got, "piece {piece} of right");
    }
}

#[test]
fn refused_extents_are_named_and_the_others_land() {
    for access in [Access::Write, Access::Read] {
        let (mut left, mut right) = nodes(1 << 20, TcpOptions::default());
        fill(left.bytes(0, 3000), 1);
        fill(right.bytes(500_000, 3000), 2);
        let (local, remote) = if access == Access::Write { (0, 100_000) } else { (600_000, 500_000) };
        let mut moves: Vec<PostedMove> = (0..3u64)
            .map(|part| left.posted(local + part as usize * 1000, remote + part * 1000, 1000, access))
            .collect();
        moves[1].remote.offset = 1 << 20;
        let ticket = left.post(moves, Some(PostedArrival { region: REGION, counter: 1, amount: 1 }));
        assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
        assert_eq!(left.owner.ended[&ticket], [(1, 1, Outcome::refused(Refusal::OutOfBounds))]);
        assert!(right.owner.arrivals.is_empty(), "an arrival was counted though a write was refused");
        for part in [0usize, 2] {
            let (ours, theirs) = (local + part * 1000, remote as usize + part * 1000);
            let sent = left.bytes(ours, 1000).to_vec();
            assert_eq!(right.bytes(theirs, 1000), sent);
        }
    }
}

#[test]
fn a_grant_closed_half_way_gets_no_further_byte() {
    for (access, options) in [
        (Access::Write, TcpOptions::default()),
        (Access::Write, checksummed()),
        (Access::Read, TcpOptions::default()),
        (Access::Read, checksummed()),
    ] {
        let (mut left, mut right) = nodes(24 << 20, options);
        let len = 16usize << 20;
        left.bytes(0, len).fill(1);
        right.bytes(0, len).fill(if access == Access::Write { 0 } else { 2 });
        let moves = vec![left.posted(0, 0, len as u64, access)];
        let ticket = left.post(moves, None);
        for _ in 0..6 {
            left.poll();
            right.poll();
        }
        right.owner.admitted = 0;
        let landed = if access == Access::Write { right.bytes(0, len).to_vec() } else { Vec::new() };
        let outcome = finish(&mut left, &mut right, ticket);
        let ended = left.owner.ended.get(&ticket).cloned().unwrap_or_default();
        assert!(ended.iter().any(|(_, _, outcome)| matches!(outcome.end, End::Refused(_))), "{ended:?} {outcome:?}");
        if access == Access::Write {
            assert!(landed.contains(&1) && landed.contains(&0), "the test closed the grant too early or too late");
            assert_eq!(right.bytes(0, len), landed, "bytes landed after the grant was closed");
            assert!(ended.iter().any(|(_, _, outcome)| outcome.far_end == FarEnd::Unknown), "{ended:?}");
        }
        // The lane lives on.
        assert!(left.owner.down.is_empty(), "{access:?}, {options:?}: {:?}", left.owner.down);
        right.owner.admitted = u64::MAX;
        let moves = vec![left.posted(0, 0, 4096, Access::Write)];
        let ticket = left.post(moves, None);
        assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
    }
}

#[test]
fn a_cancelled_batch_finishes_once_the_peer_is_quiet() {
    for access in [Access::Write, Access::Read] {
        let (mut left, mut right) = nodes(128 << 20, TcpOptions::default());
        let moves = vec![left.posted(0, 0, 100 << 20, access)];
        let ticket = left.post(moves, None);
        for _ in 0..4 {
            left.poll();
            right.poll();
        }
        left.device.cancel(left.now, ticket);
        assert_eq!(left.outcome(ticket), None, "finished before the peer said that it is quiet");
        let outcome = finish(&mut left, &mut right, ticket);
        assert_eq!(outcome.end, End::Cancelled);
        if access == Access::Read {
            assert_eq!(outcome.far_end, FarEnd::Untouched);
        }
        let quiet = right.bytes(0, 100 << 20).to_vec();
        let moves = vec![left.posted(0, 101 << 20, 4096, Access::Write)];
        let next = left.post(moves, None);
        assert_eq!(finish(&mut left, &mut right, next), Outcome::DONE);
        assert!(right.bytes(0, 100 << 20) == quiet, "bytes landed after quiet");
        assert!(left.owner.down.is_empty() && right.owner.down.is_empty());
    }
}

#[test]
fn a_batch_cancelled_before_it_began_is_untouched() {
    let (mut left, mut right) = nodes(64 << 20, TcpOptions::default());
    let moves = vec![left.posted(0, 0, 32 << 20, Access::Write)];
    let first = left.post(moves, None);
    let moves = vec![left.posted(0, 40 << 20, 4096, Access::Write)];
    let second = left.post(moves, None);
    left.device.cancel(left.now, second);
    left.poll();
    assert_eq!(left.outcome(second), Some(Outcome::cancelled(FarEnd::Untouched)));
    assert_eq!(finish(&mut left, &mut right, first), Outcome::DONE);
}

#[test]
fn without_proof_nothing_is_done_and_with_a_wrong_one_neither() {
    let token = |capability| {
        RegionToken::new(REGION, REGION, 0, 1 << 20, MemoryKind::Host, Rights::REMOTE_WRITE, capability, 1, 0)
    };
    for (capability, wanted) in [(None, false), (Some(Capability::new([1; 16])), false), (Some(CAPABILITY), true)] {
        let (mut left, mut right) = nodes(1 << 20, TcpOptions::default());
        right.owner.proven = false;
        if let Some(capability) = capability {
            left.device.attach(LINK, &token(capability)).unwrap();
        }
        let moves = vec![left.posted(0, 0, 4096, Access::Write)];
        let ticket = left.post(moves, None);
        finish(&mut left, &mut right, ticket);
        let why = if capability.is_some() { Refusal::WrongCapability } else { Refusal::NotProven };
        let refused = Outcome::refused(why);
        let ended = left.owner.ended.get(&ticket).cloned().unwrap_or_default();
        assert_eq!(ended, if wanted { vec![] } else { vec![(0, 1, refused)] });
    }
}

#[test]
fn a_peer_that_does_not_move_ends_the_lane_at_the_deadline_and_not_before() {
    let (mut left, _right) = nodes(64 << 20, TcpOptions::default());
    let moves = vec![left.posted(0, 0, 64 << 20, Access::Write)];
    let ticket = left.post(moves, None);
    let small = vec![left.posted(0, 0, 100, Access::Read)];
    let small = left.post(small, None);
    // Until the buffers are full.
    while left.poll() == Turn::Worked {}
    let started = left.now;
    let Wake::Readable { within: Some(within), .. } = left.device.arm(left.now) else { panic!("nothing to wait for") };
    assert!(within <= Duration::from_secs(5));
    left.now = started + Duration::from_nanos(Duration::from_secs(5).as_nanos() - 1_000);
    left.poll();
    assert_eq!(left.outcome(ticket), None);
    left.now = started + Duration::from_secs(5);
    left.poll();
    assert_eq!(left.outcome(ticket), Some(Outcome::link_down(LinkDownReason::Stalled, FarEnd::Unknown)));
    assert_eq!(left.outcome(small).unwrap().far_end, FarEnd::Untouched);
    assert_eq!(left.owner.down, [(LINK, LinkDownReason::Stalled)]);
    assert!(matches!(left.device.arm(left.now), Wake::Idle));
}

#[test]
fn a_lane_that_was_quiet_for_long_is_heard_within_a_few_turns_and_at_once_after_a_sleep() {
    for sleeps in [false, true] {
        let (mut left, mut right) = (Node::new(4096, TcpOptions::default()), Node::new(4096, TcpOptions::default()));
        let (a, b) = unix_pair(); // what is sent is there when the call returns
        left.open(LINK, a, &[]);
        right.open(LINK, b, &[]);
        for _ in 0..10 * LIVELY_TURNS {
            left.poll();
        }
        right.bytes(0, 1)[0] = 7;
        right.post(vec![right.posted(0, 9, 1, Access::Write)], None);
        if sleeps {
            assert!(matches!(left.device.arm(left.now), Wake::Readable { .. }));
        }
        let turns = (1..=QUIET_TURNS).find(|_| left.poll() == Turn::Worked);
        assert!(turns.is_some_and(|turns| !sleeps || turns == 1), "{turns:?}");
        assert_eq!(left.bytes(9, 1), [7]);
    }
}

#[test]
fn an_idle_lane_is_pinged_and_one_that_does_not_answer_ends() {
    let (mut left, mut right) = nodes(4096, TcpOptions::default());
    for _ in 0..3 {
        left.now = left.now + Duration::from_secs(10);
        while left.poll() == Turn::Worked || right.poll() == Turn::Worked {}
        std::thread::yield_now();
        right.poll();
        left.poll();
    }
    assert!(left.owner.down.is_empty(), "an answering peer was given up: {:?}", left.owner.down);
    left.now = left.now + Duration::from_secs(10);
    left.poll();
    left.now = left.now + Duration::from_secs(5);
    left.poll();
    assert_eq!(left.owner.down, [(LINK, LinkDownReason::Stalled)]);
}

#[test]
fn bytes_that_are_no_frame_end_their_lane_and_no_other() {
    let mut node = Node::new(1 << 20, TcpOptions::default());
    let mut peer = Node::new(1 << 20, TcpOptions::default());
    let link = |slot| LinkId::new(Handle { slot, epoch: 1 });
    let (bad, mut attacker) = std::os::unix::net::UnixStream::pair().unwrap();
    let (good, other) = tcp_pair();
    let (spare, _keep) = tcp_pair();
    node.open(link(0), bad.into(), &[]);
    node.open(link(1), good, &[]);
    node.open(link(2), spare, &[]);
    peer.open(link(1), other, &[]);
    attacker.write_all(&[0xee; 100]).unwrap();
    for _ in 0..4 {
        node.poll();
    }
    assert!(matches!(node.owner.down[..], [(down, LinkDownReason::Violation(_))] if down == link(0)));
    let moves = vec![peer.posted(0, 0, 4096, Access::Write)];
    let ticket = peer.post_on(link(1), moves, None);
    assert_eq!(finish(&mut peer, &mut node, ticket), Outcome::DONE);
    // The attacker was told why.
    let mut told = Vec::new();
    attacker.read_to_end(&mut told).unwrap();
    assert_eq!(told.len(), 40);
}

#[test]
fn acks_and_data_that_nobody_asked_for_are_counted_or_end_the_lane() {
    use millpond_core::wire::frame::{AckCode, Frame, Tag};
    let (ours, mut peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut node = Node::new(1 << 20, TcpOptions::default());
    node.open(LINK, ours.into(), &[]);
    let mut send = |frame: Frame<'_>, data: &[u8]| {
        let mut bytes = [0; 64];
        let len = frame.encode(&mut bytes).unwrap();
        peer.write_all(&[&bytes[..len], data].concat()).unwrap();
    };
    let tag = Tag { generation: 1, ticket: 77, slice: 0, attempt: 0 };
    let ack =
        |tag, extent_count, code| Frame::Ack { tag, code, extent_index: 0, extent_count, touched: false, last: true };
    send(ack(tag, 0, AckCode::Done), &[]);
    send(Frame::Data { tag, offset: 0, data_len: 16, checksummed: false }, &[7; 16]);
    send(Frame::Quiet { tag }, &[]);
    for _ in 0..4 {
        node.poll();
    }
    assert!(node.owner.down.is_empty());
    let moves = vec![node.posted(0, 0, 4096, Access::Read)];
    let ticket = node.post(moves, None);
    node.bytes(0, 4096).fill(3);
    let tag = Tag { ticket: ticket.to_bits(), ..tag };
    // An ack of a read whose data never came.
    send(ack(tag, 0, AckCode::Done), &[]);
    for _ in 0..4 {
        node.poll();
    }
    assert!(matches!(node.outcome(ticket).unwrap().end, End::LinkDown(LinkDownReason::Violation(_))));
    assert!(node.bytes(0, 4096).iter().all(|byte| *byte == 3));
}

#[test]
fn more_batches_than_credit_wait_their_turn() {
    let (mut left, mut right) = nodes(1 << 20, TcpOptions::default());
    let tickets: Vec<TicketId> = (0..63)
        .flat_map(|_| {
            let moves = vec![left.posted(0, 0, 64, Access::Read), left.posted(64, 64, 64, Access::Write)];
            [left.post(moves, None)]
        })
        .collect();
    for ticket in tickets {
        assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
    }
    for round in 0..500u64 {
        let moves = vec![left.posted(0, round, 64, Access::Read)];
        let ticket = left.post(moves, None);
        assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
    }
    assert!(left.owner.down.is_empty() && right.owner.down.is_empty());
}

/// Far more than the initial credit of each, so that the shares rule.
#[test]
fn sixteen_lanes_have_even_shares_of_what_a_device_takes_and_none_is_left_behind() {
    const LANES: u32 = 16;
    const BATCHES: usize = 400;
    let takings =
        Takings { whole: Credit { bytes: 8 << 20, slices: 64 }, least: Credit { bytes: 64 << 10, slices: 2 } };
    let share = takings.share(LANES).slices;
    let mut receiver = Node::new(1 << 20, TcpOptions { takings, ..TcpOptions::default() });
    let mut senders: Vec<(Node, Vec<TicketId>, usize)> = (0..LANES)
        .map(|slot| {
            let (here, there) = tcp_pair();
            receiver.open(LinkId::new(Handle { slot, epoch: 1 }), there, &[]);
            let mut sender = Node::new(1 << 20, TcpOptions::default());
            sender.open(LINK, here, &[]);
            (sender, Vec::new(), 0)
        })
        .collect();
    let mut at_first_end = Vec::new();
    while senders.iter().any(|(_, _, done)| *done < BATCHES) {
        for (sender, open, done) in &mut senders {
            while open.len() < 20 && *done + open.len() < BATCHES {
                let moves = vec![sender.posted(0, 0, 4096, Access::Write)];
                open.push(sender.post(moves, None));
            }
            sender.poll();
            let before = open.len();
            open.retain(|ticket| {
                sender.owner.finished.remove(ticket).is_none_or(|outcome| {
                    assert_eq!(outcome, Outcome::DONE);
                    false
                })
            });
            *done += before - open.len();
        }
        receiver.poll();
        let lanes = receiver.device.lanes.iter().flatten();
        for grant in lanes.map(|lane| &lane.into.grant) {
            let begun_with = lane::INITIAL.slices.saturating_sub(grant.answered());
            assert!(grant.open_max().slices <= share.max(begun_with), "{grant:?}");
        }
        if at_first_end.is_empty() && senders.iter().any(|(_, _, done)| *done == BATCHES) {
            at_first_end = senders.iter().map(|(_, _, done)| *done).collect();
        }
    }
    assert!(at_first_end.iter().all(|done| 2 * done >= BATCHES), "{at_first_end:?}");
    assert!(receiver.owner.down.is_empty());
}

/// What the scheduler would otherwise send another way, or cancel, does not pile up in the lane.
#[test]
fn what_waits_for_credit_in_a_lane_is_bounded_and_goes_on_when_there_is_some() {
    let (mut left, mut right) = nodes(1 << 20, TcpOptions::default());
    let mut taken = Vec::new();
    let refused = loop {
        let ticket = TicketId::new(Handle { slot: u32::try_from(taken.len()).unwrap(), epoch: 1 });
        let moves = vec![left.posted(0, 0, 64, Access::Write)];
        let post = Post { ticket, link: LINK, attempt: 0, moves, arrival: None, sync: None, after: None };
        // SAFETY: the memory lives as long as the node, and the test does not touch it.
        match unsafe { left.device.post(left.now, post) } {
            Ok(()) => taken.push(ticket),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.reason, PostRefusal::Full);
    let (sent, waiting) = (usize::try_from(lane::INITIAL.slices).unwrap(), STARVED_POSTS_MAX);
    assert!((sent + 1..=sent + waiting).contains(&taken.len()), "{} batches", taken.len());
    for ticket in taken {
        assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
    }
}

#[test]
fn bytes_read_beyond_the_hello_are_not_lost() {
    let (a, b) = tcp_pair();
    let mut left = Node::new(1 << 20, TcpOptions::default());
    left.open(LINK, a, &[]);
    left.bytes(0, 4096).fill(5);
    let moves = vec![left.posted(0, 0, 4096, Access::Write)];
    let ticket = left.post(moves, None);
    let mut early = [0; 1000];
    let mut stream = TcpStream::from(b);
    stream.read_exact(&mut early).unwrap();
    let mut right = Node::new(1 << 20, TcpOptions::default());
    right.open(LINK, stream.into(), &early);
    assert_eq!(finish(&mut left, &mut right, ticket), Outcome::DONE);
    assert!(right.bytes(0, 4096).iter().all(|byte| *byte == 5));
}

#[test]
fn a_closed_link_says_goodbye_and_finishes_its_batches() {
    let (mut left, mut right) = nodes(1 << 20, TcpOptions::default());
    let moves = vec![left.posted(0, 0, 100, Access::Read)];
    let ticket = left.post(moves, None);
    left.device.close(LINK, LinkDownReason::Closed);
    left.poll();
    assert_eq!(left.outcome(ticket), Some(Outcome::link_down(LinkDownReason::Closed, FarEnd::Untouched)));
    assert_eq!(left.owner.down, [(LINK, LinkDownReason::Closed)]);
    for _ in 0..1000 {
        right.poll();
    }
    assert_eq!(right.owner.down, [(LINK, LinkDownReason::PeerClosed)]);
}

/// Forwards both ways until `allowed` bytes went through in all, then cuts both connections.
fn cutting_proxy(left: TcpStream, right: TcpStream, allowed: u64) -> std::thread::JoinHandle<()> {
    use std::sync::atomic::{AtomicU64, Ordering};
    let left_over = Arc::new(AtomicU64::new(allowed));
    let pump = move |mut from: TcpStream, mut to: TcpStream, left_over: Arc<AtomicU64>| {
        let mut bytes = [0; 16 << 10];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            let rest = left_over
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |rest| Some(rest.saturating_sub(len as u64)));
            let pass = len.min(usize::try_from(rest.unwrap()).unwrap());
            if to.write_all(&bytes[..pass]).is_err() || pass < len {
                break;
            }
        }
        let _ = from.shutdown(std::net::Shutdown::Both);
        let _ = to.shutdown(std::net::Shutdown::Both);
    };
    std::thread::spawn(move || {
        let (left_too, right_too) = (left.try_clone().unwrap(), right.try_clone().unwrap());
        let over = left_over.clone();
        let back = std::thread::spawn(move || pump(right_too, left_too, over));
        pump(left, right, left_over);
        back.join().unwrap();
    })
}

#[test]
fn a_connection_cut_anywhere_gives_right_bytes_or_an_error_and_then_quiet() {
    let mut seed = 0x5eed_0001u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % below
    };
    let (mut done, mut failed) = (0, 0);
    for round in 0..60u64 {
        let (a, proxy_a) = tcp_pair();
        let (proxy_b, b) = tcp_pair();
        let options = if round % 2 == 0 { TcpOptions::default() } else { checksummed() };
        let (mut left, mut right) = (Node::new(4 << 20, options), Node::new(4 << 20, options));
        left.open(LINK, a, &[]);
        right.open(LINK, b, &[]);
        let allowed = random(if round % 3 == 0 { 3_000_000 } else { 12_000 });
        let proxy = cutting_proxy(proxy_a.into(), proxy_b.into(), allowed);
        fill(left.bytes(0, 1 << 20), round);
        fill(right.bytes(1 << 20, 1 << 20), round + 1);
        let len = 1 + random(if round % 3 == 0 { 500_000 } else { 3_000 });
        let mut posts = Vec::new();
        for part in 0..2u64 {
            let moves = vec![left.posted((part * len) as usize, part * len, len, Access::Write)];
            posts.push((left.post(moves, None), Access::Write, part));
            let moves = vec![left.posted((2 << 20) + (part * len) as usize, (1 << 20) + part * len, len, Access::Read)];
            posts.push((left.post(moves, None), Access::Read, part));
        }
        for (ticket, access, part) in posts {
            let outcome = finish(&mut left, &mut right, ticket);
            let (at, len) = ((part * len) as usize, len as usize);
            if outcome.is_done() {
                done += 1;
                let (local, remote) = if access == Access::Write { (at, at) } else { ((2 << 20) + at, (1 << 20) + at) };
                let ours = left.bytes(local, len).to_vec();
                assert!(right.bytes(remote, len) == ours, "round {round}: done, and the bytes are wrong");
            } else {
                failed += 1;
                assert!(matches!(outcome.end, End::LinkDown(_)), "round {round}: {outcome:?}");
            }
        }
        // Quiet: with the lane gone on both sides nothing changes any more, whatever the proxy still holds.
        if !left.owner.down.is_empty() {
            proxy.join().unwrap();
            for _ in 0..100_000 {
                right.poll();
                if !right.owner.down.is_empty() {
                    break;
                }
            }
            assert!(!right.owner.down.is_empty());
            let (ours, theirs) = (left.bytes(0, 4 << 20).to_vec(), right.bytes(0, 4 << 20).to_vec());
            for _ in 0..10 {
                left.poll();
                right.poll();
            }
            assert!(left.bytes(0, 4 << 20) == ours && right.bytes(0, 4 << 20) == theirs);
        }
    }
    assert!(done > 20 && failed > 20, "the cuts missed: {done} done, {failed} failed");
}

#[test]
fn an_arrival_is_sent_once_a_peer_that_was_idle_has_shown_that_it_is_there() {
    let (mut left, mut right) = nodes(4096, TcpOptions::default());
    let arrival = PostedArrival { region: REGION, counter: 1, amount: 1 };
    let second = Duration::from_secs(1);
    left.now = left.now + second;
    let moves = vec![left.posted(0, 0, 64, Access::Write)];
    let heard = left.post(moves, Some(arrival));
    assert_eq!(finish(&mut left, &mut right, heard), Outcome::DONE);
    assert_eq!(right.owner.arrivals[&1], 1);
    // From here on nothing gets through; what is sent over a connection that somebody forgot is lost in silence.
    left.now = left.now + second;
    for arrival in [None, Some(arrival)] {
        let moves = vec![left.posted(0, 0, 64, Access::Write)];
        left.post(moves, arrival);
    }
    let [plain, counted] = [1, 2].map(|slot| TicketId::new(Handle { slot, epoch: 1 }));
    left.poll();
    left.now = left.now + TcpOptions::default().first_answer;
    left.poll();
    let lost = |far_end| Some(Outcome::link_down(LinkDownReason::Stalled, far_end));
    assert_eq!(left.outcome(plain), lost(FarEnd::Unknown));
    assert_eq!(left.outcome(counted), lost(FarEnd::Untouched), "it may be sent again, over another lane");
}
