//! `doctor`: what of this machine will be used, and why not the rest.
//!
//! Nothing is believed that can be tried: transports move random bytes between two engines and compare them.

use std::net::SocketAddr;

use millpond_core::time::Duration;
use millpond_core::wire::hello::HostIdentity;
use rustix::process::{Resource, getrlimit};
use serde_json::json;

use super::cluster::Cluster;
use super::failure::Failure;
use super::store_cmds::{Exit, Output};
use crate::engine::{Backing, Batch, Engine, Options, Via};
use crate::model::{LoadError, Source};
use crate::node;
use crate::runtime::{Runtime, Stop, within};

/// Bytes that each transport has to move.
const TRIAL_LEN: u64 = 1 << 20;
/// How long it may take.
const TRIAL_WITHIN: Duration = Duration::from_secs(5);
/// Open files below which a busy node runs out of connections.
const FILES_MIN: u64 = 4096;

/// Transports that the field has a name for, and this version nothing else.
const ABSENT: [&str; 14] = [
    "efa",
    "nvmeof",
    "nvlink",
    "nvlink_intra",
    "hip",
    "barex",
    "cxl",
    "musa",
    "ascend",
    "hylink",
    "tpu",
    "mpcomm",
    "flagcx",
    "file",
];

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only try the transports.
    #[arg(long)]
    transports: bool,
}

/// What was found about one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    Good,
    /// Works, with less than there could be.
    Note,
    Bad,
}

impl Finding {
    fn name(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Bad => "bad",
        }
    }
}

type Row = (&'static str, Finding, String);

pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let mut rows = Vec::new();
    if !args.transports {
        rows.extend([machine(), files(), locked()]);
    }
    for via in [Via::Tcp, Via::Shm] {
        rows.push(transport(runtime, via).await);
    }
    rows.extend([rdma(), gpus()]);
    if args.transports {
        let absent = |name| (name, Finding::Note, "not used: not implemented in this version".to_owned());
        rows.extend(ABSENT.map(absent));
    }
    if !args.transports {
        rows.extend([model(), cluster()]);
    }
    for (subject, finding, text) in &rows {
        let finding = finding.name();
        output.line(
            &format!("{finding:<5} {subject:<10} {text}"),
            json!({"subject": subject, "finding": finding, "text": text}),
        )?;
    }
    match rows.iter().filter(|(_, finding, _)| *finding == Finding::Bad).count() {
        0 => Ok(Exit::Done),
        count => Err(Failure::Said(format!("{count} findings above are bad"))),
    }
}

fn machine() -> Row {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let uname = rustix::system::uname();
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse().ok());
    let gib = kib.unwrap_or(0_u64) >> 20;
    let kernel = uname.release().to_string_lossy();
    ("machine", Finding::Good, format!("Linux {kernel}, {cores} cores, {gib} GiB of memory available"))
}

fn files() -> Row {
    let limit = getrlimit(Resource::Nofile);
    let (soft, hard) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    if soft >= FILES_MIN {
        return ("files", Finding::Good, format!("{soft} open files allowed"));
    }
    let text = format!("{soft} open files allowed, a busy node wants {FILES_MIN}; `ulimit -n {}`", hard.min(65_536));
    ("files", Finding::Note, text)
}

fn locked() -> Row {
    match getrlimit(Resource::Memlock).current {
        None => ("memory", Finding::Good, "any amount of memory may be locked".into()),
        Some(bytes) => {
            let text = format!("{} MiB may be locked; enough for tcp and shm, which lock none", bytes >> 20);
            ("memory", Finding::Good, text)
        }
    }
}

async fn transport<R: Runtime>(runtime: &R, via: Via) -> Row {
    let subject = if via == Via::Tcp { "tcp" } else { "shm" };
    if via == Via::Shm && node::host() == HostIdentity::UNKNOWN {
        let text = "not used: the host cannot be told (boot id or namespaces in /proc are hidden)".to_owned();
        return (subject, Finding::Note, text);
    }
    match within(runtime, TRIAL_WITHIN, trial(runtime, via)).await {
        Ok(Ok(text)) => (subject, Finding::Good, text),
        Ok(Err(reason)) => (subject, Finding::Bad, format!("not usable: {reason}")),
        Err(_) => (subject, Finding::Bad, format!("moved nothing within {TRIAL_WITHIN}")),
    }
}

