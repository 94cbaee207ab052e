//! Variable-size ranges of one segment: who has which bytes, found and given back in constant time.
//!
//! A two-level segregated fit: free ranges are binned by length (each power of two in 32 steps), two bitmaps find the
//! smallest bin that surely fits, and a freed range joins its free neighbours at once. It sees offsets, never memory, and
//! knows nothing of pins: a range that somebody still reads must rest with its owner until it is freed here.
//!
//! Invariants: ranges tile the segment without gap or overlap; no two neighbours are both free; every free range is in
//! the one bin of its length; the statistics are exact. Cost: allocate and free are O(1): the only loops are scans of
//! at most [`SCAN_MAX`] ranges. Source of the method: Masmano et al., "TLSF: a new dynamic memory allocator for real-time
//! systems", ECRTS 2004; first looking into the bin below the sure one (so that equal objects refill each other's
//! holes exactly) is ours.

use core::fmt;

use crate::seeded::{self, Bug};
use crate::slab::Handle;

/// Steps per power of two, as a shift.
const STEP_SHIFT: u32 = 5;
const STEPS: usize = 1 << STEP_SHIFT;
const STEP_MASK: u32 = (1 << STEP_SHIFT) - 1;
/// Rows of bins: lengths below 32 units, then one row per power of two up to 2^32 units.
const ROWS: usize = 28;
const NONE: u32 = u32::MAX;
/// The last even epoch: a node that reached the one after it is retired.
const EPOCH_LAST: u32 = u32::MAX - 3;
/// Ranges looked at in the bin that may hold a fit, before one from a larger bin is split.
const SCAN_FIRST: u32 = 4;
/// Ranges looked at in all before the segment is called full: with at most this many free ranges, a fit is never missed.
pub const SCAN_MAX: u32 = 64;

/// One range of an [`Extents`]: make an array or boxed slice of `Node::EMPTY` as its storage. `n` live ranges need at most
/// `2 n + 1` nodes.
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, Node};
/// let mut nodes = vec![Node::EMPTY; 2 * 100 + 1]; // for 100 live ranges, however they lie
/// assert!(Extents::new(&mut nodes[..], Geometry { len: 1 << 30, unit: 4096 }).is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct Node {
    /// First unit of the range.
    offset: u32,
    /// Units in the range.
    len: u32,
    before: u32,
    after: u32,
    bin_prev: u32,
    /// Next free range of the same bin; for an unused node the next unused one.
    bin_next: u32,
    /// Odd while the range is allocated.
    epoch: u32,
    /// Bytes of the range that were not asked for.
    slack: u32,
}

impl Node {
    /// A node that was never used.
    pub const EMPTY: Self =
        Self { offset: 0, len: 0, before: NONE, after: NONE, bin_prev: NONE, bin_next: NONE, epoch: 0, slack: 0 };

    const fn is_live(&self) -> bool {
        self.epoch % 2 == 1
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Size of a segment and of the unit it is handed out in, both in bytes.
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, Node};
/// let extents = Extents::new([Node::EMPTY; 3], Geometry { len: 10_000, unit: 4096 }).unwrap();
/// assert_eq!(extents.statistics().len, 8192); // two whole units
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the segment; a rest smaller than one unit is never handed out.
    pub len: u64,
    /// A power of two: every range starts at and is rounded up to a multiple of it.
    pub unit: u32,
}

/// What a caller wants that needs more than the unit's alignment.
///
/// ```
/// use millpond_core::extent::{Demand, Extents, Geometry, Node};
/// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
/// extents.allocate(1).unwrap();
/// let aligned = extents.allocate_aligned(Demand { len: 100, align: 65_536 }).unwrap();
/// assert_eq!(aligned.offset, 65_536);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Bytes wanted, at least 1.
    pub len: u64,
    /// A power of two the offset must be a multiple of; smaller than the unit means the unit.
    pub align: u64,
}

