//! Remote calls over control sessions: many at once, each with a deadline, answered once or by a stream of items.
//!
//! A [`Router`] holds the methods of a node; [`serve`] answers them on one session. A [`Client`] calls them, over one
//! session that it opens when it needs it and replaces when it breaks. Frames are those of `core::wire::message::rpc`.
//! Bulk data does not travel here: a call names memory, and the transfer engine moves it.
//!
//! Invariants: every call ends by its deadline; dropping a call cancels it at the target; a target runs at most
//! [`Limits::calls_max`] calls per session and says "busy" with a hint above that; a mutation that is retried is done
//! once; a peer that breaks the protocol loses its session and nothing else; a handler that panics is an answer.
//!
//! Order of files: `link` (one connection's frames) · `dedup` · `router` `server` (the target) · `channel` `replies`
//! `client` (the caller).

mod channel;
mod client;
mod dedup;
mod link;
mod replies;
mod router;
mod server;

use std::borrow::Cow;
use std::sync::Arc;

pub use client::{Client, Connect, Connection, Dialer, Duplex};
use millpond_core::time::Duration;
use millpond_core::wire::message::method_name;
use millpond_core::wire::message::rpc::Violation;
pub use millpond_core::wire::message::rpc::{MESSAGE_LEN_MAX, Reason, Refusal};
pub use replies::Replies;
pub use router::{Context, Items, Router};
pub use server::serve;

use crate::session::SessionError;

/// Bounds of one session, at either end.
///
/// ```
/// let limits = millpond_node::rpc::Limits::default();
/// assert!(limits.ping_after < limits.gone_after);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Calls in flight on a session.
    pub calls_max: usize,
    /// Bytes of frames that wait to be sent; a sender waits above that.
    pub outbox_len_max: usize,
    /// A peer that was silent this long is asked whether it lives.
    pub ping_after: Duration,
    /// A peer that was silent this long, though asked, is gone.
    pub gone_after: Duration,
    /// How long the body of one frame may take to come in.
    pub frame_span_max: Duration,
    /// How long a call may last at the target, whatever its caller wishes.
    pub call_span_max: Duration,
    /// How long the calls in flight may go on once a session is to stop.
    pub drain_span_max: Duration,
    /// How long a dial and its hello may take.
    pub dial_span_max: Duration,
    /// Items that a stream's target may send ahead of its reader.
    pub window: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls_max: 256,
            outbox_len_max: 1 << 20,
            ping_after: Duration::from_secs(1),
            gone_after: Duration::from_secs(10),
            frame_span_max: Duration::from_secs(30),
            call_span_max: Duration::from_secs(3600),
            drain_span_max: Duration::from_secs(5),
            dial_span_max: Duration::from_secs(3),
            window: 64,
        }
    }
}

/// What the far end knows of a call that failed.
///
/// ```
/// assert_ne!(millpond_node::rpc::FarEnd::Untouched, millpond_node::rpc::FarEnd::Unknown);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FarEnd {
    /// The call never reached it.
    Untouched,
    /// The call may have been done there, or part of it.
    Unknown,
}

/// Why a call has no answer.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_node::rpc::{Reason, Refusal, RpcError};
/// let busy = RpcError::Refused(Refusal::new(Reason::Busy, "").retry_after(Duration::from_millis(5)));
/// assert!(busy.is_untouched());
/// assert_eq!(busy.retry_after(), Some(Duration::from_millis(5)));
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// The target said no.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The caller's time was up first; the target was told to stop.
    #[error("no answer to {} within {waited}", shown(*method))]
    Deadline {
        /// The method that was called.
        method: u16,
        /// How long was waited.
        waited: Duration,
    },
    /// There was a session, and it ended before the answer.
    #[error("the peer is gone: {detail}")]
    PeerGone {
        /// How the session ended.
        detail: Cow<'static, str>,
        /// What the peer knows of the call.
        far_end: FarEnd,
    },
    /// No session could be opened.
    #[error("{source}")]
    Unreachable {
        /// Why not.
        source: Arc<SessionError>,
        /// When the next attempt is made; calls before that fail with this error at once.
        retry_after: Duration,
    },
    /// The peer broke the protocol; the session was closed.
    #[error("the peer broke the call protocol: {detail}")]
    Violation {
        /// What it did.
        detail: Cow<'static, str>,
    },
    /// The request is longer than a message may be; cut it into several calls.
    #[error("a request of {len} bytes is longer than {MESSAGE_LEN_MAX}; send it in several calls")]
    TooLarge {
        /// Its length.
        len: usize,
    },
    /// The caller has as many calls in flight as it may have; wait for some of them.
    #[error("{max} calls are in flight to this peer already; wait for some of them")]
    Full {
        /// How many may be in flight.
        max: usize,
    },
    /// The answer is no message of the expected type; the peer's version does not fit.
    #[error("cannot read the answer to {}: {source}", shown(*method))]
    Answer {
        /// The method that was called.
        method: u16,
        /// What is wrong with it.
        source: prost::DecodeError,
    },
}

impl RpcError {
    /// Whether the target surely did nothing.
    #[must_use]
    pub fn is_untouched(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.reason.is_untouched(),
            Self::Unreachable { .. } | Self::TooLarge { .. } | Self::Full { .. } => true,
            Self::PeerGone { far_end, .. } => *far_end == FarEnd::Untouched,
            Self::Deadline { .. } | Self::Violation { .. } | Self::Answer { .. } => false,
        }
    }

    /// When asking again may help, if somebody knows.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) => refusal.retry_after,
            Self::Unreachable { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }

    /// Why the target said no, if it did.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(refusal) => Some(refusal.reason),
            _ => None,
        }
    }

    /// Whether the cause may go away by itself, so that trying again makes sense.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                refusal.retry_after.is_some()
                    || matches!(refusal.reason, Reason::Busy | Reason::Draining | Reason::Unavailable)
            }
            Self::Unreachable { source, .. } => source.is_passing(),
            Self::PeerGone { .. } | Self::Full { .. } => true,
            Self::Deadline { .. } | Self::Violation { .. } | Self::TooLarge { .. } | Self::Answer { .. } => false,
        }
    }

    /// The same error, as the caller of `method` sees it: the target's deadline is the caller's, only seen first.
    fn of_call(self, method: u16, waited: Duration) -> Self {
        match self {
            Self::Refused(Refusal { reason: Reason::Deadline, .. }) => Self::Deadline { method, waited },
            error => error,
        }
    }

    fn gone(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::PeerGone { detail: detail.into(), far_end: FarEnd::Unknown }
    }

    fn violation(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::Violation { detail: detail.into() }
    }
}

impl From<Violation> for RpcError {
    fn from(violation: Violation) -> Self {
        Self::violation(violation.to_string())
    }
}

/// A method for people: its name, or its number.
fn shown(method: u16) -> String {
    method_name(method).map_or_else(|| format!("method {method:#06x}"), str::to_owned)
}
