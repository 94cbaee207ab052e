//! One shard: messages in, messages out, under one lock.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use millpond_core::directory::{
    Commit, Committed, Config, Directory, Entry, EntryVerdict, EvictVerdict, Inventory, Join, Key, Leases, Limits,
    Location, Miss, Mode, NodeId, Owner, Part, Pin, Refusal as Denial, Removed, SegmentFacts, SegmentLoad, SegmentView,
    Stamp, Start, Totals, Urgency, Victim,
};
use millpond_core::time::Duration;
use millpond_core::wire::message::directory as wire;
use parking_lot::Mutex;

use super::signal::Signal;
use super::state::{self, State, StateError};
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, Stop, boot_time, sleep_until};

/// How a shard is made.
///
/// ```
/// use millpond_node::directory::{Shard, ShardConfig};
/// let shard = Shard::start(ShardConfig { is_first: true, ..ShardConfig::default() }).unwrap();
/// assert_eq!(shard.totals().objects, 0);
/// ```
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Its number.
    pub shard: u32,
    /// The bounds.
    pub limits: Limits,
    /// Where its state file lies; without one its term comes from the clock and a `clear` is forgotten at its end.
    pub state_dir: Option<PathBuf>,
    /// How long a restarted shard waits for inventories before it calls a key absent.
    pub rebuild_window: Duration,
    /// The caller knows that no earlier term ever existed, so nothing has to be waited for. A state file that was never
    /// written says the same.
    pub is_first: bool,
}

impl Default for ShardConfig {
    fn default() -> Self {
        Self {
            shard: 0,
            limits: Limits::default(),
            state_dir: None,
            rebuild_window: Duration::from_secs(1),
            is_first: false,
        }
    }
}

