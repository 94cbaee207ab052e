//! Batches as callers write them, the tickets they turn into, and what came of them.

use core::fmt;
use std::sync::Arc;

use millpond_core::batch::{Extent, RegionId};

use super::shared::{Dropped, Shared};
use crate::contract::{Access, Fence, Outcome, PostRefusal, TicketId};
use crate::region::{RegionBuf, RegionBytes};

/// One request of a batch.
///
/// Example: [`Batch`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Request {
    /// Local bytes go to a peer.
    Write {
        /// What to send.
        source: RegionBytes,
        /// Where to, in an attached region; as long as the source.
        target: Extent,
    },
    /// A peer's bytes come into a local buffer.
    Read {
        /// Where from, in an attached region; as long as the target.
        source: Extent,
        /// Where to.
        target: RegionBuf,
    },
    /// As `Write`, from a raw region of ours.
    WriteRaw {
        /// Part of a raw region of this fabric.
        source: Extent,
        /// Where to.
        target: Extent,
    },
    /// As `Read`, into a raw region of ours.
    ReadRaw {
        /// Where from.
        source: Extent,
        /// Part of a raw region of this fabric.
        target: Extent,
    },
}

impl Request {
    /// The peer's side of it.
    #[must_use]
    pub fn remote(&self) -> Extent {
        match self {
            Self::Write { target, .. } | Self::WriteRaw { target, .. } => *target,
            Self::Read { source, .. } | Self::ReadRaw { source, .. } => *source,
        }
    }

    /// What it does to the peer's memory.
    #[must_use]
    pub fn access(&self) -> Access {
        match self {
            Self::Write { .. } | Self::WriteRaw { .. } => Access::Write,
            Self::Read { .. } | Self::ReadRaw { .. } => Access::Read,
        }
    }

    /// Local bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // a request of no bytes is a request like any other
    pub fn len(&self) -> u64 {
        match self {
            Self::Write { source, .. } => source.len() as u64,
            Self::Read { target, .. } => target.len() as u64,
            Self::WriteRaw { source, .. } => source.len,
            Self::ReadRaw { target, .. } => target.len,
        }
    }

    pub(super) fn local_raw(&self) -> Option<Extent> {
        match self {
            Self::WriteRaw { source, .. } => Some(*source),
            Self::ReadRaw { target, .. } => Some(*target),
            _ => None,
        }
    }
}

/// "Count `amount` on `counter` of the peer's grant once the writes of this batch are applied there."
///
/// Example: [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// An attached region or grant of the peer.
    pub region: RegionId,
    /// Which counter; any number, each grant has its own.
    pub counter: u64,
    /// How much to add.
    pub amount: u64,
}

/// A list of requests between this process and one peer. Make one, post it, get it back with its outcome, clear it, use it
/// again: in steady state nothing is allocated.
///
/// ```
/// use millpond_core::batch::{Extent, RegionId};
/// use millpond_hal::fabric::Batch;
/// use millpond_hal::mapping::{Backing, Mapping};
/// use millpond_hal::region::{Mode, Region};
/// let region = Region::unregistered(Mapping::new(4096, Backing::Heap).unwrap(), Mode::Leased);
/// let there = Extent::new(RegionId { slot: 0, epoch: 1 }, 0, 100); // an attached region of a peer
/// let mut batch = Batch::new();
/// batch.write(region.carve(0, 100).unwrap().freeze(), there).arrival(there.region, 7, 1);
/// assert_eq!((batch.len(), batch.bytes()), (1, 100));
/// ```
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) requests: Vec<Request>,
    pub(super) arrival: Option<Arrival>,
    pub(super) sync: Option<RegionId>,
    pub(super) after: Option<Arc<dyn Fence>>,
}

impl Batch {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request.
    pub fn push(&mut self, request: Request) -> &mut Self {
        self.requests.push(request);
        self
    }

    /// Adds a write of `source` to `target`.
    pub fn write(&mut self, source: RegionBytes, target: Extent) -> &mut Self {
        self.push(Request::Write { source, target })
    }

    /// Adds a read of `source` into `target`.
    pub fn read(&mut self, source: Extent, target: RegionBuf) -> &mut Self {
        self.push(Request::Read { source, target })
    }

    /// Adds a write from a raw region.
    pub fn write_raw(&mut self, source: Extent, target: Extent) -> &mut Self {
        self.push(Request::WriteRaw { source, target })
    }

    /// Adds a read into a raw region.
    pub fn read_raw(&mut self, source: Extent, target: Extent) -> &mut Self {
        self.push(Request::ReadRaw { source, target })
    }

    /// Counts `amount` on `counter` of the peer's `region` after the writes.
    pub fn arrival(&mut self, region: RegionId, counter: u64, amount: u64) -> &mut Self {
        self.arrival = Some(Arrival { region, counter, amount });
        self
    }

