//! Turns: polling devices, deadlines, waiting, and the end.

use millpond_core::time::{Duration, Instant};
use rustix::event::epoll;

use super::table::{Tables, TicketState};
use super::{Fabric, FabricWake};
use crate::contract::{LinkDownReason, LinkId, TURN_BYTES_MAX, TicketId, Turn, Wake};

impl Fabric {
    /// One turn of every device: serves peers, moves at most [`TURN_BYTES_MAX`] bytes each by CPU, ends what is overdue.
    /// `Worked` means: poll again before waiting.
    pub fn poll(&mut self, now: Instant) -> Turn {
        if self.mark.is_in_child() {
            return Turn::Idle;
        }
        let now = self.awake(now);
        self.tables.now = now;
        self.reap();
        let mut turn = Turn::Idle;
        for device in &mut self.devices {
            if device.poll(now, TURN_BYTES_MAX, &mut self.tables) == Turn::Worked {
                turn = Turn::Worked;
            }
        }
        // Bounded by the region table.
        while let Some(region) = self.tables.releasable.pop() {
            self.forget_region(region);
        }
        if now >= self.tables.check_at {
            self.check_overdue(now);
            turn = Turn::Worked;
        }
        turn
    }

    /// When to poll next. Nothing that happened before this call is missed.
    pub fn arm(&mut self, now: Instant) -> FabricWake {
        if self.mark.is_in_child() {
            return FabricWake::Within(None);
        }
        let now = self.awake(now);
        if self.shared.is_pending() || !self.tables.events.is_empty() || now >= self.tables.check_at {
            return FabricWake::Now;
        }
        let mut within = (self.tables.check_at < Instant::NEVER).then(|| self.tables.check_at.since(now));
        let sooner =
            |within: &mut Option<Duration>, next: Duration| *within = Some(within.map_or(next, |old| old.min(next)));
        for (index, device) in self.devices.iter_mut().enumerate() {
            match device.arm(now) {
                Wake::Now => return FabricWake::Now,
                Wake::Idle => {}
                Wake::After(next) => sooner(&mut within, next),
                Wake::Readable { fd, within: next } => {
                    if !self.watched[index] {
                        let data = epoll::EventData::new_u64(index as u64);
                        if epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN).is_err() {
                            // Without a place in the set the device is polled by time instead.
                            sooner(&mut within, Duration::from_millis(1));
                            continue;
                        }
                        self.watched[index] = true;
                    }
                    if let Some(next) = next {
                        sooner(&mut within, next);
                    }
                }
            }
        }
        FabricWake::Within(within)
    }

    /// Cancels tickets past their deadline, closes links that stall or do not answer a cancel, and finds the next check.
    fn check_overdue(&mut self, now: Instant) {
        let mut next = Instant::NEVER;
        let mut overdue: Vec<(TicketId, LinkId, bool)> = Vec::new();
        for (id, entry) in self.tables.tickets.iter() {
            if entry.state != TicketState::InFlight {
                continue;
            }
            if entry.deadline <= now {
                overdue.push((TicketId::new(id), entry.link, entry.cancelled));
            } else {
                next = next.min(entry.deadline);
            }
        }
        self.tables.check_at = next;
        for (ticket, link, cancelled) in overdue {
            if cancelled {
                self.close_link_for(link, LinkDownReason::Stalled);
            } else {
                self.cancel_by_id(now, ticket);
            }
        }
        let mut stalled: Vec<LinkId> = Vec::new();
        for (id, link) in self.tables.links.iter() {
            if link.in_flight == 0 || link.closing {
                continue;
            }
            let due = link.progress_at + link.progress_deadline;
            if due <= now {
                stalled.push(LinkId::new(id));
            } else {
                next = next.min(due);
            }
        }
        for link in stalled {
            self.tables.stats.links_stalled += 1;
            self.close_link_for(link, LinkDownReason::Stalled);
        }
        self.tables.check_at = self.tables.check_at.min(next);
    }

    /// Asks the device to end a ticket, and gives it the link's progress deadline to do so.
    pub(super) fn cancel_by_id(&mut self, now: Instant, ticket: TicketId) {
        let tables = &mut self.tables;
        let Some(entry) = tables.tickets.get_mut(ticket.handle()) else { return };
        if entry.state != TicketState::InFlight || entry.cancelled {
            return;
        }
        let Some(link) = tables.links.get(entry.link.handle()) else { return };
        entry.cancelled = true;
        entry.deadline = now + link.progress_deadline;
        tables.check_at = tables.check_at.min(entry.deadline);
        self.devices[link.device].cancel(now, ticket);
    }

    /// Nobody waits for the ticket any more.
    pub(super) fn orphan(&mut self, ticket: TicketId) {
        let Some(entry) = self.tables.tickets.get_mut(ticket.handle()) else { return };
        entry.orphaned = true;
        if entry.state == TicketState::Finished
            && let Some(entry) = self.tables.remove_ticket(ticket)
        {
            self.tables.recycle_exceptions(entry.outcomes.exceptions);
        }
    }
}

impl Drop for Fabric {
    /// Closes every link and gives each device one turn; what is not quiet then is leaked, never freed. In a forked child
    /// everything is: links and memory are the parent's.
    fn drop(&mut self) {
        if self.mark.is_in_child() {
            core::mem::forget(core::mem::take(&mut self.devices));
            return self.tables.leak_in_flight();
        }
        let links: Vec<LinkId> = self.tables.links.iter().map(|(id, _)| LinkId::new(id)).collect();
        for link in links {
            self.close_link(link);
        }
        for device in &mut self.devices {
            device.poll(self.tables.now, 0, &mut self.tables);
        }
        self.tables.leak_in_flight();
        let exposures: Vec<_> = self.tables.exposures.iter().map(|(id, _)| id).collect();
        for exposure in exposures {
            self.end_exposure(exposure);
        }
    }
}

impl Tables {
    fn leak_in_flight(&mut self) {
        let in_flight: Vec<TicketId> = self
            .tickets
            .iter()
            .filter(|(_, entry)| entry.state == TicketState::InFlight)
            .map(|(id, _)| TicketId::new(id))
            .collect();
        for ticket in in_flight {
            let Some(entry) = self.remove_ticket(ticket) else { continue };
            for raw in entry.batch.requests().iter().filter_map(super::Request::local_raw) {
                if let Some(mapping) = self.regions.get(raw.region).and_then(|region| region.place.mapping()) {
                    core::mem::forget(std::sync::Arc::clone(mapping));
                }
            }
            core::mem::forget(entry.batch);
        }
    }
}
