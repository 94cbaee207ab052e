//! An index table with epochs: insert gives a handle, and a handle outlives its entry harmlessly.
//!
//! A slab never guesses: a handle whose entry is gone, or whose slot was given to somebody else, is refused. It does not
//! grow: its storage comes from the caller, and full is an answer. Invariants: an epoch is odd while its slot is taken and
//! even while it is free; it only ever grows; a slot whose epoch would wrap is retired.

use core::fmt;
use core::marker::PhantomData;

/// Names one entry of one slab. Plain data: 8 bytes, no padding, safe to send.
///
/// ```
/// use millpond_core::slab::{Handle, Slab, Slot};
/// let mut slab = Slab::new([Slot::EMPTY]);
/// let first = slab.insert('a').unwrap();
/// slab.remove(first);
/// let second = slab.insert('b').unwrap();
/// assert_eq!((first.slot, second.slot), (0, 0));
/// assert_ne!(first.epoch, second.epoch); // the same slot, another life
/// ```
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    bytemuck::Pod,
    bytemuck::Zeroable,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::KnownLayout,
    zerocopy::Immutable,
)]
#[repr(C)]
pub struct Handle {
    /// Index of the slot in the table.
    pub slot: u32,
    /// The slot's epoch when the entry was inserted; odd.
    pub epoch: u32,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.epoch)
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// One slot of a [`Slab`]: make an array or a boxed slice of `Slot::EMPTY` as its storage.
///
/// ```
/// use millpond_core::slab::{Slab, Slot};
/// let slab: Slab<u32, _> = Slab::new([Slot::EMPTY; 4]);
/// assert_eq!(slab.capacity(), 4);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slot<T> {
    epoch: u32,
    next_free: u32,
    value: Option<T>,
}

impl<T> Slot<T> {
    /// A slot that was never used.
    pub const EMPTY: Self = Self { epoch: 0, next_free: NONE, value: None };
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::EMPTY
    }
}

const NONE: u32 = u32::MAX;

/// A fixed-size table of `T` over storage `S` (`[Slot<T>; N]`, `&mut [Slot<T>]`, `Box<[Slot<T>]>`, …). Every operation is O(1)
/// except [`Slab::iter`].
///
/// ```
/// use millpond_core::slab::{Slab, Slot};
/// let mut slab = Slab::new([Slot::EMPTY; 2]);
/// let a = slab.insert('a').unwrap();
/// assert_eq!(slab.get(a), Some(&'a'));
/// assert_eq!(slab.remove(a), Some('a'));
/// assert_eq!(slab.get(a), None); // stale: refused, never guessed
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slab<T, S> {
    slots: S,
    free_head: u32,
    used_count: u32,
    len: u32,
    _values: PhantomData<T>,
}

/// The slab is full; the value comes back to the caller.
///
/// ```
/// use millpond_core::slab::{Full, Slab, Slot};
/// let mut slab = Slab::new([Slot::EMPTY]);
/// slab.insert("first").unwrap();
/// assert_eq!(slab.insert("second"), Err(Full("second")));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

impl<T> fmt::Display for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the table is full; remove an entry or give it more slots")
    }
}

impl<T: fmt::Debug> core::error::Error for Full<T> {}

impl<T, S: AsRef<[Slot<T>]> + AsMut<[Slot<T>]>> Slab<T, S> {
    /// A slab over `slots`. Entries already in the storage are dropped; epochs in it are kept, so handles of an earlier
    /// slab over the same storage stay stale. At most `u32::MAX - 1` slots are used.
    pub fn new(mut slots: S) -> Self {
        for slot in slots.as_mut() {
            if slot.value.take().is_some() {
                slot.epoch = slot.epoch.saturating_add(1);
            }
            slot.next_free = NONE;
        }
        Self { slots, free_head: NONE, used_count: 0, len: 0, _values: PhantomData }
    }

