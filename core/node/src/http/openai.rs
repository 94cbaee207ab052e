//! OpenAI's request bodies, read into a [`Generate`].
//!
//! Unknown fields are accepted. Known ones that would change the answer and that this server lacks are refused by name,
//! never silently ignored.

use millpond_core::time::Duration;
use serde_json::{Value, json};

use super::fields::{Fields, parse, shown};
use super::message::{ApiError, Request};
use crate::router::{EndOfText, Generate, Message, Prompt, Sampling};

/// Stop texts per request, as OpenAI allows.
const STOPS_MAX: usize = 4;
/// New tokens when a `/v1/completions` request names no number, as OpenAI has it.
const COMPLETION_TOKENS: u32 = 16;
/// The largest number of new tokens that can be asked for; the context is the limit that counts.
const TOKENS_MAX: u64 = 1 << 31;
/// Alternatives per token that can be asked for.
const ALTERNATIVES_MAX: u64 = 20;

/// Which of the two endpoints, and so which shape the answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Completion,
    Chat,
}

/// How the answer is to be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    Whole,
    /// As events; with a last one that holds the usage, or without.
    Events {
        usage: bool,
    },
}

/// A request body, understood.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) form: Form,
    pub(super) delivery: Delivery,
    pub(super) generate: Generate,
    /// Whether the answer repeats the prompt's tokens and its own (vLLM's `return_token_ids`).
    pub(super) token_ids: TokenIds,
}

/// Whether token numbers are part of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenIds {
    Hidden,
    Shown,
}

/// Reads the body of `request`.
pub(super) fn order(form: Form, request: &Request) -> Result<Order, ApiError> {
    let body = parse(&request.body)?;
    let fields = Fields::of(&body, "")?;
    let model = fields.text_needed("model")?.to_owned();
    refuse_what_we_lack(&fields, form)?;
    let prompt = match form {
        Form::Completion => prompt(&fields)?,
        Form::Chat => Prompt::Chat(messages(&fields)?),
    };
    let mut generate = Generate::new(&request.id, &model, prompt);
    generate.tokens_max = tokens_max(&fields)?;
    if form == Form::Completion {
        generate.tokens_default = COMPLETION_TOKENS;
    }
    generate.sampling = sampling(&fields)?;
    generate.stop = fields.texts("stop", STOPS_MAX)?;
    generate.logprobs = logprobs(&fields, form)?;
    if fields.flag("ignore_eos")? {
        generate.end = EndOfText::Ignored;
    }
    generate.deadline = millis(request, "x-millpond-deadline-ms")?;
    generate.ttft_slo = millis(request, "x-millpond-ttft-slo-ms")?;
    generate.tbt_slo = millis(request, "x-millpond-tbt-slo-ms")?;
    generate.priority = priority(request)?;
    let token_ids = if fields.flag("return_token_ids")? { TokenIds::Shown } else { TokenIds::Hidden };
    Ok(Order { form, delivery: delivery(&fields)?, generate, token_ids })
}

fn refuse_what_we_lack(fields: &Fields<'_>, form: Form) -> Result<(), ApiError> {
    if let Some(n) = fields.integer("n", 0..=u64::from(u32::MAX))?
        && n != 1
    {
        let message = format!("`n` must be 1, not {n}: one request, one answer; send a request for each");
        return Err(ApiError::invalid(message).about("n").coded("unsupported_parameter"));
    }
    for name in ["presence_penalty", "frequency_penalty"] {
        fields.unsupported(name, &[json!(0)])?;
    }
    fields.unsupported("repetition_penalty", &[json!(1)])?;
    fields.unsupported("logit_bias", &[json!({})])?;
    fields.unsupported("top_k", &[json!(0), json!(-1)])?;
    match form {
        Form::Completion => {
            fields.unsupported("best_of", &[json!(1)])?;
            fields.unsupported("echo", &[json!(false)])?;
            fields.unsupported("suffix", &[json!("")])
        }
        Form::Chat => {
            fields.unsupported("tools", &[json!([])])?;
            fields.unsupported("functions", &[json!([])])?;
            fields.unsupported("audio", &[])?;
            fields.unsupported("modalities", &[json!(["text"])])?;
            fields.unsupported("response_format", &[json!({"type": "text"})])
        }
    }
}

