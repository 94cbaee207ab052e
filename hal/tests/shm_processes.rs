//! The shm backend between two processes: bytes, the death of a peer, and a peer that is stopped.
//!
//! The test binary starts itself again as the peer, which only `peer_process` does something for.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use millpond_core::batch::{Extent, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};
use millpond_hal::backend::shm::{ShmDevice, ShmOptions};
use millpond_hal::contract::{Connection, End, Lane, LaneSide, LinkDownReason, LinkId, Turn};
use millpond_hal::fabric::{
    Batch, Completion, Fabric, FabricOptions, FabricWake, LinkOptions, PostOptions, Request, Ticket,
};
use millpond_hal::region::{Region, RegionBytes};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use zerocopy::{FromBytes, IntoBytes};

const SOCKET: &str = "MILLPOND_TEST_SHM_SOCKET";
const LEN: u64 = 32 << 20;
const PROGRESS_DEADLINE: Duration = Duration::from_millis(400);

struct Side {
    fabric: Fabric,
    link: LinkId,
    start: std::time::Instant,
}

impl Side {
    fn new(stream: UnixStream, side: LaneSide) -> Self {
        let (own, peer) = if side == LaneSide::Dialed { (1, 2) } else { (2, 1) };
        let mut fabric = Fabric::new(FabricOptions::new([own; 32])).unwrap();
        let options = ShmOptions { progress_deadline: PROGRESS_DEADLINE };
        let device = fabric.add_device(Box::new(ShmDevice::new(options).unwrap())).unwrap();
        stream.set_nonblocking(true).unwrap();
        let lane = Lane { side, generation: 1, incarnation: u64::from(own), peer_incarnation: peer };
        let connection = Connection::Stream { fd: OwnedFd::from(stream), read_ahead: Vec::new(), lane };
        let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
        let link = fabric.open(Instant::ZERO, device, connection, options).unwrap();
        Self { fabric, link, start: std::time::Instant::now() }
    }

    fn now(&self) -> Instant {
        Instant::ZERO + Duration::from(self.start.elapsed())
    }

    /// One turn; waits up to 50 ms for the next when there was nothing to do.
    fn turn(&mut self) {
        let now = self.now();
        if self.fabric.poll(now) == Turn::Worked {
            return;
        }
        while self.fabric.next_event().is_some() {}
        let FabricWake::Within(within) = self.fabric.arm(now) else { return };
        let nanos = within.unwrap_or(Duration::MAX).min(Duration::from_millis(50)).as_nanos();
        let wait = Timespec { tv_sec: 0, tv_nsec: i64::try_from(nanos).unwrap() };
        let fd = self.fabric.wake_fd();
        rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap();
    }

    fn post(&mut self, batch: Batch) -> Ticket {
        let (now, link) = (self.now(), self.link);
        self.fabric.post(now, link, batch, PostOptions::default()).unwrap()
    }

    fn end(&mut self, ticket: Ticket) -> Completion {
        let start = self.now();
        while !self.fabric.is_finished(&ticket) {
            assert!(self.now().since(start) < Duration::from_secs(20), "the batch never ends");
            self.turn();
        }
        self.fabric.take(ticket).unwrap()
    }

    fn filled(&mut self, seed: u8) -> (Region, RegionBytes) {
        let region = self.fabric.allocate(LEN, Default::default()).unwrap();
        let mut buffer = region.carve(0, LEN).unwrap();
        buffer.fill(seed);
        (region, buffer.freeze())
    }
}

fn hex(token: &RegionToken) -> String {
    token.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn token(hex: &str) -> RegionToken {
    let bytes: Vec<u8> = (0..64).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
    RegionToken::read_from_bytes(&bytes).unwrap()
}

/// The peer: grants memory, says so on its output, serves, and answers questions from its input.
#[test]
fn peer_process() {
    let Ok(name) = std::env::var(SOCKET) else { return };
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let mut side = Side::new(stream, LaneSide::Dialed);
    let region = side.fabric.allocate(LEN, Default::default()).unwrap();
    let grant = side.fabric.grant_write(vec![region.carve(0, LEN).unwrap()]).unwrap();
    let (_readable, bytes) = side.filled(0x77);
    let read_grant = side.fabric.grant_read(vec![bytes]).unwrap();
    println!("\nTOKENS {} {}", hex(&grant.token()), hex(&read_grant.token()));
    let (questions, asked) = mpsc::channel();
    let waker = side.fabric.waker();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let _ = questions.send(line.unwrap_or_default());
            waker.wake();
        }
        // The other process is gone or done with us.
        std::process::exit(0);
    });
    let mut grant = Some(grant);
    loop {
        side.turn();
        match asked.try_recv().as_deref() {
            Ok("arrived") => {
                let id = grant.as_ref().unwrap().id();
                println!("\nARRIVED {}", side.fabric.arrived(id, 0));
            }
            Ok("sum") => {
                let buffer = side.fabric.close(grant.take().unwrap()).pop().unwrap();
                println!("\nSUM {}", buffer.iter().map(|&byte| u64::from(byte)).sum::<u64>());
            }
            _ => {}
        }
    }
}

