//! `millpond replay`: what a trace finds in a cluster, by placement and admission, or in a single cache, by policy and capacity.
//!
//! Reads a trace, has `core::sim` replay it, and writes the figures: tables or JSON lines to standard output, a page with
//! plots to a file. It decides nothing itself.

mod advise;
mod cache_only;
mod chart;
mod cluster;
mod details;
pub(super) mod file;
mod knobs;
mod paper;
mod report;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::path::PathBuf;

use futures::StreamExt;
use futures::channel::mpsc;
use millpond_core::evict::Kind;
use millpond_core::sched::{admission, placement};
use millpond_core::sim::cache::Eviction;
use millpond_core::sim::trace::{BLOCK_TOKENS, Synthetic, Trace};
use millpond_core::sim::{Baseline, Setup};
use millpond_core::time::Duration;

use super::failure::Failure;
use super::progress::Bar;
use super::store_cmds::{Exit, Format, Output};
use chart::number;

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A JSON object a line: timestamp (ms), input_length, output_length (tokens), hash_ids (one for each 512 tokens). Or the word
    /// `synthetic`: the simulated workload of arXiv 2407.00079.
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// One cache, without time: what would be found in it?
    #[arg(long)]
    cache_only: bool,
    /// Which prefill node serves a request: random, round_robin, least_loaded, local_prefix, mooncake_fast25, mooncake_arxiv,
    /// millpond.
    #[arg(
        long,
        value_name = "POLICY",
        value_delimiter = ',',
        default_value = "millpond",
        conflicts_with = "cache_only"
    )]
    policy: Vec<placement::Policy>,
    /// Whether it is served: none, late, early, early_uniform, millpond.
    #[arg(
        long,
        value_name = "POLICY",
        value_delimiter = ',',
        default_value = "millpond",
        conflicts_with = "cache_only"
    )]
    admission: Vec<admission::Policy>,
    /// Prefill nodes.
    #[arg(long, value_name = "N", default_value_t = 8, conflicts_with = "cache_only")]
    prefill: usize,
    /// Decode nodes.
    #[arg(long, value_name = "M", default_value_t = 8, conflicts_with = "cache_only")]
    decode: usize,
    /// Instances that do both, instead of prefill and decode nodes.
    #[arg(long, value_name = "M", conflicts_with_all = ["cache_only", "prefill", "decode"])]
    coupled: Option<usize>,
    /// What coupled instances do beside running prompts whole.
    #[arg(long, value_enum, default_value_t = Beside::Nothing, requires = "coupled")]
    baseline: Beside,
    /// The pace, times the trace's.
    #[arg(long, value_name = "X", value_delimiter = ',', default_value = "1.0", value_parser = speed)]
    #[arg(conflicts_with = "cache_only")]
    speed: Vec<f64>,
    /// Replays with seeds 1 to this.
    #[arg(long, value_name = "K", default_value_t = 1, conflicts_with = "cache_only")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Arrivals are moved later by less than this, in milliseconds, by the seed: the clock of the published traces ticks every 3 s.
    #[arg(long, value_name = "MS", default_value_t = 3000, conflicts_with = "cache_only")]
    jitter: u32,
    /// Blocks that the cache holds, or that of each node; `inf` for all that there are.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = capacity)]
    cache_blocks: Vec<Capacity>,
    /// What goes when it is full: lru, fifo, lfu, sieve, s3-fifo, arc; with --cache-only also rhg-s (learns who comes back) and
    /// optimum (knows the future).
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    evict: Vec<Named>,
    /// What more DRAM and SSD would save, and whether a pool or disaggregation pays for this trace, at the first --speed.
    #[arg(long, conflicts_with_all = ["cache_only", "coupled"])]
    advise: bool,
    /// The published figures that can be computed from this trace, each beside its authors'; others are pending.
    #[arg(long, conflicts_with_all = ["cache_only", "coupled", "advise", "report", "knobs", "policy", "admission", "speed"])]
    paper: bool,
    /// Show everything that was counted: percentiles, deciles, tenants, regret, oscillation, who came back.
    #[arg(long, conflicts_with_all = ["cache_only", "advise", "paper"])]
    details: bool,
    /// Turns a knob of the simulator; may come several times. `--help` lists them.
    #[arg(long = "set", value_name = "NAME=VALUE", long_help = knobs::help(), conflicts_with = "cache_only")]
    knobs: Vec<String>,
    /// What nodes cost, from a TOML file: block_tokens, kv_bytes_per_token, cache_blocks, decode_tokens_max; prefill.fixed_s, linear_s,
    /// quadratic_s; decode.fixed_s, per_request_s, per_token_s; link.bytes_per_second, latency_s.
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["cache_only", "paper"])]
    profile: Option<PathBuf>,
    /// Write a page with plots, for a browser, here.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// In the place of a trace's path.
