//! Vectors that are left to the compiler.

use pulp::{Arch, Simd, WithSimd};

use super::{Pairs, Work};

impl<S: Simd> Pairs for S {
    type Half = S;

    #[inline(always)]
    fn half(self) -> S {
        self
    }
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
pub(in super::super) fn dispatch(arch: Arch, work: impl Work) {
    arch.dispatch(Call(work));
}
