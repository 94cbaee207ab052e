//! Workloads and machines that exist only as numbers: what a cluster would do, computed.
//!
//! [`trace`] is what arrives; [`run`] sends it through a cluster ([`Setup`]) that is decided about by [`crate::sched`], the
//! same code that serves. No clock and no I/O here either: the same inputs and seed give the same results, bit for bit.
//!
//! What can be turned, where, and the test that pins it (`replay` has a flag of that name, or takes it as `--set NAME=VALUE`):
//!
//! | knob | in | `replay` | test |
//! |---|---|---|---|
//! | nodes; coupled instances, plain, prefix caching, chunked | [`Setup`], [`Baseline`] | `--prefill --decode --coupled --baseline` | `coupled_instances_stall_decodes_and_chunks_share_the_time` |
//! | requests that a coupled instance takes together | [`Setup::together`] | `together` | `coupled_instances_share_what_decodes_and_may_work_one_by_one` |
//! | placement, threshold, order of lines | [`Setup::placement`], [`Setup::order`] | `--policy`, `threshold push_back order` | `a_line_is_served_in_its_order`, `a_prefix_is_pulled_to_an_idle_node` |
//! | admission, level, hold, bonus, turns | [`Setup::admission`] | `--admission`, `level hold_ms bonus turns` | `each_admission_does_what_its_name_says_to_a_second_request_that_is_one_too_many`, `a_prompt_held_at_the_door_joins_when_a_place_is_free_or_is_refused_when_its_time_is_over` |
//! | deadlines, also by class of requests; priorities | [`Setup::slo`], [`Setup::classes`] | `ttft_ms tbt_ms class` | `each_request_is_judged_by_its_own_deadlines_and_nobody_slows_down_the_strict` |
//! | who is refused comes back | [`Setup::retries`] | `retries` | `a_refused_request_comes_back_when_told_to_with_a_higher_priority` |
//! | tenants and weights | [`Setup::tenants`] | `tenants weights` | `tenants_get_their_fair_shares_and_predicted_intervals_hold_as_often_as_they_should` |
//! | announced lengths, off by so much | [`Setup::hint_noise`] | `hint_noise` | `a_run_is_the_same_bit_for_bit_whatever_is_switched_on` |
//! | cache of a node or a pool, what it evicts | [`Setup::cache_blocks`], [`Setup::pooled`], [`Setup::evict`] | `--cache-blocks --evict`, `pooled` | `a_full_cache_forgets_and_a_pool_is_read_by_all` |
//! | chunked pipeline of prefill | [`Setup::pipeline`], [`Setup::chunk`], [`Setup::hop`] | `pipeline chunk hop_ms` | `two_stages_overlap_the_chunks` |
//! | index that is late or loses events | [`Setup::staleness`], [`Setup::event_loss`] | `staleness_ms event_loss` | `an_index_that_hears_nothing_sends_requests_to_blocks_that_are_gone` |
//! | noise, which is also the tail of decode steps | [`Setup::prefill_noise`], [`Setup::decode_noise`] | `prefill_noise decode_noise` | `a_run_is_the_same_bit_for_bit_whatever_is_switched_on` |
//! | NICs shared by transfers; costs | [`Setup::profile`] | `--profile FILE` | `the_busier_end_decides`, `a_slow_network_delays_the_first_token` |
//! | speed, jitter of arrivals, seed | [`trace::Trace`], [`Setup::seed`] | `--speed --jitter --seeds` | `speed_divides_every_wait_and_jitter_stays_within_its_bin` |
//!
//! What is counted ([`Outcome`]; the row of `replay`, and the rest with `--details`):
//!
//! | figure | is | test |
//! |---|---|---|
//! | effective requests, refused early and late | [`Outcome::effective`], [`Outcome::count`] | `figures_count_what_they_say` |
//! | tokens served in time | [`Outcome::goodput_tokens_per_s`] | `a_request_alone_is_computed_and_decoded`, `regret_is_what_lies_between_a_run_and_what_could_have_been` |
//! | percentiles to the first token and between tokens | [`Outcome::ttft_percentile`], [`Outcome::tbt_percentile`] | `figures_count_what_they_say`, `tbt_is_the_mean_of_the_longest_tenth` |
//! | hits of blocks and tokens | [`Outcome::hit_blocks_pct`], [`Outcome::hit_tokens_pct`] | `a_prompt_seen_before_computes_one_token_and_one_being_computed_is_waited_for` |
//! | prefill seconds in vain | [`Outcome::wasted_prefill_s`] | `each_admission_does_what_its_name_says_to_a_second_request_that_is_one_too_many` |
//! | oscillation | [`Outcome::load_correlation`] | `correlation_tells_phase_from_anti_phase`, `the_loads_of_both_sides_do_not_swing_against_each_other_as_they_do_with_early` |
//! | fairness by tenant, by tenth of answers and prompts | [`Outcome::unfairness`], [`Outcome::deciles`], [`Outcome::input_deciles`] | `the_worst_off_tenant_is_found_beside_its_fair_share` |
//! | regret beside the bound and beside an endless cache without waiting | [`Outcome::regret`], [`Outcome::ttft_regret`] | `regret_is_what_lies_between_a_run_and_what_could_have_been` |
//! | who came back, and was served | [`Outcome::returns`], [`Outcome::returns_served`] | `who_comes_back_when_told_is_served_in_the_simulator_too` |
//! | intervals that held | [`Outcome::coverage`] | `tenants_get_their_fair_shares_and_predicted_intervals_hold_as_often_as_they_should` |
//! | decisions, equal for equal seeds | [`Outcome::decisions`] | `a_run_is_the_same_bit_for_bit_whatever_is_switched_on`, `runs_are_the_same_however_many_threads_there_are` |

mod batch;
pub mod cache;
mod cluster;
mod coupled;
mod memory;
mod network;
mod outcome;
mod people;
mod pipeline;
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
