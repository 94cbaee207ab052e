//! Memory that stays where it is: mappings of this process, and the header page that peers on this host may look at.
//!
//! A mapping knows no leases and no rights; [`crate::region`] does. Invariants: `base` is valid for reads and writes of
//! `len` initialised bytes until the last `Arc` of the mapping is gone; a mapping with a shared descriptor is sealed, so
//! that nobody can shrink it, grow it, or map it writable a second time.
#![allow(unsafe_code)]

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::Layout;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::sync::full_fence;

/// Length of an ordinary page; lengths of mappings are rounded up to it.
pub const PAGE_LEN: usize = 4096;
/// The largest region.
pub const REGION_LEN_MAX: u64 = 1 << 46;

/// What a region's memory is backed by.
///
/// ```
/// use millpond_hal::mapping::Backing;
/// assert_eq!(Backing::default(), Backing::Memfd);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backing {
    /// A sealed memfd with ordinary pages: peers on this host can be shown it.
    #[default]
    Memfd,
    /// A sealed memfd with 2 MiB pages; fails where none are reserved.
    HugePages2MiB,
    /// This process's heap: nobody else can map it. For hosts without memfd and for interpreters.
    Heap,
}

/// Memory could not be had.
///
/// ```
/// use millpond_hal::mapping::{Backing, MapError, Mapping};
/// assert_eq!(Mapping::new(0, Backing::Heap).unwrap_err(), MapError::Len { len: 0 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// Zero, or larger than [`REGION_LEN_MAX`].
    #[error("a region of {len} bytes is not possible; ask for 1 to {REGION_LEN_MAX} bytes")]
    Len {
        /// What was asked for.
        len: u64,
    },
    /// The operating system refused.
    #[error("{action} of {len} bytes failed with system error {code}; free memory, or raise the limit it names")]
    System {
        /// What was tried.
        action: &'static str,
        /// How many bytes.
        len: u64,
        /// The error number.
        code: i32,
    },
}

enum Origin {
    Memfd(Arc<OwnedFd>),
    Heap(Layout),
    Adopted(#[allow(dead_code, reason = "held for its drop")] Box<dyn Send + Sync>),
}

/// Memory of this process that does not move. Freed when the last `Arc` is gone.
///
/// ```
/// use millpond_hal::mapping::{Backing, Mapping};
/// let mapping = Mapping::new(10_000, Backing::Heap).unwrap();
/// assert!(mapping.len() == 10_000 && mapping.shared().is_none());
/// ```
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    mapped_len: usize,
    origin: Origin,
}

