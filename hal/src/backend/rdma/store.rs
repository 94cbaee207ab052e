//! Which link makes room when a NIC has all its links open: the one that SIEVE finds unused, among those that are idle.

use std::collections::HashMap;

use millpond_core::evict::{Entry, Object, Policy, Residents, Sieve};
use millpond_core::time::Instant;

use crate::contract::LinkId;

/// The open links of a device, by use.
#[derive(Debug)]
pub(super) struct Store {
    policy: Sieve<Box<[Entry]>>,
    slots: HashMap<LinkId, u32>,
    links: Vec<Option<LinkId>>,
    free: Vec<u32>,
}

struct Idle<'a> {
    links: &'a [Option<LinkId>],
    is_idle: &'a dyn Fn(LinkId) -> bool,
}

impl Residents for Idle<'_> {
    fn may_go(&self, slot: u32) -> bool {
        self.links.get(slot as usize).copied().flatten().is_some_and(self.is_idle)
    }
}

impl Store {
    /// A store of at most that many links.
    pub(super) fn new(links_max: u32) -> Self {
        Self {
            policy: Sieve::new(vec![Entry::EMPTY; links_max as usize].into()),
            slots: HashMap::new(),
            links: vec![None; links_max as usize],
            free: (0..links_max).rev().collect(),
        }
    }

    /// Puts a link in. `false` if there is no room.
    pub(super) fn insert(&mut self, now: Instant, link: LinkId) -> bool {
        let Some(slot) = self.free.pop() else { return false };
        self.policy.on_stored(now, slot, Object { fingerprint: 0, len: 1 });
        self.slots.insert(link, slot);
        self.links[slot as usize] = Some(link);
        true
    }

    /// A link was used.
    pub(super) fn on_used(&mut self, now: Instant, link: LinkId) {
        if let Some(slot) = self.slots.get(&link) {
            self.policy.on_used(now, *slot);
        }
    }

    /// A link is gone.
    pub(super) fn remove(&mut self, now: Instant, link: LinkId) {
        if let Some(slot) = self.slots.remove(&link) {
            self.policy.on_removed(now, slot);
            self.links[slot as usize] = None;
            self.free.push(slot);
        }
    }

    /// The idle link that should make room, which is out of the store then; `None` while room is left, or nobody is idle.
    pub(super) fn evict(&mut self, now: Instant, is_idle: &dyn Fn(LinkId) -> bool) -> Option<LinkId> {
        if !self.free.is_empty() {
            return None;
        }
        let slot = self.policy.poll_victim(now, &Idle { links: &self.links, is_idle })?;
        let link = self.links.get(slot as usize).copied().flatten()?;
        self.remove(now, link);
        Some(link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_core::slab::Handle;

    fn link(slot: u32) -> LinkId {
        LinkId::new(Handle { slot, epoch: 1 })
    }

    #[test]
    fn the_idle_link_that_was_not_used_makes_room() {
        let (now, mut store) = (Instant::ZERO, Store::new(3));
        assert!((0..3).all(|slot| store.insert(now, link(slot))) && !store.insert(now, link(3)));
        store.on_used(now, link(0));
        assert_eq!(store.evict(now, &|of| of != link(1)), Some(link(2)));
        assert_eq!(store.evict(now, &|_| true), None, "there is room");
        assert!(store.insert(now, link(3)));
        assert_eq!(store.evict(now, &|_| false), None, "a link in use is never evicted");
    }
}
