//! Two engines that talk over real links: tcp and shm, in one process.
#![allow(clippy::cast_possible_truncation)] // test data

use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_node::engine::{
    Arrival, Backing, Batch, Cause, Class, DowngradeReason, Engine, Far, Options, Peer, RefusalReason, Region, Rights,
    Status, Via,
};
use millpond_node::runtime::{Runtime, Stop, blocking};
use millpond_tokio::Tokio;

const SECOND: Duration = Duration::from_secs(1);

fn options(node: u8, incarnation: u64) -> Options {
    let host = HostIdentity { boot: [9; 16], namespaces: [u64::from(std::process::id()); 3] };
    Options::new(Identity { node: [node; 16], incarnation, host })
}

/// An initiator, a target, and each as the other's peer.
struct Pair {
    here: Engine<Tokio>,
    there: Engine<Tokio>,
    to_there: Peer,
    to_here: Peer,
    _stop: Stop,
}

async fn pair(runtime: Tokio, node: u8, adjust: impl Fn(&mut Options)) -> Pair {
    let engine = |node| {
        let mut options = options(node, 1);
        adjust(&mut options);
        Engine::start(runtime.clone(), options).unwrap()
    };
    let (here, there, stop) = (engine(node), engine(node + 1), Stop::new());
    let address = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
    let to_there = here.open(address).await.unwrap();
    let to_here = there.peer(&here.options().identity, SECOND).await.unwrap();
    Pair { here, there, to_there, to_here, _stop: stop }
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(|runtime| async move {
        let bounded = tokio::time::timeout(std::time::Duration::from_secs(60), test(runtime));
        bounded.await.expect("the test took longer than a minute");
    })
    .unwrap();
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251 + seed * 17) as u8).collect()
}

fn filled(region: &Region, offset: u64, bytes: &[u8]) -> millpond_node::engine::RegionBytes {
    let mut buffer = region.carve(offset, bytes.len() as u64).unwrap();
    buffer.copy_from_slice(bytes);
    buffer.freeze()
}

/// Writes and reads of many sizes, scattered, both ways, over one transport.
async fn move_everything(pair: &Pair, via: Via) {
    for (from, to, peer, name) in
        [(&pair.here, &pair.there, &pair.to_there, "dialled"), (&pair.there, &pair.here, &pair.to_here, "accepted")]
    {
        let sizes = [1usize, 4096, 100_000, 1 << 20, (40 << 20) + 123];
        let total: u64 = sizes.iter().map(|size| *size as u64).sum();
        let (source, target) =
            (from.allocate(total, Backing::Memfd).unwrap(), to.allocate(total, Backing::Memfd).unwrap());
        let grant = to.grant_write(vec![target.carve(0, total).unwrap()]).unwrap();
        let remote = from.attach(peer, &grant.token()).unwrap();
        let mut batch = Batch::new().via(via).arrival(Arrival { counter: 5, amount: 3 });
        let mut at = 0;
        for (seed, size) in sizes.iter().enumerate() {
            let bytes = filled(&source, at, &pattern(seed, *size));
            // From the end to the front, so that nothing joins.
            batch.push_write(bytes, remote.extent(total - at - *size as u64, *size as u64).unwrap());
            at += *size as u64;
        }
        let report = from.submit(batch).unwrap().await.into_done().unwrap();
        assert_eq!(report.via(), Some(via), "{name}");
        assert_eq!(grant.arrived(Arrival { counter: 5, amount: 3 }, SECOND).await, Ok(3), "{name}");
        assert_eq!(grant.count(6), 0);
        let written = grant.close().await.pop().unwrap();
        let mut end = total as usize;
        for (seed, size) in sizes.iter().enumerate() {
            assert!(written[end - size..end] == pattern(seed, *size), "{via} {name}: write of {size} bytes");
            end -= size;
        }
        let shared = to.grant_read(vec![written.freeze()]).unwrap();
        let remote = from.attach(peer, &shared.token()).unwrap();
        let into = from.allocate(total, Backing::Memfd).unwrap();
        let batch = Batch::new().via(via).read(remote.whole(), into.carve(0, total).unwrap());
        let buffers = from.submit(batch).unwrap().await.into_buffers().unwrap();
        let first = *sizes.last().unwrap();
        assert!(buffers[0][..first] == pattern(sizes.len() - 1, first), "{via} {name}: read");
    }
}

