//! What clients and owners do with objects: commit, locate, list, remove, evict.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Bound;

use super::owners::Held;
use super::{
    Answer, Change, Directory, Event, EventPage, Explanation, Key, Location, NodeId, Owner, Reason, Refusal, SeededBug,
    Stamp, Tier,
};
use crate::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) version: Stamp,
    pub(super) len: u64,
    pub(super) stored_at: Instant,
    pub(super) replicas: Vec<Location>,
    pub(super) lease_until: Instant,
    pub(super) pin: PinUntil,
    /// Ever upserted: an owner that was cut off must not bring it back.
    pub(super) mutable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PinUntil {
    Free,
    Soft(Instant),
    Hard,
}

impl PinUntil {
    pub(super) fn new(now: Instant, pin: Pin) -> Self {
        match pin {
            Pin::Free => Self::Free,
            Pin::Soft { ttl } => Self::Soft(now + ttl),
            Pin::Hard => Self::Hard,
        }
    }

    fn holds(self, now: Instant, urgency: Urgency) -> bool {
        match self {
            Self::Free => false,
            Self::Soft(until) => now < until && urgency == Urgency::Normal,
            Self::Hard => true,
        }
    }
}

/// What a commit does with an object that is already there.
///
/// Example: [`Commit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Keep the old value: the object is immutable.
    IfAbsent,
    /// Make this the visible version; readers of the old one finish on it.
    Upsert,
    /// This is one more copy of the version named.
    Replica {
        /// The version that was copied.
        version: Stamp,
    },
}

/// Whether an object may be evicted. Removal by request ignores pins.
///
/// ```
/// use millpond_core::directory::{Commit, Key, Location, NodeId, Pin};
/// let at = Location { node: NodeId([1; 16]), segment: 0, epoch: 1, slot: 0, generation: 1 };
/// let keep = Commit { pin: Pin::Hard, ..Commit::new(Key::new(b"system prompt").unwrap(), 10, at) };
/// assert_ne!(keep.pin, Pin::Free);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pin {
    /// It may.
    Free,
    /// Not for `ttl`, unless its owner has nothing else to give up.
    Soft {
        /// How long, from the commit.
        ttl: Duration,
    },
    /// Never.
    Hard,
}

/// A replica that an owner has sealed and wants to be visible.
///
/// ```
/// use millpond_core::directory::{Commit, Key, Location, Mode, NodeId};
/// let at = Location { node: NodeId([1; 16]), segment: 0, epoch: 1, slot: 0, generation: 1 };
/// assert_eq!(Commit::new(Key::new(b"k").unwrap(), 10, at).mode, Mode::IfAbsent);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit<'a> {
    /// The object's key.
    pub key: Key<'a>,
    /// Bytes of the value.
    pub len: u64,
    /// Where it was sealed.
    pub location: Location,
    /// What to do if the key is there.
    pub mode: Mode,
    /// Whether it may be evicted.
    pub pin: Pin,
}

impl<'a> Commit<'a> {
    /// An unpinned object that is stored only if its key is absent.
    #[must_use]
    pub const fn new(key: Key<'a>, len: u64, location: Location) -> Self {
        Self { key, len, location, mode: Mode::IfAbsent, pin: Pin::Free }
    }
}

/// What became of a commit.
///
/// ```
/// use millpond_core::directory::{Commit, Committed, Config, Directory, Join, Key, Location, NodeId, Owner, SegmentFacts};
/// use millpond_core::time::Instant;
/// let now = Instant::ZERO;
/// let mut directory = Directory::new(now, Config::fresh(1));
/// let owner = Owner { node: NodeId([7; 16]), incarnation: 1 };
/// let segments = vec![SegmentFacts::dram(0, 1, 1 << 30)];
/// directory.on_join(now, Join { owner, address: "127.0.0.1:7000".into(), segments }).value.unwrap();
/// let at = |slot| Location { node: owner.node, segment: 0, epoch: 1, slot, generation: 1 };
/// let key = Key::new(b"greeting").unwrap();
/// let first = directory.on_commit(now, owner, &Commit::new(key, 5, at(0))).value.unwrap();
/// assert!(matches!(first, Committed::Stored { .. }));
/// let second = directory.on_commit(now, owner, &Commit::new(key, 5, at(1))).value.unwrap();
/// assert!(matches!(second, Committed::AlreadyThere { .. })); // give slot 1 back
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Committed {
    /// It is visible.
    Stored {
        /// Its version.
        version: Stamp,
        /// Replicas it has now.
        copies: u32,
        /// Whether the object was ever upserted; its owner notes that for its inventory.
        mutable: bool,
    },
    /// The key was there and keeps its value; the owner frees what it sealed.
    AlreadyThere {
        /// The visible version.
        version: Stamp,
        /// Its length.
        len: u64,
    },
}

