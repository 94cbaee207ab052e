//! How bytes break the protocol of data lanes, and frames that would.

use core::fmt;

use super::{DATA_LEN_MAX, MOVES_MAX};

/// How bytes broke the protocol. The lane they came from is closed; nothing else is.
///
/// ```
/// use millpond_core::wire::frame::{parse, Violation};
/// assert_eq!(parse(&[0xff; 40]), Err(Violation::UnknownKind(0xff)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// No frame has this kind.
    UnknownKind(u8),
    /// The kind does not know these flags.
    UnknownFlags(u8),
    /// The kind does not know this code.
    UnknownCode(u16),
    /// The header's checksum does not match its bytes.
    BadHeaderChecksum,
    /// More table entries than [`MOVES_MAX`], or none where the kind needs one.
    BadCount(u16),
    /// More data than [`DATA_LEN_MAX`], or extents that do not add up to it, or whose ends overflow.
    BadDataLen(u64),
    /// An ack about extents that no frame can have.
    BadExtentRange {
        /// The first of them.
        first: u32,
        /// How many.
        count: u32,
    },
    /// A field that the kind does not use is not zero.
    ReservedNotZero,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKind(kind) => write!(f, "no frame has kind {kind}; the peers speak different versions"),
            Self::UnknownFlags(flags) => write!(f, "flags {flags:#x} do not belong to the frame's kind"),
            Self::UnknownCode(code) => write!(f, "code {code} does not belong to the frame's kind"),
            Self::BadHeaderChecksum => f.write_str("a frame's header is damaged; open the lane again"),
            Self::BadCount(count) => write!(f, "a frame has {count} table entries; 1 to {MOVES_MAX} are allowed"),
            Self::BadDataLen(len) => {
                write!(f, "a frame of {len} bytes: not the sum of its extents, or over {DATA_LEN_MAX}")
            }
            Self::BadExtentRange { first, count } => {
                write!(f, "an ack about {count} extents from {first} on: none, or more than a frame can have")
            }
            Self::ReservedNotZero => f.write_str("a field that must be zero is not"),
        }
    }
}

impl core::error::Error for Violation {}

/// Why a frame was not encoded.
///
/// ```
/// use millpond_core::wire::frame::{EncodeError, Frame};
/// let ping = Frame::Ping { generation: 1, nonce: 1 };
/// assert_eq!(ping.encode(&mut [0; 8]), Err(EncodeError::NoRoom { head_len: 40 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// The buffer is shorter than the head.
    NoRoom {
        /// Bytes of the head.
        head_len: usize,
    },
    /// The receiver would refuse the frame; cut the work into smaller frames.
    Invalid(Violation),
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoom { head_len } => write!(f, "the frame's head needs {head_len} bytes of room"),
            Self::Invalid(violation) => write!(f, "the receiver would refuse the frame: {violation}"),
        }
    }
}

impl core::error::Error for EncodeError {}
