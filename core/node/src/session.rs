//! Sessions: connections whose two ends know who the other is.
//!
//! Drives the hello machine of `core::wire::session` over a runtime's sockets. A control session goes on as a [`Session`]
//! (see `rpc`); a data lane leaves the runtime as a [`Lane`], for the transport to adopt. What is said in a session is
//! none of this module's business.
//!
//! Invariants: a hello takes at most its deadline, however slowly the peer speaks; at most [`Limits`] of sessions and of
//! hellos exist at once, and a new hello pushes out the oldest, so strangers cannot lock a node's peers out for long; not
//! one byte beyond the hello is read; a stranger gets an answer in its own protocol where there is one, and is closed.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use futures::future::FutureExt;
use futures::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::HELLO_LEN_MAX;
use millpond_core::wire::hello::{Field, Hello, Identity, KvLayout, Purpose, Refusal};
use millpond_core::wire::session::{Config, Failure, Key, Peer, Session as Machine, State};
use millpond_hal::contract::Cipher;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;

use crate::runtime::{Runtime, Stop, Stream, by, within};
use crate::tls::{self, Channel, Rejected, Tls};

mod target;

pub use target::Target;

/// How long a closing node listens on, so that its last words arrive.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes of a stranger that are read and thrown away before closing.
const LINGER_LEN_MAX: usize = 64 << 10;

/// Nodes whose incarnation an acceptor remembers; the longest known is forgotten first.
const KNOWN_MAX: usize = 4096;

/// What a node brings to every hello.
///
/// ```
/// use millpond_core::wire::hello::{HostIdentity, Identity};
/// use millpond_core::wire::session::Key;
/// use millpond_node::session::Credentials;
/// let me = Identity { node: [1; 16], incarnation: 7, host: HostIdentity::UNKNOWN };
/// let credentials = Credentials::new(me).with_key(Key::new(b"secret"));
/// assert!(credentials.key.is_some());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Credentials {
    /// Who this node is.
    pub identity: Identity,
    /// The key that all nodes of the cluster share; without one, anybody is let in.
    pub key: Option<Key>,
    /// The KV layout, if peers must have the same one.
    pub layout: Option<KvLayout>,
    /// The certificates of both roles, if sessions are encrypted; then nobody is let in without one.
    pub tls: Option<Tls>,
}

impl Credentials {
    /// No key, no layout, no TLS.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self { identity, key: None, layout: None, tls: None }
    }

    /// The same with a shared key.
    #[must_use]
    pub fn with_key(self, key: Key) -> Self {
        Self { key: Some(key), ..self }
    }

    /// The same with a KV layout that peers are compared by.
    #[must_use]
    pub fn with_layout(self, layout: KvLayout) -> Self {
        Self { layout: Some(layout), ..self }
    }

    /// The same under TLS.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// Whether who showed this certificate may be the node that it says it is.
    fn check(&self, certificate: Option<&CertificateDer<'_>>, peer: &Peer) -> Result<(), Refusal> {
        match &self.tls {
            Some(tls) if !tls.believes(certificate, &peer.hello.identity.node) => Err(Refusal::of(Field::Certificate)),
            _ => Ok(()),
        }
    }

    fn config(&self, purpose: Purpose) -> Config {
        let config = Config::new(Hello { purpose, identity: self.identity, layout: self.layout });
        match self.key {
            Some(key) => config.with_key(key),
            None => config,
        }
    }
}

