//! Prefill, KV transfer, store and decode together say what one process says: token for token, with the toy model.

use std::sync::Arc;

use futures::StreamExt;
use futures::future::join_all;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_core::wire::message::serve::{FinishReason, GenerateRequest, Sampling, Started};
use millpond_node::client::StoreClient;
use millpond_node::decode::{self, Decode, RpcPrefills};
use millpond_node::directory::{Link, Shard, ShardConfig};
use millpond_node::engine::{Engine, Options};
use millpond_node::kv::{Blocks, Pool, StoreBlocks, Tenants};
use millpond_node::metrics::Registry;
use millpond_node::model::pages::HeapPages;
use millpond_node::model::sample::sample;
use millpond_node::model::{Model, Piece, toy::Toy};
use millpond_node::prefill::{self, Prefill};
use millpond_node::rpc::{self, Reason, Refusal};
use millpond_node::runtime::{Runtime, Stop, local_addr, within};
use millpond_node::session::{self, Acceptor, Credentials};
use millpond_node::store::{StoreConfig, StoreNode};
use millpond_tokio::Tokio;

const BLOCK: usize = 16;

/// What one process says after `tokens`: no pages moved, no batch, no chunks.
fn alone(tokens: &[u32], count: usize, sampling: &Sampling) -> Vec<u32> {
    let model = Toy::new();
    let layout = model.card().layout;
    let pages = u32::try_from(layout.pages_for((tokens.len() + count) as u64)).unwrap();
    let mut kv = HeapPages::new(layout, pages);
    let mut logits = vec![0.0; model.card().limits.vocabulary as usize];
    let mut said = tokens.to_vec();
    let mut start = 0;
    while said.len() < tokens.len() + count {
        let piece = Piece { tokens: &said[start..], start: small(start), kv: &mut kv, logits: Some(&mut logits) };
        model.forward(&mut [piece]).unwrap();
        start = said.len();
        said.push(sample(&logits, sampling, small(said.len())));
    }
    said.split_off(tokens.len())
}

fn small(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

fn identity(node: u8) -> Identity {
    Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN }
}

/// A prefill node and a decode node in this process, an rpc session between them, and a store that both use.
struct Cluster {
    runtime: Tokio,
    decode: Decode<Tokio>,
    prefill_address: String,
    prefill_pool: Pool,
    store: StoreClient<Tokio>,
    registry: Registry,
    _stop: StopOnDrop,
}

/// A directory, an owner and a client.
async fn store(engine: &Engine<Tokio>, stop: &Stop) -> StoreClient<Tokio> {
    let runtime = engine.runtime();
    let shard = Shard::start(ShardConfig { is_first: true, ..ShardConfig::default() }).unwrap();
    let link = Link::local(Arc::clone(&shard), runtime.clone());
    let config = StoreConfig { capacity: 256 << 20, ..StoreConfig::default() };
    let node = StoreNode::start(engine.clone(), link.clone(), config).unwrap();
    runtime.spawn(shard.run(runtime.clone(), stop.child()));
    runtime.spawn(node.clone().run("127.0.0.1:1".to_owned(), stop.child()));
    let (credentials, options) = (Credentials::new(identity(1)), millpond_node::client::Options::default());
    let client = StoreClient::new(engine.clone(), link, credentials, Some(node), options).unwrap();
    while client.view().await.unwrap().is_empty() {
        runtime.sleep(Duration::from_millis(1)).await;
    }
    client
}

struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// What a generation came to.
#[derive(Debug)]
struct Said {
    tokens: Vec<u32>,
    started: Started,
    reason: FinishReason,
    pauses: u32,
    batch_max: u32,
}

