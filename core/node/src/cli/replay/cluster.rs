//! A cluster under the trace: every placement with every admission, speed and seed, side by side.

use std::sync::Arc;

use millpond_core::sched::{admission, placement};
use millpond_core::sim::trace::{BLOCK_TOKENS, Trace};
use millpond_core::sim::{Baseline, Fate, Outcome, Setup, percentile, run as simulate};
use millpond_core::time::Duration;
use serde_json::json;

use super::chart::{Axis, Chart, Scale, Series, number};
use super::details::Details;
use super::report::{Section, Table};
use super::{in_parallel, rounded};
use crate::cli::failure::Failure;
use crate::cli::store_cmds::{Format, Output};

/// Points of a line over time.
const LOAD_POINTS: usize = 240;

/// What is replayed.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) placements: Vec<placement::Policy>,
    pub(super) admissions: Vec<admission::Policy>,
    pub(super) speeds: Vec<f64>,
    pub(super) seeds: u64,
    /// Arrivals are moved later by less than this.
    pub(super) jitter: Duration,
    /// Whether all that was counted is shown.
    pub(super) details: Shown,
    /// All else.
    pub(super) setup: Setup,
}

/// How much of what was found is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// A row.
    Row,
    /// Everything.
    Details,
}

/// A cluster and its pace.
#[derive(Clone, Debug, PartialEq)]
struct Case {
    policy: String,
    admission: &'static str,
    speed: f64,
}

/// What one replay found.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) effective: usize,
    missed: usize,
    rejected_early: usize,
    rejected_late: usize,
    wasted_prefill_s: f64,
    pub(super) ttft_mean_s: f64,
    ttft_p99_s: f64,
    pub(super) tbt_p90_ms: f64,
    pub(super) hit_blocks_pct: f64,
    /// The shortest first tokens of so many per cent of those who were answered, in seconds.
    ttft: Vec<(f64, f64)>,
    /// The same of the gaps between tokens, in milliseconds.
    tbt: Vec<(f64, f64)>,
    /// Loads of prefill and decode by the second.
    loads: [Vec<(f64, f64)>; 2],
    details: Details,
}

/// All replays.
#[derive(Debug)]
pub(super) struct Runs {
    cases: Vec<Case>,
    /// By case, then by seed.
    found: Vec<Vec<Found>>,
    /// The cluster, in words.
    cluster: String,
    shown: Shown,
}

/// Replays the trace in each way, as many at once as there are cores.
pub(super) async fn run(trace: &Arc<Trace>, plan: &Plan) -> Result<Runs, Failure> {
    plan.setup.check().map_err(|error| Failure::Usage(error.to_string()))?;
    let setups = setups(plan);
    let seeds = usize::try_from(plan.seeds).unwrap_or(usize::MAX);
    let each = setups.iter().flat_map(|(case, setup)| {
        (1..=plan.seeds).map(|seed| {
            let (trace, mut setup) = (Arc::clone(trace), setup.clone());
            setup.seed = seed;
            let (jitter, speed) = (plan.jitter, case.speed);
            move || one(&trace, &setup, jitter, speed)
        })
    });
    let found = in_parallel(each.collect()).await?;
    let found = found.chunks(seeds).map(<[Found]>::to_vec).collect();
    let Setup { prefill, decode, coupled, .. } = plan.setup;
    let cluster = match coupled {
        0 => format!("{prefill} prefill and {decode} decode nodes"),
        _ => format!("{coupled} instances that do both"),
    };
    Ok(Runs { cases: setups.into_iter().map(|(case, _)| case).collect(), found, cluster, shown: plan.details })
}

fn setups(plan: &Plan) -> Vec<(Case, Setup)> {
    let mut setups = Vec::new();
    // Coupled instances place by load and admit everybody: there is nothing to choose.
    let is_coupled = plan.setup.coupled > 0;
    let placements = if is_coupled { &plan.placements[..1] } else { &plan.placements[..] };
    let admissions = if is_coupled { &[admission::Policy::None] } else { &plan.admissions[..] };
    for &placement in placements {
        for &admission in admissions {
            for &speed in &plan.speeds {
                let mut setup = plan.setup.clone();
                (setup.placement.policy, setup.admission.policy) = (placement, admission);
                let policy = match (is_coupled, setup.baseline) {
                    (false, _) => placement.name(),
                    (true, Baseline::PrefixCaching) => "coupled, prefix caching",
                    (true, Baseline::ChunkedPrefill) => "coupled, chunked prefill",
                    (true, _) => "coupled",
                };
                setups.push((Case { policy: policy.to_owned(), admission: admission.name(), speed }, setup));
            }
        }
    }
    setups
}

