//! The clock, timers, tasks and threads of a smol executor.
//!
//! smol's reactor is one thread of the process, so its futures run on any thread.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread;

use async_signal::{Signal, Signals};
use futures::future::FutureExt;
use millpond_core::time::Duration;
use millpond_node::runtime::{Runtime, Stop};
use smol::{Async, Executor, Timer, unblock};

use crate::net::{Readable, TcpListener, TcpStream};

/// A handle of a smol executor.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_node::runtime::Runtime;
/// millpond_smol::run(|smol| async move {
///     let start = smol.now();
///     smol.sleep(Duration::from_millis(2)).await;
///     assert!(smol.now().since(start) >= Duration::from_millis(2));
/// })
/// .unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Smol {
    executor: Arc<Executor<'static>>,
}

impl Smol {
    /// The adapter of `executor`; somebody must run it, see [`run`].
    #[must_use]
    pub fn new(executor: Arc<Executor<'static>>) -> Self {
        Self { executor }
    }

    /// A token that SIGTERM or SIGINT stops. From now on neither ends the process by itself.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn terminated(&self) -> io::Result<Stop> {
        let mut signals = Signals::new([Signal::Term, Signal::Int])?;
        let token = Stop::new();
        let stop = token.clone();
        self.spawn(async move {
            futures::StreamExt::next(&mut signals).await;
            stop.stop();
        });
        Ok(token)
    }
}

/// Runs `work` on a smol executor of its own, a worker thread per core, and returns what it returns.
///
/// Tasks still running then are dropped at their next await; blocking jobs are not waited for.
///
/// # Errors
/// The system refuses threads.
pub fn run<F: Future>(work: impl FnOnce(Smol) -> F) -> io::Result<F::Output> {
    /// Ends the workers however `work` ends, also by a panic.
    struct Ends(Stop);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let executor = Arc::new(Executor::new());
    let stop = Stop::new();
    let ends = Ends(stop.clone());
    for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
        let (executor, stop) = (executor.clone(), stop.clone());
        thread::Builder::new()
            .name("millpond".to_owned())
            .spawn(move || smol::block_on(executor.run(stop.stopped())))?;
    }
    let output = smol::block_on(work(Smol::new(executor)));
    drop(ends);
    Ok(output)
}

impl Runtime for Smol {
    type Stream = TcpStream;
    type Listener = TcpListener;
    type Readiness = Readable;

    fn sleep(&self, span: Duration) -> impl Future<Output = ()> + Send + use<> {
        Timer::after(span.into()).map(|_| ())
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // A panic would end the worker thread that happens to run the task.
        self.executor.spawn(AssertUnwindSafe(task).catch_unwind().map(|_| ())).detach();
    }

    fn spawn_blocking(&self, job: impl FnOnce() + Send + 'static) {
        unblock(move || std::panic::catch_unwind(AssertUnwindSafe(job)).unwrap_or_default()).detach();
    }

    fn dial(&self, peer: SocketAddr) -> impl Future<Output = io::Result<TcpStream>> + Send + use<> {
        async move { Async::<std::net::TcpStream>::connect(peer).await.map(TcpStream) }
    }

    fn listen(&self, local: SocketAddr) -> impl Future<Output = io::Result<TcpListener>> + Send + use<> {
        async move { Async::<std::net::TcpListener>::bind(local).map(TcpListener) }
    }

    async fn accept(&self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, peer) = listener.0.accept().await?;
        Ok((TcpStream(stream), peer))
    }

    fn readable(&self, fd: OwnedFd) -> io::Result<Readable> {
        Readable::new(fd)
    }
}
