//! How things end in a shard: turns, completions, lost links, deadlines.
//!
//! Second half of `shard`, which posts; nothing here does. A part that failed with its link is tried again on the lane's
//! next generation, unless its transfer is ending anyway or an arrival might be counted twice.

use millpond_core::quiet::Far;
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
use millpond_hal::contract::{End, FarEnd, LinkDownReason, LinkId, Outcome as HalOutcome, Refusal, TicketId, Turn};
use millpond_hal::fabric::{Completion, FabricEvent};

use super::batch::Via;
use super::options::Options;
use super::peers::Place;
use super::shard::{ATTEMPTS_MAX, CANCEL_GRACE, SPARES_MAX, Shard, quarter};
use super::statistics::{EXPLAIN_MAX, Explanation};
use super::transfer::{Cause, Failure, RefusalReason, Status};
use super::work::{Enforced, Local, Part, Work};

fn far(end: FarEnd) -> Far {
    match end {
        FarEnd::Done => Far::Done,
        FarEnd::Untouched => Far::Untouched,
        FarEnd::Unknown => Far::Unknown,
    }
}

fn reason(refusal: Refusal) -> RefusalReason {
    match refusal {
        Refusal::Stale => RefusalReason::Stale,
        Refusal::OutOfBounds => RefusalReason::OutOfBounds,
        Refusal::Busy | Refusal::CountersFull => RefusalReason::Busy,
        _ => RefusalReason::NotAllowed,
    }
}

fn failure(outcome: HalOutcome) -> Failure {
    let cause = match outcome.end {
        End::Refused(refusal) => Cause::Refused { reason: reason(refusal) },
        End::LinkDown(LinkDownReason::Stalled) => Cause::NoProgress,
        End::LinkDown(_) => Cause::LinkLost,
        _ => Cause::Cancelled,
    };
    Failure { cause, far: far(outcome.far_end) }
}

impl Shard {
    /// One turn of everything. Whether anything was done.
    pub(super) fn turn(&mut self, options: &Options, now: Instant) -> bool {
        let mut worked = self.fabric.poll(now) == Turn::Worked;
        // Bounded by what one turn of the devices reports.
        while let Some(event) = self.fabric.next_event() {
            worked = true;
            match event {
                FabricEvent::Finished(ticket) => self.on_finished(ticket, options, now),
                FabricEvent::Arrived(grant) => self.on_arrived(grant),
                FabricEvent::LinkDown { link, reason } => self.on_link_down(link, reason, options, now),
                _ => {}
            }
        }
        if now >= self.next_tick {
            self.tick(options, now);
        }
        worked
    }

    fn on_arrived(&mut self, grant: Handle) {
        if let Some(arrivals) = self.arrivals.get(&grant) {
            arrivals.on_change(|counter| self.fabric.arrived(grant, counter));
        }
    }

    fn on_finished(&mut self, ticket: TicketId, options: &Options, now: Instant) {
        let found = self.tickets.get_mut(ticket.handle().slot as usize).and_then(Option::take);
        let Some((_, key)) = found.filter(|(id, _)| *id == ticket) else { return };
        let Some(part) = self.parts.get_mut(key) else { return };
        let Some(posted) = part.posted.take() else { return };
        let (peer, bytes) = (part.peer, part.bytes);
        let mut lane_of = None;
        if let Some(peer) = self.peers.get_mut(peer)
            && let Some(lane) = peer.lane_mut(posted.link)
        {
            lane.posted_bytes = lane.posted_bytes.saturating_sub(bytes);
            lane.posts = lane.posts.saturating_sub(1);
            lane.is_full = false;
            lane_of = Some((lane.side, lane.index));
        }
        let completion = match self.fabric.take(posted.ticket) {
            Ok(completion) => completion,
            Err(_) => return,
        };
        if completion.is_done() && completion.overall().is_done() {
            self.on_part_done(key, completion, now);
        } else {
            let in_doubt = self.on_part_failed(key, completion, now);
            if let (Some(lane), true, Some(peer)) = (lane_of, in_doubt, self.peers.get_mut(peer)) {
                peer.doubt(lane);
            }
        }
        self.pump(peer, options, now);
    }

