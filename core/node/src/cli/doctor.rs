//! `doctor`: what of this machine will be used, and why not the rest.
//!
//! Nothing is believed that can be tried: transports move random bytes between two engines, both ways, and compare them; a
//! file is written and read back.

mod cuda;
mod disk;
mod topology;
mod trial;

use millpond_core::time::Duration;
use millpond_core::wire::hello::HostIdentity;
use rustix::process::{Resource, getrlimit};
use serde_json::json;

use super::cluster::Cluster;
use super::failure::Failure;
use super::store_cmds::{Exit, Output};
use crate::engine::{OwnNic, Via};
use crate::model::{LoadError, Source};
use crate::node;
use crate::runtime::{Runtime, within};

/// How long the byte test of a transport or of a file may take, with the engines that it starts.
const TRIAL_WITHIN: Duration = Duration::from_secs(5);
/// Open files below which a busy node runs out of connections.
const FILES_MIN: u64 = 4096;

/// Transports that the field has a name for, and this version nothing else.
const ABSENT: [&str; 13] = [
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
];

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only try the transports, and look at what they run over.
    #[arg(long)]
    transports: bool,
    /// Only show which NICs each place of memory would use, and why: `text`, or `json` for the priority matrix.
    #[arg(long, value_name = "FORM", num_args = 0..=1, default_missing_value = "text", require_equals = true)]
    #[arg(conflicts_with = "transports")]
    topology: Option<topology::Form>,
    #[command(flatten)]
    choice: topology::Choice,
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
    let topology = topology::Topology::read(&args.choice)?;
    if let Some(form) = args.topology {
        return topology.show(form, output);
    }
    let mut rows = Vec::new();
    if !args.transports {
        rows.extend([machine(), files(), locked()]);
    }
    for via in [Via::Tcp, Via::Shm] {
        rows.push(transport(runtime, via, Default::default()).await);
    }
    rows.push(file(runtime).await);
    rows.push(topology.rdma());
    let nics = [topology.nics(), topology.nics()];
    if nics.iter().all(|nics| !nics.is_empty()) {
        rows.push(transport(runtime, Via::Rdma, nics).await);
    }
    rows.extend(cuda::rows());
    rows.extend(topology.lines());
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

async fn transport<R: Runtime>(runtime: &R, via: Via, nics: [Vec<OwnNic>; 2]) -> Row {
    let subject = match via {
        Via::Tcp => "tcp",
        Via::Rdma => "rdma",
        _ => "shm",
    };
    if via == Via::Shm && node::host() == HostIdentity::UNKNOWN {
        let text = "not used: the host cannot be told (boot id or namespaces in /proc are hidden)".to_owned();
        return (subject, Finding::Note, text);
    }
    match within(runtime, TRIAL_WITHIN, trial::run(runtime, via, nics)).await {
        Ok(Ok(text)) => (subject, Finding::Good, text),
        Ok(Err(reason)) => (subject, Finding::Bad, format!("not usable: {reason}")),
        Err(_) => (subject, Finding::Bad, format!("moved nothing within {TRIAL_WITHIN}")),
    }
}

async fn file<R: Runtime>(runtime: &R) -> Row {
    match within(runtime, TRIAL_WITHIN, disk::run(runtime)).await {
        Ok(Ok((finding, text))) => ("file", finding, text),
        Ok(Err(reason)) => ("file", Finding::Bad, format!("not usable: {reason}")),
        Err(_) => ("file", Finding::Bad, format!("moved nothing within {TRIAL_WITHIN}")),
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
