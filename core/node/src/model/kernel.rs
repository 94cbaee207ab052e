//! Matrix products over packed weights, and what else the transformer's arithmetic stands on.
//!
//! Each output is one chain of fused multiply-adds whose order is fixed by the shapes of the model: never by how many rows
//! are computed together, by threads or by the width of the machine's vectors. Weights are packed in panels of [`LANES`]
//! outputs, quantised ones as 8-bit integers with a scale and an offset per [`BLOCK`] inputs, and are widened panel by
//! panel into a buffer that stays in the cache while all rows use it: a larger batch pays that once.
//!
//! Activations are panel-major as well: `[column / LANES][row][LANES]`. The inputs of a product are [`Tiles`].

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Outputs of one panel; also the logical width of every sum over lanes.
pub(super) const LANES: usize = 16;
/// Inputs that share a scale and an offset.
pub(super) const BLOCK: usize = 32;
/// Rows computed together.
pub(super) const TILE: usize = 8;

/// Threads of a model; without any, the caller's thread does all.
pub(super) struct Workers {
    pool: Option<rayon::ThreadPool>,
    pub(super) arch: Arch,
}

impl Workers {
    /// `threads` threads; 0 and 1: the caller's.
    pub(super) fn new(threads: usize) -> Self {
        let pool = (threads > 1).then(|| {
            let named = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|n| format!("model-{n}"));
            named.build().ok()
        });
        Self { pool: pool.flatten(), arch: Arch::new() }
    }

    /// How many there are.
    pub(super) fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Runs all of `work` (and whatever it gives to [`Workers::each`]) on these threads.
    pub(super) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Calls `work` for each item, at least `few` of them in a row on one thread.
    pub(super) fn each<T: Send>(&self, items: &mut [T], few: usize, work: impl Fn(usize, &mut T) + Sync + Send) {
        if self.pool.is_some() && items.len() > few {
            items.par_iter_mut().with_min_len(few).enumerate().for_each(|(index, item)| work(index, item));
        } else {
            items.iter_mut().enumerate().for_each(|(index, item)| work(index, item));
        }
    }
}

/// A weight matrix, `outputs` times `inputs`, packed for products with any number of rows.
pub(super) struct Panels {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    weights: Weights,
}

enum Weights {
    /// `[panel][input][lane]`.
    Whole(Vec<f32>),
    /// Weight = integer × scale + offset; integers as above, scales and offsets `[panel][input / BLOCK][lane]`.
    Blocks { integers: Vec<i8>, scales: Vec<[f32; LANES]>, offsets: Vec<[f32; LANES]> },
}

/// One block of a quantised row: [`BLOCK`] weights that are `integer × scale + offset`.
#[allow(dead_code, reason = "the loader of quantised files makes them")]
#[derive(Clone, Copy)]
pub(super) struct Quantised {
    pub(super) integers: [i8; BLOCK],
    pub(super) scale: f32,
    pub(super) offset: f32,
}

impl Panels {
    /// From rows of `inputs` weights, an output each.
    pub(super) fn from_rows(rows: &[f32], inputs: usize) -> Self {
        let outputs = rows.len() / inputs;
        let mut packed = vec![0.0; outputs.next_multiple_of(LANES) * inputs];
        for (output, row) in rows.chunks_exact(inputs).enumerate() {
            let panel = &mut packed[output / LANES * inputs * LANES..][..inputs * LANES];
            for (lanes, weight) in panel.chunks_exact_mut(LANES).zip(row) {
                lanes[output % LANES] = *weight;
            }
        }
        Self { inputs, outputs, weights: Weights::Whole(packed) }
    }

    /// From quantised rows of `inputs` weights (a multiple of [`BLOCK`]), an output each.
    #[allow(dead_code, reason = "the loader of quantised files makes them")]
    pub(super) fn from_blocks(blocks: impl Iterator<Item = Quantised>, outputs: usize, inputs: usize) -> Self {
        let (per_row, panels) = (inputs / BLOCK, outputs.div_ceil(LANES));
        let mut integers = vec![0i8; panels * inputs * LANES];
        let mut scales = vec![[0f32; LANES]; panels * per_row];
        let mut offsets = scales.clone();
        for (index, block) in blocks.take(outputs * per_row).enumerate() {
            let (output, within) = (index / per_row, index % per_row);
            let (panel, lane) = (output / LANES, output % LANES);
            let place = panel * per_row + within;
            scales[place][lane] = block.scale;
            offsets[place][lane] = block.offset;
            let lanes = &mut integers[place * BLOCK * LANES..][..BLOCK * LANES];
            for (lanes, integer) in lanes.chunks_exact_mut(LANES).zip(block.integers) {
                lanes[lane] = integer;
            }
        }
        Self { inputs, outputs, weights: Weights::Blocks { integers, scales, offsets } }
    }