/// One replay; the setup was checked.
pub(super) fn one(trace: &Trace, setup: &Setup, jitter: Duration, speed: f64) -> Found {
    let moved = trace.clone();
    let moved = if jitter > Duration::ZERO { moved.with_jitter(jitter, setup.seed) } else { moved };
    let outcome = simulate(&moved.at_speed(speed), setup).expect("the setup was checked");
    Found::of(&outcome, setup.sample.as_secs_f64())
}

impl Found {
    fn of(outcome: &Outcome, sample_s: f64) -> Self {
        let count = |fate| outcome.count(fate);
        let (ttfts, tbts) = (outcome.ttfts(), outcome.tbts());
        let line = |values: &[Duration], scale: f64| {
            let percents = (1..=100).map(f64::from);
            percents.map(|part| (percentile(values, part).as_secs_f64() * scale, part)).collect()
        };
        let step = outcome.loads.len().div_ceil(LOAD_POINTS).max(1);
        let over_time = |load: fn(&millpond_core::sim::Load) -> f64| {
            let chunks = outcome.loads.chunks(step).enumerate();
            let mean = |loads: &[millpond_core::sim::Load]| loads.iter().map(load).sum::<f64>() / loads.len() as f64;
            chunks.map(|(at, loads)| ((at * step) as f64 * sample_s, mean(loads))).collect()
        };
        Self {
            effective: count(Fate::Effective),
            missed: count(Fate::Missed),
            rejected_early: count(Fate::RejectedEarly),
            rejected_late: count(Fate::RejectedLate),
            wasted_prefill_s: outcome.wasted_prefill_s,
            ttft_mean_s: outcome.ttft_mean(),
            ttft_p99_s: percentile(&ttfts, 99.0).as_secs_f64(),
            tbt_p90_ms: percentile(&tbts, 90.0).as_secs_f64() * 1e3,
            hit_blocks_pct: outcome.hit_blocks_pct(BLOCK_TOKENS),
            ttft: line(&ttfts, 1.0),
            tbt: line(&tbts, 1e3),
            loads: [over_time(|load| load.prefill), over_time(|load| load.decode)],
            details: Details::of(outcome),
        }
    }
}

impl Runs {
    fn rows(&self) -> impl Iterator<Item = (&Case, &[Found])> {
        self.cases.iter().zip(self.found.iter().map(Vec::as_slice))
    }

    /// Writes a table, or a line of JSON for each case and seed.
    pub(super) fn write(&self, output: &mut Output<'_>) -> Result<(), Failure> {
        if output.format == Format::Text {
            return self.tables().iter().try_for_each(|table| Ok(output.line(&table.text(), serde_json::Value::Null)?));
        }
        for (case, seeds) in self.rows() {
            for (seed, found) in (1..).zip(seeds) {
                let mut row = json!({
                    "policy": case.policy,
                    "admission": case.admission,
                    "speed": case.speed,
                    "seed": seed,
                    "effective": found.effective,
                    "rejected_early": found.rejected_early,
                    "rejected_late": found.rejected_late,
                    "wasted_prefill_s": rounded(found.wasted_prefill_s),
                    "ttft_mean_s": rounded(found.ttft_mean_s),
                    "ttft_p99_s": rounded(found.ttft_p99_s),
                    "tbt_p90_ms": rounded(found.tbt_p90_ms),
                    "hit_blocks_pct": rounded(found.hit_blocks_pct),
                });
                if self.shown == Shown::Details {
                    found.details.add_to(&mut row);
                }
                output.line("", row)?;
            }
        }
        Ok(())
    }

