//! The store node: it owns segments, takes and serves bytes, evicts. Only its process writes store memory.

pub mod checksum;
pub mod segment;
mod slot;

pub use slot::State;
