//! What an owner refuses, and that nothing happens then.

use millpond_core::batch::{Capability, RegionToken, Rights};

use super::{Case, MakePair, Pair, carve, extent, is_pattern};
use crate::contract::{Access, End, FarEnd, Outcome, Refusal};
use crate::fabric::{Batch, Completion, PostError, PostOptions, ReleaseError};

pub(super) const CASES: &[Case] = &[
    ("forged tokens are refused and touch nothing", forged_tokens),
    ("a gap between granted ranges is refused", gaps),
    ("a refused request leaves its siblings alone", siblings),
    ("an arrival follows no refused write", no_arrival_after_refusal),
    ("an arrival beyond the grant's counters is refused", counters_full),
    ("a token's own limits are checked before anything is sent", checked_here),
    ("a grant that was closed is stale", closed_grants),
    ("memory in flight is not released", released_in_flight),
];

fn write_once(pair: &mut Pair, token: RegionToken, offset: u64, len: u64) -> Completion {
    let (region, hands) = (pair.region(len.max(1)), pair.hands());
    let there = pair.attach(token);
    let mut batch = Batch::new();
    batch.write(hands.filled(&region, 0, len, 77), extent(there, offset, len));
    pair.run_batch(batch)
}

fn forged_tokens(make: &mut MakePair<'_>) {
    type Forge = fn(&mut RegionToken);
    let forgeries: [(Refusal, Forge); 5] = [
        (Refusal::WrongCapability, |token| token.capability = Capability::new([9; 16])),
        (Refusal::Stale, |token| token.region.epoch += 2),
        (Refusal::Stale, |token| token.region.slot += 1),
        (Refusal::OutOfBounds, |token| (token.offset, token.len) = (0, u64::MAX)),
        (Refusal::WrongRights, |token| token.rights = token.rights | Rights::REMOTE_READ),
    ];
    for (expected, forge) in forgeries {
        let mut pair = make();
        let hands = pair.hands();
        let region_there = pair.region_there(300_000);
        let mut target = carve(&region_there, 1000, 200_000);
        hands.paint(&mut target, 0x33);
        let grant = pair.there().grant_write(vec![target]).unwrap();
        let mut token = grant.token();
        forge(&mut token);
        let completion = match expected {
            Refusal::OutOfBounds => write_once(&mut pair, token, 900, 100_000),
            Refusal::WrongRights => {
                let region = pair.region(100);
                let there = pair.attach(token);
                let mut batch = Batch::new();
                batch.read(extent(there, 1000, 100), carve(&region, 0, 100));
                pair.run_batch(batch)
            }
            _ => write_once(&mut pair, token, 1000, 100_000),
        };
        let outcome = completion.outcome(0);
        // A backend may prove without waiting for the answer; the owner then knows only that nothing was proven.
        let unproven = expected == Refusal::WrongCapability && outcome == Outcome::refused(Refusal::NotProven);
        assert!(unproven || outcome == Outcome::refused(expected), "{expected}: {outcome:?}");
        // The link lives on.
        assert!(write_once(&mut pair, grant.token(), 1000, 10).is_done());
        let target = hands.view(&pair.there().close(grant)[0]);
        assert!(is_pattern(&target[..10], 77) && target[10..].iter().all(|&byte| byte == 0x33), "{expected}");
        let around = [carve(&region_there, 0, 1000), carve(&region_there, 201_000, 1000)];
        assert!(around.iter().all(|bytes| hands.view(bytes).iter().all(|&byte| byte == 0)), "{expected}");
    }
}

