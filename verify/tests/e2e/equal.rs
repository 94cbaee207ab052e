//! Prompt, KV transfer, store and decode over processes say what one process says, token for token: whatever the runtimes,
//! the transport, and how much of the prompt the store has.

use std::time::Duration;

use serde_json::Value;

use crate::client::{Answer, Wish, ask, complete, metric};
use crate::cluster::{Alone, Binary, Cluster, Plan, eventually};

/// Tokens per block of the model.
const BLOCK: usize = 16;
/// Tokens of every answer.
const COUNT: u32 = 24;

/// `len` tokens that no other seed has, from the first block on.
pub(crate) fn prompt(seed: u32, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % 256
    };
    (0..len).map(|_| next()).collect()
}

/// What is known of a request.
pub(crate) fn record(cluster: &Cluster, id: &str) -> Value {
    let answer = ask(cluster.router.http, "GET", &format!("/v1/requests/{id}"), b"");
    answer.and_then(Answer::json).expect("a request is remembered")
}

/// Waits until the store has `count` blocks of the prefill node's making.
pub(crate) fn wait_stored(cluster: &Cluster, count: usize) {
    eventually("blocks are stored", Duration::from_secs(10), || {
        metric(cluster.prefill.http, "millpond_prefill_blocks_stored_total", "") >= count as f64
    });
}

/// One prompt, how many of its tokens the store has by then, and how many blocks are new.
struct Case {
    name: &'static str,
    wish: Wish,
    cached: usize,
    new_blocks: usize,
}

fn cases() -> Vec<Case> {
    let greedy = |tokens| Wish::new(tokens, COUNT);
    let long = prompt(1, 5 * BLOCK + 3);
    let even = prompt(2, 4 * BLOCK);
    let branch = [&long[..3 * BLOCK], &prompt(3, 2 * BLOCK + 5)].concat();
    let random = Wish { random: Some((0.9, 17)), ..greedy(prompt(4, 20)) };
    let case = |name, wish, cached, new_blocks| Case { name, wish, cached, new_blocks };
    vec![
        case("no hit", greedy(long.clone()), 0, 5),
        case("full hit", greedy(long), 5 * BLOCK, 0),
        case("partial hit", greedy(branch), 3 * BLOCK, 2),
        case("exactly n blocks", greedy(even.clone()), 0, 4),
        // The last token is computed in any case, for its logits, and so is its block.
        case("exactly n blocks, again", greedy(even), 3 * BLOCK, 0),
        case("one token", greedy(prompt(5, 1)), 0, 0),
        case("not greedy", random, 0, 1),
        case("over several chunks", greedy(prompt(6, 200)), 0, 12),
    ]
}

fn equal(plans: &[Plan]) {
    let alone = Alone::start();
    let wanted: Vec<_> = cases().iter().map(|case| complete(alone.node.http, &case.wish).expect(case.name)).collect();
    assert!(wanted.iter().all(|said| said.tokens.len() == COUNT as usize && said.cached == 0));
    for plan in plans {
        let cluster = Cluster::start(*plan);
        let mut stored = 0;
        for (case, wanted) in cases().iter().zip(&wanted) {
            let said = complete(cluster.router.http, &case.wish);
            let said = said.unwrap_or_else(|unsaid| panic!("{plan:?}: {}: {unsaid:?}", case.name));
            assert_eq!(
                (&said.tokens, &said.text, &said.finish),
                (&wanted.tokens, &wanted.text, &wanted.finish),
                "{plan:?}: {}",
                case.name
            );
            assert_eq!(said.cached, case.cached as u64, "{plan:?}: {}", case.name);
            let record = record(&cluster, &said.id);
            assert_eq!(record["via"], plan.via, "{plan:?}: {}: {record}", case.name);
            assert_eq!(record["cached_tokens"], case.cached, "{record}");
            stored += case.new_blocks;
            wait_stored(&cluster, stored);
        }
        let cached = cases().iter().map(|case| case.cached as f64).sum::<f64>();
        assert_eq!(metric(cluster.prefill.http, "millpond_prefill_tokens_total", "source=\"cached\""), cached);
        assert_eq!(
            metric(cluster.decode.http, "millpond_prefill_tokens_total", ""),
            0.0,
            "no prompt is computed there"
        );
    }
}

fn over_both(plan: Plan) -> [Plan; 2] {
    [Plan { via: "shm", ..plan }, Plan { via: "tcp", ..plan }]
}

#[test]
fn tokens_are_equal_on_tokio() {
    equal(&over_both(Plan::of(Binary::Tokio)));
}

#[test]
fn tokens_are_equal_on_smol() {
    equal(&over_both(Plan::of(Binary::Smol)));
}

#[test]
fn tokens_are_equal_with_decode_on_smol_and_the_rest_on_tokio() {
    equal(&over_both(Plan { decode: Binary::Smol, ..Plan::of(Binary::Tokio) }));
}

#[test]
fn tokens_are_equal_with_decode_on_tokio_and_the_rest_on_smol() {
    equal(&over_both(Plan { decode: Binary::Tokio, ..Plan::of(Binary::Smol) }));
}

#[test]
fn an_answer_of_one_token_leaves_its_prompt_in_the_store() {
    for plan in over_both(Plan::of(Binary::Tokio)) {
        let cluster = Cluster::start(plan);
        let wish = Wish::new(prompt(7, 10 * BLOCK + 1), 1);
        let first = complete(cluster.router.http, &wish).expect("an answer");
        wait_stored(&cluster, 10);
        let again = complete(cluster.router.http, &wish).expect("an answer");
        assert_eq!((again.tokens, first.cached, again.cached), (first.tokens, 0, 160), "{plan:?}");
    }
}
