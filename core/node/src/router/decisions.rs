//! The log of a router's decisions, as lines of JSON: what it was set up with, then everything its conductor was told.
//!
//! A conductor decides by its inputs only, so [`replay`] gets the same decisions out of the log; each arrival's line carries
//! the hash over all decisions up to it, and the first that differs is named. Numbers with a fraction are text, so that they are
//! read back bit for bit. A line is written before the decision has any effect; a log that cannot be written any more ends.

use std::fs::File;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

use millpond_core::hash::RouteHash;
use millpond_core::sched::admission::{self, Slo};
use millpond_core::sched::conductor::{Arrival, Conductor, Learning, Measured, Setup, Stored};
use millpond_core::sched::cost::{Decode, Link, Prefill, Work};
use millpond_core::sched::placement;
use millpond_core::sched::queue::Order;
use millpond_core::sched::spread::Near;
use millpond_core::time::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// Everything that a conductor is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Input {
    /// A request came, and what was decided about all up to it.
    Arrived(Arrived),
    /// A prompt is computed; nanoseconds that took, for so many new tokens after so many reused ones.
    Prefilled { id: u64, measured: Option<(u64, u32, u32)> },
    /// A request joined its batch.
    Joined { id: u64, steps: u64 },
    /// A request is over.
    Left { id: u64, tokens: Option<u32> },
    /// A request was refused by its decode node.
    Late { id: u64, name: u64 },
    /// A prefill node has nothing any more.
    Cleared { prefill: u32 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Arrived {
    id: u64,
    name: u64,
    tokens: u32,
    blocks: Vec<u64>,
    /// What the store had of them, and the last event that was known.
    stored: Option<(u32, u64)>,
    tenant: u32,
    hint: Option<u32>,
    ttft_slo_ns: u64,
    tbt_slo_ns: u64,
    priority: u8,
    is_retry: bool,
    prefill_down: Vec<u32>,
    decode_down: Vec<u32>,
    steps: Vec<u64>,
    /// The hash over all decisions, this one among them.
    decided: u64,
}

#[derive(Serialize, Deserialize)]
struct Line {
    /// Nanoseconds of the router's clock.
    at: u64,
    #[serde(flatten)]
    input: Input,
}

impl Arrived {
    pub(super) fn new(arrival: &Arrival, decided: u64) -> Self {
        Self {
            id: arrival.id,
            name: arrival.name,
            tokens: arrival.tokens,
            blocks: arrival.blocks.iter().map(|block| block.0).collect(),
            stored: arrival.stored.map(|stored| (stored.blocks, stored.version)),
            tenant: arrival.tenant,
            hint: arrival.hint,
            ttft_slo_ns: arrival.slo.ttft.as_nanos(),
            tbt_slo_ns: arrival.slo.tbt.as_nanos(),
            priority: arrival.priority,
            is_retry: arrival.is_retry,
            prefill_down: arrival.prefill_down.clone(),
            decode_down: arrival.decode_down.clone(),
            steps: arrival.steps.clone(),
            decided,
        }
    }

    fn arrival(self) -> Arrival {
        let slo = Slo { ttft: Duration::from_nanos(self.ttft_slo_ns), tbt: Duration::from_nanos(self.tbt_slo_ns) };
        Arrival {
            id: self.id,
            name: self.name,
            tokens: self.tokens,
            blocks: self.blocks.into_iter().map(RouteHash).collect(),
            stored: self.stored.map(|(blocks, version)| Stored { blocks, version }),
            tenant: self.tenant,
            hint: self.hint,
            slo,
            priority: self.priority,
            is_retry: self.is_retry,
            prefill_down: self.prefill_down,
            decode_down: self.decode_down,
            steps: self.steps,
        }
    }
}

/// What was measured, from whole nanoseconds.
pub(super) fn measured((nanos, new, prefix): (u64, u32, u32)) -> Measured {
    Measured { work: Work { new, prefix }, seconds: Duration::from_nanos(nanos).as_secs_f64() }
}

/// The first line of a log.
#[derive(Serialize, Deserialize)]
struct Head {
    /// Of this format.
    version: u32,
    prefill: usize,
    decode: usize,
    block_tokens: u32,
    kv_bytes_per_token: u64,
    /// `Prefill`, `Decode` and `Link`, in the order of their fields.
    costs: Vec<String>,
    cache_blocks: u32,
    decode_tokens_max: u64,
    learning: bool,
    placement: String,
    /// Threshold and what pushing back counts.
    placement_options: Vec<String>,
    near: (u32, u64),
    /// Patience, and the limit in nanoseconds; nothing for first come, first served.
    short_first: Option<(String, u64)>,
    admission: String,
    /// Level and bonus.
    admission_options: Vec<String>,
    hold_ns: u64,
    turns: u32,
    first_turn: u64,
    /// Weights.
    tenants: Vec<String>,
}

const VERSION: u32 = 2;

fn exact<const N: usize>(values: [f64; N]) -> Vec<String> {
    values.map(|value| format!("{value:?}")).into()
}

/// The numbers of `exact`.
fn numbers<const N: usize>(texts: &[String]) -> Option<[f64; N]> {
    let values: Option<Vec<f64>> = texts.iter().map(|text| text.parse().ok()).collect();
    values?.try_into().ok()
}

impl Head {
    fn new(setup: &Setup) -> Self {
        let profile = &setup.profile;
        let (prefill, decode, link) = (profile.prefill, profile.decode, profile.link);
        let costs = [
            prefill.fixed,
            prefill.linear,
            prefill.quadratic,
            decode.fixed,
            decode.per_request,
            decode.per_token,
            link.bytes_per_second,
            link.latency,
        ];
        let placement = setup.placement;
        Self {
            version: VERSION,
            prefill: setup.prefill,
            decode: setup.decode,
            block_tokens: profile.block_tokens,
            kv_bytes_per_token: profile.kv_bytes_per_token,
            costs: exact(costs),
            cache_blocks: setup.cache_blocks,
            decode_tokens_max: profile.decode_tokens_max,
            learning: setup.learning == Learning::On,
            placement: placement.policy.name().into(),
            placement_options: exact([placement.threshold, placement.push_back]),
            near: (placement.near.parts_per_thousand, placement.near.slack),
            short_first: match setup.order {
                Order::ShortFirst { patience, limit } => Some((format!("{patience:?}"), limit.as_nanos())),
                _ => None,
            },
            admission: setup.admission.policy.name().into(),
            admission_options: exact([setup.admission.level, setup.admission.bonus]),
            hold_ns: setup.admission.hold.as_nanos(),
            turns: setup.admission.turns,
            first_turn: setup.first_turn,
            tenants: setup.tenants.iter().map(|weight| format!("{weight:?}")).collect(),
        }
    }

    fn setup(&self) -> Option<Setup> {
        let mut setup = Setup::new(self.prefill, self.decode);
        let profile = &mut setup.profile;
        (profile.block_tokens, profile.kv_bytes_per_token) = (self.block_tokens, self.kv_bytes_per_token);
        profile.decode_tokens_max = self.decode_tokens_max;
        let [fixed, linear, quadratic, step, per_request, per_token, bytes_per_second, latency] = numbers(&self.costs)?;
        profile.prefill = Prefill { fixed, linear, quadratic };
        profile.decode = Decode { fixed: step, per_request, per_token };
        profile.link = Link { bytes_per_second, latency };
        setup.cache_blocks = self.cache_blocks;
        setup.learning = if self.learning { Learning::On } else { Learning::Off };
        setup.placement = placement::Options::default();
        setup.placement.policy = self.placement.parse().ok()?;
        [setup.placement.threshold, setup.placement.push_back] = numbers(&self.placement_options)?;
        setup.placement.near = Near { parts_per_thousand: self.near.0, slack: self.near.1 };
        setup.order = match &self.short_first {
            Some((patience, limit)) => {
                Order::ShortFirst { patience: patience.parse().ok()?, limit: Duration::from_nanos(*limit) }
            }
            None => Order::Fifo,
        };
        setup.admission = admission::Options::default();
        setup.admission.policy = self.admission.parse().ok()?;
        [setup.admission.level, setup.admission.bonus] = numbers(&self.admission_options)?;
        setup.admission.hold = Duration::from_nanos(self.hold_ns);
        setup.admission.turns = self.turns;
        setup.first_turn = self.first_turn;
        let weights: Option<Vec<f64>> = self.tenants.iter().map(|weight| weight.parse().ok()).collect();
        setup.tenants = weights.filter(|weights| weights.iter().all(|weight| *weight > 0.0))?;
        Some(setup)
    }
}

/// Writes a log.
pub(super) struct Writer {
    file: File,
    path: PathBuf,
    is_broken: bool,
}

impl Writer {
    /// A log in a new file; one that was there is replaced.
    pub(super) fn create(path: &Path, setup: &Setup) -> std::io::Result<Self> {
        let mut writer = Self { file: File::create(path)?, path: path.to_owned(), is_broken: false };
        let mut head = serde_json::to_vec(&Head::new(setup))?;
        head.push(b'\n');
        writer.file.write_all(&head)?;
        Ok(writer)
    }

    /// Appends an input. After the first that could not be written none is: a log with holes replays to something else.
    pub(super) fn write(&mut self, now: Instant, input: Input) {
        if self.is_broken {
            return;
        }
        let written = serde_json::to_vec(&Line { at: now.as_nanos(), input }).map_err(std::io::Error::from);
        let written = written.and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)
        });
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "the decision log ends here");
            self.is_broken = true;
        }
    }
}

