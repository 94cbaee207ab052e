//! Memory that stays where it is: mappings of this process, and the header page that peers on this host may look at.
//!
//! A mapping knows no leases and no rights; [`crate::region`] does. Invariants: `base` is valid for reads and writes of
//! `len` initialised bytes until the last `Arc` of the mapping is gone, by the CPU unless it is memory of a device; a mapping with a shared descriptor is sealed, so
//! that nobody can shrink it, grow it, or map it writable a second time.
#![allow(unsafe_code)]

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::Layout;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millpond_core::batch::MemoryKind;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::sync::full_fence;

/// Length of an ordinary page; lengths of mappings are rounded up to it.
pub const PAGE_LEN: usize = 4096;
/// Lengths of huge pages.
const HUGE_2MIB: u64 = 2 << 20;
const HUGE_1GIB: u64 = 1 << 30;
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
    /// A sealed memfd with 2 MiB pages, or [`MapError::NoHugePages`] where too few are reserved.
    HugePages2MiB,
    /// The same with 1 GiB pages.
    HugePages1GiB,
    /// 2 MiB pages, or ordinary ones where too few are reserved; [`Mapping::downgrade`] then says why.
    PreferHugePages2MiB,
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
    /// Too few huge pages are free.
    #[error(
        "{needed} pages of {} MiB are needed and {free} are free; reserve them (`sysctl vm.nr_hugepages`, or \
         /sys/kernel/mm/hugepages), or do with ordinary pages",
        .page_len >> 20
    )]
    NoHugePages {
        /// Length of a page, in bytes.
        page_len: u64,
        /// Pages that the region takes.
        needed: u64,
        /// Pages that nobody has or has claimed, by what the kernel says.
        free: u64,
    },
    /// The memory was to lie on a NUMA node that is not there.
    #[error("there is no NUMA node {node} with memory here; there are {nodes}")]
    NoSuchNode {
        /// What was asked for.
        node: u16,
        /// How many there are.
        nodes: usize,
    },
    /// The heap was to lie on a NUMA node.
    #[error("memory of the heap is not bound to a NUMA node; use a memfd")]
    NotBindable,
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
    Adopted(#[allow(dead_code, reason = "held for its drop")] Keeper),
    /// Addressed by devices; where they can be had, a descriptor by which NICs reach it.
    Device {
        dmabuf: Option<Arc<OwnedFd>>,
        #[allow(dead_code, reason = "held for its drop")]
        keeper: Keeper,
    },
}

