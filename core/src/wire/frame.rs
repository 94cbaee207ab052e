//! Frames of a data lane: a header of 40 bytes, a table that its kind and count imply, then perhaps data.
//!
//! This module reads and writes heads (header and table); data is moved by the transport, straight between socket and
//! registered memory, and never comes here. Invariants: all numbers are little-endian; every head, and the data with its
//! padding, is a multiple of 8 bytes; fields that a kind does not use are zero; the header's checksum covers the whole head.

use core::fmt;

pub use super::code::{AckCode, GoodbyeReason};
pub use super::violation::{EncodeError, Violation};

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{DATA_LEN_MAX, HEAD_LEN_MAX, MOVES_MAX};
use crate::batch::{Capability, Extent};
use crate::slab::Handle;

/// Bytes of every frame's header.
pub const HEADER_LEN: usize = size_of::<Header>();
/// Bytes of one extent in a frame's table.
pub const EXTENT_LEN: usize = size_of::<WireExtent>();
/// Bytes of one proof in a frame's table.
pub const PROOF_LEN: usize = size_of::<Proof>();
/// Bytes of an arrival in a frame's table.
pub const ARRIVAL_LEN: usize = 24;
/// Bytes of the checksum that follows the (padded) data of a frame that says so.
pub const TRAILER_LEN: usize = 8;

const FLAG_ARRIVAL: u8 = 1;
const FLAG_CHECKSUM: u8 = 2;
const FLAG_LAST: u8 = 4;
const FLAG_TOUCHED: u8 = 8;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    checksum: U32,
    kind: u8,
    flags: u8,
    count: U16,
    ticket: U64,
    generation: U64,
    slice: U32,
    attempt: U16,
    code: U16,
    detail: U32,
    data_len: U32,
}

/// A range of a region of the node that receives the frame, as it lies in a frame's table.
///
/// ```
/// use millpond_core::batch::{Extent, RegionId};
/// use millpond_core::wire::frame::WireExtent;
/// let extent = Extent::new(RegionId { slot: 3, epoch: 5 }, 4096, 100);
/// assert_eq!(Extent::from(WireExtent::from(extent)), extent);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct WireExtent {
    /// Slot of the region in its owner's table.
    pub region_slot: U32,
    /// Epoch of the region in its owner's table.
    pub region_epoch: U32,
    /// First byte, counted from the start of the region.
    pub offset: U64,
    /// Length in bytes.
    pub len: U64,
}

impl WireExtent {
    /// Room for an extent, to be overwritten.
    pub const ZERO: Self = Self { region_slot: U32::ZERO, region_epoch: U32::ZERO, offset: U64::ZERO, len: U64::ZERO };

    /// The region the bytes lie in.
    #[must_use]
    pub fn region(&self) -> Handle {
        Handle { slot: self.region_slot.get(), epoch: self.region_epoch.get() }
    }
}

impl From<Extent> for WireExtent {
    fn from(extent: Extent) -> Self {
        Self {
            region_slot: extent.region.slot.into(),
            region_epoch: extent.region.epoch.into(),
            offset: extent.offset.into(),
            len: extent.len.into(),
        }
    }
}

impl From<WireExtent> for Extent {
    fn from(extent: WireExtent) -> Self {
        Self::new(extent.region(), extent.offset.get(), extent.len.get())
    }
}

/// The capability of a region, shown once per lane before the first frame that names the region.
///
/// ```
/// use millpond_core::batch::{Capability, RegionId};
/// use millpond_core::wire::frame::Proof;
/// let proof = Proof::new(RegionId { slot: 3, epoch: 5 }, Capability::new([7; 16]));
/// assert!(proof.capability().matches(&Capability::new([7; 16])));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Proof {
    /// Slot of the region in its owner's table.
    pub region_slot: U32,
    /// Epoch of the region in its owner's table.
    pub region_epoch: U32,
    capability: [u8; 16],
}

impl Proof {
    /// Shows `capability` for `region`.
    #[must_use]
    pub fn new(region: Handle, capability: Capability) -> Self {
        let capability = capability.to_bytes();
        Self { region_slot: region.slot.into(), region_epoch: region.epoch.into(), capability }
    }

