//! The same promises, asked of backends whose far side is a file: no addresses, no leases, bytes that lie in blocks.
//!
//! Cases have the names of their siblings for memory. The file is looked at through its page cache, so "visible to every
//! reader" is tested too.

use std::collections::VecDeque;

use millpond_core::batch::{Capability, RegionId, RegionToken, Rights};
use millpond_core::time::Instant;

use super::{EVERY_STEP_MAX, Pair, assert_honest, buffer_of, carve, extent, fill, filled, is_pattern};
use crate::contract::{Access, End, FarEnd, LinkDownReason, Outcome, Refusal};
use crate::fabric::{
    AllocateOptions, Batch, Completion, FabricEvent, FileGrant, FileRegion, PostError, PostOptions, Request, Ticket,
};
use crate::region::Region;

/// Makes a pair that is alone, and a file of that length, open for writing, in its fabric. Each fresh, of zeroes.
pub type MakeFile<'a> = dyn FnMut(u64) -> (Pair, FileRegion) + 'a;

type Case = (&'static str, fn(&mut MakeFile<'_>));

const CASES: &[Case] = &[
    ("writes of every size land exactly, whatever the alignment", writes_land_exactly),
    ("reads of every size bring exactly the bytes, whatever the alignment", reads_bring_exact_bytes),
    ("a mixed, scattered batch keeps every pair and all that lies between", scattered_and_mixed),
    ("neighbours in one block are right when many write at once", neighbours),
    ("requests of no bytes end like others", zero_length),
    ("more moves than any window go through", more_than_the_window),
    ("raw regions are written and read", raw_regions),
    ("arrivals are counted after their writes", arrivals_are_counted),
    ("a batch of nothing only counts, or only syncs", nothing_only_counts),
    ("a posted fabric moves to another thread", moves_to_a_thread),
    ("forged tokens are refused and touch nothing", forged_tokens),
    ("a gap between granted ranges is refused", gaps),
    ("a refused request leaves its siblings alone, and no arrival follows it", siblings),
    ("a token's own limits are checked before anything is sent", checked_here),
    ("a grant that was closed is stale", closed_grants),
    ("a cancel at any step ends a write honestly", cancel_a_write),
    ("a cancel at any step ends a read", cancel_a_read),
    ("a deadline cancels", deadlines),
    ("nothing is started after a grant was closed, at any step", close_a_grant),
    ("a dropped waiter does not free the lease before the end", dropped_waiter),
    ("a closed link ends its tickets and takes no more", close_the_link),
];

/// Runs every case on fresh files.
pub fn run_files(make: &mut MakeFile<'_>) {
    for (name, case) in CASES {
        eprintln!("conformance, files: {name}");
        case(make);
    }
}

const FILE_LEN: u64 = (4 << 20) + 777;
const LENS: [u64; 9] = [1, 7, 511, 4096, 4097, 65_535, 65_536, (1 << 20) + 3, (3 << 20) + 5];
const BOTH: fn() -> Rights = || Rights::REMOTE_READ | Rights::REMOTE_WRITE;

fn put(file: &FileRegion, offset: u64, bytes: &[u8]) {
    let written = rustix::io::pwrite(file.file().cached_fd(), bytes, offset);
    assert_eq!(written, Ok(bytes.len()), "a file for the test is written");
}

fn peek(file: &FileRegion, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let read = rustix::io::pread(file.file().cached_fd(), &mut bytes[..], offset);
    assert_eq!(read.map(|read| read as u64), Ok(len), "a file for the test is read");
    bytes
}

/// All of the file, for reading and writing.
fn whole(pair: &mut Pair, file: &FileRegion) -> (FileGrant, RegionId) {
    let grant = pair.here.grant_file(file, &[(0, file.len())], BOTH()).unwrap();
    let there = pair.attach(grant.token());
    (grant, there)
}

fn bytes_of(len: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill(&mut bytes, seed);
    bytes
}

