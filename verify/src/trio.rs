//! A store node, a prefill node and a decode node in one process, each with an engine and a port of its own, so that KV
//! really travels: over tcp or over shared memory.

use std::sync::Arc;

use futures::StreamExt;
use millpond_core::time::Duration;
use millpond_core::wire::message::serve::{GenerateRequest, Generated, Started};
use millpond_node::client::{self, StoreClient};
use millpond_node::decode::{self, Decode, RpcPrefills};
use millpond_node::directory::ShardConfig;
use millpond_node::engine::{self, Engine};
use millpond_node::kv::{Blocks, Pool, StoreBlocks, Tenants};
use millpond_node::metrics::Registry;
use millpond_node::model::Model;
use millpond_node::node::{self, Node};
use millpond_node::prefill::{self, Prefill};
use millpond_node::rpc::Router;
use millpond_node::runtime::Runtime;
use millpond_node::session::Target;
use millpond_node::store::{Place, StoreConfig, StoreRole};

/// How much is lent to the store and to each pool of pages, in bytes.
const MEMORY: u64 = 256 << 20;

/// A node that listens.
struct Member<R: Runtime> {
    node: Node<R>,
    engine: Engine<R>,
    address: String,
}

impl<R: Runtime> Member<R> {
    async fn bind(runtime: &R, name: &str) -> Self {
        let identity = node::identity(name, None).expect("without data nothing can fail");
        let engine = Engine::start(runtime.clone(), engine::Options::new(identity)).expect("an engine starts");
        let node = Node::new(runtime.clone(), node::Options::new(identity));
        let address = node.bind().await.expect("a free port").to_string();
        Self { node, engine, address }
    }

    async fn open(&self, services: Router) {
        self.node.open_with(services, &self.engine).await.expect("the port is bound");
    }

    async fn end(self) {
        self.node.drain().await;
        self.engine.shut_down().await;
    }
}

/// The three nodes. [`Trio::end`] ends them.
pub struct Trio<R: Runtime> {
    runtime: R,
    store: Member<R>,
    prefill: Member<R>,
    decoding: Member<R>,
    decode: Decode<R>,
    via: String,
}

/// What an answer came to.
#[derive(Clone, Debug)]
pub struct Said {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How it began.
    pub started: Started,
    /// Seconds from the request to the first token.
    pub first_token_s: f64,
    /// The largest batch that it was part of.
    pub batch_max: u32,
}

impl<R: Runtime> Trio<R> {
    /// Starts them; KV goes to the decode node over the transport `via`. `prefill` and `decode` are one model, or what
    /// watches one.
    ///
    /// # Panics
    /// A node does not start.
    pub async fn start(runtime: R, prefill: Arc<dyn Model>, decode: Arc<dyn Model>, via: &str) -> Self {
        let store = Member::bind(&runtime, "trio-store").await;
        let place = Place::Here(ShardConfig { is_first: true, ..ShardConfig::default() });
        let config = StoreConfig { capacity: MEMORY, ..StoreConfig::default() };
        let owner = StoreRole::start(store.engine.clone(), place, config).expect("a store starts");
        store.open(owner.router()).await;
        runtime.spawn(owner.run(store.address.clone(), store.node.stopping()));
        let prefill = prefill_node(&runtime, &store.address, prefill).await;
        let decoding = Member::bind(&runtime, "trio-decode").await;
        let role = role(&decoding, &store.address, decode).await;
        let options =
            decode::Options { address: decoding.address.clone(), via: via.into(), ..decode::Options::default() };
        let prefills = Arc::new(RpcPrefills::new(runtime.clone(), decoding.node.credentials()));
        let decode = Decode::start(role, decoding.engine.clone(), prefills, options, decoding.node.metrics());
        decoding.open(decode::service::methods(&decode)).await;
        Self { runtime, store, prefill, decoding, decode, via: via.into() }
    }

    /// Ends the prefill node and starts another one under its name, which knows nothing of the first.
    ///
    /// # Panics
    /// It does not start.
    pub async fn restart_prefill(&mut self, model: Arc<dyn Model>) {
        let fresh = prefill_node(&self.runtime, &self.store.address, model).await;
        std::mem::replace(&mut self.prefill, fresh).end().await;
    }

    /// Lets them answer `tokens` greedily with `count` tokens.
    ///
    /// # Panics
    /// They refuse, or the answer takes another way than it was to take.
    pub async fn say(&self, tokens: &[u32], count: u32) -> Said {
        let begun = std::time::Instant::now();
        let request = GenerateRequest {
            request_id: "trio".into(),
            tokens: tokens.to_vec(),
            max_tokens: count,
            prefill: self.prefill.address.clone(),
            ..Default::default()
        };
        let deadline = self.runtime.now() + Duration::from_secs(120);
        let mut generation = self.decode.generate(request, deadline).expect("the request is accepted");
        let (mut said, mut first_token_s, mut started) = (Vec::new(), None, None);
        while let Some(step) = generation.next().await {
            let Generated { tokens, started: begin, finished, .. } = step.expect("the answer goes on");
            if !tokens.is_empty() {
                first_token_s.get_or_insert_with(|| begun.elapsed().as_secs_f64());
            }
            said.extend(tokens);
            started = started.or(begin);
            if let Some(end) = finished {
                let (first_token_s, started) = (first_token_s.expect("a token"), started.expect("a beginning"));
                return Said { tokens: said, started, first_token_s, batch_max: end.batch_max };
            }
        }
        panic!("the stream ended without an end, over {}", self.via);
    }

    /// Waits for up to 10 s until the store has `count` blocks; how many it has. A cache: on a machine that is busy with
    /// other things a put may run out of time.
    pub async fn stored(&self, count: usize) -> usize {
        let client = client(&self.decoding, &self.store.address).await;
        let mut seen = 0;
        for _ in 0..5000 {
            let listed = client.list(b"kv/").next().await;
            seen = listed.ok().flatten().map_or(0, |page| page.rows.len());
            if seen >= count {
                break;
            }
            self.runtime.sleep(Duration::from_millis(2)).await;
        }
        seen
    }

    /// Ends all of them.
    pub async fn end(self) {
        drop(self.decode);
        for member in [self.decoding, self.prefill, self.store] {
            member.end().await;
        }
    }
}

async fn client<R: Runtime>(member: &Member<R>, store: &str) -> StoreClient<R> {
    let directory = Target::parse(store).expect("an address");
    let options = client::Options::default();
    let client = StoreClient::connect(&member.node, member.engine.clone(), directory, options).expect("memory");
    while client.view().await.map_or(true, |owners| owners.is_empty()) {
        member.engine.runtime().sleep(Duration::from_millis(2)).await;
    }
    client
}

async fn role<R: Runtime>(member: &Member<R>, store: &str, model: Arc<dyn Model>) -> Prefill<R> {
    let blocks: Arc<dyn Blocks> = Arc::new(StoreBlocks::new(client(member, store).await));
    let pool = Pool::new(&member.engine, model.card().layout, MEMORY).expect("memory");
    let (runtime, options) = (member.engine.runtime().clone(), prefill::Options::default());
    Prefill::new(runtime, model, pool, Some(blocks), Tenants::new([3; 32]), options, &Registry::new())
}

async fn prefill_node<R: Runtime>(runtime: &R, store: &str, model: Arc<dyn Model>) -> Member<R> {
    let member = Member::bind(runtime, "trio-prefill").await;
    let role = role(&member, store, model).await;
    let services = prefill::service::methods(&role, &member.engine);
    member.open(services.merge(decode::service::load_method(Some(&role), None))).await;
    member
}