/// The answer to a lookup that grants a lease.
///
/// Example: [`Directory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Located {
    /// It is there.
    Hit(Found),
    /// It is not, or not known to be.
    Miss(Miss),
}

/// Where an object lies.
///
/// ```
/// use millpond_core::directory::{Found, Stamp};
/// use millpond_core::time::Duration;
/// let found = Found { version: Stamp { term: 1, n: 1 }, len: 9, replicas: vec![], lease: Duration::from_secs(1) };
/// assert_eq!(found.len, 9);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The visible version.
    pub version: Stamp,
    /// Bytes of the value.
    pub len: u64,
    /// Its replicas; those of suspect owners come last.
    pub replicas: Vec<Location>,
    /// How long the object is safe from eviction, from when the caller asked.
    pub lease: Duration,
}

/// Why a lookup found nothing.
///
/// ```
/// use millpond_core::directory::{Config, Directory, Key, Located, Miss};
/// use millpond_core::time::{Duration, Instant};
/// let mut directory = Directory::new(Instant::ZERO, Config::fresh(1));
/// let answer = directory.on_locate(Instant::ZERO, Key::new(b"k").unwrap(), Duration::from_secs(1));
/// assert_eq!(answer.value, Located::Miss(Miss::Absent));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Miss {
    /// The key is not in the index.
    Absent,
    /// The directory just started and does not know yet.
    Rebuilding {
        /// When it will know at the latest.
        retry_after: Duration,
    },
}

/// What is known of one object.
///
/// ```
/// # use millpond_core::directory::{Pin, Stamp, Stat};
/// # use millpond_core::time::Duration;
/// # let stat = Stat { version: Stamp::ZERO, len: 1, replicas: vec![], age: Duration::ZERO, lease_left: Duration::ZERO,
/// #     pin: Pin::Free, mutable: false };
/// assert_eq!(stat.lease_left, Duration::ZERO, "it may be evicted now");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The visible version.
    pub version: Stamp,
    /// Bytes of the value.
    pub len: u64,
    /// Its replicas, each with its tier.
    pub replicas: Vec<(Location, Tier)>,
    /// Time since it was stored, or since its inventory was reported.
    pub age: Duration,
    /// Time left of the longest lease.
    pub lease_left: Duration,
    /// Whether it may be evicted; a soft pin shows the time left.
    pub pin: Pin,
    /// Whether it was ever upserted.
    pub mutable: bool,
}

/// One row of a listing.
///
/// ```
/// use millpond_core::directory::{Listed, Stamp};
/// let row = Listed { key: (*b"a").into(), version: Stamp::ZERO, len: 3, replicas: 1 };
/// assert_eq!(&row.key[..], b"a");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The object's key.
    pub key: Arc<[u8]>,
    /// The visible version.
    pub version: Stamp,
    /// Bytes of the value.
    pub len: u64,
    /// Replicas in the index.
    pub replicas: u32,
}

/// A page of a listing, in byte order of the keys.
///
/// ```
/// use millpond_core::directory::{Page, Stamp};
/// let page = Page { rows: vec![], next: None, position: Stamp::ZERO };
/// assert!(page.next.is_none(), "that was the last page");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The rows.
    pub rows: Vec<Listed>,
    /// The last key of this page, if there may be more: ask again for keys after it.
    pub next: Option<Arc<[u8]>>,
    /// The last event before this page was read.
    pub position: Stamp,
}

/// Whether a removal respects running leases.
///
/// ```
/// use millpond_core::directory::{Config, Directory, Key, Leases};
/// use millpond_core::time::Instant;
/// let mut directory = Directory::new(Instant::ZERO, Config::fresh(1));
/// let removed = directory.on_remove(Instant::ZERO, Key::new(b"k").unwrap(), Leases::Respect).value;
/// assert_eq!((removed.objects, removed.leased), (0, 0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leases {
    /// Leased objects stay and are counted.
    Respect,
    /// Leases promise availability, not safety: force breaks the promise, readers get a miss.
    Override,
}

