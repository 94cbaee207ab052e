//! What the shard knows of one peer beside what the scheduler knows: its identity, and the links behind its paths.
//!
//! A lane is a path of the scheduler: those dialled here come first, then those the peer dialled. Nothing here chooses,
//! posts or dials. Invariant: a path has a lane exactly while its link is open.

use std::sync::Arc;

use futures::channel::oneshot;
use millpond_core::quiet::LANES_PER_PEER_MAX;
use millpond_core::slab::Handle;
use millpond_core::time::Instant;
use millpond_core::transfer::{Asked, Dialling, PATHS_PER_PEER_MAX, PathId, PathSpec, Transport};
use millpond_hal::contract::{LaneSide, LinkId};

use super::batch::Via;
use super::options::Options;
use super::paths::PathEnd;
use super::peer::PeerInner;
use super::rails::Rails;
use super::statistics::DowngradeReason;
use crate::session::Permit;

/// The lane index of shared memory; those below are TCP's.
pub(super) const SHM_LANES: u8 = 4;
/// The first lane index of rails: RDMA, each over a NIC of its own.
pub(super) const RAIL_LANES: u8 = 5;
/// A slice to a peer on this host, in bytes: one frame and one answer, however large the batch.
const SLICE_LEN_SAME_HOST: u64 = 16 << 20;

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) link: LinkId,
    pub(super) via: Via,
    /// Of its path.
    pub(super) generation: u64,
    /// Of a rail: its session ends when this does.
    pub(super) _session: Option<oneshot::Sender<()>>,
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
    /// Where each path leads that was ever open, or led last, by its number.
    pub(super) ends: Vec<(PathId, PathEnd)>,
    /// Bytes that requests moved over each path, in either direction.
    pub(super) moved: [u64; PATHS_PER_PEER_MAX],
    /// Paths that were lost, a bit each, until they are opened again or fenced.
    pub(super) unfenced: u16,
    /// Newest generation of each of the peer's lanes to us.
    pub(super) accepted: [u64; LANES_PER_PEER_MAX],
    /// The peer is known to have been replaced: nothing reaches it any more.
    pub(super) is_gone: bool,
    /// When it was met, or dialled us last: its other lanes may be on their way.
    pub(super) met_at: Instant,
    pub(super) rails: Rails,
    /// Transports that could not be dialled since they last were there, and those that somebody was warned of.
    failed: [bool; BETTER.len()],
    warned: [bool; BETTER.len()],
}

/// Transports that are better than tcp, the best first.
const BETTER: [Via; 2] = [Via::Shm, Via::Rdma];

fn via_of(index: u8) -> Via {
    match index {
        RAIL_LANES.. => Via::Rdma,
        SHM_LANES => Via::Shm,
        _ => Via::Tcp,
    }
}

