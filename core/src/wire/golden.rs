//! The wire format, frozen: each file in `golden/` is one message as hex text.
//!
//! A change of these bytes is a new version of the protocol, never a repair of this test.

extern crate std;

use std::string::String;
use std::vec::Vec;
use std::{format, fs};

use super::frame::{AckCode, Arrival, Frame, GoodbyeReason, Parsed, Proof, Tag, WireExtent, parse};
use super::hello::{Field, Hello, HostIdentity, Identity, KvLayout, Purpose, Refusal};
use super::session::{Config, Key, Session, State};
use zerocopy::IntoBytes;

use crate::batch::{Capability, Extent, MemoryKind, RegionId, RegionToken, Rights};

fn hex(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).map(|line| line.iter().map(|byte| format!("{byte:02x} ")).collect::<String>());
    lines.map(|line| format!("{}\n", line.trim_end())).collect()
}

/// `MILLPOND_GOLDEN=write` writes a file that does not exist yet; one that exists is never changed.
fn check(name: &str, bytes: &[u8]) {
    let path = format!("{}/src/wire/golden/{name}.hex", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("MILLPOND_GOLDEN").is_some() && fs::metadata(&path).is_err() {
        fs::write(&path, hex(bytes)).unwrap();
    }
    let frozen = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    assert_eq!(hex(bytes), frozen, "{name}: the wire format changed");
}

#[test]
fn frames_have_the_frozen_bytes() {
    let tag =
        Tag { generation: 0x0102_0304_0506_0708, ticket: 0x1112_1314_1516_1718, slice: 0x2122_2324, attempt: 0x3132 };
    let region = RegionId { slot: 0x41, epoch: 0x43 };
    let extents = [Extent::new(region, 0x5000, 5).into(), Extent::new(region, 0x6000, 4096).into()];
    let extents: &[WireExtent] = &extents;
    let proofs = [Proof::new(region, Capability::new(*b"0123456789abcdef"))];
    let (generation, whole) = (tag.generation, Tag { slice: 0, ..tag });
    let arrival = Some(Arrival { region, counter: 0x71, amount: 0x72 });
    let ack = |code, extent_index, extent_count| {
        let last = code == AckCode::Done;
        Frame::Ack { tag, code, extent_index, extent_count, touched: !last, last }
    };
    let frames = [
        ("write", Frame::Write { tag, extents, arrival: None, checksummed: false }),
        ("write_arrival", Frame::Write { tag, extents, arrival, checksummed: true }),
        ("read", Frame::Read { tag, extents, checksummed: true }),
        ("data", Frame::Data { tag, offset: 0x1000, data_len: 5, checksummed: true }),
        ("ack", ack(AckCode::Done, 0, 0)),
        ("ack_refused", ack(AckCode::OutOfBounds, 1, 2)),
        ("cancel", Frame::Cancel { tag: whole }),
        ("quiet", Frame::Quiet { tag: whole }),
        ("ping", Frame::Ping { generation, nonce: 0x81 }),
        ("pong", Frame::Pong { generation, nonce: 0x81 }),
        ("credit", Frame::Credit { generation, data_len_total: 0x91, frame_count_total: 0x92 }),
        ("goodbye", Frame::Goodbye { generation, reason: GoodbyeReason::Draining }),
        ("prove", Frame::Prove { generation, proofs: &proofs }),
    ];
    for (name, frame) in frames {
        let mut bytes = [0; 256];
        let head_len = frame.encode(&mut bytes).unwrap();
        check(name, &bytes[..head_len]);
        assert_eq!(parse(&bytes[..head_len]), Ok(Parsed::Frame { frame, head_len }));
    }
}

#[test]
fn tokens_have_the_frozen_bytes() {
    let (region, memory) = (RegionId { slot: 0x41, epoch: 0x43 }, RegionId { slot: 0x45, epoch: 0x47 });
    let (kind, rights) = (MemoryKind::Cuda { device: 1 }, Rights::REMOTE_READ | Rights::REMOTE_WRITE);
    let capability = Capability::new(*b"0123456789abcdef");
    let token = RegionToken::new(region, memory, 0x2000, 0x1000, kind, rights, capability, 0x51, 0x49);
    check("token", token.as_bytes());
}

fn config(node: u8) -> Config {
    let host = HostIdentity { boot: [0x61; 16], namespaces: [0x62, 0x63, 0x64] };
    let layout = Some(KvLayout { layers: 30, kv_heads: 3, head_dim: 64, page_tokens: 16, dtype: 1 });
    let identity = Identity { node: [node; 16], incarnation: 0x51, host };
    Config::new(Hello { purpose: Purpose::Lane { index: 1, generation: 3 }, identity, layout })
}

#[test]
fn a_hello_has_the_frozen_bytes() {
    let (key, mut log) = (Key::new(b"golden"), Vec::new());
    let mut dialer = Session::dial(config(1).with_key(key), [0xd1; 32]);
    let mut acceptor = Session::accept(config(2).with_key(key), [0xac; 32]);
    for name in ["hello", "challenge", "proof", "welcome"] {
        let (from, to) = if log.len() % 2 == 0 { (&mut dialer, &mut acceptor) } else { (&mut acceptor, &mut dialer) };
        let bytes = from.poll_output().to_vec();
        check(name, &bytes);
        to.on_bytes(&bytes);
        to.admit();
        log.push(bytes);
    }
    assert!(matches!((dialer.state(), acceptor.state()), (State::Established(_), State::Established(_))));
    let mut refuser = Session::accept(config(2), [0; 32]);
    let mut plain = Session::dial(config(1), [0; 32]);
    refuser.on_bytes(plain.poll_output());
    refuser.refuse(Refusal { field: Field::Generation, refuser: 9, refused: 3 });
    check("refusal", refuser.poll_output());
}
