//! Attention of query heads over the pages of one KV head.
//!
//! A tile is [`LANES`] rows, a lane each; a row is one query head of one token. Keys and values are broadcast, element by
//! element, so pages are read as they lie and converted once for all tiles of a task, a [`SPAN`] of tokens at a time. Each
//! tile takes a span's scores, weights and values in one go: what it added up before is scaled when a larger score comes
//! ("FlashAttention", Dao et al. 2022), so nothing grows with the context.
//!
//! Long contexts are where attention costs, so its products are of integers, two in the place of one float (see
//! [`pairs`](super::pairs)): queries and weights of 14 bits, keys and values of 13, each group with a scale: a query, a key,
//! one element of a span's values, a span's weights. Rounding moves a factor by at most 1/8190 of its group's largest, as
//! much as the binary16 of the pages moves that one. Where a row sees only a part of a span (its newest tokens), that
//! part's values are weighed in floats: their scales would depend on tokens that are not there yet.
//!
//! A row has [`CHAINS`] chains, which take its spans by turns, so that threads can share the context of a row; at the end
//! the others are merged into the first. A chain's order is that of elements, spans and tokens, over the tokens that the row
//! sees and no others: it does not depend on the rows beside it, nor on who computed which chain.

use std::ops::Range;

use millpond_core::layout::Side;
use pulp::Simd;

use super::kernel::{LANES, ROUND, Workers, by_width, exp2_vector, grown};
use super::pairs::{self, Pairs};

/// Tokens that are converted together, counted from the first: enough that sums stay in registers, and they in the cache.
const SPAN: usize = 64;
/// Chains of a row: span `n` belongs to chain `n % CHAINS`.
pub(super) const CHAINS: usize = 2;
/// Products that are summed as integers. `TERMS × LARGE × SMALL` fits 31 bits.
const TERMS: usize = 64;
/// The largest magnitude of queries and weights.
const LARGE: f32 = 8191.0;
/// The largest magnitude of keys and values.
const SMALL: f32 = 4095.0;

/// Attention of some rows of one request with one KV head. Rows are query heads of tokens, `group` per token, token-major.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    /// Queries, `[token][head of the group][head dim]`, scaled so that a weight is 2^score.
    pub(super) queries: &'a [f32],
    /// Elements of a head, a multiple of [`LANES`].
    pub(super) head_dim: usize,
    /// Query heads that share the KV head.
    pub(super) group: usize,
    /// Position of the first token.
    pub(super) start: usize,
}

/// Reads keys or values into rows of `head_dim` values.
pub(super) trait ReadRows {
    /// Reads those of `rows.len() / head_dim` tokens from token `first` on.
    fn read(&self, side: Side, first: usize, rows: &mut [f32]);
}

impl Attention<'_> {
    /// Computes all rows into `out`, which is shaped like the queries, with the widest vectors.
    pub(super) fn run(self, workers: &Workers, pages: &(impl ReadRows + ?Sized), out: &mut [f32]) {
        STATES.with_borrow_mut(|states| {
            let states = grown(states, CHAINS * self.states_len());
            self.chains(workers, pages, 0..CHAINS, states);
            self.merge(workers, states, out);
        });
    }

    /// Vectors of the states of all rows in one chain.
    pub(super) fn states_len(&self) -> usize {
        self.tiles() * state_len(self.head_dim)
    }

    /// Computes some chains into `states`, [`Attention::states_len`] vectors a chain.
    pub(super) fn chains(
        self,
        workers: &Workers,
        pages: &(impl ReadRows + ?Sized),
        chains: Range<usize>,
        states: &mut [[f32; LANES]],
    ) {
        let (head_dim, tiles) = (self.head_dim, self.tiles());
        SCRATCH.with_borrow_mut(|(floats, integers)| {
            let floats = grown(floats, tiles * 2 * LANES + (SPAN + 1) * head_dim);
            let (facts, span) = floats.split_at_mut(tiles * 2 * LANES);
            let (rows, value_scales) = span.split_at_mut(SPAN * head_dim);
            let integers = grown(integers, tiles * head_dim / 2 * LANES + SPAN * head_dim);
            let (queries, span) = integers.split_at_mut(tiles * head_dim / 2 * LANES);
            let (keys, values) = span.split_at_mut(SPAN * head_dim / 2);
            let span = Span { rows, keys, key_scales: [0.0; SPAN], values, value_scales };
            let (facts, queries) = (facts.as_chunks_mut().0, queries.as_chunks_mut().0);
            pairs::dispatch(workers.arch, Run { job: self, pages, chains, span, facts, queries, states });
        });
    }

    /// Merges the states of all chains, as [`Attention::chains`] left them, into results.
    pub(super) fn merge(self, workers: &Workers, states: &mut [[f32; LANES]], out: &mut [f32]) {
        pairs::dispatch(workers.arch, Merge { head_dim: self.head_dim, states, out });
    }

    fn tiles(&self) -> usize {
        (self.queries.len() / self.head_dim).div_ceil(LANES)
    }

    /// Tokens that the last row sees.
    fn end(&self) -> usize {
        self.start + self.queries.len() / (self.group * self.head_dim)
    }

    /// Token that comes after those that `row` sees.
    fn sees(&self, row: usize) -> usize {
        (self.start + row / self.group + 1).min(self.end())
    }
}

