//! The driver's functions, as far as the backend and its tests call them.
//!
//! What a caller passes is what the driver's documentation asks for: pointers to write through are valid for that, texts end
//! with a nul. Handles and addresses are looked up, and refused if nobody has them.
// The names are the driver's.
#![allow(non_snake_case)]

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::memory;
use crate::state::{CHANGED, HostFunction, State, StreamState, Work, code, state};
use crate::worker;

const CONTEXTS: usize = 0xC000_0000;

thread_local! {
    static CURRENT: RefCell<Vec<u16>> = const { RefCell::new(Vec::new()) };
}

/// The GPU whose context is current on this thread.
fn current() -> Option<u16> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

/// # Safety
/// - `at` is valid for a write of `T`, or null.
unsafe fn put<T>(at: *mut T, value: T) {
    if !at.is_null() {
        // SAFETY: the caller's duty. Nothing says that it is aligned.
        unsafe { at.write_unaligned(value) };
    }
}

/// # Safety
/// - `at` is valid for writes of `room` bytes.
unsafe fn put_text(at: *mut c_char, room: c_int, text: &str) {
    let len = text.len().min(usize::try_from(room).unwrap_or(0).saturating_sub(1));
    // SAFETY: `len` and the nul fit the room.
    unsafe {
        at.copy_from_nonoverlapping(text.as_ptr().cast(), len);
        at.add(len).write(0);
    }
}

fn answer(result: Result<(), c_int>) -> c_int {
    result.map_or_else(|code| code, |()| code::SUCCESS)
}

/// A call that is about the current context.
fn here(call: &str, act: impl FnOnce(&mut State, u16) -> Result<(), c_int>) -> c_int {
    let mut state = state();
    let ordinal = current();
    answer(state.called(call, ordinal).and_then(|()| act(&mut state, ordinal.ok_or(code::INVALID_CONTEXT)?)))
}

/// A call that is about no context.
fn anywhere(call: &str, act: impl FnOnce(&mut State) -> Result<(), c_int>) -> c_int {
    let mut state = state();
    answer(state.called(call, None).and_then(|()| act(&mut state)))
}

