//! A follower and a directory under virtual time: events are lost, the directory restarts, the stream is slow or silent.

use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::{BoxFuture, FutureExt, pending, ready};
use futures::stream::{self, BoxStream};
use millpond_core::directory::{
    Commit, Config, Directory, Holdings, Inventory, Join, Key, Leases, Limits as Bounds, Location, NodeId, Owner, Part,
    Place, SegmentFacts, Stamp, Start,
};
use millpond_core::hash::{Model, Secret};
use millpond_core::random::Random;

use super::*;
use crate::router::VirtualTime;

const NODES: u8 = 4;
const PROMPTS: u32 = 200;
/// Tokens of a block, and blocks of a prompt.
const BLOCK: usize = 4;
const BLOCKS: u32 = 3;
const NOW: Instant = Instant::ZERO;

fn namer(tenant: &str) -> Namer {
    let secret = if tenant.is_empty() { 1 } else { 2 };
    Namer::new(Secret([secret; 32]), &Model { id: "toy", layout: [0; 16] })
}

/// A prompt of whole blocks and a token.
fn prompt(number: u32) -> Vec<u32> {
    (0..BLOCKS).flat_map(|block| [number, block, 0, 0]).chain([7]).collect()
}

fn keys(number: u32) -> Vec<String> {
    namer("").chain(&prompt(number), BLOCK).map(|name| format!("kv/{name}")).collect()
}

/// A directory with its store nodes, and the trouble on the way to a follower.
struct World {
    timers: Timers,
    state: Mutex<Shard>,
    /// One event in so many is lost on the way; 0: none.
    lost_once_in: AtomicU64,
    /// Milliseconds between two pages.
    pace: AtomicU64,
}

struct Shard {
    /// Nothing while it is down.
    directory: Option<Directory>,
    term: u64,
    incarnations: [u64; NODES as usize],
    generation: u32,
    random: Random,
    is_mute: bool,
}

impl Shard {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit)
    }

    fn owner(&self, node: u8) -> Owner {
        Owner { node: NodeId([node + 1; 16]), incarnation: self.incarnations[usize::from(node)] }
    }

    fn directory(&mut self) -> &mut Directory {
        self.directory.as_mut().expect("the test knows that it runs")
    }

    /// A term begins, with nobody and nothing in it.
    fn start(&mut self, events_max: usize) {
        self.term += 1;
        let limits = Bounds { events_max, page_max: 64, ..Bounds::default() };
        self.directory = Some(Directory::new(NOW, Config { limits, start: Start::Fresh, ..Config::fresh(self.term) }));
        (0..NODES).for_each(|node| self.restart(node));
    }

    /// The node dies, starts again and holds nothing.
    fn restart(&mut self, node: u8) {
        let before = self.owner(node);
        self.directory().on_death(NOW, before);
        self.incarnations[usize::from(node)] += 1;
        let owner = self.owner(node);
        let segments = vec![SegmentFacts::dram(0, owner.incarnation, 1 << 30)];
        self.directory().on_join(NOW, Join { owner, address: "h:1".into(), segments }).value.unwrap();
        let inventory = Inventory { segment: 0, epoch: owner.incarnation, entries: &[], part: Part::Last };
        self.directory().on_inventory(NOW, owner, inventory).value.unwrap();
    }

    /// All blocks of a prompt that are not there are stored, one here and one there.
    fn store(&mut self, number: u32) {
        for (block, key) in (0_u32..).zip(keys(number)) {
            let node = u8::try_from(self.below(u64::from(NODES))).unwrap();
            let owner = self.owner(node);
            self.generation += 1;
            let (slot, generation) = (number * BLOCKS + block, self.generation);
            let location = Location { node: owner.node, segment: 0, epoch: owner.incarnation, slot, generation };
            let key = Key::new(key.as_bytes()).unwrap();
            // Refused where it is there already.
            let _ = self.directory().on_commit(NOW, owner, &Commit::new(key, 5, location));
        }
    }

    fn change(&mut self) {
        let number = u32::try_from(self.below(u64::from(PROMPTS))).unwrap();
        if self.below(3) > 0 {
            return self.store(number);
        }
        let key = keys(number).remove(usize::try_from(self.below(u64::from(BLOCKS))).unwrap());
        self.directory().on_remove(NOW, Key::new(key.as_bytes()).unwrap(), Leases::Override);
    }

    /// Leading blocks of a prompt that can be loaded.
    fn has(&mut self, number: u32) -> u32 {
        let directory = self.directory();
        let is_there = |key: &String| directory.exists(NOW, Key::new(key.as_bytes()).unwrap()).value.is_ok();
        u32::try_from(keys(number).iter().take_while(|key| is_there(key)).count()).unwrap()
    }
}

