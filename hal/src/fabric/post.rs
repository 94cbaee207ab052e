//! Posting: every request is checked here, once for all devices.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::sync::Arc;

use millpond_core::batch::{Extent, RegionId, RegionToken};
use millpond_core::time::Instant;

use super::Fabric;
use super::batch::{Batch, NotStarted, Outcomes, PostError, Request, Ticket};
use super::table::{Change, TicketEntry, TicketState};
use crate::contract::{FarEnd, LinkId, Outcome, Post, PostedArrival, PostedMove, RemoteRange, TicketId};
use crate::mapping::Mapping;

/// How a batch is posted.
///
/// ```
/// use millpond_core::time::Instant;
/// use millpond_hal::fabric::PostOptions;
/// assert_eq!(PostOptions::default().deadline, Instant::NEVER);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PostOptions {
    /// The batch is cancelled when it has not ended by then.
    pub deadline: Instant,
    /// Which attempt at the same work this is.
    pub attempt: u32,
}

impl Default for PostOptions {
    fn default() -> Self {
        Self { deadline: Instant::NEVER, attempt: 0 }
    }
}

impl PostOptions {
    /// With a deadline.
    #[must_use]
    pub fn until(deadline: Instant) -> Self {
        Self { deadline, ..Self::default() }
    }

    /// With the number of this attempt.
    #[must_use]
    pub fn with_attempt(self, attempt: u32) -> Self {
        Self { attempt, ..self }
    }
}

impl Fabric {
    /// Starts a batch on a link. Its memory is lent to the device until the ticket ended; also when the ticket is dropped.
    /// An `Err` started nothing and gives the batch back. O(requests), no allocation in steady state.
    #[allow(clippy::result_large_err)] // the batch comes back by design
    pub fn post(
        &mut self,
        now: Instant,
        link: LinkId,
        batch: Batch,
        options: PostOptions,
    ) -> Result<Ticket, NotStarted> {
        if self.mark.is_in_child() {
            return Err(NotStarted { batch, reason: PostError::Forked });
        }
        let (now, deadline) = (self.awake(now), self.awake(options.deadline));
        self.reap();
        let mut moves = self.tables.move_pool.pop().unwrap_or_default();
        let checked = self.check(link, &batch, &mut moves);
        let (device, arrival, sync) = match checked {
            Ok(checked) => checked,
            Err(reason) => {
                self.tables.recycle_moves(moves);
                return Err(NotStarted { batch, reason });
            }
        };
        let (count, bytes) = (batch.len() as u64, batch.bytes());
        let unknown = Outcome::cancelled(FarEnd::Unknown);
        let entry = TicketEntry {
            link,
            batch,
            state: TicketState::InFlight,
            orphaned: false,
            outcomes: Outcomes { rest: unknown, exceptions: Vec::new() },
            deadline,
            cancelled: false,
            bytes_moved: 0,
        };
        let ticket = match self.tables.tickets.insert(entry) {
            Ok(handle) => TicketId::new(handle),
            Err(full) => {
                self.tables.recycle_moves(moves);
                let tickets_max = self.tables.tickets.capacity();
                return Err(NotStarted { batch: full.0.batch, reason: PostError::TicketsFull { tickets_max } });
            }
        };
        let after = self.tables.tickets.get_mut(ticket.handle()).and_then(|entry| entry.batch.after.take());
        let post = Post { ticket, link, attempt: options.attempt, moves, arrival, sync, after };
        // SAFETY:
        // - valid: each range was checked against its mapping in `check`; the leases that keep it are in the ticket's entry
        //   since `insert` above, raw regions by their in-flight count below; both end with `finish` only.
        // - nobody else touches it: the entry holds the exclusive leases; frozen bytes are only read.
        if let Err(refused) = unsafe { self.devices[device].post(now, post) } {
            self.tables.recycle_moves(refused.post.moves);
            let mut entry = self.tables.remove_ticket(ticket).expect("inserted above");
            entry.batch.after = refused.post.after;
            return Err(NotStarted { batch: entry.batch, reason: refused.reason.into() });
        }
        self.posted(now, link, ticket, deadline);
        self.tables.stats.moves_posted += count;
        self.tables.stats.bytes_posted += bytes;
        Ok(Ticket::new(ticket, Arc::clone(&self.shared)))
    }