impl Cluster {
    /// `options` of the decode node; where it lies in them is where KV is sent to.
    async fn new(runtime: Tokio, decode_pages: u64, options: decode::Options) -> Self {
        let model: Arc<dyn Model> = Arc::new(Toy::new());
        let layout = model.card().layout;
        let engine = Engine::start(runtime.clone(), Options::new(identity(1))).unwrap();
        let stop = Stop::new();
        let store = store(&engine, &stop).await;
        let blocks: Arc<dyn Blocks> = Arc::new(StoreBlocks::new(store.clone()));
        let registry = Registry::new();
        let role = |engine: &Engine<Tokio>, pages: u64, blocks: Option<Arc<dyn Blocks>>| {
            let pool = Pool::new(engine, layout, pages * layout.page_len().next_multiple_of(4096)).unwrap();
            let options = prefill::Options::default();
            let tenants = Tenants::new([3; 32]);
            Prefill::new(runtime.clone(), Arc::clone(&model), pool, blocks, tenants, options, &registry)
        };
        // One that has to reach the other has an engine of its own.
        let is_apart = !options.address.is_empty();
        let far_identity = Identity { incarnation: 2, ..identity(2) };
        let far_engine =
            if is_apart { Engine::start(runtime.clone(), Options::new(far_identity)).unwrap() } else { engine.clone() };
        let far = role(&far_engine, 512, (!is_apart).then(|| blocks.clone()));
        let near = role(&engine, decode_pages, Some(blocks));
        let listener = runtime.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let prefill_address = local_addr(&listener).unwrap().to_string();
        let methods =
            prefill::service::methods(&far, &far_engine).merge(decode::service::load_method(Some(&far), None));
        let (router, owner) = (Arc::new(methods), runtime.clone());
        let halt = stop.clone();
        runtime.spawn(async move {
            let acceptor = Acceptor::new(Credentials::new(identity(1)), session::Limits::default());
            let (spawner, until) = (owner.clone(), halt.clone());
            let begin = move |session: session::Session<_>| {
                let (runtime, router, stop) = (spawner.clone(), Arc::clone(&router), until.clone());
                spawner.spawn(async move {
                    let limits = rpc::Limits::default();
                    let _ = rpc::serve(&runtime, session.stream, session.peer, router, limits, &stop).await;
                });
            };
            acceptor.run(&owner, &listener, &halt, begin).await.unwrap();
        });
        let prefills = Arc::new(RpcPrefills::new(runtime.clone(), Credentials::new(identity(1))));
        let decode = Decode::start(near, engine, prefills, options, &registry);
        let prefill_pool = far.pool().clone();
        Self { runtime, decode, prefill_address, prefill_pool, store, registry, _stop: StopOnDrop(stop) }
    }

    fn deadline(&self) -> Instant {
        self.runtime.now() + Duration::from_secs(60)
    }

    fn request(&self, tokens: &[u32], max_tokens: u32) -> GenerateRequest {
        GenerateRequest {
            request_id: "test".into(),
            tokens: tokens.to_vec(),
            max_tokens,
            prefill: self.prefill_address.clone(),
            ..Default::default()
        }
    }

    async fn say(&self, request: GenerateRequest) -> Result<Said, Refusal> {
        let mut generation = self.decode.generate(request, self.deadline())?;
        let (mut tokens, mut started) = (Vec::new(), None);
        while let Some(step) = generation.next().await {
            let step = step?;
            tokens.extend(step.tokens);
            started = started.or(step.started);
            if let Some(end) = step.finished {
                assert_eq!(end.generated_tokens as usize, tokens.len());
                let started = started.expect("the first message says how it started");
                return Ok(Said {
                    tokens,
                    started,
                    reason: end.reason(),
                    pauses: end.pauses,
                    batch_max: end.batch_max,
                });
            }
        }
        panic!("the stream ended without an end");
    }

    /// Waits until every page of both nodes is free.
    async fn all_free(&self) {
        let free = async {
            loop {
                let counts = [self.decode.pool().counts(), self.prefill_pool.counts()];
                if counts.iter().all(|counts| counts.filling == 0 && counts.sealed == 0 && counts.leased == 0) {
                    return;
                }
                self.runtime.sleep(Duration::from_millis(2)).await;
            }
        };
        within(&self.runtime, Duration::from_secs(10), free).await.expect("pages did not come back");
    }
}

