//! How much may be under way: windows of ours, credit of the receiver.
//!
//! A [`Load`] is what is under way, a [`Window`] what may be, [`Credit`] what the receiver takes in all. Invariant: a load
//! exceeds its window only by a single slice, posted when nothing else was under way: a window smaller than any slice lets
//! one through at a time instead of none.

/// What is under way, or part of it.
///
/// ```
/// use millpond_core::transfer::{Load, Window};
/// let window = Window { bytes: 100, moves: 8, slices: 2 };
/// let slice = Load { bytes: 60, moves: 1, slices: 1 };
/// assert!(window.fits(Load::NONE, slice));
/// assert!(!window.fits(slice, slice)); // 120 bytes
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Load {
    /// Bytes.
    pub bytes: u64,
    /// Moves: reads and writes of parts of requests.
    pub moves: u32,
    /// Slices: frames.
    pub slices: u32,
}

impl Load {
    /// Nothing.
    pub const NONE: Self = Self { bytes: 0, moves: 0, slices: 0 };

    pub(super) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.moves += other.moves;
        self.slices += other.slices;
    }

    /// What was added before is taken away again.
    pub(super) fn sub(&mut self, other: Self) {
        let both = (self.bytes.checked_sub(other.bytes), self.moves.checked_sub(other.moves));
        let ((Some(bytes), Some(moves)), Some(slices)) = (both, self.slices.checked_sub(other.slices)) else {
            unreachable!("{other:?} of {self:?} was never added");
        };
        *self = Self { bytes, moves, slices };
    }
}

/// What may be under way at a time.
///
/// Example: [`Load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Bytes.
    pub bytes: u64,
    /// Moves.
    pub moves: u32,
    /// Slices.
    pub slices: u32,
}

impl Window {
    /// Whether `slice` may be added to `load`.
    #[must_use]
    pub const fn fits(&self, load: Load, slice: Load) -> bool {
        load.slices == 0
            || (load.slices < self.slices
                && load.bytes.saturating_add(slice.bytes) <= self.bytes
                && load.moves.saturating_add(slice.moves) <= self.moves)
    }

    /// `limits` within what is free beside `load`, for a slice of at most `bytes` that is still to be cut.
    pub(super) fn limit(&self, load: Load, bytes: u64, limits: Limits) -> Option<Limits> {
        let len = limits.bytes.min(self.bytes.max(1));
        let moves = if load.slices == 0 { self.moves.max(1) } else { self.moves.saturating_sub(load.moves) };
        let limits = Limits { bytes: len, moves: limits.moves.min(moves) };
        let slice = Load { bytes: len.min(bytes), moves: 1, slices: 1 };
        (limits.moves > 0 && self.fits(load, slice)).then_some(limits)
    }
}

/// What a slice may be at most.
///
/// Example: `core/src/transfer/tally.rs` (`carve`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Bytes.
    pub bytes: u64,
    /// Moves.
    pub moves: u32,
}

/// What a receiver takes over one generation of one path: totals since it was opened, as they travel. Saying the same or
/// less again changes nothing. The last slice may exceed the bytes; it only must not have been used up before.
///
/// ```
/// use millpond_core::transfer::Credit;
/// assert!(Credit::UNLIMITED.bytes > 1 << 60);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Credit {
    /// Bytes in total.
    pub bytes: u64,
    /// Slices in total; on the wire, frames.
    pub slices: u64,
}

impl Credit {
    /// Whoever receives bounds it by itself, or not at all.
    pub const UNLIMITED: Self = Self { bytes: u64::MAX, slices: u64::MAX };

    /// Whether one more slice may follow what was `sent`.
    #[must_use]
    pub const fn admits(self, sent: Self) -> bool {
        sent.slices < self.slices && sent.bytes < self.bytes
    }

    /// Takes news of it: what is more than was known.
    pub fn raise_to(&mut self, other: Self) {
        self.bytes = self.bytes.max(other.bytes);
        self.slices = self.slices.max(other.slices);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_one_lets_one_slice_of_one_move_through() {
        let window = Window { bytes: 1, moves: 1, slices: 1 };
        let asked = Limits { bytes: 4096, moves: 9 };
        assert_eq!(window.limit(Load::NONE, 10_000, asked), Some(Limits { bytes: 1, moves: 1 }));
        assert_eq!(window.limit(Load { bytes: 1, moves: 1, slices: 1 }, 10_000, asked), None);
        assert!(window.fits(Load::NONE, Load { bytes: 9, moves: 9, slices: 1 }), "one at a time, instead of none");
    }

    #[test]
    fn the_rest_of_a_window_limits_moves_and_refuses_bytes() {
        let window = Window { bytes: 100, moves: 10, slices: 4 };
        let load = Load { bytes: 50, moves: 7, slices: 1 };
        let asked = Limits { bytes: 60, moves: 9 };
        assert_eq!(window.limit(load, 60, asked), None, "110 bytes");
        assert_eq!(window.limit(load, 50, asked), Some(Limits { bytes: 60, moves: 3 }), "the job has no more than 50");
    }

    #[test]
    fn late_credit_takes_nothing_back() {
        let mut credit = Credit { bytes: 10, slices: 3 };
        credit.raise_to(Credit { bytes: 5, slices: 4 });
        assert_eq!(credit, Credit { bytes: 10, slices: 4 });
        assert!(credit.admits(Credit { bytes: 9, slices: 3 }) && !credit.admits(Credit { bytes: 10, slices: 0 }));
    }
}
