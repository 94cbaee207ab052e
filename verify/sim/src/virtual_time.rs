//! A runtime on one thread, under virtual time: which of the tasks that could run does, is drawn from a seed.
//!
//! Time stands still while a task can run, then jumps to the next timer. Tasks and timers belong to nodes; those of a frozen
//! node stay where they are, as after SIGSTOP. The same seed and the same tasks give the same run.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::future::BoxFuture;
use futures::io::{AsyncRead, AsyncWrite};
use futures::task::{ArcWake, waker};
use millpond_core::random;
use millpond_core::time::{Duration, Instant};
use millpond_node::runtime::{Readiness, Runtime, Stream};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What is drawn from a seed.
#[derive(Clone, Debug)]
pub(crate) struct Random(random::Random);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(random::Random::new(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Whether a chance of one in `of` came true.
    pub(crate) fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    /// A span up to `max`.
    pub(crate) fn span(&mut self, max: Duration) -> Duration {
        Duration::from_nanos(self.below(max.as_nanos() + 1))
    }
}

struct State {
    now: Instant,
    random: Random,
    tasks: BTreeMap<u64, (usize, BoxFuture<'static, ()>)>,
    timers: BTreeMap<(Instant, u64), Waker>,
    watched: BTreeMap<u64, (Arc<OwnedFd>, Waker)>,
    frozen: BTreeSet<usize>,
    made: u64,
    steps: u64,
}

/// Names of the tasks that may run.
type Ready = Arc<Mutex<BTreeSet<u64>>>;

/// A handle of the runtime, for one node. Clones are for the same node.
#[derive(Clone)]
pub(crate) struct Virtual {
    state: Arc<Mutex<State>>,
    ready: Ready,
    node: usize,
}

struct Wake {
    ready: Ready,
    task: u64,
}

impl ArcWake for Wake {
    fn wake_by_ref(this: &Arc<Self>) {
        this.ready.lock().insert(this.task);
    }
}

impl Virtual {
    pub(crate) fn new(seed: u64) -> Self {
        let state = State {
            now: Instant::ZERO + Duration::from_secs(1),
            random: Random::new(seed),
            tasks: BTreeMap::new(),
            timers: BTreeMap::new(),
            watched: BTreeMap::new(),
            frozen: BTreeSet::new(),
            made: 0,
            steps: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), ready: Ready::default(), node: 0 }
    }

    /// The same runtime for another node.
    pub(crate) fn of_node(&self, node: usize) -> Self {
        Self { node, ..self.clone() }
    }

    /// How often a task was polled so far.
    pub(crate) fn steps(&self) -> u64 {
        self.state.lock().steps
    }

    /// Drops all tasks, which hold the runtime that holds them.
    pub(crate) fn clear(&self) {
        let tasks = std::mem::take(&mut self.state.lock().tasks);
        drop(tasks);
    }

    pub(crate) fn freeze(&self, node: usize) {
        self.state.lock().frozen.insert(node);
    }

    pub(crate) fn thaw(&self, node: usize) {
        self.state.lock().frozen.remove(&node);
    }

    pub(crate) fn is_frozen(&self, node: usize) -> bool {
        self.state.lock().frozen.contains(&node)
    }

    /// Polls one task, or lets time pass until one can be, or until `limit`. `false`: the limit is reached.
    pub(crate) fn step(&self, limit: Instant) -> bool {
        let Some((task, node, mut future)) = self.draw().or_else(|| self.wait(limit)) else { return false };
        let waker = waker(Arc::new(Wake { ready: Arc::clone(&self.ready), task }));
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.state.lock().tasks.insert(task, (node, future));
        }
        true
    }

    /// Takes one of the tasks that can run.
    fn draw(&self) -> Option<(u64, usize, BoxFuture<'static, ()>)> {
        let mut state = self.state.lock();
        let mut ready = self.ready.lock();
        ready.retain(|task| state.tasks.contains_key(task));
        let runs = |task: &&u64| state.tasks.get(task).is_some_and(|(node, _)| !state.frozen.contains(node));
        let able: Vec<u64> = ready.iter().filter(runs).copied().collect();
        if able.is_empty() {
            return None;
        }
        let drawn = usize::try_from(state.random.below(able.len() as u64)).ok()?;
        let task = *able.get(drawn)?;
        ready.remove(&task);
        state.steps += 1;
        state.tasks.remove(&task).map(|(node, future)| (task, node, future))
    }

    /// Nobody can run: looks at the descriptors, then at the clock.
    fn wait(&self, limit: Instant) -> Option<(u64, usize, BoxFuture<'static, ()>)> {
        loop {
            let mut state = self.state.lock();
            let readable = |fd: &OwnedFd| {
                poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|count| count > 0)
            };
            let found: Vec<u64> =
                state.watched.iter().filter(|(_, (fd, _))| readable(fd)).map(|(name, _)| *name).collect();
            let mut wakers: Vec<Waker> =
                found.iter().filter_map(|name| state.watched.remove(name)).map(|(_, waker)| waker).collect();
            if wakers.is_empty() {
                let due = state.timers.first_key_value().map(|((due, _), _)| *due).filter(|due| *due <= limit);
                let Some(due) = due else {
                    state.now = state.now.max(limit);
                    return None;
                };
                state.now = state.now.max(due);
                let now = state.now;
                let later = state.timers.split_off(&(now, u64::MAX));
                wakers.extend(std::mem::replace(&mut state.timers, later).into_values());
            }
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
            if let Some(drawn) = self.draw() {
                return Some(drawn);
            }
        }
    }

    fn name(&self) -> u64 {
        let mut state = self.state.lock();
        state.made += 1;
        state.made
    }
}