fn writes_land_exactly(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let (_grant, there) = whole(&mut pair, &file);
    let region = pair.region(8 << 20);
    for (seed, len) in (1u64..).zip(LENS) {
        for (skew, at) in [(0, 0), (0, 4096), (0, 100), (100, 100), (1, 512), (513, 5000), (0, FILE_LEN - len)] {
            put(&file, 0, &vec![0xEE; FILE_LEN as usize]);
            let mut batch = Batch::new();
            batch.write(filled(&region, skew, len, seed), extent(there, at, len));
            let completion = pair.run_batch(batch);
            assert_eq!(completion.outcome(0), Outcome::DONE, "{len} bytes at {at}");
            let (start, end) = (at as usize, (at + len) as usize);
            let now = peek(&file, 0, FILE_LEN);
            assert!(is_pattern(&now[start..end], seed), "{len} bytes at {at}, memory at {skew}");
            let beside = now[..start].iter().chain(&now[end..]);
            assert!(beside.copied().all(|byte| byte == 0xEE), "{len} bytes at {at}: only the target changes");
        }
    }
}

fn reads_bring_exact_bytes(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let (_grant, there) = whole(&mut pair, &file);
    put(&file, 0, &bytes_of(FILE_LEN, 9));
    let (all, region) = (bytes_of(FILE_LEN, 9), pair.region(8 << 20));
    for len in LENS {
        for (skew, at) in [(0, 0), (0, 4096), (0, 100), (100, 100), (1, 512), (513, 5000), (0, FILE_LEN - len)] {
            let mut guard = carve(&region, 0, skew + len + 200);
            guard.fill(0xEE);
            let mut target = guard.split_off(skew).unwrap();
            let tail = target.split_off(len).unwrap();
            let mut batch = Batch::new();
            batch.read(extent(there, at, len), target);
            let completion = pair.run_batch(batch);
            assert_eq!(completion.outcome(0), Outcome::DONE, "{len} bytes at {at}");
            assert!(buffer_of(completion, 0)[..] == all[at as usize..][..len as usize], "{len} bytes at {at}");
            assert!(guard.iter().chain(&tail[..]).all(|&byte| byte == 0xEE), "only the target changes");
        }
    }
}

fn scattered_and_mixed(make: &mut MakeFile<'_>) {
    const PAGE: u64 = 1000;
    let (mut pair, file) = make(FILE_LEN);
    let (_grant, there) = whole(&mut pair, &file);
    let region = pair.region(1 << 20);
    for n in 0..64u64 {
        put(&file, 2 * n * PAGE, &bytes_of(PAGE, 500));
        put(&file, (2 * n + 1) * PAGE, &bytes_of(PAGE, 1000 + n));
    }
    let mut batch = Batch::new();
    for n in 0..64u64 {
        batch.write(filled(&region, 2 * n * PAGE, PAGE, n), extent(there, (n * 37 % 64) * PAGE * 2, PAGE));
        batch.read(extent(there, (2 * n + 1) * PAGE, PAGE), carve(&region, (2 * n + 1) * PAGE, PAGE));
    }
    let completion = pair.run_batch(batch);
    assert!(completion.is_done(), "{completion:?}");
    let mut batch = completion.into_batch();
    let reads = batch.drain().filter(|request| matches!(request, Request::Read { .. }));
    for (request, n) in reads.zip(1000..) {
        let Request::Read { target, .. } = request else { continue };
        assert!(is_pattern(&target, n), "page {n}");
    }
    for n in 0..64u64 {
        assert!(is_pattern(&peek(&file, (n * 37 % 64) * PAGE * 2, PAGE), n), "page {n}");
        assert!(is_pattern(&peek(&file, (2 * n + 1) * PAGE, PAGE), 1000 + n), "between pages, {n}");
    }
}

fn neighbours(make: &mut MakeFile<'_>) {
    const STRIDE: u64 = 300;
    let (mut pair, file) = make(FILE_LEN);
    let (_grant, there) = whole(&mut pair, &file);
    let region = pair.region(1 << 20);
    put(&file, 0, &vec![0xEE; 300_000]);
    // 200 bytes of every 300, each by one of four batches, in an order of its own; one whole block among them.
    let mut batches = [(); 4].map(|()| Batch::new());
    for n in 0..800u64 {
        let at = (n * 331 % 800) * STRIDE;
        batches[n as usize % 4].write(filled(&region, n * 200, 200, at), extent(there, at, 200));
    }
    batches[1].write(filled(&region, 500_000, 8192, 7), extent(there, 245_760, 8192));
    let tickets: Vec<Ticket> = batches.into_iter().map(|batch| pair.post(batch)).collect();
    for ticket in tickets {
        assert!(pair.end(ticket).is_done());
    }
    for at in (0..800).map(|n| n * STRIDE) {
        assert!(is_pattern(&peek(&file, at, 200), at), "at {at}");
        assert!(peek(&file, at + 200, 100).iter().all(|&byte| byte == 0xEE), "beside {at}");
    }
    assert!(is_pattern(&peek(&file, 245_760, 8192), 7));
}

