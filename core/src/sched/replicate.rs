//! Which sets of blocks get one more copy, and which copies are given up: seconds saved against seconds lost.
//!
//! A *set* is what is used together: the blocks of a system prompt, say. All worths are expected seconds of work over one
//! horizon. One more copy saves what uses away from every copy cost now, as far as they would meet it; it costs the
//! transfer, and what the bytes it pushes out would have saved. A copy is made when it saves clearly more than it costs,
//! and given up when it saves clearly less than its room is worth; between the two nothing happens, so that copies do not
//! come and go. It decides only: rates and costs come in, moves are made by the caller, who asks again every horizon or so.
//!
//! Invariants: a set never loses its last copy by this advice; a round copies at most `budget_bytes` and gives each set at
//! most one copy; a place is never filled beyond its room plus what it may lose; same inputs, same advice.

use alloc::vec::Vec;

use crate::prefix::{Holder, Holders};
use crate::time::{Duration, Instant};

/// When copies pay.
///
/// ```
/// use millpond_core::sched::replicate::Policy;
/// assert!(Policy::default().margin > 0.0, "without a margin copies come and go");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// How far ahead uses are counted: about as long as a rate stays what it is.
    pub horizon: Duration,
    /// A copy is made above `1 + margin` times its cost, and given up below `1 - margin` times the worth of its room.
    pub margin: f64,
    /// Copies of one set, at most.
    pub copies_max: u32,
    /// Bytes that one round of advice copies, at most.
    pub budget_bytes: u64,
    /// What a copy moves in one second.
    pub bytes_per_s: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            horizon: Duration::from_secs(60),
            margin: 0.25,
            copies_max: 8,
            budget_bytes: 16 << 30,
            bytes_per_s: 1e10,
        }
    }
}

/// Somewhere copies can be.
///
/// Example: `core/src/sched/replicate.rs` (`advise`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Its number.
    pub holder: Holder,
    /// Bytes that nothing has to leave for.
    pub free_bytes: u64,
    /// Bytes that may be pushed out for a copy.
    pub evictable_bytes: u64,
    /// Seconds that one byte pushed out would have saved within the horizon: what eviction takes first there.
    pub loss_s_per_byte: f64,
}

/// A set of blocks that are used together.
///
/// Example: `core/src/sched/replicate.rs` (`advise`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockSet<const W: usize> {
    /// The caller's name for it; settles ties.
    pub id: u64,
    /// Bytes of one copy.
    pub bytes: u64,
    /// Who has one.
    pub copies: Holders<W>,
    /// Uses per second at places that have a copy, all together.
    pub uses_per_s: f64,
    /// Uses per second at places that have none.
    pub away_uses_per_s: f64,
    /// Seconds more that a use takes where there is no copy but one elsewhere.
    pub pull_s: f64,
    /// Seconds more that a use takes when there is no copy at all.
    pub recompute_s: f64,
}

/// What to do.
///
/// Example: `core/src/sched/replicate.rs` (`advise`).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Advice {
    /// Copy a set.
    Copy {
        /// Which.
        set: u64,
        /// The place that gets it.
        to: Holder,
        /// Seconds it saves within the horizon, less what it costs.
        gain_s: f64,
    },
    /// Give a copy up; others stay.
    Drop {
        /// Of which set.
        set: u64,
        /// Whose copy.
        at: Holder,
        /// Seconds that its room is worth more than it.
        gain_s: f64,
    },
}

impl<const W: usize> BlockSet<W> {
    /// Copies there are.
    #[must_use]
    pub fn copy_count(&self) -> u32 {
        self.copies.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Seconds more that a use away from every copy takes.
    fn away_s(&self) -> f64 {
        if self.copies.is_empty() { self.recompute_s } else { self.pull_s.min(self.recompute_s) }
    }

    /// Seconds that one of the copies saves within `horizon`: its share of the uses, which would pull, or recompute if it
    /// is the last.
    #[must_use]
    pub fn worth_s(&self, horizon: Duration) -> f64 {
        let each_s = match self.copy_count() {
            0 => return 0.0,
            1 => self.recompute_s,
            _ => self.away_s(),
        };
        self.uses_per_s * horizon.as_secs_f64() / f64::from(self.copy_count()) * each_s
    }

    /// Seconds that one more copy would save within `horizon`, if uses away go to all `places` without one alike.
    fn saving_s(&self, horizon: Duration, places: usize) -> f64 {
        let without = u32::try_from(places).unwrap_or(u32::MAX).saturating_sub(self.copy_count()).max(1);
        self.away_uses_per_s * horizon.as_secs_f64() / f64::from(without) * self.away_s()
    }
}

impl Place {
    /// Seconds lost by making room for `bytes`; `None` if there is no such room.
    fn loss_s(&self, bytes: u64) -> Option<f64> {
        let pushed_out = bytes.saturating_sub(self.free_bytes);
        (pushed_out <= self.evictable_bytes).then_some(pushed_out as f64 * self.loss_s_per_byte)
    }

