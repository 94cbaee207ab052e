//! Tests of the module above.

use alloc::vec::Vec;

use super::*;
use crate::hash::RouteHash;

type Small = Index<RouteHash, 1>;

fn index(holders_max: u16, spares: u16) -> Small {
    Index::new(Limits { holders_max, spares, blocks_max: 64, sets_max: 64 }, 7)
}

fn chain(len: u64) -> Vec<RouteHash> {
    (1..=len).map(RouteHash).collect()
}

fn stored(index: &mut Small, holder: u16, number: u64, names: &[RouteHash]) -> Outcome {
    index.on_event(&Event { holder: Holder(holder), life: 1, number, change: Change::Stored(names) })
}

fn removed(index: &mut Small, holder: u16, number: u64, names: &[RouteHash]) -> Outcome {
    index.on_event(&Event { holder: Holder(holder), life: 1, number, change: Change::Removed(names) })
}

fn lens(index: &Small, names: &[RouteHash]) -> Vec<u32> {
    let mut matches = index.new_matches();
    index.matches(names, &mut matches);
    (0..4).map(|holder| matches.len_of(Holder(holder))).collect()
}

#[test]
fn each_holder_is_matched_to_its_first_missing_block() {
    let mut index = index(4, 4);
    let names = chain(5);
    stored(&mut index, 0, 1, &names);
    stored(&mut index, 1, 1, &names[..2]);
    stored(&mut index, 2, 1, &names[1..]);
    assert_eq!(lens(&index, &names), [5, 2, 0, 0]);
    removed(&mut index, 0, 2, &names[3..4]);
    assert_eq!(lens(&index, &names), [3, 2, 0, 0], "what follows a hole does not count");
    stored(&mut index, 2, 2, &names[..1]);
    assert_eq!(lens(&index, &names), [3, 2, 5, 0], "and counts again when it is filled");
}

#[test]
fn blocks_that_everybody_holds_share_one_set_and_are_listed_for_nobody() {
    let mut index = index(4, 4);
    let names = chain(20);
    (0..4).for_each(|holder| assert_eq!(stored(&mut index, holder, 1, &names), Outcome::Applied));
    assert_eq!((index.totals().blocks, index.totals().sets), (20, 1));
    let mut matches = index.new_matches();
    index.matches(&names, &mut matches);
    assert_eq!((matches.shared(), matches.longest(), matches.beyond().count()), (20, 20, 0));
    assert_eq!(matches.len_of(Holder(3)), 20);
    assert_eq!(matches.len_of(Holder(4)), 0, "there is no such holder");
}

#[test]
fn a_cleared_holder_is_forgotten_at_once_and_its_blocks_are_swept_in_bounded_steps() {
    let mut index = index(4, 4);
    let names = chain(40);
    stored(&mut index, 0, 1, &names);
    stored(&mut index, 1, 1, &names[..10]);
    let cleared = Event { holder: Holder(0), life: 1, number: 2, change: Change::Cleared };
    assert_eq!(index.on_event(&cleared), Outcome::Applied);
    assert_eq!(lens(&index, &names), [0, 10, 0, 0]);
    assert_eq!(index.totals().blocks, 40, "forgetting touched no block");
    assert!(!index.sweep(30));
    assert_eq!(index.totals().blocks, 20, "ten are held by another, ten are left");
    assert!(index.sweep(100));
    assert_eq!(index.totals().blocks, 10);
    stored(&mut index, 0, 3, &names[..3]);
    assert_eq!(lens(&index, &names), [3, 10, 0, 0], "its numbers go on");
}