/// Why there is no session.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_node::session::SessionError;
/// let error = SessionError::Deadline { peer: "10.0.0.1:7000".into(), waited: Duration::from_secs(1) };
/// assert!(error.to_string().contains("10.0.0.1:7000"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The address makes no sense.
    #[error("`{address}` is no node address; write it as host:port or [ipv6]:port")]
    Address {
        /// What was given.
        address: String,
    },
    /// The name has no address.
    #[error("cannot resolve {peer}: {source}")]
    Resolve {
        /// Who was to be reached.
        peer: String,
        /// The resolver's answer.
        source: io::Error,
    },
    /// Nobody listens there, or the network says no.
    #[error("cannot connect to {peer}: {source}")]
    Connect {
        /// Who was to be reached.
        peer: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The hello ended in a refusal, or is none.
    #[error("no session with {peer}: {failure}")]
    Hello {
        /// Who was at the other end.
        peer: String,
        /// What went wrong; a refusal names its field.
        failure: Failure,
    },
    /// TLS does not come about: certificates that do not go together, or an end without TLS.
    #[error("no TLS with {peer}: {why}")]
    Tls {
        /// Who was at the other end.
        peer: String,
        /// What is wrong and how to mend it.
        why: String,
    },
    /// The connection broke during the hello.
    #[error("the connection with {peer} broke during the hello: {source}")]
    Broken {
        /// Who was at the other end.
        peer: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The peer did not answer in time.
    #[error("{peer} did not answer within {waited}; is it a Millpond node, and alive?")]
    Deadline {
        /// Who was to be reached.
        peer: String,
        /// How long was waited.
        waited: Duration,
    },
}

impl SessionError {
    /// The field that one side refused the other for, if that is what happened.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Hello { failure: Failure::RefusedByPeer(refusal) | Failure::RefusedByUs(refusal), .. } => {
                Some(*refusal)
            }
            _ => None,
        }
    }

    /// Whether the cause may go away by itself, so that trying again makes sense.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Address { .. } | Self::Tls { .. } => false,
            Self::Hello { failure, .. } => match failure {
                Failure::Closed => true,
                Failure::RefusedByPeer(refusal) => matches!(refusal.field, Field::Capacity | Field::Draining),
                _ => false,
            },
            Self::Resolve { .. } | Self::Connect { .. } | Self::Broken { .. } | Self::Deadline { .. } => true,
        }
    }
}

/// A place among the sessions of an acceptor; dropping it makes room for another.
///
/// Example: `verify/tests/runtimes/session.rs` (`sessions`).
#[derive(Debug, Default)]
pub struct Permit(Option<Arc<Mutex<Table>>>);

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(table) = &self.0 {
            table.lock().sessions -= 1;
        }
    }
}

/// A connection whose ends know each other.
///
/// Example: `verify/tests/runtimes/session.rs`.
#[derive(Debug)]
pub struct Session<S> {
    /// The bytes that follow the hello. What is written may wait until it is flushed.
    pub stream: Channel<S>,
    /// Who is at the other end, and what the session is for.
    pub peer: Peer,
    /// Where the other end is.
    pub address: SocketAddr,
    /// Held as long as the session counts against the acceptor's limit.
    pub permit: Permit,
}

/// A data lane that left the runtime, to be adopted by a transport.
///
/// Example: `verify/tests/runtimes/session.rs`.
#[derive(Debug)]
pub struct Lane {
    /// The connected, non-blocking socket. The next byte to be read is the first after the hello.
    pub fd: OwnedFd,
    /// What the lane goes on under; bytes read beyond the hello are in it.
    pub cipher: Option<Box<dyn Cipher>>,
    /// Who is at the other end.
    pub peer: Peer,
    /// Which of the dialer's lanes to this node it is.
    pub index: u8,
    /// How often that lane was dialed, from 1.
    pub generation: u64,
    /// Where the other end is.
    pub address: SocketAddr,
    /// To be held as long as the lane is open.
    pub permit: Permit,
}

impl<S: Stream> Session<S> {
    /// Takes a data lane out of the runtime.
    ///
    /// # Errors
    /// The session is no lane (`InvalidInput`), or the runtime fails to let go; the connection is closed then.
    pub fn into_lane(self) -> io::Result<Lane> {
        let Purpose::Lane { index, generation } = self.peer.hello.purpose else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a control session is no data lane"));
        };
        let (fd, cipher) = self.stream.into_fd()?;
        Ok(Lane { fd, cipher, peer: self.peer, index, generation, address: self.address, permit: self.permit })
    }
}

/// Until when the next of `left` addresses may take, so that each has its share of the time to `deadline`.
pub(crate) fn share(now: Instant, deadline: Instant, left: usize) -> Instant {
    let shares = u64::try_from(left).unwrap_or(u64::MAX).max(1);
    now + Duration::from_nanos(deadline.since(now).as_nanos() / shares)
}

