//! The blocks that one prefill instance keeps, by name: which are there, which are still being computed, what goes when it is full.
//!
//! A router has one per instance for what it believes, fed by what it sends there; a synthetic instance has one that is the
//! truth. It holds no KV. What a prompt uses is used from its last block to its first, so a prefix outlives what follows it.
//!
//! Invariants: at most `blocks_max` blocks; a block that is there is known by one name; what is still computed names one maker.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::evict::{Anything, Kind, Object, Policy};
use crate::hash::RouteHash;
use crate::time::Instant;

/// The blocks of one instance. Look-ups are O(log blocks).
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_core::sched::block_cache::BlockCache;
/// use millpond_core::time::Instant;
/// let mut cache = BlockCache::new(2);
/// let chain = [1, 2].map(RouteHash);
/// let mut changes = Default::default();
/// cache.admit(Instant::ZERO, &chain, 7, Instant::from_nanos(5), &mut changes);
/// assert_eq!((cache.matched(&[1, 2, 3].map(RouteHash)), changes.stored.len()), (2, 2));
/// assert_eq!((cache.maker(&chain, 2), cache.ready(&chain, 2)), (Some(7), Instant::from_nanos(5)));
/// cache.on_computed(Instant::from_nanos(4), &chain, 7);
/// assert_eq!((cache.maker(&chain, 2), cache.ready(&chain, 2)), (None, Instant::from_nanos(4)));
/// cache.admit(Instant::ZERO, &[RouteHash(9)], 8, Instant::ZERO, &mut changes);
/// assert_eq!(changes.removed, [RouteHash(2)]);
/// ```
pub struct BlockCache {
    slots: BTreeMap<RouteHash, u32>,
    blocks: Vec<Block>,
    blocks_max: u32,
    policy: Box<dyn Policy + Send>,
}

#[derive(Clone, Copy)]
struct Block {
    name: RouteHash,
    ready: Instant,
    maker: Option<u64>,
}

/// What an instance has now that it had not, and the reverse.
///
/// Example: [`BlockCache`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// New blocks.
    pub stored: Vec<RouteHash>,
    /// Blocks that went for them.
    pub removed: Vec<RouteHash>,
}

impl core::fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("BlockCache").field("blocks", &self.slots.len()).finish_non_exhaustive()
    }
}

impl BlockCache {
    /// An empty cache of `blocks_max` blocks, at least one; the least recently used goes first.
    #[must_use]
    pub fn new(blocks_max: u32) -> Self {
        let blocks_max = blocks_max.max(1);
        let policy = Kind::Lru.boxed(blocks_max as usize);
        Self { slots: BTreeMap::new(), blocks: Vec::new(), blocks_max, policy }
    }

