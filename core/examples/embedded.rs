//! Pages, the prefix tree and batch descriptors on arrays of the caller: no heap, no clock, no system.
//!
//! A tiny cache of prompts: each block of a prompt gets a page, a second prompt finds what it shares with the first, and
//! the rest is described as moves between two regions, joined and cut into pieces.

use millpond_core::batch::{Extent, Move, RegionId, Split, coalesce};
use millpond_core::hash::RouteHash;
use millpond_core::page::{Page, Pages};
use millpond_core::prefix::{Block, Holder, Path, Prefix, Run};
use millpond_core::slab::Handle;

const PAGE_LEN: u64 = 4096;
const HERE: RegionId = RegionId { slot: 0, epoch: 1 };
const THERE: RegionId = RegionId { slot: 1, epoch: 1 };

fn main() {
    let mut pages = Pages::new([const { Page::EMPTY }; 8]);
    let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([const { Block::EMPTY }; 16], [const { Run::EMPTY }; 16], 7);

    // The first prompt: three blocks, a page each.
    let first = [11, 12, 13].map(RouteHash);
    let mut taken = [Handle::default(); 3];
    pages.allocate_all(&mut taken).expect("eight pages are free");
    for page in taken {
        pages.seal(page).expect("a page being filled can be sealed");
    }
    tree.insert(&Path { names: &first, parent: None, holder: Holder(0) }).expect("the tree has room");

    // The second shares two blocks with it.
    let second = [11, 12, 99].map(RouteHash);
    let shared = tree.longest_match(&second);
    assert_eq!(shared.len, 2, "two blocks are known");

    // Send the shared pages: neighbours join into one move, which is cut into pieces of at most 3,000 bytes.
    let page_move = |page: &Handle| {
        let offset = u64::from(page.slot) * PAGE_LEN;
        Move::new(Extent::new(HERE, offset, PAGE_LEN), Extent::new(THERE, offset, PAGE_LEN)).expect("equal lengths")
    };
    let mut moves = [page_move(&taken[0]), page_move(&taken[1])];
    let joined = coalesce(&mut moves);
    let pieces = Split::new(&moves[..joined], 3_000).count();
    println!("{} blocks shared, {joined} move of {} bytes, {pieces} pieces", shared.len, moves[0].len());
    assert_eq!((joined, pieces), (1, 3));

    for page in taken {
        pages.free(page).expect("nobody holds it");
    }
    assert_eq!(pages.counts().free, 8);
}