fn zero_length(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(100);
    let (_grant, there) = whole(&mut pair, &file);
    let region = pair.region(4096);
    put(&file, 0, &[7; 100]);
    let mut batch = Batch::new();
    batch.write(carve(&region, 0, 0).freeze(), extent(there, 0, 0));
    batch.write(filled(&region, 0, 3, 5), extent(there, 3, 3));
    batch.read(extent(there, 100, 0), carve(&region, 50, 0));
    let completion = pair.run_batch(batch);
    assert!(completion.is_done(), "{completion:?}");
    let now = peek(&file, 0, 100);
    assert!(is_pattern(&now[3..6], 5) && now[..3] == [7; 3] && now[6..] == [7; 94]);
}

fn more_than_the_window(make: &mut MakeFile<'_>) {
    const BATCHES: u64 = 700;
    const MOVES: u64 = 20;
    let total = BATCHES * MOVES * 8;
    let (mut pair, file) = make(total);
    let (grant, there) = whole(&mut pair, &file);
    let region = pair.region(1 << 20);
    let source = filled(&region, 0, total, 3);
    let (mut tickets, mut was_full) = (VecDeque::new(), false);
    for n in 0..BATCHES {
        let mut batch = Batch::new();
        for at in (n * MOVES..(n + 1) * MOVES).map(|index| index * 8) {
            batch.write(source.slice(at as usize..at as usize + 8), extent(there, at, 8));
        }
        batch.arrival(there, 1, 1);
        loop {
            let (now, link) = (pair.now(), pair.link);
            match pair.here.post(now, link, batch, PostOptions::default()) {
                Ok(ticket) => break tickets.push_back(ticket),
                Err(refused) => {
                    assert_eq!(refused.reason, PostError::LinkFull);
                    (batch, was_full) = (refused.batch, true);
                    let oldest = tickets.pop_front().expect("full means that something is in flight");
                    assert!(pair.end(oldest).is_done());
                }
            }
        }
    }
    assert!(was_full, "a link without a bound");
    for ticket in tickets {
        assert!(pair.end(ticket).is_done());
    }
    assert_eq!(pair.here.arrived(grant.id(), 1), BATCHES);
    assert!(is_pattern(&peek(&file, 0, total), 3));
}

fn raw_regions(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let (_grant, there) = whole(&mut pair, &file);
    let region = pair.here.allocate(1 << 20, AllocateOptions::raw(Rights::NONE)).unwrap();
    region.write_at(17, &bytes_of(200_000, 8)).unwrap();
    let mut batch = Batch::new();
    batch.write_raw(region.extent(17, 200_000), extent(there, 5, 200_000));
    assert!(pair.run_batch(batch).is_done());
    let mut batch = Batch::new();
    batch.read_raw(extent(there, 5, 200_000), region.extent(500_000, 200_000));
    assert!(pair.run_batch(batch).is_done());
    let mut back = vec![0; 200_000];
    region.read_at(500_000, &mut back).unwrap();
    assert!(is_pattern(&back, 8));
}

fn arrivals_are_counted(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let (grant, there) = whole(&mut pair, &file);
    let region = pair.region(1 << 20);
    let tickets: Vec<_> = (0..4u64)
        .map(|n| {
            let mut batch = Batch::new();
            let source = filled(&region, n * 100_000, 100_000, n);
            batch.write(source, extent(there, n * 100_000, 100_000)).arrival(there, n % 2, 10 + n);
            if n == 2 {
                batch.sync(there);
            }
            pair.post(batch)
        })
        .collect();
    let id = grant.id();
    pair.until("arrivals", |pair| pair.here.arrived(id, 0) == 22 && pair.here.arrived(id, 1) == 24);
    assert!((0..4).all(|n: u64| is_pattern(&peek(&file, n * 100_000, 100_000), n)), "counted before it was there");
    for ticket in tickets {
        assert!(pair.end(ticket).is_done());
    }
    assert!(pair.events.iter().any(|event| matches!(event, FabricEvent::Arrived(grant) if *grant == id)));
}

