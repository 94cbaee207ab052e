//! Fair sharing: which class is next.
//!
//! Start-time fair queueing over the three classes: each has a clock that advances by what it was given, divided by its
//! weight; the one that is furthest behind goes first. A class that had no work joins where the others are, so that
//! idling saves nothing up. It does not hold the work. Invariant: two classes with work at all times get bytes in
//! proportion to their weights, within one slice each.

use super::{CLASSES, Class};

/// What a slice costs beside its bytes: many small ones are no cheaper than they are.
pub const SLICE_COST: u64 = 16 << 10;

/// A common multiple of the weights.
const SCALE: u64 = 8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shares {
    clocks: [u64; CLASSES],
    /// The clock of whoever was last served, before it was.
    now: u64,
}

impl Shares {
    /// The classes, those first that are due; the more urgent one of equals.
    pub(super) fn order(&self) -> [Class; CLASSES] {
        let mut order = Class::ALL;
        order.sort_unstable_by_key(|class| (self.clocks[class.index()], *class));
        order
    }

    /// A class has work that had none.
    pub(super) fn on_active(&mut self, class: Class) {
        let clock = &mut self.clocks[class.index()];
        *clock = self.now.max(*clock);
    }

    pub(super) fn charge(&mut self, class: Class, bytes: u64) {
        let clock = &mut self.clocks[class.index()];
        self.now = *clock;
        let cost = bytes.saturating_add(SLICE_COST).saturating_mul(SCALE / class.weight());
        *clock = clock.saturating_add(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_with_work_share_by_weight() {
        let (mut shares, mut given) = (Shares::default(), [0u64; CLASSES]);
        for _ in 0..1_100 {
            let class = shares.order()[0];
            given[class.index()] += 1;
            shares.charge(class, 1 << 20);
        }
        assert_eq!(given, [800, 200, 100]);
    }

    #[test]
    fn large_slices_count_for_more() {
        let (mut shares, mut bytes) = (Shares::default(), [0u64; CLASSES]);
        for _ in 0..400_000 {
            let class = shares.order().into_iter().find(|class| *class != Class::Bulk).unwrap();
            let len = if class == Class::Foreground { 64 << 10 } else { 16 << 20 };
            bytes[class.index()] += len + SLICE_COST;
            shares.charge(class, len);
        }
        let ratio = bytes[0] as f64 / bytes[1] as f64;
        assert!((ratio - 4.0).abs() < 0.1, "{ratio}");
    }

    #[test]
    fn a_class_that_idled_saved_nothing_up() {
        let mut shares = Shares::default();
        for _ in 0..1_000 {
            shares.charge(Class::Foreground, 1 << 20);
        }
        shares.on_active(Class::Bulk);
        shares.charge(Class::Bulk, 1 << 20);
        assert_eq!(shares.order()[0], Class::Background, "which has no work, and would join first");
        shares.on_active(Class::Background);
        shares.charge(Class::Background, 1 << 20);
        assert_eq!(shares.order()[0], Class::Foreground, "one slice later it is foreground's turn again");
    }
}
