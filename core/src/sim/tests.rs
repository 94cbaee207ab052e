//! Tiny clusters worked out by hand: 1 ms a prompt token, 10 ms and 1 ms a request per decode step, a network that takes
//! no time unless a test says so.

use alloc::vec::Vec;

use super::trace::{Builder, Synthetic, Trace};
use super::*;
use crate::evict;
use crate::sched::cost::{Decode, Link, Prefill};
use crate::sched::{admission, placement};
use crate::time::{Duration, Instant};

fn setup(prefill: usize, decode: usize) -> Setup {
    let mut setup = Setup { prefill, decode, ..Setup::default() };
    setup.profile.kv_bytes_per_token = 1_000;
    setup.profile.prefill = Prefill { fixed: 0.0, linear: 1e-3, quadratic: 0.0 };
    setup.profile.decode = Decode { fixed: 0.01, per_request: 0.001, per_token: 0.0 };
    setup.profile.link = Link { bytes_per_second: 1e12, latency: 0.0 };
    setup.admission.policy = admission::Policy::None;
    setup
}

/// Requests of (milliseconds, tokens, output, blocks).
fn trace(requests: &[(u64, u32, u32, &[u64])]) -> Trace {
    let mut builder = Builder::new();
    for &(at, tokens, output, blocks) in requests {
        builder.push(Instant::ZERO + Duration::from_millis(at), tokens, output, blocks).unwrap();
    }
    builder.build().unwrap()
}

fn ttfts(outcome: &Outcome) -> Vec<u64> {
    outcome.served.iter().map(|one| one.ttft.as_micros()).collect()
}

#[test]
fn a_request_alone_is_computed_and_decoded() {
    let outcome = run(&trace(&[(0, 1_024, 3, &[0, 1])]), &setup(1, 1)).unwrap();
    let row = outcome.served[0];
    assert_eq!(
        (row.fate, row.ttft, row.tbt),
        (Fate::Effective, Duration::from_millis(1_024), Duration::from_millis(11))
    );
    assert_eq!(outcome.ended, Instant::ZERO + Duration::from_millis(1_024 + 2 * 11));
    assert_eq!((outcome.prefill_mean(), outcome.goodput_tokens, outcome.hit_tokens_pct()), (1.024, 3, 0.0));
}

#[test]
fn an_answer_of_one_token_needs_no_decode_node() {
    let outcome = run(&trace(&[(0, 512, 1, &[0])]), &setup(1, 1)).unwrap();
    assert_eq!(
        (ttfts(&outcome), outcome.served[0].tbt, outcome.ended.as_nanos()),
        (alloc::vec![512_000], Duration::ZERO, 512_000_000)
    );
}

#[test]
fn a_line_is_served_in_its_order() {
    let requests = trace(&[(0, 1_024, 2, &[0, 1]), (1, 1_024, 2, &[2, 3]), (2, 512, 2, &[4])]);
    let mut setup = setup(1, 1);
    setup.placement.policy = placement::Policy::MooncakeFast25;
    assert_eq!(ttfts(&run(&requests, &setup).unwrap()), [1_024_000, 2_047_000, 2_558_000]);
    // The third is shorter and passes the second.
    setup.placement.policy = placement::Policy::Millpond;
    assert_eq!(ttfts(&run(&requests, &setup).unwrap()), [1_024_000, 2_559_000, 1_534_000]);
}

#[test]
fn a_prompt_seen_before_computes_one_token_and_one_being_computed_is_waited_for() {
    let requests = trace(&[(0, 1_024, 2, &[0, 1]), (1, 1_536, 2, &[0, 1, 2]), (9_000, 1_024, 2, &[0, 1])]);
    let outcome = run(&requests, &setup(1, 1)).unwrap();
    assert_eq!(ttfts(&outcome), [1_024_000, 1_535_000, 1_000]);
    assert_eq!((outcome.served[1].reused, outcome.served[2].reused), (1_024, 1_023));
    assert!((outcome.hit_blocks_pct(512) - 100.0 * 4.0 / 7.0).abs() < 1e-9);
}

