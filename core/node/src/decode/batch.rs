//! The running batch: requests join and leave between steps, and give their pages away when there are too few.
//!
//! One task owns all sequences; a step runs on a blocking thread and takes them along. A sequence that needs a page when
//! none is free makes the one with most slack pause: its full blocks go to the store, its pages come free, and it comes
//! back by being prefilled again, from the store where it can. Since a model's results do not depend on how they were
//! computed, what it says then is the same.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::channel::mpsc;
use futures::future::{Either, FutureExt, pending, select};
use futures::stream::{FuturesUnordered, StreamExt};
use millpond_core::time::{Duration, Instant};

use super::Metrics;
use super::door::Door;
use super::sequence::Sequence;
use crate::model::{Model, ModelError, Piece};
use crate::prefill::{Prefill, Prompt};
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, Task, blocking, start};

/// A paused request is looked at again at least this often.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The batch and those beside it.
pub(super) struct Batch<R> {
    prefill: Prefill<R>,
    joins: mpsc::UnboundedReceiver<Sequence>,
    /// Nobody new will join.
    is_closed: bool,
    /// On their way back from a pause.
    resuming: FuturesUnordered<Task<Option<Sequence>>>,
    metrics: Arc<Metrics>,
    door: Arc<Door>,
    batch_max: usize,
    running: Vec<Sequence>,
    /// Ready, but the batch is full.
    ready: VecDeque<Sequence>,
    paused: VecDeque<Sequence>,
    next_order: u64,
    rows: Vec<Vec<f32>>,
}

impl<R: Runtime> Batch<R> {
    pub(super) fn new(
        prefill: Prefill<R>,
        joins: mpsc::UnboundedReceiver<Sequence>,
        (metrics, door): (Arc<Metrics>, Arc<Door>),
        batch_max: usize,
    ) -> Self {
        Self {
            prefill,
            joins,
            is_closed: false,
            resuming: FuturesUnordered::new(),
            metrics,
            door,
            batch_max,
            running: Vec::new(),
            ready: VecDeque::new(),
            paused: VecDeque::new(),
            next_order: 0,
            rows: Vec::new(),
        }
    }

    /// Runs until `joins` is closed, and nobody is left.
    pub(super) async fn run(mut self) {
        loop {
            if self.running.is_empty() && self.ready.is_empty() {
                self.metrics.batch.set(0);
                if !self.wait().await {
                    return;
                }
            }
            while let Ok(sequence) = self.joins.try_recv() {
                self.ready.push_back(sequence);
            }
            while let Some(Some(back)) = self.resuming.next().now_or_never() {
                self.ready.extend(back);
            }
            self.prune();
            self.resume();
            self.join();
            let stalled = self.reserve();
            if self.running.is_empty() {
                self.running = stalled;
                if !self.running.is_empty() {
                    self.pages_freed().await;
                }
                continue;
            }
            self.step().await;
            self.running.extend(stalled);
        }
    }

    /// Waits for somebody to join, or for pages if somebody is paused. `false`: nobody will ever join again.
    async fn wait(&mut self) -> bool {
        let idle = self.paused.is_empty() && self.resuming.is_empty();
        if self.is_closed && idle {
            return false;
        }
        let again = if idle { pending().boxed() } else { self.prefill.runtime().sleep(LOOK_AGAIN).boxed() };
        let freed = if self.paused.is_empty() { pending().boxed() } else { self.prefill.pool().freed().boxed() };
        let back = match self.resuming.is_empty() {
            true => pending().boxed(),
            false => self.resuming.next().map(Option::flatten).boxed(),
        };
        let others = select(back, select(again, freed));
        if self.is_closed {
            if let Either::Left((Some(sequence), _)) = others.await {
                self.ready.push_back(sequence);
            }
            return true;
        }
        match select(self.joins.next(), others).await {
            Either::Left((Some(sequence), _)) => self.ready.push_back(sequence),
            Either::Left((None, _)) => self.is_closed = true,
            Either::Right((Either::Left((Some(sequence), _)), _)) => self.ready.push_back(sequence),
            Either::Right(_) => {}
        }
        true
    }

    async fn pages_freed(&self) {
        let freed = Box::pin(self.prefill.pool().freed());
        select(freed, Box::pin(self.prefill.runtime().sleep(LOOK_AGAIN))).map(|_| ()).await;
    }

    /// Lets go of those nobody listens to.
    fn prune(&mut self) {
        let before = self.running.len() + self.ready.len() + self.paused.len();
        self.running.retain(|sequence| !sequence.is_abandoned());
        self.ready.retain(|sequence| !sequence.is_abandoned());
        self.paused.retain(|sequence| !sequence.is_abandoned());
        let left = before - self.running.len() - self.ready.len() - self.paused.len();
        self.metrics.abandoned.add(left as u64);
    }

    /// Puts as many in the batch as fit.
    fn join(&mut self) {
        while self.running.len() < self.batch_max
            && let Some(mut sequence) = self.ready.pop_front()
        {
            sequence.order = self.next_order;
            self.next_order += 1;
            self.running.push(sequence);
        }
        self.metrics.waiting.set((self.ready.len() + self.paused.len()) as u64);
    }

