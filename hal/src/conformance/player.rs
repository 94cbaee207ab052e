//! A backend that plays a device: it moves between memory of the host and memory that the CPU may not touch.
//!
//! What hardware does with a device's addresses, this does through the second mapping of an [`Untouchable`]. It is for tests of
//! what stands on backends: memory of a device, handled as such, on a machine without one. Whoever beside it takes such an
//! address for the CPU's ends at once. Invariant: it moves what has the device's memory on one side at least.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::collections::HashMap;
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken};
use millpond_core::time::Instant;

use super::untouchable::Untouchable;
use crate::backend::host::Host;
use crate::contract::{
    Access, Completions, Connection, Device, DeviceLimits, Event, Inbound, LinkDownReason, LinkId, Memory, NotPosted,
    OpenError, Post, PostRefusal, PostedArrival, Proven, Refusal, RegionMemory, RegisterError, RemoteRange, TicketId,
    Transport, Turn, Wake,
};
use crate::mapping::HeaderPage;

/// The backend, for the memory of one [`Untouchable`].
///
/// Example: `verify/tests/engine_device.rs` (`Player`).
pub struct Player {
    host: Host,
    memory: Untouchable,
    kind: MemoryKind,
    regions: Regions,
}

type Regions = HashMap<RegionId, Registered>;

/// Memory that a fabric registered.
#[derive(Clone, Copy)]
struct Registered {
    base: NonNull<u8>,
    is_device: bool,
}

// SAFETY: the pointers in `regions` block it. They are those of registered memory, which the fabric keeps mapped until `release`,
// and are reached in polls only, by the thread that polls. Test: `engine_device` moves an engine between threads.
unsafe impl Send for Player {}

impl core::fmt::Debug for Player {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Player").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Player {
    /// A backend that plays the device of this memory, which is of kind `kind`.
    #[must_use]
    pub fn new(memory: Untouchable, kind: MemoryKind) -> Self {
        Self { host: Host::new(), memory, kind, regions: HashMap::new() }
    }

    fn knows(&self, kind: MemoryKind) -> bool {
        kind == MemoryKind::Host || kind == self.kind
    }
}

/// The fabric, as `Host` sees it: addresses come as a device would reach them.
struct Reaching<'a> {
    inner: &'a mut dyn Inbound,
    memory: &'a Untouchable,
    regions: &'a Regions,
}

/// Where an address inside a region can be reached. Only a device's are looked up: memory of the host may begin right where a
/// device's ends.
fn reached(memory: &Untouchable, region: Registered, place: NonNull<u8>) -> Option<NonNull<u8>> {
    if region.is_device { memory.reach(place) } else { Some(place) }
}

// SAFETY: `resolve` gives what `admit` admitted in this very poll, inside the registered region that it named: at its own
// address, or, of an `Untouchable`, in the second mapping of the same bytes, which lives as long as the first.
unsafe impl Inbound for Reaching<'_> {
    fn prove(&mut self, link: LinkId, region: RegionId, capability: Capability) -> Result<Proven, Refusal> {
        self.inner.prove(link, region, capability)
    }

    fn resolve(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<NonNull<u8>, Refusal> {
        let memory = self.inner.admit(link, range, access)?;
        let region = *self.regions.get(&memory).ok_or(Refusal::NotShareable)?;
        let offset = usize::try_from(range.offset).map_err(|_| Refusal::OutOfBounds)?;
        // SAFETY: `admit` compared the range with what was granted, which lies inside the region.
        let place = unsafe { region.base.add(offset) };
        reached(self.memory, region, place).ok_or(Refusal::NotShareable)
    }

    fn admit(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<RegionId, Refusal> {
        self.inner.admit(link, range, access)
    }

    fn arrive(&mut self, link: LinkId, arrival: PostedArrival) -> Result<(), Refusal> {
        self.inner.arrive(link, arrival)
    }

    fn event(&mut self, event: Event) {
        self.inner.event(event);
    }
}

// SAFETY: for all four traits: `Host` keeps the contract for the addresses that it is given, which are those that were lent, or
// the same bytes in their second mapping. It copies in polls only, so nothing flies when a grant is taken back.
unsafe impl Memory for Player {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        self.knows(local) && self.knows(remote) && (local == self.kind || remote == self.kind)
    }

    fn share_header(&mut self, header: &Arc<HeaderPage>) {
        self.host.share_header(header);
    }

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        if !self.knows(memory.kind) {
            return Err(RegisterError::Kind(memory.kind));
        }
        self.regions.insert(memory.id, Registered { base: memory.base, is_device: memory.kind == self.kind });
        Ok(())
    }

    fn release(&mut self, region: RegionId) {
        self.regions.remove(&region);
    }

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        self.host.attach(link, token)
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        self.host.detach(link, region);
    }
}

// SAFETY: as for `Memory`.
unsafe impl Transport for Player {
    fn open(&mut self, now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        self.host.open(now, link, connection)
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        self.host.close(link, reason);
    }

    unsafe fn post(&mut self, now: Instant, mut post: Post) -> Result<(), NotPosted> {
        for posted in &mut post.moves {
            let region = self.regions.get(&posted.local_region);
            match region.and_then(|region| reached(&self.memory, *region, posted.local)) {
                Some(local) => posted.local = local,
                None => return Err(NotPosted { post, reason: PostRefusal::NotShareable }),
            }
        }
        // SAFETY: the same duty, for the second mapping of the same bytes.
        unsafe { self.host.post(now, post) }
    }

    fn cancel(&mut self, now: Instant, ticket: TicketId) {
        self.host.cancel(now, ticket);
    }
}

// SAFETY: as for `Memory`.
unsafe impl Completions for Player {
    fn poll(&mut self, now: Instant, budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let Self { host, memory, regions, .. } = self;
        host.poll(now, budget_bytes, &mut Reaching { inner: inbound, memory, regions })
    }

    fn arm(&mut self, now: Instant) -> Wake<'_> {
        self.host.arm(now)
    }
}

// SAFETY: as for `Memory`.
unsafe impl Device for Player {
    fn name(&self) -> &'static str {
        "player"
    }

    fn limits(&self) -> DeviceLimits {
        self.host.limits()
    }
}
