//! Prefill nodes, reached by rpc.

use std::collections::HashMap;

use futures::future::FutureExt;
use futures::stream::{self, BoxStream, StreamExt};
use millpond_core::time::Instant;
use millpond_core::wire::message::serve::{METHOD_PREFILL, PrefillRequest, PrefillStep};
use parking_lot::Mutex;

use super::Prefills;
use crate::rpc::{Client, Reason, Refusal, RpcError};
use crate::runtime::Runtime;
use crate::session::{Credentials, Target};

/// Most prefill nodes that sessions are kept to.
const CLIENTS_MAX: usize = 1024;

/// Calls prefill nodes by their addresses; one session each, kept.
///
/// Example: `verify/tests/serving.rs`.
pub struct RpcPrefills<R> {
    runtime: R,
    credentials: Credentials,
    clients: Mutex<HashMap<String, Client<R>>>,
}

impl<R: Runtime> RpcPrefills<R> {
    /// Calls as the node of `credentials`.
    pub fn new(runtime: R, credentials: Credentials) -> Self {
        Self { runtime, credentials, clients: Mutex::default() }
    }

    fn client(&self, address: &str) -> Result<Client<R>, Refusal> {
        let mut clients = self.clients.lock();
        if let Some(client) = clients.get(address) {
            return Ok(client.clone());
        }
        let target = Target::parse(address).map_err(|error| Refusal::new(Reason::Malformed, error.to_string()))?;
        if clients.len() >= CLIENTS_MAX {
            clients.clear();
        }
        let client = Client::new(self.runtime.clone(), target, self.credentials.clone());
        clients.insert(address.to_owned(), client.clone());
        Ok(client)
    }
}

impl<R: Runtime> Prefills for RpcPrefills<R> {
    fn prefill(
        &self,
        address: &str,
        request: PrefillRequest,
        deadline: Instant,
    ) -> BoxStream<'static, Result<PrefillStep, Refusal>> {
        let client = match self.client(address) {
            Ok(client) => client,
            Err(refusal) => return stream::iter([Err(refusal)]).boxed(),
        };
        let address = address.to_owned();
        let call = async move { client.stream(METHOD_PREFILL, &request, deadline).await };
        let steps = call.map(|begun| match begun {
            Ok(replies) => replies.left_stream(),
            Err(error) => stream::iter([Err(error)]).right_stream(),
        });
        steps.flatten_stream().map(move |step| step.map_err(|error| refusal(&address, error))).boxed()
    }
}

/// What the prefill node refused is refused; what failed on the way there is "unavailable", and names it.
fn refusal(address: &str, error: RpcError) -> Refusal {
    match error {
        RpcError::Refused(refusal) => refusal,
        error => {
            let refusal = Refusal::new(Reason::Unavailable, format!("the prefill node {address}: {error}"));
            match error.retry_after() {
                Some(span) => refusal.retry_after(span),
                None => refusal,
            }
        }
    }
}
