//! `serve`: one node with the roles in its configuration.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use super::failure::Failure;
use super::store_cmds::{Exit, Output};
use crate::config::Config;
use crate::runtime::{Readiness, Runtime, Stop};
use crate::serve::Serving;

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The configuration, a TOML file; MILLPOND_SECTION_KEY in the environment overrides a key.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Show every setting and where it came from, and end.
    #[arg(long)]
    print_config: bool,
    /// Say on standard output, in one line of JSON, where the node is once it serves.
    #[arg(long)]
    announce: bool,
    /// End when this process ends.
    #[arg(long, value_name = "PID")]
    die_with: Option<i32>,
}

/// Serves until `ended`.
pub(super) async fn run<R: Runtime>(
    runtime: &R,
    args: Args,
    ended: &Stop,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let config = Config::read(&args.config)?;
    for (variable, nearest) in config.unknown_variables() {
        tracing::warn!("{variable} in the environment sets nothing; did you mean {nearest}?");
    }
    if args.print_config {
        for setting in config.settings() {
            let (key, value, origin) = (&setting.key, &setting.value, setting.origin.to_string());
            output
                .line(&format!("{key} = {value}  # {origin}"), json!({"key": key, "value": value, "origin": origin}))?;
        }
        return Ok(Exit::Done);
    }
    if let Some(pid) = args.die_with {
        die_with(runtime, pid, ended.clone())?;
    }
    let serving = match ended.or_stopped(Serving::start(runtime, &config)).await {
        Ok(started) => started?,
        Err(_) => return Ok(Exit::Done),
    };
    let (address, http) = (serving.address(), serving.http());
    tracing::info!(name = config.node.name, roles = ?config.roles(), address, %http, "serving");
    if args.announce {
        let line = json!({"ready": {"address": address, "http": http}});
        output.line(&line.to_string(), line)?;
    }
    ended.stopped().await;
    let drained = serving.drain().await;
    tracing::info!(span = %drained.span, unfinished = ?drained.unfinished, "drained");
    if drained.unfinished.is_empty() {
        return Ok(Exit::Done);
    }
    let steps = drained.unfinished.join(", ");
    Err(Failure::Said(format!("ended without finishing {steps} within `node.drain`")))
}

/// Ends the node like a signal would, once the process `pid` is gone.
fn die_with<R: Runtime>(runtime: &R, pid: i32, ended: Stop) -> Result<(), Failure> {
    let pid = Pid::from_raw(pid).ok_or_else(|| Failure::Said(format!("--die-with {pid}: that is no process")))?;
    let fd: OwnedFd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => {
            return Err(Failure::Said("the process named by --die-with is gone already".into()));
        }
        Err(error) => return Err(Failure::system("watching the process named by --die-with")(error.into())),
    };
    let watch = runtime.readable(fd).map_err(Failure::system("watching the process named by --die-with"))?;
    runtime.spawn(async move {
        // An error means that the process cannot be watched any longer: nobody looks after this node then either.
        let _ = watch.readable().await;
        ended.stop();
    });
    Ok(())
}
