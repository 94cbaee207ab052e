//! The caller's side of one session: calls in flight, and who waits for them.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::channel::{mpsc, oneshot};
use millpond_core::time::Duration;
use millpond_core::wire::message::rpc::{Frame, Refusal, Request};
use millpond_core::wire::session::Peer;
use parking_lot::Mutex;

use super::client::Connection;
use super::link::{Outbox, Receive, drive};
use super::{FarEnd, Limits, RpcError};
use crate::runtime::{Runtime, Task, start};

/// What a caller asks for; the body goes with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) method: u16,
    pub(super) span: Duration,
    pub(super) id: Option<NonZeroU64>,
    pub(super) trace: u64,
}

/// What comes of a stream.
#[derive(Debug)]
pub(super) enum Event {
    Item(Vec<u8>),
    End,
    Failed(RpcError),
}

#[derive(Debug)]
enum Waiter {
    Answer(oneshot::Sender<Result<Vec<u8>, RpcError>>),
    /// `owed` items may still come before more credit is given.
    Items {
        sender: mpsc::UnboundedSender<Event>,
        owed: u32,
    },
}

impl Waiter {
    /// A waiter that went away is not told.
    fn fail(self, error: RpcError) {
        match self {
            Self::Answer(sender) => drop(sender.send(Err(error))),
            Self::Items { sender, .. } => drop(sender.unbounded_send(Event::Failed(error))),
        }
    }

    /// Tells the waiter, too, how the peer broke the protocol.
    fn betrayed(self, detail: &'static str) -> RpcError {
        self.fail(RpcError::violation(detail));
        RpcError::violation(detail)
    }
}

#[derive(Debug, Default)]
struct State {
    waiters: HashMap<u64, Waiter>,
    ended: Option<RpcError>,
    is_draining: bool,
}

#[derive(Debug)]
struct Shared {
    outbox: Outbox,
    state: Mutex<State>,
}

/// One session, as its caller sees it. Dropping it (and all calls in flight, which hold it) closes the session.
#[derive(Debug)]
pub(super) struct Channel {
    shared: Arc<Shared>,
    next: AtomicU64,
    calls_max: usize,
    pub(super) peer: Peer,
    _task: Task<()>,
}

impl Channel {
    pub(super) fn new<R: Runtime>(runtime: &R, connection: Connection, limits: Limits) -> Self {
        let shared = Arc::new(Shared { outbox: Outbox::new(&limits), state: Mutex::default() });
        let (owner, driven) = (runtime.clone(), shared.clone());
        let Connection { stream, peer } = connection;
        let task = start(runtime, async move {
            let mut receiver = Receiver(driven.clone());
            let ended = drive(&owner, stream, &driven.outbox, &limits, &mut receiver).await;
            driven.end(&ended);
        });
        Self { shared, next: AtomicU64::new(1), calls_max: limits.calls_max, peer, _task: task }
    }

    /// Whether new calls may be made on it.
    pub(super) fn is_usable(&self) -> bool {
        let state = self.shared.state.lock();
        state.ended.is_none() && !state.is_draining
    }

    /// Makes a call and waits for its answer. Dropping the future cancels the call.
    pub(super) async fn call(self: Arc<Self>, ask: Ask, body: Vec<u8>) -> Result<Vec<u8>, RpcError> {
        let (sender, receiver) = oneshot::channel();
        let mut running = self.begin(ask, 0, body, Waiter::Answer(sender)).await?;
        let answer = receiver.await.unwrap_or_else(|_| Err(RpcError::gone("the session was closed here")));
        running.end();
        answer
    }

    /// Makes a call whose answer is a stream. Dropping what comes back cancels it.
    pub(super) async fn stream(
        self: Arc<Self>,
        ask: Ask,
        window: u32,
        body: Vec<u8>,
    ) -> Result<(Running, mpsc::UnboundedReceiver<Event>), RpcError> {
        // Bounded by the window: a target that sends more loses its session.
        let (sender, receiver) = mpsc::unbounded();
        let running = self.begin(ask, window, body, Waiter::Items { sender, owed: window }).await?;
        Ok((running, receiver))
    }

