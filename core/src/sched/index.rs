//! Which instance of a cluster holds which blocks: names of blocks to sets of holders, kept up by numbered events.
//!
//! A *holder* is an instance or a node that keeps blocks. It tells what it does in events, numbered from 1 in each of its
//! *lives*; a restart begins a new life. Sets of holders are bitsets, each kept once however many blocks have it: a block
//! that everybody holds, and one that follows it in the same hands, cost no set of their own. Names are chained hashes
//! (see [`crate::hash`]), so the blocks of a request are looked up one by one and no links between them are kept. It is
//! not an authority: it chooses places, never bytes, and who holds a block can lose it before it is asked.
//!
//! It does not stand on [`crate::prefix`]. That tree keeps a block only with all blocks before it, while events and
//! snapshots tell of blocks in any order and whatever came before may be lost; it keeps one bitset for each run, so
//! as many as blocks in the worst case; and to forget a holder it visits every run.
//!
//! Invariants:
//! - a look-up names a holder only for blocks that its present life stored and did not remove, as far as events arrived;
//! - when a holder restarts, clears or leaves, the next look-up knows nothing of what it held before; O(1);
//! - an event of an earlier life, or one seen before, changes nothing but a counter;
//! - after a missing event the holder is *behind* until a snapshot replaced all that is known of it;
//! - where there is no room, less is known, never more. After `new` nothing allocates.

use core::fmt;

use crate::prefix::{Holder, Holders, Key};
use crate::seeded::{self, Bug};

mod columns;
mod matches;
mod sets;
mod table;

#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::vec;

use columns::{Columns, NO_COLUMN, and, members};
pub use matches::Matches;
use sets::Sets;
use table::{NONE, Table};

/// Blocks that are swept with each event.
const SWEEP_STEP: u32 = 64;
/// Blocks that are looked up at once.
const LOOK_UPS: usize = 8;

/// What an index has room for. Memory: about 32 bytes a block with 8-byte names, `8 * W + 24` bytes a set.
///
/// ```
/// use millpond_core::sched::index::Limits;
/// let limits = Limits { holders_max: 64, ..Limits::default() };
/// assert!(limits.sets_max < limits.blocks_max, "blocks of one chain have few sets");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Holders; they are numbered from 0. At most `64 * W - 1`.
    pub holders_max: u16,
    /// Lives that ended and are not swept yet, and snapshots being taken, at one time; as many as `64 * W` has room for.
    pub spares: u16,
    /// Blocks that anybody holds.
    pub blocks_max: u32,
    /// Different sets of holders.
    pub sets_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { holders_max: 1_000, spares: 24, blocks_max: 1 << 20, sets_max: 1 << 17 }
    }
}

/// What a holder did.
///
/// Example: [`Index`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change<'a, K> {
    /// It has these blocks now.
    Stored(&'a [K]),
    /// It does not have these any more.
    Removed(&'a [K]),
    /// It has nothing any more.
    Cleared,
}

/// One numbered change of a holder.
///
/// Example: [`Index`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a, K> {
    /// Whose.
    pub holder: Holder,
    /// Its life: higher with each restart, from 1.
    pub life: u64,
    /// Its number in that life, from 1, without gaps.
    pub number: u64,
    /// What changed.
    pub change: Change<'a, K>,
}

/// What became of an input.
///
/// ```
/// use millpond_core::sched::index::Outcome;
/// assert_eq!(Outcome::Behind.to_string(), "taken, but events before it are missing; take a snapshot of the holder");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It was taken and nothing is missing.
    Applied,
    /// It was taken, but events before it are missing: take a snapshot.
    Behind,
    /// It is known: nothing changed.
    Repeated,
    /// It is of an earlier life, or of a snapshot that nobody began: nothing changed.
    Stale,
    /// No such holder: nothing changed.
    Unknown,
    /// A snapshot of the holder is being taken: nothing changed. Send the events after the snapshot's number again. (That
    /// it was cleared after that number ends the snapshot instead.)
    InSnapshot,
    /// All columns are taken by lives that are not swept yet: nothing was learnt, and the holder is behind. Call
    /// [`Index::sweep`], then take a snapshot.
    Crowded,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Applied => "taken",
            Self::Behind => "taken, but events before it are missing; take a snapshot of the holder",
            Self::Repeated => "known already",
            Self::Stale => "of an earlier life of the holder",
            Self::Unknown => {
                "the holder's number is past the index's limit; number holders from 0 or raise holders_max"
            }
            Self::InSnapshot => "a snapshot is being taken; send the events after its number again",
            Self::Crowded => "too many lives ended at once; sweep, then take a snapshot of the holder",
        })
    }
}

