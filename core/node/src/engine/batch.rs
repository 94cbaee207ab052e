//! What a caller hands to the engine: a list of moves between memory here and memory of peers.
//!
//! A batch owns the memory it names: a write holds a share of the bytes it sends, a read holds the buffer it fills, both
//! until the request ended. It does not know a path; it may name a transport, a class, deadlines and an arrival counter.
//! Invariant: both sides of a request have the same length.

use std::sync::Arc;

use millpond_core::time::Duration;
pub use millpond_core::transfer::Class;
pub use millpond_hal::contract::{Fence, FenceState};

use super::remote::{RemoteExtent, RemoteRegion};
use super::transfer::Outcome;
use super::{Region, RegionBuf, RegionBytes};

/// A list of reads and writes that starts with one call and ends as one [`Transfer`](super::Transfer), with a status per
/// request.
///
/// Memory of a GPU is named like any other ([`Engine::register`](super::Engine::register)). To and from memory of this engine's
/// own GPUs it is moved directly, to and from all else through buffers of the engine, piece by piece, several at a time.
///
/// Requests keep the order in which they were added and carry their index; they may finish in any order, and nothing is
/// promised about bytes that two requests of one batch write to the same place. One allocation per batch, none per
/// request once [`Batch::with_capacity`] was right; [`Report::into_batch`](super::Report::into_batch) gives the
/// allocation back for the next one.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_node::engine::{Batch, Class};
/// let batch = Batch::new().class(Class::Bulk).progress_deadline(Duration::from_secs(2));
/// assert!(batch.is_empty());
/// assert_eq!(batch.bytes(), 0);
/// ```
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) requests: Vec<Request>,
    pub(super) settings: Settings,
    /// What it follows.
    pub(super) after: Option<Arc<dyn Fence>>,
    /// Empty; kept for its allocation.
    pub(super) outcomes: Vec<Outcome>,
    /// The same.
    pub(super) remotes: Vec<RemoteRegion>,
}

/// How a batch travels. Plain data, kept apart from the requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) class: Class,
    pub(super) via: Via,
    pub(super) deadline: Option<Duration>,
    pub(super) progress_deadline: Option<Duration>,
    pub(super) arrival: Option<Arrival>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { class: Class::Foreground, via: Via::Auto, deadline: None, progress_deadline: None, arrival: None }
    }
}

/// One move of a batch, with the memory it holds.
#[derive(Debug)]
pub(super) enum Request {
    /// Bytes from here into a peer's memory.
    Write {
        /// What to send.
        source: RegionBytes,
        /// Where it goes.
        target: RemoteExtent,
    },
    /// Bytes of a peer into memory here.
    Read {
        /// What to fetch.
        source: RemoteExtent,
        /// Where it goes.
        target: RegionBuf,
    },
    /// As `Write`, from a raw region.
    WriteRaw {
        /// What to send.
        source: RawRange,
        /// Where it goes.
        target: RemoteExtent,
    },
    /// As `Read`, into a raw region.
    ReadRaw {
        /// What to fetch.
        source: RemoteExtent,
        /// Where it goes.
        target: RawRange,
    },
    /// Between memory that is not of this batch: staged, see `staging`.
    Copy {
        /// What to fetch.
        source: RemoteExtent,
        /// Where it goes.
        target: RemoteExtent,
    },
}

impl Request {
    pub(super) fn remote(&self) -> &RemoteExtent {
        match self {
            Self::Write { target, .. } | Self::WriteRaw { target, .. } | Self::Copy { target, .. } => target,
            Self::Read { source, .. } | Self::ReadRaw { source, .. } => source,
        }
    }

    /// Whether some of the memory that it names lies in another process.
    pub(super) fn reaches_a_peer(&self) -> bool {
        match self {
            Self::Copy { source, target } => !source.is_own() || !target.is_own(),
            _ => !self.remote().is_own(),
        }
    }

    pub(super) fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::WriteRaw { .. })
    }

    /// Whether it goes through buffers of the engine: no link joins its two sides.
    pub(super) fn is_staged(&self) -> bool {
        let local = match self {
            Self::Copy { .. } => return true,
            Self::Write { source, .. } => source.region(),
            Self::Read { target, .. } => target.region(),
            Self::WriteRaw { source, .. } => &source.region,
            Self::ReadRaw { target, .. } => &target.region,
        };
        local.is_for_devices() && self.remote().region.peer().inner.own != Some(Via::Cuda)
    }
}

