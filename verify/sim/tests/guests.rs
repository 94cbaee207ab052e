//! Rails on real devices: engines in two Soft-RoCE guests with two NICs each, started by `verify/rxe/run rails`.
//!
//! Nothing here runs by itself: each test is ignored by name. The guest that serves is one process after the other, since
//! some of the tests kill it, or reset its guest; what it is asked for comes over a TCP connection of its own. Memory over
//! there is looked at by its own CPU, never by what a NIC says. CPUs are emulated: shares and spans are looked at, no speeds.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use millpond_core::topology::Medium;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_hal::backend::rdma::{Nic, RdmaOptions};
use millpond_hal::backend::rdma_verbs::Ibverbs;
use millpond_node::engine::{
    Backing, Batch, Engine, Options, OwnNic, PathState, Peer, Region, RegionToken, RemoteRegion, Report, Rights, Via,
};
use millpond_node::runtime::Stop;
use own::Own;
use zerocopy::{FromBytes, IntoBytes};

#[path = "../../examples/own_runtime.rs"]
#[allow(dead_code, reason = "a part of it is used")]
mod own;

/// Where the guest that serves takes sessions and lanes, and where it takes what it is asked for.
const PORT: u16 = 7500;
const CONTROL: u16 = 7501;
/// Its memory, in bytes.
const LEN: u64 = 64 << 20;
/// The guests' addresses begin with these, on the network of each NIC.
const NETWORKS: [&str; 2] = ["10.77.0", "10.78.0"];
const DEVICES: [&str; 2] = ["rxe0", "rxe1"];
const MIB: u64 = 1 << 20;
/// How long paths may take to come up: emulated machines on one that does other things.
const PATIENCE: Duration = Duration::from_secs(150);

/// As fast as acknowledgements come between emulated CPUs; a NIC that is limited keeps them waiting for longer.
const ACKS: u8 = 17;
const ACKS_LIMITED: u8 = 19;

fn mib() -> u64 {
    std::env::var("MILLPOND_RDMA_MIB").ok().map_or(64, |mib| mib.parse().expect("a number of MiB"))
}

fn options(node: u8, transports: &[Via]) -> Options {
    // Those of one name that come later are the newer ones.
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let incarnation = u64::try_from(since.as_millis()).unwrap();
    let mut options = Options::new(Identity { node: [node; 16], incarnation, host: HostIdentity::UNKNOWN });
    options.transports = transports.to_vec();
    options.connect_deadline = millpond_core::time::Duration::from_secs(8);
    options
}

fn nics(count: usize, ack_timeout_exponent: u8) -> (Vec<OwnNic>, Vec<Ibverbs>) {
    let options = RdmaOptions { piece_len_max: 128 << 10, ack_timeout_exponent, ..RdmaOptions::default() };
    let open = |name: &&str| {
        let verbs = Ibverbs::open(Some(name), 1).expect("an RDMA device: run this in a guest, by verify/rxe/run");
        let nic = Nic::new(Box::new(verbs.clone()), options).expect("a device that can be used");
        (OwnNic::new(nic, Medium::Roce).unwrap(), verbs)
    };
    DEVICES[..count].iter().map(open).unzip()
}

