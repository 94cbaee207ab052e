//! Rails: RDMA between two engines, each pair of NICs a path of its own, over NICs in memory that can lie, fail and heal.

use millpond_core::time::Duration;
use millpond_core::topology::Medium;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_hal::backend::rdma::fake::{FakeNic, Wire};
use millpond_hal::backend::rdma::{Nic, RdmaOptions};
use millpond_node::engine::{
    Backing, Batch, Cause, DowngradeReason, Engine, Grant, Options, OwnNic, PathState, Peer, RegionBytes, RemoteRegion,
    Via,
};
use millpond_node::runtime::{Runtime, Stop};
use millpond_tokio::Tokio;

const SECOND: Duration = Duration::from_secs(1);
/// Bytes of one request.
const LEN: u64 = 1 << 20;

/// Two engines with NICs on one wire; what one writes is memory of the other.
struct Two {
    here: Engine<Tokio>,
    there: Engine<Tokio>,
    nics: Vec<FakeNic>,
    source: RegionBytes,
    grant: Grant,
    remote: RemoteRegion,
    peer: Peer,
    _stop: Stop,
}

fn engine(runtime: &Tokio, node: u8, nics: &[FakeNic]) -> Engine<Tokio> {
    let mut options = Options::new(Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN });
    options.nics = nics
        .iter()
        .map(|nic| {
            let opened = Nic::new(Box::new(nic.clone()), RdmaOptions::default()).unwrap();
            OwnNic::new(opened, Medium::Roce).unwrap()
        })
        .collect();
    Engine::start(runtime.clone(), options).unwrap()
}

async fn two(runtime: &Tokio, node: u8, count: usize, requests: u64, adjust: impl Fn(&[FakeNic])) -> Two {
    let wire = Wire::default();
    let names: Vec<String> = (0..count).map(|index| format!("mlx5_{index}")).collect();
    let make = || names.iter().map(|name| FakeNic::named(&wire, name)).collect::<Vec<_>>();
    let (nics, nics_there) = (make(), make());
    adjust(&nics);
    let (here, there) = (engine(runtime, node, &nics), engine(runtime, node + 1, &nics_there));
    let stop = Stop::new();
    let address = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
    let peer = here.open(address).await.unwrap();
    let len = requests * LEN;
    let target = there.allocate(len, Backing::Memfd).unwrap();
    let mut source = here.allocate(len, Backing::Memfd).unwrap().carve(0, len).unwrap();
    for (piece, at) in source.chunks_mut(usize::try_from(LEN).unwrap()).zip(0_usize..) {
        piece.fill(byte_of(at));
    }
    let source = source.freeze();
    let grant = there.grant_write(vec![target.carve(0, len).unwrap()]).unwrap();
    let remote = here.attach(&peer, &grant.token()).unwrap();
    Two { here, there, nics, source, grant, remote, peer, _stop: stop }
}

impl Two {
    /// Writes of all the memory.
    fn batch(&self) -> Batch {
        let (mut batch, len) = (Batch::new(), usize::try_from(LEN).unwrap());
        for at in 0..self.source.len() / len {
            let target = self.remote.extent(at as u64 * LEN, LEN).unwrap();
            batch.push_write(self.source.slice(at * len..(at + 1) * len), target);
        }
        batch
    }

    /// Waits until that many rails are open.
    async fn rails(&self, count: usize) -> Vec<PathState> {
        let start = self.here.runtime().now();
        loop {
            let paths = self.here.paths(&self.peer);
            let open: Vec<PathState> = paths.iter().filter(|path| is_open_rail(path)).cloned().collect();
            if open.len() == count {
                return open;
            }
            assert!(self.here.runtime().now().since(start) < Duration::from_secs(60), "{count} rails of {paths:?}");
            // Work is what has paths dialled.
            assert!(self.here.submit(self.batch()).unwrap().await.is_done());
            self.here.runtime().sleep(Duration::from_millis(2)).await;
        }
    }

    fn downgrades(&self, reason: DowngradeReason) -> u64 {
        let all = self.here.statistics().downgrades();
        all.filter(|way| (way.from, way.to, way.reason) == (Via::Rdma, Via::Tcp, reason)).map(|way| way.count).sum()
    }

    async fn check(self) {
        let written = self.grant.close().await.pop().unwrap();
        for (piece, at) in written.chunks(usize::try_from(LEN).unwrap()).zip(0_usize..) {
            assert!(piece.iter().all(|there| *there == byte_of(at)), "piece {at}");
        }
    }
}

