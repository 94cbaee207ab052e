//! Small clusters worked out by hand, and the books after many requests.

use alloc::vec::Vec;

use super::*;
use crate::random::Random;
use crate::sched::colocate::{Colocate, Reason};
use crate::sched::cost::{Decode, Link, Prefill};

/// 1 ms a token, 10 tokens a block, decode steps of 10 ms and 1 ms a request.
fn setup(prefill: usize, decode: usize) -> Setup {
    let mut setup = Setup::new(prefill, decode);
    setup.profile.block_tokens = 10;
    setup.profile.kv_bytes_per_token = 100;
    setup.profile.prefill = Prefill { fixed: 0.0, linear: 1e-3, quadratic: 0.0 };
    setup.profile.decode = Decode { fixed: 0.01, per_request: 0.001, per_token: 0.0 };
    setup.profile.link = Link { bytes_per_second: 1e4, latency: 0.0 };
    setup.cache_blocks = 100;
    setup.learning = Learning::Off;
    setup
}

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

fn arrival(id: u64, tokens: u32, first: u64) -> Arrival {
    let blocks = (0..u64::from(tokens / 10)).map(|block| RouteHash(first * 1_000 + block)).collect();
    Arrival { id, name: id, tokens, blocks, ..Arrival::default() }
}

fn wait_ms(decision: &Decision) -> u64 {
    decision.placed.chosen.wait.as_millis()
}

#[test]
fn who_comes_second_waits_for_what_is_left_of_the_first() {
    let mut conductor = Conductor::new(setup(1, 1));
    assert_eq!(wait_ms(&conductor.on_arrival(at(0), &arrival(1, 100, 1))), 0);
    assert_eq!(wait_ms(&conductor.on_arrival(at(30), &arrival(2, 50, 2))), 70);
    assert_eq!(wait_ms(&conductor.on_arrival(at(30), &arrival(3, 50, 3))), 120);
    // The first is done early: the second is computed from now on.
    conductor.on_prefilled(at(60), 1, None);
    assert_eq!(wait_ms(&conductor.on_arrival(at(70), &arrival(4, 50, 4))), 40 + 50);
    assert_eq!(conductor.lines().collect::<Vec<_>>(), [3]);
}

#[test]
fn a_prefix_that_is_still_computed_is_waited_for_and_one_of_a_cleared_instance_is_gone() {
    let mut conductor = Conductor::new(setup(2, 1));
    let first = conductor.on_arrival(at(0), &arrival(1, 100, 1)).placed.chosen.instance;
    let second = conductor.on_arrival(at(10), &arrival(2, 105, 1)).placed.chosen;
    assert_eq!((second.instance, second.reused, second.wait.as_millis()), (first, 100, 90));
    conductor.on_cleared(first);
    assert_eq!(conductor.on_arrival(at(10), &arrival(3, 100, 1)).placed.chosen.reused, 0);
}

#[test]
fn an_instance_that_failed_is_avoided_unless_nobody_else_is_there() {
    let mut conductor = Conductor::new(setup(2, 2));
    for down in [0, 1] {
        let avoiding =
            Arrival { is_retry: true, prefill_down: [down].into(), decode_down: [down].into(), ..arrival(9, 10, 9) };
        let decision = conductor.on_arrival(at(0), &avoiding);
        assert_eq!((decision.placed.chosen.instance, decision.decode), (1 - down, 1 - down));
        conductor.on_left(at(0), 9, None);
    }
    let all = Arrival { prefill_down: [0, 1].into(), decode_down: [0, 1].into(), ..arrival(10, 10, 9) };
    assert_eq!(conductor.on_arrival(at(0), &all).verdict, Verdict::Admit);
}

#[test]
fn without_prefill_instances_a_request_is_decoded_where_its_prompt_is() {
    let mut conductor = Conductor::new(setup(0, 3));
    let mut there = Vec::new();
    for id in 0..6 {
        let decision = conductor.on_arrival(at(0), &arrival(id, 100, id % 3));
        assert_eq!(decision.decode, decision.placed.chosen.instance);
        there.push(decision.decode);
    }
    assert_eq!(there[..3], there[3..], "the second time where the prompt is");
    there.sort_unstable();
    assert_eq!(there, [0, 0, 1, 1, 2, 2]);
}

