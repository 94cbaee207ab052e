//! The store's index: which object lies where, who may rely on it, and what became of it.
//!
//! One [`Directory`] is one shard: a deterministic, single-threaded machine. It never sees a payload byte, an address it
//! could dial or a clock: owners write store memory, the node layer carries messages, every input takes `now`. There is no
//! log: after a restart the index is rebuilt from the owners' inventories.
//!
//! Invariants:
//! - a visible object has at least one replica, and every replica lies in a segment of an owner in the table;
//! - one slot of one segment holds at most one replica, and a segment at most one of an object;
//! - a version is the [`Stamp`] of the event that stored it; a lower version never replaces a higher one;
//! - a replica with a running lease or a pin is never given up to eviction;
//! - every change of the index is one numbered event (an owner that leaves is one more), and every lost object one entry of the removal history.

mod events;
mod history;
mod holdings;
mod names;
mod object;
mod owners;
mod rebuild;
mod report;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::time::{Duration, Instant};

pub use events::{Change, Event, EventPage};
pub use history::{Explanation, Reason, Removal};
pub use holdings::{Holdings, Place};
pub use names::{KEY_LEN_MAX, Key, KeyError, Location, NodeId, Owner, Stamp};
pub use object::{
    Commit, Committed, EvictVerdict, Found, Leases, Listed, Located, Miss, Mode, Page, Pin, Removed, Stat, Urgency,
    Victim,
};
pub use owners::{Health, Join, OwnerView, SegmentFacts, SegmentLoad, SegmentView, Tier};
pub use rebuild::{Entry, EntryVerdict, Inventory, Part};
pub use report::Totals;

use events::EventRing;
use history::History;
use object::Object;
use owners::OwnerRow;

/// Every bound of one shard, by name. Full is an answer ([`Refusal`]), never a wait.
///
/// ```
/// use millpond_core::directory::Limits;
/// let limits = Limits { objects_max: 10, ..Limits::default() };
/// assert!(limits.replicas_max >= 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Objects indexed at once.
    pub objects_max: usize,
    /// Owners in the table at once.
    pub owners_max: usize,
    /// Segments of one owner.
    pub segments_max: usize,
    /// Replicas of one object.
    pub replicas_max: usize,
    /// Bytes of one value.
    pub value_len_max: u64,
    /// Rows of one page of a listing, an event page, a removal by prefix, a batch of retired locations.
    pub page_max: usize,
    /// Events kept for watchers that resume.
    pub events_max: usize,
    /// Removals remembered for [`Directory::explain_miss`].
    pub history_max: usize,
    /// The longest lease a caller can ask for; longer wishes are cut.
    pub lease_max: Duration,
    /// Silence after which an owner gets no new work.
    pub suspect_after: Duration,
    /// Silence after which an owner's replicas leave the index; longer than `suspect_after`.
    pub gone_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            objects_max: 16 << 20,
            owners_max: 4_096,
            segments_max: 64,
            replicas_max: 8,
            value_len_max: 1 << 40,
            page_max: 1_000,
            events_max: 65_536,
            history_max: 1_000_000,
            lease_max: Duration::from_secs(10),
            suspect_after: Duration::from_millis(600),
            gone_after: Duration::from_secs(5),
        }
    }
}

/// How a shard begins its term.
///
/// ```
/// use millpond_core::directory::{Config, Directory, Start};
/// use millpond_core::time::{Duration, Instant};
/// let start = Start::Fresh; // nothing was stored before: it answers at once
/// let directory = Directory::new(Instant::ZERO, Config { start, ..Config::fresh(1) });
/// assert!(directory.is_rebuilt(Instant::ZERO));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Start {
    /// Nothing was ever stored under this shard: nobody holds a lease, nothing has to be waited for.
    Fresh,
    /// An earlier term existed. Until each node of `expected` has reported its inventory, or `window` has passed, an
    /// absent key is not known to be absent; until the longest lease has run out, eviction is not confirmed.
    Recovering {
        /// Nodes that owned segments before; may be empty when they are not known.
        expected: Vec<NodeId>,
        /// How long to wait for them.
        window: Duration,
    },
}

/// What a shard is told when it is made.
///
/// ```
/// use millpond_core::directory::{Config, Limits};
/// let limits = Limits { objects_max: 1000, ..Limits::default() };
/// assert_eq!(Config { limits, ..Config::fresh(4) }.term, 4);
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    /// This shard's number.
    pub shard: u32,
    /// This term; higher than every earlier term of the shard.
    pub term: u64,
    /// Objects with an older version were cleared and never return; `Stamp::ZERO` if nothing ever was.
    pub cleared: Stamp,
    /// Whether an earlier term existed.
    pub start: Start,
    /// The bounds.
    pub limits: Limits,
    #[doc(hidden)]
    pub seeded_bug: Option<SeededBug>,
}

