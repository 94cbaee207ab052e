//! Puts: checksum, stage, choose an owner, ask; the next owner if one is full or fails; then further copies.

use std::collections::HashMap;

use futures::stream::{self, StreamExt};
use millpond_core::directory::{KEY_LEN_MAX, Location, Mode, NodeId, Owner, Stamp};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::store::{
    ALREADY_THERE, INLINE_BATCH_LEN_MAX, INLINE_LEN_MAX, PutItem, PutOutcome, PutRequest, Range, STORED,
};
use millpond_hal::region::RegionBytes;
use prost::bytes::Bytes;
use zerocopy::IntoBytes;

use super::owners::OwnerError;
use super::types::{ClientError, Put, PutOptions, Receipt, Source};
use super::{Inner, StoreClient};
use crate::engine::{ReadGrant, Via};
use crate::rpc::Reason;
use crate::runtime::{Runtime, blocking, sleep_until};
use crate::store::checksum;

/// Bytes above which copying and checksumming leave the caller's thread.
const HEAVY_LEN: usize = 4 << 20;
/// Calls of one batch under way.
const CALLS_MAX: usize = 8;
/// Items of one inline call: small enough that the two sides overlap.
const INLINE_ITEMS_MAX: usize = 1_024;
/// Values of one call that are read from client memory, and their bytes.
const REMOTE_ITEMS_MAX: usize = 256;
const REMOTE_LEN_MAX: u64 = 256 << 20;

/// A value on its way.
struct Job {
    key: Vec<u8>,
    payload: Payload,
    checksums: Vec<u32>,
    mode: Mode,
    candidates: Vec<Owner>,
    next: usize,
    /// The view may be fetched once more for owners that joined meanwhile.
    may_look_further: bool,
    locations: Vec<Location>,
    version: Option<Stamp>,
    refusal: Option<Put>,
    failure: Option<(NodeId, OwnerError)>,
    done: Option<Result<Put, ClientError>>,
}

#[derive(Clone)]
enum Payload {
    Inline(Bytes),
    Region(RegionBytes),
}

impl Payload {
    fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Region(bytes) => bytes.len() as u64,
        }
    }
}

impl Job {
    fn is_copying(&self) -> bool {
        matches!(self.mode, Mode::Replica { .. })
    }

    /// No other owner is to be asked.
    fn stop(&mut self) {
        (self.next, self.may_look_further) = (self.candidates.len(), false);
    }

    /// No owner is left: says what came of it.
    fn conclude(&mut self, options: &PutOptions) {
        if self.done.is_some() {
            return;
        }
        self.done = Some(match (self.version, self.refusal.take(), self.failure.take()) {
            (Some(version), ..) => {
                let locations = std::mem::take(&mut self.locations);
                let copies = u32::try_from(locations.len()).unwrap_or(u32::MAX);
                Ok(Put::Stored(Receipt { version, locations, copies_missing: options.replicas.saturating_sub(copies) }))
            }
            (None, Some(refusal), _) => Ok(refusal),
            (None, None, Some((node, error))) if error.is_untouched() => {
                Err(ClientError::Owners { node, detail: error.to_string(), buffer: None })
            }
            (None, None, Some((_, error))) => Err(ClientError::Indeterminate { detail: error.to_string() }),
            (None, None, None) => Err(ClientError::NoOwner),
        });
    }
}

/// Jobs that go to one node in one call: all inline, or all in one region.
struct Call {
    node: NodeId,
    jobs: Vec<usize>,
    request: PutRequest,
    grant: Option<ReadGrant>,
    len: u64,
}

impl<R: Runtime> StoreClient<R> {
    /// Stores `value` under `key`. Larger plain values are copied into registered memory first; [`Source::Region`] is not.
    pub async fn put(&self, key: &[u8], value: impl Into<Source>, options: &PutOptions) -> Result<Put, ClientError> {
        let mut results = self.put_batch(vec![(key.to_vec(), value.into())], options).await;
        results.pop().unwrap_or(Err(ClientError::NoOwner))
    }

