//! Grants: which bytes peers may touch, for how long.

use core::fmt;
use std::sync::Arc;

use millpond_core::batch::{RegionId, RegionToken};

use super::shared::{Dropped, Shared};
use crate::region::{RegionBuf, RegionBytes};

/// Peers that hold its token may write the granted ranges; nobody here sees them meanwhile. `Fabric::close` gives the
/// buffers back; dropping it closes it and gives the ranges back to their region.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// # let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// # let now = Instant::ZERO;
/// # let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// # let region = fabric.allocate(8192, AllocateOptions::default()).unwrap();
/// let grant = fabric.grant_write(vec![region.carve(0, 4096).unwrap()]).unwrap();
/// let token = grant.token(); // give it to a peer
/// assert!(region.carve(0, 1).is_err()); // peers may write there
/// let buffers = fabric.close(grant);
/// assert_eq!(buffers[0].len(), 4096); // ours alone again
/// # let _ = token;
/// ```
#[derive(Debug)]
pub struct Grant(pub(super) Held);

/// Peers that hold its token may read the granted ranges. Dropping it, or `Fabric::revoke`, ends that.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// # let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// # let now = Instant::ZERO;
/// # let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// # let region = fabric.allocate(8192, AllocateOptions::default()).unwrap();
/// let bytes = region.carve(0, 4096).unwrap().freeze();
/// let grant = fabric.grant_read(vec![bytes.clone()]).unwrap();
/// assert_eq!(bytes[0], 0); // we may read as well
/// fabric.revoke(grant);
/// ```
#[derive(Debug)]
pub struct ReadGrant(pub(super) Held);

pub(super) struct Held {
    pub(super) token: RegionToken,
    pub(super) shared: Option<Arc<Shared>>,
}

impl Held {
    pub(super) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        self.shared.as_ref().is_some_and(|own| Arc::ptr_eq(own, shared))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.dropped(Dropped::Grant(self.token.region));
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.token.region)
    }
}

impl Grant {
    /// What to send to the peer.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.0.token
    }

    /// Its name in events and in `Fabric::arrived`.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.0.token.region
    }
}

impl ReadGrant {
    /// What to send to the peer.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.0.token
    }

    /// Its name on the wire.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.0.token.region
    }
}

/// Memory was not granted; here it is again.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// # let host = fabric.add_device(Box::new(Host::new())).unwrap();
/// # let now = Instant::ZERO;
/// # let link = fabric.open(now, host, Connection::Loopback, LinkOptions::default()).unwrap();
/// # let region = fabric.allocate(8192, AllocateOptions::default()).unwrap();
/// let other = Fabric::new(FabricOptions::new([1; 32])).unwrap().allocate(4096, AllocateOptions::default()).unwrap();
/// let refused = fabric.grant_write(vec![other.carve(0, 10).unwrap()]).err().unwrap();
/// assert_eq!(refused.reason, GrantError::ForeignRegion);
/// assert_eq!(refused.ranges.len(), 1); // they came back
/// ```
pub struct NotGranted<T> {
    /// What was handed in.
    pub ranges: Vec<T>,
    /// Why.
    pub reason: GrantError,
}

impl<T> fmt::Debug for NotGranted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.reason, f)
    }
}

impl<T> fmt::Display for NotGranted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<T> core::error::Error for NotGranted<T> {}

/// Why memory was not granted.
///
/// Example: [`NotGranted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// No ranges.
    #[error("a grant of nothing names no region; pass at least one range")]
    Empty,
    /// Too many ranges.
    #[error("a grant has at most {ranges_max} ranges; make several grants")]
    TooManyRanges {
        /// The bound.
        ranges_max: usize,
    },
    /// Ranges of several regions, or of a region that this fabric does not know.
    #[error("all ranges of a grant lie in one region of this fabric; make a grant per region")]
    ForeignRegion,
    /// The table is full.
    #[error("all {exposures_max} grants are in use; close one first")]
    Full {
        /// The bound.
        exposures_max: usize,
    },
    /// A whole region was to be exposed that is not raw.
    #[error("only a raw region is exposed as a whole; grant ranges of a leased one")]
    NotRaw,
    /// A range that is not inside the file.
    #[error("a range of the grant is not inside the file")]
    OutOfBounds,
    /// A right to write a file that was opened for reading.
    #[error("the file is open for reading only; open it for writing, or grant the right to read")]
    ReadOnly,
}

/// What an exposure holds while it lasts.
#[derive(Debug)]
pub(super) enum Holding {
    Write(Vec<RegionBuf>),
    Read(#[allow(dead_code, reason = "held for its drop")] Vec<RegionBytes>),
    Raw,
    /// Whoever holds the grant holds the file.
    File,
}

/// Sorted, joined `start..end` ranges of the items. Neighbours become one, so a move may span buffers that touch.
pub(super) fn joined_ranges(items: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = items.map(|(offset, len)| (offset, offset + len)).collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joins = next.0 <= last.1;
        if joins {
            last.1 = last.1.max(next.1);
        }
        joins
    });
    ranges
}

#[cfg(test)]
mod tests {
    use super::joined_ranges;

    #[test]
    fn ranges_that_touch_or_overlap_become_one() {
        let ranges = joined_ranges([(10, 5), (0, 5), (5, 5), (20, 4), (21, 1), (30, 0)].into_iter());
        assert_eq!(ranges, [(0, 15), (20, 24), (30, 30)]);
    }
}
