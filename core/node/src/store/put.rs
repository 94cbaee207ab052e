//! Puts: reserve, take the bytes, check, seal, tell the directory, answer.

use std::sync::Arc;

use millpond_core::directory::{KEY_LEN_MAX, Mode, Pin, Stamp};
use millpond_core::time::Duration;
use millpond_core::wire::hello::Identity;
use millpond_core::wire::message::directory as index;
use millpond_core::wire::message::store::{
    ALREADY_THERE, INLINE_LEN_MAX, ITEMS_MAX, PutItem, PutOutcome, PutReply, PutRequest, RANGES_MAX, REFUSED, STORED,
};
use millpond_hal::region::RegionBytes;

use super::checksum::{chunk_count, first_damaged};
use super::node::{Inner, Reservation, Tally};
use super::pull::{Incoming, MoveError, Way, pull};
use super::segment::{ReserveError, Reserved, SlotId, Value};
use crate::directory::LinkError;
use crate::engine::{Peer, RegionToken, RemoteRegion, Via};
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, boot_time};

/// How long a put waits for the first lane of its client.
const PEER_SPAN: Duration = Duration::from_secs(1);
/// Rounds of eviction that one put may start.
const ROUNDS_MAX: usize = 4;

/// A sealed value whose commit got no answer.
#[derive(Clone, Debug)]
pub(super) struct Uncertain {
    pub(super) id: SlotId,
    pub(super) item: index::CommitItem,
}

/// An item that was accepted and is on its way.
struct Plan<R: Runtime> {
    at: usize,
    reservation: Reservation<R>,
    reserved: Option<Reserved>,
    bytes: Option<RegionBytes>,
}

impl<R: Runtime> Inner<R> {
    /// Serves one call. Dropping the future, as a cancelled call or a dead client does, gives back what was reserved.
    pub(super) async fn put(self: &Arc<Self>, from: Identity, request: PutRequest) -> Result<PutReply, Refusal> {
        if request.items.len() > ITEMS_MAX {
            let detail = format!("{} items in one call, the limit is {ITEMS_MAX}; send several", request.items.len());
            return Err(Refusal::new(Reason::TooLarge, detail));
        }
        let mut outcomes: Vec<Option<PutOutcome>> = request.items.iter().map(|item| self.check(item).err()).collect();
        self.skip_present(&request.items, &mut outcomes).await;
        let mut plans = self.reserve_all(&request.items, &mut outcomes).await;
        take_inline(&request.items, &mut plans, &mut outcomes);
        self.take_remote(from, &request, &mut plans, &mut outcomes).await;
        let sealed = self.seal_all(&request.items, plans);
        self.commit_all(&request.items, sealed, &mut outcomes).await;
        self.count(&outcomes);
        let lost = || refused(Reason::Failed, "the put was not finished".to_owned(), None);
        Ok(PutReply { outcomes: outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect() })
    }

    /// What can be said without looking at anything else.
    fn check(&self, item: &PutItem) -> Result<(), PutOutcome> {
        let malformed = |detail: String| Err(refused(Reason::Malformed, detail, None));
        if item.key.is_empty() || item.key.len() > KEY_LEN_MAX {
            return malformed(format!(
                "the key has {} bytes; a key has 1 to {KEY_LEN_MAX}: hash longer names",
                item.key.len()
            ));
        }
        if item.len == 0 {
            return malformed("the value is empty; a value has at least 1 byte".to_owned());
        }
        if item.len > self.config.capacity {
            let capacity = self.config.capacity;
            let detail = format!("the value has {} bytes, this node's segment {capacity}; lend more memory", item.len);
            return Err(refused(Reason::TooLarge, detail, None));
        }
        if item.checksums.len() as u64 != chunk_count(item.len) {
            return malformed(format!("{} checksums for {} chunks", item.checksums.len(), chunk_count(item.len)));
        }
        let named = item.source.iter().try_fold(0u64, |sum, range| sum.checked_add(range.len));
        let is_inline = item.source.is_empty();
        let sum = if is_inline { Some(item.inline.len() as u64) } else { named };
        if sum != Some(item.len) || item.inline.len() > INLINE_LEN_MAX || item.source.len() > RANGES_MAX {
            return malformed(format!(
                "the value has {} bytes, but {sum:?} were named: inline (at most {INLINE_LEN_MAX}) or in at most \
                 {RANGES_MAX} ranges",
                item.len
            ));
        }
        let mode = Mode::from_wire(item.mode, item.version).and(Pin::try_from(item.pin));
        mode.map(|_| ()).map_err(|error| refused(Reason::Malformed, error.to_string(), None))
    }

