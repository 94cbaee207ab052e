//! How batches end that do not run to their end: cancelled, revoked, orphaned, cut off.

use super::{Case, EVERY_STEP_MAX, MakePair, PROGRESS_DEADLINE, Pair, assert_honest, carve, extent, is_pattern};
use crate::contract::{End, LinkDownReason, Refusal};
use crate::fabric::{Batch, Completion, FabricEvent, Grant, PostError, PostOptions, Ticket};
use crate::region::Region;
use millpond_core::batch::RegionId;
use millpond_core::time::Duration;

pub(super) const CASES: &[Case] = &[
    ("a cancel at any step ends a write honestly", cancel_a_write),
    ("a cancel at any step ends a read", cancel_a_read),
    ("a deadline cancels", deadlines),
    ("nothing is written after a grant was closed, at any step", close_a_grant),
    ("a read of revoked memory is never done with other bytes", revoke_a_read),
    ("a dropped waiter does not free the lease before the end", dropped_waiter),
    ("the peer's death at any step ends everything", death),
    ("a stopped peer is given up after the progress deadline", stopped_peer),
    ("a closed link ends its tickets and takes no more", close_the_link),
];

const LEN: u64 = 3 << 20;
const PIECES: u64 = 6;

struct Write {
    ticket: Ticket,
    grant: Grant,
    region: Region,
    region_there: Region,
}

/// A write in six pieces, in flight, with an arrival.
fn start_write(pair: &mut Pair) -> Write {
    let hands = pair.hands();
    let (region, region_there) = (pair.region(LEN), pair.region_there(LEN));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, LEN)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    for n in 0..PIECES {
        let len = LEN / PIECES;
        batch.write(hands.filled(&region, n * len, len, n + 1), extent(there, n * len, len));
    }
    batch.arrival(there, 0, 1);
    let ticket = pair.post(batch);
    Write { ticket, grant, region, region_there }
}

fn start_read(pair: &mut Pair, seed: u64) -> (Ticket, crate::fabric::ReadGrant, RegionId, Region) {
    let hands = pair.hands();
    let (region, region_there) = (pair.region(LEN), pair.region_there(LEN));
    let grant = pair.there().grant_read(vec![hands.filled(&region_there, 0, LEN, seed)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    batch.read(extent(there, 0, LEN), carve(&region, 0, LEN));
    let ticket = pair.post(batch);
    (ticket, grant, there, region_there)
}

/// What the outcomes say of the far end is what lies there.
fn check_write(completion: &Completion, target: &[u8], arrived: u64) {
    let len = (LEN / PIECES) as usize;
    for n in 0..PIECES as usize {
        let piece = &target[n * len..][..len];
        let all = is_pattern(piece, n as u64 + 1);
        assert_honest(completion.outcome(n).far_end, all, piece.iter().all(|&byte| byte == 0));
    }
    if completion.is_done() {
        assert_eq!(arrived, 1, "a done batch was counted");
    }
    if arrived > 0 {
        assert!(
            (0..PIECES as usize).all(|n| is_pattern(&target[n * len..][..len], n as u64 + 1)),
            "counted before it was there"
        );
    }
}

/// Runs `act` after n steps for every n until the batch ends by itself before.
fn at_every_step(make: &mut MakePair<'_>, mut act: impl FnMut(Pair, Write, bool)) {
    for step in 0..EVERY_STEP_MAX {
        let mut pair = make();
        let write = start_write(&mut pair);
        pair.steps(step);
        let ended = pair.here.is_finished(&write.ticket);
        act(pair, write, ended);
        if ended {
            return;
        }
    }
}

fn cancel_a_write(make: &mut MakePair<'_>) {
    at_every_step(make, |mut pair, write, _| {
        let now = pair.now();
        pair.here.cancel(now, &write.ticket);
        let completion = pair.end(write.ticket);
        for n in 0..PIECES as usize {
            let outcome = completion.outcome(n);
            assert!(matches!(outcome.end, End::Done | End::Cancelled | End::LinkDown(_)), "{outcome:?}");
        }
        let id = write.grant.id();
        let arrived = pair.there().arrived(id, 0);
        let (target, hands) = (pair.there().close(write.grant).pop().unwrap(), pair.hands());
        let before = hands.view(&target);
        check_write(&completion, &before, arrived);
        // Quiet here: the source is ours again, and nothing of it goes out any more.
        drop(completion);
        hands.paint(&mut write.region.carve(0, LEN).unwrap(), 0xFF);
        pair.steps(30);
        assert!(before == hands.view(&target), "the far end changed after quiet");
    });
}

fn cancel_a_read(make: &mut MakePair<'_>) {
    for step in 0..EVERY_STEP_MAX {
        let mut pair = make();
        let (ticket, _grant, _, _) = start_read(&mut pair, 5);
        pair.steps(step);
        let ended = pair.here.is_finished(&ticket);
        let now = pair.now();
        pair.here.cancel(now, &ticket);
        let completion = pair.end(ticket);
        let done = completion.is_done();
        let mut target = super::buffer_of(completion, 0);
        let hands = pair.hands();
        assert!(!done || is_pattern(&hands.view(&target), 5));
        hands.paint(&mut target, 0xAB);
        pair.steps(30);
        assert!(hands.view(&target).iter().all(|&byte| byte == 0xAB), "local memory changed after quiet");
        if ended {
            return;
        }
    }
}

fn deadlines(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(LEN), pair.region_there(LEN));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, LEN)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    batch.write(hands.filled(&region, 0, LEN, 1), extent(there, 0, LEN));
    let (now, link) = (pair.now(), pair.link);
    let ticket = pair.here.post(now, link, batch, PostOptions::until(now)).unwrap();
    let outcome = pair.end(ticket).outcome(0);
    assert!(matches!(outcome.end, End::Done | End::Cancelled | End::LinkDown(_)), "{outcome:?}");
}

