//! A bounded hash table whose entries keep their place: found by hash, swept by number, in the same order on every machine.

use alloc::boxed::Box;
use alloc::vec;

use crate::prefix::arena::bucket;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// Up to so many `T`, chained by bucket. Nothing allocates after `new`.
#[derive(Clone, Debug)]
pub(super) struct Table<T> {
    values: Box<[Option<T>]>,
    /// The next entry of the same bucket; of an unused entry the next unused one.
    chains: Box<[u32]>,
    heads: Box<[u32]>,
    unused: u32,
    /// Entries from here on were never used.
    used_end: u32,
    len: u32,
    seed: u64,
}

impl<T> Table<T> {
    pub(super) fn new(capacity: u32, seed: u64) -> Self {
        let capacity = capacity.clamp(1, NONE - 1);
        let len = capacity as usize;
        let mut values = vec![];
        values.resize_with(len, || None);
        let [chains, heads] = [(); 2].map(|()| vec![NONE; len].into_boxed_slice());
        Self { values: values.into(), chains, heads, unused: NONE, used_end: 0, len: 0, seed }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Entries with a number below this were used at some time.
    pub(super) fn used_end(&self) -> u32 {
        self.used_end
    }

    pub(super) fn get(&self, index: u32) -> Option<&T> {
        self.values.get(index as usize).and_then(Option::as_ref)
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.values.get_mut(index as usize).and_then(Option::as_mut)
    }

    fn bucket(&self, hash: u64) -> usize {
        bucket(hash, self.seed, self.used_buckets()) as usize
    }

    fn used_buckets(&self) -> u32 {
        u32::try_from(self.heads.len()).unwrap_or(NONE)
    }

    /// The entry of that hash which `is` the one. Bounded by the entries of one bucket, about one.
    pub(super) fn find(&self, hash: u64, is: impl Fn(&T) -> bool) -> Option<(u32, &T)> {
        let mut at = self.heads[self.bucket(hash)];
        while at != NONE {
            match &self.values[at as usize] {
                Some(value) if is(value) => return Some((at, value)),
                _ => at = self.chains[at as usize],
            }
        }
        None
    }

    /// Adds an entry; `None` if all are in use.
    pub(super) fn insert(&mut self, hash: u64, value: T) -> Option<u32> {
        let index = match self.unused {
            NONE if self.used_end < self.used_buckets() => {
                self.used_end += 1;
                self.used_end - 1
            }
            NONE => return None,
            index => {
                self.unused = self.chains[index as usize];
                index
            }
        };
        let bucket = self.bucket(hash);
        self.chains[index as usize] = core::mem::replace(&mut self.heads[bucket], index);
        self.values[index as usize] = Some(value);
        self.len += 1;
        Some(index)
    }

    /// Takes the entry out; its hash is that of its insertion.
    pub(super) fn remove(&mut self, hash: u64, index: u32) {
        let (bucket, next) = (self.bucket(hash), self.chains[index as usize]);
        let mut at = self.heads[bucket];
        if at == index {
            self.heads[bucket] = next;
        } else {
            // Bounded by the entries of one bucket.
            while self.chains[at as usize] != index {
                at = self.chains[at as usize];
            }
            self.chains[at as usize] = next;
        }
        self.values[index as usize] = None;
        self.chains[index as usize] = core::mem::replace(&mut self.unused, index);
        self.len -= 1;
    }
}
