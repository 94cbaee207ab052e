//! Loads the fake before anybody asks for libcuda, and talks to it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use millpond_core::time::Instant;
use millpond_hal::backend::cuda::{Cuda, CudaDevice};
use millpond_hal::conformance::Supply;
use millpond_hal::contract::{Connection, LinkId};
use millpond_hal::fabric::{Fabric, FabricOptions, LinkOptions};
use millpond_hal::mapping::Mapping;
use millpond_hal::region::Region;
use parking_lot::{Mutex, MutexGuard};

/// Whether the machine's own driver is asked.
pub(crate) fn is_real() -> bool {
    std::env::var("MILLPOND_CUDA").is_ok_and(|value| value == "real")
}

/// The library, which cargo puts beside the tests of its package.
pub(crate) fn path() -> PathBuf {
    let tests = std::env::current_exe().expect("the test's own path");
    tests.with_file_name("libmillpond_fake_cuda.so")
}

/// The loaded library.
pub(crate) struct Fake {
    library: usize,
    _alone: MutexGuard<'static, ()>,
}

fn library() -> usize {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let name = CString::new(path().into_os_string().into_encoded_bytes()).expect("no nul in a path");
        // SAFETY: its initialisers are Rust's own.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!library.is_null(), "{} cannot be loaded", path().display());
        library.expose_provenance()
    })
}

/// Loads it if need be, for one test at a time, with nothing left of the one before. `None`, aloud, when a GPU is asked.
pub(crate) fn alone(seed: u64) -> Option<Fake> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock();
    if is_real() {
        eprintln!("SKIPPED: this test needs the fake driver's hands, and a GPU is asked");
        return None;
    }
    let fake = Fake { library: library(), _alone: alone };
    fake.reset(seed);
    Some(fake)
}

/// A thread that lets the fake go; see [`Fake::go_when_waited_for`].
pub(crate) struct Going {
    given_up: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Going {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only counts");
        }
    }
}

impl Fake {
    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is loaded and never closed; the name is a string.
        let found = unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(self.library), name.as_ptr()) };
        assert!(!found.is_null(), "the fake has no {name:?}");
        found
    }

    pub(crate) fn count(&self, call: &CStr) -> u64 {
        // SAFETY: `control.rs` declares it so; `call` is a string.
        unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> u64>(self.symbol(c"fake_cuda_count"))(
                call.as_ptr(),
            )
        }
    }

    pub(crate) fn fail(&self, call: &CStr, code: c_int, after: u64) {
        // SAFETY: as above.
        unsafe {
            let fail = self.symbol(c"fake_cuda_fail");
            std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char, c_int, u64)>(fail)(
                call.as_ptr(),
                code,
                after,
            );
        }
    }

    fn nothing(&self, name: &CStr) {
        // SAFETY: `control.rs` declares those that are called here so.
        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn()>(self.symbol(name))() }
    }

    fn number(&self, name: &CStr, number: u64) {
        // SAFETY: as above; a narrower parameter takes the low bits of the register.
        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(u64)>(self.symbol(name))(number) }
    }

    fn asked(&self, name: &CStr) -> u64 {
        // SAFETY: as above.
        unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(self.symbol(name))() }
    }

    /// Does `steps` pieces of work and no more.
    pub(crate) fn hold(&self, steps: u64) {
        self.number(c"fake_cuda_hold", steps);
    }

    pub(crate) fn go(&self) {
        self.nothing(c"fake_cuda_go");
    }

    /// Does all there is once somebody waits for an event from now on, or once the answer is dropped.
    pub(crate) fn go_when_waited_for(&self) -> Going {
        let (count, go) =
            (self.symbol(c"fake_cuda_count").expose_provenance(), self.symbol(c"fake_cuda_go").expose_provenance());
        let (given_up, before) = (Arc::new(AtomicBool::new(false)), self.count(c"cuEventSynchronize"));
        let told = Arc::clone(&given_up);
        let thread = std::thread::spawn(move || {
            // SAFETY: `control.rs` declares both so.
            let (count, go) = unsafe {
                let (count, go) = (std::ptr::with_exposed_provenance(count), std::ptr::with_exposed_provenance(go));
                (
                    std::mem::transmute::<*const c_void, extern "C" fn(*const c_char) -> u64>(count),
                    std::mem::transmute::<*const c_void, extern "C" fn()>(go),
                )
            };
            while count(c"cuEventSynchronize".as_ptr()) == before && !told.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            go();
        });
        Going { given_up, thread: Some(thread) }
    }

    /// Waits until all that may be done is done.
    pub(crate) fn settle(&self) {
        self.nothing(c"fake_cuda_settle");
    }

    pub(crate) fn kill(&self, ordinal: u16) {
        self.number(c"fake_cuda_kill", u64::from(ordinal));
    }

    /// Somebody else's stream on a GPU.
    pub(crate) fn foreign_stream(&self, ordinal: u16) -> usize {
        let mut stream = std::ptr::null_mut();
        on_gpu(ordinal, || {
            // SAFETY: the pointer is valid for the write.
            unsafe { sys::cuStreamCreate(&mut stream, 1) }
        });
        stream.expose_provenance()
    }

    pub(crate) fn block(&self, stream: usize, is_blocked: bool) {
        let block = self.symbol(c"fake_cuda_block");
        // SAFETY: `control.rs` declares it so.
        unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(u64, c_int)>(block)(
                stream as u64,
                c_int::from(is_blocked),
            );
        }
    }

    pub(crate) fn dmabuf(&self, has: bool) {
        self.number(c"fake_cuda_dmabuf", u64::from(has));
    }

    fn reset(&self, seed: u64) {
        self.number(c"fake_cuda_reset", seed);
    }

    pub(crate) fn left_over(&self) -> u64 {
        self.asked(c"fake_cuda_left_over")
    }

    /// Nothing happened that must not.
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.asked(c"fake_cuda_violations"), 0, "see standard error");
        for call in [c"cuCtxSynchronize", c"cuStreamSynchronize"] {
            assert_eq!(self.count(call), 0, "{call:?} waits for work that is not ours");
        }
    }

    pub(crate) fn peek(&self, address: u64, into: &mut [u8]) {
        let peek = self.symbol(c"fake_cuda_peek");
        // SAFETY: `control.rs` declares it so; the buffer is as long as told.
        let found = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(u64, *mut u8, usize) -> c_int>(peek)(
                address,
                into.as_mut_ptr(),
                into.len(),
            )
        };
        assert_eq!(found, 1, "the fake has no memory at {address:#x}");
    }

    pub(crate) fn poke(&self, address: u64, from: &[u8]) {
        let poke = self.symbol(c"fake_cuda_poke");
        // SAFETY: as for `peek`.
        let found = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(u64, *const u8, usize) -> c_int>(poke)(
                address,
                from.as_ptr(),
                from.len(),
            )
        };
        assert_eq!(found, 1, "the fake has no memory at {address:#x}");
    }
}

