//! The backends, one module each. Each keeps [`crate::contract`] and passes the conformance suite.

pub mod host;
mod tally;
pub mod tcp;
pub mod shm;
