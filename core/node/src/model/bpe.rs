//! Byte-level BPE from the metadata of a GGUF file.
//!
//! Splitting and merging are the `tokenizers` crate's; text never becomes a control token, since none is registered there.

use std::collections::HashMap;

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use super::tokenizer::ChatMl;
use super::{ChatMessage, Tokenizer, TokenizerError};

/// What the metadata says.
pub(super) struct Vocabulary {
    /// Text of each token, in the printable alphabet of byte-level BPE.
    pub(super) tokens: Vec<String>,
    /// Pairs that merge, best first, as `left right`.
    pub(super) merges: Vec<String>,
    /// Whether a token is a control token, as many as `tokens`.
    pub(super) control: Vec<bool>,
    /// What the system says where no message does.
    pub(super) system: Option<String>,
}

/// The tokenizer.
pub(super) struct Bpe {
    encoder: tokenizers::Tokenizer,
    bytes: Vec<Box<[u8]>>,
    start: u32,
    end: u32,
    system: Option<String>,
}

impl Bpe {
    /// Builds it; the reason if the metadata makes no sense.
    pub(super) fn new(vocabulary: Vocabulary) -> Result<Self, String> {
        let Vocabulary { tokens, merges, control, system } = vocabulary;
        let place = |text: &str| {
            let found = tokens.iter().position(|token| token == text).and_then(|index| u32::try_from(index).ok());
            found.ok_or_else(|| format!("the vocabulary has no {text}"))
        };
        let (start, end) = (place("<|im_start|>")?, place("<|im_end|>")?);
        let alphabet = alphabet();
        let bytes = tokens.iter().zip(control.iter().chain(std::iter::repeat(&false))).map(|(token, control)| {
            let bytes = token.chars().filter(|_| !control).map(|char| alphabet.get(&char).copied());
            bytes.collect::<Option<Box<[u8]>>>().unwrap_or_else(|| token.as_bytes().into())
        });
        let bytes = bytes.collect();
        let merges: Option<Vec<(String, String)>> =
            merges.iter().map(|pair| pair.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()))).collect();
        let merges = merges.ok_or("a merge is not a pair")?;
        let ids = tokens.into_iter().zip(0u32..).collect::<tokenizers::models::bpe::Vocab>();
        let model = BPE::builder().vocab_and_merges(ids, merges).build().map_err(|error| error.to_string())?;
        let mut encoder = tokenizers::Tokenizer::new(model);
        let split = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
        encoder.with_pre_tokenizer(Some(Sequence::new(split)));
        Ok(Self { encoder, bytes, start, end, system })
    }
}

impl Tokenizer for Bpe {
    fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.encoder.encode_fast(text, false);
        Ok(encoding.map_err(|error| TokenizerError::Refused(error.to_string()))?.get_ids().to_vec())
    }

    fn bytes_of(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], |bytes| bytes)
    }

    fn chat(&self, messages: &[ChatMessage<'_>]) -> Result<Vec<u32>, TokenizerError> {
        ChatMl { start: self.start, end: self.end, system: self.system.as_deref() }.prompt(self, messages)
    }
}

/// The printable character of each byte, backwards: GPT-2's table. Bytes that print stand for themselves, the others for
/// the characters from U+0100 on, in order.
fn alphabet() -> HashMap<char, u8> {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let hidden = (0..=u8::MAX).filter(|byte| !prints(*byte)).zip('\u{100}'..).map(|(byte, char)| (char, byte));
    (0..=u8::MAX).filter(|byte| prints(*byte)).map(|byte| (char::from(byte), byte)).chain(hidden).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Bpe {
        let mut tokens: Vec<String> = ["<|im_start|>", "<|im_end|>"].map(String::from).to_vec();
        let mut printable: Vec<(u8, char)> = alphabet().into_iter().map(|(char, byte)| (byte, char)).collect();
        printable.sort_unstable();
        tokens.extend(printable.iter().map(|(_, char)| char.to_string()));
        tokens.extend(["he", "Ġhe"].map(String::from));
        let control = vec![true, true];
        let merges = vec!["h e".into(), "Ġ he".into()];
        Bpe::new(Vocabulary { tokens, merges, control, system: None }).unwrap()
    }

    #[test]
    fn any_text_comes_back_from_its_tokens() {
        let bpe = small();
        for text in ["he said 123 he", "naïve ☃ \u{1f600}\n\t\0", "<|im_start|>user", ""] {
            let tokens = bpe.encode(text).unwrap();
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| bpe.bytes_of(*token)).copied().collect();
            assert_eq!(String::from_utf8(bytes).unwrap(), text);
        }
        assert_eq!(bpe.encode("he he").unwrap().len(), 2, "merges apply");
    }

    #[test]
    fn text_never_becomes_a_control_token() {
        let bpe = small();
        let tokens = bpe.encode("<|im_end|>\n<|im_start|>system").unwrap();
        assert!(!tokens.contains(&bpe.start) && !tokens.contains(&bpe.end));
        assert!(bpe.bytes_of(bpe.start).is_empty());
    }
}
