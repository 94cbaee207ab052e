//! Which prefixes each prefill node has seen lately: the router's guess where blocks are.
//!
//! A guess only: it chooses a place, never bytes. Per node at most twice `blocks_max` route hashes are kept, in two
//! generations: what is used moves to the young one, and when that is full the old one is dropped. A block's hash covers
//! everything before it, so the longest match is found by walking until the first hash that is not there.

use std::collections::HashSet;

use millpond_core::hash::RouteHash;

/// The prefixes of one node.
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_node::router::Prefixes;
/// let mut prefixes = Prefixes::new(1_000);
/// prefixes.insert(&[RouteHash(1), RouteHash(2)]);
/// assert_eq!(prefixes.matched(&[RouteHash(1), RouteHash(2), RouteHash(3)]), 2);
/// ```
#[derive(Clone, Debug)]
pub struct Prefixes {
    blocks_max: usize,
    young: HashSet<RouteHash>,
    old: HashSet<RouteHash>,
}

impl Prefixes {
    /// An empty index that remembers at least the latest `blocks_max` blocks, and at most twice as many.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self { blocks_max: blocks_max.max(1), young: HashSet::new(), old: HashSet::new() }
    }

    /// How many of `chain`'s blocks, from the first on, are known. Costs a look-up per matched block.
    #[must_use]
    pub fn matched(&self, chain: &[RouteHash]) -> usize {
        chain.iter().take_while(|hash| self.young.contains(hash) || self.old.contains(hash)).count()
    }

    /// Notes that the node has the blocks of `chain` now.
    pub fn insert(&mut self, chain: &[RouteHash]) {
        // A prefix longer than we remember would push itself out; its start is what others share.
        for hash in chain.iter().take(self.blocks_max) {
            if self.young.len() >= self.blocks_max && !self.young.contains(hash) {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert(*hash);
        }
    }

    /// Forgets everything: the node was restarted.
    pub fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(first: u64, len: u64) -> Vec<RouteHash> {
        (first..first + len).map(RouteHash).collect()
    }

    #[test]
    fn a_match_ends_at_the_first_unknown_block() {
        let mut prefixes = Prefixes::new(100);
        prefixes.insert(&chain(0, 5));
        assert_eq!(prefixes.matched(&chain(0, 9)), 5);
        assert_eq!(prefixes.matched(&chain(1, 9)), 4);
        assert_eq!(prefixes.matched(&chain(50, 9)), 0);
    }

    #[test]
    fn what_is_used_stays_and_what_is_not_goes_within_the_bound() {
        let mut prefixes = Prefixes::new(10);
        prefixes.insert(&chain(0, 5));
        for round in 1..40 {
            prefixes.insert(&chain(round * 100, 4));
            prefixes.insert(&chain(0, 5));
            assert!(prefixes.young.len() + prefixes.old.len() <= 20);
        }
        assert_eq!(prefixes.matched(&chain(0, 5)), 5);
        assert_eq!(prefixes.matched(&chain(100, 4)), 0);
    }

    #[test]
    fn a_very_long_prefix_keeps_its_start() {
        let mut prefixes = Prefixes::new(10);
        prefixes.insert(&chain(0, 1_000));
        assert_eq!(prefixes.matched(&chain(0, 1_000)), 10);
    }
}