    async fn begin(self: Arc<Self>, ask: Ask, window: u32, body: Vec<u8>, waiter: Waiter) -> Result<Running, RpcError> {
        let call = self.next.fetch_add(1, Ordering::Relaxed);
        {
            let mut state = self.shared.state.lock();
            if let Some(ended) = &state.ended {
                return Err(untouched(ended));
            }
            if state.waiters.len() >= self.calls_max {
                return Err(RpcError::Full { max: self.calls_max });
            }
            state.waiters.insert(call, waiter);
        }
        let running = Running { channel: self, call, is_over: false };
        let Ask { method, span, id, trace } = ask;
        let frame = Frame::Request(Request { call, method, span, id, trace, window });
        if running.channel.shared.outbox.send(frame, body).await.is_err() {
            return Err(running.channel.shared.state.lock().ended.as_ref().map_or_else(
                || RpcError::PeerGone { detail: "the session ended".into(), far_end: FarEnd::Untouched },
                untouched,
            ));
        }
        Ok(running)
    }
}

/// A call in flight. Dropping it cancels the call, unless it is over.
#[derive(Debug)]
pub(super) struct Running {
    channel: Arc<Channel>,
    call: u64,
    is_over: bool,
}

impl Running {
    /// The call has ended; there is nothing to cancel.
    pub(super) fn end(&mut self) {
        self.is_over = true;
    }

    /// Lets the target send `items` more.
    pub(super) fn credit(&self, items: u32) {
        let shared = &self.channel.shared;
        if let Some(Waiter::Items { owed, .. }) = shared.state.lock().waiters.get_mut(&self.call) {
            *owed = owed.saturating_add(items);
        }
        // A session that is gone needs no credit.
        let _ = shared.outbox.urge(Frame::Credit { call: self.call, items });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let shared = &self.channel.shared;
        let waiter = shared.state.lock().waiters.remove(&self.call);
        // Without a waiter, the target ended the call already.
        if waiter.is_some() && !self.is_over && shared.outbox.withdraw(self.call).is_err() {
            let _ = shared.outbox.urge(Frame::Cancel { call: self.call });
        }
    }
}

impl Shared {
    /// The session is over: everybody who waits is told.
    fn end(&self, error: &RpcError) {
        let waiters = {
            let mut state = self.state.lock();
            state.ended = Some(error.clone());
            std::mem::take(&mut state.waiters)
        };
        for (call, waiter) in waiters {
            let was_unsent = self.outbox.withdraw(call).is_ok();
            waiter.fail(if was_unsent { untouched(error) } else { error.clone() });
        }
    }

    fn take(&self, call: u64) -> Option<Waiter> {
        self.state.lock().waiters.remove(&call)
    }
}

/// The same end of a session, seen by a call that was not sent.
fn untouched(error: &RpcError) -> RpcError {
    RpcError::PeerGone { detail: error.to_string().into(), far_end: FarEnd::Untouched }
}

struct Receiver(Arc<Shared>);

impl Receive for Receiver {
    async fn on_frame(&mut self, frame: Frame, body: Vec<u8>) -> Result<(), RpcError> {
        match frame {
            // Answers to calls that were cancelled meanwhile find no waiter, and are thrown away.
            Frame::Answer { call } => match self.0.take(call) {
                Some(Waiter::Answer(sender)) => drop(sender.send(Ok(body))),
                Some(waiter) => return Err(waiter.betrayed("it answered a stream as a call")),
                None => {}
            },
            Frame::End { call } => match self.0.take(call) {
                Some(Waiter::Items { sender, .. }) => drop(sender.unbounded_send(Event::End)),
                Some(waiter) => return Err(waiter.betrayed("it answered a call as a stream")),
                None => {}
            },
            Frame::Refused { call } => {
                let refusal = Refusal::decode(&body).ok_or_else(|| RpcError::violation("its refusal is none"))?;
                if let Some(waiter) = self.0.take(call) {
                    waiter.fail(RpcError::Refused(refusal));
                }
            }
            Frame::Item { call } => match self.0.state.lock().waiters.get_mut(&call) {
                Some(Waiter::Items { owed: 0, .. }) => {
                    return Err(RpcError::violation("it sent more items than were asked for"));
                }
                Some(Waiter::Items { sender, owed }) => {
                    *owed -= 1;
                    // A reader that is being dropped wants no more.
                    let _ = sender.unbounded_send(Event::Item(body));
                }
                Some(Waiter::Answer(_)) => return Err(RpcError::violation("it answered a call as a stream")),
                None => {}
            },
            Frame::Goodbye => self.0.state.lock().is_draining = true,
            _ => return Err(RpcError::violation("a target sent what only a caller sends")),
        }
        Ok(())
    }
}