thread_local! {
    static STATES: std::cell::RefCell<Vec<[f32; LANES]>> = const { std::cell::RefCell::new(Vec::new()) };
    static SCRATCH: std::cell::RefCell<(Vec<f32>, Vec<i32>)> = const { std::cell::RefCell::new((Vec::new(), Vec::new())) };
}

struct Run<'a, 'b, P: ReadRows + ?Sized> {
    job: Attention<'a>,
    pages: &'b P,
    chains: Range<usize>,
    span: Span<'b>,
    /// Scales and last tokens of each [`Tile`].
    facts: &'b mut [[f32; LANES]],
    /// The queries of each tile.
    queries: &'b mut [[i32; LANES]],
    /// `[chain][tile]`: sums, largest scores and totals.
    states: &'b mut [[f32; LANES]],
}

/// Keys and values of the tokens of a span.
struct Span<'a> {
    /// What was read last, `[token][head dim]`.
    rows: &'a mut [f32],
    /// `[token][pair of elements]`.
    keys: &'a mut [i32],
    /// What an integer of each token's key is worth.
    key_scales: [f32; SPAN],
    /// `[pair of tokens][element]`.
    values: &'a mut [i32],
    /// What an integer of each element is worth.
    value_scales: &'a mut [f32],
}

/// What a tile needs while it takes in a span.
struct Scratch {
    /// `[token]`: scores, then weights.
    weights: [[f32; LANES]; SPAN],
    /// `[pair of tokens]`.
    pairs: [[i32; LANES]; SPAN / 2],
}

/// [`LANES`] rows; lanes beyond the last row compute something that nobody reads, or, beyond a half, nothing.
struct Tile<'a> {
    /// `[pair of elements]`.
    queries: &'a [[i32; LANES]],
    /// What an integer of the queries is worth.
    scale: &'a [f32; LANES],
    /// The last token that each row sees.
    lasts: &'a [f32; LANES],
    /// Values by weights, `[head dim]`.
    sums: &'a mut [[f32; LANES]],
    /// The largest score so far: weights are 2^(score - that).
    most: &'a mut [f32; LANES],
    /// The sum of weights.
    total: &'a mut [f32; LANES],
    /// Tokens that all rows see.
    all: usize,
    /// Tokens that any row sees.
    any: usize,
}

impl<P: ReadRows + ?Sized> pairs::Work for Run<'_, '_, P> {
    #[inline(always)]
    fn run<S: Pairs>(self, simd: S) {
        by_width!(self.run_by::<S>(simd));
    }
}

