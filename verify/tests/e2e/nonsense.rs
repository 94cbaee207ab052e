//! Requests and neighbours that make no sense: each gets a clear answer, and a good request still works afterwards.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Answer, Wish, ask, complete};
use crate::cluster::{Binary, Cluster, Folder, Plan, Process, wait_ready};
use crate::equal::prompt;

/// A body, and the status, code and field that its refusal has.
type Refused = (Value, u16, Option<&'static str>, Option<&'static str>);

fn refused_completions() -> Vec<Refused> {
    let with = |field: &str, value: Value| {
        let mut body = json!({"model": "toy", "prompt": "hi", "max_tokens": 3});
        body[field] = value;
        body
    };
    vec![
        (with("model", json!("gpt-9")), 404, Some("model_not_found"), Some("model")),
        (with("model", json!(7)), 400, None, Some("model")),
        (json!({"prompt": "hi"}), 400, None, Some("model")),
        (with("prompt", json!("")), 400, Some("empty_prompt"), Some("prompt")),
        (with("prompt", json!([])), 400, Some("empty_prompt"), Some("prompt")),
        (with("prompt", json!({"text": "hi"})), 400, None, Some("prompt")),
        (with("prompt", json!([1, "two"])), 400, None, Some("prompt[1]")),
        (with("prompt", json!([1, 999_999])), 400, Some("unknown_token"), Some("prompt")),
        (with("prompt", json!("x".repeat(5_000))), 400, Some("context_length_exceeded"), Some("prompt")),
        (with("prompt", json!("x".repeat(4_096))), 400, Some("context_length_exceeded"), Some("prompt")),
        (with("max_tokens", json!(5_000)), 400, Some("context_length_exceeded"), Some("prompt")),
        (with("max_tokens", json!(0)), 400, None, Some("max_tokens")),
        (with("max_tokens", json!("many")), 400, None, Some("max_tokens")),
        (with("temperature", json!(-1)), 400, None, Some("temperature")),
        (with("stream", json!("yes")), 400, None, Some("stream")),
        (with("stop", json!([1])), 400, None, Some("stop")),
        (with("n", json!(3)), 400, Some("unsupported_parameter"), Some("n")),
        (json!([1, 2, 3]), 400, None, None),
    ]
}

/// Asserts that `answer` is a refusal in OpenAI's shape.
fn assert_refused(what: &str, answer: Answer, status: u16, code: Option<&str>, param: Option<&str>) {
    let found = answer.status;
    let value = answer.json().unwrap_or_else(|error| panic!("{what}: {error}"));
    let error = &value["error"];
    assert_eq!(found, status, "{what}: {value}");
    assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{what}: {value}");
    assert!(error["type"].is_string(), "{what}: {value}");
    if code.is_some() {
        assert_eq!(error["code"].as_str(), code, "{what}: {value}");
    }
    assert_eq!(error["param"].as_str(), param, "{what}: {value}");
}

fn assert_serves(cluster: &Cluster, seed: u32) {
    let said = complete(cluster.router.http, &Wish::new(prompt(seed, 20), 5)).expect("a good request still works");
    assert_eq!(said.tokens.len(), 5);
}

#[test]
fn requests_that_make_no_sense_are_refused_and_nothing_is_lost() {
    for binary in [Binary::Tokio, Binary::Smol] {
        let cluster = Cluster::start(Plan::of(binary));
        let http = cluster.router.http;
        assert_serves(&cluster, 1);
        for (body, status, code, param) in refused_completions() {
            let what: String = body.to_string().chars().take(120).collect();
            let answer = ask(http, "POST", "/v1/completions", body.to_string().as_bytes()).expect(&what);
            assert_refused(&what, answer, status, code, param);
        }
        for body in ["", "{", "{\"model\": \"toy\", \"prompt\": ", "nonsense", "\u{0}\u{1}", "{\"model\":\"toy\"}}"] {
            let answer = ask(http, "POST", "/v1/completions", body.as_bytes()).expect(body);
            assert_refused(body, answer, 400, None, None);
        }
        let answer = ask(http, "POST", "/v1/completions", b"{\"model\": \"\xff\xfe\"}").expect("no UTF-8");
        assert_refused("no UTF-8", answer, 400, None, None);
        let deep = "[".repeat(100_000);
        let answer = ask(http, "POST", "/v1/completions", deep.as_bytes()).expect("deep nesting");
        assert_refused("deep nesting", answer, 400, None, None);
        let chat = json!({"model": "toy", "messages": [{"role": "king", "content": "hi"}]}).to_string();
        let answer = ask(http, "POST", "/v1/chat/completions", chat.as_bytes()).expect("a role");
        assert_refused("a role", answer, 400, None, Some("messages[0].role"));
        for (method, path, status) in [
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v2/completions", 404),
            ("GET", "/v1/models/gpt-9", 404),
            ("GET", "/v1/requests/nobody", 404),
        ] {
            let answer = ask(http, method, path, b"").expect(path);
            assert_eq!(answer.status, status, "{method} {path}");
        }
        assert_serves(&cluster, 2);
    }
}

#[test]
fn a_body_that_is_too_long_is_refused_before_it_is_read() {
    let cluster = Cluster::start(Plan::of(Binary::Tokio));
    let mut stream = dial(cluster.router.http);
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: e2e\r\ncontent-length: 99999999999\r\n\r\n")
        .expect("a head");
    let answer = read_all(&mut stream);
    assert!(answer.starts_with(b"HTTP/1.1 413 "), "{}", String::from_utf8_lossy(&answer));
    assert_serves(&cluster, 1);
}

/// Bytes that are no protocol; the first ones differ from seed to seed.
fn noise(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    (0..len).map(|_| next()).collect()
}

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    stream
}