/// A shard could not be started.
///
/// Example: `verify/tests/store.rs` (`Shard`).
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StartError(#[from] pub StateError);

/// One shard of the directory. Share it by `Arc`.
///
/// Example: `verify/tests/store.rs`.
#[derive(Debug)]
pub struct Shard {
    machine: Mutex<Machine>,
    changed: Signal,
    state_dir: Option<PathBuf>,
}

#[derive(Debug)]
struct Machine {
    directory: Directory,
    term: u64,
    /// Nodes in the state file.
    nodes: Vec<NodeId>,
}

impl Shard {
    /// Begins a new term.
    pub fn start(config: ShardConfig) -> Result<Arc<Self>, StartError> {
        let ShardConfig { shard, limits, state_dir, rebuild_window, is_first } = config;
        let before = state_dir.as_deref().map(state::read).transpose()?.flatten();
        let by_clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_millis());
        let by_clock = u64::try_from(by_clock).unwrap_or(1);
        let is_first = is_first || (state_dir.is_some() && before.is_none());
        let before = before.unwrap_or_default();
        let term = by_clock.max(before.term + 1);
        let start = if is_first {
            Start::Fresh
        } else {
            Start::Recovering { expected: before.nodes.clone(), window: rebuild_window }
        };
        let machine = Config { shard, term, cleared: before.cleared, start, limits, ..Config::fresh(term) };
        let machine = Machine { directory: Directory::new(boot_time(), machine), term, nodes: before.nodes };
        let shard = Self { machine: Mutex::new(machine), changed: Signal::default(), state_dir };
        shard.save(&shard.machine.lock())?;
        Ok(Arc::new(shard))
    }

    /// Counts. O(objects).
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.machine.lock().directory.totals()
    }

    /// Declares silent owners gone, until `stop`.
    pub async fn run<R: Runtime>(self: Arc<Self>, runtime: R, stop: Stop) {
        let pause = Duration::from_millis(100);
        while !stop.is_stopped() {
            let deadline = self.machine.lock().directory.poll_deadline();
            let next = deadline.min(boot_time() + pause);
            if stop.or_stopped(sleep_until(&runtime, next.max(boot_time() + Duration::from_millis(1)))).await.is_err() {
                return;
            }
            let gone = self.machine.lock().directory.on_tick(boot_time());
            for owner in &gone {
                tracing::warn!(node = %owner.node, "an owner was silent for too long; its replicas left the index");
            }
            if !gone.is_empty() {
                self.changed.notify();
            }
        }
    }

    /// The link to an owner broke: it gets no new work until it is heard again.
    pub fn on_link_lost(&self, owner: Owner) {
        self.machine.lock().directory.on_link_lost(owner);
    }

    fn save(&self, machine: &Machine) -> Result<(), StateError> {
        let Some(dir) = &self.state_dir else { return Ok(()) };
        let cleared = machine.directory.cleared();
        state::write(dir, &State { term: machine.term, cleared, nodes: machine.nodes.clone() })
    }

    /// See [`wire::METHOD_LOCATE`].
    pub fn locate(&self, request: &wire::LocateRequest) -> Result<wire::LocateReply, Refusal> {
        check_count(request.keys.len())?;
        let lease = Duration::from_nanos(request.lease_ns);
        let mut machine = self.machine.lock();
        let now = boot_time();
        let mut reply = wire::LocateReply::default();
        for bytes in &request.keys {
            let answer = machine.directory.on_locate(now, key(bytes)?, lease);
            reply.header = Some((&answer).into());
            reply.located.push(answer.value.into());
        }
        Ok(reply)
    }

    /// See [`wire::METHOD_EXISTS`].
    pub fn exists(&self, request: &wire::ExistsRequest) -> Result<wire::ExistsReply, Refusal> {
        check_count(request.keys.len())?;
        let machine = self.machine.lock();
        let now = boot_time();
        let mut reply = wire::ExistsReply::default();
        for bytes in &request.keys {
            let answer = machine.directory.exists(now, key(bytes)?);
            reply.header = Some((&answer).into());
            reply.present.push(match answer.value {
                Ok(()) => 1,
                Err(Miss::Rebuilding { retry_after }) => {
                    reply.rebuilding_ns = retry_after.as_nanos();
                    2
                }
                Err(_) => 0,
            });
        }
        Ok(reply)
    }

    /// See [`wire::METHOD_STAT`].
    pub fn stat(&self, request: &wire::StatRequest) -> Result<wire::StatReply, Refusal> {
        let answer = self.machine.lock().directory.stat(boot_time(), key(&request.key)?);
        let header = Some((&answer).into());
        Ok(match answer.value {
            Err(miss) => wire::StatReply { header, located: Some(miss.into()), ..wire::StatReply::default() },
            Ok(stat) => {
                let located = wire::Located {
                    hit: true,
                    version: Some(stat.version.into()),
                    len: stat.len,
                    replicas: stat.replicas.iter().map(|(location, _)| (*location).into()).collect(),
                    ..wire::Located::default()
                };
                wire::StatReply {
                    header,
                    located: Some(located),
                    tiers: stat.replicas.iter().map(|(_, tier)| tier.code()).collect(),
                    age_ns: stat.age.as_nanos(),
                    lease_left_ns: stat.lease_left.as_nanos(),
                    pin: Some(stat.pin.into()),
                    mutable: stat.mutable,
                }
            }
        })
    }

    /// See [`wire::METHOD_LIST`].
    #[must_use]
    pub fn list(&self, request: &wire::ListRequest) -> wire::ListReply {
        let max = usize::try_from(request.max).unwrap_or(usize::MAX);
        let answer = self.machine.lock().directory.list(&request.prefix, after(&request.after), max);
        let header = Some((&answer).into());
        let page = answer.value;
        wire::ListReply {
            header,
            rows: page.rows.into_iter().map(wire::Listed::from).collect(),
            next: page.next.map_or_else(Vec::new, |key| key.to_vec()),
            position: Some(page.position.into()),
        }
    }

    /// See [`wire::METHOD_REMOVE`].
    pub fn remove(&self, request: &wire::RemoveRequest) -> Result<wire::RemoveReply, Refusal> {
        check_count(request.keys.len())?;
        let leases = if request.force { Leases::Override } else { Leases::Respect };
        let now = boot_time();
        let mut machine = self.machine.lock();
        let mut sum = wire::RemoveReply::default();
        let mut add = |answer: millpond_core::directory::Answer<Removed>| {
            sum.header = Some((&answer).into());
            sum.objects += answer.value.objects;
            sum.leased += answer.value.leased;
            sum.owners_unreachable = sum.owners_unreachable.max(answer.value.owners_unreachable);
            sum.next = answer.value.next.map_or_else(Vec::new, |key| key.to_vec());
        };
        if request.keys.is_empty() {
            let directory = &mut machine.directory;
            add(directory.on_remove_prefix(now, &request.prefix, after(&request.after), leases));
        }
        for bytes in &request.keys {
            add(machine.directory.on_remove(now, key(bytes)?, leases));
        }
        drop(machine);
        self.changed.notify();
        Ok(sum)
    }

    /// See [`wire::METHOD_CLEAR`]. Durable before it is answered.
    pub fn clear(&self) -> Result<wire::RemoveReply, Refusal> {
        let mut machine = self.machine.lock();
        let answer = machine.directory.on_clear(boot_time());
        self.save(&machine).map_err(|error| Refusal::new(Reason::Failed, error.to_string()))?;
        drop(machine);
        self.changed.notify();
        let header = Some((&answer).into());
        Ok(wire::RemoveReply { header, objects: answer.value, ..wire::RemoveReply::default() })
    }

    /// See [`wire::METHOD_EXPLAIN_MISS`].
    pub fn explain_miss(&self, request: &wire::ExplainRequest) -> Result<wire::ExplainReply, Refusal> {
        let answer = self.machine.lock().directory.explain_miss(boot_time(), key(&request.key)?);
        Ok(wire::ExplainReply { header: Some((&answer).into()), ..answer.value.into() })
    }

    /// See [`wire::METHOD_VIEW`].
    #[must_use]
    pub fn view(&self) -> wire::ViewReply {
        let machine = self.machine.lock();
        let lease_max_ns = machine.directory.limits().lease_max.as_nanos();
        let answer = machine.directory.view(boot_time());
        let header = Some((&answer).into());
        wire::ViewReply { header, owners: answer.value.into_iter().map(wire::OwnerView::from).collect(), lease_max_ns }
    }

    /// See [`wire::METHOD_HOLDINGS`].
    pub fn holdings(&self, request: &wire::HoldingsRequest) -> Result<wire::HoldingsReply, Refusal> {
        let node = <[u8; 16]>::try_from(&*request.node).map_err(|_| unreadable(wire::Unreadable("node")))?;
        let max = usize::try_from(request.max).unwrap_or(usize::MAX);
        let machine = self.machine.lock();
        let after = request.after.map(Into::into);
        Ok(machine.directory.holdings(NodeId(node), &request.prefix, after, max).into())
    }

    /// Events after `after`, or from now on; waits while there are none, at most `within`. See [`wire::METHOD_WATCH`].
    pub async fn events<R: Runtime>(&self, runtime: &R, after: Option<Stamp>, within: Duration) -> wire::EventBatch {
        let deadline = boot_time() + within;
        let mut after = after;
        loop {
            let seen = self.changed.count();
            {
                let machine = self.machine.lock();
                let from = *after.get_or_insert_with(|| machine.directory.position());
                let answer = machine.directory.events(from, usize::MAX);
                let page = &answer.value;
                if page.gap || !page.events.is_empty() || boot_time() >= deadline {
                    let (header, next, gap) = (Some((&answer).into()), Some(page.next.into()), page.gap);
                    let events = answer.value.events.into_iter().map(wire::Event::from).collect();
                    return wire::EventBatch { header, events, next, gap };
                }
            }
            let _ = crate::runtime::by(runtime, deadline, self.changed.changed(seen)).await;
        }
    }

    /// See [`wire::METHOD_JOIN`].
    pub fn join(&self, request: &wire::JoinRequest) -> Result<wire::Header, Refusal> {
        let owner = owner(request.owner.as_ref())?;
        let views = request.segments.iter().map(SegmentView::try_from).collect::<Result<Vec<_>, _>>();
        let segments: Vec<SegmentFacts> = views.map_err(unreadable)?.into_iter().map(|view| view.facts).collect();
        let mut machine = self.machine.lock();
        let join = Join { owner, address: request.address.as_str().into(), segments };
        let answer = machine.directory.on_join(boot_time(), join);
        let header = (&answer).into();
        answer.value.map_err(denied)?;
        if !machine.nodes.contains(&owner.node) {
            machine.nodes.push(owner.node);
            self.save(&machine).map_err(|error| Refusal::new(Reason::Failed, error.to_string()))?;
        }
        drop(machine);
        self.changed.notify();
        Ok(header)
    }

    /// See [`wire::METHOD_HEARTBEAT`].
    pub fn heartbeat(&self, request: &wire::HeartbeatRequest) -> Result<wire::HeartbeatReply, Refusal> {
        let owner = owner(request.owner.as_ref())?;
        let loads = request.segments.iter().map(|segment| SegmentLoad { index: segment.index, free: segment.free });
        let freed = locations(&request.freed)?;
        let now = boot_time();
        let mut machine = self.machine.lock();
        let answer = machine.directory.on_heartbeat(now, owner, &loads.collect::<Vec<_>>());
        let header = Some((&answer).into());
        answer.value.map_err(denied)?;
        machine.directory.on_freed(owner, &freed);
        let retired = machine.directory.poll_retired(now, owner).into_iter().map(wire::Location::from).collect();
        Ok(wire::HeartbeatReply { header, retired })
    }

    /// See [`wire::METHOD_INVENTORY`].
    pub fn inventory(&self, request: &wire::InventoryRequest) -> Result<wire::InventoryReply, Refusal> {
        let owner = owner(request.owner.as_ref())?;
        check_count(request.entries.len())?;
        let entries: Vec<Entry<'_>> =
            request.entries.iter().map(wire::Entry::read).collect::<Result<_, _>>().map_err(unreadable)?;
        let part = if request.last { Part::Last } else { Part::More };
        let inventory = Inventory { segment: request.segment, epoch: request.epoch, entries: &entries, part };
        let answer = self.machine.lock().directory.on_inventory(boot_time(), owner, inventory);
        self.changed.notify();
        let header = Some((&answer).into());
        let verdicts = answer.value.map_err(denied)?.into_iter().map(|verdict| match verdict {
            EntryVerdict::Retire { reason } => reason.code(),
            _ => 0,
        });
        Ok(wire::InventoryReply { header, verdicts: verdicts.collect() })
    }

    /// See [`wire::METHOD_COMMIT`].
    pub fn commit(&self, request: &wire::CommitRequest) -> Result<wire::CommitReply, Refusal> {
        let owner = owner(request.owner.as_ref())?;
        check_count(request.items.len())?;
        let now = boot_time();
        let mut machine = self.machine.lock();
        let mut reply = wire::CommitReply::default();
        for item in &request.items {
            let commit = Commit {
                key: key(&item.key)?,
                len: item.len,
                location: location(item.location.as_ref())?,
                mode: Mode::from_wire(item.mode, item.version).map_err(unreadable)?,
                pin: Pin::try_from(item.pin).map_err(unreadable)?,
            };
            let answer = machine.directory.on_commit(now, owner, &commit);
            reply.header = Some((&answer).into());
            reply.outcomes.push(outcome(answer.value));
        }
        drop(machine);
        self.changed.notify();
        Ok(reply)
    }

    /// See [`wire::METHOD_EVICT`].
    pub fn evict(&self, request: &wire::EvictRequest) -> Result<wire::EvictReply, Refusal> {
        let owner = owner(request.owner.as_ref())?;
        let victims = victims(&request.victims)?;
        let urgency = if request.pressing { Urgency::Pressing } else { Urgency::Normal };
        let answer = self.machine.lock().directory.on_evict(boot_time(), owner, &victims, urgency);
        self.changed.notify();
        let header = Some((&answer).into());
        let verdicts = answer.value.map_err(denied)?.into_iter().map(|verdict| match verdict {
            EvictVerdict::Evict => wire::EvictVerdict { kind: 0, retry_after_ns: 0 },
            EvictVerdict::Leased { retry_after } => {
                wire::EvictVerdict { kind: 1, retry_after_ns: retry_after.as_nanos() }
            }
            EvictVerdict::NotYet { retry_after } => {
                wire::EvictVerdict { kind: 3, retry_after_ns: retry_after.as_nanos() }
            }
            _ => wire::EvictVerdict { kind: 2, retry_after_ns: 0 },
        });
        Ok(wire::EvictReply { header, verdicts: verdicts.collect() })
    }

    /// See [`wire::METHOD_DROPPED`].
    pub fn dropped(&self, request: &wire::DroppedRequest) -> Result<wire::Header, Refusal> {
        let owner = owner(request.owner.as_ref())?;
        let victims = victims(&request.victims)?;
        let answer = self.machine.lock().directory.on_dropped(boot_time(), owner, &victims);
        self.changed.notify();
        let header = (&answer).into();
        answer.value.map_err(denied)?;
        Ok(header)
    }
}

