//! Reads of peers on their way to being answered: which bytes come next, and which could not be had.
//!
//! Memory is resolved by the caller in every turn; this module only keeps the place. Invariants: extents are answered in
//! order; an extent that failed is named by an ack before the last one.

use millpond_core::wire::frame::{AckCode, Tag, WireExtent};

use crate::contract::{Refusal, RemoteRange};

/// A run of extents of a peer's frame that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) code: AckCode,
    pub(super) touched: bool,
}

/// Notes that extent `index` failed, joined to the run before if it continues it. Extents fail in order.
pub(super) fn note_failure(failures: &mut Vec<Failure>, index: usize, code: AckCode, touched: bool) {
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    match failures.last_mut() {
        Some(last) if last.first + last.count > index => {} // said already
        Some(last) if last.first + last.count == index && last.code == code && last.touched == touched => {
            last.count += 1;
        }
        _ => failures.push(Failure { first: index, count: 1, code, touched }),
    }
}

/// A refusal of ours as an ack's code.
pub(super) fn refusal_code(refusal: Refusal) -> AckCode {
    AckCode::from_code(refusal.code()).unwrap_or(AckCode::Failed)
}

/// A place in a list of extents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Which extent.
    pub(super) index: usize,
    /// Which byte of it.
    pub(super) offset: u64,
}

/// The rest of the extent at `place`.
pub(super) fn rest_of(extents: &[WireExtent], place: Place) -> Option<RemoteRange> {
    let extent = extents.get(place.index)?;
    let len = extent.len.get().checked_sub(place.offset)?;
    Some(RemoteRange { region: extent.region(), offset: extent.offset.get() + place.offset, len })
}

/// The place `len` bytes further on.
pub(super) fn advanced(extents: &[WireExtent], mut place: Place, mut len: u64) -> Place {
    // Bounded: every round uses bytes or passes an extent.
    while let Some(range) = rest_of(extents, place) {
        if len < range.len {
            place.offset += len;
            return place;
        }
        len -= range.len;
        place = Place { index: place.index + 1, offset: 0 };
        if len == 0 {
            break;
        }
    }
    place
}

/// One read.
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) tag: Tag,
    pub(super) extents: Vec<WireExtent>,
    pub(super) checksummed: bool,
    /// First byte that is in no frame yet.
    pub(super) place: Place,
    /// The same as bytes from the start of the read.
    pub(super) offset: u64,
    pub(super) failures: Vec<Failure>,
    pub(super) cancelled: bool,
}

impl Job {
    pub(super) fn len(&self) -> u64 {
        self.extents.iter().map(|extent| extent.len.get()).sum()
    }

    /// Whether every byte is in a frame, or failed.
    pub(super) fn is_cut(&self) -> bool {
        self.place.index >= self.extents.len()
    }

    /// Passes extents at the current place that `usable` refuses, and empty ones that it does not.
    pub(super) fn pass_unusable(&mut self, usable: &mut dyn FnMut(RemoteRange) -> Result<(), Refusal>) {
        while let Some(range) = rest_of(&self.extents, self.place) {
            match usable(range) {
                Ok(()) if range.len > 0 => return,
                Ok(()) => {}
                Err(refusal) => {
                    let touched = false;
                    note_failure(&mut self.failures, self.place.index, refusal_code(refusal), touched);
                }
            }
            self.offset += range.len;
            self.place = Place { index: self.place.index + 1, offset: 0 };
        }
    }

    /// Takes the next bytes for one frame, at most `len_max`, up to the next unusable extent; then passes that. Says where
    /// they begin (as a place and from the start of the read) and how many they are: none when the read is cut.
    pub(super) fn cut(
        &mut self,
        len_max: u64,
        usable: &mut dyn FnMut(RemoteRange) -> Result<(), Refusal>,
    ) -> (Place, u64, u64) {
        self.pass_unusable(usable);
        let (start, start_offset, mut len) = (self.place, self.offset, 0);
        while let Some(range) = rest_of(&self.extents, self.place) {
            let piece = range.len.min(len_max - len);
            if piece == 0 && range.len > 0 || (len > 0 && usable(range).is_err()) {
                break;
            }
            len += piece;
            self.place = advanced(&self.extents, self.place, piece);
        }
        self.offset = start_offset + len;
        self.pass_unusable(usable);
        (start, start_offset, len)
    }
}

