//! What to move: extents of regions, moves between them, and batches of moves.
//!
//! Nothing here knows an address or a link. A region handle is local to one node; how it names memory of a peer is the
//! fabric's business. Offsets and lengths are bytes. Invariant: the two extents of a [`Move`] have the same length, and
//! no extent's end overflows a `u64`.

use crate::seeded::{self, Bug};
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
///
/// ```
/// use millpond_core::batch::{Extent, LengthsDiffer, Move, RegionId};
/// let extent = |len| Extent::new(RegionId::default(), 0, len);
/// assert_eq!(Move::new(extent(8), extent(9)), Err(LengthsDiffer { source_len: 8, target_len: 9 }));
/// ```
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

/// What sort of memory a region is; decides which transports can reach it.
///
/// ```
/// use millpond_core::batch::MemoryKind;
/// let (code, device) = MemoryKind::Cuda { device: 3 }.code();
/// assert_eq!(MemoryKind::from_code(code, device), Some(MemoryKind::Cuda { device: 3 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Ordinary host memory.
    Host,
    /// Page-locked host memory that devices reach directly.
    Pinned,
    /// Memory of a CUDA device.
    Cuda {
        /// Ordinal of the device.
        device: u16,
    },
    /// Memory of a HIP device.
    Hip {
        /// Ordinal of the device.
        device: u16,
    },
    /// A file.
    File,
}

/// Who may do what with a region: a set of [`Rights::LOCAL`], [`Rights::REMOTE_READ`], [`Rights::REMOTE_WRITE`].
///
/// ```
/// use millpond_core::batch::Rights;
/// let rights = Rights::LOCAL | Rights::REMOTE_READ;
/// assert!(rights.allows(Rights::REMOTE_READ) && !rights.allows(Rights::REMOTE_WRITE));
/// ```
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Default,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::KnownLayout,
    zerocopy::Immutable,
)]
#[repr(transparent)]
pub struct Rights(u8);

impl Rights {
    /// Nobody may do anything.
    pub const NONE: Self = Self(0);
    /// The owner's process reads and writes.
    pub const LOCAL: Self = Self(1);
    /// Peers that prove the capability read.
    pub const REMOTE_READ: Self = Self(2);
    /// Peers that prove the capability write.
    pub const REMOTE_WRITE: Self = Self(4);

    /// Whether every right of `wanted` is in this set.
    #[must_use]
    pub const fn allows(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }
}

impl core::ops::BitOr for Rights {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl MemoryKind {
    /// The kind as numbers for the wire: code and device ordinal.
    #[must_use]
    pub const fn code(self) -> (u8, u16) {
        match self {
            Self::Host => (1, 0),
            Self::Pinned => (2, 0),
            Self::Cuda { device } => (3, device),
            Self::Hip { device } => (4, device),
            Self::File => (5, 0),
        }
    }

    /// The kind for a code and ordinal of [`MemoryKind::code`]; `None` for a code this version does not know.
    #[must_use]
    pub const fn from_code(code: u8, device: u16) -> Option<Self> {
        match code {
            1 => Some(Self::Host),
            2 => Some(Self::Pinned),
            3 => Some(Self::Cuda { device }),
            4 => Some(Self::Hip { device }),
            5 => Some(Self::File),
            _ => None,
        }
    }
}

/// Proof that its bearer was given a token by the owner: 128 random bits. Compared without early exit, never printed.
///
/// ```
/// use millpond_core::batch::Capability;
/// let capability = Capability::new([7; 16]);
/// assert!(capability.matches(&Capability::new([7; 16])));
/// assert_eq!(format!("{capability:?}"), "Capability(..)");
/// ```
#[derive(Clone, Copy, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)]
#[repr(transparent)]
pub struct Capability([u8; 16]);

impl Capability {
    /// The capability with these bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes, for the wire.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// Whether both are the same, in time that does not depend on where they differ.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(other.0).fold(0u8, |bits, (a, b)| bits | (a ^ b));
        core::hint::black_box(difference) == 0
    }
}

impl core::fmt::Debug for Capability {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Capability(..)")
    }
}