fn with_cluster<F: Future<Output = ()>>(decode_pages: u64, test: impl FnOnce(Cluster) -> F) {
    with_options(decode_pages, decode::Options::default(), test);
}

fn with_options<F: Future<Output = ()>>(pages: u64, options: decode::Options, test: impl FnOnce(Cluster) -> F) {
    millpond_tokio::run(|runtime| async move { test(Cluster::new(runtime, pages, options).await).await }).unwrap();
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..small(len)).map(|n| (n * 31 + seed * 17 + n * n) % 256).collect()
}

#[test]
fn prefill_transfer_and_decode_say_what_one_process_says() {
    with_cluster(256, |cluster| async move {
        let greedy = Sampling::default();
        let long = prompt(10 * BLOCK + 5, 1);
        let cases: [(&str, Vec<u32>, usize); 7] = [
            ("no hit", long.clone(), 0),
            ("full hit", long.clone(), 10 * BLOCK),
            ("partial hit", [&long[..5 * BLOCK + 3], &prompt(40, 9)[..]].concat(), 5 * BLOCK),
            ("exactly n blocks", prompt(4 * BLOCK, 2), 0),
            ("exactly n blocks, again", prompt(4 * BLOCK, 2), 3 * BLOCK),
            ("one token", vec![65], 0),
            ("several chunks", prompt(300, 3), 0),
        ];
        for (name, tokens, cached) in cases {
            let said = cluster.say(cluster.request(&tokens, 24)).await.unwrap();
            assert_eq!(said.tokens, alone(&tokens, 24, &greedy), "{name}");
            assert_eq!(said.started.cached_tokens as usize, cached, "{name}");
            assert_eq!(said.reason, FinishReason::Length);
            cluster.all_free().await;
        }
    });
}

#[test]
fn a_colocated_node_says_the_same_and_shares_its_blocks() {
    with_cluster(256, |cluster| async move {
        let tokens = prompt(5 * BLOCK + 1, 4);
        let here = |tokens: &[u32]| GenerateRequest { prefill: String::new(), ..cluster.request(tokens, 40) };
        let expected = alone(&tokens, 40, &Sampling::default());
        let first = cluster.say(here(&tokens)).await.unwrap();
        cluster.all_free().await;
        let second = cluster.say(here(&tokens)).await.unwrap();
        let third = cluster.say(cluster.request(&tokens, 40)).await.unwrap();
        assert_eq!(
            (first.started.cached_tokens, second.started.cached_tokens, third.started.cached_tokens),
            (0, 80, 80)
        );
        for said in [first, second, third] {
            assert_eq!(said.tokens, expected);
        }
    });
}

#[test]
fn sampling_draws_the_same_wherever_it_happens() {
    with_cluster(256, |cluster| async move {
        let sampling = Sampling { temperature: 1.5, top_p: 0.9, seed: 42 };
        let tokens = prompt(33, 5);
        let request = GenerateRequest { sampling: Some(sampling), ..cluster.request(&tokens, 30) };
        let here = GenerateRequest { prefill: String::new(), ..request.clone() };
        let expected = alone(&tokens, 30, &sampling);
        assert_ne!(expected, alone(&tokens, 30, &Sampling { seed: 43, ..sampling }));
        assert_eq!(cluster.say(request).await.unwrap().tokens, expected);
        assert_eq!(cluster.say(here).await.unwrap().tokens, expected);
    });
}