    /// Spares the bytes of values that are here already, if the directory says that they are still wanted.
    async fn skip_present(&self, items: &[PutItem], outcomes: &mut [Option<PutOutcome>]) {
        let held: Vec<usize> = {
            let segment = self.segment.lock();
            let is_held =
                |at: &usize| outcomes[*at].is_none() && items[*at].mode == 0 && segment.holds(&items[*at].key);
            (0..items.len()).filter(is_held).collect()
        };
        if held.is_empty() {
            return;
        }
        let request =
            index::LocateRequest { keys: held.iter().map(|at| items[*at].key.clone()).collect(), lease_ns: 0 };
        // Without an answer the commit decides.
        let Ok(reply) = self.link.locate(&request, self.directory_deadline()).await else { return };
        for (at, located) in held.into_iter().zip(reply.located) {
            if located.hit {
                outcomes[at] =
                    Some(PutOutcome { kind: ALREADY_THERE, version: located.version, ..PutOutcome::default() });
            }
        }
    }

    async fn reserve_all(self: &Arc<Self>, items: &[PutItem], outcomes: &mut [Option<PutOutcome>]) -> Vec<Plan<R>> {
        let mut plans = Vec::new();
        for (at, item) in items.iter().enumerate() {
            if outcomes[at].is_some() {
                continue;
            }
            match self.find_room(item.len).await {
                Ok((reservation, reserved)) => {
                    plans.push(Plan { at, reservation, reserved: Some(reserved), bytes: None });
                }
                Err(outcome) => outcomes[at] = Some(outcome),
            }
        }
        if self.is_above_high() {
            self.pressure.notify();
        }
        plans
    }

    pub(super) fn is_above_high(&self) -> bool {
        let used = self.config.capacity.saturating_sub(self.segment.lock().free());
        used > self.config.capacity / 1_000 * u64::from(self.config.high_permille)
    }

    /// Space for `len` bytes, evicting if there is none.
    async fn find_room(self: &Arc<Self>, len: u64) -> Result<(Reservation<R>, Reserved), PutOutcome> {
        let mut retry_after = None;
        for round in 0..=ROUNDS_MAX {
            match self.reserve(len) {
                Ok(found) => return Ok(found),
                Err(ReserveError::TooLong) => {
                    let detail = format!("no segment here holds {len} bytes; lend more memory");
                    return Err(refused(Reason::TooLarge, detail, None));
                }
                Err(_) if round < ROUNDS_MAX => {
                    let made = self.make_room(len.saturating_mul(round as u64 + 1)).await;
                    retry_after = made.retry_after;
                    if made.freed == 0 {
                        break;
                    }
                }
                Err(_) => {}
            }
        }
        Tally::add(&self.tally.refused_full, 1);
        let detail = format!("no room for {len} bytes: what is here is leased, pinned or being written");
        let hint = retry_after.or(Some(Duration::from_millis(50)));
        Err(refused(Reason::Full, detail, hint))
    }

    async fn take_remote(
        &self,
        from: Identity,
        request: &PutRequest,
        plans: &mut [Plan<R>],
        outcomes: &mut [Option<PutOutcome>],
    ) {
        let mut waiting: Vec<(&mut Plan<R>, &PutItem)> = plans
            .iter_mut()
            .filter(|plan| plan.reserved.is_some())
            .map(|plan| {
                let item = &request.items[plan.at];
                (plan, item)
            })
            .collect();
        if waiting.is_empty() {
            return;
        }
        let (remote, via) = match self.attach(from, &request.token, &request.via).await {
            Ok(found) => found,
            Err(refusal) => {
                let reason = refusal.reason;
                for (plan, _) in waiting {
                    outcomes[plan.at] = Some(refused(reason, refusal.detail.to_string(), refusal.retry_after));
                    plan.reserved = None;
                }
                return;
            }
        };
        let way = Way { remote: &remote, via, progress_deadline: self.config.progress_deadline };
        let values = waiting.iter_mut().filter_map(|(plan, item)| {
            let reserved = plan.reserved.take()?;
            self.segment.lock().begin_writing(reserved.id);
            Some(Incoming { buf: reserved.buf, source: &item.source, checksums: &item.checksums })
        });
        let results = pull(&self.engine, way, values.collect()).await;
        for ((plan, _), result) in waiting.into_iter().zip(results) {
            match result {
                Ok(buf) => plan.bytes = Some(buf.freeze()),
                Err(error) => outcomes[plan.at] = Some(failed(&error)),
            }
        }
    }

