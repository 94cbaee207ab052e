//! Memory of GPUs as mappings: allocated, adopted, page-locked, shown to another process, shown to a NIC.
#![allow(unsafe_code)]

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millpond_core::batch::MemoryKind;

use super::driver::{CudaAbsent, CudaError, Driver, GpuInfo};
use super::fence::StreamFence;
use crate::contract::Fence;
use crate::mapping::{Keeper, MapError, Mapping, PAGE_LEN};
use crate::region::Region;

/// Memory of a GPU is allocated in whole multiples of this: the driver cuts smaller ones out of a block, and whoever is shown
/// one by IPC is shown all of the block, other people's memory too.
pub const GRANULE_LEN: u64 = 2 << 20;

/// CUDA on this host: the opened driver. Clones are the same.
///
/// ```
/// use millpond_hal::backend::cuda::{Cuda, CudaDevice};
/// use millpond_hal::fabric::{Fabric, FabricOptions};
/// use millpond_hal::region::Mode;
/// let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// match Cuda::open() {
///     Ok(cuda) => {
///         fabric.add_device(Box::new(CudaDevice::new(&cuda).unwrap())).unwrap();
///         let region = fabric.insert_region(cuda.allocate(0, 1 << 20).unwrap(), Mode::Leased).unwrap();
///         assert!(region.is_for_devices());
///     }
///     Err(absent) => println!("cuda: {absent}"), // an ordinary answer
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Cuda {
    pub(super) driver: Arc<Driver>,
}

/// Memory of a GPU could not be had.
///
/// Example: `verify/fake-cuda/tests/unproven/memory.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaMemoryError {
    /// There is no GPU of that number in this process.
    #[error("there is no cuda:{ordinal} in this process")]
    NoSuchGpu {
        /// What was asked for.
        ordinal: u16,
    },
    /// A length that cannot be.
    #[error(transparent)]
    Len(#[from] MapError),
    /// The memory is of no GPU: the host's, or nobody's.
    #[error("address {address:#x} is not in memory of a GPU; register memory of the host as such")]
    NotOfGpu {
        /// Where.
        address: u64,
    },
    /// The memory is another GPU's.
    #[error("the memory is cuda:{found}'s, not cuda:{asked}'s; name GPUs by what this process counts")]
    OtherGpu {
        /// Whose it was taken for.
        asked: u16,
        /// Whose it is.
        found: u16,
    },
    /// The range reaches out of its allocation.
    #[error("{len} bytes at {address:#x} reach out of their allocation, which ends at {end:#x}")]
    OutOfAllocation {
        /// First byte.
        address: u64,
        /// Length in bytes.
        len: u64,
        /// One past the last byte of the allocation.
        end: u64,
    },
    /// The exporter's GPU is not visible in this process.
    #[error("the exporter's GPU is not visible in this process; look at CUDA_VISIBLE_DEVICES")]
    GpuNotVisible,
    /// The driver refused. Memory of a pool or of a mapping of one's own (`cuMemCreate`) cannot be exported so.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

/// Why memory cannot be shown to a NIC as a dma-buf: stage it through page-locked memory of the host instead.
///
/// Example: `verify/fake-cuda/tests/unproven/memory.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DmabufRefusal {
    /// It is memory of the host, which a NIC registers by address.
    #[error("the memory is no GPU's; a NIC registers memory of the host by its address")]
    NotOfGpu,
    /// The GPU, its driver (before 11.7) or the kernel has no dma-buf.
    #[error(
        "cuda:{ordinal} has no dma-buf: the open kernel modules of the driver, 515 or later, and Linux 5.12 are needed"
    )]
    NotSupported {
        /// Which GPU.
        ordinal: u16,
    },
    /// It does not start on a page.
    #[error("the memory at {address:#x} does not start on a page of {PAGE_LEN} bytes; allocate it so")]
    NotOnPage {
        /// Where.
        address: u64,
    },
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] CudaError),
}

