//! What goes first when space runs out: one trait, a file per policy.
//!
//! A policy orders the objects of one owner; it neither holds nor frees anything. The owner names objects by the slots of
//! its own table, reports what is stored and used, and asks for victims ahead of demand, in batches. A victim is proposed:
//! it stays the owner's until [`Policy::on_removed`], or goes back by [`Policy::on_spared`] when the directory struck it
//! out. Everything is counted in bytes. A parent never goes before its children: the owner's [`Residents`] turns a
//! candidate into a leaf under it.
//!
//! Invariants: a slot is in at most one queue; what is proposed is in none; the same calls give the same victims. Each
//! call is O(1), [`Policy::poll_victim`] amortised: it passes over an object only to take back a mark that a use or a
//! lease set, and never over more than twice the objects there are.

use core::fmt;

use crate::time::Instant;

mod arc;
mod fifo;
mod ghost;
mod lfu;
mod lru;
mod queue;
mod s3_fifo;
mod sieve;

pub use arc::Arc;
pub use fifo::Fifo;
pub use ghost::Ghost;
pub use lfu::Lfu;
pub use lru::Lru;
pub use queue::Entry;
pub use s3_fifo::S3Fifo;
pub use sieve::Sieve;

#[cfg(feature = "alloc")]
mod boxed;

/// An object that was stored.
///
/// ```
/// use millpond_core::evict::Object;
/// let block = Object { fingerprint: 0x1234, len: 2 << 20 };
/// assert_eq!(block.len, 2_097_152);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// A hash of its name: how a policy recognises an object that comes back. A collision costs a worse guess, no more.
    pub fingerprint: u64,
    /// Bytes it takes.
    pub len: u64,
}

/// What a policy may ask about the owner's objects.
///
/// ```
/// use millpond_core::evict::Residents;
/// struct Pinned(u32);
/// impl Residents for Pinned {
///     fn may_go(&self, slot: u32) -> bool { slot != self.0 }
/// }
/// assert_eq!(Pinned(3).leaf_under(3), 3); // no tree: every object is a leaf
/// ```
pub trait Residents {
    /// Whether the object may be evicted now: not leased, not pinned, not being moved.
    fn may_go(&self, slot: u32) -> bool;

    /// The object that has to go before the one in `slot`: a resident descendant without resident children, or `slot`
    /// itself. Where there is a choice, the one used longest ago.
    fn leaf_under(&self, slot: u32) -> u32 {
        slot
    }
}

/// Every object may go, in any order.
///
/// ```
/// use millpond_core::evict::{Anything, Residents};
/// assert!(Anything.may_go(0));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Anything;

impl Residents for Anything {
    fn may_go(&self, _slot: u32) -> bool {
        true
    }
}

/// An eviction policy over the slots of one owner's table.
///
/// Slots are below the length of the storage the policy was made with; a larger one is the owner's bug and panics.
///
/// ```
/// use millpond_core::evict::{Anything, Entry, Lru, Object, Policy};
/// use millpond_core::time::Instant;
/// let mut policy = Lru::new([Entry::EMPTY; 4]);
/// let now = Instant::ZERO;
/// for slot in 0..3 {
///     policy.on_stored(now, slot, Object { fingerprint: slot.into(), len: 10 });
/// }
/// policy.on_used(now, 0);
/// assert_eq!(policy.poll_victim(now, &Anything), Some(1));
/// policy.on_removed(now, 1);
/// assert_eq!(policy.resident_len(), 20);
/// ```
pub trait Policy {
    /// The name it has in configuration and reports.
    fn name(&self) -> &'static str;

    /// The owner stored an object in `slot`. An object that was there before is gone.
    fn on_stored(&mut self, now: Instant, slot: u32, object: Object);

    /// The object in `slot` was used. Unknown slots are ignored.
    fn on_used(&mut self, now: Instant, slot: u32);

    /// The object in `slot` is gone: evicted if it was proposed, else removed for another reason. Unknown slots are ignored.
    fn on_removed(&mut self, now: Instant, slot: u32);

    /// The proposed object in `slot` stays after all; it counts as just used.
    fn on_spared(&mut self, now: Instant, slot: u32);