#[test]
fn a_shorter_request_does_not_start_before_the_prefix_it_needs_is_computed() {
    // The third ranks before the second, whose block it needs; it is computed at 1,542 and joins when a step ends, at 1,547.
    let requests = trace(&[(0, 512, 2, &[0]), (1, 1_024, 2, &[1, 2]), (2, 1_030, 2, &[1, 2, 3])]);
    assert_eq!(ttfts(&run(&requests, &setup(1, 1)).unwrap()), [512_000, 1_535_000, 1_545_000]);
}

#[test]
fn a_prefix_is_pulled_to_an_idle_node() {
    // The idle take turns: the second goes to the other node, the third to the holder of the prefix, for ten seconds. 1,024 tokens take 102.4 ms to pull, 512 are computed.
    let long: Vec<u64> = (10..30).collect();
    let requests = trace(&[
        (0, 1_024, 2, &[0, 1]),
        (3_000, 512, 2, &[9]),
        (5_000, 10_240, 2, &long),
        (7_000, 1_536, 2, &[0, 1, 2]),
    ]);
    for policy in [placement::Policy::Millpond, placement::Policy::MooncakeFast25, placement::Policy::MooncakeArxiv] {
        let mut setup = setup(2, 1);
        (setup.placement.policy, setup.profile.link.bytes_per_second) = (policy, 1e7);
        let outcome = run(&requests, &setup).unwrap();
        assert_eq!(
            (ttfts(&outcome)[3], outcome.pulls, outcome.by_prefill.as_slice()),
            (614_400, 1, &[2, 2][..]),
            "{policy:?}"
        );
    }
    let mut setup = setup(2, 1);
    setup.placement.policy = placement::Policy::LocalPrefix;
    assert_eq!(ttfts(&run(&requests, &setup).unwrap())[3], 1_536_000);
}

#[test]
fn a_request_joins_with_the_next_step() {
    // Steps end at 512 + 11 k ms: the second is computed at 1,024 and joins at 1,029.
    let outcome = run(&trace(&[(0, 512, 100, &[0]), (0, 1_024, 2, &[1, 2])]), &setup(2, 1)).unwrap();
    assert_eq!(ttfts(&outcome), [512_000, 1_029_000]);
    assert_eq!(outcome.served[1].tbt, Duration::from_millis(12));
}

#[test]
fn a_slow_network_delays_the_first_token() {
    let mut setup = setup(1, 1);
    setup.profile.link.bytes_per_second = 5e5; // 2 ms a token
    assert_eq!(ttfts(&run(&trace(&[(0, 512, 2, &[0])]), &setup).unwrap()), [1_024_000]);
}

#[test]
fn each_admission_does_what_its_name_says_to_a_second_request_that_is_one_too_many() {
    let requests = trace(&[(0, 512, 100, &[0]), (0, 1_024, 100, &[1, 2])]);
    let fates = |policy| {
        let mut setup = setup(2, 1);
        (setup.admission.policy, setup.slo.tbt) = (policy, Duration::from_micros(11_500));
        setup.admission.hold = Duration::from_millis(100);
        let outcome = run(&requests, &setup).unwrap();
        (outcome.served[1].fate, (outcome.wasted_prefill_s * 1e3).round_ties_even())
    };
    assert_eq!(fates(admission::Policy::None), (Fate::Missed, 0.0));
    assert_eq!(fates(admission::Policy::Late), (Fate::RejectedLate, 1_024.0));
    // The first is on its way, not there: early lets the second in.
    assert_eq!(fates(admission::Policy::Early), (Fate::RejectedLate, 1_024.0));
    assert_eq!(fates(admission::Policy::EarlyUniform), (Fate::RejectedEarly, 0.0));
    assert_eq!(fates(admission::Policy::Millpond), (Fate::RejectedEarly, 0.0));
}