fn close_a_grant(make: &mut MakePair<'_>) {
    at_every_step(make, |mut pair, write, _| {
        let id = write.grant.id();
        let arrived = pair.there().arrived(id, 0);
        let (target, hands) = (pair.there().close(write.grant).pop().unwrap(), pair.hands());
        let before = hands.view(&target);
        let completion = pair.end(write.ticket);
        pair.steps(30);
        assert!(before == hands.view(&target), "bytes were written after the grant was closed");
        for n in 0..PIECES as usize {
            let outcome = completion.outcome(n);
            let told = matches!(outcome.end, End::Done | End::Refused(Refusal::Stale) | End::LinkDown(_));
            assert!(told, "{outcome:?}");
        }
        if !completion.is_done() {
            assert_eq!(arrived, 0);
        }
        check_pieces(&completion, &before);
        drop(write.region_there);
    });
}

fn check_pieces(completion: &Completion, target: &[u8]) {
    let len = (LEN / PIECES) as usize;
    for n in 0..PIECES as usize {
        let piece = &target[n * len..][..len];
        assert_honest(
            completion.outcome(n).far_end,
            is_pattern(piece, n as u64 + 1),
            piece.iter().all(|&byte| byte == 0),
        );
    }
}

fn revoke_a_read(make: &mut MakePair<'_>) {
    for step in 0..EVERY_STEP_MAX {
        let mut pair = make();
        let (ticket, grant, _, region_there) = start_read(&mut pair, 5);
        pair.steps(step);
        let ended = pair.here.is_finished(&ticket);
        pair.there().revoke(grant);
        let hands = pair.hands();
        hands.paint(&mut region_there.carve(0, LEN).expect("revoked memory is free"), 0xCD);
        let completion = pair.end(ticket);
        let end = completion.outcome(0).end;
        let target = super::buffer_of(completion, 0);
        match end {
            End::Done => assert!(is_pattern(&hands.view(&target), 5), "done with bytes of somebody else"),
            // A checksum may notice before the table is asked.
            End::Refused(Refusal::Stale | Refusal::Damaged) | End::LinkDown(_) => {}
            other => panic!("{other:?}"),
        }
        if ended {
            return;
        }
    }
}

