//! Tests of the module above.

use alloc::boxed::Box;
use alloc::vec;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn at(seconds: u64) -> Instant {
    Instant::ZERO + SECOND.saturating_mul(seconds)
}

fn owner(node: u8, incarnation: u64) -> Owner {
    Owner { node: NodeId([node; 16]), incarnation }
}

fn place(owner: Owner, slot: u32, generation: u32) -> Location {
    Location { node: owner.node, segment: 0, epoch: owner.incarnation, slot, generation }
}

fn join(directory: &mut Directory, now: Instant, who: Owner) {
    let segments = vec![SegmentFacts::dram(0, who.incarnation, 1 << 20)];
    let address: Box<str> = "h:1".into();
    directory.on_join(now, Join { owner: who, address, segments }).value.unwrap();
    let inventory = Inventory { segment: 0, epoch: who.incarnation, entries: &[], part: Part::Last };
    directory.on_inventory(now, who, inventory).value.unwrap();
}

fn key(bytes: &[u8]) -> Key<'_> {
    Key::new(bytes).unwrap()
}

fn with_two_owners() -> (Directory, Owner, Owner) {
    let mut directory = Directory::new(at(0), Config::fresh(1));
    let (a, b) = (owner(1, 1), owner(2, 1));
    join(&mut directory, at(0), a);
    join(&mut directory, at(0), b);
    (directory, a, b)
}

#[test]
fn the_first_of_two_writers_wins_and_the_second_is_told() {
    let (mut directory, a, b) = with_two_owners();
    let stored = directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    let Committed::Stored { version, copies: 1, mutable: false } = stored else { panic!("{stored:?}") };
    let second = directory.on_commit(at(0), b, &Commit::new(key(b"k"), 9, place(b, 0, 1))).value.unwrap();
    assert_eq!(second, Committed::AlreadyThere { version, len: 5 });
    let again = directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    assert_eq!(again, stored, "a repeated commit gets the same answer");
}

#[test]
fn a_leased_object_is_neither_evicted_nor_removed_until_the_lease_has_run_out() {
    let (mut directory, a, _) = with_two_owners();
    directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    directory.on_locate(at(0), key(b"k"), SECOND);
    let victim = [Victim { key: key(b"k"), location: place(a, 0, 1) }];
    let verdict = directory.on_evict(at(0), a, &victim, Urgency::Pressing).value.unwrap();
    assert_eq!(verdict, [EvictVerdict::Leased { retry_after: SECOND }]);
    assert_eq!(directory.on_remove(at(0), key(b"k"), Leases::Respect).value.leased, 1);
    assert_eq!(directory.on_evict(at(1), a, &victim, Urgency::Normal).value.unwrap(), [EvictVerdict::Evict]);
    let why = directory.explain_miss(at(3), key(b"k")).value;
    assert!(matches!(why, Explanation::Lost(Removal { reason: Reason::Evicted, ago, .. }) if ago == SECOND + SECOND));
}

#[test]
fn readers_of_a_superseded_version_keep_it_until_their_lease_has_run_out() {
    let (mut directory, a, _) = with_two_owners();
    directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    directory.on_locate(at(0), key(b"k"), SECOND);
    let upsert = Commit { mode: Mode::Upsert, ..Commit::new(key(b"k"), 6, place(a, 1, 1)) };
    directory.on_commit(at(0), a, &upsert).value.unwrap();
    assert_eq!(directory.poll_retired(at(0), a), []);
    assert_eq!(directory.poll_retired(at(1), a), [place(a, 0, 1)]);
    directory.on_freed(a, &[place(a, 0, 1)]);
    assert_eq!(directory.poll_retired(at(1), a), []);
    assert_eq!(directory.stat(at(1), key(b"k")).value.unwrap().len, 6);
}

