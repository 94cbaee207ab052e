//! Owners, their segments, and whether they are alive.
//!
//! Silence makes an owner suspect (no new work, data kept), longer silence makes it gone (its replicas leave the index). A
//! lost link is a reason for suspicion at once; proven death needs no waiting.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{Answer, Change, Directory, Event, Location, NodeId, Owner, Reason, Refusal, SeededBug};
use crate::time::{Duration, Instant};

/// The medium of a segment.
///
/// ```
/// use millpond_core::directory::{SegmentFacts, Tier};
/// assert_eq!(SegmentFacts::dram(0, 1, 1 << 30).tier, Tier::Dram);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Tier {
    /// Memory: its content ends with the owner's process.
    Dram,
    /// A file on flash: its content outlives the owner's process.
    Ssd,
}

/// What an owner announces of one segment.
///
/// ```
/// use millpond_core::directory::SegmentFacts;
/// assert_eq!(SegmentFacts::dram(0, 3, 1 << 30).epoch, 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentFacts {
    /// Which of the owner's segments.
    pub index: u32,
    /// New each time the segment is opened.
    pub epoch: u64,
    /// Its medium.
    pub tier: Tier,
    /// Bytes for payload.
    pub capacity: u64,
}

impl SegmentFacts {
    /// A memory segment.
    #[must_use]
    pub const fn dram(index: u32, epoch: u64, capacity: u64) -> Self {
        Self { index, epoch, tier: Tier::Dram, capacity }
    }
}

/// How full a segment is.
///
/// ```
/// use millpond_core::directory::SegmentLoad;
/// assert_eq!(SegmentLoad { index: 0, free: 10 }.free, 10);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLoad {
    /// Which of the owner's segments.
    pub index: u32,
    /// Payload bytes that are free.
    pub free: u64,
}

/// An owner's first word: who it is, where it listens, what it owns. Followed by an inventory of each segment.
///
/// ```
/// use millpond_core::directory::{Join, NodeId, Owner, SegmentFacts};
/// let join = Join {
///     owner: Owner { node: NodeId([1; 16]), incarnation: 1 },
///     address: "[::1]:7000".into(),
///     segments: vec![SegmentFacts::dram(0, 1, 1 << 20)],
/// };
/// assert_eq!(join.segments.len(), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// Node and incarnation.
    pub owner: Owner,
    /// Where clients reach it; opaque here.
    pub address: Box<str>,
    /// Its segments.
    pub segments: Vec<SegmentFacts>,
}

/// What the directory thinks of an owner that is in the table.
///
/// Example: [`OwnerView`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// Heard of lately.
    Active,
    /// Silent, or its link broke: gets no new work, its data are kept and offered last.
    Suspect,
}

/// One row of the placement view.
///
/// ```
/// # use millpond_core::directory::{Health, NodeId, Owner, OwnerView};
/// let owner = Owner { node: NodeId([1; 16]), incarnation: 1 };
/// let view = OwnerView { owner, address: "host:1".into(), health: Health::Active, segments: vec![] };
/// assert_eq!(view.free(), 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerView {
    /// Node and incarnation.
    pub owner: Owner,
    /// Where clients reach it.
    pub address: Arc<str>,
    /// Whether it should get new work.
    pub health: Health,
    /// Its segments.
    pub segments: Vec<SegmentView>,
}

impl OwnerView {
    /// Free payload bytes over all segments.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.segments.iter().map(|segment| segment.free).sum()
    }
}

/// A segment in the placement view.
///
/// ```
/// # use millpond_core::directory::{SegmentFacts, SegmentView};
/// let view = SegmentView { facts: SegmentFacts::dram(0, 1, 100), free: 40, replicas: 2 };
/// assert!(view.free <= view.facts.capacity);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// What the owner announced.
    pub facts: SegmentFacts,
    /// Payload bytes that were free when it last spoke.
    pub free: u64,
    /// Replicas the index has in it.
    pub replicas: u64,
}

