//! How a move of a file range is cut: whole blocks go as they are, edges through a buffer.

use super::BOUNCE_LEN;
use crate::contract::TURN_CHUNK_LEN;
use crate::file::Shape;

/// The most bytes that one request to the kernel moves past the page cache.
pub(super) const PIECE_MAX: u64 = 1 << 20;

/// What becomes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Whole blocks, from or into the caller's memory.
    Direct,
    /// Whole blocks, through a buffer, since the memory does not lie as the device wants it.
    Bounced,
    /// Part of one block: a write reads the block first.
    Edge,
    /// Through the page cache.
    Cached,
}

/// A part of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) len: u64,
    pub(super) way: Way,
}

/// The next piece of a range of `len` bytes at `offset` of the file and `address` of memory; both move on with each piece.
/// `len` is not zero.
pub(super) fn next_piece(shape: &Shape, offset: u64, address: u64, len: u64) -> Piece {
    debug_assert!(len > 0);
    if offset >= shape.cached_from {
        return Piece { len: len.min(TURN_CHUNK_LEN), way: Way::Cached };
    }
    let len = len.min(shape.cached_from - offset);
    let into_block = offset & (shape.block - 1);
    if into_block != 0 || len < shape.block {
        return Piece { len: len.min(shape.block - into_block), way: Way::Edge };
    }
    let whole = len & !(shape.block - 1);
    if address & (shape.memory_align - 1) == 0 {
        Piece { len: whole.min(PIECE_MAX), way: Way::Direct }
    } else {
        Piece { len: whole.min(BOUNCE_LEN), way: Way::Bounced }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        /// What each way demands holds, and the pieces are the range, in order.
        #[test]
        fn pieces_cover_the_range_and_keep_the_alignment(
            block_shift in 0u32..13, memory_shift in 0u32..13, file_len in 1u64..(9 << 20),
            place in (0u64..1 << 20, 0u64..8 << 20), address in 0u64..20_000,
        ) {
            let (block, memory_align) = (1 << block_shift, 1 << memory_shift);
            let shape = Shape { block, memory_align, cached_from: file_len / 4096 * 4096 };
            let (start, len) = (place.0 % file_len, place.1 % file_len);
            let len = len.min(file_len - start);
            let mut at = 0;
            while at < len {
                let piece = next_piece(&shape, start + at, address + at, len - at);
                let (first, end) = (start + at, start + at + piece.len);
                prop_assert!(piece.len > 0 && end <= start + len);
                match piece.way {
                    Way::Direct => {
                        prop_assert!(first.is_multiple_of(block) && piece.len.is_multiple_of(block) && piece.len <= PIECE_MAX);
                        prop_assert!((address + at).is_multiple_of(memory_align));
                    }
                    Way::Bounced => {
                        prop_assert!(first.is_multiple_of(block) && piece.len.is_multiple_of(block) && piece.len <= BOUNCE_LEN);
                    }
                    Way::Edge => {
                        prop_assert!(piece.len < block && first / block == (end - 1) / block);
                        prop_assert!(first / block * block + block <= shape.cached_from, "the block is whole in the file");
                    }
                    Way::Cached => prop_assert!(first >= shape.cached_from && piece.len <= TURN_CHUNK_LEN),
                }
                prop_assert!(piece.way == Way::Cached || end <= shape.cached_from);
                at += piece.len;
            }
        }
    }

    #[test]
    fn memory_out_of_step_is_bounced_and_memory_in_step_is_not() {
        let shape = Shape { block: 512, memory_align: 512, cached_from: 1 << 20 };
        let ways = |offset: u64, address: u64, len: u64| {
            let (mut at, mut ways) = (0, Vec::new());
            while at < len {
                let piece = next_piece(&shape, offset + at, address + at, len - at);
                ways.push((piece.len, piece.way));
                at += piece.len;
            }
            ways
        };
        assert_eq!(ways(512, 4096, 1024), [(1024, Way::Direct)]);
        assert_eq!(ways(500, 4084, 1100), [(12, Way::Edge), (1024, Way::Direct), (64, Way::Edge)]);
        assert_eq!(ways(512, 4097, 1024), [(1024, Way::Bounced)]);
        assert_eq!(ways((1 << 20) - 512, 4096, 600), [(512, Way::Direct), (88, Way::Cached)]);
    }
}
