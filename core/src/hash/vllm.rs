//! The block hashes vLLM makes with `--prefix-caching-hash-algo sha256_cbor` or `xxhash_cbor`.
//!
//! A hash is `H(cbor([parent, tokens, extra keys or null]))`; the parent of a first block is `H(cbor(seed))`. Canonical
//! CBOR of arrays, non-negative integers, byte and text strings and null is all that is needed. vLLM's other choices
//! (`sha256`, `xxhash`) hash Python pickles and cannot be made here. Checked against vectors from `cbor2`; to read its
//! events and keys only: nothing of ours is named this way.

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::Xxh3;

/// Which hash vLLM was started with.
///
/// Example: [`Hasher`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// SHA-256, 32 bytes.
    Sha256Cbor,
    /// XXH3-128, 16 bytes.
    XxhashCbor,
}

/// What besides tokens a block's KV depends on; vLLM adds these in this order.
///
/// ```
/// use millpond_core::hash::vllm::{Algorithm, ExtraKey, Hasher};
/// let hasher = Hasher::new(Algorithm::Sha256Cbor, Hasher::SEED_DEFAULT);
/// let plain = hasher.block(&hasher.none(), &[1, 2, 3], &[]);
/// assert_ne!(hasher.block(&hasher.none(), &[1, 2, 3], &[ExtraKey::Lora("french")]), plain);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExtraKey<'a> {
    /// A LoRA adapter by name.
    Lora(&'a str),
    /// A LoRA adapter by name and path.
    LoraAt(&'a str, &'a str),
    /// A multimodal item that begins at this token of the block.
    Multimodal(&'a str, u64),
    /// The request's salt; on a first block only.
    CacheSalt(&'a str),
}

/// One block hash: 32 or 16 bytes.
///
/// ```
/// use millpond_core::hash::vllm::{Algorithm, Hasher};
/// let hasher = Hasher::new(Algorithm::Sha256Cbor, Hasher::SEED_DEFAULT);
/// assert_eq!(hasher.none().as_bytes().len(), 32);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash {
    bytes: [u8; 32],
    len: u8,
}

impl BlockHash {
    /// The hash's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The number by which events name the block: its last 8 bytes, big-endian.
    #[must_use]
    pub fn event_id(&self) -> u64 {
        self.as_bytes().iter().fold(0, |id, &byte| id << 8 | u64::from(byte))
    }
}

/// Makes the hashes of one vLLM deployment.
///
/// ```
/// use millpond_core::hash::vllm::{Algorithm, Hasher};
/// let hasher = Hasher::new(Algorithm::Sha256Cbor, Hasher::SEED_DEFAULT);
/// let first = hasher.block(&hasher.none(), &[1, 2, 3], &[]);
/// assert_ne!(hasher.block(&first, &[1, 2, 3], &[]), first);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Hasher {
    algorithm: Algorithm,
    none: BlockHash,
}

impl Hasher {
    /// The seed of a deployment that sets no `PYTHONHASHSEED`.
    pub const SEED_DEFAULT: &'static str = "vllm-none-hash";

    /// A hasher for `algorithm`; `seed` is the deployment's `PYTHONHASHSEED`.
    #[must_use]
    pub fn new(algorithm: Algorithm, seed: &str) -> Self {
        let mut sink = Sink::new(algorithm);
        sink.text(seed);
        Self { algorithm, none: sink.finish() }
    }

    /// The parent of a first block.
    #[must_use]
    pub fn none(&self) -> BlockHash {
        self.none
    }

