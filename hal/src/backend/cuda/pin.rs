//! Regions that the device knows, and the pages of the host among them that are locked for it.
//!
//! A copy is asynchronous only from and to locked pages; from others the driver copies by CPU and may wait. So pages are
//! locked chunk by chunk when they are first copied, and stay so until the region is released. Memory that comes locked, and
//! memory of GPUs, needs nothing.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::collections::HashMap;
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId};

use super::driver::{CudaError, Driver, Side};
use crate::contract::{RegionMemory, RegisterError};

/// Pages are locked in chunks of this length: how long the first copy of a chunk takes is bounded by it.
pub const PIN_LEN: u64 = 16 << 20;
/// Regions of one device, at most.
pub const REGIONS_MAX: usize = 16_384;

/// Local regions, by name.
#[derive(Debug)]
pub(super) struct Regions {
    driver: Arc<Driver>,
    known: HashMap<RegionId, Known>,
}

#[derive(Debug)]
struct Known {
    memory: RegionMemory,
    chunks: Vec<Lock>,
}

/// What became of a chunk of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lock {
    None,
    /// By the context of that GPU, for all of them.
    Ours(u16),
    /// Somebody locked it before: theirs to unlock.
    Theirs,
}

// SAFETY:
// - `memory.base` blocks Send. It is handed to the driver only; the region stays mapped until `release`, which unlocks first.
//   Test: `conformance` moves a posted fabric to another thread.
unsafe impl Send for Known {}

impl Regions {
    pub(super) fn new(driver: Arc<Driver>) -> Self {
        Self { driver, known: HashMap::new() }
    }

    pub(super) fn insert(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        let count = match memory.kind {
            MemoryKind::Host => memory.len.div_ceil(PIN_LEN) as usize,
            MemoryKind::Pinned => 0,
            MemoryKind::Cuda { device } if self.driver.knows(device) => 0,
            kind => return Err(RegisterError::Kind(kind)),
        };
        if self.known.len() >= REGIONS_MAX {
            return Err(RegisterError::Full);
        }
        self.known.insert(memory.id, Known { memory: memory.clone(), chunks: vec![Lock::None; count] });
        Ok(())
    }

    pub(super) fn kind(&self, region: RegionId) -> Option<MemoryKind> {
        self.known.get(&region).map(|known| known.memory.kind)
    }

    /// One side of a copy of `len` bytes at `offset`, which keep within a chunk; the pages are locked for `gpu` if need be.
    /// `None` if the region is not known.
    pub(super) fn side(
        &mut self,
        region: RegionId,
        offset: u64,
        len: u64,
        gpu: u16,
    ) -> Result<Option<Side>, CudaError> {
        let Some(known) = self.known.get_mut(&region) else { return Ok(None) };
        let base = known.memory.base;
        if let MemoryKind::Cuda { device } = known.memory.kind {
            return Ok(Some(Side::Gpu { ordinal: device, address: base.addr().get() as u64 + offset }));
        }
        if len > 0 && !known.chunks.is_empty() {
            known.lock(&self.driver, gpu, (offset / PIN_LEN) as usize)?;
        }
        Ok(Some(Side::Host(at(base, offset))))
    }

    /// Forgets a region. No copy uses it.
    pub(super) fn release(&mut self, region: RegionId) {
        if let Some(known) = self.known.remove(&region) {
            known.unlock(&self.driver);
        }
    }
}

/// The byte at an offset inside of a region.
fn at(base: NonNull<u8>, offset: u64) -> NonNull<u8> {
    // SAFETY: the fabric checked that the range lies in the region, whose length fits usize.
    unsafe { base.add(offset as usize) }
}

impl Known {
    fn chunk(&self, index: usize) -> (NonNull<u8>, usize) {
        let start = index as u64 * PIN_LEN;
        (at(self.memory.base, start), PIN_LEN.min(self.memory.len - start) as usize)
    }

    fn lock(&mut self, driver: &Driver, gpu: u16, index: usize) -> Result<(), CudaError> {
        if self.chunks[index] == Lock::None {
            let (base, len) = self.chunk(index);
            // SAFETY: a region stays mapped until it is released, and `unlock` runs before that returns.
            self.chunks[index] = if unsafe { driver.pin(gpu, base, len)? } { Lock::Ours(gpu) } else { Lock::Theirs };
        }
        Ok(())
    }

    fn unlock(&self, driver: &Driver) {
        for (index, lock) in self.chunks.iter().enumerate() {
            if let Lock::Ours(gpu) = *lock {
                // SAFETY: locked by `lock`, once; the callers know that no copy uses it.
                unsafe { driver.unpin(gpu, self.chunk(index).0) };
            }
        }
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        self.known.values().for_each(|known| known.unlock(&self.driver));
    }
}
