//! The decisions, and what is learned for them.

use super::price::{Cost, Price};
use super::{Ask, Options, Policy, Reason, Shares, Verdict};
use crate::sched::cost::{Interval, Profile};
use crate::sched::forecast::{Occupancy, Step, Survival};
use crate::sched::placement::DecodeView;
use crate::sched::queue::nanos;
use crate::time::{Duration, Instant};

/// Seconds over which the rate of endings is measured.
const RATE_MEMORY: f64 = 30.0;
/// Endings over which the mean time of an answer is taken.
const MEAN_MEMORY: f64 = 200.0;
/// The mean time of an answer before one ended.
const MEAN_FIRST: f64 = 30.0;
/// No refusal is told to come back later than that.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// What is known of a request's future when it arrives.
///
/// Example: [`Admission`].
#[derive(Clone, Copy, Debug)]
pub struct Outlook<'a> {
    /// Predicted seconds to its first token.
    pub ttft: Interval,
    /// How many of them are its own prefill, after hits.
    pub prefill: f64,
    /// Who is on the decode instances.
    pub occupancy: &'a Occupancy,
    /// What they cost.
    pub profile: &'a Profile,
}

/// What was decided about a request on arrival, with the figures it rests on.
///
/// Example: [`Admission`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Whether it is served.
    pub verdict: Verdict,
    /// The decode instance to reserve; `None` if there is none.
    pub decode: Option<u32>,
    /// When it is to join there.
    pub join: Instant,
    /// How long it is predicted to be held there before.
    pub door: Duration,
    /// The step it was judged by.
    pub step: Step,
    /// What the verdict follows from.
    pub figures: Figures,
}

/// What a verdict follows from, and nothing else.
///
/// ```
/// use millpond_core::sched::admission::{Cost, Figures, Reason};
/// let figures = Figures { late: 0.3, slow: 0.3, level: 0.5, cost: Cost::Fine };
/// assert_eq!(figures.judge(), Some(Reason::Tbt)); // one of the two: 51 %
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// The chance that the first token is late; 0 or 1 for the paper's policies.
    pub late: f64,
    /// The chance that tokens come too slowly; 0 or 1 for the paper's policies.
    pub slow: f64,
    /// The chance that is accepted.
    pub level: f64,
    /// What it costs beside what it may.
    pub cost: Cost,
}

impl Figures {
    /// Why the request is refused; `None` if it is served.
    #[must_use]
    pub fn judge(&self) -> Option<Reason> {
        match self {
            Self { cost: Cost::NoInstance, .. } => Some(Reason::Down),
            Self { late, level, .. } if late > level => Some(Reason::Ttft),
            Self { late, slow, level, .. } if 1.0 - (1.0 - late) * (1.0 - slow) > *level => Some(Reason::Tbt),
            Self { cost: Cost::High, .. } => Some(Reason::Cost),
            _ => None,
        }
    }
}

/// What happens to a prompt at its decode instance.
///
/// Example: [`Admission::at_door`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// It joins the batch.
    Join,
    /// It waits, until then at the latest.
    Hold(Instant),
    /// It is refused: its prefill was in vain.
    Refuse,
}

/// Decides about requests and learns from those that end.
///
/// ```
/// use millpond_core::sched::admission::{Admission, Ask, Options, Outlook, Shares, Verdict};
/// use millpond_core::sched::cost::{Interval, Profile};
/// use millpond_core::sched::forecast::Occupancy;
/// use millpond_core::time::Instant;
/// let (profile, occupancy) = (Profile::default(), Occupancy::new(2));
/// let mut admission = Admission::new(Options::default());
/// let mut decide = |seconds: f64| {
///     let ttft = Interval { low: seconds * 0.9, expected: seconds, high: seconds * 1.1 };
///     let outlook = Outlook { ttft, prefill: seconds, occupancy: &occupancy, profile: &profile };
///     admission.on_arrival(Instant::ZERO, &Ask { id: 1, tokens: 6_000, ..Ask::default() }, outlook, &Shares::default())
/// };
/// assert_eq!((decide(1.0).verdict, decide(1.0).decode), (Verdict::Admit, Some(0)));
/// assert!(matches!(decide(40.0).verdict, Verdict::Refuse { .. })); // its first token has 30 s
/// ```
#[derive(Clone, Debug)]
pub struct Admission {
    options: Options,
    survival: Survival,
    /// Mean seconds from joining to the end.
    mean: f64,
    /// Endings, fading over [`RATE_MEMORY`].
    ended: f64,
    ended_at: Instant,
    /// When the last refused request was told to come back.
    promised: Instant,
    price: Price,
}

