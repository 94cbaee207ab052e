//! How connections become lanes: dialled here or accepted, said hello, taken over by a device.
//!
//! TCP lanes come over the node's port; lanes of shared memory over a unix socket in the abstract namespace that is named
//! after the node and its incarnation. Both say the same hello. Invariant: before a newer generation of a lane is welcomed,
//! the older one is closed, so that nothing of it is applied any more.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{BoxFuture, FutureExt, WeakShared, select_ok};
use futures::io::{AsyncRead, AsyncWrite};
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{Field, HostIdentity, Identity, Purpose, Refusal};
use millpond_core::wire::session::Peer as Met;
use millpond_hal::backend::shm::LAYOUT_VERSION;
use millpond_hal::contract::LaneSide;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    recv, send, socket_with,
};

use super::batch::Via;
use super::core::Core;
use super::options::Options;
use super::peer::{OpenError, Peer, PeerInner};
use super::peers::{RAIL_LANES, SHM_LANES, WantedLane};
use super::rail;
use super::shard::{End, NewLane, Shard};
use super::wires::{self, Call};
use crate::runtime::{Readiness, Runtime, by, within};
use crate::session::{
    Credentials, Lane, Permit, Session, SessionError, Target, dial, shake_as_acceptor, shake_as_dialer, share,
};

/// Unix connections that wait to be accepted, at most.
const BACKLOG: i32 = 64;

pub(super) fn credentials(options: &Options) -> Credentials {
    let mut credentials = Credentials::new(options.identity);
    (credentials.key, credentials.tls) = (options.key, options.tls.clone());
    credentials
}

fn open_error(error: &SessionError, address: SocketAddr) -> OpenError {
    match error {
        SessionError::Deadline { .. } => OpenError::Late,
        SessionError::Hello { failure, .. } => OpenError::Hello { why: failure.to_string() },
        SessionError::Tls { why, .. } => OpenError::Tls { why: why.clone() },
        SessionError::Resolve { peer, source } => OpenError::Resolve { name: peer.clone(), why: source.to_string() },
        other => OpenError::Connect { address, why: other.to_string() },
    }
}

type Opening = BoxFuture<'static, Result<Peer, OpenError>>;

/// First lanes that are being opened, by address.
pub(super) type Openings = HashMap<SocketAddr, WeakShared<Opening>>;

/// Opens the first lane to whoever listens at `address`. Those who ask at once wait for the same one: of two, the newer
/// would take over from the older.
pub(super) async fn open<R: Runtime>(runtime: &R, core: &Arc<Core>, address: SocketAddr) -> Result<Peer, OpenError> {
    let opening = {
        let mut openings = core.openings.lock();
        openings.retain(|_, opening| opening.upgrade().is_some());
        openings.get(&address).and_then(WeakShared::upgrade).unwrap_or_else(|| {
            let opening = open_first(runtime.clone(), Arc::clone(core), address).boxed().shared();
            openings.extend(opening.downgrade().map(|opening| (address, opening)));
            opening
        })
    };
    opening.await
}

async fn open_first<R: Runtime>(runtime: R, core: Arc<Core>, address: SocketAddr) -> Result<Peer, OpenError> {
    // The generation of a first lane is found out by asking: a node that knows us from before wants a larger one.
    let known = core.locked(|shard| {
        let found =
            shard.peers.iter().find(|(_, peer)| peer.inner.has_address(address) && !peer.is_gone && peer.has_lanes());
        found.map(|(_, peer)| Arc::clone(&peer.inner))
    });
    if let Some(inner) = known {
        return Ok(Peer { inner });
    }
    let (identity, lane) =
        connect_to(&runtime, &core, address, None, 0).await.map_err(|error| open_error(&error, address))?;
    let peers_max = core.options.peers_max;
    let key = core
        .locked(|shard| shard.peer(identity, Some(address), &core.options, core.now()))
        .ok_or(OpenError::TooManyPeers { peers_max })?;
    adopt_dialled(&core, key, lane).map_err(|why| OpenError::Connect { address, why })?;
    let inner = core.locked(|shard| shard.peers.get(key).map(|peer| Arc::clone(&peer.inner)));
    let peer = Peer { inner: inner.ok_or(OpenError::ShutDown)? };
    // The better paths, in the background: until one is there the first lane carries everything.
    if core.options.allows(Via::Shm) && identity.host.is_same_host(&core.options.identity.host) {
        core.locked(|shard| shard.want_lane(key, SHM_LANES, &core.options, core.now()));
    } else {
        (0..core.options.rails()).for_each(|rail| {
            core.locked(|shard| shard.want_lane(key, RAIL_LANES + rail, &core.options, core.now()));
        });
    }
    Ok(peer)
}

