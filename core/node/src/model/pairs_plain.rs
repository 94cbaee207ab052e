//! Products of 16-bit integers, two to a 32-bit lane, for machines whose vectors are left to the compiler.
//!
//! Integer sums are exact, so every machine gets the same bits from them.

use bytemuck::cast_slice;
use pulp::{Arch, Simd, WithSimd};

/// Vectors that multiply pairs.
pub(super) trait Pairs: Simd {
    /// `sum + low(a) × low(b) + high(a) × high(b)` in each lane; the caller keeps it within 32 bits.
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, sum: Self::i32s) -> Self::i32s;
}

impl<S: Simd> Pairs for S {
    #[inline(always)]
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, mut sum: Self::i32s) -> Self::i32s {
        let (a, b): ([Self::i32s; 1], [Self::i32s; 1]) = ([a], [b]);
        let (a, b): (&[i16], &[i16]) = (cast_slice(&a), cast_slice(&b));
        let sums: &mut [i32] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut sum));
        for (lane, sum) in sums.iter_mut().enumerate() {
            let product = |half: usize| i32::from(a[2 * lane + half]) * i32::from(b[2 * lane + half]);
            *sum += product(0) + product(1);
        }
        sum
    }
}

/// Something to do with the widest vectors.
pub(super) trait Work {
    /// Does it. Implementations are `#[inline(always)]`, to be compiled for these vectors.
    fn run<S: Pairs>(self, simd: S);
}

struct Call<W>(W);

impl<W: Work> WithSimd for Call<W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        self.0.run(simd);
    }
}

/// Does `work` with the widest vectors of `arch`.
pub(super) fn dispatch(arch: Arch, work: impl Work) {
    arch.dispatch(Call(work));
}
