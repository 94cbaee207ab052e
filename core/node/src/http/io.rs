//! A runtime's streams and timers as hyper wants them.
//!
//! A write that makes no progress for the stall limit fails, so that a client that stops reading costs a connection for
//! a bounded time only.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::future::BoxFuture;
use futures::io::{AsyncRead, AsyncWrite};
use hyper::rt::ReadBufCursor;
use millpond_core::time::Duration;
use parking_lot::Mutex;

/// Makes timers: a future that is ready after the span.
pub(super) type Sleeper = Arc<dyn Fn(Duration) -> BoxFuture<'static, ()> + Send + Sync>;

/// Bytes read from the runtime's stream per call, before hyper copies them into its own buffer.
const READ_LEN: usize = 16 * 1024;

pub(super) struct Io<S> {
    stream: S,
    read: Box<[u8; READ_LEN]>,
    sleeper: Sleeper,
    stall_max: Duration,
    stalled: Option<BoxFuture<'static, ()>>,
}

impl<S> Io<S> {
    pub(super) fn new(stream: S, sleeper: Sleeper, stall_max: Duration) -> Self {
        Self { stream, read: Box::new([0; READ_LEN]), sleeper, stall_max, stalled: None }
    }

    /// `result` of a write, or an error once writes have made no progress for too long.
    fn watch<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let timer = self.stalled.get_or_insert_with(|| (self.sleeper)(self.stall_max));
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client stopped reading")));
        }
        Poll::Pending
    }
}

impl<S: AsyncRead + Unpin> hyper::rt::Read for Io<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, mut target: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let len = target.remaining().min(READ_LEN);
        let read = futures::ready!(Pin::new(&mut this.stream).poll_read(cx, &mut this.read[..len]))?;
        target.put_slice(&this.read[..read]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> hyper::rt::Write for Io<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, source: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write(cx, source);
        this.watch(cx, result)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_flush(cx);
        this.watch(cx, result)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_close(cx);
        this.watch(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        sources: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = Pin::new(&mut this.stream).poll_write_vectored(cx, sources);
        this.watch(cx, result)
    }
}

/// hyper's timers over a [`Sleeper`].
pub(super) struct Timer(pub(super) Sleeper);

/// hyper wants its sleeps `Sync`; the lock is never contended, a sleep is polled through `&mut`.
struct Sleep(Mutex<BoxFuture<'static, ()>>);

impl Future for Sleep {
    type Output = ();
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.get_mut().0.get_mut().as_mut().poll(cx)
    }
}

impl hyper::rt::Sleep for Sleep {}

impl hyper::rt::Timer for Timer {
    fn sleep(&self, span: std::time::Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(Sleep(Mutex::new((self.0)(span.into()))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        self.sleep(deadline.saturating_duration_since(Instant::now()))
    }
}
