//! Registrations: ours for local use, made at first use and kept; those for a peer, made when it proved a grant.
//!
//! Local memory is registered in chunks, all of one length, in the NIC's own domain, where no peer's key reaches it. What a
//! peer may touch is registered range by range in a domain of its link: a key works for the ranges granted, for the rights
//! granted, on the link it was given to, until it is revoked; and revoking it is one call that does not need the peer.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::AsFd;

use millpond_core::batch::{MemoryKind, RegionId, Rights};

use super::cut::pieces;
use super::message::Key;
use super::verbs::{Domain, Reach, Registration, Verbs, VerbsError};
use crate::contract::{Lent, Refusal, RegionMemory, RegisterError};
use crate::mapping::PAGE_LEN;

/// Keys of one grant, at most: a grant of more ranges is refused, and moves by another transport.
pub const KEYS_PER_GRANT_MAX: usize = 4096;
/// Local memory is registered in chunks of at most this length: how long the first use of a chunk may take.
pub(crate) const CHUNK_LEN_MAX: u64 = 1 << 30;
/// Regions of one device, at most.
const REGIONS_MAX: usize = 4096;

const EOPNOTSUPP: i32 = 95;
const ENOMEM: i32 = 12;
const EAGAIN: i32 = 11;

/// Local regions.
#[derive(Debug)]
pub(crate) struct Local {
    regions: HashMap<RegionId, LocalRegion>,
    chunk_len: u64,
}

#[derive(Debug)]
struct LocalRegion {
    memory: RegionMemory,
    chunks: Vec<Option<Registration>>,
}

// SAFETY:
// - `memory.base` blocks Send. It is dereferenced by the NIC only, for requests that the fabric posted; the region stays mapped
//   until `remove`. Test: `conformance` moves a posted fabric to another thread.
unsafe impl Send for Local {}

fn is_host(kind: MemoryKind) -> bool {
    matches!(kind, MemoryKind::Host | MemoryKind::Pinned)
}

/// Registers `start..end` of a region, whatever its kind.
fn register(
    verbs: &dyn Verbs,
    domain: Domain,
    memory: &RegionMemory,
    (start, len): (u64, u64),
    reach: Reach,
) -> Result<Registration, VerbsError> {
    let address = memory.base.as_ptr().addr() as u64 + start;
    if is_host(memory.kind) {
        let base = NonNull::new(memory.base.as_ptr().wrapping_add(start as usize)).expect("inside a mapping");
        // SAFETY: the range is inside the region: callers cut `0..memory.len`, or were lent it by the fabric, and the region
        // stays mapped until `Local::remove`, or `Lending::revoke`, which deregister first.
        return unsafe { verbs.register(domain, base, len, reach) };
    }
    let dmabuf = memory.shared.as_ref().ok_or(VerbsError { verb: "ibv_reg_dmabuf_mr", code: EOPNOTSUPP })?;
    // SAFETY: as above; the descriptor keeps the device's memory.
    unsafe { verbs.register_dmabuf(domain, dmabuf.as_fd(), start, address, len, reach) }
}

impl Local {
    pub(crate) fn new(registration_len_max: u64) -> Self {
        let page = PAGE_LEN as u64;
        let chunk_len = (registration_len_max.min(CHUNK_LEN_MAX) / page * page).max(page);
        Self { regions: HashMap::new(), chunk_len }
    }

    pub(crate) fn chunk_len(&self) -> u64 {
        self.chunk_len
    }

    /// Takes a region. Host memory is registered when it is first used; memory of a GPU now, so that a device that cannot is
    /// known at once and its pair of kinds is never tried.
    pub(crate) fn insert(
        &mut self,
        verbs: &dyn Verbs,
        domain: Domain,
        memory: &RegionMemory,
    ) -> Result<(), RegisterError> {
        if memory.kind == MemoryKind::File {
            return Err(RegisterError::Kind(memory.kind));
        }
        if self.regions.len() >= REGIONS_MAX {
            return Err(RegisterError::Full);
        }
        let count = memory.len.div_ceil(self.chunk_len) as usize;
        let mut region = LocalRegion { memory: memory.clone(), chunks: vec![None; count] };
        if !is_host(memory.kind) {
            for chunk in 0..count as u64 {
                if let Err(error) = region.chunk(verbs, domain, chunk, self.chunk_len) {
                    region.deregister(verbs);
                    return Err(match error.code {
                        EOPNOTSUPP => RegisterError::NoDmabuf(memory.kind),
                        code => RegisterError::System(code),
                    });
                }
            }
        }
        self.regions.insert(memory.id, region);
        Ok(())
    }

    /// The key of a chunk, which is registered if it was not.
    pub(crate) fn chunk_key(
        &mut self,
        verbs: &dyn Verbs,
        domain: Domain,
        region: RegionId,
        chunk: u64,
    ) -> Result<u32, VerbsError> {
        let unknown = VerbsError { verb: "ibv_reg_mr", code: EOPNOTSUPP };
        let chunk_len = self.chunk_len;
        self.regions.get_mut(&region).ok_or(unknown)?.chunk(verbs, domain, chunk, chunk_len)
    }

