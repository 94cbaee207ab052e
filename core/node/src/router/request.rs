//! What a client asks a router for, what it gets, and why it may not get it.
//!
//! These types know neither HTTP nor the messages between nodes: the OpenAI API makes a [`Generate`], a router (or a
//! model in the same process) makes a [`Generation`] of it.

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use millpond_core::time::Duration;
use serde_json::Value;

/// A prompt as the client wrote it.
///
/// ```
/// use millpond_node::router::Prompt;
/// assert_ne!(Prompt::Text("hi".into()), Prompt::Tokens(vec![1, 2]));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text, tokenised as it is.
    Text(String),
    /// Tokens of the model's own vocabulary.
    Tokens(Vec<u32>),
    /// A conversation, put into the model's chat template.
    Chat(Vec<Message>),
}

/// One turn of a conversation.
///
/// ```
/// use millpond_node::router::Message;
/// let message = Message { role: "user".into(), content: "hi".into() };
/// assert_eq!(message.role, "user");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// How tokens are chosen.
///
/// ```
/// use millpond_node::router::Sampling;
/// assert_eq!(Sampling::greedy().temperature, 0.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Sampling {
    /// 0 takes the likeliest token; larger spreads the choice.
    pub temperature: f32,
    /// Only the likeliest tokens whose probabilities sum to this are considered.
    pub top_p: f32,
    /// Same seed, same prompt: same tokens.
    pub seed: u64,
}

impl Sampling {
    /// Always the likeliest token.
    #[must_use]
    pub const fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0 }
    }
}

/// A request for text.
///
/// ```
/// use millpond_node::router::{Generate, Prompt};
/// let request = Generate::new("req-1", "toy", Prompt::Text("once upon".into()));
/// assert_eq!(request.tokens_max, None);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Generate {
    /// Names the request in logs, replies and `explain`.
    pub id: String,
    /// The model's name.
    pub model: String,
    /// What to go on from.
    pub prompt: Prompt,
    /// At most this many new tokens, refused if the context cannot hold them; `None` is whatever it still holds.
    pub tokens_max: Option<u32>,
    /// At most this many where `tokens_max` says nothing.
    pub tokens_default: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether to go on after the model's end-of-text token.
    pub end: EndOfText,
    /// Log-probabilities wanted: of each token, and of this many alternatives.
    pub logprobs: Option<u8>,
    /// Give up after this long; `None` is the router's own limit.
    pub deadline: Option<Duration>,
    /// Wanted time to the first token; `None` is what the router has for all.
    pub ttft_slo: Option<Duration>,
    /// Wanted time between tokens, likewise.
    pub tbt_slo: Option<Duration>,
    /// Those of higher priority are served first, and longer.
    pub priority: u8,
    /// Whom it is for, see [`Generator::tenant`]; nobody in particular.
    pub tenant: Option<String>,
}

/// What the model's end-of-text token does.
///
/// ```
/// use millpond_node::router::EndOfText;
/// assert_eq!(EndOfText::default(), EndOfText::Stops);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EndOfText {
    /// It ends the answer.
    #[default]
    Stops,
    /// It is a token like any other; for measurements of fixed length.
    Ignored,
}

impl Generate {
    /// A greedy request without limits of its own.
    #[must_use]
    pub fn new(id: &str, model: &str, prompt: Prompt) -> Self {
        Self {
            id: id.into(),
            model: model.into(),
            prompt,
            tokens_max: None,
            tokens_default: u32::MAX,
            sampling: Sampling::greedy(),
            stop: Vec::new(),
            end: EndOfText::Stops,
            logprobs: None,
            deadline: None,
            ttft_slo: None,
            tbt_slo: None,
            priority: 0,
            tenant: None,
        }
    }
}

/// Why an answer ended.
///
/// ```
/// use millpond_node::router::Finish;
/// assert_eq!(Finish::Length.name(), "length");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// The model, or a stop text, ended it.
    Stop,
    /// It reached the limit of new tokens or of the context.
    Length,
}

impl Finish {
    /// OpenAI's word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A piece of an answer: new text (maybe none, while it could still become a stop text) and the tokens behind it.
///
/// ```
/// use millpond_node::router::Piece;
/// assert!(Piece::default().finish.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    /// Text to append; whole characters only.
    pub text: String,
    /// Tokens that were generated since the last piece.
    pub tokens: Vec<Token>,
    /// Why the answer ends here, if it does; nothing follows.
    pub finish: Option<Finish>,
}

/// One generated token.
///
/// ```
/// use millpond_node::router::Token;
/// let token = Token { id: 7, text: "a".into(), logprob: None, alternatives: vec![] };
/// assert_eq!(token.id, 7);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its number in the vocabulary.
    pub id: u32,
    /// Its own text; the replacement character where it is a part of a character.
    pub text: String,
    /// Its natural log-probability, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens in its place, best first, if asked for.
    pub alternatives: Vec<(String, f32)>,
}

/// An answer on its way. Dropping it cancels the work on every node.
///
/// Example: `core/node/src/http/tests.rs`.
pub struct Generation {
    /// Tokens of the prompt, template included.
    pub prompt_tokens: u32,
    /// How many of them came from a cache instead of being computed.
    pub cached_tokens: u32,
    /// The pieces, the last of which has `finish`; an error ends it too.
    pub pieces: BoxStream<'static, Result<Piece, Failure>>,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("prompt_tokens", &self.prompt_tokens)
            .field("cached_tokens", &self.cached_tokens)
            .finish_non_exhaustive()
    }
}

