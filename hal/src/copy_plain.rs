//! Copies under an interpreter that watches for data races: byte by byte, by relaxed atomics. See [`crate::copy`].
//!
//! Bytes only: accesses of different sizes to the same place would themselves be a race.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU8, Ordering};

/// # Safety
/// - As [`crate::copy::copy`].
pub(crate) unsafe fn copy_cached(source: *const u8, target: *mut u8, len: usize) {
    for at in 0..len {
        // SAFETY: `at < len`: in range on both sides.
        unsafe {
            let value = AtomicU8::from_ptr(source.add(at).cast_mut()).load(Ordering::Relaxed);
            AtomicU8::from_ptr(target.add(at)).store(value, Ordering::Relaxed);
        }
    }
}

/// # Safety
/// - As [`crate::copy::copy_in`].
pub(crate) unsafe fn copy_in(source: &[u8], target: *mut u8) {
    // An atomic load asks for the right to write, which a reference does not have: plain loads here.
    for (at, byte) in source.iter().enumerate() {
        // SAFETY: `at < source.len()`: in range of the target.
        unsafe { AtomicU8::from_ptr(target.add(at)).store(*byte, Ordering::Relaxed) };
    }
}

/// # Safety
/// - As [`crate::copy::copy`].
pub(crate) unsafe fn copy_non_temporal(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the same duties.
    unsafe { copy_cached(source, target, len) }
}
