//! Small clusters worked out by hand.

use alloc::vec::Vec;

use super::*;
use crate::sched::cost::{Decode, Link, Prefill, Profile};
use crate::sched::spread::Near;

/// 1 ms a token, 10 tokens a block, 100 us to move a token.
fn profile() -> Profile {
    Profile {
        block_tokens: 10,
        kv_bytes_per_token: 100,
        prefill: Prefill { fixed: 0.0, linear: 1e-3, quadratic: 0.0 },
        decode: Decode { fixed: 0.01, per_request: 0.001, per_token: 1e-5 },
        link: Link { bytes_per_second: 1e6, latency: 0.0 },
        decode_tokens_max: 1_000,
        ..Profile::default()
    }
}

fn view(wait_ms: u64, matched: u32) -> PrefillView {
    PrefillView { wait: Duration::from_millis(wait_ms), matched, ..PrefillView::default() }
}

fn placed_with(options: &Options, tokens: u32, views: &[PrefillView]) -> Placed {
    place_prefill(options, &profile(), Prompt { tokens, turn: 0 }, views, &mut Vec::new()).unwrap()
}

fn placed(policy: Policy, tokens: u32, views: &[PrefillView]) -> Placed {
    placed_with(&Options { policy, ..Options::default() }, tokens, views)
}

#[test]
fn a_request_nobody_knows_goes_to_the_shortest_line() {
    for policy in
        [Policy::LeastLoaded, Policy::LocalPrefix, Policy::MooncakeFast25, Policy::MooncakeArxiv, Policy::Millpond]
    {
        let placed = placed(policy, 100, &[view(5, 0), view(3, 0), view(4, 0)]);
        assert_eq!((placed.chosen.instance, placed.chosen.ttft), (1, Duration::from_millis(103)), "{policy:?}");
        assert_eq!(placed.margin, Some(1_000_000), "{policy:?}");
    }
}

#[test]
fn local_prefix_weighs_the_line_against_what_is_there() {
    // 50 tokens are worth 50 ms: a line of 40 ms is shorter, one of 60 ms is not.
    assert_eq!(placed(Policy::LocalPrefix, 100, &[view(40, 5), view(0, 0)]).chosen.instance, 0);
    assert_eq!(placed(Policy::LocalPrefix, 100, &[view(60, 5), view(0, 0)]).chosen.instance, 1);
    assert_eq!(placed(Policy::LocalPrefix, 100, &[view(60, 5), view(0, 0)]).reason, Reason::Recomputed);
}

#[test]
fn the_paper_adds_the_transfer_to_the_line_and_millpond_overlaps_them() {
    // The holder is busy; the other has 4 ms of line and pulls 50 tokens in 5 ms.
    let views = [view(100, 5), view(4, 0)];
    let paper = placed(Policy::MooncakeFast25, 100, &views).chosen;
    assert_eq!((paper.instance, paper.source, paper.pulled, paper.ttft), (1, Some(0), 50, Duration::from_millis(59)));
    let ours = placed(Policy::Millpond, 100, &views).chosen;
    assert_eq!((ours.instance, ours.pulled, ours.ttft), (1, 50, Duration::from_millis(55)));
}

#[test]
fn at_the_threshold_fast25_recomputes_and_arxiv_pulls() {
    // The best has exactly twice the prefix.
    let views = [view(100, 6), view(0, 3)];
    let with =
        |policy, threshold| placed_with(&Options { policy, threshold, ..Options::default() }, 100, &views).chosen;
    assert_eq!((with(Policy::MooncakeFast25, 2.0).pulled, with(Policy::MooncakeArxiv, 2.0).pulled), (0, 30));
    assert_eq!((with(Policy::MooncakeFast25, 1.9).pulled, with(Policy::MooncakeArxiv, 1.9).pulled), (30, 30));
    assert_eq!((with(Policy::MooncakeFast25, 2.1).pulled, with(Policy::MooncakeArxiv, 2.1).pulled), (0, 0));
}

