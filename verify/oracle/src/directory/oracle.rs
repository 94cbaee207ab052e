//! The oracle: one flat list of replicas, one of objects, one of owners.

use std::sync::Arc;

use millpond_core::directory::{
    Answer, Change, Committed, Config, EntryVerdict, Event, EventPage, EvictVerdict, Explanation, Found, Health,
    Holdings, Join, Leases, Listed, Located, Location, Miss, Mode, NodeId, Owner, OwnerView, Page, Part, Pin, Place,
    Reason, Refusal, Removal, Removed, SegmentFacts, SegmentView, Stamp, Start, Stat, Urgency,
};
use millpond_core::time::{Duration, Instant};

use super::{Call, Outcome, OwnedEntry, Subject};

/// A directory without any index. Made from the same [`Config`] as the product.
///
/// ```
/// use millpond_core::directory::Config;
/// use millpond_core::time::Instant;
/// use millpond_oracle::directory::{Call, Outcome, Subject};
/// let mut oracle = millpond_oracle::directory::Oracle::new(Config::fresh(1));
/// assert_eq!(oracle.apply(Instant::ZERO, &Call::Tick), Outcome::Gone(vec![]));
/// ```
#[derive(Debug)]
pub struct Oracle {
    config: Config,
    started_rebuilding: bool,
    waiting_for: Vec<NodeId>,
    window: Duration,
    n: u64,
    owners: Vec<OwnerFacts>,
    objects: Vec<ObjectFacts>,
    /// In the order in which they were added.
    replicas: Vec<(Vec<u8>, Location)>,
    retired: Vec<(Location, Instant)>,
    events: Vec<Event>,
    lost: Vec<(Vec<u8>, Removal, Instant)>,
}

#[derive(Debug)]
struct OwnerFacts {
    owner: Owner,
    address: Box<str>,
    heard_at: Instant,
    link_lost: bool,
    segments: Vec<(SegmentFacts, u64, bool)>,
}

#[derive(Clone, Debug)]
struct ObjectFacts {
    key: Vec<u8>,
    version: Stamp,
    len: u64,
    stored_at: Instant,
    lease_until: Instant,
    pin: Pin,
    pinned_at: Instant,
    mutable: bool,
}

impl ObjectFacts {
    fn pin_left(&self, now: Instant) -> Pin {
        match self.pin {
            Pin::Soft { ttl } if now < self.pinned_at + ttl => Pin::Soft { ttl: (self.pinned_at + ttl).since(now) },
            Pin::Soft { .. } => Pin::Free,
            other => other,
        }
    }
}