    /// How many of the chain's blocks, from the first on, are there.
    #[must_use]
    pub fn matched(&self, chain: &[RouteHash]) -> u32 {
        let count = chain.iter().take_while(|name| self.slots.contains_key(name)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// When the first `count` blocks of the chain, which are there, can be sent to others; in the past if they can now.
    #[must_use]
    pub fn ready(&self, chain: &[RouteHash], count: u32) -> Instant {
        self.last(chain, count).map_or(Instant::ZERO, |block| block.ready)
    }

    /// The request that still computes one of the first `count` blocks of the chain.
    #[must_use]
    pub fn maker(&self, chain: &[RouteHash], count: u32) -> Option<u64> {
        self.last(chain, count)?.maker
    }

    /// Whoever computes a prefix computes its last block last.
    fn last(&self, chain: &[RouteHash], count: u32) -> Option<&Block> {
        let name = chain.get(count.checked_sub(1)? as usize)?;
        self.slots.get(name).map(|&slot| &self.blocks[slot as usize])
    }

    /// Request `maker` is sent to the instance: it will have all blocks of the chain, those it lacks by `ready`, as far as can
    /// be predicted. A chain longer than the cache keeps its beginning.
    pub fn admit(&mut self, now: Instant, chain: &[RouteHash], maker: u64, ready: Instant, changes: &mut Changes) {
        changes.stored.clear();
        changes.removed.clear();
        let chain = &chain[..chain.len().min(self.blocks_max as usize)];
        for name in chain.iter().rev() {
            if let Some(&slot) = self.slots.get(name) {
                self.policy.on_used(now, slot);
            }
        }
        for &name in chain.iter().rev() {
            if !self.slots.contains_key(&name) {
                self.store(now, Block { name, ready, maker: Some(maker) }, changes);
                changes.stored.push(name);
            }
        }
    }

    fn store(&mut self, now: Instant, block: Block, changes: &mut Changes) {
        let slot = match u32::try_from(self.blocks.len()) {
            Ok(slot) if slot < self.blocks_max => {
                self.blocks.push(block);
                slot
            }
            _ => {
                // Everything may go, so something does.
                let Some(slot) = self.policy.poll_victim(now, &Anything) else { return };
                self.policy.on_removed(now, slot);
                let old = core::mem::replace(&mut self.blocks[slot as usize], block);
                self.slots.remove(&old.name);
                changes.removed.push(old.name);
                slot
            }
        };
        self.slots.insert(block.name, slot);
        self.policy.on_stored(now, slot, Object { fingerprint: block.name.0, len: 1 });
    }

    /// Request `maker` is computed: what it was to make of the chain can be used.
    pub fn on_computed(&mut self, now: Instant, chain: &[RouteHash], maker: u64) {
        for name in chain {
            if let Some(&slot) = self.slots.get(name) {
                let block = &mut self.blocks[slot as usize];
                if block.maker == Some(maker) {
                    (block.maker, block.ready) = (None, now);
                }
            }
        }
    }

    /// Nothing is there any more: the instance was restarted.
    pub fn clear(&mut self) {
        *self = Self::new(self.blocks_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::ZERO;

    fn admit(cache: &mut BlockCache, chain: &[u64]) -> Changes {
        let mut changes = Changes::default();
        let chain: Vec<_> = chain.iter().copied().map(RouteHash).collect();
        cache.admit(NOW, &chain, 1, NOW, &mut changes);
        changes
    }

    fn matched(cache: &BlockCache, chain: &[u64]) -> u32 {
        cache.matched(&chain.iter().copied().map(RouteHash).collect::<Vec<_>>())
    }

    #[test]
    fn the_least_recent_tail_goes_first_and_what_a_prompt_uses_stays() {
        let mut cache = BlockCache::new(4);
        admit(&mut cache, &[1, 2, 3]);
        admit(&mut cache, &[7]);
        let changes = admit(&mut cache, &[1, 2, 4]);
        assert_eq!((changes.stored, changes.removed), ([4].map(RouteHash).into(), [3].map(RouteHash).into()));
        assert_eq!((matched(&cache, &[1, 2, 3]), matched(&cache, &[1, 2, 4]), matched(&cache, &[7])), (2, 3, 1));
        admit(&mut cache, &[8]);
        assert_eq!((matched(&cache, &[7]), matched(&cache, &[1, 2, 4])), (0, 3));
    }

    #[test]
    fn a_chain_longer_than_the_cache_keeps_its_beginning() {
        let mut cache = BlockCache::new(3);
        let changes = admit(&mut cache, &[1, 2, 3, 4, 5]);
        assert_eq!((changes.stored.len(), matched(&cache, &[1, 2, 3, 4, 5])), (3, 3));
        cache.clear();
        assert_eq!(matched(&cache, &[1]), 0);
    }

    #[test]
    fn blocks_of_another_maker_stay_unready() {
        let mut cache = BlockCache::new(9);
        let (chain, mut changes) = ([1, 2, 3].map(RouteHash), Changes::default());
        cache.admit(NOW, &chain[..2], 5, Instant::from_nanos(30), &mut changes);
        cache.admit(NOW, &chain, 6, Instant::from_nanos(90), &mut changes);
        cache.on_computed(Instant::from_nanos(20), &chain[..2], 5);
        assert_eq!((cache.maker(&chain, 2), cache.maker(&chain, 3), cache.maker(&chain, 0)), (None, Some(6), None));
        assert_eq!((cache.ready(&chain, 2).as_nanos(), cache.ready(&chain, 3).as_nanos()), (20, 90));
    }
}
