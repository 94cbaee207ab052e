//! The transfer engine: moves batches between memory here and memory of other nodes, over whatever path is best now.
//!
//! The caller says what to move, never how. Memory is allocated here and *granted* to peers; a peer sends a
//! [`RegionToken`] by any message it likes, and whoever gets it [attaches](Engine::attach) it and names ranges of it in a
//! [`Batch`]. One [`Transfer`] per batch, with a status per request. It is not a message bus, an allocator or a store.
//!
//! Two ways in: async handles, and [`Blocking`] for threads that wait. Both are `Clone + Send + Sync` and cheap.
//!
//! Invariants: memory named by a batch is not touched any more once its transfer ended; every transfer ends; a write that
//! is done is visible over there; nothing lands in memory whose grant was closed.

#![allow(clippy::result_large_err)] // a batch that was not started comes back in the error, by design

mod act;
mod at_once;
mod batch;
mod blocking;
mod copy;
mod core;
mod drive;
mod ending;
mod files;
mod gpus;
mod grant;
mod lanes;
mod nics;
mod options;
mod own;
mod paths;
mod peer;
mod peers;
mod rail;
mod rails;
mod remote;
mod shard;
mod staging;
mod statistics;
mod submit;
mod transfer;
mod wires;
mod work;

use std::net::SocketAddr;
use std::sync::Arc;

pub use millpond_core::batch::{RegionToken, Rights};
pub use millpond_core::quiet::Far;
use millpond_core::time::Duration;
pub use millpond_core::transfer::Window;
use millpond_core::wire::hello::{Identity, Refusal};
use millpond_core::wire::session::Peer as Met;
pub use millpond_hal::fabric::AllocateError;
use millpond_hal::fabric::{self, AllocateOptions};
pub use millpond_hal::mapping::{Backing, MapError, Mapping};
pub use millpond_hal::region::{LeaseError, Mode, Region, RegionBuf, RegionBytes};

pub use self::batch::{Arrival, Batch, Class, Fence, FenceState, UnknownTransport, Via};
pub use self::blocking::Blocking;
pub use self::copy::{Copy, STAGE_LEN, STAGES, Stager};
pub use self::files::{
    Caching, DriverInfo, FileAccess, FileError, FileGrant, FileOptions, FileRegion, OpenFile, OpenFileError,
};
pub use self::gpus::Gpus;
pub use self::grant::{Arrived, COUNTERS_PER_GRANT_MAX, Grant, GrantError, GrantErrorKind, NotArrived, ReadGrant};
pub use self::nics::OwnNic;
pub use self::options::Options;
pub use self::paths::{PathEnd, PathState};
pub use self::peer::{OpenError, Peer};
pub use self::remote::{OutOfBounds, RemoteExtent, RemoteRegion};
pub use self::statistics::{Considered, Downgrade, DowngradeReason, EXPLAIN_MAX, Explanation, Statistics};
pub use self::submit::{SubmitError, SubmitErrorKind};
pub use self::transfer::{
    Cause, Failure, FileFault, Outcome, RefusalReason, Report, Status, Transfer, TransferError, TransferId,
};

pub use self::shard::StartError;
pub use self::wires::{Answered, Call, Wires};

use self::core::{Clock, Core};
use self::grant::Arrivals;
use self::remote::Attached;
use crate::runtime::{Runtime, Stop, by, local_addr};
use crate::session::{Acceptor, Lane, Limits, Session, Target, share};

/// The engine of one node. Clones are handles of the same engine; it stops with [`Engine::shut_down`], or when the last
/// handle is dropped.
///
/// Its address for peers and its hello belong to the node it is part of: the node hands over [lanes](Engine::adopt) that
/// were accepted on its port. An engine without a node [listens](Engine::listen) itself.
///
/// Example: `verify/tests/engine.rs`.
#[derive(Clone, Debug)]
pub struct Engine<R> {
    core: Arc<Core>,
    own: Peer,
    runtime: R,
    _last: Arc<LastHandle>,
}

/// Stops the engine when it is dropped.
#[derive(Debug)]
struct LastHandle(Arc<Core>);

impl Drop for LastHandle {
    fn drop(&mut self) {
        self.0.shut_down();
    }
}

/// Memory of a peer could not be attached.
///
/// ```
/// use millpond_node::engine::AttachError;
/// assert!(AttachError::Stale.to_string().contains("restarted"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The token is of another incarnation of the peer.
    #[error("the token is of an earlier start of the peer, which restarted; ask it for a new one")]
    Stale,
    /// No transport moves that kind of memory.
    #[error("no transport here moves memory of that kind")]
    Kind,
    /// The table of attached regions is full.
    #[error("all {remotes_max} attached regions are in use; drop some")]
    Full {
        /// The bound.
        remotes_max: usize,
    },
}

