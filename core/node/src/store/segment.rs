//! One segment of memory and what lies in it: slots, extents, keys, the order of eviction.
//!
//! A plain value behind its node's lock; it does no I/O and waits for nothing. The life of a slot is free → reserved →
//! writing → sealed → evicting → quarantined → free. Invariants:
//! - a slot's generation grows before each reuse, so a location names one life of it;
//! - bytes of a sealed slot do not change; readers hold a share of them, which is their pin;
//! - an extent is given back only when the region's lease table says that nobody holds a byte of it, neither a reader nor a
//!   transfer that nobody waits for any more.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use millpond_core::directory::{Location, NodeId, Pin, SegmentFacts, SegmentLoad, Stamp};
use millpond_core::evict::{Kind, Object, Policy, Residents};
use millpond_core::extent::{AllocateError, Allocation, Extents, Geometry, Node};
use millpond_core::time::Instant;
use millpond_hal::region::{LeaseError, Region, RegionBuf, RegionBytes};
use xxhash_rust::xxh3::xxh3_64;

use super::slot::{Record, SLOT_LEN, State, object_id};

/// Payloads start at multiples of this many bytes.
const UNIT: u32 = 512;
/// The table is rounded up to pages, so that payloads are aligned to them.
const PAGE: u64 = 4096;
/// Steps from a candidate of eviction to a leaf under it, at most.
const DEPTH_MAX: usize = 1 << 16;

/// Resting slots that one sweep looks at.
const SWEEP_MAX: usize = 64;

/// What a segment is made of.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Its index, epoch, tier and payload bytes.
    pub facts: SegmentFacts,
    /// Objects it can hold.
    pub slots_max: u32,
    /// What goes first.
    pub policy: Kind,
}

impl Shape {
    /// Bytes of the region that a segment of this shape needs: table and payload.
    #[must_use]
    pub fn region_len(&self) -> u64 {
        self.table_len() + self.facts.capacity
    }

    fn table_len(&self) -> u64 {
        (u64::from(self.slots_max) * SLOT_LEN as u64).next_multiple_of(PAGE)
    }
}

/// A segment could not be made.
///
/// Example: `core/node/src/store/segment/tests.rs` (`segment`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The extent allocator refuses the capacity.
    #[error("a segment of {capacity} bytes cannot be managed ({why}); choose another size")]
    Capacity {
        /// What was asked for.
        capacity: u64,
        /// What the allocator says.
        why: millpond_core::extent::GeometryError,
    },
    /// The region is too short or somebody holds part of it.
    #[error("the region cannot carry the segment: {0}")]
    Region(LeaseError),
}

/// One life of one slot.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// Index in the table.
    pub slot: u32,
    /// Which life.
    pub generation: u32,
}

/// Space for a value, set aside: its owner fills `buf`, then seals or releases.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Debug)]
pub struct Reserved {
    /// The slot.
    pub id: SlotId,
    /// The space, exactly as long as the value.
    pub buf: RegionBuf,
}

/// Why no space was set aside.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReserveError {
    /// The value is longer than the segment: no eviction would help.
    TooLong,
    /// No free extent is long enough now.
    NoSpace,
    /// Every slot is taken.
    NoSlot,
}

/// What is sealed into a slot.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Debug)]
pub struct Value {
    /// The key.
    pub key: Arc<[u8]>,
    /// The bytes.
    pub bytes: RegionBytes,
    /// One checksum per chunk.
    pub checksums: Arc<[u32]>,
    /// The pin asked for.
    pub pin: Pin,
    /// Key of the block before it, if that matters for eviction.
    pub parent: Option<Box<[u8]>>,
}

/// A share in the bytes of a sealed slot: while it is held they stay.
///
/// Example: `core/node/src/store/segment/tests.rs` (`pin`).
#[derive(Clone, Debug)]
pub struct Pinned {
    /// The bytes.
    pub bytes: RegionBytes,
    /// One checksum per chunk.
    pub checksums: Arc<[u32]>,
    /// The version; zero until the directory has named it.
    pub version: Stamp,
}

/// A victim to propose to the directory.
///
/// Example: `core/node/src/store/segment/tests.rs` (`propose`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The slot.
    pub id: SlotId,
    /// Its key.
    pub key: Arc<[u8]>,
    /// Its bytes.
    pub len: u64,
}

