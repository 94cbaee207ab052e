//! Reading sysfs. Every value is small text that may be missing, odd or changing while it is read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use millpond_core::topology::{At, Medium, Name, Nic, PciAddress, PciPath, Place, Spot, Unfit};
use rustix::fs::{Access, access};

use super::{Gpu, Machine, Roots};

/// Entries of one folder that are looked at.
const ENTRIES_MAX: usize = 4096;
/// The kernel's number for loopback interfaces (ARPHRD_LOOPBACK).
const TYPE_LOOPBACK: &str = "772";
/// An interface's flag for "administratively up" (IFF_UP).
const FLAG_UP: u32 = 1;

/// GPU vendors: PCI vendor, the word of their places, and the driver without which their library sees nothing.
const GPU_VENDORS: [(&str, &str, &str); 2] = [("0x10de", "cuda", "nvidia"), ("0x1002", "hip", "amdgpu")];

pub(super) fn read(roots: &Roots) -> Machine {
    let mut machine = Machine::default();
    let nodes = nodes(roots);
    let reader = Reader { roots, only_node: if let [only] = nodes[..] { Some(only) } else { None } };
    machine.nics = reader.rdma(&mut machine.notes);
    let interfaces = reader.interfaces(&mut machine.notes);
    machine.nics.extend(interfaces);
    machine.spots = match nodes.as_slice() {
        [] => {
            machine.notes.push("the machine names no NUMA node; all host memory counts as cpu:0".to_owned());
            vec![Spot { place: Place::cpu(0), at: At::default() }]
        }
        nodes => nodes
            .iter()
            .map(|node| Spot { place: Place::cpu(*node), at: At { pci: None, node: Some(*node) } })
            .collect(),
    };
    reader.gpus(&mut machine);
    machine
}

/// Names in a folder, those with numbers in the order of their numbers.
fn names(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder)?.take(ENTRIES_MAX).flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_by_cached_key(|name| {
        let word = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
        (word.to_owned(), name[word.len()..].parse::<u64>().ok(), name.clone())
    });
    Ok(names)
}

fn text(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

fn nodes(roots: &Roots) -> Vec<u32> {
    let names = names(&roots.sys.join("devices/system/node")).unwrap_or_default();
    names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect()
}

struct Reader<'a> {
    roots: &'a Roots,
    /// The one NUMA node, where there is only one: then everything is on it, whatever devices say.
    only_node: Option<u32>,
}