/// Opens a session with `target` by `deadline`, trying its addresses in turn; each has its share of the time, so that one
/// which swallows everything does not use it up.
///
/// # Errors
/// No session; every kind of [`SessionError`]. A refusal ends the search, unless another node answers there; other failures
/// go on to the next address.
pub async fn dial<R: Runtime>(
    runtime: &R,
    target: &Target,
    purpose: Purpose,
    credentials: &Credentials,
    deadline: Instant,
) -> Result<Session<R::Stream>, SessionError> {
    let (start, peer) = (runtime.now(), target.to_string());
    let late = |_| SessionError::Deadline { peer: peer.clone(), waited: deadline.since(start) };
    let addresses = by(runtime, deadline, target.resolve(runtime)).await.map_err(late)?;
    let addresses = addresses.map_err(|source| SessionError::Resolve { peer: peer.clone(), source })?;
    let mut failed = None;
    for (index, address) in addresses.iter().enumerate() {
        let until = share(runtime.now(), deadline, addresses.len() - index);
        let dialled = by(runtime, until, dial_one(runtime, target, *address, purpose, credentials)).await;
        let outcome = dialled.unwrap_or_else(|elapsed| Err(late(elapsed)));
        let is_final = |refusal: Refusal| refusal.field != Field::Node;
        match outcome {
            Err(error) if !error.refusal().is_some_and(is_final) => failed = Some(error),
            outcome => return outcome,
        }
    }
    let source = io::Error::from(io::ErrorKind::AddrNotAvailable);
    Err(failed.unwrap_or(SessionError::Resolve { peer, source }))
}

async fn dial_one<R: Runtime>(
    runtime: &R,
    target: &Target,
    address: SocketAddr,
    purpose: Purpose,
    credentials: &Credentials,
) -> Result<Session<R::Stream>, SessionError> {
    let peer = target.to_string();
    let connected = runtime.dial(address).await;
    let stream = connected.map_err(|source| SessionError::Connect { peer: peer.clone(), source })?;
    // Small frames must not wait for each other; a system without the option is only slower.
    let _ = rustix::net::sockopt::set_tcp_nodelay(stream.as_fd(), true);
    let mut stream = connect(credentials, stream).await.map_err(|ended| ended.into_error(peer.clone()))?;
    let config = credentials.config(purpose);
    let config = target.node.map_or(config, |node| config.expecting(node));
    let mut machine = Box::new(Machine::dial(config, nonce()));
    let met = shake(&mut stream, &mut machine, |_| Ok(())).await;
    let met = met.and_then(|met| credentials.check(stream.certificate(), &met).map(|()| met).map_err(Ended::refused));
    let peer = met.map_err(|ended| ended.into_error(peer))?;
    Ok(Session { stream, peer, address, permit: Permit::default() })
}

/// How many connections an acceptor carries.
///
/// ```
/// use millpond_node::session::Limits;
/// assert!(Limits::default().hellos_max < Limits::default().sessions_max);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Sessions and lanes at once; further ones are refused for [`Field::Capacity`].
    pub sessions_max: usize,
    /// Hellos at once; one more pushes out the oldest.
    pub hellos_max: usize,
    /// How long a hello may take.
    pub hello_span_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { sessions_max: 4096, hellos_max: 256, hello_span_max: Duration::from_secs(5) }
    }
}

/// A further condition on peers, asked after all others are met.
pub type Admit = dyn Fn(&Peer) -> Result<(), Refusal> + Send + Sync;

#[derive(Debug, Default)]
struct Table {
    sessions: usize,
    is_draining: bool,
    hellos: VecDeque<(u64, Stop)>,
    hellos_started: u64,
    known: HashMap<[u8; 16], u64>,
    known_order: VecDeque<[u8; 16]>,
}

