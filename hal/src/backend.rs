//! The backends, one module each. Each keeps [`crate::contract`] and passes the conformance suite.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod file;
pub mod host;
// The state machine is tested over a NIC of our own; without the feature nothing else uses it.
#[cfg(any(test, feature = "rdma"))]
#[cfg_attr(not(feature = "rdma"), allow(unreachable_pub))]
pub mod rdma;
#[cfg(feature = "rdma")]
pub mod rdma_verbs;
pub mod shm;
pub mod sim;
mod tally;
pub mod tcp;

#[cfg(test)]
mod conforms;
