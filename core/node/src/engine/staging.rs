//! Batches that cannot go directly: through buffers of the engine in two halves, beside what of them can.
//!
//! That is copies between memory none of which is the batch's own, memory of devices that goes to peers or comes from them, and
//! batches that follow work on a device. A task of the engine takes such a batch apart, has the parts moved as ordinary batches,
//! and puts their outcomes together in the order in which the requests were added. Memory of a device is lent to the engine
//! itself for that while, by a grant, and comes back with the report. The buffers are made with the first such batch, shared by
//! all, and locked by the backend that needs them so. It chooses no path. Invariants: a staged transfer ends, since its parts do;
//! it is cancelled with all its parts; what is under way at a time is bounded by the buffers; an arrival is announced after every
//! write of its batch, staged or not, and only if all are done.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use futures::future::{Either, select};
use futures::join;
use futures::task::AtomicWaker;
use millpond_core::quiet::Far;
use millpond_core::slab::Handle;
use millpond_core::time::Duration;
use millpond_hal::contract::{Fence, FenceState};
use millpond_hal::fabric;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;

use super::batch::{Batch, Request, Via};
use super::copy::{Copy, Hands, Job, STAGES, Stages};
use super::core::Core;
use super::own::attach_own;
use super::remote::RemoteExtent;
use super::statistics::{Considered, Explanation};
use super::transfer::{Cause, Failure, Outcome, Report, Shared, Status};
use super::{RegionBuf, RegionToken};
use crate::runtime::{Readiness, Runtime};

/// Buffers for all batches of an engine together.
const ENGINE_STAGES: u32 = 2 * STAGES;
/// How long a look at a fence that announces itself may wait.
const FENCE_SPAN: Duration = Duration::from_millis(5);
/// The same for one that does not.
const SILENT_FENCE_SPAN: Duration = Duration::from_micros(500);

/// What waits for the task.
#[derive(Debug, Default)]
pub(super) struct Staging {
    queue: Mutex<Queue>,
    /// Accepted and not ended.
    open: AtomicU32,
    task: AtomicWaker,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Arc<Shared>, Batch)>,
    /// The task has ended: who comes now is too late.
    is_closed: bool,
}

impl Staging {
    pub(super) fn push(&self, shared: Arc<Shared>, batch: Batch) {
        let mut queue = self.queue.lock();
        if queue.is_closed {
            drop(queue);
            return shared.fail(batch, &Cause::ShutDown);
        }
        self.open.fetch_add(1, Relaxed);
        queue.waiting.push_back((shared, batch));
        drop(queue);
        self.task.wake();
    }

    pub(super) fn open(&self) -> u32 {
        self.open.load(Relaxed)
    }

    pub(super) fn wake(&self) {
        self.task.wake();
    }
}

/// The next batch; `None` once the engine is shut down and nothing waits.
async fn next(core: &Core) -> Option<(Arc<Shared>, Batch)> {
    poll_fn(|context| {
        core.staging.task.register(context.waker());
        let mut queue = core.staging.queue.lock();
        match queue.waiting.pop_front() {
            Some(next) => Poll::Ready(Some(next)),
            None if core.is_shut_down() => {
                queue.is_closed = true;
                Poll::Ready(None)
            }
            None => Poll::Pending,
        }
    })
    .await
}

/// The task. Ends with the engine's shutdown.
pub(super) async fn serve<R: Runtime>(runtime: R, core: Arc<Core>) {
    let mut stages: Option<Arc<Stages>> = None;
    while let Some((shared, batch)) = next(&core).await {
        if stages.is_none() {
            match Stages::new(&core, ENGINE_STAGES) {
                Ok(made) => stages = Some(Arc::new(made)),
                Err(error) => tracing::warn!(%error, "no memory for buffers between two links"),
            }
        }
        match &stages {
            None => {
                core.staging.open.fetch_sub(1, Relaxed);
                shared.fail(batch, &Cause::Overload);
            }
            Some(stages) => {
                let (owner, core, stages) = (runtime.clone(), Arc::clone(&core), Arc::clone(stages));
                runtime.spawn(async move {
                    let report = stage(&owner, &core, &stages, &shared, batch).await;
                    core.staging.open.fetch_sub(1, Relaxed);
                    shared.complete(report);
                });
            }
        }
    }
}

/// What became of a request.
enum Part {
    /// It goes as it is.
    Direct,
    /// It goes through buffers, and what is held for it ends with it.
    Copied(Holding),
    /// It was not begun.
    Failed(Outcome),
}

/// Memory of a device, lent to the engine for the time of a copy.
#[derive(Default)]
struct Holding {
    /// Gives the buffer of a read back.
    target: Option<fabric::Grant>,
    source: Option<fabric::ReadGrant>,
}