/// What a removal did.
///
/// ```
/// use millpond_core::directory::Removed;
/// assert_eq!(Removed::default().objects, 0);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Objects that left the index.
    pub objects: u64,
    /// Objects that stayed because a lease runs on them.
    pub leased: u64,
    /// Owners that could not be told yet; they free the space when they are back.
    pub owners_unreachable: u32,
    /// The last key looked at, if there may be more: ask again for keys after it.
    pub next: Option<Arc<[u8]>>,
}

/// A replica its owner wants to give up, or has given up.
///
/// ```
/// # use millpond_core::directory::{Key, Location, NodeId, Victim};
/// let location = Location { node: NodeId([1; 16]), segment: 0, epoch: 1, slot: 0, generation: 1 };
/// assert_eq!(Victim { key: Key::new(b"k").unwrap(), location }.location.slot, 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim<'a> {
    /// The object's key.
    pub key: Key<'a>,
    /// The replica.
    pub location: Location,
}

/// How badly an owner needs space.
///
/// Example: `core/src/directory/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// Ahead of demand.
    Normal,
    /// Nothing but softly pinned objects is left to give up.
    Pressing,
}

/// What the directory says to one victim.
///
/// Example: `core/src/directory/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictVerdict {
    /// It left the index, or was not in it: quarantine and free.
    Evict,
    /// A lease runs.
    Leased {
        /// Its end.
        retry_after: Duration,
    },
    /// It is pinned.
    Pinned,
    /// The directory just started: an earlier term's leases may run.
    NotYet {
        /// When they have run out at the latest.
        retry_after: Duration,
    },
}

impl Directory {
    /// An owner sealed a replica. Repeating a commit that was applied gives the same answer.
    pub fn on_commit(&mut self, now: Instant, owner: Owner, commit: &Commit<'_>) -> Answer<Result<Committed, Refusal>> {
        let committed = self.commit(now, owner, commit);
        self.answer(committed)
    }

    fn commit(&mut self, now: Instant, owner: Owner, commit: &Commit<'_>) -> Result<Committed, Refusal> {
        let (key, at) = (commit.key.as_bytes(), commit.location);
        self.check_value_len(commit.len)?;
        if let Some(done) = self.settle_slot(now, owner, key, at)? {
            return Ok(done);
        }
        let visible = self.objects.get(key).map(|object| (object.version, object.len));
        match (commit.mode, visible) {
            (Mode::IfAbsent, Some((version, len))) => return Ok(Committed::AlreadyThere { version, len }),
            (Mode::IfAbsent, None) => {
                if let Some(retry_after) = self.rebuilding(now) {
                    return Err(Refusal::Rebuilding { retry_after });
                }
            }
            (Mode::Replica { version }, visible) => return self.add_copy(key, at, version, commit.len, visible),
            (Mode::Upsert, _) => {}
        }
        if visible.is_none() && self.objects.len() >= self.limits.objects_max {
            return Err(Refusal::ObjectsFull { objects_max: self.limits.objects_max });
        }
        self.supersede(now, key);
        let pin = PinUntil::new(now, commit.pin);
        let version = self.position_after();
        let mutable = commit.mode == Mode::Upsert;
        self.insert_object(now, Arc::from(key), commit.len, version, pin, mutable);
        self.add_replica(key, at);
        Ok(Committed::Stored { version, copies: 1, mutable })
    }

    pub(super) fn check_value_len(&self, len: u64) -> Result<(), Refusal> {
        match len {
            0 => Err(Refusal::EmptyValue),
            len if len > self.limits.value_len_max => {
                Err(Refusal::ValueTooLong { len, len_max: self.limits.value_len_max })
            }
            _ => Ok(()),
        }
    }

    /// Makes sure that the slot named by `at` is free in the index. A repeated commit is answered here; a replica that the
    /// owner displaced is dropped: the owner knows best what lies in its slots.
    fn settle_slot(
        &mut self,
        now: Instant,
        owner: Owner,
        key: &[u8],
        at: Location,
    ) -> Result<Option<Committed>, Refusal> {
        let segment = self.segment_mut(owner, &at)?;
        let older = segment.retired.range((at.slot, 0)..(at.slot, at.generation)).map(|(life, _)| *life);
        for life in older.collect::<Vec<_>>() {
            segment.retired.remove(&life);
        }
        if segment.retired.contains_key(&(at.slot, at.generation)) {
            return Err(Refusal::StaleGeneration { current: at.generation });
        }
        let Some(held) = segment.slots.get(&at.slot).cloned() else { return Ok(None) };
        if held.generation > at.generation {
            return Err(Refusal::StaleGeneration { current: held.generation });
        }
        if held.generation == at.generation && *held.key == *key {
            return Ok(self.objects.get(key).map(|object| Committed::Stored {
                version: object.version,
                copies: object.copies(),
                mutable: object.mutable,
            }));
        }
        self.drop_replica(now, &held.key, Location { generation: held.generation, ..at }, Reason::Dropped);
        Ok(None)
    }