/// Frees or gives back what was adopted, when it is dropped.
pub type Keeper = Box<dyn Send + Sync>;

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
    kind: MemoryKind,
    /// Why it does not have the pages that were preferred.
    downgrade: Option<MapError>,
    /// The NUMA node that its pages come from, if it was bound to one.
    node: Option<u16>,
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
        let (exact, rounded) = rounded_len(len, backing)?;
        match backing {
            Backing::Heap => Self::heap(exact, rounded),
            Backing::Memfd => Self::memfd(exact, rounded, MemfdFlags::empty()),
            Backing::HugePages2MiB => Self::huge(exact, rounded, HUGE_2MIB, MemfdFlags::HUGE_2MB),
            Backing::HugePages1GiB => Self::huge(exact, rounded, HUGE_1GIB, MemfdFlags::HUGE_1GB),
            Backing::PreferHugePages2MiB => Self::new(len, Backing::HugePages2MiB).or_else(|why| {
                let mut ordinary = Self::new(len, Backing::Memfd)?;
                ordinary.downgrade = Some(why);
                Ok(ordinary)
            }),
        }
    }

    /// Memory as by [`Mapping::new`] whose pages come from that NUMA node and no other: what does not fit there fails to be
    /// had, by a signal at first use, or by an error of [`Mapping::populate`], which is the time to find out.
    ///
    /// # Errors
    /// As for `new`; [`MapError::NoSuchNode`]; [`MapError::NotBindable`] for the heap, whose pages others get afterwards.
    pub fn on_node(len: u64, backing: Backing, node: u16) -> Result<Self, MapError> {
        let nodes = memory_nodes();
        if !nodes.contains(&node) {
            return Err(MapError::NoSuchNode { node, nodes: nodes.len() });
        }
        if backing == Backing::Heap {
            return Err(MapError::NotBindable);
        }
        let mut mapping = Self::new(len, backing)?;
        mapping.bind(node)?;
        mapping.node = Some(node);
        Ok(mapping)
    }

    /// Lets pages of the whole mapping come from `node` only. No page of it was touched yet.
    fn bind(&self, node: u16) -> Result<(), MapError> {
        const BITS: usize = usize::BITS as usize;
        let mut mask = [0usize; (u16::MAX as usize + 1) / BITS];
        mask[node as usize / BITS] = 1 << (node as usize % BITS);
        // SAFETY:
        // - the range is this mapping's, which starts on a page; a policy changes no byte of it.
        // - the mask is read for the number of bits named (the kernel takes one off), and is as long.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.mapped_len,
                libc::MPOL_BIND as libc::c_long,
                mask.as_ptr(),
                (node as usize / BITS + 1) * BITS + 1,
                0 as libc::c_long,
            )
        };
        if answer == 0 {
            return Ok(());
        }
        let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        Err(MapError::System { action: "binding to a NUMA node", len: self.len as u64, code })
    }

    fn huge(len: usize, rounded: usize, page_len: u64, size: MemfdFlags) -> Result<Self, MapError> {
        Self::memfd(len, rounded, MemfdFlags::HUGETLB | size).map_err(|error| match error {
            // ENOMEM: too few are reserved; ENODEV, EINVAL, ENOSYS: this kernel has no pages of that length at all.
            MapError::System { code: 12 | 19 | 22 | 38, .. } => {
                MapError::NoHugePages { page_len, needed: rounded as u64 / page_len, free: free_huge_pages(page_len) }
            }
            other => other,
        })
    }

    /// Memory that somebody else made; `keeper` is dropped when the last user is gone, and may free it then.
    ///
    /// # Safety
    /// - `base .. base + len` is initialised and valid for reads and writes until `keeper` is dropped.
    /// - Until then nobody touches it except through this mapping.
    pub unsafe fn adopt(base: NonNull<u8>, len: NonZeroUsize, keeper: Keeper) -> Self {
        Self::of(base, len.get(), len.get(), Origin::Adopted(keeper))
    }

    /// As [`Mapping::adopt`], of page-locked memory that devices reach directly.
    ///
    /// # Safety
    /// - As for `adopt`; and the pages are locked until `keeper` is dropped.
    pub unsafe fn adopt_pinned(base: NonNull<u8>, len: NonZeroUsize, keeper: Keeper) -> Self {
        // SAFETY: the caller's promise is the same.
        let mut mapping = unsafe { Self::adopt(base, len, keeper) };
        mapping.kind = MemoryKind::Pinned;
        mapping
    }

    /// Memory of a device (`cuda:N`, `hip:N`) at that address of its own, with a dma-buf of it if there is one. The CPU never
    /// touches it: leases of it give no references, and only backends that move its kind take it.
    ///
    /// # Safety
    /// - `base .. base + len` is memory of the device that `kind` names, by the addresses of that device's driver, until
    ///   `keeper` is dropped; the dma-buf, if any, covers it from its own first byte.
    /// - Until then nobody touches it except through this mapping, or through what was told of it to others (IPC).
    #[must_use]
    pub unsafe fn adopt_device(
        base: NonNull<u8>,
        len: NonZeroUsize,
        kind: MemoryKind,
        dmabuf: Option<Arc<OwnedFd>>,
        keeper: Keeper,
    ) -> Self {
        let is_device = matches!(kind, MemoryKind::Cuda { .. } | MemoryKind::Hip { .. });
        assert!(is_device, "memory of kind {kind:?} is not a device's; use `adopt` or `adopt_pinned`");
        let mut mapping = Self::of(base, len.get(), len.get(), Origin::Device { dmabuf, keeper });
        mapping.kind = kind;
        mapping
    }

    fn of(base: NonNull<u8>, len: usize, mapped_len: usize, origin: Origin) -> Self {
        Self { base, len, mapped_len, origin, kind: MemoryKind::Host, downgrade: None, node: None }
    }

    fn heap(len: usize, rounded: usize) -> Result<Self, MapError> {
        let failed = MapError::System { action: "allocation", len: len as u64, code: 12 };
        let layout = Layout::from_size_align(rounded, PAGE_LEN).map_err(|_| failed)?;
        // SAFETY: the size is not zero: `rounded_len` refuses zero and rounds up.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(failed)?;
        Ok(Self::of(base, len, rounded, Origin::Heap(layout)))
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
        let mapping = Self::of(base, len, rounded, Origin::Memfd(Arc::new(fd)));
        // SAFETY: the range was mapped above, with this length; the advice changes nothing in this process. A forked child
        // does not have the mapping, so it cannot write what peers read; an unmapping there finds nothing, which is no error.
        unsafe { rustix::mm::madvise(base.as_ptr().cast(), rounded, rustix::mm::Advice::LinuxDontFork) }
            .map_err(failed("keeping it from forked children"))?;
        if let Origin::Memfd(fd) = &mapping.origin {
            // After this nobody, peers and ourselves included, maps it writable again or changes its length.
            rustix::fs::fcntl_add_seals(fd, SEALS).map_err(failed("sealing"))?;
        }
        Ok(mapping)
    }

    /// First byte; for memory of a device an address that only the device knows.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// What sort of memory it is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Whether the CPU may read and write it.
    #[must_use]
    pub fn is_for_cpu(&self) -> bool {
        !matches!(self.origin, Origin::Device { .. })
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

    /// Why it does not have the huge pages that were preferred; `None` if it has, or none were.
    #[must_use]
    pub fn downgrade(&self) -> Option<MapError> {
        self.downgrade
    }

    /// The NUMA node that its pages come from, if it was made by [`Mapping::on_node`].
    #[must_use]
    pub fn node(&self) -> Option<u16> {
        self.node
    }

    /// Has the system find pages for these bytes now, as far as they lie in the mapping, so that their first use does not
    /// wait for it: about 0.2 ms per MiB, and the memory counts as used from then on. Blocks; contents do not change.
    ///
    /// # Errors
    /// There are not enough pages, or the system (Linux before 5.14) cannot do this: first use does it then. Memory of a device
    /// is there already.
    pub fn populate(&self, offset: u64, len: u64) -> Result<(), MapError> {
        if !self.is_for_cpu() {
            return Ok(());
        }
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

    /// The dma-buf by which a NIC reaches it, if it is memory of a device that gave one.
    #[must_use]
    pub fn dmabuf(&self) -> Option<&Arc<OwnedFd>> {
        match &self.origin {
            Origin::Device { dmabuf, .. } => dmabuf.as_ref(),
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
            Origin::Adopted(_) | Origin::Device { .. } => {}
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
            .field("kind", &self.kind)
            .field("shared", &self.shared().is_some())
            .finish_non_exhaustive()
    }
}

/// Huge pages of that length that are free and not promised to anybody; 0 if the kernel does not say.
fn free_huge_pages(page_len: u64) -> u64 {
    let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_len >> 10);
    let count = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).ok()?.trim().parse::<u64>().ok();
    count("free_hugepages").unwrap_or(0).saturating_sub(count("resv_hugepages").unwrap_or(0))
}