#[derive(Clone, Debug)]
pub(super) struct OwnerRow {
    pub(super) incarnation: u64,
    address: Arc<str>,
    heard_at: Instant,
    link_lost: bool,
    pub(super) segments: BTreeMap<u32, SegmentRow>,
}

#[derive(Clone, Debug)]
pub(super) struct SegmentRow {
    pub(super) facts: SegmentFacts,
    free: u64,
    pub(super) inventory_done: bool,
    /// The replica in each occupied slot.
    pub(super) slots: BTreeMap<u32, Held>,
    /// Replicas that left the index for another reason than their owner's wish: the owner frees them when told, not
    /// before the instant noted. Key: slot and generation.
    pub(super) retired: BTreeMap<(u32, u32), Instant>,
}

#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) key: Arc<[u8]>,
    pub(super) generation: u32,
}

impl OwnerRow {
    fn health(&self, now: Instant, suspect_after: Duration) -> Health {
        let silent = now.since(self.heard_at) >= suspect_after;
        if silent || self.link_lost { Health::Suspect } else { Health::Active }
    }
}

impl Directory {
    /// An owner appears, comes back, or announces other segments. A new incarnation of a node ends the old one: its
    /// replicas leave the index before the answer. Repeating a join changes nothing.
    pub fn on_join(&mut self, now: Instant, join: Join) -> Answer<Result<(), Refusal>> {
        let joined = self.join(now, join);
        self.answer(joined)
    }

    fn join(&mut self, now: Instant, join: Join) -> Result<(), Refusal> {
        let node = join.owner.node;
        if join.segments.len() > self.limits.segments_max {
            return Err(Refusal::SegmentsFull { segments_max: self.limits.segments_max });
        }
        match self.owners.get(&node).map(|row| row.incarnation) {
            Some(current) if current > join.owner.incarnation => return Err(Refusal::StaleIncarnation { current }),
            Some(current)
                if current < join.owner.incarnation && !self.has_bug(SeededBug::KeepsReplicasOfRestartedOwner) =>
            {
                self.drop_owner(now, node, Reason::OwnerRestarted);
            }
            None if self.owners.len() >= self.limits.owners_max => {
                return Err(Refusal::OwnersFull { owners_max: self.limits.owners_max });
            }
            _ => {}
        }
        let withdrawn: Vec<u32> = self.owners.get(&node).map_or_else(Vec::new, |row| {
            let kept = |index: &u32, epoch| join.segments.iter().any(|new| new.index == *index && new.epoch == epoch);
            row.segments.iter().filter(|(index, s)| !kept(index, s.facts.epoch)).map(|(index, _)| *index).collect()
        });
        let keep = self.has_bug(SeededBug::KeepsReplicasOfRestartedOwner);
        for index in withdrawn.into_iter().filter(|_| !keep) {
            self.drop_segment(now, node, index, Reason::OwnerRestarted);
        }
        let row = self.owners.entry(node).or_insert_with(|| OwnerRow {
            incarnation: join.owner.incarnation,
            address: Arc::from(""),
            heard_at: now,
            link_lost: false,
            segments: BTreeMap::new(),
        });
        row.incarnation = join.owner.incarnation;
        row.address = join.address.into();
        row.heard_at = now;
        row.link_lost = false;
        for facts in join.segments {
            row.segments.entry(facts.index).or_insert_with(|| SegmentRow {
                facts,
                free: facts.capacity,
                inventory_done: false,
                slots: BTreeMap::new(),
                retired: BTreeMap::new(),
            });
        }
        Ok(())
    }

