//! One shard: the fabric with its devices, and everything that is under way on it. Lives behind the progress lock.
//!
//! The scheduler decides which slice goes over which lane, what is tried again, and when something is given up; the fabric
//! checks and moves. It dials nothing itself: it says what it wants dialled. Invariants: what was accepted ends; a row
//! exists while its job does, a part while its slice does.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use futures::channel::oneshot;
use millpond_core::batch::RegionId;
use millpond_core::slab::{Handle, Slab, Slot};
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::{self, Dialling, JobSpec, Lapse, PATHS_PER_PEER_MAX, PathId, SubmitError};
use millpond_core::wire::hello::{Field, Identity, Refusal as Refused};
use millpond_hal::backend::file::DriverInfo;
use millpond_hal::backend::host::Host;
use millpond_hal::backend::rdma::RdmaDevice;
use millpond_hal::backend::shm::{ShmDevice, ShmOptions};
use millpond_hal::backend::tcp::{Checksum, TcpDevice, TcpOptions};
use millpond_hal::contract::{
    Cipher, Connection, Lane as WireLane, LaneSide, LinkDownReason, LinkId, Outcome as HalOutcome, TicketId,
};
use millpond_hal::fabric::{self, DeviceId, Fabric, FabricOptions, LinkOptions};

use super::batch::{Batch, Via};
use super::grant::Arrivals;
use super::options::Options;
use super::own::Own;
use super::paths::PathEnd;
use super::peer::PeerInner;
use super::peers::{Lane, PeerState, WantedLane, asked, path_of};
use super::rails::Tried;
use super::statistics::{EXPLAIN_MAX, Explanation, Statistics};
use super::transfer::{Cause, Shared};
use super::wires::Wires;
use super::work::{Part, Piece, Row, Work};
use crate::session::Permit;

/// Jobs per transfer that the tables have room for; most have one.
const JOBS_PER_TRANSFER: u32 = 2;
/// Slices per transfer that the tables have room for.
const SLICES_PER_TRANSFER: u32 = 4;
/// Emptied containers kept for use.
pub(super) const SPARES_MAX: usize = 64;

type Table<T> = Box<[Slot<T>]>;
/// The scheduler over tables of its size.
pub(super) type Brain = transfer::Scheduler<Table<transfer::Job>, Table<transfer::Slice>, Table<transfer::Peer>>;

pub(super) struct Shard {
    pub(super) fabric: Fabric,
    devices: Devices,
    /// Of files, once the first was opened, and of GPUs.
    pub(super) owns: Vec<Own>,
    /// How files reach the kernel.
    pub(super) files_driver: Option<DriverInfo>,
    pub(super) works: Slab<Work, Box<[Slot<Work>]>>,
    /// Which slice goes where, and when.
    pub(super) brain: Brain,
    /// By the slot of the job, and of the slice.
    pub(super) rows: Vec<Option<Row>>,
    pub(super) parts: Vec<Option<Part>>,
    pub(super) peers: Slab<PeerState, Box<[Slot<PeerState>]>>,
    by_node: HashMap<[u8; 16], Handle>,
    /// The peer of each peer of the scheduler, by the latter's slot.
    pub(super) brain_peers: Vec<Handle>,
    /// Which slice a ticket carries, by the ticket's slot.
    pub(super) tickets: Vec<Option<(TicketId, Handle)>>,
    /// Byte tests under way.
    pub(super) tried: HashMap<TicketId, Tried>,
    pub(super) links: HashMap<LinkId, (Handle, PathId)>,
    pub(super) arrivals: HashMap<RegionId, Arc<Arrivals>>,
    pub(super) wanted: Vec<WantedLane>,
    pub(super) statistics: Statistics,
    pub(super) explained: VecDeque<Explanation>,
    /// Of the last dial.
    generation: u64,
    pub(super) spare_batches: Vec<fabric::Batch>,
    pub(super) spare_pieces: Vec<Vec<Piece>>,
    spare_rows: Vec<Row>,
    pub(super) outcomes: Vec<HalOutcome>,
    /// Whether a task was woken that waits for arrivals.
    pub(super) woke: bool,
    pub(super) is_shut_down: bool,
    /// Whether those who drive came to it when they meant to.
    pub(super) lapse: Lapse,
}

