//! Frames of remote calls on a control session: a fixed header of 48 bytes, then a body of at most [`MESSAGE_LEN_MAX`].
//!
//! This module reads and writes headers and knows what a refusal looks like; who answers what, and when, is the business
//! of `millpond-node`'s `rpc`. The body of a request, an answer or an item is a prost message of the method's family.
//! Invariants: numbers are little-endian; fields that a kind does not use are zero, so a frame has exactly one encoding;
//! parsing is total; instants never travel, only the time a caller has left.
//!
//! A call is a request, then one answer or one refusal; a stream is a request, then items as far as the caller's credit
//! goes, then one end or one refusal. Either is cut short by the caller's cancel, which gets no reply.

use alloc::borrow::Cow;
use alloc::string::String;
use core::fmt;
use core::num::NonZeroU64;

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::time::Duration;

/// Bytes of a frame's header.
pub const HEADER_LEN: usize = size_of::<Header>();

/// Bytes of a frame's body, at most. Larger things travel by the transfer engine, or in several calls.
pub const MESSAGE_LEN_MAX: u32 = 4 << 20;

/// Items that a stream's caller may have asked for and not yet taken, at most.
pub const WINDOW_MAX: u32 = 4096;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    checksum: U32,
    kind: u8,
    reserved: u8,
    method: U16,
    body_len: U32,
    items: U32,
    call: U64,
    span_ns: U64,
    request: U64,
    trace: U64,
}

/// The fields of a request, without its body.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_core::wire::message::rpc::Request;
/// let request = Request { call: 1, method: 0x0101, span: Duration::from_secs(5), id: None, trace: 0, window: 0 };
/// assert_eq!(request.window, 0, "one answer, no stream");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Number of the call, unique on its session while it lasts.
    pub call: u64,
    /// What to do.
    pub method: u16,
    /// Time the caller has left.
    pub span: Duration,
    /// Identity of a mutation, the same in each of its retries; the target does it once.
    pub id: Option<NonZeroU64>,
    /// Trace id, 0 for none.
    pub trace: u64,
    /// Items that may be sent before more credit comes; 0 for a call that has one answer.
    pub window: u32,
}

/// One frame of a control session, without its body.
///
/// ```
/// use millpond_core::wire::message::rpc::{Frame, Head};
/// let head = Head { frame: Frame::Ping { nonce: 7 }, body_len: 0 };
/// assert_eq!(Head::decode(&head.encode()), Ok(head));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Frame {
    /// Caller: do this. The body is the method's request message.
    Request(Request),
    /// Target: done. The body is the method's answer message.
    Answer {
        /// The call.
        call: u64,
    },
    /// Target: one more item of a stream. The body is the method's item message.
    Item {
        /// The call.
        call: u64,
    },
    /// Target: the stream ended well.
    End {
        /// The call.
        call: u64,
    },
    /// Target: no. The body is a [`Refusal`].
    Refused {
        /// The call.
        call: u64,
    },
    /// Caller: the answer is no longer wanted.
    Cancel {
        /// The call.
        call: u64,
    },
    /// Caller: so many more items may be sent.
    Credit {
        /// The call.
        call: u64,
        /// Items on top of what was granted before.
        items: u32,
    },
    /// Either: are you there?
    Ping {
        /// Comes back in the pong.
        nonce: u64,
    },
    /// Either: here.
    Pong {
        /// From the ping.
        nonce: u64,
    },
    /// Target: no further requests; those in flight are finished.
    Goodbye,
}

/// A frame and how many bytes of body follow it.
///
/// ```
/// use millpond_core::wire::message::rpc::{Frame, Head, Violation};
/// let mut bytes = Head { frame: Frame::Goodbye, body_len: 0 }.encode();
/// bytes[9] ^= 1;
/// assert_eq!(Head::decode(&bytes), Err(Violation::Checksum));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The frame.
    pub frame: Frame,
    /// Bytes that follow.
    pub body_len: u32,
}

