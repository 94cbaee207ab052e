//! Allocate, free and match in steady state, each beside something well known: `offset-allocator` and a plain hash map.
//!
//! The bars: `page` and `extent` at most 50 ns for allocate plus free each; `prefix` at most 2 us for the longest match of
//! 24 blocks among 200,000.

use std::collections::HashMap;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use millpond_core::extent::{Extents, Geometry, Node};
use millpond_core::hash::{BlockName, Model, Namer, Secret};
use millpond_core::page::{Page, Pages};
use millpond_core::prefix::{Block, Holder, Path, Prefix, Run};
use millpond_core::slab::Handle;

/// A small generator with a fixed seed: every run does the same.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // No division: it would cost as much as what is measured.
        usize::try_from((u128::from(self.0) * u128::try_from(limit).unwrap()) >> 64).unwrap()
    }
}

const PAGES: usize = 5_000;

/// Frees one of 4,500 live pages at random and allocates one.
fn pages(criterion: &mut Criterion) {
    let mut pages = Pages::new(vec![Page::EMPTY; PAGES].into_boxed_slice());
    let mut live: Vec<Handle> = (0..PAGES * 9 / 10).map(|_| pages.allocate().unwrap()).collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    criterion.bench_function("page/allocate+free", |bencher| {
        bencher.iter(|| {
            let index = random.below(live.len());
            pages.free(live[index]).unwrap();
            live[index] = black_box(pages.allocate().unwrap());
        });
    });
}

const SEGMENT_LEN: u64 = 16 << 30;
const UNIT: u32 = 4096;
const OBJECT_LEN: u64 = 3_274_752;

/// The lengths to allocate: all the same, or of many sizes up to that.
fn lengths(name: &str, random: &mut Random) -> Vec<u64> {
    (0..4096)
        .map(|_| match name {
            "equal" => OBJECT_LEN,
            _ => u64::from(UNIT) * u64::try_from(1 + random.below(800)).unwrap(),
        })
        .collect()
}

/// Frees one live range at random and allocates one, with nine tenths of the segment in use.
fn extents(criterion: &mut Criterion) {
    for name in ["equal", "mixed"] {
        let mut random = Random(0xbf58_476d_1ce4_e5b9);
        let lengths = lengths(name, &mut random);
        let mut group = criterion.benchmark_group(format!("extent/{name}"));

        let nodes = vec![Node::EMPTY; 1 << 16].into_boxed_slice();
        let mut extents = Extents::new(nodes, Geometry { len: SEGMENT_LEN, unit: UNIT }).unwrap();
        let mut live = Vec::new();
        while extents.statistics().used_len < SEGMENT_LEN / 10 * 9 {
            live.push(extents.allocate(lengths[random.below(lengths.len())]).unwrap().handle);
        }
        group.bench_function("millpond", |bencher| {
            bencher.iter(|| {
                let index = random.below(live.len());
                let len = lengths[random.below(lengths.len())];
                extents.free(live[index]).unwrap();
                match extents.allocate(len) {
                    Ok(range) => live[index] = black_box(range.handle),
                    Err(_) => drop(live.swap_remove(index)),
                }
            });
        });

        let mut random = Random(0xbf58_476d_1ce4_e5b9);
        let units = |len: u64| u32::try_from(len.div_ceil(u64::from(UNIT))).unwrap();
        let mut other: offset_allocator::Allocator =
            offset_allocator::Allocator::with_max_allocs(units(SEGMENT_LEN), 1 << 16);
        let mut live = Vec::new();
        while other.storage_report().total_free_space > units(SEGMENT_LEN) / 10 {
            match other.allocate(units(lengths[random.below(lengths.len())])) {
                Some(range) => live.push(range),
                None => break,
            }
        }
        group.bench_function("offset-allocator", |bencher| {
            bencher.iter(|| {
                let index = random.below(live.len());
                let len = lengths[random.below(lengths.len())];
                other.free(live[index]);
                match other.allocate(units(len)) {
                    Some(range) => live[index] = black_box(range),
                    None => drop(live.swap_remove(index)),
                }
            });
        });
        group.finish();
    }
}

const BLOCKS: usize = 200_000;
const CHAIN: usize = 24;

/// Chains of 24 blocks; each shares its first third with seven others, as sessions share a system prompt.
fn chains() -> Vec<Vec<BlockName>> {
    let namer = Namer::new(Secret([7; 32]), &Model { id: "bench", layout: [0; 16] });
    let count = BLOCKS / (CHAIN - CHAIN / 3 + CHAIN / 24);
    (0..u32::try_from(count).unwrap())
        .map(|chain| {
            let tokens: Vec<u32> = (0..u32::try_from(CHAIN * 16).unwrap())
                .map(|at| if at < 8 * 16 { chain / 8 * 4096 + at } else { (1 << 30) + chain * 4096 + at })
                .collect();
            namer.chain(&tokens, 16).collect()
        })
        .collect()
}

/// The longest match of whole chains, and of chains that part from what is stored half-way.
fn prefixes(criterion: &mut Criterion) {
    let chains = chains();
    let blocks = vec![Block::EMPTY; BLOCKS + CHAIN].into_boxed_slice();
    let runs = vec![Run::EMPTY; BLOCKS + CHAIN].into_boxed_slice();
    let mut tree: Prefix<BlockName, _, _, 1> = Prefix::new(blocks, runs, 0x5eed);
    let mut map: HashMap<BlockName, u64> = HashMap::with_capacity(BLOCKS);
    for (number, chain) in chains.iter().enumerate() {
        let holder = Holder(u16::try_from(number % 16).unwrap());
        tree.insert(&Path { holder, parent: None, names: chain }).unwrap();
        chain.iter().for_each(|&name| *map.entry(name).or_default() |= 1 << holder.0);
    }
    assert!(tree.len() > BLOCKS * 9 / 10, "only {} blocks", tree.len());
    let parting = |chain: &Vec<BlockName>| {
        let mut chain = chain.clone();
        chain[CHAIN / 2..].iter_mut().for_each(|name| name.0[15] ^= 0x55);
        chain
    };
    let halves: Vec<Vec<BlockName>> = chains.iter().map(parting).collect();
    for (name, queries) in [("whole", &chains), ("half", &halves)] {
        let mut random = Random(0x94d0_49bb_1331_11eb);
        let mut group = criterion.benchmark_group(format!("prefix/longest match of 24 in 200,000, {name}"));
        group.bench_function("millpond", |bencher| {
            bencher.iter_batched(
                || random.below(queries.len()),
                |index| black_box(tree.longest_match(&queries[index])),
                BatchSize::SmallInput,
            );
        });
        let mut held = [0; 16];
        group.bench_function("millpond, each of 16 holders", |bencher| {
            bencher.iter_batched(
                || random.below(queries.len()),
                |index| tree.matches(&queries[index], black_box(&mut held)),
                BatchSize::SmallInput,
            );
        });
        group.bench_function("hash map, block by block", |bencher| {
            bencher.iter_batched(
                || random.below(queries.len()),
                |index| black_box(queries[index].iter().take_while(|name| map.contains_key(name)).count()),
                BatchSize::SmallInput,
            );
        });
        group.finish();
    }
}

criterion_group!(benches, pages, extents, prefixes);
criterion_main!(benches);
