//! The fabric's tables, and how they answer a device.
//!
//! Everything that a peer may cause is decided here: whether a capability is right, a range granted, a ticket known.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::collections::VecDeque;
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken, Rights};
use millpond_core::slab::{Slab, Slot};
use millpond_core::time::{Duration, Instant};

use super::batch::{Batch, Exception, Outcomes};
use super::grant::Holding;
use super::{FabricEvent, Limits, Stats};
use crate::contract::{
    Access, Event, Inbound, Lent, LinkDownReason, LinkId, Outcome, PostedArrival, PostedMove, Proven, Refusal,
    RemoteRange, TicketId,
};
use crate::file::OpenFile;
use crate::mapping::{HeaderPage, Mapping};
use crate::region::Mode;

type Table<T> = Slab<T, Box<[Slot<T>]>>;

/// Posted lists kept for reuse.
const POOL_MAX: usize = 256;

/// Where the bytes of a region are.
#[derive(Clone)]
pub(super) enum Place {
    Mapped(Arc<Mapping>),
    File(Arc<OpenFile>),
}

impl Place {
    pub(super) fn mapping(&self) -> Option<&Arc<Mapping>> {
        match self {
            Self::Mapped(mapping) => Some(mapping),
            Self::File(_) => None,
        }
    }
}

pub(super) struct RegionEntry {
    pub(super) place: Place,
    pub(super) kind: MemoryKind,
    pub(super) mode: Mode,
    /// Bit n: device n knows the region.
    pub(super) devices: u32,
    /// Requests in flight that name a raw region.
    pub(super) raw_in_flight: u32,
    pub(super) exposure: Option<RegionId>,
    /// Its last handle is gone: release it when nothing is in flight.
    pub(super) doomed: bool,
}

pub(super) struct Exposure {
    pub(super) memory: RegionId,
    pub(super) place: Place,
    pub(super) ranges: Vec<(u64, u64)>,
    pub(super) rights: Rights,
    pub(super) capability: Capability,
    pub(super) holding: Holding,
    /// Sorted by counter.
    pub(super) counters: Vec<(u64, u64)>,
    /// An `Arrived` of it is in the queue.
    pub(super) announced: bool,
    /// Some device may have given peers keys to it.
    pub(super) lent: bool,
}

pub(super) struct LinkEntry {
    pub(super) device: usize,
    pub(super) in_flight: u32,
    pub(super) progress_at: Instant,
    pub(super) progress_deadline: Duration,
    /// By slot: the epoch of the exposure whose capability this link has proven.
    pub(super) proven: Vec<u32>,
    pub(super) closing: bool,
}

pub(super) struct RemoteEntry {
    pub(super) token: RegionToken,
    pub(super) links: Vec<LinkId>,
    pub(super) in_flight: u32,
}

pub(super) struct TicketEntry {
    pub(super) link: LinkId,
    pub(super) batch: Batch,
    pub(super) state: TicketState,
    pub(super) orphaned: bool,
    pub(super) outcomes: Outcomes,
    pub(super) deadline: Instant,
    pub(super) cancelled: bool,
    pub(super) bytes_moved: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TicketState {
    InFlight,
    Finished,
}

pub(super) struct Tables {
    pub(super) now: Instant,
    pub(super) limits: Limits,
    pub(super) regions: Table<RegionEntry>,
    pub(super) exposures: Table<Exposure>,
    pub(super) links: Table<LinkEntry>,
    pub(super) remotes: Table<RemoteEntry>,
    pub(super) tickets: Table<TicketEntry>,
    pub(super) header: Arc<HeaderPage>,
    pub(super) events: VecDeque<FabricEvent>,
    pub(super) move_pool: Vec<Vec<PostedMove>>,
    pub(super) exception_pool: Vec<Vec<Exception>>,
    /// Doomed regions that have just become free.
    pub(super) releasable: Vec<RegionId>,
    /// No deadline or stall is due before.
    pub(super) check_at: Instant,
    pub(super) stats: Stats,
}

fn table<T>(len: u32) -> Table<T> {
    Slab::new((0..len).map(|_| Slot::EMPTY).collect())
}

impl Tables {
    pub(super) fn new(limits: Limits, header: Arc<HeaderPage>) -> Self {
        Self {
            now: Instant::ZERO,
            limits,
            regions: table(limits.regions_max),
            exposures: table(limits.exposures_max),
            links: table(limits.links_max),
            remotes: table(limits.remotes_max),
            tickets: table(limits.tickets_max),
            header,
            events: VecDeque::with_capacity(limits.tickets_max as usize),
            move_pool: Vec::with_capacity(POOL_MAX),
            exception_pool: Vec::with_capacity(POOL_MAX),
            releasable: Vec::new(),
            check_at: Instant::NEVER,
            stats: Stats::default(),
        }
    }

