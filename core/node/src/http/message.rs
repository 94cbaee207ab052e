//! Requests and replies as a handler sees them, without a library's types.
//!
//! A request is whole when a handler gets it (its body is bounded by [`Limits`](super::Limits)); a reply is whole or a
//! stream. Errors have the shape OpenAI's clients parse: `{"error": {"message", "type", "param", "code"}}`.

use std::borrow::Cow;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, Stream, StreamExt};
use hyper::HeaderMap;
use millpond_core::time::Duration;
use serde::Serialize;

/// What a request asks to do with its path.
///
/// ```
/// use millpond_node::http::Method;
/// assert_eq!(Method::parse("POST"), Method::Post);
/// assert_eq!(Method::parse("BREW"), Method::Other);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Method {
    /// Read; `HEAD` arrives as this too, its body is cut off on the way out.
    Get,
    /// Do.
    Post,
    /// Replace.
    Put,
    /// Remove.
    Delete,
    /// Anything else.
    Other,
}

impl Method {
    /// The method called `name`.
    #[must_use]
    pub fn parse(name: &str) -> Self {
        match name {
            "GET" | "HEAD" => Self::Get,
            "POST" => Self::Post,
            "PUT" => Self::Put,
            "DELETE" => Self::Delete,
            _ => Self::Other,
        }
    }
}

/// One whole request.
///
/// ```
/// use millpond_node::http::{Method, Request};
/// let request = Request::new(Method::Get, "/health", Vec::new());
/// assert_eq!(request.path, "/health");
/// assert_eq!(request.header("x-request-id"), None);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// What to do.
    pub method: Method,
    /// The path, without the query.
    pub path: String,
    /// What stood behind `?`, undecoded; empty if nothing did.
    pub query: String,
    /// The client's `x-request-id` if it sent a sane one, otherwise one of ours. The reply carries it too.
    pub id: String,
    /// The whole body.
    pub body: Vec<u8>,
    pub(super) headers: HeaderMap,
}

impl Request {
    /// A request without headers and query, for tests and for calls inside the process.
    #[must_use]
    pub fn new(method: Method, path: &str, body: Vec<u8>) -> Self {
        Self { method, path: path.into(), query: String::new(), id: fresh_id(), body, headers: HeaderMap::new() }
    }

    /// The value of the header `name` (lower case), if it is there and is text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The same, with a mark for each byte that is no text.
    #[must_use]
    pub fn header_lossy(&self, name: &str) -> Option<Cow<'_, str>> {
        self.headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()))
    }
}

/// A request id nobody used before: `req-` and 96 random bits in hexadecimal.
pub(super) fn fresh_id() -> String {
    let mut random = [0u8; 12];
    // Without randomness ids may repeat; they name, they do not protect.
    let _ = getrandom::fill(&mut random);
    let mut id = String::from("req-");
    for byte in random {
        id.push_str(&format!("{byte:02x}"));
    }
    id
}

pub(super) enum Content {
    Whole(Vec<u8>),
    Stream(BoxStream<'static, Vec<u8>>),
}

/// What goes back to the client.
///
/// ```
/// use millpond_node::http::Reply;
/// let reply = Reply::json(200, &serde_json::json!({"ok": true})).with_header("x-note", "hello");
/// assert_eq!(reply.status(), 200);
/// assert_eq!(reply.text().as_deref(), Some("{\"ok\":true}"));
/// ```
pub struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) content: Content,
}

impl Reply {
    /// A whole reply of some media type.
    #[must_use]
    pub fn whole(status: u16, media_type: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: vec![("content-type", media_type.into())], content: Content::Whole(body.into()) }
    }

    /// A whole reply in JSON.
    #[must_use]
    pub fn json(status: u16, value: &impl Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => Self::whole(status, "application/json", body),
            // Only a map with keys that are not text gets here; ours have none.
            Err(error) => Self::whole(500, "text/plain; charset=utf-8", error.to_string()),
        }
    }

    /// A stream of server-sent events; each item is one event's bytes. Dropped when the client goes away.
    #[must_use]
    pub fn events(events: impl Stream<Item = Vec<u8>> + Send + 'static) -> Self {
        let headers = vec![
            ("content-type", "text/event-stream; charset=utf-8".into()),
            ("cache-control", "no-cache".into()),
            ("x-accel-buffering", "no".into()),
        ];
        Self { status: 200, headers, content: Content::Stream(events.boxed()) }
    }

    /// The same reply with one more header; a value that is not a valid header value is left out.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The status code.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.status
    }

    /// The value of the header `name` (lower case), if the reply has it.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// The body as text, if the reply is whole and is text.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        match &self.content {
            Content::Whole(body) => String::from_utf8(body.clone()).ok(),
            Content::Stream(_) => None,
        }
    }

    /// The chunks of the body, one for a whole reply.
    #[must_use]
    pub fn into_chunks(self) -> BoxStream<'static, Vec<u8>> {
        match self.content {
            Content::Whole(body) => futures::stream::iter([body]).boxed(),
            Content::Stream(chunks) => chunks,
        }
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("status", &self.status).field("text", &self.text()).finish_non_exhaustive()
    }
}

/// A refusal in OpenAI's shape: a status, a message that says what to do, and the field it is about.
///
/// ```
/// use millpond_node::http::ApiError;
/// let error = ApiError::invalid("`max_tokens` must be at least 1").about("max_tokens");
/// assert_eq!(error.reply().status(), 400);
/// assert!(error.reply().text().unwrap().contains(r#""param":"max_tokens""#));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
#[non_exhaustive]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// What is wrong and what to do about it.
    pub message: String,
    /// OpenAI's `type`, such as `invalid_request_error`.
    pub kind: &'static str,
    /// OpenAI's `code`, a stable word for programs.
    pub code: Option<&'static str>,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// Sent as `Retry-After`, rounded up to whole seconds.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error with a status, OpenAI's type and a message.
    #[must_use]
    pub fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, code: None, param: None, retry_after: None }
    }

    /// 400: the request makes no sense as it is.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    /// The same error about the field `param`.
    #[must_use]
    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The same error with a stable word for programs.
    #[must_use]
    pub fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The same error with a hint when to come back.
    #[must_use]
    pub fn retry(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The error object alone, as streams carry it after their head is gone.
    #[must_use]
    pub fn value(&self) -> serde_json::Value {
        serde_json::json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }})
    }

    /// The whole reply.
    #[must_use]
    pub fn reply(&self) -> Reply {
        let mut reply = Reply::json(self.status, &self.value());
        if self.status == 401 {
            reply = reply.with_header("www-authenticate", "Bearer");
        }
        match self.retry_after {
            Some(after) => {
                let secs = after.as_millis().div_ceil(1_000).max(1);
                reply.with_header("retry-after", secs.to_string())
            }
            None => reply,
        }
    }
}

/// Whatever answers requests. The returned future is dropped when the client goes away.
///
/// ```
/// use millpond_node::http::{Handler, Method, Reply, Request};
/// use futures::FutureExt;
/// struct Hello;
/// impl Handler for Hello {
///     fn answer(&self, request: Request) -> futures::future::BoxFuture<'static, Reply> {
///         async move { Reply::whole(200, "text/plain", format!("hello {}", request.path)) }.boxed()
///     }
/// }
/// let reply = futures::executor::block_on(Hello.answer(Request::new(Method::Get, "/you", Vec::new())));
/// assert_eq!(reply.text().as_deref(), Some("hello /you"));
/// ```
pub trait Handler: Send + Sync + 'static {
    /// Answers one request.
    fn answer(&self, request: Request) -> BoxFuture<'static, Reply>;
}
