//! The methods of a shard.

use std::sync::Arc;

use futures::future::ready;
use millpond_core::directory::Stamp;
use millpond_core::time::Duration;
use millpond_core::wire::message::directory as wire;

use super::Shard;
use crate::rpc::{Context, Items, Reason, Refusal, Router};
use crate::runtime::Runtime;

/// How long a watcher without news waits for a sign of life: whoever hears nothing for several of these lost the stream.
const WATCH_PAUSE: Duration = Duration::from_secs(1);

/// An owner speaks for itself only.
fn check(context: &Context, owner: Option<&wire::Owner>) -> Result<(), Refusal> {
    let identity = &context.peer.hello.identity;
    match owner {
        Some(owner) if owner.node == identity.node && owner.incarnation == identity.incarnation => Ok(()),
        _ => Err(Refusal::new(Reason::Denied, "an owner speaks for itself only: the hello names another node")),
    }
}

impl Shard {
    /// The shard's methods, for the node that hosts it.
    #[must_use]
    pub fn router<R: Runtime>(self: &Arc<Self>, runtime: R) -> Router {
        let shard = || Arc::clone(self);
        let (a, b, c, d) = (shard(), shard(), shard(), shard());
        let (e, f, g, h, i) = (shard(), shard(), shard(), shard(), shard());
        Router::new()
            .call(wire::METHOD_LOCATE, move |_: Context, request| ready(a.locate(&request)))
            .call(wire::METHOD_EXISTS, move |_: Context, request| ready(b.exists(&request)))
            .call(wire::METHOD_STAT, move |_: Context, request| ready(c.stat(&request)))
            .call(wire::METHOD_LIST, move |_: Context, request| ready(Ok(d.list(&request))))
            .mutation(wire::METHOD_REMOVE, move |_: Context, request| ready(e.remove(&request)))
            .mutation(wire::METHOD_CLEAR, move |_: Context, _: wire::ClearRequest| ready(f.clear()))
            .call(wire::METHOD_EXPLAIN_MISS, move |_: Context, request| ready(g.explain_miss(&request)))
            .call(wire::METHOD_VIEW, move |_: Context, _: wire::ViewRequest| ready(Ok(h.view())))
            .call(wire::METHOD_HOLDINGS, move |_: Context, request| ready(i.holdings(&request)))
            .merge(self.watch_router(runtime))
            .merge(self.owner_router())
    }

    /// A watcher is asked for no more than it takes: what it has not taken waits in the ring that all watchers share
    /// (`Limits::events_max`), and one that fell behind the ring is told that there is a gap.
    fn watch_router<R: Runtime>(self: &Arc<Self>, runtime: R) -> Router {
        let shard = Arc::clone(self);
        let watch = move |_: Context, request: wire::WatchRequest, mut items: Items<wire::EventBatch>| {
            let (shard, runtime) = (Arc::clone(&shard), runtime.clone());
            async move {
                let mut after = request.after.map(Stamp::from);
                // Ends when the watcher goes away or its deadline comes: the handler is dropped then.
                loop {
                    let batch = shard.events(&runtime, after, WATCH_PAUSE).await;
                    after = batch.next.map(Stamp::from);
                    items.send(&batch).await?;
                }
            }
        };
        Router::new().stream(wire::METHOD_WATCH, watch)
    }

    /// Repeating any of these changes nothing, so they need no deduplication.
    fn owner_router(self: &Arc<Self>) -> Router {
        let shard = || Arc::clone(self);
        let (a, b, c, d, e, f) = (shard(), shard(), shard(), shard(), shard(), shard());
        Router::new()
            .call(wire::METHOD_JOIN, move |context: Context, request: wire::JoinRequest| {
                ready(check(&context, request.owner.as_ref()).and_then(|()| a.join(&request)))
            })
            .call(wire::METHOD_HEARTBEAT, move |context: Context, request: wire::HeartbeatRequest| {
                ready(check(&context, request.owner.as_ref()).and_then(|()| b.heartbeat(&request)))
            })
            .call(wire::METHOD_INVENTORY, move |context: Context, request: wire::InventoryRequest| {
                ready(check(&context, request.owner.as_ref()).and_then(|()| c.inventory(&request)))
            })
            .call(wire::METHOD_COMMIT, move |context: Context, request: wire::CommitRequest| {
                ready(check(&context, request.owner.as_ref()).and_then(|()| d.commit(&request)))
            })
            .call(wire::METHOD_EVICT, move |context: Context, request: wire::EvictRequest| {
                ready(check(&context, request.owner.as_ref()).and_then(|()| e.evict(&request)))
            })
            .call(wire::METHOD_DROPPED, move |context: Context, request: wire::DroppedRequest| {
                ready(check(&context, request.owner.as_ref()).and_then(|()| f.dropped(&request)))
            })
    }
}
