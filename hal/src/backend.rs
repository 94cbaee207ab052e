//! The backends, one module each. Each keeps [`crate::contract`] and passes the conformance suite.

mod attached;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod file;
pub mod host;
pub mod rdma;
#[cfg(feature = "rdma")]
pub mod rdma_verbs;
pub mod shm;
pub mod sim;
mod tally;
pub mod tcp;

/// Opens port 1 of the RDMA device of that name.
///
/// # Errors
/// It cannot be used, or this build has no way to it: the feature `rdma` brings libibverbs.
pub fn open_nic(name: &str, options: rdma::RdmaOptions) -> Result<rdma::Nic, rdma::NicError> {
    #[cfg(feature = "rdma")]
    return rdma::Nic::new(Box::new(rdma_verbs::Ibverbs::open(Some(name), 1)?), options);
    #[cfg(not(feature = "rdma"))]
    {
        let _ = (name, options);
        Err(rdma::NicError::NoDevice { reason: "this program was built without the feature `rdma`" })
    }
}

#[cfg(test)]
mod conforms;
