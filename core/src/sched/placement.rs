//! Which prefill and which decode instance serve a request, and how much of its prefix is computed, reused or pulled.
//!
//! A decision is a function of a [`Policy`], a request and what is known of each instance ([`PrefillView`],
//! [`DecodeView`]); the caller keeps those up to date and says what it chose to the instances. Nothing is known here of
//! blocks or addresses.
//!
//! Every candidate's time to first token is predicted in nanoseconds. The paper's policies add what the line takes, what
//! the transfer takes and what the prefill takes. `millpond` lets the transfer run while the request waits, chooses how
//! much to pull without a threshold, and counts what its choice costs those it pushes back.
//!
//! What the papers leave open, decided here:
//! - An instance without any matched block pulls if anybody has one; if nobody has, there is nothing to pull.
//! - At the threshold exactly the two published variants differ: `mooncake_fast25` recomputes, `mooncake_arxiv` pulls.
//! - A partial last block never counts; a full hit still computes one token.
//! - Equal costs (and nearly equal ones, [`Options::near`]) take turns. Equal holders of the best prefix: the first one; `millpond` takes the one that sends
//!   the least. Nobody pulls from itself.
//! - The arXiv text forwards a request when computing is *shorter* than the transfer; its own pseudo-code and sense say the
//!   reverse, and so do we.
//!
//! Cost: O(instances) and no allocation.

mod choose;
#[cfg(test)]
mod tests;

use core::fmt;

pub use self::choose::{Options, place_decode, place_prefill};

use super::cost::Work;
use super::queue::Order;
use crate::time::Duration;

/// How prefill instances are chosen.
///
/// ```
/// use millpond_core::sched::placement::Policy;
/// assert_eq!("mooncake_fast25".parse(), Ok(Policy::MooncakeFast25));
/// let refused = "fastest".parse::<Policy>().unwrap_err();
/// assert!(refused.to_string().starts_with("no such placement; one of: random round_robin"));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// Any, equally likely; reuses what happens to be there.
    Random,
    /// One after the other.
    RoundRobin,
    /// The shortest line.
    LeastLoaded,
    /// The least time to first token with what each instance has itself; nothing is pulled.
    LocalPrefix,
    /// Algorithm 1 of the FAST'25 paper.
    MooncakeFast25,
    /// Algorithm 1 of arXiv 2407.00079.
    MooncakeArxiv,
    /// The least time to first token with transfers that overlap the wait and prefixes pulled as far as that pays, counting
    /// what others are pushed back.
    #[default]
    Millpond,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 7] = [
        Self::Random,
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::LocalPrefix,
        Self::MooncakeFast25,
        Self::MooncakeArxiv,
        Self::Millpond,
    ];

    /// The name in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
            Self::LocalPrefix => "local_prefix",
            Self::MooncakeFast25 => "mooncake_fast25",
            Self::MooncakeArxiv => "mooncake_arxiv",
            Self::Millpond => "millpond",
        }
    }

    /// In which order prefill instances serve what it sends them.
    #[must_use]
    pub const fn order(self) -> Order {
        match self {
            Self::Millpond => Order::SHORT_FIRST,
            _ => Order::Fifo,
        }
    }
}

/// No placement has that name.
///
/// Example: [`Policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such placement; one of:")?;
        Policy::ALL.iter().try_for_each(|policy| write!(f, " {}", policy.name()))
    }
}

impl core::error::Error for UnknownPolicy {}

impl core::str::FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.into_iter().find(|policy| policy.name() == name).ok_or(UnknownPolicy)
    }
}

/// A prompt to be placed.
///
/// Example: [`place_prefill`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Prompt {
    /// Its length in tokens.
    pub tokens: u32,
    /// A counter that the caller increments with every request: turns of `random`, of `round_robin`, and of whoever costs
    /// the same. Several routers over the same instances start at different numbers.
    pub turn: u64,
}

/// What is known of a prefill instance when a request comes.
///
/// Example: [`place_prefill`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PrefillView {
    /// Not to be used, nor pulled from.
    pub down: bool,
    /// How long the request would wait there.
    pub wait: Duration,
    /// Requests that it would push back.
    pub behind: u32,
    /// Leading blocks of its prompt that are there, or will be when it starts.
    pub matched: u32,
    /// Until the matched blocks can be sent to others: they are still being computed.
    pub ready: Duration,
    /// Transfers that leave it now.
    pub sending: u32,
    /// Transfers that enter it now.
    pub receiving: u32,
}

/// What is known of a decode instance at the time the request would join it.
///
/// Example: [`place_decode`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DecodeView {
    /// Not to be used.
    pub down: bool,
    /// Requests in its batch, and on their way to it.
    pub batch: u32,
    /// Tokens of context of those.
    pub context: u64,
}

/// One way to serve a request, with its costs. Times are predictions.
///
/// Example: [`place_prefill`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// The prefill instance.
    pub instance: u32,
    /// Whom the pulled part of the prefix comes from.
    pub source: Option<u32>,
    /// Tokens that are computed.
    pub new: u32,
    /// Tokens before them that are reused: what is there, then what is pulled.
    pub reused: u32,
    /// Tokens of those that are pulled.
    pub pulled: u32,
    /// Wait in the line.
    pub wait: Duration,
    /// Transfer of the pulled part, with the wait until it can be sent.
    pub transfer: Duration,
    /// Prefill.
    pub prefill: Duration,
    /// From now to the first token.
    pub ttft: Duration,
    /// What the policy compares; the least wins.
    pub score: u64,
}

impl Candidate {
    /// What is to be computed.
    #[must_use]
    pub const fn work(&self) -> Work {
        Work { new: self.new, prefix: self.reused }
    }
}

/// Why a candidate was chosen.
///
/// Example: [`place_prefill`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It was its turn.
    #[default]
    Turn,
    /// Its line is the shortest.
    Load,
    /// It has the prefix and is soonest done.
    Local,
    /// It is soonest done with a prefix that it pulls.
    Pulled,
    /// It is soonest done with a part of the prefix that others have.
    PulledPart,
    /// It is soonest done although it computes what others have.
    Recomputed,
    /// It is soonest done, and nobody has any of the prefix.
    Cold,
}

impl Reason {
    /// The code in records and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Load => "load",
            Self::Local => "local",
            Self::Pulled => "pulled",
            Self::PulledPart => "pulled_part",
            Self::Recomputed => "recomputed",
            Self::Cold => "cold",
        }
    }
}

/// A prefill instance that was chosen.
///
/// Example: [`place_prefill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placed {
    /// How the request is served.
    pub chosen: Candidate,
    /// Why.
    pub reason: Reason,
    /// By how much the score of the runner-up is worse; `None` without one.
    pub margin: Option<u64>,
}
