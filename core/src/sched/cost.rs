//! What serving costs, in seconds: models of prefill, decode and transfer, and the profiles that hold them.
//!
//! Not a measurement: a model is fitted ([`Prefill::fit`]) from what was measured, or refined while requests are served
//! ([`Refined`]), and every prediction can carry the band that past predictions held to ([`Band`]).
//!
//! The default, [`Profile::A800X8_LLAMA3_70B`], is one node with eight A800 serving LLaMA3-70B: prefill fitted to the five bars of
//! Figure 14a of the FAST'25 Mooncake paper (within 3 % at each), decode to its Figures 14 and 15b, links of 4 x 200 Gbit/s.
//! Its mean tail of decode is thinner than the published one; [`Decode`] says by how much.

mod online;

pub use self::online::{Band, Interval, Refined};

/// What one prefill has to do, in tokens.
///
/// ```
/// use millpond_core::sched::cost::Work;
/// assert_eq!(Work { new: 1_000, prefix: 7_000 }.total(), 8_000);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Work {
    /// Tokens to compute.
    pub new: u32,
    /// Tokens before them whose KV is there.
    pub prefix: u32,
}

impl Work {
    /// The work of a prompt of `tokens` of which the first `reused` are cached. At least one token is computed: the last
    /// one's output is the first token of the answer.
    #[must_use]
    pub const fn of_prompt(tokens: u32, reused: u32) -> Self {
        let most = tokens.saturating_sub(1);
        let prefix = if reused < most { reused } else { most };
        Self { new: tokens - prefix, prefix }
    }

    /// Length of the whole prompt.
    #[must_use]
    pub const fn total(self) -> u32 {
        self.new.saturating_add(self.prefix)
    }

    /// The features of the model: 1, new, n² − p².
    fn features(self) -> [f64; 3] {
        let (new, prefix) = (f64::from(self.new), f64::from(self.prefix));
        [1.0, new, new * (new + 2.0 * prefix)]
    }
}

/// One measured prefill.
///
/// Example: [`Prefill::fit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// What was computed.
    pub work: Work,
    /// How long it took.
    pub seconds: f64,
}

/// Seconds of a prefill: `fixed + linear · new + quadratic · (n² − p²)`, n being the prompt and p its cached prefix.
///
/// The quadratic term is attention; it has an efficiency of its own, which is why the count of floating-point operations
/// ([`Architecture::flops`]) does not predict time.
///
/// ```
/// use millpond_core::sched::cost::{Profile, Work};
/// let model = Profile::A800X8_LLAMA3_70B.prefill;
/// let cold = model.seconds(Work { new: 128 << 10, prefix: 0 });
/// assert!((cold - 27.5).abs() < 0.03 * 27.5); // Figure 14a
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefill {
    /// Seconds that every prefill takes.
    pub fixed: f64,
    /// Seconds per computed token.
    pub linear: f64,
    /// Seconds per unit of n² − p².
    pub quadratic: f64,
}

/// Why there is no fit.
///
/// Example: [`Prefill::fit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FitError {
    /// No sample, or all of them with no new token.
    Empty,
    /// A sample's time is zero, negative or not a number.
    NotPositive,
}

impl core::fmt::Display for FitError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Empty => "no sample with a new token; measure at least two lengths",
            Self::NotPositive => "a sample took no time; drop samples that were not measured",
        })
    }
}

impl core::error::Error for FitError {}

impl Prefill {
    /// Predicted seconds.
    #[must_use]
    pub fn seconds(&self, work: Work) -> f64 {
        let [_, new, square] = work.features();
        self.fixed + self.linear * new + self.quadratic * square
    }