/// Where the bytes of a region of a GPU are.
pub(crate) fn address(region: &Region, offset: u64) -> u64 {
    region.address() as u64 + offset
}

/// A call of the driver as another user of the GPU makes it: a framework, or the suite with a copy that waits.
pub(crate) fn on_gpu(ordinal: u16, call: impl FnOnce() -> sys::CUresult) {
    let (mut context, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: the pointers are valid for the writes; the context is the primary one, which the backend uses too.
    unsafe {
        assert_eq!(sys::cuDeviceGet(&mut device, i32::from(ordinal)), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuDevicePrimaryCtxRetain(&mut context, device), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuCtxPushCurrent_v2(context), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(call(), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuCtxPopCurrent_v2(&mut context), sys::CUresult::CUDA_SUCCESS);
    }
}

/// Memory of a GPU for the conformance suite.
pub(crate) struct Gpu {
    cuda: Cuda,
    ordinal: u16,
    fake: Option<Rc<Fake>>,
}

impl Gpu {
    pub(crate) fn supply(cuda: &Cuda, ordinal: u16, fake: Option<Rc<Fake>>) -> Rc<dyn Supply> {
        Rc::new(Self { cuda: cuda.clone(), ordinal, fake })
    }
}

impl Supply for Gpu {
    fn mapping(&self, len: u64) -> Mapping {
        self.cuda.allocate(self.ordinal, len).expect("memory of the GPU")
    }

    fn read(&self, region: &Region, offset: u64, into: &mut [u8]) {
        let from = address(region, offset);
        let Some(fake) = &self.fake else {
            return on_gpu(self.ordinal, || {
                // SAFETY: inside the region, which is allocated; the buffer is as long.
                unsafe { sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), from, into.len()) }
            });
        };
        fake.peek(from, into);
    }

    fn write(&self, region: &Region, offset: u64, from: &[u8]) {
        let to = address(region, offset);
        let Some(fake) = &self.fake else {
            return on_gpu(self.ordinal, || {
                // SAFETY: as for `read`.
                unsafe { sys::cuMemcpyHtoD_v2(to, from.as_ptr().cast(), from.len()) }
            });
        };
        fake.poke(to, from);
    }
}

/// A fabric with the backend, and a link to itself.
pub(crate) fn fabric(cuda: &Cuda, options: LinkOptions) -> (Fabric, LinkId) {
    let mut fabric = Fabric::new(FabricOptions::new([1; 32])).expect("a fabric");
    let device = fabric.add_device(Box::new(CudaDevice::new(cuda).expect("a descriptor"))).expect("room");
    let link = fabric.open(Instant::ZERO, device, Connection::Loopback, options).expect("a link to itself");
    (fabric, link)
}