fn byte_of(piece: usize) -> u8 {
    u8::try_from(piece % 251).unwrap() + 1
}

fn is_open_rail(path: &PathState) -> bool {
    path.is_open && path.end.via == Via::Rdma
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(|runtime| async move {
        let bounded = tokio::time::timeout(std::time::Duration::from_secs(100), test(runtime));
        bounded.await.expect("the test took longer than 100 seconds");
    })
    .unwrap();
}

#[test]
fn rails_carry_batches_both_ways_once_their_byte_tests_passed() {
    run(|runtime| async move {
        let two = two(&runtime, 1, 2, 16, |_| {}).await;
        let rails = two.rails(2).await;
        let mut names: Vec<String> = rails.iter().map(|path| path.end.to_string()).collect();
        names.sort();
        assert_eq!(names, ["rdma from mlx5_0 to mlx5_0", "rdma from mlx5_1 to mlx5_1"]);
        let report = two.here.submit(two.batch()).unwrap().await.into_done().unwrap();
        assert_eq!(report.via(), Some(Via::Rdma));
        let why = two.here.explain(report.id()).unwrap().to_string();
        assert!(why.contains("passed its byte test") && why.contains("rdma from mlx5_0 to mlx5_0"), "{why}");
        // The other end may post over them as well, reads too.
        let to_here = two.there.peer(&two.here.options().identity, SECOND).await.unwrap();
        let mut bytes = two.here.allocate(LEN, Backing::Memfd).unwrap().carve(0, LEN).unwrap();
        bytes.fill(77);
        let shared = two.here.grant_read(vec![bytes.freeze()]).unwrap();
        let remote = two.there.attach(&to_here, &shared.token()).unwrap();
        let into = two.there.allocate(LEN, Backing::Memfd).unwrap();
        let batch = Batch::new().via(Via::Rdma).read(remote.whole(), into.carve(0, LEN).unwrap());
        let report = two.there.submit(batch).unwrap().await.into_done().unwrap();
        assert!(report.into_buffers().unwrap()[0].iter().all(|byte| *byte == 77));
        assert_eq!(two.here.statistics().pairs_refuted + two.there.statistics().pairs_refuted, 0);
        two.check().await;
    });
}

#[test]
fn a_nic_whose_driver_moves_nothing_carries_nothing_and_the_other_one_everything() {
    run(|runtime| async move {
        let two = two(&runtime, 11, 2, 16, |nics| nics[0].set_lying(true)).await;
        let rails = two.rails(1).await;
        assert!(rails[0].end.to_string().starts_with("rdma from mlx5_1 "), "{:?}", rails[0].end);
        // Over either NIC of the peer.
        while two.here.statistics().pairs_refuted < 2 {
            assert!(two.here.submit(two.batch()).unwrap().await.is_done());
        }
        // However long it is asked.
        let tested = two.nics[0].bytes_done();
        for _ in 0..20 {
            let report = two.here.submit(two.batch()).unwrap().await.into_done().unwrap();
            assert_eq!(report.via(), Some(Via::Rdma));
        }
        assert_eq!(two.nics[0].bytes_done(), tested, "nothing but byte tests went over it");
        assert!(two.here.statistics().pairs_refuted > 0);
        two.check().await;
    });
}

#[test]
fn without_a_pair_that_passed_tcp_carries_all_and_says_why_until_a_link_event() {
    run(|runtime| async move {
        let two = two(&runtime, 21, 1, 4, |nics| nics[0].set_lying(true)).await;
        while two.downgrades(DowngradeReason::Refuted) == 0 {
            let report = two.here.submit(two.batch()).unwrap().await.into_done().unwrap();
            assert_eq!(report.via(), Some(Via::Tcp));
        }
        let tested = two.nics[0].bytes_done();
        let start = runtime.now();
        let error = two.here.submit(two.batch().via(Via::Rdma)).unwrap().await.into_done().unwrap_err();
        assert!(runtime.now().since(start) < SECOND, "a transport that was named is used, or refused at once");
        let Cause::NoPath { via: Via::Rdma, why } = error.first.cause else { panic!("{error}") };
        assert!(why.contains("reports success and moves other bytes, or none"), "{why}");
        assert_eq!(two.nics[0].bytes_done(), tested, "it was not even tried again");
        // Its link goes down and up, with another driver.
        two.nics[0].set_up(false);
        two.nics[0].set_lying(false);
        two.nics[0].set_up(true);
        let healed = runtime.now();
        two.rails(1).await;
        assert!(runtime.now().since(healed) < Duration::from_secs(10));
        let report = two.here.submit(two.batch()).unwrap().await.into_done().unwrap();
        assert_eq!(report.via(), Some(Via::Rdma));
        two.check().await;
    });
}

