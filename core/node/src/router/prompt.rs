//! From a request to tokens, and from tokens to an answer, with the model's own tokenizer.
//!
//! Who generates the tokens in between is none of this module's business: a router's nodes, or a model in this process.

use std::sync::Arc;

use super::request::{EndOfText, Failure, Finish, Generate, Piece, Prompt, Token};
use super::text::Assembler;
use crate::model::{Card, ChatMessage, Tokenizer, TokenizerError};

/// A request in the model's terms, checked against its limits.
///
/// ```
/// use millpond_node::model::toy;
/// use millpond_node::router::{Generate, Prepared, Prompt};
/// let request = Generate::new("req-1", "toy", Prompt::Text("hi".into()));
/// let prepared = Prepared::new(&toy::card(), &request).unwrap();
/// assert_eq!(prepared.tokens, [104, 105]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prepared {
    /// The prompt; at least one token, all of the vocabulary, and room for one more in the context.
    pub tokens: Vec<u32>,
    /// New tokens at most; with the prompt within the context, at least one.
    pub tokens_max: u32,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
}

impl Prepared {
    /// Tokenises and checks `request` for the model of `card`.
    ///
    /// # Errors
    /// The request makes no sense for this model; the failure says why.
    pub fn new(card: &Card, request: &Generate) -> Result<Self, Failure> {
        let tokens = tokens(card, &request.prompt)?;
        let (prompt, context) = (tokens.len() as u64, u64::from(card.limits.context_tokens));
        if tokens.is_empty() {
            return Err(Failure::EmptyPrompt);
        }
        let vocabulary = card.limits.vocabulary;
        if let Some(token) = tokens.iter().copied().find(|token| *token >= vocabulary) {
            return Err(Failure::UnknownToken { token, vocabulary: vocabulary.into() });
        }
        let room = context.saturating_sub(prompt);
        if room == 0 {
            return Err(Failure::PromptTooLong { prompt, context });
        }
        let tokens_max = match request.tokens_max {
            Some(asked) if u64::from(asked) > room => {
                return Err(Failure::AnswerTooLong { prompt, asked: asked.into(), context });
            }
            Some(asked) => asked,
            None => u32::try_from(room).unwrap_or(u32::MAX).min(request.tokens_default),
        };
        let stop_tokens = match request.end {
            EndOfText::Stops => card.stop_tokens.clone(),
            EndOfText::Ignored => Vec::new(),
        };
        Ok(Self { tokens, tokens_max, stop_tokens })
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}

fn tokens(card: &Card, prompt: &Prompt) -> Result<Vec<u32>, Failure> {
    let refused = |error: TokenizerError| Failure::Template { reason: error.to_string() };
    // Longer than this it cannot fit, whatever the tokenizer does with it: refuse before the work. A token stands for
    // at most this many bytes in any vocabulary there is.
    const TOKEN_LEN_MAX: u64 = 256;
    let context = u64::from(card.limits.context_tokens);
    let len = match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(_) => 0,
        Prompt::Chat(messages) => messages.iter().map(|message| message.content.len()).sum(),
    } as u64;
    if len > context * TOKEN_LEN_MAX {
        return Err(Failure::PromptTooLarge { bytes: len, context });
    }
    match prompt {
        Prompt::Text(text) => card.tokenizer.encode(text).map_err(refused),
        Prompt::Tokens(tokens) => Ok(tokens.clone()),
        Prompt::Chat(messages) => {
            let messages: Vec<_> =
                messages.iter().map(|message| ChatMessage { role: &message.role, content: &message.content }).collect();
            card.tokenizer.chat(&messages).map_err(refused)
        }
    }
}

/// Makes the pieces of one answer from its tokens.
///
/// ```
/// use millpond_node::model::toy;
/// use millpond_node::router::{Answer, Finish, Generate, Prompt};
/// let request = Generate::new("req-1", "toy", Prompt::Text("hi".into()));
/// let mut answer = Answer::new(&toy::card(), &request);
/// assert_eq!(answer.push(&[111, 107]).text, "ok");
/// assert_eq!(answer.finish(Finish::Length).finish, Some(Finish::Length));
/// ```
pub struct Answer {
    tokenizer: Arc<dyn Tokenizer>,
    assembler: Assembler,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("assembler", &self.assembler).finish_non_exhaustive()
    }
}