    /// Stores many values. A result per value, in order: some may be stored and others refused.
    pub async fn put_batch(
        &self,
        items: Vec<(Vec<u8>, Source)>,
        options: &PutOptions,
    ) -> Vec<Result<Put, ClientError>> {
        let inner = &self.inner;
        let give_up_at = inner.now() + inner.options.patience;
        let mut jobs = Vec::with_capacity(items.len());
        for (key, source) in items {
            jobs.push(inner.prepare(key, source, options).await);
        }
        if let Err(error) = inner.place(&mut jobs, options).await {
            let detail = error.to_string();
            for job in jobs.iter_mut().filter(|job| job.done.is_none()) {
                job.done = Some(Ok(refused(Reason::Unavailable, detail.clone(), Some(Duration::from_millis(100)))));
            }
        }
        // Each round ends a job, moves it to its next owner, or waits; owners are finite, looked up twice, and the wait ends at `give_up_at`.
        while jobs.iter().any(|job| job.done.is_none()) {
            let wait_until = inner.round(&mut jobs, options, give_up_at).await;
            if let Some(wait_until) = wait_until {
                sleep_until(inner.engine.runtime(), wait_until).await;
            }
        }
        jobs.into_iter().map(|job| job.done.unwrap_or(Err(ClientError::NoOwner))).collect()
    }
}

impl<R: Runtime> Inner<R> {
    async fn prepare(&self, key: Vec<u8>, source: Source, options: &PutOptions) -> Job {
        let mut job = Job {
            key,
            payload: Payload::Inline(Bytes::new()),
            checksums: Vec::new(),
            mode: if options.upsert { Mode::Upsert } else { Mode::IfAbsent },
            candidates: Vec::new(),
            next: 0,
            may_look_further: true,
            locations: Vec::new(),
            version: None,
            refusal: None,
            failure: None,
            done: None,
        };
        if job.key.is_empty() || job.key.len() > KEY_LEN_MAX {
            let detail =
                format!("the key has {} bytes; a key has 1 to {KEY_LEN_MAX}: hash longer names", job.key.len());
            job.done = Some(Ok(refused(Reason::Malformed, detail, None)));
            return job;
        }
        if source.is_empty() {
            let detail = "the value is empty; a value has at least 1 byte".to_owned();
            job.done = Some(Ok(refused(Reason::Malformed, detail, None)));
            return job;
        }
        match self.stage(source).await {
            Ok((payload, checksums)) => (job.payload, job.checksums) = (payload, checksums),
            Err(error) => job.done = Some(Err(error)),
        }
        job
    }

    /// Puts the bytes where they can travel from, and sums them up.
    async fn stage(&self, source: Source) -> Result<(Payload, Vec<u32>), ClientError> {
        let len = source.len();
        let buffer = match &source {
            Source::Plain(bytes) if bytes.len() > INLINE_LEN_MAX => {
                let taken = self.pool.take(&self.engine, len as u64);
                let memory = |error: crate::engine::AllocateError| error.to_string();
                Some(taken.map_err(|error| ClientError::Memory { len: len as u64, detail: memory(error) })?)
            }
            _ => None,
        };
        let work = move || {
            let checksums: Vec<u32> = checksum::of_value(&source).collect();
            let payload = match (source, buffer) {
                (Source::Plain(bytes), Some(mut buffer)) => {
                    buffer.copy_from_slice(&bytes);
                    Payload::Region(buffer.freeze())
                }
                (Source::Plain(bytes), None) => Payload::Inline(bytes),
                (Source::Region(bytes), _) => Payload::Region(bytes),
            };
            (payload, checksums)
        };
        if len > HEAVY_LEN { Ok(blocking(self.engine.runtime(), work).await) } else { Ok(work()) }
    }

