//! The methods of a node, and what their handlers get to see.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use futures::future::{BoxFuture, FutureExt};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::method_name;
use millpond_core::wire::message::rpc::{Frame, MESSAGE_LEN_MAX, Reason, Refusal, WINDOW_MAX};
use millpond_core::wire::session::Peer;
use parking_lot::Mutex;
use prost::Message;

use super::dedup::{Dedup, Key, Outcome};
use super::link::Outbox;
use crate::metrics::{Counter, Gauge, Holding, Latency, Registry};

/// Calls in flight at a node, over all sessions.
const CALLS_MAX: usize = 8192;

/// Bounds of the hint that goes with "busy".
const HINT_MIN: Duration = Duration::from_millis(5);
const HINT_MAX: Duration = Duration::from_secs(1);

/// What a handler knows of the call it serves.
///
/// Example: `verify/tests/runtimes/rpc.rs`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Context {
    /// Who calls.
    pub peer: Peer,
    /// When the caller stops waiting, on this node's clock; the handler is dropped then.
    pub deadline: Instant,
    /// The caller's trace id, 0 for none.
    pub trace: u64,
    /// The mutation's id, the same in each of its retries.
    pub id: Option<NonZeroU64>,
}

type Once = dyn Fn(Context, Vec<u8>) -> BoxFuture<'static, Outcome> + Send + Sync;
type Many = dyn Fn(Context, Vec<u8>, RawItems) -> BoxFuture<'static, Result<(), Refusal>> + Send + Sync;

enum Handler {
    Call(Arc<Once>),
    Mutation(Arc<Once>),
    Stream(Box<Many>),
}

struct Method {
    handler: Handler,
    metrics: Option<MethodMetrics>,
}

struct MethodMetrics {
    done: Counter,
    refused: Counter,
    in_flight: Gauge,
    span: Latency,
}

/// What a call came to: an answer's body, or nothing more after a stream's items.
pub(super) enum Reply {
    Answer(Vec<u8>),
    End,
}

/// The methods that a node serves.
///
/// ```
/// use millpond_node::rpc::{Context, Refusal, Router};
/// #[derive(Clone, PartialEq, prost::Message)]
/// struct Text { #[prost(string, tag = "1")] text: String }
/// let router = Router::new()
///     .call(0x7001, |_: Context, request: Text| async move { Ok::<Text, Refusal>(request) })
///     .stream(0x7002, |_: Context, request: Text, mut items| async move {
///         for word in request.text.split(' ') {
///             items.send(&Text { text: word.to_owned() }).await?;
///         }
///         Ok(())
///     });
/// assert!(router.serves(0x7001) && !router.serves(0x7003));
/// ```
pub struct Router {
    methods: HashMap<u16, Method>,
    dedup: Dedup,
    in_flight: AtomicUsize,
    /// Roughly how long a call takes, for the hint that goes with "busy".
    mean_ns: AtomicU64,
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("methods", &self.methods.keys()).finish_non_exhaustive()
    }
}

impl Default for Router {
    fn default() -> Self {
        Self::new()
    }
}

