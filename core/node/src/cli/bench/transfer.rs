//! `bench transfer`: the engine between two processes, driven by the threads that wait for it.
//!
//! The initiator opens the target as a peer, attaches its memory, and runs one batch after the other with the blocking
//! handle. Both regions are raw and exposed once, as a user with long-lived KV memory would do.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use millpond_core::batch::RegionToken;
use millpond_hal::bare::{self, FOOTPRINT_LEN, Meter, Mode, Point, Row};
use zerocopy::{FromBytes, IntoBytes};

use super::super::cluster::TlsArgs;
use super::child::{Answer, Ask, Process, serve};
use super::pattern::{fill, first_wrong};
use super::point::{Layout, Op, Path, Seeds, Side};
use super::{Common, Error, Rows, file};
use crate::engine::{Backing, Batch, Blocking, Engine, Options, Region, RemoteRegion, Rights, Status, Via};
use crate::node;
use crate::runtime::{Runtime, Stop, blocking};

/// Operations per thread and point, at least, however long they take.
const OPS_MIN: usize = 20;
/// Of those, before the clock starts.
const WARM_OPS_MIN: u64 = 3;
/// Latencies kept per thread.
const SAMPLES_MAX: usize = 1 << 20;
const NAME: &str = "target";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The transport; a list gives rows for each.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tcp")]
    via: Vec<Path>,
    /// Which way bytes go, seen from the initiator; a list gives a row each.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "write")]
    op: Vec<Op>,
    /// Threads that each run operations of their own; a list gives a row each.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: Vec<u32>,
    /// The file of `--via file`: made for it, and removed at the end. Default: in the folder of temporary files.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// A row of `fio` on the same file after each of `--via file`.
    #[arg(long)]
    fio: bool,
    /// Under TLS, over tcp.
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    pub(super) common: Common,
}

impl Args {
    pub(super) fn points(&self) -> Result<Vec<Layout>, Error> {
        let mut points = Vec::new();
        for op in &self.op {
            for threads in &self.threads {
                for (size, batch) in self.common.shapes() {
                    points.push(Layout { op: *op, size, batch, threads: *threads }.checked()?);
                }
            }
        }
        Ok(points)
    }
}

fn engine<R: Runtime>(runtime: &R, name: &str, via: Via, tls: &TlsArgs) -> Result<Engine<R>, Error> {
    let mut options = Options::new(node::identity(name, None)?);
    options.tls = tls.load()?;
    // The first lane to a peer is always one of TCP; values take the one that is named.
    options.transports = if via == Via::Tcp { vec![Via::Local, via] } else { vec![Via::Local, via, Via::Tcp] };
    Ok(Engine::start(runtime.clone(), options)?)
}

/// The other process: lends its memory and looks at it when asked.
pub(super) async fn target<R: Runtime>(runtime: &R, via: Path, tls: &TlsArgs) -> Result<(), Error> {
    let engine = engine(runtime, "bench-target", via.via(), tls)?;
    let rights = Rights::LOCAL | Rights::REMOTE_READ | Rights::REMOTE_WRITE;
    let region = engine.allocate_raw(FOOTPRINT_LEN, Backing::Memfd, rights)?;
    let token = engine.expose(&region)?.as_bytes().to_vec();
    let stop = Stop::new();
    let address = engine.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &stop).await?.to_string();
    blocking(runtime, move || serve(&Answer::Ready { address, token }, |ask| answer(&region, ask))).await
}

fn answer(region: &Region, ask: Ask) -> Result<Answer, Error> {
    match ask {
        Ask::Fill { seed } => {
            fill(region, seed).map_err(std::io::Error::other)?;
            Ok(Answer::Done)
        }
        Ask::Compare { layout, moved, initiator_seed, target_seed } => {
            let seeds = Seeds { initiator: initiator_seed, target: target_seed };
            let offset =
                first_wrong(region, layout.runs(Side::Target, &moved, seeds)).map_err(std::io::Error::other)?;
            Ok(Answer::Wrong { offset })
        }
        Ask::Cpu => Ok(Answer::Done),
    }
}

pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, rows: &mut Rows<'_, '_>) -> Result<(), Error> {
    let points = args.points()?;
    let time = Duration::from_secs_f64(args.common.seconds);
    for path in args.via {
        if path == Path::File {
            let (points, path, with_fio) = (points.clone(), args.file.clone(), args.fio);
            file::run(runtime, file::Wanted { points, time, path, with_fio }, rows).await?;
            continue;
        }
        let mut role = vec!["target".to_owned(), path.name().to_owned()];
        role.extend(args.tls.as_args());
        let (process, address, token) = blocking(runtime, move || Process::start(NAME, &role)).await?;
        let no_address = |error| Error::Child { name: NAME, source: std::io::Error::other(error) };
        let engine = engine(runtime, "bench-initiator", path.via(), &args.tls)?;
        let peer = engine.open(address.parse().map_err(no_address)?).await?;
        let token = RegionToken::read_from_bytes(&token).map_err(|_| process.unexpected(&Answer::Done))?;
        let remote = engine.attach(&peer, &token)?;
        let region = engine.allocate_raw(FOOTPRINT_LEN, Backing::Memfd, Rights::LOCAL)?;
        let peer = match path {
            Path::Shm => "millpond-shm",
            _ if engine.options().tls.is_some() => "millpond-tls",
            _ => "millpond-tcp",
        };
        let initiator = Initiator { peer, via: path.via(), engine: engine.blocking(), region, remote, time };
        let mut bench = Bench { process, initiator };
        for (number, layout) in (1u64..).zip(points.iter().copied()) {
            let row;
            (bench, row) = blocking(runtime, move || {
                let row = bench.measure(layout, number);
                (bench, row)
            })
            .await;
            rows.write(&row?, &[])?;
        }
        engine.shut_down().await;
    }
    Ok(())
}

/// Both ends of a measurement.
struct Bench {
    process: Process,
    initiator: Initiator,
}

/// What the threads of the initiator share.
struct Initiator {
    /// Whose rows they are.
    peer: &'static str,
    via: Via,
    engine: Blocking,
    region: Region,
    remote: RemoteRegion,
    time: Duration,
}

/// What one thread did.
#[derive(Default)]
struct Taken {
    ops: u64,
    measured: u64,
    latencies: Vec<u64>,
    end: Option<Instant>,
}

impl Bench {
    fn measure(&mut self, layout: Layout, number: u64) -> Result<Row, Error> {
        let seeds = Seeds { initiator: 2 * number, target: 2 * number + 1 };
        fill(&self.initiator.region, seeds.initiator).map_err(std::io::Error::other)?;
        match self.process.ask(&Ask::Fill { seed: seeds.target })? {
            Answer::Done => {}
            other => return Err(self.process.unexpected(&other)),
        }
        let (meter, child_s) = (Meter::start(), self.process.cpu_s()?);
        let (started, taken) = self.initiator.threads(layout)?;
        let measured_s = meter.own_s() + self.process.cpu_s()? - child_s;
        let other_cores = meter.other_cores(measured_s);
        self.compare(layout, seeds, &taken)?;

        let ended = taken.iter().filter_map(|taken| taken.end).max().unwrap_or(started);
        let ops = taken.iter().map(|taken| taken.measured).sum();
        let mut latencies: Vec<u64> = taken.iter().flat_map(|taken| &taken.latencies).copied().collect();
        let point = Point { mode: Mode::Spin, size: layout.size, batch: layout.batch, time: self.initiator.time };
        let row = bare::row(
            self.initiator.peer,
            layout.op.name(),
            &point,
            ops,
            (ended - started).as_secs_f64(),
            &mut latencies,
        );
        let gb = taken.iter().map(|taken| taken.ops).sum::<u64>() as f64 * point.op_len() as f64 / 1e9;
        Ok(Row { threads: layout.threads, cpu_s_per_gb: Some(measured_s / gb), other_cores, ..row })
    }

