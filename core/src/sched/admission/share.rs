//! Tenants and their max-min fair shares.

use alloc::vec::Vec;

use crate::time::Instant;

/// Seconds over which use is remembered.
const MEMORY: f64 = 60.0;
/// How far above its fair share a tenant still counts as within it: shares are estimates.
const TOLERANCE: f64 = 1.05;

/// What tenants ask for and get, in seconds of instances: uncached prefill plus their part of decode steps, both after hits.
/// Use fades over a minute. A tenant is *favoured* while it asks for no more than its max-min fair share of what is
/// served; in a cluster that serves all nobody is.
///
/// ```
/// use millpond_core::sched::admission::Shares;
/// use millpond_core::time::Instant;
/// let mut shares = Shares::new(&[1.0, 1.0]);
/// // The first asks for 10 and the second for 90, and 50 can be served: the first is within its half.
/// shares.on_asked(Instant::ZERO, 0, 10.0);
/// shares.on_asked(Instant::ZERO, 1, 90.0);
/// shares.on_served(Instant::ZERO, 0, 5.0);
/// shares.on_served(Instant::ZERO, 1, 45.0);
/// assert!(shares.favours(0) && !shares.favours(1));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Shares {
    tenants: Vec<Tenant>,
    /// Tenants by what they ask per weight, the least first.
    order: Vec<u32>,
    at: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Tenant {
    weight: f64,
    asked: f64,
    served: f64,
    favoured: bool,
}

impl Shares {
    /// As many tenants as there are weights, each above 0.
    ///
    /// # Panics
    /// If a weight is not.
    #[must_use]
    pub fn new(weights: &[f64]) -> Self {
        assert!(weights.iter().all(|&weight| weight > 0.0), "a tenant's weight is above 0");
        let tenant = |&weight| Tenant { weight, asked: 0.0, served: 0.0, favoured: false };
        let count = u32::try_from(weights.len()).expect("tenants are numbered with 32 bits");
        Self { tenants: weights.iter().map(tenant).collect(), order: (0..count).collect(), at: Instant::ZERO }
    }

    /// A tenant asks for so many seconds. Tenants without a weight are ignored.
    pub fn on_asked(&mut self, now: Instant, tenant: u32, seconds: f64) {
        self.add(now, tenant, |tenant| tenant.asked += seconds);
    }

    /// A tenant is served so many seconds.
    pub fn on_served(&mut self, now: Instant, tenant: u32, seconds: f64) {
        self.add(now, tenant, |tenant| tenant.served += seconds);
    }

    /// Whether the tenant asks for no more than its share while not all can be served.
    #[must_use]
    pub fn favours(&self, tenant: u32) -> bool {
        self.tenants.get(tenant as usize).is_some_and(|tenant| tenant.favoured)
    }

    /// O(tenants), since what one does moves the others' shares.
    fn add(&mut self, now: Instant, tenant: u32, what: impl FnOnce(&mut Tenant)) {
        let Some(tenant) = self.tenants.get_mut(tenant as usize) else { return };
        what(tenant);
        let fade = libm::exp(-now.since(self.at).as_secs_f64() / MEMORY);
        self.at = now;
        for tenant in &mut self.tenants {
            (tenant.asked, tenant.served) = (tenant.asked * fade, tenant.served * fade);
        }
        self.share();
    }

    /// Water-filling: each gets what it asks, the least per weight first, as long as that is within an equal share of the
    /// rest.
    fn share(&mut self) {
        let tenants = &mut self.tenants;
        let per_weight = |tenant: &Tenant| tenant.asked / tenant.weight;
        self.order.sort_by(|&a, &b| per_weight(&tenants[a as usize]).total_cmp(&per_weight(&tenants[b as usize])));
        let asked: f64 = tenants.iter().map(|tenant| tenant.asked).sum();
        let mut left: f64 = tenants.iter().map(|tenant| tenant.served).sum();
        let mut weights: f64 = tenants.iter().map(|tenant| tenant.weight).sum();
        let short = left * TOLERANCE < asked;
        for &place in &self.order {
            let tenant = &mut tenants[place as usize];
            tenant.favoured = short && tenant.asked <= TOLERANCE * left * tenant.weight / weights;
            left -= tenant.asked.min(left * tenant.weight / weights);
            weights -= tenant.weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    fn shares(weights: &[f64], asked: &[f64], served: &[f64]) -> Shares {
        let mut shares = Shares::new(weights);
        for (tenant, (&asked, &served)) in (0..).zip(asked.iter().zip(served)) {
            shares.on_asked(Instant::ZERO, tenant, asked);
            shares.on_served(Instant::ZERO, tenant, served);
        }
        shares
    }

    fn favoured(shares: &Shares) -> [bool; 3] {
        [0, 1, 2].map(|tenant| shares.favours(tenant))
    }

    #[test]
    fn in_a_cluster_that_serves_all_nobody_is_favoured() {
        assert_eq!(favoured(&shares(&[1.0; 3], &[10.0, 90.0, 5.0], &[10.0, 90.0, 5.0])), [false; 3]);
        assert_eq!(favoured(&shares(&[1.0], &[100.0], &[50.0])), [false; 3]);
    }

    #[test]
    fn what_small_tenants_leave_is_shared_by_the_others() {
        // 60 are served: 10 for the first, then 25 each; 24 is within that, 66 is not.
        assert_eq!(favoured(&shares(&[1.0; 3], &[10.0, 24.0, 66.0], &[20.0, 20.0, 20.0])), [true, true, false]);
        assert_eq!(favoured(&shares(&[1.0; 3], &[10.0, 40.0, 50.0], &[20.0, 20.0, 20.0])), [true, false, false]);
    }

    #[test]
    fn weights_scale_the_shares() {
        assert_eq!(favoured(&shares(&[3.0, 1.0, 1.0], &[29.0, 40.0, 40.0], &[20.0, 15.0, 15.0])), [true, false, false]);
        assert_eq!(favoured(&shares(&[1.0, 3.0, 1.0], &[29.0, 40.0, 40.0], &[20.0, 15.0, 15.0])), [false; 3]);
    }

    #[test]
    fn use_is_forgotten() {
        let mut shares = shares(&[1.0; 2], &[90.0, 10.0], &[40.0, 10.0]);
        assert!(!shares.favours(0) && shares.favours(1));
        let later = Instant::ZERO + Duration::from_secs(600);
        shares.on_asked(later, 0, 1.0);
        shares.on_asked(later, 1, 9.0);
        shares.on_served(later, 1, 4.0);
        assert!(shares.favours(0) && !shares.favours(1));
        shares.on_asked(later, 7, 1e9); // nobody we know
        assert!(shares.favours(0));
    }
}
