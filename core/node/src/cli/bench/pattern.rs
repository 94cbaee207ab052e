//! Bytes that tell where they belong: each eight are made of a seed and their offset.
//!
//! Memory is filled before a point and compared after it, so that whatever was moved to a wrong place, not moved, or moved
//! where nothing should have been, shows.

use millpond_hal::region::{LeaseError, Region};

/// Bytes made at a time.
const CHUNK_LEN: usize = 64 << 10;

/// The eight bytes that stand at `8 * index`: one step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
fn word(seed: u64, index: u64) -> u64 {
    let mut word = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Writes the pattern of `seed` for `offset..` over `bytes`; `offset` is a multiple of eight.
pub(super) fn write(seed: u64, offset: u64, bytes: &mut [u8]) {
    for (index, eight) in (offset / 8..).zip(bytes.chunks_mut(8)) {
        eight.copy_from_slice(&word(seed, index).to_le_bytes()[..eight.len()]);
    }
}

/// Fills a raw region.
pub(super) fn fill(region: &Region, seed: u64) -> Result<(), LeaseError> {
    let mut chunk = vec![0; CHUNK_LEN];
    for offset in (0..region.len()).step_by(CHUNK_LEN) {
        let len = usize::try_from(region.len() - offset).unwrap_or(CHUNK_LEN).min(CHUNK_LEN);
        write(seed, offset, &mut chunk[..len]);
        region.write_at(offset, &chunk[..len])?;
    }
    Ok(())
}

/// Neighbouring bytes that have one seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) seed: u64,
}

/// The first offset whose byte is not what its run says.
pub(super) fn first_wrong(region: &Region, runs: impl IntoIterator<Item = Run>) -> Result<Option<u64>, LeaseError> {
    let (mut found, mut wanted) = (vec![0; CHUNK_LEN], vec![0; CHUNK_LEN]);
    for run in runs {
        let end = run.offset + run.len;
        let mut offset = run.offset;
        // Bounded by the run: every round takes a chunk of it.
        while offset < end {
            let skipped = offset % 8;
            let room = CHUNK_LEN - 8;
            let len = usize::try_from(end - offset).unwrap_or(room).min(room);
            let lead = usize::try_from(skipped).unwrap_or(0);
            region.read_at(offset, &mut found[..len])?;
            write(run.seed, offset - skipped, &mut wanted[..lead + len]);
            let wanted = &wanted[lead..lead + len];
            if found[..len] != *wanted {
                let at = found.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(0);
                return Ok(Some(offset + at as u64));
            }
            offset += len as u64;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_core::batch::Rights;
    use millpond_hal::mapping::{Backing, Mapping};
    use millpond_hal::region::Mode;

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        let len = 200_003;
        let region = Region::unregistered(Mapping::new(len, Backing::Heap).unwrap(), Mode::Raw(Rights::LOCAL));
        let len = region.len();
        fill(&region, 7).unwrap();
        let runs = [(0, 5), (5, 70_000), (70_005, len - 70_005)].map(|(offset, len)| Run { offset, len, seed: 7 });
        assert_eq!(first_wrong(&region, runs), Ok(None));
        for at in [0, 4, 5, 69_999, 70_005, 131_072, len - 1] {
            let mut byte = [0];
            region.read_at(at, &mut byte).unwrap();
            region.write_at(at, &[byte[0] ^ 1]).unwrap();
            assert_eq!(first_wrong(&region, runs), Ok(Some(at)));
            region.write_at(at, &byte).unwrap();
        }
        assert_eq!(first_wrong(&region, [Run { offset: 8, len: 8, seed: 8 }]), Ok(Some(8)));
    }
}
