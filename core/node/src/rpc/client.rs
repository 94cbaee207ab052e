//! A caller of one peer's methods that keeps a session with it, and opens another when that one breaks.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::{BoxFuture, FutureExt};
use futures::io::{AsyncRead, AsyncWrite};
use futures::lock::Mutex;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::Purpose;
use millpond_core::wire::message::rpc::MESSAGE_LEN_MAX;
use millpond_core::wire::session::Peer;
use prost::Message;

use super::channel::{Ask, Channel};
use super::{FarEnd, Limits, Replies, RpcError};
use crate::runtime::{Runtime, by, sleep_until};
use crate::session::{Credentials, SessionError, Target, dial};

/// Bounds of the pause after a failed dial; it doubles from one to the other.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Bytes in and out, with somebody at the other end.
///
/// Example: `verify/tests/runtimes/rpc.rs`.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// A session that a [`Client`] may call on.
///
/// Example: `verify/tests/runtimes/rpc.rs`.
pub struct Connection {
    /// The bytes after the hello.
    pub stream: Box<dyn Duplex>,
    /// Who is at the other end.
    pub peer: Peer,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// How a [`Client`] gets sessions: usually by a [`Dialer`].
///
/// Example: `verify/tests/runtimes/rpc.rs`.
pub trait Connect: Send + Sync + 'static {
    /// Opens a session by `deadline`.
    fn connect(&self, deadline: Instant) -> BoxFuture<'_, Result<Connection, SessionError>>;
}

/// Dials a node's port for each session.
///
/// Example: `verify/tests/runtimes/rpc.rs`.
#[derive(Clone, Debug)]
pub struct Dialer<R> {
    runtime: R,
    target: Target,
    credentials: Credentials,
}

impl<R: Runtime> Dialer<R> {
    /// Dials `target`, as the node of `credentials`.
    #[must_use]
    pub fn new(runtime: R, target: Target, credentials: Credentials) -> Self {
        Self { runtime, target, credentials }
    }
}

impl<R: Runtime> Connect for Dialer<R> {
    fn connect(&self, deadline: Instant) -> BoxFuture<'_, Result<Connection, SessionError>> {
        async move {
            let session = dial(&self.runtime, &self.target, Purpose::Control, &self.credentials, deadline).await?;
            Ok(Connection { stream: Box::new(session.stream), peer: session.peer })
        }
        .boxed()
    }
}

#[derive(Debug, Default)]
struct Link {
    channel: Option<Arc<Channel>>,
    /// Why the last dial failed, and when the next may be made.
    failed: Option<(Arc<SessionError>, Instant)>,
    pause: Duration,
}

struct Inner<R> {
    runtime: R,
    connect: Box<dyn Connect>,
    limits: Limits,
    link: Mutex<Link>,
    next_id: AtomicU64,
}

/// What a client does about a failure that passes and left the target untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Temper {
    Hasty,
    Patient,
}

/// Calls one peer's methods. Clones share one session.
///
/// The session is opened by the first call. A call on a session that has ended meanwhile opens another; a failed dial is
/// answered at once, and for a growing pause (10 ms to 1 s) all calls fail with the same error, so a dead peer costs its
/// callers no time.
///
/// `verify/tests/runtimes/rpc.rs` shows every kind of call.
///
/// Example: `verify/tests/runtimes/rpc.rs`.
pub struct Client<R> {
    inner: Arc<Inner<R>>,
    trace: u64,
    temper: Temper,
}

impl<R> Clone for Client<R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), trace: self.trace, temper: self.temper }
    }
}

impl<R> fmt::Debug for Client<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("trace", &self.trace).field("temper", &self.temper).finish_non_exhaustive()
    }
}

impl<R: Runtime> Client<R> {
    /// A client of the node at `target`, with default limits.
    #[must_use]
    pub fn new(runtime: R, target: Target, credentials: Credentials) -> Self {
        let dialer = Dialer::new(runtime.clone(), target, credentials);
        Self::with_connect(runtime, dialer, Limits::default())
    }

