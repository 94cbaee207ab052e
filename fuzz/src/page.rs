//! Operation lists for the page table.

use millpond_core::page::{Page, PageError, Pages, State};
use millpond_core::slab::Handle;
use millpond_oracle::page::Pages as Oracle;

use crate::Op;

const TOTAL: u32 = 6;

/// Runs `ops` on the product and on the oracle. The first difference, in words.
///
/// # Errors
/// The number of the operation and what is wrong.
///
/// ```
/// millpond_fuzz::page::run(&[[0; 8], [1; 8]]).unwrap();
/// ```
pub fn run(ops: &[Op]) -> Result<(), String> {
    let mut world = World {
        pages: Pages::new([const { Page::EMPTY }; TOTAL as usize]),
        oracle: Oracle::new(TOTAL),
        handles: vec![Handle::default()],
    };
    for (number, op) in ops.iter().enumerate() {
        world.apply(op).and_then(|()| world.check()).map_err(|wrong| format!("operation {number} {op:?}: {wrong}"))?;
    }
    Ok(())
}

struct World {
    pages: Pages<[Page; TOTAL as usize]>,
    oracle: Oracle,
    /// Every handle ever seen, so that stale ones are tried too.
    handles: Vec<Handle>,
}

impl World {
    fn apply(&mut self, op: &Op) -> Result<(), String> {
        // The later half of the handles more often: those are more likely live.
        let back = usize::from(op[1]) % self.handles.len().min(if op[2] < 200 { 8 } else { usize::MAX });
        let page = self.handles[self.handles.len() - 1 - back];
        let was = self.oracle.state(page);
        let (got, expected) = match op[0] % 8 {
            0 => return self.allocate(1),
            1 => return self.allocate(usize::from(op[1] % 8)),
            2 => (self.pages.seal(page), self.oracle.step(page, is(State::Filling), |_| Some(State::Sealed))),
            3 => (
                self.pages.lease(page),
                self.oracle.step(page, is_readable, |state| Some(State::Leased(leases(state) + 1))),
            ),
            4 => {
                let after =
                    |state| Some(if leases(state) == 1 { State::Sealed } else { State::Leased(leases(state) - 1) });
                let expected = self.oracle.step(page, |state| leases(state) > 0, after);
                let got = self.pages.release(page);
                if got.is_ok_and(|left| left + 1 != was.map_or(0, leases)) {
                    return Err(format!("release of {page} in {was:?} left {got:?}"));
                }
                (got.map(|_| ()), expected)
            }
            5 => (self.pages.free(page), self.oracle.step(page, is_unread, |_| None)),
            6 => (self.pages.quarantine(page), self.oracle.step(page, is_unread, |_| Some(State::Quarantined))),
            _ => (self.pages.quiet(page), self.oracle.step(page, is(State::Quarantined), |_| None)),
        };
        let refusal = was.map_or(PageError::Stale(page), |state| PageError::State(page, state));
        let expected = if expected { Ok(()) } else { Err(refusal) };
        if got == expected { Ok(()) } else { Err(format!("page {page} in {was:?}: {got:?}, not {expected:?}")) }
    }

    fn allocate(&mut self, count: usize) -> Result<(), String> {
        let free = self.oracle.free_count();
        let mut taken = vec![Handle::default(); count];
        match self.pages.allocate_all(&mut taken) {
            Ok(()) => {
                self.handles.extend(&taken);
                taken.into_iter().try_for_each(|page| self.oracle.allocated(page))
            }
            Err(exhausted) if exhausted.free == free && count > free as usize => Ok(()),
            Err(exhausted) => Err(format!("{count} of {free} free pages: {exhausted:?}")),
        }
    }

    fn check(&self) -> Result<(), String> {
        if !self.oracle.agrees_with(self.pages.counts()) {
            return Err(format!("{:?} is not the count of {:?}", self.pages.counts(), self.oracle));
        }
        match self.handles.iter().find(|&&page| self.pages.state(page) != self.oracle.state(page)) {
            Some(&page) => Err(format!("{page}: {:?}, not {:?}", self.pages.state(page), self.oracle.state(page))),
            None => Ok(()),
        }
    }
}

fn is(wanted: State) -> impl Fn(State) -> bool {
    move |state| state == wanted
}

fn is_unread(state: State) -> bool {
    matches!(state, State::Filling | State::Sealed)
}

fn is_readable(state: State) -> bool {
    matches!(state, State::Sealed | State::Leased(_))
}

fn leases(state: State) -> u32 {
    if let State::Leased(count) = state { count } else { 0 }
}