#[test]
fn bytes_arrive_over_tcp_both_ways() {
    run(|runtime| async move { move_everything(&pair(runtime, 10, |_| {}).await, Via::Tcp).await });
}

#[test]
fn bytes_arrive_over_shm_both_ways() {
    run(|runtime| async move {
        let pair = pair(runtime, 20, |_| {}).await;
        // The first shm batch waits for its lane; the accepting side has it once it was dialled.
        let region = pair.here.allocate(4096, Backing::Memfd).unwrap();
        let target = pair.there.allocate(4096, Backing::Memfd).unwrap();
        let grant = pair.there.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
        let remote = pair.here.attach(&pair.to_there, &grant.token()).unwrap();
        let batch = Batch::new().via(Via::Shm).write(region.carve(0, 64).unwrap().freeze(), remote.whole());
        assert!(pair.here.submit(batch).unwrap().await.is_done());
        move_everything(&pair, Via::Shm).await;
    });
}

#[test]
fn a_small_read_of_shared_memory_is_made_at_once_by_who_waits_for_it_and_explained() {
    run(|runtime| async move {
        let pair = pair(runtime.clone(), 24, |_| {}).await;
        let (shared, into) = (pair.there.allocate(4096, Backing::Memfd), pair.here.allocate(4096, Backing::Memfd));
        let (shared, into) = (shared.unwrap(), into.unwrap());
        let bytes = pattern(3, 4096);
        let grant = pair.there.grant_read(vec![filled(&shared, 0, &bytes)]).unwrap();
        let remote = pair.here.attach(&pair.to_there, &grant.token()).unwrap();
        let read = || {
            let batch = Batch::with_capacity(1).via(Via::Shm);
            batch.read(remote.extent(100, 1000).unwrap(), into.carve(0, 1000).unwrap())
        };
        let waited = |batch| {
            let engine = pair.here.blocking();
            blocking(&runtime, move || engine.run(batch).unwrap())
        };
        // The owner is asked once.
        assert!(waited(read()).await.is_done());
        let (before, report) = (pair.here.statistics(), waited(read()).await);
        let after = pair.here.statistics();
        let moved = (after.transfers_done - before.transfers_done, after.bytes_read - before.bytes_read);
        assert_eq!((moved, report.via()), ((1, 1000), Some(Via::Shm)));
        let why = pair.here.explain(report.id()).unwrap().to_string();
        assert!(why.contains("without asking"), "{why}");
        assert!(report.into_buffers().unwrap()[0][..] == bytes[100..1100]);
        // What its owner is to count is not made without it.
        let counted = waited(read().arrival(Arrival { counter: 5, amount: 1 })).await;
        let why = pair.here.explain(counted.id()).unwrap().to_string();
        assert!(!why.contains("without asking"), "{why}");
        drop(counted);
        drop(grant);
        // The owner notices in its next turn; until then the grant is still there.
        let stale = loop {
            let mut report = waited(read()).await;
            if !report.is_done() {
                assert_eq!(report.take_buffer(0).map(|buffer| buffer.len()), Some(1000));
                break report;
            }
        };
        let Status::Failed(failure) = &stale.outcomes()[0].status else { panic!("it is not done") };
        assert_eq!((&failure.cause, failure.far), (&Cause::Refused { reason: RefusalReason::Stale }, Far::Untouched));
    });
}

#[test]
fn the_side_that_was_dialled_waits_for_the_lane_of_shared_memory_that_is_on_its_way() {
    run(|runtime| async move {
        for round in 0..20 {
            let pair = pair(runtime.clone(), 100 + 2 * round, |_| {}).await;
            let region = pair.there.allocate(4096, Backing::Memfd).unwrap();
            let target = pair.here.allocate(4096, Backing::Memfd).unwrap();
            let grant = pair.here.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
            let remote = pair.there.attach(&pair.to_here, &grant.token()).unwrap();
            let batch = Batch::new().via(Via::Shm).write(region.carve(0, 64).unwrap().freeze(), remote.whole());
            let report = pair.there.submit(batch).unwrap().await;
            assert!(report.is_done(), "{report:?}");
        }
    });
}

