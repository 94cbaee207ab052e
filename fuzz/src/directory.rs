//! Operation lists for the directory: eight bytes are one operation, any eight bytes are a valid one.
//!
//! A [`World`] turns operations into concrete calls on a [`Subject`]. The product is one subject; the oracle is another.
//! Few nodes, few slots and few keys, so that short lists meet the interesting collisions.

use millpond_core::directory::{
    Answer, Committed, Config, Directory, Join, Leases, Limits, Location, Mode, NodeId, Owner, Part, Pin, Place,
    SeededBug, SegmentFacts, SegmentLoad, Stamp, Start, Tier, Urgency,
};
use millpond_core::time::{Duration, Instant};
use millpond_oracle::directory::{Call, Oracle, Outcome, OwnedEntry, Subject};

use crate::Op;

/// Runs `ops` on the product and on the oracle. The first difference, in words.
///
/// # Errors
/// The number of the operation, the call, and both answers.
pub fn compare(first: u8, ops: &[Op], seeded_bug: Option<SeededBug>) -> Result<(), String> {
    let mut world = World::default();
    let mut product = Directory::new(Instant::ZERO, config(first, seeded_bug));
    let mut oracle = Oracle::new(config(first, None));
    for (number, op) in ops.iter().enumerate() {
        let (now, call) = world.call(*op);
        let (got, expected) = (product.apply(now, &call), oracle.apply(now, &call));
        if got != expected {
            return Err(format!("operation {number}, {call:?}\nproduct: {got:?}\noracle:  {expected:?}"));
        }
        if let Some(broken) = product.broken_invariant() {
            return Err(format!("operation {number}, {call:?}: {broken}"));
        }
        world.observe(&got);
    }
    Ok(())
}

/// Runs the list in `data`: its first byte chooses the configuration, the rest are operations.
///
/// # Errors
/// The first difference between product and oracle.
///
/// ```
/// millpond_fuzz::directory::run(&[0; 17]).unwrap();
/// ```
pub fn run(data: &[u8]) -> Result<(), String> {
    data.split_first().map_or(Ok(()), |(&first, rest)| compare(first, &crate::ops(rest), None))
}

/// The configuration that operation lists run under: small limits, so that lists reach them. The first byte of a list
/// chooses between a fresh shard and one that recovers.
#[must_use]
pub fn config(first: u8, seeded_bug: Option<SeededBug>) -> Config {
    let limits = Limits {
        objects_max: 4,
        owners_max: 3,
        segments_max: 2,
        replicas_max: 2,
        value_len_max: 1 << 10,
        page_max: 3,
        events_max: 8,
        history_max: 4,
        lease_max: Duration::from_secs(4),
        suspect_after: Duration::from_secs(3),
        gone_after: Duration::from_secs(9),
    };
    let start = match first % 4 {
        0 => Start::Recovering { expected: vec![], window: Duration::from_secs(5) },
        1 => Start::Recovering { expected: vec![node(0), node(1)], window: Duration::from_secs(5) },
        _ => Start::Fresh,
    };
    Config { shard: 3, cleared: Stamp { term: 1, n: 2 }, start, limits, seeded_bug, ..Config::fresh(2) }
}

fn node(index: u8) -> NodeId {
    NodeId([index + 1; 16])
}

/// Turns operations into calls: it remembers what a cluster would (time, incarnations, versions it was told), and
/// nothing of the directory's own state.
#[derive(Clone, Debug)]
pub struct World {
    now: Instant,
    incarnations: [u64; 4],
    versions: Vec<Stamp>,
    /// What a commit asked for last, and what was stored so far: key, length, version.
    asked: (Vec<u8>, u64),
    copies: Vec<(Vec<u8>, u64, Stamp)>,
    places: Vec<(Vec<u8>, Location)>,
}