#[test]
fn sixteen_requests_join_and_leave_between_steps_and_equal_their_solo_runs() {
    with_cluster(512, |cluster| async move {
        let runs = (0..16u32).map(|n| {
            let cluster = &cluster;
            async move {
                cluster.runtime.sleep(Duration::from_millis(20 * u64::from(n))).await;
                let tokens = prompt(20 + 7 * n as usize, n);
                let count = 150 + n;
                let said = cluster.say(cluster.request(&tokens, count)).await.unwrap();
                assert_eq!(said.tokens, alone(&tokens, count as usize, &Sampling::default()), "request {n}");
                said.batch_max
            }
        });
        let batches = join_all(runs).await;
        assert!(batches.iter().any(|size| *size > 1), "nobody was decoded together: {batches:?}");
        assert!(cluster.registry.text().contains("millpond_decode_batch_size"));
        cluster.all_free().await;
    });
}

#[test]
fn out_of_pages_a_request_pauses_and_resumes_with_identical_output() {
    with_cluster(24, |cluster| async move {
        let runs = (0..6u32).map(|n| {
            let cluster = &cluster;
            async move {
                let tokens = prompt(30 + n as usize, n);
                let said = cluster.say(cluster.request(&tokens, 120)).await.unwrap();
                assert_eq!(said.tokens, alone(&tokens, 120, &Sampling::default()), "request {n}");
                said.pauses
            }
        });
        let pauses: u32 = join_all(runs).await.into_iter().sum();
        assert!(pauses > 0, "60 pages were needed, 24 were there, and nobody paused");
        cluster.all_free().await;
    });
}

#[test]
fn a_client_that_leaves_cancels_everything_and_the_pages_come_back() {
    with_cluster(256, |cluster| async move {
        for (len, after) in [(2000, 0), (2000, 1), (40, 5)] {
            let request = cluster.request(&prompt(len, 7), 1000);
            let mut generation = cluster.decode.generate(request, cluster.deadline()).unwrap();
            for _ in 0..after {
                generation.next().await.unwrap().unwrap();
            }
            if after == 0 {
                cluster.runtime.sleep(Duration::from_millis(30)).await;
            }
            drop(generation);
            cluster.all_free().await;
        }
        let tokens = prompt(50, 8);
        let said = cluster.say(cluster.request(&tokens, 5)).await.unwrap();
        assert_eq!(said.tokens, alone(&tokens, 5, &Sampling::default()));
    });
}

#[test]
fn a_stop_token_ends_the_answer_and_is_not_part_of_it() {
    with_cluster(64, |cluster| async move {
        let tokens = prompt(20, 11);
        let all = alone(&tokens, 40, &Sampling::default());
        let stop = all[20];
        let end = all.iter().position(|token| *token == stop).unwrap();
        let request = GenerateRequest { stop_tokens: vec![stop], ..cluster.request(&tokens, 40) };
        let said = cluster.say(request).await.unwrap();
        assert_eq!((said.tokens.as_slice(), said.reason), (&all[..end], FinishReason::Stop));
    });
}

#[test]
fn requests_that_make_no_sense_are_refused_with_the_reason() {
    with_cluster(16, |cluster| async move {
        let fine = cluster.request(&[1, 2, 3], 4);
        let refused = [
            (GenerateRequest { tokens: vec![], ..fine.clone() }, Reason::Malformed, "at least one"),
            (GenerateRequest { tokens: vec![9999], ..fine.clone() }, Reason::Malformed, "vocabulary"),
            (GenerateRequest { tokens: vec![1; 5000], ..fine.clone() }, Reason::Malformed, "context"),
            (GenerateRequest { max_tokens: 0, ..fine.clone() }, Reason::Malformed, "max_tokens"),
            (GenerateRequest { max_tokens: 1000, ..fine.clone() }, Reason::TooLarge, "KV pages"),
            (GenerateRequest { model: "gpt".into(), ..fine.clone() }, Reason::NotFound, "toy"),
            (GenerateRequest { prefill: "127.0.0.1:1".into(), ..fine.clone() }, Reason::Unavailable, "127.0.0.1:1"),
        ];
        for (request, reason, word) in refused {
            let refusal = cluster.say(request).await.unwrap_err();
            assert_eq!(refusal.reason, reason, "{refusal}");
            assert!(refusal.to_string().contains(word), "{refusal}");
        }
        cluster.all_free().await;
        assert_eq!(cluster.say(fine).await.unwrap().tokens, alone(&[1, 2, 3], 4, &Sampling::default()));
        let stored = cluster.store.list(b"kv/").next().await.unwrap();
        assert!(stored.is_none_or(|page| page.rows.is_empty()), "no request filled a block");
    });
}

