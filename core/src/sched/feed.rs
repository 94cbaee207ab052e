//! Keeps an [`Index`] up to date with a shard of the store's directory: its stream of events, and snapshots after a gap.
//!
//! The directory numbers all its events in one sequence and fences restarted owners itself, so the feed gives each node a
//! holder with one life, and numbers what concerns it. Who drives it asks for pages of events from [`Feed::position`] on;
//! after a gap it says [`Feed::begin`] with the nodes there are and asks the holdings of each that [`Feed::awaits`] names;
//! then the events go on. It is not a client: it sends nothing.
//!
//! Invariant: when no holdings are awaited, the index knows of every node what the directory said up to `position`.

use alloc::collections::{BTreeMap, BTreeSet};

use super::index::{Change, Event, Index, Outcome};
use crate::directory::{self, EventPage, Holdings, NodeId, Stamp};
use crate::prefix::{Holder, Key};
use crate::seeded::{Bug, on};

/// Blocks that a crowded index sweeps before it is asked again.
const SWEEP: u32 = 4_096;

/// Whether a page of events could be taken.
///
/// Example: [`Feed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fed {
    /// It was: go on at [`Feed::position`].
    Taken,
    /// Events are missing: look who is there, then call [`Feed::begin`].
    Gap,
}

/// What is known of the nodes of one shard. `parse` makes a block's name of an object's key; other objects are not blocks.
///
/// ```
/// use millpond_core::directory::{Commit, Config, Directory, Join, Key, Location, NodeId, Owner, SegmentFacts};
/// use millpond_core::hash::BlockName;
/// use millpond_core::sched::{feed::{Fed, Feed}, index::{Index, Limits}};
/// use millpond_core::time::Instant;
/// let now = Instant::ZERO;
/// let mut directory = Directory::new(now, Config::fresh(1));
/// let owner = Owner { node: NodeId([7; 16]), incarnation: 1 };
/// let segments = vec![SegmentFacts::dram(0, 1, 1 << 30)];
/// directory.on_join(now, Join { owner, address: "127.0.0.1:7000".into(), segments }).value.unwrap();
///
/// let mut index: Index<BlockName, 1> = Index::new(Limits { holders_max: 8, ..Limits::default() }, 7);
/// let mut feed = Feed::new(|key| BlockName::parse(core::str::from_utf8(key).ok()?.strip_prefix("kv/")?));
/// // It starts with a snapshot, like after a gap.
/// assert_eq!(feed.on_page(&mut index, &directory.events(feed.position(), 100).value), Fed::Gap);
/// feed.begin(&mut index, directory.position(), &[owner.node]);
/// while let Some((node, after)) = feed.awaits() {
///     feed.on_holdings(&mut index, node, &directory.holdings(node, b"kv/", after, 100).value);
/// }
/// let name = BlockName([3; 16]);
/// let at = Location { node: owner.node, segment: 0, epoch: 1, slot: 0, generation: 1 };
/// let key = format!("kv/{name}");
/// directory.on_commit(now, owner, &Commit::new(Key::new(key.as_bytes()).unwrap(), 5, at)).value.unwrap();
/// assert_eq!(feed.on_page(&mut index, &directory.events(feed.position(), 100).value), Fed::Taken);
/// let mut matches = index.new_matches();
/// index.matches(&[name], &mut matches);
/// assert_eq!(matches.len_of(feed.holder(owner.node).unwrap()), 1);
/// ```
#[derive(Clone, Debug)]
pub struct Feed<K> {
    parse: fn(&[u8]) -> Option<K>,
    nodes: BTreeMap<NodeId, Node>,
    awaited: BTreeSet<NodeId>,
    /// Where the pages of the first of them have come to.
    after: Option<directory::Place>,
    position: Stamp,
    nodes_refused: u64,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    holder: Holder,
    /// Its last event.
    number: u64,
}

/// The only life of a node's holder: the directory tells when what it held is gone.
const LIFE: u64 = 1;

impl<K: Key> Feed<K> {
    /// A feed that knows nothing yet: its first page is a gap.
    #[must_use]
    pub fn new(parse: fn(&[u8]) -> Option<K>) -> Self {
        let nodes = BTreeMap::new();
        Self { parse, nodes, awaited: BTreeSet::new(), after: None, position: Stamp::ZERO, nodes_refused: 0 }
    }

    /// Where the next page of events begins.
    #[must_use]
    pub fn position(&self) -> Stamp {
        self.position
    }

    /// The node's number in the index; `None` if it was never heard of.
    #[must_use]
    pub fn holder(&self, node: NodeId) -> Option<Holder> {
        self.nodes.get(&node).map(|node| node.holder)
    }

