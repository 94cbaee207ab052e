//! Millpond as its users meet it: processes of both binaries, driven over HTTP, the node port and the command line.
//!
//! Every test starts its own cluster on free ports of loopback and takes it down again. What a node said is printed if its
//! test fails. Waits are bounded; nothing here asserts that something is fast.

mod batch;
mod client;
mod cluster;
mod equal;
mod faults;
mod follow;
mod idle;
mod nonsense;
mod openai;
mod pressure;
mod store;
mod streaming;
