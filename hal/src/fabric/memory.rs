//! Regions, grants and attached regions of a fabric.
#![allow(unsafe_code)]

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken, Rights};
use millpond_core::slab::Handle;

use super::Fabric;
use super::grant::{Grant, GrantError, Held, Holding, NotGranted, ReadGrant, joined_ranges};
use super::shared::Dropped;
use super::table::{Exposure, Place, RegionEntry, RemoteEntry};
use crate::contract::RegionMemory;
use crate::mapping::{Backing, MapError, Mapping};
use crate::region::{Mode, OnRegionDrop, Region, RegionBuf, RegionBytes};

/// How to allocate a region.
///
/// ```
/// use millpond_core::batch::Rights;
/// use millpond_hal::fabric::AllocateOptions;
/// let for_benches = AllocateOptions::raw(Rights::REMOTE_READ | Rights::REMOTE_WRITE);
/// assert_ne!(for_benches, AllocateOptions::default());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocateOptions {
    /// Leased or raw.
    pub mode: Mode,
    /// What backs it.
    pub backing: Backing,
    /// The NUMA node that its pages come from; `None`: wherever they are first touched.
    pub node: Option<u16>,
}

impl Default for AllocateOptions {
    fn default() -> Self {
        Self { mode: Mode::Leased, backing: Backing::Memfd, node: None }
    }
}

impl AllocateOptions {
    /// A raw region that peers may use as `rights` say, once it is exposed.
    #[must_use]
    pub fn raw(rights: Rights) -> Self {
        Self { mode: Mode::Raw(rights), ..Self::default() }
    }

    /// With pages of that NUMA node only.
    #[must_use]
    pub fn on_node(self, node: u16) -> Self {
        Self { node: Some(node), ..self }
    }

    /// With another backing.
    #[must_use]
    pub fn with_backing(self, backing: Backing) -> Self {
        Self { backing, ..self }
    }
}

/// No region.
///
/// ```
/// # use millpond_core::time::Instant;
/// # use millpond_hal::backend::host::Host;
/// # use millpond_hal::contract::Connection;
/// # use millpond_hal::fabric::*;
/// # let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// assert!(matches!(fabric.allocate(0, AllocateOptions::default()), Err(AllocateError::Map(_))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// No memory.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The table is full.
    #[error("all {regions_max} regions are in use; release one first")]
    Full {
        /// The bound.
        regions_max: usize,
    },
}

/// A region was not released; here it is again.
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
/// let lease = region.carve(0, 10).unwrap();
/// let refused = fabric.release(region).unwrap_err();
/// assert!(matches!(refused.reason, ReleaseError::Leased { .. }));
/// drop(lease);
/// fabric.release(refused.region).unwrap();
/// ```
#[derive(Debug)]
pub struct NotReleased {
    /// The region.
    pub region: Region,
    /// Why.
    pub reason: ReleaseError,
}

/// Why a region is not released.
///
/// Example: [`NotReleased`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// Posted requests use it.
    #[error("region {region} is in flight; release it after its last ticket ended")]
    InFlight {
        /// Its name.
        region: RegionId,
    },
    /// Leases of it live: held by the caller, granted or posted.
    #[error("region {region} has {leases} live leases; drop them, close its grants and take its tickets first")]
    Leased {
        /// Its name.
        region: RegionId,
        /// How many.
        leases: usize,
    },
    /// Another fabric's, or released before.
    #[error("region {region} is not, or no longer, known to this fabric")]
    Unknown {
        /// Its name.
        region: RegionId,
    },
}

/// A peer's region was not attached.
///
/// Example: `hal/src/fabric/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The table is full.
    #[error("all {remotes_max} attached regions are in use; detach one first")]
    Full {
        /// The bound.
        remotes_max: usize,
    },
    /// The token's kind of memory is not known to this version.
    #[error("the token names a kind of memory that this version does not know")]
    UnknownKind,
    /// It is still used.
    #[error("attached region {region} is in flight; detach it after its last ticket ended")]
    InFlight {
        /// Its name.
        region: RegionId,
    },
}

impl Fabric {
    /// Allocates memory, and registers it with every device that takes it. Page-aligned, zeroed.
    pub fn allocate(&mut self, len: u64, options: AllocateOptions) -> Result<Region, AllocateError> {
        let mapping = match options.node {
            Some(node) => Mapping::on_node(len, options.backing, node)?,
            None => Mapping::new(len, options.backing)?,
        };
        self.insert_region(mapping, options.mode)
    }

