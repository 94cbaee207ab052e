//! Where memory lies, which NICs there are, how near one is to the other, and which pair of NICs carries a move, and why.
//!
//! Plain data and arithmetic: what a machine consists of comes in as tables that somebody else read, and what a byte test
//! found comes in as its result. This module opens no file and moves no byte; which *transport* carries a batch is not
//! decided here. Everything works on storage of the caller, without a heap.
//!
//! - [`Place`]: where memory lies (`cpu:0`, `cuda:3`, `*`). [`Nic`] and [`Spot`]: the NICs and the places of one machine.
//! - [`Distance`]: how near two devices are by their path of PCIe bridges and their NUMA nodes.
//! - [`Matrix`]: for each place the NICs it prefers and those it may fall back to, the same that Mooncake writes as JSON,
//!   discovered by distance or given by an operator, with a [`Why`] for each entry.
//! - [`choose`]: which pair of NICs carries bytes between two places, and what became of each pair before it.
//! - [`Trials`]: which byte test is due, and what its result means. A pair is used only while it is [`Verdict::Proven`].
//!
//! Invariants: a NIC that is unfit, denied, or unproven is never chosen; every NIC that is not chosen has a reason; the
//! same tables give the same matrix, whatever order the system listed them in, but for the NICs' own indexes.

mod choice;
mod matrix;
mod name;
mod nic;
mod pci;
mod trial;

pub use choice::{Considered, End, Pair, Tier, choose, pairs};
pub use matrix::{Matrix, MatrixError, NICS_MAX, Row, Scope, Why};
pub use name::{BadName, NAME_MAX, Name, Place};
pub use nic::{Filter, Inventory, Medium, Nic, NoSuchNic, Spot, Unfit};
pub use pci::{At, Distance, Nearness, PCI_DEPTH_MAX, PciAddress, PciPath};
pub use trial::{
    Direction, Ended, Entry, Fault, Found, Path, RUNNING_MAX, TRIAL_LEN, TRIAL_MARGIN, TRIAL_WITHIN, Trial, TrialId,
    Trials, Verdict,
};
