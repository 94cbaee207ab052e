//! Copies on x86-64. See [`crate::copy`].
#![allow(unsafe_code)]

use core::arch::asm;
use core::arch::x86_64::{
    __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

/// # Safety
/// - As [`crate::copy::copy`].
#[inline]
pub(crate) unsafe fn copy_cached(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY:
    // - reads `source .. source + len` and writes `target .. target + len` and no more; the direction flag is clear by the
    //   calling convention.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rsi") source => _, inout("rdi") target => _,
             options(nostack, preserves_flags));
    }
}

/// # Safety
/// - As [`crate::copy::copy_in`].
#[inline]
pub(crate) unsafe fn copy_in(source: &[u8], target: *mut u8) {
    // SAFETY: the same duties; a reference is valid for reads.
    unsafe { crate::copy::copy(source.as_ptr(), target, source.len()) }
}

/// # Safety
/// - As [`crate::copy::copy`], and `len` is at least 128.
pub(crate) unsafe fn copy_non_temporal(source: *const u8, target: *mut u8, len: usize) {
    // Up to the first aligned line of the target, then whole lines, then the rest.
    let head = target.align_offset(64).min(len);
    let lines = (len - head) / 64;
    let done = head + lines * 64;
    // SAFETY:
    // - `head <= len`, `done <= len`: all three parts lie inside the ranges of the caller.
    // - `target + head` is 64-byte aligned by `align_offset`.
    // - the wide instructions run only where the CPU has just been asked for them.
    unsafe {
        copy_cached(source, target, head);
        if std::arch::is_x86_feature_detected!("avx512f") {
            stream_lines_512(source.add(head), target.add(head), lines);
        } else if std::arch::is_x86_feature_detected!("avx2") {
            stream_lines_256(source.add(head), target.add(head), lines);
        } else {
            copy_cached(source.add(head), target.add(head), lines * 64);
        }
        copy_cached(source.add(done), target.add(done), len - done);
    }
}

/// # Safety
/// - `source` and `target` are valid for `64 * lines` bytes; `target` is 64-byte aligned; the CPU has AVX-512F.
#[target_feature(enable = "avx512f")]
unsafe fn stream_lines_512(source: *const u8, target: *mut u8, lines: usize) {
    let mut line = 0;
    // Bounded by `lines`; four at a time keeps more loads in flight.
    while line + 4 <= lines {
        // SAFETY: lines `line .. line + 4` are in range.
        unsafe {
            let from = source.add(line * 64);
            let to = target.add(line * 64);
            let a = _mm512_loadu_si512(from.cast::<__m512i>());
            let b = _mm512_loadu_si512(from.add(64).cast::<__m512i>());
            let c = _mm512_loadu_si512(from.add(128).cast::<__m512i>());
            let d = _mm512_loadu_si512(from.add(192).cast::<__m512i>());
            _mm512_stream_si512(to.cast::<__m512i>(), a);
            _mm512_stream_si512(to.add(64).cast::<__m512i>(), b);
            _mm512_stream_si512(to.add(128).cast::<__m512i>(), c);
            _mm512_stream_si512(to.add(192).cast::<__m512i>(), d);
        }
        line += 4;
    }
    while line < lines {
        // SAFETY: `line` is in range.
        unsafe {
            let value = _mm512_loadu_si512(source.add(line * 64).cast::<__m512i>());
            _mm512_stream_si512(target.add(line * 64).cast::<__m512i>(), value);
        }
        line += 1;
    }
    // The streamed bytes become visible before anything stored afterwards (an index, an acknowledgement).
    _mm_sfence();
}

/// # Safety
/// - `source` and `target` are valid for `64 * lines` bytes; `target` is 64-byte aligned; the CPU has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn stream_lines_256(source: *const u8, target: *mut u8, lines: usize) {
    for line in 0..lines {
        // SAFETY: `line` is in range.
        unsafe {
            let from = source.add(line * 64);
            let to = target.add(line * 64);
            let a = _mm256_loadu_si256(from.cast::<__m256i>());
            let b = _mm256_loadu_si256(from.add(32).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), a);
            _mm256_stream_si256(to.add(32).cast::<__m256i>(), b);
        }
    }
    // As above.
    _mm_sfence();
}