fn outcome(committed: Result<Committed, Denial>) -> wire::CommitOutcome {
    match committed {
        Ok(Committed::Stored { version, copies, mutable }) => wire::CommitOutcome {
            kind: 1,
            version: Some(version.into()),
            count: copies.into(),
            mutable,
            ..wire::CommitOutcome::default()
        },
        Ok(Committed::AlreadyThere { version, len }) => {
            wire::CommitOutcome { kind: 2, version: Some(version.into()), count: len, ..wire::CommitOutcome::default() }
        }
        Ok(_) => wire::CommitOutcome { kind: 3, ..wire::CommitOutcome::default() },
        Err(denial) => {
            let refusal = denied(denial);
            wire::CommitOutcome {
                kind: 3,
                detail: refusal.detail.into_owned(),
                retry_after_ns: refusal.retry_after.map_or(0, Duration::as_nanos),
                reason: refusal.reason.code(),
                ..wire::CommitOutcome::default()
            }
        }
    }
}

/// A denial of the machine as a refusal of a call.
pub(super) fn denied(denial: Denial) -> Refusal {
    let reason = match denial {
        Denial::UnknownOwner | Denial::UnknownSegment | Denial::Missing => Reason::NotFound,
        Denial::StaleIncarnation { .. } | Denial::StaleGeneration { .. } | Denial::Superseded => Reason::Stale,
        Denial::OwnersFull { .. }
        | Denial::SegmentsFull { .. }
        | Denial::ObjectsFull { .. }
        | Denial::ReplicasFull { .. } => Reason::Full,
        Denial::Rebuilding { .. } => Reason::Busy,
        _ => Reason::Malformed,
    };
    let refusal = Refusal::new(reason, denial.to_string());
    match denial {
        Denial::Rebuilding { retry_after } => refusal.retry_after(retry_after),
        _ => refusal,
    }
}