    /// Proposes the next object to evict; `None` if nothing may go. Proposed objects are not proposed again.
    fn poll_victim(&mut self, now: Instant, residents: &dyn Residents) -> Option<u32>;

    /// Bytes stored and not proposed.
    fn resident_len(&self) -> u64;
}

/// The policies by name, for configuration.
///
/// ```
/// use millpond_core::evict::Kind;
/// assert_eq!("s3-fifo".parse(), Ok(Kind::S3Fifo));
/// assert_eq!("lruu".parse::<Kind>().unwrap_err().to_string(), "no such policy; one of: lru fifo lfu sieve s3-fifo arc");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Least recently used.
    Lru,
    /// First in, first out.
    Fifo,
    /// Least often used, then least recently.
    Lfu,
    /// SIEVE.
    Sieve,
    /// S3-FIFO.
    S3Fifo,
    /// Adaptive replacement.
    Arc,
}

impl Kind {
    /// Every policy.
    pub const ALL: [Self; 6] = [Self::Lru, Self::Fifo, Self::Lfu, Self::Sieve, Self::S3Fifo, Self::Arc];

    /// The name in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Lfu => "lfu",
            Self::Sieve => "sieve",
            Self::S3Fifo => "s3-fifo",
            Self::Arc => "arc",
        }
    }
}

/// No policy has that name.
///
/// Example: [`Kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such policy; one of:")?;
        Kind::ALL.iter().try_for_each(|kind| write!(f, " {}", kind.name()))
    }
}

impl core::error::Error for UnknownPolicy {}

