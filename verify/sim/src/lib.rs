//! The transfer engine against everything that a network and its peers can do to it, on one thread and under virtual time.
//!
//! Real engines (shards, scheduler, fabric, lanes that are dialled again) are joined by `hal::sim`. The world keeps what no
//! node has: what each byte of each memory should be. It holds all that time that
//! - what is done is there, and stays until something newer is; what is untouched never was; memory of a transfer that ended
//!   is not touched again, here or there;
//! - every request ends, once, by its deadline if it has one, and is counted once;
//! - when everything healed, nothing is left anywhere.
//!
//! A run is a [`Scenario`] and nothing else: the same one gives the same run, poll for poll.
//!
//! ```
//! use millpond_verify_sim::{Mix, Scenario, run};
//! let summary = run(&Scenario::new(Mix::Calm, 1)).unwrap();
//! assert_eq!(summary, run(&Scenario::new(Mix::Calm, 1)).unwrap());
//! assert_eq!(summary.failed, 0);
//! ```

mod actor;
mod director;
mod shore;
mod virtual_time;
mod world;

pub use director::{Disturbance, Mix, Scenario, Summary, run};