impl<P: ReadRows + ?Sized> Run<'_, '_, P> {
    #[inline(always)]
    fn run_by<S: Pairs, const N: usize>(mut self, simd: S) {
        for index in 0..self.job.tiles() {
            self.begin::<S, N>(simd, index);
        }
        let mut scratch = Scratch { weights: [[0.0; LANES]; SPAN], pairs: [[0; LANES]; SPAN / 2] };
        for place in 0..self.chains.len() {
            self.chain::<S, N>(simd, place, &mut scratch);
        }
    }

    /// Takes all spans of one chain in.
    #[inline(always)]
    fn chain<S: Pairs, const N: usize>(&mut self, simd: S, place: usize, scratch: &mut Scratch) {
        let (head_dim, end, tiles) = (self.job.head_dim, self.job.end(), self.job.tiles());
        let rows = self.job.queries.len() / head_dim;
        let states = &mut self.states[place * tiles * state_len(head_dim)..][..tiles * state_len(head_dim)];
        for state in states.chunks_exact_mut(state_len(head_dim)) {
            state.fill([0.0; LANES]);
            state[0] = [f32::MIN; LANES];
        }
        for first in ((self.chains.start + place) * SPAN..end).step_by(CHAINS * SPAN) {
            let tokens = SPAN.min(end - first);
            self.pages.read(Side::Key, first, &mut self.span.rows[..tokens * head_dim]);
            self.span.pair_keys::<S, N>(simd, tokens, head_dim);
            self.pages.read(Side::Value, first, &mut self.span.rows[..tokens * head_dim]);
            if tokens == SPAN {
                self.span.pair_values::<S, N>(simd, head_dim);
            }
            let parts = self.facts.as_chunks().0.iter().zip(self.queries.chunks_exact(head_dim / 2));
            for (index, (([scale, lasts], queries), state)) in
                parts.zip(states.chunks_exact_mut(state_len(head_dim))).enumerate()
            {
                let [most, total, sums @ ..] = state else { unreachable!("longer") };
                let (all, any) = (self.job.sees(index * LANES), self.job.sees(index * LANES + LANES - 1));
                let mut tile = Tile { queries, scale, lasts, sums, most, total, all, any };
                if rows - index * LANES > LANES / 2 {
                    tile.take::<S, N>(simd, &self.span, first, scratch);
                    continue;
                }
                match S::Half::F32_LANES {
                    16 | 8 => tile.take::<S::Half, 1>(simd.half(), &self.span, first, scratch),
                    4 => tile.take::<S::Half, 2>(simd.half(), &self.span, first, scratch),
                    _ => tile.take::<S::Half, 8>(simd.half(), &self.span, first, scratch),
                }
            }
        }
    }

    /// The queries of one tile into pairs.
    #[inline(always)]
    fn begin<S: Pairs, const N: usize>(&mut self, simd: S, index: usize) {
        let head_dim = self.job.head_dim;
        let [scale, lasts] = &mut self.facts.as_chunks_mut().0[index];
        *lasts = std::array::from_fn(|lane| (self.job.sees(index * LANES + lane) - 1) as f32);
        let rows = self.job.queries[index * LANES * head_dim..].chunks_exact(head_dim).take(LANES);
        let (mut factors, mut elements) = ([0.0; LANES], [[0.0; LANES]; TERMS]);
        *scale = [0.0; LANES];
        for (lane, row) in rows.clone().enumerate() {
            let most = largest(row);
            scale[lane] = most / LARGE;
            factors[lane] = factor(most, LARGE);
        }
        let queries = &mut self.queries[index * head_dim / 2..][..head_dim / 2];
        for (chunk, queries) in queries.chunks_mut(TERMS / 2).enumerate() {
            let elements = &mut elements[..2 * queries.len()];
            for (lane, row) in rows.clone().enumerate() {
                let row = &row[chunk * TERMS..][..elements.len()];
                elements.iter_mut().zip(row).for_each(|(lanes, query)| lanes[lane] = *query);
            }
            let (low, high) = elements.split_at(queries.len());
            for ((low, high), out) in low.iter().zip(high).zip(queries) {
                pack_lanes::<S, N>(simd, low, high, &factors, out);
            }
        }
    }
}

