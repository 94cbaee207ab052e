//! `bench store`: a client in this process, the values in others.
//!
//! The first store node hosts the directory. A put is of registered memory under a key that was never used; a get fills
//! registered memory of the caller; `exists` asks for keys of small values that are there. Every get is checked by the
//! client as for any user; at the end of a point the values are compared with what was put besides.

use std::time::{Duration as Span, Instant};

use futures::future::join_all;
use millpond_core::time::Duration;
use millpond_hal::bare::{self, FOOTPRINT_LEN, Meter, Mode, Point, Row};
use millpond_hal::region::{LeaseError, Region, RegionBuf, RegionBytes};

use super::bare::too_large;
use super::child::{Answer, Process, serve};
use super::point::Path;
use super::{Common, Error, Rows, pattern, replicas_field};
use crate::client::{Got, Options, Put, PutOptions, RemoveOptions, Source, StoreClient, Target};
use crate::directory::ShardConfig;
use crate::engine::{self, Backing, Engine, Via};
use crate::node::{self, Node};
use crate::runtime::{Runtime, Stop, blocking, start};
use crate::session;
use crate::store::{Place, StoreConfig, StoreRole};

/// Payload bytes of each store node.
const CAPACITY: u64 = 1 << 30;
/// Bytes and values that are put before the clock is stopped and everything is removed.
const ROUND_LEN: u64 = CAPACITY / 2;
const ROUND_VALUES_MAX: u64 = 100_000;
/// Different values, at least as many as one operation takes.
const VALUES: u64 = 32;
/// Keys of `exists`, and their values' length.
const KEYS: u64 = 2_000;
const SMALL_LEN: u64 = 64;
/// Operations per thread and point, at least, of which so many warm up.
const OPS_MIN: u64 = 20;
const WARM_OPS_MIN: u64 = 3;
/// Latencies kept per thread.
const SAMPLES_MAX: usize = 1 << 20;
/// Values put by one call before a point.
const LOAD_BATCH: u64 = 32;
/// How long nodes may take to join, and space to come back.
const SETTLE_SPAN_MAX: Duration = Duration::from_secs(10);
const SEED: u64 = 1;
const NAME: &str = "store";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The transport for values; a list gives rows for each.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tcp")]
    via: Vec<Path>,
    /// What is done; a list gives a row each. `exists` has no size.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "put,get")]
    op: Vec<Op>,
    /// Tasks that each run operations of their own; a list gives a row each.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: Vec<u32>,
    /// Store nodes, and copies of each value on them; a list gives rows for each.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4))]
    replicas: Vec<u32>,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Op {
    Put,
    Get,
    Exists,
}

/// The shape of one point.
#[derive(Clone, Copy, Debug)]
struct Shape {
    op: Op,
    size: u64,
    batch: u64,
    threads: u32,
    replicas: u32,
    time: Span,
}

impl Shape {
    fn op_len(&self) -> u64 {
        self.size * self.batch
    }

    /// Different values: those that one operation of each thread takes, and some more, as far as there is memory.
    fn values(&self) -> u64 {
        VALUES.max(self.batch).min(FOOTPRINT_LEN / self.size)
    }

    /// Operations of each task in one round: what is put must fit into the store.
    fn ops_max(&self) -> u64 {
        let ops = (ROUND_LEN / self.op_len()).min(ROUND_VALUES_MAX / self.batch) / u64::from(self.threads);
        if self.op == Op::Put { ops.max(1) } else { u64::MAX }
    }

    const fn name(&self) -> &'static str {
        match self.op {
            Op::Put => "put",
            Op::Get => "get",
            Op::Exists => "exists",
        }
    }
}

impl Args {
    fn points(&self) -> Result<Vec<Shape>, Error> {
        let mut points = Vec::new();
        let time = Span::from_secs_f64(self.common.seconds);
        for replicas in &self.replicas {
            for op in &self.op {
                for threads in &self.threads {
                    let mut seen = Vec::new();
                    for (size, batch) in self.common.shapes() {
                        let size = if *op == Op::Exists { SMALL_LEN } else { size };
                        let shape = Shape { op: *op, size, batch, threads: *threads, replicas: *replicas, time };
                        let all_len = shape.op_len() * u64::from(*threads);
                        if all_len > FOOTPRINT_LEN {
                            return Err(too_large(all_len));
                        }
                        // `exists` has no size: one row per batch.
                        if *op != Op::Exists || !seen.contains(&batch) {
                            points.push(shape);
                        }
                        seen.push(batch);
                    }
                }
            }
        }
        Ok(points)
    }
}