fn prompt(fields: &Fields<'_>) -> Result<Prompt, ApiError> {
    let wants = "a string or an array of token numbers";
    let wrong = |what: String| ApiError::invalid(format!("`prompt` must be {wants}, not {what}")).about("prompt");
    let empty =
        || ApiError::invalid("`prompt` is empty; send at least one token").about("prompt").coded("empty_prompt");
    match fields.value("prompt") {
        None => Err(fields.missing("prompt", wants)),
        Some(Value::String(text)) if text.is_empty() => Err(empty()),
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
        Some(Value::Array(values)) => match values.as_slice() {
            [] => Err(empty()),
            // A batch of one.
            [Value::String(text)] if !text.is_empty() => Ok(Prompt::Text(text.clone())),
            [Value::String(_)] => Err(empty()),
            [Value::Array(inner)] if inner.is_empty() => Err(empty()),
            [Value::Array(inner)] => tokens(inner).map(Prompt::Tokens),
            [Value::Number(_), ..] => tokens(values).map(Prompt::Tokens),
            [Value::String(_) | Value::Array(_), ..] => {
                let message = format!("`prompt` holds {} prompts; send one per request", values.len());
                Err(ApiError::invalid(message).about("prompt").coded("unsupported_parameter"))
            }
            [other, ..] => Err(wrong(format!("an array with {}", shown(other)))),
        },
        Some(other) => Err(wrong(shown(other))),
    }
}

fn tokens(values: &[Value]) -> Result<Vec<u32>, ApiError> {
    let one = |(index, value): (usize, &Value)| {
        value.as_u64().and_then(|token| u32::try_from(token).ok()).ok_or_else(|| {
            let message = format!("`prompt[{index}]` must be a token number, not {}", shown(value));
            ApiError::invalid(message).about(format!("prompt[{index}]"))
        })
    };
    values.iter().enumerate().map(one).collect()
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let wants = "an array of {\"role\", \"content\"} objects";
    let values = match fields.value("messages") {
        None => return Err(fields.missing("messages", wants)),
        Some(Value::Array(values)) if values.is_empty() => {
            return Err(ApiError::invalid("`messages` is empty; send at least one")
                .about("messages")
                .coded("empty_prompt"));
        }
        Some(Value::Array(values)) => values,
        Some(other) => {
            let message = format!("`messages` must be {wants}, not {}", shown(other));
            return Err(ApiError::invalid(message).about("messages"));
        }
    };
    values.iter().enumerate().map(|(index, value)| message(index, value)).collect()
}

fn message(index: usize, value: &Value) -> Result<Message, ApiError> {
    let fields = Fields::of(value, &format!("messages[{index}]"))?;
    let role = match fields.text_needed("role")? {
        "developer" => "system",
        role @ ("system" | "user" | "assistant") => role,
        other => {
            let path = fields.path("role");
            let message = format!("`{path}` must be system, developer, user or assistant, not {other:?}");
            return Err(ApiError::invalid(message).about(path));
        }
    };
    let content = match fields.value("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let mut content = String::new();
            for (part, value) in parts.iter().enumerate() {
                content.push_str(text_part(&format!("{}[{part}]", fields.path("content")), value)?);
            }
            content
        }
        None => return Err(fields.missing("content", "a string or an array of text parts")),
        Some(other) => return Err(fields.wrong("content", "a string or an array of text parts", other)),
    };
    Ok(Message { role: role.into(), content })
}