#[test]
fn a_prompt_held_at_the_door_joins_when_a_place_is_free_or_is_refused_when_its_time_is_over() {
    let requests = trace(&[(0, 512, 100, &[0]), (0, 1_024, 100, &[1, 2])]);
    let with = |hold| {
        let mut setup = setup(2, 1);
        (setup.slo.tbt, setup.admission.level) = (Duration::from_micros(11_900), 1.0);
        (setup.admission.policy, setup.admission.hold) = (admission::Policy::Millpond, Duration::from_millis(hold));
        run(&requests, &setup).unwrap()
    };
    // The first ends after 99 steps of 11 ms: at 1,601.
    let held = with(600);
    assert_eq!(
        (held.served[1].fate, held.served[1].ttft, held.held),
        (Fate::Effective, Duration::from_millis(1_601), 1)
    );
    let refused = with(500);
    assert_eq!((refused.served[1].fate, refused.wasted_prefill_s), (Fate::RejectedLate, 1.024));
}

#[test]
fn a_full_cache_forgets_and_a_pool_is_read_by_all() {
    let requests = trace(&[(0, 1_024, 2, &[0, 1]), (5_000, 1_024, 2, &[2, 3]), (10_000, 1_024, 2, &[0, 1])]);
    let mut setup = setup(1, 1);
    setup.cache_blocks = Some(2);
    assert_eq!(ttfts(&run(&requests, &setup).unwrap())[2], 1_024_000);
    (setup.prefill, setup.pooled) = (2, true);
    for policy in [placement::Policy::RoundRobin, placement::Policy::Millpond] {
        setup.placement.policy = policy;
        assert_eq!(ttfts(&run(&requests, &setup).unwrap())[2], 1_000);
    }
}

#[test]
fn an_index_that_hears_nothing_sends_requests_to_blocks_that_are_gone() {
    let requests = trace(&[(0, 1_024, 2, &[0, 1]), (5_000, 1_024, 2, &[2, 3]), (10_000, 1_024, 2, &[0, 1])]);
    let mut setup = setup(1, 1);
    (setup.cache_blocks, setup.event_loss) = (Some(2), 1.0);
    let outcome = run(&requests, &setup).unwrap();
    assert_eq!((outcome.stale, ttfts(&outcome)[2]), (1, 1_024_000));
}

#[test]
fn coupled_instances_stall_decodes_and_chunks_share_the_time() {
    let requests = trace(&[(0, 512, 100, &[0]), (600, 1_024, 2, &[1, 2])]);
    let with = |baseline| {
        let mut setup = Setup { coupled: 1, baseline, chunk: 100, ..setup(0, 0) };
        setup.slo.tbt = Duration::from_millis(50);
        run(&requests, &setup).unwrap()
    };
    // A step ends at 611; the prompt takes 1,024 ms then; the first has one gap of 1,024 + 12 ms among nine of 12 and 11.
    let plain = with(Baseline::Plain);
    assert_eq!(ttfts(&plain), [512_000, 1_035_000]);
    assert_eq!((plain.served[0].fate, plain.served[0].tbt.as_micros()), (Fate::Missed, (1_036_000 + 9 * 11_000) / 10));
    // Ten chunks of 100 ms and one of 24, each with a step of 11 ms.
    let chunked = with(Baseline::ChunkedPrefill);
    assert_eq!(ttfts(&chunked), [512_000, 11_000 + 1_024_000 + 11 * 11_000]);
    assert_eq!(chunked.served[0].tbt, Duration::from_millis(111));
}

