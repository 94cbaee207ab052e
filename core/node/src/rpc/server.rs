//! The target's side of one session: begins calls, sends what they come to, ends those that are cancelled.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};

use futures::future::{self, Either, FutureExt};
use futures::io::{AsyncRead, AsyncWrite};
use millpond_core::time::Duration;
use millpond_core::wire::message::rpc::{Frame, Reason, Refusal, Request};
use millpond_core::wire::session::Peer;
use parking_lot::Mutex;

use super::link::{Outbox, Receive, drive};
use super::router::{Context, Credit, RawItems, Reply, Router, Slot, panicked};
use super::{Limits, RpcError};
use crate::runtime::{Runtime, Stop, Task, by, start, within};

/// How long a caller has to close once everything was said.
const LINGER: Duration = Duration::from_secs(1);

/// Answers the calls that come in on `stream` until the caller closes it, breaks the protocol or falls silent.
///
/// Once `stop` is stopped: says goodbye, refuses new calls, lets those in flight end within
/// [`Limits::drain_span_max`], and closes. Dropping the future cancels all calls in flight.
///
/// # Errors
/// How the session ended, unless it ended well: by `stop`, or by the caller between two frames.
pub async fn serve<R, S>(
    runtime: &R,
    stream: S,
    peer: Peer,
    router: Arc<Router>,
    limits: Limits,
    stop: &Stop,
) -> Result<(), RpcError>
where
    R: Runtime,
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    let outbox = Arc::new(Outbox::new(&limits));
    let calls = Arc::new(Calls::default());
    let mut server = Server { runtime: runtime.clone(), router, peer, limits, outbox, calls };
    let (outbox, calls) = (server.outbox.clone(), server.calls.clone());
    let _orphans = Orphans(calls.clone());
    let driving = drive(runtime, stream, &outbox, &limits, &mut server);
    let draining = async {
        stop.stopped().await;
        calls.is_draining.store(true, Ordering::SeqCst);
        // A caller that hears no goodbye is refused instead.
        let _ = outbox.urge(Frame::Goodbye);
        let _ = within(runtime, limits.drain_span_max, calls.none()).await;
        outbox.finish();
        let _ = within(runtime, LINGER, future::pending::<()>()).await;
    };
    match future::select(pin!(driving), pin!(draining)).await {
        Either::Left((ended, _)) if calls.is_draining.load(Ordering::SeqCst) => {
            tracing::debug!(%ended, "a draining session ended");
            Ok(())
        }
        Either::Left((RpcError::PeerGone { detail, .. }, _)) => {
            tracing::debug!(%detail, "the caller is gone");
            Ok(())
        }
        Either::Left((ended, _)) => Err(ended),
        Either::Right(((), _)) => Ok(()),
    }
}

/// However a session ends, nobody is left to answer then: its calls are cancelled.
struct Orphans(Arc<Calls>);

impl Drop for Orphans {
    fn drop(&mut self) {
        let orphans = std::mem::take(&mut self.0.table.lock().running);
        drop(orphans);
    }
}

struct Call {
    /// Dropping it cancels the call.
    _task: Task<()>,
    credit: Arc<Credit>,
}

#[derive(Default)]
struct Table {
    running: HashMap<u64, Call>,
    idle: Option<Waker>,
}

/// The calls in flight on one session.
#[derive(Default)]
struct Calls {
    table: Mutex<Table>,
    is_draining: AtomicBool,
}

impl Calls {
    fn end(&self, call: u64) {
        let mut table = self.table.lock();
        let ended = table.running.remove(&call);
        if table.running.is_empty()
            && let Some(waker) = table.idle.take()
        {
            waker.wake();
        }
        drop(table);
        drop(ended);
    }

    /// Completes once no call is in flight.
    fn none(&self) -> impl Future<Output = ()> + Send + '_ {
        poll_fn(|context| {
            let mut table = self.table.lock();
            if table.running.is_empty() {
                return Poll::Ready(());
            }
            table.idle = Some(context.waker().clone());
            Poll::Pending
        })
    }
}

struct Server<R> {
    runtime: R,
    router: Arc<Router>,
    peer: Peer,
    limits: Limits,
    outbox: Arc<Outbox>,
    calls: Arc<Calls>,
}

impl<R: Runtime> Receive for Server<R> {
    async fn on_frame(&mut self, frame: Frame, body: Vec<u8>) -> Result<(), RpcError> {
        match frame {
            Frame::Request(request) => {
                let call = request.call;
                if self.calls.table.lock().running.contains_key(&call) {
                    return Err(RpcError::violation(format!("call {call} is in flight and was made again")));
                }
                if let Err(refusal) = self.begin(request, body) {
                    // Closed means that the connection ends anyway.
                    let _ = self.outbox.send(Frame::Refused { call }, refusal.encode()).await;
                }
            }
            Frame::Cancel { call } => self.calls.end(call),
            Frame::Credit { call, items } => {
                // Credit for a stream that has ended meanwhile is no fault.
                if let Some(running) = self.calls.table.lock().running.get(&call) {
                    let granted = running.credit.add(items);
                    granted.map_err(|sum| RpcError::violation(format!("it wants {sum} items at once")))?;
                }
            }
            _ => return Err(RpcError::violation("a caller sent what only a target sends")),
        }
        Ok(())
    }
}

impl<R: Runtime> Server<R> {
    fn begin(&self, request: Request, body: Vec<u8>) -> Result<(), Refusal> {
        if self.calls.is_draining.load(Ordering::SeqCst) {
            return Err(Refusal::new(Reason::Draining, "the node is going away; ask another"));
        }
        let mut table = self.calls.table.lock();
        if table.running.len() >= self.limits.calls_max {
            return Err(self.router.busy(self.limits.calls_max));
        }
        let slot = self.router.admit(self.runtime.now(), request.method, request.window)?;
        let credit = Arc::new(Credit::new(request.window));
        let work = self.work(slot, request, body, credit.clone());
        let task = start(&self.runtime, work);
        // The table is locked, so the call cannot end before it is in it.
        table.running.insert(request.call, Call { _task: task, credit });
        Ok(())
    }

    fn work(
        &self,
        slot: Slot,
        request: Request,
        body: Vec<u8>,
        credit: Arc<Credit>,
    ) -> impl Future<Output = ()> + Send + use<R> {
        let (runtime, router, outbox, calls) =
            (self.runtime.clone(), self.router.clone(), self.outbox.clone(), self.calls.clone());
        let (call, method) = (request.call, request.method);
        let span = request.span.min(self.limits.call_span_max);
        let deadline = runtime.now() + span;
        let context = Context { peer: self.peer, deadline, trace: request.trace, id: request.id };
        async move {
            let raw = RawItems { outbox: outbox.clone(), call, credit };
            let run = AssertUnwindSafe(async { router.run(method, context, body, raw).await }).catch_unwind();
            let outcome = match by(&runtime, deadline, run).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(_panic)) => Err(panicked(method)),
                Err(_) => Err(Refusal::new(Reason::Deadline, format!("not done within {span}"))),
            };
            slot.end(runtime.now(), outcome.is_ok());
            let sent = match outcome {
                Ok(Reply::Answer(body)) => outbox.send(Frame::Answer { call }, body).await,
                Ok(Reply::End) => outbox.send(Frame::End { call }, Vec::new()).await,
                Err(refusal) => outbox.send(Frame::Refused { call }, refusal.encode()).await,
            };
            if sent.is_err() {
                tracing::debug!(call, "an answer found its session gone");
            }
            calls.end(call);
        }
    }
}
