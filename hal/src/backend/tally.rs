//! Outcomes of a batch's moves, told in order, as few events.

use crate::contract::{Event, Inbound, Outcome, PostedMove, TicketId};

/// Joins equal outcomes of neighbours; the last run becomes the outcome of `Finished`.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    first: u32,
    count: u32,
    outcome: Option<Outcome>,
}

impl Tally {
    /// The next move, in order, ended so.
    pub(crate) fn push(&mut self, ticket: TicketId, outcome: Outcome, inbound: &mut dyn Inbound) {
        match self.outcome {
            Some(last) if last == outcome => self.count += 1,
            Some(last) => {
                inbound.event(Event::Ended { ticket, first: self.first, count: self.count, outcome: last });
                *self = Self { first: self.first + self.count, count: 1, outcome: Some(outcome) };
            }
            None => *self = Self { first: self.first, count: 1, outcome: Some(outcome) },
        }
    }

    /// All moves were told, and the batch as a whole ended otherwise: its count is missing.
    pub(crate) fn finish_otherwise(
        self,
        ticket: TicketId,
        outcome: Outcome,
        moves: Vec<PostedMove>,
        inbound: &mut dyn Inbound,
    ) {
        if let Some(last) = self.outcome {
            inbound.event(Event::Ended { ticket, first: self.first, count: self.count, outcome: last });
        }
        inbound.event(Event::Finished { ticket, outcome, moves });
    }

    /// All moves were told, or the rest ended like the last one told; `empty` is for a batch without moves.
    pub(crate) fn finish(self, ticket: TicketId, empty: Outcome, moves: Vec<PostedMove>, inbound: &mut dyn Inbound) {
        inbound.event(Event::Finished { ticket, outcome: self.outcome.unwrap_or(empty), moves });
    }
}
