//! The OpenAI-compatible API over a [`Generator`]: paths, statuses, and which failure is which error.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::future::{self, BoxFuture, FutureExt};
use millpond_core::time::Duration;
use serde_json::json;

use super::answer::{Heading, deliver};
use super::message::{ApiError, Handler, Method, Reply, Request};
use super::openai::{Form, api_key, order};
use super::pages::{Pages, no_such_path, wrong_method};
use crate::router::{Failure, Generator, Stage};

const PATHS: &str =
    "/v1/completions, /v1/chat/completions, /v1/models, /v1/requests/{id}, /health, /ready, /metrics, /debug/explain";

/// A router's HTTP face.
///
/// Paths: `POST /v1/completions`, `POST /v1/chat/completions`, `GET /v1/models`, `GET /v1/models/{name}`,
/// `GET /v1/requests/{id}`, and those of [`Pages`].
///
/// ```
/// # use futures::future::{BoxFuture, FutureExt};
/// # use millpond_node::router::{Failure, Generate, Generation, Generator, Offer};
/// use millpond_node::http::{Api, Handler, Method, Pages, Request};
/// # struct Nothing;
/// # impl Generator for Nothing {
/// #     fn offers(&self) -> Vec<Offer> { vec![] }
/// #     fn generate(&self, _: Generate) -> BoxFuture<'static, Result<Generation, Failure>> {
/// #         async { Err(Failure::EmptyPrompt) }.boxed()
/// #     }
/// #     fn explain(&self, _: &str, _: Option<&str>) -> Option<serde_json::Value> { None }
/// # }
/// # let generator = std::sync::Arc::new(Nothing);
/// let api = Api::new(generator, Pages::new("router"));
/// let reply = futures::executor::block_on(api.answer(Request::new(Method::Get, "/v1/models", vec![])));
/// assert_eq!(reply.text().as_deref(), Some(r#"{"data":[],"object":"list"}"#));
/// ```
#[derive(Clone)]
pub struct Api {
    generator: Arc<dyn Generator>,
    pages: Pages,
    started: u64,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl Api {
    /// The API over `generator`, with the node's own pages beside it.
    #[must_use]
    pub fn new(generator: Arc<dyn Generator>, pages: Pages) -> Self {
        Self { generator, pages, started: unix_secs() }
    }

    fn models(&self, only: Option<&str>) -> Reply {
        let offers = self.generator.offers();
        let card = |name: &str, context: u32| {
            json!({"id": name, "object": "model", "created": self.started, "owned_by": "millpond",
                "max_model_len": context})
        };
        let Some(only) = only else {
            let data: Vec<_> = offers.iter().map(|offer| card(&offer.name, offer.context)).collect();
            return Reply::json(200, &json!({"object": "list", "data": data}));
        };
        match offers.iter().find(|offer| offer.name == only) {
            Some(offer) => Reply::json(200, &card(&offer.name, offer.context)),
            None => {
                let known = offers.into_iter().map(|offer| offer.name).collect();
                refusal(&Failure::UnknownModel { asked: only.into(), known }).reply()
            }
        }
    }

    /// A tenant sees its own requests only.
    fn explain(&self, id: &str, tenant: Option<&str>) -> Reply {
        match self.generator.explain(id, tenant) {
            Some(record) => Reply::json(200, &record),
            None => {
                let message = format!(
                    "nothing is known of request {id:?}; ids are in the header x-request-id of replies, \
                     and only the latest requests are kept"
                );
                ApiError::new(404, "invalid_request_error", message).coded("unknown_request").reply()
            }
        }
    }

    fn complete(&self, form: Form, request: &Request, tenant: Option<String>) -> BoxFuture<'static, Reply> {
        if let Some(coding) = request.header("content-encoding").filter(|coding| *coding != "identity") {
            let message = format!("a body in content-encoding {coding:?} cannot be read; send it as it is");
            return future::ready(ApiError::new(415, "invalid_request_error", message).reply()).boxed();
        }
        let mut order = match order(form, request) {
            Ok(order) => order,
            Err(error) => return future::ready(error.reply()).boxed(),
        };
        order.generate.tenant = tenant;
        let generator = Arc::clone(&self.generator);
        async move {
            let heading = Heading::new(&order, unix_secs());
            match generator.generate(order.generate.clone()).await {
                Ok(generation) => deliver(&order, heading, generation).await,
                Err(failure) => refusal(&failure).reply(),
            }
        }
        .boxed()
    }
}

