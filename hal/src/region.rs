//! Registered memory and who holds which bytes of it.
//!
//! Like the `bytes` crate, on memory that devices can reach: a [`Region`] is carved into [`RegionBuf`]s (exclusive), a buffer
//! is frozen into [`RegionBytes`] (shared, read-only), and dropping the last holder gives the range back. It is not an
//! allocator: the caller says which range it wants. A raw region has no leases: the owner copies in and out while peers may
//! do the same, and never sees a reference.
//!
//! Invariants: no two live leases of a region overlap; a reference to bytes exists only under a lease, and no device or peer
//! writes under a lease unless the lease itself was handed to the fabric. Memory of a device (`cuda:N`) is leased, granted and
//! posted like any other, and nobody gets a reference to it or copies it by CPU.
#![allow(unsafe_code)]

use core::fmt;
use core::ops::{Bound, Deref, DerefMut, RangeBounds};
use std::collections::BTreeMap;
use std::sync::Arc;

use millpond_core::batch::{Extent, MemoryKind, RegionId, Rights};
use parking_lot::Mutex;

use crate::copy::{copy, copy_in};
use crate::mapping::{MapError, Mapping};

/// Who wants to hear that the last user of a region is gone.
pub(crate) trait OnRegionDrop: Send + Sync {
    fn region_dropped(&self, region: RegionId);
}

/// Most live leases of one region.
pub const LEASES_PER_REGION_MAX: usize = 1 << 20;

/// A lease was not given.
///
/// ```
/// use millpond_hal::mapping::{Backing, Mapping};
/// use millpond_hal::region::{LeaseError, Mode, Region};
/// let region = Region::unregistered(Mapping::new(4096, Backing::Heap).unwrap(), Mode::Leased);
/// let _held = region.carve(0, 100).unwrap();
/// let overlap = LeaseError::Overlap { offset: 50, len: 10, held_offset: 0, held_len: 100 };
/// assert_eq!(region.carve(50, 10).unwrap_err(), overlap);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The range is not inside the region.
    #[error("bytes {offset}..+{len} are not inside the region of {region_len} bytes")]
    OutOfBounds {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        region_len: u64,
    },
    /// Somebody holds part of it.
    #[error("bytes {offset}..+{len} overlap the live lease {held_offset}..+{held_len}; drop that one first")]
    Overlap {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// First byte of a lease in the way.
        held_offset: u64,
        /// Its length.
        held_len: u64,
    },
    /// The region has [`LEASES_PER_REGION_MAX`] live leases.
    #[error("the region has {LEASES_PER_REGION_MAX} live leases, the most there can be; drop some")]
    Full,
    /// The region is raw (leases asked for), or leased (raw access asked for).
    #[error("a raw region is read and written by copies, a leased one through leases; use the other kind of region")]
    WrongMode,
    /// The memory is a device's.
    #[error("memory of kind {0:?} is not the CPU's to touch; move it to host memory first")]
    NotForCpu(MemoryKind),
}

/// How the memory of a region is used. See the [module](self).
///
/// ```
/// use millpond_core::batch::Rights;
/// use millpond_hal::mapping::{Backing, Mapping};
/// use millpond_hal::region::{Mode, Region};
/// let raw = Region::unregistered(Mapping::new(4096, Backing::Heap).unwrap(), Mode::Raw(Rights::REMOTE_READ));
/// raw.write_at(10, b"bytes").unwrap();
/// assert!(raw.carve(0, 10).is_err()); // a raw region has no leases
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Ranges are leased; peers reach what is granted.
    Leased,
    /// No leases; the owner copies, peers do what the rights say, all at once.
    Raw(Rights),
}

enum State {
    Leased(Mutex<LeaseTable>),
    Raw(Rights),
}

struct Inner {
    id: RegionId,
    mapping: Arc<Mapping>,
    state: State,
    home: Option<Arc<dyn OnRegionDrop>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.region_dropped(self.id);
        }
    }
}

