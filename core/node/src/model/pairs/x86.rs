//! The vectors of x86, which have an instruction for it.

use pulp::x86::{V3, V4};
use pulp::{Arch, NullaryFnOnce, Scalar, Simd, cast};

use super::{Pairs, Work};

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

impl Pairs for Scalar {}

struct Call<S, W>(S, W);

impl<S: Pairs, W: Work> NullaryFnOnce for Call<S, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.1.run(self.0);
    }
}

/// Does `work` with the widest vectors of `arch`.
pub(in super::super) fn dispatch(arch: Arch, work: impl Work) {
    match arch {
        Arch::V4(simd) => simd.vectorize(Call(simd, work)),
        Arch::V3(simd) => simd.vectorize(Call(simd, work)),
        _ => work.run(Scalar),
    }
}
