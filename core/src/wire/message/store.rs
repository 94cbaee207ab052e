//! Messages between a store client and the owner of a segment.
//!
//! The owner moves the bytes. Small values travel inside the message; of a larger one the message names memory of the
//! client that the owner reads from (put) or writes into (get) over the transfer engine. Batches answer item by item, in
//! order. Spans are nanoseconds.

use alloc::string::String;
use alloc::vec::Vec;

use ::prost::bytes::Bytes;

use super::directory::{Location, Pin, Stamp};

/// Client → owner: [`PutRequest`] is answered by [`PutReply`].
pub const METHOD_PUT: u16 = 0x0201;
/// Client → owner: [`GetRequest`] is answered by [`GetReply`].
pub const METHOD_GET: u16 = 0x0202;
/// Anybody → owner: [`FactsRequest`] is answered by [`Facts`].
pub const METHOD_FACTS: u16 = 0x0203;

/// Bytes of a value that travel inside a message, at most.
pub const INLINE_LEN_MAX: usize = 64 << 10;
/// Inline bytes of one message, over all its items, at most.
pub const INLINE_BATCH_LEN_MAX: usize = 2 << 20;
/// Items of one message, at most.
pub const ITEMS_MAX: usize = 4_096;
/// Bytes that one checksum covers; a value's last chunk may be shorter.
pub const CHUNK_LEN: usize = 256 << 10;
/// Ranges of client memory that one value may be scattered over.
pub const RANGES_MAX: usize = 1_024;

/// A range of the memory that a request's token names; offsets count as the token counts them.
///
/// ```
/// use millpond_core::wire::message::store::Range;
/// assert_eq!(Range { offset: 4096, len: 10 }.len, 10);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Range {
    /// First byte.
    #[prost(uint64, tag = "1")]
    pub offset: u64,
    /// Bytes.
    #[prost(uint64, tag = "2")]
    pub len: u64,
}

/// One value to store.
///
/// ```
/// use millpond_core::wire::message::store::PutItem;
/// let item = PutItem { key: b"k".to_vec(), len: 5, inline: b"hello"[..].into(), checksums: vec![7], ..PutItem::default() };
/// assert!(item.source.is_empty(), "the value travels inside");
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct PutItem {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Bytes of the value.
    #[prost(uint64, tag = "2")]
    pub len: u64,
    /// CRC-32C of each chunk of [`CHUNK_LEN`] bytes.
    #[prost(fixed32, repeated, tag = "3")]
    pub checksums: Vec<u32>,
    /// The value, if it is small.
    #[prost(bytes = "bytes", tag = "4")]
    pub inline: Bytes,
    /// Or where the owner reads it, in order.
    #[prost(message, repeated, tag = "5")]
    pub source: Vec<Range>,
    /// 0 if absent, 1 upsert, 2 replica of `version`.
    #[prost(uint32, tag = "6")]
    pub mode: u32,
    /// Of mode 2.
    #[prost(message, optional, tag = "7")]
    pub version: Option<Stamp>,
    /// The pin.
    #[prost(message, optional, tag = "8")]
    pub pin: Option<Pin>,
    /// Key of the block before this one, for eviction leaf before parent; empty if there is none.
    #[prost(bytes = "vec", tag = "9")]
    pub parent: Vec<u8>,
}

/// Values to store.
///
/// ```
/// use millpond_core::wire::message::store::PutRequest;
/// assert!(PutRequest::default().token.is_empty(), "all items are inline");
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct PutRequest {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<PutItem>,
    /// 64 bytes: the client's read grant that `source` ranges lie in; empty if all items are inline.
    #[prost(bytes = "vec", tag = "2")]
    pub token: Vec<u8>,
    /// Name of the transport to use; empty for the best.
    #[prost(string, tag = "3")]
    pub via: String,
}

/// What became of one put.
///
/// ```
/// use millpond_core::wire::message::store::{PutOutcome, REFUSED};
/// let outcome = PutOutcome { kind: REFUSED, reason: 1, retry_after_ns: 5, ..PutOutcome::default() };
/// assert!(outcome.location.is_none());
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct PutOutcome {
    /// [`STORED`], [`ALREADY_THERE`] or [`REFUSED`].
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Stored, already there: the visible version.
    #[prost(message, optional, tag = "2")]
    pub version: Option<Stamp>,
    /// Stored: replicas there are now.
    #[prost(uint32, tag = "3")]
    pub copies: u32,
    /// Stored: where.
    #[prost(message, optional, tag = "4")]
    pub location: Option<Location>,
    /// Refused: a [`super::rpc::Reason`]'s code.
    #[prost(uint32, tag = "5")]
    pub reason: u32,
    /// Refused: what exactly, for a person.
    #[prost(string, tag = "6")]
    pub detail: String,
    /// Refused: when to ask again; 0 if that will not help by itself.
    #[prost(uint64, tag = "7")]
    pub retry_after_ns: u64,
}

