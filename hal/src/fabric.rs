//! The one safe shell around all backends: it checks once what every backend may then rely on.
//!
//! A fabric owns tables of regions, grants, links, attached regions of peers and tickets. It posts batches to devices, polls
//! them, and hands back outcomes. It knows no addresses, no paths and no retries. It sits behind one lock of its owner: all
//! calls take `&mut self`; handles ([`Ticket`], [`Grant`], [`ReadGrant`], `Region` and its leases) may be dropped anywhere.
//!
//! Invariants: a lease posted with a batch comes back only after its device said `Finished`; a closed grant is never
//! resolved again; a dropped waiter changes nothing for the memory; a dropped fabric leaks what is in flight.
//!
//! ```
//! use millpond_core::batch::Extent;
//! use millpond_core::time::Instant;
//! use millpond_hal::backend::host::Host;
//! use millpond_hal::contract::Connection;
//! use millpond_hal::fabric::{Batch, Fabric, FabricOptions, LinkOptions, PostOptions};
//!
//! let now = Instant::ZERO;
//! let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
//! let host = fabric.add_device(Box::new(Host::new())).unwrap();
//! let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
//! let region = fabric.allocate(8192, Default::default()).unwrap();
//! let grant = fabric.grant_write(vec![region.carve(4096, 4096).unwrap()]).unwrap();
//!
//! let there = fabric.attach(grant.token()).unwrap();
//! let mut source = region.carve(0, 5).unwrap();
//! source.copy_from_slice(b"hello");
//! let mut batch = Batch::new();
//! batch.write(source.freeze(), Extent::new(there, 4096, 5)).arrival(there, 0, 1);
//! let ticket = fabric.post(now, link, batch, PostOptions::default()).unwrap();
//! while !fabric.is_finished(&ticket) {
//!     fabric.poll(now);
//! }
//! assert!(fabric.take(ticket).unwrap().is_done());
//! assert_eq!(fabric.arrived(grant.id(), 0), 1);
//! assert_eq!(&fabric.close(grant)[0][..5], b"hello");
//! ```

mod batch;
mod file;
mod grant;
mod memory;
mod post;
mod shared;
mod table;
mod turn;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::RegionId;
use millpond_core::time::{Duration, Instant};
use rustix::event::{EventfdFlags, epoll};

pub use batch::{Arrival, Batch, Completion, NotStarted, PostError, Request, Ticket};
pub use file::{FileGrant, FileRegion};
pub use grant::{Grant, GrantError, NotGranted, ReadGrant};
pub use memory::{AllocateError, AllocateOptions, AttachError, NotReleased, ReleaseError};
pub use post::PostOptions;
pub use shared::Waker;

use crate::contract::{Connection, Device, LinkDownReason, LinkId, OpenError, TicketId};
use crate::fork::ForkMark;
use crate::mapping::{Backing, HeaderPage, MapError};
use shared::{Dropped, Shared};
use table::{LinkEntry, Tables, TicketState};

/// Devices of one fabric at most.
pub const DEVICES_MAX: usize = 16;
/// How long a link may make no progress while batches are in flight on it, unless told otherwise.
pub const PROGRESS_DEADLINE: Duration = Duration::from_secs(5);

/// Bounds of a fabric's tables, allocated at start.
///
/// ```
/// use millpond_hal::fabric::{Fabric, FabricOptions, Limits};
/// let mut options = FabricOptions::new([0; 32]);
/// options.limits.regions_max = 4;
/// let mut fabric = Fabric::new(options).unwrap();
/// let regions: Vec<_> = (0..4).map(|_| fabric.allocate(4096, Default::default()).unwrap()).collect();
/// assert!(fabric.allocate(4096, Default::default()).is_err()); // full is an answer
/// # let _ = (Limits::default(), regions);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Regions.
    pub regions_max: u32,
    /// Grants, and raw regions that are exposed.
    pub exposures_max: u32,
    /// Links.
    pub links_max: u32,
    /// Attached regions and grants of peers.
    pub remotes_max: u32,
    /// Batches in flight or finished and not yet taken.
    pub tickets_max: u32,
    /// Arrival counters of one grant.
    pub counters_per_grant_max: u32,
    /// Ranges of one grant.
    pub ranges_per_grant_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            regions_max: 1024,
            exposures_max: 8192,
            links_max: 1024,
            remotes_max: 8192,
            tickets_max: 4096,
            counters_per_grant_max: 1024,
            ranges_per_grant_max: 65_536,
        }
    }
}