fn text_part<'a>(path: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    let part = Fields::of(value, path)?;
    match part.text_needed("type")? {
        "text" => part.text_needed("text"),
        other => {
            let message = format!("`{path}` is of type {other:?}; only \"text\" is supported here");
            Err(ApiError::invalid(message).about(path).coded("unsupported_parameter"))
        }
    }
}

fn tokens_max(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let old = fields.integer("max_tokens", 1..=TOKENS_MAX)?;
    let new = fields.integer("max_completion_tokens", 1..=TOKENS_MAX)?;
    Ok(new.or(old).and_then(|count| u32::try_from(count).ok()))
}

#[allow(clippy::cast_possible_truncation)] // see below
fn sampling(fields: &Fields<'_>) -> Result<Sampling, ApiError> {
    let mut sampling = Sampling::greedy();
    // The wire has doubles, the model single precision; the rounding is meant.
    sampling.temperature = fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0) as f32;
    sampling.top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0) as f32;
    sampling.seed = match fields.value("seed") {
        None => fresh_seed(),
        // Negative seeds are as good as others.
        Some(value) => value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)).ok_or_else(|| {
            ApiError::invalid(format!("`seed` must be an integer, not {}", shown(value))).about("seed")
        })?,
    };
    Ok(sampling)
}

fn fresh_seed() -> u64 {
    let mut random = [0u8; 8];
    // Without randomness every unseeded answer is the same one; still an answer.
    let _ = getrandom::fill(&mut random);
    u64::from_le_bytes(random)
}

fn logprobs(fields: &Fields<'_>, form: Form) -> Result<Option<u8>, ApiError> {
    let narrow = |count: u64| u8::try_from(count).unwrap_or(u8::MAX);
    match form {
        Form::Completion => {
            if fields.value("logprobs") == Some(&Value::Bool(false)) {
                return Ok(None);
            }
            Ok(fields.integer("logprobs", 0..=ALTERNATIVES_MAX)?.map(narrow))
        }
        Form::Chat => {
            let top = fields.integer("top_logprobs", 0..=ALTERNATIVES_MAX)?;
            if fields.flag("logprobs")? {
                return Ok(Some(narrow(top.unwrap_or(0))));
            }
            match top {
                None | Some(0) => Ok(None),
                Some(_) => Err(ApiError::invalid("`top_logprobs` needs `logprobs` = true").about("top_logprobs")),
            }
        }
    }
}

fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    let options = fields.value("stream_options");
    if !fields.flag("stream")? {
        return match options {
            None => Ok(Delivery::Whole),
            Some(_) => Err(ApiError::invalid("`stream_options` needs `stream` = true").about("stream_options")),
        };
    }
    let usage = match options {
        None => false,
        Some(options) => Fields::of(options, "stream_options")?.flag("include_usage")?,
    };
    Ok(Delivery::Events { usage })
}

/// A header with a time in milliseconds.
fn millis(request: &Request, name: &'static str) -> Result<Option<Duration>, ApiError> {
    let Some(value) = request.header_lossy(name) else { return Ok(None) };
    match value.parse::<u64>() {
        Ok(millis) if millis > 0 => Ok(Some(Duration::from_millis(1).saturating_mul(millis))),
        _ => {
            Err(ApiError::invalid(format!("the header {name} must be a whole number from 1, not {value:?}"))
                .about(name))
        }
    }
}