    fn on_part_done(&mut self, key: Handle, completion: Completion, now: Instant) {
        let Some(mut part) = self.remove_part(key) else { return };
        let mut batch = completion.into_batch();
        if let Some(work) = self.works.get_mut(part.work) {
            work.last_progress = now;
            for (mut piece, request) in part.pieces.drain(..).zip(batch.drain()) {
                piece.give_back(request);
                let moved = if matches!(piece.local, Some(Local::Target(_) | Local::RawTarget(_))) {
                    &mut self.statistics.bytes_read
                } else {
                    &mut self.statistics.bytes_written
                };
                *moved += piece.len;
                work.on_piece_done(piece);
            }
        }
        batch.clear();
        if self.spare_batches.len() < SPARES_MAX {
            self.spare_batches.push(batch);
        }
        self.end_part(part, now);
    }

    /// Sorts what a part came to: done, to be tried again, failed. Whether frames of it may still be applied over there.
    fn on_part_failed(&mut self, key: Handle, completion: Completion, now: Instant) -> bool {
        let Some(mut part) = self.remove_part(key) else { return false };
        self.outcomes.clear();
        self.outcomes.extend((0..part.pieces.len()).map(|index| completion.outcome(index)));
        let overall = completion.overall();
        let mut batch = completion.into_batch();
        let Some(work) = self.works.get_mut(part.work) else { return false };
        work.last_progress = now;
        let is_lost =
            |outcome: &HalOutcome| matches!(outcome.end, End::LinkDown(reason) if reason != LinkDownReason::Stalled);
        let is_unknown = |outcome: &HalOutcome| outcome.far_end == FarEnd::Unknown;
        let is_link_end = |outcome: &HalOutcome| matches!(outcome.end, End::LinkDown(_));
        let unknown = self.outcomes.iter().any(is_unknown) || (part.pieces.is_empty() && is_unknown(&overall));
        let in_doubt = (part.has_writes || part.arrival.is_some())
            && unknown
            && (self.outcomes.iter().any(is_link_end) || is_link_end(&overall));
        // An arrival that may have been counted is not announced twice.
        let may_retry = work.end.is_none() && part.attempts < ATTEMPTS_MAX && !(part.arrival.is_some() && unknown);
        let mut kept = self.spare_pieces.pop().unwrap_or_default();
        for ((mut piece, request), outcome) in part.pieces.drain(..).zip(batch.drain()).zip(&self.outcomes) {
            piece.give_back(request);
            match outcome {
                done if done.is_done() => work.on_piece_done(piece),
                lost if is_lost(lost) && may_retry => kept.push(piece),
                other => {
                    let found = failure(*other);
                    let cause = match (found.cause, &work.end) {
                        (Cause::Cancelled | Cause::LinkLost | Cause::NoProgress, Some(end)) => end.clone(),
                        (cause, _) => cause,
                    };
                    work.on_piece_failed(piece, Failure { cause, ..found });
                }
            }
        }
        batch.clear();
        self.spare_batches.push(batch);
        let retry_arrival = part.pieces.is_empty() && part.arrival.is_some() && is_lost(&overall) && may_retry;
        if kept.is_empty() && !retry_arrival {
            self.spare_pieces.push(kept);
            if part.arrival.is_some() && !part.has_writes && !overall.is_done() {
                work.fail_arrival(failure(overall));
            }
            self.end_part(part, now);
            return in_doubt;
        }
        work.retries += 1;
        self.statistics.retries += 1;
        let mut again = Part { pieces: std::mem::take(&mut part.pieces), posted: None, ..part };
        again.bytes = 0;
        std::mem::swap(&mut again.pieces, &mut kept);
        again.bytes = again.pieces.iter().map(|piece| piece.len).sum();
        self.enqueue(again, Place::Front);
        in_doubt
    }

    /// Ends a part that is queued, with all its pieces.
    pub(super) fn fail_part(&mut self, key: Handle, failure: &Failure, now: Instant) {
        let Some(mut part) = self.remove_part(key) else { return };
        if let Some(work) = self.works.get_mut(part.work) {
            let was_posted = part.attempts > 0 && part.has_writes;
            let far = if was_posted { Far::Unknown } else { failure.far };
            for piece in part.pieces.drain(..) {
                work.on_piece_failed(piece, Failure { far, ..failure.clone() });
            }
            if part.arrival.is_some() && !part.has_writes {
                work.fail_arrival(Failure { far, ..failure.clone() });
            }
        }
        self.end_part(part, now);
    }

    fn remove_part(&mut self, key: Handle) -> Option<Part> {
        let part = self.parts.remove(key)?;
        if let Some(peer) = self.peers.get_mut(part.peer) {
            peer.open_bytes = peer.open_bytes.saturating_sub(part.bytes);
        }
        Some(part)
    }

