//! What `doctor` says of NICs, GPUs and the ways between them: the discovered topology, with a reason for each choice.

use std::path::PathBuf;

use millpond_core::topology::{Inventory, Matrix, Nic, Row, Why};
use millpond_hal::backend::open_nic;
use millpond_hal::backend::rdma::RdmaOptions;
use millpond_hal::probe::matrix;
use serde_json::{Value, json};

use super::{Finding, Row as Line};
use crate::cli::failure::Failure;
use crate::cli::store_cmds::{Exit, Output};
use crate::config::NicChoice;
use crate::engine::OwnNic;
use crate::topology;

/// How the topology is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Form {
    /// A line for every place and NIC, with its reason.
    Text,
    /// The priority matrix as JSON, in the form that Mooncake reads.
    Json,
}

/// What an operator may lay down.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Choice {
    /// NICs that may be used, by name, or by the start of it and a `*`; without it, all.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "topology")]
    nic_allow: Vec<String>,
    /// NICs that may not be used.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "topology")]
    nic_deny: Vec<String>,
    /// A priority matrix to use instead of the discovered one.
    #[arg(long, value_name = "FILE", requires = "topology")]
    matrix: Option<PathBuf>,
}

/// This machine, with its matrix.
pub(super) struct Topology(topology::Topology);

impl From<&Choice> for NicChoice {
    fn from(choice: &Choice) -> Self {
        Self { allow: choice.nic_allow.clone(), deny: choice.nic_deny.clone(), matrix: choice.matrix.clone() }
    }
}

impl Topology {
    pub(super) fn read(choice: &Choice) -> Result<Self, Failure> {
        let read = topology::Topology::read(&choice.into()).map_err(|error| Failure::Said(error.why))?;
        Ok(Self(read))
    }

    /// Whether there is something for RDMA to run over, and whether this program can.
    pub(super) fn rdma(&self) -> Line {
        let all = self.0.machine.nics.iter().filter(|nic| nic.medium.is_rdma());
        let names: Vec<&str> = all.map(|nic| nic.name.as_str()).collect();
        let usable = self.0.rdma_names();
        if names.is_empty() {
            return ("rdma", Finding::Note, "not used: this machine has no RDMA device".into());
        }
        if usable.is_empty() {
            let text = format!("not used: none of {} may be; the reasons are below", names.join(", "));
            return ("rdma", Finding::Note, text);
        }
        let tried = usable.iter().map(|(name, _)| match open_nic(name, RdmaOptions::default()) {
            Ok(_) => Ok(*name),
            Err(error) => Err(format!("{name}: {error}")),
        });
        let (opened, refused): (Vec<_>, Vec<_>) = tried.partition(Result::is_ok);
        let opened: Vec<&str> = opened.into_iter().flatten().collect();
        let refused: Vec<String> = refused.into_iter().filter_map(Result::err).collect();
        match (opened.is_empty(), refused.is_empty()) {
            (true, _) => ("rdma", Finding::Note, format!("not used: {}", refused.join("; "))),
            (false, true) => ("rdma", Finding::Good, format!("opened: {}", opened.join(", "))),
            (false, false) => {
                ("rdma", Finding::Note, format!("opened: {}; not used: {}", opened.join(", "), refused.join("; ")))
            }
        }
    }

    /// The RDMA devices that can be used, opened for one end of a test.
    pub(super) fn nics(&self) -> Vec<OwnNic> {
        self.0.open_nics()
    }

    /// What is there, a line for each NIC and GPU, and one for each place with the NICs that it prefers.
    pub(super) fn lines(&self) -> Vec<Line> {
        let inventory = self.0.machine.inventory();
        let nics = self.0.machine.nics.iter().map(nic);
        let gpus = self.0.machine.gpus.iter().map(|gpu| {
            let text = "not used: this version keeps KV in host memory";
            ("gpu", Finding::Note, format!("{} at {}, driver {}: {text}", gpu.place, gpu.pci, gpu.driver))
        });
        let no_gpu = self.0.machine.gpus.is_empty();
        let none = no_gpu.then(|| ("gpu", Finding::Note, "this machine has no GPU with a driver".to_owned()));
        let notes = self.0.machine.notes.iter().map(|note| ("topology", Finding::Note, note.clone()));
        let places = self.0.matrix.rows().iter().map(|row| place(&self.0.matrix, &inventory, row));
        nics.chain(gpus).chain(none).chain(notes).chain(places).collect()
    }

    /// Every place with every NIC, and why the NIC stands where it does.
    pub(super) fn show(&self, form: Form, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let inventory = self.0.machine.inventory();
        if form == Form::Json {
            let text = matrix::print(&self.0.matrix, &inventory);
            let value: Value = serde_json::from_str(&text).map_err(|error| Failure::Said(error.to_string()))?;
            output.line(&text, value)?;
            return Ok(Exit::Done);
        }
        for (_, finding, text) in self.0.machine.nics.iter().map(nic) {
            output.line(&format!("nic       {text}"), json!({"nic": text, "finding": finding.name()}))?;
        }
        for note in &self.0.machine.notes {
            output.line(&format!("note      {note}"), json!({"note": note}))?;
        }
        for row in self.0.matrix.rows() {
            let order = row.preferred().iter().chain(row.available()).copied();
            let count = u8::try_from(inventory.nics.len()).unwrap_or(u8::MAX);
            let unused = (0..count).filter(|nic| !row.preferred().contains(nic) && !row.available().contains(nic));
            for index in order.chain(unused) {
                let why = self.0.matrix.why(&inventory, row, index);
                let name = inventory.nics[usize::from(index)].name;
                let (place, verdict) = (row.place(), why.verdict());
                output.line(
                    &format!("{place:<9} {name:<12} {verdict:<9} {why}"),
                    json!({"place": place.as_str(), "nic": name.as_str(), "use": verdict, "why": why.to_string()}),
                )?;
            }
        }
        Ok(Exit::Done)
    }
}

