//! What the store has, as a router knows it: the directory's numbered events, kept in an index of the cluster's blocks.
//!
//! One task follows the directory: it takes a snapshot of what each store node holds, then the events from there on, in
//! their order. A page in which a number is missing, a gap that the directory tells of, a new term of the directory: each is
//! followed by another snapshot, during which what was known before is still known. A directory that gives no sign of life
//! is asked anew, with growing pauses; what was known is believed for [`KEEP`] more and then nothing is: without its
//! directory nobody loads anything from the store.
//!
//! It does not say where a block lies: any prefill node loads any block of the store. It chooses no bytes, so an index that
//! is wrong costs time and nothing else; how far it is wrong is counted, by what prefill nodes found of what was expected.

mod silent;
mod source;

#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::sync::Arc;

use futures::stream::StreamExt;
use millpond_core::directory::{EventPage, Stamp};
use millpond_core::hash::{BlockName, Namer};
use millpond_core::prefix::Holder;
use millpond_core::sched::conductor::Stored;
use millpond_core::sched::feed::{Fed, Feed};
use millpond_core::sched::index::{Index, Knowledge, Limits};
use millpond_core::seeded::{self, Bug};
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::silent::Silent;
pub(super) use self::source::{Linked, Source};
use super::link::Timers;
use crate::metrics::{Counter, Gauge, Registry};

/// Words of a set of store nodes.
const WORDS: usize = 4;
/// Store nodes that can be told apart.
const NODES_MAX: u16 = 224;
/// Blocks that can be known.
const BLOCKS_MAX: u32 = 1 << 20;
/// A directory that says nothing for so long is asked anew; it gives a sign of life every second.
pub(super) const SILENCE: Duration = Duration::from_secs(3);
/// How long what was known is believed after the last sign of life.
pub(super) const KEEP: Duration = Duration::from_secs(5);
/// Bounds of the pause before the directory is asked anew; it doubles from one to the other.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What a router knows of the store. Clones are handles of the same.
#[derive(Clone)]
pub(super) struct Follower {
    inner: Arc<Inner>,
}

struct Inner {
    source: Arc<dyn Source>,
    namer: Box<dyn Fn(&str) -> Namer + Send + Sync>,
    /// Tokens of a block.
    block_len: usize,
    timers: Timers,
    begun: Instant,
    known: Mutex<Known>,
    meters: Meters,
}

/// Blocks that nodes hold, each as often as it is held. What nobody holds stays in the index until its place is needed.
fn held(index: &Index<BlockName, WORDS>) -> u64 {
    let views = (0..NODES_MAX).filter_map(|holder| index.view(Holder(holder)));
    views.filter(|view| view.knowledge != Knowledge::Gone).map(|view| u64::from(view.blocks)).sum()
}

struct Known {
    feed: Feed<BlockName>,
    index: Index<BlockName, WORDS>,
    state: State,
    /// The last sign of life.
    heard: Option<Instant>,
    /// The last event that the directory told of.
    told: Stamp,
    /// When all that it told of was known last, and what that was.
    current: Option<(Instant, Stamp)>,
    silent: Silent,
}

impl Known {
    /// Events that the directory told of and that are not known; after a change of its term, all of the new one.
    fn behind(&self) -> u64 {
        let known = self.current.filter(|(_, known)| known.term == self.told.term);
        self.told.n.saturating_sub(known.map_or(0, |(_, known)| known.n))
    }
}

/// Where the follower is with the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// It takes a snapshot.
    Snapshot,
    /// All events up to the last sign of life are known.
    Current,
    /// The directory is not heard.
    Lost { why: String },
}

struct Meters {
    events: Counter,
    snapshots: Counter,
    lost: Counter,
    current: Gauge,
    blocks: Gauge,
    nodes: Gauge,
    silent: Gauge,
    term: Gauge,
    event: Gauge,
    behind: Gauge,
    unheard: Gauge,
    expected: Counter,
    missing: Counter,
}

