//! Which bytes an operation of the transfer measurement moves, and which bytes must be where after so many of them.
//!
//! Both sides have as much memory as the yardstick. A thread has a share of it, cut into slots of one piece; it goes
//! through its slots in order, again and again. A piece goes from a slot of one side to the same slot of the other: always
//! to the target, always from it, or, mixed, even slots to it and odd ones from it. Invariant: no slot is ever both read
//! and written.

use millpond_hal::bare::FOOTPRINT_LEN;
use serde::{Deserialize, Serialize};

use super::bare::too_large;
use super::pattern::Run;
use super::{Error, size_name};
use crate::engine::Via;

/// A thread's share begins at a multiple of this.
const SHARE_ALIGN: u64 = 4096;
/// Slots of a thread, at most.
const SLOTS_MAX: u64 = 1 << 20;

/// The transport that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Path {
    /// Kernel TCP.
    Tcp,
    /// Shared memory.
    Shm,
    /// A file of this process.
    File,
}

impl Path {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::File => "file",
        }
    }

    pub(super) const fn via(self) -> Via {
        match self {
            Self::Tcp => Via::Tcp,
            Self::Shm => Via::Shm,
            Self::File => Via::File,
        }
    }
}

/// Which way pieces go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(super) enum Op {
    /// To the target.
    Write,
    /// From the target.
    Read,
    /// By turns.
    Mixed,
}

impl Op {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Mixed => "mixed",
        }
    }
}

/// A side of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Initiator,
    Target,
}

/// What both sides held before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seeds {
    pub(super) initiator: u64,
    pub(super) target: u64,
}

/// The shape of one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layout {
    pub(super) op: Op,
    pub(super) size: u64,
    pub(super) batch: u64,
    pub(super) threads: u32,
}

/// One piece of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Of its slot, on both sides.
    pub(super) offset: u64,
    pub(super) is_write: bool,
}

impl Layout {
    /// Refuses what does not fit into the memory.
    pub(super) fn checked(self) -> Result<Self, Error> {
        let op_len = self.size * self.batch;
        if op_len > FOOTPRINT_LEN {
            return Err(too_large(op_len));
        }
        let slots_min = self.batch.max(if self.op == Op::Mixed { 2 } else { 1 });
        if self.slots() < slots_min {
            let (share, slots) = (size_name(self.share_len()), size_name(self.size));
            let what = format!(
                "{slots_min} pieces of {slots} do not fit into the {share} of each thread ({}); lower --size, --batch or --threads",
                self.op.name()
            );
            return Err(Error::Point { what });
        }
        Ok(self)
    }

    fn share_len(self) -> u64 {
        FOOTPRINT_LEN / u64::from(self.threads) / SHARE_ALIGN * SHARE_ALIGN
    }

    fn slots(self) -> u64 {
        let slots = (self.share_len() / self.size).min(SLOTS_MAX);
        // So that a slot keeps its direction.
        if self.op == Op::Mixed { slots / 2 * 2 } else { slots }
    }

    fn is_write(self, slot: u64) -> bool {
        match self.op {
            Op::Write => true,
            Op::Read => false,
            Op::Mixed => slot.is_multiple_of(2),
        }
    }

    /// Piece `index` of operation `number` of a thread.
    pub(super) fn piece(self, thread: u32, number: u64, index: u64) -> Piece {
        let slot = (number * self.batch + index) % self.slots();
        Piece { offset: u64::from(thread) * self.share_len() + slot * self.size, is_write: self.is_write(slot) }
    }

    /// What a side must hold after each thread moved so many pieces.
    pub(super) fn runs(self, side: Side, moved: &[u64], seeds: Seeds) -> Vec<Run> {
        let (own, other) = match side {
            Side::Initiator => (seeds.initiator, seeds.target),
            Side::Target => (seeds.target, seeds.initiator),
        };
        let mut runs: Vec<Run> = Vec::new();
        let mut push = |len: u64, seed: u64| match runs.last_mut() {
            Some(last) if last.seed == seed => last.len += len,
            last => {
                let offset = last.map_or(0, |last| last.offset + last.len);
                runs.push(Run { offset, len, seed });
            }
        };
        for moved in moved {
            let moved = (*moved).min(self.slots());
            for slot in 0..moved {
                let came = self.is_write(slot) == (side == Side::Target);
                push(self.size, if came { other } else { own });
            }
            push(self.share_len() - moved * self.size, own);
        }
        let covered = self.share_len() * moved.len() as u64;
        push(FOOTPRINT_LEN - covered, own);
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEEDS: Seeds = Seeds { initiator: 1, target: 2 };

    fn layout(op: Op, size: u64, batch: u64, threads: u32) -> Layout {
        Layout { op, size, batch, threads }.checked().unwrap()
    }

    /// Both sides as the operations leave them, slot by slot.
    fn seed_at(runs: &[Run], offset: u64) -> u64 {
        runs.iter().find(|run| (run.offset..run.offset + run.len).contains(&offset)).unwrap().seed
    }

    #[test]
    fn what_must_be_where_is_what_the_pieces_moved() {
        for (op, threads, ops) in [(Op::Write, 1, 5), (Op::Read, 3, 2), (Op::Mixed, 2, 7), (Op::Mixed, 1, 100)] {
            let layout = layout(op, 10 << 20, 3, threads);
            let moved = vec![ops * layout.batch; threads as usize];
            let target = layout.runs(Side::Target, &moved, SEEDS);
            let initiator = layout.runs(Side::Initiator, &moved, SEEDS);
            assert_eq!(target.iter().map(|run| run.len).sum::<u64>(), FOOTPRINT_LEN);
            let (mut there, mut here) = (target.clone(), initiator.clone());
            for (thread, number, index) in (0..threads)
                .flat_map(|thread| (0..ops).flat_map(move |number| (0..3).map(move |index| (thread, number, index))))
            {
                let piece = layout.piece(thread, number, index);
                assert!(piece.offset + layout.size <= FOOTPRINT_LEN);
                let wanted = if piece.is_write { SEEDS.initiator } else { SEEDS.target };
                assert_eq!(seed_at(&there, piece.offset), wanted, "{op:?}");
                assert_eq!(seed_at(&here, piece.offset), wanted, "{op:?}");
                assert_eq!(seed_at(&there, piece.offset + layout.size - 1), wanted, "{op:?}");
            }
            for (runs, own) in [(&mut there, SEEDS.target), (&mut here, SEEDS.initiator)] {
                assert_eq!(runs.last().unwrap().seed, own, "the rest is untouched");
            }
        }
    }

    #[test]
    fn shares_that_are_too_small_are_refused() {
        let refused = |op, size, batch, threads| Layout { op, size, batch, threads }.checked().unwrap_err().to_string();
        assert!(refused(Op::Write, 128 << 20, 1, 4).contains("64 MiB"));
        assert!(refused(Op::Mixed, 256 << 20, 1, 1).contains("mixed"));
        assert!(refused(Op::Read, 1 << 20, 1024, 1).contains("1 GiB"));
        layout(Op::Read, 256 << 20, 1, 1);
    }
}