fn engine_options(name: &str, via: Via) -> Result<engine::Options, Error> {
    let mut options = engine::Options::new(node::identity(name, None)?);
    // The first lane to a peer is always one of TCP; values take the one that is named.
    options.transports = if via == Via::Tcp { vec![Via::Local, via] } else { vec![Via::Local, via, Via::Tcp] };
    Ok(options)
}

/// The other process: a store node, the first one with the directory.
pub(super) async fn node<R: Runtime>(
    runtime: &R,
    via: Path,
    name: &str,
    directory: Option<String>,
) -> Result<(), Error> {
    let options = engine_options(name, via.via())?;
    let node = Node::new(runtime.clone(), node::Options::new(options.identity));
    let engine = Engine::start(runtime.clone(), options)?;
    let place = match directory {
        Some(address) => Place::At(node.client(target(&address)?)),
        None => Place::Here(ShardConfig { is_first: true, ..ShardConfig::default() }),
    };
    let role = StoreRole::start(engine.clone(), place, StoreConfig { capacity: CAPACITY, ..StoreConfig::default() })?;
    let store = role.store().clone();
    blocking(runtime, move || store.populate()).await;
    let address = node.open_with(role.router(), &engine).await?.to_string();
    let stop = Stop::new();
    runtime.spawn(role.run(address.clone(), stop.clone()));
    let served = blocking(runtime, move || serve(&Answer::Ready { address, token: Vec::new() }, |_| Ok(Answer::Done)));
    served.await
}

fn target(address: &str) -> Result<session::Target, Error> {
    session::Target::parse(address).map_err(|error| Error::Child { name: NAME, source: std::io::Error::other(error) })
}

/// The store nodes of one set of points, and a client of them.
struct Bench<R: Runtime> {
    runtime: R,
    path: Path,
    nodes: Vec<Process>,
    client: StoreClient<R>,
    /// The values: pattern of `SEED`, one after the other.
    values: RegionBytes,
    targets: Region,
    /// Keys used so far: they are never used again.
    keys: u64,
}

pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, rows: &mut Rows<'_, '_>) -> Result<(), Error> {
    let points = args.points()?;
    if args.via.contains(&Path::File) {
        let what = "values travel over tcp or shm; --via file is for `bench transfer`".to_owned();
        return Err(Error::Point { what });
    }
    for path in &args.via {
        for replicas in &args.replicas {
            let mut bench = Bench::start(runtime, *path, *replicas).await?;
            for shape in points.iter().filter(|shape| shape.replicas == *replicas) {
                let row = bench.measure(*shape).await?;
                rows.write(&row, &replicas_field(*replicas))?;
            }
            bench.client.engine().shut_down().await;
        }
    }
    Ok(())
}

/// How long a round may go on.
#[derive(Clone, Copy, Debug)]
struct Limit {
    ops_min: u64,
    ops_max: u64,
    time: Span,
}

/// What the tasks of a round, or of several, did.
struct Taken {
    ops: u64,
    latencies: Vec<u64>,
    elapsed: Span,
    /// CPU seconds of all processes of the measurement.
    measured_s: f64,
    /// Core seconds of all others.
    others_s: f64,
}

impl<R: Runtime> Bench<R> {
    async fn start(runtime: &R, path: Path, replicas: u32) -> Result<Self, Error> {
        let mut nodes = Vec::new();
        let mut directory: Option<String> = None;
        for number in 0..replicas {
            let mut role = vec!["store".to_owned(), path.name().into(), format!("bench-store-{number}")];
            role.extend(directory.clone());
            let (process, address, _) = blocking(runtime, move || Process::start(NAME, &role)).await?;
            directory.get_or_insert(address);
            nodes.push(process);
        }
        let options = engine_options("bench-client", path.via())?;
        let node = Node::new(runtime.clone(), node::Options::new(options.identity));
        let engine = Engine::start(runtime.clone(), options)?;
        let mut sources = engine.allocate(FOOTPRINT_LEN, Backing::Memfd)?.carve(0, FOOTPRINT_LEN).map_err(no_lease)?;
        pattern::write(SEED, 0, &mut sources);
        let targets = engine.allocate(FOOTPRINT_LEN, Backing::Memfd)?;
        let options = Options { via: path.via(), ..Options::default() };
        let client = StoreClient::connect(&node, engine, target(&directory.unwrap_or_default())?, options)?;
        let (runtime, values) = (runtime.clone(), sources.freeze());
        let bench = Self { runtime, path, nodes, client, values, targets, keys: 0 };
        bench.settle(|owners, _| owners == replicas as usize).await?;
        Ok(bench)
    }

