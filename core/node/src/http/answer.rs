//! OpenAI's answers, whole or as server-sent events, made of the pieces of a [`Generation`].

use futures::stream::{self, Stream, StreamExt};
use serde_json::{Value, json};

use super::api::refusal;
use super::message::{ApiError, Reply};
use super::openai::{Delivery, Form, Order, TokenIds};
use crate::router::{Finish, Generation, Piece, Token};

/// What every chunk of one answer repeats.
#[derive(Clone, Debug)]
pub(super) struct Heading {
    form: Form,
    token_ids: TokenIds,
    logprobs: bool,
    id: String,
    model: String,
    /// Seconds since 1970.
    created: u64,
}

/// Tokens in and out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    prompt: u32,
    cached: u32,
    answer: u32,
}

impl Usage {
    fn value(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": u64::from(self.prompt) + u64::from(self.answer),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }

    fn add(&mut self, piece: &Piece) {
        self.answer = self.answer.saturating_add(u32::try_from(piece.tokens.len()).unwrap_or(u32::MAX));
    }
}

impl Heading {
    pub(super) fn new(order: &Order, created: u64) -> Self {
        let prefix = match order.form {
            Form::Completion => "cmpl-",
            Form::Chat => "chatcmpl-",
        };
        Self {
            form: order.form,
            token_ids: order.token_ids,
            logprobs: order.generate.logprobs.is_some(),
            id: format!("{prefix}{}", order.generate.id.trim_start_matches("req-")),
            model: order.generate.model.clone(),
            created,
        }
    }

    fn envelope(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
            "system_fingerprint": concat!("millpond-", env!("CARGO_PKG_VERSION")),
        })
    }

    fn logprobs(&self, tokens: &[Token], offset: usize) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        match self.form {
            Form::Completion => completion_logprobs(tokens, offset),
            Form::Chat => json!({"content": tokens.iter().map(chat_logprob).collect::<Vec<_>>(), "refusal": null}),
        }
    }

    /// The choice of a whole answer.
    fn whole(&self, text: &str, tokens: &[Token], finish: Finish, usage: Usage) -> Value {
        let logprobs = self.logprobs(tokens, 0);
        let (object, mut choice) = match self.form {
            Form::Completion => ("text_completion", json!({"index": 0, "text": text})),
            Form::Chat => {
                let message = json!({"role": "assistant", "content": text, "refusal": null});
                ("chat.completion", json!({"index": 0, "message": message}))
            }
        };
        choice["logprobs"] = logprobs;
        choice["finish_reason"] = finish.name().into();
        self.show_ids(&mut choice, tokens);
        let mut value = self.envelope(object, json!([choice]));
        value["usage"] = usage.value();
        value
    }

    fn show_ids(&self, choice: &mut Value, tokens: &[Token]) {
        if self.token_ids == TokenIds::Shown {
            choice["token_ids"] = tokens.iter().map(|token| token.id).collect();
        }
    }

    /// One event of a streamed answer.
    fn chunk(&self, piece: &Piece, offset: usize) -> Value {
        let (object, mut choice) = match self.form {
            Form::Completion => ("text_completion", json!({"index": 0, "text": piece.text})),
            Form::Chat => {
                let delta = if piece.text.is_empty() { json!({}) } else { json!({"content": piece.text}) };
                ("chat.completion.chunk", json!({"index": 0, "delta": delta}))
            }
        };
        choice["logprobs"] = self.logprobs(&piece.tokens, offset);
        choice["finish_reason"] = piece.finish.map_or(Value::Null, |finish| finish.name().into());
        self.show_ids(&mut choice, &piece.tokens);
        self.envelope(object, json!([choice]))
    }

    /// The event that opens a streamed chat.
    fn opening(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}]);
        (self.form == Form::Chat).then(|| self.envelope("chat.completion.chunk", choice))
    }

    /// The event after the last piece that holds the usage.
    fn closing(&self, usage: Usage) -> Value {
        let object = match self.form {
            Form::Completion => "text_completion",
            Form::Chat => "chat.completion.chunk",
        };
        let mut value = self.envelope(object, json!([]));
        value["usage"] = usage.value();
        value
    }
}

fn completion_logprobs(tokens: &[Token], mut offset: usize) -> Value {
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(offset);
        offset += token.text.chars().count();
    }
    let tops =
        tokens.iter().map(|token| token.alternatives.iter().cloned().collect::<std::collections::BTreeMap<_, _>>());
    json!({
        "tokens": tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tops.collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

fn chat_logprob(token: &Token) -> Value {
    let one = |text: &str, logprob: Option<f32>| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()});
    let mut value = one(&token.text, token.logprob);
    value["top_logprobs"] = token.alternatives.iter().map(|(text, logprob)| one(text, Some(*logprob))).collect();
    value
}

/// The reply to `order`, whose answer is on its way.
pub(super) async fn deliver(order: &Order, heading: Heading, generation: Generation) -> Reply {
    match order.delivery {
        Delivery::Whole => whole(&heading, generation).await,
        Delivery::Events { usage } => Reply::events(events(heading, generation, usage)),
    }
}

async fn whole(heading: &Heading, mut generation: Generation) -> Reply {
    let mut usage = Usage { prompt: generation.prompt_tokens, cached: generation.cached_tokens, answer: 0 };
    let (mut text, mut tokens) = (String::new(), Vec::new());
    // Bounded by the number of new tokens asked for.
    while let Some(piece) = generation.pieces.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(failure) => return refusal(&failure).reply(),
        };
        usage.add(&piece);
        text.push_str(&piece.text);
        tokens.extend(piece.tokens);
        if let Some(finish) = piece.finish {
            return Reply::json(200, &heading.whole(&text, &tokens, finish, usage));
        }
    }
    broken_off().reply()
}

fn broken_off() -> ApiError {
    ApiError::new(502, "server_error", "the answer broke off; send the request again").coded("broken_off")
}

/// One event's bytes.
fn event(value: &Value) -> Vec<u8> {
    format!("data: {value}\n\n").into_bytes()
}

fn events(heading: Heading, generation: Generation, with_usage: bool) -> impl Stream<Item = Vec<u8>> + Send {
    let usage = Usage { prompt: generation.prompt_tokens, cached: generation.cached_tokens, answer: 0 };
    let opening = stream::iter(heading.opening().map(|value| event(&value)));
    let state = Some((heading, generation.pieces, usage, 0usize));
    let pieces = stream::unfold(state, move |state| async move {
        let (heading, mut pieces, mut usage, offset) = state?;
        let mut bytes = match pieces.next().await {
            Some(Ok(piece)) => {
                usage.add(&piece);
                let mut bytes = event(&heading.chunk(&piece, offset));
                if piece.finish.is_none() {
                    let length: usize = piece.tokens.iter().map(|token| token.text.chars().count()).sum();
                    return Some((bytes, Some((heading, pieces, usage, offset + length))));
                }
                if with_usage {
                    bytes.extend(event(&heading.closing(usage)));
                }
                bytes
            }
            // The head is gone: the error is the last event but one.
            Some(Err(failure)) => event(&refusal(&failure).value()),
            None => event(&broken_off().value()),
        };
        bytes.extend_from_slice(b"data: [DONE]\n\n");
        Some((bytes, None))
    });
    opening.chain(pieces)
}
