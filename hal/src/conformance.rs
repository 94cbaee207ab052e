//! One suite that every backend passes: what [`crate::contract`] promises, seen from two fabrics.
//!
//! For authors of backends: make a [`Pair`] of connected fabrics, hand a maker of pairs to [`run`]; it panics with the name
//! of the case that failed. It tests moves and their endings, not speed. A case that a backend cannot have (a link to oneself
//! has no peer to lose) is named in a `SKIPPED` line. A side's memory may be a device's ([`Supply`]): then the suite never
//! touches it by CPU, and a backend that does faults.

use std::rc::Rc;

use millpond_core::batch::{Extent, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};

use crate::contract::{FarEnd, LinkId, Turn};
use crate::fabric::{Batch, Completion, Fabric, FabricEvent, FabricWake, PostOptions, Ticket};
use crate::mapping::{Backing, Mapping};
use crate::region::{Mode, Region, RegionBuf, RegionBytes};

mod endings;
mod files;
mod moves;
pub mod player;
mod refusals;
#[cfg(test)]
mod tests;
pub mod untouchable;

pub use files::{MakeFile, run_files};

/// Pairs are made with links of this progress deadline.
pub const PROGRESS_DEADLINE: Duration = Duration::from_millis(150);
/// Where a case stops waiting, in steps.
const STEPS_MAX: u32 = 2_000_000;
/// Where a case stops waiting, in time of the pair's clock.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// "At every step" looks at this many steps.
const EVERY_STEP_MAX: u32 = 24;

/// Where time comes from.
///
/// Example: `hal/src/backend/conforms.rs`.
#[derive(Debug)]
pub enum Clock {
    /// A virtual one that the suite advances.
    Virtual(Instant),
    /// The host's.
    Real(std::time::Instant),
}

/// Two connected fabrics, or one with a link to itself.
///
/// Example: `hal/src/backend/conforms.rs`.
pub struct Pair {
    /// The side that posts in most cases.
    pub here: Fabric,
    /// The other side; `None` where `here` talks to itself.
    pub there: Option<Fabric>,
    /// The link, as `here` names it.
    pub link: LinkId,
    /// The link, as `there` names it.
    pub link_there: LinkId,
    /// The time.
    pub clock: Clock,
    /// Cuts the connection as the death of `there` would; without it, `there` is dropped.
    pub sever: Option<Box<dyn FnOnce()>>,
    /// Where memory of `here` comes from; `None`: ordinary host memory.
    pub supply: Option<Rc<dyn Supply>>,
    /// The same for `there`.
    pub supply_there: Option<Rc<dyn Supply>>,
    stopped: bool,
    events: Vec<FabricEvent>,
    events_there: Vec<FabricEvent>,
}

/// Where the memory of one side comes from, and how to get at its bytes where the CPU may not touch them.
///
/// Example: `hal/src/conformance/untouchable.rs`.
pub trait Supply {
    /// Zeroed memory of that length.
    fn mapping(&self, len: u64) -> Mapping;

    /// Copies bytes of such memory out, `offset` within `region`.
    fn read(&self, region: &Region, offset: u64, into: &mut [u8]);

    /// Copies bytes in.
    fn write(&self, region: &Region, offset: u64, from: &[u8]);
}

/// Looks at bytes: by reference where that is possible, else through a supply.
#[derive(Clone)]
struct Hands(Option<Rc<dyn Supply>>);

/// Makes pairs, each fresh.
pub type MakePair<'a> = dyn FnMut() -> Pair + 'a;

type Case = (&'static str, fn(&mut MakePair<'_>));

/// Runs every case on fresh pairs.
pub fn run(make: &mut MakePair<'_>) {
    let groups = [moves::CASES, refusals::CASES, endings::CASES];
    for (name, case) in groups.into_iter().flatten() {
        eprintln!("conformance: {name}");
        case(make);
    }
}

/// Names of all cases, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    [moves::CASES, refusals::CASES, endings::CASES].into_iter().flatten().map(|case| case.0)
}

impl Pair {
    /// A pair of two fabrics.
    #[must_use]
    pub fn new(here: Fabric, link: LinkId, there: Fabric, link_there: LinkId, clock: Clock) -> Self {
        Self { there: Some(there), link_there, ..Self::alone(here, link, clock) }
    }

