//! The numbered stream of changes, kept in a bounded ring so that a watcher can resume.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{Location, Owner, Reason, Stamp, Tier};

/// One change of the index, numbered without gaps within a term.
///
/// ```
/// use millpond_core::directory::{Change, Event, Stamp};
/// let event = Event { at: Stamp { term: 1, n: 1 }, change: Change::Cleared };
/// assert!(event.at > Stamp::ZERO);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number.
    pub at: Stamp,
    /// What changed.
    pub change: Change,
}

/// What changed.
///
/// Example: [`Event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// A replica became readable.
    Stored {
        /// The object's key.
        key: Arc<[u8]>,
        /// Its version.
        version: Stamp,
        /// Bytes of the value.
        len: u64,
        /// Where.
        location: Location,
        /// On which tier.
        tier: Tier,
    },
    /// A replica left the index.
    Removed {
        /// The object's key.
        key: Arc<[u8]>,
        /// Where it was.
        location: Location,
        /// Why.
        reason: Reason,
        /// Replicas of the object that are left.
        replicas_left: u32,
        /// How many of those lie with the same node, in another segment.
        left_there: u32,
    },
    /// An owner left the table: whatever it held is gone, and the removal of each replica follows.
    Left {
        /// Node and incarnation.
        owner: Owner,
        /// Why.
        reason: Reason,
    },
    /// Everything with a lower stamp is gone and never returns.
    Cleared,
}

/// A page of the stream.
///
/// ```
/// use millpond_core::directory::{EventPage, Stamp};
/// let page = EventPage { events: vec![], next: Stamp { term: 3, n: 0 }, gap: true };
/// assert!(page.gap, "the watcher lists everything and goes on at `next`");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventPage {
    /// Events after the place that was asked for, in order.
    pub events: Vec<Event>,
    /// Where to go on.
    pub next: Stamp,
    /// Events were lost between the place asked for and `next` (an older term, or longer ago than the ring holds): take a
    /// snapshot, by [`Directory::list`](super::Directory::list) of what there is or by
    /// [`Directory::holdings`](super::Directory::holdings) of who has it, then go on at `next`. `events` is empty then.
    pub gap: bool,
}

#[derive(Clone, Debug)]
pub(super) struct EventRing {
    term: u64,
    events: VecDeque<Event>,
    events_max: usize,
    dropped_n: u64,
}

impl EventRing {
    pub(super) fn new(term: u64, events_max: usize) -> Self {
        Self { term, events: VecDeque::new(), events_max: events_max.max(1), dropped_n: 0 }
    }

    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() == self.events_max
            && let Some(oldest) = self.events.pop_front()
        {
            self.dropped_n = oldest.at.n;
        }
        self.events.push_back(event);
    }

    /// Events after `after`, at most `max`; `last` is the newest event's place.
    pub(super) fn after(&self, after: Stamp, last: Stamp, max: usize) -> EventPage {
        if after.term != self.term || after.n < self.dropped_n || after > last {
            return EventPage { events: Vec::new(), next: last, gap: true };
        }
        let skip = usize::try_from(after.n - self.dropped_n).unwrap_or(usize::MAX);
        let events: Vec<Event> = self.events.iter().skip(skip).take(max).cloned().collect();
        let next = events.last().map_or(after, |event| event.at);
        EventPage { events, next, gap: false }
    }
}