impl Meters {
    fn new(registry: &Registry) -> Self {
        let counter = |name, help| registry.counter(name, help, &[]);
        let gauge = |name, help| registry.gauge(name, help, &[]);
        Self {
            events: counter("millpond_router_index_events_total", "Events of the directory that were taken."),
            snapshots: counter(
                "millpond_router_index_snapshots_total",
                "Snapshots: the first, and one after each gap.",
            ),
            lost: counter("millpond_router_index_lost_total", "Times that the directory was not heard any more."),
            current: gauge("millpond_router_index_current", "1 while all events of the directory are known."),
            blocks: gauge("millpond_router_index_blocks", "Blocks of KV that the store is known to have."),
            nodes: gauge("millpond_router_index_nodes", "Store nodes that hold blocks."),
            silent: gauge(
                "millpond_router_index_silent_nodes",
                "Serving nodes none of whose blocks came to the store.",
            ),
            term: gauge("millpond_router_index_term", "The directory's term that is followed."),
            event: gauge("millpond_router_index_event", "The number of its last event that is known."),
            behind: gauge("millpond_router_index_behind_events", "Events that it told of and that are not known."),
            unheard: gauge(
                "millpond_router_index_unheard_ms",
                "How long the directory has given no sign of life; updated whenever it is asked anew.",
            ),
            expected: counter(
                "millpond_router_blocks_expected_total",
                "Blocks that prefill nodes were expected to load.",
            ),
            missing: counter("millpond_router_blocks_missing_total", "Those of them that were not there."),
        }
    }
}

/// The name of a block of KV by the key of its object; other objects of the store are none.
fn block_of(key: &[u8]) -> Option<BlockName> {
    BlockName::parse(std::str::from_utf8(key).ok()?.strip_prefix("kv/")?)
}

/// What is known of a prompt when it is placed.
pub(super) struct Sought {
    pub(super) stored: Stored,
    /// The name of its first block, if it has a whole one.
    pub(super) first: Option<BlockName>,
}

impl Follower {
    /// Follows `source`, which tells of blocks of `block_len` tokens named by the tenant's namer. Run [`Self::run`] beside
    /// it; `serving` are the nodes that are expected to store what they compute.
    pub(super) fn new(
        source: Arc<dyn Source>,
        namer: Box<dyn Fn(&str) -> Namer + Send + Sync>,
        block_len: usize,
        serving: Vec<String>,
        timers: Timers,
        registry: &Registry,
    ) -> Self {
        let limits =
            Limits { holders_max: NODES_MAX, blocks_max: BLOCKS_MAX, sets_max: BLOCKS_MAX / 16, ..Limits::default() };
        // Whoever chooses prompts does not choose names: those are keyed.
        let known = Known {
            feed: Feed::new(block_of),
            index: Index::new(limits, 0x6d69_6c6c_706f_6e64),
            state: State::Lost { why: "it was not asked yet".into() },
            heard: None,
            told: Stamp::ZERO,
            current: None,
            silent: Silent::new(serving),
        };
        let meters = Meters::new(registry);
        let begun = timers.now();
        Self { inner: Arc::new(Inner { source, namer, block_len, timers, begun, known: Mutex::new(known), meters }) }
    }

    /// How much of a prompt of `tenant` the store has.
    pub(super) fn seek(&self, tenant: &str, tokens: &[u32]) -> Sought {
        let inner = &*self.inner;
        let names: Vec<BlockName> = (inner.namer)(tenant).chain(tokens, inner.block_len).collect();
        let known = inner.known.lock();
        let is_believed = known.heard.is_some_and(|heard| inner.timers.now().since(heard) <= KEEP)
            || seeded::on(Bug::FollowerBelievesForGood);
        // A prefill computes at least the last token.
        let most = tokens.len().saturating_sub(1) / inner.block_len.max(1);
        let blocks = if is_believed { known.index.pooled(&names[..most.min(names.len())]) } else { 0 };
        let stored = Stored { blocks, version: known.feed.position().n };
        Sought { stored, first: names.first().copied() }
    }

    /// A prompt was computed by serving node `at`, which loaded `found` of the `expected` blocks.
    pub(super) fn on_computed(&self, at: usize, sought: &Sought, found: u32) {
        let inner = &*self.inner;
        inner.meters.expected.add(sought.stored.blocks.into());
        if !seeded::on(Bug::FollowerHidesMissing) {
            inner.meters.missing.add(sought.stored.blocks.saturating_sub(found).into());
        }
        if let Some(first) = sought.first {
            inner.known.lock().silent.on_computed(inner.timers.now(), at, first);
        }
    }

    /// What is known and how well, for people and programs.
    pub(super) fn view(&self) -> Value {
        let (inner, known) = (&*self.inner, self.inner.known.lock());
        let (position, now) = (known.feed.position(), inner.timers.now());
        let ago = |then: Option<Instant>| then.map(|then| now.since(then).as_millis());
        let (state, why) = match &known.state {
            State::Snapshot => ("snapshot", None),
            State::Current => ("current", None),
            State::Lost { why } => ("lost", Some(why)),
        };
        json!({
            "state": state, "why": why, "term": position.term, "event": position.n,
            "heard_ms_ago": ago(known.heard),
            "current_ms_ago": ago(known.current.map(|(then, _)| then)), "events_behind": known.behind(),
            "blocks": held(&known.index), "snapshots": inner.meters.snapshots.value(),
            "lost": inner.meters.lost.value(),
            "nodes": inner.meters.nodes.value(), "nodes_without_a_place": known.feed.nodes_refused(),
            "blocks_expected": inner.meters.expected.value(), "blocks_missing": inner.meters.missing.value(),
            "silent": known.silent.names(),
        })
    }

