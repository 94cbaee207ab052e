//! Products of 16-bit integers, two to a 32-bit lane.
//!
//! Integer sums are exact, so every machine gets the same bits from them.

#[cfg_attr(target_arch = "x86_64", path = "pairs/x86.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "pairs/plain.rs")]
mod arch;

use bytemuck::{cast_slice, cast_slice_mut};
use pulp::Simd;

pub(super) use arch::dispatch;

/// Vectors that multiply pairs.
pub(super) trait Pairs: Simd {
    /// These vectors or shorter ones, which cost less where half of the lanes would be idle.
    type Half: Pairs;

    /// Those.
    fn half(self) -> Self::Half;

    /// `sum + low(a) × low(b) + high(a) × high(b)` in each lane; the caller keeps it within 32 bits.
    #[inline(always)]
    fn multiply_add(self, a: Self::i32s, b: Self::i32s, mut sum: Self::i32s) -> Self::i32s {
        let (a, b) = ([a], [b]);
        let (a, b): (&[i16], &[i16]) = (cast_slice(&a), cast_slice(&b));
        let sums: &mut [i32] = cast_slice_mut(std::slice::from_mut(&mut sum));
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
