//! The API over a generator that says what the test wants.

use futures::executor::block_on;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, StreamExt};
use millpond_core::time::Duration;
use serde_json::{Value, json};

use super::*;
use crate::router::{ApiKeys, Failure, Finish, Generate, Generation, Generator, Offer, Piece, Prompt, Tenant, Token};

/// Repeats the prompt, a word a piece; fails where the prompt says so.
struct Parrot;

impl Generator for Parrot {
    fn offers(&self) -> Vec<Offer> {
        vec![Offer { name: "parrot".into(), context: 64 }]
    }

    fn generate(&self, request: Generate) -> BoxFuture<'static, Result<Generation, Failure>> {
        let text = match &request.prompt {
            Prompt::Text(text) => text.clone(),
            Prompt::Chat(messages) => messages[0].content.clone(),
            _ => String::new(),
        };
        async move {
            match text.as_str() {
                _ if request.model != "parrot" => {
                    return Err(Failure::UnknownModel { asked: request.model, known: vec!["parrot".into()] });
                }
                "busy" => {
                    let retry_after = Duration::from_millis(1_500);
                    return Err(Failure::Busy { reason: "64 requests wait".into(), retry_after });
                }
                _ => {}
            }
            let mut pieces: Vec<_> = text
                .split_inclusive(' ')
                .map(|word| {
                    if word == "die" {
                        return Err(Failure::NodeLost { role: "decode", tokens: 1, detail: "reset".into() });
                    }
                    let logprob = Some(-0.5);
                    let alternatives = vec![(word.to_owned(), -0.5)];
                    let token = Token { id: 1, text: word.into(), logprob, alternatives };
                    Ok(Piece { text: word.into(), tokens: vec![token], finish: None })
                })
                .collect();
            if let Some(Ok(last)) = pieces.last_mut() {
                last.finish = Some(Finish::Length);
            }
            Ok(Generation { prompt_tokens: 9, cached_tokens: 4, pieces: stream::iter(pieces).boxed() })
        }
        .boxed()
    }

    fn explain(&self, id: &str, _: Option<&str>) -> Option<Value> {
        (id == "req-1").then(|| json!({"id": id}))
    }
}

fn api() -> Api {
    Api::new(std::sync::Arc::new(Parrot), Pages::new("router"))
}

fn post(path: &str, body: &Value) -> Reply {
    block_on(api().answer(Request::new(Method::Post, path, body.to_string().into_bytes())))
}

fn value(reply: Reply) -> Value {
    serde_json::from_str(&reply.text().expect("a whole reply")).expect("JSON")
}

