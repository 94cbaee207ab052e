//! The scheduler's outputs: one thing to be done after the other.
//!
//! Jobs that end come first, then connections, then posts, class by class. An action is said once. Invariants: a slice is
//! posted only within the windows of its path and its peer and the receiver's credit; a job is finished only when none
//! of its slices is left.

use super::job::{Enforced, Job, Slice, SliceState};
use super::path::{PathDown, State, Wanted};
use super::peer::{Choice, Need, Peer, bits};
use super::report::{Finished, Posting};
use super::scheduler::Scheduler;
use super::window::{Limits, Load};
use super::{Action, Cause, Class, Failure, PathId};
use crate::quiet::Far;
use crate::seeded::{Bug, on};
use crate::slab::{Handle, Slot};
use crate::time::Instant;

/// One attempt to place something of a job.
enum Placed {
    Yes(Action),
    /// Nothing of its class and transport can go now.
    Wait,
    /// The job ended instead.
    Ended,
}

impl<J, S, P> Scheduler<J, S, P>
where
    J: AsRef<[Slot<Job>]> + AsMut<[Slot<Job>]>,
    S: AsRef<[Slot<Slice>]> + AsMut<[Slot<Slice>]>,
    P: AsRef<[Slot<Peer>]> + AsMut<[Slot<Peer>]>,
{
    /// What is to be done now; call it until it says `None`, after every input. O(classes * paths) per action.
    ///
    /// # Panics
    /// If the last action asked what was cut, and nobody said.
    pub fn poll(&mut self, now: Instant) -> Option<Action> {
        assert!(self.cutting.is_none(), "the last action asked for `on_cut`");
        // Bounded: a job or peer leaves its list when nothing is left to be done about it.
        loop {
            if self.work.jobs.get(self.work.due).is_some() {
                match self.step_job(self.work.due) {
                    Some(action) => return Some(action),
                    None => self.work.unmark_first_due(),
                }
            } else if let Some(peer) = self.peers.get(self.due) {
                let next = peer.next_due;
                match self.step_peer(now, self.due) {
                    Some(action) => return Some(action),
                    // Jobs that ended meanwhile are looked at first, and may make it due again: at the end.
                    None => {
                        if let Some(peer) = self.peers.get_mut(self.due) {
                            peer.is_due = false;
                        }
                        self.due = next;
                    }
                }
            } else {
                return None;
            }
        }
    }

    fn step_job(&mut self, key: Handle) -> Option<Action> {
        let job = self.work.jobs.get(key)?;
        let (end, enforced, peer_key) = (job.end, job.enforced, job.spec.peer);
        let is_settled = |slice: &Slice| slice.state == SliceState::Arrived && slice.doubts == 0;
        if let Some(slice) = self.work.find_slice(key, is_settled) {
            self.remove_slice(slice);
            return Some(Action::Settle { slice, job: key });
        }
        if let Some(cause) = end {
            let is_idle = |slice: &Slice| matches!(slice.state, SliceState::Waiting | SliceState::Arrived);
            if let Some(found) = self.work.find_slice(key, is_idle) {
                return self.fail_slice(key, found, cause);
            }
            let is_running = |slice: &Slice| slice.state == SliceState::Posted { is_cancelled: false };
            if let Some(found) = self.work.find_slice(key, is_running) {
                let slice = self.work.slices.get_mut(found)?;
                slice.state = SliceState::Posted { is_cancelled: true };
                return Some(Action::Cancel { posting: Posting { slice: found, attempt: slice.attempts } });
            }
            if enforced == Enforced::Closed
                && let Some(action) = self.close_paths(key, peer_key)
            {
                return Some(action);
            }
        }
        let job = self.work.jobs.get(key)?;
        let is_over = job.slices == 0 || (end.is_some() && on(Bug::TransferEndsBeforeQuiet));
        (is_over && (end.is_some() || !job.is_uncut)).then(|| self.finish(key)).flatten()
    }

    fn fail_slice(&mut self, key: Handle, found: Handle, cause: Cause) -> Option<Action> {
        let slice = self.work.slices.get(found)?;
        let failure = match slice.state {
            SliceState::Arrived => Failure { cause: Cause::Unfenced, far: Far::Unknown },
            _ if slice.is_touched => Failure { cause, far: Far::Unknown },
            _ => Failure { cause, far: Far::Untouched },
        };
        self.remove_slice(found);
        self.work.jobs.get_mut(key)?.has_failed = true;
        Some(Action::Fail { slice: found, job: key, failure })
    }

    /// Closes the next path that a slice of an ended job is still posted on.
    fn close_paths(&mut self, key: Handle, peer_key: Handle) -> Option<Action> {
        let peer = self.peers.get_mut(peer_key)?;
        let is_open = |at: u8| peer.paths[usize::from(at)].is_some_and(|path| path.is_open());
        let found = self.work.find_slice(key, |slice| slice.is_posted() && is_open(slice.path))?;
        let path = PathId::new(usize::from(self.work.slices.get(found)?.path))?;
        peer.path_mut(path)?.state = State::Closing;
        Some(Action::Close { peer: peer_key, path, why: PathDown::CancelLate })
    }

    fn finish(&mut self, key: Handle) -> Option<Action> {
        // It is the first that is due, or it could not be looked at.
        self.work.unmark_first_due();
        let job = self.work.jobs.remove(key)?;
        if let Some(peer) = self.peers.get_mut(job.spec.peer) {
            peer.jobs -= 1;
            peer.open_bytes = peer.open_bytes.saturating_sub(job.spec.bytes);
        }
        let is_failed = job.has_failed || (job.end.is_some() && job.is_uncut);
        *(if is_failed { &mut self.counters.failed } else { &mut self.counters.done }) += 1;
        let untouched = |cause| Failure { cause, far: Far::Untouched };
        Some(Action::Finish(Finished {
            job: key,
            tag: job.spec.tag,
            rest: job.end.filter(|_| job.is_uncut).map(untouched),
            end: job.end,
            explanation: job.explanation,
        }))
    }

    fn step_peer(&mut self, now: Instant, key: Handle) -> Option<Action> {
        let peer = self.peers.get_mut(key)?;
        if let Some(path) = bits(peer.to_close).next() {
            peer.to_close &= !path.bit();
            return Some(Action::Close { peer: key, path, why: PathDown::Stalled });
        }
        if peer.queued > 0
            && let Some(action) = self.place_next(now, key)
        {
            return Some(action);
        }
        let peer = self.peers.get_mut(key)?;
        let path = bits(peer.to_dial).next()?;
        peer.to_dial &= !path.bit();
        Some(Action::Dial { peer: key, path })
    }

    /// Posts the next slice to a peer, of the class that is due first and can go.
    fn place_next(&mut self, now: Instant, key: Handle) -> Option<Action> {
        let order = self.peers.get(key)?.shares.order();
        for class in order {
            let mut rest = self.peers.get(key)?.filled(class);
            // Bounded: each round ends a job, or takes a queue out.
            while let Some(queue) = self.oldest(key, class, rest) {
                match self.place_head(now, key, class, queue) {
                    Placed::Yes(action) => return Some(action),
                    Placed::Wait => rest &= !(1 << queue),
                    Placed::Ended => rest &= self.peers.get(key)?.filled(class),
                }
            }
        }
        let peer = self.peers.get(key)?;
        if peer.queued > 0 {
            self.wake = self.wake.min(peer.next_wake(now, &self.config));
        }
        None
    }

    /// The queue among those in `mask` whose first job came first.
    fn oldest(&self, key: Handle, class: Class, mask: u8) -> Option<u32> {
        let peer = self.peers.get(key)?;
        if mask & mask.wrapping_sub(1) == 0 {
            return (mask != 0).then(|| mask.trailing_zeros());
        }
        let number = |queue: &u32| self.work.jobs.get(peer.head(class, *queue)).map_or(u64::MAX, |job| job.number);
        (0..u8::BITS).filter(|queue| mask & (1 << queue) != 0).min_by_key(number)
    }

    fn place_head(&mut self, now: Instant, key: Handle, class: Class, queue: u32) -> Placed {
        let Some(peer) = self.peers.get_mut(key) else { return Placed::Wait };
        let head = peer.head(class, queue);
        let Some(job) = self.work.jobs.get(head) else { return Placed::Wait };
        let waiting =
            if job.waiting > 0 { self.work.find_slice(head, |slice| slice.state == SliceState::Waiting) } else { None };
        let again = waiting.and_then(|slice| self.work.slices.get(slice));
        let need = Need {
            asked: job.spec.asked,
            waits_since: job.waits_since,
            is_write: again.map_or(job.spec.has_writes, |slice| slice.has_writes),
            number: job.number,
            wanted: again.map_or(Wanted::Cut { bytes: job.bytes_left }, |slice| Wanted::Whole(slice.load)),
            attempts: again.map_or(0, |slice| slice.attempts),
            tried: again.map_or(0, |slice| slice.tried),
            last: again.map_or(0, |slice| slice.path),
        };
        let Some(job) = self.work.jobs.get_mut(head) else { return Placed::Wait };
        match peer.choose(now, &need, &self.config, &mut job.explanation) {
            Choice::Wait => Placed::Wait,
            Choice::Never(cause) => {
                self.end_job(now, head, cause);
                Placed::Ended
            }
            Choice::Post { path, limits, why } => {
                let window = &self.config.window_per_peer;
                let limits = match need.wanted {
                    Wanted::Cut { bytes } => window.limit(peer.load, bytes, limits),
                    Wanted::Whole(load) => window.fits(peer.load, load).then_some(limits),
                };
                let Some(limits) = limits else { return Placed::Wait };
                job.explanation.why = why;
                self.place(now, (key, head), waiting, path, limits).map_or(Placed::Wait, Placed::Yes)
            }
        }
    }

    fn place(
        &mut self,
        now: Instant,
        (peer_key, job_key): (Handle, Handle),
        waiting: Option<Handle>,
        at: PathId,
        limits: Limits,
    ) -> Option<Action> {
        let Some(key) = waiting.or_else(|| self.work.insert_slice(job_key)) else {
            self.is_starved = true;
            return None;
        };
        let slice = self.work.slices.get_mut(key)?;
        let cut = if waiting.is_some() {
            slice.state = SliceState::Posted { is_cancelled: false };
            None
        } else {
            slice.load = Load { slices: 1, ..Load::NONE };
            self.cutting = Some(key);
            Some(limits)
        };
        let load = slice.load;
        slice.attempts += 1;
        slice.moved = 0;
        slice.path = at.0;
        let posting = Posting { slice: key, attempt: slice.attempts };
        let job = self.work.jobs.get_mut(job_key)?;
        let slices = &mut job.explanation.slices[at.index()];
        *slices = slices.saturating_add(1);
        job.waits_since = None;
        let class = job.spec.class;
        self.counters.posted += 1;
        let peer = self.peers.get_mut(peer_key)?;
        if peer.is_detour(at, job.spec.asked) {
            self.counters.detours += 1;
            job.explanation.detours += 1;
        }
        peer.load.add(load);
        let path = peer.path_mut(at)?;
        path.on_post(now, load);
        let generation = path.generation;
        if waiting.is_some() {
            peer.shares.charge(class, load.bytes);
            job.waiting -= 1;
            if job.waiting == 0 && !job.is_uncut {
                peer.dequeue(&mut self.work.jobs, job_key);
            }
        }
        self.work.slices.get_mut(key)?.generation = generation;
        Some(Action::Post { posting, job: job_key, peer: peer_key, path: at, cut })
    }
}
