//! RDMA by verbs: one-sided writes and reads over reliable connected queue pairs, InfiniBand and RoCE.
//!
//! An opened [`Nic`] makes [`Endpoint`]s; two of them that know each other's records are a link. A peer's batch reaches memory
//! of ours by itself, through keys that it got for exactly what was granted, on its link, until [`Memory::revoke`]. A write is
//! done when it is visible at the target: the owner has counted the arrival that follows it on the same queue pair, or a read
//! that follows it there came back. An acknowledgement of the NIC alone is receipt.
//!
//! What it is not: it dials nobody (records travel over a session that the ends have), it decides no path and retries no batch,
//! and it is no shield against a peer that guesses: a key is 32 bits, good on one link for what was granted to that link.
//!
//! Costs to know: a grant is registered when a peer first proves it, range by range (a system call, and pages are pinned), and
//! deregistered when it ends; local memory is registered in chunks at first use and kept. A closed grant that a peer still
//! writes to breaks that peer's queue pair, which is made anew within the link; what came behind it is posted again.
//!
//! The feature `fake-nic` brings `fake`, a NIC in memory, for tests of what stands on this crate. The feature `rdma` brings `rdma_verbs`, which opens libibverbs at run time; building it needs cmake and
//! libclang. Everything else here is built and tested without.
//!
//! Invariants: each posted batch is finished exactly once, since the device ends its own list of batches and relies on no
//! completion for it; memory is quiet once its requests completed or their queue pair was destroyed; nothing a peer sends is
//! trusted, and what makes no sense ends its link only.
#![allow(unsafe_code)]

pub(crate) mod control;
pub(crate) mod cut;
pub mod endpoint;
// Only a part of it is for tests of what stands on hal.
#[cfg(any(test, feature = "fake-nic"))]
#[cfg_attr(not(test), allow(dead_code))]
pub mod fake;
pub mod gid;
mod job;
mod link;
pub mod memory;
pub(crate) mod message;
mod nic;
mod queue;
mod record;
mod store;
#[cfg(test)]
mod tests;
pub mod verbs;
pub(crate) mod wire_id;

use core::num::NonZeroI32;
use std::collections::BTreeMap;
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};

pub use self::endpoint::{Endpoint, EndpointError};
pub use self::nic::{Nic, NicCounts, NicError, RdmaOptions};
pub use self::record::{QUEUES_MAX, RecordError};

use self::endpoint::Connected;
use self::link::{Link, Parting};
use self::memory::Local;
use self::nic::Count;
use self::store::Store;
use crate::contract::{
    Completions, Connection, Device, DeviceLimits, Inbound, LinkDownReason, LinkId, Memory, NotPosted, OpenError, Post,
    PostRefusal, RegionMemory, RegisterError, TicketId, Transport, Turn, Wake,
};
use crate::mapping::HeaderPage;

/// Batches that one link holds, at most.
pub const POSTS_MAX: u32 = 256;
/// Moves of one batch, at most.
pub const MOVES_MAX: u32 = 1 << 16;
/// So many turns without work go by before the NIC is asked for events unasked.
const IDLE_TURNS_MAX: u32 = 256;
/// How long goodbyes may hold up the end of a device.
const PARTING_MAX: std::time::Duration = std::time::Duration::from_millis(10);
const ENETDOWN: NonZeroI32 = NonZeroI32::new(100).unwrap();

/// The `rdma` backend over one NIC. See the [module](self).
///
/// Example: `hal/tests/rdma_guest.rs`.
#[derive(Debug)]
pub struct RdmaDevice {
    nic: Nic,
    local: Local,
    links: BTreeMap<LinkId, Link>,
    store: Store,
    parting: Vec<Parting>,
    armed: bool,
    idle_turns: u32,
}

impl RdmaDevice {
    /// A device without links. Endpoints for its links come from (clones of) the same NIC.
    #[must_use]
    pub fn new(nic: Nic) -> Self {
        let (limits, options) = (nic.limits(), nic.options());
        Self {
            local: Local::new(limits.registration_len_max),
            store: Store::new(options.links_max),
            nic,
            links: BTreeMap::new(),
            parting: Vec::new(),
            armed: false,
            idle_turns: 0,
        }
    }

