//! What `node::rpc` promises, with every pair of runtimes at the two ends.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll};

use futures::future::{self, BoxFuture, FutureExt};
use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, StreamExt};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::rpc::{Frame, Head, Request};
use millpond_node::metrics::Registry;
use millpond_node::rpc::{
    Client, Connect, Connection, Context, Dialer, FarEnd, Limits, MESSAGE_LEN_MAX, Reason, Refusal, Router, RpcError,
    serve,
};
use millpond_node::runtime::{Runtime, Stop, Task, local_addr, start, within};
use millpond_node::session::{self, Acceptor, Credentials, SessionError};

use crate::runtime::loopback;
use crate::session::identity;

const ECHO: u16 = 0x7f01;
const COUNT: u16 = 0x7f02;
const SLEEP: u16 = 0x7f03;
const PANIC: u16 = 0x7f04;
const ADD: u16 = 0x7f05;
const WORDS: u16 = 0x7f06;

/// A number and some bytes: every request and answer here.
#[derive(Clone, PartialEq, prost::Message)]
struct Note {
    #[prost(uint64, tag = "1")]
    number: u64,
    #[prost(bytes = "vec", tag = "2")]
    bytes: Vec<u8>,
}

fn note(number: u64) -> Note {
    Note { number, bytes: Vec::new() }
}

fn soon<R: Runtime>(runtime: &R) -> Instant {
    runtime.now() + Duration::from_secs(10)
}

/// What the handlers of a target leave behind.
#[derive(Default)]
struct Traces {
    running: AtomicUsize,
    sent: AtomicU64,
    sum: AtomicU64,
    /// Cuts the connections that go through a [`Cutter`].
    cut: AtomicBool,
}

struct Running(Arc<Traces>);

