//! How things end in a shard: turns, completions, lost links, deadlines.
//!
//! Third part of `shard`: it tells the scheduler what happened, and callers what became of their transfers. Whether
//! something is tried again is the scheduler's to say.

use millpond_core::quiet::Far;
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::{self, Answer, Fault, Load, PathId};
use millpond_hal::contract::{
    End, FarEnd, LaneSide, LinkDownReason, LinkId, Outcome as HalOutcome, Refusal, TicketId, Turn,
};
use millpond_hal::fabric::{Completion, FabricEvent};

use super::batch::Via;
use super::options::Options;
use super::peers::lane_of;
use super::shard::{SPARES_MAX, Shard};
use super::statistics::{EXPLAIN_MAX, Explanation};
use super::transfer::{Cause, Failure, FileFault, RefusalReason, Status};
use super::work::{Part, Row, Work};

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

/// What the far end held against a request, or the file did.
fn refused(refusal: Refusal, is_file: bool) -> Cause {
    match refusal {
        Refusal::NoSpace => Cause::File { fault: FileFault::NoSpace },
        Refusal::Truncated => Cause::File { fault: FileFault::Truncated },
        Refusal::Medium => Cause::File { fault: FileFault::Medium },
        Refusal::Failed if is_file => Cause::File { fault: FileFault::Medium },
        other => Cause::Refused { reason: reason(other) },
    }
}

/// Why what did not end well did not, if it may be tried again at all; `None`: it was done or refused.
fn fault(outcome: &HalOutcome) -> Option<Fault> {
    match outcome.end {
        End::Done | End::Refused(_) => None,
        End::LinkDown(LinkDownReason::Stalled) => Some(Fault::Stalled),
        End::LinkDown(_) => Some(Fault::PathLost),
        _ => Some(Fault::Cancelled),
    }
}

impl Shard {
    /// One turn of everything. Whether anything was done.
    pub(super) fn turn(&mut self, options: &Options, now: Instant) -> bool {
        if let Some(span) = self.lapse.on_look(now) {
            self.on_stopped(span, now);
        }
        let mut worked = self.fabric.poll(now) == Turn::Worked;
        // Bounded by what one turn of the devices reports.
        while let Some(event) = self.fabric.next_event() {
            worked = true;
            match event {
                FabricEvent::Finished(ticket) => self.on_finished(ticket, options, now),
                FabricEvent::Arrived(grant) => self.on_arrived(grant),
                FabricEvent::LinkDown { link, reason } => self.on_link_down(link, reason, now),
                _ => {}
            }
            self.pump(options, now);
        }
        if now >= self.brain.next_wake() {
            self.tick(options, now);
        }
        worked
    }

    /// Nobody drove this for so long: no peer did nothing meanwhile, we did not look.
    fn on_stopped(&mut self, span: Duration, now: Instant) {
        tracing::debug!(%span, "the engine was stopped, or had no core");
        self.fabric.on_stopped(span);
        self.brain.on_stopped(now, span);
    }

    fn on_arrived(&mut self, grant: Handle) {
        if let Some(arrivals) = self.arrivals.get(&grant) {
            self.woke |= arrivals.on_change(|counter| self.fabric.arrived(grant, counter));
        }
    }

    fn on_finished(&mut self, ticket: TicketId, options: &Options, now: Instant) {
        let found = self.tickets.get_mut(ticket.handle().slot as usize).and_then(Option::take);
        let Some((_, slice)) = found.filter(|(id, _)| *id == ticket) else { return self.on_tried(ticket) };
        let Some(mut part) = self.parts.get_mut(slice.slot as usize).and_then(Option::take) else { return };
        let Some(posted) = part.posted.take() else { return };
        let Ok(completion) = self.fabric.take(posted.ticket) else { return };
        let is_done = completion.is_done();
        if !is_done {
            return self.on_part_failed(part, (posted.posting, posted.path), completion, options, now);
        }
        self.give_back(&mut part, completion);
        self.count_moved(part.peer, posted.path, part.pieces.iter().map(|piece| piece.len).sum());
        match self.brain.on_finished(now, posted.posting, transfer::Outcome::DONE) {
            Some(Answer::Arrived) => self.parts[slice.slot as usize] = Some(part),
            _ => self.end_part(part, None),
        }
    }

    /// The memory of a part's pieces comes back from the fabric.
    fn give_back(&mut self, part: &mut Part, completion: Completion) {
        let mut batch = completion.into_batch();
        for (piece, request) in part.pieces.iter_mut().zip(batch.drain()) {
            piece.give_back(request);
        }
        batch.clear();
        if self.spare_batches.len() < SPARES_MAX {
            self.spare_batches.push(batch);
        }
    }

