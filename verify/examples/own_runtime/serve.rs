//! A store node on the runtime next door: its port, its calls, its directory, one value in and out. Panics on failure.

use std::sync::Arc;

use futures::executor::block_on;
use futures::future::join_all;
use millpond_core::time::Duration;
use millpond_core::wire::session::Key;
use millpond_node::client::{Got, Options as ClientOptions, Put, PutOptions, StoreClient};
use millpond_node::directory::{Link, Shard, ShardConfig};
use millpond_node::engine::{self, Engine};
use millpond_node::node::{Node, Options, identity};
use millpond_node::rpc::{Context, Refusal, Router, RpcError};
use millpond_node::runtime::{Runtime, within};
use millpond_node::session::Target;
use millpond_node::store::{StoreConfig, StoreNode};

#[path = "../own_runtime.rs"]
mod own;

pub(crate) use own::Own;

pub(crate) fn main() {
    run(&Own::start().expect("threads and an epoll set"));
}

const ECHO: u16 = 0x7f01;
const FOREVER: u16 = 0x7f02;

#[derive(Clone, PartialEq, prost::Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

fn run<R: Runtime>(runtime: &R) {
    let all = within(runtime, Duration::from_secs(30), serve(runtime));
    block_on(all).expect("a node and its store within 30 s");
    println!("own_runtime: a node served calls, a store kept a value, and both ended in order");
}

async fn serve<R: Runtime>(runtime: &R) {
    let mut options = Options::new(identity("own", None).unwrap());
    options.key = Some(Key::new(b"own runtime"));
    let node = Node::new(runtime.clone(), options);
    let address = node.bind().await.unwrap();

    let engine = Engine::start(runtime.clone(), engine::Options::new(node.identity())).unwrap();
    let shard = Shard::start(ShardConfig { is_first: true, ..ShardConfig::default() }).unwrap();
    runtime.spawn(Arc::clone(&shard).run(runtime.clone(), node.stopping()));
    let config = StoreConfig { capacity: 16 << 20, ..StoreConfig::default() };
    let link = Link::local(Arc::clone(&shard), runtime.clone());
    let store = StoreNode::start(engine.clone(), link, config).unwrap();
    runtime.spawn(store.clone().run(address.to_string(), node.stopping()));

    let services = Router::new()
        .call(ECHO, |_: Context, text: Text| async move { Ok::<Text, Refusal>(text) })
        .call(FOREVER, |_: Context, _: Text| std::future::pending::<Result<Text, Refusal>>())
        .merge(shard.router(runtime.clone()))
        .merge(store.router());
    node.open(services, drop).await.unwrap();

    calls(&node, Target::from(address)).await;
    value(&node, engine, store, Target::from(address)).await;
    let drained = node.drain().await;
    assert!(drained.unfinished.is_empty(), "{drained:?}");
}

/// Calls over the node's port: many at once, and one that would never end.
async fn calls<R: Runtime>(node: &Node<R>, target: Target) {
    let client = node.client(target);
    let deadline = node.runtime().now() + Duration::from_secs(10);
    let echoes = (0..100).map(|number| {
        let client = client.clone();
        async move {
            let request = Text { text: "pond ".repeat(number * 50) };
            let answer: Text = client.call(ECHO, &request, deadline).await.unwrap();
            assert_eq!(answer, request);
        }
    });
    join_all(echoes).await;
    let deadline = node.runtime().now() + Duration::from_millis(20);
    let late = client.call::<_, Text>(FOREVER, &Text::default(), deadline).await;
    assert!(matches!(late, Err(RpcError::Deadline { .. })), "{late:?}");
}

/// A value goes into the store and comes back, with the directory asked over the node's port.
async fn value<R: Runtime>(node: &Node<R>, engine: Engine<R>, store: StoreNode<R>, target: Target) {
    let link = Link::remote(node.client(target));
    let client = StoreClient::new(engine, link, node.credentials(), Some(store), ClientOptions::default()).unwrap();
    while client.view().await.unwrap().is_empty() {
        node.runtime().sleep(Duration::from_millis(1)).await;
    }
    let value: Vec<u8> = (0..1_000_000_u32).map(|place| place.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let put = client.put(b"a key", &value[..], &PutOptions::default()).await.unwrap();
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    match client.get(b"a key").await.unwrap() {
        Got::Hit(got) => assert!(got.to_vec() == value, "other bytes came back"),
        missed => panic!("{missed:?}"),
    }
    assert!(!matches!(client.get(b"another").await.unwrap(), Got::Hit(_)));
}
