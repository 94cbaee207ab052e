//! One shard: the fabric with its devices, and everything that is under way on it. Lives behind the progress lock.
//!
//! It decides which part goes over which lane, what is tried again, and when something is given up; the fabric checks and
//! moves. It dials nothing itself: it says what it wants dialled. Invariants: what was accepted ends; a part is in exactly
//! one of: a peer's queue, a ticket, finished.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millpond_core::batch::RegionId;
use millpond_core::quiet::Far;
use millpond_core::slab::{Handle, Slab, Slot};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{Field, Identity, Refusal as Refused};
use millpond_hal::backend::host::Host;
use millpond_hal::backend::shm::{ShmDevice, ShmOptions};
use millpond_hal::backend::tcp::{TcpDevice, TcpOptions};
use millpond_hal::contract::{
    Connection, Lane as WireLane, LaneSide, LinkDownReason, LinkId, Outcome as HalOutcome, TicketId,
};
use millpond_hal::fabric::{self, DeviceId, Fabric, FabricOptions, LinkOptions, PostError, PostOptions};

use super::batch::{Arrival, Batch, Via};
use super::grant::Arrivals;
use super::options::Options;
use super::peer::PeerInner;
use super::peers::{Choice, Lane, PeerState, Place, WantedLane};
use super::statistics::{EXPLAIN_MAX, Explanation, Statistics};
use super::transfer::{Cause, Failure, RefusalReason, Shared};
use super::work::{Part, PartLimits, Piece, Posted, Work};
use crate::session::Permit;

/// Attempts at one part, the first included.
pub(super) const ATTEMPTS_MAX: u8 = 4;
/// How long a cancelled ticket may take before its link is closed.
pub(super) const CANCEL_GRACE: Duration = Duration::from_millis(100);
/// Requests and bytes of one posted batch: what every transport here takes.
const PART_LIMITS: PartLimits = PartLimits { moves_max: 1024, bytes_max: 16 << 20 };
/// Emptied containers kept for use.
pub(super) const SPARES_MAX: usize = 64;

pub(super) struct Shard {
    pub(super) fabric: Fabric,
    devices: Devices,
    pub(super) works: Slab<Work, Box<[Slot<Work>]>>,
    pub(super) parts: Slab<Part, Box<[Slot<Part>]>>,
    pub(super) peers: Slab<PeerState, Box<[Slot<PeerState>]>>,
    by_node: HashMap<[u8; 16], Handle>,
    /// Which part a ticket carries, by the ticket's slot.
    pub(super) tickets: Vec<Option<(TicketId, Handle)>>,
    pub(super) links: HashMap<LinkId, Handle>,
    pub(super) arrivals: HashMap<RegionId, Arc<Arrivals>>,
    pub(super) wanted: Vec<WantedLane>,
    pub(super) statistics: Statistics,
    pub(super) explained: VecDeque<Explanation>,
    /// Of the last dial.
    generation: u64,
    pub(super) next_tick: Instant,
    pub(super) spare_batches: Vec<fabric::Batch>,
    pub(super) spare_pieces: Vec<Vec<Piece>>,
    spare_parts: Vec<Part>,
    pub(super) outcomes: Vec<HalOutcome>,
}

struct Devices {
    local: DeviceId,
    tcp: Option<DeviceId>,
    shm: Option<DeviceId>,
}

/// A connection that said its hello, to become a lane.
#[derive(Debug)]
pub(super) struct NewLane {
    pub(super) fd: OwnedFd,
    pub(super) via: Via,
    pub(super) side: LaneSide,
    pub(super) index: u8,
    pub(super) generation: u64,
    pub(super) permit: Permit,
}

fn slots<T>(count: u32) -> Box<[Slot<T>]> {
    (0..count).map(|_| Slot::EMPTY).collect()
}

/// An engine could not be started.
///
/// ```
/// use millpond_node::engine::StartError;
/// let error = StartError::System { what: "a descriptor", why: "too many open files".into() };
/// assert!(error.to_string().contains("too many open files"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The system refused what every engine needs.
    #[error("the engine needs {what}: {why}; raise the limits of open files and memory")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The answer.
        why: String,
    },
}