    /// Chooses owners for every job.
    async fn place(&self, jobs: &mut [Job], options: &PutOptions) -> Result<(), ClientError> {
        let mut view = self.owners.view(&self.link, self.short_deadline()).await?;
        if view.is_empty() {
            view = self.owners.refresh(&self.link, self.short_deadline()).await?;
        }
        for job in jobs.iter_mut().filter(|job| job.done.is_none()) {
            job.candidates = self.owners.placement(&view, &job.key, options.prefer);
        }
        Ok(())
    }

    /// Owners that joined after the view was fetched may take what those that were known did not.
    async fn look_further(&self, jobs: &mut [Job], options: &PutOptions) {
        let is_spent = |job: &Job| job.done.is_none() && job.may_look_further && job.next >= job.candidates.len();
        if !jobs.iter().any(is_spent) {
            return;
        }
        // Without a directory those that are known have to do.
        let view = self.owners.refresh(&self.link, self.short_deadline()).await.unwrap_or_default();
        for job in jobs.iter_mut().filter(|job| is_spent(job)) {
            job.may_look_further = false;
            for owner in self.owners.placement(&view, &job.key, options.prefer) {
                if job.candidates.iter().all(|known| known.node != owner.node) {
                    job.candidates.push(owner);
                }
            }
        }
    }

    /// Asks the next owner of every job. Returns when to go on, if the store is busy.
    async fn round(&self, jobs: &mut [Job], options: &PutOptions, give_up_at: Instant) -> Option<Instant> {
        self.look_further(jobs, options).await;
        for job in jobs.iter_mut().filter(|job| job.next >= job.candidates.len()) {
            job.conclude(options);
        }
        let calls = self.put_calls(jobs, options);
        let answers: Vec<(Call, Result<Vec<PutOutcome>, OwnerError>)> = stream::iter(calls)
            .map(|mut call| async move {
                let request = std::mem::take(&mut call.request);
                let asked = self.owners.put(call.node, request, self.deadline_for(call.len)).await;
                // The owner may not read on.
                call.grant = None;
                (call, asked.map(|reply| reply.outcomes))
            })
            .buffer_unordered(CALLS_MAX)
            .collect()
            .await;
        let mut wait = None;
        for (call, answer) in answers {
            if answer.is_err() {
                self.owners.shun(call.node);
            }
            for (position, index) in call.jobs.into_iter().enumerate() {
                let job = &mut jobs[index];
                match &answer {
                    Ok(outcomes) => {
                        let outcome = outcomes.get(position).cloned().unwrap_or_default();
                        wait = wait.max(self.settle_put(job, outcome, options, give_up_at));
                    }
                    Err(error) => fail(job, call.node, error.clone()),
                }
            }
        }
        wait
    }

    /// The calls of one round.
    fn put_calls(&self, jobs: &mut [Job], options: &PutOptions) -> Vec<Call> {
        let mut open: HashMap<(NodeId, Option<(u32, u32)>), Call> = HashMap::new();
        let mut calls = Vec::new();
        for (index, job) in jobs.iter().enumerate() {
            let Some(owner) = job.candidates.get(job.next).filter(|_| job.done.is_none()) else { continue };
            let region = match &job.payload {
                Payload::Inline(_) => None,
                Payload::Region(bytes) => Some((bytes.region().id().slot, bytes.region().id().epoch)),
            };
            let (items_max, len_max) = match region {
                None => (INLINE_ITEMS_MAX, INLINE_BATCH_LEN_MAX as u64),
                Some(_) => (REMOTE_ITEMS_MAX, REMOTE_LEN_MAX),
            };
            let key = (owner.node, region);
            let is_full = |call: &Call| call.jobs.len() >= items_max || call.len + job.payload.len() > len_max;
            if open.get(&key).is_some_and(is_full) {
                calls.extend(open.remove(&key));
            }
            let call = open.entry(key).or_insert_with(|| Call {
                node: owner.node,
                jobs: Vec::new(),
                request: PutRequest { via: via_name(self.options.via), ..PutRequest::default() },
                grant: None,
                len: 0,
            });
            call.jobs.push(index);
            call.len += job.payload.len();
            call.request.items.push(item(job, options));
        }
        calls.extend(open.into_values());
        calls.retain_mut(|call| self.grant(call, jobs));
        calls
    }