    /// The weights of one output, as an embedding: `put(input, weight)`.
    pub(super) fn row(&self, output: usize, mut put: impl FnMut(usize, f32)) {
        let (panel, lane) = (output / LANES, output % LANES);
        for input in 0..self.inputs {
            let place = (panel * self.inputs + input) * LANES + lane;
            put(
                input,
                match &self.weights {
                    Weights::Whole(weights) => weights[place],
                    Weights::Blocks { integers, scales, offsets } => {
                        let block = place / (BLOCK * LANES);
                        f32::from(integers[place]).mul_add(scales[block][lane], offsets[block][lane])
                    }
                },
            );
        }
    }

    pub(super) fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// `out = x · weightsᵀ`, panel-major, all panels whole: `panels() * x.rows * LANES` values.
    pub(super) fn product(&self, workers: &Workers, x: &Tiles, out: &mut [f32]) {
        assert!(x.columns == self.inputs && out.len() == self.panels() * x.rows * LANES, "shapes fit");
        let mut chunks: Vec<&mut [f32]> = out.chunks_exact_mut(x.rows * LANES).collect();
        let few = (32 * 1024 / (self.inputs * x.rows)).clamp(1, 16);
        workers.each(&mut chunks, few, |panel, out| {
            SCRATCH.with_borrow_mut(|scratch| {
                let scratch = grown(scratch, self.inputs * LANES);
                workers.arch.dispatch(PanelProduct { weights: self, panel, x, scratch, out });
            });
        });
    }
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// The first `len` values of `buffer`, which grows to that once.
pub(super) fn grown<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// Rows to be multiplied, `[row / TILE][column][row % TILE]`.
#[derive(Default)]
pub(super) struct Tiles {
    pub(super) rows: usize,
    pub(super) columns: usize,
    values: Vec<[f32; TILE]>,
}

impl Tiles {
    /// Makes room for `rows` times `columns` values; what was there is unspecified.
    pub(super) fn shape(&mut self, rows: usize, columns: usize) {
        (self.rows, self.columns) = (rows, columns);
        grown(&mut self.values, rows.div_ceil(TILE) * columns);
    }

    /// Shapes them and calls `work` with the first row of each tile and its columns, for `few` tiles or more on one thread.
    pub(super) fn fill(
        &mut self,
        workers: &Workers,
        rows: usize,
        columns: usize,
        few: usize,
        work: impl Fn(usize, &mut [[f32; TILE]]) + Sync + Send,
    ) {
        self.shape(rows, columns);
        let values = &mut self.values[..rows.div_ceil(TILE) * columns];
        let mut tiles: Vec<&mut [[f32; TILE]]> = values.chunks_exact_mut(columns).collect();
        workers.each(&mut tiles, few, |index, tile| work(index * TILE, tile));
    }

    /// Puts consecutive columns of one row.
    #[inline(always)]
    pub(super) fn put(&mut self, row: usize, column: usize, values: &[f32]) {
        let tile = &mut self.values[row / TILE * self.columns + column..][..values.len()];
        for (lanes, value) in tile.iter_mut().zip(values) {
            lanes[row % TILE] = *value;
        }
    }
}

struct PanelProduct<'a> {
    weights: &'a Panels,
    panel: usize,
    x: &'a Tiles,
    scratch: &'a mut [f32],
    out: &'a mut [f32],
}

/// Calls a method with the number of vectors that hold [`LANES`] values.
macro_rules! by_width {
    ($self:ident . $method:ident :: <$simd_type:ident> ($simd:ident)) => {
        match $simd_type::F32_LANES {
            16 => $self.$method::<$simd_type, 1>($simd),
            8 => $self.$method::<$simd_type, 2>($simd),
            4 => $self.$method::<$simd_type, 4>($simd),
            _ => $self.$method::<$simd_type, 16>($simd),
        }
    };
}

pub(super) use by_width;

impl WithSimd for PanelProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        by_width!(self.run::<S>(simd));
    }
}

