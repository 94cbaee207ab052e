//! Shared memory between processes of one host: nobody maps another's memory writable.
//!
//! Each region is a sealed memfd that peers map read-only when they first need it. A **write** is a request in a ring; the
//! owner of the target copies, out of the initiator's region. A **read** is a request too; once the owner allowed it the
//! initiator copies, out of the owner's region, and then looks whether the grant still held. What lies in a grant that was
//! read from before is not asked for again, so the owner need not run for it. So there is one copy each way,
//! an owner that revoked a grant cannot be written to, and memory need never be retired because a stopped peer might still
//! write it. Rings are memfds as well; an end that sleeps is woken through a unix socket, which also hands over descriptors
//! and tells when a process died.
//!
//! What it is not: a way to keep secrets from a peer. Who opens a link shows the peer every region that a batch on that link
//! writes from, or that a grant for reading lies in, whole. Open links inside one trust domain only.
//!
//! Invariants: what a peer's memory says is copied out before it is checked; a violation ends its link only; a batch is
//! finished only when the peer answered its end, or when our half says that the link is closed.

mod ask;
pub(crate) mod half;
mod link;
mod serve;
mod socket;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};

/// Version of what two processes write for each other: who has another one is not to be met over shared memory.
///
/// ```
/// assert_eq!(millpond_hal::backend::shm::LAYOUT_VERSION, 2);
/// ```
pub const LAYOUT_VERSION: u16 = 2;
use rustix::event::epoll;

use self::link::{Asleep, Link, bits_of};
use crate::contract::{
    Access, Completions, Connection, Device, DeviceLimits, Inbound, LinkDownReason, LinkId, Memory, NotPosted,
    OpenError, Post, PostRefusal, PostedMove, RegionMemory, RegisterError, TicketId, Transport, Turn, Wake,
};
use crate::mapping::HeaderPage;
use crate::sync::full_fence;

/// Links of one device, at most.
pub const LINKS_MAX: u32 = 256;
/// Batches that one link holds, at most.
pub const POSTS_MAX: u32 = 1024;
/// Moves of one batch, at most.
pub const MOVES_MAX: u32 = 1 << 16;
/// Regions of one device, at most.
pub const REGIONS_MAX: usize = 1024;
/// So many turns without work go by before the sockets are looked at unasked.
const IDLE_TURNS_MAX: u32 = 64;
/// So long they are not looked at while there is work: reads can go on without their owner, also without a living one.
const UNSEEN_SPAN_MAX: Duration = Duration::from_millis(1);

/// A local region, as far as peers may see it.
#[derive(Clone, Debug)]
struct LocalRegion {
    bits: u64,
    len: u64,
    shared: Option<Arc<OwnedFd>>,
}

/// Local regions by their bits.
type Regions = BTreeMap<u64, LocalRegion>;

/// How a [`ShmDevice`] behaves.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_hal::backend::shm::ShmOptions;
/// assert_eq!(ShmOptions::default().progress_deadline, Duration::from_secs(5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// A link on which a batch waits ends when nothing moved for so long.
    pub progress_deadline: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        Self { progress_deadline: Duration::from_secs(5) }
    }
}

/// The shared-memory backend. Give it to a fabric, then open links over connected unix sockets.
///
/// Example: `hal/tests/shm_processes.rs`.
#[derive(Debug)]
pub struct ShmDevice {
    options: ShmOptions,
    regions: Regions,
    header: Option<Arc<HeaderPage>>,
    links: BTreeMap<LinkId, Link>,
    epoll: OwnedFd,
    armed: bool,
    idle_turns: u32,
    looked_at: Instant,
}

