//! The store in one process: directory, owner and client, over copies and over the node's own calls.

use std::sync::Arc;

use millpond_core::directory::{Explanation, Limits, Pin, Reason as Lost, Removal};
use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_core::wire::message::directory::HoldingsRequest;
use millpond_node::client::{
    ClientError, Got, MissReason, Options, Put, PutOptions, RemoveOptions, Source, StoreClient, Target,
};
use millpond_node::directory::{Link, Shard, ShardConfig};
use millpond_node::engine::{self, Backing, Engine};
use millpond_node::rpc::Reason;
use millpond_node::runtime::{Runtime, Stop};
use millpond_node::session::Credentials;
use millpond_node::store::{StoreConfig, StoreNode};
use millpond_tokio::Tokio;

struct Cluster {
    runtime: Tokio,
    shard: Arc<Shard>,
    node: StoreNode<Tokio>,
    client: StoreClient<Tokio>,
    stop: Stop,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

impl Cluster {
    fn start(runtime: Tokio, store: StoreConfig, limits: Limits) -> Self {
        let identity = Identity { node: [7; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
        let stop = Stop::new();
        let engine = Engine::start(runtime.clone(), engine::Options::new(identity)).unwrap();
        let shard = Shard::start(ShardConfig { is_first: true, limits, ..ShardConfig::default() }).unwrap();
        let link = Link::local(Arc::clone(&shard), runtime.clone());
        let node = StoreNode::start(engine.clone(), link.clone(), store).unwrap();
        runtime.spawn(Arc::clone(&shard).run(runtime.clone(), stop.child()));
        runtime.spawn(node.clone().run("127.0.0.1:1".to_owned(), stop.child()));
        let options = Options { patience: Duration::from_millis(200), ..Options::default() };
        let client = StoreClient::new(engine, link, Credentials::new(identity), Some(node.clone()), options).unwrap();
        Self { runtime, shard, node, client, stop }
    }

    async fn joined(&self) {
        while self.client.view().await.unwrap().is_empty() {
            self.runtime.sleep(Duration::from_millis(1)).await;
        }
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Put {
        self.client.put(key, value, &PutOptions::default()).await.unwrap()
    }

    /// The bytes of a value that must be there.
    async fn bytes(&self, key: &[u8]) -> Vec<u8> {
        match self.client.get(key).await.unwrap() {
            Got::Hit(value) => value.to_vec(),
            other => panic!("{other:?}"),
        }
    }
}

fn with_cluster<F: Future<Output = ()>>(store: StoreConfig, limits: Limits, test: impl FnOnce(Cluster) -> F) {
    millpond_tokio::run(|runtime| async move {
        let cluster = Cluster::start(runtime, store, limits);
        cluster.joined().await;
        test(cluster).await;
    })
    .unwrap();
}

fn small() -> StoreConfig {
    StoreConfig { capacity: 64 << 20, ..StoreConfig::default() }
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn is_stored(put: &Put) -> bool {
    matches!(put, Put::Stored(_))
}

#[test]
fn values_of_any_length_come_back_as_they_were() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        for len in [1, 2, 4096, 65_536, 65_537, 256 << 10, (256 << 10) + 1, 1 << 20, (9 << 20) + 77] {
            let (key, value) = (format!("value of {len}"), pattern(len as u64, len));
            assert!(is_stored(&cluster.put(key.as_bytes(), &value).await), "{len}");
            assert!(cluster.bytes(key.as_bytes()).await == value, "{len}");
        }
    });
}

#[test]
fn keys_are_arbitrary_bytes_up_to_a_limit_that_is_named() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        for key in ["schlüssel-键".as_bytes(), &[0, 255, 10, 0], &[7; 1024]] {
            assert!(is_stored(&cluster.put(key, key).await));
            assert_eq!(cluster.bytes(key).await, key);
        }
        for key in [&[][..], &[7; 2048]] {
            let Put::Refused { reason: Reason::Malformed, detail, retry_after: None } = cluster.put(key, b"v").await
            else {
                panic!()
            };
            assert!(detail.contains("1 to 1024"), "{detail}");
        }
        let Put::Refused { reason: Reason::Malformed, detail, .. } = cluster.put(b"k", b"").await else { panic!() };
        assert!(detail.contains("at least 1 byte"), "{detail}");
    });
}

#[test]
fn an_old_value_is_kept_unless_it_is_to_be_replaced() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        let Put::Stored(first) = cluster.put(b"k", b"old").await else { panic!() };
        assert_eq!(cluster.put(b"k", b"new").await, Put::AlreadyThere { version: first.version });
        assert_eq!(cluster.bytes(b"k").await, b"old");
        let upsert = PutOptions { upsert: true, ..PutOptions::default() };
        let Put::Stored(second) = cluster.client.put(b"k", &b"newer"[..], &upsert).await.unwrap() else { panic!() };
        assert!(second.version > first.version);
        assert_eq!(cluster.bytes(b"k").await, b"newer");
    });
}

