//! The obvious cluster index: for each holder, what it said it has.

use std::collections::BTreeSet;

use millpond_core::sched::index::Outcome;

/// One holder.
#[derive(Clone, Debug, Default)]
struct Life {
    life: u64,
    number: u64,
    is_behind: bool,
    is_gone: bool,
    /// Whether it said in this life, since it last cleared, that it has something.
    is_heard: bool,
    held: BTreeSet<u64>,
    snapshot: Option<(u64, BTreeSet<u64>)>,
}

/// Holders by number, each with a set of names.
///
/// ```
/// let mut index = millpond_oracle::index::Index::new(2);
/// index.event(0, 1, 1, |held| held.extend([7, 8]));
/// assert_eq!((index.matched(0, &[7, 8, 9]), index.matched(1, &[7])), (2, 0));
/// ```
#[derive(Clone, Debug)]
pub struct Index(Vec<Life>);

impl Index {
    /// Nothing is known of so many holders.
    #[must_use]
    pub fn new(holders: usize) -> Self {
        Self(vec![Life { is_gone: true, ..Life::default() }; holders])
    }

    fn admit(&mut self, holder: usize, life: u64) -> Result<&mut Life, Outcome> {
        let known = self.0.get_mut(holder).ok_or(Outcome::Unknown)?;
        if life < known.life || (life == known.life && known.is_gone) {
            return Err(Outcome::Stale);
        }
        if life > known.life {
            *known = Life { life, ..Life::default() };
        }
        Ok(known)
    }

    /// An event, which changes what the holder has.
    pub fn event(&mut self, holder: usize, life: u64, number: u64, change: impl FnOnce(&mut BTreeSet<u64>)) -> Outcome {
        self.numbered(holder, life, number, |known| {
            change(&mut known.held);
            known.is_heard |= !known.held.is_empty();
        })
    }

    /// The holder has nothing any more.
    pub fn cleared(&mut self, holder: usize, life: u64, number: u64) -> Outcome {
        if let Ok(known) = self.admit(holder, life)
            && known.snapshot.as_ref().is_some_and(|(taken_at, _)| number > *taken_at)
            && number > known.number
        {
            known.snapshot = None;
        }
        self.numbered(holder, life, number, |known| {
            *known = Life { life, number, ..Life::default() };
        })
    }

    fn numbered(&mut self, holder: usize, life: u64, number: u64, change: impl FnOnce(&mut Life)) -> Outcome {
        let known = match self.admit(holder, life) {
            Ok(known) => known,
            Err(outcome) => return outcome,
        };
        if known.snapshot.is_some() {
            return Outcome::InSnapshot;
        }
        if number <= known.number {
            return Outcome::Repeated;
        }
        known.is_behind |= number > known.number + 1;
        known.number = number;
        change(known);
        if known.is_behind { Outcome::Behind } else { Outcome::Applied }
    }

    /// A sign of life.
    pub fn position(&mut self, holder: usize, life: u64, number: u64) -> Outcome {
        match self.admit(holder, life) {
            Ok(known) if known.snapshot.is_some() => Outcome::InSnapshot,
            Ok(known) => {
                known.is_behind |= number > known.number;
                if known.is_behind { Outcome::Behind } else { Outcome::Applied }
            }
            Err(outcome) => outcome,
        }
    }

    /// The holder left.
    pub fn leave(&mut self, holder: usize, life: u64) -> Outcome {
        match self.admit(holder, life) {
            Ok(known) => {
                *known = Life { life, number: known.number, is_gone: true, ..Life::default() };
                Outcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// The holder does not have these.
    pub fn refute(&mut self, holder: usize, names: &[u64]) {
        if let Some(known) = self.0.get_mut(holder) {
            names.iter().for_each(|name| {
                known.held.remove(name);
            });
        }
    }

    /// A snapshot begins.
    pub fn begin_snapshot(&mut self, holder: usize, life: u64, number: u64) -> Outcome {
        match self.admit(holder, life) {
            Ok(known) => {
                known.snapshot = Some((number, BTreeSet::new()));
                Outcome::Applied
            }
            Err(outcome) => outcome,
        }
    }

    /// The snapshot that was begun, if any, is dropped.
    pub fn drop_snapshot(&mut self, holder: usize) {
        self.0[holder].snapshot = None;
    }

    /// A part of it.
    pub fn snapshot(&mut self, holder: usize, life: u64, names: &[u64]) -> Outcome {
        match self.admit(holder, life).map(|known| known.snapshot.as_mut()) {
            Ok(Some((_, fresh))) => {
                fresh.extend(names);
                Outcome::Applied
            }
            Ok(None) => Outcome::Stale,
            Err(outcome) => outcome,
        }
    }

    /// It is whole.
    pub fn end_snapshot(&mut self, holder: usize, life: u64) -> Outcome {
        let known = match self.admit(holder, life) {
            Ok(known) => known,
            Err(outcome) => return outcome,
        };
        let Some((number, held)) = known.snapshot.take() else { return Outcome::Stale };
        *known = Life { life, number, held, is_heard: true, ..Life::default() };
        Outcome::Applied
    }

    /// Names at the beginning of `names` that the holder has.
    #[must_use]
    pub fn matched(&self, holder: usize, names: &[u64]) -> usize {
        self.0.get(holder).map_or(0, |known| names.iter().take_while(|name| known.held.contains(name)).count())
    }

    /// Whether the holder counts when it is asked what all have.
    #[must_use]
    pub fn is_heard(&self, holder: usize) -> bool {
        self.0[holder].is_heard
    }

    /// Its life, its last event, the names it has.
    #[must_use]
    pub fn view(&self, holder: usize) -> (u64, u64, usize) {
        let known = &self.0[holder];
        (known.life, known.number, known.held.len())
    }
}