#[test]
fn who_is_refused_and_comes_back_when_told_is_served() {
    let mut setup = setup(1, 1);
    setup.admission.hold = Duration::ZERO;
    let mut conductor = Conductor::new(setup);
    let slo = Slo { tbt: Duration::from_millis(15), ..Slo::default() };
    let mut refused = None;
    for id in 0..20 {
        let asked = Arrival { slo, ..arrival(id, 10, id) };
        let decision = conductor.on_arrival(at(0), &asked);
        conductor.on_prefilled(at(0), id, None);
        match decision.verdict {
            Verdict::Admit => conductor.on_joined(at(0), id, 0),
            Verdict::Refuse { retry_after, .. } => refused = refused.or(Some((asked, retry_after))),
        }
    }
    let (asked, retry_after) = refused.expect("six at once are too many");
    assert!(retry_after >= Duration::from_secs(1), "{retry_after}");
    let early = conductor.on_arrival(at(1), &Arrival { id: 30, ..asked.clone() });
    assert!(!early.was_promised && early.verdict != Verdict::Admit);
    let other = conductor.on_arrival(at(70_000), &Arrival { id: 31, name: 77, ..asked.clone() });
    assert!(!other.was_promised);
    conductor.on_left(at(70_000), 31, None);
    let mut later = setup_full(&asked);
    let back = later.0.on_arrival(later.1, &Arrival { id: 40, name: asked.name, ..asked.clone() });
    assert!(back.was_promised && back.verdict == Verdict::Admit, "{back:?}");
    let stranger = later.0.on_arrival(later.1, &Arrival { id: 41, name: 99, ..asked });
    assert_ne!(stranger.verdict, Verdict::Admit);
}

/// A conductor that is just full at a moment when the request of that name may come back.
fn setup_full(asked: &Arrival) -> (Conductor, Instant) {
    let mut setup = setup(1, 1);
    setup.admission.hold = Duration::ZERO;
    let mut conductor = Conductor::new(setup);
    conductor.promise(asked.name, at(5));
    for id in 50.. {
        let decision = conductor.on_arrival(at(10), &Arrival { id, name: id, ..asked.clone() });
        if decision.verdict != Verdict::Admit {
            break;
        }
        conductor.on_prefilled(at(10), id, None);
        conductor.on_joined(at(10), id, 0);
    }
    (conductor, at(10))
}

/// Sends requests through a conductor in a random order of events; its hash.
fn random_run(seed: u64) -> u64 {
    let (mut random, mut conductor) = (Random::new(seed), Conductor::new(setup(3, 2)));
    let mut running: Vec<(u64, u32)> = Vec::new();
    let mut now = at(0);
    for id in 0..2_000 {
        now = now + Duration::from_millis(random.below(100));
        let tokens = 20 + u32::try_from(random.below(200)).unwrap();
        let asked = Arrival { steps: [id, 2 * id].into(), ..arrival(id, tokens, random.below(20)) };
        if conductor.on_arrival(now, &asked).verdict == Verdict::Admit {
            running.push((id, 0));
        }
        for _ in 0..3 {
            if running.is_empty() {
                break;
            }
            let place = usize::try_from(random.below(u64::try_from(running.len()).unwrap())).unwrap();
            let (id, stage) = running[place];
            running[place].1 += 1;
            match (stage, random.below(10)) {
                (_, 0) => {
                    conductor.on_left(now, id, None);
                    running.remove(place);
                }
                (0, _) => conductor.on_prefilled(now, id, None),
                (1, _) => conductor.on_joined(now, id, id),
                _ => {
                    conductor.on_left(now, id, Some(9));
                    running.remove(place);
                }
            }
        }
    }
    running.iter().for_each(|(id, _)| conductor.on_left(now, *id, None));
    assert!(conductor.requests.is_empty() && conductor.lines().all(|waiting| waiting == 0));
    assert_eq!((conductor.batch(0).batch, conductor.batch(1).batch), (0, 0));
    assert!(conductor.count() == 2_000 && conductor.promises.len() == conductor.promised.len());
    conductor.hash()
}

