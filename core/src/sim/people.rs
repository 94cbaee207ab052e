//! What a trace does not say of its requests: whose they are, how urgent, what they announce; drawn from the seed.

use alloc::vec::Vec;

use super::cluster::normal;
use super::setup::{Retries, Setup};
use super::trace::Trace;
use crate::random::Random;
use crate::sched::admission::Slo;

pub(super) struct People {
    random: Random,
    /// Shares of the requests, added up.
    tenants: Vec<f64>,
    /// Shares of the requests, added up.
    classes: Vec<(f64, Slo, u8)>,
    slo: Slo,
    retries: Retries,
    /// Who comes back: of its own, so that nothing else changes with it.
    returning: Random,
    hint_noise: Option<f64>,
    /// Requests that fit into a batch within the deadline between tokens.
    batch: f64,
    /// Seconds of an instance per decoded token.
    token: f64,
}

pub(super) struct Person {
    pub(super) hint: Option<u32>,
    pub(super) tenant: u32,
    pub(super) priority: u8,
    pub(super) slo: Slo,
    /// How often it comes back if it is refused.
    pub(super) tries: u32,
}

impl People {
    pub(super) fn new(trace: &Trace, setup: &Setup) -> Self {
        let mut sum = 0.0;
        let tenants = setup.tenants.iter().map(|tenant| {
            sum += tenant.offered;
            sum
        });
        let tenants = tenants.collect();
        let mut sum = 0.0;
        let classes = setup.classes.iter().map(|class| {
            sum += class.share;
            (sum, class.slo, class.priority)
        });
        let classes = classes.collect();
        let requests = trace.requests();
        let context =
            |sum, one: &super::trace::Request| sum + f64::from(one.input_tokens) + f64::from(one.output_tokens) / 2.0;
        let context = requests.iter().fold(0.0, context) / (requests.len() as f64).max(1.0);
        let tbt = setup.slo.tbt.as_secs_f64();
        let batch = f64::from(setup.profile.decode.batch_max(tbt, context));
        Self {
            random: Random::new(setup.seed ^ 0x7065_6f70_6c65),
            tenants,
            classes,
            slo: setup.slo,
            retries: setup.retries,
            returning: Random::new(setup.seed ^ 0x7265_7475_726e),
            hint_noise: setup.hint_noise,
            batch,
            token: tbt / batch.max(1.0),
        }
    }

    /// The next request's. The same numbers are drawn whatever the setup, so that runs can be compared request by request.
    pub(super) fn next(&mut self, output: u32) -> Person {
        let (whose, class, noise) = (self.random.unit(), self.random.unit(), normal(&mut self.random));
        let whose = whose * self.tenants.last().copied().unwrap_or(0.0);
        let tenant = u32::try_from(self.tenants.iter().take_while(|&&end| end <= whose).count()).unwrap_or(u32::MAX);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
        let hint = self.hint_noise.map(|deviation| (f64::from(output) * libm::exp(deviation * noise)).max(1.0) as u32);
        let class = self.classes.iter().find(|(end, ..)| class < *end);
        let (slo, priority) = class.map_or((self.slo, 0), |&(_, slo, priority)| (slo, priority));
        let tries = if self.returning.unit() < self.retries.share { self.retries.tries } else { 0 };
        Person { hint, tenant, priority, slo, tries }
    }

    /// Seconds of an instance that decoding so many tokens costs.
    pub(super) fn decode_cost(&self, output: u32) -> f64 {
        self.token * f64::from(output)
    }

    pub(super) fn length_blind_bound(&self, trace: &Trace, setup: &Setup) -> f64 {
        let requests = trace.requests();
        let tokens = requests.iter().map(|one| f64::from(one.output_tokens)).sum::<f64>();
        let rate = setup.decode as f64 * self.batch / setup.slo.tbt.as_secs_f64();
        let served = rate * trace.span().as_secs_f64() * requests.len() as f64 / tokens.max(1.0);
        served.min(requests.len() as f64)
    }
}
