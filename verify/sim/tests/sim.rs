//! Every mix of faults under many seeds, every single disturbance at every point of a run, and the bugs that they find.
//!
//! A failure names its scenario; `MILLPOND_SIM_MIX=Lossy MILLPOND_SIM_SEED=17 cargo test -p millpond-verify-sim one_scenario
//! -- --nocapture` runs it again, with `MILLPOND_SIM_ONCE=Cancel:40` for one of the sweeps. `MILLPOND_SIM_SEEDS=1000` takes
//! more seeds.

use std::panic::catch_unwind;

use millpond_core::seeded::{self, Bug};
use millpond_verify_sim::{Disturbance, Mix, Scenario, Summary, run};

/// Seeds of each mix by default.
const SEEDS: u64 = 24;

fn seeds() -> u64 {
    std::env::var("MILLPOND_SIM_SEEDS").ok().and_then(|number| number.parse().ok()).unwrap_or(SEEDS)
}

/// Runs it; a panic is a failure like others.
fn attempt(scenario: Scenario, bug: Option<Bug>) -> Result<Summary, String> {
    seeded::select(bug);
    let outcome = catch_unwind(|| run(&scenario));
    seeded::select(None);
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default())
    });
    outcome.map_err(|wrong| format!("{scenario}: {wrong}\n{}", again(&scenario)))
}

/// How to see it again.
fn again(scenario: &Scenario) -> String {
    let Scenario { mix, seed, once, .. } = scenario;
    let once = once.map(|once| format!("MILLPOND_SIM_ONCE='{once:?}' ")).unwrap_or_default();
    let command = "cargo test -p millpond-verify-sim one_scenario -- --nocapture";
    format!("again: {once}MILLPOND_SIM_MIX={mix:?} MILLPOND_SIM_SEED={seed} {command}")
}

fn all_hold(mix: Mix) {
    let (mut done, mut failed) = (0, 0);
    for seed in 0..seeds() {
        let summary = attempt(Scenario::new(mix, seed), None).unwrap_or_else(|wrong| panic!("{wrong}"));
        (done, failed) = (done + summary.done, failed + summary.failed);
    }
    println!("{mix:?}: {done} transfers done, {failed} failed");
    assert!(done > 0, "a mix in which nothing is ever done shows little");
}

/// Short runs, with one disturbance at each point of it in turn.
fn sweep(points: impl Fn(&Summary) -> u64, at: impl Fn(u64) -> Disturbance) {
    for seed in 5..9 {
        let mut scenario = Scenario::new(Mix::Calm, seed);
        // The sweeps have one sender with one actor; so has the run that tells how long it is.
        scenario.once = Some(Disturbance::Cancel(u64::MAX));
        let whole = attempt(scenario, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        let points = points(&whole);
        for point in 1..=points {
            scenario.once = Some(at(point));
            attempt(scenario, None).unwrap_or_else(|wrong| panic!("{wrong}"));
        }
        println!("{points} points");
    }
}

/// Whether some scenario of the default budget finds the bug.
fn assert_found(bug: Bug) {
    for seed in 0..SEEDS {
        for mix in Mix::ALL {
            if let Err(found) = attempt(Scenario::new(mix, seed), Some(bug)) {
                println!("{bug:?}: {found}");
                return;
            }
        }
    }
    panic!("{bug:?} was not found");
}

#[test]
fn one_scenario() {
    let Ok(seed) = std::env::var("MILLPOND_SIM_SEED") else { return };
    let name = std::env::var("MILLPOND_SIM_MIX").expect("MILLPOND_SIM_MIX names a mix");
    let mix = Mix::ALL.into_iter().find(|mix| format!("{mix:?}") == name).expect("a mix");
    let mut scenario = Scenario::new(mix, seed.parse().expect("a number"));
    if let Ok(once) = std::env::var("MILLPOND_SIM_ONCE") {
        let (what, at) = once.trim_end_matches(')').split_once(['(', ':']).expect("Cancel(40)");
        let at = at.parse().expect("a number");
        let all = [
            Disturbance::Lose(at),
            Disturbance::Cancel(at),
            Disturbance::Death(at),
            Disturbance::Restart(at),
            Disturbance::Stall(at),
        ];
        scenario.once = all.into_iter().find(|each| format!("{each:?}").starts_with(what));
    }
    println!("{:?}", attempt(scenario, None).unwrap_or_else(|wrong| panic!("{wrong}")));
}

#[test]
fn the_same_scenario_is_the_same_run() {
    for mix in Mix::ALL {
        let [one, other] =
            [0, 1].map(|_| attempt(Scenario::new(mix, 3), None).unwrap_or_else(|wrong| panic!("{wrong}")));
        assert_eq!(one, other, "{mix:?}");
    }
}

#[test]
fn on_a_calm_network_everything_is_done() {
    for (mix, seed) in [(Mix::Calm, 1), (Mix::Calm, 2), (Mix::Narrow, 1)] {
        let summary = attempt(Scenario::new(mix, seed), None).unwrap();
        assert!(summary.done > 0 && summary.failed == 0, "{summary:?}");
    }
    all_hold(Mix::Calm);
}

#[test]
fn with_windows_of_one_slice_everything_gets_through() {
    all_hold(Mix::Narrow);
}

#[test]
fn lost_frames_cost_errors_and_never_bytes() {
    all_hold(Mix::Lossy);
}

#[test]
fn frames_that_overtake_each_other_do_no_harm() {
    all_hold(Mix::Reordered);
}

#[test]
fn completions_that_come_late_or_twice_change_nothing() {
    all_hold(Mix::Late);
}

#[test]
fn connections_that_stand_still_are_replaced_and_nothing_lands_twice() {
    all_hold(Mix::Stalls);
}

#[test]
fn nodes_that_stand_still_come_back_into_a_world_that_went_on() {
    all_hold(Mix::Freezes);
}

#[test]
fn a_receiver_that_restarts_under_its_name_is_another() {
    all_hold(Mix::Restarts);
}

#[test]
fn senders_that_restart_under_their_names_are_others() {
    all_hold(Mix::SenderRestarts);
}

#[test]
fn sixteen_senders_share_one_receiver() {
    all_hold(Mix::Many);
}

#[test]
fn everything_at_once_is_survived() {
    all_hold(Mix::Everything);
}

#[test]
fn each_single_frame_may_be_lost() {
    sweep(|whole| whole.frames, Disturbance::Lose);
}

#[test]
fn a_cancel_may_come_at_every_step() {
    sweep(|whole| whole.steps, Disturbance::Cancel);
}

#[test]
fn the_receiver_may_die_at_every_step() {
    sweep(|whole| whole.steps, Disturbance::Death);
}

#[test]
fn the_receiver_may_restart_at_every_step() {
    sweep(|whole| whole.steps, Disturbance::Restart);
}

#[test]
fn all_connections_may_stall_at_every_step() {
    sweep(|whole| whole.steps, Disturbance::Stall);
}

#[test]
fn a_job_that_ends_before_it_is_quiet_is_found() {
    assert_found(Bug::TransferEndsBeforeQuiet);
}

#[test]
fn a_lost_path_that_is_not_fenced_is_found() {
    assert_found(Bug::TransferSkipsFence);
}

#[test]
fn a_window_that_leaks_is_found() {
    assert_found(Bug::TransferLeaksWindow);
}

#[test]
fn a_retry_that_is_forgotten_is_found() {
    assert_found(Bug::TransferForgetsRetry);
}

#[test]
fn an_arrival_that_is_repeated_is_found() {
    assert_found(Bug::TransferRepeatsOnce);
}
