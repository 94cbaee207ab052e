//! The codes of frames: how a request ended, why a lane ends.

use core::fmt;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $value:literal => $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every value, in the order of its code.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The number on the wire.
            #[must_use]
            pub const fn code(self) -> u16 {
                match self { $(Self::$variant => $value,)* }
            }

            /// The value that `code` stands for, if there is one.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($value => Some(Self::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)* })
            }
        }
    };
}

codes! {
    /// How a write or a read ended at the target.
    ///
    /// ```
    /// use millpond_core::wire::frame::AckCode;
    /// assert_eq!(AckCode::from_code(AckCode::Done.code()), Some(AckCode::Done));
    /// ```
    AckCode {
        /// All bytes are where they should be, and visible there.
        Done = 0 => "done",
        /// The region is gone: released, closed, or its slot was given to another.
        Stale = 1 => "the region is gone; ask its owner for a new token",
        /// The region's capability was not proven on this lane.
        NotProven = 2 => "the region's capability is not proven on this lane; send it before the first use",
        /// The capability shown is not the region's.
        WrongCapability = 3 => "the capability is wrong; ask the region's owner for a token",
        /// The region does not grant this access.
        WrongRights = 4 => "the region does not grant this access; ask its owner for the right",
        /// The range is not inside what the region or grant admits.
        OutOfBounds = 5 => "the range lies outside the region or grant; check offset and length",
        /// The region has no room for another arrival counter.
        CountersFull = 6 => "the region has no room for another counter; use fewer counters",
        /// The target has no room for the request now.
        Busy = 7 => "the target has no room now; retry later",
        /// The memory cannot be reached over this lane.
        NotShareable = 8 => "this lane cannot reach that memory; use another transport",
        /// The payload's checksum did not match; the target's bytes are undefined.
        BadChecksum = 9 => "the payload arrived damaged; write it again",
        /// The target's device failed.
        Failed = 10 => "the target's device failed; its log says why",
        /// A cancel overtook the frame.
        Cancelled = 11 => "cancelled before it was complete",
    }
}

codes! {
    /// Why one end closes a lane.
    ///
    /// ```
    /// use millpond_core::wire::frame::GoodbyeReason;
    /// assert_eq!(GoodbyeReason::Idle.to_string(), "the lane was idle");
    /// ```
    GoodbyeReason {
        /// Nothing moved for long; open a lane again when there is work.
        Idle = 0 => "the lane was idle",
        /// The node is going away in order.
        Draining = 1 => "the node is draining",
        /// A lane of a newer generation took over.
        Replaced = 2 => "a newer lane took over",
        /// The other end broke the protocol.
        Violation = 3 => "the peer broke the protocol",
        /// No progress within the deadline.
        Stalled = 4 => "no progress within the deadline",
    }
}