/// Connects a lane to whoever listens at `address`; `expected` is to be there, if that is known.
async fn connect_to<R: Runtime>(
    runtime: &R,
    core: &Core,
    address: SocketAddr,
    expected: Option<[u8; 16]>,
    index: u8,
) -> Result<(Identity, NewLane), SessionError> {
    let generation = core.locked(Shard::next_generation);
    let deadline = runtime.now() + core.options.connect_deadline;
    if let Some(wires) = &core.wires {
        let call = Call { to: address, from: core.options.identity, index, generation };
        return wires::dial(runtime, wires, call, expected, deadline).await;
    }
    let target = Target::from(address);
    let target = match expected {
        Some(node) => target.expecting(node),
        None => target,
    };
    let purpose = Purpose::Lane { index, generation };
    let session = dial(runtime, &target, purpose, &credentials(&core.options), deadline).await?;
    let identity = session.peer.hello.identity;
    let broken = |source| SessionError::Broken { peer: target.to_string(), source };
    let Lane { fd, cipher, permit, address, .. } = session.into_lane().map_err(broken)?;
    let (end, side, at) = (End::of(fd, cipher), LaneSide::Dialed, Some(address));
    Ok((identity, NewLane { end, via: Via::Tcp, side, index, generation, permit, at }))
}

fn adopt_dialled(core: &Core, key: Handle, lane: NewLane) -> Result<(), String> {
    let opened = core.locked(|shard| shard.open_lane(key, lane, &core.options, core.now()));
    // The driver may be asleep without this lane, and the peer may be the first to use it.
    core.kick();
    opened
}

/// A lane that did not come about.
pub(super) struct NotDialled {
    why: String,
    /// Nobody listens there.
    is_refused: bool,
}

impl From<String> for NotDialled {
    fn from(why: String) -> Self {
        Self { why, is_refused: false }
    }
}

impl From<io::Error> for NotDialled {
    fn from(error: io::Error) -> Self {
        Self { why: error.to_string(), is_refused: error.kind() == io::ErrorKind::ConnectionRefused }
    }
}

