//! The obvious segment: a sorted list of the ranges that are taken; what lies between is free.

use std::collections::BTreeMap;

use millpond_core::extent::{Allocation, Geometry, Statistics};
use millpond_core::slab::Handle;

/// A segment as a map from offset to what was handed out there.
///
/// ```
/// use millpond_core::extent::Geometry;
/// let segment = millpond_oracle::extent::Segment::new(Geometry { len: 100, unit: 16 });
/// assert_eq!(segment.gaps(), [(0, 96)]);
/// ```
#[derive(Clone, Debug)]
pub struct Segment {
    geometry: Geometry,
    /// By offset.
    live: BTreeMap<u64, Allocation>,
}

impl Segment {
    /// An empty segment.
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        Self { geometry, live: BTreeMap::new() }
    }

    fn unit(&self) -> u64 {
        u64::from(self.geometry.unit)
    }

    fn rounded(&self, len: u64) -> u64 {
        len.div_ceil(self.unit()) * self.unit()
    }

    /// Free ranges as (offset, length), as long as can be.
    #[must_use]
    pub fn gaps(&self) -> Vec<(u64, u64)> {
        let (mut gaps, mut at) = (Vec::new(), 0);
        for range in self.live.values() {
            if range.offset > at {
                gaps.push((at, range.offset - at));
            }
            at = range.offset + self.rounded(range.len);
        }
        let end = self.geometry.len / self.unit() * self.unit();
        if end > at {
            gaps.push((at, end - at));
        }
        gaps
    }

    /// Whether a free range has room for `len` bytes at a multiple of `align`.
    #[must_use]
    pub fn fits(&self, len: u64, align: u64) -> bool {
        let align = align.max(self.unit());
        self.gaps().iter().any(|&(offset, gap)| offset.next_multiple_of(align) + self.rounded(len) <= offset + gap)
    }

    /// Whether the range at `offset` is free.
    #[must_use]
    pub fn is_free(&self, offset: u64, len: u64) -> bool {
        self.gaps().iter().any(|&(gap, gap_len)| offset >= gap && offset + self.rounded(len) <= gap + gap_len)
    }

    /// The product handed out `range` where `align` was asked for.
    ///
    /// # Errors
    /// Why it must not have.
    pub fn allocated(&mut self, range: Allocation, align: u64) -> Result<(), String> {
        if !range.offset.is_multiple_of(align.max(self.unit())) {
            return Err(format!("{range:?} is not aligned to {align}"));
        }
        if !self.is_free(range.offset, range.len) {
            return Err(format!("{range:?} is not free"));
        }
        if self.find(range.handle).is_some() {
            return Err(format!("{range:?} has the handle of another range"));
        }
        self.live.insert(range.offset, range);
        Ok(())
    }

    /// The range of a handle.
    #[must_use]
    pub fn find(&self, handle: Handle) -> Option<Allocation> {
        self.live.values().find(|range| range.handle == handle).copied()
    }

    /// Takes a range back; the bytes that became free.
    pub fn free(&mut self, handle: Handle) -> Option<u64> {
        let range = self.find(handle)?;
        self.live.remove(&range.offset);
        Some(self.rounded(range.len))
    }

    /// All ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = Allocation> {
        self.live.values().copied()
    }

    /// Ranges, taken and free.
    #[must_use]
    pub fn range_count(&self) -> usize {
        self.live.len() + self.gaps().len()
    }

    /// Bytes of the longest free range.
    #[must_use]
    pub fn largest_free_len(&self) -> u64 {
        self.gaps().iter().map(|&(_, len)| len).max().unwrap_or(0)
    }

    /// Whether `figures` are those of this segment.
    #[must_use]
    pub fn agrees_with(&self, figures: Statistics) -> bool {
        let used_len: u64 = self.live.values().map(|range| self.rounded(range.len)).sum();
        let free_len: u64 = self.gaps().iter().map(|&(_, len)| len).sum();
        figures.used_len == used_len
            && figures.free_len == free_len
            && figures.len == used_len + free_len
            && figures.asked_len == self.live.values().map(|range| range.len).sum::<u64>()
            && figures.live_count as usize == self.live.len()
            && figures.free_count as usize == self.gaps().len()
    }
}