    /// Ends an exposure: from now on nobody resolves it, and readers of shared memory see that it ended.
    pub(super) fn close_exposure(&mut self, id: RegionId) -> Option<Exposure> {
        let exposure = self.exposures.remove(id)?;
        self.header.set(id.slot, 0);
        if let Some(region) = self.regions.get_mut(exposure.memory)
            && region.exposure == Some(id)
        {
            region.exposure = None;
        }
        Some(exposure)
    }

    pub(super) fn recycle_moves(&mut self, mut moves: Vec<PostedMove>) {
        if self.move_pool.len() < POOL_MAX {
            moves.clear();
            self.move_pool.push(moves);
        }
    }

    /// Takes a finished or orphaned ticket out of the table.
    pub(super) fn remove_ticket(&mut self, id: TicketId) -> Option<TicketEntry> {
        self.tickets.remove(id.handle())
    }

    pub(super) fn recycle_exceptions(&mut self, mut exceptions: Vec<Exception>) {
        if exceptions.capacity() > 0 && self.exception_pool.len() < POOL_MAX {
            exceptions.clear();
            self.exception_pool.push(exceptions);
        }
    }

    /// Marks what a batch names as in flight, or as no longer so.
    pub(super) fn count_in_flight(&mut self, batch: &Batch, change: Change) {
        for request in batch.requests() {
            if let Some(remote) = self.remotes.get_mut(request.remote().region) {
                change.apply(&mut remote.in_flight);
            }
            let Some(raw) = request.local_raw() else { continue };
            let Some(region) = self.regions.get_mut(raw.region) else { continue };
            change.apply(&mut region.raw_in_flight);
            if region.doomed && region.raw_in_flight == 0 {
                self.releasable.push(raw.region);
            }
        }
        for region in [batch.arrival.map(|arrival| arrival.region), batch.sync].into_iter().flatten() {
            if let Some(remote) = self.remotes.get_mut(region) {
                change.apply(&mut remote.in_flight);
            }
        }
    }

    fn in_flight(&mut self, id: TicketId) -> Option<&mut TicketEntry> {
        let entry = self.tickets.get_mut(id.handle()).filter(|entry| entry.state == TicketState::InFlight);
        if entry.is_none() {
            self.stats.events_unknown += 1;
        }
        entry
    }

    fn progressed(&mut self, link: LinkId) {
        let now = self.now;
        if let Some(link) = self.links.get_mut(link.handle()) {
            link.progress_at = now;
        }
    }

