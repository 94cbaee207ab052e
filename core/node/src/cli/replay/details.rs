//! `--details`: what a replay found beside the row that everybody gets.

use millpond_core::sim::trace::BLOCK_TOKENS;
use millpond_core::sim::{Fate, Outcome};
use serde_json::{Value as Json, json};

use super::report::Table;
use super::rounded;

/// Everything a run of the simulator counts.
#[derive(Clone, Debug, Default)]
pub(super) struct Details {
    /// Names and figures, in the order in which they are shown.
    figures: Vec<(&'static str, f64)>,
    /// By decile of the answers' length, then of the prompts': the share served in time.
    deciles: [[f64; 10]; 2],
    /// By tenant: seconds of instances asked for, and served in time.
    tenants: Vec<[f64; 2]>,
    by_prefill: Vec<u32>,
    by_decode: Vec<u32>,
    decisions: u64,
}

impl Details {
    pub(super) fn of(outcome: &Outcome) -> Self {
        let seconds = |percent| outcome.ttft_percentile(percent).as_secs_f64();
        let millis = |percent| outcome.tbt_percentile(percent).as_secs_f64() * 1e3;
        let figures = vec![
            ("missed", outcome.count(Fate::Missed) as f64),
            ("goodput_tokens_per_s", outcome.goodput_tokens_per_s()),
            ("length_blind_bound", outcome.length_blind_bound),
            ("regret", outcome.regret()),
            ("ttft_regret_s", outcome.ttft_regret()),
            ("ttft_p50_s", seconds(50.0)),
            ("ttft_p90_s", seconds(90.0)),
            ("tbt_p50_ms", millis(50.0)),
            ("tbt_p99_ms", millis(99.0)),
            ("hit_tokens_pct", outcome.hit_tokens_pct()),
            ("hit_blocks_pct", outcome.hit_blocks_pct(BLOCK_TOKENS)),
            ("prefill_mean_s", outcome.prefill_mean()),
            ("load_correlation", outcome.load_correlation()),
            ("interval_coverage", outcome.coverage()),
            ("unfairness", outcome.unfairness()),
            ("refusals", f64::from(outcome.refusals)),
            ("returns", f64::from(outcome.returns)),
            ("returns_served", outcome.returns_served()),
            ("held", f64::from(outcome.held)),
            ("pulls", f64::from(outcome.pulls)),
            ("stale", f64::from(outcome.stale)),
        ];
        Self {
            figures,
            deciles: [outcome.deciles(), outcome.input_deciles()],
            tenants: outcome.tenants.iter().map(|one| [one.asked, one.served]).collect(),
            by_prefill: outcome.by_prefill.clone(),
            by_decode: outcome.by_decode.clone(),
            decisions: outcome.decisions,
        }
    }

    /// Adds the fields to a row.
    pub(super) fn add_to(&self, row: &mut Json) {
        for (name, figure) in &self.figures {
            row[*name] = rounded(*figure).into();
        }
        let [outputs, inputs] = self.deciles.map(|shares| shares.map(rounded));
        row["served_by_output_decile"] = json!(outputs);
        row["served_by_input_decile"] = json!(inputs);
        row["tenants"] = self.tenants.iter().map(|one| json!({"asked_s": one[0], "served_s": one[1]})).collect();
        row["by_prefill"] = json!(self.by_prefill);
        row["by_decode"] = json!(self.by_decode);
        row["decisions"] = format!("{:016x}", self.decisions).into();
    }

    /// Means over seeds, a column for each of the cases.
    pub(super) fn table(cases: &[(String, Vec<&Self>)]) -> Table {
        let mean = |seeds: &[&Self], value: &dyn Fn(&Self) -> f64| {
            seeds.iter().map(|one| value(one)).sum::<f64>() / seeds.len().max(1) as f64
        };
        let row = |name: String, value: &dyn Fn(&Self) -> f64| {
            let shown = cases.iter().map(|(_, seeds)| format!("{:.3}", mean(seeds, value)));
            [name].into_iter().chain(shown).collect()
        };
        let first = cases.first().and_then(|(_, seeds)| seeds.first());
        let names = first.map_or_else(Vec::new, |one| one.figures.iter().map(|figure| figure.0).collect());
        let mut rows: Vec<Vec<String>> = names
            .iter()
            .enumerate()
            .map(|(at, name)| row((*name).to_owned(), &|one: &Self| one.figures[at].1))
            .collect();
        for (kind, what) in ["answers", "prompts"].into_iter().enumerate() {
            for tenth in 0..10 {
                let name = format!("served of the {what}, tenth {} by length", tenth + 1);
                rows.push(row(name, &|one: &Self| one.deciles[kind][tenth]));
            }
        }
        for tenant in 0..first.map_or(0, |one| one.tenants.len()) {
            for (at, what) in ["asked", "served"].into_iter().enumerate() {
                let name = format!("tenant {tenant}, s {what}");
                rows.push(row(name, &|one: &Self| one.tenants.get(tenant).map_or(0.0, |uses| uses[at])));
            }
        }
        let head = ["details".to_owned()].into_iter().chain(cases.iter().map(|(name, _)| name.clone()));
        Table { title: "details, means over the seeds".to_owned(), head: head.collect(), rows }
    }
}
