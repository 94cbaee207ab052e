//! Sets of columns, each kept once however many blocks have it.

use core::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64;

use super::table::Table;
use crate::prefix::Holders;
use crate::seeded::{self, Bug};

#[derive(Clone, Debug)]
struct Set<const W: usize> {
    columns: Holders<W>,
    blocks: NonZeroU32,
}

/// Sets with the number of blocks that have each.
#[derive(Clone, Debug)]
pub(super) struct Sets<const W: usize>(Table<Set<W>>);

fn hash<const W: usize>(columns: &Holders<W>) -> u64 {
    xxh3_64(bytemuck::cast_slice(&columns.0))
}

impl<const W: usize> Sets<W> {
    pub(super) fn new(capacity: u32, seed: u64) -> Self {
        Self(Table::new(capacity, seed))
    }

    pub(super) fn len(&self) -> u32 {
        self.0.len()
    }

    /// The columns of a set that some block has.
    pub(super) fn columns(&self, set: u32) -> &Holders<W> {
        const { assert!(W > 0) };
        self.0.get(set).map_or(&Holders([0; W]), |set| &set.columns)
    }

    /// One more block has this set; `None` if it is a new one and there is no room.
    pub(super) fn take(&mut self, columns: &Holders<W>) -> Option<u32> {
        let hash = hash(columns);
        let found = self.0.find(hash, |set| set.columns == *columns).map(|(index, _)| index);
        if let Some(index) = found {
            let set = self.0.get_mut(index)?;
            set.blocks = set.blocks.saturating_add(1);
            return Some(index);
        }
        self.0.insert(hash, Set { columns: *columns, blocks: NonZeroU32::MIN })
    }

    /// One block less has it.
    pub(super) fn give(&mut self, index: u32) {
        let Some(set) = self.0.get_mut(index) else { return };
        match NonZeroU32::new(set.blocks.get() - 1) {
            Some(blocks) => set.blocks = blocks,
            None => {
                let hash = hash(&set.columns);
                self.0.remove(hash, index);
            }
        }
    }

    /// A block that had `old` has `columns` now; the set it has then. Without room for a new set the block keeps `old`,
    /// and the answer is `None`.
    pub(super) fn change(&mut self, old: u32, columns: &Holders<W>) -> Option<u32> {
        if seeded::on(Bug::IndexChangesSharedSet) && self.0.get(old).is_some_and(|set| set.blocks.get() > 1) {
            self.0.get_mut(old)?.columns = *columns;
            return Some(old);
        }
        let is_alone = self.0.get(old).is_some_and(|set| set.blocks.get() == 1);
        if is_alone {
            // Its place is free for the new one.
            self.give(old);
            return self.take(columns);
        }
        let new = self.take(columns)?;
        self.give(old);
        Some(new)
    }
}
