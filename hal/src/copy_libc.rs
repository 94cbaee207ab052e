//! Copies on machines without code of their own: the C library's, which the compiler does not see through. See
//! [`crate::copy`].
#![allow(unsafe_code)]

/// # Safety
/// - As [`crate::copy::copy`].
#[inline]
pub(crate) unsafe fn copy_cached(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the same duties: both ranges are valid for `len` bytes and do not overlap.
    unsafe { libc::memcpy(target.cast(), source.cast(), len) };
}

/// # Safety
/// - As [`crate::copy::copy_in`].
#[inline]
pub(crate) unsafe fn copy_in(source: &[u8], target: *mut u8) {
    // SAFETY: the same duties; a reference is valid for reads.
    unsafe { copy_cached(source.as_ptr(), target, source.len()) }
}

/// # Safety
/// - As [`crate::copy::copy`].
#[inline]
pub(crate) unsafe fn copy_non_temporal(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the same duties.
    unsafe { copy_cached(source, target, len) }
}
