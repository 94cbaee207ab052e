//! The account of one request: what of it was cut, what ended, and how.
//!
//! A request is cut into pieces, which end in any order, each once. The tally does not know which piece is which: whoever
//! holds a piece ends it. Invariants: a request has one terminal state, reached when all of it was cut and no piece is
//! open; its bytes are counted when a piece is done, once.

use super::{Limits, Load};
use crate::quiet::Far;
use crate::seeded::{Bug, on};

/// Where a request stands. `C` is why it failed.
///
/// Example: [`Tally`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status<C> {
    /// Not all of it has ended.
    Pending,
    /// All its bytes are where they should be.
    Done,
    /// It ended without that.
    Failed {
        /// Why its first piece failed.
        cause: C,
        /// What it means for the far end, all pieces considered.
        far: Far,
    },
}

/// One request, cut into pieces. `C` is a reason of the caller's.
///
/// ```
/// use millpond_core::quiet::Far;
/// use millpond_core::transfer::{Status, Tally};
/// let mut request = Tally::new(10);
/// assert_eq!((request.cut(8), request.cut(8), request.cut(8)), (Some((0, 8)), Some((8, 2)), None));
/// request.on_done(8);
/// request.on_failed("refused", Far::Untouched);
/// assert_eq!(request.status(), Status::Failed { cause: "refused", far: Far::Unknown }); // 8 of its bytes are there
/// assert_eq!(request.bytes_done(), 8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally<C> {
    len: u64,
    cut: u64,
    done: u64,
    /// Pieces that have not ended.
    open: u32,
    /// A request of no bytes is cut once, too.
    is_cut: bool,
    has_done: bool,
    failed: Option<(C, Far)>,
}

impl<C: Clone> Tally<C> {
    /// A request of `len` bytes of which nothing was cut.
    #[must_use]
    pub const fn new(len: u64) -> Self {
        Self { len, cut: 0, done: 0, open: 0, is_cut: false, has_done: false, failed: None }
    }

    /// The next piece of at most `len_max` bytes (at least 1 is used): offset and length. `None`: all of it was cut.
    pub fn cut(&mut self, len_max: u64) -> Option<(u64, u64)> {
        if self.is_cut {
            return None;
        }
        let at = self.cut;
        let len = (self.len - at).min(len_max.max(1));
        self.cut += len;
        self.open += 1;
        self.is_cut = self.cut == self.len;
        Some((at, len))
    }

    /// A piece is done.
    ///
    /// # Panics
    /// If no piece is open: one of them ended twice.
    pub fn on_done(&mut self, len: u64) {
        self.close();
        self.done += if on(Bug::TransferCountsBytesTwice) && self.open > 0 { 2 * len } else { len };
        self.has_done = true;
    }

    /// A piece ended otherwise. The first cause stays, the worst far end counts.
    ///
    /// # Panics
    /// If no piece is open: one of them ended twice.
    pub fn on_failed(&mut self, cause: C, far: Far) {
        self.close();
        self.fail(cause, far);
    }

    /// What was not cut will not be cut any more: nothing of it was sent. Nothing happens if all of it was.
    pub fn end(&mut self, cause: C) {
        if !self.is_cut {
            self.is_cut = true;
            self.fail(cause, Far::Untouched);
        }
    }

    fn fail(&mut self, cause: C, far: Far) {
        self.failed = Some(match self.failed.take() {
            Some((first, before)) if before == far => (first, far),
            Some((first, _)) => (first, Far::Unknown),
            None => (cause, far),
        });
    }

    fn close(&mut self) {
        let Some(open) = self.open.checked_sub(1) else { unreachable!("a piece of a request ended twice") };
        self.open = open;
    }

    /// Where it stands.
    pub fn status(&self) -> Status<C> {
        match &self.failed {
            _ if !self.is_cut || self.open > 0 => Status::Pending,
            None => Status::Done,
            Some((cause, _)) if self.has_done => Status::Failed { cause: cause.clone(), far: Far::Unknown },
            Some((cause, far)) => Status::Failed { cause: cause.clone(), far: *far },
        }
    }

    /// Whether its status will not change any more.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        self.is_cut && self.open == 0
    }

    /// Whether a piece failed so far.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Its bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // a request of no bytes is one like any other
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of its pieces that are done.
    #[must_use]
    pub const fn bytes_done(&self) -> u64 {
        self.done
    }
}

