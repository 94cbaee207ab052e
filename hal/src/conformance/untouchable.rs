//! Host memory that stands in for a device's: at its address the CPU may not touch it, so that whoever does ends at once.
//!
//! Each mapping is made of one memfd, mapped without any right where its regions say that it lies, and a second time where
//! only the suite, and a backend that plays the device, look. A backend that takes a device's address for its own faults at
//! the first byte, and does so on a machine without a device.
#![allow(unsafe_code)]

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use millpond_core::batch::MemoryKind;
use parking_lot::Mutex;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::Supply;
use crate::copy::{copy, copy_in};
use crate::mapping::{Mapping, PAGE_LEN};
use crate::region::Region;

/// A supply of memory that the CPU may not touch. Clones know the same mappings.
///
/// ```
/// use millpond_core::batch::{MemoryKind, Rights};
/// use millpond_hal::conformance::{Supply, untouchable::Untouchable};
/// use millpond_hal::region::{Mode, Region};
/// let device = Untouchable::new(MemoryKind::Cuda { device: 0 });
/// let region = Region::unregistered(device.mapping(10_000), Mode::Raw(Rights::NONE));
/// assert!(region.write_at(0, b"no").is_err()); // not even by a copy
/// device.write(&region, 9_000, b"yes");
/// let mut back = [0; 3];
/// device.read(&region, 9_000, &mut back);
/// assert_eq!(&back, b"yes");
/// ```
#[derive(Clone)]
pub struct Untouchable {
    kind: MemoryKind,
    /// By the address where it may not be touched.
    made: Arc<Mutex<BTreeMap<usize, Weak<Twice>>>>,
}

/// One memfd, mapped twice.
struct Twice {
    forbidden: NonNull<u8>,
    open: NonNull<u8>,
    len: usize,
}

// SAFETY:
// - the pointers block both. Both mappings live as long as this value and are reached by copies only, which may race like
//   those of any raw region. Test: `conformance` moves a posted fabric to another thread.
unsafe impl Send for Twice {}
// SAFETY: as for Send.
unsafe impl Sync for Twice {}

impl Drop for Twice {
    fn drop(&mut self) {
        for base in [self.forbidden, self.open] {
            // SAFETY: mapped in `Twice::new` with this length; whoever copies holds the `Arc`.
            // An error would leave it mapped: a leak, not a hazard.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), self.len) };
        }
    }
}

impl Twice {
    fn new(len: usize) -> Self {
        let fd = rustix::fs::memfd_create("millpond untouchable", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&fd, len as u64).expect("memory for the test");
        let map = |rights| {
            // SAFETY: a null hint lets the kernel choose a range that nobody uses; the descriptor is `len` bytes long.
            let base = unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, rights, MapFlags::SHARED, &fd, 0) };
            NonNull::new(base.expect("room in the address space").cast::<u8>()).expect("not at address 0")
        };
        Self { forbidden: map(ProtFlags::empty()), open: map(ProtFlags::READ | ProtFlags::WRITE), len }
    }
}

impl Untouchable {
    /// Memory that passes for that kind of a device's.
    #[must_use]
    pub fn new(kind: MemoryKind) -> Self {
        Self { kind, made: Arc::default() }
    }

    /// Where the byte at a forbidden address can be reached, if it is of a mapping that lives: what the hardware of a backend
    /// that plays the device does with addresses.
    #[must_use]
    pub fn reach(&self, address: NonNull<u8>) -> Option<NonNull<u8>> {
        let made = self.made.lock();
        let twice = made.range(..=address.addr().get()).next_back()?.1.upgrade()?;
        let offset = address.addr().get() - twice.forbidden.addr().get();
        // SAFETY: at most one past the end of the open mapping, which is as long.
        (offset <= twice.len).then(|| unsafe { twice.open.add(offset) })
    }

    fn place(&self, region: &Region, offset: u64, len: usize) -> NonNull<u8> {
        assert!(offset + len as u64 <= region.len(), "the suite stays inside its regions");
        let base = region.mapping().base();
        self.reach(base).expect("a region of this supply").map_addr(|address| address.saturating_add(offset as usize))
    }
}

impl Supply for Untouchable {
    fn mapping(&self, len: u64) -> Mapping {
        let exact = NonZeroUsize::new(len as usize).expect("a length");
        let twice = Arc::new(Twice::new(exact.get().next_multiple_of(PAGE_LEN)));
        let base = twice.forbidden;
        self.made.lock().insert(base.addr().get(), Arc::downgrade(&twice));
        // SAFETY:
        // - the addresses are those of the memory that stands in for the device's, until the keeper unmaps them.
        // - it was mapped just now, so nobody else has it; the suite reaches it through the second mapping, as a device would.
        unsafe { Mapping::adopt_device(base, exact, self.kind, None, Box::new(twice)) }
    }

    fn read(&self, region: &Region, offset: u64, into: &mut [u8]) {
        let source = self.place(region, offset, into.len());
        // SAFETY: inside the open mapping, which lives as long as the region's; `into` is elsewhere.
        unsafe { copy(source.as_ptr(), into.as_mut_ptr(), into.len()) };
    }

    fn write(&self, region: &Region, offset: u64, from: &[u8]) {
        let target = self.place(region, offset, from.len());
        // SAFETY: as in `read`, with the roles exchanged.
        unsafe { copy_in(from, target.as_ptr()) };
    }
}
