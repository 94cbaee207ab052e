//! What a store node does by itself: tell the directory that it lives, free what it is told to, evict ahead of demand.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::directory as wire;

use super::node::{Inner, StoreNode, Tally};
use super::segment::Proposal;
use crate::directory::LinkError;
use crate::rpc::Reason;
use crate::runtime::{Runtime, Stop, boot_time, by};

/// Victims of one proposal.
const VICTIMS_MAX: usize = 256;
/// Bytes freed per round of eviction ahead of demand.
const ROUND_LEN: u64 = 64 << 20;

/// What a round of eviction came to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Made {
    /// Bytes whose slots were released.
    pub(super) freed: u64,
    /// When the next round may free more, if a lease or a young directory stood in the way.
    pub(super) retry_after: Option<Duration>,
}

impl<R: Runtime> StoreNode<R> {
    /// Joins the directory as the node that clients reach at `address`, again whenever it forgot this node, and keeps the
    /// segment in shape until `stop`.
    pub async fn run(self, address: String, stop: Stop) {
        let work = async {
            let (joined, evicting) = (self.inner.keep_joined(&address), self.inner.keep_room());
            futures::join!(joined, evicting)
        };
        let _ = stop.or_stopped(work).await;
    }
}

impl<R: Runtime> Inner<R> {
    async fn keep_joined(self: &Arc<Self>, address: &str) {
        let (mut is_joined, mut is_out_of_reach, mut freed) = (false, false, Vec::new());
        loop {
            let started = boot_time();
            let beat = if is_joined { self.beat(&mut freed).await } else { self.join(address).await };
            match beat {
                Ok(()) => {
                    is_joined = true;
                    if std::mem::take(&mut is_out_of_reach) {
                        tracing::info!("the directory is reached again");
                    }
                }
                Err(error) if matches!(error.reason(), Some(Reason::NotFound)) => is_joined = false,
                Err(error) if !is_out_of_reach => {
                    is_out_of_reach = true;
                    tracing::warn!(%error, "the directory is not reached; nothing is evicted until it is");
                }
                Err(_) => {}
            }
            self.is_joined.store(is_joined, Ordering::Relaxed);
            if is_joined && let Err(error) = self.commit_uncertain().await {
                tracing::debug!(%error, "commits without an answer wait on");
            }
            let pause = self.config.heartbeat - boot_time().since(started);
            self.engine.runtime().sleep(pause.max(Duration::from_millis(1))).await;
        }
    }

    async fn join(&self, address: &str) -> Result<(), LinkError> {
        let request = wire::JoinRequest {
            owner: Some(self.owner.into()),
            address: address.to_owned(),
            segments: vec![self.segment_row()],
        };
        self.link.join(&request, self.directory_deadline()).await?;
        self.report().await
    }

    fn segment_row(&self) -> wire::Segment {
        let (facts, counts) = {
            let mut segment = self.segment.lock();
            segment.sweep();
            (segment.facts(), segment.counts())
        };
        wire::Segment {
            index: facts.index,
            epoch: facts.epoch,
            tier: facts.tier.code(),
            capacity: facts.capacity,
            free: counts.free,
            replicas: counts.sealed,
        }
    }

    /// Reports what is here; frees what must not come back.
    async fn report(&self) -> Result<(), LinkError> {
        let mut from = Some(0);
        while let Some(first) = from {
            let (rows, next) = self.segment.lock().inventory(first, wire::ITEMS_MAX);
            let facts = self.segment.lock().facts();
            let entries = rows.iter().map(|row| wire::Entry {
                key: row.key.to_vec(),
                slot: row.id.slot,
                generation: row.id.generation,
                len: row.len,
                version: Some(row.version.into()),
                pin: Some(row.pin.into()),
                mutable: row.mutable,
            });
            let request = wire::InventoryRequest {
                owner: Some(self.owner.into()),
                segment: facts.index,
                epoch: facts.epoch,
                entries: entries.collect(),
                last: next.is_none(),
            };
            let reply = self.link.inventory(&request, self.directory_deadline()).await?;
            let mut segment = self.segment.lock();
            for (row, verdict) in rows.iter().zip(&reply.verdicts) {
                if *verdict != 0 {
                    segment.release(boot_time(), row.id);
                }
            }
            from = next;
        }
        Ok(())
    }