    /// An owner is alive and says how full it is. Loads of segments it never announced are ignored.
    pub fn on_heartbeat(&mut self, now: Instant, owner: Owner, loads: &[SegmentLoad]) -> Answer<Result<(), Refusal>> {
        let heard = self.owner_mut(owner).map(|row| {
            row.heard_at = now;
            row.link_lost = false;
            for load in loads {
                if let Some(segment) = row.segments.get_mut(&load.index) {
                    segment.free = load.free.min(segment.facts.capacity);
                }
            }
        });
        self.answer(heard)
    }

    /// The link to an owner broke: it is suspect until it is heard again. Not a proof of death.
    pub fn on_link_lost(&mut self, owner: Owner) {
        if let Ok(row) = self.owner_mut(owner) {
            row.link_lost = true;
        }
    }

    /// An owner's death is proven: its replicas leave the index now. True if it was in the table.
    pub fn on_death(&mut self, now: Instant, owner: Owner) -> bool {
        self.owner_mut(owner).is_ok() && {
            self.drop_owner(now, owner.node, Reason::OwnerLost);
            true
        }
    }

    /// Time passed: owners that were silent for `gone_after` leave. Returns who left. Due at [`Directory::poll_deadline`].
    pub fn on_tick(&mut self, now: Instant) -> Vec<Owner> {
        let gone_after = self.limits.gone_after;
        let gone: Vec<Owner> = self
            .owners
            .iter()
            .filter(|(_, row)| now.since(row.heard_at) >= gone_after)
            .map(|(node, row)| Owner { node: *node, incarnation: row.incarnation })
            .collect();
        for owner in &gone {
            self.drop_owner(now, owner.node, Reason::OwnerLost);
        }
        gone
    }

    /// When [`Directory::on_tick`] has something to do next; `Instant::NEVER` without owners.
    #[must_use]
    pub fn poll_deadline(&self) -> Instant {
        let first = self.owners.values().map(|row| row.heard_at).min();
        first.map_or(Instant::NEVER, |heard_at| heard_at + self.limits.gone_after)
    }

    /// Locations that `owner` should free: removed, superseded or cleared, with no lease running on them. At most
    /// `Limits::page_max`; they are repeated until [`Directory::on_freed`] names them.
    #[must_use]
    pub fn poll_retired(&self, now: Instant, owner: Owner) -> Vec<Location> {
        let Some(row) = self.owners.get(&owner.node).filter(|row| row.incarnation == owner.incarnation) else {
            return Vec::new();
        };
        let due = row.segments.values().flat_map(|segment| {
            let facts = segment.facts;
            segment.retired.iter().filter(|(_, not_before)| **not_before <= now).map(move |((slot, generation), _)| {
                Location {
                    node: owner.node,
                    segment: facts.index,
                    epoch: facts.epoch,
                    slot: *slot,
                    generation: *generation,
                }
            })
        });
        due.take(self.limits.page_max).collect()
    }

    /// `owner` has freed these locations, or never had them. Unknown ones are ignored.
    pub fn on_freed(&mut self, owner: Owner, freed: &[Location]) {
        for location in freed.iter().filter(|location| location.node == owner.node) {
            if let Ok(segment) = self.segment_mut(owner, location) {
                segment.retired.remove(&(location.slot, location.generation));
            }
        }
    }

    /// All owners and segments: what a client needs to choose where to put.
    #[must_use]
    pub fn view(&self, now: Instant) -> Answer<Vec<OwnerView>> {
        let rows = self.owners.iter().map(|(node, row)| OwnerView {
            owner: Owner { node: *node, incarnation: row.incarnation },
            address: row.address.clone(),
            health: row.health(now, self.limits.suspect_after),
            segments: row
                .segments
                .values()
                .map(|segment| SegmentView {
                    facts: segment.facts,
                    free: segment.free,
                    replicas: segment.slots.len() as u64,
                })
                .collect(),
        });
        self.answer(rows.collect())
    }

