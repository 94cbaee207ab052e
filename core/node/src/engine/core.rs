//! What all handles of one engine share: its tables, its timers, and the copies inside this process.
//!
//! Nothing here knows a runtime; the driver task of `Engine` calls in. Invariant: no handle holds the lock across a wait.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::Waker;

use futures::task::AtomicWaker;
use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken, Rights};
use millpond_core::quiet::Far;
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

use super::batch::{Batch, Request, Via, bytes_of};
use super::grant::{Arrivals, GrantError, GrantErrorKind};
use super::options::Options;
use super::statistics::Statistics;
use super::submit::{SubmitError, SubmitErrorKind};
use super::transfer::{Cause, Failure, Outcome, RefusalReason, Report, Shared, State, Status, Transfer, TransferId};
use super::{RegionBuf, RegionBytes, RemoteExtent};
use crate::runtime::boot_time;

#[derive(Debug)]
pub(super) struct Core {
    pub(super) options: Options,
    tables: Mutex<Tables>,
    timers: Mutex<Timers>,
    driver: AtomicWaker,
    is_shut_down: AtomicBool,
    next_transfer: AtomicU64,
    next_grant: AtomicU64,
}

#[derive(Debug, Default)]
struct Tables {
    writable: HashMap<RegionId, Writable>,
    readable: HashMap<RegionId, Readable>,
    statistics: Statistics,
}

#[derive(Debug)]
struct Writable {
    memory: Vec<RegionBuf>,
    capability: Capability,
    arrivals: Arc<Arrivals>,
}

#[derive(Debug)]
struct Readable {
    memory: Vec<RegionBytes>,
    capability: Capability,
}

/// Who is to be woken when. A waker is kept once per instant and wakes late rather than not at all.
#[derive(Debug, Default)]
struct Timers {
    due: BTreeMap<(Instant, u64), Waker>,
    next: u64,
}

fn failed(reason: RefusalReason) -> Status {
    Status::Failed(Failure { cause: Cause::Refused { reason }, far: Far::Untouched })
}

impl Core {
    pub(super) fn new(options: Options) -> Self {
        Self {
            options,
            tables: Mutex::default(),
            timers: Mutex::default(),
            driver: AtomicWaker::new(),
            is_shut_down: AtomicBool::new(false),
            next_transfer: AtomicU64::new(1),
            next_grant: AtomicU64::new(0),
        }
    }

    pub(super) fn statistics(&self) -> Statistics {
        self.tables.lock().statistics
    }

    pub(super) fn shut_down(&self) {
        self.is_shut_down.store(true, Relaxed);
        self.tables.lock().writable.values().for_each(|grant| grant.arrivals.close());
        self.driver.wake();
    }