/// Everything until the server closes; a reset closes, too.
fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the node neither answers nor closes"),
        _ => bytes,
    }
}

#[test]
fn strangers_at_the_ports_are_answered_or_closed_and_harm_nobody() {
    for binary in [Binary::Tokio, Binary::Smol] {
        let cluster = Cluster::start(Plan::of(binary));
        for node in [&cluster.store, &cluster.prefill, &cluster.decode, &cluster.router] {
            // A browser, or somebody's metrics collector, at the node port.
            let answer = ask(node.address, "GET", "/metrics", b"").expect("an answer in HTTP");
            assert_eq!(answer.status, 426, "{}", node.name);
            assert!(answer.text().expect("a text").contains("node protocol"), "it says what the port is");
            for seed in 1..12 {
                let mut stream = dial(node.address);
                let bytes = noise(seed, 1 << (seed + 4));
                // It may close while this still writes.
                let _ = stream.write_all(&bytes);
                let _ = stream.shutdown(Shutdown::Write);
                read_all(&mut stream);
            }
            // A client that says nothing and leaves.
            drop(dial(node.address));
            // Noise at the HTTP port: a 400, or a closed connection.
            for seed in 1..8 {
                let mut stream = dial(node.http);
                let _ = stream.write_all(&noise(seed, 3_000));
                let _ = stream.shutdown(Shutdown::Write);
                let answer = read_all(&mut stream);
                let text = String::from_utf8_lossy(&answer);
                assert!(answer.is_empty() || text.starts_with("HTTP/1.1 400 "), "{}: {text}", node.name);
            }
            let mut stream = dial(node.http);
            let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\nGET");
            let _ = stream.shutdown(Shutdown::Write);
            let text = String::from_utf8_lossy(&read_all(&mut stream)).into_owned();
            assert!(text.starts_with("HTTP/1.1 4"), "{}: {text}", node.name);
        }
        // Somebody who stays and sends nothing does not keep others out.
        let silent: Vec<TcpStream> = (0..40).map(|_| dial(cluster.decode.address)).collect();
        assert_serves(&cluster, 3);
        drop(silent);
        for node in [&cluster.store, &cluster.prefill, &cluster.decode, &cluster.router] {
            assert!(!node.log().contains("panicked"), "{}: {}", node.name, node.log());
        }
    }
}

/// Runs `serve` with this configuration, which it must refuse: what it says.
fn refused_config(binary: Binary, text: &str) -> String {
    let folder = Folder::new();
    let config = folder.path("wrong.toml");
    std::fs::write(&config, text).expect("a writable folder");
    let begun = Instant::now();
    let mut command = Command::new(binary.path());
    command.args(["serve", "--announce", "--die-with", &std::process::id().to_string(), "--config"]).arg(&config);
    let output = command.output().expect("the binary runs");
    assert!(begun.elapsed() < Duration::from_secs(20), "it says so at once");
    assert!(!output.status.success(), "{text}: it must not serve");
    assert!(output.stdout.is_empty(), "{text}: nothing is announced");
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn a_wrong_configuration_is_refused_by_name() {
    let ports = "[node]\nlisten = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\n";
    for binary in [Binary::Tokio, Binary::Smol] {
        let cases = [
            ("[store]\nsiez = \"1GiB\"\ndirectory = true", "`store.size`"),
            ("[stroe]\nsize = \"1GiB\"", "`store`"),
            ("[decode]\nmemory = \"lots\"", "`decode.memory`"),
            ("[decode]\nmemory = 3.5", "`decode.memory`"),
            ("[decode]\nmemory = \"1KiB\"", "memory"),
            ("[model]\nfile = \"/nowhere/model.gguf\"\n[decode]", "/nowhere/model.gguf"),
            ("[router]", "`router.decode`"),
            ("[store]", "store.directory"),
            ("", "no role"),
            ("[decode\n", "line"),
        ];
        for (text, named) in cases {
            let said = refused_config(binary, &format!("{ports}{text}"));
            assert!(said.contains(named), "{text:?} must be refused with {named}: {said}");
        }
        let said = refused_config(binary, "[node]\nlisten = \"0.0.0.0:0\"\n[decode]");
        assert!(said.contains("node.key"), "open to everybody: {said}");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound");
    for binary in [Binary::Tokio, Binary::Smol] {
        for (port, other) in [("listen", "http"), ("http", "listen")] {
            let text =
                format!("[node]\n{port} = \"{address}\"\n{other} = \"127.0.0.1:0\"\n[decode]\nmemory = \"1MiB\"");
            let said = refused_config(binary, &text);
            assert!(said.contains(&address.to_string()) && said.contains(&format!("node.{port}")), "{said}");
        }
    }
}

#[test]
fn a_node_with_another_key_is_turned_away_and_the_client_is_told_why() {
    let folder = Folder::new();
    let decode =
        Process::start(&folder, Binary::Tokio, "decode", "key = \"one key of many\"", "[decode]\nmemory = \"1MiB\"");
    let roles = format!("[router]\ndecode = [\"{}\"]", decode.address);
    for (name, key, fits) in [("same", "key = \"one key of many\"", true), ("other", "key = \"another\"", false)] {
        let router = Process::start(&folder, Binary::Smol, name, key, &roles);
        if fits {
            wait_ready(router.http);
            complete(router.http, &Wish::new(prompt(1, 20), 5)).expect("an answer");
            continue;
        }
        let answer = ask(router.http, "GET", "/ready", b"").expect("an answer");
        assert_eq!(answer.status, 503);
        let unsaid = complete(router.http, &Wish::new(prompt(1, 20), 5)).expect_err("the keys differ");
        let text = format!("{unsaid:?}");
        assert!(text.contains("no_node") && text.contains("key"), "{text}");
    }
}
