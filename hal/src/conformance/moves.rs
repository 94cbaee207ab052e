//! Bytes go where they should, and nowhere else.

use millpond_core::batch::Rights;

use super::{Case, MakePair, Pair, carve, extent, fill, is_pattern};
use crate::contract::Outcome;
use crate::fabric::{Batch, PostError, PostOptions, Request};
use crate::region::Mode;

pub(super) const CASES: &[Case] = &[
    ("writes of every size land exactly", writes_land_exactly),
    ("reads of every size bring exactly the bytes", reads_bring_exact_bytes),
    ("a mixed, scattered batch keeps every pair", scattered_and_mixed),
    ("requests of no bytes end like others", zero_length),
    ("more moves than any window go through", more_than_the_window),
    ("both sides post at once", both_sides_post),
    ("raw regions are written and read", raw_regions),
    ("arrivals are counted after their writes", arrivals_are_counted),
    ("a batch of nothing only counts", nothing_only_counts),
    ("a posted fabric moves to another thread", moves_to_a_thread),
];

const LENS: [u64; 8] = [1, 7, 4096, 4097, 65_535, 65_536, (1 << 20) + 3, (3 << 20) + 5];

fn writes_land_exactly(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(4 << 20), pair.region_there(4 << 20));
    for (seed, len) in (1u64..).zip(LENS) {
        let mut target = carve(&region_there, 0, len + 200);
        hands.paint(&mut target, 0xEE);
        let grant = pair.there().grant_write(vec![target]).unwrap();
        let there = pair.attach(grant.token());
        let mut batch = Batch::new();
        batch.write(hands.filled(&region, 0, len, seed), extent(there, 100, len));
        let completion = pair.run_batch(batch);
        assert_eq!(completion.outcome(0), Outcome::DONE, "{len} bytes");
        assert_eq!(completion.bytes_done(), len);
        let target = hands.view(&pair.there().close(grant)[0]);
        assert!(is_pattern(&target[100..100 + len as usize], seed), "{len} bytes");
        assert!(
            target[..100].iter().chain(&target[100 + len as usize..]).all(|&byte| byte == 0xEE),
            "only the target changes"
        );
        drop(completion);
        pair.here.detach(there).unwrap();
    }
}

fn reads_bring_exact_bytes(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(4 << 20), pair.region_there(4 << 20));
    for (seed, len) in (1u64..).zip(LENS) {
        let grant = pair.there().grant_read(vec![hands.filled(&region_there, 64, len, seed)]).unwrap();
        let there = pair.attach(grant.token());
        let mut guard = carve(&region, 0, len + 200);
        hands.paint(&mut guard, 0xEE);
        let mut target = guard.split_off(100).unwrap();
        let tail = target.split_off(len).unwrap();
        let mut batch = Batch::new();
        batch.read(extent(there, 64, len), target);
        let completion = pair.run_batch(batch);
        assert_eq!(completion.outcome(0), Outcome::DONE, "{len} bytes");
        assert!(is_pattern(&hands.view(&super::buffer_of(completion, 0)), seed), "{len} bytes");
        assert!(
            hands.view(&guard).iter().chain(&hands.view(&tail)).all(|&byte| byte == 0xEE),
            "only the target changes"
        );
        pair.there().revoke(grant);
        pair.here.detach(there).unwrap();
    }
}

fn scattered_and_mixed(make: &mut MakePair<'_>) {
    const PAGE: u64 = 1000;
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(1 << 20), pair.region_there(1 << 20));
    // Targets in an order of their own, with gaps, and sources for the way back.
    let targets = (0..64u64).map(|n| carve(&region_there, (n * 37 % 64) * PAGE * 2, PAGE)).collect();
    let sources = (0..64u64).map(|n| hands.filled(&region_there, (2 * n + 1) * PAGE, PAGE, 1000 + n)).collect();
    let grant = pair.there().grant_write(targets).unwrap();
    let read_grant = pair.there().grant_read(sources).unwrap();
    let (writable, readable) = (pair.attach(grant.token()), pair.attach(read_grant.token()));
    let mut batch = Batch::new();
    for n in 0..64u64 {
        batch.write(hands.filled(&region, 2 * n * PAGE, PAGE, n), extent(writable, (n * 37 % 64) * PAGE * 2, PAGE));
        batch.read(extent(readable, (2 * n + 1) * PAGE, PAGE), carve(&region, (2 * n + 1) * PAGE, PAGE));
    }
    let completion = pair.run_batch(batch);
    assert!(completion.is_done(), "{completion:?}");
    for (request, n) in
        completion.into_batch().drain().filter(|request| matches!(request, Request::Read { .. })).zip(1000..)
    {
        let Request::Read { target, .. } = request else { continue };
        assert!(is_pattern(&hands.view(&target), n), "page {n}");
    }
    for (target, n) in pair.there().close(grant).iter().zip(0..) {
        assert!(is_pattern(&hands.view(target), n), "page {n}");
    }
}

