//! Where a router decides: its conductor, what the conductor is told, and the log of that.
//!
//! Whoever was admitted holds an [`Admitted`]; dropping it gives back everything the request holds in the conductor's books.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millpond_core::hash::RouteHash;
use millpond_core::layout::Layout;
use millpond_core::sched::admission::{self, Reason, Slo, Verdict};
use millpond_core::sched::colocate;
use millpond_core::sched::conductor::{Arrival, Conductor, Decision, Learning, Setup, Stored};
use millpond_core::sched::cost::Profile;
use millpond_core::sched::placement;
use millpond_core::sched::queue::Order;
use millpond_core::sched::record::Record;
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::decisions::{Arrived, Input, Writer, measured};
use super::keys::ApiKeys;
use super::link::Timers;

/// Blocks that prefill nodes are believed to keep, all together, and each at most.
const BLOCKS_MAX: u32 = 1 << 20;
const NODE_BLOCKS_MAX: u32 = 1 << 17;
const NODE_BLOCKS_MIN: u32 = 1 << 12;

/// How a router decides.
///
/// ```
/// use millpond_core::sched::{admission, placement};
/// let scheduling = millpond_node::router::Scheduling::default();
/// assert_eq!(scheduling.placement.policy, placement::Policy::Millpond);
/// assert_eq!(scheduling.admission.policy, admission::Policy::Millpond);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Scheduling {
    /// Who serves a request.
    pub placement: placement::Options,
    /// Whether it is served.
    pub admission: admission::Options,
    /// Deadlines of requests that name none.
    pub slo: Slo,
    /// What nodes cost. `None`: the default profile with the model's blocks.
    pub profile: Option<Profile>,
    /// Whether that is refined by what is measured.
    pub learning: Learning,
    /// Who may use the router, and their shares.
    pub keys: ApiKeys,
    /// In which order prefill nodes serve what they are sent.
    pub order: Order,
    /// The decision log; one that was there is replaced.
    pub decisions: Option<PathBuf>,
    /// Whose turn is first among nodes that cost the same; routers over the same nodes begin with different ones.
    pub first_turn: u64,
}

impl Default for Scheduling {
    /// `millpond`'s policies. Without a word from the client a first token may take two minutes, and ten seconds may pass
    /// between tokens: only what is hopeless also on a machine without accelerators is refused.
    fn default() -> Self {
        Self {
            placement: placement::Options::default(),
            admission: admission::Options::default(),
            slo: Slo { ttft: Duration::from_secs(120), tbt: Duration::from_secs(10) },
            profile: None,
            learning: Learning::On,
            keys: ApiKeys::default(),
            order: Order::Fifo,
            decisions: None,
            first_turn: 0,
        }
    }
}

impl Scheduling {
    /// What nodes of a model cost before anything was measured: the default profile with the model's blocks.
    pub(crate) fn first_profile(layout: &Layout) -> Profile {
        let mut profile = Profile::default();
        profile.block_tokens = layout.shape().block_tokens;
        profile.kv_bytes_per_token = layout.token_len();
        // A decode node that is out of pages pauses requests: it is never full.
        profile.decode_tokens_max = u64::MAX >> 1;
        profile
    }

    fn setup(&self, layout: &Layout, nodes: NodeCounts) -> Setup {
        let NodeCounts { prefill, decode, has_store } = nodes;
        let mut setup = Setup::new(prefill, decode);
        (setup.placement, setup.admission, setup.order) = (self.placement, self.admission, self.order);
        (setup.first_turn, setup.learning, setup.tenants) = (self.first_turn, self.learning, self.keys.weights());
        match self.profile {
            Some(profile) => (setup.profile, setup.cache_blocks) = (profile, profile.cache_blocks),
            None => {
                setup.profile = Self::first_profile(layout);
                let nodes = u32::try_from(prefill.max(decode)).unwrap_or(u32::MAX);
                setup.cache_blocks = (BLOCKS_MAX / nodes.max(1)).clamp(NODE_BLOCKS_MIN, NODE_BLOCKS_MAX);
            }
        }
        if has_store {
            // What the store has is known, nothing is believed of nodes.
            setup.cache_blocks = 1;
        }
        setup
    }
}

