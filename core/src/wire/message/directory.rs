//! Messages to and from a shard of the store's directory.
//!
//! The messages mirror [`crate::directory`]'s inputs and answers; `convert` turns one into the other. Every answer carries
//! the shard and its term: a receiver that has seen a higher term refuses it. Spans are nanoseconds; instants never travel.
//! Batches answer item by item, in order.

use alloc::string::String;
use alloc::vec::Vec;

mod convert;
mod watch;

pub use convert::Unreadable;
pub use watch::{Event, EventBatch, HoldingsReply, HoldingsRequest, Place, WatchRequest};

/// Client → shard: [`LocateRequest`] is answered by [`LocateReply`].
pub const METHOD_LOCATE: u16 = 0x0101;
/// Client → shard: [`ExistsRequest`] is answered by [`ExistsReply`].
pub const METHOD_EXISTS: u16 = 0x0102;
/// Client → shard: [`StatRequest`] is answered by [`StatReply`].
pub const METHOD_STAT: u16 = 0x0103;
/// Client → shard: [`ListRequest`] is answered by [`ListReply`].
pub const METHOD_LIST: u16 = 0x0104;
/// Client → shard: [`RemoveRequest`] is answered by [`RemoveReply`].
pub const METHOD_REMOVE: u16 = 0x0105;
/// Client → shard: [`ClearRequest`] is answered by [`RemoveReply`].
pub const METHOD_CLEAR: u16 = 0x0106;
/// Client → shard: [`ExplainRequest`] is answered by [`ExplainReply`].
pub const METHOD_EXPLAIN_MISS: u16 = 0x0107;
/// Client → shard: [`ViewRequest`] is answered by [`ViewReply`].
pub const METHOD_VIEW: u16 = 0x0108;
/// Watcher → shard, a stream: [`WatchRequest`] is answered by [`EventBatch`] messages.
pub const METHOD_WATCH: u16 = 0x0109;
/// Watcher → shard: [`HoldingsRequest`] is answered by [`HoldingsReply`].
pub const METHOD_HOLDINGS: u16 = 0x010a;
/// Owner → shard: [`JoinRequest`] is answered by [`Header`].
pub const METHOD_JOIN: u16 = 0x0110;
/// Owner → shard: [`HeartbeatRequest`] is answered by [`HeartbeatReply`].
pub const METHOD_HEARTBEAT: u16 = 0x0111;
/// Owner → shard: [`InventoryRequest`] is answered by [`InventoryReply`].
pub const METHOD_INVENTORY: u16 = 0x0112;
/// Owner → shard: [`CommitRequest`] is answered by [`CommitReply`].
pub const METHOD_COMMIT: u16 = 0x0113;
/// Owner → shard: [`EvictRequest`] is answered by [`EvictReply`].
pub const METHOD_EVICT: u16 = 0x0114;
/// Owner → shard: [`DroppedRequest`] is answered by [`Header`].
pub const METHOD_DROPPED: u16 = 0x0115;

/// Keys, commits, victims or entries of one message, at most.
pub const ITEMS_MAX: usize = 4_096;

/// Who answers: the shard and its term.
///
/// ```
/// use millpond_core::wire::message::directory::Header;
/// assert!(Header { shard: 0, term: 4 }.term > Header { shard: 0, term: 3 }.term);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Header {
    /// The shard.
    #[prost(uint32, tag = "1")]
    pub shard: u32,
    /// Its term.
    #[prost(uint64, tag = "2")]
    pub term: u64,
}

/// A [`crate::directory::Stamp`].
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Stamp {
    /// The term.
    #[prost(uint64, tag = "1")]
    pub term: u64,
    /// The event.
    #[prost(uint64, tag = "2")]
    pub n: u64,
}

/// A [`crate::directory::Owner`].
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Owner {
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub node: Vec<u8>,
    /// Its incarnation.
    #[prost(uint64, tag = "2")]
    pub incarnation: u64,
}

/// A [`crate::directory::Location`].
///
/// ```
/// use millpond_core::directory::{self, NodeId};
/// use millpond_core::wire::message::directory::Location;
/// let location = directory::Location { node: NodeId([1; 16]), segment: 0, epoch: 3, slot: 9, generation: 1 };
/// assert_eq!(directory::Location::try_from(&Location::from(location)), Ok(location));
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Location {
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub node: Vec<u8>,
    /// The segment.
    #[prost(uint32, tag = "2")]
    pub segment: u32,
    /// Its epoch.
    #[prost(fixed64, tag = "3")]
    pub epoch: u64,
    /// The slot.
    #[prost(uint32, tag = "4")]
    pub slot: u32,
    /// Its generation.
    #[prost(uint32, tag = "5")]
    pub generation: u32,
}