fn system(what: &'static str) -> impl FnOnce(&dyn std::fmt::Display) -> StartError {
    move |why| StartError::System { what, why: why.to_string() }
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("fabric", &self.fabric).field("works", &self.works.len()).finish_non_exhaustive()
    }
}

impl Shard {
    pub(super) fn new(options: &Options, now: Instant) -> Result<(Self, Handle), StartError> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| system("random numbers")(&error))?;
        let mut wanted = FabricOptions::new(secret);
        wanted.incarnation = options.identity.incarnation;
        let mut fabric = Fabric::new(wanted).map_err(|error| system("descriptors")(&error))?;
        let add = |fabric: &mut Fabric, device| fabric.add_device(device).map_err(|error| system("devices")(&error));
        let local = add(&mut fabric, Box::new(Host::new()))?;
        let mut devices = Devices { local, tcp: None, shm: None };
        if options.allows(Via::Tcp) {
            let tcp = TcpOptions { progress_deadline: options.progress_deadline, ..TcpOptions::default() };
            let device = TcpDevice::new(tcp).map_err(|error| system("an epoll set")(&error))?;
            devices.tcp = Some(add(&mut fabric, Box::new(device))?);
        }
        if options.allows(Via::Shm) {
            let shm = ShmOptions { progress_deadline: options.progress_deadline };
            let device = ShmDevice::new(shm).map_err(|error| system("an epoll set")(&error))?;
            devices.shm = Some(add(&mut fabric, Box::new(device))?);
        }
        let mut shard = Self {
            fabric,
            devices,
            works: Slab::new(slots(options.transfers_max)),
            parts: Slab::new(slots(options.transfers_max.saturating_mul(4))),
            peers: Slab::new(slots(options.peers_max.saturating_add(1))),
            by_node: HashMap::new(),
            tickets: Vec::new(),
            links: HashMap::new(),
            arrivals: HashMap::new(),
            wanted: Vec::new(),
            statistics: Statistics::default(),
            explained: VecDeque::with_capacity(EXPLAIN_MAX),
            generation: 0,
            next_tick: Instant::NEVER,
            spare_batches: Vec::new(),
            spare_pieces: Vec::new(),
            spare_parts: Vec::new(),
            outcomes: Vec::new(),
        };
        let own = shard.own_peer(options, now)?;
        Ok((shard, own))
    }

    /// The engine as its own peer, with its one lane.
    fn own_peer(&mut self, options: &Options, now: Instant) -> Result<Handle, StartError> {
        let own = self.insert_peer(options.identity, None, options).ok_or_else(|| system("a table")(&"no peers"))?;
        let opened = self.fabric.open(now, self.devices.local, Connection::Loopback, LinkOptions::default());
        let link = opened.map_err(|error| system("a loopback link")(&error))?;
        self.links.insert(link, own);
        if let Some(peer) = self.peers.get_mut(own) {
            let lane = Lane {
                link,
                via: Via::Local,
                side: LaneSide::Accepted,
                index: 0,
                posted_bytes: 0,
                posts: 0,
                is_full: false,
                _permit: Permit::default(),
            };
            peer.on_lane(lane, now);
        }
        Ok(own)
    }

    fn insert_peer(
        &mut self,
        identity: Identity,
        address: Option<std::net::SocketAddr>,
        options: &Options,
    ) -> Option<Handle> {
        let is_self = (identity.node, identity.incarnation) == (options.identity.node, options.identity.incarnation);
        let same_host = identity.host.is_same_host(&options.identity.host);
        if self.peers.len() == self.peers.capacity() {
            self.forget_idle_peers();
        }
        // The handle goes into the entry, so it is made first and the entry replaced.
        let blank = Arc::new(PeerInner { key: Handle::default(), identity, address, is_self });
        let key = self.peers.insert(PeerState::new(blank, same_host)).ok()?;
        let inner = Arc::new(PeerInner { key, identity, address, is_self });
        *self.peers.get_mut(key)? = PeerState::new(inner, same_host);
        if let Some(older) = self.by_node.insert(identity.node, key) {
            self.on_peer_replaced(older);
        }
        Some(key)
    }

    fn forget_idle_peers(&mut self) {
        let is_idle = |peer: &PeerState| {
            !peer.inner.is_self && peer.lanes.is_empty() && peer.queued == 0 && Arc::strong_count(&peer.inner) == 1
        };
        let idle: Vec<Handle> = self.peers.iter().filter(|(_, peer)| is_idle(peer)).map(|(key, _)| key).collect();
        for key in idle {
            if let Some(peer) = self.peers.remove(key) {
                let node = peer.inner.identity.node;
                if self.by_node.get(&node) == Some(&key) {
                    self.by_node.remove(&node);
                }
            }
        }
    }

    /// The node was restarted: what waits for its old incarnation fails, its lanes are closed.
    fn on_peer_replaced(&mut self, older: Handle) {
        let Some(peer) = self.peers.get_mut(older) else { return };
        peer.is_gone = true;
        let links: Vec<LinkId> = peer.lanes.iter().map(|lane| lane.link).collect();
        for link in links {
            self.fabric.close_link_for(link, LinkDownReason::Superseded);
        }
        self.next_tick = Instant::ZERO;
    }

    /// The peer with this identity, made if it is new. `None`: the table is full, or the identity is of an earlier start.
    pub(super) fn peer(
        &mut self,
        identity: Identity,
        address: Option<std::net::SocketAddr>,
        options: &Options,
    ) -> Option<Handle> {
        if let Some(known) = self.by_node.get(&identity.node).copied()
            && let Some(peer) = self.peers.get_mut(known)
        {
            let held = peer.inner.identity.incarnation;
            if held == identity.incarnation {
                if address.is_some() && peer.inner.address.is_none() && !peer.inner.is_self {
                    let inner = PeerInner { key: known, identity, address, is_self: false };
                    peer.inner = Arc::new(inner);
                }
                return Some(known);
            }
            if held > identity.incarnation {
                return None;
            }
        }
        self.insert_peer(identity, address, options)
    }

    /// A lane asks to be welcomed. If it may, frames of its older generations, and of older incarnations of its node, are
    /// not applied from here on.
    pub(super) fn admit(
        &mut self,
        identity: &Identity,
        lane: (u8, u64),
        options: &Options,
        now: Instant,
    ) -> Result<(), Refused> {
        let (index, generation) = lane;
        let refuse = |field, refuser| Err(Refused { field, refuser, refused: generation });
        let Some(key) = self.peer(*identity, None, options) else { return refuse(Field::Capacity, 0) };
        let Some(peer) = self.peers.get_mut(key) else { return refuse(Field::Capacity, 0) };
        let Some(newest) = peer.accepted.get_mut(usize::from(index)) else { return refuse(Field::Generation, 0) };
        if generation <= *newest || peer.inner.is_self {
            return refuse(Field::Generation, *newest);
        }
        *newest = generation;
        let is_older = |lane: &&Lane| lane.side == LaneSide::Accepted && lane.index == index;
        let links: Vec<LinkId> = peer.lanes.iter().filter(is_older).map(|lane| lane.link).collect();
        for link in links {
            self.fabric.close_link_for(link, LinkDownReason::Superseded);
        }
        self.turn(options, now);
        Ok(())
    }

    /// A number for a dial: larger than all before, so every lane's generation grows.
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// The peer with this identity, if it is known and has a lane, or an address to dial.
    pub(super) fn known_peer(&self, identity: &Identity) -> Option<Arc<PeerInner>> {
        let peer = self.peers.get(*self.by_node.get(&identity.node)?)?;
        let is_there = !peer.lanes.is_empty() || peer.inner.address.is_some();
        let is_same = peer.inner.identity.incarnation == identity.incarnation;
        (is_there && is_same && !peer.is_gone).then(|| Arc::clone(&peer.inner))
    }

    pub(super) fn want_lane(&mut self, key: Handle, index: u8, now: Instant) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.want_index(index, now, &mut self.wanted);
        }
    }

    pub(super) fn on_dial_failed(&mut self, key: Handle, index: u8, options: &Options, now: Instant) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.on_dial_failed(index, now);
        self.next_tick = self.next_tick.min(peer.next_dial(now));
        self.pump(key, options, now);
    }

    pub(super) fn open_lane(
        &mut self,
        key: Handle,
        lane: NewLane,
        options: &Options,
        now: Instant,
    ) -> Result<(), String> {
        let Some(peer) = self.peers.get_mut(key) else { return Err("the peer is forgotten".to_owned()) };
        let device = match lane.via {
            Via::Shm => self.devices.shm,
            _ => self.devices.tcp,
        };
        let device = device.ok_or_else(|| format!("{} is switched off here", lane.via))?;
        let wire = WireLane {
            side: lane.side,
            generation: lane.generation,
            incarnation: options.identity.incarnation,
            peer_incarnation: peer.inner.identity.incarnation,
        };
        let connection = Connection::Stream { fd: lane.fd, read_ahead: Vec::new(), lane: wire };
        let with = LinkOptions::with_progress_deadline(options.progress_deadline);
        let link = self.fabric.open(now, device, connection, with).map_err(|error| error.to_string())?;
        self.links.insert(link, key);
        let counter = match lane.side {
            LaneSide::Dialed => &mut self.statistics.lanes_dialled,
            LaneSide::Accepted => &mut self.statistics.lanes_accepted,
        };
        *counter += 1;
        self.statistics.lanes_open += 1;
        let NewLane { via, side, index, permit, .. } = lane;
        let lane = Lane { link, via, side, index, posted_bytes: 0, posts: 0, is_full: false, _permit: permit };
        peer.on_lane(lane, now);
        self.pump(key, options, now);
        Ok(())
    }

    /// Takes a batch in. `Err`: a table is full and nothing was started.
    #[allow(clippy::result_large_err)] // the batch comes back by design
    pub(super) fn start(
        &mut self,
        shared: Arc<Shared>,
        batch: Batch,
        options: &Options,
        now: Instant,
    ) -> Result<(), (Arc<Shared>, Batch)> {
        let room = self.parts.capacity() - self.parts.len();
        let needed = batch.len() / PART_LIMITS.moves_max
            + 2
            + usize::try_from(batch.bytes() / PART_LIMITS.bytes_max).unwrap_or(usize::MAX);
        if self.works.len() == self.works.capacity() || needed.saturating_mul(2) > room {
            return Err((shared, batch));
        }
        let work = Work::new(shared, batch, now, options.progress_deadline);
        self.next_tick = self.next_tick.min(work.deadline).min(now + quarter(work.progress_deadline));
        let Ok(key) = self.works.insert(work) else { unreachable!("there is room: compared above") };
        let mut parts = std::mem::take(&mut self.spare_parts);
        let Some(work) = self.works.get_mut(key) else { return Ok(()) };
        work.cut(key, PART_LIMITS, &mut parts, &mut self.spare_pieces);
        self.statistics.transfers_started += 1;
        let mut touched: Option<Handle> = None;
        for part in parts.drain(..) {
            let peer = part.peer;
            if touched.is_some_and(|other| other != peer) {
                self.pump(touched.unwrap_or_default(), options, now);
            }
            touched = Some(peer);
            self.enqueue(part, Place::Back);
        }
        self.spare_parts = parts;
        if let Some(peer) = touched {
            self.pump(peer, options, now);
        }
        Ok(())
    }

    pub(super) fn enqueue(&mut self, part: Part, place: Place) {
        let (peer, of, bytes) = (part.peer, (part.class, part.via), part.bytes);
        let Ok(key) = self.parts.insert(part) else {
            unreachable!("parts have room: `start` keeps half of it for those that come back")
        };
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.open_bytes += bytes;
            peer.enqueue(key, of, place);
        }
    }

    /// Posts what can go to a peer now.
    pub(super) fn pump(&mut self, key: Handle, options: &Options, now: Instant) {
        // Bounded: each round takes a part out of a queue, or ends.
        loop {
            let Some(peer) = self.peers.get_mut(key) else { return };
            if peer.queued == 0 {
                return;
            }
            let heads = peer.heads_now();
            let mut taken = None;
            for (class, via, head) in heads.into_iter().flatten() {
                let Some(part) = self.parts.get(head) else { continue };
                let (bytes, has_writes) = (part.bytes, part.has_writes || part.arrival.is_some());
                match peer.choose((via, bytes, has_writes), options, now, &mut self.wanted) {
                    Choice::Wait => {}
                    other => {
                        peer.pop(class, via);
                        taken = Some((head, other));
                        break;
                    }
                }
            }
            match taken {
                None => return,
                Some((part, Choice::Lane(lane))) => self.post(part, lane, options, now),
                Some((part, Choice::Never(why))) => self.refuse_path(part, why, now),
                Some((_, Choice::Wait)) => return,
            }
        }
    }

    fn refuse_path(&mut self, key: Handle, why: &'static str, now: Instant) {
        let via = self.parts.get(key).map_or(Via::Auto, |part| part.via);
        self.fail_part(key, &Failure { cause: Cause::NoPath { via, why }, far: Far::Untouched }, now);
    }

    fn post(&mut self, key: Handle, lane_at: usize, options: &Options, now: Instant) {
        let Some(part) = self.parts.get_mut(key) else { return };
        let (Some(work), Some(peer)) = (self.works.get_mut(part.work), self.peers.get_mut(part.peer)) else { return };
        let mut batch = self.spare_batches.pop().unwrap_or_default();
        for piece in &mut part.pieces {
            let region = work.remotes[piece.remote as usize].inner.region;
            if let Some(request) = piece.as_request(region) {
                batch.push(request);
            }
        }
        if let Some((remote, Arrival { counter, amount })) = part.arrival {
            batch.arrival(work.remotes[remote as usize].inner.region, counter, amount);
        }
        let lane = &mut peer.lanes[lane_at];
        let with = PostOptions::default().with_attempt(u32::from(part.attempts));
        match self.fabric.post(now, lane.link, batch, with) {
            Ok(ticket) => {
                lane.posted_bytes += part.bytes;
                lane.posts += 1;
                let used = lane.via;
                part.attempts += 1;
                work.used = Some(used);
                let slot = ticket.id().handle().slot as usize;
                if self.tickets.len() <= slot {
                    self.tickets.resize(slot + 1, None);
                }
                self.tickets[slot] = Some((ticket.id(), key));
                part.posted = Some(Posted { link: lane.link, ticket, moved: 0 });
                if part.via == Via::Auto
                    && let Some((from, reason)) = peer.downgrade(used, options, now)
                {
                    self.statistics.on_detour(reason);
                    if peer.is_news(reason) {
                        let peer = hex(&peer.inner.identity.node);
                        tracing::warn!(%peer, %from, to = %used, reason = reason.name(), "a path is not the best that both sides share; `doctor` says what is wrong with it");
                    }
                }
            }
            Err(mut refused) => {
                for (piece, request) in part.pieces.iter_mut().zip(refused.batch.drain()) {
                    piece.give_back(request);
                }
                self.spare_batches.push(refused.batch);
                self.on_not_posted(key, lane_at, refused.reason, now);
            }
        }
    }

    fn on_not_posted(&mut self, key: Handle, lane: usize, reason: PostError, now: Instant) {
        let Some(part) = self.parts.get(key) else { return };
        let refused = |reason| Failure { cause: Cause::Refused { reason }, far: Far::Untouched };
        let failure = match reason {
            // The lane is full or closing: its next event brings the part on.
            PostError::LinkFull | PostError::LinkClosed | PostError::TicketsFull { .. } => {
                let (peer, of) = (part.peer, (part.class, part.via));
                self.next_tick = self.next_tick.min(now + Duration::from_millis(1));
                if let Some(peer) = self.peers.get_mut(peer) {
                    peer.enqueue(key, of, Place::Front);
                    // Not to be chosen again before something has ended there.
                    if let Some(lane) = peer.lanes.get_mut(lane) {
                        lane.is_full = true;
                    }
                }
                return;
            }
            PostError::NoRight { .. } => refused(RefusalReason::NotAllowed),
            PostError::OutOfBounds { .. } | PostError::LengthsDiffer { .. } | PostError::TooLarge { .. } => {
                refused(RefusalReason::OutOfBounds)
            }
            PostError::UnknownRegion { .. } | PostError::UnknownArrivalRegion => refused(RefusalReason::Stale),
            _ => Failure {
                cause: Cause::NoPath { via: part.via, why: "the transport cannot reach this memory" },
                far: Far::Untouched,
            },
        };
        self.fail_part(key, &failure, now);
    }
}

fn hex(node: &[u8; 16]) -> String {
    node.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Progress is looked for that often.
pub(super) fn quarter(span: Duration) -> Duration {
    Duration::from_nanos((span.as_nanos() / 4).max(1_000_000))
}