#[test]
fn many_who_open_one_node_at_once_share_its_first_lane() {
    run(|runtime| async move {
        let engine = |node| Engine::start(runtime.clone(), options(node, 1)).unwrap();
        let (here, there, stop) = (engine(35), engine(36), Stop::new());
        let address = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
        let opened = futures::future::join_all((0..16).map(|_| here.open(address))).await;
        assert!(opened.iter().all(Result::is_ok), "{opened:?}");
        for engine in [&here, &there] {
            assert_eq!(engine.statistics().lanes_lost, 0, "none takes over from another");
        }
        stop.stop();
    });
}

#[test]
fn automatic_choice_takes_shared_memory_on_one_host() {
    run(|runtime| async move {
        let pair = pair(runtime, 30, |_| {}).await;
        let region = pair.here.allocate(1 << 20, Backing::Memfd).unwrap();
        let target = pair.there.allocate(1 << 20, Backing::Memfd).unwrap();
        let grant = pair.there.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
        let remote = pair.here.attach(&pair.to_there, &grant.token()).unwrap();
        let mut used = None;
        for _ in 0..200 {
            let batch = Batch::new().write(region.carve(0, 64).unwrap().freeze(), remote.whole());
            let report = pair.here.submit(batch).unwrap().await.into_done().unwrap();
            used = report.via();
            if used == Some(Via::Shm) {
                let why = pair.here.explain(report.id()).unwrap();
                assert!(why.to_string().contains("shm"), "{why}");
                break;
            }
            pair.here.runtime().sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(used, Some(Via::Shm));
    });
}

#[test]
fn a_named_transport_that_cannot_be_had_fails_within_a_second() {
    run(|runtime| async move {
        let pair = pair(runtime.clone(), 40, |options| {
            options.identity.host = HostIdentity::UNKNOWN;
        })
        .await;
        let region = pair.here.allocate(4096, Backing::Memfd).unwrap();
        let target = pair.there.allocate(4096, Backing::Memfd).unwrap();
        let grant = pair.there.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
        let remote = pair.here.attach(&pair.to_there, &grant.token()).unwrap();
        let start = runtime.now();
        let batch = Batch::new().via(Via::Shm).write(region.carve(0, 64).unwrap().freeze(), remote.whole());
        let error = pair.here.submit(batch).unwrap().await.into_done().unwrap_err();
        assert!(matches!(error.first.cause, Cause::NoPath { via: Via::Shm, .. }), "{error}");
        assert!(runtime.now().since(start) < SECOND);
    });
}

#[test]
fn a_path_below_the_best_shared_one_is_counted_with_its_reason() {
    run(|runtime| async move {
        // The target takes no shared memory, which the initiator finds out by dialling.
        let only_tcp = |options: &mut Options| {
            if options.identity.node[0] == 81 {
                options.transports = vec![Via::Local, Via::Tcp];
            }
        };
        let pair = pair(runtime, 80, only_tcp).await;
        let region = pair.here.allocate(4096, Backing::Memfd).unwrap();
        let target = pair.there.allocate(4096, Backing::Memfd).unwrap();
        let grant = pair.there.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
        let remote = pair.here.attach(&pair.to_there, &grant.token()).unwrap();
        let counts = |engine: &Engine<Tokio>| {
            let (of_shm, others): (Vec<_>, Vec<_>) = engine
                .statistics()
                .downgrades()
                .partition(|downgrade| (downgrade.from, downgrade.to) == (Via::Shm, Via::Tcp));
            assert!(others.iter().all(|downgrade| downgrade.count == 0), "{others:?}");
            let all = of_shm.into_iter().map(|downgrade| (downgrade.reason, downgrade.count));
            all.collect::<std::collections::HashMap<_, _>>()
        };
        let mut sent = 0;
        while counts(&pair.here)[&DowngradeReason::Unreachable] == 0 {
            let batch = Batch::new().write(region.carve(0, 64).unwrap().freeze(), remote.whole());
            assert_eq!(pair.here.submit(batch).unwrap().await.into_done().unwrap().via(), Some(Via::Tcp));
            sent += 1;
        }
        assert_eq!(counts(&pair.here).values().sum::<u64>(), sent, "every batch is counted, under one reason");
        assert_eq!(pair.here.statistics().detours, sent);
        assert_eq!(counts(&pair.there).values().sum::<u64>(), 0, "tcp is the best that the target has");
        // Who names tcp gets it, and nothing less.
        let batch = Batch::new().via(Via::Tcp).write(region.carve(0, 64).unwrap().freeze(), remote.whole());
        pair.here.submit(batch).unwrap().await.into_done().unwrap();
        assert_eq!(pair.here.statistics().detours, sent);
    });
}

#[test]
fn a_closed_grant_refuses_and_nothing_else_is_disturbed() {
    run(|runtime| async move {
        let pair = pair(runtime, 50, |_| {}).await;
        let region = pair.here.allocate(8192, Backing::Memfd).unwrap();
        let target = pair.there.allocate(8192, Backing::Memfd).unwrap();
        let open = pair.there.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
        let closed = pair.there.grant_write(vec![target.carve(4096, 64).unwrap()]).unwrap();
        let remotes = [&open, &closed].map(|grant| pair.here.attach(&pair.to_there, &grant.token()).unwrap());
        let memory = closed.close().await;
        let batch = Batch::new()
            .via(Via::Tcp)
            .write(filled(&region, 0, &[1; 64]), remotes[0].whole())
            .write(filled(&region, 4096, &[2; 64]), remotes[1].whole());
        let report = pair.here.submit(batch).unwrap().await;
        assert_eq!(report.outcomes()[0].status, Status::Done);
        let Status::Failed(failure) = &report.outcomes()[1].status else { panic!("a closed grant was written") };
        assert_eq!((&failure.cause, failure.far), (&Cause::Refused { reason: RefusalReason::Stale }, Far::Untouched));
        assert_eq!((memory[0][..] == [0; 64], open.close().await[0][..] == [1; 64]), (true, true));
    });
}

#[test]
fn a_peer_that_vanishes_fails_batches_by_their_deadline_and_a_restarted_one_is_another() {
    run(|runtime| async move {
        let Pair { here, there, to_there, .. } = pair(runtime.clone(), 60, |options| {
            options.progress_deadline = Duration::from_millis(500);
        })
        .await;
        let region = here.allocate(8192, Backing::Memfd).unwrap();
        let target = there.allocate(8192, Backing::Memfd).unwrap();
        let grant = there.grant_write(vec![target.carve(0, 64).unwrap()]).unwrap();
        let remote = here.attach(&to_there, &grant.token()).unwrap();
        there.shut_down().await;
        drop((grant, there));
        let start = runtime.now();
        let batch = Batch::new().via(Via::Tcp).write(filled(&region, 0, &[1; 64]), remote.whole());
        let error = here.submit(batch).unwrap().await.into_done().unwrap_err();
        assert!(runtime.now().since(start) < Duration::from_secs(2), "{error}");
        let again = Engine::start(runtime.clone(), options(61, 2)).unwrap();
        let stop = Stop::new();
        let address = again.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
        let new_peer = here.open(address).await.unwrap();
        assert!(new_peer != to_there);
        assert!(here.attach(&new_peer, &remote.token()).is_err());
    });
}

#[test]
fn a_batch_of_many_pages_is_one_transfer_for_a_blocking_caller() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let tokio = Tokio::new(runtime.handle().clone());
    let pair = runtime.block_on(pair(tokio, 70, |_| {}));
    let region = pair.here.allocate_raw(1 << 20, Backing::Memfd, Rights::NONE).unwrap();
    let target = pair.there.allocate_raw(1 << 20, Backing::Memfd, Rights::REMOTE_WRITE).unwrap();
    let token = pair.there.expose(&target).unwrap();
    let remote = pair.here.attach(&pair.to_there, &token).unwrap();
    let blocking = pair.here.blocking();
    region.write_at(0, &pattern(3, 128 * 4096)).unwrap();
    let mut batch = Batch::with_capacity(128).via(Via::Tcp).class(Class::Bulk);
    for round in 0..50 {
        for page in 0..128u64 {
            batch.push_write_raw(&region, page * 4096, remote.extent((127 - page) * 4096, 4096).unwrap());
        }
        let report = blocking.run(batch).unwrap();
        assert!(report.is_done(), "round {round}");
        batch = report.into_batch();
    }
    let mut back = vec![0; 4096];
    target.read_at(127 * 4096, &mut back).unwrap();
    assert_eq!(back, pattern(3, 128 * 4096)[..4096]);
    let mut pending: Vec<_> = (0..8u64)
        .map(|page| {
            let mut batch = Batch::new().via(Via::Tcp);
            batch.push_write_raw(&region, 0, remote.extent(page * 4096, 4096).unwrap());
            blocking.submit(batch).unwrap()
        })
        .collect();
    while let Some(transfer) = pending.pop() {
        assert!(blocking.wait(transfer).is_done());
    }
}