fn unreadable(error: wire::Unreadable) -> Refusal {
    Refusal::new(Reason::Malformed, error.to_string())
}

fn check_count(count: usize) -> Result<(), Refusal> {
    if count <= wire::ITEMS_MAX {
        return Ok(());
    }
    let detail = format!("{count} items in one message, the limit is {}; send several", wire::ITEMS_MAX);
    Err(Refusal::new(Reason::TooLarge, detail))
}

fn key(bytes: &[u8]) -> Result<Key<'_>, Refusal> {
    Key::new(bytes).map_err(|error| denied(Denial::Key(error)))
}

fn after(bytes: &[u8]) -> Option<&[u8]> {
    (!bytes.is_empty()).then_some(bytes)
}

fn owner(owner: Option<&wire::Owner>) -> Result<Owner, Refusal> {
    owner.ok_or(wire::Unreadable("owner")).and_then(Owner::try_from).map_err(unreadable)
}

fn location(location: Option<&wire::Location>) -> Result<Location, Refusal> {
    location.ok_or(wire::Unreadable("location")).and_then(Location::try_from).map_err(unreadable)
}

fn locations(list: &[wire::Location]) -> Result<Vec<Location>, Refusal> {
    check_count(list.len())?;
    list.iter().map(|item| location(Some(item))).collect()
}

fn victims(list: &[wire::Victim]) -> Result<Vec<Victim<'_>>, Refusal> {
    check_count(list.len())?;
    list.iter()
        .map(|victim| Ok(Victim { key: key(&victim.key)?, location: location(victim.location.as_ref())? }))
        .collect()
}
