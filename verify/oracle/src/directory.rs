//! What is asked of a directory and what it answers, as values; the product and the slow, obvious oracle both take them.
//!
//! The oracle has lists and linear scans, no index. Same answers, or one of the two is wrong.

mod oracle;

pub use oracle::Oracle;

use millpond_core::directory::{
    Answer, Commit, Committed, Directory, Entry, EntryVerdict, EventPage, EvictVerdict, Explanation, Holdings,
    Inventory, Join, Key, Leases, Located, Location, Miss, Mode, NodeId, Owner, OwnerView, Page, Part, Pin, Place,
    Refusal, Removed, SegmentLoad, Stamp, Stat, Urgency, Victim,
};
use millpond_core::time::{Duration, Instant};

/// An inventory entry that owns its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedEntry {
    /// The object's key.
    pub key: Vec<u8>,
    /// The slot.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
    /// Bytes of the value.
    pub len: u64,
    /// The version reported.
    pub version: Stamp,
    /// The pin.
    pub pin: Pin,
    /// Whether it was ever upserted.
    pub mutable: bool,
}

/// One concrete call of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Each variant is the method of the same name.
pub enum Call {
    Join(Join),
    Heartbeat(Owner, Vec<SegmentLoad>),
    Inventory { owner: Owner, segment: u32, epoch: u64, entries: Vec<OwnedEntry>, part: Part },
    LinkLost(Owner),
    Death(Owner),
    Tick,
    Commit { owner: Owner, key: Vec<u8>, len: u64, location: Location, mode: Mode, pin: Pin },
    Locate(Vec<u8>, Duration),
    Exists(Vec<u8>),
    Stat(Vec<u8>),
    List { prefix: Vec<u8>, after: Option<Vec<u8>>, max: usize },
    Holdings { node: NodeId, prefix: Vec<u8>, after: Option<Place>, max: usize },
    Remove(Vec<u8>, Leases),
    RemovePrefix { prefix: Vec<u8>, after: Option<Vec<u8>>, leases: Leases },
    Clear,
    Evict { owner: Owner, victims: Vec<(Vec<u8>, Location)>, urgency: Urgency },
    Dropped { owner: Owner, victims: Vec<(Vec<u8>, Location)> },
    Retired(Owner),
    Freed(Owner, Vec<Location>),
    Events(Stamp, usize),
    Explain(Vec<u8>),
    View,
}

/// What a call answered.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Outcome {
    Nothing,
    Known(bool),
    Done(Answer<Result<(), Refusal>>),
    Adopted(Answer<Result<Vec<EntryVerdict>, Refusal>>),
    Gone(Vec<Owner>),
    Committed(Answer<Result<Committed, Refusal>>),
    Located(Answer<Located>),
    Exists(Answer<Result<(), Miss>>),
    Stat(Answer<Result<Stat, Miss>>),
    Page(Answer<Page>),
    Holdings(Answer<Holdings>),
    Removed(Answer<Removed>),
    Cleared(Answer<u64>),
    Evicted(Answer<Result<Vec<EvictVerdict>, Refusal>>),
    Dropped(Answer<Result<usize, Refusal>>),
    Retired(Vec<Location>),
    Events(Answer<EventPage>),
    Explained(Answer<Explanation>),
    View(Answer<Vec<OwnerView>>),
}

/// Something that answers like a directory.
pub trait Subject {
    /// Carries out one call at `now`.
    fn apply(&mut self, now: Instant, call: &Call) -> Outcome;
}

fn key(bytes: &[u8]) -> Key<'_> {
    Key::new(bytes).expect("the world makes keys of legal length only")
}

fn victims(list: &[(Vec<u8>, Location)]) -> Vec<Victim<'_>> {
    list.iter().map(|(bytes, location)| Victim { key: key(bytes), location: *location }).collect()
}

impl Subject for Directory {
    fn apply(&mut self, now: Instant, call: &Call) -> Outcome {
        match call {
            Call::Join(join) => Outcome::Done(self.on_join(now, join.clone())),
            Call::Heartbeat(owner, loads) => Outcome::Done(self.on_heartbeat(now, *owner, loads)),
            Call::Inventory { owner, segment, epoch, entries, part } => {
                let entries: Vec<Entry<'_>> = entries.iter().map(OwnedEntry::borrow).collect();
                let inventory = Inventory { segment: *segment, epoch: *epoch, entries: &entries, part: *part };
                Outcome::Adopted(self.on_inventory(now, *owner, inventory))
            }
            Call::LinkLost(owner) => {
                self.on_link_lost(*owner);
                Outcome::Nothing
            }
            Call::Death(owner) => Outcome::Known(self.on_death(now, *owner)),
            Call::Tick => Outcome::Gone(self.on_tick(now)),
            Call::Commit { owner, key: bytes, len, location, mode, pin } => {
                let commit = Commit { key: key(bytes), len: *len, location: *location, mode: *mode, pin: *pin };
                Outcome::Committed(self.on_commit(now, *owner, &commit))
            }
            Call::Locate(bytes, lease) => Outcome::Located(self.on_locate(now, key(bytes), *lease)),
            Call::Exists(bytes) => Outcome::Exists(self.exists(now, key(bytes))),
            Call::Stat(bytes) => Outcome::Stat(self.stat(now, key(bytes))),
            Call::List { prefix, after, max } => Outcome::Page(self.list(prefix, after.as_deref(), *max)),
            Call::Holdings { node, prefix, after, max } => {
                Outcome::Holdings(self.holdings(*node, prefix, *after, *max))
            }
            Call::Remove(bytes, leases) => Outcome::Removed(self.on_remove(now, key(bytes), *leases)),
            Call::RemovePrefix { prefix, after, leases } => {
                Outcome::Removed(self.on_remove_prefix(now, prefix, after.as_deref(), *leases))
            }
            Call::Clear => Outcome::Cleared(self.on_clear(now)),
            Call::Evict { owner, victims: list, urgency } => {
                Outcome::Evicted(self.on_evict(now, *owner, &victims(list), *urgency))
            }
            Call::Dropped { owner, victims: list } => Outcome::Dropped(self.on_dropped(now, *owner, &victims(list))),
            Call::Retired(owner) => Outcome::Retired(self.poll_retired(now, *owner)),
            Call::Freed(owner, locations) => {
                self.on_freed(*owner, locations);
                Outcome::Nothing
            }
            Call::Events(after, max) => Outcome::Events(self.events(*after, *max)),
            Call::Explain(bytes) => Outcome::Explained(self.explain_miss(now, key(bytes))),
            Call::View => Outcome::View(self.view(now)),
        }
    }
}

impl OwnedEntry {
    fn borrow(&self) -> Entry<'_> {
        Entry {
            key: key(&self.key),
            slot: self.slot,
            generation: self.generation,
            len: self.len,
            version: self.version,
            pin: self.pin,
            mutable: self.mutable,
        }
    }
}
