//! What to move: extents of regions, moves between them, and batches of moves.
//!
//! Nothing here knows an address or a link. A region handle is local to one node; how it names memory of a peer is the
//! fabric's business. Offsets and lengths are bytes. Invariant: the two extents of a [`Move`] have the same length, and
//! no extent's end overflows a `u64`.

use crate::slab::Handle;

/// Names a region in one node's region table, its own memory or a peer's that was attached.
pub type RegionId = Handle;

/// A range of one region, in bytes. 24 bytes, no padding: this is also its wire form (little-endian hosts).
///
/// ```
/// use millpond_core::batch::{Extent, RegionId};
/// let extent = Extent::new(RegionId { slot: 0, epoch: 1 }, 4096, 100);
/// assert_eq!(extent.split_at(40).unwrap().1.offset, 4136);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Extent {
    /// The region the bytes lie in.
    pub region: RegionId,
    /// First byte, counted from the start of the region.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// One copy from `source` to `target`, equally long.
///
/// ```
/// use millpond_core::batch::{Extent, Move, RegionId};
/// let here = Extent::new(RegionId { slot: 0, epoch: 1 }, 0, 64);
/// let there = Extent::new(RegionId { slot: 1, epoch: 1 }, 128, 64);
/// assert_eq!(Move::new(here, there).unwrap().len(), 64);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Move {
    /// Where the bytes come from.
    pub source: Extent,
    /// Where they go.
    pub target: Extent,
}

/// The two extents of a move differ in length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthsDiffer {
    /// Bytes of the source.
    pub source_len: u64,
    /// Bytes of the target.
    pub target_len: u64,
}

impl core::fmt::Display for LengthsDiffer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "source has {} bytes, target {}; a move copies equal lengths", self.source_len, self.target_len)
    }
}

impl core::error::Error for LengthsDiffer {}

impl Extent {
    /// The `len` bytes at `offset` of `region`. Bounds are checked by who knows the region.
    #[must_use]
    pub const fn new(region: RegionId, offset: u64, len: u64) -> Self {
        Self { region, offset, len }
    }

    /// One past the last byte; `None` if that overflows.
    #[must_use]
    pub const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// The first `len` bytes and the rest; `None` if `len` is larger than the extent.
    #[must_use]
    pub const fn split_at(&self, len: u64) -> Option<(Self, Self)> {
        if len > self.len || self.end().is_none() {
            return None;
        }
        let head = Self { len, ..*self };
        Some((head, Self { offset: self.offset + len, len: self.len - len, ..*self }))
    }

    /// Whether `next` begins where this one ends, in the same region.
    #[must_use]
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.region == next.region && self.end() == Some(next.offset)
    }

    /// Whether a byte lies in both.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let ends = (self.end().unwrap_or(u64::MAX), other.end().unwrap_or(u64::MAX));
        self.region == other.region && self.offset < ends.1 && other.offset < ends.0
    }
}

impl Move {
    /// A move of all of `source` onto all of `target`.
    pub const fn new(source: Extent, target: Extent) -> Result<Self, LengthsDiffer> {
        if source.len == target.len {
            Ok(Self { source, target })
        } else {
            Err(LengthsDiffer { source_len: source.len, target_len: target.len })
        }
    }

    /// Bytes it copies.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.source.len
    }

    /// Whether it copies nothing.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.source.len == 0
    }

    /// The first `len` bytes as one move and the rest as another; `None` if `len` is larger than the move.
    #[must_use]
    pub fn split_at(&self, len: u64) -> Option<(Self, Self)> {
        let ((source, source_rest), (target, target_rest)) = (self.source.split_at(len)?, self.target.split_at(len)?);
        Some((Self { source, target }, Self { source: source_rest, target: target_rest }))
    }

    /// Both as one move, if `next` continues this one on both sides.
    #[must_use]
    pub fn coalesced_with(&self, next: &Self) -> Option<Self> {
        let joined = self.len().checked_add(next.len())?;
        (self.source.is_followed_by(&next.source) && self.target.is_followed_by(&next.target)).then_some(Self {
            source: Extent { len: joined, ..self.source },
            target: Extent { len: joined, ..self.target },
        })
    }
}

