//! How a router reaches a node, and in which ways that can fail.

use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use millpond_core::sched::conductor::Decision;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{GenerateRequest, Generated, Load};

/// A connection to one serving node, made and remade as needed.
pub(super) trait Link: Send + Sync {
    /// Starts a generation at a decode node, as decided; dropping the stream cancels it there. A message with `started` and
    /// without tokens says that the prompt is computed.
    fn generate(
        &self,
        request: GenerateRequest,
        decision: &Decision,
        deadline: Instant,
    ) -> BoxStream<'static, Result<Generated, Lost>>;

    /// Asks how busy the node is.
    fn load(&self, deadline: Instant) -> BoxFuture<'static, Result<Load, Lost>>;
}

/// Why a node did not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The decode node is not reached, died, or broke the protocol.
    Decode { detail: String },
    /// The decode node says that the prefill node failed it.
    Prefill { detail: String },
    /// The decode node has no place for the prompt that was computed for it.
    Late,
    /// It is full.
    Busy { reason: String, retry_after: Duration },
    /// The request is at fault: it makes no sense there, or is too large for it.
    Unservable { reason: String },
    /// It will not do this, now or later.
    Refused { reason: String },
    /// The deadline passed.
    Deadline,
}

/// The clock and timers of the runtime, without its type.
#[derive(Clone)]
pub(crate) struct Timers {
    pub(crate) now: Arc<dyn Fn() -> Instant + Send + Sync>,
    pub(crate) sleep: Arc<dyn Fn(Duration) -> BoxFuture<'static, ()> + Send + Sync>,
}

impl Timers {
    pub(crate) fn now(&self) -> Instant {
        (self.now)()
    }

    /// Runs `work` until `deadline`.
    pub(super) async fn by<F: Future>(&self, deadline: Instant, work: F) -> Option<F::Output> {
        let alarm = (self.sleep)(deadline.since(self.now()));
        futures::pin_mut!(work);
        match futures::future::select(work, alarm).await {
            futures::future::Either::Left((output, _)) => Some(output),
            futures::future::Either::Right(_) => None,
        }
    }
}
