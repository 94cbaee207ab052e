//! What no policy can beat: eviction that knows the future.
//!
//! Source: Belady, "A study of replacement algorithms for virtual-storage computer", 1966, with bypass: what is needed again
//! last goes, and the block that was just used may be that one. A block's parent is needed before it, so residents always
//! form prefixes and counting blocks is counting hits.

use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use alloc::vec;

use super::{Cache, Prompt, Trace, index};
use crate::time::Instant;

const NEVER: u32 = u32::MAX;

/// A cache that is told the trace beforehand; takes the trace's requests in their order and no others.
///
/// ```
/// use millpond_core::sim::cache::{Cache, Optimum, Prompt};
/// use millpond_core::{sim::trace::Builder, time::Instant};
/// let mut builder = Builder::new();
/// for block in [0, 1, 0] {
///     builder.push(Instant::ZERO, 512, 1, &[block])?;
/// }
/// let mut cache = Optimum::new(&builder.build()?, 1);
/// cache.on_request(Instant::ZERO, Prompt { blocks: &[0], tokens: 512 });
/// cache.on_request(Instant::ZERO, Prompt { blocks: &[1], tokens: 512 });
/// assert_eq!(cache.matched(&[0]), 1); // 1 never comes again, so it was not kept
/// # Ok::<(), millpond_core::sim::trace::Invalid>(())
/// ```
pub struct Optimum {
    /// For each place of a block in the trace, the place where it comes next.
    next: Box<[u32]>,
    /// By block: where it comes next if it is resident, else [`NEVER`].
    resident: Box<[u32]>,
    /// Residents by where they come next; those whose place is not that in `resident` are of the past.
    by_next: BinaryHeap<(u32, u64)>,
    resident_count: u32,
    capacity: u32,
    /// Blocks of the requests so far.
    place: usize,
}

impl Optimum {
    /// An empty cache of `capacity` blocks for `trace`.
    #[must_use]
    pub fn new(trace: &Trace, capacity: u32) -> Self {
        let mut first_after = vec![NEVER; trace.distinct_blocks() as usize];
        let count: usize = trace.requests().iter().map(|request| trace.blocks_of(request).len()).sum();
        let mut next = vec![NEVER; count].into_boxed_slice();
        let blocks = trace.requests().iter().rev().flat_map(|request| trace.blocks_of(request).iter().rev());
        for (place, &block) in (0..u32::try_from(count).unwrap_or(NEVER)).rev().zip(blocks) {
            next[place as usize] = core::mem::replace(&mut first_after[index(block)], place);
        }
        let resident = vec![NEVER; trace.distinct_blocks() as usize].into_boxed_slice();
        Self { next, resident, by_next: BinaryHeap::new(), resident_count: 0, capacity, place: 0 }
    }

    fn on_use(&mut self, block: u64) {
        let next = self.next[self.place];
        self.place += 1;
        let was = core::mem::replace(&mut self.resident[index(block)], next);
        self.resident_count -= u32::from(was != NEVER);
        if next == NEVER {
            return;
        }
        self.by_next.push((next, block));
        self.resident_count += 1;
        while self.resident_count > self.capacity
            && let Some((next, block)) = self.by_next.pop()
        {
            if self.resident[index(block)] == next {
                self.resident[index(block)] = NEVER;
                self.resident_count -= 1;
            }
        }
    }
}

impl Cache for Optimum {
    fn matched(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|&&block| self.resident[index(block)] != NEVER).count()
    }

    fn on_request(&mut self, _now: Instant, prompt: Prompt<'_>) {
        prompt.blocks.iter().for_each(|&block| self.on_use(block));
    }
}