/// What another process on this host opens memory of a GPU with. Whoever has it reaches the whole allocation, to read and to
/// write, until both processes gave it up: it is for processes that trust each other, and no grant bounds it.
///
/// Example: `verify/fake-cuda/tests/unproven/ipc.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    uuid: [u8; 16],
    handle: [u8; 64],
    offset: u64,
    len: u64,
}

impl IpcHandle {
    /// Length of [`IpcHandle::to_bytes`].
    pub const LEN: usize = 96;

    /// For the way to the other process.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..16].copy_from_slice(&self.uuid);
        bytes[16..80].copy_from_slice(&self.handle);
        bytes[80..88].copy_from_slice(&self.offset.to_le_bytes());
        bytes[88..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// As it came. Any bytes make a handle; whether it opens anything, the driver says.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let (mut uuid, mut handle, mut offset, mut len) = ([0; 16], [0; 64], [0; 8], [0; 8]);
        uuid.copy_from_slice(&bytes[..16]);
        handle.copy_from_slice(&bytes[16..80]);
        offset.copy_from_slice(&bytes[80..88]);
        len.copy_from_slice(&bytes[88..]);
        Self { uuid, handle, offset: u64::from_le_bytes(offset), len: u64::from_le_bytes(len) }
    }
}

/// Gives back what a mapping is made of.
struct Held {
    driver: Arc<Driver>,
    ordinal: u16,
    what: What,
}

enum What {
    Allocated(u64),
    Pinned(NonNull<u8>),
    Imported(u64),
}

// SAFETY:
// - the pointer of `Pinned` blocks both. It is only given back to the driver, once, by whichever thread drops the last user.
//   Test: `conformance` moves a posted fabric to another thread.
unsafe impl Send for Held {}
// SAFETY: as for Send; `&Held` gives nothing out.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: made by the call that each is the opposite of; the mapping's last user is gone, and devices hold one while
        // they copy.
        unsafe {
            match self.what {
                What::Allocated(address) => self.driver.free(self.ordinal, address),
                What::Pinned(base) => self.driver.free_pinned(self.ordinal, base),
                What::Imported(address) => self.driver.close_import(self.ordinal, address),
            }
        }
    }
}

fn exact(len: u64) -> Result<NonZeroUsize, CudaMemoryError> {
    let wrong = MapError::Len { len };
    if len > crate::mapping::REGION_LEN_MAX {
        return Err(wrong.into());
    }
    usize::try_from(len).ok().and_then(NonZeroUsize::new).ok_or_else(|| wrong.into())
}

/// A GPU's address as a pointer that nobody follows.
fn pointer(address: u64) -> Result<NonNull<u8>, CudaMemoryError> {
    NonNull::new(core::ptr::with_exposed_provenance_mut(address as usize)).ok_or(CudaMemoryError::NotOfGpu { address })
}

impl Cuda {
    /// Opens libcuda and looks for GPUs. Up to seconds, the first time in a process. Contexts are made at first use.
    ///
    /// # Errors
    /// There is no driver, or no GPU: with the reason.
    pub fn open() -> Result<Self, CudaAbsent> {
        Ok(Self { driver: Driver::open()? })
    }

    /// The GPUs, by number.
    #[must_use]
    pub fn gpus(&self) -> Vec<GpuInfo> {
        self.driver.infos().cloned().collect()
    }

    /// Cleared memory of a GPU, with a dma-buf where there can be one. Takes whole granules of [`GRANULE_LEN`]. At start only:
    /// the driver may wait for all work of the GPU, and freeing it, too.
    ///
    /// # Errors
    /// No such GPU, an impossible length, or no memory.
    pub fn allocate(&self, ordinal: u16, len: u64) -> Result<Mapping, CudaMemoryError> {
        self.known(ordinal)?;
        let len = exact(len)?;
        let rounded = len.get().next_multiple_of(GRANULE_LEN as usize);
        let address = self.driver.allocate(ordinal, rounded)?;
        let held = Held { driver: Arc::clone(&self.driver), ordinal, what: What::Allocated(address) };
        let (stream, cleared) = (self.driver.stream(ordinal)?, self.driver.event(ordinal)?);
        // SAFETY: allocated above, and nobody else's; the wait below comes before it is anybody's.
        unsafe { stream.clear(address, rounded)? };
        stream.record(&cleared)?;
        cleared.wait()?;
        self.map(ordinal, address, len, Box::new(held))
    }