    /// The hash of the block of `tokens` after `parent`.
    #[must_use]
    pub fn block(&self, parent: &BlockHash, tokens: &[u32], extra_keys: &[ExtraKey<'_>]) -> BlockHash {
        let mut sink = Sink::new(self.algorithm);
        sink.array(3);
        sink.bytes(parent.as_bytes());
        sink.array(tokens.len());
        tokens.iter().for_each(|&token| sink.head(MAJOR_UNSIGNED, u64::from(token)));
        if extra_keys.is_empty() {
            sink.put(&[NULL]);
        } else {
            sink.array(extra_keys.len());
            extra_keys.iter().for_each(|key| sink.extra_key(key));
        }
        sink.finish()
    }
}

const MAJOR_UNSIGNED: u8 = 0;
const MAJOR_BYTES: u8 = 2;
const MAJOR_TEXT: u8 = 3;
const MAJOR_ARRAY: u8 = 4;
const NULL: u8 = 0xf6;

/// Canonical CBOR, hashed as it is written.
#[expect(clippy::large_enum_variant, reason = "lives on the stack of one call")]
enum Sink {
    Sha(Sha256),
    Xxh(Xxh3),
}

impl Sink {
    fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Sha256Cbor => Self::Sha(Sha256::new()),
            Algorithm::XxhashCbor => Self::Xxh(Xxh3::new()),
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha(hasher) => hasher.update(bytes),
            Self::Xxh(hasher) => hasher.update(bytes),
        }
    }

    /// A type and a number in the shortest form (RFC 8949, 4.2.1).
    fn head(&mut self, major: u8, value: u64) {
        let be = value.to_be_bytes();
        let (info, len) = match value {
            0..24 => (be[7], 0),
            24..0x100 => (24, 1),
            0x100..0x1_0000 => (25, 2),
            0x1_0000..0x1_0000_0000 => (26, 4),
            _ => (27, 8),
        };
        self.put(&[major << 5 | info]);
        self.put(&be[8 - len..]);
    }

    fn array(&mut self, len: usize) {
        self.head(MAJOR_ARRAY, u64::try_from(len).unwrap_or(u64::MAX));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(MAJOR_BYTES, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        self.put(bytes);
    }

    fn text(&mut self, text: &str) {
        self.head(MAJOR_TEXT, u64::try_from(text.len()).unwrap_or(u64::MAX));
        self.put(text.as_bytes());
    }

    fn extra_key(&mut self, key: &ExtraKey<'_>) {
        let texts: &[&str] = match key {
            ExtraKey::Lora(name) => &["lora", name],
            ExtraKey::LoraAt(name, path) => &["lora", name, path],
            ExtraKey::Multimodal(id, _) => &["mm", id],
            ExtraKey::CacheSalt(salt) => &["cache_salt", salt],
        };
        let offset = match key {
            ExtraKey::Multimodal(_, offset) => Some(*offset),
            _ => None,
        };
        self.array(texts.len() + usize::from(offset.is_some()));
        texts.iter().for_each(|text| self.text(text));
        if let Some(offset) = offset {
            self.head(MAJOR_UNSIGNED, offset);
        }
    }

    fn finish(self) -> BlockHash {
        let mut bytes = [0; 32];
        let len = match self {
            Self::Sha(hasher) => {
                bytes = hasher.finalize().into();
                32
            }
            Self::Xxh(hasher) => {
                bytes[..16].copy_from_slice(&hasher.digest128().to_be_bytes());
                16
            }
        };
        BlockHash { bytes, len }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::tokens;
    use super::*;

    pub(crate) fn hex<const N: usize>(text: &str) -> [u8; N] {
        assert_eq!(text.len(), 2 * N);
        core::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
    }

    #[test]
    fn sha256_cbor_matches_the_golden_vectors() {
        let hasher = Hasher::new(Algorithm::Sha256Cbor, Hasher::SEED_DEFAULT);
        let none = hasher.none();
        let is = |hash: BlockHash, text: &str| assert_eq!(hash.as_bytes(), hex::<32>(text));
        is(none, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
        let first = hasher.block(&none, &tokens()[..16], &[]);
        is(first, "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749");
        let second = hasher.block(&first, &tokens()[16..], &[]);
        is(second, "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c");
        assert_eq!(first.event_id(), 2_233_398_808_101_521_225);
        let salted = hasher.block(&none, &tokens()[..16], &[ExtraKey::CacheSalt("s")]);
        is(salted, "67e9f72522b34138a0f4be0e3a68d9d49b1e50aea0af7762f6170ad7eebbdeaf");
        let lora = hasher.block(&none, &tokens()[..16], &[ExtraKey::Lora("l")]);
        is(lora, "a67cf74d9183a7b7ce0c59b5bc21ac300922ce980ea101b4f8caf40fb43d2000");
        let every = [ExtraKey::LoraAt("l", "/p"), ExtraKey::Multimodal("id", 7), ExtraKey::CacheSalt("s")];
        let every = hasher.block(&none, &tokens()[..16], &every);
        is(every, "02a833d3355e9ad6c85063a206cfc672a9d2385c2dd77a597b8441fe11c11df5");
        let edges = hasher.block(&none, &[23, 24, 255, 256, 65535, 65536, u32::MAX, 0], &[]);
        is(edges, "07ead60dbda51171ef6dcf856f04083feee2ddf3933e08a4e7517de1ed05881f");
    }

    #[test]
    fn xxhash_cbor_matches_the_golden_vectors() {
        let hasher = Hasher::new(Algorithm::XxhashCbor, "0");
        assert_eq!(hasher.none().as_bytes(), hex::<16>("1ebe36576dcb573f26b99533a20aaeca"));
        let hasher = Hasher::new(Algorithm::XxhashCbor, Hasher::SEED_DEFAULT);
        let first = hasher.block(&hasher.none(), &tokens()[..16], &[]);
        assert_eq!(first.as_bytes(), hex::<16>("f2313f4548e185b1a011187a342021cc"));
        let second = hasher.block(&first, &tokens()[16..], &[]);
        assert_eq!(second.as_bytes(), hex::<16>("74ee692fcce0684e02de354d6ca364b4"));
    }
}
