//! Blocks and runs of blocks on caller-given arrays, and the links between them.
//!
//! Mechanism only: which block is in which run, which run hangs under which, which was used last. What that means for
//! holders, pins and eviction is the tree's business. Invariants: a block's `before` is the block it follows in its
//! chain, in whatever run that is; a run's children hang under its last block; in the order of use a run is always
//! younger than its children, so the oldest run is a leaf.

use super::{Holders, Key};

pub(super) const NONE: u32 = u32::MAX;
/// The last even epoch: a block that reached the one after it is retired.
const EPOCH_LAST: u32 = u32::MAX - 3;

/// 2^64 divided by the golden ratio, odd.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The low and the high half.
fn halves(wide: u128) -> [u64; 2] {
    let mask = u128::from(u64::MAX);
    [wide & mask, wide >> 64].map(|half| u64::try_from(half).unwrap_or(0))
}

/// Which of `buckets` a well-mixed `spread` belongs to: a folded product with a seed nobody outside knows, then scaled to
/// the table, so no division.
pub(crate) fn bucket(spread: u64, seed: u64, buckets: u32) -> u32 {
    let [low, high] = halves(u128::from(spread ^ seed) * u128::from(ODD));
    let [_, scaled] = halves(u128::from(low ^ high) * u128::from(buckets));
    u32::try_from(scaled).unwrap_or(0)
}

/// One block of a [`super::Prefix`]: make an array or boxed slice of `Block::EMPTY` as its storage.
///
/// Example: [`Prefix`](super::Prefix).
#[derive(Clone, Debug)]
pub struct Block<K> {
    pub(super) name: Option<K>,
    /// Odd while in use.
    pub(super) epoch: u32,
    pub(super) run: u32,
    /// Blocks before it in its chain.
    pub(super) depth: u32,
    /// The block it follows in its chain.
    pub(super) before: u32,
    /// The next block of its run; for an unused block the next unused one.
    pub(super) next: u32,
    /// The next block in the same bucket of the index.
    chain: u32,
    /// The first block of the bucket with this block's index.
    bucket: u32,
}

impl<K> Block<K> {
    /// A block that was never used.
    pub const EMPTY: Self =
        Self { name: None, epoch: 0, run: NONE, depth: 0, before: NONE, next: NONE, chain: NONE, bucket: NONE };
}

impl<K> Default for Block<K> {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// A run of blocks with the same holders: make an array or boxed slice of `Run::EMPTY`, as many as there are blocks.
///
/// Example: [`Prefix`](super::Prefix).
#[derive(Clone, Debug)]
pub struct Run<const W: usize> {
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) pins: u32,
    pub(super) holders: Holders<W>,
    /// The child used last.
    child_front: u32,
    /// The child not used for longest.
    pub(super) child_back: u32,
    sibling_prev: u32,
    sibling_next: u32,
    older: u32,
    /// The run used next after this one; for an unused run the next unused one.
    pub(super) younger: u32,
}

impl<const W: usize> Run<W> {
    /// A run that was never used.
    pub const EMPTY: Self = Self {
        first: NONE,
        last: NONE,
        pins: 0,
        holders: Holders([0; W]),
        child_front: NONE,
        child_back: NONE,
        sibling_prev: NONE,
        sibling_next: NONE,
        older: NONE,
        younger: NONE,
    };

    pub(super) const fn is_leaf(&self) -> bool {
        self.child_front == NONE
    }
}

