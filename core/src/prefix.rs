//! Which prefixes are held, and by whom: a radix tree over the names of blocks.
//!
//! A chain of names (see [`crate::hash`]) is a path from a root; chains that begin alike share their beginning. Blocks that
//! were stored together lie in one *run*; a run is cut where chains part, where holders differ, where a pin or a use ends.
//! An index finds a block by name, so the longest match takes a few look-ups, not a walk. The tree never sees tokens or
//! bytes; what a block stands for the caller keeps in its own array, by the slot of the block's handle.
//!
//! Invariants: a block is in the tree only with all blocks before it, except that a block whose holders are gone stays,
//! unheld, while something follows it or pins it; a pin keeps its block and all before it; eviction takes the block at the
//! end of the leaf that was not used for longest. Names are chained hashes: equal names mean equal prefixes.

use core::fmt;

use crate::hash::{BlockName, RouteHash};
use crate::seeded::{self, Bug};
use crate::slab::Handle;

pub(crate) mod arena;

use arena::{Arena, NONE};
pub use arena::{Block, Run};

/// The name of a block: a chained hash.
///
/// ```
/// use millpond_core::prefix::Key;
/// /// A name that is well mixed already.
/// #[derive(Clone, Copy, PartialEq, Eq)]
/// struct Name(u64);
/// impl Key for Name {
///     fn spread(&self) -> u64 {
///         self.0
///     }
/// }
/// ```
pub trait Key: Copy + Eq {
    /// 64 well-mixed bits of it.
    fn spread(&self) -> u64;
}

impl Key for BlockName {
    fn spread(&self) -> u64 {
        let mut half = [0; 8];
        half.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(half)
    }
}

impl Key for RouteHash {
    fn spread(&self) -> u64 {
        self.0
    }
}

/// Someone who can hold blocks: a node, an instance, a tier. The caller numbers them from 0.
///
/// ```
/// use millpond_core::prefix::Holder;
/// assert!(Holder(1) < Holder(2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder(pub u16);

/// A set of up to `64 * W` holders.
///
/// ```
/// use millpond_core::prefix::{Holder, Holders};
/// let holders = Holders::<2>::default().with(Holder(3)).with(Holder(100));
/// assert!(holders.iter().eq([Holder(3), Holder(100)]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holders<const W: usize>(pub [u64; W]);

impl<const W: usize> Default for Holders<W> {
    fn default() -> Self {
        Self([0; W])
    }
}

impl<const W: usize> Holders<W> {
    /// Holders a set can name.
    pub const LIMIT: usize = 64 * W;

    /// The set with `holder` in it; numbers from [`Self::LIMIT`] on are left out.
    #[must_use]
    pub fn with(mut self, holder: Holder) -> Self {
        if let Some(word) = self.0.get_mut(usize::from(holder.0 / 64)) {
            *word |= 1 << (holder.0 % 64);
        }
        self
    }

    /// The set without `holder`.
    #[must_use]
    pub fn without(mut self, holder: Holder) -> Self {
        if let Some(word) = self.0.get_mut(usize::from(holder.0 / 64)) {
            *word &= !(1 << (holder.0 % 64));
        }
        self
    }

    /// Whether `holder` is in it.
    #[must_use]
    pub fn contains(&self, holder: Holder) -> bool {
        self.0.get(usize::from(holder.0 / 64)).is_some_and(|word| word >> (holder.0 % 64) & 1 == 1)
    }

    /// Whether nobody is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// The holders in it, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = Holder> {
        let limit = u16::try_from(Self::LIMIT).unwrap_or(u16::MAX);
        let set = *self;
        (0..limit).map(Holder).filter(move |&holder| set.contains(holder))
    }
}

/// Names stored one after the other by one holder.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Holder, Path}};
/// let path = Path { holder: Holder(0), parent: None, names: &[RouteHash(1), RouteHash(2)] };
/// assert_eq!(path.names.len(), 2);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Path<'a, K> {
    /// Who stores them.
    pub holder: Holder,
    /// The block they follow; `None` at the beginning of a chain.
    pub parent: Option<K>,
    /// The names, first to last.
    pub names: &'a [K],
}

