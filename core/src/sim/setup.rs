//! What is simulated: the cluster, its policies, what is wrong with it.

use alloc::vec::Vec;

use super::memory::INSTANCES_MAX;
use crate::evict;
use crate::sched::cost::Profile;
use crate::sched::queue::Order;
use crate::sched::{admission, placement};
use crate::time::Duration;

/// A cluster and its policies. Everything has a default: 8 prefill and 8 decode nodes of the default profile, all of
/// `millpond`'s policies, a perfect index, no noise.
///
/// ```
/// use millpond_core::sim::Setup;
/// let mut setup = Setup::default();
/// (setup.prefill, setup.decode) = (3, 1);
/// assert_eq!(setup.check(), Ok(()));
/// setup.decode = 0;
/// assert_eq!(setup.check().unwrap_err().to_string(), "prefill nodes need decode nodes, and the reverse");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Setup {
    /// Prefill nodes.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// Coupled instances, which do both; then there are no others.
    pub coupled: usize,
    /// What coupled instances do beside a plain one.
    pub baseline: Baseline,
    /// Requests that a coupled instance works on together, at most; 1: one after the other. `None`: as many as fit.
    pub together: Option<u32>,
    /// What the nodes cost.
    pub profile: Profile,
    /// Who serves a request.
    pub placement: placement::Options,
    /// In which order prefill nodes serve their lines; `None`: as the placement has it.
    pub order: Option<Order>,
    /// Whether a request is served.
    pub admission: admission::Options,
    /// The deadlines of requests of no class.
    pub slo: admission::Slo,
    /// Requests with deadlines and a priority of their own; the rest has [`Setup::slo`] and priority 0.
    pub classes: Vec<Class>,
    /// Whether those who are refused come back.
    pub retries: Retries,
    /// Blocks that each node caches; `None`: without limit.
    pub cache_blocks: Option<u32>,
    /// One cache of all nodes' blocks together, which each reads like its own memory.
    pub pooled: bool,
    /// What goes when a cache is full.
    pub evict: evict::Kind,
    /// Nodes that compute one prompt together, in a pipeline of chunks; each such group is one prefill node.
    pub pipeline: u32,
    /// Tokens of a chunk of that pipeline, and of a coupled instance with chunked prefill.
    pub chunk: u32,
    /// From one stage of the pipeline to the next.
    pub hop: Duration,
    /// How late the router's index hears of blocks that came and went.
    pub staleness: Duration,
    /// Which share of that it never hears.
    pub event_loss: f64,
    /// Standard deviation of the time of a prefill beside its prediction, as a share of it.
    pub prefill_noise: f64,
    /// The same of a decode step.
    pub decode_noise: f64,
    /// Requests announce their output length, off by a factor whose logarithm has this standard deviation.
    pub hint_noise: Option<f64>,
    /// Tenants, none for no distinction.
    pub tenants: Vec<Tenant>,
    /// Seeds the noise, who is whose, and `random`.
    pub seed: u64,
    /// How often loads are sampled.
    pub sample: Duration,
}

/// One of those who send requests.
///
/// Example: [`Setup::tenants`] takes `Tenant { offered: 1.0, weight: 1.0 }`.
///
/// ```
/// use millpond_core::sim::{Setup, Tenant};
/// let mut setup = Setup::default();
/// setup.tenants = vec![Tenant { offered: 1.0, weight: 1.0 }, Tenant { offered: 9.0, weight: 1.0 }];
/// assert_eq!(setup.check(), Ok(()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tenant {
    /// Its part of the requests, beside the others'.
    pub offered: f64,
    /// Its weight in fair sharing.
    pub weight: f64,
}

/// Some of the requests.
///
/// ```
/// use millpond_core::sched::admission::Slo;
/// use millpond_core::sim::{Class, Setup};
/// let slo = Slo { ttft: millpond_core::time::Duration::from_secs(5), ..Slo::default() };
/// let mut setup = Setup::default();
/// setup.classes = vec![Class { share: 0.1, slo, priority: 1 }];
/// assert_eq!(setup.check(), Ok(()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Class {
    /// Its part of all requests, 0 to 1.
    pub share: f64,
    /// Their deadlines.
    pub slo: admission::Slo,
    /// Their priority.
    pub priority: u8,
}