impl<const W: usize> Default for Run<W> {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// Blocks `B` in an index by name, runs `R` in a forest and in order of use.
#[derive(Clone, Debug)]
pub(super) struct Arena<K, B, R, const W: usize> {
    blocks: B,
    runs: R,
    seed: u64,
    buckets: u32,
    blocks_unused: u32,
    runs_unused: u32,
    pub(super) block_count: u32,
    pub(super) run_count: u32,
    pub(super) oldest: u32,
    youngest: u32,
    _names: core::marker::PhantomData<K>,
}

impl<K: Key, B: AsRef<[Block<K>]> + AsMut<[Block<K>]>, R: AsRef<[Run<W>]> + AsMut<[Run<W>]>, const W: usize>
    Arena<K, B, R, W>
{
    pub(super) fn new(mut blocks: B, mut runs: R, seed: u64) -> Self {
        let capacity = blocks.as_ref().len().min(runs.as_ref().len());
        let buckets = u32::try_from(capacity).unwrap_or(NONE - 1).min(NONE - 1);
        let (mut blocks_unused, mut runs_unused) = (NONE, NONE);
        for (index, block) in (0..buckets).zip(blocks.as_mut()).rev() {
            *block = Block { epoch: block.epoch.saturating_add(block.epoch % 2), next: blocks_unused, ..Block::EMPTY };
            if block.epoch <= EPOCH_LAST {
                blocks_unused = index;
            }
        }
        for (index, run) in (0..buckets).zip(runs.as_mut()).rev() {
            *run = Run { younger: runs_unused, ..Run::EMPTY };
            runs_unused = index;
        }
        Self {
            blocks,
            runs,
            seed,
            buckets,
            blocks_unused,
            runs_unused,
            block_count: 0,
            run_count: 0,
            oldest: NONE,
            youngest: NONE,
            _names: core::marker::PhantomData,
        }
    }

    pub(super) fn capacity(&self) -> u32 {
        self.buckets
    }

    pub(super) fn block(&self, index: u32) -> &Block<K> {
        &self.blocks.as_ref()[index as usize]
    }

    pub(super) fn block_mut(&mut self, index: u32) -> &mut Block<K> {
        &mut self.blocks.as_mut()[index as usize]
    }

    pub(super) fn run(&self, index: u32) -> &Run<W> {
        &self.runs.as_ref()[index as usize]
    }

    pub(super) fn run_mut(&mut self, index: u32) -> &mut Run<W> {
        &mut self.runs.as_mut()[index as usize]
    }

    pub(super) fn has_room(&self) -> bool {
        self.blocks_unused != NONE
    }

    /// The block with that name.
    pub(super) fn find(&self, name: K) -> Option<u32> {
        if self.buckets == 0 {
            return None;
        }
        let mut at = self.block(self.bucket_of(name)).bucket;
        // Bounded by the blocks of one bucket, about one.
        while at != NONE {
            let block = self.block(at);
            if block.name == Some(name) {
                return Some(at);
            }
            at = block.chain;
        }
        None
    }

    fn bucket_of(&self, name: K) -> u32 {
        bucket(name.spread(), self.seed, self.buckets)
    }

    /// Adds a block named `name` behind the last block of `run`; `has_room` was asked first.
    pub(super) fn append(&mut self, run: u32, name: K, before: u32) -> u32 {
        let index = self.blocks_unused;
        let bucket = self.bucket_of(name);
        let chain = core::mem::replace(&mut self.block_mut(bucket).bucket, index);
        let depth = if before == NONE { 0 } else { self.block(before).depth + 1 };
        let block = self.block_mut(index);
        let unused = core::mem::replace(&mut block.next, NONE);
        block.epoch += 1;
        (block.name, block.run, block.depth, block.before, block.chain) = (Some(name), run, depth, before, chain);
        self.blocks_unused = unused;
        self.block_count += 1;
        let last = core::mem::replace(&mut self.run_mut(run).last, index);
        if last == NONE {
            self.run_mut(run).first = index;
        } else {
            self.block_mut(last).next = index;
        }
        index
    }

    /// Takes the last block off a run; the run stays, perhaps empty. The block's name comes back.
    pub(super) fn drop_last(&mut self, run: u32) -> Option<K> {
        let index = self.run(run).last;
        let name = self.block_mut(index).name.take()?;
        self.unindex(index, name);
        let before = self.block(index).before;
        if self.run(run).first == index {
            (self.run_mut(run).first, self.run_mut(run).last) = (NONE, NONE);
        } else {
            self.block_mut(before).next = NONE;
            self.run_mut(run).last = before;
        }
        let unused = self.blocks_unused;
        let block = self.block_mut(index);
        block.epoch += 1;
        (block.run, block.before, block.next) = (NONE, NONE, unused);
        if block.epoch <= EPOCH_LAST {
            self.blocks_unused = index;
        }
        self.block_count -= 1;
        Some(name)
    }

    fn unindex(&mut self, index: u32, name: K) {
        let (bucket, chain) = (self.bucket_of(name), self.block(index).chain);
        let mut at = self.block(bucket).bucket;
        if at == index {
            self.block_mut(bucket).bucket = chain;
            return;
        }
        // Bounded by the blocks of one bucket.
        while self.block(at).chain != index {
            at = self.block(at).chain;
        }
        self.block_mut(at).chain = chain;
    }

    /// The run that `run` hangs under, or `NONE`.
    pub(super) fn parent(&self, run: u32) -> u32 {
        let before = self.block(self.run(run).first).before;
        if before == NONE { NONE } else { self.block(before).run }
    }

    /// A new empty run under `parent` (or none), used last of all.
    pub(super) fn new_run(&mut self, parent: u32, holders: Holders<W>) -> u32 {
        let index = self.take_run();
        self.run_mut(index).holders = holders;
        self.link_child(parent, index);
        self.link_youngest(index);
        index
    }

    /// Takes an emptied run out, which hung under `parent`.
    pub(super) fn drop_run(&mut self, run: u32, parent: u32) {
        self.unlink_child(parent, run);
        self.unlink_order(run);
        let unused = self.runs_unused;
        *self.run_mut(run) = Run { younger: unused, ..Run::EMPTY };
        self.runs_unused = run;
        self.run_count -= 1;
    }

    /// Cuts the run of `block` behind it, so that `block` is the last of its run. What is behind keeps pins, children and
    /// its place in the order of use. O(blocks of the shorter part).
    pub(super) fn split_after(&mut self, block: u32) {
        let run = self.block(block).run;
        let Run { first, last, .. } = *self.run(run);
        if last == block {
            return;
        }
        let head_len = self.block(block).depth - self.block(first).depth + 1;
        let tail_len = self.block(last).depth - self.block(block).depth;
        let tail_first = core::mem::replace(&mut self.block_mut(block).next, NONE);
        let parent = self.parent(run);
        let holders = self.run(run).holders;
        let fresh = self.take_run();
        if head_len <= tail_len {
            self.relabel(first, fresh);
            let head = self.run_mut(fresh);
            (head.first, head.last, head.holders) = (first, block, holders);
            self.run_mut(run).first = tail_first;
            self.replace_child(parent, run, fresh);
            self.link_child(fresh, run);
            let younger = self.run(run).younger;
            self.link_order(run, fresh, younger);
        } else {
            self.relabel(tail_first, fresh);
            let Run { pins, child_front, child_back, older, .. } = *self.run(run);
            let tail = self.run_mut(fresh);
            (tail.first, tail.last, tail.holders, tail.pins) = (tail_first, last, holders, pins);
            (tail.child_front, tail.child_back) = (child_front, child_back);
            let head = self.run_mut(run);
            (head.last, head.pins, head.child_front, head.child_back) = (block, 0, NONE, NONE);
            self.link_child(run, fresh);
            self.link_order(older, fresh, run);
        }
    }

    /// Gives the blocks from `first` to the end of their links to `run`.
    fn relabel(&mut self, first: u32, run: u32) {
        let mut at = first;
        while at != NONE {
            let block = self.block_mut(at);
            block.run = run;
            at = block.next;
        }
    }

    /// Marks `run` and what it hangs under as used now: the run first, the root last, so parents stay younger.
    pub(super) fn touch(&mut self, run: u32) {
        let mut at = run;
        while at != NONE {
            let parent = self.parent(at);
            self.unlink_order(at);
            self.link_youngest(at);
            if parent != NONE && self.run(parent).child_front != at {
                self.unlink_child(parent, at);
                self.link_child(parent, at);
            }
            at = parent;
        }
    }

    fn take_run(&mut self) -> u32 {
        let index = self.runs_unused;
        self.runs_unused = core::mem::replace(&mut self.run_mut(index).younger, NONE);
        self.run_count += 1;
        index
    }

    fn link_child(&mut self, parent: u32, child: u32) {
        if parent == NONE {
            return;
        }
        let front = core::mem::replace(&mut self.run_mut(parent).child_front, child);
        let run = self.run_mut(child);
        (run.sibling_prev, run.sibling_next) = (NONE, front);
        if front == NONE {
            self.run_mut(parent).child_back = child;
        } else {
            self.run_mut(front).sibling_prev = child;
        }
    }

    fn unlink_child(&mut self, parent: u32, child: u32) {
        if parent == NONE {
            return;
        }
        let Run { sibling_prev, sibling_next, .. } = *self.run(child);
        match sibling_prev {
            NONE => self.run_mut(parent).child_front = sibling_next,
            _ => self.run_mut(sibling_prev).sibling_next = sibling_next,
        }
        match sibling_next {
            NONE => self.run_mut(parent).child_back = sibling_prev,
            _ => self.run_mut(sibling_next).sibling_prev = sibling_prev,
        }
        (self.run_mut(child).sibling_prev, self.run_mut(child).sibling_next) = (NONE, NONE);
    }

    /// Puts `new` in the place of `old` among the children of `parent`.
    fn replace_child(&mut self, parent: u32, old: u32, new: u32) {
        let Run { sibling_prev, sibling_next, .. } = *self.run(old);
        (self.run_mut(new).sibling_prev, self.run_mut(new).sibling_next) = (sibling_prev, sibling_next);
        (self.run_mut(old).sibling_prev, self.run_mut(old).sibling_next) = (NONE, NONE);
        if parent == NONE {
            return;
        }
        match sibling_prev {
            NONE => self.run_mut(parent).child_front = new,
            _ => self.run_mut(sibling_prev).sibling_next = new,
        }
        match sibling_next {
            NONE => self.run_mut(parent).child_back = new,
            _ => self.run_mut(sibling_next).sibling_prev = new,
        }
    }

    fn link_youngest(&mut self, run: u32) {
        let youngest = self.youngest;
        self.link_order(youngest, run, NONE);
    }

    /// Puts `run` between its neighbours in the order of use.
    fn link_order(&mut self, older: u32, run: u32, younger: u32) {
        (self.run_mut(run).older, self.run_mut(run).younger) = (older, younger);
        match older {
            NONE => self.oldest = run,
            _ => self.run_mut(older).younger = run,
        }
        match younger {
            NONE => self.youngest = run,
            _ => self.run_mut(younger).older = run,
        }
    }

    fn unlink_order(&mut self, run: u32) {
        let Run { older, younger, .. } = *self.run(run);
        match older {
            NONE => self.oldest = younger,
            _ => self.run_mut(older).younger = younger,
        }
        match younger {
            NONE => self.youngest = older,
            _ => self.run_mut(younger).older = older,
        }
    }
}
