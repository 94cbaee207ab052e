//! Messages of the control queue pair: little-endian, at most [`MESSAGE_LEN_MAX`] bytes, parsed totally.
//!
//! A message starts with its kind, three zero bytes and how many messages its sender received so far, which is the credit
//! of the other end. Data never travels here. Bytes give a message or nothing; what gives nothing ends the link.

use millpond_core::batch::{RegionId, Rights};
use millpond_core::slab::Handle;

/// The longest message.
pub(crate) const MESSAGE_LEN_MAX: usize = 1024;
/// Bytes before a message's own.
const HEAD_LEN: usize = 8;
/// Bytes of one key.
const KEY_LEN: usize = 28;
/// Keys of one message.
pub(crate) const KEYS_MAX: usize = (MESSAGE_LEN_MAX - HEAD_LEN - 20) / KEY_LEN;
/// Bytes of an arrival record, as it is written into the peer's ring.
pub(crate) const ARRIVAL_LEN: usize = 32;

/// A range that the peer may touch by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// First byte, an offset in the region.
    pub(crate) offset: u64,
    /// Length in bytes.
    pub(crate) len: u64,
    /// Address of the first byte, as the owner's NIC knows it.
    pub(crate) address: u64,
    /// The remote key.
    pub(crate) remote_key: u32,
}

/// A queue pair, as the other end connects to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remade {
    /// Which of the data queue pairs.
    pub(crate) index: u16,
    /// How often it was made anew.
    pub(crate) generation: u16,
    /// Its number.
    pub(crate) number: u32,
    /// The first sequence number that it sends.
    pub(crate) sequence: u32,
}

/// What one end tells the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The first one: this end receives.
    Hello { generation: u64, incarnation: u64 },
    /// Here is the capability of that region of yours.
    Prove { region: RegionId, capability: [u8; 16] },
    /// These keys open that region of mine; `total` in all, in several messages.
    Keys { region: RegionId, rights: Rights, total: u32, first: u32, keys: Vec<Key> },
    /// That region is not for you.
    Refused { region: RegionId, code: u16 },
    /// The keys of that region of mine are void.
    Revoked { region: RegionId },
    /// The arrival in that place of the ring was counted (code 0), or refused.
    Counted { index: u16, slot: u16, generation: u16, code: u16 },
    /// My data queue pair broke; connect yours to this one.
    Remake(Remade),
    /// Mine is ready for yours.
    Remade(Remade),
    /// Is the link alive? That it can be delivered is the answer.
    Ping,
    /// Nothing but the credit.
    Credit,
    /// The link ends.
    Goodbye,
}

/// What an arrival record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) region: RegionId,
    pub(crate) counter: u64,
    pub(crate) amount: u64,
}

/// Takes fields off the front of bytes.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn region(&mut self) -> Option<RegionId> {
        Some(Handle { slot: self.u32()?, epoch: self.u32()? })
    }

    fn remade(&mut self) -> Option<Remade> {
        Some(Remade { index: self.u16()?, generation: self.u16()?, number: self.u32()?, sequence: self.u32()? })
    }
}

fn put_region(into: &mut Vec<u8>, region: RegionId) {
    into.extend(region.slot.to_le_bytes());
    into.extend(region.epoch.to_le_bytes());
}

fn put_remade(into: &mut Vec<u8>, remade: &Remade) {
    into.extend(remade.index.to_le_bytes());
    into.extend(remade.generation.to_le_bytes());
    into.extend(remade.number.to_le_bytes());
    into.extend(remade.sequence.to_le_bytes());
}