/// What an insertion did. `known + added` names are in the tree now, held by the path's holder.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Block, Holder, Path, Prefix, Run}};
/// let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([Block::EMPTY; 8], [Run::EMPTY; 8], 7);
/// let path = |names| Path { holder: Holder(0), parent: None, names };
/// tree.insert(&path(&[RouteHash(10), RouteHash(11)])).unwrap();
/// let inserted = tree.insert(&path(&[RouteHash(10), RouteHash(11), RouteHash(12)])).unwrap();
/// assert_eq!((inserted.known, inserted.added, inserted.stopped), (2, 1, None));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inserted {
    /// Names at the front of the path that were there before.
    pub known: usize,
    /// Names behind them that were added.
    pub added: usize,
    /// Why the rest was not; `None` if there is no rest.
    pub stopped: Option<Stop>,
}

/// Why an insertion ended before the end of its path.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Block, Holder, Path, Prefix, Run, Stop}};
/// let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([Block::EMPTY; 2], [Run::EMPTY; 2], 7);
/// let names = [10, 11, 12].map(RouteHash);
/// let inserted = tree.insert(&Path { holder: Holder(0), parent: None, names: &names }).unwrap();
/// assert_eq!((inserted.added, inserted.stopped), (2, Some(Stop::Full)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// All blocks are in use.
    Full,
    /// The next name is in the tree behind another block: these names are not a chain.
    NotAChain,
}

/// Why nothing changed.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Block, Holder, Path, Prefix, PrefixError, Run}};
/// let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([Block::EMPTY; 8], [Run::EMPTY; 8], 7);
/// let orphan = Path { holder: Holder(0), parent: Some(RouteHash(9)), names: &[RouteHash(10)] };
/// assert_eq!(tree.insert(&orphan), Err(PrefixError::UnknownParent));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefixError {
    /// The parent named by a path is not in the tree.
    UnknownParent,
    /// The holder's number is past what the tree's sets can name.
    HolderLimit(Holder),
    /// The block left the tree since this handle was made.
    Stale(Handle),
    /// The block has no pin to take away.
    NotPinned(Handle),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the prefix tree is full; evict blocks or give it more",
            Self::NotAChain => "the names are not one chain; make them with `hash` from one list of tokens",
        })
    }
}

impl fmt::Display for PrefixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownParent => f.write_str("the parent is not in the tree; insert the chain from its beginning"),
            Self::HolderLimit(holder) => {
                write!(f, "holder {} is past the tree's limit; number holders from 0 or widen the sets", holder.0)
            }
            Self::Stale(block) => write!(f, "block {block} left the tree; look it up by name again"),
            Self::NotPinned(block) => write!(f, "block {block} is not pinned; unpin once for each pin"),
        }
    }
}

impl core::error::Error for Stop {}
impl core::error::Error for PrefixError {}

/// The longest beginning of a chain that is held.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Block, Holder, Path, Prefix, Run}};
/// let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([Block::EMPTY; 8], [Run::EMPTY; 8], 7);
/// tree.insert(&Path { holder: Holder(0), parent: None, names: &[RouteHash(10), RouteHash(11)] }).unwrap();
/// let found = tree.longest_match(&[RouteHash(10), RouteHash(99)]);
/// assert_eq!((found.len, found.last), (1, tree.find(RouteHash(10))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Blocks of it.
    pub len: usize,
    /// Its last block; `None` if `len` is 0.
    pub last: Option<Handle>,
}

/// A block that was evicted.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Block, Holder, Path, Prefix, Run}};
/// let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([Block::EMPTY; 8], [Run::EMPTY; 8], 7);
/// tree.insert(&Path { holder: Holder(3), parent: None, names: &[RouteHash(10), RouteHash(11)] }).unwrap();
/// let evicted = tree.evict().unwrap();
/// assert_eq!((evicted.name, evicted.holders.contains(Holder(3))), (RouteHash(11), true));
/// assert_eq!(tree.name(evicted.block), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted<K, const W: usize> {
    /// Its handle, stale from now on; its slot will be used again.
    pub block: Handle,
    /// Its name.
    pub name: K,
    /// Who held it.
    pub holders: Holders<W>,
}