/// A call that waits for all work of the GPU, which the backend is not to make.
fn waits(call: &str) -> c_int {
    let mut state = state();
    let counted = state.called(call, current());
    while counted.is_ok() && state.streams.values().any(|stream| stream.is_busy || !stream.work.is_empty()) {
        state = CHANGED.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    answer(counted)
}

impl State {
    fn put_in(&mut self, stream: usize, work: Work) -> Result<(), c_int> {
        if stream == 0 {
            let ordinal = current().ok_or(code::INVALID_CONTEXT)?;
            self.streams.entry(0).or_insert(StreamState { ordinal, ..StreamState::default() });
        }
        let queue = self.streams.get_mut(&stream).filter(|queue| !queue.is_doomed).ok_or(code::INVALID_HANDLE)?;
        queue.work.push_back(work);
        worker::start(self);
        CHANGED.notify_all();
        Ok(())
    }

    fn known_gpu(&self, device: c_int) -> Result<u16, c_int> {
        u16::try_from(device).ok().filter(|ordinal| *ordinal < self.gpus).ok_or(code::INVALID_DEVICE)
    }
}

/// A copy, both of whose sides have to be there, page-locked if they are the host's.
fn copy(call: &str, target: usize, source: usize, len: usize, stream: usize, gpu: (bool, bool)) -> c_int {
    here(call, |state, _| {
        let fits = |address, is_gpu| {
            if is_gpu { state.allocation(address, len).is_some() } else { state.is_pinned(address, len) }
        };
        if len > 0 && !(fits(source, gpu.0) && fits(target, gpu.1)) {
            return Err(code::INVALID_VALUE);
        }
        state.put_in(stream, Work::Copy { source, target, len })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    anywhere("cuInit", |state| {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
        if let Some(code) = number("MILLPOND_FAKE_CUDA_INIT") {
            return Err(code);
        }
        if let Some(gpus) = number("MILLPOND_FAKE_CUDA_GPUS").and_then(|count: c_int| u16::try_from(count).ok()) {
            state.gpus = gpus;
        }
        if state.gpus == 0 { Err(code::NO_DEVICE) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int {
    let name = match error {
        code::SUCCESS => c"CUDA_SUCCESS",
        code::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        code::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        code::NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        code::INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        code::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        code::INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        code::NOT_READY => c"CUDA_ERROR_NOT_READY",
        code::ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        code::NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
        803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        _ => return code::INVALID_VALUE,
    };
    // SAFETY: see the module.
    unsafe { put(text, name.as_ptr()) };
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    anywhere("cuDeviceGetCount", |state| {
        // SAFETY: see the module.
        unsafe { put(count, c_int::from(state.gpus)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: see the module.
    anywhere("cuDeviceGet", |state| state.known_gpu(ordinal).map(|_| unsafe { put(device, ordinal) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(text: *mut c_char, room: c_int, device: c_int) -> c_int {
    anywhere("cuDeviceGetName", |state| {
        state.known_gpu(device)?;
        // SAFETY: see the module.
        unsafe { put_text(text, room, &format!("Fake GPU {device}")) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, room: c_int, device: c_int) -> c_int {
    anywhere("cuDeviceGetPCIBusId", |state| {
        let ordinal = state.known_gpu(device)?;
        // SAFETY: see the module.
        unsafe { put_text(text, room, &format!("0000:{:02X}:00.0", 0x3A + ordinal)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(len: *mut usize, device: c_int) -> c_int {
    // SAFETY: see the module.
    anywhere("cuDeviceTotalMem", |state| state.known_gpu(device).map(|_| unsafe { put(len, 16 << 30) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    anywhere("cuDeviceGetUuid", |state| {
        let ordinal = state.known_gpu(device)?;
        // SAFETY: see the module.
        unsafe { put(uuid, [0xF0 + u8::try_from(ordinal).unwrap_or(0); 16]) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    const DMA_BUF_SUPPORTED: c_int = 124;
    anywhere("cuDeviceGetAttribute", |state| {
        state.known_gpu(device)?;
        let known = (attribute == DMA_BUF_SUPPORTED).then_some(c_int::from(state.dmabuf));
        // SAFETY: see the module.
        known.map(|known| unsafe { put(value, known) }).ok_or(code::INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> c_int {
    anywhere("cuDevicePrimaryCtxRetain", |state| {
        let ordinal = state.known_gpu(device)?;
        // SAFETY: see the module.
        unsafe { put(context, CONTEXTS + usize::from(ordinal)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    let ordinal = context.checked_sub(CONTEXTS).and_then(|ordinal| u16::try_from(ordinal).ok());
    let Some(ordinal) = ordinal else { return code::INVALID_CONTEXT };
    CURRENT.with_borrow_mut(|stack| stack.push(ordinal));
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> c_int {
    let Some(ordinal) = CURRENT.with_borrow_mut(Vec::pop) else { return code::INVALID_CONTEXT };
    // SAFETY: see the module.
    unsafe { put(context, CONTEXTS + usize::from(ordinal)) };
    code::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    waits("cuCtxSynchronize")
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(_stream: usize) -> c_int {
    waits("cuStreamSynchronize")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> c_int {
    here("cuStreamCreate", |state, ordinal| {
        let id = state.name();
        state.streams.insert(id, StreamState { ordinal, ..StreamState::default() });
        // SAFETY: see the module.
        unsafe { put(stream, id) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    here("cuStreamDestroy", |state, _| {
        let known = state.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        known.is_doomed = true;
        if known.work.is_empty() && !known.is_busy {
            state.streams.remove(&stream);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> c_int {
    here("cuStreamWaitEvent", |state, _| {
        let event = Arc::clone(&state.events.get(&event).ok_or(code::INVALID_HANDLE)?.1);
        let recording = event.recorded.load(Ordering::Acquire);
        state.put_in(stream, Work::Wait(event, recording))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(stream: usize, function: Option<HostFunction>, data: *mut c_void) -> c_int {
    here("cuLaunchHostFunc", |state, _| {
        let function = function.ok_or(code::INVALID_VALUE)?;
        state.put_in(stream, Work::Call(function, data.expose_provenance()))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> c_int {
    here("cuEventCreate", |state, ordinal| {
        let id = state.name();
        state.events.insert(id, (ordinal, Arc::default()));
        // SAFETY: see the module.
        unsafe { put(event, id) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    here("cuEventDestroy", |state, _| state.events.remove(&event).map(drop).ok_or(code::INVALID_HANDLE))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: usize, stream: usize) -> c_int {
    here("cuEventRecord", |state, _| {
        let event = Arc::clone(&state.events.get(&event).ok_or(code::INVALID_HANDLE)?.1);
        let recording = event.recorded.fetch_add(1, Ordering::AcqRel) + 1;
        state.put_in(stream, Work::Record(event, recording))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: usize) -> c_int {
    here("cuEventQuery", |state, _| {
        let (_, event) = state.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        let recording = event.recorded.load(Ordering::Acquire);
        if event.has_happened(recording) { Ok(()) } else { Err(code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: usize) -> c_int {
    let (mut state, ordinal) = (state(), current());
    if let Err(code) = state.called("cuEventSynchronize", ordinal) {
        return code;
    }
    let Some((of, event)) = state.events.get(&event).map(|(of, event)| (*of, Arc::clone(event))) else {
        return code::INVALID_HANDLE;
    };
    let recording = event.recorded.load(Ordering::Acquire);
    while !event.has_happened(recording) {
        if let Some(code) = state.dead.get(&of) {
            return *code;
        }
        state = CHANGED.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int {
    here("cuMemAlloc", |state, ordinal| {
        if len == 0 {
            return Err(code::INVALID_VALUE);
        }
        let (base, allocation) = memory::allocate(ordinal, len)?;
        state.allocations.insert(base, allocation);
        // SAFETY: see the module.
        unsafe { put(address, base as u64) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    here("cuMemFree", |state, _| {
        let base = address as usize;
        let known = state.allocations.get(&base).filter(|allocation| allocation.imported.is_none());
        let len = known.ok_or(code::INVALID_VALUE)?.len;
        state.gives_back("cuMemFree", base, len);
        state.allocations.remove(&base).iter().for_each(|allocation| memory::free(base, allocation));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(base: *mut *mut c_void, len: usize, _flags: c_uint) -> c_int {
    here("cuMemHostAlloc", |state, _| {
        // SAFETY: no duties but those of the answer, which is looked at.
        let memory = unsafe { libc::aligned_alloc(4096, len.next_multiple_of(4096)) };
        if memory.is_null() {
            return Err(code::OUT_OF_MEMORY);
        }
        state.pinned.insert(memory.expose_provenance(), (len, true));
        // SAFETY: see the module.
        unsafe { put(base, memory) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(base: *mut c_void) -> c_int {
    here("cuMemFreeHost", |state, _| {
        let known = state.pinned.get(&base.addr()).filter(|(_, is_ours)| *is_ours);
        let (len, _) = *known.ok_or(code::INVALID_VALUE)?;
        state.gives_back("cuMemFreeHost", base.addr(), len);
        state.pinned.remove(&base.addr());
        // SAFETY: allocated by `cuMemHostAlloc`, and out of the table.
        unsafe { libc::free(base) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(base: *mut c_void, len: usize, _flags: c_uint) -> c_int {
    here("cuMemHostRegister", |state, _| {
        let start = base.expose_provenance();
        let overlaps = state.pinned.range(..start + len).next_back().is_some_and(|(at, (n, _))| at + n > start);
        if overlaps {
            return Err(code::ALREADY_REGISTERED);
        }
        state.pinned.insert(start, (len, false));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(base: *mut c_void) -> c_int {
    here("cuMemHostUnregister", |state, _| {
        let known = state.pinned.get(&base.addr()).filter(|(_, is_ours)| !*is_ours);
        let (len, _) = *known.ok_or(code::NOT_REGISTERED)?;
        state.gives_back("cuMemHostUnregister", base.addr(), len);
        state.pinned.remove(&base.addr());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(target: u64, source: *const c_void, len: usize, stream: usize) -> c_int {
    copy("cuMemcpyHtoDAsync", target as usize, source.expose_provenance(), len, stream, (false, true))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: u64, len: usize, stream: usize) -> c_int {
    copy("cuMemcpyDtoHAsync", target.expose_provenance(), source as usize, len, stream, (true, false))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, len: usize, stream: usize) -> c_int {
    copy("cuMemcpyDtoDAsync", target as usize, source as usize, len, stream, (true, true))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyPeerAsync(
    target: u64,
    _to: usize,
    source: u64,
    _from: usize,
    len: usize,
    stream: usize,
) -> c_int {
    copy("cuMemcpyPeerAsync", target as usize, source as usize, len, stream, (true, true))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(target: u64, _byte: u8, len: usize, stream: usize) -> c_int {
    here("cuMemsetD8Async", |state, _| {
        state.allocation(target as usize, len).ok_or(code::INVALID_VALUE)?;
        state.put_in(stream, Work::Clear { target: target as usize, len })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, address: u64) -> c_int {
    anywhere("cuMemGetAddressRange", |state| {
        let (at, allocation) = state.allocation(address as usize, 1).ok_or(code::INVALID_VALUE)?;
        // SAFETY: see the module.
        unsafe {
            put(base, at as u64);
            put(len, allocation.len);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(value: *mut u32, attribute: c_int, address: u64) -> c_int {
    const MEMORY_TYPE: c_int = 2;
    const DEVICE_ORDINAL: c_int = 9;
    anywhere("cuPointerGetAttribute", |state| {
        let (_, allocation) = state.allocation(address as usize, 1).ok_or(code::INVALID_VALUE)?;
        let known = match attribute {
            MEMORY_TYPE => 2,
            DEVICE_ORDINAL => u32::from(allocation.ordinal),
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: see the module.
        unsafe { put(value, known) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut [u8; 64], address: u64) -> c_int {
    here("cuIpcGetMemHandle", |state, _| {
        let known = state.allocations.get(&(address as usize)).filter(|allocation| allocation.imported.is_none());
        let bytes = memory::export(known.ok_or(code::INVALID_VALUE)?);
        // SAFETY: see the module.
        unsafe { put(handle, bytes) };
        Ok(())
    })
}

/// The driver's handle: 64 bytes, passed by value.
#[repr(C)]
struct IpcHandle([u8; 64]);

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, _flags: c_uint) -> c_int {
    here("cuIpcOpenMemHandle", |state, ordinal| {
        let open = state.allocations.iter_mut().find_map(|(base, allocation)| {
            let (count, of) = allocation.imported.as_mut()?;
            (*of == handle.0).then_some((*base, count))
        });
        let base = match open {
            Some((base, count)) => {
                *count += 1;
                base
            }
            None => {
                let (base, allocation) = memory::import(&handle.0, ordinal)?;
                state.allocations.insert(base, allocation);
                base
            }
        };
        // SAFETY: see the module.
        unsafe { put(address, base as u64) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    here("cuIpcCloseMemHandle", |state, _| {
        let base = address as usize;
        let allocation = state.allocations.get_mut(&base).ok_or(code::INVALID_VALUE)?;
        let len = allocation.len;
        let (count, _) = allocation.imported.as_mut().ok_or(code::INVALID_VALUE)?;
        *count -= 1;
        if *count == 0 {
            state.gives_back("cuIpcCloseMemHandle", base, len);
            state.allocations.remove(&base).iter().for_each(|allocation| memory::free(base, allocation));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetHandleForAddressRange(
    fd: *mut c_int,
    address: u64,
    len: usize,
    _kind: c_int,
    _flags: u64,
) -> c_int {
    here("cuMemGetHandleForAddressRange", |state, _| {
        if !state.dmabuf {
            return Err(code::NOT_SUPPORTED);
        }
        let on_pages = address.is_multiple_of(4096) && len.is_multiple_of(4096);
        let known = state.allocation(address as usize, len).filter(|_| on_pages).ok_or(code::INVALID_VALUE)?;
        // SAFETY: the allocation's descriptor is open; the answer is looked at.
        let copy = unsafe { libc::fcntl(known.1.fd, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(code::OUT_OF_MEMORY);
        }
        // SAFETY: see the module.
        unsafe { put(fd, copy) };
        Ok(())
    })
}