// SAFETY:
// - `base` blocks both. The memory is this mapping's own until drop (or the adopter's promise says so), and nothing here
//   hands out references; who may touch which bytes is decided by leases, which are Send and Sync by their own proof.
//   Test: `region::tests::a_buffer_is_filled_on_another_thread`.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; `&Mapping` gives out the pointer only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory of `len` bytes. Page-aligned. Costs a system call or two; pages are touched at first use.
    pub fn new(len: u64, backing: Backing) -> Result<Self, MapError> {
        let (len, rounded) = rounded_len(len, backing)?;
        match backing {
            Backing::Heap => Self::heap(len, rounded),
            Backing::Memfd => Self::memfd(len, rounded, MemfdFlags::empty()),
            Backing::HugePages2MiB => Self::memfd(len, rounded, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB),
        }
    }

    /// Memory that somebody else made; `keeper` is dropped when the last user is gone, and may free it then.
    ///
    /// # Safety
    /// - `base .. base + len` is initialised and valid for reads and writes until `keeper` is dropped.
    /// - Until then nobody touches it except through this mapping.
    pub unsafe fn adopt(base: NonNull<u8>, len: NonZeroUsize, keeper: Box<dyn Send + Sync>) -> Self {
        Self { base, len: len.get(), mapped_len: len.get(), origin: Origin::Adopted(keeper) }
    }

    fn heap(len: usize, rounded: usize) -> Result<Self, MapError> {
        let failed = MapError::System { action: "allocation", len: len as u64, code: 12 };
        let layout = Layout::from_size_align(rounded, PAGE_LEN).map_err(|_| failed)?;
        // SAFETY: the size is not zero: `rounded_len` refuses zero and rounds up.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(failed)?;
        Ok(Self { base, len, mapped_len: rounded, origin: Origin::Heap(layout) })
    }

    fn memfd(len: usize, rounded: usize, flags: MemfdFlags) -> Result<Self, MapError> {
        let failed = |action| {
            move |error: rustix::io::Errno| MapError::System { action, len: len as u64, code: error.raw_os_error() }
        };
        let fd = rustix::fs::memfd_create("millpond", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags)
            .map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, rounded as u64).map_err(failed("ftruncate"))?;
        // SAFETY:
        // - a null hint lets the kernel choose a range that nobody uses.
        // - `fd` is the memfd made above, `rounded` bytes long.
        let base = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                rounded,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }
        .map_err(failed("mmap"))?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(MapError::System { action: "mmap", len: len as u64, code: 12 });
        };
        let mapping = Self { base, len, mapped_len: rounded, origin: Origin::Memfd(Arc::new(fd)) };
        if let Origin::Memfd(fd) = &mapping.origin {
            // After this nobody, peers and ourselves included, maps it writable again or changes its length.
            rustix::fs::fcntl_add_seals(fd, SEALS).map_err(failed("sealing"))?;
        }
        Ok(mapping)
    }

    /// First byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Usable bytes, as asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether there are none; never, but clippy asks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Has the system find pages for these bytes now, as far as they lie in the mapping, so that their first use does not
    /// wait for it: about 0.2 ms per MiB, and the memory counts as used from then on. Blocks; contents do not change.
    ///
    /// # Errors
    /// There are not enough pages, or the system (Linux before 5.14) cannot do this: first use does it then.
    pub fn populate(&self, offset: u64, len: u64) -> Result<(), MapError> {
        let first = usize::try_from(offset).unwrap_or(usize::MAX).min(self.mapped_len) / PAGE_LEN * PAGE_LEN;
        let end = usize::try_from(offset.saturating_add(len)).unwrap_or(usize::MAX).min(self.mapped_len);
        if end <= first {
            return Ok(());
        }
        // SAFETY:
        // - in range: `first` is at most `end`, `end` at most the mapped length, of a mapping that lives as long as `self`;
        //   page-aligned, since a mapping starts on a page (an adopted one that does not is refused by the kernel).
        // - this advice reads each page and writes nothing that could be told from not having been called.
        let advised = unsafe {
            let start = self.base.as_ptr().add(first);
            rustix::mm::madvise(start.cast(), end - first, rustix::mm::Advice::LinuxPopulateWrite)
        };
        advised.map_err(|error| MapError::System { action: "populating", len, code: error.raw_os_error() })
    }

    /// The sealed descriptor that peers on this host may map read-only, if there is one.
    #[must_use]
    pub fn shared(&self) -> Option<&Arc<OwnedFd>> {
        match &self.origin {
            Origin::Memfd(fd) => Some(fd),
            _ => None,
        }
    }
}

/// Every shared descriptor carries these seals; a receiver that checks for them cannot be hurt by a shrinking file.
pub const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

impl Drop for Mapping {
    fn drop(&mut self) {
        match &self.origin {
            Origin::Adopted(_) => {}
            // SAFETY: allocated in `heap` with this layout; nobody holds a pointer into it: leases hold the `Arc`.
            Origin::Heap(layout) => unsafe { std::alloc::dealloc(self.base.as_ptr(), *layout) },
            // SAFETY: mapped in `memfd` with this length; nobody holds a pointer into it: leases hold the `Arc`.
            Origin::Memfd(_) => unsafe {
                // An error here would leave the memory mapped: a leak, not a hazard.
                let _ = rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_len);
            },
        }
    }
}

impl core::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mapping")
            .field("len", &self.len)
            .field("shared", &self.shared().is_some())
            .finish_non_exhaustive()
    }
}

fn rounded_len(len: u64, backing: Backing) -> Result<(usize, usize), MapError> {
    let page = if backing == Backing::HugePages2MiB { 2 << 20 } else { PAGE_LEN };
    let wrong = MapError::Len { len };
    if len == 0 || len > REGION_LEN_MAX {
        return Err(wrong);
    }
    let len = usize::try_from(len).map_err(|_| wrong)?;
    Ok((len, len.checked_next_multiple_of(page).ok_or(wrong)?))
}