    /// Page-locked memory of the host, allocated by that GPU's context, which all GPUs reach at the speed of their link.
    /// Registered with devices as [`MemoryKind::Pinned`]. At start only, as for [`Cuda::allocate`].
    ///
    /// # Errors
    /// No such GPU, an impossible length, or no memory.
    pub fn allocate_pinned(&self, ordinal: u16, len: u64) -> Result<Mapping, CudaMemoryError> {
        self.known(ordinal)?;
        let len = exact(len)?;
        let base = self.driver.allocate_pinned(ordinal, len.get())?;
        let held = Held { driver: Arc::clone(&self.driver), ordinal, what: What::Pinned(base) };
        // SAFETY: allocated above, `len` bytes long, nobody else's: written here, so that it is initialised.
        unsafe { base.write_bytes(0, len.get()) };
        // SAFETY: as above; the driver locked it until `held` is dropped.
        Ok(unsafe { Mapping::adopt_pinned(base, len, Box::new(held)) })
    }

    /// Memory of a GPU that somebody else allocated: a framework's KV cache. The driver is asked whether it is of that GPU, and
    /// how far it reaches.
    ///
    /// # Errors
    /// It is of no GPU, or of another one, or reaches out of its allocation; `keeper` is dropped then.
    ///
    /// # Safety
    /// - The range is allocated until `keeper` is dropped.
    /// - Until then others touch it only as their grants and leases of it say.
    pub unsafe fn adopt(
        &self,
        ordinal: u16,
        address: u64,
        len: u64,
        keeper: Keeper,
    ) -> Result<Mapping, CudaMemoryError> {
        self.known(ordinal)?;
        let len = exact(len)?;
        let (found, base, allocated) =
            self.driver.allocation_of(ordinal, address)?.ok_or(CudaMemoryError::NotOfGpu { address })?;
        if found != ordinal {
            return Err(CudaMemoryError::OtherGpu { asked: ordinal, found });
        }
        let end = base.saturating_add(allocated);
        if address.checked_add(len.get() as u64).is_none_or(|last| last > end) {
            return Err(CudaMemoryError::OutOfAllocation { address, len: len.get() as u64, end });
        }
        self.map(ordinal, address, len, keeper)
    }

    fn map(&self, ordinal: u16, address: u64, len: NonZeroUsize, keeper: Keeper) -> Result<Mapping, CudaMemoryError> {
        let base = pointer(address)?;
        let dmabuf = self.dmabuf_of(ordinal, address, len.get()).ok().map(Arc::new);
        let kind = MemoryKind::Cuda { device: ordinal };
        // SAFETY:
        // - the range is memory of that GPU until the keeper is dropped: allocated or opened for it, or the promise of `adopt`.
        // - nobody else touches it: it is new, or the same promise, or that of `import`.
        Ok(unsafe { Mapping::adopt_device(base, len, kind, dmabuf, keeper) })
    }

    /// What another process on this host opens the memory with.
    ///
    /// # Errors
    /// It is no GPU's, or of a sort that the driver does not export.
    pub fn export(&self, region: &Region) -> Result<IpcHandle, CudaMemoryError> {
        let (address, len) = (region.mapping().base().addr().get() as u64, region.len());
        let MemoryKind::Cuda { device: ordinal } = region.kind() else {
            return Err(CudaMemoryError::NotOfGpu { address });
        };
        let (_, base, _) = self.driver.allocation_of(ordinal, address)?.ok_or(CudaMemoryError::NotOfGpu { address })?;
        let handle = self.driver.export(ordinal, base)?;
        let uuid = self.driver.infos().nth(usize::from(ordinal)).map_or([0; 16], |gpu| gpu.uuid);
        Ok(IpcHandle { uuid, handle, offset: address - base, len })
    }