    /// Registers memory that somebody else made; `keeper` is dropped when no lease and no device uses it any more.
    ///
    /// # Safety
    /// - `base .. base + len` is initialised and valid for reads and writes until `keeper` is dropped.
    /// - Until then nobody touches it except through the region; for [`Mode::Raw`], except also by copies that Rust's memory
    ///   model does not see (another process, a device, `copy`).
    pub unsafe fn adopt(
        &mut self,
        base: NonNull<u8>,
        len: NonZeroUsize,
        mode: Mode,
        keeper: Box<dyn Send + Sync>,
    ) -> Result<Region, AllocateError> {
        // SAFETY: the caller's promise covers both duties.
        let mapping = unsafe { Mapping::adopt(base, len, keeper) };
        self.insert_region(mapping, mode)
    }

    /// Makes a mapping a region: memory of a device, page-locked memory, or any other that was made beforehand. It is
    /// registered with every device that takes its kind.
    ///
    /// # Errors
    /// The table is full; the mapping is gone then.
    pub fn insert_region(&mut self, mapping: Mapping, mode: Mode) -> Result<Region, AllocateError> {
        let regions_max = self.tables.regions.capacity();
        let mapping = Arc::new(mapping);
        let id = self
            .insert_place(Place::Mapped(Arc::clone(&mapping)), mapping.kind(), mode)
            .ok_or(AllocateError::Full { regions_max })?;
        let home: Arc<dyn OnRegionDrop> = self.shared.clone();
        Ok(Region::new(id, mapping, mode, Some(home)))
    }

    /// A new entry of the region table, known to all devices that take it; `None` if the table is full.
    pub(super) fn insert_place(&mut self, place: Place, kind: MemoryKind, mode: Mode) -> Option<RegionId> {
        let entry = RegionEntry { place, kind, mode, devices: 0, raw_in_flight: 0, exposure: None, doomed: false };
        let id = self.tables.regions.insert(entry).ok()?;
        for device in 0..self.devices.len() {
            self.register_with(device, id);
        }
        Some(id)
    }

    pub(super) fn register_with(&mut self, device: usize, id: RegionId) {
        let Some(entry) = self.tables.regions.get_mut(id) else { return };
        let kind = entry.kind;
        let memory = match &entry.place {
            Place::Mapped(mapping) => {
                let shared = mapping.shared().or(mapping.dmabuf()).cloned();
                let (base, len) = (mapping.base(), mapping.len());
                RegionMemory { id, base, len, kind, file: None, shared }
            }
            Place::File(file) => {
                let (base, len) = (NonNull::dangling(), file.len());
                RegionMemory { id, base, len, kind, file: Some(Arc::clone(file)), shared: None }
            }
        };
        // SAFETY:
        // - the mapping stays: `entry` holds it, and is removed only by `forget_region`, which releases it first. A file has
        //   none.
        if unsafe { self.devices[device].register(&memory) }.is_ok() {
            entry.devices |= 1 << device;
        }
    }

    /// Takes a region from all devices. Its memory is freed when the last handle to it is gone. Refused while leases of it
    /// live or requests that name it are in flight.
    pub fn release(&mut self, region: Region) -> Result<(), Box<NotReleased>> {
        self.reap();
        let (id, leases) = (region.id(), region.lease_count());
        let reason = match self.known_region(&region) {
            None => Some(ReleaseError::Unknown { region: id }),
            Some(entry) if entry.raw_in_flight > 0 => Some(ReleaseError::InFlight { region: id }),
            Some(_) if leases > 0 => Some(ReleaseError::Leased { region: id, leases }),
            Some(_) => None,
        };
        if let Some(reason) = reason {
            return Err(Box::new(NotReleased { region, reason }));
        }
        self.forget_region(id);
        Ok(())
    }

    pub(super) fn known_region(&self, region: &Region) -> Option<&RegionEntry> {
        self.tables
            .regions
            .get(region.id())
            .filter(|entry| entry.place.mapping().is_some_and(|mapping| Arc::ptr_eq(mapping, region.mapping())))
    }

    pub(super) fn forget_region(&mut self, id: RegionId) {
        let Some(exposure) = self.tables.regions.get(id).map(|entry| entry.exposure) else { return };
        if let Some(exposure) = exposure {
            self.end_exposure(exposure);
        }
        for device in &mut self.devices {
            device.release(id);
        }
        self.tables.regions.remove(id);
    }

