//! Nodes that compute nothing: they take the time that a profile says, in scaled time, so that a router can be tried against a
//! large cluster in one process.
//!
//! Each node is a task with a clock of its own: what it does ends when the profile says so, and the next thing begins then, even
//! if the task is woken late; lateness of this machine does not add up. Prefill nodes keep a line in the order of the
//! router's ranks, a cache of blocks and one prompt at a time; decode nodes run batches and hold or refuse at their door.
//! What differs from `core::sim`: a transfer takes what was predicted when it was decided on, whatever begins after it.

mod decode;
mod prefill;
#[cfg(test)]
pub(crate) mod virtual_time;

use std::collections::HashMap;
use std::sync::Arc;

use futures::channel::{mpsc, oneshot};
use futures::future::{BoxFuture, FutureExt, ready};
use futures::stream::{self, BoxStream, StreamExt};
use millpond_core::hash::{RouteHash, RouteHasher};
use millpond_core::layout::{Dtype, Layout, Shape};
use millpond_core::sched::admission::{self, Ask, Slo};
use millpond_core::sched::block_cache::BlockCache;
use millpond_core::sched::conductor::{Decision, Learning};
use millpond_core::sched::cost::{Flows, Profile};
use millpond_core::sched::placement;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{GenerateRequest, Generated, Load, PrefillTimes, Started};
use parking_lot::Mutex;

use self::decode::Arrived;
use self::prefill::{Computed, Job};
use super::desk::Scheduling;
use super::link::{Link, Lost, Timers};
use super::service::{Known, Nodes, Router, RouterLimits};
use crate::metrics::Registry;
use crate::model::tokenizer::Bytes;
use crate::model::{Card, Limits};
use crate::runtime::Runtime;

/// The one token that synthetic nodes say.
const TOKEN: u32 = b'a' as u32;

/// A synthetic cluster.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Synthetic {
    /// Prefill nodes.
    pub(crate) prefill: usize,
    /// Decode nodes.
    pub(crate) decode: usize,
    /// What they cost.
    pub(crate) profile: Profile,
    /// Who serves a request.
    pub(crate) placement: placement::Options,
    /// Whether it is served.
    pub(crate) admission: admission::Options,
    /// The deadlines of all requests.
    pub(crate) slo: Slo,
    /// The decision log, if one is to be written.
    pub(crate) decisions: Option<std::path::PathBuf>,
}

/// What decode nodes measured between tokens of their answers, by request id: the mean of the longest tenth of the gaps, of
/// those that ended and were not taken yet. Clones are handles of the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gaps {
    by_id: Arc<Mutex<HashMap<String, Duration>>>,
}

impl Gaps {
    /// Takes out the measurement of a request that ended.
    pub(crate) fn take(&self, id: &str) -> Option<Duration> {
        self.by_id.lock().remove(id)
    }
}

impl Synthetic {
    /// The model that the nodes serve: any token below its vocabulary, with the profile's blocks.
    fn card(profile: &Profile) -> Card {
        let block_tokens = profile.block_tokens;
        let shape = Shape { layer_count: 1, kv_head_count: 1, head_dim: 64, dtype: Dtype::F16, block_tokens };
        Card {
            id: "synthetic".into(),
            revision: "synthetic".into(),
            layout: Layout::new(shape).expect("a block of one layer and one head is small"),
            limits: Limits { context_tokens: 1 << 21, vocabulary: u32::MAX, chunk_tokens: block_tokens },
            stop_tokens: Vec::new(),
            tokenizer: Arc::new(Bytes),
        }
    }