impl<R: Runtime> Engine<R> {
    /// Starts an engine and its driver task on `runtime`.
    pub fn start(runtime: R, options: Options) -> Result<Self, StartError> {
        Self::start_with(runtime, options, None)
    }

    /// The same over a network of the caller's own in place of TCP, without shared memory, and without spinning: on a clock
    /// that only goes on while the engine sleeps a spin never ends.
    pub fn start_over(runtime: R, mut options: Options, wires: Arc<dyn Wires>) -> Result<Self, StartError> {
        options.transports = vec![Via::Local, Via::Tcp];
        options.spin = Duration::ZERO;
        Self::start_with(runtime, options, Some(wires))
    }

    fn start_with(runtime: R, options: Options, wires: Option<Arc<dyn Wires>>) -> Result<Self, StartError> {
        let core = Arc::new(Core::new(options, Clock::of(runtime.clone()), wires)?);
        let inner = core.locked(|shard| shard.peers.get(core.own).map(|peer| Arc::clone(&peer.inner)));
        let inner = inner.ok_or_else(|| StartError::System { what: "a table", why: "no peers".to_owned() })?;
        runtime.spawn(drive::drive(runtime.clone(), Arc::clone(&core)));
        runtime.spawn(staging::serve(runtime.clone(), Arc::clone(&core)));
        if let Some(listener) = lanes::shm_listener(&core.options) {
            runtime.spawn(lanes::accept_shm(runtime.clone(), Arc::clone(&core), listener));
        }
        let last = Arc::new(LastHandle(Arc::clone(&core)));
        Ok(Self { core, own: Peer { inner }, runtime, _last: last })
    }

    /// Registered memory of `len` bytes, zeroed, from which buffers are [carved](Region::carve). Freed with its last user.
    pub fn allocate(&self, len: u64, backing: Backing) -> Result<Region, AllocateError> {
        self.allocate_with(len, AllocateOptions::default().with_backing(backing))
    }

    /// The same from the pages of one NUMA node.
    pub fn allocate_on_node(&self, len: u64, backing: Backing, node: u16) -> Result<Region, AllocateError> {
        self.allocate_with(len, AllocateOptions::default().with_backing(backing).on_node(node))
    }

    /// Makes a mapping that was made beforehand a region of this engine: memory of a GPU (`Cuda::allocate`, `Cuda::adopt`), or any
    /// other. Memory of a GPU has no view here and is touched by no CPU; it is granted, exposed, attached and named in batches
    /// like all other.
    pub fn register(&self, mapping: Mapping, mode: Mode) -> Result<Region, AllocateError> {
        self.core.locked(|shard| shard.fabric.insert_region(mapping, mode))
    }

    fn allocate_with(&self, len: u64, options: AllocateOptions) -> Result<Region, AllocateError> {
        let region = self.core.locked(|shard| shard.fabric.allocate(len, options))?;
        if let Some(why) = region.downgrade() {
            tracing::warn!(len, %why, "memory has ordinary pages, not the huge ones that were preferred");
        }
        Ok(region)
    }

    /// Memory that is copied in and out while peers may do the same: no leases, no references, `rights` for peers on all of
    /// it once it is [exposed](Engine::expose).
    pub fn allocate_raw(&self, len: u64, backing: Backing, rights: Rights) -> Result<Region, AllocateError> {
        self.core.locked(|shard| shard.fabric.allocate(len, AllocateOptions::raw(rights).with_backing(backing)))
    }

    /// The token by which peers reach all of a raw region, until it is dropped.
    pub fn expose(&self, region: &Region) -> Result<RegionToken, GrantErrorKind> {
        self.core.locked(|shard| shard.fabric.expose(region)).map_err(|reason| match reason {
            fabric::GrantError::NotRaw => GrantErrorKind::NotRaw,
            other => other.into(),
        })
    }

    /// Lets peers write these ranges, all of one region, until the grant is closed or dropped.
    pub fn grant_write(&self, memory: Vec<RegionBuf>) -> Result<Grant, GrantError<RegionBuf>> {
        self.granting(memory, |shard, memory| {
            let held = shard.fabric.grant_write(memory)?;
            let (token, arrivals) = (held.token(), Arc::new(Arrivals::default()));
            shard.arrivals.insert(token.region, Arc::clone(&arrivals));
            Ok(Grant { core: Arc::clone(&self.core), held: Some(held), token, arrivals })
        })
    }

    /// Lets peers read these ranges, all of one region, until the grant is dropped.
    pub fn grant_read(&self, memory: Vec<RegionBytes>) -> Result<ReadGrant, GrantError<RegionBytes>> {
        self.granting(memory, |shard, memory| {
            let held = shard.fabric.grant_read(memory)?;
            let token = held.token();
            Ok(ReadGrant { core: Arc::clone(&self.core), held: Some(held), token })
        })
    }

