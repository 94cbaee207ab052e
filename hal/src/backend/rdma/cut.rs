//! Cutting a move into requests: at the edges of registrations on both sides, and at the longest message.
//!
//! A registration can be shorter than the memory it is for, since devices have limits. What was registered is what is told to
//! the peer, and a request never crosses an edge. Pure.

use super::message::Key;

/// One request of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which local chunk.
    pub(crate) chunk: u64,
    /// Which key of the peer's.
    pub(crate) key: usize,
    /// Length in bytes.
    pub(crate) len: u32,
}

/// Where a move stands, and what bounds its pieces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut<'a> {
    /// Keys of the peer's region, sorted by offset, without overlap.
    pub(crate) keys: &'a [Key],
    /// Length of local chunks.
    pub(crate) chunk_len: u64,
    /// Longest piece.
    pub(crate) piece_len_max: u32,
}

impl Cut<'_> {
    /// Whether `offset .. offset + len` of the peer's region is covered by keys without a gap.
    pub(crate) fn covers(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else { return false };
        let Some(mut index) = self.key_at(offset, len == 0) else { return false };
        let mut covered = self.keys[index].offset + self.keys[index].len;
        // Bounded by the keys.
        while covered < end {
            index += 1;
            match self.keys.get(index) {
                Some(next) if next.offset == covered => covered += next.len,
                _ => return false,
            }
        }
        true
    }

    /// The key that the byte at `offset` lies in; for an empty range, one that it touches.
    fn key_at(&self, offset: u64, is_empty: bool) -> Option<usize> {
        let index = self.keys.partition_point(|key| key.offset <= offset).checked_sub(1)?;
        let end = self.keys[index].offset + self.keys[index].len;
        (offset < end || is_empty && offset == end).then_some(index)
    }

    /// The first piece of what is left of a move: `len` bytes, more than none, from `local` in the local region and `remote`
    /// in the peer's on. `None` where no key is.
    pub(crate) fn first(&self, local: u64, remote: u64, len: u64) -> Option<Piece> {
        let key = self.key_at(remote, false)?;
        let chunk = local / self.chunk_len;
        let to_chunk_end = self.chunk_len - local % self.chunk_len;
        let to_key_end = self.keys[key].offset + self.keys[key].len - remote;
        let len = len.min(to_chunk_end).min(to_key_end).min(u64::from(self.piece_len_max));
        Some(Piece { chunk, key, len: u32::try_from(len).ok()? })
    }
}

/// `start..end` cut into pieces of at most `len_max` bytes, as `(start, len)`.
pub(crate) fn pieces(start: u64, end: u64, len_max: u64) -> impl Iterator<Item = (u64, u64)> {
    (start..end)
        .step_by(usize::try_from(len_max.max(1)).unwrap_or(usize::MAX))
        .map(move |at| (at, len_max.min(end - at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn keys(ranges: &[(u64, u64)]) -> Vec<Key> {
        ranges
            .iter()
            .zip(100..)
            .map(|(&(offset, len), remote_key)| Key { offset, len, address: 0x10_0000 + offset, remote_key })
            .collect()
    }

    fn walk(cut: &Cut<'_>, mut local: u64, mut remote: u64, mut len: u64) -> Vec<Piece> {
        let mut walked = Vec::new();
        while len > 0 {
            let piece = cut.first(local, remote, len).unwrap();
            let bytes = u64::from(piece.len);
            (local, remote, len) = (local + bytes, remote + bytes, len - bytes);
            walked.push(piece);
        }
        walked
    }

    #[test]
    fn a_region_beyond_the_device_limit_is_reached_everywhere_and_across_each_edge() {
        // A device that registers 1 MiB at most, a region of 10 MiB.
        let chunks: Vec<_> = pieces(0, 10 * MIB, MIB).collect();
        assert_eq!((chunks.len(), chunks[9]), (10, (9 * MIB, MIB)));
        let keys = keys(&chunks);
        let cut = Cut { keys: &keys, chunk_len: MIB, piece_len_max: 1 << 30 };
        for (offset, edges) in [(0, 0), (MIB - 1, 1), (MIB, 0), (9 * MIB, 0), (10 * MIB - 4096, 0), (MIB - 4096, 0)] {
            assert!(cut.covers(offset, 4096));
            let walked = walk(&cut, 0, offset, 4096);
            assert_eq!(walked.len(), 1 + edges, "4 KiB at {offset}");
            assert_eq!(walked.iter().map(|piece| u64::from(piece.len)).sum::<u64>(), 4096);
        }
        assert!(!cut.covers(10 * MIB - 4095, 4096) && !cut.covers(u64::MAX, 2));
    }

    #[test]
    fn both_sides_edges_cut_each_where_it_is() {
        let keys = keys(&[(0, 100), (100, 50), (150, 1000)]);
        let cut = Cut { keys: &keys, chunk_len: 64, piece_len_max: 60 };
        let lens: Vec<_> = walk(&cut, 10, 90, 150).iter().map(|piece| (piece.chunk, piece.key, piece.len)).collect();
        assert_eq!(lens, [(0, 0, 10), (0, 1, 44), (1, 1, 6), (1, 2, 58), (2, 2, 32)]);
    }

    #[test]
    fn a_gap_between_keys_is_not_covered() {
        let keys = keys(&[(0, 100), (200, 100)]);
        let cut = Cut { keys: &keys, chunk_len: MIB, piece_len_max: 1 << 30 };
        let covered = [(0, 100), (200, 100), (99, 1), (0, 0), (100, 0), (300, 0)];
        assert!(covered.into_iter().all(|(offset, len)| cut.covers(offset, len)));
        let not = [(50, 100), (100, 1), (150, 0), (150, 100), (199, 2), (299, 2), (301, 0)];
        assert!(not.into_iter().all(|(offset, len)| !cut.covers(offset, len)));
    }
}