    /// Times that a node could not be given a number, for want of holders in the index.
    #[must_use]
    pub fn nodes_refused(&self) -> u64 {
        self.nodes_refused
    }

    /// The next page of events. Not to be called while holdings are awaited. The numbers of events have no gaps: where one
    /// is missing, at the beginning, in the middle or at the end of the page, nothing of the page is taken. O(events).
    pub fn on_page<const W: usize>(&mut self, index: &mut Index<K, W>, page: &EventPage) -> Fed {
        if page.gap || self.position == Stamp::ZERO || !self.awaited.is_empty() || !self.follows(page) {
            return Fed::Gap;
        }
        for event in &page.events {
            self.on_change(index, &event.change);
        }
        if !on(Bug::FeedStaysBehind) {
            self.position = page.next;
        }
        Fed::Taken
    }

    /// Whether the page goes on where the last one ended, and nothing is missing in it.
    fn follows(&self, page: &EventPage) -> bool {
        let mut last = self.position;
        let is_next = |event: &directory::Event| {
            last.n += 1;
            event.at == last
        };
        page.events.iter().all(is_next) && page.next == last || on(Bug::FeedMissesGap)
    }

    /// A snapshot begins: `nodes` are all that hold anything, `position` is the shard's last event before anybody's
    /// holdings are asked. What others held is forgotten.
    pub fn begin<const W: usize>(&mut self, index: &mut Index<K, W>, position: Stamp, nodes: &[NodeId]) {
        self.position = position;
        self.awaited = nodes.iter().copied().collect();
        self.after = None;
        let gone: BTreeSet<NodeId> = self.nodes.keys().filter(|node| !self.awaited.contains(node)).copied().collect();
        for node in gone {
            self.tell(index, node, Change::Cleared);
        }
    }

    /// Whose holdings to ask next, and from which place on; `None` if the snapshot is whole.
    #[must_use]
    pub fn awaits(&self) -> Option<(NodeId, Option<directory::Place>)> {
        self.awaited.first().map(|node| (*node, self.after))
    }

    /// A page of the holdings that [`Self::awaits`] named; one of any other node is ignored. O(keys).
    pub fn on_holdings<const W: usize>(&mut self, index: &mut Index<K, W>, node: NodeId, page: &Holdings) {
        if self.awaited.first() != Some(&node) {
            return;
        }
        let Some(Node { holder, number }) = self.enter(index, node) else {
            self.awaited.remove(&node);
            return;
        };
        if self.after.is_none() {
            // A sweep that is through leaves columns free: this is the only snapshot.
            while index.begin_snapshot(holder, LIFE, number) == Outcome::Crowded {
                index.sweep(SWEEP);
            }
        }
        for name in page.keys.iter().filter_map(|key| (self.parse)(key)) {
            index.on_snapshot(holder, LIFE, &[name]);
        }
        self.after = page.next;
        if page.next.is_none() {
            index.end_snapshot(holder, LIFE);
            self.awaited.remove(&node);
        }
    }

    fn on_change<const W: usize>(&mut self, index: &mut Index<K, W>, change: &directory::Change) {
        match change {
            directory::Change::Stored { key, location, .. } => {
                if let Some(name) = (self.parse)(key) {
                    self.tell(index, location.node, Change::Stored(&[name]));
                }
            }
            // Another copy at the same node serves as well.
            directory::Change::Removed { key, location, left_there: 0, .. } => {
                if let Some(name) = (self.parse)(key) {
                    self.tell(index, location.node, Change::Removed(&[name]));
                }
            }
            directory::Change::Removed { .. } => {}
            directory::Change::Left { .. } if on(Bug::FeedKeepsLeft) => {}
            directory::Change::Left { owner, .. } => self.tell(index, owner.node, Change::Cleared),
            directory::Change::Cleared => {
                let nodes: BTreeSet<NodeId> = self.nodes.keys().copied().collect();
                nodes.into_iter().for_each(|node| self.tell(index, node, Change::Cleared));
            }
        }
    }

    fn tell<const W: usize>(&mut self, index: &mut Index<K, W>, node: NodeId, change: Change<'_, K>) {
        if self.enter(index, node).is_none() {
            return;
        }
        if let Some(Node { holder, number }) = self.nodes.get_mut(&node) {
            *number += 1;
            index.on_event(&Event { holder: *holder, life: LIFE, number: *number, change });
        }
    }