/// Registered memory. Clones name the same memory, which is freed when the region, its leases and everything posted are
/// gone. Made by `Fabric::allocate`, or by [`Region::unregistered`] for memory that no device needs to reach.
///
/// ```
/// use millpond_hal::mapping::{Backing, Mapping};
/// use millpond_hal::region::{Mode, Region};
/// let region = Region::unregistered(Mapping::new(8192, Backing::Heap).unwrap(), Mode::Leased);
/// let mut page = region.carve(0, 4096).unwrap();
/// page[..5].copy_from_slice(b"hello");
/// let shared = page.freeze();
/// assert_eq!(&shared.slice(1..5)[..], b"ello");
/// assert!(region.carve(4000, 200).is_err()); // overlaps `shared`
/// drop(shared);
/// assert!(region.carve(4000, 200).is_ok());
/// ```
#[derive(Clone)]
pub struct Region(Arc<Inner>);

impl Region {
    /// A region that belongs to no fabric: leases work, posting it does not.
    #[must_use]
    pub fn unregistered(mapping: Mapping, mode: Mode) -> Self {
        Self::new(RegionId::default(), Arc::new(mapping), mode, None)
    }

    pub(crate) fn new(id: RegionId, mapping: Arc<Mapping>, mode: Mode, home: Option<Arc<dyn OnRegionDrop>>) -> Self {
        let state = match mode {
            Mode::Leased => State::Leased(Mutex::default()),
            Mode::Raw(rights) => State::Raw(rights),
        };
        Self(Arc::new(Inner { id, mapping, state, home }))
    }

    /// Its name in the fabric that made it.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.0.id
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.mapping.len()
    }

    /// Whether it has no bytes; never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What sort of memory it is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.0.mapping.kind()
    }

    /// Address of its first byte, as a number: what a framework names memory of a device by.
    #[must_use]
    pub fn address(&self) -> usize {
        self.0.mapping.base().addr().get()
    }

    /// Whether only devices touch it: no reference to it and no copy of it by CPU is to be had.
    #[must_use]
    pub fn is_for_devices(&self) -> bool {
        !self.0.mapping.is_for_cpu()
    }

    /// How it is used.
    #[must_use]
    pub fn mode(&self) -> Mode {
        match &self.0.state {
            State::Leased(_) => Mode::Leased,
            State::Raw(rights) => Mode::Raw(*rights),
        }
    }

    /// Why it does not have the huge pages that were preferred ([`Backing::PreferHugePages2MiB`]); `None` if it has.
    ///
    /// [`Backing::PreferHugePages2MiB`]: crate::mapping::Backing::PreferHugePages2MiB
    #[must_use]
    pub fn downgrade(&self) -> Option<MapError> {
        self.0.mapping.downgrade()
    }

    /// The NUMA node that its pages come from, if it was bound to one.
    #[must_use]
    pub fn node(&self) -> Option<u16> {
        self.0.mapping.node()
    }

    /// Live leases; 0 for a raw region.
    #[must_use]
    pub fn lease_count(&self) -> usize {
        match &self.0.state {
            State::Leased(table) => table.lock().count,
            State::Raw(_) => 0,
        }
    }

    /// The range as an extent, for raw moves.
    #[must_use]
    pub fn extent(&self, offset: u64, len: u64) -> Extent {
        Extent::new(self.0.id, offset, len)
    }

    /// Takes the `len` bytes at `offset` for the caller alone. O(log n) of the region's live leases. The bytes are what the
    /// last holder left, zeroes at first.
    pub fn carve(&self, offset: u64, len: u64) -> Result<RegionBuf, LeaseError> {
        let region_len = self.len();
        if offset.checked_add(len).is_none_or(|end| end > region_len) {
            return Err(LeaseError::OutOfBounds { offset, len, region_len });
        }
        let State::Leased(table) = &self.0.state else { return Err(LeaseError::WrongMode) };
        table.lock().insert(offset, len)?;
        Ok(RegionBuf { lease: Lease { region: self.clone(), offset, len } })
    }

    fn checked_raw(&self, offset: u64, len: usize) -> Result<*mut u8, LeaseError> {
        if matches!(self.0.state, State::Leased(_)) {
            return Err(LeaseError::WrongMode);
        }
        if !self.0.mapping.is_for_cpu() {
            return Err(LeaseError::NotForCpu(self.kind()));
        }
        let (len, region_len) = (len as u64, self.len());
        if offset.checked_add(len).is_none_or(|end| end > region_len) {
            return Err(LeaseError::OutOfBounds { offset, len, region_len });
        }
        Ok(self.0.pointer(offset))
    }

    /// Has the system find pages for these bytes now; see [`Mapping::populate`]. Blocks for about 0.2 ms per MiB.
    ///
    /// # Errors
    /// As for the mapping: nothing is lost then, but time at the first use.
    pub fn populate(&self, offset: u64, len: u64) -> Result<(), MapError> {
        self.0.mapping.populate(offset, len)
    }

    /// Copies bytes of a raw region out. Bytes that a peer or another thread writes meanwhile come out old, new or torn.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), LeaseError> {
        let source = self.checked_raw(offset, into.len())?;
        // SAFETY:
        // - in range: `checked_raw` compared offset and length with the mapping's, which is the CPU's; `into` is as long.
        // - no overlap: nobody has a reference into a raw region, so `into` is elsewhere.
        // - all access to a raw region goes through `copy` or a device: see `Mode::Raw`.
        unsafe { copy(source, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into a raw region. A peer that reads meanwhile sees old, new or torn bytes.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), LeaseError> {
        let target = self.checked_raw(offset, from.len())?;
        // SAFETY: as in `read_at`, with the roles exchanged.
        unsafe { copy_in(from, target) };
        Ok(())
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.0.mapping
    }
}

