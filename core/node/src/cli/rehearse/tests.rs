//! Rehearsals under virtual time, beside the simulator.

use std::fs::File;
use std::io::BufReader;

use millpond_core::sim::trace::Synthetic as Workload;

use super::*;
use crate::router::{Mismatch, Seal, VirtualTime, explain, replay};

fn in_virtual_time(setup: &Setup, trace: &Arc<Trace>, more: More) -> Row {
    let time = VirtualTime::default();
    let machine = Machine { timers: time.timers(), spawn: time.spawner(), scale: 1.0 };
    let (setup, trace) = (setup.clone(), Arc::clone(trace));
    time.run(async move { rehearse(machine, &setup, &trace, more).await.expect("there is such a cluster") })
}

fn nothing_more() -> More {
    More { retries: 0, decisions: None }
}

/// More than two decode nodes can take.
fn workload(requests: u32) -> Arc<Trace> {
    let workload =
        Workload { requests, rate: 4.0, input_tokens: 1_000..=12_000, output_tokens: 300, ..Workload::default() };
    Arc::new(workload.trace())
}

fn small(admission: admission::Policy) -> Setup {
    let mut setup = Setup::default();
    (setup.prefill, setup.decode, setup.admission.policy) = (3, 2, admission);
    setup
}

/// Whether two rows are alike: requests within 5 %, times to the first token within 15 %.
fn assert_alike(live: &Row, simulated: &Row, requests: fn(&Row) -> usize, what: &str) {
    eprintln!("{what}\n  live      {live:?}\n  simulated {simulated:?}");
    let off = |a: f64, b: f64| (a / b - 1.0).abs();
    assert!(off(requests(live) as f64, requests(simulated) as f64) < 0.05, "{what}: requests");
    assert!(off(live.ttft_mean_s, simulated.ttft_mean_s) < 0.15, "{what}: mean");
    assert!(off(live.ttft_p90_s, simulated.ttft_p90_s) < 0.15, "{what}: 90th percentile");
}

#[test]
fn the_live_router_does_over_synthetic_nodes_what_the_simulator_says() {
    let trace = workload(600);
    for admission in admission::Policy::ALL {
        let setup = small(admission);
        let live = in_virtual_time(&setup, &trace, nothing_more());
        let simulated = Row::of(&simulate(&trace, &setup).unwrap());
        assert_eq!(live.failed, 0);
        if admission == admission::Policy::None {
            // It collapses, and both see that.
            assert!(live.effective * 3 < trace.requests().len() && simulated.effective * 3 < trace.requests().len());
        } else {
            // All answers are equally long, so batches are all on the same side of the deadline between tokens, by a
            // hundredth of a per cent: what counts is who was answered.
            assert_alike(&live, &simulated, |row| row.effective + row.missed, admission.name());
        }
    }
}

#[test]
fn who_comes_back_when_told_is_served() {
    let live =
        in_virtual_time(&small(admission::Policy::Millpond), &workload(600), More { retries: 5, decisions: None });
    let Live { retried, retries_served, .. } = live.live.unwrap();
    eprintln!("{retries_served} of {retried} were served when they came back");
    assert!(retried >= 20 && retries_served * 10 >= retried * 9, "{retries_served} of {retried}");
}

#[test]
fn a_recorded_log_replays_to_the_same_decisions_and_a_changed_one_does_not() {
    let path = std::env::temp_dir().join(format!("millpond-decisions-{}", std::process::id()));
    let trace = workload(200);
    let more = More { retries: 5, decisions: Some(path.clone()) };
    let retried = in_virtual_time(&small(admission::Policy::Millpond), &trace, more).live.unwrap().retried;
    let log = std::fs::read_to_string(&path).unwrap();
    let replayed = replay(BufReader::new(File::open(&path).unwrap())).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(replayed.decisions, (trace.requests().len() + retried) as u64);
    let (again, about) = explain(log.as_bytes(), "rehearsal-7").unwrap();
    assert_eq!((again, about.len()), (replayed, 1));
    assert!(about[0]["candidates"].as_array().unwrap().len() == 3 && about[0]["decision"] == 8, "{}", about[0]);
    // What was known of one request was something else, though the log is sealed as it should be.
    let line = log.lines().position(|line| line.contains("joined")).unwrap();
    let (mut seal, mut other) = (Seal::default(), Seal::default());
    let objects = log.lines().map(|line| seal.open(line.as_bytes()).unwrap());
    let without: String =
        objects.enumerate().filter(|(at, _)| *at != line).map(|(_, text)| other.line(&text)).collect();
    let refused = replay(without.as_bytes()).unwrap_err();
    assert!(matches!(refused, Mismatch::Differs { .. }), "{refused}");
}