/// What a fabric is made of.
///
/// ```
/// use millpond_hal::fabric::{Fabric, FabricOptions};
/// let mut options = FabricOptions::new([7; 32]); // random bytes: capabilities are made from them
/// options.incarnation = 12;
/// assert_eq!(Fabric::new(options).unwrap().in_flight(), 0);
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct FabricOptions {
    /// 32 random bytes, never used for another fabric: capabilities are derived from it.
    pub secret: [u8; 32],
    /// The process's incarnation, stamped on tokens.
    pub incarnation: u64,
    /// Bounds.
    pub limits: Limits,
    /// Where the header page lies; `Heap` where memfd does not exist.
    pub header: Backing,
}

impl FabricOptions {
    /// Defaults around a secret.
    #[must_use]
    pub fn new(secret: [u8; 32]) -> Self {
        Self { secret, incarnation: 0, limits: Limits::default(), header: Backing::Memfd }
    }
}

impl core::fmt::Debug for FabricOptions {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("FabricOptions").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// A fabric could not be made, or a device not be added.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// for _ in 0..DEVICES_MAX {
///     fabric.add_device(Box::new(Host::new())).unwrap();
/// }
/// assert!(matches!(fabric.add_device(Box::new(Host::new())), Err(FabricError::DevicesFull)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// No memory for the header page.
    #[error("the header page: {0}")]
    Header(#[from] MapError),
    /// No descriptor.
    #[error("{action} failed with system error {code}; raise the limit of open files")]
    System {
        /// What was tried.
        action: &'static str,
        /// The error number.
        code: i32,
    },
    /// At the bound.
    #[error("a fabric has at most {DEVICES_MAX} devices")]
    DevicesFull,
}

/// Names a device of a fabric, in the order of `add_device`.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// let host: DeviceId = fabric.add_device(Box::new(Host::new())).unwrap();
/// assert_eq!(fabric.device_name(host), Some("host"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(usize);

/// How a link behaves.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_hal::fabric::{LinkOptions, PROGRESS_DEADLINE};
/// assert_eq!(LinkOptions::default().progress_deadline, PROGRESS_DEADLINE);
/// let patient = LinkOptions::with_progress_deadline(Duration::from_secs(60));
/// assert!(patient.progress_deadline > PROGRESS_DEADLINE);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkOptions {
    /// A link with batches in flight and no progress for this long is closed.
    pub progress_deadline: Duration,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self { progress_deadline: PROGRESS_DEADLINE }
    }
}

impl LinkOptions {
    /// With another progress deadline.
    #[must_use]
    pub fn with_progress_deadline(progress_deadline: Duration) -> Self {
        Self { progress_deadline }
    }
}

/// A link was not opened.
///
/// Example: `hal/src/fabric/tests.rs`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// No such device.
    #[error("the fabric has no such device")]
    UnknownDevice,
    /// All links are in use.
    #[error("all {links_max} links are in use; close one first")]
    Full {
        /// The bound.
        links_max: usize,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] OpenError),
}

/// Something the owner of the fabric wants to know.
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
/// fabric.poll(now);
/// assert_eq!(fabric.next_event(), Some(FabricEvent::Finished(ticket.id())));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FabricEvent {
    /// The ticket ended; `take` it. Never reported for orphans.
    Finished(TicketId),
    /// Counters of this grant changed; see `arrived`. Reported once, however many changed, until it is read.
    Arrived(RegionId),
    /// The link is gone; every ticket of it ended before.
    LinkDown {
        /// Which.
        link: LinkId,
        /// Why.
        reason: LinkDownReason,
    },
}

/// When to poll a fabric next.
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
/// let _ticket = fabric.post(now, link, batch, PostOptions::default()).unwrap();
/// assert!(matches!(fabric.arm(now), FabricWake::Now)); // poll first, sleep later
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricWake {
    /// At once.
    Now,
    /// When the fabric's descriptor is readable, or after this long at the latest.
    Within(Option<Duration>),
}