    /// Starts the nodes and a router over them, by the clock of `timers`; they end with the router. The metrics are the
    /// router's.
    ///
    /// # Errors
    /// There is no such cluster, or its decision log cannot be written.
    pub(crate) fn start(
        &self,
        timers: &Timers,
        spawn: &(dyn Fn(BoxFuture<'static, ()>) + Send + Sync),
        registry: &Registry,
    ) -> Result<(Router, Gaps), String> {
        let gaps = Gaps::default();
        let caches: Caches =
            (0..self.prefill).map(|_| Mutex::new(BlockCache::new(self.profile.cache_blocks))).collect();
        let mut prefills = Vec::new();
        for at in 0..self.prefill {
            let (jobs, received) = mpsc::unbounded();
            spawn(prefill::Node::new(self.profile, timers.clone(), Arc::clone(&caches), at).run(received).boxed());
            prefills.push(jobs);
        }
        let prefills: Arc<[mpsc::UnboundedSender<Job>]> = prefills.into();
        let known = |role: &str, at: usize, link: Arc<dyn Link>| Known { address: format!("{role}-{at}"), link };
        let mut decodes = Vec::new();
        for at in 0..self.decode {
            let (arrivals, received) = mpsc::unbounded();
            spawn(decode::Node::new(self, timers.clone(), gaps.clone()).run(received).boxed());
            let (prefills, timers) = (Arc::clone(&prefills), timers.clone());
            let link = Arc::new(Decode { prefills, arrivals, timers, profile: self.profile, slo: self.slo });
            decodes.push(known("decode", at, link));
        }
        let prefills = (0..self.prefill).map(|at| known("prefill", at, Arc::new(Idle))).collect();
        let mut scheduling = Scheduling::default();
        (scheduling.placement, scheduling.admission) = (self.placement, self.admission);
        (scheduling.slo, scheduling.order) = (self.slo, self.placement.policy.order());
        (scheduling.profile, scheduling.decisions) = (Some(self.profile), self.decisions.clone());
        scheduling.learning = Learning::Off;
        let mut limits = RouterLimits::default();
        // Who is admitted is for the admission to say, also where it admits everybody.
        limits.line.running_max = usize::from(u16::MAX);
        limits.deadline = Duration::from_secs(1_000_000);
        let card = Self::card(&self.profile);
        let nodes = Nodes { prefills, decodes, store: None };
        let router = Router::new(card, nodes, limits, &scheduling, timers.clone(), registry)?;
        // They are tasks of this process: nobody has to ask.
        router.presume_up();
        Ok((router, gaps))
    }
}

/// A clock that runs `scale` times as fast as the runtime's, from now on.
pub(crate) fn scaled<R: Runtime>(runtime: &R, scale: f64) -> Timers {
    let (clock, alarm, began) = (runtime.clone(), runtime.clone(), runtime.now());
    Timers {
        now: Arc::new(move || Instant::ZERO + times(clock.now().since(began), scale)),
        sleep: Arc::new(move |span| alarm.sleep(times(span, 1.0 / scale)).boxed()),
    }
}

/// A span that many times as long.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
pub(crate) fn times(span: Duration, factor: f64) -> Duration {
    Duration::from_nanos((span.as_nanos() as f64 * factor) as u64)
}

fn span(seconds: f64) -> Duration {
    times(Duration::from_secs(1), seconds)
}

type Caches = Arc<[Mutex<BlockCache>]>;

/// A prefill node, as far as a router asks it anything.
struct Idle;

impl Link for Idle {
    fn generate(&self, _: GenerateRequest, _: &Decision, _: Instant) -> BoxStream<'static, Result<Generated, Lost>> {
        stream::iter([Err(Lost::Refused { reason: "prefill nodes do not decode".into() })]).boxed()
    }

    fn load(&self, _: Instant) -> BoxFuture<'static, Result<Load, Lost>> {
        ready(Ok(Load::default())).boxed()
    }
}

/// A decode node, with the way to all prefill nodes.
struct Decode {
    prefills: Arc<[mpsc::UnboundedSender<Job>]>,
    arrivals: mpsc::UnboundedSender<Arrived>,
    timers: Timers,
    profile: Profile,
    slo: Slo,
}

impl Link for Decode {
    fn generate(
        &self,
        request: GenerateRequest,
        decision: &Decision,
        _: Instant,
    ) -> BoxStream<'static, Result<Generated, Lost>> {
        let (timers, profile, arrivals) = (self.timers.clone(), self.profile, self.arrivals.clone());
        let tokens = u32::try_from(request.tokens.len()).unwrap_or(u32::MAX);
        let block = usize::try_from(profile.block_tokens).unwrap_or(usize::MAX);
        let chain: Vec<RouteHash> = RouteHasher::default().chain(&request.tokens, block).collect();
        let (done, computed) = oneshot::channel();
        let job = Job { tokens, chain, decision: *decision, done };
        let gone = |what: &str| Lost::Decode { detail: format!("the synthetic {what} node has ended") };
        let at = usize::try_from(decision.placed.chosen.instance).unwrap_or(usize::MAX);
        let is_sent = self.prefills.get(at).is_some_and(|jobs| jobs.unbounded_send(job).is_ok());
        let (arrived, slo) = (timers.now(), self.slo);
        let priority = u8::try_from(request.priority).unwrap_or(u8::MAX);
        let ask = Ask { id: 0, tokens, hint: None, slo, tenant: 0, priority };
        let (listener, answers) = mpsc::unbounded();
        let (id, output) = (request.request_id, request.max_tokens);
        if !is_sent {
            return stream::iter([Err(gone("prefill"))]).boxed();
        }
        computed
            .map(move |computed| {
                let Ok(computed) = computed else { return stream::iter([Err(gone("prefill"))]).boxed() };
                let Computed { began, at, reused } = computed;
                let compute_ns = at.since(began).as_nanos();
                let prefill = Some(PrefillTimes { compute_ns, ..PrefillTimes::default() });
                let started = Some(Started { cached_tokens: reused, prefill, ..Started::default() });
                let arrives = async move {
                    // KV streams while it is computed.
                    let streamed = began + span(profile.link.seconds(profile.kv_len(tokens), Flows::default()));
                    let ready = if output > 1 { streamed.max(at) } else { at };
                    (timers.sleep)(ready.since(timers.now())).await;
                    let sent = Arrived { id, ask, output, arrived, prefilled: at, ready, listener };
                    arrivals.unbounded_send(sent).err().map(|_| Err(gone("decode")))
                };
                stream::iter([Ok(Generated { started, ..Generated::default() })])
                    .chain(stream::once(arrives).filter_map(ready))
                    .chain(answers)
                    .boxed()
            })
            .flatten_stream()
            .boxed()
    }

    fn load(&self, _: Instant) -> BoxFuture<'static, Result<Load, Lost>> {
        ready(Ok(Load::default())).boxed()
    }
}