/// The reads of one lane, oldest first.
pub(super) struct Jobs {
    list: std::collections::VecDeque<Job>,
    spare: Vec<Job>,
    next_id: u64,
}

impl Jobs {
    pub(super) fn new() -> Self {
        Self { list: std::collections::VecDeque::new(), spare: Vec::new(), next_id: 0 }
    }

    pub(super) fn add(&mut self, tag: Tag, extents: &[WireExtent], checksummed: bool) {
        let mut job = self.spare.pop().unwrap_or_else(|| Job {
            id: 0,
            tag,
            extents: Vec::new(),
            checksummed,
            place: Place::default(),
            offset: 0,
            failures: Vec::new(),
            cancelled: false,
        });
        job.id = self.next_id;
        self.next_id += 1;
        (job.tag, job.checksummed, job.place, job.offset, job.cancelled) =
            (tag, checksummed, Place::default(), 0, false);
        job.extents.clear();
        job.extents.extend_from_slice(extents);
        job.failures.clear();
        self.list.push_back(job);
    }

    pub(super) fn find(&mut self, id: u64) -> Option<&mut Job> {
        self.list.iter_mut().find(|job| job.id == id)
    }

    /// The oldest read with bytes that are in no frame yet.
    pub(super) fn next_uncut(&mut self) -> Option<&mut Job> {
        self.list.iter_mut().find(|job| !job.is_cut() && !job.cancelled)
    }

    pub(super) fn has_uncut(&self) -> bool {
        self.list.iter().any(|job| !job.is_cut() && !job.cancelled)
    }

    /// A read is over.
    pub(super) fn remove(&mut self, id: u64) {
        if let Some(job) = self.list.iter().position(|job| job.id == id).and_then(|index| self.list.remove(index)) {
            self.spare.push(job);
        }
    }

    /// Marks the reads that a cancel covers.
    pub(super) fn cancel(&mut self, tag: Tag) {
        let covered = |job: &&mut Job| job.tag.ticket == tag.ticket && job.tag.attempt <= tag.attempt;
        for job in self.list.iter_mut().filter(covered) {
            job.cancelled = true;
        }
    }

    pub(super) fn is_cancelled(&self, id: u64) -> bool {
        self.list.iter().any(|job| job.id == id && job.cancelled)
    }

    /// Forgets cancelled reads except the one with a frame being sent, and says how many and how many bytes they were.
    pub(super) fn sweep(&mut self, being_sent: Option<u64>) -> (u64, u64) {
        let (mut count, mut len) = (0, 0);
        for index in (0..self.list.len()).rev() {
            if self.list[index].cancelled
                && Some(self.list[index].id) != being_sent
                && let Some(job) = self.list.remove(index)
            {
                count += 1;
                len += job.len();
                self.spare.push(job);
            }
        }
        (count, len)
    }
}

#[cfg(test)]
mod tests {
    use millpond_core::batch::{Extent, RegionId};

    use super::*;

    fn job(lens: &[u64]) -> Jobs {
        let extent = |len: &u64| Extent::new(RegionId { slot: 0, epoch: 1 }, 0, *len).into();
        let extents: Vec<WireExtent> = lens.iter().map(extent).collect();
        let mut jobs = Jobs::new();
        jobs.add(Tag::default(), &extents, false);
        jobs
    }

    #[test]
    fn refused_extents_are_left_out_and_named_once() {
        let mut jobs = job(&[10, 20, 20, 0, 10]);
        let job = jobs.find(0).unwrap();
        let mut usable = |range: RemoteRange| if range.len == 20 { Err(Refusal::Stale) } else { Ok(()) };
        assert_eq!(job.cut(100, &mut usable), (Place::default(), 0, 10));
        assert_eq!(job.cut(100, &mut usable), (Place { index: 4, offset: 0 }, 50, 10));
        assert!(job.is_cut());
        assert_eq!(job.failures, [Failure { first: 1, count: 2, code: AckCode::Stale, touched: false }]);
    }

    #[test]
    fn a_read_is_cut_into_frames_that_join_up() {
        let mut jobs = job(&[10, 0, 25, 5]);
        let job = jobs.find(0).unwrap();
        let (mut at, mut rounds) = (0, 0);
        while !job.is_cut() {
            let (_, offset, len) = job.cut(16, &mut |_| Ok(()));
            assert_eq!(offset, at);
            at += len;
            rounds += 1;
        }
        assert_eq!((at, rounds), (40, 3));
    }
}