    /// One fabric with a link to itself.
    #[must_use]
    pub fn alone(here: Fabric, link: LinkId, clock: Clock) -> Self {
        Self {
            here,
            there: None,
            link,
            link_there: link,
            clock,
            sever: None,
            supply: None,
            supply_there: None,
            stopped: false,
            events: Vec::new(),
            events_there: Vec::new(),
        }
    }

    fn is_alone(&self) -> bool {
        self.there.is_none()
    }

    fn there(&mut self) -> &mut Fabric {
        self.there.as_mut().unwrap_or(&mut self.here)
    }

    fn now(&self) -> Instant {
        match &self.clock {
            Clock::Virtual(now) => *now,
            Clock::Real(start) => Instant::from_nanos(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)),
        }
    }

    /// Polls both sides once, and lets time pass if neither had anything to do.
    fn step(&mut self) {
        let now = self.now();
        let mut turn = self.here.poll(now);
        self.events.extend(core::iter::from_fn(|| self.here.next_event()));
        if let Some(there) = self.there.as_mut().filter(|_| !self.stopped) {
            if there.poll(now) == Turn::Worked {
                turn = Turn::Worked;
            }
            self.events_there.extend(core::iter::from_fn(|| there.next_event()));
        }
        if turn == Turn::Idle {
            self.pass(now);
        }
    }

    fn pass(&mut self, now: Instant) {
        let mut within = Duration::from_millis(5);
        let mut fabrics = vec![&mut self.here];
        fabrics.extend(self.there.as_mut().filter(|_| !self.stopped));
        for fabric in &mut fabrics {
            match fabric.arm(now) {
                FabricWake::Now => return,
                FabricWake::Within(Some(next)) => within = within.min(next),
                FabricWake::Within(None) => {}
            }
        }
        match &mut self.clock {
            Clock::Virtual(now) => *now = *now + within.max(Duration::from_nanos(1)),
            Clock::Real(_) => {
                use rustix::event::{PollFd, PollFlags, Timespec};
                let wake_fds: Vec<_> = fabrics.iter().map(|fabric| fabric.wake_fd()).collect();
                let mut polled: Vec<_> = wake_fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
                let nanos = i64::try_from(within.as_nanos()).unwrap_or(i64::MAX);
                let wait = Timespec { tv_sec: 0, tv_nsec: nanos.min(999_999_999) };
                let _ = rustix::event::poll(&mut polled, Some(&wait));
            }
        }
    }

    /// Steps until `done`; panics when that takes too long.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = self.now();
        for _ in 0..STEPS_MAX {
            if done(self) {
                return;
            }
            assert!(self.now().since(start) < WAIT_MAX, "gave up waiting for {what}");
            self.step();
        }
        panic!("gave up waiting for {what}");
    }

    fn steps(&mut self, count: u32) {
        (0..count).for_each(|_| self.step());
    }

    /// The peer dies: its end of the connection is cut, and nobody polls it any more.
    fn kill_there(&mut self) {
        self.stopped = true;
        match self.sever.take() {
            Some(sever) => sever(),
            None => drop(self.there.take().expect("a pair that is alone has nobody to kill")),
        }
    }

    fn region(&mut self, len: u64) -> Region {
        self.region_of(len, Mode::Leased)
    }

    fn region_there(&mut self, len: u64) -> Region {
        self.region_there_of(len, Mode::Leased)
    }

    fn region_of(&mut self, len: u64, mode: Mode) -> Region {
        let mapping = mapping(self.supply.as_deref(), len);
        self.here.insert_region(mapping, mode).expect("room for a region")
    }

    fn region_there_of(&mut self, len: u64, mode: Mode) -> Region {
        let mapping = mapping(self.supply_there.as_deref(), len);
        self.there().insert_region(mapping, mode).expect("room for a region")
    }

    /// How the suite gets at bytes of either side.
    fn hands(&self) -> Hands {
        Hands(self.supply.clone().or_else(|| self.supply_there.clone()))
    }

    fn attach(&mut self, token: RegionToken) -> RegionId {
        self.here.attach(token).expect("room for an attached region")
    }

    fn post(&mut self, batch: Batch) -> Ticket {
        let (now, link) = (self.now(), self.link);
        self.here.post(now, link, batch, PostOptions::default()).expect("the batch is postable")
    }

    /// Steps until the ticket ended.
    fn end(&mut self, ticket: Ticket) -> Completion {
        self.until("a ticket", |pair| pair.here.is_finished(&ticket));
        let unknown = self.here.stats().events_unknown + self.there().stats().events_unknown;
        assert_eq!(unknown, 0, "events that name nothing known, such as a second end of a ticket");
        self.here.take(ticket).expect("it has finished")
    }

    fn run_batch(&mut self, batch: Batch) -> Completion {
        let ticket = self.post(batch);
        self.end(ticket)
    }
}