/// What an owner hands to a peer so that it can name some of the owner's memory. 64 bytes, no padding: this is also its
/// wire form (little-endian hosts). Any 64 bytes parse; what they name is checked by the owner, at each use.
///
/// Offsets that peers send are offsets in `memory`; a token admits only `offset .. offset + len` of it, or less.
///
/// ```
/// use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken, Rights};
/// use zerocopy::{FromBytes, IntoBytes};
/// let id = RegionId { slot: 2, epoch: 1 };
/// let token = RegionToken::new(id, id, 0, 4096, MemoryKind::Host, Rights::REMOTE_READ, Capability::new([1; 16]), 9, 0);
/// let back = RegionToken::read_from_bytes(token.as_bytes()).unwrap();
/// assert_eq!((back.region, back.kind(), back.as_bytes().len()), (id, Some(MemoryKind::Host), 64));
/// ```
#[derive(Clone, Copy, Debug, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable)]
#[repr(C)]
pub struct RegionToken {
    /// The name to use on the wire: a whole region or one grant, in the owner's table.
    pub region: RegionId,
    /// The owner's region that the bytes lie in; shared memory is mapped by this name.
    pub memory: RegionId,
    /// First byte admitted, an offset in `memory`.
    pub offset: u64,
    /// Bytes from the first admitted one to the last.
    pub len: u64,
    /// The proof to show.
    pub capability: Capability,
    /// The owner's incarnation: a token of an earlier one is stale.
    pub incarnation: u64,
    /// Which epoch word of the owner's header page tells a reader of shared memory that the token still holds.
    pub epoch_word: u32,
    kind_device: u16,
    kind_code: u8,
    /// What peers may do.
    pub rights: Rights,
}

const _: () = assert!(size_of::<RegionToken>() == 64);

impl RegionToken {
    /// A token of all its fields, in the order of the wire form except `kind` and `rights`, which come before the proof.
    #[must_use]
    #[allow(clippy::too_many_arguments)] // only the fabric and tests make tokens; a builder would repeat the struct
    pub const fn new(
        region: RegionId,
        memory: RegionId,
        offset: u64,
        len: u64,
        kind: MemoryKind,
        rights: Rights,
        capability: Capability,
        incarnation: u64,
        epoch_word: u32,
    ) -> Self {
        let (kind_code, kind_device) = kind.code();
        Self { region, memory, offset, len, capability, incarnation, epoch_word, kind_device, kind_code, rights }
    }

    /// What sort of memory it names; `None` if this version does not know the kind.
    #[must_use]
    pub const fn kind(&self) -> Option<MemoryKind> {
        MemoryKind::from_code(self.kind_code, self.kind_device)
    }

    /// Whether `len` bytes at `offset` lie inside what the token admits at most.
    #[must_use]
    pub fn admits(&self, offset: u64, len: u64) -> bool {
        let (Some(end), Some(own_end)) = (offset.checked_add(len), self.offset.checked_add(self.len)) else {
            return false;
        };
        offset >= self.offset && end <= own_end
    }
}

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
        let target_continues = self.target.is_followed_by(&next.target) || seeded::on(Bug::BatchCoalescesOneSide);
        (self.source.is_followed_by(&next.source) && target_continues).then_some(Self {
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
                let is_last = rest.len() <= self.len_max;
                self.rest = Some(rest);
                Some(if is_last && seeded::on(Bug::BatchSplitOverlaps) { whole } else { piece })
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
    fn a_token_admits_nothing_outside_its_hull() {
        let mut token =
            RegionToken::new(A, A, 100, 50, MemoryKind::Host, Rights::REMOTE_READ, Capability::new([0; 16]), 0, 0);
        assert!(token.admits(100, 50) && token.admits(150, 0));
        assert!(!token.admits(99, 1) && !token.admits(100, 51) && !token.admits(u64::MAX, 2));
        token.len = u64::MAX;
        assert!(!token.admits(100, 1), "a hull that overflows admits nothing");
    }

    #[test]
    fn lengths_around_two_and_four_gibibytes_are_cut_exactly() {
        for edge in [1_u64 << 31, 1 << 32] {
            for len in [edge - 1, edge, edge + 1] {
                let whole = Move::new(Extent::new(A, 7, len), Extent::new(B, edge, len)).expect("equal lengths");
                let (mut next, mut next_there) = (7, edge);
                for piece in Split::new(&[whole], 1 << 30) {
                    let (source, target) = (piece.source, piece.target);
                    assert_eq!((source.offset, target.offset), (next, next_there));
                    assert!(source.len <= 1 << 30 && source.len == target.len);
                    (next, next_there) = (next + source.len, next_there + target.len);
                }
                assert_eq!((next, next_there), (7 + len, edge + len), "{len} bytes");
            }
        }
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
