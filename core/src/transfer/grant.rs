//! The receiver's side of credit: what it grants each of its senders, out of what it takes from all of them together.
//!
//! [`Takings`] divides evenly; a [`Grant`] is the account of one sender over one connection, all of it totals since the
//! connection opened. It moves nothing and sends nothing: the caller tells the sender what [`Grant::poll`] says. Invariants:
//! what a grant tells never shrinks, so that news of it may come late, twice or, as long as later news comes, not at all;
//! a sender of which everything is answered may always send one more, so that none waits for news that nobody owes it;
//! what is granted and not answered is never more than the share, or than what the connection began with.

use super::window::Credit;

/// What one receiver takes from all its senders together, and the least that each may have open.
///
/// ```
/// use millpond_core::transfer::{Credit, Takings};
/// let whole = Credit { bytes: 1 << 30, slices: 64 };
/// let takings = Takings { whole, least: Credit { bytes: 1 << 20, slices: 2 } };
/// assert_eq!(takings.share(1), whole);
/// assert_eq!(takings.share(16), Credit { bytes: 64 << 20, slices: 4 });
/// assert_eq!(takings.share(100), Credit { bytes: (1 << 30) / 100, slices: 2 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Takings {
    /// Not answered yet, of all senders: bytes, and slices.
    pub whole: Credit,
    /// Not answered yet, of one, however many there are. At least two slices, or each would be told of one by one.
    pub least: Credit,
}

impl Takings {
    /// The receiver bounds nobody.
    pub const UNLIMITED: Self = Self { whole: Credit::UNLIMITED, least: Credit::UNLIMITED };

    /// What each of so many senders may have open.
    #[must_use]
    pub fn share(&self, senders: u32) -> Credit {
        let senders = u64::from(senders.max(1));
        Credit {
            bytes: (self.whole.bytes / senders).max(self.least.bytes).max(1),
            slices: (self.whole.slices / senders).max(self.least.slices).max(1),
        }
    }
}

/// A sender sent more than it was granted.
///
/// ```
/// use millpond_core::transfer::{Credit, Grant, Overrun};
/// let mut grant = Grant::new(Credit { bytes: 100, slices: 1 });
/// assert_eq!(grant.on_asked(4096), Ok(())); // the last slice may exceed the bytes
/// assert_eq!(grant.on_asked(1), Err(Overrun));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

/// What one sender was granted over one connection, and what it made of it.
///
/// ```
/// use millpond_core::transfer::{Credit, Grant};
/// let share = Credit { bytes: 1000, slices: 2 };
/// let mut grant = Grant::new(share);
/// grant.on_asked(600).unwrap();
/// assert_eq!(grant.poll(share), None); // nothing is answered yet
/// grant.on_answered(1, 600);
/// assert_eq!(grant.poll(share), Some(Credit { bytes: 1600, slices: 3 }));
/// assert_eq!(grant.open_max(), share);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    asked: Credit,
    answered: Credit,
    granted: Credit,
}

impl Grant {
    /// An account that begins with `initial`, which both ends know.
    #[must_use]
    pub const fn new(initial: Credit) -> Self {
        let none = Credit { bytes: 0, slices: 0 };
        Self { asked: none, answered: none, granted: initial }
    }

    /// The sender asks for a slice of `bytes`.
    ///
    /// # Errors
    /// It had no credit for it, and knew that.
    pub const fn on_asked(&mut self, bytes: u64) -> Result<(), Overrun> {
        if !self.granted.admits(self.asked) {
            return Err(Overrun);
        }
        self.asked.bytes = self.asked.bytes.saturating_add(bytes);
        self.asked.slices += 1;
        Ok(())
    }

    /// So many slices of so many bytes in all, which it asked for, were answered.
    pub const fn on_answered(&mut self, slices: u64, bytes: u64) {
        self.answered.bytes = self.answered.bytes.saturating_add(bytes);
        self.answered.slices = self.answered.slices.saturating_add(slices);
    }

    /// What it is to be told now: new totals, once half of its `share` could be granted anew.
    pub fn poll(&mut self, share: Credit) -> Option<Credit> {
        let open = Credit {
            bytes: self.answered.bytes.saturating_add(share.bytes),
            slices: self.answered.slices.saturating_add(share.slices),
        };
        let is_due = |open: u64, granted: u64, share: u64| open.saturating_sub(granted) >= (share / 2).max(1);
        if !is_due(open.bytes, self.granted.bytes, share.bytes)
            && !is_due(open.slices, self.granted.slices, share.slices)
        {
            return None;
        }
        self.granted.raise_to(open);
        Some(self.granted)
    }