fn nothing_only_counts(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(4096);
    let (grant, there) = whole(&mut pair, &file);
    let mut batch = Batch::new();
    batch.arrival(there, 99, 5);
    assert_eq!(pair.run_batch(batch).overall(), Outcome::DONE);
    assert_eq!(pair.here.arrived(grant.id(), 99), 5);
    let mut batch = Batch::new();
    batch.sync(there);
    assert!(pair.run_batch(batch).is_done());
    assert!(pair.run_batch(Batch::new()).is_done());
}

fn moves_to_a_thread(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let (_grant, there) = whole(&mut pair, &file);
    let region = pair.region(1 << 20);
    let mut batch = Batch::new();
    batch.write(filled(&region, 0, 600_000, 4), extent(there, 3, 600_000));
    let ticket = pair.post(batch);
    pair.step();
    let Pair { here, link, clock, .. } = pair;
    let (here, clock) = std::thread::spawn(move || (here, clock)).join().expect("nothing panics there");
    let mut pair = Pair::alone(here, link, clock);
    assert!(pair.end(ticket).is_done());
    assert!(is_pattern(&peek(&file, 3, 600_000), 4));
}

fn write_once(pair: &mut Pair, token: RegionToken, offset: u64, len: u64) -> Completion {
    let region = pair.region(len.max(1));
    let there = pair.attach(token);
    let mut batch = Batch::new();
    batch.write(filled(&region, 0, len, 77), extent(there, offset, len));
    pair.run_batch(batch)
}

fn forged_tokens(make: &mut MakeFile<'_>) {
    type Forge = fn(&mut RegionToken);
    let forgeries: [(Refusal, Forge); 5] = [
        (Refusal::WrongCapability, |token| token.capability = Capability::new([9; 16])),
        (Refusal::Stale, |token| token.region.epoch += 2),
        (Refusal::Stale, |token| token.region.slot += 1),
        (Refusal::OutOfBounds, |token| (token.offset, token.len) = (0, u64::MAX)),
        (Refusal::WrongRights, |token| token.rights = token.rights | Rights::REMOTE_WRITE),
    ];
    for (expected, forge) in forgeries {
        let (mut pair, file) = make(300_000);
        let rights = if expected == Refusal::WrongRights { Rights::REMOTE_READ } else { BOTH() };
        let grant = pair.here.grant_file(&file, &[(1000, 200_000)], rights).unwrap();
        let mut token = grant.token();
        forge(&mut token);
        let offset = if expected == Refusal::OutOfBounds { 900 } else { 1000 };
        let completion = write_once(&mut pair, token, offset, 100_000);
        assert_eq!(completion.outcome(0), Outcome::refused(expected));
        assert!(peek(&file, 0, 300_000).iter().all(|&byte| byte == 0), "{expected:?}");
    }
}

fn gaps(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(10_000);
    let grant = pair.here.grant_file(&file, &[(0, 100), (200, 100), (300, 50)], BOTH()).unwrap();
    let token = grant.token();
    assert_eq!(write_once(&mut pair, token, 50, 200).outcome(0), Outcome::refused(Refusal::OutOfBounds));
    assert_eq!(write_once(&mut pair, token, 100, 50).outcome(0), Outcome::refused(Refusal::OutOfBounds));
    assert!(peek(&file, 0, 10_000).iter().all(|&byte| byte == 0));
    assert!(write_once(&mut pair, token, 250, 100).is_done(), "ranges that touch are one");
}

fn siblings(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(100_000);
    let grant = pair.here.grant_file(&file, &[(0, 1000), (5000, 1000)], BOTH()).unwrap();
    let (there, region) = (pair.attach(grant.token()), pair.region(10_000));
    let mut batch = Batch::new();
    for (n, at) in (0u64..).zip([0, 2000, 5000, 3000]) {
        batch.write(filled(&region, n * 1000, 1000, n), extent(there, at, 1000));
    }
    batch.arrival(there, 0, 1);
    let completion = pair.run_batch(batch);
    let refused = Outcome::refused(Refusal::OutOfBounds);
    let outcomes: Vec<Outcome> = (0..4).map(|n| completion.outcome(n)).collect();
    assert_eq!(outcomes, [Outcome::DONE, refused, Outcome::DONE, refused]);
    assert!(is_pattern(&peek(&file, 0, 1000), 0) && is_pattern(&peek(&file, 5000, 1000), 2));
    assert_eq!(pair.here.arrived(grant.id(), 0), 0);
}

