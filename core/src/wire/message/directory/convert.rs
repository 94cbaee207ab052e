//! Between [`crate::directory`]'s values and their messages. Parsing is total: a message becomes a value or [`Unreadable`].

use alloc::boxed::Box;
use alloc::string::String;

use super::{
    Entry, Event, ExplainReply, Header, HoldingsReply, Listed, Located, Location, Owner, OwnerView, Pin, Place,
    Segment, Stamp,
};
use crate::directory as core;
use crate::time::Duration;

/// A message that makes no sense; names the field.
///
/// ```
/// use millpond_core::wire::message::directory::Unreadable;
/// assert_eq!(Unreadable("location").to_string(), "the message's field `location` is missing or malformed");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable(pub &'static str);

impl ::core::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
        write!(f, "the message's field `{}` is missing or malformed", self.0)
    }
}

impl ::core::error::Error for Unreadable {}

impl<T> From<&core::Answer<T>> for Header {
    fn from(answer: &core::Answer<T>) -> Self {
        Self { shard: answer.shard, term: answer.term }
    }
}

impl From<core::Stamp> for Stamp {
    fn from(stamp: core::Stamp) -> Self {
        Self { term: stamp.term, n: stamp.n }
    }
}

impl From<Stamp> for core::Stamp {
    fn from(stamp: Stamp) -> Self {
        Self { term: stamp.term, n: stamp.n }
    }
}

fn node(bytes: &[u8]) -> Result<core::NodeId, Unreadable> {
    bytes.try_into().map(core::NodeId).map_err(|_| Unreadable("node"))
}

fn stamp(stamp: Option<Stamp>) -> Result<core::Stamp, Unreadable> {
    stamp.map(core::Stamp::from).ok_or(Unreadable("version"))
}

impl From<core::Owner> for Owner {
    fn from(owner: core::Owner) -> Self {
        Self { node: owner.node.0.to_vec(), incarnation: owner.incarnation }
    }
}

impl TryFrom<&Owner> for core::Owner {
    type Error = Unreadable;

    fn try_from(owner: &Owner) -> Result<Self, Unreadable> {
        Ok(Self { node: node(&owner.node)?, incarnation: owner.incarnation })
    }
}

impl From<core::Location> for Location {
    fn from(location: core::Location) -> Self {
        let core::Location { node, segment, epoch, slot, generation } = location;
        Self { node: node.0.to_vec(), segment, epoch, slot, generation }
    }
}

impl TryFrom<&Location> for core::Location {
    type Error = Unreadable;

    fn try_from(location: &Location) -> Result<Self, Unreadable> {
        let Location { segment, epoch, slot, generation, .. } = *location;
        Ok(Self { node: node(&location.node)?, segment, epoch, slot, generation })
    }
}

impl From<core::Pin> for Pin {
    fn from(pin: core::Pin) -> Self {
        match pin {
            core::Pin::Free => Self { kind: 0, ttl_ns: 0 },
            core::Pin::Soft { ttl } => Self { kind: 1, ttl_ns: ttl.as_nanos() },
            core::Pin::Hard => Self { kind: 2, ttl_ns: 0 },
        }
    }
}

impl TryFrom<Option<Pin>> for core::Pin {
    type Error = Unreadable;

    /// No pin at all is a free object.
    fn try_from(pin: Option<Pin>) -> Result<Self, Unreadable> {
        match pin.unwrap_or_default() {
            Pin { kind: 0, .. } => Ok(Self::Free),
            Pin { kind: 1, ttl_ns } => Ok(Self::Soft { ttl: Duration::from_nanos(ttl_ns) }),
            Pin { kind: 2, .. } => Ok(Self::Hard),
            _ => Err(Unreadable("pin")),
        }
    }
}

impl core::Mode {
    /// The number and the version that stand for this mode on the wire.
    #[must_use]
    pub fn to_wire(self) -> (u32, Option<Stamp>) {
        match self {
            Self::IfAbsent => (0, None),
            Self::Upsert => (1, None),
            Self::Replica { version } => (2, Some(version.into())),
        }
    }

    /// The mode that a number and a version stand for.
    pub fn from_wire(mode: u32, version: Option<Stamp>) -> Result<Self, Unreadable> {
        match mode {
            0 => Ok(Self::IfAbsent),
            1 => Ok(Self::Upsert),
            2 => Ok(Self::Replica { version: stamp(version)? }),
            _ => Err(Unreadable("mode")),
        }
    }
}

