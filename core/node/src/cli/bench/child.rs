//! The other process of a measurement, seen from both sides.
//!
//! It says on its standard output that it is ready, answers one JSON line with one JSON line, and ends when its standard
//! input does: when the process that started it lets go of it, or dies.

use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use millpond_hal::bare::{self, Meter};
use serde::{Deserialize, Serialize};

use super::super::cluster::TlsArgs;
use super::point::{Layout, Path as Transport};
use super::{Error, store, transfer};
use crate::runtime::{Runtime, blocking};

/// How long an answer may take: filling and comparing memory in an unoptimised build included.
const ANSWER_SPAN_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, clap::Subcommand)]
enum Role {
    Bare {
        address: String,
    },
    Target {
        via: Transport,
        #[command(flatten)]
        tls: TlsArgs,
    },
    Store {
        via: Transport,
        name: String,
        directory: Option<String>,
    },
}

/// Does what the process was started for, until it is let go.
pub(super) async fn run<R: Runtime>(runtime: &R, args: Args) -> Result<(), Error> {
    match args.role {
        Role::Bare { address } => Ok(blocking(runtime, move || bare::serve(&address)).await?),
        Role::Target { via, tls } => transfer::target(runtime, via, &tls).await,
        Role::Store { via, name, directory } => store::node(runtime, via, &name, directory).await,
    }
}

/// What the other process can be asked for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// The CPU seconds that it used since it was ready.
    Cpu,
    /// To fill its memory.
    Fill {
        /// With the pattern of this seed.
        seed: u64,
    },
    /// To compare its memory with what it should hold after so many pieces per thread.
    Compare { layout: Layout, moved: Vec<u64>, initiator_seed: u64, target_seed: u64 },
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// It serves.
    Ready {
        /// Its node port.
        address: String,
        /// What to attach; empty for a store.
        token: Vec<u8>,
    },
    Cpu {
        seconds: f64,
    },
    Done,
    /// The first byte that is not what it should be.
    Wrong {
        offset: Option<u64>,
    },
}

/// This executable.
pub(super) fn program(name: &'static str) -> Result<PathBuf, Error> {
    std::env::current_exe().map_err(|source| Error::Child { name, source })
}

/// How this executable is started as the other process.
pub(super) fn command(program: &Path, role: &[String]) -> Command {
    let mut command = Command::new(program);
    command.args(["bench", "child"]).args(role);
    command
}

/// The other process; it ends with this.
#[derive(Debug)]
pub(super) struct Process {
    name: &'static str,
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<io::Result<String>>,
}

impl Process {
    /// Starts it and waits until it is ready. Gives its address and token.
    pub(super) fn start(name: &'static str, role: &[String]) -> Result<(Self, String, Vec<u8>), Error> {
        let failed = |source| Error::Child { name, source };
        let program = program(name)?;
        let mut command = command(&program, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let no_pipe = || failed(io::ErrorKind::BrokenPipe.into());
        let (stdin, stdout) = (child.stdin.take().ok_or_else(no_pipe)?, child.stdout.take().ok_or_else(no_pipe)?);
        let (sender, answers) = channel();
        // Ends with the process: its output does.
        std::thread::spawn(move || BufReader::new(stdout).lines().try_for_each(|line| sender.send(line)));
        let mut process = Self { name, child, stdin, answers };
        match process.answer()? {
            Answer::Ready { address, token } => Ok((process, address, token)),
            other => Err(process.unexpected(&other)),
        }
    }

    /// Asks, and waits for the answer.
    pub(super) fn ask(&mut self, ask: &Ask) -> Result<Answer, Error> {
        let mut line = serde_json::to_string(ask).map_err(io::Error::from)?;
        line.push('\n');
        self.stdin.write_all(line.as_bytes()).map_err(|source| Error::Child { name: self.name, source })?;
        self.answer()
    }

    /// CPU seconds that it used so far.
    pub(super) fn cpu_s(&mut self) -> Result<f64, Error> {
        match self.ask(&Ask::Cpu)? {
            Answer::Cpu { seconds } => Ok(seconds),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(super) fn unexpected(&self, answer: &Answer) -> Error {
        let source = io::Error::new(io::ErrorKind::InvalidData, format!("it answered {answer:?}"));
        Error::Child { name: self.name, source }
    }

    fn answer(&mut self) -> Result<Answer, Error> {
        let read = self.answers.recv_timeout(ANSWER_SPAN_MAX);
        let line = match read {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => Err(io::Error::new(io::ErrorKind::TimedOut, "no answer within 60 s")),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("it ended ({status})")))
            }
        };
        line.and_then(|line| Ok(serde_json::from_str(&line)?))
            .map_err(|source| Error::Child { name: self.name, source })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the other process: says that it is ready, and answers until its standard input ends. Blocks.
pub(super) fn serve(ready: &Answer, mut answer: impl FnMut(Ask) -> Result<Answer, Error>) -> Result<(), Error> {
    let say = |answer: &Answer| -> Result<(), Error> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(answer).map_err(io::Error::from)?)?;
        Ok(out.flush()?)
    };
    let meter = Meter::start();
    say(ready)?;
    for line in io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?).map_err(io::Error::from)? {
            Ask::Cpu => Answer::Cpu { seconds: meter.own_s() },
            other => answer(other)?,
        };
        say(&answer)?;
    }
    Ok(())
}
