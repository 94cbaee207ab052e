//! What a simulation found: a row per request, and the figures of a report.

use alloc::vec::Vec;

use crate::time::{Duration, Instant};

/// What became of a request.
///
/// ```
/// use millpond_core::sim::{Fate, Served};
/// let served = Served { fate: Fate::Effective, ..Served::default() };
/// assert_eq!(served.ttft.as_nanos(), 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fate {
    /// Served within both deadlines.
    Effective,
    /// Served, too late or too slowly.
    Missed,
    /// Refused on arrival.
    RejectedEarly,
    /// Refused when its prefill was done.
    RejectedLate,
    /// Still in the cluster: only while it runs.
    #[default]
    Running,
}

/// A request's row.
///
/// Example: [`Fate`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Served {
    /// What became of it.
    pub fate: Fate,
    /// When it came; of those who came back, the last time.
    pub at: Instant,
    /// How often it came back after it was refused.
    pub returns: u32,
    /// Tokens of its prompt.
    pub input: u32,
    /// Tokens of its answer.
    pub output: u32,
    /// To its first token, from the last time it came; zero if it was refused.
    pub ttft: Duration,
    /// The mean of the longest tenth of the gaps between its tokens; zero if it was refused or has one token.
    pub tbt: Duration,
    /// Tokens of its prompt that were reused.
    pub reused: u32,
    /// Seconds that its prefill took.
    pub prefill: f64,
    /// Seconds that it would take alone, if whatever came before were cached: nobody can send a first token sooner.
    pub prefill_least: f64,
    /// Its tenant.
    pub tenant: u32,
    /// Its priority.
    pub priority: u8,
    /// Whether the interval predicted for its first token held.
    pub covered: Option<bool>,
}

/// The load of both sides at one moment.
///
/// ```
/// let idle = millpond_core::sim::Load::default();
/// assert_eq!((idle.prefill, idle.decode), (0.0, 0.0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// The mean wait of prefill nodes, over the deadline of first tokens.
    pub prefill: f64,
    /// The mean step of decode nodes, over the deadline between tokens.
    pub decode: f64,
}

/// What a tenant asked for and got, in seconds of instances.
///
/// Example: [`Outcome`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TenantUse {
    /// Asked for.
    pub asked: f64,
    /// Got, of requests served within both deadlines.
    pub served: f64,
    /// Its weight in fair sharing.
    pub weight: f64,
}

/// Everything that a run found. Rows are in the order of arrival.
///
/// ```
/// use millpond_core::sim::{Setup, run, trace::Synthetic};
/// let trace = Synthetic { requests: 50, ..Synthetic::default() }.trace();
/// let outcome = run(&trace, &Setup::default()).unwrap();
/// assert_eq!(outcome.served.len(), 50);
/// assert_eq!(outcome.decisions, run(&trace, &Setup::default()).unwrap().decisions);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// A row per request.
    pub served: Vec<Served>,
    /// Loads, [`Setup::sample`](super::Setup::sample) apart, from the first arrival to the last.
    pub loads: Vec<Load>,
    /// Hash over all decisions in their order; zero for coupled instances.
    pub decisions: u64,
    /// Seconds of prefills that were in vain.
    pub wasted_prefill_s: f64,
    /// Decode tokens of requests served within both deadlines.
    pub goodput_tokens: u64,
    /// Requests that could be served within their deadline between tokens by whoever does not know how long answers are:
    /// the batches that fit, always full, from the first arrival to the last; by [`Setup::slo`](super::Setup::slo).
    pub length_blind_bound: f64,
    /// By tenant.
    pub tenants: Vec<TenantUse>,
    /// Requests by prefill instance (or coupled instance).
    pub by_prefill: Vec<u32>,
    /// Requests by decode instance.
    pub by_decode: Vec<u32>,
    /// Prompts whose prefix was believed to be where it was not.
    pub stale: u32,
    /// How often somebody was refused; who came back and was served counts here and nowhere else as refused.
    pub refusals: u32,
    /// How often somebody came back when told to.
    pub returns: u32,
    /// Requests that were held at a door.
    pub held: u32,
    /// Prompts that pulled a prefix.
    pub pulls: u32,
    /// When the last request ended.
    pub ended: Instant,
}

impl Outcome {
    /// How many requests had that fate.
    #[must_use]
    pub fn count(&self, fate: Fate) -> usize {
        self.served.iter().filter(|one| one.fate == fate).count()
    }

    /// Requests served within both deadlines.
    #[must_use]
    pub fn effective(&self) -> usize {
        self.count(Fate::Effective)
    }

    /// Mean seconds to the first token of those that were served.
    #[must_use]
    pub fn ttft_mean(&self) -> f64 {
        mean(self.answered().map(|one| one.ttft.as_secs_f64()))
    }