#[test]
fn threads_share_one_engine_and_a_cancelled_transfer_ends() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let tokio = Tokio::new(runtime.handle().clone());
    let pair = runtime.block_on(pair(tokio, 80, |_| {}));
    let region = pair.here.allocate_raw(64 << 20, Backing::Memfd, Rights::NONE).unwrap();
    let target = pair.there.allocate_raw(64 << 20, Backing::Memfd, Rights::REMOTE_WRITE).unwrap();
    let remote = pair.here.attach(&pair.to_there, &pair.there.expose(&target).unwrap()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (blocking, remote, region) = (pair.here.blocking(), remote.clone(), region.clone());
            scope.spawn(move || {
                for _ in 0..200 {
                    let mut batch = Batch::new().via(Via::Tcp);
                    batch.push_write_raw(&region, thread * 65536, remote.extent(thread * 65536, 65536).unwrap());
                    assert!(blocking.run(batch).unwrap().is_done());
                }
            });
        }
    });
    runtime.block_on(async {
        let mut batch = Batch::new().via(Via::Tcp);
        batch.push_write_raw(&region, 0, remote.whole());
        let transfer = pair.here.submit(batch).unwrap();
        transfer.cancel();
        let report = transfer.await;
        assert!(
            report.is_done()
                || matches!(&report.outcomes()[0].status, Status::Failed(failure) if failure.cause == Cause::Cancelled)
        );
        let mut batch = Batch::new().via(Via::Tcp);
        batch.push_write_raw(&region, 0, remote.extent(0, 4096).unwrap());
        assert!(pair.here.submit(batch).unwrap().await.is_done(), "a cancel disturbed what came after it");
    });
}

