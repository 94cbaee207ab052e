//! The rdma backend on a real device: in Soft-RoCE guests, started by `verify/rxe/run`, or on any host with an RDMA NIC.
//!
//! Nothing here runs by itself: each test is ignored by name, since a host without a device proves nothing. The device is the
//! first one, or `MILLPOND_RDMA_DEVICE`. Two guests find each other by `MILLPOND_RDMA_PEER`, the address of the one that
//! serves; what they tell each other, records first, goes over TCP, as a session would carry it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::OnceLock;

use millpond_core::batch::{Extent, RegionId, RegionToken, Rights};
use millpond_core::time::{Duration, Instant};
use millpond_hal::backend::rdma::{Endpoint, Nic, RdmaDevice, RdmaOptions};
use millpond_hal::backend::rdma_verbs::Ibverbs;
use millpond_hal::conformance::{Clock, Pair};
use millpond_hal::contract::{Connection, End, Lane, LaneSide, LinkDownReason, LinkId, Refusal, Turn};
use millpond_hal::fabric::{
    AllocateOptions, Batch, Completion, DeviceId, Fabric, FabricEvent, FabricOptions, LinkOptions, PostOptions, Ticket,
};
use millpond_hal::region::Region;
use zerocopy::{FromBytes, IntoBytes};

/// Links in a guest, whose CPU is emulated, get more time than the suite's own, and less than it allows.
const PROGRESS_DEADLINE: Duration = Duration::from_millis(900);
/// Where the two guests meet.
const PORT: u16 = 7471;

fn now() -> Instant {
    static START: OnceLock<std::time::Instant> = OnceLock::new();
    let start = START.get_or_init(std::time::Instant::now);
    Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).expect("a short test"))
}

fn options() -> RdmaOptions {
    // Between guests: an emulated CPU may be away for longer than the 67 ms that a NIC waits by default.
    let ack_timeout_exponent = if std::env::var_os("MILLPOND_RDMA_PEER").is_some() { 17 } else { 14 };
    RdmaOptions { piece_len_max: 128 << 10, ack_timeout_exponent, ..RdmaOptions::default() }
}

fn verbs() -> Ibverbs {
    let name = std::env::var("MILLPOND_RDMA_DEVICE").ok();
    Ibverbs::open(name.as_deref(), 1).expect("an RDMA device: run this in a guest, by verify/rxe/run")
}

fn nic() -> Nic {
    Nic::new(Box::new(verbs()), options()).expect("a device that can be used")
}

fn lane(side: LaneSide) -> Lane {
    let (incarnation, peer_incarnation) = if side == LaneSide::Dialed { (1, 2) } else { (2, 1) };
    Lane { side, generation: 3, incarnation, peer_incarnation }
}

/// One end.
struct Node {
    fabric: Fabric,
    device: DeviceId,
    nic: Nic,
}

impl Node {
    fn new(own: u8, nic: Nic) -> Self {
        let mut fabric = Fabric::new(FabricOptions::new([own; 32])).unwrap();
        let device = fabric.add_device(Box::new(RdmaDevice::new(nic.clone()))).unwrap();
        Self { fabric, device, nic }
    }

    fn open(&mut self, connection: Connection, deadline: Duration) -> LinkId {
        let options = LinkOptions::with_progress_deadline(deadline);
        self.fabric.open(now(), self.device, connection, options).unwrap()
    }
}

/// Two ends on one device, which reaches itself.
struct Ends {
    here: Node,
    there: Node,
    verbs: Ibverbs,
    link: LinkId,
    link_there: LinkId,
}

fn connected(one: &Nic, two: &Nic) -> (Connection, Connection) {
    let (dialing, accepting): (Endpoint, Endpoint) = (one.endpoint().unwrap(), two.endpoint().unwrap());
    let (record, record_back) = (dialing.record(), accepting.record());
    let accepted = accepting.connect(&record, lane(LaneSide::Accepted)).unwrap();
    (dialing.connect(&record_back, lane(LaneSide::Dialed)).unwrap(), accepted)
}