    /// Memory that another process exported. The same handle may be opened many times, and ranges of one allocation side by
    /// side: each mapping holds the allocation by itself. A process does not open what it exported.
    ///
    /// # Errors
    /// The GPU is not visible here, the handle opens nothing, or reaches out of what it opened.
    ///
    /// # Safety
    /// - The exporter keeps the memory until the mapping is gone.
    /// - Meanwhile its other users touch it only as its exporter and this process agreed.
    pub unsafe fn import(&self, handle: &IpcHandle) -> Result<Mapping, CudaMemoryError> {
        let len = exact(handle.len)?;
        let gpu = self.driver.infos().find(|gpu| gpu.uuid == handle.uuid).ok_or(CudaMemoryError::GpuNotVisible)?;
        let base = self.driver.import(gpu.ordinal, &handle.handle)?;
        let held = Held { driver: Arc::clone(&self.driver), ordinal: gpu.ordinal, what: What::Imported(base) };
        let (_, base, allocated) =
            self.driver.allocation_of(gpu.ordinal, base)?.ok_or(CudaMemoryError::NotOfGpu { address: base })?;
        let address = base.saturating_add(handle.offset);
        let end = base.saturating_add(allocated);
        if address.checked_add(handle.len).is_none_or(|last| last > end) {
            return Err(CudaMemoryError::OutOfAllocation { address, len: handle.len, end });
        }
        self.map(gpu.ordinal, address, len, Box::new(held))
    }

    /// A descriptor by which a NIC registers the memory. Regions have one already, where it can be had; this says why not.
    ///
    /// # Errors
    /// With the reason why there is none.
    pub fn dmabuf(&self, region: &Region) -> Result<OwnedFd, DmabufRefusal> {
        let MemoryKind::Cuda { device } = region.kind() else { return Err(DmabufRefusal::NotOfGpu) };
        self.dmabuf_of(device, region.mapping().base().addr().get() as u64, region.len() as usize)
    }

    fn dmabuf_of(&self, ordinal: u16, address: u64, len: usize) -> Result<OwnedFd, DmabufRefusal> {
        if !self.driver.infos().nth(usize::from(ordinal)).is_some_and(|gpu| gpu.dmabuf) {
            return Err(DmabufRefusal::NotSupported { ordinal });
        }
        if !address.is_multiple_of(PAGE_LEN as u64) {
            return Err(DmabufRefusal::NotOnPage { address });
        }
        Ok(self.driver.dmabuf(ordinal, address, len.next_multiple_of(PAGE_LEN))?)
    }

    /// A fence behind all that is in a stream of the GPU's primary context now; 0 is its null stream, 1 and 2 are the driver's
    /// names of the legacy and the per-thread one. A batch that waits for it
    /// ([`Batch::after`](crate::fabric::Batch::after)) starts when that work is done, and the stream is not held up.
    ///
    /// # Errors
    /// No such GPU, or the driver refused.
    ///
    /// # Safety
    /// - `stream` is 0, 1 or 2, or a stream of that GPU's primary context that exists.
    pub unsafe fn fence(&self, ordinal: u16, stream: usize) -> Result<Arc<dyn Fence>, CudaMemoryError> {
        self.known(ordinal)?;
        // SAFETY: the caller's promise.
        let event = unsafe { self.driver.record_behind(ordinal, stream)? };
        Ok(Arc::new(StreamFence::new(Arc::clone(&self.driver), event)))
    }

    fn known(&self, ordinal: u16) -> Result<(), CudaMemoryError> {
        if self.driver.knows(ordinal) { Ok(()) } else { Err(CudaMemoryError::NoSuchGpu { ordinal }) }
    }
}
