//! What two ends tell each other, over a session they have already, so that their queue pairs can be connected.
//!
//! An endpoint record is opaque to whoever carries it: 64 bytes and 16 more for each pair of data queues, little-endian.
//! It names the NIC's address, the queue pairs with their first sequence numbers, and the small piece of memory that the peer
//! writes arrivals into and reads back. It is no secret to the peer and should be one to everybody else: carry it over the
//! authenticated session only.

use super::message::Reader;
use super::verbs::Path;

/// Data queue pairs of one link and direction, at most.
pub const QUEUES_MAX: u16 = 64;
/// First bytes of a record: what it is and its version.
const MAGIC: [u8; 8] = *b"mprdma\x00\x01";
const HEAD_LEN: usize = 64;

/// A queue pair's number and first sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    pub(crate) number: u32,
    pub(crate) sequence: u32,
}

/// The record, as values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) is_ethernet: bool,
    pub(crate) mtu_len: u32,
    pub(crate) reads_max: u8,
    /// The ring for arrivals, and the word behind it that the peer reads.
    pub(crate) ring_address: u64,
    pub(crate) ring_key: u32,
    pub(crate) control: Number,
    /// Per data queue: ours that sends, ours that receives.
    pub(crate) queues: Vec<(Number, Number)>,
}

/// A record does not fit.
///
/// ```
/// use millpond_hal::backend::rdma::RecordError;
/// assert!(RecordError::Queues { own: 2, peer: 4 }.to_string().contains("2"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Not a record, or of another version.
    #[error("this is no endpoint record of this version; both ends need the same version of the rdma backend")]
    Unreadable,
    /// The ends have different numbers of queues.
    #[error("we have {own} data queues for each link, the peer has {peer}; configure the same number")]
    Queues {
        /// Ours.
        own: u16,
        /// The peer's.
        peer: u16,
    },
    /// One end is on Ethernet, the other on InfiniBand.
    #[error("one port is Ethernet, the other InfiniBand; choose ports of one fabric")]
    LinkLayer,
}

impl Record {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_LEN + 16 * self.queues.len());
        bytes.extend(MAGIC);
        bytes.extend(self.gid);
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend([u8::from(self.is_ethernet), self.reads_max]);
        bytes.extend(self.mtu_len.to_le_bytes());
        bytes.extend(self.ring_address.to_le_bytes());
        bytes.extend(self.ring_key.to_le_bytes());
        bytes.extend(u16::try_from(self.queues.len()).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend([0; 10]);
        for number in core::iter::once(&self.control).chain(self.queues.iter().flat_map(|(out, back)| [out, back])) {
            bytes.extend(number.number.to_le_bytes());
            bytes.extend(number.sequence.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        Self::parse_all(bytes).ok_or(RecordError::Unreadable)
    }

    fn parse_all(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.array()? != MAGIC {
            return None;
        }
        let gid = reader.array()?;
        let lid = reader.u16()?;
        let [is_ethernet @ (0 | 1), reads_max] = reader.array()? else { return None };
        let (mtu_len, ring_address, ring_key) = (reader.u32()?, reader.u64()?, reader.u32()?);
        let count = reader.u16()?;
        if reader.array()? != [0; 10] || count == 0 || count > QUEUES_MAX {
            return None;
        }
        let mut number = || Some(Number { number: reader.u32()?, sequence: reader.u32()? });
        let control = number()?;
        let queues = (0..count).map(|_| Some((number()?, number()?))).collect::<Option<Vec<_>>>()?;
        let is_ethernet = is_ethernet == 1;
        let record = Self { gid, lid, is_ethernet, mtu_len, reads_max, ring_address, ring_key, control, queues };
        reader.0.is_empty().then_some(record)
    }

    /// Whether `peer` can be connected to this.
    pub(crate) fn check(&self, peer: &Self) -> Result<(), RecordError> {
        let count = |record: &Self| u16::try_from(record.queues.len()).unwrap_or(u16::MAX);
        if count(self) != count(peer) {
            return Err(RecordError::Queues { own: count(self), peer: count(peer) });
        }
        if self.is_ethernet != peer.is_ethernet {
            return Err(RecordError::LinkLayer);
        }
        Ok(())
    }

    /// How to connect a queue pair of ours, which starts with `own_sequence`, to one of the peer's.
    pub(crate) fn path(
        &self,
        peer: &Self,
        own_sequence: u32,
        to: Number,
        (gid_index, ack_timeout_exponent): (u8, u8),
    ) -> Path {
        Path {
            number: to.number,
            peer_sequence: to.sequence,
            own_sequence,
            gid: peer.gid,
            lid: peer.lid,
            gid_index,
            mtu_len: self.mtu_len.min(peer.mtu_len),
            reads_max: self.reads_max.min(peer.reads_max).max(1),
            ack_timeout_exponent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let number = |number| Number { number, sequence: number * 3 };
        Record {
            gid: [7; 16],
            lid: 9,
            is_ethernet: true,
            mtu_len: 4096,
            reads_max: 16,
            ring_address: 0x1234_5678,
            ring_key: 99,
            control: number(1),
            queues: vec![(number(2), number(3)), (number(4), number(5))],
        }
    }

    #[test]
    fn a_record_comes_back_and_has_the_length_it_says() {
        let bytes = record().to_bytes();
        assert_eq!((bytes.len(), Record::parse(&bytes)), (HEAD_LEN + 2 * 16, Ok(record())));
    }

    #[test]
    fn what_is_cut_longer_or_of_another_version_is_refused() {
        let bytes = record().to_bytes();
        for len in 0..bytes.len() {
            assert_eq!(Record::parse(&bytes[..len]), Err(RecordError::Unreadable));
        }
        let mut longer = bytes.clone();
        longer.push(0);
        let mut newer = bytes;
        newer[7] = 2;
        assert!(Record::parse(&longer).is_err() && Record::parse(&newer).is_err());
    }

    #[test]
    fn ends_that_differ_are_told_what_differs() {
        let (own, mut peer) = (record(), record());
        peer.queues.pop();
        assert_eq!(own.check(&peer), Err(RecordError::Queues { own: 2, peer: 1 }));
        peer = record();
        peer.is_ethernet = false;
        assert_eq!(own.check(&peer), Err(RecordError::LinkLayer));
        assert_eq!(own.check(&own), Ok(()));
    }
}
