//! Counts of a shard, and a check of its invariants for tests.

use alloc::format;
use alloc::string::String;

use super::Directory;

/// How much a shard holds.
///
/// ```
/// use millpond_core::directory::{Config, Directory};
/// use millpond_core::time::Instant;
/// assert_eq!(Directory::new(Instant::ZERO, Config::fresh(1)).totals().objects, 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Objects in the index.
    pub objects: u64,
    /// Bytes of their values, each counted once.
    pub bytes: u64,
    /// Replicas of them.
    pub replicas: u64,
    /// Owners in the table.
    pub owners: u64,
    /// Locations that owners were told to free and have not freed yet.
    pub retired: u64,
}

impl Directory {
    /// Counts. O(objects).
    #[must_use]
    pub fn totals(&self) -> Totals {
        let segments = || self.owners.values().flat_map(|row| row.segments.values());
        Totals {
            objects: self.objects.len() as u64,
            bytes: self.bytes,
            replicas: self.objects.values().map(|object| object.replicas.len() as u64).sum(),
            owners: self.owners.len() as u64,
            retired: segments().map(|segment| segment.retired.len() as u64).sum(),
        }
    }

    /// The first broken invariant, in words. O(objects); for tests.
    #[doc(hidden)]
    pub fn broken_invariant(&self) -> Option<String> {
        let mut bytes = 0;
        for (key, object) in &self.objects {
            bytes += object.len;
            if object.replicas.is_empty() {
                return Some(format!("{} has no replica", key.escape_ascii()));
            }
            for at in &object.replicas {
                let segment = self.owners.get(&at.node).and_then(|row| row.segments.get(&at.segment));
                let held = segment.filter(|s| s.facts.epoch == at.epoch).and_then(|s| s.slots.get(&at.slot));
                if !held.is_some_and(|held| held.generation == at.generation && held.key == *key) {
                    return Some(format!("{} lies at {at:?}, which the slot does not know", key.escape_ascii()));
                }
                if object.replicas.iter().filter(|other| other.is_beside(at)).count() > 1 {
                    return Some(format!("{} lies twice in segment {} of {}", key.escape_ascii(), at.segment, at.node));
                }
            }
        }
        let held: u64 = self.owners.values().flat_map(|row| row.segments.values()).map(|s| s.slots.len() as u64).sum();
        if held != self.totals().replicas {
            return Some(format!("{held} slots are held for {} replicas", self.totals().replicas));
        }
        (bytes != self.bytes).then(|| format!("{bytes} bytes are indexed, {} are counted", self.bytes))
    }
}
