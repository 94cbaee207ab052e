//! Workloads and machines that exist only as numbers: what a cluster would do, computed.
//!
//! [`trace`] is what arrives. No clock and no I/O here either: the same inputs and seed give the same results, bit for bit.

pub mod random;
pub mod trace;
