//! Workloads and machines that exist only as numbers: what a cluster would do, computed.
//!
//! [`trace`] is what arrives; [`run`] sends it through a cluster ([`Setup`]) that is decided about by [`crate::sched`], the
//! same code that serves. No clock and no I/O here either: the same inputs and seed give the same results, bit for bit.

mod batch;
pub mod cache;
mod cluster;
mod coupled;
mod memory;
mod network;
mod outcome;
mod people;
mod pipeline;
pub mod random;
mod setup;
#[cfg(test)]
mod tests;
pub mod trace;

pub use self::batch::mean_of_longest;
pub use self::memory::INSTANCES_MAX;
pub use self::outcome::{Fate, Load, Outcome, Served, TenantUse, percentile};
pub use self::setup::{Baseline, Class, Retries, Setup, SetupError, Tenant};

/// Sends a trace through a cluster.
///
/// # Errors
/// There is no such cluster: [`Setup::check`].
///
/// ```
/// use millpond_core::sim::{Fate, Setup, run, trace::Synthetic};
/// let trace = Synthetic { requests: 20, ..Synthetic::default() }.trace();
/// let outcome = run(&trace, &Setup::default()).unwrap();
/// assert_eq!(outcome.count(Fate::Running), 0);
/// ```
pub fn run(trace: &trace::Trace, setup: &Setup) -> Result<Outcome, SetupError> {
    setup.check()?;
    if setup.coupled > 0 {
        return Ok(coupled::Coupled::new(trace, setup).run());
    }
    Ok(cluster::Cluster::new(trace, setup).run())
}