/// A radix tree over names `K`, on blocks `B` and runs `R` (`[T; N]`, `&mut [T]`, `Box<[T]>`, …), for up to `64 * W`
/// holders. It holds as many blocks as the shorter of the two arrays.
///
/// ```
/// use millpond_core::{hash::RouteHash, prefix::{Block, Holder, Path, Prefix, Run}};
/// let mut tree: Prefix<RouteHash, _, _, 1> = Prefix::new([Block::EMPTY; 8], [Run::EMPTY; 8], 7);
/// let chain = [RouteHash(10), RouteHash(11), RouteHash(12)];
/// tree.insert(&Path { holder: Holder(0), parent: None, names: &chain }).unwrap();
/// tree.insert(&Path { holder: Holder(1), parent: None, names: &chain[..1] }).unwrap();
/// assert_eq!(tree.longest_match(&chain).len, 3);
/// let mut held = [0; 2];
/// tree.matches(&chain, &mut held);
/// assert_eq!(held, [3, 1]);
/// assert_eq!(tree.evict().unwrap().name, RouteHash(12)); // leaf first
/// ```
#[derive(Clone, Debug)]
pub struct Prefix<K, B, R, const W: usize> {
    arena: Arena<K, B, R, W>,
    /// Runs with a pin.
    pinned_runs: u32,
    /// Runs without a holder.
    unheld_runs: u32,
}

