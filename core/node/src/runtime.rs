//! What a node needs of an async runtime, and the few helpers that stand on it.
//!
//! [`Runtime`] is small on purpose: a clock, a timer, tasks, threads for blocking work, TCP sockets, and readiness of
//! somebody's file descriptor. Everything else (deadlines, stop tokens, exact reads, task handles) is written once, here,
//! on top of it. This module is not an executor and opens no socket itself.
//!
//! Invariants: every future returned by a runtime may be polled from any thread, also from outside that runtime; every
//! socket is non-blocking and close-on-exec; instants come from CLOCK_BOOTTIME, so they go on while a machine sleeps.

use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::channel::oneshot;
use futures::future::{self, Either, FutureExt, RemoteHandle, Shared};
use futures::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

/// A connected TCP socket of a runtime.
///
/// Implement it by forwarding to the runtime's own socket type; see `millpond-tokio`'s `net.rs` for the shape.
///
/// Example: `verify/examples/own_runtime.rs`.
pub trait Stream: AsyncRead + AsyncWrite + AsFd + Send + Sync + Unpin + 'static {
    /// Takes the socket out of the runtime: non-blocking, no longer registered with it, nothing buffered left behind.
    ///
    /// # Errors
    /// What the runtime's deregistration reports; the socket is closed then.
    fn into_fd(self) -> io::Result<OwnedFd>;
}

/// Waits until a file descriptor is readable, as often as asked.
///
/// Level-triggered: a descriptor that is readable now answers now, however much an earlier caller left unread.
///
/// Example: `verify/examples/own_runtime.rs`.
pub trait Readiness: Send + Sync + 'static {
    /// Waits until the descriptor is readable (or at its end, or in error: reading would not block).
    ///
    /// # Errors
    /// What the runtime's reactor reports; the handle is of no further use then.
    fn readable(&self) -> impl Future<Output = io::Result<()>> + Send;
}