/// Whether an object may be evicted: a [`crate::directory::Pin`].
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Pin {
    /// 0 free, 1 soft, 2 hard.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Of a soft pin.
    #[prost(uint64, tag = "2")]
    pub ttl_ns: u64,
}

/// Looks keys up and leases them.
///
/// ```
/// use millpond_core::wire::message::directory::LocateRequest;
/// let request = LocateRequest { keys: vec![b"k".to_vec()], lease_ns: 5_000_000_000 };
/// assert_eq!(request.keys.len(), 1);
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct LocateRequest {
    /// The keys.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub keys: Vec<Vec<u8>>,
    /// The lease wished for; 0 for none.
    #[prost(uint64, tag = "2")]
    pub lease_ns: u64,
}

/// One key's answer to a lookup.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Located {
    /// Whether it was found; the other fields of a find follow only then.
    #[prost(bool, tag = "1")]
    pub hit: bool,
    /// The visible version.
    #[prost(message, optional, tag = "2")]
    pub version: Option<Stamp>,
    /// Bytes of the value.
    #[prost(uint64, tag = "3")]
    pub len: u64,
    /// Its replicas, the likeliest to answer first.
    #[prost(message, repeated, tag = "4")]
    pub replicas: Vec<Location>,
    /// How long it is safe from eviction, from when the caller asked.
    #[prost(uint64, tag = "5")]
    pub lease_ns: u64,
    /// Of a miss: the shard is collecting inventories and will know after this long. 0: the key is absent.
    #[prost(uint64, tag = "6")]
    pub rebuilding_ns: u64,
}

/// An answer per key.
///
/// ```
/// use millpond_core::wire::message::directory::LocateReply;
/// assert!(LocateReply::default().located.is_empty());
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct LocateReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// In the order of the keys.
    #[prost(message, repeated, tag = "2")]
    pub located: Vec<Located>,
}

/// Asks whether keys are there, without a lease.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ExistsRequest {
    /// The keys.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub keys: Vec<Vec<u8>>,
}

/// A byte per key: 0 absent, 1 present, 2 not known yet.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ExistsReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// In the order of the keys.
    #[prost(bytes = "vec", tag = "2")]
    pub present: Vec<u8>,
    /// When it will know, if a byte is 2.
    #[prost(uint64, tag = "3")]
    pub rebuilding_ns: u64,
}

/// Asks what is known of one key.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct StatRequest {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
}

/// What is known of one key.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct StatReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// Found or not, version, length, replicas.
    #[prost(message, optional, tag = "2")]
    pub located: Option<Located>,
    /// Tier of each replica: 0 memory, 1 flash.
    #[prost(uint32, repeated, tag = "3")]
    pub tiers: Vec<u32>,
    /// Since it was stored.
    #[prost(uint64, tag = "4")]
    pub age_ns: u64,
    /// Time left of its longest lease.
    #[prost(uint64, tag = "5")]
    pub lease_left_ns: u64,
    /// Its pin.
    #[prost(message, optional, tag = "6")]
    pub pin: Option<Pin>,
    /// Whether it was ever upserted.
    #[prost(bool, tag = "7")]
    pub mutable: bool,
}

/// Asks for a page of keys in byte order.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ListRequest {
    /// Keys that begin with this.
    #[prost(bytes = "vec", tag = "1")]
    pub prefix: Vec<u8>,
    /// Keys after this one; empty from the start.
    #[prost(bytes = "vec", tag = "2")]
    pub after: Vec<u8>,
    /// At most so many rows.
    #[prost(uint32, tag = "3")]
    pub max: u32,
}

/// One row of a listing.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Listed {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The visible version.
    #[prost(message, optional, tag = "2")]
    pub version: Option<Stamp>,
    /// Bytes of the value.
    #[prost(uint64, tag = "3")]
    pub len: u64,
    /// Replicas.
    #[prost(uint32, tag = "4")]
    pub replicas: u32,
}