impl ShmDevice {
    /// A device without links.
    ///
    /// # Errors
    /// The host refuses an epoll set: out of descriptors, for example.
    pub fn new(options: ShmOptions) -> std::io::Result<Self> {
        Ok(Self {
            options,
            regions: Regions::new(),
            header: None,
            links: BTreeMap::new(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            armed: false,
            idle_turns: 0,
            looked_at: Instant::ZERO,
        })
    }

    /// Reads the sockets: after a sleep, and every so often while nothing happens.
    fn look_at_sockets(&mut self, now: Instant) -> bool {
        (self.idle_turns, self.looked_at) = (0, now);
        let mut worked = false;
        for link in self.links.values_mut() {
            worked |= link.shared.receive();
        }
        worked
    }

    fn bury_the_dead(&mut self, inbound: &mut dyn Inbound) -> bool {
        let dead: Vec<(LinkId, LinkDownReason)> =
            self.links.iter().filter_map(|(id, link)| Some((*id, link.shared.down?))).collect();
        for (id, reason) in &dead {
            if let Some(mut link) = self.links.remove(id) {
                let _ = epoll::delete(&self.epoll, &link.shared.socket);
                link.bury(*reason, inbound);
            }
        }
        !dead.is_empty()
    }
}

fn is_host(kind: MemoryKind) -> bool {
    matches!(kind, MemoryKind::Host | MemoryKind::Pinned)
}

#[allow(unsafe_code)]
// SAFETY:
// - local memory is touched in `ask::copy_range` only, for posted reads before `Finished`; peers' requests in `serve::write`
//   only, through `resolve` in the same poll. `release` and `detach` drop what names them.
unsafe impl Memory for ShmDevice {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        is_host(local) && is_host(remote)
    }

    fn share_header(&mut self, header: &Arc<HeaderPage>) {
        self.header = Some(header.clone());
    }

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        if !is_host(memory.kind) {
            return Err(RegisterError::Kind(memory.kind));
        }
        if self.regions.len() >= REGIONS_MAX {
            return Err(RegisterError::Full);
        }
        let bits = bits_of(memory.id);
        self.regions.insert(bits, LocalRegion { bits, len: memory.len, shared: memory.shared.clone() });
        Ok(())
    }

    fn release(&mut self, region: RegionId) {
        let bits = bits_of(region);
        self.regions.remove(&bits);
        for link in self.links.values_mut() {
            link.shared.forget(bits);
        }
    }

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        if let Some(link) = self.links.get_mut(&link) {
            link.asking.attach(token);
        }
        Ok(())
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        if let Some(link) = self.links.get_mut(&link) {
            link.asking.detach(bits_of(region));
        }
    }
}

#[allow(unsafe_code)]
// SAFETY:
// - `Finished` is reported by `ask` alone: once the peer answered the end of the batch and its reads are copied, or after
//   `Shared::end` closed our half; in both cases nothing touches the batch's local memory again.
// - nothing here waits: sockets are non-blocking, rings are looked at.
unsafe impl Transport for ShmDevice {
    fn open(&mut self, now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        let Connection::Stream { fd, read_ahead, lane } = connection else {
            return Err(OpenError::WrongConnection { transport: self.name() });
        };
        let system = |action| move |code: i32| OpenError::System { transport: "shm", action, code };
        let family = rustix::net::getsockname(&fd).map(|address| address.address_family());
        if family != Ok(rustix::net::AddressFamily::UNIX) {
            return Err(OpenError::WrongConnection { transport: self.name() });
        }
        if self.links.len() >= LINKS_MAX as usize {
            return Err(OpenError::Full { transport: self.name(), links_max: LINKS_MAX });
        }
        let header = self.header.clone().ok_or_else(|| system("sharing the header page")(22))?;
        let opened = Link::new(now, link, (fd, read_ahead, lane), &header)
            .ok_or_else(|| system("making the shared ring")(12))?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        epoll::add(&self.epoll, &opened.shared.socket, epoll::EventData::new_u64(0), flags)
            .map_err(|error| system("watching the socket")(error.raw_os_error()))?;
        self.links.insert(link, opened);
        Ok(())
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if let Some(link) = self.links.get_mut(&link) {
            link.shared.end(reason);
        }
    }

