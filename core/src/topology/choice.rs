//! Which pair of NICs carries bytes between two places, and what became of each pair that was looked at.

use core::fmt;

use super::{Fault, Nic, Row, Unfit, Verdict};

/// One side of a move: the NICs of its machine, and the line of the place where its memory lies.
///
/// Example: `core/src/topology/choice.rs` (`choose`).
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// All NICs of that machine.
    pub nics: &'a [Nic],
    /// The line of the place.
    pub row: &'a Row,
}

/// A NIC here and one of the peer, by their indexes in their own machines.
///
/// Example: `core/src/topology/choice.rs` (`choose`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// Ours.
    pub nic: u8,
    /// The peer's.
    pub peer_nic: u8,
}

/// Which sides prefer their NIC of a pair, best first.
///
/// ```
/// use millpond_core::topology::Tier;
/// assert!(Tier::Both < Tier::Ours && Tier::Theirs < Tier::Neither);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Both.
    Both,
    /// Ours only.
    Ours,
    /// The peer only.
    Theirs,
    /// Neither.
    Neither,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Both => "preferred on both sides",
            Self::Ours => "preferred here, a fallback over there",
            Self::Theirs => "a fallback here, preferred over there",
            Self::Neither => "a fallback on both sides",
        })
    }
}

/// A pair that was looked at, and what became of it. Its text is for people.
///
/// Example: `core/src/topology/choice.rs` (`choose`).
#[derive(Clone, Copy, Debug)]
pub struct Considered<'a> {
    /// The two.
    pub pair: Pair,
    /// Which sides prefer it.
    pub tier: Tier,
    /// What its byte test said, or that one of its NICs is unfit.
    pub verdict: Verdict,
    ends: (&'a Nic, &'a Nic),
}

impl Considered<'_> {
    /// Whether it is the pair to use.
    #[must_use]
    pub fn is_chosen(&self) -> bool {
        self.verdict == Verdict::Proven
    }
}

impl fmt::Display for Considered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (here, there) = (self.ends.0.name, self.ends.1.name);
        let word = if self.is_chosen() { "chosen" } else { "not used" };
        write!(f, "{here} -> {there}: {word}: {}; {}", self.verdict, self.tier)
    }
}

/// All pairs of two ends that speak the same, best first: what both prefer, then what one prefers, then the rest. Within a
/// tier each NIC here begins with its namesake over there, which on rail networks hangs on the same switch, or else with
/// the one at its own place in the line, so that NICs here do not all begin with the same one.
pub fn pairs<'a>(here: End<'a>, there: End<'a>) -> impl Iterator<Item = (Tier, Pair)> + 'a {
    let tiers = [Tier::Both, Tier::Ours, Tier::Theirs, Tier::Neither];
    tiers.into_iter().flat_map(move |tier| {
        let ours = if tier <= Tier::Ours { here.row.preferred() } else { here.row.available() };
        let theirs = match tier {
            Tier::Both | Tier::Theirs => there.row.preferred(),
            Tier::Ours | Tier::Neither => there.row.available(),
        };
        ours.iter().enumerate().flat_map(move |(place, nic)| {
            let own = here.nics.get(usize::from(*nic));
            let same_name = |peer: &u8| {
                there.nics.get(usize::from(*peer)).is_some_and(|peer| own.is_some_and(|own| own.name == peer.name))
            };
            let speaks = move |peer: &u8| {
                there.nics.get(usize::from(*peer)).is_some_and(|peer| own.is_some_and(|own| own.medium == peer.medium))
            };
            let first = theirs.iter().position(same_name).unwrap_or(place % theirs.len().max(1));
            let turned = theirs.iter().cycle().skip(first).take(theirs.len());
            turned.copied().filter(speaks).map(move |peer_nic| (tier, Pair { nic: *nic, peer_nic }))
        })
    })
}

