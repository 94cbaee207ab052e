//! Memory of a peer, as this node may name it.
//!
//! A remote region is a token that a peer handed out, bound to that peer. It proves nothing by itself: whether the grant
//! behind it is still open is found out by using it. Invariant: an extent lies inside the region it was cut from.

use std::sync::Arc;

use millpond_core::batch::{RegionId, RegionToken};

use super::Peer;
use super::core::Core;

/// Memory that a peer granted, attached here by [`Engine::attach`](super::Engine::attach). Cheap to clone; dropping it
/// gives up nothing over there.
///
/// Example: `verify/tests/engine.rs` (`attach`).
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(super) inner: Arc<Attached>,
}

/// An entry in the fabric's table of remote regions; given back on drop.
pub(super) struct Attached {
    pub(super) peer: Peer,
    pub(super) token: RegionToken,
    pub(super) region: RegionId,
    pub(super) core: Arc<Core>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.core.detach(self.region);
    }
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("peer", &self.peer).field("token", &self.token).finish_non_exhaustive()
    }
}

/// A range of a remote region, in bytes.
///
/// Example: `verify/tests/engine.rs` (`whole`).
#[derive(Clone, Debug)]
pub struct RemoteExtent {
    pub(super) region: RemoteRegion,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// A range that does not fit.
///
/// ```
/// use millpond_node::engine::OutOfBounds;
/// let error = OutOfBounds { offset: 8, len: 8, first: 0, bound: 10 };
/// assert!(error.to_string().contains("10 bytes"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {offset} do not lie within {bound} bytes at {first}; cut the extent from its own region")]
pub struct OutOfBounds {
    /// First byte asked for.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u64,
    /// First byte there is.
    pub first: u64,
    /// Bytes there are.
    pub bound: u64,
}

impl RemoteRegion {
    /// The peer whose memory it is.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.inner.peer
    }

    /// The token it was attached by.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.inner.token
    }

    /// The `len` bytes at `offset`, an offset in the owner's memory as [`RegionBuf::offset`](super::RegionBuf::offset) says
    /// it there. The token bounds it; a grant of several ranges admits only those.
    pub fn extent(&self, offset: u64, len: u64) -> Result<RemoteExtent, OutOfBounds> {
        let token = &self.inner.token;
        if !token.admits(offset, len) {
            return Err(OutOfBounds { offset, len, first: token.offset, bound: token.len });
        }
        Ok(RemoteExtent { region: self.clone(), offset, len })
    }

    /// From the first byte granted to the last.
    #[must_use]
    pub fn whole(&self) -> RemoteExtent {
        RemoteExtent { region: self.clone(), offset: self.inner.token.offset, len: self.inner.token.len }
    }
}

impl RemoteExtent {
    /// The region it lies in.
    #[must_use]
    pub fn region(&self) -> &RemoteRegion {
        &self.region
    }

    /// First byte, counted from the start of the region.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it covers nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` bytes at `offset` of this extent.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self, OutOfBounds> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(OutOfBounds { offset, len, first: 0, bound: self.len });
        }
        Ok(Self { region: self.region.clone(), offset: self.offset + offset, len })
    }

    /// Whether it lies in memory, a file or a device of this engine.
    pub(super) fn is_own(&self) -> bool {
        self.region.peer().is_self()
    }
}
