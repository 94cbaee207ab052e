//! What this machine consists of, read from sysfs: NICs, NUMA nodes, GPUs, and where each of them sits.
//!
//! It reads; what follows from it is decided in [`millpond_core::topology`]. No driver or vendor library is opened. What
//! cannot be read is left out and noted, never guessed. The folders are arguments, so that a test can build a machine of
//! files. Sub-modules: [`matrix`] reads and writes Mooncake's priority matrix, [`bytes`] runs byte tests over a driver.
//!
//! ```
//! use millpond_core::topology::{Matrix, Row, Scope};
//! use millpond_hal::probe::{Machine, Roots};
//! let machine = Machine::read(&Roots::default());
//! let inventory = machine.inventory();
//! let rows = vec![Row::EMPTY; machine.rows()];
//! let matrix = Matrix::discover(&inventory, Scope::best(&inventory), rows).unwrap();
//! println!("{}", millpond_hal::probe::matrix::print(&matrix, &inventory));
//! ```

pub mod bytes;
pub mod matrix;
mod sysfs;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use millpond_core::topology::{Inventory, Name, Nic, PciAddress, Place, Spot};

/// The folders that a machine is read from.
///
/// ```
/// use millpond_hal::probe::{Machine, Roots};
/// let empty = Roots { sys: "/nowhere".into(), dev: "/nowhere".into() };
/// let machine = Machine::read(&empty);
/// assert!(machine.nics.is_empty() && !machine.notes.is_empty()); // and it says what it could not read
/// ```
#[derive(Clone, Debug)]
pub struct Roots {
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// Where device files are.
    pub dev: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into() }
    }
}

/// A GPU that its vendor's driver holds.
///
/// ```
/// use millpond_hal::probe::{Machine, Roots};
/// for gpu in Machine::read(&Roots::default()).gpus {
///     println!("{} at {}, driver {}", gpu.place, gpu.pci, gpu.driver);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `cuda:N` or `hip:N`, counted by PCI address among the GPUs of that sort; the vendor's own numbering is the same where
    /// it goes by PCI address (`CUDA_DEVICE_ORDER=PCI_BUS_ID`).
    pub place: Place,
    /// Where it sits.
    pub pci: PciAddress,
    /// The kernel's driver that holds it.
    pub driver: String,
}

/// What was found.
///
/// Example: [`Roots`].
#[derive(Clone, Debug, Default)]
pub struct Machine {
    /// RDMA devices, then network interfaces, each in the order of their names.
    pub nics: Vec<Nic>,
    /// NUMA nodes, then GPUs.
    pub spots: Vec<Spot>,
    /// The GPUs among them.
    pub gpus: Vec<Gpu>,
    /// What is there and not used, or could not be read, and why, for people.
    pub notes: Vec<String>,
}

/// A NIC whose state is another one than before: its paths are to be tested again.
///
/// ```
/// use millpond_hal::probe::{Machine, Roots, link_events};
/// let machine = Machine::read(&Roots::default());
/// assert!(link_events(&machine.nics, &machine.nics).next().is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkEvent {
    /// Its name.
    pub nic: Name,
    /// What changed, for people.
    pub what: String,
}

impl Machine {
    /// Reads it. Costs some hundred small files; nothing is kept open.
    #[must_use]
    pub fn read(roots: &Roots) -> Self {
        sysfs::read(roots)
    }

    /// As the core's tables.
    #[must_use]
    pub fn inventory(&self) -> Inventory<'_> {
        Inventory { nics: &self.nics, spots: &self.spots }
    }

    /// Lines that a matrix of it needs: one for each place, and one for `*`.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.spots.len() + 1
    }
}

/// What happened to NICs between two readings, by name: gone, new, fit, unfit, or of another speed.
pub fn link_events<'a>(before: &'a [Nic], after: &'a [Nic]) -> impl Iterator<Item = LinkEvent> + 'a {
    let find = |nics: &'a [Nic], name: Name| nics.iter().find(move |nic| nic.name == name);
    let changed = move |old: &Nic| {
        let what = match find(after, old.name) {
            None => "it is gone".to_owned(),
            Some(new) if new.unfit != old.unfit => match new.unfit {
                Some(unfit) => unfit.to_string(),
                None => "it is fit again".to_owned(),
            },
            Some(new) if new.mbps != old.mbps => format!("its speed is {} Mb/s instead of {}", new.mbps, old.mbps),
            Some(new) if new.at != old.at => "it sits elsewhere".to_owned(),
            Some(_) => return None,
        };
        Some(LinkEvent { nic: old.name, what })
    };
    let is_new = move |new: &&Nic| find(before, new.name).is_none();
    let appeared = after.iter().filter(is_new).map(|new| LinkEvent { nic: new.name, what: "it is new".to_owned() });
    before.iter().filter_map(changed).chain(appeared)
}