/// The best pair that is proven, `None` if none is. `verdict` says what the byte tests found; `considered` is told of every
/// pair up to the chosen one, in order, with the reason: that is the explanation. Looks at no more than all pairs once.
///
/// ```
/// use millpond_core::topology::*;
/// let nic = |name: &str| Nic::new(name.parse().unwrap(), Medium::Roce, At::default());
/// let nics = [nic("mlx5_0"), nic("mlx5_1")];
/// let inventory = Inventory { nics: &nics, spots: &[] };
/// let matrix = Matrix::discover(&inventory, Scope::Rdma, [Row::EMPTY; 1]).unwrap();
/// let end = End { nics: &nics, row: &matrix.rows()[0] };
///
/// // mlx5_0 says that it moved bytes, and did not.
/// let verdict = |pair: Pair| if pair.nic == 0 { Verdict::Refuted(Fault::Bytes(Direction::Write, Found::Nothing)) } else { Verdict::Proven };
/// let mut lines = Vec::new();
/// let chosen = choose(end, end, verdict, |pair| lines.push(pair.to_string()));
/// assert_eq!(chosen, Some(Pair { nic: 1, peer_nic: 1 }));
/// assert!(lines[0].starts_with("mlx5_0 -> mlx5_0: not used: its driver reported success and moved nothing"));
/// assert!(lines[2].starts_with("mlx5_1 -> mlx5_1: chosen"));
/// ```
pub fn choose<'a>(
    here: End<'a>,
    there: End<'a>,
    mut verdict: impl FnMut(Pair) -> Verdict,
    mut considered: impl FnMut(Considered<'a>),
) -> Option<Pair> {
    for (tier, pair) in pairs(here, there) {
        // A row names only NICs of its table; one that does not is passed over.
        let ends = (here.nics.get(usize::from(pair.nic)), there.nics.get(usize::from(pair.peer_nic)));
        let (Some(own), Some(other)) = ends else { continue };
        let unfit: Option<Unfit> = own.unfit.or(other.unfit);
        let verdict = unfit.map_or_else(|| verdict(pair), |unfit| Verdict::Refuted(Fault::Unfit(unfit)));
        let looked_at = Considered { pair, tier, verdict, ends: (own, other) };
        considered(looked_at);
        if looked_at.is_chosen() {
            return Some(pair);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::topology::{At, Inventory, Matrix, Medium, Place};
    use std::format;
    use std::vec::Vec;

    fn nics(names: &[&str], medium: Medium) -> Vec<Nic> {
        names.iter().map(|name| Nic::new(name.parse().expect("a name"), medium, At::default())).collect()
    }

    fn row(nics: &[Nic], preferred: &[&str], available: &[&str]) -> Row {
        let inventory = Inventory { nics, spots: &[] };
        let mut matrix = Matrix::configured([Row::EMPTY; 1]);
        matrix.add(&inventory, Place::ANY, preferred.iter().copied(), available.iter().copied()).expect("good");
        matrix.rows()[0]
    }

    #[test]
    fn rails_stay_on_their_switch_and_nics_spread_over_the_peers() {
        let (ours, theirs) = (nics(&["a", "b", "c"], Medium::Roce), nics(&["c", "x", "a"], Medium::Roce));
        let (own, other) = (row(&ours, &["a", "b", "c"], &[]), row(&theirs, &["c", "x", "a"], &[]));
        let first: Vec<(u8, u8)> = pairs(End { nics: &ours, row: &own }, End { nics: &theirs, row: &other })
            .map(|(_, pair)| (pair.nic, pair.peer_nic))
            .collect();
        // a begins with a, b (no namesake) with the second, c with c; and each pair comes once.
        assert_eq!((first[0], first[3], first[6]), ((0, 2), (1, 1), (2, 0)));
        let mut all = first.clone();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 9);
    }

    #[test]
    fn what_both_prefer_comes_before_what_one_prefers() {
        let all = nics(&["near", "far"], Medium::InfiniBand);
        let own = row(&all, &["near"], &["far"]);
        let end = End { nics: &all, row: &own };
        let order: Vec<(Tier, Pair)> = pairs(end, end).collect();
        let pair = |nic, peer_nic| Pair { nic, peer_nic };
        let expected = [
            (Tier::Both, pair(0, 0)),
            (Tier::Ours, pair(0, 1)),
            (Tier::Theirs, pair(1, 0)),
            (Tier::Neither, pair(1, 1)),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn nics_that_speak_differently_are_no_pair() {
        let (ours, theirs) = (nics(&["a"], Medium::Roce), nics(&["a"], Medium::InfiniBand));
        let (own, other) = (row(&ours, &["a"], &[]), row(&theirs, &["a"], &[]));
        assert_eq!(pairs(End { nics: &ours, row: &own }, End { nics: &theirs, row: &other }).count(), 0);
    }

    #[test]
    fn an_unfit_nic_of_the_peer_is_not_asked_about() {
        let ours = nics(&["a"], Medium::Roce);
        let mut theirs = nics(&["a", "b"], Medium::Roce);
        let (own, other) = (row(&ours, &["a"], &[]), row(&theirs, &["a", "b"], &[]));
        theirs[0].unfit = Some(Unfit::NoActivePort);
        let mut lines = Vec::new();
        let verdict = |pair: Pair| {
            assert_eq!(pair.peer_nic, 1, "no test is asked for on a NIC that is down");
            Verdict::Proven
        };
        let (here, there) = (End { nics: &ours, row: &own }, End { nics: &theirs, row: &other });
        let chosen = choose(here, there, verdict, |pair| lines.push(format!("{pair}")));
        assert_eq!(chosen, Some(Pair { nic: 0, peer_nic: 1 }));
        assert!(lines[0].contains("none of its ports is active"), "{}", lines[0]);
    }

    #[test]
    fn without_a_proven_pair_there_is_none_and_every_pair_says_why() {
        let all = nics(&["a", "b"], Medium::Roce);
        let own = row(&all, &["a"], &["b"]);
        let end = End { nics: &all, row: &own };
        let mut lines = Vec::new();
        let chosen = choose(end, end, |_| Verdict::Untested, |pair| lines.push(format!("{pair}")));
        assert_eq!((chosen, lines.len()), (None, 4));
        assert!(lines.iter().all(|line| line.contains("not used: its byte test has not passed yet")), "{lines:?}");
    }
}
