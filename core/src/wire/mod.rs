//! What travels between nodes in fixed layout: the frames of data lanes and the hello of every connection.
//!
//! Bytes in, values out, and back. Nothing here reads a socket, keeps a buffer of frames or decides what a frame may touch;
//! that is the transport's and the fabric's business. Invariants: parsing is total (any bytes give a frame, a wish for more
//! bytes, or a typed violation), never looks beyond what it was given, and every frame has exactly one encoding. `SPEC.md`
//! next to this file is the description for other implementations; the files in `golden/` freeze it.

mod code;

pub mod frame;

pub mod hello;

pub mod session;

mod violation;

#[cfg(feature = "alloc")]
pub mod message;

#[cfg(test)]
mod golden;

/// Version of the protocol that this code speaks best.
pub const VERSION: u16 = 1;

/// Oldest version of the protocol that this code still speaks.
pub const VERSION_MIN: u16 = 1;

/// Extents in one write or read frame, and proofs in one prove frame, at most.
pub const MOVES_MAX: u16 = 1024;

/// Bytes that one write, read or data frame moves, at most.
pub const DATA_LEN_MAX: u64 = 16 << 20;

/// Bytes of the longest head (header and table) of a frame.
pub const HEAD_LEN_MAX: usize = frame::HEADER_LEN + frame::ARRIVAL_LEN + MOVES_MAX as usize * frame::EXTENT_LEN;

/// Bytes of the longest message of a hello, later versions included.
pub const HELLO_LEN_MAX: usize = 512;
