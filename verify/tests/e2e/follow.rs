//! A router that follows the store's directory, knows its tenants and writes down what it decides.

use std::fs;
use std::io::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::client::{Answer, Wish, ask, ask_with};
use crate::cluster::{Binary, Folder, Process, eventually, wait_ready};
use crate::equal::prompt;

const SPAN: Duration = Duration::from_secs(20);
/// Alice's key, and Bob's.
const ALICE: &str = "sk-a";
const BOB: &str = "sk-b";

/// The head's line with an API key.
fn bearer(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("authorization: Bearer {key}\r\n") }
}

/// What the router knows of its nodes and the store.
fn view(router: SocketAddr) -> Result<Value, Error> {
    Ok(ask(router, "GET", "/debug/explain", b"")?.json()?["router"].clone())
}

/// Status, id and body of a completion.
fn complete(router: SocketAddr, wish: &Wish, lines: &str) -> (u16, String, Value) {
    let answer = ask_with(router, "POST", "/v1/completions", wish.body().to_string().as_bytes(), lines);
    let answer = answer.expect("the router answers");
    let (status, id) = (answer.status, answer.header("x-request-id").unwrap_or_default().to_owned());
    (status, id, answer.json().expect("JSON"))
}

/// The record of a request.
fn record(router: SocketAddr, id: &str, key: &str) -> Value {
    let answer = ask_with(router, "GET", &format!("/v1/requests/{id}"), b"", &bearer(key)).expect("the router answers");
    assert_eq!(answer.status, 200, "{id}");
    answer.json().expect("JSON")
}