impl Ends {
    fn new() -> Self {
        let verbs = verbs();
        let nic = Nic::new(Box::new(verbs.clone()), options()).unwrap();
        let (mut here, mut there) = (Node::new(1, nic.clone()), Node::new(2, self::nic()));
        let (connection, connection_there) = connected(&here.nic, &there.nic);
        let (link, link_there) =
            (here.open(connection, PROGRESS_DEADLINE), there.open(connection_there, PROGRESS_DEADLINE));
        Self { here, there, verbs, link, link_there }
    }

    fn reopen(&mut self) {
        let (connection, connection_there) = connected(&self.here.nic, &self.there.nic);
        (self.link, self.link_there) =
            (self.here.open(connection, PROGRESS_DEADLINE), self.there.open(connection_there, PROGRESS_DEADLINE));
    }

    fn step(&mut self) {
        let turns = [self.here.fabric.poll(now()), self.there.fabric.poll(now())];
        if turns == [Turn::Idle; 2] {
            std::thread::yield_now();
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = now();
        while !done(self) {
            assert!(now().since(start) < Duration::from_secs(30), "gave up waiting for {what}");
            self.step();
        }
    }

    fn end(&mut self, ticket: Ticket) -> Completion {
        self.until("a ticket", |ends| ends.here.fabric.is_finished(&ticket));
        assert_eq!(self.here.fabric.stats().events_unknown, 0);
        self.here.fabric.take(ticket).unwrap()
    }

    fn post(&mut self, batch: Batch) -> Ticket {
        self.here.fabric.post(now(), self.link, batch, PostOptions::default()).unwrap()
    }
}

#[test]
#[ignore = "needs an RDMA device: verify/rxe/run starts it in a Soft-RoCE guest"]
fn a_real_device_conforms() {
    millpond_hal::conformance::run(&mut || {
        let Ends { here, there, link, link_there, .. } = Ends::new();
        Pair::new(here.fabric, link, there.fabric, link_there, Clock::Real(std::time::Instant::now()))
    });
}

/// Numbers that look random, the same for each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn raw(fabric: &mut Fabric, len: u64) -> Region {
    fabric.allocate(len, AllocateOptions::raw(Rights::REMOTE_READ | Rights::REMOTE_WRITE)).unwrap()
}

fn stamp(region: &Region, offset: u64, len: u64, seed: u64) {
    let bytes: Vec<u8> = (0..len).map(|at| u8::try_from((at * 31 + seed * 7 + (at >> 8)) % 251).unwrap()).collect();
    region.write_at(offset, &bytes).unwrap();
}

/// A batch of random pieces between two regions: writes to the peer, or reads back; the same ones for the same dice.
fn pieces(dice: &mut Dice, len: u64) -> Vec<(u64, u64)> {
    let mut at = 0;
    let mut pieces = Vec::new();
    while at < len {
        let size = 1 + match dice.below(4) {
            0 => dice.below(200),
            1 => dice.below(5000),
            2 => dice.below(70_000),
            _ => dice.below(600_000),
        };
        let size = size.min(len - at);
        pieces.push((at, size));
        at += size;
    }
    pieces
}

/// Writes `total` bytes in batches of random pieces from one region and reads them into another, comparing each round.
fn churn(
    node: &mut Node,
    link: LinkId,
    there: RegionId,
    total: u64,
    mut turn: impl FnMut(&mut Node),
) -> Result<u64, End> {
    const LEN: u64 = 4 << 20;
    let (source, back) = (raw(&mut node.fabric, LEN), raw(&mut node.fabric, LEN));
    let (mut dice, mut moved, mut round) = (Dice(7), 0, 0);
    while moved < total {
        round += 1;
        stamp(&source, 0, LEN, round);
        for reads in [false, true] {
            let all = pieces(&mut dice, LEN);
            let mut tickets = Vec::new();
            for group in all.chunks(64) {
                let mut batch = Batch::new();
                for &(at, len) in group {
                    if reads {
                        batch.read_raw(Extent::new(there, at, len), back.extent(at, len));
                    } else {
                        batch.write_raw(source.extent(at, len), Extent::new(there, at, len));
                    }
                }
                if !reads {
                    batch.arrival(there, 0, 1);
                }
                match node.fabric.post(now(), link, batch, PostOptions::default()) {
                    Ok(ticket) => tickets.push(ticket),
                    Err(refused) => panic!("{:?}", refused.reason),
                }
            }
            for ticket in tickets {
                let start = now();
                while !node.fabric.is_finished(&ticket) {
                    turn(node);
                    assert!(now().since(start) < Duration::from_secs(60), "a batch hangs");
                }
                let completion = node.fabric.take(ticket).unwrap();
                if !completion.is_done() {
                    return Err(completion.overall().end);
                }
            }
            moved += LEN;
        }
        let len = usize::try_from(LEN).unwrap();
        let (mut sent, mut came) = (vec![0; len], vec![0; len]);
        source.read_at(0, &mut sent).unwrap();
        back.read_at(0, &mut came).unwrap();
        assert!(sent == came, "round {round}: other bytes came back");
    }
    Ok(moved)
}

