//! FROZEN: a peer that speaks version 1 of the wire protocol, as it was when version 1 was the newest.
//!
//! Written from `core/src/wire/SPEC.md` alone and independent of the product's crates, so that no later change of theirs
//! changes it. It never changes either: a newer protocol gets a file of its own next to this one, `v2.rs`. Blocking, one
//! lane, one region; what it does not expect ends it with a panic that says what came.

use std::io::{Read, Write};
use std::net::TcpStream;

const MAGIC: [u8; 8] = *b"\x8fMLPND\r\n";
const VERSION: u16 = 1;
const KEY_CONTEXT: &str = "millpond session shared key v1";
const HEADER_LEN: usize = 40;

pub(crate) const WRITE: u8 = 1;
pub(crate) const READ: u8 = 2;
pub(crate) const DATA: u8 = 3;
pub(crate) const ACK: u8 = 4;
pub(crate) const CANCEL: u8 = 5;
pub(crate) const QUIET: u8 = 6;
pub(crate) const PING: u8 = 7;
pub(crate) const PONG: u8 = 8;
pub(crate) const CREDIT: u8 = 9;
pub(crate) const GOODBYE: u8 = 10;
pub(crate) const PROVE: u8 = 11;

const ARRIVAL: u8 = 1;
const CHECKSUMMED: u8 = 2;
const LAST: u8 = 4;

/// Who it says it is, and the lane it speaks for.
#[derive(Clone, Copy)]
pub(crate) struct Own {
    pub(crate) node: [u8; 16],
    pub(crate) incarnation: u64,
    pub(crate) lane: (u8, u64),
    pub(crate) versions: (u16, u16),
    pub(crate) key: Option<&'static [u8]>,
}

impl Own {
    pub(crate) fn new(node: u8) -> Self {
        let key: &[u8] = b"mixed versions";
        Self { node: [node; 16], incarnation: 1, lane: (0, 1), versions: (VERSION, VERSION), key: Some(key) }
    }
}

/// What the hello came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Met {
    /// The peer's node id and incarnation, and the generation of the lane.
    Peer { node: [u8; 16], incarnation: u64, generation: u64 },
    /// Refused: field, the refuser's value, the refused one's.
    Refused(u16, u64, u64),
}

fn message(kind: u8, versions: (u16, u16), body: &[u8]) -> Vec<u8> {
    let len = u16::try_from(16 + body.len()).unwrap();
    let mut bytes = MAGIC.to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend([kind, 0]);
    bytes.extend(versions.0.to_le_bytes());
    bytes.extend(versions.1.to_le_bytes());
    bytes.extend(body);
    bytes
}

/// The next message: kind, and all its bytes.
fn receive(stream: &mut TcpStream) -> (u8, Vec<u8>) {
    let mut bytes = vec![0; 16];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..8], MAGIC, "no hello");
    bytes.resize(usize::from(u16::from_le_bytes([bytes[8], bytes[9]])), 0);
    stream.read_exact(&mut bytes[16..]).unwrap();
    (bytes[10], bytes)
}

fn identity(own: &Own) -> Vec<u8> {
    let mut bytes = own.node.to_vec();
    bytes.extend(own.incarnation.to_le_bytes());
    // No host, no layout.
    bytes.resize(88, 0);
    bytes
}