    /// A part is over, its pieces are accounted for.
    fn end_part(&mut self, mut part: Part, now: Instant) {
        part.pieces.clear();
        if self.spare_pieces.len() < SPARES_MAX {
            self.spare_pieces.push(part.pieces);
        }
        let key = part.work;
        let Some(work) = self.works.get_mut(key) else { return };
        work.parts -= 1;
        if work.parts > 0 {
            return;
        }
        if let Some(arrival) = work.arrival.take()
            && !work.has_failed()
            && work.end.is_none()
            && !work.written.is_empty()
        {
            // All writes are visible; now each grant written is told so, by a part without pieces.
            let written = std::mem::take(&mut work.written);
            work.parts = u32::try_from(written.len()).unwrap_or(u32::MAX);
            let settings = work.settings;
            let peers: Vec<(u32, Handle)> =
                written.iter().map(|remote| (*remote, work.remotes[*remote as usize].peer().inner.key)).collect();
            for (remote, peer) in peers {
                let mut part = Part::new(key, peer, Vec::new(), &settings);
                part.arrival = Some((remote, arrival));
                self.enqueue(part, Place::Front);
            }
            self.next_tick = now; // the tick pumps every peer
            return;
        }
        if let Some(work) = self.works.remove(key) {
            self.end_work(work, now);
        }
    }

    fn end_work(&mut self, work: Work, now: Instant) {
        let (asked, class) = (work.settings.via, work.settings.class);
        let (shared, report) = work.into_report(now);
        let failed = report.outcomes.iter().find(|outcome| outcome.status != Status::Done);
        let status = failed.map_or(Status::Done, |outcome| outcome.status.clone());
        let statistics = &mut self.statistics;
        statistics.requests += u64::try_from(report.outcomes.len()).unwrap_or(u64::MAX);
        *(if status == Status::Done { &mut statistics.transfers_done } else { &mut statistics.transfers_failed }) += 1;
        if self.explained.len() == EXPLAIN_MAX {
            self.explained.pop_front();
        }
        let why = match (asked, report.via) {
            (_, None) => "no lane was there",
            (Via::Auto, Some(Via::Local)) => "the peer is this engine",
            (Via::Auto, Some(Via::Shm)) => "both run on this host",
            (Via::Auto, _) => "the best lane that was open",
            _ => "the caller named it",
        };
        self.explained.push_back(Explanation {
            id: report.id,
            requests: u32::try_from(report.outcomes.len()).unwrap_or(u32::MAX),
            bytes: report.outcomes.iter().map(|outcome| outcome.bytes).sum(),
            class,
            asked,
            used: report.via,
            why,
            retries: report.retries,
            elapsed: Some(report.elapsed),
            status,
        });
        shared.complete(report);
    }

    fn on_link_down(&mut self, link: LinkId, reason: LinkDownReason, options: &Options, now: Instant) {
        let Some(key) = self.links.remove(&link) else { return };
        self.statistics.lanes_lost += 1;
        self.statistics.lanes_open = self.statistics.lanes_open.saturating_sub(1);
        let Some(peer) = self.peers.get_mut(key) else { return };
        let Some(lane) = peer.on_lane_down(link) else { return };
        tracing::debug!(via = %lane.via, %reason, "a lane ended");
        // Somebody holds the peer: have the lane back before it is needed. The other end may only be able to wait for us.
        let is_held = std::sync::Arc::strong_count(&peer.inner) > 1;
        let is_ours = lane.side == millpond_hal::contract::LaneSide::Dialed;
        if is_held && is_ours && !peer.is_gone && reason != LinkDownReason::Closed {
            peer.want_index(lane.index, now, &mut self.wanted);
        }
        self.pump(key, options, now);
    }

    /// Looks at every transfer: cancelled, late, stuck? And at every peer: may something be dialled or posted again?
    pub(super) fn tick(&mut self, options: &Options, now: Instant) {
        self.next_tick = Instant::NEVER;
        self.note_progress(now);
        let works: Vec<Handle> = self.works.iter().map(|(key, _)| key).collect();
        for key in works {
            self.tick_work(key, now);
        }
        let peers: Vec<Handle> = self.peers.iter().map(|(key, _)| key).collect();
        for key in peers {
            let Some(peer) = self.peers.get_mut(key) else { continue };
            peer.lanes.iter_mut().for_each(|lane| lane.is_full = false);
            if peer.queued > 0 {
                self.pump(key, options, now);
            }
            if let Some(peer) = self.peers.get(key) {
                let is_busy = peer.queued > 0 || std::sync::Arc::strong_count(&peer.inner) > 1;
                self.next_tick = self.next_tick.min(if is_busy { peer.next_dial(now) } else { Instant::NEVER });
            }
        }
    }

