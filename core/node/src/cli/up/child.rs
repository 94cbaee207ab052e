//! A node's process: started, listened to, ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use futures::channel::oneshot;
use futures::future::{FutureExt, Shared};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::cli::failure::Failure;

/// Settings that `up` writes itself, and what they begin with where it writes all of a section.
const WRITTEN: [&str; 8] = [
    "MILLPOND_NODE_",
    "MILLPOND_DIRECTORY_",
    "MILLPOND_STORE_SIZE",
    "MILLPOND_STORE_DIRECTORY",
    "MILLPOND_MODEL_FILE",
    "MILLPOND_MODEL_NAME",
    "MILLPOND_ROUTER_PREFILL",
    "MILLPOND_ROUTER_DECODE",
];

/// Where a node says it is.
#[derive(Clone, Debug)]
pub(super) struct Told {
    /// Its node port.
    pub(super) address: String,
    /// Its HTTP port.
    pub(super) http: SocketAddr,
}

/// The lines of a pipe until it closes.
fn lines(pipe: impl Read) -> impl Iterator<Item = String> {
    let lines = BufReader::new(pipe).split(b'\n').map_while(Result::ok);
    lines.map(|line| String::from_utf8_lossy(&line).into_owned())
}

/// A process that is a node. A thread waits for its end, so it is always reaped.
pub(super) struct Child {
    /// Its number until it was reaped; a number that was reaped may be somebody else's.
    pid: Arc<Mutex<Option<Pid>>>,
    ready: Mutex<Option<oneshot::Receiver<Told>>>,
    ended: Shared<oneshot::Receiver<String>>,
}

impl Child {
    /// Starts the node `name` with the configuration in a file. Its log goes to ours, each line under its name.
    pub(super) fn start(name: &str, config: &Path) -> Result<Self, Failure> {
        let binary = std::env::current_exe().map_err(Failure::system("finding this program"))?;
        let mut command = Command::new(binary);
        command.arg("serve").arg("--config").arg(config).arg("--announce");
        command.arg("--die-with").arg(std::process::id().to_string());
        // The environment is over a node's file, but not over what `up` was told.
        for (variable, _) in std::env::vars_os() {
            if variable.to_str().is_some_and(|name| WRITTEN.iter().any(|written| name.starts_with(written))) {
                command.env_remove(variable);
            }
        }
        // Its own group: Ctrl-C reaches us alone, and we end the nodes in order.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().map_err(Failure::system(format!("starting {name}")))?;
        let (out, err) = (process.stdout.take(), process.stderr.take());
        let (tell, ready) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let process_id = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let pid = Arc::new(Mutex::new(process_id));
        let (held, shown) = (Arc::clone(&pid), name.to_owned());
        let listening = move || {
            let mut tell = Some(tell);
            for line in out.into_iter().flat_map(lines) {
                if let (Some(told), Some(tell)) = (super::announced(&line), tell.take()) {
                    // Nobody waits for it any more if the cluster is ending.
                    let _ = tell.send(told);
                }
            }
        };
        let logging = move || {
            for line in err.into_iter().flat_map(lines) {
                // Whoever read our log may be gone; the nodes' pipes are emptied all the same.
                let _ = writeln!(std::io::stderr(), "{shown}: {line}");
            }
        };
        let waiting = move || {
            if let Some(pid) = process_id {
                // Without reaping, so that the number is its own until nobody signals it any more.
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while let Err(Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
            }
            let mut held = held.lock();
            *held = None;
            let status = process.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
            // Nobody waits for it any more if the cluster is gone.
            let _ = end.send(status);
        };
        let thread = |role: &str| std::thread::Builder::new().name(format!("{name} {role}"));
        let threads = thread("out").spawn(listening).and(thread("err").spawn(logging));
        let threads = threads.map(|_| ()).and(thread("end").spawn(waiting).map(|_| ()));
        threads.map_err(Failure::system(format!("a thread for {name}")))?;
        Ok(Self { pid, ready: Mutex::new(Some(ready)), ended: ended.shared() })
    }

    /// Where it is once it serves; `None` if it ended before. To be asked once.
    pub(super) async fn ready(&self) -> Option<Told> {
        let ready = self.ready.lock().take()?;
        ready.await.ok()
    }

    /// How it ended, once it did.
    pub(super) async fn ended(&self) -> String {
        self.ended.clone().await.unwrap_or_else(|_| "nobody waited for it".to_owned())
    }

    /// Tells it to end.
    pub(super) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends it.
    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = *self.pid.lock() {
            // It may have ended this moment, which is what is wanted.
            let _ = kill_process(pid, signal);
        }
    }
}