    /// A client whose sessions `connect` opens.
    #[must_use]
    pub fn with_connect(runtime: R, connect: impl Connect, limits: Limits) -> Self {
        // Ids must differ from those of a client that this process had before: peers remember them.
        let next_id = AtomicU64::new(runtime.now().as_nanos().max(1));
        let inner = Inner { runtime, connect: Box::new(connect), limits, link: Mutex::default(), next_id };
        Self { inner: Arc::new(inner), trace: 0, temper: Temper::Hasty }
    }

    /// The same client, whose calls carry `trace`.
    #[must_use]
    pub fn with_trace(&self, trace: u64) -> Self {
        Self { trace, ..self.clone() }
    }

    /// The same client, which tries again, until the deadline, what failed for a passing cause and left the target
    /// untouched: a dead or busy peer, one that is going away.
    #[must_use]
    pub fn patient(&self) -> Self {
        Self { temper: Temper::Patient, ..self.clone() }
    }

    /// Calls `method` and waits for its answer. Dropping the future cancels the call.
    ///
    /// # Errors
    /// No answer; [`RpcError::is_untouched`] says whether the target may have done it nevertheless.
    pub async fn call<Req, Resp>(&self, method: u16, request: &Req, deadline: Instant) -> Result<Resp, RpcError>
    where
        Req: Message,
        Resp: Message + Default,
    {
        let body = encode(request)?;
        let answer = self.persist(method, None, &body, deadline).await?;
        Resp::decode(&*answer).map_err(|source| RpcError::Answer { method, source })
    }

    /// Calls a `method` that changes something, and tries again until the deadline when the cause passes. All attempts
    /// carry one id, so the target does it once. Only if the target restarted in between, and may or may not have done
    /// it, the last error is returned instead.
    ///
    /// # Errors
    /// No answer; [`RpcError::is_untouched`] says whether the target may have done it nevertheless.
    pub async fn mutate<Req, Resp>(&self, method: u16, request: &Req, deadline: Instant) -> Result<Resp, RpcError>
    where
        Req: Message,
        Resp: Message + Default,
    {
        let body = encode(request)?;
        let id = NonZeroU64::new(self.inner.next_id.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX);
        let answer = self.persist(method, Some(id), &body, deadline).await?;
        Resp::decode(&*answer).map_err(|source| RpcError::Answer { method, source })
    }

    /// Calls a `method` that answers by a stream, which ends by `deadline`. Dropping the stream cancels it.
    ///
    /// # Errors
    /// The stream could not be begun; its own failures come as its last item.
    pub async fn stream<Req, Item>(
        &self,
        method: u16,
        request: &Req,
        deadline: Instant,
    ) -> Result<Replies<Item>, RpcError>
    where
        Req: Message,
        Item: Message + Default,
    {
        let body = encode(request)?;
        let window = self.inner.limits.window;
        let (runtime, span) = (self.inner.runtime.clone(), deadline.since(self.inner.runtime.now()));
        let alarm = Box::pin(async move { sleep_until(&runtime, deadline).await });
        let mut unmet = None;
        let begun = self.attempt(method, deadline, &mut unmet, |channel, span| {
            channel.stream(self.ask(method, None, span), window, body.clone())
        });
        Ok(Replies::new(begun.await?, alarm, method, span, window))
    }

    /// Who is at the other end; opens a session if there is none.
    ///
    /// # Errors
    /// [`RpcError::Unreachable`], or the deadline.
    pub async fn peer(&self, deadline: Instant) -> Result<Peer, RpcError> {
        let start = self.inner.runtime.now();
        let late = |_| RpcError::Deadline { method: 0, waited: deadline.since(start) };
        by(&self.inner.runtime, deadline, self.inner.channel()).await.map_err(late)?.map(|channel| channel.peer)
    }

    fn ask(&self, method: u16, id: Option<NonZeroU64>, span: Duration) -> Ask {
        Ask { method, span, id, trace: self.trace }
    }

