//! One peer: its paths, the queues in front of them, and which path a slice takes.
//!
//! It chooses and keeps count; what is chosen is done in `poll`. Invariants: its load is the sum over its paths; while a
//! path is in doubt, writes of jobs that came after the doubt take no path at all (quiet has two ends).

use super::job::Job;
use super::path::{Path, PathSpec, State, Wanted};
use super::rate::scaled;
use super::share::Shares;
use super::window::{Limits, Load};
use super::{
    Asked, CLASSES, Cause, Class, Config, Dialling, Explanation, PATHS_PER_PEER_MAX, PathId, RETRY_BUDGET_MAX,
    SLICES_PER_RETRY, TRANSPORTS_MAX, Verdict, Why,
};
use crate::seeded::{Bug, on};
use crate::slab::{Handle, Slab, Slot};
use crate::time::Instant;

/// Bytes per second assumed of paths none of which was measured: only their comparison counts.
const RATE_ASSUMED: u64 = 1 << 30;

/// A peer in the table; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Debug)]
pub struct Peer {
    pub(super) paths: [Option<Path>; PATHS_PER_PEER_MAX],
    /// Paths of each transport, and all of them.
    transports: [u16; TRANSPORTS_MAX],
    all: u16,
    /// Paths of each rank, the best first.
    ranks: [u16; PATHS_PER_PEER_MAX],
    queues: [[Queue; TRANSPORTS_MAX + 1]; CLASSES],
    /// Which of them hold jobs, a bit each.
    filled: [u8; CLASSES],
    pub(super) shares: Shares,
    pub(super) load: Load,
    pub(super) open_bytes: u64,
    /// Jobs that have not ended, and those of them in a queue.
    pub(super) jobs: u32,
    pub(super) queued: u32,
    /// Retries it may still have, times [`SLICES_PER_RETRY`].
    budget: u32,
    /// When it last connected a path to us.
    pub(super) heard_at: Instant,
    pub(super) is_gone: bool,
    /// Paths in doubt.
    pub(super) doubts: u16,
    /// Paths to be dialled, and to be closed because nothing moves.
    pub(super) to_dial: u16,
    pub(super) to_close: u16,
    pub(super) next_due: Handle,
    pub(super) is_due: bool,
}

/// Jobs of one class that ask for one transport, in order of arrival.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    first: Handle,
    last: Handle,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    pub(super) asked: Asked,
    /// When the job was submitted, while nothing of it was posted.
    pub(super) waits_since: Option<Instant>,
    pub(super) is_write: bool,
    /// The job's number.
    pub(super) number: u64,
    pub(super) wanted: Wanted,
    pub(super) attempts: u8,
    pub(super) tried: u16,
    pub(super) last: u8,
}

/// What becomes of it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Post { path: PathId, limits: Limits, why: Why },
    Wait,
    Never(Cause),
}

enum Found {
    Path(PathId, Limits, Why),
    /// They work, but have no room now.
    Full,
    /// None of them works.
    None,
}

/// The paths in a mask, in order.
pub(super) fn bits(mut mask: u16) -> impl Iterator<Item = PathId> {
    core::iter::from_fn(move || {
        let path = PathId::new(mask.trailing_zeros() as usize)?;
        mask &= !path.bit();
        Some(path)
    })
}