#[test]
fn a_refused_request_comes_back_when_told_to_with_a_higher_priority() {
    let requests = trace(&[(0, 512, 100, &[0]), (0, 1_024, 100, &[1, 2])]);
    let with = |policy, retries| {
        let mut setup = setup(2, 1);
        (setup.admission.policy, setup.slo.tbt, setup.retries) = (policy, Duration::from_micros(11_500), retries);
        run(&requests, &setup).unwrap()
    };
    let nobody = with(admission::Policy::Late, Retries { share: 0.0, tries: 9 });
    assert_eq!((nobody.served[1].fate, nobody.refusals, nobody.returns), (Fate::RejectedLate, 1, 0));
    // Computed at 1,024 and refused; an answer is thought to take 300 steps of 11 ms, so it is back at 4.3 s, when the
    // first is over, finds its prompt cached, and computes one token.
    let all = with(admission::Policy::Late, Retries { share: 1.0, tries: 1 });
    let row = all.served[1];
    assert_eq!((row.fate, row.returns, row.ttft.as_micros(), row.priority), (Fate::Effective, 1, 1_000, 0));
    assert!((4_200..4_400).contains(&row.at.as_nanos().div_ceil(1_000_000)), "{:?}", row.at);
    assert_eq!((all.refusals, all.returns, all.returns_served(), all.wasted_prefill_s), (1, 1, 1.0, 1.024));
    // Refused for as long as the first runs, it gives up after its tries.
    let early = with(admission::Policy::EarlyUniform, Retries { share: 1.0, tries: 1 });
    assert_eq!((early.served[1].fate, early.refusals, early.returns), (Fate::RejectedEarly, 2, 1));
}

#[test]
fn each_request_is_judged_by_its_own_deadlines_and_nobody_slows_down_the_strict() {
    let requests = trace(&[(0, 512, 100, &[0]), (0, 1_024, 100, &[1, 2])]);
    let of = |milli: u64| admission::Slo { ttft: Duration::from_secs(30), tbt: Duration::from_micros(milli) };
    let with = |policy, strict, rest| {
        let mut setup = setup(2, 1);
        (setup.admission.policy, setup.slo) = (policy, rest);
        setup.classes = alloc::vec![Class { share: 0.5, slo: strict, priority: 1 }];
        // A seed that puts the first into the class and the second not.
        setup.seed = (0..99)
            .find(|&seed| {
                setup.seed = seed;
                run(&requests, &setup).unwrap().served.iter().map(|row| row.priority).eq([1, 0])
            })
            .unwrap();
        run(&requests, &setup).unwrap().served.iter().map(|row| row.fate).collect::<Vec<_>>()
    };
    let (strict, lenient) = (of(11_500), of(50_000));
    assert_eq!(with(admission::Policy::None, strict, lenient), [Fate::Missed, Fate::Effective]);
    assert_eq!(with(admission::Policy::Late, strict, lenient), [Fate::Effective, Fate::RejectedLate]);
    assert_eq!(with(admission::Policy::Millpond, strict, lenient)[0], Fate::Effective);
    assert_eq!(with(admission::Policy::Late, lenient, lenient), [Fate::Effective; 2]);
}

#[test]
fn regret_is_what_lies_between_a_run_and_what_could_have_been() {
    let requests = trace(&[(0, 1_024, 3, &[0, 1]), (0, 512, 3, &[9]), (5_000, 1_536, 3, &[0, 1, 2])]);
    let outcome = run(&requests, &setup(1, 1)).unwrap();
    let least: Vec<f64> = outcome.served.iter().map(|row| (row.prefill_least * 1e3).round_ties_even()).collect();
    assert_eq!(least, [1_024.0, 512.0, 512.0]);
    // One of the first two waits for the other.
    assert!(outcome.ttft_regret() > 0.1 && outcome.ttft_regret() < 0.4, "{}", outcome.ttft_regret());
    assert!((outcome.regret() - (outcome.length_blind_bound - 3.0)).abs() < 1e-9);
    assert!(outcome.goodput_tokens_per_s() > 1.0, "{}", outcome.goodput_tokens_per_s());
}

#[test]
fn coupled_instances_share_what_decodes_and_may_work_one_by_one() {
    // A shared block saves 512 ms; a third answer beside two takes 300 steps of 13 ms instead of 11. So the second goes where the
    // block is, and the third to where nobody decodes.
    let requests = trace(&[(0, 512, 1_000, &[0]), (700, 600, 1_000, &[0, 1]), (1_400, 600, 2, &[0, 2])]);
    let two = Setup { coupled: 2, baseline: Baseline::PrefixCaching, ..setup(0, 0) };
    let mut shares = run(&requests, &two).unwrap().by_prefill;
    shares.sort_unstable();
    assert_eq!(shares, [1, 2]);
    // 999 steps of 11 ms after the first token at 512, then 512 ms for the second.
    let requests = trace(&[(0, 512, 1_000, &[0]), (600, 512, 2, &[1])]);
    let with = |together| ttfts(&run(&requests, &Setup { coupled: 1, together, ..setup(0, 0) }).unwrap())[1];
    assert_eq!((with(None), with(Some(1))), (523_000, 512_000 + 999 * 11_000 + 512_000 - 600_000));
}