    /// A percentile (0 to 100) of the time to the first token of those that were served.
    #[must_use]
    pub fn ttft_percentile(&self, percent: f64) -> Duration {
        percentile(&self.ttfts(), percent)
    }

    /// The times to the first token of those that were served, the shortest first.
    #[must_use]
    pub fn ttfts(&self) -> Vec<Duration> {
        sorted(self.answered().map(|one| one.ttft))
    }

    /// A percentile (0 to 100) of the TBT of those that were served and have more than one token.
    #[must_use]
    pub fn tbt_percentile(&self, percent: f64) -> Duration {
        percentile(&self.tbts(), percent)
    }

    /// The TBTs of those that were served and have more than one token, the shortest first.
    #[must_use]
    pub fn tbts(&self) -> Vec<Duration> {
        sorted(self.answered().filter(|one| one.output > 1).map(|one| one.tbt))
    }

    /// Share of the prompts' blocks, in percent, that were reused, of those that were computed.
    #[must_use]
    pub fn hit_blocks_pct(&self, block_tokens: u32) -> f64 {
        let blocks = self.computed().map(|one| f64::from(one.input.div_ceil(block_tokens))).sum::<f64>();
        // A full hit computes one token of its last block again.
        100.0 * self.computed().map(|one| f64::from(one.reused.div_ceil(block_tokens))).sum::<f64>() / blocks.max(1.0)
    }

    /// Share of the prompts' tokens, in percent, that were reused, of those that were computed.
    #[must_use]
    pub fn hit_tokens_pct(&self) -> f64 {
        let tokens = self.computed().map(|one| f64::from(one.input)).sum::<f64>();
        100.0 * self.computed().map(|one| f64::from(one.reused)).sum::<f64>() / tokens.max(1.0)
    }

    /// Mean seconds of a prefill.
    #[must_use]
    pub fn prefill_mean(&self) -> f64 {
        mean(self.computed().map(|one| one.prefill))
    }

    /// The correlation of prefill and decode load at the same moment: below zero where one side idles while the other is full.
    #[must_use]
    pub fn load_correlation(&self) -> f64 {
        // The first tenth fills an empty cluster.
        let loads = &self.loads[self.loads.len() / 10..];
        let (x, y) = (mean(loads.iter().map(|load| load.prefill)), mean(loads.iter().map(|load| load.decode)));
        let sum = |f: fn(f64, f64) -> f64| loads.iter().map(|load| f(load.prefill - x, load.decode - y)).sum::<f64>();
        let (xy, xx, yy) = (sum(|a, b| a * b), sum(|a, _| a * a), sum(|_, b| b * b));
        if xx * yy > 0.0 { xy / libm::sqrt(xx * yy) } else { 0.0 }
    }

    /// The share of predicted intervals for first tokens that held.
    #[must_use]
    pub fn coverage(&self) -> f64 {
        mean(self.served.iter().filter_map(|one| one.covered).map(|held| f64::from(u8::from(held))))
    }

    /// By decile of output length, the shortest first: the share of requests served within both deadlines.
    #[must_use]
    pub fn deciles(&self) -> [f64; 10] {
        self.deciles_by(|one| one.output)
    }

    fn deciles_by(&self, length: fn(&Served) -> u32) -> [f64; 10] {
        let mut order: Vec<&Served> = self.served.iter().collect();
        order.sort_by_key(|one| length(one));
        core::array::from_fn(|decile| {
            let part = &order[decile * order.len() / 10..(decile + 1) * order.len() / 10];
            mean(part.iter().map(|one| f64::from(u8::from(one.fate == Fate::Effective))))
        })
    }

    /// Requests that could have been served within their deadlines beside those that were: [`Outcome::length_blind_bound`] less
    /// [`Outcome::effective`]; below zero for who chooses well whom to serve.
    #[must_use]
    pub fn regret(&self) -> f64 {
        self.length_blind_bound - self.effective() as f64
    }

    /// Mean seconds to the first token of those that were served, less what is left with an endless cache that all share and
    /// nobody waiting ([`Served::prefill_least`]).
    #[must_use]
    pub fn ttft_regret(&self) -> f64 {
        mean(self.answered().map(|one| one.ttft.as_secs_f64() - one.prefill_least))
    }