    /// The region's secret, from its token.
    #[must_use]
    pub fn capability(&self) -> Capability {
        Capability::new(self.capability)
    }

    /// The region that it is about.
    #[must_use]
    pub fn region(&self) -> Handle {
        Handle { slot: self.region_slot.get(), epoch: self.region_epoch.get() }
    }
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The capability is a secret and stays out of logs.
        write!(f, "Proof({})", self.region())
    }
}

/// Which attempt a frame belongs to. The initiator's incarnation was said in the hello and holds for the whole lane.
///
/// ```
/// use millpond_core::wire::frame::Tag;
/// let tag = Tag { generation: 1, ticket: 7, slice: 0, attempt: 0 };
/// assert_ne!(tag, Tag { attempt: 1, ..tag });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Generation of the lane; larger ones replace smaller ones.
    pub generation: u64,
    /// The initiator's ticket.
    pub ticket: u64,
    /// Which piece of the ticket.
    pub slice: u32,
    /// Which try of the piece, from 0.
    pub attempt: u16,
}

/// "Add `amount` to `counter` of `region` once these bytes lie there": counted, never ordered.
///
/// ```
/// use millpond_core::batch::RegionId;
/// use millpond_core::wire::frame::Arrival;
/// assert_eq!(Arrival { region: RegionId { slot: 1, epoch: 1 }, counter: 2, amount: 1 }.counter, 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arrival {
    /// The region or grant that keeps the counter.
    pub region: Handle,
    /// Which counter of it, by agreement between the two ends.
    pub counter: u64,
    /// How much to add.
    pub amount: u64,
}

/// The head of one frame. What follows it on the lane is said by [`Frame::trail`].
///
/// ```
/// use millpond_core::wire::frame::{parse, Frame, Parsed};
/// let ping = Frame::Ping { generation: 3, nonce: 42 };
/// let mut bytes = [0; 64];
/// let head_len = ping.encode(&mut bytes).unwrap();
/// assert_eq!(parse(&bytes[..head_len]), Ok(Parsed::Frame { frame: ping, head_len }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Data for extents of the receiver's regions; answered by an ack.
    Write {
        /// Whose attempt it is.
        tag: Tag,
        /// Where the data goes, in the order in which it follows.
        extents: &'a [WireExtent],
        /// What to count once the data lies there.
        arrival: Option<Arrival>,
        /// Whether a CRC-32C of the data follows it.
        checksummed: bool,
    },
    /// Asks for the bytes of extents; answered by data frames and then an ack.
    Read {
        /// Whose attempt it is.
        tag: Tag,
        /// Where the bytes lie, in the order wanted.
        extents: &'a [WireExtent],
        /// Whether the data frames shall carry a CRC-32C.
        checksummed: bool,
    },
    /// Part of the answer to a read; good only once the ack of the read says so.
    Data {
        /// Tag of the read.
        tag: Tag,
        /// Where in the read's bytes this part begins.
        offset: u64,
        /// Bytes of data that follow.
        data_len: u64,
        /// Whether a CRC-32C of this part follows it.
        checksummed: bool,
    },
    /// How extents of a write or read ended. Extents that no ack names are done once the last ack is there.
    Ack {
        /// Tag of the write or read.
        tag: Tag,
        /// How they ended.
        code: AckCode,
        /// Index of the first of them in the frame's table.
        extent_index: u32,
        /// How many; 0 only for [`AckCode::Done`].
        extent_count: u32,
        /// Whether the target's memory may have changed all the same.
        touched: bool,
        /// Whether the frame is complete: no further ack follows for it.
        last: bool,
    },
    /// Asks the target to leave a ticket's memory alone: every attempt up to the tag's, every slice.
    Cancel {
        /// Ticket and last attempt; the slice is 0.
        tag: Tag,
    },
    /// The answer to a cancel: from now on nothing of those attempts touches the target's memory.
    Quiet {
        /// Tag of the cancel.
        tag: Tag,
    },
    /// Asks for a pong.
    Ping {
        /// Generation of the lane.
        generation: u64,
        /// Comes back in the pong.
        nonce: u64,
    },
    /// Answers a ping.
    Pong {
        /// Generation of the lane.
        generation: u64,
        /// The ping's nonce.
        nonce: u64,
    },
    /// How much may be sent over the lane's whole life; only ever grows.
    Credit {
        /// Generation of the lane.
        generation: u64,
        /// Bytes of writes sent plus bytes of reads asked for, in total.
        data_len_total: u64,
        /// Write and read frames, in total.
        frame_count_total: u64,
    },
    /// Nothing follows; the lane will be closed.
    Goodbye {
        /// Generation of the lane.
        generation: u64,
        /// Why.
        reason: GoodbyeReason,
    },
    /// Shows the capabilities of regions that later frames of this lane name. A later proof for a slot replaces the earlier.
    Prove {
        /// Generation of the lane.
        generation: u64,
        /// One per region.
        proofs: &'a [Proof],
    },
}