    pub(super) fn owner_mut(&mut self, owner: Owner) -> Result<&mut OwnerRow, Refusal> {
        let row = self.owners.get_mut(&owner.node).ok_or(Refusal::UnknownOwner)?;
        match row.incarnation {
            current if current == owner.incarnation => Ok(row),
            current if current > owner.incarnation => Err(Refusal::StaleIncarnation { current }),
            _ => Err(Refusal::UnknownOwner),
        }
    }

    pub(super) fn segment_mut(&mut self, owner: Owner, at: &Location) -> Result<&mut SegmentRow, Refusal> {
        let row = self.owner_mut(owner)?;
        if at.node != owner.node {
            return Err(Refusal::UnknownSegment);
        }
        let segment = row.segments.get_mut(&at.segment).filter(|segment| segment.facts.epoch == at.epoch);
        segment.ok_or(Refusal::UnknownSegment)
    }

    pub(super) fn is_suspect(&self, now: Instant, node: NodeId) -> bool {
        let row = self.owners.get(&node);
        row.is_none_or(|row| row.health(now, self.limits.suspect_after) == Health::Suspect)
    }

    fn drop_owner(&mut self, now: Instant, node: NodeId, reason: Reason) {
        if let Some(incarnation) = self.owners.get(&node).map(|row| row.incarnation) {
            let (at, owner) = (self.next_stamp(), Owner { node, incarnation });
            self.events.push(Event { at, change: Change::Left { owner, reason } });
        }
        let indexes: Vec<u32> =
            self.owners.get(&node).map_or_else(Vec::new, |row| row.segments.keys().copied().collect());
        for index in indexes {
            self.drop_segment(now, node, index, reason);
        }
        self.owners.remove(&node);
    }

    fn drop_segment(&mut self, now: Instant, node: NodeId, index: u32, reason: Reason) {
        let Some(segment) = self.owners.get_mut(&node).and_then(|row| row.segments.remove(&index)) else { return };
        let SegmentFacts { epoch, .. } = segment.facts;
        for (slot, held) in segment.slots {
            let location = Location { node, segment: index, epoch, slot, generation: held.generation };
            self.drop_replica(now, &held.key, location, reason);
        }
    }

    /// Takes one replica out of the index: object, slot, event, history. False if it was not there.
    pub(super) fn drop_replica(&mut self, now: Instant, key: &Arc<[u8]>, location: Location, reason: Reason) -> bool {
        let forget_all = self.has_bug(SeededBug::ForgetsOtherReplica);
        let Some(object) = self.objects.get_mut(key) else { return false };
        let Some(index) = object.replicas.iter().position(|replica| *replica == location) else { return false };
        object.replicas.remove(index);
        let (version, len, left) = (object.version, object.len, object.replicas.len());
        let left_there = object.replicas.iter().filter(|replica| replica.node == location.node).count();
        let left_there = u32::try_from(left_there).unwrap_or(u32::MAX);
        if left == 0 || forget_all {
            self.objects.remove(key);
            self.bytes -= len;
            self.history.push(key, super::history::Record::new(reason, location.node, version, len, now));
        }
        if let Some(row) = self.owners.get_mut(&location.node)
            && let Some(segment) = row.segments.get_mut(&location.segment)
            && segment.facts.epoch == location.epoch
            && segment.slots.get(&location.slot).is_some_and(|held| held.generation == location.generation)
        {
            segment.slots.remove(&location.slot);
        }
        let replicas_left = u32::try_from(left).unwrap_or(u32::MAX);
        let (at, key) = (self.next_stamp(), key.clone());
        self.events.push(Event { at, change: Change::Removed { key, location, reason, replicas_left, left_there } });
        true
    }

    /// Notes that the owner of `location` is to free it, not before `not_before`.
    pub(super) fn retire(&mut self, location: Location, not_before: Instant) {
        if let Some(row) = self.owners.get_mut(&location.node)
            && let Some(segment) = row.segments.get_mut(&location.segment)
            && segment.facts.epoch == location.epoch
        {
            segment.retired.insert((location.slot, location.generation), not_before);
        }
    }
}