/// Rounds in each of which something is done to a NIC under a batch; no request fails, and what was taken away is used again.
async fn no_request_fails(runtime: &Tokio, two: Two, fail: impl Fn(&Two, u8), heal: impl Fn(&Two, u8), rails: usize) {
    let (mut caught, mut named_both) = (0, 0);
    for round in 1..=12 {
        two.rails(rails).await;
        let before: u64 = two.nics.iter().map(FakeNic::bytes_done).sum();
        let transfer = two.here.submit(two.batch()).unwrap();
        // Bounded: it may have gone another way altogether.
        for _ in 0..200 {
            if two.nics.iter().map(FakeNic::bytes_done).sum::<u64>() >= before + 8 * LEN {
                break;
            }
            runtime.sleep(Duration::from_millis(1)).await;
        }
        fail(&two, round);
        // The one behind finds the path broken at submit, or soon after.
        let behind = two.here.submit(two.batch()).unwrap();
        for transfer in [transfer, behind] {
            let report = transfer.await;
            assert!(report.is_done(), "round {round}: {report:?}");
            let why = two.here.explain(report.id()).unwrap();
            caught += u32::from(report.retries() > 0);
            named_both += u32::from(why.paths.paths().filter(|(_, _, slices)| *slices > 0).count() > 1);
        }
        heal(&two, round);
        let healed = runtime.now();
        two.rails(rails).await;
        assert!(runtime.now().since(healed) < Duration::from_secs(10));
        // A path that failed is left alone for a moment after it was opened again.
        while two.here.submit(two.batch()).unwrap().await.into_done().unwrap().via() != Some(Via::Rdma) {
            assert!(runtime.now().since(healed) < Duration::from_secs(10), "round {round}");
        }
    }
    assert!(caught > 0 && named_both > 0, "no batch of twelve rounds was caught under way");
    two.check().await;
}

#[test]
fn a_port_that_goes_down_under_a_batch_leaves_it_to_the_other_nic() {
    run(|runtime| async move {
        let two = two(&runtime, 31, 2, 64, |_| {}).await;
        let nic = |two: &Two, round: u8| two.nics[usize::from(round % 2)].clone();
        let (down, up) =
            (|two: &Two, round| nic(two, round).set_up(false), |two: &Two, round| nic(two, round).set_up(true));
        no_request_fails(&runtime, two, down, up, 2).await;
    });
}

#[test]
fn queue_pairs_that_break_under_a_batch_fail_no_request() {
    run(|runtime| async move {
        let two = two(&runtime, 41, 2, 64, |_| {}).await;
        let break_off = |two: &Two, round: u8| two.nics[usize::from(round % 2)].break_queue_pairs();
        no_request_fails(&runtime, two, break_off, |_, _| {}, 2).await;
    });
}

#[test]
fn without_a_nic_that_works_tcp_takes_over_under_a_batch_and_gives_back() {
    run(|runtime| async move {
        let two = two(&runtime, 51, 1, 64, |_| {}).await;
        let (down, up) = (|two: &Two, _| two.nics[0].set_up(false), |two: &Two, _| two.nics[0].set_up(true));
        no_request_fails(&runtime, two, down, up, 1).await;
    });
}

#[test]
fn a_peer_that_ends_at_any_moment_ends_its_rails_and_lanes_at_once() {
    run(|runtime| async move {
        // While its rails are being dialled, tested, entered at one end only, and when all are open.
        for step in 0..16 {
            let two = two(&runtime, 61, 1, 1, |_| {}).await;
            let work = two.here.submit(two.batch()).unwrap();
            runtime.sleep(Duration::from_micros(step * step * 90)).await;
            two.there.shut_down().await;
            let start = runtime.now();
            drop(work.await);
            while two.here.paths(&two.peer).iter().any(|path| path.is_open) {
                let waited = runtime.now().since(start);
                assert!(waited < Duration::from_secs(2), "step {step}: {:?}", two.here.paths(&two.peer));
                runtime.sleep(Duration::from_millis(1)).await;
            }
        }
    });
}