/// Vectors of the state of a [`Tile`] in one chain: the largest scores, totals, sums.
const fn state_len(head_dim: usize) -> usize {
    head_dim + 2
}

/// Makes results of `[chain][tile]` states.
struct Merge<'a> {
    head_dim: usize,
    states: &'a mut [[f32; LANES]],
    out: &'a mut [f32],
}

impl pairs::Work for Merge<'_> {
    #[inline(always)]
    fn run<S: Pairs>(self, simd: S) {
        by_width!(self.run_by::<S>(simd));
    }
}

impl Merge<'_> {
    #[inline(always)]
    fn run_by<S: Pairs, const N: usize>(self, simd: S) {
        let (head_dim, len) = (self.head_dim, state_len(self.head_dim));
        let (firsts, others) = self.states.split_at_mut(self.states.len() / CHAINS);
        for other in others.chunks_exact(firsts.len()) {
            for (state, other) in firsts.chunks_exact_mut(len).zip(other.chunks_exact(len)) {
                merge::<S, N>(simd, state, other);
            }
        }
        for (state, out) in firsts.chunks_exact(len).zip(self.out.chunks_mut(LANES * head_dim)) {
            for (lane, row) in out.chunks_exact_mut(head_dim).enumerate() {
                let scale = 1.0 / state[1][lane];
                row.iter_mut().zip(&state[2..]).for_each(|(out, sums)| *out = sums[lane] * scale);
            }
        }
    }
}

/// Adds another chain's sums and totals, both scaled to the larger of their largest scores.
#[inline(always)]
fn merge<S: Pairs, const N: usize>(simd: S, state: &mut [[f32; LANES]], other: &[[f32; LANES]]) {
    let ([mine, sums @ ..], [theirs, others @ ..]) = (state, other) else { unreachable!("longer") };
    let (mut factors, mut other_factors) = (*mine, *theirs);
    for lane in 0..LANES {
        mine[lane] = if theirs[lane] > mine[lane] { theirs[lane] } else { mine[lane] };
    }
    power::<S, N>(simd, &mut factors, mine);
    power::<S, N>(simd, &mut other_factors, mine);
    let (factors, other_factors) = (vectors::<S, N>(&factors), vectors::<S, N>(&other_factors));
    for (sums, others) in sums.iter_mut().zip(others) {
        let (sums, others) = (vectors_mut::<S, N>(sums), vectors::<S, N>(others));
        for v in 0..N {
            sums[v] = simd.mul_add_f32s(others[v], other_factors[v], simd.mul_f32s(sums[v], factors[v]));
        }
    }
}

#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let mut most = [0f32; LANES];
    for values in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let value = values[lane].abs();
            most[lane] = if value > most[lane] { value } else { most[lane] };
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            most[lane] = if most[lane + half] > most[lane] { most[lane + half] } else { most[lane] };
        }
        half /= 2;
    }
    most[0]
}

/// What brings values of at most `most` to integers of at most `bound`. Those that are too small to be told from zero
/// become zero.
#[inline(always)]
fn factor(most: f32, bound: f32) -> f32 {
    // 2^-100
    const TINY: f32 = f32::from_bits(0x0d80_0000);
    bound / if most > TINY { most } else { TINY }
}

/// Two values as 16-bit integers in one lane: the nearest ones.
#[inline(always)]
fn pack(low: f32, high: f32) -> i32 {
    let (low, high) = ((low + ROUND).to_bits(), (high + ROUND).to_bits());
    (low & 0xffff | high << 16).cast_signed()
}

/// The same, lane by lane, for values that are multiplied by factors.
#[inline(always)]
fn pack_lanes<S: Pairs, const N: usize>(
    simd: S,
    low: &[f32; LANES],
    high: &[f32; LANES],
    factors: &[f32; LANES],
    out: &mut [i32; LANES],
) {
    let (low_half, shift) = (simd.splat_u32s(0xffff), simd.splat_u32s(16));
    let (low, high, factors) = (vectors::<S, N>(low), vectors::<S, N>(high), vectors::<S, N>(factors));
    let (out, _) = S::as_mut_simd_i32s(out);
    for v in 0..N {
        let nearest = |values| {
            let value = simd.mul_f32s(values, factors[v]);
            simd.transmute_u32s_f32s(simd.add_f32s(value, simd.splat_f32s(ROUND)))
        };
        let low = simd.and_u32s(nearest(low[v]), low_half);
        let high = simd.wrapping_dyn_shl_u32s(nearest(high[v]), shift);
        out[v] = simd.transmute_i32s_u32s(simd.or_u32s(low, high));
    }
}

