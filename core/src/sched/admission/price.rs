//! What a request may cost while not all can be served.
//!
//! Every request counts the same, so where not all can be served a cluster serves more if it refuses those that take most of
//! it: long prompts that nobody has cached, with contexts that fill decode steps, and answers that are announced as long. The
//! cost is seconds of an instance: the prefill after hits, and what each of the answer's steps takes longer because of it. A
//! request costs too much if it costs more than the mean by a margin that shrinks as more are refused for want of
//! anything: nobody in a cluster that serves all, whoever costs twice the mean where a twentieth is refused. Those that cost
//! too much are not counted as refused, so what they leave free widens the margin again; and nobody who costs no more than
//! the mean is ever refused for it.
//!
//! One in so many of those that cost too much is served all the same, so that no kind of request is starved, and so are
//! those who are favoured.

use super::Reason;

/// Requests over which the mean cost and the share of refusals are taken.
const MEMORY: f64 = 200.0;
/// The share of refusals at which twice the mean is too much.
const SHARE: f64 = 0.05;

/// What a request costs beside what it may.
///
/// ```
/// use millpond_core::sched::admission::{Cost, Figures, Reason};
/// let figures = Figures { late: 0.0, slow: 0.0, level: 0.5, cost: Cost::High };
/// assert_eq!(figures.judge(), Some(Reason::Cost));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cost {
    /// Not too much.
    Fine,
    /// Too much, but it is served in its turn.
    Turn,
    /// Too much.
    High,
    /// There is no instance that could take it.
    NoInstance,
}

/// The price, and what it follows from.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Price {
    /// Mean cost of what arrives, in seconds; zero before the first.
    mean: f64,
    /// Share of refusals among those that do not cost too much.
    refused: f64,
    turn: u32,
}

impl Price {
    /// What a request of that many seconds costs; one in `turns` of those that cost too much has its turn.
    pub(super) fn cost(&mut self, seconds: f64, turns: u32) -> Cost {
        let memory = if self.mean > 0.0 { MEMORY } else { 1.0 };
        self.mean += (seconds - self.mean) / memory;
        if (seconds - self.mean) * self.refused <= self.mean * SHARE {
            return Cost::Fine;
        }
        self.turn = (self.turn + 1) % turns.max(1);
        if self.turn == 0 { Cost::Turn } else { Cost::High }
    }

    /// A request was admitted, or refused for a reason.
    pub(super) fn on_judged(&mut self, cost: Cost, reason: Option<Reason>) {
        if cost != Cost::High {
            self.refused += (f64::from(u8::from(reason.is_some())) - self.refused) / MEMORY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_costs_too_much_where_all_are_served_and_nobody_below_the_mean_where_none_is() {
        let mut price = Price::default();
        for i in 0..1_000_u32 {
            assert_eq!(price.cost(f64::from(i % 10 + 1), 8), Cost::Fine);
            price.on_judged(Cost::Fine, None);
        }
        (0..2_000).for_each(|_| price.on_judged(Cost::Fine, Some(Reason::Tbt)));
        assert_eq!((price.cost(5.0, 8), price.cost(6.5, 8)), (Cost::Fine, Cost::High));
    }

    #[test]
    fn the_margin_is_the_mean_where_a_twentieth_is_refused() {
        let mut price = Price::default();
        (0..4_000).for_each(|i| price.on_judged(Cost::Fine, (i % 20 == 0).then_some(Reason::Ttft)));
        price.cost(1.0, 8);
        (0..1_000).for_each(|_| assert_eq!(price.cost(1.0, 8), Cost::Fine));
        assert_eq!((price.cost(1.8, 8), price.cost(2.2, 8)), (Cost::Fine, Cost::High));
    }

    #[test]
    fn what_costs_too_much_does_not_count_as_refused() {
        let mut price = Price::default();
        (0..1_000).for_each(|_| price.on_judged(Cost::High, Some(Reason::Cost)));
        price.cost(1.0, 8);
        assert_eq!(price.cost(1e6, 8), Cost::Fine);
    }
}