impl<K: Key, B: AsRef<[Block<K>]> + AsMut<[Block<K>]>, R: AsRef<[Run<W>]> + AsMut<[Run<W>]>, const W: usize>
    Prefix<K, B, R, W>
{
    /// An empty tree. `seed` mixes the index; make it random where names come from outside. What the storage held before is
    /// forgotten; handles of an earlier tree over the same blocks stay stale.
    pub fn new(blocks: B, runs: R, seed: u64) -> Self {
        Self { arena: Arena::new(blocks, runs, seed), pinned_runs: 0, unheld_runs: 0 }
    }

    /// Adds a path, as far as there is room; names already there get the holder. O(names), and the path counts as used.
    pub fn insert(&mut self, path: &Path<'_, K>) -> Result<Inserted, PrefixError> {
        let above = match path.parent {
            None => NONE,
            Some(parent) => self.arena.find(parent).ok_or(PrefixError::UnknownParent)?,
        };
        self.check_holder(path.holder)?;
        let (known, last, mut stopped) = self.known(above, path.names);
        if known > 0 {
            self.add_holder(above, last, path.holder);
        }
        let mut inserted = Inserted { known, added: 0, stopped: None };
        let mut at = last;
        for &name in if stopped.is_none() { &path.names[known..] } else { &[] } {
            if self.arena.find(name).is_some() {
                stopped = Some(Stop::NotAChain);
                break;
            }
            if !self.arena.has_room() {
                stopped = Some(Stop::Full);
                break;
            }
            let run = self.run_to_extend(at, path.holder);
            at = self.arena.append(run, name, at);
            inserted.added += 1;
        }
        if at != NONE {
            self.use_block(at);
        }
        inserted.stopped = stopped;
        Ok(inserted)
    }

    /// The longest beginning of `names` that is held, each block by at least one holder. `names` must be a chain. A few
    /// look-ups: 1 if all of it is there, else about log2 of the names.
    pub fn longest_match(&self, names: &[K]) -> Match {
        let Some(mut at) = self.deepest(names) else { return Match { len: 0, last: None } };
        if self.unheld_runs > 0 {
            at = self.last_held(at);
        }
        if at == NONE {
            return Match { len: 0, last: None };
        }
        Match { len: self.arena.block(at).depth as usize + 1, last: Some(self.handle(at)) }
    }

    /// For each holder up to `held.len()`, the blocks at the beginning of `names` that it holds. `names` must be a chain.
    /// O(log2 of the names + runs of the match * holders in them).
    pub fn matches(&self, names: &[K], held: &mut [u32]) {
        held.fill(0);
        let Some(deepest) = self.deepest(names) else { return };
        // From the end to the beginning: a run without the holder breaks what was counted behind it.
        let mut seen = Holders::<W>::default();
        let mut run = self.arena.block(deepest).run;
        let mut end = self.arena.block(deepest).depth + 1;
        while run != NONE {
            let holders = self.arena.run(run).holders;
            for (word, (&now, seen)) in holders.0.iter().zip(&mut seen.0).enumerate() {
                for_each_bit(*seen & !now, |bit| set(held, word * 64 + bit, 0));
                for_each_bit(now & !*seen, |bit| set(held, word * 64 + bit, end));
                *seen = now;
            }
            end = self.arena.block(self.arena.run(run).first).depth;
            run = self.arena.parent(run);
        }
    }

    /// The block of that name, held or not.
    pub fn find(&self, name: K) -> Option<Handle> {
        self.arena.find(name).map(|block| self.handle(block))
    }

    /// The block's name; `None` if the handle is stale.
    pub fn name(&self, block: Handle) -> Option<K> {
        self.check(block).ok().and_then(|index| self.arena.block(index).name)
    }

    /// Who holds the block; `None` if the handle is stale.
    pub fn holders(&self, block: Handle) -> Option<Holders<W>> {
        let index = self.check(block).ok()?;
        Some(self.arena.run(self.arena.block(index).run).holders)
    }

    /// The block this one follows; `None` at the beginning of a chain, or if the handle is stale.
    pub fn parent(&self, block: Handle) -> Option<Handle> {
        let before = self.arena.block(self.check(block).ok()?).before;
        (before != NONE).then(|| self.handle(before))
    }

    /// The end of a chain that goes on from the block: of several, the one not used for longest. The block itself if
    /// nothing follows it. O(runs below).
    pub fn leaf_under(&self, block: Handle) -> Result<Handle, PrefixError> {
        let mut run = self.arena.block(self.check(block)?).run;
        while !self.arena.run(run).is_leaf() {
            run = self.arena.run(run).child_back;
        }
        Ok(self.handle(self.arena.run(run).last))
    }

    /// Marks the block and all before it as used now.
    pub fn touch(&mut self, block: Handle) -> Result<(), PrefixError> {
        let index = self.check(block)?;
        self.use_block(index);
        Ok(())
    }

    /// Keeps the block and all before it until [`Self::unpin`]; counts as a use. Pins add up.
    pub fn pin(&mut self, block: Handle) -> Result<(), PrefixError> {
        let index = self.check(block)?;
        self.use_block(index);
        let run = self.arena.block(index).run;
        let pins = &mut self.arena.run_mut(run).pins;
        *pins += 1;
        self.pinned_runs += u32::from(*pins == 1);
        Ok(())
    }

    /// Takes one pin away; counts as a use. A block that nobody holds any more leaves the tree with its last pin.
    pub fn unpin(&mut self, block: Handle) -> Result<(), PrefixError> {
        let index = self.check(block)?;
        let run = self.arena.block(index).run;
        // A pinned block is the last of its run.
        if self.arena.run(run).last != index || self.arena.run(run).pins == 0 {
            return Err(PrefixError::NotPinned(block));
        }
        self.arena.run_mut(run).pins -= 1;
        self.pinned_runs -= u32::from(self.arena.run(run).pins == 0);
        self.arena.touch(run);
        self.prune(run);
        Ok(())
    }

    /// `holder` no longer holds the block of that name; `false` if it did not. What follows it stays held, but matches of
    /// the holder end before it. A block that nobody holds leaves the tree when nothing follows it.
    pub fn remove(&mut self, holder: Holder, name: K) -> bool {
        let Some(block) = self.arena.find(name) else { return false };
        if !self.arena.run(self.arena.block(block).run).holders.contains(holder) {
            return false;
        }
        self.split_after(block);
        let before = self.arena.block(block).before;
        if before != NONE {
            self.split_after(before);
        }
        let run = self.arena.block(block).run;
        self.set_holders(run, self.arena.run(run).holders.without(holder));
        self.prune(run);
        true
    }

    /// `holder` is gone: it holds nothing any more. O(runs).
    pub fn remove_holder(&mut self, holder: Holder) {
        // Oldest first: children before what they hang under, so that one pass drops whole branches.
        let mut run = self.arena.oldest;
        while run != NONE {
            let younger = self.arena.run(run).younger;
            if self.arena.run(run).holders.contains(holder) {
                self.set_holders(run, self.arena.run(run).holders.without(holder));
            }
            self.drop_if_idle(run);
            run = younger;
        }
    }

    /// Takes out the block at the end of the leaf that was not used for longest; `None` if all is pinned. Unheld blocks that
    /// nothing follows any more go with it, unnamed. O(1), plus one pass over pinned leaves that came to the old end: those
    /// count as used.
    pub fn evict(&mut self) -> Option<Evicted<K, W>> {
        for _ in 0..=self.pinned_runs {
            let run = (self.arena.oldest != NONE).then_some(self.arena.oldest)?;
            if self.arena.run(run).pins > 0 && !seeded::on(Bug::PrefixEvictsPinned) {
                self.arena.touch(run);
                continue;
            }
            let block = self.handle(self.arena.run(run).last);
            let holders = self.arena.run(run).holders;
            let parent = self.arena.parent(run);
            let name = self.arena.drop_last(run)?;
            if self.arena.run(run).last == NONE {
                self.forget_run(run, parent);
                self.prune(parent);
            }
            return Some(Evicted { block, name, holders });
        }
        None
    }

    /// Blocks in the tree.
    #[must_use]
    pub fn len(&self) -> usize {
        self.arena.block_count as usize
    }

    /// Whether nothing is in the tree.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.arena.block_count == 0
    }

    /// Runs in the tree: how finely it is cut.
    #[must_use]
    pub fn run_count(&self) -> usize {
        self.arena.run_count as usize
    }

    /// Blocks there is room for in all.
    pub fn capacity(&self) -> usize {
        self.arena.capacity() as usize
    }

    fn handle(&self, block: u32) -> Handle {
        Handle { slot: block, epoch: self.arena.block(block).epoch }
    }

    fn check(&self, block: Handle) -> Result<u32, PrefixError> {
        let is_live = block.slot < self.arena.capacity() && block.epoch % 2 == 1;
        if is_live && self.arena.block(block.slot).epoch == block.epoch {
            Ok(block.slot)
        } else {
            Err(PrefixError::Stale(block))
        }
    }

    fn check_holder(&self, holder: Holder) -> Result<(), PrefixError> {
        let is_named = usize::from(holder.0) < Holders::<W>::LIMIT;
        if is_named { Ok(()) } else { Err(PrefixError::HolderLimit(holder)) }
    }

    /// How many of `names` follow each other behind `above`, the last of them, and why the next cannot.
    fn known(&self, above: u32, names: &[K]) -> (usize, u32, Option<Stop>) {
        let mut at = above;
        for (known, &name) in names.iter().enumerate() {
            match self.arena.find(name) {
                Some(block) if self.arena.block(block).before == at => at = block,
                found => return (known, at, found.map(|_| Stop::NotAChain)),
            }
        }
        (names.len(), at, None)
    }

    /// The last of `names` that is in the tree, at its place in a chain.
    fn deepest(&self, names: &[K]) -> Option<u32> {
        let at = |index: usize| {
            let block = self.arena.find(names[index])?;
            (self.arena.block(block).depth as usize == index).then_some(block)
        };
        let end = names.len().checked_sub(1)?;
        if let Some(block) = at(end) {
            return Some(block);
        }
        // A block is there only with all before it: everything below `low` is, nothing from `high` on.
        let (mut low, mut high, mut deepest) = (0, end, None);
        while low < high {
            let middle = (low + high) / 2;
            match at(middle) {
                Some(block) => (low, deepest) = (middle + 1, Some(block)),
                None => high = middle,
            }
        }
        deepest
    }

    /// The last block of the chain up to `block` before which nothing is unheld; `NONE` if the first is.
    fn last_held(&self, block: u32) -> u32 {
        let mut last = block;
        let mut run = self.arena.block(block).run;
        while run != NONE {
            let (first, parent) = (self.arena.run(run).first, self.arena.parent(run));
            if self.arena.run(run).holders.is_empty() {
                last = self.arena.block(first).before;
            }
            run = parent;
        }
        last
    }

    /// Adds `holder` to the blocks behind `above` up to `last`, cutting runs where it ends.
    fn add_holder(&mut self, above: u32, last: u32, holder: Holder) {
        if !self.arena.run(self.arena.block(last).run).holders.contains(holder) {
            self.split_after(last);
        }
        let mut at = last;
        while at != above {
            let run = self.arena.block(at).run;
            let first = self.arena.run(run).first;
            let begins_above = above != NONE && self.arena.block(above).run == run;
            let holders = self.arena.run(run).holders;
            if !holders.contains(holder) {
                if begins_above {
                    self.split_after(above);
                    continue;
                }
                self.set_holders(run, holders.with(holder));
            }
            at = if begins_above { above } else { self.arena.block(first).before };
        }
    }

    /// The run a new block of `holder` behind `block` belongs to: that of `block` if it can grow, else a new one.
    fn run_to_extend(&mut self, block: u32, holder: Holder) -> u32 {
        let only = Holders::default().with(holder);
        if block == NONE {
            return self.arena.new_run(NONE, only);
        }
        self.split_after(block);
        let run = self.arena.block(block).run;
        let found = self.arena.run(run);
        if found.is_leaf() && found.pins == 0 && found.holders == only {
            return run;
        }
        self.arena.new_run(run, only)
    }

    fn use_block(&mut self, block: u32) {
        self.split_after(block);
        self.arena.touch(self.arena.block(block).run);
    }

    fn split_after(&mut self, block: u32) {
        let (runs, run) = (self.arena.run_count, self.arena.block(block).run);
        let is_unheld = self.arena.run(run).holders.is_empty();
        self.arena.split_after(block);
        if self.arena.run_count == runs {
            return;
        }
        self.unheld_runs += u32::from(is_unheld);
        if seeded::on(Bug::PrefixSplitLosesHolder) {
            let head = self.arena.block(block).run;
            self.set_holders(head, Holders::default());
        }
    }

    fn set_holders(&mut self, run: u32, holders: Holders<W>) {
        let before = core::mem::replace(&mut self.arena.run_mut(run).holders, holders);
        self.unheld_runs -= u32::from(before.is_empty());
        self.unheld_runs += u32::from(holders.is_empty());
    }

    /// Drops `run` and then what it hung under, as long as nobody holds, pins or follows it.
    fn prune(&mut self, run: u32) {
        let mut at = run;
        while at != NONE {
            let parent = self.arena.parent(at);
            if !self.drop_if_idle(at) {
                return;
            }
            at = parent;
        }
    }

    fn drop_if_idle(&mut self, run: u32) -> bool {
        let found = self.arena.run(run);
        let is_idle = found.is_leaf() && found.pins == 0 && found.holders.is_empty();
        if is_idle {
            let parent = self.arena.parent(run);
            // Bounded by the blocks of the run.
            while self.arena.run(run).last != NONE {
                self.arena.drop_last(run);
            }
            self.forget_run(run, parent);
        }
        is_idle
    }

    /// Takes an emptied run out of the counts and the arena.
    fn forget_run(&mut self, run: u32, parent: u32) {
        self.unheld_runs -= u32::from(self.arena.run(run).holders.is_empty());
        self.pinned_runs -= u32::from(self.arena.run(run).pins > 0);
        self.arena.drop_run(run, parent);
    }
}

