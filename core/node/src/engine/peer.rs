//! Another node, as the engine knows it.

use std::net::SocketAddr;
use std::sync::Arc;

use millpond_core::slab::Handle;
use millpond_core::wire::hello::Identity;
use parking_lot::Mutex;

use super::batch::Via;
use super::peers::SHM_LANES;

/// A node whose memory can be read and written, by [`Engine::open`](super::Engine::open) or because it opened us. Cheap to
/// clone; it names the node in its present incarnation, whatever lanes come and go.
///
/// Example: `verify/tests/engine.rs` (`itself`).
#[derive(Clone, Debug)]
pub struct Peer {
    pub(super) inner: Arc<PeerInner>,
}

#[derive(Debug)]
pub(super) struct PeerInner {
    /// Its place in the shard's table.
    pub(super) key: Handle,
    pub(super) identity: Identity,
    /// Where to dial it, each a way of its own; none: it dials us. Grows at the end only.
    pub(super) addresses: Mutex<Vec<SocketAddr>>,
    pub(super) is_self: bool,
    /// The transport of what it stands for, if that is something of the engine's own: see `own`.
    pub(super) own: Option<Via>,
}

/// Why a node could not be opened.
///
/// ```
/// use millpond_node::engine::OpenError;
/// assert!(OpenError::Late.to_string().contains("connect deadline"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Nobody answered there.
    #[error("cannot connect to {address}: {why}; check that the node runs and the address is right")]
    Connect {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        why: String,
    },
    /// A name has no address.
    #[error("{name:?} has no address ({why}); use host:port")]
    Resolve {
        /// The name.
        name: String,
        /// What the system said.
        why: String,
    },
    /// Dialling or hello took too long.
    #[error("the node did not complete its hello within the connect deadline; it is stuck, or no millpond node")]
    Late,
    /// The two sides do not go together; the text names the field.
    #[error("the hello was refused: {why}")]
    Hello {
        /// Which field, and both values.
        why: String,
    },
    /// TLS does not come about; the text says what to mend.
    #[error("no TLS with the node: {why}")]
    Tls {
        /// What is wrong.
        why: String,
    },
    /// The transport asked for does not reach the node.
    #[error("{via} does not reach this node: {why}")]
    NoPath {
        /// The transport.
        via: Via,
        /// Why not.
        why: String,
    },
    /// The engine knows as many peers as it may.
    #[error("the engine knows {peers_max} peers, the most it may; raise peers_max or drop some")]
    TooManyPeers {
        /// The bound.
        peers_max: u32,
    },
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

impl PeerInner {
    pub(super) fn new(key: Handle, identity: Identity, address: Option<SocketAddr>, is_self: bool) -> Self {
        let addresses = Mutex::new(address.into_iter().collect());
        Self { key, identity, addresses, is_self, own: None }
    }

    /// How many addresses of it there are to dial.
    pub(super) fn ways(&self) -> usize {
        self.addresses.lock().len()
    }

    pub(super) fn has_address(&self, address: SocketAddr) -> bool {
        self.addresses.lock().contains(&address)
    }

    /// Where a lane of that index goes: they go round the addresses.
    pub(super) fn address_of(&self, index: u8) -> Option<SocketAddr> {
        let addresses = self.addresses.lock();
        addresses.get(usize::from(index) % addresses.len().max(1)).copied()
    }

    /// Whether any of these addresses was not known; they are from now on, as many as there may be lanes of tcp.
    pub(super) fn learn(&self, addresses: &[SocketAddr]) -> bool {
        let mut known = self.addresses.lock();
        let before = known.len();
        for address in addresses {
            if known.len() < usize::from(SHM_LANES) && !known.contains(address) {
                known.push(*address);
            }
        }
        known.len() > before
    }
}

impl Peer {
    /// Who it is: node, incarnation, host.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.inner.identity
    }

    /// Where it was dialled first; `None` if only it dials us.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.inner.addresses.lock().first().copied()
    }

    /// All addresses of it that are known here, each a way of its own.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.inner.addresses.lock().clone()
    }

    /// Whether it is this engine itself.
    #[must_use]
    pub fn is_self(&self) -> bool {
        self.inner.is_self
    }
}

impl PartialEq for Peer {
    /// The same node in the same incarnation.
    fn eq(&self, other: &Self) -> bool {
        let (ours, theirs) = (&self.inner.identity, &other.inner.identity);
        (ours.node, ours.incarnation) == (theirs.node, theirs.incarnation)
    }
}

impl Eq for Peer {}