impl Inner {
    /// The address of `offset`; in range because every caller has checked it against the mapping.
    fn pointer(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.mapping.len());
        // SAFETY: `offset` is at most the mapping's length, so the result is in or one past it. It fits usize since
        // the mapping's length does.
        unsafe { self.mapping.base().as_ptr().add(offset as usize) }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("id", &self.id()).field("len", &self.len()).field("mode", &self.mode()).finish()
    }
}

/// The live ranges of a region, by first byte. Empty ranges are counted and take no place.
#[derive(Default)]
struct LeaseTable {
    ends: BTreeMap<u64, u64>,
    count: usize,
}

impl LeaseTable {
    fn insert(&mut self, offset: u64, len: u64) -> Result<(), LeaseError> {
        if self.count >= LEASES_PER_REGION_MAX {
            return Err(LeaseError::Full);
        }
        if len > 0 {
            // Leases do not overlap, so the last one that starts before our end is the only one that can reach into us.
            if let Some((&start, &end)) = self.ends.range(..offset + len).next_back()
                && end > offset
            {
                return Err(LeaseError::Overlap { offset, len, held_offset: start, held_len: end - start });
            }
            self.ends.insert(offset, offset + len);
        }
        self.count += 1;
        Ok(())
    }

    fn remove(&mut self, offset: u64, len: u64) {
        if len > 0 {
            let end = self.ends.remove(&offset);
            assert_eq!(end, Some(offset + len), "a lease is removed as it was made");
        }
        self.count -= 1;
    }

    /// `offset .. offset + len` becomes two leases that meet at `offset + at`; `0 < at < len`.
    fn split(&mut self, offset: u64, len: u64, at: u64) {
        let end = self.ends.insert(offset, offset + at);
        assert_eq!(end, Some(offset + len), "only a live lease is split");
        self.ends.insert(offset + at, offset + len);
        self.count += 1;
    }
}

/// A live range of a leased region. Gives it back when dropped.
struct Lease {
    region: Region,
    offset: u64,
    len: u64,
}

impl Lease {
    fn table(&self) -> &Mutex<LeaseTable> {
        match &self.region.0.state {
            State::Leased(table) => table,
            State::Raw(_) => unreachable!("leases come from `carve`, which refuses raw regions"),
        }
    }

