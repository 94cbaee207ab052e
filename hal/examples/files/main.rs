//! One batch of 1,000 moves, half of them into a file and half out of it, beside `fio` on the same file.
//!
//! `cargo run --release -p millpond-hal --example files -- [FILE] [BLOCK_KIB] [ROUNDS]` (default: a file in the temporary
//! folder, 64 KiB, 7 rounds). Each round runs both, one after the other; the medians are compared. What is moved is checked
//! by CRC-32C, outside of the time. `fio` moves as many blocks of the same length at random places of the same file, as many
//! at a time, by io_uring and past the page cache; without it the comparison is left out, and said so.

use std::path::PathBuf;
use std::time::Instant as Clock;

use crc_fast::{CrcAlgorithm, checksum};
use millpond_core::batch::{Extent, RegionId, Rights};
use millpond_core::time::Instant;
use millpond_hal::backend::file::{DEPTH, FileDevice, FileDeviceOptions};
use millpond_hal::contract::{Connection, LinkId, Turn};
use millpond_hal::fabric::{Batch, Completion, Fabric, FabricOptions, FabricWake, LinkOptions, PostOptions, Request};
use millpond_hal::file::{FileOptions, OpenFile};
use millpond_hal::region::Region;

mod fio;

const MOVES: u64 = 1000;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let path = args.next().map_or_else(|| std::env::temp_dir().join("millpond-files-example"), PathBuf::from);
    let block = args.next().map_or(Ok(64), |kib| kib.parse::<u64>())? << 10;
    let rounds = args.next().map_or(Ok(7), |rounds| rounds.parse::<usize>())?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let _ = std::fs::remove_file(&path);
        let mut bench = Bench::new(&path, block)?;
        // Before anything is measured every block was written once, so that both overwrite.
        bench.fill(round as u64)?;
        ours.push(bench.round(round as u64)?);
        drop(bench);
        theirs.extend(fio::bytes_per_second(&path, block, MOVES, 50));
    }
    std::fs::remove_file(&path)?;
    let ours = fio::median(&mut ours);
    println!("{MOVES} moves of {} KiB, half writes, {DEPTH} at a time, medians of {rounds}:", block >> 10);
    println!("millpond {:.0} MB/s", ours / 1e6);
    if theirs.is_empty() {
        println!("SKIPPED: no comparison, `fio` is not installed or failed");
    } else {
        let theirs = fio::median(&mut theirs);
        println!("fio      {:.0} MB/s\nratio    {:.2}", theirs / 1e6, ours / theirs);
    }
    Ok(())
}

struct Bench {
    fabric: Fabric,
    link: LinkId,
    there: RegionId,
    region: Region,
    block: u64,
    clock: Clock,
}

impl Bench {
    /// A new file of `2 * MOVES` blocks, and memory for `MOVES` of them.
    fn new(path: &std::path::Path, block: u64) -> Result<Self, Failure> {
        let mut fabric = Fabric::new(FabricOptions::new([7; 32]))?;
        let device = FileDevice::new(FileDeviceOptions::default())?;
        let driver = device.driver();
        let device = fabric.add_device(Box::new(device))?;
        let link = fabric.open(Instant::ZERO, device, Connection::Loopback, LinkOptions::default())?;
        let file = fabric.add_file(OpenFile::open(path, FileOptions::create(2 * MOVES * block))?)?;
        eprintln!("by {}, {:?}", driver.name, file.file().caching());
        let grant = fabric.grant_file(&file, &[(0, file.len())], Rights::REMOTE_READ | Rights::REMOTE_WRITE)?;
        let there = fabric.attach(grant.token())?;
        // The file is this program's to the end.
        std::mem::forget(grant);
        let region = fabric.allocate(MOVES * block, Default::default())?;
        region.populate(0, region.len())?;
        Ok(Self { fabric, link, there, region, block, clock: Clock::now() })
    }

    fn run(&mut self, batch: Batch) -> Result<Completion, Failure> {
        let now = |clock: &Clock| Instant::from_nanos(u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let ticket = self.fabric.post(now(&self.clock), self.link, batch, PostOptions::default())?;
        while !self.fabric.is_finished(&ticket) {
            if self.fabric.poll(now(&self.clock)) == Turn::Idle
                && let FabricWake::Within(_) = self.fabric.arm(now(&self.clock))
            {
                let fd = self.fabric.wake_fd();
                rustix::event::poll(&mut [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)], None)?;
            }
            while self.fabric.next_event().is_some() {}
        }
        let completion = self.fabric.take(ticket).map_err(|_| "the ticket had ended")?;
        if completion.is_done() { Ok(completion) } else { Err(format!("{completion:?}").into()) }
    }

    fn place(&self, block: u64) -> Extent {
        Extent::new(self.there, block * self.block, self.block)
    }

    /// Block `n` of the file is the pattern of `n` and `seed`.
    fn fill(&mut self, seed: u64) -> Result<(), Failure> {
        for half in 0..2 {
            let mut batch = Batch::new();
            for n in 0..MOVES {
                let mut buffer = self.region.carve(n * self.block, self.block)?;
                pattern(&mut buffer, half * MOVES + n, seed);
                batch.write(buffer.freeze(), self.place(half * MOVES + n));
            }
            self.run(batch)?;
        }
        Ok(())
    }

    /// Half writes, half reads at places in no order; bytes per second.
    fn round(&mut self, seed: u64) -> Result<f64, Failure> {
        let scattered = |n: u64| (n * 769 + seed * 131) % (2 * MOVES);
        let (mut batch, mut expected) = (Batch::new(), vec![0; usize::try_from(self.block)?]);
        for n in 0..MOVES {
            let mut buffer = self.region.carve(n * self.block, self.block)?;
            if n % 2 == 0 {
                pattern(&mut buffer, n, seed + 1000);
                batch.write(buffer.freeze(), self.place(scattered(n)));
            } else {
                batch.read(self.place(scattered(n)), buffer);
            }
        }
        let start = Clock::now();
        let completion = self.run(batch)?;
        let seconds = start.elapsed().as_secs_f64();
        let mut batch = completion.into_batch();
        for (n, request) in (0..MOVES).zip(batch.drain()) {
            if let Request::Read { target, .. } = request {
                pattern(&mut expected, scattered(n), seed);
                same(&target, &expected, "read", n)?;
            }
        }
        let mut back = Batch::new();
        for n in (0..MOVES).step_by(2) {
            back.read(self.place(scattered(n)), self.region.carve(n * self.block, self.block)?);
        }
        let mut back = self.run(back)?.into_batch();
        for (n, request) in (0..MOVES).step_by(2).zip(back.drain()) {
            if let Request::Read { target, .. } = request {
                pattern(&mut expected, n, seed + 1000);
                same(&target, &expected, "written", n)?;
            }
        }
        Ok((MOVES * self.block) as f64 / seconds)
    }
}

fn pattern(buffer: &mut [u8], block: u64, seed: u64) {
    let mut state =
        block.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_add(1).wrapping_mul(0xD134_2543_DE82_EF95);
    for chunk in buffer.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

fn same(moved: &[u8], expected: &[u8], what: &str, n: u64) -> Result<(), Failure> {
    let sum = |bytes| checksum(CrcAlgorithm::Crc32Iscsi, bytes);
    if sum(moved) == sum(expected) { Ok(()) } else { Err(format!("move {n}: other bytes were {what}").into()) }
}
