//! One cache of KV blocks, and what a policy of eviction finds in it: a trace replayed without time or transfers.
//!
//! Requests are taken in the order of the trace. A request hits as many leading blocks as are resident when it arrives;
//! then every block of its prompt is used or stored, and the policy evicts what is over the capacity. What is being
//! computed counts as resident at once, and answers are not stored. A cluster, where blocks arrive late and lie on several
//! nodes, finds less.

use alloc::boxed::Box;
use core::fmt;

use super::trace::{BLOCK_TOKENS, Request, Trace};
use crate::evict::Kind;
use crate::time::Instant;

mod classic;
mod optimum;
mod rhg;

pub use classic::Classic;
pub use optimum::Optimum;
pub use rhg::RhgS;

/// The prompt of a request, as a cache sees it.
///
/// ```
/// use millpond_core::sim::cache::Prompt;
/// let prompt = Prompt { blocks: &[0, 1], tokens: 600 };
/// assert!(prompt.ends_in_a_partial_block());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// Its blocks, first to last, as a [`Trace`] numbers them.
    pub blocks: &'a [u64],
    /// Its tokens.
    pub tokens: u32,
}

impl Prompt<'_> {
    /// Whether the last block is not full.
    #[must_use]
    pub const fn ends_in_a_partial_block(&self) -> bool {
        !self.tokens.is_multiple_of(BLOCK_TOKENS)
    }
}

/// A cache of blocks that serves prefixes.
///
/// ```
/// use millpond_core::sim::cache::{Cache, Classic, Prompt};
/// use millpond_core::{evict::Kind, time::Instant};
/// let mut cache = Classic::new(Kind::Lru, 2, 10);
/// cache.on_request(Instant::ZERO, Prompt { blocks: &[0, 1, 2], tokens: 1536 });
/// assert_eq!(cache.matched(&[1, 2, 0]), 2); // 0 went; a prefix ends where a block is missing
/// ```
pub trait Cache {
    /// How many blocks from the first on are resident.
    fn matched(&self, blocks: &[u64]) -> usize;

    /// A request arrived, not before the last one: its blocks are used or stored, others evicted for them.
    fn on_request(&mut self, now: Instant, prompt: Prompt<'_>);
}

/// What decides about eviction in a replay.
///
/// ```
/// use millpond_core::{evict::Kind, sim::cache::Eviction};
/// assert_eq!("rhg-s".parse(), Ok(Eviction::RhgS));
/// assert_eq!("lru".parse(), Ok(Eviction::Kind(Kind::Lru)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Eviction {
    /// A policy of [`crate::evict`].
    Kind(Kind),
    /// Reuse hazard by class of request, [`RhgS`].
    RhgS,
    /// The best that can be done by who knows the future, [`Optimum`].
    Optimum,
}

impl Eviction {
    /// Every one, the optimum last.
    pub const ALL: [Self; Kind::ALL.len() + 2] = {
        let mut all = [Self::Optimum; Kind::ALL.len() + 2];
        let mut at = 0;
        while at < Kind::ALL.len() {
            all[at] = Self::Kind(Kind::ALL[at]);
            at += 1;
        }
        all[at] = Self::RhgS;
        all
    };

    /// The name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kind(kind) => kind.name(),
            Self::RhgS => "rhg-s",
            Self::Optimum => "optimum",
        }
    }

    /// An empty cache of `capacity` blocks for the requests of `trace` in their order.
    #[must_use]
    pub fn cache(self, trace: &Trace, capacity: u32) -> Box<dyn Cache> {
        let blocks = trace.distinct_blocks();
        match self {
            Self::Kind(kind) => Box::new(Classic::new(kind, capacity, blocks)),
            Self::RhgS => Box::new(RhgS::new(capacity, blocks)),
            Self::Optimum => Box::new(Optimum::new(trace, capacity)),
        }
    }
}

/// Nothing that decides about eviction has that name.
///
/// Example: [`Eviction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownEviction;

impl fmt::Display for UnknownEviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such policy; one of:")?;
        Eviction::ALL.iter().try_for_each(|eviction| write!(f, " {}", eviction.name()))
    }
}

impl core::error::Error for UnknownEviction {}