/// What a router decides about.
#[derive(Clone, Copy)]
pub(super) struct NodeCounts {
    pub(super) prefill: usize,
    pub(super) decode: usize,
    /// Whether it follows a store: then each request says what that has.
    pub(super) has_store: bool,
}

/// The desk. Clones are handles of the same one.
#[derive(Clone)]
pub(super) struct Desk {
    inner: Arc<Inner>,
}

struct Inner {
    books: Mutex<Books>,
    /// Steps of each decode node, as far as its answers tell.
    steps: Vec<AtomicU64>,
    timers: Timers,
    slo: Slo,
}

struct Books {
    conductor: Conductor,
    log: Option<Writer>,
    next_id: u64,
}

/// A request as the router has it.
pub(super) struct Asked<'a> {
    /// The client's name for it.
    pub(super) name: &'a str,
    pub(super) tokens: u32,
    pub(super) blocks: &'a [RouteHash],
    /// Whom it is for, as a number.
    pub(super) tenant: u32,
    /// What the store has of them, if one is followed.
    pub(super) stored: Option<Stored>,
    pub(super) slo: Slo,
    pub(super) priority: u8,
    pub(super) is_retry: bool,
    pub(super) prefill_down: Vec<u32>,
    pub(super) decode_down: Vec<u32>,
}

/// A refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) reason: Reason,
    pub(super) retry_after: Duration,
    /// Predicted.
    pub(super) ttft: Duration,
    pub(super) tbt: Duration,
}

impl Desk {
    /// # Errors
    /// The decision log cannot be written.
    pub(super) fn new(
        scheduling: &Scheduling,
        layout: &Layout,
        nodes: NodeCounts,
        timers: Timers,
    ) -> std::io::Result<Self> {
        let setup = scheduling.setup(layout, nodes);
        let log = scheduling.decisions.as_deref().map(|path| Writer::create(path, &setup)).transpose()?;
        let books = Books { conductor: Conductor::new(setup), log, next_id: 0 };
        let steps = (0..nodes.decode).map(|_| AtomicU64::new(0)).collect();
        let slo = scheduling.slo;
        Ok(Self { inner: Arc::new(Inner { books: Mutex::new(books), steps, timers, slo }) })
    }

    /// Deadlines of requests that name none.
    pub(super) fn slo(&self) -> Slo {
        self.inner.slo
    }

    /// Decides about a request; what the decision rests on, for its record.
    pub(super) fn decide(&self, asked: &Asked<'_>) -> (Result<Admitted, Refused>, Value) {
        let steps = self.inner.steps.iter().map(|steps| steps.load(Ordering::Relaxed)).collect();
        let mut books = self.inner.books.lock();
        let now = self.inner.timers.now();
        let id = books.next_id;
        books.next_id += 1;
        let arrival = Arrival {
            id,
            name: named(asked.name),
            tokens: asked.tokens,
            tenant: asked.tenant,
            blocks: asked.blocks.to_vec(),
            stored: asked.stored,
            hint: None,
            slo: asked.slo,
            priority: asked.priority,
            is_retry: asked.is_retry,
            prefill_down: asked.prefill_down.clone(),
            decode_down: asked.decode_down.clone(),
            steps,
        };
        let decision = books.conductor.on_arrival(now, &arrival);
        let hash = books.conductor.hash();
        if let Some(log) = &mut books.log {
            log.write(now, Input::Arrived(Arrived::new(&arrival, hash)));
        }
        let explained = explained(books.conductor.record(), &decision, hash);
        let answer = match decision.verdict {
            Verdict::Admit => {
                let desk = self.clone();
                Ok(Admitted { desk, id, name: arrival.name, decision, joined: None, is_over: false })
            }
            Verdict::Refuse { reason, retry_after } => {
                let [ttft, tbt] = [decision.ttft.expected, decision.tbt].map(span);
                Err(Refused { reason, retry_after, ttft, tbt })
            }
        };
        (answer, explained)
    }