#[test]
fn who_has_nothing_pulls_whatever_the_threshold_and_nothing_is_pulled_from_nobody() {
    for policy in [Policy::MooncakeFast25, Policy::MooncakeArxiv] {
        let options = Options { policy, threshold: 1e9, ..Options::default() };
        let pulled = placed_with(&options, 100, &[view(1_000, 1), view(0, 0)]);
        assert_eq!((pulled.chosen.instance, pulled.chosen.pulled, pulled.reason), (1, 10, Reason::Pulled));
        let cold = placed_with(&options, 100, &[view(0, 0), view(0, 0)]);
        assert_eq!((cold.chosen.instance, cold.chosen.source, cold.reason), (0, None, Reason::Cold));
    }
}

#[test]
fn the_best_holder_does_not_pull_from_itself() {
    for policy in [Policy::MooncakeFast25, Policy::MooncakeArxiv, Policy::Millpond] {
        let placed = placed(policy, 100, &[view(0, 5), view(0, 5)]);
        assert_eq!(
            (placed.chosen.instance, placed.chosen.source, placed.reason),
            (0, None, Reason::Local),
            "{policy:?}"
        );
    }
}

#[test]
fn a_partial_block_does_not_count_and_a_full_hit_computes_a_token() {
    // 15 tokens are one whole block and a half, of which both are matched.
    assert_eq!(placed(Policy::Millpond, 15, &[view(0, 2)]).chosen.reused, 10);
    let full = placed(Policy::Millpond, 20, &[view(0, 2)]);
    assert_eq!((full.chosen.reused, full.chosen.new, full.chosen.ttft), (19, 1, Duration::from_millis(1)));
    assert_eq!(full.reason, Reason::Local);
}

#[test]
fn millpond_pulls_a_part_where_the_network_is_slower_than_computing() {
    // A token takes 4 ms to move and 1 ms to compute; 40 ms of line hide ten tokens of a pull.
    let mut profile = profile();
    profile.link.bytes_per_second = 25_000.0;
    let views = [view(500, 5), view(40, 0)];
    let prompt = Prompt { tokens: 100, turn: 0 };
    let mut considered = Vec::new();
    let placed = place_prefill(&Options::default(), &profile, prompt, &views, &mut considered).unwrap();
    assert_eq!((placed.chosen.instance, placed.chosen.pulled, placed.reason), (1, 10, Reason::PulledPart));
    assert_eq!(placed.chosen.ttft, Duration::from_millis(40 + 90));
    // Without a line nothing is hidden: it computes.
    let views = [view(500, 5), view(0, 0)];
    let placed = place_prefill(&Options::default(), &profile, prompt, &views, &mut considered).unwrap();
    assert_eq!((placed.chosen.pulled, placed.reason), (0, Reason::Recomputed));
}

#[test]
fn millpond_finds_the_best_length_of_a_pull() {
    // Against every length, block by block, over a range of networks and lines.
    for rate in [2e4, 1e5, 3e5, 1e6] {
        for wait in [0, 7, 40, 90] {
            let mut profile = profile();
            profile.link.bytes_per_second = rate;
            profile.prefill.quadratic = 2e-6;
            let views = [view(900, 8), view(wait, 1)];
            let options = Options::default();
            let placed =
                place_prefill(&options, &profile, Prompt { tokens: 100, turn: 0 }, &views, &mut Vec::new()).unwrap();
            let ttft = |blocks: u32| {
                let transfer = f64::from(blocks - 1) * 1_000.0 / rate;
                transfer.max(wait as f64 / 1e3) + profile.prefill.seconds(Work::of_prompt(100, blocks * 10))
            };
            let best = (1..=8).map(ttft).fold(f64::INFINITY, f64::min);
            assert!((placed.chosen.ttft.as_secs_f64() - best).abs() < 1e-6, "{rate} {wait}: {placed:?} {best}");
        }
    }
}