    /// Decode tokens of requests served within both deadlines, per second until the last request ended.
    #[must_use]
    pub fn goodput_tokens_per_s(&self) -> f64 {
        self.goodput_tokens as f64 / self.ended.since(Instant::ZERO).as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Of those who came back, the share that was served.
    #[must_use]
    pub fn returns_served(&self) -> f64 {
        let back = self.served.iter().filter(|one| one.returns > 0);
        mean(back.map(|one| f64::from(u8::from(matches!(one.fate, Fate::Effective | Fate::Missed)))))
    }

    /// How far the worst-off tenant is below its max-min fair share of what was served, as a part of that share; 0 if nobody
    /// is.
    #[must_use]
    pub fn unfairness(&self) -> f64 {
        let mut order: Vec<&TenantUse> = self.tenants.iter().collect();
        order.sort_by(|a, b| (a.asked / a.weight).total_cmp(&(b.asked / b.weight)));
        let mut left: f64 = order.iter().map(|one| one.served).sum();
        let mut weights: f64 = order.iter().map(|one| one.weight).sum();
        let short = order.into_iter().map(|one| {
            let fair = one.asked.min(left * one.weight / weights);
            (left, weights) = (left - fair, weights - one.weight);
            if fair > 0.0 { 1.0 - one.served / fair } else { 0.0 }
        });
        short.fold(0.0, f64::max)
    }

    /// By decile of input length, the shortest first: the share of requests served within both deadlines.
    #[must_use]
    pub fn input_deciles(&self) -> [f64; 10] {
        self.deciles_by(|one| one.input)
    }

    fn answered(&self) -> impl Iterator<Item = &Served> {
        self.served.iter().filter(|one| matches!(one.fate, Fate::Effective | Fate::Missed))
    }

    fn computed(&self) -> impl Iterator<Item = &Served> {
        self.served.iter().filter(|one| one.fate != Fate::RejectedEarly)
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

fn sorted(values: impl Iterator<Item = Duration>) -> Vec<Duration> {
    let mut values: Vec<Duration> = values.collect();
    values.sort_unstable();
    values
}

/// A percentile (0 to 100) of values in ascending order, by nearest rank; zero of none.
///
/// ```
/// use millpond_core::{sim::percentile, time::Duration};
/// let values = [1, 2, 3, 4].map(Duration::from_secs);
/// assert_eq!(percentile(&values, 50.0), Duration::from_secs(2));
/// ```
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
pub fn percentile(values: &[Duration], percent: f64) -> Duration {
    let place = libm::ceil(values.len() as f64 * percent / 100.0) as usize;
    values.get(place.clamp(1, values.len().max(1)) - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(fate: Fate, ttft: u64) -> Served {
        Served { fate, ttft: Duration::from_secs(ttft), input: 1_000, output: 2, reused: 512, ..Served::default() }
    }

    #[test]
    fn figures_count_what_they_say() {
        let fates = [(Fate::Effective, 1), (Fate::Missed, 3), (Fate::RejectedEarly, 0), (Fate::RejectedLate, 0)];
        let outcome = Outcome { served: fates.map(|(fate, ttft)| served(fate, ttft)).to_vec(), ..Outcome::default() };
        assert_eq!((outcome.effective(), outcome.count(Fate::RejectedLate)), (1, 1));
        assert_eq!((outcome.ttft_mean(), outcome.ttft_percentile(50.0)), (2.0, Duration::from_secs(1)));
        assert_eq!(
            (outcome.ttft_percentile(99.0), outcome.ttft_percentile(0.0)),
            (Duration::from_secs(3), Duration::from_secs(1))
        );
        assert_eq!((outcome.hit_blocks_pct(512), outcome.hit_tokens_pct()), (50.0, 51.2));
        assert_eq!(Outcome::default().ttft_percentile(99.0), Duration::ZERO);
    }

    #[test]
    fn the_worst_off_tenant_is_found_beside_its_fair_share() {
        let of = |uses: [(f64, f64, f64); 2]| {
            let uses = uses.map(|(asked, served, weight)| TenantUse { asked, served, weight });
            let outcome = Outcome { tenants: uses.to_vec(), ..Outcome::default() };
            (outcome.unfairness() * 1e6).round_ties_even() / 1e6
        };
        // 50 are served: all 10 of the first, 40 of the second; or 25 each.
        assert_eq!((of([(10.0, 10.0, 1.0), (90.0, 40.0, 1.0)]), of([(10.0, 8.0, 1.0), (90.0, 42.0, 1.0)])), (0.0, 0.2));
        assert_eq!(
            (of([(90.0, 40.0, 1.0), (90.0, 10.0, 1.0)]), of([(90.0, 40.0, 4.0), (90.0, 10.0, 1.0)])),
            (0.6, 0.0)
        );
        assert_eq!(of([(0.0, 0.0, 1.0), (0.0, 0.0, 1.0)]), 0.0);
    }

    #[test]
    fn correlation_tells_phase_from_anti_phase() {
        let with = |decode: fn(f64) -> f64| {
            let load = |i: u32| Load { prefill: f64::from(i % 7), decode: decode(f64::from(i % 7)) };
            Outcome { loads: (0..70).map(load).collect(), ..Outcome::default() }.load_correlation()
        };
        assert!(with(|x| 2.0 * x + 1.0) > 0.999 && with(|x| 9.0 - x) < -0.999 && with(|_| 1.0) == 0.0);
    }
}
