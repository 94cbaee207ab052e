//! Queues of slots over one array of entries: what every policy is made of.
//!
//! A slot is in at most one queue. Each queue knows its bytes. Not a policy: nothing here decides.

use super::{Object, Residents};

const NONE: u32 = u32::MAX;

/// What a policy remembers of one slot: make an array or boxed slice of `Entry::EMPTY`, one for each slot of the owner's
/// table.
///
/// ```
/// use millpond_core::evict::{Entry, Fifo};
/// let policy = Fifo::new([Entry::EMPTY; 16]);
/// ```
#[derive(Clone, Debug)]
pub struct Entry {
    object: Object,
    /// Towards the front (younger).
    prev: u32,
    /// Towards the back (older).
    next: u32,
    /// The policy's own count or mark.
    pub(super) mark: u8,
    queue: u8,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Absent,
    Queued,
    Proposed,
}

impl Entry {
    /// An entry of a slot without an object.
    pub const EMPTY: Self = Self {
        object: Object { fingerprint: 0, len: 0 },
        prev: NONE,
        next: NONE,
        mark: 0,
        queue: 0,
        place: Place::Absent,
    };
}

impl Default for Entry {
    fn default() -> Self {
        Self::EMPTY
    }
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    front: u32,
    back: u32,
    count: u32,
    len: u64,
}

/// `N` queues over the entries `S`.
#[derive(Clone, Debug)]
pub(super) struct Queues<S, const N: usize> {
    entries: S,
    queues: [Queue; N],
}

/// What became of a slot's object.
pub(super) enum Gone {
    /// It was proposed, out of this queue.
    Evicted { queue: u8, object: Object },
    /// It was removed for another reason, or was not there.
    Removed,
}

impl<S: AsRef<[Entry]> + AsMut<[Entry]>, const N: usize> Queues<S, N> {
    pub(super) fn new(mut entries: S) -> Self {
        entries.as_mut().fill(Entry::EMPTY);
        Self { entries, queues: [Queue { front: NONE, back: NONE, count: 0, len: 0 }; N] }
    }

    pub(super) fn entry(&self, slot: u32) -> &Entry {
        &self.entries.as_ref()[slot as usize]
    }

    pub(super) fn entry_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.entries.as_mut()[slot as usize]
    }

    /// The queue the slot is in; `None` if it is in none (absent, proposed, or no such slot).
    pub(super) fn queue_of(&self, slot: u32) -> Option<u8> {
        let entry = self.entries.as_ref().get(slot as usize)?;
        (entry.place == Place::Queued).then_some(entry.queue)
    }

    pub(super) fn len(&self, queue: u8) -> u64 {
        self.queues[usize::from(queue)].len
    }

    pub(super) fn count(&self, queue: u8) -> u32 {
        self.queues[usize::from(queue)].count
    }

    pub(super) fn total_len(&self) -> u64 {
        self.queues.iter().map(|queue| queue.len).sum()
    }

    /// The oldest slot of a queue.
    pub(super) fn back(&self, queue: u8) -> Option<u32> {
        let back = self.queues[usize::from(queue)].back;
        (back != NONE).then_some(back)
    }

    /// The slot that is next younger than a queued one.
    pub(super) fn younger(&self, slot: u32) -> Option<u32> {
        let prev = self.entry(slot).prev;
        (prev != NONE).then_some(prev)
    }

    /// Puts a new object at the front of `queue`; the slot must be in no queue.
    pub(super) fn store(&mut self, queue: u8, slot: u32, object: Object) {
        *self.entry_mut(slot) = Entry { object, ..Entry::EMPTY };
        self.push_front(queue, slot);
    }

    fn push_front(&mut self, queue: u8, slot: u32) {
        let front = self.queues[usize::from(queue)].front;
        let entry = self.entry_mut(slot);
        (entry.prev, entry.next, entry.queue, entry.place) = (NONE, front, queue, Place::Queued);
        let len = entry.object.len;
        if front != NONE {
            self.entry_mut(front).prev = slot;
        }
        let queue = &mut self.queues[usize::from(queue)];
        queue.front = slot;
        if queue.back == NONE {
            queue.back = slot;
        }
        queue.count += 1;
        queue.len += len;
    }

    fn unlink(&mut self, slot: u32) {
        let entry = self.entry_mut(slot);
        let (prev, next, queue, len) = (entry.prev, entry.next, usize::from(entry.queue), entry.object.len);
        match prev {
            NONE => self.queues[queue].front = next,
            _ => self.entry_mut(prev).next = next,
        }
        match next {
            NONE => self.queues[queue].back = prev,
            _ => self.entry_mut(next).prev = prev,
        }
        self.queues[queue].count -= 1;
        self.queues[queue].len -= len;
    }

    /// Moves a queued slot to the front of `queue`.
    pub(super) fn move_front(&mut self, queue: u8, slot: u32) {
        self.unlink(slot);
        self.push_front(queue, slot);
    }

    /// Takes a queued slot out of its queue until the owner decides.
    pub(super) fn propose(&mut self, slot: u32) {
        self.unlink(slot);
        self.entry_mut(slot).place = Place::Proposed;
    }

    /// Forgets the slot's object.
    pub(super) fn remove(&mut self, slot: u32) -> Gone {
        let Some(entry) = self.entries.as_ref().get(slot as usize) else { return Gone::Removed };
        let gone = match entry.place {
            Place::Proposed => Gone::Evicted { queue: entry.queue, object: entry.object },
            Place::Absent => Gone::Removed,
            Place::Queued => {
                self.unlink(slot);
                Gone::Removed
            }
        };
        self.entry_mut(slot).place = Place::Absent;
        gone
    }

    /// Puts a proposed slot back at the front of the queue it came from.
    pub(super) fn spare(&mut self, slot: u32) {
        if self.entries.as_ref().get(slot as usize).is_some_and(|entry| entry.place == Place::Proposed) {
            let queue = self.entry(slot).queue;
            self.push_front(queue, slot);
        }
    }

    /// What to evict for the candidate `slot`: itself or a leaf under it, if that may go and is queued here.
    pub(super) fn victim_for(&self, slot: u32, residents: &dyn Residents) -> Option<u32> {
        let leaf = residents.leaf_under(slot);
        (self.queue_of(leaf).is_some() && residents.may_go(leaf)).then_some(leaf)
    }

    /// Proposes from the back of `queue`; what may not go now moves to its front. Bounded by the queue's count.
    pub(super) fn propose_oldest(&mut self, queue: u8, residents: &dyn Residents) -> Option<u32> {
        for _ in 0..self.count(queue) {
            let candidate = self.back(queue)?;
            if let Some(victim) = self.victim_for(candidate, residents) {
                self.propose(victim);
                return Some(victim);
            }
            self.move_front(queue, candidate);
        }
        None
    }
}
