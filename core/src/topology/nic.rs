//! The NICs and the places of one machine, as tables, and who may be used among them.

use core::fmt;

use super::{At, Name, Place};

/// What a NIC speaks.
///
/// ```
/// use millpond_core::topology::Medium;
/// assert!(Medium::Roce.is_rdma() && !Medium::Net.is_rdma());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Medium {
    /// RDMA over InfiniBand.
    InfiniBand,
    /// RDMA over Ethernet.
    Roce,
    /// A network interface of the kernel: tcp.
    Net,
}

impl Medium {
    /// Whether it moves bytes without the kernel.
    #[must_use]
    pub const fn is_rdma(self) -> bool {
        matches!(self, Self::InfiniBand | Self::Roce)
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Roce => "RoCE",
            Self::Net => "net",
        })
    }
}

/// Why a NIC cannot be used at all.
///
/// ```
/// use millpond_core::topology::Unfit;
/// assert!(Unfit::NoGid.to_string().contains("GID"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unfit {
    /// It reaches this host only.
    Loopback,
    /// It is administratively down, or has no link.
    Down,
    /// No port of it is active.
    NoActivePort,
    /// Its table of addresses is empty.
    NoGid,
    /// This process may not open its device file.
    NoAccess,
    /// It has no device file: the module `ib_uverbs` is not loaded, or the container was not given it.
    NoDeviceFile,
    /// The list of denied NICs names it.
    Denied,
    /// There is a list of allowed NICs, and it does not name this one.
    NotAllowed,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Loopback => "it reaches this host only",
            Self::Down => "it is down; `ip link` shows why",
            Self::NoActivePort => "none of its ports is active; check cable and switch, or the subnet manager",
            Self::NoGid => "its GID table is empty; give its network interface an address",
            Self::NoAccess => "its device file may not be opened; give this user /dev/infiniband/uverbs*",
            Self::NoDeviceFile => "it has no device file; load ib_uverbs, or pass /dev/infiniband into the container",
            Self::Denied => "the list of denied NICs names it",
            Self::NotAllowed => "the list of allowed NICs does not name it",
        })
    }
}

/// One NIC.
///
/// ```
/// use millpond_core::topology::{At, Medium, Nic};
/// let nic = Nic::new("eth0".parse().unwrap(), Medium::Net, At::default());
/// assert!(nic.unfit.is_none() && nic.mbps == 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Nic {
    /// Its name in the system: `mlx5_0`, `eth0`.
    pub name: Name,
    /// What it speaks.
    pub medium: Medium,
    /// Where it sits.
    pub at: At,
    /// Its speed in megabits per second; 0: it does not say.
    pub mbps: u32,
    /// Why it cannot be used; `None`: it can.
    pub unfit: Option<Unfit>,
    /// The same hardware under its other name: the network interface of an RDMA device.
    pub twin: Option<Name>,
}

impl Nic {
    /// A NIC of which nothing else is known, fit for use.
    #[must_use]
    pub const fn new(name: Name, medium: Medium, at: At) -> Self {
        Self { name, medium, at, mbps: 0, unfit: None, twin: None }
    }

    /// With a speed in megabits per second.
    #[must_use]
    pub const fn with_mbps(self, mbps: u32) -> Self {
        Self { mbps, ..self }
    }
}

/// A place where memory lies: a NUMA node or a GPU.
///
/// ```
/// use millpond_core::topology::{At, Place, Spot};
/// let node = Spot { place: Place::cpu(0), at: At { pci: None, node: Some(0) } };
/// assert_eq!(node.place.to_string(), "cpu:0");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Its name.
    pub place: Place,
    /// Where it sits.
    pub at: At,
}

/// The tables of one machine. A NIC is named by its index here within one process; between processes by its name.
///
/// ```
/// use millpond_core::topology::{At, Inventory, Medium, Nic};
/// let nics = [Nic::new("eth0".parse().unwrap(), Medium::Net, At::default())];
/// let inventory = Inventory { nics: &nics, spots: &[] };
/// assert_eq!(inventory.nic("eth0"), Some(0));
/// assert_eq!(inventory.nic("eth1"), None);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Inventory<'a> {
    /// Its NICs.
    pub nics: &'a [Nic],
    /// Where its memory lies.
    pub spots: &'a [Spot],
}

