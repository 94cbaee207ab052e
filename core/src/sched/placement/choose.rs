//! The choice itself.

use alloc::vec::Vec;

use super::{Candidate, DecodeView, Placed, Policy, PrefillView, Prompt, Reason};
use crate::sched::colocate::Colocate;
use crate::sched::cost::{Flows, Profile, Work};
use crate::sched::queue::nanos;
use crate::sched::spread::{Near, pick};
use crate::time::Duration;

/// What a policy can be told.
///
/// ```
/// use millpond_core::sched::placement::{Options, Policy};
/// let mut options = Options::default();
/// options.threshold = 2.0;
/// assert_eq!(options.policy, Policy::Millpond);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// The policy.
    pub policy: Policy,
    /// How many times more prefix the best instance must have for the paper's policies to pull. The paper publishes no
    /// value ("adjusted manually").
    pub threshold: f64,
    /// What `millpond` counts a second by which it pushes somebody back, in seconds.
    pub push_back: f64,
    /// Scores that are as good as the least: those take turns. By default only equal ones; routers that share instances and
    /// know what was true a second ago do well with 50 thousandths.
    pub near: Near,
    /// Whether the decode instance may compute the prompt instead of the one that is chosen here; with any policy.
    pub colocate: Colocate,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: Policy::Millpond,
            threshold: 1.0,
            push_back: 1.0,
            near: Near::default(),
            colocate: Colocate::Never,
        }
    }
}

/// The best holder of the prefix.
#[derive(Clone, Copy)]
struct Best {
    instance: u32,
    tokens: u32,
    ready: Duration,
    sending: u32,
}

/// Places a prompt among `prefill`, and leaves what was considered in `candidates` (an instance each, those that are down
/// left out). `None` if all are down.
///
/// ```
/// use millpond_core::sched::cost::Profile;
/// use millpond_core::sched::placement::{Options, PrefillView, Prompt, Reason, place_prefill};
/// use millpond_core::time::Duration;
/// let busy = PrefillView { wait: Duration::from_secs(5), matched: 10, ..PrefillView::default() };
/// let mut considered = Vec::new();
/// let prompt = Prompt { tokens: 6_000, turn: 0 };
/// let placed = place_prefill(&Options::default(), &Profile::default(), prompt, &[busy, PrefillView::default()], &mut considered);
/// let placed = placed.unwrap();
/// // The second is idle and pulls what the first has: 26 ms instead of a wait of 5 s.
/// assert_eq!((placed.chosen.instance, placed.chosen.source, placed.chosen.pulled), (1, Some(0), 5_120));
/// assert_eq!((placed.reason, considered.len()), (Reason::Pulled, 2));
/// ```
pub fn place_prefill(
    options: &Options,
    profile: &Profile,
    prompt: Prompt,
    prefill: &[PrefillView],
    candidates: &mut Vec<Candidate>,
) -> Option<Placed> {
    candidates.clear();
    let best = best_holder(options.policy, profile, prompt, prefill);
    for (instance, view) in (0_u32..).zip(prefill) {
        if !view.down {
            candidates.push(Chooser { options, profile, prompt, best }.candidate(instance, view));
        }
    }
    let place = match options.policy {
        Policy::Random => below(mixed(prompt.turn), candidates.len())?,
        Policy::RoundRobin => below_turn(prompt.turn, candidates.len())?,
        _ => pick(candidates.iter().map(|candidate| candidate.score), options.near, prompt.turn)?,
    };
    let chosen = candidates[place];
    let others = candidates.iter().filter(|other| other.instance != chosen.instance);
    let margin = others.map(|other| other.score).min().map(|score| score.saturating_sub(chosen.score));
    Some(Placed { chosen, reason: reason(options.policy, &chosen, best), margin })
}

/// Chooses the decode instance whose step would be shortest with the request in it; the first of equals. `None` if all are
/// down or full.
///
/// ```
/// use millpond_core::sched::cost::Profile;
/// use millpond_core::sched::placement::{DecodeView, place_decode};
/// let busy = DecodeView { batch: 3, context: 30_000, ..DecodeView::default() };
/// let idle = DecodeView::default();
/// let (instance, step) = place_decode(&Profile::default(), 12_000, &[busy, idle]).unwrap();
/// assert_eq!((instance, step.as_millis()), (1, 29));
/// ```
#[must_use]
pub fn place_decode(profile: &Profile, tokens: u32, decode: &[DecodeView]) -> Option<(u32, Duration)> {
    let fits = |view: &DecodeView| !view.down && view.context + u64::from(tokens) <= profile.decode_tokens_max;
    let step =
        |view: &DecodeView| nanos(1e9 * profile.decode.seconds(view.batch + 1, view.context + u64::from(tokens)));
    let views = (0_u32..).zip(decode).filter(|(_, view)| fits(view));
    let (least, instance) = views.map(|(instance, view)| (step(view), instance)).min()?;
    Some((instance, Duration::from_nanos(least)))
}

struct Chooser<'a> {
    options: &'a Options,
    profile: &'a Profile,
    prompt: Prompt,
    best: Option<Best>,
}

