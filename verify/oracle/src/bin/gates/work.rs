//! The work of each gate: a set-up, then one operation many times, always the same.

use std::hint::black_box;

use millpond_core::batch::{Extent, Move, RegionId, Split, coalesce};
use millpond_core::evict::{Anything, Entry, Ghost, Object, Policy, S3Fifo};
use millpond_core::extent::{Extents, Geometry, Node};
use millpond_core::hash::{BlockName, Model, Namer, RouteHasher, Secret};
use millpond_core::page::{Page, Pages};
use millpond_core::prefix::{Block, Holder, Path, Prefix, Run};
use millpond_core::slab::Handle;
use millpond_core::time::Instant;
use millpond_core::wire::frame::{Frame, Tag, WireExtent, parse};

/// All gates, in the table's order.
pub(crate) const NAMES: [&str; 11] = [
    "page/allocate+free",
    "extent/allocate+free, equal",
    "extent/allocate+free, mixed",
    "prefix/longest match of 24",
    "prefix/the same, parting half-way",
    "frame/encode, 4 extents",
    "frame/decode, 4 extents",
    "hash/name of 16 tokens",
    "hash/route of 16 tokens",
    "batch/coalesce+split 128 moves",
    "evict/s3-fifo use+replace",
];

/// A small generator with a fixed seed: every run does the same.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit).unwrap()).unwrap()
    }
}

/// Does the operation of gate `name` `count` times, and every `stride`-th one twice.
pub(crate) fn run(name: &str, count: u64, stride: u64) {
    let mut operation: Box<dyn FnMut()> = match name {
        "page/allocate+free" => pages(),
        "extent/allocate+free, equal" => extents(|_| 3_274_752),
        "extent/allocate+free, mixed" => extents(|random| 4096 * (1 + random.below(800)) as u64),
        "prefix/longest match of 24" => prefix(24),
        "prefix/the same, parting half-way" => prefix(12),
        "frame/encode, 4 extents" => encode(),
        "frame/decode, 4 extents" => decode(),
        "hash/name of 16 tokens" => name_of_block(),
        "hash/route of 16 tokens" => route_of_block(),
        "batch/coalesce+split 128 moves" => batch(),
        "evict/s3-fifo use+replace" => evict(),
        _ => panic!("there is no gate {name}"),
    };
    for index in 0..count {
        operation();
        if index % stride == stride - 1 {
            operation();
        }
    }
}

fn pages() -> Box<dyn FnMut()> {
    const PAGES: usize = 5_000;
    let mut pages = Pages::new(vec![Page::EMPTY; PAGES].into_boxed_slice());
    let mut live: Vec<Handle> = (0..PAGES * 9 / 10).map(|_| pages.allocate().unwrap()).collect();
    let mut random = Random(1);
    Box::new(move || {
        let index = random.below(live.len());
        pages.free(live[index]).unwrap();
        live[index] = black_box(pages.allocate().unwrap());
    })
}

/// Nine tenths of a 4 GiB segment in use; frees one range at random and allocates one.
fn extents(len: fn(&mut Random) -> u64) -> Box<dyn FnMut()> {
    const SEGMENT_LEN: u64 = 4 << 30;
    let nodes = vec![Node::EMPTY; 1 << 13].into_boxed_slice();
    let mut extents = Extents::new(nodes, Geometry { len: SEGMENT_LEN, unit: 4096 }).unwrap();
    let (mut random, mut live) = (Random(2), Vec::new());
    while extents.statistics().used_len < SEGMENT_LEN / 10 * 9 {
        live.push(extents.allocate(len(&mut random)).unwrap().handle);
    }
    Box::new(move || {
        let index = random.below(live.len());
        extents.free(live[index]).unwrap();
        match extents.allocate(len(&mut random)) {
            Ok(range) => live[index] = black_box(range.handle),
            Err(_) => drop(live.swap_remove(index)),
        }
    })
}