    /// The model with the least squared relative error over `samples`, no coefficient below zero; and the root mean square
    /// of the relative errors, its error bar. O(samples).
    ///
    /// # Errors
    /// [`FitError`], nothing else.
    ///
    /// ```
    /// use millpond_core::sched::cost::{FitError, Prefill, Sample, Work};
    /// let measured = [(1_000, 0.13), (2_000, 0.26), (4_000, 0.52)];
    /// let samples = measured.map(|(new, seconds)| Sample { work: Work { new, prefix: 0 }, seconds });
    /// let (model, error) = Prefill::fit(&samples).unwrap();
    /// assert!((model.linear - 1.3e-4).abs() < 1e-9 && error < 1e-6);
    /// assert_eq!(Prefill::fit(&[]), Err(FitError::Empty));
    /// ```
    pub fn fit(samples: &[Sample]) -> Result<(Self, f64), FitError> {
        if !samples.iter().all(|sample| sample.seconds > 0.0 && sample.seconds.is_finite()) {
            return Err(FitError::NotPositive);
        }
        // Columns are scaled by their largest entry, so that the squares of token counts do not drown the rest.
        let mut scale = [0.0_f64; 3];
        for sample in samples {
            let features = sample.work.features();
            (0..3).for_each(|i| scale[i] = scale[i].max(features[i] / sample.seconds));
        }
        if scale[1] == 0.0 {
            return Err(FitError::Empty);
        }
        let (mut square, mut right) = ([[0.0_f64; 3]; 3], [0.0_f64; 3]);
        for sample in samples {
            let features = sample.work.features();
            let row: [f64; 3] = core::array::from_fn(|i| features[i] / sample.seconds / scale[i]);
            for i in 0..3 {
                right[i] += row[i];
                (0..3).for_each(|j| square[i][j] += row[i] * row[j]);
            }
        }
        let (best, _) = (1_u8..8)
            .filter_map(|columns| solve(&square, &right, columns))
            .map(|theta| (theta, loss(&square, &right, &theta)))
            .fold(([0.0; 3], f64::INFINITY), |best, next| if next.1 < best.1 { next } else { best });
        let model = Self { fixed: best[0] / scale[0], linear: best[1] / scale[1], quadratic: best[2] / scale[2] };
        let errors = samples.iter().map(|sample| model.seconds(sample.work) / sample.seconds - 1.0);
        let error = libm::sqrt(errors.map(|error| error * error).sum::<f64>() / samples.len() as f64);
        Ok((model, error))
    }
}

/// What is lost beside the best possible sum of squares, up to a constant: θᵀAθ − 2θᵀb.
fn loss(square: &[[f64; 3]; 3], right: &[f64; 3], theta: &[f64; 3]) -> f64 {
    let quadratic: f64 = (0..3).map(|i| (0..3).map(|j| theta[i] * square[i][j] * theta[j]).sum::<f64>()).sum();
    quadratic - 2.0 * (0..3).map(|i| theta[i] * right[i]).sum::<f64>()
}

/// Solves the normal equations over the columns in the mask, the others being zero. `None` if they are dependent, or an
/// answer is negative.
fn solve(square: &[[f64; 3]; 3], right: &[f64; 3], columns: u8) -> Option<[f64; 3]> {
    let mut rows: [[f64; 4]; 3] = core::array::from_fn(|i| [square[i][0], square[i][1], square[i][2], right[i]]);
    for left_out in (0..3).filter(|column| columns & (1 << column) == 0) {
        rows.iter_mut().for_each(|row| row[left_out] = 0.0);
        rows[left_out] = [0.0; 4];
        rows[left_out][left_out] = 1.0;
    }
    for pivot in 0..3 {
        let lead = rows[pivot][pivot];
        // The matrix is positive semidefinite with entries of order one: a tiny pivot is a dependent column.
        if lead < 1e-12 {
            return None;
        }
        for row in 0..3 {
            if row != pivot {
                let factor = rows[row][pivot] / lead;
                (0..4).for_each(|j| rows[row][j] -= factor * rows[pivot][j]);
            }
        }
    }
    let theta: [f64; 3] = core::array::from_fn(|i| rows[i][3] / rows[i][i]);
    theta.iter().all(|&value| value >= 0.0).then_some(theta)
}

