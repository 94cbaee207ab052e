//! The KV caches of the instances: which blocks each has, and since when.
//!
//! A block is kept by at most [`INSTANCES_MAX`] instances, told apart by bits. Blocks in use by a request that waits or is
//! computed are pinned; all others go in the order of the eviction policy. Blocks are touched from the last to the first,
//! so a prefix outlives what follows it.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::evict::{Kind, Object, Policy, Residents};
use crate::random::Random;
use crate::time::{Duration, Instant};

/// Instances of one kind that a simulation has at most.
pub const INSTANCES_MAX: usize = 64;

const NOWHERE: u32 = u32::MAX;

/// Where the blocks are, in truth and as the router's index has it.
pub(super) struct Memory {
    instances: Vec<Cache>,
    /// A bit per instance that has the block.
    holders: Vec<u64>,
    index: Option<Index>,
}

/// A router's view that lags behind and loses events.
struct Index {
    holders: Vec<u64>,
    delay: Duration,
    loss: f64,
    random: Random,
    events: VecDeque<(Instant, u32, u64, bool)>,
}

struct Cache {
    slots: Vec<u32>,
    blocks: Vec<u32>,
    free: Vec<u32>,
    pins: Pins,
    ready: Vec<Instant>,
    /// The request that computes the block, until it is computed.
    makers: Vec<u32>,
    policy: Box<dyn Policy + Send>,
}

struct Pins(Vec<u32>);

impl Residents for Pins {
    fn may_go(&self, slot: u32) -> bool {
        self.0[slot as usize] == 0
    }
}

impl Memory {
    /// `instances` caches of `capacity` blocks each, out of `distinct` blocks there are.
    pub(super) fn new(instances: usize, capacity: u32, distinct: u32, kind: Kind) -> Self {
        let capacity = capacity.min(distinct.max(1));
        let instances = (0..instances).map(|_| Cache::new(capacity, distinct, kind)).collect();
        Self { instances, holders: vec![0; distinct as usize], index: None }
    }

    /// From now on the index hears of changes `delay` late, and of a `loss` share of them never.
    pub(super) fn lagging(mut self, delay: Duration, loss: f64, seed: u64) -> Self {
        if delay > Duration::ZERO || loss > 0.0 {
            let holders = self.holders.clone();
            self.index = Some(Index { holders, delay, loss, random: Random::new(seed), events: VecDeque::new() });
        }
        self
    }

    /// How many leading blocks each instance has, as the index knows it at `now`.
    pub(super) fn matches(&mut self, now: Instant, blocks: &[u64], matched: &mut [u32]) {
        if let Some(index) = &mut self.index {
            index.catch_up(now);
        }
        let holders = self.index.as_ref().map_or(&self.holders, |index| &index.holders);
        let mut alive = if matched.len() == INSTANCES_MAX { u64::MAX } else { (1 << matched.len()) - 1 };
        let mut length = 0;
        for &block in blocks {
            let still = alive & holders[at(block)];
            let mut dropped = alive & !still;
            while dropped != 0 {
                matched[dropped.trailing_zeros() as usize] = length;
                dropped &= dropped - 1;
            }
            alive = still;
            length += 1;
            if alive == 0 {
                return;
            }
        }
        (0..matched.len())
            .filter(|instance| alive >> instance & 1 == 1)
            .for_each(|instance| matched[instance] = length);
    }

    /// How many leading blocks an instance really has.
    pub(super) fn matched(&self, instance: u32, blocks: &[u64]) -> u32 {
        let has = |&block: &u64| self.holders[at(block)] >> instance & 1 == 1;
        u32::try_from(blocks.iter().take_while(|block| has(block)).count()).unwrap_or(u32::MAX)
    }

    /// When the first `count` of the blocks can be sent by an instance that has them, as was predicted when they were
    /// asked for.
    pub(super) fn ready(&self, instance: u32, blocks: &[u64], count: u32) -> Instant {
        let slot = self.last(instance, blocks, count);
        slot.map_or(Instant::ZERO, |slot| self.instances[instance as usize].ready[slot])
    }

    /// The request that still computes one of the first `count` of the blocks there.
    pub(super) fn maker(&self, instance: u32, blocks: &[u64], count: u32) -> Option<u32> {
        let slot = self.last(instance, blocks, count)?;
        Some(self.instances[instance as usize].makers[slot]).filter(|&maker| maker != NOWHERE)
    }

