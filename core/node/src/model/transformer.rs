//! The llama architecture over pages: norms, rotary positions, grouped-query attention, gated feed-forward.
//!
//! It reads and writes KV through [`KvPages`] and computes all rows of all pieces together; what each row comes out as does
//! not depend on the others (see `kernel`). Activations are panel-major: `[column / LANES][row][LANES]`.

use std::sync::Arc;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use millpond_core::layout::{Dtype, Layout, Side};
use parking_lot::Mutex;

use super::attention::{Attention, CHAINS, ReadRows};
use super::kernel::{LANES, Panels, Tiles, Workers, from_half, grown};
use super::rowwise;
use super::{Card, KvPages, ModelError, Piece, check};

/// Part of every revision: changes with each change that changes a bit of what is computed, so that stored KV is not mixed.
pub(super) const ARITHMETIC: u32 = 4;
/// Most query tokens that one attention task handles.
const QUERIES_MAX: usize = 128;
/// Tokens before a piece from which on threads share its rows by chains; before, chains are too short to be of one length.
const CHAINED: usize = 256;

/// The numbers of the architecture that a layout and limits do not say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    /// Length of a hidden state; a multiple of [`LANES`].
    pub(super) width: usize,
    /// Query heads; a multiple of the KV heads.
    pub(super) heads: usize,
    /// Inner length of the feed-forward; a multiple of [`LANES`].
    pub(super) feed_forward: usize,
    /// Base of the rotary frequencies.
    pub(super) rope_base: f64,
    /// Keeps a norm from dividing by zero.
    pub(super) norm_epsilon: f32,
}

/// Weights of one layer.
pub(super) struct LayerWeights {
    pub(super) attention_norm: Vec<f32>,
    /// Queries, keys and values in one matrix: rows of all query heads, of all key heads, of all value heads.
    pub(super) query_key_value: Panels,
    pub(super) attention_out: Panels,
    pub(super) feed_forward_norm: Vec<f32>,
    /// The gate's rows, then the up projection's.
    pub(super) gate_up: Panels,
    pub(super) down: Panels,
}

/// A llama with its weights.
pub(super) struct Transformer {
    card: Card,
    config: Config,
    layers: Vec<LayerWeights>,
    embedding: Panels,
    final_norm: Vec<f32>,
    /// `None`: the embedding.
    head: Option<Panels>,
    /// Cosine and sine of each position and pair of elements.
    rotations: Arc<[(f32, f32)]>,
    workers: Workers,
    /// Buffers of calls that ended, for those to come.
    buffers: Mutex<Vec<Buffers>>,
}

#[derive(Default)]
struct Buffers {
    hidden: Vec<f32>,
    x: Tiles,
    product: Vec<f32>,
    /// `[KV head][row][head of the group][head dim]`.
    queries: Vec<f32>,
    attended: Vec<f32>,
    /// Of the chains of attention that threads share.
    states: Vec<[f32; LANES]>,
    row: Vec<f32>,
}

/// Where the rows of a piece lie among all rows of a call.
#[derive(Clone, Copy)]
struct Rows {
    piece: usize,
    first: usize,
    count: usize,
    start: usize,
}

impl Transformer {
    pub(super) fn new(
        card: Card,
        config: Config,
        layers: Vec<LayerWeights>,
        embedding: Panels,
        final_norm: Vec<f32>,
        head: Option<Panels>,
        threads: usize,
    ) -> Self {
        let head_dim = card.layout.shape().head_dim as usize;
        assert!((card.layout.shape().block_tokens as usize).is_multiple_of(LANES), "keys of a block are whole panels");
        assert!(head_dim.is_multiple_of(LANES) && config.width.is_multiple_of(LANES), "shapes are whole panels");
        let pairs = head_dim / 2;
        #[allow(clippy::cast_possible_truncation, reason = "f32 is the precision of activations")]
        let narrow = |value: f64| value as f32;
        let rotations = (0..card.limits.context_tokens).flat_map(|position| {
            (0..pairs).map(move |pair| {
                let frequency = libm::pow(config.rope_base, -((2 * pair) as f64) / head_dim as f64);
                let angle = f64::from(position) * frequency;
                (narrow(libm::cos(angle)), narrow(libm::sin(angle)))
            })
        });
        let (rotations, workers) = (rotations.collect(), Workers::new(threads));
        Self { card, config, layers, embedding, final_norm, head, rotations, workers, buffers: Mutex::default() }
    }

