//! A peer that sends whatever frames it likes: the device survives, and touches nothing that it may not.
#![allow(clippy::cast_possible_truncation, reason = "small numbers out of a small generator")]

use std::io::Write;
use std::os::unix::net::UnixStream;

use millpond_core::batch::{Capability, Extent, RegionId};
use millpond_core::wire::frame::{AckCode, Arrival, Frame, GoodbyeReason, Proof, Tag, WireExtent, reseal};

use super::tests::{LINK, Node, REGION};
use super::{Checksum, TcpOptions};
use crate::contract::{Access, TicketId};

const LEN: usize = 64 << 10;
/// Peers may use the region up to here.
const ADMITTED: usize = 32 << 10;
/// Reads of the victim land here.
const READS: core::ops::Range<usize> = 48 << 10..52 << 10;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }
}

/// A frame with its data, mostly well-formed, about the tickets given.
fn some_frame(random: &mut Random, tickets: &[TicketId]) -> Vec<u8> {
    let ticket = if tickets.is_empty() || random.one_in(4) {
        random.below(9)
    } else {
        tickets[random.below(tickets.len() as u64) as usize].to_bits()
    };
    let generation = if random.one_in(60) { 2 } else { 1 };
    let tag = Tag { generation, ticket, slice: random.below(2) as u32, attempt: u16::from(random.one_in(9)) };
    let whole = Tag { slice: 0, ..tag };
    let extents: Vec<WireExtent> = (0..1 + random.below(4))
        .map(|_| {
            let region = if random.one_in(9) { RegionId { slot: 1, epoch: 1 } } else { REGION };
            Extent::new(region, random.below(LEN as u64), random.below(9000)).into()
        })
        .collect();
    let code = AckCode::ALL[random.below(AckCode::ALL.len() as u64) as usize];
    let arrival = random.one_in(3).then_some(Arrival { region: REGION, counter: random.below(4), amount: 1 });
    let checksummed = random.one_in(4);
    let (offset, data_len) = (random.below(3) * 1024, random.below(3) * 1024);
    let proofs = [Proof::new(REGION, Capability::new([random.below(2) as u8 * 9; 16]))];
    let frame = match random.below(16) {
        0..4 => Frame::Write { tag, extents: &extents, arrival, checksummed },
        4..6 => Frame::Read { tag, extents: &extents, checksummed },
        6..9 => Frame::Data { tag, offset, data_len, checksummed },
        9..11 => Frame::Ack {
            tag,
            code,
            extent_index: random.below(3) as u32,
            extent_count: if code == AckCode::Done { 0 } else { 1 + random.below(2) as u32 },
            touched: random.one_in(2),
            last: !random.one_in(3),
        },
        11 => Frame::Cancel { tag: whole },
        12 => Frame::Quiet { tag: whole },
        13 => Frame::Credit { generation, data_len_total: random.below(1 << 30), frame_count_total: random.below(99) },
        14 if random.one_in(20) => Frame::Goodbye { generation, reason: GoodbyeReason::Idle },
        14 => Frame::Ping { generation, nonce: random.below(9) },
        _ => Frame::Prove { generation, proofs: &proofs },
    };
    let mut bytes = vec![0; frame.head_len()];
    frame.encode(&mut bytes).unwrap();
    if random.one_in(40) {
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
        reseal(&mut bytes);
    }
    // Checksums are wrong nearly always: that is an answer, too.
    let trail = frame.trail();
    bytes.extend((0..trail.data_len).map(|_| 0xAB));
    bytes.resize(bytes.len() + (trail.len() - trail.data_len) as usize, 0);
    bytes
}

fn attack(seed: u64) {
    let mut random = Random(seed);
    let checksum = if random.one_in(2) { Checksum::Crc32c } else { Checksum::None };
    let mut node = Node::new(LEN, TcpOptions { checksum, ..TcpOptions::default() });
    node.bytes(0, LEN).fill(0x11);
    node.owner.admitted = ADMITTED as u64;
    let (ours, theirs) = UnixStream::pair().unwrap();
    node.open(LINK, ours.into(), &[]);
    theirs.set_nonblocking(true).unwrap();
    let (mut tickets, mut settled, mut backlog) = (Vec::new(), None::<Vec<u8>>, Vec::new());
    for _ in 0..40 {
        if tickets.len() < 3 && node.owner.down.is_empty() && random.one_in(3) {
            let access = if random.one_in(3) { Access::Write } else { Access::Read };
            let moves = (0..2).map(|part| node.posted(READS.start + part * 2048, 0, 2048, access)).collect();
            tickets.push(node.post(moves, None));
            settled = None;
        }
        if random.one_in(20)
            && let Some(ticket) = tickets.last()
        {
            super::Transport::cancel(&mut node.device, node.now, *ticket);
        }
        if random.one_in(30) {
            node.owner.admitted = random.below(2) * ADMITTED as u64;
        }
        backlog.extend(some_frame(&mut random, &tickets));
        // In pieces of any length, as a stream may come.
        while !backlog.is_empty() && !random.one_in(4) {
            let piece = (1 + random.below(6000) as usize).min(backlog.len());
            match (&theirs).write(&backlog[..piece]) {
                Ok(len) => drop(backlog.drain(..len)),
                Err(_) => break,
            }
            node.poll();
        }
        drain(&theirs);
        node.poll();
        let quiet = tickets.iter().all(|ticket| node.outcome(*ticket).is_some());
        if quiet {
            let now = node.bytes(READS.start, READS.len()).to_vec();
            let before = settled.get_or_insert_with(|| now.clone());
            assert!(*before == now, "seed {seed}: bytes landed after all tickets had finished");
        }
    }
    let rest = [ADMITTED..READS.start, READS.end..LEN];
    for range in rest {
        let bytes = node.bytes(range.start, range.len());
        assert!(bytes.iter().all(|byte| *byte == 0x11), "seed {seed}: bytes landed outside of what was granted");
    }
    drop(theirs);
    for _ in 0..50 {
        node.poll();
    }
    assert!(!node.owner.down.is_empty(), "seed {seed}: the lane outlived its peer");
    assert!(tickets.iter().all(|ticket| node.outcome(*ticket).is_some()), "seed {seed}: a ticket never finished");
}

fn drain(mut stream: &UnixStream) {
    let mut bytes = [0; 4096];
    while let Ok(1..) = std::io::Read::read(&mut stream, &mut bytes) {}
}

#[test]
fn whatever_frames_a_peer_sends_nothing_else_is_touched() {
    let seeds = std::env::var("MILLPOND_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1500);
    (0..seeds).for_each(attack);
}
