//! What two ends of a rail say to each other over its session: a NIC here is joined with one of the peer's.
//!
//! Each message is a little-endian length (u32, at most [`RAIL_LEN_MAX`]) and a [`RailMessage`]. The acceptor begins: its
//! NICs → the dialer's choice and endpoint record → the acceptor's record. Then the byte tests: the dialer puts bytes into the
//! acceptor's scratch memory, moves over the rail, takes what lies there, and gives the turn, upon which the acceptor does the
//! same. After that nothing is said: the session lasts as long as the rail, and its end is the rail's. A refusal at any point
//! ends both. Endpoint records are the backend's own.

use alloc::string::String;
use alloc::vec::Vec;

/// Bytes of one message, at most: scratch memory and a little more.
pub const RAIL_LEN_MAX: u32 = 80 << 10;
/// NICs that a node tells of, at most.
pub const RAIL_NICS_MAX: usize = 64;

/// A NIC of the node that speaks.
///
/// ```
/// use millpond_core::wire::message::rail::RailNic;
/// assert!(!RailNic { name: "mlx5_0".into(), ..RailNic::default() }.is_preferred);
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct RailNic {
    /// Its name there.
    #[prost(string, tag = "1")]
    pub name: String,
    /// 1 InfiniBand, 2 Ethernet.
    #[prost(uint32, tag = "2")]
    pub medium: u32,
    /// Whether memory of the node prefers it to others.
    #[prost(bool, tag = "3")]
    pub is_preferred: bool,
    /// Events of its port so far; a number that changed means that its rails are to be tested again.
    #[prost(uint64, tag = "4")]
    pub events: u64,
}

/// All NICs of the node that speaks, in the order by which they are numbered.
///
/// ```
/// use millpond_core::wire::message::rail::RailNics;
/// assert!(RailNics::default().nics.is_empty());
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct RailNics {
    /// Them.
    #[prost(message, repeated, tag = "1")]
    pub nics: Vec<RailNic>,
}

/// The dialer's choice.
///
/// ```
/// use millpond_core::wire::message::rail::RailAsk;
/// assert_eq!(RailAsk::default().peer_nic, 0);
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct RailAsk {
    /// All NICs of the dialer.
    #[prost(message, optional, tag = "1")]
    pub nics: Option<RailNics>,
    /// The one of them that is used.
    #[prost(uint32, tag = "2")]
    pub nic: u32,
    /// The acceptor's that is wanted, by its number.
    #[prost(uint32, tag = "3")]
    pub peer_nic: u32,
    /// The dialer's endpoint.
    #[prost(bytes = "vec", tag = "4")]
    pub record: Vec<u8>,
}

/// One message of a rail's session.
///
/// ```
/// use millpond_core::wire::message::rail::{RailMessage, RailWord};
/// use prost::Message;
/// let said = RailMessage { word: Some(RailWord::Refuse("mlx5_0 is down".into())) };
/// assert_eq!(RailMessage::decode(&*said.encode_to_vec()), Ok(said));
/// ```
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct RailMessage {
    /// What is said; `None`: something that this version does not know.
    #[prost(oneof = "RailWord", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9")]
    pub word: Option<RailWord>,
}

/// What a message says.
///
/// Example: [`RailMessage`].
#[derive(Clone, PartialEq, Eq, ::prost::Oneof)]
pub enum RailWord {
    /// The acceptor's first.
    #[prost(message, tag = "1")]
    Nics(RailNics),
    /// The dialer's answer to it.
    #[prost(message, tag = "2")]
    Ask(RailAsk),
    /// The acceptor's endpoint.
    #[prost(bytes, tag = "3")]
    Answer(Vec<u8>),
    /// There is no rail, and why, for people.
    #[prost(string, tag = "4")]
    Refuse(String),
    /// Put these bytes into your scratch memory, not over the rail.
    #[prost(bytes, tag = "5")]
    Put(Vec<u8>),
    /// They are there; this is the token of that memory.
    #[prost(bytes, tag = "6")]
    Kept(Vec<u8>),
    /// Say what lies in your scratch memory, as your CPU sees it.
    #[prost(bool, tag = "7")]
    Take(bool),
    /// That.
    #[prost(bytes, tag = "8")]
    Found(Vec<u8>),
    /// My tests passed: yours; or, from the acceptor, all did.
    #[prost(bool, tag = "9")]
    Turn(bool),
}
