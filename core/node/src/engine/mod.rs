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

mod batch;
mod blocking;
mod core;
mod grant;
mod options;
mod peer;
mod remote;
mod statistics;
mod submit;
mod transfer;

use std::net::SocketAddr;
use std::sync::Arc;

pub use millpond_core::batch::RegionToken;
pub use millpond_core::quiet::Far;
use millpond_core::time::Duration;
use millpond_core::wire::hello::Identity;
pub use millpond_hal::mapping::{Backing, MapError, Mapping};
pub use millpond_hal::region::{LeaseError, Mode, Region, RegionBuf, RegionBytes};

pub use self::batch::{Arrival, Batch, Class, UnknownTransport, Via};
pub use self::blocking::Blocking;
pub use self::grant::{Arrived, COUNTERS_PER_GRANT_MAX, Grant, GrantError, GrantErrorKind, NotArrived, ReadGrant};
pub use self::options::Options;
pub use self::peer::{OpenError, Peer};
pub use self::remote::{OutOfBounds, RemoteExtent, RemoteRegion};
pub use self::statistics::{EXPLAIN_MAX, Explanation, Statistics};
pub use self::submit::{SubmitError, SubmitErrorKind};
pub use self::transfer::{Cause, Failure, Outcome, RefusalReason, Report, Status, Transfer, TransferError, TransferId};

use self::core::Core;
use self::peer::PeerInner;
use self::remote::Attached;
use crate::runtime::{Runtime, sleep_until};

/// The engine of one node. Clones are handles of the same engine; it stops when [`Engine::shut_down`] is called.
///
/// Its address for peers, its hello and its lanes belong to the node it is part of.
#[derive(Clone, Debug)]
pub struct Engine<R> {
    core: Arc<Core>,
    own: Peer,
    runtime: R,
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
}

impl<R: Runtime> Engine<R> {
    /// Starts an engine and its driver task on `runtime`.
    pub fn start(runtime: R, options: Options) -> Self {
        let identity = options.identity;
        let core = Arc::new(Core::new(options));
        let own = Peer { inner: Arc::new(PeerInner { identity, address: None, is_self: true }) };
        runtime.spawn(drive(runtime.clone(), Arc::clone(&core)));
        Self { core, own, runtime }
    }

    /// Registered memory of `len` bytes, zeroed, from which buffers are [carved](Region::carve). Freed with its last user.
    pub fn allocate(&self, len: u64, backing: Backing) -> Result<Region, MapError> {
        Ok(Region::unregistered(Mapping::new(len, backing)?, Mode::Leased))
    }

    /// Lets peers write these ranges, all of one region, until the grant is closed or dropped.
    pub fn grant_write(&self, memory: Vec<RegionBuf>) -> Result<Grant, GrantError<RegionBuf>> {
        let (token, arrivals) = self.core.grant_write(memory)?;
        Ok(Grant { core: Arc::clone(&self.core), token, arrivals })
    }

    /// Lets peers read these ranges, all of one region, until the grant is dropped.
    pub fn grant_read(&self, memory: Vec<RegionBytes>) -> Result<ReadGrant, GrantError<RegionBytes>> {
        Ok(ReadGrant { core: Arc::clone(&self.core), token: self.core.grant_read(memory)? })
    }

    /// The node that listens at `address`: says hello and opens a first lane to it, within the connect deadline. A node
    /// that is open already is given again.
    pub async fn open(&self, address: SocketAddr) -> Result<Peer, OpenError> {
        Err(OpenError::Connect { address, why: "this build reaches no other process yet".to_owned() })
    }

    /// The node that a control session introduced, as a peer: for a service that moves bytes to or from its client over the
    /// lanes which the client opened. Waits for the first of them for at most `within`.
    pub async fn peer(&self, identity: &Identity, within: Duration) -> Result<Peer, OpenError> {
        let own = self.own.identity();
        if (own.node, own.incarnation) == (identity.node, identity.incarnation) {
            return Ok(self.itself());
        }
        self.runtime.sleep(within).await;
        Err(OpenError::Late)
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
        token.kind().ok_or(AttachError::Kind)?;
        Ok(RemoteRegion { inner: Arc::new(Attached { peer: peer.clone(), token: *token }) })
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

    /// What it counted so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.core.statistics()
    }

    /// Who this engine is.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.core.options
    }

    /// The runtime it was started on.
    #[must_use]
    pub fn runtime(&self) -> &R {
        &self.runtime
    }

    /// Ends everything: transfers fail with [`Cause::ShutDown`], grants are closed, new work is refused.
    pub async fn shut_down(&self) {
        self.core.shut_down();
    }
}

/// The driver: fires timers. Ends with the engine's last handle or its shutdown.
async fn drive<R: Runtime>(runtime: R, core: Arc<Core>) {
    while !core.is_shut_down() && Arc::strong_count(&core) > 1 {
        let next = core.fire_timers(runtime.now());
        let mut is_first = true;
        let kicked = std::future::poll_fn(|context| {
            core.register_driver(context.waker());
            if std::mem::take(&mut is_first) { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
        });
        futures::future::select(std::pin::pin!(kicked), std::pin::pin!(sleep_until(&runtime, next))).await;
    }
}
