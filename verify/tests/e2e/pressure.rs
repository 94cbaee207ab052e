//! Nodes with less memory than is asked of them, and nodes that are told to end: what was begun is finished all the same.

use std::time::Duration;

use rustix::process::Signal;

use crate::client::{Said, Wish, complete, metric};
use crate::cluster::{Alone, Binary, Cluster, Folder, Plan, Process, eventually, wait_ready};
use crate::equal::{prompt, record};

/// Requests at a time.
const REQUESTS: u32 = 6;

fn wish(index: u32) -> Wish {
    Wish::new(prompt(200 + index, 60 + 10 * index as usize), 150)
}

fn all_at_once(http: std::net::SocketAddr) -> Vec<Said> {
    std::thread::scope(|scope| {
        let requests: Vec<_> =
            (0..REQUESTS).map(|index| scope.spawn(move || complete(http, &wish(index)).expect("an answer"))).collect();
        requests.into_iter().map(|request| request.join().expect("no panic")).collect()
    })
}

fn wanted() -> Vec<Said> {
    let alone = Alone::start();
    (0..REQUESTS).map(|index| complete(alone.node.http, &wish(index)).expect("alone")).collect()
}

fn assert_equal(said: &[Said], wanted: &[Said]) {
    for (index, (said, wanted)) in said.iter().zip(wanted).enumerate() {
        assert_eq!((&said.tokens, &said.text), (&wanted.tokens, &wanted.text), "request {index}");
    }
}

#[test]
fn requests_that_do_not_fit_together_take_turns_and_say_the_same() {
    let wanted = wanted();
    for binary in [Binary::Tokio, Binary::Smol] {
        // 32 pages of 16 tokens each: room for two of the requests at their end.
        let plan = Plan { decode_lines: "memory = \"1MiB\"", prefill_lines: "memory = \"1MiB\"", ..Plan::of(binary) };
        let cluster = Cluster::start(plan);
        let said = all_at_once(cluster.router.http);
        assert_equal(&said, &wanted);
        let pauses: u64 = said.iter().filter_map(|said| record(&cluster, &said.id)["pauses"].as_u64()).sum();
        assert!(pauses > 0, "nobody had to pause: this proves nothing");
        assert_eq!(metric(cluster.decode.http, "millpond_kv_pages_total", ""), 32.0);
        eventually("pages come back", Duration::from_secs(10), || {
            metric(cluster.decode.http, "millpond_kv_pages_free", "") == 32.0
        });
    }
}

#[test]
fn a_node_that_is_all_roles_at_once_serves_itself() {
    let wanted = wanted();
    for binary in [Binary::Tokio, Binary::Smol] {
        let folder = Folder::new();
        let roles = "[store]\nsize = \"32MiB\"\ndirectory = true\n\n[model]\nthreads = 1\n\n[prefill]\nmemory = \"1MiB\"\n\n\
                     [decode]\nmemory = \"1MiB\"\n\n[router]";
        let node = Process::start(&folder, binary, "all", "", roles);
        wait_ready(node.http);
        assert_equal(&all_at_once(node.http), &wanted);
        eventually("blocks are stored", Duration::from_secs(10), || {
            metric(node.http, "millpond_store_objects", "") >= 20.0
        });
        let again = complete(node.http, &wish(5)).expect("an answer");
        assert_eq!((&again.tokens, again.cached), (&wanted[5].tokens, 96));
    }
}

#[test]
fn nodes_that_compute_prompts_for_each_other_do_not_wait_for_each_other_for_ever() {
    let wanted = wanted();
    let folder = Folder::new();
    let roles = "[model]\nthreads = 1\n\n[prefill]\nmemory = \"256KiB\"\n\n[decode]\nmemory = \"1MiB\"";
    let nodes = ["a", "b"].map(|name| Process::start(&folder, Binary::Tokio, name, "", roles));
    let router = |name: &str, prefill: &Process, decode: &Process| {
        let roles = format!("[router]\nprefill = [\"{}\"]\ndecode = [\"{}\"]", prefill.address, decode.address);
        let router = Process::start(&folder, Binary::Tokio, name, "", &roles);
        wait_ready(router.http);
        router
    };
    let routers = [router("there", &nodes[0], &nodes[1]), router("back", &nodes[1], &nodes[0])];
    std::thread::scope(|scope| {
        let all = routers.each_ref().map(|router| scope.spawn(|| all_at_once(router.http)));
        all.into_iter().for_each(|said| assert_equal(&said.join().expect("no panic"), &wanted));
    });
}

#[test]
fn a_node_that_is_told_to_end_finishes_what_it_began() {
    let wanted = wanted();
    for binary in [Binary::Tokio, Binary::Smol] {
        let folder = Folder::new();
        let roles = "[model]\nthreads = 1\n\n[decode]\nmemory = \"32MiB\"\n\n[router]";
        let mut node = Process::start(&folder, binary, "ending", "drain = \"30s\"", roles);
        wait_ready(node.http);
        let (http, first) = (node.http, wish(0));
        std::thread::scope(|scope| {
            let request = scope.spawn(|| complete(http, &first).expect("it was begun in time"));
            eventually("it is under way", Duration::from_secs(10), || {
                metric(http, "millpond_decode_tokens_total", "") > 5.0
            });
            node.signal(Signal::TERM);
            assert_equal(&[request.join().expect("no panic")], &wanted[..1]);
        });
        let status = node.ended(Duration::from_secs(20));
        assert!(status.success(), "{status}: {}", node.log());
        assert!(complete(http, &first).is_err(), "nobody is there any more");
    }
}
