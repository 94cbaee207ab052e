//! Peers that stop, go on, are killed, or lose their links in silence: what an engine's caller sees of it, and when.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::own::Own;
use common::{LEN, Process, Target, link, options, say, warm, writes};
use millpond_node::engine::{Arrival, Backing, Batch, Engine, Rights, Via};
use rustix::process::{Pid, Signal, kill_process};

/// The progress deadline of engines, by default.
const DEADLINE: Duration = Duration::from_secs(5);
/// Machines that run tests are busy.
const SLACK: Duration = Duration::from_millis(1500);

#[test]
fn peer_process() {
    common::be_a_peer();
}

fn engine(node: u8) -> Engine<Own> {
    Engine::start(Own::start().unwrap(), options(node, 1)).unwrap()
}

fn stop_and_go_on(node: u8, via: Via) {
    let (here, peer) = (engine(node), Process::start(node + 1, 1));
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let there = link(&here, peer.address, &peer.token);
    warm(&here, &source, &there, via);
    peer.signal(Signal::STOP);
    let start = Instant::now();
    let report = here.blocking().run(writes(Batch::new().via(via), &source, &there, 8, 1 << 20)).unwrap();
    let took = start.elapsed();
    assert!(!report.is_done(), "{via}: a stopped peer took everything");
    assert!(took < DEADLINE + SLACK, "{via}: {took:?}: {:?}", report.into_done().err());
    peer.signal(Signal::CONT);
    let start = Instant::now();
    let report = here.blocking().run(writes(Batch::new().via(via), &source, &there, 8, 64)).unwrap();
    let took = start.elapsed();
    say(&format!("{via}: done {took:?} after it goes on"));
    assert!(report.is_done(), "{via}: {:?}", report.into_done().err());
    assert!(took < SLACK, "{via}: {took:?}");
}

#[test]
fn a_stopped_peer_over_tcp_ends_the_call_by_its_deadline_and_works_at_once_when_it_goes_on() {
    stop_and_go_on(10, Via::Tcp);
}

#[test]
fn a_stopped_peer_over_shm_ends_the_call_by_its_deadline_and_works_at_once_when_it_goes_on() {
    stop_and_go_on(20, Via::Shm);
}

/// Set in a child that is stopped itself.
const STOPPED: &str = "MILLPOND_TEST_STOPPED";

/// Moves batches between two engines of this process until its input ends, and tells what it lost.
#[test]
fn stopped_process() {
    if std::env::var_os(STOPPED).is_none() {
        return;
    }
    let runtime = Own::start().unwrap();
    let impatient = |node| {
        let mut options = options(node, 1);
        options.progress_deadline = millpond_core::time::Duration::from_secs(1);
        options
    };
    let there = Target::start(&runtime, impatient(61));
    let here = Engine::start(runtime, impatient(60)).unwrap();
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let to = link(&here, there.address, &there.token);
    warm(&here, &source, &to, Via::Tcp);
    let is_over = Arc::new(AtomicBool::new(false));
    let watched = Arc::clone(&is_over);
    std::thread::spawn(move || {
        std::io::stdin().lines().for_each(drop);
        watched.store(true, Relaxed);
    });
    println!("\nREADY");
    let mut failed = 0;
    while !is_over.load(Relaxed) {
        let all = writes(Batch::new().via(Via::Tcp), &source, &to, 8, 1 << 20);
        failed += u32::from(!here.blocking().run(all).unwrap().is_done());
    }
    let counted = here.statistics();
    println!("\nLOST {failed} {} {}", counted.lanes_lost, counted.retries);
    std::process::exit(0);
}

#[test]
fn engines_that_were_stopped_themselves_blame_no_lane() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stopped_process", "--nocapture"])
        .env(STOPPED, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(output.any(|line| line == "READY"));
    let process = Pid::from_child(&child);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(100));
        kill_process(process, Signal::STOP).unwrap();
        // More than the progress deadline of its engines.
        std::thread::sleep(Duration::from_millis(1500));
        kill_process(process, Signal::CONT).unwrap();
    }
    std::thread::sleep(Duration::from_millis(100));
    drop(child.stdin.take());
    let lost = output.find(|line| line.starts_with("LOST")).unwrap();
    child.wait().unwrap();
    assert_eq!(lost, "LOST 0 0 0", "batches that failed, lanes, retries");
}