/// The accepting side of a node's port. Clones are handles of the same one.
///
/// ```
/// use millpond_core::wire::hello::{HostIdentity, Identity};
/// use millpond_node::session::{Acceptor, Credentials, Limits};
/// let me = Identity { node: [1; 16], incarnation: 7, host: HostIdentity::UNKNOWN };
/// let acceptor = Acceptor::new(Credentials::new(me), Limits::default());
/// assert_eq!(acceptor.sessions(), 0);
/// ```
#[derive(Clone)]
pub struct Acceptor {
    credentials: Credentials,
    limits: Limits,
    admit: Arc<Admit>,
    table: Arc<Mutex<Table>>,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").field("limits", &self.limits).field("table", &self.table).finish_non_exhaustive()
    }
}

impl Acceptor {
    /// Lets in whoever `credentials` allow.
    #[must_use]
    pub fn new(credentials: Credentials, limits: Limits) -> Self {
        Self { credentials, limits, admit: Arc::new(|_| Ok(())), table: Arc::default() }
    }

    /// The same, if `admit` agrees too (for example that a lane's generation is the newest).
    #[must_use]
    pub fn with_admission(mut self, admit: impl Fn(&Peer) -> Result<(), Refusal> + Send + Sync + 'static) -> Self {
        self.admit = Arc::new(admit);
        self
    }

    /// Sessions and lanes that are open now.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.table.lock().sessions
    }

    /// From now on, refuses whoever comes, for [`Field::Draining`].
    pub fn drain(&self) {
        self.table.lock().is_draining = true;
    }

    /// Accepts on `listener` until `stop`, and hands each session to `on_session`, which must not block.
    ///
    /// # Errors
    /// The listener is broken. Failures of single connections are logged and forgotten.
    pub async fn run<R: Runtime>(
        &self,
        runtime: &R,
        listener: &R::Listener,
        stop: &Stop,
        on_session: impl Fn(Session<R::Stream>) + Send + Sync + 'static,
    ) -> io::Result<()> {
        let on_session = Arc::new(on_session);
        loop {
            let Ok(accepted) = stop.or_stopped(runtime.accept(listener)).await else { return Ok(()) };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) if is_passing(&error) => {
                    tracing::warn!(%error, "cannot accept a connection; trying again");
                    // Out of descriptors or memory: give those who hold some time to close.
                    if stop.or_stopped(runtime.sleep(Duration::from_millis(50))).await.is_err() {
                        return Ok(());
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (acceptor, owner, on_session) = (self.clone(), runtime.clone(), on_session.clone());
            let (place, pushed_out) = self.begin(stop);
            runtime.spawn(async move {
                let met = pushed_out.or_stopped(acceptor.accept(&owner, stream, address)).await;
                acceptor.finish(place);
                match met {
                    Ok(Ok(session)) => on_session(session),
                    Ok(Err(error)) => tracing::debug!(%error, "connection turned away"),
                    Err(_) => tracing::debug!(peer = %address, "hello given up for newer connections, or to stop"),
                }
            });
        }
    }

    /// The hello with one connection, within the limits.
    ///
    /// # Errors
    /// No session: the peer was refused, or did not play its part in time.
    pub async fn accept<R: Runtime>(
        &self,
        runtime: &R,
        stream: R::Stream,
        address: SocketAddr,
    ) -> Result<Session<R::Stream>, SessionError> {
        let _ = rustix::net::sockopt::set_tcp_nodelay(stream.as_fd(), true);
        let mut permit = Permit::default();
        let decide = |peer: &Peer| self.decide(peer).map(|granted| permit = granted);
        let met = within(runtime, self.limits.hello_span_max, greet(stream, &self.credentials, decide)).await;
        match met {
            Ok(Ok((stream, peer))) => Ok(Session { stream, peer, address, permit }),
            Ok(Err((ended, mut stream))) => {
                drop(permit);
                linger(runtime, &mut stream).await;
                Err(ended.into_error(address.to_string()))
            }
            Err(_) => Err(SessionError::Deadline { peer: address.to_string(), waited: self.limits.hello_span_max }),
        }
    }

    fn decide(&self, peer: &Peer) -> Result<Permit, Refusal> {
        let mut table = self.table.lock();
        if table.is_draining {
            return Err(Refusal::of(Field::Draining));
        }
        if table.sessions >= self.limits.sessions_max {
            return Err(Refusal::of(Field::Capacity));
        }
        table.meet(&peer.hello.identity)?;
        table.sessions += 1;
        drop(table);
        let permit = Permit(Some(self.table.clone()));
        (self.admit)(peer).map(|()| permit)
    }

    /// A place for one more hello, and the token that ends it early.
    fn begin(&self, stop: &Stop) -> (u64, Stop) {
        let mut table = self.table.lock();
        table.hellos_started += 1;
        let (place, pushed_out) = (table.hellos_started, stop.child());
        table.hellos.push_back((place, pushed_out.clone()));
        if table.hellos.len() > self.limits.hellos_max
            && let Some((_, oldest)) = table.hellos.pop_front()
        {
            oldest.stop();
        }
        (place, pushed_out)
    }

    fn finish(&self, place: u64) {
        let mut table = self.table.lock();
        if let Ok(index) = table.hellos.binary_search_by_key(&place, |(place, _)| *place) {
            table.hellos.remove(index);
        }
    }
}