fn proof(own: &Own, parts: &[&[u8]]) -> [u8; 32] {
    let Some(secret) = own.key else { return [0; 32] };
    *blake3::keyed_hash(&blake3::derive_key(KEY_CONTEXT, secret), &parts.concat()).as_bytes()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn refusal(bytes: &[u8]) -> Met {
    Met::Refused(u16::from_le_bytes([bytes[16], bytes[17]]), u64_at(bytes, 24), u64_at(bytes, 32))
}

/// The dialer's hello.
pub(crate) fn dial(stream: &mut TcpStream, own: &Own) -> Met {
    let auth = u8::from(own.key.is_some());
    let mut body = vec![2, auth, own.lane.0, 0, 0, 0, 0, 0];
    body.extend(own.lane.1.to_le_bytes());
    body.extend(identity(own));
    body.extend([0xd1; 32]);
    let hello = message(1, own.versions, &body);
    stream.write_all(&hello).unwrap();
    let (mut kind, mut bytes) = receive(stream);
    let mut transcript = hello;
    if kind == 2 {
        transcript.extend(&bytes[16..48]);
        assert_eq!(bytes[48..80], proof(own, &[&transcript, b"acceptor proof"]), "the acceptor's proof");
        let ours = proof(own, &[&transcript, b"dialer proof"]);
        stream.write_all(&message(3, own.versions, &ours)).unwrap();
        (kind, bytes) = receive(stream);
    }
    if kind == 5 {
        return refusal(&bytes);
    }
    assert_eq!(kind, 4, "welcome expected");
    assert_eq!(u16::from_le_bytes([bytes[16], bytes[17]]), VERSION, "the version that both speak");
    assert_eq!(bytes[112..144], proof(own, &[&transcript, b"welcome", &bytes[16..112]]), "the welcome's proof");
    let node = bytes[24..40].try_into().unwrap();
    Met::Peer { node, incarnation: u64_at(&bytes, 40), generation: own.lane.1 }
}

/// The acceptor's hello. A dialer without a common version is refused.
pub(crate) fn accept(stream: &mut TcpStream, own: &Own) -> Met {
    let (kind, hello) = receive(stream);
    assert_eq!(kind, 1, "hello expected");
    let theirs = (u16::from_le_bytes([hello[12], hello[13]]), u16::from_le_bytes([hello[14], hello[15]]));
    let refuse = |stream: &mut TcpStream, field: u16, ours: u64, theirs: u64| {
        let mut body = field.to_le_bytes().to_vec();
        body.resize(8, 0);
        body.extend(ours.to_le_bytes());
        body.extend(theirs.to_le_bytes());
        stream.write_all(&message(5, own.versions, &body)).unwrap();
        Met::Refused(field, ours, theirs)
    };
    if theirs.1.min(own.versions.1) < theirs.0.max(own.versions.0) {
        return refuse(stream, 1, own.versions.1.into(), theirs.1.into());
    }
    let mut transcript = hello.clone();
    if own.key.is_some() {
        assert_eq!(hello[17], 1, "the dialer has a key");
        let nonce = [0xac; 32];
        transcript.extend(nonce);
        let ours = proof(own, &[&transcript, b"acceptor proof"]);
        stream.write_all(&message(2, own.versions, &[nonce, ours].concat())).unwrap();
        let (kind, bytes) = receive(stream);
        if kind == 5 {
            return refusal(&bytes);
        }
        assert_eq!(kind, 3, "proof expected");
        assert_eq!(bytes[16..48], proof(own, &[&transcript, b"dialer proof"]), "the dialer's proof");
    }
    let mut body = VERSION.to_le_bytes().to_vec();
    body.resize(8, 0);
    body.extend(identity(own));
    let mac = proof(own, &[&transcript, b"welcome", &body]);
    body.extend(mac);
    stream.write_all(&message(4, own.versions, &body)).unwrap();
    let node = hello[32..48].try_into().unwrap();
    Met::Peer { node, incarnation: u64_at(&hello, 48), generation: u64_at(&hello, 24) }
}

/// A frame without its data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) ticket: u64,
    pub(crate) slice: u32,
    pub(crate) attempt: u16,
    pub(crate) code: u16,
    pub(crate) detail: u32,
    pub(crate) data_len: u32,
    pub(crate) count: u16,
    pub(crate) table: Vec<u8>,
}

/// Part of a region: slot, epoch, offset, length.
pub(crate) type Extent = (u32, u32, u64, u64);

pub(crate) fn extents(list: &[Extent]) -> Vec<u8> {
    let entry = |(slot, epoch, offset, len): &Extent| {
        [&slot.to_le_bytes()[..], &epoch.to_le_bytes(), &offset.to_le_bytes(), &len.to_le_bytes()].concat()
    };
    list.iter().flat_map(entry).collect()
}

/// A lane after its hello.
pub(crate) struct Lane {
    pub(crate) stream: TcpStream,
    pub(crate) generation: u64,
}

impl Lane {
    pub(crate) fn send(&mut self, frame: &Frame, data: &[u8]) {
        let mut head = vec![0; 4];
        head.extend([frame.kind, frame.flags]);
        head.extend(frame.count.to_le_bytes());
        head.extend(frame.ticket.to_le_bytes());
        head.extend(self.generation.to_le_bytes());
        head.extend(frame.slice.to_le_bytes());
        head.extend(frame.attempt.to_le_bytes());
        head.extend(frame.code.to_le_bytes());
        head.extend(frame.detail.to_le_bytes());
        head.extend(frame.data_len.to_le_bytes());
        head.extend(&frame.table);
        let sum = xxhash_rust::xxh3::xxh3_64(&head[4..]).to_le_bytes();
        head[..4].copy_from_slice(&sum[..4]);
        head.extend(data);
        head.resize(head.len().next_multiple_of(8), 0);
        self.stream.write_all(&head).unwrap();
    }

