//! The conversation trace of the FAST'25 Mooncake paper against tables that were computed independently of this code.
//!
//! The trace is not part of this repository: `MILLPOND_TRACES` names the folder it is in, else `shared/traces` beside the
//! checkout is tried. Without it these tests say that they are skipped.

use std::path::{Path, PathBuf};

use millpond_core::sched::admission;
use millpond_core::sched::cost::{Profile, Work};
use millpond_core::sim::cache::{Eviction, replay};
use millpond_core::sim::trace::{Synthetic, Trace};
use millpond_core::sim::{Outcome, Retries, Setup, Tenant, run as simulate};
use millpond_core::time::Duration;

use super::{Facts, Named, capacity, file};

const CAPACITIES: [u32; 8] = [1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000];

/// Hits in per cent of blocks.
const TABLE: [(&str, [f64; 8]); 8] = [
    ("lru", [4.45, 6.50, 11.04, 21.12, 28.75, 32.57, 35.46, 36.37]),
    ("fifo", [4.34, 6.27, 10.53, 18.15, 25.77, 29.44, 33.35, 35.63]),
    ("lfu", [4.81, 7.47, 9.23, 13.18, 20.99, 27.59, 34.38, 36.31]),
    ("sieve", [4.81, 7.47, 9.23, 13.18, 20.99, 27.59, 34.38, 36.31]),
    ("s3-fifo", [5.56, 8.74, 13.82, 19.52, 25.28, 30.39, 34.90, 36.24]),
    ("arc", [5.29, 8.58, 11.24, 22.21, 28.92, 31.07, 34.33, 36.31]),
    ("rhg-s", [8.26, 14.02, 17.76, 23.58, 30.18, 33.26, 35.60, 36.35]),
    ("optimum", [19.07, 29.45, 34.12, 36.64, 36.64, 36.64, 36.64, 36.64]),
];

pub(super) fn conversation() -> Option<Trace> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("MILLPOND_TRACES").map_or_else(beside, PathBuf::from);
    let path = folder.join("conversation_trace.jsonl");
    if !path.exists() {
        eprintln!("SKIPPED: there is no {}; MILLPOND_TRACES names the folder with the trace", path.display());
        return None;
    }
    Some(file::read(&path).unwrap())
}

/// Seconds of prefill for a request, on average, with what is hit in a cache of `capacity` blocks.
fn prefill_s(trace: &Trace, capacity: u32) -> f64 {
    let (prefill, mut seconds) = (Profile::default().prefill, 0.0);
    replay(trace, Eviction::Optimum, capacity, |request, hit_tokens| {
        seconds += prefill.seconds(Work::of_prompt(request.input_tokens, hit_tokens));
    });
    seconds / trace.requests().len() as f64
}

fn is_near(found: f64, expected: f64, tolerance: f64) -> bool {
    (found - expected).abs() <= tolerance
}

#[test]
fn the_conversation_trace_is_the_one_that_was_described() {
    let Some(trace) = conversation() else { return };
    let facts = Facts::new("", &trace);
    assert_eq!((facts.requests, facts.blocks, facts.distinct), (12_031, 288_500, 182_790));
    assert!(is_near(facts.input_mean, 12_035.1, 0.05) && is_near(facts.output_mean, 342.6, 0.05), "{facts:?}");
    assert!(is_near(facts.seconds, 3_537.0, 0.05), "{facts:?}");
    let jittered = trace.clone().with_jitter(Duration::from_secs(3), 1);
    assert!(jittered.requests().len() == facts.requests && jittered.distinct_blocks() == facts.distinct);
}

