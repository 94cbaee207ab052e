//! Attention of query heads over the pages of one KV head.
//!
//! A tile is [`LANES`] rows, a lane each; a row is one query head of one token. Keys and values are broadcast, element by
//! element, so pages are read as they lie and widened once for all tiles of a task. Scores of all tiles are kept between
//! the pass over the keys, which finds the largest of each row, and the pass over the values.
//!
//! A row's result is one chain of fused multiply-adds per score and per element, in the order of the elements and of the
//! tokens, over the tokens that the row sees and no others: it does not depend on the rows beside it.

use millpond_core::layout::Side;
use pulp::{Simd, WithSimd};

use super::kernel::{LANES, Workers, by_width, exp2, grown};

/// Tokens that are widened together, if pages are not longer: enough that sums stay in registers, and they in the cache.
const SPAN: usize = 64;

/// Attention of some rows of one request with one KV head. Rows are query heads of tokens, `group` per token, token-major.
pub(super) struct Attention<'a> {
    /// Queries, `[token][head of the group][head dim]`, scaled so that a weight is 2^score.
    pub(super) queries: &'a [f32],
    /// Results, shaped alike.
    pub(super) out: &'a mut [f32],
    /// Elements of a head, a multiple of [`LANES`].
    pub(super) head_dim: usize,
    /// Query heads that share the KV head.
    pub(super) group: usize,
    /// Position of the first token.
    pub(super) start: usize,
    /// Tokens of a page, a multiple of [`LANES`].
    pub(super) block: usize,
}

/// Reads the keys or values of one page into rows of `head_dim` values.
pub(super) trait ReadPage {
    /// Reads the first `tokens` rows of page `page`.
    fn read(&self, side: Side, page: usize, tokens: usize, rows: &mut [f32]);
}

impl Attention<'_> {
    /// Computes all rows with the widest vectors.
    pub(super) fn run(self, workers: &Workers, pages: &(impl ReadPage + ?Sized)) {
        let span = self.block * (SPAN / self.block).max(1);
        let span_len = span * self.head_dim;
        let tile_len = (self.end().next_multiple_of(span) + 2 * self.head_dim + 3) * LANES;
        let tiles = (self.queries.len() / self.head_dim).div_ceil(LANES);
        SCRATCH.with_borrow_mut(|scratch| {
            let (rows, tiles) = grown(scratch, span_len + tiles * tile_len).split_at_mut(span_len);
            workers.arch.dispatch(Run { job: self, pages, rows, tiles, tile_len });
        });
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
    static SCRATCH: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

struct Run<'a, 'b, P: ReadPage + ?Sized> {
    job: Attention<'a>,
    pages: &'b P,
    /// Keys or values of a span, `[token][head dim]`.
    rows: &'b mut [f32],
    /// What each [`Tile`] borrows, `tile_len` values each.
    tiles: &'b mut [f32],
    tile_len: usize,
}

/// [`LANES`] rows; lanes beyond the last row compute something that nobody reads.
struct Tile<'a> {
    /// `[head dim]`.
    queries: &'a mut [[f32; LANES]],
    /// Values by weights, `[head dim]`.
    sums: &'a mut [[f32; LANES]],
    /// The largest score.
    most: &'a mut [f32; LANES],
    /// The sum of weights.
    total: &'a mut [f32; LANES],
    /// `[token]`: scores, then weights.
    scores: &'a mut [[f32; LANES]],
    /// The last token that each row sees.
    lasts: &'a mut [f32; LANES],
    /// Tokens that all rows see.
    all: usize,
    /// Tokens that any row sees.
    any: usize,
}

impl<P: ReadPage + ?Sized> WithSimd for Run<'_, '_, P> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        by_width!(self.run::<S>(simd));
    }
}

impl<P: ReadPage + ?Sized> Run<'_, '_, P> {
    #[inline(always)]
    fn run<S: Simd, const N: usize>(mut self, simd: S) {
        let Attention { head_dim, block, .. } = self.job;
        let (tiles, end) = (self.tiles.len() / self.tile_len, self.job.end());
        for index in 0..tiles {
            self.begin(index);
        }
        for side in [Side::Key, Side::Value] {
            for first in (0..end).step_by(self.rows.len() / head_dim) {
                for (page, rows) in
                    (first / block..end.div_ceil(block)).zip(self.rows.chunks_exact_mut(block * head_dim))
                {
                    self.pages.read(side, page, (end - page * block).min(block), rows);
                }
                for index in 0..tiles {
                    let mut tile = tile(&self.job, self.tiles, self.tile_len, index);
                    match side {
                        Side::Key => tile.score::<S, N>(simd, self.rows, first),
                        Side::Value => tile.mix::<S, N>(simd, self.rows, first),
                    }
                }
            }
        }
        for index in 0..tiles {
            let tile = tile(&self.job, self.tiles, self.tile_len, index);
            let rows = self.job.out.chunks_exact_mut(head_dim).skip(index * LANES).take(LANES);
            for (lane, row) in rows.enumerate() {
                let scale = 1.0 / tile.total[lane];
                row.iter_mut().zip(&*tile.sums).for_each(|(out, sums)| *out = sums[lane] * scale);
            }
        }
    }