    fn add_copy(
        &mut self,
        key: &[u8],
        at: Location,
        version: Stamp,
        len: u64,
        visible: Option<(Stamp, u64)>,
    ) -> Result<Committed, Refusal> {
        let (visible, visible_len) = visible.ok_or(Refusal::Missing)?;
        if visible != version || visible_len != len {
            return Err(Refusal::Superseded);
        }
        let Some(object) = self.objects.get(key) else { return Err(Refusal::Missing) };
        if object.replicas.iter().any(|replica| replica.is_beside(&at)) {
            return Ok(Committed::AlreadyThere { version, len });
        }
        if object.replicas.len() >= self.limits.replicas_max {
            return Err(Refusal::ReplicasFull { replicas_max: self.limits.replicas_max });
        }
        let (copies, mutable) = (object.copies() + 1, object.mutable);
        self.add_replica(key, at);
        Ok(Committed::Stored { version, copies, mutable })
    }

    /// The stamp that the next event will get.
    pub(super) fn position_after(&self) -> Stamp {
        Stamp { term: self.term, n: self.n + 1 }
    }

    pub(super) fn insert_object(
        &mut self,
        now: Instant,
        key: Arc<[u8]>,
        len: u64,
        version: Stamp,
        pin: PinUntil,
        mutable: bool,
    ) {
        let object = Object {
            version,
            len,
            stored_at: now,
            replicas: Vec::with_capacity(1),
            lease_until: Instant::ZERO,
            pin,
            mutable,
        };
        self.bytes += len;
        self.objects.insert(key, object);
    }

    /// Adds a replica to an object that is in the index, and says so in the stream.
    pub(super) fn add_replica(&mut self, key: &[u8], location: Location) {
        let Some((key, object)) = self.objects.get_key_value(key) else { return };
        let (key, version, len) = (key.clone(), object.version, object.len);
        let Some(row) = self.owners.get_mut(&location.node) else { return };
        let Some(segment) = row.segments.get_mut(&location.segment) else { return };
        let tier = segment.facts.tier;
        segment.slots.insert(location.slot, Held { key: key.clone(), generation: location.generation });
        if let Some(object) = self.objects.get_mut(&key) {
            object.replicas.push(location);
        }
        let at = self.next_stamp();
        self.events.push(Event { at, change: Change::Stored { key, version, len, location, tier } });
    }

    /// Takes the visible version out of the index; its owners free it when the last lease on it has run out.
    pub(super) fn supersede(&mut self, now: Instant, key: &[u8]) {
        let Some((key, object)) = self.objects.get_key_value(key) else { return };
        let (key, replicas, lease_until) = (key.clone(), object.replicas.clone(), object.lease_until);
        for location in replicas {
            self.drop_replica(now, &key, location, Reason::Superseded);
            self.retire(location, lease_until);
        }
    }

    /// Where `key` lies, with a lease of at most `lease` (and at most `Limits::lease_max`). Zero asks for none.
    pub fn on_locate(&mut self, now: Instant, key: Key<'_>, lease: Duration) -> Answer<Located> {
        let lease = lease.min(self.limits.lease_max);
        let miss = self.miss(now);
        let located = match self.objects.get_mut(key.as_bytes()) {
            None => Located::Miss(miss),
            Some(object) => {
                if lease > Duration::ZERO {
                    object.lease_until = object.lease_until.max(now + lease);
                }
                let (version, len, mut replicas) = (object.version, object.len, object.replicas.clone());
                replicas.sort_by_key(|replica| self.is_suspect(now, replica.node));
                Located::Hit(Found { version, len, replicas, lease })
            }
        };
        self.answer(located)
    }

    /// Whether `key` is there. Grants no lease.
    #[must_use]
    pub fn exists(&self, now: Instant, key: Key<'_>) -> Answer<Result<(), Miss>> {
        self.answer(if self.objects.contains_key(key.as_bytes()) { Ok(()) } else { Err(self.miss(now)) })
    }

