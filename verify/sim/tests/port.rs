//! Valid sessions with something changed in them, against a live port: nobody falls over, nothing grows, and nobody else
//! notices. `MILLPOND_SESSIONS=10000000 cargo test --release -p millpond-verify-sim --test port` takes the time it takes.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use common::own::Own;
use common::{LEN, Target, link, options, say, warm, writes};
use millpond_core::batch::{Extent, RegionToken};
use millpond_core::wire::frame::{Frame, GoodbyeReason, Proof, Tag, WireExtent, reseal};
use millpond_core::wire::hello::{Hello, HostIdentity, Identity, Purpose};
use millpond_core::wire::session::{Config, Session, State};
use millpond_node::engine::{Backing, Batch, Engine, Options, Rights, Via};

/// Sessions by default.
const SESSIONS: u64 = 4_000;
/// Who send them.
const THREADS: u64 = 4;
/// Sessions of one of them between two words on how far it is.
const SAID_EVERY: u64 = 50_000;
/// Sessions before anything is measured, at most.
const WARM_UP: u64 = 100_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

fn bytes(frame: &Frame<'_>, data: usize) -> Vec<u8> {
    let mut bytes = vec![0; frame.head_len()];
    frame.encode(&mut bytes).unwrap();
    bytes.resize(bytes.len() + data, 0x5a);
    bytes
}

/// What a well-behaved lane says: it proves a capability, writes, reads, pings, cancels, and leaves.
fn frames(generation: u64, token: &RegionToken) -> Vec<Vec<u8>> {
    let region = token.region;
    let extents: [WireExtent; 2] = [Extent::new(region, 0, 64).into(), Extent::new(region, 4096, 128).into()];
    let tag = |ticket| Tag { generation, ticket, slice: 0, attempt: 0 };
    let proofs = [Proof::new(region, token.capability)];
    vec![
        bytes(&Frame::Prove { generation, proofs: &proofs }, 0),
        bytes(&Frame::Write { tag: tag(1), extents: &extents, arrival: None, checksummed: false }, 192),
        bytes(&Frame::Read { tag: tag(2), extents: &extents[..1], checksummed: true }, 0),
        bytes(&Frame::Ping { generation, nonce: 7 }, 0),
        bytes(&Frame::Write { tag: tag(3), extents: &extents[1..], arrival: None, checksummed: false }, 128),
        bytes(&Frame::Cancel { tag: tag(3) }, 0),
        bytes(&Frame::Goodbye { generation, reason: GoodbyeReason::Idle }, 0),
    ]
}

/// Changes a message in one of the ways that a broken or hostile peer might.
fn mutate(message: &mut Vec<u8>, random: &mut Random) {
    if message.is_empty() {
        return;
    }
    match random.below(6) {
        0 => {
            let at = random.below(message.len());
            message[at] ^= 1 << random.below(8);
        }
        1 => (0..8).for_each(|_| {
            let at = random.below(message.len());
            message[at] = u8::try_from(random.below(256)).unwrap();
        }),
        2 => message.truncate(random.below(message.len())),
        3 => {
            let at = random.below(message.len());
            let again = message[at..].to_vec();
            message.extend(again);
        }
        4 => {
            let more: Vec<u8> = (0..1 + random.below(64)).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
            let at = random.below(message.len());
            message.splice(at..at, more);
        }
        // A field that is wrong, under a header checksum that is right.
        _ => {
            let at = random.below(message.len());
            message[at] ^= 1 << random.below(8);
            if message.len() >= millpond_core::wire::frame::HEADER_LEN {
                reseal(message);
            }
        }
    }
}