/// A range that was handed out.
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, Node};
/// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
/// let (first, second) = (extents.allocate(5000).unwrap(), extents.allocate(1).unwrap());
/// assert_eq!((first.len, second.offset), (5000, 8192));
/// assert_eq!(extents.get(first.handle), Some(first));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// Gives the range back; stale afterwards.
    pub handle: Handle,
    /// First byte, from the start of the segment.
    pub offset: u64,
    /// Bytes asked for. The range itself is rounded up to whole units.
    pub len: u64,
}

/// Exact figures of a segment; lengths in bytes.
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, Node};
/// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
/// extents.allocate(5000).unwrap();
/// let now = extents.statistics();
/// assert_eq!((now.asked_len, now.used_len, now.free_len), (5000, 8192, (1 << 20) - 8192));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Whole units of the segment: used plus free.
    pub len: u64,
    /// Handed out, rounded up to units.
    pub used_len: u64,
    /// Handed out, as asked for.
    pub asked_len: u64,
    /// Not handed out.
    pub free_len: u64,
    /// Ranges handed out.
    pub live_count: u32,
    /// Free ranges; 1 in a segment without fragmentation.
    pub free_count: u32,
}

/// Why a segment cannot be managed.
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, GeometryError, Node};
/// let odd = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 3000 });
/// assert_eq!(odd.unwrap_err(), GeometryError::Unit(3000));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GeometryError {
    /// The unit is not a power of two.
    Unit(u32),
    /// The segment is shorter than one unit.
    TooShort,
    /// The segment has more than `u32::MAX` units.
    TooLong,
    /// No node to describe the segment with.
    NoNodes,
}

/// Why no range was handed out; nothing changed.
///
/// ```
/// use millpond_core::extent::{AllocateError, Extents, Geometry, Node};
/// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
/// assert_eq!(extents.allocate(0), Err(AllocateError::Invalid));
/// assert_eq!(extents.allocate(2 << 20), Err(AllocateError::NoSpace));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocateError {
    /// Zero bytes, or an alignment that is not a power of two.
    Invalid,
    /// No free range is long enough.
    NoSpace,
    /// All nodes are in use.
    NoNodes,
}

/// The handle's range was given back before, or never was.
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, Node, Stale};
/// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
/// let range = extents.allocate(1).unwrap();
/// assert_eq!(extents.free(range.handle), Ok(4096));
/// assert_eq!(extents.free(range.handle), Err(Stale(range.handle)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale(pub Handle);

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unit(unit) => write!(f, "the unit is {unit} bytes; it must be a power of two"),
            Self::TooShort => f.write_str("the segment is shorter than one unit; make it longer or the unit smaller"),
            Self::TooLong => f.write_str("the segment has more than 2^32 - 1 units; choose a larger unit"),
            Self::NoNodes => f.write_str("the node table is empty; give it 2 n + 1 nodes for n ranges"),
        }
    }
}

impl fmt::Display for AllocateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Invalid => "ask for at least 1 byte, aligned to a power of two",
            Self::NoSpace => "no free range is long enough; free or evict some",
            Self::NoNodes => "the node table is full; free some ranges or give it more nodes",
        })
    }
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "range {} was given back before; drop the handle when you free it", self.0)
    }
}

impl core::error::Error for GeometryError {}
impl core::error::Error for AllocateError {}
impl core::error::Error for Stale {}

/// The ranges of one segment over node storage `S` (`[Node; N]`, `&mut [Node]`, `Box<[Node]>`, …).
///
/// ```
/// use millpond_core::extent::{Extents, Geometry, Node};
/// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
/// let page = extents.allocate(5000).unwrap();
/// assert_eq!((page.offset, extents.statistics().used_len), (0, 8192));
/// extents.free(page.handle).unwrap();
/// assert!(extents.free(page.handle).is_err()); // stale: refused
/// assert_eq!(extents.largest_free_len(), 1 << 20);
/// ```
#[derive(Clone, Debug)]
pub struct Extents<S> {
    nodes: S,
    unit_shift: u32,
    rows: u32,
    steps: [u32; ROWS],
    bins: [u32; ROWS * STEPS],
    unused_head: u32,
    unused_count: u32,
    /// The range at the end of the segment.
    last: u32,
    units: u32,
    free_units: u32,
    slack_len: u64,
    live_count: u32,
    free_count: u32,
}

