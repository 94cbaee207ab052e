//! What the shard knows of one peer beside what the scheduler knows: its identity, and the links behind its paths.
//!
//! A lane is a path of the scheduler: those dialled here come first, then those the peer dialled. Nothing here chooses,
//! posts or dials. Invariant: a path has a lane exactly while its link is open.

use std::sync::Arc;

use millpond_core::quiet::LANES_PER_PEER_MAX;
use millpond_core::slab::Handle;
use millpond_core::time::Instant;
use millpond_core::transfer::{Asked, Dialling, PATHS_PER_PEER_MAX, PathId, PathSpec, Transport};
use millpond_hal::contract::{LaneSide, LinkId};

use super::batch::Via;
use super::options::Options;
use super::peer::PeerInner;
use super::statistics::DowngradeReason;
use crate::session::Permit;

/// The first lane index of shared memory; those below are TCP's.
pub(super) const SHM_LANES: u8 = 4;
/// A slice to a peer on this host, in bytes: one frame and one answer, however large the batch.
const SLICE_LEN_SAME_HOST: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) link: LinkId,
    pub(super) via: Via,
    /// Of its path.
    pub(super) generation: u64,
    /// The place among the acceptor's sessions.
    pub(super) _permit: Permit,
}

#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) inner: Arc<PeerInner>,
    /// The peer of the scheduler.
    pub(super) brain: Handle,
    pub(super) same_host: bool,
    pub(super) lanes: [Option<Lane>; PATHS_PER_PEER_MAX],
    /// Newest generation of each of the peer's lanes to us.
    pub(super) accepted: [u64; LANES_PER_PEER_MAX],
    /// The peer is known to have been replaced: nothing reaches it any more.
    pub(super) is_gone: bool,
    /// When it was met, or dialled us last: its other lanes may be on their way.
    pub(super) met_at: Instant,
    /// Shared memory could not be dialled since it last was there.
    has_shm_failed: bool,
    /// That was warned about.
    was_warned_of: bool,
}

/// A lane that is to be dialled.
#[derive(Clone, Debug)]
pub(super) struct WantedLane {
    pub(super) peer: Handle,
    pub(super) inner: Arc<PeerInner>,
    pub(super) index: u8,
}

/// The path of a lane. `None`: there is no such index.
pub(super) fn path_of(side: LaneSide, index: u8) -> Option<PathId> {
    let index = usize::from(index);
    let first = if side == LaneSide::Dialed { 0 } else { LANES_PER_PEER_MAX };
    if index < LANES_PER_PEER_MAX { PathId::new(first + index) } else { None }
}

/// The lane of a path.
pub(super) fn lane_of(path: PathId) -> (LaneSide, u8) {
    let side = if path.index() < LANES_PER_PEER_MAX { LaneSide::Dialed } else { LaneSide::Accepted };
    (side, u8::try_from(path.index() % LANES_PER_PEER_MAX).unwrap_or(0))
}

fn transport(via: Via) -> Option<Transport> {
    match via {
        Via::Auto => None,
        Via::Local => Transport::new(0),
        Via::Shm => Transport::new(1),
        Via::Tcp => Transport::new(2),
        Via::File => Transport::new(3),
    }
}

pub(super) fn asked(via: Via) -> Asked {
    transport(via).map_or(Asked::Any, Asked::Only)
}

impl PeerState {
    pub(super) fn new(inner: Arc<PeerInner>, brain: Handle, same_host: bool, met_at: Instant) -> Self {
        Self {
            inner,
            brain,
            same_host,
            lanes: Default::default(),
            accepted: [0; LANES_PER_PEER_MAX],
            is_gone: false,
            met_at,
            has_shm_failed: false,
            was_warned_of: false,
        }
    }

    /// A lane of that transport is there.
    pub(super) fn on_lane(&mut self, via: Via) {
        if via == Via::Shm {
            (self.has_shm_failed, self.was_warned_of) = (false, false);
        }
    }

