//! One HTTP request to another node, for the command line and for supervision.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::{self, Either, FutureExt};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use millpond_core::time::{Duration, Instant};

use super::io::{Io, Sleeper};
use super::message::Method;
use crate::runtime::{Runtime, by};

/// Bytes of an answer that are read at most.
const ANSWER_LEN_MAX: usize = 64 << 20;

/// Why there is no answer.
///
/// ```
/// use millpond_node::http::FetchError;
/// let error = FetchError::Deadline { address: "127.0.0.1:8000".parse().unwrap() };
/// assert_eq!(error.to_string(), "127.0.0.1:8000 did not answer in time");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// Nobody listens there.
    #[error("nobody answers at {address}: {error}")]
    Dial {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        error: std::io::Error,
    },
    /// The answer broke off, is no HTTP, or is too long.
    #[error("{address} answered badly: {reason}")]
    Broken {
        /// Where.
        address: SocketAddr,
        /// What is wrong.
        reason: String,
    },
    /// It took too long.
    #[error("{address} did not answer in time")]
    Deadline {
        /// Where.
        address: SocketAddr,
    },
}

/// A secret that goes along as `authorization: Bearer`; none.
///
/// ```
/// use millpond_node::http::Bearer;
/// assert_eq!(format!("{:?}", Bearer(Some("sk-1".into()))), "Bearer(..)");
/// ```
#[derive(Clone, Default)]
pub struct Bearer(pub Option<String>);

impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bearer(..)")
    }
}

/// Reads `path` as whoever has `key`; like [`fetch`].
///
/// # Errors
/// Like [`fetch`].
pub async fn fetch_as<R: Runtime>(
    runtime: &R,
    address: SocketAddr,
    key: &Bearer,
    path: &str,
    deadline: Instant,
) -> Result<(u16, Vec<u8>), FetchError> {
    by(runtime, deadline, exchange(runtime, address, (Method::Get, key), path, Vec::new()))
        .await
        .unwrap_or(Err(FetchError::Deadline { address }))
}

/// Sends one request and returns the status and the whole body of the answer.
///
/// # Errors
/// See [`FetchError`]; a status such as 404 is an answer, not an error.
pub async fn fetch<R: Runtime>(
    runtime: &R,
    address: SocketAddr,
    method: Method,
    path: &str,
    body: Vec<u8>,
    deadline: Instant,
) -> Result<(u16, Vec<u8>), FetchError> {
    by(runtime, deadline, exchange(runtime, address, (method, &Bearer::default()), path, body))
        .await
        .unwrap_or(Err(FetchError::Deadline { address }))
}

async fn exchange<R: Runtime>(
    runtime: &R,
    address: SocketAddr,
    (method, key): (Method, &Bearer),
    path: &str,
    body: Vec<u8>,
) -> Result<(u16, Vec<u8>), FetchError> {
    let broken = |reason: String| FetchError::Broken { address, reason };
    let stream = runtime.dial(address).await.map_err(|error| FetchError::Dial { address, error })?;
    let timers = runtime.clone();
    let sleeper: Sleeper = Arc::new(move |span| timers.sleep(span).boxed());
    let io = Io::new(stream, sleeper, Duration::from_secs(30));
    let (mut sender, connection) = http1::handshake(io).await.map_err(|error| broken(error.to_string()))?;
    let name = match method {
        Method::Post => "POST",
        Method::Put => "PUT",
        Method::Delete => "DELETE",
        Method::Get | Method::Other => "GET",
    };
    let mut request = hyper::Request::builder();
    if let Some(key) = &key.0 {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let request = request
        .method(name)
        .uri(path)
        .header("host", address.to_string())
        .header("content-type", "application/json")
        .header("connection", "close")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| broken(format!("the path {path:?} cannot be asked for: {error}")))?;
    let answer = async move {
        let response = sender.send_request(request).await?;
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), ANSWER_LEN_MAX).collect().await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>((status, body.to_bytes().to_vec()))
    };
    futures::pin_mut!(answer, connection);
    // The connection only moves while it is polled; it may be done before the answer was taken out of it.
    let outcome = match future::select(answer, connection).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right((Err(error), _)) => Err(error.into()),
        Either::Right((Ok(()), answer)) => answer.await,
    };
    outcome.map_err(|error| broken(error.to_string()))
}
