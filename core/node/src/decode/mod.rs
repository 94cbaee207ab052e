//! The decode role: it owns a request from its first page to its last token.
//!
//! It reserves pages, lets a prefill node fill them (or fills them itself: colocated), counts what arrives, looks whether the
//! batch has room for it within the deadlines between tokens (`door`), and joins the request to it between steps. Whoever
//! drops a [`Generation`] cancels all of it: the prefill call, the transfer (its grant is closed) and the place in the batch;
//! the pages come back by themselves.

mod batch;
mod door;
mod remote;
mod sequence;
pub mod service;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::channel::mpsc;
use futures::future::{FutureExt, select};
use futures::stream::{BoxStream, Stream, StreamExt};
use millpond_core::sched::admission::{self, Ask, Slo};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{
    FirstToken, GenerateRequest, Generated, KvTarget, PrefillRequest, PrefillStep, REQUEST_ID_LEN_MAX, STOP_TOKENS_MAX,
    Started,
};
use zerocopy::IntoBytes;

use self::door::{Answer, Door};
use self::sequence::{Event, Sequence};
use crate::engine::{Arrival, Engine, Grant};
use crate::kv::{Page, Pool};
use crate::metrics::{Counter, Gauge, Latency, Registry};
use crate::model::sample;
use crate::prefill::{Prefill, Prompt};
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, Task, start};

pub use remote::RpcPrefills;

/// The arrival counter of a request's grant.
const COUNTER: u64 = 0;

/// How a node decodes.
///
/// ```
/// assert_eq!(millpond_node::decode::Options::default().batch_max, 32);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// Requests decoded together.
    pub batch_max: usize,
    /// Requests that may be on their way into the batch; more are refused as busy.
    pub waiting_max: usize,
    /// This node's port for prefill nodes, `host:port`.
    pub address: String,
    /// How long KV may make no progress before a request is given up.
    pub progress_deadline: Duration,
    /// The transport that KV is to take, by name; empty: the best one shared.
    pub via: String,
    /// What happens to a prompt that would slow down the batch too much.
    pub admission: admission::Options,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch_max: 32,
            waiting_max: 256,
            address: String::new(),
            progress_deadline: Duration::from_secs(5),
            via: String::new(),
            admission: admission::Options::default(),
        }
    }
}

/// How the role reaches prefill nodes: by rpc ([`RpcPrefills`]), or a stand-in.
///
/// Example: `verify/tests/serving.rs` (`RpcPrefills`).
pub trait Prefills: Send + Sync + 'static {
    /// Starts a prefill at `address`. Dropping the stream cancels it there.
    fn prefill(
        &self,
        address: &str,
        request: PrefillRequest,
        deadline: Instant,
    ) -> BoxStream<'static, Result<PrefillStep, Refusal>>;
}

/// The role. Clones are handles of the same one; the batch ends with the last of them.
///
/// Example: `verify/tests/serving.rs`.
#[derive(Clone)]
pub struct Decode<R> {
    inner: Arc<Inner<R>>,
}

struct Inner<R> {
    prefill: Prefill<R>,
    engine: Engine<R>,
    prefills: Arc<dyn Prefills>,
    options: Options,
    joins: mpsc::UnboundedSender<Sequence>,
    door: Arc<Door>,
    /// Requests before their first step.
    entering: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
}

/// What the role counts.
pub(crate) struct Metrics {
    batch: Gauge,
    waiting: Gauge,
    steps: Counter,
    tokens: Counter,
    pauses: Counter,
    abandoned: Counter,
    step: Latency,
}

impl Metrics {
    fn new(registry: &Registry) -> Self {
        Self {
            batch: registry.gauge("millpond_decode_batch_size", "Requests in the last step.", &[]),
            waiting: registry.gauge("millpond_decode_waiting", "Requests that are ready or paused.", &[]),
            steps: registry.counter("millpond_decode_steps_total", "Steps computed.", &[]),
            tokens: registry.counter("millpond_decode_tokens_total", "Tokens computed; by steps, the mean batch.", &[]),
            pauses: registry.counter("millpond_decode_pauses_total", "Requests that gave their pages away.", &[]),
            abandoned: registry.counter(
                "millpond_decode_abandoned_total",
                "Requests given up by whoever asked: the client left, or a stop text ended the answer.",
                &[],
            ),
            step: registry.latency("millpond_decode_step_seconds", "One step of the whole batch.", &[]),
        }
    }

    fn on_step(&self, size: usize, span: Duration) {
        self.batch.set(size as u64);
        self.steps.add(1);
        self.tokens.add(size as u64);
        self.step.observe(span);
    }
}

/// The answer to one request: a stream that ends after a message with `finished`, or after an error. Dropping it cancels
/// the request.
///
/// Example: `core/node/src/router/tests.rs`.
#[must_use = "dropping it cancels the request"]
pub struct Generation {
    events: mpsc::UnboundedReceiver<Event>,
    _entry: Task<()>,
}

impl Stream for Generation {
    type Item = Result<Generated, Refusal>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_next_unpin(context)
    }
}