fn churn_len() -> u64 {
    let mib = std::env::var("MILLPOND_RDMA_MIB").ok().map_or(64, |mib| mib.parse::<u64>().expect("a number of MiB"));
    mib << 20
}

#[test]
#[ignore = "needs an RDMA device: verify/rxe/run starts it in a Soft-RoCE guest"]
fn random_batches_arrive_as_they_were_sent() {
    let Ends { mut here, mut there, link, .. } = Ends::new();
    let region = raw(&mut there.fabric, 4 << 20);
    let token = there.fabric.expose(&region).unwrap();
    let target = here.fabric.attach(token).unwrap();
    let start = now();
    let turn = |node: &mut Node| {
        node.fabric.poll(now());
        there.fabric.poll(now());
    };
    let moved = churn(&mut here, link, target, churn_len(), turn).unwrap();
    println!("{} MiB verified in {} ms", moved >> 20, now().since(start).as_millis());
}

#[test]
#[ignore = "needs an RDMA device: verify/rxe/run starts it in a Soft-RoCE guest"]
fn a_void_key_refuses_its_move_and_the_link_lives_on() {
    let mut ends = Ends::new();
    for round in 0..20u64 {
        let region_there = ends.there.fabric.allocate(1 << 20, AllocateOptions::default()).unwrap();
        let grant = ends.there.fabric.grant_write(vec![region_there.carve(0, 1 << 20).unwrap()]).unwrap();
        let there = ends.here.fabric.attach(grant.token()).unwrap();
        let source = ends.here.fabric.allocate(1 << 20, AllocateOptions::default()).unwrap();
        let write = |len: u64| {
            let mut batch = Batch::new();
            let mut bytes = source.carve(0, len).unwrap();
            bytes.fill(u8::try_from(round + 1).unwrap());
            batch.write(bytes.freeze(), Extent::new(there, 0, len));
            batch
        };
        let ticket = ends.post(write(1000));
        assert!(ends.end(ticket).is_done());
        // The grant ends there, and nobody here has heard of it: the write goes out with a key that is void.
        let target = ends.there.fabric.close(grant).pop().unwrap();
        let before = target.to_vec();
        let ticket = ends.post(write(300_000));
        let end = ends.end(ticket).outcome(0).end;
        assert_eq!(end, End::Refused(Refusal::Stale), "round {round}");
        (0..50).for_each(|_| ends.step());
        assert!(before == target[..], "bytes came through a void key");
    }
    assert!(ends.here.fabric.link(ends.link).is_some());
    println!("{} queues were made anew", ends.here.nic.counts().queues_remade);
    assert!(ends.here.nic.counts().queues_remade > 0, "no write met a void key: the test has proven nothing");
}