    /// Lets the owner read the values of a call. False: it cannot be made, its jobs are done.
    fn grant(&self, call: &mut Call, jobs: &mut [Job]) -> bool {
        let memory: Vec<RegionBytes> = call
            .jobs
            .iter()
            .filter_map(|index| match &jobs[*index].payload {
                Payload::Region(bytes) => Some(bytes.clone()),
                Payload::Inline(_) => None,
            })
            .collect();
        if memory.is_empty() {
            return true;
        }
        match self.engine.grant_read(memory) {
            Ok(grant) => {
                call.request.token = grant.token().as_bytes().to_vec();
                call.grant = Some(grant);
                true
            }
            Err(error) => {
                for index in &call.jobs {
                    let detail = error.to_string();
                    jobs[*index].done = Some(Err(ClientError::Memory { len: call.len, detail }));
                }
                false
            }
        }
    }

    /// Takes an owner's word. Returns when to ask the same owner again.
    fn settle_put(
        &self,
        job: &mut Job,
        outcome: PutOutcome,
        options: &PutOptions,
        give_up_at: Instant,
    ) -> Option<Instant> {
        match outcome.kind {
            STORED => {
                let version = outcome.version.map_or(Stamp::ZERO, Stamp::from);
                job.version = Some(version);
                job.locations.extend(outcome.location.as_ref().and_then(|location| Location::try_from(location).ok()));
                job.mode = Mode::Replica { version };
                job.next += 1;
                self.forget(&job.key, None);
                if job.locations.len() >= options.replicas as usize {
                    job.conclude(options);
                }
            }
            ALREADY_THERE if job.is_copying() => job.next += 1,
            ALREADY_THERE => {
                job.done = Some(Ok(Put::AlreadyThere { version: outcome.version.map_or(Stamp::ZERO, Stamp::from) }));
            }
            _ => {
                let reason = Reason::from_code(outcome.reason);
                let hint = (outcome.retry_after_ns > 0).then(|| Duration::from_nanos(outcome.retry_after_ns));
                let again = hint.map(|hint| self.now() + hint).filter(|again| *again < give_up_at);
                if let (Reason::Busy, Some(again)) = (reason, again) {
                    return Some(again);
                }
                let refusal = refused(reason, outcome.detail, hint);
                // Another owner may have room, or a working link; it would say the same of a malformed request.
                let is_local = matches!(reason, Reason::Full | Reason::TooLarge | Reason::Busy | Reason::Unavailable);
                job.refusal = Some(refusal);
                if is_local { job.next += 1 } else { job.stop() }
            }
        }
        None
    }
}

/// An owner did not answer. What is stored only if absent can be tried elsewhere, whatever became of it there.
fn fail(job: &mut Job, node: NodeId, error: OwnerError) {
    let may_go_on = error.is_untouched() || job.mode != Mode::Upsert;
    job.failure = Some((node, error));
    if may_go_on { job.next += 1 } else { job.stop() }
}

fn item(job: &Job, options: &PutOptions) -> PutItem {
    let (mode, version) = job.mode.to_wire();
    let (inline, source) = match &job.payload {
        Payload::Inline(bytes) => (bytes.clone(), Vec::new()),
        Payload::Region(bytes) => (Bytes::new(), vec![Range { offset: bytes.offset(), len: bytes.len() as u64 }]),
    };
    PutItem {
        key: job.key.clone(),
        len: job.payload.len(),
        checksums: job.checksums.clone(),
        inline,
        source,
        mode,
        version,
        pin: Some(options.pin.into()),
        parent: options.parent.clone().unwrap_or_default(),
    }
}

/// The name of a transport for a request; empty for the best.
pub(super) fn via_name(via: Via) -> String {
    if via == Via::Auto { String::new() } else { via.to_string() }
}

fn refused(reason: Reason, detail: String, retry_after: Option<Duration>) -> Put {
    Put::Refused { reason, detail, retry_after }
}