#[test]
fn whatever_happens_nothing_is_held_at_the_end_and_the_same_inputs_give_the_same_decisions() {
    assert_eq!([random_run(1), random_run(2)], [random_run(1), random_run(2)]);
    assert_ne!(random_run(1), random_run(2));
}

#[test]
fn steps_that_are_told_late_do_not_go_back() {
    let mut conductor = Conductor::new(setup(1, 1));
    conductor.on_arrival(at(0), &Arrival { steps: [5].into(), ..arrival(1, 100, 1) });
    conductor.on_prefilled(at(1), 1, None);
    conductor.on_joined(at(1), 1, 9);
    // Somebody looked before the other joined, and says so afterwards.
    conductor.on_arrival(at(2), &Arrival { steps: [7].into(), ..arrival(2, 100, 2) });
    assert_eq!(conductor.batch(0).context, 200);
    conductor.on_arrival(at(3), &Arrival { steps: [12].into(), ..arrival(3, 100, 3) });
    assert_eq!(conductor.batch(0).context, 303);
}

#[test]
fn what_is_measured_moves_the_costs() {
    let mut setup = setup(1, 1);
    setup.learning = Learning::On;
    let mut conductor = Conductor::new(setup);
    for id in 0..300 {
        let now = at(id * 1_000);
        conductor.on_arrival(now, &arrival(id, 100, id));
        // Half as fast as was said, both.
        let measured = Measured { work: Work { new: 100, prefix: 0 }, seconds: 0.2 };
        conductor.on_prefilled(now, id, Some(measured));
        conductor.on_joined(now, id, 0);
        conductor.on_left(now + Duration::from_millis(22 * 9), id, Some(10));
    }
    let profile = conductor.profile();
    assert!((profile.prefill.seconds(Work { new: 100, prefix: 0 }) - 0.2).abs() < 0.01, "{profile:?}");
    assert!((profile.decode.seconds(1, 100) - 0.022).abs() < 0.001, "{profile:?}");
}

#[test]
fn what_a_store_has_is_loaded_by_whoever_is_free() {
    let mut conductor = Conductor::new(setup(2, 1));
    let stored = |blocks, version| Some(Stored { blocks, version });
    let first = conductor.on_arrival(at(0), &Arrival { stored: stored(0, 3), ..arrival(1, 100, 1) });
    conductor.on_prefilled(at(100), 1, None);
    // Nothing is believed of the one that computed it, and it is not waited for: the store has five blocks of it by now.
    let mut second = Arrival { stored: stored(5, 9), ..arrival(2, 100, 1) };
    let placed = [101, 102].map(|now| {
        let decision = conductor.on_arrival(at(now), &second);
        assert_eq!(conductor.record().index_version, 9, "what it rests on");
        second.id += 1;
        decision.placed.chosen
    });
    assert_eq!(first.placed.chosen.reused, 0);
    assert_eq!(placed.map(|chosen| (chosen.reused, chosen.new, chosen.pulled)), [(50, 50, 0); 2]);
    assert_ne!(placed[0].instance, placed[1].instance, "the second finds the first one's node busy");
    // More than the prompt has is not there.
    let all = conductor.on_arrival(at(900), &Arrival { stored: stored(99, 10), ..arrival(9, 100, 1) });
    assert_eq!((all.placed.chosen.new, all.placed.chosen.reused), (1, 99));
}

#[test]
fn a_tenant_within_its_share_is_favoured_and_one_beyond_it_is_not() {
    let mut setup = setup(1, 1);
    setup.tenants = [1.0, 1.0].into();
    let mut conductor = Conductor::new(setup);
    let (mut favoured, mut line, mut free) = ([0, 0], VecDeque::new(), 0);
    // The first asks for a little; the second, all together, for eight times what can be computed.
    for id in 0..400 {
        let now = id * 100;
        while let Some(&(done, served)) = line.front().filter(|(done, _)| *done <= now) {
            conductor.on_prefilled(at(done), served, None);
            conductor.on_left(at(done), served, None);
            line.pop_front();
        }
        let (tenant, tokens) = if id % 20 == 0 { (0, 200) } else { (1, 900) };
        let slo = Slo { ttft: Duration::from_secs(3), tbt: Duration::MAX };
        let decision = conductor.on_arrival(at(now), &Arrival { tenant, slo, ..arrival(id, tokens, id) });
        favoured[tenant as usize] += u32::from(decision.is_favoured);
        if decision.verdict == Verdict::Admit {
            free = now.max(free) + u64::from(tokens);
            line.push_back((free, id));
        }
    }
    assert!(favoured[0] > 10 && favoured[1] == 0, "{favoured:?} of 20 and 380");
}