#[test]
fn every_policy_hits_what_the_tables_say_at_every_capacity() {
    let Some(trace) = conversation() else { return };
    let mut wrong = Vec::new();
    for (name, expected) in TABLE {
        let policy: Eviction = name.parse().unwrap();
        // The learning policy's tables depend on choices at the last age that the tables' description leaves open.
        let tolerance = if policy == Eviction::RhgS { 0.03 } else { 0.0051 };
        for (capacity, expected) in CAPACITIES.into_iter().zip(expected) {
            let found = replay(&trace, policy, capacity, |_, _| {}).blocks_pct();
            if !is_near(found, expected, tolerance) {
                wrong.push(format!("{name} at {capacity}: {found:.3}, not {expected}"));
            }
        }
        let all = replay(&trace, policy, trace.distinct_blocks(), |_, _| {});
        if !is_near(all.blocks_pct(), 36.64, 0.0051) || !is_near(all.tokens_pct(), 37.36, 0.0051) {
            wrong.push(format!("{name} without limit: {:.3} {:.3}", all.blocks_pct(), all.tokens_pct()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn prefill_takes_what_it_took_in_the_paper_without_a_cache_and_with_all_of_it() {
    let Some(trace) = conversation() else { return };
    let (without, with) = (prefill_s(&trace, 0), prefill_s(&trace, trace.distinct_blocks()));
    assert!(is_near(without, 1.674, 0.0167) && is_near(with, 1.063, 0.0106), "{without} {with}");
    assert!(is_near(without / with, 1.56, 0.03 * 1.56), "{}", without / with);
}

#[test]
fn prefill_of_whole_prompts_takes_what_figure_14a_shows() {
    let prefill = Profile::default().prefill;
    for (tokens, seconds) in [(8_192, 1.0), (16_384, 2.05), (32_768, 4.5), (65_536, 10.5), (131_072, 27.5)] {
        let found = prefill.seconds(Work::of_prompt(tokens, 0));
        assert!(is_near(found, seconds, 0.05 * seconds), "{tokens} tokens: {found}, not {seconds}");
    }
}

#[test]
fn capacities_and_policies_are_read_by_their_names() {
    assert_eq!(capacity("1000"), Ok(std::num::NonZeroU32::new(1_000)));
    assert_eq!(capacity("inf"), Ok(None));
    assert!(capacity("0").is_err() && capacity("-1").is_err() && capacity("lots").is_err());
    assert_eq!("s3-fifo".parse::<Named>().map(|named| named.to_string()), Ok("s3-fifo".to_owned()));
}

/// A figure of a cluster under the conversation trace, the mean of two seeds.
fn mean(trace: &Trace, speed: f64, setup: &Setup, figure: fn(&Outcome) -> f64) -> f64 {
    let of = |seed| {
        let trace = trace.clone().with_jitter(Duration::from_secs(3), seed).at_speed(speed);
        let mut setup = setup.clone();
        setup.seed = seed;
        figure(&simulate(&trace, &setup).unwrap())
    };
    (of(1) + of(2)) / 2.0
}

fn admitted_by(policy: admission::Policy) -> Setup {
    let mut setup = Setup::default();
    setup.admission.policy = policy;
    setup
}

#[test]
fn the_loads_of_both_sides_do_not_swing_against_each_other_as_they_do_with_early() {
    let Some(trace) = conversation() else { return };
    for tbt in [33, 36] {
        let of = |policy| {
            let mut setup = admitted_by(policy);
            (setup.prefill, setup.decode, setup.slo.tbt) = (4, 16, Duration::from_millis(tbt));
            mean(&trace, 1.0, &setup, Outcome::load_correlation)
        };
        let [ours, early] = [admission::Policy::Millpond, admission::Policy::Early].map(of);
        eprintln!("{tbt} ms: correlation {ours:.3}, early {early:.3}");
        assert!(ours > -0.2 && early < -0.3, "{tbt} ms: {ours} {early}");
    }
}

#[test]
fn in_overload_more_are_served_than_the_bound_of_the_blind_and_less_is_computed_in_vain() {
    let Some(trace) = conversation() else { return };
    for speed in [2.0, 3.0] {
        let of = |policy, figure| mean(&trace, speed, &admitted_by(policy), figure);
        let effective: fn(&Outcome) -> f64 = |found| found.effective() as f64;
        let [ours, late] = [admission::Policy::Millpond, admission::Policy::Late].map(|policy| of(policy, effective));
        let wasted: fn(&Outcome) -> f64 = |found| found.wasted_prefill_s;
        let [vain, vain_late] = [admission::Policy::Millpond, admission::Policy::Late].map(|policy| of(policy, wasted));
        let bound = of(admission::Policy::Millpond, |found| found.length_blind_bound);
        eprintln!("{speed}x: {ours} of {bound:.0} ({late} late), {vain:.0} s in vain ({vain_late:.0})");
        assert!(ours >= 0.99 * bound && ours >= late && vain <= 0.55 * vain_late);
    }
}

#[test]
fn tenants_get_their_fair_shares_and_predicted_intervals_hold_as_often_as_they_should() {
    let Some(trace) = conversation() else { return };
    let mut setup = Setup::default();
    setup.tenants = vec![Tenant { offered: 1.0, weight: 1.0 }, Tenant { offered: 9.0, weight: 1.0 }];
    let unfairness = mean(&trace, 2.0, &setup, Outcome::unfairness);
    assert!(unfairness < 0.1, "{unfairness}");
    for speed in [1.0, 2.0] {
        let coverage = mean(&trace, speed, &Setup::default(), Outcome::coverage);
        eprintln!("{speed}x: the intervals hold for {coverage:.4}; unfairness {unfairness:.3}");
        assert!((0.88..=0.92).contains(&coverage), "{speed}x: {coverage}");
    }
}

#[test]
fn who_comes_back_when_told_is_served_in_the_simulator_too() {
    let Some(trace) = conversation() else { return };
    let mut setup = Setup::default();
    setup.retries = Retries { share: 0.1, tries: 1 };
    let served = mean(&trace, 2.0, &setup, Outcome::returns_served);
    eprintln!("{served:.3} of those who came back were served");
    assert!(served >= 0.85, "{served}");
}

#[test]
fn runs_are_the_same_however_many_threads_there_are() {
    let trace = Synthetic { requests: 200, rate: 2.0, input_tokens: 600..=20_000, ..Synthetic::default() }.trace();
    let alone = simulate(&trace, &Setup::default()).unwrap();
    std::thread::scope(|scope| {
        let runs = [(); 4].map(|()| scope.spawn(|| simulate(&trace, &Setup::default()).unwrap()));
        runs.into_iter().for_each(|run| assert_eq!(run.join().unwrap(), alone));
    });
}