struct Peer {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    side: Side,
    target: RegionId,
    source: RegionId,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(test: &str) -> Self {
        let name = format!("millpond-test-{}-{test}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer_process", "--nocapture"])
            .env(SOCKET, &name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stream = listener.accept().unwrap().0;
        let mut side = Side::new(stream, LaneSide::Accepted);
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let line = answer(&mut out, "TOKENS ");
        let (target, source) = line.split_once(' ').unwrap();
        let (target, source) = (side.fabric.attach(token(target)).unwrap(), side.fabric.attach(token(source)).unwrap());
        Self { child, out, side, target, source }
    }

    /// Sends it. A peer that is to stop has stopped afterwards: until then it may serve on.
    fn signal(&self, signal: Signal) {
        let peer = Pid::from_child(&self.child);
        kill_process(peer, signal).unwrap();
        if signal == Signal::STOP {
            let (_, status) = waitpid(Some(peer), WaitOptions::UNTRACED).unwrap().unwrap();
            assert!(status.stopped(), "{status:?}");
        }
    }

    /// Asks, and keeps our own side going meanwhile.
    fn ask(&mut self, question: &str, prefix: &str) -> u64 {
        writeln!(self.child.stdin.as_mut().unwrap(), "{question}").unwrap();
        answer(&mut self.out, prefix).parse().unwrap()
    }

    fn write_all(&mut self, bytes: &RegionBytes) -> Ticket {
        let mut batch = Batch::new();
        batch.write(bytes.clone(), Extent::new(self.target, 0, LEN)).arrival(self.target, 0, 1);
        self.side.post(batch)
    }
}

fn answer(out: &mut impl BufRead, prefix: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "the peer process ended before it said {prefix}");
        if let Some(rest) = line.strip_prefix(prefix) {
            return rest.trim().to_owned();
        }
    }
}

#[test]
fn bytes_move_both_ways_between_processes() {
    let mut peer = Peer::start("bytes");
    let (region, bytes) = peer.side.filled(3);
    let ticket = peer.write_all(&bytes);
    assert!(peer.side.end(ticket).is_done());
    drop(bytes);
    let mut batch = Batch::new();
    batch.read(Extent::new(peer.source, 0, LEN), region.carve(0, LEN).unwrap());
    let ticket = peer.side.post(batch);
    let completion = peer.side.end(ticket);
    assert!(completion.is_done(), "{completion:?}");
    let Some(Request::Read { target, .. }) = completion.into_batch().drain().next() else { panic!("it was a read") };
    assert!(target.iter().all(|&byte| byte == 0x77));
    assert_eq!(peer.ask("arrived", "ARRIVED "), 1);
    assert_eq!(peer.ask("sum", "SUM "), 3 * LEN);
}

#[test]
fn a_killed_peer_is_noticed_within_100_ms() {
    // A machine that is busy with other things may be late once.
    let took: Vec<Duration> = (0..3).map(kill_one).collect();
    assert!(took.iter().min().unwrap() < &Duration::from_millis(100), "{took:?}");
}

fn kill_one(round: u32) -> Duration {
    let mut peer = Peer::start(&format!("kill{round}"));
    let (region, bytes) = peer.side.filled(3);
    // In flight when it dies: stopped first, so that it cannot be through before.
    peer.signal(Signal::STOP);
    let ticket = peer.write_all(&bytes);
    drop(bytes);
    peer.side.turn();
    let start = peer.side.now();
    peer.signal(Signal::KILL);
    let completion = peer.side.end(ticket);
    let took = peer.side.now().since(start);
    assert!(matches!(completion.outcome(0).end, End::LinkDown(LinkDownReason::PeerGone)), "{completion:?}");
    drop(completion);
    assert_eq!(region.lease_count(), 0, "the memory is ours again");
    took
}

#[test]
fn a_stopped_peer_is_given_up_and_takes_nothing_for_done_later() {
    let mut peer = Peer::start("stop");
    let (region, bytes) = peer.side.filled(3);
    let ticket = peer.write_all(&bytes);
    assert!(peer.side.end(ticket).is_done());
    peer.signal(Signal::STOP);
    let ticket = peer.write_all(&bytes);
    drop(bytes);
    let start = peer.side.now();
    let completion = peer.side.end(ticket);
    let took = peer.side.now().since(start);
    assert!(took >= PROGRESS_DEADLINE && took < PROGRESS_DEADLINE + Duration::from_secs(2), "{took}");
    assert!(matches!(completion.outcome(0).end, End::LinkDown(LinkDownReason::Stalled)), "{completion:?}");
    drop(completion);
    // Quiet here: other bytes may stand where the batch's were. The peer wakes up and must not count them.
    region.carve(0, LEN).unwrap().fill(0xFF);
    peer.signal(Signal::CONT);
    for _ in 0..20 {
        peer.side.turn();
    }
    assert_eq!(peer.ask("arrived", "ARRIVED "), 1);
}