    fn pointer(&self) -> *mut u8 {
        self.region.0.pointer(self.offset)
    }

    /// Panics unless the CPU may touch it: who holds a lease knows what was allocated, and no peer decides it.
    fn assert_for_cpu(&self) {
        let kind = self.region.kind();
        assert!(self.region.0.mapping.is_for_cpu(), "{}", LeaseError::NotForCpu(kind));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.table().lock().remove(self.offset, self.len);
    }
}

/// An exclusive range of a region: read and write it, then [`RegionBuf::freeze`] it, post a read into it, or grant it to
/// peers. Given back on drop; the bytes stay as they are. Looking at bytes of a device's memory panics.
///
/// ```
/// use millpond_hal::mapping::{Backing, Mapping};
/// use millpond_hal::region::{Mode, Region};
/// let region = Region::unregistered(Mapping::new(4096, Backing::Heap).unwrap(), Mode::Leased);
/// let mut whole = region.carve(0, 100).unwrap();
/// let mut tail = whole.split_off(60).unwrap();
/// (whole[0], tail[0]) = (1, 2);
/// let whole = whole.unsplit(tail).unwrap();
/// assert_eq!((whole.len(), whole[60]), (100, 2));
/// ```
pub struct RegionBuf {
    lease: Lease,
}

impl RegionBuf {
    /// The region it is part of.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.lease.region
    }

    /// Where in the region it starts, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.lease.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lease.len as usize
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lease.len == 0
    }

    /// Shares it read-only from now on.
    #[must_use]
    pub fn freeze(self) -> RegionBytes {
        let len = self.lease.len;
        RegionBytes { lease: Arc::new(self.lease), offset: 0, len }
    }

    /// Cuts it in two: this keeps the first `at` bytes, the rest is returned. Refused when `at` is larger than the length.
    pub fn split_off(&mut self, at: u64) -> Result<Self, LeaseError> {
        let Lease { offset, len, .. } = self.lease;
        let region_len = self.lease.region.len();
        if at > len {
            return Err(LeaseError::OutOfBounds { offset: offset + len, len: at - len, region_len });
        }
        let region = self.lease.region.clone();
        {
            let mut table = self.lease.table().lock();
            if table.count >= LEASES_PER_REGION_MAX {
                return Err(LeaseError::Full);
            }
            // An empty half has no entry, so the whole entry then belongs to the other half as it stands.
            if at == 0 || at == len { table.count += 1 } else { table.split(offset, len, at) }
        }
        self.lease.len = at;
        Ok(Self { lease: Lease { region, offset: offset + at, len: len - at } })
    }

    /// Joins it with the buffer that follows it directly; otherwise both come back.
    pub fn unsplit(self, next: Self) -> Result<Self, (Self, Self)> {
        let follows = Arc::ptr_eq(&self.lease.region.0, &next.lease.region.0)
            && self.lease.offset + self.lease.len == next.lease.offset;
        if !follows {
            return Err((self, next));
        }
        let (mut first, second) = (self, next);
        let len = first.lease.len + second.lease.len;
        {
            let mut table = first.lease.table().lock();
            if second.lease.len > 0 {
                table.ends.remove(&second.lease.offset);
                table.ends.insert(first.lease.offset, first.lease.offset + len);
            }
            // One lease fewer; `second` counts itself off below, as an empty one.
        }
        first.lease.len = len;
        let mut second = second;
        second.lease.len = 0;
        Ok(first)
    }
}

impl Deref for RegionBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.lease.assert_for_cpu();
        // SAFETY:
        // - valid and initialised: the range was checked in `carve`; the mapping lives as long as `region`, and is the CPU's.
        // - nobody writes: this lease is exclusive, and devices and peers write only under leases moved to the fabric.
        unsafe { core::slice::from_raw_parts(self.lease.pointer(), self.lease.len as usize) }
    }
}

