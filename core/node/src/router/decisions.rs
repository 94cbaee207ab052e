//! The log of a router's decisions, as lines of JSON: what it was set up with, then everything its conductor was told.
//!
//! A conductor decides by its inputs only, so [`replay`] gets the same decisions out of the log; each arrival's line carries
//! the hash over all decisions up to it, and the first that differs is named. Lines are written under the lock of the
//! conductor: they are in the order in which it was told, whatever the threads. Each ends with a checksum over it and all
//! before it, so a byte that was altered is found in its line, and a line of its own ends a log, so one that was cut off
//! says so. Numbers with a fraction are text, so that they are read back bit for bit. A line is written before the decision
//! has any effect; a log that cannot be written any more ends.

use std::fs::File;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest};
use millpond_core::hash::RouteHash;
use millpond_core::sched::admission::{self, Slo};
use millpond_core::sched::colocate::{Ability, Colocate};
use millpond_core::sched::conductor::{Arrival, Conductor, Decision, Learning, Measured, Setup, Stored};
use millpond_core::sched::cost::{Decode, Link, Prefill, Work};
use millpond_core::sched::placement;
use millpond_core::sched::queue::Order;
use millpond_core::sched::spread::Near;
use millpond_core::time::{Duration, Instant};
use serde::{Deserialize, Serialize};

use super::desk::{explained, named};

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
    /// The log ends, after so many decisions.
    Ended { decisions: u64 },
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
    colocate: String,
    /// Whether decode nodes compute prompts.
    decode_able: bool,
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

const VERSION: u32 = 3;

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
            colocate: placement.colocate.name().into(),
            decode_able: setup.ability == Ability::Able,
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
        setup.placement.colocate = self.colocate.parse::<Colocate>().ok()?;
        setup.ability = if self.decode_able { Ability::Able } else { Ability::Unable };
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

/// Seals the lines of a log: each ends with a checksum over it and all before it.
#[derive(Default)]
pub(crate) struct Seal {
    sum: u32,
}

/// How the checksum begins; eight digits and a brace with a quote follow.
const SUM: &str = ",\"sum\":\"";
const SUM_LEN: usize = SUM.len() + 8 + 2;

impl Seal {
    /// Takes an object of JSON; its line.
    pub(crate) fn line(&mut self, object: &str) -> String {
        let body = object.strip_suffix('}').unwrap_or(object);
        let sum = self.on(body.as_bytes());
        format!("{body}{SUM}{sum:08x}\"}}\n")
    }

    /// The object of a line, without its end; `None` if it is not the one that follows those before.
    pub(crate) fn open(&mut self, line: &[u8]) -> Option<String> {
        let (body, sum) = line.split_at_checked(line.len().checked_sub(SUM_LEN)?)?;
        let expected = format!("{SUM}{:08x}\"}}", self.on(body));
        let body = std::str::from_utf8(body).ok().filter(|_| sum == expected.as_bytes())?;
        Some(format!("{body}}}"))
    }

    fn on(&mut self, body: &[u8]) -> u32 {
        let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
        digest.update(&self.sum.to_le_bytes());
        digest.update(body);
        // A 32-bit algorithm: the upper half is always zero.
        self.sum = u32::try_from(digest.finalize() & u64::from(u32::MAX)).unwrap_or_default();
        self.sum
    }
}

/// Writes a log; dropping it ends the log.
pub(super) struct Writer {
    file: File,
    path: PathBuf,
    seal: Seal,
    /// When the last input came, and how many decisions there were.
    last: Instant,
    decisions: u64,
    is_broken: bool,
}

