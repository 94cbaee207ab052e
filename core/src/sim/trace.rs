//! Requests in order of arrival, and the blocks of their prompts.
//!
//! A block is 512 tokens and stands for everything up to its end: equal blocks mean equal prefixes. What a [`Trace`] holds
//! is checked once, when it is built; it never changes afterwards. It knows neither files nor what answers were.
//!
//! Invariants: arrivals do not go back; a prompt has at least one token, and one block for every 512 tokens begun; no block
//! is twice in a prompt; a block comes after the same block wherever it appears (or is always first), so that all blocks
//! form a forest. The last block of a prompt may be a partial one: it comes again only if the whole prompt does.

use alloc::vec::Vec;
use core::fmt;
use core::ops::{Range, RangeInclusive};

use crate::random::Random;
use crate::time::{Duration, Instant};

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 512;

/// A request as it arrives: how much it asks and how much it will be answered.
///
/// ```
/// use millpond_core::sim::trace::Builder;
/// use millpond_core::time::Instant;
/// let mut builder = Builder::new();
/// builder.push(Instant::ZERO, 600, 20, &[7, 9])?;
/// let trace = builder.build()?;
/// assert_eq!(trace.requests()[0].input_tokens, 600);
/// # Ok::<(), millpond_core::sim::trace::Invalid>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrives, counted from the trace's start.
    pub at: Instant,
    /// Tokens of the prompt, at least 1.
    pub input_tokens: u32,
    /// Tokens of the answer. A scheduler does not know them when the request arrives.
    pub output_tokens: u32,
    /// Where the prompt's blocks lie in the trace's.
    blocks: Range<u32>,
}

/// Requests in order of arrival with the blocks of their prompts.
///
/// Blocks are numbered `0..distinct_blocks` in the order in which a source first names them, so tables can be indexed by them.
///
/// ```
/// use millpond_core::sim::trace::Builder;
/// use millpond_core::time::Instant;
/// let mut builder = Builder::new();
/// builder.push(Instant::ZERO, 1024, 20, &[70, 90])?;
/// builder.push(Instant::from_nanos(5), 1030, 20, &[70, 90, 33])?;
/// let trace = builder.build()?;
/// let second = &trace.requests()[1];
/// assert_eq!((trace.blocks_of(second), trace.distinct_blocks()), (&[0, 1, 2][..], 3));
/// # Ok::<(), millpond_core::sim::trace::Invalid>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<Request>,
    blocks: Vec<u64>,
    distinct: u32,
}

impl Trace {
    /// The requests in order of arrival.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The blocks of a request's prompt, first to last.
    ///
    /// # Panics
    /// If the request is of a longer trace than this.
    #[must_use]
    pub fn blocks_of(&self, request: &Request) -> &[u64] {
        &self.blocks[request.blocks.start as usize..request.blocks.end as usize]
    }

    /// How many different blocks there are; each is below this number.
    #[must_use]
    pub const fn distinct_blocks(&self) -> u32 {
        self.distinct
    }

    /// From the first arrival to the last.
    #[must_use]
    pub fn span(&self) -> Duration {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => last.at.since(first.at),
            _ => Duration::ZERO,
        }
    }

    /// The same requests at `speed` times the pace: 2.0 halves every wait.
    ///
    /// # Panics
    /// Unless `speed` is a number above 0.
    #[must_use]
    pub fn at_speed(mut self, speed: f64) -> Self {
        assert!(speed.is_finite() && speed > 0.0, "a speed is a number above 0, not {speed}");
        for request in &mut self.requests {
            request.at = instant(request.at.as_nanos() as f64 / speed);
        }
        self
    }

    /// Each arrival moved later by less than `bin`, uniformly: for traces whose clock ticks in bins. Those of one bin change
    /// places; blocks keep their numbers, so a block may now appear before one with a smaller number.
    #[must_use]
    pub fn with_jitter(mut self, bin: Duration, seed: u64) -> Self {
        let mut random = Random::new(seed);
        for request in &mut self.requests {
            request.at = request.at + Duration::from_nanos(random.below(bin.as_nanos()));
        }
        self.requests.sort_by_key(|request| request.at);
        self
    }
}

/// Takes requests one by one and refuses what cannot be a trace.
///
/// Example: [`Trace`].
#[derive(Clone, Debug, Default)]
pub struct Builder {
    requests: Vec<Request>,
    /// As the source names them.
    names: Vec<u64>,
}

