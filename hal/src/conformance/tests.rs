//! The suite finds what it is for: each bug below, put into a backend that conforms, fails a case.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken};
use millpond_core::time::Instant;

use super::untouchable::Untouchable;
use super::{Clock, PROGRESS_DEADLINE, Pair, run};
use crate::backend::host::Host;
use crate::contract::*;
use crate::fabric::{Fabric, FabricOptions, LinkOptions};
use crate::mapping::HeaderPage;

const GPU: MemoryKind = MemoryKind::Cuda { device: 0 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// Refused moves are told done.
    LiesAboutRefusals,
    /// Done moves are told untouched when a batch ends early.
    LiesAboutTheFarEnd,
    /// An arrival is counted twice.
    CountsTwice,
    /// The count comes, the writes do not matter.
    CountsAlways,
    /// A pointer is kept and written through in a later turn.
    WritesLate,
    /// A cancel is forgotten, and so is the batch.
    LosesCancelled,
    /// The end is told twice.
    FinishesTwice,
    /// The last byte stays behind.
    DropsTheLastByte,
    /// It takes addresses of a device for the CPU's.
    TouchesTheDevice,
}

struct Buggy {
    host: Host,
    bug: Bug,
    kept: Option<NonNull<u8>>,
    /// The device whose memory it moves, if it is to play one.
    device: Option<Untouchable>,
}

// SAFETY: `kept` blocks Send; it is used by the thread that polls only. (The bug is that it is used at all.)
unsafe impl Send for Buggy {}

struct Twisted<'a> {
    inner: &'a mut dyn Inbound,
    bug: Bug,
    kept: &'a mut Option<NonNull<u8>>,
}

// SAFETY: pointers come from the fabric; tests keep the memory mapped while the buggy device misuses them.
unsafe impl Inbound for Twisted<'_> {
    fn prove(&mut self, link: LinkId, region: RegionId, capability: Capability) -> Result<Proven, Refusal> {
        self.inner.prove(link, region, capability)
    }

    fn resolve(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<NonNull<u8>, Refusal> {
        let pointer = self.inner.resolve(link, range, access)?;
        if access == Access::Write && range.len > 0 {
            *self.kept = Some(pointer);
        }
        Ok(pointer)
    }

    fn admit(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<RegionId, Refusal> {
        self.inner.admit(link, range, access)
    }

    fn arrive(&mut self, link: LinkId, arrival: PostedArrival) -> Result<(), Refusal> {
        if self.bug == Bug::CountsTwice {
            self.inner.arrive(link, arrival)?;
        }
        self.inner.arrive(link, arrival)
    }

    fn event(&mut self, event: Event) {
        let twist = |outcome: Outcome| match (self.bug, outcome.end) {
            (Bug::LiesAboutRefusals, End::Refused(_)) => Outcome::DONE,
            (Bug::LiesAboutTheFarEnd, End::Done) => Outcome { far_end: FarEnd::Untouched, ..outcome },
            _ => outcome,
        };
        match event {
            Event::Finished { outcome, .. } if self.bug == Bug::LosesCancelled && outcome.end == End::Cancelled => {}
            Event::Finished { ticket, outcome, moves } => {
                if self.bug == Bug::FinishesTwice {
                    self.inner.event(Event::Finished { ticket, outcome, moves: Vec::new() });
                }
                if self.bug == Bug::DropsTheLastByte
                    && let (Some(last), Some(kept)) = (moves.last(), *self.kept)
                    && last.access == Access::Write
                    && last.remote.len == 1
                {
                    // SAFETY: resolved in this poll for at least one byte: the last move is a write of one.
                    unsafe { kept.write(kept.read() ^ 1) };
                }
                self.inner.event(Event::Finished { ticket, outcome: twist(outcome), moves });
            }
            Event::Ended { ticket, first, count, outcome } => {
                self.inner.event(Event::Ended { ticket, first, count, outcome: twist(outcome) });
            }
            other => self.inner.event(other),
        }
    }
}

// SAFETY: `Host` keeps the contract, and this breaks it on purpose, in tests that keep all memory mapped.
unsafe impl Memory for Buggy {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        self.host.moves(local, remote) || (self.device.is_some() && local == GPU && remote == MemoryKind::Host)
    }
    fn share_header(&mut self, header: &Arc<HeaderPage>) {
        self.host.share_header(header);
    }
    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        if memory.kind == GPU && self.device.is_some() {
            return Ok(());
        }
        // SAFETY: the same duty.
        unsafe { self.host.register(memory) }
    }
    fn release(&mut self, region: RegionId) {
        self.kept = None;
        self.host.release(region);
    }
    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        self.host.attach(link, token)
    }
    fn detach(&mut self, link: LinkId, region: RegionId) {
        self.host.detach(link, region);
    }
}

