//! Gets: locate, fetch from the likeliest replica, check, fall over to the next one, look up once more, give up.

use std::collections::HashMap;

use futures::stream::{self, StreamExt};
use millpond_core::directory::{self, Found, Location, NodeId, Stamp};
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::directory::{ITEMS_MAX, LocateRequest};
use millpond_core::wire::message::store::{
    CHUNK_LEN, GetItem, GetOutcome, GetRequest, HIT, INLINE_BATCH_LEN_MAX, INLINE_LEN_MAX, Range, STALE,
};
use millpond_hal::region::RegionBuf;
use zerocopy::IntoBytes;

use super::put::via_name;
use super::types::{ClientError, Got, Held, MissReason, Target, Value};
use super::{Inner, StoreClient};
use crate::directory::LinkError;
use crate::runtime::{Runtime, sleep_until};
use crate::store::checksum;

/// Calls of one batch under way.
const CALLS_MAX: usize = 8;
const INLINE_ITEMS_MAX: usize = 1_024;
const REMOTE_ITEMS_MAX: usize = 256;
/// Bytes of one call's values, unless a single one is longer: while the next come, those that came are checked.
const REMOTE_LEN_MAX: u64 = 4 << 20;
/// Lookups of one get: the cache's or the first, and one more after every replica failed.
const LOOKUPS_MAX: u32 = 2;

/// A part of a value.
#[derive(Clone, Copy)]
struct Part {
    offset: u64,
    len: u64,
}

/// A value to fetch.
struct Job {
    key: Vec<u8>,
    part: Option<Part>,
    buffer: Option<RegionBuf>,
    found: Option<Found>,
    tried: Vec<Location>,
    lookups: u32,
    failure: Option<(NodeId, String)>,
    was_stale: bool,
    done: Option<Result<Got, ClientError>>,
}

impl Job {
    fn new(key: Vec<u8>, target: Target, part: Option<Part>) -> Self {
        let buffer = match target {
            Target::Any => None,
            Target::Into(buffer) => Some(buffer),
        };
        Self {
            key,
            part,
            buffer,
            found: None,
            tried: Vec::new(),
            lookups: 0,
            failure: None,
            was_stale: false,
            done: None,
        }
    }

    fn is_open(&self) -> bool {
        self.done.is_none()
    }

    fn miss(&mut self, reason: MissReason) {
        self.done = Some(Ok(Got::Miss { reason, buffer: self.buffer.take() }));
    }

    fn range(&self, found: &Found) -> Part {
        self.part.unwrap_or(Part { offset: 0, len: found.len })
    }

    /// Every replica failed, and another lookup does not help.
    fn conclude(&mut self) {
        match self.failure.take() {
            Some((node, detail)) => {
                let buffer = self.buffer.take();
                self.done = Some(Err(ClientError::Owners { node, detail, buffer }));
            }
            None if self.was_stale => self.miss(MissReason::Lost),
            None => self.miss(MissReason::Absent),
        }
    }
}

/// Jobs that go to one node in one call: all inline, or all into one region.
struct Call {
    node: NodeId,
    jobs: Vec<(usize, Location)>,
    request: GetRequest,
    buffers: Vec<RegionBuf>,
    len: u64,
}

impl<R: Runtime> StoreClient<R> {
    /// Fetches a value, or says why there is none.
    pub async fn get(&self, key: &[u8]) -> Result<Got, ClientError> {
        self.one(Job::new(key.to_vec(), Target::Any, None)).await
    }

    /// Fetches a value into registered memory that is exactly as long.
    pub async fn get_into(&self, key: &[u8], buffer: RegionBuf) -> Result<Got, ClientError> {
        self.one(Job::new(key.to_vec(), Target::Into(buffer), None)).await
    }

    /// Fetches `len` bytes at `offset` of a value. Only chunks that it covers as a whole are checked.
    pub async fn get_range(&self, key: &[u8], offset: u64, len: u64) -> Result<Got, ClientError> {
        self.one(Job::new(key.to_vec(), Target::Any, Some(Part { offset, len }))).await
    }

    /// Fetches many values. A result per key, in order.
    pub async fn get_batch(&self, items: Vec<(Vec<u8>, Target)>) -> Vec<Result<Got, ClientError>> {
        let jobs = items.into_iter().map(|(key, target)| Job::new(key, target, None)).collect();
        self.inner.fetch(jobs).await
    }