/// Why there is no answer, or no more of it.
///
/// ```
/// use millpond_node::router::Failure;
/// let failure = Failure::UnknownModel { asked: "gpt".into(), known: vec!["toy".into()] };
/// assert_eq!(failure.to_string(), "there is no model `gpt` here; use one of: toy");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The model is not served here.
    #[error("there is no model `{asked}` here; use one of: {}", known.join(", "))]
    UnknownModel {
        /// What the client asked for.
        asked: String,
        /// What there is.
        known: Vec<String>,
    },
    /// Only tenants are served here, and this is none.
    #[error("{what}; send one as `authorization: Bearer KEY`")]
    Unauthorized {
        /// What is wrong with its key.
        what: &'static str,
    },
    /// Nothing to go on from.
    #[error("the prompt is empty; send at least one token")]
    EmptyPrompt,
    /// The prompt does not fit.
    #[error("the prompt has {prompt} tokens and leaves no room in the model's context of {context}; shorten it")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: u64,
        /// Tokens of the model's context.
        context: u64,
    },
    /// The prompt is so long that it was not even counted.
    #[error("the prompt's {bytes} bytes cannot fit into the model's context of {context} tokens; shorten it")]
    PromptTooLarge {
        /// Bytes of the prompt.
        bytes: u64,
        /// Tokens of the model's context.
        context: u64,
    },
    /// The prompt fits, but not with that many new tokens.
    #[error(
        "the prompt's {prompt} tokens and {asked} new ones exceed the model's context of {context}; \
         ask for at most {} new tokens or shorten the prompt", context.saturating_sub(*prompt)
    )]
    AnswerTooLong {
        /// Tokens of the prompt.
        prompt: u64,
        /// New tokens asked for.
        asked: u64,
        /// Tokens of the model's context.
        context: u64,
    },
    /// A token that the vocabulary lacks.
    #[error("token {token} is not in the vocabulary of {vocabulary}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// How many there are.
        vocabulary: u64,
    },
    /// A chat message the template cannot take.
    #[error("{reason}")]
    Template {
        /// What is wrong.
        reason: String,
    },
    /// A feature this model or server lacks.
    #[error("`{what}` is not supported here; leave it out")]
    Unsupported {
        /// The field that asks for it.
        what: &'static str,
    },
    /// Too much to do: come back later.
    #[error("{reason}; try again in {retry_after}")]
    Busy {
        /// What is full.
        reason: String,
        /// When it may have drained.
        retry_after: Duration,
    },
    /// Admission refuses it: a deadline would be missed.
    #[error(
        "no place now ({reason}): the first token would be there after {ttft}, then one every {tbt}; try again in {retry_after}"
    )]
    Overloaded {
        /// Which deadline, or what is missing.
        reason: &'static str,
        /// When it was refused.
        stage: Stage,
        /// Predicted time to the first token.
        ttft: Duration,
        /// Predicted time between tokens.
        tbt: Duration,
        /// When a place should be free: it is kept for who comes back then under the same `x-request-id`.
        retry_after: Duration,
    },
    /// Nobody is there who could do it now.
    #[error("no {role} node is ready ({detail}); try again shortly")]
    NoNode {
        /// `prefill` or `decode`.
        role: &'static str,
        /// What is known about them.
        detail: String,
    },
    /// A node died or broke off after the answer had begun (before, the router tries another).
    #[error("the {role} node failed after {tokens} tokens ({detail}); send the request again")]
    NodeLost {
        /// `prefill` or `decode`.
        role: &'static str,
        /// Tokens that had been delivered.
        tokens: u64,
        /// What happened.
        detail: String,
    },
    /// The router ends and could not wait for the answer any longer.
    #[error("the server is shutting down after {tokens} tokens of the answer; send the request again in a moment")]
    ShuttingDown {
        /// Tokens that had been delivered.
        tokens: u64,
    },
    /// It took too long.
    #[error("the request did not finish within {limit}; ask for fewer tokens or try again")]
    Deadline {
        /// The limit that passed.
        limit: Duration,
    },
    /// The request fits the model, and not the nodes that serve it here.
    #[error("{reason}")]
    Unservable {
        /// The reason, as the node worded it.
        reason: String,
    },
    /// The model or a node refused for a reason of its own.
    #[error("{reason}")]
    Refused {
        /// The reason, as the node worded it.
        reason: String,
    },
}

/// When a request was refused.
///
/// ```
/// assert_eq!(millpond_node::router::Stage::Early.name(), "early");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// On arrival.
    Early,
    /// When its prompt was computed, in vain.
    Late,
}

impl Stage {
    /// Its name in metrics and records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Early => "early",
            Self::Late => "late",
        }
    }
}

/// A model on offer.
///
/// ```
/// use millpond_node::router::Offer;
/// assert_eq!(Offer { name: "toy".into(), context: 512 }.context, 512);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its name in requests.
    pub name: String,
    /// Tokens its context holds, prompt and answer together.
    pub context: u32,
}

/// Whatever turns requests into text: a router over nodes, or a model in this process.
///
/// Example: `core/node/src/http/tests.rs`.
pub trait Generator: Send + Sync + 'static {
    /// The models on offer.
    fn offers(&self) -> Vec<Offer>;

    /// Starts an answer; done once its first token is there, so that a refusal can still be a status. Dropping the
    /// future cancels the work.
    ///
    /// # Errors
    /// Why there will be no answer.
    fn generate(&self, request: Generate) -> BoxFuture<'static, Result<Generation, Failure>>;

    /// The name of the tenant whose API key that is; `None` where everybody is served.
    ///
    /// # Errors
    /// [`Failure::Unauthorized`].
    fn tenant(&self, _key: Option<&str>) -> Result<Option<String>, Failure> {
        Ok(None)
    }

    /// What is known about a tenant's request `id`, for people and programs; `None` once it is forgotten.
    fn explain(&self, id: &str, tenant: Option<&str>) -> Option<Value>;
}