    /// A prefill node was restarted or lost what it had.
    pub(super) fn cleared(&self, prefill: u32) {
        self.tell(|conductor, _| conductor.on_cleared(prefill), Input::Cleared { prefill });
    }

    /// How many requests wait for or run at each prefill node, and at each decode node.
    pub(super) fn loads(&self) -> (Vec<usize>, Vec<u32>) {
        let books = self.inner.books.lock();
        let decode = (0..).zip(&self.inner.steps).map(|(at, _)| books.conductor.batch(at).batch).collect();
        (books.conductor.lines().collect(), decode)
    }

    /// Decisions so far, and the hash over all of them.
    pub(super) fn decided(&self) -> (u64, u64) {
        let books = self.inner.books.lock();
        (books.conductor.count(), books.conductor.hash())
    }

    /// What became of the log, if there is one.
    pub(super) fn log(&self) -> Option<Value> {
        self.inner.books.lock().log.as_ref().map(Writer::view)
    }

    /// Ends the log: what is told from now on is not in it.
    pub(super) fn end_log(&self) {
        let log = self.inner.books.lock().log.take();
        drop(log);
    }

    fn tell<T>(&self, what: impl FnOnce(&mut Conductor, Instant) -> T, input: Input) -> T {
        let mut books = self.inner.books.lock();
        let now = self.inner.timers.now();
        if let Some(log) = &mut books.log {
            log.write(now, input);
        }
        what(&mut books.conductor, now)
    }
}

/// A request's places in the books.
pub(super) struct Admitted {
    desk: Desk,
    id: u64,
    name: u64,
    pub(super) decision: Decision,
    /// The steps its decode node had done.
    joined: Option<u64>,
    is_over: bool,
}

impl Admitted {
    fn steps(&self) -> &AtomicU64 {
        &self.desk.inner.steps[self.decision.decode as usize]
    }

    /// The prompt is computed, of which `reused` tokens were there, in so many nanoseconds (0: not told).
    pub(super) fn prefilled(&self, tokens: u32, reused: u32, nanos: u64) {
        let prefix = reused.min(tokens.saturating_sub(1));
        let taken = (nanos > 0).then_some((nanos, tokens - prefix, prefix));
        let (id, input) = (self.id, Input::Prefilled { id: self.id, measured: taken });
        self.desk.tell(|conductor, now| conductor.on_prefilled(now, id, taken.map(measured)), input);
    }

    /// It joined its batch: its first token is out.
    pub(super) fn joined(&mut self) {
        let (id, steps) = (self.id, self.steps().load(Ordering::Relaxed));
        self.joined = Some(steps);
        self.desk.tell(|conductor, now| conductor.on_joined(now, id, steps), Input::Joined { id, steps });
    }

    /// It has so many tokens by now; all but the first took a step each.
    pub(super) fn tokens(&self, count: u64) {
        if let Some(joined) = self.joined {
            self.steps().fetch_max(joined + count.saturating_sub(1), Ordering::Relaxed);
        }
    }

    /// What its priority comes to: who was promised a place, or asks for no more than a fair share, goes before others.
    pub(super) fn priority(&self, asked: u8) -> u8 {
        let Decision { was_promised, is_favoured, .. } = self.decision;
        asked.saturating_add(was_promised.into()).saturating_add(is_favoured.into())
    }

    /// Predicted time to the first token.
    pub(super) fn ttft(&self) -> Duration {
        span(self.decision.ttft.expected)
    }