impl Oracle {
    /// An empty oracle that began at the clock's zero.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (started_rebuilding, waiting_for, window) = match &config.start {
            Start::Recovering { expected, window } => (true, expected.clone(), *window),
            _ => (false, vec![], Duration::ZERO),
        };
        Self {
            config,
            started_rebuilding,
            waiting_for,
            window,
            n: 0,
            owners: vec![],
            objects: vec![],
            replicas: vec![],
            retired: vec![],
            events: vec![],
            lost: vec![],
        }
    }

    fn answer<T>(&self, value: T) -> Answer<T> {
        Answer { shard: self.config.shard, term: self.config.term, value }
    }

    fn position(&self) -> Stamp {
        Stamp { term: self.config.term, n: self.n }
    }

    fn say(&mut self, change: Change) {
        self.n += 1;
        self.events.push(Event { at: self.position(), change });
    }

    fn rebuilding(&self, now: Instant) -> Option<Duration> {
        let end = Instant::ZERO + self.window;
        (self.started_rebuilding && now < end).then(|| end.since(now))
    }

    fn miss(&self, now: Instant) -> Miss {
        self.rebuilding(now).map_or(Miss::Absent, |retry_after| Miss::Rebuilding { retry_after })
    }

    fn object(&self, key: &[u8]) -> Option<&ObjectFacts> {
        self.objects.iter().find(|object| object.key == key)
    }

    fn places(&self, key: &[u8]) -> Vec<Location> {
        self.replicas.iter().filter(|(owner_key, _)| owner_key == key).map(|(_, location)| *location).collect()
    }

    fn copies(&self, key: &[u8]) -> u32 {
        u32::try_from(self.places(key).len()).unwrap()
    }

    fn find_owner(&mut self, owner: Owner) -> Result<&mut OwnerFacts, Refusal> {
        let facts = self.owners.iter_mut().find(|facts| facts.owner.node == owner.node).ok_or(Refusal::UnknownOwner)?;
        let current = facts.owner.incarnation;
        if current > owner.incarnation {
            return Err(Refusal::StaleIncarnation { current });
        }
        if current < owner.incarnation { Err(Refusal::UnknownOwner) } else { Ok(facts) }
    }

    fn check_segment(&mut self, owner: Owner, at: &Location) -> Result<(), Refusal> {
        let facts = self.find_owner(owner)?;
        let mut segments = facts.segments.iter();
        let known = segments.any(|(segment, ..)| segment.index == at.segment && segment.epoch == at.epoch);
        if known && at.node == owner.node { Ok(()) } else { Err(Refusal::UnknownSegment) }
    }

    fn suspect(&self, now: Instant, node: NodeId) -> bool {
        let facts = self.owners.iter().find(|facts| facts.owner.node == node);
        facts.is_none_or(|facts| facts.link_lost || now.since(facts.heard_at) >= self.config.limits.suspect_after)
    }

    fn drop_replica(&mut self, now: Instant, location: Location, reason: Reason) {
        let Some(index) = self.replicas.iter().position(|(_, place)| *place == location) else { return };
        let (key, _) = self.replicas.remove(index);
        let replicas_left = self.copies(&key);
        if replicas_left == 0 {
            let index = self.objects.iter().position(|object| object.key == key).unwrap();
            let object = self.objects.remove(index);
            let (version, len) = (object.version, object.len);
            let removal = Removal { reason, node: location.node, version, len, ago: Duration::ZERO };
            self.lost.push((key.clone(), removal, now));
        }
        let left_there = self.places(&key).iter().filter(|place| place.node == location.node).count();
        let left_there = u32::try_from(left_there).unwrap();
        self.say(Change::Removed { key: key.into(), location, reason, replicas_left, left_there });
    }

    fn drop_segments(&mut self, now: Instant, node: NodeId, reason: Reason, keep: impl Fn(&SegmentFacts) -> bool) {
        let Some(facts) = self.owners.iter_mut().find(|facts| facts.owner.node == node) else { return };
        facts.segments.sort_by_key(|(segment, ..)| segment.index);
        let (kept, dropped): (Vec<_>, Vec<_>) = facts.segments.drain(..).partition(|(segment, ..)| keep(segment));
        facts.segments = kept;
        for (segment, ..) in dropped {
            let inside = |at: &Location| at.node == node && at.segment == segment.index && at.epoch == segment.epoch;
            let mut places: Vec<Location> = self.replicas.iter().map(|(_, at)| *at).filter(|at| inside(at)).collect();
            places.sort_by_key(|at| at.slot);
            for at in places {
                self.drop_replica(now, at, reason);
            }
            self.retired.retain(|(at, _)| !inside(at));
        }
    }

    fn drop_owner(&mut self, now: Instant, node: NodeId, reason: Reason) {
        let owner = self.owners.iter().find(|facts| facts.owner.node == node).map(|facts| facts.owner);
        self.say(Change::Left { owner: owner.expect("an owner in the table"), reason });
        self.drop_segments(now, node, reason, |_| false);
        self.owners.retain(|facts| facts.owner.node != node);
    }

    fn retire(&mut self, location: Location, not_before: Instant) {
        let owner = self.owners.iter().find(|facts| facts.owner.node == location.node);
        let known = owner.is_some_and(|facts| {
            facts.segments.iter().any(|(s, ..)| s.index == location.segment && s.epoch == location.epoch)
        });
        if known {
            self.retired.retain(|(other, _)| *other != location);
            self.retired.push((location, not_before));
        }
    }

    fn add_replica(&mut self, key: &[u8], location: Location) {
        self.replicas.push((key.to_vec(), location));
        let object = self.object(key).unwrap().clone();
        let owner = self.owners.iter().find(|facts| facts.owner.node == location.node).unwrap();
        let tier = owner.segments.iter().find(|(segment, ..)| segment.index == location.segment).unwrap().0.tier;
        self.say(Change::Stored { key: key.into(), version: object.version, len: object.len, location, tier });
    }

    fn supersede(&mut self, now: Instant, key: &[u8]) {
        let Some(lease_until) = self.object(key).map(|object| object.lease_until) else { return };
        for location in self.places(key) {
            self.drop_replica(now, location, Reason::Superseded);
            self.retire(location, lease_until);
        }
    }

    fn in_slot(&self, at: &Location) -> Option<(Vec<u8>, Location)> {
        let same = |other: &Location| Location { generation: at.generation, ..*other } == *at;
        self.replicas.iter().find(|(_, other)| same(other)).cloned()
    }

    fn is_retired(&self, at: &Location) -> bool {
        self.retired.iter().any(|(other, _)| other == at)
    }

    fn join(&mut self, now: Instant, join: &Join) -> Result<(), Refusal> {
        let limits = self.config.limits;
        if join.segments.len() > limits.segments_max {
            return Err(Refusal::SegmentsFull { segments_max: limits.segments_max });
        }
        let node = join.owner.node;
        let current = self.owners.iter().find(|facts| facts.owner.node == node).map(|facts| facts.owner.incarnation);
        match current {
            Some(current) if current > join.owner.incarnation => return Err(Refusal::StaleIncarnation { current }),
            Some(current) if current < join.owner.incarnation => self.drop_owner(now, node, Reason::OwnerRestarted),
            None if self.owners.len() >= limits.owners_max => {
                return Err(Refusal::OwnersFull { owners_max: limits.owners_max });
            }
            _ => {}
        }
        let announced =
            |old: &SegmentFacts| join.segments.iter().any(|new| new.index == old.index && new.epoch == old.epoch);
        self.drop_segments(now, node, Reason::OwnerRestarted, announced);
        let old = self.owners.iter().position(|facts| facts.owner.node == node).map(|index| self.owners.remove(index));
        let mut segments = old.map_or_else(Vec::new, |facts| facts.segments);
        for new in &join.segments {
            if !segments.iter().any(|(segment, ..)| segment.index == new.index) {
                segments.push((*new, new.capacity, false));
            }
        }
        let address = join.address.clone();
        self.owners.push(OwnerFacts { owner: join.owner, address, heard_at: now, link_lost: false, segments });
        Ok(())
    }

    fn commit(&mut self, now: Instant, owner: Owner, commit: &Wish<'_>) -> Result<Committed, Refusal> {
        let limits = self.config.limits;
        let (key, at) = (commit.key, commit.location);
        if commit.len == 0 {
            return Err(Refusal::EmptyValue);
        }
        if commit.len > limits.value_len_max {
            return Err(Refusal::ValueTooLong { len: commit.len, len_max: limits.value_len_max });
        }
        self.check_segment(owner, &at)?;
        let older = |other: &Location| Location { generation: at.generation, ..*other } == at && *other < at;
        self.retired.retain(|(other, _)| !older(other));
        if self.is_retired(&at) {
            return Err(Refusal::StaleGeneration { current: at.generation });
        }
        if let Some((holder, place)) = self.in_slot(&at) {
            if place.generation > at.generation {
                return Err(Refusal::StaleGeneration { current: place.generation });
            }
            if place == at && holder == key {
                return Ok(self.stored(key));
            }
            self.drop_replica(now, place, Reason::Dropped);
        }
        let visible = self.object(key).cloned();
        match (commit.mode, &visible) {
            (Mode::IfAbsent, Some(object)) => {
                return Ok(Committed::AlreadyThere { version: object.version, len: object.len });
            }
            (Mode::IfAbsent, None) => {
                if let Some(retry_after) = self.rebuilding(now) {
                    return Err(Refusal::Rebuilding { retry_after });
                }
            }
            (Mode::Replica { .. }, None) => return Err(Refusal::Missing),
            (Mode::Replica { version }, Some(object)) => {
                if object.version != version || object.len != commit.len {
                    return Err(Refusal::Superseded);
                }
                if self.places(key).iter().any(|place| place.node == at.node && place.segment == at.segment) {
                    return Ok(Committed::AlreadyThere { version, len: commit.len });
                }
                if self.places(key).len() >= limits.replicas_max {
                    return Err(Refusal::ReplicasFull { replicas_max: limits.replicas_max });
                }
                self.add_replica(key, at);
                return Ok(self.stored(key));
            }
            _ => {}
        }
        if visible.is_none() && self.objects.len() >= limits.objects_max {
            return Err(Refusal::ObjectsFull { objects_max: limits.objects_max });
        }
        self.supersede(now, key);
        let version = Stamp { term: self.config.term, n: self.n + 1 };
        self.insert(now, key, commit.len, version, commit.pin, commit.mode == Mode::Upsert);
        self.add_replica(key, at);
        Ok(self.stored(key))
    }

    fn stored(&self, key: &[u8]) -> Committed {
        let object = self.object(key).unwrap();
        Committed::Stored { version: object.version, copies: self.copies(key), mutable: object.mutable }
    }

    fn insert(&mut self, now: Instant, key: &[u8], len: u64, version: Stamp, pin: Pin, mutable: bool) {
        self.objects.push(ObjectFacts {
            key: key.to_vec(),
            version,
            len,
            stored_at: now,
            lease_until: Instant::ZERO,
            pin,
            pinned_at: now,
            mutable,
        });
    }

    fn adopt(&mut self, now: Instant, entry: &OwnedEntry, at: Location) -> EntryVerdict {
        let limits = self.config.limits;
        let retire = |reason| EntryVerdict::Retire { reason };
        if entry.len == 0 || entry.len > limits.value_len_max {
            return retire(Reason::Dropped);
        }
        if entry.version <= self.config.cleared {
            return retire(Reason::Cleared);
        }
        if self.is_retired(&at) {
            return retire(Reason::Removed);
        }
        if let Some((holder, place)) = self.in_slot(&at) {
            if place == at && holder == entry.key {
                return EntryVerdict::Kept;
            }
            if place.generation >= at.generation {
                return retire(Reason::Dropped);
            }
            self.drop_replica(now, place, Reason::Dropped);
        }
        let late_mutable = entry.mutable && self.rebuilding(now).is_none();
        if let Some(object) = self.object(&entry.key).cloned() {
            if object.version == entry.version {
                let places = self.places(&entry.key);
                let crowded = places.len() >= limits.replicas_max
                    || places.iter().any(|place| place.node == at.node && place.segment == at.segment);
                if object.len != entry.len || crowded {
                    return retire(Reason::Dropped);
                }
                self.add_replica(&entry.key, at);
                return EntryVerdict::Kept;
            }
            if object.version > entry.version || late_mutable {
                return retire(Reason::Superseded);
            }
        } else if late_mutable {
            return retire(Reason::Superseded);
        } else if self.objects.len() >= limits.objects_max {
            return retire(Reason::Dropped);
        }
        self.supersede(now, &entry.key);
        self.insert(now, &entry.key, entry.len, entry.version, entry.pin, entry.mutable);
        self.add_replica(&entry.key, at);
        EntryVerdict::Kept
    }

    fn inventory(&mut self, now: Instant, owner: Owner, report: Report<'_>) -> Result<Vec<EntryVerdict>, Refusal> {
        let (node, segment, epoch) = (owner.node, report.segment, report.epoch);
        self.check_segment(owner, &Location { node, segment, epoch, slot: 0, generation: 0 })?;
        let mut verdicts = vec![];
        for entry in report.entries {
            let at = Location { node, segment, epoch, slot: entry.slot, generation: entry.generation };
            verdicts.push(self.adopt(now, entry, at));
        }
        if report.part == Part::Last {
            let facts = self.find_owner(owner)?;
            facts.segments.iter_mut().filter(|(s, ..)| s.index == segment).for_each(|(.., done)| *done = true);
            let complete = facts.segments.iter().all(|(.., done)| *done);
            if complete && self.waiting_for.contains(&node) {
                self.waiting_for.retain(|other| *other != node);
                self.started_rebuilding &= !self.waiting_for.is_empty();
            }
        }
        Ok(verdicts)
    }

    fn evict(&mut self, now: Instant, owner: Owner, key: &[u8], at: Location, urgency: Urgency) -> EvictVerdict {
        let foreign = Instant::ZERO + self.config.limits.lease_max;
        if !matches!(self.config.start, Start::Fresh) && now < foreign {
            return EvictVerdict::NotYet { retry_after: foreign.since(now) };
        }
        if at.node == owner.node
            && let Some(index) = self.retired.iter().position(|(other, _)| *other == at)
        {
            let not_before = self.retired[index].1;
            if now < not_before {
                return EvictVerdict::Leased { retry_after: not_before.since(now) };
            }
            self.retired.remove(index);
            return EvictVerdict::Evict;
        }
        let Some(object) = self.object(key).cloned() else { return EvictVerdict::Evict };
        if at.node != owner.node || !self.places(key).contains(&at) {
            return EvictVerdict::Evict;
        }
        if now < object.lease_until {
            return EvictVerdict::Leased { retry_after: object.lease_until.since(now) };
        }
        match object.pin_left(now) {
            Pin::Hard => return EvictVerdict::Pinned,
            Pin::Soft { .. } if urgency == Urgency::Normal => return EvictVerdict::Pinned,
            _ => {}
        }
        self.drop_replica(now, at, Reason::Evicted);
        EvictVerdict::Evict
    }

    fn keys(&self, prefix: &[u8], after: Option<&Vec<u8>>) -> Vec<Vec<u8>> {
        let mut keys: Vec<Vec<u8>> = self.objects.iter().map(|object| object.key.clone()).collect();
        keys.sort();
        keys.retain(|key| key.starts_with(prefix) && after.is_none_or(|after| key > after));
        keys
    }

    fn remove(&mut self, now: Instant, keys: &[Vec<u8>], leases: Leases) -> Removed {
        let mut removed = Removed::default();
        let mut unreachable: Vec<NodeId> = vec![];
        for key in keys {
            let Some(object) = self.object(key) else { continue };
            if leases == Leases::Respect && now < object.lease_until {
                removed.leased += 1;
                continue;
            }
            for location in self.places(key) {
                if self.suspect(now, location.node) && !unreachable.contains(&location.node) {
                    unreachable.push(location.node);
                }
                self.drop_replica(now, location, Reason::Removed);
                self.retire(location, now);
            }
            removed.objects += 1;
        }
        removed.owners_unreachable = u32::try_from(unreachable.len()).unwrap();
        removed
    }

    fn clear(&mut self, now: Instant) -> u64 {
        let keys = self.keys(b"", None);
        for key in &keys {
            for location in self.places(key) {
                self.drop_replica(now, location, Reason::Cleared);
                self.retire(location, now);
            }
        }
        self.say(Change::Cleared);
        self.config.cleared = self.position();
        keys.len() as u64
    }

    fn events(&self, after: Stamp, max: usize) -> EventPage {
        let kept = self.events.len().min(self.config.limits.events_max);
        let first_kept = self.events.len() - kept;
        if after.term != self.config.term || after.n < first_kept as u64 || after.n > self.n {
            return EventPage { events: vec![], next: self.position(), gap: true };
        }
        let later = self.events.iter().filter(|event| event.at > after);
        let events: Vec<Event> = later.take(max.min(self.config.limits.page_max)).cloned().collect();
        let next = events.last().map_or(after, |event| event.at);
        EventPage { events, next, gap: false }
    }

    fn explain(&self, now: Instant, key: &[u8]) -> Explanation {
        if self.object(key).is_some() {
            let suspect = self.places(key).iter().filter(|place| self.suspect(now, place.node)).count();
            return Explanation::Present { replicas: self.copies(key), suspect: u32::try_from(suspect).unwrap() };
        }
        let remembered = self.lost.len().min(self.config.limits.history_max);
        let recent = &self.lost[self.lost.len() - remembered..];
        if let Some((_, removal, at)) = recent.iter().rev().find(|(lost, ..)| lost == key) {
            return Explanation::Lost(Removal { ago: now.since(*at), ..*removal });
        }
        match self.rebuilding(now) {
            Some(retry_after) => Explanation::Rebuilding { retry_after },
            None => Explanation::NeverStored { removals_remembered: remembered as u64 },
        }
    }

    fn locate(&mut self, now: Instant, key: &[u8], lease: Duration) -> Located {
        let lease = lease.min(self.config.limits.lease_max);
        let Some(object) = self.objects.iter_mut().find(|object| object.key == key) else {
            return Located::Miss(self.miss(now));
        };
        if lease > Duration::ZERO && object.lease_until < now + lease {
            object.lease_until = now + lease;
        }
        let (version, len) = (object.version, object.len);
        let (last, first): (Vec<Location>, Vec<Location>) =
            self.places(key).into_iter().partition(|place| self.suspect(now, place.node));
        Located::Hit(Found { version, len, replicas: [first, last].concat(), lease })
    }

    fn stat(&self, now: Instant, key: &[u8]) -> Result<Stat, Miss> {
        let object = self.object(key).ok_or(self.miss(now))?;
        let tier = |place: &Location| {
            let owner = self.owners.iter().find(|facts| facts.owner.node == place.node).unwrap();
            owner.segments.iter().find(|(segment, ..)| segment.index == place.segment).unwrap().0.tier
        };
        Ok(Stat {
            version: object.version,
            len: object.len,
            replicas: self.places(key).iter().map(|place| (*place, tier(place))).collect(),
            age: now.since(object.stored_at),
            lease_left: object.lease_until.since(now),
            pin: object.pin_left(now),
            mutable: object.mutable,
        })
    }

    fn view(&self, now: Instant) -> Vec<OwnerView> {
        let mut rows: Vec<OwnerView> = self.owners.iter().map(|facts| self.view_of(now, facts)).collect();
        rows.sort_by_key(|row| row.owner.node);
        rows
    }

    fn view_of(&self, now: Instant, facts: &OwnerFacts) -> OwnerView {
        let replicas = |segment: &SegmentFacts| {
            let inside = |at: &Location| at.node == facts.owner.node && at.segment == segment.index;
            self.replicas.iter().filter(|(_, at)| inside(at)).count() as u64
        };
        let mut segments: Vec<SegmentView> = facts
            .segments
            .iter()
            .map(|(segment, free, _)| SegmentView { facts: *segment, free: *free, replicas: replicas(segment) })
            .collect();
        segments.sort_by_key(|segment| segment.facts.index);
        let health = if self.suspect(now, facts.owner.node) { Health::Suspect } else { Health::Active };
        OwnerView { owner: facts.owner, address: Arc::from(&*facts.address), health, segments }
    }

    fn retired_of(&self, now: Instant, owner: Owner) -> Vec<Location> {
        let current = self.owners.iter().any(|facts| facts.owner == owner);
        let due = |(at, not_before): &&(Location, Instant)| current && at.node == owner.node && *not_before <= now;
        let mut due: Vec<Location> = self.retired.iter().filter(due).map(|(at, _)| *at).collect();
        due.sort();
        due.truncate(self.config.limits.page_max);
        due
    }

    fn free(&mut self, owner: Owner, locations: &[Location]) {
        if self.owners.iter().any(|facts| facts.owner == owner) {
            self.retired.retain(|(at, _)| at.node != owner.node || !locations.contains(at));
        }
    }

    fn tick(&mut self, now: Instant) -> Vec<Owner> {
        let silent = |facts: &&OwnerFacts| now.since(facts.heard_at) >= self.config.limits.gone_after;
        let mut gone: Vec<Owner> = self.owners.iter().filter(silent).map(|facts| facts.owner).collect();
        gone.sort();
        for owner in &gone {
            self.drop_owner(now, owner.node, Reason::OwnerLost);
        }
        gone
    }

    fn dropped(&mut self, now: Instant, owner: Owner, list: &[(Vec<u8>, Location)]) -> Result<usize, Refusal> {
        self.find_owner(owner)?;
        let mut count = 0;
        for (key, at) in list {
            if at.node == owner.node && self.places(key).contains(at) {
                self.drop_replica(now, *at, Reason::Dropped);
                count += 1;
            }
        }
        Ok(count)
    }
}

