//! Clusters of processes.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use millpond_verify::binaries;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::idle::Proxy;

/// How long a node may take to say that it is ready.
const READY_WAIT: Duration = Duration::from_secs(30);

/// Which of the two binaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Tokio,
    Smol,
}

impl Binary {
    /// Where it lies; built if it is not up to date.
    pub(crate) fn path(self) -> PathBuf {
        binaries::folder().join(match self {
            Self::Tokio => "millpond",
            Self::Smol => "millpond-smol",
        })
    }
}

/// A folder of one test, removed at its end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("millpond-e2e-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a writable folder for temporary files");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// One node in a process of its own; killed when dropped.
pub(crate) struct Process {
    pub(crate) name: String,
    /// Its node port.
    pub(crate) address: SocketAddr,
    pub(crate) http: SocketAddr,
    binary: Binary,
    config: PathBuf,
    log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts a node with the sections `roles`, and waits until it is ready.
    pub(crate) fn start(folder: &Folder, binary: Binary, name: &str, node: &str, roles: &str) -> Self {
        let any = "127.0.0.1:0".parse().expect("an address");
        Self::start_at(folder, binary, name, node, roles, (any, any))
    }

    fn start_at(
        folder: &Folder,
        binary: Binary,
        name: &str,
        node: &str,
        roles: &str,
        (listen, http): (SocketAddr, SocketAddr),
    ) -> Self {
        let config = folder.path(&format!("{name}.toml"));
        let text = format!("[node]\nname = \"{name}\"\nlisten = \"{listen}\"\nhttp = \"{http}\"\n{node}\n\n{roles}\n");
        fs::write(&config, text).expect("a writable folder");
        let log = folder.path(&format!("{name}.log"));
        let (child, address, http) = spawn(binary, &config, &log);
        Self { name: name.to_owned(), address, http, binary, config, log, child }
    }

    /// Starts it again where it was.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let text = fs::read_to_string(&self.config).expect("written at its start");
        let text = text.replace("listen = \"127.0.0.1:0\"", &format!("listen = \"{}\"", self.address));
        let text = text.replace("http = \"127.0.0.1:0\"", &format!("http = \"{}\"", self.http));
        fs::write(&self.config, text).expect("a writable folder");
        let (child, address, http) = spawn(self.binary, &self.config, &self.log);
        assert_eq!((address, http), (self.address, self.http), "it comes back where it was");
        self.child = child;
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it was not waited for yet");
    }

    /// kill -9.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end and says how it ended.
    pub(crate) fn ended(&mut self, span: Duration) -> ExitStatus {
        let mut status = None;
        eventually("it ends", span, || {
            status = self.child.try_wait().expect("it is this process's child");
            status.is_some()
        });
        status.expect("it ended")
    }

    /// What it wrote so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(60)..].join("\n");
            println!("--- {} ({:?}, {}) said:\n{tail}", self.name, self.binary, self.address);
            // It may be dead or stopped.
            let metrics = super::client::ask(self.http, "GET", "/metrics", b"").and_then(super::client::Answer::text);
            let is_telling = |line: &&str| !line.starts_with('#') && !line.contains("_bucket") && !line.ends_with(" 0");
            metrics.iter().flat_map(|text| text.lines()).filter(is_telling).for_each(|line| println!("{line}"));
        }
        self.kill();
    }
}

fn spawn(binary: Binary, config: &Path, log: &Path) -> (Child, SocketAddr, SocketAddr) {
    let errors = File::options().create(true).append(true).open(log).expect("a writable folder");
    let own = std::process::id().to_string();
    let mut child = Command::new(binary.path())
        .args(["serve", "--announce", "--die-with", &own, "--config"])
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .expect("the binary runs");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let (sender, receiver) = mpsc::channel();
    // Goes on reading, so that the node never blocks on its output.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    let ready = receiver.recv_timeout(READY_WAIT).unwrap_or_else(|error| {
        let _ = child.kill();
        panic!("{}: no ready line: {error}\n{}", config.display(), fs::read_to_string(log).unwrap_or_default())
    });
    let ready: Value = serde_json::from_str(&ready).expect("the ready line is JSON");
    let address = |name: &str| ready["ready"][name].as_str().and_then(|text| text.parse().ok()).expect("an address");
    (child, address("address"), address("http"))
}