    /// Makes one read at once, on this thread, if its link can do that without its peer. False: it has to be posted, for
    /// whatever reason, a wrong request included; what it was to fill may have been written to.
    pub fn read_at_once(&mut self, link: LinkId, request: &Request) -> bool {
        let entry = self.tables.links.get(link.handle()).filter(|entry| !entry.closing);
        let Some(device) = entry.map(|entry| entry.device).filter(|_| !self.mark.is_in_child()) else { return false };
        let Ok(posted) = self.check_request(link, device, 0, request) else { return false };
        // SAFETY:
        // - valid: the range was checked against its mapping in `check_request`, and the request keeps that meanwhile.
        // - nobody else touches it: the request holds the exclusive lease, or the region is raw.
        let is_done = unsafe { self.devices[device].read_at_once(link, &posted) };
        if is_done {
            self.tables.stats.moves_posted += 1;
            self.tables.stats.bytes_posted += posted.remote.len;
        }
        is_done
    }

    fn posted(&mut self, now: Instant, link: LinkId, ticket: TicketId, deadline: Instant) {
        let tables = &mut self.tables;
        let batch =
            tables.tickets.get_mut(ticket.handle()).map(|entry| core::mem::take(&mut entry.batch)).unwrap_or_default();
        tables.count_in_flight(&batch, Change::Up);
        if let Some(entry) = tables.tickets.get_mut(ticket.handle()) {
            entry.batch = batch;
        }
        tables.stats.batches_posted += 1;
        let mut check_at = deadline;
        if let Some(link) = tables.links.get_mut(link.handle()) {
            if link.in_flight == 0 {
                link.progress_at = now;
            }
            link.in_flight += 1;
            check_at = check_at.min(now + link.progress_deadline);
        }
        tables.check_at = tables.check_at.min(check_at);
    }

    /// Fills `moves` with the checked requests and says which device takes them.
    fn check(
        &mut self,
        link: LinkId,
        batch: &Batch,
        moves: &mut Vec<PostedMove>,
    ) -> Result<(usize, Option<PostedArrival>, Option<RemoteRange>), PostError> {
        let entry = self.tables.links.get(link.handle()).filter(|entry| !entry.closing).ok_or(PostError::LinkClosed)?;
        let device = entry.device;
        let limits = self.devices[device].limits();
        if batch.len() as u64 > u64::from(limits.moves_max) || batch.bytes() > limits.bytes_max {
            return Err(PostError::TooLarge { moves_max: limits.moves_max, bytes_max: limits.bytes_max });
        }
        if batch.after.is_some() && !self.devices[device].waits_for_fences() {
            return Err(PostError::NotOrdered);
        }
        moves.reserve(batch.len());
        for (index, request) in batch.requests().iter().enumerate() {
            moves.push(self.check_request(link, device, index, request)?);
        }
        let sync = batch.sync.map(|region| self.check_sync(link, device, region)).transpose()?;
        let Some(arrival) = batch.arrival else { return Ok((device, None, sync)) };
        let token =
            self.tables.remotes.get(arrival.region).map(|entry| entry.token).ok_or(PostError::UnknownArrivalRegion)?;
        self.attach_on(link, device, arrival.region, &token).ok_or(PostError::UnknownArrivalRegion)?;
        let posted = PostedArrival { region: token.region, counter: arrival.counter, amount: arrival.amount };
        Ok((device, Some(posted), sync))
    }