    fn granting<B, G>(
        &self,
        memory: Vec<B>,
        grant: impl FnOnce(&mut shard::Shard, Vec<B>) -> Result<G, fabric::NotGranted<B>>,
    ) -> Result<G, GrantError<B>> {
        if self.core.is_shut_down() {
            return Err(GrantError { kind: GrantErrorKind::ShutDown, memory });
        }
        let granted = self.core.locked(|shard| grant(shard, memory));
        granted.map_err(|refused| GrantError { kind: refused.reason.into(), memory: refused.ranges })
    }

    /// The node that listens at `address`: says hello and opens a first lane to it, within the connect deadline. A node
    /// that is open already is given again. While its handle is kept, lanes that break are dialled again.
    pub async fn open(&self, address: SocketAddr) -> Result<Peer, OpenError> {
        if self.core.is_shut_down() {
            return Err(OpenError::ShutDown);
        }
        lanes::open(&self.runtime, &self.core, address).await
    }

    /// The node that listens at each of these addresses, the best first. The first that answers within its share of the connect
    /// deadline is opened like any other; all of them are ways to it from then on, each with a lane of its own, dialled now
    /// and whenever it is lost: batches are spread over those that work by what they complete. At most four addresses count.
    pub async fn open_ways(&self, addresses: &[SocketAddr]) -> Result<Peer, OpenError> {
        let deadline = self.runtime.now() + self.core.options.connect_deadline;
        let mut last = OpenError::Resolve { name: String::new(), why: "no address was given".to_owned() };
        for (index, address) in addresses.iter().enumerate() {
            let until = share(self.runtime.now(), deadline, addresses.len() - index);
            match by(&self.runtime, until, self.open(*address)).await {
                Ok(Ok(peer)) => {
                    let (key, now) = (peer.inner.key, self.core.now());
                    self.core.locked(|shard| shard.add_addresses(key, addresses, &self.core.options, now));
                    return Ok(peer);
                }
                Ok(Err(error)) => last = error,
                Err(_) => last = OpenError::Late,
            }
        }
        Err(last)
    }

    /// [`Engine::open_ways`] for `host:port` with a name to look up; several, divided by commas, are one node.
    pub async fn open_named(&self, name: &str) -> Result<Peer, OpenError> {
        let failed = |why: String| OpenError::Resolve { name: name.to_owned(), why };
        let target = Target::parse(name).map_err(|error| failed(error.to_string()))?;
        let deadline = self.runtime.now() + self.core.options.connect_deadline;
        let found = by(&self.runtime, deadline, target.resolve(&self.runtime)).await.map_err(|_| OpenError::Late)?;
        let found = found.map_err(|error| failed(error.to_string()))?;
        if found.is_empty() {
            return Err(failed("it has no address".to_owned()));
        }
        self.open_ways(&found).await
    }

    /// The node that a control session introduced, as a peer: for a service that moves bytes to or from its client over the
    /// lanes which the client opened. Waits for the first of them for at most `within`.
    pub async fn peer(&self, identity: &Identity, within: Duration) -> Result<Peer, OpenError> {
        let deadline = self.runtime.now() + within;
        loop {
            if self.core.is_shut_down() {
                return Err(OpenError::ShutDown);
            }
            if let Some(inner) = self.core.locked(|shard| shard.known_peer(identity)) {
                return Ok(Peer { inner });
            }
            let now = self.runtime.now();
            if now >= deadline {
                return Err(OpenError::Late);
            }
            // The lane is a connection of its own and may come a moment after the session that speaks of it.
            self.runtime.sleep(Duration::from_millis(2).min(deadline.since(now))).await;
        }
    }

    /// Whether a lane to `peer` is open now. Lanes that nobody uses for long are closed until they are used again; who asks a
    /// peer to move bytes over a lane of ours [opens](Engine::open) it first.
    #[must_use]
    pub fn is_connected(&self, peer: &Peer) -> bool {
        self.core.locked(|shard| shard.peers.get(peer.inner.key).is_some_and(|peer| peer.has_lanes() && !peer.is_gone))
    }

    /// This engine as a peer of itself: transfers to it are copies in this process.
    #[must_use]
    pub fn itself(&self) -> Peer {
        self.own.clone()
    }

