//! Truth after failures: the index is rebuilt from what the owners report.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::object::PinUntil;
use super::{Answer, Directory, Key, Location, Owner, Pin, Reason, Refusal, SeededBug, Stamp};
use crate::time::Instant;

/// One sealed slot in an owner's inventory.
///
/// ```
/// use millpond_core::directory::{Entry, Key, Pin, Stamp};
/// let key = Key::new(b"k").unwrap();
/// let entry = Entry { key, slot: 0, generation: 1, len: 10, version: Stamp { term: 1, n: 1 }, pin: Pin::Free, mutable: false };
/// assert!(!entry.mutable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The object's key.
    pub key: Key<'a>,
    /// The slot.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
    /// Bytes of the value.
    pub len: u64,
    /// The version it was stored as.
    pub version: Stamp,
    /// Its pin.
    pub pin: Pin,
    /// Whether it was ever upserted.
    pub mutable: bool,
}

/// Whether more of a segment's inventory follows.
///
/// Example: [`Inventory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// More follows.
    More,
    /// That was all.
    Last,
}

/// A batch of one segment's inventory.
///
/// ```
/// use millpond_core::directory::{Inventory, Part};
/// let empty = Inventory { segment: 0, epoch: 1, entries: &[], part: Part::Last };
/// assert_eq!(empty.entries.len(), 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inventory<'a> {
    /// Which of the owner's segments.
    pub segment: u32,
    /// Its epoch.
    pub epoch: u64,
    /// Sealed slots.
    pub entries: &'a [Entry<'a>],
    /// Whether more follows.
    pub part: Part,
}

/// What the directory says to one inventory entry.
///
/// Example: `core/src/directory/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryVerdict {
    /// It is in the index.
    Kept,
    /// It must not come back: the owner frees it.
    Retire {
        /// Why.
        reason: Reason,
    },
}

impl Directory {
    /// An owner reports what it holds: one verdict per entry, in order. Repeating a report changes nothing.
    pub fn on_inventory(
        &mut self,
        now: Instant,
        owner: Owner,
        inventory: Inventory<'_>,
    ) -> Answer<Result<Vec<EntryVerdict>, Refusal>> {
        let verdicts = self.inventory(now, owner, inventory);
        self.answer(verdicts)
    }

    fn inventory(
        &mut self,
        now: Instant,
        owner: Owner,
        inventory: Inventory<'_>,
    ) -> Result<Vec<EntryVerdict>, Refusal> {
        let at = |slot, generation| Location {
            node: owner.node,
            segment: inventory.segment,
            epoch: inventory.epoch,
            slot,
            generation,
        };
        self.segment_mut(owner, &at(0, 0))?;
        let entries = inventory.entries.iter();
        let verdicts = entries.map(|entry| self.adopt(now, owner, entry, at(entry.slot, entry.generation))).collect();
        if inventory.part == Part::Last {
            self.segment_mut(owner, &at(0, 0))?.inventory_done = true;
            self.on_inventory_done(owner);
        }
        Ok(verdicts)
    }

    fn on_inventory_done(&mut self, owner: Owner) {
        let complete =
            self.owners.get(&owner.node).is_some_and(|row| row.segments.values().all(|segment| segment.inventory_done));
        let awaited = self.awaited.len();
        if complete {
            self.awaited.retain(|node| *node != owner.node);
        }
        if awaited > 0 && self.awaited.is_empty() {
            self.rebuilt_at = Instant::ZERO;
        }
    }

    fn adopt(&mut self, now: Instant, owner: Owner, entry: &Entry<'_>, at: Location) -> EntryVerdict {
        let key = entry.key.as_bytes();
        let retire = |reason| EntryVerdict::Retire { reason };
        if self.check_value_len(entry.len).is_err() {
            return retire(Reason::Dropped);
        }
        if entry.version <= self.cleared {
            return retire(Reason::Cleared);
        }
        if self.is_retired(owner, at) {
            return retire(Reason::Removed);
        }
        match self.slot_holder(owner, at) {
            Some((holder, generation)) if generation == at.generation && *holder == *key => return EntryVerdict::Kept,
            Some((_, generation)) if generation >= at.generation => return retire(Reason::Dropped),
            Some((holder, generation)) => {
                self.drop_replica(now, &holder, Location { generation, ..at }, Reason::Dropped);
            }
            None => {}
        }
        let visible = self.objects.get(key).map(|object| (object.version, object.len, object.replicas.clone()));
        let late_mutable = entry.mutable && self.rebuilding(now).is_none();
        match visible {
            Some((version, len, replicas)) if version == entry.version => {
                let crowded =
                    replicas.len() >= self.limits.replicas_max || replicas.iter().any(|replica| replica.is_beside(&at));
                if len != entry.len || crowded {
                    return retire(Reason::Dropped);
                }
            }
            Some((version, ..)) if version > entry.version && !self.has_bug(SeededBug::OldVersionWins) => {
                return retire(Reason::Superseded);
            }
            _ if late_mutable => return retire(Reason::Superseded),
            None if self.objects.len() >= self.limits.objects_max => return retire(Reason::Dropped),
            Some(_) | None => {
                self.supersede(now, key);
                let pin = PinUntil::new(now, entry.pin);
                self.insert_object(now, Arc::from(key), entry.len, entry.version, pin, entry.mutable);
            }
        }
        self.add_replica(key, at);
        EntryVerdict::Kept
    }

    fn is_retired(&mut self, owner: Owner, at: Location) -> bool {
        self.segment_mut(owner, &at).is_ok_and(|segment| segment.retired.contains_key(&(at.slot, at.generation)))
    }

    fn slot_holder(&mut self, owner: Owner, at: Location) -> Option<(Arc<[u8]>, u32)> {
        let segment = self.segment_mut(owner, &at).ok()?;
        segment.slots.get(&at.slot).map(|held| (held.key.clone(), held.generation))
    }
}