/// Exact counts.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Payload bytes not handed out.
    pub free: u64,
    /// Slots reserved or writing.
    pub writing: u64,
    /// Slots sealed.
    pub sealed: u64,
    /// Slots proposed as victims, or resting until nobody holds them.
    pub leaving: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    state: State,
    allocation: Option<Allocation>,
    value: Option<Value>,
    version: Stamp,
    mutable: bool,
    parent: Option<u32>,
    children: Vec<u32>,
}

impl Slot {
    const EMPTY: Self = Self {
        generation: 0,
        state: State::Free,
        allocation: None,
        value: None,
        version: Stamp::ZERO,
        mutable: false,
        parent: None,
        children: Vec::new(),
    };
}

/// A segment. See the [module](self).
///
/// Example: `core/node/src/store/segment/tests.rs`.
pub struct Segment {
    node: NodeId,
    shape: Shape,
    region: Region,
    table: RegionBuf,
    base: u64,
    extents: Extents<Box<[Node]>>,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    by_key: HashMap<Arc<[u8]>, u32>,
    policy: Box<dyn Policy + Send>,
    resting: VecDeque<u32>,
    counts: Counts,
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segment").field("shape", &self.shape).field("counts", &self.counts()).finish_non_exhaustive()
    }
}

/// Who may go: what is sealed and has no child here.
struct Leaves<'a>(&'a [Slot]);

impl Residents for Leaves<'_> {
    fn may_go(&self, slot: u32) -> bool {
        let slot = &self.0[slot as usize];
        // What the directory has not confirmed yet is not ours to propose.
        slot.state == State::Sealed && slot.version != Stamp::ZERO && slot.children.is_empty() && !is_hard(slot)
    }

    fn leaf_under(&self, slot: u32) -> u32 {
        let mut leaf = slot;
        for _ in 0..DEPTH_MAX {
            match self.0[leaf as usize].children.last() {
                Some(child) => leaf = *child,
                None => break,
            }
        }
        leaf
    }
}

fn is_hard(slot: &Slot) -> bool {
    slot.value.as_ref().is_some_and(|value| value.pin == Pin::Hard)
}

impl Segment {
    /// An empty segment of `node` over `region`, which is at least [`Shape::region_len`] long and not leased.
    pub fn new(node: NodeId, region: Region, shape: Shape) -> Result<Self, SegmentError> {
        let capacity = shape.facts.capacity;
        let nodes = vec![Node::EMPTY; 2 * shape.slots_max as usize + 1].into_boxed_slice();
        let extents = Extents::new(nodes, Geometry { len: capacity, unit: UNIT })
            .map_err(|why| SegmentError::Capacity { capacity, why })?;
        let base = shape.table_len();
        let table = region.carve(0, base).map_err(SegmentError::Region)?;
        Ok(Self {
            node,
            shape,
            region,
            table,
            base,
            extents,
            slots: Vec::new(),
            free_slots: Vec::new(),
            by_key: HashMap::new(),
            policy: shape.policy.boxed(shape.slots_max as usize),
            resting: VecDeque::new(),
            counts: Counts::default(),
        })
    }

    /// The memory it lies in.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// What it announces to the directory.
    #[must_use]
    pub fn facts(&self) -> SegmentFacts {
        self.shape.facts
    }

    /// How full it is.
    #[must_use]
    pub fn load(&self) -> SegmentLoad {
        SegmentLoad { index: self.shape.facts.index, free: self.free() }
    }