impl Peer {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            paths: [None; PATHS_PER_PEER_MAX],
            transports: [0; TRANSPORTS_MAX],
            all: 0,
            ranks: [0; PATHS_PER_PEER_MAX],
            queues: [[Queue::default(); TRANSPORTS_MAX + 1]; CLASSES],
            filled: [0; CLASSES],
            shares: Shares::default(),
            load: Load::NONE,
            open_bytes: 0,
            jobs: 0,
            queued: 0,
            budget: RETRY_BUDGET_MAX * SLICES_PER_RETRY,
            heard_at: now,
            is_gone: false,
            doubts: 0,
            to_dial: 0,
            to_close: 0,
            next_due: Handle::default(),
            is_due: false,
        }
    }

    pub(super) fn declare(&mut self, path: PathId, spec: PathSpec) {
        match &mut self.paths[path.index()] {
            Some(known) => known.spec = spec,
            empty => *empty = Some(Path::new(spec)),
        }
        self.transports.iter_mut().for_each(|mask| *mask &= !path.bit());
        self.transports[spec.transport.index()] |= path.bit();
        self.all |= path.bit();
        let rank = |path: PathId| self.paths[path.index()].as_ref().map(|path| path.spec.rank);
        let (mut rest, mut ranks) = (self.all, [0; PATHS_PER_PEER_MAX]);
        for of_rank in &mut ranks {
            let best = bits(rest).filter_map(rank).min();
            *of_rank = bits(rest).filter(|path| rank(*path) == best).fold(0, |all, path| all | path.bit());
            rest &= !*of_rank;
        }
        self.ranks = ranks;
    }

    pub(super) fn path_mut(&mut self, path: PathId) -> Option<&mut Path> {
        self.paths[path.index()].as_mut()
    }

    pub(super) fn earn(&mut self) {
        self.budget = (self.budget + 1).min(RETRY_BUDGET_MAX * SLICES_PER_RETRY);
    }

    pub(super) fn spend(&mut self) -> bool {
        let left = self.budget.checked_sub(SLICES_PER_RETRY);
        self.budget = left.unwrap_or(self.budget);
        left.is_some()
    }

    fn candidates(&self, asked: Asked) -> u16 {
        match asked {
            Asked::Any => self.all,
            Asked::Only(transport) => self.transports[transport.index()],
        }
    }

    /// Whether writes of a job have to wait for a path to be fenced.
    fn waits_for_fence(&self, number: u64) -> bool {
        if on(Bug::TransferSkipsFence) {
            return false;
        }
        let mut in_doubt = bits(self.doubts).filter_map(|path| self.paths[path.index()].as_ref()?.doubt);
        in_doubt.any(|doubt| number >= doubt.before)
    }

    /// Which path a slice takes. Paths that are missing and worth a dial are noted in `to_dial`.
    pub(super) fn choose(&mut self, now: Instant, need: &Need, config: &Config, seen: &mut Explanation) -> Choice {
        if self.is_gone {
            return Choice::Never(Cause::PeerGone);
        }
        let all = self.candidates(need.asked);
        if all == 0 {
            return Choice::Never(Cause::NoPath);
        }
        if self.is_refused(now, all) {
            return Choice::Never(if need.asked == Asked::Any { Cause::PathLost } else { Cause::CannotConnect });
        }
        if need.is_write && self.waits_for_fence(need.number) {
            self.want_fences(now);
            return Choice::Wait;
        }
        if need.attempts > 0
            && let Some(choice) = self.choose_again(now, need, all, config, seen)
        {
            return choice;
        }
        match self.best(now, all, need.wanted, config, seen) {
            Found::Path(path, limits, why) => Choice::Post { path, limits, why },
            Found::Full => Choice::Wait,
            // What was asked for by name is used soon, or refused.
            Found::None if need.asked != Asked::Any => {
                let is_late = need.waits_since.is_some_and(|since| now.since(since) >= config.connect_deadline);
                match is_late || self.is_hopeless(now, all, config) {
                    true => Choice::Never(Cause::CannotConnect),
                    false => Choice::Wait,
                }
            }
            Found::None => Choice::Wait,
        }
    }

    /// The order of retries: the same path, another one of its transport, another transport. `None`: none of those that
    /// were not tried works.
    fn choose_again(
        &mut self,
        now: Instant,
        need: &Need,
        all: u16,
        config: &Config,
        seen: &mut Explanation,
    ) -> Option<Choice> {
        let last = PathId::new(usize::from(need.last))?;
        let transport = self.paths[last.index()].as_ref()?.spec.transport;
        let siblings = self.transports[transport.index()];
        let same = if need.attempts == 1 { last.bit() } else { 0 };
        for path in bits(all & need.tried) {
            seen.verdicts[path.index()] = Verdict::Tried;
        }
        let orders = [
            (same, Why::SamePath),
            (siblings & !need.tried & !same, Why::OtherPath),
            (!siblings & !need.tried, Why::OtherTransport),
        ];
        for (mask, why) in orders {
            match self.best(now, all & mask, need.wanted, config, seen) {
                Found::Path(path, limits, _) => return Some(Choice::Post { path, limits, why }),
                Found::Full => return Some(Choice::Wait),
                Found::None => {}
            }
        }
        None
    }

    /// The best of the paths in `mask`: the best rank of which one works, and of those the one that is done soonest.
    fn best(&mut self, now: Instant, mask: u16, wanted: Wanted, config: &Config, seen: &mut Explanation) -> Found {
        for at in 0..PATHS_PER_PEER_MAX {
            if self.ranks[at] == 0 {
                break;
            }
            let of_rank = self.ranks[at] & mask;
            if of_rank == 0 {
                continue;
            }
            let found = self.best_of_rank(now, of_rank, wanted, seen);
            self.want_beside(now, of_rank);
            if let Found::None = found {
                self.want_first(now, of_rank);
                continue;
            }
            for worse in self.ranks[at + 1..].iter().take_while(|worse| **worse != 0) {
                bits(worse & mask).for_each(|path| seen.verdicts[path.index()] = Verdict::WorseRank);
            }
            if let Found::Path(path, ..) = found {
                self.want_another(now, path, of_rank, config);
            }
            return found;
        }
        Found::None
    }

    /// Whether a path is not of the best transport that the job may take.
    pub(super) fn is_detour(&self, path: PathId, asked: Asked) -> bool {
        let all = self.candidates(asked);
        self.ranks.iter().find(|of_rank| **of_rank & all != 0).is_none_or(|best| best & path.bit() == 0)
    }

    fn best_of_rank(&mut self, now: Instant, mask: u16, wanted: Wanted, seen: &mut Explanation) -> Found {
        let (mut usable, mut is_full, mut first) = (0, false, None);
        for id in bits(mask) {
            let Some(path) = &self.paths[id.index()] else { continue };
            match path.room(now, wanted) {
                Ok(limits) if !path.breaker.is_closed() => {
                    seen.verdicts[id.index()] = Verdict::Chosen;
                    return Found::Path(id, limits, Why::Probe);
                }
                Ok(limits) => {
                    usable |= id.bit();
                    first.get_or_insert((id, limits));
                }
                Err(verdict) => {
                    seen.verdicts[id.index()] = verdict;
                    is_full |= verdict == Verdict::Full;
                }
            }
        }
        let Some((id, limits)) = first else { return if is_full { Found::Full } else { Found::None } };
        let (id, limits, why) = if usable == id.bit() {
            (id, limits, Why::Best)
        } else {
            let (id, limits) = self.soonest(now, usable, wanted, seen).unwrap_or((id, limits));
            (id, limits, Why::Soonest)
        };
        seen.verdicts[id.index()] = Verdict::Chosen;
        Found::Path(id, limits, why)
    }

    /// The path among `usable` ones that would be done first.
    fn soonest(&self, now: Instant, usable: u16, wanted: Wanted, seen: &mut Explanation) -> Option<(PathId, Limits)> {
        let paths = || bits(usable).filter_map(|path| self.paths[path.index()].as_ref());
        let newest = paths().map(|path| path.rate.measured_at()).max()?;
        let rate = paths().filter_map(|path| path.rate_beside(newest)).max().unwrap_or(RATE_ASSUMED);
        let mut best: Option<(PathId, Limits, u64)> = None;
        let mut margin = 0;
        for id in bits(usable) {
            let path = self.paths[id.index()].as_ref()?;
            let limits = path.room(now, wanted).ok()?;
            let bytes = match wanted {
                Wanted::Cut { bytes } => bytes.min(limits.bytes),
                Wanted::Whole(load) => load.bytes,
            };
            let rate = path.rate_beside(newest).unwrap_or(rate);
            let done_in = path.done_in(bytes, rate);
            seen.verdicts[id.index()] = Verdict::Slower;
            // Not for a little: a path that is warm stays in use. Little beside the slice, whatever is under way: a part of
            // that would pile up on the first of the paths.
            if best.is_none_or(|(_, _, soonest)| done_in < soonest - margin) {
                best = Some((id, limits, done_in));
                margin = scaled(bytes, 1_000_000_000, rate) / 8;
            }
        }
        best.map(|(id, limits, _)| (id, limits))
    }

    pub(super) fn want(&mut self, now: Instant, path: PathId) {
        if let Some(known) = self.path_mut(path)
            && known.wants_dial(now)
        {
            known.state = State::Down { is_dialling: true };
            self.to_dial |= path.bit();
        }
    }

    fn dialling(&self, path: PathId) -> Option<(Dialling, State)> {
        self.paths[path.index()].as_ref().map(|path| (path.spec.dialling, path.state))
    }

    /// None of these paths works: the first one is dialled, or one kept for busy times if that is not it.
    fn want_first(&mut self, now: Instant, mask: u16) {
        let is_down = |of: Dialling| {
            bits(mask)
                .find(|path| matches!(self.dialling(*path), Some((dialling, State::Down { .. })) if dialling == of))
        };
        if let Some(path) = is_down(Dialling::Ours).or_else(|| is_down(Dialling::OursWhenBusy)) {
            self.want(now, path);
        }
    }

    /// Other ways there are dialled whatever works.
    fn want_beside(&mut self, now: Instant, mask: u16) {
        for path in bits(mask) {
            if let Some((Dialling::OursBeside, State::Down { .. })) = self.dialling(path) {
                self.want(now, path);
            }
        }
    }

    /// The path taken is busy: one more of its transport is worth a dial.
    fn want_another(&mut self, now: Instant, taken: PathId, mask: u16, config: &Config) {
        let is_busy =
            |path: PathId| self.paths[path.index()].as_ref().is_some_and(|path| path.load.bytes >= config.spread_bytes);
        let is_spare =
            |path: &PathId| matches!(self.dialling(*path), Some((Dialling::OursWhenBusy, State::Down { .. })));
        if is_busy(taken)
            && let Some(path) = bits(mask).find(is_spare)
        {
            self.want(now, path);
        }
    }

    fn want_fences(&mut self, now: Instant) {
        for path in bits(self.doubts) {
            self.want(now, path);
        }
    }

    /// Whether nobody listens where the peer was: a dial was refused, and no path of `mask` is there, on its way, or due.
    fn is_refused(&self, now: Instant, mask: u16) -> bool {
        let mut paths = bits(mask).filter_map(|path| self.paths[path.index()].as_ref());
        let may_come = |path: &Path| {
            path.state != State::Down { is_dialling: false }
                || matches!(path.spec.dialling, Dialling::Ours | Dialling::OursBeside) && path.wants_dial(now)
        };
        let mut is_refused = false;
        let none_comes = paths.all(|path| {
            is_refused |= path.is_refused(now);
            !may_come(path)
        });
        none_comes && is_refused
    }

    fn is_hopeless(&self, now: Instant, mask: u16, config: &Config) -> bool {
        bits(mask).filter_map(|path| self.paths[path.index()].as_ref()).all(|path| {
            path.spec.dialling == Dialling::OursWhenBusy && !path.is_open()
                || path.is_hopeless(now, self.heard_at, config.connect_deadline)
        })
    }

    /// When something may change by time alone for what is queued.
    pub(super) fn next_wake(&self, now: Instant, config: &Config) -> Instant {
        let patience = self.heard_at + config.connect_deadline;
        let paths = self.paths.iter().flatten();
        let changes = paths.flat_map(|path| {
            [path.redial_at(now), path.breaker.opens_at(), path.full_until(), path.hopeless_at(config)]
        });
        changes.chain([patience]).filter(|at| *at > now).min().unwrap_or(Instant::NEVER)
    }

    /// Paths where nothing moves although the peer has another one that works.
    pub(super) fn find_stalls(&mut self, now: Instant, config: &Config) -> (u16, Instant) {
        let due = |path: &Path| path.last_progress + config.stall_span;
        let is_stuck = |path: &Path| path.is_open() && path.load.slices > 0 && due(path) <= now;
        let works = |path: &Path| path.is_open() && path.breaker.is_closed() && !is_stuck(path);
        let has_other = self.paths.iter().flatten().any(works);
        let (mut stalled, mut wake) = (0, Instant::NEVER);
        for (index, path) in self.paths.iter_mut().enumerate() {
            let Some(path) = path else { continue };
            if path.load.slices > 0 && path.is_open() && due(path) > now {
                wake = wake.min(due(path));
            }
            if has_other && is_stuck(path) {
                path.state = State::Closing;
                stalled |= PathId::new(index).map_or(0, PathId::bit);
            }
        }
        self.to_close |= stalled;
        (stalled, wake)
    }
}