/// Moves all of a batch.
async fn stage<R: Runtime>(
    runtime: &R,
    core: &Arc<Core>,
    stages: &Stages,
    shared: &Arc<Shared>,
    mut batch: Batch,
) -> Report {
    let (start, settings) = (core.now(), batch.settings);
    let job = Job {
        class: settings.class,
        progress_deadline: settings.progress_deadline,
        end: settings.deadline.map(|span| start + span),
        parent: Some(Arc::clone(shared)),
        via: settings.via,
        ..Job::default()
    };
    let hands = Hands { core, runtime, job: &job };
    if let Some(fence) = batch.after.take()
        && let Err(cause) = passed(&hands, &*fence).await
    {
        return Report { elapsed: core.now().since(start), ..Report::failed(batch, &cause, shared.id) };
    }
    let mut direct = Batch { settings, ..Batch::default() };
    let (mut copies, mut written) = (Vec::new(), Vec::new());
    let mut parts: Vec<Part> = Vec::new();
    for request in batch.requests.drain(..) {
        if matches!(request, Request::Write { .. } | Request::WriteRaw { .. }) && request.is_staged() {
            written.push(request.remote().clone());
        }
        parts.push(part(core, request, &mut direct, &mut copies));
    }
    // Staged writes arrive when they were sent on; the count follows the last of them.
    let announced = if written.is_empty() { None } else { direct.settings.arrival.take() };
    written.extend(direct.requests.iter().filter(|request| request.is_write()).map(|request| request.remote().clone()));
    let whole = async {
        let report = hands.run(direct).await.unwrap_or_else(|(cause, batch)| Report::failed(batch, &cause, shared.id));
        let done = report.outcomes().iter().filter(|outcome| outcome.status == Status::Done);
        job.on_bytes(done.map(|outcome| outcome.bytes).sum());
        job.on_half(&report);
        report
    };
    let (report, statuses) = join!(whole, hands.copy(stages, &copies));
    let mut outcomes = put_together(core, parts, report.outcomes, copies.iter().zip(statuses));
    if let Some(arrival) = announced
        && outcomes.iter().all(|outcome| outcome.status == Status::Done)
        && let Err(failure) = announce(&hands, stages, written, Batch::new().arrival(arrival)).await
    {
        // Whoever waits for it is not told, so neither may the caller believe in it.
        let failure = Failure { far: Far::Unknown, ..failure };
        outcomes.iter_mut().for_each(|outcome| outcome.status = Status::Failed(failure.clone()));
    }
    let (via, retries) = (*job.used.lock(), job.retries.load(Relaxed));
    let report = Report { outcomes, batch, id: shared.id, elapsed: core.now().since(start), via, retries };
    if !copies.is_empty() {
        let explanation = explanation(&report, job.legs.into_inner());
        core.locked(|shard| shard.keep_explanation(explanation));
    }
    report
}

fn explanation(report: &Report, legs: Vec<(Via, Via)>) -> Explanation {
    let failed = report.outcomes.iter().find(|outcome| outcome.status != Status::Done);
    Explanation {
        id: report.id,
        requests: u32::try_from(report.outcomes.len()).unwrap_or(u32::MAX),
        bytes: report.outcomes.iter().map(|outcome| outcome.bytes).sum(),
        class: report.batch.settings.class,
        asked: report.batch.settings.via,
        used: report.via,
        why: "through buffers of this engine, since no path joins both sides",
        retries: report.retries,
        paths: Considered::default(),
        ends: Vec::new(),
        legs,
        peer: Handle::default(),
        elapsed: Some(report.elapsed),
        status: failed.map_or(Status::Done, |outcome| outcome.status.clone()),
    }
}

/// Sorts a request in.
fn part(core: &Arc<Core>, request: Request, direct: &mut Batch, copies: &mut Vec<Copy>) -> Part {
    let len = request.remote().len();
    if !request.is_staged() {
        direct.requests.push(request);
        return Part::Direct;
    }
    match lent(core, request) {
        Ok((copy, holding)) => {
            copies.push(copy);
            Part::Copied(holding)
        }
        Err(buffer) => {
            let failure = Failure { cause: Cause::Overload, far: Far::Untouched };
            Part::Failed(Outcome { status: Status::Failed(failure), buffer, ..Outcome::pending(len) })
        }
    }
}