    pub(super) fn card(&self) -> &Card {
        &self.card
    }

    pub(super) fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
        check(&self.card, pieces)?;
        if pieces.is_empty() {
            return Ok(());
        }
        let mut buffers = self.buffers.lock().pop().unwrap_or_default();
        let result = self.workers.enter(|| self.pass(pieces, &mut buffers));
        self.buffers.lock().push(buffers);
        result
    }

    fn pass(&self, pieces: &mut [Piece<'_>], buffers: &mut Buffers) -> Result<(), ModelError> {
        let mut total = 0;
        let mut places = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.iter().enumerate() {
            let count = piece.tokens.len();
            places.push(Rows { piece: index, first: total, count, start: piece.start as usize });
            total += count;
        }
        self.embed(pieces, total, buffers);
        for layer in 0..self.layers.len() {
            self.layer(layer, pieces, &places, total, buffers)?;
        }
        self.logits(pieces, &places, total, buffers);
        Ok(())
    }

    fn embed(&self, pieces: &[Piece<'_>], total: usize, buffers: &mut Buffers) {
        buffers.hidden.clear();
        buffers.hidden.resize(total * self.config.width, 0.0);
        let tokens = pieces.iter().flat_map(|piece| piece.tokens);
        for (row, token) in tokens.enumerate() {
            self.embedding.row(*token as usize, |column, weight| {
                buffers.hidden[(column / LANES * total + row) * LANES + column % LANES] = weight;
            });
        }
    }

    fn layer(
        &self,
        index: usize,
        pieces: &mut [Piece<'_>],
        places: &[Rows],
        total: usize,
        buffers: &mut Buffers,
    ) -> Result<(), ModelError> {
        let (weights, epsilon) = (&self.layers[index], self.config.norm_epsilon);
        let layer = u32::try_from(index).expect("layouts have few layers");
        let Buffers { hidden, x, product, queries, attended, states, row } = buffers;
        rowwise::norm(&self.workers, hidden, total, &weights.attention_norm, epsilon, x);
        let heads = self.product(&weights.query_key_value, x, product);
        self.rotate(heads, total, places, queries);
        for rows in places {
            let kv = &mut *pieces[rows.piece].kv;
            kv.open_layer(layer)?;
            check_pages(&self.card.layout, kv, layer, rows.start + rows.count)?;
            self.keep(heads, total, rows, kv, layer, row);
            kv.close_layer(layer)?;
        }
        attended.resize(queries.len(), 0.0);
        self.attend(pieces, layer, &mut self.units(places, queries, attended), states);
        self.gather(attended, total, x);
        rowwise::add(&self.workers, hidden, self.product(&weights.attention_out, x, product));
        rowwise::norm(&self.workers, hidden, total, &weights.feed_forward_norm, epsilon, x);
        rowwise::gate(&self.workers, self.product(&weights.gate_up, x, product), total, x);
        rowwise::add(&self.workers, hidden, self.product(&weights.down, x, product));
        Ok(())
    }

    fn product<'a>(&self, weights: &Panels, x: &Tiles, buffer: &'a mut Vec<f32>) -> &'a mut [f32] {
        let out = grown(buffer, weights.panels() * x.rows * LANES);
        weights.product(&self.workers, x, out);
        out
    }

    /// Turns queries and keys by their positions; queries go, scaled, to where attention reads them.
    fn rotate(&self, product: &mut [f32], total: usize, places: &[Rows], queries: &mut Vec<f32>) {
        let (group, head_dim, heads) = (self.group(), self.head_dim(), self.config.heads);
        queries.resize(heads * total * head_dim, 0.0);
        let scale = std::f32::consts::LOG2_E / (head_dim as f32).sqrt();
        for rows in places {
            for row in 0..rows.count {
                let turns = &self.rotations[(rows.start + row) * head_dim / 2..][..head_dim / 2];
                for head in 0..heads + self.kv_heads() {
                    for strip in 0..head_dim / LANES {
                        let panel = head * head_dim / LANES + strip;
                        let values = &mut product[(panel * total + rows.first + row) * LANES..][..LANES];
                        let (pairs, _) = values.as_chunks_mut::<2>();
                        for ([a, b], (cos, sin)) in pairs.iter_mut().zip(&turns[strip * LANES / 2..]) {
                            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                        }
                        if head < heads {
                            let (kv_head, member) = (head / group, head % group);
                            let place = ((kv_head * total + rows.first + row) * group + member) * head_dim;
                            let out = &mut queries[place + strip * LANES..][..LANES];
                            out.iter_mut().zip(values).for_each(|(out, value)| *out = *value * scale);
                        }
                    }
                }
            }
        }
    }

    /// Writes keys and values of a piece's rows into its pages.
    fn keep(&self, product: &[f32], total: usize, rows: &Rows, kv: &mut dyn KvPages, layer: u32, row: &mut Vec<f32>) {
        let layout = &self.card.layout;
        let (block, kv_width) = (layout.shape().block_tokens as usize, self.kv_heads() * self.head_dim());
        let keys = self.config.heads * self.head_dim();
        for (side, first) in [(Side::Key, keys), (Side::Value, keys + kv_width)] {
            for index in 0..rows.count {
                row.clear();
                for panel in first / LANES..(first + kv_width) / LANES {
                    row.extend_from_slice(&product[(panel * total + rows.first + index) * LANES..][..LANES]);
                }
                let position = rows.start + index;
                let page = kv.page_mut(small(position / block), layer);
                let range = layout.row_range(side, small(position % block));
                write_row(layout.shape().dtype, row, &mut page[place(range.start)..place(range.end)]);
            }
        }
    }

    /// What attention computes together, of which the threads get equal parts.
    fn units<'a>(&self, places: &[Rows], queries: &'a [f32], attended: &'a mut [f32]) -> Vec<Unit<'a>> {
        let (group, head_dim, threads) = (self.group(), self.head_dim(), self.workers.threads());
        // A task reads all pages of its KV head, so most are whole: as many to each thread. The others are shared by all.
        let whole = self.kv_heads() * places.len() / threads * threads;
        let mut units = Vec::new();
        let (mut queries, mut attended) = (queries, attended);
        for kv_head in 0..self.kv_heads() {
            for (place, rows) in places.iter().enumerate() {
                let index = kv_head * places.len() + place;
                let is_whole = index < whole;
                let by_chains = !is_whole && rows.start >= CHAINED;
                let parts = match (is_whole, by_chains) {
                    (true, _) => 1,
                    (false, true) => threads.div_ceil(CHAINS),
                    (false, false) => threads,
                };
                let (mut done, most) = (0, rows.count.div_ceil(parts).min(QUERIES_MAX));
                while done < rows.count {
                    let len = most.min(rows.count - done) * group * head_dim;
                    let (query, rest) = queries.split_at(len);
                    let (out, rest_out) = attended.split_at_mut(len);
                    let job = Attention { queries: query, head_dim, group, start: rows.start + done };
                    let thread = if is_whole { index } else { done / most * if by_chains { CHAINS } else { 1 } };
                    units.push(Unit { kv_head, piece: rows.piece, job, out, by_chains, thread });
                    (queries, attended) = (rest, rest_out);
                    done += most;
                }
            }
        }
        units
    }

    fn attend(&self, pieces: &[Piece<'_>], layer: u32, units: &mut [Unit<'_>], states: &mut Vec<[f32; LANES]>) {
        let states_len = |unit: &Unit<'_>| if unit.by_chains { CHAINS * unit.job.states_len() } else { 0 };
        let mut rest = grown(states, units.iter().map(states_len).sum());
        let mut tasks = Vec::with_capacity(CHAINS * units.len());
        for unit in &mut *units {
            let (states, after) = std::mem::take(&mut rest).split_at_mut(states_len(unit));
            rest = after;
            let chains = states.chunks_exact_mut(unit.job.states_len()).enumerate();
            tasks.extend(chains.map(|(chain, states)| (unit.thread + chain, unit.place(), Part::Chain(chain, states))));
            if !unit.by_chains {
                tasks.push((unit.thread, unit.place(), Part::Whole(&mut *unit.out)));
            }
        }
        // Threads take neighbours.
        tasks.sort_by_key(|task| task.0 % self.workers.threads());
        self.workers.each(&mut tasks, 1, |_, (_, (kv_head, piece, job), part)| {
            let pages = HeadPages { kv: &*pieces[*piece].kv, layout: &self.card.layout, layer, kv_head: *kv_head };
            match part {
                Part::Whole(out) => job.run(&self.workers, &pages, out),
                Part::Chain(chain, states) => job.chains(&self.workers, &pages, *chain..*chain + 1, states),
            }
        });
        let mut rest = &mut states[..];
        for unit in units.iter_mut().filter(|unit| unit.by_chains) {
            let (states, after) = rest.split_at_mut(states_len(unit));
            rest = after;
            unit.job.merge(&self.workers, states, unit.out);
        }
    }

    /// Attention's results, which lie by KV head, into tiles.
    fn gather(&self, attended: &[f32], total: usize, x: &mut Tiles) {
        let row_len = self.group() * self.head_dim();
        x.shape(total, self.kv_heads() * row_len);
        for (index, values) in attended.chunks_exact(row_len).enumerate() {
            x.put(index % total, index / total * row_len, values);
        }
    }

    fn logits(&self, pieces: &mut [Piece<'_>], places: &[Rows], total: usize, buffers: &mut Buffers) {
        let wanted: Vec<Rows> = places.iter().filter(|rows| pieces[rows.piece].logits.is_some()).copied().collect();
        if wanted.is_empty() {
            return;
        }
        let Buffers { hidden, x, product, row, .. } = buffers;
        row.clear();
        for panel in hidden.chunks_exact(total * LANES) {
            for rows in &wanted {
                row.extend_from_slice(&panel[(rows.first + rows.count - 1) * LANES..][..LANES]);
            }
        }
        rowwise::norm(&self.workers, row, wanted.len(), &self.final_norm, self.config.norm_epsilon, x);
        let product = self.product(self.head.as_ref().unwrap_or(&self.embedding), x, product);
        for (index, rows) in wanted.iter().enumerate() {
            if let Some(logits) = pieces[rows.piece].logits.as_deref_mut() {
                for (panel, lanes) in logits.chunks_mut(LANES).enumerate() {
                    let from = &product[(panel * wanted.len() + index) * LANES..];
                    lanes.copy_from_slice(&from[..lanes.len()]);
                }
            }
        }
    }

    fn head_dim(&self) -> usize {
        self.card.layout.shape().head_dim as usize
    }

    fn kv_heads(&self) -> usize {
        self.card.layout.shape().kv_head_count as usize
    }

    fn group(&self) -> usize {
        self.config.heads / self.kv_heads()
    }
}

/// Rows of attention that are computed together.
struct Unit<'a> {
    kv_head: usize,
    piece: usize,
    job: Attention<'a>,
    out: &'a mut [f32],
    /// Whether threads share its chains.
    by_chains: bool,
    /// Of its first task; counted beyond the number of threads.
    thread: usize,
}