/// The API key of a request, as OpenAI's clients send it.
pub(super) fn api_key(request: &Request) -> Option<&str> {
    let (scheme, key) = request.header("authorization")?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// `x-millpond-priority`: 0 to 9.
fn priority(request: &Request) -> Result<u8, ApiError> {
    let name = "x-millpond-priority";
    let Some(value) = request.header(name) else { return Ok(0) };
    let wrong = || ApiError::invalid(format!("the header {name} must be a number from 0 to 9, not {value:?}"));
    value.parse().ok().filter(|priority| *priority <= 9).ok_or_else(|| wrong().about(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Method;

    fn read(form: Form, body: Value) -> Result<Order, ApiError> {
        order(form, &Request::new(Method::Post, "/", body.to_string().into_bytes()))
    }

    #[test]
    fn a_completion_has_openais_defaults() {
        let order = read(Form::Completion, json!({"model": "toy", "prompt": "hi", "from_the_future": [1]})).unwrap();
        assert_eq!((order.generate.tokens_max, order.generate.tokens_default), (None, 16));
        assert_eq!(order.generate.sampling.temperature, 1.0);
        assert_eq!(order.delivery, Delivery::Whole);
        assert_eq!(order.generate.prompt, Prompt::Text("hi".into()));
    }

    #[test]
    fn a_chat_takes_parts_of_text_and_the_newer_name_of_its_limit() {
        let body = json!({"model": "toy", "max_completion_tokens": 5, "stream": true,
            "stream_options": {"include_usage": true},
            "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
        let order = read(Form::Chat, body).unwrap();
        assert_eq!(order.generate.tokens_max, Some(5));
        assert_eq!(order.delivery, Delivery::Events { usage: true });
        let message = Message { role: "system".into(), content: "ab".into() };
        assert_eq!(order.generate.prompt, Prompt::Chat(vec![message]));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_field() {
        let cases = [
            (json!({"prompt": "hi"}), "model"),
            (json!({"model": 3, "prompt": "hi"}), "model"),
            (json!({"model": "toy"}), "prompt"),
            (json!({"model": "toy", "prompt": ""}), "prompt"),
            (json!({"model": "toy", "prompt": []}), "prompt"),
            (json!({"model": "toy", "prompt": {"a": 1}}), "prompt"),
            (json!({"model": "toy", "prompt": ["a", "b"]}), "prompt"),
            (json!({"model": "toy", "prompt": [1, -2]}), "prompt[1]"),
            (json!({"model": "toy", "prompt": "hi", "max_tokens": 0}), "max_tokens"),
            (json!({"model": "toy", "prompt": "hi", "max_tokens": "many"}), "max_tokens"),
            (json!({"model": "toy", "prompt": "hi", "max_tokens": -1}), "max_tokens"),
            (json!({"model": "toy", "prompt": "hi", "temperature": 9}), "temperature"),
            (json!({"model": "toy", "prompt": "hi", "n": 2}), "n"),
            (json!({"model": "toy", "prompt": "hi", "stop": [1]}), "stop"),
            (json!({"model": "toy", "prompt": "hi", "stream": "yes"}), "stream"),
            (json!({"model": "toy", "prompt": "hi", "seed": 1.5}), "seed"),
            (json!({"model": "toy", "prompt": "hi", "echo": true}), "echo"),
        ];
        for (body, field) in cases {
            let error = read(Form::Completion, body.clone()).expect_err(&body.to_string());
            assert_eq!((error.status, error.param.as_deref()), (400, Some(field)), "{body}: {error}");
            assert!(error.message.contains(field), "{error}");
        }
    }

    #[test]
    fn a_chat_that_makes_no_sense_is_refused_by_field() {
        let cases = [
            (json!({"model": "toy"}), "messages"),
            (json!({"model": "toy", "messages": []}), "messages"),
            (json!({"model": "toy", "messages": ["hi"]}), "messages[0]"),
            (json!({"model": "toy", "messages": [{"role": "user"}]}), "messages[0].content"),
            (json!({"model": "toy", "messages": [{"role": "king", "content": "hi"}]}), "messages[0].role"),
            (
                json!({"model": "toy", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "messages[0].content[0]",
            ),
            (json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "tools": [{}]}), "tools"),
            (
                json!({"model": "toy", "messages": [{"role": "user", "content": "hi"}], "top_logprobs": 3}),
                "top_logprobs",
            ),
        ];
        for (body, field) in cases {
            let error = read(Form::Chat, body.clone()).expect_err(&body.to_string());
            assert_eq!((error.status, error.param.as_deref()), (400, Some(field)), "{body}: {error}");
        }
    }
}