/// What follows a head on the lane: data, zeros up to a multiple of 8 bytes, perhaps a checksum.
///
/// ```
/// use millpond_core::wire::frame::Trail;
/// let trail = Trail { data_len: 13, checksummed: true };
/// assert_eq!((trail.pad_len(), trail.len()), (3, 24));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trail {
    /// Bytes of data.
    pub data_len: u64,
    /// Whether a [`Trailer`] follows data and padding.
    pub checksummed: bool,
}

impl Trail {
    /// Bytes of padding after the data: 0 to 7. The sender sends zeros, the receiver ignores them.
    #[must_use]
    pub const fn pad_len(self) -> u64 {
        self.data_len.wrapping_neg() % 8
    }

    /// All bytes that follow the head.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(self) -> u64 {
        self.data_len + self.pad_len() + if self.checksummed { TRAILER_LEN as u64 } else { 0 }
    }
}

/// The checksum after a frame's data: CRC-32C (Castagnoli) of the data without its padding.
///
/// ```
/// use millpond_core::wire::frame::Trailer;
/// assert_eq!(Trailer::new(7).bytes()[..4], [7, 0, 0, 0]);
/// assert_eq!(Trailer::parse(Trailer::new(7).bytes()), Ok(Trailer::new(7)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The checksum.
    pub crc32c: u32,
}

impl Trailer {
    /// A trailer that says `crc32c`.
    #[must_use]
    pub const fn new(crc32c: u32) -> Self {
        Self { crc32c }
    }

    /// Its wire form.
    #[must_use]
    pub const fn bytes(self) -> [u8; TRAILER_LEN] {
        (self.crc32c as u64).to_le_bytes()
    }

    /// Reads the wire form.
    pub fn parse(bytes: [u8; TRAILER_LEN]) -> Result<Self, Violation> {
        match u32::try_from(u64::from_le_bytes(bytes)) {
            Ok(crc32c) => Ok(Self { crc32c }),
            Err(_) => Err(Violation::ReservedNotZero),
        }
    }
}