/// A put that made its value visible.
pub const STORED: u32 = 1;
/// A put whose key was there; the old value was kept.
pub const ALREADY_THERE: u32 = 2;
/// A put or get that did nothing.
pub const REFUSED: u32 = 3;
/// A get that delivered.
pub const HIT: u32 = 4;
/// A get whose location is not current; look it up again.
pub const STALE: u32 = 5;

/// An outcome per item.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct PutReply {
    /// In the order of the items.
    #[prost(message, repeated, tag = "1")]
    pub outcomes: Vec<PutOutcome>,
}

/// One value, or a range of it, to fetch.
///
/// ```
/// use millpond_core::wire::message::store::GetItem;
/// assert!(GetItem::default().target.is_empty(), "the value travels inside the reply");
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct GetItem {
    /// The key: the owner checks that the location still holds it.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Where.
    #[prost(message, optional, tag = "2")]
    pub location: Option<Location>,
    /// First byte of the value wanted.
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    /// Bytes wanted.
    #[prost(uint64, tag = "4")]
    pub len: u64,
    /// Where the owner writes them, in order; empty: inside the reply.
    #[prost(message, repeated, tag = "5")]
    pub target: Vec<Range>,
}

/// Values to fetch.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct GetRequest {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<GetItem>,
    /// 64 bytes: the client's write grant that `target` ranges lie in; empty if all items come inside the reply.
    #[prost(bytes = "vec", tag = "2")]
    pub token: Vec<u8>,
    /// Name of the transport to use; empty for the best.
    #[prost(string, tag = "3")]
    pub via: String,
}

/// What became of one get.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct GetOutcome {
    /// [`HIT`], [`STALE`] or [`REFUSED`].
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Hit: the version delivered.
    #[prost(message, optional, tag = "2")]
    pub version: Option<Stamp>,
    /// Hit: CRC-32C of each whole chunk of [`CHUNK_LEN`] bytes that the range covers (the value's last one may be shorter).
    #[prost(fixed32, repeated, tag = "3")]
    pub checksums: Vec<u32>,
    /// Hit: the bytes, if they travel inside.
    #[prost(bytes = "bytes", tag = "4")]
    pub inline: Bytes,
    /// Refused: a [`super::rpc::Reason`]'s code.
    #[prost(uint32, tag = "5")]
    pub reason: u32,
    /// Refused: what exactly, for a person.
    #[prost(string, tag = "6")]
    pub detail: String,
    /// Refused: when to ask again; 0 if that will not help by itself.
    #[prost(uint64, tag = "7")]
    pub retry_after_ns: u64,
}

/// An outcome per item.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct GetReply {
    /// In the order of the items.
    #[prost(message, repeated, tag = "1")]
    pub outcomes: Vec<GetOutcome>,
}

/// Asks an owner about itself.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct FactsRequest {}

/// What an owner says of itself: exact counts.
///
/// ```
/// use millpond_core::wire::message::store::Facts;
/// assert_eq!(Facts::default().sealed, 0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Facts {
    /// Payload bytes in all.
    #[prost(uint64, tag = "1")]
    pub capacity: u64,
    /// Payload bytes not handed out.
    #[prost(uint64, tag = "2")]
    pub free: u64,
    /// Slots in state reserved or writing.
    #[prost(uint64, tag = "3")]
    pub writing: u64,
    /// Slots in state sealed.
    #[prost(uint64, tag = "4")]
    pub sealed: u64,
    /// Slots in state evicting or quarantined.
    #[prost(uint64, tag = "5")]
    pub leaving: u64,
    /// Objects evicted since the start.
    #[prost(uint64, tag = "6")]
    pub evicted: u64,
    /// Victims that stayed because of a lease, since the start.
    #[prost(uint64, tag = "7")]
    pub spared_leased: u64,
    /// Victims that stayed because of a pin, since the start.
    #[prost(uint64, tag = "8")]
    pub spared_pinned: u64,
    /// Puts refused for lack of room, since the start.
    #[prost(uint64, tag = "9")]
    pub refused_full: u64,
    /// Chunks whose checksum was wrong, since the start.
    #[prost(uint64, tag = "10")]
    pub damaged: u64,
}
