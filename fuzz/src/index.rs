//! Operation lists for the cluster's index of prefixes: events in order, lost, repeated and late, restarts, snapshots.

use millpond_core::hash::RouteHash;
use millpond_core::prefix::Holder;
use millpond_core::sched::index::{Change, Event, Index, Limits, Matches, Outcome};
use millpond_oracle::index::Index as Oracle;

use crate::Op;
use crate::prefix::{chain, same};

const HOLDERS: u16 = 5;
/// Names of all chains together are fewer than this.
const ROOM: u32 = 4_096;

/// Runs `ops` on an index with room for all, which must agree with the oracle, and on one with too little room, which
/// must not know more than the oracle does. The first difference, in words.
///
/// # Errors
/// The number of the operation and what is wrong.
///
/// ```
/// millpond_fuzz::index::run(&[[0; 8], [1; 8]]).unwrap();
/// ```
pub fn run(ops: &[Op]) -> Result<(), String> {
    let ample = Limits { holders_max: HOLDERS, spares: 50, blocks_max: ROOM, sets_max: ROOM };
    let tight = Limits { holders_max: HOLDERS, spares: 1, blocks_max: 12, sets_max: 4 };
    for limits in [ample, tight] {
        let index = Index::new(limits, 7);
        let matches = index.new_matches();
        let is_ample = limits == ample;
        let mut world = World { index, matches, is_ample, oracle: Oracle::new(HOLDERS.into()) };
        for (number, op) in ops.iter().enumerate() {
            world
                .apply(op)
                .and_then(|()| world.check(op))
                .map_err(|wrong| format!("{limits:?}, operation {number} {op:?}: {wrong}"))?;
        }
    }
    Ok(())
}

struct World {
    index: Index<RouteHash, 1>,
    matches: Matches<1>,
    is_ample: bool,
    oracle: Oracle,
}

impl World {
    fn apply(&mut self, op: &Op) -> Result<(), String> {
        let names = chain(op);
        let route: Vec<RouteHash> = names.iter().copied().map(RouteHash).collect();
        let last = [*names.last().expect("a chain has a block")];
        let holder = u16::from(op[1]) % HOLDERS;
        let at = usize::from(holder);
        let (life, number, _) = self.oracle.view(at);
        // Mostly the present life and the next number; at times an older life, a new one, a gap or a repetition.
        let life = match op[2] >> 3 & 15 {
            0 => life.saturating_sub(1),
            1 => life + 1,
            _ => life.max(1),
        };
        let number = match op[2] & 7 {
            0 => number + 2,
            1 => number,
            _ => number + 1,
        };
        let event = |change| Event { holder: Holder(holder), life, number, change };
        let (got, expected) = match op[0] % 16 {
            0..6 => (
                self.index.on_event(&event(Change::Stored(&route))),
                self.oracle.event(at, life, number, |held| held.extend(&names)),
            ),
            6..8 => (
                self.index.on_event(&event(Change::Removed(&[RouteHash(last[0])]))),
                self.oracle.event(at, life, number, |held| {
                    held.remove(&last[0]);
                }),
            ),
            8 => (self.index.on_event(&event(Change::Cleared)), self.oracle.cleared(at, life, number)),
            9 => (self.index.on_position(Holder(holder), life, number), self.oracle.position(at, life, number)),
            10 => (self.index.on_leave(Holder(holder), life), self.oracle.leave(at, life)),
            11 => return self.begin_snapshot(holder, life, number),
            12 | 13 => (self.index.on_snapshot(Holder(holder), life, &route), self.oracle.snapshot(at, life, &names)),
            14 => (self.index.end_snapshot(Holder(holder), life), self.oracle.end_snapshot(at, life)),
            _ => {
                self.index.refute(Holder(holder), &[RouteHash(last[0])]);
                self.oracle.refute(at, &last);
                return Ok(());
            }
        };
        if self.is_ample { same("outcome", got, expected) } else { Ok(()) }
    }

    fn begin_snapshot(&mut self, holder: u16, life: u64, number: u64) -> Result<(), String> {
        let expected = self.oracle.begin_snapshot(holder.into(), life, number);
        let mut got = self.index.begin_snapshot(Holder(holder), life, number);
        if got == Outcome::Crowded && !self.is_ample {
            same("a full sweep ends", self.index.sweep(2 * ROOM), true)?;
            got = self.index.begin_snapshot(Holder(holder), life, number);
            if got == Outcome::Crowded {
                self.oracle.drop_snapshot(holder.into());
                return Ok(());
            }
        }
        same("begin of a snapshot", got, expected)
    }

    fn check(&mut self, op: &Op) -> Result<(), String> {
        let names = chain(op);
        let route: Vec<RouteHash> = names.iter().copied().map(RouteHash).collect();
        self.index.matches(&route, &mut self.matches);
        let lens =
            |holder: u16| (self.matches.len_of(Holder(holder)) as usize, self.oracle.matched(holder.into(), &names));
        if !self.is_ample {
            let more = (0..HOLDERS).find(|&holder| lens(holder).0 > lens(holder).1);
            return same("a holder of which too much is known", more, None);
        }
        for holder in 0..HOLDERS {
            let (got, expected) = lens(holder);
            same("blocks of a holder", got, expected)?;
            let view = self.index.view(Holder(holder)).expect("a holder below the limit");
            let view = (view.life, view.number, view.blocks as usize);
            same("view of a holder", view, self.oracle.view(holder.into()))?;
        }
        let heard = (0..HOLDERS).filter(|&holder| self.oracle.is_heard(holder.into()));
        let heard: Vec<usize> = heard.map(|holder| self.oracle.matched(holder.into(), &names)).collect();
        let shared = heard.iter().copied().min().unwrap_or(0);
        same("blocks of all", self.matches.shared() as usize, shared)?;
        same("blocks of the best", self.matches.longest() as usize, heard.iter().copied().max().unwrap_or(0))?;
        same("holders beyond", self.matches.beyond().count(), heard.iter().filter(|&&len| len > shared).count())
    }
}
