//! `--advise`: what more memory, a pool of it, and disaggregation would gain for this trace.
//!
//! Memory is judged without time: the prompts go through one LRU cache of all prefill nodes' blocks, and what is hit is not
//! computed. Blocks on SSD lie behind a full DRAM and have to be read, at [`SSD_BYTES_PER_SECOND`], before they are used;
//! whoever would be computed faster is computed. Pools and disaggregation are judged by replays of a cluster that admits
//! everybody.

use std::sync::Arc;

use millpond_core::evict::Kind;
use millpond_core::sched::cost::{Profile, Work};
use millpond_core::sched::{admission, placement};
use millpond_core::sim::cache::{Eviction, replay};
use millpond_core::sim::trace::Trace;
use millpond_core::sim::{Baseline, Setup};
use serde_json::{Value as Json, json};

use super::chart::{Axis, Chart, Scale, Series};
use super::cluster::{Found, Plan, one};
use super::report::{Section, Table};
use super::{in_parallel, rounded};
use crate::cli::failure::Failure;
use crate::cli::store_cmds::{Format, Output};

/// The rate from which on a node of the default profile reads a cached prefix of 8,192 tokens faster than it computes it
/// (Equation 2 of the FAST'25 paper); also what one PCIe 4 drive reads.
const SSD_BYTES_PER_SECOND: f64 = 6e9;
/// DRAM that is tried, in 64ths of what all prefill nodes of the profile have.
const DRAM_SIZES: [u32; 6] = [1, 4, 16, 64, 256, 1_024];
/// SSD that is tried behind that DRAM, in times of it.
const SSD_SIZES: [u32; 3] = [1, 4, 16];
const GIB: f64 = (1_u64 << 30) as f64;
/// Less than this does not pay: it is within what a seed changes.
const NOTHING_PCT: f64 = 1.0;

/// A kind of memory in one size, beside the next smaller one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gain {
    memory: &'static str,
    gib: f64,
    /// Seconds of prefill and of reading, a request.
    seconds: f64,
    /// Seconds that a further GiB saves in an hour of the trace.
    saved: f64,
}

/// A cluster and what it did.
#[derive(Clone, Debug)]
struct Way {
    name: &'static str,
    setup: Setup,
}