#[test]
fn a_silent_owner_is_suspect_then_gone_and_the_other_replica_stays() {
    let (mut directory, a, b) = with_two_owners();
    let stored = directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    let Committed::Stored { version, .. } = stored else { panic!("{stored:?}") };
    let copy = Commit { mode: Mode::Replica { version }, ..Commit::new(key(b"k"), 5, place(b, 0, 1)) };
    directory.on_commit(at(0), b, &copy).value.unwrap();
    directory.on_heartbeat(at(4), b, &[]).value.unwrap();
    let Located::Hit(found) = directory.on_locate(at(4), key(b"k"), SECOND).value else { panic!() };
    assert_eq!(found.replicas, [place(b, 0, 1), place(a, 0, 1)], "the suspect owner comes last");
    assert_eq!(directory.poll_deadline(), at(5));
    assert_eq!(directory.on_tick(at(5)), [a]);
    assert_eq!(directory.stat(at(5), key(b"k")).value.unwrap().replicas, [(place(b, 0, 1), Tier::Dram)]);
    assert_eq!(directory.on_heartbeat(at(5), a, &[]).value, Err(Refusal::UnknownOwner));
}

#[test]
fn a_restarted_owner_loses_its_memory_and_stale_inputs_are_refused() {
    let (mut directory, a, _) = with_two_owners();
    directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    let reborn = owner(1, 2);
    join(&mut directory, at(1), reborn);
    assert_eq!(directory.exists(at(1), key(b"k")).value, Err(Miss::Absent));
    let late = directory.on_commit(at(1), a, &Commit::new(key(b"late"), 5, place(a, 1, 1))).value;
    assert_eq!(late, Err(Refusal::StaleIncarnation { current: 2 }));
}

#[test]
fn a_recovering_directory_does_not_call_an_unknown_key_absent() {
    let start = Start::Recovering { expected: vec![NodeId([1; 16])], window: SECOND.saturating_mul(5) };
    let mut directory = Directory::new(at(0), Config { start, ..Config::fresh(2) });
    let a = owner(1, 7);
    let segments = vec![SegmentFacts::dram(0, 7, 1 << 20)];
    directory.on_join(at(0), Join { owner: a, address: "h:1".into(), segments }).value.unwrap();
    let early = directory.on_commit(at(1), a, &Commit::new(key(b"new"), 5, place(a, 9, 1))).value;
    assert!(matches!(early, Err(Refusal::Rebuilding { .. })));
    let (version, pin) = (Stamp { term: 1, n: 4 }, Pin::Free);
    let entries = [Entry { key: key(b"k"), slot: 0, generation: 3, len: 5, version, pin, mutable: true }];
    let inventory = Inventory { segment: 0, epoch: 7, entries: &entries, part: Part::Last };
    assert_eq!(directory.on_inventory(at(2), a, inventory).value.unwrap(), [EntryVerdict::Kept]);
    assert!(directory.is_rebuilt(at(2)), "everybody who was expected has reported");
    let victim = [Victim { key: key(b"k"), location: place(a, 0, 3) }];
    let verdict = directory.on_evict(at(2), a, &victim, Urgency::Normal).value.unwrap();
    assert!(matches!(verdict[..], [EvictVerdict::NotYet { .. }]), "leases of the last term may run");
}

#[test]
fn what_was_cleared_or_superseded_does_not_come_back_from_a_late_owner() {
    let (mut directory, a, b) = with_two_owners();
    let stored = directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    let Committed::Stored { version, .. } = stored else { panic!("{stored:?}") };
    assert_eq!(directory.on_clear(at(0)).value, 1);
    let mut entry = Entry { key: key(b"k"), slot: 4, generation: 1, len: 5, version, pin: Pin::Free, mutable: false };
    let report = |directory: &mut Directory, entry: Entry<'_>| {
        let inventory = Inventory { segment: 0, epoch: 1, entries: &[entry], part: Part::More };
        directory.on_inventory(at(1), b, inventory).value.unwrap()[0]
    };
    assert_eq!(report(&mut directory, entry), EntryVerdict::Retire { reason: Reason::Cleared });
    (entry.version, entry.mutable) = (Stamp { term: 1, n: 900 }, true);
    assert_eq!(report(&mut directory, entry), EntryVerdict::Retire { reason: Reason::Superseded });
    entry.mutable = false;
    assert_eq!(report(&mut directory, entry), EntryVerdict::Kept);
}

