//! The HTTP/1.1 server: accepts connections and hands whole requests to a [`Handler`].
//!
//! Invariants: at most `connections_max` connections are open, one more is answered 503 and closed; a head, a body and a
//! stalled write each have a time limit; a body has a size limit. The handler's future is dropped when its client goes
//! away, and so is the stream of a reply. Once told to stop, the server takes no new connection, lets running requests
//! finish for `drain_max`, then drops them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::future::{self, Either, FutureExt};
use futures::io::AsyncWriteExt;
use futures::stream::StreamExt;
use http_body_util::{BodyExt, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{HeaderName, HeaderValue};
use hyper::server::conn::http1;
use millpond_core::time::Duration;

use super::io::{Io, Sleeper, Timer};
use super::message::{ApiError, Content, Handler, Method, Reply, Request, fresh_id};
use crate::runtime::{Runtime, Stop, within};

/// What a server allows its clients.
///
/// ```
/// let limits = millpond_node::http::Limits::default();
/// assert_eq!(limits.body_len_max, 8 << 20);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Connections open at a time.
    pub connections_max: usize,
    /// Bytes of a request's body.
    pub body_len_max: usize,
    /// Bytes of a request's head.
    pub head_len_max: usize,
    /// How long a connection may be idle, or take to send a head.
    pub head_wait_max: Duration,
    /// How long a body may take to arrive.
    pub body_wait_max: Duration,
    /// How long a client may leave a reply unread.
    pub stall_max: Duration,
    /// How long running requests may go on once the server is told to stop.
    pub drain_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 1_024,
            body_len_max: 8 << 20,
            head_len_max: 64 << 10,
            head_wait_max: Duration::from_secs(60),
            body_wait_max: Duration::from_secs(30),
            stall_max: Duration::from_secs(30),
            drain_max: Duration::from_secs(5),
        }
    }
}

