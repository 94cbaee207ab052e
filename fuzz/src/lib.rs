//! Operation lists for the data structures and parsers: one list serves proptest, the fuzzer and the corpus.
#![forbid(unsafe_code)]

pub mod session;

pub mod transfer;

pub mod wire;

pub mod directory;

pub mod batch;

pub mod page;

pub mod extent;

pub mod prefix;

pub mod index;

/// Eight bytes: what to do, and with what. Any eight bytes are a valid operation of every list.
pub type Op = [u8; 8];

/// The operations in `data`; a rest shorter than one is left out.
///
/// ```
/// assert_eq!(millpond_fuzz::ops(&[7; 20]).len(), 2);
/// ```
#[must_use]
pub fn ops(data: &[u8]) -> Vec<Op> {
    data.chunks_exact(8).map(|op| op.try_into().expect("chunks of eight")).collect()
}

/// Ends the process where product and oracle differ: what a fuzzer looks for.
///
/// # Panics
/// If `outcome` is a difference.
pub fn panic_on(outcome: Result<(), String>) {
    if let Err(difference) = outcome {
        panic!("{difference}");
    }
}
