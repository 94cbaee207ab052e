//! The pages every node has: `/health`, `/ready`, `/metrics`, `/debug/explain`.

use std::sync::Arc;

use futures::future::{self, BoxFuture, FutureExt};
use serde_json::{Value, json};

use super::message::{ApiError, Handler, Method, Reply, Request};

/// What a node shows of itself over HTTP.
///
/// ```
/// use millpond_node::http::{Handler, Method, Pages, Request};
/// let pages = Pages::new("store").with_ready(|| Err("the directory is not reached yet".into()));
/// let ask = |path| futures::executor::block_on(pages.answer(Request::new(Method::Get, path, vec![]))).status();
/// assert_eq!((ask("/health"), ask("/ready"), ask("/nothing")), (200, 503, 404));
/// ```
#[derive(Clone)]
pub struct Pages {
    role: &'static str,
    metrics: Arc<dyn Fn() -> String + Send + Sync>,
    ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
    explain: Arc<dyn Fn() -> Value + Send + Sync>,
}

impl Pages {
    /// The pages of a node that is `role`, ready from the start and without metrics.
    #[must_use]
    pub fn new(role: &'static str) -> Self {
        Self { role, metrics: Arc::new(String::new), ready: Arc::new(|| Ok(())), explain: Arc::new(|| Value::Null) }
    }

    /// With `metrics` giving the text of `/metrics`, in Prometheus's text format 0.0.4.
    #[must_use]
    pub fn with_metrics(mut self, metrics: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.metrics = Arc::new(metrics);
        self
    }

    /// With `ready` saying whether the node serves, or why not.
    #[must_use]
    pub fn with_ready(mut self, ready: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.ready = Arc::new(ready);
        self
    }

    /// With `explain` giving what `/debug/explain` shows: the node's view of the world.
    #[must_use]
    pub fn with_explain(mut self, explain: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        self.explain = Arc::new(explain);
        self
    }

    /// The page `request` asks for, if it is one of these.
    pub(super) fn page(&self, request: &Request) -> Option<Reply> {
        let page: fn(&Self) -> Reply = match request.path.as_str() {
            "/health" | "/healthz" | "/liveness" => Self::health,
            "/ready" | "/readiness" => Self::readiness,
            "/metrics" => |pages| Reply::whole(200, "text/plain; version=0.0.4; charset=utf-8", (pages.metrics)()),
            "/debug/explain" => |pages| Reply::json(200, &(pages.explain)()),
            _ => return None,
        };
        if request.method != Method::Get {
            return Some(wrong_method("GET"));
        }
        Some(page(self))
    }

    fn health(&self) -> Reply {
        Reply::json(200, &json!({"status": "alive", "role": self.role, "version": env!("CARGO_PKG_VERSION")}))
    }

    fn readiness(&self) -> Reply {
        match (self.ready)() {
            Ok(()) => Reply::json(200, &json!({"status": "ready", "role": self.role})),
            Err(reason) => Reply::json(503, &json!({"status": "not ready", "role": self.role, "reason": reason})),
        }
    }
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").field("role", &self.role).finish_non_exhaustive()
    }
}

impl Handler for Pages {
    fn answer(&self, request: Request) -> BoxFuture<'static, Reply> {
        let paths = "/health, /ready, /metrics, /debug/explain";
        future::ready(self.page(&request).unwrap_or_else(|| no_such_path(&request, paths))).boxed()
    }
}

/// 404 that names the paths there are.
pub(super) fn no_such_path(request: &Request, paths: &str) -> Reply {
    let message = format!("there is nothing at {}; there is {paths}", request.path);
    ApiError::new(404, "invalid_request_error", message).coded("unknown_path").reply()
}

/// 405 that names the method to use.
pub(super) fn wrong_method(allowed: &'static str) -> Reply {
    let message = format!("use {allowed} for this path");
    ApiError::new(405, "invalid_request_error", message).reply().with_header("allow", allowed)
}