fn checked_here(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(100_000);
    let grant = pair.here.grant_file(&file, &[(0, 1000)], Rights::REMOTE_READ).unwrap();
    let (there, region) = (pair.attach(grant.token()), pair.region(10_000));
    let memory = pair.here.grant_write(vec![carve(&region, 5000, 100)]).unwrap();
    let memory = pair.attach(memory.token());
    let (now, link) = (pair.now(), pair.link);
    let mut refused = |batch| pair.here.post(now, link, batch, PostOptions::default()).unwrap_err().reason;
    let mut batch = Batch::new();
    batch.write(filled(&region, 0, 10, 1), extent(there, 0, 10));
    assert_eq!(refused(batch), PostError::NoRight { index: 0, access: Access::Write });
    let mut batch = Batch::new();
    batch.read(extent(there, 995, 10), carve(&region, 0, 10));
    assert_eq!(refused(batch), PostError::OutOfBounds { index: 0, side: "remote" });
    let mut batch = Batch::new();
    batch.write(filled(&region, 0, 10, 1), extent(memory, 5000, 10));
    assert_eq!(refused(batch), PostError::NotReachable { index: 0 });
    let mut batch = Batch::new();
    batch.sync(memory);
    assert_eq!(refused(batch), PostError::NotDurable);
}

fn closed_grants(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(4096);
    let grant = pair.here.grant_file(&file, &[(0, 100)], BOTH()).unwrap();
    let token = grant.token();
    assert!(write_once(&mut pair, token, 0, 100).is_done());
    pair.here.revoke_file(grant);
    assert_eq!(write_once(&mut pair, token, 0, 100).outcome(0), Outcome::refused(Refusal::Stale));
    // The same place in the table, given to somebody else.
    let other = pair.here.grant_file(&file, &[(200, 100)], BOTH()).unwrap();
    assert_eq!(write_once(&mut pair, token, 0, 100).outcome(0), Outcome::refused(Refusal::Stale));
    let token = other.token();
    drop(other);
    assert_eq!(write_once(&mut pair, token, 200, 100).outcome(0), Outcome::refused(Refusal::Stale));
}

const LEN: u64 = 3 << 20;
const PIECES: u64 = 6;

struct Write {
    ticket: Ticket,
    grant: FileGrant,
    region: Region,
    file: FileRegion,
}

/// A write in six pieces, in flight, with an arrival. Memory and file are out of step, so that nothing is simple.
fn start_write(pair: &mut Pair, file: FileRegion) -> Write {
    let region = pair.region(LEN + 1);
    let (grant, there) = whole(pair, &file);
    let mut batch = Batch::new();
    for n in 0..PIECES {
        let len = LEN / PIECES;
        batch.write(filled(&region, n * len + 1, len, n + 1), extent(there, n * len, len));
    }
    batch.arrival(there, 0, 1);
    let ticket = pair.post(batch);
    Write { ticket, grant, region, file }
}

/// What the outcomes say of the far end is what lies there.
fn check_write(completion: &Completion, file: &FileRegion, arrived: u64) {
    let (target, len) = (peek(file, 0, LEN), (LEN / PIECES) as usize);
    let is_there = |n: usize| is_pattern(&target[n * len..][..len], n as u64 + 1);
    for n in 0..PIECES as usize {
        let outcome = completion.outcome(n);
        let none = target[n * len..][..len].iter().all(|&byte| byte == 0);
        assert_honest(outcome.far_end, is_there(n), none);
        assert!(!outcome.is_done() || is_there(n), "done and not there");
    }
    assert!(!completion.is_done() || arrived == 1, "a done batch was counted");
    assert!(arrived == 0 || (0..PIECES as usize).all(is_there), "counted before it was there");
}

/// Runs `act` after n steps for every n until the batch ends by itself before.
fn at_every_step(make: &mut MakeFile<'_>, mut act: impl FnMut(Pair, Write, bool)) {
    for step in 0..EVERY_STEP_MAX {
        let (mut pair, file) = make(FILE_LEN);
        let write = start_write(&mut pair, file);
        pair.steps(step);
        let ended = pair.here.is_finished(&write.ticket);
        act(pair, write, ended);
        if ended {
            return;
        }
    }
}

