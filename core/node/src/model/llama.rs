//! Llamas from quantised GGUF files, on the CPU.
//!
//! candle reads the file and widens element types that have no packed form here; the arithmetic and the KV are ours, so
//! pages can be cut, moved and shared. Nothing is fetched: a
//! script does that, and errors name it.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use millpond_core::layout::{BLOCK_TOKENS_DEFAULT, Dtype, Layout, Shape};

use super::bpe::{Bpe, Vocabulary};
use super::kernel::{BLOCK, LANES, Panels, Quantised};
use super::transformer::{ARITHMETIC, Config, LayerWeights, Transformer};
use super::{Card, Limits, LoadError, Model, ModelError, Piece};

/// The script that fetches the default model's weights, from the root of the sources.
pub const FETCH_SCRIPT: &str = "core/node/scripts/fetch-smollm2.sh";
/// The file it leaves in the models' directory.
pub const DEFAULT_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Where the default model is looked for: `$XDG_CACHE_HOME/millpond/models/`, or `~/.cache/millpond/models/`.
///
/// ```
/// use millpond_node::model::llama;
/// assert!(llama::default_path().ends_with(llama::DEFAULT_FILE));
/// ```
#[must_use]
pub fn default_path() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    cache.unwrap_or_else(|| PathBuf::from(".cache")).join("millpond/models").join(DEFAULT_FILE)
}

/// A llama with its weights in memory.
///
/// ```
/// use millpond_node::model::{llama::Llama, LoadError};
/// let missing = Llama::load("no/such/file.gguf".as_ref(), 2);
/// assert!(matches!(missing.err(), Some(LoadError::Missing { .. })));
/// ```
pub struct Llama {
    transformer: Transformer,
}

/// What is known about the model in `path`, without its weights. Reads the file once to hash it.
///
/// # Errors
/// The file is missing, not GGUF, or not a llama.
pub fn card(path: &Path) -> Result<Card, LoadError> {
    Ok(Opened::new(path)?.architecture()?.0)
}

impl Llama {
    /// Reads and packs the weights; computes on `threads` threads.
    ///
    /// # Errors
    /// See [`card`]; or a weight is missing or of the wrong shape.
    pub fn load(path: &Path, threads: usize) -> Result<Self, LoadError> {
        let mut opened = Opened::new(path)?;
        let (card, config) = opened.architecture()?;
        let layers = (0..card.layout.shape().layer_count).map(|layer| opened.layer(layer, &card, &config));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let vocabulary = card.limits.vocabulary as usize;
        let embedding = opened.panels(&["token_embd.weight"], vocabulary, config.width)?;
        let tied = !opened.content.tensor_infos.contains_key("output.weight");
        let head = if tied { None } else { Some(opened.panels(&["output.weight"], vocabulary, config.width)?) };
        let norm = opened.vector("output_norm.weight", config.width)?;
        Ok(Self { transformer: Transformer::new(card, config, layers, embedding, norm, head, threads) })
    }
}

impl Model for Llama {
    fn card(&self) -> &Card {
        self.transformer.card()
    }

    fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
        self.transformer.forward(pieces)
    }
}

struct Opened {
    path: PathBuf,
    file: BufReader<File>,
    content: Content,
}