/// From the kill to the end of a call that was under way, and of the next one.
fn kill(node: u8, via: Via) -> [Duration; 2] {
    let (here, peer) = (engine(node), Process::start(node + 1, 1));
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let there = link(&here, peer.address, &peer.token);
    warm(&here, &source, &there, via);
    // Under way when it dies: stopped first, so that it cannot be through before.
    peer.signal(Signal::STOP);
    let blocking = here.blocking();
    let transfer = blocking.submit(writes(Batch::new().via(via), &source, &there, 8, 1 << 20)).unwrap();
    let start = Instant::now();
    peer.signal(Signal::KILL);
    let report = blocking.wait(transfer);
    let first = start.elapsed();
    assert!(!report.is_done(), "{via}");
    let start = Instant::now();
    let report = blocking.run(writes(Batch::new().via(via), &source, &there, 1, 64)).unwrap();
    assert!(!report.is_done(), "{via}");
    [first, start.elapsed()]
}

/// A machine that is busy with other things may be late once.
fn assert_noticed(node: u8, via: Via) {
    let took: Vec<_> = (0..3).map(|round| kill(node + 2 * round, via)).collect();
    say(&format!("{via}: calls end {took:?} after a kill"));
    for which in 0..2 {
        assert!(took.iter().map(|took| took[which]).min().unwrap() < Duration::from_millis(100), "{via}: {took:?}");
    }
}

#[test]
fn a_peer_that_is_killed_over_tcp_is_an_error_within_100_ms() {
    assert_noticed(30, Via::Tcp);
}

#[test]
fn a_peer_that_is_killed_over_shm_is_an_error_within_100_ms() {
    assert_noticed(40, Via::Shm);
}

/// Batches of 64 pages done in a span.
fn rate(here: &Engine<Own>, source: &millpond_node::engine::Region, to: &common::Link, span: Duration) -> u32 {
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < span {
        let report = here.blocking().run(writes(Batch::new().via(Via::Tcp), source, to, 64, 4096)).unwrap();
        assert!(report.is_done());
        count += 1;
    }
    count
}

#[test]
#[ignore = "measures a rate: a quiet machine; see its output"]
fn a_healthy_peer_keeps_nine_tenths_of_its_rate_beside_a_stopped_one() {
    let here = engine(50);
    let (healthy, stopped) = (Process::start(51, 1), Process::start(52, 1));
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let (to_healthy, to_stopped) =
        (link(&here, healthy.address, &healthy.token), link(&here, stopped.address, &stopped.token));
    warm(&here, &source, &to_healthy, Via::Tcp);
    warm(&here, &source, &to_stopped, Via::Tcp);
    let span = Duration::from_secs(2);
    let mut ratios: Vec<f64> = Vec::new();
    for round in 0..5 {
        let alone = rate(&here, &source, &to_healthy, span);
        // A lane that was idle ends soon when nothing comes back over it, and what waits for it with it: this one is in use.
        warm(&here, &source, &to_stopped, Via::Tcp);
        stopped.signal(Signal::STOP);
        let waiting: Vec<_> = (0..8)
            .map(|_| here.submit(writes(Batch::new().via(Via::Tcp), &source, &to_stopped, 8, 1 << 20)).unwrap())
            .collect();
        let beside = rate(&here, &source, &to_healthy, span);
        let stuck = waiting.iter().filter(|transfer| !transfer.is_over()).count();
        stopped.signal(Signal::CONT);
        let ends: Vec<_> =
            waiting.into_iter().map(|transfer| here.blocking().wait(transfer).into_done().err()).collect();
        warm(&here, &source, &to_stopped, Via::Tcp);
        ratios.push(f64::from(beside) / f64::from(alone));
        say(&format!("round {round}: {alone} batches alone, {beside} beside {stuck} that are stuck"));
        assert!(stuck > 0, "nobody was stuck: the test shows nothing: {ends:?}");
    }
    ratios.sort_by(f64::total_cmp);
    say(&format!("median {:.3}", ratios[2]));
    assert!(ratios[2] >= 0.9, "{ratios:?}");
}

