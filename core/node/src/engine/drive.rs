//! Who moves the shard along: a blocking caller while it waits, a polled transfer in passing, the driver task otherwise.
//!
//! All of them spin for a moment after something happened, because waking a sleeping core costs more than most transfers,
//! and spin less the less it pays. A caller whose waits are alike (a peer that copies so many bytes each time) sleeps through
//! the most of them and spins when the end is due. The driver yields to its executor every few turns, and stays away
//! while callers drive. An engine with nothing under way sleeps on its descriptor.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use futures::future::{Either, select};
use millpond_core::time::{Duration, Instant};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::core::{Armed, Core};
use super::lanes;
use super::transfer::{Report, Transfer};
use crate::runtime::{Readiness, Runtime, sleep_until};

/// How long the driver stays away after callers were seen driving.
const STAND_BACK: Duration = Duration::from_millis(1);
/// How long the driver works and spins before it yields, unless it woke a task: a yield wakes another thread of the executor.
const TURNS_SPAN: Duration = Duration::from_micros(200);
/// A timed sleep may end so much later than asked: the kernel's slack, and a core that has to wake.
const OVERSLEPT: Duration = Duration::from_micros(100);
/// The longest that a caller spins because an end is due.
const DUE_SPAN_MAX: Duration = Duration::from_micros(400);
/// Turns that find work without a sleep between them, after which operations flow.
const FLOWING: u32 = 4;
/// Spins in a row that may not pay before they become shorter.
const HICCUPS: u32 = 3;
/// Short waits in a row that are taken for another kind of wait.
const SHORT_MAX: u64 = 8;
/// The longest sleep of a caller; what happened meanwhile without waking it is found then.
const NAP_MAX: Duration = Duration::from_millis(50);

impl Core {
    /// How long to spin now.
    fn spin_span(&self) -> Duration {
        Duration::from_nanos(self.options.spin.as_nanos() >> self.halvings())
    }