/// One piece that was carved: which request, from where in it, how long.
///
/// Example: `core/src/transfer/tally.rs` (`carve`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carved {
    /// Index of the request.
    pub request: usize,
    /// Offset in it.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

/// Carves the next slice off a list of requests: as many pieces as `limits` allow, from request `*next` on, which is moved
/// along. Small requests travel together, a large one is cut. Gives each piece to `take`, and what it all came to.
///
/// ```
/// use millpond_core::transfer::{Limits, Load, Tally, carve};
/// let mut requests: [Tally<()>; 3] = [4, 4, 20].map(Tally::new);
/// let (mut next, mut lens) = (0, Vec::new());
/// let limits = Limits { bytes: 16, moves: 8 };
/// assert_eq!(carve(&mut requests, &mut next, limits, |piece| lens.push(piece.len)).bytes, 16);
/// assert_eq!(carve(&mut requests, &mut next, limits, |piece| lens.push(piece.len)).bytes, 12);
/// assert_eq!((next, lens), (3, vec![4, 4, 8, 12]));
/// ```
pub fn carve<C: Clone>(
    requests: &mut [Tally<C>],
    next: &mut usize,
    limits: Limits,
    mut take: impl FnMut(Carved),
) -> Load {
    let mut load = Load { slices: 1, ..Load::NONE };
    // Bounded by the moves: each round takes one, or goes to the next request.
    while let Some(request) = requests.get_mut(*next) {
        let room = limits.bytes.max(1) - load.bytes;
        let is_full = load.moves >= limits.moves.max(1) || (room == 0 && request.len > 0 && !request.is_cut);
        if is_full {
            break;
        }
        match request.cut(room) {
            Some((at, len)) => {
                load.bytes += len;
                load.moves += 1;
                take(Carved { request: *next, at, len });
            }
            None => *next += 1,
        }
    }
    // A request that was just finished is not the next one.
    while requests.get(*next).is_some_and(|request| request.is_cut) {
        *next += 1;
    }
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_no_bytes_ends_like_any_other() {
        let mut request: Tally<()> = Tally::new(0);
        assert_eq!(request.status(), Status::Pending);
        assert_eq!((request.cut(9), request.cut(9)), (Some((0, 0)), None));
        assert_eq!(request.status(), Status::Pending);
        request.on_done(0);
        assert_eq!(request.status(), Status::Done);
    }

    #[test]
    fn the_first_cause_stays_and_the_worst_far_end_counts() {
        let mut request = Tally::new(30);
        assert_eq!([0; 3].map(|_| request.cut(10).map(|piece| piece.1)), [Some(10); 3]);
        request.on_failed('a', Far::Untouched);
        request.on_failed('b', Far::Unknown);
        assert_eq!(request.status(), Status::Pending);
        request.on_failed('c', Far::Untouched);
        assert_eq!(request.status(), Status::Failed { cause: 'a', far: Far::Unknown });
    }

    #[test]
    fn what_was_never_cut_is_untouched() {
        let mut request = Tally::new(30);
        request.end('x');
        assert_eq!(request.status(), Status::Failed { cause: 'x', far: Far::Untouched });
        assert_eq!(request.cut(10), None);
        let mut request = Tally::new(30);
        request.cut(10);
        request.end('x');
        assert_eq!(request.status(), Status::Pending);
        request.on_done(10);
        assert_eq!(request.status(), Status::Failed { cause: 'x', far: Far::Unknown });
    }

    #[test]
    #[should_panic(expected = "ended twice")]
    fn a_piece_that_ends_twice_is_our_own_bug() {
        let mut request: Tally<()> = Tally::new(5);
        request.cut(5);
        request.on_done(5);
        request.on_done(5);
    }

    #[test]
    fn requests_of_no_bytes_fit_behind_a_full_slice() {
        let mut requests: [Tally<()>; 3] = [8, 0, 1].map(Tally::new);
        let (mut next, mut taken) = (0, Vec::new());
        let load = carve(&mut requests, &mut next, Limits { bytes: 8, moves: 8 }, |piece| taken.push(piece.request));
        assert_eq!((load, taken, next), (Load { bytes: 8, moves: 2, slices: 1 }, vec![0, 1], 2));
    }

    extern crate std;
    use std::vec;
    use std::vec::Vec;
}