struct Devices {
    local: DeviceId,
    tcp: Option<DeviceId>,
    shm: Option<DeviceId>,
    /// By the NIC's number.
    rdma: Vec<DeviceId>,
}

/// What a lane is made of.
#[derive(Debug)]
pub(super) enum End {
    /// A socket that said its hello.
    Socket(OwnedFd),
    /// One under a cipher.
    Secured(OwnedFd, Box<dyn Cipher>),
    /// A connection of [`Wires`].
    Own(Connection),
}

impl End {
    /// A socket that said its hello, under `cipher` if there is one.
    pub(super) fn of(fd: OwnedFd, cipher: Option<Box<dyn Cipher>>) -> Self {
        match cipher {
            Some(cipher) => Self::Secured(fd, cipher),
            None => Self::Socket(fd),
        }
    }
}

/// A connection that said its hello, to become a lane.
#[derive(Debug)]
pub(super) struct NewLane {
    pub(super) end: End,
    pub(super) via: Via,
    pub(super) side: LaneSide,
    pub(super) index: u8,
    pub(super) generation: u64,
    pub(super) permit: Permit,
    /// Where the other end is; `None` for shared memory.
    pub(super) at: Option<std::net::SocketAddr>,
}

/// A link that is to become a path.
#[derive(Debug)]
pub(super) struct Entering {
    pub(super) side: LaneSide,
    pub(super) via: Via,
    pub(super) link: LinkId,
    pub(super) permit: Permit,
    pub(super) end: PathEnd,
    /// Of a rail: its session ends when this is dropped.
    pub(super) session: Option<oneshot::Sender<()>>,
}

