//! What the scheduler asks for, done: posts, cancels, closed links, wanted dials, ended pieces.
//!
//! Second part of `shard`. It decides nothing: which slice goes over which path, how long it is and whether it is tried again
//! comes from the scheduler. Invariant: after every input the scheduler is asked until it wants nothing more.

use millpond_core::quiet::Far;
use millpond_core::slab::Handle;
use millpond_core::time::Instant;
use millpond_core::transfer::{self, Action, Cut, Finished, Limits, PathId, Posting, Refusal};
use millpond_hal::contract::{LaneSide, LinkDownReason};
use millpond_hal::fabric::{PostError, PostOptions};

use super::batch::{Arrival, Via};
use super::options::Options;
use super::peers::{WantedLane, lane_of};
use super::shard::{SPARES_MAX, Shard};
use super::transfer::{Cause, Failure, RefusalReason};
use super::work::{Part, Posted, Row};

fn index(handle: Handle) -> usize {
    handle.slot as usize
}

impl Shard {
    /// Does what the scheduler wants done by now.
    pub(super) fn pump(&mut self, options: &Options, now: Instant) {
        while let Some(action) = self.brain.poll(now) {
            match action {
                Action::Post { posting, job, path, cut, .. } => {
                    if let Some(limits) = cut {
                        self.cut(posting, job, limits);
                    }
                    self.post(posting, path, options, now);
                }
                Action::Settle { slice, .. } => self.settle_part(slice),
                Action::Fail { slice, failure, .. } => self.fail_part(slice, failure, options),
                Action::Cancel { posting } => {
                    let part = self.parts.get(index(posting.slice)).and_then(Option::as_ref);
                    if let Some(posted) = part.and_then(|part| part.posted.as_ref()) {
                        self.fabric.cancel(now, &posted.ticket);
                    }
                }
                Action::Close { peer, path, why } => self.close_lane(peer, path, why),
                Action::Dial { peer, path } => self.dial(peer, path, now),
                Action::Finish(finished) => self.on_job_over(finished, options, now),
                _ => {}
            }
        }
    }

    fn close_lane(&mut self, brain: Handle, path: PathId, why: transfer::PathDown) {
        let lane = self.peer_of(brain).and_then(|key| self.peers.get(key)?.lanes[path.index()].as_ref());
        if let Some(link) = lane.map(|lane| lane.link) {
            tracing::debug!(%why, "a lane is closed");
            self.fabric.close_link_for(link, LinkDownReason::Stalled);
        }
    }

    fn dial(&mut self, brain: Handle, path: PathId, now: Instant) {
        let Some(key) = self.peer_of(brain) else { return };
        let Some(peer) = self.peers.get(key) else { return };
        if let Some(via) = peer.inner.own {
            return self.open_own_lane(via, now);
        }
        if let (LaneSide::Dialed, index) = lane_of(path) {
            self.wanted.push(WantedLane { peer: key, inner: std::sync::Arc::clone(&peer.inner), index });
        }
    }

    /// The peer here of a peer of the scheduler.
    pub(super) fn peer_of(&self, brain: Handle) -> Option<Handle> {
        self.brain_peers.get(index(brain)).copied()
    }

    /// Makes a part of what the next slice of a job is to hold.
    fn cut(&mut self, posting: Posting, job: Handle, limits: Limits) {
        let mut pieces = self.spare_pieces.pop().unwrap_or_default();
        let row = self.rows.get_mut(index(job)).and_then(Option::as_mut);
        let Some((row, work)) = row.and_then(|row| self.works.get_mut(row.work).map(|work| (row, work))) else {
            unreachable!("a job has a row until it is finished")
        };
        let is_first = !row.is_cut;
        let load = row.carve(&mut work.outcomes, limits, &mut pieces);
        let (is_last, has_writes) = (row.is_spent(), row.has_writes);
        // One slice into one region can carry the arrival itself; otherwise it follows when all writes are there.
        let alone = is_first && is_last && work.jobs == 1 && work.remotes.len() == 1 && has_writes;
        let arrival = match row.arrival.take() {
            None if alone => work.arrival.take().map(|arrival| (0, arrival)),
            own => own,
        };
        let (is_once, has_writes) = (arrival.is_some(), has_writes || arrival.is_some());
        self.brain.on_cut(posting, Cut { bytes: load.bytes, moves: load.moves, has_writes, is_once, is_last });
        let part = Part { work: row.work, peer: row.peer, pieces, arrival, posted: None };
        let at = index(posting.slice);
        if self.parts.len() <= at {
            self.parts.resize_with(at + 1, || None);
        }
        self.parts[at] = Some(part);
    }