    /// Lets peers write the ranges, all of one region of this fabric. The fabric keeps them until [`Fabric::close`].
    pub fn grant_write(&mut self, ranges: Vec<RegionBuf>) -> Result<Grant, NotGranted<RegionBuf>> {
        let spans = joined_ranges(ranges.iter().map(|buffer| (buffer.offset(), buffer.len() as u64)));
        match self.grantable(ranges.iter().map(RegionBuf::region)) {
            Ok(memory) => {
                let token = self.insert_exposure(memory, spans, Rights::REMOTE_WRITE, Holding::Write(ranges));
                Ok(Grant(Held { token, shared: Some(Arc::clone(&self.shared)) }))
            }
            Err(reason) => Err(NotGranted { ranges, reason }),
        }
    }

    /// Lets peers read the ranges, all of one region of this fabric, until the grant is dropped.
    pub fn grant_read(&mut self, ranges: Vec<RegionBytes>) -> Result<ReadGrant, NotGranted<RegionBytes>> {
        let spans = joined_ranges(ranges.iter().map(|bytes| (bytes.offset(), bytes.len() as u64)));
        match self.grantable(ranges.iter().map(RegionBytes::region)) {
            Ok(memory) => {
                let token = self.insert_exposure(memory, spans, Rights::REMOTE_READ, Holding::Read(ranges));
                Ok(ReadGrant(Held { token, shared: Some(Arc::clone(&self.shared)) }))
            }
            Err(reason) => Err(NotGranted { ranges, reason }),
        }
    }

    /// Exposes a whole raw region with its rights, until it is released. The same token each time.
    pub fn expose(&mut self, region: &Region) -> Result<RegionToken, GrantError> {
        let Mode::Raw(rights) = region.mode() else { return Err(GrantError::NotRaw) };
        let exposed = self.known_region(region).ok_or(GrantError::ForeignRegion)?.exposure;
        if let Some(exposure) = exposed {
            return Ok(self.token_of(exposure, region.id(), 0, region.len(), rights));
        }
        self.reap();
        self.exposure_room()?;
        let token = self.insert_exposure(region.id(), vec![(0, region.len())], rights, Holding::Raw);
        if let Some(entry) = self.tables.regions.get_mut(region.id()) {
            entry.exposure = Some(token.region);
        }
        Ok(token)
    }

    /// Ends a grant at once: no frame that names it is applied from now on. The buffers come back as they were given.
    pub fn close(&mut self, mut grant: Grant) -> Vec<RegionBuf> {
        if !grant.0.belongs_to(&self.shared) {
            return Vec::new();
        }
        grant.0.shared = None;
        match self.end_exposure(grant.id()).map(|exposure| exposure.holding) {
            Some(Holding::Write(buffers)) => buffers,
            _ => Vec::new(),
        }
    }

    /// Ends a grant at once. Dropping it does the same, in the next turn.
    pub fn revoke(&mut self, mut grant: ReadGrant) {
        if grant.0.belongs_to(&self.shared) {
            grant.0.shared = None;
            self.end_exposure(grant.id());
        }
    }

    /// What arrived on a counter of a grant so far; 0 for a closed one. O(log n) of the grant's counters.
    #[must_use]
    pub fn arrived(&self, grant: RegionId, counter: u64) -> u64 {
        let Some(exposure) = self.tables.exposures.get(grant) else { return 0 };
        let found = exposure.counters.binary_search_by_key(&counter, |entry| entry.0);
        found.map_or(0, |index| exposure.counters[index].1)
    }

    /// Ends an exposure, after no peer reaches its bytes any more.
    pub(super) fn end_exposure(&mut self, id: RegionId) -> Option<Exposure> {
        if self.tables.exposures.get(id).is_some_and(|exposure| exposure.lent) {
            self.devices.iter_mut().for_each(|device| device.revoke(id));
        }
        self.tables.close_exposure(id)
    }

    pub(super) fn exposure_room(&self) -> Result<(), GrantError> {
        let exposures_max = self.tables.exposures.capacity();
        if self.tables.exposures.len() < exposures_max { Ok(()) } else { Err(GrantError::Full { exposures_max }) }
    }