/// Eight bytes that differ by place and seed.
fn pattern(seed: u64, at: u64) -> [u8; 8] {
    let mixed = (at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_mul(0xD134_2543_DE82_EF95);
    (mixed ^ (mixed >> 29)).to_le_bytes()
}

fn fill(buffer: &mut [u8], seed: u64) {
    for (chunk, at) in buffer.chunks_mut(8).zip(0..) {
        chunk.copy_from_slice(&pattern(seed, at)[..chunk.len()]);
    }
}

fn is_pattern(buffer: &[u8], seed: u64) -> bool {
    buffer.chunks(8).zip(0..).all(|(chunk, at)| *chunk == pattern(seed, at)[..chunk.len()])
}

fn mapping(supply: Option<&dyn Supply>, len: u64) -> Mapping {
    match supply {
        Some(supply) => supply.mapping(len),
        None => Mapping::new(len, Backing::default()).expect("memory for the test"),
    }
}

impl Hands {
    fn read(&self, region: &Region, offset: u64, into: &mut [u8]) {
        match &self.0 {
            Some(supply) if region.is_for_devices() => supply.read(region, offset, into),
            _ => region.read_at(offset, into).expect("inside a raw region"),
        }
    }

    fn write(&self, region: &Region, offset: u64, from: &[u8]) {
        match &self.0 {
            Some(supply) if region.is_for_devices() => supply.write(region, offset, from),
            _ => region.write_at(offset, from).expect("inside a raw region"),
        }
    }

    fn view(&self, buffer: &RegionBuf) -> Vec<u8> {
        if !buffer.region().is_for_devices() {
            return buffer.to_vec();
        }
        let mut bytes = vec![0; buffer.len()];
        self.read(buffer.region(), buffer.offset(), &mut bytes);
        bytes
    }

    fn put(&self, buffer: &mut RegionBuf, bytes: &[u8]) {
        if buffer.region().is_for_devices() {
            self.write(buffer.region(), buffer.offset(), bytes);
        } else {
            buffer.copy_from_slice(bytes);
        }
    }

    fn paint(&self, buffer: &mut RegionBuf, byte: u8) {
        self.put(buffer, &vec![byte; buffer.len()]);
    }

    fn filled(&self, region: &Region, offset: u64, len: u64, seed: u64) -> RegionBytes {
        let mut buffer = region.carve(offset, len).expect("free");
        let mut bytes = vec![0; buffer.len()];
        fill(&mut bytes, seed);
        self.put(&mut buffer, &bytes);
        buffer.freeze()
    }
}

fn filled(region: &Region, offset: u64, len: u64, seed: u64) -> RegionBytes {
    Hands(None).filled(region, offset, len, seed)
}

fn carve(region: &Region, offset: u64, len: u64) -> RegionBuf {
    region.carve(offset, len).expect("free")
}

/// The buffer of a completed batch's read number `index`.
fn buffer_of(completion: Completion, index: usize) -> RegionBuf {
    let mut batch = completion.into_batch();
    let request = batch.drain().nth(index).expect("as many requests as were pushed");
    match request {
        crate::fabric::Request::Read { target, .. } => target,
        other => panic!("request {index} is no read: {other:?}"),
    }
}

fn extent(region: RegionId, offset: u64, len: u64) -> Extent {
    Extent::new(region, offset, len)
}

/// A far end must not be told better than it is.
fn assert_honest(far_end: FarEnd, all: bool, none: bool) {
    match far_end {
        FarEnd::Done => assert!(all, "the far end is told done and is not"),
        FarEnd::Untouched => assert!(none, "the far end is told untouched and is not"),
        FarEnd::Unknown => {}
    }
}
