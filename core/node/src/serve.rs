//! One serving node put together from its configuration: engine, store, prefill, decode, router, HTTP, and their end.
//!
//! This is the only place where roles meet. A role is on if the configuration has its section; roles of one process share
//! the node port, the engine and the model. Each has pages of its own: if prefill and decode shared them, requests that hold
//! pages for decode at two such nodes could wait for each other's prompts for ever.
//!
//! The node ends in this order: no new sessions · HTTP takes no new request and lets running ones finish · sessions say
//! goodbye and finish their calls · the engine stops; see [`Node::drain`].

mod counts;
mod named;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millpond_core::sched::cost::Profile;
use millpond_core::time::Duration;
use millpond_core::wire::hello::Identity;
use millpond_core::wire::session::Key;

use crate::client::{self, StoreClient};
use crate::config::{self, Config, FileError, NicChoice};
use crate::decode::{self, Decode, RpcPrefills};
use crate::directory::{self, ShardConfig, StartError};
use crate::engine::{self, AllocateError, Engine, Via};
use crate::files::{FileService, Folder, FolderOptions};
use crate::http::{self, Api, Handler, Pages};
use crate::kv::{Blocks, Pool, PoolError, StoreBlocks, Tenants};
use crate::model::{Card, LoadError, Model, Source};
use crate::node::{self, Drained, Node, NodeError};
use crate::prefill::{self, Prefill};
use crate::router::{self, LineLimits, Router, RouterLimits, Scheduling, StoreLink};
use crate::rpc;
use crate::runtime::{Runtime, Stop, blocking, within};
use crate::session::{SessionError, Target};
use crate::store::{Place, RoleError, StoreConfig, StoreRole};
use crate::tls::{self, Tls, TlsError};
use crate::topology::{Topology, TopologyError};

pub(crate) use counts::DOWNGRADES;
use counts::{Counts, Pools};
use named::Named;

/// Registered memory for blocks on their way to and from the store.
const CLIENT_POOL_LEN: u64 = 16 << 20;
/// The end of a node is bounded by its configuration; running HTTP requests get this much less, for the rest.
const AFTER_HTTP: Duration = Duration::from_millis(500);

/// Of that, what is left for telling those who still wait that they have to go.
const FAREWELL: Duration = Duration::from_millis(200);

