//! `up`: a cluster on this machine, each node a process of this very binary.
//!
//! Nodes are started in the order in which they need each other, so that each is told real addresses; one that dies is
//! started again at the address it had. This process computes nothing: it starts, watches, and ends. Killed itself, its
//! nodes see that and end too.

mod child;
mod plan;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};
use millpond_core::sched::{admission, placement};
use millpond_core::time::Duration;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde_json::{Value, json};

use super::cluster::{self, Cluster};
use super::failure::Failure;
use super::store_cmds::{Exit, Output};
use crate::config::parse_size;
use crate::http::{Method, fetch};
use crate::model::{Card, Source};
use crate::runtime::{Runtime, Stop, within};

use child::{Child, Told};
use plan::{Plan, STAGES};

/// How long the router may take to reach its nodes once all serve.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// How long a node may take to start; it may have to read a model.
const START_WITHIN: Duration = Duration::from_secs(120);
/// How long the nodes of one stage may take to end once they were told to.
const END_WITHIN: Duration = Duration::from_secs(8);

/// Arguments of `up`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Args {
    /// `toy`, or the path of a GGUF file. Default: SmolLM2 if it was fetched, else toy.
    #[arg(long, value_name = "toy|FILE")]
    model: Option<String>,
    /// Where the cluster keeps what outlives it: its key and the directory's state.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Where requests go.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8000")]
    http: SocketAddr,
    /// Prefill nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    prefill: u16,
    /// Decode nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    decode: u16,
    /// Store nodes.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    store: u16,
    /// Memory that each store node lends.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = size)]
    store_size: String,
    /// Decode nodes compute prompts themselves; no prefill nodes.
    #[arg(long, conflicts_with = "prefill")]
    colocated: bool,
    /// Keep no KV beyond a request.
    #[arg(long, conflicts_with_all = ["store", "store_size"])]
    no_store: bool,
    /// Which prefill node serves a request: random, round_robin, least_loaded, local_prefix, mooncake_fast25, mooncake_arxiv,
    /// millpond.
    #[arg(long, value_name = "POLICY", default_value = "millpond")]
    placement: placement::Policy,
    /// Whether it is served: none, late, early, early_uniform, millpond.
    #[arg(long, value_name = "POLICY", default_value = "millpond")]
    admission: admission::Policy,
    /// Write everything that is decided, and what it rests on, to this file.
    #[arg(long, value_name = "FILE")]
    decisions: Option<PathBuf>,
    /// The transport between nodes: auto, tcp, shm.
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = ["auto", "tcp", "shm"])]
    via: String,
}

/// Sizes stay text: they go into configurations.
fn size(text: &str) -> Result<String, String> {
    parse_size(text).map(|_| text.to_owned())
}

/// Starts the cluster, says where to send requests, and looks after it until `ended`.
pub(super) async fn run<R: Runtime>(
    runtime: &R,
    args: Args,
    ended: &Stop,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let source = args.model.as_deref().map_or_else(Source::preferred, Source::parse);
    let card = source.card().map_err(|error| Failure::Said(error.to_string()))?;
    if let Ok(there) = Cluster::find() {
        return Err(Failure::Said(format!(
            "a cluster runs here already (process {}, requests go to http://{}/v1); end it, or set {} to another file \
             to run a second one beside it",
            there.pid,
            there.http,
            cluster::VARIABLE
        )));
    }
    // Told now and by its option's name; the router takes the port a moment later.
    TcpListener::bind(args.http).map_err(|error| {
        Failure::Said(format!("cannot listen on {}: {error}; choose another port with --http", args.http))
    })?;
    let dir = Folder::new()?;
    let plan = Plan::new(&args, &source, key(args.data.as_deref())?);
    let mut crew = Crew { runtime: runtime.clone(), plan, dir: dir.0.clone(), members: Vec::new() };
    let ending = match ended.or_stopped(crew.start()).await {
        Ok(Ok(())) => {
            let cluster = crew.cluster();
            let greeting = async {
                cluster.write()?;
                let is_stopgap = args.model.is_none() && source == Source::Toy;
                greet(runtime, cluster.http, is_stopgap, &card, output).await
            };
            let ending = match ended.or_stopped(greeting).await {
                Ok(Ok(())) => {
                    crew.watch(ended).await;
                    Ok(())
                }
                Ok(Err(failure)) => Err(failure),
                Err(_) => Ok(()),
            };
            cluster.remove();
            ending
        }
        Ok(Err(failure)) => Err(failure),
        Err(_) => Ok(()),
    };
    crew.end().await;
    ending.map(|()| Exit::Done)
}

