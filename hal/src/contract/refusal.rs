//! Why a move was refused, and why a link is down.

use core::num::NonZeroI32;

/// Why an owner refuses a request. [`Refusal::code`] is its wire form.
///
/// ```
/// use millpond_hal::contract::Refusal;
/// assert_eq!(Refusal::from_code(Refusal::OutOfBounds.code()), Some(Refusal::OutOfBounds));
/// assert_eq!(Refusal::from_code(0), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
#[repr(u16)]
pub enum Refusal {
    /// No such region or grant, or not any more.
    #[error("the region or grant does not exist or was revoked; ask its owner for a new token")]
    Stale = 1,
    /// The capability was not proven on this link.
    #[error("the capability was not proven on this link; attach the region first")]
    NotProven = 2,
    /// The capability is wrong.
    #[error("the capability is wrong; ask the owner for a token")]
    WrongCapability = 3,
    /// The region or grant does not allow that access.
    #[error("the region or grant does not allow this access; ask the owner for a token with that right")]
    WrongRights = 4,
    /// The range is not inside what was granted.
    #[error("the range is not inside what was granted; keep each move within one granted range")]
    OutOfBounds = 5,
    /// The grant has no room for another counter.
    #[error("the grant has no room for another arrival counter; use fewer counters")]
    CountersFull = 6,
    /// The owner is at a bound; try later.
    #[error("the owner is at a bound; try again later")]
    Busy = 7,
    /// The owner cannot share that memory over this transport.
    #[error("the owner cannot share that memory over this transport; use another one")]
    NotShareable = 8,
    /// The bytes arrived damaged: their checksum does not match.
    #[error("the bytes arrived damaged; move them again")]
    Damaged = 9,
    /// The owner's device failed.
    #[error("the owner's device failed; its log says why")]
    Failed = 10,
    /// The file system of the owner's file is full, or its quota is used up. (11 is a cancel on the wire.)
    #[error("the owner's file system is full; free space there")]
    NoSpace = 12,
    /// The file is shorter than its region: somebody cut it.
    #[error("the file is shorter than its region, somebody cut it; open it again and fill what was lost")]
    Truncated = 13,
    /// The medium failed: bytes could not be read from it, or written to it.
    #[error("the owner's medium failed to read or write; look at the kernel's log there")]
    Medium = 14,
}

impl Refusal {
    /// Its number on the wire.
    #[must_use]
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// The refusal with that number; `None` if this version does not know it.
    #[must_use]
    pub const fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::Stale,
            2 => Self::NotProven,
            3 => Self::WrongCapability,
            4 => Self::WrongRights,
            5 => Self::OutOfBounds,
            6 => Self::CountersFull,
            7 => Self::Busy,
            8 => Self::NotShareable,
            9 => Self::Damaged,
            10 => Self::Failed,
            12 => Self::NoSpace,
            13 => Self::Truncated,
            14 => Self::Medium,
            _ => return None,
        })
    }
}

/// Why a link ended.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkDownReason {
    /// We closed it.
    #[error("the link was closed here")]
    Closed,
    /// The peer said goodbye.
    #[error("the peer closed the link")]
    PeerClosed,
    /// The peer's process or host is gone, or cut the connection without a goodbye.
    #[error("the peer is gone")]
    PeerGone,
    /// Nothing moved for longer than the progress deadline.
    #[error("no progress within the deadline; the peer is stuck or the link is dead")]
    Stalled,
    /// A newer generation of the same lane replaced it.
    #[error("a newer generation of the lane replaced this one")]
    Superseded,
    /// Nobody used it for long, so we closed it.
    #[error("the link was idle for long; it is opened again when it is used")]
    Idle,
    /// It was idle and another link needed its place.
    #[error("the link was idle and made room for another; open it again when it is used")]
    Evicted,
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Violation(&'static str),
    /// The operating system failed us.
    #[error("system error {0} on the link")]
    System(NonZeroI32),
}
