//! A tiny llama with seeded weights: built in, exact, fast; for tests and for a start with no download.
//!
//! It has the shape of the real thing (grouped queries, rotary positions, gated feed-forward) and says nothing sensible.
//! Its KV has four heads, so instances of tensor-parallel degree 1, 2 and 4 can be laid out.

use std::sync::Arc;

use millpond_core::layout::{BLOCK_TOKENS_DEFAULT, Dtype, Layout, Shape};
use millpond_core::random::Random;

use super::kernel::Panels;
use super::tokenizer::Bytes;
use super::transformer::{ARITHMETIC, Config, LayerWeights, Transformer};
use super::{Card, Limits, Model, ModelError, Piece};

/// Its id.
pub const ID: &str = "toy";
/// A change of the weights changes it.
const WEIGHTS: u32 = 1;

const LAYERS: u32 = 4;
const HEADS: usize = 8;
const KV_HEADS: u32 = 4;
const HEAD_DIM: u32 = 16;
const WIDTH: usize = HEADS * HEAD_DIM as usize;
const FEED_FORWARD: usize = 256;
const CONTEXT: u32 = 4096;
const VOCABULARY: u32 = 259;

/// The model; see the module.
///
/// ```
/// use millpond_node::model::{toy::Toy, Model};
/// assert_eq!(Toy::new().card().id, "toy");
/// ```
pub struct Toy {
    transformer: Transformer,
}

/// What is known about it.
///
/// # Panics
/// Never: the numbers are fixed.
#[must_use]
pub fn card() -> Card {
    let shape = Shape {
        layer_count: LAYERS,
        kv_head_count: KV_HEADS,
        head_dim: HEAD_DIM,
        dtype: Dtype::F32,
        block_tokens: BLOCK_TOKENS_DEFAULT,
    };
    Card {
        id: ID.into(),
        revision: format!("{ID}@{WEIGHTS}.{ARITHMETIC}"),
        layout: Layout::new(shape).expect("the numbers are within the limits"),
        limits: Limits { context_tokens: CONTEXT, vocabulary: VOCABULARY, chunk_tokens: 64 },
        stop_tokens: vec![Bytes::END_OF_TEXT, Bytes::END],
        tokenizer: Arc::new(Bytes),
    }
}

impl Toy {
    /// Makes the weights; takes a few milliseconds.
    #[must_use]
    pub fn new() -> Self {
        let mut seed = Seed(Random::new(0x6d69_6c6c_706f_6e64));
        let kv = (KV_HEADS * HEAD_DIM) as usize;
        let layers = (0..LAYERS).map(|_| LayerWeights {
            attention_norm: vec![1.0; WIDTH],
            query_key_value: seed.panels(WIDTH + 2 * kv, WIDTH),
            attention_out: seed.panels(WIDTH, WIDTH),
            feed_forward_norm: vec![1.0; WIDTH],
            gate_up: seed.panels(2 * FEED_FORWARD, WIDTH),
            down: seed.panels(WIDTH, FEED_FORWARD),
        });
        let config =
            Config { width: WIDTH, heads: HEADS, feed_forward: FEED_FORWARD, rope_base: 10_000.0, norm_epsilon: 1e-5 };
        let layers = layers.collect();
        let embedding = seed.panels(VOCABULARY as usize, WIDTH);
        let head = Panels::from_rows(&seed.printable_head(), WIDTH);
        Self { transformer: Transformer::new(card(), config, layers, embedding, vec![1.0; WIDTH], Some(head), 1) }
    }
}

impl Default for Toy {
    fn default() -> Self {
        Self::new()
    }
}

impl Model for Toy {
    fn card(&self) -> &Card {
        self.transformer.card()
    }

    fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
        self.transformer.forward(pieces)
    }
}

/// Weights from a seed.
struct Seed(Random);

impl Seed {
    /// Evenly spread over -1..1, in steps of 2^-23: the same on every machine.
    fn value(&mut self) -> f32 {
        (self.0.next_u64() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn rows(&mut self, outputs: usize, inputs: usize) -> Vec<f32> {
        // Keeps the variance of what goes through.
        let scale = (3.0 / inputs as f32).sqrt();
        (0..outputs * inputs).map(|_| self.value() * scale).collect()
    }

    fn panels(&mut self, outputs: usize, inputs: usize) -> Panels {
        Panels::from_rows(&self.rows(outputs, inputs), inputs)
    }

    /// Output weights that prefer bytes people can read: the others are halved copies of those, so never the most likely.
    fn printable_head(&mut self) -> Vec<f32> {
        let mut rows = self.rows(VOCABULARY as usize, WIDTH);
        for token in (0..VOCABULARY as usize).filter(|token| !(0x20..0x7f).contains(token)) {
            let from = (0x20 + token % 0x5f) * WIDTH;
            for column in 0..WIDTH {
                rows[token * WIDTH + column] = rows[from + column] * 0.5;
            }
        }
        rows
    }
}
