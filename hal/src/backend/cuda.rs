//! Memory of CUDA GPUs: copies between it and memory of the host, and among GPUs, within one process.
//!
//! [`Cuda`] opens libcuda at run time and makes mappings of it: allocated, adopted from a framework, opened from another
//! process's handle, each with a dma-buf for NICs where there can be one. [`CudaDevice`] moves between regions of its own
//! fabric over a link to itself. What another process exported is such a region too, once it was opened here.
//!
//! What it is not: no side of a link between processes, and no path to a NIC. It never waits for all work of a GPU, of a
//! context or of a stream, its own or other people's: each group of copies has an event behind it, in streams that nobody else
//! has. Two calls wait for copies that were put in, which are few ([`WINDOW_LEN`]): taking a grant back, and dropping the device.
//!
//! A batch may wait for a point in a caller's stream ([`Cuda::fence`]): it is held here until the point is passed, so it can be
//! cancelled meanwhile, and costs one wake-up of this process between the two.
//!
//! Invariants: local memory of a batch is quiet when nothing of it flies; a grant's bytes are, once `revoke` returned; a batch
//! is finished once, after all of it landed. When a GPU fails, its context is dead and moves nothing more: the links with
//! copies on it end.
#![allow(unsafe_code)]

mod driver;
mod fence;
mod job;
mod memory;
mod pin;

use core::num::NonZeroI32;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};
use rustix::event::EventfdFlags;

pub use self::driver::{CudaAbsent, CudaError, GpuInfo};
pub use self::memory::{Cuda, CudaMemoryError, DmabufRefusal, GRANULE_LEN, IpcHandle};
pub use self::pin::{PIN_LEN, REGIONS_MAX};

use self::driver::{Driver, Event, Side, Stream};
use self::job::{Ending, Flight, Job};
use self::pin::Regions;
use super::attached::Attachments;
use crate::contract::{
    Access, Completions, Connection, Device, DeviceLimits, Inbound, LinkDownReason, LinkId, Memory, NotPosted,
    OpenError, Post, PostRefusal, PostedArrival, PostedMove, Refusal, RegionMemory, RegisterError, RemoteRange,
    TicketId, Transport, Turn, Wake,
};
use crate::mapping::HeaderPage;

/// Bounds of the cuda backend.
pub const LIMITS: DeviceLimits = DeviceLimits { moves_max: 65_536, bytes_max: 1 << 40, posts_max: 256, links_max: 16 };
/// A move is copied in pieces of at most this length, cut at its multiples in the region on the host's side.
pub const PIECE_LEN: u64 = 4 << 20;
/// Bytes that fly at most: what taking a grant back may have to wait for.
pub const WINDOW_LEN: u64 = 32 << 20;
/// Streams of each GPU; batches take turns at them.
const LANES: usize = 4;
/// Groups that fly at most.
const FLIGHTS_MAX: usize = 64;
/// Pieces and bytes of one group.
const GROUP_PIECES: usize = 64;
const GROUP_LEN: u64 = 8 << 20;
/// How long a look at what flies may wait, whether or not the GPU announced anything.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// How long a look at fences may wait that announce themselves.
const LOOK_AT_FENCES_EVERY: Duration = Duration::from_millis(5);
const DEVICE_FAILED: LinkDownReason = LinkDownReason::System(NonZeroI32::new(5).unwrap());

/// The `cuda` backend. See the [module](self).
///
/// Example: [`Cuda`].
#[derive(Debug)]
pub struct CudaDevice {
    driver: Arc<Driver>,
    regions: Regions,
    links: BTreeMap<LinkId, Link>,
    jobs: VecDeque<Job>,
    /// By GPU and lane, made at first use.
    streams: HashMap<(u16, usize), Stream>,
    /// Events to use again, by GPU.
    events: HashMap<u16, Vec<Event>>,
    landed: Vec<Flight>,
    flying_bytes: u64,
    flying: usize,
    lane: usize,
    wake: Arc<OwnedFd>,
    is_armed: bool,
    /// Whether all that is waited for says when to look.
    is_announced: bool,
}