impl Table {
    /// A node that was restarted has a larger incarnation; what comes from before its restart is refused.
    fn meet(&mut self, identity: &Identity) -> Result<(), Refusal> {
        match self.known.get_mut(&identity.node) {
            Some(known) if *known > identity.incarnation => {
                let (refuser, refused) = (*known, identity.incarnation);
                return Err(Refusal { field: Field::Incarnation, refuser, refused });
            }
            Some(known) => *known = identity.incarnation,
            None => {
                if self.known.len() >= KNOWN_MAX
                    && let Some(oldest) = self.known_order.pop_front()
                {
                    self.known.remove(&oldest);
                }
                self.known.insert(identity.node, identity.incarnation);
                self.known_order.push_back(identity.node);
            }
        }
        Ok(())
    }
}

/// How a hello ended without a session.
enum Ended {
    Failed(Failure),
    Broken(io::Error),
}

impl Ended {
    fn refused(refusal: Refusal) -> Self {
        Self::Failed(Failure::RefusedByUs(refusal))
    }

    fn into_error(self, peer: String) -> SessionError {
        match self {
            Self::Failed(failure) => SessionError::Hello { peer, failure },
            Self::Broken(source) => match tls::fault(&source) {
                Some(why) => SessionError::Tls { peer, why },
                None => SessionError::Broken { peer, source },
            },
        }
    }
}

/// The dialing end of a hello over any stream, with `node` and no other. The stream goes on without TLS: the kernel of one
/// host says who is at its ends.
///
/// # Errors
/// No session; what the hello came to.
pub(crate) async fn shake_as_dialer<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    credentials: &Credentials,
    purpose: Purpose,
    node: [u8; 16],
) -> Result<(S, Peer), SessionError> {
    let failed = |ended: Ended| ended.into_error(LOCAL.to_owned());
    let mut stream = connect(credentials, stream).await.map_err(failed)?;
    let mut machine = Box::new(Machine::dial(credentials.config(purpose).expecting(node), nonce()));
    let peer = shake(&mut stream, &mut machine, |_| Ok(())).await.map_err(failed)?;
    credentials.check(stream.certificate(), &peer).map_err(|refusal| failed(Ended::refused(refusal)))?;
    Ok((stream.into_socket(), peer))
}

/// The accepting end of a hello over any stream, which goes on without TLS.
///
/// # Errors
/// No session; what the hello came to.
pub(crate) async fn shake_as_acceptor<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    credentials: &Credentials,
    decide: impl FnMut(&Peer) -> Result<(), Refusal>,
) -> Result<(S, Peer), SessionError> {
    let met = greet(stream, credentials, decide).await;
    met.map(|(stream, peer)| (stream.into_socket(), peer)).map_err(|(ended, _)| ended.into_error(LOCAL.to_owned()))
}

/// The peer's name in errors where it has no address.
const LOCAL: &str = "a process of this host";