    /// The node with its number; a new one gets the next number, or that of a node that holds nothing any more.
    fn enter<const W: usize>(&mut self, index: &Index<K, W>, node: NodeId) -> Option<Node> {
        if let Some(known) = self.nodes.get(&node) {
            return Some(*known);
        }
        let next = u16::try_from(self.nodes.len()).ok().map(Holder);
        let fresh = next.filter(|&holder| index.view(holder).is_some()).map(|holder| Node { holder, number: 0 });
        let entered = fresh.or_else(|| {
            let holds_nothing = |known: &Node| index.view(known.holder).is_some_and(|view| view.blocks == 0);
            let (left, known) = self.nodes.iter().find(|(_, known)| holds_nothing(known))?;
            let (left, known) = (*left, *known);
            self.nodes.remove(&left);
            Some(known)
        });
        match entered {
            Some(known) => self.nodes.insert(node, known),
            None => {
                self.nodes_refused += 1;
                return None;
            }
        };
        entered
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::String;
    use alloc::vec;
    use alloc::vec::Vec;

    use super::super::index::Limits;
    use super::*;
    use crate::directory::{
        Commit, Config, Directory, Inventory, Join, Key as ObjectKey, Leases, Location, Mode, Owner, Part, SegmentFacts,
    };
    use crate::hash::RouteHash;
    use crate::random::Random;
    use crate::time::Instant;

    const NODES: u8 = 4;
    const KEYS: u64 = 24;
    const NOW: Instant = Instant::ZERO;

    /// A directory, what feeds on it, and a small generator with a fixed seed.
    struct World {
        directory: Directory,
        incarnations: [u64; NODES as usize],
        generation: u32,
        feed: Feed<RouteHash>,
        index: Index<RouteHash, 1>,
        random: Random,
    }

    fn parse(key: &[u8]) -> Option<RouteHash> {
        core::str::from_utf8(key).ok()?.strip_prefix("kv/")?.parse().ok().map(RouteHash)
    }

    fn name(number: u64) -> String {
        format!("kv/{number}")
    }

    impl World {
        fn new(seed: u64) -> Self {
            let limits = directory::Limits { events_max: 40, page_max: 7, ..directory::Limits::default() };
            let limits_of_index = Limits { holders_max: 8, spares: 2, blocks_max: 64, sets_max: 64 };
            let mut world = Self {
                directory: Directory::new(NOW, Config { limits, ..Config::fresh(1) }),
                incarnations: [0; NODES as usize],
                generation: 0,
                feed: Feed::new(parse),
                index: Index::new(limits_of_index, 7),
                random: Random::new(seed),
            };
            (0..NODES).for_each(|node| world.join(node));
            world
        }

        fn owner(&self, node: u8) -> Owner {
            Owner { node: NodeId([node + 1; 16]), incarnation: self.incarnations[usize::from(node)] }
        }

        /// The node starts, without anything.
        fn join(&mut self, node: u8) {
            self.incarnations[usize::from(node)] += 1;
            let owner = self.owner(node);
            let facts = |index| SegmentFacts::dram(index, owner.incarnation, 1 << 20);
            let join = Join { owner, address: "h:1".into(), segments: vec![facts(0), facts(1)] };
            self.directory.on_join(NOW, join).value.unwrap();
            for segment in 0..2 {
                let inventory = Inventory { segment, epoch: owner.incarnation, entries: &[], part: Part::Last };
                self.directory.on_inventory(NOW, owner, inventory).value.unwrap();
            }
        }

        fn change(&mut self) {
            let (key, node) =
                (name(self.random.below(KEYS)), u8::try_from(self.random.below(u64::from(NODES))).unwrap());
            let key = ObjectKey::new(key.as_bytes()).unwrap();
            match self.random.below(40) {
                0 => self.join(node),
                1 => {
                    let owner = self.owner(node);
                    self.directory.on_death(NOW, owner);
                    self.join(node);
                }
                2 if self.random.below(8) == 0 => {
                    self.directory.on_clear(NOW);
                }
                2..12 => {
                    self.directory.on_remove(NOW, key, Leases::Override);
                }
                _ => self.commit(key, node),
            }
        }

        fn commit(&mut self, key: ObjectKey<'_>, node: u8) {
            let owner = self.owner(node);
            let slot = u32::try_from(self.random.below(12)).unwrap();
            let segment = u32::try_from(self.random.below(2)).unwrap();
            self.generation += 1;
            let location =
                Location { node: owner.node, segment, epoch: owner.incarnation, slot, generation: self.generation };
            let visible = self.directory.stat(NOW, key).value.ok().map(|stat| stat.version);
            let mode = match (visible, self.random.below(8)) {
                (_, 0) => Mode::Upsert,
                (Some(version), _) => Mode::Replica { version },
                (None, _) => Mode::IfAbsent,
            };
            // Refused when the slot held the very object that was to be copied.
            let commit = Commit { mode, ..Commit::new(key, 5, location) };
            let _ = self.directory.on_commit(NOW, owner, &commit);
        }

        /// One message between the two; whether there was anything to say.
        fn feed(&mut self) -> bool {
            if let Some((node, after)) = self.feed.awaits() {
                let page = self.directory.holdings(node, b"kv/", after, 5).value;
                self.feed.on_holdings(&mut self.index, node, &page);
                return true;
            }
            let page = self.directory.events(self.feed.position(), 6).value;
            if self.feed.on_page(&mut self.index, &page) == Fed::Gap {
                let nodes: Vec<NodeId> =
                    self.directory.view(NOW).value.into_iter().map(|view| view.owner.node).collect();
                self.feed.begin(&mut self.index, page.next, &nodes);
                return true;
            }
            !page.events.is_empty()
        }

        /// The first node and block of which the two say different things.
        fn difference(&self) -> Option<(u8, u64)> {
            let mut found = self.index.new_matches();
            let pairs = (0..NODES).flat_map(|node| (0..KEYS).map(move |key| (node, key)));
            pairs.into_iter().find(|&(node, key)| {
                let node = NodeId([node + 1; 16]);
                self.index.matches(&[RouteHash(key)], &mut found);
                let known = self.feed.holder(node).map_or(0, |holder| found.len_of(holder)) > 0;
                let text = name(key);
                let stat = self.directory.stat(NOW, ObjectKey::new(text.as_bytes()).unwrap()).value;
                let held = stat.is_ok_and(|stat| stat.replicas.iter().any(|(replica, _)| replica.node == node));
                known != held
            })
        }
    }

    #[test]
    fn a_feed_and_a_directory_agree_whatever_happens() {
        let (mut lagging, mut gaps) = (0, 0);
        for seed in 1..40 {
            let mut world = World::new(seed);
            for _ in 0..400 {
                // At times so much happens that a part of it is not heard.
                let changes = if world.random.below(30) == 0 { 60 } else { world.random.below(3) };
                (0..changes).for_each(|_| world.change());
                let awaited = world.feed.awaits().is_some();
                world.feed();
                gaps += u32::from(!awaited && world.feed.awaits().is_some());
                lagging += u32::from(world.difference().is_some());
            }
            while world.feed() {}
            assert_eq!(world.difference(), None, "seed {seed}");
        }
        assert!(gaps > 100 && lagging > 100, "{gaps} gaps, {lagging} times behind: the check proves little");
    }

    #[test]
    fn an_event_that_is_missing_anywhere_in_a_page_is_noticed() {
        let mut index: Index<RouteHash, 1> = Index::new(Limits { holders_max: 8, ..Limits::default() }, 7);
        let mut feed: Feed<RouteHash> = Feed::new(parse);
        let at = |n| Stamp { term: 1, n };
        feed.begin(&mut index, at(4), &[]);
        let events = |numbers: &[u64]| {
            let event = |&n| directory::Event { at: at(n), change: directory::Change::Cleared };
            numbers.iter().map(event).collect::<Vec<_>>()
        };
        let mut page = |numbers: &[u64], next| {
            feed.on_page(&mut index, &EventPage { events: events(numbers), next: at(next), gap: false })
        };
        for (numbers, next) in [(&[6, 7][..], 7), (&[5, 7], 7), (&[5, 6], 7), (&[], 5)] {
            assert_eq!(page(numbers, next), Fed::Gap, "{numbers:?} up to {next}");
        }
        assert_eq!((page(&[5, 6], 6), page(&[], 6)), (Fed::Taken, Fed::Taken));
    }

    #[test]
    fn a_node_past_the_limit_takes_the_number_of_one_that_holds_nothing() {
        let mut index: Index<RouteHash, 1> = Index::new(Limits { holders_max: 1, ..Limits::default() }, 7);
        let mut feed: Feed<RouteHash> = Feed::new(parse);
        let [first, second] = [NodeId([1; 16]), NodeId([2; 16])];
        feed.begin(&mut index, Stamp { term: 1, n: 1 }, &[first, second]);
        let page = |keys: &[&str]| Holdings {
            owner: None,
            keys: keys.iter().map(|key| key.as_bytes().into()).collect(),
            next: None,
            position: Stamp { term: 1, n: 1 },
        };
        feed.on_holdings(&mut index, first, &page(&["kv/1"]));
        feed.on_holdings(&mut index, second, &page(&["kv/1"]));
        assert_eq!((feed.holder(first), feed.holder(second), feed.nodes_refused()), (Some(Holder(0)), None, 1));
        feed.begin(&mut index, Stamp { term: 1, n: 2 }, &[second]);
        feed.on_holdings(&mut index, second, &page(&["kv/2"]));
        assert_eq!((feed.holder(first), feed.holder(second)), (None, Some(Holder(0))));
        let mut found = index.new_matches();
        index.matches(&[RouteHash(1)], &mut found);
        assert_eq!(found.longest(), 0);
    }
}