struct Wish<'a> {
    key: &'a [u8],
    len: u64,
    location: Location,
    mode: Mode,
    pin: Pin,
}

struct Report<'a> {
    segment: u32,
    epoch: u64,
    entries: &'a [OwnedEntry],
    part: Part,
}

impl Subject for Oracle {
    fn apply(&mut self, now: Instant, call: &Call) -> Outcome {
        match call {
            Call::Join(join) => Outcome::Done({
                let done = self.join(now, join);
                self.answer(done)
            }),
            Call::Heartbeat(owner, loads) => {
                let done = self.find_owner(*owner).map(|facts| {
                    (facts.heard_at, facts.link_lost) = (now, false);
                    for (segment, free, _) in &mut facts.segments {
                        if let Some(load) = loads.iter().rev().find(|load| load.index == segment.index) {
                            *free = load.free.min(segment.capacity);
                        }
                    }
                });
                Outcome::Done(self.answer(done))
            }
            Call::Inventory { owner, segment, epoch, entries, part } => {
                let report = Report { segment: *segment, epoch: *epoch, entries, part: *part };
                let done = self.inventory(now, *owner, report);
                Outcome::Adopted(self.answer(done))
            }
            Call::LinkLost(owner) => {
                if let Ok(facts) = self.find_owner(*owner) {
                    facts.link_lost = true;
                }
                Outcome::Nothing
            }
            Call::Death(owner) => {
                let known = self.find_owner(*owner).is_ok();
                if known {
                    self.drop_owner(now, owner.node, Reason::OwnerLost);
                }
                Outcome::Known(known)
            }
            Call::Tick => Outcome::Gone(self.tick(now)),
            Call::Commit { owner, key, len, location, mode, pin } => {
                let wish = Wish { key, len: *len, location: *location, mode: *mode, pin: *pin };
                let done = self.commit(now, *owner, &wish);
                Outcome::Committed(self.answer(done))
            }
            Call::Locate(key, lease) => {
                let located = self.locate(now, key, *lease);
                Outcome::Located(self.answer(located))
            }
            _ => self.apply_rest(now, call),
        }
    }
}