#[test]
fn ten_thousand_small_values_go_in_and_come_out_as_one_batch() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        let key = |index: u32| format!("k{index}").into_bytes();
        let items = (0..10_000u32).map(|index| (key(index), Source::from(pattern(index.into(), 300)))).collect();
        let puts = cluster.client.put_batch(items, &PutOptions::default()).await;
        assert!(puts.len() == 10_000 && puts.iter().all(|put| put.as_ref().is_ok_and(is_stored)));
        let wanted = (0..10_000).map(|index| (key(index), Target::Any)).collect();
        for (index, got) in (0u64..).zip(cluster.client.get_batch(wanted).await) {
            let Ok(Got::Hit(value)) = got else { panic!("{index}: {got:?}") };
            assert!(*value == *pattern(index, 300), "{index}");
        }
        let keys: Vec<Vec<u8>> = (9_990..10_010).map(key).collect();
        let present = cluster.client.exists(&keys).await.unwrap();
        assert_eq!(present.iter().filter(|present| **present).count(), 10);
        let mut listing = cluster.client.list(b"k");
        let mut count = 0;
        while let Some(page) = listing.next().await.unwrap() {
            count += page.rows.len();
        }
        assert_eq!(count, 10_000);
        let force = RemoveOptions { force: true };
        assert_eq!(cluster.client.remove_prefix(b"k", force).await.unwrap().objects, 10_000);
    });
}

#[test]
fn registered_memory_is_neither_copied_in_nor_out() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        let region = cluster.client.engine().allocate(4 << 20, Backing::Memfd).unwrap();
        let mut source = region.carve(0, 1 << 20).unwrap();
        source.copy_from_slice(&pattern(1, 1 << 20));
        let source = source.freeze();
        assert!(is_stored(&cluster.client.put(b"k", source.clone(), &PutOptions::default()).await.unwrap()));
        let target = region.carve(2 << 20, 1 << 20).unwrap();
        let Got::Hit(value) = cluster.client.get_into(b"k", target).await.unwrap() else { panic!() };
        assert!(*value == *source);
        assert_eq!(value.into_buffer().unwrap().offset(), 2 << 20, "the buffer that was handed in");
        let short = region.carve(3 << 20, 100).unwrap();
        let refused = cluster.client.get_into(b"k", short).await;
        assert!(matches!(refused, Err(ClientError::BufferLength { len: 1_048_576, .. })), "{refused:?}");
        let Got::Hit(part) = cluster.client.get_range(b"k", 300_000, 500_000).await.unwrap() else { panic!() };
        assert!(*part == source[300_000..800_000]);
    });
}

#[test]
fn a_miss_says_why() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        let miss = cluster.client.get(b"k").await.unwrap();
        assert!(matches!(miss, Got::Miss { reason: MissReason::Absent, .. }), "{miss:?}");
        let why = cluster.client.explain_miss(b"k").await.unwrap();
        assert!(matches!(why, Explanation::NeverStored { .. }), "{why:?}");
        cluster.put(b"k", b"v").await;
        assert_eq!(cluster.client.remove(&[b"k".to_vec()], RemoveOptions::default()).await.unwrap().objects, 1);
        let why = cluster.client.explain_miss(b"k").await.unwrap();
        assert!(matches!(why, Explanation::Lost(Removal { reason: Lost::Removed, len: 1, .. })), "{why:?}");
        assert!(is_stored(&cluster.put(b"k", b"again").await), "what was removed can be stored again at once");
    });
}

#[test]
fn a_full_store_evicts_what_is_neither_leased_nor_pinned() {
    let store = StoreConfig { capacity: 8 << 20, ..StoreConfig::default() };
    let limits = Limits { lease_max: Duration::from_millis(300), ..Limits::default() };
    with_cluster(store, limits, |cluster| async move {
        let hard = PutOptions { pin: Pin::Hard, ..PutOptions::default() };
        assert!(is_stored(&cluster.client.put(b"pinned", pattern(0, 1 << 20), &hard).await.unwrap()));
        for index in 1..40u64 {
            let put = cluster.put(format!("k{index}").as_bytes(), &pattern(index, 1 << 20)).await;
            assert!(is_stored(&put), "{index}: {put:?}");
        }
        assert_eq!(cluster.bytes(b"pinned").await, pattern(0, 1 << 20));
        let facts = cluster.node.facts();
        assert!(facts.evicted >= 32 && facts.free + (8 << 20) >= facts.capacity, "{facts:?}");
        let why = cluster.client.explain_miss(b"k1").await.unwrap();
        assert!(matches!(why, Explanation::Lost(Removal { reason: Lost::Evicted, .. })), "{why:?}");
        let refused = cluster.put(b"too long", &pattern(9, 9 << 20)).await;
        assert!(matches!(refused, Put::Refused { reason: Reason::TooLarge, retry_after: None, .. }), "{refused:?}");
    });
}

