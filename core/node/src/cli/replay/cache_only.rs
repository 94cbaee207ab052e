//! `--cache-only`: every policy with every capacity, side by side.

use std::sync::Arc;

use millpond_core::sched::cost::{Profile, Work};
use millpond_core::sim::cache::{Eviction, Hits, replay};
use millpond_core::sim::trace::Trace;
use serde_json::json;

use super::chart::{Axis, Chart, Scale, Series, number};
use super::report::{Section, Table};
use super::{Capacity, Named, in_parallel, rounded};
use crate::cli::failure::Failure;
use crate::cli::store_cmds::{Format, Output};

/// What one policy found with one capacity.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    hits: Hits,
    /// Seconds of prefill for a request, on average.
    prefill_s: f64,
}

/// All policies and capacities.
#[derive(Debug)]
pub(super) struct Cells {
    policies: Vec<Eviction>,
    capacities: Vec<Capacity>,
    /// By policy, then by capacity.
    cells: Vec<Cell>,
    uncached_prefill_s: f64,
}

/// Replays the trace with each policy and capacity, as many at once as there are cores.
pub(super) async fn run(trace: &Arc<Trace>, policies: &[Named], capacities: &[Capacity]) -> Result<Cells, Failure> {
    let policies: Vec<Eviction> = policies.iter().map(|named| named.0).collect();
    let each = policies.iter().flat_map(|policy| capacities.iter().map(move |capacity| (*policy, *capacity)));
    let each = each.map(|(policy, capacity)| {
        let trace = Arc::clone(trace);
        move || cell(&trace, policy, capacity)
    });
    let cells = in_parallel(each.collect()).await?;
    let (requests, prefill) = (trace.requests(), Profile::default().prefill);
    let uncached =
        requests.iter().map(|request| prefill.seconds(Work::of_prompt(request.input_tokens, 0))).sum::<f64>();
    let uncached_prefill_s = uncached / requests.len().max(1) as f64;
    Ok(Cells { policies, capacities: capacities.to_vec(), cells, uncached_prefill_s })
}

fn cell(trace: &Trace, policy: Eviction, capacity: Capacity) -> Cell {
    let (blocks, prefill) = (capacity.map_or(trace.distinct_blocks(), u32::from), Profile::default().prefill);
    let mut prefill_s = 0.0;
    let hits = replay(trace, policy, blocks, |request, hit_tokens| {
        prefill_s += prefill.seconds(Work::of_prompt(request.input_tokens, hit_tokens));
    });
    Cell { hits, prefill_s: prefill_s / hits.requests.max(1) as f64 }
}

impl Cells {
    fn rows(&self) -> impl Iterator<Item = (Eviction, &[Cell])> {
        self.policies.iter().copied().zip(self.cells.chunks(self.capacities.len()))
    }

    /// Writes tables, or a line of JSON for each policy and capacity.
    pub(super) fn write(&self, output: &mut Output<'_>) -> Result<(), Failure> {
        if output.format == Format::Json {
            for (policy, cells) in self.rows() {
                for (capacity, Cell { hits, .. }) in self.capacities.iter().zip(cells) {
                    let row = json!({
                        "evict": policy.name(),
                        "cache_blocks": capacity.map(u32::from),
                        "requests": hits.requests,
                        "hit_blocks_pct": rounded(hits.blocks_pct()),
                        "hit_tokens_pct": rounded(hits.tokens_pct()),
                    });
                    output.line("", row)?;
                }
            }
            return Ok(());
        }
        for table in self.tables() {
            output.line(&table.text(), serde_json::Value::Null)?;
        }
        Ok(())
    }

    fn tables(&self) -> [Table; 3] {
        let head = || self.capacities.iter().map(|capacity| shown(*capacity));
        let table = |title: String, value: &dyn Fn(&Cell) -> String| Table {
            title,
            head: ["blocks in the cache".to_owned()].into_iter().chain(head()).collect(),
            rows: self
                .rows()
                .map(|(policy, cells)| [policy.name().to_owned()].into_iter().chain(cells.iter().map(value)).collect())
                .collect(),
        };
        let uncached = format!(
            "prefill, seconds a request, on a node of 8 A800 with LLaMA3-70B (without a cache {:.3})",
            self.uncached_prefill_s
        );
        [
            table("hits, % of blocks".to_owned(), &|cell| format!("{:.2}", cell.hits.blocks_pct())),
            table("hits, % of tokens".to_owned(), &|cell| format!("{:.2}", cell.hits.tokens_pct())),
            table(uncached, &|cell| format!("{:.3}", cell.prefill_s)),
        ]
    }

    /// The part of the report about this.
    pub(super) fn section(&self) -> Section {
        let points = |cells: &[Cell]| {
            let pairs = self.capacities.iter().zip(cells);
            pairs
                .filter_map(|(capacity, cell)| Some((f64::from(u32::from((*capacity)?)), cell.hits.blocks_pct())))
                .collect()
        };
        let series = self.rows().map(|(policy, cells)| Series {
            name: policy.name().to_owned(),
            points: points(cells),
            is_bound: policy == Eviction::Optimum,
        });
        let chart = Chart {
            title: "Hit rate by capacity".to_owned(),
            x: Axis { label: "blocks in the cache (512 tokens each)", scale: Scale::Logarithmic },
            y: Axis { label: "hits, % of blocks", scale: Scale::Linear },
            series: series.collect(),
        };
        let reach = self.cells.iter().map(|cell| cell.hits.blocks_pct()).fold(0.0, f64::max);
        Section {
            heading: "How much of the prompts would be found in a cache?",
            text: vec![
                "Every prompt is a chain of blocks of 512 tokens. If the first blocks of a prompt are in the cache, their KV \
                 cache need not be computed again. Each line is a policy: the rule that picks which block leaves a full \
                 cache. Higher is better; further right is more memory."
                    .to_owned(),
                format!(
                    "The dashed line, optimum, knows which requests will come and cannot be beaten; what lies between it and the \
                     other lines is what better guesses could still gain. The best value here is {reach:.2} %. Where \
                     one line hides another, the table below tells them apart."
                ),
                "Counted without time: what a request brings is in the cache at once, answers are not kept, and all requests \
                 share one cache."
                    .to_owned(),
            ],
            charts: vec![chart],
            tables: self.tables().into(),
        }
    }
}

fn shown(capacity: Capacity) -> String {
    capacity.map_or("no limit".to_owned(), |blocks| number(f64::from(u32::from(blocks))))
}