impl Writer {
    /// A log in a new file. One that was there, perhaps of a router that died, is kept beside it under its name and `.1`.
    pub(super) fn create(path: &Path, setup: &Setup) -> std::io::Result<Self> {
        if std::fs::metadata(path).is_ok_and(|there| there.is_file() && there.len() > 0) {
            let mut kept = path.as_os_str().to_owned();
            kept.push(".1");
            std::fs::rename(path, &kept)?;
            tracing::info!(kept = %Path::new(&kept).display(), "the decision log of an earlier run is kept");
        }
        let file = File::create(path)?;
        let (seal, last) = (Seal::default(), Instant::ZERO);
        let mut writer = Self { file, path: path.to_owned(), seal, last, decisions: 0, is_broken: false };
        let head = writer.seal.line(&serde_json::to_string(&Head::new(setup))?);
        writer.file.write_all(head.as_bytes())?;
        Ok(writer)
    }

    /// Where it is, and whether all of it could be written.
    pub(super) fn view(&self) -> serde_json::Value {
        serde_json::json!({"path": self.path.display().to_string(), "is_whole": !self.is_broken})
    }

    /// Appends an input. After the first that could not be written none is: a log with holes replays to something else.
    pub(super) fn write(&mut self, now: Instant, input: Input) {
        if self.is_broken {
            return;
        }
        (self.last, self.decisions) = (now, self.decisions + u64::from(matches!(input, Input::Arrived(_))));
        let written = serde_json::to_string(&Line { at: now.as_nanos(), input }).map_err(std::io::Error::from);
        let written = written.and_then(|object| self.file.write_all(self.seal.line(&object).as_bytes()));
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "the decision log ends here");
            self.is_broken = true;
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.write(self.last, Input::Ended { decisions: self.decisions });
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
    /// A line is not the one that was written after those before it.
    #[error(
        "line {line} was altered, or lines before it are missing: its checksum does not follow from those before it"
    )]
    Altered {
        /// Which, from 1.
        line: usize,
    },
    /// A line is cut off.
    #[error("line {line} is cut off in its middle; the {decisions} decisions before it replay exactly")]
    Torn {
        /// Which, from 1.
        line: usize,
        /// Decisions before it.
        decisions: u64,
    },
    /// A line is none of this log.
    #[error("line {line}: {source}")]
    Line {
        /// Which, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Another decision was taken than the log has.
    #[error("line {line}: decision {decision} has the hash {found:016x}, the log says {logged:016x}")]
    Differs {
        /// Which line, from 1.
        line: usize,
        /// Which decision, from 1.
        decision: u64,
        /// The hash now.
        found: u64,
        /// The hash then.
        logged: u64,
    },
    /// The line that ends every log is missing.
    #[error(
        "the log ends after line {line} without its end: what followed was cut off, or its router was killed or still \
         runs; the {decisions} decisions that are there replay exactly"
    )]
    Unfinished {
        /// The last line, from 1.
        line: usize,
        /// Decisions up to it.
        decisions: u64,
    },
}

/// Takes all decisions of a log again and compares each.
///
/// # Errors
/// [`Mismatch`]: the first line that was altered, does not follow or makes no sense, or whose decision differs.
pub fn replay(log: impl BufRead) -> Result<Replayed, Mismatch> {
    Replay::new(log)?.run(|_, _, _| ())
}

/// Takes all decisions of a log again, and explains those about requests of the client's name `id`.
///
/// # Errors
/// Like [`replay`].
pub fn explain(log: impl BufRead, id: &str) -> Result<(Replayed, Vec<serde_json::Value>), Mismatch> {
    let (name, mut found) = (named(id), Vec::new());
    let replayed = Replay::new(log)?.run(|arrival, conductor, decision| {
        if arrival.name == name {
            let mut value = explained(conductor.record(), decision, conductor.hash());
            (value["decision"], value["tokens"]) = (conductor.count().into(), arrival.tokens.into());
            found.push(value);
        }
    })?;
    Ok((replayed, found))
}

/// A log that is being replayed.
struct Replay<L> {
    log: L,
    seal: Seal,
    conductor: Conductor,
    /// Lines that were read.
    line: usize,
}