    fn post(&mut self, posting: Posting, path: PathId, options: &Options, now: Instant) {
        let Some(part) = self.parts.get_mut(index(posting.slice)).and_then(Option::as_mut) else { return };
        let (Some(work), Some(peer)) = (self.works.get_mut(part.work), self.peers.get_mut(part.peer)) else { return };
        let Some(lane) = &peer.lanes[path.index()] else {
            return self.brain.on_refused(now, posting, Refusal::PathClosed);
        };
        let mut batch = self.spare_batches.pop().unwrap_or_default();
        for piece in &mut part.pieces {
            let region = work.remotes[piece.remote as usize].inner.region;
            if let Some(request) = piece.as_request(region) {
                batch.push(request);
            }
        }
        if let Some((remote, Arrival { counter, amount })) = part.arrival {
            batch.arrival(work.remotes[remote as usize].inner.region, counter, amount);
        }
        let with = PostOptions::default().with_attempt(u32::from(posting.attempt) - 1);
        match self.fabric.post(now, lane.link, batch, with) {
            Ok(ticket) => {
                let used = lane.via;
                work.used = Some(used);
                let slot = ticket.id().handle().slot as usize;
                if self.tickets.len() <= slot {
                    self.tickets.resize(slot + 1, None);
                }
                self.tickets[slot] = Some((ticket.id(), posting.slice));
                part.posted = Some(Posted { ticket, posting, path });
                if work.settings.via == Via::Auto
                    && let Some((from, reason)) = peer.downgrade(used, options, now)
                {
                    self.statistics.on_detour(from, used, reason);
                    if peer.is_news(from, reason) {
                        let peer = hex(&peer.inner.identity.node);
                        tracing::warn!(%peer, %from, to = %used, reason = reason.name(), "a path is not the best that both sides share; `doctor` says what is wrong with it");
                    }
                }
            }
            Err(mut refused) => {
                for (piece, request) in part.pieces.iter_mut().zip(refused.batch.drain()) {
                    piece.give_back(request);
                }
                self.spare_batches.push(refused.batch);
                self.on_not_posted(posting, refused.reason, now);
            }
        }
    }

    fn on_not_posted(&mut self, posting: Posting, reason: PostError, now: Instant) {
        let cause = match reason {
            PostError::LinkFull | PostError::TicketsFull { .. } => {
                return self.brain.on_refused(now, posting, Refusal::Full);
            }
            PostError::LinkClosed => return self.brain.on_refused(now, posting, Refusal::PathClosed),
            PostError::NoRight { .. } => Cause::Refused { reason: RefusalReason::NotAllowed },
            PostError::OutOfBounds { .. } | PostError::LengthsDiffer { .. } | PostError::TooLarge { .. } => {
                Cause::Refused { reason: RefusalReason::OutOfBounds }
            }
            PostError::UnknownRegion { .. } | PostError::UnknownArrivalRegion => {
                Cause::Refused { reason: RefusalReason::Stale }
            }
            _ => Cause::NoPath { via: Via::Auto, why: "the transport cannot reach this memory" },
        };
        let failure = Failure { cause, far: self.brain.far_of_refused(posting) };
        self.brain.on_refused(now, posting, Refusal::Never);
        if let Some(part) = self.parts.get_mut(index(posting.slice)).and_then(Option::take) {
            self.end_part(part, Some(&failure));
        }
    }

