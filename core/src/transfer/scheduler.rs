//! The scheduler's inputs: what callers ask for, and what happened to what was posted.
//!
//! First half of the machine; `poll` is the other one, which says what is to be done. Nothing here chooses a path.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::job::{Enforced, Job, JobSpec, Slice, SliceState, Work};
use super::path::{PathSpec, State};
use super::peer::{Peer, Place, bits};
use super::report::{Answer, Counters, Cut, Fault, Outcome, Posting, Refusal, SubmitError, UnknownPeer};
use super::window::{Credit, Load};
use super::{Asked, Cause, Config, Explanation, Failure, PathId};
use crate::quiet::{ATTEMPTS_PER_SLICE_MAX, Far};
use crate::seeded::{Bug, on};
use crate::slab::{Handle, Slab, Slot};
use crate::time::{Duration, Instant};

/// How long a path that said it is full is left alone, unless something ends there before.
const FULL_SPAN: Duration = Duration::from_millis(1);
/// Bounds of the hint given with a refusal.
const RETRY_AFTER_MIN: Duration = Duration::from_millis(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(1);

/// The transfer scheduler of one shard; see the [module](super). `J`, `S` and `P` store jobs, slices and peers.
///
/// ```
/// use millpond_core::slab::Slot;
/// use millpond_core::time::Instant;
/// use millpond_core::transfer::{
///     Action, Answer, Asked, Config, Cut, JobSpec, Load, Outcome, PathId, PathSpec, Scheduler, Transport,
/// };
/// let now = Instant::ZERO;
/// let jobs = [const { Slot::EMPTY }; 4];
/// let mut scheduler = Scheduler::new(Config::default(), jobs, [const { Slot::EMPTY }; 8], [const { Slot::EMPTY }; 2]);
/// let peer = scheduler.insert_peer(now).unwrap();
/// let (tcp, lane) = (Transport::new(0).unwrap(), PathId::new(0).unwrap());
/// scheduler.declare(peer, lane, PathSpec::new(tcp, 0)).unwrap();
///
/// // One request of 100 bytes over tcp. The path is not open yet, so that is asked for first.
/// let mut spec = JobSpec::new(peer, 100);
/// spec.asked = Asked::Only(tcp);
/// let job = scheduler.submit(now, spec).unwrap();
/// assert_eq!(scheduler.poll(now), Some(Action::Dial { peer, path: lane }));
/// scheduler.on_open(now, peer, lane);
/// let Some(Action::Post { posting, cut: Some(limits), .. }) = scheduler.poll(now) else { panic!() };
/// assert!(limits.bytes >= 100);
/// // The caller carves its moves, posts them, and hears of their end.
/// scheduler.on_cut(posting, Cut { bytes: 100, moves: 1, has_writes: true, is_once: false, is_last: true });
/// assert_eq!(scheduler.on_finished(now, posting, Outcome::DONE), Some(Answer::Over));
/// let Some(Action::Finish(finished)) = scheduler.poll(now) else { panic!() };
/// assert_eq!((finished.job, finished.rest), (job, None));
/// assert_eq!(scheduler.poll(now), None);
/// assert_eq!(scheduler.load(peer), Some(Load::NONE));
/// ```
#[derive(Clone, Debug)]
pub struct Scheduler<J, S, P> {
    pub(super) config: Config,
    pub(super) work: Work<J, S>,
    pub(super) peers: Slab<Peer, P>,
    /// The list of peers for which something may be done.
    pub(super) due: Handle,
    pub(super) counters: Counters,
    next_number: u64,
    dials_failed: u64,
    pub(super) wake: Instant,
    /// A slice whose contents are to be said.
    pub(super) cutting: Option<Handle>,
    /// A slice could not be made: the table was full.
    pub(super) is_starved: bool,
}

impl<J, S, P> Scheduler<J, S, P>
where
    J: AsRef<[Slot<Job>]> + AsMut<[Slot<Job>]>,
    S: AsRef<[Slot<Slice>]> + AsMut<[Slot<Slice>]>,
    P: AsRef<[Slot<Peer>]> + AsMut<[Slot<Peer>]>,
{
    /// A scheduler without peers over the given tables.
    pub fn new(config: Config, jobs: J, slices: S, peers: P) -> Self {
        Self {
            config,
            work: Work { jobs: Slab::new(jobs), slices: Slab::new(slices), due: Handle::default() },
            peers: Slab::new(peers),
            due: Handle::default(),
            counters: Counters::default(),
            next_number: 0,
            dials_failed: 0,
            wake: Instant::NEVER,
            cutting: None,
            is_starved: false,
        }
    }

    /// Makes a peer without paths. `None`: the table is full.
    pub fn insert_peer(&mut self, now: Instant) -> Option<Handle> {
        self.peers.insert(Peer::new(now)).ok()
    }

    /// Forgets a peer that has no jobs. Whether it did.
    pub fn remove_peer(&mut self, peer: Handle) -> bool {
        let is_idle = self.peers.get(peer).is_some_and(|peer| peer.jobs == 0 && !peer.is_due);
        is_idle && self.peers.remove(peer).is_some()
    }

    /// The peer has this path, or may have it. A path that is known gets the new description.
    pub fn declare(&mut self, peer: Handle, path: PathId, spec: PathSpec) -> Result<(), UnknownPeer> {
        self.peers.get_mut(peer).ok_or(UnknownPeer)?.declare(path, spec);
        self.mark_due(peer);
        Ok(())
    }

    /// Takes a job in. What is to be done follows from [`Scheduler::poll`].
    pub fn submit(&mut self, now: Instant, spec: JobSpec) -> Result<Handle, SubmitError> {
        let key = self.insert_job(now, spec).inspect_err(|_| self.counters.refused += 1)?;
        self.counters.submitted += 1;
        if let Some(peer) = self.peers.get_mut(spec.peer) {
            peer.jobs += 1;
            peer.open_bytes = peer.open_bytes.saturating_add(spec.bytes);
            peer.enqueue(&mut self.work.jobs, key, Place::Back);
        }
        self.mark_due(spec.peer);
        Ok(key)
    }

    fn insert_job(&mut self, now: Instant, spec: JobSpec) -> Result<Handle, SubmitError> {
        let peer = self.peers.get(spec.peer).ok_or(SubmitError::UnknownPeer)?;
        if peer.is_gone {
            return Err(SubmitError::PeerGone);
        }
        if peer.open_bytes > 0 && peer.open_bytes.saturating_add(spec.bytes) > self.config.bytes_per_peer_max {
            return Err(SubmitError::Busy { retry_after: self.retry_after(peer) });
        }
        let progress_deadline = spec.progress_deadline.unwrap_or(self.config.progress_deadline);
        let job = Job {
            spec,
            waits_since: Some(now),
            number: self.next_number,
            progress_deadline,
            last_progress: now,
            bytes_left: spec.bytes,
            is_uncut: true,
            slices: 0,
            waiting: 0,
            first: Handle::default(),
            queue: Default::default(),
            is_queued: false,
            next_due: Handle::default(),
            is_due: false,
            has_failed: false,
            end: None,
            enforced: Enforced::No,
            explanation: Explanation::default(),
        };
        if self.work.jobs.len() == self.work.jobs.capacity() {
            return Err(SubmitError::Busy { retry_after: self.retry_after(peer) });
        }
        let busy = SubmitError::Busy { retry_after: RETRY_AFTER_MIN };
        let key = self.work.jobs.insert(job).map_err(|_| busy)?;
        self.next_number += 1;
        self.wake = self.wake.min(spec.deadline).min(now + look_again(progress_deadline));
        if spec.asked != Asked::Any {
            self.wake = self.wake.min(now + self.config.connect_deadline);
        }
        Ok(key)
    }

    /// How long what is queued for the peer takes at the rate of its paths.
    fn retry_after(&self, peer: &Peer) -> Duration {
        let rate: u64 = peer.paths.iter().flatten().filter_map(|path| path.rate.per_second()).sum();
        let nanos = super::rate::scaled(peer.open_bytes, 1_000_000_000, rate.max(1));
        Duration::from_nanos(nanos).clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX)
    }

    /// Ends a job before its time; it is over once nothing of it is under way. Nothing happens if it is over.
    pub fn cancel(&mut self, now: Instant, job: Handle) {
        self.end_job(now, job, Cause::Cancelled);
    }

    /// Ends all jobs.
    pub fn shut_down(&mut self, now: Instant) {
        for slot in 0..self.work.jobs.slots_used() {
            if let Some(job) = self.work.jobs.handle_at(slot) {
                self.end_job(now, job, Cause::ShutDown);
            }
        }
    }

    pub(super) fn end_job(&mut self, now: Instant, key: Handle, cause: Cause) {
        let Some(job) = self.work.jobs.get_mut(key).filter(|job| job.end.is_none()) else { return };
        job.end = Some(cause);
        job.enforced = Enforced::Cancelled(now);
        if let Some(peer) = self.peers.get_mut(job.spec.peer) {
            peer.dequeue(&mut self.work.jobs, key);
        }
        self.wake = self.wake.min(now + self.config.cancel_grace);
        self.work.mark_due(key);
    }

    pub(super) fn mark_due(&mut self, key: Handle) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        if !peer.is_due {
            peer.is_due = true;
            peer.next_due = self.due;
            self.due = key;
        }
    }

    /// What the slice that was just to be posted holds.
    ///
    /// # Panics
    /// If no slice was to be cut, or another one.
    pub fn on_cut(&mut self, posting: Posting, cut: Cut) {
        let is_asked = self.cutting.take() == Some(posting.slice);
        assert!(is_asked, "say what was cut right after the action that asked for it, once");
        let more = Load { bytes: cut.bytes, moves: cut.moves, slices: 0 };
        let Some(slice) = self.work.slices.get_mut(posting.slice) else { return };
        slice.state = SliceState::Posted { is_cancelled: false };
        slice.load.add(more);
        (slice.has_writes, slice.is_once) = (cut.has_writes, cut.is_once);
        let (key, path) = (slice.job, usize::from(slice.path));
        let Some(job) = self.work.jobs.get_mut(key) else { return };
        job.bytes_left = job.bytes_left.saturating_sub(cut.bytes);
        job.is_uncut = !cut.is_last;
        let (class, is_spent) = (job.spec.class, !job.is_uncut && job.waiting == 0);
        let Some(peer) = self.peers.get_mut(job.spec.peer) else { return };
        peer.load.add(more);
        if let Some(Some(path)) = peer.paths.get_mut(path) {
            path.on_more(more);
        }
        peer.shares.charge(class, cut.bytes);
        if is_spent {
            peer.dequeue(&mut self.work.jobs, key);
        }
    }

    /// A post did not succeed. With [`Refusal::Never`] its moves are the caller's to end; otherwise the slice waits, or
    /// goes another way.
    pub fn on_refused(&mut self, now: Instant, posting: Posting, refusal: Refusal) {
        let Some(slice) = self.posted(posting) else { return };
        let (key, load, at) = (slice.job, slice.load, usize::from(slice.path));
        slice.attempts -= 1;
        let Some(job) = self.work.jobs.get_mut(key) else { return };
        job.explanation.slices[at] = job.explanation.slices[at].saturating_sub(1);
        (self.counters.posted, self.counters.not_posted) = (self.counters.posted - 1, self.counters.not_posted + 1);
        let peer_key = job.spec.peer;
        let Some(peer) = self.peers.get_mut(peer_key) else { return };
        peer.load.sub(load);
        let full_until = if refusal == Refusal::Never { Instant::ZERO } else { now + FULL_SPAN };
        if let Some(Some(path)) = peer.paths.get_mut(at) {
            path.on_not_posted(now, load, full_until);
        }
        if refusal == Refusal::Never {
            job.has_failed = true;
            self.remove_slice(posting.slice);
        } else {
            self.wake = self.wake.min(full_until);
            self.put_back(posting.slice);
        }
        self.mark_due(peer_key);
    }

    /// A slice waits to be posted again, before everything else of its class.
    fn put_back(&mut self, key: Handle) {
        let Some(slice) = self.work.slices.get_mut(key) else { return };
        slice.state = SliceState::Waiting;
        let job_key = slice.job;
        let Some(job) = self.work.jobs.get_mut(job_key) else { return };
        job.waiting += 1;
        if job.end.is_some() {
            self.work.mark_due(job_key);
        } else if let Some(peer) = self.peers.get_mut(job.spec.peer) {
            peer.enqueue(&mut self.work.jobs, job_key, Place::Front);
        }
    }

    pub(super) fn remove_slice(&mut self, key: Handle) {
        self.work.remove_slice(key);
        if core::mem::take(&mut self.is_starved) {
            for slot in 0..self.peers.slots_used() {
                let key =
                    self.peers.handle_at(slot).filter(|key| self.peers.get(*key).is_some_and(|peer| peer.queued > 0));
                self.mark_due(key.unwrap_or_default());
            }
        }
    }

    /// What it means for the far end of moves that are refused for good with this attempt: an earlier one may have been
    /// applied. Ask before saying that they were.
    pub fn far_of_refused(&self, posting: Posting) -> Far {
        let slice = self.work.slices.get(posting.slice);
        if slice.is_some_and(|slice| slice.is_touched) { Far::Unknown } else { Far::Untouched }
    }

    /// The slice, if that attempt at it is under way.
    fn posted(&mut self, posting: Posting) -> Option<&mut Slice> {
        let is_current = |slice: &Slice| slice.attempts == posting.attempt || on(Bug::TransferTakesStaleCompletions);
        self.work.slices.get_mut(posting.slice).filter(|slice| slice.is_posted() && is_current(slice))
    }

    /// An attempt ended: its memory here is not touched any more. `None`: it is unknown, late or a duplicate; it is counted
    /// and changes nothing.
    pub fn on_finished(&mut self, now: Instant, posting: Posting, outcome: Outcome) -> Option<Answer> {
        if self.posted(posting).is_none() {
            self.counters.ignored += 1;
            return None;
        }
        let slice = self.work.slices.get_mut(posting.slice)?;
        let (job_key, load) = (slice.job, slice.load);
        let done = Load {
            bytes: load.bytes.saturating_sub(outcome.kept.bytes).saturating_sub(outcome.refused.bytes),
            moves: load.moves.saturating_sub(outcome.kept.moves).saturating_sub(outcome.refused.moves),
            slices: 0,
        };
        let at = usize::from(slice.path);
        let job = self.work.jobs.get_mut(job_key)?;
        let is_progress = done.moves > 0 || outcome.fault.is_none();
        if is_progress {
            job.last_progress = now;
        }
        job.has_failed |= outcome.refused.moves > 0;
        self.counters.bytes_done += done.bytes;
        let (peer_key, number) = (job.spec.peer, self.next_number);
        if let Some(peer) = self.peers.get_mut(peer_key) {
            Self::settle_path(now, peer, at, slice, outcome, (done, number), &mut self.counters);
        }
        self.mark_due(peer_key);
        Some(match outcome.fault {
            None => self.on_slice_done(posting.slice),
            Some(fault) => self.on_slice_failed(posting.slice, outcome, fault),
        })
    }

    /// The path's part of a completion.
    fn settle_path(
        now: Instant,
        peer: &mut Peer,
        at: usize,
        slice: &mut Slice,
        outcome: Outcome,
        (done, number): (Load, u64),
        counters: &mut Counters,
    ) {
        peer.load.sub(slice.load);
        let Some(id) = PathId::new(at) else { return };
        let Some(path) = peer.paths[at].as_mut() else { return };
        let is_leak = on(Bug::TransferLeaksWindow) && outcome.fault.is_some();
        path.on_finished(now, if is_leak { Load::NONE } else { slice.load }, done);
        if done.moves > 0 {
            path.last_progress = now;
        }
        match outcome.fault {
            None => path.breaker.on_success(now),
            Some(Fault::Cancelled) => path.breaker.on_nothing(now),
            Some(_) => counters.breakers_opened += u64::from(path.breaker.on_failure(now)),
        }
        let is_lost = matches!(outcome.fault, Some(Fault::PathLost | Fault::Stalled));
        let is_unknown = outcome.fault.is_some() && outcome.far == Far::Unknown;
        slice.is_touched |= is_unknown;
        if outcome.fault.is_some() {
            slice.tried |= id.bit();
        }
        // A newer connection than the one it was posted on has fenced it already.
        if is_lost && is_unknown && slice.has_writes && slice.generation >= path.fenced_below {
            slice.doubts |= id.bit();
            path.on_doubt(slice.generation, number);
            counters.doubts += u64::from(peer.doubts & id.bit() == 0);
            peer.doubts |= id.bit();
        }
        if outcome.fault.is_none() {
            peer.earn();
        }
    }

    fn on_slice_done(&mut self, key: Handle) -> Answer {
        if let Some(slice) = self.work.slices.get_mut(key).filter(|slice| slice.doubts != 0)
            && !on(Bug::TransferSkipsFence)
        {
            slice.state = SliceState::Arrived;
            let job = slice.job;
            self.work.mark_due(job);
            return Answer::Arrived;
        }
        self.remove_slice(key);
        Answer::Over
    }

    fn on_slice_failed(&mut self, key: Handle, outcome: Outcome, fault: Fault) -> Answer {
        let Some(slice) = self.work.slices.get_mut(key) else { return Answer::Over };
        slice.load = Load { slices: 1, ..outcome.kept };
        slice.moved = 0;
        let Some(job) = self.work.jobs.get_mut(slice.job) else { return Answer::Over };
        let is_doubled = slice.is_once && slice.is_touched && !on(Bug::TransferRepeatsOnce);
        let cause = match (job.end, fault) {
            (Some(end), _) => Some(end),
            (None, Fault::Cancelled) => Some(Cause::Cancelled),
            _ if is_doubled => Some(Cause::NotRepeatable),
            _ if slice.attempts >= ATTEMPTS_PER_SLICE_MAX => Some(Cause::PathLost),
            _ => {
                let has_budget = self.peers.get_mut(job.spec.peer).is_some_and(Peer::spend);
                (!has_budget).then_some(Cause::RetriesSpent)
            }
        };
        if let Some(cause) = cause {
            let far = if slice.is_touched { Far::Unknown } else { outcome.far };
            job.has_failed = true;
            self.remove_slice(key);
            return Answer::Failed(Failure { cause, far });
        }
        self.counters.retries += 1;
        job.explanation.retries += 1;
        if !on(Bug::TransferForgetsRetry) {
            self.put_back(key);
        }
        Answer::Again
    }

    /// So many bytes of an attempt have moved by now.
    pub fn on_moved(&mut self, now: Instant, posting: Posting, moved: u64) {
        let Some(slice) = self.posted(posting).filter(|slice| slice.moved < moved) else { return };
        slice.moved = moved;
        let (key, at) = (slice.job, usize::from(slice.path));
        let Some(job) = self.work.jobs.get_mut(key) else { return };
        job.last_progress = now;
        if let Some(Some(path)) = self.peers.get_mut(job.spec.peer).map(|peer| &mut peer.paths[at]) {
            path.last_progress = now;
        }
    }

    /// A path is connected. What was posted on it before lands no more, since the peer answered. Its generation, from 1.
    pub fn on_open(&mut self, now: Instant, key: Handle, id: PathId) -> u64 {
        let Some(peer) = self.peers.get_mut(key) else { return 0 };
        let Some(path) = peer.path_mut(id) else { return 0 };
        path.on_open(now);
        let (generation, dialling) = (path.generation, path.spec.dialling);
        if dialling == super::Dialling::Theirs {
            peer.heard_at = now;
        }
        self.after_fence(key, id);
        generation
    }

    /// The peer said, or its end is proven, that nothing of that generation of a path and those before it lands any more.
    /// Opening the path says the same; this is for a peer that could be asked another way.
    pub fn on_fenced(&mut self, key: Handle, id: PathId, generation: u64) {
        if let Some(path) = self.peers.get_mut(key).and_then(|peer| peer.path_mut(id)) {
            path.fence(generation);
            self.after_fence(key, id);
        }
    }

    fn after_fence(&mut self, key: Handle, id: PathId) {
        self.mark_due(key);
        let Some(peer) = self.peers.get_mut(key) else { return };
        let is_fenced = peer.path_mut(id).is_some_and(|path| path.doubt.is_none());
        if !is_fenced || peer.doubts & id.bit() == 0 {
            return;
        }
        peer.doubts &= !id.bit();
        for slot in 0..self.work.slices.slots_used() {
            let found = self.work.slices.handle_at(slot);
            let Some(slice) = found.and_then(|slice| self.work.slices.get_mut(slice)) else { continue };
            let job = slice.job;
            if slice.doubts & id.bit() != 0 && self.work.jobs.get(job).is_some_and(|job| job.spec.peer == key) {
                slice.doubts &= !id.bit();
                self.work.mark_due(job);
            }
        }
    }

    /// A path's connection is gone; the completions of what was posted on it come by themselves. Stale news is ignored.
    pub fn on_down(&mut self, key: Handle, id: PathId, generation: u64) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.to_close &= !id.bit();
        if let Some(path) = peer.path_mut(id).filter(|path| path.generation == generation) {
            path.on_down();
            self.mark_due(key);
        }
    }

    /// A dial did not succeed; it is asked for again after a wait that doubles, less a share that the seed draws.
    pub fn on_dial_failed(&mut self, now: Instant, key: Handle, id: PathId) {
        self.on_no_path(now, key, id, false);
    }

    /// A dial was refused: nobody listens there, so whoever did is gone. What waits for the peer fails at once if no other
    /// path of it is open or on its way; later work has it dialled again, after a wait that doubles.
    pub fn on_dial_refused(&mut self, now: Instant, key: Handle, id: PathId) {
        self.on_no_path(now, key, id, true);
    }

    fn on_no_path(&mut self, now: Instant, key: Handle, id: PathId, is_refused: bool) {
        let Some(path) = self.peers.get_mut(key).and_then(|peer| peer.path_mut(id)) else { return };
        self.dials_failed += 1;
        let chance = xxh3_64_with_seed(&self.dials_failed.to_le_bytes(), self.config.dial_seed);
        path.on_dial_failed(now, is_refused, chance);
        self.wake = self.wake.min(path.redial_at(now));
        self.mark_due(key);
    }

    /// Asks for a path although there is no work for it.
    pub fn want(&mut self, now: Instant, key: Handle, id: PathId) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.want(now, id);
            self.mark_due(key);
        }
    }

    /// The receiver takes that much in all on the path's connection. Late news of an earlier one is ignored.
    pub fn on_credit(&mut self, key: Handle, id: PathId, generation: u64, credit: Credit) {
        let path = self.peers.get_mut(key).and_then(|peer| peer.path_mut(id));
        if let Some(path) = path.filter(|path| path.generation == generation) {
            path.on_credit(credit);
            self.mark_due(key);
        }
    }

    /// The peer does not come back under this handle, and its memory is gone: what waits for it fails, and nothing lands
    /// there any more.
    pub fn on_peer_gone(&mut self, key: Handle) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.is_gone = true;
        for id in bits(peer.doubts) {
            if let Some(path) = self.peers.get_mut(key).and_then(|peer| peer.path_mut(id)) {
                path.fence(path.generation);
            }
            self.after_fence(key, id);
        }
        self.mark_due(key);
    }

    /// Looks at deadlines, stalls and waits. Say what [moved](Scheduler::on_moved) before. O(jobs + peers).
    pub fn on_timer(&mut self, now: Instant) {
        self.wake = Instant::NEVER;
        for slot in 0..self.work.jobs.slots_used() {
            if let Some(job) = self.work.jobs.handle_at(slot) {
                self.look_at_job(now, job);
            }
        }
        for slot in 0..self.peers.slots_used() {
            let Some(key) = self.peers.handle_at(slot) else { continue };
            let Some(peer) = self.peers.get_mut(key) else { continue };
            let (stalled, wake) = peer.find_stalls(now, &self.config);
            self.counters.stalls += u64::from(stalled.count_ones());
            self.wake = self.wake.min(wake);
            if stalled != 0 || peer.queued > 0 {
                self.wake = self.wake.min(peer.next_wake(now, &self.config));
                self.mark_due(key);
            }
        }
    }

    /// Nobody looked for `span`, which ends now, although something was due ([`Lapse`](super::Lapse)): that is no time in
    /// which a peer did nothing. All that waits for peers waits for so much longer; deadlines of callers stay. O(jobs + peers).
    pub fn on_stopped(&mut self, now: Instant, span: Duration) {
        let later = |at: Instant| (at + span).min(now);
        for slot in 0..self.work.jobs.slots_used() {
            let found = self.work.jobs.handle_at(slot);
            let Some(job) = found.and_then(|job| self.work.jobs.get_mut(job)) else { continue };
            job.last_progress = later(job.last_progress);
            job.waits_since = job.waits_since.map(later);
            if let Enforced::Cancelled(since) = &mut job.enforced {
                *since = later(*since);
            }
        }
        for slot in 0..self.peers.slots_used() {
            let found = self.peers.handle_at(slot);
            let Some(peer) = found.and_then(|peer| self.peers.get_mut(peer)) else { continue };
            peer.heard_at = later(peer.heard_at);
            peer.paths.iter_mut().flatten().for_each(|path| path.on_stopped(now, span));
        }
    }

    fn look_at_job(&mut self, now: Instant, key: Handle) {
        let Some(job) = self.work.jobs.get_mut(key) else { return };
        let stuck_at = job.last_progress + job.progress_deadline;
        match job.enforced {
            Enforced::No if job.spec.deadline <= now => self.end_job(now, key, Cause::Deadline),
            Enforced::No if stuck_at <= now => self.end_job(now, key, Cause::NoProgress),
            Enforced::No => {
                let look_at = stuck_at.min(now + look_again(job.progress_deadline));
                self.wake = self.wake.min(job.spec.deadline).min(look_at);
            }
            Enforced::Cancelled(since) if now.since(since) >= self.config.cancel_grace => {
                job.enforced = Enforced::Closed;
                self.work.mark_due(key);
            }
            Enforced::Cancelled(since) => self.wake = self.wake.min(since + self.config.cancel_grace),
            Enforced::Closed => {}
        }
    }

    /// When [`Scheduler::on_timer`] is due, unless something else happens before.
    pub fn next_wake(&self) -> Instant {
        self.wake
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Jobs that have not ended.
    pub fn jobs(&self) -> usize {
        self.work.jobs.len()
    }

    /// Jobs that there is room for.
    pub fn jobs_max(&self) -> usize {
        self.work.jobs.capacity()
    }

    /// Whether a peer's path was declared.
    pub fn has_path(&self, peer: Handle, path: PathId) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.paths[path.index()].is_some())
    }

    /// Slices that are under way or wait.
    pub fn slices(&self) -> usize {
        self.work.slices.len()
    }

    /// What is under way to a peer.
    pub fn load(&self, peer: Handle) -> Option<Load> {
        self.peers.get(peer).map(|peer| peer.load)
    }

    /// What is under way on one path.
    pub fn path_load(&self, peer: Handle, path: PathId) -> Option<Load> {
        Some(self.peers.get(peer)?.paths[path.index()].as_ref()?.load)
    }

    /// Paths of a peer on which writes may still land that were given up here.
    pub fn in_doubt(&self, peer: Handle) -> impl Iterator<Item = PathId> + use<J, S, P> {
        bits(self.peers.get(peer).map_or(0, |peer| peer.doubts))
    }

    /// Whether a path is connected.
    pub fn is_open(&self, peer: Handle, path: PathId) -> bool {
        let path = self.peers.get(peer).and_then(|peer| peer.paths[path.index()].as_ref());
        path.is_some_and(|path| matches!(path.state, State::Open))
    }

    /// Whether nothing waits for a peer's paths or is under way there.
    pub fn is_idle(&self, peer: Handle) -> bool {
        self.peers.get(peer).is_none_or(|peer| peer.jobs == 0)
    }
}

/// Progress is looked for four times per deadline.
fn look_again(progress_deadline: Duration) -> Duration {
    Duration::from_nanos((progress_deadline.as_nanos() / 4).max(1_000_000))
}