impl PanelProduct<'_> {
    #[inline(always)]
    fn run<S: Simd, const N: usize>(self, simd: S) {
        let (inputs, panel) = (self.weights.inputs, self.panel);
        let weights = match &self.weights.weights {
            Weights::Whole(weights) => &weights[panel * inputs * LANES..][..inputs * LANES],
            Weights::Blocks { integers, scales, offsets } => {
                let blocks = panel * (inputs / BLOCK)..(panel + 1) * (inputs / BLOCK);
                let integers = &integers[panel * inputs * LANES..][..inputs * LANES];
                widen::<S, N>(simd, integers, &scales[blocks.clone()], &offsets[blocks], self.scratch);
                &*self.scratch
            }
        };
        for (tile, out) in self.out.chunks_mut(TILE * LANES).enumerate() {
            let x = &self.x.values[tile * inputs..][..inputs];
            tile_product::<S, N>(simd, x, weights, out.as_chunks_mut::<LANES>().0);
        }
    }
}

#[inline(always)]
fn widen<S: Simd, const N: usize>(
    simd: S,
    integers: &[i8],
    scales: &[[f32; LANES]],
    offsets: &[[f32; LANES]],
    out: &mut [f32],
) {
    let blocks = integers.chunks_exact(BLOCK * LANES).zip(scales.iter().zip(offsets));
    for ((integers, (scale, offset)), out) in blocks.zip(out.chunks_exact_mut(BLOCK * LANES)) {
        for (out, integer) in out.iter_mut().zip(integers) {
            *out = f32::from(*integer);
        }
        let (scale, offset) = (S::as_simd_f32s(scale).0, S::as_simd_f32s(offset).0);
        let (lanes, _) = S::as_mut_simd_f32s(out).0.as_chunks_mut::<N>();
        for lanes in lanes {
            for v in 0..N {
                lanes[v] = simd.mul_add_f32s(lanes[v], scale[v], offset[v]);
            }
        }
    }
}

/// The rows of one tile, as many as `out` has, times one panel.
#[inline(always)]
fn tile_product<S: Simd, const N: usize>(simd: S, x: &[[f32; TILE]], weights: &[f32], out: &mut [[f32; LANES]]) {
    match out.len() {
        1 => rows::<S, 1, N>(simd, x, 0, weights, out),
        2 => rows::<S, 2, N>(simd, x, 0, weights, out),
        3..=4 => rows::<S, 4, N>(simd, x, 0, weights, out),
        _ if N == 1 => rows::<S, 8, N>(simd, x, 0, weights, out),
        _ => {
            let (first, second) = out.split_at_mut(4);
            rows::<S, 4, N>(simd, x, 0, weights, first);
            rows::<S, 4, N>(simd, x, 4, weights, second);
        }
    }
}

/// Up to `R` rows of one tile times one panel.
#[inline(always)]
fn rows<S: Simd, const R: usize, const N: usize>(
    simd: S,
    x: &[[f32; TILE]],
    first: usize,
    weights: &[f32],
    out: &mut [[f32; LANES]],
) {
    let (weights, _) = S::as_simd_f32s(weights).0.as_chunks::<N>();
    let mut sums = [[simd.splat_f32s(0.0); N]; R];
    for (x, weights) in x.iter().zip(weights) {
        for r in 0..R {
            let x = simd.splat_f32s(x[first + r]);
            for v in 0..N {
                sums[r][v] = simd.mul_add_f32s(x, weights[v], sums[r][v]);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        S::as_mut_simd_f32s(out).0.copy_from_slice(&sums);
    }
}

/// 1.5 × 2^23: adding it leaves the nearest integer in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// e^x to about 2 units in the last place for x in -87..=88, clamped outside. Vectorises: no branch, no call.
/// Cody-Waite reduction and the minimax polynomial of Cephes' `expf`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
    let mut p = 1.987_569_1e-4f32;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, coefficient);
    }
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127).wrapping_sub(ROUND.to_bits()) << 23);
    (p * r).mul_add(r, r + 1.0) * scale
}

/// 2^x to about 2 units in the last place for x in -125..=127, clamped below. Vectorises.
#[cfg(test)]
pub(super) fn exp2(x: f32) -> f32 {
    let x = if x < -125.0 { -125.0 } else { x };
    let shifted = x + ROUND;
    let r = x - (shifted - ROUND);
    let p = EXP2.into_iter().reduce(|p, coefficient| p.mul_add(r, coefficient)).unwrap_or_default();
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// [`exp2`] of each lane, the same bits.
#[inline(always)]
pub(super) fn exp2_vector<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let x = simd.max_f32s(x, simd.splat_f32s(-125.0));
    let shifted = simd.add_f32s(x, simd.splat_f32s(ROUND));
    let r = simd.sub_f32s(x, simd.sub_f32s(shifted, simd.splat_f32s(ROUND)));
    let mut p = simd.splat_f32s(EXP2[0]);
    for coefficient in &EXP2[1..] {
        p = simd.mul_add_f32s(p, r, simd.splat_f32s(*coefficient));
    }
    let power = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(p), power))
}

