//! What `node::node` promises, with every pair of runtimes at the two ends.

use std::sync::{Arc, Mutex};

use futures::StreamExt;
use futures::channel::mpsc;
use millpond_core::time::Duration;
use millpond_core::wire::hello::Purpose;
use millpond_core::wire::session::Key;
use millpond_node::node::{Node, NodeError, Options};
use millpond_node::rpc::{Context, Refusal, Router};
use millpond_node::runtime::{Runtime, start, within};
use millpond_node::session::{Target, dial};

use crate::session::identity;

const NAP: u16 = 0x7e01;

#[derive(Clone, PartialEq, prost::Message)]
struct Nap {
    #[prost(uint64, tag = "1")]
    millis: u64,
}

/// What happened, in order.
#[derive(Default)]
struct Log(Mutex<Vec<&'static str>>);

impl Log {
    fn add(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }

    fn all(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }
}

fn options(node: u8) -> Options {
    let mut options = Options::new(identity(node, 1));
    options.key = Some(Key::new(b"node test"));
    options
}

fn services<R: Runtime>(runtime: &R, log: &Arc<Log>) -> Router {
    let (runtime, log) = (runtime.clone(), log.clone());
    Router::new().call(NAP, move |_: Context, nap: Nap| {
        let (runtime, log) = (runtime.clone(), log.clone());
        async move {
            log.add("call begins");
            runtime.sleep(Duration::from_millis(nap.millis)).await;
            log.add("call ends");
            Ok::<Nap, Refusal>(nap)
        }
    })
}

async fn calls_and_lanes_come_in_at_one_port<A: Runtime, B: Runtime>(a: A, b: B) {
    let (near, far) = (Node::new(a.clone(), options(1)), Node::new(b.clone(), options(2)));
    let (sender, mut lanes) = mpsc::unbounded();
    let address = far.open(services(&b, &Arc::default()), move |lane| drop(sender.unbounded_send(lane))).await.unwrap();
    let deadline = a.now() + Duration::from_secs(5);
    let client = near.client(Target::from(address).expecting([2; 16]));
    assert_eq!(client.call::<_, Nap>(NAP, &Nap { millis: 1 }, deadline).await.unwrap().millis, 1);
    let purpose = Purpose::Lane { index: 0, generation: 3 };
    let session = dial(&a, &address.into(), purpose, &near.credentials(), deadline).await.unwrap();
    let lane = lanes.next().await.unwrap();
    assert_eq!((lane.generation, lane.peer.hello.identity.node), (3, [1; 16]));
    drop(session);
    let text = far.metrics().text();
    for line in [
        "millpond_sessions_total{kind=\"control\"} 1",
        "millpond_sessions_total{kind=\"lane\"} 1",
        "millpond_control_sessions 1",
        "millpond_rpc_calls_total{method=\"0x7e01\",outcome=\"done\"} 1",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let second = Node::new(b.clone(), {
        let mut options = options(3);
        options.listen = address;
        options
    });
    let taken = second.open(Router::new(), drop).await.unwrap_err();
    assert!(matches!(&taken, NodeError::Listen { address: named, .. } if *named == address), "{taken}");
    assert!(far.drain().await.unfinished.is_empty());
}

async fn a_node_ends_in_its_stated_order<A: Runtime, B: Runtime>(a: A, b: B) {
    let log = Arc::new(Log::default());
    let (near, far) = (Node::new(a.clone(), options(1)), Node::new(b.clone(), options(2)));
    let address = far.open(services(&b, &log), drop).await.unwrap();
    for step in ["lower step", "upper step"] {
        let (log, stopping) = (log.clone(), far.stopping());
        far.at_end(step, async move {
            assert!(stopping.is_stopped());
            log.add(step);
        });
    }
    let client = near.client(address.into());
    let deadline = a.now() + Duration::from_secs(5);
    let call = start(&a, async move { client.call::<_, Nap>(NAP, &Nap { millis: 100 }, deadline).await });
    while log.all().is_empty() {
        a.sleep(Duration::from_millis(1)).await;
    }
    let drained = within(&a, Duration::from_secs(5), far.drain()).await.unwrap();
    assert_eq!(call.await.unwrap().millis, 100);
    assert_eq!(log.all(), ["call begins", "upper step", "lower step", "call ends"]);
    assert!(drained.unfinished.is_empty() && drained.span < Duration::from_secs(5), "{drained:?}");
    let gone = a.dial(address).await.err().map(|error| error.kind());
    assert_eq!(gone, Some(std::io::ErrorKind::ConnectionRefused));
}

async fn a_step_that_hangs_costs_its_time_and_is_named<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut hurried = options(2);
    hurried.drain_span_max = Duration::from_millis(100);
    let (near, far) = (Node::new(a.clone(), options(1)), Node::new(b.clone(), hurried));
    let log = Arc::new(Log::default());
    let address = far.open(services(&b, &log), drop).await.unwrap();
    far.at_end("stuck", futures::future::pending());
    let client = near.client(address.into());
    let deadline = a.now() + Duration::from_secs(20);
    let call = start(&a, async move { client.call::<_, Nap>(NAP, &Nap { millis: 60_000 }, deadline).await });
    while log.all().is_empty() {
        a.sleep(Duration::from_millis(1)).await;
    }
    let drained = within(&a, Duration::from_secs(4), far.drain()).await.unwrap();
    assert_eq!(drained.unfinished.first(), Some(&"stuck"), "{drained:?}");
    assert!(within(&a, Duration::from_secs(4), call).await.unwrap().is_err(), "the call does not outlive the node");
}

on_pairs!(
    calls_and_lanes_come_in_at_one_port,
    a_node_ends_in_its_stated_order,
    a_step_that_hangs_costs_its_time_and_is_named,
);
