//! The engine for callers that block: the calling thread itself moves the bytes.
//!
//! No task, no queue and no other thread stands between the caller and the link: it posts, polls for a moment, and then
//! sleeps on the link's own descriptor. Work of others on the same shard is moved along meanwhile. Not to be called from
//! inside an async task: it would hold a thread of the runtime.

use std::sync::Arc;

use super::batch::Batch;
use super::core::Core;
use super::submit::SubmitError;
use super::transfer::{Report, Transfer};

/// A handle for threads that wait; see [`Engine::blocking`](super::Engine::blocking). Cheap to clone, for any thread.
///
/// Example: `verify/tests/engine.rs` (`blocking`).
#[derive(Clone, Debug)]
pub struct Blocking {
    pub(super) core: Arc<Core>,
}

impl Blocking {
    /// Moves a batch and returns when it ended, by its deadlines at the latest.
    pub fn run(&self, batch: Batch) -> Result<Report, SubmitError> {
        // A small read of shared memory is over before it could be submitted.
        match self.core.run_at_once(batch) {
            Ok(report) => Ok(report),
            Err(batch) => Ok(self.wait(self.submit(batch)?)),
        }
    }

    /// Starts a batch and returns at once, so that several are under way; give each to [`Blocking::wait`], in any order.
    pub fn submit(&self, batch: Batch) -> Result<Transfer, SubmitError> {
        self.core.submit(batch)
    }

    /// Drives the shard until a transfer ended.
    #[must_use]
    pub fn wait(&self, transfer: Transfer) -> Report {
        self.core.drive_until(&transfer)
    }
}
