//! How full decode instances will be: who is there, who is on the way, and how long answers last.
//!
//! A [`Survival`] curve is learned from the answers that ended; an [`Occupancy`] knows the requests of each decode instance,
//! those still in prefill included, and forecasts the step time at a later moment with its spread (each request is there
//! with some chance, independently of the others).

use alloc::vec::Vec;

use super::cost::Profile;
use super::placement::DecodeView;
use crate::time::{Duration, Instant};

const BUCKETS: usize = 128;
/// Tokens of a bucket.
const BUCKET_TOKENS: f64 = 32.0;
/// Shares of the hint in a bucket.
const BUCKET_SHARE: f64 = 1.0 / 16.0;
/// Observations that the first guess counts as.
const PRIOR: f64 = 20.0;
/// The first guess: answers end at random, after this many tokens on average.
const PRIOR_TOKENS: f64 = 300.0;
/// What an observation counts after one more.
const FORGETTING: f64 = 0.9995;

/// How long answers last: the share that is longer than so many tokens, learned from those that ended.
///
/// ```
/// use millpond_core::sched::forecast::Survival;
/// let mut survival = Survival::default();
/// (0..2_000).for_each(|_| survival.on_ended(400, None));
/// assert!(survival.stays(100, 100.0, None) > 0.95); // of those with 100 tokens, nearly all get 200
/// assert!(survival.stays(300, 200.0, None) < 0.1);
/// ```
#[derive(Clone, Debug)]
pub struct Survival {
    /// By tokens, and by tokens over the hint.
    plain: Curve,
    hinted: Curve,
}

impl Default for Survival {
    fn default() -> Self {
        let plain = |edge: f64| libm::exp(-edge * BUCKET_TOKENS / PRIOR_TOKENS);
        // A hint is right within a factor of two or so, either way.
        let hinted = |edge: f64| ((2.0 - edge * BUCKET_SHARE) / 1.75).clamp(0.0, 1.0);
        Self { plain: Curve::new(plain), hinted: Curve::new(hinted) }
    }
}

impl Survival {
    /// An answer ended after `tokens`; `hint` is what had been announced.
    pub fn on_ended(&mut self, tokens: u32, hint: Option<u32>) {
        self.plain.on_ended(f64::from(tokens) / BUCKET_TOKENS);
        if let Some(hint) = hint {
            self.hinted.on_ended(f64::from(tokens) / f64::from(hint.max(1)) / BUCKET_SHARE);
        }
    }

    /// The chance that an answer that has `age` tokens gets `more`.
    #[must_use]
    pub fn stays(&self, age: u32, more: f64, hint: Option<u32>) -> f64 {
        let (curve, unit) = match hint {
            Some(hint) => (&self.hinted, f64::from(hint.max(1)) * BUCKET_SHARE),
            None => (&self.plain, BUCKET_TOKENS),
        };
        curve.stays(f64::from(age) / unit, more / unit)
    }

    /// The expected length of an answer, in tokens.
    #[must_use]
    pub fn mean(&self, hint: Option<u32>) -> f64 {
        match hint {
            Some(hint) => f64::from(hint) * BUCKET_SHARE * self.hinted.mean(),
            None => BUCKET_TOKENS * self.plain.mean(),
        }
    }
}

/// Shares of what is longer than each edge; counts fade as new ones come.
#[derive(Clone, Debug)]
struct Curve {
    counts: [f64; BUCKETS],
    /// What an observation counts now: it grows, instead of all counts shrinking.
    unit: f64,
    longer: [f64; BUCKETS + 1],
    stale: u32,
}

