//! Whether a prompt is computed by the prefill instance it was placed on, or colocated: by its decode instance.
//!
//! Computed apart, its KV streams to the decode instance while it is computed, and the first token waits for what of that
//! comes after: at least a block, and whatever the link takes longer than the prefill. Computed at the decode instance,
//! nothing has to come; but the steps of the batch there wait meanwhile, so everybody in it is pushed back, and none of them may be
//! so far that it misses its deadline between tokens.
//!
//! The choice is a function of a [`Colocate`], the profile, how the prompt was placed and what is known of the decode instance
//! ([`DecodeSide`]). It is taken for every request and recorded with its figures, also where only one answer is allowed.
//! Whether the request is served was decided before, on the time that it takes apart.

use super::cost::{Flows, Profile, Work};
use super::placement::{Candidate, Options, Prompt};
use super::queue::nanos;
use crate::time::Duration;

/// Whether prompts may be colocated.
///
/// ```
/// use millpond_core::sched::colocate::Colocate;
/// assert_eq!("sooner".parse(), Ok(Colocate::Sooner));
/// assert_eq!("often".parse::<Colocate>().unwrap_err().to_string(), "no such rule; one of: never sooner");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Colocate {
    /// Only where there are no prefill instances.
    #[default]
    Never,
    /// Where that is sooner, with what others are pushed back counted, and where all prefill instances are down.
    Sooner,
}

impl Colocate {
    /// Every rule.
    pub const ALL: [Self; 2] = [Self::Never, Self::Sooner];

    /// The name in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Sooner => "sooner",
        }
    }
}

/// No rule has that name.
///
/// Example: [`Colocate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownColocate;

impl core::fmt::Display for UnknownColocate {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("no such rule; one of:")?;
        Colocate::ALL.iter().try_for_each(|rule| write!(f, " {}", rule.name()))
    }
}

impl core::error::Error for UnknownColocate {}

impl core::str::FromStr for Colocate {
    type Err = UnknownColocate;

    fn from_str(name: &str) -> Result<Self, UnknownColocate> {
        Self::ALL.into_iter().find(|rule| rule.name() == name).ok_or(UnknownColocate)
    }
}

/// Whether decode instances compute prompts.
///
/// ```
/// assert_eq!(millpond_core::sched::colocate::Ability::default(), millpond_core::sched::colocate::Ability::Able);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ability {
    /// They do, when they are asked to.
    #[default]
    Able,
    /// They do not.
    Unable,
}

/// Who else could compute the prompt.
///
/// ```
/// assert_eq!(millpond_core::sched::colocate::Elsewhere::default(), millpond_core::sched::colocate::Elsewhere::Up);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Elsewhere {
    /// The prefill instance that it was placed on.
    #[default]
    Up,
    /// That one, once it is back: all prefill instances are down.
    Down,
    /// Nobody: there are no prefill instances, and it was placed on its decode instance.
    Nobody,
}

/// What is known of the decode instance when a request comes.
///
/// Example: [`choose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeSide {
    /// The instance.
    pub instance: u32,
    /// Whether it computes prompts.
    pub ability: Ability,
    /// Who else could.
    pub elsewhere: Elsewhere,
    /// Leading tokens of the prompt that it has, or loads from the store.
    pub reused: u32,
    /// How long prompts that it computes already will take.
    pub wait: Duration,
    /// Requests in its batch, and on their way to it.
    pub batch: u32,
    /// Tokens of context of those.
    pub context: u64,
    /// The least deadline between tokens of those.
    pub tbt: Duration,
    /// Requests that the prompt pushes back where it was placed.
    pub behind: u32,
}

/// Why a prompt is, or is not, colocated.
///
/// Example: [`choose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Colocated: there are no prefill instances.
    NoPrefill,
    /// Colocated: all prefill instances are down.
    PrefillDown,
    /// Colocated: that is sooner.
    Sooner,
    /// Apart: that is as soon, or sooner.
    Later,
    /// Apart: the batch would miss a deadline between tokens.
    Stalls,
    /// Apart: the decode instance computes no prompts.
    Unable,
    /// Apart: nothing else is allowed.
    Never,
}

impl Reason {
    /// The code in records and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoPrefill => "no_prefill_instances",
            Self::PrefillDown => "prefill_instances_down",
            Self::Sooner => "sooner",
            Self::Later => "not_sooner",
            Self::Stalls => "stalls_the_batch",
            Self::Unable => "decode_computes_no_prompts",
            Self::Never => "never",
        }
    }

    /// Whether the prompt is colocated.
    #[must_use]
    pub const fn is_colocated(self) -> bool {
        matches!(self, Self::NoPrefill | Self::PrefillDown | Self::Sooner)
    }
}

