//! The batch of one decode instance: a token for each request with every step.
//!
//! Steps are counted; a request knows the step it joined with and the one it ends with, so a step costs what changes in
//! it, however large the batch is.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use crate::sched::placement::DecodeView;
use crate::time::Duration;

/// Share of a request's gaps between tokens, the longest ones, whose mean counts as its TBT (FAST'25).
const LONGEST: usize = 10;

#[derive(Default)]
pub(super) struct Batch {
    /// By the step they end with.
    ending: BinaryHeap<Reverse<(u64, u32)>>,
    joining: Vec<Joining>,
    context: u64,
    joining_context: u64,
    /// How long each step took.
    steps: Vec<u64>,
    scratch: Vec<u64>,
}

/// A request that joins with the next step.
#[derive(Clone, Copy)]
pub(super) struct Joining {
    pub(super) id: u32,
    pub(super) tokens: u32,
    /// Tokens it gets here.
    pub(super) output: u32,
}

impl Batch {
    /// A request joins with the next step; `output` is at least 1.
    pub(super) fn join(&mut self, new: Joining) {
        self.joining_context += u64::from(new.tokens);
        self.joining.push(new);
    }

    /// The batch as it will be with the next step.
    pub(super) fn view(&self) -> DecodeView {
        let batch = u32::try_from(self.ending.len() + self.joining.len()).unwrap_or(u32::MAX);
        DecodeView { down: false, batch, context: self.context + self.joining_context }
    }

    /// Lets those in who join, and tells each one's first step.
    pub(super) fn begin(&mut self, mut joined: impl FnMut(u32, u64)) -> DecodeView {
        let first = self.steps();
        for new in self.joining.drain(..) {
            self.ending.push(Reverse((first + u64::from(new.output), new.id)));
            joined(new.id, first);
        }
        self.context += core::mem::take(&mut self.joining_context);
        self.view()
    }

    /// Steps that were done.
    pub(super) fn steps(&self) -> u64 {
        u64::try_from(self.steps.len()).unwrap_or(u64::MAX)
    }

    /// A step is done.
    pub(super) fn end(&mut self, took: Duration) {
        self.context += u64::try_from(self.ending.len()).unwrap_or(u64::MAX);
        self.steps.push(took.as_nanos());
    }

    /// Takes out a request that ended with the last step.
    pub(super) fn ended(&mut self) -> Option<u32> {
        let Reverse((step, _)) = self.ending.peek()?;
        if *step > self.steps() {
            return None;
        }
        self.ending.pop().map(|Reverse((_, id))| id)
    }

    /// A request left: its context is free.
    pub(super) fn on_left(&mut self, tokens: u32, output: u32) {
        self.context -= u64::from(tokens) + u64::from(output);
    }

    /// The TBT of a request that was in all steps from `first` on: the mean of the longest tenth of its gaps, rounded up,
    /// the first one of which is that step, or `gap` if its first token was not out when the step began.
    pub(super) fn tbt(&mut self, first: u64, gap: Option<Duration>) -> Duration {
        let from = usize::try_from(first).unwrap_or(usize::MAX);
        self.scratch.clear();
        self.scratch.extend_from_slice(&self.steps[from..]);
        if let Some(gap) = gap {
            self.scratch[0] = gap.as_nanos();
        }
        mean_of_longest(&mut self.scratch)
    }
}

/// What counts as the time between tokens of an answer whose gaps took so many nanoseconds (FAST'25): the mean of the longest
/// tenth of them, at least of one; zero without gaps. Sorts `gaps` in part.
///
/// ```
/// use millpond_core::{sim::mean_of_longest, time::Duration};
/// assert_eq!(mean_of_longest(&mut [3, 9, 5]), Duration::from_nanos(9));
/// ```
pub fn mean_of_longest(gaps: &mut [u64]) -> Duration {
    if gaps.is_empty() {
        return Duration::ZERO;
    }
    let count = gaps.len().div_ceil(LONGEST);
    let place = gaps.len() - count;
    gaps.select_nth_unstable(place);
    let sum: u64 = gaps[place..].iter().sum();
    Duration::from_nanos(sum / u64::try_from(count).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_in_as_many_steps_as_it_has_tokens() {
        let mut batch = Batch::default();
        batch.join(Joining { id: 1, tokens: 10, output: 2 });
        let mut joined = Vec::new();
        assert_eq!(batch.begin(|id, step| joined.push((id, step))).context, 10);
        batch.end(Duration::from_nanos(5));
        batch.join(Joining { id: 2, tokens: 100, output: 1 });
        assert_eq!((batch.ended(), batch.view().batch, batch.view().context), (None, 2, 111));
        batch.begin(|id, step| joined.push((id, step)));
        batch.end(Duration::from_nanos(7));
        assert_eq!((batch.ended(), batch.ended(), batch.ended()), (Some(1), Some(2), None));
        batch.on_left(10, 2);
        batch.on_left(100, 1);
        assert_eq!((joined, batch.view()), (alloc::vec![(1, 0), (2, 1)], DecodeView::default()));
        assert_eq!(batch.tbt(0, None), Duration::from_nanos(7));
        assert_eq!(batch.tbt(1, Some(Duration::from_nanos(11))), Duration::from_nanos(11));
    }

    #[test]
    fn tbt_is_the_mean_of_the_longest_tenth() {
        let mut gaps: Vec<u64> = (1..=20).collect();
        assert_eq!(mean_of_longest(&mut gaps), Duration::from_nanos(19)); // 19.5
        assert_eq!(mean_of_longest(&mut [3, 9]), Duration::from_nanos(9));
        assert_eq!(mean_of_longest(&mut []), Duration::ZERO);
    }
}