impl Config {
    /// A first term of shard 0 with default limits.
    #[must_use]
    pub fn fresh(term: u64) -> Self {
        Self { shard: 0, term, cleared: Stamp::ZERO, start: Start::Fresh, limits: Limits::default(), seeded_bug: None }
    }
}

/// Defects that tests switch on to prove that the oracle sees them. Never set in a product.
///
/// Example: `verify/tests/directory.rs`.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededBug {
    /// Eviction is confirmed although a lease runs.
    EvictsLeased,
    /// Replicas of an owner that came back with a new incarnation stay in the index.
    KeepsReplicasOfRestartedOwner,
    /// An inventory entry with a lower version replaces the visible one.
    OldVersionWins,
    /// A key that loses one of two replicas is reported as lost.
    ForgetsOtherReplica,
}

/// An answer, with the shard and the term that gave it. A receiver that has seen a higher term of the shard refuses it.
///
/// ```
/// use millpond_core::directory::{Config, Directory, Key, Miss};
/// use millpond_core::time::Instant;
/// let directory = Directory::new(Instant::ZERO, Config::fresh(7));
/// let answer = directory.exists(Instant::ZERO, Key::new(b"k").unwrap());
/// assert_eq!((answer.term, answer.value), (7, Err(Miss::Absent)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer<T> {
    /// The shard that answers.
    pub shard: u32,
    /// Its term.
    pub term: u64,
    /// What it says.
    pub value: T,
}

/// Why the directory refused an input. Nothing was changed.
///
/// ```
/// use millpond_core::directory::{Config, Directory, NodeId, Owner, Refusal};
/// use millpond_core::time::Instant;
/// let mut directory = Directory::new(Instant::ZERO, Config::fresh(1));
/// let stranger = Owner { node: NodeId([9; 16]), incarnation: 1 };
/// let answer = directory.on_heartbeat(Instant::ZERO, stranger, &[]);
/// assert!(matches!(answer.value, Err(Refusal::UnknownOwner)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The key's length is out of range.
    Key(KeyError),
    /// The value has no bytes; a value has at least one.
    EmptyValue,
    /// The value is too long.
    ValueTooLong {
        /// Its length.
        len: u64,
        /// The limit.
        len_max: u64,
    },
    /// No such owner: it never joined, or was declared gone. It joins again and reports its inventory.
    UnknownOwner,
    /// The node has another incarnation by now.
    StaleIncarnation {
        /// The one in the table.
        current: u64,
    },
    /// The owner did not announce this segment, or with another epoch.
    UnknownSegment,
    /// The slot holds a newer generation than the input names.
    StaleGeneration {
        /// The one in the table.
        current: u32,
    },
    /// The owner table is full.
    OwnersFull {
        /// `Limits::owners_max`.
        owners_max: usize,
    },
    /// Too many segments in one owner.
    SegmentsFull {
        /// `Limits::segments_max`.
        segments_max: usize,
    },
    /// The index is full; remove or evict objects, or raise the limit.
    ObjectsFull {
        /// `Limits::objects_max`.
        objects_max: usize,
    },
    /// The object has as many replicas as it may have.
    ReplicasFull {
        /// `Limits::replicas_max`.
        replicas_max: usize,
    },
    /// The version that was to get another replica is no longer the visible one.
    Superseded,
    /// The object that was to get another replica is not in the index.
    Missing,
    /// The directory just started and does not yet know what is absent; ask again after `retry_after`.
    Rebuilding {
        /// When it will know at the latest.
        retry_after: Duration,
    },
}

impl core::fmt::Display for Refusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Key(error) => error.fmt(f),
            Self::EmptyValue => f.write_str("the value is empty; a value has at least 1 byte"),
            Self::ValueTooLong { len, len_max } => {
                write!(f, "the value has {len} bytes, the limit is {len_max}; store it in parts")
            }
            Self::UnknownOwner => f.write_str("the owner is not in the table; join and report the inventory"),
            Self::StaleIncarnation { current } => {
                write!(f, "the node runs as incarnation {current} by now; this one must stop")
            }
            Self::UnknownSegment => f.write_str("the owner did not announce this segment; join again with it"),
            Self::StaleGeneration { current } => {
                write!(f, "the slot is at generation {current} by now; drop the older input")
            }
            Self::OwnersFull { owners_max } => {
                write!(f, "the table holds {owners_max} owners, its limit; remove one or raise owners_max")
            }
            Self::SegmentsFull { segments_max } => {
                write!(f, "an owner has at most {segments_max} segments; join with fewer or raise segments_max")
            }
            Self::ObjectsFull { objects_max } => {
                write!(f, "the index holds {objects_max} objects, its limit; remove some or raise objects_max")
            }
            Self::ReplicasFull { replicas_max } => {
                write!(f, "the object has {replicas_max} replicas, the limit; ask for fewer")
            }
            Self::Superseded => f.write_str("a newer version is visible; replicate that one"),
            Self::Missing => f.write_str("the object is not in the index; put it first"),
            Self::Rebuilding { retry_after } => {
                write!(f, "the directory is collecting inventories; retry after {retry_after}")
            }
        }
    }
}