impl Curve {
    fn new(survival: impl Fn(f64) -> f64) -> Self {
        let mut counts = [0.0; BUCKETS];
        for (bucket, count) in counts.iter_mut().enumerate() {
            let next = if bucket + 1 == BUCKETS { 0.0 } else { survival(bucket as f64 + 1.0) };
            *count = PRIOR * (survival(bucket as f64) - next);
        }
        let mut new = Self { counts, unit: 1.0, longer: [0.0; BUCKETS + 1], stale: 0 };
        new.sum();
        new
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
    fn on_ended(&mut self, at: f64) {
        self.counts[(at as usize).min(BUCKETS - 1)] += self.unit;
        self.unit /= FORGETTING;
        if self.unit > 1e6 {
            self.counts.iter_mut().for_each(|count| *count /= self.unit);
            self.unit = 1.0;
        }
        // One more hardly moves a curve of thousands: it is summed again every eighth time.
        self.stale += 1;
        if self.stale == 8 {
            self.sum();
        }
    }

    fn sum(&mut self) {
        self.stale = 0;
        self.longer[BUCKETS] = 0.0;
        for bucket in (0..BUCKETS).rev() {
            self.longer[bucket] = self.longer[bucket + 1] + self.counts[bucket];
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
    fn longer(&self, at: f64) -> f64 {
        let bucket = (at as usize).min(BUCKETS - 1);
        let within = (at - bucket as f64).min(1.0);
        self.longer[bucket] + (self.longer[bucket + 1] - self.longer[bucket]) * within
    }

    fn stays(&self, age: f64, more: f64) -> f64 {
        let now = self.longer(age);
        // Longer than all that were seen: what is left is anybody's guess, and a bucket is the unit of guessing.
        if now <= 0.0 { libm::exp2(-more) } else { self.longer(age + more) / now }
    }

    fn mean(&self) -> f64 {
        self.longer[..BUCKETS].iter().zip(&self.longer[1..]).map(|(a, b)| (a + b) / 2.0).sum::<f64>() / self.longer[0]
    }
}

/// A request on a decode instance, or on its way there.
///
/// Example: [`Occupancy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// The caller's name for it.
    pub id: u64,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// What it announced about its answer's length.
    pub hint: Option<u32>,
    /// Its deadline between tokens: nobody may slow the batch down below it.
    pub tbt: Duration,
    /// When it joins, or joined, the batch.
    pub join: Instant,
    /// The instance's count of steps when it joined; `None` before that.
    pub joined: Option<u64>,
}

/// The requests of each decode instance, reserved from the moment they are admitted.
///
/// ```
/// use millpond_core::sched::forecast::{Occupancy, Resident};
/// use millpond_core::time::{Duration, Instant};
/// let mut occupancy = Occupancy::new(2);
/// let tbt = Duration::from_millis(100);
/// occupancy.reserve(1, Resident { id: 7, tokens: 9_000, hint: None, tbt, join: Instant::from_nanos(5), joined: None });
/// assert_eq!((occupancy.strictest(1), occupancy.strictest(0)), (tbt, Duration::MAX));
/// assert_eq!((occupancy.view(0).batch, occupancy.view(1).batch, occupancy.view(1).context), (0, 1, 9_000));
/// occupancy.on_joined(1, 7, Instant::from_nanos(6));
/// occupancy.on_steps(1, 10);
/// assert_eq!(occupancy.view(1).context, 9_010);
/// occupancy.on_left(1, 7);
/// assert_eq!(occupancy.view(1).batch, 0);
/// ```
#[derive(Clone, Debug)]
pub struct Occupancy {
    instances: Vec<Instance>,
}

#[derive(Clone, Debug, Default)]
struct Instance {
    residents: Vec<Resident>,
    joined: u32,
    steps: u64,
    down: bool,
}

/// The step of a decode instance at a later moment, with one more request in it.
///
/// Example: [`Occupancy::forecast`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// Expected requests, the new one included.
    pub batch: f64,
    /// Expected seconds.
    pub seconds: f64,
    /// Standard deviation of the seconds.
    pub spread: f64,
}

impl Occupancy {
    /// Of so many decode instances, all empty.
    #[must_use]
    pub fn new(instances: usize) -> Self {
        Self { instances: alloc::vec![Instance::default(); instances] }
    }

    /// A request will join, or joined, `instance`.
    pub fn reserve(&mut self, instance: u32, resident: Resident) {
        let instance = &mut self.instances[instance as usize];
        instance.joined += u32::from(resident.joined.is_some());
        instance.residents.push(resident);
    }

    /// A reserved request joined the batch.
    pub fn on_joined(&mut self, instance: u32, id: u64, now: Instant) {
        let instance = &mut self.instances[instance as usize];
        if let Some(resident) = instance.residents.iter_mut().find(|resident| resident.id == id) {
            instance.joined += u32::from(resident.joined.is_none());
            (resident.joined, resident.join) = (Some(instance.steps), now);
        }
    }

