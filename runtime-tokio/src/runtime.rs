//! The clock, timers, tasks and threads of a tokio runtime.
//!
//! Futures made here enter the runtime by themselves, so they may be polled from any thread.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use futures::future;
use millpond_core::time::Duration;
use millpond_node::runtime::{Runtime, Stop};
use tokio::runtime::{Builder, Handle};
use tokio::signal::unix::{SignalKind, signal};

use crate::net::{Readable, TcpListener, TcpStream};

/// Threads for blocking work; further jobs queue.
const BLOCKING_THREADS_MAX: usize = 64;

/// A handle of a tokio runtime.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_node::runtime::Runtime;
/// millpond_tokio::run(|tokio| async move {
///     let start = tokio.now();
///     tokio.sleep(Duration::from_millis(2)).await;
///     assert!(tokio.now().since(start) >= Duration::from_millis(2));
/// })
/// .unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Tokio {
    handle: Handle,
}

impl Tokio {
    /// The adapter of the runtime behind `handle`; it must have its I/O and time drivers enabled.
    #[must_use]
    pub fn new(handle: Handle) -> Self {
        Self { handle }
    }

    /// A token that SIGTERM or SIGINT stops. From now on neither ends the process by itself.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn terminated(&self) -> io::Result<Stop> {
        let _inside = self.handle.enter();
        let mut signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
        let token = Stop::new();
        let stop = token.clone();
        self.handle.spawn(async move {
            let [terminate, interrupt] = &mut signals;
            future::select(pin!(terminate.recv()), pin!(interrupt.recv())).await;
            stop.stop();
        });
        Ok(token)
    }

    fn enter<F: Future>(&self, work: F) -> Entered<F> {
        Entered { handle: self.handle.clone(), work: Box::pin(work) }
    }
}

/// Runs `work` on a tokio runtime of its own, a worker thread per core, and returns what it returns.
///
/// Tasks still running then are dropped at their next await; blocking jobs are not waited for.
///
/// # Errors
/// The system refuses threads or an epoll set.
pub fn run<F: Future>(work: impl FnOnce(Tokio) -> F) -> io::Result<F::Output> {
    let runtime = Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_name("millpond")
        .build()?;
    let output = runtime.block_on(work(Tokio::new(runtime.handle().clone())));
    runtime.shutdown_background();
    Ok(output)
}

impl Runtime for Tokio {
    type Stream = TcpStream;
    type Listener = TcpListener;
    type Readiness = Readable;

    fn sleep(&self, span: Duration) -> impl Future<Output = ()> + Send + use<> {
        let _inside = self.handle.enter();
        tokio::time::sleep(span.into())
    }

    fn yield_now(&self) -> impl Future<Output = ()> + Send + use<> {
        tokio::task::yield_now()
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(task);
    }

    fn spawn_blocking(&self, job: impl FnOnce() + Send + 'static) {
        self.handle.spawn_blocking(job);
    }

    fn dial(&self, peer: SocketAddr) -> impl Future<Output = io::Result<TcpStream>> + Send + use<> {
        self.enter(async move { tokio::net::TcpStream::connect(peer).await.map(TcpStream) })
    }

    fn listen(&self, local: SocketAddr) -> impl Future<Output = io::Result<TcpListener>> + Send + use<> {
        self.enter(async move { tokio::net::TcpListener::bind(local).await.map(TcpListener) })
    }

    async fn accept(&self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, peer) = self.enter(listener.0.accept()).await?;
        Ok((TcpStream(stream), peer))
    }

    fn readable(&self, fd: OwnedFd) -> io::Result<Readable> {
        let _inside = self.handle.enter();
        Readable::new(fd)
    }
}

/// A future polled with the runtime entered, whatever thread polls it.
struct Entered<F> {
    handle: Handle,
    work: Pin<Box<F>>,
}

impl<F: Future> Future for Entered<F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let handle = self.handle.clone();
        let _inside = handle.enter();
        self.work.as_mut().poll(context)
    }
}