impl Reader<'_> {
    fn sys(&self, path: &str) -> PathBuf {
        self.roots.sys.join(path)
    }

    /// Where a device sits, by the folder that its class links to and the folder that tells its NUMA node.
    fn at(&self, entry: &Path, device: &Path) -> At {
        let resolved = entry.canonicalize().ok();
        let pci = resolved.as_deref().and_then(Path::to_str).and_then(PciPath::of_sysfs);
        // -1: the firmware did not say.
        let told = text(&device.join("numa_node")).and_then(|node| node.parse().ok());
        At { pci, node: told.or(self.only_node) }
    }

    fn list(&self, class: &str, notes: &mut Vec<String>) -> Vec<(Name, PathBuf)> {
        let folder = self.sys(class);
        let listed = match names(&folder) {
            Ok(listed) => listed,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && self.roots.sys.is_dir() => return Vec::new(),
            Err(error) => {
                notes.push(format!("{} cannot be read: {error}", folder.display()));
                return Vec::new();
            }
        };
        let mut found = Vec::new();
        for name in listed {
            match name.parse::<Name>() {
                Ok(parsed) => found.push((parsed, folder.join(&name))),
                Err(error) => notes.push(format!("{name:?} in {} is passed over: {error}", folder.display())),
            }
        }
        found
    }

    fn rdma(&self, notes: &mut Vec<String>) -> Vec<Nic> {
        let device_files = self.device_files(notes);
        let devices = self.list("class/infiniband", notes);
        devices.into_iter().map(|(name, entry)| self.rdma_device(name, &entry, &device_files)).collect()
    }

    /// RDMA devices with the name of their device file.
    fn device_files(&self, notes: &mut Vec<String>) -> BTreeMap<String, Name> {
        let files = self.list("class/infiniband_verbs", notes);
        files.into_iter().filter_map(|(name, entry)| Some((text(&entry.join("ibdev"))?, name))).collect()
    }

    fn rdma_device(&self, name: Name, entry: &Path, device_files: &BTreeMap<String, Name>) -> Nic {
        let ports: Vec<Port> = names(&entry.join("ports"))
            .unwrap_or_default()
            .iter()
            .map(|port| Port::read(&entry.join("ports").join(port)))
            .collect();
        let best = ports.iter().max_by_key(|port| (port.is_active, port.has_gid, port.mbps));
        // Soft-RoCE has no device of its own but names the interface that it sits on.
        let parent = text(&entry.join("parent")).and_then(|parent| parent.parse::<Name>().ok());
        let own = names(&entry.join("device/net")).unwrap_or_default();
        let twin = own.first().and_then(|own| own.parse().ok()).or(parent);
        let mut at = self.at(entry, &entry.join("device"));
        if let (None, Some(parent)) = (at.pci, parent) {
            let interface = self.sys("class/net").join(parent.as_str());
            at = self.at(&interface, &interface.join("device"));
        }
        let medium = if best.is_some_and(|port| port.is_ethernet) { Medium::Roce } else { Medium::InfiniBand };
        let mut nic = Nic::new(name, medium, at).with_mbps(best.map_or(0, |port| port.mbps));
        nic.twin = twin;
        nic.unfit = match best {
            None | Some(Port { is_active: false, .. }) => Some(Unfit::NoActivePort),
            Some(Port { has_gid: false, .. }) => Some(Unfit::NoGid),
            Some(_) => self.device_file_fault(device_files.get(name.as_str())),
        };
        nic
    }

    fn device_file_fault(&self, file: Option<&Name>) -> Option<Unfit> {
        let Some(file) = file else { return Some(Unfit::NoDeviceFile) };
        match access(self.roots.dev.join("infiniband").join(file.as_str()), Access::READ_OK | Access::WRITE_OK) {
            Ok(()) => None,
            Err(rustix::io::Errno::NOENT) => Some(Unfit::NoDeviceFile),
            Err(_) => Some(Unfit::NoAccess),
        }
    }

    fn interfaces(&self, notes: &mut Vec<String>) -> Vec<Nic> {
        let interface = |(name, entry): (Name, PathBuf)| {
            let flags = text(&entry.join("flags")).unwrap_or_default();
            let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or(0);
            // `unknown`: a device whose driver tells no carrier, such as a tunnel.
            let has_link = matches!(text(&entry.join("operstate")).as_deref(), Some("up" | "unknown"));
            let mut nic = Nic::new(name, Medium::Net, self.at(&entry, &entry.join("device")));
            // Virtual devices and those without a link say -1, or nothing.
            nic.mbps = text(&entry.join("speed")).and_then(|speed| speed.parse().ok()).unwrap_or(0);
            nic.unfit = match text(&entry.join("type")).as_deref() {
                Some(TYPE_LOOPBACK) => Some(Unfit::Loopback),
                _ if flags & FLAG_UP == 0 || !has_link => Some(Unfit::Down),
                _ => None,
            };
            nic
        };
        // A file among the folders (`bonding_masters`) is no interface.
        let listed = self.list("class/net", notes).into_iter().filter(|(_, entry)| entry.is_dir());
        listed.map(interface).collect()
    }

    fn gpus(&self, machine: &mut Machine) {
        let mut found: Vec<(PciAddress, PathBuf)> = self
            .list("bus/pci/devices", &mut machine.notes)
            .into_iter()
            .filter_map(|(name, entry)| Some((name.as_str().parse().ok()?, entry)))
            .collect();
        found.sort_unstable();
        let mut counts = BTreeMap::new();
        for (pci, entry) in found {
            // Display controllers (03) and processing accelerators (12).
            let class = text(&entry.join("class")).unwrap_or_default();
            if !class.starts_with("0x03") && !class.starts_with("0x12") {
                continue;
            }
            let vendor = text(&entry.join("vendor")).unwrap_or_default();
            let Some((_, word, wanted)) = GPU_VENDORS.into_iter().find(|(id, ..)| *id == vendor) else { continue };
            let driver = entry.join("driver").canonicalize().ok();
            let driver = driver.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
            let Some(driver) = driver.filter(|driver| driver == wanted) else {
                machine.notes.push(format!("the GPU at {pci} is not used: its driver {wanted} does not hold it"));
                continue;
            };
            let count = counts.entry(word).or_insert(0_u32);
            let Ok(place) = Place::new(word, *count) else { continue };
            *count += 1;
            machine.spots.push(Spot { place, at: self.at(&entry, &entry) });
            machine.gpus.push(Gpu { place, pci, driver });
        }
    }
}

struct Port {
    is_active: bool,
    is_ethernet: bool,
    has_gid: bool,
    mbps: u32,
}

impl Port {
    fn read(folder: &Path) -> Self {
        let state = text(&folder.join("state")).unwrap_or_default();
        let layer = text(&folder.join("link_layer")).unwrap_or_default();
        let is_set = |gid: &str| gid.chars().any(|digit| digit.is_ascii_hexdigit() && digit != '0');
        let gids = names(&folder.join("gids")).unwrap_or_default();
        let has_gid = gids.iter().any(|gid| text(&folder.join("gids").join(gid)).is_some_and(|gid| is_set(&gid)));
        Self {
            // As in "4: ACTIVE".
            is_active: state.starts_with("4:"),
            is_ethernet: layer == "Ethernet",
            has_gid,
            mbps: text(&folder.join("rate")).map_or(0, |rate| megabits(&rate)),
        }
    }
}

/// Of "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)"; 0 of anything else.
fn megabits(rate: &str) -> u32 {
    let Some((number, rest)) = rate.split_once(' ') else { return 0 };
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    match (whole.parse::<u32>(), tenth.get(..1).and_then(|tenth| tenth.parse::<u32>().ok())) {
        (Ok(whole), Some(tenth)) if rest.starts_with("Gb/sec") => {
            whole.saturating_mul(1_000).saturating_add(tenth * 100)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_the_kernel_writes_them() {
        assert_eq!(megabits("100 Gb/sec (4X EDR)"), 100_000);
        assert_eq!(megabits("2.5 Gb/sec (1X SDR)"), 2_500);
        assert_eq!((megabits(""), megabits("fast"), megabits("10 Mb/sec")), (0, 0, 0));
    }
}