/// TLS, if it is configured, from the dialing end.
async fn connect<S: AsyncRead + AsyncWrite + Unpin>(credentials: &Credentials, stream: S) -> Result<Channel<S>, Ended> {
    match &credentials.tls {
        Some(tls) => tls.connect(stream).await.map_err(Ended::Broken),
        None => Ok(Channel::plain(stream)),
    }
}

/// TLS, if it is configured, and the hello from the accepting end. Whoever is refused is given back, to hear the last words.
async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    credentials: &Credentials,
    mut decide: impl FnMut(&Peer) -> Result<(), Refusal>,
) -> Result<(Channel<S>, Peer), (Ended, Channel<S>)> {
    let mut config = credentials.config(Purpose::Control);
    let (mut stream, first) = match &credentials.tls {
        None => (Channel::plain(stream), Vec::new()),
        Some(tls) => match tls.accept(stream).await {
            Ok(stream) => (stream, Vec::new()),
            Err(Rejected::Plain(stream, first)) => {
                config = config.refusing(Refusal::of(Field::Tls));
                (Channel::plain(stream), first)
            }
            Err(Rejected::Failed(stream, error)) => return Err((Ended::Broken(error), Channel::plain(stream))),
        },
    };
    let mut machine = Box::new(Machine::accept(config, nonce()));
    machine.on_bytes(&first);
    let certificate = stream.certificate().cloned();
    let decide = |peer: &Peer| credentials.check(certificate.as_ref(), peer).and_then(|()| decide(peer));
    match shake(&mut stream, &mut machine, decide).await {
        Ok(peer) => Ok((stream, peer)),
        Err(ended) => Err((ended, stream)),
    }
}

/// Drives one end of a hello to its end.
async fn shake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    machine: &mut Machine,
    mut decide: impl FnMut(&Peer) -> Result<(), Refusal>,
) -> Result<Peer, Ended> {
    let mut bytes = [0; HELLO_LEN_MAX];
    // Bounded: each turn sends, reads at least a byte of a bounded hello, or ends it.
    loop {
        let output_len = copy_into(machine.poll_output(), &mut bytes);
        if output_len > 0 {
            stream.write_all(&bytes[..output_len]).await.map_err(Ended::Broken)?;
            stream.flush().await.map_err(Ended::Broken)?;
        }
        match machine.state() {
            State::Established(peer) => return Ok(peer),
            State::Failed(failure) => return Err(Ended::Failed(failure)),
            State::Deciding(peer) => match decide(&peer) {
                Ok(()) => machine.admit(),
                Err(refusal) => machine.refuse(refusal),
            },
            State::Shaking => {
                let wanted_len = machine.wants();
                match stream.read(&mut bytes[..wanted_len]).await.map_err(Ended::Broken)? {
                    0 => machine.on_end(),
                    len => {
                        machine.on_bytes(&bytes[..len]);
                    }
                }
            }
        }
    }
}

fn copy_into(from: &[u8], to: &mut [u8; HELLO_LEN_MAX]) -> usize {
    to[..from.len()].copy_from_slice(from);
    from.len()
}

/// Ends a connection so that what was said last arrives: closing with unread bytes would reset it away.
fn linger<'a, R: Runtime>(runtime: &'a R, stream: &'a mut Channel<R::Stream>) -> impl Future<Output = ()> + Send + 'a {
    let drain = async {
        stream.close().await?;
        let (mut bytes, mut left) = ([0; 1024], LINGER_LEN_MAX);
        while left > 0 {
            match stream.read(&mut bytes).await? {
                0 => break,
                len => left = left.saturating_sub(len),
            }
        }
        io::Result::Ok(())
    };
    // Whatever goes wrong here, the connection is closed next.
    within(runtime, LINGER, drain).map(|_| ())
}

fn is_passing(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let passing =
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::CONNABORTED, Errno::INTR, Errno::PERM];
    passing.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

fn nonce() -> [u8; 32] {
    let mut nonce = [0; 32];
    // Without randomness nobody could be authenticated; Linux >= 5.10 always has it.
    getrandom::fill(&mut nonce).expect("the system has no random numbers");
    nonce
}