    /// Asks the NIC what happened. Returns whether anything had.
    fn look_at_events(&mut self) -> bool {
        self.idle_turns = 0;
        let mut any = false;
        while let Some(event) = self.nic.verbs().next_event() {
            any = true;
            if self.nic.on_event(event) {
                // Retrying in the NIC would hold each batch for seconds; another path may be healthy.
                self.links.values_mut().for_each(|link| link.end(LinkDownReason::System(ENETDOWN)));
            }
        }
        any
    }

    fn bury_the_dead(&mut self, now: Instant, inbound: &mut dyn Inbound) -> bool {
        let dead: Vec<_> = self.links.iter().filter_map(|(id, link)| Some((*id, link.down?))).collect();
        for (id, reason) in &dead {
            if let Some(link) = self.links.remove(id) {
                self.store.remove(now, *id);
                self.parting.push(link.bury(now, *reason, inbound));
            }
        }
        self.parting.retain_mut(|parting| !parting.is_over(now));
        !dead.is_empty()
    }

    fn registered(&mut self, post: &Post) -> bool {
        let mut last = None;
        post.moves.iter().all(|posted| {
            let chunk_len = self.local.chunk_len();
            let (first, end) = (posted.local_offset / chunk_len, posted.local_offset + posted.remote.len);
            (first..end.div_ceil(chunk_len).max(first)).all(|chunk| {
                last.replace((posted.local_region, chunk)) == Some((posted.local_region, chunk))
                    || self.local.chunk_key(self.nic.verbs(), self.nic.domain(), posted.local_region, chunk).is_ok()
            })
        })
    }
}

// SAFETY: for all four traits, duty by duty:
// - touch only what is lent: local memory is named by pieces of posted moves (`queue::piece`), in requests that complete or
//   whose queue pair is destroyed before `Finished` (`Job::is_over`, `Link::bury`). Peers reach what `lend` named through
//   `Lending`, whose keys end in `revoke`: deregistered, or else their queue pairs destroyed.
// - no references: the NIC moves; rings and slots are copied by `crate::copy`.
// - `Finished` is quiet and comes once: a job leaves the table when it is reported, by `finish_over` or by `bury`.
// - told honestly, right bytes: `Job::finish` says done after the request that tells completed, or the owner counted; the
//   NIC's order makes what a broken queue did known (`Queue::break_off`).
// - arrivals: `on_arrival` runs at the completion of the immediate behind the writes of its queue, and `Queue::end` posts it
//   only if no move was refused. A refusal to count is `Counted(Err)`.
// - untrusted input: `Message::parse`, `Record::parse`, `Arrival::parse`, and indices checked where they are used.
// - closing: `bury_the_dead` runs in every poll.
unsafe impl Memory for RdmaDevice {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        local != MemoryKind::File && remote != MemoryKind::File
    }

    fn share_header(&mut self, _header: &Arc<HeaderPage>) {}

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        self.local.insert(self.nic.verbs(), self.nic.domain(), memory)
    }

    fn release(&mut self, region: RegionId) {
        self.local.remove(self.nic.verbs(), region);
    }

    fn revoke(&mut self, exposure: RegionId) {
        for link in self.links.values_mut() {
            if link.revoke(exposure).is_err() {
                link.revoke_by_force(exposure);
            }
        }
    }

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        if let Some(link) = self.links.get_mut(&link) {
            link.attach(token);
        }
        Ok(())
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        if let Some(link) = self.links.get_mut(&link) {
            link.detach(region);
        }
    }
}

// SAFETY: see `Memory`.
unsafe impl Transport for RdmaDevice {
    fn open(&mut self, now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        let wrong = OpenError::WrongConnection { transport: "rdma" };
        let Connection::Own(own) = connection else { return Err(wrong) };
        let connected = own.into_any().downcast::<Connected>().map_err(|_| wrong.clone())?;
        if !connected.endpoint.nic.is_same(&self.nic) {
            return Err(wrong);
        }
        self.look_at_events();
        if self.nic.is_down() {
            return Err(OpenError::System { transport: "rdma", action: "using the port", code: ENETDOWN.get() });
        }
        let links = &self.links;
        if let Some(idle) = self.store.evict(now, &|link| links.get(&link).is_some_and(Link::is_idle)) {
            self.nic.count(Count::Eviction);
            self.links.entry(idle).and_modify(|link| link.end(LinkDownReason::Evicted));
        }
        if !self.store.insert(now, link) {
            return Err(OpenError::Full { transport: "rdma", links_max: self.nic.options().links_max });
        }
        self.links.insert(link, Link::new(now, link, *connected));
        Ok(())
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if let Some(link) = self.links.get_mut(&link) {
            link.end(reason);
        }
    }

