//! Whether to serve a request at all: checked when it arrives, and again when its prefill is done.
//!
//! `none` admits everybody. The paper's policies: `late` looks at the prefill side on arrival and at the decode instance
//! after the prefill, which is wasted if that refuses; `early` looks at the present load of both on arrival;
//! `early_uniform` at the load to come, as if every answer took the same time. `millpond` forecasts from how long answers
//! last, with the forecast's spread, and refuses when the chance of missing a deadline exceeds a level; a prompt that
//! finds its decode instance full after all is held at its door, its first token not yet sent, as long as its deadline and
//! [`Options::hold`] allow. A decode instance is reserved on arrival.
//!
//! A refusal names its reason and after how long to try again, computed from how fast places become free, each refused
//! request after the one before it.
//!
//! Tenants and priorities ([`Shares`]): in overload, whoever stays within its max-min fair share, and whoever has a higher
//! priority, is let into places beyond the forecast's level; the others then find less room. And where not all can be served,
//! those that cost most are refused first, but for a share that is admitted by turns whatever they cost ([`Cost`]); announced
//! output lengths ([`Ask::hint`]) are part of that.

mod decide;
mod price;
mod share;
#[cfg(test)]
mod tests;

use core::fmt;

pub use self::decide::{Admission, Answer, Arrival, Door, Figures, Outlook};
pub use self::price::Cost;
pub use self::share::Shares;

use crate::time::Duration;

/// How requests are admitted.
///
/// ```
/// use millpond_core::sched::admission::Policy;
/// assert_eq!("early_uniform".parse(), Ok(Policy::EarlyUniform));
/// assert_eq!("all".parse::<Policy>().unwrap_err().to_string(), "no such admission; one of: none late early early_uniform millpond");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// Everybody.
    None,
    /// The decode side is looked at after the prefill.
    Late,
    /// Both sides are looked at on arrival, as they are then.
    Early,
    /// The decode side as it will be, if every answer takes the mean time.
    EarlyUniform,
    /// By the chance of missing a deadline.
    #[default]
    Millpond,
}

impl Policy {
    /// Every policy.
    pub const ALL: [Self; 5] = [Self::None, Self::Late, Self::Early, Self::EarlyUniform, Self::Millpond];

    /// The name in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Late => "late",
            Self::Early => "early",
            Self::EarlyUniform => "early_uniform",
            Self::Millpond => "millpond",
        }
    }
}

/// No admission has that name.
///
/// Example: [`Policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such admission; one of:")?;
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

/// A request's deadlines.
///
/// ```
/// use millpond_core::sched::admission::Slo;
/// assert_eq!(Slo::default().ttft.to_string(), "30s");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slo {
    /// To the first token.
    pub ttft: Duration,
    /// Between tokens.
    pub tbt: Duration,
}

impl Default for Slo {
    /// Those of the FAST'25 paper's strictest experiment: 30 s and 100 ms.
    fn default() -> Self {
        Self { ttft: Duration::from_secs(30), tbt: Duration::from_millis(100) }
    }
}

/// What a request asks of the cluster.
///
/// ```
/// use millpond_core::sched::admission::Ask;
/// let ask = Ask { id: 1, tokens: 6_000, ..Ask::default() };
/// assert_eq!((ask.priority, ask.hint), (0, None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ask {
    /// The caller's name for it.
    pub id: u64,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// Tokens of its answer, if somebody has an idea.
    pub hint: Option<u32>,
    /// Its deadlines.
    pub slo: Slo,
    /// Whom it is for: an index of [`Shares`].
    pub tenant: u32,
    /// Those of higher priority are served first, and longer.
    pub priority: u8,
}

/// Why a request is refused.
///
/// Example: [`Admission`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Its first token would be late.
    Ttft,
    /// Tokens would come too slowly: decode instances are, or will be, full.
    Tbt,
    /// It takes more of the cluster than one may while not all can be served.
    Cost,
    /// No instance takes requests.
    Down,
}

impl Reason {
    /// The code in records and replies.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tbt => "tbt",
            Self::Cost => "cost",
            Self::Down => "down",
        }
    }
}

/// Whether a request is served.
///
/// Example: [`Admission`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It is.
    Admit,
    /// It is not.
    Refuse {
        /// Why.
        reason: Reason,
        /// After how long it should be tried again.
        retry_after: Duration,
    },
}

/// What an admission can be told.
///
/// ```
/// use millpond_core::sched::admission::{Options, Policy};
/// assert_eq!(Options::default().policy, Policy::Millpond);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// The policy.
    pub policy: Policy,
    /// `millpond` refuses when the chance of missing a deadline exceeds this.
    pub level: f64,
    /// How long `millpond` holds a prompt at the door of its decode instance, at most.
    pub hold: Duration,
    /// Requests per decode instance that whoever is favoured may have beyond the level.
    pub bonus: f64,
    /// One in so many of those that cost too much is admitted all the same.
    pub turns: u32,
}

impl Default for Options {
    /// A long hold and a low level belong together: prompts that are held keep decode instances full, so few have to be
    /// admitted on luck, and few are computed in vain. With less hold, decode instances run dry while prompts are computed and
    /// the loads of both sides swing against each other.
    fn default() -> Self {
        Self { policy: Policy::Millpond, level: 0.1, hold: Duration::from_secs(12), bonus: 1.0, turns: 4 }
    }
}