    /// Follows the directory; never ends.
    pub(super) async fn run(&self) {
        let inner = &*self.inner;
        let mut pause = PAUSE_MIN;
        loop {
            let begun = inner.timers.now();
            let Err(why) = self.follow().await;
            if self.on_lost(why).is_some_and(|heard| heard >= begun) {
                pause = PAUSE_MIN;
            }
            (inner.timers.sleep)(pause).await;
            pause = pause.saturating_mul(2).min(PAUSE_MAX);
        }
    }

    /// The directory is not heard any more; when it was last.
    fn on_lost(&self, why: String) -> Option<Instant> {
        let (inner, mut known) = (&*self.inner, self.inner.known.lock());
        if !matches!(known.state, State::Lost { .. }) {
            tracing::warn!(why, "router: the directory is not heard any more");
            inner.meters.lost.add(1);
        }
        known.state = State::Lost { why };
        inner.meters.current.set(0);
        inner.meters.unheard.set(inner.timers.now().since(known.heard.unwrap_or(inner.begun)).as_millis());
        known.heard
    }

    /// Follows the directory until that fails; why it did.
    async fn follow(&self) -> Result<Infallible, String> {
        let inner = &*self.inner;
        let position = inner.known.lock().feed.position();
        let (mut pages, mut count) = (inner.source.changes(position), 0_u64);
        loop {
            let silence = if seeded::on(Bug::FollowerWaitsForGood) { Duration::from_secs(1 << 30) } else { SILENCE };
            let next = inner.timers.by(inner.timers.now() + silence, pages.next()).await;
            match next.ok_or_else(|| format!("it was silent for {SILENCE}"))? {
                Some(page) => {
                    let page = page?;
                    count += 1;
                    if self.on_page(&page) == Fed::Gap {
                        self.snapshot(&page).await?;
                    }
                }
                // Its time was up.
                None if count > 0 => {
                    let position = inner.known.lock().feed.position();
                    (pages, count) = (inner.source.changes(position), 0);
                }
                None => return Err("its stream of changes ended at once".into()),
            }
        }
    }

    fn on_page(&self, page: &EventPage) -> Fed {
        let (inner, mut known) = (&*self.inner, self.inner.known.lock());
        let known = &mut *known;
        (known.heard, known.told) = (Some(inner.timers.now()), page.next);
        let fed = known.feed.on_page(&mut known.index, page);
        inner.meters.behind.set(known.behind());
        inner.meters.unheard.set(0);
        if fed == Fed::Taken {
            inner.meters.events.add(page.events.len() as u64);
            self.on_current(known);
        }
        fed
    }

    /// All that the directory said is known now.
    fn on_current(&self, known: &mut Known) {
        let (inner, now) = (&*self.inner, self.inner.timers.now());
        if known.state != State::Current {
            tracing::info!(blocks = held(&known.index), "router: the store's blocks are known");
        }
        let position = known.feed.position();
        (known.state, known.current) = (State::Current, Some((now, position)));
        inner.meters.term.set(position.term);
        inner.meters.event.set(position.n);
        inner.meters.behind.set(known.behind());
        let index = &known.index;
        known.silent.look(now, |name| index.pooled(&[name]) > 0);
        inner.meters.current.set(1);
        inner.meters.blocks.set(held(&known.index));
        inner.meters.silent.set(known.silent.names().len() as u64);
    }

    /// Replaces what is known by what each store node holds; events go on behind `page`.
    async fn snapshot(&self, page: &EventPage) -> Result<(), String> {
        let inner = &*self.inner;
        inner.meters.snapshots.add(1);
        inner.known.lock().state = State::Snapshot;
        inner.meters.current.set(0);
        let nodes = inner.source.nodes().await?;
        {
            let mut known = inner.known.lock();
            let Known { feed, index, .. } = &mut *known;
            feed.begin(index, page.next, &nodes);
        }
        inner.meters.nodes.set(nodes.len() as u64);
        // Ends: each page goes on behind the one before it.
        loop {
            let awaited = inner.known.lock().feed.awaits();
            let Some((node, after)) = awaited else { break };
            let holdings = inner.source.holdings(node, after).await?;
            let mut known = inner.known.lock();
            let Known { feed, index, heard, .. } = &mut *known;
            *heard = Some(inner.timers.now());
            feed.on_holdings(index, node, &holdings);
        }
        self.on_current(&mut inner.known.lock());
        Ok(())
    }
}