impl DerefMut for RegionBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.lease.assert_for_cpu();
        // SAFETY: as in `deref`; and nobody reads: peers read only what was frozen and granted, or raw regions.
        unsafe { core::slice::from_raw_parts_mut(self.lease.pointer(), self.lease.len as usize) }
    }
}

impl fmt::Debug for RegionBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionBuf({} {}..+{})", self.lease.region.id(), self.lease.offset, self.lease.len)
    }
}

/// A shared read-only range of a region. Clones and slices are cheap; the range is given back with the last of them. Looking
/// at bytes of a device's memory panics.
///
/// ```
/// use millpond_hal::mapping::{Backing, Mapping};
/// use millpond_hal::region::{Mode, Region};
/// let region = Region::unregistered(Mapping::new(4096, Backing::Heap).unwrap(), Mode::Leased);
/// let bytes = region.carve(0, 10).unwrap().freeze();
/// let copy = bytes.clone();
/// let bytes = bytes.try_unwrap().unwrap_err(); // `copy` still looks
/// drop(copy);
/// assert!(bytes.try_unwrap().is_ok());
/// ```
#[derive(Clone)]
pub struct RegionBytes {
    lease: Arc<Lease>,
    offset: u64,
    len: u64,
}

impl RegionBytes {
    /// The region it is part of.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.lease.region
    }

    /// Where in the region it starts, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.lease.offset + self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Part of it. Panics when the range is not inside, like a slice.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&before) => before + 1,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last + 1,
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.len(),
        };
        assert!(start <= end && end <= self.len(), "{start}..{end} is not inside {} bytes", self.len());
        Self { lease: Arc::clone(&self.lease), offset: self.offset + start as u64, len: (end - start) as u64 }
    }

    /// The exclusive buffer back, if this is the only holder and covers all that was frozen; otherwise itself.
    pub fn try_unwrap(self) -> Result<RegionBuf, Self> {
        if self.len != self.lease.len {
            return Err(self);
        }
        match Arc::try_unwrap(self.lease) {
            Ok(lease) => Ok(RegionBuf { lease }),
            Err(lease) => Err(Self { lease, ..self }),
        }
    }

    fn pointer(&self) -> *mut u8 {
        self.lease.region.0.pointer(self.offset())
    }
}

impl Deref for RegionBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.lease.assert_for_cpu();
        // SAFETY:
        // - valid and initialised: inside the lease's range, which `carve` checked; the mapping lives as long as the lease, and
        //   is the CPU's.
        // - nobody writes: the lease is frozen, so no `RegionBuf` of it exists, and devices and peers only read frozen bytes.
        unsafe { core::slice::from_raw_parts(self.pointer(), self.len as usize) }
    }
}

