//! The file backend: conformance over every way to the kernel, and what the kernel may say.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use millpond_core::batch::{Extent, RegionId, Rights};
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

use super::driver::{Io, What};
use super::*;
use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, run_files};
use crate::contract::{End, FarEnd, Outcome};
use crate::fabric::{Batch, Completion, Fabric, FabricOptions, FileGrant, FileRegion, LinkOptions, PostOptions};
use crate::file::{Caching, FileOptions};
use crate::region::Region;

/// A name of its own for each file, in `folder`. The file is unlinked as soon as it is open.
fn fresh(folder: &str, len: u64, options: impl Fn(u64) -> FileOptions) -> OpenFile {
    use core::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = PathBuf::from(format!("{folder}/millpond-backend-{}-{number}", std::process::id()));
    let file = OpenFile::open(&path, options(len)).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn here() -> String {
    std::env::temp_dir().to_string_lossy().into_owned()
}

fn connected(device: FileDevice, deadline: millpond_core::time::Duration) -> (Fabric, LinkId) {
    let mut fabric = Fabric::new(FabricOptions::new([1; 32])).unwrap();
    let device = fabric.add_device(Box::new(device)).unwrap();
    let options = LinkOptions::with_progress_deadline(deadline);
    let link = fabric.open(Instant::ZERO, device, Connection::Loopback, options).unwrap();
    (fabric, link)
}

fn conforms(folder: &str, way: Way, options: impl Fn(u64) -> FileOptions + Copy) {
    run_files(&mut |len| {
        let device = FileDevice::new(FileDeviceOptions { way }).unwrap();
        // A disk that others use as well may take its time.
        let (mut fabric, link) = connected(device, PROGRESS_DEADLINE.saturating_mul(60));
        let file = fabric.add_file(fresh(folder, len, options)).unwrap();
        (Pair::alone(fabric, link, Clock::Real(std::time::Instant::now())), file)
    });
}

fn uring_is_here() -> bool {
    let refused = uring::Uring::new(DEPTH).err();
    if let Some(error) = refused {
        eprintln!("SKIPPED: io_uring is refused here: {error}");
    }
    refused.is_none()
}

#[test]
fn the_file_backend_conforms_over_io_uring() {
    if uring_is_here() {
        let file = fresh(&here(), 8192, FileOptions::create);
        if let Caching::Cached { why } = file.caching() {
            eprintln!("SKIPPED: nothing is direct in {}: {why}", here());
        }
        conforms(&here(), Way::Uring, FileOptions::create);
    }
}

#[test]
fn the_file_backend_conforms_over_threads() {
    conforms(&here(), Way::Threads, FileOptions::create);
}

#[test]
fn the_file_backend_conforms_through_the_cache() {
    conforms(&here(), Way::Auto, |len| FileOptions::create(len).through_the_cache());
}

#[test]
fn the_file_backend_conforms_on_memory() {
    match std::fs::metadata("/dev/shm") {
        Ok(_) => conforms("/dev/shm", Way::Auto, FileOptions::create),
        Err(error) => eprintln!("SKIPPED: no /dev/shm: {error}"),
    }
}

#[test]
fn the_file_backend_conforms_whatever_the_order_of_completions() {
    run_files(&mut |len| {
        let (device, _) = scripted(|_| Fault::None, 7);
        let (mut fabric, link) = connected(device, PROGRESS_DEADLINE.saturating_mul(60));
        let file = fabric.add_file(fresh(&here(), len, FileOptions::create)).unwrap();
        (Pair::alone(fabric, link, Clock::Real(std::time::Instant::now())), file)
    });
}

#[test]
fn a_refused_ring_is_a_typed_error() {
    assert_eq!(uring::Uring::new(0).err(), Some(Errno::INVAL));
}

/// What a request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    Error(Errno),
    /// At most so many bytes are reported to have moved.
    Short(u32),
}

type Script = Box<dyn FnMut(&Io) -> Fault + Send>;

/// Carries requests one at a time, in an order that a seed decides, and fails those that the script says.
struct Scripted {
    waiting: Vec<Io>,
    script: Script,
    seed: u64,
    event: OwnedFd,
    carried: Arc<Mutex<Vec<&'static str>>>,
}