/// Part of a raw region, which it keeps alive.
#[derive(Clone, Debug)]
pub(super) struct RawRange {
    pub(super) region: Region,
    pub(super) offset: u64,
}

impl RawRange {
    /// The same range without its first `len` bytes.
    pub(super) fn skip(&self, len: u64) -> Self {
        Self { region: self.region.clone(), offset: self.offset + len }
    }
}

/// Which transport carries a batch.
///
/// A named transport is used or the batch fails within a second; only `Auto` chooses.
///
/// ```
/// use millpond_node::engine::Via;
/// assert_eq!("shm".parse::<Via>(), Ok(Via::Shm));
/// assert_eq!(Via::Tcp.to_string(), "tcp");
/// assert!("carrier-pigeon".parse::<Via>().unwrap_err().to_string().contains("auto, local, shm, rdma, tcp"));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Via {
    /// The best path both nodes share now.
    #[default]
    Auto,
    /// Copies inside this process; the peer must be this engine itself.
    Local,
    /// Shared memory between processes of one host.
    Shm,
    /// RDMA over the nodes' NICs.
    Rdma,
    /// Kernel TCP.
    Tcp,
    /// Files of this engine. Chosen for them by itself, and for nothing else.
    File,
    /// Memory of this process's GPUs, and between them. Chosen for it by itself, and for nothing else.
    Cuda,
}

/// A transport name nobody knows.
///
/// Example: [`Via`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no transport; use one of auto, local, shm, rdma, tcp")]
pub struct UnknownTransport {
    /// The name as it was given.
    pub name: String,
}

impl std::str::FromStr for Via {
    type Err = UnknownTransport;

    fn from_str(name: &str) -> Result<Self, UnknownTransport> {
        match name {
            "auto" => Ok(Self::Auto),
            "local" => Ok(Self::Local),
            "shm" => Ok(Self::Shm),
            "rdma" => Ok(Self::Rdma),
            "tcp" => Ok(Self::Tcp),
            _ => Err(UnknownTransport { name: name.to_owned() }),
        }
    }
}

impl std::fmt::Display for Via {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
            Self::File => "file",
            Self::Cuda => "cuda",
        })
    }
}

/// What the target counts when the writes of a batch have become visible there: it adds `amount` to counter `counter` of
/// the grant they name, once per batch and grant. Counted, never ordered.
///
/// ```
/// use millpond_node::engine::Arrival;
/// let layer_7_complete = Arrival { counter: 7, amount: 1 };
/// assert_eq!(layer_7_complete.amount, 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arrival {
    /// Which counter of the grant; the two sides agree on its meaning (a layer, a request).
    pub counter: u64,
    /// How much to add.
    pub amount: u64,
}

impl Batch {
    /// An empty batch: foreground, automatic path, the engine's progress deadline, no total deadline, no arrival.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Like [`Batch::new`], with room for `count` requests.
    #[must_use]
    pub fn with_capacity(count: usize) -> Self {
        Self { requests: Vec::with_capacity(count), ..Self::default() }
    }

    /// Adds a write of all of `source` to the first bytes of `target`.
    ///
    /// # Panics
    /// If the two lengths differ: cut the extent or the bytes first.
    #[must_use]
    pub fn write(mut self, source: RegionBytes, target: RemoteExtent) -> Self {
        self.push_write(source, target);
        self
    }

    /// Adds a read of `source` into all of `target`. The buffer comes back with the [`Report`](super::Report).
    ///
    /// # Panics
    /// If the two lengths differ.
    #[must_use]
    pub fn read(mut self, source: RemoteExtent, target: RegionBuf) -> Self {
        self.push_read(source, target);
        self
    }

    /// [`Batch::write`] for loops. Returns the request's index.
    ///
    /// # Panics
    /// If the two lengths differ.
    pub fn push_write(&mut self, source: RegionBytes, target: RemoteExtent) -> usize {
        assert_eq!(bytes_of(source.len()), target.len(), "a write copies equal lengths; cut the extent or the bytes");
        self.requests.push(Request::Write { source, target });
        self.requests.len() - 1
    }