impl<S: AsRef<[Node]> + AsMut<[Node]>> Extents<S> {
    /// One free range over the whole segment. What `nodes` held before is forgotten; epochs are kept, so handles of an
    /// earlier table over the same storage stay stale. At most `u32::MAX - 1` nodes are used.
    pub fn new(mut nodes: S, geometry: Geometry) -> Result<Self, GeometryError> {
        if !geometry.unit.is_power_of_two() {
            return Err(GeometryError::Unit(geometry.unit));
        }
        let unit_shift = geometry.unit.trailing_zeros();
        let units = u32::try_from(geometry.len >> unit_shift).map_err(|_| GeometryError::TooLong)?;
        if units == 0 {
            return Err(GeometryError::TooShort);
        }
        let (mut unused_head, mut unused_count) = (NONE, 0);
        for (index, node) in (0..NONE).zip(nodes.as_mut()).rev() {
            *node = Node { epoch: node.epoch.saturating_add(node.epoch % 2), bin_next: unused_head, ..Node::EMPTY };
            if node.epoch <= EPOCH_LAST {
                unused_head = index;
                unused_count += 1;
            }
        }
        let mut extents = Self {
            nodes,
            unit_shift,
            rows: 0,
            steps: [0; ROWS],
            bins: [NONE; ROWS * STEPS],
            unused_head,
            unused_count,
            last: NONE,
            units,
            free_units: units,
            slack_len: 0,
            live_count: 0,
            free_count: 0,
        };
        let whole = extents.take_node().ok_or(GeometryError::NoNodes)?;
        extents.node_mut(whole).len = units;
        extents.last = whole;
        extents.bin_insert(whole);
        Ok(extents)
    }

    /// Hands out `len` bytes at a multiple of the unit. O(1).
    pub fn allocate(&mut self, len: u64) -> Result<Allocation, AllocateError> {
        self.allocate_aligned(Demand { len, align: 1 })
    }

    /// Hands out a range at a multiple of `demand.align`. O(1).
    pub fn allocate_aligned(&mut self, demand: Demand) -> Result<Allocation, AllocateError> {
        if demand.len == 0 || !demand.align.is_power_of_two() {
            return Err(AllocateError::Invalid);
        }
        let units = self.units_of(demand.len).ok_or(AllocateError::NoSpace)?;
        let align = u32::try_from((demand.align >> self.unit_shift).max(1)).map_err(|_| AllocateError::NoSpace)?;
        let found = self.find(units, align).ok_or(AllocateError::NoSpace)?;
        let node = self.node(found);
        let start =
            if seeded::on(Bug::ExtentIgnoresAlignment) { node.offset } else { node.offset + pad(node.offset, align) };
        self.carve(found, start, units, demand.len)
    }