    /// The client's memory, over a lane that it opened.
    pub(super) async fn attach(&self, from: Identity, token: &[u8], via: &str) -> Result<(RemoteRegion, Via), Refusal> {
        let malformed = |detail: String| Refusal::new(Reason::Malformed, detail);
        let token: RegionToken = zerocopy::FromBytes::read_from_bytes(token)
            .map_err(|_| malformed("the token of client memory is missing or not 64 bytes long".to_owned()))?;
        let via: Via = if via.is_empty() {
            Via::Auto
        } else {
            via.parse().map_err(|error: crate::engine::UnknownTransport| malformed(error.to_string()))?
        };
        let peer: Peer = self.engine.peer(&from, PEER_SPAN).await.map_err(|error| {
            Refusal::new(Reason::Unavailable, format!("no lane to the client: {error}; open this node first"))
        })?;
        let remote = self.engine.attach(&peer, &token);
        Ok((remote.map_err(|error| Refusal::new(Reason::Stale, error.to_string()))?, via))
    }

    fn seal_all(&self, items: &[PutItem], plans: Vec<Plan<R>>) -> Vec<(usize, Reservation<R>)> {
        let now = boot_time();
        let mut segment = self.segment.lock();
        let mut sealed = Vec::with_capacity(plans.len());
        let mut failed = Vec::new();
        for plan in plans {
            let Some(bytes) = plan.bytes else {
                failed.push(plan.reservation);
                continue;
            };
            let item = &items[plan.at];
            let value = Value {
                key: item.key.as_slice().into(),
                bytes,
                checksums: item.checksums.as_slice().into(),
                pin: Pin::try_from(item.pin).unwrap_or(Pin::Free),
                parent: (!item.parent.is_empty()).then(|| item.parent.as_slice().into()),
            };
            if segment.seal(now, plan.reservation.id, value) {
                sealed.push((plan.at, plan.reservation));
            } else {
                failed.push(plan.reservation);
            }
        }
        // Their guards take the lock again.
        drop(segment);
        drop(failed);
        sealed
    }

    async fn commit_all(
        &self,
        items: &[PutItem],
        sealed: Vec<(usize, Reservation<R>)>,
        outcomes: &mut [Option<PutOutcome>],
    ) {
        let mut sealed = sealed.into_iter().peekable();
        while sealed.peek().is_some() {
            let part: Vec<_> = sealed.by_ref().take(index::ITEMS_MAX).collect();
            let request = index::CommitRequest {
                owner: Some(self.owner.into()),
                items: part.iter().map(|(at, reservation)| self.commit_item(&items[*at], reservation.id)).collect(),
            };
            match self.link.commit(&request, self.directory_deadline()).await {
                Ok(reply) if reply.outcomes.len() == part.len() => {
                    for ((at, reservation), outcome) in part.into_iter().zip(&reply.outcomes) {
                        outcomes[at] = Some(self.settle(reservation, outcome));
                    }
                }
                failure => {
                    let detail = match failure {
                        Ok(_) => "the directory answered another number of commits".to_owned(),
                        Err(error) => error.to_string(),
                    };
                    self.keep_uncertain(part, request, &detail, outcomes);
                }
            }
        }
    }

    fn commit_item(&self, item: &PutItem, id: SlotId) -> index::CommitItem {
        index::CommitItem {
            key: item.key.clone(),
            len: item.len,
            location: Some(self.segment.lock().location(id).into()),
            mode: item.mode,
            version: item.version,
            pin: item.pin,
        }
    }

