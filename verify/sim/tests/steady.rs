//! In steady state an engine allocates per batch, never per slice or request; and after very many transfers, cancelled ones
//! and peers that restarted among them, it holds what it held before.

mod common;
#[path = "../../../hal/tests/common/counting.rs"]
mod counting;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::own::Own;
use common::{LEN, Link, Target, link, options, say, warm, writes};
use counting::{Counting, allocations_here, bytes_in_use};
use millpond_core::random::Random;
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
    incarnation: u64,
    runtime: Own,
    _alone: MutexGuard<'static, ()>,
}

fn pair() -> Pair {
    let alone = ALONE.lock();
    let runtime = Own::start().unwrap();
    let here = Engine::start(runtime.clone(), options(1, 1)).unwrap();
    let source = here.allocate_raw(LEN, Backing::Memfd, Rights::NONE).unwrap();
    let mut pair = Pair { here, there: None, to: None, source, incarnation: 0, runtime, _alone: alone };
    pair.restart(1);
    pair
}

impl Pair {
    /// The peer ends and is back, under the same name, as another.
    fn restart(&mut self, incarnation: u64) {
        (self.to, self.there, self.incarnation) = (None, None, incarnation);
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
            assert!(report.is_done(), "{report:?}");
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

/// What this process and the engine here hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    /// Allocated and not freed, in KiB.
    heap: u64,
    /// Resident, in KiB.
    resident: u64,
    descriptors: usize,
    mappings: usize,
    /// Of the engine here: transfers, slices and bytes that are open, lanes, peers.
    gauges: [u64; 5],
}

/// What ended and is given back later: a listener looks twice a second whether its engine still runs, deadlines of what was
/// done in time pass within five seconds.
const PATIENCE: Duration = Duration::from_secs(15);
/// Nothing changes for so long: it is at rest.
const REST: Duration = Duration::from_secs(1);
/// What the heap may grow by, in KiB: containers that are kept for use are as long as what they last held.
const HEAP_SLACK: u64 = 64;

impl Held {
    fn now(here: &Engine<Own>) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let counted = here.statistics();
        Self {
            heap: bytes_in_use() / 1024,
            resident: line.trim().trim_end_matches(" kB").parse().unwrap(),
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd").count(),
            gauges: [
                counted.transfers_open,
                counted.slices_open,
                counted.bytes_open,
                counted.lanes_open,
                counted.peers_known,
            ],
        }
    }

    /// The same, once nothing changes any more.
    fn at_rest(here: &Engine<Own>) -> Self {
        let end = Instant::now() + PATIENCE;
        let (mut held, mut since) = (Self::now(here), Instant::now());
        while since.elapsed() < REST && Instant::now() < end {
            std::thread::sleep(REST / 20);
            let now = Self::now(here);
            if now != held {
                (held, since) = (now, Instant::now());
            }
        }
        held
    }

    /// What of it is not as it was `before`.
    fn excess(&self, before: &Self) -> Vec<&'static str> {
        let limit = |kib: u64| kib + kib / 20;
        let of = [
            ("heap", self.heap > before.heap + HEAP_SLACK),
            ("resident", self.resident > limit(before.resident)),
            ("descriptors", self.descriptors != before.descriptors),
            ("mappings", self.mappings != before.mappings),
            ("gauges", self.gauges != before.gauges),
        ];
        of.into_iter().filter(|(_, is_more)| *is_more).map(|(what, _)| what).collect()
    }

    /// What is still more than `before` after some patience. Says so.
    fn left(here: &Engine<Own>, what: &str, before: &Self, patience: Duration) -> Vec<&'static str> {
        let end = Instant::now() + patience;
        let mut now = Self::now(here);
        while !now.excess(before).is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            now = Self::now(here);
        }
        say(&format!("{what}: {before:?} became {now:?}"));
        now.excess(before)
    }
}

fn assert_clean(engine: &Engine<Own>) {
    let counted = engine.statistics();
    assert_eq!((counted.transfers_open, counted.slices_open, counted.bytes_open), (0, 0, 0), "{counted:?}");
    assert_eq!(counted.transfers_started, counted.transfers_done + counted.transfers_failed, "{counted:?}");
}

/// What a restart leaves behind on purpose.
type Leak = Option<fn(&Pair) -> Box<dyn std::any::Any>>;

/// How much is moved.
struct Load {
    /// Transfers one after the other.
    plain: u64,
    /// Transfers that are cancelled at some point, or not.
    cancelled: u64,
    /// Restarts of the peer among the latter.
    restarts: u64,
}

