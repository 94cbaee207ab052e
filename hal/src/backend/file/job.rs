//! A posted batch while it is worked off: which piece comes next, and how its moves ended.

use super::super::tally::Tally;
use crate::contract::{Access, Event, FarEnd, Inbound, LinkDownReason, Outcome, Post, Refusal};

/// Why a batch ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Cancelled,
    LinkDown(LinkDownReason),
}

impl Ending {
    fn outcome(self, far_end: FarEnd) -> Outcome {
        match self {
            Self::Cancelled => Outcome::cancelled(far_end),
            Self::LinkDown(reason) => Outcome::link_down(reason, far_end),
        }
    }
}

/// What became of a move so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Bytes whose pieces were started.
    pub(super) started: u64,
    /// Pieces with the kernel.
    pub(super) open: u32,
    /// A piece was refused or failed; no more of it is started.
    pub(super) refused: Option<Refusal>,
}

/// Where the sync of a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sync {
    /// None was asked for, or it is done.
    Over,
    /// To be started after the last write.
    Wanted,
    /// With the kernel.
    Open,
    /// It did not happen.
    Refused(Refusal),
}

/// A posted batch. It is over when nothing of it is to be started and nothing is with the kernel.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) post: Post,
    /// The move whose pieces are being started.
    pub(super) index: usize,
    /// By move.
    pub(super) moves: Vec<Progress>,
    /// Pieces of all moves with the kernel, the sync included.
    pub(super) open: u32,
    pub(super) sync: Sync,
    pub(super) ended: Option<Ending>,
}

impl Job {
    /// `moves` is a spare list; what is in it does not matter.
    pub(super) fn new(post: Post, mut moves: Vec<Progress>) -> Self {
        moves.clear();
        moves.resize(post.moves.len(), Progress::default());
        let sync = if post.sync.is_some() { Sync::Wanted } else { Sync::Over };
        Self { post, index: 0, moves, open: 0, sync, ended: None }
    }

    /// Whether all pieces of all moves were started, or will never be.
    pub(super) fn is_started(&self) -> bool {
        self.ended.is_some() || self.index == self.moves.len()
    }

    /// Whether the end can be told.
    pub(super) fn is_over(&self) -> bool {
        self.open == 0 && self.is_started() && (self.ended.is_some() || self.sync != Sync::Wanted || !self.all_done())
    }

    /// Whether every move is done, so far as it was looked at.
    pub(super) fn all_done(&self) -> bool {
        self.index == self.moves.len() && self.moves.iter().all(|state| state.refused.is_none())
    }

    /// Ends it early, unless all of it is with the kernel already: then it ends as the kernel says.
    pub(super) fn end(&mut self, ending: Ending) {
        let is_late = ending == Ending::Cancelled && self.index == self.moves.len();
        if self.ended.is_none() && !is_late {
            self.ended = Some(ending);
        }
    }

    pub(super) fn refuse(&mut self, index: usize, refusal: Refusal) {
        self.moves[index].refused.get_or_insert(refusal);
    }

    fn outcome(&self, index: usize) -> Outcome {
        let (state, posted) = (self.moves[index], &self.post.moves[index]);
        let untouched = posted.access == Access::Read || state.started == 0;
        let far_end = if untouched { FarEnd::Untouched } else { FarEnd::Unknown };
        match (state.refused, self.ended, self.sync) {
            (Some(refusal), ..) => Outcome { far_end, ..Outcome::refused(refusal) },
            (None, Some(ending), _) if index >= self.index => ending.outcome(far_end),
            // What was written is there, but not for sure after a loss of power, which was asked for.
            (None, None, Sync::Refused(refusal)) if posted.access == Access::Write => {
                Outcome { far_end: FarEnd::Unknown, ..Outcome::refused(refusal) }
            }
            _ => Outcome::DONE,
        }
    }

    /// Tells how it ended; `arrive` counts its arrival. Gives the spare list back.
    pub(super) fn finish(
        mut self,
        inbound: &mut dyn Inbound,
        arrive: impl FnOnce(&mut dyn Inbound) -> Result<(), Refusal>,
    ) -> Vec<Progress> {
        debug_assert!(self.open == 0);
        let ticket = self.post.ticket;
        let mut tally = Tally::default();
        (0..self.moves.len()).for_each(|index| tally.push(ticket, self.outcome(index), inbound));
        let moves = core::mem::take(&mut self.post.moves);
        let is_written = self.all_done() && self.sync == Sync::Over;
        match (self.ended, self.sync, self.post.arrival) {
            (Some(ending), ..) => {
                let empty = ending.outcome(FarEnd::Untouched);
                match self.post.arrival.is_some() || self.post.sync.is_some() {
                    true => tally.finish_otherwise(ticket, empty, moves, inbound),
                    false => tally.finish(ticket, empty, moves, inbound),
                }
            }
            (None, Sync::Refused(refusal), _) => {
                let outcome = Outcome { far_end: FarEnd::Unknown, ..Outcome::refused(refusal) };
                tally.finish_otherwise(ticket, outcome, moves, inbound);
            }
            (None, _, Some(_)) if is_written => match arrive(inbound) {
                Ok(()) => tally.finish(ticket, Outcome::DONE, moves, inbound),
                Err(refusal) => {
                    let outcome = Outcome { far_end: FarEnd::Done, ..Outcome::refused(refusal) };
                    let count = moves.len() as u32;
                    inbound.event(Event::Ended { ticket, first: 0, count, outcome });
                    inbound.event(Event::Finished { ticket, outcome, moves });
                }
            },
            _ => tally.finish(ticket, Outcome::DONE, moves, inbound),
        }
        self.moves
    }
}
