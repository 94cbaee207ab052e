//! Operation lists for the prefix tree.

use millpond_core::hash::RouteHash;
use millpond_core::prefix::{Block, Holder, Path, Prefix, PrefixError, Run};
use millpond_core::slab::Handle;
use millpond_oracle::prefix::{Index, Inserted};

use crate::Op;

const BLOCKS: usize = 48;
const HOLDERS: u16 = 3;

type Tree = Prefix<RouteHash, [Block<RouteHash>; BLOCKS], [Run<1>; BLOCKS], 1>;

/// Runs `ops` on the product and on the oracle. The first difference, in words.
///
/// # Errors
/// The number of the operation and what is wrong.
///
/// ```
/// millpond_fuzz::prefix::run(&[[0; 8], [1; 8]]).unwrap();
/// ```
pub fn run(ops: &[Op]) -> Result<(), String> {
    let tree = Prefix::new([const { Block::EMPTY }; BLOCKS], [const { Run::EMPTY }; BLOCKS], 7);
    let mut world = World { tree, oracle: Index::new(BLOCKS), handles: vec![Handle::default()] };
    for (number, op) in ops.iter().enumerate() {
        world
            .apply(op)
            .and_then(|()| world.check(op))
            .map_err(|wrong| format!("operation {number} {op:?}: {wrong}"))?;
    }
    Ok(())
}

/// The chain an operation speaks of: up to 14 blocks, each one of four that can follow the one before.
pub(crate) fn chain(op: &Op) -> Vec<u64> {
    let letters = u32::from_le_bytes([op[4], op[5], op[6], op[7]]);
    let len = u32::from(op[3] % 14) + 1;
    let mut name = 0xfeed_u64;
    let mut next = |at: u32| {
        // Mostly the same letter, so that chains are long and shared; a chained mix, so that equal means equal prefix.
        let letter = u64::from(letters >> (2 * at) & 3).saturating_sub(1);
        name = (name ^ letter).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ letter;
        name
    };
    (0..len).map(&mut next).collect()
}

struct World {
    tree: Tree,
    oracle: Index,
    /// Every handle ever seen, so that stale ones are tried too.
    handles: Vec<Handle>,
}

pub(crate) fn same<T: PartialEq + core::fmt::Debug>(what: &str, got: T, expected: T) -> Result<(), String> {
    if got == expected { Ok(()) } else { Err(format!("{what}: {got:?}, not {expected:?}")) }
}

impl World {
    fn apply(&mut self, op: &Op) -> Result<(), String> {
        let (names, holder) = (chain(op), u16::from(op[1]) % HOLDERS);
        let last = *names.last().expect("a chain has a block");
        match op[0] % 16 {
            0..5 => self.insert(holder, None, &names),
            5 => self.insert(holder, Some(names[0]), &names[1..]),
            6 => self.insert_broken(op, holder, &names),
            7 => same("remove", self.tree.remove(Holder(holder), RouteHash(last)), self.oracle.remove(holder, last)),
            8 if op[2] < 24 => {
                self.tree.remove_holder(Holder(holder));
                self.oracle.remove_holder(holder);
                Ok(())
            }
            8..11 => self.evict(),
            11 => self.stale(op),
            kind => self.on_block(kind, last),
        }
    }

    fn insert(&mut self, holder: u16, parent: Option<u64>, names: &[u64]) -> Result<(), String> {
        let route: Vec<RouteHash> = names.iter().copied().map(RouteHash).collect();
        let path = Path { holder: Holder(holder), parent: parent.map(RouteHash), names: &route };
        let got =
            self.tree.insert(&path).map(|got| Inserted { known: got.known, added: got.added, stopped: got.stopped });
        let expected = self.oracle.insert(holder, parent, names).ok_or(PrefixError::UnknownParent);
        self.handles.extend(route.iter().filter_map(|&name| self.tree.find(name)));
        same("insert", got, expected)
    }

    /// Names that are no chain: one that ends where it began, or one whose first name has another parent. Names must
    /// stay chained hashes, so only what the tree has to refuse is tried.
    fn insert_broken(&mut self, op: &Op, holder: u16, names: &[u64]) -> Result<(), String> {
        let mut broken = names.to_vec();
        if names.len() > 1 && self.oracle.contains(names[1]) && op[2].is_multiple_of(2) {
            broken.remove(0);
        } else {
            broken.push(names[0]);
        }
        self.insert(holder, None, &broken)
    }

    fn evict(&mut self) -> Result<(), String> {
        let got = self.tree.evict();
        let stale = got.is_none_or(|evicted| self.tree.name(evicted.block).is_none());
        let got = got.map(|evicted| (evicted.name.0, evicted.holders.iter().map(|holder| holder.0).collect()));
        same("evict", got, self.oracle.evict())?;
        same("the evicted handle is stale", stale, true)
    }

    fn stale(&mut self, op: &Op) -> Result<(), String> {
        let block = self.handles[usize::from(op[2]) % self.handles.len()];
        let name = self.tree.name(block);
        if let Some(name) = name {
            return same("find", self.tree.find(name), Some(block));
        }
        same("touch", self.tree.touch(block), Err(PrefixError::Stale(block)))?;
        same("pin", self.tree.pin(block), Err(PrefixError::Stale(block)))?;
        same("unpin", self.tree.unpin(block), Err(PrefixError::Stale(block)))
    }

    fn on_block(&mut self, kind: u8, name: u64) -> Result<(), String> {
        let found = self.tree.find(RouteHash(name));
        same("find", found.is_some(), self.oracle.contains(name))?;
        let Some(block) = found else { return Ok(()) };
        match kind {
            12 => {
                self.oracle.touch(name);
                same("touch", self.tree.touch(block), Ok(()))
            }
            13 => {
                self.oracle.pin(name);
                same("pin", self.tree.pin(block), Ok(()))
            }
            14 => {
                let expected = if self.oracle.unpin(name) { Ok(()) } else { Err(PrefixError::NotPinned(block)) };
                same("unpin", self.tree.unpin(block), expected)
            }
            _ => {
                let leaf = self.tree.leaf_under(block).ok().and_then(|leaf| self.tree.name(leaf));
                same("leaf under", leaf, Some(RouteHash(self.oracle.leaf_under(name))))
            }
        }
    }

    fn check(&self, op: &Op) -> Result<(), String> {
        let names = chain(op);
        let route: Vec<RouteHash> = names.iter().copied().map(RouteHash).collect();
        same("blocks", self.tree.len(), self.oracle.len())?;
        let longest = self.tree.longest_match(&route);
        same("longest match", longest.len, self.oracle.held(&names))?;
        let last = longest.last.and_then(|block| self.tree.name(block));
        same("its end", last, longest.len.checked_sub(1).map(|at| route[at]))?;
        let mut held = [9; HOLDERS as usize];
        self.tree.matches(&route, &mut held);
        for (holder, got) in (0..HOLDERS).zip(held) {
            same("blocks of a holder", got as usize, self.oracle.held_by(holder, &names))?;
        }
        let runs = self.tree.run_count();
        same("runs without blocks", runs > self.tree.len() || (runs == 0) != self.tree.is_empty(), false)
    }
}
