//! Copies for the backends that move bytes by CPU.
//!
//! Memory that a peer's process may write at the same time is copied by [`copy`] only: machine code that the compiler
//! cannot see through (relaxed atomics under an interpreter), so that a concurrent writer costs us garbage bytes and nothing
//! else. Above [`NON_TEMPORAL_LEN_MIN`] the bytes bypass the cache where the CPU can (measured: 23.5 against 13.5 GB/s).
#![allow(unsafe_code)]

use crate::copy_arch as arch;

/// From this length on copies bypass the cache.
pub const NON_TEMPORAL_LEN_MIN: usize = 64 << 10;

/// Copies `len` bytes.
///
/// # Safety
/// - `source .. source + len` is valid for reads, `target .. target + len` for writes, for the length of the call.
/// - The two do not overlap.
/// - Other threads or processes may access either range meanwhile only by means that Rust's memory model does not see, or
///   by this function; what lands in `target` is then unspecified bytes.
#[inline]
pub unsafe fn copy(source: *const u8, target: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: both callees have this function's own duties, and `len` is not zero.
    unsafe {
        if len >= NON_TEMPORAL_LEN_MIN {
            arch::copy_non_temporal(source, target, len)
        } else {
            arch::copy_cached(source, target, len)
        }
    }
}

/// Copies bytes that nobody changes into memory that others may look at. As [`copy`], for a source behind a reference.
///
/// # Safety
/// - `target .. target + source.len()` is valid for writes, for the length of the call, and does not overlap `source`.
/// - Others may access the target meanwhile only as [`copy`] says.
#[inline]
pub unsafe fn copy_in(source: &[u8], target: *mut u8) {
    if source.is_empty() {
        return;
    }
    // SAFETY: the target by this function's own duties, the source by being a reference; the length is not zero.
    unsafe {
        arch::copy_in(source, target);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_length_and_alignment_is_copied_exactly() {
        let lens = [
            0usize,
            1,
            7,
            8,
            63,
            64,
            65,
            4096,
            super::NON_TEMPORAL_LEN_MIN - 1,
            super::NON_TEMPORAL_LEN_MIN,
            (1 << 17) + 77,
        ];
        let lens = if cfg!(miri) { &lens[..7] } else { &lens[..] };
        for &len in lens {
            for (source_skew, target_skew) in [(0, 0), (1, 0), (0, 3), (13, 29)] {
                let mut source: Vec<u8> = (0..len + source_skew).map(|index| (index * 31 % 251) as u8).collect();
                let mut target = vec![0xAA; len + target_skew + 8];
                // SAFETY: both vectors are as long as the pointers and `len` say, and distinct.
                unsafe { super::copy(source.as_mut_ptr().add(source_skew), target.as_mut_ptr().add(target_skew), len) };
                assert_eq!(&target[target_skew..target_skew + len], &source[source_skew..], "{len} bytes");
                assert!(target[..target_skew].iter().chain(&target[target_skew + len..]).all(|&byte| byte == 0xAA));
            }
        }
    }
}
