//! In steady state the cluster index allocates nothing: neither look-ups, nor events, nor lives that end, nor snapshots.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use millpond_core::hash::RouteHash;
use millpond_core::prefix::Holder;
use millpond_core::sched::index::{Change, Event, Index, Limits, Outcome};

struct Counting;

thread_local! {
    /// Of this thread: the one that runs the tests may print meanwhile.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(base, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn look_ups_events_restarts_and_snapshots_allocate_nothing() {
    let limits = Limits { blocks_max: 1 << 14, sets_max: 1 << 12, ..Limits::default() };
    let mut index: Index<RouteHash, 16> = Index::new(limits, 7);
    let mut matches = index.new_matches();
    let mut lives = vec![(1_u64, 0_u64); 1_000];
    let names: Vec<RouteHash> =
        (0..4_096_u64).map(|name| RouteHash(name.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    let mut round = |step: usize| {
        let number = step.wrapping_mul(7_919) % 1_000;
        let holder = Holder(u16::try_from(number).unwrap());
        let chain = &names[step.wrapping_mul(31) % 4_000..][..24];
        let (life, last) = &mut lives[number];
        if step.is_multiple_of(97) {
            (*life, *last) = (*life + 1, 0);
        }
        *last += 1;
        let change = if step.is_multiple_of(3) { Change::Removed(chain) } else { Change::Stored(chain) };
        index.on_event(&Event { holder, life: *life, number: *last, change });
        if step.is_multiple_of(89) && index.begin_snapshot(holder, *life, *last) == Outcome::Applied {
            index.on_snapshot(holder, *life, chain);
            index.end_snapshot(holder, *life);
        }
        index.matches(chain, &mut matches);
    };
    (0..4_000).for_each(&mut round);
    let before = ALLOCATIONS.get();
    (4_000..12_000).for_each(&mut round);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(matches.longest() > 0 && index.totals().version > 8_000, "something happened");
}