    fn check_sync(&mut self, link: LinkId, device: usize, region: RegionId) -> Result<RemoteRange, PostError> {
        let token = self.tables.remotes.get(region).map(|entry| entry.token).ok_or(PostError::UnknownSyncRegion)?;
        if !token.kind().is_some_and(|kind| self.devices[device].syncs(kind)) {
            return Err(PostError::NotDurable);
        }
        self.attach_on(link, device, region, &token).ok_or(PostError::UnknownSyncRegion)?;
        Ok(RemoteRange { region: token.region, offset: token.offset, len: 0 })
    }

    fn check_request(
        &mut self,
        link: LinkId,
        device: usize,
        index: usize,
        request: &Request,
    ) -> Result<PostedMove, PostError> {
        let (remote, access, len) = (request.remote(), request.access(), request.len());
        if remote.len != len {
            return Err(PostError::LengthsDiffer { index, local_len: len, remote_len: remote.len });
        }
        let (local, local_extent) = self.local(index, request)?;
        let region =
            self.tables.regions.get(local_extent.region).ok_or(PostError::UnknownRegion { index, side: "local" })?;
        let (local_kind, registered) = (region.kind, region.devices & 1 << device != 0);
        let attached =
            self.tables.remotes.get(remote.region).ok_or(PostError::UnknownRegion { index, side: "remote" })?;
        let token = attached.token;
        if !token.admits(remote.offset, len) {
            return Err(PostError::OutOfBounds { index, side: "remote" });
        }
        if !token.rights.allows(access.right()) {
            return Err(PostError::NoRight { index, access });
        }
        let reachable = token.kind().is_some_and(|kind| self.devices[device].moves(local_kind, kind));
        let attached = reachable && registered && self.attach_on(link, device, remote.region, &token).is_some();
        if !attached {
            return Err(PostError::NotReachable { index });
        }
        Ok(PostedMove {
            local,
            local_region: local_extent.region,
            local_offset: local_extent.offset,
            remote: RemoteRange { region: token.region, offset: remote.offset, len },
            access,
        })
    }

    /// Where the local bytes of a request are.
    fn local(&self, index: usize, request: &Request) -> Result<(NonNull<u8>, Extent), PostError> {
        let unknown = PostError::UnknownRegion { index, side: "local" };
        let (region, extent) = match request {
            Request::Write { source, .. } => {
                (source.region(), source.region().extent(source.offset(), source.len() as u64))
            }
            Request::Read { target, .. } => {
                (target.region(), target.region().extent(target.offset(), target.len() as u64))
            }
            Request::WriteRaw { .. } | Request::ReadRaw { .. } => {
                let extent = request.local_raw().ok_or(unknown)?;
                let entry = self.tables.regions.get(extent.region).filter(|entry| !entry.doomed).ok_or(unknown)?;
                if !matches!(entry.mode, crate::region::Mode::Raw(_)) {
                    return Err(unknown);
                }
                let mapping = entry.place.mapping().ok_or(unknown)?;
                if extent.end().is_none_or(|end| end > mapping.len()) {
                    return Err(PostError::OutOfBounds { index, side: "local" });
                }
                return Ok((address(mapping, extent.offset), extent));
            }
        };
        self.known_region(region).ok_or(unknown)?;
        Ok((address(region.mapping(), extent.offset), extent))
    }

    /// Makes sure that the device knows the peer's region on that link.
    fn attach_on(&mut self, link: LinkId, device: usize, region: RegionId, token: &RegionToken) -> Option<()> {
        let tables = &mut self.tables;
        let entry = tables.remotes.get_mut(region)?;
        if !entry.links.contains(&link) {
            self.devices[device].attach(link, token).ok()?;
            // Links that are gone make room, so the list is bounded by the live links.
            entry.links.retain(|known| tables.links.get(known.handle()).is_some());
            entry.links.push(link);
        }
        Some(())
    }
}

/// The address of a byte of a mapping, `offset` at most its length.
fn address(mapping: &Mapping, offset: u64) -> NonNull<u8> {
    debug_assert!(offset <= mapping.len());
    // SAFETY: leases and the check of raw extents keep `offset` inside the mapping, whose length fits usize.
    unsafe { mapping.base().add(offset as usize) }
}
