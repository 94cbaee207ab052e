//! Nodes that are killed or stopped in the middle of requests: every request ends in time, with right tokens or with an
//! error that says so, and the cluster serves again once the node is back.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::client::{Wish, ask, complete, metric, token_ids};
use crate::cluster::{Alone, Binary, Cluster, Plan, Process, eventually};
use crate::equal::{prompt, wait_stored};

/// How long a request may last once a node is gone or silent: a silent peer is given up after 10 s, and a request that has
/// no token yet is tried again for 15 s.
const ENDED_WITHIN: Duration = Duration::from_secs(28);
/// Requests under way when it happens.
const REQUESTS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Store,
    Prefill,
    Decode,
    Router,
}

fn node(cluster: &mut Cluster, role: Role) -> &mut Process {
    match role {
        Role::Store => &mut cluster.store,
        Role::Prefill => &mut cluster.prefill,
        Role::Decode => &mut cluster.decode,
        Role::Router => &mut cluster.router,
    }
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Whole,
    /// After so many tokens.
    Failed(usize, String),
}

/// Streams `wish` to its end; tells `begun` at the first token. What comes must be a beginning of `wanted`.
fn stream(http: SocketAddr, wish: &Wish, wanted: &[u32], begun: &mpsc::Sender<()>) -> Outcome {
    let mut body = wish.body();
    body["stream"] = true.into();
    let mut said = Vec::new();
    let failed = |said: &[u32], what: String| Outcome::Failed(said.len(), what);
    let mut answer = match ask(http, "POST", "/v1/completions", body.to_string().as_bytes()) {
        Ok(answer) => answer,
        Err(error) => return failed(&said, error.to_string()),
    };
    if answer.status != 200 {
        let (status, text) = (answer.status, answer.text().unwrap_or_default());
        assert!([429, 502, 503, 504].contains(&status) && text.contains("\"error\""), "{status}: {text}");
        return failed(&said, text);
    }
    loop {
        let event = match answer.event() {
            Ok(Some(event)) if event == "[DONE]" => break,
            Ok(Some(event)) => event,
            Ok(None) => return failed(&said, "the stream was cut".into()),
            Err(error) => return failed(&said, error.to_string()),
        };
        let event: serde_json::Value = serde_json::from_str(&event).expect("events are JSON");
        if event["error"].is_object() {
            return failed(&said, event["error"].to_string());
        }
        said.extend(token_ids(&event["choices"][0]));
        assert_eq!(said, wanted[..said.len()], "wrong tokens");
        let _ = begun.send(());
    }
    assert_eq!(said.len(), wanted.len(), "an answer that ends as it should is whole");
    Outcome::Whole
}

/// A long answer, a long prompt, and two of medium length.
fn wishes() -> [Wish; REQUESTS as usize] {
    [(30, 300), (800, 20), (100, 150), (300, 50)].map(|(len, count)| Wish::new(prompt(len, len as usize), count))
}

/// What is done to a node, and how it is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    /// kill -9; started again a moment later.
    Killed,
    /// SIGSTOP; goes on once all requests have ended, or, if it is the router, which alone can tell its clients anything,
    /// after a second.
    Stopped,
}

impl Harm {
    fn begin(self, node: &mut Process) {
        match self {
            Self::Killed => node.kill(),
            Self::Stopped => node.signal(Signal::STOP),
        }
    }

    fn end(self, node: &mut Process) {
        match self {
            Self::Killed => node.restart(),
            Self::Stopped => node.signal(Signal::CONT),
        }
    }

    /// Whether it ends while requests are under way.
    fn is_short(self, role: Role) -> bool {
        self == Self::Killed || role == Role::Router
    }
}