    /// Between two looks while spinning until `end`. In the second half the core is offered to others: the peer may wait
    /// for just this one, and a kernel that sees two threads run on it moves one of them.
    fn relax(&self, now: Instant, end: Instant) {
        if end.since(now).as_nanos() > self.options.spin.as_nanos() / 2 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// How often a span to spin is halved: for each time in a row that it did not pay, but not for a hiccup, or a peer that
    /// waits as long would be lost as well.
    fn halvings(&self) -> u32 {
        self.spins_lost.load(Relaxed).saturating_sub(HICCUPS).min(5)
    }

    fn spin_paid(&self) {
        if self.spins_lost.load(Relaxed) != 0 {
            self.spins_lost.store(0, Relaxed);
        }
    }

    fn spin_lost(&self) {
        let lost = self.spins_lost.load(Relaxed);
        if lost < HICCUPS + 5 {
            self.spins_lost.store(lost + 1, Relaxed);
        }
    }

    /// Drives the shard on this thread until a transfer is over.
    pub(super) fn drive_until(&self, transfer: &Transfer) -> Report {
        let _here = Here::enter(self);
        let mut now = self.now();
        let mut quiet_since = now;
        let mut spin_end = quiet_since + self.options.spin;
        let mut is_due_awaited = false;
        loop {
            let worked = self.try_turn(now) == Some(true);
            if worked {
                if now > quiet_since + self.options.spin {
                    self.waits.note(now.since(quiet_since));
                }
                self.caller_turns.fetch_add(1, Relaxed);
                self.spin_paid();
            }
            // Before the clock is read again: what ended in its first turn reads it once.
            if let Some(report) = transfer.take_report() {
                return report;
            }
            now = self.now();
            if worked {
                (quiet_since, spin_end, is_due_awaited) = (now, now + self.options.spin, false);
                continue;
            }
            if now < spin_end {
                self.relax(now, spin_end);
                continue;
            }
            match self.waits.due(quiet_since).filter(|due| !is_due_awaited && now < due.end) {
                Some(due) if now < due.start => self.nap(transfer, due.start),
                Some(due) => {
                    let span = due.end.since(now).as_nanos() >> self.halvings();
                    (spin_end, is_due_awaited) = (now + Duration::from_nanos(span), true);
                }
                None => {
                    self.spin_lost();
                    self.nap(transfer, now + NAP_MAX);
                    spin_end = self.now() + self.spin_span();
                }
            }
            now = self.now();
        }
    }

    /// Sleeps until something may have happened, or until `end`: one caller on the descriptor, the others until that one is
    /// done.
    fn nap(&self, transfer: &Transfer, end: Instant) {
        let Some(leading) = self.leader.try_lock() else {
            let this = std::thread::current();
            transfer.unpark_when_over(&this);
            self.followers.lock().push(this);
            if !transfer.is_over() {
                std::thread::park_timeout(STAND_BACK.into());
            }
            let this = std::thread::current().id();
            self.followers.lock().retain(|other| other.id() != this);
            return;
        };
        // Arming takes the progress lock, under which transfers end: one that ended before is seen below, one that ends
        // after it sees this.
        self.leader_naps.store(true, Relaxed);
        if let Armed::Until(until) = self.arm()
            && !transfer.is_over()
        {
            let span = until.min(end).since(self.now());
            let nanos = i64::try_from(span.as_nanos()).unwrap_or(i64::MAX);
            let timeout = Timespec { tv_sec: nanos / 1_000_000_000, tv_nsec: nanos % 1_000_000_000 };
            // An interrupted or failed wait is a short one: the loop above looks again.
            let _ = rustix::event::poll(&mut [PollFd::new(&self.wake_fd, PollFlags::IN)], Some(&timeout));
        }
        self.leader_naps.store(false, Relaxed);
        drop(leading);
    }

    /// A turn in passing, for a future that is being polled.
    pub(super) fn drive_once(&self) -> bool {
        let worked = self.try_turn(self.now()) == Some(true);
        if worked {
            self.spin_paid();
        }
        worked
    }

    pub(super) fn spin_end(&self) -> Instant {
        self.now() + self.spin_span()
    }
}

/// How long callers waited, when spinning for the usual moment was not enough: mean and mean deviation, in nanoseconds, each
/// moved by an eighth and a quarter of the way as in RFC 6298. Callers that race only blur it.
#[derive(Debug, Default)]
pub(super) struct Waits {
    mean: AtomicU64,
    deviation: AtomicU64,
    /// Waits in a row that were much shorter than the mean.
    short: AtomicU64,
}

impl Waits {
    fn note(&self, wait: Duration) {
        let (wait, mean, deviation) = (wait.as_nanos(), self.mean.load(Relaxed), self.deviation.load(Relaxed));
        if wait < mean / 4 {
            // A peer that had to wake, say: another kind of wait, unless there are no others any more.
            let short = self.short.load(Relaxed) + 1;
            self.short.store(short, Relaxed);
            if short <= SHORT_MAX {
                return;
            }
        }
        self.short.store(0, Relaxed);
        if mean == 0 || wait < mean / 4 {
            self.mean.store(wait, Relaxed);
            self.deviation.store(wait / 2, Relaxed);
            return;
        }
        // One long wait is no reason to forget what is usual.
        let wait = wait.min(4 * mean);
        self.deviation.store(deviation - deviation / 4 + wait.abs_diff(mean) / 4, Relaxed);
        self.mean.store(mean - mean / 8 + wait / 8, Relaxed);
    }

    /// When a wait that began at `since` is likely to end, if that can be said to a fraction of a millisecond.
    fn due(&self, since: Instant) -> Option<Range<Instant>> {
        let (mean, deviation) = (self.mean.load(Relaxed), self.deviation.load(Relaxed));
        let margin = Duration::from_nanos(2 * deviation);
        let early = Duration::from_nanos(mean.saturating_sub((margin + OVERSLEPT).as_nanos()));
        let span = margin + margin + OVERSLEPT;
        (mean != 0 && span <= DUE_SPAN_MAX).then(|| since + early..since + Duration::from_nanos(mean) + margin)
    }
}

/// A caller that drives; the driver stands back meanwhile.
struct Here<'a>(&'a Core);

impl<'a> Here<'a> {
    fn enter(core: &'a Core) -> Self {
        core.callers.fetch_add(1, Relaxed);
        core.caller_turns.fetch_add(1, Relaxed);
        Self(core)
    }
}

impl Drop for Here<'_> {
    fn drop(&mut self) {
        let core = self.0;
        let left = core.callers.fetch_sub(1, Relaxed) - 1;
        if left > 0 {
            if let Some(next) = core.followers.lock().pop() {
                next.unpark();
            }
        } else if core.open_transfers() > 0 {
            core.kick(); // somebody else's transfers are under way
        } else {
            core.rearm_driver();
        }
    }
}

