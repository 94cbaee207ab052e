//! Memory here that peers may reach, and what arrived in it.
//!
//! A grant takes buffers away from their owner for as long as peers may write them, and gives them back once they are
//! quiet. Arrivals are counted per grant and counter, never ordered: a count of n says that n were announced and that
//! their bytes are visible. Invariant: nobody holds a reference to granted memory, and closed memory is never written.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use millpond_core::batch::RegionToken;
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

use super::batch::Arrival;
use super::core::Core;
use super::{RegionBuf, RegionBytes};
use crate::runtime::boot_time;

/// Counters that one grant may have.
pub const COUNTERS_PER_GRANT_MAX: usize = 4096;

/// Why memory was not granted; it comes back with the reason.
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
    /// Ranges of several regions were given.
    #[error("a grant covers ranges of one region; make a grant per region")]
    SeveralRegions,
    /// The region is not one of this engine.
    #[error("the region is not registered with this engine; allocate it there")]
    ForeignRegion,
    /// The table of grants is full.
    #[error("too many grants are open; close some")]
    Full,
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

/// Ranges of one region that peers may write, from [`Engine::grant_write`](super::Engine::grant_write) until it is closed
/// or dropped. While it is open there is no view of the bytes here.
#[derive(Debug)]
pub struct Grant {
    pub(super) core: Arc<Core>,
    pub(super) token: RegionToken,
    pub(super) arrivals: Arc<Arrivals>,
}

/// Shared bytes that peers may read, from [`Engine::grant_read`](super::Engine::grant_read) until it is dropped: from then
/// on reads that name it are refused, and one that is half-way through fails.
#[derive(Debug)]
pub struct ReadGrant {
    pub(super) core: Arc<Core>,
    pub(super) token: RegionToken,
}

/// What arrived in one grant so far.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    state: Mutex<ArrivalState>,
}

#[derive(Debug, Default)]
struct ArrivalState {
    counts: BTreeMap<u64, u64>,
    waiters: Vec<(Arrival, Waker)>,
    is_closed: bool,
}

impl Arrivals {
    /// Counts, and wakes who waited for it. `false`: no room for another counter, or the grant is closed.
    pub(super) fn on_arrival(&self, arrival: Arrival) -> bool {
        let mut state = self.state.lock();
        if state.is_closed
            || (state.counts.len() >= COUNTERS_PER_GRANT_MAX && !state.counts.contains_key(&arrival.counter))
        {
            return false;
        }
        let count = state.counts.entry(arrival.counter).or_default();
        *count = count.saturating_add(arrival.amount);
        let count = *count;
        state.waiters.retain(|(wanted, waker)| {
            let is_met = wanted.counter == arrival.counter && count >= wanted.amount;
            if is_met {
                waker.wake_by_ref();
            }
            !is_met
        });
        true
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.waiters.drain(..).for_each(|(_, waker)| waker.wake());
    }

    fn count(&self, counter: u64) -> u64 {
        self.state.lock().counts.get(&counter).copied().unwrap_or(0)
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
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Arrived {
    core: Arc<Core>,
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
        self.arrivals.count(counter)
    }

    /// Waits until at least `wanted.amount` was counted on `wanted.counter`, for at most `within`. The future holds
    /// nothing of the grant: it may be awaited elsewhere, and ends with [`NotArrived::Closed`] when the grant is closed.
    pub fn arrived(&self, wanted: Arrival, within: Duration) -> Arrived {
        let (core, arrivals) = (Arc::clone(&self.core), Arc::clone(&self.arrivals));
        Arrived { core, arrivals, wanted, deadline: boot_time() + within }
    }

    /// Ends the grant and gives the buffers back once they are quiet: no byte of any peer lands in them any more. Frames
    /// that still name them are refused.
    pub async fn close(self) -> Vec<RegionBuf> {
        self.core.close_grant(self.token.region)
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // After `close` there is nothing left to give back.
        drop(self.core.close_grant(self.token.region));
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
        let shared: Vec<RegionBytes> = self.core.close_read_grant(self.token.region);
        drop(shared);
    }
}

impl Future for Arrived {
    type Output = Result<u64, NotArrived>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut state = this.arrivals.state.lock();
        let count = state.counts.get(&this.wanted.counter).copied().unwrap_or(0);
        if count >= this.wanted.amount {
            return Poll::Ready(Ok(count));
        }
        if state.is_closed {
            return Poll::Ready(Err(NotArrived::Closed));
        }
        if boot_time() >= this.deadline {
            return Poll::Ready(Err(NotArrived::Late { count }));
        }
        let is_same = |other: &Waker| other.will_wake(context.waker());
        if !state.waiters.iter().any(|(wanted, waker)| *wanted == this.wanted && is_same(waker)) {
            state.waiters.push((this.wanted, context.waker().clone()));
        }
        drop(state);
        this.core.wake_at(this.deadline, context.waker());
        Poll::Pending
    }
}
