//! Why a key is not there: a bounded memory of the last removals.

use alloc::collections::{BTreeMap, VecDeque};

use xxhash_rust::xxh3::xxh3_128;

use super::{NodeId, Stamp};
use crate::time::{Duration, Instant};

/// Why a replica left the index.
///
/// Example: [`Removal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Somebody asked for it.
    Removed,
    /// Its owner needed the space.
    Evicted,
    /// A newer version took its place.
    Superseded,
    /// Its owner was silent for too long, or died.
    OwnerLost,
    /// Its owner came back with a new incarnation, without it.
    OwnerRestarted,
    /// The whole namespace was cleared.
    Cleared,
    /// Its owner found it damaged, or gave the slot to somebody else.
    Dropped,
}

impl core::fmt::Display for Reason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Removed => "removed by request",
            Self::Evicted => "evicted: its owner needed the space",
            Self::Superseded => "superseded by a newer version",
            Self::OwnerLost => "lost with its owner",
            Self::OwnerRestarted => "lost when its owner restarted",
            Self::Cleared => "cleared with the whole namespace",
            Self::Dropped => "dropped by its owner: damaged or displaced",
        })
    }
}

/// How the last replica of an object was lost.
///
/// ```
/// use millpond_core::directory::{NodeId, Reason, Removal, Stamp};
/// use millpond_core::time::Duration;
/// let removal = Removal {
///     reason: Reason::Evicted, node: NodeId([1; 16]), version: Stamp::ZERO, len: 9, ago: Duration::from_secs(2),
/// };
/// assert_eq!(removal.reason.to_string(), "evicted: its owner needed the space");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removal {
    /// Why.
    pub reason: Reason,
    /// The node that held the last replica.
    pub node: NodeId,
    /// The version that was lost.
    pub version: Stamp,
    /// Its length in bytes.
    pub len: u64,
    /// How long ago.
    pub ago: Duration,
}

/// The answer to "why is this key a miss?".
///
/// ```
/// use millpond_core::directory::{Config, Directory, Explanation, Key};
/// use millpond_core::time::Instant;
/// let directory = Directory::new(Instant::ZERO, Config::fresh(1));
/// let why = directory.explain_miss(Instant::ZERO, Key::new(b"k").unwrap()).value;
/// assert_eq!(why, Explanation::NeverStored { removals_remembered: 0 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Explanation {
    /// It is not a miss.
    Present {
        /// Replicas in the index.
        replicas: u32,
        /// How many of them lie with owners that are silent.
        suspect: u32,
    },
    /// It was there.
    Lost(Removal),
    /// Never stored in this term, or lost longer ago than the last `removals_remembered` removals.
    NeverStored {
        /// Removals in the memory now.
        removals_remembered: u64,
    },
    /// The directory does not know yet: inventories are being collected.
    Rebuilding {
        /// When it will know at the latest.
        retry_after: Duration,
    },
}

/// Keys are kept as 128-bit digests: an accidental collision would cost a wrong explanation, never wrong bytes.
#[derive(Clone, Debug)]
pub(super) struct History {
    order: VecDeque<(u128, u64)>,
    last: BTreeMap<u128, Record>,
    count: u64,
    history_max: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) reason: Reason,
    pub(super) node: NodeId,
    pub(super) version: Stamp,
    pub(super) len: u64,
    pub(super) at: Instant,
    number: u64,
}

impl Record {
    pub(super) fn new(reason: Reason, node: NodeId, version: Stamp, len: u64, at: Instant) -> Self {
        Self { reason, node, version, len, at, number: 0 }
    }
}

impl History {
    pub(super) fn new(history_max: usize) -> Self {
        Self { order: VecDeque::new(), last: BTreeMap::new(), count: 0, history_max: history_max.max(1) }
    }

    pub(super) fn push(&mut self, key: &[u8], record: Record) {
        if self.order.len() == self.history_max
            && let Some((digest, number)) = self.order.pop_front()
            && self.last.get(&digest).is_some_and(|newest| newest.number == number)
        {
            self.last.remove(&digest);
        }
        self.count += 1;
        let digest = xxh3_128(key);
        self.order.push_back((digest, self.count));
        self.last.insert(digest, Record { number: self.count, ..record });
    }

    pub(super) fn find(&self, key: &[u8], now: Instant) -> Option<Removal> {
        let record = self.last.get(&xxh3_128(key))?;
        Some(Removal {
            reason: record.reason,
            node: record.node,
            version: record.version,
            len: record.len,
            ago: now.since(record.at),
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.order.len() as u64
    }
}
