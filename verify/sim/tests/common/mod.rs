//! Engines over real links for tests: a runtime with neither tokio nor smol, and peers in processes of their own.
#![allow(dead_code, reason = "each test file uses its part")]

#[path = "../../../examples/own_runtime.rs"]
pub(crate) mod own;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_node::engine::{Backing, Batch, Engine, Options, Peer, Region, RegionToken, RemoteRegion, Rights, Via};
use millpond_node::runtime::Stop;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use own::Own;
use zerocopy::{FromBytes, IntoBytes};

/// Set in a child: which node it is.
const NODE: &str = "MILLPOND_TEST_NODE";
/// Bytes of each peer's memory.
pub(crate) const LEN: u64 = 8 << 20;

pub(crate) fn options(node: u8, incarnation: u64) -> Options {
    // One host, which the operating system's word is not needed for.
    let host = HostIdentity { boot: [9; 16], namespaces: [7; 3] };
    Options::new(Identity { node: [node; 16], incarnation, host })
}

/// An engine that listens, with memory that everybody may read and write.
pub(crate) struct Target {
    pub(crate) engine: Engine<Own>,
    pub(crate) address: SocketAddr,
    pub(crate) memory: Region,
    pub(crate) token: RegionToken,
    stop: Stop,
}

impl Target {
    pub(crate) fn start(runtime: &Own, options: Options) -> Self {
        let engine = Engine::start(runtime.clone(), options).unwrap();
        let stop = Stop::new();
        let address = block_on(engine.listen("127.0.0.1:0".parse().unwrap(), &stop)).unwrap();
        let memory = engine.allocate_raw(LEN, Backing::Memfd, Rights::REMOTE_WRITE | Rights::REMOTE_READ).unwrap();
        let token = engine.expose(&memory).unwrap();
        Self { engine, address, memory, token, stop }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.stop.stop();
        block_on(self.engine.shut_down());
    }
}

/// What a child does: it is a target until its input ends. `true`: this process is one, and is done.
pub(crate) fn be_a_peer() -> bool {
    let Ok(node) = std::env::var(NODE) else { return false };
    let (node, incarnation) = node.split_once('.').unwrap();
    let target = Target::start(&Own::start().unwrap(), options(node.parse().unwrap(), incarnation.parse().unwrap()));
    let token: String = target.token.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nPEER {} {token}", target.address);
    std::io::stdin().lines().for_each(drop);
    std::process::exit(0);
}

/// A node in a process of its own.
pub(crate) struct Process {
    child: Child,
    _input: ChildStdin,
    pub(crate) address: SocketAddr,
    pub(crate) token: RegionToken,
}

impl Process {
    /// Runs the test `peer_process` of this binary, which must call [`be_a_peer`].
    pub(crate) fn start(node: u8, incarnation: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer_process", "--nocapture"])
            .env(NODE, format!("{node}.{incarnation}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = output.find_map(|line| line.unwrap().strip_prefix("PEER ").map(str::to_owned)).unwrap();
        let (address, token) = line.split_once(' ').unwrap();
        let bytes: Vec<u8> =
            (0..token.len()).step_by(2).map(|at| u8::from_str_radix(&token[at..at + 2], 16).unwrap()).collect();
        let token = RegionToken::read_from_bytes(&bytes).unwrap();
        Self { child, _input: input, address: address.parse().unwrap(), token }
    }

    /// Sends it. A peer that is to stop has stopped afterwards.
    pub(crate) fn signal(&self, signal: Signal) {
        let peer = Pid::from_child(&self.child);
        kill_process(peer, signal).unwrap();
        if signal == Signal::STOP {
            let (_, status) = waitpid(Some(peer), WaitOptions::UNTRACED).unwrap().unwrap();
            assert!(status.stopped(), "{status:?}");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A node, as it is written to from here.
pub(crate) struct Link {
    pub(crate) peer: Peer,
    pub(crate) remote: RemoteRegion,
}

pub(crate) fn link(here: &Engine<Own>, address: SocketAddr, token: &RegionToken) -> Link {
    let peer = block_on(here.open(address)).unwrap();
    let remote = here.attach(&peer, token).unwrap();
    Link { peer, remote }
}

/// `count` writes of `len` bytes each from the beginning of `source`, none beside the one before.
pub(crate) fn writes(mut batch: Batch, source: &Region, to: &Link, count: u64, len: u64) -> Batch {
    for at in 0..count {
        batch.push_write_raw(source, at * len, to.remote.extent((count - 1 - at) * len, len).unwrap());
    }
    batch
}

/// Waits until `via` carries a write.
pub(crate) fn warm(here: &Engine<Own>, source: &Region, to: &Link, via: Via) {
    let end = Instant::now() + Duration::from_secs(10);
    while !here.blocking().run(writes(Batch::new().via(via), source, to, 1, 64)).unwrap().is_done() {
        assert!(Instant::now() < end, "{via} does not come up");
    }
}

/// Says it at once, also from a test that is captured.
pub(crate) fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "{what}");
}
