//! Which of a port's addresses to use: the best ranked one, or the one that was asked for.
//!
//! A RoCE port has several addresses (GIDs) for each IP address, some of which no peer can reach: version 1 ones, those of
//! container bridges, link-local ones. A pure function; what a table holds is read by [`super::verbs::Verbs::gids`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What sort of address.
///
/// ```
/// use millpond_hal::backend::rdma::gid::GidKind;
/// assert_ne!(GidKind::RoceV1, GidKind::RoceV2); // the first is used if there is nothing else
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: not routable, and not understood by every peer.
    RoceV1,
    /// RoCE version 2: over UDP.
    RoceV2,
}

/// One address of a port.
///
/// ```
/// use millpond_hal::backend::rdma::gid::{GidEntry, GidKind, choose};
/// let only = GidEntry { index: 0, gid: [1; 16], kind: GidKind::InfiniBand, interface: None };
/// assert_eq!(choose(&[only.clone()], None), Ok(&only));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Where in the port's table.
    pub index: u8,
    /// The address.
    pub gid: [u8; 16],
    /// What sort.
    pub kind: GidKind,
    /// Name of the network interface that it belongs to, if known.
    pub interface: Option<String>,
}

/// Prefixes of interfaces that exist inside this host only, or that wrap packets: peers are not reached directly.
const OVERLAYS: [&str; 9] = ["docker", "veth", "cni", "flannel", "cali", "vxlan", "tunl", "virbr", "br-"];

/// No address was chosen.
///
/// ```
/// use millpond_hal::backend::rdma::gid::{NoGid, choose};
/// assert_eq!(choose(&[], None).unwrap_err(), NoGid::Empty);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGid {
    /// The table holds nothing usable.
    #[error("the port has no usable address; give its network interface an IP address")]
    Empty,
    /// What was asked for is not there.
    #[error("the port has no address with index {index}; leave the choice open or name one of its table")]
    Unknown {
        /// The index asked for.
        index: u8,
    },
}

fn ip(gid: &[u8; 16]) -> IpAddr {
    let address = Ipv6Addr::from(*gid);
    address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
}

/// How far an address reaches: 0 anywhere, 1 within a site, 2 on the link only.
fn scope(gid: &[u8; 16]) -> u8 {
    let shared = |v4: Ipv4Addr| v4.octets()[0] == 100 && v4.octets()[1] & 0xC0 == 64;
    match ip(gid) {
        IpAddr::V4(v4) if v4.is_link_local() || v4.is_loopback() => 2,
        IpAddr::V4(v4) if v4.is_private() || shared(v4) => 1,
        IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_loopback() => 2,
        IpAddr::V6(v6) if v6.is_unique_local() => 1,
        _ => 0,
    }
}

/// The rank of an address, lower is better; `None` for an empty place of the table. In order: not version 1, not an overlay's,
/// not link-local, of a known interface, IPv4 (what fabrics route most often), as far-reaching as there is, first in the table.
///
/// ```
/// use millpond_hal::backend::rdma::gid::{GidEntry, GidKind, rank};
/// let mut gid = [0; 16];
/// gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, 1]);
/// let v2 = GidEntry { index: 3, gid, kind: GidKind::RoceV2, interface: Some("eth0".into()) };
/// let v1 = GidEntry { index: 2, kind: GidKind::RoceV1, ..v2.clone() };
/// assert!(rank(&v2) < rank(&v1));
/// ```
#[must_use]
pub fn rank(entry: &GidEntry) -> Option<[u8; 7]> {
    if entry.gid == [0; 16] {
        return None;
    }
    let is_overlay = entry.interface.as_ref().is_some_and(|name| OVERLAYS.iter().any(|known| name.starts_with(known)));
    // InfiniBand's own addresses are link-local by form and reach the whole subnet.
    let scope = if entry.kind == GidKind::InfiniBand { 0 } else { scope(&entry.gid) };
    Some([
        u8::from(entry.kind == GidKind::RoceV1),
        u8::from(is_overlay),
        u8::from(scope == 2),
        u8::from(entry.interface.is_none() && entry.kind != GidKind::InfiniBand),
        u8::from(ip(&entry.gid).is_ipv6() && entry.kind != GidKind::InfiniBand),
        scope,
        entry.index,
    ])
}

/// The address to use: the one with index `wanted`, or the best ranked.
///
/// # Errors
/// See [`NoGid`].
pub fn choose(table: &[GidEntry], wanted: Option<u8>) -> Result<&GidEntry, NoGid> {
    let usable = table.iter().filter_map(|entry| Some((rank(entry)?, entry)));
    match wanted {
        Some(index) => {
            usable.map(|(_, entry)| entry).find(|entry| entry.index == index).ok_or(NoGid::Unknown { index })
        }
        None => usable.min_by_key(|(rank, _)| *rank).map(|(_, entry)| entry).ok_or(NoGid::Empty),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u8, address: &str, kind: GidKind, interface: Option<&str>) -> GidEntry {
        let gid = match address.parse::<IpAddr>().unwrap() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        GidEntry { index, gid, kind, interface: interface.map(String::from) }
    }

    #[test]
    fn addresses_are_ranked_by_who_can_reach_them() {
        use GidKind::{RoceV1, RoceV2};
        let best_first = [
            entry(9, "192.0.2.7", RoceV2, Some("eth0")),
            entry(7, "10.1.2.3", RoceV2, Some("eth0")),
            entry(8, "100.64.0.9", RoceV2, Some("eth1")),
            entry(11, "2001:db8::1", RoceV2, Some("eth0")),
            entry(10, "fd00::1", RoceV2, Some("eth0")),
            entry(6, "10.1.2.3", RoceV2, None),
            entry(5, "fe80::1", RoceV2, Some("eth0")),
            entry(4, "172.17.0.1", RoceV2, Some("docker0")),
            entry(3, "192.0.2.7", RoceV1, Some("eth0")),
            entry(2, "fe80::1", RoceV1, Some("eth0")),
        ];
        for count in 1..=best_first.len() {
            let mut table = best_first[best_first.len() - count..].to_vec();
            table.push(entry(0, "::", RoceV2, Some("eth0")));
            table.sort_by_key(|entry| entry.index);
            assert_eq!(choose(&table, None), Ok(&best_first[best_first.len() - count]), "of {count}");
        }
    }

    #[test]
    fn equals_go_by_their_place_in_the_table() {
        let table =
            [entry(5, "10.0.0.2", GidKind::RoceV2, Some("eth1")), entry(3, "10.0.0.1", GidKind::RoceV2, Some("eth0"))];
        assert_eq!(choose(&table, None).unwrap().index, 3);
    }

    #[test]
    fn the_first_infiniband_address_is_good() {
        let table = [
            entry(0, "fe80::2:c903:1:2", GidKind::InfiniBand, None),
            entry(1, "fe80::2:c903:1:3", GidKind::InfiniBand, None),
        ];
        assert_eq!(choose(&table, None).unwrap().index, 0);
    }

    #[test]
    fn a_wish_is_kept_or_refused_never_replaced() {
        let table = [
            entry(1, "10.0.0.1", GidKind::RoceV2, Some("eth0")),
            entry(0, "10.0.0.1", GidKind::RoceV1, Some("eth0")),
            entry(2, "::", GidKind::RoceV2, None),
        ];
        assert_eq!(choose(&table, Some(0)).unwrap().index, 0);
        assert_eq!(choose(&table, Some(2)), Err(NoGid::Unknown { index: 2 }));
        assert_eq!(choose(&table[2..], None), Err(NoGid::Empty));
    }
}