/// What was found.
#[derive(Debug)]
pub(super) struct Advice {
    gains: Vec<Gain>,
    /// Local caches, caches that nodes pull from each other, one pool.
    pools: Vec<(&'static str, Found)>,
    /// Coupled instances, then apart.
    apart: Vec<(&'static str, Found)>,
    speed: f64,
}

/// Tries memories and clusters, as many at once as there are cores.
pub(super) async fn run(trace: &Arc<Trace>, plan: &Plan) -> Result<Advice, Failure> {
    plan.setup.check().map_err(|error| Failure::Usage(error.to_string()))?;
    let (speed, jitter) = (plan.speeds[0], plan.jitter);
    let ways = ways(&plan.setup);
    let each = ways.iter().map(|way| {
        let (trace, setup) = (Arc::clone(trace), way.setup.clone());
        move || one(&trace, &setup, jitter, speed)
    });
    let found = in_parallel(each.collect()).await?;
    let mut found: Vec<(&'static str, Found)> = ways.iter().map(|way| way.name).zip(found).collect();
    let apart = found.split_off(3);
    let (trace, setup) = (Arc::clone(trace), plan.setup.clone());
    let gains = in_parallel(vec![move || gains(&trace, &setup)]).await?.swap_remove(0);
    Ok(Advice { gains, pools: found, apart, speed })
}

fn ways(setup: &Setup) -> Vec<Way> {
    let with = |name, policy, pooled| {
        let mut setup = setup.clone();
        (setup.placement.policy, setup.pooled, setup.seed) = (policy, pooled, 1);
        setup.admission.policy = admission::Policy::None;
        Way { name, setup }
    };
    let coupled = |name, baseline| {
        let mut way = with(name, placement::Policy::Millpond, false);
        way.setup.coupled = way.setup.prefill + way.setup.decode;
        (way.setup.prefill, way.setup.decode, way.setup.baseline) = (0, 0, baseline);
        way
    };
    vec![
        with("local caches", placement::Policy::LocalPrefix, false),
        with("pulled from each other", placement::Policy::Millpond, false),
        with("one pool", placement::Policy::Millpond, true),
        coupled("coupled", Baseline::Plain),
        coupled("coupled, prefix caching", Baseline::PrefixCaching),
        coupled("coupled, chunked prefill", Baseline::ChunkedPrefill),
        with("prefill and decode apart", placement::Policy::Millpond, false),
    ]
}

/// Tokens that each request hits in a cache of so many blocks.
fn hits(trace: &Trace, blocks: u32) -> Vec<u32> {
    let mut hits = Vec::with_capacity(trace.requests().len());
    replay(trace, Eviction::Kind(Kind::Lru), blocks.min(trace.distinct_blocks()), |_, tokens| hits.push(tokens));
    hits
}

/// What each size of each kind of memory saves beside the next smaller one.
fn gains(trace: &Trace, setup: &Setup) -> Vec<Gain> {
    let profile = &setup.profile;
    let nodes = u32::try_from(setup.prefill).unwrap_or(u32::MAX);
    let all = setup.cache_blocks.unwrap_or(profile.cache_blocks).saturating_mul(nodes);
    let gib = |blocks: u32| f64::from(blocks) * profile.kv_len(profile.block_tokens) as f64 / GIB;
    let hours = (trace.span().as_secs_f64() / 3_600.0).max(f64::MIN_POSITIVE);
    let count = trace.requests().len() as f64;
    let computed = |hits: &[u32]| total(trace, profile, hits, hits);
    let mut gains = Vec::new();
    let mut add = |memory, gib: f64, seconds: f64, (less, more): (f64, f64)| {
        gains.push(Gain { memory, gib, seconds: seconds / count, saved: (more - seconds) / (gib - less) / hours });
        (gib, seconds)
    };
    let mut last = (0.0, computed(&vec![0; trace.requests().len()]));
    for size in DRAM_SIZES {
        let blocks = (u64::from(all) * u64::from(size) / 64).clamp(1, u32::MAX.into());
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        last = add("DRAM", gib(blocks), computed(&hits(trace, blocks)), last);
    }
    let in_dram = hits(trace, all);
    let mut last = (0.0, computed(&in_dram));
    for size in SSD_SIZES {
        let blocks = all.saturating_mul(size);
        let on_both = hits(trace, all.saturating_add(blocks));
        last = add("SSD", gib(blocks), total(trace, profile, &in_dram, &on_both), last);
    }
    gains
}

/// Seconds of all prefills if so much of each prompt is in DRAM and so much in DRAM or on SSD, reading included.
fn total(trace: &Trace, profile: &Profile, in_dram: &[u32], on_both: &[u32]) -> f64 {
    let rows = trace.requests().iter().zip(in_dram).zip(on_both);
    let seconds = rows.map(|((request, &dram), &both)| {
        let computed = |prefix| profile.prefill.seconds(Work::of_prompt(request.input_tokens, prefix));
        let read = profile.kv_len(both.saturating_sub(dram)) as f64 / SSD_BYTES_PER_SECOND;
        computed(dram).min(computed(both.max(dram)) + read)
    });
    seconds.sum()
}

impl Advice {
    /// Writes tables and sentences, or a line of JSON for each of what was tried.
    pub(super) fn write(&self, output: &mut Output<'_>) -> Result<(), Failure> {
        if output.format == Format::Json {
            return self.rows().into_iter().try_for_each(|row| Ok(output.line("", row)?));
        }
        for text in self.tables().iter().map(Table::text).chain(self.verdicts()) {
            output.line(&text, Json::Null)?;
        }
        Ok(())
    }

    fn rows(&self) -> Vec<Json> {
        let gains = self.gains.iter().map(|gain| {
            json!({
                "advise": gain.memory, "gib": rounded(gain.gib), "prefill_s": rounded(gain.seconds),
                "saved_s_per_gib_hour": rounded(gain.saved),
            })
        });
        let clusters = [("pool", &self.pools), ("disaggregation", &self.apart)];
        let clusters = clusters.into_iter().flat_map(|(what, found)| found.iter().map(move |row| (what, row)));
        let clusters = clusters.map(|(what, (name, found))| {
            json!({
                "advise": what, "cluster": name, "speed": self.speed, "effective": found.effective,
                "ttft_mean_s": rounded(found.ttft_mean_s), "tbt_p90_ms": rounded(found.tbt_p90_ms),
                "hit_blocks_pct": rounded(found.hit_blocks_pct),
            })
        });
        gains.chain(clusters).collect()
    }

    fn tables(&self) -> Vec<Table> {
        let head = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let gain = |gain: &Gain| {
            let figures = [format!("{:.0}", gain.gib), format!("{:.3}", gain.seconds), format!("{:.3}", gain.saved)];
            [gain.memory.to_owned()].into_iter().chain(figures).collect()
        };
        let cluster = |(name, found): &(&'static str, Found)| {
            vec![
                (*name).to_owned(),
                found.effective.to_string(),
                format!("{:.2}", found.ttft_mean_s),
                format!("{:.1}", found.tbt_p90_ms),
                format!("{:.2}", found.hit_blocks_pct),
            ]
        };
        vec![
            Table {
                title: "more memory, beside the line above; SSD behind the DRAM of the profile".to_owned(),
                head: head(&["memory", "GiB", "seconds a request", "saved by a further GiB, s an hour"]),
                rows: self.gains.iter().map(gain).collect(),
            },
            Table {
                title: format!("a pool and disaggregation, all admitted, at {} times the pace", self.speed),
                head: head(&["cluster", "effective", "TTFT mean, s", "TBT p90, ms", "hits, % of blocks"]),
                rows: self.pools.iter().chain(&self.apart).map(cluster).collect(),
            },
        ]
    }

    /// What to do, and why.
    fn verdicts(&self) -> [String; 3] {
        let [local, pulled, pool] = [0, 1, 2].map(|place| self.pools[place].1.ttft_mean_s);
        let less = |than: f64, value: f64| if than > 0.0 { 100.0 * (than - value) / than } else { 0.0 };
        let (shares, gains) = (less(local, pulled), less(pulled, pool));
        let verdict = |pct: f64| if pct > NOTHING_PCT { "pays" } else { "does not pay" };
        let (together, apart) = self.apart.split_at(self.apart.len() - 1);
        let best = together.iter().max_by_key(|(_, found)| found.effective);
        let (name, best) = best.map_or(("none", 0), |(name, found)| (*name, found.effective));
        let apart = apart.first().map_or(0, |(_, found)| found.effective);
        let more = less(apart as f64, best as f64);
        [
            format!(
                "Pulling from each other's caches {}: the mean time to the first token changes by {:+.1} %.",
                verdict(shares),
                -shares
            ),
            format!(
                "A pool that all read like their own memory {}: beside pulling it changes by {:+.1} %.",
                verdict(gains),
                -gains
            ),
            format!(
                "Disaggregation {}: {apart} requests in time, {best} for the best of as many coupled instances ({name}).",
                verdict(more)
            ),
        ]
    }

    /// The part of the report about this.
    pub(super) fn section(&self) -> Section {
        let series = ["DRAM", "SSD"].map(|memory| Series {
            name: memory.to_owned(),
            points: self
                .gains
                .iter()
                .filter(|gain| gain.memory == memory)
                .map(|gain| (gain.gib, gain.seconds))
                .collect(),
            is_bound: false,
        });
        let how = "Each point is a size of memory: how many seconds of prefill, and of reading from SSD, a request takes. Where \
                   a line is flat, more of that memory saves nothing.";
        Section {
            heading: "What would more memory, a pool or disaggregation gain?",
            text: [how.to_owned()].into_iter().chain(self.verdicts()).collect(),
            charts: vec![Chart {
                title: "Prefill by memory".to_owned(),
                x: Axis { label: "GiB in all prefill nodes", scale: Scale::Logarithmic },
                y: Axis { label: "seconds a request", scale: Scale::Linear },
                series: series.into(),
            }],
            tables: self.tables(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_core::sim::trace::{Builder, Synthetic};
    use millpond_core::time::{Duration, Instant};

    /// Two prompts of two blocks in turn: a cache of two blocks hits nothing, one of four hits all but the first of each.
    fn alternating() -> Trace {
        let mut builder = Builder::new();
        for turn in 0..10_u64 {
            let (at, first) = (Instant::ZERO + Duration::from_secs(400 * turn), 2 * (turn % 2));
            builder.push(at, 1_024, 1, &[first, first + 1]).unwrap();
        }
        builder.build().unwrap()
    }

    #[test]
    fn memory_saves_where_it_holds_what_comes_again_and_ssd_costs_its_reading() {
        let mut setup = Setup::default();
        (setup.prefill, setup.cache_blocks) = (1, Some(2));
        let found = gains(&alternating(), &setup);
        let whole = setup.profile.prefill.seconds(Work::of_prompt(1_024, 0));
        let of = |memory| found.iter().filter(move |gain| gain.memory == memory).collect::<Vec<_>>();
        let (dram, ssd) = (of("DRAM"), of("SSD"));
        assert!((dram[3].seconds - whole).abs() < 1e-9 && dram[3].saved.abs() < 1e-9, "{dram:?}");
        assert!(dram[4].seconds < 0.21 * whole && dram[4].saved > 0.0, "{dram:?}");
        let read = setup.profile.kv_len(1_024) as f64 / SSD_BYTES_PER_SECOND;
        assert!((ssd[0].seconds - dram[4].seconds - 0.8 * read).abs() < 1e-3, "{ssd:?}");
        assert!(ssd[1].saved.abs() < 1e-9, "there is nothing more to hold");
    }

    #[test]
    fn everything_tried_has_a_row_and_the_verdicts_follow_from_them() {
        let trace = Arc::new(Synthetic { requests: 40, ..Synthetic::default() }.trace());
        let plan = Plan {
            placements: vec![placement::Policy::Millpond],
            admissions: vec![admission::Policy::None],
            speeds: vec![1.0],
            seeds: 1,
            jitter: Duration::ZERO,
            details: super::super::cluster::Shown::Row,
            setup: Setup::default(),
        };
        let mut advice = futures::executor::block_on(run(&trace, &plan)).unwrap();
        assert_eq!(advice.rows().len(), DRAM_SIZES.len() + SSD_SIZES.len() + 7);
        advice.apart.iter_mut().for_each(|(_, found)| found.effective = 10);
        assert!(advice.verdicts()[2].starts_with("Disaggregation does not pay: 10 "), "{:?}", advice.verdicts());
        advice.apart[3].1.effective = 20;
        assert!(advice.verdicts()[2].starts_with("Disaggregation pays: 20 "), "{:?}", advice.verdicts());
    }
}