impl core::error::Error for Refusal {}

/// One shard of the index.
///
/// Lookups cost O(log objects); losing an owner costs O(its objects), not O(all).
///
/// ```
/// use millpond_core::directory::{Commit, Config, Directory, Join, Key, Location, Located, NodeId, Owner, SegmentFacts};
/// use millpond_core::time::{Duration, Instant};
/// let now = Instant::ZERO;
/// let mut directory = Directory::new(now, Config::fresh(1));
/// let owner = Owner { node: NodeId([7; 16]), incarnation: 1 };
/// let segment = SegmentFacts::dram(0, 1, 1 << 30);
/// directory.on_join(now, Join { owner, address: "127.0.0.1:7000".into(), segments: vec![segment] }).value.unwrap();
///
/// let at = Location { node: owner.node, segment: 0, epoch: 1, slot: 0, generation: 1 };
/// let key = Key::new(b"greeting").unwrap();
/// directory.on_commit(now, owner, &Commit::new(key, 5, at)).value.unwrap();
///
/// let Located::Hit(found) = directory.on_locate(now, key, Duration::from_secs(1)).value else { panic!() };
/// assert_eq!((found.len, found.replicas), (5, vec![at]));
/// ```
#[derive(Clone, Debug)]
pub struct Directory {
    shard: u32,
    term: u64,
    limits: Limits,
    /// Objects with a lower version were cleared.
    cleared: Stamp,
    /// Nodes whose inventory is awaited, while rebuilding.
    awaited: Vec<NodeId>,
    /// When an absent key is absent, at the latest; `Instant::ZERO` once that is known.
    rebuilt_at: Instant,
    /// Until when leases of an earlier term may run.
    foreign_leases_until: Instant,
    /// Number of the last event of this term.
    n: u64,
    objects: BTreeMap<Arc<[u8]>, Object>,
    owners: BTreeMap<NodeId, OwnerRow>,
    events: EventRing,
    history: History,
    bytes: u64,
    seeded_bug: Option<SeededBug>,
}

impl Directory {
    /// An empty shard that begins `config.term` now.
    #[must_use]
    pub fn new(now: Instant, config: Config) -> Self {
        let (awaited, rebuilt_at, foreign_leases_until) = match config.start {
            Start::Fresh => (Vec::new(), Instant::ZERO, Instant::ZERO),
            Start::Recovering { expected, window } => (expected, now + window, now + config.limits.lease_max),
        };
        Self {
            shard: config.shard,
            term: config.term,
            limits: config.limits,
            cleared: config.cleared,
            awaited,
            rebuilt_at,
            foreign_leases_until,
            n: 0,
            objects: BTreeMap::new(),
            owners: BTreeMap::new(),
            events: EventRing::new(config.term, config.limits.events_max),
            history: History::new(config.limits.history_max),
            bytes: 0,
            seeded_bug: config.seeded_bug,
        }
    }

    /// The bounds this shard was made with.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The version below which everything was cleared; the node layer makes it durable after [`Directory::on_clear`].
    #[must_use]
    pub fn cleared(&self) -> Stamp {
        self.cleared
    }

    /// Number of the last event: where a watcher starts that wants only what comes.
    #[must_use]
    pub fn position(&self) -> Stamp {
        Stamp { term: self.term, n: self.n }
    }

    /// Whether absent keys are known to be absent.
    #[must_use]
    pub fn is_rebuilt(&self, now: Instant) -> bool {
        self.rebuilding(now).is_none()
    }

    fn answer<T>(&self, value: T) -> Answer<T> {
        Answer { shard: self.shard, term: self.term, value }
    }

    /// The time left until the rebuild window closes, if it is open.
    fn rebuilding(&self, now: Instant) -> Option<Duration> {
        (now < self.rebuilt_at).then(|| self.rebuilt_at.since(now))
    }

    fn has_bug(&self, bug: SeededBug) -> bool {
        self.seeded_bug == Some(bug)
    }

    fn next_stamp(&mut self) -> Stamp {
        self.n += 1;
        self.position()
    }
}

#[cfg(test)]
mod tests;