    /// A request ended, failed or was refused after all; gives it back.
    pub fn on_left(&mut self, instance: u32, id: u64) -> Option<Resident> {
        let instance = &mut self.instances[instance as usize];
        let place = instance.residents.iter().position(|resident| resident.id == id)?;
        let left = instance.residents.swap_remove(place);
        instance.joined -= u32::from(left.joined.is_some());
        Some(left)
    }

    /// The instance has done so many steps since it began.
    pub fn on_steps(&mut self, instance: u32, steps: u64) {
        self.instances[instance as usize].steps = steps;
    }

    /// An instance goes away, with all its requests, or comes back.
    ///
    /// ```
    /// use millpond_core::sched::forecast::{Occupancy, State};
    /// Occupancy::new(2).on_state(1, State::Down);
    /// ```
    pub fn on_state(&mut self, instance: u32, state: State) {
        let instance = &mut self.instances[instance as usize];
        *instance = Instance { down: state == State::Down, ..Instance::default() };
    }

    /// How many instances there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.instances.len()
    }

    /// Whether there is no instance.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.instances.is_empty()
    }

    /// All requests of an instance, reserved ones included, and their context.
    #[must_use]
    pub fn view(&self, instance: u32) -> DecodeView {
        self.count(instance, |_| true)
    }

    /// The requests in the batch of an instance, without those on their way.
    #[must_use]
    pub fn view_now(&self, instance: u32) -> DecodeView {
        self.count(instance, |resident| resident.joined.is_some())
    }

    /// The requests of an instance.
    #[must_use]
    pub fn residents(&self, instance: u32) -> &[Resident] {
        &self.instances[instance as usize].residents
    }

    /// The least deadline between tokens of the requests of an instance, reserved ones included; the longest there is if it
    /// has none.
    #[must_use]
    pub fn strictest(&self, instance: u32) -> Duration {
        self.instances[instance as usize].residents.iter().map(|one| one.tbt).min().unwrap_or(Duration::MAX)
    }

    /// When the last of those that are on their way to an instance joins; `None` if nobody is.
    #[must_use]
    pub fn last_join(&self, instance: u32) -> Option<Instant> {
        let residents = self.instances[instance as usize].residents.iter();
        residents.filter(|one| one.joined.is_none()).map(|one| one.join).max()
    }

    /// Forecasts the step of `instance` at `at` if a prompt of `tokens` joins it. O(its requests).
    ///
    /// ```
    /// use millpond_core::sched::forecast::{Occupancy, Survival};
    /// use millpond_core::{sched::cost::Profile, time::Instant};
    /// let (now, later) = (Instant::ZERO, Instant::from_nanos(1));
    /// let step = Occupancy::new(1).forecast(0, 8_000, now, later, &Survival::default(), &Profile::default());
    /// assert_eq!((step.batch, step.spread), (1.0, 0.0));
    /// assert!((step.seconds - 0.0293).abs() < 1e-4);
    /// ```
    #[must_use]
    pub fn forecast(
        &self,
        instance: u32,
        tokens: u32,
        now: Instant,
        at: Instant,
        survival: &Survival,
        profile: &Profile,
    ) -> Step {
        let decode = &profile.decode;
        let present = self.view_now(instance);
        let gap = decode.seconds(present.batch.max(1), present.context);
        let instance = &self.instances[instance as usize];
        let one = |context: f64| decode.per_request + decode.per_token * context;
        let (mut batch, mut seconds, mut variance) = (1.0, decode.fixed + one(f64::from(tokens)), 0.0);
        for resident in &instance.residents {
            let age = resident.joined.map_or(0, |joined| u32::try_from(instance.steps - joined).unwrap_or(u32::MAX));
            let since = if resident.joined.is_some() { now } else { resident.join.max(now) };
            let more = at.since(since).as_secs_f64() / gap;
            let stays = if at < since { 0.0 } else { survival.stays(age, more, resident.hint) };
            let cost = one(f64::from(resident.tokens) + f64::from(age) + more);
            batch += stays;
            seconds += stays * cost;
            variance += stays * (1.0 - stays) * cost * cost;
        }
        Step { batch, seconds, spread: libm::sqrt(variance) }
    }

    fn count(&self, instance: u32, which: impl Fn(&Resident) -> bool) -> DecodeView {
        let instance = &self.instances[instance as usize];
        let mut view = DecodeView { down: instance.down, batch: 0, context: 0 };
        for resident in instance.residents.iter().filter(|resident| which(resident)) {
            view.batch += 1;
            view.context += u64::from(resident.tokens) + resident.joined.map_or(0, |joined| instance.steps - joined);
        }
        view
    }
}