impl Router {
    /// One that serves nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            methods: HashMap::new(),
            dedup: Dedup::default(),
            in_flight: AtomicUsize::new(0),
            mean_ns: AtomicU64::new(0),
        }
    }

    /// Adds a method with one answer.
    ///
    /// # Panics
    /// `method` is served already: a bug of the caller.
    #[must_use]
    pub fn call<Req, Resp, F, Fut>(self, method: u16, handler: F) -> Self
    where
        Req: Message + Default + 'static,
        Resp: Message + 'static,
        F: Fn(Context, Req) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Resp, Refusal>> + Send + 'static,
    {
        self.add(method, Handler::Call(once(handler)))
    }

    /// Adds a method that changes something. A caller's retries carry one id, and the target does it once: repetitions
    /// get the first one's answer. Failures are not remembered. Keep answers small: they are kept for a while.
    ///
    /// # Panics
    /// `method` is served already: a bug of the caller.
    #[must_use]
    pub fn mutation<Req, Resp, F, Fut>(self, method: u16, handler: F) -> Self
    where
        Req: Message + Default + 'static,
        Resp: Message + 'static,
        F: Fn(Context, Req) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Resp, Refusal>> + Send + 'static,
    {
        self.add(method, Handler::Mutation(once(handler)))
    }

    /// Adds a method that answers by a stream of items.
    ///
    /// # Panics
    /// `method` is served already: a bug of the caller.
    #[must_use]
    pub fn stream<Req, Item, F, Fut>(self, method: u16, handler: F) -> Self
    where
        Req: Message + Default + 'static,
        Item: Message + 'static,
        F: Fn(Context, Req, Items<Item>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Refusal>> + Send + 'static,
    {
        let many: Box<Many> = Box::new(move |context, body, raw| match Req::decode(&*body) {
            Ok(request) => handler(context, request, Items { raw, item: PhantomData }).boxed(),
            Err(error) => futures::future::ready(Err(malformed(&error))).boxed(),
        });
        self.add(method, Handler::Stream(many))
    }

    /// Adds the methods of `other`.
    ///
    /// # Panics
    /// A method is served by both: a bug of the caller.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        for (method, found) in other.methods {
            let before = self.methods.insert(method, found);
            assert!(before.is_none(), "method {method:#06x} is served twice");
        }
        self
    }

    /// Counts the calls of every method added so far in `registry`.
    #[must_use]
    pub fn with_metrics(mut self, registry: &Registry) -> Self {
        for (number, method) in &mut self.methods {
            let label = method_name(*number).map_or_else(|| format!("{number:#06x}"), str::to_owned);
            let counter = |outcome| {
                let labels = [("method", label.as_str()), ("outcome", outcome)];
                registry.counter("millpond_rpc_calls_total", "Calls served, by method and outcome.", &labels)
            };
            let labels = [("method", label.as_str())];
            let (help, spans) = ("Calls being served.", "Time from a call's arrival to its end.");
            method.metrics = Some(MethodMetrics {
                done: counter("done"),
                refused: counter("refused"),
                in_flight: registry.gauge("millpond_rpc_calls_in_flight", help, &labels),
                span: registry.latency("millpond_rpc_call_seconds", spans, &labels),
            });
        }
        self
    }

    /// Whether `method` is served.
    #[must_use]
    pub fn serves(&self, method: u16) -> bool {
        self.methods.contains_key(&method)
    }

    fn add(mut self, method: u16, handler: Handler) -> Self {
        let before = self.methods.insert(method, Method { handler, metrics: None });
        assert!(before.is_none(), "method {method:#06x} is served twice");
        self
    }

    /// Lets a call begin, if there is room for it.
    pub(super) fn admit(self: &Arc<Self>, now: Instant, method: u16, window: u32) -> Result<Slot, Refusal> {
        let Some(found) = self.methods.get(&method) else {
            let detail = format!("method {method:#06x} is not served here; is the node's role or version another?");
            return Err(Refusal::new(Reason::UnknownMethod, detail));
        };
        if matches!(found.handler, Handler::Stream(_)) != (window > 0) {
            return Err(Refusal::new(Reason::Malformed, "a stream was called as a call, or the other way round"));
        }
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= CALLS_MAX {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            return Err(self.busy(CALLS_MAX));
        }
        let holding = found.metrics.as_ref().map(|metrics| metrics.in_flight.hold());
        Ok(Slot { router: self.clone(), method, start: now, _holding: holding })
    }

    /// The refusal of one call more than `max`.
    pub(super) fn busy(&self, max: usize) -> Refusal {
        let mean = Duration::from_nanos(self.mean_ns.load(Ordering::Relaxed));
        Refusal::new(Reason::Busy, format!("{max} calls are in flight")).retry_after(mean.clamp(HINT_MIN, HINT_MAX))
    }

    /// Runs the handler of an admitted call; see [`Router::admit`].
    pub(super) async fn run(
        &self,
        method: u16,
        context: Context,
        body: Vec<u8>,
        raw: RawItems,
    ) -> Result<Reply, Refusal> {
        let unknown = || Refusal::new(Reason::UnknownMethod, "");
        match &self.methods.get(&method).ok_or_else(unknown)?.handler {
            Handler::Call(once) => once(context, body).await.map(Reply::Answer),
            Handler::Mutation(once) => {
                let Some(id) = context.id else {
                    return Err(Refusal::new(Reason::Malformed, "a mutation needs an id; call it as one"));
                };
                let key = Key::new(&context.peer, method, id);
                // A panic must not get into what several callers share.
                let start = || caught(method, once.clone(), context, body).boxed();
                self.dedup.once(key, start).await.map(Reply::Answer)
            }
            Handler::Stream(many) => many(context, body, raw).await.map(|()| Reply::End),
        }
    }
}

async fn caught(method: u16, once: Arc<Once>, context: Context, body: Vec<u8>) -> Outcome {
    let work = AssertUnwindSafe(async move { once(context, body).await });
    work.catch_unwind().await.unwrap_or_else(|_panic| Err(panicked(method)))
}