const SYNTHETIC: &str = "synthetic";

/// Blocks of a cache; `None`: without limit.
type Capacity = Option<NonZeroU32>;

fn capacity(text: &str) -> Result<Capacity, String> {
    match text.parse() {
        Ok(blocks) => Ok(Some(blocks)),
        Err(_) if text == "inf" => Ok(None),
        Err(_) => Err(format!("{text:?} is no number of blocks from 1 to {}, nor inf", u32::MAX)),
    }
}

/// Blocks of the tables in the reference.
const CAPACITIES: [u32; 8] = [1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000];

fn speed(text: &str) -> Result<f64, String> {
    let speed = text.parse().ok().filter(|speed: &f64| speed.is_finite() && *speed > 0.0);
    speed.ok_or_else(|| format!("{text:?} is no number above 0"))
}

/// What a coupled instance does beside running prompts whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Beside {
    /// Nothing.
    Nothing,
    /// It keeps the blocks of prompts and reuses them.
    PrefixCaching,
    /// It runs a chunk of a prompt along with each decode step.
    ChunkedPrefill,
}

/// A policy by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Named(Eviction);

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name())
    }
}

impl std::str::FromStr for Named {
    type Err = millpond_core::sim::cache::UnknownEviction;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        name.parse().map(Self)
    }
}

pub(super) async fn run(args: Args, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let trace = std::sync::Arc::new(args.read()?);
    let facts = Facts::new(&args.trace.display().to_string(), &trace);
    if output.format == Format::Text {
        output.line(&format!("{facts}\n"), serde_json::Value::Null)?;
    }
    if args.paper {
        paper::run(&trace, args.seeds, Duration::from_millis(args.jitter.into())).await?.write(output)?;
        return Ok(Exit::Done);
    }
    let sections = if args.cache_only {
        let table = cache_only::run(&trace, &args.evictions(), &args.capacities()).await?;
        table.write(output)?;
        vec![table.section()]
    } else if args.advise {
        let advice = advise::run(&trace, &args.plan()?).await?;
        advice.write(output)?;
        vec![advice.section()]
    } else {
        let runs = cluster::run(&trace, &args.plan()?).await?;
        runs.write(output)?;
        let mut sections = runs.sections();
        if args.report.is_some() {
            let (all, listed) = (Eviction::ALL.map(Named), CAPACITIES.map(NonZeroU32::new));
            sections.push(cache_only::run(&trace, &all, &listed).await?.section());
        }
        sections
    };
    if let Some(path) = args.report {
        let page = report::page(&facts, &sections);
        std::fs::write(&path, page).map_err(Failure::system(path.display().to_string()))?;
        eprintln!("written: {}", path.display());
    }
    Ok(Exit::Done)
}

impl Args {
    fn capacities(&self) -> Vec<Capacity> {
        let listed = || CAPACITIES.into_iter().map(NonZeroU32::new).chain([None]).collect();
        if self.cache_blocks.is_empty() { listed() } else { self.cache_blocks.clone() }
    }

    fn evictions(&self) -> Vec<Named> {
        if self.evict.is_empty() { Eviction::ALL.map(Named).into() } else { self.evict.clone() }
    }

    /// The trace, or the workload.
    fn read(&self) -> Result<Trace, Failure> {
        if self.trace.as_os_str() == SYNTHETIC {
            return Ok(self.panel()?.workload.trace());
        }
        file::read(&self.trace).map_err(|error| Failure::Said(error.to_string()))
    }

    /// All knobs as they were turned.
    fn panel(&self) -> Result<knobs::Panel, Failure> {
        let mut panel = knobs::Panel { setup: Setup::default(), workload: Synthetic::default() };
        if let Some(path) = &self.profile {
            panel.setup.profile = knobs::profile(path)?;
            panel.setup.cache_blocks = Some(panel.setup.profile.cache_blocks);
        }
        self.knobs.iter().try_for_each(|setting| knobs::turn(&mut panel, setting))?;
        Ok(panel)
    }