impl Runtime for Virtual {
    type Stream = NoSocket;
    type Listener = NoSocket;
    type Readiness = Watched;

    fn now(&self) -> Instant {
        self.state.lock().now
    }

    fn sleep(&self, span: Duration) -> impl Future<Output = ()> + Send + use<> {
        let timer = Timer { runtime: self.clone(), key: (self.now() + span, self.name()) };
        poll_fn(move |context| {
            let mut state = timer.runtime.state.lock();
            if state.now >= timer.key.0 {
                return Poll::Ready(());
            }
            state.timers.insert(timer.key, context.waker().clone());
            Poll::Pending
        })
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let name = self.name();
        self.state.lock().tasks.insert(name, (self.node, Box::pin(task)));
        self.ready.lock().insert(name);
    }

    fn spawn_blocking(&self, job: impl FnOnce() + Send + 'static) {
        self.spawn(async { job() });
    }

    fn dial(&self, _: SocketAddr) -> impl Future<Output = io::Result<NoSocket>> + Send + use<> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn listen(&self, _: SocketAddr) -> impl Future<Output = io::Result<NoSocket>> + Send + use<> {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }

    async fn accept(&self, listener: &NoSocket) -> io::Result<(NoSocket, SocketAddr)> {
        match *listener {}
    }

    fn readable(&self, fd: OwnedFd) -> io::Result<Watched> {
        Ok(Watched { runtime: self.clone(), fd: Arc::new(fd) })
    }
}

/// A timer that goes with its future.
struct Timer {
    runtime: Virtual,
    key: (Instant, u64),
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.runtime.state.lock().timers.remove(&self.key);
    }
}

/// Somebody's descriptor, looked at whenever nobody can run.
pub(crate) struct Watched {
    runtime: Virtual,
    fd: Arc<OwnedFd>,
}

/// A wait that goes with its future.
struct Watching<'a>(&'a Watched, u64);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.0.runtime.state.lock().watched.remove(&self.1);
    }
}

impl Readiness for Watched {
    async fn readable(&self) -> io::Result<()> {
        let watching = Watching(self, self.runtime.name());
        poll_fn(|context| {
            let Watching(watched, name) = &watching;
            if poll(&mut [PollFd::new(&watched.fd, PollFlags::IN)], Some(&Timespec::default()))? > 0 {
                return Poll::Ready(Ok(()));
            }
            let entry = (Arc::clone(&watched.fd), context.waker().clone());
            watched.runtime.state.lock().watched.insert(*name, entry);
            Poll::Pending
        })
        .await
    }
}

/// There are no sockets.
pub(crate) enum NoSocket {}

impl AsFd for NoSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }
}

impl Stream for NoSocket {
    fn into_fd(self) -> io::Result<OwnedFd> {
        match self {}
    }
}

impl AsyncRead for NoSocket {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut [u8]) -> Poll<io::Result<usize>> {
        match *self {}
    }
}

impl AsyncWrite for NoSocket {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        match *self {}
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}
