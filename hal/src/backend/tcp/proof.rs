//! Proofs that were refused, so that who uses the region nevertheless is told why.
//!
//! Bounded: of more refused proofs than [`REFUSED_MAX`] the oldest are forgotten, and their users hear `NotProven`.
#![allow(unsafe_code)]

use core::ptr::NonNull;

use millpond_core::batch::{Capability, RegionId};

use crate::contract::{Access, Event, Inbound, LinkId, PostedArrival, Proven, Refusal, RemoteRange};

/// Refused proofs remembered per lane.
const REFUSED_MAX: usize = 64;

/// The refused proofs of one lane.
#[derive(Default)]
pub(super) struct Refused(Vec<(RegionId, Refusal)>);

/// The fabric as one lane sees it.
pub(super) struct Guarded<'a> {
    pub(super) inbound: &'a mut dyn Inbound,
    pub(super) refused: &'a mut Refused,
}

impl Guarded<'_> {
    fn explained(&self, region: RegionId, refusal: Refusal) -> Refusal {
        let known = |(refused, _): &&(RegionId, Refusal)| refusal == Refusal::NotProven && *refused == region;
        self.refused.0.iter().find(known).map_or(refusal, |(_, why)| *why)
    }
}

// SAFETY: every pointer comes from the fabric's own `resolve`, for the range and access asked for.
unsafe impl Inbound for Guarded<'_> {
    fn prove(&mut self, link: LinkId, region: RegionId, capability: Capability) -> Result<Proven, Refusal> {
        self.refused.0.retain(|(refused, _)| *refused != region);
        let proven = self.inbound.prove(link, region, capability);
        if let Err(refusal) = proven {
            if self.refused.0.len() >= REFUSED_MAX {
                self.refused.0.remove(0);
            }
            self.refused.0.push((region, refusal));
        }
        proven
    }

    fn resolve(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<NonNull<u8>, Refusal> {
        self.inbound.resolve(link, range, access).map_err(|refusal| self.explained(range.region, refusal))
    }

    fn admit(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<RegionId, Refusal> {
        self.inbound.admit(link, range, access).map_err(|refusal| self.explained(range.region, refusal))
    }

    fn arrive(&mut self, link: LinkId, arrival: PostedArrival) -> Result<(), Refusal> {
        self.inbound.arrive(link, arrival).map_err(|refusal| self.explained(arrival.region, refusal))
    }

    fn event(&mut self, event: Event) {
        self.inbound.event(event);
    }
}