    /// What is known of `key`. Grants no lease.
    #[must_use]
    pub fn stat(&self, now: Instant, key: Key<'_>) -> Answer<Result<Stat, Miss>> {
        let Some(object) = self.objects.get(key.as_bytes()) else { return self.answer(Err(self.miss(now))) };
        let pin = match object.pin {
            PinUntil::Soft(until) if now < until => Pin::Soft { ttl: until.since(now) },
            PinUntil::Hard => Pin::Hard,
            PinUntil::Soft(_) | PinUntil::Free => Pin::Free,
        };
        self.answer(Ok(Stat {
            version: object.version,
            len: object.len,
            replicas: object.replicas.iter().map(|replica| (*replica, self.tier(replica))).collect(),
            age: now.since(object.stored_at),
            lease_left: object.lease_until.since(now),
            pin,
            mutable: object.mutable,
        }))
    }

    /// Objects whose key begins with `prefix` and comes after `after`, in byte order; at most `max` and `Limits::page_max`.
    #[must_use]
    pub fn list(&self, prefix: &[u8], after: Option<&[u8]>, max: usize) -> Answer<Page> {
        let max = max.clamp(1, self.limits.page_max);
        let rows: Vec<Listed> = self
            .range(prefix, after)
            .take(max)
            .map(|(key, object)| Listed {
                key: key.clone(),
                version: object.version,
                len: object.len,
                replicas: object.copies(),
            })
            .collect();
        let next = if rows.len() == max { rows.last().map(|row| row.key.clone()) } else { None };
        self.answer(Page { rows, next, position: self.position() })
    }

    /// Removes one object. Absent is done: `objects` is 0.
    pub fn on_remove(&mut self, now: Instant, key: Key<'_>, leases: Leases) -> Answer<Removed> {
        let mut removed = Removed::default();
        let mut unreachable = BTreeSet::new();
        self.remove_object(now, key.as_bytes(), leases, &mut removed, &mut unreachable);
        removed.owners_unreachable = u32::try_from(unreachable.len()).unwrap_or(u32::MAX);
        self.answer(removed)
    }

    /// Removes the objects whose key begins with `prefix` (all, if it is empty) and comes after `after`: looks at
    /// `Limits::page_max` of them per call.
    pub fn on_remove_prefix(
        &mut self,
        now: Instant,
        prefix: &[u8],
        after: Option<&[u8]>,
        leases: Leases,
    ) -> Answer<Removed> {
        let keys: Vec<Arc<[u8]>> =
            self.range(prefix, after).take(self.limits.page_max).map(|(key, _)| key.clone()).collect();
        let mut removed = Removed::default();
        let mut unreachable = BTreeSet::new();
        for key in &keys {
            self.remove_object(now, key, leases, &mut removed, &mut unreachable);
        }
        removed.owners_unreachable = u32::try_from(unreachable.len()).unwrap_or(u32::MAX);
        removed.next = if keys.len() == self.limits.page_max { keys.last().cloned() } else { None };
        self.answer(removed)
    }

    /// Clears the namespace: everything stored so far is gone and never returns, whoever reports it later. Leases and pins
    /// do not count. O(objects). The caller makes [`Directory::cleared`] durable before it answers anybody.
    pub fn on_clear(&mut self, now: Instant) -> Answer<u64> {
        let mut count = 0;
        while let Some((key, object)) = self.objects.first_key_value() {
            let (key, replicas) = (key.clone(), object.replicas.clone());
            for location in replicas {
                self.drop_replica(now, &key, location, Reason::Cleared);
                self.retire(location, now);
            }
            count += 1;
        }
        self.cleared = self.next_stamp();
        self.events.push(Event { at: self.cleared, change: Change::Cleared });
        self.answer(count)
    }