impl Running {
    fn new(traces: &Arc<Traces>) -> Self {
        traces.running.fetch_add(1, Ordering::SeqCst);
        Self(traces.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

fn router<R: Runtime>(runtime: &R, traces: &Arc<Traces>, registry: &Registry) -> Router {
    let (sleeper, asleep, counted, added) = (runtime.clone(), traces.clone(), traces.clone(), traces.clone());
    Router::new()
        .call(ECHO, |_: Context, request: Note| async move { Ok::<Note, Refusal>(request) })
        .call(SLEEP, move |_: Context, request: Note| {
            let (runtime, running) = (sleeper.clone(), Running::new(&asleep));
            async move {
                runtime.sleep(Duration::from_millis(request.number)).await;
                drop(running);
                Ok::<Note, Refusal>(request)
            }
        })
        .call(PANIC, |_: Context, request: Note| async move {
            assert_ne!(request.number, 13, "this panic is part of the test");
            Ok::<Note, Refusal>(Note { number: 0, bytes: vec![7; usize::try_from(request.number).unwrap()] })
        })
        .stream(COUNT, move |_: Context, request: Note, mut items| {
            let running = Running::new(&counted);
            async move {
                for number in 0..request.number {
                    items.send(&note(number)).await?;
                    running.0.sent.fetch_add(1, Ordering::SeqCst);
                }
                if request.bytes.is_empty() { Ok(()) } else { Err(Refusal::new(Reason::NotFound, "no more")) }
            }
        })
        .mutation(ADD, move |context: Context, request: Note| {
            let traces = added.clone();
            async move {
                assert!(context.id.is_some() && request.number != 13, "this panic is part of the test");
                let sum = traces.sum.fetch_add(request.number, Ordering::SeqCst) + request.number;
                traces.cut.store(!request.bytes.is_empty(), Ordering::SeqCst);
                Ok::<Note, Refusal>(note(sum))
            }
        })
        .stream(WORDS, |context: Context, _: Note, mut items| async move {
            items.send(&note(context.trace)).await?;
            future::pending().await
        })
        .with_metrics(registry)
}

/// A node that serves the methods above.
struct Target {
    address: SocketAddr,
    traces: Arc<Traces>,
    registry: Registry,
    stop: Stop,
    task: Task<()>,
}

impl Target {
    async fn open<R: Runtime>(runtime: &R, limits: Limits) -> Self {
        Self::open_at(runtime, limits, loopback()).await
    }

    async fn open_at<R: Runtime>(runtime: &R, limits: Limits, address: SocketAddr) -> Self {
        let listener = runtime.listen(address).await.unwrap();
        let address = local_addr(&listener).unwrap();
        let acceptor = Acceptor::new(Credentials::new(identity(2, 1)), session::Limits::default());
        let (traces, registry, stop) = (Arc::new(Traces::default()), Registry::new(), Stop::new());
        let router = Arc::new(router(runtime, &traces, &registry));
        let (owner, halt) = (runtime.clone(), stop.clone());
        let task = start(runtime, async move {
            let (spawner, router) = (owner.clone(), router.clone());
            let (sender, ended) = futures::channel::mpsc::unbounded::<()>();
            let until = halt.clone();
            let begin = move |session: session::Session<R::Stream>| {
                let (runtime, router, stop, sender) = (spawner.clone(), router.clone(), until.clone(), sender.clone());
                spawner.spawn(async move {
                    let served = serve(&runtime, session.stream, session.peer, router, limits, &stop).await;
                    drop((served, sender));
                });
            };
            acceptor.run(&owner, &listener, &halt, begin).await.unwrap();
            // All senders are gone once all sessions ended.
            ended.collect::<Vec<_>>().await;
        });
        Self { address, traces, registry, stop, task }
    }

    fn client<R: Runtime>(&self, runtime: &R) -> Client<R> {
        Client::new(runtime.clone(), self.address.into(), Credentials::new(identity(1, 1)))
    }

    fn dialer<R: Runtime>(&self, runtime: &R) -> Dialer<R> {
        Dialer::new(runtime.clone(), self.address.into(), Credentials::new(identity(1, 1)))
    }

    async fn idle<R: Runtime>(&self, runtime: &R) {
        let idle = async {
            while self.traces.running.load(Ordering::SeqCst) > 0 {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        within(runtime, Duration::from_secs(5), idle).await.expect("a handler outlived its call");
    }
}

async fn many_calls_share_one_session<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    let calls = (0..200_u64).map(|number| {
        let (client, deadline) = (client.clone(), soon(&a));
        let bytes = vec![number.to_le_bytes()[0]; usize::try_from(number * 300).unwrap()];
        start(&a, async move {
            let request = Note { number, bytes };
            let answer: Note = client.call(ECHO, &request, deadline).await.unwrap();
            assert_eq!(answer, request);
        })
    });
    future::join_all(calls.collect::<Vec<_>>()).await;
    let whole = Note { number: 1, bytes: vec![5; usize::try_from(MESSAGE_LEN_MAX).unwrap() - 16] };
    assert_eq!(client.call::<_, Note>(ECHO, &whole, soon(&a)).await.unwrap(), whole);
    let text = target.registry.text();
    assert!(text.contains("millpond_rpc_calls_total{method=\"0x7f01\",outcome=\"done\"} 201"), "{text}");
}

async fn a_stream_waits_for_its_reader<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    let mut items = client.stream::<_, Note>(COUNT, &note(1000), soon(&a)).await.unwrap();
    assert_eq!(items.next().await.unwrap().unwrap(), note(0));
    a.sleep(Duration::from_millis(50)).await;
    let ahead = target.traces.sent.load(Ordering::SeqCst);
    assert!(ahead <= u64::from(Limits::default().window), "{ahead} items were sent to a reader that took one");
    for number in 1..1000 {
        assert_eq!(items.next().await.unwrap().unwrap(), note(number));
    }
    assert!(items.next().await.is_none() && items.next().await.is_none());
    // A stream that ends badly says so after its items.
    let failing = Note { number: 2, bytes: vec![1] };
    let items = client.stream::<_, Note>(COUNT, &failing, soon(&a)).await.unwrap().collect::<Vec<_>>().await;
    assert_eq!(items.len(), 3);
    assert_eq!(items[2].as_ref().unwrap_err().reason(), Some(Reason::NotFound));
    let traced = client.with_trace(77).stream::<_, Note>(WORDS, &note(0), soon(&a)).await.unwrap();
    assert_eq!(traced.take(1).next().await.unwrap().unwrap(), note(77));
}

async fn a_deadline_ends_a_call_at_both_ends<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    let deadline = a.now() + Duration::from_millis(40);
    let outcome = client.call::<_, Note>(SLEEP, &note(60_000), deadline).await;
    assert!(matches!(outcome, Err(RpcError::Deadline { method: SLEEP, .. })), "{outcome:?}");
    assert!(a.now().since(deadline) < Duration::from_secs(2));
    target.idle(&b).await;
    let deadline = a.now() + Duration::from_millis(40);
    let mut items = client.stream::<_, Note>(WORDS, &note(0), deadline).await.unwrap();
    items.next().await.unwrap().unwrap();
    let last = items.next().await.unwrap().unwrap_err();
    assert!(matches!(&last, RpcError::Deadline { .. }) && items.next().await.is_none(), "{last}");
}

async fn dropping_a_call_cancels_it<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    {
        let long = note(60_000);
        let call = std::pin::pin!(client.call::<_, Note>(SLEEP, &long, soon(&a)));
        let begun = async {
            while target.traces.running.load(Ordering::SeqCst) == 0 {
                a.sleep(Duration::from_millis(1)).await;
            }
        };
        future::select(call, std::pin::pin!(begun)).await;
    }
    target.idle(&b).await;
    let mut items = client.stream::<_, Note>(COUNT, &note(1_000_000), soon(&a)).await.unwrap();
    items.next().await.unwrap().unwrap();
    drop(items);
    target.idle(&b).await;
    assert!(target.traces.sent.load(Ordering::SeqCst) < 1000);
    // So does closing the session.
    let mut items = client.stream::<_, Note>(COUNT, &note(1_000_000), soon(&a)).await.unwrap();
    items.next().await.unwrap().unwrap();
    drop((items, client));
    target.idle(&b).await;
}

async fn a_busy_target_says_when_to_come_back<A: Runtime, B: Runtime>(a: A, b: B) {
    let mut limits = Limits::default();
    limits.calls_max = 2;
    let target = Target::open(&b, limits).await;
    let client = target.client(&a);
    let (short, long) = (note(5), note(30));
    let sleeps: Vec<_> = (0..8).map(|_| client.call::<_, Note>(SLEEP, &long, soon(&a))).collect();
    let outcomes = future::join_all(sleeps).await;
    let busy: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(busy.len(), 6, "{outcomes:?}");
    for error in busy {
        assert_eq!(error.reason(), Some(Reason::Busy));
        assert!(error.retry_after().is_some() && error.is_untouched() && error.is_passing());
    }
    let patient = client.patient();
    let sleeps: Vec<_> = (0..8).map(|_| patient.call::<_, Note>(SLEEP, &short, soon(&a))).collect();
    assert!(future::join_all(sleeps).await.iter().all(Result::is_ok));
    // The caller's own bound is told apart.
    limits.calls_max = 1;
    let narrow = Client::with_connect(a.clone(), target.dialer(&a), limits);
    let both = [1, 2].map(|_| narrow.call::<_, Note>(SLEEP, &long, soon(&a)));
    let outcomes = future::join_all(both).await;
    assert!(outcomes.iter().any(|outcome| matches!(outcome, Err(RpcError::Full { max: 1 }))), "{outcomes:?}");
}

async fn a_handler_that_panics_is_an_answer<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    let refused = client.call::<_, Note>(PANIC, &note(13), soon(&a)).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::Failed));
    let refused = client.mutate::<_, Note>(ADD, &note(13), soon(&a)).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::Failed));
    assert_eq!(client.call::<_, Note>(ECHO, &note(1), soon(&a)).await.unwrap(), note(1));
    assert_eq!(client.mutate::<_, Note>(ADD, &note(2), soon(&a)).await.unwrap(), note(2));
}

