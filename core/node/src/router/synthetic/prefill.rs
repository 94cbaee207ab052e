//! A prefill node: a line, a cache of blocks, one prompt at a time.

use std::collections::{HashMap, HashSet};

use futures::channel::{mpsc, oneshot};
use futures::future::{Either, select};
use futures::stream::StreamExt;
use millpond_core::hash::RouteHash;
use millpond_core::sched::block_cache::Changes;
use millpond_core::sched::conductor::Decision;
use millpond_core::sched::cost::{Profile, Work};
use millpond_core::sched::queue::{Line, Waiting};
use millpond_core::time::{Duration, Instant};

use super::{Caches, Timers, span};

/// How long an idle node sleeps at most.
const IDLE: Duration = Duration::from_secs(3_600);

/// A prompt to be computed.
pub(super) struct Job {
    pub(super) tokens: u32,
    /// Its whole blocks.
    pub(super) chain: Vec<RouteHash>,
    pub(super) decision: Decision,
    pub(super) done: oneshot::Sender<Computed>,
}

/// A prompt that is computed.
#[derive(Clone, Copy)]
pub(super) struct Computed {
    pub(super) began: Instant,
    pub(super) at: Instant,
    pub(super) reused: u32,
}

/// A job in the line.
struct Waits {
    job: Job,
    work: Work,
    /// When it came, and its prefix with it.
    loaded: Instant,
    /// Who computes a part of its prefix here.
    after: Option<u64>,
}

struct Running {
    id: u64,
    job: Job,
    computed: Computed,
}

pub(super) struct Node {
    profile: Profile,
    timers: Timers,
    caches: Caches,
    at: usize,
    line: Line,
    jobs: HashMap<u64, Waits>,
    /// Those whose prompt is not computed.
    unfinished: HashSet<u64>,
    running: Option<Running>,
    /// When it had nothing to do any more.
    free: Instant,
    next_id: u64,
    changes: Changes,
}

impl Node {
    pub(super) fn new(profile: Profile, timers: Timers, caches: Caches, at: usize) -> Self {
        Self {
            profile,
            timers,
            caches,
            at,
            line: Line::default(),
            jobs: HashMap::new(),
            unfinished: HashSet::new(),
            running: None,
            free: Instant::ZERO,
            next_id: 0,
            changes: Changes::default(),
        }
    }

    /// Works until nobody can send it anything any more.
    pub(super) async fn run(mut self, mut jobs: mpsc::UnboundedReceiver<Job>) {
        loop {
            let now = self.timers.now();
            self.advance(now);
            let wake = self.wake().unwrap_or(now + IDLE);
            match select(jobs.next(), (self.timers.sleep)(wake.since(now))).await {
                Either::Left((Some(job), _)) => self.on_job(self.timers.now(), job),
                Either::Left((None, _)) => return,
                Either::Right(_) => {}
            }
        }
    }

    /// When something happens by itself.
    fn wake(&self) -> Option<Instant> {
        match &self.running {
            Some(running) => Some(running.computed.at),
            None => self.jobs.values().filter(|waits| waits.after.is_none()).map(|waits| waits.loaded).min(),
        }
    }

    fn on_job(&mut self, now: Instant, job: Job) {
        let chosen = job.decision.placed.chosen;
        let block = self.profile.block_tokens;
        let whole = |matched: u32| matched.min(job.tokens / block) * block;
        let (id, source) = (self.next_id, chosen.source.and_then(|source| usize::try_from(source).ok()));
        self.next_id += 1;
        // What was believed to be there may be gone: then less is pulled, and more computed.
        let theirs = source.filter(|source| *source != self.at).and_then(|source| self.caches.get(source));
        let theirs = theirs.map_or(0, |cache| whole(cache.lock().matched(&job.chain)));
        let mut cache = self.caches[self.at].lock();
        let local = whole(cache.matched(&job.chain));
        let work = Work::of_prompt(job.tokens, local.max(theirs.min(local + chosen.pulled)));
        let after = cache.maker(&job.chain, local / block);
        cache.admit(now, &job.chain, id, now + chosen.ttft, &mut self.changes);
        drop(cache);
        let loaded = if chosen.pulled > 0 { now + chosen.transfer } else { now };
        self.line.push(Waiting { id, rank: job.decision.rank, cost: chosen.prefill });
        self.unfinished.insert(id);
        self.jobs.insert(id, Waits { job, work, loaded, after });
    }

    /// Does what is over by `now`.
    fn advance(&mut self, now: Instant) {
        loop {
            if let Some(running) = self.running.take() {
                if running.computed.at > now {
                    self.running = Some(running);
                    return;
                }
                self.finish(running);
            }
            if !self.begin(now) {
                return;
            }
        }
    }

    fn finish(&mut self, running: Running) {
        let Running { id, job, computed } = running;
        self.free = computed.at;
        self.caches[self.at].lock().on_computed(computed.at, &job.chain, id);
        self.unfinished.remove(&id);
        for waits in self.jobs.values_mut().filter(|waits| waits.after == Some(id)) {
            (waits.after, waits.loaded) = (None, waits.loaded.max(computed.at));
        }
        // Whoever asked may have left.
        let _ = job.done.send(computed);
    }

    /// Begins the first in the line that has all it needs; whether there is one.
    fn begin(&mut self, now: Instant) -> bool {
        let jobs = &self.jobs;
        let Some(next) = self.line.take(|next| jobs[&next.id].loaded <= now && jobs[&next.id].after.is_none()) else {
            return false;
        };
        let Some(Waits { job, work, loaded, .. }) = self.jobs.remove(&next.id) else { return false };
        let began = self.free.max(loaded);
        // Whoever asked has left: nothing is computed.
        let took = if job.done.is_canceled() { Duration::ZERO } else { span(self.profile.prefill.seconds(work)) };
        let computed = Computed { began, at: began + took, reused: work.prefix };
        self.running = Some(Running { id: next.id, job, computed });
        true
    }
}
