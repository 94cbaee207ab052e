//! The scheduler: which prefill and which decode instance serve a request, what that costs in seconds, and whether to
//! serve it at all.
//!
//! Everything here decides from its arguments: no clock, no I/O, no randomness but seeded generators. Tokens, bytes and
//! nanoseconds are integers; fitted models are `f64` with + − × ÷ and `libm`, so the same inputs give the same decision bit
//! for bit on every machine. The live router and the simulator ([`crate::sim`]) call the same code.

pub mod admission;
pub mod block_cache;
pub mod colocate;
pub mod conductor;
pub mod cost;
pub mod feed;
pub mod forecast;
pub mod index;
pub mod placement;
pub mod queue;
pub mod record;
pub mod replicate;
pub mod spread;
