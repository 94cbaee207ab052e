//! One node: its identity, its port, its sessions and services, and how it ends.
//!
//! A role (store, prefill, decode, router) builds a `rpc::Router` and gives it to [`Node::open`]; control sessions are
//! answered with it, data lanes go to the engine. This module knows no role.
//!
//! A node ends in this order, within [`Options::drain_span_max`] in all: it takes no new sessions (peers hear "draining"
//! and look elsewhere) · the roles' own steps, in the order they were registered, the last one first · the sessions say
//! goodbye, refuse new calls, finish those in flight and close · the listener closes. What is left then is given up.

use std::fs::OpenOptions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::channel::mpsc;
use futures::future::{BoxFuture, Future, FutureExt};
use futures::stream::StreamExt;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{HostIdentity, Identity, KvLayout, Purpose, Refusal};
use millpond_core::wire::session::{Key, Peer as Met};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::engine::Engine;
use crate::metrics::Registry;
use crate::rpc;
use crate::runtime::{Runtime, Stop, Task, by, local_addr, start};
use crate::session::{self, Acceptor, Credentials, Lane, Session, Target};
use crate::tls::Tls;

/// File in a node's data directory that holds its last incarnation.
const INCARNATION_FILE: &str = "incarnation";
/// File in a node's data directory that its process holds locked.
const LOCK_FILE: &str = "lock";

/// The sessions' part of a drain, at least: their calls are told to end even if the roles used the time up.
const SESSIONS_SPAN_MIN: Duration = Duration::from_millis(500);

/// Who a node is, that is called `name`: the same id at each start, a larger incarnation, and where it runs.
///
/// With a `data` directory the last incarnation is kept there, so that it grows even if the clock was set back.
///
/// # Errors
/// The directory cannot be written.
pub fn identity(name: &str, data: Option<&Path>) -> Result<Identity, NodeError> {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let mut incarnation = u64::try_from(clock.as_nanos()).unwrap_or(u64::MAX).max(1);
    if let Some(data) = data {
        let failed = |source| NodeError::Data { path: data.to_path_buf(), source };
        std::fs::create_dir_all(data).map_err(failed)?;
        let file = data.join(INCARNATION_FILE);
        let last = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
        incarnation = incarnation.max(last.saturating_add(1));
        let fresh = data.join(format!("{INCARNATION_FILE}.new"));
        std::fs::write(&fresh, format!("{incarnation}\n")).map_err(failed)?;
        std::fs::rename(&fresh, &file).map_err(failed)?;
    }
    Ok(Identity { node: Identity::id_of(name), incarnation, host: host() })
}

/// Makes the data directory if it is not there, and keeps other processes out of it until the lock is dropped.
///
/// # Errors
/// It cannot be written, or another process has it.
pub fn claim(data: &Path) -> Result<OwnedFd, NodeError> {
    let failed = |source| NodeError::Data { path: data.to_path_buf(), source };
    std::fs::create_dir_all(data).map_err(failed)?;
    let file =
        OpenOptions::new().create(true).truncate(false).write(true).open(data.join(LOCK_FILE)).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file.into()),
        Err(Errno::WOULDBLOCK) => Err(NodeError::InUse { path: data.to_path_buf() }),
        Err(error) => Err(failed(error.into())),
    }
}

/// Which host this process runs on, as far as sharing memory is concerned; [`HostIdentity::UNKNOWN`] if it cannot be told.
#[must_use]
pub fn host() -> HostIdentity {
    let boot = || {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
    };
    let namespace = |kind: &str| {
        let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).ok()?;
        let text = link.to_str()?;
        text.rsplit_once('[')?.1.strip_suffix(']')?.parse::<u64>().ok()
    };
    let all =
        || Some(HostIdentity { boot: boot()?, namespaces: [namespace("net")?, namespace("pid")?, namespace("mnt")?] });
    all().unwrap_or(HostIdentity::UNKNOWN)
}