    fn fill(&mut self, bytes: u64) {
        let pushed_out = bytes.saturating_sub(self.free_bytes);
        self.free_bytes = self.free_bytes.saturating_sub(bytes);
        self.evictable_bytes = self.evictable_bytes.saturating_sub(pushed_out);
    }
}

/// What to copy, most seconds saved per byte first, then what to give up, least worth per byte first. `places` are all
/// that serve requests; their room is counted down here. O(sets * places).
///
/// ```
/// use millpond_core::prefix::{Holder, Holders};
/// use millpond_core::sched::replicate::{Advice, BlockSet, Place, Policy, advise};
/// let place = |holder| Place { holder, free_bytes: 1 << 30, evictable_bytes: 0, loss_s_per_byte: 0.0 };
/// let mut places = [place(Holder(0)), place(Holder(1))];
/// let prompt = BlockSet {
///     id: 9, bytes: 160 << 20, copies: Holders::<1>::default().with(Holder(0)),
///     uses_per_s: 2.0, away_uses_per_s: 2.0, pull_s: 0.02, recompute_s: 0.06,
/// };
/// let advice = advise(&Policy::default(), &mut places, &[prompt]);
/// assert!(matches!(advice[..], [Advice::Copy { set: 9, to: Holder(1), .. }]));
/// ```
#[must_use]
pub fn advise<const W: usize>(policy: &Policy, places: &mut [Place], sets: &[BlockSet<W>]) -> Vec<Advice> {
    let mut advice = Vec::new();
    let per_byte = |worth_s: f64, set: &BlockSet<W>| worth_s / set.bytes.max(1) as f64;
    let mut hot: Vec<(f64, &BlockSet<W>)> = sets
        .iter()
        .filter(|set| set.copy_count() < policy.copies_max)
        .map(|set| (set.saving_s(policy.horizon, places.len()), set))
        .filter(|(saving_s, _)| *saving_s > 0.0)
        .collect();
    hot.sort_by(|left, right| {
        let [left_s, right_s] = [left, right].map(|(saving_s, set)| per_byte(*saving_s, set));
        right_s.total_cmp(&left_s).then(left.1.id.cmp(&right.1.id))
    });
    let mut budget = policy.budget_bytes;
    for (saving_s, set) in hot {
        if set.bytes > budget {
            continue;
        }
        let Some((index, loss_s)) = cheapest(places, set) else { continue };
        let cost_s = loss_s + set.bytes as f64 / policy.bytes_per_s;
        if saving_s > (1.0 + policy.margin) * cost_s {
            places[index].fill(set.bytes);
            budget -= set.bytes;
            advice.push(Advice::Copy { set: set.id, to: places[index].holder, gain_s: saving_s - cost_s });
        }
    }
    advice.extend(cold(policy, places, sets));
    advice
}

/// The place that loses least by a copy of `set`: of equals the one with most room, then the first.
fn cheapest<const W: usize>(places: &[Place], set: &BlockSet<W>) -> Option<(usize, f64)> {
    let without = places.iter().enumerate().filter(|(_, place)| !set.copies.contains(place.holder));
    let fitting = without.filter_map(|(index, place)| place.loss_s(set.bytes).map(|loss_s| (index, loss_s)));
    fitting.min_by(|(left, left_s), (right, right_s)| {
        let [left_free, right_free] = [left, right].map(|index| places[*index].free_bytes);
        left_s.total_cmp(right_s).then(right_free.cmp(&left_free))
    })
}

/// One copy of each set that has several and whose copies are worth less than their room; the least worth first. The copy
/// that goes is the one in the dearest place.
fn cold<const W: usize>(policy: &Policy, places: &[Place], sets: &[BlockSet<W>]) -> Vec<Advice> {
    let mut cold: Vec<(f64, Advice)> = Vec::new();
    for set in sets.iter().filter(|set| set.copy_count() > 1) {
        let holding = places.iter().filter(|place| set.copies.contains(place.holder));
        // The first of equals: `max_by` would take the last.
        let Some(dearest) = holding.rev().max_by(|left, right| left.loss_s_per_byte.total_cmp(&right.loss_s_per_byte))
        else {
            continue;
        };
        let (worth_s, room_s) = (set.worth_s(policy.horizon), set.bytes as f64 * dearest.loss_s_per_byte);
        if worth_s < (1.0 - policy.margin) * room_s {
            let advice = Advice::Drop { set: set.id, at: dearest.holder, gain_s: room_s - worth_s };
            cold.push((worth_s / set.bytes.max(1) as f64, advice));
        }
    }
    // Stable: equals in the order of `sets`.
    cold.sort_by(|left, right| left.0.total_cmp(&right.0));
    cold.into_iter().map(|(_, advice)| advice).collect()
}

/// Uses per second, older uses counting less: half as much after each half-life.
///
/// ```
/// use millpond_core::sched::replicate::Rate;
/// use millpond_core::time::{Duration, Instant};
/// let mut rate = Rate::new(Duration::from_secs(10));
/// (0..1_000).for_each(|tenth| rate.on_use(Instant::from_nanos(tenth * 100_000_000)));
/// let now = Instant::from_nanos(100_000_000_000);
/// assert!((rate.per_s(now) - 10.0).abs() < 0.5);
/// let later = now + Duration::from_secs(10);
/// assert!((rate.per_s(later) - 5.0).abs() < 0.3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    half_life_s: f64,
    uses: f64,
    at: Instant,
}