#[test]
fn a_watcher_that_fell_behind_is_told_of_the_gap() {
    let limits = Limits { events_max: 2, ..Limits::default() };
    let mut directory = Directory::new(at(0), Config { limits, ..Config::fresh(1) });
    let a = owner(1, 1);
    join(&mut directory, at(0), a);
    let start = directory.position();
    for slot in 0..3u32 {
        let name = slot.to_le_bytes();
        directory.on_commit(at(0), a, &Commit::new(key(&name), 5, place(a, slot, 1))).value.unwrap();
    }
    assert!(directory.events(start, 10).value.gap);
    let page = directory.events(Stamp { term: 1, n: 1 }, 10).value;
    assert_eq!((page.gap, page.events.len(), page.next), (false, 2, directory.position()));
    assert!(directory.events(Stamp { term: 0, n: 1 }, 10).value.gap, "another term's numbers mean nothing here");
}

#[test]
fn listing_and_removing_by_prefix_go_page_by_page() {
    let limits = Limits { page_max: 2, ..Limits::default() };
    let mut directory = Directory::new(at(0), Config { limits, ..Config::fresh(1) });
    let a = owner(1, 1);
    join(&mut directory, at(0), a);
    for (slot, name) in (0u32..).zip([&b"a/1"[..], b"a/2", b"a/3", b"b/1"]) {
        directory.on_commit(at(0), a, &Commit::new(key(name), 5, place(a, slot, 1))).value.unwrap();
    }
    let first = directory.list(b"a/", None, 100).value;
    assert_eq!((first.rows.len(), first.next.as_deref()), (2, Some(&b"a/2"[..])));
    let second = directory.list(b"a/", first.next.as_deref(), 100).value;
    assert_eq!((second.rows.len(), second.next), (1, None));
    let removed = directory.on_remove_prefix(at(0), b"a/", None, Leases::Respect).value;
    assert_eq!((removed.objects, removed.next.as_deref()), (2, Some(&b"a/2"[..])));
    assert_eq!(directory.totals().objects, 2);
}

#[test]
fn an_owner_that_leaves_is_said_to_before_its_replicas_are() {
    let (mut directory, a, b) = with_two_owners();
    let stored = directory.on_commit(at(0), a, &Commit::new(key(b"k"), 5, place(a, 0, 1))).value.unwrap();
    let Committed::Stored { version, .. } = stored else { panic!("{stored:?}") };
    let copy = Commit { mode: Mode::Replica { version }, ..Commit::new(key(b"k"), 5, place(b, 0, 1)) };
    directory.on_commit(at(0), b, &copy).value.unwrap();
    let before = directory.position();
    assert!(directory.on_death(at(1), a));
    let changes: Vec<Change> =
        directory.events(before, 10).value.events.into_iter().map(|event| event.change).collect();
    assert_eq!(changes[0], Change::Left { owner: a, reason: Reason::OwnerLost });
    let expected = Change::Removed {
        key: b"k".as_slice().into(),
        location: place(a, 0, 1),
        reason: Reason::OwnerLost,
        replicas_left: 1,
        left_there: 0,
    };
    assert_eq!(changes[1..], [expected]);
}

#[test]
fn what_an_owner_holds_is_told_page_by_page() {
    let limits = Limits { page_max: 2, ..Limits::default() };
    let mut directory = Directory::new(at(0), Config { limits, ..Config::fresh(1) });
    let a = owner(1, 1);
    join(&mut directory, at(0), a);
    for (slot, name) in (0u32..).zip([&b"kv/1"[..], b"other", b"kv/3"]) {
        directory.on_commit(at(0), a, &Commit::new(key(name), 5, place(a, slot, 1))).value.unwrap();
    }
    let first = directory.holdings(a.node, b"kv/", None, 100).value;
    assert_eq!((first.keys.len(), first.next), (1, Some(Place { segment: 0, slot: 1 })), "a page can be short");
    let last = directory.holdings(a.node, b"kv/", first.next, 100).value;
    assert_eq!((&*last.keys[0], last.next), (&b"kv/3"[..], None));
    assert_eq!(directory.holdings(NodeId([9; 16]), b"", None, 100).value.owner, None);
}