/// Seconds of one decode step: `fixed + per_request · batch + per_token · context`, a token for each request in the batch.
///
/// The default is fitted to Figures 14 and 15b: within 3 % of the published mean gaps at 7 and 8 decode nodes, 7 % at 6, 14 % at 5. On
/// the conversation trace its median gap is 26 % below the published one, since it has no tail of its own: rely on it
/// for means and loads, not for the tail.
///
/// ```
/// use millpond_core::sched::cost::Profile;
/// let decode = Profile::A800X8_LLAMA3_70B.decode;
/// // 21 requests of 12,200 tokens fit in 100 ms a token, 22 do not.
/// assert_eq!(decode.batch_max(0.1, 12_200.0), 21);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decode {
    /// Seconds of a step however small.
    pub fixed: f64,
    /// Seconds per request in the batch.
    pub per_request: f64,
    /// Seconds per token of context of the whole batch.
    pub per_token: f64,
}

impl Decode {
    /// Predicted seconds of a step over `batch` requests with `context` tokens together.
    #[must_use]
    pub fn seconds(&self, batch: u32, context: u64) -> f64 {
        self.fixed + self.per_request * f64::from(batch) + self.per_token * context as f64
    }

    /// The largest batch of requests of `context` tokens each whose step takes at most `seconds`.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
    pub fn batch_max(&self, seconds: f64, context: f64) -> u32 {
        let each = self.per_request + self.per_token * context;
        libm::floor((seconds - self.fixed) / each).max(0.0) as u32
    }
}

/// A link's time: `latency + bytes / (the smaller fair share of the two NICs)`.
///
/// ```
/// use millpond_core::sched::cost::{Flows, Profile};
/// let link = Profile::A800X8_LLAMA3_70B.link;
/// let alone = link.seconds(40_000_000_000, Flows::default());
/// assert!((alone - 0.46).abs() < 0.005); // 40 GB at 87 GB/s
/// let shared = link.seconds(40_000_000_000, Flows { source: 1, target: 0 });
/// assert!((shared / alone - 2.0).abs() < 0.01);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// What one node's NICs move each way, in bytes per second.
    pub bytes_per_second: f64,
    /// Seconds until the first byte.
    pub latency: f64,
}

/// Transfers that already use the NICs at both ends.
///
/// Example: [`Link`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flows {
    /// Leaving the source.
    pub source: u32,
    /// Entering the target.
    pub target: u32,
}

impl Link {
    /// Predicted seconds to move `bytes` beside the transfers that are there.
    #[must_use]
    pub fn seconds(&self, bytes: u64, beside: Flows) -> f64 {
        let sharers = f64::from(beside.source.max(beside.target)) + 1.0;
        self.latency + bytes as f64 * sharers / self.bytes_per_second
    }
}

/// The shape of a transformer, as far as its KV and its arithmetic go.
///
/// ```
/// use millpond_core::sched::cost::Architecture;
/// let model = Architecture::LLAMA3_70B;
/// assert_eq!(model.kv_bytes_per_token(), 320 << 10);
/// // Reusing 8,192 tokens pays above 6 GB/s on eight A800, above 19 GB/s on eight H800.
/// assert_eq!((model.reuse_bandwidth(8_192, 8.0 * 312e12) / 1e8).round(), 59.0);
/// assert_eq!((model.reuse_bandwidth(8_192, 8.0 * 989e12) / 1e8).round(), 186.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Architecture {
    /// Transformer layers.
    pub layers: u32,
    /// Width of the hidden state.
    pub hidden: u32,
    /// Query heads per key-value head.
    pub group: u32,
    /// Bytes of one value of KV.
    pub value_len: u32,
    /// Operations per unit of n²·d in a layer.
    pub attention: f64,
    /// Operations per unit of n·d² in a layer.
    pub dense: f64,
}

