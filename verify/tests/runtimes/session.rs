//! What `node::session` promises, with every pair of runtimes at the two ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::channel::mpsc;
use futures::{AsyncReadExt, AsyncWriteExt, StreamExt};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{Field, HostIdentity, Identity, KvLayout, Purpose, Refusal};
use millpond_core::wire::session::{Failure, Key};
use millpond_node::runtime::{Runtime, Stop, Task, local_addr, start, within};
use millpond_node::session::{Acceptor, Credentials, Limits, Session, SessionError, Target, dial};

use crate::runtime::loopback;

pub(crate) fn identity(node: u8, incarnation: u64) -> Identity {
    Identity { node: [node; 16], incarnation, host: HostIdentity::UNKNOWN }
}

fn keyed(node: u8, key: &[u8]) -> Credentials {
    Credentials::new(identity(node, 1)).with_key(Key::new(key))
}

fn soon<R: Runtime>(runtime: &R) -> Instant {
    runtime.now() + Duration::from_secs(5)
}

/// A listening acceptor, and the sessions that come in.
struct Port<R: Runtime> {
    acceptor: Acceptor,
    address: SocketAddr,
    sessions: mpsc::UnboundedReceiver<Session<R::Stream>>,
    stop: Stop,
    task: Task<()>,
}

impl<R: Runtime> Port<R> {
    async fn open(runtime: &R, acceptor: Acceptor) -> Self {
        let listener = runtime.listen(loopback()).await.unwrap();
        let address = local_addr(&listener).unwrap();
        let (sender, sessions) = mpsc::unbounded();
        let stop = Stop::new();
        let (owner, door, halt) = (runtime.clone(), acceptor.clone(), stop.clone());
        let task = start(runtime, async move {
            let hand_over = move |session| drop(sender.unbounded_send(session));
            door.run(&owner, &listener, &halt, hand_over).await.unwrap();
        });
        Self { acceptor, address, sessions, stop, task }
    }

    async fn next(&mut self) -> Session<R::Stream> {
        self.sessions.next().await.unwrap()
    }
}

async fn dial_as<R: Runtime>(
    runtime: &R,
    address: SocketAddr,
    credentials: &Credentials,
) -> Result<Session<R::Stream>, SessionError> {
    dial(runtime, &address.into(), Purpose::Control, credentials, soon(runtime)).await
}

fn field<S>(outcome: Result<Session<S>, SessionError>) -> Option<Refusal> {
    outcome.err().and_then(|error| {
        assert!(error.to_string().contains("refused"), "{error}");
        error.refusal()
    })
}

async fn both_ends_learn_who_the_other_is<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut port = Port::open(&b, Acceptor::new(keyed(2, b"k"), Limits::default())).await;
    let target = Target::parse(&format!("localhost:{}", port.address.port())).unwrap().expecting([2; 16]);
    let mut near = dial(&a, &target, Purpose::Control, &keyed(1, b"k"), soon(&a)).await.unwrap();
    let mut far = port.next().await;
    assert_eq!(near.peer.hello.identity, identity(2, 1));
    assert_eq!(far.peer.hello.identity, identity(1, 1));
    assert!(near.peer.authenticated && far.peer.authenticated);
    near.stream.write_all(b"first byte after the hello").await.unwrap();
    let mut word = [0; 26];
    far.stream.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"first byte after the hello");
    assert_eq!(port.acceptor.sessions(), 1);
    drop(far);
    assert_eq!(port.acceptor.sessions(), 0);
    port.stop.stop();
    port.task.await;
}

async fn a_lane_leaves_the_runtime_with_its_generation<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut port = Port::open(&b, Acceptor::new(keyed(2, b"k"), Limits::default())).await;
    let purpose = Purpose::Lane { index: 1, generation: 9 };
    let near = dial(&a, &port.address.into(), purpose, &keyed(1, b"k"), soon(&a)).await.unwrap();
    let far = port.next().await.into_lane().unwrap();
    let near = near.into_lane().unwrap();
    assert_eq!((near.index, near.generation), (1, 9));
    assert_eq!((far.index, far.generation, far.peer.hello.identity.node), (1, 9, [1; 16]));
    rustix::io::write(&near.fd, b"lane").unwrap();
    let far_end = b.readable(far.fd.try_clone().unwrap()).unwrap();
    millpond_node::runtime::Readiness::readable(&far_end).await.unwrap();
    let mut word = [0; 8];
    assert_eq!(rustix::io::read(&far.fd, &mut word).unwrap(), 4);
    assert_eq!(port.acceptor.sessions(), 1, "an open lane counts");
    drop(far);
    assert_eq!(port.acceptor.sessions(), 0);
}

