//! The NICs that an engine may open rails over.
//!
//! An engine opens none itself: whoever starts it hands them in, opened, with what its operator laid down about them. What
//! is handed in is numbered in that order, and told to peers.

use std::fmt;

use millpond_core::topology::{At, Inventory, Matrix, Medium, Name, Nic as About, Place, Row};
use millpond_core::wire::message::rail::{RAIL_NICS_MAX, RailNic};
use millpond_hal::backend::rdma::Nic;

/// A NIC, opened, and how it may be used.
///
/// Example: `verify/tests/engine_rails.rs`.
#[derive(Clone)]
pub struct OwnNic {
    pub(super) nic: Nic,
    pub(super) about: About,
    is_preferred: bool,
}

impl fmt::Debug for OwnNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.about.name)
    }
}

impl OwnNic {
    /// A NIC that speaks `medium`, preferred as much as any. `None`: its name is none.
    #[must_use]
    pub fn new(nic: Nic, medium: Medium) -> Option<Self> {
        let name: Name = nic.name().parse().ok()?;
        Some(Self { nic, about: About::new(name, medium, At::default()), is_preferred: true })
    }

    /// The same, for use when none of those that are preferred works.
    #[must_use]
    pub fn as_fallback(self) -> Self {
        Self { is_preferred: false, ..self }
    }

    /// As peers are told of it.
    fn told(&self) -> RailNic {
        let counts = self.nic.counts();
        let medium = if self.about.medium == Medium::InfiniBand { INFINIBAND } else { ETHERNET };
        RailNic {
            name: self.about.name.as_str().to_owned(),
            medium,
            is_preferred: self.is_preferred,
            events: counts.port_downs + counts.port_ups + counts.address_changes,
        }
    }
}

const INFINIBAND: u32 = 1;
const ETHERNET: u32 = 2;

/// What a peer is told of the NICs here.
pub(super) fn told(nics: &[OwnNic]) -> Vec<RailNic> {
    nics.iter().take(RAIL_NICS_MAX).map(OwnNic::told).collect()
}

/// NICs of one machine, in a form that pairs can be made of.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) nics: Vec<About>,
    pub(super) row: Row,
}

impl Side {
    /// From what a machine tells of its NICs. `None`: it makes no sense.
    pub(super) fn of(told: &[RailNic]) -> Option<Self> {
        if told.len() > RAIL_NICS_MAX {
            return None;
        }
        let about = |nic: &RailNic| {
            let medium = match nic.medium {
                INFINIBAND => Medium::InfiniBand,
                ETHERNET => Medium::Roce,
                _ => return None,
            };
            Some(About::new(nic.name.parse().ok()?, medium, At::default()))
        };
        let nics = told.iter().map(about).collect::<Option<Vec<_>>>()?;
        let named = |is_preferred: bool| {
            told.iter().filter(move |nic| nic.is_preferred == is_preferred).map(|nic| nic.name.as_str())
        };
        let mut matrix = Matrix::configured([Row::EMPTY; 1]);
        let inventory = Inventory { nics: &nics, spots: &[] };
        matrix.add(&inventory, Place::ANY, named(true), named(false)).ok()?;
        let row = *matrix.rows().first()?;
        Some(Self { nics, row })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(name: &str, medium: u32) -> RailNic {
        RailNic { name: name.to_owned(), medium, is_preferred: true, events: 0 }
    }

    #[test]
    fn what_a_peer_tells_of_its_nics_is_taken_whole_or_not_at_all() {
        let both = [nic("a", INFINIBAND), RailNic { is_preferred: false, ..nic("b", ETHERNET) }];
        let side = Side::of(&both).expect("it makes sense");
        assert_eq!((side.row.preferred(), side.row.available()), (&[0][..], &[1][..]));
        for wrong in [&[nic("a", 1), nic("a", 1)][..], &[nic("two words", 1)], &[nic("a", 9)], &vec![nic("a", 1); 65]] {
            assert!(Side::of(wrong).is_none(), "{wrong:?}");
        }
    }
}