impl Builder {
    /// A trace without requests.
    #[must_use]
    pub const fn new() -> Self {
        Self { requests: Vec::new(), names: Vec::new() }
    }

    /// Adds the next request; its blocks may have any names, equal ones for equal prefixes.
    ///
    /// # Errors
    /// It breaks an invariant that shows by itself; the request is not added.
    pub fn push(&mut self, at: Instant, input_tokens: u32, output_tokens: u32, blocks: &[u64]) -> Result<(), Invalid> {
        let invalid = |reason| Err(Invalid { request: self.requests.len(), reason });
        if self.requests.last().is_some_and(|last| last.at > at) {
            return invalid(Reason::Backwards);
        }
        if input_tokens == 0 {
            return invalid(Reason::NoInput);
        }
        let expected = input_tokens.div_ceil(BLOCK_TOKENS);
        if u32::try_from(blocks.len()) != Ok(expected) {
            return invalid(Reason::BlockCount { tokens: input_tokens, found: blocks.len() });
        }
        let Some((start, end)) = u32::try_from(self.names.len()).ok().and_then(|n| Some((n, n.checked_add(expected)?)))
        else {
            return invalid(Reason::TooLong);
        };
        self.names.extend_from_slice(blocks);
        self.requests.push(Request { at, input_tokens, output_tokens, blocks: start..end });
        Ok(())
    }

    /// The trace.
    ///
    /// # Errors
    /// Its blocks are no forest.
    pub fn build(self) -> Result<Trace, Invalid> {
        let mut uses = self.uses();
        uses.sort_unstable_by_key(|block| (block.name, block.place));
        for pair in uses.windows(2) {
            let [first, next] = [&pair[0], &pair[1]];
            if first.name != next.name {
                continue;
            }
            if first.request == next.request {
                return Err(next.refused(Reason::Repeated { block: next.name }));
            }
            if first.parent != next.parent {
                return Err(next.refused(Reason::TwoParents { block: next.name }));
            }
        }
        // A block is numbered where it is first seen.
        let mut blocks = alloc::vec![u64::MAX; self.names.len()];
        let firsts = uses.chunk_by(|a, b| a.name == b.name).map(|same| same[0].place);
        firsts.for_each(|place| blocks[place as usize] = 0);
        let mut distinct = 0;
        for number in blocks.iter_mut().filter(|number| **number == 0) {
            *number = u64::from(distinct);
            distinct += 1;
        }
        for same in uses.chunk_by(|a, b| a.name == b.name) {
            let number = blocks[same[0].place as usize];
            same.iter().for_each(|block| blocks[block.place as usize] = number);
        }
        Ok(Trace { requests: self.requests, blocks, distinct })
    }

    fn uses(&self) -> Vec<Use> {
        let mut uses = Vec::with_capacity(self.names.len());
        for (request, at) in self.requests.iter().enumerate() {
            let mut parent = None;
            for place in at.blocks.clone() {
                let name = self.names[place as usize];
                uses.push(Use { name, place, request, parent });
                parent = Some(name);
            }
        }
        uses
    }
}

/// A block where it stands.
struct Use {
    name: u64,
    place: u32,
    request: usize,
    parent: Option<u64>,
}

impl Use {
    const fn refused(&self, reason: Reason) -> Invalid {
        Invalid { request: self.request, reason }
    }
}

/// Why a request cannot be part of a trace.
///
/// ```
/// use millpond_core::sim::trace::Builder;
/// use millpond_core::time::Instant;
/// let refused = Builder::new().push(Instant::ZERO, 600, 20, &[7]).unwrap_err();
/// assert_eq!(refused.to_string(), "request 0: 600 tokens are 2 blocks of 512, not 1");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The request's index.
    pub request: usize,
    /// What is wrong with it.
    pub reason: Reason,
}