async fn what_makes_no_sense_is_refused<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    let reason = async |method| client.call::<_, Note>(method, &note(1), soon(&a)).await.unwrap_err().reason();
    assert_eq!(reason(0x7fff).await, Some(Reason::UnknownMethod));
    assert_eq!(reason(COUNT).await, Some(Reason::Malformed));
    assert_eq!(reason(ADD).await, Some(Reason::Malformed), "a mutation without an id");
    let stream = client.stream::<_, Note>(ECHO, &note(1), soon(&a)).await.unwrap().next().await.unwrap();
    assert_eq!(stream.unwrap_err().reason(), Some(Reason::Malformed));

    /// Field 1 as a string, where the target expects a number.
    #[derive(Clone, PartialEq, prost::Message)]
    struct Other {
        #[prost(string, tag = "1")]
        text: String,
    }
    let other = Other { text: "x".into() };
    let refused = client.call::<_, Note>(ECHO, &other, soon(&a)).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::Malformed));
    let misread = client.call::<_, Other>(ECHO, &note(1), soon(&a)).await;
    assert!(matches!(misread, Err(RpcError::Answer { method: ECHO, .. })));

    let long = Note { number: 1, bytes: vec![0; usize::try_from(MESSAGE_LEN_MAX).unwrap()] };
    let outcome = client.call::<_, Note>(ECHO, &long, soon(&a)).await;
    assert!(matches!(outcome, Err(RpcError::TooLarge { .. })));
    let long = client.call::<_, Note>(PANIC, &note(u64::from(MESSAGE_LEN_MAX)), soon(&a)).await;
    assert_eq!(long.unwrap_err().reason(), Some(Reason::TooLarge));
    assert_eq!(client.call::<_, Note>(ECHO, &note(1), soon(&a)).await.unwrap(), note(1), "the session lives on");
}