fn zero_length(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(4096), pair.region_there(4096));
    let mut target = carve(&region_there, 0, 10);
    hands.paint(&mut target, 7);
    let grant = pair.there().grant_write(vec![target]).unwrap();
    let read_grant = pair.there().grant_read(vec![hands.filled(&region_there, 100, 10, 1)]).unwrap();
    let (writable, readable) = (pair.attach(grant.token()), pair.attach(read_grant.token()));
    let mut batch = Batch::new();
    batch.write(carve(&region, 0, 0).freeze(), extent(writable, 0, 0));
    batch.write(hands.filled(&region, 0, 3, 5), extent(writable, 3, 3));
    batch.read(extent(readable, 110, 0), carve(&region, 50, 0));
    batch.write(carve(&region, 4096, 0).freeze(), extent(writable, 10, 0));
    let completion = pair.run_batch(batch);
    assert!(completion.is_done(), "{completion:?}");
    let target = hands.view(&pair.there().close(grant)[0]);
    assert!(is_pattern(&target[3..6], 5) && target[..3] == [7; 3] && target[6..] == [7; 4]);
}

fn more_than_the_window(make: &mut MakePair<'_>) {
    const BATCHES: u64 = 1500;
    const MOVES: u64 = 20;
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(1 << 20), pair.region_there(1 << 20));
    let total = BATCHES * MOVES * 8;
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, total)]).unwrap();
    let there = pair.attach(grant.token());
    let source = hands.filled(&region, 0, total, 3);
    let (mut tickets, mut was_full) = (std::collections::VecDeque::new(), false);
    for n in 0..BATCHES {
        let mut batch = Batch::new();
        for at in (n * MOVES..(n + 1) * MOVES).map(|index| index * 8) {
            batch.write(source.slice(at as usize..at as usize + 8), extent(there, at, 8));
        }
        batch.arrival(there, 1, 1);
        loop {
            let (now, link) = (pair.now(), pair.link);
            match pair.here.post(now, link, batch, PostOptions::default()) {
                Ok(ticket) => break tickets.push_back(ticket),
                Err(refused) => {
                    assert!(
                        matches!(refused.reason, PostError::LinkFull | PostError::TicketsFull { .. }),
                        "{refused:?}"
                    );
                    batch = refused.batch;
                    was_full = true;
                    let oldest = tickets.pop_front().expect("full means that something is in flight");
                    assert!(pair.end(oldest).is_done());
                }
            }
        }
    }
    assert!(was_full, "a link without a bound");
    for ticket in tickets {
        assert!(pair.end(ticket).is_done());
    }
    let id = grant.id();
    assert_eq!(pair.there().arrived(id, 1), BATCHES);
    assert!(is_pattern(&hands.view(&pair.there().close(grant)[0]), 3));
}

fn both_sides_post(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(1 << 20), pair.region_there(1 << 20));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 300_000)]).unwrap();
    let grant_here = pair.here.grant_write(vec![carve(&region, 500_000, 300_000)]).unwrap();
    let there = pair.attach(grant.token());
    let here = pair.there().attach(grant_here.token()).unwrap();
    let (now, link_there) = (pair.now(), pair.link_there);
    let (mut batch, mut batch_there) = (Batch::new(), Batch::new());
    batch.write(hands.filled(&region, 0, 300_000, 1), extent(there, 0, 300_000));
    batch_there.write(hands.filled(&region_there, 500_000, 300_000, 2), extent(here, 500_000, 300_000));
    let ticket = pair.post(batch);
    let ticket_there = pair.there().post(now, link_there, batch_there, PostOptions::default()).unwrap();
    assert!(pair.end(ticket).is_done());
    pair.until("the other side's ticket", |pair| pair.there().is_finished(&ticket_there));
    assert!(pair.there().take(ticket_there).unwrap().is_done());
    assert!(is_pattern(&hands.view(&pair.there().close(grant)[0]), 1));
    assert!(is_pattern(&hands.view(&pair.here.close(grant_here)[0]), 2));
}

