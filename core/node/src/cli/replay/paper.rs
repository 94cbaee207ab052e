//! `--paper`: the published figures of FAST'25 and arXiv 2407.00079 that can be computed, each beside its authors'.
//!
//! What the authors measured on traces that this one is not says so in its row; what cannot be computed from a trace at hand is
//! pending. Nothing here is fitted to the authors' figures but the default profile, and that to Figures 14 and 15b only.

use std::sync::Arc;

use millpond_core::evict::Kind;
use millpond_core::sched::admission::Policy as Admission;
use millpond_core::sched::cost::{Profile, Work};
use millpond_core::sched::placement::Policy as Placement;
use millpond_core::sim::cache::{Eviction, replay};
use millpond_core::sim::trace::{BLOCK_TOKENS, Synthetic, Trace};
use millpond_core::sim::{Baseline, Fate, Outcome, Served, Setup, run as simulate};
use millpond_core::time::Duration;
use serde_json::{Value as Json, json};

use super::report::Table;
use super::{in_parallel, rounded};
use crate::cli::failure::Failure;
use crate::cli::store_cmds::{Format, Output};

/// The rate at which nobody waits, in requests a second: what deadlines are counted from.
const LIGHTEST: f64 = 0.005;

/// A figure.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    source: &'static str,
    what: String,
    paper: Option<f64>,
    /// `None`: pending.
    ours: Option<f64>,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Paper(Vec<Row>);

/// The trace, and how it is replayed.
#[derive(Clone)]
struct Replays {
    trace: Arc<Trace>,
    seeds: u64,
    jitter: Duration,
}

impl Row {
    /// Why our figure is more than 20 % off; `None` if it is not.
    fn why_off(&self) -> Option<&'static str> {
        let (ours, paper) = (self.ours?, self.paper?);
        if (ours - paper).abs() <= 0.2 * paper.abs() {
            return None;
        }
        Some(match self.source {
            "FAST'25 Figure 1" => {
                "our coupled instances have a router that places by prefix and load together, a chunk costs them no more than its \
                 tokens, and our decode steps have a thinner tail than the published ones"
            }
            "FAST'25 Figure 5" => "their split of nodes is not published, and seconds depend on it; ratios do less",
            "FAST'25 Figure 9" => {
                "this trace counts whole blocks of 512 tokens; at the smallest capacities a prompt does not fit, and it \
                 depends on which of its blocks stay"
            }
            "FAST'25 Figure 10" => {
                "our router of local caches knows what each node has and sends prompts there; theirs finds what a single \
                 cache of that size finds"
            }
            "FAST'25 Figure 15, their trace" => {
                "answers are 343 tokens long here and 149 in their trace: few decode nodes have batches too large for 100 ms, and \
                 fewer prefill nodes are enough"
            }
            "arXiv Table 3, their trace" => {
                "another trace; on this one decode bounds what is served at 2x, whatever is refused first"
            }
            CLAIM_75 => {
                "another trace, and what is said of Figure 1; plain instances without reuse are nearest to what the authors compare with"
            }
            CLAIM_525 => {
                "theirs is the most over lengths and splits, by a system that works on one request at a time; ours are all, and \
                 only plain instances, which stall all answers for a whole long prompt, come near it"
            }
            _ => "not explained",
        })
    }
}

type Job = Box<dyn FnOnce() -> Vec<Row> + Send>;

/// Computes the figures, as many at once as there are cores.
pub(super) async fn run(trace: &Arc<Trace>, seeds: u64, jitter: Duration) -> Result<Paper, Failure> {
    let replays = Replays { trace: Arc::clone(trace), seeds, jitter };
    let each = |rows: fn(&Replays) -> Vec<Row>| {
        let replays = replays.clone();
        Box::new(move || rows(&replays)) as Job
    };
    let mut jobs = vec![each(prefill), each(capacity), each(local), each(placement), each(overload), each(splits)];
    jobs.extend([each(deadlines), each(twenty)]);
    jobs.extend([Box::new(bars) as Job, Box::new(long_contexts) as Job]);
    jobs.extend([16, 128].map(|kibi| Box::new(move || one_length(kibi)) as Job));
    jobs.push(Box::new(pending));
    Ok(Paper(in_parallel(jobs).await?.into_iter().flatten().collect()))
}