    fn tables(&self) -> Vec<Table> {
        let cases: Vec<(String, Vec<&Details>)> = self
            .rows()
            .map(|(case, found)| {
                let name = format!("{} at {}x", named(case), case.speed);
                (name, found.iter().map(|found| &found.details).collect())
            })
            .collect();
        match self.shown {
            Shown::Row => vec![self.table()],
            Shown::Details => vec![self.table(), Details::table(&cases)],
        }
    }

    fn table(&self) -> Table {
        let seeds = self.found.first().map_or(0, Vec::len);
        let head = [
            "placement",
            "admission",
            "speed",
            "effective",
            "too late",
            "refused early",
            "refused late",
            "wasted prefill, s",
            "TTFT mean, s",
            "TTFT p99, s",
            "TBT p90, ms",
            "hits, % of blocks",
        ];
        let row = |(case, found): (&Case, &[Found])| {
            let mean = |value: fn(&Found) -> f64| found.iter().map(value).sum::<f64>() / found.len().max(1) as f64;
            vec![
                case.policy.clone(),
                case.admission.to_owned(),
                case.speed.to_string(),
                number(mean(|found| found.effective as f64).round()),
                number(mean(|found| found.missed as f64).round()),
                number(mean(|found| found.rejected_early as f64).round()),
                number(mean(|found| found.rejected_late as f64).round()),
                number(mean(|found| found.wasted_prefill_s).round()),
                format!("{:.2}", mean(|found| found.ttft_mean_s)),
                format!("{:.2}", mean(|found| found.ttft_p99_s)),
                format!("{:.1}", mean(|found| found.tbt_p90_ms)),
                format!("{:.2}", mean(|found| found.hit_blocks_pct)),
            ]
        };
        let of = if seeds > 1 { format!(", means of {seeds} seeds") } else { String::new() };
        Table {
            title: format!("{}{of}", self.cluster),
            head: head.map(str::to_owned).into(),
            rows: self.rows().map(row).collect(),
        }
    }

    /// The parts of the report about this.
    pub(super) fn sections(&self) -> Vec<Section> {
        let mut sections = vec![self.goodput()];
        sections.push(self.distribution(
            "How long until the first token?",
            "Of those who were answered, so many per cent had their first token within so many seconds (TTFT). Further left is \
             better. What was refused is not in it: compare with the table above.",
            Axis { label: "seconds to the first token", scale: Scale::Logarithmic },
            |found| &found.ttft,
        ));
        sections.push(self.distribution(
            "How long between tokens?",
            "The mean of the longest tenth of the gaps between the tokens of an answer (TBT). Further left is better.",
            Axis { label: "milliseconds between tokens", scale: Scale::Linear },
            |found| &found.tbt,
        ));
        sections.push(self.loads());
        sections
    }

