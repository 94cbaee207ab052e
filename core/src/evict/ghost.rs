//! Objects that were evicted not long ago, by fingerprint: how a policy learns that it was wrong.
//!
//! Fixed storage, found by hash, oldest forgotten first. Knows no bytes of objects, only how many they had.

use super::Object;

const NONE: u32 = u32::MAX;

/// A remembered eviction: make an array or boxed slice of `Ghost::EMPTY`; as many as there are slots is a good number.
///
/// ```
/// use millpond_core::evict::{Arc, Entry, Ghost};
/// let policy = Arc::new([Entry::EMPTY; 16], [Ghost::EMPTY; 16]);
/// ```
#[derive(Clone, Debug)]
pub struct Ghost {
    object: Object,
    /// Towards the younger.
    prev: u32,
    /// Towards the older; for an unused ghost the next unused one.
    next: u32,
    /// The next ghost in the same bucket.
    chain: u32,
    /// The first ghost of the bucket with this ghost's index.
    bucket: u32,
    list: u8,
}

impl Ghost {
    /// A ghost that was never used.
    pub const EMPTY: Self =
        Self { object: Object { fingerprint: 0, len: 0 }, prev: NONE, next: NONE, chain: NONE, bucket: NONE, list: 0 };
}

impl Default for Ghost {
    fn default() -> Self {
        Self::EMPTY
    }
}

#[derive(Clone, Copy, Debug)]
struct List {
    front: u32,
    back: u32,
    len: u64,
}

/// `N` lists of ghosts over the storage `G`.
#[derive(Clone, Debug)]
pub(super) struct Ghosts<G, const N: usize> {
    ghosts: G,
    lists: [List; N],
    unused: u32,
}

impl<G: AsRef<[Ghost]> + AsMut<[Ghost]>, const N: usize> Ghosts<G, N> {
    pub(super) fn new(mut ghosts: G) -> Self {
        let mut unused = NONE;
        for (index, ghost) in (0..NONE).zip(ghosts.as_mut()).rev() {
            *ghost = Ghost { next: unused, ..Ghost::EMPTY };
            unused = index;
        }
        Self { ghosts, lists: [List { front: NONE, back: NONE, len: 0 }; N], unused }
    }

    /// Bytes that the objects of a list had.
    pub(super) fn len(&self, list: u8) -> u64 {
        self.lists[usize::from(list)].len
    }

    /// Remembers an eviction. With no ghost unused, the oldest of `forget` is forgotten, else the oldest of any list.
    pub(super) fn insert(&mut self, list: u8, object: Object, forget: u8) {
        if self.ghosts.as_ref().is_empty() {
            return;
        }
        self.take(object.fingerprint);
        if self.unused == NONE && !self.forget_oldest(forget) {
            let _ = (0..N).find(|&other| u8::try_from(other).is_ok_and(|other| self.forget_oldest(other)));
        }
        let index = self.unused;
        let bucket = self.bucket_of(object.fingerprint);
        let chain = core::mem::replace(&mut self.ghost_mut(bucket).bucket, index);
        let front = core::mem::replace(&mut self.lists[usize::from(list)].front, index);
        let ghost = self.ghost_mut(index);
        let unused = ghost.next;
        (ghost.object, ghost.prev, ghost.next, ghost.chain, ghost.list) = (object, NONE, front, chain, list);
        self.unused = unused;
        match front {
            NONE => self.lists[usize::from(list)].back = index,
            _ => self.ghost_mut(front).prev = index,
        }
        self.lists[usize::from(list)].len += object.len;
    }

    /// Forgets an object that came back; tells which list remembered it.
    pub(super) fn take(&mut self, fingerprint: u64) -> Option<u8> {
        if self.ghosts.as_ref().is_empty() {
            return None;
        }
        let mut at = self.ghost(self.bucket_of(fingerprint)).bucket;
        // Bounded by the ghosts of one bucket, about one.
        while at != NONE && self.ghost(at).object.fingerprint != fingerprint {
            at = self.ghost(at).chain;
        }
        let list = (at != NONE).then(|| self.ghost(at).list)?;
        self.remove(at);
        Some(list)
    }

    /// Forgets the oldest of a list; `false` if there is none.
    pub(super) fn forget_oldest(&mut self, list: u8) -> bool {
        let back = self.lists[usize::from(list)].back;
        if back != NONE {
            self.remove(back);
        }
        back != NONE
    }

    fn ghost(&self, index: u32) -> &Ghost {
        &self.ghosts.as_ref()[index as usize]
    }

    fn ghost_mut(&mut self, index: u32) -> &mut Ghost {
        &mut self.ghosts.as_mut()[index as usize]
    }

    fn bucket_of(&self, fingerprint: u64) -> u32 {
        // Spreads by the golden ratio, then scales the high half to the table: no division.
        let high = fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let count = u64::try_from(self.ghosts.as_ref().len()).unwrap_or(u64::MAX).min(u64::from(NONE));
        u32::try_from((high * count) >> 32).unwrap_or(0)
    }

    fn remove(&mut self, index: u32) {
        let Ghost { object, prev, next, chain, list, .. } = *self.ghost(index);
        let bucket = self.bucket_of(object.fingerprint);
        if self.ghost(bucket).bucket == index {
            self.ghost_mut(bucket).bucket = chain;
        } else {
            let mut at = self.ghost(bucket).bucket;
            while self.ghost(at).chain != index {
                at = self.ghost(at).chain;
            }
            self.ghost_mut(at).chain = chain;
        }
        match prev {
            NONE => self.lists[usize::from(list)].front = next,
            _ => self.ghost_mut(prev).next = next,
        }
        match next {
            NONE => self.lists[usize::from(list)].back = prev,
            _ => self.ghost_mut(next).prev = prev,
        }
        self.lists[usize::from(list)].len -= object.len;
        let unused = core::mem::replace(&mut self.unused, index);
        self.ghost_mut(index).next = unused;
    }
}
