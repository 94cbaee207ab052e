//! How owners and clients reach a shard: in this process, or by calls. Answers of an outlived term are refused here.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millpond_core::time::Instant;
use millpond_core::wire::message::directory as wire;

use super::Shard;
use crate::rpc::{Client, Reason, Refusal, Replies, RpcError};
use crate::runtime::Runtime;

/// The shard gave no answer that counts.
///
/// Example: `verify/tests/store.rs` (`Link`).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// It said no.
    #[error("the directory refused: {0}")]
    Refused(Refusal),
    /// It cannot be reached, or did not answer in time.
    #[error("the directory does not answer: {0}")]
    Unreachable(RpcError),
    /// The answer is of a term that is over.
    #[error("the directory at this address is in term {term}, which ended: term {seen} is known; it must be restarted")]
    OldTerm {
        /// The answer's term.
        term: u64,
        /// The highest term seen.
        seen: u64,
    },
    /// The answer makes no sense.
    #[error("the directory's answer cannot be read: {0}")]
    Unreadable(wire::Unreadable),
}

impl LinkError {
    /// The reason of a refusal.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(refusal) => Some(refusal.reason),
            _ => None,
        }
    }
}

impl From<RpcError> for LinkError {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Refused(refusal) => Self::Refused(refusal),
            other => Self::Unreachable(other),
        }
    }
}

/// A way to a shard. Clones share the highest term seen.
///
/// Example: `verify/tests/store.rs`.
#[derive(Clone, Debug)]
pub struct Link<R> {
    way: Way<R>,
    term: Arc<AtomicU64>,
}

#[derive(Clone, Debug)]
enum Way<R> {
    Local(Arc<Shard>, R),
    Remote(Client<R>),
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($request:ident) -> $reply:ident = $method:ident, $kind:ident, |$shard:ident, $message:ident| $local:expr;)*) => {
        impl<R: Runtime> Link<R> {
            $($(#[$doc])*
            pub async fn $name(&self, $message: &wire::$request, deadline: Instant) -> Result<wire::$reply, LinkError> {
                let reply: wire::$reply = match &self.way {
                    Way::Local($shard, _) => $local.map_err(LinkError::Refused)?,
                    Way::Remote(client) => client.$kind(wire::$method, $message, deadline).await?,
                };
                self.check(reply.header())?;
                Ok(reply)
            })*
        }
    };
}

trait Headed {
    fn header(&self) -> Option<wire::Header>;
}

macro_rules! headed {
    ($($reply:ident)*) => { $(impl Headed for wire::$reply {
        fn header(&self) -> Option<wire::Header> {
            self.header
        }
    })* };
}

headed! { LocateReply ExistsReply StatReply ListReply RemoveReply ExplainReply ViewReply HeartbeatReply InventoryReply CommitReply EvictReply HoldingsReply }

impl Headed for wire::Header {
    fn header(&self) -> Option<wire::Header> {
        Some(*self)
    }
}

