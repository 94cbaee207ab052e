//! Files of a fabric: regions without addresses, and grants of their ranges.
//!
//! A file is the far side of a move, also for its owner, who attaches its own grant and posts over a link of the
//! [`file`](crate::backend::file) backend. There are no leases: moves of the same bytes at the same time leave old, new or
//! torn ones there, and nowhere else.

use core::fmt;
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId, RegionToken, Rights};

use super::Fabric;
use super::grant::{GrantError, Held, Holding, joined_ranges};
use super::memory::AllocateError;
use super::shared::Shared;
use super::table::Place;
use crate::file::{FileAccess, OpenFile};
use crate::region::{Mode, OnRegionDrop};

/// A file that a fabric knows. Clones name the same one, which is closed when they, its grants and all that was posted are
/// gone.
///
/// ```
/// use millpond_core::batch::{Extent, Rights};
/// use millpond_core::time::Instant;
/// use millpond_hal::backend::file::{FileDevice, FileDeviceOptions};
/// use millpond_hal::contract::Connection;
/// use millpond_hal::fabric::{Batch, Fabric, FabricOptions, LinkOptions, PostOptions};
/// use millpond_hal::file::{FileOptions, OpenFile};
///
/// let now = Instant::ZERO;
/// let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// let device = fabric.add_device(Box::new(FileDevice::new(FileDeviceOptions::default()).unwrap())).unwrap();
/// let link = fabric.open(now, device, Connection::Loopback, LinkOptions::default()).unwrap();
/// let path = std::env::temp_dir().join(format!("millpond-doc-region-{}", std::process::id()));
/// let file = fabric.add_file(OpenFile::open(&path, FileOptions::create(1 << 20)).unwrap()).unwrap();
/// let grant = fabric.grant_file(&file, &[(0, file.len())], Rights::REMOTE_READ | Rights::REMOTE_WRITE).unwrap();
/// let there = fabric.attach(grant.token()).unwrap();
///
/// let region = fabric.allocate(8192, Default::default()).unwrap();
/// let mut source = region.carve(0, 5).unwrap();
/// source.copy_from_slice(b"hello");
/// let mut batch = Batch::new();
/// batch.write(source.freeze(), Extent::new(there, 70_000, 5)).sync(there); // done means durable
/// let ticket = fabric.post(now, link, batch, PostOptions::default()).unwrap();
/// while !fabric.is_finished(&ticket) {
///     fabric.poll(now);
/// }
/// assert!(fabric.take(ticket).unwrap().is_done());
/// assert_eq!(&std::fs::read(&path).unwrap()[70_000..70_005], b"hello");
/// std::fs::remove_file(path).unwrap();
/// ```
#[derive(Clone)]
pub struct FileRegion(Arc<Inner>);

struct Inner {
    id: RegionId,
    file: Arc<OpenFile>,
    home: Arc<Shared>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.home.region_dropped(self.id);
    }
}

impl FileRegion {
    /// Its name in the fabric that made it.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.0.id
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.file.len()
    }

    /// Whether it has no bytes; never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.file.is_empty()
    }

    /// How it was opened, and what was found out since.
    #[must_use]
    pub fn file(&self) -> &OpenFile {
        &self.0.file
    }
}

impl fmt::Debug for FileRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileRegion").field("id", &self.id()).field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Whoever holds its token may move ranges of a file. Dropping it, or `Fabric::revoke_file`, ends that: pieces of moves that
/// were not started are refused from then on.
///
/// Example: [`FileRegion`].
#[derive(Debug)]
pub struct FileGrant {
    held: Held,
    /// Keeps the file open.
    region: FileRegion,
}

impl FileGrant {
    /// What to send to the peer, or to attach here.
    #[must_use]
    pub fn token(&self) -> RegionToken {
        self.held.token
    }

    /// Its name in events and in `Fabric::arrived`.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.held.token.region
    }

    /// The file.
    #[must_use]
    pub fn region(&self) -> &FileRegion {
        &self.region
    }
}

impl Fabric {
    /// Makes an open file a region, for batches over links of the `file` backend.
    pub fn add_file(&mut self, file: OpenFile) -> Result<FileRegion, AllocateError> {
        self.reap();
        let regions_max = self.tables.regions.capacity();
        let file = Arc::new(file);
        // Nobody leases a file, so it is as if it were raw; what peers may do is said by each grant.
        let mode = Mode::Raw(Rights::NONE);
        let id = self
            .insert_place(Place::File(Arc::clone(&file)), MemoryKind::File, mode)
            .ok_or(AllocateError::Full { regions_max })?;
        Ok(FileRegion(Arc::new(Inner { id, file, home: Arc::clone(&self.shared) })))
    }

    /// Lets whoever has the token read or write these `(offset, len)` ranges of a file, until the grant is dropped.
    pub fn grant_file(
        &mut self,
        region: &FileRegion,
        ranges: &[(u64, u64)],
        rights: Rights,
    ) -> Result<FileGrant, GrantError> {
        self.reap();
        let ranges_max = self.options.limits.ranges_per_grant_max as usize;
        let is_inside = |(offset, len): &(u64, u64)| offset.checked_add(*len).is_some_and(|end| end <= region.len());
        if ranges.is_empty() {
            return Err(GrantError::Empty);
        }
        if ranges.len() > ranges_max {
            return Err(GrantError::TooManyRanges { ranges_max });
        }
        if !Arc::ptr_eq(&region.0.home, &self.shared) || self.tables.regions.get(region.id()).is_none() {
            return Err(GrantError::ForeignRegion);
        }
        if !ranges.iter().all(is_inside) {
            return Err(GrantError::OutOfBounds);
        }
        if rights.allows(Rights::REMOTE_WRITE) && region.file().access() == FileAccess::ReadOnly {
            return Err(GrantError::ReadOnly);
        }
        self.exposure_room()?;
        let spans = joined_ranges(ranges.iter().copied());
        let token = self.insert_exposure(region.id(), spans, rights, Holding::File);
        Ok(FileGrant { held: Held { token, shared: Some(Arc::clone(&self.shared)) }, region: region.clone() })
    }

    /// Ends a grant at once. Dropping it does the same, in the next turn.
    pub fn revoke_file(&mut self, mut grant: FileGrant) {
        if grant.held.belongs_to(&self.shared) {
            grant.held.shared = None;
            self.tables.close_exposure(grant.id());
        }
    }
}