impl Oracle {
    fn holdings(&self, node: NodeId, prefix: &[u8], after: Option<Place>, max: usize) -> Holdings {
        let max = max.clamp(1, self.config.limits.page_max);
        let place = |at: &Location| Place { segment: at.segment, slot: at.slot };
        let mut held: Vec<&(Vec<u8>, Location)> = self.replicas.iter().filter(|(_, at)| at.node == node).collect();
        held.retain(|(_, at)| after.is_none_or(|after| place(at) > after));
        held.sort_by_key(|(_, at)| place(at));
        held.truncate(max);
        let next = if held.len() == max { held.last().map(|(_, at)| place(at)) } else { None };
        Holdings {
            owner: self.owners.iter().find(|facts| facts.owner.node == node).map(|facts| facts.owner),
            keys: held.iter().filter(|(key, _)| key.starts_with(prefix)).map(|(key, _)| Arc::from(&**key)).collect(),
            next,
            position: self.position(),
        }
    }

    fn apply_rest(&mut self, now: Instant, call: &Call) -> Outcome {
        let page_max = self.config.limits.page_max;
        match call {
            Call::Exists(key) => Outcome::Exists(self.answer(self.object(key).map(|_| ()).ok_or(self.miss(now)))),
            Call::Stat(key) => Outcome::Stat(self.answer(self.stat(now, key))),
            Call::List { prefix, after, max } => {
                let (mut keys, max) = (self.keys(prefix, after.as_ref()), (*max).clamp(1, page_max));
                keys.truncate(max);
                let next = if keys.len() == max { keys.last().map(|key| Arc::from(&**key)) } else { None };
                let row = |key: &Vec<u8>| {
                    let object = self.object(key).unwrap();
                    let (version, len) = (object.version, object.len);
                    Listed { key: Arc::from(&**key), version, len, replicas: self.copies(key) }
                };
                let rows = keys.iter().map(row).collect();
                Outcome::Page(self.answer(Page { rows, next, position: self.position() }))
            }
            Call::Holdings { node, prefix, after, max } => {
                let holdings = self.holdings(*node, prefix, *after, *max);
                Outcome::Holdings(self.answer(holdings))
            }
            Call::Remove(key, leases) => {
                let removed = self.remove(now, std::slice::from_ref(key), *leases);
                Outcome::Removed(self.answer(removed))
            }
            Call::RemovePrefix { prefix, after, leases } => {
                let mut keys = self.keys(prefix, after.as_ref());
                keys.truncate(page_max);
                let mut removed = self.remove(now, &keys, *leases);
                removed.next = if keys.len() == page_max { keys.last().map(|key| Arc::from(&**key)) } else { None };
                Outcome::Removed(self.answer(removed))
            }
            Call::Clear => {
                let count = self.clear(now);
                Outcome::Cleared(self.answer(count))
            }
            Call::Evict { owner, victims, urgency } => {
                let known = self.find_owner(*owner).map(|_| ());
                let done = known
                    .map(|()| victims.iter().map(|(key, at)| self.evict(now, *owner, key, *at, *urgency)).collect());
                Outcome::Evicted(self.answer(done))
            }
            Call::Dropped { owner, victims } => {
                let done = self.dropped(now, *owner, victims);
                Outcome::Dropped(self.answer(done))
            }
            Call::Retired(owner) => Outcome::Retired(self.retired_of(now, *owner)),
            Call::Freed(owner, locations) => {
                self.free(*owner, locations);
                Outcome::Nothing
            }
            Call::Events(after, max) => Outcome::Events(self.answer(self.events(*after, *max))),
            Call::Explain(key) => Outcome::Explained(self.answer(self.explain(now, key))),
            Call::View => Outcome::View(self.answer(self.view(now))),
            other => unreachable!("{other:?} is applied by the caller"),
        }
    }
}
