//! Policies on the heap, chosen by name.

use alloc::boxed::Box;
use alloc::vec;

use super::{Arc, Entry, Fifo, Ghost, Kind, Lfu, Lru, Policy, S3Fifo, Sieve};

impl Kind {
    /// A policy of this kind for `slots` slots, with as many ghosts where it has any.
    ///
    /// ```
    /// use millpond_core::evict::Kind;
    /// assert_eq!(Kind::Arc.boxed(100).name(), "arc");
    /// ```
    #[must_use]
    pub fn boxed(self, slots: usize) -> Box<dyn Policy + Send> {
        let entries = vec![Entry::EMPTY; slots].into_boxed_slice();
        let ghosts = || vec![Ghost::EMPTY; slots].into_boxed_slice();
        match self {
            Self::Lru => Box::new(Lru::new(entries)),
            Self::Fifo => Box::new(Fifo::new(entries)),
            Self::Lfu => Box::new(Lfu::new(entries)),
            Self::Sieve => Box::new(Sieve::new(entries)),
            Self::S3Fifo => Box::new(S3Fifo::new(entries, ghosts())),
            Self::Arc => Box::new(Arc::new(entries, ghosts())),
        }
    }
}
