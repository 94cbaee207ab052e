//! One CRC-32C per chunk of a value: made by the client, checked by the owner at put and by the client at get.
//!
//! It finds damage, not malice. A chunk is [`CHUNK_LEN`] bytes counted from the start of the value; the last one may be
//! shorter, so a value of `len` bytes has [`chunk_count`]`(len)` checksums.

use crc_fast::{CrcAlgorithm, checksum};

pub use millpond_core::wire::message::store::CHUNK_LEN;

/// Checksums of a value of `len` bytes.
#[must_use]
pub fn chunk_count(len: u64) -> u64 {
    len.div_ceil(CHUNK_LEN as u64)
}

/// The CRC-32C of one chunk.
#[must_use]
pub fn of_chunk(chunk: &[u8]) -> u32 {
    // A 32-bit algorithm: the upper half is always zero.
    u32::try_from(checksum(CrcAlgorithm::Crc32Iscsi, chunk) & u64::from(u32::MAX)).unwrap_or_default()
}

/// The checksums of a whole value, or of any part that begins at a chunk's start.
pub fn of_value(value: &[u8]) -> impl Iterator<Item = u32> {
    value.chunks(CHUNK_LEN).map(of_chunk)
}

/// The first chunk of `part` whose checksum differs, counted from the start of `part`; `part` begins at a chunk's start.
#[must_use]
pub fn first_damaged(part: &[u8], checksums: &[u32]) -> Option<usize> {
    let count = part.len().div_ceil(CHUNK_LEN);
    if count != checksums.len() {
        return Some(count.min(checksums.len()));
    }
    of_value(part).zip(checksums).position(|(found, expected)| found != *expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc_32c_is_the_published_one() {
        assert_eq!(of_chunk(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_flipped_bit_is_found_in_its_chunk() {
        let mut value = vec![7; 3 * CHUNK_LEN + 5];
        let checksums: Vec<u32> = of_value(&value).collect();
        assert_eq!(
            (checksums.len() as u64, first_damaged(&value, &checksums)),
            (chunk_count(value.len() as u64), None)
        );
        value[2 * CHUNK_LEN + 9] ^= 4;
        assert_eq!(first_damaged(&value, &checksums), Some(2));
        assert_eq!(first_damaged(&value, &checksums[..2]), Some(2), "too few checksums");
    }
}