impl core::Tier {
    /// The number that stands for this tier on the wire.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Dram => 0,
            Self::Ssd => 1,
        }
    }

    /// The tier that a number stands for.
    pub const fn from_code(code: u32) -> Result<Self, Unreadable> {
        match code {
            0 => Ok(Self::Dram),
            1 => Ok(Self::Ssd),
            _ => Err(Unreadable("tier")),
        }
    }
}

impl core::Reason {
    /// The number that stands for this reason on the wire; never 0.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Removed => 1,
            Self::Evicted => 2,
            Self::Superseded => 3,
            Self::OwnerLost => 4,
            Self::OwnerRestarted => 5,
            Self::Cleared => 6,
            Self::Dropped => 7,
        }
    }

    /// The reason that a number stands for; one from a later version is `Dropped`.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Removed,
            2 => Self::Evicted,
            3 => Self::Superseded,
            4 => Self::OwnerLost,
            5 => Self::OwnerRestarted,
            6 => Self::Cleared,
            _ => Self::Dropped,
        }
    }
}

impl From<core::Located> for Located {
    fn from(located: core::Located) -> Self {
        match located {
            core::Located::Hit(found) => Self {
                hit: true,
                version: Some(found.version.into()),
                len: found.len,
                replicas: found.replicas.into_iter().map(Location::from).collect(),
                lease_ns: found.lease.as_nanos(),
                rebuilding_ns: 0,
            },
            core::Located::Miss(miss) => miss.into(),
        }
    }
}

impl From<core::Miss> for Located {
    fn from(miss: core::Miss) -> Self {
        let rebuilding_ns = match miss {
            core::Miss::Absent => 0,
            core::Miss::Rebuilding { retry_after } => retry_after.as_nanos().max(1),
        };
        Self { rebuilding_ns, ..Self::default() }
    }
}

impl TryFrom<&Located> for core::Located {
    type Error = Unreadable;

    fn try_from(located: &Located) -> Result<Self, Unreadable> {
        if !located.hit {
            return Ok(Self::Miss(match located.rebuilding_ns {
                0 => core::Miss::Absent,
                nanos => core::Miss::Rebuilding { retry_after: Duration::from_nanos(nanos) },
            }));
        }
        Ok(Self::Hit(core::Found {
            version: stamp(located.version)?,
            len: located.len,
            replicas: located.replicas.iter().map(core::Location::try_from).collect::<Result<_, _>>()?,
            lease: Duration::from_nanos(located.lease_ns),
        }))
    }
}

impl From<core::Listed> for Listed {
    fn from(row: core::Listed) -> Self {
        Self { key: row.key.to_vec(), version: Some(row.version.into()), len: row.len, replicas: row.replicas }
    }
}

impl From<core::SegmentView> for Segment {
    fn from(view: core::SegmentView) -> Self {
        let core::SegmentFacts { index, epoch, tier, capacity } = view.facts;
        Self { index, epoch, tier: tier.code(), capacity, free: view.free, replicas: view.replicas }
    }
}

impl TryFrom<&Segment> for core::SegmentView {
    type Error = Unreadable;

    fn try_from(segment: &Segment) -> Result<Self, Unreadable> {
        let Segment { index, epoch, tier, capacity, free, replicas } = *segment;
        let facts = core::SegmentFacts { index, epoch, tier: core::Tier::from_code(tier)?, capacity };
        Ok(Self { facts, free, replicas })
    }
}

impl From<core::OwnerView> for OwnerView {
    fn from(view: core::OwnerView) -> Self {
        Self {
            owner: Some(view.owner.into()),
            address: String::from(&*view.address),
            suspect: view.health == core::Health::Suspect,
            segments: view.segments.into_iter().map(Segment::from).collect(),
        }
    }
}

impl TryFrom<&OwnerView> for core::OwnerView {
    type Error = Unreadable;

    fn try_from(view: &OwnerView) -> Result<Self, Unreadable> {
        Ok(Self {
            owner: view.owner.as_ref().ok_or(Unreadable("owner"))?.try_into()?,
            address: Box::<str>::from(&*view.address).into(),
            health: if view.suspect { core::Health::Suspect } else { core::Health::Active },
            segments: view.segments.iter().map(core::SegmentView::try_from).collect::<Result<_, _>>()?,
        })
    }
}