    /// Looks at every byte of both sides.
    fn compare(&mut self, layout: Layout, seeds: Seeds, taken: &[Taken]) -> Result<(), Error> {
        let moved: Vec<u64> = taken.iter().map(|taken| taken.ops * layout.batch).collect();
        let here = layout.runs(Side::Initiator, &moved, seeds);
        let mut wrong = first_wrong(&self.initiator.region, here).map_err(std::io::Error::other)?;
        if wrong.is_none() {
            let Seeds { initiator: initiator_seed, target: target_seed } = seeds;
            wrong = match self.process.ask(&Ask::Compare { layout, moved, initiator_seed, target_seed })? {
                Answer::Wrong { offset } => offset,
                other => return Err(self.process.unexpected(&other)),
            };
        }
        match wrong {
            None => Ok(()),
            Some(offset) => Err(Error::WrongBytes { what: format!("{layout:?} over {}", self.initiator.via), offset }),
        }
    }
}

impl Initiator {
    /// Runs the point's threads. Gives when they started together, and what each did.
    fn threads(&self, layout: Layout) -> Result<(Instant, Vec<Taken>), Error> {
        let barrier = Barrier::new(layout.threads as usize);
        let results: Vec<Result<(Instant, Taken), Error>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..layout.threads)
                .map(|thread| {
                    scope.spawn({
                        let barrier = &barrier;
                        move || self.thread(layout, thread, barrier)
                    })
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().map(join).collect()
        });
        let all = results.into_iter().collect::<Result<Vec<_>, _>>()?;
        let started = all.iter().map(|(started, _)| *started).min().unwrap_or_else(Instant::now);
        Ok((started, all.into_iter().map(|(_, taken)| taken).collect()))
    }

    fn thread(&self, layout: Layout, thread: u32, barrier: &Barrier) -> Result<(Instant, Taken), Error> {
        let mut taken = Taken { latencies: Vec::with_capacity(SAMPLES_MAX), ..Taken::default() };
        let mut batch = Batch::new().via(self.via);
        let warm_until = Instant::now() + self.time / 10;
        let mut warm = Ok(());
        while warm.is_ok() && (taken.ops < WARM_OPS_MIN || Instant::now() < warm_until) {
            warm = self.operation(layout, thread, taken.ops, &mut batch);
            taken.ops += 1;
        }
        barrier.wait();
        warm?;
        let started = Instant::now();
        let mut before = started;
        while taken.latencies.len() < OPS_MIN || before - started < self.time {
            self.operation(layout, thread, taken.ops, &mut batch)?;
            taken.ops += 1;
            taken.measured += 1;
            let now = Instant::now();
            if taken.latencies.len() < SAMPLES_MAX {
                taken.latencies.push(u64::try_from((now - before).as_nanos()).unwrap_or(u64::MAX));
            }
            before = now;
        }
        taken.end = Some(before);
        Ok((started, taken))
    }

    /// One batch, from its making to its end.
    fn operation(&self, layout: Layout, thread: u32, number: u64, batch: &mut Batch) -> Result<(), Error> {
        let outside = |error: crate::engine::OutOfBounds| Error::Point { what: error.to_string() };
        let mut filled = std::mem::take(batch);
        for index in 0..layout.batch {
            let piece = layout.piece(thread, number, index);
            let there = self.remote.extent(piece.offset, layout.size).map_err(outside)?;
            if piece.is_write {
                filled.push_write_raw(&self.region, piece.offset, there);
            } else {
                filled.push_read_raw(there, &self.region, piece.offset);
            }
        }
        let report = self.engine.run(filled).map_err(|error| Error::Submit(error.kind))?;
        if let Some(Status::Failed(failure)) =
            report.outcomes().iter().map(|outcome| &outcome.status).find(|status| **status != Status::Done)
        {
            return Err(Error::Batch(failure.clone()));
        }
        *batch = report.into_batch();
        Ok(())
    }
}