impl core::str::FromStr for Eviction {
    type Err = UnknownEviction;

    fn from_str(name: &str) -> Result<Self, UnknownEviction> {
        Self::ALL.into_iter().find(|eviction| eviction.name() == name).ok_or(UnknownEviction)
    }
}

/// What a replay found in the cache.
///
/// ```
/// use millpond_core::sim::cache::Hits;
/// let hits = Hits { blocks: 200, hit_blocks: 50, ..Hits::default() };
/// assert_eq!(hits.blocks_pct(), 25.0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Requests.
    pub requests: u64,
    /// Blocks of all prompts.
    pub blocks: u64,
    /// Of those, hit.
    pub hit_blocks: u64,
    /// Tokens of all prompts.
    pub tokens: u64,
    /// Of those, in blocks that were hit.
    pub hit_tokens: u64,
}

impl Hits {
    /// Hit blocks in per cent; 0 of nothing.
    #[must_use]
    pub fn blocks_pct(&self) -> f64 {
        100.0 * self.hit_blocks as f64 / self.blocks.max(1) as f64
    }

    /// Hit tokens in per cent; 0 of nothing.
    #[must_use]
    pub fn tokens_pct(&self) -> f64 {
        100.0 * self.hit_tokens as f64 / self.tokens.max(1) as f64
    }
}

/// Replays `trace` through one cache of `capacity` blocks. `on_request` hears of each request how many tokens of its prompt
/// were hit.
///
/// ```
/// use millpond_core::evict::Kind;
/// use millpond_core::sim::{cache::{Eviction, replay}, trace::Synthetic};
/// let trace = Synthetic { requests: 200, ..Synthetic::default() }.trace();
/// let hits = replay(&trace, Eviction::Kind(Kind::Lru), trace.distinct_blocks(), |_, _| {});
/// assert!(hits.blocks_pct() > 40.0);
/// ```
pub fn replay(trace: &Trace, eviction: Eviction, capacity: u32, mut on_request: impl FnMut(&Request, u32)) -> Hits {
    let mut cache = eviction.cache(trace, capacity);
    let mut hits = Hits::default();
    for request in trace.requests() {
        let prompt = Prompt { blocks: trace.blocks_of(request), tokens: request.input_tokens };
        let hit_blocks = cache.matched(prompt.blocks);
        let hit_tokens = u32::try_from(hit_blocks).unwrap_or(u32::MAX).saturating_mul(BLOCK_TOKENS).min(prompt.tokens);
        cache.on_request(request.at, prompt);
        hits.requests += 1;
        hits.blocks += prompt.blocks.len() as u64;
        hits.hit_blocks += hit_blocks as u64;
        hits.tokens += u64::from(prompt.tokens);
        hits.hit_tokens += u64::from(hit_tokens);
        on_request(request, hit_tokens);
    }
    hits
}