/// A stream that breaks, before anything more is read, when the target's handler says so.
struct Cutter<S> {
    stream: S,
    traces: Arc<Traces>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Cutter<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buf: &mut [u8],
    ) -> Poll<std::io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buf);
        if polled.is_ready() && self.traces.cut.swap(false, Ordering::SeqCst) {
            return Poll::Ready(Err(std::io::ErrorKind::ConnectionReset.into()));
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Cutter<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }
    fn poll_close(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(context)
    }
}

/// Dials through cutters, and pretends that the target restarted at each dial if `restarts` is 1.
struct Cutting<R> {
    dialer: Dialer<R>,
    traces: Arc<Traces>,
    restarts: u64,
    dials: AtomicU64,
}

impl<R: Runtime> Connect for Cutting<R> {
    fn connect(&self, deadline: Instant) -> BoxFuture<'_, Result<Connection, SessionError>> {
        async move {
            let Connection { stream, mut peer } = self.dialer.connect(deadline).await?;
            peer.hello.identity.incarnation += self.restarts * self.dials.fetch_add(1, Ordering::SeqCst);
            Ok(Connection { stream: Box::new(Cutter { stream, traces: self.traces.clone() }), peer })
        }
        .boxed()
    }
}

async fn a_mutation_whose_answer_was_lost_is_done_once<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let cutting = |restarts| {
        let (dialer, traces) = (target.dialer(&a), target.traces.clone());
        Client::with_connect(a.clone(), Cutting { dialer, traces, restarts, dials: 0.into() }, Limits::default())
    };
    let cut = |number| Note { number, bytes: vec![1] };
    let client = cutting(0);
    assert_eq!(client.mutate::<_, Note>(ADD, &cut(5), soon(&a)).await.unwrap(), note(5));
    assert_eq!(target.traces.sum.load(Ordering::SeqCst), 5, "asked twice, done once");
    assert_eq!(client.mutate::<_, Note>(ADD, &cut(5), soon(&a)).await.unwrap(), note(10), "another one is another");
    // A target that restarted has forgotten, so the caller is told that it may have been done.
    let error = cutting(1).mutate::<_, Note>(ADD, &cut(1), soon(&a)).await.unwrap_err();
    assert!(matches!(&error, RpcError::PeerGone { far_end: FarEnd::Unknown, .. }), "{error:?}");
    assert_eq!(target.traces.sum.load(Ordering::SeqCst), 11, "and it was not asked again");
}

