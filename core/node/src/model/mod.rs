//! Language models: tokens and pages of KV in, logits out.
//!
//! A model knows its weights and nothing else: no request, no network, no allocator. The KV it makes lies in the caller's
//! pages ([`KvPages`]), one layer at a time, so that a layer can travel while the next one is computed.
//!
//! Invariant, and the reason for most of what is odd below: the KV and the logits of a token depend on the tokens before
//! it alone, bit for bit; not on how a prompt was cut into chunks, which requests shared a batch, how many threads ran,
//! or where pages lay. So prefill on one node and decode on another equal one process, exactly.

mod attention;
mod backend;
#[cfg(feature = "llama")]
mod bpe;
mod kernel;
#[cfg(feature = "llama")]
pub mod llama;
pub mod pages;
mod pairs;
mod rowwise;
pub mod sample;
pub mod tokenizer;
pub mod toy;
mod transformer;

use std::sync::Arc;

use millpond_core::layout::Layout;
use thiserror::Error;

pub use backend::{LoadError, Source};
pub use tokenizer::{ChatMessage, Tokenizer, TokenizerError};

/// What is known about a model without its weights: enough to tokenize, to route and to size pages.
///
/// ```
/// let card = millpond_node::model::toy::card();
/// assert_eq!(card.tokenizer.encode("hi").unwrap(), [104, 105]);
/// assert_eq!(card.layout.shape().block_tokens, 16);
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Card {
    /// Its name in requests.
    pub id: String,
    /// Names the model and its very weights, in names of blocks: other weights, other KV.
    pub revision: String,
    /// Geometry of its KV.
    pub layout: Layout,
    /// What it can be asked for.
    pub limits: Limits,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<u32>,
    /// Text to tokens and back.
    pub tokenizer: Arc<dyn Tokenizer>,
}

impl std::fmt::Debug for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Card").field("id", &self.id).field("layout", &self.layout).finish_non_exhaustive()
    }
}

/// What a model can be asked for.
///
/// ```
/// assert!(millpond_node::model::toy::card().limits.context_tokens >= 1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Prompt and answer together, in tokens.
    pub context_tokens: u32,
    /// Token ids are below this; also the length of a row of logits.
    pub vocabulary: u32,
    /// Tokens of one prefill chunk that run well: a multiple of the layout's block.
    pub chunk_tokens: u32,
}

/// Tokens of the next chunk when `rest` are left and chunks of `chunk` run well. The last one may be half as long again: a
/// short rest would cost its own pass over the weights.
///
/// ```
/// use millpond_node::model::next_chunk;
/// assert_eq!([next_chunk(1000, 128), next_chunk(136, 128), next_chunk(5, 128)], [128, 136, 5]);
/// ```
#[must_use]
pub const fn next_chunk(rest: usize, chunk: usize) -> usize {
    if rest <= chunk + chunk / 2 { rest } else { chunk }
}

/// The pages of one request as a model sees them: page `n` holds the KV of tokens `n * block .. (n + 1) * block`.
///
/// A slice is one layer of one page, laid out as [`Layout`] says and aligned to 4 bytes. The bytes beyond the last token
/// are never read.
///
/// Example: `core/node/src/model/pages.rs`.
pub trait KvPages: Send + Sync {
    /// Pages there are.
    fn page_count(&self) -> u32;

    /// One layer of a page whose tokens were computed earlier or in this call.
    fn page(&self, page: u32, layer: u32) -> &[u8];

    /// One layer of a page that this call writes to.
    fn page_mut(&mut self, page: u32, layer: u32) -> &mut [u8];

    /// Called before `layer` is read or written; may wait until it was loaded.
    ///
    /// # Errors
    /// [`Interrupted`] ends the computation; what it wrote is lost.
    fn open_layer(&mut self, layer: u32) -> Result<(), Interrupted> {
        let _ = layer;
        Ok(())
    }

    /// Called when `layer` of the tokens of this call is complete and will not change in this call.
    ///
    /// # Errors
    /// [`Interrupted`] ends the computation; what it wrote is lost.
    fn close_layer(&mut self, layer: u32) -> Result<(), Interrupted> {
        let _ = layer;
        Ok(())
    }
}

/// The owner of the pages no longer wants the result.
///
/// ```
/// assert!(millpond_node::model::Interrupted.to_string().contains("was cancelled"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the computation was interrupted; its request was cancelled or its pages could not be loaded")]
pub struct Interrupted;