impl Default for World {
    fn default() -> Self {
        Self {
            now: Instant::from_nanos(1),
            incarnations: [1; 4],
            versions: vec![Stamp::ZERO],
            asked: (Vec::new(), 0),
            copies: Vec::new(),
            places: Vec::new(),
        }
    }
}

impl World {
    /// The call that `op` stands for, and when it is made. Time moves by 0, 1 or 2 seconds, seldom by more.
    pub fn call(&mut self, op: Op) -> (Instant, Call) {
        let [kind, who, what, slot, a, b, c, step] = op;
        let seconds = [0, 0, 0, 0, 1, 1, 2, 6][usize::from(step % 8)];
        self.now = self.now + Duration::from_secs(seconds);
        let owner = self.owner(who);
        let bytes = vec![b'a' + what % 4; 1 + usize::from(what / 4 % 3)];
        let location = self.location(owner, slot, a);
        let after = (b % 3 == 0).then(|| vec![b'a' + c % 4]);
        let leases = if c % 2 == 0 { Leases::Respect } else { Leases::Override };
        let call = match kind % 32 {
            0 | 1 => self.join(who, a, b),
            2 => Call::Heartbeat(owner, vec![SegmentLoad { index: u32::from(a % 3), free: u64::from(b) * 8 }]),
            3 | 4 => self.inventory(owner, bytes, location, b, c),
            5 => Call::LinkLost(owner),
            6 => Call::Death(owner),
            7 => Call::Tick,
            8..=14 => {
                let len = if c == 255 { 5_000 } else { u64::from(c % 5) };
                let (key, len, mode) = match b % 8 {
                    0..=3 => (bytes, len, Mode::IfAbsent),
                    4 | 5 => (bytes, len, Mode::Upsert),
                    _ => self.copy(c, bytes, len),
                };
                self.places.push((key.clone(), location));
                self.asked = (key.clone(), len);
                Call::Commit { owner, key, len, location, mode, pin: pin(c) }
            }
            15..=17 => Call::Locate(bytes, Duration::from_secs(u64::from(a % 6))),
            18 if a % 2 == 0 => Call::Exists(bytes),
            18 => {
                Call::Holdings { node: owner.node, prefix: prefix(what), after: place(b, c), max: usize::from(c % 5) }
            }
            19 => Call::Stat(bytes),
            20 => Call::List { prefix: prefix(what), after, max: usize::from(a % 5) },
            21 => Call::Remove(bytes, leases),
            22 => Call::RemovePrefix { prefix: prefix(what), after, leases },
            23 if a % 4 == 0 => Call::Clear,
            23..=25 => {
                let urgency = if a % 2 == 0 { Urgency::Normal } else { Urgency::Pressing };
                Call::Evict { owner, victims: self.victims(b, c), urgency }
            }
            26 => Call::Dropped { owner, victims: self.victims(b, c) },
            27 => Call::Retired(owner),
            28 => Call::Freed(owner, self.victims(b, c).into_iter().map(|(_, location)| location).collect()),
            29 => Call::Events(Stamp { term: 1 + u64::from(a % 4), n: u64::from(b % 32) }, usize::from(c % 5)),
            30 => Call::Explain(bytes),
            _ => Call::View,
        };
        (self.now, call)
    }

    /// Remembers what an outcome told: versions, for later calls that name one.
    pub fn observe(&mut self, outcome: &Outcome) {
        if let Outcome::Committed(Answer { value: Ok(Committed::Stored { version, .. }), .. }) = outcome {
            self.versions.push(*version);
            self.copies.push((self.asked.0.clone(), self.asked.1, *version));
        }
    }

    fn owner(&self, who: u8) -> Owner {
        let index = who % 4;
        let current = self.incarnations[usize::from(index)];
        // One in sixteen speaks with another incarnation than its last.
        let incarnation = match who / 4 % 32 {
            0 => current.saturating_sub(1),
            1 => current + 1,
            _ => current,
        };
        Owner { node: node(index), incarnation }
    }

