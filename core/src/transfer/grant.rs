//! The receiver's side of credit: what it grants each of its senders, out of what it takes from all of them together.
//!
//! [`Takings`] divides evenly; a [`Grant`] is the account of one sender over one connection, all of it totals since the
//! connection opened. It moves nothing and sends nothing: the caller tells the sender what [`Grant::poll`] says. Invariants:
//! what a grant tells never shrinks, so that news of it may come late, twice or, as long as later news comes, not at all;
//! a sender of which everything is answered may always send one more, so that none waits for news that nobody owes it;
//! what is granted and not answered is never more than the share, or than what the connection began with.

use super::window::Credit;
use crate::seeded::{Bug, on};

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
    pub fn on_asked(&mut self, bytes: u64) -> Result<(), Overrun> {
        if !self.granted.admits(self.asked) && !on(Bug::GrantTakesOverruns) {
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
        let answered = if on(Bug::GrantCountsAsked) { self.asked } else { self.answered };
        let open = Credit {
            bytes: self.answered.bytes.saturating_add(share.bytes),
            slices: answered.slices.saturating_add(share.slices),
        };
        if on(Bug::GrantShrinks) {
            self.granted = open;
            return Some(open);
        }
        let is_due = |open: u64, granted: u64, share: u64| open.saturating_sub(granted) >= (share / 2).max(1);
        if !is_due(open.bytes, self.granted.bytes, share.bytes)
            && (on(Bug::GrantForgetsSlices) || !is_due(open.slices, self.granted.slices, share.slices))
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
