//! What an engine is told once, at its start.

use millpond_core::time::Duration;
use millpond_core::transfer::{PathSpec, Window};
use millpond_core::wire::hello::Identity;
use millpond_core::wire::session::Key;

use super::batch::Via;
use super::gpus::Gpus;
use super::nics::OwnNic;
use super::rails::RAILS_MAX;
use crate::tls::Tls;

/// Bounds and defaults of an engine. Every bound that is reached is answered with
/// [`SubmitErrorKind::Busy`](super::SubmitErrorKind) and a hint when to try again.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_core::wire::hello::{HostIdentity, Identity};
/// use millpond_node::engine::Options;
/// let identity = Identity { node: [1; 16], incarnation: 1, host: HostIdentity::UNKNOWN };
/// let mut options = Options::new(identity);
/// options.progress_deadline = Duration::from_secs(2);
/// assert_eq!(options.lanes_per_peer_max, 2);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Who this node is.
    pub identity: Identity,
    /// The shared key of the cluster; `None`: peers are not authenticated.
    pub key: Option<Key>,
    /// The certificates of this node; `None`: sessions and lanes are not encrypted. What goes over shared memory and over
    /// rails never is, only the sessions by which those come to be: leave them out of `transports` where that will not do.
    pub tls: Option<Tls>,
    /// Whether payloads over tcp carry a checksum of our own: CRC-32C of what this engine writes and reads, at about 0.1 ms
    /// of CPU per MiB on each side. Damage is [`RefusalReason::Damaged`](super::RefusalReason). Default: TCP's own.
    pub checksums: bool,
    /// A tcp lane dialled here that nobody used for so long is closed; the next use dials it again. [`Duration::MAX`]:
    /// never. Default 10 min.
    pub lane_idle_span_max: Duration,
    /// How long nothing may move before a batch is given up. Default 5 s.
    pub progress_deadline: Duration,
    /// How long dialling, hello and proof of a lane may take. Default 900 ms.
    pub connect_deadline: Duration,
    /// NICs that rails may be opened over, in the order by which peers know them. Default: none.
    pub nics: Vec<OwnNic>,
    /// The backend for memory of this process's GPUs. Default: none, and no such memory can be moved.
    pub gpus: Option<Gpus>,
    /// Transports that may be used, best first. Default: local, shm, rdma, tcp.
    pub transports: Vec<Via>,
    /// Lanes of tcp to one peer; one for each of its addresses at least. Default 2, at most
    /// [`LANES_PER_PEER_MAX`](millpond_core::quiet::LANES_PER_PEER_MAX).
    pub lanes_per_peer_max: u8,
    /// What may be under way on one lane: bytes, moves, slices. Default 64 MiB, 262,144, 256.
    pub window: Window,
    /// Batches of all peers that may be queued or under way. Default 4096.
    pub transfers_max: u32,
    /// Bytes that may be queued or under way to one peer. Default 4 GiB.
    pub bytes_per_peer_max: u64,
    /// How long a side that just worked keeps polling before it sleeps; zero never spins. Default 20 µs.
    pub spin: Duration,
    /// Peers that may be known at a time. Default 1024.
    pub peers_max: u32,
}

impl Options {
    /// The defaults for a node with this identity.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            key: None,
            tls: None,
            checksums: false,
            lane_idle_span_max: Duration::from_secs(600),
            progress_deadline: Duration::from_secs(5),
            connect_deadline: Duration::from_millis(900),
            nics: Vec::new(),
            gpus: None,
            transports: vec![Via::Local, Via::Shm, Via::Rdma, Via::Tcp],
            lanes_per_peer_max: 2,
            window: PathSpec::WINDOW,
            transfers_max: 4096,
            bytes_per_peer_max: 4 << 30,
            spin: Duration::from_micros(20),
            peers_max: 1024,
        }
    }

    /// Rails to one peer that are dialled here, at most.
    pub(super) fn rails(&self) -> u8 {
        let nics = u8::try_from(self.nics.len()).unwrap_or(RAILS_MAX);
        if self.allows(Via::Rdma) { nics.min(RAILS_MAX) } else { 0 }
    }

    /// Whether `via` may be used; `Auto`, `File` and `Cuda` always may.
    #[must_use]
    pub fn allows(&self, via: Via) -> bool {
        matches!(via, Via::Auto | Via::File | Via::Cuda) || self.transports.contains(&via)
    }
}