/// What [`parse`] made of the bytes.
///
/// Example: [`Frame`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// A frame's head, whole and sound.
    Frame {
        /// The frame; its tables lie in the bytes given.
        frame: Frame<'a>,
        /// Bytes of the head; what [`Frame::trail`] says comes right after.
        head_len: usize,
    },
    /// So far, so good: give at least `head_len` bytes, counted from the same start.
    Short {
        /// Bytes needed for the next step; never more than [`HEAD_LEN_MAX`].
        head_len: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    Data,
    Ack,
    Cancel,
    Quiet,
    Ping,
    Pong,
    Credit,
    Goodbye,
    Prove,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::Write,
        Self::Read,
        Self::Data,
        Self::Ack,
        Self::Cancel,
        Self::Quiet,
        Self::Ping,
        Self::Pong,
        Self::Credit,
        Self::Goodbye,
        Self::Prove,
    ];

    fn from_code(code: u8) -> Result<Self, Violation> {
        let index = usize::from(code).checked_sub(1);
        index.and_then(|index| Self::ALL.get(index).copied()).ok_or(Violation::UnknownKind(code))
    }

    fn code(self) -> u8 {
        self as u8 + 1
    }

    const fn flags(self) -> u8 {
        match self {
            Self::Write => FLAG_ARRIVAL | FLAG_CHECKSUM,
            Self::Read => FLAG_CHECKSUM,
            Self::Data => FLAG_CHECKSUM,
            Self::Ack => FLAG_LAST | FLAG_TOUCHED,
            _ => 0,
        }
    }

    const fn entry_len(self) -> usize {
        match self {
            Self::Write | Self::Read => EXTENT_LEN,
            Self::Prove => PROOF_LEN,
            _ => 0,
        }
    }

    const fn fixed_len(self, flags: u8) -> usize {
        match self {
            Self::Write if flags & FLAG_ARRIVAL != 0 => ARRIVAL_LEN,
            Self::Data => 8,
            Self::Credit => 16,
            _ => 0,
        }
    }

    fn head_len(self, flags: u8, count: u16) -> usize {
        HEADER_LEN + self.fixed_len(flags) + self.entry_len() * usize::from(count)
    }

    /// Whether the kind may use each of (ticket, slice and attempt, code, detail, data_len).
    const fn uses(self) -> [bool; 5] {
        match self {
            Self::Write | Self::Read | Self::Data => [true, true, false, false, true],
            Self::Ack => [true; 5],
            Self::Cancel | Self::Quiet => [true, true, false, false, false],
            Self::Ping | Self::Pong => [true, false, false, false, false],
            Self::Goodbye => [false, false, true, false, false],
            Self::Credit | Self::Prove => [false; 5],
        }
    }
}

/// Reads the head of the frame that starts at the first byte. O(table entries); looks at no byte beyond the head.
pub fn parse(bytes: &[u8]) -> Result<Parsed<'_>, Violation> {
    let Ok((header, _)) = Header::ref_from_prefix(bytes) else {
        return Ok(Parsed::Short { head_len: HEADER_LEN });
    };
    let kind = Kind::from_code(header.kind)?;
    if header.flags & !kind.flags() != 0 {
        return Err(Violation::UnknownFlags(header.flags));
    }
    let count = header.count.get();
    if count > MOVES_MAX || (kind.entry_len() > 0) != (count > 0) {
        return Err(Violation::BadCount(count));
    }
    let head_len = kind.head_len(header.flags, count);
    debug_assert!(head_len <= HEAD_LEN_MAX);
    let Some(head) = bytes.get(..head_len) else {
        return Ok(Parsed::Short { head_len });
    };
    if header.checksum.get() != checksum(&head[4..]) {
        return Err(Violation::BadHeaderChecksum);
    }
    Ok(Parsed::Frame { frame: read(header, kind, &head[HEADER_LEN..])?, head_len })
}