/// One request's share of a forward pass: a chunk of a prompt, or one token of an answer.
///
/// Example: `verify/tests/model.rs`.
pub struct Piece<'a> {
    /// The tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// The position of the first of them; the KV of all before it is in `kv`.
    pub start: u32,
    /// Pages for all tokens up to the last one of this piece.
    pub kv: &'a mut dyn KvPages,
    /// Where the logits of the last token go, if they are wanted: `vocabulary` values.
    pub logits: Option<&'a mut [f32]>,
}

/// Why a forward pass did not happen. Nothing useful was written.
///
/// ```
/// use millpond_node::model::ModelError;
/// let error = ModelError::Vocabulary { token: 9, vocabulary: 5 };
/// assert!(error.to_string().contains("vocabulary of 5"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A piece has no tokens.
    #[error("a piece without tokens cannot be computed; give it at least one")]
    Empty,
    /// A token id is not of this model.
    #[error("token {token} is not in the vocabulary of {vocabulary}; encode the text with this model's tokenizer")]
    Vocabulary {
        /// The token.
        token: u32,
        /// Ids are below this.
        vocabulary: u32,
    },
    /// The tokens do not fit the context.
    #[error("{tokens} tokens exceed the context of {context_tokens}; shorten the prompt or ask for fewer tokens")]
    Context {
        /// Tokens in all.
        tokens: u64,
        /// The limit.
        context_tokens: u32,
    },
    /// There are fewer pages than the tokens need.
    #[error("{needed} pages are needed and {pages} are there; reserve more pages")]
    Pages {
        /// Pages needed.
        needed: u64,
        /// Pages there are.
        pages: u32,
    },
    /// A slice of a page has the wrong length or alignment.
    #[error(
        "a page's layer has {len} bytes where {expected} aligned to 4 are needed; build pages from the model's layout"
    )]
    PageShape {
        /// Bytes it has.
        len: usize,
        /// Bytes it should have.
        expected: u64,
    },
    /// The room for logits has the wrong length.
    #[error("room for {len} logits was given; the vocabulary has {vocabulary}")]
    LogitsLen {
        /// Values there is room for.
        len: usize,
        /// Values there are.
        vocabulary: u32,
    },
    /// See [`Interrupted`].
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// A model with its weights; shared by all requests of a node.
///
/// ```
/// use millpond_node::model::{pages::HeapPages, toy, Model, Piece};
/// let model = toy::Toy::new();
/// let mut kv = HeapPages::new(model.card().layout, 4);
/// let mut logits = vec![0.0; model.card().limits.vocabulary as usize];
/// model.forward(&mut [Piece { tokens: &[104, 105], start: 0, kv: &mut kv, logits: Some(&mut logits) }]).unwrap();
/// assert!(logits.iter().all(|logit| logit.is_finite()));
/// ```
pub trait Model: Send + Sync + 'static {
    /// What is known about it.
    fn card(&self) -> &Card;

    /// Computes all pieces in one pass over the weights: writes their KV and the logits asked for. Blocks the thread for
    /// as long as it takes; the cost of reading the weights is shared by all tokens of the call.
    ///
    /// # Errors
    /// [`ModelError`]; the pages of this call's tokens then hold nothing of use.
    fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError>;
}

/// Checks what every model asks of its pieces, so that what follows can index freely.
fn check(card: &Card, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
    let Limits { context_tokens, vocabulary, .. } = card.limits;
    for piece in pieces {
        let tokens = piece.tokens;
        if tokens.is_empty() {
            return Err(ModelError::Empty);
        }
        if let Some(&token) = tokens.iter().find(|token| **token >= vocabulary) {
            return Err(ModelError::Vocabulary { token, vocabulary });
        }
        let end = u64::from(piece.start).saturating_add(tokens.len() as u64);
        if end > u64::from(context_tokens) {
            return Err(ModelError::Context { tokens: end, context_tokens });
        }
        let (needed, pages) = (card.layout.pages_for(end), piece.kv.page_count());
        if needed > u64::from(pages) {
            return Err(ModelError::Pages { needed, pages });
        }
        if let Some(logits) = piece.logits.as_deref()
            && logits.len() != vocabulary as usize
        {
            return Err(ModelError::LogitsLen { len: logits.len(), vocabulary });
        }
    }
    Ok(())
}
