//! A small cluster under virtual time: the index while events are lost and instances restart, and routers that know what
//! was true a second ago.

use std::collections::{BTreeMap, VecDeque};

use millpond_core::hash::RouteHash;
use millpond_core::prefix::Holder;
use millpond_core::sched::cost::{Link, Prefill, Profile};
use millpond_core::sched::index::{Change, Event, Index, Knowledge, Limits, Outcome};
use millpond_core::sched::placement::{Options, PrefillView, Prompt, place_prefill};
use millpond_core::sched::spread::Near;
use millpond_core::time::Duration;

/// A small generator with a fixed seed: every run does the same.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        u64::try_from((u128::from(self.next()) * u128::from(limit)) >> 64).unwrap()
    }

    /// True once in `times`.
    fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

const INSTANCES: u16 = 16;
/// Blocks that an instance keeps.
const BLOCKS: usize = 400;
/// Events that an instance keeps to send again.
const BACKLOG: usize = 500;

/// What an instance says, with its number.
#[derive(Clone)]
enum Said {
    Stored(Vec<RouteHash>),
    Removed(Vec<RouteHash>),
}

/// An instance with a cache of blocks, the last used last, and the last of its events.
#[derive(Default)]
struct Instance {
    life: u64,
    number: u64,
    cache: VecDeque<RouteHash>,
    backlog: VecDeque<(u64, Said)>,
}

impl Instance {
    fn say(&mut self, said: Said) {
        self.number += 1;
        self.backlog.push_back((self.number, said));
        if self.backlog.len() > BACKLOG {
            self.backlog.pop_front();
        }
    }

    /// Serves a prompt: its blocks are there afterwards.
    fn serve(&mut self, chain: &[RouteHash]) {
        let fresh: Vec<RouteHash> = chain.iter().copied().filter(|name| !self.cache.contains(name)).collect();
        self.cache.retain(|name| !chain.contains(name));
        // The last block first: a chain is given up from its end.
        self.cache.extend(chain.iter().rev());
        let gone: Vec<RouteHash> = self.cache.drain(..self.cache.len().saturating_sub(BLOCKS)).collect();
        if !fresh.is_empty() {
            self.say(Said::Stored(fresh));
        }
        if !gone.is_empty() {
            self.say(Said::Removed(gone));
        }
    }

    fn has(&self, chain: &[RouteHash]) -> usize {
        chain.iter().take_while(|name| self.cache.contains(name)).count()
    }

    fn restart(&mut self) {
        *self = Self { life: self.life + 1, ..Self::default() };
    }
}

/// What goes wrong between the instances and the router.
#[derive(Clone, Copy)]
struct Trouble {
    /// One message in so many is lost.
    lost_once_in: u64,
    /// Whether instances say twice a second how far they are.
    signs_of_life: bool,
    /// Whether the router takes a snapshot of an instance of which it knows that it missed something.
    snapshots: bool,
}

struct Cluster {
    instances: Vec<Instance>,
    index: Index<RouteHash, 1>,
    random: Random,
    trouble: Trouble,
}

/// The blocks of a prompt: two that all share, some of one of 40 sessions, some of its own.
fn prompt(random: &mut Random) -> Vec<RouteHash> {
    let session = random.below(40);
    let turns = 2 + random.below(12);
    let own = random.next() | 1 << 63;
    let shared = (0..2).map(RouteHash);
    let of_session = (0..turns).map(move |block| RouteHash(1_000 + session * 100 + block));
    shared.chain(of_session).chain((0..2).map(move |block| RouteHash(own ^ block))).collect()
}

impl Cluster {
    fn new(trouble: Trouble) -> Self {
        let limits = Limits { holders_max: INSTANCES, spares: 16, blocks_max: 1 << 16, sets_max: 1 << 14 };
        let instances = (0..INSTANCES).map(|_| Instance { life: 1, ..Instance::default() }).collect();
        Self { instances, index: Index::new(limits, 7), random: Random(0x2545_f491_4f6c_dd1d), trouble }
    }

    /// One prompt is placed where most of it is thought to be, one in four anywhere; what happens there is told or lost.
    fn step(&mut self) {
        let chain = prompt(&mut self.random);
        let mut matches = self.index.new_matches();
        self.index.matches(&chain, &mut matches);
        let best = (0..INSTANCES).max_by_key(|&holder| matches.len_of(Holder(holder))).unwrap_or(0);
        let anywhere = u16::try_from(self.random.below(u64::from(INSTANCES))).unwrap();
        let chosen = if self.random.once_in(4) { anywhere } else { best };
        let instance = &mut self.instances[usize::from(chosen)];
        let before = instance.number;
        instance.serve(&chain);
        self.send(chosen, before);
    }

