//! Which NICs this node may use for which memory: what the machine has, and what its operator laid down.
//!
//! The section `[topology]` of a node's configuration allows and denies NICs by name, and may give the priority matrix that
//! Mooncake reads instead of the discovered one. The decisions are `core::topology`'s. With the feature `rdma` the RDMA
//! devices that are left are opened; without, it is said that they are not used.

use millpond_core::topology::{Filter, Matrix, Row, Scope};
use millpond_hal::backend::open_nic;
use millpond_hal::backend::rdma::RdmaOptions;
use millpond_hal::probe::{Machine, Roots, matrix};

use crate::config::NicChoice;
use crate::engine::OwnNic;

/// What an operator laid down does not fit the machine.
///
/// ```
/// let error = millpond_node::topology::TopologyError { why: "m.json: no such file".into() };
/// assert!(error.to_string().contains("[topology]"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}; see [topology] in the configuration, and `doctor --topology`")]
pub struct TopologyError {
    /// What does not fit.
    pub why: String,
}

fn wrong(why: impl ToString) -> TopologyError {
    TopologyError { why: why.to_string() }
}

/// This machine, with its matrix.
///
/// ```
/// use millpond_hal::probe::Machine;
/// use millpond_node::config::NicChoice;
/// use millpond_node::topology::Topology;
/// let nothing = Topology::of(Machine::default(), &NicChoice::default()).unwrap();
/// assert!(nothing.rdma_names().is_empty());
/// ```
#[derive(Debug)]
pub struct Topology {
    /// What is there; what may not be used is marked.
    pub machine: Machine,
    /// Which NICs each place of memory prefers.
    pub matrix: Matrix<Box<[Row]>>,
}

impl Topology {
    /// Reads this machine.
    ///
    /// # Errors
    /// An allowed NIC is not there, or the matrix cannot be read or names a NIC that is not there.
    pub fn read(choice: &NicChoice) -> Result<Self, TopologyError> {
        Self::of(Machine::read(&Roots::default()), choice)
    }

    /// The same of a machine that was read.
    ///
    /// # Errors
    /// See [`Topology::read`].
    pub fn of(mut machine: Machine, choice: &NicChoice) -> Result<Self, TopologyError> {
        let allow: Vec<&str> = choice.allow.iter().map(String::as_str).collect();
        let deny: Vec<&str> = choice.deny.iter().map(String::as_str).collect();
        Filter { allow: &allow, deny: &deny }.apply(&mut machine.nics).map_err(wrong)?;
        let inventory = machine.inventory();
        let matrix = match &choice.matrix {
            Some(path) => {
                let in_file = |error: &dyn std::fmt::Display| wrong(format_args!("{}: {error}", path.display()));
                let text = std::fs::read_to_string(path).map_err(|error| in_file(&error))?;
                matrix::parse(&text, &inventory).map_err(|error| in_file(&error))?
            }
            None => {
                let rows = vec![Row::EMPTY; machine.rows()].into_boxed_slice();
                Matrix::discover(&inventory, Scope::best(&inventory), rows).map_err(wrong)?
            }
        };
        Ok(Self { machine, matrix })
    }

    /// The RDMA devices that host memory may use, those first that a NUMA node prefers; with whether one does.
    #[must_use]
    pub fn rdma_names(&self) -> Vec<(&str, bool)> {
        // The row for all other places counts where no NUMA node has one of its own.
        let has_nodes = self.matrix.rows().iter().any(|row| row.place().word() == "cpu");
        let word = if has_nodes { "cpu" } else { "*" };
        let rows = || self.matrix.rows().iter().filter(|row| row.place().word() == word);
        let (mut names, nics) = (Vec::new(), &self.machine.nics);
        let preferred = rows().flat_map(|row| row.preferred()).map(|nic| (nic, true));
        for (nic, is_preferred) in preferred.chain(rows().flat_map(|row| row.available()).map(|nic| (nic, false))) {
            let found = nics.get(usize::from(*nic)).filter(|nic| nic.medium.is_rdma() && nic.unfit.is_none());
            if let Some(nic) = found
                && !names.iter().any(|(known, _)| *known == nic.name.as_str())
            {
                names.push((nic.name.as_str(), is_preferred));
            }
        }
        names
    }