/// Waits until the router has its nodes, and tells the user.
async fn greet<R: Runtime>(
    runtime: &R,
    http: SocketAddr,
    is_stopgap: bool,
    card: &Card,
    output: &mut Output<'_>,
) -> Result<(), Failure> {
    let ready = async {
        loop {
            let deadline = runtime.now() + READY_WITHIN;
            let answer = fetch(runtime, http, Method::Get, "/ready", Vec::new(), deadline).await;
            if matches!(answer, Ok((200, _))) {
                return;
            }
            runtime.sleep(Duration::from_millis(20)).await;
        }
    };
    let late =
        |_| Failure::Said(format!("the router does not reach its nodes within {READY_WITHIN}; see the log above"));
    within(runtime, READY_WITHIN, ready).await.map_err(late)?;
    let model = &card.id;
    let mut text = String::new();
    if is_stopgap {
        text.push_str(&format!(
            "The model is `toy`: it is real but untrained, and answers nonsense. For English, fetch SmolLM2 with\n  {}\nand start again.\n\n",
            crate::model::llama::FETCH_SCRIPT
        ));
    }
    text.push_str(&format!(
        "Ready. Send requests for the model `{model}` to http://{http}/v1, such as\n  \
         curl http://{http}/v1/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": \"{model}\", \"prompt\": \"The capital of France is\", \"max_tokens\": 16}}'\n\
         Look at the cluster with `millpond status`, at http://{http}/metrics, or at a request with `millpond explain ID`.\n\
         Ctrl-C ends it."
    ));
    output.line(&text, json!({"ready": {"http": http, "url": format!("http://{http}/v1"), "model": model}}))?;
    Ok(())
}

/// A folder for this run's configurations, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Failure> {
        let base = cluster::run_dir();
        cluster::private_dir(&base)?;
        sweep(&base);
        let dir = base.join(format!("up-{}", std::process::id()));
        cluster::private_dir(&dir)?;
        Ok(Self(dir))
    }
}

