//! RHG-S: evicts what is least likely to be needed soon, learned from how requests of each class came back.
//!
//! Blocks that a request brings or uses form groups by class: whether a block is new, partial or how often it was used; how
//! many blocks the request adds; how many turns its chain has seen. For each class the rate at which blocks come back is
//! learned by age. A block's worth is the best ratio of chance of reuse to time in the cache that keeping it can reach
//! (Gittins' index), so a young block outlives the pause before the next turn. Of the class and age worth least, the oldest
//! group gives way, its leaves first: residents always form prefixes.
//!
//! It is not a [`crate::evict::Policy`]: it sees whole requests. It remembers every block of the trace and every group.
//! Invariants: a resident block has a resident parent; a group is in the list of its class and age bucket while any of its
//! blocks is resident; residents never exceed the capacity between requests.

mod hazard;
mod tree;

use alloc::vec::Vec;

use super::{Cache, Prompt, index};
use crate::time::{Duration, Instant};
use hazard::{BUCKETS, CLASSES, Class, Hazards};
use tree::{Group, Tree};

/// How often what was learned is put to use.
const LEARN_EVERY: Duration = Duration::from_secs(20);

/// A cache that learns which classes of requests come back.
///
/// ```
/// use millpond_core::sim::cache::{Cache, Prompt, RhgS};
/// use millpond_core::time::Instant;
/// let mut cache = RhgS::new(2, 10);
/// cache.on_request(Instant::ZERO, Prompt { blocks: &[0, 1, 2], tokens: 1536 });
/// assert_eq!(cache.matched(&[0, 1, 2]), 2); // the leaf went first
/// ```
#[derive(Clone, Debug)]
pub struct RhgS {
    tree: Tree,
    hazards: Hazards,
    /// All groups in order of time.
    log: Vec<Group>,
    /// For each age bucket, the first group of the log that is not known to be past it.
    passed: [usize; BUCKETS - 1],
    learned_at: Option<Instant>,
    capacity: u32,
}

impl RhgS {
    /// An empty cache of `capacity` blocks with numbers below `blocks`.
    #[must_use]
    pub fn new(capacity: u32, blocks: u32) -> Self {
        Self {
            tree: Tree::new(blocks),
            hazards: Hazards::new(),
            log: Vec::new(),
            passed: [0; BUCKETS - 1],
            learned_at: None,
            capacity,
        }
    }

    /// Groups that have passed an age edge are counted and move on.
    fn age(&mut self, now: Instant) {
        for bucket in 0..BUCKETS - 1 {
            let edge = hazard::edge(bucket + 1);
            while let Some(group) = self.log.get_mut(self.passed[bucket])
                && now.since(group.at) >= edge
            {
                self.hazards.on_passed(group);
                let at = self.passed[bucket];
                self.passed[bucket] += 1;
                self.tree.move_on(&mut self.log, at);
            }
        }
    }

    /// What of the prompt was seen before; each such block leaves its group, which counts the reuse.
    fn recognise(&mut self, now: Instant, blocks: &[u64]) -> usize {
        let known = blocks.iter().take_while(|&&block| self.tree.is_known(index(block))).count();
        for &block in &blocks[..known] {
            self.tree.leave(&mut self.log, index(block), now);
        }
        known
    }

    /// Files the prompt's blocks, leaf first, under the classes that the request gives them.
    fn file(&mut self, now: Instant, prompt: Prompt<'_>, known: usize) {
        let Some(last) = prompt.blocks.len().checked_sub(1) else { return };
        let turns = known.checked_sub(1).map_or(0, |at| self.tree.turns(index(prompt.blocks[at])));
        for (depth, &block) in prompt.blocks.iter().enumerate() {
            let parent = depth.checked_sub(1).map(|above| index(prompt.blocks[above]));
            self.tree.count_use(index(block), parent, turns);
        }
        let added = prompt.blocks.len() - known;
        let mut open: Option<Class> = None;
        for (depth, &block) in prompt.blocks.iter().enumerate().rev() {
            let is_partial = depth == last && prompt.ends_in_a_partial_block();
            let uses = if depth < known { Some(self.tree.uses(index(block))) } else { None };
            let class = Class::new(is_partial, uses, added, turns);
            if open.replace(class) != Some(class) {
                self.log.push(Group::new(now, class));
            }
            self.tree.enter(&mut self.log, index(block));
        }
    }
}

impl Cache for RhgS {
    fn matched(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|&&block| self.tree.is_resident(index(block))).count()
    }

    fn on_request(&mut self, now: Instant, prompt: Prompt<'_>) {
        self.age(now);
        if self.learned_at.is_none_or(|at| now.since(at) >= LEARN_EVERY) {
            self.learned_at = Some(now);
            self.tree.rank(&self.hazards.worths());
        }
        let known = self.recognise(now, prompt.blocks);
        self.file(now, prompt, known);
        while self.tree.resident_count() > self.capacity && self.tree.evict(&mut self.log) {}
    }
}

/// One list for each class and age bucket.
const LISTS: usize = CLASSES * BUCKETS;

#[cfg(test)]
mod tests {
    use super::super::super::trace::Synthetic;
    use super::*;

    #[test]
    fn residents_always_form_prefixes_and_fit() {
        let documents = Synthetic { requests: 400, input_tokens: 1..=20_000, documents: 6, ..Synthetic::default() };
        let trace = documents.trace();
        let mut cache = RhgS::new(60, trace.distinct_blocks());
        for request in trace.requests() {
            let blocks = trace.blocks_of(request);
            cache.on_request(request.at, Prompt { blocks, tokens: request.input_tokens });
            let resident = (0..trace.distinct_blocks() as usize).filter(|&block| cache.tree.is_resident(block));
            assert!(resident.count() <= 60);
            for earlier in trace.requests() {
                let blocks = trace.blocks_of(earlier);
                let all = blocks.iter().filter(|&&block| cache.tree.is_resident(index(block))).count();
                assert_eq!(all, cache.matched(blocks), "a block is resident without its parent");
            }
        }
    }

    #[test]
    fn what_never_comes_back_gives_way_to_what_does() {
        // Two kinds of prompts: short ones that are asked again after a minute, long ones that are not.
        let (mut cache, mut hits, mut unseen) = (RhgS::new(40, 10_000), 0, 100);
        for minute in 0..200 {
            let now = Instant::from_nanos(minute * 60_000_000_000);
            let asked_again: [u64; 2] = [minute / 10 * 2, minute / 10 * 2 + 1];
            hits += cache.matched(&asked_again);
            cache.on_request(now, Prompt { blocks: &asked_again, tokens: 1_024 });
            let once: Vec<u64> = (unseen..unseen + 45).collect();
            unseen += 45;
            cache.on_request(now + Duration::from_secs(30), Prompt { blocks: &once, tokens: 45 * 512 });
        }
        // LRU hits nothing: more new blocks pass by in a minute than fit.
        assert!(hits > 300, "{hits} of 400");
    }
}