/// The polynomial of Cephes' `exp2f`, highest power first.
const EXP2: [f32; 7] =
    [1.535_336_2e-4, 1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];

/// A binary16 as an f32, exactly, without a branch: its exponent is rebased by one multiplication.
#[inline(always)]
pub(super) fn from_half(bits: u16) -> f32 {
    // 2^112
    const REBASE: f32 = f32::from_bits(0x7780_0000);
    // The sign comes down with the extension, exponent and fraction with the shift.
    let wide = i32::from(bits.cast_signed()) << 13;
    f32::from_bits(wide.cast_unsigned() & 0x8fff_e000) * REBASE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_real_one() {
        for step in -8700..=8800i16 {
            let x = f32::from(step) / 100.0;
            let (ours, real) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours - real).abs() <= real * 4e-7, "{x}: {ours} {real}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn exp2_is_close_to_the_real_one() {
        for step in -12_500..=12_700i16 {
            let x = f32::from(step) / 100.0;
            let (ours, real) = (f64::from(exp2(x)), f64::from(x).exp2());
            assert!((ours - real).abs() <= real * 2.5e-7, "{x}: {ours} {real}");
        }
        assert!(exp2(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn every_finite_half_is_converted_exactly() {
        for bits in 0..=u16::MAX {
            let half = half::f16::from_bits(bits);
            if half.is_finite() {
                assert_eq!(from_half(bits).to_bits(), half.to_f32().to_bits(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn a_product_equals_the_plain_sum_and_does_not_depend_on_its_neighbours() {
        let (inputs, outputs) = (64, 40);
        let value = |seed: usize| ((seed * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
        let weights: Vec<f32> = (0..inputs * outputs).map(value).collect();
        let panels = Panels::from_rows(&weights, inputs);
        let row = |row: usize| -> Vec<f32> { (0..inputs).map(|column| value(row * 977 + column + 5)).collect() };
        let product = |rows: &[usize], threads| {
            let mut x = Tiles::default();
            x.shape(rows.len(), inputs);
            rows.iter().enumerate().for_each(|(place, r)| x.put(place, 0, &row(*r)));
            let mut out = vec![0.0; panels.panels() * rows.len() * LANES];
            let workers = Workers::new(threads);
            workers.enter(|| panels.product(&workers, &x, &mut out));
            out
        };
        let alone: Vec<Vec<f32>> = (0..21).map(|r| product(&[r], 1)).collect();
        for (r, alone) in alone.iter().enumerate() {
            for output in 0..outputs {
                let plain = (0..inputs).fold(0f32, |sum, i| row(r)[i].mul_add(weights[output * inputs + i], sum));
                assert_eq!(alone[output].to_bits(), plain.to_bits());
            }
        }
        for count in [2, 3, 5, 8, 13, 21] {
            let together = product(&(0..count).collect::<Vec<_>>(), 2);
            for (place, lanes) in together.chunks_exact(LANES).enumerate() {
                let (panel, r) = (place / count, place % count);
                assert_eq!(lanes, &alone[r][panel * LANES..][..LANES]);
            }
        }
    }

    #[test]
    fn quantised_weights_equal_their_widened_ones() {
        let (inputs, outputs) = (64, 17);
        let block = |n: usize| Quantised {
            integers: std::array::from_fn(|i| i8::try_from((n * 7 + i * 3) % 31).unwrap() - 15),
            scale: 0.25 + n as f32 / 64.0,
            offset: 0.5 - n as f32 / 32.0,
        };
        let panels = Panels::from_blocks((0..).map(block), outputs, inputs);
        let mut rows = vec![0.0; inputs * outputs];
        for output in 0..outputs {
            panels.row(output, |input, weight| rows[output * inputs + input] = weight);
            let first = block(output * 2);
            assert_eq!(rows[output * inputs + 3], f32::from(first.integers[3]) * first.scale + first.offset);
        }
        let whole = Panels::from_rows(&rows, inputs);
        let mut x = Tiles::default();
        x.shape(1, inputs);
        x.put(0, 0, &rows[..inputs]);
        let workers = Workers::new(1);
        let [mut a, mut b] = [(); 2].map(|()| vec![0.0; panels.panels() * LANES]);
        panels.product(&workers, &x, &mut a);
        whole.product(&workers, &x, &mut b);
        assert_eq!(a, b);
    }
}