/// Removes what runs that were killed left behind.
fn sweep(base: &Path) {
    for entry in std::fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("up-")?.parse().ok()).and_then(Pid::from_raw);
        if pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH)) {
            // Another run may be sweeping, too.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left there is configuration that nobody reads any more.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The key of a cluster: kept with its data, so that blocks have the same names at the next start; else a new one.
fn key(data: Option<&Path>) -> Result<String, Failure> {
    let file = data.map(|data| data.join("key"));
    if let Some(file) = &file {
        match std::fs::read_to_string(file) {
            Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
            Ok(_) => return Err(Failure::Said(format!("{} is empty; it should hold a key", file.display()))),
            // Only a key that never was is made: another one would hide whatever is stored.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::system(file.display().to_string())(error)),
        }
    }
    let mut bytes = [0_u8; 32];
    getrandom::fill(&mut bytes).map_err(|error| Failure::Said(format!("the system gives no random bytes: {error}")))?;
    let key: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    if let (Some(data), Some(file)) = (data, &file) {
        std::fs::create_dir_all(data).map_err(Failure::system(data.display().to_string()))?;
        cluster::private_file(file, &key)?;
    }
    Ok(key)
}

/// A node of the cluster and the process that is it now.
struct Member {
    name: String,
    stage: usize,
    config: PathBuf,
    told: Told,
    child: Arc<Child>,
}

/// All of them.
struct Crew<R> {
    runtime: R,
    plan: Plan,
    dir: PathBuf,
    members: Vec<Member>,
}

impl<R: Runtime> Crew<R> {
    /// Starts every node; each is told the addresses of those before it. Nodes of one stage start together.
    async fn start(&mut self) -> Result<(), Failure> {
        for stage in 0..STAGES {
            let told: Vec<(String, String)> =
                self.members.iter().map(|member| (member.name.clone(), member.told.address.clone())).collect();
            let nodes = self.plan.nodes(stage, &told);
            let mut started = Vec::new();
            for (name, text) in nodes {
                let config = self.dir.join(format!("{name}.toml"));
                cluster::private_file(&config, &text)?;
                let child = Arc::new(Child::start(&name, &config)?);
                // Noted before it is waited for: whatever fails from here on, it is ended.
                let told = Told { address: String::new(), http: SocketAddr::from(([0, 0, 0, 0], 0)) };
                started.push(self.members.len());
                self.members.push(Member { name, stage, config, told, child });
            }
            let waits = started.iter().map(|&place| {
                let member = &self.members[place];
                let (child, name, runtime) = (Arc::clone(&member.child), member.name.clone(), self.runtime.clone());
                async move {
                    let told = within(&runtime, START_WITHIN, child.ready()).await;
                    let told =
                        told.map_err(|_| Failure::Said(format!("{name} did not start within {START_WITHIN}")))?;
                    told.ok_or_else(|| Failure::Said(format!("{name} did not start; its reason is above")))
                }
            });
            let told: Vec<_> = join_all(waits).await;
            for (place, told) in started.into_iter().zip(told) {
                let told = told?;
                self.members[place].pin(told)?;
            }
        }
        Ok(())
    }

    fn cluster(&self) -> Cluster {
        let node = |member: &Member| cluster::Node {
            name: member.name.clone(),
            address: member.told.address.clone(),
            http: member.told.http,
        };
        let nodes: Vec<_> = self.members.iter().map(node).collect();
        // The router is the last one started; it knows the port if it was to choose one.
        let http = nodes.last().map_or(self.plan.http(), |router| router.http);
        let directory = if self.plan.has_store() { nodes[0].address.clone() } else { String::new() };
        let pid = i32::try_from(std::process::id()).unwrap_or(0);
        Cluster { pid, http, directory, key: self.plan.key().to_owned(), nodes }
    }

    /// Starts again whoever dies, until `ended`.
    async fn watch(&mut self, ended: &Stop) {
        let keepers: FuturesUnordered<_> =
            self.members.iter_mut().map(|member| keep(&self.runtime, member, ended)).collect();
        keepers.collect::<()>().await;
    }

    /// Ends all, the last stage first: those who ask before those who are asked.
    async fn end(&mut self) {
        for stage in (0..STAGES).rev() {
            let members = self.members.iter().filter(|member| member.stage == stage);
            let ends = members.map(|member| async {
                member.child.terminate();
                if within(&self.runtime, END_WITHIN, member.child.ended()).await.is_err() {
                    tracing::warn!(node = member.name, "does not end; it is killed");
                    member.child.kill();
                    member.child.ended().await;
                }
            });
            join_all(ends).await;
        }
        self.members.clear();
    }
}

impl Member {
    /// Writes down where it listens, so that it comes back there.
    fn pin(&mut self, told: Told) -> Result<(), Failure> {
        let text = std::fs::read_to_string(&self.config).map_err(Failure::system(self.config.display().to_string()))?;
        let text = plan::pinned(&text, &told);
        cluster::private_file(&self.config, &text)?;
        self.told = told;
        Ok(())
    }
}

/// Keeps one node running: at once after its first death, later and later if it keeps dying.
async fn keep<R: Runtime>(runtime: &R, member: &mut Member, ended: &Stop) {
    const PAUSE_MIN: Duration = Duration::from_millis(50);
    const PAUSE_MAX: Duration = Duration::from_secs(5);
    let (mut pause, mut started) = (PAUSE_MIN, runtime.now());
    loop {
        let Ok(status) = ended.or_stopped(member.child.ended()).await else { return };
        if runtime.now().since(started) > Duration::from_secs(30) {
            pause = PAUSE_MIN;
        }
        tracing::warn!(node = member.name, status, again_in = %pause, "a node ended by itself; it is started again");
        if ended.or_stopped(runtime.sleep(pause)).await.is_err() {
            return;
        }
        pause = pause.saturating_mul(2).min(PAUSE_MAX);
        started = runtime.now();
        match Child::start(&member.name, &member.config) {
            Ok(child) => member.child = Arc::new(child),
            Err(failure) => tracing::error!(node = member.name, %failure, "cannot be started"),
        }
    }
}

/// What a node says when it is ready.
fn announced(line: &str) -> Option<Told> {
    let ready = serde_json::from_str::<Value>(line).ok()?;
    let ready = ready.get("ready")?;
    Some(Told { address: ready["address"].as_str()?.to_owned(), http: ready["http"].as_str()?.parse().ok()? })
}