/// One session, up to the victim's own end of it.
fn session(victim: SocketAddr, node: u64, generation: u64, token: &RegionToken, random: &mut Random) -> bool {
    let mut name = [0xee; 16];
    name[..8].copy_from_slice(&node.to_le_bytes());
    let identity = Identity { node: name, incarnation: 1, host: HostIdentity::UNKNOWN };
    let hello = Hello { purpose: Purpose::Lane { index: 0, generation }, identity, layout: None };
    let mut machine = Session::dial(Config::new(hello), [7; 32]);
    let mut stream = TcpStream::connect(victim).expect("the port answers");
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut first = machine.poll_output().to_vec();
    let spoils_hello = random.one_in(4);
    if spoils_hello {
        mutate(&mut first, random);
    }
    let mut was_welcome = false;
    // Whoever closes on us in the middle is in his right.
    let _ = stream.write_all(&first).and_then(|()| {
        let mut heard = [0; 512];
        while !spoils_hello && machine.wants() > 0 {
            let wanted = machine.wants().min(heard.len());
            stream.read_exact(&mut heard[..wanted])?;
            machine.on_bytes(&heard[..wanted]);
        }
        was_welcome = matches!(machine.state(), State::Established(_));
        let mut said = frames(generation, token);
        for _ in 0..random.below(4) {
            let at = random.below(said.len());
            match random.below(4) {
                0 => {
                    let other = random.below(said.len());
                    said.swap(at, other);
                }
                1 => {
                    let again = said[at].clone();
                    said.push(again);
                }
                _ => mutate(&mut said[at], random),
            }
        }
        // All of it at once, or in pieces that end anywhere.
        let said = said.concat();
        let piece = if random.one_in(2) { said.len() } else { 1 + random.below(said.len().max(1)) };
        said.chunks(piece.max(1)).try_for_each(|piece| stream.write_all(piece))
    });
    let _ = stream.shutdown(Shutdown::Write);
    let (mut rest, mut waits) = ([0; 4096], 0);
    loop {
        match stream.read(&mut rest) {
            Ok(1..) => {}
            // Twice: the time that this process was stopped for, at either end, counts for once.
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                waits += 1;
                assert!(waits < 2, "the victim keeps a session whose other end left");
            }
            _ => return was_welcome,
        }
    }
}

/// An engine that leaves the cores to those who attack, and for which time that the process was stopped for ends nothing.
fn quiet(node: u8) -> Options {
    let mut options = options(node, 1);
    options.spin = millpond_core::time::Duration::ZERO;
    options.progress_deadline = millpond_core::time::Duration::from_secs(600);
    options
}

fn held() -> (u64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    (line.trim().trim_end_matches(" kB").parse().unwrap(), std::fs::read_dir("/proc/self/fd").unwrap().count())
}

#[test]
fn sessions_with_something_changed_harm_nobody_and_leave_nothing() {
    let count = std::env::var("MILLPOND_SESSIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(SESSIONS);
    let runtime = Own::start().unwrap();
    let victim = Target::start(&runtime, quiet(2));
    // Memory for strangers; the victim's own is the healthy peer's.
    let rights = Rights::REMOTE_WRITE | Rights::REMOTE_READ;
    let bait = victim.engine.allocate_raw(8192, Backing::Memfd, rights).unwrap();
    let token = victim.engine.expose(&bait).unwrap();
    let here = Engine::start(runtime.clone(), quiet(1)).unwrap();
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let to = link(&here, victim.address, &victim.token);
    warm(&here, &source, &to, Via::Tcp);
    let (is_over, moved, welcome) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let attack = |from: u64, count: u64| {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (welcome, token, address) = (&welcome, &token, victim.address);
                scope.spawn(move || {
                    let mut random = Random(from + thread);
                    let mut node = from + thread;
                    for number in 0..count / THREADS {
                        if thread == 0 && number % SAID_EVERY == SAID_EVERY - 1 {
                            say(&format!("{} of {count} sessions, {:?}", number * THREADS, held()));
                        }
                        let is_in = session(address, node, from + number + 1, token, &mut random);
                        welcome.fetch_add(u64::from(is_in), Relaxed);
                        // A hello that was changed may have introduced a later incarnation: comes as somebody new.
                        node += if is_in { 0 } else { THREADS };
                    }
                });
            }
        });
    };
    attack(0, (count / 4).min(WARM_UP));
    let before = held();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0_u8;
            while !is_over.load(Relaxed) {
                round = round.wrapping_add(1);
                source.write_at(0, &vec![round; 64 * 512]).unwrap();
                let batch = writes(Batch::new().via(Via::Tcp), &source, &to, 64, 512);
                let report = here.blocking().run(batch).unwrap();
                assert!(report.is_done(), "{:?}", report.into_done().err());
                let mut there = vec![0; 64 * 512];
                victim.memory.read_at(0, &mut there).unwrap();
                assert!(there.iter().all(|byte| *byte == round), "a stranger wrote into somebody's memory");
                moved.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        attack(1 << 40, count);
        is_over.store(true, Relaxed);
    });
    let (moved, welcome, lost) = (moved.into_inner(), welcome.load(Relaxed), here.statistics().lanes_lost);
    let mut now = held();
    for _ in 0..100 {
        if now.1 <= before.1 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
        now = held();
    }
    say(&format!("{count} sessions, {welcome} welcome, {moved} batches beside them; {before:?} became {now:?}"));
    assert!(welcome > count / 4 && moved > 0, "too few were let in to show anything");
    assert_eq!(lost, 0, "the healthy peer lost a lane");
    assert!(now.0 <= before.0 + before.0 / 20 + 2048 && now.1 <= before.1, "{before:?} became {now:?}");
}