#[test]
fn coupled_instances_reuse_prefixes_only_if_they_keep_them() {
    let requests = trace(&[(0, 1_024, 2, &[0, 1]), (5_000, 1_536, 2, &[0, 1, 2])]);
    let with = |baseline| ttfts(&run(&requests, &Setup { coupled: 1, baseline, ..setup(0, 0) }).unwrap())[1];
    assert_eq!((with(Baseline::Plain), with(Baseline::PrefixCaching)), (1_536_000, 512_000));
}

#[test]
fn a_run_is_the_same_bit_for_bit_whatever_is_switched_on() {
    let trace = Synthetic { requests: 100, rate: 3.0, ..Synthetic::default() }.trace();
    let mut setup = Setup { prefill: 4, decode: 3, seed: 5, pipeline: 2, ..Setup::default() };
    (setup.prefill_noise, setup.decode_noise, setup.hint_noise) = (0.1, 0.1, Some(0.5));
    (setup.staleness, setup.event_loss) = (Duration::from_secs(1), 0.01);
    let slo = admission::Slo { tbt: Duration::from_millis(200), ..setup.slo };
    (setup.classes, setup.retries) =
        (alloc::vec![Class { share: 0.1, slo, priority: 1 }], Retries { share: 0.5, tries: 2 });
    setup.tenants = alloc::vec![Tenant { offered: 1.0, weight: 1.0 }, Tenant { offered: 2.0, weight: 1.0 }];
    (setup.cache_blocks, setup.evict) = (Some(500), evict::Kind::S3Fifo);
    let mut hashes = Vec::new();
    let placements = placement::Policy::ALL.map(|policy| (policy, admission::Policy::Millpond));
    let admissions = admission::Policy::ALL.map(|policy| (placement::Policy::Millpond, policy));
    for policies in placements.into_iter().chain(admissions) {
        (setup.placement.policy, setup.admission.policy) = policies;
        let outcome = run(&trace, &setup).unwrap();
        assert_eq!(outcome, run(&trace, &setup).unwrap());
        assert_eq!(outcome.count(Fate::Running), 0);
        hashes.push(outcome.decisions);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 11); // millpond with millpond is in both lists
    setup.seed = 6;
    assert!(!hashes.contains(&run(&trace, &setup).unwrap().decisions));
}

#[test]
fn a_setup_that_makes_no_sense_is_refused() {
    let refused = |change: fn(&mut Setup)| {
        let mut setup = Setup::default();
        change(&mut setup);
        run(&trace(&[]), &setup).unwrap_err()
    };
    assert_eq!(refused(|setup| setup.coupled = 2), SetupError::Mixed);
    assert_eq!(refused(|setup| setup.prefill = 0), SetupError::Incomplete);
    assert_eq!(refused(|setup| setup.decode = 65), SetupError::TooMany);
    assert_eq!(refused(|setup| setup.event_loss = 1.5), SetupError::OutOfRange);
    assert_eq!(refused(|setup| setup.prefill_noise = f64::NAN), SetupError::OutOfRange);
    assert_eq!(refused(|setup| setup.chunk = 0), SetupError::Zero);
    assert_eq!(refused(|setup| setup.together = Some(0)), SetupError::Zero);
    assert_eq!(refused(|setup| setup.retries.share = 1.1), SetupError::OutOfRange);
    let half = Class { share: 0.6, slo: admission::Slo::default(), priority: 0 };
    assert_eq!(
        run(&trace(&[]), &Setup { classes: alloc::vec![half; 2], ..Setup::default() }),
        Err(SetupError::OutOfRange)
    );
    assert_eq!(run(&trace(&[]), &Setup::default()).unwrap().served.len(), 0);
}