impl Handler for Api {
    fn answer(&self, request: Request) -> BoxFuture<'static, Reply> {
        if let Some(page) = self.pages.page(&request) {
            return future::ready(page).boxed();
        }
        let path = request.path.trim_end_matches('/');
        let tenant = match self.generator.tenant(api_key(&request)) {
            Ok(tenant) => tenant,
            Err(failure) => return future::ready(refusal(&failure).reply()).boxed(),
        };
        let reply = match (path, request.method) {
            ("/v1/completions", Method::Post) => return self.complete(Form::Completion, &request, tenant),
            ("/v1/chat/completions", Method::Post) => return self.complete(Form::Chat, &request, tenant),
            ("/v1/completions" | "/v1/chat/completions", _) => wrong_method("POST"),
            ("/v1/models", Method::Get) => self.models(None),
            ("/v1/models", _) => wrong_method("GET"),
            (path, method) => match (path.strip_prefix("/v1/models/"), path.strip_prefix("/v1/requests/")) {
                (None, None) => no_such_path(&request, PATHS),
                _ if method != Method::Get => wrong_method("GET"),
                (Some(model), _) => self.models(Some(model)),
                (None, Some(id)) => self.explain(id, tenant.as_deref()),
            },
        };
        future::ready(reply).boxed()
    }
}

/// The error a client gets for `failure`.
pub(super) fn refusal(failure: &Failure) -> ApiError {
    let message = failure.to_string();
    let invalid = |param: &str, code| ApiError::invalid(message.clone()).about(param).coded(code);
    match failure {
        Failure::UnknownModel { .. } => {
            ApiError::new(404, "invalid_request_error", message).about("model").coded("model_not_found")
        }
        Failure::Unauthorized { .. } => ApiError::new(401, "invalid_request_error", message).coded("invalid_api_key"),
        Failure::EmptyPrompt => invalid("prompt", "empty_prompt"),
        Failure::PromptTooLong { .. } | Failure::PromptTooLarge { .. } | Failure::AnswerTooLong { .. } => {
            invalid("prompt", "context_length_exceeded")
        }
        Failure::UnknownToken { .. } => invalid("prompt", "unknown_token"),
        Failure::Template { .. } => invalid("messages", "invalid_messages"),
        Failure::Unsupported { what } => ApiError::invalid(message).about(*what).coded("unsupported_parameter"),
        Failure::Busy { retry_after, .. } => {
            ApiError::new(429, "overloaded_error", message).coded("busy").retry(*retry_after)
        }
        Failure::Overloaded { stage, retry_after, .. } => {
            let code = match stage {
                Stage::Early => "refused",
                Stage::Late => "refused_late",
            };
            ApiError::new(429, "overloaded_error", message).coded(code).retry(*retry_after)
        }
        Failure::NoNode { .. } => {
            ApiError::new(503, "server_error", message).coded("no_node").retry(Duration::from_secs(1))
        }
        Failure::ShuttingDown { .. } => {
            ApiError::new(503, "server_error", message).coded("shutting_down").retry(Duration::from_secs(1))
        }
        Failure::NodeLost { .. } => {
            ApiError::new(502, "server_error", message).coded("node_lost").retry(Duration::from_secs(1))
        }
        Failure::Deadline { .. } => ApiError::new(504, "server_error", message).coded("deadline"),
        Failure::Unservable { .. } => ApiError::invalid(message).coded("unservable"),
        Failure::Refused { .. } => ApiError::new(500, "server_error", message).coded("refused"),
    }
}

/// Wall-clock seconds since 1970, for people; nothing is decided by it.
fn unix_secs() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