    fn note_progress(&mut self, now: Instant) {
        for (_, part) in self.parts.iter_mut() {
            let Some(posted) = &mut part.posted else { continue };
            let moved = self.fabric.bytes_moved(&posted.ticket);
            if moved > posted.moved {
                posted.moved = moved;
                if let Some(work) = self.works.get_mut(part.work) {
                    work.last_progress = now;
                }
            }
        }
    }

    fn tick_work(&mut self, key: Handle, now: Instant) {
        let Some(work) = self.works.get_mut(key) else { return };
        let stuck_at = work.last_progress + work.progress_deadline;
        let cause = if work.shared.is_cancelled() {
            Some(Cause::Cancelled)
        } else if work.deadline <= now {
            Some(Cause::Deadline)
        } else {
            (stuck_at <= now).then_some(Cause::NoProgress)
        };
        if work.end.is_none() {
            work.end = cause;
        }
        let Some(end) = work.end.clone() else {
            let look_at = now + quarter(work.progress_deadline).min(stuck_at.since(now));
            self.next_tick = self.next_tick.min(work.deadline).min(look_at);
            return;
        };
        let step = match work.enforced {
            Enforced::No => Enforced::Cancelled(now),
            Enforced::Cancelled(since) if now.since(since) >= CANCEL_GRACE => Enforced::Closed,
            other => other,
        };
        let changed = step != std::mem::replace(&mut work.enforced, step);
        if let Enforced::Cancelled(since) = step {
            self.next_tick = self.next_tick.min(since + CANCEL_GRACE);
        }
        if changed {
            self.enforce(key, step, &end, now);
        }
    }

    fn enforce(&mut self, key: Handle, step: Enforced, end: &Cause, now: Instant) {
        let own = self.parts.iter().filter(|(_, part)| part.work == key);
        let parts: Vec<(Handle, Option<LinkId>)> =
            own.map(|(part, entry)| (part, entry.posted.as_ref().map(|posted| posted.link))).collect();
        for (part, link) in parts {
            match (link, step) {
                (Some(link), Enforced::Closed) => {
                    self.fabric.close_link_for(link, LinkDownReason::Stalled);
                }
                (Some(_), _) => {
                    if let Some(posted) = self.parts.get(part).and_then(|part| part.posted.as_ref()) {
                        self.fabric.cancel(now, &posted.ticket);
                    }
                }
                (None, _) => {
                    if let Some(entry) = self.parts.get(part)
                        && let (of, Some(peer)) = ((entry.class, entry.via), self.peers.get_mut(entry.peer))
                    {
                        peer.unqueue(part, of);
                    }
                    self.fail_part(part, &Failure { cause: end.clone(), far: Far::Untouched }, now);
                }
            }
        }
    }

    /// Ends everything: no part is tried again.
    pub(super) fn shut_down(&mut self, options: &Options, now: Instant) {
        for (_, work) in self.works.iter_mut() {
            work.end = Some(Cause::ShutDown);
        }
        let links: Vec<LinkId> = self.links.keys().copied().collect();
        for link in links {
            self.fabric.close_link(link);
        }
        let queued: Vec<Handle> =
            self.parts.iter().filter(|(_, part)| part.posted.is_none()).map(|(key, _)| key).collect();
        for (_, peer) in self.peers.iter_mut() {
            drop(peer.drain());
        }
        for part in queued {
            self.fail_part(part, &Failure { cause: Cause::ShutDown, far: Far::Untouched }, now);
        }
        self.turn(options, now);
    }

    pub(super) fn next_tick(&self) -> Instant {
        self.next_tick
    }

    pub(super) fn explain(&self, id: super::transfer::TransferId) -> Option<Explanation> {
        self.explained.iter().rev().find(|known| known.id == id).cloned()
    }

    /// When somebody who was refused at a bound may try again.
    pub(super) fn retry_hint(&self) -> Duration {
        Duration::from_millis(1 + u64::try_from(self.works.len() / 64).unwrap_or(u64::MAX))
    }
}
