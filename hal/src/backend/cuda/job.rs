//! One batch on its way: what was put into streams, what of it is done, how it ends.
//!
//! A job puts its moves into a stream in order, piece by piece, a group of pieces at a time; behind each group it records an
//! event. A group that was put in runs to its end whatever becomes of the batch, so the batch has ended only when none flies.

use std::collections::VecDeque;

use millpond_core::batch::RegionId;

use super::driver::Event;
use crate::backend::tally::Tally;
use crate::contract::{
    Access, Event as Told, FarEnd, FenceState, Inbound, LinkDownReason, Outcome, Post, PostedMove, Refusal,
};

/// Copies that were put into a stream, and the event behind them.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) event: Event,
    /// Index of the first move that they belong to.
    first: usize,
    pub(super) bytes: u64,
}

/// Why a batch ends before it is through.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ending {
    Cancelled,
    LinkDown(LinkDownReason),
    /// The work that it waited for failed.
    FenceFailed,
}

impl Ending {
    fn outcome(self, far_end: FarEnd) -> Outcome {
        match self {
            Self::Cancelled => Outcome::cancelled(far_end),
            Self::LinkDown(reason) => Outcome::link_down(reason, far_end),
            Self::FenceFailed => Outcome { far_end, ..Outcome::refused(Refusal::Failed) },
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Job {
    pub(super) post: Post,
    /// Which of a GPU's streams it uses.
    pub(super) lane: usize,
    /// The move that the next piece is of, and where in it that piece starts.
    index: usize,
    offset: u64,
    pub(super) flights: VecDeque<Flight>,
    /// Moves that were refused, in order.
    refused: Vec<(usize, Outcome)>,
    pub(super) ended: Option<Ending>,
    /// From this move on nothing is certain of what was put in: its GPU failed.
    unsure_from: Option<usize>,
}

impl Job {
    pub(super) fn new(post: Post, lane: usize) -> Self {
        let (flights, refused) = (VecDeque::new(), Vec::new());
        Self { post, lane, index: 0, offset: 0, flights, refused, ended: None, unsure_from: None }
    }

    /// The move that the next piece is of, with the place of that piece in it; `None` if there is none to put in.
    pub(super) fn next(&self) -> Option<(PostedMove, u64)> {
        let posted = self.post.moves.get(self.index).filter(|_| self.ended.is_none())?;
        Some((*posted, self.offset))
    }

    /// Index of the next piece's move.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// A piece was put in, or needed no copy.
    pub(super) fn advance(&mut self, bytes: u64) {
        self.offset += bytes;
        if self.offset == self.post.moves[self.index].remote.len {
            (self.index, self.offset) = (self.index + 1, 0);
        }
    }

    /// The move of the next piece is refused.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        let far_end = self.far_end(self.index, self.offset > 0);
        self.refused.push((self.index, Outcome { far_end, ..Outcome::refused(refusal) }));
        (self.index, self.offset) = (self.index + 1, 0);
    }

    /// An event stands behind what was put in since `first`.
    pub(super) fn flies(&mut self, event: Event, first: usize, bytes: u64) {
        self.flights.push_back(Flight { event, first, bytes });
    }

    /// The GPU failed under what was put in from `first` on: nothing of it moves any more, and what it did is not known.
    pub(super) fn fail(&mut self, first: usize, reason: LinkDownReason) {
        self.unsure_from = Some(self.unsure_from.map_or(first, |known| known.min(first)));
        self.ended = Some(Ending::LinkDown(reason));
    }

    /// Looks at what flies. Returns whether anything landed, hands events back through `landed`, and says whose failed.
    pub(super) fn land(&mut self, reason: LinkDownReason, inbound: &mut dyn Inbound, landed: &mut Vec<Flight>) -> bool {
        let mut any = false;
        for _ in 0..self.flights.len() {
            let Some(flight) = self.flights.pop_front() else { break };
            match flight.event.has_happened() {
                Ok(false) => self.flights.push_back(flight),
                Ok(true) => {
                    inbound.event(Told::Progress { ticket: self.post.ticket, bytes: flight.bytes });
                    landed.push(flight);
                    any = true;
                }
                Err(_) => {
                    self.fail(flight.first, reason);
                    landed.push(flight);
                    any = true;
                }
            }
        }
        any
    }

    /// Whether the batch still waits for its fence. Waiting is told as progress.
    pub(super) fn waits(&mut self, inbound: &mut dyn Inbound) -> bool {
        let Some(fence) = self.post.after.as_ref().filter(|_| self.ended.is_none()) else { return false };
        match fence.state() {
            FenceState::Pending => {
                inbound.event(Told::Progress { ticket: self.post.ticket, bytes: 0 });
                return true;
            }
            FenceState::Passed => {}
            FenceState::Failed => self.ended = Some(Ending::FenceFailed),
        }
        self.post.after = None;
        false
    }

    /// Whether it names the exposure and something of it flies.
    pub(super) fn is_reaching(&self, exposure: RegionId) -> bool {
        !self.flights.is_empty() && self.post.moves.iter().any(|posted| posted.remote.region == exposure)
    }

    /// Sleeps until all that flies has landed: the length of the copies. What failed is found by the next look.
    pub(super) fn settle(&self) {
        for flight in &self.flights {
            let _ = flight.event.wait();
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.flights.is_empty()
            && self.post.after.as_ref().is_none_or(|_| self.ended.is_some())
            && self.next().is_none()
    }

    /// Whether every move was made.
    pub(super) fn is_done(&self) -> bool {
        let through = self.index == self.post.moves.len() && (self.ended.is_none() || !self.post.moves.is_empty());
        through && self.refused.is_empty() && self.unsure_from.is_none()
    }

    fn far_end(&self, index: usize, begun: bool) -> FarEnd {
        if begun && self.post.moves[index].access == Access::Write { FarEnd::Unknown } else { FarEnd::Untouched }
    }

    /// Tells how each move ended; `uncounted` is why the owner did not count an arrival. It is over.
    pub(super) fn finish(self, uncounted: Option<Refusal>, inbound: &mut dyn Inbound) {
        let ticket = self.post.ticket;
        let mut empty = self.ended.map_or(Outcome::DONE, |ending| ending.outcome(FarEnd::Untouched));
        if self.is_done() {
            empty = uncounted
                .map_or(Outcome::DONE, |refusal| Outcome { far_end: FarEnd::Done, ..Outcome::refused(refusal) });
        }
        let mut tally = Tally::default();
        let mut refused = self.refused.iter().peekable();
        for index in 0..self.post.moves.len() {
            let outcome = if let Some((_, outcome)) = refused.next_if(|(at, _)| *at == index) {
                *outcome
            } else if self.is_done() {
                empty
            } else {
                self.outcome(index)
            };
            tally.push(ticket, outcome, inbound);
        }
        drop(refused);
        tally.finish(ticket, empty, self.post.moves, inbound);
    }

    /// How a move that was not refused ended, in a batch of which something did not end done.
    fn outcome(&self, index: usize) -> Outcome {
        let put_in = index < self.index || (index == self.index && self.offset > 0);
        let unsure = self.unsure_from.is_some_and(|from| from <= index);
        match self.ended {
            Some(ending) if index >= self.index || unsure => ending.outcome(self.far_end(index, put_in)),
            _ => Outcome::DONE,
        }
    }
}
