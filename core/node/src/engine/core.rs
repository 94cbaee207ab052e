//! What all handles of one engine share: the shard behind its progress lock, the queue in front of it, and timers.
//!
//! Nothing here knows a runtime. Whoever holds the progress lock moves everything along; who finds it taken leaves what it
//! wants in the inbox, and the holder looks there again after it let go. Invariants: no handle holds the lock across a
//! wait; nothing stays in the inbox while nobody holds the lock.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::thread::Thread;

use futures::task::AtomicWaker;
use millpond_core::batch::RegionId;
use millpond_core::slab::Handle;
use millpond_core::time::Instant;
use millpond_hal::fabric::{self, FabricWake};
use millpond_hal::fork::ForkMark;
use millpond_hal::sync::{Desk, Held};
use parking_lot::Mutex;

use super::batch::{Batch, Request, Via};
use super::drive::Waits;
use super::lanes::Openings;
use super::options::Options;
use super::peers::WantedLane;
use super::shard::{Shard, StartError};
use super::staging::Staging;
use super::statistics::Statistics;
use super::submit::{SubmitError, SubmitErrorKind};
use super::transfer::{Cause, Shared, Transfer, TransferId};
use super::wires::Wires;
use crate::runtime::Runtime;

pub(super) struct Core {
    pub(super) options: Options,
    clock: Clock,
    /// In place of TCP.
    pub(super) wires: Option<Arc<dyn Wires>>,
    desk: Desk<Shard, Wish>,
    timers: Mutex<Timers>,
    driver: AtomicWaker,
    kicked: AtomicBool,
    /// Whether tasks were woken since the driver looked.
    woke: AtomicBool,
    /// Until when the driver sleeps on what it armed, in nanoseconds; 0 while it is awake. Set by the driver under
    /// the progress lock, cleared by the driver alone.
    asleep_until: AtomicU64,
    is_shut_down: AtomicBool,
    next_transfer: AtomicU64,
    /// Batches accepted and not ended.
    open: AtomicU32,
    /// The fabric's descriptor, for callers that sleep on it.
    pub(super) wake_fd: OwnedFd,
    waker: fabric::Waker,
    pub(super) callers: AtomicU32,
    pub(super) caller_turns: AtomicU64,
    pub(super) driver_turns: AtomicU64,
    /// Held by the one caller that sleeps on the descriptor.
    pub(super) leader: Mutex<()>,
    /// That one sleeps, or is about to: an end that somebody else brings about has to wake it.
    pub(super) leader_naps: AtomicBool,
    /// Callers that wait for the leader to bring their transfer on, or to leave.
    pub(super) followers: Mutex<Vec<Thread>>,
    /// How often in a row spinning did not pay.
    pub(super) spins_lost: AtomicU32,
    pub(super) waits: Waits,
    pub(super) own: Handle,
    refused: AtomicU64,
    pub(super) staging: Staging,
    pub(super) openings: Mutex<Openings>,
    mark: ForkMark,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("options", &self.options).field("desk", &self.desk).finish_non_exhaustive()
    }
}

/// The clock of a runtime, without its type.
pub(super) struct Clock(Box<dyn Fn() -> Instant + Send + Sync>);

impl Clock {
    pub(super) fn of<R: Runtime>(runtime: R) -> Self {
        Self(Box::new(move || runtime.now()))
    }
}

/// Something to be done by whoever holds the lock.
#[derive(Debug)]
enum Wish {
    Start(Arc<Shared>, Batch),
    Detach(RegionId),
    /// A transfer was cancelled: look at them all.
    Look,
}

/// Who is to be woken when. A waker that is not needed any more wakes for nothing.
#[derive(Debug, Default)]
struct Timers {
    due: BTreeMap<(Instant, u64), Waker>,
    next: u64,
}

/// What to wait for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Armed {
    /// There is work, or somebody else is at it.
    Now,
    /// The descriptor, until that instant at the latest.
    Until(Instant),
}

