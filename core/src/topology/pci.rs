//! Paths of PCIe bridges, and how near two devices are by them.

use core::fmt;
use core::str::FromStr;

/// Bridges from a host bridge down to a device, the device included, at most.
pub const PCI_DEPTH_MAX: usize = 16;

/// Where a PCI function sits: `domain:bus:device.function`, all in hexadecimal.
///
/// ```
/// use millpond_core::topology::PciAddress;
/// let address: PciAddress = "0000:3b:00.1".parse().unwrap();
/// assert_eq!((address.bus, address.function), (0x3b, 1));
/// assert_eq!(address.to_string(), "0000:3b:00.1");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Segment of the machine.
    pub domain: u32,
    /// Bus in it.
    pub bus: u8,
    /// Device on the bus, below 32.
    pub device: u8,
    /// Function of the device, below 8.
    pub function: u8,
}

fn hex(text: &str, digits: core::ops::RangeInclusive<usize>) -> Option<u32> {
    let is_hex = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hex { u32::from_str_radix(text, 16).ok() } else { None }
}

impl PciAddress {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let domain = hex(parts.next()?, 4..=8)?;
        let bus = u8::try_from(hex(parts.next()?, 2..=2)?).ok()?;
        let (device, function) = parts.next()?.split_once('.')?;
        let device = u8::try_from(hex(device, 2..=2)?).ok().filter(|device| *device < 32)?;
        let function = u8::try_from(hex(function, 1..=1)?).ok().filter(|function| *function < 8)?;
        Some(Self { domain, bus, device, function })
    }

    /// Whether both are functions of one device.
    fn is_same_card(&self, other: &Self) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

impl FromStr for PciAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text).ok_or("a PCI address is written domain:bus:device.function, such as 0000:3b:00.0")
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// The way from a host bridge over PCIe bridges down to a device.
///
/// ```
/// use millpond_core::topology::PciPath;
/// let path = "/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/virtio2/net/eth0";
/// let path = PciPath::of_sysfs(path).unwrap();
/// assert_eq!(path.device().to_string(), "0000:3b:00.0");
/// assert_eq!(path.steps().len(), 2); // the root port and the device
/// assert!(PciPath::of_sysfs("/sys/devices/virtual/net/lo").is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciPath {
    /// Domain and bus of the host bridge.
    host_bridge: (u32, u8),
    steps: [PciAddress; PCI_DEPTH_MAX],
    len: u8,
}

impl PciPath {
    /// The path that lies in a resolved path below `/sys/devices`. `None`: no PCI device, or deeper than
    /// [`PCI_DEPTH_MAX`]. Where one host bridge lies behind another device, the innermost one counts.
    #[must_use]
    pub fn of_sysfs(path: &str) -> Option<Self> {
        let mut found: Option<Self> = None;
        for part in path.split('/') {
            if let Some(bridge) = part.strip_prefix("pci").and_then(|bridge| bridge.split_once(':')) {
                let (Some(domain), Some(bus)) = (hex(bridge.0, 4..=8), hex(bridge.1, 2..=2)) else { continue };
                let host_bridge = (domain, u8::try_from(bus).ok()?);
                found = Some(Self { host_bridge, steps: [PciAddress::default(); PCI_DEPTH_MAX], len: 0 });
            } else if let (Some(path), Some(step)) = (&mut found, PciAddress::parse(part)) {
                *path.steps.get_mut(usize::from(path.len))? = step;
                path.len += 1;
            }
        }
        found.filter(|path| path.len > 0)
    }

    /// The bridges from the top, and at the end the device.
    #[must_use]
    pub fn steps(&self) -> &[PciAddress] {
        &self.steps[..usize::from(self.len)]
    }

    /// The device itself.
    #[must_use]
    pub fn device(&self) -> PciAddress {
        self.steps().last().copied().unwrap_or_default()
    }
}

/// Where a device or a place is: its path of bridges and its NUMA node, each if known.
///
/// ```
/// use millpond_core::topology::{At, Distance, Nearness};
/// let node = |node| At { pci: None, node: Some(node) };
/// assert_eq!(Distance::between(&node(0), &node(0)).nearness, Nearness::Node);
/// assert_eq!(Distance::between(&node(0), &node(1)).nearness, Nearness::System);
/// assert_eq!(Distance::between(&node(0), &At::default()).nearness, Nearness::Unknown);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct At {
    /// The path of bridges; `None`: no PCI device, or hidden.
    pub pci: Option<PciPath>,
    /// The NUMA node; `None`: the machine does not say (−1 in sysfs).
    pub node: Option<u32>,
}

/// What lies between two devices, nearest first. The names in brackets are those of the field's tools.
///
/// ```
/// use millpond_core::topology::Nearness;
/// assert!(Nearness::Switch < Nearness::HostBridge && Nearness::Unknown < Nearness::System);
/// assert_eq!(Nearness::Switch.code(), "PIX");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Nearness {
    /// They are functions of one device.
    Card,
    /// One PCIe switch, or one bridge (PIX).
    Switch,
    /// Several PCIe switches, and no host bridge (PXB).
    Switches,
    /// One host bridge (PHB).
    HostBridge,
    /// The NUMA node (NODE).
    Node,
    /// The machine does not say. Nearer than what is known to be far.
    Unknown,
    /// The link between NUMA nodes (SYS).
    System,
}

impl Nearness {
    /// As the field's tools write it.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Card => "CARD",
            Self::Switch => "PIX",
            Self::Switches => "PXB",
            Self::HostBridge => "PHB",
            Self::Node => "NODE",
            Self::Unknown => "?",
            Self::System => "SYS",
        }
    }
}