/// How well a holder is known.
///
/// Example: [`HolderView`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Knowledge {
    /// Never heard of, or it left.
    Gone,
    /// All its events arrived.
    Current,
    /// Events are missing: some of what it lost may still be known, some of what it stored is not.
    Behind,
    /// A snapshot is being taken.
    InSnapshot,
}

/// What is known of a holder.
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_core::prefix::Holder;
/// use millpond_core::sched::index::{Change, Event, Index, Knowledge, Limits};
/// let mut index: Index<RouteHash, 16> = Index::new(Limits::default(), 7);
/// let names = [RouteHash(1)];
/// index.on_event(&Event { holder: Holder(5), life: 1, number: 2, change: Change::Stored(&names) });
/// let view = index.view(Holder(5)).unwrap();
/// assert_eq!((view.knowledge, view.number, view.blocks), (Knowledge::Behind, 2, 1), "event 1 is missing");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderView {
    /// Its present life; 0 if it was never heard of.
    pub life: u64,
    /// Its last event; 0 if there was none: a holder that never sends any gets no requests for what it holds.
    pub number: u64,
    /// How well it is known.
    pub knowledge: Knowledge,
    /// Blocks it is known to hold.
    pub blocks: u32,
}

/// Counts since the index was made.
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_core::sched::index::{Index, Limits};
/// let index: Index<RouteHash, 1> = Index::new(Limits { holders_max: 8, ..Limits::default() }, 7);
/// assert_eq!(index.totals().blocks, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Totals {
    /// Blocks in the index now, those of lives that are not swept yet among them.
    pub blocks: u32,
    /// Sets now.
    pub sets: u32,
    /// Inputs that changed something.
    pub version: u64,
    /// Times that events were found missing.
    pub gaps: u64,
    /// Inputs of earlier lives.
    pub stale: u64,
    /// Events that were seen before.
    pub repeated: u64,
    /// Inputs of holders past the limit.
    pub unknown: u64,
    /// Times that a block could not be noted, or was dropped, for want of room.
    pub full: u64,
}

#[derive(Clone, Copy, Debug)]
struct Block<K> {
    name: K,
    set: u32,
}

/// What is kept of a holder's present life.
#[derive(Clone, Copy, Debug)]
struct Seat {
    life: u64,
    number: u64,
    column: u16,
    /// What a snapshot fills.
    fresh: u16,
    fresh_number: u64,
    is_behind: bool,
    is_gone: bool,
}

impl Seat {
    const fn new(life: u64) -> Self {
        Self {
            life,
            number: 0,
            column: NO_COLUMN,
            fresh: NO_COLUMN,
            fresh_number: 0,
            is_behind: false,
            is_gone: life == 0,
        }
    }
}

