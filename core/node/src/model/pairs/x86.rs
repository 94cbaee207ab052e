//! The vectors of x86, which have an instruction for it.

use pulp::x86::{V3, V4};
use pulp::{Arch, NullaryFnOnce, Scalar, Simd, cast};

use super::{Pairs, Work};

impl Pairs for V4 {
    type Half = V3;

    #[inline(always)]
    fn half(self) -> V3 {
        *self
    }

    #[inline(always)]
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, sum: Self::i32s) -> Self::i32s {
        let products = self.multiply_wrapping_add_adjacent_i16x32(cast(a), cast(b));
        cast(self.add_u32s(cast(products), cast(sum)))
    }
}

impl Pairs for V3 {
    type Half = V3;

    #[inline(always)]
    fn half(self) -> V3 {
        self
    }

    #[inline(always)]
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, sum: Self::i32s) -> Self::i32s {
        let products = self.multiply_wrapping_add_adjacent_i16x16(cast(a), cast(b));
        cast(self.add_u32s(cast(products), cast(sum)))
    }
}

impl Pairs for Scalar {
    type Half = Scalar;

    #[inline(always)]
    fn half(self) -> Scalar {
        self
    }
}

struct Call<S, W>(S, W);

impl<S: Pairs, W: Work> NullaryFnOnce for Call<S, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.1.run(self.0);
    }
}

pulp::simd_type!({
    /// [`V4`] on a processor that multiplies and adds pairs in one instruction, which the compiler then takes.
    struct V4Fused {
        sse: f!("sse"),
        sse2: f!("sse2"),
        fxsr: f!("fxsr"),
        sse3: f!("sse3"),
        ssse3: f!("ssse3"),
        sse4_1: f!("sse4.1"),
        sse4_2: f!("sse4.2"),
        popcnt: f!("popcnt"),
        avx: f!("avx"),
        avx2: f!("avx2"),
        bmi1: f!("bmi1"),
        bmi2: f!("bmi2"),
        fma: f!("fma"),
        lzcnt: f!("lzcnt"),
        avx512f: f!("avx512f"),
        avx512bw: f!("avx512bw"),
        avx512cd: f!("avx512cd"),
        avx512dq: f!("avx512dq"),
        avx512vl: f!("avx512vl"),
        avx512vnni: f!("avx512vnni"),
    }
});

/// Does `work` with the widest vectors of `arch`.
pub(in super::super) fn dispatch(arch: Arch, work: impl Work) {
    match arch {
        Arch::V4(simd) => match V4Fused::try_new() {
            Some(fused) => fused.vectorize(Call(simd, work)),
            None => simd.vectorize(Call(simd, work)),
        },
        Arch::V3(simd) => simd.vectorize(Call(simd, work)),
        _ => work.run(Scalar),
    }
}
