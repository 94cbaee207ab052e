//! What is computed row by row: norms and gates, out of panels into the tiles that the next product reads.

use pulp::{Simd, WithSimd};

use super::kernel::{LANES, TILE, Tiles, Workers, exp};

/// Root-mean-square norm of each row of `hidden`, which has `rows` of them.
pub(super) fn norm(workers: &Workers, hidden: &[f32], rows: usize, weights: &[f32], epsilon: f32, x: &mut Tiles) {
    let (hidden, _) = hidden.as_chunks();
    x.fill(workers, rows, weights.len(), 4, |first, tile| {
        workers.arch.dispatch(Norm { hidden, rows, weights, epsilon, first, tile });
    });
}

/// `silu(gate) × up` of each row; `product` has all gates, then all ups.
pub(super) fn gate(workers: &Workers, product: &[f32], rows: usize, x: &mut Tiles) {
    let (gates, ups) = product.split_at(product.len() / 2);
    let (gates, ups) = (gates.as_chunks().0, ups.as_chunks().0);
    x.fill(workers, rows, gates.len() / rows * LANES, 2, |first, tile| {
        workers.arch.dispatch(Gate { gates, ups, rows, first, tile });
    });
}

/// `into += values`.
pub(super) fn add(workers: &Workers, into: &mut [f32], values: &[f32]) {
    workers.arch.dispatch(Add { into, values });
}

struct Norm<'a> {
    hidden: &'a [[f32; LANES]],
    rows: usize,
    weights: &'a [f32],
    epsilon: f32,
    /// The first row of the tile.
    first: usize,
    tile: &'a mut [[f32; TILE]],
}

impl WithSimd for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { hidden, rows, weights, epsilon, first, tile } = self;
        let (weights, _) = weights.as_chunks::<LANES>();
        for row in first..rows.min(first + TILE) {
            let mut squares = [0f32; LANES];
            for panel in 0..weights.len() {
                for (square, value) in squares.iter_mut().zip(&hidden[panel * rows + row]) {
                    *square += value * value;
                }
            }
            let mut half = LANES / 2;
            while half > 0 {
                for lane in 0..half {
                    squares[lane] += squares[lane + half];
                }
                half /= 2;
            }
            let scale = 1.0 / (squares[0] / (weights.len() * LANES) as f32 + epsilon).sqrt();
            for (panel, (weights, columns)) in weights.iter().zip(tile.chunks_exact_mut(LANES)).enumerate() {
                let values = &hidden[panel * rows + row];
                for lane in 0..LANES {
                    columns[lane][row - first] = values[lane] * scale * weights[lane];
                }
            }
        }
    }
}

struct Gate<'a> {
    gates: &'a [[f32; LANES]],
    ups: &'a [[f32; LANES]],
    rows: usize,
    /// The first row of the tile.
    first: usize,
    tile: &'a mut [[f32; TILE]],
}

impl WithSimd for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { gates, ups, rows, first, tile } = self;
        for (panel, columns) in tile.chunks_exact_mut(LANES).enumerate() {
            for row in first..rows.min(first + TILE) {
                let (gates, ups) = (&gates[panel * rows + row], &ups[panel * rows + row]);
                let mut values = [0f32; LANES];
                for lane in 0..LANES {
                    values[lane] = gates[lane] / (1.0 + exp(-gates[lane])) * ups[lane];
                }
                for lane in 0..LANES {
                    columns[lane][row - first] = values[lane];
                }
            }
        }
    }
}

struct Add<'a> {
    into: &'a mut [f32],
    values: &'a [f32],
}

impl WithSimd for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.into.iter_mut().zip(self.values).for_each(|(into, value)| *into += *value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(seed: usize) -> f32 {
        ((seed * 2_654_435_761) % 1000) as f32 / 250.0 - 2.0
    }

    /// All values of a tiled matrix, row by row, by multiplication with the identity.
    fn rows(x: &Tiles) -> Vec<Vec<f32>> {
        let identity: Vec<f32> = (0..x.columns * x.columns).map(|at| f32::from(at % (x.columns + 1) == 0)).collect();
        let (workers, panels) = (Workers::new(1), super::super::kernel::Panels::from_rows(&identity, x.columns));
        let mut out = vec![0.0; panels.panels() * x.rows * LANES];
        panels.product(&workers, x, &mut out);
        let at = |row: usize, column: usize| out[(column / LANES * x.rows + row) * LANES + column % LANES];
        (0..x.rows).map(|row| (0..x.columns).map(|column| at(row, column)).collect()).collect()
    }

    #[test]
    fn norms_and_gates_equal_their_formulas_and_no_row_depends_on_another() {
        const WIDTH: usize = 32;
        let at = |row: usize, column: usize, rows: usize| (column / LANES * rows + row) * LANES + column % LANES;
        let weights: Vec<f32> = (0..WIDTH).map(|column| value(column + 77)).collect();
        let compute = |first: usize, count: usize, threads| {
            let workers = Workers::new(threads);
            let mut product = vec![0.0; 2 * WIDTH * count];
            for row in 0..count {
                for column in 0..2 * WIDTH {
                    product[at(row, column, count)] = value((first + row) * 131 + column);
                }
            }
            let (mut normed, mut gated) = (Tiles::default(), Tiles::default());
            norm(&workers, &product[..WIDTH * count], count, &weights, 0.25, &mut normed);
            gate(&workers, &product, count, &mut gated);
            (rows(&normed), rows(&gated))
        };
        let (normed, gated) = compute(0, 100, 2);
        for row in 0..100 {
            let (one_normed, one_gated) = compute(row, 1, 1);
            assert!(one_normed[0] == normed[row] && one_gated[0] == gated[row], "row {row}");
            let input = |column: usize| f64::from(value(row * 131 + column));
            let mean = (0..WIDTH).map(|column| input(column).powi(2)).sum::<f64>() / WIDTH as f64;
            for column in 0..WIDTH {
                let scaled = input(column) / (mean + 0.25).sqrt() * f64::from(weights[column]);
                let silu = input(column) / (1.0 + (-input(column)).exp()) * input(WIDTH + column);
                for (ours, real) in [(normed[row][column], scaled), (gated[row][column], silu)] {
                    assert!((f64::from(ours) - real).abs() < 1e-5, "{ours} {real}");
                }
            }
        }
    }
}