impl From<SessionError> for NotDialled {
    fn from(error: SessionError) -> Self {
        let is_refused =
            matches!(&error, SessionError::Connect { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused);
        Self { why: error.to_string(), is_refused }
    }
}

/// Dials a lane that the shard wants.
pub(super) async fn dial_wanted<R: Runtime>(runtime: R, core: Arc<Core>, wanted: WantedLane) {
    let opened = if wanted.index >= RAIL_LANES {
        let dialled = rail::dial(&runtime, &core, &wanted).await;
        dialled.inspect_err(|_| core.locked(|shard| shard.give_rail_up(wanted.peer, wanted.index)))
    } else {
        let dialled = if wanted.index == SHM_LANES {
            dial_shm(&runtime, &core, &wanted).await
        } else {
            dial_tcp(&runtime, &core, &wanted).await
        };
        dialled.and_then(|lane| Ok(core.locked(|shard| shard.open_lane(wanted.peer, lane, &core.options, core.now()))?))
    };
    if let Err(NotDialled { why, is_refused }) = opened {
        tracing::debug!(index = wanted.index, %why, "a lane could not be dialled");
        if core.locked(|shard| shard.needs_fence(wanted.peer, wanted.index)) {
            fence(&runtime, &core, &wanted).await;
        }
        core.locked(|shard| shard.on_dial_failed(&wanted, is_refused, &core.options, core.now()));
    }
    core.kick();
}

/// Has the peer drop what it may still have of a lane that was lost, by whichever of its addresses answers. Until it did,
/// what was written over that lane may land, and later writes wait. Over [`Wires`](super::Wires) nothing but lanes is dialled.
async fn fence<R: Runtime>(runtime: &R, core: &Core, wanted: &WantedLane) {
    let (addresses, identity) = (wanted.inner.addresses.lock().clone(), wanted.inner.identity);
    let dials = addresses.into_iter().map(|address| {
        let target = Target::from(address).expecting(identity.node);
        let purpose = Purpose::Fence { index: wanted.index, generation: core.locked(Shard::next_generation) };
        let deadline = runtime.now() + core.options.connect_deadline;
        let credentials = credentials(&core.options);
        async move { dial(runtime, &target, purpose, &credentials, deadline).await.map_err(|_| ()) }.boxed()
    });
    if dials.len() == 0 || core.wires.is_some() {
        return;
    }
    // The first that answers is enough; the generations of the others are older, or fence once more.
    let is_same = |session: &Session<R::Stream>| session.peer.hello.identity.incarnation == identity.incarnation;
    if let Ok((session, _)) = select_ok(dials).await
        && is_same(&session)
    {
        core.locked(|shard| shard.on_fenced(wanted.peer, wanted.index, &core.options, core.now()));
    }
}

/// A session with the peer of a lane, at the first of its addresses that answers, each within its share of the time.
pub(super) async fn reach<R: Runtime>(
    runtime: &R,
    core: &Core,
    wanted: &WantedLane,
    purpose: Purpose,
    deadline: Instant,
) -> Result<Session<R::Stream>, NotDialled> {
    let (addresses, identity) = (wanted.inner.addresses.lock().clone(), wanted.inner.identity);
    let mut why = NotDialled::from("the peer has no address".to_owned());
    for (at, address) in addresses.iter().enumerate() {
        let target = Target::from(*address).expecting(identity.node);
        let until = share(runtime.now(), deadline, addresses.len() - at);
        match dial(runtime, &target, purpose, &credentials(&core.options), until).await {
            Ok(session) if session.peer.hello.identity.incarnation == identity.incarnation => return Ok(session),
            Ok(session) => return Err(restarted(core, session.peer.hello.identity, *address)),
            Err(error) => {
                if error.refusal().is_some_and(|refusal| refusal.field == Field::Purpose) {
                    core.locked(|shard| shard.has_no_rails(wanted.peer));
                }
                why = error.into();
            }
        }
    }
    Err(why)
}

/// Another incarnation answered: from now on it is the peer, and what was for the one before it ends.
fn restarted(core: &Core, met: Identity, address: SocketAddr) -> NotDialled {
    core.locked(|shard| shard.peer(met, Some(address), &core.options, core.now()));
    "the node was restarted".to_owned().into()
}

async fn dial_tcp<R: Runtime>(runtime: &R, core: &Core, wanted: &WantedLane) -> Result<NewLane, NotDialled> {
    let address = wanted.inner.address_of(wanted.index).ok_or_else(|| "the peer has no address".to_owned())?;
    let expected = Some(wanted.inner.identity.node);
    let (met, lane) = connect_to(runtime, core, address, expected, wanted.index).await?;
    if met.incarnation != wanted.inner.identity.incarnation {
        return Err(restarted(core, met, address));
    }
    Ok(lane)
}

async fn dial_shm<R: Runtime>(runtime: &R, core: &Core, wanted: &WantedLane) -> Result<NewLane, NotDialled> {
    let identity = wanted.inner.identity;
    let fd = unix_socket().map_err(io::Error::from)?;
    connect(&fd, &unix_name(&identity).map_err(io::Error::from)?).map_err(io::Error::from)?;
    let pipe = UnixPipe::<R>::new(runtime, fd)?;
    let generation = core.locked(Shard::next_generation);
    let purpose = Purpose::Lane { index: wanted.index, generation };
    let deadline = runtime.now() + core.options.connect_deadline;
    let credentials = credentials(&core.options);
    let shaken = by(runtime, deadline, shake_as_dialer(pipe, &credentials, purpose, identity.node)).await;
    let (pipe, met) = shaken.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    if met.hello.identity.incarnation != identity.incarnation {
        return Err("another incarnation answered".to_owned().into());
    }
    let index = wanted.index;
    let side = LaneSide::Dialed;
    let (end, permit) = (End::Socket(pipe.into_fd()), Permit::default());
    Ok(NewLane { end, via: Via::Shm, side, index, generation, permit, at: None })
}

/// Whether a lane may be welcomed; closes what it replaces.
pub(super) fn admit(core: &Core, met: &Met) -> Result<(), Refusal> {
    let identity = &met.hello.identity;
    match met.hello.purpose {
        Purpose::Rail { .. } if core.options.nics.is_empty() => Err(Refusal::of(Field::Purpose)),
        Purpose::Lane { index, generation } | Purpose::Rail { index, generation } => {
            admit_lane(core, identity, (index, generation))
        }
        Purpose::Fence { index, generation } => {
            admit_lane(core, identity, (index, generation))?;
            core.locked(|shard| shard.on_peers_fence(identity, index, &core.options, core.now()));
            core.kick();
            Ok(())
        }
        Purpose::Control => Ok(()),
    }
}

/// [`admit`] for a lane of that index and generation.
pub(super) fn admit_lane(core: &Core, identity: &Identity, lane: (u8, u64)) -> Result<(), Refusal> {
    if core.is_shut_down() {
        return Err(Refusal::of(Field::Draining));
    }
    let admitted = core.locked(|shard| shard.admit(identity, lane, &core.options, core.now()));
    // Admitting makes turns, and whether a lane comes of it is open yet.
    core.rearm_driver();
    admitted
}

/// Takes over a lane that was accepted on the node's port.
pub(super) fn adopt(core: &Arc<Core>, lane: Lane) -> Result<Peer, String> {
    let Lane { fd, cipher, peer, index, generation, permit, address } = lane;
    let (end, side, at) = (End::of(fd, cipher), LaneSide::Accepted, Some(address));
    let lane = NewLane { end, via: Via::Tcp, side, index, generation, permit, at };
    adopt_accepted(core, &peer.hello.identity, lane)
}

pub(super) fn adopt_accepted(core: &Core, identity: &Identity, lane: NewLane) -> Result<Peer, String> {
    let inner = core.locked(|shard| {
        let key = shard.peer(*identity, None, &core.options, core.now()).ok_or("no room for another peer")?;
        shard.open_lane(key, lane, &core.options, core.now())?;
        let peer = shard.peers.get(key).ok_or("the peer is forgotten")?;
        Ok::<Arc<PeerInner>, String>(Arc::clone(&peer.inner))
    })?;
    core.kick();
    Ok(Peer { inner })
}

fn unix_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// Who lays shared memory out in another way is not found, and met over tcp.
fn unix_name(identity: &Identity) -> rustix::io::Result<SocketAddrUnix> {
    let node: String = identity.node.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddrUnix::new_abstract_name(format!("millpond-{node}-{:x}-{LAYOUT_VERSION}", identity.incarnation).as_bytes())
}

/// The unix socket that lanes of shared memory come to. `None` where there is none to be had: then others carry.
pub(super) fn shm_listener(options: &Options) -> Option<OwnedFd> {
    if !options.allows(Via::Shm) || options.identity.host == HostIdentity::UNKNOWN {
        return None;
    }
    let fd = unix_socket().ok()?;
    bind(&fd, &unix_name(&options.identity).ok()?).ok()?;
    listen(&fd, BACKLOG).ok()?;
    Some(fd)
}

/// Accepts lanes of shared memory until the engine is shut down.
pub(super) async fn accept_shm<R: Runtime>(runtime: R, core: Arc<Core>, listener: OwnedFd) {
    let Ok(watched) = rustix::io::fcntl_dupfd_cloexec(&listener, 0) else { return };
    let Ok(readiness) = runtime.readable(watched) else { return };
    while !core.is_shut_down() {
        // Looks up now and then whether the engine still runs.
        let waited = within(&runtime, Duration::from_millis(500), readiness.readable()).await;
        if matches!(waited, Ok(Err(_))) {
            return;
        }
        while let Ok(fd) = accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            runtime.spawn(welcome_shm(runtime.clone(), Arc::clone(&core), fd));
        }
    }
}