async fn a_refusal_names_the_field<A: Runtime, B: Runtime>(a: A, b: B) {
    let layout = KvLayout { layers: 2, kv_heads: 1, head_dim: 8, page_tokens: 16, dtype: 1 };
    let credentials = keyed(2, b"k").with_layout(layout);
    let admit = |peer: &millpond_core::wire::session::Peer| match peer.hello.purpose {
        Purpose::Lane { generation, .. } if generation < 5 => Err(Refusal::of(Field::Generation)),
        _ => Ok(()),
    };
    let mut port = Port::open(&b, Acceptor::new(credentials, Limits::default()).with_admission(admit)).await;
    let refused = |outcome| field::<A::Stream>(outcome).map(|refusal| refusal.field);

    assert_eq!(refused(dial_as(&a, port.address, &keyed(1, b"wrong")).await), Some(Field::Key));
    assert_eq!(refused(dial_as(&a, port.address, &Credentials::new(identity(1, 1))).await), Some(Field::Auth));
    let other = keyed(1, b"k").with_layout(KvLayout { page_tokens: 32, ..layout });
    let refusal = field(dial_as(&a, port.address, &other).await);
    assert_eq!(refusal, Some(Refusal { field: Field::PageTokens, refuser: 16, refused: 32 }));

    let elsewhere = Target::from(port.address).expecting([7; 16]);
    let outcome = dial(&a, &elsewhere, Purpose::Control, &keyed(1, b"k"), soon(&a)).await;
    assert_eq!(refused(outcome), Some(Field::Node));
    let _ = port.next().await;
    let lane = Purpose::Lane { index: 1, generation: 4 };
    let outcome = dial(&a, &port.address.into(), lane, &keyed(1, b"k"), soon(&a)).await;
    assert_eq!(refused(outcome), Some(Field::Generation));
    assert_eq!(port.acceptor.sessions(), 0, "nobody refused counts");

    let restarted = Credentials::new(identity(1, 5)).with_key(Key::new(b"k"));
    drop(dial_as(&a, port.address, &restarted).await.unwrap());
    let refusal = field(dial_as(&a, port.address, &keyed(1, b"k")).await);
    assert_eq!(refusal, Some(Refusal { field: Field::Incarnation, refuser: 5, refused: 1 }));

    port.acceptor.drain();
    assert_eq!(refused(dial_as(&a, port.address, &restarted).await), Some(Field::Draining));
}

async fn sessions_are_bounded_and_places_come_back<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut limits = Limits::default();
    limits.sessions_max = 2;
    let mut port = Port::open(&b, Acceptor::new(keyed(2, b"k"), limits)).await;
    let _first = dial_as(&a, port.address, &keyed(1, b"k")).await.unwrap();
    let _second = dial_as(&a, port.address, &keyed(3, b"k")).await.unwrap();
    let third = dial_as(&a, port.address, &keyed(4, b"k")).await;
    assert_eq!(field(third).map(|refusal| refusal.field), Some(Field::Capacity));
    drop(port.next().await);
    dial_as(&a, port.address, &keyed(4, b"k")).await.unwrap();
}

/// Sends `bytes` to the port and returns all it says until it closes.
async fn say<R: Runtime>(runtime: &R, address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = runtime.dial(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    answer
}

async fn strangers_get_an_answer_and_are_closed<A: Runtime, B: Runtime>(a: A, b: B) {
    let port = Port::open(&b, Acceptor::new(keyed(2, b"k"), Limits::default())).await;
    let quick = Duration::from_secs(3);
    let long = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "y".repeat(40_000));
    for request in ["GET / HTTP/1.1\r\nhost: x\r\n\r\n", &long] {
        let answer = within(&a, quick, say(&a, port.address, request.as_bytes())).await.unwrap();
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 426 ") && answer.contains("router's HTTP address"), "{answer}");
    }
    let tls = within(&a, quick, say(&a, port.address, &[0x16, 3, 1, 0, 5])).await.unwrap();
    assert_eq!(tls, [0x15, 3, 1, 0, 2, 2, 70]);
    let mut noise = vec![0_u8; 10_000];
    for (place, byte) in noise.iter_mut().enumerate() {
        *byte = (place * 7 + 1).to_le_bytes()[0];
    }
    assert_eq!(within(&a, quick, say(&a, port.address, &noise)).await.unwrap(), b"");
    dial_as(&a, port.address, &keyed(1, b"k")).await.unwrap();
}