impl<R: Runtime> Decode<R> {
    /// Starts the role and its batch. `prefill` computes here what no prefill node computes, with the same model and pool.
    pub fn start(
        prefill: Prefill<R>,
        engine: Engine<R>,
        prefills: Arc<dyn Prefills>,
        options: Options,
        registry: &Registry,
    ) -> Self {
        let (joins, joined) = mpsc::unbounded();
        let metrics = Arc::new(Metrics::new(registry));
        let door = Door::new(options.admission, registry);
        let shared = (Arc::clone(&metrics), Arc::clone(&door));
        let batch = batch::Batch::new(prefill.clone(), joined, shared, options.batch_max.max(1));
        prefill.runtime().spawn(batch.run());
        let entering = Arc::new(AtomicUsize::new(0));
        Self { inner: Arc::new(Inner { prefill, engine, prefills, options, joins, door, entering, metrics }) }
    }

    /// Its pages.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.inner.prefill.pool()
    }

    /// Requests in the last step, and those that wait to be in one.
    #[must_use]
    pub fn load(&self) -> (u64, u64) {
        let Inner { metrics, entering, .. } = &*self.inner;
        (metrics.batch.value(), metrics.waiting.value() + entering.load(Ordering::Relaxed) as u64)
    }

    pub(crate) fn prefill(&self) -> &Prefill<R> {
        &self.inner.prefill
    }

    /// Starts an answer, which must have begun by `deadline`.
    ///
    /// # Errors
    /// The request makes no sense, or too many are waiting.
    pub fn generate(&self, request: GenerateRequest, deadline: Instant) -> Result<Generation, Refusal> {
        let inner = &self.inner;
        let malformed = |detail: String| Refusal::new(Reason::Malformed, detail);
        crate::prefill::service::check_model(&inner.prefill, &request.model)?;
        inner.prefill.check(&request.tokens, request.max_tokens)?;
        sample::check(&request.sampling.unwrap_or_default()).map_err(|error| malformed(error.to_string()))?;
        if request.max_tokens == 0 {
            return Err(malformed("max_tokens must be at least 1".into()));
        }
        if request.stop_tokens.len() > STOP_TOKENS_MAX {
            return Err(malformed(format!("a request has at most {STOP_TOKENS_MAX} stop tokens")));
        }
        if request.request_id.len() > REQUEST_ID_LEN_MAX {
            return Err(malformed(format!("a request id has at most {REQUEST_ID_LEN_MAX} bytes")));
        }
        let entering = Entering::new(&inner.entering, inner.options.waiting_max)?;
        let (sender, events) = mpsc::unbounded();
        let decode = Arc::clone(inner);
        let entry = start(inner.prefill.runtime(), async move {
            let failed = sender.clone();
            if let Err(refusal) = decode.enter(request, sender, deadline).await {
                let _ = failed.unbounded_send(Err(refusal));
            }
            drop(entering);
        });
        Ok(Generation { events, _entry: entry })
    }
}

/// A place among those that enter.
struct Entering(Arc<AtomicUsize>);

impl Entering {
    fn new(count: &Arc<AtomicUsize>, max: usize) -> Result<Self, Refusal> {
        let place = Self(Arc::clone(count));
        if count.fetch_add(1, Ordering::Relaxed) >= max {
            let detail = format!("{max} requests are waiting for decode");
            return Err(Refusal::new(Reason::Busy, detail).retry_after(Duration::from_millis(100)));
        }
        Ok(place)
    }
}

impl Drop for Entering {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<R: Runtime> Inner<R> {
    /// From a request to a sequence in the batch.
    async fn enter(
        &self,
        request: GenerateRequest,
        listener: mpsc::UnboundedSender<Event>,
        deadline: Instant,
    ) -> Result<(), Refusal> {
        let runtime = self.prefill.runtime();
        let begun = runtime.now();
        let pages = self.prefill.pages(request.tokens.len()).await;
        let reserve_ns = runtime.now().since(begun).as_nanos();
        let mut sequence = Sequence::new(request.clone(), listener, begun);
        // A prompt that is computed in this very process needs its pages once, not twice.
        let is_here = request.prefill.is_empty() || request.prefill == self.options.address;
        let is_over = if is_here {
            self.prefill_here(&request, pages, reserve_ns, &mut sequence).await?
        } else {
            self.prefill_there(request, pages, reserve_ns, &mut sequence, deadline).await?
        };
        if !is_over {
            let gone = |_| Refusal::new(Reason::Draining, "the decode role has ended");
            self.joins.unbounded_send(sequence).map_err(gone)?;
        }
        Ok(())
    }

    /// Colocated: the pages are handed over as they are.
    async fn prefill_here(
        &self,
        request: &GenerateRequest,
        pages: Vec<Page>,
        reserve_ns: u64,
        sequence: &mut Sequence,
    ) -> Result<bool, Refusal> {
        let begun = self.prefill.runtime().now();
        let prompt = Prompt {
            tokens: request.tokens.as_slice().into(),
            sampling: request.sampling.unwrap_or_default(),
            tenant: request.tenant.clone(),
        };
        let (computed, _) = self.prefill.run(&prompt, pages, None).await?;
        let now = self.prefill.runtime().now();
        let first = FirstToken {
            token: computed.next_token,
            cached_tokens: computed.cached_tokens,
            times: Some(computed.times),
        };
        sequence.pages = computed.pages;
        let started = self.admit(sequence, started(&first, reserve_ns, now.since(begun))).await?;
        Ok(sequence.take_token(first.token, self.prefill.runtime().now(), |step| step.started = started))
    }