async fn a_dead_peer_costs_no_time_and_is_found_again<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let (client, address) = (target.client(&a), target.address);
    client.call::<_, Note>(ECHO, &note(1), soon(&a)).await.unwrap();
    let in_flight = start(&a, {
        let (client, deadline) = (client.clone(), soon(&a));
        async move { client.call::<_, Note>(SLEEP, &note(60_000), deadline).await }
    });
    while target.traces.running.load(Ordering::SeqCst) == 0 {
        a.sleep(Duration::from_millis(1)).await;
    }
    // Drains for the default span in vain if the call in flight does not end, so cancel that first.
    drop(in_flight);
    target.idle(&b).await;
    target.stop.stop();
    target.task.await;
    let begun = a.now();
    for _ in 0..20 {
        let outcome = client.call::<_, Note>(ECHO, &note(2), soon(&a)).await;
        let Err(error) = outcome else { panic!("nobody is there") };
        assert!(error.is_untouched() && error.is_passing(), "{error:?}");
    }
    assert!(a.now().since(begun) < Duration::from_secs(2));
    let patient = client.patient();
    let deadline = soon(&a);
    let waiting = start(&a, async move { patient.call::<_, Note>(ECHO, &note(3), deadline).await });
    let target = Target::open_at(&b, Limits::default(), address).await;
    assert_eq!(waiting.await.unwrap(), note(3));
    assert_eq!(client.call::<_, Note>(ECHO, &note(4), soon(&a)).await.unwrap(), note(4));
    drop(target);
}

async fn a_drained_target_ends_what_it_has_begun<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    let begun = start(&a, {
        let (client, deadline) = (client.clone(), soon(&a));
        async move { client.call::<_, Note>(SLEEP, &note(150), deadline).await }
    });
    while target.traces.running.load(Ordering::SeqCst) == 0 {
        a.sleep(Duration::from_millis(1)).await;
    }
    target.stop.stop();
    let late = client.call::<_, Note>(ECHO, &note(1), soon(&a)).await;
    assert!(late.as_ref().is_err_and(RpcError::is_untouched) || late.is_ok(), "{late:?}");
    assert_eq!(begun.await.unwrap(), note(150), "what was in flight got its answer");
    within(&b, Duration::from_secs(5), target.task).await.expect("the target did not end");
    assert!(client.call::<_, Note>(ECHO, &note(1), soon(&a)).await.is_err());
}

async fn a_silent_peer_is_gone_before_the_deadline<A: Runtime, B: Runtime>(a: A, b: B) {
    // A peer that shakes hands and then neither reads nor writes, like a stopped process.
    let listener = b.listen(loopback()).await.unwrap();
    let address = local_addr(&listener).unwrap();
    let owner = b.clone();
    let _frozen = start(&b, async move {
        let acceptor = Acceptor::new(Credentials::new(identity(2, 1)), session::Limits::default());
        let (stream, from) = owner.accept(&listener).await.unwrap();
        let session = acceptor.accept(&owner, stream, from).await.unwrap();
        future::pending::<()>().await;
        drop(session);
    });
    let mut limits = Limits::default();
    (limits.ping_after, limits.gone_after) = (Duration::from_millis(20), Duration::from_millis(100));
    let dialer = Dialer::new(a.clone(), address.into(), Credentials::new(identity(1, 1)));
    let client = Client::with_connect(a.clone(), dialer, limits);
    let begun = a.now();
    let big = Note { number: 1, bytes: vec![0; 4_000_000] };
    let outcome = client.call::<_, Note>(ECHO, &big, soon(&a)).await;
    assert!(matches!(&outcome, Err(RpcError::PeerGone { detail, .. }) if detail.contains("silent")), "{outcome:?}");
    assert!(a.now().since(begun) < Duration::from_secs(3));
    // One that lives is not gone, however long its handler takes.
    let target = Target::open(&b, limits).await;
    let client = Client::with_connect(a.clone(), target.dialer(&a), limits);
    assert_eq!(client.call::<_, Note>(SLEEP, &note(400), soon(&a)).await.unwrap(), note(400));
}