fn dropped_waiter(make: &mut MakePair<'_>) {
    let mut pair = make();
    let Write { ticket, grant, region, .. } = start_write(&mut pair);
    drop(ticket);
    assert!(region.carve(0, 1).is_err(), "the lease is the device's until the end");
    let id = grant.id();
    pair.until("the orphan's arrival", |pair| pair.there().arrived(id, 0) == 1);
    pair.until("the orphan's end", |_| region.lease_count() == 0);
    assert!(!pair.events.iter().any(|event| matches!(event, FabricEvent::Finished(_))), "nobody hears of an orphan");
    let target = pair.hands().view(&pair.there().close(grant)[0]);
    assert!(is_pattern(&target[..(LEN / PIECES) as usize], 1));
    assert_eq!(pair.here.in_flight(), 0);
}

fn death(make: &mut MakePair<'_>) {
    if make().is_alone() {
        eprintln!("SKIPPED: a link to oneself has no peer that could die");
        return;
    }
    at_every_step(make, |mut pair, write, ended| {
        let start = pair.now();
        let Write { ticket, grant, region, .. } = write;
        pair.kill_there();
        let completion = pair.end(ticket);
        assert!(pair.now().since(start) < PROGRESS_DEADLINE + Duration::from_secs(2), "an end that took too long");
        assert!(
            ended || (0..PIECES as usize).all(|n| matches!(completion.outcome(n).end, End::Done | End::LinkDown(_)))
        );
        drop(completion);
        assert_eq!(region.lease_count(), 0);
        if !ended {
            let link = pair.link;
            pair.until("the link's end", |pair| pair.here.link(link).is_none());
            let downs = pair
                .events
                .iter()
                .filter(|event| matches!(event, FabricEvent::LinkDown { link: down, .. } if *down == link));
            assert_eq!(downs.count(), 1);
        }
        drop(grant);
    });
}

fn stopped_peer(make: &mut MakePair<'_>) {
    let mut pair = make();
    if pair.is_alone() {
        eprintln!("SKIPPED: a link to oneself has no peer that could stop");
        return;
    }
    pair.stopped = true;
    let write = start_write(&mut pair);
    let start = pair.now();
    let completion = pair.end(write.ticket);
    let waited = pair.now().since(start);
    assert!(waited < PROGRESS_DEADLINE.saturating_mul(2) + Duration::from_secs(1), "waited {waited}");
    assert!(matches!(completion.outcome(5).end, End::LinkDown(LinkDownReason::Stalled)), "{completion:?}");
    drop(completion);
    pair.hands().paint(&mut write.region.carve(0, LEN).expect("quiet here"), 0xFF);
    // It wakes up late, and must not take for the batch's what is no longer the batch's.
    let id = write.grant.id();
    pair.stopped = false;
    pair.steps(50);
    let arrived = pair.there().arrived(id, 0);
    let target = pair.hands().view(&pair.there().close(write.grant)[0]);
    if arrived > 0 {
        let len = (LEN / PIECES) as usize;
        assert!(
            (0..PIECES as usize).all(|n| is_pattern(&target[n * len..][..len], n as u64 + 1)),
            "counted with other bytes"
        );
    }
}

fn close_the_link(make: &mut MakePair<'_>) {
    at_every_step(make, |mut pair, write, ended| {
        let link = pair.link;
        pair.here.close_link(link);
        let (now, batch) = (pair.now(), Batch::new());
        let refused = pair.here.post(now, link, batch, PostOptions::default()).unwrap_err();
        assert_eq!(refused.reason, PostError::LinkClosed);
        let completion = pair.end(write.ticket);
        assert!(
            ended || (0..PIECES as usize).all(|n| matches!(completion.outcome(n).end, End::Done | End::LinkDown(_)))
        );
        pair.until("the link's end", |pair| pair.here.link(link).is_none());
        if !pair.is_alone() {
            let link_there = pair.link_there;
            pair.until("the link's end there", |pair| pair.there().link(link_there).is_none());
        }
        assert!(
            pair.events
                .iter()
                .any(|event| matches!(event, FabricEvent::LinkDown { reason: LinkDownReason::Closed, .. }))
        );
    });
}