impl core::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Scripted")
    }
}

// SAFETY: a request is reaped after the only call that touches its memory has returned.
unsafe impl Driver for Scripted {
    unsafe fn push(&mut self, io: Io) {
        self.waiting.push(io);
    }

    fn submit(&mut self) -> bool {
        true
    }

    fn reap(&mut self, done: &mut Vec<driver::Done>) {
        if self.waiting.is_empty() {
            return;
        }
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let io = self.waiting.swap_remove((self.seed >> 33) as usize % self.waiting.len());
        let fault = (self.script)(&io);
        // SAFETY: pushed, and not reaped before the lines below.
        let carry = || unsafe { threads::carry(&io) };
        let result = match fault {
            Fault::Error(error) => Err(error),
            Fault::Short(most) => carry().map(|moved| moved.min(most)),
            Fault::None => carry(),
        };
        self.carried.lock().push(kind(&io));
        done.push(driver::Done { key: io.key, result });
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

fn kind(io: &Io) -> &'static str {
    match io.what {
        What::Read { .. } => "read",
        What::Write { .. } => "write",
        What::Sync => "sync",
    }
}

fn scripted(
    script: impl FnMut(&Io) -> Fault + Send + 'static,
    seed: u64,
) -> (FileDevice, Arc<Mutex<Vec<&'static str>>>) {
    let event = rustix::event::eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let carried = Arc::new(Mutex::new(Vec::new()));
    let driver = Scripted { waiting: Vec::new(), script: Box::new(script), seed, event, carried: carried.clone() };
    (FileDevice::with(Box::new(driver), DriverInfo { name: "scripted", uring_refused: None }), carried)
}

/// A fabric with a file and some memory.
struct Bench {
    fabric: Fabric,
    link: LinkId,
    file: FileRegion,
    _grant: FileGrant,
    there: RegionId,
    region: Region,
}

impl Bench {
    fn new(device: FileDevice, file: OpenFile) -> Self {
        let (mut fabric, link) = connected(device, crate::fabric::PROGRESS_DEADLINE);
        let file = fabric.add_file(file).unwrap();
        let rights = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
        let grant = fabric.grant_file(&file, &[(0, file.len())], rights).unwrap();
        let there = fabric.attach(grant.token()).unwrap();
        let region = fabric.allocate(1 << 20, Default::default()).unwrap();
        Self { fabric, link, file, _grant: grant, there, region }
    }

    fn run(&mut self, batch: Batch) -> Completion {
        let ticket = self.fabric.post(Instant::ZERO, self.link, batch, PostOptions::default()).unwrap();
        while !self.fabric.is_finished(&ticket) {
            self.fabric.poll(Instant::ZERO);
        }
        self.fabric.take(ticket).unwrap()
    }

