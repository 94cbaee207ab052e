//! The suite under many seeds, and what only a simulated network can do.

use super::net::Order;
use super::*;
use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, run};
use crate::contract::End;
use crate::fabric::{Batch, Fabric, FabricOptions, LinkOptions, PostOptions};
use millpond_core::batch::Extent;

fn fabric(connection: Connection, secret: u8) -> (Fabric, LinkId) {
    let mut fabric = Fabric::new(FabricOptions::new([secret; 32])).unwrap();
    let sim = fabric.add_device(Box::new(Sim::new())).unwrap();
    let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
    let link = fabric.open(Instant::ZERO, sim, connection, options).unwrap();
    (fabric, link)
}

fn pair(net: &SimNet) -> Pair {
    let (one, two) = net.pair();
    let ((here, link), (there, link_there)) = (fabric(one, 1), fabric(two, 2));
    let mut pair = Pair::new(here, link, there, link_there, Clock::Virtual(Instant::ZERO));
    let net = net.clone();
    // The suite kills in the middle of a run; a notice that is due at once is the earliest there can be.
    pair.sever = Some(Box::new(move || net.kill(0, Instant::ZERO)));
    pair
}

#[test]
fn the_simulated_backend_conforms() {
    run(&mut || pair(&SimNet::new(1, Faults::default())));
}

#[test]
fn it_conforms_whatever_the_delays() {
    let mut seed = 100;
    let faults = Faults { delay_max: Duration::from_millis(3), ..Faults::default() };
    run(&mut || {
        seed += 1;
        pair(&SimNet::new(seed, faults))
    });
}

struct Run {
    outcomes: Vec<crate::contract::Outcome>,
    target: Vec<u8>,
    arrived: u64,
    sent: u64,
    took: Instant,
}

const PIECES: u64 = 10;

/// One batch of ten writes; the peer's memory and what was told.
fn one_batch(seed: u64, faults: Faults, cancel_at: Option<u32>) -> Run {
    let net = SimNet::new(seed, faults);
    let (one, two) = net.pair();
    let ((mut here, link), (mut there, _)) = (fabric(one, 1), fabric(two, 2));
    let len = PIECES * 100_000;
    let (source, target) =
        (here.allocate(len, Default::default()).unwrap(), there.allocate(len, Default::default()).unwrap());
    let grant = there.grant_write(vec![target.carve(0, len).unwrap()]).unwrap();
    let remote = here.attach(grant.token()).unwrap();
    let mut buffer = source.carve(0, len).unwrap();
    buffer.iter_mut().zip(0u64..).for_each(|(byte, at)| *byte = (at / 100_000 + 1) as u8);
    let bytes = buffer.freeze();
    let mut batch = Batch::new();
    for n in 0..PIECES {
        let at = (n * 100_000) as usize;
        batch.write(bytes.slice(at..at + 100_000), Extent::new(remote, n * 100_000, 100_000));
    }
    batch.arrival(remote, 0, 1);
    let mut now = Instant::ZERO;
    let ticket = here.post(now, link, batch, PostOptions::default()).unwrap();
    let mut step = 0;
    while !here.is_finished(&ticket) {
        if cancel_at == Some(step) {
            here.cancel(now, &ticket);
        }
        here.poll(now);
        there.poll(now);
        now = now + Duration::from_micros(20);
        step += 1;
        assert!(step < 100_000, "seed {seed} never ends");
    }
    let completion = here.take(ticket).unwrap();
    let outcomes = (0..PIECES as usize).map(|index| completion.outcome(index)).collect();
    let arrived = there.arrived(grant.id(), 0);
    let target = there.close(grant)[0].to_vec();
    Run { outcomes, target, arrived, sent: net.sent(), took: now }
}

fn check(run: &Run, context: &str) {
    for (index, outcome) in run.outcomes.iter().enumerate() {
        let piece = &run.target[index * 100_000..][..100_000];
        let all = piece.iter().all(|&byte| usize::from(byte) == index + 1);
        let none = piece.iter().all(|&byte| byte == 0);
        match outcome.far_end {
            FarEnd::Done => assert!(all, "{context}: move {index} {outcome:?}"),
            FarEnd::Untouched => assert!(none, "{context}: move {index} {outcome:?}"),
            FarEnd::Unknown => {}
        }
        assert!(outcome.end != End::Done || all, "{context}: move {index} {outcome:?}");
        assert!(run.arrived == 0 || all, "{context}: counted before move {index} was there");
    }
}

#[test]
fn a_lossy_link_ends_by_the_deadline_and_tells_no_lies() {
    let (mut lost, mut done) = (0, 0);
    for seed in 0..200 {
        let faults = Faults { loss_per_million: 20_000, ..Faults::default() };
        let run = one_batch(seed, faults, None);
        check(&run, &format!("seed {seed}"));
        if run.outcomes.iter().all(crate::contract::Outcome::is_done) && run.arrived == 1 {
            done += 1
        } else {
            lost += 1
        }
        assert!(run.took.since(Instant::ZERO) < Duration::from_secs(1), "seed {seed}");
    }
    assert!(lost > 10 && done > 10, "the seeds show both: {lost} lost, {done} done");
}

#[test]
fn pieces_may_overtake_each_other_and_a_cancel() {
    let (mut cancelled, mut done) = (0, 0);
    let faults = Faults { delay_max: Duration::from_micros(400), order: Order::Free, ..Faults::default() };
    for seed in 0..300 {
        let run = one_batch(seed, faults, Some((seed % 40) as u32));
        check(&run, &format!("seed {seed}"));
        if run.outcomes.iter().any(|outcome| outcome.end == End::Cancelled) { cancelled += 1 } else { done += 1 }
    }
    assert!(cancelled > 10 && done > 10, "the seeds show both: {cancelled} cancelled, {done} done");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let faults = Faults { loss_per_million: 5000, order: Order::Free, ..Faults::default() };
    for seed in 0..20 {
        let (one, two) = (one_batch(seed, faults, Some(9)), one_batch(seed, faults, Some(9)));
        assert_eq!((one.sent, one.took, one.outcomes), (two.sent, two.took, two.outcomes));
        assert!(one.target == two.target);
    }
}

#[test]
fn a_stalled_link_that_resumes_in_time_loses_nothing() {
    let net = SimNet::new(3, Faults::default());
    let (one, two) = net.pair();
    let ((mut here, link), (mut there, _)) = (fabric(one, 1), fabric(two, 2));
    let (source, target) =
        (here.allocate(4096, Default::default()).unwrap(), there.allocate(4096, Default::default()).unwrap());
    let grant = there.grant_write(vec![target.carve(0, 4096).unwrap()]).unwrap();
    let remote = here.attach(grant.token()).unwrap();
    let mut batch = Batch::new();
    batch.write(source.carve(0, 4096).unwrap().freeze(), Extent::new(remote, 0, 4096));
    net.stall(0);
    let ticket = here.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
    let at = |millis| Instant::ZERO + Duration::from_millis(millis);
    for millis in 0..100 {
        here.poll(at(millis));
        there.poll(at(millis));
    }
    assert!(!here.is_finished(&ticket));
    net.resume(0);
    for millis in 100..110 {
        here.poll(at(millis));
        there.poll(at(millis));
    }
    assert!(here.take(ticket).unwrap().is_done());
}
