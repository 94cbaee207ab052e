//! An opened NIC, shared by the device that moves over it and by whoever connects endpoints.
//!
//! Opening, making endpoints and connecting them take system calls of a millisecond or more: do them on a thread that may
//! wait, and hand the finished connection to the fabric. Clones are the same NIC.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use super::endpoint::{Endpoint, EndpointError};
use super::gid::{NoGid, choose};
use super::record::QUEUES_MAX;
use super::verbs::{Domain, NicEvent, NicLimits, Verbs, VerbsError};

/// How a NIC is used.
///
/// ```
/// use millpond_hal::backend::rdma::RdmaOptions;
/// let options = RdmaOptions { queues: 4, ..RdmaOptions::default() };
/// assert_eq!(options.gid_index, None); // the best ranked address is used
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Data queue pairs of each link and direction, 1 to [`QUEUES_MAX`]. Batches go round them.
    pub queues: u16,
    /// Which address of the port to use; `None` ranks them (`gid`).
    pub gid_index: Option<u8>,
    /// Links of the device; beyond that an idle one is evicted.
    pub links_max: u32,
    /// The longest piece of a move that is one request, in bytes. Shorter ones show progress sooner on slow links.
    pub piece_len_max: u32,
    /// How long an acknowledgement may take before the NIC sends again: 4.096 us times 2 to this, 0 to 31. The default is
    /// about 67 ms; a peer that is gone is found after seven times that.
    pub ack_timeout_exponent: u8,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self { queues: 2, gid_index: None, links_max: 256, piece_len_max: 1 << 20, ack_timeout_exponent: 14 }
    }
}

/// A NIC cannot be used.
///
/// ```
/// use millpond_hal::backend::rdma::NicError;
/// let error = NicError::PortDown { nic: "mlx5_0".into() };
/// assert!(error.to_string().contains("mlx5_0"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// libibverbs is not there, or knows no NIC.
    #[error("no RDMA device: {reason}")]
    NoDevice {
        /// What was missing.
        reason: &'static str,
    },
    /// No NIC of that name.
    #[error("there is no RDMA device {name}; the devices are: {known}")]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// Its port does not work.
    #[error("the port of {nic} is not active; check its cable, its switch and `ip link`")]
    PortDown {
        /// Name of the NIC.
        nic: String,
    },
    /// No address.
    #[error("{nic}: {reason}")]
    NoGid {
        /// Name of the NIC.
        nic: String,
        /// Why.
        reason: NoGid,
    },
    /// A number of queues that is not possible.
    #[error("{queues} data queues are not possible; choose 1 to {QUEUES_MAX}")]
    Queues {
        /// What was asked for.
        queues: u16,
    },
    /// A verb failed.
    #[error("{nic}: {error}")]
    Verbs {
        /// Name of the NIC.
        nic: String,
        /// Which, and how.
        error: VerbsError,
    },
}

/// What happened on a NIC so far.
///
/// ```
/// use millpond_hal::backend::rdma::NicCounts;
/// assert_eq!(NicCounts::default().port_downs, 0); // `Nic::counts` tells those of a NIC
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NicCounts {
    /// The port went down.
    pub port_downs: u64,
    /// The port came up.
    pub port_ups: u64,
    /// Its addresses changed.
    pub address_changes: u64,
    /// Queue pairs failed, as the NIC says.
    pub queue_failures: u64,
    /// Data queue pairs that were made anew within a living link.
    pub queues_remade: u64,
    /// Idle links that made room.
    pub evictions: u64,
}

/// One counter of [`NicCounts`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    PortDown,
    PortUp,
    AddressChange,
    QueueFailure,
    QueueRemade,
    Eviction,
}

#[derive(Debug)]
struct Shared {
    verbs: Box<dyn Verbs>,
    options: RdmaOptions,
    limits: NicLimits,
    domain: Domain,
    is_down: AtomicBool,
    counts: [AtomicU64; 6],
}

/// One port of one opened NIC.
///
/// Example: `hal/tests/rdma_guest.rs`.
#[derive(Clone, Debug)]
pub struct Nic(Arc<Shared>);

impl Nic {
    /// The NIC behind these verbs. Refused if its port is down or has no usable address: better now than at the first peer.
    pub fn new(verbs: Box<dyn Verbs>, options: RdmaOptions) -> Result<Self, NicError> {
        let nic = verbs.name().to_owned();
        let failed = |error| NicError::Verbs { nic: nic.clone(), error };
        if options.queues == 0 || options.queues > QUEUES_MAX {
            return Err(NicError::Queues { queues: options.queues });
        }
        if !verbs.port().map_err(failed)?.is_active {
            return Err(NicError::PortDown { nic });
        }
        choose(&verbs.gids().map_err(failed)?, options.gid_index)
            .map_err(|reason| NicError::NoGid { nic: nic.clone(), reason })?;
        let (limits, domain) = (verbs.limits(), verbs.create_domain().map_err(failed)?);
        let (is_down, counts) = (AtomicBool::new(false), Default::default());
        Ok(Self(Arc::new(Shared { verbs, options, limits, domain, is_down, counts })))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.verbs.name()
    }

    /// How it is used.
    #[must_use]
    pub fn options(&self) -> RdmaOptions {
        self.0.options
    }

    /// Its bounds.
    #[must_use]
    pub fn limits(&self) -> NicLimits {
        self.0.limits
    }

    /// Whether it said that its port, or itself, does not work. Links on it end and none is opened meanwhile.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.0.is_down.load(Ordering::Relaxed)
    }

    /// What happened so far.
    #[must_use]
    pub fn counts(&self) -> NicCounts {
        let count = |count: Count| self.0.counts[count as usize].load(Ordering::Relaxed);
        NicCounts {
            port_downs: count(Count::PortDown),
            port_ups: count(Count::PortUp),
            address_changes: count(Count::AddressChange),
            queue_failures: count(Count::QueueFailure),
            queues_remade: count(Count::QueueRemade),
            evictions: count(Count::Eviction),
        }
    }

    /// Queue pairs and memory for a link to one peer, not yet connected. Its address is ranked anew. Takes milliseconds.
    ///
    /// # Errors
    /// The port is down, has no usable address, or the NIC is at a bound.
    pub fn endpoint(&self) -> Result<Endpoint, EndpointError> {
        Endpoint::new(self.clone())
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn verbs(&self) -> &dyn Verbs {
        &*self.0.verbs
    }

    /// The domain that local memory is registered in.
    pub(crate) fn domain(&self) -> Domain {
        self.0.domain
    }

    pub(crate) fn count(&self, count: Count) {
        self.0.counts[count as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an event. Returns whether links can no longer work.
    pub(crate) fn on_event(&self, event: NicEvent) -> bool {
        let (count, down) = match event {
            NicEvent::PortDown => (Some(Count::PortDown), Some(true)),
            NicEvent::PortUp => (Some(Count::PortUp), Some(false)),
            NicEvent::AddressesChanged => (Some(Count::AddressChange), None),
            NicEvent::DeviceGone => (None, Some(true)),
            NicEvent::QueuePairFailed => (Some(Count::QueueFailure), None),
            NicEvent::Other(_) => (None, None),
        };
        if let Some(count) = count {
            self.count(count);
        }
        if let Some(down) = down {
            self.0.is_down.store(down, Ordering::Relaxed);
        }
        down == Some(true)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.verbs.destroy_domain(self.domain);
    }
}