/// The queues, whose links are in the jobs.
impl Peer {
    /// The queues of a class that hold jobs, a bit each.
    pub(super) fn filled(&self, class: Class) -> u8 {
        self.filled[class.index()]
    }

    pub(super) fn head(&self, class: Class, queue: u32) -> Handle {
        self.queues[class.index()][queue as usize].first
    }

    pub(super) fn enqueue<J>(&mut self, jobs: &mut Slab<Job, J>, key: Handle, at: Place)
    where
        J: AsRef<[Slot<Job>]> + AsMut<[Slot<Job>]>,
    {
        let Some(job) = jobs.get_mut(key).filter(|job| !job.is_queued) else { return };
        let class = job.spec.class;
        let at_queue = job.spec.asked.queue();
        if self.filled(class) == 0 {
            self.shares.on_active(class);
        }
        self.filled[class.index()] |= 1 << at_queue;
        self.queued += 1;
        let queue = &mut self.queues[class.index()][at_queue];
        job.is_queued = true;
        let neighbour = match at {
            Place::Back => {
                (job.queue.previous, job.queue.next) = (queue.last, Handle::default());
                core::mem::replace(&mut queue.last, key)
            }
            Place::Front => {
                (job.queue.previous, job.queue.next) = (Handle::default(), queue.first);
                core::mem::replace(&mut queue.first, key)
            }
        };
        match (jobs.get_mut(neighbour), at) {
            (Some(before), Place::Back) => before.queue.next = key,
            (Some(after), Place::Front) => after.queue.previous = key,
            (None, _) => *queue = Queue { first: key, last: key },
        }
    }

    pub(super) fn dequeue<J>(&mut self, jobs: &mut Slab<Job, J>, key: Handle)
    where
        J: AsRef<[Slot<Job>]> + AsMut<[Slot<Job>]>,
    {
        let Some(job) = jobs.get_mut(key).filter(|job| job.is_queued) else { return };
        job.is_queued = false;
        self.queued -= 1;
        let (links, of) = (job.queue, (job.spec.class.index(), job.spec.asked.queue()));
        let queue = &mut self.queues[of.0][of.1];
        match jobs.get_mut(links.previous) {
            Some(previous) => previous.queue.next = links.next,
            None => queue.first = links.next,
        }
        match jobs.get_mut(links.next) {
            Some(next) => next.queue.previous = links.previous,
            None => queue.last = links.previous,
        }
        if jobs.get(queue.first).is_none() {
            *queue = Queue::default();
            self.filled[of.0] &= !(1 << of.1);
        }
    }
}

/// Where in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Back,
    Front,
}
