//! The directory as a service: one shard of `core::directory` behind a lock, its clock, its state file, its methods.
//!
//! The machine decides; this module gives it the time, answers messages, and wakes watchers. It is never on the data path.
//! A store node embeds a shard by default and reaches it by [`Link::local`]; others reach it by [`Link::remote`].

mod link;
mod service;
mod shard;
mod signal;
mod state;

pub use link::{Link, LinkError, Watch};
pub use shard::{Shard, ShardConfig, StartError};
pub(crate) use signal::Signal;
pub use state::StateError;