    /// Ends the batch only once its writes, and all writes to the file that `region` lies in which were done before, are on
    /// stable storage. A batch of nothing else syncs what is there. Without it, done writes outlive our death, but not a loss
    /// of power.
    pub fn sync(&mut self, region: RegionId) -> &mut Self {
        self.sync = Some(region);
        self
    }

    /// Starts the batch only once `fence` is passed: after the work that somebody gave a device before it. Over links of devices
    /// that can wait for it (`cuda`); the others refuse the batch.
    pub fn after(&mut self, fence: Arc<dyn Fence>) -> &mut Self {
        self.after = Some(fence);
        self
    }

    /// How many requests there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are none. A batch with an arrival and no requests only counts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Bytes of all requests.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.requests.iter().map(Request::len).fold(0, u64::saturating_add)
    }

    /// The requests, in order.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Takes all requests out, in order; the batch is empty afterwards and keeps its allocation.
    pub fn drain(&mut self) -> impl Iterator<Item = Request> + '_ {
        (self.arrival, self.sync, self.after) = (None, None, None);
        self.requests.drain(..)
    }

    /// Drops everything in it and keeps the allocation.
    pub fn clear(&mut self) {
        drop(self.drain());
    }
}

/// A batch was not started; here it is again.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// # let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// # let now = Instant::ZERO;
/// # let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// # let region = fabric.allocate(8192, AllocateOptions::default()).unwrap();
/// let mut unattached = Batch::new();
/// let nowhere = millpond_core::batch::Extent::new(millpond_core::batch::RegionId { slot: 9, epoch: 9 }, 0, 5);
/// unattached.write(region.carve(0, 5).unwrap().freeze(), nowhere);
/// let refused = fabric.post(now, link, unattached, PostOptions::default());
/// let refused = refused.err().unwrap();
/// assert!(matches!(refused.reason, PostError::UnknownRegion { .. }));
/// assert_eq!(refused.batch.len(), 1); // the batch came back, with its memory
/// ```
pub struct NotStarted {
    /// The batch, unchanged.
    pub batch: Batch,
    /// Why.
    pub reason: PostError,
}

impl fmt::Debug for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotStarted").field("reason", &self.reason).field("requests", &self.batch.len()).finish()
    }
}

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl core::error::Error for NotStarted {}

/// Why a batch was not started.
///
/// Example: [`NotStarted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// This process is a forked child of the one that made the fabric.
    #[error("this process was forked from the one whose fabric it is; make another fabric here")]
    Forked,
    /// The link is gone.
    #[error("the link is closed or was never open; open another one")]
    LinkClosed,
    /// All tickets are taken.
    #[error("all {tickets_max} tickets are taken; take or drop finished ones, or wait for one in flight")]
    TicketsFull {
        /// The bound.
        tickets_max: usize,
    },
    /// The device is at a bound.
    #[error("the link's queue is full; post again after a batch on it has finished")]
    LinkFull,
    /// More requests or bytes than the device takes in one batch.
    #[error("the batch is too large for this transport: at most {moves_max} requests and {bytes_max} bytes; split it")]
    TooLarge {
        /// Most requests.
        moves_max: u32,
        /// Most bytes.
        bytes_max: u64,
    },
    /// The two sides of a request differ in length.
    #[error("request {index}: {local_len} bytes here, {remote_len} there; they must be equal")]
    LengthsDiffer {
        /// Which request.
        index: usize,
        /// Local bytes.
        local_len: u64,
        /// The peer's bytes.
        remote_len: u64,
    },
    /// A handle of the request names nothing (any more).
    #[error("request {index}: its {side} region is not, or no longer, known to this fabric")]
    UnknownRegion {
        /// Which request.
        index: usize,
        /// `local` or `remote`.
        side: &'static str,
    },
    /// A range is not inside its region or grant.
    #[error("request {index}: its {side} range is not inside the region or grant")]
    OutOfBounds {
        /// Which request.
        index: usize,
        /// `local` or `remote`.
        side: &'static str,
    },
    /// The peer's token does not allow it.
    #[error("request {index}: the peer granted no right to {access:?} there; ask it for a token with that right")]
    NoRight {
        /// Which request.
        index: usize,
        /// What was wanted.
        access: Access,
    },
    /// The transport does not join these kinds of memory, or cannot reach that region.
    #[error(
        "request {index}: this transport cannot move between these memories; use another one, or stage through host memory"
    )]
    NotReachable {
        /// Which request.
        index: usize,
    },
    /// The arrival's region is not attached.
    #[error("the arrival names a region that is not attached")]
    UnknownArrivalRegion,
    /// The region to sync is not attached.
    #[error("the batch syncs a region that is not attached")]
    UnknownSyncRegion,
    /// The region to sync is not of a kind that this transport makes durable.
    #[error("this transport cannot bring that memory to stable storage; sync files only, over a link of `file`")]
    NotDurable,
    /// The device cannot wait for a fence.
    #[error("this transport does not wait for a device's work; post the batch after it is done, or over `cuda`")]
    NotOrdered,
}