    /// Waits until the directory's view of nodes and their free bytes is as wanted.
    async fn settle(&self, is_settled: impl Fn(usize, u64) -> bool) -> Result<(), Error> {
        let deadline = self.runtime.now() + SETTLE_SPAN_MAX;
        loop {
            let view = self.client.view().await?;
            let (owners, free) = (view.len(), view.iter().map(|owner| owner.free()).min().unwrap_or(0));
            if is_settled(owners, free) {
                return Ok(());
            }
            if self.runtime.now() > deadline {
                let why = format!("{owners} nodes joined, and {free} bytes are free, after {SETTLE_SPAN_MAX}");
                return Err(Error::Refused { op: "settle", why });
            }
            self.runtime.sleep(Duration::from_millis(5)).await;
        }
    }

    async fn wipe(&self) -> Result<(), Error> {
        self.client.remove_prefix(b"", RemoveOptions { force: true }).await?;
        self.settle(|_, free| free >= CAPACITY / 10 * 9).await
    }

    fn cpu_s(&mut self) -> Result<f64, Error> {
        self.nodes.iter_mut().map(Process::cpu_s).sum()
    }

    /// A task's view of a point; keys from `first` on are its point's.
    fn worker(&self, shape: Shape, first: u64) -> Worker<R> {
        Worker { client: self.client.clone(), values: self.values.clone(), shape, first, preloaded: 0, thread: 0 }
    }

    async fn measure(&mut self, shape: Shape) -> Result<Row, Error> {
        let preloaded = match shape.op {
            Op::Put => 0,
            Op::Get => shape.values(),
            Op::Exists => KEYS.max(shape.batch),
        };
        let first = self.keys;
        self.keys += preloaded;
        let loader = self.worker(Shape { op: Op::Put, ..shape }, first);
        for batch in 0..preloaded.div_ceil(LOAD_BATCH) {
            loader.put(batch * LOAD_BATCH..((batch + 1) * LOAD_BATCH).min(preloaded)).await?;
        }
        let worker = Worker { preloaded, ..loader }.doing(shape.op);
        // Until the clock starts, then rounds: it stands still while what was put is removed.
        self.round(&worker, Limit { ops_min: WARM_OPS_MIN, ops_max: shape.ops_max(), time: shape.time / 10 }).await?;
        let mut all: Option<Taken> = None;
        // Ends: each round takes at least one operation, and time.
        loop {
            let (ops, elapsed) = all.as_ref().map_or((0, Span::ZERO), |all| (all.latencies.len(), all.elapsed));
            if elapsed >= shape.time && ops as u64 >= OPS_MIN {
                break;
            }
            let time = shape.time.saturating_sub(elapsed);
            let limit = Limit { ops_min: OPS_MIN.saturating_sub(ops as u64), ops_max: shape.ops_max(), time };
            let taken = self.round(&worker, limit).await?;
            all = Some(match all {
                Some(before) => before.and(taken),
                None => taken,
            });
        }
        if preloaded > 0 {
            self.wipe().await?;
        }
        Ok(all.map_or_else(|| unreachable!("the first round always runs"), |all| self.row(shape, all)))
    }

    fn row(&self, shape: Shape, mut taken: Taken) -> Row {
        let point = Point { mode: Mode::Spin, size: shape.size, batch: shape.batch, time: shape.time };
        let peer = match self.path {
            Path::Shm => "millpond-store-shm",
            _ => "millpond-store-tcp",
        };
        let span_s = taken.elapsed.as_secs_f64();
        let row = bare::row(peer, shape.name(), &point, taken.ops, span_s, &mut taken.latencies);
        let row = Row { threads: shape.threads, other_cores: Some(taken.others_s / span_s), ..row };
        if shape.op == Op::Exists {
            return Row { size: 0, gbps: 0.0, ..row };
        }
        let gb = taken.ops as f64 * shape.op_len() as f64 / 1e9;
        Row { cpu_s_per_gb: Some(taken.measured_s / gb), ..row }
    }