impl From<core::Event> for Event {
    fn from(event: core::Event) -> Self {
        let at = Some(event.at.into());
        match event.change {
            core::Change::Stored { key, version, len, location, tier } => Self {
                at,
                kind: 1,
                key: key.to_vec(),
                location: Some(location.into()),
                version: Some(version.into()),
                len,
                tier: tier.code(),
                ..Self::default()
            },
            core::Change::Removed { key, location, reason, replicas_left, left_there } => Self {
                at,
                kind: 2,
                key: key.to_vec(),
                location: Some(location.into()),
                reason: reason.code(),
                replicas_left,
                left_there,
                ..Self::default()
            },
            core::Change::Left { owner, reason } => {
                Self { at, kind: 4, owner: Some(owner.into()), reason: reason.code(), ..Self::default() }
            }
            core::Change::Cleared => Self { at, kind: 3, ..Self::default() },
        }
    }
}

impl Event {
    /// The event; `None` if it is of a kind that this version does not know.
    pub fn read(&self) -> Result<Option<core::Event>, Unreadable> {
        let at = stamp(self.at)?;
        let location = || self.location.as_ref().ok_or(Unreadable("location")).and_then(core::Location::try_from);
        let key = || -> alloc::sync::Arc<[u8]> { self.key.as_slice().into() };
        let change = match self.kind {
            1 => core::Change::Stored {
                key: key(),
                version: stamp(self.version)?,
                len: self.len,
                location: location()?,
                tier: core::Tier::from_code(self.tier)?,
            },
            2 => core::Change::Removed {
                key: key(),
                location: location()?,
                reason: core::Reason::from_code(self.reason),
                replicas_left: self.replicas_left,
                left_there: self.left_there,
            },
            3 => core::Change::Cleared,
            4 => core::Change::Left {
                owner: self.owner.as_ref().ok_or(Unreadable("owner")).and_then(core::Owner::try_from)?,
                reason: core::Reason::from_code(self.reason),
            },
            _ => return Ok(None),
        };
        Ok(Some(core::Event { at, change }))
    }
}

impl From<core::Place> for Place {
    fn from(place: core::Place) -> Self {
        Self { segment: place.segment, slot: place.slot }
    }
}

impl From<Place> for core::Place {
    fn from(place: Place) -> Self {
        Self { segment: place.segment, slot: place.slot }
    }
}

impl From<core::Answer<core::Holdings>> for HoldingsReply {
    fn from(answer: core::Answer<core::Holdings>) -> Self {
        let header = Some((&answer).into());
        let core::Holdings { owner, keys, next, position } = answer.value;
        Self {
            header,
            owner: owner.map(Owner::from),
            keys: keys.iter().map(|key| key.to_vec()).collect(),
            next: next.map(Place::from),
            position: Some(position.into()),
        }
    }
}

impl TryFrom<&HoldingsReply> for core::Holdings {
    type Error = Unreadable;

    fn try_from(reply: &HoldingsReply) -> Result<Self, Unreadable> {
        Ok(Self {
            owner: reply.owner.as_ref().map(core::Owner::try_from).transpose()?,
            keys: reply.keys.iter().map(|key| key.as_slice().into()).collect(),
            next: reply.next.map(core::Place::from),
            position: reply.position.map(core::Stamp::from).ok_or(Unreadable("position"))?,
        })
    }
}

impl From<core::Explanation> for ExplainReply {
    fn from(explanation: core::Explanation) -> Self {
        match explanation {
            core::Explanation::NeverStored { removals_remembered } => {
                Self { kind: 0, count: removals_remembered, ..Self::default() }
            }
            core::Explanation::Present { replicas, suspect } => {
                Self { kind: 1, count: replicas.into(), suspect, ..Self::default() }
            }
            core::Explanation::Lost(lost) => Self {
                kind: 2,
                reason: lost.reason.code(),
                node: lost.node.0.to_vec(),
                version: Some(lost.version.into()),
                len: lost.len,
                span_ns: lost.ago.as_nanos(),
                ..Self::default()
            },
            core::Explanation::Rebuilding { retry_after } => {
                Self { kind: 3, span_ns: retry_after.as_nanos(), ..Self::default() }
            }
        }
    }
}

impl TryFrom<&ExplainReply> for core::Explanation {
    type Error = Unreadable;

    fn try_from(reply: &ExplainReply) -> Result<Self, Unreadable> {
        let span = Duration::from_nanos(reply.span_ns);
        Ok(match reply.kind {
            0 => Self::NeverStored { removals_remembered: reply.count },
            1 => Self::Present { replicas: u32::try_from(reply.count).unwrap_or(u32::MAX), suspect: reply.suspect },
            2 => Self::Lost(core::Removal {
                reason: core::Reason::from_code(reply.reason),
                node: node(&reply.node)?,
                version: stamp(reply.version)?,
                len: reply.len,
                ago: span,
            }),
            3 => Self::Rebuilding { retry_after: span },
            _ => return Err(Unreadable("kind")),
        })
    }
}

