//! What an engine counted so far, and what it remembers of single batches.

use millpond_core::slab::Handle;
use millpond_core::time::Duration;
pub use millpond_core::transfer::Explanation as Considered;
use millpond_core::transfer::PathId;

use super::batch::{Class, Via};
use super::paths::{self, PathEnd};
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
    /// Parts of batches sent over a path that is not the best one both sides share; see [`Statistics::downgrades`].
    pub detours: u64,
    /// The same, by reason.
    pub(super) detours_by: [[u64; DowngradeReason::ALL.len()]; DETOURS.len()],
    /// Times that a byte test found a pair of NICs unfit.
    pub pairs_refuted: u64,
    /// Times the driver task ran.
    pub driver_turns: u64,
    /// Times a blocking caller drove the shard.
    pub caller_turns: u64,
    /// Gauge: batches queued or under way now.
    pub transfers_open: u64,
    /// Gauge: slices that are posted, or wait to be posted again, now.
    pub slices_open: u64,
    /// Gauge: bytes that are posted now.
    pub bytes_open: u64,
    /// Gauge: lanes open now.
    pub lanes_open: u64,
    /// Gauge: peers known now, each incarnation for itself; this engine is one of them.
    pub peers_known: u64,
}

/// From which transport to which an automatic choice can be a downgrade.
const DETOURS: [(Via, Via); 3] = [(Via::Shm, Via::Tcp), (Via::Rdma, Via::Tcp), (Via::Shm, Via::Rdma)];

/// Why an automatic choice took less than the best transport that both sides share.
///
/// ```
/// use millpond_node::engine::DowngradeReason;
/// assert_eq!(DowngradeReason::Unreachable.name(), "unreachable");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DowngradeReason {
    /// It is being connected, for the first time or again, and nothing has failed yet.
    Connecting,
    /// It cannot be connected: dialling failed, or the peer, who alone can dial, has not.
    Unreachable,
    /// A byte test found that no pair of NICs moves right bytes, or one of them does not.
    Refuted,
}

impl DowngradeReason {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Connecting, Self::Unreachable, Self::Refuted];

    /// The label of the metric.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Unreachable => "unreachable",
            Self::Refuted => "byte-test",
        }
    }
}

/// How often a lesser transport was taken, from which to which and why.
///
/// ```
/// let statistics = millpond_node::engine::Statistics::default();
/// assert!(statistics.downgrades().all(|downgrade| downgrade.count == 0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Downgrade {
    /// The best transport that both sides share.
    pub from: Via,
    /// The one that was taken.
    pub to: Via,
    /// Why.
    pub reason: DowngradeReason,
    /// How often.
    pub count: u64,
}

impl Statistics {
    /// Automatic choices below the best shared transport, all that there can be.
    pub fn downgrades(&self) -> impl Iterator<Item = Downgrade> + use<> {
        DETOURS.into_iter().zip(self.detours_by).flat_map(|((from, to), counts)| {
            let of_reason = DowngradeReason::ALL.into_iter().zip(counts);
            of_reason.map(move |(reason, count)| Downgrade { from, to, reason, count })
        })
    }

    pub(super) fn on_detour(&mut self, from: Via, to: Via, reason: DowngradeReason) {
        self.detours += 1;
        let way = DETOURS.iter().position(|detour| *detour == (from, to));
        let why = DowngradeReason::ALL.iter().position(|known| *known == reason);
        if let (Some(way), Some(why)) = (way, why) {
            self.detours_by[way][why] += 1;
        }
    }
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
    /// Slices posted again.
    pub retries: u32,
    /// The paths considered, and the slices that went over each; of the first peer of the batch. Paths below 8 are the
    /// lanes that were dialled here, the others those of the peer.
    pub paths: Considered,
    /// Where each path leads that was ever open.
    pub ends: Vec<(PathId, PathEnd)>,
    /// Of what went through buffers of this engine: over what they were filled, and over what they were emptied.
    pub legs: Vec<(Via, Via)>,
    /// The first peer of the batch.
    pub(super) peer: Handle,
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
        for (filled, emptied) in &self.legs {
            write!(f, "in over {filled} and out over {emptied}, ")?;
        }
        for (path, verdict, slices) in self.paths.paths() {
            write!(f, "{}", paths::name(path))?;
            if let Some((_, end)) = self.ends.iter().find(|(known, _)| *known == path) {
                write!(f, " ({end})")?;
            }
            write!(f, ": {slices} slices, {verdict}; ")?;
        }
        match (&self.status, self.elapsed) {
            (Status::Failed(failure), Some(elapsed)) => write!(f, "failed after {elapsed}: {failure}"),
            (_, Some(elapsed)) => write!(f, "done after {elapsed}"),
            (_, None) => write!(f, "under way"),
        }
    }
}