    /// Payload bytes not handed out.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.extents.statistics().free_len
    }

    /// Exact counts.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { free: self.free(), ..self.counts }
    }

    /// The name of a slot's life for the directory.
    #[must_use]
    pub fn location(&self, id: SlotId) -> Location {
        let SegmentFacts { index, epoch, .. } = self.shape.facts;
        Location { node: self.node, segment: index, epoch, slot: id.slot, generation: id.generation }
    }

    /// The slot that a location names, if it is one of this segment's current life.
    #[must_use]
    pub fn slot_at(&self, location: &Location) -> Option<SlotId> {
        let id = SlotId { slot: location.slot, generation: location.generation };
        (self.location(id) == *location).then_some(id)
    }

    /// Sets space aside for a value of `len` bytes.
    pub fn reserve(&mut self, len: u64) -> Result<Reserved, ReserveError> {
        if len > self.shape.facts.capacity {
            return Err(ReserveError::TooLong);
        }
        self.sweep();
        let allocation = self.extents.allocate(len).map_err(|error| match error {
            AllocateError::NoNodes => ReserveError::NoSlot,
            _ => ReserveError::NoSpace,
        })?;
        let Ok(buf) = self.region.carve(self.base + allocation.offset, len) else {
            // Only the region's lease bound is left as a reason: extents are given back when nobody holds them.
            let _ = self.extents.free(allocation.handle);
            return Err(ReserveError::NoSlot);
        };
        let Some(index) = self.take_slot() else {
            let _ = self.extents.free(allocation.handle);
            return Err(ReserveError::NoSlot);
        };
        let slot = &mut self.slots[index as usize];
        slot.generation += 1;
        slot.state = State::Reserved;
        slot.allocation = Some(allocation);
        let id = SlotId { slot: index, generation: slot.generation };
        self.counts.writing += 1;
        self.write_record(index);
        Ok(Reserved { id, buf })
    }

    fn take_slot(&mut self) -> Option<u32> {
        if let Some(index) = self.free_slots.pop() {
            return Some(index);
        }
        let index = u32::try_from(self.slots.len()).ok().filter(|index| *index < self.shape.slots_max)?;
        self.slots.push(Slot::EMPTY);
        Some(index)
    }

    /// Bytes begin to come in.
    pub fn begin_writing(&mut self, id: SlotId) {
        if let Some(slot) = self.slot_mut(id).filter(|slot| slot.state == State::Reserved) {
            slot.state = State::Writing;
            self.write_record(id.slot);
        }
    }

    /// Makes a reserved slot readable. False if it is no longer reserved: the value is dropped, nothing changes.
    pub fn seal(&mut self, now: Instant, id: SlotId, value: Value) -> bool {
        let parent = value.parent.as_ref().and_then(|key| self.by_key.get(&key[..]).copied());
        let Some(slot) = self.slot_mut(id).filter(|slot| matches!(slot.state, State::Reserved | State::Writing)) else {
            return false;
        };
        let (key, len) = (Arc::clone(&value.key), value.bytes.len() as u64);
        slot.state = State::Sealed;
        slot.version = Stamp::ZERO;
        slot.mutable = false;
        slot.value = Some(value);
        slot.parent = parent.filter(|parent| *parent != id.slot);
        let parent = slot.parent;
        if let Some(parent) = parent {
            self.slots[parent as usize].children.push(id.slot);
        }
        self.counts.writing -= 1;
        self.counts.sealed += 1;
        self.policy.on_stored(now, id.slot, Object { fingerprint: xxh3_64(&key), len });
        self.by_key.insert(key, id.slot);
        self.write_record(id.slot);
        true
    }

    /// The directory named the version of a sealed slot.
    pub fn confirm(&mut self, id: SlotId, version: Stamp, mutable: bool) {
        if let Some(slot) = self.slot_mut(id).filter(|slot| slot.state.is_readable()) {
            slot.version = version;
            slot.mutable = mutable;
            self.write_record(id.slot);
        }
    }

    /// Ends the life of a slot, whatever its state. Its bytes rest until nobody holds them. False if it ended before.
    pub fn release(&mut self, now: Instant, id: SlotId) -> bool {
        let Some(slot) = self.slot_mut(id).filter(|slot| !matches!(slot.state, State::Free | State::Quarantined))
        else {
            return false;
        };
        let (state, value, parent) = (slot.state, slot.value.take(), slot.parent.take());
        slot.state = State::Quarantined;
        let orphans = std::mem::take(&mut slot.children);
        for child in orphans {
            self.slots[child as usize].parent = None;
        }
        if let Some(parent) = parent {
            self.slots[parent as usize].children.retain(|child| *child != id.slot);
        }
        if let Some(value) = value {
            self.policy.on_removed(now, id.slot);
            if self.by_key.get(&value.key) == Some(&id.slot) {
                self.by_key.remove(&value.key);
            }
        }
        match state {
            State::Sealed => self.counts.sealed -= 1,
            State::Evicting => self.counts.leaving -= 1,
            _ => self.counts.writing -= 1,
        }
        self.counts.leaving += 1;
        self.write_record(id.slot);
        self.resting.push_back(id.slot);
        self.sweep();
        true
    }

    /// Gives back extents that nobody holds any more. Looks at a bounded number of resting slots, in turn.
    pub fn sweep(&mut self) {
        for _ in 0..self.resting.len().min(SWEEP_MAX) {
            let Some(index) = self.resting.pop_front() else { break };
            let slot = &mut self.slots[index as usize];
            let Some(allocation) = slot.allocation else { continue };
            // The lease table knows every holder: whoever still reads, and what a transfer still moves.
            if self.region.carve(self.base + allocation.offset, allocation.len).is_err() {
                self.resting.push_back(index);
                continue;
            }
            slot.allocation = None;
            slot.state = State::Free;
            let spent = slot.generation == u32::MAX;
            let _ = self.extents.free(allocation.handle);
            self.counts.leaving -= 1;
            self.write_record(index);
            if !spent {
                self.free_slots.push(index);
            }
        }
    }

    /// A share in the bytes at `location`, if it still holds `key`. Counts as a use.
    pub fn pin(&mut self, now: Instant, key: &[u8], location: &Location) -> Option<Pinned> {
        let id = self.slot_at(location)?;
        let slot = self.slot_mut(id).filter(|slot| slot.state.is_readable())?;
        let (version, value) = (slot.version, slot.value.as_ref()?);
        if *value.key != *key {
            return None;
        }
        let pinned = Pinned { bytes: value.bytes.clone(), checksums: Arc::clone(&value.checksums), version };
        self.policy.on_used(now, id.slot);
        Some(pinned)
    }

    /// Whether a sealed slot holds `key`.
    #[must_use]
    pub fn holds(&self, key: &[u8]) -> bool {
        self.by_key.contains_key(key)
    }

    /// Victims that together have at least `wanted` bytes, at most `count_max` of them, leaf before parent. Each is
    /// [`Segment::release`]d or [`Segment::spare`]d once the directory has spoken.
    pub fn propose(&mut self, now: Instant, wanted: u64, count_max: usize) -> Vec<Proposal> {
        let (mut proposals, mut sum) = (Vec::new(), 0u64);
        while sum < wanted && proposals.len() < count_max {
            let Some(index) = self.policy.poll_victim(now, &Leaves(&self.slots)) else { break };
            let slot = &mut self.slots[index as usize];
            let Some(value) = &slot.value else { continue };
            let (id, len) = (SlotId { slot: index, generation: slot.generation }, value.bytes.len() as u64);
            proposals.push(Proposal { id, key: Arc::clone(&value.key), len });
            sum += len;
            slot.state = State::Evicting;
            self.counts.sealed -= 1;
            self.counts.leaving += 1;
        }
        proposals
    }

    /// The directory struck a victim out.
    pub fn spare(&mut self, now: Instant, id: SlotId) {
        if let Some(slot) = self.slot_mut(id).filter(|slot| slot.state == State::Evicting) {
            slot.state = State::Sealed;
            self.counts.sealed += 1;
            self.counts.leaving -= 1;
            self.policy.on_spared(now, id.slot);
        }
    }

    /// Confirmed slots from `from` on, at most `count_max`, and where to go on; for the inventory.
    #[must_use]
    pub fn inventory(&self, from: u32, count_max: usize) -> (Vec<Sealed>, Option<u32>) {
        let mut rows = Vec::new();
        for (index, slot) in (from..).zip(self.slots.iter().skip(from as usize)) {
            if rows.len() == count_max {
                return (rows, Some(index));
            }
            if let (true, Some(value)) = (slot.state.is_readable() && slot.version != Stamp::ZERO, &slot.value) {
                rows.push(Sealed {
                    id: SlotId { slot: index, generation: slot.generation },
                    key: Arc::clone(&value.key),
                    len: value.bytes.len() as u64,
                    version: slot.version,
                    pin: value.pin,
                    mutable: slot.mutable,
                });
            }
        }
        (rows, None)
    }

    fn slot_mut(&mut self, id: SlotId) -> Option<&mut Slot> {
        self.slots.get_mut(id.slot as usize).filter(|slot| slot.generation == id.generation)
    }

    fn write_record(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        let key = slot.value.as_ref().map(|value| &value.key[..]);
        let record = Record {
            generation: slot.generation,
            state: slot.state,
            mutable: slot.mutable,
            key_len: key.map_or(0, |key| u16::try_from(key.len()).unwrap_or(u16::MAX)),
            object: key.map_or(0, object_id),
            version: slot.version,
            offset: slot.allocation.map_or(0, |allocation| self.base + allocation.offset),
            len: slot.allocation.map_or(0, |allocation| allocation.len),
        };
        let at = index as usize * SLOT_LEN;
        self.table[at..at + SLOT_LEN].copy_from_slice(&record.encode());
    }
}

/// A row of the inventory.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// The slot.
    pub id: SlotId,
    /// The key.
    pub key: Arc<[u8]>,
    /// Bytes of the value.
    pub len: u64,
    /// The version.
    pub version: Stamp,
    /// The pin.
    pub pin: Pin,
    /// Whether it was ever upserted.
    pub mutable: bool,
}

#[cfg(test)]
mod tests;