/// Chains of 24 blocks whose first third is shared by eight of them; what is looked for parts from them after `known` blocks.
fn prefix(known: usize) -> Box<dyn FnMut()> {
    const CHAINS: u32 = 512;
    const CHAIN: u32 = 24;
    let namer = Namer::new(Secret([7; 32]), &Model { id: "gate", layout: [0; 16] });
    let token = |chain: u32, at: u32| if at < 8 * 16 { chain / 8 * 4096 + at } else { (1 << 30) + chain * 4096 + at };
    let chain = |number| (0..CHAIN * 16).map(|at| token(number, at)).collect::<Vec<u32>>();
    let mut chains: Vec<Vec<BlockName>> = (0..CHAINS).map(|number| namer.chain(&chain(number), 16).collect()).collect();
    let room = (CHAINS * CHAIN) as usize;
    let (blocks, runs) = (vec![Block::EMPTY; room].into_boxed_slice(), vec![Run::EMPTY; room].into_boxed_slice());
    let mut tree: Prefix<BlockName, _, _, 1> = Prefix::new(blocks, runs, 0x5eed);
    for names in &chains {
        tree.insert(&Path { holder: Holder(0), parent: None, names }).unwrap();
    }
    chains.iter_mut().flat_map(|names| names.iter_mut().skip(known)).for_each(|name| name.0[15] ^= 0x55);
    let mut random = Random(3);
    Box::new(move || {
        black_box(tree.longest_match(&chains[random.below(chains.len())]));
    })
}

const TAG: Tag = Tag { generation: 1, ticket: 2, slice: 3, attempt: 4 };

fn write_extents() -> [WireExtent; 4] {
    [0, 1, 2, 3].map(|index| Extent::new(RegionId { slot: 1, epoch: 1 }, index * 8192, 4096).into())
}

fn encode() -> Box<dyn FnMut()> {
    let (extents, mut bytes) = (write_extents(), [0; 256]);
    Box::new(move || {
        let frame = Frame::Write { tag: TAG, extents: black_box(&extents), arrival: None, checksummed: true };
        black_box(frame.encode(&mut bytes).unwrap());
    })
}

fn decode() -> Box<dyn FnMut()> {
    let (extents, mut bytes) = (write_extents(), [0; 256]);
    Frame::Write { tag: TAG, extents: &extents, arrival: None, checksummed: true }.encode(&mut bytes).unwrap();
    Box::new(move || {
        black_box(parse(black_box(&bytes)).unwrap());
    })
}

fn name_of_block() -> Box<dyn FnMut()> {
    let namer = Namer::new(Secret([7; 32]), &Model { id: "gate", layout: [0; 16] });
    let (tokens, mut parent) = ([5; 16], namer.root());
    Box::new(move || parent = namer.name(parent, black_box(&tokens)))
}

fn route_of_block() -> Box<dyn FnMut()> {
    let (hasher, tokens, mut parent) = (RouteHasher::default(), [5; 16], None);
    Box::new(move || parent = Some(hasher.after(parent, hasher.block(black_box(&tokens)))))
}

/// 128 pages of 4 KiB in 16 runs of neighbours: joined, then cut into pieces of at most 20 KiB.
fn batch() -> Box<dyn FnMut()> {
    let extent = |slot, page: u64| Extent::new(RegionId { slot, epoch: 1 }, (page + page / 8) * 4096, 4096);
    let pages: Vec<Move> = (0..128).map(|page| Move::new(extent(1, page), extent(2, page)).unwrap()).collect();
    let mut moves = pages.clone();
    Box::new(move || {
        moves.copy_from_slice(&pages);
        let count = coalesce(&mut moves);
        for piece in Split::new(&moves[..count], 20 << 10) {
            black_box(piece);
        }
    })
}

fn evict() -> Box<dyn FnMut()> {
    const SLOTS: u32 = 4096;
    let entries = vec![Entry::EMPTY; SLOTS as usize].into_boxed_slice();
    let ghost = vec![Ghost::EMPTY; SLOTS as usize].into_boxed_slice();
    let mut policy = S3Fifo::new(entries, ghost);
    let (now, mut random, mut next) = (Instant::ZERO, Random(4), u64::from(SLOTS));
    for slot in 0..SLOTS {
        policy.on_stored(now, slot, Object { fingerprint: slot.into(), len: 4096 });
    }
    Box::new(move || {
        policy.on_used(now, black_box(u32::try_from(random.below(SLOTS as usize)).unwrap()));
        let slot = policy.poll_victim(now, &Anything).unwrap();
        policy.on_removed(now, slot);
        next += 1;
        policy.on_stored(now, black_box(slot), Object { fingerprint: next, len: 4096 });
    })
}