/// Why a node cannot serve.
///
/// ```
/// use millpond_node::serve::ServeError;
/// let taken = std::io::ErrorKind::AddrInUse.into();
/// let error = ServeError::Http { address: "127.0.0.1:8080".parse().unwrap(), source: taken };
/// assert!(error.to_string().contains("`node.http`"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Its port or data directory.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The files of `[tls]`.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The engine.
    #[error("the transfer engine cannot start: {0}")]
    Engine(#[from] engine::StartError),
    /// What the configuration says of NICs.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The store role.
    #[error(transparent)]
    Store(#[from] RoleError),
    /// The model.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// Pages of KV.
    #[error("memory for KV (`prefill.memory`, `decode.memory`): {0}")]
    Pool(#[from] PoolError),
    /// Memory for the store's client.
    #[error("no memory for values on their way: {0}")]
    Client(#[from] AllocateError),
    /// The directory's state.
    #[error(transparent)]
    Directory(#[from] StartError),
    /// An address of the configuration.
    #[error("`{key}`: {source}")]
    Address {
        /// Which setting.
        key: &'static str,
        /// What is wrong with it.
        source: SessionError,
    },
    /// A router's configuration: an address, how many nodes there are, its decision log.
    #[error("the router of `[router]` cannot be: {reason}")]
    Routes {
        /// What is wrong with it.
        reason: String,
    },
    /// A file that the configuration names.
    #[error("`{key}`: {source}")]
    Named {
        /// Which setting.
        key: &'static str,
        /// What is wrong with it.
        source: FileError,
    },
    /// The directory of published files.
    #[error("`files.directory` is {}: {source}", path.display())]
    Files {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The HTTP port.
    #[error("cannot listen on {address}: {source}; stop what uses it, or set `node.http` to another address")]
    Http {
        /// Where it was to listen.
        address: SocketAddr,
        /// The system's answer.
        source: std::io::Error,
    },
    /// It can be reached from elsewhere and does not say where.
    #[error(
        "`node.listen` is {listen}, which says no peer where to go; set `node.advertise` to this node's own address"
    )]
    Advertise {
        /// Where it listens.
        listen: SocketAddr,
    },
}

/// A node that serves. Dropping it stops nothing: call [`Serving::drain`].
///
/// `verify/tests/e2e` runs them in processes of their own.
///
/// Example: `core/node/src/cli/serve.rs`.
#[derive(Debug)]
pub struct Serving<R: Runtime> {
    node: Node<R>,
    engine: Engine<R>,
    address: String,
    http: SocketAddr,
    /// Keeps other processes out of its data directory.
    _data: Option<OwnedFd>,
}

impl<R: Runtime> Serving<R> {
    /// Starts the roles of `config`; everything is open when it returns, though a router may still look for its nodes.
    ///
    /// # Errors
    /// [`ServeError`]; what was started is ended again.
    pub async fn start(runtime: &R, config: &Config) -> Result<Self, ServeError> {
        let data = config.node.data.as_deref().map(node::claim).transpose()?;
        let identity = node::identity(&config.node.name, config.node.data.as_deref())?;
        let key = (!config.node.key.is_empty()).then(|| Key::new(config.node.key.as_bytes()));
        let tls = config.tls.as_ref().map(|files| load_tls(files, &config.node.name)).transpose()?;
        let mut options = node::Options::new(identity);
        options.tls = tls.clone();
        (options.key, options.listen, options.drain_span_max) = (key, config.node.listen, config.node.drain);
        let node = Node::new(runtime.clone(), options);
        if config.node.advertise.is_empty() && config.node.listen.ip().is_unspecified() {
            return Err(ServeError::Advertise { listen: config.node.listen });
        }
        let engine = start_engine(&node, config)?;
        if let (Some(tls), Some(files)) = (tls, &config.tls) {
            let (runtime, stopping, span) = (runtime.clone(), node.stopping(), files.reload_interval);
            runtime.clone().spawn(async move {
                let _ = stopping.or_stopped(renew(&runtime, tls, span)).await;
            });
        }
        match open(&node, &engine, config).await {
            Ok((address, http)) => Ok(Self { node, engine, address, http, _data: data }),
            Err(error) => {
                node.drain().await;
                engine.shut_down().await;
                Err(error)
            }
        }
    }

    /// Where peers reach its node port, `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its HTTP port.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Ends it in order, within `node.drain`.
    pub async fn drain(&self) -> Drained {
        let drained = self.node.drain().await;
        self.engine.shut_down().await;
        drained
    }
}

/// Takes the ports and starts the roles; where both ports are.
async fn open<R: Runtime>(
    node: &Node<R>,
    engine: &Engine<R>,
    config: &Config,
) -> Result<(String, SocketAddr), ServeError> {
    let listen = node.bind().await?;
    let address = match config.node.advertise.as_str() {
        "" => listen.to_string(),
        advertised => parse("node.advertise", advertised)?.to_string(),
    };
    let composer = Composer { node: node.clone(), engine: engine.clone(), address: address.clone(), config };
    Ok((address, composer.open().await?))
}

fn load_tls(files: &tls::Files, node: &str) -> Result<Tls, TlsError> {
    let loaded = Tls::load(files)?;
    if files.bind_nodes && !loaded.is_of(&Identity::id_of(node)) {
        return Err(TlsError::Node { path: files.cert_file.clone(), node: node.to_owned() });
    }
    Ok(loaded)
}

/// Has new connections made under the certificates that lie there by then, for ever.
async fn renew<R: Runtime>(runtime: &R, tls: Tls, span: Duration) {
    let mut last_error = String::new();
    loop {
        runtime.sleep(span).await;
        let renewing = tls.clone();
        let error = match blocking(runtime, move || renewing.reload()).await {
            Ok(true) => {
                tracing::info!("new connections use the certificates that were renewed");
                String::new()
            }
            Ok(false) => String::new(),
            Err(error) => error.to_string(),
        };
        // Once for each kind: the files may be replaced one after the other, and stay wrong for long.
        if !error.is_empty() && error != last_error {
            tracing::warn!(%error, "the certificates that lie there now are not used");
        }
        last_error = error;
    }
}

fn parse(key: &'static str, address: &str) -> Result<Target, ServeError> {
    Target::parse(address).map_err(|source| ServeError::Address { key, source })
}

fn start_engine<R: Runtime>(node: &Node<R>, config: &Config) -> Result<Engine<R>, ServeError> {
    let mut options = engine::Options::new(node.identity());
    let credentials = node.credentials();
    (options.key, options.tls) = (credentials.key, credentials.tls);
    (options.checksums, options.lane_idle_span_max) = (config.node.checksums, config.node.lane_idle);
    options.nics = match Topology::read(&config.topology) {
        Ok(topology) => topology.open_nics(),
        Err(error) if config.topology != NicChoice::default() => return Err(error.into()),
        Err(error) => {
            tracing::warn!(%error, "no RDMA device is used");
            Vec::new()
        }
    };
    if via(config) == Some(Via::Tcp) {
        options.transports = vec![Via::Local, Via::Tcp];
    }
    Ok(Engine::start(node.runtime().clone(), options)?)
}

/// The transport that every transfer asks for by name, if one is configured. Peers meet over tcp in any case.
fn via(config: &Config) -> Option<Via> {
    config.node.via.parse().ok().filter(|via| *via != Via::Auto)
}

/// Puts the roles together, in the order in which they stand on each other.
struct Composer<'a, R: Runtime> {
    node: Node<R>,
    engine: Engine<R>,
    address: String,
    config: &'a Config,
}

impl<R: Runtime> Composer<'_, R> {
    async fn open(self) -> Result<SocketAddr, ServeError> {
        let Self { node, engine, config, .. } = &self;
        let mut services = rpc::Router::new();
        let store = self.store()?;
        if let Some(store) = &store {
            services = services.merge(store.router());
        }
        let mut counts = Counts::new(node.metrics(), engine.clone());
        let mut is_joined: Option<Box<dyn Fn() -> bool + Send + Sync>> = None;
        let client = self.client(store.as_ref())?;
        let followed = self.followed(store.as_ref())?;
        if let Some(store) = store {
            let (facts, joined) = (store.store().clone(), store.store().clone());
            counts = counts.with_store(move || facts.facts());
            is_joined = Some(Box::new(move || joined.is_joined()));
            node.runtime().spawn(store.run(self.address.clone(), node.stopping()));
        }
        if config.prefill.is_some() || config.decode.is_some() {
            let (roles, pools) = self.serving_roles(client).await?;
            services = services.merge(roles);
            counts = counts.with_pools(pools);
        }
        if let Some(files) = &config.files {
            services = services.merge(self.files(files).await?);
        }
        let router = self.router(followed)?;
        node.open_with(services, engine).await?;
        let pages = self.pages(counts, is_joined, router.as_ref());
        let handler: Arc<dyn Handler> = match &router {
            Some(router) => Arc::new(Api::new(Arc::new(router.clone()), pages)),
            None => Arc::new(pages),
        };
        self.http(handler, router).await
    }

    fn store(&self) -> Result<Option<StoreRole<R>>, ServeError> {
        let Some(store) = &self.config.store else { return Ok(None) };
        let place = if store.hosts_directory {
            // Without a state file the directory's first term is its clock's; nothing from before can come back to it.
            let state_dir = self.config.node.data.clone();
            Place::Here(ShardConfig { is_first: state_dir.is_none(), state_dir, ..ShardConfig::default() })
        } else {
            Place::At(self.node.client(parse("directory.address", &self.config.directory)?))
        };
        let config = StoreConfig { capacity: store.size, ..StoreConfig::default() };
        let role = StoreRole::start(self.engine.clone(), place, config)?;
        let store = role.store().clone();
        self.node.runtime().spawn_blocking(move || store.populate());
        Ok(Some(role))
    }

    /// The directory of published files; what it is for peers is looked at when they ask.
    async fn files(&self, options: &FolderOptions) -> Result<rpc::Router, ServeError> {
        let path = options.directory.clone();
        let looked = blocking(self.node.runtime(), move || std::fs::read_dir(path).map(drop)).await;
        looked.map_err(|source| ServeError::Files { path: options.directory.clone(), source })?;
        Ok(Folder::new(FileService::new(&self.engine)?, options.clone()).router())
    }

    fn client(&self, store: Option<&StoreRole<R>>) -> Result<Option<StoreClient<R>>, ServeError> {
        let Self { node, engine, config, .. } = self;
        if config.prefill.is_none() && config.decode.is_none() {
            return Ok(None);
        }
        let via = via(config).unwrap_or(Via::Auto);
        let options = client::Options { via, pool_len: CLIENT_POOL_LEN, ..client::Options::default() };
        let client = match store {
            Some(role) => {
                let (link, own) = (role.link().clone(), Some(role.store().clone()));
                StoreClient::new(engine.clone(), link, node.credentials(), own, options)?
            }
            None if config.directory.is_empty() => return Ok(None),
            None => {
                let directory = parse("directory.address", &config.directory)?;
                StoreClient::connect(node, engine.clone(), directory, options)?
            }
        };
        Ok(Some(client))
    }

    /// Prefill and decode, whichever of the two is on, and their pages.
    async fn serving_roles(&self, client: Option<StoreClient<R>>) -> Result<(rpc::Router, Pools), ServeError> {
        let Self { node, engine, config, .. } = self;
        let model = load(node.runtime(), &config.model).await?;
        let blocks = client.map(|client| Arc::new(StoreBlocks::new(client)) as Arc<dyn Blocks>);
        let tenants = Tenants::of_key(&config.node.key);
        let waiting_max = config.prefill.as_ref().map_or(256, |role| to_usize(role.waiting_max));
        let mut pools = Pools::new();
        let mut compute = |role, memory| {
            let pool = Pool::new(engine, model.card().layout, memory)?;
            pools.push((role, pool.clone()));
            let (runtime, options) = (node.runtime().clone(), prefill::Options { waiting_max, ..Default::default() });
            let (model, blocks, tenants) = (Arc::clone(&model), blocks.clone(), tenants.clone());
            Ok::<_, PoolError>(Prefill::new(runtime, model, pool, blocks, tenants, options, node.metrics()))
        };
        let mut services = rpc::Router::new();
        let prefill = config.prefill.as_ref().map(|role| compute("prefill", role.memory)).transpose()?;
        if let Some(prefill) = &prefill {
            services = services.merge(prefill::service::methods(prefill, engine));
        }
        let mut decoding = None;
        if let Some(role) = &config.decode {
            let resuming = compute("decode", role.memory)?;
            let mut options = decode::Options {
                batch_max: to_usize(role.batch_max),
                waiting_max: to_usize(role.waiting_max),
                address: self.address.clone(),
                via: via(config).map_or_else(String::new, |via| via.to_string()),
                ..decode::Options::default()
            };
            options.admission.policy = role.admission;
            let prefills = Arc::new(RpcPrefills::new(node.runtime().clone(), node.credentials()));
            let decode = Decode::start(resuming, engine.clone(), prefills, options, node.metrics());
            services = services.merge(decode::service::methods(&decode));
            decoding = Some(decode);
        }
        let services = services.merge(decode::service::load_method(prefill.as_ref(), decoding.as_ref()));
        Ok((services, pools))
    }

    /// How a router hears what the store has; nothing where there is no store.
    fn followed(&self, store: Option<&StoreRole<R>>) -> Result<Option<StoreLink<R>>, ServeError> {
        let Self { node, config, .. } = self;
        let directory = match store {
            Some(role) => role.link().clone(),
            None if config.directory.is_empty() => return Ok(None),
            None => directory::Link::remote(node.client(parse("directory.address", &config.directory)?)),
        };
        Ok(Some(StoreLink { directory, tenants: Tenants::of_key(&config.node.key) }))
    }

    fn router(&self, store: Option<StoreLink<R>>) -> Result<Option<Router>, ServeError> {
        let Self { node, config, .. } = self;
        let Some(router) = &config.router else { return Ok(None) };
        let card = Named::card(&config.model, Source::parse(&config.model.file).card()?);
        let decodes = match (router.decode.is_empty(), &config.decode) {
            (true, Some(_)) => std::slice::from_ref(&self.address),
            _ => &router.decode[..],
        };
        let limits = RouterLimits {
            line: LineLimits { running_max: to_usize(router.running_max), waiting_max: to_usize(router.waiting_max) },
            deadline: router.deadline,
            ..RouterLimits::default()
        };
        let mut scheduling = Scheduling::default();
        (scheduling.placement.policy, scheduling.admission.policy) = (router.placement, router.admission);
        scheduling.placement.colocate = router.colocate;
        (scheduling.slo, scheduling.decisions) = (router.slo, router.decisions.clone());
        if let Some(path) = &router.tenants {
            let read = config::tenants(path);
            scheduling.keys = read.map_err(|source| ServeError::Named { key: "router.tenants", source })?;
        }
        scheduling.profile = router.profile.as_deref().map(|path| profile(path, &card)).transpose()?;
        // Nodes that were started together have names of their own, and so turns of their own.
        scheduling.first_turn = node.identity().incarnation;
        let routes = Router::connect(node, card, &router.prefill, decodes, store, limits, &scheduling);
        let routes = routes.map_err(|reason| ServeError::Routes { reason })?;
        let (watching, stopping) = (routes.clone(), node.stopping());
        node.runtime().spawn(async move {
            let _ = stopping.or_stopped(watching.watch()).await;
        });
        Ok(Some(routes))
    }

    fn pages(
        &self,
        counts: Counts<R>,
        is_joined: Option<Box<dyn Fn() -> bool + Send + Sync>>,
        router: Option<&Router>,
    ) -> Pages {
        let (stopping, ready) = (self.node.stopping(), router.cloned());
        let is_ready = move || {
            if stopping.is_stopped() {
                return Err("the node is draining".to_owned());
            }
            if is_joined.as_ref().is_some_and(|is_joined| !is_joined()) {
                return Err("the store has not joined its directory yet".to_owned());
            }
            ready.as_ref().map_or(Ok(()), Router::ready)
        };
        let (roles, address, view) = (self.config.roles(), self.address.clone(), router.cloned());
        let name = self.config.node.name.clone();
        let explain = move || {
            let view = view.as_ref().map(router::Router::view);
            serde_json::json!({"name": name, "roles": roles, "address": address, "router": view})
        };
        let role = match self.config.roles()[..] {
            [role] => role,
            _ => "several",
        };
        Pages::new(role).with_metrics(move || counts.text()).with_ready(is_ready).with_explain(explain)
    }

    async fn http(&self, handler: Arc<dyn Handler>, router: Option<Router>) -> Result<SocketAddr, ServeError> {
        let drain_max = (self.config.node.drain - AFTER_HTTP).max(Duration::from_millis(100));
        let limits = http::Limits { drain_max, ..http::Limits::default() };
        let (stop, wanted) = (Stop::new(), self.config.node.http);
        let listening = http::start(self.node.runtime(), wanted, handler, limits, &stop).await;
        let (address, mut serving) = listening.map_err(|source| ServeError::Http { address: wanted, source })?;
        // Of a short drain, half is for those who still wait.
        let patience = (drain_max - FAREWELL).max(Duration::from_nanos(drain_max.as_nanos() / 2));
        let runtime = self.node.runtime().clone();
        self.node.at_end("http", async move {
            stop.stop();
            let Err(_) = within(&runtime, patience, &mut serving).await else {
                router.iter().for_each(Router::end_log);
                return;
            };
            let count = router.as_ref().map_or(0, Router::abandon);
            if count > 0 {
                tracing::warn!(count, "requests were ended by the end of the node");
            }
            let _ = within(&runtime, FAREWELL, &mut serving).await;
            router.iter().for_each(Router::end_log);
        });
        Ok(address)
    }
}

/// What nodes that serve the model of `card` cost, as a file has it.
fn profile(path: &Path, card: &Card) -> Result<Profile, ServeError> {
    let base = Scheduling::first_profile(&card.layout);
    let read = config::profile(path, base).map_err(|source| ServeError::Named { key: "router.profile", source })?;
    if (read.block_tokens, read.kv_bytes_per_token) != (base.block_tokens, base.kv_bytes_per_token) {
        let reason = format!(
            "the profile {} has {} tokens a block and {} bytes a token, the model has {} and {}; leave both out",
            path.display(),
            read.block_tokens,
            read.kv_bytes_per_token,
            base.block_tokens,
            base.kv_bytes_per_token
        );
        return Err(ServeError::Routes { reason });
    }
    Ok(read)
}

async fn load<R: Runtime>(runtime: &R, section: &config::Model) -> Result<Arc<dyn Model>, ServeError> {
    let (source, threads) = (Source::parse(&section.file), section.threads);
    let threads = if threads == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { threads };
    let model = blocking(runtime, move || source.load(threads)).await?;
    Ok(Named::model(section, model))
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