/// A control session whose frames the test writes by hand.
async fn raw<R: Runtime>(runtime: &R, target: &Target) -> Box<dyn millpond_node::rpc::Duplex> {
    target.dialer(runtime).connect(soon(runtime)).await.unwrap().stream
}

fn request(call: u64, method: u16, window: u32) -> [u8; 48] {
    let span = Duration::from_secs(9);
    Head { frame: Frame::Request(Request { call, method, span, id: None, trace: 0, window }), body_len: 0 }.encode()
}

async fn a_peer_that_breaks_the_protocol_loses_its_session_only<A: Runtime, B: Runtime>(a: A, b: B) {
    let target = Target::open(&b, Limits::default()).await;
    let client = target.client(&a);
    client.call::<_, Note>(ECHO, &note(1), soon(&a)).await.unwrap();
    let head = |frame| Head { frame, body_len: 0 }.encode();
    let twice = [request(7, WORDS, 1), request(7, WORDS, 1)].concat();
    let greedy = [request(8, WORDS, 4000), head(Frame::Credit { call: 8, items: 4000 })].concat();
    let crimes =
        [vec![0x55; 48], head(Frame::Answer { call: 1 }).to_vec(), head(Frame::Goodbye).to_vec(), twice, greedy];
    for crime in crimes {
        let mut session = raw(&a, &target).await;
        session.write_all(&crime).await.unwrap();
        let closed = within(&a, Duration::from_secs(5), session.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "the session was left open");
        target.idle(&b).await;
    }
    assert_eq!(client.call::<_, Note>(ECHO, &note(2), soon(&a)).await.unwrap(), note(2));
}

async fn a_target_that_breaks_the_protocol_fails_its_calls<A: Runtime, B: Runtime>(a: A, b: B) {
    let head = |frame| Head { frame, body_len: 0 }.encode().to_vec();
    let flood = [Frame::Item { call: 1 }; 65].map(head).concat();
    let lies = [head(Frame::Cancel { call: 1 }), head(Frame::Answer { call: 1 }), flood, vec![0xaa; 48]];
    for lie in lies {
        let listener = b.listen(loopback()).await.unwrap();
        let address = local_addr(&listener).unwrap();
        let owner = b.clone();
        let liar = start(&b, async move {
            let acceptor = Acceptor::new(Credentials::new(identity(2, 1)), session::Limits::default());
            let (stream, from) = owner.accept(&listener).await.unwrap();
            let mut session = acceptor.accept(&owner, stream, from).await.unwrap();
            session.stream.read_exact(&mut [0; 48]).await.unwrap();
            session.stream.write_all(&lie).await.unwrap();
            let _ = session.stream.read_to_end(&mut Vec::new()).await;
        });
        let client = Client::new(a.clone(), address.into(), Credentials::new(identity(1, 1)));
        let items = client.stream::<_, Note>(COUNT, &note(0), soon(&a)).await.unwrap();
        // Nothing is read, so no more credit is given, until the session is closed for the lie.
        within(&b, Duration::from_secs(5), liar).await.expect("the session was left open");
        let last = within(&a, Duration::from_secs(5), items.collect::<Vec<_>>()).await.unwrap().pop().unwrap();
        assert!(matches!(&last, Err(RpcError::Violation { .. })), "{last:?}");
    }
}

on_pairs!(
    many_calls_share_one_session,
    a_stream_waits_for_its_reader,
    a_deadline_ends_a_call_at_both_ends,
    dropping_a_call_cancels_it,
    a_busy_target_says_when_to_come_back,
    a_handler_that_panics_is_an_answer,
    what_makes_no_sense_is_refused,
    a_mutation_whose_answer_was_lost_is_done_once,
    a_dead_peer_costs_no_time_and_is_found_again,
    a_drained_target_ends_what_it_has_begun,
    a_silent_peer_is_gone_before_the_deadline,
    a_peer_that_breaks_the_protocol_loses_its_session_only,
    a_target_that_breaks_the_protocol_fails_its_calls,
);
