//! The core's structures and their oracles agree on any list of operations, and each comparison finds seeded bugs.

use millpond_core::seeded::{self, Bug};
use millpond_fuzz::Op;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestError, TestRunner};

type Run = fn(&[Op]) -> Result<(), String>;

/// Lists tried by default; `MILLPOND_CASES` sets another number.
const CASES: u32 = 3_000;

/// The smallest list found on which product and oracle differ.
fn difference(run: Run, bug: Option<Bug>) -> Option<String> {
    let cases = std::env::var("MILLPOND_CASES").ok().and_then(|number| number.parse().ok()).unwrap_or(CASES);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let lists = prop::collection::vec(any::<Op>(), 1..200);
    // The runner may catch a panic: the bug is selected anew for each list, on the thread that runs it.
    let found = runner.run(&lists, |ops| {
        seeded::select(bug);
        let outcome = run(&ops);
        seeded::select(None);
        outcome.map_err(TestCaseError::fail)
    });
    seeded::select(None);
    match found {
        Ok(()) => None,
        Err(TestError::Fail(reason, ops)) => Some(format!("{reason}\nafter {ops:?}")),
        Err(TestError::Abort(reason)) => panic!("the run was given up: {reason}"),
    }
}

fn assert_agree(run: Run) {
    if let Some(found) = difference(run, None) {
        panic!("{found}");
    }
}

fn assert_found(run: Run, bug: Bug) {
    assert!(difference(run, Some(bug)).is_some(), "{bug:?} was not found");
}

#[test]
fn pages_agree_with_their_oracle() {
    assert_agree(millpond_fuzz::page::run);
}

#[test]
fn a_page_whose_old_handle_stays_good_is_found() {
    assert_found(millpond_fuzz::page::run, Bug::PageKeepsEpoch);
}

#[test]
fn a_leased_page_that_is_freed_is_found() {
    assert_found(millpond_fuzz::page::run, Bug::PageFreesLeased);
}

#[test]
fn extents_agree_with_their_oracle() {
    assert_agree(millpond_fuzz::extent::run);
}

#[test]
fn a_forgotten_join_of_free_ranges_is_found() {
    assert_found(millpond_fuzz::extent::run, Bug::ExtentForgetsToCoalesce);
}

#[test]
fn an_ignored_alignment_is_found() {
    assert_found(millpond_fuzz::extent::run, Bug::ExtentIgnoresAlignment);
}

#[test]
fn the_prefix_tree_agrees_with_its_oracle() {
    assert_agree(millpond_fuzz::prefix::run);
}

#[test]
fn a_split_that_loses_a_holder_is_found() {
    assert_found(millpond_fuzz::prefix::run, Bug::PrefixSplitLosesHolder);
}

#[test]
fn an_evicted_pin_is_found() {
    assert_found(millpond_fuzz::prefix::run, Bug::PrefixEvictsPinned);
}

#[test]
fn the_cluster_index_agrees_with_its_oracle() {
    assert_agree(millpond_fuzz::index::run);
}

#[test]
fn a_cleared_holder_that_stays_known_is_found() {
    assert_found(millpond_fuzz::index::run, Bug::IndexKeepsCleared);
}

#[test]
fn a_column_that_is_given_away_too_early_is_found() {
    assert_found(millpond_fuzz::index::run, Bug::IndexReusesColumnEarly);
}

#[test]
fn an_event_of_an_earlier_life_that_is_taken_is_found() {
    assert_found(millpond_fuzz::index::run, Bug::IndexTakesOldLife);
}

#[test]
fn a_gap_that_is_not_noticed_is_found() {
    assert_found(millpond_fuzz::index::run, Bug::IndexMissesGap);
}

#[test]
fn a_shared_set_that_is_changed_in_place_is_found() {
    assert_found(millpond_fuzz::index::run, Bug::IndexChangesSharedSet);
}

#[test]
fn batches_agree_with_their_oracle() {
    assert_agree(millpond_fuzz::batch::run);
}

#[test]
fn moves_joined_on_one_side_only_are_found() {
    assert_found(millpond_fuzz::batch::run, Bug::BatchCoalescesOneSide);
}

#[test]
fn a_last_piece_that_is_too_long_is_found() {
    assert_found(millpond_fuzz::batch::run, Bug::BatchSplitOverlaps);
}

#[test]
fn transfer_histories_hold() {
    assert_agree(millpond_fuzz::transfer::run);
}

#[test]
fn a_piece_that_counts_twice_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferCountsBytesTwice);
}

#[test]
fn a_completion_of_an_earlier_attempt_that_is_believed_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferTakesStaleCompletions);
}

#[test]
fn a_job_that_is_over_before_it_is_quiet_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferEndsBeforeQuiet);
}

#[test]
fn a_write_that_does_not_wait_for_the_fence_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferSkipsFence);
}

#[test]
fn a_window_that_leaks_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferLeaksWindow);
}

#[test]
fn a_slice_sent_without_credit_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferIgnoresCredit);
}

#[test]
fn a_forgotten_retry_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferForgetsRetry);
}

#[test]
fn a_repetition_of_what_may_not_be_is_found() {
    assert_found(millpond_fuzz::transfer::run, Bug::TransferRepeatsOnce);
}