/// Why a node cannot start.
///
/// ```
/// use millpond_node::node::NodeError;
/// let source = std::io::Error::from(std::io::ErrorKind::AddrInUse);
/// let error = NodeError::Listen { address: "127.0.0.1:7001".parse().unwrap(), source };
/// assert!(error.to_string().contains("127.0.0.1:7001") && error.to_string().contains("node.listen"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// Its port cannot be had.
    #[error("cannot listen on {address}: {source}; stop what uses it, or set `node.listen` to another address")]
    Listen {
        /// Where it was to listen.
        address: SocketAddr,
        /// The system's answer.
        source: io::Error,
    },
    /// Another process uses its data directory.
    #[error("{path} is in use by another process; end it, or set `node.data` to a directory of its own", path = path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// Its data directory cannot be used.
    #[error("cannot use {path}: {source}; set `node.data` to a directory that can be written", path = path.display())]
    Data {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// What a node is told at its start.
///
/// ```
/// use millpond_core::wire::hello::{HostIdentity, Identity};
/// use millpond_node::node::Options;
/// let me = Identity { node: Identity::id_of("store-0"), incarnation: 1, host: HostIdentity::UNKNOWN };
/// let options = Options::new(me);
/// assert!(options.listen.ip().is_loopback() && options.key.is_none());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Who it is; see [`identity`].
    pub identity: Identity,
    /// The key that all nodes of the cluster share. Default: none, and whoever reaches the port is let in.
    pub key: Option<Key>,
    /// The certificates of this node. Default: none, and sessions are not encrypted.
    pub tls: Option<Tls>,
    /// The KV layout, if it is to be compared with that of peers.
    pub layout: Option<KvLayout>,
    /// Its port. Default: a free one on loopback.
    pub listen: SocketAddr,
    /// How many connections it carries.
    pub sessions: session::Limits,
    /// Bounds of each control session.
    pub calls: rpc::Limits,
    /// How long its end may take. Default: 5 s.
    pub drain_span_max: Duration,
}

impl Options {
    /// The defaults for a node with this identity.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            key: None,
            tls: None,
            layout: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            sessions: session::Limits::default(),
            calls: rpc::Limits::default(),
            drain_span_max: Duration::from_secs(5),
        }
    }
}

type Step = (&'static str, BoxFuture<'static, ()>);

/// What a node that listens has running.
struct Open {
    acceptor: Acceptor,
    /// Ends the accept loop.
    listening: Stop,
    accepting: Task<()>,
    /// Ends once all control sessions ended: each holds a sender.
    sessions: mpsc::Receiver<()>,
}

struct Inner<R: Runtime> {
    runtime: R,
    options: Options,
    metrics: Registry,
    /// Told to the sessions at their turn.
    goodbye: Stop,
    /// Told to everybody, at once.
    stop: Stop,
    steps: Mutex<Vec<Step>>,
    bound: Mutex<Option<R::Listener>>,
    open: Mutex<Option<Open>>,
}

/// How a node ended.
///
/// ```
/// use millpond_core::time::Duration;
/// let drained = millpond_node::node::Drained { span: Duration::from_secs(1), unfinished: vec!["store"] };
/// assert!(!drained.unfinished.is_empty());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drained {
    /// How long it took.
    pub span: Duration,
    /// The steps that were not done in time and were dropped.
    pub unfinished: Vec<&'static str>,
}

/// One node of a cluster. Clones are handles of the same one.
///
/// Example: `verify/tests/runtimes/node.rs`.
pub struct Node<R: Runtime> {
    inner: Arc<Inner<R>>,
}

impl<R: Runtime> Clone for Node<R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<R: Runtime> std::fmt::Debug for Node<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