impl Answer {
    /// The empty answer to `request`.
    #[must_use]
    pub fn new(card: &Card, request: &Generate) -> Self {
        Self { tokenizer: Arc::clone(&card.tokenizer), assembler: Assembler::new(request.stop.clone()) }
    }

    /// Takes the next tokens. If a stop text ends the answer, the piece says so and what followed is left out.
    pub fn push(&mut self, tokens: &[u32]) -> Piece {
        let mut piece = Piece::default();
        for token in tokens {
            let bytes = self.tokenizer.bytes_of(*token);
            let assembled = self.assembler.push(bytes);
            let text = String::from_utf8_lossy(bytes).into_owned();
            piece.tokens.push(Token { id: *token, text, logprob: None, alternatives: Vec::new() });
            piece.text.push_str(&assembled.text);
            if assembled.stopped {
                piece.finish = Some(Finish::Stop);
                break;
            }
        }
        piece
    }

    /// The last piece: what was held back, and why the answer ends.
    #[must_use]
    pub fn finish(self, finish: Finish) -> Piece {
        Piece { text: self.assembler.finish(), tokens: Vec::new(), finish: Some(finish) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::toy;
    use crate::router::Message;

    fn prepare(prompt: Prompt, tokens_max: Option<u32>) -> Result<Prepared, Failure> {
        let mut request = Generate::new("req-1", "toy", prompt);
        request.tokens_max = tokens_max;
        Prepared::new(&toy::card(), &request)
    }

    #[test]
    fn what_does_not_fit_states_both_numbers() {
        let context = toy::card().limits.context_tokens;
        let long = "x".repeat(context as usize);
        let failure = prepare(Prompt::Text(long.clone()), None).unwrap_err().to_string();
        assert!(failure.contains(&format!("{context} tokens")) && failure.contains(&format!("context of {context}")));
        let failure = prepare(Prompt::Text(long[1..].into()), Some(2)).unwrap_err().to_string();
        assert!(failure.contains("at most 1 new tokens"), "{failure}");
        assert_eq!(prepare(Prompt::Text(long[1..].into()), None).unwrap().tokens_max, 1);
        assert!(matches!(prepare(Prompt::Text("x".repeat(8 << 20)), None), Err(Failure::PromptTooLarge { .. })));
    }

    #[test]
    fn tokens_of_no_vocabulary_and_empty_prompts_are_refused() {
        let vocabulary = toy::card().limits.vocabulary;
        assert!(matches!(prepare(Prompt::Tokens(vec![1, vocabulary]), None), Err(Failure::UnknownToken { .. })));
        assert_eq!(prepare(Prompt::Tokens(Vec::new()), None), Err(Failure::EmptyPrompt));
        assert_eq!(prepare(Prompt::Text(String::new()), None), Err(Failure::EmptyPrompt));
        assert!(matches!(prepare(Prompt::Chat(Vec::new()), None), Err(Failure::Template { .. })));
        let message = Message { role: "user".into(), content: "hi".into() };
        assert!(prepare(Prompt::Chat(vec![message]), None).unwrap().tokens.len() > 2);
    }

    #[test]
    fn an_answer_ends_at_its_stop_text_and_drops_what_follows() {
        let mut request = Generate::new("req-1", "toy", Prompt::Text("hi".into()));
        request.stop = vec!["END".into()];
        let mut answer = Answer::new(&toy::card(), &request);
        let tokens: Vec<u32> = "one END two".bytes().map(u32::from).collect();
        let piece = answer.push(&tokens);
        assert_eq!((piece.text.as_str(), piece.finish, piece.tokens.len()), ("one ", Some(Finish::Stop), 7));
    }
}
