//! The calls of libcuda that the backend makes, and nothing else of it. The library is opened at run time.
//!
//! Addresses and objects of the driver are numbers here. Each call makes the primary context of its GPU current for its own
//! length, so that any thread may make it and no thread finds another context than it left. Nothing here waits for all work of
//! a context or of a stream; the one wait there is, is for one event.
#![allow(unsafe_code)]

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use core::mem::MaybeUninit;
use core::ptr::{NonNull, null_mut};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

/// What the backend cannot do without; what it can is asked for with [`has`].
const NEEDED: [&str; 30] = [
    "cuInit",
    "cuGetErrorName",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamCreate",
    "cuStreamWaitEvent",
    "cuLaunchHostFunc",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
];

const ALREADY_REGISTERED: i32 = 712;

/// A call of the driver failed.
///
/// ```
/// use millpond_hal::backend::cuda::CudaError;
/// let error = CudaError { call: "cuMemAlloc", code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY" };
/// assert_eq!(error.to_string(), "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({code})")]
pub struct CudaError {
    /// Which.
    pub call: &'static str,
    /// The driver's number for what was wrong.
    pub code: i32,
    /// The driver's name for it.
    pub name: &'static str,
}

/// Why there is no CUDA on this host.
///
/// ```
/// use millpond_hal::backend::cuda::{Cuda, CudaAbsent};
/// match Cuda::open() {
///     Ok(cuda) => assert!(!cuda.gpus().is_empty()),
///     Err(absent @ CudaAbsent::NoDriver { .. }) => assert!(absent.to_string().starts_with("no driver")),
///     Err(absent) => assert!(absent.to_string().starts_with("no device")),
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaAbsent {
    /// libcuda is not there, or is not one that can be used.
    #[error("no driver: {reason}")]
    NoDriver {
        /// What was found instead.
        reason: String,
    },
    /// The driver is there, and shows no GPU.
    #[error("no device: {reason}")]
    NoDevice {
        /// What it says.
        reason: String,
    },
}

/// A GPU, as its driver describes it.
///
/// Example: `verify/fake-cuda/tests/unproven/memory.rs` (`gpus`).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuInfo {
    /// Its number in this process, which `cuda:N` names. Another process may count otherwise.
    pub ordinal: u16,
    /// Its name.
    pub name: String,
    /// Its own name, the same in every process.
    pub uuid: [u8; 16],
    /// Its place on the PCI bus, as sysfs writes it: `0000:3b:00.0`.
    pub pci: String,
    /// Bytes of its memory.
    pub memory_len: u64,
    /// Whether it says that its memory can be a dma-buf.
    pub dmabuf: bool,
}

/// Where one side of a copy is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    /// Page-locked memory of this process.
    Host(NonNull<u8>),
    /// Memory of a GPU.
    Gpu { ordinal: u16, address: u64 },
}

/// The opened library and the GPUs it shows. Primary contexts are retained at first use, for the life of the process: a
/// framework beside us uses the same ones.
pub(crate) struct Driver {
    gpus: Vec<Gpu>,
}

struct Gpu {
    info: GpuInfo,
    device: sys::CUdevice,
    context: OnceLock<Result<usize, CudaError>>,
}

/// A stream that waits for no other one. Destroyed when dropped; what is in it runs to its end.
pub(crate) struct Stream {
    driver: Arc<Driver>,
    pub(crate) ordinal: u16,
    raw: usize,
}

/// An event without a clock, whose waiters sleep. Destroyed when dropped.
pub(crate) struct Event {
    driver: Arc<Driver>,
    ordinal: u16,
    raw: usize,
}

fn checked(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, result)) }
}

fn failed(call: &'static str, result: sys::CUresult) -> CudaError {
    let mut name = core::ptr::null();
    // SAFETY: `name` is valid for the write. What is written is null or a string of the library's, which is never closed.
    let name = unsafe {
        let known = sys::cuGetErrorName(result, &mut name) == sys::CUresult::CUDA_SUCCESS && !name.is_null();
        if known { CStr::from_ptr(name).to_str().unwrap_or("unnamed") } else { "unnamed" }
    };
    CudaError { call, code: result as i32, name }
}

fn as_pointer<T>(raw: usize) -> *mut T {
    core::ptr::with_exposed_provenance_mut(raw)
}

