//! What moves mean, byte by byte.

use millpond_core::batch::{Extent, Move, RegionId};

/// One byte's way: from this byte of this region to that one.
pub type ByteMove = ((RegionId, u64), (RegionId, u64));

/// Every byte the moves copy, in order.
///
/// ```
/// use millpond_core::batch::{Extent, Move, RegionId};
/// let extent = Extent::new(RegionId { slot: 0, epoch: 1 }, 5, 3);
/// assert_eq!(millpond_oracle::batch::bytes(&[Move::new(extent, extent).unwrap()]).len(), 3);
/// ```
#[must_use]
pub fn bytes(moves: &[Move]) -> Vec<ByteMove> {
    let places = |extent: Extent| (0..extent.len).map(move |at| (extent.region, extent.offset + at));
    moves.iter().flat_map(|one| places(one.source).zip(places(one.target))).collect()
}

/// Whether some neighbours could still be one move.
#[must_use]
pub fn has_joinable_neighbours(moves: &[Move]) -> bool {
    let follows = |one: Extent, next: Extent| one.region == next.region && one.offset + one.len == next.offset;
    moves.windows(2).any(|pair| follows(pair[0].source, pair[1].source) && follows(pair[0].target, pair[1].target))
}