    /// The totals that it was told last, or began with.
    #[must_use]
    pub const fn granted(&self) -> Credit {
        self.granted
    }

    /// Slices that it asked for so far.
    #[must_use]
    pub const fn asked(&self) -> u64 {
        self.asked.slices
    }

    /// Slices that were answered so far.
    #[must_use]
    pub const fn answered(&self) -> u64 {
        self.answered.slices
    }

    /// What it may have unanswered at most if it uses all that it was granted, but for the bytes of its last slice.
    #[must_use]
    pub const fn open_max(&self) -> Credit {
        Credit {
            bytes: self.granted.bytes.saturating_sub(self.answered.bytes),
            slices: self.granted.slices.saturating_sub(self.answered.slices),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAKINGS: Takings =
        Takings { whole: Credit { bytes: 64_000, slices: 64 }, least: Credit { bytes: 1000, slices: 2 } };

    /// SplitMix64.
    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = *state;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }

    /// A sender that believes what it was told, while news is lost, doubled and late.
    #[test]
    fn news_of_credit_may_be_late_doubled_or_overtaken_and_nobody_overruns_or_waits_for_good() {
        let len_of = |number: u64| 1 + number * 37 % 300;
        let lens_of = |count: u64| (0..count).map(len_of).sum();
        for seed in 0..200 {
            let mut state = seed;
            // Its account, what it believes, and how many slices were sent and answered.
            let mut senders = [(Grant::new(TAKINGS.least), TAKINGS.least, 0, 0); 16];
            let mut news = [(0, TAKINGS.least); 64];
            for round in 0..4000 {
                let at = usize::try_from(random(&mut state) % 16).unwrap();
                let (grant, known, sent, answered) = &mut senders[at];
                match random(&mut state) % 4 {
                    0 if known.admits(Credit { bytes: lens_of(*sent), slices: *sent }) => {
                        assert_eq!(grant.on_asked(len_of(*sent)), Ok(()), "seed {seed}, round {round}");
                        *sent += 1;
                    }
                    0 => assert!(sent > answered, "seed {seed}, round {round}: nobody owes it any news"),
                    1 if sent > answered => {
                        grant.on_answered(1, len_of(*answered));
                        *answered += 1;
                        // The answer carries the totals, as every later one does.
                        let told = grant.poll(TAKINGS.share(16)).unwrap_or(grant.granted());
                        known.raise_to(told);
                        news[round % 64] = (at, told);
                    }
                    _ => {
                        let (to, old) = news[usize::try_from(random(&mut state) % 64).unwrap()];
                        senders[to].1.raise_to(old);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_open_keeps_to_the_share_however_many_come_and_go() {
        let (mut state, mut grant, mut open) = (7, Grant::new(TAKINGS.least), 0);
        let mut largest_share = TAKINGS.least.slices;
        for _ in 0..50_000 {
            let share = TAKINGS.share(u32::try_from(1 + random(&mut state) % 40).unwrap());
            if random(&mut state).is_multiple_of(2) && grant.on_asked(10).is_ok() {
                open += 1;
            } else if open > 0 {
                grant.on_answered(1, 10);
                open -= 1;
                grant.poll(share);
            }
            largest_share = largest_share.max(share.slices);
            assert!(grant.open_max().slices <= largest_share && open <= largest_share);
            assert!(open > 0 || grant.open_max().slices > 0, "it could wait for good");
        }
        // A share that shrank is kept to as soon as what was granted before is used up.
        while grant.on_asked(10).is_ok() {
            open += 1;
        }
        for _ in 0..open {
            grant.on_answered(1, 10);
            grant.poll(TAKINGS.share(32));
        }
        assert_eq!(grant.open_max().slices, TAKINGS.least.slices);
    }

    #[test]
    fn nobody_is_told_before_it_is_worth_a_message() {
        let share = Credit { bytes: 1000, slices: 10 };
        let mut grant = Grant::new(share);
        let told = (0..100).filter(|_| {
            grant.on_asked(1).unwrap();
            grant.on_answered(1, 1);
            grant.poll(share).is_some()
        });
        assert_eq!(told.count(), 20);
    }
}