impl fmt::Display for Nearness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Card => "on the same card",
            Self::Switch => "behind the same PCIe switch",
            Self::Switches => "behind the same root port, over several PCIe switches",
            Self::HostBridge => "at the same host bridge",
            Self::Node => "on the same NUMA node",
            Self::Unknown => "at an unknown distance (the machine names no NUMA node)",
            Self::System => "on another NUMA node",
        })
    }
}

/// How near two devices are; the smaller, the nearer.
///
/// ```
/// use millpond_core::topology::{At, Distance, Nearness, PciPath};
/// let at = |path: &str| At { pci: PciPath::of_sysfs(path), node: None };
/// let gpu = at("/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.0");
/// let nic = at("/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0");
/// let distance = Distance::between(&gpu, &nic); // down ports 18:00.0 and 18:01.0 of the switch at 17:00.0
/// assert_eq!(distance, Distance { nearness: Nearness::Switch, hops: 4 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Distance {
    /// What lies between.
    pub nearness: Nearness,
    /// Steps up from the one to what both share, and down to the other; 0 if a path is not known.
    pub hops: u8,
}

impl Distance {
    /// How near two devices are.
    #[must_use]
    pub fn between(one: &At, other: &At) -> Self {
        let by_node = match (one.node, other.node) {
            (Some(one), Some(other)) if one == other => Nearness::Node,
            (Some(_), Some(_)) => Nearness::System,
            _ => Nearness::Unknown,
        };
        let (Some(one), Some(other)) = (&one.pci, &other.pci) else { return Self { nearness: by_node, hops: 0 } };
        if one.host_bridge != other.host_bridge {
            // Both ways up to their host bridges, and from one of those to the other.
            return Self { nearness: by_node, hops: one.len + other.len + 1 };
        }
        let shared = one.steps().iter().zip(other.steps()).take_while(|(one, other)| one == other).count();
        let shared = u8::try_from(shared).unwrap_or(u8::MAX);
        let (down, down_other) = (one.len - shared, other.len - shared);
        let nearness = match down.max(down_other) {
            _ if one.device().is_same_card(&other.device()) => Nearness::Card,
            _ if shared == 0 => Nearness::HostBridge,
            // A port of the switch that both share, and the device.
            0..=2 => Nearness::Switch,
            _ => Nearness::Switches,
        };
        Self { nearness, hops: down + down_other }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hops {
            0 => write!(f, "{}", self.nearness),
            hops => write!(f, "{}, {hops} hops", self.nearness),
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::format;

    fn at(path: &str, node: Option<u32>) -> At {
        let pci = PciPath::of_sysfs(path);
        assert!(pci.is_some(), "{path}");
        At { pci, node }
    }

    fn between(one: &str, other: &str) -> Distance {
        let (one, other) = (at(one, Some(0)), at(other, Some(0)));
        assert_eq!(Distance::between(&one, &other), Distance::between(&other, &one), "it is the same both ways");
        Distance::between(&one, &other)
    }

    #[test]
    fn the_deepest_bridge_that_both_share_decides() {
        let gpu = "/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.0";
        let cases = [
            ("pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.1", Nearness::Card, 2),
            ("pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", Nearness::Switch, 4),
            (
                "pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:02.0/0000:1b:00.0/0000:1c:00.0/0000:1d:00.0",
                Nearness::Switches,
                6,
            ),
            ("pci0000:16/0000:16:04.0/0000:20:00.0", Nearness::HostBridge, 6),
            ("pci0000:30/0000:30:02.0/0000:31:00.0", Nearness::Node, 7),
        ];
        for (nic, nearness, hops) in cases {
            assert_eq!(between(gpu, &format!("/sys/devices/{nic}/net/eth0")), Distance { nearness, hops }, "{nic}");
        }
    }

    #[test]
    fn another_host_bridge_is_as_far_as_its_numa_node() {
        let (one, other) = ("/sys/devices/pci0000:00/0000:00:01.0", "/sys/devices/pci0000:80/0000:80:01.0");
        let nearness = |here, there| Distance::between(&at(one, here), &at(other, there)).nearness;
        assert_eq!(nearness(Some(0), Some(0)), Nearness::Node);
        assert_eq!(nearness(Some(0), Some(1)), Nearness::System);
        assert_eq!(nearness(Some(0), None), Nearness::Unknown);
        assert_eq!(nearness(None, None), Nearness::Unknown);
    }

    #[test]
    fn a_flat_virtual_machine_puts_all_at_one_host_bridge() {
        let one = "/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0";
        assert_eq!(between(one, "/sys/devices/pci0000:00/0000:00:05.0").nearness, Nearness::HostBridge);
    }

    #[test]
    fn what_is_no_path_of_bridges_is_none() {
        let deep = "/0000:01:00.0".repeat(PCI_DEPTH_MAX + 1);
        let deep = format!("/sys/devices/pci0000:00{deep}");
        let none = [
            "",
            "/sys/devices/virtual/net/lo",
            "/sys/devices/pci0000:00",
            "/sys/devices/pci0000:zz/0000:00:01.0",
            &deep,
        ];
        for path in none {
            assert_eq!(PciPath::of_sysfs(path), None, "{path}");
        }
        for bad in ["0000:00:20.0", "0000:00:01.8", "000:00:01.0", "0000:0:01.0", "0000:00:01", "0000:00:01.0 "] {
            assert!(bad.parse::<PciAddress>().is_err(), "{bad}");
        }
        let nested = "/sys/devices/pci0000:97/0000:97:00.5/pci10000:00/10000:00:02.0/10000:01:00.0";
        assert_eq!(PciPath::of_sysfs(nested).expect("behind another host bridge").steps().len(), 2);
    }
}
