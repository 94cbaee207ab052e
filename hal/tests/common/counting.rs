//! An allocator that counts. Tests that want it say `#[global_allocator]`; the code that is not safe stays here.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, and a count.
pub(crate) struct Counting;

/// Allocations and reallocations of this process so far.
pub(crate) static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

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

// SAFETY: everything is passed on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(base, layout) }
    }

    unsafe fn realloc(&self, base: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's own promise.
        unsafe { System.realloc(base, layout, len) }
    }
}