#[derive(Debug, Default)]
struct Link {
    attached: Attachments,
    posts: u32,
    down: Option<LinkDownReason>,
}

/// Pieces that were put into a stream and have no event behind them yet.
struct Group {
    gpu: u16,
    first: usize,
    bytes: u64,
}

/// Both sides of a piece, checked.
struct Piece {
    source: Side,
    target: Side,
    len: u64,
    gpu: u16,
}

/// Why a piece is not put in.
enum NotPutIn {
    Refused(Refusal),
    /// The driver can no longer be relied on.
    Failed,
}

impl From<Refusal> for NotPutIn {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

fn ordinal(kind: MemoryKind) -> Option<u16> {
    match kind {
        MemoryKind::Cuda { device } => Some(device),
        _ => None,
    }
}

fn overlap(source: Side, target: Side, len: u64) -> bool {
    match (source, target) {
        (Side::Gpu { ordinal: one, address: source }, Side::Gpu { ordinal: other, address: target }) => {
            one == other && source.abs_diff(target) < len
        }
        _ => false,
    }
}

impl Link {
    /// Shows the capability of an attached region, once, and has its bytes lent.
    fn prove(&mut self, id: LinkId, region: RegionId, inbound: &mut dyn Inbound) -> Result<(), Refusal> {
        self.attached.prove(region, |capability| {
            inbound.prove(id, region, capability)?;
            // From now on the fabric has `revoke` called before anybody else gets the bytes.
            inbound.lend(id, region).map(drop)
        })
    }

    fn arrive(&mut self, id: LinkId, arrival: PostedArrival, inbound: &mut dyn Inbound) -> Result<(), Refusal> {
        self.prove(id, arrival.region, inbound)?;
        inbound.arrive(id, arrival)
    }
}

impl CudaDevice {
    /// A device without links, for all GPUs of this process.
    ///
    /// # Errors
    /// No descriptor.
    pub fn new(cuda: &Cuda) -> Result<Self, std::io::Error> {
        let driver = Arc::clone(&cuda.driver);
        Ok(Self {
            regions: Regions::new(Arc::clone(&driver)),
            driver,
            links: BTreeMap::new(),
            jobs: VecDeque::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            landed: Vec::new(),
            flying_bytes: 0,
            flying: 0,
            lane: 0,
            wake: Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            is_armed: false,
            is_announced: false,
        })
    }

    /// Takes what landed off the books.
    fn land(&mut self, inbound: &mut dyn Inbound) -> bool {
        let mut any = false;
        for job in &mut self.jobs {
            any |= job.land(DEVICE_FAILED, inbound, &mut self.landed);
            if let Some(Ending::LinkDown(reason)) = job.ended
                && let Some(link) = self.links.get_mut(&job.post.link)
            {
                link.down.get_or_insert(reason);
            }
        }
        for flight in self.landed.drain(..) {
            self.flying_bytes -= flight.bytes;
            self.flying -= 1;
            let spare = self.events.entry(flight.event.ordinal()).or_default();
            if spare.len() < FLIGHTS_MAX {
                spare.push(flight.event);
            }
        }
        any
    }

    fn has_room(&self) -> bool {
        self.flying < FLIGHTS_MAX && self.flying_bytes < WINDOW_LEN
    }

    /// Puts one group of each batch in, in turn, while there is room.
    fn put_in(&mut self, inbound: &mut dyn Inbound) -> bool {
        let mut any = false;
        for _ in 0..self.jobs.len() {
            let Some(mut job) = self.jobs.pop_front() else { break };
            let is_down = self.links.get(&job.post.link).is_none_or(|link| link.down.is_some());
            if !is_down && !job.waits(inbound) && self.has_room() {
                any |= self.put_group_in(&mut job, inbound);
            }
            self.jobs.push_back(job);
        }
        any
    }

