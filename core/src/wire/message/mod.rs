//! Messages of the control plane (prost), a file per family. Method ids are `0xFFNN`: family, number.
//!
//! A number is never used again for something else. Messages grow by new fields only, so that mixed versions understand
//! each other. `rpc` is what all families travel in.

pub mod directory;

pub mod rpc;

pub mod serve;

pub mod store;

#[cfg(test)]
mod tests;
