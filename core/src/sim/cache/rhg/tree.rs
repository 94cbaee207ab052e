//! The forest of blocks, the groups they are in, and the lists of groups by class and age.
//!
//! All links are indices; every step is O(1) but for the way down to a leaf and the search for the list worth least.

use alloc::boxed::Box;
use alloc::vec;

use super::LISTS;
use super::hazard::{BUCKETS, Class, edge};
use crate::time::Instant;

const NONE: u32 = u32::MAX;

/// Consecutive blocks of one request with one class.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) at: Instant,
    pub(super) class: Class,
    /// The age bucket it is in.
    pub(super) bucket: usize,
    /// Blocks it was made of.
    pub(super) size: u32,
    /// Of those, not used again so far.
    pub(super) awaited: u32,
    /// Blocks used again in the present bucket, ...
    pub(super) returned: u32,
    /// ... and the seconds that they were waited for in it.
    pub(super) returned_after_s: f64,
    /// Its resident blocks: the leaf-most, ...
    first: u32,
    /// ... and the one nearest the root.
    last: u32,
    /// The group before and after it in the list of its class and bucket.
    prev: u32,
    next: u32,
}

impl Group {
    pub(super) const fn new(at: Instant, class: Class) -> Self {
        let (size, awaited, returned, returned_after_s) = (0, 0, 0, 0.0);
        let (first, last, prev, next) = (NONE, NONE, NONE, NONE);
        Self { at, class, bucket: 0, size, awaited, returned, returned_after_s, first, last, prev, next }
    }

    fn list(&self) -> usize {
        self.class.index() * BUCKETS + self.bucket
    }
}

#[derive(Clone, Debug)]
struct Block {
    parent: u32,
    /// Resident children, the one used longest ago first.
    first_child: u32,
    last_child: u32,
    /// Resident children of the same parent.
    prev_sibling: u32,
    next_sibling: u32,
    /// The group of its last use.
    group: u32,
    /// Resident blocks of the same group.
    prev_member: u32,
    next_member: u32,
    /// How often it was used; stops at the highest number.
    uses: u16,
    /// How many turns its chain had seen when it came, itself included.
    turns: u16,
    is_resident: bool,
}

impl Block {
    const UNKNOWN: Self = Self {
        parent: NONE,
        first_child: NONE,
        last_child: NONE,
        prev_sibling: NONE,
        next_sibling: NONE,
        group: NONE,
        prev_member: NONE,
        next_member: NONE,
        uses: 0,
        turns: 0,
        is_resident: false,
    };
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
}

/// Blocks, their groups' lists, and which list is worth least.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    blocks: Box<[Block]>,
    lists: Box<[List]>,
    /// Lists, those worth least first.
    by_rank: Box<[usize]>,
    /// The inverse.
    rank_of: Box<[usize]>,
    /// By rank, a bit for each list that is not empty.
    filled: Box<[u64]>,
    resident: u32,
}

impl Tree {
    pub(super) fn new(blocks: u32) -> Self {
        let order: Box<[usize]> = (0..LISTS).collect();
        Self {
            blocks: vec![Block::UNKNOWN; blocks as usize].into_boxed_slice(),
            lists: vec![List { first: NONE, last: NONE }; LISTS].into_boxed_slice(),
            by_rank: order.clone(),
            rank_of: order,
            filled: vec![0; LISTS.div_ceil(64)].into_boxed_slice(),
            resident: 0,
        }
    }

    pub(super) const fn resident_count(&self) -> u32 {
        self.resident
    }

    pub(super) fn is_resident(&self, block: usize) -> bool {
        self.blocks[block].is_resident
    }

    pub(super) fn is_known(&self, block: usize) -> bool {
        self.blocks[block].uses > 0
    }

    pub(super) fn uses(&self, block: usize) -> u16 {
        self.blocks[block].uses
    }

    pub(super) fn turns(&self, block: usize) -> u16 {
        self.blocks[block].turns
    }

    /// A request whose chain had seen `turns` turns uses the block.
    pub(super) fn count_use(&mut self, block: usize, parent: Option<usize>, turns: u16) {
        let block = &mut self.blocks[block];
        if block.uses == 0 {
            block.turns = turns.saturating_add(1);
            block.parent = parent.map_or(NONE, narrow);
        }
        block.uses = block.uses.saturating_add(1);
    }

    /// A block that is used again leaves its group, which notes the reuse.
    pub(super) fn leave(&mut self, log: &mut [Group], block: usize, now: Instant) {
        let group = &mut log[self.blocks[block].group as usize];
        group.awaited -= 1;
        group.returned += 1;
        let in_bucket = now.since(group.at) - edge(group.bucket);
        group.returned_after_s += in_bucket.as_secs_f64();
        if self.blocks[block].is_resident {
            self.remove(log, block);
        }
    }

