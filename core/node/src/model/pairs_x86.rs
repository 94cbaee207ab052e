//! Products of 16-bit integers, two to a 32-bit lane, with the vectors of x86.
//!
//! Integer sums are exact, so every machine gets the same bits from them.

use pulp::x86::{V3, V4};
use pulp::{Arch, NullaryFnOnce, Scalar, Simd, cast};

/// Vectors that multiply pairs.
pub(super) trait Pairs: Simd {
    /// `sum + low(a) × low(b) + high(a) × high(b)` in each lane; the caller keeps it within 32 bits.
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, sum: Self::i32s) -> Self::i32s;
}

impl Pairs for V4 {
    #[inline(always)]
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, sum: Self::i32s) -> Self::i32s {
        let products = self.multiply_wrapping_add_adjacent_i16x32(cast(a), cast(b));
        cast(self.add_u32s(cast(products), cast(sum)))
    }
}

impl Pairs for V3 {
    #[inline(always)]
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, sum: Self::i32s) -> Self::i32s {
        let products = self.multiply_wrapping_add_adjacent_i16x16(cast(a), cast(b));
        cast(self.add_u32s(cast(products), cast(sum)))
    }
}

impl Pairs for Scalar {
    #[inline(always)]
    fn multiply_add(self, a: i32, b: i32, sum: i32) -> i32 {
        let ([low, high], [other_low, other_high]): ([i16; 2], [i16; 2]) = (cast(a), cast(b));
        sum + i32::from(low) * i32::from(other_low) + i32::from(high) * i32::from(other_high)
    }
}

/// Something to do with the widest vectors.
pub(super) trait Work {
    /// Does it. Implementations are `#[inline(always)]`, to be compiled for these vectors.
    fn run<S: Pairs>(self, simd: S);
}

struct Call<S, W>(S, W);

impl<S: Pairs, W: Work> NullaryFnOnce for Call<S, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.1.run(self.0);
    }
}

/// Does `work` with the widest vectors of `arch`.
pub(super) fn dispatch(arch: Arch, work: impl Work) {
    match arch {
        Arch::V4(simd) => simd.vectorize(Call(simd, work)),
        Arch::V3(simd) => simd.vectorize(Call(simd, work)),
        _ => work.run(Scalar),
    }
}
