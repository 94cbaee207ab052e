//! The owners a client knows: where they listen, whether they answered lately, how full they are.

use std::collections::HashMap;
use std::sync::Arc;

use millpond_core::directory::{Health, NodeId, Owner, OwnerView};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::Identity;
use millpond_core::wire::message::directory::ViewRequest;
use millpond_core::wire::message::store::{GetReply, GetRequest, METHOD_GET, METHOD_PUT, PutReply, PutRequest};
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::types::Options;
use crate::directory::{Link, LinkError};
use crate::engine::{Engine, Peer};
use crate::rpc::{Client, Dialer, Limits, RpcError};
use crate::runtime::{Runtime, by};
use crate::session::{Credentials, Target};
use crate::store::StoreNode;

/// How long an owner that failed is tried last.
const SHUNNED: Duration = Duration::from_secs(1);

/// A call to an owner failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum OwnerError {
    #[error("{0}")]
    Call(RpcError),
    #[error("no lane to it: {0}")]
    Lane(String),
    #[error("it left the store")]
    Gone,
}

impl OwnerError {
    /// Whether the owner surely did nothing.
    pub(super) fn is_untouched(&self) -> bool {
        match self {
            Self::Call(error) => error.is_untouched(),
            Self::Lane(_) | Self::Gone => true,
        }
    }
}

#[derive(Debug)]
pub(super) struct Owners<R> {
    engine: Engine<R>,
    credentials: Credentials,
    own: Option<StoreNode<R>>,
    options: Options,
    state: Mutex<State<R>>,
}

#[derive(Debug)]
struct State<R> {
    view: Arc<Vec<OwnerView>>,
    fetched_at: Option<Instant>,
    ways: HashMap<NodeId, Arc<Way<R>>>,
    shunned: HashMap<NodeId, Instant>,
}

#[derive(Debug)]
struct Way<R> {
    owner: Owner,
    address: Arc<str>,
    client: Client<R>,
    peer: Mutex<Option<Peer>>,
}

impl<R: Runtime> Owners<R> {
    pub(super) fn new(
        engine: Engine<R>,
        credentials: Credentials,
        own: Option<StoreNode<R>>,
        options: Options,
    ) -> Self {
        let state = State { view: Arc::default(), fetched_at: None, ways: HashMap::new(), shunned: HashMap::new() };
        Self { engine, credentials, own, options, state: Mutex::new(state) }
    }

    /// The placement view, fetched again if it is too old.
    pub(super) async fn view(&self, link: &Link<R>, deadline: Instant) -> Result<Arc<Vec<OwnerView>>, LinkError> {
        let now = self.engine.runtime().now();
        {
            let state = self.state.lock();
            let is_fresh = state.fetched_at.is_some_and(|at| now.since(at) < self.options.view_age_max);
            if is_fresh && !state.view.is_empty() {
                return Ok(Arc::clone(&state.view));
            }
        }
        self.refresh(link, deadline).await
    }

    pub(super) async fn refresh(&self, link: &Link<R>, deadline: Instant) -> Result<Arc<Vec<OwnerView>>, LinkError> {
        let reply = link.view(&ViewRequest {}, deadline).await?;
        let owners: Result<Vec<OwnerView>, _> = reply.owners.iter().map(OwnerView::try_from).collect();
        let view = Arc::new(owners.map_err(LinkError::Unreadable)?);
        let mut state = self.state.lock();
        state.view = Arc::clone(&view);
        state.fetched_at = Some(self.engine.runtime().now());
        let known = |node: &NodeId| view.iter().any(|owner| owner.owner.node == *node);
        state.ways.retain(|node, _| known(node));
        state.shunned.retain(|node, _| known(node));
        Ok(view)
    }

    /// Owners to store `key` at, best first: two by the key's hash, the one with more free space first, then the rest. So
    /// keys spread, and a full node is passed over without asking it.
    pub(super) fn placement(&self, view: &[OwnerView], key: &[u8], prefer: Option<NodeId>) -> Vec<Owner> {
        let now = self.engine.runtime().now();
        let state = self.state.lock();
        let is_good = |view: &&OwnerView| {
            view.health == Health::Active && state.shunned.get(&view.owner.node).is_none_or(|until| *until <= now)
        };
        let mut owners: Vec<&OwnerView> = view.iter().filter(is_good).collect();
        if owners.is_empty() {
            // A silent owner may answer yet; a refusal is better than none.
            owners = view.iter().collect();
        }
        let hash = xxh3_64(key);
        let rank = |owner: &OwnerView| xxh3_64(&[&owner.owner.node.0[..], &hash.to_le_bytes()].concat());
        owners.sort_by_key(|owner| (Some(owner.owner.node) != prefer, rank(owner)));
        let first = usize::from(prefer.is_some() && owners.first().is_some_and(|o| Some(o.owner.node) == prefer));
        if let [a, b, ..] = &mut owners[first..]
            && free_permille(b) > free_permille(a) + 50
        {
            std::mem::swap(a, b);
        }
        owners.into_iter().map(|view| view.owner).collect()
    }

