//! How full a segment can be when objects come and go at random.

use millpond_core::extent::{AllocateError, Extents, Geometry, Node};

const LEN: u64 = 16 << 30;

/// A small generator with a fixed seed: every run does the same.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit).unwrap()).unwrap()
    }
}

/// Frees random objects, a few or many at once, and fills the segment again, over and over. The lowest share of its bytes
/// that were asked for whenever it said it was full.
fn lowest_share(object_len: impl Fn(&mut Random) -> u64) -> f64 {
    let nodes = vec![Node::EMPTY; 1 << 15].into_boxed_slice();
    let mut extents = Extents::new(nodes, Geometry { len: LEN, unit: 4096 }).unwrap();
    let (mut live, mut random, mut lowest) = (Vec::new(), Random(0x5eed), 1.0f64);
    for round in 0..2_000 {
        loop {
            match extents.allocate(object_len(&mut random)) {
                Ok(range) => live.push(range.handle),
                Err(AllocateError::NoSpace) => break,
                Err(other) => panic!("round {round}: {other}"),
            }
        }
        lowest = lowest.min(extents.statistics().asked_len as f64 / LEN as f64);
        for _ in 0..=random.below(if round % 50 == 0 { live.len() } else { 40 }) {
            let index = random.below(live.len());
            extents.free(live.swap_remove(index)).unwrap();
        }
    }
    lowest
}

#[test]
fn objects_of_3274752_bytes_use_96_percent_of_a_segment_under_churn() {
    let share = lowest_share(|_| 3_274_752);
    println!("lowest share of 16 GiB in use when full: {share:.4}");
    assert!(share >= 0.96, "{share}");
}

#[test]
fn objects_of_many_lengths_use_90_percent_of_a_segment_under_churn() {
    let share = lowest_share(|random| 4096 * u64::try_from(1 + random.below(800)).unwrap());
    println!("lowest share of 16 GiB in use when full: {share:.4}");
    assert!(share >= 0.90, "{share}");
}
