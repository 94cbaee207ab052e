//! Several ways to one peer: two addresses, and two transports. What one of them does when another fails, and heals.
//!
//! Between the engines stand proxies that pass on so many bytes a second, or nothing, or close: what a slower NIC and a
//! broken cable do. Lanes of shared memory are broken where they are: their sockets, in this process, are shut down.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_node::engine::{Backing, Batch, Engine, Grant, Options, PathState, Peer, RegionBytes, RemoteRegion, Via};
use millpond_node::runtime::{Runtime, Stop};
use millpond_tokio::Tokio;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};

/// How often a proxy looks whether it still is to pass anything on.
const LOOK: std::time::Duration = std::time::Duration::from_millis(2);

/// A way to a listener that passes on `rate` bytes a second, and while it is `cut` closes whatever comes.
struct Way {
    address: SocketAddr,
    is_cut: AtomicBool,
    /// Passed on so far, in both directions.
    passed: AtomicU64,
    rate: u64,
}

impl Way {
    async fn to(target: SocketAddr, rate: u64) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let way = Arc::new(Self { address, is_cut: AtomicBool::new(false), passed: AtomicU64::new(0), rate });
        let accepting = Arc::clone(&way);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(target).await else { continue };
                let way = Arc::clone(&accepting);
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                tokio::spawn(async move {
                    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                    tokio::select! {
                        () = way.pump(near_in, far_out) => {}
                        () = way.pump(far_in, near_out) => {}
                    }
                });
            }
        });
        way
    }

    async fn pump(&self, mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf) {
        let mut buffer = vec![0; 64 << 10];
        let mut free_at = tokio::time::Instant::now();
        while !self.is_cut.load(Ordering::Relaxed) {
            match tokio::time::timeout(LOOK, from.read(&mut buffer)).await {
                Ok(Ok(0) | Err(_)) => return,
                Ok(Ok(len)) => {
                    if to.write_all(&buffer[..len]).await.is_err() {
                        return;
                    }
                    self.passed.fetch_add(len as u64, Ordering::Relaxed);
                    let span = std::time::Duration::from_nanos(len as u64 * 1_000_000_000 / self.rate);
                    // What a pause was too long by is made good by the next ones.
                    free_at = free_at.max(tokio::time::Instant::now() - 4 * LOOK) + span;
                    tokio::time::sleep_until(free_at).await;
                }
                Err(_) => {}
            }
        }
    }
}

const UNLIMITED: u64 = 1 << 40;
/// Batches over which shares are measured: each is divided by what was measured of the ways before it.
const ROUNDS: u64 = 8;

/// Memory of one engine that another one writes.
struct Two {
    here: Engine<Tokio>,
    source: RegionBytes,
    grant: Grant,
    remote: RemoteRegion,
    peer: Peer,
    ways: Vec<Arc<Way>>,
    _there: Engine<Tokio>,
    _stop: Stop,
}

/// Two engines with a way of each rate between them. On one host they have shared memory as well.
async fn two(runtime: &Tokio, node: u8, host: HostIdentity, rates: &[u64], len: u64) -> Two {
    let engine = |node| {
        let mut options = Options::new(Identity { node: [node; 16], incarnation: 1, host });
        options.progress_deadline = Duration::from_secs(20);
        Engine::start(runtime.clone(), options).unwrap()
    };
    let (here, there, stop) = (engine(node), engine(node + 1), Stop::new());
    let listening = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
    let mut ways = Vec::new();
    for rate in rates {
        ways.push(Way::to(listening, *rate).await);
    }
    let addresses: Vec<SocketAddr> = ways.iter().map(|way| way.address).collect();
    let peer = here.open_ways(&addresses).await.unwrap();
    let target = there.allocate(len, Backing::Memfd).unwrap();
    let mut source = here.allocate(len, Backing::Memfd).unwrap().carve(0, len).unwrap();
    for (piece, at) in source.chunks_mut(PIECE_LEN).zip(0_usize..) {
        piece.fill(byte_of(at));
    }
    let source = source.freeze();
    let grant = there.grant_write(vec![target.carve(0, len).unwrap()]).unwrap();
    let remote = here.attach(&peer, &grant.token()).unwrap();
    Two { here, source, grant, remote, peer, ways, _there: there, _stop: stop }
}