fn set(held: &mut [u32], index: usize, value: u32) {
    if let Some(place) = held.get_mut(index) {
        *place = value;
    }
}

/// Calls `found` with the number of each bit that is set, lowest first.
fn for_each_bit(mut word: u64, mut found: impl FnMut(usize)) {
    while word != 0 {
        found(word.trailing_zeros() as usize);
        word &= word - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Tree = Prefix<RouteHash, [Block<RouteHash>; 16], [Run<1>; 16], 1>;

    fn tree() -> Tree {
        Prefix::new([const { Block::EMPTY }; 16], [const { Run::EMPTY }; 16], 1)
    }

    fn names<const N: usize>(names: [u64; N]) -> [RouteHash; N] {
        names.map(RouteHash)
    }

    fn insert(tree: &mut Tree, holder: u16, chain: &[RouteHash]) -> Inserted {
        tree.insert(&Path { holder: Holder(holder), parent: None, names: chain }).unwrap()
    }

    fn held(tree: &Tree, chain: &[RouteHash]) -> [u32; 3] {
        let mut held = [0; 3];
        tree.matches(chain, &mut held);
        held
    }

    #[test]
    fn chains_that_begin_alike_share_their_beginning() {
        let mut tree = tree();
        let (one, two) = (names([1, 2, 3, 4]), names([1, 2, 13]));
        insert(&mut tree, 0, &one);
        let inserted = insert(&mut tree, 1, &two);
        assert_eq!((inserted.known, inserted.added, tree.len(), tree.run_count()), (2, 1, 5, 3));
        assert_eq!((held(&tree, &one), held(&tree, &two)), ([4, 2, 0], [2, 3, 0]));
        assert_eq!(tree.longest_match(&names([1, 2, 13, 14])).len, 3);
        assert_eq!(tree.longest_match(&names([9])), Match { len: 0, last: None });
    }

    #[test]
    fn the_leaf_not_used_for_longest_goes_first_block_by_block() {
        let mut tree = tree();
        insert(&mut tree, 0, &names([1, 2, 3]));
        insert(&mut tree, 0, &names([1, 2, 13]));
        tree.touch(tree.find(RouteHash(3)).unwrap()).unwrap();
        for expected in [13, 3, 2, 1] {
            assert_eq!(tree.evict().unwrap().name, RouteHash(expected));
        }
        assert_eq!((tree.evict(), tree.is_empty(), tree.run_count()), (None, true, 0));
    }

    #[test]
    fn a_pin_keeps_its_block_and_all_before_it() {
        let mut tree = tree();
        insert(&mut tree, 0, &names([1, 2, 3, 4]));
        let pinned = tree.find(RouteHash(2)).unwrap();
        tree.pin(pinned).unwrap();
        assert_eq!([tree.evict().unwrap().name, tree.evict().unwrap().name], names([4, 3]));
        assert_eq!((tree.evict(), tree.len()), (None, 2));
        tree.unpin(pinned).unwrap();
        assert_eq!(tree.unpin(pinned), Err(PrefixError::NotPinned(pinned)));
        assert_eq!(tree.evict().unwrap().block, pinned);
        assert_eq!(tree.pin(pinned), Err(PrefixError::Stale(pinned)));
    }

    #[test]
    fn a_hole_ends_the_match_of_its_holder_only() {
        let mut tree = tree();
        let chain = names([1, 2, 3, 4]);
        insert(&mut tree, 0, &chain);
        insert(&mut tree, 1, &chain);
        assert!(tree.remove(Holder(0), RouteHash(2)));
        assert!(!tree.remove(Holder(0), RouteHash(2)));
        assert_eq!((held(&tree, &chain), tree.longest_match(&chain).len), ([1, 4, 0], 4));
        tree.remove(Holder(1), RouteHash(2));
        assert_eq!((held(&tree, &chain), tree.longest_match(&chain).len, tree.len()), ([1, 1, 0], 1, 4));
        insert(&mut tree, 1, &chain);
        assert_eq!((held(&tree, &chain), tree.longest_match(&chain).len), ([1, 4, 0], 4));
    }

    #[test]
    fn a_holder_that_is_gone_takes_what_only_it_held() {
        let mut tree = tree();
        insert(&mut tree, 0, &names([1, 2, 3, 4]));
        insert(&mut tree, 1, &names([1, 2, 13, 14]));
        tree.remove_holder(Holder(0));
        assert_eq!((tree.len(), held(&tree, &names([1, 2, 13, 14]))), (4, [0, 4, 0]));
        tree.remove_holder(Holder(1));
        assert_eq!((tree.len(), tree.run_count()), (0, 0));
    }

    #[test]
    fn blocks_follow_a_named_parent() {
        let mut tree = tree();
        insert(&mut tree, 0, &names([1, 2, 3]));
        let stray = Path { holder: Holder(0), parent: Some(RouteHash(99)), names: &names([5]) };
        assert_eq!(tree.insert(&stray), Err(PrefixError::UnknownParent));
        let inserted = tree.insert(&Path { holder: Holder(1), parent: Some(RouteHash(1)), names: &names([2, 23]) });
        assert_eq!(inserted, Ok(Inserted { known: 1, added: 1, stopped: None }));
        assert_eq!(held(&tree, &names([1, 2, 23])), [2, 0, 0]);
        assert!(tree.holders(tree.find(RouteHash(2)).unwrap()).unwrap().contains(Holder(1)));
    }

    #[test]
    fn names_that_are_no_chain_stop_the_insertion() {
        let mut tree = tree();
        insert(&mut tree, 0, &names([1, 2]));
        assert_eq!(insert(&mut tree, 0, &names([5, 2])).stopped, Some(Stop::NotAChain));
        let twice = insert(&mut tree, 0, &names([7, 8, 7]));
        assert_eq!(twice, Inserted { known: 0, added: 2, stopped: Some(Stop::NotAChain) });
        assert_eq!(insert(&mut tree, 0, &names([2])).stopped, Some(Stop::NotAChain));
    }

    #[test]
    fn a_full_tree_takes_what_fits() {
        let mut tree = tree();
        let chain: [RouteHash; 20] = core::array::from_fn(|at| RouteHash(at as u64 + 1));
        let inserted = insert(&mut tree, 0, &chain);
        assert_eq!(inserted, Inserted { known: 0, added: 16, stopped: Some(Stop::Full) });
        assert_eq!(tree.longest_match(&chain).len, 16);
        let past = tree.insert(&Path { holder: Holder(64), parent: None, names: &chain });
        assert_eq!(past, Err(PrefixError::HolderLimit(Holder(64))));
    }
}