// SAFETY: as for `Memory`.
unsafe impl Transport for Buggy {
    fn open(&mut self, now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        self.host.open(now, link, connection)
    }
    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        self.host.close(link, reason);
    }
    unsafe fn post(&mut self, now: Instant, mut post: Post) -> Result<(), NotPosted> {
        if self.bug == Bug::CountsAlways && post.arrival.is_some() {
            // The range that will be refused is left out, so that nothing is.
            post.moves.retain(|posted| posted.remote.offset != 150);
        }
        if let (Some(device), false) = (&self.device, self.bug == Bug::TouchesTheDevice) {
            let reach = |local| device.reach(local).unwrap_or(local);
            post.moves.iter_mut().for_each(|posted| posted.local = reach(posted.local));
        }
        // SAFETY: the same duty; where a device is played, the second mapping of the same memory.
        unsafe { self.host.post(now, post) }
    }
    fn cancel(&mut self, now: Instant, ticket: TicketId) {
        self.host.cancel(now, ticket);
    }
}

// SAFETY: as for `Memory`.
unsafe impl Completions for Buggy {
    fn poll(&mut self, now: Instant, budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        if let (Bug::WritesLate, Some(kept)) = (self.bug, self.kept.take()) {
            // SAFETY: the test's regions are still mapped; that somebody else may own the byte is the bug.
            unsafe { kept.write_volatile(!kept.read_volatile()) };
        }
        let mut twisted = Twisted { inner: inbound, bug: self.bug, kept: &mut self.kept };
        self.host.poll(now, budget_bytes, &mut twisted)
    }
    fn arm(&mut self, now: Instant) -> Wake<'_> {
        self.host.arm(now)
    }
}

// SAFETY: as for `Memory`.
unsafe impl Device for Buggy {
    fn name(&self) -> &'static str {
        "buggy"
    }
    fn limits(&self) -> DeviceLimits {
        self.host.limits()
    }
}

fn conforms(bug: Bug) -> bool {
    let make = || {
        let mut fabric = Fabric::new(FabricOptions::new([1; 32])).unwrap();
        let buggy = Buggy { host: Host::new(), bug, kept: None, device: None };
        let device = fabric.add_device(Box::new(buggy)).unwrap();
        let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
        let link = fabric.open(Instant::ZERO, device, Connection::Loopback, options).unwrap();
        Pair::alone(fabric, link, Clock::Virtual(Instant::ZERO))
    };
    std::panic::catch_unwind(|| run(&mut { make })).is_ok()
}

#[test]
fn a_backend_without_a_bug_conforms() {
    assert!(conforms(Bug::None));
}

#[test]
fn every_seeded_bug_is_found() {
    let bugs = [
        Bug::LiesAboutRefusals,
        Bug::LiesAboutTheFarEnd,
        Bug::CountsTwice,
        Bug::CountsAlways,
        Bug::WritesLate,
        Bug::LosesCancelled,
        Bug::FinishesTwice,
        Bug::DropsTheLastByte,
    ];
    let missed: Vec<Bug> = bugs.into_iter().filter(|bug| conforms(*bug)).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// A link to oneself over a backend that plays a device, whose memory is the local side of every move.
fn with_device_memory(bug: Bug) -> Pair {
    let device = Untouchable::new(GPU);
    let mut fabric = Fabric::new(FabricOptions::new([1; 32])).unwrap();
    let buggy = Buggy { host: Host::new(), bug, kept: None, device: Some(device.clone()) };
    let added = fabric.add_device(Box::new(buggy)).unwrap();
    let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
    let link = fabric.open(Instant::ZERO, added, Connection::Loopback, options).unwrap();
    let mut pair = Pair::alone(fabric, link, Clock::Virtual(Instant::ZERO));
    pair.supply = Some(std::rc::Rc::new(device));
    pair
}

#[test]
fn a_backend_that_reaches_device_memory_as_a_device_does_conforms() {
    // Moves whose sides are both local: what both sides post goes from host memory to the device's, which it does not move.
    let mut make = || with_device_memory(Bug::None);
    for (name, case) in super::moves::CASES.iter().chain(super::endings::CASES) {
        if *name != "both sides post at once" {
            case(&mut make);
        }
    }
}

/// Runs by itself in another process, and dies there.
#[test]
#[ignore = "it is meant to die: `a_backend_that_touches_device_memory_by_cpu_is_found` runs it"]
fn touches_device_memory() {
    run(&mut || with_device_memory(Bug::TouchesTheDevice));
}

#[test]
fn a_backend_that_touches_device_memory_by_cpu_is_found() {
    use std::os::unix::process::ExitStatusExt;
    let test = "conformance::tests::touches_device_memory";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", test, "--ignored", "--nocapture"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{:?}\n{told}", output.status);
    assert!(told.contains("conformance: writes of every size land exactly"), "{told}");
}