    /// The region that all of these are, if there is room for a grant.
    fn grantable<'a>(
        &mut self,
        regions: impl ExactSizeIterator<Item = &'a Region> + Clone,
    ) -> Result<RegionId, GrantError> {
        self.reap();
        let ranges_max = self.options.limits.ranges_per_grant_max as usize;
        if regions.len() > ranges_max {
            return Err(GrantError::TooManyRanges { ranges_max });
        }
        let first = regions.clone().next().ok_or(GrantError::Empty)?;
        self.known_region(first).ok_or(GrantError::ForeignRegion)?;
        let mut rest = regions;
        if !rest.all(|region| Arc::ptr_eq(region.mapping(), first.mapping())) {
            return Err(GrantError::ForeignRegion);
        }
        self.exposure_room()?;
        Ok(first.id())
    }

    /// There is room, and `memory` is in the table: the callers have just looked.
    pub(super) fn insert_exposure(
        &mut self,
        memory: RegionId,
        ranges: Vec<(u64, u64)>,
        rights: Rights,
        holding: Holding,
    ) -> RegionToken {
        let start = ranges.first().map_or(0, |range| range.0);
        let end = ranges.last().map_or(0, |range| range.1);
        let place = self.tables.regions.get(memory).expect("looked up by the caller").place.clone();
        let blank = Capability::new([0; 16]);
        let exposure = Exposure {
            memory,
            place,
            ranges,
            rights,
            capability: blank,
            holding,
            counters: Vec::new(),
            announced: false,
            lent: false,
        };
        let id = self.tables.exposures.insert(exposure).ok().expect("the caller has checked that there is room");
        let capability = self.capability(id);
        if let Some(exposure) = self.tables.exposures.get_mut(id) {
            exposure.capability = capability;
        }
        self.tables.header.set(id.slot, u64::from(id.epoch));
        self.token_of(id, memory, start, end - start, rights)
    }

    fn capability(&self, id: Handle) -> Capability {
        let mut message = *b"millpond capability \0\0\0\0\0\0\0\0";
        message[20..24].copy_from_slice(&id.slot.to_le_bytes());
        message[24..].copy_from_slice(&id.epoch.to_le_bytes());
        let hash = blake3::keyed_hash(&self.options.secret, &message);
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.as_bytes()[..16]);
        Capability::new(bytes)
    }

    fn token_of(&self, id: RegionId, memory: RegionId, offset: u64, len: u64, rights: Rights) -> RegionToken {
        let kind = self.tables.regions.get(memory).map_or(MemoryKind::Host, |entry| entry.kind);
        RegionToken::new(id, memory, offset, len, kind, rights, self.capability(id), self.options.incarnation, id.slot)
    }

    /// Makes a peer's region or grant a target for batches. Whether the token is right is found out by the first of them.
    pub fn attach(&mut self, token: RegionToken) -> Result<RegionId, AttachError> {
        token.kind().ok_or(AttachError::UnknownKind)?;
        let remotes_max = self.tables.remotes.capacity();
        let entry = RemoteEntry { token, links: Vec::new(), in_flight: 0 };
        self.tables.remotes.insert(entry).map_err(|_| AttachError::Full { remotes_max })
    }

    /// The token of an attached region.
    #[must_use]
    pub fn attached(&self, region: RegionId) -> Option<RegionToken> {
        self.tables.remotes.get(region).map(|entry| entry.token)
    }

    /// Forgets a peer's region. Refused while requests that name it are in flight; a stale handle is ignored.
    pub fn detach(&mut self, region: RegionId) -> Result<(), AttachError> {
        match self.tables.remotes.get(region) {
            Some(entry) if entry.in_flight > 0 => return Err(AttachError::InFlight { region }),
            Some(_) => {}
            None => return Ok(()),
        }
        let Some(entry) = self.tables.remotes.remove(region) else { return Ok(()) };
        for link in entry.links {
            if let Some(device) = self.tables.links.get(link.handle()).map(|entry| entry.device) {
                self.devices[device].detach(link, entry.token.region);
            }
        }
        Ok(())
    }

    /// Does what handles that were dropped elsewhere ask for.
    pub(super) fn reap(&mut self) {
        let mut reaped = core::mem::take(&mut self.reaped);
        self.shared.drain(&mut reaped);
        for dropped in reaped.drain(..) {
            match dropped {
                Dropped::Grant(id) => drop(self.end_exposure(id)),
                Dropped::Ticket(id) => self.orphan(id),
                Dropped::Region(id) => {
                    let Some(entry) = self.tables.regions.get_mut(id) else { continue };
                    entry.doomed = true;
                    if entry.raw_in_flight == 0 {
                        self.forget_region(id);
                    }
                }
            }
        }
        self.reaped = reaped;
    }
}