#[test]
fn a_prompt_is_computed_by_its_decode_instance_where_that_is_sooner_and_is_in_no_line() {
    let mut setup = setup(1, 2);
    setup.placement.colocate = Colocate::Sooner;
    let mut conductor = Conductor::new(setup.clone());
    // 100 ms there; 110 with the last block's hop from the prefill instance.
    let first = conductor.on_arrival(at(0), &arrival(1, 100, 1));
    let choice = conductor.record().colocation.unwrap();
    assert_eq!((first.is_colocated, choice.reason), (true, Reason::Sooner));
    assert_eq!((choice.apart.as_millis(), choice.colocated.as_millis()), (1_000, 100), "10,000 bytes at 10 kB/s");
    assert!(conductor.record().replays(conductor.profile()));
    assert_eq!(conductor.lines().collect::<Vec<_>>(), [0]);
    // The other instance is idle; then both are not: the third waits, and pushes somebody back.
    let second = conductor.on_arrival(at(10), &arrival(2, 100, 2));
    assert_eq!((second.is_colocated, second.decode), (true, 1 - first.decode));
    conductor.on_arrival(at(20), &arrival(3, 100, 3));
    let choice = conductor.record().colocation.unwrap();
    assert_eq!((choice.side.wait.as_millis(), choice.side.batch), (80, 1));
    assert_eq!(choice.scores.map(|nanos| nanos / 1_000_000), [1_000, 280]);
    // Whoever is done is not waited for.
    [1, 2, 3].into_iter().for_each(|id| conductor.on_prefilled(at(400), id, None));
    [1, 2, 3].into_iter().for_each(|id| conductor.on_left(at(500), id, None));
    conductor.on_arrival(at(500), &arrival(4, 100, 4));
    assert_eq!(conductor.record().colocation.unwrap().side.wait, Duration::ZERO);

    // What it rests on is recorded where nothing is chosen, too.
    setup.placement.colocate = Colocate::Never;
    let mut never = Conductor::new(setup.clone());
    assert!(!never.on_arrival(at(0), &arrival(1, 100, 1)).is_colocated);
    assert_eq!(never.record().colocation.unwrap().reason, Reason::Never);
    assert_eq!(never.lines().collect::<Vec<_>>(), [1]);
    setup.ability = Ability::Unable;
    setup.placement.colocate = Colocate::Sooner;
    let mut unable = Conductor::new(setup);
    assert!(!unable.on_arrival(at(0), &arrival(1, 100, 1)).is_colocated);
    assert_eq!(unable.record().colocation.unwrap().reason, Reason::Unable);
}

#[test]
fn prompts_go_to_decode_instances_while_all_prefill_instances_are_down() {
    let mut setup = setup(1, 1);
    setup.placement.colocate = Colocate::Sooner;
    setup.profile.link.bytes_per_second = 1e9;
    let mut conductor = Conductor::new(setup);
    let stored = Some(Stored { blocks: 9, version: 1 });
    let down = Arrival { prefill_down: [0].into(), stored, ..arrival(1, 100, 1) };
    let decision = conductor.on_arrival(at(0), &down);
    let choice = conductor.record().colocation.unwrap();
    assert_eq!((decision.is_colocated, choice.reason), (true, Reason::PrefillDown));
    assert_eq!((choice.side.reused, choice.colocated.as_millis()), (90, 10), "it loads from the store, too");
    conductor.on_left(at(1), 1, None);
    let up = conductor.on_arrival(at(1), &Arrival { stored, ..arrival(2, 100, 1) });
    let choice = conductor.record().colocation.unwrap();
    assert_eq!((up.is_colocated, choice.reason, choice.hop), (true, Reason::Sooner, Duration::from_micros(1)));
}