fn better(via: Via) -> Option<usize> {
    BETTER.iter().position(|other| *other == via)
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
        Via::Rdma => Transport::new(4),
        Via::Cuda => Transport::new(5),
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
            ends: Vec::new(),
            moved: [0; PATHS_PER_PEER_MAX],
            unfenced: 0,
            accepted: [0; LANES_PER_PEER_MAX],
            is_gone: false,
            met_at,
            rails: Rails::default(),
            failed: Default::default(),
            warned: Default::default(),
        }
    }

    /// A lane of that transport is there.
    pub(super) fn on_lane(&mut self, via: Via) {
        if let Some(at) = better(via) {
            (self.failed[at], self.warned[at]) = (false, false);
        }
    }

    /// A lane could not be dialled.
    pub(super) fn on_dial_failed(&mut self, index: u8) {
        if let Some(at) = better(via_of(index)) {
            self.failed[at] = true;
        }
    }

    /// The transport that a slice should have taken, and why one over `used` carries it; `None`: there is no better one.
    pub(super) fn downgrade(&self, used: Via, options: &Options, now: Instant) -> Option<(Via, DowngradeReason)> {
        if self.inner.is_self {
            return None;
        }
        let is_shared = |via: &&Via| match via {
            Via::Shm => self.same_host && options.allows(Via::Shm),
            _ => options.rails() > 0 && self.rails.are_shared(),
        };
        let best = *BETTER.iter().take_while(|via| **via != used).find(is_shared)?;
        let at = better(best)?;
        let has_one = self.lanes.iter().flatten().any(|lane| lane.via == best);
        let is_awaited = self.inner.ways() > 0 || now.since(self.met_at) < options.connect_deadline;
        let reason = match () {
            () if has_one => DowngradeReason::Connecting,
            () if best == Via::Rdma && self.rails.is_refuted(self.inner.key) => DowngradeReason::Refuted,
            () if !self.failed[at] && is_awaited => DowngradeReason::Connecting,
            () => DowngradeReason::Unreachable,
        };
        Some((best, reason))
    }

    /// Whether nobody was warned yet that a transport cannot be used; from now on somebody was, until it can.
    pub(super) fn is_news(&mut self, via: Via, reason: DowngradeReason) -> bool {
        let is_lasting = reason != DowngradeReason::Connecting;
        is_lasting && better(via).is_some_and(|at| !std::mem::replace(&mut self.warned[at], true))
    }

    pub(super) fn has_lanes(&self) -> bool {
        self.lanes.iter().any(Option::is_some)
    }

    /// What a lane of that transport is like.
    pub(super) fn spec(&self, via: Via, dialling: Dialling, options: &Options) -> Option<PathSpec> {
        let rank = match via {
            Via::Tcp => 2,
            Via::Rdma => 1,
            _ => 0,
        };
        let mut spec = PathSpec::new(transport(via)?, rank);
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
        if let Some(via) = self.inner.own {
            add(LaneSide::Dialed, 0, via, Dialling::Ours);
            return paths;
        }
        if self.inner.is_self {
            add(LaneSide::Dialed, 0, Via::Local, Dialling::Theirs);
            return paths;
        }
        let ways = u8::try_from(self.inner.ways()).unwrap_or(SHM_LANES);
        let ours = |of| if ways > 0 { of } else { Dialling::Theirs };
        if options.allows(Via::Tcp) {
            // One lane for each address, then more to the same ones.
            let first = if ways > 1 { Dialling::OursBeside } else { Dialling::Ours };
            for index in 0..options.lanes_per_peer_max.max(ways).clamp(1, SHM_LANES) {
                let dialling = if index < ways.max(1) { first } else { Dialling::OursWhenBusy };
                add(LaneSide::Dialed, index, Via::Tcp, ours(dialling));
            }
            add(LaneSide::Accepted, 0, Via::Tcp, Dialling::Theirs);
        }
        if options.allows(Via::Shm) && self.same_host {
            add(LaneSide::Dialed, SHM_LANES, Via::Shm, ours(Dialling::Ours));
            add(LaneSide::Accepted, SHM_LANES, Via::Shm, Dialling::Theirs);
        }
        for rail in 0..options.rails() {
            add(LaneSide::Dialed, RAIL_LANES + rail, Via::Rdma, ours(Dialling::OursBeside));
        }
        if options.rails() > 0 {
            add(LaneSide::Accepted, RAIL_LANES, Via::Rdma, Dialling::Theirs);
        }
        paths
    }

    /// Why a transport does not join this peer and us at all.
    pub(super) fn why_not(&self, via: Via, options: &Options) -> &'static str {
        match via {
            _ if self.is_gone => "the peer was restarted; open it again",
            _ if !options.allows(via) => "the transport is switched off here",
            _ if self.inner.own.is_some_and(|own| matches!(via, Via::Auto) || via == own) => {
                "no link of its backend could be opened"
            }
            _ if self.inner.own.is_some() => "files are moved by `file` only, and memory of GPUs by `cuda`",
            Via::File => "that is memory, no file of this engine",
            Via::Cuda => "that is no memory of a GPU of this engine",
            Via::Local => "the peer is another process",
            _ if self.inner.is_self => "the peer is this engine itself",
            Via::Rdma if options.nics.is_empty() => "this node has no RDMA device that it may use; ask `doctor`",
            Via::Rdma if self.rails.has_liar(self.inner.key) => {
                "a byte test found that a driver reports success and moves other bytes, or none; the log names it"
            }
            Via::Rdma if self.rails.is_refuted(self.inner.key) => {
                "no pair of NICs passed its byte test; the log says why"
            }
            Via::Shm if !self.same_host => "the peer runs on another host, or in other namespaces",
            _ => "it could not be connected within the connect deadline",
        }
    }
}
