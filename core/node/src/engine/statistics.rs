//! What an engine counted so far, and what it remembers of single batches.

use millpond_core::time::Duration;

use super::batch::{Class, Via};
use super::transfer::{Status, TransferId};

/// Counters of one engine since its start; they only grow, except for the gauges named as such.
///
/// ```
/// let statistics = millpond_node::engine::Statistics::default();
/// assert_eq!(statistics.transfers_started, statistics.transfers_done + statistics.transfers_failed);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Batches accepted.
    pub transfers_started: u64,
    /// Batches of which every request was done.
    pub transfers_done: u64,
    /// Batches of which some request failed.
    pub transfers_failed: u64,
    /// Batches refused at a bound.
    pub transfers_refused: u64,
    /// Requests of finished batches.
    pub requests: u64,
    /// Bytes written to peers by finished requests.
    pub bytes_written: u64,
    /// Bytes read from peers by finished requests.
    pub bytes_read: u64,
    /// Requests that went over another lane or path after the first one failed.
    pub retries: u64,
    /// Lanes dialled.
    pub lanes_dialled: u64,
    /// Lanes accepted.
    pub lanes_accepted: u64,
    /// Lanes that ended.
    pub lanes_lost: u64,
    /// Batches sent over a path that is not the best one both sides share.
    pub detours: u64,
    /// Times the driver task ran.
    pub driver_turns: u64,
    /// Times a blocking caller drove the shard.
    pub caller_turns: u64,
    /// Gauge: batches queued or under way now.
    pub transfers_open: u64,
    /// Gauge: lanes open now.
    pub lanes_open: u64,
}

/// What became of one batch, and over which path it went; see [`Engine::explain`](super::Engine::explain).
///
/// The engine remembers the last [`EXPLAIN_MAX`] batches.
///
/// Example: `verify/tests/engine_links.rs` (`explain`).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// Which batch.
    pub id: TransferId,
    /// Requests in it.
    pub requests: u32,
    /// Bytes in it.
    pub bytes: u64,
    /// Its class.
    pub class: Class,
    /// The transport the caller named.
    pub asked: Via,
    /// The transport used; `None`: it never left the queue.
    pub used: Option<Via>,
    /// Why that one, in words.
    pub why: &'static str,
    /// Requests posted again.
    pub retries: u32,
    /// From submission to its end; `None` while it runs.
    pub elapsed: Option<Duration>,
    /// How it ended, by the first request that failed; `Done` if none did.
    pub status: Status,
}

/// Batches that an engine can explain.
pub const EXPLAIN_MAX: usize = 1024;

impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, requests, bytes, class, asked, why, retries, .. } = self;
        write!(f, "{id}: {requests} requests, {bytes} bytes, {class:?}, asked for {asked}, ")?;
        match self.used {
            Some(used) => write!(f, "went over {used} ({why}), {retries} retries, ")?,
            None => write!(f, "never left the queue, ")?,
        }
        match (&self.status, self.elapsed) {
            (Status::Failed(failure), Some(elapsed)) => write!(f, "failed after {elapsed}: {failure}"),
            (_, Some(elapsed)) => write!(f, "done after {elapsed}"),
            (_, None) => write!(f, "under way"),
        }
    }
}