    /// Memory that `peer` granted, by the token it sent. Checks nothing over there: a token that is not good fails the
    /// requests that use it.
    pub fn attach(&self, peer: &Peer, token: &RegionToken) -> Result<RemoteRegion, AttachError> {
        if token.incarnation != peer.identity().incarnation {
            return Err(AttachError::Stale);
        }
        let region = self.core.locked(|shard| shard.fabric.attach(*token)).map_err(|error| match error {
            fabric::AttachError::Full { remotes_max } => AttachError::Full { remotes_max },
            _ => AttachError::Kind,
        })?;
        let core = Arc::clone(&self.core);
        // Files of ours have a lane of their own, and so has memory of our GPUs.
        let own = |via| self.core.locked(|shard| shard.own_peer_of(via)).ok_or(AttachError::Kind);
        let peer = match own::own_via(token.kind()).filter(|_| peer.is_self()) {
            Some(via) => Peer { inner: own(via)? },
            None => peer.clone(),
        };
        Ok(RemoteRegion { inner: Arc::new(Attached { peer, token: *token, region, core }) })
    }

    /// Starts a batch. All its requests may go to different peers; they end independently, the transfer with the last.
    pub fn submit(&self, batch: Batch) -> Result<Transfer, SubmitError> {
        self.core.submit(batch)
    }

    /// The same engine for threads that wait.
    #[must_use]
    pub fn blocking(&self) -> Blocking {
        Blocking { core: Arc::clone(&self.core) }
    }

    /// Whether a lane that says hello may be welcomed; what it replaces is closed. Give it to the node's
    /// [`Acceptor::with_admission`]. Sessions that are no lanes are none of its business.
    pub fn admit(&self, met: &Met) -> Result<(), Refusal> {
        lanes::admit(&self.core, met)
    }

    /// Takes over a lane that was accepted and [admitted](Engine::admit).
    pub fn adopt(&self, lane: Lane) -> Result<Peer, AdoptError> {
        lanes::adopt(&self.core, lane).map_err(|why| AdoptError { why })
    }

    /// Takes part in joining a NIC here with one of the peer's, over a session for that, which was [admitted](Engine::admit).
    pub fn join_rail(&self, session: Session<R::Stream>) {
        self.runtime.spawn(rail::accept(self.runtime.clone(), Arc::clone(&self.core), session));
    }

    /// Listens for lanes at `address` until `stop`; gives the address, whose port was chosen if it was 0. For engines that
    /// are not part of a node.
    pub async fn listen(&self, address: SocketAddr, stop: &Stop) -> std::io::Result<SocketAddr> {
        let listener = self.runtime.listen(address).await?;
        let local = local_addr(&listener)?;
        let credentials = lanes::credentials(&self.core.options);
        let admitting = Arc::clone(&self.core);
        let acceptor =
            Acceptor::new(credentials, Limits::default()).with_admission(move |met| lanes::admit(&admitting, met));
        let (runtime, core, stop) = (self.runtime.clone(), Arc::clone(&self.core), stop.clone());
        let owner = runtime.clone();
        self.runtime.spawn(async move {
            let take = move |session: Session<R::Stream>| {
                if let Err(why) = lanes::take_session(&owner, &core, session) {
                    tracing::info!(%why, "a session was turned away");
                }
            };
            if let Err(error) = acceptor.run(&runtime, &listener, &stop, take).await {
                tracing::error!(%error, "the engine's listener broke");
            }
        });
        Ok(local)
    }

    /// What it counted so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.core.statistics()
    }

    /// What became of a batch that ended: one of the last [`EXPLAIN_MAX`].
    #[must_use]
    pub fn explain(&self, id: TransferId) -> Option<Explanation> {
        self.core.locked(|shard| shard.explain(id))
    }

    /// What it was started with.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.core.options
    }

    /// The runtime it was started on.
    #[must_use]
    pub fn runtime(&self) -> &R {
        &self.runtime
    }

    /// Ends everything: transfers fail with [`Cause::ShutDown`], grants are closed, lanes too, new work is refused.
    pub async fn shut_down(&self) {
        self.core.shut_down();
    }
}

/// A lane was not taken over; its connection is closed.
///
/// ```
/// let error = millpond_node::engine::AdoptError { why: "the lane is of an earlier incarnation".into() };
/// assert!(error.to_string().contains("earlier incarnation"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lane was not taken over: {why}")]
pub struct AdoptError {
    /// Why not.
    pub why: String,
}

impl From<fabric::GrantError> for GrantErrorKind {
    fn from(reason: fabric::GrantError) -> Self {
        match reason {
            fabric::GrantError::Empty => Self::Empty,
            fabric::GrantError::ForeignRegion => Self::ForeignRegion,
            fabric::GrantError::NotRaw => Self::NotRaw,
            fabric::GrantError::OutOfBounds => Self::OutOfBounds,
            fabric::GrantError::ReadOnly => Self::ReadOnly,
            _ => Self::Full,
        }
    }
}
