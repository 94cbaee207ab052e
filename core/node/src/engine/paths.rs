//! What is known of the paths to a peer: where each leads, whether it is open, what went over it.
//!
//! For people and their programs; nothing is decided by it. A path outlives its lanes, and so does what is said here.

use std::fmt;
use std::net::SocketAddr;

use millpond_core::slab::Handle;
use millpond_core::topology::Name;
use millpond_core::transfer::PathId;
use millpond_hal::contract::LaneSide;

use super::batch::Via;
use super::peers::lane_of;
use super::shard::Shard;
use super::{Engine, Peer};
use crate::runtime::Runtime;

/// Where a path leads.
///
/// ```
/// use millpond_node::engine::{PathEnd, Via};
/// let end = PathEnd { via: Via::Tcp, at: Some("10.0.0.2:7000".parse().unwrap()), nics: None };
/// assert_eq!(end.to_string(), "tcp to 10.0.0.2:7000");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathEnd {
    /// Its transport.
    pub via: Via,
    /// The address of the other end, where it has one.
    pub at: Option<SocketAddr>,
    /// The NIC here and the peer's, of a rail.
    pub nics: Option<(Name, Name)>,
}

impl fmt::Display for PathEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.via)?;
        if let Some((own, peer)) = &self.nics {
            write!(f, " from {own} to {peer}")?;
        }
        self.at.map_or(Ok(()), |at| write!(f, " to {at}"))
    }
}

/// One path to a peer, as [`Engine::paths`] tells it.
///
/// Example: `verify/tests/engine_paths.rs` (`paths`).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PathState {
    /// Its number, as in [`Explanation::paths`](super::Explanation).
    pub path: PathId,
    /// Where it leads.
    pub end: PathEnd,
    /// Whether it is open.
    pub is_open: bool,
    /// Bytes that requests moved over it since the peer is known, in either direction.
    pub bytes: u64,
}

/// Names a lane by whose it is and its index.
pub(super) fn name(path: PathId) -> impl fmt::Display {
    let (side, index) = lane_of(path);
    let whose = if side == LaneSide::Dialed { "our" } else { "their" };
    format!("{whose} lane {index}")
}

impl<R: Runtime> Engine<R> {
    /// The paths to a peer that were open at some time, in the order of their numbers.
    #[must_use]
    pub fn paths(&self, peer: &Peer) -> Vec<PathState> {
        self.core.locked(|shard| shard.path_states(peer.inner.key))
    }
}

impl Shard {
    fn path_states(&self, key: Handle) -> Vec<PathState> {
        let Some(peer) = self.peers.get(key) else { return Vec::new() };
        let state = |(path, end): &(PathId, PathEnd)| {
            let (is_open, bytes) = (peer.lanes[path.index()].is_some(), peer.moved[path.index()]);
            PathState { path: *path, end: *end, is_open, bytes }
        };
        peer.ends.iter().map(state).collect()
    }

    /// Where the paths to a peer lead, as far as they were ever open.
    pub(super) fn path_ends(&self, key: Handle) -> Vec<(PathId, PathEnd)> {
        self.peers.get(key).map(|peer| peer.ends.clone()).unwrap_or_default()
    }

    pub(super) fn count_moved(&mut self, key: Handle, path: PathId, bytes: u64) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.moved[path.index()] += bytes;
        }
    }
}