impl<R: Runtime> Node<R> {
    /// A node that does not listen yet; it can call others already.
    #[must_use]
    pub fn new(runtime: R, options: Options) -> Self {
        let inner = Inner {
            runtime,
            options,
            metrics: Registry::new(),
            goodbye: Stop::new(),
            stop: Stop::new(),
            steps: Mutex::default(),
            bound: Mutex::default(),
            open: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Takes the port, without serving it yet, and says where it is: for services that have to know.
    ///
    /// # Errors
    /// The port cannot be had.
    pub async fn bind(&self) -> Result<SocketAddr, NodeError> {
        let failed = |source| NodeError::Listen { address: self.inner.options.listen, source };
        let listener = self.inner.runtime.listen(self.inner.options.listen).await.map_err(failed)?;
        let address = local_addr(&listener).map_err(failed)?;
        *self.inner.bound.lock() = Some(listener);
        Ok(address)
    }

    /// Listens: control sessions are answered with `services`, data lanes are given to `on_lane`. Says where.
    ///
    /// # Errors
    /// The port cannot be had; nothing runs then.
    ///
    /// # Panics
    /// The node listens already: a bug of the caller.
    pub async fn open(
        &self,
        services: rpc::Router,
        on_lane: impl Fn(Lane) + Send + Sync + 'static,
    ) -> Result<SocketAddr, NodeError> {
        self.open_admitting(services, |_| Ok(()), on_lane, drop).await
    }

    /// Listens like [`Node::open`]; lanes are admitted and adopted by `engine`, which is this node's.
    ///
    /// # Errors
    /// The port cannot be had; nothing runs then.
    ///
    /// # Panics
    /// The node listens already: a bug of the caller.
    pub async fn open_with(&self, services: rpc::Router, engine: &Engine<R>) -> Result<SocketAddr, NodeError> {
        let (admitting, adopting, joining) = (engine.clone(), engine.clone(), engine.clone());
        let on_lane = move |lane: Lane| {
            let peer = lane.address;
            if let Err(error) = adopting.adopt(lane) {
                tracing::info!(%peer, %error, "a lane was turned away");
            }
        };
        let on_rail = move |session| joining.join_rail(session);
        self.open_admitting(services, move |met| admitting.admit(met), on_lane, on_rail).await
    }

    async fn open_admitting(
        &self,
        services: rpc::Router,
        admit: impl Fn(&Met) -> Result<(), Refusal> + Send + Sync + 'static,
        on_lane: impl Fn(Lane) + Send + Sync + 'static,
        on_rail: impl Fn(Session<R::Stream>) + Send + Sync + 'static,
    ) -> Result<SocketAddr, NodeError> {
        let Inner { runtime, options, metrics, goodbye, .. } = &*self.inner;
        let failed = |source| NodeError::Listen { address: options.listen, source };
        let bound = self.inner.bound.lock().take();
        let listener = match bound {
            Some(listener) => listener,
            None => runtime.listen(options.listen).await.map_err(failed)?,
        };
        let address = local_addr(&listener).map_err(failed)?;
        let acceptor = Acceptor::new(self.credentials(), options.sessions).with_admission(admit);
        let (sender, sessions) = mpsc::channel(0);
        let services = Arc::new(services.with_metrics(metrics));
        let begin = self.begin(services, goodbye.clone(), sender, on_lane, on_rail);
        let listening = Stop::new();
        let (owner, door, halt) = (runtime.clone(), acceptor.clone(), listening.clone());
        let accepting = start(runtime, async move {
            if let Err(error) = door.run(&owner, &listener, &halt, begin).await {
                tracing::error!(%error, "the node port is broken; no new sessions");
            }
        });
        let before = self.inner.open.lock().replace(Open { acceptor, listening, accepting, sessions });
        assert!(before.is_none(), "the node listens already");
        Ok(address)
    }

    /// What becomes of a session that was let in.
    fn begin(
        &self,
        services: Arc<rpc::Router>,
        goodbye: Stop,
        sender: mpsc::Sender<()>,
        on_lane: impl Fn(Lane) + Send + Sync + 'static,
        on_rail: impl Fn(Session<R::Stream>) + Send + Sync + 'static,
    ) -> impl Fn(Session<R::Stream>) + Send + Sync + 'static {
        let (runtime, mut limits) = (self.inner.runtime.clone(), self.inner.options.calls);
        limits.drain_span_max = limits.drain_span_max.min(self.inner.options.drain_span_max);
        let kind = |kind| {
            let help = "Sessions that were let in, by kind.";
            self.inner.metrics.counter("millpond_sessions_total", help, &[("kind", kind)])
        };
        let (controls, lanes) = (kind("control"), kind("lane"));
        let now = self.inner.metrics.gauge("millpond_control_sessions", "Control sessions that are open.", &[]);
        move |session| {
            if matches!(session.peer.hello.purpose, Purpose::Fence { .. }) {
                return; // all was done when it was admitted
            }
            if matches!(session.peer.hello.purpose, Purpose::Rail { .. }) {
                return on_rail(session);
            }
            if matches!(session.peer.hello.purpose, Purpose::Lane { .. }) {
                lanes.add(1);
                let address = session.address;
                match session.into_lane() {
                    Ok(lane) => on_lane(lane),
                    Err(error) => tracing::warn!(peer = %address, %error, "a lane could not be handed over"),
                }
                return;
            }
            controls.add(1);
            let (owner, services, goodbye) = (runtime.clone(), services.clone(), goodbye.clone());
            let held = (now.hold(), sender.clone(), session.permit);
            runtime.spawn(async move {
                let served = rpc::serve(&owner, session.stream, session.peer, services, limits, &goodbye).await;
                if let Err(error) = served {
                    tracing::warn!(peer = %session.address, %error, "a control session was closed");
                }
                drop(held);
            });
        }
    }

    /// Adds a step to the node's end. Steps are run one after the other, the last one added first: what stands on others
    /// ends before them.
    pub fn at_end(&self, name: &'static str, step: impl Future<Output = ()> + Send + 'static) {
        self.inner.steps.lock().push((name, step.boxed()));
    }

    /// Ends the node in the order that the module describes, within its time. A second call finds nothing to do.
    pub async fn drain(&self) -> Drained {
        let Inner { runtime, options, goodbye, stop, .. } = &*self.inner;
        let begun = runtime.now();
        let deadline = begun + options.drain_span_max;
        stop.stop();
        let open = self.inner.open.lock().take();
        if let Some(open) = &open {
            open.acceptor.drain();
        }
        let mut unfinished = Vec::new();
        let steps = std::mem::take(&mut *self.inner.steps.lock());
        for (name, step) in steps.into_iter().rev() {
            if by(runtime, deadline, step).await.is_err() {
                unfinished.push(name);
            }
        }
        goodbye.stop();
        if let Some(open) = open {
            let deadline = deadline.max(runtime.now() + SESSIONS_SPAN_MIN);
            if self.close(open, deadline).await.is_err() {
                unfinished.push("sessions");
            }
        }
        Drained { span: runtime.now().since(begun), unfinished }
    }

    async fn close(&self, open: Open, deadline: Instant) -> Result<(), crate::runtime::Elapsed> {
        let Open { listening, accepting, sessions, .. } = open;
        listening.stop();
        let all = async {
            // The accept loop holds a sender too, so it has to end first.
            accepting.await;
            sessions.collect::<Vec<()>>().await;
        };
        by(&self.inner.runtime, deadline, all).await
    }

    /// Who it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.inner.options.identity
    }