    fn put_group_in(&mut self, job: &mut Job, inbound: &mut dyn Inbound) -> bool {
        let (mut group, mut any) = (None::<Group>, false);
        // Zero-length and refused moves count as pieces too.
        for _ in 0..GROUP_PIECES {
            let Some((posted, offset)) = job.next() else { break };
            any = true;
            match self.put_piece_in(job, &posted, offset, &mut group, inbound) {
                Ok(len) => job.advance(len),
                Err(NotPutIn::Refused(refusal)) => job.refuse(refusal),
                Err(NotPutIn::Failed) => break,
            }
            if group.as_ref().is_some_and(|group| group.bytes >= GROUP_LEN) {
                break;
            }
        }
        self.end_group(job, group);
        any
    }

    /// Returns the length of the piece.
    fn put_piece_in(
        &mut self,
        job: &mut Job,
        posted: &PostedMove,
        offset: u64,
        group: &mut Option<Group>,
        inbound: &mut dyn Inbound,
    ) -> Result<u64, NotPutIn> {
        let piece = self.piece(job.post.link, posted, offset, inbound)?;
        if piece.len == 0 {
            return Ok(0);
        }
        if group.as_ref().is_some_and(|group| group.gpu != piece.gpu) && !self.end_group(job, group.take()) {
            return Err(NotPutIn::Failed);
        }
        let stream = match self.streams.entry((piece.gpu, job.lane)) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(self.driver.stream(piece.gpu).map_err(|_| Refusal::Failed)?)
            }
        };
        // SAFETY:
        // - the local side: the contract lends it until `Finished`, which `Job::is_over` holds back while anything flies.
        // - the remote side: admitted by `piece`, of a region that was lent; `revoke` waits for what flies.
        // - host memory is locked in chunks, and pieces are cut so that none crosses one. No overlap: compared in `piece`.
        unsafe { stream.copy(piece.source, piece.target, piece.len as usize).map_err(|_| Refusal::Failed)? };
        let group = group.get_or_insert(Group { gpu: piece.gpu, first: job.index(), bytes: 0 });
        group.bytes += piece.len;
        Ok(piece.len)
    }

    /// Records an event behind a group. `false`, and the end of the batch, if that is not possible.
    fn end_group(&mut self, job: &mut Job, group: Option<Group>) -> bool {
        let Some(group) = group else { return true };
        let recorded = self.spare_event(group.gpu).and_then(|event| {
            self.streams.get(&(group.gpu, job.lane)).map_or(Ok(()), |stream| stream.record(&event)).map(|()| event)
        });
        match recorded {
            Ok(event) => {
                job.flies(event, group.first, group.bytes);
                (self.flying, self.flying_bytes) = (self.flying + 1, self.flying_bytes + group.bytes);
                true
            }
            Err(_) => {
                job.fail(group.first, DEVICE_FAILED);
                if let Some(link) = self.links.get_mut(&job.post.link) {
                    link.down.get_or_insert(DEVICE_FAILED);
                }
                false
            }
        }
    }

    fn spare_event(&mut self, gpu: u16) -> Result<Event, CudaError> {
        let spare = self.events.get_mut(&gpu).and_then(Vec::pop);
        spare.map_or_else(|| self.driver.event(gpu), Ok)
    }

    /// The next piece of a move, if the owner of the far side admits it.
    fn piece(
        &mut self,
        id: LinkId,
        posted: &PostedMove,
        offset: u64,
        inbound: &mut dyn Inbound,
    ) -> Result<Piece, NotPutIn> {
        let link = self.links.get_mut(&id).ok_or(Refusal::NotProven)?;
        let region = posted.remote.region;
        link.prove(id, region, inbound)?;
        let left = posted.remote.len - offset;
        // The whole move is checked at its first piece, so that a refusal leaves the target untouched.
        let range = RemoteRange { region, offset: posted.remote.offset + offset, len: left };
        let memory = inbound.admit(id, range, posted.access)?;
        let local_kind = self.regions.kind(posted.local_region).ok_or(Refusal::NotShareable)?;
        let remote_kind = self.regions.kind(memory).ok_or(Refusal::NotShareable)?;
        let gpu = ordinal(local_kind).or_else(|| ordinal(remote_kind)).ok_or(Refusal::NotShareable)?;
        let (local_offset, remote_offset) = (posted.local_offset + offset, range.offset);
        let cut_at = if ordinal(local_kind).is_none() { local_offset } else { remote_offset };
        let len = left.min(PIECE_LEN - cut_at % PIECE_LEN);
        let mut side = |region, offset| {
            let side = self.regions.side(region, offset, len, gpu).map_err(|_| Refusal::NotShareable);
            side.and_then(|side| side.ok_or(Refusal::NotShareable))
        };
        let (local, remote) = (side(posted.local_region, local_offset)?, side(memory, remote_offset)?);
        let (source, target) = match posted.access {
            Access::Write => (local, remote),
            Access::Read => (remote, local),
        };
        if overlap(source, target, left) {
            // Two overlapping parts of a raw region: there is no right answer to copy.
            return Err(Refusal::OutOfBounds.into());
        }
        Ok(Piece { source, target, len, gpu })
    }

    /// Tells of batches that are over, then of links that are down and have none.
    fn finish(&mut self, inbound: &mut dyn Inbound) -> bool {
        let mut any = false;
        for _ in 0..self.jobs.len() {
            let Some(mut job) = self.jobs.pop_front() else { break };
            let id = job.post.link;
            if let Some(reason) = self.links.get(&id).and_then(|link| link.down) {
                job.ended.get_or_insert(Ending::LinkDown(reason));
            }
            if !job.is_over() {
                self.jobs.push_back(job);
                continue;
            }
            any = true;
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.posts -= 1;
            let arrival = job.post.arrival.filter(|_| job.is_done());
            let uncounted = arrival.and_then(|arrival| link.arrive(id, arrival, inbound).err());
            job.finish(uncounted, inbound);
        }
        let is_gone = |link: &Link| link.posts == 0 && link.down.is_some();
        let gone: Vec<LinkId> = self.links.iter().filter(|(_, link)| is_gone(link)).map(|(id, _)| *id).collect();
        for link in gone {
            if let Some(reason) = self.links.remove(&link).and_then(|link| link.down) {
                inbound.event(crate::contract::Event::LinkDown { link, reason });
                any = true;
            }
        }
        any
    }

    /// Whether a poll would find something to do without anything landing.
    fn has_work(&self) -> bool {
        let can_put_in = |job: &Job| job.post.after.is_none() && job.next().is_some() && self.has_room();
        self.jobs.iter().any(|job| job.is_over() || can_put_in(job))
            || self.links.values().any(|link| link.down.is_some() && link.posts == 0)
    }

    fn moves_kind(&self, kind: MemoryKind) -> bool {
        match kind {
            MemoryKind::Host | MemoryKind::Pinned => true,
            MemoryKind::Cuda { device } => self.driver.knows(device),
            _ => false,
        }
    }
}