    async fn one(&self, job: Job) -> Result<Got, ClientError> {
        self.inner.fetch(vec![job]).await.pop().unwrap_or(Err(ClientError::NoOwner))
    }
}

impl<R: Runtime> Inner<R> {
    async fn fetch(&self, mut jobs: Vec<Job>) -> Vec<Result<Got, ClientError>> {
        let give_up_at = self.now() + self.options.patience;
        for job in &mut jobs {
            if directory::Key::new(&job.key).is_err() {
                job.miss(MissReason::Absent);
            } else {
                job.found = self.known(&job.key);
                job.lookups = u32::from(job.found.is_some());
            }
        }
        // Each round ends a job, uses up one of its replicas, or looks it up again, which is bounded.
        while jobs.iter().any(Job::is_open) {
            if let Err(error) = self.locate(&mut jobs, give_up_at).await {
                fail_all(&mut jobs, &error);
                break;
            }
            let calls = self.get_calls(&mut jobs);
            let mut answers = stream::iter(calls).map(|call| self.ask(call)).buffer_unordered(CALLS_MAX);
            while let Some((call, answer)) = answers.next().await {
                self.settle_get(&mut jobs, call, answer);
            }
        }
        jobs.into_iter().map(|job| job.done.unwrap_or(Err(ClientError::NoOwner))).collect()
    }

    /// Looks up what has no location. Waits while the directory does not know yet.
    async fn locate(&self, jobs: &mut [Job], give_up_at: Instant) -> Result<(), LinkError> {
        loop {
            let wanted: Vec<usize> =
                (0..jobs.len()).filter(|index| jobs[*index].is_open() && jobs[*index].found.is_none()).collect();
            let mut wait = None;
            for part in wanted.chunks(ITEMS_MAX) {
                wait = wait.max(self.locate_part(jobs, part, give_up_at).await?);
            }
            match wait {
                Some(until) => sleep_until(self.engine.runtime(), until).await,
                None => break,
            }
        }
        // Replicas may lie with owners that joined after the view was fetched.
        let view = self.owners.view(&self.link, self.short_deadline()).await?;
        let is_unknown = |location: &Location| view.iter().all(|owner| owner.owner.node != location.node);
        if jobs.iter().filter_map(|job| job.found.as_ref()).any(|found| found.replicas.iter().any(is_unknown)) {
            self.owners.refresh(&self.link, self.short_deadline()).await?;
        }
        Ok(())
    }

    async fn locate_part(
        &self,
        jobs: &mut [Job],
        part: &[usize],
        give_up_at: Instant,
    ) -> Result<Option<Instant>, LinkError> {
        let keys = part.iter().map(|index| jobs[*index].key.clone()).collect();
        let asked_at = self.now();
        let request = LocateRequest { keys, lease_ns: self.options.lease.as_nanos() };
        let reply = self.link.locate(&request, self.short_deadline()).await?;
        let mut wait = None;
        for (index, located) in part.iter().zip(&reply.located) {
            let job = &mut jobs[*index];
            match directory::Located::try_from(located).map_err(LinkError::Unreadable)? {
                directory::Located::Hit(found) => {
                    self.learn(&job.key, asked_at, &found);
                    job.lookups += 1;
                    job.found = Some(found);
                    job.tried.clear();
                }
                directory::Located::Miss(directory::Miss::Rebuilding { retry_after }) => {
                    let again = self.now() + retry_after.max(Duration::from_millis(1));
                    if again < give_up_at {
                        wait = wait.max(Some(again));
                    } else {
                        job.miss(MissReason::Rebuilding { retry_after });
                    }
                }
                directory::Located::Miss(_) => {
                    let reason = if job.was_stale { MissReason::Lost } else { MissReason::Absent };
                    match job.failure.is_some() {
                        true => job.conclude(),
                        false => job.miss(reason),
                    }
                }
            }
        }
        if reply.located.len() != part.len() {
            return Err(LinkError::Unreadable(millpond_core::wire::message::directory::Unreadable("located")));
        }
        Ok(wait)
    }