impl From<PostRefusal> for PostError {
    fn from(refusal: PostRefusal) -> Self {
        match refusal {
            PostRefusal::Full => Self::LinkFull,
            PostRefusal::LinkClosed => Self::LinkClosed,
            PostRefusal::NotShareable => Self::NotReachable { index: 0 },
        }
    }
}

/// A posted batch. Dropping it orphans the batch: it runs to its end, its memory stays lent until then, nobody hears of it.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// # let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// # let now = Instant::ZERO;
/// # let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// # let region = fabric.allocate(8192, AllocateOptions::default()).unwrap();
/// # let grant = fabric.grant_write(vec![region.carve(4096, 4096).unwrap()]).unwrap();
/// # let there = fabric.attach(grant.token()).unwrap();
/// # let mut batch = Batch::new();
/// # batch.write(region.carve(0, 5).unwrap().freeze(), millpond_core::batch::Extent::new(there, 4096, 5));
/// let ticket = fabric.post(now, link, batch, PostOptions::default()).unwrap();
/// drop(ticket); // nobody waits: the batch runs on, and its memory is given back then
/// while fabric.in_flight() > 0 {
///     fabric.poll(now);
/// }
/// ```
pub struct Ticket {
    id: TicketId,
    shared: Option<Arc<Shared>>,
}

impl Ticket {
    pub(super) fn new(id: TicketId, shared: Arc<Shared>) -> Self {
        Self { id, shared: Some(shared) }
    }

    /// Its name in events and calls.
    #[must_use]
    pub fn id(&self) -> TicketId {
        self.id
    }

    pub(super) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        self.shared.as_ref().is_some_and(|own| Arc::ptr_eq(own, shared))
    }

    pub(super) fn defuse(mut self) {
        self.shared = None;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.dropped(Dropped::Ticket(self.id));
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({})", self.id.handle())
    }
}

/// What came of a batch: an outcome per request, and the batch with its memory.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// # let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// # let now = Instant::ZERO;
/// # let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// # let region = fabric.allocate(8192, AllocateOptions::default()).unwrap();
/// # let grant = fabric.grant_write(vec![region.carve(4096, 4096).unwrap()]).unwrap();
/// # let there = fabric.attach(grant.token()).unwrap();
/// # let mut batch = Batch::new();
/// # batch.write(region.carve(0, 5).unwrap().freeze(), millpond_core::batch::Extent::new(there, 4096, 5));
/// let ticket = fabric.post(now, link, batch, PostOptions::default()).unwrap();
/// while !fabric.is_finished(&ticket) {
///     fabric.poll(now);
/// }
/// let completion = fabric.take(ticket).unwrap();
/// assert_eq!((completion.is_done(), completion.bytes_done()), (true, 5));
/// let mut batch = completion.into_batch();
/// batch.clear(); // for the next one
/// ```
#[derive(Debug)]
pub struct Completion {
    pub(super) batch: Batch,
    pub(super) outcomes: Outcomes,
}

/// Outcomes of `len` requests: one for most, with exceptions by range; a later exception overrides an earlier one.
#[derive(Clone, Debug)]
pub(super) struct Outcomes {
    pub(super) rest: Outcome,
    pub(super) exceptions: Vec<Exception>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Exception {
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) outcome: Outcome,
}

impl Completion {
    /// How request `index` ended. Panics if there is no such request.
    #[must_use]
    pub fn outcome(&self, index: usize) -> Outcome {
        assert!(index < self.batch.len(), "request {index} of a batch of {}", self.batch.len());
        let holds = |exception: &&Exception| {
            index.checked_sub(exception.first as usize).is_some_and(|place| place < exception.count as usize)
        };
        self.outcomes.exceptions.iter().rev().find(holds).map_or(self.outcomes.rest, |exception| exception.outcome)
    }

    /// How the batch ended apart from requests that ended otherwise; for a batch without requests, how it ended.
    #[must_use]
    pub fn overall(&self) -> Outcome {
        self.outcomes.rest
    }

    /// Whether the whole batch is done: every request, and its arrival was counted. A batch whose requests are all done may
    /// still have been cancelled before it was counted; `overall` then says so.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let exceptions = &self.outcomes.exceptions;
        self.outcomes.rest.is_done() && exceptions.iter().all(|exception| exception.outcome.is_done())
    }

    /// Bytes of the requests that are done.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        if self.outcomes.exceptions.is_empty() {
            return if self.outcomes.rest.is_done() { self.batch.bytes() } else { 0 };
        }
        let requests = self.batch.requests().iter().enumerate();
        requests.filter(|(index, _)| self.outcome(*index).is_done()).map(|(_, request)| request.len()).sum()
    }

    /// The batch, whose memory is the caller's again.
    #[must_use]
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// The batch by value.
    #[must_use]
    pub fn into_batch(self) -> Batch {
        self.batch
    }
}