/// The index. `64 * W` holders, those that ended and wait to be swept among them.
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_core::prefix::Holder;
/// use millpond_core::sched::index::{Change, Event, Index, Limits, Outcome};
/// let mut index: Index<RouteHash, 16> = Index::new(Limits::default(), 0x5eed);
/// let chain = [1, 2, 3].map(RouteHash);
/// let stored = Event { holder: Holder(4), life: 1, number: 1, change: Change::Stored(&chain) };
/// assert_eq!(index.on_event(&stored), Outcome::Applied);
/// let mut matches = index.new_matches();
/// index.matches(&chain, &mut matches);
/// assert_eq!(matches.len_of(Holder(4)), 3);
///
/// // It restarts: what it held is forgotten with the first word of its new life.
/// assert_eq!(index.on_position(Holder(4), 2, 0), Outcome::Applied);
/// index.matches(&chain, &mut matches);
/// assert_eq!(matches.len_of(Holder(4)), 0);
/// assert_eq!(index.on_event(&Event { number: 2, ..stored }), Outcome::Stale);
/// ```
#[derive(Clone, Debug)]
pub struct Index<K, const W: usize> {
    blocks: Table<Block<K>>,
    sets: Sets<W>,
    columns: Columns<W>,
    seats: Box<[Seat]>,
    /// Holders with a live column.
    members: Holders<W>,
    totals: Totals,
}

impl<K: Key, const W: usize> Index<K, W> {
    /// An empty index. `seed` is unknown to whoever chooses names: it keeps them from sharing a bucket on purpose.
    #[must_use]
    pub fn new(limits: Limits, seed: u64) -> Self {
        let columns_max = u16::try_from(Holders::<W>::LIMIT).unwrap_or(NO_COLUMN);
        let holders = limits.holders_max.min(columns_max - 1);
        let columns = holders.saturating_add(limits.spares.max(1)).min(columns_max);
        Self {
            blocks: Table::new(limits.blocks_max, seed),
            sets: Sets::new(limits.sets_max, seed),
            columns: Columns::new(columns),
            seats: vec![Seat::new(0); usize::from(holders)].into(),
            members: Holders::default(),
            totals: Totals::default(),
        }
    }

    /// A result that [`Self::matches`] of this index can fill.
    #[must_use]
    pub fn new_matches(&self) -> Matches<W> {
        Matches::new(u16::try_from(self.seats.len()).unwrap_or(0))
    }

    /// How much of the chain `names` each holder has, into a result of [`Self::new_matches`]. O(blocks that the best one
    /// has + holders that have more than all have).
    pub fn matches(&self, names: &[K], found: &mut Matches<W>) {
        found.reset(self.members);
        let mut alive = self.columns.live;
        if alive.is_empty() {
            return;
        }
        let (mut is_shared, mut seen) = (true, NONE);
        let end = u32::try_from(names.len()).unwrap_or(NONE);
        // Looked up a few at a time: the misses of one do not wait for what the one before it means.
        let sets = names.chunks(LOOK_UPS).flat_map(|some| {
            let mut sets = [NONE; LOOK_UPS];
            for (set, &name) in sets.iter_mut().zip(some) {
                *set = self.find(name).map_or(NONE, |(_, block)| block.set);
            }
            sets.into_iter().take(some.len())
        });
        for (len, set) in (0..end).zip(sets) {
            // Who had the block before and is still in has this one too.
            if set == seen && set != NONE {
                continue;
            }
            seen = set;
            let next = and(&alive, self.sets.columns(set));
            if next == alive {
                continue;
            }
            if core::mem::take(&mut is_shared) {
                found.shared = len;
            } else {
                alive.0.iter_mut().zip(&next.0).for_each(|(word, next)| *word &= !next);
                members(&alive, |column| found.push(self.columns.owners[usize::from(column)], len));
            }
            alive = next;
            if alive.is_empty() {
                found.longest = len;
                return;
            }
        }
        found.longest = end;
        if is_shared {
            found.shared = end;
        } else {
            members(&alive, |column| found.push(self.columns.owners[usize::from(column)], end));
        }
    }

