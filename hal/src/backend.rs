//! The backends, one module each. Each keeps [`crate::contract`] and passes the conformance suite.

pub mod host;
pub mod shm;
pub mod sim;
mod tally;
pub mod tcp;

#[cfg(test)]
mod conforms;