    /// Lets every task work until its limit, then looks at the values, and removes what was put.
    async fn round(&mut self, worker: &Worker<R>, limit: Limit) -> Result<Taken, Error> {
        let shape = worker.shape;
        let is_put = shape.op == Op::Put;
        let (meter, nodes_s) = (Meter::start(), self.cpu_s()?);
        let mut tasks = Vec::new();
        for thread in 0..shape.threads {
            let mut worker = Worker { thread, ..worker.clone() };
            if is_put {
                worker.first = self.keys;
                self.keys += limit.ops_max * shape.batch;
            }
            let buffers = self.buffers(shape, thread)?;
            tasks.push(start(&self.runtime, worker.work(limit, buffers)));
        }
        let done = join_all(tasks).await.into_iter().collect::<Result<Vec<Done<R>>, Error>>()?;
        let measured_s = meter.own_s() + self.cpu_s()? - nodes_s;
        let others = meter.other_cores(measured_s).unwrap_or(0.0);
        let begun = done.iter().map(|done| done.begun).min().unwrap_or_else(Instant::now);
        let elapsed = done.iter().map(|done| done.ended - begun).max().unwrap_or_default();
        for done in &done {
            done.worker.compare(done.ops, &done.buffers).await?;
        }
        if is_put {
            self.wipe().await?;
        }
        Ok(Taken {
            ops: done.iter().map(|done| done.ops).sum(),
            latencies: done.into_iter().flat_map(|done| done.latencies).collect(),
            elapsed,
            measured_s,
            others_s: others * elapsed.as_secs_f64(),
        })
    }

    /// Memory for what a task gets.
    fn buffers(&self, shape: Shape, thread: u32) -> Result<Vec<RegionBuf>, Error> {
        if shape.op != Op::Get {
            return Ok(Vec::new());
        }
        let first = u64::from(thread) * shape.batch;
        let carved = (first..first + shape.batch).map(|number| self.targets.carve(number * shape.size, shape.size));
        carved.collect::<Result<_, _>>().map_err(no_lease)
    }
}

impl Taken {
    fn and(mut self, next: Self) -> Self {
        self.latencies.extend(next.latencies);
        Self {
            ops: self.ops + next.ops,
            latencies: self.latencies,
            elapsed: self.elapsed + next.elapsed,
            measured_s: self.measured_s + next.measured_s,
            others_s: self.others_s + next.others_s,
        }
    }
}

/// One task of a point.
#[derive(Clone)]
struct Worker<R: Runtime> {
    client: StoreClient<R>,
    values: RegionBytes,
    shape: Shape,
    /// Number of its first key; key and value of a number belong together.
    first: u64,
    /// Values that are there from the start; 0 if it puts.
    preloaded: u64,
    thread: u32,
}

/// A task that ended.
struct Done<R: Runtime> {
    worker: Worker<R>,
    ops: u64,
    latencies: Vec<u64>,
    buffers: Vec<RegionBuf>,
    begun: Instant,
    ended: Instant,
}

impl<R: Runtime> Worker<R> {
    fn doing(mut self, op: Op) -> Self {
        self.shape.op = op;
        self
    }

    fn key(&self, number: u64) -> Vec<u8> {
        format!("bench-{:012}", self.first + number).into_bytes()
    }

    fn value(&self, number: u64) -> RegionBytes {
        let slot = (self.first + number) % self.shape.values();
        // Within the footprint: that many values fit.
        let len = usize::try_from(self.shape.size).unwrap_or(0);
        let at = usize::try_from(slot).unwrap_or(0) * len;
        self.values.slice(at..at + len)
    }

    /// The numbers that an operation takes: new ones for a put, the same ones in turn otherwise.
    fn numbers(&self, op: u64) -> std::ops::Range<u64> {
        let batch = self.shape.batch;
        if self.preloaded == 0 {
            return op * batch..(op + 1) * batch;
        }
        let turns = self.preloaded / batch;
        let turn = (op + u64::from(self.thread)) % turns;
        turn * batch..(turn + 1) * batch
    }

    async fn work(self, limit: Limit, mut buffers: Vec<RegionBuf>) -> Result<Done<R>, Error> {
        let mut latencies = Vec::new();
        let begun = Instant::now();
        let (mut ops, mut before) = (0, begun);
        while ops < limit.ops_max && (ops < limit.ops_min || before - begun < limit.time) {
            match self.shape.op {
                Op::Put => self.put(self.numbers(ops)).await?,
                Op::Get => buffers = self.get(self.numbers(ops), buffers).await?,
                Op::Exists => self.exists(self.numbers(ops)).await?,
            }
            ops += 1;
            let now = Instant::now();
            if latencies.len() < SAMPLES_MAX {
                latencies.push(u64::try_from((now - before).as_nanos()).unwrap_or(u64::MAX));
            }
            before = now;
        }
        Ok(Done { worker: self, ops, latencies, buffers, begun, ended: before })
    }