    /// Leading blocks of the chain `names` that somebody has, one here and one there: what a store holds whose nodes share
    /// its blocks among them. O(blocks).
    ///
    /// ```
    /// use millpond_core::hash::RouteHash;
    /// use millpond_core::prefix::Holder;
    /// use millpond_core::sched::index::{Change, Event, Index, Limits};
    /// let mut index: Index<RouteHash, 1> = Index::new(Limits { holders_max: 2, ..Limits::default() }, 7);
    /// let chain = [1, 2, 3].map(RouteHash);
    /// for (holder, block) in [(0, 0), (1, 1)] {
    ///     let change = Change::Stored(&chain[block..=block]);
    ///     index.on_event(&Event { holder: Holder(holder), life: 1, number: 1, change });
    /// }
    /// assert_eq!(index.pooled(&chain), 2);
    /// ```
    #[must_use]
    pub fn pooled(&self, names: &[K]) -> u32 {
        let live = &self.columns.live;
        let is_there =
            |name: &&K| self.find(**name).is_some_and(|(_, block)| !and(live, self.sets.columns(block.set)).is_empty());
        u32::try_from(names.iter().take_while(is_there).count()).unwrap_or(u32::MAX)
    }

    /// A holder did something. O(names), and a few steps of sweeping.
    pub fn on_event(&mut self, event: &Event<'_, K>) -> Outcome {
        self.sweep(SWEEP_STEP);
        let seat = match self.admit(event.holder, event.life) {
            Ok(seat) => seat,
            Err(outcome) => return outcome,
        };
        // Whoever has nothing any more needs no snapshot of what it had before.
        let ends_snapshot = event.change == Change::Cleared && event.number > seat.fresh_number.max(seat.number);
        if seat.fresh != NO_COLUMN && !ends_snapshot {
            return Outcome::InSnapshot;
        }
        if event.number <= seat.number {
            self.totals.repeated += 1;
            return Outcome::Repeated;
        }
        self.follow(event.holder, event.number - 1);
        self.seat_mut(event.holder).number = event.number;
        self.totals.version += 1;
        match event.change {
            Change::Stored(names) => return self.stored(event.holder, names),
            Change::Removed(names) => self.refute(event.holder, names),
            Change::Cleared => {
                self.forget(event.holder);
                // Whatever is missing came before.
                self.seat_mut(event.holder).is_behind = false;
            }
        }
        self.said(event.holder)
    }

    /// A sign of life: the holder has sent events up to `number` (0: none in this life yet). Finds out what was lost at
    /// the end of the stream.
    pub fn on_position(&mut self, holder: Holder, life: u64, number: u64) -> Outcome {
        self.sweep(SWEEP_STEP);
        match self.admit(holder, life) {
            Ok(seat) if seat.fresh != NO_COLUMN => Outcome::InSnapshot,
            Ok(_) => {
                self.follow(holder, number);
                self.said(holder)
            }
            Err(outcome) => outcome,
        }
    }