impl<'a> Unit<'a> {
    fn place(&self) -> (usize, usize, Attention<'a>) {
        (self.kv_head, self.piece, self.job)
    }
}

/// What a task computes of a [`Unit`].
enum Part<'a> {
    /// Its results.
    Whole(&'a mut [f32]),
    /// The states of one chain.
    Chain(usize, &'a mut [[f32; LANES]]),
}

/// One layer and KV head of a request's pages.
struct HeadPages<'a> {
    kv: &'a dyn KvPages,
    layout: &'a Layout,
    layer: u32,
    kv_head: usize,
}

impl ReadRows for HeadPages<'_> {
    #[inline(always)]
    fn read(&self, side: Side, first: usize, rows: &mut [f32]) {
        let shape = self.layout.shape();
        let (head_dim, block) = (shape.head_dim as usize, shape.block_tokens as usize);
        let (mut token, mut rows) = (first, rows);
        while !rows.is_empty() {
            let count = (block - token % block).min(rows.len() / head_dim);
            let (now, rest) = rows.split_at_mut(count * head_dim);
            let range = self.layout.row_range(side, small(token % block));
            let page = &self.kv.page(small(token / block), self.layer)[place(range.start)..];
            self.read_page(page, count, now);
            (token, rows) = (token + count, rest);
        }
    }
}

