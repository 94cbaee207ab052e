//! Columns: the bit of a holder's present life in every set, and what becomes of the bits of lives that ended.
//!
//! A holder that is forgotten leaves its column behind and gets another, so forgetting is one step whatever it held. The
//! old column is free again once a sweep has taken it from every block.

use alloc::boxed::Box;
use alloc::vec;

use crate::prefix::{Holder, Holders};
use crate::seeded::{self, Bug};

/// No column.
pub(super) const NO_COLUMN: u16 = u16::MAX;

#[derive(Clone, Debug)]
pub(super) struct Columns<const W: usize> {
    /// What holders have now, and what they get by a snapshot that is being taken.
    pub(super) current: Holders<W>,
    /// What look-ups see.
    pub(super) live: Holders<W>,
    pub(super) owners: Box<[Holder]>,
    /// Blocks in each.
    pub(super) blocks: Box<[u32]>,
    free: Holders<W>,
    /// Left behind since the present sweep began.
    retired: Holders<W>,
    /// Being swept.
    leaving: Holders<W>,
    /// Blocks before this one have lost what is leaving.
    cursor: u32,
}

pub(super) fn and<const W: usize>(left: &Holders<W>, right: &Holders<W>) -> Holders<W> {
    let mut both = *left;
    both.0.iter_mut().zip(&right.0).for_each(|(word, other)| *word &= other);
    both
}

pub(super) fn or<const W: usize>(left: &Holders<W>, right: &Holders<W>) -> Holders<W> {
    let mut either = *left;
    either.0.iter_mut().zip(&right.0).for_each(|(word, other)| *word |= other);
    either
}

/// The number of each member, lowest first.
pub(super) fn members<const W: usize>(set: &Holders<W>, mut found: impl FnMut(u16)) {
    for (first, &word) in (0_u16..).step_by(64).zip(&set.0) {
        let mut word = word;
        while word != 0 {
            found(first + u16::try_from(word.trailing_zeros()).unwrap_or(0));
            word &= word - 1;
        }
    }
}

impl<const W: usize> Columns<W> {
    pub(super) fn new(count: u16) -> Self {
        Self {
            current: Holders::default(),
            live: Holders::default(),
            owners: vec![Holder(0); usize::from(count)].into(),
            blocks: vec![0; usize::from(count)].into(),
            free: (0..count).fold(Holders::default(), |free, column| free.with(Holder(column))),
            retired: Holders::default(),
            leaving: Holders::default(),
            cursor: 0,
        }
    }

    /// The lowest free column, for `holder`.
    pub(super) fn take(&mut self, holder: Holder) -> Option<u16> {
        let word = self.free.0.iter().position(|&word| word != 0)?;
        let bit = usize::try_from(self.free.0[word].trailing_zeros()).ok()?;
        let column = u16::try_from(word * 64 + bit).ok()?;
        self.free = self.free.without(Holder(column));
        self.current = self.current.with(Holder(column));
        self.owners[usize::from(column)] = holder;
        self.blocks[usize::from(column)] = 0;
        Some(column)
    }

    /// Nobody has it any more.
    pub(super) fn retire(&mut self, column: u16) {
        if column == NO_COLUMN {
            return;
        }
        let column = Holder(column);
        self.current = self.current.without(column);
        if !seeded::on(Bug::IndexKeepsCleared) {
            self.live = self.live.without(column);
        }
        if seeded::on(Bug::IndexReusesColumnEarly) {
            self.free = self.free.with(column);
            return;
        }
        self.retired = self.retired.with(column);
    }

    /// The next block to be cleaned; `None` if there is nothing to clean. Blocks have numbers below `end`.
    pub(super) fn next_to_clean(&mut self, end: u32) -> Option<u32> {
        if !self.leaving.is_empty() && self.cursor >= end {
            self.free = or(&self.free, &self.leaving);
            self.leaving = Holders::default();
        }
        if self.leaving.is_empty() {
            (self.leaving, self.retired) = (self.retired, Holders::default());
            self.cursor = 0;
        }
        if self.leaving.is_empty() {
            return None;
        }
        self.cursor += 1;
        Some(self.cursor - 1)
    }
}