    /// The key of a chunk that is registered.
    pub(crate) fn known_key(&self, region: RegionId, chunk: u64) -> Option<u32> {
        self.regions.get(&region)?.chunks.get(chunk as usize)?.map(|registration| registration.local_key)
    }

    /// Forgets a region; nothing in flight names it.
    pub(crate) fn remove(&mut self, verbs: &dyn Verbs, region: RegionId) {
        if let Some(mut region) = self.regions.remove(&region) {
            region.deregister(verbs);
        }
    }

    /// Ends all registrations.
    pub(crate) fn clear(&mut self, verbs: &dyn Verbs) {
        self.regions.drain().for_each(|(_, mut region)| region.deregister(verbs));
    }
}

impl LocalRegion {
    fn chunk(&mut self, verbs: &dyn Verbs, domain: Domain, chunk: u64, chunk_len: u64) -> Result<u32, VerbsError> {
        let out_of_range = VerbsError { verb: "ibv_reg_mr", code: EOPNOTSUPP };
        let slot = self.chunks.get_mut(chunk as usize).ok_or(out_of_range)?;
        if let Some(registration) = slot {
            return Ok(registration.local_key);
        }
        let start = chunk * chunk_len;
        let len = chunk_len.min(self.memory.len - start);
        let registration = register(verbs, domain, &self.memory, (start, len), Reach::Local)?;
        *slot = Some(registration);
        Ok(registration.local_key)
    }

    fn deregister(&mut self, verbs: &dyn Verbs) {
        for registration in self.chunks.iter_mut().filter_map(Option::take) {
            // Nothing uses it; a NIC that refuses keeps the pages pinned, which harms nobody.
            let _ = verbs.deregister(registration.handle);
        }
    }
}

/// What a link's peer holds keys to.
#[derive(Debug, Default)]
pub(crate) struct Lending {
    grants: HashMap<RegionId, (Vec<Registration>, Vec<Key>)>,
}

/// A grant could not be taken back from a NIC by deregistering it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StillReachable;

fn reach(rights: Rights) -> Option<Reach> {
    match (rights.allows(Rights::REMOTE_READ), rights.allows(Rights::REMOTE_WRITE)) {
        (true, true) => Some(Reach::RemoteReadWrite),
        (true, false) => Some(Reach::RemoteRead),
        (false, true) => Some(Reach::RemoteWrite),
        (false, false) => None,
    }
}

impl Lending {
    /// The keys to a proven region or grant, made at the first call.
    pub(crate) fn keys(
        &mut self,
        (verbs, domain): (&dyn Verbs, Domain),
        exposure: RegionId,
        lent: &Lent,
        local: &Local,
    ) -> Result<&[Key], Refusal> {
        let (_, keys) = match self.grants.entry(exposure) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(Self::make((verbs, domain), lent, local)?),
        };
        Ok(keys)
    }

    fn make(
        (verbs, domain): (&dyn Verbs, Domain),
        lent: &Lent,
        local: &Local,
    ) -> Result<(Vec<Registration>, Vec<Key>), Refusal> {
        let memory = &local.regions.get(&lent.memory).ok_or(Refusal::NotShareable)?.memory;
        let len_max = local.chunk_len;
        let cuts = || lent.ranges.iter().flat_map(|&(start, end)| pieces(start, end, len_max));
        if cuts().take(KEYS_PER_GRANT_MAX + 1).count() > KEYS_PER_GRANT_MAX {
            return Err(Refusal::NotShareable);
        }
        let (mut registrations, mut keys) = (Vec::new(), Vec::new());
        let Some(reach) = reach(lent.rights) else { return Ok((registrations, keys)) };
        for (offset, len) in cuts() {
            match register(verbs, domain, memory, (offset, len), reach) {
                Ok(registration) => {
                    let address = memory.base.as_ptr().addr() as u64 + offset;
                    keys.push(Key { offset, len, address, remote_key: registration.remote_key });
                    registrations.push(registration);
                }
                Err(error) => {
                    for registration in registrations {
                        // No peer has its key yet.
                        let _ = verbs.deregister(registration.handle);
                    }
                    return Err(match error.code {
                        ENOMEM | EAGAIN => Refusal::Busy,
                        EOPNOTSUPP => Refusal::NotShareable,
                        _ => Refusal::Failed,
                    });
                }
            }
        }
        Ok((registrations, keys))
    }

    /// Makes the keys of a grant void. `Ok(true)` if there were any.
    pub(crate) fn revoke(&mut self, verbs: &dyn Verbs, exposure: RegionId) -> Result<bool, StillReachable> {
        let Some((registrations, _)) = self.grants.get_mut(&exposure) else { return Ok(false) };
        while let Some(registration) = registrations.last() {
            verbs.deregister(registration.handle).map_err(|_| StillReachable)?;
            registrations.pop();
        }
        self.grants.remove(&exposure);
        Ok(true)
    }

    /// Makes all keys void; the link's queue pairs are destroyed, so no peer reaches anything by them.
    pub(crate) fn clear(&mut self, verbs: &dyn Verbs) {
        for (_, (registrations, _)) in self.grants.drain() {
            for registration in registrations {
                let _ = verbs.deregister(registration.handle);
            }
        }
    }
}