/// Counts since the start.
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
/// let _ticket = fabric.post(now, link, batch, PostOptions::default()).unwrap();
/// assert_eq!((fabric.stats().batches_posted, fabric.stats().bytes_posted), (1, 5));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Batches posted.
    pub batches_posted: u64,
    /// Batches that ended, however.
    pub batches_finished: u64,
    /// Requests posted.
    pub moves_posted: u64,
    /// Bytes posted.
    pub bytes_posted: u64,
    /// Requests of peers that were refused.
    pub refusals_given: u64,
    /// Events of devices that named nothing known; counted and ignored.
    pub events_unknown: u64,
    /// Links closed because nothing moved.
    pub links_stalled: u64,
}

/// What is known of a link.
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
/// let state = fabric.link(link).unwrap();
/// assert_eq!((state.transport, state.in_flight, state.closing), ("host", 0, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkState {
    /// Name of the transport.
    pub transport: &'static str,
    /// Batches in flight.
    pub in_flight: u32,
    /// Whether it was told to close.
    pub closing: bool,
}

/// See the [module](self).
///
/// ```
/// use millpond_core::time::Instant;
/// use millpond_hal::backend::host::Host;
/// use millpond_hal::contract::Connection;
/// use millpond_hal::fabric::*;
/// let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// let link = fabric.open(Instant::ZERO, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// assert!(fabric.link(link).is_some());
/// fabric.close_link(link);
/// fabric.poll(Instant::ZERO);
/// assert!(fabric.link(link).is_none());
/// ```
pub struct Fabric {
    devices: Vec<Box<dyn Device>>,
    /// Which devices' descriptors are in the epoll set.
    watched: [bool; DEVICES_MAX],
    tables: Tables,
    shared: Arc<Shared>,
    reaped: Vec<Dropped>,
    options: FabricOptions,
    epoll: OwnedFd,
    mark: ForkMark,
    /// Time in which nobody polled although something was due. Links and devices live without it.
    stopped: Duration,
}