/// Makes each score the weight 2^(score - most), as [`exp2`](super::kernel::exp2) has it.
#[inline(always)]
fn power<S: Pairs, const N: usize>(simd: S, scores: &mut [f32; LANES], most: &[f32; LANES]) {
    let (scores, most) = (vectors_mut::<S, N>(scores), vectors::<S, N>(most));
    for v in 0..N {
        scores[v] = exp2_vector(simd, simd.sub_f32s(scores[v], most[v]));
    }
}

impl Span<'_> {
    /// Keys of the first `tokens` tokens into pairs.
    #[inline(always)]
    fn pair_keys<S: Pairs, const N: usize>(&mut self, simd: S, tokens: usize, head_dim: usize) {
        let rows = self.rows.chunks_exact(head_dim).take(tokens);
        let outs = self.keys.chunks_exact_mut(head_dim / 2).zip(&mut self.key_scales);
        for (row, (out, scale)) in rows.zip(outs) {
            let most = largest(row);
            *scale = most / SMALL;
            let factors = [factor(most, SMALL); LANES];
            for (row, out) in row.chunks(TERMS).zip(out.chunks_mut(TERMS / 2)) {
                let (low, high) = row.split_at(row.len() / 2);
                let ((low, low_rest), (high, high_rest)) = (low.as_chunks(), high.as_chunks());
                let (out, out_rest) = out.as_chunks_mut();
                for ((low, high), out) in low.iter().zip(high).zip(out) {
                    pack_lanes::<S, N>(simd, low, high, &factors, out);
                }
                for ((low, high), out) in low_rest.iter().zip(high_rest).zip(out_rest) {
                    *out = pack(low * factors[0], high * factors[0]);
                }
            }
        }
    }

    /// Values of a whole span into pairs.
    #[inline(always)]
    fn pair_values<S: Pairs, const N: usize>(&mut self, simd: S, head_dim: usize) {
        let (strips, _) = self.value_scales.as_chunks_mut::<LANES>();
        for (strip, scales) in strips.iter_mut().enumerate() {
            let mut most = [0f32; LANES];
            for row in self.rows.chunks_exact(head_dim) {
                let values = &row.as_chunks::<LANES>().0[strip];
                for lane in 0..LANES {
                    let value = values[lane].abs();
                    most[lane] = if value > most[lane] { value } else { most[lane] };
                }
            }
            let factors = most.map(|most| factor(most, SMALL));
            let rows = self.rows.chunks_exact(2 * head_dim).zip(self.values.chunks_exact_mut(head_dim));
            for (rows, out) in rows {
                let (low, high) = rows.split_at(head_dim);
                let (low, high) = (&low.as_chunks::<LANES>().0[strip], &high.as_chunks::<LANES>().0[strip]);
                let out = &mut out.as_chunks_mut::<LANES>().0[strip];
                pack_lanes::<S, N>(simd, low, high, &factors, out);
            }
            *scales = most.map(|most| most / SMALL);
        }
    }
}

/// Tokens of the `len` from `first` on that come before `end`.
#[inline(always)]
fn within(end: usize, first: usize, len: usize) -> usize {
    end.saturating_sub(first).min(len)
}