    /// `node` failed: it is tried last for a while.
    pub(super) fn shun(&self, node: NodeId) {
        let until = self.engine.runtime().now() + SHUNNED;
        self.state.lock().shunned.insert(node, until);
    }

    pub(super) fn is_shunned(&self, node: NodeId) -> bool {
        let now = self.engine.runtime().now();
        self.state.lock().shunned.get(&node).is_some_and(|until| now < *until)
    }

    fn is_own(&self, node: NodeId) -> bool {
        self.own.is_some() && self.engine.options().identity.node == node.0
    }

    fn way(&self, node: NodeId) -> Result<Arc<Way<R>>, OwnerError> {
        let mut state = self.state.lock();
        let view = state.view.iter().find(|view| view.owner.node == node).ok_or(OwnerError::Gone)?;
        let (owner, address) = (view.owner, Arc::clone(&view.address));
        if let Some(way) = state.ways.get(&node).filter(|way| way.owner == owner && way.address == address) {
            return Ok(Arc::clone(way));
        }
        let lane = |error: &dyn std::fmt::Display| OwnerError::Lane(error.to_string());
        let target = Target::parse(&address).map_err(|error| lane(&error))?.expecting(node.0);
        let runtime = self.engine.runtime().clone();
        let dialer = Dialer::new(runtime.clone(), target, self.credentials.clone());
        let limits = Limits {
            dial_span_max: Duration::from_millis(900),
            gone_after: self.options.progress_deadline,
            ..Limits::default()
        };
        let client = Client::with_connect(runtime, dialer, limits);
        let way = Arc::new(Way { owner, address, client, peer: Mutex::default() });
        state.ways.insert(node, Arc::clone(&way));
        Ok(way)
    }

    /// Makes sure that `node` has a lane to this client, over which it can move bytes.
    async fn open_lane(&self, way: &Way<R>, deadline: Instant) -> Result<(), OwnerError> {
        // One that retired is dialled again before the owner is asked, who can only wait for it.
        if way.peer.lock().as_ref().is_some_and(|peer| self.engine.is_connected(peer)) {
            return Ok(());
        }
        let lane = |error: &dyn std::fmt::Display| OwnerError::Lane(error.to_string());
        let open = by(self.engine.runtime(), deadline, self.engine.open_named(&way.address));
        let peer = open.await.map_err(|error| lane(&error))?.map_err(|error| lane(&error))?;
        *way.peer.lock() = Some(peer);
        Ok(())
    }

    pub(super) async fn put(
        &self,
        node: NodeId,
        request: PutRequest,
        deadline: Instant,
    ) -> Result<PutReply, OwnerError> {
        if let Some(own) = self.own.as_ref().filter(|_| self.is_own(node)) {
            return self.local(own.serve_put(self.identity(), request), METHOD_PUT, deadline).await;
        }
        let way = self.way(node)?;
        if !request.token.is_empty() {
            self.open_lane(&way, deadline).await?;
        }
        way.client.call(METHOD_PUT, &request, deadline).await.map_err(|error| forget_lane(&way, error))
    }

    pub(super) async fn get(
        &self,
        node: NodeId,
        request: GetRequest,
        deadline: Instant,
    ) -> Result<GetReply, OwnerError> {
        if let Some(own) = self.own.as_ref().filter(|_| self.is_own(node)) {
            return self.local(own.serve_get(self.identity(), request), METHOD_GET, deadline).await;
        }
        let way = self.way(node)?;
        if !request.token.is_empty() {
            self.open_lane(&way, deadline).await?;
        }
        way.client.call(METHOD_GET, &request, deadline).await.map_err(|error| forget_lane(&way, error))
    }

    async fn local<T>(
        &self,
        work: impl Future<Output = Result<T, crate::rpc::Refusal>>,
        method: u16,
        deadline: Instant,
    ) -> Result<T, OwnerError> {
        let runtime = self.engine.runtime();
        let waited = deadline.since(runtime.now());
        let done = by(runtime, deadline, work).await.map_err(|_| RpcError::Deadline { method, waited });
        done.map_err(OwnerError::Call)?.map_err(|refusal| OwnerError::Call(RpcError::Refused(refusal)))
    }

    fn identity(&self) -> Identity {
        self.engine.options().identity
    }
}

/// After a failed call the lane may be gone, too: the next call opens it again.
fn forget_lane<R>(way: &Way<R>, error: RpcError) -> OwnerError {
    if !matches!(error, RpcError::Refused(_)) {
        *way.peer.lock() = None;
    }
    OwnerError::Call(error)
}

fn free_permille(owner: &OwnerView) -> u64 {
    let capacity: u64 = owner.segments.iter().map(|segment| segment.facts.capacity).sum();
    owner.free().saturating_mul(1_000) / capacity.max(1)
}
