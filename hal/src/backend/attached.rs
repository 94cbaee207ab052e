//! The regions and grants that batches on one link may name, for backends whose two ends are one fabric.

use std::collections::HashMap;

use millpond_core::batch::{Capability, RegionId, RegionToken};

use crate::contract::{Refusal, RegisterError};

/// Regions and grants of one link.
const ATTACHED_MAX: usize = 16_384;

/// What is attached on one link.
#[derive(Debug, Default)]
pub(super) struct Attachments {
    by_region: HashMap<RegionId, Attached>,
}

#[derive(Clone, Copy, Debug)]
struct Attached {
    capability: Capability,
    proven: bool,
}

impl Attachments {
    /// Takes a token in. Another one for the same region is proven too; what was accepted before stays accepted.
    pub(super) fn attach(&mut self, token: &RegionToken) -> Result<(), RegisterError> {
        let is_full = self.by_region.len() >= ATTACHED_MAX;
        let fresh = Attached { capability: token.capability, proven: false };
        match self.by_region.get_mut(&token.region) {
            Some(known) if !known.proven && !known.capability.matches(&token.capability) => *known = fresh,
            Some(_) => {}
            None if is_full => return Err(RegisterError::Full),
            None => drop(self.by_region.insert(token.region, fresh)),
        }
        Ok(())
    }

    pub(super) fn detach(&mut self, region: RegionId) {
        self.by_region.remove(&region);
    }

    /// Has the capability of `region` shown, unless it was before.
    pub(super) fn prove(
        &mut self,
        region: RegionId,
        show: impl FnOnce(Capability) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let attached = self.by_region.get_mut(&region).ok_or(Refusal::NotProven)?;
        if !attached.proven {
            show(attached.capability)?;
            attached.proven = true;
        }
        Ok(())
    }
}
