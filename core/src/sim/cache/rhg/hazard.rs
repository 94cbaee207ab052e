//! How often blocks of a class come back at an age, and what keeping one is worth.
//!
//! Classes that were seen seldom borrow from the kind of block they belong to.

use alloc::boxed::Box;
use alloc::vec;

use super::LISTS;
use super::tree::Group;
use crate::time::Duration;

/// Ages are told apart by this many edges: 0, then 2 s times powers of the square root of 2, up to 48 minutes.
pub(super) const BUCKETS: usize = 23;
/// New, partial, and by uses so far: up to 2, 4, 9, more.
const KINDS: usize = 6;
/// Blocks that the request added: up to 1, 2, 4, 8, 16, 32, more.
const ADDED: usize = 7;
/// Turns that the chain had seen: 0 to 4, more.
const TURNS: usize = TURNS_MAX as usize + 1;
const TURNS_MAX: u16 = 5;
/// How many classes there are.
pub(super) const CLASSES: usize = KINDS * ADDED * TURNS;

/// What counts as much as so many observed groups: the estimate of the next coarser class.
const PRIOR: f64 = 20.0;
/// The same for the coarsest of all, ...
const ROOT_PRIOR: f64 = 5.0;
/// ... which expects this many blocks of a hundred to come back in any bucket.
const ROOT_REUSE: f64 = 0.05;

/// Ages from here on belong to the bucket, or a later one.
pub(super) const fn edge(bucket: usize) -> Duration {
    Duration::from_nanos(EDGES[bucket])
}

const EDGES: [u64; BUCKETS] = {
    let mut edges = [0; BUCKETS];
    // 2 s and 2 * sqrt(2) s in nanoseconds; each pair of edges doubles the pair before it.
    let (mut bucket, mut pair) = (1, [2_000_000_000, 2_828_427_125]);
    while bucket < BUCKETS {
        edges[bucket] = pair[(bucket + 1) % 2];
        pair[(bucket + 1) % 2] *= 2;
        bucket += 1;
    }
    edges
};

/// Seconds that the bucket lasts; the last one, which has no end, is given what continues the sequence.
fn width_s(bucket: usize) -> f64 {
    let end = EDGES.get(bucket + 1).copied().unwrap_or(EDGES[BUCKETS - 2] * 2);
    Duration::from_nanos(end - EDGES[bucket]).as_secs_f64()
}

/// What a request says about a block of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    kind: u8,
    added: u8,
    turns: u8,
}

impl Class {
    /// `uses` are the block's so far, none if it is new.
    pub(super) fn new(is_partial: bool, uses: Option<u16>, added: usize, turns: u16) -> Self {
        let kind = match uses {
            _ if is_partial => 1,
            None => 0,
            Some(..=2) => 2,
            Some(3..=4) => 3,
            Some(5..=9) => 4,
            Some(_) => 5,
        };
        let added = match added {
            ..=1 => 0,
            2 => 1,
            3..=4 => 2,
            5..=8 => 3,
            9..=16 => 4,
            17..=32 => 5,
            _ => 6,
        };
        Self { kind, added, turns: turns.min(TURNS_MAX).to_le_bytes()[0] }
    }

    /// A number below [`CLASSES`]; classes of one kind, and in it of one number of added blocks, lie together.
    pub(super) fn index(self) -> usize {
        (usize::from(self.kind) * ADDED + usize::from(self.added)) * TURNS + usize::from(self.turns)
    }
}

/// What was seen of a class, or of several, in one age bucket.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Groups (parts of a group count as such) that came back.
    events: f64,
    /// Seconds that groups were waited for.
    exposure_s: f64,
}

impl Seen {
    /// Reuses a second, drawn towards `expected` by as much as `prior` groups that waited the whole bucket.
    fn rate(self, expected: f64, prior: f64, width_s: f64) -> f64 {
        (self.events + prior * expected * width_s) / (self.exposure_s + prior * width_s)
    }
}

type Row = [Seen; BUCKETS];

/// Everything that was seen.
#[derive(Clone, Debug)]
pub(super) struct Hazards {
    seen: Box<[Row]>,
}

impl Hazards {
    pub(super) fn new() -> Self {
        Self { seen: vec![[Seen::default(); BUCKETS]; CLASSES].into_boxed_slice() }
    }