/// Writes random bytes from one engine to another over `via`, and compares.
async fn trial<R: Runtime>(runtime: &R, via: Via) -> Result<String, String> {
    fn said(error: impl ToString) -> String {
        error.to_string()
    }
    let engine = |name: &str| {
        let identity = node::identity(name, None).map_err(said)?;
        Engine::start(runtime.clone(), Options::new(identity)).map_err(said)
    };
    let (near, far) = (engine("doctor: near")?, engine("doctor: far")?);
    let stop = Stop::new();
    let address = far.listen(SocketAddr::from(([127, 0, 0, 1], 0)), &stop).await.map_err(said)?;
    let moved = async {
        let target = far.allocate(TRIAL_LEN, Backing::Memfd).map_err(said)?;
        let grant = far.grant_write(vec![target.carve(0, TRIAL_LEN).map_err(said)?]).map_err(said)?;
        let source = near.allocate(TRIAL_LEN, Backing::Memfd).map_err(said)?;
        let mut bytes = source.carve(0, TRIAL_LEN).map_err(said)?;
        getrandom::fill(&mut bytes).map_err(said)?;
        let bytes = bytes.freeze();
        let peer = near.open(address).await.map_err(said)?;
        let remote = near.attach(&peer, &grant.token()).map_err(said)?;
        let batch = Batch::new().write(bytes.clone(), remote.whole()).via(via);
        let report = near.submit(batch).map_err(said)?.await.into_done().map_err(said)?;
        let arrived = grant.close().await;
        if arrived.first().is_none_or(|arrived| arrived[..] != bytes[..]) {
            return Err("other bytes arrived than were sent".to_owned());
        }
        let micros = report.elapsed().as_micros();
        Ok(format!("usable: {} KiB of random bytes arrived unchanged in {micros} us", TRIAL_LEN >> 10))
    };
    let ending = moved.await;
    stop.stop();
    futures::join!(near.shut_down(), far.shut_down());
    ending
}

/// Names of what lies in a folder of /sys.
fn entries(dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn rdma() -> Row {
    match entries("/sys/class/infiniband") {
        devices if devices.is_empty() => ("rdma", Finding::Note, "not used: this machine has no RDMA device".into()),
        devices => {
            ("rdma", Finding::Note, format!("not used: this version moves no bytes over {}", devices.join(", ")))
        }
    }
}

fn gpus() -> Row {
    let nvidia = entries("/proc/driver/nvidia/gpus");
    // Its nodes are CPUs too; those have no GPU id.
    let kfd = "/sys/class/kfd/kfd/topology/nodes";
    let has_gpu =
        |node: &String| std::fs::read_to_string(format!("{kfd}/{node}/gpu_id")).is_ok_and(|id| id.trim() != "0");
    let amd = entries(kfd).into_iter().filter(has_gpu).map(|node| format!("kfd {node}"));
    let all: Vec<String> = nvidia.into_iter().chain(amd).collect();
    match all.len() {
        0 => ("gpu", Finding::Note, "not used: this machine has no GPU with a driver".into()),
        _ => {
            ("gpu", Finding::Note, format!("not used: this version keeps KV in host memory, not on {}", all.join(", ")))
        }
    }
}

fn model() -> Row {
    let source = Source::preferred();
    match (&source, source.card()) {
        (Source::Toy, _) => {
            let script = crate::model::llama::FETCH_SCRIPT;
            ("model", Finding::Note, format!("toy; SmolLM2 was not fetched ({script} does that)"))
        }
        (Source::File(path), Ok(card)) => ("model", Finding::Good, format!("{} in {}", card.id, path.display())),
        (_, Err(error @ LoadError::NotBuilt)) => ("model", Finding::Note, error.to_string()),
        (_, Err(error)) => ("model", Finding::Bad, error.to_string()),
    }
}

fn cluster() -> Row {
    match Cluster::find() {
        Ok(cluster) => ("cluster", Finding::Good, format!("runs, requests go to http://{}/v1", cluster.http)),
        Err(error) => ("cluster", Finding::Note, error.to_string()),
    }
}
