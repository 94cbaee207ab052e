//! The router: takes a request through placement and admission, its decode node's stream, and fail-over, to the client's pieces.
//!
//! A request has one owner at a time. Before its first token a failed node is replaced by another, or waited for while it
//! restarts; afterwards a failure is an error that says so. Everything a request holds (its place in the line, its share
//! of the nodes' load, its stream) is in one value, so a client that leaves gives all of it back by dropping it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use millpond_core::hash::{RouteHash, RouteHasher};
use millpond_core::sched::admission::{Reason, Slo};
use millpond_core::sched::colocate::Colocate;
use millpond_core::sched::conductor::INSTANCES_MAX;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{FinishReason, GenerateRequest, Generated, Sampling, Started};
use serde_json::{Value, json};

use super::desk::{Admitted, Asked, Desk, NodeCounts, Refused, Scheduling};
use super::follow::{Follower, Sought};
use super::keys::ApiKeys;
use super::line::{Line, LineLimits, Place};
use super::link::{Link, Lost, Timers};
use super::meters::Meters;
use super::prompt::{Answer, Prepared};
use super::records::Records;
use super::request::{Failure, Finish, Generate, Generation, Generator, Offer, Piece, Stage};
use super::ticket::Ticket;
use crate::metrics::Registry;
use crate::model::Card;
use crate::runtime::Stop;

/// Requests whose records are kept.
const RECORDS_MAX: usize = 1_024;
/// The first wait before a request is tried again; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// The longest wait between tries.
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// How often nodes are asked how they are.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// How often a node that did not answer is asked.
const WATCH_EVERY_DOWN: Duration = Duration::from_millis(100);

/// What a router allows.
///
/// ```
/// let limits = millpond_node::router::RouterLimits::default();
/// assert!(limits.failover_max < limits.deadline);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RouterLimits {
    /// Requests that run, and that wait.
    pub line: LineLimits,
    /// A request that lasts longer is given up.
    pub deadline: Duration,
    /// How long a request without its first token is tried again after nodes failed it.
    pub failover_max: Duration,
}

impl Default for RouterLimits {
    fn default() -> Self {
        Self { line: LineLimits::default(), deadline: Duration::from_secs(600), failover_max: Duration::from_secs(15) }
    }
}

/// A router over prefill and decode nodes. Clones are handles of the same one.
///
/// Example: `core/node/src/router/tests.rs`.
#[derive(Clone)]
pub struct Router {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("model", &self.inner.card.id).finish_non_exhaustive()
    }
}

struct Inner {
    card: Card,
    prefills: Vec<Arc<Prefill>>,
    decodes: Vec<Arc<Decode>>,
    line: Line,
    records: Records,
    meters: Meters,
    timers: Timers,
    limits: RouterLimits,
    desk: Desk,
    /// What the store has, if there is one.
    store: Option<Follower>,
    keys: ApiKeys,
    colocate: Colocate,
    /// Stopped when whoever still waits is to be sent away.
    abandoned: Stop,
}

/// A node as the router is told of it.
pub(super) struct Known {
    pub(super) address: String,
    pub(super) link: Arc<dyn Link>,
}

/// The nodes of a router, and what it knows of the store that the prefill nodes load from.
pub(super) struct Nodes {
    /// None: decode nodes compute prompts themselves.
    pub(super) prefills: Vec<Known>,
    pub(super) decodes: Vec<Known>,
    pub(super) store: Option<Follower>,
}

struct Prefill {
    known: Known,
    down: AtomicBool,
}

struct Decode {
    known: Known,
    down: AtomicBool,
}

/// Where one try of a request goes.
struct Choice {
    prefill: Option<Arc<Prefill>>,
    decode: Arc<Decode>,
    admitted: Admitted,
    slo: Slo,
    sought: Option<Sought>,
}

