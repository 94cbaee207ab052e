//! The suite under many seeds, and what only a simulated network can do.

use super::net::Order;
use super::*;
use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, run};
use crate::contract::End;
use crate::fabric::{Batch, Fabric, FabricOptions, LinkOptions, PostOptions};
use millpond_core::batch::Extent;
use std::collections::VecDeque;

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

const SENDERS: usize = 16;
/// Batches of each, and pieces of a batch.
const BATCHES: usize = 12;
const PIECES_EACH: u64 = 8;
const TAKINGS: Takings =
    Takings { whole: Credit { bytes: 4 << 20, slices: 64 }, least: Credit { bytes: 128 << 10, slices: 2 } };

/// Sixteen fabrics that write into one.
struct Crowd {
    net: SimNet,
    receiver: Fabric,
    senders: Vec<Sender>,
    now: Instant,
}

struct Sender {
    fabric: Fabric,
    link: LinkId,
    remote: RegionId,
    bytes: crate::region::RegionBytes,
    under_way: VecDeque<crate::fabric::Ticket>,
    posted: usize,
    done: usize,
    failed: usize,
}

/// What a crowd came to.
struct Came {
    /// Most frames that were under way at a time.
    under_way_max: usize,
    /// Batches of each sender when the first had all of its own behind it.
    at_first_end: Vec<usize>,
    done: Vec<usize>,
    failed: Vec<usize>,
}

impl Crowd {
    fn new(seed: u64, faults: Faults, takings: Takings) -> Self {
        let net = SimNet::new(seed, Faults::default());
        let mut receiver = Fabric::new(FabricOptions::new([99; 32])).unwrap();
        let into = receiver.add_device(Box::new(Sim::taking(takings))).unwrap();
        let len = PIECES_EACH * PIECE_LEN;
        let senders = (1..=SENDERS).map(|number| {
            let (one, two) = net.pair();
            let mut fabric = Fabric::new(FabricOptions::new([number as u8; 32])).unwrap();
            let sim = fabric.add_device(Box::new(Sim::taking(takings))).unwrap();
            let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
            let link = fabric.open(Instant::ZERO, sim, one, options).unwrap();
            receiver.open(Instant::ZERO, into, two, options).unwrap();
            let target = receiver.allocate(len, Default::default()).unwrap().carve(0, len).unwrap();
            let grant = receiver.grant_write(vec![target]).unwrap();
            let remote = fabric.attach(grant.token()).unwrap();
            std::mem::forget(grant); // it lasts as long as the test
            let bytes = fabric.allocate(len, Default::default()).unwrap().carve(0, len).unwrap().freeze();
            Sender { fabric, link, remote, bytes, under_way: VecDeque::new(), posted: 0, done: 0, failed: 0 }
        });
        let senders = senders.collect();
        let mut crowd = Self { net, receiver, senders, now: Instant::ZERO };
        // Once each, so that all is proven before what proves it may be overtaken.
        crowd.until_done(1);
        crowd.net.set_faults(faults);
        crowd
    }

    /// Until each sender has so many batches behind it.
    fn until_done(&mut self, batches: usize) {
        while self.senders.iter().any(|sender| sender.done + sender.failed < batches) {
            self.senders.iter_mut().for_each(|sender| sender.step(self.now, batches));
            self.receiver.poll(self.now);
            self.now = self.now + Duration::from_micros(20);
        }
    }

    fn run(mut self) -> Came {
        let (mut under_way_max, mut at_first_end) = (0, Vec::new());
        for step in 0.. {
            assert!(step < 400_000, "it never ends");
            self.senders.iter_mut().for_each(|sender| sender.step(self.now, BATCHES));
            // Once for all of them: it is the bottleneck.
            self.receiver.poll(self.now);
            under_way_max = under_way_max.max(self.net.under_way());
            let is_over = |sender: &Sender| sender.done + sender.failed == BATCHES;
            if at_first_end.is_empty() && self.senders.iter().any(is_over) {
                at_first_end = self.senders.iter().map(|sender| sender.done).collect();
            }
            if self.senders.iter().all(is_over) {
                break;
            }
            self.now = self.now + Duration::from_micros(20);
        }
        let (done, failed) = self.senders.iter().map(|sender| (sender.done, sender.failed)).unzip();
        Came { under_way_max, at_first_end, done, failed }
    }
}

impl Sender {
    fn step(&mut self, now: Instant, batches: usize) {
        while self.posted < batches && self.under_way.len() < 4 {
            let mut batch = Batch::new();
            batch.write(self.bytes.clone(), Extent::new(self.remote, 0, self.bytes.len() as u64));
            self.posted += 1;
            match self.fabric.post(now, self.link, batch, PostOptions::default()) {
                Ok(ticket) => self.under_way.push_back(ticket),
                Err(_) => self.failed += 1, // its link is over
            }
        }
        self.fabric.poll(now);
        for ticket in std::mem::take(&mut self.under_way) {
            match self.fabric.take(ticket) {
                Ok(completion) if completion.is_done() => self.done += 1,
                Ok(_) => self.failed += 1,
                Err(ticket) => self.under_way.push_back(ticket),
            }
        }
    }
}

#[test]
fn sixteen_senders_have_even_shares_of_what_one_receiver_takes_and_none_overruns_it() {
    for seed in 0..8 {
        let faults = Faults { delay_max: Duration::from_micros(400), order: Order::Free, ..Faults::default() };
        let came = Crowd::new(seed, faults, TAKINGS).run();
        assert_eq!((&came.done[..], &came.failed[..]), (&[BATCHES; SENDERS][..], &[0; SENDERS][..]), "seed {seed}");
        // Each open piece is a request or an answer on its way; proofs come once.
        let most = TAKINGS.whole.slices as usize + SENDERS;
        assert!(came.under_way_max <= most, "seed {seed}: {} frames under way", came.under_way_max);
        let least = came.at_first_end.iter().min().unwrap();
        assert!(2 * least >= BATCHES, "seed {seed}: {:?}", came.at_first_end);
        let unbound = Crowd::new(seed, faults, Takings::UNLIMITED).run();
        assert!(unbound.under_way_max > 2 * most, "the bound is felt: {}", unbound.under_way_max);
    }
}

#[test]
fn news_of_credit_that_is_lost_ends_its_sender_by_the_deadline_at_most_and_costs_the_others_nothing() {
    let mut hurt = 0;
    for number in (1..3000).step_by(37) {
        let crowd = Crowd::new(3, Faults::default(), TAKINGS);
        crowd.net.lose(crowd.net.sent() + number);
        let came = crowd.run();
        let failed: Vec<usize> = came.failed.iter().copied().filter(|failed| *failed > 0).collect();
        assert!(failed.len() <= 1, "frame {number}: {:?}", came.failed);
        hurt += failed.len();
        let whole = came.done.iter().filter(|done| **done == BATCHES).count();
        assert!(whole >= SENDERS - 1, "frame {number}: {:?}", came.done);
    }
    assert!(hurt > 0, "some frames were pieces and answers");
}