fn row(source: &'static str, what: impl Into<String>, paper: f64, ours: f64) -> Row {
    Row { source, what: what.into(), paper: Some(paper), ours: Some(ours) }
}

impl Replays {
    /// Means over the seeds of what is read off each run.
    fn means<const N: usize>(&self, setup: &Setup, speed: f64, read: impl Fn(&Outcome) -> [f64; N]) -> [f64; N] {
        let mut sums = [0.0; N];
        for seed in 1..=self.seeds {
            let mut setup = setup.clone();
            setup.seed = seed;
            let trace = (*self.trace).clone();
            let trace = if self.jitter > Duration::ZERO { trace.with_jitter(self.jitter, seed) } else { trace };
            let found = read(&simulate(&trace.at_speed(speed), &setup).expect("clusters of the papers are complete"));
            sums.iter_mut().zip(found).for_each(|(sum, value)| *sum += value);
        }
        sums.map(|sum| sum / self.seeds as f64)
    }
}

/// Prefill and decode nodes that admit everybody.
fn apart(prefill: usize, decode: usize) -> Setup {
    let mut setup = Setup::default();
    (setup.prefill, setup.decode, setup.admission.policy) = (prefill, decode, Admission::None);
    setup
}

fn coupled(instances: usize, baseline: Baseline) -> Setup {
    let mut setup = apart(0, 0);
    (setup.coupled, setup.baseline) = (instances, baseline);
    setup
}

fn prefill(replays: &Replays) -> Vec<Row> {
    let (trace, model) = (&replays.trace, Profile::default().prefill);
    let seconds = |blocks| {
        let mut sum = 0.0;
        replay(trace, Eviction::Optimum, blocks, |request, hit| {
            sum += model.seconds(Work::of_prompt(request.input_tokens, hit));
        });
        sum / trace.requests().len().max(1) as f64
    };
    let (without, with) = (seconds(0), seconds(trace.distinct_blocks()));
    let source = "FAST'25 Figure 8";
    vec![
        row(source, "prefill without a cache, s a request", 1.66, without),
        row(source, "prefill with an endless cache, s a request", 1.06, with),
        row(source, "their ratio", 1.56, without / with),
    ]
}

fn bars() -> Vec<Row> {
    let bars = [(8_192, 1.0), (16_384, 2.05), (32_768, 4.5), (65_536, 10.5), (131_072, 27.5)];
    let seconds = |tokens| Profile::default().prefill.seconds(Work::of_prompt(tokens, 0));
    let each = bars.map(|(tokens, paper)| {
        row("FAST'25 Figure 14a", format!("prefill of {} Ki tokens, s", tokens >> 10), paper, seconds(tokens))
    });
    each.into()
}

fn capacity(replays: &Replays) -> Vec<Row> {
    let points =
        [(1, 4.5), (10, 7.5), (100, 8.7), (200, 12.0), (300, 16.4), (1_000, 32.5), (5_000, 39.8), (10_000, 40.0)];
    let each = points.map(|(ten_thousands, paper)| {
        let blocks = ten_thousands * 10_000 / BLOCK_TOKENS;
        let hits = replay(&replays.trace, Eviction::Kind(Kind::Lru), blocks.max(1), |_, _| {});
        let what = format!("hits of LRU with {:.2} million tokens, % of tokens", f64::from(ten_thousands) / 100.0);
        row("FAST'25 Figure 9", what, paper, hits.tokens_pct())
    });
    each.into()
}

fn local(replays: &Replays) -> Vec<Row> {
    let found = |policy| {
        let mut setup = apart(10, 10);
        setup.placement.policy = policy;
        replays.means(&setup, 1.0, |found| [found.hit_tokens_pct(), found.prefill_mean()])
    };
    let ([own, own_s], [all, all_s]) = (found(Placement::LocalPrefix), found(Placement::MooncakeFast25));
    let source = "FAST'25 Figure 10";
    vec![
        row(source, "10 prefill nodes, hits with local caches, % of tokens", 17.0, own),
        row(source, "the same, caches that all pull from", 38.0, all),
        row(source, "prefill with local caches, s a request", 1.38, own_s),
        row(source, "the same, caches that all pull from", 1.05, all_s),
    ]
}