fn run(binary: Binary, arguments: &[&str]) -> Output {
    Command::new(binary.path()).args(arguments).output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// A directory that holds no blocks itself, a store, a prefill node, a decode node, and a router that follows.
struct Followed {
    // In this order they are taken down.
    router: Process,
    decode: Process,
    prefill: Process,
    store: Process,
    directory: Process,
    binary: Binary,
    log: PathBuf,
    folder: Folder,
}

impl Followed {
    fn start(binary: Binary) -> Self {
        let folder = Folder::new();
        let start = |name: &str, roles: &str| Process::start(&folder, binary, name, "", roles);
        let directory = start("directory", "[store]\nsize = 4096\ndirectory = true");
        let at = format!("[directory]\naddress = \"{}\"\n\n", directory.address);
        let model = format!("{at}[model]\nthreads = 1\n\n");
        let roles = [
            ("store", format!("{at}[store]\nsize = \"64MiB\"")),
            ("prefill", format!("{model}[prefill]\nmemory = \"32MiB\"")),
            ("decode", format!("{model}[decode]\nmemory = \"32MiB\"")),
        ];
        let [store, prefill, decode] = std::thread::scope(|scope| {
            let start = &start;
            let started = roles.each_ref().map(|(name, roles)| scope.spawn(move || start(name, roles)));
            started.map(|node| node.join().expect("it starts"))
        });
        let log = folder.path("decisions");
        let roles = format!(
            "{at}[router]\nprefill = [\"{}\"]\ndecode = [\"{}\"]\ntenants = \"{}\"\ndecisions = \"{}\"",
            prefill.address,
            decode.address,
            tenants(&folder).display(),
            log.display()
        );
        let router = start("router", &roles);
        wait_ready(router.http);
        Self { router, decode, prefill, store, directory, binary, log, folder }
    }

    fn store_view(&self) -> Result<Value, Error> {
        Ok(view(self.router.http)?["store"].clone())
    }

    /// Waits until the router knows of exactly `blocks` blocks.
    fn await_blocks(&self, what: &str, blocks: usize) {
        eventually(what, SPAN, || {
            self.store_view().is_ok_and(|view| view["state"] == "current" && view["blocks"] == blocks)
        });
    }

    /// What `status` says of the cluster, and whether it is content.
    fn status(&self) -> (String, bool) {
        let nodes = [&self.directory, &self.store, &self.prefill, &self.decode, &self.router];
        let node = |node: &Process| json!({"name": node.name, "address": node.address, "http": node.http});
        let cluster = json!({"pid": std::process::id(), "http": self.router.http, "key": "",
            "directory": self.directory.address, "nodes": nodes.map(node)});
        let file = self.folder.path("cluster.json");
        fs::write(&file, cluster.to_string()).expect("a writable folder");
        let output = Command::new(self.binary.path()).arg("status").env("MILLPOND_CLUSTER", &file).output();
        let output = output.expect("the binary runs");
        (said(&output), output.status.success())
    }

    /// Blocks of KV that the directory lists.
    fn listed(&self) -> usize {
        let output = run(self.binary, &["ls", "kv/", "--node", &self.directory.address.to_string()]);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        String::from_utf8_lossy(&output.stdout).lines().count()
    }

    /// A whole answer for a tenant: the tokens that its placement counted on, those that were found, and the text.
    fn ask(&self, wish: &Wish, key: &str) -> (u64, u64, String) {
        let (status, id, body) = complete(self.router.http, wish, &bearer(key));
        assert_eq!(status, 200, "{body}");
        let placement = &record(self.router.http, &id, key)["placement"];
        let expected = placement["candidates"][0]["reused_tokens"].as_u64().expect("a candidate");
        let found = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("usage");
        (expected, found, body["choices"][0]["text"].as_str().expect("text").to_owned())
    }
}

fn tenants(folder: &Folder) -> PathBuf {
    let file = folder.path("tenants.toml");
    let text = format!("[alice]\nkeys = [\"{ALICE}\"]\nweight = 1\n[bob]\nkeys = \"{BOB}\"\n");
    fs::write(&file, text).expect("a writable folder");
    file
}

/// Two prompts of 70 tokens, four whole blocks, of which the first 64 are the same.
fn wishes() -> [Wish; 2] {
    let (first, mut second) = (prompt(5, 70), prompt(6, 70));
    second[..64].copy_from_slice(&first[..64]);
    [first, second].map(|tokens| Wish::new(tokens, 4))
}

fn refuses_strangers(cluster: &Followed, wish: &Wish) {
    let http = cluster.router.http;
    for (key, what) in [("", "no API key was sent"), ("sk-c", "the API key is not known here")] {
        let (status, _, body) = complete(http, wish, &bearer(key));
        let message = body["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((status, &body["error"]["code"]), (401, &"invalid_api_key".into()), "{body}");
        assert!(message.contains(what) && message.contains("authorization: Bearer"), "{message}");
    }
}

fn finds_what_was_stored(cluster: &Followed, [first, second]: &[Wish; 2]) -> (String, String) {
    let (expected, found, text) = cluster.ask(first, ALICE);
    assert_eq!((expected, found), (0, 0), "nothing is stored yet");
    cluster.await_blocks("the blocks of the first prompt are known", 4);
    let (expected, found, other) = cluster.ask(second, ALICE);
    assert_eq!((expected, found), (64, 64), "the same prefix is where it is believed to be");
    let (expected, found, again) = cluster.ask(second, BOB);
    assert_eq!((expected, found), (0, 0), "a tenant's blocks are its own");
    assert_eq!(other, again, "loaded or computed, it says the same");
    cluster.await_blocks("the other tenant's blocks are known too", 8);
    assert_eq!(cluster.listed(), 8);
    let view = cluster.store_view().expect("the router answers");
    assert_eq!((&view["blocks_expected"], &view["blocks_missing"]), (&4.into(), &0.into()), "{view}");
    let (status, is_content) = cluster.status();
    assert!(is_content && status.contains("follows      8 blocks, term "), "{status}");
    (text, other)
}

/// kill -9 of the prefill node, the directory and the store node.
fn survives(cluster: &mut Followed, [first, second]: &[Wish; 2], texts: &(String, String)) {
    let http = cluster.router.http;
    cluster.prefill.kill();
    std::thread::scope(|scope| {
        let request = scope.spawn(|| complete(http, first, &bearer(ALICE)));
        cluster.prefill.restart();
        let (status, _, body) = request.join().expect("no panic");
        assert_eq!((status, body["choices"][0]["text"].as_str()), (200, Some(&*texts.0)), "{body}");
    });
    wait_ready(http);
    eventually("the store outlives the prefill node", SPAN, || cluster.ask(first, ALICE) == (64, 64, texts.0.clone()));

    let before = cluster.store_view().expect("the router answers");
    cluster.directory.kill();
    eventually("the directory is missed", SPAN, || cluster.store_view().is_ok_and(|view| view["state"] == "lost"));
    assert!(cluster.store_view().is_ok_and(|view| view["why"].is_string()), "and it says why");
    let (status, is_content) = cluster.status();
    assert!(!is_content && status.contains("does not follow the directory: "), "{status}");
    assert_eq!(cluster.ask(second, ALICE).2, texts.1, "without a directory it is computed");
    cluster.directory.restart();
    cluster.await_blocks("the store node tells the new directory what it has", 8);
    let after = cluster.store_view().expect("the router answers");
    assert!(after["term"].as_u64() > before["term"].as_u64(), "{before} {after}");
    assert!(after["snapshots"].as_u64() > before["snapshots"].as_u64(), "{before} {after}");
    eventually("the prefill node loads again", SPAN, || cluster.ask(first, ALICE) == (64, 64, texts.0.clone()));

    cluster.store.kill();
    cluster.await_blocks("what a dead store node had is forgotten", 0);
    let (expected, found, text) = cluster.ask(first, ALICE);
    assert_eq!((expected, found, &text), (0, 0, &texts.0));
    cluster.store.restart();
    eventually("the store takes blocks again", SPAN, || {
        assert_eq!(cluster.ask(first, ALICE).2, texts.0);
        cluster.store_view().is_ok_and(|view| view["blocks"].as_u64() >= Some(4))
    });
    eventually("and they are loaded", SPAN, || cluster.ask(first, ALICE) == (64, 64, texts.0.clone()));
}

/// The decision log replays to what the router said, and an altered byte of it is found.
fn replays(mut cluster: Followed, wish: &Wish) {
    let http = cluster.router.http;
    let (_, id, _) = complete(http, wish, &bearer(ALICE));
    let view = view(http).expect("the router answers");
    cluster.router.signal(Signal::TERM);
    assert!(cluster.router.ended(SPAN).success());
    let log = cluster.log.display().to_string();
    let output = run(cluster.binary, &["explain", "--json", "--log", &log, &id]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((&lines[0]["decisions"], &lines[0]["hash"]), (&view["decisions"], &view["decisions_hash"]));
    assert_eq!(lines[1]["candidates"][0]["reused_tokens"], 64, "{lines:?}");
    let mut bytes = fs::read(&cluster.log).expect("it was written");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let altered = cluster.folder.path("altered");
    fs::write(&altered, &bytes).expect("a writable folder");
    let output = run(cluster.binary, &["explain", "--log", &altered.display().to_string()]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains(" was altered"), "{}", said(&output));
}

fn follows(binary: Binary) {
    let mut cluster = Followed::start(binary);
    cluster.await_blocks("an empty store is known", 0);
    let joined = format!("node {}", cluster.store.address);
    let is_owner = |line: &str| line.starts_with("store ") && line.contains(" active ") && line.contains(&joined);
    eventually("the store node joined", SPAN, || cluster.status().0.lines().any(is_owner));
    let wishes = wishes();
    refuses_strangers(&cluster, &wishes[0]);
    let texts = finds_what_was_stored(&cluster, &wishes);
    survives(&mut cluster, &wishes, &texts);
    replays(cluster, &wishes[0]);
}

#[test]
fn a_router_knows_what_the_store_has_through_restarts_and_its_log_replays() {
    std::thread::scope(|scope| {
        let runs = [Binary::Tokio, Binary::Smol].map(|binary| scope.spawn(move || follows(binary)));
        runs.into_iter().for_each(|run| run.join().expect("it follows"));
    });
}

/// Starts an answer that lasts, and gives it once its first token is there.
fn begin(router: SocketAddr, lines: &str) -> Answer {
    let mut body = Wish::new(prompt(1, 8), 3_000).body();
    body["stream"] = true.into();
    let answer = ask_with(router, "POST", "/v1/completions", body.to_string().as_bytes(), lines);
    let mut answer = answer.expect("the router answers");
    assert_eq!(answer.status, 200);
    answer.event().expect("a first piece");
    answer
}

#[test]
fn a_tenant_within_its_share_finds_a_place_where_one_who_takes_more_is_refused() {
    let folder = Folder::new();
    let decode = "[model]\nthreads = 1\n\n[decode]\nmemory = \"32MiB\"\nadmission = \"none\"";
    let decode = Process::start(&folder, Binary::Tokio, "decode", "", decode);
    // As far as the router knows, each request makes a step a second longer.
    let profile = folder.path("profile.toml");
    let text = "block_tokens = 16\n[decode]\nfixed = 0.0\nper_request = 1.0\nper_token = 0.0\n";
    fs::write(&profile, text).expect("a writable folder");
    let roles = format!(
        "[router]\ndecode = [\"{}\"]\ntenants = \"{}\"\nprofile = \"{}\"",
        decode.address,
        tenants(&folder).display(),
        profile.display()
    );
    let router = Process::start(&folder, Binary::Tokio, "router", "", &roles);
    let http = router.http;
    wait_ready(http);
    let slow = |key: &str| format!("{}x-millpond-tbt-slo-ms: 2500\r\n", bearer(key));
    let _bobs = [(); 2].map(|()| begin(http, &slow(BOB)));
    let wish = Wish::new(prompt(2, 8), 4);
    for _ in 0..4 {
        let (status, _, body) = complete(http, &wish, &slow(BOB));
        assert_eq!((status, &body["error"]["code"]), (429, &"refused".into()), "{body}");
    }
    let (status, id, body) = complete(http, &wish, &slow(ALICE));
    assert_eq!(status, 200, "{body}");
    assert_eq!(record(http, &id, ALICE)["placement"]["is_favoured"], true);
    assert_eq!(complete(http, &wish, &slow(BOB)).0, 429, "it has more than its share already");
}
