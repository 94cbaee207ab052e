//! Operation lists for the segment allocator.

use millpond_core::extent::{AllocateError, Allocation, Demand, Extents, Geometry, Node, SCAN_MAX};
use millpond_core::slab::Handle;
use millpond_oracle::extent::Segment;

use crate::Op;

/// Fewer nodes than [`SCAN_MAX`], so that no fit may be missed.
const NODES: usize = 40;
const _: () = assert!(NODES <= SCAN_MAX as usize);

/// Runs `ops` on the product and on the oracle; the first one chooses the geometry.
///
/// # Errors
/// The number of the operation and what is wrong.
///
/// ```
/// millpond_fuzz::extent::run(&[[0; 8], [1; 8]]).unwrap();
/// ```
pub fn run(ops: &[Op]) -> Result<(), String> {
    let Some(first) = ops.first() else { return Ok(()) };
    let unit = 1 << (first[0] % 7);
    let geometry = Geometry { len: u64::from(unit) * (1 + u64::from(first[1]) * 16) + u64::from(first[2] % 4), unit };
    let extents = Extents::new([const { Node::EMPTY }; NODES], geometry).map_err(|error| error.to_string())?;
    let mut world = World { extents, oracle: Segment::new(geometry), geometry, handles: vec![Handle::default()] };
    for (number, op) in ops.iter().enumerate().skip(1) {
        world.apply(op).and_then(|()| world.check()).map_err(|wrong| format!("operation {number} {op:?}: {wrong}"))?;
    }
    Ok(())
}

struct World {
    extents: Extents<[Node; NODES]>,
    oracle: Segment,
    geometry: Geometry,
    /// Every handle ever seen, so that stale ones are tried too.
    handles: Vec<Handle>,
}

impl World {
    fn apply(&mut self, op: &Op) -> Result<(), String> {
        let unit = u64::from(self.geometry.unit);
        // Lengths around units, from one byte to an eighth of the segment.
        let scale = if op[2].is_multiple_of(4) { 32 } else { 4 };
        let len = (u64::from(op[1]) * unit * scale / 32).saturating_sub(u64::from(op[2] % 3)).max(u64::from(op[2] > 2));
        match op[0] % 8 {
            0..3 => {
                let got = self.extents.allocate(len);
                self.judge(got, Demand { len, align: 1 })
            }
            3 => {
                let demand = Demand { len, align: 1 << (op[3] % 14) };
                let got = self.extents.allocate_aligned(demand);
                self.judge(got, demand)
            }
            4 => self.allocate_at(u64::from(op[3]) * 16 * unit + u64::from(op[4] % 8) * unit, len),
            _ => self.free(op),
        }
    }

    fn judge(&mut self, got: Result<Allocation, AllocateError>, demand: Demand) -> Result<(), String> {
        let fits = self.oracle.fits(demand.len, demand.align);
        match got {
            Ok(range) if range.len == demand.len && demand.len > 0 => {
                self.handles.push(range.handle);
                self.oracle.allocated(range, demand.align)
            }
            Err(AllocateError::Invalid) if demand.len == 0 => Ok(()),
            Err(AllocateError::NoSpace) if !fits && demand.len > 0 => Ok(()),
            // A cut needs up to two more nodes.
            Err(AllocateError::NoNodes) if fits && self.oracle.range_count() + 2 > NODES => Ok(()),
            other => Err(format!("{demand:?} (fits: {fits}): {other:?}")),
        }
    }

    fn allocate_at(&mut self, offset: u64, len: u64) -> Result<(), String> {
        let is_free = self.oracle.is_free(offset, len);
        match self.extents.allocate_at(offset, len) {
            Ok(range) if range.offset == offset && range.len == len && len > 0 => {
                self.handles.push(range.handle);
                self.oracle.allocated(range, 1)
            }
            Err(AllocateError::Invalid) if len == 0 => Ok(()),
            Err(AllocateError::NoSpace) if !is_free => Ok(()),
            Err(AllocateError::NoNodes) if is_free && self.oracle.range_count() + 2 > NODES => Ok(()),
            other => Err(format!("{len} bytes at {offset} (free: {is_free}): {other:?}")),
        }
    }

    fn free(&mut self, op: &Op) -> Result<(), String> {
        let handle = match self.oracle.iter().nth(usize::from(op[1]) % NODES) {
            Some(live) if op[2] < 200 => live.handle,
            _ => self.handles[usize::from(op[1]) % self.handles.len()],
        };
        let (got, expected) = (self.extents.free(handle).ok(), self.oracle.free(handle));
        if got == expected { Ok(()) } else { Err(format!("free of {handle}: {got:?}, not {expected:?}")) }
    }

    fn check(&self) -> Result<(), String> {
        if !self.oracle.agrees_with(self.extents.statistics()) {
            return Err(format!("{:?} are not the figures of {:?}", self.extents.statistics(), self.oracle));
        }
        if self.extents.largest_free_len() != self.oracle.largest_free_len() {
            return Err(format!("the longest free range has {} bytes", self.extents.largest_free_len()));
        }
        if !self.extents.iter().eq(self.oracle.iter()) {
            return Err(format!("the ranges are not {:?}", self.oracle));
        }
        match self.handles.iter().find(|&&handle| self.extents.get(handle) != self.oracle.find(handle)) {
            Some(handle) => Err(format!("{handle} is {:?}", self.extents.get(*handle))),
            None => Ok(()),
        }
    }
}
