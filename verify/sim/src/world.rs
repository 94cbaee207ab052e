//! Engines on one thread, joined by a simulated network: who is there, and what can happen to them.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures::future::{BoxFuture, pending};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_hal::backend::sim::{Faults, Sim, SimNet};
use millpond_hal::contract::Device;
use millpond_node::engine::{Answered, Call, Engine, Options, Window, Wires};
use millpond_node::runtime::Runtime;
use parking_lot::Mutex;

use crate::virtual_time::{Random, Virtual};

/// A transfer is given up after so long without progress; shorter than in the field, since each seed lives through it.
pub(crate) const PROGRESS_DEADLINE: Duration = Duration::from_millis(400);
const CONNECT_DEADLINE: Duration = Duration::from_millis(90);

pub(crate) fn address(node: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1000 + u16::try_from(node).expect("few nodes")))
}

#[derive(Default)]
struct Members {
    engines: BTreeMap<usize, Engine<Virtual>>,
    /// Who the two ends of each pair of the network belong to.
    pairs: Vec<(usize, usize)>,
    /// Of a thousand dials, so many fail.
    dial_failures: u64,
}

/// The network as one node sees it.
#[derive(Clone)]
struct Cable {
    net: SimNet,
    members: Arc<Mutex<Members>>,
    runtime: Virtual,
    random: Arc<Mutex<Random>>,
    node: usize,
}

impl Wires for Cable {
    fn device(&self) -> Box<dyn Device> {
        Box::new(Sim::new())
    }

    fn dial(&self, call: Call) -> BoxFuture<'static, io::Result<Answered>> {
        let cable = self.clone();
        Box::pin(async move {
            let (span, chance) = {
                let mut random = cable.random.lock();
                (random.span(Duration::from_micros(300)), random.below(1000))
            };
            cable.runtime.sleep(span).await;
            let found = {
                let members = cable.members.lock();
                if chance < members.dial_failures {
                    return Err(io::ErrorKind::HostUnreachable.into());
                }
                let mut engines = members.engines.iter();
                engines.find(|(node, _)| address(**node) == call.to).map(|(node, engine)| (*node, engine.clone()))
            };
            let (node, engine) = found.ok_or(io::ErrorKind::ConnectionRefused)?;
            if cable.runtime.is_frozen(node) {
                return pending().await;
            }
            let (ours, theirs) = cable.net.pair();
            cable.members.lock().pairs.push((cable.node, node));
            engine.welcome(&call, theirs).map_err(io::Error::other)?;
            Ok(Answered { identity: engine.options().identity, connection: ours })
        })
    }
}

/// Engines and the network between them.
pub(crate) struct World {
    pub(crate) runtime: Virtual,
    pub(crate) net: SimNet,
    members: Arc<Mutex<Members>>,
    random: Arc<Mutex<Random>>,
    window: Window,
    incarnations: BTreeMap<usize, u64>,
}

impl World {
    pub(crate) fn new(seed: u64, window: Option<Window>) -> Self {
        let defaults = Options::new(identity(0, 1));
        Self {
            runtime: Virtual::new(seed),
            net: SimNet::new(seed, Faults::default()),
            members: Arc::default(),
            random: Arc::new(Mutex::new(Random::new(seed ^ 0x5bd1_e995))),
            window: window.unwrap_or(defaults.window),
            incarnations: BTreeMap::new(),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.runtime.now()
    }

    /// Starts a node, for the first time or again under its name.
    pub(crate) fn start(&mut self, node: usize) -> Engine<Virtual> {
        let incarnation = self.incarnations.entry(node).or_insert(0);
        *incarnation += 1;
        let mut options = Options::new(identity(node, *incarnation));
        options.progress_deadline = PROGRESS_DEADLINE;
        options.connect_deadline = CONNECT_DEADLINE;
        options.window = self.window;
        (options.transfers_max, options.peers_max) = (64, 64);
        let runtime = self.runtime.of_node(node);
        let (net, members, random) = (self.net.clone(), Arc::clone(&self.members), Arc::clone(&self.random));
        let cable = Cable { net, members, runtime: runtime.clone(), random, node };
        let engine = Engine::start_over(runtime, options, Arc::new(cable)).expect("an engine starts");
        self.members.lock().engines.insert(node, engine.clone());
        engine
    }

    pub(crate) fn engine(&self, node: usize) -> Option<Engine<Virtual>> {
        self.members.lock().engines.get(&node).cloned()
    }

    pub(crate) fn engines(&self) -> Vec<Engine<Virtual>> {
        self.members.lock().engines.values().cloned().collect()
    }

    fn pairs_of(&self, node: usize) -> Vec<usize> {
        let members = self.members.lock();
        let is_one = |(_, (one, other)): &(usize, &(usize, usize))| *one == node || *other == node;
        members.pairs.iter().enumerate().filter(is_one).map(|(pair, _)| pair).collect()
    }

    pub(crate) fn pairs(&self) -> usize {
        self.members.lock().pairs.len()
    }

    /// The node dies: what it sent and did not arrive never does, and what it had is nobody's. Gives what is left of it.
    pub(crate) fn kill(&mut self, node: usize) -> Option<Engine<Virtual>> {
        let dead = self.members.lock().engines.remove(&node)?;
        self.runtime.thaw(node);
        for pair in self.pairs_of(node) {
            self.net.kill(pair, self.now());
        }
        futures::executor::block_on(dead.shut_down());
        Some(dead)
    }

    /// The node stands still, as after SIGSTOP.
    pub(crate) fn freeze(&self, node: usize) {
        self.runtime.freeze(node);
    }

    pub(crate) fn set_faults(&self, faults: Faults) {
        self.net.set_faults(faults);
    }

    pub(crate) fn set_dial_failures(&self, of_thousand: u64) {
        self.members.lock().dial_failures = of_thousand;
    }

    /// Everything works from here on.
    pub(crate) fn heal(&self) {
        self.set_faults(Faults::default());
        self.set_dial_failures(0);
        for pair in 0..self.pairs() {
            self.net.resume(pair);
        }
        for node in self.members.lock().engines.keys() {
            self.runtime.thaw(*node);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let engines = std::mem::take(&mut self.members.lock().engines);
        drop(engines);
        self.runtime.clear();
    }
}

fn identity(node: usize, incarnation: u64) -> Identity {
    let name = u8::try_from(node + 1).expect("few nodes");
    Identity { node: [name; 16], incarnation, host: HostIdentity::UNKNOWN }
}
