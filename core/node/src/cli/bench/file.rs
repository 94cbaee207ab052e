//! `bench transfer --via file`: batches between memory and one file of this process, past the page cache where it can be.
//!
//! A piece is a slot of the file and the same slot of memory. Written, it goes from memory here into the file; read, the other
//! way; mixed, a third each: into the file, out of it, and from the memory of another process into it, all in one batch. Slots
//! are taken in a scattered order, each keeps its direction, and what came of every byte of file and memory is looked at in the
//! end. With `--fio` a row of `fio` follows: as many blocks of that length at a time at random places of the same file, by
//! io_uring and past the page cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millpond_core::batch::RegionToken;
use millpond_hal::backend::file::DEPTH;
use millpond_hal::bare::{self, FOOTPRINT_LEN, Meter, Mode, Point, Row};
use serde_json::Value as Json;
use zerocopy::FromBytes;

use super::child::{Answer, Ask, Process};
use super::pattern::{Run, fill, first_wrong};
use super::point::{Layout, Op};
use super::{Error, Rows};
use crate::engine::{
    Backing, Batch, Blocking, Engine, FileGrant, FileOptions, Options, Region, RemoteRegion, Rights, Status,
};
use crate::node;
use crate::runtime::{Runtime, blocking};

/// Batches per point, at least, however long they take; the first is before the clock starts.
const OPS_MIN: usize = 3;
/// From one slot to the next; a prime that is no divisor of any count of slots here but of itself and its multiples.
const STRIDE: u64 = 7919;
const NAME: &str = "target";

/// What is measured, and with what.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) points: Vec<Layout>,
    pub(super) time: Duration,
    pub(super) path: Option<PathBuf>,
    pub(super) with_fio: bool,
}

/// What the patterns at each place are made of.
const HERE: u64 = 1;
const THERE: u64 = 2;
const FILE: u64 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    IntoFile,
    OutOfFile,
    FromPeer,
}

/// The other process and everything that batches name.
struct Bench {
    process: Process,
    engine: Blocking,
    memory: Region,
    /// For looking at the file.
    scratch: Region,
    peer: RemoteRegion,
    file: RemoteRegion,
    path: PathBuf,
    _grant: FileGrant,
}