#[test]
fn a_restarted_holder_starts_from_nothing_and_late_events_of_its_old_life_are_ignored() {
    let mut index = index(4, 4);
    let names = chain(5);
    stored(&mut index, 0, 1, &names);
    let reborn = Event { holder: Holder(0), life: 2, number: 1, change: Change::Stored(&names[..1]) };
    assert_eq!(index.on_event(&reborn), Outcome::Applied);
    assert_eq!(lens(&index, &names), [1, 0, 0, 0]);
    assert_eq!(stored(&mut index, 0, 2, &names), Outcome::Stale);
    assert_eq!(index.on_position(Holder(0), 1, 9), Outcome::Stale);
    assert_eq!(index.begin_snapshot(Holder(0), 1, 9), Outcome::Stale);
    assert_eq!(lens(&index, &names), [1, 0, 0, 0]);
    assert_eq!(index.totals().stale, 3);
}

#[test]
fn a_holder_that_left_gets_nothing_until_it_comes_back_with_a_later_life() {
    let mut index = index(4, 4);
    let names = chain(3);
    stored(&mut index, 0, 1, &names);
    assert_eq!(index.on_leave(Holder(0), 1), Outcome::Applied);
    assert_eq!(lens(&index, &names), [0, 0, 0, 0]);
    assert_eq!(stored(&mut index, 0, 2, &names), Outcome::Stale);
    assert_eq!(index.view(Holder(0)).unwrap().knowledge, Knowledge::Gone);
    let back = Event { holder: Holder(0), life: 2, number: 1, change: Change::Stored(&names) };
    assert_eq!(index.on_event(&back), Outcome::Applied);
    assert_eq!(lens(&index, &names), [3, 0, 0, 0]);
}

#[test]
fn a_missing_event_is_noticed_and_a_snapshot_repairs_it() {
    let mut index = index(4, 4);
    let names = chain(6);
    stored(&mut index, 0, 1, &names[..4]);
    // Event 2, which removed the third block, is lost.
    assert_eq!(stored(&mut index, 0, 3, &names[4..5]), Outcome::Behind);
    assert_eq!(lens(&index, &names), [5, 0, 0, 0]);
    assert_eq!(index.begin_snapshot(Holder(0), 1, 4), Outcome::Applied);
    assert_eq!(stored(&mut index, 0, 5, &names), Outcome::InSnapshot);
    index.on_snapshot(Holder(0), 1, &names[3..5]);
    assert_eq!(lens(&index, &names), [5, 0, 0, 0], "what was known serves until the snapshot is whole");
    index.on_snapshot(Holder(0), 1, &names[..2]);
    assert_eq!(index.end_snapshot(Holder(0), 1), Outcome::Applied);
    assert_eq!(lens(&index, &names), [2, 0, 0, 0]);
    assert_eq!(removed(&mut index, 0, 4, &names), Outcome::Repeated, "the snapshot knows it");
    assert_eq!(stored(&mut index, 0, 5, &names[2..3]), Outcome::Applied);
    assert_eq!(lens(&index, &names), [5, 0, 0, 0]);
}

#[test]
fn an_event_that_was_the_last_is_missed_by_the_sign_of_life_after_it() {
    let mut index = index(4, 4);
    stored(&mut index, 0, 1, &chain(2));
    assert_eq!(index.on_position(Holder(0), 1, 1), Outcome::Applied);
    assert_eq!(index.on_position(Holder(0), 1, 2), Outcome::Behind);
    assert_eq!(index.view(Holder(0)).unwrap().knowledge, Knowledge::Behind);
    // A cleared holder has nothing: that is as good as a snapshot.
    let cleared = Event { holder: Holder(0), life: 1, number: 3, change: Change::Cleared };
    assert_eq!(index.on_event(&cleared), Outcome::Applied);
}

#[test]
fn a_snapshot_that_is_overtaken_by_a_restart_leaves_nothing_behind() {
    let mut index = index(4, 4);
    let names = chain(3);
    index.begin_snapshot(Holder(0), 1, 9);
    index.on_snapshot(Holder(0), 1, &names);
    index.on_position(Holder(0), 2, 0);
    assert_eq!(index.on_snapshot(Holder(0), 1, &names), Outcome::Stale);
    assert_eq!(index.end_snapshot(Holder(0), 2), Outcome::Stale);
    assert_eq!(lens(&index, &names), [0, 0, 0, 0]);
}

