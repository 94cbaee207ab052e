//! The conversation trace of the FAST'25 Mooncake paper against tables that were computed independently of this code.
//!
//! The trace is not part of this repository: `MILLPOND_TRACES` names the folder it is in, else `shared/traces` beside the
//! checkout is tried. Without it these tests say that they are skipped.

use std::path::{Path, PathBuf};

use millpond_core::sched::cost::{Profile, Work};
use millpond_core::sim::cache::{Eviction, replay};
use millpond_core::sim::trace::Trace;

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

fn conversation() -> Option<Trace> {
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
    let jittered = trace.clone().with_jitter(millpond_core::time::Duration::from_secs(3), 1);
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
