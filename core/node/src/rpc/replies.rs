//! The items of a stream, as its caller reads them.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::channel::mpsc;
use futures::stream::{FusedStream, Stream, StreamExt};
use millpond_core::time::Duration;
use prost::Message;

use super::RpcError;
use super::channel::{Event, Running};

/// The items of a stream in order; at its end `None`, after a failure one error and then `None`.
///
/// The target sends a window ahead of the reader and no more. Dropping it tells the target to stop. See
/// [`Client::stream`](super::Client::stream).
///
/// Example: `verify/tests/runtimes/rpc.rs` (`next`).
#[must_use = "dropping it cancels the stream"]
pub struct Replies<T> {
    running: Running,
    events: mpsc::UnboundedReceiver<Event>,
    alarm: Pin<Box<dyn Future<Output = ()> + Send>>,
    method: u16,
    span: Duration,
    window: u32,
    taken: u32,
    state: State,
    item: PhantomData<fn() -> T>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Over,
}

impl<T> fmt::Debug for Replies<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replies").field("running", &self.running).finish_non_exhaustive()
    }
}

impl<T> Replies<T> {
    pub(super) fn new(
        (running, events): (Running, mpsc::UnboundedReceiver<Event>),
        alarm: Pin<Box<dyn Future<Output = ()> + Send>>,
        method: u16,
        span: Duration,
        window: u32,
    ) -> Self {
        Self { running, events, alarm, method, span, window, taken: 0, state: State::Open, item: PhantomData }
    }

    /// Gives back credit in halves of the window, so that one frame pays for many items.
    fn took_one(&mut self) {
        self.taken += 1;
        if self.taken * 2 >= self.window {
            self.running.credit(std::mem::take(&mut self.taken));
        }
    }

    fn fail(&mut self, error: RpcError) -> Poll<Option<Result<T, RpcError>>> {
        self.state = State::Over;
        Poll::Ready(Some(Err(error)))
    }
}

impl<T: Message + Default> Stream for Replies<T> {
    type Item = Result<T, RpcError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.state == State::Over {
            return Poll::Ready(None);
        }
        match self.events.poll_next_unpin(context) {
            Poll::Ready(Some(Event::Item(body))) => match T::decode(&*body) {
                Ok(item) => {
                    self.took_one();
                    Poll::Ready(Some(Ok(item)))
                }
                Err(source) => {
                    let method = self.method;
                    self.fail(RpcError::Answer { method, source })
                }
            },
            Poll::Ready(Some(Event::End)) => {
                self.state = State::Over;
                self.running.end();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Event::Failed(error))) => {
                let error = error.of_call(self.method, self.span);
                self.fail(error)
            }
            Poll::Ready(None) => self.fail(RpcError::gone("the session was closed here")),
            Poll::Pending if self.alarm.as_mut().poll(context).is_ready() => {
                let (method, waited) = (self.method, self.span);
                self.fail(RpcError::Deadline { method, waited })
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Message + Default> FusedStream for Replies<T> {
    fn is_terminated(&self) -> bool {
        self.state == State::Over
    }
}