/// The refusal of a call whose handler panicked.
pub(super) fn panicked(method: u16) -> Refusal {
    tracing::error!(method = format_args!("{method:#06x}"), "a handler panicked; its call is refused");
    Refusal::new(Reason::Failed, format!("the handler of method {method:#06x} panicked; see the node's log"))
}

fn once<Req, Resp, F, Fut>(handler: F) -> Arc<Once>
where
    Req: Message + Default + 'static,
    Resp: Message + 'static,
    F: Fn(Context, Req) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Resp, Refusal>> + Send + 'static,
{
    Arc::new(move |context, body| match Req::decode(&*body) {
        Ok(request) => {
            let work = handler(context, request);
            async move { encode(&work.await?) }.boxed()
        }
        Err(error) => futures::future::ready(Err(malformed(&error))).boxed(),
    })
}

fn malformed(error: &prost::DecodeError) -> Refusal {
    Refusal::new(Reason::Malformed, format!("the request cannot be read: {error}"))
}

/// A message's bytes, if it is short enough to travel.
fn encode(message: &impl Message) -> Outcome {
    let bytes = message.encode_to_vec();
    if bytes.len() > usize::try_from(MESSAGE_LEN_MAX).unwrap_or(usize::MAX) {
        let detail = format!("a message of {} bytes is longer than {MESSAGE_LEN_MAX}; ask for less", bytes.len());
        return Err(Refusal::new(Reason::TooLarge, detail));
    }
    Ok(bytes)
}

/// A call's place among those in flight at a node.
pub(super) struct Slot {
    router: Arc<Router>,
    method: u16,
    start: Instant,
    _holding: Option<Holding>,
}

impl Slot {
    /// Notes how the call ended.
    pub(super) fn end(self, now: Instant, is_done: bool) {
        let span = now.since(self.start);
        let mean_ns = self.router.mean_ns.load(Ordering::Relaxed);
        // An average that forgets; lost updates do not matter.
        self.router.mean_ns.store(mean_ns - mean_ns / 16 + span.as_nanos() / 16, Ordering::Relaxed);
        if let Some(metrics) = self.router.methods.get(&self.method).and_then(|method| method.metrics.as_ref()) {
            metrics.span.observe(span);
            let counter = if is_done { &metrics.done } else { &metrics.refused };
            counter.add(1);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.router.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many items a stream's caller still wants.
#[derive(Debug)]
pub(super) struct Credit(Mutex<(u32, Option<Waker>)>);

impl Credit {
    pub(super) fn new(window: u32) -> Self {
        Self(Mutex::new((window, None)))
    }

    /// The caller wants `items` more.
    ///
    /// # Errors
    /// More than it may want.
    pub(super) fn add(&self, items: u32) -> Result<(), u32> {
        let mut credit = self.0.lock();
        let sum = credit.0.saturating_add(items);
        if sum > WINDOW_MAX {
            return Err(sum);
        }
        credit.0 = sum;
        if let Some(waker) = credit.1.take() {
            waker.wake();
        }
        Ok(())
    }

    async fn take(&self) {
        poll_fn(|context| {
            let mut credit = self.0.lock();
            match credit.0.checked_sub(1) {
                Some(left) => {
                    credit.0 = left;
                    Poll::Ready(())
                }
                None => {
                    credit.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await;
    }
}

/// Where a stream's items go, as bytes.
#[derive(Clone, Debug)]
pub(super) struct RawItems {
    pub(super) outbox: Arc<Outbox>,
    pub(super) call: u64,
    pub(super) credit: Arc<Credit>,
}

/// Where a stream's handler sends its items. See [`Router::stream`].
///
/// Example: `core/node/src/router/tests.rs`.
#[derive(Debug)]
pub struct Items<T> {
    raw: RawItems,
    item: PhantomData<fn(T)>,
}

impl<T: Message> Items<T> {
    /// Sends one item; waits until the caller wants it, at most until the handler's deadline.
    ///
    /// # Errors
    /// The item is too long, or the session is gone; hand the error on.
    pub async fn send(&mut self, item: &T) -> Result<(), Refusal> {
        let body = encode(item)?;
        self.raw.credit.take().await;
        let sent = self.raw.outbox.send(Frame::Item { call: self.raw.call }, body).await;
        sent.map_err(|_| Refusal::new(Reason::Cancelled, "the caller's session is gone"))
    }
}