/// A page of keys.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ListReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// The rows.
    #[prost(message, repeated, tag = "2")]
    pub rows: Vec<Listed>,
    /// Ask again after this key; empty if that was all.
    #[prost(bytes = "vec", tag = "3")]
    pub next: Vec<u8>,
    /// The last event before the page was read.
    #[prost(message, optional, tag = "4")]
    pub position: Option<Stamp>,
}

/// Removes keys, or what begins with a prefix.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct RemoveRequest {
    /// These keys.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub keys: Vec<Vec<u8>>,
    /// If there are no keys: one page of the keys that begin with this.
    #[prost(bytes = "vec", tag = "2")]
    pub prefix: Vec<u8>,
    /// And come after this one; empty from the start.
    #[prost(bytes = "vec", tag = "3")]
    pub after: Vec<u8>,
    /// Also leased ones.
    #[prost(bool, tag = "4")]
    pub force: bool,
}

/// What a removal did.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct RemoveReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// Objects removed.
    #[prost(uint64, tag = "2")]
    pub objects: u64,
    /// Objects that stayed: leased.
    #[prost(uint64, tag = "3")]
    pub leased: u64,
    /// Owners that could not be told yet.
    #[prost(uint32, tag = "4")]
    pub owners_unreachable: u32,
    /// Ask again after this key; empty if that was all.
    #[prost(bytes = "vec", tag = "5")]
    pub next: Vec<u8>,
}

/// Clears the namespace.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct ClearRequest {}

/// Asks why a key is a miss.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ExplainRequest {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
}

/// Why a key is a miss: a [`crate::directory::Explanation`].
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ExplainReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// 0 never stored, 1 present, 2 lost, 3 rebuilding.
    #[prost(uint32, tag = "2")]
    pub kind: u32,
    /// Present: replicas. Never stored: removals remembered.
    #[prost(uint64, tag = "3")]
    pub count: u64,
    /// Present: replicas with silent owners.
    #[prost(uint32, tag = "4")]
    pub suspect: u32,
    /// Lost: the reason's code.
    #[prost(uint32, tag = "5")]
    pub reason: u32,
    /// Lost: the node that held the last replica.
    #[prost(bytes = "vec", tag = "6")]
    pub node: Vec<u8>,
    /// Lost: the version.
    #[prost(message, optional, tag = "7")]
    pub version: Option<Stamp>,
    /// Lost: its length.
    #[prost(uint64, tag = "8")]
    pub len: u64,
    /// Lost: how long ago. Rebuilding: how much longer.
    #[prost(uint64, tag = "9")]
    pub span_ns: u64,
}

/// Asks for the placement view.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct ViewRequest {}

/// One segment.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Segment {
    /// Its index in the owner.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// Its epoch.
    #[prost(fixed64, tag = "2")]
    pub epoch: u64,
    /// 0 memory, 1 flash.
    #[prost(uint32, tag = "3")]
    pub tier: u32,
    /// Payload bytes.
    #[prost(uint64, tag = "4")]
    pub capacity: u64,
    /// Free payload bytes.
    #[prost(uint64, tag = "5")]
    pub free: u64,
    /// Replicas in it.
    #[prost(uint64, tag = "6")]
    pub replicas: u64,
}

/// One owner.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct OwnerView {
    /// Who.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// Where it listens.
    #[prost(string, tag = "2")]
    pub address: String,
    /// Whether it is silent.
    #[prost(bool, tag = "3")]
    pub suspect: bool,
    /// Its segments.
    #[prost(message, repeated, tag = "4")]
    pub segments: Vec<Segment>,
}

/// The placement view.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct ViewReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// The owners.
    #[prost(message, repeated, tag = "2")]
    pub owners: Vec<OwnerView>,
    /// The longest lease that is granted.
    #[prost(uint64, tag = "3")]
    pub lease_max_ns: u64,
}

/// An owner's first word.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct JoinRequest {
    /// Who.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// Where it listens.
    #[prost(string, tag = "2")]
    pub address: String,
    /// Its segments.
    #[prost(message, repeated, tag = "3")]
    pub segments: Vec<Segment>,
}

/// An owner is alive.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct HeartbeatRequest {
    /// Who.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// How full its segments are.
    #[prost(message, repeated, tag = "2")]
    pub segments: Vec<Segment>,
    /// Retired locations it has freed since.
    #[prost(message, repeated, tag = "3")]
    pub freed: Vec<Location>,
}

/// What an owner should free.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct HeartbeatReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// Free these, and name them in the next heartbeat.
    #[prost(message, repeated, tag = "2")]
    pub retired: Vec<Location>,
}