fn gaps(make: &mut MakePair<'_>) {
    let mut pair = make();
    let region_there = pair.region_there(8192);
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 100), carve(&region_there, 200, 100)]).unwrap();
    let token = grant.token();
    for (offset, len) in [(50, 100), (100, 100), (150, 100), (100, 1), (0, 300)] {
        let completion = write_once(&mut pair, token, offset, len);
        assert_eq!(completion.outcome(0), Outcome::refused(Refusal::OutOfBounds), "{offset}+{len}");
    }
    assert!(write_once(&mut pair, token, 200, 100).is_done() && write_once(&mut pair, token, 0, 100).is_done());
    let gap = carve(&region_there, 100, 100);
    assert!(pair.hands().view(&gap).iter().all(|&byte| byte == 0));
}

fn siblings(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(4096), pair.region_there(8192));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 100), carve(&region_there, 200, 100)]).unwrap();
    let read_grant = pair.there().grant_read(vec![hands.filled(&region_there, 4096, 100, 6)]).unwrap();
    let (good, mut forged) = (grant.token(), read_grant.token());
    forged.capability = Capability::new([1; 16]);
    let (good, forged, readable) = (pair.attach(good), pair.attach(forged), pair.attach(read_grant.token()));
    let mut batch = Batch::new();
    batch.write(hands.filled(&region, 0, 50, 1), extent(good, 0, 50));
    batch.write(hands.filled(&region, 100, 50, 2), extent(good, 120, 50));
    batch.read(extent(readable, 4096, 100), carve(&region, 1000, 100));
    batch.write(hands.filled(&region, 200, 50, 3), extent(good, 210, 50));
    let completion = pair.run_batch(batch);
    let outcomes: Vec<_> = (0..4).map(|index| completion.outcome(index)).collect();
    let done = Outcome::DONE;
    assert_eq!(outcomes, [done, Outcome::refused(Refusal::OutOfBounds), done, done]);
    assert!(is_pattern(&hands.view(&super::buffer_of(completion, 2)), 6));
    let mut batch = Batch::new();
    batch.read(extent(forged, 4096, 100), carve(&region, 1000, 100));
    // Proof is per link and region: the forged token adds nothing to it, and takes nothing away.
    let completion = pair.run_batch(batch);
    assert!(matches!(completion.outcome(0).end, End::Refused(_) | End::Done), "{completion:?}");
    drop(completion);
    let mut batch = Batch::new();
    batch.read(extent(readable, 4096, 100), carve(&region, 1000, 100));
    assert!(pair.run_batch(batch).is_done());
    let targets = pair.there().close(grant);
    assert!(is_pattern(&hands.view(&targets[0])[..50], 1) && is_pattern(&hands.view(&targets[1])[10..60], 3));
}

fn no_arrival_after_refusal(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(4096), pair.region_there(4096));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 100), carve(&region_there, 200, 100)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    batch.write(hands.filled(&region, 0, 10, 1), extent(there, 0, 10));
    batch.write(hands.filled(&region, 10, 10, 1), extent(there, 150, 10));
    batch.arrival(there, 0, 1);
    assert!(!pair.run_batch(batch).is_done());
    pair.steps(20);
    let id = grant.id();
    assert_eq!(pair.there().arrived(id, 0), 0);
}

fn counters_full(make: &mut MakePair<'_>) {
    let mut pair = make();
    let region_there = pair.region_there(4096);
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 100)]).unwrap();
    let there = pair.attach(grant.token());
    for counter in 0..=u64::from(crate::fabric::Limits::default().counters_per_grant_max) {
        let mut batch = Batch::new();
        batch.arrival(there, counter, 1);
        let outcome = pair.run_batch(batch).overall();
        if counter < u64::from(crate::fabric::Limits::default().counters_per_grant_max) {
            assert_eq!(outcome, Outcome::DONE);
        } else {
            assert_eq!(outcome, Outcome { end: End::Refused(Refusal::CountersFull), far_end: FarEnd::Done });
        }
    }
}