impl Drop for Bench {
    fn drop(&mut self) {
        // It was made by this measurement; who took it away meanwhile did the same.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A row for each point, and `fio`'s after it.
pub(super) async fn run<R: Runtime>(runtime: &R, wanted: Wanted, rows: &mut Rows<'_, '_>) -> Result<(), Error> {
    let engine = Engine::start(runtime.clone(), Options::new(node::identity("bench-initiator", None)?))?;
    let mut bench = Bench::new(runtime, &engine, wanted.path).await?;
    for layout in wanted.points {
        let time = wanted.time;
        let measured;
        (bench, measured) = blocking(runtime, move || {
            let ours = bench.measure(layout, time);
            let fio = wanted.with_fio.then(|| fio(&bench.path, layout, time));
            (bench, ours.and_then(|ours| Ok((ours, fio.transpose()?))))
        })
        .await;
        let (ours, fio) = measured?;
        rows.write(&ours, &[])?;
        fio.map_or(Ok(()), |row| rows.write(&row, &[]))?;
    }
    engine.shut_down().await;
    Ok(())
}

impl Bench {
    async fn new<R: Runtime>(runtime: &R, engine: &Engine<R>, path: Option<PathBuf>) -> Result<Self, Error> {
        let started = || Process::start(NAME, &["target".into(), "shm".into()]);
        let (process, address, token) = blocking(runtime, started).await?;
        let no_address = |error| Error::Child { name: NAME, source: std::io::Error::other(error) };
        let peer = engine.open(address.parse().map_err(no_address)?).await?;
        let token = RegionToken::read_from_bytes(&token).map_err(|_| process.unexpected(&Answer::Done))?;
        let peer = engine.attach(&peer, &token)?;
        let name = format!("millpond-bench-{}", std::process::id());
        let path = path.unwrap_or_else(|| std::env::temp_dir().join(name));
        let file = engine.open_file(&path, FileOptions::create(FOOTPRINT_LEN)).await?;
        eprintln!("{}: {:?}, by {:?}", path.display(), file.file().caching(), engine.files_driver());
        let both = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
        let grant = engine.grant_file(&file, &[(0, FOOTPRINT_LEN)], both)?;
        let file = engine.attach(&engine.itself(), &grant.token())?;
        let memory = || engine.allocate_raw(FOOTPRINT_LEN, Backing::Memfd, Rights::LOCAL);
        let (memory, scratch) = (memory()?, memory()?);
        let engine = engine.blocking();
        Ok(Self { process, engine, memory, scratch, peer, file, path, _grant: grant })
    }

    fn measure(&mut self, layout: Layout, time: Duration) -> Result<Row, Error> {
        self.prepare()?;
        let slots = slots(layout)?;
        let (mut latencies, mut batch, mut number) = (Vec::new(), Batch::new(), 0);
        batch = self.operation(layout, slots, number, batch)?;
        let (meter, child_s) = (Meter::start(), self.process.cpu_s()?);
        let started = Instant::now();
        let mut before = started;
        while latencies.len() < OPS_MIN || before - started < time {
            number += 1;
            batch = self.operation(layout, slots, number, batch)?;
            let now = Instant::now();
            latencies.push(u64::try_from((now - before).as_nanos()).unwrap_or(u64::MAX));
            before = now;
        }
        let measured_s = meter.own_s() + self.process.cpu_s()? - child_s;
        let other_cores = meter.other_cores(measured_s);
        self.compare(layout, slots, (number + 1) * layout.batch)?;
        let point = Point { mode: Mode::Spin, size: layout.size, batch: layout.batch, time };
        let gb = number as f64 * point.op_len() as f64 / 1e9;
        let span_s = (before - started).as_secs_f64();
        let row = bare::row("millpond-file", layout.op.name(), &point, number, span_s, &mut latencies);
        Ok(Row { cpu_s_per_gb: Some(measured_s / gb), other_cores, ..row })
    }

    /// Fills memory here, memory there, and the file; so every block was written before it is measured.
    fn prepare(&mut self) -> Result<(), Error> {
        fill(&self.memory, HERE).map_err(std::io::Error::other)?;
        match self.process.ask(&Ask::Fill { seed: THERE })? {
            Answer::Done => {}
            other => return Err(self.process.unexpected(&other)),
        }
        fill(&self.scratch, FILE).map_err(std::io::Error::other)?;
        let mut batch = Batch::new();
        batch.push_write_raw(&self.scratch, 0, self.file.whole());
        self.run(batch).map(drop)
    }

    /// One batch, from its making to its end.
    fn operation(&self, layout: Layout, slots: u64, number: u64, mut batch: Batch) -> Result<Batch, Error> {
        let outside = |error: crate::engine::OutOfBounds| Error::Point { what: error.to_string() };
        for index in 0..layout.batch {
            let slot = slot(number * layout.batch + index, slots);
            let offset = slot * layout.size;
            let there = self.file.extent(offset, layout.size).map_err(outside)?;
            match direction(layout.op, slot) {
                Direction::IntoFile => batch.push_write_raw(&self.memory, offset, there),
                Direction::OutOfFile => batch.push_read_raw(there, &self.memory, offset),
                Direction::FromPeer => batch.push_copy(self.peer.extent(offset, layout.size).map_err(outside)?, there),
            };
        }
        self.run(batch)
    }

    fn run(&self, batch: Batch) -> Result<Batch, Error> {
        let report = self.engine.run(batch).map_err(|error| Error::Submit(error.kind))?;
        let failed = report.outcomes().iter().find_map(|outcome| match &outcome.status {
            Status::Failed(failure) => Some(failure.clone()),
            _ => None,
        });
        failed.map_or_else(|| Ok(report.into_batch()), |failure| Err(Error::Batch(failure)))
    }

    /// Looks at every byte of the file and of memory here.
    fn compare(&self, layout: Layout, slots: u64, moved: u64) -> Result<(), Error> {
        let mut batch = Batch::new();
        batch.push_read_raw(self.file.whole(), &self.scratch, 0);
        self.run(batch)?;
        let (file, memory) = expected(layout, slots, moved);
        for (region, runs) in [(&self.scratch, file), (&self.memory, memory)] {
            if let Some(offset) = first_wrong(region, runs).map_err(std::io::Error::other)? {
                return Err(Error::WrongBytes { what: format!("{layout:?} with a file"), offset });
            }
        }
        Ok(())
    }
}

/// How many slots there are; for a mixed point as many of each direction.
fn slots(layout: Layout) -> Result<u64, Error> {
    let slots = FOOTPRINT_LEN / layout.size;
    let slots = if layout.op == Op::Mixed { slots / 3 * 3 } else { slots };
    if slots < layout.batch || layout.threads != 1 {
        let what = "a file is measured by one thread, with a batch that fits into 256 MiB; lower --threads or --batch";
        return Err(Error::Point { what: what.to_owned() });
    }
    Ok(slots)
}

/// The slot of a piece: each comes once before any comes twice.
fn slot(piece: u64, slots: u64) -> u64 {
    let (round, at) = (piece / slots, piece % slots);
    let stride = if slots.is_multiple_of(STRIDE) { 1 } else { STRIDE };
    (at * stride + round) % slots
}

fn direction(op: Op, slot: u64) -> Direction {
    match (op, slot % 3) {
        (Op::Write, _) | (Op::Mixed, 0) => Direction::IntoFile,
        (Op::Read, _) | (Op::Mixed, 1) => Direction::OutOfFile,
        (Op::Mixed, _) => Direction::FromPeer,
    }
}

/// What file and memory hold after so many pieces.
fn expected(layout: Layout, slots: u64, moved: u64) -> (Vec<Run>, Vec<Run>) {
    let mut is_moved = vec![false; usize::try_from(slots).unwrap_or(usize::MAX)];
    for piece in 0..moved.min(2 * slots) {
        is_moved[usize::try_from(slot(piece, slots)).unwrap_or(usize::MAX)] = true;
    }
    let (mut file, mut memory) = (Vec::new(), Vec::new());
    for (slot, is_moved) in (0..).zip(is_moved) {
        let (in_file, in_memory) = match direction(layout.op, slot) {
            _ if !is_moved => (FILE, HERE),
            Direction::IntoFile => (HERE, HERE),
            Direction::OutOfFile => (FILE, FILE),
            Direction::FromPeer => (THERE, HERE),
        };
        let run = |seed| Run { offset: slot * layout.size, len: layout.size, seed };
        file.push(run(in_file));
        memory.push(run(in_memory));
    }
    let offset = slots * layout.size;
    let rest = |seed| Run { offset, len: FOOTPRINT_LEN - offset, seed };
    file.push(rest(FILE));
    memory.push(rest(HERE));
    (file, memory)
}

/// What `fio` makes of the same file. What it writes there is of no meaning, and gone with the next point.
fn fio(path: &Path, layout: Layout, time: Duration) -> Result<Row, Error> {
    let failed = |source| Error::Child { name: "fio", source };
    let pattern = match layout.op {
        Op::Write => "randwrite",
        Op::Read => "randread",
        Op::Mixed => "randrw",
    };
    let (block, seconds) = (layout.size, time.as_secs_f64().max(0.1));
    let mut command = Command::new("fio");
    command
        .args(["--name=millpond", "--direct=1", "--ioengine=io_uring", "--norandommap", "--time_based"])
        .args(["--output-format=json", "--rwmixread=33", "--allow_file_create=0", &format!("--rw={pattern}")])
        .args([format!("--filename={}", path.display()), format!("--size={FOOTPRINT_LEN}"), format!("--bs={block}")])
        .args([format!("--iodepth={DEPTH}"), format!("--runtime={}ms", (seconds * 1e3).ceil())]);
    let output = command.stdin(Stdio::null()).output().map_err(failed)?;
    let unreadable = || {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        failed(std::io::Error::other(format!("it gave no figures: {said}")))
    };
    let figures: Json = serde_json::from_slice(&output.stdout).map_err(|_| unreadable())?;
    let job = &figures["jobs"][0];
    let sum = |key: &str| job["read"][key].as_f64().unwrap_or(0.0) + job["write"][key].as_f64().unwrap_or(0.0);
    let largest = |key: &str| {
        let of = |side: &str| job[side]["clat_ns"]["percentile"][key].as_f64().unwrap_or(0.0);
        of("read").max(of("write")) / 1e3
    };
    let millis = job["job_runtime"].as_f64().filter(|millis| *millis > 0.0).ok_or_else(unreadable)?;
    let (gbps, ops_s) = (sum("io_bytes") / millis / 1e6, sum("total_ios") / millis * 1e3);
    let (p50_us, p99_us) = (largest("50.000000"), largest("99.000000"));
    let (op, size) = (layout.op.name(), layout.size);
    let unknown = (None, None);
    let (cpu_s_per_gb, other_cores) = unknown;
    Ok(Row { peer: "fio", op, size, threads: 1, batch: 1, gbps, ops_s, p50_us, p99_us, cpu_s_per_gb, other_cores })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixed_batch_is_a_third_of_each_and_every_slot_comes_before_any_comes_again() {
        for size in [4096, 64 << 10, 100_000] {
            let layout = Layout { op: Op::Mixed, size, batch: 1000, threads: 1 };
            let slots = slots(layout).unwrap();
            let mut seen: Vec<u64> = (0..slots).map(|piece| slot(piece, slots)).collect();
            let of = |wanted| seen[..1000].iter().filter(|slot| direction(Op::Mixed, **slot) == wanted).count();
            for wanted in [Direction::IntoFile, Direction::OutOfFile, Direction::FromPeer] {
                assert!((333..=334).contains(&of(wanted)), "{size}: {} {wanted:?}", of(wanted));
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..slots));
            let (file, memory) = expected(layout, slots, 1000);
            let of = |runs: &[Run], seed| runs.iter().filter(|run| run.seed == seed).count();
            assert_eq!(of(&file, HERE) + of(&file, THERE) + of(&memory, FILE), 1000);
            assert_eq!(file.iter().map(|run| run.len).sum::<u64>(), FOOTPRINT_LEN);
        }
    }
}