impl HeadPages<'_> {
    /// The head's part of the first `count` rows of all heads.
    #[inline(always)]
    fn read_page(&self, page: &[u8], count: usize, rows: &mut [f32]) {
        let head_dim = self.layout.shape().head_dim as usize;
        let row_len = self.layout.shape().kv_head_count as usize * head_dim;
        match self.layout.shape().dtype {
            Dtype::F32 => {
                let values: &[f32] = bytemuck::cast_slice(&page[..count * row_len * 4]);
                for (row, values) in rows.chunks_exact_mut(head_dim).zip(values.chunks_exact(row_len)) {
                    row.copy_from_slice(&values[self.kv_head * head_dim..][..head_dim]);
                }
            }
            _ => {
                let values: &[u16] = bytemuck::cast_slice(&page[..count * row_len * 2]);
                for (row, values) in rows.chunks_exact_mut(head_dim).zip(values.chunks_exact(row_len)) {
                    let values = &values[self.kv_head * head_dim..][..head_dim];
                    row.iter_mut().zip(values).for_each(|(out, bits)| *out = from_half(*bits));
                }
            }
        }
    }
}

/// Checks the pages of the first `tokens` tokens, so that reading them cannot fail.
fn check_pages(layout: &Layout, kv: &dyn KvPages, layer: u32, tokens: usize) -> Result<(), ModelError> {
    let expected = layout.layer_len();
    for page in 0..layout.pages_for(tokens as u64) {
        let bytes = kv.page(small(place(page)), layer);
        if bytes.len() as u64 != expected || !bytes.as_ptr().cast::<u32>().is_aligned() {
            return Err(ModelError::PageShape { len: bytes.len(), expected });
        }
    }
    Ok(())
}

fn write_row(dtype: Dtype, row: &[f32], bytes: &mut [u8]) {
    match dtype {
        Dtype::F32 => bytes.copy_from_slice(bytemuck::cast_slice(row)),
        _ => bytemuck::cast_slice_mut::<u8, u16>(bytes).reinterpret_cast_mut::<half::f16>().convert_from_f32_slice(row),
    }
}

/// Positions and pages are bounded by the context, a `u32`.
fn small(value: usize) -> u32 {
    u32::try_from(value).expect("bounded by the context")
}

/// Offsets in a page fit the address space: the page does.
fn place(value: u64) -> usize {
    usize::try_from(value).expect("pages fit the address space")
}
