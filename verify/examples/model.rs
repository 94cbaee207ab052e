//! Measures a model: prefill beside candle's own loop, a suffix after cached tokens beside the suffix alone, and decode; by
//! itself, and through a store, a prefill and a decode node.
//!
//! `cargo run --release -p millpond-verify --example model [FILE]`; without FILE, the model that the fetch script left.
//! Pairs are interleaved, and each figure is the median over rounds: a machine that slows down slows both.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use millpond_core::time::Duration;
use millpond_node::model::pages::HeapPages;
use millpond_node::model::{Model, Piece, Source, next_chunk};
use millpond_node::runtime::Runtime;
use millpond_tokio::Tokio;
use millpond_verify::reference::{Reference, Weights};
use millpond_verify::trio::{Said, Trio};

/// Tokens that are cached before a suffix.
const PREFIX: usize = 1000;
const SUFFIXES: [usize; 4] = [16, 64, 128, 256];
const ROUNDS: usize = 7;
/// Requests that come 20 ms apart, and the length of their answers.
const REQUESTS: usize = 16;
const ANSWER: usize = 64;

fn main() {
    let source = std::env::args().nth(1).map_or_else(Source::preferred, |file| Source::parse(&file));
    if source == Source::Toy {
        println!("SKIPPED: no model file; fetch one with core/node/scripts/fetch-smollm2.sh");
        return;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let shared = source.load(threads).expect("the model");
    let model = &*shared;
    println!("{}, {threads} threads", model.card().id);
    if let Source::File(path) = &source {
        prefill(model, path);
    }
    for len in SUFFIXES {
        suffix(model, len);
    }
    for batch in [1, 16] {
        decode(model, batch);
    }
    millpond_tokio::run(|runtime| serve(runtime, Arc::clone(&shared))).expect("a runtime");
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("small")
}

/// Tokens without a pattern, the same each time.
fn tokens(model: &dyn Model, count: usize, seed: usize) -> Vec<u32> {
    let token = |n: usize| (n * 2_654_435_761 + seed * 97 + n / 7) % model.card().limits.vocabulary as usize;
    (0..count).map(|n| small(token(n))).collect()
}

fn pages(model: &dyn Model, tokens: usize) -> HeapPages {
    let layout = model.card().layout;
    HeapPages::new(layout, small(usize::try_from(layout.pages_for(tokens as u64)).expect("few pages")))
}

/// Computes `tokens` from position `start` on in chunks, as the prefill role does; seconds.
fn compute(model: &dyn Model, tokens: &[u32], start: usize, kv: &mut HeapPages, logits: &mut [f32]) -> f64 {
    let begun = Instant::now();
    let mut done = 0;
    while done < tokens.len() {
        let end = done + next_chunk(tokens.len() - done, model.card().limits.chunk_tokens as usize);
        let logits = (end == tokens.len()).then_some(&mut *logits);
        let piece = Piece { tokens: &tokens[done..end], start: small(start + done), kv, logits };
        model.forward(&mut [piece]).expect("the pieces are right");
        done = end;
    }
    begun.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn prefill(model: &dyn Model, path: &Path) {
    let (prompt, mut kv) = (tokens(model, PREFIX + 24, 1), pages(model, PREFIX + 24));
    let mut logits = vec![0.0; model.card().limits.vocabulary as usize];
    let speed = |len: usize, span: f64| len as f64 / span;
    let span = median((0..3).map(|_| compute(model, &prompt, 0, &mut kv, &mut logits)).collect());
    println!("prefill of {} tokens: {:.0} tokens/s", prompt.len(), speed(prompt.len(), span));
    let short = &prompt[..128];
    let mut candle = Reference::load(path, Weights::Quantised).expect("candle reads the file");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        ours.push(compute(model, short, 0, &mut kv, &mut logits));
        candle.clear();
        let begun = Instant::now();
        candle.forward(short).expect("candle computes");
        theirs.push(begun.elapsed().as_secs_f64());
    }
    let (ours, theirs) = (speed(128, median(ours)), speed(128, median(theirs)));
    println!("prefill of 128 tokens: {ours:.0} tokens/s, candle's loop {theirs:.1}: {:.1} times", ours / theirs);
}

fn suffix(model: &dyn Model, len: usize) {
    let (prefix, suffix) = (tokens(model, PREFIX, 2), tokens(model, len, 3));
    let (mut long, mut short) = (pages(model, PREFIX + len), pages(model, len));
    let mut logits = vec![0.0; model.card().limits.vocabulary as usize];
    compute(model, &prefix, 0, &mut long, &mut logits);
    let (mut after, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(compute(model, &suffix, 0, &mut short, &mut logits));
        after.push(compute(model, &suffix, PREFIX, &mut long, &mut logits));
    }
    let (after, alone) = (median(after), median(alone));
    let times = after / alone;
    println!("{len} tokens after {PREFIX}: {:.1} ms, alone {:.1} ms, {times:.2} times", after * 1e3, alone * 1e3);
}

/// Steps of `batch` requests that have 200 tokens each.
fn decode(model: &dyn Model, batch: usize) {
    const BEFORE: usize = 200;
    let steps = 32 / batch.min(4);
    let mut requests: Vec<_> = (0..batch).map(|_| pages(model, BEFORE + steps)).collect();
    let vocabulary = model.card().limits.vocabulary as usize;
    let mut logits = vec![vec![0.0; vocabulary]; batch];
    for (seed, (kv, logits)) in requests.iter_mut().zip(&mut logits).enumerate() {
        compute(model, &tokens(model, BEFORE, seed), 0, kv, logits);
    }
    let begun = Instant::now();
    for step in 0..steps {
        let pieces = requests.iter_mut().zip(&mut logits);
        let mut pieces: Vec<_> = pieces
            .map(|(kv, logits)| Piece { tokens: &[77], start: small(BEFORE + step), kv, logits: Some(logits) })
            .collect();
        model.forward(&mut pieces).expect("the pieces are right");
    }
    println!("decode, batch of {batch}: {:.0} tokens/s", (batch * steps) as f64 / begun.elapsed().as_secs_f64());
}

/// Through the nodes: time to the first token, and many requests on one decode node.
async fn serve(runtime: Tokio, model: Arc<dyn Model>) {
    let mut trio = Trio::start(runtime.clone(), Arc::clone(&model), Arc::clone(&model), "").await;
    let (model, block) = (&model, model.card().layout.shape().block_tokens as usize);
    let prefix = tokens(&**model, PREFIX, 4);
    trio.say(&prefix, 1).await;
    trio.stored(PREFIX / block).await;
    for when in ["", ", prefill node restarted"] {
        for len in SUFFIXES {
            first_token(&trio, &**model, &prefix, len, when).await;
        }
        trio.restart_prefill(Arc::clone(model)).await;
    }
    let prompts: Vec<Vec<u32>> = (0..REQUESTS).map(|n| tokens(&**model, 20 + 3 * n, 500 + n)).collect();
    let (mut solo, begun) = (Vec::new(), Instant::now());
    for prompt in &prompts {
        solo.push(trio.say(prompt, small(ANSWER)).await.tokens);
    }
    let one = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let runs = prompts.iter().enumerate().map(|(n, prompt)| {
        let (trio, runtime) = (&trio, &runtime);
        async move {
            runtime.sleep(Duration::from_millis(20 * n as u64)).await;
            trio.say(prompt, small(ANSWER)).await
        }
    });
    let together = futures::future::join_all(runs).await;
    let all = begun.elapsed().as_secs_f64();
    let equal = together.iter().zip(&solo).filter(|(said, solo)| said.tokens == **solo).count();
    let batch = together.iter().map(|said| said.batch_max).max().unwrap_or(0);
    let speed = |span: f64| (REQUESTS * ANSWER) as f64 / span;
    println!(
        "{REQUESTS} requests 20 ms apart: {:.0} tokens/s, one after the other {:.0}: {:.1} times; batch up to {batch}; \
         {equal} of {REQUESTS} say what they say alone",
        speed(all),
        speed(one),
        one / all
    );
    trio.end().await;
}

/// Where the time to a first token went, in seconds.
#[derive(Default)]
struct Spans {
    total: Vec<f64>,
    load: Vec<f64>,
    queue: Vec<f64>,
    compute: Vec<f64>,
}

impl Spans {
    fn note(&mut self, said: &Said) {
        let times = said.started.prefill.unwrap_or_default();
        let seconds = |ns: u64| ns as f64 / 1e9;
        self.total.push(said.first_token_s);
        self.load.push(seconds(times.load_ns));
        self.queue.push(seconds(times.queue_ns));
        self.compute.push(seconds(times.compute_ns));
    }

    /// The median, and what it is made of.
    fn close(self) -> (f64, String) {
        let Self { total, load, queue, compute } = self;
        let (total, load, queue, compute) = (median(total), median(load), median(queue), median(compute));
        let [total_ms, load, queue, compute] = [total, load, queue, compute].map(|seconds| seconds * 1e3);
        (total, format!("{total_ms:.1} ms (load {load:.1}, queue {queue:.1}, compute {compute:.1})"))
    }
}

/// A prompt of which `PREFIX` tokens were seen before, beside a prompt of just those tokens that it leaves uncached: the last
/// whole block of the prefix ends before the prefix does.
async fn first_token(trio: &Trio<Tokio>, model: &dyn Model, prefix: &[u32], len: usize, when: &str) {
    let (mut after, mut alone) = (Spans::default(), Spans::default());
    let block = model.card().layout.shape().block_tokens as usize;
    let uncached = len + prefix.len() % block;
    for round in 0..ROUNDS {
        let seed = 1000 + len * 100 + 2 * round + when.len();
        alone.note(&trio.say(&tokens(model, uncached, seed), 1).await);
        let long = [prefix, &tokens(model, len, seed + 1)].concat();
        let said = trio.say(&long, 1).await;
        assert_eq!(
            long.len() - said.started.cached_tokens as usize,
            uncached,
            "all whole blocks of the prefix were cached"
        );
        after.note(&said);
    }
    let ((after, after_text), (alone, alone_text)) = (after.close(), alone.close());
    let (cached, times) = (prefix.len() + len - uncached, after / alone);
    println!("first token, {uncached} after {cached} cached{when}: {after_text}; alone {alone_text}; {times:.2} times");
}