    /// The calls of one round.
    fn get_calls(&self, jobs: &mut [Job]) -> Vec<Call> {
        let mut open: HashMap<(NodeId, Option<(u32, u32)>), Call> = HashMap::new();
        let mut calls = Vec::new();
        for (index, job) in jobs.iter_mut().enumerate() {
            let Some((location, part)) = self.choose(job) else { continue };
            let is_inline = job.buffer.is_none() && part.len <= INLINE_LEN_MAX as u64;
            let buffer = match self.buffer_for(job, part, is_inline) {
                Ok(buffer) => buffer,
                Err(error) => {
                    job.done = Some(Err(error));
                    continue;
                }
            };
            let region = buffer.as_ref().map(|buffer| (buffer.region().id().slot, buffer.region().id().epoch));
            let (items_max, len_max) = match region {
                None => (INLINE_ITEMS_MAX, INLINE_BATCH_LEN_MAX as u64),
                Some(_) => (REMOTE_ITEMS_MAX, REMOTE_LEN_MAX),
            };
            let key = (location.node, region);
            let is_full = |call: &Call| call.jobs.len() >= items_max || call.len + part.len > len_max;
            if open.get(&key).is_some_and(is_full) {
                calls.extend(open.remove(&key));
            }
            let call = open.entry(key).or_insert_with(|| Call {
                node: location.node,
                jobs: Vec::new(),
                request: GetRequest { via: via_name(self.options.via), ..GetRequest::default() },
                buffers: Vec::new(),
                len: 0,
            });
            let place = |buffer: &RegionBuf| Range { offset: buffer.offset(), len: buffer.len() as u64 };
            call.request.items.push(GetItem {
                key: job.key.clone(),
                location: Some(location.into()),
                offset: part.offset,
                len: part.len,
                target: buffer.as_ref().map(place).into_iter().collect(),
            });
            call.jobs.push((index, location));
            call.len += part.len;
            call.buffers.extend(buffer);
        }
        calls.extend(open.into_values());
        calls
    }

    /// The replica to ask next, and for what. `None`: the job is done, or must be looked up again.
    fn choose(&self, job: &mut Job) -> Option<(Location, Part)> {
        if !job.is_open() {
            return None;
        }
        let found = job.found.as_ref()?;
        let part = job.range(found);
        if part.len == 0 || part.offset.checked_add(part.len).is_none_or(|end| end > found.len) {
            job.miss(MissReason::Absent);
            return None;
        }
        let untried = || found.replicas.iter().filter(|replica| !job.tried.contains(replica));
        let good = untried().find(|replica| !self.owners.is_shunned(replica.node));
        let Some(location) = good.or_else(|| untried().next()).copied() else {
            let version = found.version;
            self.forget(&job.key, Some(version));
            job.found = None;
            if job.lookups >= LOOKUPS_MAX {
                job.conclude();
            }
            return None;
        };
        job.tried.push(location);
        Some((location, part))
    }

    fn buffer_for(&self, job: &mut Job, part: Part, is_inline: bool) -> Result<Option<RegionBuf>, ClientError> {
        if let Some(buffer) = job.buffer.take() {
            if buffer.len() as u64 == part.len {
                return Ok(Some(buffer));
            }
            return Err(ClientError::BufferLength { len: part.len, buffer });
        }
        if is_inline {
            return Ok(None);
        }
        let taken = self.pool.take(&self.engine, part.len);
        taken.map(Some).map_err(|error| ClientError::Memory { len: part.len, detail: error.to_string() })
    }

    /// Makes a call. Its buffers come back with it, and nobody writes to them any more.
    async fn ask(&self, mut call: Call) -> (Call, Result<Vec<GetOutcome>, String>) {
        let mut request = std::mem::take(&mut call.request);
        let deadline = self.deadline_for(call.len);
        if call.buffers.is_empty() {
            let asked = self.owners.get(call.node, request, deadline).await;
            return (call, asked.map(|reply| reply.outcomes).map_err(|error| error.to_string()));
        }
        match self.engine.grant_write(std::mem::take(&mut call.buffers)) {
            Ok(grant) => {
                request.token = grant.token().as_bytes().to_vec();
                let asked = self.owners.get(call.node, request, deadline).await;
                call.buffers = grant.close().await;
                (call, asked.map(|reply| reply.outcomes).map_err(|error| error.to_string()))
            }
            Err(error) => {
                let detail = error.to_string();
                call.buffers = error.memory;
                (call, Err(detail))
            }
        }
    }

