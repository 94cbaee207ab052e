//! Copies on every other machine, and under interpreters. See [`crate::copy`].
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// # Safety
/// - As [`crate::copy::copy`].
pub(crate) unsafe fn copy_cached(source: *const u8, target: *mut u8, len: usize) {
    const WORD: usize = size_of::<usize>();
    let mut at = 0;
    // Word by word where both sides are aligned alike, byte by byte otherwise. Bounded by `len`.
    while at < len {
        // SAFETY:
        // - `at + 1 <= len`, or `at + WORD <= len` where words are used: in range on both sides.
        // - words are used only where both addresses are aligned.
        unsafe {
            let (from, to) = (source.add(at), target.add(at));
            if at + WORD <= len && from.addr().is_multiple_of(WORD) && to.addr().is_multiple_of(WORD) {
                let value = AtomicUsize::from_ptr(from.cast_mut().cast()).load(Ordering::Relaxed);
                AtomicUsize::from_ptr(to.cast()).store(value, Ordering::Relaxed);
                at += WORD;
            } else {
                let value = AtomicU8::from_ptr(from.cast_mut()).load(Ordering::Relaxed);
                AtomicU8::from_ptr(to).store(value, Ordering::Relaxed);
                at += 1;
            }
        }
    }
}

/// # Safety
/// - As [`crate::copy::copy`].
pub(crate) unsafe fn copy_non_temporal(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the same duties.
    unsafe { copy_cached(source, target, len) }
}
