//! The methods of a store node.

use std::sync::Arc;

use futures::future::ready;
use millpond_core::wire::hello::Identity;
use millpond_core::wire::message::store::{
    FactsRequest, GetReply, GetRequest, METHOD_FACTS, METHOD_GET, METHOD_PUT, PutReply, PutRequest,
};

use super::StoreNode;
use crate::rpc::{Context, Refusal, Router};
use crate::runtime::Runtime;

impl<R: Runtime> StoreNode<R> {
    /// Serves a put of a client in this process.
    pub(crate) async fn serve_put(&self, from: Identity, request: PutRequest) -> Result<PutReply, Refusal> {
        self.inner.put(from, request).await
    }

    /// Serves a get of a client in this process.
    pub(crate) async fn serve_get(&self, from: Identity, request: GetRequest) -> Result<GetReply, Refusal> {
        self.inner.get(from, request).await
    }

    /// The node's methods. A put is not deduplicated here: repeating one finds its value already there.
    #[must_use]
    pub fn router(&self) -> Router {
        let (puts, gets, facts) = (Arc::clone(&self.inner), Arc::clone(&self.inner), Arc::clone(&self.inner));
        Router::new()
            .call(METHOD_PUT, move |context: Context, request| {
                let inner = Arc::clone(&puts);
                async move { inner.put(context.peer.hello.identity, request).await }
            })
            .call(METHOD_GET, move |context: Context, request| {
                let inner = Arc::clone(&gets);
                async move { inner.get(context.peer.hello.identity, request).await }
            })
            .call(METHOD_FACTS, move |_: Context, _: FactsRequest| ready(Ok(facts.facts())))
    }
}