    fn goodput(&self) -> Section {
        let mut series: Vec<Series> = Vec::new();
        for (case, found) in self.rows() {
            let name = named(case);
            let mean = found.iter().map(|found| found.effective as f64).sum::<f64>() / found.len().max(1) as f64;
            match series.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push((case.speed, mean)),
                None => series.push(Series { name, points: vec![(case.speed, mean)], is_bound: false }),
            }
        }
        series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
        Section {
            heading: "How many requests are served in time?",
            text: vec![format!(
                "The trace, replayed at several times its pace, on {}. A request counts if its first token and the gaps \
                 between tokens kept their deadlines. Higher is better; a line that bends down shows a cluster that works \
                 for requests it then fails. Each line is a placement (which prefill node serves a request) / an admission \
                 (whether it is served at all); where one line hides another, the table below tells them apart.",
                self.cluster
            )],
            charts: vec![Chart {
                title: "Goodput by speed".to_owned(),
                x: Axis { label: "speed, times the trace's", scale: Scale::Linear },
                y: Axis { label: "requests served in time", scale: Scale::Linear },
                series,
            }],
            tables: self.tables(),
        }
    }

    fn distribution(
        &self,
        heading: &'static str,
        text: &str,
        x: Axis,
        points: fn(&Found) -> &Vec<(f64, f64)>,
    ) -> Section {
        let fastest = self.fastest();
        let series = self.rows().filter(|(case, _)| case.speed == fastest).filter_map(|(case, found)| {
            let points = points(found.first()?).iter().copied().filter(|point| point.0 > 0.0).collect();
            Some(Series { name: named(case), points, is_bound: false })
        });
        Section {
            heading,
            text: vec![format!("{text} At {fastest} times the trace's pace.")],
            charts: vec![Chart {
                title: heading.to_owned(),
                x,
                y: Axis { label: "of those answered, %", scale: Scale::Linear },
                series: series.collect(),
            }],
            tables: Vec::new(),
        }
    }

    fn loads(&self) -> Section {
        let fastest = self.fastest();
        let shown = self.rows().filter(|(case, _)| case.speed == fastest).take(LOADS_MAX);
        let charts = shown.filter_map(|(case, found)| {
            let found = found.first()?;
            let series = ["prefill", "decode"].into_iter().zip(&found.loads).map(|(name, points)| Series {
                name: name.to_owned(),
                points: points.clone(),
                is_bound: false,
            });
            Some(Chart {
                title: named(case),
                x: Axis { label: "seconds since the first request", scale: Scale::Linear },
                y: Axis { label: "load; 1 is the deadline", scale: Scale::Linear },
                series: series.collect(),
            })
        });
        let more = self.rows().filter(|(case, _)| case.speed == fastest).count().saturating_sub(LOADS_MAX);
        let mut text = vec![format!(
            "At {fastest} times the trace's pace, the mean wait of prefill nodes beside the deadline of first tokens, and the \
             mean step of decode nodes beside the deadline between tokens; 1 is the deadline. Where one is up while the other \
             is down, the cluster swings: it admits by a load that is over when the request gets there."
        )];
        if more > 0 {
            text.push(format!("The first {LOADS_MAX} are drawn; {more} are not."));
        }
        Section { heading: "How busy are both sides over time?", text, charts: charts.collect(), tables: Vec::new() }
    }

    /// The fastest pace: lines of all would hide each other.
    fn fastest(&self) -> f64 {
        self.cases.iter().map(|case| case.speed).fold(0.0, f64::max)
    }
}

/// Of so many clusters the loads are drawn.
const LOADS_MAX: usize = 6;

fn named(case: &Case) -> String {
    format!("{} / {}", case.policy, case.admission)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_core::sim::trace::Synthetic;

    #[test]
    fn every_case_has_a_row_for_each_seed_and_the_page_shows_them() {
        let trace = Arc::new(Synthetic { requests: 60, ..Synthetic::default() }.trace());
        let plan = Plan {
            placements: vec![placement::Policy::MooncakeFast25, placement::Policy::Millpond],
            admissions: vec![admission::Policy::None, admission::Policy::Millpond],
            speeds: vec![1.0, 2.0],
            seeds: 2,
            jitter: Duration::ZERO,
            details: Shown::Row,
            setup: Setup::default(),
        };
        let runs = futures::executor::block_on(run(&trace, &plan)).unwrap();
        assert_eq!((runs.cases.len(), runs.found.iter().map(Vec::len).sum::<usize>()), (8, 16));
        for found in runs.found.iter().flatten() {
            assert_eq!(found.effective + found.missed + found.rejected_early + found.rejected_late, 60);
        }
        let sections = runs.sections();
        assert_eq!(sections[0].charts[0].series.len(), 4, "a line for each pair of policies");
        assert!(sections.iter().all(|section| !section.charts[0].series.is_empty()));
    }

    #[test]
    fn coupled_instances_have_one_row_and_a_cluster_that_cannot_be_is_refused() {
        let trace = Arc::new(Synthetic { requests: 20, ..Synthetic::default() }.trace());
        let mut setup = Setup::default();
        (setup.prefill, setup.decode, setup.coupled) = (0, 0, 4);
        let plan = |setup| Plan {
            placements: placement::Policy::ALL.into(),
            admissions: admission::Policy::ALL.into(),
            speeds: vec![1.0],
            seeds: 1,
            jitter: Duration::ZERO,
            details: Shown::Row,
            setup,
        };
        let runs = futures::executor::block_on(run(&trace, &plan(setup.clone()))).unwrap();
        assert_eq!(runs.cases, [Case { policy: "coupled".to_owned(), admission: "none", speed: 1.0 }]);
        setup.coupled = 0;
        assert!(futures::executor::block_on(run(&trace, &plan(setup))).is_err());
    }
}