    /// A lane could not be dialled.
    pub(super) fn on_dial_failed(&mut self, index: u8) {
        self.has_shm_failed |= index >= SHM_LANES;
    }

    /// The transport that a slice should have taken, and why one over `used` carries it; `None`: there is no better one.
    pub(super) fn downgrade(&self, used: Via, options: &Options, now: Instant) -> Option<(Via, DowngradeReason)> {
        if used != Via::Tcp || !self.same_host || self.inner.is_self || !options.allows(Via::Shm) {
            return None;
        }
        let has_shm = self.lanes.iter().flatten().any(|lane| lane.via == Via::Shm);
        let is_awaited = self.inner.address.is_some() || now.since(self.met_at) < options.connect_deadline;
        let is_connecting = has_shm || (!self.has_shm_failed && is_awaited);
        Some((Via::Shm, if is_connecting { DowngradeReason::Connecting } else { DowngradeReason::Unreachable }))
    }

    /// Whether nobody was warned yet that a transport cannot be connected; from now on somebody was, until it can.
    pub(super) fn is_news(&mut self, reason: DowngradeReason) -> bool {
        reason == DowngradeReason::Unreachable && !std::mem::replace(&mut self.was_warned_of, true)
    }

    pub(super) fn has_lanes(&self) -> bool {
        self.lanes.iter().any(Option::is_some)
    }

    /// What a lane of that transport is like.
    pub(super) fn spec(&self, via: Via, dialling: Dialling, options: &Options) -> Option<PathSpec> {
        let mut spec = PathSpec::new(transport(via)?, if via == Via::Tcp { 1 } else { 0 });
        (spec.dialling, spec.window) = (dialling, options.window);
        if self.same_host || self.inner.is_self {
            (spec.slice_len_min, spec.slice_len_max) = (SLICE_LEN_SAME_HOST, SLICE_LEN_SAME_HOST);
        }
        Some(spec)
    }

    /// The paths that may join this peer and us.
    pub(super) fn paths(&self, options: &Options) -> Vec<(PathId, PathSpec)> {
        let mut paths = Vec::new();
        let mut add = |side, index, via, dialling| {
            paths.extend(path_of(side, index).zip(self.spec(via, dialling, options)));
        };
        if self.inner.is_files {
            add(LaneSide::Dialed, 0, Via::File, Dialling::Ours);
            return paths;
        }
        if self.inner.is_self {
            add(LaneSide::Dialed, 0, Via::Local, Dialling::Theirs);
            return paths;
        }
        let ours = |of| if self.inner.address.is_some() { of } else { Dialling::Theirs };
        if options.allows(Via::Tcp) {
            add(LaneSide::Dialed, 0, Via::Tcp, ours(Dialling::Ours));
            for index in 1..options.lanes_per_peer_max.clamp(1, SHM_LANES) {
                add(LaneSide::Dialed, index, Via::Tcp, ours(Dialling::OursWhenBusy));
            }
            add(LaneSide::Accepted, 0, Via::Tcp, Dialling::Theirs);
        }
        if options.allows(Via::Shm) && self.same_host {
            add(LaneSide::Dialed, SHM_LANES, Via::Shm, ours(Dialling::Ours));
            add(LaneSide::Accepted, SHM_LANES, Via::Shm, Dialling::Theirs);
        }
        paths
    }

    /// Why a transport does not join this peer and us at all.
    pub(super) fn why_not(&self, via: Via, options: &Options) -> &'static str {
        match via {
            _ if self.is_gone => "the peer was restarted; open it again",
            _ if !options.allows(via) => "the transport is switched off here",
            Via::File if !self.inner.is_files => "that is memory, no file of this engine",
            Via::Auto | Via::File if self.inner.is_files => "no link of the file backend could be opened",
            _ if self.inner.is_files => "files of this engine are moved by `file` only",
            Via::Local => "the peer is another process",
            _ if self.inner.is_self => "the peer is this engine itself",
            Via::Shm if !self.same_host => "the peer runs on another host, or in other namespaces",
            _ => "it could not be connected within the connect deadline",
        }
    }
}