    /// Starts to bring back who was paused first, once there are pages for it and one more for each that runs.
    fn resume(&mut self) {
        let Some(first) = self.paused.front() else { return };
        let layout = &self.prefill.card().layout;
        let needed = layout.pages_for(first.tokens.len() as u64) + self.running.len() as u64;
        if u64::from(self.prefill.pool().counts().free) < needed {
            return;
        }
        let Some(mut sequence) = self.paused.pop_front() else { return };
        let known = sequence.tokens.len() - 1;
        let Ok(pages) = self.prefill.pool().take(u32::try_from(layout.pages_for(known as u64)).unwrap_or(u32::MAX))
        else {
            self.paused.push_front(sequence);
            return;
        };
        let prefill = self.prefill.clone();
        let prompt = Prompt {
            tokens: sequence.tokens[..known].into(),
            sampling: sequence.sampling,
            tenant: sequence.tenant.clone(),
        };
        self.resuming.push(start(self.prefill.runtime(), async move {
            match prefill.run(&prompt, pages, None).await {
                Ok((computed, _)) if computed.next_token == sequence.tokens[known] => {
                    sequence.pages = computed.pages;
                    return Some(sequence);
                }
                Ok(_) => {
                    let detail = "a paused request came back with another token; this is a bug";
                    sequence.fail(Refusal::new(Reason::Failed, detail));
                }
                Err(refusal) => sequence.fail(refusal),
            }
            None
        }));
    }

    /// Gives each running sequence the page its next token needs. Those that must wait for one are returned.
    fn reserve(&mut self) -> Vec<Sequence> {
        let mut served = Vec::with_capacity(self.running.len());
        let mut stalled = Vec::new();
        let mut rest: VecDeque<Sequence> = std::mem::take(&mut self.running).into();
        let now = self.prefill.runtime().now();
        while let Some(mut sequence) = rest.pop_front() {
            let needed = self.prefill.card().layout.pages_for(sequence.tokens.len() as u64);
            if sequence.pages.len() as u64 >= needed {
                served.push(sequence);
                continue;
            }
            if let Ok(page) = self.prefill.pool().take(1) {
                sequence.pages.extend(page);
                served.push(sequence);
                continue;
            }
            // Whoever can wait longest goes; that may be the one that asks.
            let others = served.iter().chain(&rest).chain(&stalled);
            let victim =
                others.chain([&sequence]).max_by_key(|candidate| urgency(candidate, now)).map(|victim| victim.order);
            if served.is_empty() && rest.is_empty() && stalled.is_empty() {
                stalled.push(sequence); // nobody else runs: pages come back from transfers and resumptions
                continue;
            }
            if victim == Some(sequence.order) {
                self.pause(sequence);
                continue;
            }
            for list in [&mut served, &mut stalled] {
                if let Some(index) = list.iter().position(|candidate| Some(candidate.order) == victim) {
                    let victim = list.remove(index);
                    self.pause(victim);
                }
            }
            if let Some(index) = rest.iter().position(|candidate| Some(candidate.order) == victim)
                && let Some(victim) = rest.remove(index)
            {
                self.pause(victim);
            }
            match self.prefill.pool().take(1) {
                Ok(page) => {
                    sequence.pages.extend(page);
                    served.push(sequence);
                }
                // The victim's pages are still on their way to the store.
                Err(_) => stalled.push(sequence),
            }
        }
        self.running = served;
        stalled
    }

    fn pause(&mut self, mut sequence: Sequence) {
        sequence.pauses += 1;
        self.metrics.pauses.add(1);
        let pages = std::mem::take(&mut sequence.pages);
        self.prefill.keep(&sequence.tenant, &sequence.tokens[..sequence.tokens.len() - 1], 0, pages);
        self.paused.push_back(sequence);
    }

    /// Computes one token for each running sequence and hands it out; those that are over leave.
    async fn step(&mut self) {
        let mut sequences = std::mem::take(&mut self.running);
        let mut rows = std::mem::take(&mut self.rows);
        let size = sequences.len();
        let context = sequences.iter().map(|sequence| sequence.tokens.len() as u64).sum();
        rows.resize_with(rows.len().max(size), Vec::new);
        let model = Arc::clone(self.prefill.model());
        let begun = self.prefill.runtime().now();
        let work = blocking(self.prefill.runtime(), move || {
            let result = compute(&*model, &mut sequences, &mut rows);
            (sequences, rows, result)
        });
        let (sequences, rows, result) = work.await;
        let now = self.prefill.runtime().now();
        self.metrics.on_step(size, now.since(begun));
        self.door.on_step(now, size, context, now.since(begun));
        if let Err(error) = result {
            let refusal = Refusal::new(Reason::Failed, error.to_string());
            sequences.into_iter().for_each(|sequence| sequence.fail(refusal.clone()));
        } else {
            for (mut sequence, logits) in sequences.into_iter().zip(&rows) {
                sequence.batch_max = sequence.batch_max.max(u32::try_from(size).unwrap_or(u32::MAX));
                let token = sequence.choose(logits);
                if !sequence.take_token(token, now, |_| {}) {
                    self.running.push(sequence);
                }
            }
        }
        self.rows = rows;
    }
}

/// What makes a sequence the one to pause: low priority, then slack, then having joined late.
fn urgency(sequence: &Sequence, now: Instant) -> (std::cmp::Reverse<u32>, Duration, u64) {
    (std::cmp::Reverse(sequence.priority), sequence.slack(now), sequence.order)
}

fn compute(model: &dyn Model, sequences: &mut [Sequence], rows: &mut [Vec<f32>]) -> Result<(), ModelError> {
    let vocabulary = model.card().limits.vocabulary as usize;
    let pieces = sequences.iter_mut().zip(rows).map(|(sequence, logits)| {
        logits.resize(vocabulary, 0.0);
        let start = sequence.position();
        let Sequence { tokens, pages, .. } = sequence;
        Piece { tokens: &tokens[start as usize..], start, kv: pages, logits: Some(logits) }
    });
    model.forward(&mut pieces.collect::<Vec<_>>())
}