    fn settle_part(&mut self, slice: Handle) {
        if let Some(part) = self.parts.get_mut(index(slice)).and_then(Option::take) {
            self.end_part(part, None);
        }
    }

    fn fail_part(&mut self, slice: Handle, failure: transfer::Failure, options: &Options) {
        let Some(part) = self.parts.get_mut(index(slice)).and_then(Option::take) else { return };
        let failure = Failure { cause: self.cause(&part, failure.cause, options), far: failure.far };
        self.end_part(part, Some(&failure));
    }

    /// The scheduler's reason, as the engine's.
    pub(super) fn cause(&self, part: &Part, cause: transfer::Cause, options: &Options) -> Cause {
        self.cause_for(part.work, part.peer, cause, options)
    }

    pub(super) fn cause_for(&self, work: Handle, peer: Handle, cause: transfer::Cause, options: &Options) -> Cause {
        match cause {
            transfer::Cause::Cancelled => Cause::Cancelled,
            transfer::Cause::Deadline => Cause::Deadline,
            transfer::Cause::NoProgress => Cause::NoProgress,
            transfer::Cause::ShutDown => Cause::ShutDown,
            transfer::Cause::NoPath | transfer::Cause::CannotConnect | transfer::Cause::PeerGone => {
                let via = self.works.get(work).map_or(Via::Auto, |work| work.settings.via);
                let why = self.peers.get(peer).map_or("the peer is forgotten", |peer| peer.why_not(via, options));
                Cause::NoPath { via, why }
            }
            _ => Cause::LinkLost,
        }
    }

    /// Ends all pieces that a part still has; its memory is with them.
    pub(super) fn end_part(&mut self, mut part: Part, failure: Option<&Failure>) {
        if let Some(work) = self.works.get_mut(part.work) {
            for piece in part.pieces.drain(..) {
                match failure {
                    Some(failure) => work.on_piece_failed(piece, failure.clone()),
                    None => {
                        let moved = if piece.is_write() {
                            &mut self.statistics.bytes_written
                        } else {
                            &mut self.statistics.bytes_read
                        };
                        *moved += piece.len;
                        work.on_piece_done(piece);
                    }
                }
            }
            if let (Some(failure), Some(_)) = (failure, part.arrival) {
                work.fail_arrival(failure);
            }
        }
        self.keep_pieces(part.pieces);
    }

    pub(super) fn keep_pieces(&mut self, mut pieces: Vec<super::work::Piece>) {
        pieces.clear();
        if self.spare_pieces.len() < SPARES_MAX {
            self.spare_pieces.push(pieces);
        }
    }

    /// A job is over: so may be its transfer.
    fn on_job_over(&mut self, finished: Finished, options: &Options, now: Instant) {
        let Some(row) = self.rows.get_mut(index(finished.job)).and_then(Option::take) else { return };
        if let Some(work) = self.works.get_mut(row.work) {
            work.retries += finished.explanation.retries();
            work.considered.get_or_insert((row.peer, finished.explanation));
        }
        let cause = finished.rest.map(|rest| self.cause_for(row.work, row.peer, rest.cause, options));
        self.end_row(row, cause, options, now);
    }

    /// A row ends, with what of it was never cut.
    pub(super) fn end_row(&mut self, mut row: Row, cause: Option<Cause>, options: &Options, now: Instant) {
        let key = row.work;
        let Some(work) = self.works.get_mut(key) else { return };
        if let Some(cause) = cause {
            for piece in row.rest.drain(..).skip(row.next) {
                work.on_rest_failed(piece, cause.clone());
            }
            if row.arrival.is_some() {
                work.fail_arrival(&Failure { cause, far: Far::Untouched });
            }
        }
        work.jobs -= 1;
        let is_over = work.jobs == 0;
        self.keep_pieces(row.rest);
        if is_over {
            self.on_work_over(key, options, now);
        }
    }
}

fn hex(node: &[u8; 16]) -> String {
    node.iter().map(|byte| format!("{byte:02x}")).collect()
}