fn checked_here(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(4096), pair.region_there(4096));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 100)]).unwrap();
    let there = pair.attach(grant.token());
    let bytes = hands.filled(&region, 0, 50, 1);
    let (now, link) = (pair.now(), pair.link);
    let mut refused = |batch: Batch| {
        let requests = batch.len();
        let refused = pair.here.post(now, link, batch, PostOptions::default()).unwrap_err();
        assert_eq!(refused.batch.len(), requests, "the batch comes back whole");
        refused.reason
    };
    let mut batch = Batch::new();
    batch.write(bytes.clone(), extent(there, 0, 50)).write(bytes.clone(), extent(there, 60, 50));
    assert_eq!(refused(batch), PostError::OutOfBounds { index: 1, side: "remote" });
    let mut batch = Batch::new();
    batch.write(bytes.clone(), extent(there, 0, 51));
    assert_eq!(refused(batch), PostError::LengthsDiffer { index: 0, local_len: 50, remote_len: 51 });
    let mut batch = Batch::new();
    batch.read(extent(there, 0, 50), carve(&region, 100, 50));
    assert_eq!(refused(batch), PostError::NoRight { index: 0, access: Access::Read });
    let mut batch = Batch::new();
    batch.write_raw(region.extent(0, 50), extent(there, 0, 50));
    assert_eq!(refused(batch), PostError::UnknownRegion { index: 0, side: "local" });
    pair.here.detach(there).unwrap();
    let mut batch = Batch::new();
    batch.write(bytes, extent(there, 0, 50));
    let (now, link) = (pair.now(), pair.link);
    let stale = pair.here.post(now, link, batch, PostOptions::default()).unwrap_err();
    assert_eq!(stale.reason, PostError::UnknownRegion { index: 0, side: "remote" });
}

fn closed_grants(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let region_there = pair.region_there(4096);
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 100)]).unwrap();
    let token = grant.token();
    assert!(write_once(&mut pair, token, 0, 100).is_done());
    pair.there().close(grant);
    assert_eq!(write_once(&mut pair, token, 0, 100).outcome(0), Outcome::refused(Refusal::Stale));
    // The same place in the table, given to somebody else.
    let other = pair.there().grant_write(vec![carve(&region_there, 200, 100)]).unwrap();
    assert_eq!(write_once(&mut pair, token, 0, 100).outcome(0), Outcome::refused(Refusal::Stale));
    drop(other);
    let read_grant = pair.there().grant_read(vec![hands.filled(&region_there, 0, 100, 1)]).unwrap();
    let there = pair.attach(read_grant.token());
    drop(read_grant);
    pair.steps(3);
    let region = pair.region(4096);
    let mut batch = Batch::new();
    batch.read(extent(there, 0, 100), carve(&region, 0, 100));
    assert_eq!(pair.run_batch(batch).outcome(0), Outcome::refused(Refusal::Stale));
    assert_eq!(region_there.lease_count(), 0, "a dropped grant gives its ranges back");
}

fn released_in_flight(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(1 << 20), pair.region_there(1 << 20));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 1 << 20)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    batch.write(hands.filled(&region, 0, 1 << 20, 1), extent(there, 0, 1 << 20));
    let ticket = pair.post(batch);
    let refused = pair.here.release(region).unwrap_err();
    assert!(matches!(refused.reason, ReleaseError::Leased { leases: 1, .. }), "{refused:?}");
    assert!(pair.here.detach(there).is_err());
    let region = refused.region;
    let raw = pair.region_of(1 << 20, crate::region::Mode::Raw(Rights::NONE));
    let mut batch = Batch::new();
    batch.write_raw(raw.extent(0, 1 << 20), extent(there, 0, 1 << 20));
    let raw_ticket = pair.post(batch);
    let refused = pair.here.release(raw).unwrap_err();
    assert!(matches!(refused.reason, ReleaseError::InFlight { .. }), "{refused:?}");
    drop((pair.end(ticket), pair.end(raw_ticket)));
    pair.here.release(region).unwrap();
    pair.here.release(refused.region).unwrap();
    pair.here.detach(there).unwrap();
}