impl Architecture {
    /// LLaMA3-70B with 16-bit KV; the operation counts of the FAST'25 paper's Equation 1.
    pub const LLAMA3_70B: Self =
        Self { layers: 80, hidden: 8_192, group: 8, value_len: 2, attention: 4.0, dense: 22.0 };

    /// Bytes of KV per token: layers · 2 · hidden / group · value.
    #[must_use]
    pub const fn kv_bytes_per_token(&self) -> u64 {
        2 * self.layers as u64 * self.hidden as u64 / self.group as u64 * self.value_len as u64
    }

    /// Equation 1: floating-point operations to prefill `tokens`.
    #[must_use]
    pub fn flops(&self, tokens: u32) -> f64 {
        let (n, d) = (f64::from(tokens), f64::from(self.hidden));
        f64::from(self.layers) * (self.attention * n * n * d + self.dense * n * d * d)
    }

    /// Equation 2: the bandwidth in bytes per second above which loading a prefix of `prefix` tokens is faster than
    /// computing it at `flops` operations per second.
    #[must_use]
    pub fn reuse_bandwidth(&self, prefix: u32, flops: f64) -> f64 {
        self.kv_bytes_per_token() as f64 * f64::from(prefix) * flops / self.flops(prefix)
    }
}

/// One class of instances: what its nodes cost and hold. Given by value; reading one from a file is the node's business.
///
/// ```
/// use millpond_core::sched::cost::Profile;
/// let mut profile = Profile::default();
/// profile.link.bytes_per_second = 190e9; // 8 x 400 Gbit/s
/// assert_eq!(profile.kv_len(128 << 10), 40 << 30); // a prompt of 128k tokens
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Profile {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of KV per token.
    pub kv_bytes_per_token: u64,
    /// Time of a prefill.
    pub prefill: Prefill,
    /// Time of a decode step.
    pub decode: Decode,
    /// Time of a transfer between two nodes.
    pub link: Link,
    /// Blocks of KV that one node caches in DRAM.
    pub cache_blocks: u32,
    /// Tokens of KV that a decode instance holds for its running requests.
    pub decode_tokens_max: u64,
}

impl Profile {
    /// Eight A800 with LLaMA3-70B, 4 x 200 Gbit/s at the 87 GB/s that the paper's Figure 12 measures, 1 TB of DRAM for 3 million
    /// tokens, and 450 GB of the GPUs' 640 for the KV of running requests.
    pub const A800X8_LLAMA3_70B: Self = Self {
        block_tokens: 512,
        kv_bytes_per_token: Architecture::LLAMA3_70B.kv_bytes_per_token(),
        prefill: Prefill { fixed: 0.0, linear: 1.155e-4, quadratic: 7.2e-10 },
        decode: Decode { fixed: 0.026, per_request: 0.003, per_token: 3.6e-8 },
        link: Link { bytes_per_second: 87e9, latency: 1e-4 },
        cache_blocks: 5_859,
        decode_tokens_max: 450_000_000_000 / Architecture::LLAMA3_70B.kv_bytes_per_token(),
    };

