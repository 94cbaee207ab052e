//! A receiver's credit under news that is lost, doubled and late, and shares that come and go; each check finds seeded bugs.

use millpond_core::random::Random;
use millpond_core::seeded::{self, Bug};
use millpond_core::transfer::{Credit, Grant, Takings};

const TAKINGS: Takings =
    Takings { whole: Credit { bytes: 64_000, slices: 64 }, least: Credit { bytes: 1_000, slices: 2 } };
const SENDERS: usize = 16;
const NEWS: usize = 64;

type Run = fn(u64) -> Result<(), String>;

fn check(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// A number below `limit`.
fn below(random: &mut Random, limit: usize) -> usize {
    usize::try_from(random.below(limit as u64)).expect("below a usize")
}

/// A sender: its account at the receiver, what it believes, and how many slices it sent and had answered.
#[derive(Clone, Copy)]
struct Sender {
    grant: Grant,
    known: Credit,
    sent: u64,
    answered: u64,
}

/// Senders who believe what they were told, while news is lost, doubled and late and their share changes: nobody overruns,
/// and nobody waits for news that nobody owes it.
fn news(seed: u64) -> Result<(), String> {
    let len_of = |number: u64| 1 + number * 37 % 300;
    let lens_of = |count: u64| (0..count).map(len_of).sum();
    let random = &mut Random::new(seed);
    let fresh = Sender { grant: Grant::new(TAKINGS.least), known: TAKINGS.least, sent: 0, answered: 0 };
    let mut senders = [fresh; SENDERS];
    let mut news = [(0, TAKINGS.least); NEWS];
    for round in 0..4_000 {
        let share = TAKINGS.share(u32::try_from(1 + below(random, SENDERS)).expect("few"));
        let (at, what) = (below(random, SENDERS), below(random, 4));
        let Sender { grant, known, sent, answered } = &mut senders[at];
        match what {
            0 if known.admits(Credit { bytes: lens_of(*sent), slices: *sent }) => {
                check(grant.on_asked(len_of(*sent)).is_ok(), || format!("seed {seed}, round {round}: an overrun"))?;
                *sent += 1;
            }
            0 => check(sent > answered, || format!("seed {seed}, round {round}: nobody owes it any news"))?,
            1 if sent > answered => {
                grant.on_answered(1, len_of(*answered));
                *answered += 1;
                // The answer carries the totals, as every later one does.
                let told = grant.poll(share).unwrap_or(grant.granted());
                known.raise_to(told);
                news[round % NEWS] = (at, told);
            }
            _ => {
                let (to, old) = news[below(random, NEWS)];
                senders[to].known.raise_to(old);
            }
        }
    }
    Ok(())
}

/// A sender who asks for all it can get, while its share changes: what is open keeps to the largest share there was, and to
/// the last one once what was granted before is used up.
fn shares(seed: u64) -> Result<(), String> {
    let (random, mut grant, mut open) = (&mut Random::new(seed), Grant::new(TAKINGS.least), 0);
    let mut largest = TAKINGS.least.slices;
    for round in 0..50_000 {
        let share = TAKINGS.share(u32::try_from(1 + below(random, 40)).expect("few"));
        if below(random, 2) == 0 && grant.on_asked(10).is_ok() {
            open += 1;
        } else if open > 0 {
            grant.on_answered(1, 10);
            open -= 1;
            grant.poll(share);
        }
        largest = largest.max(share.slices);
        let kept = grant.open_max().slices <= largest && open <= largest;
        check(kept, || format!("seed {seed}, round {round}: {open} open of {largest}"))?;
        check(open > 0 || grant.open_max().slices > 0, || format!("seed {seed}, round {round}: it waits for good"))?;
    }
    // As many as it could ever have been granted.
    for _ in 0..200_000 {
        if grant.on_asked(10).is_err() {
            break;
        }
        open += 1;
    }
    for _ in 0..open {
        grant.on_answered(1, 10);
        grant.poll(TAKINGS.share(32));
    }
    let left = grant.open_max().slices;
    check(left == TAKINGS.least.slices, || format!("seed {seed}: {left} are open of a share that shrank"))
}

/// What `run` finds in some of its seeds.
fn difference(run: Run, seeds: u64, bug: Option<Bug>) -> Option<String> {
    seeded::select(bug);
    let found = (0..seeds).find_map(|seed| run(seed).err());
    seeded::select(None);
    found
}

#[test]
fn news_of_credit_may_be_late_doubled_or_overtaken_and_nobody_overruns_or_waits_for_good() {
    assert_eq!(difference(news, 200, None), None);
}

#[test]
fn what_is_open_keeps_to_the_share_however_many_come_and_go() {
    assert_eq!(difference(shares, 4, None), None);
}

#[test]
fn credit_that_shrinks_or_is_not_told_is_found() {
    for bug in [Bug::GrantShrinks, Bug::GrantForgetsSlices] {
        assert!(difference(news, 200, Some(bug)).is_some(), "{bug:?} was not found");
    }
}

#[test]
fn credit_that_is_given_twice_or_not_looked_at_is_found() {
    for bug in [Bug::GrantCountsAsked, Bug::GrantTakesOverruns] {
        assert!(difference(shares, 4, Some(bug)).is_some(), "{bug:?} was not found");
    }
}
