//! Which token follows from logits.
//!
//! The draw depends on the seed and the token's position alone, so whichever node makes it, and however often a request
//! was paused, the answer is the same.

use millpond_core::wire::message::serve::Sampling;
use thiserror::Error;

/// A sampling parameter that makes no sense.
///
/// ```
/// use millpond_node::model::sample::SamplingError;
/// assert!(SamplingError::TopP(2.0).to_string().contains("0..=1"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// The temperature is negative or not a number.
    #[error("temperature {0} must be a number of at least 0; 0 is greedy")]
    Temperature(f32),
    /// `top_p` is outside 0..=1.
    #[error("top_p {0} must lie in 0..=1; 1 keeps every token")]
    TopP(f32),
}

/// Checks parameters that came from outside.
///
/// # Errors
/// Names the parameter.
///
/// ```
/// use millpond_core::wire::message::serve::Sampling;
/// use millpond_node::model::sample::check;
/// assert!(check(&Sampling { temperature: -1.0, ..Default::default() }).is_err());
/// ```
pub fn check(sampling: &Sampling) -> Result<(), SamplingError> {
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        return Err(SamplingError::Temperature(sampling.temperature));
    }
    if !(0.0..=1.0).contains(&sampling.top_p) {
        return Err(SamplingError::TopP(sampling.top_p));
    }
    Ok(())
}

/// The token at `position`, given the logits of the one before it. Greedy at temperature 0; the lowest id wins a tie.
/// O(n), and O(n log n) where probabilities are needed. `logits` must not be empty.
///
/// ```
/// use millpond_core::wire::message::serve::Sampling;
/// use millpond_node::model::sample::sample;
/// let logits = [0.5, 2.0, 1.0];
/// assert_eq!(sample(&logits, &Sampling::default(), 7), 1);
/// let hot = Sampling { temperature: 2.0, seed: 3, ..Default::default() };
/// assert_eq!(sample(&logits, &hot, 7), sample(&logits, &hot, 7));
/// ```
#[must_use]
pub fn sample(logits: &[f32], sampling: &Sampling, position: u32) -> u32 {
    let best = (0u32..).zip(logits).fold(
        (0, f32::NEG_INFINITY),
        |best, (token, &logit)| {
            if logit > best.1 { (token, logit) } else { best }
        },
    );
    if sampling.temperature == 0.0 {
        return best.0;
    }
    let scale = 1.0 / f64::from(sampling.temperature);
    let mut ranked: Vec<(u32, f64)> = (0u32..)
        .zip(logits)
        .map(|(token, logit)| (token, (f64::from(logit - best.1) * scale).exp()))
        .filter(|(_, weight)| *weight > 0.0)
        .collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let total: f64 = ranked.iter().map(|(_, weight)| weight).sum();
    let kept = if sampling.top_p == 0.0 { 1.0 } else { f64::from(sampling.top_p) };
    // The mass of the nucleus: the fewest tokens that together reach `kept`.
    let mut mass = 0.0;
    let nucleus = ranked.iter().position(|(_, weight)| {
        mass += weight;
        mass >= kept * total
    });
    ranked.truncate(nucleus.map_or(ranked.len(), |last| last + 1));
    let mut draw = unit(sampling.seed, position) * mass;
    for (token, weight) in &ranked {
        draw -= weight;
        if draw < 0.0 {
            return *token;
        }
    }
    ranked.last().map_or(best.0, |(token, _)| *token)
}

/// A number in 0..1 from a seed and a position: splitmix64 of both.
fn unit(seed: u64, position: u32) -> f64 {
    let mut z = seed.wrapping_add((u64::from(position) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sampling: Sampling, logits: &[f32]) -> Vec<u32> {
        let mut counts = vec![0; logits.len()];
        for position in 0..10_000 {
            counts[sample(logits, &sampling, position) as usize] += 1;
        }
        counts
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.0, 2f32.ln(), 5f32.ln()];
        let counts = counts(Sampling { temperature: 1.0, top_p: 1.0, seed: 1 }, &logits);
        for (count, expected) in counts.iter().zip([1250, 2500, 6250]) {
            assert!(count.abs_diff(expected) < 200, "{counts:?}");
        }
    }

    #[test]
    fn the_nucleus_leaves_out_the_tail() {
        let logits = [0.0, 2f32.ln(), 5f32.ln()];
        let counts = counts(Sampling { temperature: 1.0, top_p: 0.7, seed: 1 }, &logits);
        assert_eq!(counts[0], 0);
        assert!(counts[1] > 2000 && counts[2] > 6000, "{counts:?}");
    }

    #[test]
    fn another_seed_draws_otherwise() {
        let logits = [0.0; 64];
        let draw =
            |seed| (0..8).map(|p| sample(&logits, &Sampling { temperature: 1.0, top_p: 0.0, seed }, p)).collect();
        let (a, b): (Vec<u32>, Vec<u32>) = (draw(1), draw(2));
        assert_ne!(a, b);
    }
}