impl Router {
    pub(super) fn new(
        card: Card,
        nodes: Nodes,
        limits: RouterLimits,
        scheduling: &Scheduling,
        timers: Timers,
        registry: &Registry,
    ) -> Result<Self, String> {
        let Nodes { prefills, decodes, store } = nodes;
        let (prefill, decode) = (prefills.len(), decodes.len());
        if decode == 0 || prefill.max(decode) > INSTANCES_MAX {
            return Err(format!("{prefill} prefill and {decode} decode nodes; decode nodes are 1 to {INSTANCES_MAX}"));
        }
        let counts = NodeCounts { prefill, decode, has_store: store.is_some() };
        let desk = Desk::new(scheduling, &card.layout, counts, timers.clone());
        let desk = desk.map_err(|error| format!("the decision log cannot be written: {error}"))?;
        let prefill = |known| Arc::new(Prefill { known, down: AtomicBool::new(true) });
        let decode = |known| Arc::new(Decode { known, down: AtomicBool::new(true) });
        let inner = Inner {
            card,
            prefills: prefills.into_iter().map(prefill).collect(),
            decodes: decodes.into_iter().map(decode).collect(),
            line: Line::new(limits.line),
            records: Records::new(RECORDS_MAX),
            meters: Meters::new(registry),
            timers,
            limits,
            desk,
            store,
            keys: scheduling.keys.clone(),
            colocate: scheduling.placement.colocate,
            abandoned: Stop::new(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Takes all nodes for up without having asked them.
    pub(super) fn presume_up(&self) {
        self.inner.prefills.iter().for_each(|node| node.down.store(false, Ordering::Relaxed));
        self.inner.decodes.iter().for_each(|node| node.down.store(false, Ordering::Relaxed));
    }

    /// Keeps asking the nodes how they are, and the directory what the store has; never ends.
    pub async fn watch(&self) {
        let following = async {
            if let Some(store) = &self.inner.store {
                store.run().await;
            }
        };
        futures::future::join(self.watch_nodes(), following).await;
    }

    async fn watch_nodes(&self) {
        let nodes = self.inner.prefills.iter().map(|node| (&node.known, &node.down));
        let nodes = nodes.chain(self.inner.decodes.iter().map(|node| (&node.known, &node.down)));
        let timers = &self.inner.timers;
        futures::future::join_all(nodes.map(|(known, down)| async move {
            loop {
                let answer = known.link.load(timers.now() + WATCH_EVERY).await;
                // Who has no room for one more call is there.
                let is_down = !matches!(answer, Ok(_) | Err(Lost::Busy { .. }));
                if down.swap(is_down, Ordering::Relaxed) != is_down {
                    tracing::info!(node = known.address, up = !is_down, "router: a node changed");
                }
                (timers.sleep)(if is_down { WATCH_EVERY_DOWN } else { WATCH_EVERY }).await;
            }
        }))
        .await;
    }

    /// Ends the decision log: it is whole then. What is decided later is not in it.
    pub fn end_log(&self) {
        self.inner.desk.end_log();
    }

    /// Ends all requests with an error that says so, also those to come; how many there were.
    pub fn abandon(&self) -> usize {
        let (running, waiting) = self.inner.line.lengths();
        self.inner.abandoned.stop();
        running + waiting
    }

    /// Whether requests can be served now.
    ///
    /// # Errors
    /// Which nodes are missing.
    pub fn ready(&self) -> Result<(), String> {
        let up = |down: &AtomicBool| !down.load(Ordering::Relaxed);
        let names = |known: &[&Known]| known.iter().map(|known| known.address.as_str()).collect::<Vec<_>>().join(", ");
        if !self.inner.decodes.iter().any(|node| up(&node.down)) {
            let known: Vec<_> = self.inner.decodes.iter().map(|node| &node.known).collect();
            return Err(format!("no decode node answers ({})", names(&known)));
        }
        let needs_prefill = !self.inner.prefills.is_empty() && self.inner.colocate == Colocate::Never;
        if needs_prefill && !self.inner.prefills.iter().any(|node| up(&node.down)) {
            let known: Vec<_> = self.inner.prefills.iter().map(|node| &node.known).collect();
            return Err(format!("no prefill node answers ({})", names(&known)));
        }
        Ok(())
    }

    /// What the router knows of its nodes, for `/debug/explain`.
    #[must_use]
    pub fn view(&self) -> Value {
        let (running, waiting) = self.inner.line.lengths();
        let (prefill, decode) = self.inner.desk.loads();
        let (decisions, hash) = self.inner.desk.decided();
        let node = |known: &Known, down: &AtomicBool, requests: u64| json!({"address": known.address, "up": !down.load(Ordering::Relaxed), "requests": requests});
        let prefills = self.inner.prefills.iter().zip(prefill);
        let prefills = prefills.map(|(one, requests)| node(&one.known, &one.down, requests as u64));
        let decodes = self.inner.decodes.iter().zip(decode);
        let decodes = decodes.map(|(one, requests)| node(&one.known, &one.down, requests.into()));
        json!({
            "model": self.inner.card.id, "running": running, "waiting": waiting,
            "prefill": prefills.collect::<Vec<_>>(), "decode": decodes.collect::<Vec<_>>(),
            "decisions": decisions, "decisions_hash": format!("{hash:016x}"),
            "decision_log": self.inner.desk.log(), "store": self.inner.store.as_ref().map(Follower::view),
        })
    }
}

impl Generator for Router {
    fn offers(&self) -> Vec<Offer> {
        let card = &self.inner.card;
        vec![Offer { name: card.id.clone(), context: card.limits.context_tokens }]
    }

    fn generate(&self, request: Generate) -> BoxFuture<'static, Result<Generation, Failure>> {
        let inner = Arc::clone(&self.inner);
        async move {
            let mut ticket = Ticket::new(inner.records.clone(), inner.meters.clone(), inner.timers.clone(), &request);
            let abandoned = inner.abandoned.clone();
            let outcome = abandoned.or_stopped(inner.begin(request, &mut ticket)).await;
            match outcome.unwrap_or(Err(Failure::ShuttingDown { tokens: 0 })) {
                Ok(begun) => Ok(begun.generation(ticket, abandoned)),
                Err(failure) => {
                    ticket.failed(&failure);
                    Err(failure)
                }
            }
        }
        .boxed()
    }

    fn tenant(&self, key: Option<&str>) -> Result<Option<String>, Failure> {
        Ok(self.inner.keys.tenant(key)?.map(|tenant| tenant.name.clone()))
    }

    fn explain(&self, id: &str, tenant: Option<&str>) -> Option<Value> {
        self.inner.records.find(tenant, id)
    }
}

/// A request that has its first token.
struct Begun {
    prompt_tokens: u32,
    cached_tokens: u32,
    answer: Answer,
    first: Generated,
    rest: BoxStream<'static, Result<Generated, Lost>>,
    place: Place,
    admitted: Admitted,
    limit: Duration,
}

impl Inner {
    async fn begin(self: Arc<Self>, request: Generate, ticket: &mut Ticket) -> Result<Begun, Failure> {
        if request.model != self.card.id {
            return Err(Failure::UnknownModel { asked: request.model, known: vec![self.card.id.clone()] });
        }
        if request.logprobs.is_some() {
            return Err(Failure::Unsupported { what: "logprobs" });
        }
        let prepared = Prepared::new(&self.card, &request)?;
        let limit = request.deadline.unwrap_or(self.limits.deadline).min(self.limits.deadline);
        let deadline = ticket.began + limit;
        let late = || Failure::Deadline { limit };
        let place = self.timers.by(deadline, self.line.enter()).await.ok_or_else(late)??;
        ticket.note("queued_us", self.timers.now().since(ticket.began).as_micros());
        let chain: Vec<_> = RouteHasher::default().chain(&prepared.tokens, block_len(&self.card)).collect();
        let mut tries = Tries::new(self.timers.now() + self.limits.failover_max);
        loop {
            let mut choice = self.choose(&request, &prepared, &chain, &tries, ticket)?;
            let lost = match self.attempt(&request, &prepared, &mut choice, deadline).await {
                Ok((first, rest)) => {
                    let started = first.started.clone().unwrap_or_default();
                    choice.decode.down.store(false, Ordering::Relaxed);
                    if let Some(prefill) = &choice.prefill {
                        prefill.down.store(false, Ordering::Relaxed);
                    }
                    let address = choice.prefill.as_ref().map(|node| node.known.address.as_str());
                    ticket.tried(address, &choice.decode.known.address, None);
                    ticket.begun(prepared.tokens.len() as u64, &started);
                    return Ok(Begun {
                        prompt_tokens: prepared.prompt_tokens(),
                        cached_tokens: started.cached_tokens,
                        answer: Answer::new(&self.card, &request),
                        first,
                        rest,
                        place,
                        admitted: choice.admitted,
                        limit,
                    });
                }
                Err(lost) => lost,
            };
            let prefill = choice.prefill.as_ref().map(|node| node.known.address.as_str());
            ticket.tried(prefill, &choice.decode.known.address, Some(&lost));
            if lost == Lost::Late {
                return Err(self.refused_late(choice.admitted));
            }
            self.note(&mut tries, &choice, &lost);
            drop(choice);
            self.again(&mut tries, lost, limit, deadline).await?;
        }
    }

    fn refused_early(&self, refused: &Refused) -> Failure {
        let Refused { reason, retry_after, ttft, tbt } = *refused;
        self.meters.refusals(Stage::Early.name(), reason.name()).add(1);
        if reason == Reason::Down {
            return Failure::NoNode { role: "decode", detail: "none takes requests".into() };
        }
        Failure::Overloaded { reason: reason.name(), stage: Stage::Early, ttft, tbt, retry_after }
    }

    fn refused_late(&self, admitted: Admitted) -> Failure {
        let (reason, ttft, tbt) = (Reason::Tbt.name(), admitted.ttft(), admitted.tbt());
        self.meters.refusals(Stage::Late.name(), reason).add(1);
        Failure::Overloaded { reason, stage: Stage::Late, ttft, tbt, retry_after: admitted.late() }
    }

    /// Waits before the next try, or says why there is none.
    async fn again(&self, tries: &mut Tries, lost: Lost, limit: Duration, deadline: Instant) -> Result<(), Failure> {
        let (role, detail, pause) = match lost {
            Lost::Deadline => return Err(Failure::Deadline { limit }),
            Lost::Unservable { reason } => return Err(Failure::Unservable { reason }),
            // Told by `begin` in its own way.
            Lost::Late => return Err(Failure::Refused { reason: "no place at the decode node".into() }),
            Lost::Refused { reason } => return Err(Failure::Refused { reason }),
            Lost::Busy { reason, retry_after } => {
                if tries.decodes.len() >= self.decodes.len() {
                    return Err(Failure::Busy { reason, retry_after });
                }
                // Another one may have room at once.
                tries.count += 1;
                return Ok(());
            }
            Lost::Decode { detail } => ("decode", detail, tries.decodes.len() >= self.decodes.len()),
            Lost::Prefill { detail } => {
                let is_all = tries.prefills.len() >= self.prefills.len() || tries.decodes.len() >= self.decodes.len();
                ("prefill", detail, is_all)
            }
        };
        self.meters.retries(role).add(1);
        tries.count += 1;
        let now = self.timers.now();
        if now >= tries.until {
            return Err(Failure::NoNode { role, detail });
        }
        if now >= deadline {
            return Err(Failure::Deadline { limit });
        }
        if pause {
            // Everybody failed once: start over, after a wait that lets a node restart.
            tries.prefills.clear();
            tries.decodes.clear();
            (self.timers.sleep)(tries.pause).await;
            tries.pause = tries.pause.saturating_mul(2).min(PAUSE_MAX);
        }
        Ok(())
    }

    fn choose(
        &self,
        request: &Generate,
        prepared: &Prepared,
        chain: &[RouteHash],
        tries: &Tries,
        ticket: &mut Ticket,
    ) -> Result<Choice, Failure> {
        let common = self.desk.slo();
        let waited = self.timers.now().since(ticket.began);
        let ttft = request.ttft_slo.unwrap_or(common.ttft);
        let slo = Slo { ttft: ttft - waited.min(ttft), tbt: request.tbt_slo.unwrap_or(common.tbt) };
        let prefill_down = unavailable(self.prefills.iter().map(|node| &node.down), &tries.prefills);
        let decode_down = unavailable(self.decodes.iter().map(|node| &node.down), &tries.decodes);
        let tenant = request.tenant.as_deref().unwrap_or_default();
        let sought = self.store.as_ref().map(|store| store.seek(tenant, &prepared.tokens));
        let asked = Asked {
            name: &request.id,
            tokens: prepared.prompt_tokens(),
            blocks: chain,
            tenant: self.keys.number(tenant),
            stored: sought.as_ref().map(|sought| sought.stored),
            slo,
            priority: request.priority,
            is_retry: tries.count > 0,
            prefill_down,
            decode_down,
        };
        let (admitted, explained) = self.desk.decide(&asked);
        ticket.note("placement", explained);
        let admitted = admitted.map_err(|refused| self.refused_early(&refused))?;
        let at = |instance: u32| usize::try_from(instance).unwrap_or(usize::MAX);
        let decision = &admitted.decision;
        Ok(Choice {
            prefill: (self.prefills.get(at(decision.placed.chosen.instance)))
                .filter(|_| !decision.is_colocated)
                .map(Arc::clone),
            decode: Arc::clone(&self.decodes[at(decision.decode)]),
            admitted,
            slo,
            sought,
        })
    }

    /// The prompt is computed, as its nodes say.
    fn prefilled(&self, choice: &Choice, tokens: u32, started: &Started) {
        let taken = started.prefill.map_or(0, |times| times.compute_ns);
        choice.admitted.prefilled(tokens, started.cached_tokens, taken);
        if let (Some(store), Some(sought)) = (&self.store, &choice.sought) {
            let found = started.cached_tokens / self.card.layout.shape().block_tokens.max(1);
            // A decode node that computed it is none of the nodes that are watched, where there are prefill nodes.
            let is_other = choice.admitted.decision.is_colocated && !self.prefills.is_empty();
            let at = if is_other { u32::MAX } else { choice.admitted.decision.placed.chosen.instance };
            store.on_computed(usize::try_from(at).unwrap_or(usize::MAX), sought, found);
        }
    }

    /// One try: until the first token, or the end of a generation without any.
    async fn attempt(
        &self,
        request: &Generate,
        prepared: &Prepared,
        choice: &mut Choice,
        deadline: Instant,
    ) -> Result<(Generated, BoxStream<'static, Result<Generated, Lost>>), Lost> {
        let message = GenerateRequest {
            request_id: request.id.clone(),
            model: self.card.id.clone(),
            tokens: prepared.tokens.clone(),
            max_tokens: prepared.tokens_max,
            sampling: Some(Sampling {
                temperature: request.sampling.temperature,
                top_p: request.sampling.top_p,
                seed: request.sampling.seed,
            }),
            stop_tokens: prepared.stop_tokens.clone(),
            prefill: choice.prefill.as_ref().map(|node| node.known.address.clone()).unwrap_or_default(),
            tbt_slo_ns: choice.slo.tbt.as_nanos(),
            tenant: request.tenant.clone().unwrap_or_default(),
            ttft_slo_ns: choice.slo.ttft.as_nanos().max(1),
            priority: choice.admitted.priority(request.priority).into(),
        };
        let mut stream = choice.decode.known.link.generate(message, &choice.admitted.decision, deadline);
        let mut told = None;
        loop {
            match stream.next().await {
                Some(Ok(mut message)) => {
                    if let Some(started) = message.started.take().filter(|_| told.is_none()) {
                        self.prefilled(choice, prepared.prompt_tokens(), &started);
                        told = Some(started);
                    }
                    if !message.tokens.is_empty() || message.finished.is_some() {
                        choice.admitted.joined();
                        return Ok((Generated { started: told, ..message }, stream));
                    }
                }
                Some(Err(lost)) => return Err(lost),
                None => return Err(Lost::Decode { detail: "the stream ended before its first token".into() }),
            }
        }
    }
}

/// The nodes that are down or failed the request.
fn unavailable<'a>(down: impl Iterator<Item = &'a AtomicBool>, failed: &[usize]) -> Vec<u32> {
    let nodes = (0_u32..).zip(down.enumerate());
    nodes.filter(|(_, (at, down))| failed.contains(at) || down.load(Ordering::Relaxed)).map(|(at, _)| at).collect()
}

fn block_len(card: &Card) -> usize {
    usize::try_from(card.layout.shape().block_tokens).unwrap_or(usize::MAX)
}

/// What a request went through on its way to the first token.
struct Tries {
    /// Nodes that failed since the last pause, by index.
    prefills: Vec<usize>,
    decodes: Vec<usize>,
    /// How many there were.
    count: u32,
    until: Instant,
    pause: Duration,
}

impl Tries {
    fn new(until: Instant) -> Self {
        Self { prefills: Vec::new(), decodes: Vec::new(), count: 0, until, pause: PAUSE_MIN }
    }
}

impl Inner {
    /// Remembers which node failed a request, so that the next try and other requests avoid it.
    fn note(&self, tries: &mut Tries, choice: &Choice, lost: &Lost) {
        match (lost, &choice.prefill) {
            (Lost::Decode { .. }, _) => {
                if !choice.decode.down.swap(true, Ordering::Relaxed) {
                    tracing::info!(node = choice.decode.known.address, up = false, "router: a node changed");
                }
                tries.decodes.extend(self.decodes.iter().position(|node| Arc::ptr_eq(node, &choice.decode)));
            }
            // One that could not compute it itself is up, and cannot serve it.
            (Lost::Busy { .. }, _) | (Lost::Prefill { .. }, None) => {
                tries.decodes.extend(self.decodes.iter().position(|node| Arc::ptr_eq(node, &choice.decode)));
            }
            (Lost::Prefill { .. }, Some(prefill)) => {
                if !prefill.down.swap(true, Ordering::Relaxed) {
                    tracing::info!(node = prefill.known.address, up = false, "router: a node changed");
                }
                let at = self.prefills.iter().position(|node| Arc::ptr_eq(node, prefill));
                at.and_then(|at| u32::try_from(at).ok()).into_iter().for_each(|at| self.desk.cleared(at));
                tries.prefills.extend(at);
            }
            (Lost::Unservable { .. } | Lost::Refused { .. } | Lost::Late | Lost::Deadline, _) => {}
        }
    }
}

impl Begun {
    /// The client's side of the answer.
    fn generation(self, ticket: Ticket, abandoned: Stop) -> Generation {
        let Self { prompt_tokens, cached_tokens, answer, first, rest, place, admitted, limit } = self;
        let messages = stream::iter([Ok(first)]).chain(rest).boxed();
        let (answer, place) = (Some(answer), Some(place));
        let flight = Flight { messages, answer, ticket, place, limit, abandoned, admitted: Some(admitted) };
        let pieces = stream::unfold(flight, |mut flight| async move {
            let piece = flight.next().await?;
            Some((piece, flight))
        });
        Generation { prompt_tokens, cached_tokens, pieces: pieces.boxed() }
    }
}

/// An answer on its way to the client, and everything it holds.
struct Flight {
    messages: BoxStream<'static, Result<Generated, Lost>>,
    /// Gone once the last piece was made.
    answer: Option<Answer>,
    ticket: Ticket,
    place: Option<Place>,
    limit: Duration,
    abandoned: Stop,
    /// Until the answer is whole.
    admitted: Option<Admitted>,
}

impl Flight {
    async fn next(&mut self) -> Option<Result<Piece, Failure>> {
        let mut answer = self.answer.take()?;
        // Ends with the stream, whose items are bounded by the tokens asked for.
        loop {
            let message = match self.abandoned.or_stopped(self.messages.next()).await {
                Err(_) => {
                    let failure = Failure::ShuttingDown { tokens: self.ticket.token_count };
                    self.ticket.failed(&failure);
                    return Some(Err(failure));
                }
                Ok(next) => next,
            };
            let message = match message {
                Some(Ok(message)) => message,
                Some(Err(lost)) => return Some(Err(self.lost(lost))),
                None => return Some(Err(self.lost(Lost::Decode { detail: "the stream ended early".into() }))),
            };
            let mut piece = answer.push(&message.tokens);
            self.ticket.tokens(piece.tokens.len());
            if let Some(admitted) = &self.admitted {
                admitted.tokens(self.ticket.token_count);
            }
            if piece.finish.is_none()
                && let Some(finished) = &message.finished
            {
                let finish = match finished.reason() {
                    FinishReason::Length => Finish::Length,
                    FinishReason::Stop | FinishReason::Unspecified => Finish::Stop,
                };
                self.ticket.finished(finished);
                let last = answer.finish(finish);
                piece.text.push_str(&last.text);
                piece.finish = last.finish;
                self.end(finish.name());
                return Some(Ok(piece));
            }
            if piece.finish.is_some() {
                self.end(Finish::Stop.name());
                return Some(Ok(piece));
            }
            if !piece.tokens.is_empty() {
                self.answer = Some(answer);
                return Some(Ok(piece));
            }
        }
    }

    fn end(&mut self, how: &str) {
        self.ticket.done(how);
        if let Some(admitted) = self.admitted.take() {
            admitted.ended(u32::try_from(self.ticket.token_count).unwrap_or(u32::MAX));
        }
        if let Some(place) = self.place.take() {
            place.leave(self.ticket.began, self.ticket.now());
        }
    }

    fn lost(&mut self, lost: Lost) -> Failure {
        let tokens = self.ticket.token_count;
        let failure = match lost {
            Lost::Deadline => Failure::Deadline { limit: self.limit },
            Lost::Prefill { detail } => Failure::NodeLost { role: "prefill", tokens, detail },
            Lost::Decode { detail } => Failure::NodeLost { role: "decode", tokens, detail },
            Lost::Late => Failure::NodeLost { role: "decode", tokens, detail: "refused in mid-answer".into() },
            Lost::Busy { reason, .. } | Lost::Unservable { reason } | Lost::Refused { reason } => {
                Failure::NodeLost { role: "decode", tokens, detail: reason }
            }
        };
        self.ticket.failed(&failure);
        failure
    }
}