    unsafe fn post(&mut self, now: Instant, post: Post) -> Result<(), NotPosted> {
        let Some(link) = self.links.get_mut(&post.link).filter(|link| link.shared.down.is_none()) else {
            return Err(NotPosted { post, reason: PostRefusal::LinkClosed });
        };
        if link.asking.len() >= POSTS_MAX as usize || post.moves.len() > MOVES_MAX as usize {
            return Err(NotPosted { post, reason: PostRefusal::Full });
        }
        let hidden = |region| self.regions.get(&bits_of(region)).is_none_or(|region| region.shared.is_none());
        if post.moves.iter().any(|posted| posted.access == Access::Write && hidden(posted.local_region)) {
            return Err(NotPosted { post, reason: PostRefusal::NotShareable });
        }
        if link.asking.is_idle() {
            link.shared.last_progress = now;
        }
        link.asking.push(post, &link.shared);
        link.asking.publish(&mut link.shared, &self.regions);
        link.shared.ring();
        Ok(())
    }

    unsafe fn read_at_once(&mut self, link: LinkId, posted: &PostedMove) -> bool {
        let link = self.links.get(&link).filter(|link| link.shared.down.is_none());
        link.is_some_and(|link| link.asking.read_at_once(&link.shared, posted))
    }

    fn cancel(&mut self, _now: Instant, ticket: TicketId) {
        for link in self.links.values_mut() {
            if link.asking.cancel(&mut link.shared, ticket.to_bits()) {
                link.asking.publish(&mut link.shared, &self.regions);
                return link.shared.ring();
            }
        }
    }
}

#[allow(unsafe_code)]
// SAFETY:
// - a turn copies at most its budget: every piece is cut to what is left of it.
// - `arm` marks our halves as asleep, then looks at the rings again; a peer publishes, then looks whether we sleep.
unsafe impl Completions for ShmDevice {
    fn poll(&mut self, now: Instant, budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let mut worked = false;
        if core::mem::take(&mut self.armed) {
            for link in self.links.values_mut() {
                link.set_asleep(Asleep::No);
            }
            worked |= self.look_at_sockets(now);
        } else if self.idle_turns >= IDLE_TURNS_MAX || now.since(self.looked_at) >= UNSEEN_SPAN_MAX {
            worked |= self.look_at_sockets(now);
        }
        let mut left = budget_bytes;
        for link in self.links.values_mut() {
            if link.shared.peer.is_none() {
                link.shared.receive();
            }
            let (copied, did) = link.turn(now, left, &self.regions, inbound);
            left = left.saturating_sub(copied);
            worked |= did;
            if now.since(link.shared.last_progress) >= self.options.progress_deadline {
                link.shared.end(LinkDownReason::Stalled);
            }
        }
        worked |= self.bury_the_dead(inbound);
        self.idle_turns = if worked { 0 } else { self.idle_turns + 1 };
        if worked { Turn::Worked } else { Turn::Idle }
    }

    fn arm(&mut self, now: Instant) -> Wake<'_> {
        for link in self.links.values_mut() {
            link.set_asleep(Asleep::Yes);
        }
        full_fence();
        self.armed = true;
        if self.links.values().any(Link::has_work) {
            return Wake::Now;
        }
        let due = self.links.values().filter(|link| !link.asking.is_idle());
        let mut within = due.map(|link| (link.shared.last_progress + self.options.progress_deadline).since(now)).min();
        if self.links.values().any(|link| !link.shared.socket.is_flushed()) {
            within = Some(within.unwrap_or(Duration::MAX).min(Duration::from_millis(1)));
        }
        Wake::Readable { fd: self.epoll.as_fd(), within }
    }
}

#[allow(unsafe_code)]
// SAFETY:
// - the three traits above keep the contract; nothing here is shared with another device.
unsafe impl Device for ShmDevice {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { moves_max: MOVES_MAX, bytes_max: u64::MAX, posts_max: POSTS_MAX, links_max: LINKS_MAX }
    }
}