const DOWN: &str = "connection refused";

impl Source for Arc<World> {
    fn changes(&self, after: Stamp) -> BoxStream<'static, Result<EventPage, String>> {
        let world = Arc::clone(self);
        stream::unfold((world, after, 0_u64), |(world, mut after, mut quiet)| async move {
            loop {
                let pace = world.pace.load(Ordering::Relaxed);
                world.sleep(pace).await;
                quiet += pace;
                if world.state.lock().is_mute {
                    pending::<()>().await;
                }
                match world.page(after) {
                    Ok(page) if page.events.is_empty() && !page.gap && page.next == after && quiet < 1_000 => {}
                    Ok(page) => {
                        after = page.next;
                        return Some((Ok(page), (world, after, 0)));
                    }
                    Err(why) => return Some((Err(why), (world, after, 0))),
                }
            }
        })
        .boxed()
    }

    fn nodes(&self) -> BoxFuture<'static, Result<Vec<NodeId>, String>> {
        let state = self.state.lock();
        let nodes = |directory: &Directory| directory.view(NOW).value.into_iter().map(|view| view.owner.node).collect();
        ready(state.directory.as_ref().map(nodes).ok_or_else(|| DOWN.to_owned())).boxed()
    }

    fn holdings(&self, node: NodeId, after: Option<Place>) -> BoxFuture<'static, Result<Holdings, String>> {
        let world = Arc::clone(self);
        async move {
            (world.timers.sleep)(Duration::from_millis(1)).await;
            let state = world.state.lock();
            let directory = state.directory.as_ref().ok_or_else(|| DOWN.to_owned())?;
            Ok(directory.holdings(node, b"kv/", after, 50).value)
        }
        .boxed()
    }
}

/// Runs `test` beside a follower of a directory whose ring holds `events_max` events.
fn follow<F: Future<Output = ()> + 'static>(events_max: usize, test: impl FnOnce(Arc<World>, Follower, Registry) -> F) {
    let time = VirtualTime::default();
    let mut state = Shard {
        directory: None,
        term: 0,
        incarnations: [0; NODES as usize],
        generation: 0,
        random: Random::new(1),
        is_mute: false,
    };
    state.start(events_max);
    let world = Arc::new(World {
        timers: time.timers(),
        state: Mutex::new(state),
        lost_once_in: AtomicU64::new(0),
        pace: AtomicU64::new(10),
    });
    let registry = Registry::new();
    let source = Arc::new(Arc::clone(&world));
    let follower = Follower::new(source, Box::new(namer), BLOCK, vec!["prefill-0".into()], time.timers(), &registry);
    let runs = follower.clone();
    (time.spawner())(async move { runs.run().await }.boxed());
    time.run(test(world, follower, registry));
}

impl World {
    async fn sleep(&self, millis: u64) {
        (self.timers.sleep)(Duration::from_millis(millis)).await;
    }

    /// A page of events, but for those that are lost.
    fn page(&self, after: Stamp) -> Result<EventPage, String> {
        let (mut state, once_in) = (self.state.lock(), self.lost_once_in.load(Ordering::Relaxed));
        let mut page = state.directory.as_ref().ok_or(DOWN)?.events(after, usize::MAX).value;
        page.events.retain(|_| once_in == 0 || state.below(once_in) > 0);
        Ok(page)
    }