    /// Disaggregated: a prefill node writes into granted pages.
    async fn prefill_there(
        &self,
        request: GenerateRequest,
        mut pages: Vec<Page>,
        reserve_ns: u64,
        sequence: &mut Sequence,
        deadline: Instant,
    ) -> Result<bool, Refusal> {
        let begun = self.prefill.runtime().now();
        let layout = self.prefill.card().layout;
        let (grant, target) = self.grant(&mut pages)?;
        let call = PrefillRequest {
            request_id: request.request_id,
            model: request.model,
            tokens: request.tokens,
            sampling: request.sampling,
            target: Some(target),
            tenant: request.tenant,
            via: self.options.via.clone(),
        };
        let mut steps = self.prefills.prefill(&request.prefill, call, deadline);
        let mut first = None;
        let mut is_over = false;
        let mut first_at = begun;
        // The prefill node ends its stream after its last write was acknowledged.
        while let Some(step) = steps.next().await {
            let step = step?;
            if let Some(token) = step.first.filter(|_| first.is_none()) {
                first_at = self.prefill.runtime().now();
                // KV goes on arriving meanwhile.
                let started = self.admit(sequence, started(&token, reserve_ns, first_at.since(begun))).await?;
                let now = self.prefill.runtime().now();
                is_over = sequence.take_token(token.token, now, |step| step.started = started);
                first = Some(token);
            }
            sequence.sent = step.done;
            if sequence.sent.is_some() || is_over {
                break;
            }
        }
        if first.is_none() {
            return Err(Refusal::new(
                Reason::Unavailable,
                "the prefill node ended without a token; send the request again",
            ));
        }
        if !is_over {
            let amount = pages.len() as u64 * u64::from(layout.shape().layer_count);
            let arrived = grant.arrived(Arrival { counter: COUNTER, amount }, self.options.progress_deadline).await;
            arrived.map_err(|error| {
                Refusal::new(Reason::Unavailable, format!("KV of the prompt did not arrive: {error}"))
            })?;
            sequence.arrive_ns = self.prefill.runtime().now().since(first_at).as_nanos();
        }
        // From here on no frame of the prefill node lands in them.
        for buf in grant.close().await {
            if let Some(page) = pages.iter_mut().find(|page| page.offset() == buf.offset()) {
                page.give_back(buf);
            }
        }
        sequence.pages = pages;
        Ok(is_over)
    }

    /// Waits for a place in the batch for a prompt that is computed. While it is held the listener knows that it is
    /// computed; what is still to be said of that is returned.
    async fn admit(&self, sequence: &mut Sequence, started: Started) -> Result<Option<Started>, Refusal> {
        let mut started = Some(started);
        if sequence.is_one_token() {
            return Ok(started);
        }
        let runtime = self.prefill.runtime();
        let (tokens, priority) = (sequence.position() + 1, u8::try_from(sequence.priority).unwrap_or(u8::MAX));
        let slo = Slo { ttft: sequence.ttft_slo, tbt: sequence.tbt_slo.unwrap_or(Duration::MAX) };
        let ask = Ask { tokens, slo, priority, ..Ask::default() };
        let caller = self.door.call(ask, sequence.arrived, runtime.now());
        loop {
            let now = runtime.now();
            match caller.ask(now) {
                Answer::Join(place) => {
                    sequence.place = Some(place);
                    return Ok(started);
                }
                Answer::Hold(until, version) => {
                    if let Some(started) = started.take() {
                        sequence.tell(Generated { started: Some(started), ..Generated::default() });
                    }
                    let late = Box::pin(runtime.sleep(until.since(now)));
                    select(Box::pin(caller.changed(version)), late).map(|_| ()).await;
                }
                Answer::Refuse => {
                    let detail = "with one request more the batch would miss a deadline between tokens";
                    return Err(Refusal::new(Reason::Late, detail));
                }
            }
        }
    }

    fn grant(&self, pages: &mut [Page]) -> Result<(Grant, KvTarget), Refusal> {
        let memory = pages.iter_mut().filter_map(Page::lend).collect();
        let grant = self.engine.grant_write(memory).map_err(|error| Refusal::new(Reason::Failed, error.to_string()))?;
        let target = KvTarget {
            address: self.options.address.clone(),
            token: grant.token().as_bytes().to_vec(),
            page_offsets: pages.iter().map(Page::offset).collect(),
            counter: COUNTER,
            layout: Some(self.prefill.card().layout.into()),
        };
        Ok((grant, target))
    }
}

fn started(first: &FirstToken, reserve_ns: u64, prefill: Duration) -> Started {
    Started { cached_tokens: first.cached_tokens, reserve_ns, prefill_ns: prefill.as_nanos(), prefill: first.times }
}