fn brain(options: &Options, dial_seed: u64) -> Brain {
    let mut config = transfer::Config::default();
    config.dial_seed = dial_seed;
    config.progress_deadline = options.progress_deadline;
    config.stall_span = Duration::from_nanos(options.progress_deadline.as_nanos() / 2);
    config.connect_deadline = options.connect_deadline;
    config.bytes_per_peer_max = options.bytes_per_peer_max;
    let jobs = slots(options.transfers_max.saturating_mul(JOBS_PER_TRANSFER));
    let slices = slots(options.transfers_max.saturating_mul(SLICES_PER_TRANSFER));
    transfer::Scheduler::new(config, jobs, slices, slots(options.peers_max.saturating_add(1)))
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
    pub(super) fn new(
        options: &Options,
        wires: Option<&dyn Wires>,
        now: Instant,
    ) -> Result<(Self, Handle), StartError> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(|error| system("random numbers")(&error))?;
        let dial_seed = getrandom::u64().map_err(|error| system("random numbers")(&error))?;
        let mut wanted = FabricOptions::new(secret);
        wanted.incarnation = options.identity.incarnation;
        let mut fabric = Fabric::new(wanted).map_err(|error| system("descriptors")(&error))?;
        let add = |fabric: &mut Fabric, device| fabric.add_device(device).map_err(|error| system("devices")(&error));
        let local = add(&mut fabric, Box::new(Host::new()))?;
        let mut devices = Devices { local, tcp: None, shm: None, rdma: Vec::new() };
        if let Some(wires) = wires {
            devices.tcp = Some(add(&mut fabric, wires.device())?);
        } else if options.allows(Via::Tcp) {
            let tcp = TcpOptions {
                progress_deadline: options.progress_deadline,
                idle_span_max: options.lane_idle_span_max,
                checksum: if options.checksums { Checksum::Crc32c } else { Checksum::None },
                ..TcpOptions::default()
            };
            let device = TcpDevice::new(tcp).map_err(|error| system("an epoll set")(&error))?;
            devices.tcp = Some(add(&mut fabric, Box::new(device))?);
        }
        if options.allows(Via::Shm) {
            let shm = ShmOptions { progress_deadline: options.progress_deadline };
            let device = ShmDevice::new(shm).map_err(|error| system("an epoll set")(&error))?;
            devices.shm = Some(add(&mut fabric, Box::new(device))?);
        }
        for own in options.nics.iter().filter(|_| options.allows(Via::Rdma)) {
            devices.rdma.push(add(&mut fabric, Box::new(RdmaDevice::new(own.nic.clone())))?);
        }
        let mut shard = Self {
            fabric,
            devices,
            owns: Vec::new(),
            files_driver: None,
            works: Slab::new(slots(options.transfers_max)),
            brain: brain(options, dial_seed),
            rows: Vec::new(),
            parts: Vec::new(),
            peers: Slab::new(slots(options.peers_max.saturating_add(1))),
            by_node: HashMap::new(),
            brain_peers: Vec::new(),
            tickets: Vec::new(),
            tried: HashMap::new(),
            links: HashMap::new(),
            arrivals: HashMap::new(),
            wanted: Vec::new(),
            statistics: Statistics::default(),
            explained: VecDeque::with_capacity(EXPLAIN_MAX),
            generation: 0,
            spare_batches: Vec::new(),
            spare_pieces: Vec::new(),
            spare_rows: Vec::new(),
            outcomes: Vec::new(),
            woke: false,
            is_shut_down: false,
            lapse: Lapse::new(now),
        };
        let own = shard.own_peer(options, now)?;
        if let Some(gpus) = &options.gpus {
            let device = gpus.device().map_err(|error| system("its GPUs")(&error))?;
            shard.add_own(Via::Cuda, device, options, now).map_err(|error| system("its GPUs")(&error))?;
        }
        Ok((shard, own))
    }

    /// The engine as its own peer, with its one lane.
    fn own_peer(&mut self, options: &Options, now: Instant) -> Result<Handle, StartError> {
        let own =
            self.insert_peer(options.identity, None, options, now).ok_or_else(|| system("a table")(&"no peers"))?;
        let opened = self.fabric.open(now, self.devices.local, Connection::Loopback, LinkOptions::default());
        let link = opened.map_err(|error| system("a loopback link")(&error))?;
        let path = path_of(LaneSide::Dialed, 0).ok_or_else(|| system("a path")(&"no paths"))?;
        self.links.insert(link, (own, path));
        if let Some(peer) = self.peers.get_mut(own) {
            let generation = self.brain.on_open(now, peer.brain, path);
            let (via, _permit, _session) = (Via::Local, Permit::default(), None);
            peer.lanes[path.index()] = Some(Lane { link, via, generation, _permit, _session });
        }
        Ok(own)
    }

    fn insert_peer(
        &mut self,
        identity: Identity,
        address: Option<std::net::SocketAddr>,
        options: &Options,
        now: Instant,
    ) -> Option<Handle> {
        let is_self = (identity.node, identity.incarnation) == (options.identity.node, options.identity.incarnation);
        let inner = |key| Arc::new(PeerInner::new(key, identity, address, is_self));
        let key = self.add_peer(inner, options, now)?;
        if let Some(older) = self.by_node.insert(identity.node, key) {
            self.on_peer_replaced(older);
        }
        Some(key)
    }

    /// Enters a peer that knows its own place, here and at the scheduler. `None`: the table is full.
    pub(super) fn add_peer(
        &mut self,
        inner: impl Fn(Handle) -> Arc<PeerInner>,
        options: &Options,
        now: Instant,
    ) -> Option<Handle> {
        // Earlier incarnations do not come back; others may, and are known until there is no room for them.
        let is_full = self.peers.len() == self.peers.capacity();
        self.forget_idle_peers(|peer| is_full || peer.is_gone);
        let brain = self.brain.insert_peer(now)?;
        // The handle goes into the entry, so it is made first and the entry replaced.
        let blank = inner(Handle::default());
        let same_host = blank.identity.host.is_same_host(&options.identity.host);
        let key = self.peers.insert(PeerState::new(blank, brain, same_host, now)).ok()?;
        *self.peers.get_mut(key)? = PeerState::new(inner(key), brain, same_host, now);
        let slot = brain.slot as usize;
        if self.brain_peers.len() <= slot {
            self.brain_peers.resize(slot + 1, Handle::default());
        }
        self.brain_peers[slot] = key;
        self.declare(key, options);
        Some(key)
    }

    /// Tells the scheduler which paths may join a peer and us.
    fn declare(&mut self, key: Handle, options: &Options) {
        let Some(peer) = self.peers.get(key) else { return };
        for (path, spec) in peer.paths(options) {
            let known = self.brain.declare(peer.brain, path, spec);
            debug_assert!(known.is_ok(), "the scheduler knows every peer");
        }
    }

    /// Forgets peers of which nothing is open and that nobody holds.
    fn forget_idle_peers(&mut self, may_go: impl Fn(&PeerState) -> bool) {
        let is_idle = |peer: &PeerState| {
            let is_unused = !peer.inner.is_self && !peer.has_lanes() && self.brain.is_idle(peer.brain);
            is_unused && Arc::strong_count(&peer.inner) == 1 && may_go(peer)
        };
        let idle: Vec<(Handle, Handle)> =
            self.peers.iter().filter(|(_, peer)| is_idle(peer)).map(|(key, peer)| (key, peer.brain)).collect();
        for (key, brain) in idle {
            if !self.brain.remove_peer(brain) {
                continue;
            }
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
        for lane in peer.lanes.iter().flatten() {
            self.fabric.close_link_for(lane.link, LinkDownReason::Superseded);
        }
        self.brain.on_peer_gone(peer.brain);
    }

    /// The peer with this identity, made if it is new. `None`: the table is full, or the identity is of an earlier start.
    pub(super) fn peer(
        &mut self,
        identity: Identity,
        address: Option<std::net::SocketAddr>,
        options: &Options,
        now: Instant,
    ) -> Option<Handle> {
        if let Some(known) = self.by_node.get(&identity.node).copied()
            && let Some(peer) = self.peers.get_mut(known)
        {
            let held = peer.inner.identity.incarnation;
            if held == identity.incarnation {
                let is_first = peer.inner.ways() == 0 && !peer.inner.is_self;
                if let Some(address) = address.filter(|_| is_first) {
                    peer.inner.learn(&[address]);
                    self.declare(known, options);
                }
                return Some(known);
            }
            if held > identity.incarnation {
                return None;
            }
        }
        let peer = self.insert_peer(identity, address, options, now);
        self.pump(options, now);
        peer
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
        let Some(key) = self.peer(*identity, None, options, now) else { return refuse(Field::Capacity, 0) };
        let Some(peer) = self.peers.get_mut(key) else { return refuse(Field::Capacity, 0) };
        let Some(newest) = peer.accepted.get_mut(usize::from(index)) else { return refuse(Field::Generation, 0) };
        if generation <= *newest || peer.inner.is_self {
            return refuse(Field::Generation, *newest);
        }
        *newest = generation;
        let older = path_of(LaneSide::Accepted, index).and_then(|path| peer.lanes[path.index()].as_ref());
        if let Some(older) = older {
            self.fabric.close_link_for(older.link, LinkDownReason::Superseded);
        }
        self.turn(options, now);
        Ok(())
    }

    /// A peer, which was admitted, has lost its end of a lane that it dialled: what was written to it over that lands no more.
    pub(super) fn on_peers_fence(&mut self, identity: &Identity, index: u8, options: &Options, now: Instant) {
        let Some(key) = self.by_node.get(&identity.node).copied() else { return };
        if let (Some(peer), Some(path)) = (self.peers.get(key), path_of(LaneSide::Accepted, index))
            && peer.lanes[path.index()].is_none()
        {
            self.brain.on_fenced(peer.brain, path, u64::MAX);
            self.pump(options, now);
        }
    }

    /// Whether the peer may still have an end of a lane that is lost here.
    pub(super) fn needs_fence(&self, key: Handle, index: u8) -> bool {
        let (Some(peer), Some(path)) = (self.peers.get(key), path_of(LaneSide::Dialed, index)) else { return false };
        peer.lanes[path.index()].is_none() && peer.unfenced & (1 << path.index()) != 0
    }

    /// The peer dropped what it had of a lane that is lost here.
    pub(super) fn on_fenced(&mut self, key: Handle, index: u8, options: &Options, now: Instant) {
        if let (Some(peer), Some(path)) = (self.peers.get_mut(key), path_of(LaneSide::Dialed, index))
            && peer.lanes[path.index()].is_none()
        {
            peer.unfenced &= !(1 << path.index());
            self.brain.on_fenced(peer.brain, path, u64::MAX);
            self.pump(options, now);
        }
    }

    /// A number for a dial: larger than all before, so every lane's generation grows.
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// The peer with this identity, if it is known and has a lane, or an address to dial.
    pub(super) fn known_peer(&self, identity: &Identity) -> Option<Arc<PeerInner>> {
        let peer = self.peers.get(*self.by_node.get(&identity.node)?)?;
        let is_there = peer.has_lanes() || peer.inner.ways() > 0;
        let is_same = peer.inner.identity.incarnation == identity.incarnation;
        (is_there && is_same && !peer.is_gone).then(|| Arc::clone(&peer.inner))
    }

    /// A peer can be reached at these addresses too: each is a way of its own, and dialled at once.
    pub(super) fn add_addresses(
        &mut self,
        key: Handle,
        addresses: &[std::net::SocketAddr],
        options: &Options,
        now: Instant,
    ) {
        let Some(peer) = self.peers.get(key).filter(|peer| !peer.inner.is_self) else { return };
        if !peer.inner.learn(addresses) {
            return;
        }
        let ways = u8::try_from(peer.inner.ways()).unwrap_or(u8::MAX);
        self.declare(key, options);
        (0..ways).for_each(|index| self.want_lane(key, index, options, now));
    }

    pub(super) fn want_lane(&mut self, key: Handle, index: u8, options: &Options, now: Instant) {
        if let (Some(peer), Some(path)) = (self.peers.get(key), path_of(LaneSide::Dialed, index)) {
            self.brain.want(now, peer.brain, path);
            self.pump(options, now);
        }
    }

    pub(super) fn on_dial_failed(&mut self, wanted: &WantedLane, is_refused: bool, options: &Options, now: Instant) {
        let WantedLane { peer: key, index, .. } = *wanted;
        if let (Some(peer), Some(path)) = (self.peers.get_mut(key), path_of(LaneSide::Dialed, index)) {
            peer.on_dial_failed(index);
            if is_refused {
                self.brain.on_dial_refused(now, peer.brain, path);
            } else {
                self.brain.on_dial_failed(now, peer.brain, path);
            }
            self.pump(options, now);
        }
    }

    /// The device of a NIC here.
    pub(super) fn rdma_device(&self, nic: u8) -> Option<DeviceId> {
        self.devices.rdma.get(usize::from(nic)).copied()
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
        let connection = match lane.end {
            End::Socket(fd) => Connection::Stream { fd, read_ahead: Vec::new(), lane: wire },
            End::Secured(fd, cipher) => Connection::Secured { fd, cipher, lane: wire },
            End::Own(connection) => connection,
        };
        let with = LinkOptions::with_progress_deadline(options.progress_deadline);
        let path = path_of(lane.side, lane.index).ok_or("there is no lane of that index")?;
        let link = self.fabric.open(now, device, connection, with).map_err(|error| error.to_string())?;
        let NewLane { via, permit, side, at, .. } = lane;
        let end = PathEnd { via, at, nics: None };
        let entered =
            self.enter_lane(key, path, Entering { side, via, link, permit, end, session: None }, options, now);
        if entered.is_err() {
            self.fabric.close_link(link);
        }
        entered
    }

    /// A link is a path of a peer from now on.
    pub(super) fn enter_lane(
        &mut self,
        key: Handle,
        path: PathId,
        lane: Entering,
        options: &Options,
        now: Instant,
    ) -> Result<(), String> {
        let Entering { side, via, link, permit, end, session } = lane;
        if self.is_shut_down {
            // It was admitted before, or dialled: nobody would end it.
            return Err("the engine is shut down".to_owned());
        }
        let Some(peer) = self.peers.get_mut(key) else { return Err("the peer is forgotten".to_owned()) };
        self.links.insert(link, (key, path));
        let counter = match side {
            LaneSide::Dialed => &mut self.statistics.lanes_dialled,
            LaneSide::Accepted => &mut self.statistics.lanes_accepted,
        };
        *counter += 1;
        self.statistics.lanes_open += 1;
        match peer.ends.binary_search_by_key(&path, |(path, _)| *path) {
            Ok(at) => peer.ends[at].1 = end,
            Err(at) => peer.ends.insert(at, (path, end)),
        }
        peer.unfenced &= !(1 << path.index());
        if !self.brain.has_path(peer.brain, path) {
            let dialling = if side == LaneSide::Dialed { Dialling::OursWhenBusy } else { Dialling::Theirs };
            let spec = peer.spec(via, dialling, options).ok_or("the transport is not one of a lane")?;
            self.brain.declare(peer.brain, path, spec).map_err(|error| error.to_string())?;
        }
        let generation = self.brain.on_open(now, peer.brain, path);
        if side == LaneSide::Accepted {
            peer.met_at = now;
        }
        peer.on_lane(via);
        let older =
            peer.lanes[path.index()].replace(Lane { link, via, generation, _permit: permit, _session: session });
        if let Some(older) = older {
            self.fabric.close_link_for(older.link, LinkDownReason::Superseded);
        }
        self.pump(options, now);
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
        let is_full = self.brain.jobs() >= self.brain.jobs_max();
        if self.works.len() == self.works.capacity() || is_full {
            return Err((shared, batch));
        }
        let work = Work::new(shared, batch, now);
        let Ok(key) = self.works.insert(work) else { unreachable!("there is room: compared above") };
        let mut rows = std::mem::take(&mut self.spare_rows);
        let Some(work) = self.works.get_mut(key) else { return Ok(()) };
        work.rows(key, &mut rows, &mut self.spare_pieces);
        work.jobs = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        self.statistics.transfers_started += 1;
        for row in rows.drain(..) {
            self.submit_row(row, options, now);
        }
        self.spare_rows = rows;
        self.pump(options, now);
        Ok(())
    }

    /// Gives a row to the scheduler as a job. What it does not take fails.
    pub(super) fn submit_row(&mut self, mut row: Row, options: &Options, now: Instant) {
        let (Some(work), Some(peer)) = (self.works.get(row.work), self.peers.get(row.peer)) else { return };
        let mut spec = JobSpec::new(peer.brain, row.bytes);
        spec.class = work.settings.class;
        spec.asked = asked(work.settings.via);
        spec.deadline = work.deadline;
        spec.progress_deadline = work.settings.progress_deadline;
        spec.has_writes = row.has_writes;
        match self.brain.submit(now, spec) {
            Ok(job) => {
                row.job = job;
                let at = job.slot as usize;
                if self.rows.len() <= at {
                    self.rows.resize_with(at + 1, || None);
                }
                self.rows[at] = Some(row);
            }
            Err(error) => {
                let cause = match error {
                    SubmitError::Busy { .. } => Cause::Overload,
                    _ => self.cause_for(row.work, row.peer, transfer::Cause::PeerGone, options),
                };
                self.end_row(row, Some(cause), options, now);
            }
        }
    }

    /// What was counted, the scheduler's part included.
    pub(super) fn counted(&self) -> Statistics {
        let counters = self.brain.counters();
        let paths = || (0..PATHS_PER_PEER_MAX).filter_map(PathId::new);
        let loads = self.peers.iter().flat_map(|(_, peer)| paths().map(|path| self.brain.path_load(peer.brain, path)));
        let bytes_open = loads.flatten().map(|load| load.bytes).sum();
        let slices_open = u64::try_from(self.brain.slices()).unwrap_or(u64::MAX);
        let peers_known = u64::try_from(self.peers.len()).unwrap_or(u64::MAX);
        Statistics { retries: counters.retries, bytes_open, slices_open, peers_known, ..self.statistics }
    }
}
