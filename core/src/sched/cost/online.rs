//! Models that learn while requests are served, and bands that say how far to trust them.

use super::{Prefill, Work};

/// What a measured time counts after a thousand more: about a third.
const FORGETTING: f64 = 0.999;
/// How far the given coefficients are trusted at first, relative.
const PRIOR_SPREAD: f64 = 0.1;

/// A prefill model that is refined with every measured prefill: recursive least squares on the relative error, old
/// measurements fading: one counts a third after a thousand more.
///
/// ```
/// use millpond_core::sched::cost::{Prefill, Refined, Work};
/// let slow = Prefill { fixed: 0.0, linear: 2e-4, quadratic: 0.0 };
/// let mut model = Refined::new(Prefill { fixed: 0.0, linear: 1e-4, quadratic: 0.0 });
/// for new in (1_000..10_000).step_by(50) {
///     let work = Work { new, prefix: 0 };
///     model.on_measured(work, slow.seconds(work));
/// }
/// let work = Work { new: 5_000, prefix: 0 };
/// assert!((model.model().seconds(work) / slow.seconds(work) - 1.0).abs() < 0.05);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refined {
    /// In units of the first coefficients' scale.
    theta: [f64; 3],
    scale: [f64; 3],
    covariance: [[f64; 3]; 3],
}

impl Refined {
    /// Starts from `model`, trusted to a tenth.
    #[must_use]
    pub fn new(model: Prefill) -> Self {
        let given = [model.fixed, model.linear, model.quadratic];
        // A coefficient of zero may grow too: to a hundredth of a second, or as much at a thousand tokens.
        const LEAST: [f64; 3] = [1e-2, 1e-5, 1e-11];
        let scale: [f64; 3] = core::array::from_fn(|i| given[i].max(LEAST[i]));
        let variance = |i: usize| if given[i] > LEAST[i] { PRIOR_SPREAD * PRIOR_SPREAD } else { 1.0 };
        Self {
            theta: core::array::from_fn(|i| given[i] / scale[i]),
            scale,
            covariance: core::array::from_fn(|i| core::array::from_fn(|j| if i == j { variance(i) } else { 0.0 })),
        }
    }

    /// A prefill of `work` took `seconds`. Times that are not positive are ignored.
    pub fn on_measured(&mut self, work: Work, seconds: f64) {
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let features = work.features();
        let row: [f64; 3] = core::array::from_fn(|i| features[i] * self.scale[i] / seconds);
        let spread: [f64; 3] = core::array::from_fn(|i| (0..3).map(|j| self.covariance[i][j] * row[j]).sum());
        // The noise of one measurement is taken as large as the first distrust: neither rules at once.
        let noise = FORGETTING * PRIOR_SPREAD * PRIOR_SPREAD;
        let gain = noise + (0..3).map(|i| row[i] * spread[i]).sum::<f64>();
        let error = 1.0 - (0..3).map(|i| self.theta[i] * row[i]).sum::<f64>();
        for i in 0..3 {
            self.theta[i] += spread[i] / gain * error;
            for j in 0..3 {
                let reduced = self.covariance[i][j] - spread[i] * spread[j] / gain;
                // Without news in a direction its variance would grow for ever: it ends at the first distrust.
                self.covariance[i][j] = (reduced / FORGETTING).clamp(-1.0, 1.0);
            }
        }
    }

    /// The model as it stands; coefficients that went below zero are zero.
    #[must_use]
    pub fn model(&self) -> Prefill {
        let at = |i: usize| (self.theta[i] * self.scale[i]).max(0.0);
        Prefill { fixed: at(0), linear: at(1), quadratic: at(2) }
    }

    /// The standard error of the prediction for `work`, in seconds: from the coefficients alone, without the noise of a
    /// single run ([`Band`] has both).
    #[must_use]
    pub fn error(&self, work: Work) -> f64 {
        let features = work.features();
        let row: [f64; 3] = core::array::from_fn(|i| features[i] * self.scale[i]);
        let variance: f64 = (0..3).map(|i| (0..3).map(|j| row[i] * self.covariance[i][j] * row[j]).sum::<f64>()).sum();
        libm::sqrt(variance.max(0.0))
    }
}

/// A predicted time with its bounds, in seconds.
///
/// Example: [`Band`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Below this in half of the misses.
    pub low: f64,
    /// The prediction.
    pub expected: f64,
    /// Above this in the other half.
    pub high: f64,
}

impl Interval {
    /// Whether `seconds` lies within the bounds.
    #[must_use]
    pub fn covers(&self, seconds: f64) -> bool {
        self.low <= seconds && seconds <= self.high
    }
}