#[test]
fn a_log_that_was_altered_or_cut_off_names_the_line() {
    let path = std::env::temp_dir().join(format!("millpond-altered-{}", std::process::id()));
    let more = More { retries: 5, decisions: Some(path.clone()) };
    in_virtual_time(&small(admission::Policy::Millpond), &workload(40), more);
    let log = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let lines = log.split_inclusive(|byte| *byte == b'\n').collect::<Vec<_>>();
    replay(&log[..]).unwrap();
    // Any byte, each bit of it: the line is named, or for its end the next one.
    let mut at = 0;
    for (number, line) in (1..).zip(&lines) {
        for offset in [0, 1, line.len() / 3, line.len() / 2, line.len() - 12, line.len() - 4, line.len() - 1] {
            for bit in 0..8 {
                let mut altered = log.clone();
                altered[at + offset] ^= 1 << bit;
                let named = match replay(&altered[..]).unwrap_err() {
                    Mismatch::Altered { line } | Mismatch::Torn { line, .. } => line,
                    Mismatch::Head { .. } => 1,
                    other => panic!("line {number}, byte {offset}, bit {bit}: {other}"),
                };
                assert_eq!(named, number, "byte {offset}, bit {bit}");
            }
        }
        at += line.len();
    }
    let last = lines.len();
    let ended = log.len() - lines[last - 1].len();
    let cut = |len: usize| replay(&log[..len]).unwrap_err().to_string();
    assert!(cut(ended).starts_with(&format!("the log ends after line {} without its end", last - 1)), "{}", cut(ended));
    assert!(cut(log.len() - 20).starts_with(&format!("line {last} is cut off")), "{}", cut(log.len() - 20));
    let swapped = [&lines[..3], &[lines[4], lines[3]], &lines[5..]].concat().concat();
    assert!(matches!(replay(&swapped[..]), Err(Mismatch::Altered { line: 4 })));
    assert!(replay(&b"{}\n"[..]).unwrap_err().to_string().starts_with("line 1 does not say"));
    let mut old = Seal::default();
    let refused = replay(old.line(r#"{"version":1}"#).as_bytes()).unwrap_err().to_string();
    assert!(refused.ends_with("its version is 1, not 3"), "{refused}");
}

/// The acceptance of the live cluster, in virtual time: its rows are printed.
#[test]
fn the_conversation_trace_at_twice_its_speed_ends_live_as_it_is_simulated() {
    let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/traces"));
    let folder = std::env::var_os("MILLPOND_TRACES").map_or_else(beside, PathBuf::from);
    let path = folder.join("conversation_trace.jsonl");
    let Ok(trace) = file::read(&path) else {
        eprintln!("SKIPPED: there is no {}; MILLPOND_TRACES names the folder with the trace", path.display());
        return;
    };
    // Ten minutes of the cluster.
    let trace = Arc::new(until(&trace.with_jitter(Duration::from_secs(3), 1).at_speed(2.0), 600, 1.0));
    let setup = Setup::default();
    let live = in_virtual_time(&setup, &trace, nothing_more());
    let simulated = Row::of(&simulate(&trace, &setup).unwrap());
    assert_alike(&live, &simulated, |row| row.effective, setup.admission.policy.name());
}

#[test]
fn a_prompt_has_the_tokens_and_the_blocks_of_the_trace() {
    let body: Json = serde_json::from_slice(&body(1_030, 7, &[4, 9, 2])).unwrap();
    let prompt: Vec<u64> = body["prompt"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect();
    assert_eq!((prompt.len(), prompt[0], prompt[512], prompt[1_024]), (1_030, 5, 10, 3));
    assert_eq!((prompt.iter().sum::<u64>(), &body["max_tokens"]), (18, &json!(7)));
}

#[test]
fn a_row_counts_what_was_seen_by_both_deadlines() {
    let setup = Setup::default();
    let secs = Duration::from_secs;
    let seen = [
        Seen::Served { ttft: secs(1), gap: Duration::from_millis(90) },
        Seen::Served { ttft: secs(31), gap: Duration::from_millis(90) },
        Seen::Served { ttft: secs(4), gap: Duration::from_millis(110) },
        Seen::Refused { is_late: false, took: Duration::from_millis(3), retry: Some(true) },
        Seen::Refused { is_late: true, took: secs(9), retry: Some(false) },
        Seen::Failed,
    ];
    let row = counted(&seen, Live::default(), &setup);
    assert_eq!((row.effective, row.missed, row.early, row.late, row.failed), (1, 2, 1, 1, 1));
    assert_eq!((row.ttft_mean_s, row.ttft_p90_s), (12.0, 31.0));
    let live = row.live.unwrap();
    assert_eq!((live.refusal_max, live.retried, live.retries_served), (Duration::from_millis(3), 2, 1));
}

#[test]
fn only_what_is_sent_in_time_is_replayed() {
    let mut builder = Builder::new();
    for second in 0..10 {
        builder.push(Instant::ZERO + Duration::from_secs(second), 600, 0, &[second, second + 100]).unwrap();
    }
    let part = until(&builder.build().unwrap(), 2, 3.0);
    assert_eq!((part.requests().len(), part.requests()[6].output_tokens), (7, 1));
}
