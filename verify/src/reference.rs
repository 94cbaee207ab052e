//! Another llama: a plain loop over candle's tensors, as its `quantized_llama` goes, with none of our arithmetic. It says
//! how far ours is from it, and how fast candle's own loop is.

use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{D, Device, Module, Result, Tensor};

/// What weights are multiplied as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// As they are; candle rounds activations to 8 bits for that.
    Quantised,
    /// As 32-bit floats.
    Widened,
}

struct Layer {
    attention_norm: Tensor,
    feed_forward_norm: Tensor,
    /// Query, key, value, output.
    attention: [QMatMul; 4],
    /// Gate, up, down.
    feed_forward: [QMatMul; 3],
    cache: Option<(Tensor, Tensor)>,
}

/// The model and the KV of one request.
pub struct Reference {
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: QMatMul,
    heads: usize,
    kv_heads: usize,
    rope_base: f32,
    epsilon: f64,
    tokens: usize,
}

impl Reference {
    /// Reads a GGUF file.
    ///
    /// # Errors
    /// It is not a llama's.
    pub fn load(path: &Path, weights: Weights) -> Result<Self> {
        let mut file = std::io::BufReader::new(std::fs::File::open(path)?);
        let content = Content::read(&mut file)?;
        let number = |key: &str| content.metadata[key].to_u32();
        let float = |key: &str| content.metadata[key].to_f32();
        let mut tensor = |name: &str| content.tensor(&mut file, name, &Device::Cpu);
        let matrix = |tensor: QTensor| match weights {
            Weights::Quantised => QMatMul::from_qtensor(tensor),
            Weights::Widened => Ok(QMatMul::Tensor(tensor.dequantize(&Device::Cpu)?)),
        };
        let embedding = tensor("token_embd.weight")?;
        let head =
            if content.tensor_infos.contains_key("output.weight") { "output.weight" } else { "token_embd.weight" };
        let layers = (0..number("llama.block_count")?).map(|layer| {
            let mut part = |name: &str| tensor(&format!("blk.{layer}.{name}.weight"));
            let attention = [part("attn_q")?, part("attn_k")?, part("attn_v")?, part("attn_output")?].map(matrix);
            let feed_forward = [part("ffn_gate")?, part("ffn_up")?, part("ffn_down")?].map(matrix);
            let [query, key, value, output] = attention;
            let [gate, up, down] = feed_forward;
            Ok(Layer {
                attention_norm: part("attn_norm")?.dequantize(&Device::Cpu)?,
                feed_forward_norm: part("ffn_norm")?.dequantize(&Device::Cpu)?,
                attention: [query?, key?, value?, output?],
                feed_forward: [gate?, up?, down?],
                cache: None,
            })
        });
        let layers = layers.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            embedding: embedding.dequantize(&Device::Cpu)?,
            layers,
            norm: tensor("output_norm.weight")?.dequantize(&Device::Cpu)?,
            head: matrix(tensor(head)?)?,
            heads: number("llama.attention.head_count")? as usize,
            kv_heads: number("llama.attention.head_count_kv")? as usize,
            rope_base: float("llama.rope.freq_base").unwrap_or(10_000.0),
            epsilon: f64::from(float("llama.attention.layer_norm_rms_epsilon")?),
            tokens: 0,
        })
    }

    /// Forgets what it has computed.
    pub fn clear(&mut self) {
        self.tokens = 0;
        self.layers.iter_mut().for_each(|layer| layer.cache = None);
    }

    /// Computes the tokens that follow those so far; the logits after the last one.
    ///
    /// # Errors
    /// Those of candle.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (count, start) = (tokens.len(), self.tokens);
        let (heads, kv_heads, epsilon) = (self.heads, self.kv_heads, self.epsilon);
        let mut x = self.embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        let head_dim = x.dim(1)? / heads;
        let turns = self.turns(start, count, head_dim)?;
        let mask = mask(start, count)?;
        for layer in &mut self.layers {
            let normed = norm(&x, &layer.attention_norm, epsilon)?;
            let [query, key, value, output] = &layer.attention;
            let split = |x: Tensor, heads: usize| x.reshape((count, heads, head_dim))?.transpose(0, 1)?.contiguous();
            let query = turn(&split(query.forward(&normed)?, heads)?, &turns)?;
            let mut key = turn(&split(key.forward(&normed)?, kv_heads)?, &turns)?;
            let mut value = split(value.forward(&normed)?, kv_heads)?;
            if let Some((keys, values)) = &layer.cache {
                key = Tensor::cat(&[keys, &key], 1)?;
                value = Tensor::cat(&[values, &value], 1)?;
            }
            layer.cache = Some((key.clone(), value.clone()));
            let wide = |x: &Tensor| {
                let wide = x.unsqueeze(1)?.broadcast_as((kv_heads, heads / kv_heads, start + count, head_dim))?;
                wide.reshape((heads, start + count, head_dim))
            };
            let scores = (query.matmul(&wide(&key)?.t()?)? / (head_dim as f64).sqrt())?.broadcast_add(&mask)?;
            let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
            let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
            let mixed = weights.matmul(&wide(&value)?)?.transpose(0, 1)?.reshape((count, heads * head_dim))?;
            x = (x + output.forward(&mixed)?)?;
            let normed = norm(&x, &layer.feed_forward_norm, epsilon)?;
            let [gate, up, down] = &layer.feed_forward;
            x = (x + down.forward(&(gate.forward(&normed)?.silu()? * up.forward(&normed)?)?)?)?;
        }
        self.tokens += count;
        let last = norm(&x.narrow(0, count - 1, 1)?, &self.norm, epsilon)?;
        self.head.forward(&last)?.flatten_all()?.to_vec1()
    }

    /// Cosines and sines, `[token][pair]`.
    fn turns(&self, start: usize, count: usize, head_dim: usize) -> Result<(Tensor, Tensor)> {
        let angle =
            |position: usize, pair: usize| position as f32 / self.rope_base.powf((2 * pair) as f32 / head_dim as f32);
        let angles = (start..start + count).flat_map(|at| (0..head_dim / 2).map(move |pair| angle(at, pair)));
        let angles = Tensor::from_vec(angles.collect::<Vec<f32>>(), (count, head_dim / 2), &Device::Cpu)?;
        Ok((angles.cos()?, angles.sin()?))
    }
}

fn norm(x: &Tensor, weights: &Tensor, epsilon: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?.sqrt()?;
    x.broadcast_div(&scale)?.broadcast_mul(weights)
}

/// Turns adjacent pairs of `[head][token][element]`.
fn turn(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let (heads, tokens, head_dim) = x.dims3()?;
    let pairs = x.reshape((heads, tokens, head_dim / 2, 2))?;
    let (a, b) = (pairs.narrow(3, 0, 1)?.squeeze(3)?, pairs.narrow(3, 1, 1)?.squeeze(3)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (a.broadcast_mul(sin)? + b.broadcast_mul(cos)?)?;
    Tensor::stack(&[first, second], 3)?.reshape((heads, tokens, head_dim))
}

/// Keeps a token from seeing those after it.
fn mask(start: usize, count: usize) -> Result<Tensor> {
    let end = start + count;
    let seen = |row: usize, column: usize| if column > start + row { f32::NEG_INFINITY } else { 0.0 };
    let values = (0..count).flat_map(|row| (0..end).map(move |column| seen(row, column)));
    Tensor::from_vec(values.collect::<Vec<f32>>(), (count, end), &Device::Cpu)
}