    /// Hands out exactly the range at `offset`, for an owner that finds its ranges again after a restart. O(1) when
    /// called in ascending order on a fresh table, else O(free ranges). `offset` must be a multiple of the unit.
    ///
    /// ```
    /// use millpond_core::extent::{Extents, Geometry, Node};
    /// let mut extents = Extents::new([Node::EMPTY; 9], Geometry { len: 1 << 20, unit: 4096 }).unwrap();
    /// assert_eq!(extents.allocate_at(8192, 100).unwrap().offset, 8192);
    /// assert!(extents.allocate_at(8192, 100).is_err()); // taken
    /// ```
    pub fn allocate_at(&mut self, offset: u64, len: u64) -> Result<Allocation, AllocateError> {
        let start = u32::try_from(offset >> self.unit_shift).map_err(|_| AllocateError::NoSpace)?;
        if len == 0 || u64::from(start) << self.unit_shift != offset {
            return Err(AllocateError::Invalid);
        }
        let units = self.units_of(len).ok_or(AllocateError::NoSpace)?;
        let end = start.checked_add(units).filter(|&end| end <= self.units).ok_or(AllocateError::NoSpace)?;
        // Bounded by the ranges of the segment: each step goes to the range before.
        let mut at = self.last;
        while self.node(at).offset > start {
            at = self.node(at).before;
        }
        let node = self.node(at);
        if node.is_live() || end > node.offset + node.len {
            return Err(AllocateError::NoSpace);
        }
        self.carve(at, start, units, len)
    }

    /// Takes a range back and joins it with free neighbours; returns the bytes that became free. O(1).
    pub fn free(&mut self, handle: Handle) -> Result<u64, Stale> {
        let node = self.live(handle).ok_or(Stale(handle))?;
        let (len, slack) = (node.len, node.slack);
        let index = handle.slot;
        self.node_mut(index).epoch += 1;
        self.node_mut(index).slack = 0;
        self.live_count -= 1;
        self.free_units += len;
        self.slack_len -= u64::from(slack);
        let kept = self.join_neighbours(index);
        self.bin_insert(kept);
        Ok(u64::from(len) << self.unit_shift)
    }

    /// The range of a handle; `None` if it is stale.
    pub fn get(&self, handle: Handle) -> Option<Allocation> {
        let node = self.live(handle)?;
        let len = (u64::from(node.len) << self.unit_shift) - u64::from(node.slack);
        Some(Allocation { handle, offset: u64::from(node.offset) << self.unit_shift, len })
    }

