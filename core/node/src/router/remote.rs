//! Serving nodes, reached by remote calls.

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use millpond_core::sched::conductor::Decision;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{
    GenerateRequest, Generated, Load, LoadRequest, METHOD_GENERATE, METHOD_LOAD,
};

use super::desk::Scheduling;
use super::follow::{Follower, Linked};
use super::link::{Link, Lost, Timers};
use super::service::{Known, Nodes, Router, RouterLimits};
use crate::directory;
use crate::kv::Tenants;
use crate::model::Card;
use crate::node::Node;
use crate::rpc::{Client, Reason, RpcError};
use crate::runtime::Runtime;
use crate::session::Target;

/// When to come back to a node that is full and does not say.
const BUSY_GUESS: Duration = Duration::from_millis(200);

struct Remote<R: Runtime> {
    client: Client<R>,
}

impl<R: Runtime> Link for Remote<R> {
    // Prefill nodes serve what they are sent in order and load what the store has of the prefix: the decision says no more.
    fn generate(
        &self,
        request: GenerateRequest,
        _: &Decision,
        deadline: Instant,
    ) -> BoxStream<'static, Result<Generated, Lost>> {
        let client = self.client.clone();
        let call = async move { client.stream(METHOD_GENERATE, &request, deadline).await };
        let replies = call.map(|begun| match begun {
            Ok(replies) => replies.left_stream(),
            Err(error) => stream::iter([Err(error)]).right_stream(),
        });
        replies.flatten_stream().map(|item| item.map_err(lost)).boxed()
    }

    fn load(&self, deadline: Instant) -> BoxFuture<'static, Result<Load, Lost>> {
        let client = self.client.clone();
        async move { client.call(METHOD_LOAD, &LoadRequest {}, deadline).await.map_err(lost) }.boxed()
    }
}

/// Whose fault it was. A decode node that cannot get its prompt computed says "unavailable".
fn lost(error: RpcError) -> Lost {
    let detail = error.to_string();
    let retry_after = error.retry_after();
    match error {
        RpcError::Deadline { .. } => Lost::Deadline,
        RpcError::Refused(refusal) => match refusal.reason {
            Reason::Deadline => Lost::Deadline,
            Reason::Busy | Reason::Full => {
                let reason = refusal.detail.into_owned();
                Lost::Busy { reason, retry_after: retry_after.unwrap_or(BUSY_GUESS) }
            }
            Reason::Late => Lost::Late,
            Reason::Unavailable | Reason::Stale => Lost::Prefill { detail: refusal.detail.into_owned() },
            Reason::Draining | Reason::Cancelled => Lost::Decode { detail },
            Reason::Malformed | Reason::TooLarge => Lost::Unservable { reason: refusal.detail.into_owned() },
            _ => Lost::Refused { reason: refusal.detail.into_owned() },
        },
        RpcError::Full { .. } => Lost::Busy { reason: detail, retry_after: BUSY_GUESS },
        _ => Lost::Decode { detail },
    }
}

/// The store that prefill nodes load from, as a router reaches it.
///
/// Example: `core/node/src/serve.rs`.
#[derive(Debug)]
pub struct StoreLink<R> {
    /// The way to its directory.
    pub directory: directory::Link<R>,
    /// How its blocks are named.
    pub tenants: Tenants,
}

impl Router {
    /// A router of the model of `card` over nodes at these `host:port`s, reached as `node`, that load from `store` if there
    /// is one. Opens nothing yet; run [`Router::watch`] beside it.
    ///
    /// # Errors
    /// What cannot be used as it was given: an address, a number of nodes, a decision log that cannot be written.
    pub fn connect<R: Runtime>(
        node: &Node<R>,
        card: Card,
        prefills: &[String],
        decodes: &[String],
        store: Option<StoreLink<R>>,
        limits: RouterLimits,
        scheduling: &Scheduling,
    ) -> Result<Self, String> {
        let known = |address: &String| {
            let target = Target::parse(address).map_err(|error| error.to_string())?;
            Ok(Known { address: address.clone(), link: std::sync::Arc::new(Remote { client: node.client(target) }) })
        };
        let prefills = prefills.iter().map(known).collect::<Result<Vec<Known>, String>>()?;
        let decodes = decodes.iter().map(known).collect::<Result<Vec<Known>, String>>()?;
        let serving = if prefills.is_empty() { &decodes } else { &prefills };
        let serving = serving.iter().map(|node| node.address.clone()).collect();
        let timers = timers(node.runtime());
        let store = store.map(|StoreLink { directory, tenants }| {
            let (source, card) = (Linked { link: directory, runtime: node.runtime().clone() }, card.clone());
            let block_len = usize::try_from(card.layout.shape().block_tokens).unwrap_or(usize::MAX);
            let namer = Box::new(move |tenant: &str| tenants.namer(tenant, &card));
            let source = std::sync::Arc::new(source);
            Follower::new(source, namer, block_len, serving, timers.clone(), node.metrics())
        });
        let nodes = Nodes { prefills, decodes, store };
        Self::new(card, nodes, limits, scheduling, timers, node.metrics())
    }
}

fn timers<R: Runtime>(runtime: &R) -> Timers {
    let (clock, alarm) = (runtime.clone(), runtime.clone());
    Timers {
        now: std::sync::Arc::new(move || clock.now()),
        sleep: std::sync::Arc::new(move |span| alarm.sleep(span).boxed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Refusal;

    #[test]
    fn each_failure_is_put_down_to_the_node_that_caused_it() {
        let refused = |reason| lost(RpcError::Refused(Refusal::new(reason, "because")));
        assert_eq!(refused(Reason::Unavailable), Lost::Prefill { detail: "because".into() });
        assert_eq!(refused(Reason::Malformed), Lost::Unservable { reason: "because".into() });
        assert_eq!(refused(Reason::Failed), Lost::Refused { reason: "because".into() });
        assert!(matches!(refused(Reason::Busy), Lost::Busy { .. }));
        assert!(matches!(refused(Reason::Draining), Lost::Decode { .. }));
        assert_eq!((refused(Reason::Deadline), refused(Reason::Late)), (Lost::Deadline, Lost::Late));
    }
}