    /// One call, tried again as far as that is asked for and safe.
    async fn persist(
        &self,
        method: u16,
        id: Option<NonZeroU64>,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, RpcError> {
        let runtime = &self.inner.runtime;
        let mut pause = PAUSE_MIN;
        // An attempt that may have been done, and the incarnation of the peer that may have done it.
        let mut doubt: Option<(RpcError, u64)> = None;
        loop {
            let mut met = None;
            let outcome = self
                .attempt(method, deadline, &mut met, |channel, span| {
                    let restarted = doubt.clone().filter(|(_, then)| *then != incarnation(&channel.peer));
                    let (ask, body) = (self.ask(method, id, span), body.to_vec());
                    async move {
                        match restarted {
                            Some((error, _)) => Err(error),
                            None => channel.call(ask, body).await,
                        }
                    }
                })
                .await;
            let Err(error) = outcome else { return outcome };
            let may_retry = match id {
                Some(_) => error.is_passing(),
                None => error.is_passing() && error.is_untouched() && self.temper == Temper::Patient,
            };
            let met = met.as_ref().map(incarnation);
            let restarted = matches!((&doubt, met), (Some((_, then)), Some(now)) if *then != now);
            let wait = error.retry_after().unwrap_or(pause);
            if restarted || !may_retry || runtime.now() + wait >= deadline {
                return Err(error);
            }
            if doubt.is_none() && !error.is_untouched() {
                doubt = met.map(|met| (error, met));
            }
            pause = pause.saturating_mul(2).min(PAUSE_MAX);
            runtime.sleep(wait).await;
        }
    }

    /// One attempt by `deadline`, on a session that works; `met` is the peer that it was made at.
    async fn attempt<T, F>(
        &self,
        method: u16,
        deadline: Instant,
        met: &mut Option<Peer>,
        begin: impl Fn(Arc<Channel>, Duration) -> F,
    ) -> Result<T, RpcError>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let runtime = &self.inner.runtime;
        let start = runtime.now();
        let work = async {
            // The session may have ended unnoticed, once: a second one that ends at once is the peer's doing.
            for _ in 0..2 {
                let channel = self.inner.channel().await?;
                *met = Some(channel.peer);
                let span = deadline.since(runtime.now());
                match begin(channel, span).await {
                    Err(RpcError::PeerGone { far_end: FarEnd::Untouched, .. }) => {}
                    outcome => {
                        return outcome.map_err(|error| error.of_call(method, deadline.since(start)));
                    }
                }
            }
            Err(RpcError::PeerGone { detail: "its sessions end at once".into(), far_end: FarEnd::Untouched })
        };
        let late = |_| RpcError::Deadline { method, waited: deadline.since(start) };
        by(runtime, deadline, work).await.map_err(late)?
    }
}

impl<R: Runtime> Inner<R> {
    /// The session that is open, or a new one.
    async fn channel(&self) -> Result<Arc<Channel>, RpcError> {
        let mut link = self.link.lock().await;
        if let Some(channel) = link.channel.as_ref().filter(|channel| channel.is_usable()) {
            return Ok(channel.clone());
        }
        link.channel = None;
        let now = self.runtime.now();
        if let Some((source, next)) = link.failed.as_ref().filter(|(_, next)| *next > now) {
            return Err(RpcError::Unreachable { source: source.clone(), retry_after: next.since(now) });
        }
        match self.connect.connect(now + self.limits.dial_span_max).await {
            Ok(connection) => {
                let channel = Arc::new(Channel::new(&self.runtime, connection, self.limits));
                *link = Link { channel: Some(channel.clone()), ..Link::default() };
                Ok(channel)
            }
            Err(error) => {
                link.pause = link.pause.saturating_mul(2).clamp(PAUSE_MIN, PAUSE_MAX);
                let source = Arc::new(error);
                let pause = apart(link.pause);
                link.failed = Some((source.clone(), self.runtime.now() + pause));
                Err(RpcError::Unreachable { source, retry_after: pause })
            }
        }
    }
}

fn incarnation(peer: &Peer) -> u64 {
    peer.hello.identity.incarnation
}

fn encode(message: &impl Message) -> Result<Vec<u8>, RpcError> {
    let len = message.encoded_len();
    if len > usize::try_from(MESSAGE_LEN_MAX).unwrap_or(usize::MAX) {
        return Err(RpcError::TooLarge { len });
    }
    Ok(message.encode_to_vec())
}

/// Between a half of `span` and the whole, by chance, so that the clients of one node do not come back to it in step.
fn apart(span: Duration) -> Duration {
    let half = span.as_nanos() / 2;
    // Without random numbers they come back in step.
    let chance = u64::from(getrandom::u32().unwrap_or(u32::MAX));
    Duration::from_nanos(half + ((half >> 16) * (chance >> 16)))
}
