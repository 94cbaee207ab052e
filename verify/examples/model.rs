//! Measures a model by itself: prefill, a suffix after cached tokens beside the suffix alone, and decode.
//!
//! `cargo run --release -p millpond-verify --example model [FILE]`; without FILE, the model that the fetch script left.
//! Pairs are interleaved, and each figure is the median over rounds: a machine that slows down slows both.

use std::time::Instant;

use millpond_node::model::pages::HeapPages;
use millpond_node::model::{Model, Piece, Source};

/// Tokens that are cached before a suffix.
const PREFIX: usize = 1000;
const ROUNDS: usize = 7;

fn main() {
    let source = std::env::args().nth(1).map_or_else(Source::preferred, |file| Source::parse(&file));
    if source == Source::Toy {
        println!("SKIPPED: no model file; fetch one with core/node/scripts/fetch-smollm2.sh");
        return;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let model = source.load(threads).expect("the model");
    let model = &*model;
    println!("model {}, {threads} threads", model.card().id);
    prefill(model);
    for len in [16, 64, 128, 256] {
        suffix(model, len);
    }
    for batch in [1, 16] {
        decode(model, batch);
    }
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
        let end = tokens.len().min(done + model.card().limits.chunk_tokens as usize);
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

fn prefill(model: &dyn Model) {
    let (prompt, mut kv) = (tokens(model, PREFIX + 24, 1), pages(model, PREFIX + 24));
    let mut logits = vec![0.0; model.card().limits.vocabulary as usize];
    let span = median((0..3).map(|_| compute(model, &prompt, 0, &mut kv, &mut logits)).collect());
    println!("prefill of {} tokens: {:.0} tokens/s", prompt.len(), prompt.len() as f64 / span);
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