    /// Where an instance has the last of the first `count` blocks. Whoever computes a prefix computes that one last.
    fn last(&self, instance: u32, blocks: &[u64], count: u32) -> Option<usize> {
        let last = *blocks.get(count.checked_sub(1)? as usize)?;
        let slot = self.instances[instance as usize].slots[at(last)];
        (slot != NOWHERE).then_some(slot as usize)
    }

    /// Request `maker` is sent to an instance: it will have all the blocks, those it has not by `ready`, as far as can be
    /// predicted; until [`Memory::unpin`] none of them goes.
    pub(super) fn admit(&mut self, now: Instant, instance: u32, blocks: &[u64], maker: u32, ready: Instant) {
        let number = instance;
        for &block in blocks {
            let cache = &mut self.instances[number as usize];
            let slot = cache.slots[at(block)];
            if slot != NOWHERE {
                cache.pins.0[slot as usize] += 1;
            }
        }
        for &block in blocks.iter().rev() {
            let cache = &mut self.instances[number as usize];
            let slot = cache.slots[at(block)];
            if slot != NOWHERE {
                cache.policy.on_used(now, slot);
                continue;
            }
            let (slot, gone) = cache.room(now);
            if let Some(gone) = gone {
                self.note(now, number, gone, false);
            }
            // All that is there is in use: the block is computed, used, and not kept.
            let Some(slot) = slot else { continue };
            self.instances[number as usize].store(now, slot, block, maker, ready);
            self.note(now, number, block, true);
        }
    }

    /// Request `maker` is computed and does not use the blocks any more.
    pub(super) fn unpin(&mut self, now: Instant, instance: u32, blocks: &[u64], maker: u32) {
        let cache = &mut self.instances[instance as usize];
        for &block in blocks {
            let slot = cache.slots[at(block)];
            if slot != NOWHERE {
                let slot = slot as usize;
                cache.pins.0[slot] = cache.pins.0[slot].saturating_sub(1);
                if cache.makers[slot] == maker {
                    (cache.makers[slot], cache.ready[slot]) = (NOWHERE, now);
                }
            }
        }
    }

    fn note(&mut self, now: Instant, instance: u32, block: u64, stored: bool) {
        set(&mut self.holders, instance, block, stored);
        if let Some(index) = &mut self.index {
            if stored {
                // The router counts on what it sent somewhere, before it hears of it.
                set(&mut index.holders, instance, block, true);
            }
            if index.random.unit() >= index.loss {
                index.events.push_back((now + index.delay, instance, block, stored));
            }
        }
    }
}

impl Index {
    fn catch_up(&mut self, now: Instant) {
        while let Some(&(at, instance, block, stored)) = self.events.front()
            && at <= now
        {
            self.events.pop_front();
            set(&mut self.holders, instance, block, stored);
        }
    }
}

impl Cache {
    fn new(capacity: u32, distinct: u32, kind: Kind) -> Self {
        let count = capacity as usize;
        Self {
            slots: vec![NOWHERE; distinct as usize],
            blocks: vec![0; count],
            free: (0..capacity).rev().collect(),
            pins: Pins(vec![0; count]),
            ready: vec![Instant::ZERO; count],
            makers: vec![NOWHERE; count],
            policy: kind.boxed(count),
        }
    }

    /// A slot to store in, and the block that went for it.
    fn room(&mut self, now: Instant) -> (Option<u32>, Option<u64>) {
        if let Some(slot) = self.free.pop() {
            return (Some(slot), None);
        }
        let Some(slot) = self.policy.poll_victim(now, &self.pins) else { return (None, None) };
        self.policy.on_removed(now, slot);
        let block = self.blocks[slot as usize];
        self.slots[block as usize] = NOWHERE;
        (Some(slot), Some(u64::from(block)))
    }

    fn store(&mut self, now: Instant, slot: u32, block: u64, maker: u32, ready: Instant) {
        self.slots[at(block)] = slot;
        self.blocks[slot as usize] = u32::try_from(block).expect("blocks are numbered with 32 bits");
        self.pins.0[slot as usize] = 1;
        (self.ready[slot as usize], self.makers[slot as usize]) = (ready, maker);
        self.policy.on_stored(now, slot, Object { fingerprint: block, len: 1 });
    }
}