    /// Sends the events of an instance after `after`; some are lost.
    fn send(&mut self, holder: u16, after: u64) {
        let instance = &self.instances[usize::from(holder)];
        let said: Vec<(u64, Said)> = instance.backlog.iter().filter(|(number, _)| *number > after).cloned().collect();
        for (number, said) in said {
            if !self.random.once_in(self.trouble.lost_once_in) {
                self.hear(holder, number, &said);
            }
        }
    }

    fn hear(&mut self, holder: u16, number: u64, said: &Said) {
        let change = match said {
            Said::Stored(names) => Change::Stored(names),
            Said::Removed(names) => Change::Removed(names),
        };
        let life = self.instances[usize::from(holder)].life;
        let outcome = self.index.on_event(&Event { holder: Holder(holder), life, number, change });
        self.repair(holder, outcome);
    }

    fn signs_of_life(&mut self) {
        if !self.trouble.signs_of_life {
            return;
        }
        for holder in 0..INSTANCES {
            let Instance { life, number, .. } = self.instances[usize::from(holder)];
            if !self.random.once_in(self.trouble.lost_once_in) {
                let outcome = self.index.on_position(Holder(holder), life, number);
                self.repair(holder, outcome);
            }
        }
    }

    /// Takes a snapshot if something is missing; after it the instance sends what came since again.
    fn repair(&mut self, holder: u16, outcome: Outcome) {
        if !self.trouble.snapshots || !matches!(outcome, Outcome::Behind | Outcome::Crowded) {
            return;
        }
        let Instance { life, number, ref cache, .. } = self.instances[usize::from(holder)];
        let names: Vec<RouteHash> = cache.iter().copied().collect();
        while self.index.begin_snapshot(Holder(holder), life, number) == Outcome::Crowded {
            self.index.sweep(1_000);
        }
        self.index.on_snapshot(Holder(holder), life, &names);
        self.index.end_snapshot(Holder(holder), life);
    }

    /// Prompts, of so many, that would be sent for more blocks than are there.
    fn sent_for_what_is_gone(&mut self, prompts: u32) -> u32 {
        let mut matches = self.index.new_matches();
        let mut gone = 0;
        for _ in 0..prompts {
            let chain = prompt(&mut self.random);
            self.index.matches(&chain, &mut matches);
            let best = (0..INSTANCES).max_by_key(|&holder| matches.len_of(Holder(holder))).unwrap_or(0);
            let has = self.instances[usize::from(best)].has(&chain);
            gone += u32::from(matches.len_of(Holder(best)) as usize > has);
        }
        gone
    }
}

/// A minute of 100 prompts a second with an instance that restarts every two seconds, then five quiet seconds; how many of
/// 10,000 prompts are sent for what is gone.
fn after_a_minute_of(trouble: Trouble) -> u32 {
    let mut cluster = Cluster::new(trouble);
    for tick in 0..6_000 {
        cluster.step();
        if tick % 200 == 199 {
            let which = usize::try_from(cluster.random.below(u64::from(INSTANCES))).unwrap();
            cluster.instances[which].restart();
        }
        if tick % 50 == 49 {
            cluster.signs_of_life();
        }
    }
    (0..10).for_each(|_| cluster.signs_of_life());
    if trouble.signs_of_life && trouble.snapshots {
        let knowledge = (0..INSTANCES).map(|holder| cluster.index.view(Holder(holder)).unwrap().knowledge);
        assert!(knowledge.into_iter().all(|knowledge| knowledge == Knowledge::Current));
    }
    cluster.sent_for_what_is_gone(10_000)
}

#[test]
fn requests_are_not_sent_for_blocks_that_are_gone_although_events_are_lost_and_instances_restart() {
    let trouble = Trouble { lost_once_in: 100, signs_of_life: true, snapshots: true };
    let gone = after_a_minute_of(trouble);
    assert!(gone < 10, "{gone} of 10,000");
    // And the harness sees it where more is lost and nothing is repaired.
    let unrepaired = after_a_minute_of(Trouble { lost_once_in: 10, signs_of_life: true, snapshots: false });
    assert!(unrepaired >= 10, "{unrepaired} of 10,000");
    eprintln!("sent for what is gone, of 10,000: {gone}; ten times the loss and no repair: {unrepaired}");
}

