//! A cluster in a network that forgets idle connections, as proxies and firewalls do: nobody is told, what is sent over them
//! goes nowhere. Requests with pauses between them are answered all the same.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::client::{Wish, complete};
use crate::cluster::{Alone, Binary, Cluster, Plan};
use crate::equal::prompt;

/// Stands in front of a node's port.
pub(crate) struct Proxy {
    /// Where others reach the node.
    pub(crate) address: SocketAddr,
    /// Where the node is to listen.
    pub(crate) target: SocketAddr,
    forgotten: Arc<AtomicU32>,
}

/// One connection through it.
struct Way {
    begun: Instant,
    /// When something went over it last, in ms since it began.
    last_ms: AtomicU64,
    idle_max: Duration,
    is_forgotten: AtomicBool,
    forgotten: Arc<AtomicU32>,
}

impl Proxy {
    /// One that forgets connections over which nothing went for longer than `idle_max`.
    pub(crate) fn start(idle_max: Duration) -> Self {
        let bind = || TcpListener::bind("127.0.0.1:0").expect("a free port");
        let (listener, free) = (bind(), bind());
        let [address, target] = [&listener, &free].map(|bound| bound.local_addr().expect("bound"));
        let forgotten = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&forgotten);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { continue };
                let (begun, forgotten) = (Instant::now(), Arc::clone(&count));
                let (last_ms, is_forgotten) = (AtomicU64::new(0), AtomicBool::new(false));
                let way = Arc::new(Way { begun, last_ms, idle_max, is_forgotten, forgotten });
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().expect("open"), to.try_clone().expect("open"));
                    let way = Arc::clone(&way);
                    std::thread::spawn(move || way.pass(from, to));
                }
            }
        });
        Self { address, target, forgotten }
    }
}

impl Way {
    /// Passes bytes on until an end closes; once the connection is forgotten neither bytes nor the end of it.
    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let _ = from.set_nodelay(true);
        let mut buffer = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            let now = self.begun.elapsed();
            let idle = now.saturating_sub(Duration::from_millis(self.last_ms.load(Relaxed)));
            if idle > self.idle_max && !self.is_forgotten.swap(true, Relaxed) {
                self.forgotten.fetch_add(1, Relaxed);
            }
            if self.is_forgotten.load(Relaxed) {
                continue;
            }
            self.last_ms.store(u64::try_from(now.as_millis()).expect("a short test"), Relaxed);
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        if !self.is_forgotten.load(Relaxed) {
            let _ = to.shutdown(Shutdown::Both);
        }
    }
}

/// Requests so far apart, in a network that forgets what was idle for `idle_max`, all answer, and say what is to be said.
fn all_answer(rounds: u32, pause: Duration, idle_max: Duration) {
    let alone = Alone::start();
    // Another prompt each time: it is computed, and its KV travels.
    let wishes: Vec<Wish> = (0..rounds).map(|round| Wish::new(prompt(700 + round, 200), 12)).collect();
    let wanted: Vec<_> = wishes.iter().map(|wish| complete(alone.node.http, wish).expect("alone").tokens).collect();
    drop(alone);
    let proxies = [(); 3].map(|()| Proxy::start(idle_max));
    let plan = Plan { via: "tcp", ..Plan::of(Binary::Tokio) };
    let cluster = Cluster::start_behind(plan, Some(&proxies));
    for (round, (wish, wanted)) in wishes.iter().zip(&wanted).enumerate() {
        std::thread::sleep(pause);
        let start = Instant::now();
        match complete(cluster.router.http, wish) {
            Ok(said) => assert_eq!(&said.tokens, wanted, "round {round}"),
            Err(unsaid) => panic!("round {round}, after {:?}: {unsaid:?}", start.elapsed()),
        }
        println!("round {round}: answered in {:?}", start.elapsed());
    }
    let forgotten = proxies.each_ref().map(|proxy| proxy.forgotten.load(Relaxed));
    println!("forgotten connections to store, prefill, decode: {forgotten:?}");
    // The lanes that KV goes over, at least; sessions of nodes are never silent for so long.
    assert!(forgotten[2] > 0, "nothing was forgotten: the test shows nothing");
}

#[test]
fn requests_with_pauses_all_answer_where_idle_connections_are_forgotten() {
    all_answer(3, Duration::from_secs(5), Duration::from_secs(3));
}

#[test]
#[ignore = "takes six minutes: -- --ignored requests_a_minute_apart"]
fn requests_a_minute_apart_all_answer_where_idle_connections_are_forgotten() {
    all_answer(5, Duration::from_secs(60), Duration::from_secs(5));
}
