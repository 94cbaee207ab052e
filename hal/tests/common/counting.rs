//! An allocator that counts. Tests that want it say `#[global_allocator]`; the code that is not safe stays here.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// The system's allocator, and a count.
pub(crate) struct Counting;

/// Allocations and reallocations of this process so far.
pub(crate) static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Bytes of this process that are allocated and not freed. No allocator's caches are in it.
static IN_USE: AtomicI64 = AtomicI64::new(0);

/// Bytes that are allocated and not freed.
#[allow(dead_code, reason = "not every test asks")]
pub(crate) fn bytes_in_use() -> u64 {
    u64::try_from(IN_USE.load(Ordering::Relaxed)).unwrap_or(0)
}

thread_local! {
    static HERE: Cell<u64> = const { Cell::new(0) };
}

/// Allocations and reallocations of the calling thread so far.
#[allow(dead_code, reason = "not every test asks")]
pub(crate) fn allocations_here() -> u64 {
    HERE.get()
}

fn count() {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    HERE.set(HERE.get() + 1);
}

/// No layout is longer than `isize::MAX`.
fn count_bytes(base: *mut u8, after: usize, before: usize) {
    if !base.is_null() {
        IN_USE.fetch_add(after.cast_signed() as i64 - before.cast_signed() as i64, Ordering::Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's own promise.
        let base = unsafe { System.alloc(layout) };
        count_bytes(base, layout.size(), 0);
        base
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        count_bytes(base, 0, layout.size());
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(base, layout) }
    }

    unsafe fn realloc(&self, base: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's own promise.
        let moved = unsafe { System.realloc(base, layout, len) };
        count_bytes(moved, len, layout.size());
        moved
    }
}