    fn plan(&self) -> Result<cluster::Plan, Failure> {
        let mut setup = self.panel()?.setup;
        (setup.prefill, setup.decode) = (self.prefill, self.decode);
        if let Some(coupled) = self.coupled {
            (setup.prefill, setup.decode, setup.coupled) = (0, 0, coupled);
        }
        setup.baseline = match self.baseline {
            Beside::Nothing => Baseline::Plain,
            Beside::PrefixCaching => Baseline::PrefixCaching,
            Beside::ChunkedPrefill => Baseline::ChunkedPrefill,
        };
        let several =
            |what: &str| Failure::Usage(format!("a cluster has one {what}; only --cache-only compares several"));
        match self.cache_blocks[..] {
            [] => {}
            [blocks] => setup.cache_blocks = blocks.map(u32::from),
            _ => return Err(several("--cache-blocks")),
        }
        match self.evict[..] {
            [] => {}
            [Named(Eviction::Kind(kind))] => setup.evict = kind,
            [Named(policy)] => {
                let known = Kind::ALL.map(Kind::name).join(", ");
                let text =
                    format!("{} is for --cache-only; the caches of a cluster take one of {known}", policy.name());
                return Err(Failure::Usage(text));
            }
            _ => return Err(several("--evict")),
        }
        Ok(cluster::Plan {
            placements: self.policy.clone(),
            admissions: self.admission.clone(),
            speeds: self.speed.clone(),
            seeds: self.seeds,
            jitter: Duration::from_millis(self.jitter.into()),
            details: if self.details { cluster::Shown::Details } else { cluster::Shown::Row },
            setup,
        })
    }
}

/// Does all of `jobs`, as many at once as there are cores, under a progress bar; what each came to, in their order.
async fn in_parallel<T: Send + 'static>(jobs: Vec<impl FnOnce() -> T + Send + 'static>) -> Result<Vec<T>, Failure> {
    let (done, mut results) = mpsc::unbounded();
    let bar = Bar::new(jobs.len());
    let mut found: Vec<Option<T>> = jobs.iter().map(|_| None).collect();
    for (at, job) in jobs.into_iter().enumerate() {
        let done = done.clone();
        // Nobody listens any more once the command was interrupted.
        rayon::spawn(move || drop(done.unbounded_send((at, job()))));
    }
    drop(done);
    while let Some((at, result)) = results.next().await {
        found[at] = Some(result);
        bar.step();
    }
    let found: Option<Vec<T>> = found.into_iter().collect();
    found.ok_or_else(|| Failure::Said("a replay ended without its result; this is our bug".to_owned()))
}

/// Four decimals: enough to compare, few enough to read.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// What a trace is made of.
#[derive(Clone, Debug)]
struct Facts {
    name: String,
    requests: usize,
    seconds: f64,
    input_mean: f64,
    output_mean: f64,
    blocks: usize,
    distinct: u32,
}

impl Facts {
    fn new(name: &str, trace: &Trace) -> Self {
        let requests = trace.requests();
        let mean = |tokens: fn(&millpond_core::sim::trace::Request) -> u32| {
            requests.iter().map(|request| f64::from(tokens(request))).sum::<f64>() / requests.len().max(1) as f64
        };
        Self {
            name: name.to_owned(),
            requests: requests.len(),
            seconds: trace.span().as_secs_f64(),
            input_mean: mean(|request| request.input_tokens),
            output_mean: mean(|request| request.output_tokens),
            blocks: requests.iter().map(|request| trace.blocks_of(request).len()).sum(),
            distinct: trace.distinct_blocks(),
        }
    }
}

impl std::fmt::Display for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, requests, seconds, input_mean, output_mean, blocks, distinct } = self;
        let [requests, blocks] = [requests, blocks].map(|count| number(*count as f64));
        let [seconds, input, output] = [seconds, input_mean, output_mean].map(|value| number(value.round()));
        let distinct = number(f64::from(*distinct));
        write!(
            f,
            "{name}: {requests} requests in {seconds} s; on average {input} tokens in, {output} out; \
             {blocks} blocks of {BLOCK_TOKENS} tokens, {distinct} of them different"
        )
    }
}
