//! What a completion says about itself: the 64 bits that a request carries and its completion gives back.

/// Which queue a request was posted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A message sent.
    ControlSend,
    /// A message received.
    ControlReceive,
    /// A data queue of ours.
    Out,
    /// A data queue of the peer's, as we receive it.
    Back,
}

/// The id of a request: its queue, how often that queue was made anew, and a number of the queue's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id {
    pub(crate) kind: Kind,
    pub(crate) index: u8,
    pub(crate) generation: u16,
    pub(crate) number: u32,
}

impl Id {
    pub(crate) fn new(kind: Kind, index: u8, generation: u16, number: u32) -> Self {
        Self { kind, index, generation, number }
    }

    pub(crate) fn bits(self) -> u64 {
        let kind = match self.kind {
            Kind::ControlSend => 0,
            Kind::ControlReceive => 1,
            Kind::Out => 2,
            Kind::Back => 3u64,
        };
        kind << 56 | u64::from(self.index) << 48 | u64::from(self.generation) << 32 | u64::from(self.number)
    }

    #[allow(clippy::cast_possible_truncation)] // the fields are taken apart on purpose
    pub(crate) fn from_bits(bits: u64) -> Self {
        let kind = match bits >> 56 {
            0 => Kind::ControlSend,
            1 => Kind::ControlReceive,
            2 => Kind::Out,
            _ => Kind::Back,
        };
        Self { kind, index: (bits >> 48) as u8, generation: (bits >> 32) as u16, number: bits as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_comes_back() {
        for kind in [Kind::ControlSend, Kind::ControlReceive, Kind::Out, Kind::Back] {
            let id = Id::new(kind, 63, u16::MAX, 0x8000_0001);
            assert_eq!(Id::from_bits(id.bits()), id);
        }
    }
}