impl Admission {
    /// Decides by `options`; nothing is known of answers yet.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self {
            options,
            survival: Survival::default(),
            mean: MEAN_FIRST,
            ended: 0.0,
            ended_at: Instant::ZERO,
            promised: Instant::ZERO,
            price: Price::default(),
        }
    }

    /// How long answers last.
    #[must_use]
    pub const fn survival(&self) -> &Survival {
        &self.survival
    }

    /// Decides about a request that arrives, and chooses the decode instance to reserve for it. O(requests on decode
    /// instances).
    pub fn on_arrival(&mut self, now: Instant, ask: &Ask, outlook: Outlook<'_>, shares: &Shares) -> Answer {
        match self.options.policy {
            Policy::Millpond => self.by_chance(now, ask, outlook, shares),
            _ => self.by_load(now, ask, outlook),
        }
    }

    /// Decides about a prompt whose KV is at its decode instance: `view` is the batch there with those that are about to join,
    /// `tbt` the least deadline of those, `prefilled` when the prompt was done, `arrived` when the request came.
    ///
    /// ```
    /// use millpond_core::sched::admission::{Admission, Arrival, Ask, Door, Options, Policy};
    /// use millpond_core::sched::{cost::Profile, placement::DecodeView};
    /// use millpond_core::time::{Duration, Instant};
    /// let full = DecodeView { batch: 24, context: 250_000, ..DecodeView::default() };
    /// let at = Arrival { arrived: Instant::ZERO, prefilled: Instant::ZERO, tbt: Duration::from_millis(100) };
    /// let mut options = Options::default();
    /// let ours = Admission::new(options).at_door(&Ask::default(), at, full, &Profile::default());
    /// assert_eq!(ours, Door::Hold(Instant::ZERO + options.hold));
    /// options.policy = Policy::Late;
    /// assert_eq!(Admission::new(options).at_door(&Ask::default(), at, full, &Profile::default()), Door::Refuse);
    /// ```
    #[must_use]
    pub fn at_door(&self, ask: &Ask, at: Arrival, view: DecodeView, profile: &Profile) -> Door {
        let room = view.batch == 0 || view.context + u64::from(ask.tokens) <= profile.decode_tokens_max;
        let step = profile.decode.seconds(view.batch + 1, view.context + u64::from(ask.tokens));
        // The batch's context grows until somebody leaves: by about the length of an answer.
        let growth = match self.options.policy {
            Policy::Millpond => 2.0 * self.survival.mean(None) * profile.decode.per_token,
            _ => 0.0,
        };
        let quick = view.batch == 0 || span(step + growth) <= at.tbt.min(ask.slo.tbt);
        match self.options.policy {
            Policy::None if room => Door::Join,
            _ if room && quick => Door::Join,
            Policy::None | Policy::Millpond => Door::Hold(self.patience(ask, at)),
            _ => Door::Refuse,
        }
    }

    /// Until when a prompt is held at its door at most.
    #[must_use]
    pub fn patience(&self, ask: &Ask, at: Arrival) -> Instant {
        match self.options.policy {
            Policy::None => Instant::NEVER,
            _ => (at.arrived + ask.slo.ttft).min(at.prefilled + self.options.hold),
        }
    }

    /// When a request that its decode instance refuses late is to come back: when somebody leaves the batch `view` of the
    /// instance with most room, as long as answers last; a second at least.
    ///
    /// ```
    /// use millpond_core::sched::admission::{Admission, Options};
    /// use millpond_core::sched::{cost::Profile, placement::DecodeView};
    /// let view = DecodeView { batch: 10, context: 100_000, ..DecodeView::default() };
    /// let hint = Admission::new(Options::default()).retry_late(view, &Profile::default());
    /// assert_eq!(hint.as_millis() / 100, 17); // a tenth of 300 steps of 60 ms
    /// ```
    #[must_use]
    pub fn retry_late(&self, view: DecodeView, profile: &Profile) -> Duration {
        let steps = self.survival.mean(None) / f64::from(view.batch.max(1));
        span(steps * profile.decode.seconds(view.batch, view.context)).max(Duration::from_secs(1))
    }

    /// An answer ended after `tokens`, `lasted` after it joined.
    pub fn on_ended(&mut self, now: Instant, tokens: u32, hint: Option<u32>, lasted: Duration) {
        self.survival.on_ended(tokens, hint);
        self.mean += (lasted.as_secs_f64() - self.mean) / MEAN_MEMORY;
        self.ended = self.ended_by(now) + 1.0;
        self.ended_at = now;
    }

    fn ended_by(&self, now: Instant) -> f64 {
        self.ended * libm::exp(-now.since(self.ended_at).as_secs_f64() / RATE_MEMORY)
    }

    /// The paper's policies: by load, now or as if every answer took the mean time.
    fn by_load(&mut self, now: Instant, ask: &Ask, outlook: Outlook<'_>) -> Answer {
        let (occupancy, profile, policy) = (outlook.occupancy, outlook.profile, self.options.policy);
        let join = now + span(outlook.ttft.expected);
        let all = (0..count(occupancy)).map(|instance| occupancy.view(instance));
        let Some(decode) = least(profile, ask.tokens, all) else { return self.down(now) };
        let seconds = match policy {
            Policy::Early => {
                let present = (0..count(occupancy)).map(|instance| occupancy.view_now(instance));
                present
                    .filter(|view| !view.down)
                    .map(|view| step(profile, ask.tokens, view))
                    .fold(f64::INFINITY, f64::min)
            }
            Policy::EarlyUniform => self.uniform(join, ask.tokens, occupancy, profile),
            _ => 0.0,
        };
        let late = policy != Policy::None && span(outlook.ttft.expected) > ask.slo.ttft;
        let slow = span(seconds) > ask.slo.tbt;
        let [late, slow] = [late, slow].map(|missed| f64::from(u8::from(missed)));
        let figures = Figures { late, slow, level: 0.5, cost: Cost::Fine };
        let verdict = match figures.judge() {
            None => Verdict::Admit,
            Some(Reason::Ttft) => refuse_ttft(ask, outlook.ttft),
            Some(reason) => self.refuse(now, reason, Duration::from_secs(1)),
        };
        let step = Step { batch: 0.0, seconds, spread: 0.0 };
        Answer { verdict, decode: Some(decode), join, door: Duration::ZERO, step, figures }
    }

    /// The mean load of all decode instances at `at`, if every answer takes the mean time.
    fn uniform(&self, at: Instant, tokens: u32, occupancy: &Occupancy, profile: &Profile) -> f64 {
        let lasts = Duration::from_nanos(nanos(self.mean * 1e9));
        let (mut batch, mut context, mut instances) = (0.0, f64::from(tokens), 0.0_f64);
        for instance in 0..count(occupancy) {
            instances += 1.0;
            let there =
                occupancy.residents(instance).iter().filter(|one| one.join <= at && at.since(one.join) <= lasts);
            there.for_each(|one| (batch, context) = (batch + 1.0, context + f64::from(one.tokens)));
        }
        let (batch, context) = (batch / instances + 1.0, context / instances);
        profile.decode.fixed + profile.decode.per_request * batch + profile.decode.per_token * context
    }

    fn by_chance(&mut self, now: Instant, ask: &Ask, outlook: Outlook<'_>, shares: &Shares) -> Answer {
        let (occupancy, profile) = (outlook.occupancy, outlook.profile);
        let join = now + span(outlook.ttft.expected);
        // It may be held for a while, but no longer than its first token may take.
        let judged = (join + self.options.hold).min(now + ask.slo.ttft).max(join);
        let survival = &self.survival;
        let forecast = |instance, at| occupancy.forecast(instance, ask.tokens, now, at, survival, profile);
        let steps = (0..count(occupancy)).filter(|&instance| fits(profile, ask, occupancy.view(instance)));
        let all = steps.map(|instance| (forecast(instance, judged), instance));
        let Some((step, decode)) = all.min_by(|a, b| a.0.seconds.total_cmp(&b.0.seconds)) else {
            return self.down(now);
        };
        let favour = f64::from(ask.priority) + if shares.favours(ask.tenant) { 1.0 } else { 0.0 };
        let place = profile.decode.per_request + profile.decode.per_token * f64::from(ask.tokens);
        // Those who are there must not be slowed down below their deadlines either.
        let tbt = ask.slo.tbt.min(occupancy.strictest(decode)).as_secs_f64();
        let allowed = tbt + favour * self.options.bonus * place;
        let slow = |step: Step| if step.batch > 1.0 { exceeds(allowed, step.seconds, step.spread) } else { 0.0 };
        // Those who were promised a place later must find it, too.
        let last = occupancy.last_join(decode).filter(|&last| last > judged);
        let then = last.map_or(0.0, |last| slow(forecast(decode, last)));
        let door = first(join, judged, |at| forecast(decode, at).seconds <= tbt).since(join);
        let spread = (outlook.ttft.high - outlook.ttft.low) / (2.0 * 1.645);
        let late = exceeds(ask.slo.ttft.as_secs_f64(), outlook.ttft.expected + door.as_secs_f64(), spread);
        let cost = self.price.cost(outlook.prefill + place * survival.mean(ask.hint), self.options.turns);
        let cost = if favour > 0.0 { Cost::Fine } else { cost };
        let level = self.options.level;
        let figures = Figures { late, slow: slow(step).max(then), level, cost };
        // When the forecast, without anybody new, would let it in.
        let room = |secs: &u64| slow(forecast(decode, judged + Duration::from_secs(*secs))) <= level;
        let until_room = || Duration::from_secs([1, 2, 4, 8, 16, 32].into_iter().find(room).unwrap_or(60));
        let reason = figures.judge();
        let until_room = if reason == Some(Reason::Tbt) { until_room() } else { Duration::from_secs(1) };
        self.price.on_judged(cost, reason);
        let verdict = match reason {
            None => Verdict::Admit,
            Some(Reason::Ttft) => refuse_ttft(ask, outlook.ttft),
            Some(reason) => self.refuse(now, reason, until_room),
        };
        Answer { verdict, decode: Some(decode), join, door, step, figures }
    }

    /// Tells a request to come back when a place is free for it, after all that were refused before.
    fn refuse(&mut self, now: Instant, reason: Reason, until_room: Duration) -> Verdict {
        let rate = self.ended_by(now) / RATE_MEMORY;
        let next = self.promised + span((1.0 / rate).min(1.0));
        self.promised = (now + until_room).max(next).min(now + RETRY_MAX);
        Verdict::Refuse { reason, retry_after: self.promised.since(now) }
    }

    fn down(&mut self, now: Instant) -> Answer {
        let verdict = self.refuse(now, Reason::Down, Duration::from_secs(1));
        let figures = Figures { late: 1.0, slow: 1.0, level: self.options.level, cost: Cost::NoInstance };
        Answer { verdict, decode: None, join: now, door: Duration::ZERO, step: Step::default(), figures }
    }
}