    /// Prompts of which the follower says that more, or less, is there than is.
    fn differences(&self, follower: &Follower) -> (usize, usize) {
        let mut state = self.state.lock();
        let pairs: Vec<(u32, u32)> =
            (0..PROMPTS).map(|number| (follower.seek("", &prompt(number)).stored.blocks, state.has(number))).collect();
        (pairs.iter().filter(|(known, is)| known > is).count(), pairs.iter().filter(|(known, is)| known < is).count())
    }
}

fn value(registry: &Registry, name: &str) -> u64 {
    let text = registry.text();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.trim().parse().unwrap()
}

#[test]
fn a_router_that_loses_events_while_store_nodes_restart_knows_what_is_there_after_a_quiet_moment() {
    follow(65_536, |world, follower, registry| async move {
        world.lost_once_in.store(100, Ordering::Relaxed);
        let mut wrong = 0;
        // A minute of 100 changes a second; a store node restarts every two seconds.
        for tick in 0_u64..6_000 {
            world.state.lock().change();
            if tick % 200 == 199 {
                let node = u8::try_from(world.state.lock().below(u64::from(NODES))).unwrap();
                world.state.lock().restart(node);
            }
            world.sleep(10).await;
            wrong += usize::from(tick % 100 == 0 && world.differences(&follower) != (0, 0));
        }
        world.sleep(5_000).await;
        assert_eq!(world.differences(&follower), (0, 0));
        let snapshots = value(&registry, "millpond_router_index_snapshots_total ");
        assert!(snapshots > 40, "{snapshots} snapshots: what was lost was hardly noticed");
        eprintln!("{snapshots} snapshots; {wrong} of 60 looks in between found something that differed");
        assert_eq!(value(&registry, "millpond_router_index_current "), 1);
    });
}

#[test]
fn a_store_node_that_restarts_is_forgotten_with_the_page_that_says_so() {
    follow(65_536, |world, follower, registry| async move {
        (0..PROMPTS).for_each(|number| world.state.lock().store(number));
        world.sleep(1_500).await;
        assert_eq!(
            (world.differences(&follower), value(&registry, "millpond_router_index_snapshots_total ")),
            ((0, 0), 1)
        );
        let before = follower.seek("", &prompt(3)).stored;
        assert_eq!(before.blocks, BLOCKS);
        assert_eq!(follower.seek("somebody else", &prompt(3)).stored.blocks, 0, "tenants do not share blocks");
        world.state.lock().restart(2);
        // Its removals need several pages, its death is one event.
        world.sleep(11).await;
        let after = follower.seek("", &prompt(3)).stored;
        assert!((1..=64).contains(&(after.version - before.version)), "one page: {after:?}");
        assert_eq!(world.differences(&follower), (0, 0));
        assert!((0..PROMPTS).any(|number| world.state.lock().has(number) == 0), "it held a quarter of all");
        world.sleep(1_000).await;
        assert_eq!(world.differences(&follower), (0, 0));
        assert_eq!(value(&registry, "millpond_router_index_snapshots_total "), 1, "events said it all");
    });
}

#[test]
fn a_directory_that_restarts_is_followed_into_its_new_term() {
    follow(65_536, |world, follower, registry| async move {
        (0..PROMPTS).for_each(|number| world.state.lock().store(number));
        world.sleep(1_500).await;
        world.state.lock().directory = None;
        world.sleep(2_000).await;
        assert_eq!(follower.seek("", &prompt(3)).stored.blocks, BLOCKS, "a moment without it is nothing");
        let view = follower.view();
        assert_eq!((&view["state"], &view["why"], &view["lost"]), (&json!("lost"), &json!(DOWN), &json!(1)));
        assert!(
            view["heard_ms_ago"].as_u64() >= Some(2_000) && view["heard_ms_ago"] == view["current_ms_ago"],
            "{view}"
        );
        assert!(value(&registry, "millpond_router_index_unheard_ms ") > 0);
        world.sleep(4_500).await;
        assert_eq!(follower.seek("", &prompt(3)).stored.blocks, 0, "nobody loads anything without a directory");
        // It comes back empty; some of the prompts are stored again.
        world.state.lock().start(65_536);
        (0..PROMPTS / 2).for_each(|number| world.state.lock().store(number));
        world.sleep(3_000).await;
        assert_eq!((world.differences(&follower), follower.seek("", &prompt(3)).stored.blocks), ((0, 0), BLOCKS));
        assert_eq!(follower.seek("", &prompt(PROMPTS - 1)).stored.blocks, 0);
        let view = follower.view();
        let event = json!(value(&registry, "millpond_router_index_event "));
        assert_eq!((&view["term"], &view["event"], &view["events_behind"]), (&json!(2), &event, &json!(0)));
        assert_eq!(
            ["lost_total ", "term ", "unheard_ms ", "behind_events "]
                .map(|name| value(&registry, &format!("millpond_router_index_{name}"))),
            [1, 2, 0, 0]
        );
        (0..PROMPTS).for_each(|number| world.state.lock().store(number));
        world.sleep(1_000).await;
        assert_eq!(world.differences(&follower), (0, 0));
    });
}