    /// An owner needs space: one verdict per victim, in order.
    pub fn on_evict(
        &mut self,
        now: Instant,
        owner: Owner,
        victims: &[Victim<'_>],
        urgency: Urgency,
    ) -> Answer<Result<Vec<EvictVerdict>, Refusal>> {
        let known = self.owner_mut(owner).map(|_| ());
        let verdicts =
            known.map(|()| victims.iter().map(|victim| self.evict_one(now, owner, victim, urgency)).collect());
        self.answer(verdicts)
    }

    fn evict_one(&mut self, now: Instant, owner: Owner, victim: &Victim<'_>, urgency: Urgency) -> EvictVerdict {
        let at = victim.location;
        if now < self.foreign_leases_until {
            return EvictVerdict::NotYet { retry_after: self.foreign_leases_until.since(now) };
        }
        if let Ok(segment) = self.segment_mut(owner, &at)
            && let Some(not_before) = segment.retired.get(&(at.slot, at.generation)).copied()
        {
            if now < not_before {
                return EvictVerdict::Leased { retry_after: not_before.since(now) };
            }
            segment.retired.remove(&(at.slot, at.generation));
            return EvictVerdict::Evict;
        }
        let Some((key, object)) = self.objects.get_key_value(victim.key.as_bytes()) else { return EvictVerdict::Evict };
        if at.node != owner.node || !object.replicas.contains(&at) {
            return EvictVerdict::Evict;
        }
        if now < object.lease_until && !self.has_bug(SeededBug::EvictsLeased) {
            return EvictVerdict::Leased { retry_after: object.lease_until.since(now) };
        }
        if object.pin.holds(now, urgency) {
            return EvictVerdict::Pinned;
        }
        let key = key.clone();
        self.drop_replica(now, &key, at, Reason::Evicted);
        EvictVerdict::Evict
    }

    /// An owner lost these replicas (a bad checksum, an I/O error) and has freed or quarantined them. Returns how many
    /// were in the index.
    pub fn on_dropped(&mut self, now: Instant, owner: Owner, victims: &[Victim<'_>]) -> Answer<Result<usize, Refusal>> {
        let known = self.owner_mut(owner).map(|_| ());
        let dropped = known.map(|()| {
            let mine = victims.iter().filter(|victim| victim.location.node == owner.node);
            mine.filter(|victim| {
                let key = self.objects.get_key_value(victim.key.as_bytes()).map(|(key, _)| key.clone());
                key.is_some_and(|key| self.drop_replica(now, &key, victim.location, Reason::Dropped))
            })
            .count()
        });
        self.answer(dropped)
    }

    /// Events after `after`, at most `max` and `Limits::page_max`.
    #[must_use]
    pub fn events(&self, after: Stamp, max: usize) -> Answer<EventPage> {
        self.answer(self.events.after(after, self.position(), max.min(self.limits.page_max)))
    }

    /// Why a lookup of `key` found nothing, as far as the removal history reaches.
    #[must_use]
    pub fn explain_miss(&self, now: Instant, key: Key<'_>) -> Answer<Explanation> {
        let explanation = if let Some(object) = self.objects.get(key.as_bytes()) {
            let suspect = object.replicas.iter().filter(|replica| self.is_suspect(now, replica.node)).count();
            Explanation::Present { replicas: object.copies(), suspect: u32::try_from(suspect).unwrap_or(u32::MAX) }
        } else if let Some(removal) = self.history.find(key.as_bytes(), now) {
            Explanation::Lost(removal)
        } else if let Some(retry_after) = self.rebuilding(now) {
            Explanation::Rebuilding { retry_after }
        } else {
            Explanation::NeverStored { removals_remembered: self.history.len() }
        };
        self.answer(explanation)
    }

    fn miss(&self, now: Instant) -> Miss {
        self.rebuilding(now).map_or(Miss::Absent, |retry_after| Miss::Rebuilding { retry_after })
    }

    fn tier(&self, at: &Location) -> Tier {
        let segment = self.owners.get(&at.node).and_then(|row| row.segments.get(&at.segment));
        segment.map_or(Tier::Dram, |segment| segment.facts.tier)
    }

    fn range<'a>(
        &'a self,
        prefix: &'a [u8],
        after: Option<&'a [u8]>,
    ) -> impl Iterator<Item = (&'a Arc<[u8]>, &'a Object)> {
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        self.objects.range::<[u8], _>((from, Bound::Unbounded)).take_while(move |(key, _)| key.starts_with(prefix))
    }

    fn remove_object(
        &mut self,
        now: Instant,
        key: &[u8],
        leases: Leases,
        removed: &mut Removed,
        unreachable: &mut BTreeSet<NodeId>,
    ) {
        let Some((key, object)) = self.objects.get_key_value(key) else { return };
        if leases == Leases::Respect && now < object.lease_until {
            removed.leased += 1;
            return;
        }
        let (key, replicas) = (key.clone(), object.replicas.clone());
        for location in replicas {
            if self.is_suspect(now, location.node) {
                unreachable.insert(location.node);
            }
            self.drop_replica(now, &key, location, Reason::Removed);
            self.retire(location, now);
        }
        removed.objects += 1;
    }
}

impl Object {
    pub(super) fn copies(&self) -> u32 {
        u32::try_from(self.replicas.len()).unwrap_or(u32::MAX)
    }
}