    /// Sorts what a part came to: done, to be tried again, failed.
    fn on_part_failed(
        &mut self,
        mut part: Part,
        (posting, path): (transfer::Posting, PathId),
        completion: Completion,
        options: &Options,
        now: Instant,
    ) {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        outcomes.clear();
        outcomes.extend((0..part.pieces.len()).map(|index| completion.outcome(index)));
        let overall = completion.overall();
        self.give_back(&mut part, completion);
        let refused_far = self.brain.far_of_refused(posting);
        let outcome = sum(&part, &outcomes, overall);
        let done = part.pieces.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_done());
        self.count_moved(part.peer, path, done.map(|(piece, _)| piece.len).sum());
        let answer = self.brain.on_finished(now, posting, outcome);
        let pieces = std::mem::replace(&mut part.pieces, self.spare_pieces.pop().unwrap_or_default());
        let lost = match answer {
            Some(Answer::Failed(failure)) => Some(self.cause(&part, failure.cause, options)),
            _ => None,
        };
        let is_file = self.peers.get(part.peer).is_some_and(|peer| peer.inner.own == Some(Via::File));
        let Some(work) = self.works.get_mut(part.work) else { return };
        let mut pieces = pieces;
        for (piece, outcome) in pieces.drain(..).zip(&outcomes) {
            let own = if refused_far == Far::Unknown { Far::Unknown } else { far(outcome.far_end) };
            match (outcome.end, &lost) {
                (End::Refused(refusal), _) => {
                    work.on_piece_failed(piece, Failure { cause: refused(refusal, is_file), far: own });
                }
                (_, Some(cause)) if !outcome.is_done() => {
                    work.on_piece_failed(piece, Failure { cause: cause.clone(), far: own });
                }
                (_, None) if !outcome.is_done() => part.pieces.push(piece),
                // Done, but an earlier attempt may still land: it ends with the others.
                _ if answer == Some(Answer::Arrived) => part.pieces.push(piece),
                _ => {
                    let is_write = piece.is_write();
                    let statistics = &mut self.statistics;
                    *(if is_write { &mut statistics.bytes_written } else { &mut statistics.bytes_read }) += piece.len;
                    work.on_piece_done(piece);
                }
            }
        }
        if part.arrival.is_some() && !overall.is_done() && answer != Some(Answer::Again) {
            let cause = match (overall.end, lost) {
                (End::Refused(refusal), _) => refused(refusal, is_file),
                (_, lost) => lost.unwrap_or(Cause::LinkLost),
            };
            work.fail_arrival(&Failure { cause, far: far(overall.far_end) });
        }
        self.outcomes = outcomes;
        self.keep_pieces(pieces);
        match answer {
            Some(Answer::Again | Answer::Arrived) => self.parts[posting.slice.slot as usize] = Some(part),
            _ => self.keep_pieces(part.pieces),
        }
    }

    /// All jobs of a transfer are over. It is too, unless an arrival follows.
    pub(super) fn on_work_over(&mut self, key: Handle, options: &Options, now: Instant) {
        let Some(work) = self.works.get_mut(key) else { return };
        if let Some(arrival) = work.arrival.take()
            && !work.has_failed()
            && !work.shared.is_cancelled()
            && !work.written.is_empty()
        {
            // All writes are visible; now each grant written is told so, by a job without pieces.
            let written = std::mem::take(&mut work.written);
            work.jobs = u32::try_from(written.len()).unwrap_or(u32::MAX);
            let peers: Vec<(u32, Handle)> =
                written.iter().map(|remote| (*remote, work.remotes[*remote as usize].peer().inner.key)).collect();
            for (remote, peer) in peers {
                let mut row = Row::new(key, peer, self.spare_pieces.pop().unwrap_or_default());
                row.has_writes = true;
                row.arrival = Some((remote, arrival));
                self.submit_row(row, options, now);
            }
            return;
        }
        if let Some(work) = self.works.remove(key) {
            self.end_work(work, now);
        }
    }

    fn end_work(&mut self, work: Work, now: Instant) {
        let (asked, class) = (work.settings.via, work.settings.class);
        let (peer, paths) = work.considered.unwrap_or_default();
        let (shared, report) = work.into_report(now);
        let failed = report.outcomes.iter().find(|outcome| outcome.status != Status::Done);
        let status = failed.map_or(Status::Done, |outcome| outcome.status.clone());
        let statistics = &mut self.statistics;
        statistics.requests += u64::try_from(report.outcomes.len()).unwrap_or(u64::MAX);
        *(if status == Status::Done { &mut statistics.transfers_done } else { &mut statistics.transfers_failed }) += 1;
        let why = match (asked, report.via) {
            (_, None) => "no lane was there",
            (Via::Auto, Some(Via::Local)) => "the peer is this engine",
            (Via::Auto, Some(Via::Shm)) => "both run on this host",
            (Via::Auto, Some(Via::File)) => "it is a file of this engine",
            (Via::Auto, Some(Via::Cuda)) => "it is memory of a GPU of this engine",
            (Via::Auto, Some(Via::Rdma)) => "a pair of NICs that passed its byte test joins them",
            (Via::Auto, _) => "the best lane that was open",
            _ => "the caller named it",
        };
        self.keep_explanation(Explanation {
            id: report.id,
            requests: u32::try_from(report.outcomes.len()).unwrap_or(u32::MAX),
            bytes: report.outcomes.iter().map(|outcome| outcome.bytes).sum(),
            class,
            asked,
            used: report.via,
            why,
            retries: report.retries,
            paths,
            ends: Vec::new(),
            legs: Vec::new(),
            peer,
            elapsed: Some(report.elapsed),
            status,
        });
        shared.complete(report);
    }

    /// Of the latest batches.
    pub(super) fn keep_explanation(&mut self, explanation: Explanation) {
        if self.explained.len() == EXPLAIN_MAX {
            self.explained.pop_front();
        }
        self.explained.push_back(explanation);
    }

    fn on_link_down(&mut self, link: LinkId, reason: LinkDownReason, now: Instant) {
        let Some((key, path)) = self.links.remove(&link) else { return };
        self.statistics.lanes_lost += 1;
        self.statistics.lanes_open = self.statistics.lanes_open.saturating_sub(1);
        let Some(peer) = self.peers.get_mut(key) else { return };
        let Some(lane) = peer.lanes[path.index()].take_if(|lane| lane.link == link) else { return };
        tracing::debug!(via = %lane.via, %reason, "a lane ended");
        self.brain.on_down(peer.brain, path, lane.generation);
        peer.unfenced |= 1 << path.index();
        let brain = peer.brain;
        if let (Via::Rdma, (LaneSide::Dialed, index)) = (lane.via, lane_of(path)) {
            self.give_rail_up(key, index);
        }
        let Some(peer) = self.peers.get(key) else { return };
        // Somebody holds the peer: have the lane back before it is needed. The other end may only be able to wait for us.
        // One that nobody used for long comes back when it is.
        let is_held = std::sync::Arc::strong_count(&peer.inner) > 1;
        let is_ours = lane_of(path).0 == LaneSide::Dialed;
        let is_wanted = !matches!(reason, LinkDownReason::Closed | LinkDownReason::Idle);
        if is_held && is_ours && !peer.is_gone && is_wanted {
            self.brain.want(now, brain, path);
        }
    }

    /// Looks at every transfer: cancelled, late, stuck? And at every peer: may something be dialled or posted again?
    pub(super) fn tick(&mut self, options: &Options, now: Instant) {
        for part in self.parts.iter().flatten() {
            if let Some(posted) = &part.posted {
                self.brain.on_moved(now, posted.posting, self.fabric.bytes_moved(&posted.ticket));
            }
        }
        self.brain.on_timer(now);
        self.pump(options, now);
    }

    /// Ends what was cancelled.
    pub(super) fn look(&mut self, options: &Options, now: Instant) {
        for row in self.rows.iter().flatten() {
            if self.works.get(row.work).is_some_and(|work| work.shared.is_cancelled()) {
                self.brain.cancel(now, row.job);
            }
        }
        self.pump(options, now);
    }

    /// Ends everything: no part is tried again, no link is opened. Links that have to drain end in later turns.
    pub(super) fn shut_down(&mut self, options: &Options, now: Instant) {
        self.is_shut_down = true;
        self.brain.shut_down(now);
        self.pump(options, now);
        let mut links: Vec<LinkId> = self.links.keys().copied().collect();
        links.sort_unstable(); // the order of a hash table is no order
        for link in links {
            self.fabric.close_link(link);
        }
        self.turn(options, now);
    }

    pub(super) fn next_tick(&self) -> Instant {
        self.brain.next_wake()
    }

    pub(super) fn explain(&self, id: super::transfer::TransferId) -> Option<Explanation> {
        let mut found = self.explained.iter().rev().find(|known| known.id == id).cloned()?;
        found.ends = self.path_ends(found.peer);
        Some(found)
    }

    /// When somebody who was refused at a bound may try again.
    pub(super) fn retry_hint(&self) -> Duration {
        Duration::from_millis(1 + u64::try_from(self.works.len() / 64).unwrap_or(u64::MAX))
    }
}

/// What came of a part in all, as the scheduler wants it.
fn sum(part: &Part, outcomes: &[HalOutcome], overall: HalOutcome) -> transfer::Outcome {
    let mut sum = transfer::Outcome { kept: Load::NONE, refused: Load::NONE, fault: None, far: Far::Untouched };
    for (piece, outcome) in part.pieces.iter().zip(outcomes) {
        let of = match (fault(outcome), outcome.is_done()) {
            (Some(fault), _) => {
                sum.fault.get_or_insert(fault);
                if outcome.far_end == FarEnd::Unknown {
                    sum.far = Far::Unknown;
                }
                &mut sum.kept
            }
            (None, false) => &mut sum.refused,
            (None, true) => continue,
        };
        of.bytes += piece.len;
        of.moves += 1;
    }
    // The arrival counts as one more, without bytes.
    if part.arrival.is_some()
        && let Some(fault) = fault(&overall)
    {
        sum.fault.get_or_insert(fault);
        if overall.far_end == FarEnd::Unknown {
            sum.far = Far::Unknown;
        }
    }
    sum
}