fn set(holders: &mut [u64], instance: u32, block: u64, stored: bool) {
    let bit = 1_u64 << instance;
    if stored { holders[at(block)] |= bit } else { holders[at(block)] &= !bit }
}

fn at(block: u64) -> usize {
    usize::try_from(block).expect("blocks of a trace index memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::ZERO;

    fn seen(memory: &mut Memory, now: Instant, blocks: &[u64]) -> [u32; 2] {
        let mut matched = [0; 2];
        memory.matches(now, blocks, &mut matched);
        matched
    }

    #[test]
    fn each_instance_matches_what_it_has_from_the_start_on() {
        let mut memory = Memory::new(2, 10, 10, Kind::Lru);
        memory.admit(NOW, 0, &[0, 1, 2], 9, NOW);
        memory.admit(NOW, 1, &[1, 2], 9, NOW);
        memory.admit(NOW, 1, &[0], 9, NOW);
        assert_eq!(seen(&mut memory, NOW, &[0, 1, 2, 3]), [3, 3]);
        assert_eq!(seen(&mut memory, NOW, &[3, 0]), [0, 0]);
        assert_eq!((memory.matched(0, &[0, 1, 9]), memory.matched(1, &[2])), (2, 1));
    }

    #[test]
    fn the_least_recent_unpinned_tail_goes_first() {
        let mut memory = Memory::new(2, 4, 10, Kind::Lru);
        memory.admit(NOW, 0, &[0, 1, 2], 9, NOW);
        memory.admit(NOW, 0, &[5, 6], 9, NOW); // everything is pinned: 6 finds a free slot, 5 none
        assert_eq!((memory.matched(0, &[0, 1, 2]), memory.matched(0, &[6]), memory.matched(0, &[5])), (3, 1, 0));
        memory.unpin(NOW, 0, &[0, 1, 2], 9);
        memory.admit(NOW, 0, &[7, 8], 9, NOW);
        assert_eq!((memory.matched(0, &[0, 1, 2]), memory.matched(0, &[7, 8])), (1, 2));
    }

    #[test]
    fn what_is_being_computed_names_who_computes_it_until_it_is_done() {
        let mut memory = Memory::new(1, 10, 10, Kind::Lru);
        memory.admit(NOW, 0, &[0, 1], 5, NOW + Duration::from_secs(3));
        memory.admit(NOW, 0, &[0, 1, 2], 6, NOW + Duration::from_secs(9));
        let of = |memory: &Memory, count| {
            (memory.maker(0, &[0, 1, 2], count), memory.ready(0, &[0, 1, 2], count).as_nanos() / 1_000_000_000)
        };
        assert_eq!((of(&memory, 0), of(&memory, 2), of(&memory, 3)), ((None, 0), (Some(5), 3), (Some(6), 9)));
        memory.unpin(NOW + Duration::from_secs(4), 0, &[0, 1], 5);
        assert_eq!((of(&memory, 2), of(&memory, 3)), ((None, 4), (Some(6), 9)));
    }

    #[test]
    fn a_lagging_index_counts_on_what_was_sent_and_hears_late_of_what_went() {
        let mut memory = Memory::new(2, 1, 10, Kind::Lru).lagging(Duration::from_secs(5), 0.0, 1);
        memory.admit(NOW, 0, &[3], 9, NOW);
        memory.unpin(NOW, 0, &[3], 9);
        memory.admit(NOW, 0, &[4], 9, NOW);
        assert_eq!((seen(&mut memory, NOW, &[3]), memory.matched(0, &[3])), ([1, 0], 0));
        assert_eq!(seen(&mut memory, NOW, &[4]), [1, 0]);
        assert_eq!(seen(&mut memory, NOW + Duration::from_secs(5), &[3]), [0, 0]);
    }

    #[test]
    fn an_index_that_loses_everything_keeps_what_it_believed() {
        let mut memory = Memory::new(2, 1, 10, Kind::Lru).lagging(Duration::ZERO, 1.0, 1);
        memory.admit(NOW, 1, &[3], 9, NOW);
        memory.unpin(NOW, 1, &[3], 9);
        memory.admit(NOW, 1, &[4], 9, NOW);
        assert_eq!(seen(&mut memory, NOW + Duration::from_secs(99), &[3]), [0, 1]);
    }
}