async fn welcome_shm<R: Runtime>(runtime: R, core: Arc<Core>, fd: OwnedFd) {
    let Ok(pipe) = UnixPipe::<R>::new(&runtime, fd) else { return };
    let credentials = credentials(&core.options);
    let admit_on = Arc::clone(&core);
    let decide = move |met: &Met| match met.hello.purpose {
        Purpose::Lane { index, .. } if index == SHM_LANES => admit(&admit_on, met),
        _ => Err(Refusal::of(Field::Purpose)),
    };
    let shaken = within(&runtime, core.options.connect_deadline, shake_as_acceptor(pipe, &credentials, decide)).await;
    let Ok(Ok((pipe, met))) = shaken else { return };
    let Purpose::Lane { index, generation } = met.hello.purpose else { return };
    let (end, side) = (End::Socket(pipe.into_fd()), LaneSide::Accepted);
    let lane = NewLane { end, via: Via::Shm, side, index, generation, permit: Permit::default(), at: None };
    if let Err(why) = adopt_accepted(&core, &met.hello.identity, lane) {
        tracing::info!(%why, "a lane of shared memory was turned away");
    }
}

/// Takes the lanes and rails among the sessions of a port.
pub(super) fn take_session<R: Runtime>(
    runtime: &R,
    core: &Arc<Core>,
    session: Session<R::Stream>,
) -> Result<(), String> {
    match session.peer.hello.purpose {
        Purpose::Fence { .. } => return Ok(()), // all was done when it was admitted
        Purpose::Rail { .. } => {
            runtime.spawn(rail::accept(runtime.clone(), Arc::clone(core), session));
            return Ok(());
        }
        _ => {}
    }
    adopt(core, session.into_lane().map_err(|error| error.to_string())?).map(drop)
}

