//! Answers as events, and clients that leave in the middle of one.

use std::time::Duration;

use serde_json::{Value, json};

use crate::client::{Answer, Wish, ask, complete, metric, token_ids};
use crate::cluster::{Binary, Cluster, Plan, eventually};
use crate::equal::prompt;

/// The events of a streamed answer, up to `[DONE]`.
fn events(cluster: &Cluster, path: &str, body: &Value) -> Vec<Value> {
    let mut answer = ask(cluster.router.http, "POST", path, body.to_string().as_bytes()).expect("an answer");
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    let mut events = Vec::new();
    while let Some(event) = answer.event().expect("a whole stream") {
        if event == "[DONE]" {
            assert_eq!(answer.event().expect("an end"), None, "nothing follows [DONE]");
            return events;
        }
        events.push(serde_json::from_str(&event).expect("events are JSON"));
    }
    panic!("the stream ended without [DONE]: {events:?}");
}

#[test]
fn a_streamed_answer_is_the_whole_one_in_pieces() {
    for binary in [Binary::Tokio, Binary::Smol] {
        let cluster = Cluster::start(Plan::of(binary));
        let wish = Wish::new(prompt(1, 40), 50);
        let whole = complete(cluster.router.http, &wish).expect("a whole answer");
        let mut body = wish.body();
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let events = events(&cluster, "/v1/completions", &body);
        let (usage, pieces) = events.split_last().expect("events");
        assert_eq!(usage["usage"]["completion_tokens"], 50, "{usage}");
        let choices: Vec<&Value> = pieces.iter().map(|event| &event["choices"][0]).collect();
        let text: String = choices.iter().map(|choice| choice["text"].as_str().expect("text")).collect();
        let tokens: Vec<u32> = choices.iter().flat_map(|choice| token_ids(choice)).collect();
        assert_eq!((tokens, text), (whole.tokens, whole.text));
        assert_eq!(choices.last().expect("pieces")["finish_reason"], "length");
        assert!(choices.len() > 10, "it comes in pieces: {}", choices.len());
    }
}

#[test]
fn a_streamed_chat_is_the_whole_one_in_pieces() {
    let cluster = Cluster::start(Plan::of(Binary::Tokio));
    let mut body = json!({"model": "toy", "max_tokens": 30, "temperature": 0,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "häßlich?"}]});
    let answer = ask(cluster.router.http, "POST", "/v1/chat/completions", body.to_string().as_bytes());
    let whole = answer.and_then(Answer::json).expect("an answer");
    let whole = &whole["choices"][0];
    body["stream"] = true.into();
    let events = events(&cluster, "/v1/chat/completions", &body);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["message"]["content"], text);
    assert_eq!(events.last().expect("events")["choices"][0]["finish_reason"], whole["finish_reason"]);
}

/// Pages of a node that somebody holds.
fn pages_used(cluster: &Cluster) -> [f64; 2] {
    [&cluster.prefill, &cluster.decode].map(|node| {
        let total = metric(node.http, "millpond_kv_pages_total", "");
        assert!(total > 0.0, "a serving node has pages");
        total - metric(node.http, "millpond_kv_pages_free", "")
    })
}

#[test]
fn a_client_that_leaves_gives_everything_back() {
    for binary in [Binary::Tokio, Binary::Smol] {
        let cluster = Cluster::start(Plan::of(binary));
        let http = cluster.router.http;
        let is_idle = || {
            pages_used(&cluster) == [0.0, 0.0]
                && metric(http, "millpond_router_requests_open", "") == 0.0
                && metric(cluster.decode.http, "millpond_decode_batch_size", "") == 0.0
                && metric(cluster.prefill.http, "millpond_prefill_requests", "") == 0.0
        };
        eventually("an idle cluster holds nothing", Duration::from_secs(10), is_idle);
        for tokens in [1, 30, 600] {
            let mut body = Wish::new(prompt(tokens, tokens as usize), 3_000).body();
            body["stream"] = true.into();
            let mut leaving = ask(http, "POST", "/v1/completions", body.to_string().as_bytes()).expect("an answer");
            leaving.event().expect("a first piece");
            assert!(pages_used(&cluster)[1] > 0.0, "a running request has pages");
            drop(leaving);
        }
        // And some that leave before anything is answered.
        for seed in 50..54 {
            let body = Wish::new(prompt(seed, 3_000), 100).body().to_string();
            let head = format!("POST /v1/completions HTTP/1.1\r\nhost: e2e\r\ncontent-length: {}\r\n\r\n", body.len());
            let mut stream = std::net::TcpStream::connect(http).expect("it listens");
            std::io::Write::write_all(&mut stream, [head, body].concat().as_bytes()).expect("it reads");
            std::thread::sleep(Duration::from_millis(10 * u64::from(seed - 49)));
        }
        eventually("everything came back", Duration::from_secs(20), is_idle);
        let said = complete(http, &Wish::new(prompt(1, 40), 20)).expect("a good request afterwards");
        assert_eq!(said.tokens.len(), 20);
    }
}
