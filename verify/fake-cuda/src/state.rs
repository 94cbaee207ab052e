//! What the fake driver knows: memory, streams, events, and what was asked of it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The driver's numbers for what is wrong.
pub(crate) mod code {
    use std::ffi::c_int;
    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const INVALID_VALUE: c_int = 1;
    pub(crate) const OUT_OF_MEMORY: c_int = 2;
    pub(crate) const NO_DEVICE: c_int = 100;
    pub(crate) const INVALID_DEVICE: c_int = 101;
    pub(crate) const INVALID_CONTEXT: c_int = 201;
    pub(crate) const INVALID_HANDLE: c_int = 400;
    pub(crate) const NOT_READY: c_int = 600;
    pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
    pub(crate) const ALREADY_REGISTERED: c_int = 712;
    pub(crate) const NOT_REGISTERED: c_int = 713;
    pub(crate) const NOT_SUPPORTED: c_int = 801;
}

/// One memfd, mapped where the CPU may not touch it, and a second time for the fake's own copies.
pub(crate) struct Allocation {
    pub(crate) ordinal: u16,
    pub(crate) len: usize,
    pub(crate) open: usize,
    pub(crate) fd: c_int,
    /// How often it was opened, and what of, if another process exported it.
    pub(crate) imported: Option<(u32, [u8; 64])>,
}

#[derive(Default)]
pub(crate) struct EventState {
    /// How often it was recorded, and the last of these that has happened.
    pub(crate) recorded: AtomicU64,
    pub(crate) happened: AtomicU64,
}

impl EventState {
    pub(crate) fn has_happened(&self, recording: u64) -> bool {
        self.happened.load(Ordering::Acquire) >= recording
    }
}

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

pub(crate) enum Work {
    Copy { source: usize, target: usize, len: usize },
    Clear { target: usize, len: usize },
    Record(Arc<EventState>, u64),
    Wait(Arc<EventState>, u64),
    Call(HostFunction, usize),
}

#[derive(Default)]
pub(crate) struct StreamState {
    pub(crate) ordinal: u16,
    pub(crate) work: VecDeque<Work>,
    /// A piece of it is being done.
    pub(crate) is_busy: bool,
    pub(crate) is_doomed: bool,
    /// What is in it takes for ever.
    pub(crate) is_blocked: bool,
}

/// What a call is to answer instead of working, after so many calls that work.
pub(crate) struct Failure {
    pub(crate) call: String,
    pub(crate) code: c_int,
    pub(crate) after: u64,
}

pub(crate) struct State {
    pub(crate) gpus: u16,
    pub(crate) dmabuf: bool,
    pub(crate) allocations: BTreeMap<usize, Allocation>,
    /// Page-locked memory of the host: base, length, whether it was allocated here.
    pub(crate) pinned: BTreeMap<usize, (usize, bool)>,
    pub(crate) streams: BTreeMap<usize, StreamState>,
    pub(crate) events: BTreeMap<usize, (u16, Arc<EventState>)>,
    pub(crate) next: usize,
    pub(crate) counts: BTreeMap<String, u64>,
    pub(crate) failures: Vec<Failure>,
    /// GPUs that failed, and the answer to all that is asked of them.
    pub(crate) dead: BTreeMap<u16, c_int>,
    /// Work that may be done; `None`: all of it.
    pub(crate) steps: Option<u64>,
    pub(crate) seed: u64,
    /// What must not happen, and did: memory given back under a copy, and the like.
    pub(crate) violations: Vec<String>,
    pub(crate) has_worker: bool,
}

pub(crate) static STATE: Mutex<State> = Mutex::new(State {
    gpus: 2,
    dmabuf: true,
    allocations: BTreeMap::new(),
    pinned: BTreeMap::new(),
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
    next: 0x1000,
    counts: BTreeMap::new(),
    failures: Vec::new(),
    dead: BTreeMap::new(),
    steps: None,
    seed: 1,
    violations: Vec::new(),
    has_worker: false,
});

/// Somebody put work in, or work was done.
pub(crate) static CHANGED: Condvar = Condvar::new();

/// The state, also after a panic elsewhere.
pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl State {
    /// A call came: counts it, and says what it is to answer if it is to fail. `ordinal` is the GPU that it is about.
    pub(crate) fn called(&mut self, call: &str, ordinal: Option<u16>) -> Result<(), c_int> {
        *self.counts.entry(call.to_owned()).or_default() += 1;
        if let Some(code) = ordinal.and_then(|ordinal| self.dead.get(&ordinal)) {
            return Err(*code);
        }
        let Some(at) = self.failures.iter().position(|failure| failure.call == call) else { return Ok(()) };
        if self.failures[at].after > 0 {
            self.failures[at].after -= 1;
            return Ok(());
        }
        Err(self.failures.remove(at).code)
    }

    pub(crate) fn name(&mut self) -> usize {
        self.next += 0x10;
        self.next
    }

    /// The allocation that a range of a GPU's memory lies in.
    pub(crate) fn allocation(&self, address: usize, len: usize) -> Option<(usize, &Allocation)> {
        let (base, allocation) = self.allocations.range(..=address).next_back()?;
        (address + len <= base + allocation.len && address < base + allocation.len).then_some((*base, allocation))
    }

    /// Where the fake reaches a range of a GPU's memory.
    pub(crate) fn reach(&self, address: usize, len: usize) -> Option<usize> {
        self.allocation(address, len).map(|(base, allocation)| allocation.open + (address - base))
    }

    /// Whether a range of the host's memory is page-locked, by one registration.
    pub(crate) fn is_pinned(&self, address: usize, len: usize) -> bool {
        let before = self.pinned.range(..=address).next_back();
        before.is_some_and(|(base, (pinned, _))| address + len <= base + pinned)
    }

    /// Memory is given back: nothing that is still to be done may touch it.
    pub(crate) fn gives_back(&mut self, what: &str, base: usize, len: usize) {
        let touches = |at: usize, n: usize| at < base + len && base < at + n;
        let is_touched = self.streams.values().flat_map(|stream| &stream.work).any(|work| match *work {
            Work::Copy { source, target, len } => touches(source, len) || touches(target, len),
            Work::Clear { target, len } => touches(target, len),
            _ => false,
        });
        if is_touched {
            self.violations.push(format!("{what} of memory that a copy in a stream still touches"));
        }
    }

    /// What is left over: allocations, locked ranges, streams, events.
    pub(crate) fn left_over(&self) -> usize {
        let streams = self.streams.keys().filter(|id| **id != 0).count();
        self.allocations.len() + self.pinned.len() + streams + self.events.len()
    }
}