#[test]
fn a_store_full_of_pinned_values_refuses_with_a_reason_and_takes_again_when_there_is_room() {
    let store = StoreConfig { capacity: 4 << 20, ..StoreConfig::default() };
    with_cluster(store, Limits::default(), |cluster| async move {
        let hard = PutOptions { pin: Pin::Hard, ..PutOptions::default() };
        for index in 0..4u64 {
            let key = format!("k{index}");
            assert!(is_stored(&cluster.client.put(key.as_bytes(), pattern(index, 1 << 20), &hard).await.unwrap()));
        }
        let Put::Refused { reason: Reason::Full, detail, retry_after: Some(_) } = cluster.put(b"k4", b"v").await else {
            panic!()
        };
        assert!(detail.contains("pinned"), "{detail}");
        let facts = cluster.node.facts();
        assert_eq!((facts.sealed, facts.writing, facts.leaving), (4, 0, 0), "nothing was lost: {facts:?}");
        cluster.client.remove(&[b"k0".to_vec()], RemoveOptions::default()).await.unwrap();
        let patient = PutOptions::default();
        for _ in 0..200 {
            if is_stored(&cluster.client.put(b"k4", &b"v"[..], &patient).await.unwrap()) {
                return;
            }
            cluster.runtime.sleep(Duration::from_millis(10)).await;
        }
        panic!("the space of a removed value never came back: {:?}", cluster.node.facts());
    });
}

#[test]
fn watchers_see_every_change_in_order() {
    with_cluster(small(), Limits::default(), |cluster| async move {
        let start = cluster.client.list(b"").next().await.unwrap().unwrap().position;
        cluster.put(b"a", b"1").await;
        cluster.client.remove(&[b"a".to_vec()], RemoveOptions::default()).await.unwrap();
        let deadline = cluster.runtime.now() + Duration::from_secs(5);
        let mut changes = cluster.client.watch(Some(start), deadline).await.unwrap();
        let batch = changes.next().await.unwrap().unwrap();
        let stamps: Vec<u64> = batch.events.iter().map(|event| event.at.n).collect();
        assert_eq!((stamps, batch.gap), (vec![start.n + 1, start.n + 2], false));
        assert_eq!(cluster.shard.totals().objects, 0);
    });
}

#[test]
fn a_watcher_that_fell_behind_the_ring_is_told_of_the_gap_and_asks_what_each_node_holds() {
    let limits = Limits { events_max: 8, page_max: 5, ..Limits::default() };
    with_cluster(small(), limits, |cluster| async move {
        let link = Link::local(Arc::clone(&cluster.shard), cluster.runtime.clone());
        let deadline = cluster.runtime.now() + Duration::from_secs(10);
        let start = cluster.client.list(b"").next().await.unwrap().unwrap().position;
        for key in 0..20 {
            cluster.put(format!("kv/{key:02}").as_bytes(), b"1").await;
        }
        cluster.put(b"other", b"1").await;
        let mut changes = cluster.client.watch(Some(start), deadline).await.unwrap();
        let batch = changes.next().await.unwrap().unwrap();
        assert!(batch.gap && batch.events.is_empty() && batch.next.n == start.n + 21, "{batch:?}");
        let (mut keys, mut after) = (Vec::new(), None);
        loop {
            let request = HoldingsRequest { node: vec![7; 16], prefix: b"kv/".to_vec(), after, max: 1_000 };
            let page = link.holdings(&request, deadline).await.unwrap();
            assert!(page.keys.len() <= 5, "no longer than the directory's own limit");
            keys.extend(page.keys);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        keys.sort();
        assert_eq!(keys, (0..20).map(|key| format!("kv/{key:02}").into_bytes()).collect::<Vec<_>>());
        let unknown =
            link.holdings(&HoldingsRequest { node: vec![7; 3], ..HoldingsRequest::default() }, deadline).await;
        assert_eq!(unknown.unwrap_err().reason(), Some(Reason::Malformed));
        // It goes on where the gap ended, and hears within a second that there is nothing new.
        cluster.put(b"kv/20", b"1").await;
        let next = changes.next().await.unwrap().unwrap();
        assert_eq!((next.gap, next.events.len()), (false, 1));
        let quiet = changes.next().await.unwrap().unwrap();
        assert!(!quiet.gap && quiet.events.is_empty() && quiet.next == next.next);
    });
}
