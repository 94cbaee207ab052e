//! What travels between nodes.

#[cfg(feature = "alloc")]
pub mod message;
