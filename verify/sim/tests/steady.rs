//! In steady state an engine allocates per batch, never per slice or request; and after very many transfers, cancelled ones
//! and peers that restarted among them, it holds what it held before.

mod common;
#[path = "../../../hal/tests/common/counting.rs"]
mod counting;

use common::own::Own;
use common::{LEN, Link, Target, link, options, say, warm, writes};
use counting::{Counting, allocations_here};
use millpond_node::engine::{Backing, Batch, Engine, Region, Rights, Via};
use parking_lot::{Mutex, MutexGuard};

#[global_allocator]
static COUNTING: Counting = Counting;

/// Counts are of the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Pair {
    here: Engine<Own>,
    there: Option<Target>,
    to: Option<Link>,
    source: Region,
    runtime: Own,
    _alone: MutexGuard<'static, ()>,
}

fn pair() -> Pair {
    let alone = ALONE.lock();
    let runtime = Own::start().unwrap();
    let here = Engine::start(runtime.clone(), options(1, 1)).unwrap();
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let mut pair = Pair { here, there: None, to: None, source, runtime, _alone: alone };
    pair.restart(1);
    pair
}

impl Pair {
    /// The peer ends and is back, under the same name, as another.
    fn restart(&mut self, incarnation: u64) {
        (self.to, self.there) = (None, None);
        let there = Target::start(&self.runtime, options(2, incarnation));
        let to = link(&self.here, there.address, &there.token);
        (self.there, self.to) = (Some(there), Some(to));
    }

    fn to(&self) -> &Link {
        self.to.as_ref().unwrap()
    }

    /// `count` batches of `moves` writes each, driven by this thread. Gives its allocations meanwhile; the target's end, which
    /// a task of a runtime drives, is looked at in `hal/tests/steady.rs`.
    fn batches(&self, via: Via, count: u64, moves: u64) -> u64 {
        let mut batch = Batch::new().via(via);
        let before = allocations_here();
        for _ in 0..count {
            let report = self.here.blocking().run(writes(batch, &self.source, self.to(), moves, 64)).unwrap();
            assert!(report.is_done());
            batch = report.into_batch();
        }
        allocations_here() - before
    }
}

#[test]
fn allocations_of_a_batch_do_not_grow_with_its_requests() {
    let pair = pair();
    for via in [Via::Tcp, Via::Shm] {
        warm(&pair.here, &pair.source, pair.to(), via);
        pair.batches(via, 300, 512);
        let few = pair.batches(via, 1000, 1);
        let many = pair.batches(via, 1000, 512);
        say(&format!("{via}: {few} allocations in 1,000 batches of 1 request, {many} in 1,000 of 512"));
        // A caller's handle, and little else.
        assert!(few <= 4_000 && many <= 4_000, "{via}: {few}, {many}");
        assert!(many < few + 1_000, "{via}: {few} allocations for 1,000 requests, {many} for 512,000");
    }
}

/// Resident memory in KiB, and descriptors.
fn held() -> (u64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = line.trim().trim_end_matches(" kB").parse().unwrap();
    (resident, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

/// What is held becomes what it was; threads that end and descriptors that close may take a moment.
fn assert_as_before(what: &str, before: (u64, usize)) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let now = held();
        let is_alike = now.0 <= before.0 + before.0 / 20 && now.1 <= before.1;
        if is_alike || std::time::Instant::now() > end {
            say(&format!("{what}: from {} to {} KiB, from {} to {} descriptors", before.0, now.0, before.1, now.1));
            assert!(is_alike, "{what}");
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn assert_clean(engine: &Engine<Own>) {
    let counted = engine.statistics();
    assert_eq!((counted.transfers_open, counted.slices_open, counted.bytes_open), (0, 0, 0), "{counted:?}");
    assert_eq!(counted.transfers_started, counted.transfers_done + counted.transfers_failed, "{counted:?}");
}

/// `plain` transfers one after the other; then `cancelled` ones that are cancelled at some point, or not, while the peer is
/// restarted `restarts` times.
fn endure(plain: u64, cancelled: u64, restarts: u64) {
    let mut pair = pair();
    warm(&pair.here, &pair.source, pair.to(), Via::Tcp);
    let mut state = 1_u64;
    let mut random = move |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    // Once through all of it, so that tables and pools have the size they get.
    let warm_up = |pair: &mut Pair, random: &mut dyn FnMut(u64) -> u64, count: u64, first: u64| {
        let mut ended = 0;
        for incarnation in first..first + restarts {
            pair.restart(incarnation);
            for _ in 0..count / restarts {
                // Some are through before they are cancelled, some fill the sockets.
                let moves = 1 + random(LEN / 4096);
                let batch = writes(Batch::new().via(Via::Tcp), &pair.source, pair.to(), moves, 4096);
                let transfer = pair.here.submit(batch).unwrap();
                if random(2) == 0 {
                    (0..random(2000)).for_each(|_| std::hint::spin_loop());
                    transfer.cancel();
                }
                ended += u64::from(!pair.here.blocking().wait(transfer).is_done());
            }
        }
        ended
    };
    pair.batches(Via::Tcp, plain / 10, 1);
    warm_up(&mut pair, &mut random, cancelled / 2, 2);
    assert_clean(&pair.here);
    let before = held();
    pair.batches(Via::Tcp, plain, 1);
    assert_as_before(&format!("{plain} transfers"), before);
    let ended = warm_up(&mut pair, &mut random, cancelled, 2 + restarts);
    say(&format!("{ended} of {cancelled} ended early"));
    assert_clean(&pair.here);
    assert_as_before(&format!("{cancelled} transfers and {restarts} restarts"), before);
}

#[test]
fn after_many_transfers_cancels_and_restarts_everything_is_as_before() {
    endure(20_000, 600, 6);
}

#[test]
#[ignore = "a million transfers: a few minutes"]
fn after_a_million_transfers_and_a_hundred_restarts_everything_is_as_before() {
    endure(1_000_000, 10_000, 100);
}
