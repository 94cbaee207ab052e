//! The directory and its oracle give the same answers on any list of operations, and the comparison sees seeded bugs.

use millpond_core::directory::SeededBug;
use millpond_fuzz::directory::{World, compare, config};
use millpond_oracle::directory::{Oracle, Subject};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn lists() -> impl Strategy<Value = (u8, Vec<[u8; 8]>)> {
    (any::<u8>(), prop::collection::vec(any::<[u8; 8]>(), 1..200))
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

#[test]
fn the_directory_answers_like_its_oracle() {
    let test = |(first, ops): (u8, Vec<[u8; 8]>)| compare(first, &ops, None).map_err(TestCaseError::fail);
    if let Err(found) =
        runner(std::env::var("MILLPOND_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(4_000)).run(&lists(), test)
    {
        panic!("{found}");
    }
}

fn assert_found(bug: SeededBug) {
    let test = |(first, ops): (u8, Vec<[u8; 8]>)| compare(first, &ops, Some(bug)).map_err(TestCaseError::fail);
    assert!(runner(4_000).run(&lists(), test).is_err(), "{bug:?} was not found");
}

#[test]
fn an_eviction_that_ignores_leases_is_found() {
    assert_found(SeededBug::EvictsLeased);
}

#[test]
fn replicas_that_outlive_their_owner_are_found() {
    assert_found(SeededBug::KeepsReplicasOfRestartedOwner);
}

#[test]
fn an_old_version_that_wins_is_found() {
    assert_found(SeededBug::OldVersionWins);
}

#[test]
fn an_object_lost_with_one_of_two_replicas_is_found() {
    assert_found(SeededBug::ForgetsOtherReplica);
}

/// The words that must appear among the answers to random lists, or the lists prove little.
const REACHED: [&str; 15] = [
    "copies: 2",
    "AlreadyThere",
    "Leased",
    "Pinned",
    "NotYet",
    "Retired([Location",
    "Ok([Kept",
    "reason: Superseded",
    "reason: Cleared",
    "reason: OwnerRestarted",
    "StaleGeneration",
    "ObjectsFull",
    "ReplicasFull",
    "gap: true",
    "Rebuilding",
];

#[test]
fn random_lists_reach_every_answer_that_matters() {
    use proptest::strategy::ValueTree;
    let mut runner = TestRunner::deterministic();
    let mut missing: Vec<&str> = REACHED.to_vec();
    for _ in 0..2_000 {
        let (first, ops) = lists().new_tree(&mut runner).expect("any list is legal").current();
        let (mut world, mut oracle) = (World::default(), Oracle::new(config(first, None)));
        for op in &ops {
            let (now, call) = world.call(*op);
            let outcome = oracle.apply(now, &call);
            world.observe(&outcome);
            let words = format!("{outcome:?}");
            missing.retain(|word| !words.contains(word));
        }
    }
    assert!(missing.is_empty(), "never seen: {missing:?}");
}
