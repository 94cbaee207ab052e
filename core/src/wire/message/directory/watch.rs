//! What watchers of a shard ask and hear: the stream of changes, and what each owner holds for those who lost a part of it.

use alloc::vec::Vec;

use super::{Header, Location, Owner, Stamp};

/// Asks for the stream of changes.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct WatchRequest {
    /// Events after this one; without it, those to come.
    #[prost(message, optional, tag = "1")]
    pub after: Option<Stamp>,
}

/// One change.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct Event {
    /// Its number.
    #[prost(message, optional, tag = "1")]
    pub at: Option<Stamp>,
    /// 1 stored, 2 removed, 3 cleared, 4 an owner left; others are from a later version.
    #[prost(uint32, tag = "2")]
    pub kind: u32,
    /// The key.
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    /// The replica.
    #[prost(message, optional, tag = "4")]
    pub location: Option<Location>,
    /// Stored: the version.
    #[prost(message, optional, tag = "5")]
    pub version: Option<Stamp>,
    /// Stored: bytes of the value.
    #[prost(uint64, tag = "6")]
    pub len: u64,
    /// Stored: 0 memory, 1 flash.
    #[prost(uint32, tag = "7")]
    pub tier: u32,
    /// Removed: the reason's code.
    #[prost(uint32, tag = "8")]
    pub reason: u32,
    /// Removed: replicas left.
    #[prost(uint32, tag = "9")]
    pub replicas_left: u32,
    /// Left: who. The reason's code is in `reason`.
    #[prost(message, optional, tag = "10")]
    pub owner: Option<Owner>,
    /// Removed: replicas left at the same node.
    #[prost(uint32, tag = "11")]
    pub left_there: u32,
}

/// Some events, in order.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct EventBatch {
    /// Who speaks.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// The events.
    #[prost(message, repeated, tag = "2")]
    pub events: Vec<Event>,
    /// Where to go on after a break.
    #[prost(message, optional, tag = "3")]
    pub next: Option<Stamp>,
    /// Events were lost: list everything, or ask each owner's holdings, then go on at `next`.
    #[prost(bool, tag = "4")]
    pub gap: bool,
}

/// Asks what one node holds.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct HoldingsRequest {
    /// The node.
    #[prost(bytes = "vec", tag = "1")]
    pub node: Vec<u8>,
    /// Keys that begin with this.
    #[prost(bytes = "vec", tag = "2")]
    pub prefix: Vec<u8>,
    /// From this place on; without it, from the start.
    #[prost(message, optional, tag = "3")]
    pub after: Option<Place>,
    /// Look at so many slots at most.
    #[prost(uint32, tag = "4")]
    pub max: u32,
}

/// A place in a node's holdings.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, Copy, PartialEq, Eq, ::prost::Message)]
pub struct Place {
    /// Which of its segments.
    #[prost(uint32, tag = "1")]
    pub segment: u32,
    /// The slot in it.
    #[prost(uint32, tag = "2")]
    pub slot: u32,
}

/// A page of a node's keys.
///
/// Example: `core/src/wire/message/tests.rs`.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct HoldingsReply {
    /// Who answers.
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    /// The node as it is in the table; absent if it is not.
    #[prost(message, optional, tag = "2")]
    pub owner: Option<Owner>,
    /// The keys; one with replicas in two segments comes twice.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub keys: Vec<Vec<u8>>,
    /// Ask again from this place; absent if that was all.
    #[prost(message, optional, tag = "4")]
    pub next: Option<Place>,
    /// The last event before the page was read.
    #[prost(message, optional, tag = "5")]
    pub position: Option<Stamp>,
}
