//! Nodes of different versions: each frozen older version of the wire protocol against today's, in both roles.
#![allow(clippy::cast_possible_truncation)] // test data

use std::net::{SocketAddr, TcpListener, TcpStream};

use millpond_core::batch::RegionToken;
use millpond_core::time::Duration;
use millpond_core::wire::hello::{Field, HostIdentity, Identity, Versions};
use millpond_core::wire::session::Key;
use millpond_node::engine::{Arrival, Backing, Batch, Engine, OpenError, Options, Via};
use millpond_node::runtime::{Stop, blocking};
use millpond_tokio::Tokio;
use zerocopy::{FromBytes, IntoBytes};

mod v1;

const SECOND: Duration = Duration::from_secs(1);

fn engine(runtime: &Tokio) -> Engine<Tokio> {
    let mut options = Options::new(Identity { node: [1; 16], incarnation: 5, host: HostIdentity::UNKNOWN });
    options.key = Some(Key::new(b"mixed versions"));
    options.transports = vec![Via::Local, Via::Tcp];
    Engine::start(runtime.clone(), options).unwrap()
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(|runtime| async move {
        let bounded = tokio::time::timeout(std::time::Duration::from_secs(30), test(runtime));
        bounded.await.expect("the test took longer than half a minute");
    })
    .unwrap();
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
}

async fn listening(engine: &Engine<Tokio>, stop: &Stop) -> SocketAddr {
    engine.listen("127.0.0.1:0".parse().unwrap(), stop).await.unwrap()
}

#[test]
fn an_initiator_of_version_1_writes_and_reads_at_a_target_of_today() {
    run(|runtime| async move {
        let (engine, stop) = (engine(&runtime), Stop::new());
        let address = listening(&engine, &stop).await;
        let region = engine.allocate(1 << 20, Backing::Heap).unwrap();
        let target = engine.grant_write(vec![region.carve(0, 100_000).unwrap()]).unwrap();
        let mut source = region.carve(200_000, 50_001).unwrap();
        source.copy_from_slice(&pattern(50_001));
        let source = engine.grant_read(vec![source.freeze()]).unwrap();
        let (into, from) = (target.token().as_bytes().to_vec(), source.token().as_bytes().to_vec());
        let counted = Arrival { counter: 4, amount: 2 };
        let theirs = blocking(&runtime, move || {
            let own = v1::Own::new(9);
            let mut stream = TcpStream::connect(address).unwrap();
            let met = v1::dial(&mut stream, &own);
            assert_eq!(met, v1::Met::Peer { node: [1; 16], incarnation: 5, generation: 1 });
            let mut lane = v1::Lane { stream, generation: 1 };
            let region = |token: &[u8]| {
                let word = |at: usize| u32::from_le_bytes(token[at..at + 4].try_into().unwrap());
                let long = |at: usize| u64::from_le_bytes(token[at..at + 8].try_into().unwrap());
                ((word(0), word(4)), long(16), token[32..48].to_vec())
            };
            let ((slot, epoch), base, capability) = region(&into);
            let write = |slice, table: Vec<u8>, flags, count, data_len| v1::Frame {
                kind: v1::WRITE,
                flags,
                ticket: 77,
                slice,
                count,
                data_len,
                table,
                ..v1::Frame::default()
            };
            // Before the proof nothing is written, and the answer says so.
            let extents = v1::extents(&[(slot, epoch, base, 8)]);
            lane.send(&write(0, extents.clone(), 0, 1, 8), &[0xee; 8]);
            assert_eq!(lane.answer().0.code, 2, "not proven");
            lane.answer();
            lane.prove((slot, epoch), &capability);
            let arrival = [&slot.to_le_bytes()[..], &epoch.to_le_bytes(), &4u64.to_le_bytes(), &2u64.to_le_bytes()];
            let table = [arrival.concat(), v1::extents(&[(slot, epoch, base + 5, 3), (slot, epoch, base + 100, 997)])];
            lane.send(&write(1, table.concat(), 1, 2, 1000), &pattern(1000));
            let (ack, _) = lane.answer();
            assert_eq!((ack.ticket, ack.slice, ack.code), (77, 1, 0));
            let ((slot, epoch), base, capability) = region(&from);
            lane.prove((slot, epoch), &capability);
            let table = v1::extents(&[(slot, epoch, base, 50_001)]);
            let read =
                v1::Frame { kind: v1::READ, ticket: 78, count: 1, table, data_len: 50_001, ..v1::Frame::default() };
            lane.send(&read, &[]);
            let (ack, read) = lane.answer();
            assert_eq!((ack.ticket, ack.code), (78, 0));
            read
        });
        assert_eq!(theirs.await, pattern(50_001));
        assert_eq!(target.arrived(counted, SECOND).await, Ok(2));
        let memory = target.close().await;
        assert_eq!(memory[0][5..8], pattern(1000)[..3]);
        assert_eq!(memory[0][100..1097], pattern(1000)[3..]);
        assert_eq!(memory[0][..5], [0; 5], "what was refused was not written");
    });
}

