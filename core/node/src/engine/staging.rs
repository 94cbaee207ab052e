//! Batches with copies in them: their two halves through buffers of the engine, beside what of them goes directly.
//!
//! A task of the engine takes such a batch apart, has the parts moved as ordinary batches, and puts their outcomes together in
//! the order in which the requests were added. Its buffers are made with the first of them, and shared by all. It chooses no
//! path. Invariants: a staged transfer ends, since its parts do; it is cancelled with all its parts; what is under way at a
//! time is bounded by the buffers.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use futures::join;
use futures::task::AtomicWaker;
use millpond_core::quiet::Far;
use parking_lot::Mutex;

use super::batch::{Batch, Request};
use super::copy::{Copy, Hands, Job, STAGES, Stages};
use super::core::Core;
use super::transfer::{Cause, Failure, Outcome, Report, Shared, Status};
use crate::runtime::Runtime;

/// Buffers for all batches of an engine together.
const ENGINE_STAGES: u32 = 2 * STAGES;

/// What waits for the task.
#[derive(Debug, Default)]
pub(super) struct Staging {
    queue: Mutex<VecDeque<(Arc<Shared>, Batch)>>,
    /// Accepted and not ended.
    open: AtomicU32,
    task: AtomicWaker,
}

impl Staging {
    pub(super) fn push(&self, shared: Arc<Shared>, batch: Batch) {
        self.open.fetch_add(1, Relaxed);
        self.queue.lock().push_back((shared, batch));
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
        match core.staging.queue.lock().pop_front() {
            Some(next) => Poll::Ready(Some(next)),
            None if core.is_shut_down() => Poll::Ready(None),
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
                Err(error) => tracing::warn!(%error, "no memory for copies between peers"),
            }
        }
        match &stages {
            None => {
                shared.fail(batch, &Cause::Overload);
                core.staging.open.fetch_sub(1, Relaxed);
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

/// Moves all of a batch.
async fn stage<R: Runtime>(
    runtime: &R,
    core: &Arc<Core>,
    stages: &Stages,
    shared: &Arc<Shared>,
    mut batch: Batch,
) -> Report {
    let (start, settings) = (core.now(), batch.settings);
    let mut direct = Batch { settings, ..Batch::default() };
    let (mut copies, mut are_copies) = (Vec::new(), Vec::new());
    for request in batch.requests.drain(..) {
        are_copies.push(matches!(request, Request::Copy { .. }));
        match request {
            Request::Copy { source, target } => copies.push(Copy { source, target }),
            other => direct.requests.push(other),
        }
    }
    let job = Job {
        class: settings.class,
        progress_deadline: settings.progress_deadline,
        end: settings.deadline.map(|span| start + span),
        parent: Some(Arc::clone(shared)),
        ..Job::default()
    };
    let hands = Hands { core, runtime, job: &job };
    let whole = async {
        let report = hands.run(direct).await.unwrap_or_else(|(cause, batch)| Report::failed(batch, &cause, shared.id));
        let done = report.outcomes().iter().filter(|outcome| outcome.status == Status::Done);
        job.on_bytes(done.map(|outcome| outcome.bytes).sum());
        job.on_half(&report);
        report
    };
    let (report, statuses) = join!(whole, hands.copy(stages, &copies));
    let mut direct = report.outcomes.into_iter();
    let mut copied = copies.iter().zip(statuses);
    let lost = || Status::Failed(Failure { cause: Cause::Overload, far: Far::Unknown });
    let outcomes = are_copies.into_iter().map(|is_copy| {
        let ended = if is_copy {
            copied.next().map(|(copy, status)| Outcome { status, ..Outcome::pending(copy.target.len()) })
        } else {
            direct.next()
        };
        // Each part gives an outcome for each of its requests, so there always is one.
        ended.unwrap_or_else(|| Outcome { status: lost(), ..Outcome::pending(0) })
    });
    let outcomes = outcomes.collect();
    let (via, retries) = (*job.used.lock(), job.retries.load(Relaxed));
    Report { outcomes, batch, id: shared.id, elapsed: core.now().since(start), via, retries }
}