/// How far predictions of one kind were off, as a band that covers a set share of them in the long run.
///
/// Its edges are quantiles of the relative error, followed online (adaptive conformal prediction: an edge moves out by a
/// large step on a miss, in by a small one on a hit), so the share holds whatever the errors are distributed like, as long as
/// they are not all alike: of errors that are zero the band covers all. What counts as a miss is judged by the interval that
/// was issued, not by the one that would be now: answers come late, and by then the band has moved on, so the share would
/// hold for intervals that nobody saw.
///
/// ```
/// use millpond_core::sched::cost::Band;
/// let mut band = Band::new(0.9);
/// let mut covered = 0;
/// for i in 0..4_000_u32 {
///     let actual = 1.0 + f64::from(i * 7919 % 1000) / 1000.0; // 1 to 2 where 1 was predicted
///     let issued = band.interval(1.0);
///     covered += u32::from(issued.covers(actual));
///     band.on_measured(issued, actual);
/// }
/// assert!((3_500..=3_700).contains(&covered), "{covered}");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    tail: f64,
    low: f64,
    high: f64,
    /// Mean size of the errors: the unit of a step.
    spread: f64,
}

/// Seconds that are added to a prediction before errors are divided by it: short predictions are off by waiting, not by a share.
const SOFTENING: f64 = 0.2;
/// Step of an edge, in units of the mean error.
const STEP: f64 = 0.1;
/// Measurements over which the mean error is taken.
const MEMORY: f64 = 200.0;

impl Band {
    /// A band for the `coverage` share of what is predicted, between 0 and 1; at first 10 % wide on each side.
    #[must_use]
    pub fn new(coverage: f64) -> Self {
        Self {
            tail: (1.0 - coverage.clamp(0.0, 1.0)) / 2.0,
            low: -PRIOR_SPREAD,
            high: PRIOR_SPREAD,
            spread: PRIOR_SPREAD,
        }
    }

    /// The band around a prediction of `expected` seconds.
    #[must_use]
    pub fn interval(&self, expected: f64) -> Interval {
        let unit = expected + SOFTENING;
        let low = (expected + self.low.min(self.high) * unit).max(0.0);
        Interval { low, expected, high: (expected + self.high.max(self.low) * unit).max(low) }
    }

    /// What was predicted as `issued` took `actual` seconds.
    pub fn on_measured(&mut self, issued: Interval, actual: f64) {
        let error = (actual - issued.expected) / (issued.expected + SOFTENING);
        if !error.is_finite() {
            return;
        }
        self.spread += (error.abs() - self.spread) / MEMORY;
        let step = STEP * self.spread;
        let moved = |above: bool, share: f64| if above { step * share } else { -step * (1.0 - share) };
        self.low += moved(actual >= issued.low, self.tail);
        self.high += moved(actual > issued.high, 1.0 - self.tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refined_model_follows_a_machine_that_became_slower() {
        let truth = Prefill { fixed: 0.02, linear: 1.5e-4, quadratic: 1e-9 };
        let mut model = Refined::new(Prefill { fixed: 0.0, linear: 1e-4, quadratic: 7e-10 });
        let before = model.error(Work { new: 8_000, prefix: 0 });
        for i in 0..2_000_u32 {
            let work = Work { new: 300 + i * 7919 % 20_000, prefix: i * 104_729 % 60_000 };
            model.on_measured(work, truth.seconds(work));
        }
        for work in [Work { new: 1_000, prefix: 0 }, Work { new: 20_000, prefix: 40_000 }] {
            let ratio = model.model().seconds(work) / truth.seconds(work);
            assert!((ratio - 1.0).abs() < 0.02, "{work:?}: {ratio}");
        }
        assert!(model.error(Work { new: 8_000, prefix: 0 }) < before);
    }

    #[test]
    fn nonsense_measurements_change_nothing() {
        let mut model = Refined::new(Prefill { fixed: 0.0, linear: 1e-4, quadratic: 0.0 });
        let before = model;
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            model.on_measured(Work { new: 5, prefix: 5 }, seconds);
        }
        assert_eq!(model, before);
        let mut band = Band::new(0.9);
        band.on_measured(band.interval(1.0), f64::NAN);
        assert_eq!(band, Band::new(0.9));
    }

    #[test]
    fn a_band_widens_when_errors_grow_and_never_goes_below_zero_seconds() {
        let mut band = Band::new(0.8);
        let narrow = band.interval(1.0);
        for i in 0..2_000_u32 {
            band.on_measured(band.interval(1.0), if i % 2 == 0 { 0.2 } else { 3.0 });
        }
        let wide = band.interval(1.0);
        assert!(wide.high > narrow.high && wide.low < narrow.low && wide.low >= 0.0, "{wide:?}");
    }
}