impl<L: BufRead> Replay<L> {
    /// Reads the head.
    fn new(mut log: L) -> Result<Self, Mismatch> {
        let wrong = |reason: String| Mismatch::Head { reason };
        let mut line = Vec::new();
        if log.read_until(b'\n', &mut line)? == 0 {
            return Err(wrong("the log is empty".into()));
        }
        let mut seal = Seal::default();
        let text = line.strip_suffix(b"\n").ok_or(Mismatch::Torn { line: 1, decisions: 0 })?;
        let opened = seal.open(text);
        // A log of another version may be sealed in another way, and says so itself.
        let version = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).ok()?["version"].as_u64();
        match version(text) {
            Some(version) if version != u64::from(VERSION) => {
                return Err(wrong(format!("its version is {version}, not {VERSION}")));
            }
            _ => {}
        }
        let head: Head = match opened {
            Some(object) => serde_json::from_str(&object).map_err(|error| wrong(error.to_string()))?,
            None if version(text).is_some() => return Err(Mismatch::Altered { line: 1 }),
            None => return Err(wrong("it is no line of a decision log".into())),
        };
        let setup = head.setup().ok_or_else(|| wrong("a policy or number is unknown".into()))?;
        Ok(Self { log, seal, conductor: Conductor::new(setup), line: 1 })
    }

    /// The next line; `None` after the last.
    fn next(&mut self) -> Result<Option<Line>, Mismatch> {
        let mut text = Vec::new();
        if self.log.read_until(b'\n', &mut text)? == 0 {
            return Ok(None);
        }
        self.line += 1;
        let (line, decisions) = (self.line, self.conductor.count());
        let text = text.strip_suffix(b"\n").ok_or(Mismatch::Torn { line, decisions })?;
        let object = self.seal.open(text).ok_or(Mismatch::Altered { line })?;
        serde_json::from_str(&object).map(Some).map_err(|source| Mismatch::Line { line, source })
    }

    fn run(mut self, mut on: impl FnMut(&Arrival, &Conductor, &Decision)) -> Result<Replayed, Mismatch> {
        while let Some(Line { at, input }) = self.next()? {
            let (now, conductor) = (Instant::from_nanos(at), &mut self.conductor);
            match input {
                Input::Arrived(arrived) => {
                    let logged = arrived.decided;
                    let arrival = arrived.arrival();
                    let decision = conductor.on_arrival(now, &arrival);
                    let (count, found) = (conductor.count(), conductor.hash());
                    if found != logged {
                        return Err(Mismatch::Differs { line: self.line, decision: count, found, logged });
                    }
                    on(&arrival, conductor, &decision);
                }
                Input::Prefilled { id, measured: taken } => conductor.on_prefilled(now, id, taken.map(measured)),
                Input::Joined { id, steps } => conductor.on_joined(now, id, steps),
                Input::Left { id, tokens } => conductor.on_left(now, id, tokens),
                Input::Late { id, name } => {
                    conductor.on_late(now, id, name);
                }
                Input::Cleared { prefill } => conductor.on_cleared(prefill),
                Input::Ended { .. } => {
                    let (decisions, hash) = (conductor.count(), conductor.hash());
                    return match self.next()? {
                        None => Ok(Replayed { decisions, hash }),
                        Some(_) => Err(Mismatch::Altered { line: self.line }),
                    };
                }
            }
        }
        Err(Mismatch::Unfinished { line: self.line, decisions: self.conductor.count() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_written_any_more_says_so() {
        let path = std::env::temp_dir().join(format!("millpond-full-log-{}", std::process::id()));
        let mut writer = Writer::create(&path, &Setup::new(1, 1)).unwrap();
        assert_eq!(writer.view()["is_whole"], true);
        writer.file = File::options().write(true).open("/dev/full").unwrap();
        writer.write(Instant::ZERO, Input::Ended { decisions: 0 });
        assert_eq!(writer.view()["is_whole"], false);
        std::fs::remove_file(&path).unwrap();
    }
}