#[test]
fn a_decode_node_knows_within_a_second_that_its_prefill_node_cannot_deliver() {
    // Where nobody listens, and where a connection is taken and nothing is ever said.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [closed, silent.local_addr().unwrap()] {
        let options = decode::Options { address: address.to_string(), ..decode::Options::default() };
        with_options(64, options, |cluster| async move {
            let mut soonest = Duration::MAX;
            // A machine that is busy with other things may be late once.
            for seed in 1..=3 {
                let start = cluster.runtime.now();
                let refusal = cluster.say(cluster.request(&prompt(100, seed), 4)).await.unwrap_err();
                soonest = soonest.min(cluster.runtime.now().since(start));
                assert_eq!(refusal.reason, Reason::Unavailable, "{refusal}");
            }
            assert!(soonest < Duration::from_secs(1), "{soonest}");
            cluster.all_free().await;
        });
    }
}

/// Somebody whose answer is long, by the time that steps of it were measured.
async fn somebody(cluster: &Cluster) -> decode::Generation {
    let mut generation = cluster.decode.generate(cluster.request(&prompt(20, 1), 400), cluster.deadline()).unwrap();
    for _ in 0..3 {
        generation.next().await.unwrap().unwrap();
    }
    generation
}

/// One that bears no step that takes longer than a nanosecond: it wants to be alone.
fn hurried(cluster: &Cluster) -> GenerateRequest {
    GenerateRequest { tbt_slo_ns: 1, ..cluster.request(&prompt(33, 2), 3) }
}

#[test]
fn a_prompt_that_finds_the_batch_too_slow_is_refused_late_and_leaves_nothing() {
    let mut options = decode::Options::default();
    options.admission.policy = millpond_core::sched::admission::Policy::Late;
    with_options(256, options, |cluster| async move {
        let other = somebody(&cluster).await;
        let refusal = cluster.say(hurried(&cluster)).await.unwrap_err();
        assert_eq!(refusal.reason, Reason::Late, "{refusal}");
        assert!(cluster.registry.text().contains("millpond_decode_refused_late_total 1\n"));
        // Who bears anything joins.
        assert_eq!(cluster.say(cluster.request(&prompt(33, 2), 3)).await.unwrap().batch_max, 2);
        drop(other);
        cluster.all_free().await;
        let said = cluster.say(hurried(&cluster)).await.unwrap();
        assert_eq!(said.tokens, alone(&prompt(33, 2), 3, &Sampling::default()));
        cluster.all_free().await;
    });
}

#[test]
fn a_prompt_that_finds_the_batch_too_slow_is_held_until_there_is_room() {
    with_cluster(256, |cluster| async move {
        let other = somebody(&cluster).await;
        let mut held = cluster.decode.generate(hurried(&cluster), cluster.deadline()).unwrap();
        let first = held.next().await.unwrap().unwrap();
        assert!(first.started.is_some() && first.tokens.is_empty(), "it is computed, and has no place: {first:?}");
        drop(other);
        let mut tokens = Vec::new();
        while let Some(step) = held.next().await {
            tokens.extend(step.unwrap().tokens);
        }
        assert_eq!(tokens, alone(&prompt(33, 2), 3, &Sampling::default()));
        drop(held);
        cluster.all_free().await;
        // Its first token may take a nanosecond: it is not held at all.
        let other = somebody(&cluster).await;
        let late = GenerateRequest { ttft_slo_ns: 1, ..hurried(&cluster) };
        assert_eq!(cluster.say(late).await.unwrap_err().reason, Reason::Late);
        drop(other);
    });
}