/// NUMA nodes that have memory; node 0 alone where the kernel does not say.
#[must_use]
pub fn memory_nodes() -> Vec<u16> {
    let text = std::fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    let nodes = node_list(text.trim());
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// A list as sysfs writes it: `0-2,5`. What does not parse is left out.
fn node_list(text: &str) -> Vec<u16> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u16>().ok()?..=last.parse::<u16>().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

fn rounded_len(len: u64, backing: Backing) -> Result<(usize, usize), MapError> {
    let page = match backing {
        Backing::HugePages2MiB => HUGE_2MIB as usize,
        Backing::HugePages1GiB => HUGE_1GIB as usize,
        _ => PAGE_LEN,
    };
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

    /// Where huge pages are reserved they are used, sealed; where not, the refusal counts them and the preference tells why.
    #[test]
    #[cfg_attr(miri, ignore = "memfd")]
    fn huge_pages_are_had_or_refused_in_so_many_words() {
        let preferred = Mapping::new(3 << 20, Backing::PreferHugePages2MiB).unwrap();
        match Mapping::new(3 << 20, Backing::HugePages2MiB) {
            Ok(mapping) => {
                assert_eq!((mapping.len(), mapping.mapped_len), (3 << 20, 4 << 20));
                assert!(mapping.base().addr().get().is_multiple_of(2 << 20) && mapping.downgrade().is_none());
                let fd = mapping.shared().unwrap();
                assert!(rustix::fs::ftruncate(fd, 2 << 20).is_err() && rustix::fs::ftruncate(fd, 8 << 20).is_err());
                assert_eq!(rustix::fs::fcntl_get_seals(fd).unwrap() & SEALS, SEALS);
            }
            Err(error) => {
                eprintln!("SKIPPED: no huge pages here: {error}");
                let MapError::NoHugePages { page_len, needed, .. } = error else { panic!("{error}") };
                assert_eq!((page_len, needed), (2 << 20, 2));
                assert!(preferred.downgrade().is_some() && preferred.shared().is_some());
            }
        }
        // More than any machine has.
        let refused = Mapping::new(REGION_LEN_MAX, Backing::HugePages1GiB).unwrap_err();
        assert!(matches!(refused, MapError::NoHugePages { page_len, .. } if page_len == 1 << 30), "{refused}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "mbind")]
    fn memory_is_bound_to_the_node_that_was_named() {
        let node = memory_nodes()[0];
        for backing in [Backing::Memfd, Backing::PreferHugePages2MiB] {
            let mapping = match Mapping::on_node(2 << 20, backing, node) {
                Ok(mapping) => mapping,
                Err(MapError::System { code: 38, .. }) => return eprintln!("SKIPPED: this kernel has no NUMA"),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(mapping.node(), Some(node));
            mapping.populate(0, 2 << 20).unwrap();
            let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
            let line = format!("{:08x} bind:{node} ", mapping.base().addr());
            assert!(maps.lines().any(|found| format!("{found} ").starts_with(&line)), "{line} is not in\n{maps}");
        }
        let absent = Mapping::on_node(4096, Backing::Memfd, 4000).unwrap_err();
        assert!(matches!(absent, MapError::NoSuchNode { node: 4000, .. }), "{absent}");
        assert_eq!(Mapping::on_node(4096, Backing::Heap, node).unwrap_err(), MapError::NotBindable);
    }

    #[test]
    fn lists_of_nodes_are_read_as_the_kernel_writes_them() {
        assert_eq!(node_list("0"), [0]);
        assert_eq!(node_list("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert!(node_list("").is_empty() && node_list("x-").is_empty());
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
