//! The command line, the same in both binaries.
//!
//! A command is a file: its arguments and a `run` that writes to the [`Output`] it is given and says how it ended. Results
//! go to standard output (`--json`: one JSON object per line), everything else to standard error.

mod bench;
mod cluster;
mod doctor;
mod explain;
mod failure;
mod progress;
mod rehearse;
mod replay;
mod serve;
mod status;
mod store;
pub mod store_cmds;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::runtime::{Runtime, Stop};

use failure::Failure;
use store_cmds::{Exit, Format, Output};

/// The exit code of a command line that makes no sense, as in sysexits.h.
const USAGE: u8 = 64;

/// Millpond: moves, keeps and schedules the KV cache of large language models.
///
/// Exit codes: 0 done, 1 an error, 2 the key is not there, 3 the store said no, 64 the command line makes no sense.
/// MILLPOND_LOG sets what is logged to standard error: error, warn, info, debug, or per module.
#[derive(Debug, Parser)]
#[command(name = "millpond", version, subcommand_required = true, arg_required_else_help = true)]
struct Line {
    /// Results as JSON, one object per line.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a cluster on this machine and say where to send requests.
    Up(up::Args),
    /// Run one node with the roles in its configuration.
    Serve(serve::Args),
    #[command(flatten)]
    Brief(Brief),
}

/// Commands that end by themselves.
#[derive(Debug, Subcommand)]
enum Brief {
    /// Show the nodes of the cluster and what they hold.
    Status(cluster::At),
    /// Store a file under a key.
    Put(store::Put),
    /// Write the value of a key to a file.
    Get(store::Get),
    /// Remove keys.
    Rm(store::Remove),
    /// List keys.
    Ls(store::List),
    /// Show what is known of a key.
    Stat(store::Key),
    /// Say why a key is not there.
    ExplainMiss(store::Key),
    /// Show changes of the store as they happen.
    Watch(store::Watch),
    /// Show what became of a request.
    Explain(explain::Args),
    /// Look at this machine and say what will be used, and why not the rest.
    Doctor(doctor::Args),
    /// Measure what this machine moves, between processes that are started for it.
    Bench(bench::Args),
    /// Replay a trace of requests and say what a cache would find.
    Replay(replay::Args),
    /// Send a trace through the live router over synthetic nodes in scaled time, beside the simulator.
    Rehearse(rehearse::Args),
}

/// What a binary says and ends with if the system gives it no runtime.
#[must_use]
pub fn no_runtime(error: &std::io::Error) -> ExitCode {
    eprintln!("millpond: the system gives no runtime: {error}");
    ExitCode::FAILURE
}

/// Reads the process's arguments and does what they say, until done or until `ended`, which stops on SIGTERM and SIGINT.
pub async fn run<R: Runtime>(runtime: R, ended: std::io::Result<Stop>) -> ExitCode {
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => return no_runtime(&error),
    };
    let line = match Line::try_parse() {
        Ok(line) => line,
        Err(error) => {
            // Help and version come this way too, and go to standard output.
            let _ = error.print();
            return if error.use_stderr() { USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    let is_service = matches!(line.command, Command::Up(_) | Command::Serve(_));
    if let Err(error) = log(is_service) {
        eprintln!("millpond: {error}");
        return USAGE.into();
    }
    let format = if line.json { Format::Json } else { Format::Text };
    let mut out = std::io::stdout();
    let mut output = Output { writer: &mut out, format };
    let ending = match line.command {
        // They end in order when they are told to, the others at once.
        Command::Up(args) => up::run(&runtime, args, &ended, &mut output).await,
        Command::Serve(args) => serve::run(&runtime, args, &ended, &mut output).await,
        Command::Brief(brief) => {
            let ending = ended.or_stopped(run_brief(&runtime, brief, &mut output)).await;
            ending.unwrap_or(Err(Failure::Interrupted))
        }
    };
    match ending {
        Ok(exit) => exit.code().into(),
        Err(failure) => {
            eprintln!("millpond: {failure}");
            if matches!(failure, Failure::Usage(_)) { USAGE.into() } else { ExitCode::FAILURE }
        }
    }
}

async fn run_brief<R: Runtime>(runtime: &R, command: Brief, output: &mut Output<'_>) -> Result<Exit, Failure> {
    match command {
        Brief::Status(at) => status::run(runtime, &at, output).await,
        Brief::Put(args) => store::put(runtime, args, output).await,
        Brief::Get(args) => store::get(runtime, args, output).await,
        Brief::Rm(args) => store::remove(runtime, args, output).await,
        Brief::Ls(args) => store::list(runtime, args, output).await,
        Brief::Stat(args) => store::stat(runtime, args, output).await,
        Brief::ExplainMiss(args) => store::explain_miss(runtime, args, output).await,
        Brief::Watch(args) => store::watch(runtime, args, output).await,
        Brief::Explain(args) => explain::run(runtime, args, output).await,
        Brief::Doctor(args) => doctor::run(runtime, args, output).await,
        Brief::Bench(args) => Ok(bench::run(runtime, args, output).await?),
        Brief::Replay(args) => replay::run(args, output).await,
        Brief::Rehearse(args) => rehearse::run(runtime, args, output).await,
    }
}

/// Logs to standard error as `MILLPOND_LOG` says.
fn log(is_service: bool) -> Result<(), String> {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::fmt;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;

    let text = std::env::var("MILLPOND_LOG").unwrap_or_default();
    let wrong = |what: &str| {
        format!("MILLPOND_LOG={text}: {what}; use error, warn, info, debug or module=level, separated by commas")
    };
    let mut default = if is_service { LevelFilter::INFO } else { LevelFilter::WARN };
    let mut modules = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (module, level) = part.split_once('=').map_or((None, part), |(module, level)| (Some(module), level));
        let level = level.parse().map_err(|_| wrong(&format!("{level:?} is no level")))?;
        match module {
            Some(module) => modules.push((module.to_owned(), level)),
            None => default = level,
        }
    }
    let targets = Targets::new().with_default(default).with_targets(modules);
    // Standard error may be a pipe that nobody reads any more; that must not end a node.
    let lines =
        fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(false).log_internal_errors(false);
    // A process that embeds us may have set up its own.
    let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Line::command().debug_assert();
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = Line::try_parse_from(["millpond", "put", "key"]).unwrap_err().to_string();
        assert!(error.contains("<FILE>"), "{error}");
        let error = Line::try_parse_from(["millpond", "sreve"]).unwrap_err().to_string();
        assert!(error.contains("serve"), "{error}");
        assert!(Line::try_parse_from(["millpond", "ls", "--json"]).unwrap().json);
    }
}
