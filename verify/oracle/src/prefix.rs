//! The obvious prefix index: every block by name, with its parent, its holders, its pins and when it was last used.

use std::collections::{BTreeMap, BTreeSet};

use millpond_core::prefix::Stop;

/// What is known of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    parent: Option<u64>,
    holders: BTreeSet<u16>,
    pins: u32,
    used_at: u64,
}

/// What an insertion did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// Names that were there.
    pub known: usize,
    /// Names that were added.
    pub added: usize,
    /// Why it ended early.
    pub stopped: Option<Stop>,
}

/// Blocks as a map.
///
/// ```
/// let mut index = millpond_oracle::prefix::Index::new(4);
/// index.insert(0, None, &[1, 2, 3]).unwrap();
/// assert_eq!((index.held_by(0, &[1, 2, 9]), index.evict()), (2, Some((3, vec![0]))));
/// ```
#[derive(Clone, Debug)]
pub struct Index {
    capacity: usize,
    clock: u64,
    blocks: BTreeMap<u64, Block>,
}

impl Index {
    /// An empty index for `capacity` blocks.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, blocks: BTreeMap::new() }
    }

    /// Adds names behind a parent. `None` if the parent is unknown.
    pub fn insert(&mut self, holder: u16, parent: Option<u64>, names: &[u64]) -> Option<Inserted> {
        if parent.is_some_and(|parent| !self.blocks.contains_key(&parent)) {
            return None;
        }
        let mut inserted = Inserted { known: 0, added: 0, stopped: None };
        let mut last = parent;
        for &name in names {
            let is_full = self.blocks.len() == self.capacity;
            match self.blocks.get_mut(&name) {
                Some(block) if block.parent == last && inserted.added == 0 => {
                    block.holders.insert(holder);
                    inserted.known += 1;
                }
                Some(_) => {
                    inserted.stopped = Some(Stop::NotAChain);
                    break;
                }
                None if is_full => {
                    inserted.stopped = Some(Stop::Full);
                    break;
                }
                None => {
                    let holders = BTreeSet::from([holder]);
                    self.blocks.insert(name, Block { parent: last, holders, pins: 0, used_at: 0 });
                    inserted.added += 1;
                }
            }
            last = Some(name);
        }
        if let Some(last) = last {
            self.touch(last);
        }
        Some(inserted)
    }

    /// Whether the block is there.
    #[must_use]
    pub fn contains(&self, name: u64) -> bool {
        self.blocks.contains_key(&name)
    }

    /// Blocks in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Names at the beginning of `names` held by somebody.
    #[must_use]
    pub fn held(&self, names: &[u64]) -> usize {
        self.prefix(names, |block| !block.holders.is_empty())
    }

    /// Names at the beginning of `names` held by `holder`.
    #[must_use]
    pub fn held_by(&self, holder: u16, names: &[u64]) -> usize {
        self.prefix(names, |block| block.holders.contains(&holder))
    }

    fn prefix(&self, names: &[u64], counts: impl Fn(&Block) -> bool) -> usize {
        names.iter().take_while(|name| self.blocks.get(name).is_some_and(&counts)).count()
    }

    /// Marks the block and all before it as used now.
    pub fn touch(&mut self, name: u64) {
        self.clock += 1;
        let mut at = Some(name);
        while let Some(block) = at.and_then(|name| self.blocks.get_mut(&name)) {
            block.used_at = self.clock;
            at = block.parent;
        }
    }

    /// Adds a pin.
    pub fn pin(&mut self, name: u64) {
        self.touch(name);
        self.blocks.get_mut(&name).expect("the caller looked").pins += 1;
    }

    /// Takes a pin away; whether there was one.
    pub fn unpin(&mut self, name: u64) -> bool {
        let block = self.blocks.get_mut(&name).expect("the caller looked");
        if block.pins == 0 {
            return false;
        }
        block.pins -= 1;
        self.touch(name);
        self.drop_idle();
        true
    }

    /// `holder` no longer holds the block; whether it did.
    pub fn remove(&mut self, holder: u16, name: u64) -> bool {
        let held = self.blocks.get_mut(&name).is_some_and(|block| block.holders.remove(&holder));
        self.drop_idle();
        held
    }

    /// `holder` holds nothing any more.
    pub fn remove_holder(&mut self, holder: u16) {
        self.blocks.values_mut().for_each(|block| {
            block.holders.remove(&holder);
        });
        self.drop_idle();
    }

    fn is_leaf(&self, name: u64) -> bool {
        self.blocks.values().all(|block| block.parent != Some(name))
    }

    /// Drops blocks that nobody holds, pins or follows, until there are none.
    fn drop_idle(&mut self) {
        let idle = |index: &Self| {
            let mut blocks = index.blocks.iter();
            blocks
                .find(|(name, block)| block.holders.is_empty() && block.pins == 0 && index.is_leaf(**name))
                .map(|x| *x.0)
        };
        while let Some(name) = idle(self) {
            self.blocks.remove(&name);
        }
    }

    /// The leaf not used for longest goes, with who held it; pinned ones it meets count as used.
    pub fn evict(&mut self) -> Option<(u64, Vec<u16>)> {
        let pinned = self.blocks.values().filter(|block| block.pins > 0).count();
        for _ in 0..=pinned {
            let leaves = self.blocks.iter().filter(|(name, _)| self.is_leaf(**name));
            let (&name, block) = leaves.min_by_key(|(_, block)| block.used_at)?;
            if block.pins > 0 {
                self.touch(name);
                continue;
            }
            let block = self.blocks.remove(&name)?;
            self.drop_idle();
            return Some((name, block.holders.into_iter().collect()));
        }
        None
    }

    /// The end of the chain below `name` that takes, at each fork, the side not used for longest.
    #[must_use]
    pub fn leaf_under(&self, name: u64) -> u64 {
        let children = self.blocks.iter().filter(|(_, block)| block.parent == Some(name));
        children.min_by_key(|(_, block)| block.used_at).map_or(name, |(&child, _)| self.leaf_under(child))
    }
}