/// The words by which a reader of shared memory learns, after copying, that what it copied was still granted. One word per
/// exposure: its epoch while it holds, 0 otherwise. Written by its owner only.
///
/// ```
/// use millpond_hal::mapping::{Backing, HeaderPage};
/// let header = HeaderPage::new(8, Backing::Heap).unwrap();
/// header.set(3, 7);
/// assert_eq!((header.word(3), header.word(4), header.word(8)), (7, 0, 0));
/// ```
#[derive(Debug)]
pub struct HeaderPage {
    mapping: Mapping,
    words: u32,
}

impl HeaderPage {
    /// A header of `words` words, all 0.
    pub fn new(words: u32, backing: Backing) -> Result<Self, MapError> {
        Ok(Self { mapping: Mapping::new(u64::from(words) * 8, backing)?, words })
    }

    fn atomic(&self, index: u32) -> Option<&AtomicU64> {
        // SAFETY:
        // - in bounds: `index < words`, and the mapping has `8 * words` bytes; aligned: a mapping starts on a page.
        // - valid for the borrow: the mapping is owned by `self`. All access is atomic; peers only read.
        (index < self.words)
            .then(|| unsafe { AtomicU64::from_ptr(self.mapping.base.cast::<u64>().add(index as usize).as_ptr()) })
    }

    /// Sets a word, before everything the caller writes to memory afterwards. An index out of range is ignored.
    pub fn set(&self, index: u32, epoch: u64) {
        if let Some(word) = self.atomic(index) {
            word.store(epoch, Ordering::SeqCst);
            // Non-temporal stores that follow are ordered by a full fence only.
            full_fence();
        }
    }

    /// The word; 0 if the index is out of range.
    #[must_use]
    pub fn word(&self, index: u32) -> u64 {
        self.atomic(index).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// How many words there are.
    #[must_use]
    pub fn words(&self) -> u32 {
        self.words
    }

    /// The sealed descriptor that peers may map read-only, if there is one.
    #[must_use]
    pub fn shared(&self) -> Option<&Arc<OwnedFd>> {
        self.mapping.shared()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_lengths_are_refused() {
        for len in [0, REGION_LEN_MAX + 1, u64::MAX] {
            assert_eq!(Mapping::new(len, Backing::Memfd).unwrap_err(), MapError::Len { len });
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "memfd")]
    fn nobody_can_map_a_shared_descriptor_writable_or_shrink_it() {
        let mapping = Mapping::new(5000, Backing::Memfd).unwrap();
        let fd = mapping.shared().unwrap();
        // SAFETY: the kernel chooses an unused range; if the call succeeds, the test fails and the process ends.
        let map = |prot| unsafe { rustix::mm::mmap(core::ptr::null_mut(), 8192, prot, MapFlags::SHARED, fd, 0) };
        assert!(map(ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(rustix::fs::ftruncate(fd, 1).is_err());
        assert!(rustix::io::write(fd, b"x").is_err());
        let readable = map(ProtFlags::READ).unwrap();
        // SAFETY: mapped in the line above with this length.
        unsafe {
            assert!(rustix::mm::mprotect(readable, 8192, rustix::mm::MprotectFlags::WRITE).is_err());
            rustix::mm::munmap(readable, 8192).unwrap();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "madvise")]
    fn populated_memory_is_zeroed_and_what_was_written_stays() {
        for backing in [Backing::Memfd, Backing::Heap] {
            let mapping = Mapping::new(3 * PAGE_LEN as u64 + 5, backing).unwrap();
            // SAFETY: inside the mapping, which nobody else uses.
            unsafe { mapping.base().as_ptr().add(5000).write(7) };
            match mapping.populate(1, u64::MAX) {
                Ok(()) | Err(MapError::System { code: 22, .. }) => {}
                Err(other) => panic!("{other}"),
            }
            assert_eq!(mapping.populate(u64::MAX, 1), Ok(()), "nothing to do");
            // SAFETY: as above.
            unsafe { assert_eq!((*mapping.base().as_ptr(), *mapping.base().as_ptr().add(5000)), (0, 7)) };
        }
    }

    #[test]
    fn adopted_memory_is_given_back_when_the_mapping_is_gone() {
        let keeper = Arc::new(());
        let mut memory = vec![0u8; 64].into_boxed_slice();
        let base = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives the mapping in this function and is not touched meanwhile.
        let mapping = unsafe { Mapping::adopt(base, NonZeroUsize::new(64).unwrap(), Box::new(keeper.clone())) };
        assert_eq!(Arc::strong_count(&keeper), 2);
        drop(mapping);
        assert_eq!(Arc::strong_count(&keeper), 1);
    }
}