impl Core {
    pub(super) fn new(options: Options, clock: Clock, wires: Option<Arc<dyn Wires>>) -> Result<Self, StartError> {
        let (shard, own) = Shard::new(&options, wires.as_deref(), clock.0())?;
        let wake_fd = rustix::io::fcntl_dupfd_cloexec(shard.fabric.wake_fd(), 0)
            .map_err(|error| StartError::System { what: "a descriptor", why: error.to_string() })?;
        let waker = shard.fabric.waker();
        let mark = ForkMark::new()
            .map_err(|error| StartError::System { what: "a page of its own", why: error.to_string() })?;
        Ok(Self {
            options,
            clock,
            wires,
            desk: Desk::new(shard),
            timers: Mutex::default(),
            driver: AtomicWaker::new(),
            kicked: AtomicBool::new(false),
            woke: AtomicBool::new(false),
            asleep_until: AtomicU64::new(0),
            is_shut_down: AtomicBool::new(false),
            next_transfer: AtomicU64::new(1),
            open: AtomicU32::new(0),
            wake_fd,
            waker,
            callers: AtomicU32::new(0),
            caller_turns: AtomicU64::new(0),
            driver_turns: AtomicU64::new(0),
            leader: Mutex::new(()),
            leader_naps: AtomicBool::new(false),
            followers: Mutex::default(),
            spins_lost: AtomicU32::new(0),
            waits: Waits::default(),
            own,
            refused: AtomicU64::new(0),
            staging: Staging::default(),
            openings: Mutex::default(),
            mark,
        })
    }

    /// The time, as the runtime has it.
    pub(super) fn now(&self) -> Instant {
        self.clock.0()
    }

    /// Runs `work` on the shard.
    pub(super) fn locked<T>(&self, work: impl FnOnce(&mut Shard) -> T) -> T {
        let mut shard = self.desk.lock();
        let output = work(&mut shard);
        self.release(shard);
        output
    }

    /// Runs `work` on the shard, unless somebody else is at it.
    pub(super) fn try_locked<T>(&self, work: impl FnOnce(&mut Shard) -> T) -> Option<T> {
        let mut shard = self.desk.try_lock()?;
        self.grant_wishes(&mut shard);
        let output = work(&mut shard);
        self.release(shard);
        Some(output)
    }

    /// Whether batches are taken at all.
    pub(super) fn is_over(&self) -> bool {
        self.is_shut_down() || self.mark.is_in_child()
    }

    /// Names the next transfer.
    pub(super) fn next_id(&self) -> TransferId {
        TransferId(self.next_transfer.fetch_add(1, Ordering::Relaxed))
    }

    /// One turn, unless somebody else is at it: `None`. Whoever spins has the time already, and reading it is a good
    /// part of a turn that finds nothing.
    pub(super) fn try_turn(&self, now: Instant) -> Option<bool> {
        let mut shard = self.desk.try_lock()?;
        self.grant_wishes(&mut shard);
        let worked = shard.turn(&self.options, now);
        if std::mem::take(&mut shard.woke) {
            self.woke.store(true, Ordering::Relaxed);
        }
        self.release(shard);
        Some(worked)
    }

    /// Arms the fabric for a caller's sleep.
    pub(super) fn arm(&self) -> Armed {
        self.arm_noting(|_| {})
    }

    /// Arms the fabric for the driver's sleep, and notes how long it will be.
    pub(super) fn arm_driver(&self, timer: Instant) -> Armed {
        self.arm_noting(|until| self.asleep_until.store(until.min(timer).as_nanos().max(1), Ordering::Relaxed))
    }

    /// The driver does not sleep any more.
    pub(super) fn wake_driver(&self) {
        self.asleep_until.store(0, Ordering::Relaxed);
    }

    /// Arms the fabric again for a driver that sleeps: the turns of others disarmed it, and whoever made the last of them
    /// leaves. What peers do from now on would wake nobody otherwise.
    pub(super) fn rearm_driver(&self) {
        let is_asleep = || self.asleep_until.load(Ordering::Relaxed);
        if is_asleep() == 0 {
            return;
        }
        match self.arm() {
            Armed::Until(until) if until.as_nanos() >= is_asleep() => {}
            _ => self.kick(),
        }
    }