#[test]
fn millpond_pulls_from_whom_sends_least_and_the_paper_from_the_first() {
    let sending = |sending| PrefillView { sending, ..view(1_000, 5) };
    let views = [sending(3), sending(1), view(0, 0)];
    assert_eq!(placed(Policy::MooncakeFast25, 100, &views).chosen.source, Some(0));
    let ours = placed(Policy::Millpond, 100, &views).chosen;
    assert_eq!((ours.source, ours.transfer), (Some(1), Duration::from_millis(10)));
    // Blocks that are still being computed cannot be sent.
    let late = PrefillView { ready: Duration::from_millis(300), ..view(1_000, 5) };
    let ours = placed(Policy::Millpond, 100, &[late, view(0, 0)]).chosen;
    assert_eq!((ours.pulled, ours.ttft), (0, Duration::from_millis(100)));
}

#[test]
fn millpond_counts_what_it_pushes_back() {
    let full = PrefillView { behind: 3, ..view(1, 0) };
    assert_eq!(placed(Policy::Millpond, 100, &[full, view(50, 0)]).chosen.instance, 1);
    let options = Options { push_back: 0.0, ..Options::default() };
    assert_eq!(placed_with(&options, 100, &[full, view(50, 0)]).chosen.instance, 0);
}

#[test]
fn who_is_down_is_neither_chosen_nor_pulled_from() {
    let down = PrefillView { down: true, ..view(0, 9) };
    for policy in Policy::ALL {
        let placed = placed(policy, 100, &[down, view(5, 0), down]);
        assert_eq!((placed.chosen.instance, placed.chosen.source), (1, None), "{policy:?}");
        assert_eq!(
            place_prefill(
                &Options { policy, ..Options::default() },
                &profile(),
                Prompt::default(),
                &[down],
                &mut Vec::new()
            ),
            None
        );
    }
}

#[test]
fn turns_go_round_and_random_ones_are_spread() {
    let views = [view(0, 0); 4];
    let nth = |policy, turn| {
        let options = Options { policy, ..Options::default() };
        place_prefill(&options, &profile(), Prompt { tokens: 10, turn }, &views, &mut Vec::new())
            .unwrap()
            .chosen
            .instance
    };
    assert_eq!([0, 1, 2, 3, 4].map(|turn| nth(Policy::RoundRobin, turn)), [0, 1, 2, 3, 0]);
    let mut counts = [0_u32; 4];
    (0..4_000).for_each(|turn| counts[nth(Policy::Random, turn) as usize] += 1);
    assert!(counts.iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
}

#[test]
fn whoever_costs_the_same_takes_turns_and_whoever_costs_more_does_not() {
    let views = [view(3, 0), view(0, 0), view(0, 0), view(1, 0)];
    let nth = |near, turn| {
        let options = Options { near, ..Options::default() };
        let prompt = Prompt { tokens: 10, turn };
        let placed = place_prefill(&options, &profile(), prompt, &views, &mut Vec::new()).unwrap();
        (placed.chosen.instance, placed.margin.unwrap())
    };
    assert_eq!([0, 1, 2].map(|turn| nth(Near::default(), turn)), [(1, 0), (2, 0), (1, 0)]);
    // 10 ms of prefill: 11 ms is as good as 10, 13 ms is not; the margin of one that is a little worse is zero.
    let near = Near { parts_per_thousand: 100, slack: 0 };
    assert_eq!([0, 1, 2, 3].map(|turn| nth(near, turn)), [(1, 0), (2, 0), (3, 0), (1, 0)]);
}

#[test]
fn the_decode_instance_with_the_shortest_step_is_chosen_if_it_has_room() {
    let busy = |batch, context| DecodeView { batch, context, ..DecodeView::default() };
    // 12 ms + 1 ms against 12 ms + 10 us · 150 of context.
    let views = [busy(2, 0), busy(0, 150), DecodeView { down: true, ..DecodeView::default() }];
    let (instance, step) = place_decode(&profile(), 100, &views).unwrap();
    assert_eq!((instance, step.as_micros()), (1, 13_500));
    assert_eq!(place_decode(&profile(), 100, &[busy(0, 950)]), None);
    assert_eq!(place_decode(&profile(), 100, &[DecodeView::default(); 2]).unwrap().0, 0);
}