fn cancel_a_write(make: &mut MakeFile<'_>) {
    at_every_step(make, |mut pair, write, _| {
        let now = pair.now();
        pair.here.cancel(now, &write.ticket);
        let completion = pair.end(write.ticket);
        let arrived = pair.here.arrived(write.grant.id(), 0);
        check_write(&completion, &write.file, arrived);
        let before = peek(&write.file, 0, LEN);
        // Quiet here: the source is ours again, and nothing of it goes out any more.
        drop(completion);
        write.region.carve(0, LEN).unwrap().fill(0xFF);
        pair.steps(30);
        assert!(before == peek(&write.file, 0, LEN), "the file changed after quiet");
    });
}

fn cancel_a_read(make: &mut MakeFile<'_>) {
    for step in 0..EVERY_STEP_MAX {
        let (mut pair, file) = make(FILE_LEN);
        put(&file, 0, &bytes_of(LEN, 5));
        let ((_grant, there), region) = (whole(&mut pair, &file), pair.region(LEN + 1));
        let mut batch = Batch::new();
        batch.read(extent(there, 0, LEN), carve(&region, 1, LEN));
        let ticket = pair.post(batch);
        pair.steps(step);
        let ended = pair.here.is_finished(&ticket);
        let now = pair.now();
        pair.here.cancel(now, &ticket);
        let completion = pair.end(ticket);
        let outcome = completion.outcome(0);
        let mut target = buffer_of(completion, 0);
        assert!(!outcome.is_done() || is_pattern(&target, 5));
        assert!(outcome.is_done() || outcome.far_end == FarEnd::Untouched, "reading changes no file: {outcome:?}");
        target.fill(0xAB);
        pair.steps(30);
        assert!(target.iter().all(|&byte| byte == 0xAB), "local memory changed after quiet");
        if ended {
            return;
        }
    }
}

fn deadlines(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let ((_grant, there), region) = (whole(&mut pair, &file), pair.region(LEN));
    let mut batch = Batch::new();
    batch.write(filled(&region, 0, LEN, 1), extent(there, 0, LEN));
    let (now, link) = (pair.now(), pair.link);
    let ticket = pair.here.post(now, link, batch, PostOptions::until(now)).unwrap();
    let outcome = pair.end(ticket).outcome(0);
    assert!(matches!(outcome.end, End::Done | End::Cancelled | End::LinkDown(_)), "{outcome:?}");
}

fn close_a_grant(make: &mut MakeFile<'_>) {
    at_every_step(make, |mut pair, write, _| {
        let arrived = pair.here.arrived(write.grant.id(), 0);
        pair.here.revoke_file(write.grant);
        let completion = pair.end(write.ticket);
        for n in 0..PIECES as usize {
            let outcome = completion.outcome(n);
            assert!(matches!(outcome.end, End::Done | End::Refused(Refusal::Stale)), "{outcome:?}");
        }
        check_write(&completion, &write.file, arrived);
    });
}

fn dropped_waiter(make: &mut MakeFile<'_>) {
    let (mut pair, file) = make(FILE_LEN);
    let Write { ticket, grant, region, file } = start_write(&mut pair, file);
    drop(ticket);
    assert!(region.carve(1, 1).is_err(), "the lease is the device's until the end");
    let id = grant.id();
    pair.until("the orphan's arrival", |pair| pair.here.arrived(id, 0) == 1);
    pair.until("the orphan's end", |_| region.lease_count() == 0);
    assert!(!pair.events.iter().any(|event| matches!(event, FabricEvent::Finished(_))), "nobody hears of an orphan");
    assert!(is_pattern(&peek(&file, 0, LEN / PIECES), 1));
    assert_eq!(pair.here.in_flight(), 0);
}

fn close_the_link(make: &mut MakeFile<'_>) {
    at_every_step(make, |mut pair, write, ended| {
        let link = pair.link;
        pair.here.close_link(link);
        let refused = pair.here.post(Instant::ZERO, link, Batch::new(), PostOptions::default()).unwrap_err();
        assert_eq!(refused.reason, PostError::LinkClosed);
        let completion = pair.end(write.ticket);
        let told = (0..PIECES as usize).all(|n| matches!(completion.outcome(n).end, End::Done | End::LinkDown(_)));
        assert!(ended || told);
        let arrived = pair.here.arrived(write.grant.id(), 0);
        check_write(&completion, &write.file, arrived);
        pair.until("the link's end", |pair| pair.here.link(link).is_none());
        let closed =
            |event: &FabricEvent| matches!(event, FabricEvent::LinkDown { reason: LinkDownReason::Closed, .. });
        assert_eq!(pair.events.iter().filter(|event| closed(event)).count(), 1);
    });
}
