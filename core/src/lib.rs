//! Millpond's pure core: it decides, and touches nothing.
//!
//! No heap without the `alloc` feature, no I/O, no clock, no randomness, no `unsafe`: time, entropy and storage come in
//! as arguments. Each module stands only on those above it in this list.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

#[doc(hidden)]
pub mod seeded;

pub mod time;

pub mod random;

pub mod slab;

pub mod hash;

pub mod evict;

pub mod batch;

pub mod page;

pub mod extent;

pub mod prefix;

pub mod layout;

pub mod topology;

pub mod wire;

pub mod quiet;

pub mod transfer;

#[cfg(feature = "alloc")]
pub mod directory;

#[cfg(feature = "alloc")]
pub mod sched;

#[cfg(feature = "alloc")]
pub mod sim;
