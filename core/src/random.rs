//! Numbers that look random and depend on a seed alone.
//!
//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): one addition and
//! one mix a number, the same on every machine. Not for secrets.

/// A stream of numbers from a seed.
///
/// ```
/// use millpond_core::random::Random;
/// let (mut one, mut same) = (Random::new(7), Random::new(7));
/// assert_eq!(one.next_u64(), same.next_u64());
/// assert!((3..5).contains(&one.below(2).saturating_add(3)));
/// assert!((0.0..1.0).contains(&one.unit()));
/// ```
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 uniform bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A whole number in `0..bound`, 0 if `bound` is 0; uniform but for a bias below `bound` / 2^64.
    pub const fn below(&mut self, bound: u64) -> u64 {
        let wide = (self.next_u64() as u128) * (bound as u128);
        let [.., h0, h1, h2, h3, h4, h5, h6, h7] = wide.to_le_bytes();
        u64::from_le_bytes([h0, h1, h2, h3, h4, h5, h6, h7])
    }

    /// A number in `0.0..1.0`, a multiple of 2^-53.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// A span with mean 1 until the next of events that come independently of each other (exponential).
    pub fn exponential(&mut self) -> f64 {
        -libm::log(1.0 - self.unit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_paper() {
        // The first outputs of the reference program for seed 1234567.
        let mut random = Random::new(1_234_567);
        let first: [u64; 3] = core::array::from_fn(|_| random.next_u64());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn means_are_where_they_should_be() {
        let mut random = Random::new(1);
        let (mut below, mut unit, mut exponential) = (0, 0.0, 0.0);
        for _ in 0..100_000 {
            below += random.below(10);
            unit += random.unit();
            exponential += random.exponential();
        }
        assert!((445_000..455_000).contains(&below), "{below}");
        assert!((49_500.0..50_500.0).contains(&unit), "{unit}");
        assert!((98_500.0..101_500.0).contains(&exponential), "{exponential}");
    }
}