    fn begin(&mut self, index: usize) {
        let tile = tile(&self.job, self.tiles, self.tile_len, index);
        tile.sums.fill([0.0; LANES]);
        tile.queries.fill([0.0; LANES]);
        *tile.most = [f32::NEG_INFINITY; LANES];
        *tile.total = [0.0; LANES];
        *tile.lasts = std::array::from_fn(|lane| (self.job.sees(index * LANES + lane) - 1) as f32);
        let rows = self.job.queries.chunks_exact(self.job.head_dim).skip(index * LANES).take(LANES);
        for (lane, row) in rows.enumerate() {
            tile.queries.iter_mut().zip(row).for_each(|(lanes, query)| lanes[lane] = *query);
        }
    }
}

#[inline(always)]
fn tile<'a>(job: &Attention<'_>, tiles: &'a mut [f32], tile_len: usize, index: usize) -> Tile<'a> {
    let (lanes, _) = tiles[index * tile_len..][..tile_len].as_chunks_mut::<LANES>();
    let (queries, lanes) = lanes.split_at_mut(job.head_dim);
    let (sums, lanes) = lanes.split_at_mut(job.head_dim);
    let [most, total, lasts, scores @ ..] = lanes else { unreachable!("a tile has three lanes more") };
    let (all, any) = (job.sees(index * LANES), job.sees(index * LANES + LANES - 1));
    Tile { queries, sums, most, total, lasts, scores, all, any }
}

/// Tokens of the `len` from `first` on that come before `end`.
#[inline(always)]
fn within(end: usize, first: usize, len: usize) -> usize {
    end.saturating_sub(first).min(len)
}

impl Tile<'_> {
    /// Scores for the keys from token `first` on.
    #[inline(always)]
    fn score<S: Simd, const N: usize>(&mut self, simd: S, keys: &[f32], first: usize) {
        if N == 1 {
            self.score_by::<S, 8, N>(simd, keys, first);
        } else {
            self.score_by::<S, 4, N>(simd, keys, first);
        }
    }

    /// The same, `K` keys at a time.
    #[inline(always)]
    fn score_by<S: Simd, const K: usize, const N: usize>(&mut self, simd: S, keys: &[f32], first: usize) {
        let any = within(self.any, first, keys.len() / self.queries.len()).next_multiple_of(K);
        let (scores, _) = self.scores[first..][..any].as_chunks_mut::<K>();
        let lasts = vectors::<S, N>(self.lasts);
        let mut most = *vectors::<S, N>(self.most);
        let keys = keys.chunks_exact(K * self.queries.len());
        for ((keys, scores), first) in keys.zip(scores).zip((first..).step_by(K)) {
            let mut sums = dots::<S, K, N>(simd, self.queries, keys);
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
        *vectors_mut::<S, N>(self.most) = most;
    }

    /// Turns the scores from token `first` on into weights and adds its values by them.
    #[inline(always)]
    fn mix<S: Simd, const N: usize>(&mut self, simd: S, values: &[f32], first: usize) {
        let len = values.len() / self.sums.len();
        let (all, any) = (within(self.all, first, len), within(self.any, first, len));
        let weights = &mut self.scores[first..][..any];
        for weights in &mut *weights {
            for (weight, most) in weights.iter_mut().zip(&*self.most) {
                *weight = exp2(*weight - most);
            }
        }
        let head_dim = self.sums.len();
        let (full, partial) = weights.split_at_mut(all);
        if N == 1 {
            for (strip, sums) in self.sums.as_chunks_mut().0.iter_mut().enumerate() {
                add::<S, 8, N>(simd, full, values, head_dim, strip, sums);
            }
        } else {
            for (strip, sums) in self.sums.as_chunks_mut().0.iter_mut().enumerate() {
                add::<S, 4, N>(simd, full, values, head_dim, strip, sums);
            }
        }
        let total = vectors_mut::<S, N>(self.total);
        for weights in full {
            let weights = vectors::<S, N>(weights);
            for v in 0..N {
                total[v] = simd.add_f32s(total[v], weights[v]);
            }
        }
        let lasts = vectors::<S, N>(self.lasts);
        for (index, weights) in (all..).zip(partial) {
            let weights = vectors::<S, N>(weights);
            let token = simd.splat_f32s((first + index) as f32);
            for v in 0..N {
                let is_seen = simd.less_than_or_equal_f32s(token, lasts[v]);
                total[v] = simd.select_f32s(is_seen, simd.add_f32s(total[v], weights[v]), total[v]);
                for (sums, value) in self.sums.iter_mut().zip(&values[index * head_dim..][..head_dim]) {
                    let sum = &mut vectors_mut::<S, N>(sums)[v];
                    let next = simd.mul_add_f32s(weights[v], simd.splat_f32s(*value), *sum);
                    *sum = simd.select_f32s(is_seen, next, *sum);
                }
            }
        }
    }
}

#[inline(always)]
fn vectors<S: Simd, const N: usize>(lanes: &[f32; LANES]) -> &[S::f32s; N] {
    &S::as_simd_f32s(lanes).0.as_chunks().0[0]
}

