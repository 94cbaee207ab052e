//! Serving nodes whose blocks never come to the store: they have no directory, another one, or another key of the cluster.
//!
//! Such a node looks well and just never gets a hit. After a node computed a prompt with whole blocks, the first of them has
//! to be known to the store some seconds later; a node of which none of several was is *silent*.

use std::collections::VecDeque;

use millpond_core::hash::BlockName;
use millpond_core::time::{Duration, Instant};

/// How long a block may take to the store.
const PATIENCE: Duration = Duration::from_secs(5);
/// Prompts of one node that are looked for at a time.
const SOUGHT_MAX: usize = 16;
/// Prompts in a row without a trace after which a node is silent.
const UNHEARD_MIN: u32 = 8;

/// What is known of each serving node.
pub(super) struct Silent {
    nodes: Vec<Node>,
}

struct Node {
    name: String,
    sought: VecDeque<(Instant, BlockName)>,
    /// Prompts in a row of which nothing came.
    unheard: u32,
}

impl Node {
    fn is_silent(&self) -> bool {
        self.unheard >= UNHEARD_MIN
    }
}

impl Silent {
    pub(super) fn new(names: Vec<String>) -> Self {
        let node = |name| Node { name, sought: VecDeque::with_capacity(SOUGHT_MAX), unheard: 0 };
        Self { nodes: names.into_iter().map(node).collect() }
    }

    /// The node computed a prompt whose first block is `first`.
    pub(super) fn on_computed(&mut self, now: Instant, at: usize, first: BlockName) {
        if let Some(node) = self.nodes.get_mut(at)
            && node.sought.len() < SOUGHT_MAX
        {
            node.sought.push_back((now, first));
        }
    }

    /// Looks for what should be there by now.
    pub(super) fn look(&mut self, now: Instant, is_stored: impl Fn(BlockName) -> bool) {
        for node in &mut self.nodes {
            let was_silent = node.is_silent();
            while let Some(&(computed, first)) = node.sought.front()
                && now.since(computed) >= PATIENCE
            {
                node.sought.pop_front();
                node.unheard = if is_stored(first) { 0 } else { node.unheard.saturating_add(1) };
            }
            if node.is_silent() && !was_silent {
                tracing::warn!(
                    node = node.name,
                    "router: none of the blocks that this node computes comes to the store; has it the same \
                     `directory.address` and `node.key`?"
                );
            }
        }
    }

    /// The silent ones.
    pub(super) fn names(&self) -> Vec<&str> {
        self.nodes.iter().filter(|node| node.is_silent()).map(|node| node.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_none_of_whose_blocks_come_is_named_until_one_does() {
        let mut silent = Silent::new(vec!["good".into(), "bad".into()]);
        let secs = |secs| Instant::ZERO + Duration::from_secs(secs);
        let name = |at: u8| BlockName([at; 16]);
        for second in 0..8 {
            (0..2).for_each(|at| silent.on_computed(secs(second), at, name(u8::try_from(at).unwrap())));
            assert!(silent.names().is_empty());
            silent.look(secs(second), |first| first == name(0));
        }
        silent.look(secs(12), |first| first == name(0));
        assert_eq!(silent.names(), ["bad"]);
        silent.on_computed(secs(13), 1, name(1));
        silent.look(secs(17), |_| true);
        assert_eq!(silent.names(), ["bad"], "it is not looked for yet");
        silent.look(secs(18), |_| true);
        assert!(silent.names().is_empty());
    }
}
