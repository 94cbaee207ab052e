//! Jobs and slices: the rows of the scheduler's tables.
//!
//! Plain records and the lists they form; the rules are in `scheduler` and `poll`. Invariants: a job is in its peer's queue
//! exactly while it has something to post; its slices form a list that ends with it.

use super::{Asked, Cause, Class, Explanation, Load};
use crate::slab::{Handle, Slab, Slot};
use crate::time::{Duration, Instant};

/// What a job asks for.
///
/// ```
/// use millpond_core::slab::Handle;
/// use millpond_core::time::{Duration, Instant};
/// use millpond_core::transfer::{Class, JobSpec};
/// let mut spec = JobSpec::new(Handle::default(), 1 << 20);
/// spec.class = Class::Bulk;
/// spec.progress_deadline = Some(Duration::from_secs(30));
/// assert_eq!(spec.deadline, Instant::NEVER);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobSpec {
    /// To whom or from whom.
    pub peer: Handle,
    /// Bytes in all.
    pub bytes: u64,
    /// Its class.
    pub class: Class,
    /// Which transport it may take.
    pub asked: Asked,
    /// When whatever is unfinished ends, however well it goes.
    pub deadline: Instant,
    /// How long nothing of it may move; `None`: as configured.
    pub progress_deadline: Option<Duration>,
    /// Whether slices of it change the peer's memory. Those wait while older writes may still land.
    pub has_writes: bool,
    /// A word of the caller's.
    pub tag: u64,
}

impl JobSpec {
    /// A foreground job of `bytes` bytes with writes, over any transport, without a deadline of its own.
    #[must_use]
    pub const fn new(peer: Handle, bytes: u64) -> Self {
        Self {
            peer,
            bytes,
            class: Class::Foreground,
            asked: Asked::Any,
            deadline: Instant::NEVER,
            progress_deadline: None,
            has_writes: true,
            tag: 0,
        }
    }
}

/// A job in the table; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Debug)]
pub struct Job {
    pub(super) spec: JobSpec,
    /// When it was submitted, while nothing of it was posted.
    pub(super) waits_since: Option<Instant>,
    /// Position among all jobs.
    pub(super) number: u64,
    pub(super) progress_deadline: Duration,
    pub(super) last_progress: Instant,
    pub(super) bytes_left: u64,
    /// Something of it was not cut yet.
    pub(super) is_uncut: bool,
    pub(super) slices: u32,
    pub(super) waiting: u32,
    pub(super) first: Handle,
    /// Neighbours in the peer's queue.
    pub(super) queue: Links,
    pub(super) is_queued: bool,
    /// The next one that something has to be done about.
    pub(super) next_due: Handle,
    pub(super) is_due: bool,
    pub(super) has_failed: bool,
    pub(super) end: Option<Cause>,
    pub(super) enforced: Enforced,
    pub(super) explanation: Explanation,
}

/// Neighbours in a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Links {
    pub(super) previous: Handle,
    pub(super) next: Handle,
}

/// Steps of ending a job early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Enforced {
    No,
    /// Its slices were cancelled, at that time.
    Cancelled(Instant),
    /// Their paths were closed.
    Closed,
}

/// A slice in the table; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Scheduler`](super::Scheduler).
#[derive(Clone, Debug)]
pub struct Slice {
    pub(super) job: Handle,
    pub(super) state: SliceState,
    pub(super) load: Load,
    /// How often it was posted.
    pub(super) attempts: u8,
    /// The last path, and the generation it had.
    pub(super) path: u8,
    pub(super) generation: u64,
    /// Paths where it failed.
    pub(super) tried: u16,
    /// Paths where an earlier attempt may still land.
    pub(super) doubts: u16,
    /// Some attempt may have been applied in part.
    pub(super) is_touched: bool,
    pub(super) has_writes: bool,
    pub(super) is_once: bool,
    pub(super) moved: u64,
    pub(super) siblings: Links,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SliceState {
    /// Said to be posted; what it holds is not known yet.
    Cutting,
    /// Under way. `is_cancelled`: its cancel was said.
    Posted { is_cancelled: bool },
    /// To be posted again.
    Waiting,
    /// Done, but an earlier attempt may still land.
    Arrived,
}

impl Slice {
    pub(super) fn is_posted(&self) -> bool {
        matches!(self.state, SliceState::Posted { .. } | SliceState::Cutting)
    }
}

/// The jobs and slices of a scheduler with the lists among them.
#[derive(Clone, Debug)]
pub(super) struct Work<J, S> {
    pub(super) jobs: Slab<Job, J>,
    pub(super) slices: Slab<Slice, S>,
    /// The list of jobs about which something has to be done.
    pub(super) due: Handle,
}

impl<J, S> Work<J, S>
where
    J: AsRef<[Slot<Job>]> + AsMut<[Slot<Job>]>,
    S: AsRef<[Slot<Slice>]> + AsMut<[Slot<Slice>]>,
{
    pub(super) fn mark_due(&mut self, key: Handle) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        if !job.is_due {
            job.is_due = true;
            job.next_due = self.due;
            self.due = key;
        }
    }

    pub(super) fn unmark_first_due(&mut self) {
        let Some(job) = self.jobs.get_mut(self.due) else {
            self.due = Handle::default();
            return;
        };
        job.is_due = false;
        self.due = job.next_due;
    }

    /// A fresh slice of a job, first in its list. `None`: the table is full.
    pub(super) fn insert_slice(&mut self, key: Handle) -> Option<Handle> {
        let first = self.jobs.get(key)?.first;
        let slice = Slice {
            job: key,
            state: SliceState::Cutting,
            load: Load::NONE,
            attempts: 0,
            path: 0,
            generation: 0,
            tried: 0,
            doubts: 0,
            is_touched: false,
            has_writes: false,
            is_once: false,
            moved: 0,
            siblings: Links { previous: Handle::default(), next: first },
        };
        let inserted = self.slices.insert(slice).ok()?;
        if let Some(next) = self.slices.get_mut(first) {
            next.siblings.previous = inserted;
        }
        let job = self.jobs.get_mut(key)?;
        job.first = inserted;
        job.slices += 1;
        Some(inserted)
    }

    /// Takes a slice out of its job's list and of the table. A job without slices is due.
    pub(super) fn remove_slice(&mut self, key: Handle) {
        let Some(slice) = self.slices.remove(key) else { return };
        let Links { previous, next } = slice.siblings;
        if let Some(previous) = self.slices.get_mut(previous) {
            previous.siblings.next = next;
        }
        if let Some(next) = self.slices.get_mut(next) {
            next.siblings.previous = previous;
        }
        let Some(job) = self.jobs.get_mut(slice.job) else { return };
        if job.first == key {
            job.first = next;
        }
        job.slices -= 1;
        if slice.state == SliceState::Waiting {
            job.waiting -= 1;
        }
        if job.slices == 0 && (job.end.is_some() || !job.is_uncut) {
            self.mark_due(slice.job);
        }
    }

    /// The first slice of a job for which `is_it` holds. O(slices of the job).
    pub(super) fn find_slice(&self, key: Handle, is_it: impl Fn(&Slice) -> bool) -> Option<Handle> {
        let mut at = self.jobs.get(key)?.first;
        // Bounded by the list, which has no rings.
        while let Some(slice) = self.slices.get(at) {
            if is_it(slice) {
                return Some(at);
            }
            at = slice.siblings.next;
        }
        None
    }
}