impl AsRef<[u8]> for RegionBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for RegionBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionBytes({} {}..+{})", self.lease.region.id(), self.offset(), self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Backing;
    use proptest::prelude::*;

    fn region(len: u64, mode: Mode) -> Region {
        Region::unregistered(Mapping::new(len, Backing::Heap).unwrap(), mode)
    }

    #[test]
    fn live_leases_never_overlap() {
        let region = region(100, Mode::Leased);
        let _held = region.carve(40, 20).unwrap();
        for (offset, len) in [(40, 20), (0, 41), (59, 1), (30, 50), (59, 41)] {
            assert!(
                matches!(region.carve(offset, len), Err(LeaseError::Overlap { held_offset: 40, .. })),
                "{offset} {len}"
            );
        }
        assert!(region.carve(0, 40).is_ok() && region.carve(60, 40).is_ok());
    }

    #[test]
    fn ranges_outside_are_refused() {
        let region = region(100, Mode::Leased);
        for (offset, len) in [(0, 101), (101, 0), (u64::MAX, 2), (100, 1)] {
            assert!(matches!(region.carve(offset, len), Err(LeaseError::OutOfBounds { .. })), "{offset} {len}");
        }
    }

    #[test]
    fn a_buffer_is_filled_on_another_thread() {
        let region = region(64, Mode::Leased);
        let (mut left, mut right) = (region.carve(0, 32).unwrap(), region.carve(32, 32).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| left.fill(1));
            scope.spawn(|| right.fill(2));
        });
        assert!(left.iter().all(|&byte| byte == 1) && right.iter().all(|&byte| byte == 2));
    }

    #[test]
    fn frozen_bytes_outlive_their_region_handle() {
        let region = region(64, Mode::Leased);
        let mut buffer = region.carve(8, 8).unwrap();
        drop(region);
        buffer.fill(9);
        let part = buffer.freeze().slice(2..=3);
        assert_eq!((&part[..], part.offset()), (&[9, 9][..], 10));
        let part = part.try_unwrap().unwrap_err();
        assert_eq!(part.region().lease_count(), 1);
    }

    #[test]
    fn a_raw_region_is_copied_in_and_out_and_never_leased() {
        let region = region(64, Mode::Raw(Rights::REMOTE_WRITE));
        region.write_at(60, b"abcd").unwrap();
        let mut out = [0; 3];
        region.read_at(61, &mut out).unwrap();
        assert_eq!(&out, b"bcd");
        assert!(region.write_at(61, b"abcd").is_err() && region.read_at(u64::MAX, &mut out).is_err());
        assert_eq!(region.carve(0, 1).unwrap_err(), LeaseError::WrongMode);
        assert_eq!(super::tests::region(4, Mode::Leased).read_at(0, &mut out).unwrap_err(), LeaseError::WrongMode);
    }

    #[test]
    fn threads_may_race_on_a_raw_region() {
        let region = region(64, Mode::Raw(Rights::NONE));
        std::thread::scope(|scope| {
            for value in 0..2 {
                let region = &region;
                scope.spawn(move || region.write_at(0, &[value; 64]).unwrap());
            }
            let mut out = [9; 64];
            region.read_at(0, &mut out).unwrap();
            assert!(out.iter().all(|&byte| byte < 2));
        });
    }

    #[test]
    fn empty_and_full_splits_keep_the_table_right() {
        let region = region(10, Mode::Leased);
        let mut whole = region.carve(0, 10).unwrap();
        let empty = whole.split_off(10).unwrap();
        let all = whole.split_off(0).unwrap();
        assert_eq!((whole.len(), all.len(), empty.len(), region.lease_count()), (0, 10, 0, 3));
        drop((whole, empty));
        assert!(region.carve(3, 1).is_err());
        drop(all);
        assert_eq!((region.lease_count(), region.carve(0, 10).is_ok()), (0, true));
        assert!(region.carve(0, 4).unwrap().split_off(5).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]
        /// Against a map of bytes: carve succeeds exactly when all bytes are free.
        #[test]
        fn the_lease_table_agrees_with_a_byte_map(ops in proptest::collection::vec((0u8..4, 0u64..70, 0u64..20, 0usize..8), 1..60)) {
            let region = region(64, Mode::Leased);
            let mut held: Vec<RegionBuf> = Vec::new();
            for (op, offset, len, pick) in ops {
                let owner = |held: &[RegionBuf], at: u64| held.iter().any(|lease| lease.offset() <= at && at < lease.offset() + lease.len() as u64);
                match op {
                    0 | 1 => {
                        let free = offset + len <= 64 && (offset..offset + len).all(|at| !owner(&held, at));
                        let carved = region.carve(offset, len);
                        prop_assert_eq!(carved.is_ok(), free);
                        held.extend(carved);
                    }
                    2 if !held.is_empty() => { held.swap_remove(pick % held.len()); }
                    3 if !held.is_empty() => {
                        let index = pick % held.len();
                        let at = len.min(held[index].len() as u64);
                        let rest = held[index].split_off(at).unwrap();
                        if pick % 2 == 0 {
                            let first = held.swap_remove(index);
                            held.push(first.unsplit(rest).unwrap());
                        } else { held.push(rest); }
                    }
                    _ => {}
                }
                prop_assert_eq!(region.lease_count(), held.len());
            }
        }
    }
}