// SAFETY: for all four traits, duty by duty:
// - touch only what is lent: copies are put in by `put_piece_in` only, for ranges that were posted and admitted in that poll.
//   What flies is on the books of its job, which keeps it from `Finished`; `revoke` waits until nothing of the exposure flies.
// - no references: the GPU moves; the CPU touches none of it.
// - `Finished` is quiet and comes once: `Job::finish` consumes the job, when nothing of it flies.
// - told honestly, right bytes: a move is done when the event behind its last piece has happened, at which both ends, memory of
//   this process's fabric, have it. Where a GPU failed, what was put in is unknown.
// - arrivals: counted in `finish`, for jobs whose every move is done.
// - closing: `finish` runs in every poll and takes all that has landed.
unsafe impl Memory for CudaDevice {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        let is_gpu = |kind| ordinal(kind).is_some();
        self.moves_kind(local) && self.moves_kind(remote) && (is_gpu(local) || is_gpu(remote))
    }

    fn share_header(&mut self, _header: &Arc<HeaderPage>) {}

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        self.regions.insert(memory)
    }

    fn release(&mut self, region: RegionId) {
        self.regions.release(region);
    }

    fn revoke(&mut self, exposure: RegionId) {
        self.jobs.iter().filter(|job| job.is_reaching(exposure)).for_each(Job::settle);
    }

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        self.links.get_mut(&link).map_or(Ok(()), |link| link.attached.attach(token))
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        if let Some(link) = self.links.get_mut(&link) {
            link.attached.detach(region);
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Transport for CudaDevice {
    fn open(&mut self, _now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        if !matches!(connection, Connection::Loopback) {
            return Err(OpenError::WrongConnection { transport: "cuda" });
        }
        if self.links.len() >= LIMITS.links_max as usize {
            return Err(OpenError::Full { transport: "cuda", links_max: LIMITS.links_max });
        }
        self.links.insert(link, Link::default());
        Ok(())
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if let Some(link) = self.links.get_mut(&link) {
            link.down.get_or_insert(reason);
        }
    }

    fn waits_for_fences(&self) -> bool {
        true
    }

    unsafe fn post(&mut self, _now: Instant, post: Post) -> Result<(), NotPosted> {
        match self.links.get_mut(&post.link).filter(|link| link.down.is_none()) {
            None => Err(NotPosted { post, reason: PostRefusal::LinkClosed }),
            Some(link) if link.posts >= LIMITS.posts_max => Err(NotPosted { post, reason: PostRefusal::Full }),
            Some(link) => {
                link.posts += 1;
                self.lane = (self.lane + 1) % LANES;
                self.jobs.push_back(Job::new(post, self.lane));
                Ok(())
            }
        }
    }

    fn cancel(&mut self, _now: Instant, ticket: TicketId) {
        if let Some(job) = self.jobs.iter_mut().find(|job| job.post.ticket == ticket) {
            job.ended.get_or_insert(Ending::Cancelled);
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Completions for CudaDevice {
    fn poll(&mut self, _now: Instant, budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        if core::mem::take(&mut self.is_armed) {
            // Empty already is as good.
            let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
        }
        let landed = self.land(inbound);
        // Without a budget this is the last poll before the fabric goes: nothing new is started.
        let put_in = budget_bytes > 0 && self.put_in(inbound);
        let finished = self.finish(inbound);
        if landed || put_in || finished { Turn::Worked } else { Turn::Idle }
    }

    fn arm(&mut self, _now: Instant) -> Wake<'_> {
        if self.has_work() {
            return Wake::Now;
        }
        if self.jobs.is_empty() {
            return Wake::Idle;
        }
        if !core::mem::replace(&mut self.is_armed, true) {
            let lanes =
                self.jobs.iter().flat_map(|job| job.flights.iter().map(|flight| (flight.event.ordinal(), job.lane)));
            let lanes: std::collections::BTreeSet<_> = lanes.collect();
            let mut streams = lanes.iter().filter_map(|lane| self.streams.get(lane));
            let mut fences = self.jobs.iter().filter_map(|job| job.post.after.as_ref());
            // What cannot announce anything is looked at by time.
            self.is_announced = streams.all(|stream| stream.notify(&self.wake).is_ok());
            self.is_announced &= fences.all(|fence| fence.notify(&self.wake));
        }
        // What flies takes that long, and the announcement of a stream comes with the last of it; a fence may take any time.
        let within = if self.flying == 0 && self.is_announced { LOOK_AT_FENCES_EVERY } else { LOOK_EVERY };
        Wake::Readable { fd: self.wake.as_fd(), within: Some(within) }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn limits(&self) -> DeviceLimits {
        LIMITS
    }
}

impl Drop for CudaDevice {
    /// Waits for what flies: the pages that it touches are about to be unlocked.
    fn drop(&mut self) {
        self.jobs.iter().for_each(Job::settle);
    }
}