#[test]
fn a_dead_instance_wins_nothing_from_the_moment_its_death_is_known() {
    let mut cluster = Cluster::new(Trouble { lost_once_in: 100, signs_of_life: true, snapshots: true });
    (0..1_000).for_each(|_| cluster.step());
    let chain = prompt(&mut cluster.random);
    (0..INSTANCES).for_each(|holder| {
        let before = cluster.instances[usize::from(holder)].number;
        cluster.instances[usize::from(holder)].serve(&chain);
        cluster.send(holder, before);
    });
    cluster.signs_of_life();
    let life = cluster.instances[3].life;
    assert_eq!(cluster.index.on_leave(Holder(3), life), Outcome::Applied);
    let mut matches = cluster.index.new_matches();
    cluster.index.matches(&chain, &mut matches);
    assert_eq!(matches.len_of(Holder(3)), 0);
    assert!(matches.beyond().all(|(holder, _)| holder != Holder(3)));
    assert_eq!(matches.shared() as usize, chain.len(), "all others have it");
    cluster.send(3, 0);
    cluster.index.matches(&chain, &mut matches);
    assert_eq!(matches.len_of(Holder(3)), 0, "what it said before comes late");
}

/// Microseconds.
type Micros = u64;

/// How a router chooses among the scores of the workers.
#[derive(Clone, Copy, PartialEq)]
enum Choice {
    /// The least, the first of equals.
    Least,
    /// One of the near ones, in turn.
    Near,
}

/// Workers that serve one request after the other, and routers that hear of their lines once a second.
struct Routers {
    /// Until when each worker is busy.
    busy_until: Vec<Micros>,
    /// That, as it was last reported.
    reported: Vec<Micros>,
    /// What each router sent to each worker since then.
    sent: Vec<Vec<Micros>>,
    turns: Vec<u64>,
    choice: Choice,
    /// Work sent to each worker.
    work: Vec<Micros>,
    /// What requests waited before they were begun, all together.
    waited: Micros,
}

impl Routers {
    fn new(routers: usize, workers: usize, choice: Choice) -> Self {
        Self {
            busy_until: vec![0; workers],
            reported: vec![0; workers],
            sent: vec![vec![0; workers]; routers],
            turns: (0..).take(routers).collect(),
            choice,
            work: vec![0; workers],
            waited: 0,
        }
    }

    fn report(&mut self) {
        self.reported.clone_from(&self.busy_until);
        self.sent.iter_mut().for_each(|sent| sent.fill(0));
    }

    /// A prompt comes to `router`, a microsecond per token, of which the worker has `matched` blocks. The worker that gets it.
    fn place(&mut self, now: Micros, router: usize, tokens: u32, matched: impl Fn(usize) -> u32) -> usize {
        let wait = |worker: usize| self.reported[worker].saturating_sub(now) + self.sent[router][worker];
        let views: Vec<PrefillView> = (0..self.work.len())
            .map(|worker| PrefillView {
                wait: Duration::from_micros(wait(worker)),
                matched: matched(worker),
                ..PrefillView::default()
            })
            .collect();
        let mut options = Options::default();
        options.near = match self.choice {
            Choice::Least => Near::default(),
            Choice::Near => Near { parts_per_thousand: 50, slack: 0 },
        };
        let turn = if self.choice == Choice::Near { self.turns[router] } else { 0 };
        self.turns[router] += 1;
        let placed = place_prefill(&options, &profile(), Prompt { tokens, turn }, &views, &mut Vec::new()).unwrap();
        let (worker, cost) = (placed.chosen.instance as usize, placed.chosen.prefill.as_micros());
        self.sent[router][worker] += cost;
        self.waited += self.busy_until[worker].saturating_sub(now);
        self.busy_until[worker] = self.busy_until[worker].max(now) + cost;
        self.work[worker] += cost;
        worker
    }
}

/// A microsecond per token, 60,000 tokens per block, and a network on which nothing is worth pulling.
fn profile() -> Profile {
    let mut profile = Profile::default();
    (profile.block_tokens, profile.kv_bytes_per_token) = (60_000, 1);
    profile.prefill = Prefill { fixed: 0.0, linear: 1e-6, quadratic: 0.0 };
    profile.link = Link { bytes_per_second: 1.0, latency: 0.0 };
    profile
}

/// The greatest over the mean, in percent.
fn peak(values: &[u64]) -> u64 {
    let sum: u64 = values.iter().sum();
    values.iter().max().unwrap() * 100 * u64::try_from(values.len()).unwrap() / sum
}

