//! Many requests on one decode node: they join and leave between steps, and none changes what another one says.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Said, Wish, complete, metric};
use crate::cluster::{Alone, Binary, Cluster, Plan};
use crate::equal::{prompt, record};

const REQUESTS: u32 = 16;
const APART: Duration = Duration::from_millis(20);

fn wish(index: u32) -> Wish {
    // Different lengths of prompt and answer, so that they leave at different steps.
    Wish::new(prompt(100 + index, 5 + 7 * index as usize), 160 + 20 * (index % 5))
}

#[test]
fn requests_join_and_leave_between_steps_and_each_says_what_it_says_alone() {
    let alone = Alone::start();
    let wanted: Vec<Said> =
        (0..REQUESTS).map(|index| complete(alone.node.http, &wish(index)).expect("alone")).collect();
    drop(alone);
    let cluster = Cluster::start(Plan::of(Binary::Tokio));
    let http = cluster.router.http;

    let begun = Instant::now();
    let one = complete(http, &wish(0)).expect("one by itself");
    let rate_of_one = one.tokens.len() as f64 / begun.elapsed().as_secs_f64();

    let over = AtomicBool::new(false);
    let begun = Instant::now();
    let (said, sizes) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut sizes = Vec::new();
            while !over.load(Ordering::Relaxed) {
                sizes.push(metric(cluster.decode.http, "millpond_decode_batch_size", ""));
                std::thread::sleep(Duration::from_millis(3));
            }
            sizes
        });
        let requests: Vec<_> = (0..REQUESTS)
            .map(|index| {
                scope.spawn(move || {
                    std::thread::sleep(APART * index);
                    complete(http, &wish(index)).expect("one of many")
                })
            })
            .collect();
        let said: Vec<Said> = requests.into_iter().map(|request| request.join().expect("no panic")).collect();
        over.store(true, Ordering::Relaxed);
        (said, watch.join().expect("no panic"))
    });
    let span = begun.elapsed().as_secs_f64();
    for (index, (said, wanted)) in said.iter().zip(&wanted).enumerate() {
        assert_eq!((&said.tokens, &said.text), (&wanted.tokens, &wanted.text), "request {index}");
    }
    let largest = sizes.iter().copied().fold(0.0, f64::max);
    assert!(largest > 1.0, "no batch of more than one was seen in /metrics: {sizes:?}");
    let batch_max = said.iter().map(|said| record(&cluster, &said.id)["batch_max"].as_u64().expect("a number"));
    let batch_max = batch_max.max().expect("there are requests");
    assert!(batch_max > 1, "no request says that it was decoded with others");
    let total: usize = said.iter().map(|said| said.tokens.len()).sum();
    println!(
        "{REQUESTS} requests {APART:?} apart: {:.0} tokens/s, one by itself {rate_of_one:.0} tokens/s; batch of at most {batch_max}",
        total as f64 / span
    );
}