    fn settle_get(&self, jobs: &mut [Job], call: Call, answer: Result<Vec<GetOutcome>, String>) {
        if answer.is_err() {
            self.owners.shun(call.node);
        }
        let mut buffers = call.buffers.into_iter();
        let is_remote = buffers.len() > 0;
        for (position, (index, location)) in call.jobs.into_iter().enumerate() {
            let job = &mut jobs[index];
            let buffer = if is_remote { buffers.next() } else { None };
            match &answer {
                Ok(outcomes) => {
                    let outcome = outcomes.get(position).cloned().unwrap_or_default();
                    self.take(job, location, outcome, buffer);
                }
                Err(detail) => {
                    job.failure = Some((location.node, detail.clone()));
                    job.buffer = buffer;
                }
            }
        }
    }

    /// Takes an owner's word, and its bytes if they are right.
    fn take(&self, job: &mut Job, location: Location, outcome: GetOutcome, buffer: Option<RegionBuf>) {
        match outcome.kind {
            HIT => {
                let Some(found) = &job.found else { return };
                let (part, version, len) = (job.range(found), found.version, found.len);
                let bytes = match buffer {
                    Some(buffer) => Held::Region(buffer),
                    None => Held::Plain(outcome.inline),
                };
                let value = Value { version: outcome.version.map_or(version, Stamp::from), bytes };
                if value.len() as u64 == part.len && is_intact(&value, part, len, &outcome.checksums) {
                    job.done = Some(Ok(Got::Hit(value)));
                } else {
                    tracing::warn!(node = %location.node, "a replica's bytes do not match their checksums");
                    job.failure = Some((location.node, "the bytes do not match their checksums".to_owned()));
                    job.buffer = value.into_buffer();
                }
            }
            STALE => {
                job.was_stale = true;
                job.buffer = buffer;
            }
            _ => {
                job.failure = Some((location.node, outcome.detail));
                job.buffer = buffer;
            }
        }
    }
}

/// Whether the chunks that `part` covers as a whole have the checksums that the owner keeps.
fn is_intact(bytes: &[u8], part: Part, len: u64, checksums: &[u32]) -> bool {
    let chunk_len = CHUNK_LEN as u64;
    let first = part.offset.div_ceil(chunk_len);
    let end =
        if part.offset + part.len == len { len.div_ceil(chunk_len) } else { (part.offset + part.len) / chunk_len };
    if end <= first {
        return true;
    }
    let skip = usize::try_from(first * chunk_len - part.offset).unwrap_or(usize::MAX);
    let stop = usize::try_from((end * chunk_len).min(part.offset + part.len) - part.offset).unwrap_or(usize::MAX);
    bytes.get(skip..stop).is_some_and(|covered| checksum::first_damaged(covered, checksums).is_none())
}

fn fail_all(jobs: &mut [Job], error: &LinkError) {
    for job in jobs.iter_mut().filter(|job| job.is_open()) {
        // A buffer that was handed in is dropped here: what it covered is given back to its region.
        job.done = Some(Err(ClientError::Directory(error.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_checked_as_far_as_it_covers_chunks() {
        let value: Vec<u8> = (0..3 * CHUNK_LEN + 9).map(|at| (at / 1000).to_le_bytes()[0]).collect();
        let sums: Vec<u32> = checksum::of_value(&value).collect();
        let check = |offset: usize, len: usize, sums: &[u32]| {
            let part = Part { offset: offset as u64, len: len as u64 };
            is_intact(&value[offset..offset + len], part, value.len() as u64, sums)
        };
        assert!(check(0, value.len(), &sums));
        assert!(check(5, 9, &[]), "no whole chunk");
        assert!(check(5, 2 * CHUNK_LEN, &sums[1..2]));
        assert!(!check(5, 2 * CHUNK_LEN, &sums[..1]), "another chunk's checksum");
        assert!(check(3 * CHUNK_LEN, 9, &sums[3..]), "the last chunk is shorter");
        assert!(!check(0, value.len(), &sums[..3]), "too few");
    }
}