    fn finish(&mut self, id: TicketId, outcome: Outcome, moves: Vec<PostedMove>) {
        self.recycle_moves(moves);
        let Some(entry) = self.in_flight(id) else { return };
        entry.state = TicketState::Finished;
        entry.outcomes.rest = outcome;
        let (link, orphaned) = (entry.link, entry.orphaned);
        let batch = core::mem::take(&mut entry.batch);
        self.count_in_flight(&batch, Change::Down);
        self.progressed(link);
        if let Some(link) = self.links.get_mut(link.handle()) {
            link.in_flight -= 1;
        }
        self.stats.batches_finished += 1;
        if orphaned {
            // Its leases end here and not before: the device has just said that they are quiet.
            drop(batch);
            if let Some(entry) = self.remove_ticket(id) {
                self.recycle_exceptions(entry.outcomes.exceptions);
            }
            return;
        }
        if let Some(entry) = self.tickets.get_mut(id.handle()) {
            entry.batch = batch;
        }
        self.events.push_back(FabricEvent::Finished(id));
    }

    fn ended(&mut self, id: TicketId, exception: Exception) {
        let spare = self.exception_pool.pop();
        let Some(entry) = self.in_flight(id) else { return };
        let (link, len) = (entry.link, entry.batch.len());
        let exceptions = &mut entry.outcomes.exceptions;
        if exceptions.capacity() == 0
            && let Some(spare) = spare
        {
            *exceptions = spare;
        }
        // A device names each move once at most; what goes beyond that is not worth memory.
        if exceptions.len() < len {
            exceptions.push(exception);
        } else {
            self.stats.events_unknown += 1;
        }
        self.progressed(link);
    }

    fn link_down(&mut self, link: LinkId, reason: LinkDownReason) {
        let Some(entry) = self.links.remove(link.handle()) else {
            self.stats.events_unknown += 1;
            return;
        };
        assert_eq!(entry.in_flight, 0, "a device finishes all tickets of a link before it reports it down");
        self.events.push_back(FabricEvent::LinkDown { link, reason });
    }

    /// The exposure, if the link may name it.
    fn proven(&self, link: LinkId, region: RegionId) -> Result<&Exposure, Refusal> {
        let exposure = self.exposures.get(region).ok_or(Refusal::Stale)?;
        let link = self.links.get(link.handle()).ok_or(Refusal::NotProven)?;
        if link.proven.get(region.slot as usize) == Some(&region.epoch) {
            Ok(exposure)
        } else {
            Err(Refusal::NotProven)
        }
    }

    /// The exposure, if the link may do that to that range of it.
    fn admitted(&self, link: LinkId, range: RemoteRange, access: Access) -> Result<&Exposure, Refusal> {
        let exposure = self.proven(link, range.region)?;
        if !exposure.rights.allows(access.right()) {
            return Err(Refusal::WrongRights);
        }
        let inside = range.offset.checked_add(range.len).is_some_and(|end| {
            let next = exposure.ranges.partition_point(|granted| granted.0 <= range.offset);
            next.checked_sub(1).is_some_and(|index| end <= exposure.ranges[index].1)
        });
        if inside { Ok(exposure) } else { Err(Refusal::OutOfBounds) }
    }

    fn refused<T>(&mut self, refusal: Refusal) -> Result<T, Refusal> {
        self.stats.refusals_given += 1;
        Err(refusal)
    }
}

#[derive(Clone, Copy)]
pub(super) enum Change {
    Up,
    Down,
}

impl Change {
    fn apply(self, count: &mut u32) {
        match self {
            Self::Up => *count += 1,
            Self::Down => *count -= 1,
        }
    }
}

// SAFETY:
// - `resolve` gives a pointer into a mapping that the exposure holds, for a range inside one of its ranges, which lie in the
//   mapping (`Fabric::grant`, `expose`). Exposures are closed only by calls on the fabric, never during a poll.
// - for writes nobody else is there: the exposure holds the exclusive leases (`Holding::Write`) of all its ranges, or the
//   region is raw.
// - what `lend` names is the same ranges of the same mapping: the exposure is closed by `Fabric::end_exposure` only, which has
//   every device revoke it first.
unsafe impl Inbound for Tables {
    fn prove(&mut self, link: LinkId, region: RegionId, capability: Capability) -> Result<Proven, Refusal> {
        let Some(exposure) = self.exposures.get(region) else { return self.refused(Refusal::Stale) };
        if !exposure.capability.matches(&capability) {
            return self.refused(Refusal::WrongCapability);
        }
        let range = <[(u64, u64); 1]>::try_from(exposure.ranges.as_slice()).ok().map(|[only]| only);
        let proven = Proven { memory: exposure.memory, rights: exposure.rights, range };
        let slot = region.slot as usize;
        let Some(link) = self.links.get_mut(link.handle()) else { return self.refused(Refusal::NotProven) };
        if link.proven.len() <= slot {
            // Bounded by the exposure table, since the region is in it.
            link.proven.resize(slot + 1, 0);
        }
        link.proven[slot] = region.epoch;
        Ok(proven)
    }

