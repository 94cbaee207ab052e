//! What the client's callers hand in and get back.

use std::ops::Deref;

use millpond_core::directory::{Location, NodeId, Pin, Stamp};
use millpond_core::time::Duration;
use millpond_hal::region::{RegionBuf, RegionBytes};
use prost::bytes::Bytes;

use crate::directory::LinkError;
use crate::engine::Via;
use crate::rpc::Reason;

/// How a client behaves.
///
/// ```
/// use millpond_node::client::Options;
/// assert!(Options::default().lease > millpond_core::time::Duration::ZERO);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The lease asked for with each lookup.
    pub lease: Duration,
    /// How long a call that moves no bytes may take.
    pub call_span: Duration,
    /// How long nothing may move before a transfer is given up; calls may take this plus 20 ns per byte.
    pub progress_deadline: Duration,
    /// How long a put goes on while the store says "busy", and a get while the directory is being rebuilt.
    pub patience: Duration,
    /// How old the placement view may be.
    pub view_age_max: Duration,
    /// Bytes of registered memory for values that are handed in or out as plain bytes.
    pub pool_len: u64,
    /// The transport for values; `Auto` chooses.
    pub via: Via,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(5),
            call_span: Duration::from_secs(2),
            progress_deadline: Duration::from_secs(5),
            patience: Duration::from_secs(3),
            view_age_max: Duration::from_secs(1),
            pool_len: 64 << 20,
            via: Via::Auto,
        }
    }
}

/// What a put asks for beyond its bytes.
///
/// ```
/// use millpond_node::client::PutOptions;
/// assert_eq!(PutOptions::default().replicas, 1);
/// ```
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// Copies on different nodes; fewer are made if there are fewer nodes, and the receipt says so.
    pub replicas: u32,
    /// Replace a value that is there.
    pub upsert: bool,
    /// Whether it may be evicted.
    pub pin: Pin,
    /// Key of the block before this one, so that eviction takes this one first.
    pub parent: Option<Vec<u8>>,
    /// The node that should hold it, if it has room.
    pub prefer: Option<NodeId>,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self { replicas: 1, upsert: false, pin: Pin::Free, parent: None, prefer: None }
    }
}

/// Where a value to store comes from.
///
/// Example: `verify/tests/store.rs`.
#[derive(Clone, Debug)]
pub enum Source {
    /// Plain bytes: small ones travel inside the call, larger ones are copied into registered memory first.
    Plain(Bytes),
    /// Registered memory: read by the owner where it lies.
    Region(RegionBytes),
}

impl Source {
    /// Bytes of it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.deref().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Deref for Source {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Plain(bytes) => bytes,
            Self::Region(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Source {
    fn from(bytes: &[u8]) -> Self {
        Self::Plain(Bytes::copy_from_slice(bytes))
    }
}

impl From<Vec<u8>> for Source {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Plain(bytes.into())
    }
}

impl From<Bytes> for Source {
    fn from(bytes: Bytes) -> Self {
        Self::Plain(bytes)
    }
}

impl From<RegionBytes> for Source {
    fn from(bytes: RegionBytes) -> Self {
        Self::Region(bytes)
    }
}

/// What a put came to.
///
/// Example: `verify/tests/store.rs`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Put {
    /// It is visible.
    Stored(Receipt),
    /// The key was there and keeps its value.
    AlreadyThere {
        /// The version that is there.
        version: Stamp,
    },
    /// Nothing was stored.
    Refused {
        /// For the program.
        reason: Reason,
        /// For a person: what is wrong and what to do.
        detail: String,
        /// When to try again; `None` if that will not help by itself.
        retry_after: Option<Duration>,
    },
}

/// Where a value was stored.
///
/// ```
/// use millpond_core::directory::Stamp;
/// use millpond_node::client::Receipt;
/// let receipt = Receipt { version: Stamp { term: 1, n: 1 }, locations: vec![], copies_missing: 1 };
/// assert!(receipt.copies_missing > 0, "fewer copies than were asked for");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// Its version.
    pub version: Stamp,
    /// One per copy.
    pub locations: Vec<Location>,
    /// Copies that were asked for and not made.
    pub copies_missing: u32,
}

/// Where the bytes of a get go.
///
/// Example: `verify/examples/own_runtime/serve.rs`.
#[derive(Debug)]
pub enum Target {
    /// Wherever is best: see [`Value`].
    Any,
    /// Into this registered memory, which is exactly as long as the value.
    Into(RegionBuf),
}

/// What a get came to.
///
/// Example: `verify/tests/store.rs`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Got {
    /// The bytes, checked.
    Hit(Value),
    /// There are none. A buffer that was handed in comes back, with undefined contents.
    Miss {
        /// Why.
        reason: MissReason,
        /// What was handed in.
        buffer: Option<RegionBuf>,
    },
}

/// Why there are no bytes.
///
/// Example: `verify/tests/store.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissReason {
    /// The key is not in the store.
    Absent,
    /// It was there when it was looked up, and gone when it was fetched.
    Lost,
    /// The directory just started and does not know yet; ask again after `retry_after`.
    Rebuilding {
        /// When it will know at the latest.
        retry_after: Duration,
    },
}

/// The bytes of a value.
///
/// Example: `verify/tests/store.rs` (`get`).
#[derive(Debug)]
pub struct Value {
    /// The version that was read.
    pub version: Stamp,
    pub(super) bytes: Held,
}

#[derive(Debug)]
pub(super) enum Held {
    Plain(Bytes),
    Region(RegionBuf),
}

impl Value {
    /// The registered memory that holds it: the buffer that was handed in, or one of the client's.
    pub fn into_buffer(self) -> Option<RegionBuf> {
        match self.bytes {
            Held::Plain(_) => None,
            Held::Region(buf) => Some(buf),
        }
    }
}

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Held::Plain(bytes) => bytes,
            Held::Region(buf) => buf,
        }
    }
}

/// How a removal is done.
///
/// Example: `verify/tests/store.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoveOptions {
    /// Also what is leased; its readers get a miss.
    pub force: bool,
}

/// The store could not do what was asked, and it is neither a miss nor a refusal of the value.
///
/// Example: `verify/tests/store.rs`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The directory.
    #[error(transparent)]
    Directory(#[from] LinkError),
    /// No node lends memory, or all are silent.
    #[error("no store node is there to take the value; start one, or wait until it has joined")]
    NoOwner,
    /// Every owner of the value failed.
    #[error("no owner of the value answered; the last one, node {node}, failed: {detail}")]
    Owners {
        /// The last one that was tried.
        node: NodeId,
        /// What went wrong there.
        detail: String,
        /// A buffer that was handed in, with undefined contents.
        buffer: Option<RegionBuf>,
    },
    /// A put has no answer: it may become visible later, with its own bytes.
    #[error("the put has no answer and may become visible later: {detail}")]
    Indeterminate {
        /// What went wrong.
        detail: String,
    },
    /// A buffer of another length than the value.
    #[error("the value has {len} bytes, the buffer {buffer_len}; ask for its length first", buffer_len = .buffer.len())]
    BufferLength {
        /// Bytes of the value.
        len: u64,
        /// What was handed in.
        buffer: RegionBuf,
    },
    /// Registered memory is not to be had.
    #[error("no registered memory for {len} bytes: {detail}")]
    Memory {
        /// Bytes needed.
        len: u64,
        /// Why not.
        detail: String,
    },
}