impl Chooser<'_> {
    fn candidate(&self, instance: u32, view: &PrefillView) -> Candidate {
        let local = reusable(self.profile, self.prompt, view.matched);
        let source = self.best.filter(|best| best.instance != instance && best.tokens > local);
        let threshold = self.options.threshold * f64::from(local);
        match (self.options.policy, source) {
            (Policy::MooncakeFast25, Some(best)) if f64::from(best.tokens) > threshold => {
                self.costs(instance, view, local, Some((best, best.tokens)))
            }
            (Policy::MooncakeArxiv, Some(best)) if f64::from(best.tokens) >= threshold => {
                self.costs(instance, view, local, Some((best, best.tokens)))
            }
            (Policy::Millpond, Some(best)) => {
                let mut least = self.costs(instance, view, local, None);
                let hidden = self.hidden(view, local, best);
                for to in [best.tokens, hidden, (hidden + self.profile.block_tokens).min(best.tokens)] {
                    let pull = (to > local).then_some((best, to));
                    let next = self.costs(instance, view, local, pull);
                    least = if next.score < least.score { next } else { least };
                }
                least
            }
            _ => self.costs(instance, view, local, None),
        }
    }

    /// How far a prefix can be pulled while the request waits, in whole blocks. Pulling is linear in the length, and what it
    /// saves is convex: this or a block more, or all, or nothing is best.
    fn hidden(&self, view: &PrefillView, local: u32, best: Best) -> u32 {
        let beside = Flows { source: best.sending, target: view.receiving };
        let block = self.profile.link.seconds(self.profile.kv_len(self.profile.block_tokens), beside)
            - self.profile.link.latency;
        let left = view.wait.as_secs_f64() - best.ready.as_secs_f64() - self.profile.link.latency;
        let blocks = u32::try_from(nanos(left / block)).unwrap_or(u32::MAX);
        local.saturating_add(blocks.saturating_mul(self.profile.block_tokens)).min(best.tokens)
    }

    fn costs(&self, instance: u32, view: &PrefillView, local: u32, pull: Option<(Best, u32)>) -> Candidate {
        let (profile, policy) = (self.profile, self.options.policy);
        let reused = pull.map_or(local, |(_, to)| to);
        let work = Work::of_prompt(self.prompt.tokens, reused);
        let transfer = pull.map_or(Duration::ZERO, |(best, to)| {
            let beside = Flows { source: best.sending, target: view.receiving };
            best.ready + span(profile.link.seconds(profile.kv_len(to - local), beside))
        });
        let prefill = span(profile.prefill.seconds(work));
        let before = if policy == Policy::Millpond { view.wait.max(transfer) } else { view.wait + transfer };
        let ttft = before + prefill;
        let score = match policy {
            Policy::Random | Policy::RoundRobin => 0,
            Policy::LeastLoaded => view.wait.as_nanos(),
            Policy::LocalPrefix | Policy::MooncakeFast25 | Policy::MooncakeArxiv => ttft.as_nanos(),
            Policy::Millpond => {
                let pushed = self.options.push_back * f64::from(view.behind) * prefill.as_nanos() as f64;
                ttft.as_nanos().saturating_add(nanos(pushed))
            }
        };
        Candidate {
            instance,
            source: pull.map(|(best, _)| best.instance),
            new: work.new,
            reused: work.prefix,
            pulled: pull.map_or(0, |(_, to)| to - local),
            wait: view.wait,
            transfer,
            prefill,
            ttft,
            score,
        }
    }
}

fn span(seconds: f64) -> Duration {
    Duration::from_nanos(nanos(seconds * 1e9))
}

/// Tokens of `matched` blocks, as far as they are whole in the prompt.
fn reusable(profile: &Profile, prompt: Prompt, matched: u32) -> u32 {
    matched.min(prompt.tokens / profile.block_tokens) * profile.block_tokens
}

/// Who has most of the prefix: the first of equals, or for `millpond` the one that can send first.
fn best_holder(policy: Policy, profile: &Profile, prompt: Prompt, prefill: &[PrefillView]) -> Option<Best> {
    let mut best: Option<Best> = None;
    for (instance, view) in (0_u32..).zip(prefill).filter(|(_, view)| !view.down) {
        let tokens = reusable(profile, prompt, view.matched);
        let new = Best { instance, tokens, ready: view.ready, sending: view.sending };
        let sooner = |old: &Best| policy == Policy::Millpond && (new.ready, new.sending) < (old.ready, old.sending);
        if tokens > 0 && best.is_none_or(|old| tokens > old.tokens || tokens == old.tokens && sooner(&old)) {
            best = Some(new);
        }
    }
    best
}

fn reason(policy: Policy, chosen: &Candidate, best: Option<Best>) -> Reason {
    match (policy, best) {
        (Policy::Random | Policy::RoundRobin, _) => Reason::Turn,
        (Policy::LeastLoaded, _) => Reason::Load,
        (_, None) => Reason::Cold,
        // One token less than the best holder has: a full hit.
        (_, Some(best)) if chosen.reused + 1 >= best.tokens => {
            if chosen.pulled > 0 {
                Reason::Pulled
            } else {
                Reason::Local
            }
        }
        _ if chosen.pulled > 0 => Reason::PulledPart,
        _ => Reason::Recomputed,
    }
}

fn below(value: u64, bound: usize) -> Option<usize> {
    let wide = u128::from(value) * u128::try_from(bound).ok()?;
    usize::try_from(wide >> 64).ok().filter(|_| bound > 0)
}

fn below_turn(turn: u64, bound: usize) -> Option<usize> {
    usize::try_from(turn.checked_rem(u64::try_from(bound).ok()?)?).ok()
}

/// Uniform bits from a counter.
fn mixed(turn: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&turn.to_le_bytes())
}