    fn arm_noting(&self, note: impl FnOnce(Instant)) -> Armed {
        let Some(mut shard) = self.desk.try_lock() else { return Armed::Now };
        self.grant_wishes(&mut shard);
        let now = self.now();
        let armed = match shard.fabric.arm(now) {
            FabricWake::Now => Armed::Now,
            FabricWake::Within(within) => {
                let own = within.map_or(Instant::NEVER, |span| now + span);
                let until = own.min(shard.next_tick());
                shard.lapse.on_wait(until);
                note(until);
                Armed::Until(until)
            }
        };
        self.release(shard);
        armed
    }

    /// Lets go of the lock, and sees to what was wished for meanwhile.
    fn release(&self, shard: Held<'_, Shard>) {
        let mut next = Some(shard);
        // Bounded by who else submits: each round takes what is there.
        while let Some(shard) = next {
            let wants_dials = !shard.wanted.is_empty();
            next = self.desk.release(shard);
            if wants_dials {
                self.kick();
            }
            if let Some(shard) = &mut next {
                self.grant_wishes(shard);
            }
        }
    }

    fn wish(&self, wish: Wish) {
        if let Some(mut shard) = self.desk.leave(wish) {
            self.grant_wishes(&mut shard);
            self.release(shard);
        }
    }

    fn grant_wishes(&self, shard: &mut Held<'_, Shard>) {
        let wishes = self.desk.take_wishes(shard);
        if wishes.is_empty() {
            return;
        }
        let now = self.now();
        for wish in wishes {
            match wish {
                Wish::Start(shared, batch) => self.start(shard, shared, batch, now),
                Wish::Detach(region) => {
                    // In flight only if another handle of the same region posted it; its next drop detaches it.
                    let _ = shard.fabric.detach(region);
                }
                Wish::Look => shard.look(&self.options, now),
            }
        }
    }

    fn start(&self, shard: &mut Shard, shared: Arc<Shared>, batch: Batch, now: Instant) {
        if let Err((shared, batch)) = shard.start(shared, batch, &self.options, now) {
            // It was accepted before the table filled up; say so by its report.
            shared.fail(batch, &Cause::Overload);
        }
    }