impl Inventory<'_> {
    /// The index of the NIC with that name.
    #[must_use]
    pub fn nic(&self, name: &str) -> Option<u8> {
        let at = self.nics.iter().position(|nic| nic.name.as_str() == name)?;
        u8::try_from(at).ok()
    }
}

/// Which NICs an operator allows and denies, by name; a name that ends in `*` means all that begin like it.
///
/// ```
/// use millpond_core::topology::{At, Filter, Medium, Nic, Unfit};
/// let nic = |name: &str| Nic::new(name.parse().unwrap(), Medium::Roce, At::default());
/// let mut nics = [nic("mlx5_0"), nic("mlx5_1"), nic("irdma0")];
/// Filter { allow: &["mlx5_*"], deny: &["mlx5_1"] }.apply(&mut nics).unwrap();
/// assert_eq!(nics.map(|nic| nic.unfit), [None, Some(Unfit::Denied), Some(Unfit::NotAllowed)]);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Filter<'a> {
    /// Only these; empty: all.
    pub allow: &'a [&'a str],
    /// Not these, allowed or not.
    pub deny: &'a [&'a str],
}

/// The list of allowed NICs names one that is not there.
///
/// ```
/// use millpond_core::topology::{Filter, NoSuchNic};
/// let filter = Filter { allow: &["mlx5_7"], deny: &[] };
/// assert_eq!(filter.apply(&mut []), Err(NoSuchNic("mlx5_7")));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuchNic<'a>(pub &'a str);

impl fmt::Display for NoSuchNic<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the list of allowed NICs names {}, which this machine does not have", self.0)
    }
}

impl core::error::Error for NoSuchNic<'_> {}

impl<'a> Filter<'a> {
    fn names(listed: &str, nic: &Nic) -> bool {
        match listed.strip_suffix('*') {
            Some(start) => nic.name.as_str().starts_with(start),
            None => nic.name.as_str() == listed,
        }
    }

    /// Marks what may not be used; a reason that a NIC has already stays. An allowed NIC that is not there is an error, and
    /// then nothing is marked: what was asked for by name is used, or refused.
    pub fn apply(&self, nics: &mut [Nic]) -> Result<(), NoSuchNic<'a>> {
        if let Some(missing) = self.allow.iter().find(|listed| !nics.iter().any(|nic| Self::names(listed, nic))) {
            return Err(NoSuchNic(missing));
        }
        for nic in nics {
            let is_allowed = self.allow.is_empty() || self.allow.iter().any(|listed| Self::names(listed, nic));
            let reason = match self.deny.iter().any(|listed| Self::names(listed, nic)) {
                true => Some(Unfit::Denied),
                false if !is_allowed => Some(Unfit::NotAllowed),
                false => None,
            };
            nic.unfit = nic.unfit.or(reason);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nics() -> [Nic; 3] {
        ["mlx5_0", "mlx5_10", "eth0"].map(|name| Nic::new(name.parse().expect("a name"), Medium::Net, At::default()))
    }

    #[test]
    fn deny_wins_over_allow_and_an_older_reason_stays() {
        let mut nics = nics();
        nics[2].unfit = Some(Unfit::Down);
        Filter { allow: &["*"], deny: &["mlx5_1*", "eth0", "absent"] }.apply(&mut nics).expect("all are there");
        assert_eq!(nics.map(|nic| nic.unfit), [None, Some(Unfit::Denied), Some(Unfit::Down)]);
    }

    #[test]
    fn a_name_without_a_star_means_one_nic_only() {
        let mut nics = nics();
        Filter { allow: &["mlx5_1"], deny: &[] }.apply(&mut nics).expect_err("mlx5_10 is another one");
        assert!(nics.iter().all(|nic| nic.unfit.is_none()), "a refused list marks nothing");
    }
}