    pub(super) fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Relaxed)
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
            self.driver.wake();
        }
    }

    /// Wakes whoever is due and says when the next one is.
    pub(super) fn fire_timers(&self, now: Instant) -> Instant {
        let mut timers = self.timers.lock();
        while let Some(entry) = timers.due.first_entry().filter(|entry| entry.key().0 <= now) {
            entry.remove().wake();
        }
        timers.due.first_key_value().map_or(Instant::NEVER, |((next, _), _)| *next)
    }

    pub(super) fn register_driver(&self, waker: &Waker) {
        self.driver.register(waker);
    }

    fn token(
        &self,
        rights: Rights,
        ranges: impl Iterator<Item = (RegionId, u64, u64)>,
    ) -> Result<RegionToken, GrantErrorKind> {
        let (mut memory, mut first, mut end) = (None, u64::MAX, 0);
        for (region, offset, len) in ranges {
            if memory.is_some_and(|other| other != region) {
                return Err(GrantErrorKind::SeveralRegions);
            }
            memory = Some(region);
            first = first.min(offset);
            end = end.max(offset + len);
        }
        let memory = memory.ok_or(GrantErrorKind::Empty)?;
        if self.is_shut_down() {
            return Err(GrantErrorKind::ShutDown);
        }
        let serial = self.next_grant.fetch_add(1, Relaxed);
        let slot = u32::try_from(serial).map_err(|_| GrantErrorKind::Full)?;
        let mut proof = [0; 16];
        getrandom::fill(&mut proof).map_err(|_| GrantErrorKind::Full)?;
        let incarnation = self.options.identity.incarnation;
        let (region, capability) = (RegionId { slot, epoch: 1 }, Capability::new(proof));
        Ok(RegionToken::new(region, memory, first, end - first, MemoryKind::Host, rights, capability, incarnation, 0))
    }

    pub(super) fn grant_write(
        &self,
        memory: Vec<RegionBuf>,
    ) -> Result<(RegionToken, Arc<Arrivals>), GrantError<RegionBuf>> {
        let ranges = memory.iter().map(|buf| (buf.region().id(), buf.offset(), bytes_of(buf.len())));
        match self.token(Rights::REMOTE_WRITE, ranges) {
            Ok(token) => {
                let arrivals = Arc::new(Arrivals::default());
                let entry = Writable { memory, capability: token.capability, arrivals: Arc::clone(&arrivals) };
                self.tables.lock().writable.insert(token.region, entry);
                Ok((token, arrivals))
            }
            Err(kind) => Err(GrantError { kind, memory }),
        }
    }

    pub(super) fn grant_read(&self, memory: Vec<RegionBytes>) -> Result<RegionToken, GrantError<RegionBytes>> {
        let ranges = memory.iter().map(|bytes| (bytes.region().id(), bytes.offset(), bytes_of(bytes.len())));
        match self.token(Rights::REMOTE_READ, ranges) {
            Ok(token) => {
                self.tables.lock().readable.insert(token.region, Readable { memory, capability: token.capability });
                Ok(token)
            }
            Err(kind) => Err(GrantError { kind, memory }),
        }
    }

    pub(super) fn close_grant(&self, grant: RegionId) -> Vec<RegionBuf> {
        let Some(entry) = self.tables.lock().writable.remove(&grant) else { return Vec::new() };
        entry.arrivals.close();
        entry.memory
    }

    pub(super) fn close_read_grant(&self, grant: RegionId) -> Vec<RegionBytes> {
        self.tables.lock().readable.remove(&grant).map(|entry| entry.memory).unwrap_or_default()
    }

    pub(super) fn submit(&self, mut batch: Batch) -> Result<Transfer, SubmitError> {
        if let Some(kind) = self.refusal(&batch) {
            self.tables.lock().statistics.transfers_refused += 1;
            return Err(SubmitError { kind, batch });
        }
        let start = boot_time();
        let id = TransferId(self.next_transfer.fetch_add(1, Relaxed));
        let mut tables = self.tables.lock();
        let arrival = batch.settings.arrival;
        let mut reached: Option<RegionId> = None;
        let outcomes: Vec<Outcome> = batch
            .requests
            .drain(..)
            .map(|request| {
                if let (Request::Write { target, .. }, true) = (&request, arrival.is_some()) {
                    reached = Some(target.region.inner.token.region);
                }
                tables.copy(request)
            })
            .collect();
        let is_done = outcomes.iter().all(|outcome| outcome.status == Status::Done);
        if let (Some(arrival), Some(grant), true) = (arrival, reached, is_done)
            && let Some(entry) = tables.writable.get(&grant)
        {
            entry.arrivals.on_arrival(arrival);
        }
        tables.statistics.transfers_started += 1;
        tables.statistics.requests += bytes_of(outcomes.len());
        *(if is_done { &mut tables.statistics.transfers_done } else { &mut tables.statistics.transfers_failed }) += 1;
        drop(tables);
        let bytes_done =
            outcomes.iter().filter(|outcome| outcome.status == Status::Done).map(|outcome| outcome.bytes).sum();
        let elapsed = boot_time().since(start);
        let report = Report { outcomes, batch, id, elapsed, via: Some(Via::Local), retries: 0 };
        let state = State { report: Some(report), is_over: true, waker: None, cancel: false, bytes_done };
        Ok(Transfer { shared: Arc::new(Shared { id, state: Mutex::new(state) }) })
    }

    fn refusal(&self, batch: &Batch) -> Option<SubmitErrorKind> {
        let via = batch.settings.via;
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
        let is_local = batch.requests.iter().all(|request| request.remote().region.peer().is_self());
        if !matches!(via, Via::Auto | Via::Local) {
            return Some(SubmitErrorKind::NoPath { via, why: "the transport is not built in" });
        }
        (!is_local).then_some(SubmitErrorKind::NoPath { via, why: "the peer is another process" })
    }

    pub(super) fn drive_until(&self, transfer: &Transfer) -> Report {
        loop {
            if let Some(report) = transfer.shared.state.lock().report.take() {
                return report;
            }
            std::thread::park_timeout(Duration::from_micros(20).into());
        }
    }
}

impl Tables {
    fn copy(&mut self, request: Request) -> Outcome {
        match request {
            Request::Write { source, target } => {
                let bytes = bytes_of(source.len());
                let status = self.write(&source, &target).map_or_else(failed, |()| Status::Done);
                self.statistics.bytes_written += if status == Status::Done { bytes } else { 0 };
                Outcome { status, bytes, buffer: None }
            }
            Request::Read { source, mut target } => {
                let bytes = bytes_of(target.len());
                let status = self.read(&source, &mut target).map_or_else(failed, |()| Status::Done);
                self.statistics.bytes_read += if status == Status::Done { bytes } else { 0 };
                Outcome { status, bytes, buffer: Some(target) }
            }
        }
    }

    fn write(&mut self, source: &[u8], target: &RemoteExtent) -> Result<(), RefusalReason> {
        let token = &target.region.inner.token;
        let grant = self.writable.get_mut(&token.region).ok_or(RefusalReason::Stale)?;
        if !grant.capability.matches(&token.capability) {
            return Err(RefusalReason::NotAllowed);
        }
        let place = |buf: &&mut RegionBuf| inside(buf.offset(), buf.len(), target).is_some();
        let buf = grant.memory.iter_mut().find(place).ok_or(RefusalReason::OutOfBounds)?;
        let start = inside(buf.offset(), buf.len(), target).ok_or(RefusalReason::OutOfBounds)?;
        buf[start..start + source.len()].copy_from_slice(source);
        Ok(())
    }

    fn read(&self, source: &RemoteExtent, target: &mut [u8]) -> Result<(), RefusalReason> {
        let token = &source.region.inner.token;
        let grant = self.readable.get(&token.region).ok_or(RefusalReason::Stale)?;
        if !grant.capability.matches(&token.capability) {
            return Err(RefusalReason::NotAllowed);
        }
        let found = grant.memory.iter().find_map(|bytes| Some((bytes, inside(bytes.offset(), bytes.len(), source)?)));
        let (bytes, start) = found.ok_or(RefusalReason::OutOfBounds)?;
        target.copy_from_slice(&bytes[start..start + target.len()]);
        Ok(())
    }
}

/// Where `extent` begins in a range of memory, if it lies inside.
fn inside(offset: u64, len: usize, extent: &RemoteExtent) -> Option<usize> {
    let start = extent.offset.checked_sub(offset)?;
    (start.checked_add(extent.len)? <= bytes_of(len)).then(|| usize::try_from(start).ok())?
}