#[inline(always)]
fn vectors_mut<S: Simd, const N: usize>(lanes: &mut [f32; LANES]) -> &mut [S::f32s; N] {
    &mut S::as_mut_simd_f32s(lanes).0.as_chunks_mut().0[0]
}

/// Products of `K` keys with the queries of a tile.
#[inline(always)]
fn dots<S: Simd, const K: usize, const N: usize>(simd: S, queries: &[[f32; LANES]], keys: &[f32]) -> [[S::f32s; N]; K] {
    let head_dim = queries.len();
    let keys: [&[f32]; K] = std::array::from_fn(|key| &keys[key * head_dim..][..head_dim]);
    let mut sums = [[simd.splat_f32s(0.0); N]; K];
    for (element, queries) in queries.iter().enumerate() {
        let queries = vectors::<S, N>(queries);
        for k in 0..K {
            let key = simd.splat_f32s(keys[k][element]);
            for v in 0..N {
                sums[k][v] = simd.mul_add_f32s(key, queries[v], sums[k][v]);
            }
        }
    }
    sums
}

/// Adds `E` elements of some tokens' values, the `strip`th such, by their weights.
#[inline(always)]
fn add<S: Simd, const E: usize, const N: usize>(
    simd: S,
    weights: &[[f32; LANES]],
    values: &[f32],
    head_dim: usize,
    strip: usize,
    out: &mut [[f32; LANES]; E],
) {
    let mut sums: [[S::f32s; N]; E] = std::array::from_fn(|element| *vectors::<S, N>(&out[element]));
    for (weights, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
        let weights = vectors::<S, N>(weights);
        let values = &values.as_chunks::<E>().0[strip];
        for e in 0..E {
            let value = simd.splat_f32s(values[e]);
            for v in 0..N {
                sums[e][v] = simd.mul_add_f32s(value, weights[v], sums[e][v]);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        *vectors_mut::<S, N>(out) = sums;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD_DIM: usize = 32;
    const GROUP: usize = 3;
    const BLOCK: usize = 16;

    fn value(seed: usize) -> f32 {
        ((seed * 2_654_435_761) % 1000) as f32 / 250.0 - 2.0
    }

    fn row(side: Side, token: usize) -> impl Iterator<Item = f32> {
        let seed = if side == Side::Key { 11 } else { 7_000_003 };
        (0..HEAD_DIM).map(move |element| value(seed + token * 977 + element))
    }

    struct Rows;

    impl ReadPage for Rows {
        fn read(&self, side: Side, page: usize, tokens: usize, rows: &mut [f32]) {
            for (token, out) in rows.chunks_exact_mut(HEAD_DIM).take(tokens).enumerate() {
                out.iter_mut().zip(row(side, page * BLOCK + token)).for_each(|(out, value)| *out = value);
            }
        }
    }

    fn queries(tokens: std::ops::Range<usize>) -> Vec<f32> {
        (tokens.start * GROUP * HEAD_DIM..tokens.end * GROUP * HEAD_DIM).map(|place| value(place + 3) / 4.0).collect()
    }

    fn attend(tokens: std::ops::Range<usize>) -> Vec<f32> {
        let queries = queries(tokens.clone());
        let mut out = vec![f32::NAN; queries.len()];
        let job = Attention {
            queries: &queries,
            out: &mut out,
            head_dim: HEAD_DIM,
            group: GROUP,
            start: tokens.start,
            block: BLOCK,
        };
        job.run(&Workers::new(1), &Rows);
        out
    }

    /// One row, as the module's documentation has it.
    fn plain(query: &[f32], sees: usize) -> Vec<f32> {
        let score = |token| row(Side::Key, token).zip(query).fold(0f32, |sum, (key, query)| key.mul_add(*query, sum));
        let mut weights: Vec<f32> = (0..sees).map(score).collect();
        let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|weight| *weight = exp2(*weight - most));
        let scale = 1.0 / weights.iter().fold(0f32, |sum, weight| sum + weight);
        let mut sums = [0f32; HEAD_DIM];
        for (token, weight) in weights.iter().enumerate() {
            sums.iter_mut().zip(row(Side::Value, token)).for_each(|(sum, value)| *sum = value.mul_add(*weight, *sum));
        }
        sums.iter().map(|sum| sum * scale).collect()
    }

    #[test]
    fn each_row_equals_the_plain_chain_however_rows_are_cut() {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let all = attend(0..70);
        for (index, (query, out)) in queries(0..70).chunks(HEAD_DIM).zip(all.chunks(HEAD_DIM)).enumerate() {
            assert_eq!(bits(out), bits(&plain(query, index / GROUP + 1)), "row {index}");
        }
        for cuts in [vec![0, 1, 2, 3, 70], vec![0, 16, 32, 70], vec![0, 5, 17, 18, 47, 69, 70]] {
            for cut in cuts.windows(2) {
                let part = &all[cut[0] * GROUP * HEAD_DIM..cut[1] * GROUP * HEAD_DIM];
                assert_eq!(bits(&attend(cut[0]..cut[1])), bits(part), "{cut:?}");
            }
        }
    }
}