    /// Figures of the segment. O(1).
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let bytes = |units: u32| u64::from(units) << self.unit_shift;
        let used_len = bytes(self.units - self.free_units);
        Statistics {
            len: bytes(self.units),
            used_len,
            asked_len: used_len - self.slack_len,
            free_len: bytes(self.free_units),
            live_count: self.live_count,
            free_count: self.free_count,
        }
    }

    /// Bytes of the longest free range. O(ranges in the topmost bin that has any).
    pub fn largest_free_len(&self) -> u64 {
        let Some(row) = self.rows.checked_ilog2() else { return 0 };
        let Some(step) = self.steps[row as usize].checked_ilog2() else { return 0 };
        let mut at = self.bins[(row << STEP_SHIFT | step) as usize];
        let mut longest = 0;
        while at != NONE {
            longest = longest.max(self.node(at).len);
            at = self.node(at).bin_next;
        }
        u64::from(longest) << self.unit_shift
    }

    /// All ranges handed out, in order of their offset. O(ranges).
    pub fn iter(&self) -> impl Iterator<Item = Allocation> {
        let mut at = self.last;
        // Found backwards first: the list is walked from its end.
        while at != NONE && self.node(at).before != NONE {
            at = self.node(at).before;
        }
        core::iter::from_fn(move || {
            while at != NONE {
                let index = at;
                let node = self.node(index);
                at = node.after;
                if node.is_live() {
                    return self.get(Handle { slot: index, epoch: node.epoch });
                }
            }
            None
        })
    }

    fn node(&self, index: u32) -> &Node {
        &self.nodes.as_ref()[index as usize]
    }

    fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes.as_mut()[index as usize]
    }

    fn live(&self, handle: Handle) -> Option<&Node> {
        let node = self.nodes.as_ref().get(handle.slot as usize)?;
        (node.epoch == handle.epoch && node.is_live()).then_some(node)
    }

    fn units_of(&self, len: u64) -> Option<u32> {
        let mask = (1u64 << self.unit_shift) - 1;
        u32::try_from(len.checked_add(mask)? >> self.unit_shift).ok()
    }

    /// A free range that fits `units` at a multiple of `align`.
    fn find(&self, units: u32, align: u32) -> Option<u32> {
        let bin = bin_of(units);
        if let Some(index) = self.scan_bin(bin, (units, align), &mut { SCAN_FIRST }) {
            return Some(index);
        }
        let sure = units.checked_add(align - 1).map(bin_of).and_then(|bin| self.bin_above(bin));
        if let Some(bin) = sure {
            return Some(self.bins[bin as usize]);
        }
        // Nothing surely fits: look closer at the bins that might, before the segment is called full.
        let mut bin = Some(bin);
        let mut budget = SCAN_MAX;
        while let (Some(here), true) = (bin, budget > 0) {
            if let Some(index) = self.scan_bin(here, (units, align), &mut budget) {
                return Some(index);
            }
            bin = self.bin_above(here);
        }
        None
    }

    /// The first range of a bin that fits; looks at no more than `budget` ranges and takes them off it.
    fn scan_bin(&self, bin: u32, (units, align): (u32, u32), budget: &mut u32) -> Option<u32> {
        let mut at = self.bins[bin as usize];
        while at != NONE && *budget > 0 {
            *budget -= 1;
            let node = self.node(at);
            if node.len.checked_sub(pad(node.offset, align)).is_some_and(|len| len >= units) {
                return Some(at);
            }
            at = node.bin_next;
        }
        None
    }

    /// The lowest bin with a range in it whose ranges are all longer than any of `bin`.
    fn bin_above(&self, bin: u32) -> Option<u32> {
        let (row, step) = (bin >> STEP_SHIFT, bin & STEP_MASK);
        // Two shifts: by 1 to 32 in all.
        let here = self.steps[row as usize] & (u32::MAX << step << 1);
        if here != 0 {
            return Some(row << STEP_SHIFT | here.trailing_zeros());
        }
        let rows = self.rows & (u32::MAX << row << 1);
        let row = (rows != 0).then(|| rows.trailing_zeros())?;
        Some(row << STEP_SHIFT | self.steps[row as usize].trailing_zeros())
    }

    /// Cuts `units` at `start` out of the free range `found`; what is before and after stays free.
    fn carve(&mut self, found: u32, start: u32, units: u32, len: u64) -> Result<Allocation, AllocateError> {
        let node = self.node(found).clone();
        let (pad, rest) = (start - node.offset, node.offset + node.len - start - units);
        let worn_out = node.epoch > EPOCH_LAST;
        if self.unused_count < u32::from(pad > 0) + u32::from(rest > 0) + u32::from(worn_out) {
            return Err(AllocateError::NoNodes);
        }
        self.bin_remove(found);
        let found = if worn_out { self.replace_node(found) } else { found };
        if pad > 0 {
            self.insert_free(node.offset, pad, (node.before, found));
        }
        if rest > 0 {
            self.insert_free(start + units, rest, (found, node.after));
        }
        let slack = u32::try_from((u64::from(units) << self.unit_shift) - len).unwrap_or(0);
        let node = self.node_mut(found);
        (node.offset, node.len, node.slack) = (start, units, slack);
        node.epoch += 1;
        let handle = Handle { slot: found, epoch: node.epoch };
        self.live_count += 1;
        self.free_units -= units;
        self.slack_len += u64::from(slack);
        Ok(Allocation { handle, offset: u64::from(start) << self.unit_shift, len })
    }

    /// Puts a fresh node in the place of one whose epochs ran out.
    fn replace_node(&mut self, worn_out: u32) -> u32 {
        let fresh = self.take_node().expect("carve counted the nodes first");
        let Node { before, after, .. } = *self.node(worn_out);
        self.link(before, fresh);
        self.link(fresh, after);
        self.give_node(worn_out);
        fresh
    }

    /// A new free range between the neighbours `before` and `after`; `carve` counted the nodes first.
    fn insert_free(&mut self, offset: u32, len: u32, (before, after): (u32, u32)) {
        let index = self.take_node().expect("carve counted the nodes first");
        let node = self.node_mut(index);
        (node.offset, node.len, node.before, node.after) = (offset, len, before, after);
        self.link(before, index);
        self.link(index, after);
        self.bin_insert(index);
    }

    /// Makes `after` follow `before` in the segment; either may be its end.
    fn link(&mut self, before: u32, after: u32) {
        if before != NONE {
            self.node_mut(before).after = after;
        }
        if after == NONE {
            self.last = before;
        } else {
            self.node_mut(after).before = before;
        }
    }

    /// Joins the free range `index` (in no bin) with its free neighbours; returns the range that is left.
    fn join_neighbours(&mut self, index: u32) -> u32 {
        let (before, after) = (self.node(index).before, self.node(index).after);
        if after != NONE && !self.node(after).is_live() {
            self.bin_remove(after);
            let (len, beyond) = (self.node(after).len, self.node(after).after);
            self.node_mut(index).len += len;
            self.link(index, beyond);
            self.give_node(after);
        }
        if before == NONE || self.node(before).is_live() || seeded::on(Bug::ExtentForgetsToCoalesce) {
            return index;
        }
        self.bin_remove(before);
        let (len, beyond) = (self.node(index).len, self.node(index).after);
        self.node_mut(before).len += len;
        self.link(before, beyond);
        self.give_node(index);
        before
    }

    // The two below touch the lists of whoever calls at random: written without branches on what cannot be foretold. Where
    // there is no neighbour, the node itself is written instead, in a field that the next lines or nobody will read.
    // Which neighbours there are in a bin is anybody's guess, so the two below do not branch on it: where there is none, the
    // node itself is written instead, in a field that nobody reads before it is written again.
    fn bin_insert(&mut self, index: u32) {
        let bin = bin_of(self.node(index).len);
        let head = core::mem::replace(&mut self.bins[bin as usize], index);
        let node = self.node_mut(index);
        (node.bin_prev, node.bin_next) = (NONE, head);
        let (after, before) = if head == NONE { (index, NONE) } else { (head, index) };
        self.node_mut(after).bin_prev = before;
        let (row, step) = (bin >> STEP_SHIFT, bin & STEP_MASK);
        self.steps[row as usize] |= 1 << step;
        self.rows |= 1 << row;
        self.free_count += 1;
    }

    fn bin_remove(&mut self, index: u32) {
        let node = self.node(index);
        let (prev, next, bin) = (node.bin_prev, node.bin_next, bin_of(node.len));
        self.node_mut(if next == NONE { index } else { next }).bin_prev = prev;
        self.node_mut(if prev == NONE { index } else { prev }).bin_next = next;
        let head = &mut self.bins[bin as usize];
        *head = if prev == NONE { next } else { *head };
        let is_empty = *head == NONE;
        let (row, step) = (bin >> STEP_SHIFT, bin & STEP_MASK);
        let steps = &mut self.steps[row as usize];
        *steps &= !(u32::from(is_empty) << step);
        self.rows &= !(u32::from(*steps == 0) << row);
        self.free_count -= 1;
    }

    fn take_node(&mut self) -> Option<u32> {
        let index = (self.unused_head != NONE).then_some(self.unused_head)?;
        let node = self.node_mut(index);
        let next = core::mem::replace(&mut node.bin_next, NONE);
        self.unused_head = next;
        self.unused_count -= 1;
        Some(index)
    }

    fn give_node(&mut self, index: u32) {
        let head = self.unused_head;
        let node = self.node_mut(index);
        node.bin_next = head;
        if node.epoch <= EPOCH_LAST {
            self.unused_head = index;
            self.unused_count += 1;
        }
    }
}