#[test]
#[ignore = "needs an RDMA device: verify/rxe/run starts it in a Soft-RoCE guest"]
fn queue_pairs_that_break_under_load_end_every_ticket_once() {
    let mut ends = Ends::new();
    let region_there = raw(&mut ends.there.fabric, 4 << 20);
    let token = ends.there.fabric.expose(&region_there).unwrap();
    let there = ends.here.fabric.attach(token).unwrap();
    let source = raw(&mut ends.here.fabric, 4 << 20);
    for round in 0..4 {
        let tickets: Vec<_> = (0..16u64)
            .map(|at| {
                let mut batch = Batch::new();
                batch.write_raw(source.extent(at << 17, 1 << 17), Extent::new(there, at << 17, 1 << 17));
                batch.arrival(there, 0, 1);
                ends.post(batch)
            })
            .collect();
        (0..10 + round * 20).for_each(|_| ends.step());
        ends.verbs.fail_all();
        let start = now();
        for ticket in tickets {
            let end = ends.end(ticket).outcome(0).end;
            assert!(matches!(end, End::Done | End::LinkDown(_)), "{end:?}");
        }
        assert!(now().since(start) < Duration::from_secs(4), "a broken queue pair held its tickets");
        let link = ends.link;
        ends.until("the link's end", |ends| ends.here.fabric.link(link).is_none());
        // The other end has nothing on its way and heard no goodbye; it finds out by a ping, some time. A new link needs no more.
        ends.reopen();
    }
    let mut batch = Batch::new();
    batch.write_raw(source.extent(0, 4096), Extent::new(there, 0, 4096));
    let ticket = ends.post(batch);
    assert!(ends.end(ticket).is_done(), "a new link works");
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().expect("the guest has ip and tc");
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

fn ip(arguments: &[&str]) {
    run("ip", arguments);
}

fn interface() -> String {
    std::env::var("MILLPOND_RDMA_INTERFACE").expect("the network interface under the device")
}

#[test]
#[ignore = "needs an RDMA device: verify/rxe/run starts it in a Soft-RoCE guest"]
fn a_port_that_goes_down_under_load_is_an_error_and_works_again_when_it_is_up() {
    let mut ends = Ends::new();
    let region_there = raw(&mut ends.there.fabric, 4 << 20);
    let token = ends.there.fabric.expose(&region_there).unwrap();
    let there = ends.here.fabric.attach(token).unwrap();
    let source = raw(&mut ends.here.fabric, 4 << 20);
    let batch = |at: u64| {
        let mut batch = Batch::new();
        batch.write_raw(source.extent(at << 17, 1 << 17), Extent::new(there, at << 17, 1 << 17));
        batch
    };
    let tickets: Vec<_> = (0..16).map(|at| ends.post(batch(at))).collect();
    let name = interface();
    ip(&["link", "set", &name, "down"]);
    let start = now();
    for ticket in tickets {
        let end = ends.end(ticket).outcome(0).end;
        assert!(matches!(end, End::Done | End::LinkDown(_)), "{end:?}");
    }
    let link = ends.link;
    ends.until("the link's end", |ends| ends.here.fabric.link(link).is_none());
    assert!(now().since(start) < Duration::from_secs(4), "a port that is down was noticed late");
    // The device's own event may come after the failed requests.
    ends.until("the event", |ends| ends.here.nic.is_down() && ends.here.nic.counts().port_downs == 1);
    ip(&["link", "set", &name, "up"]);
    let link_there = ends.link_there;
    ends.until("the other end's end", |ends| ends.there.fabric.link(link_there).is_none());
    // The port is up when the device says so, which may take a moment after the interface.
    let port_is_up = |ends: &mut Ends| {
        ends.here.fabric.arm(now());
        ends.there.fabric.arm(now());
        !ends.here.nic.is_down() && !ends.there.nic.is_down() && ends.here.nic.endpoint().is_ok()
    };
    ends.until("the port", port_is_up);
    ends.reopen();
    let ticket = ends.post(batch(3));
    assert!(ends.end(ticket).is_done());
}

// Two guests.

fn send(stream: &mut TcpStream, bytes: &[u8]) {
    let len = u32::try_from(bytes.len()).unwrap();
    stream.write_all(&len.to_le_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

fn receive(stream: &mut TcpStream) -> Vec<u8> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// The guest that serves: takes one session after the other, until one says that it was the last.
#[test]
#[ignore = "one of two guests: verify/rxe/run"]
fn two_guests_the_one_that_serves() {
    let mut node = Node::new(2, nic());
    let region = raw(&mut node.fabric, 4 << 20);
    let token = node.fabric.expose(&region).unwrap();
    let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        let record = receive(&mut stream);
        let endpoint = node.nic.endpoint().unwrap();
        let own = endpoint.record();
        let connection = endpoint.connect(&record, lane(LaneSide::Accepted)).unwrap();
        node.open(connection, PROGRESS_DEADLINE);
        send(&mut stream, &own);
        send(&mut stream, token.as_bytes());
        stream.set_nonblocking(true).unwrap();
        let mut word = [0; 1];
        loop {
            if node.fabric.poll(now()) == Turn::Idle {
                std::thread::yield_now();
            }
            while node.fabric.next_event().is_some() {}
            match stream.read(&mut word) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Ok(1) if word == *b"q" => return,
                // As a host does that loses its power.
                Ok(1) if word == *b"b" => std::fs::write("/proc/sysrq-trigger", "b").unwrap(),
                _ => break,
            }
        }
    }
}

struct Session {
    node: Node,
    link: LinkId,
    there: RegionId,
    stream: TcpStream,
}

fn session(nic: Nic) -> Session {
    let peer = std::env::var("MILLPOND_RDMA_PEER").expect("the address of the guest that serves");
    let start = now();
    let mut stream = loop {
        match TcpStream::connect((peer.as_str(), PORT)) {
            Ok(stream) => break stream,
            Err(error) => assert!(now().since(start) < Duration::from_secs(180), "no other guest: {error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    let mut node = Node::new(1, nic);
    let endpoint = node.nic.endpoint().unwrap();
    send(&mut stream, &endpoint.record());
    let record = receive(&mut stream);
    let connection = endpoint.connect(&record, lane(LaneSide::Dialed)).unwrap();
    let link = node.open(connection, Duration::from_secs(20));
    let token = RegionToken::read_from_bytes(&receive(&mut stream)).unwrap();
    let there = node.fabric.attach(token).unwrap();
    Session { node, link, there, stream }
}

fn poll(node: &mut Node) {
    if node.fabric.poll(now()) == Turn::Idle {
        std::thread::yield_now();
    }
}

/// The guest that asks: random batches, as they are and with loss and delay.
#[test]
#[ignore = "one of two guests: verify/rxe/run"]
fn two_guests_the_one_that_asks() {
    let name = interface();
    let Session { mut node, link, there, stream: _session } = session(nic());
    let moved = churn(&mut node, link, there, churn_len() / 4, poll).unwrap();
    println!("between guests: {} MiB verified", moved >> 20);

    run("tc", &["qdisc", "add", "dev", &name, "root", "netem", "delay", "10ms", "loss", "1%"]);
    let lossy = churn(&mut node, link, there, 8 << 20, poll);
    println!("1 % loss, 10 ms delay: {lossy:?}");
    assert!(matches!(lossy, Ok(_) | Err(End::LinkDown(_))), "{lossy:?}");
    run("tc", &["qdisc", "del", "dev", &name, "root"]);
}

/// Not part of `verify/rxe/run` by default: two emulated guests take minutes for it. `ONLY=two_guests_a_port_and_a_reset`.
#[test]
#[ignore = "one of two guests: ONLY=two_guests_a_port_and_a_reset verify/rxe/run two"]
fn two_guests_a_port_and_a_reset() {
    let name = interface();
    let Session { mut node, link, there, stream } = session(nic());
    let mut steps = 0;
    let flapped = churn(&mut node, link, there, 16 << 20, |node| {
        steps += 1;
        if steps == 200 {
            ip(&["link", "set", &name, "down"]);
            ip(&["link", "set", &name, "up"]);
        }
        if steps % 64 == 0 {
            node.fabric.arm(now());
        }
        poll(node);
    });
    println!("link down and up: {flapped:?}");
    assert!(matches!(flapped, Ok(_) | Err(End::LinkDown(_))), "{flapped:?}");
    // The other one takes one session after the other.
    drop((node, stream));

    let Session { mut node, link, there, mut stream } = session(nic());
    assert!(churn(&mut node, link, there, 8 << 20, poll).is_ok(), "it works again after the flap");
    let mut reset_at = None;
    let ended = churn(&mut node, link, there, 1 << 40, |node| {
        if reset_at.is_none() {
            stream.write_all(b"b").unwrap();
            reset_at = Some(now());
        }
        poll(node);
    });
    let waited = now().since(reset_at.unwrap());
    println!("the peer's reset: {ended:?} after {} ms", waited.as_millis());
    assert!(matches!(ended, Err(End::LinkDown(LinkDownReason::PeerGone | LinkDownReason::Stalled))), "{ended:?}");
    // Two seconds on real hardware; the emulated guest and its reset take their time as well.
    assert!(waited < Duration::from_secs(6), "a peer that is gone was noticed late");
    let downs = core::iter::from_fn(|| node.fabric.next_event());
    assert_eq!(downs.filter(|event| matches!(event, FabricEvent::LinkDown { .. })).count(), 1);
}