    /// Does to the slot what the directory said.
    fn settle(&self, reservation: Reservation<R>, outcome: &index::CommitOutcome) -> PutOutcome {
        match outcome.kind {
            1 => {
                let id = reservation.keep();
                let version = outcome.version.map_or(Stamp::ZERO, Stamp::from);
                let mut segment = self.segment.lock();
                segment.confirm(id, version, outcome.mutable);
                PutOutcome {
                    kind: STORED,
                    version: outcome.version,
                    copies: u32::try_from(outcome.count).unwrap_or(u32::MAX),
                    location: Some(segment.location(id).into()),
                    ..PutOutcome::default()
                }
            }
            2 => PutOutcome { kind: ALREADY_THERE, version: outcome.version, ..PutOutcome::default() },
            _ => {
                let hint = (outcome.retry_after_ns > 0).then(|| Duration::from_nanos(outcome.retry_after_ns));
                refused(Reason::from_code(outcome.reason), outcome.detail.clone(), hint)
            }
        }
    }

    /// The directory may have made these visible: they stay until it says so or not.
    fn keep_uncertain(
        &self,
        part: Vec<(usize, Reservation<R>)>,
        request: index::CommitRequest,
        detail: &str,
        outcomes: &mut [Option<PutOutcome>],
    ) {
        let mut uncertain = self.uncertain.lock();
        for ((at, reservation), item) in part.into_iter().zip(request.items) {
            uncertain.push(Uncertain { id: reservation.keep(), item });
            let detail = format!("{detail}; the value may become visible later");
            outcomes[at] = Some(refused(Reason::Unavailable, detail, Some(Duration::from_millis(200))));
        }
    }

    /// Commits again what got no answer. True if nothing is left.
    pub(super) async fn commit_uncertain(&self) -> Result<bool, LinkError> {
        let part: Vec<Uncertain> = self.uncertain.lock().iter().take(index::ITEMS_MAX).cloned().collect();
        if part.is_empty() {
            return Ok(true);
        }
        let items = part.iter().map(|uncertain| uncertain.item.clone()).collect();
        let request = index::CommitRequest { owner: Some(self.owner.into()), items };
        let reply = self.link.commit(&request, self.directory_deadline()).await?;
        for (uncertain, outcome) in part.iter().zip(&reply.outcomes) {
            let mut segment = self.segment.lock();
            match outcome.kind {
                1 => segment.confirm(uncertain.id, outcome.version.map_or(Stamp::ZERO, Stamp::from), outcome.mutable),
                // Busy: ask again later.
                3 if outcome.retry_after_ns > 0 => continue,
                _ => drop(segment.release(boot_time(), uncertain.id)),
            }
            drop(segment);
            self.uncertain.lock().retain(|other| other.id != uncertain.id);
        }
        Ok(self.uncertain.lock().is_empty())
    }

    fn count(&self, outcomes: &[Option<PutOutcome>]) {
        let damaged = outcomes.iter().flatten().filter(|outcome| outcome.reason == DAMAGED_REASON.code());
        Tally::add(&self.tally.damaged, damaged.count());
    }
}

/// A put whose bytes do not match their checksums.
const DAMAGED_REASON: Reason = Reason::Failed;

/// Copies and checks the values that came inside the call.
fn take_inline<R: Runtime>(items: &[PutItem], plans: &mut [Plan<R>], outcomes: &mut [Option<PutOutcome>]) {
    for plan in plans.iter_mut().filter(|plan| items[plan.at].source.is_empty()) {
        let (item, Some(mut reserved)) = (&items[plan.at], plan.reserved.take()) else { continue };
        match first_damaged(&item.inline, &item.checksums) {
            Some(chunk) => outcomes[plan.at] = Some(failed(&MoveError::Damaged(chunk))),
            None => {
                reserved.buf.copy_from_slice(&item.inline);
                plan.bytes = Some(reserved.buf.freeze());
            }
        }
    }
}

fn failed(error: &MoveError) -> PutOutcome {
    let (reason, hint) = match error {
        MoveError::Transfer(_) => (Reason::Unavailable, Some(Duration::from_millis(50))),
        MoveError::Damaged(_) => (DAMAGED_REASON, None),
        MoveError::Ranges(_) => (Reason::Malformed, None),
    };
    refused(reason, error.to_string(), hint)
}

fn refused(reason: Reason, detail: String, retry_after: Option<Duration>) -> PutOutcome {
    PutOutcome {
        kind: REFUSED,
        reason: reason.code(),
        detail,
        retry_after_ns: retry_after.map_or(0, Duration::as_nanos),
        ..PutOutcome::default()
    }
}