    fn location(&self, owner: Owner, slot: u8, a: u8) -> Location {
        let epoch = if slot >= 250 { owner.incarnation + 1 } else { owner.incarnation };
        Location {
            node: if slot >= 245 { node(0) } else { owner.node },
            segment: u32::from(slot / 4 % 2),
            epoch,
            slot: u32::from(slot % 4),
            generation: u32::from(a % 3) + 1,
        }
    }

    fn join(&mut self, who: u8, a: u8, b: u8) -> Call {
        let index = usize::from(who % 4);
        if a.is_multiple_of(4) {
            self.incarnations[index] += 1;
        }
        let owner = self.owner(who);
        let tiers = [Tier::Dram, Tier::Ssd, Tier::Dram];
        let count = if b == 255 { 3 } else { 1 + b % 2 };
        let segments = (0..u32::from(count)).zip(tiers).map(|(index, tier)| SegmentFacts {
            index: index + u32::from(b % 16 == 9),
            epoch: owner.incarnation,
            tier,
            capacity: 1_000,
        });
        Call::Join(Join { owner, address: format!("host:{a}").into(), segments: segments.collect() })
    }

    fn inventory(&mut self, owner: Owner, key: Vec<u8>, location: Location, b: u8, c: u8) -> Call {
        let entry = OwnedEntry {
            key: key.clone(),
            slot: location.slot,
            generation: location.generation,
            len: u64::from(c % 5),
            version: if b.is_multiple_of(4) { self.version(c) } else { Stamp { term: 1, n: u64::from(b % 8) } },
            pin: pin(c),
            mutable: b.is_multiple_of(3),
        };
        self.places.push((key, location));
        let twin = OwnedEntry { slot: (entry.slot + 1) % 4, key: vec![b'd'], ..entry.clone() };
        let part = if c.is_multiple_of(2) { Part::Last } else { Part::More };
        let entries = match b % 5 {
            0 => vec![],
            1 => vec![entry, twin],
            _ => vec![entry],
        };
        Call::Inventory { owner, segment: location.segment, epoch: location.epoch, entries, part }
    }

    fn version(&self, index: u8) -> Stamp {
        self.versions[self.versions.len() - 1 - usize::from(index) % self.versions.len().min(4)]
    }

    /// A copy of one of the last objects stored, seldom of something that never was.
    fn copy(&self, c: u8, key: Vec<u8>, len: u64) -> (Vec<u8>, u64, Mode) {
        let recent = self.copies.len().min(3);
        match self.copies.iter().rev().nth(usize::from(c) % recent.max(1)) {
            Some((key, len, version)) if c < 240 => (key.clone(), *len, Mode::Replica { version: *version }),
            _ => (key, len, Mode::Replica { version: self.version(c) }),
        }
    }

    /// Two of the last eight places that were named, newest first.
    fn victims(&self, b: u8, c: u8) -> Vec<(Vec<u8>, Location)> {
        let recent = self.places.len().min(8);
        let pick = |index: u8| self.places.iter().rev().nth(usize::from(index) % recent.max(1)).cloned();
        [pick(b), pick(c)].into_iter().flatten().collect()
    }
}

fn pin(c: u8) -> Pin {
    match c % 7 {
        5 => Pin::Soft { ttl: Duration::from_secs(3) },
        6 => Pin::Hard,
        _ => Pin::Free,
    }
}

fn place(b: u8, c: u8) -> Option<Place> {
    (!b.is_multiple_of(3)).then(|| Place { segment: u32::from(b % 2), slot: u32::from(c % 4) })
}

fn prefix(what: u8) -> Vec<u8> {
    if what.is_multiple_of(3) { vec![] } else { vec![b'a' + what % 4] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_are_a_list() {
        let mut state = 1u64;
        let mut bytes = [0u8; 8 * 400 + 1];
        for round in 0..20u8 {
            for byte in &mut bytes {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = state.to_le_bytes()[7];
            }
            bytes[0] = round;
            run(&bytes).unwrap();
        }
    }
}