impl Opened {
    fn new(path: &Path) -> Result<Self, LoadError> {
        let file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => LoadError::Missing { path: path.into(), script: FETCH_SCRIPT },
            _ => LoadError::Unreadable { path: path.into(), reason: error.to_string() },
        })?;
        let mut file = BufReader::new(file);
        let content = Content::read(&mut file)
            .map_err(|error| LoadError::Unreadable { path: path.into(), reason: error.to_string() })?;
        Ok(Self { path: path.into(), file, content })
    }

    fn unsuitable(&self, reason: impl std::fmt::Display) -> LoadError {
        LoadError::Unsuitable { path: self.path.clone(), reason: reason.to_string() }
    }

    fn value(&self, key: &str) -> Result<&Value, LoadError> {
        self.content.metadata.get(key).ok_or_else(|| self.unsuitable(format_args!("it does not say {key}")))
    }

    fn number(&self, key: &str) -> Result<u32, LoadError> {
        let value = self.value(key)?.to_u64().ok().and_then(|value| u32::try_from(value).ok());
        value.ok_or_else(|| self.unsuitable(format_args!("{key} is not a small number")))
    }

    fn float(&self, key: &str) -> Result<f32, LoadError> {
        self.value(key)?.to_f32().map_err(|_| self.unsuitable(format_args!("{key} is not a number")))
    }

    fn texts(&self, key: &str) -> Result<Vec<String>, LoadError> {
        let values = self.value(key)?.to_vec().ok();
        let texts = values.and_then(|values| values.iter().map(|v| v.to_string().ok().cloned()).collect());
        texts.ok_or_else(|| self.unsuitable(format_args!("{key} is not a list of texts")))
    }

    fn architecture(&mut self) -> Result<(Card, Config), LoadError> {
        let architecture = self.value("general.architecture")?.to_string().cloned().unwrap_or_default();
        if architecture != "llama" {
            return Err(self.unsuitable(format_args!("its architecture is {architecture}, not llama")));
        }
        let number = |key: &str| self.number(&format!("llama.{key}"));
        let (width, heads) = (number("embedding_length")?, number("attention.head_count")?);
        let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
        let head_dim = number("attention.key_length").unwrap_or(width / heads.max(1));
        let feed_forward = number("feed_forward_length")?;
        let whole = [width, head_dim, feed_forward].iter().all(|len| *len > 0 && (*len as usize).is_multiple_of(LANES));
        if !whole
            || kv_heads == 0
            || heads % kv_heads != 0
            || number("rope.dimension_count").unwrap_or(head_dim) != head_dim
        {
            return Err(self.unsuitable("its heads or widths have a shape that is not supported"));
        }
        let shape = Shape {
            layer_count: number("block_count")?,
            kv_head_count: kv_heads,
            head_dim,
            dtype: Dtype::F16,
            block_tokens: BLOCK_TOKENS_DEFAULT,
        };
        let layout = Layout::new(shape).map_err(|error| self.unsuitable(error))?;
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let vocabulary = u32::try_from(tokens.len()).map_err(|_| self.unsuitable("its vocabulary is too large"))?;
        let limits = Limits { context_tokens: number("context_length")?, vocabulary, chunk_tokens: 128 };
        let config = Config {
            width: width as usize,
            heads: heads as usize,
            feed_forward: feed_forward as usize,
            rope_base: f64::from(self.float("llama.rope.freq_base").unwrap_or(10_000.0)),
            norm_epsilon: self.float("llama.attention.layer_norm_rms_epsilon")?,
        };
        let stop_tokens = vec![self.number("tokenizer.ggml.eos_token_id")?];
        let tokenizer = Arc::new(self.tokenizer(tokens)?);
        let id = self.path.file_stem().map_or_else(|| "llama".into(), |stem| stem.to_string_lossy().into_owned());
        let revision = format!("{id}@{}.{ARITHMETIC}", self.hash()?);
        Ok((Card { id, revision, layout, limits, stop_tokens, tokenizer }, config))
    }

    fn tokenizer(&self, tokens: Vec<String>) -> Result<Bpe, LoadError> {
        // 3 is llama.cpp's number for control tokens.
        let kinds = self.value("tokenizer.ggml.token_type")?.to_vec().ok();
        let control = kinds.into_iter().flatten().map(|kind| matches!(kind, Value::I32(3))).collect();
        let merges = self.texts("tokenizer.ggml.merges")?;
        let template = self.value("tokenizer.chat_template").ok().and_then(|value| value.to_string().ok());
        let system = template.and_then(|template| {
            let (_, rest) =
                template.split_once("<|im_start|>system\\n").or_else(|| template.split_once("<|im_start|>system\n"))?;
            rest.split_once("<|im_end|>").map(|(system, _)| system.to_owned())
        });
        Bpe::new(Vocabulary { tokens, merges, control, system }).map_err(|reason| self.unsuitable(reason))
    }

    /// The first 64 bits of the file's BLAKE3: KV made with other weights must never be taken for this model's.
    fn hash(&self) -> Result<String, LoadError> {
        let unreadable =
            |error: std::io::Error| LoadError::Unreadable { path: self.path.clone(), reason: error.to_string() };
        let mut file = File::open(&self.path).map_err(unreadable)?;
        let (mut hasher, mut buffer) = (blake3::Hasher::new(), vec![0u8; 1 << 20]);
        loop {
            match file.read(&mut buffer).map_err(unreadable)? {
                0 => return Ok(hasher.finalize().to_hex()[..16].to_owned()),
                len => hasher.update(&buffer[..len]),
            };
        }
    }

    fn layer(&mut self, layer: u32, card: &Card, config: &Config) -> Result<LayerWeights, LoadError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let shape = card.layout.shape();
        let kv = (shape.kv_head_count * shape.head_dim) as usize;
        let queries = config.heads * shape.head_dim as usize;
        let attention = [name("attn_q"), name("attn_k"), name("attn_v")];
        let (gate, up) = (name("ffn_gate"), name("ffn_up"));
        Ok(LayerWeights {
            attention_norm: self.vector(&name("attn_norm"), config.width)?,
            query_key_value: self.panels(&attention.each_ref().map(String::as_str), queries + 2 * kv, config.width)?,
            attention_out: self.panels(&[&name("attn_output")], config.width, queries)?,
            feed_forward_norm: self.vector(&name("ffn_norm"), config.width)?,
            gate_up: self.panels(&[&gate, &up], 2 * config.feed_forward, config.width)?,
            down: self.panels(&[&name("ffn_down")], config.width, config.feed_forward)?,
        })
    }

    fn tensor(&mut self, name: &str) -> Result<QTensor, LoadError> {
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu);
        tensor.map_err(|error| self.unsuitable(format_args!("{name}: {error}")))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(name)?;
        let values = widened(&tensor).map_err(|error| self.unsuitable(format_args!("{name}: {error}")))?;
        if values.len() != len {
            return Err(self.unsuitable(format_args!("{name} has {} values, not {len}", values.len())));
        }
        Ok(values)
    }

    /// The rows of some matrices, one after the other, packed.
    fn panels(&mut self, names: &[&str], outputs: usize, inputs: usize) -> Result<Panels, LoadError> {
        let tensors = names.iter().map(|name| self.tensor(name)).collect::<Result<Vec<_>, _>>()?;
        let rows: usize = tensors.iter().map(|tensor| tensor.shape().elem_count() / inputs).sum();
        let shaped = tensors.iter().all(|tensor| tensor.shape().dims().last() == Some(&inputs));
        if rows != outputs || !shaped {
            return Err(self.unsuitable(format_args!("{names:?} do not make {outputs} rows of {inputs}")));
        }
        let broken = |error: candle_core::Error| self.unsuitable(format_args!("{names:?}: {error}"));
        let blocks = tensors.iter().map(blocks).collect::<Result<Option<Vec<_>>, _>>().map_err(broken)?;
        if let Some(blocks) = blocks.filter(|_| inputs.is_multiple_of(BLOCK)) {
            return Ok(Panels::from_blocks(blocks.into_iter().flatten(), outputs, inputs));
        }
        let rows = tensors.iter().map(widened).collect::<Result<Vec<_>, _>>().map_err(broken)?;
        Ok(Panels::from_rows(&rows.concat(), inputs))
    }
}