impl core::str::FromStr for Kind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or(UnknownPolicy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::ZERO;

    /// Each policy over 8 slots and 8 ghosts, by way of `dyn`.
    fn each(check: impl Fn(&mut dyn Policy)) {
        let entries = || [const { Entry::EMPTY }; 8];
        let ghosts = || [const { Ghost::EMPTY }; 8];
        check(&mut Lru::new(entries()));
        check(&mut Fifo::new(entries()));
        check(&mut Lfu::new(entries()));
        check(&mut Sieve::new(entries()));
        check(&mut S3Fifo::new(entries(), ghosts()));
        check(&mut Arc::new(entries(), ghosts()));
    }

    fn store(policy: &mut dyn Policy, slot: u32) {
        policy.on_stored(NOW, slot, Object { fingerprint: u64::from(slot), len: 10 });
    }

    fn evict(policy: &mut dyn Policy) -> Option<u32> {
        let victim = policy.poll_victim(NOW, &Anything)?;
        policy.on_removed(NOW, victim);
        Some(victim)
    }

    #[test]
    fn every_object_goes_exactly_once() {
        each(|policy| {
            (0..8).for_each(|slot| store(policy, slot));
            (0..8).step_by(3).for_each(|slot| policy.on_used(NOW, slot));
            let mut seen = [false; 8];
            while let Some(victim) = evict(policy) {
                assert!(!core::mem::replace(&mut seen[victim as usize], true), "{}", policy.name());
            }
            assert_eq!((seen, policy.resident_len()), ([true; 8], 0), "{}", policy.name());
        });
    }

    #[test]
    fn what_may_not_go_stays_and_does_not_hide_others() {
        struct Only(u32);
        impl Residents for Only {
            fn may_go(&self, slot: u32) -> bool {
                slot == self.0
            }
        }
        each(|policy| {
            (0..8).for_each(|slot| store(policy, slot));
            (0..8).for_each(|slot| (0..4).for_each(|_| policy.on_used(NOW, slot)));
            for slot in [5, 0, 7] {
                assert_eq!(policy.poll_victim(NOW, &Only(slot)), Some(slot), "{}", policy.name());
                assert_eq!(policy.poll_victim(NOW, &Only(slot)), None, "{}", policy.name());
            }
            assert_eq!(policy.resident_len(), 50);
        });
    }

    #[test]
    fn a_leaf_goes_before_its_parent() {
        /// Slot `n` is the parent of `n + 1`, up to 7; those from `0` on are resident.
        struct Chain(core::cell::Cell<u32>);
        impl Residents for Chain {
            fn may_go(&self, slot: u32) -> bool {
                slot + 1 == self.0.get()
            }
            fn leaf_under(&self, _slot: u32) -> u32 {
                self.0.get() - 1
            }
        }
        each(|policy| {
            (0..8).for_each(|slot| store(policy, slot));
            let chain = Chain(core::cell::Cell::new(8));
            for expected in (0..8).rev() {
                assert_eq!(policy.poll_victim(NOW, &chain), Some(expected), "{}", policy.name());
                policy.on_removed(NOW, expected);
                chain.0.set(expected);
            }
        });
    }

    #[test]
    fn a_spared_object_is_resident_again_and_can_be_proposed_later() {
        each(|policy| {
            store(policy, 3);
            assert_eq!(policy.poll_victim(NOW, &Anything), Some(3));
            assert_eq!((policy.poll_victim(NOW, &Anything), policy.resident_len()), (None, 0));
            policy.on_spared(NOW, 3);
            policy.on_spared(NOW, 3);
            assert_eq!(policy.resident_len(), 10);
            assert_eq!(evict(policy), Some(3), "{}", policy.name());
            policy.on_used(NOW, 3);
            policy.on_removed(NOW, 3);
            assert_eq!(evict(policy), None);
        });
    }

    #[test]
    fn lru_keeps_what_was_used_and_fifo_does_not() {
        let (mut lru, mut fifo) = (Lru::new([Entry::EMPTY; 4]), Fifo::new([Entry::EMPTY; 4]));
        for policy in [&mut lru as &mut dyn Policy, &mut fifo] {
            (0..3).for_each(|slot| store(policy, slot));
            policy.on_used(NOW, 0);
        }
        assert_eq!((evict(&mut lru), evict(&mut fifo)), (Some(1), Some(0)));
    }

    #[test]
    fn lfu_evicts_the_least_used_first() {
        let mut lfu = Lfu::new([Entry::EMPTY; 4]);
        (0..3).for_each(|slot| store(&mut lfu, slot));
        for slot in [0, 0, 1, 2, 2, 2] {
            lfu.on_used(NOW, slot);
        }
        assert_eq!([evict(&mut lfu), evict(&mut lfu), evict(&mut lfu)], [Some(1), Some(0), Some(2)]);
    }

    #[test]
    fn sieve_passes_over_what_was_used_once() {
        let mut sieve = Sieve::new([Entry::EMPTY; 4]);
        (0..4).for_each(|slot| store(&mut sieve, slot));
        sieve.on_used(NOW, 0);
        sieve.on_used(NOW, 1);
        // The hand goes on from 2: a new object at the front does not turn it back.
        assert_eq!(evict(&mut sieve), Some(2));
        store(&mut sieve, 2);
        assert_eq!([evict(&mut sieve), evict(&mut sieve), evict(&mut sieve)], [Some(3), Some(2), Some(0)]);
    }

    #[test]
    fn s3_fifo_lets_a_scan_pass_by() {
        let mut policy = S3Fifo::new([Entry::EMPTY; 8], [Ghost::EMPTY; 8]);
        (0..2).for_each(|slot| store(&mut policy, slot));
        (0..2).for_each(|slot| (0..2).for_each(|_| policy.on_used(NOW, slot)));
        for slot in 2..8 {
            store(&mut policy, slot);
        }
        assert_eq!([evict(&mut policy), evict(&mut policy)], [Some(2), Some(3)]);
        // It comes back: its ghost sends it to the main queue, behind which the rest of the scan goes.
        store(&mut policy, 2);
        for expected in 4..8 {
            assert_eq!(evict(&mut policy), Some(expected));
        }
    }

    #[test]
    fn arc_gives_room_to_the_side_that_comes_back() {
        let mut policy = Arc::new([Entry::EMPTY; 8], [Ghost::EMPTY; 8]);
        (0..4).for_each(|slot| store(&mut policy, slot));
        (0..2).for_each(|slot| policy.on_used(NOW, slot));
        assert_eq!(evict(&mut policy), Some(2)); // recent goes first while the target is zero
        store(&mut policy, 2); // a recent ghost came back: recency deserves room
        store(&mut policy, 4);
        policy.on_removed(NOW, 3);
        assert_eq!(evict(&mut policy), Some(0)); // the one recent object fits its target
    }
}