impl From<&core::Entry<'_>> for Entry {
    fn from(entry: &core::Entry<'_>) -> Self {
        Self {
            key: entry.key.as_bytes().to_vec(),
            slot: entry.slot,
            generation: entry.generation,
            len: entry.len,
            version: Some(entry.version.into()),
            pin: Some(entry.pin.into()),
            mutable: entry.mutable,
        }
    }
}

impl Entry {
    /// The entry, borrowing its key.
    pub fn read(&self) -> Result<core::Entry<'_>, Unreadable> {
        Ok(core::Entry {
            key: core::Key::new(&self.key).map_err(|_| Unreadable("key"))?,
            slot: self.slot,
            generation: self.generation,
            len: self.len,
            version: stamp(self.version)?,
            pin: self.pin.try_into()?,
            mutable: self.mutable,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const AT: core::Location =
        core::Location { node: core::NodeId([9; 16]), segment: 1, epoch: u64::MAX, slot: 7, generation: 3 };

    #[test]
    fn what_was_located_reads_back_as_it_was() {
        let found = core::Found {
            version: core::Stamp { term: 1, n: 2 },
            len: 3,
            replicas: vec![AT],
            lease: Duration::from_secs(1),
        };
        for located in [
            core::Located::Hit(found),
            core::Located::Miss(core::Miss::Absent),
            core::Located::Miss(core::Miss::Rebuilding { retry_after: Duration::from_secs(1) }),
        ] {
            assert_eq!(core::Located::try_from(&Located::from(located.clone())), Ok(located));
        }
    }

    #[test]
    fn events_read_back_as_they_were_and_later_kinds_are_skipped() {
        let (at, key) = (core::Stamp { term: 1, n: 9 }, b"k".as_slice().into());
        let stored = core::Change::Stored { key, version: at, len: 4, location: AT, tier: core::Tier::Ssd };
        let removed = core::Change::Removed {
            key: b"k".as_slice().into(),
            location: AT,
            reason: core::Reason::Evicted,
            replicas_left: 2,
            left_there: 1,
        };
        let owner = core::Owner { node: core::NodeId([3; 16]), incarnation: 7 };
        let left = core::Change::Left { owner, reason: core::Reason::OwnerLost };
        for change in [stored, removed, left, core::Change::Cleared] {
            let event = core::Event { at, change };
            assert_eq!(Event::from(event.clone()).read(), Ok(Some(event)));
        }
        assert_eq!(Event { kind: 99, at: Some(at.into()), ..Event::default() }.read(), Ok(None));
    }

    #[test]
    fn holdings_read_back_as_they_were() {
        let holdings = core::Holdings {
            owner: Some(core::Owner { node: core::NodeId([3; 16]), incarnation: 7 }),
            keys: alloc::vec![b"kv/1".as_slice().into()],
            next: Some(core::Place { segment: 1, slot: 9 }),
            position: core::Stamp { term: 2, n: 5 },
        };
        let reply = HoldingsReply::from(core::Answer { shard: 0, term: 2, value: holdings.clone() });
        assert_eq!(core::Holdings::try_from(&reply), Ok(holdings));
        assert_eq!(core::Holdings::try_from(&HoldingsReply::default()), Err(Unreadable("position")));
    }

    #[test]
    fn explanations_read_back_as_they_were() {
        let lost = core::Removal {
            reason: core::Reason::OwnerLost,
            node: core::NodeId([1; 16]),
            version: core::Stamp { term: 4, n: 4 },
            len: 8,
            ago: Duration::from_secs(9),
        };
        for explanation in [
            core::Explanation::Lost(lost),
            core::Explanation::Present { replicas: 2, suspect: 1 },
            core::Explanation::NeverStored { removals_remembered: 5 },
            core::Explanation::Rebuilding { retry_after: Duration::from_secs(1) },
        ] {
            assert_eq!(core::Explanation::try_from(&ExplainReply::from(explanation)), Ok(explanation));
        }
    }

    #[test]
    fn a_node_id_of_another_length_is_refused_and_named() {
        let short = Location { node: vec![1; 15], ..Location::from(AT) };
        assert_eq!(core::Location::try_from(&short), Err(Unreadable("node")));
    }
}