/// The events of a streamed reply; the last is the text `[DONE]`.
fn events(reply: Reply) -> Vec<Value> {
    assert_eq!(reply.status(), 200);
    let bytes: Vec<u8> = block_on(reply.into_chunks().concat());
    let text = String::from_utf8(bytes).unwrap();
    let mut events: Vec<&str> = text.split("\n\n").collect();
    assert_eq!(events.pop(), Some(""), "every event ends in an empty line");
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events.iter().map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

#[test]
fn a_whole_completion_has_text_finish_and_usage() {
    let value = value(post("/v1/completions", &json!({"model": "parrot", "prompt": "one two"})));
    assert_eq!(value["object"], "text_completion");
    assert_eq!(value["choices"][0]["text"], "one two");
    assert_eq!(value["choices"][0]["finish_reason"], "length");
    assert_eq!(value["choices"][0]["logprobs"], Value::Null);
    let usage = json!({"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4}});
    assert_eq!(value["usage"], usage);
}

#[test]
fn a_streamed_chat_opens_with_the_role_and_closes_with_the_usage() {
    let body = json!({"model": "parrot", "stream": true, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": "one two"}]});
    let events = events(post("/v1/chat/completions", &body));
    assert_eq!(events.len(), 4);
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events[1]["choices"][0]["delta"], json!({"content": "one "}));
    assert_eq!(events[2]["choices"][0]["finish_reason"], "length");
    assert_eq!(events[3]["choices"], json!([]));
    assert_eq!(events[3]["usage"]["completion_tokens"], 2);
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
}

#[test]
fn log_probabilities_come_in_each_endpoints_own_shape() {
    let completion = json!({"model": "parrot", "prompt": "one two", "logprobs": 1});
    let value = value(post("/v1/completions", &completion));
    assert_eq!(value["choices"][0]["logprobs"]["text_offset"], json!([0, 4]));
    assert_eq!(value["choices"][0]["logprobs"]["token_logprobs"], json!([-0.5, -0.5]));
    let chat = json!({"model": "parrot", "logprobs": true, "messages": [{"role": "user", "content": "é"}]});
    let reply = post("/v1/chat/completions", &chat);
    let value: Value = serde_json::from_str(&reply.text().unwrap()).unwrap();
    assert_eq!(value["choices"][0]["logprobs"]["content"][0]["bytes"], json!([0xc3, 0xa9]));
}

#[test]
fn a_failure_before_the_first_token_is_a_status() {
    let reply = post("/v1/completions", &json!({"model": "gpt", "prompt": "hi"}));
    assert_eq!(reply.status(), 404);
    assert!(reply.text().unwrap().contains("use one of: parrot"));
    let reply = post("/v1/completions", &json!({"model": "parrot", "prompt": "busy"}));
    assert_eq!(reply.status(), 429);
    assert!(reply.headers.contains(&("retry-after", "2".into())), "{:?}", reply.headers);
}

#[test]
fn a_failure_in_mid_stream_is_an_error_event_and_still_ends_properly() {
    let body = json!({"model": "parrot", "prompt": "one die", "stream": true});
    let events = events(post("/v1/completions", &body));
    assert_eq!(events[1]["error"]["code"], "node_lost");
}

#[test]
fn a_failure_in_mid_answer_is_a_status_while_nothing_was_sent() {
    let reply = post("/v1/completions", &json!({"model": "parrot", "prompt": "one die"}));
    assert_eq!(reply.status(), 502);
}

#[test]
fn paths_and_methods_that_are_not_there_are_named() {
    let ask = |method, path: &str| block_on(api().answer(Request::new(method, path, Vec::new())));
    assert_eq!(ask(Method::Get, "/v1/completions").status(), 405);
    assert_eq!(ask(Method::Get, "/v2").status(), 404);
    assert_eq!(ask(Method::Post, "/health").status(), 405);
    assert_eq!(ask(Method::Get, "/v1/models/parrot").status(), 200);
    assert_eq!(ask(Method::Get, "/v1/models/gpt").status(), 404);
    assert_eq!(ask(Method::Get, "/v1/requests/req-1").status(), 200);
    assert_eq!(ask(Method::Get, "/v1/requests/req-2").status(), 404);
    assert_eq!(ask(Method::Post, "/v1/completions").status(), 400);
}

/// A parrot that serves those it knows.
struct Guarded {
    keys: ApiKeys,
}

impl Generator for Guarded {
    fn offers(&self) -> Vec<Offer> {
        Parrot.offers()
    }

    fn generate(&self, request: Generate) -> BoxFuture<'static, Result<Generation, Failure>> {
        assert_eq!(request.tenant.as_deref(), Some("alice"));
        Parrot.generate(request)
    }

    fn tenant(&self, key: Option<&str>) -> Result<Option<String>, Failure> {
        Ok(self.keys.tenant(key)?.map(|tenant| tenant.name.clone()))
    }

    fn explain(&self, id: &str, tenant: Option<&str>) -> Option<Value> {
        (id == "req-1" && tenant == Some("alice")).then(|| json!({"id": id, "tenant": "alice"}))
    }
}

#[test]
fn where_there_are_tenants_only_they_are_served_and_each_sees_its_own_requests() {
    let mut keys = ApiKeys::default();
    for (name, key) in [("alice", "sk-a"), ("bob", "sk-b")] {
        assert!(keys.add(Tenant { name: name.into(), weight: 1.0 }, &[key.into()]));
    }
    let api = Api::new(std::sync::Arc::new(Guarded { keys }), Pages::new("router"));
    let ask = |method, path: &str, authorization: Option<&str>| {
        let body = json!({"model": "parrot", "prompt": "hi"}).to_string().into_bytes();
        let mut request = Request::new(method, path, body);
        if let Some(authorization) = authorization {
            request.headers.insert("authorization", authorization.parse().unwrap());
        }
        block_on(api.answer(request))
    };
    for wrong in [None, Some("Bearer sk-c"), Some("Bearer"), Some("Basic sk-a"), Some("sk-a")] {
        let reply = ask(Method::Post, "/v1/completions", wrong);
        assert_eq!(reply.status(), 401, "{wrong:?}");
        assert!(reply.headers.contains(&("www-authenticate", "Bearer".into())), "{:?}", reply.headers);
        let text = reply.text().unwrap();
        assert!(text.contains("invalid_api_key") && !text.contains("sk-c"), "{text}");
        assert_eq!(ask(Method::Get, "/v1/models", wrong).status(), 401);
        assert_eq!(ask(Method::Get, "/v1/requests/req-1", wrong).status(), 401);
    }
    assert_eq!(ask(Method::Post, "/v1/completions", Some("Bearer sk-a")).status(), 200);
    assert_eq!(ask(Method::Get, "/v1/models", Some("bearer  sk-b")).status(), 200);
    assert_eq!(ask(Method::Get, "/v1/requests/req-1", Some("Bearer sk-a")).status(), 200);
    assert_eq!(ask(Method::Get, "/v1/requests/req-1", Some("Bearer sk-b")).status(), 404, "it is somebody else's");
    assert_eq!(ask(Method::Get, "/health", None).status(), 200, "the node's own pages are for its operators");
}

#[test]
fn a_deadline_that_is_no_number_or_no_text_is_refused() {
    let api = Api::new(std::sync::Arc::new(Parrot), Pages::new("router"));
    for (value, status) in [(&b"5000"[..], 200), (b"0", 400), (b"soon", 400), (b"\xff\xfe", 400)] {
        let body = json!({"model": "parrot", "prompt": "hi"}).to_string().into_bytes();
        let mut request = Request::new(Method::Post, "/v1/completions", body);
        request.headers.insert("x-millpond-ttft-slo-ms", hyper::header::HeaderValue::from_bytes(value).unwrap());
        assert_eq!(block_on(api.answer(request)).status(), status, "{value:?}");
    }
}