/// What a cluster is to be made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) prefill: Binary,
    pub(crate) decode: Binary,
    pub(crate) router: Binary,
    pub(crate) store: Binary,
    pub(crate) via: &'static str,
    pub(crate) store_size: &'static str,
    /// More lines of the sections.
    pub(crate) prefill_lines: &'static str,
    pub(crate) decode_lines: &'static str,
    pub(crate) router_lines: &'static str,
}

impl Plan {
    /// All of one binary.
    pub(crate) fn of(binary: Binary) -> Self {
        Self {
            prefill: binary,
            decode: binary,
            router: binary,
            store: binary,
            via: "auto",
            store_size: "64MiB",
            prefill_lines: "memory = \"32MiB\"",
            decode_lines: "memory = \"32MiB\"",
            router_lines: "",
        }
    }
}

/// A store with the directory, a prefill node, a decode node and a router.
pub(crate) struct Cluster {
    // In this order they are taken down.
    pub(crate) router: Process,
    pub(crate) decode: Process,
    pub(crate) prefill: Process,
    pub(crate) store: Process,
    _folder: Folder,
}

impl Cluster {
    /// Starts it and waits until requests can be served.
    pub(crate) fn start(plan: Plan) -> Self {
        Self::start_behind(plan, None)
    }

    /// The same, the store, prefill and decode node each behind a proxy, which alone the others know.
    pub(crate) fn start_behind(plan: Plan, proxies: Option<&[Proxy; 3]>) -> Self {
        let folder = Folder::new();
        let node = format!("via = \"{}\"", plan.via);
        let start = |role: usize, binary, name: &str, roles: &str| {
            let Some(proxies) = proxies else { return Process::start(&folder, binary, name, &node, roles) };
            let Proxy { address, target, .. } = proxies[role];
            let http = "127.0.0.1:0".parse().expect("an address");
            let node = format!("{node}\nadvertise = \"{address}\"");
            Process::start_at(&folder, binary, name, &node, roles, (target, http))
        };
        let size = plan.store_size;
        let roles = format!("[store]\nsize = \"{size}\"\ndirectory = true");
        let store = start(0, plan.store, "store", &roles);
        // Where it is reached.
        let directory = store.address;
        let with_directory = |section: &str, lines: &str| {
            format!("[directory]\naddress = \"{directory}\"\n\n[model]\nthreads = 1\n\n[{section}]\n{lines}")
        };
        let roles = [with_directory("prefill", plan.prefill_lines), with_directory("decode", plan.decode_lines)];
        let (prefill, decode) = std::thread::scope(|scope| {
            let prefill = scope.spawn(|| start(1, plan.prefill, "prefill", &roles[0]));
            let decode = start(2, plan.decode, "decode", &roles[1]);
            (prefill.join().expect("the prefill node starts"), decode)
        });
        let roles = format!(
            "[router]\nprefill = [\"{}\"]\ndecode = [\"{}\"]\n{}",
            prefill.address, decode.address, plan.router_lines
        );
        let router = Process::start(&folder, plan.router, "router", &node, &roles);
        let cluster = Self { router, decode, prefill, store, _folder: folder };
        cluster.wait_ready();
        cluster
    }

    /// Waits until the router says that requests can be served.
    pub(crate) fn wait_ready(&self) {
        wait_ready(self.router.http);
    }
}

pub(crate) fn wait_ready(http: SocketAddr) {
    eventually("/ready", Duration::from_secs(20), || {
        super::client::ask(http, "GET", "/ready", b"").is_ok_and(|answer| answer.status == 200)
    });
}

/// One process that does it all without a store and without moving KV: what it says is what others must say.
pub(crate) struct Alone {
    pub(crate) node: Process,
    _folder: Folder,
}

impl Alone {
    pub(crate) fn start() -> Self {
        let folder = Folder::new();
        let roles = "[model]\nthreads = 1\n\n[decode]\nmemory = \"32MiB\"\nbatch_max = 1\n\n[router]";
        let node = Process::start(&folder, Binary::Tokio, "alone", "", roles);
        wait_ready(node.http);
        Self { node, _folder: folder }
    }
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, span: Duration, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < span, "not within {span:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