    async fn put(&self, numbers: std::ops::Range<u64>) -> Result<(), Error> {
        let items: Vec<(Vec<u8>, Source)> =
            numbers.map(|number| (self.key(number), Source::Region(self.value(number)))).collect();
        let options = PutOptions { replicas: self.shape.replicas, ..PutOptions::default() };
        for put in self.client.put_batch(items, &options).await {
            match put? {
                Put::Stored(receipt) if receipt.copies_missing == 0 => {}
                other => return Err(Error::Refused { op: "put", why: format!("{other:?}") }),
            }
        }
        Ok(())
    }

    async fn get(&self, numbers: std::ops::Range<u64>, buffers: Vec<RegionBuf>) -> Result<Vec<RegionBuf>, Error> {
        let items = numbers.map(|number| self.key(number)).zip(buffers.into_iter().map(Target::Into)).collect();
        let mut filled = Vec::new();
        for got in self.client.get_batch(items).await {
            match got? {
                Got::Hit(value) => filled.extend(value.into_buffer()),
                Got::Miss { reason, .. } => {
                    return Err(Error::Refused { op: "get", why: format!("it misses a value: {reason:?}") });
                }
            }
        }
        Ok(filled)
    }

    async fn exists(&self, numbers: std::ops::Range<u64>) -> Result<(), Error> {
        let keys: Vec<Vec<u8>> = numbers.map(|number| self.key(number)).collect();
        if self.client.exists(&keys).await?.iter().all(|is_there| *is_there) {
            return Ok(());
        }
        Err(Error::Refused { op: "exists", why: "it misses a key that was put".to_owned() })
    }

    /// Looks at what the last operation got, or at what the last ones put.
    async fn compare(&self, ops: u64, buffers: &[RegionBuf]) -> Result<(), Error> {
        let wrong = |number: u64, found: &[u8]| {
            let wanted = self.value(number);
            let at = found.iter().zip(wanted.iter()).position(|(found, wanted)| found != wanted);
            let at = at.or((found.len() != wanted.len()).then_some(found.len()));
            at.map_or(Ok(()), |at| Err(Error::WrongBytes { what: format!("{:?}", self.shape), offset: at as u64 }))
        };
        let last = self.numbers(ops.saturating_sub(1));
        for (number, buffer) in last.clone().zip(buffers) {
            wrong(number, buffer)?;
        }
        let numbers = match self.shape.op {
            Op::Put => last.end.saturating_sub(VALUES.max(self.shape.batch))..last.end,
            Op::Get => 0..self.preloaded,
            Op::Exists => 0..0,
        };
        for number in numbers {
            match self.client.get(&self.key(number)).await? {
                Got::Hit(value) => wrong(number, &value)?,
                Got::Miss { reason, .. } => {
                    return Err(Error::Refused { op: "keep a value", why: format!("{reason:?}") });
                }
            }
        }
        Ok(())
    }
}

fn no_lease(error: LeaseError) -> Error {
    Error::Point { what: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(op: Vec<Op>, size: Vec<u64>, batch: Vec<u64>, threads: u32) -> Args {
        let common = Common { size, batch, seconds: 0.1 };
        Args { via: vec![Path::Tcp], op, threads: vec![threads], replicas: vec![1, 2], common }
    }

    #[test]
    fn exists_has_no_size_so_it_gives_a_row_per_batch() {
        let points = args(vec![Op::Put, Op::Exists], vec![4096, 1 << 20], vec![1, 16], 1).points().unwrap();
        let count = |op| points.iter().filter(|shape| shape.op == op).count();
        assert_eq!((count(Op::Put), count(Op::Exists)), (8, 4));
    }

    #[test]
    fn operations_of_all_tasks_fit_the_memory() {
        assert!(args(vec![Op::Get], vec![16 << 20], vec![8], 4).points().unwrap_err().to_string().contains("512 MiB"));
        for shape in args(vec![Op::Put, Op::Get], vec![1, 4096, 64 << 20], vec![1, 4], 1).points().unwrap() {
            assert!(shape.values() >= shape.batch && shape.values() * shape.size <= FOOTPRINT_LEN);
            assert!(shape.op == Op::Get || shape.ops_max() * shape.op_len() <= ROUND_LEN);
        }
    }
}