    /// [`Batch::read`] for loops. Returns the request's index.
    ///
    /// # Panics
    /// If the two lengths differ.
    pub fn push_read(&mut self, source: RemoteExtent, target: RegionBuf) -> usize {
        assert_eq!(source.len(), bytes_of(target.len()), "a read copies equal lengths; cut the extent or the buffer");
        self.requests.push(Request::Read { source, target });
        self.requests.len() - 1
    }

    /// Adds a write of `target.len()` bytes at `offset` of a raw region, whose owner may change them meanwhile: the peer
    /// gets old, new or torn bytes then. Returns the request's index.
    pub fn push_write_raw(&mut self, source: &Region, offset: u64, target: RemoteExtent) -> usize {
        let source = RawRange { region: source.clone(), offset };
        self.requests.push(Request::WriteRaw { source, target });
        self.requests.len() - 1
    }

    /// Adds a read of `source` to `offset` of a raw region. Returns the request's index.
    pub fn push_read_raw(&mut self, source: RemoteExtent, target: &Region, offset: u64) -> usize {
        let target = RawRange { region: target.clone(), offset };
        self.requests.push(Request::ReadRaw { source, target });
        self.requests.len() - 1
    }

    /// Adds a copy from memory of one peer, or a file, into that of another, none of it memory of this batch. The engine
    /// fetches it into buffers of its own and sends it on from there, piece by piece, several at a time; a byte is written only
    /// after its piece was read as a whole. A transport that the batch [names](Batch::via) is that of the halves that join a
    /// peer, and its [arrival](Batch::arrival) counts for its writes. Returns the request's index.
    ///
    /// # Panics
    /// If the two lengths differ.
    pub fn push_copy(&mut self, source: RemoteExtent, target: RemoteExtent) -> usize {
        assert_eq!(source.len(), target.len(), "a copy has equal lengths; cut one of the extents");
        self.requests.push(Request::Copy { source, target });
        self.requests.len() - 1
    }

    /// Whether something of it goes through buffers of the engine, or all of it has to wait for a device.
    pub(super) fn is_staged(&self) -> bool {
        self.after.is_some() || self.requests.iter().any(Request::is_staged)
    }

    /// Starts it only once `fence` is passed: after the work that somebody gave a device before it. Over any transport; other
    /// batches are not held up, and a batch that waits can be cancelled. Its deadline counts from its submission.
    #[must_use]
    pub fn after(mut self, fence: Arc<dyn Fence>) -> Self {
        self.after = Some(fence);
        self
    }

    /// Sets the class.
    #[must_use]
    pub fn class(mut self, class: Class) -> Self {
        self.settings.class = class;
        self
    }

    /// Names the transport.
    #[must_use]
    pub fn via(mut self, via: Via) -> Self {
        self.settings.via = via;
        self
    }

    /// Ends whatever is unfinished `span` after submission, however well it goes. Default: none.
    #[must_use]
    pub fn deadline(mut self, span: Duration) -> Self {
        self.settings.deadline = Some(span);
        self
    }

    /// Ends the batch once nothing of it moved for `span`. Default: [`Options::progress_deadline`](super::Options).
    #[must_use]
    pub fn progress_deadline(mut self, span: Duration) -> Self {
        self.settings.progress_deadline = Some(span);
        self
    }

    /// Has the target count when the writes of this batch arrived.
    #[must_use]
    pub fn arrival(mut self, arrival: Arrival) -> Self {
        self.settings.arrival = Some(arrival);
        self
    }

    /// Requests in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether it holds no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Bytes it moves in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.requests.iter().map(|request| request.remote().len()).sum()
    }

    /// Drops all requests and what they were to follow, and keeps settings and allocation.
    pub fn clear(&mut self) {
        self.after = None;
        self.requests.clear();
    }

    /// Takes the requests apart again: the buffers of its reads, in order, for a caller whose submit was refused.
    #[must_use]
    pub fn into_buffers(self) -> Vec<RegionBuf> {
        let buffer = |request| match request {
            Request::Read { target, .. } => Some(target),
            _ => None,
        };
        self.requests.into_iter().filter_map(buffer).collect()
    }
}

/// A length in memory as a length on the wire.
pub(super) fn bytes_of(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