fn widened(tensor: &QTensor) -> candle_core::Result<Vec<f32>> {
    tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()
}

/// The blocks of a tensor as integers with scale and offset; `None` for types that are not made of such.
/// Formats: <https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h>.
fn blocks(tensor: &QTensor) -> candle_core::Result<Option<Vec<Quantised>>> {
    let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    // The low halves of 16 bytes are the first 16 weights, the high halves the others.
    let nibbles = |bytes: &[u8], less: i8| -> [i8; BLOCK] {
        std::array::from_fn(|index| {
            let byte = bytes[index % 16];
            (if index < 16 { byte & 0xf } else { byte >> 4 }).cast_signed() - less
        })
    };
    let data = tensor.data()?;
    Ok(Some(match tensor.dtype() {
        GgmlDType::Q4_0 => data
            .chunks_exact(18)
            .map(|block| Quantised { integers: nibbles(&block[2..], 8), scale: half(block), offset: 0.0 })
            .collect(),
        GgmlDType::Q4_1 => data
            .chunks_exact(20)
            .map(|block| Quantised { integers: nibbles(&block[4..], 0), scale: half(block), offset: half(&block[2..]) })
            .collect(),
        GgmlDType::Q8_0 => data
            .chunks_exact(34)
            .map(|block| Quantised {
                integers: std::array::from_fn(|index| block[2 + index].cast_signed()),
                scale: half(block),
                offset: 0.0,
            })
            .collect(),
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Tensor;

    #[test]
    fn packed_blocks_equal_what_candle_widens() {
        let values: Vec<f32> = (0..32 * 64 * 3).map(|n| ((n * 7919) % 1000) as f32 / 300.0 - 1.5).collect();
        let tensor = Tensor::from_vec(values, (96, 64), &Device::Cpu).unwrap();
        for dtype in [GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q8_0] {
            let tensor = QTensor::quantize(&tensor, dtype).unwrap();
            let panels = Panels::from_blocks(blocks(&tensor).unwrap().unwrap().into_iter(), 96, 64);
            let mut rows = vec![0.0; 96 * 64];
            for output in 0..96 {
                panels.row(output, |input, weight| rows[output * 64 + input] = weight);
            }
            let expected = widened(&tensor).unwrap();
            let close = rows.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= b.abs() * 1e-6 + 1e-6);
            assert!(close, "{dtype:?}");
        }
    }

    #[test]
    fn a_file_that_is_no_model_is_refused_by_name() {
        let path = std::env::temp_dir().join(format!("millpond-not-a-model-{}", std::process::id()));
        std::fs::write(&path, b"GGUF but not really").unwrap();
        let refused = card(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(refused, Err(LoadError::Unreadable { .. })), "{refused:?}");
    }
}