impl Tile<'_> {
    /// Takes in the span from token `first` on.
    #[inline(always)]
    fn take<S: Pairs, const N: usize>(
        &mut self,
        simd: S,
        span: &Span<'_>,
        first: usize,
        Scratch { weights, pairs }: &mut Scratch,
    ) {
        let (all, any) = (within(self.all, first, SPAN), within(self.any, first, SPAN));
        if any == 0 {
            return;
        }
        if N == 1 {
            self.score::<S, 8, N>(simd, span, first, &mut weights[..any.next_multiple_of(8)]);
        } else {
            self.score::<S, 4, N>(simd, span, first, &mut weights[..any.next_multiple_of(4)]);
        }
        let weights = &mut weights[..any];
        for weights in &mut *weights {
            power::<S, N>(simd, weights, self.most);
        }
        self.count::<S, N>(simd, first, all, weights);
        if let Ok(weights) = (&*weights).try_into() {
            if N == 1 {
                self.mix_whole::<S, 8, N>(simd, span, first, weights, pairs);
            } else {
                self.mix_whole::<S, 4, N>(simd, span, first, weights, pairs);
            }
        }
        if all < SPAN {
            self.mix_part::<S, N>(simd, span, first, weights);
        }
    }

    /// Scores of the first keys of a span, `K` at a time; minus infinity where a row does not see one. What was added up
    /// is scaled to the largest.
    #[inline(always)]
    fn score<S: Pairs, const K: usize, const N: usize>(
        &mut self,
        simd: S,
        span: &Span<'_>,
        first: usize,
        scores: &mut [[f32; LANES]],
    ) {
        let (lasts, scale) = (vectors::<S, N>(self.lasts), vectors::<S, N>(self.scale));
        let mut most = *vectors::<S, N>(self.most);
        let keys = span.keys.chunks_exact(K * self.queries.len()).zip(span.key_scales.as_chunks::<K>().0);
        for (((keys, scales), scores), first) in keys.zip(scores.as_chunks_mut::<K>().0).zip((first..).step_by(K)) {
            let mut sums = dots::<S, K, N>(simd, self.queries, keys);
            for k in 0..K {
                for v in 0..N {
                    let worth = simd.mul_f32s(scale[v], simd.splat_f32s(scales[k]));
                    sums[k][v] = simd.mul_f32s(sums[k][v], worth);
                }
            }
            if first + K > self.all {
                for (sums, token) in sums.iter_mut().zip(first..) {
                    let token = simd.splat_f32s(token as f32);
                    for v in 0..N {
                        let is_seen = simd.less_than_or_equal_f32s(token, lasts[v]);
                        sums[v] = simd.select_f32s(is_seen, sums[v], simd.splat_f32s(f32::NEG_INFINITY));
                    }
                }
            }
            for k in 0..K {
                for v in 0..N {
                    most[v] = simd.max_f32s(most[v], sums[k][v]);
                }
                *vectors_mut::<S, N>(&mut scores[k]) = sums[k];
            }
        }
        let mut factors = *self.most;
        *vectors_mut::<S, N>(self.most) = most;
        power::<S, N>(simd, &mut factors, self.most);
        if factors[..N * S::F32_LANES].iter().any(|factor| *factor != 1.0) {
            let factors = vectors::<S, N>(&factors);
            for sums in self.sums.iter_mut().chain([&mut *self.total]) {
                let sums = vectors_mut::<S, N>(sums);
                for v in 0..N {
                    sums[v] = simd.mul_f32s(sums[v], factors[v]);
                }
            }
        }
    }

    /// Adds the weights up.
    #[inline(always)]
    fn count<S: Pairs, const N: usize>(&mut self, simd: S, first: usize, all: usize, weights: &[[f32; LANES]]) {
        let (full, partial) = weights.split_at(all);
        let total = vectors_mut::<S, N>(self.total);
        for weights in full {
            let weights = vectors::<S, N>(weights);
            for v in 0..N {
                total[v] = simd.add_f32s(total[v], weights[v]);
            }
        }
        let lasts = vectors::<S, N>(self.lasts);
        for (token, weights) in (first + all..).zip(partial) {
            let (weights, token) = (vectors::<S, N>(weights), simd.splat_f32s(token as f32));
            for v in 0..N {
                let is_seen = simd.less_than_or_equal_f32s(token, lasts[v]);
                total[v] = simd.select_f32s(is_seen, simd.add_f32s(total[v], weights[v]), total[v]);
            }
        }
    }

    /// Adds a span's values, `E` elements at a time, for the rows that see all of it.
    #[inline(always)]
    fn mix_whole<S: Pairs, const E: usize, const N: usize>(
        &mut self,
        simd: S,
        span: &Span<'_>,
        first: usize,
        weights: &[[f32; LANES]; SPAN],
        pairs: &mut [[i32; LANES]; SPAN / 2],
    ) {
        let worth = quantise::<S, N>(simd, weights, pairs);
        let (worth, lasts) = (vectors::<S, N>(&worth), vectors::<S, N>(self.lasts));
        let end = simd.splat_f32s((first + SPAN - 1) as f32);
        let is_whole: [_; N] = std::array::from_fn(|v| simd.less_than_or_equal_f32s(end, lasts[v]));
        let head_dim = self.sums.len();
        let strips = self.sums.as_chunks_mut::<E>().0.iter_mut().zip(span.value_scales.as_chunks::<E>().0);
        for (strip, (out, scales)) in strips.enumerate() {
            let sums = weigh::<S, E, N>(simd, pairs, span.values, head_dim, strip);
            for e in 0..E {
                let out = vectors_mut::<S, N>(&mut out[e]);
                for v in 0..N {
                    let scale = simd.mul_f32s(worth[v], simd.splat_f32s(scales[e]));
                    let next = simd.mul_add_f32s(sums[e][v], scale, out[v]);
                    out[v] = simd.select_f32s(is_whole[v], next, out[v]);
                }
            }
        }
    }

    /// Adds the values of the first tokens of a span for the rows that do not see all of it.
    #[inline(always)]
    fn mix_part<S: Pairs, const N: usize>(&mut self, simd: S, span: &Span<'_>, first: usize, weights: &[[f32; LANES]]) {
        let end = (first + SPAN - 1) as f32;
        let part = Part {
            first,
            weights,
            values: span.rows,
            head_dim: self.sums.len(),
            lasts: self.lasts.map(|last| if last < end { last } else { -1.0 }),
        };
        if N == 1 {
            for (strip, sums) in self.sums.as_chunks_mut().0.iter_mut().enumerate() {
                part.add::<S, 8, N>(simd, strip, sums);
            }
        } else {
            for (strip, sums) in self.sums.as_chunks_mut().0.iter_mut().enumerate() {
                part.add::<S, 4, N>(simd, strip, sums);
            }
        }
    }
}