/// A transfer that is polled drives its engine in passing, and so takes over from a driver that sleeps. When it is over,
/// peers must be able to wake that driver again: without, the next one waits until something else happens here.
#[test]
fn a_driver_that_sleeps_is_woken_after_somebody_drove_in_passing() {
    run(|runtime| async move {
        // Long enough that a polled transfer ends while it drives.
        let pair = pair(runtime.clone(), 90, |options| options.spin = Duration::from_millis(20)).await;
        let side = |engine: &Engine<Tokio>| {
            let region = engine.allocate(8192, Backing::Memfd).unwrap();
            let grant = engine.grant_write(vec![region.carve(0, 4096).unwrap()]).unwrap();
            (grant, filled(&region, 4096, &pattern(1, 4096)))
        };
        let ((at_here, from_here), (at_there, from_there)) = (side(&pair.here), side(&pair.there));
        let to_there = pair.here.attach(&pair.to_there, &at_there.token()).unwrap();
        let to_here = pair.there.attach(&pair.to_here, &at_here.token()).unwrap();
        for round in 0..60 {
            for (engine, source, target) in [(&pair.here, &from_here, &to_there), (&pair.there, &from_there, &to_here)]
            {
                let batch = Batch::new().via(Via::Shm).write(source.clone(), target.whole());
                let transfer = engine.submit(batch).unwrap();
                let done = tokio::time::timeout(std::time::Duration::from_secs(2), transfer).await;
                done.unwrap_or_else(|_| panic!("round {round}: nobody woke up")).into_done().unwrap();
                // Both drivers fall asleep now and then.
                runtime.sleep(Duration::from_millis(if round % 2 == 0 { 0 } else { 25 })).await;
            }
        }
    });
}