const ROUTERS: usize = 16;
const WORKERS: usize = 16;

/// The worst peak of work of any window of ten seconds, and what requests waited in the mean, over five minutes at 70 %
/// of what the workers can do.
fn steady(choice: Choice) -> (u64, Micros) {
    let mut routers = Routers::new(ROUTERS, WORKERS, choice);
    let (mut random, mut now, mut report_at, mut window_end) = (Random(0x9e37_79b9_7f4a_7c15), 0, 0, 10_000_000);
    let (mut worst, mut requests) = (0, 0);
    while now < 300_000_000 {
        // 112 requests a second of 50 to 150 ms each.
        now += random.below(2 * 1_000_000 / 112);
        if now >= report_at {
            routers.report();
            report_at += 1_000_000;
        }
        if now >= window_end {
            worst = worst.max(peak(&routers.work));
            routers.work.fill(0);
            window_end += 10_000_000;
        }
        let (router, cost) = (usize::try_from(random.below(16)).unwrap(), 50_000 + random.below(100_000));
        routers.place(now, router, u32::try_from(cost).unwrap(), |_| 0);
        requests += 1;
    }
    (worst, routers.waited / requests)
}

#[test]
fn sixteen_routers_that_know_what_was_true_a_second_ago_do_not_herd() {
    let (near, least) = (steady(Choice::Near), steady(Choice::Least));
    eprintln!("near {near:?}, least {least:?}");
    assert!(near.0 < 130, "{} %", near.0);
    assert!(near.1 * 2 < least.1, "waits of {} us and, for who takes the least, {} us", near.1, least.1);
}

#[test]
fn a_burst_that_meets_idle_workers_is_spread_by_routers_that_do_not_hear_of_each_other() {
    let burst = |choice| {
        let mut routers = Routers::new(ROUTERS, WORKERS, choice);
        (0..160).for_each(|request| {
            routers.place(0, request % ROUTERS, 100_000, |_| 0);
        });
        peak(&routers.work)
    };
    let (near, least) = (burst(Choice::Near), burst(Choice::Least));
    assert!(near < 130, "{near} %");
    assert!(least >= 130, "{least} %");
}

#[test]
fn a_first_block_that_all_prompts_share_does_not_draw_them_to_one_instance() {
    // One router, eight workers; 3 blocks a prompt, 60 ms each, of which the first is the same in all prompts.
    let mut routers = Routers::new(1, 8, Choice::Near);
    let mut index: Index<RouteHash, 1> = Index::new(Limits { holders_max: 8, ..Limits::default() }, 7);
    let mut matches = index.new_matches();
    let mut random = Random(0x1234_5678_9abc_def1);
    let (mut counts, mut now, mut report_at) = (vec![0; 8], 0, 0);
    let mut numbers: BTreeMap<usize, u64> = BTreeMap::new();
    for _ in 0..4_000 {
        now += random.below(2 * 1_000_000 / 40);
        if now >= report_at {
            routers.report();
            report_at += 1_000_000;
        }
        let chain = [RouteHash(1), RouteHash(random.next()), RouteHash(random.next())];
        index.matches(&chain, &mut matches);
        let matched = |worker: usize| matches.len_of(Holder(u16::try_from(worker).unwrap()));
        let worker = routers.place(now, 0, 3 * 60_000, matched);
        counts[worker] += 1;
        let number = numbers.entry(worker).or_default();
        *number += 1;
        let (holder, change) = (Holder(u16::try_from(worker).unwrap()), Change::Stored(&chain));
        index.on_event(&Event { holder, life: 1, number: *number, change });
    }
    assert!(peak(&counts) < 115, "{counts:?}");
    assert_eq!(matches.shared(), 1, "everybody has the first block, and it decides nothing");
}

#[test]
fn an_idle_start_spreads_over_both_of_two() {
    let split = |choice| {
        let mut routers = Routers::new(1, 2, choice);
        let mut counts = [0_u64; 2];
        for request in 0..448_u64 {
            // Each is done before the next comes: there is no load that could tell them apart.
            routers.report();
            counts[routers.place(request * 1_000_000, 0, 100_000, |_| 0)] += 1;
        }
        counts
    };
    let [first, second] = split(Choice::Near);
    assert!(first.max(second) * 100 <= 448 * 55, "{first} and {second}");
    assert_eq!(split(Choice::Least), [448, 0], "which is what went wrong elsewhere");
}