    /// The next frame and its data. `None`: the peer closed the lane.
    pub(crate) fn receive(&mut self) -> Option<(Frame, Vec<u8>)> {
        let mut head = vec![0; HEADER_LEN];
        self.stream.read_exact(&mut head).ok()?;
        let (kind, flags, count) = (head[4], head[5], u16::from_le_bytes([head[6], head[7]]));
        let table_len = match kind {
            WRITE if flags & ARRIVAL != 0 => 24 + 24 * usize::from(count),
            WRITE | READ | PROVE => 24 * usize::from(count),
            DATA => 8,
            CREDIT => 16,
            _ => 0,
        };
        head.resize(HEADER_LEN + table_len, 0);
        self.stream.read_exact(&mut head[HEADER_LEN..]).unwrap();
        let sum = xxhash_rust::xxh3::xxh3_64(&head[4..]).to_le_bytes();
        assert_eq!(head[..4], sum[..4], "a head's checksum");
        assert_eq!(u64_at(&head, 16), self.generation, "a frame of another generation");
        assert_eq!(flags & CHECKSUMMED, 0, "nobody asked for payload checksums");
        let frame = Frame {
            kind,
            flags,
            ticket: u64_at(&head, 8),
            slice: u32_at(&head, 24),
            attempt: u16::from_le_bytes([head[28], head[29]]),
            code: u16::from_le_bytes([head[30], head[31]]),
            detail: u32_at(&head, 32),
            data_len: u32_at(&head, 36),
            count,
            table: head[HEADER_LEN..].to_vec(),
        };
        let data_len = if matches!(kind, WRITE | DATA) { frame.data_len as usize } else { 0 };
        let mut data = vec![0; data_len.next_multiple_of(8)];
        self.stream.read_exact(&mut data).unwrap();
        data.truncate(data_len);
        Some((frame, data))
    }

    /// Shows the capability of a region.
    pub(crate) fn prove(&mut self, (slot, epoch): (u32, u32), capability: &[u8]) {
        let table = [&slot.to_le_bytes()[..], &epoch.to_le_bytes(), capability].concat();
        self.send(&Frame { kind: PROVE, count: 1, table, ..Frame::default() }, &[]);
    }

    /// Serves `memory` as one region, `slot` 7 `epoch` 1, until the peer closes the lane. Says how many arrivals came.
    pub(crate) fn serve(&mut self, memory: &mut [u8], capability: &[u8; 16]) -> u64 {
        let (mut proven, mut arrivals) = (false, 0);
        while let Some((frame, data)) = self.receive() {
            let ack = Frame { kind: ACK, flags: LAST, ..frame.clone() };
            let ack = Frame { count: 0, table: Vec::new(), data_len: 0, detail: 0, code: 0, ..ack };
            match frame.kind {
                PROVE => proven |= frame.table[..8] == [7, 0, 0, 0, 1, 0, 0, 0] && frame.table[8..24] == *capability,
                WRITE | READ => {
                    assert!(proven, "the region is used without proof");
                    let has_arrival = frame.flags & ARRIVAL != 0;
                    let (mut at, mut read) = (0, Vec::new());
                    for entry in frame.table[if has_arrival { 24 } else { 0 }..].chunks(24) {
                        let (offset, len) = (u64_at(entry, 8) as usize, u64_at(entry, 16) as usize);
                        if frame.kind == WRITE {
                            memory[offset..offset + len].copy_from_slice(&data[at..at + len]);
                        } else {
                            read.extend(&memory[offset..offset + len]);
                        }
                        at += len;
                    }
                    if has_arrival {
                        arrivals += u64_at(&frame.table, 16);
                    }
                    if frame.kind == READ {
                        let data_len = u32::try_from(read.len()).unwrap();
                        let table = 0u64.to_le_bytes().to_vec();
                        let tag =
                            Frame { kind: DATA, flags: 0, count: 0, code: 0, detail: 0, data_len, table, ..frame };
                        self.send(&tag, &read);
                    }
                    self.send(&ack, &[]);
                }
                CANCEL => self.send(&Frame { kind: QUIET, flags: 0, ..ack }, &[]),
                PING => self.send(&Frame { kind: PONG, flags: 0, ..ack }, &[]),
                GOODBYE => break,
                CREDIT | PONG => {}
                kind => panic!("a frame of kind {kind} out of turn"),
            }
        }
        arrivals
    }

    /// The next answer to a request of ours, with the data that came before it.
    pub(crate) fn answer(&mut self) -> (Frame, Vec<u8>) {
        let mut read = Vec::new();
        loop {
            let (frame, data) = self.receive().expect("the peer closed the lane");
            match frame.kind {
                DATA => {
                    assert_eq!(u64_at(&frame.table, 0), read.len() as u64, "data in order");
                    read.extend(data);
                }
                ACK if frame.flags & LAST != 0 || frame.code != 0 => return (frame, read),
                PING => self.send(&Frame { kind: PONG, ticket: frame.ticket, ..Frame::default() }, &[]),
                CREDIT | PONG => {}
                kind => panic!("a frame of kind {kind} is no answer"),
            }
        }
    }
}