async fn slow_strangers_lock_nobody_out<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut limits = Limits::default();
    limits.hellos_max = 4;
    limits.hello_span_max = Duration::from_millis(400);
    let port = Port::open(&b, Acceptor::new(keyed(2, b"k"), limits)).await;
    // Twice as many as there are places, each with a true beginning of a hello, then silence.
    let mut slow = Vec::new();
    for _ in 0..8 {
        let mut stream = a.dial(port.address).await.unwrap();
        stream.write_all(&millpond_core::wire::hello::MAGIC).await.unwrap();
        slow.push(stream);
    }
    dial_as(&a, port.address, &keyed(1, b"k")).await.unwrap();
    for mut stream in slow {
        let mut rest = Vec::new();
        // Each of them is closed: pushed out, or at its deadline. A reset is as good as an end.
        let closed = within(&a, Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "a silent hello outlived its deadline");
    }
}

async fn a_listener_that_is_no_node_costs_a_dialer_its_deadline<A: Runtime, B: Runtime>(a: A, b: B) {
    let listener = b.listen(loopback()).await.unwrap();
    let address = local_addr(&listener).unwrap();
    let deadline = a.now() + Duration::from_millis(50);
    let silent = dial(&a, &address.into(), Purpose::Control, &keyed(1, b"k"), deadline).await;
    assert!(matches!(silent, Err(SessionError::Deadline { .. })));
    let spoke = Arc::new(AtomicBool::new(false));
    let (owner, flag) = (b.clone(), spoke.clone());
    let _server = start(&b, async move {
        loop {
            let (mut stream, _) = owner.accept(&listener).await.unwrap();
            // The dialer of before is gone; whether it hears this does not matter.
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            flag.store(true, Ordering::SeqCst);
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
    let outcome = dial_as(&a, address, &keyed(1, b"k")).await;
    let foreign = matches!(&outcome, Err(SessionError::Hello { failure: Failure::Foreign(_), .. }));
    assert!(foreign && spoke.load(Ordering::SeqCst), "{:?}", outcome.err());
}

async fn a_node_is_found_at_any_of_its_addresses<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut port = Port::open(&b, Acceptor::new(keyed(2, b"k"), Limits::default())).await;
    let mut elsewhere = Port::open(&b, Acceptor::new(keyed(3, b"k"), Limits::default())).await;
    let silent = b.listen(loopback()).await.unwrap();
    let closed = {
        let listener = b.listen(loopback()).await.unwrap();
        local_addr(&listener).unwrap()
    };
    // Nobody there, somebody who never answers, another node, no such name: the last one is right.
    let (silent, right) = (local_addr(&silent).unwrap(), port.address);
    let named = format!("{closed},{silent},{},no.such.host.invalid:1, localhost:{}", elsewhere.address, right.port());
    let target = Target::parse(&named).unwrap().expecting([2; 16]);
    let near = dial(&a, &target, Purpose::Control, &keyed(1, b"k"), soon(&a)).await.unwrap();
    assert_eq!(near.peer.hello.identity, identity(2, 1));
    assert_eq!(port.next().await.peer.hello.identity, identity(1, 1));
    drop(elsewhere.next().await);
    let wrong = Target::parse(&named).unwrap().expecting([9; 16]);
    let outcome = dial(&a, &wrong, Purpose::Control, &keyed(1, b"k"), soon(&a)).await;
    assert_eq!(field(outcome).map(|refusal| refusal.field), Some(Field::Node));
}

async fn nobody_listening_is_said_at_once<A: Runtime, B: Runtime>(a: A, b: B) {
    let listener = b.listen(loopback()).await.unwrap();
    let address = local_addr(&listener).unwrap();
    drop(listener);
    let outcome = dial_as(&a, address, &keyed(1, b"k")).await;
    assert!(matches!(outcome, Err(SessionError::Connect { .. })));
    let nowhere = Target::parse("no.such.host.invalid:1").unwrap();
    let outcome = dial(&a, &nowhere, Purpose::Control, &keyed(1, b"k"), soon(&a)).await;
    assert!(matches!(outcome, Err(SessionError::Resolve { .. } | SessionError::Deadline { .. })));
}

on_pairs!(
    both_ends_learn_who_the_other_is,
    a_lane_leaves_the_runtime_with_its_generation,
    a_refusal_names_the_field,
    sessions_are_bounded_and_places_come_back,
    strangers_get_an_answer_and_are_closed,
    slow_strangers_lock_nobody_out,
    a_listener_that_is_no_node_costs_a_dialer_its_deadline,
    nobody_listening_is_said_at_once,
    a_node_is_found_at_any_of_its_addresses,
);