/// The index of a block in a table.
#[expect(clippy::cast_possible_truncation, reason = "a trace numbers its blocks in 32 bits")]
const fn index(block: u64) -> usize {
    block as usize
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec::Vec;

    use super::super::trace::{Builder, Synthetic};
    use super::*;
    use crate::random::Random;

    /// A conversation-like trace: requests extend earlier prompts or start anew.
    fn conversations(requests: u64, blocks_max: u64, seed: u64) -> Trace {
        let mut random = Random::new(seed);
        let (mut builder, mut prompts, mut unseen) = (Builder::new(), Vec::<Vec<u64>>::new(), 0);
        for at in 0..requests {
            let mut prompt = match random.below(3) {
                0 => Vec::new(),
                _ => prompts.get(usize::try_from(random.below(at + 1)).unwrap()).cloned().unwrap_or_default(),
            };
            prompt.truncate(usize::try_from(random.below(prompt.len() as u64 + 1)).unwrap().max(1));
            for _ in 0..random.below(blocks_max) + u64::from(prompt.is_empty()) {
                prompt.push(unseen);
                unseen += 1;
            }
            let tokens = u32::try_from(prompt.len()).unwrap() * BLOCK_TOKENS;
            builder.push(Instant::from_nanos(at * 7_000_000_000), tokens, 1, &prompt).unwrap();
            prompts.push(prompt);
        }
        builder.build().unwrap()
    }

    /// The most blocks that any sequence of decisions hits: after each use, every set of at most `capacity` blocks is tried.
    fn best_of_all(trace: &Trace, capacity: u32) -> u64 {
        let sets = 1usize << trace.distinct_blocks();
        let mut best: Vec<Option<u64>> = alloc::vec![None; sets];
        best[0] = Some(0);
        for request in trace.requests() {
            let blocks = trace.blocks_of(request);
            for (set, hits) in best.iter_mut().enumerate() {
                let hit = blocks.iter().take_while(|&&block| set >> block & 1 == 1).count() as u64;
                *hits = hits.map(|hits| hits + hit);
            }
            for &block in blocks {
                let mut after = alloc::vec![None; sets];
                for (set, &hits) in best.iter().enumerate().filter(|(_, hits)| hits.is_some()) {
                    let from = set | 1 << block;
                    for to in (0..sets).filter(|to| to & !from == 0 && to.count_ones() <= capacity) {
                        after[to] = after[to].max(hits);
                    }
                }
                best = after;
            }
        }
        best.into_iter().flatten().max().unwrap_or(0)
    }

    #[test]
    fn the_optimum_is_what_trying_everything_finds() {
        let small = (0..60).map(|seed| (seed, conversations(9, 2, seed)));
        let small: Vec<_> = small.filter(|(_, trace)| trace.distinct_blocks() <= 8).collect();
        assert!(small.len() >= 15, "{}", small.len());
        for (seed, trace) in small {
            for capacity in [1, 2, 3] {
                let hits = replay(&trace, Eviction::Optimum, capacity, |_, _| {});
                assert_eq!(hits.hit_blocks, best_of_all(&trace, capacity), "seed {seed}, {capacity} blocks");
            }
        }
    }

    #[test]
    fn no_policy_beats_the_optimum_and_without_a_limit_all_are_equal() {
        for trace in [conversations(600, 6, 1), Synthetic { requests: 100, ..Synthetic::default() }.trace()] {
            let all = replay(&trace, Eviction::Optimum, trace.distinct_blocks(), |_, _| {});
            for eviction in Eviction::ALL {
                for capacity in [1, 40, 400] {
                    let [hits, best] =
                        [eviction, Eviction::Optimum].map(|eviction| replay(&trace, eviction, capacity, |_, _| {}));
                    assert!(hits.hit_blocks <= best.hit_blocks, "{} at {capacity}", eviction.name());
                    assert_eq!((hits.requests, hits.blocks, hits.tokens), (all.requests, all.blocks, all.tokens));
                }
                assert_eq!(replay(&trace, eviction, trace.distinct_blocks(), |_, _| {}), all, "{}", eviction.name());
            }
        }
    }

    #[test]
    fn a_hit_ends_where_a_block_is_missing_and_counts_no_token_twice() {
        let mut builder = Builder::new();
        for _ in 0..2 {
            builder.push(Instant::ZERO, 1_100, 1, &[5, 6, 7]).unwrap();
        }
        let trace = builder.build().unwrap();
        let mut heard = Vec::new();
        let hits = replay(&trace, Eviction::Kind(Kind::Lru), 3, |_, tokens| heard.push(tokens));
        assert_eq!(hits, Hits { requests: 2, blocks: 6, hit_blocks: 3, tokens: 2_200, hit_tokens: 1_100 });
        assert_eq!(heard, [0, 1_100]);
        // Root first, one by one: each block that is stored evicts the one that is needed next.
        assert_eq!(replay(&trace, Eviction::Kind(Kind::Lru), 2, |_, _| {}).hit_blocks, 0);
        assert_eq!(replay(&trace, Eviction::RhgS, 2, |_, _| {}).hit_blocks, 2);
    }

    #[test]
    fn names_are_read_back() {
        for eviction in Eviction::ALL {
            assert_eq!(eviction.name().parse(), Ok(eviction));
        }
        let refused = "lruu".parse::<Eviction>().unwrap_err().to_string();
        assert_eq!(refused, "no such policy; one of: lru fifo lfu sieve s3-fifo arc rhg-s optimum");
    }
}