impl Two {
    /// Writes of all the memory, `len` bytes each.
    fn batch(&self, len: usize) -> Batch {
        let mut batch = Batch::with_capacity(self.source.len() / len);
        for at in 0..self.source.len() / len {
            let target = self.remote.extent((at * len) as u64, len as u64).unwrap();
            batch.push_write(self.source.slice(at * len..(at + 1) * len), target);
        }
        batch
    }

    /// Waits until `is_so` of the paths; the watch over the whole test bounds it.
    async fn until(&self, is_so: impl Fn(&[PathState]) -> bool) -> Vec<PathState> {
        loop {
            let paths = self.here.paths(&self.peer);
            if is_so(&paths) {
                return paths;
            }
            self.here.runtime().sleep(Duration::from_millis(2)).await;
        }
    }

    async fn check(self) {
        let written = self.grant.close().await.pop().unwrap();
        for (piece, at) in written.chunks(PIECE_LEN).zip(0_usize..) {
            assert!(piece.iter().all(|there| *there == byte_of(at)), "piece {at}");
        }
    }
}

/// The bytes of a piece of this length are alike.
const PIECE_LEN: usize = 64 << 10;

fn byte_of(piece: usize) -> u8 {
    u8::try_from(piece % 251).unwrap() + 1
}

fn open_over(paths: &[PathState], via: Via) -> usize {
    paths.iter().filter(|path| path.is_open && path.end.via == via).count()
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(|runtime| async move {
        let bounded = tokio::time::timeout(std::time::Duration::from_secs(100), test(runtime));
        bounded.await.expect("the test took longer than 100 seconds");
    })
    .unwrap();
}

#[test]
fn two_addresses_of_a_peer_share_its_bytes_as_their_links_allow() {
    run(|runtime| async move {
        let len = 256 << 10;
        let two = two(&runtime, 1, HostIdentity::UNKNOWN, &[24 << 20, 8 << 20], 16 << 20).await;
        two.until(|paths| open_over(paths, Via::Tcp) == 2).await;
        // The first rounds find out how fast each is: while all is lent to the first way, nothing is known of the second.
        for _ in 0..2 {
            assert!(two.here.submit(two.batch(len)).unwrap().await.is_done());
        }
        let before: Vec<u64> = two.ways.iter().map(|way| way.passed.load(Ordering::Relaxed)).collect();
        let paths_before = two.here.paths(&two.peer);
        let mut last = None;
        for _ in 0..ROUNDS {
            last = Some(two.here.submit(two.batch(len)).unwrap().await.into_done().unwrap());
        }
        let report = last.unwrap();
        let passed: Vec<u64> =
            two.ways.iter().zip(&before).map(|(way, before)| way.passed.load(Ordering::Relaxed) - before).collect();
        let counted: Vec<u64> =
            two.here.paths(&two.peer).iter().zip(&paths_before).map(|(now, then)| now.bytes - then.bytes).collect();
        assert_eq!(counted.iter().sum::<u64>(), ROUNDS * (16 << 20));
        let why = two.here.explain(report.id()).unwrap().to_string();
        for way in &two.ways {
            assert!(why.contains(&format!("(tcp to {})", way.address)), "{why}");
        }
        // 3 : 1, within a tenth.
        for (what, bytes) in [("proxies", &passed), ("engine", &counted)] {
            let ratio = bytes[0] * 100 / bytes[1].max(1);
            assert!((270..=330).contains(&ratio), "{what}: {bytes:?}; {why}");
        }
        two.check().await;
    });
}