fn nic(nic: &Nic) -> Line {
    let mut text = format!("{}: {}", nic.name, nic.medium);
    if nic.mbps > 0 {
        text += &format!(", {} Mb/s", nic.mbps);
    }
    if let Some(pci) = nic.at.pci {
        text += &format!(", at {}", pci.device());
    }
    if let Some(node) = nic.at.node {
        text += &format!(", NUMA node {node}");
    }
    if let Some(twin) = nic.twin {
        text += &format!(", the same card as {twin}");
    }
    match nic.unfit {
        Some(unfit) => ("nic", Finding::Note, format!("{text}; unused: {unfit}")),
        None => ("nic", Finding::Good, text),
    }
}

fn place(matrix: &Matrix<Box<[Row]>>, inventory: &Inventory<'_>, row: &Row) -> Line {
    let named = |index: &u8| match matrix.why(inventory, row, *index) {
        Why::ConfiguredPreferred | Why::ConfiguredAvailable => inventory.nics[usize::from(*index)].name.to_string(),
        why => format!("{} ({why})", inventory.nics[usize::from(*index)].name),
    };
    let list = |indexes: &[u8]| indexes.iter().map(named).collect::<Vec<_>>().join(", ");
    let text = match (row.preferred(), row.available()) {
        ([], []) => format!("{}: no NIC can be used", row.place()),
        (preferred, []) => format!("{}: {}", row.place(), list(preferred)),
        (preferred, available) => format!("{}: {}; else {}", row.place(), list(preferred), list(available)),
    };
    ("place", if row.preferred().is_empty() { Finding::Note } else { Finding::Good }, text)
}

#[cfg(test)]
mod tests {
    use millpond_core::topology::{At, Medium, PciPath, Place, Spot, Unfit};
    use millpond_hal::probe::Machine;

    use super::*;
    use crate::cli::store_cmds::Format;

    fn machine() -> Machine {
        let at = |path: &str, node| At { pci: PciPath::of_sysfs(path), node: Some(node) };
        let mut lo = Nic::new("lo".parse().unwrap(), Medium::Net, At::default());
        lo.unfit = Some(Unfit::Loopback);
        let nics = vec![
            Nic::new("mlx5_0".parse().unwrap(), Medium::Roce, at("pci0000:00/0000:00:03.0", 0)).with_mbps(100_000),
            Nic::new("mlx5_1".parse().unwrap(), Medium::Roce, at("pci0000:80/0000:80:03.0", 1)),
            lo,
        ];
        let spots = vec![Spot { place: Place::cpu(0), at: At { pci: None, node: Some(0) } }];
        Machine { nics, spots, ..Machine::default() }
    }

    impl Topology {
        fn of(choice: &Choice) -> Self {
            Self(topology::Topology::of(machine(), &choice.into()).unwrap())
        }
    }

    fn shown(choice: &Choice, form: Form) -> String {
        let mut bytes = Vec::new();
        let mut output = Output { writer: &mut bytes, format: Format::Text };
        Topology::of(choice).show(form, &mut output).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn every_nic_has_a_line_and_a_reason_for_every_place() {
        let text = shown(&Choice::default(), Form::Text);
        for line in [
            "nic       mlx5_0: RoCE, 100000 Mb/s, at 0000:00:03.0, NUMA node 0",
            "nic       lo: net; unused: it reaches this host only",
            "cpu:0     mlx5_0       preferred on the same NUMA node; none is nearer",
            "cpu:0     mlx5_1       fallback  on another NUMA node; others are on the same NUMA node",
            "cpu:0     lo           unused    it reaches this host only",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n---\n{text}");
        }
    }

    #[test]
    fn the_matrix_is_printed_as_mooncake_reads_it() {
        let expected = "{\n  \"cpu:0\": [[\"mlx5_0\"],[\"mlx5_1\"]]\n}\n";
        assert_eq!(shown(&Choice::default(), Form::Json), expected);
        let deny = Choice { nic_deny: vec!["mlx5_0".to_owned()], ..Choice::default() };
        assert_eq!(shown(&deny, Form::Json), "{\n  \"cpu:0\": [[\"mlx5_1\"],[]]\n}\n");
    }

    #[test]
    fn an_allowed_nic_that_is_not_there_is_an_error() {
        let choice = Choice { nic_allow: vec!["mlx5_9".to_owned()], ..Choice::default() };
        let error = topology::Topology::of(machine(), &(&choice).into()).unwrap_err().to_string();
        assert!(error.contains("mlx5_9, which this machine does not have"), "{error}");
    }
}