/// Joins neighbours in place that continue each other on both sides, keeping order. Returns how many moves remain, at the
/// front of `moves`. O(n), no heap.
///
/// ```
/// use millpond_core::batch::{coalesce, Extent, Move, RegionId};
/// let (a, b) = (RegionId { slot: 0, epoch: 1 }, RegionId { slot: 1, epoch: 1 });
/// let page = |n: u64| Move::new(Extent::new(a, n * 10, 10), Extent::new(b, n * 10, 10)).unwrap();
/// let mut moves = [page(0), page(1), page(7)];
/// assert_eq!(coalesce(&mut moves), 2);
/// assert_eq!(moves[0].len(), 20);
/// ```
pub fn coalesce(moves: &mut [Move]) -> usize {
    let mut kept = 0usize;
    for index in 0..moves.len() {
        let next = moves[index];
        match kept.checked_sub(1).and_then(|last| Some((last, moves[last].coalesced_with(&next)?))) {
            Some((last, joined)) => moves[last] = joined,
            None => {
                moves[kept] = next;
                kept += 1;
            }
        }
    }
    kept
}

/// Cuts moves into pieces of at most `len_max` bytes, in order, without a heap.
///
/// ```
/// use millpond_core::batch::{Extent, Move, RegionId, Split};
/// let (a, b) = (RegionId { slot: 0, epoch: 1 }, RegionId { slot: 1, epoch: 1 });
/// let moves = [Move::new(Extent::new(a, 0, 25), Extent::new(b, 0, 25)).unwrap()];
/// let lens: Vec<u64> = Split::new(&moves, 10).map(|piece| piece.len()).collect();
/// assert_eq!(lens, [10, 10, 5]);
/// ```
#[derive(Clone, Debug)]
pub struct Split<'a> {
    moves: core::slice::Iter<'a, Move>,
    rest: Option<Move>,
    len_max: u64,
}

impl<'a> Split<'a> {
    /// Pieces of `moves`, each at most `len_max` bytes (at least 1 is used).
    #[must_use]
    pub fn new(moves: &'a [Move], len_max: u64) -> Self {
        Self { moves: moves.iter(), rest: None, len_max: len_max.max(1) }
    }
}

impl Iterator for Split<'_> {
    type Item = Move;

    fn next(&mut self) -> Option<Move> {
        let whole = self.rest.take().or_else(|| self.moves.next().copied())?;
        match whole.split_at(self.len_max) {
            Some((piece, rest)) if !rest.is_empty() => {
                self.rest = Some(rest);
                Some(piece)
            }
            _ => Some(whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RegionId = RegionId { slot: 0, epoch: 1 };
    const B: RegionId = RegionId { slot: 1, epoch: 1 };

    #[test]
    fn a_move_of_unequal_lengths_is_refused() {
        let refused = Move::new(Extent::new(A, 0, 1), Extent::new(B, 0, 2));
        assert_eq!(refused, Err(LengthsDiffer { source_len: 1, target_len: 2 }));
    }

    #[test]
    fn pieces_of_an_extent_never_overflow() {
        assert_eq!(Extent::new(A, u64::MAX, 2).split_at(1), None);
        assert_eq!(Extent::new(A, 0, 2).split_at(3), None);
    }

    #[test]
    fn moves_coalesce_only_when_both_sides_continue() {
        let at = |source, target| Move::new(Extent::new(A, source, 8), Extent::new(B, target, 8)).unwrap();
        let mut moves = [at(0, 0), at(8, 16), at(16, 24)];
        assert_eq!(coalesce(&mut moves), 2);
        assert_eq!(moves[1].len(), 16);
    }
}