    /// What it brings to every hello.
    #[must_use]
    pub fn credentials(&self) -> Credentials {
        let mut credentials = Credentials::new(self.inner.options.identity);
        let Options { key, layout, tls, .. } = &self.inner.options;
        (credentials.key, credentials.layout, credentials.tls) = (*key, *layout, tls.clone());
        credentials
    }

    /// A client of the node at `target`.
    #[must_use]
    pub fn client(&self, target: Target) -> rpc::Client<R> {
        let dialer = rpc::Dialer::new(self.inner.runtime.clone(), target, self.credentials());
        rpc::Client::with_connect(self.inner.runtime.clone(), dialer, self.inner.options.calls)
    }

    /// Its metrics; `/metrics` shows them.
    #[must_use]
    pub fn metrics(&self) -> &Registry {
        &self.inner.metrics
    }

    /// Stopped as soon as the node begins to end.
    #[must_use]
    pub fn stopping(&self) -> Stop {
        self.inner.stop.clone()
    }

    /// The runtime it lives on.
    #[must_use]
    pub fn runtime(&self) -> &R {
        &self.inner.runtime
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_keeps_its_id_and_its_incarnation_grows() {
        let data = std::env::temp_dir().join(format!("millpond-node-{}", std::process::id()));
        let first = identity("store-0", Some(&data)).unwrap();
        // As if the clock had been set back by years.
        std::fs::write(data.join(INCARNATION_FILE), format!("{}\n", u64::MAX / 2)).unwrap();
        let second = identity("store-0", Some(&data)).unwrap();
        let third = identity("store-0", Some(&data)).unwrap();
        std::fs::remove_dir_all(&data).unwrap();
        assert_eq!(first.node, second.node);
        assert_ne!(first.node, identity("store-1", None).unwrap().node);
        assert!(first.incarnation < second.incarnation && second.incarnation < third.incarnation);
        assert!(first.host.is_same_host(&host()), "this is Linux with /proc");
    }

    #[test]
    fn a_data_directory_has_one_user_at_a_time() {
        let data = std::env::temp_dir().join(format!("millpond-claim-{}", std::process::id()));
        let first = claim(&data).unwrap();
        let second = claim(&data).unwrap_err();
        assert!(second.to_string().contains("in use"), "{second}");
        drop(first);
        claim(&data).unwrap();
        std::fs::remove_dir_all(&data).unwrap();
    }

    #[test]
    fn a_data_directory_that_cannot_be_written_is_named() {
        let error = identity("store-0", Some(Path::new("/proc/nowhere"))).unwrap_err();
        assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    }
}