#[test]
fn an_address_that_goes_away_in_mid_batch_fails_no_request_and_is_used_again_when_it_is_back() {
    run(|runtime| async move {
        let len = 256 << 10;
        let two = two(&runtime, 11, HostIdentity::UNKNOWN, &[32 << 20, 32 << 20], 32 << 20).await;
        two.until(|paths| open_over(paths, Via::Tcp) == 2).await;
        for cut in 0..2 {
            let way = &two.ways[cut];
            let transfer = two.here.submit(two.batch(len)).unwrap();
            let passed = way.passed.load(Ordering::Relaxed);
            while way.passed.load(Ordering::Relaxed) < passed + (2 << 20) {
                tokio::time::sleep(LOOK).await;
            }
            way.is_cut.store(true, Ordering::Relaxed);
            let report = transfer.await;
            assert!(report.is_done() && report.retries() > 0, "{report:?}");
            let why = two.here.explain(report.id()).unwrap();
            let used = why.paths.paths().filter(|(_, _, slices)| *slices > 0).count();
            assert!(used >= 2, "both are named: {why}");
            // It heals. Work finds it, within the longest wait between two dials.
            way.is_cut.store(false, Ordering::Relaxed);
            let healed = runtime.now();
            let before = way.passed.load(Ordering::Relaxed);
            while way.passed.load(Ordering::Relaxed) < before + (1 << 20) {
                assert!(two.here.submit(two.batch(len)).unwrap().await.is_done());
            }
            assert!(runtime.now().since(healed) < Duration::from_secs(10));
        }
        two.check().await;
    });
}

/// Shuts down the sockets of the lanes of shared memory to a node, in this process.
fn break_shm(node: u8) -> usize {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let name = format!("millpond-{}-", format!("{node:02x}").repeat(16));
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let fds =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut broken = 0;
    for fd in fds.collect::<Vec<i32>>() {
        let Ok(socket) = pidfd_getfd(&own, fd, PidfdGetfdFlags::empty()) else { continue };
        let peer = rustix::net::getpeername(&socket).ok().flatten();
        let is_lane = |address: rustix::net::SocketAddrAny| {
            let unix = rustix::net::SocketAddrUnix::try_from(address).ok()?;
            Some(unix.abstract_name()?.starts_with(name.as_bytes()))
        };
        if peer.and_then(is_lane) == Some(true) {
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
            broken += 1;
        }
    }
    broken
}

#[test]
fn a_lane_of_shared_memory_that_breaks_under_a_batch_is_replaced_by_tcp_and_comes_back() {
    run(|runtime| async move {
        let host = HostIdentity { boot: [7; 16], namespaces: [u64::from(std::process::id()); 3] };
        let two = two(&runtime, 21, host, &[UNLIMITED], 64 << 20).await;
        two.until(|paths| open_over(paths, Via::Shm) == 1).await;
        let mut names_both = 0;
        for round in 1..=20 {
            // Under way over shared memory, all of it: what fails does so at completion. What is submitted behind a lane that
            // is broken and was not found out yet fails at submit, or soon after.
            let transfers: Vec<_> = (0..2).map(|_| two.here.submit(two.batch(4 << 20)).unwrap()).collect();
            assert!(break_shm(22) > 0, "round {round}: a lane of shared memory was there");
            let late = two.here.submit(two.batch(4 << 20)).unwrap();
            for transfer in transfers.into_iter().chain([late]) {
                let report = transfer.await;
                assert!(report.is_done(), "round {round}: {report:?}");
                let why = two.here.explain(report.id()).unwrap().to_string();
                names_both += u32::from(report.retries() > 0 && why.contains("(shm)") && why.contains("(tcp to "));
            }
            // Back on shared memory.
            let healed = runtime.now();
            loop {
                let report = two.here.submit(two.batch(4 << 20)).unwrap().await.into_done().unwrap();
                if report.via() == Some(Via::Shm) {
                    break;
                }
                runtime.sleep(Duration::from_millis(5)).await;
            }
            assert!(runtime.now().since(healed) < Duration::from_secs(10));
        }
        assert!(names_both > 0, "no batch of twenty rounds was caught under way");
        two.check().await;
    });
}