/// Whether an instance serves.
///
/// Example: [`Occupancy::on_state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It serves.
    Up,
    /// It does not.
    Down,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    fn resident(id: u64, join: Instant) -> Resident {
        Resident { id, tokens: 1_000, hint: None, tbt: Duration::MAX, join, joined: None }
    }

    #[test]
    fn without_observations_answers_end_at_random() {
        let survival = Survival::default();
        for age in [0, 320, 640] {
            let stays = survival.stays(age, 320.0, None);
            assert!((stays - libm::exp(-320.0 / 300.0)).abs() < 0.01, "{age}: {stays}");
        }
        assert!((survival.mean(None) - 300.0).abs() < 5.0, "{}", survival.mean(None));
    }

    #[test]
    fn hints_scale_the_curve() {
        let mut survival = Survival::default();
        for i in 0..4_000_u32 {
            let hint = 50 + i % 1_000;
            survival.on_ended(hint * (80 + i * 7919 % 40) / 100, Some(hint));
        }
        for hint in [100, 1_000] {
            assert!(survival.stays(0, 0.7 * f64::from(hint), Some(hint)) > 0.95);
            assert!(survival.stays(0, 1.3 * f64::from(hint), Some(hint)) < 0.05);
            assert!((survival.mean(Some(hint)) / f64::from(hint) - 1.0).abs() < 0.06, "{}", survival.mean(Some(hint)));
        }
    }

    #[test]
    fn an_answer_longer_than_all_others_may_still_end() {
        let survival = Survival::default();
        let stays = survival.stays(1_000_000, 64.0, None);
        assert!((0.0..0.9).contains(&stays), "{stays}");
    }

    #[test]
    fn the_forecast_of_the_present_is_the_present() {
        let (profile, survival) = (Profile::default(), Survival::default());
        let mut occupancy = Occupancy::new(1);
        for id in 0..5 {
            occupancy.reserve(0, resident(id, Instant::ZERO));
            occupancy.on_joined(0, id, Instant::ZERO);
        }
        // One that joins in an hour is not there yet.
        occupancy.reserve(0, resident(9, Instant::ZERO + Duration::from_secs(3_600)));
        let now = Instant::ZERO + Duration::from_secs(1);
        let step = occupancy.forecast(0, 1_000, now, now, &survival, &profile);
        assert!((step.seconds - profile.decode.seconds(6, 6_000)).abs() < 1e-9 && step.spread < 1e-9, "{step:?}");
        assert_eq!((occupancy.view(0).batch, occupancy.view_now(0).batch), (6, 5));
    }

    #[test]
    fn the_forecast_sees_answers_end_and_reserved_requests_come() {
        let (profile, mut survival) = (Profile::default(), Survival::default());
        (0..5_000).for_each(|_| survival.on_ended(200, None));
        let mut occupancy = Occupancy::new(1);
        for id in 0..10 {
            occupancy.reserve(0, resident(id, Instant::ZERO));
            occupancy.on_joined(0, id, Instant::ZERO);
        }
        occupancy.on_steps(0, 100);
        let now = Instant::ZERO + Duration::from_secs(6);
        occupancy.reserve(0, resident(10, now + Duration::from_secs(15)));
        let at = |secs| occupancy.forecast(0, 1_000, now, now + Duration::from_secs(secs), &survival, &profile).batch;
        // 56 ms a step: in 3 s all ten have 154 tokens; in 14 s all ended, in 16 s the eleventh is there.
        assert!(at(3) > 10.5 && at(14) < 1.2 && at(16) > 1.9, "{} {} {}", at(3), at(14), at(16));
    }
}
