//! Names that cross the store: nodes, owners, keys, locations, stamps.

use core::fmt;

/// The longest key in bytes.
pub const KEY_LEN_MAX: usize = 1024;

/// A node's stable identity: 16 bytes that survive its restarts.
///
/// ```
/// use millpond_core::directory::NodeId;
/// assert_eq!(NodeId([0xab; 16]).to_string(), "abababab");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NodeId(pub [u8; 16]);

impl fmt::Display for NodeId {
    /// The first four bytes in hexadecimal: enough to tell nodes apart in a message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One life of one node that owns segments.
///
/// ```
/// use millpond_core::directory::{NodeId, Owner};
/// let before = Owner { node: NodeId([1; 16]), incarnation: 4 };
/// assert_ne!(before, Owner { incarnation: 5, ..before });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The node.
    pub node: NodeId,
    /// New and higher at each start of the node.
    pub incarnation: u64,
}

/// Where one replica lies. It names exactly one life of one slot: the owner refuses it once the slot was reused.
///
/// ```
/// use millpond_core::directory::{Location, NodeId};
/// let old = Location { node: NodeId([1; 16]), segment: 0, epoch: 4, slot: 9, generation: 1 };
/// assert_ne!(old, Location { generation: 2, ..old });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The owner's node.
    pub node: NodeId,
    /// Which of the owner's segments.
    pub segment: u32,
    /// The segment's epoch: new each time the segment is opened.
    pub epoch: u64,
    /// The slot in the segment's slot table.
    pub slot: u32,
    /// The slot's generation: bumped before each reuse.
    pub generation: u32,
}

impl Location {
    /// Whether both lie in the same segment of the same node.
    #[must_use]
    pub fn is_beside(&self, other: &Self) -> bool {
        self.node == other.node && self.segment == other.segment
    }
}

/// A place in a shard's history: terms, and events within a term. Later is larger.
///
/// ```
/// use millpond_core::directory::Stamp;
/// assert!(Stamp { term: 2, n: 1 } > Stamp { term: 1, n: 900 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Stamp {
    /// The shard's term.
    pub term: u64,
    /// Number of the event in the term, from 1.
    pub n: u64,
}

impl Stamp {
    /// Before everything.
    pub const ZERO: Self = Self { term: 0, n: 0 };
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term, self.n)
    }
}

/// A key whose length was checked: 1 to [`KEY_LEN_MAX`] arbitrary bytes.
///
/// ```
/// use millpond_core::directory::{Key, KeyError};
/// assert_eq!(Key::new(b"k\0\xff").unwrap().as_bytes(), b"k\0\xff");
/// assert_eq!(Key::new(b""), Err(KeyError { len: 0 }));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key<'a>(&'a [u8]);

/// A key is empty or longer than [`KEY_LEN_MAX`].
///
/// Example: [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyError {
    /// The length it has.
    pub len: usize,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key has {} bytes; a key has 1 to {KEY_LEN_MAX}: hash longer names", self.len)
    }
}

impl core::error::Error for KeyError {}

impl<'a> Key<'a> {
    /// `bytes` as a key, if their length is in range.
    pub const fn new(bytes: &'a [u8]) -> Result<Self, KeyError> {
        if bytes.is_empty() || bytes.len() > KEY_LEN_MAX { Err(KeyError { len: bytes.len() }) } else { Ok(Self(bytes)) }
    }

    /// The bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }
}

impl fmt::Debug for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}
