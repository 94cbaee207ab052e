//! Messages between somebody who has the token of a file, or wants one, and the node that has the file.
//!
//! A node that publishes files gives the token of one by its name. The owner moves the bytes: a move names a range of the file
//! and a range of the caller's memory, which the owner reads from (into the file) or writes into (out of it) over the transfer
//! engine. Moves end one by one, in any order, and are answered in theirs.

use alloc::vec::Vec;

/// Caller → owner: [`MoveRequest`] is answered by [`MoveReply`].
pub const METHOD_MOVE: u16 = 0x0401;
/// Anybody → a node that publishes files: [`OpenRequest`] is answered by [`OpenReply`].
pub const METHOD_OPEN: u16 = 0x0402;

/// Bytes of a file's name, at most.
pub const NAME_LEN_MAX: usize = 255;

/// Moves of one message, at most.
pub const MOVES_MAX: usize = 4_096;

/// The move is done.
pub const DONE: u32 = 0;
/// The caller's memory could not be reached.
pub const MEMORY: u32 = 1;
/// The file system of the file is full.
pub const NO_SPACE: u32 = 2;
/// Somebody cut the file.
pub const CUT: u32 = 3;
/// The file could not be read or written.
pub const MEDIUM: u32 = 4;
/// The grant of the file, or that of the memory, does not allow it.
pub const REFUSED: u32 = 5;
/// Anything else; the detail says what.
pub const OTHER: u32 = 6;

/// One range of a file and one of memory.
///
/// ```
/// use millpond_core::wire::message::file::FileMove;
/// assert_eq!(FileMove { file_offset: 4096, memory_offset: 0, len: 10 }.len, 10);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct FileMove {
    /// First byte of the file.
    #[prost(uint64, tag = "1")]
    pub file_offset: u64,
    /// First byte of the memory, as its token counts.
    #[prost(uint64, tag = "2")]
    pub memory_offset: u64,
    /// Bytes.
    #[prost(uint64, tag = "3")]
    pub len: u64,
}

/// Moves between one file and one region of memory, all in one direction.
///
/// ```
/// use millpond_core::wire::message::file::MoveRequest;
/// assert!(!MoveRequest::default().into_file, "out of the file unless told otherwise");
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct MoveRequest {
    /// 64 bytes: the owner's grant of the file.
    #[prost(bytes = "vec", tag = "1")]
    pub file: Vec<u8>,
    /// 64 bytes: the caller's grant of its memory: to read for moves into the file, to write for moves out of it.
    #[prost(bytes = "vec", tag = "2")]
    pub memory: Vec<u8>,
    /// From memory into the file; otherwise out of it.
    #[prost(bool, tag = "3")]
    pub into_file: bool,
    /// What to move.
    #[prost(message, repeated, tag = "4")]
    pub moves: Vec<FileMove>,
    /// Answer only when what was written is on stable storage.
    #[prost(bool, tag = "5")]
    pub sync: bool,
}

/// How one move ended.
///
/// ```
/// use millpond_core::wire::message::file::{DONE, MoveOutcome};
/// assert_eq!(MoveOutcome::default().code, DONE);
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct MoveOutcome {
    /// [`DONE`], or why not.
    #[prost(uint32, tag = "1")]
    pub code: u32,
    /// Whether part of it may have been written, if it is not done.
    #[prost(bool, tag = "2")]
    pub is_touched: bool,
    /// In words.
    #[prost(string, tag = "3")]
    pub detail: alloc::string::String,
}

/// An outcome per move.
///
/// ```
/// use millpond_core::wire::message::file::MoveReply;
/// assert!(MoveReply::default().outcomes.is_empty());
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct MoveReply {
    /// In the order of the moves.
    #[prost(message, repeated, tag = "1")]
    pub outcomes: Vec<MoveOutcome>,
}

/// Asks for the token of a published file.
///
/// ```
/// use millpond_core::wire::message::file::OpenRequest;
/// assert!(!OpenRequest { name: "kv.0".into(), ..OpenRequest::default() }.writes, "to be read unless told otherwise");
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct OpenRequest {
    /// Its name in the published directory: no path, and no dot first.
    #[prost(string, tag = "1")]
    pub name: alloc::string::String,
    /// To be written too.
    #[prost(bool, tag = "2")]
    pub writes: bool,
    /// Bytes of the file to make if there is none of that name; 0: there must be one. Only with `writes`.
    #[prost(uint64, tag = "3")]
    pub create_len: u64,
}

/// A published file, opened.
///
/// ```
/// use millpond_core::wire::message::file::OpenReply;
/// assert!(OpenReply::default().token.is_empty());
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct OpenReply {
    /// 64 bytes: what to name it by in a [`MoveRequest`], with the rights asked for. Good until the owner has to open
    /// another file in its place: then a move is refused, and the file is opened again.
    #[prost(bytes = "vec", tag = "1")]
    pub token: Vec<u8>,
    /// Bytes of the file.
    #[prost(uint64, tag = "2")]
    pub len: u64,
}