    /// The holder left the cluster, in that life or a later one. Its events are stale from now on, until a later life.
    pub fn on_leave(&mut self, holder: Holder, life: u64) -> Outcome {
        match self.admit(holder, life) {
            Ok(_) => {
                self.forget(holder);
                self.seat_mut(holder).is_gone = true;
                self.totals.version += 1;
                Outcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// The holder turned out not to have these blocks, whatever it said. O(names).
    pub fn refute(&mut self, holder: Holder, names: &[K]) {
        let Some(seat) = self.seats.get(usize::from(holder.0)) else { return };
        let column = seat.column;
        if column == NO_COLUMN {
            return;
        }
        for &name in names {
            self.remove(column, name);
        }
    }

    /// A snapshot begins: what follows by [`Self::on_snapshot`] is what the holder had when it had sent `number` events.
    /// Until [`Self::end_snapshot`] look-ups see what was known before. A snapshot that was begun and not ended is dropped.
    pub fn begin_snapshot(&mut self, holder: Holder, life: u64, number: u64) -> Outcome {
        let fresh = match self.admit(holder, life) {
            Ok(seat) => core::mem::replace(&mut seat.fresh, NO_COLUMN),
            Err(outcome) => return outcome,
        };
        self.columns.retire(fresh);
        let Some(column) = self.columns.take(holder) else { return Outcome::Crowded };
        let seat = self.seat_mut(holder);
        (seat.fresh, seat.fresh_number) = (column, number);
        Outcome::Applied
    }

    /// Some of the blocks of a snapshot, in any order.
    pub fn on_snapshot(&mut self, holder: Holder, life: u64, names: &[K]) -> Outcome {
        self.sweep(SWEEP_STEP);
        match self.snapshot(holder, life) {
            Ok(column) => {
                self.store(column, names);
                Outcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// The snapshot is whole: it replaces all that was known of the holder. Events are numbered on from its number.
    pub fn end_snapshot(&mut self, holder: Holder, life: u64) -> Outcome {
        let column = match self.snapshot(holder, life) {
            Ok(column) => column,
            Err(outcome) => return outcome,
        };
        let seat = self.seat_mut(holder);
        let old = core::mem::replace(&mut seat.column, column);
        (seat.fresh, seat.number, seat.is_behind) = (NO_COLUMN, seat.fresh_number, false);
        self.columns.retire(old);
        self.show(holder, column);
        self.totals.version += 1;
        Outcome::Applied
    }

    /// Cleans up to `blocks` blocks of what lives that ended had; whether all are clean. Events do a little of it each;
    /// who has time to spare does more.
    pub fn sweep(&mut self, blocks: u32) -> bool {
        for _ in 0..blocks {
            match self.columns.next_to_clean(self.blocks.used_end()) {
                Some(block) => self.clean(block),
                None => return true,
            }
        }
        false
    }

    /// What is known of a holder; `None` past the limit.
    #[must_use]
    pub fn view(&self, holder: Holder) -> Option<HolderView> {
        let seat = self.seats.get(usize::from(holder.0))?;
        let knowledge = match (seat.is_gone, seat.fresh, seat.is_behind) {
            (true, ..) => Knowledge::Gone,
            (_, NO_COLUMN, true) => Knowledge::Behind,
            (_, NO_COLUMN, false) => Knowledge::Current,
            _ => Knowledge::InSnapshot,
        };
        let blocks = self.columns.blocks.get(usize::from(seat.column)).copied().unwrap_or(0);
        Some(HolderView { life: seat.life, number: seat.number, knowledge, blocks })
    }

    /// Counts, for metrics; `version` also for decision records.
    #[must_use]
    pub fn totals(&self) -> Totals {
        Totals { blocks: self.blocks.len(), sets: self.sets.len(), ..self.totals }
    }

    fn find(&self, name: K) -> Option<(u32, &Block<K>)> {
        self.blocks.find(name.spread(), |block| block.name == name)
    }

    fn seat_mut(&mut self, holder: Holder) -> &mut Seat {
        &mut self.seats[usize::from(holder.0)]
    }

    /// The seat of a holder in that life; a later life than the one known begins now.
    fn admit(&mut self, holder: Holder, life: u64) -> Result<&mut Seat, Outcome> {
        let Some(seat) = self.seats.get(usize::from(holder.0)).copied() else {
            self.totals.unknown += 1;
            return Err(Outcome::Unknown);
        };
        let is_over = life < seat.life || (life == seat.life && seat.is_gone);
        if is_over && !(seeded::on(Bug::IndexTakesOldLife) && seat.life > 0) {
            self.totals.stale += 1;
            return Err(Outcome::Stale);
        }
        if life > seat.life {
            self.forget(holder);
            *self.seat_mut(holder) = Seat::new(life);
            self.totals.version += 1;
        }
        Ok(self.seat_mut(holder))
    }

    /// The column that a snapshot in that life fills.
    fn snapshot(&mut self, holder: Holder, life: u64) -> Result<u16, Outcome> {
        match self.admit(holder, life)?.fresh {
            NO_COLUMN => Err(Outcome::Stale),
            column => Ok(column),
        }
    }

    /// Events up to `number` should have arrived.
    fn follow(&mut self, holder: Holder, number: u64) {
        let seat = self.seat_mut(holder);
        if number > seat.number && !seeded::on(Bug::IndexMissesGap) {
            seat.is_behind = true;
            self.totals.gaps += 1;
        }
    }

    fn said(&mut self, holder: Holder) -> Outcome {
        if self.seat_mut(holder).is_behind { Outcome::Behind } else { Outcome::Applied }
    }

    /// The holder has nothing any more, and no snapshot is being taken of it.
    fn forget(&mut self, holder: Holder) {
        let seat = self.seat_mut(holder);
        let columns = [&mut seat.column, &mut seat.fresh].map(|column| core::mem::replace(column, NO_COLUMN));
        columns.into_iter().for_each(|column| self.columns.retire(column));
        self.members = self.members.without(holder);
    }

    /// Look-ups see the holder's column from now on.
    fn show(&mut self, holder: Holder, column: u16) {
        self.columns.live = and(&self.columns.live, &self.columns.current).with(Holder(column));
        self.members = self.members.with(holder);
    }

    fn stored(&mut self, holder: Holder, names: &[K]) -> Outcome {
        if self.seat_mut(holder).column == NO_COLUMN {
            let Some(column) = self.columns.take(holder) else {
                self.seat_mut(holder).is_behind = true;
                return Outcome::Crowded;
            };
            self.seat_mut(holder).column = column;
            self.show(holder, column);
        }
        let column = self.seat_mut(holder).column;
        self.store(column, names);
        self.said(holder)
    }

    fn store(&mut self, column: u16, names: &[K]) {
        for &name in names {
            let is_noted = match self.find(name).map(|(index, block)| (index, block.set)) {
                Some((index, set)) => self.join(column, index, set),
                None => self.add(column, name),
            };
            self.totals.full += u64::from(!is_noted);
        }
    }

    /// Adds a block that only `column` has.
    fn add(&mut self, column: u16, name: K) -> bool {
        let Some(set) = self.sets.take(&Holders::default().with(Holder(column))) else { return false };
        let is_added = self.blocks.insert(name.spread(), Block { name, set }).is_some();
        if is_added {
            self.columns.blocks[usize::from(column)] += 1;
        } else {
            self.sets.give(set);
        }
        is_added
    }

    /// `column` has the block too.
    fn join(&mut self, column: u16, index: u32, set: u32) -> bool {
        let now = *self.sets.columns(set);
        if now.contains(Holder(column)) {
            return true;
        }
        let is_joined = self.change(index, set, &and(&now, &self.columns.current).with(Holder(column)));
        self.columns.blocks[usize::from(column)] += u32::from(is_joined);
        is_joined
    }

    /// `column` does not have the block.
    fn remove(&mut self, column: u16, name: K) {
        let Some((index, &Block { set, .. })) = self.find(name) else { return };
        let now = *self.sets.columns(set);
        if !now.contains(Holder(column)) {
            return;
        }
        let rest = and(&now, &self.columns.current).without(Holder(column));
        self.columns.blocks[usize::from(column)] -= 1;
        self.shrink(index, set, &rest);
    }

    /// Takes from the block what lives that ended had.
    fn clean(&mut self, index: u32) {
        let Some(&Block { set, .. }) = self.blocks.get(index) else { return };
        let now = *self.sets.columns(set);
        let rest = and(&now, &self.columns.current);
        if rest != now {
            self.shrink(index, set, &rest);
        }
    }

    /// The block has only `rest` any more. Without room for that set it is dropped: less is known, never more.
    fn shrink(&mut self, index: u32, set: u32, rest: &Holders<W>) {
        if !rest.is_empty() && self.change(index, set, rest) {
            return;
        }
        members(rest, |column| self.columns.blocks[usize::from(column)] -= 1);
        self.totals.full += u64::from(!rest.is_empty());
        if let Some(block) = self.blocks.get(index) {
            let hash = block.name.spread();
            self.blocks.remove(hash, index);
            self.sets.give(set);
        }
    }

    fn change(&mut self, index: u32, old: u32, columns: &Holders<W>) -> bool {
        let Some(new) = self.sets.change(old, columns) else { return false };
        if let Some(block) = self.blocks.get_mut(index) {
            block.set = new;
        }
        true
    }
}
