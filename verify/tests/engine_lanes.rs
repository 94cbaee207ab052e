//! Lanes of an engine that come and go: idle ones that retire, nodes with several addresses.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_node::engine::{Backing, Batch, Engine, Options, Peer, Statistics, Via};
use millpond_node::runtime::{Runtime, Stop, local_addr};
use millpond_node::session::{Acceptor, Credentials, Limits, Session};
use millpond_tokio::Tokio;

fn options(node: u8) -> Options {
    let mut options = Options::new(Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN });
    options.transports = vec![Via::Local, Via::Tcp];
    options
}

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(|runtime| async move {
        let bounded = tokio::time::timeout(std::time::Duration::from_secs(60), test(runtime));
        bounded.await.expect("the test took longer than a minute");
    })
    .unwrap();
}

/// Waits until the engine's counters are as wanted.
async fn until(engine: &Engine<Tokio>, wanted: impl Fn(&Statistics) -> bool) {
    while !wanted(&engine.statistics()) {
        engine.runtime().sleep(Duration::from_millis(2)).await;
    }
}

/// Writes some bytes from one engine into the other, and looks at them there.
async fn write(from: &Engine<Tokio>, to: &Engine<Tokio>, peer: &Peer) {
    let (near, far) = (from.allocate(4096, Backing::Heap).unwrap(), to.allocate(4096, Backing::Heap).unwrap());
    let grant = to.grant_write(vec![far.carve(0, 64).unwrap()]).unwrap();
    let remote = from.attach(peer, &grant.token()).unwrap();
    let mut source = near.carve(0, 64).unwrap();
    source.fill(7);
    let report = from.submit(Batch::new().write(source.freeze(), remote.whole())).unwrap().await;
    assert!(report.is_done(), "{:?}", report.outcomes());
    assert_eq!(grant.close().await[0][..], [7; 64]);
}

#[test]
fn a_lane_that_was_admitted_before_a_shutdown_is_not_taken_over_after_it() {
    run(|runtime| async move {
        let (here, there) = (options(51), options(52));
        let engine = Engine::start(runtime.clone(), there.clone()).unwrap();
        let listener = runtime.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = local_addr(&listener).unwrap();
        let (stop, admitting) = (Stop::new(), engine.clone());
        let acceptor = Acceptor::new(Credentials::new(there.identity), Limits::default())
            .with_admission(move |met| admitting.admit(met));
        let owner = runtime.clone();
        let (given, mut lanes) = futures::channel::mpsc::unbounded();
        let until = stop.clone();
        runtime.spawn(async move {
            let give = move |session: Session<_>| given.unbounded_send(session.into_lane().unwrap()).unwrap();
            acceptor.run(&owner, &listener, &until, give).await.unwrap();
        });
        let dialer = Engine::start(runtime.clone(), here).unwrap();
        let peer = dialer.open(address).await.unwrap();
        let lane = lanes.next().await.unwrap();
        engine.shut_down().await;
        let refused = engine.adopt(lane).unwrap_err();
        assert!(refused.why.contains("shut down"), "{refused}");
        // The dialer learns of it, by the connection that is closed.
        until_lost(&dialer, &peer).await;
        stop.stop();
    });
}

/// Waits until no path to the peer is open.
async fn until_lost(engine: &Engine<Tokio>, peer: &Peer) {
    while engine.paths(peer).iter().any(|path| path.is_open) {
        engine.runtime().sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn an_idle_lane_retires_and_comes_back_at_first_use() {
    run(|runtime| async move {
        let mut ours = options(1);
        ours.lane_idle_span_max = Duration::from_millis(100);
        let here = Engine::start(runtime.clone(), ours).unwrap();
        let there = Engine::start(runtime.clone(), options(2)).unwrap();
        let address = there.listen("127.0.0.1:0".parse().unwrap(), &Stop::new()).await.unwrap();
        let peer = here.open(address).await.unwrap();
        let back = there.peer(&here.options().identity, Duration::from_secs(5)).await.unwrap();
        write(&here, &there, &peer).await;
        // Neither end keeps the connection, though handles of both peers are held; and nobody dials without need.
        until(&here, |seen| seen.lanes_open == 0 && seen.lanes_lost >= 1).await;
        until(&there, |seen| seen.lanes_open == 0).await;
        runtime.sleep(Duration::from_millis(300)).await;
        assert_eq!(here.statistics().lanes_dialled, 1);
        assert!(!here.is_connected(&peer) && !there.is_connected(&back));
        write(&here, &there, &peer).await;
        assert_eq!(here.statistics().lanes_dialled, 2);
        // Whoever wants the other to move bytes opens it first, which dials again.
        until(&here, |seen| seen.lanes_lost >= 2).await;
        let again = here.open(address).await.unwrap();
        assert!(again == peer && here.is_connected(&peer));
        let back = there.peer(&here.options().identity, Duration::from_secs(5)).await.unwrap();
        write(&there, &here, &back).await;
    });
}

/// Forwards connections to `to` until it is switched off, which breaks them all.
struct Way {
    address: SocketAddr,
    is_off: Arc<AtomicBool>,
}

impl Way {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, is_off) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let off = is_off.clone();
        std::thread::spawn(move || {
            let mut ends = Vec::new();
            while let Ok((near, _)) = listener.accept() {
                if off.load(Ordering::SeqCst) {
                    ends.iter().for_each(|end: &TcpStream| drop(end.shutdown(Shutdown::Both)));
                    return;
                }
                let Ok(far) = TcpStream::connect(to) else { return };
                for (mut from, mut to) in [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())]
                    .map(|(from, to)| (from.unwrap(), to.unwrap()))
                {
                    std::thread::spawn(move || {
                        let mut bytes = [0; 4096];
                        while let Ok(len @ 1..) = from.read(&mut bytes) {
                            if to.write_all(&bytes[..len]).is_err() {
                                break;
                            }
                        }
                    });
                }
                ends.extend([near, far]);
            }
        });
        Self { address, is_off }
    }

    fn switch_off(&self) {
        self.is_off.store(true, Ordering::SeqCst);
        // It looks when somebody comes.
        drop(TcpStream::connect(self.address));
    }
}

#[test]
fn a_node_in_two_networks_is_reached_and_reached_again_over_whichever_works() {
    run(|runtime| async move {
        let here = Engine::start(runtime.clone(), options(1)).unwrap();
        let there = Engine::start(runtime.clone(), options(2)).unwrap();
        let address = there.listen("127.0.0.1:0".parse().unwrap(), &Stop::new()).await.unwrap();
        // A network that swallows everything, one that works, and another one.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (first, second) = (Way::new(address), Way::new(address));
        let named = format!("{},{},{}", silent.local_addr().unwrap(), first.address, second.address);
        let peer = here.open_named(&named).await.unwrap();
        assert_eq!(peer.address(), Some(first.address));
        write(&here, &there, &peer).await;
        first.switch_off();
        until(&here, |seen| seen.lanes_lost >= 1).await;
        write(&here, &there, &peer).await;
        assert!(here.statistics().lanes_dialled >= 2);
        second.switch_off();
    });
}