/// What is wrong with a request.
///
/// Example: [`Invalid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It arrives before the one before it.
    Backwards,
    /// The prompt is empty.
    NoInput,
    /// The number of blocks does not fit the prompt's length.
    BlockCount {
        /// The prompt's tokens.
        tokens: u32,
        /// Blocks that were named.
        found: usize,
    },
    /// A block is twice in the prompt.
    Repeated {
        /// Its name in the source.
        block: u64,
    },
    /// A block stands after another block than in an earlier request.
    TwoParents {
        /// Its name in the source.
        block: u64,
    },
    /// The trace has more than 2^32 blocks.
    TooLong,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}: {}", self.request, self.reason)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backwards => f.write_str("it arrives before the one before it"),
            Self::NoInput => f.write_str("its prompt is empty"),
            Self::BlockCount { tokens, found } => {
                let expected = tokens.div_ceil(BLOCK_TOKENS);
                write!(f, "{tokens} tokens are {expected} blocks of {BLOCK_TOKENS}, not {found}")
            }
            Self::Repeated { block } => write!(f, "block {block} is in it twice"),
            Self::TwoParents { block } => {
                write!(
                    f,
                    "block {block} follows another block than where it was seen first; equal blocks are equal prefixes"
                )
            }
            Self::TooLong => f.write_str("a trace has at most 4294967295 blocks"),
        }
    }
}

impl core::error::Error for Invalid {}

/// A workload made from a few numbers: requests that come independently of each other, part of whose prompts begins like
/// one of a few documents.
///
/// ```
/// use millpond_core::sim::trace::Synthetic;
/// let trace = Synthetic { requests: 100, ..Synthetic::default() }.trace();
/// assert_eq!(trace.requests().len(), 100);
/// assert_eq!(trace, Synthetic { requests: 100, ..Synthetic::default() }.trace());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Synthetic {
    /// How many requests.
    pub requests: u32,
    /// Arrivals a second, on average; the gaps are exponential.
    pub rate: f64,
    /// Tokens of a prompt, each length equally likely; at least 1.
    pub input_tokens: RangeInclusive<u32>,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// Which part of a prompt, from its start and in whole blocks, is a document's, from 0 to 1.
    pub prefix_share: f64,
    /// How many documents there are, each equally likely.
    pub documents: u32,
    /// The same seed gives the same trace.
    pub seed: u64,
}

impl Default for Synthetic {
    /// The lengths and the shared half of the simulated data of arXiv 2407.00079; a request every second.
    fn default() -> Self {
        Self {
            requests: 1_000,
            rate: 1.0,
            input_tokens: 16_384..=131_072,
            output_tokens: 512,
            prefix_share: 0.5,
            documents: 16,
            seed: 0,
        }
    }
}

impl Synthetic {
    /// The trace of these numbers.
    ///
    /// # Panics
    /// If the rate is not above 0, the share not in 0 to 1, a prompt may be empty, no document is there to share, or there
    /// are more than 2^32 blocks.
    #[must_use]
    pub fn trace(&self) -> Trace {
        assert!(self.rate.is_finite() && self.rate > 0.0, "requests come at a rate above 0");
        assert!((0.0..=1.0).contains(&self.prefix_share), "the shared part of a prompt is 0 to 1 of it");
        assert!(*self.input_tokens.start() > 0 && !self.input_tokens.is_empty(), "a prompt has a token");
        assert!(self.documents > 0 || self.prefix_share == 0.0, "what is shared is in a document");
        let mut random = Random::new(self.seed);
        let (mut builder, mut blocks, mut seconds) = (Builder::new(), Vec::new(), 0.0);
        let lengths = u64::from(self.input_tokens.end() - self.input_tokens.start()) + 1;
        let longest = u64::from(self.input_tokens.end().div_ceil(BLOCK_TOKENS));
        let mut unseen = u64::from(self.documents) * longest;
        for _ in 0..self.requests {
            seconds += random.exponential() / self.rate;
            let tokens = self.input_tokens.start() + u32::try_from(random.below(lengths)).unwrap_or(0);
            let document = random.below(u64::from(self.documents));
            let shared = whole(f64::from(tokens / BLOCK_TOKENS) * self.prefix_share);
            let rest = u64::from(tokens.div_ceil(BLOCK_TOKENS)) - shared;
            blocks.clear();
            blocks.extend(document * longest..document * longest + shared);
            blocks.extend(unseen..unseen + rest);
            unseen += rest;
            builder
                .push(instant(seconds * 1e9), tokens, self.output_tokens, &blocks)
                .expect("lengths fit and time goes on; only the number of blocks can be too large");
        }
        builder.build().expect("documents and fresh blocks have one parent each")
    }
}