/// The choice and the figures that it follows from. Times are predictions.
///
/// Example: [`choose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// What was known.
    pub side: DecodeSide,
    /// Why it is so.
    pub reason: Reason,
    /// What of the KV's way to the decode instance is not hidden behind the prefill.
    pub hop: Duration,
    /// From now to the first token, computed apart.
    pub apart: Duration,
    /// The prefill at the decode instance, for which its steps wait.
    pub prefill: Duration,
    /// From now to the first token, colocated.
    pub colocated: Duration,
    /// Nanoseconds, with those counted by which others are pushed back, of either; the least wins.
    pub scores: [u64; 2],
}

impl Choice {
    /// Predicted time to the first token of what was chosen.
    #[must_use]
    pub const fn ttft(&self) -> Duration {
        if self.reason.is_colocated() { self.colocated } else { self.apart }
    }
}

/// Chooses for a prompt that was placed as `placed` and is to go on at the decode instance of `side`.
///
/// ```
/// use millpond_core::sched::colocate::{Ability, Colocate, DecodeSide, Elsewhere, Reason, choose};
/// use millpond_core::sched::cost::Profile;
/// use millpond_core::sched::placement::{Options, PrefillView, Prompt, place_prefill};
/// use millpond_core::time::Duration;
/// let (mut options, profile) = (Options::default(), Profile::default());
/// options.colocate = Colocate::Sooner;
/// let prompt = Prompt { tokens: 600, turn: 0 };
/// let busy = PrefillView { wait: Duration::from_secs(5), ..PrefillView::default() };
/// let placed = place_prefill(&options, &profile, prompt, &[busy], &mut Vec::new()).unwrap();
/// let idle = DecodeSide {
///     instance: 0, ability: Ability::Able, elsewhere: Elsewhere::Up, reused: 0, wait: Duration::ZERO,
///     batch: 0, context: 0, tbt: Duration::MAX, behind: 0,
/// };
/// let reason = |side| choose(&options, &profile, prompt, &placed.chosen, side).reason;
/// assert_eq!(reason(idle), Reason::Sooner); // 70 ms instead of 5 s
/// // A step of 80 ms and these 70 ms are more than those who are there bear.
/// let full = DecodeSide { batch: 15, context: 200_000, tbt: Duration::from_millis(100), ..idle };
/// assert_eq!(reason(full), Reason::Stalls);
/// assert_eq!(reason(DecodeSide { ability: Ability::Unable, ..idle }), Reason::Unable);
/// ```
#[must_use]
pub fn choose(options: &Options, profile: &Profile, prompt: Prompt, placed: &Candidate, side: DecodeSide) -> Choice {
    let prefill = span(profile.prefill.seconds(Work::of_prompt(prompt.tokens, side.reused)));
    let hop = match side.elsewhere {
        Elsewhere::Nobody => Duration::ZERO,
        Elsewhere::Up | Elsewhere::Down => hop(profile, prompt, placed.prefill),
    };
    let (apart, colocated) = (placed.ttft + hop, side.wait + prefill);
    let pushed = |ttft: Duration, others: u32, by: Duration| {
        let pushed = options.push_back * f64::from(others) * by.as_nanos() as f64;
        ttft.as_nanos().saturating_add(nanos(pushed))
    };
    let scores = [pushed(apart, side.behind, placed.prefill), pushed(colocated, side.batch, prefill)];
    let step = span(profile.decode.seconds(side.batch, side.context));
    let reason = match (side.elsewhere, side.ability, options.colocate) {
        (Elsewhere::Nobody, _, _) => Reason::NoPrefill,
        (_, Ability::Unable, _) => Reason::Unable,
        (_, _, Colocate::Never) => Reason::Never,
        (Elsewhere::Down, _, _) => Reason::PrefillDown,
        _ if scores[1] >= scores[0] => Reason::Later,
        _ if side.batch > 0 && step + prefill > side.tbt => Reason::Stalls,
        _ => Reason::Sooner,
    };
    Choice { side, reason, hop, apart, prefill, colocated, scores }
}

/// What of the KV's way comes after its prefill, the link being free: KV streams while it is computed, block by block.
fn hop(profile: &Profile, prompt: Prompt, prefill: Duration) -> Duration {
    let sent = |tokens: u32| span(profile.link.seconds(profile.kv_len(tokens), Flows { source: 0, target: 0 }));
    let all = sent(prompt.tokens);
    sent(prompt.tokens.min(profile.block_tokens))
        .max(Duration::from_nanos(all.as_nanos().saturating_sub(prefill.as_nanos())))
}