/// Bytes that are no frame of this protocol. The session that carried them is closed.
///
/// ```
/// use millpond_core::wire::message::rpc::{Head, HEADER_LEN, Violation};
/// assert_eq!(Head::decode(&[0; HEADER_LEN]), Err(Violation::Checksum));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// The header's checksum is wrong.
    Checksum,
    /// No such kind of frame.
    Kind(u8),
    /// A field that the kind does not use is not zero, or one that it uses is out of its bounds.
    Field,
    /// The body is longer than [`MESSAGE_LEN_MAX`], or the kind has none.
    BodyLen(u32),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checksum => f.write_str("a call frame's header has a wrong checksum"),
            Self::Kind(kind) => write!(f, "call frames of kind {kind} are unknown here"),
            Self::Field => f.write_str("a call frame has a field out of bounds"),
            Self::BodyLen(len) => write!(f, "a call frame's body of {len} bytes is longer than its kind allows"),
        }
    }
}

impl core::error::Error for Violation {}

impl Frame {
    const fn kind(&self) -> u8 {
        match self {
            Self::Request(_) => 1,
            Self::Answer { .. } => 2,
            Self::Item { .. } => 3,
            Self::End { .. } => 4,
            Self::Refused { .. } => 5,
            Self::Cancel { .. } => 6,
            Self::Credit { .. } => 7,
            Self::Ping { .. } => 8,
            Self::Pong { .. } => 9,
            Self::Goodbye => 10,
        }
    }

    /// Whether frames of this kind may have a body.
    #[must_use]
    pub const fn has_body(&self) -> bool {
        matches!(self, Self::Request(_) | Self::Answer { .. } | Self::Item { .. } | Self::Refused { .. })
    }
}

impl Head {
    /// The header as it travels.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut header = Header::new_zeroed();
        header.kind = self.frame.kind();
        header.body_len = self.body_len.into();
        match self.frame {
            Frame::Request(request) => {
                header.method = request.method.into();
                header.items = request.window.into();
                header.call = request.call.into();
                header.span_ns = request.span.as_nanos().into();
                header.request = request.id.map_or(0, NonZeroU64::get).into();
                header.trace = request.trace.into();
            }
            Frame::Answer { call }
            | Frame::Item { call }
            | Frame::End { call }
            | Frame::Refused { call }
            | Frame::Cancel { call } => header.call = call.into(),
            Frame::Credit { call, items } => {
                header.call = call.into();
                header.items = items.into();
            }
            Frame::Ping { nonce } | Frame::Pong { nonce } => header.call = nonce.into(),
            Frame::Goodbye => {}
        }
        header.checksum = checksum(header.as_bytes()).into();
        zerocopy::transmute!(header)
    }

    /// The frame that `bytes` are.
    ///
    /// # Errors
    /// They are none.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, Violation> {
        let header: Header = zerocopy::transmute!(*bytes);
        if header.checksum.get() != checksum(bytes) {
            return Err(Violation::Checksum);
        }
        let (call, items) = (header.call.get(), header.items.get());
        let frame = match header.kind {
            1 => Frame::Request(Request {
                call,
                method: header.method.get(),
                span: Duration::from_nanos(header.span_ns.get()),
                id: NonZeroU64::new(header.request.get()),
                trace: header.trace.get(),
                window: items,
            }),
            2 => Frame::Answer { call },
            3 => Frame::Item { call },
            4 => Frame::End { call },
            5 => Frame::Refused { call },
            6 => Frame::Cancel { call },
            7 => Frame::Credit { call, items },
            8 => Frame::Ping { nonce: call },
            9 => Frame::Pong { nonce: call },
            10 => Frame::Goodbye,
            kind => return Err(Violation::Kind(kind)),
        };
        let head = Self { frame, body_len: header.body_len.get() };
        let len_max = if frame.has_body() { MESSAGE_LEN_MAX } else { 0 };
        if head.body_len > len_max {
            return Err(Violation::BodyLen(head.body_len));
        }
        // One encoding each: whatever the kind does not use must be zero.
        if items > WINDOW_MAX || head.encode() != *bytes {
            return Err(Violation::Field);
        }
        Ok(head)
    }
}