    /// Predicted time between tokens.
    pub(super) fn tbt(&self) -> Duration {
        span(self.decision.tbt)
    }

    /// The answer is whole, after so many tokens.
    pub(super) fn ended(mut self, tokens: u32) {
        self.is_over = true;
        self.left(Some(tokens));
    }

    /// Its decode node refuses it after all; when to come back.
    pub(super) fn late(mut self) -> Duration {
        self.is_over = true;
        let (id, name) = (self.id, self.name);
        self.desk.tell(|conductor, now| conductor.on_late(now, id, name), Input::Late { id, name })
    }

    fn left(&self, tokens: Option<u32>) {
        let id = self.id;
        self.desk.tell(|conductor, now| conductor.on_left(now, id, tokens), Input::Left { id, tokens });
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if !self.is_over {
            self.left(None);
        }
    }
}

/// Names are compared by their hashes: a collision passes on a promised place. The same name has the same one in every log.
pub(super) fn named(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
fn span(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9) as u64)
}

fn millis(span: Duration) -> f64 {
    span.as_micros() as f64 / 1e3
}

/// Whether the decode node computes the prompt, with the figures that decided; `apart_ms` and `colocated_ms` are times to the first
/// token, scores count the milliseconds by which others are pushed back.
fn colocation(choice: &colocate::Choice) -> Value {
    let colocate::Choice { side, reason, hop, apart, prefill, colocated, scores } = choice;
    let [apart_score, colocated_score] = scores.map(|nanos| millis(Duration::from_nanos(nanos)));
    json!({
        "chosen": reason.is_colocated(), "reason": reason.name(), "apart_ms": millis(*apart), "hop_ms": millis(*hop),
        "colocated_ms": millis(*colocated), "prefill_ms": millis(*prefill), "wait_ms": millis(side.wait),
        "reused_tokens": side.reused, "batch": side.batch, "behind": side.behind,
        "apart_score_ms": apart_score, "colocated_score_ms": colocated_score,
    })
}

/// A decision for people and programs; nodes are numbers, in the order of the configuration.
pub(super) fn explained(record: &Record, decision: &Decision, hash: u64) -> Value {
    let candidates = record.candidates.iter().map(|candidate| {
        json!({
            "prefill": candidate.instance, "source": candidate.source, "new_tokens": candidate.new,
            "reused_tokens": candidate.reused, "pulled_tokens": candidate.pulled, "wait_ms": millis(candidate.wait),
            "transfer_ms": millis(candidate.transfer), "prefill_ms": millis(candidate.prefill),
            "ttft_ms": millis(candidate.ttft), "score": candidate.score,
        })
    });
    let placed = &decision.placed;
    let mut value = json!({
        "policy": record.options.policy.name(), "candidates": candidates.collect::<Vec<_>>(),
        "prefill": placed.chosen.instance, "decode": decision.decode, "reason": placed.reason.name(),
        "margin": placed.margin, "index_version": record.index_version, "log_hash": format!("{hash:016x}"),
        "ttft_ms": {"low": decision.ttft.low * 1e3, "expected": decision.ttft.expected * 1e3,
            "high": decision.ttft.high * 1e3},
        "tbt_ms": decision.tbt * 1e3, "was_promised": decision.was_promised, "is_favoured": decision.is_favoured,
    });
    value["colocation"] = record.colocation.as_ref().map_or(Value::Null, colocation);
    if let Some(answer) = record.answer {
        let figures = answer.figures;
        value["admission"] = match answer.verdict {
            Verdict::Admit => json!({"verdict": "admit"}),
            Verdict::Refuse { reason, retry_after } => {
                json!({"verdict": "refuse", "reason": reason.name(), "retry_after_ms": millis(retry_after)})
            }
        };
        value["admission"]["late_chance"] = figures.late.into();
        value["admission"]["slow_chance"] = figures.slow.into();
        value["admission"]["level"] = figures.level.into();
    }
    value
}