    unsafe fn post(&mut self, now: Instant, post: Post) -> Result<(), NotPosted> {
        let posts = self.links.get(&post.link).filter(|link| link.down.is_none()).map(Link::posts);
        let refusal = match posts {
            None => Some(PostRefusal::LinkClosed),
            Some(posts) if posts >= POSTS_MAX as usize => Some(PostRefusal::Full),
            Some(_) => (!self.registered(&post)).then_some(PostRefusal::NotShareable),
        };
        match (refusal, self.links.get_mut(&post.link)) {
            (None, Some(link)) => {
                link.expect_answer(now);
                self.store.on_used(now, post.link);
                link.post(&self.local, post);
                Ok(())
            }
            (reason, _) => Err(NotPosted { post, reason: reason.unwrap_or(PostRefusal::LinkClosed) }),
        }
    }

    fn cancel(&mut self, _now: Instant, ticket: TicketId) {
        let local = &self.local;
        // The first link that knows the ticket takes it.
        self.links.values_mut().any(|link| link.cancel(local, ticket));
    }
}

// SAFETY: see `Memory`.
unsafe impl Completions for RdmaDevice {
    fn poll(&mut self, now: Instant, _budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let mut worked = false;
        if core::mem::take(&mut self.armed) {
            self.nic.verbs().quiet_wake_fd();
            self.links.values_mut().for_each(|link| link.is_armed = false);
            worked |= self.look_at_events();
        } else if self.idle_turns >= IDLE_TURNS_MAX {
            worked |= self.look_at_events();
        }
        for (id, link) in &mut self.links {
            if link.turn(now, &self.local, inbound) {
                self.store.on_used(now, *id);
                worked = true;
            }
        }
        worked |= self.bury_the_dead(now, inbound);
        self.idle_turns = if worked { 0 } else { self.idle_turns + 1 };
        if worked { Turn::Worked } else { Turn::Idle }
    }

    fn arm(&mut self, now: Instant) -> Wake<'_> {
        self.armed = true;
        let mut has_work = false;
        let mut next = Instant::NEVER;
        for link in self.links.values_mut() {
            if !link.is_armed && self.nic.verbs().notify(link.endpoint.completions).is_ok() {
                link.is_armed = true;
            }
            // What completed before the notification was asked for announces nothing.
            has_work |= link.look() || link.has_work();
            next = next.min(link.next_timer());
        }
        if has_work {
            return Wake::Now;
        }
        next = self.parting.iter().map(Parting::until).fold(next, Instant::min);
        let within = (next != Instant::NEVER).then(|| next.since(now).max(Duration::from_nanos(1)));
        Wake::Readable { fd: self.nic.verbs().wake_fd(), within }
    }
}

// SAFETY: see `Memory`.
unsafe impl Device for RdmaDevice {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn limits(&self) -> DeviceLimits {
        let links_max = self.nic.options().links_max;
        DeviceLimits { moves_max: MOVES_MAX, bytes_max: 1 << 40, posts_max: POSTS_MAX, links_max }
    }
}

impl Drop for RdmaDevice {
    /// Waits a moment for goodbyes that were said, then takes everything apart.
    fn drop(&mut self) {
        while let Some((_, link)) = self.links.pop_first() {
            link.discard();
        }
        let start = std::time::Instant::now();
        while !self.parting.is_empty() && start.elapsed() < PARTING_MAX {
            self.parting.retain_mut(|parting| !parting.is_over(Instant::ZERO));
            std::thread::yield_now();
        }
        self.parting.clear();
        self.local.clear(self.nic.verbs());
    }
}