/// Whether those who are refused come back when they were told to.
///
/// Example: [`Setup::retries`] takes `Retries { share: 0.5, tries: 2 }`.
///
/// ```
/// use millpond_core::sim::{Retries, Setup, run, trace::Synthetic};
/// let mut setup = Setup::default();
/// setup.retries = Retries { share: 1.0, tries: 3 };
/// let trace = Synthetic { requests: 10, ..Synthetic::default() }.trace();
/// assert!(run(&trace, &setup).unwrap().returns <= 30);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retries {
    /// The share of clients who do, 0 to 1.
    pub share: f64,
    /// How often each of them does, at most.
    pub tries: u32,
}

/// What a coupled instance does beside running prompts whole, one at a time, before decode steps: never both, as in vLLM 0.5.1.
///
/// ```
/// assert_eq!(millpond_core::sim::Baseline::default(), millpond_core::sim::Baseline::Plain);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Baseline {
    /// Nothing.
    #[default]
    Plain,
    /// It keeps the blocks of prompts and reuses them.
    PrefixCaching,
    /// It runs a chunk of a prompt along with each decode step.
    ChunkedPrefill,
}

impl Default for Setup {
    fn default() -> Self {
        let profile = Profile::default();
        Self {
            prefill: 8,
            decode: 8,
            coupled: 0,
            baseline: Baseline::default(),
            together: None,
            profile,
            placement: placement::Options::default(),
            order: None,
            admission: admission::Options::default(),
            slo: admission::Slo::default(),
            classes: Vec::new(),
            retries: Retries::default(),
            cache_blocks: Some(profile.cache_blocks),
            pooled: false,
            evict: evict::Kind::Lru,
            pipeline: 1,
            chunk: 2_048,
            hop: Duration::from_millis(1),
            staleness: Duration::ZERO,
            event_loss: 0.0,
            prefill_noise: 0.0,
            decode_noise: 0.0,
            hint_noise: None,
            tenants: Vec::new(),
            seed: 0,
            sample: Duration::from_secs(1),
        }
    }
}

/// Why there is no such cluster.
///
/// Example: [`Setup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SetupError {
    /// Prefill without decode, or the reverse, or nothing at all.
    Incomplete,
    /// Coupled instances beside others.
    Mixed,
    /// More than [`INSTANCES_MAX`] of a kind.
    TooMany,
    /// A share, shares that add up to more than all, a noise or a weight out of its range.
    OutOfRange,
    /// A pipeline without nodes, chunks without tokens, samples without time between them, or instances that work on nothing.
    Zero,
}

impl core::fmt::Display for SetupError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Incomplete => f.write_str("prefill nodes need decode nodes, and the reverse"),
            Self::Mixed => f.write_str("coupled instances are simulated alone; set prefill and decode to 0"),
            Self::TooMany => write!(f, "at most {INSTANCES_MAX} instances of a kind"),
            Self::OutOfRange => f.write_str("shares are 0 to 1, noises 0 or more, weights above 0"),
            Self::Zero => f.write_str("pipeline, chunk, sample and together are above 0"),
        }
    }
}

impl core::error::Error for SetupError {}

impl Setup {
    /// Whether there is such a cluster.
    ///
    /// # Errors
    /// What is wrong with it, the first thing found.
    pub fn check(&self) -> Result<(), SetupError> {
        let apart = self.prefill > 0 || self.decode > 0;
        if self.coupled > 0 && apart {
            return Err(SetupError::Mixed);
        }
        if self.coupled == 0 && (self.prefill == 0 || self.decode == 0) {
            return Err(SetupError::Incomplete);
        }
        if self.prefill.max(self.decode).max(self.coupled) > INSTANCES_MAX {
            return Err(SetupError::TooMany);
        }
        let share = |value: f64| (0.0..=1.0).contains(&value);
        let noise = |value: f64| value >= 0.0 && value.is_finite();
        let tenant = |tenant: &Tenant| tenant.offered > 0.0 && tenant.weight > 0.0;
        let noises = [self.prefill_noise, self.decode_noise, self.hint_noise.unwrap_or(0.0)];
        if !(share(self.event_loss)
            && share(self.retries.share)
            && self.classes.iter().all(|class| share(class.share))
            && share(self.classes.iter().map(|class| class.share).sum())
            && noises.into_iter().all(noise)
            && self.tenants.iter().all(tenant))
        {
            return Err(SetupError::OutOfRange);
        }
        if self.pipeline == 0 || self.chunk == 0 || self.together == Some(0) || self.sample == Duration::ZERO {
            return Err(SetupError::Zero);
        }
        Ok(())
    }
}
