//! Registered memory for values that come and go as plain bytes.
//!
//! One region, cut into extents; a buffer gives its range back when it is dropped, and the extent follows at the next
//! allocation. What does not fit gets a region of its own, once.

use std::collections::VecDeque;

use millpond_core::extent::{Allocation, Extents, Geometry, Node};
use millpond_hal::region::{Region, RegionBuf};
use parking_lot::Mutex;

use crate::engine::{AllocateError, Backing, Engine, MapError};
use crate::runtime::Runtime;

const UNIT: u32 = 4096;
/// Buffers at once.
const BUFFERS_MAX: usize = 16_384;
/// Buffers looked at per allocation, to see whether they are free.
const SWEEP_MAX: usize = 8;

#[derive(Debug)]
pub(super) struct Pool {
    region: Region,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    extents: Extents<Box<[Node]>>,
    live: VecDeque<Allocation>,
}

impl State {
    /// Gives back the extents of buffers that were dropped, among the `count` oldest.
    fn sweep(&mut self, region: &Region, count: usize) {
        for _ in 0..count.min(self.live.len()) {
            let Some(allocation) = self.live.pop_front() else { break };
            if region.carve(allocation.offset, allocation.len).is_ok() {
                let _ = self.extents.free(allocation.handle);
            } else {
                self.live.push_back(allocation);
            }
        }
    }
}

impl Pool {
    pub(super) fn new<R: Runtime>(engine: &Engine<R>, len: u64) -> Result<Self, AllocateError> {
        let len = len.max(u64::from(UNIT)).next_multiple_of(UNIT.into());
        let region = engine.allocate(len, Backing::Memfd)?;
        let nodes = vec![Node::EMPTY; 2 * BUFFERS_MAX + 1].into_boxed_slice();
        // The geometry is in range: a region of this length could be mapped, and the unit is a power of two.
        let extents = Extents::new(nodes, Geometry { len, unit: UNIT })
            .map_err(|_| AllocateError::from(MapError::Len { len }))?;
        Ok(Self { region, state: Mutex::new(State { extents, live: VecDeque::new() }) })
    }

    /// A buffer of `len` bytes with undefined contents.
    pub(super) fn take<R: Runtime>(&self, engine: &Engine<R>, len: u64) -> Result<RegionBuf, AllocateError> {
        if let Some(buf) = self.take_pooled(len) {
            return Ok(buf);
        }
        let region = engine.allocate(len, Backing::Memfd)?;
        region.carve(0, len).map_err(|_| AllocateError::from(MapError::Len { len }))
    }

    fn take_pooled(&self, len: u64) -> Option<RegionBuf> {
        let mut state = self.state.lock();
        state.sweep(&self.region, SWEEP_MAX);
        if let Some(buf) = self.carve(&mut state, len) {
            return Some(buf);
        }
        let all = state.live.len();
        state.sweep(&self.region, all);
        self.carve(&mut state, len)
    }

    fn carve(&self, state: &mut State, len: u64) -> Option<RegionBuf> {
        let allocation = state.extents.allocate(len).ok()?;
        match self.region.carve(allocation.offset, len) {
            Ok(buf) => {
                state.live.push_back(allocation);
                Some(buf)
            }
            Err(_) => {
                let _ = state.extents.free(allocation.handle);
                None
            }
        }
    }
}