/// Completes when somebody kicked the driver.
async fn kicked(core: &Core) {
    poll_fn(|context| {
        core.register_driver(context.waker());
        if core.take_kick() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Whether anything is left to drive: what was open at a shutdown ends, and its links, some of which drain first.
fn is_needed(core: &Core, links_until: &mut Option<Instant>) -> bool {
    if !core.is_shut_down() || core.open_transfers() > 0 {
        return true;
    }
    let until = *links_until.get_or_insert_with(|| core.now() + core.options.progress_deadline);
    core.has_links() && core.now() < until
}

/// The driver task. Ends with the engine's shutdown, or its last handle, once the transfers and links that were open have
/// ended too.
pub(super) async fn drive<R: Runtime>(runtime: R, core: Arc<Core>) {
    let mut readiness: Option<R::Readiness> = None;
    let mut callers_seen = core.caller_turns.load(Relaxed);
    let mut spin_end = Instant::ZERO;
    let mut yield_at = Instant::ZERO;
    let mut turns_awake = 0;
    let mut links_until = None;
    while is_needed(&core, &mut links_until) {
        let now = core.now();
        let next_timer = core.fire_timers(now);
        for wanted in core.take_wanted() {
            runtime.spawn(lanes::dial_wanted(runtime.clone(), Arc::clone(&core), wanted));
        }
        let turns = core.caller_turns.load(Relaxed);
        if turns != std::mem::replace(&mut callers_seen, turns) || core.callers.load(Relaxed) > 0 {
            readiness = None; // or every byte would wake this task too
            let until = next_timer.min(core.now() + STAND_BACK);
            select(pin!(kicked(&core)), pin!(sleep_until(&runtime, until))).await;
            continue;
        }
        let worked = core.try_turn(now);
        let now = if worked == Some(true) { core.now() } else { now };
        if worked == Some(true) {
            core.driver_turns.fetch_add(1, Relaxed);
            core.spin_paid();
            spin_end = now + core.spin_span();
            turns_awake += 1;
            if turns_awake == FLOWING {
                readiness = None; // or what arrives would wake another thread of the executor each time
            }
        }
        if now < spin_end {
            if now >= yield_at || worked != Some(true) && core.take_woke() {
                runtime.yield_now().await;
                yield_at = core.now() + TURNS_SPAN;
            } else {
                core.relax(now, spin_end);
            }
            continue;
        }
        if worked == Some(false) && spin_end != Instant::ZERO {
            core.spin_lost();
            spin_end = Instant::ZERO;
        }
        if readiness.is_none() {
            readiness = watch(&runtime, &core);
        }
        match core.arm_driver(next_timer) {
            // Somebody else is at it, or there is work at once.
            Armed::Now => runtime.yield_now().await,
            Armed::Until(until) => {
                sleep(&runtime, &core, readiness.as_ref(), until.min(next_timer)).await;
                core.wake_driver();
                turns_awake = 0;
            }
        }
    }
}

fn watch<R: Runtime>(runtime: &R, core: &Core) -> Option<R::Readiness> {
    let fd = rustix::io::fcntl_dupfd_cloexec(&core.wake_fd, 0).ok()?;
    runtime.readable(fd).ok()
}

async fn sleep<R: Runtime>(runtime: &R, core: &Core, readiness: Option<&R::Readiness>, until: Instant) {
    let Some(readiness) = readiness else {
        // Out of descriptors: look again by the clock.
        return runtime.sleep(STAND_BACK).await;
    };
    let (events, kick, alarm) = (pin!(readiness.readable()), pin!(kicked(core)), pin!(sleep_until(runtime, until)));
    if let Either::Left((Either::Left((Err(_), _)), _)) = select(select(events, kick), alarm).await {
        runtime.sleep(STAND_BACK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_that_are_alike_are_foreseen_and_others_are_not() {
        let (waits, start) = (Waits::default(), Instant::ZERO + Duration::from_secs(1));
        assert!(waits.due(start).is_none());
        (0..64).for_each(|n| waits.note(Duration::from_micros(1100 + 20 * (n % 3))));
        let due = waits.due(start).expect("they are alike");
        assert!(due.start < start + Duration::from_micros(1050) && due.start > start + Duration::from_micros(800));
        assert!(due.end > start + Duration::from_micros(1140) && due.end < start + Duration::from_micros(1300));
        waits.note(Duration::from_secs(5));
        (0..24).for_each(|_| waits.note(Duration::from_micros(1100)));
        assert!(waits.due(start).is_some(), "one that was long is forgotten");
        (0..64).for_each(|n| waits.note(Duration::from_micros(if n % 2 == 0 { 40 } else { 1100 })));
        assert!(waits.due(start).is_some_and(|due| due.end > start + Duration::from_micros(1000)), "two kinds");
        (0..64).for_each(|_| waits.note(Duration::from_micros(90)));
        assert!(waits.due(start).is_some_and(|due| due.end < start + Duration::from_micros(200)), "only short ones");
        (0..64).for_each(|n| waits.note(Duration::from_micros(if n % 2 == 0 { 1000 } else { 3000 })));
        assert!(waits.due(start).is_none());
    }
}