#[test]
fn an_initiator_of_today_writes_and_reads_at_a_target_of_version_1() {
    run(|runtime| async move {
        let engine = engine(&runtime);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let capability = *b"0123456789abcdef";
        let served = blocking(&runtime, move || {
            let mut stream = listener.accept().unwrap().0;
            let met = v1::accept(&mut stream, &v1::Own::new(9));
            let v1::Met::Peer { node, incarnation, generation } = met else { panic!("{met:?}") };
            assert_eq!((node, incarnation), ([1; 16], 5));
            let mut memory = vec![0; 300_000];
            memory[200_000..250_001].copy_from_slice(&pattern(50_001));
            let arrivals = v1::Lane { stream, generation }.serve(&mut memory, &capability);
            (memory, arrivals)
        });
        let peer = engine.open(address).await.unwrap();
        // A token as version 1 writes it.
        let mut token = Vec::new();
        for word in [7u32, 1, 7, 1] {
            token.extend(word.to_le_bytes());
        }
        token.extend(0u64.to_le_bytes());
        token.extend(300_000u64.to_le_bytes());
        token.extend(capability);
        token.extend(1u64.to_le_bytes());
        token.extend([0, 0, 0, 0, 0, 0, 1, 6]);
        let token = RegionToken::read_from_bytes(&token).unwrap();
        let remote = engine.attach(&peer, &token).unwrap();
        let region = engine.allocate(1 << 20, Backing::Heap).unwrap();
        let mut source = region.carve(0, 70_003).unwrap();
        source.copy_from_slice(&pattern(70_003));
        let batch = Batch::new()
            .write(source.freeze(), remote.extent(11, 70_003).unwrap())
            .arrival(Arrival { counter: 1, amount: 3 });
        assert!(engine.submit(batch).unwrap().await.is_done());
        let read = Batch::new().read(remote.extent(200_000, 50_001).unwrap(), region.carve(100_000, 50_001).unwrap());
        let buffers = engine.submit(read).unwrap().await.into_buffers().unwrap();
        assert_eq!(buffers[0][..], pattern(50_001));
        engine.shut_down().await;
        let (memory, arrivals) = served.await;
        assert_eq!(memory[11..70_014], pattern(70_003));
        assert_eq!(arrivals, 3);
    });
}

#[test]
fn a_version_that_is_too_old_or_too_new_is_refused_and_the_field_is_named() {
    run(|runtime| async move {
        let (engine, stop) = (engine(&runtime), Stop::new());
        let address = listening(&engine, &stop).await;
        let newest = u64::from(Versions::OURS.max);
        let too_old = blocking(&runtime, move || {
            let own = v1::Own { versions: (0, 0), ..v1::Own::new(9) };
            v1::dial(&mut TcpStream::connect(address).unwrap(), &own)
        });
        assert_eq!(too_old.await, v1::Met::Refused(Field::Version.code(), newest, 0));
        // And the other way round: a target that has gone on without us.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let served = blocking(&runtime, move || {
            let own = v1::Own { versions: (98, 99), ..v1::Own::new(9) };
            v1::accept(&mut listener.accept().unwrap().0, &own)
        });
        let OpenError::Hello { why } = engine.open(address).await.unwrap_err() else { panic!("not the hello") };
        assert!(why.contains("protocol version") && why.contains("99"), "{why}");
        assert_eq!(served.await, v1::Met::Refused(1, 99, newest));
    });
}

#[test]
fn another_key_than_that_of_version_1_is_refused_by_today() {
    run(|runtime| async move {
        let (engine, stop) = (engine(&runtime), Stop::new());
        let address = listening(&engine, &stop).await;
        let none = blocking(&runtime, move || {
            v1::dial(&mut TcpStream::connect(address).unwrap(), &v1::Own { key: None, ..v1::Own::new(9) })
        });
        assert_eq!(none.await, v1::Met::Refused(Field::Auth.code(), 1, 0));
    });
}