    /// `count` moves of `len` bytes, one after the other in memory and file.
    fn moves(&mut self, access: Access, count: u64, len: u64) -> Batch {
        let mut batch = Batch::new();
        for at in (0..count).map(|n| n * len) {
            let buffer = self.region.carve(at, len).unwrap();
            let there = Extent::new(self.there, at, len);
            match access {
                Access::Write => batch.write(buffer.freeze(), there),
                Access::Read => batch.read(there, buffer),
            };
        }
        batch
    }
}

/// Fails what begins at that place of the file.
fn failing(at: u64, error: Errno) -> impl FnMut(&Io) -> Fault + Send {
    move |io| match io.what {
        What::Read { offset, .. } | What::Write { offset, .. } if offset == at => Fault::Error(error),
        _ => Fault::None,
    }
}

#[test]
fn an_error_of_the_kernel_ends_its_move_and_no_other() {
    for (error, refusal) in
        [(Errno::NOSPC, Refusal::NoSpace), (Errno::IO, Refusal::Medium), (Errno::PERM, Refusal::Failed)]
    {
        for access in [Access::Write, Access::Read] {
            let (device, _) = scripted(failing(8192, error), 1);
            let mut bench = Bench::new(device, fresh(&here(), 1 << 20, FileOptions::create));
            let mut batch = bench.moves(access, 8, 4096);
            batch.arrival(bench.there, 0, 1).sync(bench.there);
            let completion = bench.run(batch);
            let far_end = if access == Access::Write { FarEnd::Unknown } else { FarEnd::Untouched };
            for index in 0..8 {
                let expected =
                    if index == 2 { Outcome { far_end, ..Outcome::refused(refusal) } } else { Outcome::DONE };
                assert_eq!(completion.outcome(index), expected, "{error:?} {access:?} {index}");
            }
            assert_eq!(bench.file.file().last_error(), error.raw_os_error());
        }
    }
}

#[test]
fn short_and_interrupted_requests_go_on_where_they_were() {
    for access in [Access::Write, Access::Read] {
        let mut count = 0;
        let script = move |_: &Io| {
            count += 1;
            [Fault::Error(Errno::INTR), Fault::Short(8192 + 77), Fault::Error(Errno::AGAIN), Fault::None][count % 4]
        };
        let (device, _) = scripted(script, 3);
        let mut bench = Bench::new(device, fresh(&here(), 1 << 20, FileOptions::create));
        let bytes: Vec<u8> = (0..500_000u32).map(|n| (n * 31 % 251) as u8).collect();
        let place = 300u64;
        if access == Access::Read {
            rustix::io::pwrite(bench.file.file().cached_fd(), &bytes, place).unwrap();
        }
        let mut buffer = bench.region.carve(12, 500_000).unwrap();
        buffer.fill(0xEE);
        let there = Extent::new(bench.there, place, 500_000);
        let mut batch = Batch::new();
        if access == Access::Write {
            buffer.copy_from_slice(&bytes);
            batch.write(buffer.freeze(), there);
            assert!(bench.run(batch).is_done());
            let mut back = vec![0; 500_000];
            rustix::io::pread(bench.file.file().cached_fd(), &mut back[..], place).unwrap();
            assert!(back == bytes);
        } else {
            batch.read(there, buffer);
            let completion = bench.run(batch);
            assert!(completion.is_done(), "{completion:?}");
            let mut batch = completion.into_batch();
            let Some(crate::fabric::Request::Read { target, .. }) = batch.drain().next() else { panic!("a read") };
            assert!(target[..] == bytes);
        }
    }
}

#[test]
fn an_interruption_without_end_is_busy_not_a_hang() {
    let (device, _) = scripted(|_| Fault::Error(Errno::AGAIN), 1);
    let mut bench = Bench::new(device, fresh(&here(), 1 << 20, FileOptions::create));
    let batch = bench.moves(Access::Read, 1, 4096);
    assert_eq!(bench.run(batch).outcome(0), Outcome::refused(Refusal::Busy));
}

#[test]
fn a_file_that_was_cut_is_told_by_every_move_from_then_on() {
    let path = std::env::temp_dir().join(format!("millpond-backend-cut-{}", std::process::id()));
    let file = OpenFile::open(&path, FileOptions::create(1 << 20)).unwrap();
    let mut bench = Bench::new(FileDevice::new(FileDeviceOptions::default()).unwrap(), file);
    let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    other.set_len(10_000).unwrap();
    // 0..8192 is there, the rest of the third block and all of the fourth are not.
    let batch = bench.moves(Access::Read, 4, 4096);
    let completion = bench.run(batch);
    let ends: Vec<End> = (0..4).map(|index| completion.outcome(index).end).collect();
    let cut = End::Refused(Refusal::Truncated);
    assert_eq!(ends[2..], [cut, cut], "{completion:?}");
    assert!(ends[..2].iter().all(|end| *end == End::Done || *end == cut));
    other.set_len(1 << 20).unwrap();
    drop(completion);
    for access in [Access::Read, Access::Write] {
        let batch = bench.moves(access, 1, 4096);
        assert_eq!(bench.run(batch).outcome(0), Outcome::refused(Refusal::Truncated), "{access:?}");
    }
}

#[test]
fn a_write_does_not_make_a_cut_file_long_again() {
    let path = std::env::temp_dir().join(format!("millpond-backend-short-{}", std::process::id()));
    let file = OpenFile::open(&path, FileOptions::create(1 << 20)).unwrap();
    let mut bench = Bench::new(FileDevice::new(FileDeviceOptions::default()).unwrap(), file);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
    let batch = bench.moves(Access::Write, 3, 4096);
    let completion = bench.run(batch);
    assert!((0..3).all(|index| completion.outcome(index) == Outcome::refused(Refusal::Truncated)), "{completion:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_sync_comes_after_the_writes_and_its_failure_is_theirs() {
    let (device, carried) = scripted(|_| Fault::None, 5);
    let mut bench = Bench::new(device, fresh(&here(), 1 << 20, FileOptions::create));
    let mut batch = bench.moves(Access::Write, 8, 4096);
    batch.sync(bench.there);
    assert!(bench.run(batch).is_done());
    let order = carried.lock().clone();
    assert_eq!((order.len(), order[8]), (9, "sync"), "{order:?}");

    let (device, _) = scripted(|io| if kind(io) == "sync" { Fault::Error(Errno::IO) } else { Fault::None }, 5);
    let mut bench = Bench::new(device, fresh(&here(), 1 << 20, FileOptions::create));
    let mut batch = bench.moves(Access::Write, 2, 4096);
    batch.sync(bench.there).arrival(bench.there, 0, 1);
    let completion = bench.run(batch);
    let failed = Outcome { end: End::Refused(Refusal::Medium), far_end: FarEnd::Unknown };
    assert_eq!((completion.outcome(0), completion.outcome(1), completion.overall()), (failed, failed, failed));
    assert_eq!(bench.fabric.arrived(bench._grant.id(), 0), 0);
}

#[test]
fn parts_of_one_block_are_written_in_one_round() {
    let (device, carried) = scripted(|_| Fault::None, 5);
    let file = fresh(&here(), 1 << 20, FileOptions::create);
    if let Caching::Cached { why } = file.caching() {
        return eprintln!("SKIPPED: nothing is direct in {}: {why}", here());
    }
    let mut bench = Bench::new(device, file);
    let batch = bench.moves(Access::Write, 20, 8);
    assert!(bench.run(batch).is_done());
    assert_eq!(*carried.lock(), ["read", "write"]);
}

#[test]
fn a_fabric_that_is_dropped_with_moves_in_flight_lets_the_kernel_finish() {
    for way in [Way::Auto, Way::Threads] {
        let file = fresh(&here(), 4 << 20, FileOptions::create);
        let mut bench = Bench::new(FileDevice::new(FileDeviceOptions { way }).unwrap(), file);
        let batch = bench.moves(Access::Write, 100, 1000);
        let _ticket = bench.fabric.post(Instant::ZERO, bench.link, batch, PostOptions::default()).unwrap();
        bench.fabric.poll(Instant::ZERO);
        let region = bench.region.clone();
        drop(bench);
        drop(region);
    }
}

#[test]
fn grants_of_a_file_keep_within_its_length_and_access() {
    use crate::fabric::GrantError;
    let path = std::env::temp_dir().join(format!("millpond-backend-grants-{}", std::process::id()));
    drop(OpenFile::open(&path, FileOptions::create(5000)).unwrap());
    let (mut fabric, _) = connected(FileDevice::new(FileDeviceOptions::default()).unwrap(), PROGRESS_DEADLINE);
    let file = fabric.add_file(OpenFile::open(&path, FileOptions::read_only()).unwrap()).unwrap();
    std::fs::remove_file(path).unwrap();
    let mut refused = |ranges: &[(u64, u64)], rights| fabric.grant_file(&file, ranges, rights).unwrap_err();
    assert_eq!(refused(&[], Rights::REMOTE_READ), GrantError::Empty);
    assert_eq!(refused(&[(4999, 2)], Rights::REMOTE_READ), GrantError::OutOfBounds);
    assert_eq!(refused(&[(u64::MAX, 2)], Rights::REMOTE_READ), GrantError::OutOfBounds);
    assert_eq!(refused(&[(0, 1)], Rights::REMOTE_WRITE), GrantError::ReadOnly);
    let mut other = Fabric::new(FabricOptions::new([2; 32])).unwrap();
    assert_eq!(other.grant_file(&file, &[(0, 1)], Rights::REMOTE_READ).unwrap_err(), GrantError::ForeignRegion);
}