    /// Bytes of the KV of `tokens`.
    #[must_use]
    pub const fn kv_len(&self, tokens: u32) -> u64 {
        tokens as u64 * self.kv_bytes_per_token
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::A800X8_LLAMA3_70B
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figure 14a: thousands (1,024) of tokens, seconds.
    const BARS: [(u32, f64); 5] = [(8, 1.0), (16, 2.05), (32, 4.5), (64, 10.5), (128, 27.5)];

    fn samples() -> [Sample; 5] {
        BARS.map(|(new, seconds)| Sample { work: Work { new: new << 10, prefix: 0 }, seconds })
    }

    #[test]
    fn the_default_profile_is_within_three_percent_of_each_bar_of_figure_14a() {
        let model = Profile::default().prefill;
        for sample in samples() {
            let error = model.seconds(sample.work) / sample.seconds - 1.0;
            assert!(error.abs() < 0.03, "{sample:?}: {error}");
        }
    }

    #[test]
    fn a_fit_to_figure_14a_finds_the_default_profile_again() {
        let (model, error) = Prefill::fit(&samples()).unwrap();
        assert!(error < 0.025, "{model:?} {error}");
        for sample in samples() {
            assert!((model.seconds(sample.work) / sample.seconds - 1.0).abs() < 0.05);
        }
        // The free constant takes up some of the linear term; times agree over the range that was measured.
        for (new, prefix) in [(8_192, 0), (12_000, 12_000), (100_000, 20_000)] {
            let work = Work { new, prefix };
            let ratio = model.seconds(work) / Profile::default().prefill.seconds(work);
            assert!((ratio - 1.0).abs() < 0.06, "{work:?}: {ratio}");
        }
    }

    #[test]
    fn a_fit_recovers_the_three_terms_it_was_made_from() {
        let truth = Prefill { fixed: 0.05, linear: 1e-4, quadratic: 1e-9 };
        let points = [(512, 0), (4_000, 0), (4_000, 60_000), (1, 8_191), (100_000, 0), (7, 120_000)];
        let samples = points.map(|(new, prefix)| {
            let work = Work { new, prefix };
            Sample { work, seconds: truth.seconds(work) }
        });
        let (model, error) = Prefill::fit(&samples).unwrap();
        assert!(error < 1e-9, "{error}");
        assert!((model.fixed / truth.fixed - 1.0).abs() < 1e-6, "{model:?}");
        assert!((model.quadratic / truth.quadratic - 1.0).abs() < 1e-6, "{model:?}");
    }

    #[test]
    fn a_fit_never_has_a_negative_coefficient() {
        // Time falls with length: the best that makes sense is a constant.
        let falling = [(1_000, 3.0), (2_000, 2.0), (4_000, 1.0)];
        let (model, _) =
            Prefill::fit(&falling.map(|(new, seconds)| Sample { work: Work { new, prefix: 0 }, seconds })).unwrap();
        assert!(model.fixed > 0.0 && model.linear == 0.0 && model.quadratic == 0.0, "{model:?}");
    }

    #[test]
    fn a_sample_without_time_or_without_tokens_is_refused() {
        let sample = |new, seconds| Sample { work: Work { new, prefix: 0 }, seconds };
        assert_eq!(Prefill::fit(&[sample(1, 0.0)]), Err(FitError::NotPositive));
        assert_eq!(Prefill::fit(&[sample(1, f64::NAN)]), Err(FitError::NotPositive));
        assert_eq!(Prefill::fit(&[sample(0, 1.0)]), Err(FitError::Empty));
        assert!(Prefill::fit(&[sample(100, 1.0)]).is_ok());
    }

    #[test]
    fn a_full_hit_computes_the_last_token() {
        assert_eq!(Work::of_prompt(1_024, 1_024), Work { new: 1, prefix: 1_023 });
        assert_eq!(Work::of_prompt(1_024, 512), Work { new: 512, prefix: 512 });
        assert_eq!(Work::of_prompt(0, 0), Work { new: 0, prefix: 0 });
    }

    #[test]
    fn equation_2_gives_the_published_thresholds() {
        let at = |flops| Architecture::LLAMA3_70B.reuse_bandwidth(8_192, flops) / 1e9;
        assert!((at(8.0 * 312e12) - 5.86).abs() < 0.01 && (at(8.0 * 989e12) - 18.6).abs() < 0.05);
    }

    #[test]
    fn single_streams_decode_as_in_figure_14() {
        let decode = Profile::default().decode;
        assert!(
            (decode.seconds(1, 8_000) - 0.0293).abs() < 0.001 && (decode.seconds(1, 128_000) - 0.0336).abs() < 0.001
        );
        assert_eq!(decode.batch_max(0.01, 0.0), 0);
    }
}