/// Authors' successive ratios of mean times to the first token.
const RATIOS: [f64; 3] = [19.65 / 5.27, 5.27 / 3.58, 3.58 / 3.07];

fn placement(replays: &Replays) -> Vec<Row> {
    let policies = [Placement::Random, Placement::LeastLoaded, Placement::LocalPrefix, Placement::MooncakeFast25];
    let of = |prefill: usize| {
        let mean = |policy| {
            let mut setup = apart(prefill, 16 - prefill);
            setup.placement.policy = policy;
            replays.means(&setup, 1.0, |found| [found.ttft_mean()])[0]
        };
        (prefill, policies.map(mean))
    };
    let ratios = |means: &[f64; 4]| [means[0] / means[1], means[1] / means[2], means[2] / means[3]];
    let off = |means: &[f64; 4]| {
        let each = ratios(means).into_iter().zip(RATIOS).map(|(ours, paper)| (ours / paper).ln().abs());
        each.fold(0.0, f64::max)
    };
    let all = [6, 7, 8, 9, 10].map(of);
    let best = all.iter().min_by(|a, b| off(&a.1).total_cmp(&off(&b.1)));
    let Some((prefill, means)) = best else { return Vec::new() };
    let source = "FAST'25 Figure 5";
    let names = ["random over load", "load over local caches", "local over all caches"];
    let each = names.into_iter().zip(RATIOS).zip(ratios(means));
    let mut rows: Vec<Row> = each
        .map(|((name, paper), ours)| {
            row(source, format!("mean TTFT, {name}, with {prefill} of 16 for prefill"), paper, ours)
        })
        .collect();
    for ((policy, paper), ours) in policies.iter().zip([19.65, 5.27, 3.58, 3.07]).zip(means) {
        rows.push(row(source, format!("mean TTFT, {}, s (their split is not published)", policy.name()), paper, *ours));
    }
    rows
}

fn overload(replays: &Replays) -> Vec<Row> {
    let refused = |policy| {
        let mut setup = apart(8, 8);
        (setup.placement.policy, setup.admission.policy) = (Placement::MooncakeArxiv, policy);
        let count = |found: &Outcome| (found.count(Fate::RejectedEarly) + found.count(Fate::RejectedLate)) as f64;
        replays.means(&setup, 2.0, |found| [count(found)])[0]
    };
    let [late, early, uniform] = [Admission::Late, Admission::Early, Admission::EarlyUniform].map(refused);
    // Where nobody is refused there is nothing to compare.
    let over_late = |refused: f64| if late > 0.0 { 100.0 * (refused / late - 1.0) } else { 0.0 };
    let source = "arXiv Table 3, their trace";
    vec![
        row(source, "refused at 2x: late", 4_183.0, late),
        row(source, "refused at 2x: early over late, %", -9.8, over_late(early)),
        row(source, "refused at 2x: early_uniform over late, %", -14.2, over_late(uniform)),
    ]
}

fn splits(replays: &Replays) -> Vec<Row> {
    let papers = [(5, 77.7), (6, 97.2), (7, 99.1), (8, 99.0), (9, 99.2), (10, 98.4), (11, 86.1)];
    let found = papers.map(|(prefill, _)| {
        let mut setup = apart(prefill, 16 - prefill);
        setup.slo.ttft = Duration::from_secs(10);
        replays.means(&setup, 1.0, |found| [100.0 * found.effective() as f64 / found.served.len().max(1) as f64])[0]
    });
    // The fewest prefill nodes with which nearly as many are served as with the best number.
    let knee = |shares: [f64; 7]| {
        let best = shares.into_iter().fold(0.0, f64::max);
        shares.iter().zip(5..).find(|(share, _)| **share >= best - 3.0).map_or(0.0, |(_, prefill)| f64::from(prefill))
    };
    let source = "FAST'25 Figure 15, their trace";
    let each = papers.iter().zip(found).map(|(&(prefill, paper), ours)| {
        row(source, format!("in 10 s and 100 ms with {prefill} + {}, %", 16 - prefill), paper, ours)
    });
    let knees = row(
        source,
        "the knee: prefill nodes within 3 points of the best",
        knee(papers.map(|(_, share)| share)),
        knee(found),
    );
    each.chain([knees]).collect()
}