/// Has requests under way, harms the node once the first tokens are there, waits for all of them to end, and asks again.
fn survive(binary: Binary, role: Role, harm: Harm, wanted: &[Vec<u32>]) -> Vec<Outcome> {
    let mut cluster = Cluster::start(Plan::of(binary));
    let http = cluster.router.http;
    let (sender, begun) = mpsc::channel();
    let wishes = wishes();
    let what = format!("{role:?}");
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let requests: Vec<_> = (wishes.iter().zip(wanted))
            .map(|(wish, wanted)| {
                let sender = sender.clone();
                scope.spawn(move || {
                    let outcome = stream(http, wish, wanted, &sender);
                    (outcome, Instant::now())
                })
            })
            .collect();
        begun.recv_timeout(Duration::from_secs(20)).expect("a first token");
        harm.begin(node(&mut cluster, role));
        let harmed = Instant::now();
        if harm.is_short(role) {
            std::thread::sleep(Duration::from_secs(1));
            harm.end(node(&mut cluster, role));
        }
        let outcomes = requests.into_iter().map(|request| {
            let (outcome, ended) = request.join().expect("no panic");
            let took = ended.saturating_duration_since(harmed);
            assert!(took < ENDED_WITHIN, "{what}: {outcome:?} took {took:?}");
            outcome
        });
        outcomes.collect()
    });
    if !harm.is_short(role) {
        harm.end(node(&mut cluster, role));
    }
    cluster.wait_ready();
    let good = Wish::new(wishes[2].tokens.clone(), 20);
    eventually(&format!("{role:?}: a good request afterwards"), Duration::from_secs(20), || {
        match complete(http, &good) {
            Ok(said) => {
                assert_eq!(said.tokens, wanted[2][..20]);
                true
            }
            Err(_) => false,
        }
    });
    eventually(&format!("{role:?}: pages come back"), Duration::from_secs(20), || {
        [&cluster.prefill, &cluster.decode].iter().all(|node| {
            metric(node.http, "millpond_kv_pages_total", "") == metric(node.http, "millpond_kv_pages_free", "")
        })
    });
    outcomes
}

fn wanted() -> Vec<Vec<u32>> {
    let alone = Alone::start();
    wishes().iter().map(|wish| complete(alone.node.http, wish).expect("alone").tokens).collect()
}

fn each_role(binary: Binary, harm: Harm) {
    let wanted = wanted();
    let roles = [Role::Store, Role::Prefill, Role::Decode, Role::Router];
    std::thread::scope(|scope| {
        let wanted = &wanted;
        let harmed = roles.map(|role| (role, scope.spawn(move || survive(binary, role, harm, wanted))));
        for (role, outcomes) in harmed {
            let outcomes = outcomes.join().expect("it survives");
            println!("{binary:?}, {role:?} {harm:?}: {outcomes:?}");
            if role == Role::Store {
                let is_whole = outcomes.iter().all(|outcome| *outcome == Outcome::Whole);
                assert!(is_whole, "without a store nothing is lost but time: {outcomes:?}");
            }
            if role != Role::Router && harm == Harm::Killed {
                let is_begun = outcomes.iter().all(|outcome| !matches!(outcome, Outcome::Failed(0, _)));
                assert!(is_begun, "before its first token a request waits for the node: {outcomes:?}");
            }
        }
    });
}

#[test]
fn a_killed_node_costs_errors_at_most_and_is_missed_only_until_it_is_back() {
    each_role(Binary::Tokio, Harm::Killed);
    each_role(Binary::Smol, Harm::Killed);
}

#[test]
fn a_stopped_node_costs_errors_at_most_and_is_missed_only_until_it_goes_on() {
    each_role(Binary::Tokio, Harm::Stopped);
}

#[test]
fn a_prompt_is_computed_again_when_its_prefill_node_is_killed_and_comes_back() {
    let wish = Wish::new(prompt(9, 3_000), 10);
    let alone = Alone::start();
    let wanted = complete(alone.node.http, &wish).expect("alone");
    drop(alone);
    let mut cluster = Cluster::start(Plan::of(Binary::Tokio));
    let http = cluster.router.http;
    std::thread::scope(|scope| {
        let request = scope.spawn(|| complete(http, &wish));
        eventually("it is being computed", Duration::from_secs(10), || {
            metric(cluster.prefill.http, "millpond_prefill_requests", "") > 0.0
        });
        cluster.prefill.restart();
        let said = request.join().expect("no panic").expect("the router tries again before the first token");
        assert_eq!(said.tokens, wanted.tokens);
    });
}

#[test]
fn prefix_hits_survive_the_prefill_process() {
    for binary in [Binary::Tokio, Binary::Smol] {
        let mut cluster = Cluster::start(Plan::of(binary));
        let wish = Wish::new(prompt(11, 170), 12);
        let first = complete(cluster.router.http, &wish).expect("no hit");
        wait_stored(&cluster, 10);
        cluster.prefill.restart();
        let again = complete(cluster.router.http, &wish).expect("a full hit");
        assert_eq!((again.tokens, first.cached, again.cached), (first.tokens, 0, 160));
    }
}