impl Rate {
    /// No uses yet.
    #[must_use]
    pub fn new(half_life: Duration) -> Self {
        Self { half_life_s: half_life.as_secs_f64().max(1e-9), uses: 0.0, at: Instant::ZERO }
    }

    /// One use, now.
    pub fn on_use(&mut self, now: Instant) {
        self.uses = self.uses_at(now) + 1.0;
        self.at = now;
    }

    /// Uses per second at present.
    #[must_use]
    pub fn per_s(&self, now: Instant) -> f64 {
        self.uses_at(now) * core::f64::consts::LN_2 / self.half_life_s
    }

    fn uses_at(&self, now: Instant) -> f64 {
        self.uses * libm::exp2(-now.since(self.at).as_secs_f64() / self.half_life_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn place(holder: u16, free_bytes: u64, loss_s_per_byte: f64) -> Place {
        Place { holder: Holder(holder), free_bytes, evictable_bytes: 8 * GIB, loss_s_per_byte }
    }

    /// 1 GiB, held by the first of the places; a use away costs 1 s, a lost last copy 3 s.
    fn set(id: u64, uses_per_s: f64, away_uses_per_s: f64) -> BlockSet<1> {
        let copies = Holders::default().with(Holder(0));
        BlockSet { id, bytes: GIB, copies, uses_per_s, away_uses_per_s, pull_s: 1.0, recompute_s: 3.0 }
    }

    fn copied(advice: &[Advice]) -> Vec<(u64, u16)> {
        let copy = |advice: &Advice| match *advice {
            Advice::Copy { set, to, .. } => Some((set, to.0)),
            Advice::Drop { .. } => None,
        };
        advice.iter().filter_map(copy).collect()
    }

    fn dropped(advice: &[Advice]) -> Vec<(u64, u16)> {
        let dropped = |advice: &Advice| match *advice {
            Advice::Drop { set, at, .. } => Some((set, at.0)),
            Advice::Copy { .. } => None,
        };
        advice.iter().filter_map(dropped).collect()
    }

    #[test]
    fn a_set_is_copied_when_it_saves_more_than_it_costs_and_not_before() {
        // One more copy among two places without: 60 s * rate / 2 * 1 s. It pushes out 1 GiB worth 10 s and moves for 0.1 s.
        let places = [place(0, 0, 10.0 / GIB as f64), place(1, 0, 10.0 / GIB as f64), place(2, 0, 10.0 / GIB as f64)];
        let policy = Policy { bytes_per_s: 10.0 * GIB as f64, ..Policy::default() };
        let enough = (1.0 + policy.margin) * 10.1 / 30.0;
        assert_eq!(copied(&advise(&policy, &mut places.clone(), &[set(1, 9.0, enough * 1.01)])), [(1, 1)]);
        assert_eq!(advise(&policy, &mut places.clone(), &[set(1, 9.0, enough * 0.99)]), []);
        assert_eq!(advise(&policy, &mut places.clone(), &[set(1, 9.0, 0.0)]), []);
    }

    #[test]
    fn room_that_costs_nothing_is_taken_first_and_counted_down() {
        let mut places = [place(0, 0, 1e-9), place(1, 0, 1e-9), place(2, GIB, 1e-9), place(3, 2 * GIB, 1e-9)];
        let sets = [set(1, 9.0, 2.0), set(2, 9.0, 4.0), set(3, 9.0, 3.0)];
        // The hottest first; each goes where most is free; the third fills the last room.
        assert_eq!(copied(&advise(&Policy::default(), &mut places, &sets)), [(2, 3), (3, 2), (1, 3)]);
    }

    #[test]
    fn the_budget_and_the_number_of_copies_are_kept() {
        let mut places: Vec<Place> = (0..6).map(|holder| place(holder, 8 * GIB, 0.0)).collect();
        let sets: Vec<BlockSet<1>> = (1..=5).map(|id| set(id, 9.0, 9.0)).collect();
        let policy = Policy { budget_bytes: 3 * GIB, ..Policy::default() };
        assert_eq!(copied(&advise(&policy, &mut places, &sets)).len(), 3);
        let full = BlockSet { copies: Holders([0b11]), ..set(1, 9.0, 9.0) };
        assert_eq!(advise(&Policy { copies_max: 2, ..policy }, &mut places, &[full]), []);
    }

    #[test]
    fn a_place_that_may_lose_nothing_gets_nothing() {
        let full = Place { evictable_bytes: GIB - 1, ..place(1, 0, 0.0) };
        assert_eq!(advise(&Policy::default(), &mut [place(0, 0, 0.0), full], &[set(1, 9.0, 9.0)]), []);
    }

    #[test]
    fn cold_copies_go_first_and_a_last_copy_stays() {
        let mut places = [place(0, 0, 1.0 / GIB as f64), place(1, 0, 2.0 / GIB as f64)];
        let twice = |id, uses_per_s| BlockSet { copies: Holders([0b11]), ..set(id, uses_per_s, 0.0) };
        // A copy of two is worth 60 * rate / 2 seconds; its room at place 1 is worth 2.
        let sets = [twice(1, 0.04), twice(2, 0.01), twice(3, 1.0), set(4, 0.0, 0.0)];
        assert_eq!(dropped(&advise(&Policy::default(), &mut places, &sets)), [(2, 1), (1, 1)]);
    }

    #[test]
    fn a_copy_that_was_just_made_is_not_given_up() {
        let loss_s_per_byte = 10.0 / GIB as f64;
        let policy = Policy { bytes_per_s: 1e15, ..Policy::default() };
        // All rates about the point where saving and loss are equal: whatever is copied stays.
        for tenths in 1..40 {
            let away = f64::from(tenths) / 60.0;
            let mut places = [place(0, 0, loss_s_per_byte), place(1, 0, loss_s_per_byte)];
            let before = set(1, 9.0, away);
            let advice = advise(&policy, &mut places.clone(), &[before]);
            if copied(&advice).is_empty() {
                continue;
            }
            // What was away is at the new copy now; the old one keeps its own uses.
            let after = BlockSet { copies: Holders([0b11]), uses_per_s: 2.0 * away, away_uses_per_s: 0.0, ..before };
            assert_eq!(advise(&policy, &mut places, &[after]), [], "{away}");
        }
    }

    #[test]
    fn the_same_inputs_give_the_same_advice_in_any_order_of_the_sets() {
        let places: Vec<Place> = (0..4).map(|holder| place(holder, 2 * GIB, 1e-10)).collect();
        let mut sets: Vec<BlockSet<1>> =
            (1..=6).map(|id| set(id, 1.0, f64::from(u32::try_from(id % 3).unwrap()))).collect();
        let first = advise(&Policy::default(), &mut places.clone(), &sets);
        sets.reverse();
        assert_eq!(advise(&Policy::default(), &mut places.clone(), &sets), first);
        assert!(first.len() >= 3, "{first:?}");
    }

    #[test]
    fn a_rate_of_nothing_is_nothing() {
        assert_eq!(Rate::new(Duration::ZERO).per_s(Instant::from_nanos(7)), 0.0);
    }
}