calls! {
    /// Looks keys up and leases them.
    locate(LocateRequest) -> LocateReply = METHOD_LOCATE, call, |shard, request| shard.locate(request);
    /// Whether keys are there.
    exists(ExistsRequest) -> ExistsReply = METHOD_EXISTS, call, |shard, request| shard.exists(request);
    /// What is known of a key.
    stat(StatRequest) -> StatReply = METHOD_STAT, call, |shard, request| shard.stat(request);
    /// A page of keys.
    list(ListRequest) -> ListReply = METHOD_LIST, call, |shard, request| Ok(shard.list(request));
    /// Removes keys.
    remove(RemoveRequest) -> RemoveReply = METHOD_REMOVE, mutate, |shard, request| shard.remove(request);
    /// Clears the namespace.
    clear(ClearRequest) -> RemoveReply = METHOD_CLEAR, mutate, |shard, _request| shard.clear();
    /// Why a key is a miss.
    explain_miss(ExplainRequest) -> ExplainReply = METHOD_EXPLAIN_MISS, call, |shard, request| shard.explain_miss(request);
    /// Owners and segments.
    view(ViewRequest) -> ViewReply = METHOD_VIEW, call, |shard, _request| Ok(shard.view());
    /// A page of what an owner holds.
    holdings(HoldingsRequest) -> HoldingsReply = METHOD_HOLDINGS, call, |shard, request| shard.holdings(request);
    /// An owner's first word.
    join(JoinRequest) -> Header = METHOD_JOIN, call, |shard, request| shard.join(request);
    /// An owner is alive.
    heartbeat(HeartbeatRequest) -> HeartbeatReply = METHOD_HEARTBEAT, call, |shard, request| shard.heartbeat(request);
    /// What an owner holds.
    inventory(InventoryRequest) -> InventoryReply = METHOD_INVENTORY, call, |shard, request| shard.inventory(request);
    /// Makes sealed replicas visible.
    commit(CommitRequest) -> CommitReply = METHOD_COMMIT, call, |shard, request| shard.commit(request);
    /// Proposes victims.
    evict(EvictRequest) -> EvictReply = METHOD_EVICT, call, |shard, request| shard.evict(request);
    /// Replicas that are lost.
    dropped(DroppedRequest) -> Header = METHOD_DROPPED, call, |shard, request| shard.dropped(request);
}

impl<R: Runtime> Link<R> {
    /// To a shard in this process.
    #[must_use]
    pub fn local(shard: Arc<Shard>, runtime: R) -> Self {
        Self { way: Way::Local(shard, runtime), term: Arc::default() }
    }

    /// To a shard at another node.
    #[must_use]
    pub fn remote(client: Client<R>) -> Self {
        Self { way: Way::Remote(client), term: Arc::default() }
    }

    /// Whether the shard is in this process.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self.way, Way::Local(..))
    }

    /// The stream of changes until `deadline`.
    pub async fn watch(&self, request: wire::WatchRequest, deadline: Instant) -> Result<Watch<R>, LinkError> {
        let inner = match &self.way {
            Way::Local(shard, runtime) => {
                Inner::Local { shard: Arc::clone(shard), runtime: runtime.clone(), after: request.after, deadline }
            }
            Way::Remote(client) => Inner::Remote(client.stream(wire::METHOD_WATCH, &request, deadline).await?),
        };
        Ok(Watch { inner, link: self.clone() })
    }

    fn check(&self, header: Option<wire::Header>) -> Result<(), LinkError> {
        let Some(header) = header else { return Ok(()) };
        let seen = self.term.fetch_max(header.term, Ordering::Relaxed);
        if header.term < seen {
            return Err(LinkError::OldTerm { term: header.term, seen });
        }
        Ok(())
    }
}

/// The stream of changes of a shard.
///
/// Example: `verify/tests/store.rs` (`watch`).
#[derive(Debug)]
pub struct Watch<R> {
    inner: Inner<R>,
    link: Link<R>,
}

#[derive(Debug)]
enum Inner<R> {
    Local { shard: Arc<Shard>, runtime: R, after: Option<wire::Stamp>, deadline: Instant },
    Remote(Replies<wire::EventBatch>),
}

impl<R: Runtime> Watch<R> {
    /// The next changes; an empty batch is a sign of life, one a second where nothing changes. `None` at the deadline.
    pub async fn next(&mut self) -> Option<Result<wire::EventBatch, LinkError>> {
        let batch = match &mut self.inner {
            Inner::Local { shard, runtime, after, deadline } => {
                let now = runtime.now();
                if now >= *deadline {
                    return None;
                }
                let batch = shard.events(runtime, after.map(Into::into), deadline.since(now)).await;
                *after = batch.next;
                batch
            }
            Inner::Remote(replies) => match futures::StreamExt::next(replies).await? {
                Ok(batch) => batch,
                Err(RpcError::Deadline { .. }) => return None,
                Err(error) => return Some(Err(error.into())),
            },
        };
        Some(self.link.check(batch.header).map(|()| batch))
    }
}