fn checksum(header: &[u8]) -> u32 {
    let [a, b, c, d, ..] = xxh3_64(&header[size_of::<U32>()..]).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $done:ident, $text:literal;)*) => {
        /// Why a target said no.
        ///
        /// ```
        /// use millpond_core::wire::message::rpc::Reason;
        /// assert!(Reason::ALL.iter().all(|reason| Reason::from_code(reason.code()) == *reason));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$doc])* $variant,)* }

        impl Reason {
            /// Every reason, in the order of its code.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The number on the wire.
            #[must_use]
            pub const fn code(self) -> u32 {
                match self { $(Self::$variant => $code,)* }
            }

            /// The reason that `code` stands for; one from a later version is a [`Reason::Failed`].
            #[must_use]
            pub const fn from_code(code: u32) -> Self {
                match code { $($code => Self::$variant,)* _ => Self::Failed }
            }

            /// Whether the target surely did nothing, so that asking again, or elsewhere, cannot do it twice.
            #[must_use]
            pub const fn is_untouched(self) -> bool {
                match self { $(Self::$variant => reasons!($done),)* }
            }

            const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
    (untouched) => { true };
    (unknown) => { false };
}

reasons! {
    /// Too much is going on; ask again after the hint.
    Busy = 1, untouched, "busy";
    /// The caller's time was up before the work was done.
    Deadline = 2, unknown, "the deadline passed at the target";
    /// The work was given up because the session or the node goes away.
    Cancelled = 3, unknown, "cancelled at the target";
    /// The target serves no such method.
    UnknownMethod = 4, untouched, "no such method";
    /// The request makes no sense.
    Malformed = 5, untouched, "malformed request";
    /// The caller may not do this.
    Denied = 6, untouched, "denied";
    /// What the request names is not there.
    NotFound = 7, untouched, "not found";
    /// What the request would make is there already.
    Exists = 8, untouched, "exists already";
    /// No room; something has to be removed first, or go elsewhere.
    Full = 9, untouched, "full";
    /// The target is going away; ask another.
    Draining = 10, untouched, "draining";
    /// The target failed, by its own fault.
    Failed = 11, unknown, "failed";
    /// A message would be longer than [`MESSAGE_LEN_MAX`].
    TooLarge = 12, unknown, "message too large";
    /// What the request names has changed since the caller looked; look again.
    Stale = 13, untouched, "stale";
    /// Somebody the target depends on does not answer.
    Unavailable = 14, unknown, "unavailable";
    /// The work was begun, and its result would come too late to be of use; come back when there is less to do.
    Late = 15, unknown, "too late";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// A target's no: the reason for the program, the detail for the log, and when to ask again if that may help.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_core::wire::message::rpc::{Reason, Refusal};
/// let refusal = Refusal::new(Reason::Busy, "300 calls in flight").retry_after(Duration::from_millis(20));
/// assert_eq!(refusal.to_string(), "busy: 300 calls in flight; retry after 20ms");
/// assert_eq!(Refusal::decode(&refusal.encode()), Some(refusal));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// What exactly, for a person.
    pub detail: Cow<'static, str>,
    /// When asking again may help; `None` if it will not by itself.
    pub retry_after: Option<Duration>,
}

/// The wire form of a [`Refusal`].
#[derive(Clone, PartialEq, prost::Message)]
struct RefusalMessage {
    #[prost(uint32, tag = "1")]
    reason: u32,
    #[prost(string, tag = "2")]
    detail: String,
    #[prost(uint64, optional, tag = "3")]
    retry_after_ns: Option<u64>,
}

impl Refusal {
    /// A no for `reason`, with what exactly is wrong and what to do about it.
    #[must_use]
    pub fn new(reason: Reason, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { reason, detail: detail.into(), retry_after: None }
    }

    /// The same, with a hint when to ask again.
    #[must_use]
    pub fn retry_after(self, span: Duration) -> Self {
        Self { retry_after: Some(span), ..self }
    }

    /// The body of a [`Frame::Refused`].
    #[must_use]
    pub fn encode(&self) -> alloc::vec::Vec<u8> {
        let message = RefusalMessage {
            reason: self.reason.code(),
            detail: self.detail.clone().into_owned(),
            retry_after_ns: self.retry_after.map(Duration::as_nanos),
        };
        prost::Message::encode_to_vec(&message)
    }

    /// The refusal that a body is; `None` if it is none.
    #[must_use]
    pub fn decode(body: &[u8]) -> Option<Self> {
        let message: RefusalMessage = prost::Message::decode(body).ok()?;
        Some(Self {
            reason: Reason::from_code(message.reason),
            detail: Cow::Owned(message.detail),
            retry_after: message.retry_after_ns.map(Duration::from_nanos),
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        self.retry_after.map_or(Ok(()), |span| write!(f, "; retry after {span}"))
    }
}

impl core::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        call: 0x0102,
        method: 0x0304,
        span: Duration::from_nanos(5),
        id: NonZeroU64::new(6),
        trace: 7,
        window: 8,
    };

    fn frames() -> [Frame; 10] {
        [
            Frame::Request(REQUEST),
            Frame::Answer { call: 1 },
            Frame::Item { call: 2 },
            Frame::End { call: 3 },
            Frame::Refused { call: 4 },
            Frame::Cancel { call: 5 },
            Frame::Credit { call: 6, items: 7 },
            Frame::Ping { nonce: 8 },
            Frame::Pong { nonce: 9 },
            Frame::Goodbye,
        ]
    }

    #[test]
    fn every_frame_comes_back_and_no_single_bit_may_flip() {
        for frame in frames() {
            let head = Head { frame, body_len: if frame.has_body() { MESSAGE_LEN_MAX } else { 0 } };
            let bytes = head.encode();
            assert_eq!(Head::decode(&bytes), Ok(head));
            for bit in 0..HEADER_LEN * 8 {
                let mut damaged = bytes;
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Head::decode(&damaged), Err(Violation::Checksum), "bit {bit} of {frame:?}");
            }
        }
    }

    #[test]
    fn a_field_out_of_bounds_is_a_violation_even_with_a_right_checksum() {
        let seal = |mut bytes: [u8; HEADER_LEN]| {
            let sum = checksum(&bytes);
            bytes[..4].copy_from_slice(&sum.to_le_bytes());
            Head::decode(&bytes)
        };
        let edit = |frame: Frame, place: usize, value: u8| {
            let mut bytes = Head { frame, body_len: 0 }.encode();
            bytes[place] = value;
            seal(bytes)
        };
        assert_eq!(edit(Frame::Goodbye, 4, 99), Err(Violation::Kind(99)));
        assert_eq!(edit(Frame::Goodbye, 4, 0), Err(Violation::Kind(0)));
        assert_eq!(edit(Frame::Goodbye, 5, 1), Err(Violation::Field));
        assert_eq!(edit(Frame::Goodbye, 16, 1), Err(Violation::Field));
        assert_eq!(edit(Frame::Cancel { call: 1 }, 8, 1), Err(Violation::BodyLen(1)));
        assert_eq!(edit(Frame::Answer { call: 1 }, 11, 1), Err(Violation::BodyLen(1 << 24)));
        assert_eq!(edit(Frame::Credit { call: 1, items: 1 }, 14, 1), Err(Violation::Field));
    }

    #[test]
    fn a_request_is_these_bytes() {
        let bytes = Head { frame: Frame::Request(REQUEST), body_len: 9 }.encode();
        let tail = [
            [1, 0, 4, 3, 9, 0, 0, 0],
            [8, 0, 0, 0, 2, 1, 0, 0],
            [0, 0, 0, 0, 5, 0, 0, 0],
            [0, 0, 0, 0, 6, 0, 0, 0],
            [0, 0, 0, 0, 7, 0, 0, 0],
        ];
        assert_eq!(bytes[4..44], *tail.as_flattened());
        assert_eq!(bytes[44..], [0; 4]);
        assert_eq!(bytes[..4], checksum(&bytes).to_le_bytes());
    }

    #[test]
    fn a_refusal_from_a_later_version_is_a_failure_and_garbage_is_none() {
        let message = RefusalMessage { reason: 999, detail: "new".into(), retry_after_ns: None };
        let refusal = Refusal::decode(&prost::Message::encode_to_vec(&message)).unwrap();
        assert_eq!((refusal.reason, &*refusal.detail), (Reason::Failed, "new"));
        assert_eq!(Refusal::decode(&[0xff; 3]), None);
    }
}