    /// Those devices, opened, for an engine. What cannot be is left out, with a warning.
    #[must_use]
    pub fn open_nics(&self) -> Vec<OwnNic> {
        let opened = self.rdma_names().into_iter().filter_map(|(name, is_preferred)| {
            let nic = open_nic(name, RdmaOptions::default()).inspect_err(|why| {
                tracing::warn!(nic = name, %why, "an RDMA device is not used");
            });
            let medium = self.machine.nics.iter().find(|nic| nic.name.as_str() == name)?.medium;
            let nic = OwnNic::new(nic.ok()?, medium)?;
            Some(if is_preferred { nic } else { nic.as_fallback() })
        });
        opened.collect()
    }
}

#[cfg(test)]
mod tests {
    use millpond_core::topology::{At, Medium, Nic, PciPath, Place, Spot};

    use super::*;

    fn machine() -> Machine {
        let at = |path: &str, node| At { pci: PciPath::of_sysfs(path), node: Some(node) };
        let nics = vec![
            Nic::new("mlx5_0".parse().unwrap(), Medium::Roce, at("pci0000:00/0000:00:03.0", 0)),
            Nic::new("mlx5_1".parse().unwrap(), Medium::Roce, at("pci0000:80/0000:80:03.0", 1)),
            Nic::new("eth0".parse().unwrap(), Medium::Net, At::default()),
        ];
        let spots = vec![Spot { place: Place::cpu(0), at: At { pci: None, node: Some(0) } }];
        Machine { nics, spots, ..Machine::default() }
    }

    #[test]
    fn an_operator_denies_nics_and_lays_down_their_order_by_name() {
        let names = |choice: &NicChoice| {
            let topology = Topology::of(machine(), choice).unwrap();
            topology.rdma_names().into_iter().map(|(name, first)| (name.to_owned(), first)).collect::<Vec<_>>()
        };
        let list =
            |names: &[(&str, bool)]| names.iter().map(|(name, first)| ((*name).to_owned(), *first)).collect::<Vec<_>>();
        assert_eq!(names(&NicChoice::default()), list(&[("mlx5_0", true), ("mlx5_1", false)]));
        let deny = NicChoice { deny: vec!["mlx5_0".into()], ..NicChoice::default() };
        assert_eq!(names(&deny), list(&[("mlx5_1", true)]));
        let path = std::env::temp_dir().join(format!("millpond-matrix-{}.json", std::process::id()));
        std::fs::write(&path, r#"{"cpu:0": [["mlx5_1"], ["mlx5_0"]]}"#).unwrap();
        let laid_down = NicChoice { matrix: Some(path.clone()), ..NicChoice::default() };
        assert_eq!(names(&laid_down), list(&[("mlx5_1", true), ("mlx5_0", false)]));
        let both = NicChoice { deny: vec!["mlx5_1".into()], ..laid_down };
        assert_eq!(
            names(&both),
            list(&[("mlx5_0", false)]),
            "a NIC that is denied is not used, whatever the matrix says"
        );
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_does_not_fit_the_machine_is_an_error_and_not_ignored() {
        let absent = NicChoice { allow: vec!["mlx5_9".into()], ..NicChoice::default() };
        let error = Topology::of(machine(), &absent).unwrap_err().to_string();
        assert!(error.contains("mlx5_9, which this machine does not have"), "{error}");
        let nowhere = NicChoice { matrix: Some("/nowhere/m.json".into()), ..NicChoice::default() };
        assert!(Topology::of(machine(), &nowhere).unwrap_err().to_string().contains("/nowhere/m.json"));
    }
}