impl Pair {
    /// Gives how many ended early, and what was left behind.
    fn churn(&mut self, load: &Load, random: &mut Random, leak: Leak) -> (u64, Vec<Box<dyn std::any::Any>>) {
        let (mut ended, mut left) = (0, Vec::new());
        for _ in 0..load.restarts {
            left.extend(leak.map(|leak| leak(self)));
            self.restart(self.incarnation + 1);
            for _ in 0..load.cancelled / load.restarts {
                // Some are through before they are cancelled, some fill the sockets.
                let moves = 1 + random.below(MOVES_MAX);
                let batch = writes(Batch::new().via(Via::Tcp), &self.source, self.to(), moves, 4096);
                let transfer = self.here.submit(batch).unwrap();
                if random.below(2) == 0 {
                    (0..random.below(2000)).for_each(|_| std::hint::spin_loop());
                    transfer.cancel();
                }
                ended += u64::from(!self.here.blocking().wait(transfer).is_done());
            }
        }
        // Containers that are kept for use end as long as they get.
        for _ in 0..100 {
            let all = writes(Batch::new().via(Via::Tcp), &self.source, self.to(), MOVES_MAX, 4096);
            assert!(self.here.blocking().run(all).unwrap().is_done());
        }
        for via in [Via::Tcp, Via::Shm] {
            warm(&self.here, &self.source, self.to(), via);
        }
        (ended, left)
    }
}

/// Less than what makes a second lane worth its dial, or the number of lanes were a matter of chance.
const MOVES_MAX: u64 = LEN / 4096 - 1;

/// Plain transfers; then others that are cancelled at some point while the peer restarts. What is still held afterwards that
/// was not before.
fn endure(load: &Load, leak: Leak, patience: Duration) -> Vec<&'static str> {
    let mut pair = pair();
    let mut random = Random::new(1);
    // Once through all of it, so that tables and pools have the size they get.
    pair.batches(Via::Tcp, (load.plain / 10).max(2_000), 1);
    pair.churn(&Load { cancelled: load.cancelled / 2, ..*load }, &mut random, None);
    assert_clean(&pair.here);
    let before = Held::at_rest(&pair.here);
    pair.batches(Via::Tcp, load.plain, 1);
    let mut more = Held::left(&pair.here, &format!("{} transfers", load.plain), &before, patience);
    let (ended, _left) = pair.churn(load, &mut random, leak);
    say(&format!("{ended} of {} ended early", load.cancelled));
    assert!(ended > 0, "some are cancelled in time");
    assert_clean(&pair.here);
    more.extend(Held::left(&pair.here, &format!("{} restarts", load.restarts), &before, patience));
    more
}

/// Whether this process has an allocator that gives back what is freed. glibc's keeps what its many arenas once held, and
/// how much that is depends on which thread ends when; otherwise the test `name` runs in a process that has.
fn gives_back(name: &str) -> bool {
    const GIVES_BACK: [(&str, &str); 3] =
        [("MALLOC_ARENA_MAX", "1"), ("MALLOC_MMAP_THRESHOLD_", "65536"), ("MALLOC_TRIM_THRESHOLD_", "65536")];
    if GIVES_BACK.iter().all(|(option, _)| std::env::var_os(option).is_some()) {
        return true;
    }
    // Nodes of the same names at the same time would take each other's calls.
    let _alone = ALONE.lock();
    let args = ["--exact", name, "--include-ignored", "--nocapture"];
    let run = Command::new(std::env::current_exe().unwrap())
        .args(args)
        .envs(GIVES_BACK)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    print!("{said}");
    // A name that fits no test would pass as well.
    assert!(run.status.success() && said.contains("1 passed"), "what was held is above");
    false
}

#[test]
fn after_many_transfers_cancels_and_restarts_everything_is_as_before() {
    if gives_back("after_many_transfers_cancels_and_restarts_everything_is_as_before") {
        let more = endure(&Load { plain: 20_000, cancelled: 600, restarts: 6 }, None, PATIENCE);
        assert_eq!(more, [""; 0]);
    }
}

#[test]
#[ignore = "a million transfers: a few minutes"]
fn after_a_million_transfers_and_a_hundred_restarts_everything_is_as_before() {
    if gives_back("after_a_million_transfers_and_a_hundred_restarts_everything_is_as_before") {
        let more = endure(&Load { plain: 1_000_000, cancelled: 10_000, restarts: 100 }, None, PATIENCE);
        assert_eq!(more, [""; 0]);
    }
}

#[test]
fn a_restart_that_leaves_a_descriptor_or_a_place_in_a_table_is_noticed() {
    if !gives_back("a_restart_that_leaves_a_descriptor_or_a_place_in_a_table_is_noticed") {
        return;
    }
    let few = Load { plain: 1_000, cancelled: 60, restarts: 3 };
    let noticed = |leak: fn(&Pair) -> Box<dyn std::any::Any>| endure(&few, Some(leak), Duration::from_secs(3));
    assert!(noticed(|_| Box::new(std::fs::File::open("/dev/null").unwrap())).contains(&"descriptors"));
    assert!(noticed(|pair| Box::new(pair.to().peer.clone())).contains(&"gauges"));
    assert!(noticed(|pair| Box::new(pair.there.as_ref().unwrap().engine.clone())).contains(&"heap"));
}