/// An async runtime, seen through the keyhole that a node needs. Clones are handles of the same runtime.
///
/// Seven methods to write, two given. `verify/examples/own_runtime.rs` is a whole one in under 200 lines.
///
/// Example: `verify/examples/own_runtime.rs`.
pub trait Runtime: Clone + Send + Sync + 'static {
    /// A connected TCP socket.
    type Stream: Stream;
    /// A listening TCP socket; dropping it stops listening.
    type Listener: AsFd + Send + Sync + 'static;
    /// What [`Runtime::readable`] returns.
    type Readiness: Readiness;

    /// The time on CLOCK_BOOTTIME.
    fn now(&self) -> Instant {
        boot_time()
    }

    /// Completes once `span` has passed, never earlier; late by the timer's grain (about a millisecond).
    fn sleep(&self, span: Duration) -> impl Future<Output = ()> + Send + use<Self>;

    /// Lets others run first. A runtime that can do so without waking another of its threads should.
    fn yield_now(&self) -> impl Future<Output = ()> + Send + use<Self> {
        let mut yielded = false;
        poll_fn(move |context| {
            if std::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
    }

    /// Runs `task` to its end on the runtime. Dropping nothing stops it: see [`start`] for a task with a handle.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static);

    /// Runs `job` on a thread that may block. The number of such threads is the runtime's limit; jobs above it queue.
    fn spawn_blocking(&self, job: impl FnOnce() + Send + 'static);

    /// Connects to `peer`. There is no deadline in it: wrap it in [`by`].
    fn dial(&self, peer: SocketAddr) -> impl Future<Output = io::Result<Self::Stream>> + Send + use<Self>;

    /// Listens on `local`; port 0 picks a free one (see [`local_addr`]).
    fn listen(&self, local: SocketAddr) -> impl Future<Output = io::Result<Self::Listener>> + Send + use<Self>;

    /// The next connection of `listener` and who it comes from.
    fn accept(&self, listener: &Self::Listener) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>> + Send;

    /// A handle that waits for `fd` (an epoll set, an eventfd, a pipe) to become readable.
    ///
    /// # Errors
    /// The descriptor cannot be watched, for example because it is a plain file.
    fn readable(&self, fd: OwnedFd) -> io::Result<Self::Readiness>;

    /// The addresses of `host` at `port`, in the system's order; `host` may be a literal, also `fe80::1%eth0`.
    fn resolve(&self, host: &str, port: u16) -> impl Future<Output = io::Result<Vec<SocketAddr>>> + Send + use<Self> {
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        blocking(self, move || (host.as_str(), port).to_socket_addrs().map(Iterator::collect))
    }
}

/// The time on CLOCK_BOOTTIME, for those who have no runtime at hand.
///
/// ```
/// use millpond_node::runtime::boot_time;
/// assert!(boot_time() <= boot_time());
/// ```
#[must_use]
pub fn boot_time() -> Instant {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let secs = u64::try_from(now.tv_sec).unwrap_or_default();
    let nanos = u64::try_from(now.tv_nsec).unwrap_or_default();
    Instant::from_nanos(secs.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// A deadline passed before the work was done.
///
/// ```
/// assert_eq!(millpond_node::runtime::Elapsed.to_string(), "deadline passed");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("deadline passed")]
pub struct Elapsed;

impl From<Elapsed> for io::Error {
    fn from(elapsed: Elapsed) -> Self {
        Self::new(io::ErrorKind::TimedOut, elapsed)
    }
}

/// Sleeps until `deadline`; [`Instant::NEVER`] never comes.
pub async fn sleep_until<R: Runtime>(runtime: &R, deadline: Instant) {
    if deadline == Instant::NEVER {
        return future::pending().await;
    }
    loop {
        // The timer may run on a clock that stands still while the machine sleeps, so ask ours again.
        let left = deadline.since(runtime.now());
        if left == Duration::ZERO {
            return;
        }
        runtime.sleep(left).await;
    }
}

/// Runs `work` until `deadline`. Work that is done at its first poll is never late.
///
/// # Errors
/// [`Elapsed`] once the deadline passed; `work` was dropped then.
pub async fn by<R: Runtime, F: Future>(runtime: &R, deadline: Instant, work: F) -> Result<F::Output, Elapsed> {
    let (work, alarm) = (pin!(work), pin!(sleep_until(runtime, deadline)));
    match future::select(work, alarm).await {
        Either::Left((output, _)) => Ok(output),
        Either::Right(((), _)) => Err(Elapsed),
    }
}

/// Runs `work` for at most `span`; see [`by`].
///
/// # Errors
/// [`Elapsed`] once the span passed; `work` was dropped then.
pub async fn within<R: Runtime, F: Future>(runtime: &R, span: Duration, work: F) -> Result<F::Output, Elapsed> {
    by(runtime, runtime.now() + span, work).await
}

/// Fills `buf` from `stream` by `deadline`.
///
/// # Errors
/// `UnexpectedEof` when the peer closed first, `TimedOut` at the deadline, else what the socket reports. What was read
/// until then is in `buf` and lost to the stream: close it.
pub async fn read_exact_by<R, S>(runtime: &R, stream: &mut S, buf: &mut [u8], deadline: Instant) -> io::Result<()>
where
    R: Runtime,
    S: AsyncRead + Unpin,
{
    by(runtime, deadline, stream.read_exact(buf)).await?
}

/// The local address of a socket or listener.
///
/// # Errors
/// `fd` is not an IP socket.
pub fn local_addr(fd: &impl AsFd) -> io::Result<SocketAddr> {
    SocketAddr::try_from(rustix::net::getsockname(fd)?).map_err(io::Error::from)
}

/// The far address of a connected socket.
///
/// # Errors
/// `fd` is not an IP socket, or the peer is gone already.
pub fn peer_addr(fd: &impl AsFd) -> io::Result<SocketAddr> {
    let address = rustix::net::getpeername(fd)?.ok_or(io::ErrorKind::NotConnected)?;
    SocketAddr::try_from(address).map_err(io::Error::from)
}

/// A task that can be awaited, and that is cancelled when this handle is dropped. See [`start`].
///
/// A panic inside the task comes out of the `await`, as if the work had been done in place.
///
/// Example: `verify/tests/runtimes/rpc.rs`.
#[must_use = "dropping the handle cancels the task; call `detach` to let it run"]
#[derive(Debug)]
pub struct Task<T>(RemoteHandle<T>);

impl<T> Task<T> {
    /// Lets the task run to its end unwatched.
    pub fn detach(self) {
        self.0.forget();
    }
}

impl<T: 'static> Future for Task<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.0.poll_unpin(context)
    }
}

/// Starts `work` on the runtime and returns its handle.
pub fn start<R: Runtime, T: Send + 'static>(runtime: &R, work: impl Future<Output = T> + Send + 'static) -> Task<T> {
    let (task, handle) = work.remote_handle();
    runtime.spawn(task);
    Task(handle)
}

/// Runs `job` on a thread that may block and hands its result back. It runs even if nobody awaits it.
///
/// A panic in `job` comes out of the `await`.
pub fn blocking<R, T, J>(runtime: &R, job: J) -> impl Future<Output = T> + Send + use<R, T, J>
where
    R: Runtime,
    T: Send + 'static,
    J: FnOnce() -> T + Send + 'static,
{
    let (sender, receiver) = oneshot::channel();
    runtime.spawn_blocking(move || {
        // A caller that went away needs no result.
        let _ = sender.send(catch_unwind(AssertUnwindSafe(job)));
    });
    async move {
        match receiver.await {
            Ok(Ok(output)) => output,
            Ok(Err(panic)) => resume_unwind(panic),
            // Only a runtime that is being torn down drops a job unrun; nothing is left to wake us then.
            Err(oneshot::Canceled) => future::pending().await,
        }
    }
}

/// A token that says "stop" once, to everybody who holds a clone.
///
/// ```
/// use millpond_node::runtime::Stop;
/// let stop = Stop::new();
/// let (part, other) = (stop.child(), stop.child());
/// part.stop();
/// assert!(part.is_stopped() && !stop.is_stopped());
/// stop.stop();
/// futures::executor::block_on(other.stopped());
/// ```
#[derive(Clone, Debug)]
pub struct Stop {
    sender: Arc<Mutex<Option<oneshot::Sender<()>>>>,
    receiver: Shared<oneshot::Receiver<()>>,
    parent: Option<Arc<Stop>>,
}

impl Default for Stop {
    fn default() -> Self {
        Self::new()
    }
}

impl Stop {
    /// A token that nobody has stopped yet.
    #[must_use]
    pub fn new() -> Self {
        let (sender, receiver) = oneshot::channel();
        Self { sender: Arc::new(Mutex::new(Some(sender))), receiver: receiver.shared(), parent: None }
    }

    /// A token that stops when this one does, and can be stopped on its own.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { parent: Some(Arc::new(self.clone())), ..Self::new() }
    }

    /// Stops; every clone and every child sees it. A second call changes nothing.
    pub fn stop(&self) {
        if let Some(sender) = self.sender.lock().take() {
            // We hold a receiver ourselves, so it is there.
            let _ = sender.send(());
        }
    }

    /// Whether somebody stopped this token or an ancestor.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.sender.lock().is_none() || self.parent.as_ref().is_some_and(|parent| parent.is_stopped())
    }

    /// Completes once the token is stopped; at once if it is already.
    pub fn stopped(&self) -> impl Future<Output = ()> + Send + Unpin + use<> {
        let mut signals = vec![self.receiver.clone()];
        let mut ancestor = self.parent.clone();
        // Bounded by the depth of nesting.
        while let Some(stop) = ancestor {
            signals.push(stop.receiver.clone());
            ancestor = stop.parent.clone();
        }
        future::select_all(signals).map(|_| ())
    }

    /// Runs `work` until it is done or the token stops.
    ///
    /// # Errors
    /// [`Stopped`] if the token stopped first; `work` was dropped then.
    pub async fn or_stopped<F: Future>(&self, work: F) -> Result<F::Output, Stopped> {
        match future::select(pin!(work), self.stopped()).await {
            Either::Left((output, _)) => Ok(output),
            Either::Right(((), _)) => Err(Stopped),
        }
    }
}

/// The work was given up because its [`Stop`] token was stopped.
///
/// ```
/// assert_eq!(millpond_node::runtime::Stopped.to_string(), "stopped");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped")]
pub struct Stopped;