#[test]
fn a_holder_that_is_cleared_while_a_snapshot_is_taken_has_nothing() {
    let mut index = index(4, 4);
    let names = chain(3);
    stored(&mut index, 0, 1, &names);
    index.begin_snapshot(Holder(0), 1, 2);
    index.on_snapshot(Holder(0), 1, &names);
    let cleared = |number| Event { holder: Holder(0), life: 1, number, change: Change::Cleared };
    assert_eq!(index.on_event(&cleared(2)), Outcome::InSnapshot, "the snapshot knows it");
    assert_eq!(index.on_event(&cleared(3)), Outcome::Applied);
    assert_eq!(lens(&index, &names), [0, 0, 0, 0]);
    assert_eq!(index.end_snapshot(Holder(0), 1), Outcome::Stale);
    assert_eq!(stored(&mut index, 0, 4, &names[..1]), Outcome::Applied);
}

#[test]
fn lives_that_end_faster_than_they_are_swept_are_told_to_wait() {
    let mut index = index(2, 1);
    let names = chain(3);
    stored(&mut index, 0, 1, &names);
    stored(&mut index, 1, 1, &names);
    let life = |life| Event { holder: Holder(0), life, number: 1, change: Change::Stored(&names) };
    assert_eq!(index.on_event(&life(2)), Outcome::Applied);
    assert_eq!(index.on_event(&life(3)), Outcome::Applied, "a few blocks are swept by the events themselves");
    // Without a sweep in between: as many lives as there are columns.
    assert_eq!(index.begin_snapshot(Holder(0), 3, 1), Outcome::Crowded);
    assert!(index.sweep(1_000));
    assert_eq!(index.begin_snapshot(Holder(0), 3, 1), Outcome::Applied);
    index.on_snapshot(Holder(0), 3, &names[..1]);
    assert_eq!(index.end_snapshot(Holder(0), 3), Outcome::Applied);
    assert_eq!(lens(&index, &names), [1, 3, 0, 0]);
}

#[test]
fn without_room_less_is_known_and_never_more() {
    let mut index: Small = Index::new(Limits { holders_max: 4, spares: 4, blocks_max: 6, sets_max: 2 }, 7);
    let names = chain(8);
    stored(&mut index, 0, 1, &names);
    assert_eq!((lens(&index, &names), index.totals().full), (alloc::vec![6, 0, 0, 0], 2));
    stored(&mut index, 1, 1, &names[..3]);
    assert_eq!(lens(&index, &names), [6, 3, 0, 0]);
    // A third set does not fit: the block of two holders keeps its set, and one that is to lose a holder is dropped.
    stored(&mut index, 2, 1, &names[..2]);
    removed(&mut index, 0, 2, &names[1..2]);
    assert_eq!(lens(&index, &names), [1, 1, 0, 0]);
    let blocks: u32 = (0..4).map(|holder| index.view(Holder(holder)).unwrap().blocks).sum();
    assert_eq!(blocks, 5 + 2, "counts follow");
}

#[test]
fn a_block_that_was_not_there_is_not_offered_again() {
    let mut index = index(4, 4);
    let names = chain(3);
    stored(&mut index, 0, 1, &names);
    index.refute(Holder(0), &names[1..]);
    index.refute(Holder(3), &names);
    assert_eq!(lens(&index, &names), [1, 0, 0, 0]);
}

#[test]
fn holders_past_the_limit_are_counted() {
    let mut index = index(4, 4);
    assert_eq!(stored(&mut index, 4, 1, &chain(1)), Outcome::Unknown);
    assert_eq!((index.totals().unknown, index.totals().blocks), (1, 0));
    assert_eq!(index.view(Holder(4)), None);
}