fn raw_regions(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let mode = Mode::Raw(Rights::REMOTE_READ | Rights::REMOTE_WRITE);
    let (region, region_there) = (pair.region_of(1 << 20, mode), pair.region_there_of(1 << 20, mode));
    let token = pair.there().expose(&region_there).unwrap();
    let there = pair.attach(token);
    let mut bytes = vec![0; 200_000];
    fill(&mut bytes, 8);
    hands.write(&region, 17, &bytes);
    let mut batch = Batch::new();
    batch.write_raw(region.extent(17, 200_000), extent(there, 5, 200_000));
    assert!(pair.run_batch(batch).is_done());
    let mut batch = Batch::new();
    batch.read_raw(extent(there, 5, 200_000), region.extent(500_000, 200_000));
    assert!(pair.run_batch(batch).is_done());
    let mut back = vec![0; 200_000];
    hands.read(&region, 500_000, &mut back);
    assert!(bytes == back);
}

fn arrivals_are_counted(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(1 << 20), pair.region_there(1 << 20));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 400_000)]).unwrap();
    let there = pair.attach(grant.token());
    let tickets: Vec<_> = (0..4u64)
        .map(|n| {
            let mut batch = Batch::new();
            let source = hands.filled(&region, n * 100_000, 100_000, n);
            batch.write(source, extent(there, n * 100_000, 100_000)).arrival(there, n % 2, 10 + n);
            pair.post(batch)
        })
        .collect();
    let id = grant.id();
    pair.until("arrivals", |pair| pair.there().arrived(id, 0) == 22 && pair.there().arrived(id, 1) == 24);
    for ticket in tickets {
        assert!(pair.end(ticket).is_done());
    }
    assert_eq!(pair.there().arrived(id, 2), 0);
    let events = if pair.is_alone() { &pair.events } else { &pair.events_there };
    assert!(events.iter().any(|event| matches!(event, crate::fabric::FabricEvent::Arrived(grant) if *grant == id)));
    let target = hands.view(&pair.there().close(grant)[0]);
    assert!((0..4).all(|n: u64| is_pattern(&target[n as usize * 100_000..][..100_000], n)));
}

fn nothing_only_counts(make: &mut MakePair<'_>) {
    let mut pair = make();
    let region_there = pair.region_there(4096);
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 10)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    batch.arrival(there, 99, 5);
    let completion = pair.run_batch(batch);
    assert_eq!(completion.overall(), Outcome::DONE);
    let id = grant.id();
    assert_eq!(pair.there().arrived(id, 99), 5);
    let completion = pair.run_batch(Batch::new());
    assert!(completion.is_done() && completion.overall().is_done());
}

fn moves_to_a_thread(make: &mut MakePair<'_>) {
    let mut pair = make();
    let hands = pair.hands();
    let (region, region_there) = (pair.region(1 << 20), pair.region_there(1 << 20));
    let grant = pair.there().grant_write(vec![carve(&region_there, 0, 600_000)]).unwrap();
    let there = pair.attach(grant.token());
    let mut batch = Batch::new();
    batch.write(hands.filled(&region, 0, 600_000, 4), extent(there, 0, 600_000));
    let ticket = pair.post(batch);
    let Pair { here, there: other, link, link_there, clock, .. } = pair;
    let (here, other, clock) = std::thread::spawn(move || (here, other, clock)).join().expect("nothing panics there");
    let mut pair = match other {
        Some(other) => Pair::new(here, link, other, link_there, clock),
        None => Pair::alone(here, link, clock),
    };
    assert!(pair.end(ticket).is_done());
    assert!(is_pattern(&hands.view(&pair.there().close(grant)[0]), 4));
}