/// Nanoseconds, rounded down.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer saturates; times are not negative"
)]
const fn instant(nanos: f64) -> Instant {
    Instant::from_nanos(nanos as u64)
}

/// Rounded down.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer saturates; counts are not negative"
)]
const fn whole(count: f64) -> u64 {
    count as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(prompts: &[(u64, u32, &[u64])]) -> Option<Invalid> {
        let mut builder = Builder::new();
        for &(at, tokens, blocks) in prompts {
            if let Err(invalid) = builder.push(Instant::from_nanos(at), tokens, 1, blocks) {
                return Some(invalid);
            }
        }
        builder.build().err()
    }

    #[test]
    fn each_broken_invariant_is_refused_at_its_request() {
        let at = |request, reason| Some(Invalid { request, reason });
        assert_eq!(refused(&[(0, 1025, &[1, 2, 3]), (0, 1024, &[1, 2]), (9, 512, &[1]), (9, 700, &[8, 9])]), None);
        assert_eq!(refused(&[(5, 1, &[1]), (4, 1, &[2])]), at(1, Reason::Backwards));
        assert_eq!(refused(&[(5, 0, &[])]), at(0, Reason::NoInput));
        assert_eq!(refused(&[(5, 513, &[1])]), at(0, Reason::BlockCount { tokens: 513, found: 1 }));
        assert_eq!(refused(&[(5, 1, &[1]), (5, 512, &[1, 2])]), at(1, Reason::BlockCount { tokens: 512, found: 2 }));
        assert_eq!(refused(&[(0, 1, &[1]), (0, 1500, &[4, 5, 4])]), at(1, Reason::Repeated { block: 4 }));
        assert_eq!(refused(&[(0, 1024, &[4, 5]), (0, 512, &[5])]), at(1, Reason::TwoParents { block: 5 }));
        assert_eq!(refused(&[(0, 1024, &[4, 5]), (0, 1024, &[6, 5])]), at(1, Reason::TwoParents { block: 5 }));
    }

    #[test]
    fn speed_divides_every_wait_and_jitter_stays_within_its_bin() {
        let mut builder = Builder::new();
        for request in 0..100 {
            builder.push(Instant::from_nanos(request / 10 * 3_000), 512, 1, &[request]).expect("valid");
        }
        let trace = builder.build().expect("valid");
        assert_eq!(trace.clone().at_speed(1.5).span(), Duration::from_nanos(18_000));
        let jittered = trace.clone().with_jitter(Duration::from_nanos(3_000), 1);
        assert!(jittered.requests().is_sorted_by_key(|request| request.at));
        for request in jittered.requests() {
            let bin = jittered.blocks_of(request)[0] / 10;
            assert_eq!(request.at.as_nanos() / 3_000, bin);
        }
        assert_ne!(jittered, trace.clone().with_jitter(Duration::from_nanos(3_000), 2));
        assert_eq!(trace.clone().with_jitter(Duration::ZERO, 1), trace);
    }

    #[test]
    fn a_synthetic_workload_has_the_rate_the_lengths_and_the_shared_part_it_was_asked_for() {
        let asked = Synthetic { requests: 4_000, rate: 4.0, documents: 8, ..Synthetic::default() };
        let trace = asked.trace();
        assert!((950.0..1_050.0).contains(&trace.span().as_secs_f64()), "{:?}", trace.span());
        let (mut seen, mut hits, mut all) = (alloc::vec![false; trace.distinct_blocks() as usize], 0, 0);
        for request in trace.requests() {
            assert!(asked.input_tokens.contains(&request.input_tokens) && request.output_tokens == 512);
            for &block in trace.blocks_of(request) {
                all += 1;
                hits += u64::from(core::mem::replace(&mut seen[usize::try_from(block).expect("small")], true));
            }
        }
        let share = hits as f64 / f64::from(all);
        assert!((0.49..0.5).contains(&share), "{share}");
        assert_ne!(trace, Synthetic { seed: 1, ..asked }.trace());
    }

    #[test]
    fn without_a_shared_part_no_block_comes_twice() {
        let trace = Synthetic { requests: 50, prefix_share: 0.0, documents: 0, ..Synthetic::default() }.trace();
        let blocks: usize = trace.requests().iter().map(|request| trace.blocks_of(request).len()).sum();
        assert_eq!(u32::try_from(blocks), Ok(trace.distinct_blocks()));
    }
}