impl Fabric {
    /// An empty fabric.
    pub fn new(options: FabricOptions) -> Result<Self, FabricError> {
        let failed =
            |action| move |error: rustix::io::Errno| FabricError::System { action, code: error.raw_os_error() };
        let header = Arc::new(HeaderPage::new(options.limits.exposures_max.max(1), options.header)?);
        let event =
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed("eventfd"))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create"))?;
        let shared = Arc::new(Shared::new(event));
        epoll::add(&epoll, shared.event(), epoll::EventData::new_u64(u64::MAX), epoll::EventFlags::IN)
            .map_err(failed("epoll_ctl"))?;
        let mark = ForkMark::new().map_err(|error| FabricError::System {
            action: "marking its process",
            code: error.raw_os_error().unwrap_or(0),
        })?;
        let tables = Tables::new(options.limits, header);
        Ok(Self {
            devices: Vec::new(),
            watched: [false; DEVICES_MAX],
            tables,
            shared,
            reaped: Vec::new(),
            options,
            epoll,
            mark,
            stopped: Duration::ZERO,
        })
    }

    /// Adds a backend. Regions that exist are registered with it as far as it takes them.
    pub fn add_device(&mut self, mut device: Box<dyn Device>) -> Result<DeviceId, FabricError> {
        if self.devices.len() >= DEVICES_MAX {
            return Err(FabricError::DevicesFull);
        }
        device.share_header(&self.tables.header);
        let index = self.devices.len();
        self.devices.push(device);
        let regions: Vec<RegionId> = self.tables.regions.iter().map(|(id, _)| id).collect();
        for region in regions {
            self.register_with(index, region);
        }
        Ok(DeviceId(index))
    }

    /// The backend's name.
    #[must_use]
    pub fn device_name(&self, device: DeviceId) -> Option<&'static str> {
        self.devices.get(device.0).map(|device| device.name())
    }

    /// Makes a link of a connection. The link's end is announced by [`FabricEvent::LinkDown`], an `Err` by nothing more.
    pub fn open(
        &mut self,
        now: Instant,
        device: DeviceId,
        connection: Connection,
        options: LinkOptions,
    ) -> Result<LinkId, LinkError> {
        let (index, now) = (device.0, self.awake(now));
        let device = self.devices.get_mut(index).ok_or(LinkError::UnknownDevice)?;
        let entry = LinkEntry {
            device: index,
            in_flight: 0,
            progress_at: now,
            progress_deadline: options.progress_deadline,
            proven: Vec::new(),
            closing: false,
        };
        let links_max = self.tables.links.capacity();
        let link = LinkId::new(self.tables.links.insert(entry).map_err(|_| LinkError::Full { links_max })?);
        if let Err(error) = device.open(now, link, connection) {
            self.tables.links.remove(link.handle());
            return Err(error.into());
        }
        Ok(link)
    }

    /// Ends a link. Its tickets end, then [`FabricEvent::LinkDown`] comes, in the next polls. A stale link is ignored.
    pub fn close_link(&mut self, link: LinkId) {
        self.close_link_for(link, LinkDownReason::Closed);
    }

    /// Ends a link for a reason of the caller's: `Superseded` when a newer generation of the lane took its place.
    pub fn close_link_for(&mut self, link: LinkId, reason: LinkDownReason) {
        let Some(entry) = self.tables.links.get_mut(link.handle()) else { return };
        if !core::mem::replace(&mut entry.closing, true) {
            self.devices[entry.device].close(link, reason);
        }
    }

    /// What is known of a link; `None` once it is gone.
    #[must_use]
    pub fn link(&self, link: LinkId) -> Option<LinkState> {
        let entry = self.tables.links.get(link.handle())?;
        Some(LinkState {
            transport: self.devices[entry.device].name(),
            in_flight: entry.in_flight,
            closing: entry.closing,
        })
    }

    /// Whether a ticket ended.
    #[must_use]
    pub fn is_finished(&self, ticket: &Ticket) -> bool {
        let entry = self.tables.tickets.get(ticket.id().handle());
        ticket.belongs_to(&self.shared) && entry.is_some_and(|entry| entry.state == TicketState::Finished)
    }

    /// Bytes of a ticket that moved so far, as its device reports them.
    #[must_use]
    pub fn bytes_moved(&self, ticket: &Ticket) -> u64 {
        self.tables.tickets.get(ticket.id().handle()).map_or(0, |entry| entry.bytes_moved)
    }

    /// The outcome and the memory of a ticket that ended; the ticket itself while it has not.
    pub fn take(&mut self, ticket: Ticket) -> Result<Completion, Ticket> {
        if !self.is_finished(&ticket) {
            return Err(ticket);
        }
        let entry = self.tables.remove_ticket(ticket.id());
        let Some(entry) = entry else { return Err(ticket) };
        ticket.defuse();
        Ok(Completion { batch: entry.batch, outcomes: entry.outcomes })
    }

    /// Asks a batch to end early. It still ends by `Finished`, done or cancelled, at the latest when its link's progress
    /// deadline has passed. Ended tickets are ignored.
    pub fn cancel(&mut self, now: Instant, ticket: &Ticket) {
        if ticket.belongs_to(&self.shared) {
            self.cancel_by_id(self.awake(now), ticket.id());
        }
    }

    /// Nobody polled for `span`, which ends now, although something was due: the process was stopped, or had no core. What
    /// arrived meanwhile was not read, so that is no time in which a peer did nothing: no deadline of a link counts it.
    pub fn on_stopped(&mut self, span: Duration) {
        self.stopped = self.stopped + span;
    }

    /// The time without that in which nobody polled.
    fn awake(&self, now: Instant) -> Instant {
        if now == Instant::NEVER { now } else { Instant::ZERO + now.since(Instant::ZERO + self.stopped) }
    }

    /// The next thing that happened, in order.
    pub fn next_event(&mut self) -> Option<FabricEvent> {
        let event = self.tables.events.pop_front()?;
        if let FabricEvent::Arrived(grant) = event
            && let Some(exposure) = self.tables.exposures.get_mut(grant)
        {
            exposure.announced = false;
        }
        Some(event)
    }

    /// One descriptor, the same for life, that is readable when [`Fabric::poll`] has something to do. Valid after
    /// [`Fabric::arm`] said [`FabricWake::Within`].
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Makes that descriptor readable, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.shared))
    }

    /// Counts since the start.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.tables.stats
    }

    /// Batches in flight, orphans included.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tables.tickets.iter().filter(|(_, entry)| entry.state == TicketState::InFlight).count()
    }
}

impl core::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let names: Vec<_> = self.devices.iter().map(|device| device.name()).collect();
        f.debug_struct("Fabric").field("devices", &names).field("stats", &self.tables.stats).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
