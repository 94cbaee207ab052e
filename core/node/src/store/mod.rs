//! The store node: it owns segments, takes and serves bytes, evicts. Only its process writes store memory.
//!
//! The owner moves the bytes: a put names client memory that the owner reads, a get names client memory that it writes, and
//! small values travel inside the calls. The directory learns of a value once it is sealed, and agrees to an eviction
//! before it happens. Invariants: a value is visible only if all its bytes came and every checksum was right; a put that
//! ends early, for whatever reason, leaves nothing reserved; bytes that somebody still reads are not reused.

pub mod checksum;
mod get;
mod node;
mod pull;
mod put;
mod role;
pub mod segment;
mod service;
mod slot;
mod upkeep;

pub use node::{StoreConfig, StoreError, StoreNode};
pub use role::{Place, RoleError, StoreRole};
pub use slot::State;
