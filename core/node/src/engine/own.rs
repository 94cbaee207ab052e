//! Peers that stand for what this engine has beside memory of the host: its files, and memory of its devices.
//!
//! Each has one path, a link of its backend to itself, so that batches, classes, windows and endings are what they are for every
//! peer; a path that is lost is dialled again, by opening the next link. What such a peer's tokens name is reached by this
//! engine alone: others have it moved by staging, here or there.

use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionToken};
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
use millpond_hal::contract::{Connection, Device, LaneSide};
use millpond_hal::fabric::{DeviceId, FabricError, LinkOptions};

use super::Peer;
use super::batch::Via;
use super::core::Core;
use super::options::Options;
use super::peer::PeerInner;
use super::peers::{Lane, path_of};
use super::remote::{Attached, RemoteRegion};
use super::shard::Shard;
use crate::session::Permit;

/// A disk may be busy, and a device too, for longer than a network is silent.
const PROGRESS_DEADLINE: Duration = Duration::from_secs(30);

/// A backend of this engine's own, and the peer that stands for what it moves.
#[derive(Debug)]
pub(super) struct Own {
    via: Via,
    device: DeviceId,
    peer: Handle,
}

/// There is no room for one.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum NoOwn {
    #[error(transparent)]
    Fabric(FabricError),
    #[error("{0}")]
    Full(&'static str),
}

/// The transport of what only its owner reaches.
pub(super) fn own_via(kind: Option<MemoryKind>) -> Option<Via> {
    match kind {
        Some(MemoryKind::File) => Some(Via::File),
        Some(MemoryKind::Cuda { .. }) => Some(Via::Cuda),
        _ => None,
    }
}

impl Shard {
    /// Adds a backend, its peer, and the first link between them.
    pub(super) fn add_own(
        &mut self,
        via: Via,
        device: Box<dyn Device>,
        options: &Options,
        now: Instant,
    ) -> Result<(), NoOwn> {
        let device = self.fabric.add_device(device).map_err(NoOwn::Fabric)?;
        let identity = options.identity;
        let inner = |key| Arc::new(PeerInner { own: Some(via), ..PeerInner::new(key, identity, None, true) });
        let peer = self.add_peer(inner, options, now).ok_or(NoOwn::Full("all peers are in use"))?;
        self.owns.push(Own { via, device, peer });
        self.open_own_lane(via, now);
        match self.peers.get(peer) {
            Some(entry) if entry.has_lanes() => Ok(()),
            _ => Err(NoOwn::Full("no link of its backend could be opened")),
        }
    }

    /// Who stands for what that transport moves, if there is any.
    pub(super) fn own_peer_of(&self, via: Via) -> Option<Arc<PeerInner>> {
        let own = self.owns.iter().find(|own| own.via == via)?;
        self.peers.get(own.peer).map(|peer| Arc::clone(&peer.inner))
    }

    /// The one lane, at first and after a backend that stood still. What went over the last one is the kernel's or the
    /// device's no more once its ticket ends, so a new one fences it as a peer's answer does.
    pub(super) fn open_own_lane(&mut self, via: Via, now: Instant) {
        let Some(Own { device, peer, .. }) = self.owns.iter().find(|own| own.via == via) else { return };
        let (device, peer) = (*device, *peer);
        let (Some(path), Some(entry)) = (path_of(LaneSide::Dialed, 0), self.peers.get_mut(peer)) else { return };
        let with = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
        let Ok(link) = self.fabric.open(now, device, Connection::Loopback, with) else {
            return self.brain.on_dial_failed(now, entry.brain, path);
        };
        self.links.insert(link, (peer, path));
        let generation = self.brain.on_open(now, entry.brain, path);
        self.statistics.lanes_open += 1;
        let (_permit, _session) = (Permit::default(), None);
        entry.lanes[path.index()] = Some(Lane { link, via, generation, _permit, _session });
    }
}

/// What this engine lent to itself, as its batches name it. `None`: it has no backend for that, or a table is full.
pub(super) fn attach_own(core: &Arc<Core>, token: RegionToken) -> Option<RemoteRegion> {
    let via = own_via(token.kind())?;
    let (inner, region) = core.locked(|shard| Some((shard.own_peer_of(via)?, shard.fabric.attach(token).ok()?)))?;
    Some(RemoteRegion { inner: Arc::new(Attached { peer: Peer { inner }, token, region, core: Arc::clone(core) }) })
}