    pub(super) fn submit(self: &Arc<Self>, batch: Batch) -> Result<Transfer, SubmitError> {
        if let Some(kind) = self.refusal(&batch) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(SubmitError { kind, batch });
        }
        let id = self.next_id();
        let shared = Arc::new(Shared::new(id, Arc::clone(self)));
        self.open.fetch_add(1, Ordering::Relaxed);
        let transfer = Transfer::new(Arc::clone(&shared));
        if batch.is_staged() {
            self.staging.push(shared, batch);
            return Ok(transfer);
        }
        match self.desk.try_lock() {
            Some(mut shard) => {
                self.grant_wishes(&mut shard);
                self.start(&mut shard, shared, batch, self.now());
                self.release(shard);
            }
            None => self.wish(Wish::Start(shared, batch)),
        }
        Ok(transfer)
    }

    fn refusal(&self, batch: &Batch) -> Option<SubmitErrorKind> {
        if self.mark.is_in_child() {
            return Some(SubmitErrorKind::Forked);
        }
        if self.is_shut_down() {
            return Some(SubmitErrorKind::ShutDown);
        }
        if batch.is_empty() {
            return Some(SubmitErrorKind::Empty);
        }
        let (bytes, bytes_max) = (batch.bytes(), self.options.bytes_per_peer_max);
        if bytes > bytes_max {
            return Some(SubmitErrorKind::TooLarge { bytes, bytes_max });
        }
        let via = batch.settings.via;
        if !self.options.allows(via) {
            return Some(SubmitErrorKind::NoPath { via, why: "the transport is switched off here" });
        }
        if via != Via::Auto {
            let is_own = matches!(via, Via::Local | Via::File | Via::Cuda);
            // Of what goes through buffers that is said of the halves that join a peer; there has to be one.
            let is_right = |request: &Request| match request.is_staged() {
                true => !is_own && request.reaches_a_peer(),
                false => is_own == request.remote().region.peer().is_self(),
            };
            if !batch.requests.iter().all(is_right) {
                let why =
                    "the peer is this engine itself for `local`, `file` and `cuda`, and another process for the others";
                return Some(SubmitErrorKind::NoPath { via, why });
            }
        }
        // What is staged needs room for its halves beside it.
        let is_crowded = batch.is_staged() && self.staging.open() >= self.options.transfers_max / 4;
        if is_crowded || self.open.load(Ordering::Relaxed) >= self.options.transfers_max {
            let retry_after = self.desk.try_lock().map_or(RETRY_AFTER, |shard| shard.retry_hint());
            return Some(SubmitErrorKind::Busy { retry_after });
        }
        None
    }

    pub(super) fn on_transfer_over(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        self.woke.store(true, Ordering::Relaxed);
        if self.leader_naps.load(Ordering::Relaxed) && self.leader_naps.swap(false, Ordering::Relaxed) {
            self.waker.wake();
        }
    }

    /// Whether tasks were woken since the last call.
    pub(super) fn take_woke(&self) -> bool {
        self.woke.load(Ordering::Relaxed) && self.woke.swap(false, Ordering::Relaxed)
    }

    pub(super) fn statistics(&self) -> Statistics {
        let mut statistics = self.locked(|shard| shard.counted());
        statistics.transfers_open = u64::from(self.open_transfers());
        statistics.caller_turns = self.caller_turns.load(Ordering::Relaxed);
        statistics.driver_turns = self.driver_turns.load(Ordering::Relaxed);
        statistics.transfers_refused = self.refused.load(Ordering::Relaxed);
        statistics
    }

    pub(super) fn open_transfers(&self) -> u32 {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn detach(&self, region: RegionId) {
        self.wish(Wish::Detach(region));
    }

    pub(super) fn look(&self) {
        self.wish(Wish::Look);
        self.kick();
    }

    /// Has the driver look for work, also if it sleeps.
    pub(super) fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        self.driver.wake();
    }

    pub(super) fn take_kick(&self) -> bool {
        self.kicked.swap(false, Ordering::SeqCst)
    }

    pub(super) fn register_driver(&self, waker: &Waker) {
        self.driver.register(waker);
    }

    pub(super) fn take_wanted(&self) -> Vec<WantedLane> {
        match self.desk.try_lock() {
            Some(mut shard) if !shard.wanted.is_empty() => std::mem::take(&mut shard.wanted),
            _ => Vec::new(),
        }
    }

    pub(super) fn shut_down(&self) {
        if !self.is_shut_down.swap(true, Ordering::SeqCst) {
            self.locked(|shard| {
                shard.shut_down(&self.options, self.now());
                shard.arrivals.values().for_each(|arrivals| arrivals.close());
            });
            self.kick();
            self.waker.wake();
            self.staging.wake();
        }
    }

    pub(super) fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::SeqCst)
    }

    /// Whether a link is still to be closed, after a shutdown.
    pub(super) fn has_links(&self) -> bool {
        self.locked(|shard| !shard.links.is_empty())
    }

    /// Wakes `waker` at `deadline` or soon after.
    pub(super) fn wake_at(&self, deadline: Instant, waker: &Waker) {
        let mut timers = self.timers.lock();
        let is_first = timers.due.first_key_value().is_none_or(|((first, _), _)| deadline < *first);
        let key = (deadline, timers.next);
        timers.next += 1;
        timers.due.insert(key, waker.clone());
        drop(timers);
        if is_first {
            self.kick();
        }
    }

    /// Wakes whoever is due and says when the next one is.
    pub(super) fn fire_timers(&self, now: Instant) -> Instant {
        let mut timers = self.timers.lock();
        while let Some(entry) = timers.due.first_entry().filter(|entry| entry.key().0 <= now) {
            entry.remove().wake();
            self.woke.store(true, Ordering::Relaxed);
        }
        timers.due.first_key_value().map_or(Instant::NEVER, |((next, _), _)| *next)
    }
}

/// A guess, for callers refused while the shard is busy.
const RETRY_AFTER: millpond_core::time::Duration = millpond_core::time::Duration::from_millis(2);