/// One sealed slot.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Entry {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The slot.
    #[prost(uint32, tag = "2")]
    pub slot: u32,
    /// Its generation.
    #[prost(uint32, tag = "3")]
    pub generation: u32,
    /// Bytes of the value.
    #[prost(uint64, tag = "4")]
    pub len: u64,
    /// The version.
    #[prost(message, optional, tag = "5")]
    pub version: Option<Stamp>,
    /// The pin.
    #[prost(message, optional, tag = "6")]
    pub pin: Option<Pin>,
    /// Whether it was ever upserted.
    #[prost(bool, tag = "7")]
    pub mutable: bool,
}

/// A batch of a segment's inventory.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct InventoryRequest {
    /// Who.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// Which segment.
    #[prost(uint32, tag = "2")]
    pub segment: u32,
    /// Its epoch.
    #[prost(fixed64, tag = "3")]
    pub epoch: u64,
    /// The entries.
    #[prost(message, repeated, tag = "4")]
    pub entries: Vec<Entry>,
    /// Whether this was all.
    #[prost(bool, tag = "5")]
    pub last: bool,
}

/// A word per entry.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct InventoryReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// 0 kept; otherwise free it, for the reason with this code.
    #[prost(uint32, repeated, tag = "2")]
    pub verdicts: Vec<u32>,
}

/// One sealed replica.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct CommitItem {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// Bytes of the value.
    #[prost(uint64, tag = "2")]
    pub len: u64,
    /// Where.
    #[prost(message, optional, tag = "3")]
    pub location: Option<Location>,
    /// 0 if absent, 1 upsert, 2 replica of `version`.
    #[prost(uint32, tag = "4")]
    pub mode: u32,
    /// Of mode 2.
    #[prost(message, optional, tag = "5")]
    pub version: Option<Stamp>,
    /// The pin.
    #[prost(message, optional, tag = "6")]
    pub pin: Option<Pin>,
}

/// Makes replicas visible.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct CommitRequest {
    /// Who sealed them.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// The replicas.
    #[prost(message, repeated, tag = "2")]
    pub items: Vec<CommitItem>,
}

/// What became of one commit.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct CommitOutcome {
    /// 1 stored, 2 already there, 3 refused.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// The visible version.
    #[prost(message, optional, tag = "2")]
    pub version: Option<Stamp>,
    /// Stored: replicas now. Already there: bytes of the visible value.
    #[prost(uint64, tag = "3")]
    pub count: u64,
    /// Stored: whether it was ever upserted.
    #[prost(bool, tag = "4")]
    pub mutable: bool,
    /// Refused: why, for a person.
    #[prost(string, tag = "5")]
    pub detail: String,
    /// Refused: when to ask again; 0 if that will not help.
    #[prost(uint64, tag = "6")]
    pub retry_after_ns: u64,
    /// Refused: a [`super::rpc::Reason`]'s code.
    #[prost(uint32, tag = "7")]
    pub reason: u32,
}

/// An outcome per item.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct CommitReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// In the order of the items.
    #[prost(message, repeated, tag = "2")]
    pub outcomes: Vec<CommitOutcome>,
}

/// A replica its owner gives up.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Victim {
    /// The key.
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    /// The replica.
    #[prost(message, optional, tag = "2")]
    pub location: Option<Location>,
}

/// Proposes victims.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct EvictRequest {
    /// Who needs space.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// The victims.
    #[prost(message, repeated, tag = "2")]
    pub victims: Vec<Victim>,
    /// Softly pinned objects may go, too.
    #[prost(bool, tag = "3")]
    pub pressing: bool,
}

/// One verdict.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct EvictVerdict {
    /// 0 free it, 1 leased, 2 pinned, 3 not yet.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Of 1 and 3.
    #[prost(uint64, tag = "2")]
    pub retry_after_ns: u64,
}

/// A verdict per victim.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct EvictReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// In the order of the victims.
    #[prost(message, repeated, tag = "2")]
    pub verdicts: Vec<EvictVerdict>,
}

/// Replicas an owner has lost.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct DroppedRequest {
    /// Who.
    #[prost(message, optional, tag = "1")]
    pub owner: Option<Owner>,
    /// The replicas.
    #[prost(message, repeated, tag = "2")]
    pub victims: Vec<Victim>,
}