/// A prompt's way to its decode instance.
///
/// Example: [`Admission::at_door`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When the request came.
    pub arrived: Instant,
    /// When its prefill was done.
    pub prefilled: Instant,
    /// The least deadline between tokens of those in the batch.
    pub tbt: Duration,
}

fn refuse_ttft(ask: &Ask, ttft: Interval) -> Verdict {
    let over = span(ttft.high - ask.slo.ttft.as_secs_f64()).max(Duration::from_secs(1));
    Verdict::Refuse { reason: Reason::Ttft, retry_after: over.min(RETRY_MAX) }
}

/// The first moment from `from` to `to` at which `is` holds, if it goes on to hold then, to a 32nd of the span; `to` if there
/// is none.
fn first(from: Instant, to: Instant, is: impl Fn(Instant) -> bool) -> Instant {
    if is(from) {
        return from;
    }
    let (mut low, mut high) = (from, to);
    for _ in 0..5 {
        let middle = low + Duration::from_nanos(high.since(low).as_nanos() / 2);
        if is(middle) { high = middle } else { low = middle }
    }
    high
}

fn count(occupancy: &Occupancy) -> u32 {
    u32::try_from(occupancy.len()).unwrap_or(u32::MAX)
}

fn fits(profile: &Profile, ask: &Ask, view: DecodeView) -> bool {
    !view.down && (view.batch == 0 || view.context + u64::from(ask.tokens) <= profile.decode_tokens_max)
}

fn step(profile: &Profile, tokens: u32, view: DecodeView) -> f64 {
    profile.decode.seconds(view.batch + 1, view.context + u64::from(tokens))
}

/// The instance with the shortest step, whether or not it has room; the first of equals.
fn least(profile: &Profile, tokens: u32, views: impl Iterator<Item = DecodeView>) -> Option<u32> {
    let steps = (0_u32..).zip(views).filter(|(_, view)| !view.down);
    steps.map(|(instance, view)| (span(step(profile, tokens, view)), instance)).min().map(|(_, instance)| instance)
}

fn span(seconds: f64) -> Duration {
    Duration::from_nanos(nanos(seconds * 1e9))
}

/// The chance that a normal variable exceeds `limit`.
fn exceeds(limit: f64, mean: f64, spread: f64) -> f64 {
    if spread <= 0.0 {
        return if mean > limit { 1.0 } else { 0.0 };
    }
    libm::erfc((limit - mean) / spread / core::f64::consts::SQRT_2) / 2.0
}