    fn resolve(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<NonNull<u8>, Refusal> {
        // Whatever the peer takes it for: a pointer is for the CPU, so memory of a device has none.
        let base = match self.admitted(link, range, access) {
            Ok(exposure) => {
                exposure.place.mapping().filter(|mapping| mapping.is_for_cpu()).map(|mapping| mapping.base())
            }
            Err(refusal) => return self.refused(refusal),
        };
        let Some(base) = base else { return self.refused(Refusal::NotShareable) };
        // In range of the mapping, whose length fits usize; so nothing wraps and the pointer is not null.
        let offset = range.offset as usize;
        // SAFETY: `offset` is at most the mapping's length: the range found by `admitted` is inside the mapping.
        Ok(unsafe { base.add(offset) })
    }

    fn lend(&mut self, link: LinkId, region: RegionId) -> Result<Lent, Refusal> {
        if let Err(refusal) = self.proven(link, region) {
            return self.refused(refusal);
        }
        let Some(exposure) = self.exposures.get_mut(region) else { return self.refused(Refusal::Stale) };
        exposure.lent = true;
        Ok(Lent { memory: exposure.memory, ranges: exposure.ranges.clone(), rights: exposure.rights })
    }

    fn admit(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<RegionId, Refusal> {
        let admitted = self.admitted(link, range, access).map(|exposure| exposure.memory);
        admitted.or_else(|refusal| self.refused(refusal))
    }

    fn arrive(&mut self, link: LinkId, arrival: PostedArrival) -> Result<(), Refusal> {
        let counters_max = self.limits.counters_per_grant_max as usize;
        match self.proven(link, arrival.region) {
            Ok(exposure) if exposure.rights.allows(Rights::REMOTE_WRITE) => {}
            Ok(_) => return self.refused(Refusal::WrongRights),
            Err(refusal) => return self.refused(refusal),
        }
        let Some(exposure) = self.exposures.get_mut(arrival.region) else { return self.refused(Refusal::Stale) };
        match exposure.counters.binary_search_by_key(&arrival.counter, |entry| entry.0) {
            Ok(index) => {
                let count = &mut exposure.counters[index].1;
                *count = count.saturating_add(arrival.amount);
            }
            Err(_) if exposure.counters.len() >= counters_max => return self.refused(Refusal::CountersFull),
            Err(index) => exposure.counters.insert(index, (arrival.counter, arrival.amount)),
        }
        if !exposure.announced {
            exposure.announced = true;
            self.events.push_back(FabricEvent::Arrived(arrival.region));
        }
        Ok(())
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Progress { ticket, bytes } => {
                if let Some(entry) = self.in_flight(ticket) {
                    entry.bytes_moved = entry.bytes_moved.saturating_add(bytes);
                    let link = entry.link;
                    self.progressed(link);
                }
            }
            Event::Ended { ticket, first, count, outcome } => self.ended(ticket, Exception { first, count, outcome }),
            Event::Finished { ticket, outcome, moves } => self.finish(ticket, outcome, moves),
            Event::LinkDown { link, reason } => self.link_down(link, reason),
        }
    }
}
