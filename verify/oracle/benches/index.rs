//! Longest matches in the cluster's prefix index with 1,000 holders, beside `kv-index`, and decisions among 64 and 1,000
//! instances.
//!
//! The bars: 150,000 matches a second on one thread, the 99th percentile below 20 us; a decision's below 30 us and 400 us.
//! Prompts are of 24 blocks, as the conversation trace's are on average: a first block that every holder has, then those of
//! one of 20,000 sessions, which one to four holders have, then four that nobody has.

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use millpond_core::hash::RouteHash;
use millpond_core::prefix::Holder;
use millpond_core::sched::cost::Profile;
use millpond_core::sched::index::{Change, Event, Index, Limits};
use millpond_core::sched::placement::{Options, PrefillView, Prompt, place_prefill};
use millpond_core::time::Duration;

const HOLDERS: u16 = 1_000;
const SESSIONS: u64 = 20_000;
const BLOCKS: u64 = 24;
/// Of them, those that nobody has.
const NEW: usize = 4;

/// Spreads numbers over all of 64 bits.
fn mixed(value: u64) -> u64 {
    let value = (value ^ value >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (value ^ value >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ value
}

/// The blocks of a session's prompt; the first is everybody's.
fn chain(session: u64) -> Vec<u64> {
    (0..BLOCKS).map(|block| if block == 0 { 1 } else { mixed(2 + session * BLOCKS + block) }).collect()
}

fn holders(session: u64) -> impl Iterator<Item = u16> {
    let all = u64::from(HOLDERS);
    (0..1 + mixed(session) % 4).map(move |copy| u16::try_from(mixed(session * 4 + copy) % all).unwrap())
}

/// What is held, in the order in which it was stored: everybody's block first.
fn stored() -> Vec<(u16, Vec<u64>)> {
    let first = (0..HOLDERS).map(|holder| (holder, vec![1]));
    let held = |session| chain(session)[..usize::try_from(BLOCKS).unwrap() - NEW].to_vec();
    first.chain((0..SESSIONS).flat_map(|session| holders(session).map(move |holder| (holder, held(session))))).collect()
}

fn ours() -> Index<RouteHash, 16> {
    let mut index = Index::new(Limits { holders_max: HOLDERS, ..Limits::default() }, 7);
    let mut numbers = vec![0; usize::from(HOLDERS)];
    for (holder, blocks) in stored() {
        numbers[usize::from(holder)] += 1;
        let names: Vec<RouteHash> = blocks.into_iter().map(RouteHash).collect();
        let number = numbers[usize::from(holder)];
        index.on_event(&Event { holder: Holder(holder), life: 1, number, change: Change::Stored(&names) });
    }
    index
}

fn theirs() -> ChainIndex {
    let index = ChainIndex::with_max_workers(usize::from(HOLDERS));
    let mut maps: Vec<ChainBlockMap> = (0..HOLDERS).map(|_| ChainBlockMap::new()).collect();
    let workers: Vec<u32> = (0..HOLDERS).map(|holder| index.intern_worker(&holder.to_string()).unwrap()).collect();
    for (holder, blocks) in stored() {
        let block = |&hash: &u64| StoredBlock { seq_hash: SequenceHash(hash), content_hash: ContentHash(hash) };
        let blocks: Vec<StoredBlock> = blocks.iter().map(block).collect();
        let place = usize::from(holder);
        index.apply_stored(workers[place], &blocks, None, &mut maps[place]).unwrap();
    }
    index
}

fn percentiles(what: &str, mut one: impl FnMut(usize)) {
    let mut times: Vec<u128> = (0..200_000)
        .map(|turn| {
            let begun = Instant::now();
            one(turn);
            begun.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    println!("{what}: p50 {} ns, p99 {} ns, p99.9 {} ns", times[100_000], times[198_000], times[199_800]);
}

fn matches(criterion: &mut Criterion) {
    let order = |turn: usize| usize::try_from(mixed(u64::try_from(turn).unwrap()) % SESSIONS).unwrap();
    let names: Vec<Vec<RouteHash>> = (0..SESSIONS).map(|one| chain(one).into_iter().map(RouteHash).collect()).collect();
    let hashes: Vec<Vec<ContentHash>> =
        (0..SESSIONS).map(|one| chain(one).into_iter().map(ContentHash).collect()).collect();
    let (ours, theirs) = (ours(), theirs());
    let mut found = ours.new_matches();
    let mut scores = vec![0; usize::from(HOLDERS)];
    let mut look_up = |turn| ours.matches(black_box(&names[order(turn)]), &mut found);
    let mut walk = |turn| {
        let report = |worker: u32, score| scores[worker as usize] = score;
        theirs.score_into(black_box(&hashes[order(turn)]), |hash| hash.0, false, report);
    };
    let mut group = criterion.benchmark_group("index/1000 holders");
    group.throughput(Throughput::Elements(1));
    let mut turns = 0..;
    group.bench_function("millpond", |bencher| bencher.iter(|| turns.next().map(&mut look_up)));
    group.bench_function("kv-index", |bencher| bencher.iter(|| turns.next().map(&mut walk)));
    group.finish();
    percentiles("index/1000 holders/millpond", &mut look_up);
    percentiles("index/1000 holders/kv-index", &mut walk);
    ours.matches(&names[3], &mut found);
    assert_eq!((found.shared(), found.longest()), (1, 20), "the best has all but the new ones, and all have the first");
    let best = theirs.find_matches(&hashes[3], false).scores;
    assert_eq!((best.len(), best.values().max()), (usize::from(HOLDERS), Some(&20)), "it found the same");
}

fn decisions(criterion: &mut Criterion) {
    for instances in [64_u32, 1_000] {
        let view = |instance: u32| PrefillView {
            wait: Duration::from_millis(u64::from(instance * 7_919 % 1_000)),
            behind: instance % 3,
            matched: instance * 104_729 % 40,
            ..PrefillView::default()
        };
        let views: Vec<PrefillView> = (0..instances).map(view).collect();
        let (options, profile, mut considered) = (Options::default(), Profile::default(), Vec::new());
        let mut decide = |turn: usize| {
            let turn = u64::try_from(turn).unwrap();
            let prompt = Prompt { tokens: 12_000 + u32::try_from(turn % 4_096).unwrap(), turn };
            black_box(place_prefill(&options, &profile, prompt, &views, &mut considered));
        };
        let name = format!("placement/{instances} instances");
        let mut turns = 0..;
        criterion.bench_function(&name, |bencher| bencher.iter(|| turns.next().map(&mut decide)));
        percentiles(&name, decide);
    }
}

criterion_group!(benches, matches, decisions);
criterion_main!(benches);