/// A staged request as a copy, its own memory lent to the engine. `Err`: there is no room for that; a read's buffer comes back.
fn lent(core: &Arc<Core>, request: Request) -> Result<(Copy, Holding), Option<RegionBuf>> {
    let there =
        |token: RegionToken, offset, len| -> Option<RemoteExtent> { attach_own(core, token)?.extent(offset, len).ok() };
    let (copy, holding) = match request {
        Request::Copy { source, target } => (Some(Copy { source, target }), Holding::default()),
        Request::Write { source, target } => {
            let offset = source.offset();
            let grant = core.locked(|shard| shard.fabric.grant_read(vec![source])).map_err(|_| None)?;
            let source = there(grant.token(), offset, target.len());
            (source.map(|source| Copy { source, target }), Holding { source: Some(grant), ..Holding::default() })
        }
        Request::Read { source, target } => {
            let offset = target.offset();
            let granted = core.locked(|shard| shard.fabric.grant_write(vec![target]));
            let grant = granted.map_err(|mut refused| refused.ranges.pop())?;
            let target = there(grant.token(), offset, source.len());
            (target.map(|target| Copy { source, target }), Holding { target: Some(grant), ..Holding::default() })
        }
        Request::WriteRaw { source, target } => {
            let token = core.locked(|shard| shard.fabric.expose(&source.region)).map_err(|_| None)?;
            let source = there(token, source.offset, target.len());
            (source.map(|source| Copy { source, target }), Holding::default())
        }
        Request::ReadRaw { source, target } => {
            let token = core.locked(|shard| shard.fabric.expose(&target.region)).map_err(|_| None)?;
            let target = there(token, target.offset, source.len());
            (target.map(|target| Copy { source, target }), Holding::default())
        }
    };
    match copy {
        Some(copy) => Ok((copy, holding)),
        None => Err(holding.end(core)),
    }
}

impl Holding {
    /// Ends what was lent. The buffer of a read, which nobody writes any more.
    fn end(self, core: &Core) -> Option<RegionBuf> {
        if let Some(grant) = self.source {
            core.locked(|shard| shard.fabric.revoke(grant));
        }
        self.target.and_then(|grant| core.locked(|shard| shard.fabric.close(grant)).pop())
    }
}

/// An outcome for each part, in order.
fn put_together<'a>(
    core: &Core,
    parts: Vec<Part>,
    direct: Vec<Outcome>,
    copied: impl Iterator<Item = (&'a Copy, Status)>,
) -> Vec<Outcome> {
    let (mut direct, mut copied) = (direct.into_iter(), copied);
    let lost = || Failure { cause: Cause::Overload, far: Far::Unknown };
    let outcomes = parts.into_iter().map(|part| {
        let ended = match part {
            Part::Failed(outcome) => Some(outcome),
            Part::Direct => direct.next(),
            Part::Copied(holding) => copied.next().map(|(copy, status)| Outcome {
                status,
                buffer: holding.end(core),
                ..Outcome::pending(copy.target.len())
            }),
        };
        // Each part gives an outcome for each of its requests, so there always is one.
        ended.unwrap_or_else(|| Outcome { status: Status::Failed(lost()), ..Outcome::pending(0) })
    });
    outcomes.collect()
}

/// Has the targets count, by writes of nothing.
async fn announce<R: Runtime>(
    hands: &Hands<'_, R>,
    stages: &Stages,
    written: Vec<RemoteExtent>,
    mut batch: Batch,
) -> Result<(), Failure> {
    let failed = |cause| Failure { cause, far: Far::Unknown };
    for target in written {
        match (stages.nothing(), target.slice(0, 0)) {
            (Some(nothing), Ok(target)) => batch.push_write(nothing, target),
            _ => return Err(failed(Cause::Overload)),
        };
    }
    let report = hands.run(batch).await.map_err(|(cause, _)| failed(cause))?;
    match report.into_done() {
        Ok(_) => Ok(()),
        Err(error) => Err(error.first),
    }
}

/// Waits until the work before a fence is done.
async fn passed<R: Runtime>(hands: &Hands<'_, R>, fence: &dyn Fence) -> Result<(), Cause> {
    let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok().map(Arc::new);
    let announced = wake.as_ref().filter(|wake| fence.notify(wake));
    let readiness = announced.and_then(|wake| hands.runtime.readable(wake.try_clone().ok()?).ok());
    // Bounded by the batch's own deadline, and by whoever cancels: the work of others may take any time.
    loop {
        match fence.state() {
            FenceState::Passed => return Ok(()),
            FenceState::Failed => return Err(Cause::Fence),
            FenceState::Pending => hands.check()?,
        }
        match &readiness {
            Some(readiness) => {
                let (told, late) = (pin!(readiness.readable()), pin!(hands.runtime.sleep(FENCE_SPAN)));
                if let Either::Left((Err(_), _)) = select(told, late).await {
                    hands.runtime.sleep(SILENT_FENCE_SPAN).await;
                }
                if let Some(wake) = &wake {
                    // Empty already is as good.
                    let _ = rustix::io::read(&**wake, &mut [0u8; 8]);
                }
            }
            None => hands.runtime.sleep(SILENT_FENCE_SPAN).await,
        }
    }
}
