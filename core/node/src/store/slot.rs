//! The 64 bytes that say what a slot holds: the head of every segment is a table of them.
//!
//! Only the owner writes a slot. A one-sided reader, and recovery, accept a record only if its checksum is right and its
//! state is sealed. Numbers are little-endian.

use millpond_core::directory::Stamp;
use xxhash_rust::xxh3::xxh3_128;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::of_chunk;

/// Bytes of one slot.
pub(super) const SLOT_LEN: usize = 64;

/// Where a slot is in its life. Only sealed slots are readable; one that is proposed for eviction stays readable until the
/// directory has agreed, since a lease may save it.
///
/// Example: `core/node/src/store/segment/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is in it.
    Free,
    /// Space is set aside; no byte has come yet.
    Reserved,
    /// Bytes are coming in.
    Writing,
    /// Complete, verified, readable.
    Sealed,
    /// Proposed to the directory as a victim.
    Evicting,
    /// Gone for everybody who asks; somebody still touches the bytes.
    Quarantined,
}

impl State {
    const fn code(self) -> u8 {
        match self {
            Self::Free => 0,
            Self::Reserved => 1,
            Self::Writing => 2,
            Self::Sealed => 3,
            Self::Evicting => 4,
            Self::Quarantined => 5,
        }
    }

    #[cfg_attr(not(test), allow(dead_code, reason = "a slot is read back where a segment outlives its process"))]
    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::Free,
            1 => Self::Reserved,
            2 => Self::Writing,
            3 => Self::Sealed,
            4 => Self::Evicting,
            5 => Self::Quarantined,
            _ => return None,
        })
    }

    /// Whether bytes may be served.
    #[must_use]
    pub const fn is_readable(self) -> bool {
        matches!(self, Self::Sealed | Self::Evicting)
    }
}

/// What a slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) generation: u32,
    pub(super) state: State,
    pub(super) mutable: bool,
    pub(super) key_len: u16,
    pub(super) object: u128,
    pub(super) version: Stamp,
    pub(super) offset: u64,
    pub(super) len: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    generation: U32,
    state: u8,
    flags: u8,
    key_len: U16,
    object: U128,
    term: U64,
    n: U64,
    offset: U64,
    len: U64,
    reserved: U32,
    crc: U32,
}

const _: () = assert!(size_of::<Raw>() == SLOT_LEN);
const MUTABLE: u8 = 1;

/// The object id of a key: how a slot recognises it without holding it.
pub(super) fn object_id(key: &[u8]) -> u128 {
    xxh3_128(key)
}

impl Record {
    pub(super) fn encode(&self) -> [u8; SLOT_LEN] {
        let mut raw = Raw {
            generation: self.generation.into(),
            state: self.state.code(),
            flags: if self.mutable { MUTABLE } else { 0 },
            key_len: self.key_len.into(),
            object: self.object.into(),
            term: self.version.term.into(),
            n: self.version.n.into(),
            offset: self.offset.into(),
            len: self.len.into(),
            reserved: 0.into(),
            crc: 0.into(),
        };
        raw.crc = of_chunk(&raw.as_bytes()[..SLOT_LEN - size_of::<U32>()]).into();
        zerocopy::transmute!(raw)
    }

    #[cfg_attr(not(test), allow(dead_code, reason = "a slot is read back where a segment outlives its process"))]
    /// The record that `bytes` are; `None` if they are damaged or were never written.
    pub(super) fn decode(bytes: &[u8; SLOT_LEN]) -> Option<Self> {
        let raw = Raw::ref_from_bytes(bytes).ok()?;
        if raw.crc.get() != of_chunk(&bytes[..SLOT_LEN - size_of::<U32>()]) {
            return None;
        }
        Some(Self {
            generation: raw.generation.get(),
            state: State::from_code(raw.state)?,
            mutable: raw.flags & MUTABLE != 0,
            key_len: raw.key_len.get(),
            object: raw.object.get(),
            version: Stamp { term: raw.term.get(), n: raw.n.get() },
            offset: raw.offset.get(),
            len: raw.len.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: Record = Record {
        generation: 7,
        state: State::Sealed,
        mutable: true,
        key_len: 9,
        object: 1 << 100,
        version: Stamp { term: 3, n: 4 },
        offset: 4096,
        len: 99,
    };

    #[test]
    fn a_record_reads_back_as_it_was_and_no_single_bit_may_flip() {
        let bytes = RECORD.encode();
        assert_eq!(Record::decode(&bytes), Some(RECORD));
        for bit in 0..SLOT_LEN * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&damaged), None, "bit {bit}");
        }
    }

    #[test]
    fn a_slot_that_was_never_written_holds_nothing() {
        assert_eq!(Record::decode(&[0; SLOT_LEN]), None);
    }
}