/// The bin that holds free ranges of `units` units: row and step in one number.
const fn bin_of(units: u32) -> u32 {
    let row = (units | STEP_MASK).ilog2() - (STEP_SHIFT - 1);
    // Lengths of row 0 are their own steps; from row 1 on, the bits below the leading one are.
    let step = (units >> row.saturating_sub(1)) & STEP_MASK;
    row << STEP_SHIFT | step
}

/// Units from `offset` to the next multiple of `align`, a power of two.
const fn pad(offset: u32, align: u32) -> u32 {
    offset.wrapping_neg() & (align - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u32 = 16;

    fn extents(units: u64) -> Extents<[Node; 32]> {
        Extents::new([Node::EMPTY; 32], Geometry { len: units * u64::from(UNIT), unit: UNIT }).unwrap()
    }

    #[test]
    fn everything_given_back_is_one_range_again() {
        let mut extents = extents(100);
        let mut ranges = [None; 10];
        for range in &mut ranges {
            *range = Some(extents.allocate(160).unwrap().handle);
        }
        assert_eq!(extents.allocate(1), Err(AllocateError::NoSpace));
        for index in [3, 1, 2, 9, 0, 7, 8, 6, 4, 5] {
            extents.free(ranges[index].unwrap()).unwrap();
        }
        assert_eq!((extents.statistics().free_count, extents.largest_free_len()), (1, 1600));
    }

    #[test]
    fn equal_objects_refill_each_others_holes() {
        let mut extents = extents(999);
        let first = extents.allocate(16 * 333).unwrap();
        extents.allocate(16 * 333).unwrap();
        extents.allocate(16 * 333).unwrap();
        extents.free(first.handle).unwrap();
        assert_eq!(extents.allocate(16 * 333).unwrap().offset, first.offset);
    }

    #[test]
    fn an_aligned_range_leaves_what_is_before_it_free() {
        let mut extents = extents(64);
        extents.allocate(16).unwrap();
        let aligned = extents.allocate_aligned(Demand { len: 16, align: 256 }).unwrap();
        assert_eq!((aligned.offset, extents.statistics().free_count), (256, 2));
        assert_eq!(extents.allocate(15 * 16).unwrap().offset, 16);
    }

    #[test]
    fn ranges_are_found_again_at_their_offsets() {
        let mut extents = extents(64);
        let one = extents.allocate_at(160, 20).unwrap();
        let two = extents.allocate_at(320, 16).unwrap();
        assert_eq!(extents.allocate_at(160 + 16, 1), Err(AllocateError::NoSpace));
        assert_eq!(extents.allocate_at(0, 200), Err(AllocateError::NoSpace));
        assert_eq!(extents.allocate_at(8, 1), Err(AllocateError::Invalid));
        assert!(extents.iter().eq([one, two]));
        assert_eq!(extents.statistics().asked_len, 36);
    }

    #[test]
    fn a_full_node_table_is_an_answer_and_changes_nothing() {
        let mut extents = Extents::new([Node::EMPTY; 2], Geometry { len: 160, unit: UNIT }).unwrap();
        let first = extents.allocate(16).unwrap();
        let before = extents.statistics();
        assert_eq!(extents.allocate(16), Err(AllocateError::NoNodes));
        assert_eq!(extents.statistics(), before);
        extents.allocate(9 * 16).unwrap();
        extents.free(first.handle).unwrap();
    }

    #[test]
    fn a_node_whose_epochs_ran_out_is_replaced() {
        let worn = Node { epoch: EPOCH_LAST, ..Node::EMPTY };
        let mut extents = Extents::new([worn, Node::EMPTY], Geometry { len: 160, unit: UNIT }).unwrap();
        let last = extents.allocate(160).unwrap();
        extents.free(last.handle).unwrap();
        let next = extents.allocate(160).unwrap();
        assert_eq!((next.handle.slot, next.handle.epoch), (1, 1));
        assert_eq!(extents.free(last.handle), Err(Stale(last.handle)));
        extents.free(next.handle).unwrap();
        assert_eq!(extents.largest_free_len(), 160);
    }
}