    async fn beat(&self, freed: &mut Vec<wire::Location>) -> Result<(), LinkError> {
        // A full page may be followed by another one.
        for _ in 0..16 {
            let request = wire::HeartbeatRequest {
                owner: Some(self.owner.into()),
                segments: vec![self.segment_row()],
                freed: freed.clone(),
            };
            let reply = self.link.heartbeat(&request, self.directory_deadline()).await?;
            freed.clear();
            if reply.retired.is_empty() {
                break;
            }
            let mut segment = self.segment.lock();
            for retired in reply.retired {
                if let Ok(location) = (&retired).try_into()
                    && let Some(id) = segment.slot_at(&location)
                {
                    segment.release(boot_time(), id);
                }
                freed.push(retired);
            }
        }
        Ok(())
    }

    async fn keep_room(self: &Arc<Self>) {
        let mut wait = Duration::from_secs(1);
        loop {
            let seen = self.pressure.count();
            let deadline = boot_time() + wait;
            if !self.is_above_high() {
                let _ = by(self.engine.runtime(), deadline, self.pressure.changed(seen)).await;
                wait = Duration::from_secs(1);
                continue;
            }
            let low = self.config.capacity / 1_000 * u64::from(self.config.low_permille);
            let used = self.config.capacity.saturating_sub(self.segment.lock().free());
            let made = self.make_room(used.saturating_sub(low).clamp(1, ROUND_LEN)).await;
            if made.freed == 0 {
                // State drives eviction, not traffic: it goes on by itself once leases have run out.
                wait = made.retry_after.unwrap_or(Duration::from_millis(500)).min(Duration::from_secs(1));
                self.engine.runtime().sleep(wait.max(Duration::from_millis(10))).await;
            }
        }
    }

    /// Proposes victims of `wanted` bytes in all and frees those the directory agrees to.
    pub(super) async fn make_room(&self, wanted: u64) -> Made {
        let normal = self.evict(wanted, Urgency::Normal).await;
        if normal.freed > 0 { normal } else { self.evict(wanted, Urgency::Pressing).await }
    }

    async fn evict(&self, wanted: u64, urgency: Urgency) -> Made {
        let now = boot_time();
        let proposals = self.segment.lock().propose(now, wanted, VICTIMS_MAX);
        if proposals.is_empty() {
            return Made::default();
        }
        let guard = Proposed { inner: self, proposals };
        let victims = guard.proposals.iter().map(|proposal| wire::Victim {
            key: proposal.key.to_vec(),
            location: Some(self.segment.lock().location(proposal.id).into()),
        });
        let request = wire::EvictRequest {
            owner: Some(self.owner.into()),
            victims: victims.collect(),
            pressing: urgency == Urgency::Pressing,
        };
        match self.link.evict(&request, self.directory_deadline()).await {
            Ok(reply) => guard.settle(boot_time(), &reply.verdicts),
            // Without the directory's word nothing is evicted.
            Err(error) => {
                tracing::debug!(%error, "victims were not agreed to");
                Made::default()
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgency {
    Normal,
    Pressing,
}

/// Victims that wait for the directory's word; whatever happens to the call, none stays half-way.
struct Proposed<'a, R: Runtime> {
    inner: &'a Inner<R>,
    proposals: Vec<Proposal>,
}

impl<R: Runtime> Proposed<'_, R> {
    fn settle(mut self, now: Instant, verdicts: &[wire::EvictVerdict]) -> Made {
        let mut made = Made::default();
        let (mut evicted, mut leased, mut pinned) = (0, 0, 0);
        let proposals = std::mem::take(&mut self.proposals);
        let mut segment = self.inner.segment.lock();
        for (index, proposal) in proposals.iter().enumerate() {
            match verdicts.get(index) {
                Some(wire::EvictVerdict { kind: 0, .. }) => {
                    segment.release(now, proposal.id);
                    (made.freed, evicted) = (made.freed + proposal.len, evicted + 1);
                    continue;
                }
                Some(wire::EvictVerdict { kind: 2, .. }) => pinned += 1,
                Some(verdict) => {
                    leased += 1;
                    let wait = Duration::from_nanos(verdict.retry_after_ns);
                    made.retry_after = Some(made.retry_after.map_or(wait, |before| before.min(wait)));
                }
                None => {}
            }
            segment.spare(now, proposal.id);
        }
        drop(segment);
        let tally = &self.inner.tally;
        Tally::add(&tally.evicted, evicted);
        Tally::add(&tally.spared_leased, leased);
        Tally::add(&tally.spared_pinned, pinned);
        made
    }
}

impl<R: Runtime> Drop for Proposed<'_, R> {
    fn drop(&mut self) {
        let mut segment = self.inner.segment.lock();
        for proposal in &self.proposals {
            segment.spare(boot_time(), proposal.id);
        }
    }
}