fn span(seconds: f64) -> Duration {
    Duration::from_nanos(nanos(seconds * 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::cost::{Decode, Link, Prefill};

    /// A token takes a millisecond to compute and a tenth of that to send; a step takes 10 ms a request.
    fn profile() -> Profile {
        let mut profile = Profile { block_tokens: 10, kv_bytes_per_token: 100, ..Profile::default() };
        profile.prefill = Prefill { fixed: 0.0, linear: 1e-3, quadratic: 0.0 };
        profile.decode = Decode { fixed: 0.0, per_request: 0.01, per_token: 0.0 };
        profile.link = Link { bytes_per_second: 1e6, latency: 1e-3 };
        profile
    }

    const PROMPT: Prompt = Prompt { tokens: 100, turn: 0 };

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Waits 50 ms and is computed in 100.
    fn placed() -> Candidate {
        Candidate { new: 100, wait: ms(50), prefill: ms(100), ttft: ms(150), ..Candidate::default() }
    }

    fn side() -> DecodeSide {
        DecodeSide {
            instance: 3,
            ability: Ability::Able,
            elsewhere: Elsewhere::Up,
            reused: 0,
            wait: Duration::ZERO,
            batch: 0,
            context: 0,
            tbt: Duration::MAX,
            behind: 0,
        }
    }

    fn chosen(colocate: Colocate, placed: Candidate, side: DecodeSide) -> Choice {
        let options = Options { colocate, ..Options::default() };
        choose(&options, &profile(), PROMPT, &placed, side)
    }

    #[test]
    fn an_idle_decode_instance_saves_the_line_and_the_hop() {
        let choice = chosen(Colocate::Sooner, placed(), side());
        // The last block: 1,000 bytes at 1 MB/s, and the latency.
        assert_eq!((choice.hop, choice.apart, choice.colocated), (ms(2), ms(152), ms(100)));
        assert_eq!((choice.reason, choice.ttft()), (Reason::Sooner, ms(100)));
        assert_eq!(choice.scores, [152_000_000, 100_000_000]);
    }

    #[test]
    fn everybody_in_the_batch_is_pushed_back_and_counts() {
        let two = DecodeSide { batch: 2, ..side() };
        assert_eq!(chosen(Colocate::Sooner, placed(), two).scores[1], 300_000_000);
        assert_eq!(chosen(Colocate::Sooner, placed(), two).reason, Reason::Later);
        // Three wait behind it where it was placed: 152 + 3 * 100 against 100 + 2 * 100.
        assert_eq!(chosen(Colocate::Sooner, placed(), DecodeSide { behind: 3, ..two }).reason, Reason::Sooner);
        // A step of 20 ms and the prefill of 100 are one more than that.
        let strict = DecodeSide { behind: 3, tbt: ms(119), ..two };
        assert_eq!(chosen(Colocate::Sooner, placed(), strict).reason, Reason::Stalls);
        assert_eq!(chosen(Colocate::Sooner, placed(), DecodeSide { tbt: ms(120), ..strict }).reason, Reason::Sooner);
    }

    #[test]
    fn a_transfer_that_is_longer_than_the_prefill_is_not_hidden() {
        let cached = Candidate { new: 1, reused: 99, prefill: ms(1), ttft: ms(1), ..Candidate::default() };
        // 10,000 bytes at 1 MB/s and the latency, less the prefill.
        let choice = chosen(Colocate::Sooner, cached, DecodeSide { reused: 90, ..side() });
        assert_eq!((choice.hop, choice.apart, choice.colocated), (ms(10), ms(11), ms(10)));
        assert_eq!(choice.reason, Reason::Sooner);
        assert_eq!(chosen(Colocate::Sooner, cached, side()).reason, Reason::Later, "it has nothing of the prefix");
        let waits = DecodeSide { reused: 90, wait: ms(1), ..side() };
        assert_eq!(chosen(Colocate::Sooner, cached, waits).reason, Reason::Later, "equal is not sooner");
    }

    #[test]
    fn where_only_one_answer_is_allowed_the_figures_are_there_all_the_same() {
        let figures = |choice: Choice| (choice.apart, choice.colocated);
        let sooner = chosen(Colocate::Sooner, placed(), side());
        let never = chosen(Colocate::Never, placed(), side());
        assert_eq!((never.reason, figures(never)), (Reason::Never, figures(sooner)));
        let unable = DecodeSide { ability: Ability::Unable, elsewhere: Elsewhere::Down, ..side() };
        assert_eq!(chosen(Colocate::Sooner, placed(), unable).reason, Reason::Unable);
        let down = DecodeSide { elsewhere: Elsewhere::Down, batch: 9, ..side() };
        assert_eq!(chosen(Colocate::Sooner, placed(), down).reason, Reason::PrefillDown, "there is nobody else");
        assert_eq!(chosen(Colocate::Never, placed(), down).reason, Reason::Never);
        let nobody = chosen(Colocate::Never, placed(), DecodeSide { elsewhere: Elsewhere::Nobody, ..side() });
        assert_eq!((nobody.reason, nobody.hop), (Reason::NoPrefill, Duration::ZERO));
    }
}
