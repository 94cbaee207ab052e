//! A posted batch on its way: how far each of its moves is, and how it ends.

use super::super::tally::Tally;
use crate::contract::{Access, Event, FarEnd, Inbound, LinkDownReason, Outcome, Post, PostedMove, Refusal, TicketId};

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// No request of it was posted.
    Waiting,
    /// Some were.
    Sent,
    /// All its requests completed. A write is then received, and visible once the batch was confirmed.
    Received,
    /// It will not be done.
    Refused(Refusal, FarEnd),
    /// It was called off.
    Cancelled(FarEnd),
}

/// How far telling the peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Last {
    /// Moves come first.
    Waiting,
    /// Nothing is left to be posted, nothing is to be counted.
    Posted,
    /// The arrival is on its way.
    Arriving,
    /// The owner counted it, or refused to.
    Counted(Result<(), Refusal>),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Job {
    pub(super) post: Post,
    /// Which data queue it uses.
    pub(super) queue: usize,
    pub(super) progress: Vec<Progress>,
    /// The move that the next request is of, and where in it.
    pub(super) next: usize,
    pub(super) offset: u64,
    /// Requests on their way.
    pub(super) on_the_way: u32,
    /// Whether the last request posted will not report its success.
    pub(super) is_unreported: bool,
    /// Whether a write was posted since the last confirmation.
    pub(super) has_written: bool,
    pub(super) last: Last,
    pub(super) is_cancelled: bool,
    /// Requests may have been posted twice, after a queue broke: what is refused then may have been done before.
    pub(super) is_repeated: bool,
}

impl Job {
    pub(super) fn new(post: Post, mut progress: Vec<Progress>) -> Self {
        progress.clear();
        progress.resize(post.moves.len(), Progress::Waiting);
        Self {
            post,
            queue: 0,
            progress,
            next: 0,
            offset: 0,
            on_the_way: 0,
            is_unreported: false,
            has_written: false,
            last: Last::Waiting,
            is_cancelled: false,
            is_repeated: false,
        }
    }

    /// The move that the next request is of.
    pub(super) fn current(&self) -> Option<&PostedMove> {
        self.post.moves.get(self.next)
    }

    /// Goes to the next move.
    pub(super) fn advance(&mut self) {
        self.next += 1;
        self.offset = 0;
    }

    /// What the peer has seen of the current move, if nothing more of it is posted.
    pub(super) fn far_end(&self) -> FarEnd {
        match self.current() {
            Some(posted) if posted.access == Access::Write && (self.offset > 0 || self.is_repeated) => FarEnd::Unknown,
            _ => FarEnd::Untouched,
        }
    }

    pub(super) fn refuse_current(&mut self, refusal: Refusal) {
        let far_end = self.far_end();
        self.progress[self.next] = Progress::Refused(refusal, far_end);
        self.advance();
    }

    /// Calls off what was not posted.
    pub(super) fn call_off(&mut self) {
        while self.next < self.progress.len() {
            let far_end = self.far_end();
            self.progress[self.next] = Progress::Cancelled(far_end);
            self.advance();
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.progress.iter().all(|progress| matches!(progress, Progress::Sent | Progress::Received))
    }

    /// Whether everything is over.
    pub(super) fn is_over(&self) -> bool {
        self.next == self.progress.len() && self.on_the_way == 0 && matches!(self.last, Last::Posted | Last::Counted(_))
    }

    /// Reports the end of a batch that is over. Its list of progress, for reuse.
    pub(super) fn finish(self, inbound: &mut dyn Inbound) -> Vec<Progress> {
        let (ticket, mut tally) = (self.post.ticket, Tally::default());
        let uncounted = match self.last {
            Last::Counted(Err(refusal)) => Some(refusal),
            _ => None,
        };
        for progress in &self.progress {
            let outcome = match *progress {
                Progress::Refused(refusal, far_end) => Outcome { far_end, ..Outcome::refused(refusal) },
                Progress::Cancelled(far_end) => Outcome::cancelled(far_end),
                _ => uncounted.map_or(Outcome::DONE, uncounted_outcome),
            };
            tally.push(ticket, outcome, inbound);
        }
        let missed_count = self.post.arrival.is_some() && self.is_cancelled && self.last == Last::Posted;
        if missed_count && self.is_whole() {
            tally.finish_otherwise(ticket, Outcome::cancelled(FarEnd::Unknown), self.post.moves, inbound);
        } else {
            let empty = uncounted.map_or(Outcome::DONE, uncounted_outcome);
            tally.finish(ticket, empty, self.post.moves, inbound);
        }
        self.progress
    }

    /// Reports the end of a batch whose link ended. Nothing of it touches memory any more.
    pub(super) fn bury(self, reason: LinkDownReason, inbound: &mut dyn Inbound) {
        let (ticket, mut tally) = (self.post.ticket, Tally::default());
        let counted = matches!(self.last, Last::Counted(_));
        for (progress, posted) in self.progress.iter().zip(&self.post.moves) {
            let outcome = match *progress {
                Progress::Refused(refusal, far_end) => Outcome { far_end, ..Outcome::refused(refusal) },
                Progress::Cancelled(far_end) => Outcome::cancelled(far_end),
                Progress::Received if posted.access == Access::Read => Outcome::DONE,
                // The owner's device has seen the batch's last request: all of it is visible.
                _ if counted && posted.access == Access::Write => Outcome::link_down(reason, FarEnd::Done),
                Progress::Sent | Progress::Received if posted.access == Access::Write => {
                    Outcome::link_down(reason, FarEnd::Unknown)
                }
                Progress::Waiting if posted.access == Access::Write && self.is_repeated => {
                    Outcome::link_down(reason, FarEnd::Unknown)
                }
                _ => Outcome::link_down(reason, FarEnd::Untouched),
            };
            tally.push(ticket, outcome, inbound);
        }
        let far_end = if self.last == Last::Waiting { FarEnd::Untouched } else { FarEnd::Unknown };
        let whole = Outcome::link_down(reason, far_end);
        if self.post.arrival.is_some() && self.progress.iter().all(|progress| *progress == Progress::Received) {
            tally.finish_otherwise(ticket, whole, self.post.moves, inbound);
        } else {
            tally.finish(ticket, whole, self.post.moves, inbound);
        }
    }
}

fn uncounted_outcome(refusal: Refusal) -> Outcome {
    Outcome { far_end: FarEnd::Done, ..Outcome::refused(refusal) }
}

/// Reports that bytes moved.
pub(super) fn progressed(ticket: TicketId, bytes: u64, inbound: &mut dyn Inbound) {
    inbound.event(Event::Progress { ticket, bytes });
}
