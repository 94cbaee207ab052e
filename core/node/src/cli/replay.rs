//! `millpond replay`: what a trace finds in a cache, by policy and capacity.
//!
//! Reads a trace, has `core::sim` replay it, and writes the figures: tables or JSON lines to standard output, a page with
//! plots to a file. It decides nothing itself.

mod cache_only;
mod chart;
mod file;
mod report;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::path::PathBuf;

use millpond_core::sim::cache::Eviction;
use millpond_core::sim::trace::{BLOCK_TOKENS, Trace};

use super::failure::Failure;
use super::store_cmds::{Exit, Format, Output};
use chart::number;

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A JSON object a line: timestamp (ms), input_length, output_length (tokens), hash_ids (one for each 512 tokens).
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// One cache, without time: what would be found in it?
    #[arg(long, required = true)]
    cache_only: bool,
    /// Blocks that the cache holds; `inf` for all that there are.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = capacity)]
    #[arg(default_value = "1000,3000,5000,10000,20000,30000,50000,100000,inf")]
    cache_blocks: Vec<Capacity>,
    /// What goes when it is full: lru, fifo, lfu, sieve, s3-fifo, arc, rhg-s (learns who comes back), or optimum (knows the
    /// future).
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    #[arg(default_values_t = Eviction::ALL.map(Named), hide_default_value = true)]
    evict: Vec<Named>,
    /// Write a page with plots, for a browser, here.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// Blocks of a cache; `None`: without limit.
type Capacity = Option<NonZeroU32>;

fn capacity(text: &str) -> Result<Capacity, String> {
    match text.parse() {
        Ok(blocks) => Ok(Some(blocks)),
        Err(_) if text == "inf" => Ok(None),
        Err(_) => Err(format!("{text:?} is no number of blocks from 1 to {}, nor inf", u32::MAX)),
    }
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
    let trace = std::sync::Arc::new(file::read(&args.trace).map_err(|error| Failure::Said(error.to_string()))?);
    let facts = Facts::new(&args.trace.display().to_string(), &trace);
    if output.format == Format::Text {
        output.line(&format!("{facts}\n"), serde_json::Value::Null)?;
    }
    debug_assert!(args.cache_only, "the only way so far");
    let table = cache_only::run(&trace, &args.evict, &args.cache_blocks).await?;
    table.write(output)?;
    if let Some(path) = args.report {
        let page = report::page(&facts, &[table.section()]);
        std::fs::write(&path, page).map_err(Failure::system(path.display().to_string()))?;
        eprintln!("written: {}", path.display());
    }
    Ok(Exit::Done)
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