/// Shares of the requests that were answered in 30 s and so many milliseconds, in per cent.
fn in_time(found: &Outcome) -> [f64; 3] {
    [100, 200, 300].map(|millis| {
        let slo = Duration::from_millis(millis);
        let is = |one: &&Served| one.ttft <= Duration::from_secs(30) && one.tbt <= slo;
        100.0 * found.served.iter().filter(is).count() as f64 / found.served.len().max(1) as f64
    })
}

/// Coupled instances: what they are, and in which setup.
fn baselines(instances: usize) -> [(&'static str, Setup); 4] {
    let mut short = coupled(instances, Baseline::ChunkedPrefill);
    short.chunk = 512;
    [
        ("plain", coupled(instances, Baseline::Plain)),
        ("prefix caching", coupled(instances, Baseline::PrefixCaching)),
        ("chunks of 2,048", coupled(instances, Baseline::ChunkedPrefill)),
        ("chunks of 512", short),
    ]
}

fn deadlines(replays: &Replays) -> Vec<Row> {
    let source = "FAST'25 Figure 1";
    let ours = replays.means(&apart(8, 8), 1.0, in_time);
    let all = baselines(16).map(|(name, setup)| (name, replays.means(&setup, 1.0, in_time)));
    let papers = [[16.0, 39.0, 63.0], [15.5, 35.0, 56.0], [9.5, 29.0, 53.0], [9.5, 29.0, 53.0]];
    let mut rows = Vec::new();
    for (at, millis) in [100, 200, 300].into_iter().enumerate() {
        rows.push(row(source, format!("within {millis} ms, 8 + 8, %"), [96.0, 100.0, 100.0][at], ours[at]));
        for ((name, shares), paper) in all.iter().zip(papers) {
            rows.push(row(source, format!("within {millis} ms, 16 coupled, {name}, %"), paper[at], shares[at]));
        }
        let gain = |best: f64| 100.0 * (ours[at] / best - 1.0);
        let best = |of: &[(&str, [f64; 3])]| of.iter().map(|(_, shares)| shares[at]).fold(f64::MIN_POSITIVE, f64::max);
        let paper = [498.0, 157.0, 59.0][at];
        rows.push(row(
            source,
            format!("{millis} ms: 8 + 8 over the best with whole prompts, %"),
            paper,
            gain(best(&all[..2])),
        ));
        rows.push(row(source, format!("{millis} ms: 8 + 8 over the best of all four, %"), paper, gain(best(&all))));
    }
    for (name, shares) in &all {
        let gain = 100.0 * (ours[0] / shares[0] - 1.0);
        rows.push(row(
            CLAIM_75,
            format!("100 ms: 8 + 8 over 16 coupled, {name}, % (theirs: 10 + 10 over 20)"),
            75.0,
            gain,
        ));
    }
    rows
}

const CLAIM_75: &str = "arXiv, 75 %, their trace";

fn twenty(replays: &Replays) -> Vec<Row> {
    let source = CLAIM_75;
    let ours = replays.means(&apart(10, 10), 1.0, in_time)[0];
    let mut rows = vec![row(source, "within 100 ms, 10 + 10, %", 100.0, ours)];
    for (name, setup) in baselines(20) {
        let share = replays.means(&setup, 1.0, in_time)[0];
        rows.push(row(source, format!("within 100 ms, 20 coupled, {name}, %"), 57.0, share));
        rows.push(row(source, format!("10 + 10 over 20 coupled, {name}, %"), 75.0, 100.0 * (ours / share - 1.0)));
    }
    rows
}

/// 90th percentiles of a simulated workload at a rate: seconds to the first token and between tokens.
fn p90s(workload: &Synthetic, setup: &Setup, rate: f64) -> [f64; 2] {
    let trace = Synthetic { rate, ..workload.clone() }.trace();
    let found = simulate(&trace, setup).expect("clusters of the papers are complete");
    [found.ttft_percentile(90.0), found.tbt_percentile(90.0)].map(Duration::as_secs_f64)
}

/// The highest rate at which both percentiles are within 10 and 5 times those of the lightest load, to 2 %.
fn most(workload: &Synthetic, setup: &Setup) -> f64 {
    let [ttft, tbt] = p90s(workload, setup, LIGHTEST);
    let holds = |rate| {
        let found = p90s(workload, setup, rate);
        found[0] <= 10.0 * ttft && found[1] <= 5.0 * tbt
    };
    let (mut low, mut high) = (LIGHTEST, 2.0);
    while high / low > 1.02 {
        let middle = (low * high).sqrt();
        if holds(middle) { low = middle } else { high = middle }
    }
    low
}

const CLAIM_525: &str = "arXiv, 50 to 525 %, simulated data";

/// The same with prompts of one length: the shortest and the longest that the authors have; their range is over lengths and splits.
fn one_length(kibi: u32) -> Vec<Row> {
    let mut one = coupled(4, Baseline::Plain);
    one.together = Some(1);
    let workload = Synthetic { input_tokens: kibi << 10..=kibi << 10, ..Synthetic::default() };
    let rates = [("3 + 1", apart(3, 1)), ("2 + 2", apart(2, 2))].map(|(name, setup)| (name, most(&workload, &setup)));
    let mut rows = Vec::new();
    for (name, setup) in [("plain", coupled(4, Baseline::Plain)), ("one request at a time", one)] {
        let rate = most(&workload, &setup);
        for (split, ours) in rates {
            let what =
                format!("{kibi} Ki tokens: {split} ({ours:.3}/s) over 4 coupled, {name} ({rate:.3}/s), %, at most");
            rows.push(row(CLAIM_525, what, 525.0, 100.0 * (ours / rate - 1.0)));
        }
    }
    rows
}

fn long_contexts() -> Vec<Row> {
    let source = CLAIM_525;
    let mut one = coupled(4, Baseline::Plain);
    one.together = Some(1);
    let mut one_caching = coupled(4, Baseline::PrefixCaching);
    one_caching.together = Some(1);
    let coupled = baselines(4)
        .into_iter()
        .chain([("one request at a time", one), ("one at a time, prefix caching", one_caching)]);
    let workload = Synthetic::default();
    let apart = [("3 + 1", most(&workload, &apart(3, 1))), ("2 + 2", most(&workload, &apart(2, 2)))];
    let mut rows = Vec::new();
    for (name, setup) in coupled {
        let rate = most(&workload, &setup);
        for (split, ours) in apart {
            let what = format!("{split} ({ours:.3}/s) over 4 coupled, {name} ({rate:.3}/s), %, at most");
            rows.push(row(source, what, 525.0, 100.0 * (ours / rate - 1.0)));
        }
    }
    rows
}

fn pending() -> Vec<Row> {
    let row = |source, what: &str, paper| Row { source, what: what.to_owned(), paper: Some(paper), ours: None };
    vec![
        row("FAST'25 Figure 6", "8 + 8 over 16 coupled at 100 ms on tool&agent, %", 64.0),
        row("FAST'25 Figure 7", "8 + 8 over 16 coupled at 100 ms on their synthetic trace, %", 62.0),
        row("arXiv Table 1", "hits of LRU with 10,000 blocks on their trace, %", 40.0),
        row("arXiv Figure 8", "mean TTFT, KVCache-centric, on their trace, s", 6.26),
    ]
}

impl Paper {
    /// Writes a table, or a line of JSON for each figure.
    pub(super) fn write(&self, output: &mut Output<'_>) -> Result<(), Failure> {
        if output.format == Format::Text {
            output.line(&self.table().text(), Json::Null)?;
            let mut lines = vec!["more than 20 % off, because:".to_owned()];
            for row in &self.0 {
                let line = row.why_off().map(|why| format!("  {}: {why}", row.source));
                lines.extend(line.filter(|line| !lines.contains(line)));
            }
            return Ok(output.line(&lines.join("\n"), Json::Null)?);
        }
        for row in &self.0 {
            let value = json!({
                "figure": row.source, "what": row.what, "authors": row.paper, "ours": row.ours.map(rounded),
                "pending": row.ours.is_none(), "why_off": row.why_off(),
            });
            output.line("", value)?;
        }
        Ok(())
    }

    fn table(&self) -> Table {
        let shown = |value: Option<f64>| match value {
            Some(value) if value.abs() >= 1_000.0 => format!("{value:.0}"),
            Some(value) => format!("{value:.2}"),
            None => "pending".to_owned(),
        };
        let rows = self.0.iter().map(|row| {
            let ratio = row.ours.zip(row.paper).map_or(String::new(), |(ours, paper)| format!("{:.2}", ours / paper));
            vec![format!("{}: {}", row.source, row.what), shown(row.paper), shown(row.ours), ratio]
        });
        let head = ["figure", "its authors'", "ours", "ours / theirs"].map(str::to_owned);
        Table {
            title: "published figures; pending: their traces are not here".to_owned(),
            head: head.into(),
            rows: rows.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_row_and_what_needs_another_trace_is_pending() {
        let trace = Arc::new(Synthetic { requests: 30, input_tokens: 600..=6_000, ..Synthetic::default() }.trace());
        let paper = futures::executor::block_on(run(&trace, 1, Duration::ZERO)).unwrap();
        let count = |source: &str| paper.0.iter().filter(|row| row.source.starts_with(source)).count();
        let sources =
            ["FAST'25 Figure 1", "FAST'25 Figure 5", "FAST'25 Figure 8", "FAST'25 Figure 9", "FAST'25 Figure 10"];
        assert_eq!(sources.map(count), [21 + 4 + 5 + 8, 7, 3, 8, 4]);
        assert_eq!(["FAST'25 Figure 15", "arXiv, 75 %", "arXiv, 50", "arXiv Table 3"].map(count), [8, 13, 20, 3]);
        assert_eq!(paper.0.iter().filter(|row| row.ours.is_none()).count(), 4);
        assert!(paper.0.iter().all(|row| row.ours.is_none_or(f64::is_finite)), "{:#?}", paper.0);
        let text = paper.table().text();
        assert!(text.contains("pending") && text.contains("its authors'"), "{text}");
    }

    #[test]
    #[ignore = "takes a minute; `replay TRACE --paper` prints the same"]
    fn the_order_of_the_published_systems_is_ours_too() {
        let Some(trace) = super::super::tests::conversation() else { return };
        let paper = futures::executor::block_on(run(&Arc::new(trace), 1, Duration::from_secs(3))).unwrap();
        eprintln!("{}", paper.table().text());
        let gains = |which: &str| {
            let rows = paper.0.iter().filter(|row| row.source == "FAST'25 Figure 1" && row.what.ends_with(which));
            rows.map(|row| row.ours.unwrap()).collect::<Vec<_>>()
        };
        let whole = gains("over the best with whole prompts, %");
        assert!(whole.len() == 3 && whole.is_sorted_by(|a, b| a > b) && whole[2] > 0.0, "{whole:?}");
        assert!(gains("over the best of all four, %").iter().all(|gain| *gain > -1.0));
    }

    #[test]
    fn the_highest_rate_is_the_one_at_which_the_deadlines_still_hold() {
        let setup = apart(3, 1);
        let workload = Synthetic::default();
        let rate = most(&workload, &setup);
        let [ttft, tbt] = p90s(&workload, &setup, LIGHTEST);
        let over = p90s(&workload, &setup, rate * 1.05);
        assert!(over[0] > 10.0 * ttft || over[1] > 5.0 * tbt, "{rate}: {over:?}");
    }
}
