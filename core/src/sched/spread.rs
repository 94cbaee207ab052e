//! One of those that are about as good as the best: so that routers that know the same do not all choose the same.
//!
//! Scores are predictions from what was true a moment ago. Whoever always takes the least sends everything to one place
//! until the next report, and so does everybody else; among scores that differ by less than they may be wrong, the choice
//! goes round instead. It is not a policy: it takes any policy's scores, and what a router itself sent since the last report
//! must be in them.

/// How wrong scores may be.
///
/// ```
/// use millpond_core::sched::spread::Near;
/// let near = Near { parts_per_thousand: 50, slack: 10 };
/// assert_eq!(near.limit(1_000), 1_060);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Near {
    /// In thousandths of the best score.
    pub parts_per_thousand: u32,
    /// In units of the score, added to that.
    pub slack: u64,
}

impl Near {
    /// The highest score that is as good as `best`.
    #[must_use]
    pub fn limit(self, best: u64) -> u64 {
        let part = u128::from(best) * u128::from(self.parts_per_thousand) / 1_000;
        best.saturating_add(u64::try_from(part).unwrap_or(u64::MAX)).saturating_add(self.slack)
    }
}

/// The index of one of the scores that are near the least; they take turns. `None` if there are no scores. A router's
/// `turn` is one more with each request, and starts with its own number among the routers: then a burst that meets all of
/// them at once is spread by all of them alike. O(scores), nothing allocates.
///
/// ```
/// use millpond_core::sched::spread::{Near, pick};
/// let near = Near { parts_per_thousand: 50, slack: 0 };
/// let scores = [1_000, 1_060, 990];
/// assert_eq!([0, 1, 2].map(|turn| pick(scores, near, turn)), [Some(0), Some(2), Some(0)]);
/// ```
pub fn pick<S: IntoIterator<Item = u64, IntoIter: Clone>>(scores: S, near: Near, turn: u64) -> Option<usize> {
    let scores = scores.into_iter();
    let limit = near.limit(scores.clone().min()?);
    let count = scores.clone().filter(|score| *score <= limit).count();
    let chosen = usize::try_from(turn % u64::try_from(count).ok()?).ok()?;
    scores.enumerate().filter(|(_, score)| *score <= limit).nth(chosen).map(|(index, _)| index)
}