/// The tokens of a span that some rows see without seeing all of it.
struct Part<'a> {
    first: usize,
    /// `[token]`.
    weights: &'a [[f32; LANES]],
    /// `[token][head dim]`.
    values: &'a [f32],
    head_dim: usize,
    /// The last token of those rows; before the first for all others.
    lasts: [f32; LANES],
}

impl Part<'_> {
    /// Adds `E` elements, the `strip`th such.
    #[inline(always)]
    fn add<S: Simd, const E: usize, const N: usize>(&self, simd: S, strip: usize, out: &mut [[f32; LANES]; E]) {
        let lasts = vectors::<S, N>(&self.lasts);
        let mut sums: [[S::f32s; N]; E] = std::array::from_fn(|element| *vectors::<S, N>(&out[element]));
        let tokens = self.weights.iter().zip(self.values.chunks_exact(self.head_dim));
        for (token, (weights, values)) in (self.first..).zip(tokens) {
            let (weights, token) = (vectors::<S, N>(weights), simd.splat_f32s(token as f32));
            let values = &values.as_chunks::<E>().0[strip];
            let are_seen: [_; N] = std::array::from_fn(|v| simd.less_than_or_equal_f32s(token, lasts[v]));
            for e in 0..E {
                let value = simd.splat_f32s(values[e]);
                for v in 0..N {
                    let next = simd.mul_add_f32s(value, weights[v], sums[e][v]);
                    sums[e][v] = simd.select_f32s(are_seen[v], next, sums[e][v]);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            *vectors_mut::<S, N>(out) = sums;
        }
    }
}

/// Weights of a span as pairs of tokens; what an integer is worth.
#[inline(always)]
fn quantise<S: Pairs, const N: usize>(
    simd: S,
    weights: &[[f32; LANES]; SPAN],
    pairs: &mut [[i32; LANES]; SPAN / 2],
) -> [f32; LANES] {
    let mut most = [0f32; LANES];
    for weights in weights {
        let (most, weights) = (vectors_mut::<S, N>(&mut most), vectors::<S, N>(weights));
        for v in 0..N {
            most[v] = simd.max_f32s(most[v], weights[v]);
        }
    }
    let factors = most.map(|most| factor(most, LARGE));
    for ([low, high], out) in weights.as_chunks::<2>().0.iter().zip(pairs) {
        pack_lanes::<S, N>(simd, low, high, &factors, out);
    }
    most.map(|most| most / LARGE)
}

#[inline(always)]
fn vectors<S: Simd, const N: usize>(lanes: &[f32; LANES]) -> &[S::f32s; N] {
    &S::as_simd_f32s(lanes).0.as_chunks().0[0]
}

#[inline(always)]
fn vectors_mut<S: Simd, const N: usize>(lanes: &mut [f32; LANES]) -> &mut [S::f32s; N] {
    &mut S::as_mut_simd_f32s(lanes).0.as_chunks_mut().0[0]
}

#[inline(always)]
fn integers<S: Simd, const N: usize>(lanes: &[i32; LANES]) -> &[S::i32s; N] {
    &S::as_simd_i32s(lanes).0.as_chunks().0[0]
}

/// Integers as floats.
#[inline(always)]
fn floats<S: Simd, const N: usize>(integers: [S::i32s; N]) -> [S::f32s; N] {
    let (mut out, integers): ([f32; LANES], &[i32]) = ([0.0; LANES], bytemuck::cast_slice(&integers));
    out.iter_mut().zip(integers).for_each(|(out, integer)| *out = *integer as f32);
    *vectors::<S, N>(&out)
}

/// Products of `K` keys with the queries of a tile, in units of their scales.
#[inline(always)]
fn dots<S: Pairs, const K: usize, const N: usize>(
    simd: S,
    queries: &[[i32; LANES]],
    keys: &[i32],
) -> [[S::f32s; N]; K] {
    let len = queries.len();
    let keys: [&[i32]; K] = std::array::from_fn(|key| &keys[key * len..][..len]);
    let mut out = [[simd.splat_f32s(0.0); N]; K];
    for (chunk, queries) in queries.chunks(TERMS / 2).enumerate() {
        let keys = keys.map(|key| &key[chunk * TERMS / 2..][..queries.len()]);
        let mut sums = [[simd.splat_i32s(0); N]; K];
        for (pair, queries) in queries.iter().enumerate() {
            let queries = integers::<S, N>(queries);
            for k in 0..K {
                let key = simd.splat_i32s(keys[k][pair]);
                for v in 0..N {
                    sums[k][v] = simd.multiply_add(key, queries[v], sums[k][v]);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            let sums = floats::<S, N>(sums);
            for v in 0..N {
                out[v] = simd.add_f32s(out[v], sums[v]);
            }
        }
    }
    out
}

/// `E` elements of a span's values, the `strip`th such, by the weights, in units of their scales.
#[inline(always)]
fn weigh<S: Pairs, const E: usize, const N: usize>(
    simd: S,
    weights: &[[i32; LANES]; SPAN / 2],
    values: &[i32],
    head_dim: usize,
    strip: usize,
) -> [[S::f32s; N]; E] {
    let mut sums = [[simd.splat_i32s(0); N]; E];
    for (weights, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
        let weights = integers::<S, N>(weights);
        let values = &values.as_chunks::<E>().0[strip];
        for e in 0..E {
            let value = simd.splat_i32s(values[e]);
            for v in 0..N {
                sums[e][v] = simd.multiply_add(value, weights[v], sums[e][v]);
            }
        }
    }
    sums.map(floats::<S, N>)
}

#[cfg(test)]
mod tests;