impl Message {
    fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Prove { .. } => 2,
            Self::Keys { .. } => 3,
            Self::Refused { .. } => 4,
            Self::Revoked { .. } => 5,
            Self::Counted { .. } => 6,
            Self::Remake(_) => 7,
            Self::Remade(_) => 8,
            Self::Ping => 9,
            Self::Credit => 10,
            Self::Goodbye => 11,
        }
    }

    /// Replaces `into` by the message.
    pub(crate) fn write(&self, received: u32, into: &mut Vec<u8>) {
        into.clear();
        into.extend([self.kind(), 0, 0, 0]);
        into.extend(received.to_le_bytes());
        match self {
            Self::Hello { generation, incarnation } => {
                into.extend(generation.to_le_bytes());
                into.extend(incarnation.to_le_bytes());
            }
            Self::Prove { region, capability } => {
                put_region(into, *region);
                into.extend(capability);
            }
            Self::Keys { region, rights, total, first, keys } => {
                put_region(into, *region);
                let count = u16::try_from(keys.len()).expect("at most KEYS_MAX keys go into a message");
                let bits: u8 = zerocopy::transmute!(*rights);
                into.extend([bits, 0]);
                into.extend(count.to_le_bytes());
                into.extend(total.to_le_bytes());
                into.extend(first.to_le_bytes());
                for key in keys {
                    into.extend(key.offset.to_le_bytes());
                    into.extend(key.len.to_le_bytes());
                    into.extend(key.address.to_le_bytes());
                    into.extend(key.remote_key.to_le_bytes());
                }
            }
            Self::Refused { region, code } => {
                put_region(into, *region);
                into.extend(code.to_le_bytes());
            }
            Self::Revoked { region } => put_region(into, *region),
            Self::Counted { index, slot, generation, code } => {
                [index, slot, generation, code].into_iter().for_each(|field| into.extend(field.to_le_bytes()));
            }
            Self::Remake(remade) | Self::Remade(remade) => put_remade(into, remade),
            Self::Ping | Self::Credit | Self::Goodbye => {}
        }
    }

    /// The message in these bytes, and the credit that came with it.
    pub(crate) fn parse(bytes: &[u8]) -> Option<(Self, u32)> {
        let mut reader = Reader(bytes);
        let [kind, 0, 0, 0] = reader.array()? else { return None };
        let received = reader.u32()?;
        let message = match kind {
            1 => Self::Hello { generation: reader.u64()?, incarnation: reader.u64()? },
            2 => Self::Prove { region: reader.region()?, capability: reader.array()? },
            3 => Self::parse_keys(&mut reader)?,
            4 => Self::Refused { region: reader.region()?, code: reader.u16()? },
            5 => Self::Revoked { region: reader.region()? },
            6 => Self::Counted {
                index: reader.u16()?,
                slot: reader.u16()?,
                generation: reader.u16()?,
                code: reader.u16()?,
            },
            7 => Self::Remake(reader.remade()?),
            8 => Self::Remade(reader.remade()?),
            9 => Self::Ping,
            10 => Self::Credit,
            11 => Self::Goodbye,
            _ => return None,
        };
        reader.0.is_empty().then_some((message, received))
    }

    fn parse_keys(reader: &mut Reader<'_>) -> Option<Self> {
        let region = reader.region()?;
        let [rights, 0] = reader.array()? else { return None };
        let rights: Rights = zerocopy::transmute!(rights);
        let count = usize::from(reader.u16()?);
        let (total, first) = (reader.u32()?, reader.u32()?);
        if count > KEYS_MAX {
            return None;
        }
        let keys = (0..count).map(|_| {
            Some(Key { offset: reader.u64()?, len: reader.u64()?, address: reader.u64()?, remote_key: reader.u32()? })
        });
        let keys = keys.collect::<Option<Vec<_>>>()?;
        Some(Self::Keys { region, rights, total, first, keys })
    }
}

impl Arrival {
    pub(crate) fn to_bytes(self) -> [u8; ARRIVAL_LEN] {
        let mut bytes = [0; ARRIVAL_LEN];
        bytes[..4].copy_from_slice(&self.region.slot.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.region.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.counter.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.amount.to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; ARRIVAL_LEN]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let arrival = Self { region: reader.region()?, counter: reader.u64()?, amount: reader.u64()? };
        (reader.0 == [0; 8]).then_some(arrival)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const REGION: RegionId = Handle { slot: 7, epoch: 9 };

    fn all() -> Vec<Message> {
        let remade = Remade { index: 1, generation: 2, number: 0x00AB_CDEF, sequence: 77 };
        let key = Key { offset: 4096, len: 100, address: 0x7000_0000_1000, remote_key: 0xDEAD_BEEF };
        vec![
            Message::Hello { generation: 3, incarnation: u64::MAX },
            Message::Prove { region: REGION, capability: [5; 16] },
            Message::Keys {
                region: REGION,
                rights: Rights::REMOTE_WRITE,
                total: 40,
                first: 3,
                keys: vec![key; KEYS_MAX],
            },
            Message::Keys { region: REGION, rights: Rights::REMOTE_READ, total: 0, first: 0, keys: Vec::new() },
            Message::Refused { region: REGION, code: 3 },
            Message::Revoked { region: REGION },
            Message::Counted { index: 1, slot: 31, generation: 4, code: 0 },
            Message::Remake(remade),
            Message::Remade(remade),
            Message::Ping,
            Message::Credit,
            Message::Goodbye,
        ]
    }

    #[test]
    fn every_message_comes_back_as_it_was_written_and_fits() {
        let mut bytes = Vec::new();
        for message in all() {
            message.write(12, &mut bytes);
            assert!(bytes.len() <= MESSAGE_LEN_MAX, "{message:?}");
            assert_eq!(Message::parse(&bytes), Some((message, 12)));
        }
    }

    #[test]
    fn a_message_cut_short_or_too_long_is_none() {
        let mut bytes = Vec::new();
        for message in all() {
            message.write(12, &mut bytes);
            for len in 0..bytes.len() {
                assert_eq!(Message::parse(&bytes[..len]), None, "{message:?} cut to {len}");
            }
            bytes.push(0);
            assert_eq!(Message::parse(&bytes), None, "{message:?} and more");
        }
    }

    proptest! {
        #[test]
        fn what_parses_is_what_was_written(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..13) {
            let mut bytes = bytes;
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
            }
            if let Some((message, received)) = Message::parse(&bytes) {
                let mut again = Vec::new();
                message.write(received, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn an_arrival_record_comes_back() {
        let arrival = Arrival { region: REGION, counter: 5, amount: 6 };
        assert_eq!(Arrival::parse(&arrival.to_bytes()), Some(arrival));
        let mut bytes = arrival.to_bytes();
        bytes[31] = 1;
        assert_eq!(Arrival::parse(&bytes), None);
    }
}
