//! Memory here that peers may reach, and what arrived in it.
//!
//! A grant takes buffers away from their owner for as long as peers may write them, and gives them back once they are
//! quiet. Arrivals are counted per grant and counter, never ordered: a count of n says that n were announced and that
//! their bytes are visible. Invariant: nobody holds a reference to granted memory, and closed memory is never written.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use millpond_core::batch::{RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};
use millpond_hal::fabric;
use parking_lot::Mutex;

use super::RegionBuf;
use super::batch::Arrival;
use super::core::Core;

/// Counters that one grant may have; an arrival on a further one is refused as busy.
pub const COUNTERS_PER_GRANT_MAX: usize = 1024;

/// Why memory was not granted; it comes back with the reason.
///
/// ```
/// use millpond_node::engine::{GrantError, GrantErrorKind};
/// let refused = GrantError { kind: GrantErrorKind::Full, memory: vec!["the buffers"] };
/// assert_eq!(refused.memory, ["the buffers"]); // they came back
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct GrantError<B> {
    /// Why.
    pub kind: GrantErrorKind,
    /// What was handed in.
    pub memory: Vec<B>,
}

/// Why memory was not granted.
///
/// ```
/// use millpond_node::engine::GrantErrorKind;
/// assert!(GrantErrorKind::Empty.to_string().contains("at least one"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantErrorKind {
    /// No range was given.
    #[error("a grant covers at least one range")]
    Empty,
    /// The region is not one of this engine, or there are several.
    #[error("a grant covers ranges of one region of this engine; make a grant per region")]
    ForeignRegion,
    /// Only raw regions are exposed whole.
    #[error("only a raw region is exposed as a whole; grant ranges of a leased one")]
    NotRaw,
    /// The table of grants is full.
    #[error("too many grants are open; close some")]
    Full,
    /// A range is not inside the file.
    #[error("a range of the grant is not inside the file")]
    OutOfBounds,
    /// A right to write a file that was opened for reading.
    #[error("the file is open for reading only; open it for writing, or grant the right to read")]
    ReadOnly,
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

/// Ranges of one region that peers may write, from [`Engine::grant_write`](super::Engine::grant_write) until it is closed
/// or dropped. While it is open there is no view of the bytes here.
///
/// Example: `verify/tests/engine.rs` (`grant_write`).
pub struct Grant {
    pub(super) core: Arc<Core>,
    /// Taken by `close`.
    pub(super) held: Option<fabric::Grant>,
    pub(super) token: RegionToken,
    pub(super) arrivals: Arc<Arrivals>,
}

/// Shared bytes that peers may read, from [`Engine::grant_read`](super::Engine::grant_read) until it is dropped: from then
/// on reads that name it are refused, and one that is half-way through fails.
///
/// Example: `verify/tests/engine.rs` (`grant_read`).
pub struct ReadGrant {
    pub(super) core: Arc<Core>,
    /// Taken on drop.
    pub(super) held: Option<fabric::ReadGrant>,
    pub(super) token: RegionToken,
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grant({})", self.token.region)
    }
}

impl std::fmt::Debug for ReadGrant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadGrant({})", self.token.region)
    }
}

/// Who waits for arrivals in one grant.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    state: Mutex<ArrivalState>,
}

#[derive(Debug, Default)]
struct ArrivalState {
    waiters: Vec<(Arrival, Waker)>,
    is_closed: bool,
}

impl Arrivals {
    /// Counters changed: wakes who waited for that, and says whether anybody did. `count_of` knows them.
    pub(super) fn on_change(&self, count_of: impl Fn(u64) -> u64) -> bool {
        let mut state = self.state.lock();
        let waiting = state.waiters.len();
        state.waiters.retain(|(wanted, waker)| {
            let is_met = count_of(wanted.counter) >= wanted.amount;
            if is_met {
                waker.wake_by_ref();
            }
            !is_met
        });
        state.waiters.len() < waiting
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.waiters.drain(..).for_each(|(_, waker)| waker.wake());
    }

    /// Registers a waiter; `false` once it is closed.
    fn wait(&self, wanted: Arrival, waker: &Waker) -> bool {
        let mut state = self.state.lock();
        let is_known = |(other, known): &(Arrival, Waker)| *other == wanted && known.will_wake(waker);
        if !state.is_closed && !state.waiters.iter().any(is_known) {
            state.waiters.push((wanted, waker.clone()));
        }
        !state.is_closed
    }
}

/// Why waiting for an arrival ended without it.
///
/// ```
/// use millpond_node::engine::NotArrived;
/// assert!(NotArrived::Late { count: 3 }.to_string().contains("3 arrived"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotArrived {
    /// The time given is over.
    #[error("only {count} arrived in the time given; the writer is slow or gone")]
    Late {
        /// How many came.
        count: u64,
    },
    /// The grant was closed meanwhile.
    #[error("the grant was closed while somebody waited for arrivals")]
    Closed,
}

/// Waits until a counter of a grant has reached an amount; gives the count. Made by [`Grant::arrived`].
///
/// Example: `verify/tests/engine.rs` (`arrived`).
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Arrived {
    core: Arc<Core>,
    grant: RegionId,
    arrivals: Arc<Arrivals>,
    wanted: Arrival,
    deadline: Instant,
}

impl Grant {
    /// What a peer needs to write here. Send it to nobody else than who may.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.token
    }

    /// How much was counted on `counter` so far; 0 for one that nobody named.
    #[must_use]
    pub fn count(&self, counter: u64) -> u64 {
        self.core.locked(|shard| shard.fabric.arrived(self.token.region, counter))
    }

    /// Waits until at least `wanted.amount` was counted on `wanted.counter`, for at most `within`. The future holds
    /// nothing of the grant: it may be awaited elsewhere, and ends with [`NotArrived::Closed`] when the grant is closed.
    pub fn arrived(&self, wanted: Arrival, within: Duration) -> Arrived {
        let (core, arrivals) = (Arc::clone(&self.core), Arc::clone(&self.arrivals));
        Arrived { core, grant: self.token.region, arrivals, wanted, deadline: self.core.now() + within }
    }

    /// Ends the grant and gives the buffers back once they are quiet: no byte of any peer lands in them any more. Frames
    /// that still name them are refused.
    pub async fn close(mut self) -> Vec<RegionBuf> {
        self.close_now()
    }

    /// [`Grant::close`] for callers that do not await; every transport here is quiet at once.
    fn close_now(&mut self) -> Vec<RegionBuf> {
        let Some(held) = self.held.take() else { return Vec::new() };
        let buffers = self.core.locked(|shard| {
            shard.arrivals.remove(&self.token.region);
            shard.fabric.close(held)
        });
        self.arrivals.close();
        buffers
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        drop(self.close_now());
    }
}

impl ReadGrant {
    /// What a peer needs to read here.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.token
    }
}

impl Drop for ReadGrant {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.core.locked(|shard| shard.fabric.revoke(held));
        }
    }
}

impl Future for Arrived {
    type Output = Result<u64, NotArrived>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        // Registered first, then looked: a count that changes in between wakes us.
        let is_open = this.arrivals.wait(this.wanted, context.waker());
        let count = this.core.locked(|shard| shard.fabric.arrived(this.grant, this.wanted.counter));
        if count >= this.wanted.amount {
            return Poll::Ready(Ok(count));
        }
        if !is_open {
            return Poll::Ready(Err(NotArrived::Closed));
        }
        if this.core.now() >= this.deadline {
            return Poll::Ready(Err(NotArrived::Late { count }));
        }
        this.core.wake_at(this.deadline, context.waker());
        Poll::Pending
    }
}