/// What a log came to.
///
/// ```
/// use millpond_node::router::{Mismatch, replay};
/// assert!(matches!(replay(&b""[..]), Err(Mismatch::Head { .. })));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// Decisions.
    pub decisions: u64,
    /// The hash over all of them.
    pub hash: u64,
}

/// Why a log does not replay.
///
/// Example: [`Replayed`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// It cannot be read.
    #[error("the log cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Its first line does not say how the router was set up.
    #[error("line 1 does not say how the router was set up: {reason}")]
    Head {
        /// What is wrong with it.
        reason: String,
    },
    /// A line is none of this log.
    #[error("line {line}: {source}")]
    Line {
        /// Which.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Another decision was taken than the log has.
    #[error("line {line}: decision {decision} has the hash {found:016x}, the log says {logged:016x}")]
    Differs {
        /// Which line.
        line: usize,
        /// Which decision, from 1.
        decision: u64,
        /// The hash now.
        found: u64,
        /// The hash then.
        logged: u64,
    },
}

/// Takes all decisions of a log again and compares each.
///
/// # Errors
/// [`Mismatch`]: the first decision that differs, or a line that makes no sense. A last line that was cut off by the end of
/// its process is one of those.
pub fn replay(log: impl BufRead) -> Result<Replayed, Mismatch> {
    let mut lines = log.lines();
    let wrong = |reason: String| Mismatch::Head { reason };
    let head = lines.next().ok_or_else(|| wrong("the log is empty".into()))??;
    let head: Head = serde_json::from_str(&head).map_err(|error| wrong(error.to_string()))?;
    if head.version != VERSION {
        return Err(wrong(format!("its version is {}, not {VERSION}", head.version)));
    }
    let setup = head.setup().ok_or_else(|| wrong("a policy or number is unknown".into()))?;
    let mut conductor = Conductor::new(setup);
    for (line, text) in (2..).zip(lines) {
        let Line { at, input } = serde_json::from_str(&text?).map_err(|source| Mismatch::Line { line, source })?;
        let now = Instant::from_nanos(at);
        match input {
            Input::Arrived(arrived) => {
                let logged = arrived.decided;
                conductor.on_arrival(now, &arrived.arrival());
                let (decision, found) = (conductor.count(), conductor.hash());
                if found != logged {
                    return Err(Mismatch::Differs { line, decision, found, logged });
                }
            }
            Input::Prefilled { id, measured: taken } => conductor.on_prefilled(now, id, taken.map(measured)),
            Input::Joined { id, steps } => conductor.on_joined(now, id, steps),
            Input::Left { id, tokens } => conductor.on_left(now, id, tokens),
            Input::Late { id, name } => {
                conductor.on_late(now, id, name);
            }
            Input::Cleared { prefill } => conductor.on_cleared(prefill),
        }
    }
    Ok(Replayed { decisions: conductor.count(), hash: conductor.hash() })
}