#[test]
#[ignore = "measures: a quiet machine, in release; see its output"]
fn small_moves_over_shm_are_timed() {
    let (here, peer) = (engine(80), Process::start(81, 1));
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let to = link(&here, peer.address, &peer.token);
    warm(&here, &source, &to, Via::Shm);
    let blocking = here.blocking();
    for what in ["write", "read", "write and arrival"] {
        let mut batch = Batch::new();
        let mut took: Vec<Duration> = Vec::new();
        for _ in 0..200_000 {
            batch = batch.via(Via::Shm);
            let remote = to.remote.extent(0, 4096).unwrap();
            let _index = match what {
                "read" => batch.push_read_raw(remote, &source, 0),
                _ => batch.push_write_raw(&source, 0, remote),
            };
            if what == "write and arrival" {
                batch = batch.arrival(Arrival { counter: 1, amount: 1 });
            }
            let start = Instant::now();
            let report = blocking.run(batch).unwrap();
            took.push(start.elapsed());
            assert!(report.is_done());
            batch = report.into_batch();
        }
        took.sort_unstable();
        say(&format!("{what}: median {:?}, p10 {:?}, p99 {:?}", took[100_000], took[20_000], took[198_000]));
    }
}

/// What a proxy does to connections that are idle.
struct Proxy {
    address: SocketAddr,
    /// Connections from before are dead from now on: nothing passes, and nobody is told.
    silenced: Arc<AtomicU32>,
    opened: Arc<AtomicU32>,
}

impl Proxy {
    fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (silenced, opened) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (silence, number) = (Arc::clone(&silenced), Arc::clone(&opened));
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { continue };
                let name = number.fetch_add(1, Relaxed);
                let ended = Arc::new(AtomicBool::new(false));
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    from.set_nodelay(true).unwrap();
                    let (silence, ended) = (Arc::clone(&silence), Arc::clone(&ended));
                    std::thread::spawn(move || pass(from, to, &ended, || name < silence.load(Relaxed)));
                }
            }
        });
        Self { address, silenced, opened }
    }

    fn silence(&self) {
        self.silenced.store(self.opened.load(Relaxed), Relaxed);
    }
}

/// Passes bytes on; what comes in once the connection is silent goes nowhere, and the other end never hears of it.
fn pass(mut from: TcpStream, mut to: TcpStream, ended: &AtomicBool, is_silent: impl Fn() -> bool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if !is_silent() && to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    if !is_silent() && !ended.swap(true, Relaxed) {
        let _ = to.shutdown(Shutdown::Both);
    }
}

#[test]
fn a_link_that_was_dropped_in_silence_is_replaced_at_its_first_use() {
    let (runtime, here) = (Own::start().unwrap(), engine(60));
    let there = Target::start(&runtime, options(61, 1));
    let proxy = Proxy::start(there.address);
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let to = link(&here, proxy.address, &there.token);
    warm(&here, &source, &to, Via::Tcp);
    for round in 0..3 {
        // Idle for a moment, as a proxy's table forgets it.
        std::thread::sleep(Duration::from_millis(300));
        proxy.silence();
        let start = Instant::now();
        let report = here.blocking().run(writes(Batch::new().via(Via::Tcp), &source, &to, 2000, 64)).unwrap();
        let took = start.elapsed();
        say(&format!("round {round}: 2,000 slices done {took:?} after the link was dropped in silence"));
        assert!(report.is_done(), "round {round}: {:?}", report.into_done().err());
        assert!(took < here.options().connect_deadline.into() || took < SLACK, "{took:?}");
    }
    assert_eq!(here.statistics().transfers_refused, 0);
}