/// A unix socket while its hello is said.
struct UnixPipe<R: Runtime> {
    fd: OwnedFd,
    readiness: Arc<R::Readiness>,
    waiting: Option<BoxFuture<'static, io::Result<()>>>,
}

impl<R: Runtime> UnixPipe<R> {
    fn new(runtime: &R, fd: OwnedFd) -> io::Result<Self> {
        let readiness = Arc::new(runtime.readable(fd.as_fd().try_clone_to_owned()?)?);
        Ok(Self { fd, readiness, waiting: None })
    }

    fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl<R: Runtime> Unpin for UnixPipe<R> {}

impl<R: Runtime> AsyncRead for UnixPipe<R> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // Bounded: a second round only when the socket became readable.
        loop {
            match recv(&this.fd, &mut *into, RecvFlags::empty()) {
                Ok((len, _)) => return Poll::Ready(Ok(len)),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
            let readiness = Arc::clone(&this.readiness);
            let waiting = this.waiting.get_or_insert_with(|| Box::pin(async move { readiness.readable().await }));
            match waiting.as_mut().poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(woken) => {
                    this.waiting = None;
                    woken?;
                }
            }
        }
    }
}

impl<R: Runtime> AsyncWrite for UnixPipe<R> {
    /// A hello is smaller than any socket's buffer: one that does not fit has a peer that does not read.
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(send(&self.fd, from, SendFlags::NOSIGNAL).map_err(io::Error::from))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
