//! Two engines with something between them that misbehaves as networks do: it closes idle connections, or passes on nothing.
//! And what an engine must keep to whatever goes on: its lanes, its windows, its quiet when nobody asks anything of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_node::engine::{Backing, Batch, Engine, Grant, Options, Peer, Region, RemoteExtent, Via};
use millpond_node::runtime::Stop;
use millpond_tokio::Tokio;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::time::Instant;

/// How often a proxy looks whether it is to go on, or to close.
const LOOK: std::time::Duration = std::time::Duration::from_millis(5);

/// What the proxy does.
#[derive(Default)]
struct Control {
    /// Passes on nothing, and reads nothing.
    holds: AtomicBool,
    /// Closes connections over which nothing went for so long.
    idle_max: Option<std::time::Duration>,
    opened: AtomicU32,
    closed: AtomicU32,
}

async fn proxy(target: SocketAddr, control: Arc<Control>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(target).await else { continue };
            near.set_nodelay(true).unwrap();
            far.set_nodelay(true).unwrap();
            control.opened.fetch_add(1, Ordering::Relaxed);
            let control = Arc::clone(&control);
            tokio::spawn(async move {
                let last = std::sync::Mutex::new(Instant::now());
                let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                tokio::select! {
                    () = pump(near_in, far_out, &control, &last) => {}
                    () = pump(far_in, near_out, &control, &last) => {}
                }
                control.closed.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    address
}

/// Passes bytes on until an end closes, or both were idle for too long.
async fn pump(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    control: &Control,
    last: &std::sync::Mutex<Instant>,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        if control.holds.load(Ordering::Relaxed) {
            tokio::time::sleep(LOOK).await;
            continue;
        }
        match tokio::time::timeout(LOOK, from.read(&mut buffer)).await {
            Ok(Ok(0) | Err(_)) => return,
            Ok(Ok(len)) => {
                *last.lock().unwrap() = Instant::now();
                if to.write_all(&buffer[..len]).await.is_err() {
                    return;
                }
            }
            Err(_) if control.idle_max.is_some_and(|max| last.lock().unwrap().elapsed() > max) => return,
            Err(_) => {}
        }
    }
}

fn engine(runtime: &Tokio, node: u8) -> Engine<Tokio> {
    let identity = Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
    Engine::start(runtime.clone(), Options::new(identity)).unwrap()
}

/// Memory of an engine, open for writes, and what another one names it by.
struct Target {
    grant: Grant,
    whole: RemoteExtent,
    _peer: Peer,
}

async fn target(here: &Engine<Tokio>, there: &Engine<Tokio>, address: SocketAddr, len: u64) -> Target {
    let memory = there.allocate(len, Backing::Memfd).unwrap();
    let grant = there.grant_write(vec![memory.carve(0, len).unwrap()]).unwrap();
    let peer = here.open(address).await.unwrap();
    let whole = here.attach(&peer, &grant.token()).unwrap().whole();
    Target { grant, whole, _peer: peer }
}

/// `count` writes of `len` bytes each, none beside the one before, so that nothing joins.
fn slices(source: &Region, to: &RemoteExtent, count: u64, len: u64) -> Batch {
    let bytes = source.carve(0, count * len).unwrap().freeze();
    let mut batch = Batch::with_capacity(usize::try_from(count).unwrap()).via(Via::Tcp);
    for at in 0..count {
        let place = usize::try_from(at * len).unwrap();
        let slice = bytes.slice(place..place + usize::try_from(len).unwrap());
        batch.push_write(slice, to.slice((count - 1 - at) * len, len).unwrap());
    }
    batch
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(|runtime| async move {
        let bounded = tokio::time::timeout(std::time::Duration::from_secs(60), test(runtime));
        bounded.await.expect("the test took longer than a minute");
    })
    .unwrap();
}

#[test]
fn a_connection_that_was_closed_while_idle_is_replaced_and_no_slice_is_refused() {
    run(|runtime| async move {
        let (here, there, stop) = (engine(&runtime, 1), engine(&runtime, 2), Stop::new());
        let listening = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
        let idle_max = Some(std::time::Duration::from_millis(50));
        let control = Arc::new(Control { idle_max, ..Control::default() });
        let address = proxy(listening, Arc::clone(&control)).await;
        let source = here.allocate(2000 * 64, Backing::Memfd).unwrap();
        let target = target(&here, &there, address, 2000 * 64).await;
        for round in 1..=3 {
            // Idle until the proxy has closed what there was.
            while control.closed.load(Ordering::Relaxed) < round {
                tokio::time::sleep(LOOK).await;
            }
            let report = here.submit(slices(&source, &target.whole, 2000, 64)).unwrap().await;
            assert!(report.is_done(), "round {round}: {report:?}");
            assert_eq!(here.statistics().transfers_refused, 0);
        }
        assert!(control.opened.load(Ordering::Relaxed) >= 3);
    });
}

#[test]
fn a_peer_that_is_stuck_costs_the_others_nothing() {
    run(|runtime| async move {
        let (here, stuck, healthy, stop) =
            (engine(&runtime, 11), engine(&runtime, 12), engine(&runtime, 13), Stop::new());
        let any = "127.0.0.1:0".parse().unwrap();
        let (one, other) = (stuck.listen(any, &stop).await.unwrap(), healthy.listen(any, &stop).await.unwrap());
        let control = Arc::new(Control::default());
        let one = proxy(one, Arc::clone(&control)).await;
        let len = 4 << 20;
        let (source, for_stuck) =
            (here.allocate(64 * 64, Backing::Memfd).unwrap(), here.allocate(len, Backing::Memfd).unwrap());
        let (to_stuck, to_healthy) =
            (target(&here, &stuck, one, len).await, target(&here, &healthy, other, 64 * 64).await);
        control.holds.store(true, Ordering::Relaxed);
        // More than the sockets hold, so that the path to the one is full from end to end.
        let bytes = for_stuck.carve(0, len).unwrap().freeze();
        let waiting: Vec<_> = (0..64)
            .map(|_| {
                let batch = Batch::new().via(Via::Tcp).write(bytes.clone(), to_stuck.whole.clone());
                here.submit(batch).unwrap()
            })
            .collect();
        for round in 0..200 {
            let report = here.submit(slices(&source, &to_healthy.whole, 64, 64)).unwrap().await;
            assert!(report.is_done(), "round {round}: {report:?}");
        }
        assert!(waiting.iter().any(|transfer| !transfer.is_over()), "nobody was stuck: the test shows nothing");
        control.holds.store(false, Ordering::Relaxed);
        for transfer in waiting {
            let report = transfer.await;
            assert!(report.is_done(), "what only waited goes on: {report:?}");
        }
        to_stuck.grant.close().await;
    });
}

#[test]
fn many_transfers_keep_to_the_lanes_that_a_peer_may_have() {
    run(|runtime| async move {
        let (here, there, stop) = (engine(&runtime, 21), engine(&runtime, 22), Stop::new());
        let address = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
        let lanes_max = u64::from(here.options().lanes_per_peer_max);
        let source = here.allocate(1 << 20, Backing::Memfd).unwrap();
        let target = target(&here, &there, address, 1 << 20).await;
        let bytes = source.carve(0, 1 << 20).unwrap().freeze();
        for _ in 0..20 {
            let transfers: Vec<_> = (0..32)
                .map(|_| {
                    let batch = Batch::new().via(Via::Tcp).write(bytes.clone(), target.whole.clone());
                    here.submit(batch).unwrap()
                })
                .collect();
            for transfer in transfers {
                assert!(transfer.await.is_done());
                assert!(here.statistics().lanes_open <= lanes_max);
            }
        }
        assert!(here.statistics().lanes_dialled <= lanes_max, "{:?}", here.statistics());
    });
}

#[test]
fn three_hundred_thousand_slices_go_as_one_batch() {
    run(|runtime| async move {
        let (here, there, stop) = (engine(&runtime, 31), engine(&runtime, 32), Stop::new());
        let address = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
        let (count, len) = (300_000, 16);
        let source = here.allocate(count * len, Backing::Memfd).unwrap();
        let mut bytes = source.carve(0, count * len).unwrap();
        for (at, slice) in bytes.chunks_mut(16).enumerate() {
            slice.fill(u8::try_from(at % 251).unwrap());
        }
        drop(bytes);
        let target = target(&here, &there, address, count * len).await;
        let report = here.submit(slices(&source, &target.whole, count, len)).unwrap().await;
        assert!(report.is_done());
        assert_eq!(report.outcomes().len(), 300_000, "a status for each");
        let arrived = target.grant.close().await.pop().unwrap();
        // In the opposite order.
        for (at, slice) in arrived.chunks(16).rev().enumerate() {
            assert!(slice.iter().all(|byte| usize::from(*byte) == at % 251), "slice {at}");
        }
    });
}

#[test]
fn an_idle_engine_makes_no_turns() {
    run(|runtime| async move {
        let (here, there, stop) = (engine(&runtime, 41), engine(&runtime, 42), Stop::new());
        let address = there.listen("127.0.0.1:0".parse().unwrap(), &stop).await.unwrap();
        let source = here.allocate(64, Backing::Memfd).unwrap();
        let target = target(&here, &there, address, 64).await;
        assert!(here.submit(slices(&source, &target.whole, 1, 64)).unwrap().await.is_done());
        // Time for the spin and for timers that were set; then the same span again, in which nothing may turn but timers.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        let before = [&here, &there].map(|engine| engine.statistics().driver_turns);
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let after = [&here, &there].map(|engine| engine.statistics().driver_turns);
        for (before, after) in before.into_iter().zip(after) {
            assert!(after - before < 20, "{} turns in half a second in which nothing was to do", after - before);
        }
        assert!(here.options().spin < Duration::from_millis(1));
    });
}