/// Whether the library has a function of that name.
fn has(name: &str) -> bool {
    // SAFETY: the library is there: callers come after `open` found it. The symbol is looked up and not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_ok() }
}

impl Driver {
    /// Opens the library and asks it for GPUs. Takes up to seconds the first time in a process.
    pub(crate) fn open() -> Result<Arc<Self>, CudaAbsent> {
        let no_driver = |reason| CudaAbsent::NoDriver { reason };
        // SAFETY: opening libcuda runs its initialisers, which the vendor made for that.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_driver("libcuda.so.1 cannot be opened; install the vendor's driver".to_owned()));
        }
        if let Some(missing) = NEEDED.iter().find(|name| !has(name)) {
            return Err(no_driver(format!("libcuda has no {missing}: it is too old, or not the vendor's; update it")));
        }
        // SAFETY: no duties.
        if let Err(error) = checked("cuInit", unsafe { sys::cuInit(0) }) {
            let reason = error.to_string();
            let no_device = error.code == sys::CUresult::CUDA_ERROR_NO_DEVICE as i32;
            return Err(if no_device { CudaAbsent::NoDevice { reason } } else { no_driver(reason) });
        }
        let gpus = Self::all_gpus().map_err(|error| no_driver(error.to_string()))?;
        if gpus.is_empty() {
            let reason = "the driver shows none; look at CUDA_VISIBLE_DEVICES and at nvidia-smi".to_owned();
            return Err(CudaAbsent::NoDevice { reason });
        }
        Ok(Arc::new(Self { gpus }))
    }

    fn all_gpus() -> Result<Vec<Gpu>, CudaError> {
        let mut count: c_int = 0;
        // SAFETY: `count` is valid for the write.
        checked("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        (0..u16::try_from(count).unwrap_or(0)).map(Self::gpu).collect()
    }

    fn gpu(ordinal: u16) -> Result<Gpu, CudaError> {
        const TEXT_LEN: usize = 128;
        let text = |bytes: &[u8; TEXT_LEN]| {
            let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
            text.to_string_lossy().to_lowercase()
        };
        let (mut device, mut memory_len, mut dmabuf) = (0, 0, 0);
        let (mut name, mut pci) = ([0u8; TEXT_LEN], [0u8; TEXT_LEN]);
        let mut uuid = MaybeUninit::<sys::CUuuid>::zeroed();
        let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        // SAFETY: each pointer is valid for what is written through it; the texts are as long as told. A driver that does not
        // know the attribute says so, and zero stays.
        let uuid = unsafe {
            checked("cuDeviceGet", sys::cuDeviceGet(&mut device, c_int::from(ordinal)))?;
            let len = TEXT_LEN as c_int;
            checked("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr().cast(), len, device))?;
            checked("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), len, device))?;
            checked("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut memory_len, device))?;
            checked("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device))?;
            let _ = sys::cuDeviceGetAttribute(&mut dmabuf, attribute, device);
            uuid.assume_init().bytes.map(|byte| byte as u8)
        };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let dmabuf = dmabuf == 1 && has("cuMemGetHandleForAddressRange");
        let info = GpuInfo { ordinal, name, uuid, pci: text(&pci), memory_len: memory_len as u64, dmabuf };
        Ok(Gpu { info, device, context: OnceLock::new() })
    }

    pub(crate) fn infos(&self) -> impl ExactSizeIterator<Item = &GpuInfo> + Clone {
        self.gpus.iter().map(|gpu| &gpu.info)
    }

    pub(crate) fn knows(&self, ordinal: u16) -> bool {
        usize::from(ordinal) < self.gpus.len()
    }

    fn context(&self, ordinal: u16) -> Result<usize, CudaError> {
        let no_such = CudaError { call: "cuDeviceGet", code: 101, name: "CUDA_ERROR_INVALID_DEVICE" };
        let gpu = self.gpus.get(usize::from(ordinal)).ok_or(no_such)?;
        *gpu.context.get_or_init(|| {
            let mut context = null_mut();
            // SAFETY: `context` is valid for the write; the device is one that the driver named.
            let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, gpu.device) };
            checked("cuDevicePrimaryCtxRetain", retained).map(|()| context.expose_provenance())
        })
    }

    /// Makes calls with the primary context of a GPU current.
    fn within<T>(&self, ordinal: u16, calls: impl FnOnce() -> Result<T, CudaError>) -> Result<T, CudaError> {
        let context = self.context(ordinal)?;
        // SAFETY: the context was retained and is not released.
        checked("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(as_pointer(context)) })?;
        let result = calls();
        let mut popped = null_mut();
        // SAFETY: `popped` is valid for the write; what was pushed above is on top: no call in between pushes.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        result
    }

    pub(crate) fn stream(self: &Arc<Self>, ordinal: u16) -> Result<Stream, CudaError> {
        let mut raw = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is valid for the write.
        self.within(ordinal, || checked("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) }))?;
        Ok(Stream { driver: Arc::clone(self), ordinal, raw: raw.expose_provenance() })
    }

    pub(crate) fn event(self: &Arc<Self>, ordinal: u16) -> Result<Event, CudaError> {
        use sys::CUevent_flags_enum::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
        let mut raw = null_mut();
        let flags = CU_EVENT_BLOCKING_SYNC as u32 | CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `raw` is valid for the write.
        self.within(ordinal, || checked("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) }))?;
        Ok(Event { driver: Arc::clone(self), ordinal, raw: raw.expose_provenance() })
    }

    /// Memory of a GPU, not cleared.
    pub(crate) fn allocate(&self, ordinal: u16, len: usize) -> Result<u64, CudaError> {
        let mut address = 0;
        // SAFETY: `address` is valid for the write.
        self.within(ordinal, || checked("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, len) }))?;
        Ok(address)
    }

    /// # Safety
    /// - The address came from [`Driver::allocate`], and nothing uses it any more.
    pub(crate) unsafe fn free(&self, ordinal: u16, address: u64) {
        // SAFETY: the caller's duty. A driver that refuses keeps the memory, which harms nobody.
        let _ = self.within(ordinal, || checked("cuMemFree", unsafe { sys::cuMemFree_v2(address) }));
    }

    /// Page-locked memory of the host that every GPU reaches.
    pub(crate) fn allocate_pinned(&self, ordinal: u16, len: usize) -> Result<NonNull<u8>, CudaError> {
        let mut base = null_mut();
        self.within(ordinal, || {
            // SAFETY: `base` is valid for the write.
            checked("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut base, len, sys::CU_MEMHOSTALLOC_PORTABLE) })
        })?;
        let nothing = CudaError { call: "cuMemHostAlloc", code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY" };
        NonNull::new(base.cast()).ok_or(nothing)
    }

    /// # Safety
    /// - The base came from [`Driver::allocate_pinned`], and nothing uses it any more.
    pub(crate) unsafe fn free_pinned(&self, ordinal: u16, base: NonNull<u8>) {
        // SAFETY: the caller's duty. What is not freed is a leak, not a hazard.
        let _ = self.within(ordinal, || checked("cuMemFreeHost", unsafe { sys::cuMemFreeHost(base.as_ptr().cast()) }));
    }

    /// Locks pages of the host for the GPUs. `false` if somebody had done so before.
    ///
    /// # Safety
    /// - The memory stays mapped until [`Driver::unpin`] of it.
    pub(crate) unsafe fn pin(&self, ordinal: u16, base: NonNull<u8>, len: usize) -> Result<bool, CudaError> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        let pinned = self.within(ordinal, || {
            // SAFETY: the caller's duty.
            checked("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(base.as_ptr().cast(), len, flags) })
        });
        match pinned {
            Err(error) if error.code == ALREADY_REGISTERED => Ok(false),
            pinned => pinned.map(|()| true),
        }
    }

    /// # Safety
    /// - [`Driver::pin`] said `true` for that base, and no copy uses it any more.
    pub(crate) unsafe fn unpin(&self, ordinal: u16, base: NonNull<u8>) {
        let unpinned = self.within(ordinal, || {
            // SAFETY: the caller's duty.
            checked("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(base.as_ptr().cast()) })
        });
        // Pages that stay locked harm nobody.
        let _ = unpinned;
    }

    /// The GPU and the allocation, `(ordinal, base, len)`, that an address lies in; `None` if it is of no GPU. Asked in the
    /// context of the GPU that it should be of: a context of another one would take memory there.
    pub(crate) fn allocation_of(&self, gpu: u16, address: u64) -> Result<Option<(u16, u64, u64)>, CudaError> {
        use sys::CUpointer_attribute_enum::{CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
        let ask = |attribute| {
            let mut answer = 0u32;
            let into = (&raw mut answer).cast::<c_void>();
            // SAFETY: both attributes are written as 32 bits. Any address may be asked about.
            let asked = unsafe { sys::cuPointerGetAttribute(into, attribute, address) };
            checked("cuPointerGetAttribute", asked).map(|()| answer)
        };
        self.within(gpu, || {
            // An address that the driver has never seen is an invalid value: memory of the host, or nothing.
            if ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE) != Ok(sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32) {
                return Ok(None);
            }
            let ordinal = u16::try_from(ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?).unwrap_or(u16::MAX);
            let (mut base, mut len) = (0, 0);
            // SAFETY: both are valid for the write.
            checked("cuMemGetAddressRange", unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut len, address) })?;
            Ok(Some((ordinal, base, len as u64)))
        })
    }

    /// What another process opens an allocation with.
    pub(crate) fn export(&self, ordinal: u16, base: u64) -> Result<[u8; 64], CudaError> {
        let mut handle = MaybeUninit::<sys::CUipcMemHandle>::zeroed();
        // SAFETY: the handle is valid for the write, and all zeros are a value of it.
        let handle = self.within(ordinal, || unsafe {
            checked("cuIpcGetMemHandle", sys::cuIpcGetMemHandle(handle.as_mut_ptr(), base))?;
            Ok(handle.assume_init())
        })?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Opens what another process exported: the same address each time, which is counted.
    pub(crate) fn import(&self, ordinal: u16, handle: &[u8; 64]) -> Result<u64, CudaError> {
        let mut address = 0;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as core::ffi::c_char) };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        self.within(ordinal, || {
            // SAFETY: `address` is valid for the write; a handle that is none is refused.
            checked("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) })
        })?;
        Ok(address)
    }

    /// # Safety
    /// - The address came from [`Driver::import`], and whoever got it there uses it no more.
    pub(crate) unsafe fn close_import(&self, ordinal: u16, address: u64) {
        // SAFETY: the caller's duty. What stays open harms nobody here.
        let _ = self.within(ordinal, || checked("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(address) }));
    }

    /// A dma-buf of a range that starts and ends on pages of the host. The GPU said that it can: see [`GpuInfo::dmabuf`].
    pub(crate) fn dmabuf(&self, ordinal: u16, address: u64, len: usize) -> Result<OwnedFd, CudaError> {
        let mut fd: c_int = -1;
        let kind = sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        self.within(ordinal, || {
            // SAFETY: for this kind of handle a descriptor is written; `fd` is valid for that.
            let made = unsafe { sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, len, kind, 0) };
            checked("cuMemGetHandleForAddressRange", made)
        })?;
        // SAFETY: the driver made it for us just now, and keeps none.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// An event behind what is in somebody's stream now. The null stream is 0.
    ///
    /// # Safety
    /// - `stream` is 0, or a stream of the primary context of that GPU, and exists.
    pub(crate) unsafe fn record_behind(self: &Arc<Self>, ordinal: u16, stream: usize) -> Result<Event, CudaError> {
        let event = self.event(ordinal)?;
        self.within(ordinal, || {
            // SAFETY: the event was made above; the stream is the caller's duty.
            checked("cuEventRecord", unsafe { sys::cuEventRecord(as_pointer(event.raw), as_pointer(stream)) })
        })?;
        Ok(event)
    }
}

impl Stream {
    fn within(&self, call: &'static str, calls: impl FnOnce() -> sys::CUresult) -> Result<(), CudaError> {
        self.driver.within(self.ordinal, || checked(call, calls()))
    }

    /// Puts a copy into the stream.
    ///
    /// # Safety
    /// - Both sides are valid for `len` bytes until the copy is done, the source for reads, the target for writes, and do not
    ///   overlap. Host memory is page-locked, with one registration for the whole range.
    pub(crate) unsafe fn copy(&self, source: Side, target: Side, len: usize) -> Result<(), CudaError> {
        let raw = as_pointer(self.raw);
        match (source, target) {
            (Side::Host(source), Side::Gpu { address, .. }) => self.within("cuMemcpyHtoDAsync", || {
                // SAFETY: the caller's duties.
                unsafe { sys::cuMemcpyHtoDAsync_v2(address, source.as_ptr().cast(), len, raw) }
            }),
            (Side::Gpu { address, .. }, Side::Host(target)) => self.within("cuMemcpyDtoHAsync", || {
                // SAFETY: the caller's duties.
                unsafe { sys::cuMemcpyDtoHAsync_v2(target.as_ptr().cast(), address, len, raw) }
            }),
            (Side::Gpu { ordinal: from, address: source }, Side::Gpu { ordinal: to, address: target })
                if from == to =>
            {
                // SAFETY: the caller's duties.
                self.within("cuMemcpyDtoDAsync", || unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, len, raw) })
            }
            (Side::Gpu { ordinal: from, address: source }, Side::Gpu { ordinal: to, address: target }) => {
                let (from, to) = (self.driver.context(from)?, self.driver.context(to)?);
                self.within("cuMemcpyPeerAsync", || {
                    // SAFETY: the caller's duties; the contexts are retained.
                    unsafe { sys::cuMemcpyPeerAsync(target, as_pointer(to), source, as_pointer(from), len, raw) }
                })
            }
            (Side::Host(_), Side::Host(_)) => {
                Err(CudaError { call: "cuMemcpyAsync", code: 1, name: "CUDA_ERROR_INVALID_VALUE" })
            }
        }
    }

    /// Clears memory of the stream's GPU.
    ///
    /// # Safety
    /// - The range is the caller's until that is done.
    pub(crate) unsafe fn clear(&self, address: u64, len: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's duty.
        self.within("cuMemsetD8Async", || unsafe { sys::cuMemsetD8Async(address, 0, len, as_pointer(self.raw)) })
    }

    /// Has the event happen when all that is in the stream now is done.
    pub(crate) fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both exist, of one context: the backend pairs them by GPU.
        self.within("cuEventRecord", || unsafe { sys::cuEventRecord(as_pointer(event.raw), as_pointer(self.raw)) })
    }

    /// Holds what is put into the stream from now on until the event has happened.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let (stream, event) = (as_pointer(self.raw), as_pointer(event.raw));
        // SAFETY: both exist.
        self.within("cuStreamWaitEvent", || unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
    }

    /// Has one added to an eventfd when all that is in the stream now is done.
    pub(crate) fn notify(&self, wake: &Arc<OwnedFd>) -> Result<(), CudaError> {
        let data = Arc::into_raw(Arc::clone(wake)).cast_mut().cast::<c_void>();
        // SAFETY: the stream exists; `add_one` takes the reference that `data` is, once.
        let launched = self
            .within("cuLaunchHostFunc", || unsafe { sys::cuLaunchHostFunc(as_pointer(self.raw), Some(add_one), data) });
        if launched.is_err() {
            // SAFETY: from `into_raw` above; the driver refused it, so nobody else takes it.
            drop(unsafe { Arc::from_raw(data.cast::<OwnedFd>()) });
        }
        launched
    }
}

/// What the driver calls on a thread of its own: no call of the driver, no wait, no panic.
///
/// # Safety
/// - `data` is a reference to an eventfd, from `Arc::into_raw`, which this takes.
unsafe extern "C" fn add_one(data: *mut c_void) {
    // SAFETY: the duty above.
    let wake = unsafe { Arc::from_raw(data.cast::<OwnedFd>()) };
    // A full counter is readable already.
    let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
}

impl Event {
    pub(crate) fn ordinal(&self) -> u16 {
        self.ordinal
    }

    /// Whether it has happened. Never waits.
    pub(crate) fn has_happened(&self) -> Result<bool, CudaError> {
        self.driver.within(self.ordinal, || {
            // SAFETY: the event exists.
            match unsafe { sys::cuEventQuery(as_pointer(self.raw)) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                result => checked("cuEventQuery", result).map(|()| true),
            }
        })
    }

    /// Sleeps until it has happened: as long as the copies before it take.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.driver.within(self.ordinal, || {
            // SAFETY: the event exists.
            checked("cuEventSynchronize", unsafe { sys::cuEventSynchronize(as_pointer(self.raw)) })
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `Driver::stream`, destroyed once. An error leaves it: a leak, not a hazard.
        let _ = self.within("cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(as_pointer(self.raw)) });
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.driver.within(self.ordinal, || {
            // SAFETY: made in `Driver::event`, destroyed once; the driver keeps it while work before it runs.
            checked("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(as_pointer(self.raw)) })
        });
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.infos()).finish()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream(cuda:{})", self.ordinal)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event(cuda:{})", self.ordinal)
    }
}