    /// The group's time in its bucket is over. It counts as one observation, however many blocks it has.
    pub(super) fn on_passed(&mut self, group: &Group) {
        let seen = &mut self.seen[group.class.index()][group.bucket];
        let weight = 1.0 / f64::from(group.size);
        seen.events += weight * f64::from(group.returned);
        seen.exposure_s += weight * (f64::from(group.awaited) * width_s(group.bucket) + group.returned_after_s);
    }

    /// What it is worth to keep a block, in reuses a second, by class and bucket.
    pub(super) fn worths(&self) -> Box<[f64]> {
        let mut worths = vec![0.0; LISTS].into_boxed_slice();
        let root: [f64; BUCKETS] = core::array::from_fn(|bucket| ROOT_REUSE / width_s(bucket));
        let all = rates(&self.seen, &root, ROOT_PRIOR);
        for (kind, of_kind) in self.seen.chunks(ADDED * TURNS).enumerate() {
            let kind_rates = rates(of_kind, &all, PRIOR);
            for (added, of_added) in of_kind.chunks(TURNS).enumerate() {
                let added_rates = rates(of_added, &kind_rates, PRIOR);
                for (turns, seen) in of_added.chunks(1).enumerate() {
                    let class = (kind * ADDED + added) * TURNS + turns;
                    let row = &mut worths[class * BUCKETS..][..BUCKETS];
                    row.copy_from_slice(&gittins(&rates(seen, &added_rates, PRIOR)));
                }
            }
        }
        worths
    }
}

/// Reuses a second in each bucket of several classes taken together.
fn rates(rows: &[Row], expected: &[f64; BUCKETS], prior: f64) -> [f64; BUCKETS] {
    core::array::from_fn(|bucket| {
        let seen = rows.iter().fold(Seen::default(), |sum, row| Seen {
            events: sum.events + row[bucket].events,
            exposure_s: sum.exposure_s + row[bucket].exposure_s,
        });
        seen.rate(expected[bucket], prior, width_s(bucket))
    })
}

/// For each bucket the best ratio, over when to give up, of the chance of reuse until then to the expected time until reuse
/// or giving up (Gittins, "Bandit processes and dynamic allocation indices", 1979).
fn gittins(rates: &[f64; BUCKETS]) -> [f64; BUCKETS] {
    let chance: [f64; BUCKETS] = core::array::from_fn(|bucket| -libm::expm1(-rates[bucket] * width_s(bucket)));
    core::array::from_fn(|from| {
        let (mut left, mut reuse, mut time, mut best) = (1.0, 0.0, 0.0, 0.0);
        for bucket in from..BUCKETS {
            reuse += left * chance[bucket];
            time += left * chance[bucket] / rates[bucket];
            best = f64::max(best, reuse / time);
            left *= 1.0 - chance[bucket];
        }
        best
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_double_with_every_second_edge() {
        assert_eq!([edge(0), edge(1), edge(3)], [0, 2, 4].map(Duration::from_secs));
        assert_eq!(edge(BUCKETS - 1).as_millis(), 2_896_309);
    }

    #[test]
    fn a_constant_rate_is_worth_itself() {
        for worth in gittins(&[0.01; BUCKETS]) {
            assert!((worth - 0.01).abs() < 1e-12, "{worth}");
        }
    }

    #[test]
    fn a_young_block_is_worth_what_it_will_be() {
        let mut rates = [1e-6; BUCKETS];
        rates[13] = 0.02; // from 128 s on
        let worth = gittins(&rates);
        assert!(worth[0] > 100.0 * rates[0] && worth[12] > worth[0] && worth[13] > worth[12], "{worth:?}");
        assert!(worth[14] < 1e-5, "{worth:?}");
    }

    #[test]
    fn classes_have_numbers_of_their_own() {
        let mut seen = [false; CLASSES];
        for (is_partial, uses) in [(false, None), (true, None), (false, Some(2)), (false, Some(3)), (false, Some(9))] {
            for added in [0, 2, 3, 8, 9, 32, 33] {
                for turns in [0, 1, 2, 3, 4, 5] {
                    let class = Class::new(is_partial, uses, added, turns).index();
                    assert!(!core::mem::replace(&mut seen[class], true), "{class}");
                }
            }
        }
        assert_eq!(Class::new(false, Some(10), 33, 600).index(), CLASSES - 1);
    }
}