    /// A block becomes resident as the last one of the group that was opened last.
    pub(super) fn enter(&mut self, log: &mut [Group], block: usize) {
        let (at, name) = (log.len() - 1, narrow(block));
        let group = &mut log[at];
        group.size += 1;
        group.awaited += 1;
        let before = core::mem::replace(&mut group.last, name);
        match before {
            NONE => {
                group.first = name;
                self.push(log, at);
            }
            _ => self.blocks[before as usize].next_member = name,
        }
        let here = &mut self.blocks[block];
        (here.group, here.prev_member, here.next_member, here.is_resident) = (narrow(at), before, NONE, true);
        self.resident += 1;
        let parent = here.parent;
        if parent == NONE {
            return;
        }
        let youngest = core::mem::replace(&mut self.blocks[parent as usize].last_child, name);
        match youngest {
            NONE => self.blocks[parent as usize].first_child = name,
            _ => self.blocks[youngest as usize].next_sibling = name,
        }
        let here = &mut self.blocks[block];
        (here.prev_sibling, here.next_sibling) = (youngest, NONE);
    }

    /// Evicts the leaf under the oldest block of the list worth least; `false` if nothing is resident.
    pub(super) fn evict(&mut self, log: &mut [Group]) -> bool {
        let Some((word, bits)) = self.filled.iter().enumerate().find(|(_, bits)| **bits != 0) else { return false };
        let list = self.by_rank[word * 64 + bits.trailing_zeros() as usize];
        let mut block = log[self.lists[list].first as usize].first;
        // Bounded by the length of the longest prompt.
        while self.blocks[block as usize].first_child != NONE {
            block = self.blocks[block as usize].first_child;
        }
        self.remove(log, block as usize);
        true
    }

    /// Takes a resident block out of its group and from under its parent.
    fn remove(&mut self, log: &mut [Group], block: usize) {
        let Block { parent, prev_sibling, next_sibling, group, prev_member, next_member, .. } = self.blocks[block];
        self.blocks[block].is_resident = false;
        self.resident -= 1;
        let at = group as usize;
        match prev_member {
            NONE => log[at].first = next_member,
            _ => self.blocks[prev_member as usize].next_member = next_member,
        }
        match next_member {
            NONE => log[at].last = prev_member,
            _ => self.blocks[next_member as usize].prev_member = prev_member,
        }
        if log[at].first == NONE {
            self.pull(log, at);
        }
        if parent == NONE {
            return;
        }
        match prev_sibling {
            NONE => self.blocks[parent as usize].first_child = next_sibling,
            _ => self.blocks[prev_sibling as usize].next_sibling = next_sibling,
        }
        match next_sibling {
            NONE => self.blocks[parent as usize].last_child = prev_sibling,
            _ => self.blocks[next_sibling as usize].prev_sibling = prev_sibling,
        }
    }

    /// A group enters its next bucket.
    pub(super) fn move_on(&mut self, log: &mut [Group], at: usize) {
        let is_listed = log[at].first != NONE;
        if is_listed {
            self.pull(log, at);
        }
        log[at].bucket += 1;
        (log[at].returned, log[at].returned_after_s) = (0, 0.0);
        if is_listed {
            self.push(log, at);
        }
    }

    /// Puts a group at the young end of its list.
    fn push(&mut self, log: &mut [Group], at: usize) {
        let list = log[at].list();
        let before = core::mem::replace(&mut self.lists[list].last, narrow(at));
        (log[at].prev, log[at].next) = (before, NONE);
        match before {
            NONE => {
                self.lists[list].first = narrow(at);
                self.mark(list);
            }
            _ => log[before as usize].next = narrow(at),
        }
    }

    /// Takes a group out of its list.
    fn pull(&mut self, log: &mut [Group], at: usize) {
        let (list, prev, next) = (log[at].list(), log[at].prev, log[at].next);
        match prev {
            NONE => self.lists[list].first = next,
            _ => log[prev as usize].next = next,
        }
        match next {
            NONE => self.lists[list].last = prev,
            _ => log[next as usize].prev = prev,
        }
        if self.lists[list].first == NONE {
            let rank = self.rank_of[list];
            self.filled[rank / 64] &= !(1 << (rank % 64));
        }
    }

    fn mark(&mut self, list: usize) {
        let rank = self.rank_of[list];
        self.filled[rank / 64] |= 1 << (rank % 64);
    }

    /// Orders the lists by what their blocks are worth; of equals, the older bucket goes first.
    pub(super) fn rank(&mut self, worths: &[f64]) {
        self.by_rank.sort_unstable_by(|&a, &b| {
            let older_first = (b % BUCKETS, a).cmp(&(a % BUCKETS, b));
            worths[a].total_cmp(&worths[b]).then(older_first)
        });
        self.filled.fill(0);
        for rank in 0..LISTS {
            let list = self.by_rank[rank];
            self.rank_of[list] = rank;
            if self.lists[list].first != NONE {
                self.mark(list);
            }
        }
    }
}

/// An index as it is linked: tables have fewer than 2^32 entries, since a trace has fewer blocks.
#[expect(clippy::cast_possible_truncation, reason = "a trace has fewer than 2^32 blocks, and groups no more")]
const fn narrow(index: usize) -> u32 {
    index as u32
}