    /// Puts `value` in a free slot. `Err` gives it back: the slab is full.
    pub fn insert(&mut self, value: T) -> Result<Handle, Full<T>> {
        let slots = self.slots.as_mut();
        let index = if self.free_head != NONE {
            let index = self.free_head;
            self.free_head = slots[index as usize].next_free;
            index
        } else {
            // Slots never used come after those that were; a retired one (epoch at its end) is skipped for good.
            loop {
                let index = self.used_count;
                if index as usize >= slots.len() || index == NONE {
                    return Err(Full(value));
                }
                self.used_count += 1;
                if slots[index as usize].epoch < u32::MAX - 1 {
                    break index;
                }
            }
        };
        let slot = &mut slots[index as usize];
        slot.epoch += 1;
        slot.value = Some(value);
        self.len += 1;
        Ok(Handle { slot: index, epoch: slot.epoch })
    }

    /// Takes the entry out; `None` if the handle is stale.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        let slot = self.slots.as_mut().get_mut(handle.slot as usize).filter(|slot| slot.epoch == handle.epoch)?;
        let value = slot.value.take()?;
        slot.epoch += 1;
        self.len -= 1;
        if slot.epoch < u32::MAX - 1 {
            slot.next_free = self.free_head;
            self.free_head = handle.slot;
        }
        Some(value)
    }

    /// The entry, or `None` if the handle is stale.
    pub fn get(&self, handle: Handle) -> Option<&T> {
        self.slots.as_ref().get(handle.slot as usize).filter(|slot| slot.epoch == handle.epoch)?.value.as_ref()
    }

    /// The entry to change, or `None` if the handle is stale.
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.slots.as_mut().get_mut(handle.slot as usize).filter(|slot| slot.epoch == handle.epoch)?.value.as_mut()
    }

    /// Entries now in the slab.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether nothing is in the slab.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Slots in all.
    pub fn capacity(&self) -> usize {
        self.slots.as_ref().len()
    }

    /// The entry that is in `slot` now; for walks that change the table while they go. Slots from [`Slab::slots_used`] on
    /// are empty.
    pub fn handle_at(&self, slot: u32) -> Option<Handle> {
        let entry = self.slots.as_ref().get(slot as usize)?;
        entry.value.as_ref().map(|_| Handle { slot, epoch: entry.epoch })
    }

    /// Slots that were ever in use: those before it.
    #[must_use]
    pub const fn slots_used(&self) -> u32 {
        self.used_count
    }

    /// All entries in slot order. O(capacity).
    pub fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        let used = self.used_count as usize;
        (0u32..).zip(self.slots.as_ref()[..used].iter()).filter_map(|(index, slot)| {
            slot.value.as_ref().map(|value| (Handle { slot: index, epoch: slot.epoch }, value))
        })
    }
}

impl<T, S: AsRef<[Slot<T>]> + AsMut<[Slot<T>]>> Slab<T, S> {
    /// All entries in slot order, to change. O(capacity).
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut T)> {
        let used = self.used_count as usize;
        (0u32..).zip(self.slots.as_mut()[..used].iter_mut()).filter_map(|(index, slot)| {
            let epoch = slot.epoch;
            slot.value.as_mut().map(|value| (Handle { slot: index, epoch }, value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_is_refused_after_its_slot_was_reused() {
        let mut slab = Slab::new([const { Slot::EMPTY }; 1]);
        let first = slab.insert(1).unwrap();
        assert_eq!(slab.insert(2), Err(Full(2)));
        slab.remove(first).unwrap();
        let second = slab.insert(3).unwrap();
        assert_eq!((first.slot, slab.get(first), slab.get(second)), (second.slot, None, Some(&3)));
    }

    #[test]
    fn a_slot_whose_epoch_ran_out_is_retired() {
        let mut slab = Slab::new([Slot { epoch: u32::MAX - 3, next_free: NONE, value: None }]);
        let last = slab.insert(1).unwrap();
        slab.remove(last).unwrap();
        assert_eq!(slab.insert(2), Err(Full(2)));
    }

    #[test]
    fn handles_of_an_earlier_slab_over_the_same_storage_are_stale() {
        let mut storage = [const { Slot::EMPTY }; 1];
        let old = Slab::new(&mut storage[..]).insert(1).unwrap();
        let mut slab = Slab::new(&mut storage[..]);
        slab.insert(2).unwrap();
        assert_eq!(slab.get(old), None);
    }
}