#[test]
fn a_follower_slower_than_the_ring_takes_a_snapshot_instead_and_one_that_hears_nothing_asks_anew() {
    follow(64, |world, follower, registry| async move {
        world.sleep(1_500).await;
        world.pace.store(500, Ordering::Relaxed);
        for _ in 0..1_000 {
            world.state.lock().change();
            world.sleep(5).await;
        }
        world.sleep(2_500).await;
        assert_eq!(world.differences(&follower), (0, 0));
        let snapshots = value(&registry, "millpond_router_index_snapshots_total ");
        assert!((5..30).contains(&snapshots), "{snapshots}");
        // The stream stays open and says nothing.
        world.state.lock().is_mute = true;
        world.sleep(3_600).await;
        assert_eq!(follower.view()["why"], "it was silent for 3s");
        world.state.lock().is_mute = false;
        (0..20).for_each(|_| world.state.lock().change());
        world.sleep(5_000).await;
        assert_eq!((world.differences(&follower), &follower.view()["state"]), ((0, 0), &json!("current")));
    });
}

#[test]
fn what_was_expected_and_not_found_is_counted_and_a_node_whose_blocks_never_come_is_named() {
    follow(65_536, |world, follower, registry| async move {
        world.state.lock().store(0);
        world.sleep(1_500).await;
        let sought = follower.seek("", &prompt(0));
        follower.on_computed(0, &sought, 1);
        assert_eq!(value(&registry, "millpond_router_blocks_expected_total "), u64::from(BLOCKS));
        assert_eq!(value(&registry, "millpond_router_blocks_missing_total "), u64::from(BLOCKS - 1));
        for number in 10..20 {
            let sought = follower.seek("", &prompt(number));
            follower.on_computed(0, &sought, 0);
        }
        world.sleep(7_000).await;
        assert_eq!(value(&registry, "millpond_router_index_silent_nodes "), 1);
        assert_eq!(follower.view()["silent"], json!(["prefill-0"]));
    });
}

#[test]
fn each_of_these_tests_finds_the_bug_it_is_there_for() {
    let tests: [(Bug, fn()); 6] = [
        (
            Bug::FeedMissesGap,
            a_router_that_loses_events_while_store_nodes_restart_knows_what_is_there_after_a_quiet_moment,
        ),
        (Bug::FeedStaysBehind, a_store_node_that_restarts_is_forgotten_with_the_page_that_says_so),
        (Bug::FeedKeepsLeft, a_store_node_that_restarts_is_forgotten_with_the_page_that_says_so),
        (Bug::FollowerBelievesForGood, a_directory_that_restarts_is_followed_into_its_new_term),
        (
            Bug::FollowerWaitsForGood,
            a_follower_slower_than_the_ring_takes_a_snapshot_instead_and_one_that_hears_nothing_asks_anew,
        ),
        (
            Bug::FollowerHidesMissing,
            what_was_expected_and_not_found_is_counted_and_a_node_whose_blocks_never_come_is_named,
        ),
    ];
    for (bug, test) in tests {
        seeded::select(Some(bug));
        let outcome = std::panic::catch_unwind(test);
        seeded::select(None);
        assert!(outcome.is_err(), "{bug:?} was not found");
    }
}
