//! A cache under a policy of [`crate::evict`]: blocks are objects without a tree.

use alloc::boxed::Box;
use alloc::vec;

use super::{Cache, Prompt, index};
use crate::evict::{Anything, Kind, Object, Policy};
use crate::time::Instant;

/// What a block counts: the same for each, and enough for a policy to tell shares of one.
const BLOCK_LEN: u64 = 1 << 20;

/// A cache whose policy sees single blocks; the first of a prompt is used first, so the last one is the most recent.
///
/// Example: [`Cache`].
pub struct Classic {
    policy: Box<dyn Policy + Send>,
    /// By block.
    resident: Box<[bool]>,
    capacity: u64,
}

impl Classic {
    /// An empty cache of `capacity` blocks with numbers below `blocks`.
    #[must_use]
    pub fn new(kind: Kind, capacity: u32, blocks: u32) -> Self {
        let blocks = blocks as usize;
        let resident = vec![false; blocks].into_boxed_slice();
        Self { policy: kind.boxed(blocks), resident, capacity: u64::from(capacity) * BLOCK_LEN }
    }

    fn store(&mut self, now: Instant, block: u64) {
        self.policy.on_stored(now, slot(block), Object { fingerprint: block, len: BLOCK_LEN });
        self.resident[index(block)] = true;
        while self.policy.resident_len() > self.capacity
            && let Some(victim) = self.policy.poll_victim(now, &Anything)
        {
            self.resident[victim as usize] = false;
            self.policy.on_removed(now, victim);
        }
    }
}

impl Cache for Classic {
    fn matched(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|&&block| self.resident[index(block)]).count()
    }

    fn on_request(&mut self, now: Instant, prompt: Prompt<'_>) {
        for &block in prompt.blocks {
            if self.resident[index(block)] {
                self.policy.on_used(now, slot(block));
            } else {
                self.store(now, block);
            }
        }
    }
}

/// A block's slot in the policy's table.
#[expect(clippy::cast_possible_truncation, reason = "a trace numbers its blocks in 32 bits")]
const fn slot(block: u64) -> u32 {
    block as u32
}