/// Accepts connections until `stop`, then drains; returns when the last connection is gone.
pub async fn serve<R: Runtime>(
    runtime: R,
    listener: R::Listener,
    handler: Arc<dyn Handler>,
    limits: Limits,
    stop: Stop,
) {
    let open = Arc::new(AtomicUsize::new(0));
    let cut = Stop::new();
    let stopped = stop.stopped();
    futures::pin_mut!(stopped);
    loop {
        let accepted = {
            let accept = runtime.accept(&listener);
            futures::pin_mut!(accept);
            match future::select(accept, &mut stopped).await {
                Either::Left((accepted, _)) => accepted,
                Either::Right(_) => break,
            }
        };
        let (stream, _) = match accepted {
            Ok(accepted) => accepted,
            // Out of descriptors, or the peer left already: neither ends the server, neither may spin.
            Err(error) => {
                tracing::warn!(%error, "http: a connection could not be accepted");
                runtime.sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let held = Held::take(&open);
        if held.count > limits.connections_max {
            runtime.spawn(turn_away(runtime.clone(), stream, held));
            continue;
        }
        let work = serve_stream(runtime.clone(), stream, Arc::clone(&handler), limits, stop.clone());
        let cut = cut.clone();
        runtime.spawn(async move {
            // Cut: drained for long enough.
            let _ = cut.or_stopped(work).await;
            drop(held);
        });
    }
    drop(listener);
    let deadline = runtime.now() + limits.drain_max;
    while open.load(Ordering::Acquire) > 0 {
        if runtime.now() >= deadline {
            cut.stop();
            return;
        }
        runtime.sleep(Duration::from_millis(5)).await;
    }
}

/// Listens on `address` and serves in the background; returns the address it listens on.
///
/// # Errors
/// What `listen` reports, such as `AddrInUse`.
pub async fn start<R: Runtime>(
    runtime: &R,
    address: SocketAddr,
    handler: Arc<dyn Handler>,
    limits: Limits,
    stop: &Stop,
) -> std::io::Result<(SocketAddr, crate::runtime::Task<()>)> {
    let listener = runtime.listen(address).await?;
    let local = crate::runtime::local_addr(&listener)?;
    let task = crate::runtime::start(runtime, serve(runtime.clone(), listener, handler, limits, stop.clone()));
    Ok((local, task))
}

/// One of the open connections, as long as it lives.
struct Held {
    open: Arc<AtomicUsize>,
    count: usize,
}

impl Held {
    fn take(open: &Arc<AtomicUsize>) -> Self {
        let count = open.fetch_add(1, Ordering::AcqRel) + 1;
        Self { open: Arc::clone(open), count }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn turn_away<R: Runtime>(runtime: R, mut stream: R::Stream, held: Held) {
    let body = ApiError::new(503, "overloaded_error", "too many connections; close idle ones or try again").value();
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    // Courtesy only: a client that does not take it is cut off all the same.
    let _ = within(&runtime, Duration::from_secs(1), async {
        stream.write_all(head.as_bytes()).await?;
        stream.close().await
    })
    .await;
    drop(held);
}

/// Serves one connected stream until it closes, or until its current request is done after `stop`.
pub async fn serve_stream<R: Runtime>(
    runtime: R,
    stream: R::Stream,
    handler: Arc<dyn Handler>,
    limits: Limits,
    stop: Stop,
) {
    let timers = runtime.clone();
    let sleeper: Sleeper = Arc::new(move |span| timers.sleep(span).boxed());
    let io = Io::new(stream, Arc::clone(&sleeper), limits.stall_max);
    let service = hyper::service::service_fn(move |request| {
        let (runtime, handler) = (runtime.clone(), Arc::clone(&handler));
        async move { Ok::<_, Infallible>(exchange(runtime, request, handler, limits).await) }
    });
    let connection = http1::Builder::new()
        .timer(Timer(sleeper))
        .header_read_timeout(std::time::Duration::from(limits.head_wait_max))
        .max_buf_size(limits.head_len_max.max(8_192))
        .serve_connection(io, service);
    futures::pin_mut!(connection);
    let outcome = match future::select(connection.as_mut(), stop.stopped()).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(_) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "http: a connection ended early");
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

async fn exchange<R: Runtime>(
    runtime: R,
    request: hyper::Request<Incoming>,
    handler: Arc<dyn Handler>,
    limits: Limits,
) -> hyper::Response<Body> {
    let id = request_id(request.headers().get("x-request-id"));
    let reply = match whole(&runtime, request, id.clone(), limits).await {
        Ok(request) => handler.answer(request).await,
        Err(error) => error.reply(),
    };
    response(reply, &id)
}

/// The client's id if it is 1 to 128 printable ASCII characters, otherwise a fresh one.
fn request_id(header: Option<&HeaderValue>) -> String {
    match header.and_then(|value| value.to_str().ok()) {
        Some(id) if (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()) => id.to_owned(),
        _ => fresh_id(),
    }
}

async fn whole<R: Runtime>(
    runtime: &R,
    request: hyper::Request<Incoming>,
    id: String,
    limits: Limits,
) -> Result<Request, ApiError> {
    let (head, body) = request.into_parts();
    let max = limits.body_len_max;
    let too_long =
        || ApiError::new(413, "invalid_request_error", format!("the body is longer than the {max} bytes allowed here"));
    let announced = head.headers.get("content-length").and_then(|len| len.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|len| len > max) {
        return Err(too_long());
    }
    let body = match within(runtime, limits.body_wait_max, Limited::new(body, max).collect()).await {
        Ok(Ok(body)) => body.to_bytes().to_vec(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => return Err(too_long()),
        Ok(Err(error)) => return Err(ApiError::invalid(format!("the body could not be read: {error}"))),
        Err(_) => {
            let wait = limits.body_wait_max;
            return Err(ApiError::new(408, "invalid_request_error", format!("the body did not arrive within {wait}")));
        }
    };
    Ok(Request {
        method: Method::parse(head.method.as_str()),
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        id,
        body,
        headers: head.headers,
    })
}

fn response(reply: Reply, id: &str) -> hyper::Response<Body> {
    let body = match reply.content {
        Content::Whole(body) => Full::new(Bytes::from(body)).boxed_unsync(),
        Content::Stream(chunks) => {
            StreamBody::new(chunks.map(|chunk| Ok(Frame::data(Bytes::from(chunk))))).boxed_unsync()
        }
    };
    let mut response = hyper::Response::new(body);
    // Statuses come from our own code; an impossible one is answered as our fault.
    *response.status_mut() =
        hyper::StatusCode::from_u16(reply.status).unwrap_or(hyper::StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    for (name, value) in reply.headers {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.append(HeaderName::from_static(name), value);
        }
    }
    if let Ok(value) = HeaderValue::from_str(id) {
        headers.insert("x-request-id", value);
    }
    response
}