/// Gives the head at the start of `bytes` the checksum that its bytes need, if it is whole: for tests and fuzzers that
/// change heads on purpose.
#[doc(hidden)]
pub fn reseal(bytes: &mut [u8]) {
    let Ok((header, _)) = Header::ref_from_prefix(bytes) else { return };
    let Ok(kind) = Kind::from_code(header.kind) else { return };
    let head_len = kind.head_len(header.flags, header.count.get());
    if let Some(head) = bytes.get_mut(..head_len) {
        let sum = checksum(&head[4..]);
        head[..4].copy_from_slice(&sum.to_le_bytes());
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    let [a, b, c, d, ..] = xxh3_64(bytes).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

fn word(bytes: &[u8], index: usize) -> u64 {
    bytes.get(index * 8..index * 8 + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// `table` is exactly as long as kind, flags and count say.
fn read<'a>(header: &Header, kind: Kind, table: &'a [u8]) -> Result<Frame<'a>, Violation> {
    let tag = Tag {
        generation: header.generation.get(),
        ticket: header.ticket.get(),
        slice: header.slice.get(),
        attempt: header.attempt.get(),
    };
    let (generation, code, data_len) = (tag.generation, header.code.get(), u64::from(header.data_len.get()));
    let given =
        [tag.ticket != 0, tag.slice != 0 || tag.attempt != 0, code != 0, header.detail.get() != 0, data_len != 0];
    if given.iter().zip(kind.uses()).any(|(given, used)| *given && !used) {
        return Err(Violation::ReservedNotZero);
    }
    if kind != Kind::Ack && data_len > DATA_LEN_MAX {
        return Err(Violation::BadDataLen(data_len));
    }
    let (fixed, entries) = table.split_at(kind.fixed_len(header.flags));
    let checksummed = header.flags & FLAG_CHECKSUM != 0;
    let bad_code = Violation::UnknownCode(code);
    Ok(match kind {
        Kind::Write => {
            let arrival = (!fixed.is_empty()).then(|| Arrival {
                region: handle(word(fixed, 0)),
                counter: word(fixed, 1),
                amount: word(fixed, 2),
            });
            Frame::Write { tag, extents: extents(entries, data_len)?, arrival, checksummed }
        }
        Kind::Read => Frame::Read { tag, extents: extents(entries, data_len)?, checksummed },
        Kind::Data => {
            let offset = word(fixed, 0);
            if offset.checked_add(data_len).is_none_or(|end| end > DATA_LEN_MAX) {
                return Err(Violation::BadDataLen(data_len));
            }
            Frame::Data { tag, offset, data_len, checksummed }
        }
        Kind::Ack => {
            let code = AckCode::from_code(code).ok_or(bad_code)?;
            let (first, extent_count) = (header.detail.get(), header.data_len.get());
            let max = u32::from(MOVES_MAX);
            if first > max || extent_count > max - first || (extent_count == 0) != (code == AckCode::Done) {
                return Err(Violation::BadExtentRange { first, count: extent_count });
            }
            let (touched, last) = (header.flags & FLAG_TOUCHED != 0, header.flags & FLAG_LAST != 0);
            Frame::Ack { tag, code, extent_index: first, extent_count, touched, last }
        }
        Kind::Cancel | Kind::Quiet if tag.slice != 0 => return Err(Violation::ReservedNotZero),
        Kind::Cancel => Frame::Cancel { tag },
        Kind::Quiet => Frame::Quiet { tag },
        Kind::Ping => Frame::Ping { generation, nonce: tag.ticket },
        Kind::Pong => Frame::Pong { generation, nonce: tag.ticket },
        Kind::Credit => Frame::Credit { generation, data_len_total: word(fixed, 0), frame_count_total: word(fixed, 1) },
        Kind::Goodbye => Frame::Goodbye { generation, reason: GoodbyeReason::from_code(code).ok_or(bad_code)? },
        Kind::Prove => {
            let proofs = <[Proof]>::ref_from_bytes(entries).map_err(|_| Violation::BadCount(header.count.get()))?;
            Frame::Prove { generation, proofs }
        }
    })
}

#[allow(clippy::cast_possible_truncation)] // the halves are taken apart on purpose
const fn handle(word: u64) -> Handle {
    Handle { slot: word as u32, epoch: (word >> 32) as u32 }
}

fn extents(entries: &[u8], data_len: u64) -> Result<&[WireExtent], Violation> {
    let bad_len = Violation::BadDataLen(data_len);
    let extents = <[WireExtent]>::ref_from_bytes(entries).map_err(|_| bad_len)?;
    if sum(extents) == Some(data_len) { Ok(extents) } else { Err(bad_len) }
}

/// Bytes of all extents; `None` if the sum or an extent's end overflows.
fn sum(extents: &[WireExtent]) -> Option<u64> {
    extents.iter().try_fold(0u64, |sum, extent| {
        extent.offset.get().checked_add(extent.len.get())?;
        sum.checked_add(extent.len.get())
    })
}

impl<'a> Frame<'a> {
    /// Bytes of its head.
    #[must_use]
    pub fn head_len(&self) -> usize {
        let (kind, flags, entries) = self.shape();
        HEADER_LEN + kind.fixed_len(flags) + entries.len()
    }

    /// What follows the head on the lane.
    #[must_use]
    pub fn trail(&self) -> Trail {
        match *self {
            Self::Write { extents, checksummed, .. } => {
                Trail { data_len: sum(extents).unwrap_or(u64::MAX), checksummed }
            }
            Self::Data { data_len, checksummed, .. } => Trail { data_len, checksummed },
            _ => Trail::default(),
        }
    }

    /// The lane generation it belongs to.
    #[must_use]
    pub fn generation(&self) -> u64 {
        match *self {
            Self::Write { tag, .. }
            | Self::Read { tag, .. }
            | Self::Data { tag, .. }
            | Self::Ack { tag, .. }
            | Self::Cancel { tag }
            | Self::Quiet { tag } => tag.generation,
            Self::Ping { generation, .. }
            | Self::Pong { generation, .. }
            | Self::Credit { generation, .. }
            | Self::Goodbye { generation, .. }
            | Self::Prove { generation, .. } => generation,
        }
    }

    fn shape(&self) -> (Kind, u8, &'a [u8]) {
        let checksum = |checksummed| if checksummed { FLAG_CHECKSUM } else { 0 };
        match *self {
            Self::Write { extents, arrival, checksummed, .. } => {
                let arrival = if arrival.is_some() { FLAG_ARRIVAL } else { 0 };
                (Kind::Write, arrival | checksum(checksummed), extents.as_bytes())
            }
            Self::Read { extents, checksummed, .. } => (Kind::Read, checksum(checksummed), extents.as_bytes()),
            Self::Data { checksummed, .. } => (Kind::Data, checksum(checksummed), &[]),
            Self::Ack { touched, last, .. } => {
                let touched = if touched { FLAG_TOUCHED } else { 0 };
                (Kind::Ack, touched | if last { FLAG_LAST } else { 0 }, &[])
            }
            Self::Cancel { .. } => (Kind::Cancel, 0, &[]),
            Self::Quiet { .. } => (Kind::Quiet, 0, &[]),
            Self::Ping { .. } => (Kind::Ping, 0, &[]),
            Self::Pong { .. } => (Kind::Pong, 0, &[]),
            Self::Credit { .. } => (Kind::Credit, 0, &[]),
            Self::Goodbye { .. } => (Kind::Goodbye, 0, &[]),
            Self::Prove { proofs, .. } => (Kind::Prove, 0, proofs.as_bytes()),
        }
    }

    /// Writes the head to the start of `into` and says how long it is. `Err` when it does not fit or the receiver would
    /// refuse it; `into` is untouched then or holds a head that no checksum vouches for.
    pub fn encode(&self, into: &mut [u8]) -> Result<usize, EncodeError> {
        let (kind, flags, entries) = self.shape();
        let head_len = HEADER_LEN + kind.fixed_len(flags) + entries.len();
        let count = entries.len().checked_div(kind.entry_len()).unwrap_or(0);
        let count = u16::try_from(count).unwrap_or(u16::MAX);
        if count > MOVES_MAX || (kind.entry_len() > 0) != (count > 0) {
            return Err(EncodeError::Invalid(Violation::BadCount(count)));
        }
        let head = into.get_mut(..head_len).ok_or(EncodeError::NoRoom { head_len })?;
        let mut header = self.header(kind, flags, count);
        let (front, table) = head.split_at_mut(HEADER_LEN);
        let (fixed, rest) = table.split_at_mut(kind.fixed_len(flags));
        rest.copy_from_slice(entries);
        for (chunk, word) in fixed.chunks_exact_mut(8).zip(self.words()) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        read(&header, kind, table).map_err(EncodeError::Invalid)?;
        front.copy_from_slice(header.as_bytes());
        header.checksum = checksum(&head[4..]).into();
        head[..4].copy_from_slice(header.checksum.as_bytes());
        Ok(head_len)
    }

    fn words(&self) -> [u64; 3] {
        match *self {
            Self::Write { arrival: Some(Arrival { region, counter, amount }), .. } => {
                [u64::from(region.epoch) << 32 | u64::from(region.slot), counter, amount]
            }
            Self::Data { offset, .. } => [offset, 0, 0],
            Self::Credit { data_len_total, frame_count_total, .. } => [data_len_total, frame_count_total, 0],
            _ => [0; 3],
        }
    }

    fn header(&self, kind: Kind, flags: u8, count: u16) -> Header {
        // What does not fit is over every limit, and `read` says so.
        let narrow = |len| u32::try_from(len).unwrap_or(u32::MAX);
        let (mut code, mut detail, mut data_len) = (0, 0, 0);
        let plain = |generation| Tag { generation, ..Tag::default() };
        let tag = match *self {
            Self::Write { tag, extents, .. } | Self::Read { tag, extents, .. } => {
                data_len = sum(extents).map_or(u32::MAX, narrow);
                tag
            }
            Self::Data { tag, data_len: len, .. } => {
                data_len = narrow(len);
                tag
            }
            Self::Ack { tag, code: ack, extent_index, extent_count, .. } => {
                (code, detail, data_len) = (ack.code(), extent_index, extent_count);
                tag
            }
            Self::Cancel { tag } | Self::Quiet { tag } => tag,
            Self::Ping { generation, nonce } | Self::Pong { generation, nonce } => {
                Tag { ticket: nonce, ..plain(generation) }
            }
            Self::Credit { generation, .. } | Self::Prove { generation, .. } => plain(generation),
            Self::Goodbye { generation, reason } => {
                code = reason.code();
                plain(generation)
            }
        };
        Header {
            checksum: U32::ZERO,
            kind: kind.code(),
            flags,
            count: count.into(),
            ticket: tag.ticket.into(),
            generation: tag.generation.into(),
            slice: tag.slice.into(),
            attempt: tag.attempt.into(),
            code: code.into(),
            detail: detail.into(),
            data_len: data_len.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, len: u64) -> WireExtent {
        Extent::new(Handle { slot: 1, epoch: 1 }, offset, len).into()
    }

    fn encoded(frame: Frame<'_>) -> ([u8; 256], usize) {
        let mut bytes = [0; 256];
        let len = frame.encode(&mut bytes).unwrap();
        (bytes, len)
    }

    const TAG: Tag = Tag { generation: 1, ticket: 2, slice: 3, attempt: 4 };

    #[test]
    fn a_head_cut_short_asks_for_exactly_what_it_lacks() {
        let extents = [extent(0, 5), extent(64, 3)];
        let (bytes, len) = encoded(Frame::Write { tag: TAG, extents: &extents, arrival: None, checksummed: false });
        for cut in 0..len {
            let head_len = if cut < HEADER_LEN { HEADER_LEN } else { len };
            assert_eq!(parse(&bytes[..cut]), Ok(Parsed::Short { head_len }), "cut at {cut}");
        }
    }

    #[test]
    fn every_flipped_bit_of_a_head_is_noticed() {
        let extents = [extent(0, 5)];
        let arrival = Some(Arrival { region: Handle { slot: 1, epoch: 1 }, counter: 1, amount: 1 });
        let (mut bytes, len) = encoded(Frame::Write { tag: TAG, extents: &extents, arrival, checksummed: true });
        for bit in 0..len * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let whole = matches!(parse(&bytes[..len]), Ok(Parsed::Frame { .. }));
            assert!(!whole, "bit {bit} was flipped and nobody noticed");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn extents_must_add_up_and_must_not_overflow() {
        let write = |extents: &[WireExtent]| {
            Frame::Write { tag: TAG, extents, arrival: None, checksummed: false }.encode(&mut [0; 256])
        };
        let refused = Err(EncodeError::Invalid(Violation::BadDataLen(DATA_LEN_MAX + 1)));
        assert_eq!(write(&[extent(0, DATA_LEN_MAX), extent(0, 1)]), refused);
        assert!(matches!(write(&[extent(u64::MAX, 2)]), Err(EncodeError::Invalid(Violation::BadDataLen(_)))));
        assert_eq!(write(&[]), Err(EncodeError::Invalid(Violation::BadCount(0))));
    }

    #[test]
    fn unused_fields_must_be_zero() {
        let (mut bytes, len) = encoded(Frame::Ping { generation: 1, nonce: 9 });
        bytes[28] = 1; // attempt
        reseal(&mut bytes);
        assert_eq!(parse(&bytes[..len]), Err(Violation::ReservedNotZero));
    }

    #[test]
    fn heads_are_multiples_of_eight_bytes() {
        assert_eq!((HEADER_LEN % 8, EXTENT_LEN % 8, PROOF_LEN % 8, ARRIVAL_LEN % 8, HEAD_LEN_MAX % 8), (0, 0, 0, 0, 0));
        for data_len in 0..32 {
            assert_eq!(Trail { data_len, checksummed: true }.len() % 8, 0);
        }
    }
}