/// A number that depends on each byte and its place.
fn digest(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
    words.fold(7, |sum: u64, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Whether this host has RDMA devices: a guest does, a namespace of `verify/rxe/run spaces` does not.
fn has_devices() -> bool {
    std::env::var_os("MILLPOND_RDMA_DEVICE").is_some()
}

#[test]
#[ignore = "one of two guests: verify/rxe/run rails"]
fn the_rails_end_that_serves() {
    let mut with = options(2, &[Via::Rdma, Via::Tcp]);
    if has_devices() {
        with.nics = nics(2, ACKS_LIMITED).0;
    }
    let engine = Engine::start(Own::start().unwrap(), with).unwrap();
    let stop = Stop::new();
    block_on(engine.listen(SocketAddr::from(([0, 0, 0, 0], PORT)), &stop)).unwrap();
    let memory = engine.allocate_raw(LEN, Backing::Heap, Rights::REMOTE_WRITE | Rights::REMOTE_READ).unwrap();
    let token = engine.expose(&memory).unwrap();
    let control = TcpListener::bind(("0.0.0.0", CONTROL)).unwrap();
    for asking in control.incoming() {
        let mut asking = asking.unwrap();
        asking.write_all(token.as_bytes()).unwrap();
        let mut word = [0];
        while let Ok(1) = asking.read(&mut word) {
            match word[0] {
                b'd' => {
                    let mut bytes = vec![0; usize::try_from(LEN).unwrap()];
                    memory.read_at(0, &mut bytes).unwrap();
                    asking.write_all(&digest(&bytes).to_le_bytes()).unwrap();
                }
                // As a host does that loses its power. A namespace's is not to be had by this.
                b'b' if has_devices() => std::fs::write("/proc/sysrq-trigger", "b").unwrap(),
                _ => rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap(),
            }
        }
    }
}

/// The one that asks, and what it knows of the one that serves.
struct Two {
    engine: Engine<Own>,
    verbs: Vec<Ibverbs>,
    control: TcpStream,
    peer: Peer,
    remote: RemoteRegion,
    source: Region,
    copy: Vec<u8>,
    dice: u64,
}

/// Tries for as long as a guest may take to boot.
fn patiently<T, E: std::fmt::Debug>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(found) => return found,
            Err(error) => assert!(start.elapsed() < PATIENCE, "no other guest: {error:?}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

impl Two {
    fn new(node: u8, count: usize, acks: u8, via: Via) -> Self {
        let transports = if via == Via::Tcp { vec![Via::Tcp] } else { vec![Via::Rdma, Via::Tcp] };
        let mut with = options(node, &transports);
        let mut verbs = Vec::new();
        if via == Via::Rdma {
            (with.nics, verbs) = nics(count, acks);
        }
        let engine = Engine::start(Own::start().unwrap(), with).unwrap();
        let source = engine.allocate_raw(LEN, Backing::Heap, Rights::NONE).unwrap();
        // Rails have their own networks; what is not over them goes over the first.
        let ways = if via == Via::Tcp { count } else { 1 };
        let (control, peer, remote) = Self::meet(&engine, ways);
        Self { engine, verbs, control, peer, remote, source, copy: vec![0; usize::try_from(LEN).unwrap()], dice: 1 }
    }

    fn meet(engine: &Engine<Own>, ways: usize) -> (TcpStream, Peer, RemoteRegion) {
        patiently(|| {
            let far = SocketAddr::new(format!("{}.2", NETWORKS[0]).parse().unwrap(), CONTROL);
            let mut control =
                TcpStream::connect_timeout(&far, Duration::from_secs(1)).map_err(|error| error.to_string())?;
            control.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let mut token = [0; size_of::<RegionToken>()];
            control.read_exact(&mut token).map_err(|error| error.to_string())?;
            let ways: Vec<SocketAddr> =
                NETWORKS[..ways].iter().map(|network| format!("{network}.2:{PORT}").parse().unwrap()).collect();
            let peer = block_on(engine.open_ways(&ways)).map_err(|error| error.to_string())?;
            let token = RegionToken::read_from_bytes(&token).unwrap();
            let remote = engine.attach(&peer, &token).map_err(|error| error.to_string())?;
            Ok::<_, String>((control, peer, remote))
        })
    }

    /// The one that serves was started anew.
    fn meet_again(&mut self) {
        (self.control, self.peer, self.remote) = Self::meet(&self.engine, 1);
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % bound
    }

    /// A batch that writes other bytes to `[0, len)` over there, in pieces of at most `piece`.
    fn writes(&mut self, len: u64, piece: u64) -> Batch {
        let seed = self.below(1 << 30);
        let end = usize::try_from(len).unwrap();
        for (at, word) in (seed..).zip(self.copy[..end].chunks_mut(8)) {
            word.copy_from_slice(&at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[..word.len()]);
        }
        self.source.write_at(0, &self.copy[..end]).unwrap();
        self.again(len, piece)
    }

    /// The same bytes again.
    fn again(&self, len: u64, piece: u64) -> Batch {
        let mut batch = Batch::new();
        for at in (0..len).step_by(usize::try_from(piece).unwrap()) {
            batch.push_write_raw(&self.source, at, self.remote.extent(at, piece.min(len - at)).unwrap());
        }
        batch
    }

    fn run(&self, batch: Batch) -> Report {
        self.engine.blocking().run(batch).unwrap()
    }

    fn open_rails(&self) -> Vec<PathState> {
        let paths = self.engine.paths(&self.peer);
        paths.into_iter().filter(|path| path.is_open && path.end.via == Via::Rdma).collect()
    }

    /// Waits until that many rails are open, which work is done to have.
    fn rails(&self, count: usize) {
        let start = Instant::now();
        while self.open_rails().len() != count {
            let report = self.run(self.again(4096, 4096));
            let (paths, counts) = (self.engine.paths(&self.peer), self.engine.statistics());
            assert!(start.elapsed() < PATIENCE, "{paths:?}, {counts:?}: {report:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until work goes over both NICs: a path that failed is left alone for a moment after it was opened again.
    fn spread(&self) {
        let (start, before) = (Instant::now(), self.counters());
        while (0..2).any(|nic| self.counters()[nic] == before[nic]) {
            assert!(self.run(self.again(2 * MIB, MIB)).is_done());
            assert!(start.elapsed() < PATIENCE, "{:?}", self.engine.paths(&self.peer));
        }
    }

    /// What lies over there is what was written.
    fn check(&mut self) {
        self.control.write_all(b"d").unwrap();
        let mut there = [0; 8];
        self.control.read_exact(&mut there).unwrap();
        assert!(u64::from_le_bytes(there) == digest(&self.copy), "other bytes arrived than were sent");
    }

    /// Bytes over each way so far.
    fn counters(&self) -> [u64; 2] {
        let mut bytes = [0; 2];
        for path in self.engine.paths(&self.peer) {
            let way = match (&path.end.nics, path.end.at) {
                (Some((nic, _)), _) => DEVICES.iter().position(|name| *name == nic.as_str()),
                (None, Some(at)) => NETWORKS.iter().position(|network| at.ip().to_string().starts_with(network)),
                (None, None) => None,
            };
            bytes[way.unwrap()] += path.bytes;
        }
        bytes
    }
}

/// Runs a program of the guest's.
fn run(command: &str) {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap()).args(words).status().expect("the guest has ip and tc");
    assert!(status.success(), "{command}: {status}");
}

fn interface(nic: usize) -> String {
    std::env::var("MILLPOND_RDMA_INTERFACES")
        .expect("the network interfaces under the devices")
        .split(' ')
        .nth(nic)
        .unwrap()
        .into()
}

/// Random batches over both rails, and over whatever is left of them: what happens to one NIC fails no request.
#[test]
#[ignore = "one of two guests: verify/rxe/run rails"]
fn rails_outlive_what_happens_to_one_of_two_nics() {
    let mut two = Two::new(11, 2, ACKS, Via::Rdma);
    two.rails(2);
    let len = (mib() << 20).min(LEN);
    let start = Instant::now();
    let mut moved = 0;
    while moved < mib() << 20 {
        let piece = 1 + two.below(300_000);
        let batch = two.writes(len, piece);
        assert!(two.run(batch).is_done());
        two.check();
        moved += len;
    }
    println!("over two rails: {} MiB verified in {:?}, {:?} bytes", moved >> 20, start.elapsed(), two.counters());
    let second = interface(1);
    let (mut retries, mut both) = (0, 0);
    for round in 0..4 {
        let what = ["a link that goes down", "queue pairs that are destroyed"][round % 2];
        two.rails(2);
        two.spread();
        let batch = two.writes(len, MIB);
        let transfer = two.engine.submit(batch).unwrap();
        while transfer.bytes_done() < len / 8 && !transfer.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if round % 2 == 0 {
            run(&format!("ip link set {second} down"));
        } else {
            two.verbs[1].fail_all();
        }
        let report = block_on(transfer);
        assert!(report.is_done(), "{what}: {report:?}");
        two.check();
        retries += report.retries();
        let why = two.engine.explain(report.id()).unwrap();
        both += usize::from(why.paths.paths().filter(|(_, _, slices)| *slices > 0).count() > 1);
        run(&format!("ip link set {second} up"));
        let healed = Instant::now();
        two.rails(2);
        two.spread();
        println!("{what}: done after {} retries, both rails work again in {:?}", report.retries(), healed.elapsed());
        assert!(healed.elapsed() < Duration::from_secs(10));
    }
    assert!(retries > 0 && both > 0, "no batch was caught under way: the test shows nothing");
    for nic in 0..2 {
        run(&format!("tc qdisc add dev {} root netem delay 10ms loss 1%", interface(nic)));
    }
    let (start, mut done) = (Instant::now(), 0);
    for _ in 0..4 {
        let batch = two.writes(len / 4, 100_000);
        if two.run(batch).is_done() {
            done += 1;
            two.check();
        }
    }
    println!("1 % loss, 10 ms delay: {done} of 4 batches done and verified in {:?}", start.elapsed());
    assert!(done > 0, "none got through");
    (0..2).for_each(|nic| run(&format!("tc qdisc del dev {} root", interface(nic))));
    let batch = two.writes(len, MIB);
    assert!(two.run(batch).is_done());
    two.check();
}

/// Batches are under way, one after the other, when the one that serves ends by `word`; gives how long nothing was done any
/// more before one failed. The word itself takes its time to be read by a busy guest.
fn end_under_load(two: &mut Two, word: u8) -> Duration {
    two.rails(2);
    let (asked, mut is_asked, mut moved_at) = (Instant::now(), false, Instant::now());
    loop {
        let batch = two.writes(LEN, MIB).via(Via::Rdma);
        let Ok(transfer) = two.engine.submit(batch) else { return moved_at.elapsed() };
        let mut done = 0;
        while !transfer.is_over() {
            if transfer.bytes_done() > done {
                (done, moved_at) = (transfer.bytes_done(), Instant::now());
                if !std::mem::replace(&mut is_asked, true) {
                    two.control.write_all(&[word]).unwrap();
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let took = moved_at.elapsed();
        if !block_on(transfer).is_done() {
            return took;
        }
        assert!(asked.elapsed() < PATIENCE, "nobody ended");
    }
}

/// The one that serves ends by `word` while nothing is under way; gives how long its rails outlive it.
fn end_while_idle(two: &mut Two, word: u8) -> Duration {
    two.rails(2);
    two.control.write_all(&[word]).unwrap();
    let start = Instant::now();
    while !two.open_rails().is_empty() {
        assert!(start.elapsed() < PATIENCE, "nobody noticed");
        std::thread::sleep(Duration::from_millis(10));
    }
    start.elapsed()
}

fn works_again(two: &mut Two) {
    two.meet_again();
    two.rails(2);
    two.copy.fill(0);
    let batch = two.writes(MIB, 10_000);
    assert!(two.run(batch).is_done());
    two.check();
}

#[test]
#[ignore = "one of two guests: verify/rxe/run rails"]
fn rails_to_a_process_that_is_killed_end_within_two_seconds() {
    let mut two = Two::new(21, 2, ACKS, Via::Rdma);
    let took = end_under_load(&mut two, b'k');
    println!("a kill under load: an error after {took:?}");
    assert!(took < Duration::from_secs(2));
    works_again(&mut two);
    let took = end_while_idle(&mut two, b'k');
    println!("a kill while idle: noticed after {took:?}");
    assert!(took < Duration::from_secs(2));
    works_again(&mut two);
}

#[test]
#[ignore = "one of two guests: verify/rxe/run rails"]
fn rails_to_a_host_that_is_reset_end_and_come_back_with_it() {
    let mut two = Two::new(31, 2, ACKS, Via::Rdma);
    let (took, stopped) = stopped_for(|| end_under_load(&mut two, b'b'));
    println!("a reset under load: an error after {took:?}, {stopped:?} of it stopped");
    // The progress deadline; an emulated guest takes its time as well.
    assert!(took < Duration::from_secs(7) + stopped);
    works_again(&mut two);
    let (took, stopped) = stopped_for(|| end_while_idle(&mut two, b'b'));
    println!("a reset while idle: noticed after {took:?}, {stopped:?} of it stopped");
    assert!(took < Duration::from_secs(20) + stopped);
    works_again(&mut two);
}

/// Limits what leaves over a NIC, in Mbit/s.
fn limit(nic: usize, mbit: u64) {
    // A queue that holds what queue pairs have under way: nothing is lost.
    run(&format!("tc qdisc replace dev {} root tbf rate {mbit}mbit burst 64kb limit 32mb", interface(nic)));
}

/// Longer than this a thread that sleeps for a moment is not kept waiting, unless everything was stopped.
const STOPPED: Duration = Duration::from_secs(1);

/// How long nothing ran here while `what` did, all such times together.
fn stopped_for<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let (mut last, mut stopped) = (Instant::now(), Duration::ZERO);
            while !is_over.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                let (gap, now) = (last.elapsed(), Instant::now());
                stopped += if gap < STOPPED { Duration::ZERO } else { gap };
                last = now;
            }
            stopped
        });
        let came = what();
        is_over.store(true, Relaxed);
        (came, watch.join().unwrap())
    })
}

/// How long a batch in such pieces takes over so many ways, and what goes over each. `None`: it failed.
fn attempt(two: &mut Two, via: Via, ways: usize, piece: u64) -> Option<(Duration, [u64; 2])> {
    let len = (mib() << 20).min(LEN);
    if via == Via::Rdma {
        two.rails(ways);
    }
    if ways == 2 {
        two.spread();
    }
    // What the ways can do is found out by using them.
    let batch = two.writes(len / 4, MIB).via(via);
    if !two.run(batch).is_done() {
        return None;
    }
    let batch = two.writes(len, piece).via(via);
    let (start, before) = (Instant::now(), two.counters());
    let report = two.run(batch);
    let took = start.elapsed();
    if !report.is_done() {
        println!("{report:?}");
        return None;
    }
    two.check();
    let after = two.counters();
    Some((took, [after[0] - before[0], after[1] - before[1]]))
}

/// How long batches take over so many ways, and what goes over each: one request, then one of a MiB for each.
fn measure(node: u8, via: Via, ways: usize) -> [(Duration, [u64; 2]); 2] {
    let mut two = Two::new(node, ways, ACKS_LIMITED, via);
    [(mib() << 20).min(LEN), MIB].map(|piece| {
        for _ in 0..10 {
            let (came, stopped) = stopped_for(|| attempt(&mut two, via, ways, piece));
            println!("{via}, {ways} ways, pieces of {piece}: {came:?}");
            if stopped.is_zero() {
                return came.expect("a batch that nothing disturbed");
            }
            println!("this host was stopped for {stopped:?} meanwhile: once more");
        }
        panic!("this host is stopped all the time: nothing can be measured");
    })
}

fn limits_are_shared(node: u8, via: Via) {
    let mbit: u64 = std::env::var("MILLPOND_RDMA_MBIT").ok().map_or(16, |mbit| mbit.parse().expect("a number"));
    (0..2).for_each(|nic| limit(nic, mbit));
    let (one, both) = (measure(node, via, 1), measure(node + 1, via, 2));
    limit(0, 3 * mbit / 2);
    limit(1, mbit / 2);
    let uneven = measure(node + 2, via, 2);
    (0..2).for_each(|nic| run(&format!("tc qdisc del dev {} root", interface(nic))));
    for ((one, _), (both, _)) in one.iter().zip(&both) {
        let gain = one.as_secs_f64() / both.as_secs_f64();
        println!("{via}: two NICs are {gain:.2} times one");
        assert!(gain >= 1.8);
    }
    for (_, [first, second]) in uneven {
        let ratio = first as f64 / second as f64;
        println!("{via}: limits of 3:1 give {ratio:.2}:1");
        assert!((2.7..=3.3).contains(&ratio));
    }
}

#[test]
#[ignore = "one of two guests, minutes: verify/rxe/run limits"]
fn limits_of_two_nics_are_used_up_by_rails() {
    limits_are_shared(41, Via::Rdma);
}

#[test]
#[ignore = "in one of two network namespaces: verify/rxe/run spaces"]
fn limits_of_two_nics_are_used_up_by_tcp_to_two_addresses() {
    limits_are_shared(51, Via::Tcp);
}
