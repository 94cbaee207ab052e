//! For each place the NICs it prefers and those it may fall back to, with a reason for every NIC.

use core::fmt;

use super::{BadName, Distance, Inventory, Name, Nearness, Nic, Place, Unfit};

/// NICs of one machine at most; more are not looked at, and the matrix says so.
pub const NICS_MAX: usize = 64;

/// Which NICs a matrix is about: a transport uses one sort, and the two are not alternatives within a row.
///
/// ```
/// use millpond_core::topology::{At, Inventory, Medium, Nic, Scope};
/// let nics = [Nic::new("eth0".parse().unwrap(), Medium::Net, At::default())];
/// assert_eq!(Scope::best(&Inventory { nics: &nics, spots: &[] }), Scope::Net);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// RDMA devices.
    Rdma,
    /// Network interfaces of the kernel.
    Net,
}

impl Scope {
    /// RDMA if a device of that sort is fit for use, else the kernel's interfaces.
    #[must_use]
    pub fn best(inventory: &Inventory<'_>) -> Self {
        let has_rdma = inventory.nics.iter().any(|nic| nic.medium.is_rdma() && nic.unfit.is_none());
        if has_rdma { Self::Rdma } else { Self::Net }
    }

    fn takes(self, nic: &Nic) -> bool {
        nic.medium.is_rdma() == (self == Self::Rdma)
    }
}

/// One line of a [`Matrix`]: the NICs of a place by their index, best first. Make an array or boxed slice of
/// [`Row::EMPTY`] as storage.
///
/// Example: [`Matrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    place: Place,
    order: [u8; NICS_MAX],
    preferred: u8,
    len: u8,
}

impl Row {
    /// A line without NICs.
    pub const EMPTY: Self = Self { place: Place::ANY, order: [0; NICS_MAX], preferred: 0, len: 0 };

    /// The place it is for.
    #[must_use]
    pub const fn place(&self) -> Place {
        self.place
    }

    /// NICs to use while one of them works.
    #[must_use]
    pub fn preferred(&self) -> &[u8] {
        &self.order[..usize::from(self.preferred)]
    }

    /// NICs to use when none of those works.
    #[must_use]
    pub fn available(&self) -> &[u8] {
        &self.order[usize::from(self.preferred)..usize::from(self.len)]
    }

    fn push(&mut self, nic: u8) -> Option<()> {
        *self.order.get_mut(usize::from(self.len))? = nic;
        self.len += 1;
        Some(())
    }
}

/// A matrix that an operator wrote, and why it is refused.
///
/// ```
/// use millpond_core::topology::{Inventory, Matrix, MatrixError, Place, Row};
/// let none = Inventory { nics: &[], spots: &[] };
/// let mut matrix = Matrix::configured([Row::EMPTY; 2]);
/// let error = matrix.add(&none, Place::cpu(0), ["mlx5_9"], []).unwrap_err();
/// assert_eq!(error, MatrixError::UnknownNic("mlx5_9".parse().unwrap()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatrixError {
    /// A text that is no name.
    Name(BadName),
    /// It names a NIC that this machine does not have.
    UnknownNic(Name),
    /// It names one NIC twice for one place.
    TwiceInRow(Name),
    /// It has two lines for one place.
    TwiceInMatrix(Place),
    /// It has more lines than there is storage for.
    TooManyRows {
        /// The bound.
        rows_max: usize,
    },
}

impl fmt::Display for MatrixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(bad) => write!(f, "{bad}"),
            Self::UnknownNic(name) => {
                write!(
                    f,
                    "the matrix names {name}, which this machine does not have; `doctor --topology` lists its NICs"
                )
            }
            Self::TwiceInRow(name) => write!(f, "the matrix names {name} twice for one place; name it once"),
            Self::TwiceInMatrix(place) => write!(f, "the matrix has two lines for {place}; join them"),
            Self::TooManyRows { rows_max } => write!(f, "the matrix has more than {rows_max} lines; leave some out"),
        }
    }
}

impl core::error::Error for MatrixError {}

/// Why a NIC stands where it does in the line of a place.
///
/// Example: [`Matrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Preferred: nothing is nearer.
    Nearest(Distance),
    /// Preferred: memory that may lie anywhere is near to none, and this NIC is fast enough.
    Anywhere,
    /// A fallback: others are nearer.
    Farther {
        /// How near it is.
        distance: Distance,
        /// How near the preferred ones are.
        best: Nearness,
    },
    /// A fallback: as near, and less than half as fast as the fastest.
    Slower {
        /// Its speed in megabits per second.
        mbps: u32,
        /// The fastest one's.
        fastest: u32,
    },
    /// Preferred, because the operator's matrix says so.
    ConfiguredPreferred,
    /// A fallback, because the operator's matrix says so.
    ConfiguredAvailable,
    /// Not used: the operator's matrix has a line for the place, and does not name it there.
    NotConfigured,
    /// Not used.
    Unfit(Unfit),
    /// Not used here: the matrix is about the other sort of NIC.
    OtherScope,
    /// Not used: the machine has more NICs than [`NICS_MAX`].
    TooMany,
}

impl Why {
    /// What it comes to, in a word: `preferred`, `fallback` or `unused`.
    #[must_use]
    pub const fn verdict(&self) -> &'static str {
        match self {
            Self::Nearest(_) | Self::Anywhere | Self::ConfiguredPreferred => "preferred",
            Self::Farther { .. } | Self::Slower { .. } | Self::ConfiguredAvailable => "fallback",
            Self::NotConfigured | Self::Unfit(_) | Self::OtherScope | Self::TooMany => "unused",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nearest(distance) => write!(f, "{distance}; none is nearer"),
            Self::Anywhere => f.write_str("for memory that has no line of its own"),
            Self::Farther { distance, best } => write!(f, "{distance}; others are {best}"),
            Self::Slower { mbps, fastest } => {
                write!(f, "as near, but {mbps} Mb/s where another has {fastest}")
            }
            Self::ConfiguredPreferred | Self::ConfiguredAvailable => f.write_str("the configured matrix says so"),
            Self::NotConfigured => f.write_str("the configured matrix does not name it for this place"),
            Self::Unfit(unfit) => write!(f, "{unfit}"),
            Self::OtherScope => f.write_str("the matrix is of RDMA devices, or of network interfaces, not of both"),
            Self::TooMany => write!(f, "only the first {NICS_MAX} NICs are looked at"),
        }
    }
}

/// The NICs of every place. `S` stores lines (`[Row; N]`, `Box<[Row]>`, …), from the caller.
///
/// ```
/// use millpond_core::topology::{At, Inventory, Matrix, Medium, Nic, PciPath, Place, Row, Scope, Spot};
/// let at = |path: &str, node| At { pci: PciPath::of_sysfs(path), node: Some(node) };
/// let near = at("/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", 0);
/// let far = at("/sys/devices/pci0000:80/0000:80:02.0/0000:81:00.0", 1);
/// let nics = [
///     Nic::new("mlx5_0".parse().unwrap(), Medium::InfiniBand, far),
///     Nic::new("mlx5_1".parse().unwrap(), Medium::InfiniBand, near),
/// ];
/// let gpu = at("/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.0", 0);
/// let spots = [Spot { place: "cuda:0".parse().unwrap(), at: gpu }];
/// let inventory = Inventory { nics: &nics, spots: &spots };
///
/// let matrix = Matrix::discover(&inventory, Scope::Rdma, [Row::EMPTY; 4]).unwrap();
/// let row = matrix.row(&"cuda:0".parse().unwrap()).unwrap();
/// assert_eq!((row.preferred(), row.available()), (&[1][..], &[0][..]));
/// let why = matrix.why(&inventory, row, 1).to_string();
/// assert_eq!(why, "behind the same PCIe switch, 4 hops; none is nearer");
/// // A place without a line of its own gets the one of `*`.
/// assert_eq!(matrix.row(&Place::cpu(7)).unwrap().place(), Place::ANY);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Matrix<S> {
    rows: S,
    len: usize,
    /// `None`: an operator's.
    scope: Option<Scope>,
}

/// What decides the order within a line.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    nearness: Nearness,
    is_slow: bool,
    hops: u8,
}

fn fit<'a>(inventory: &'a Inventory<'_>, scope: Scope) -> impl Iterator<Item = (u8, &'a Nic)> {
    (0u8..).zip(inventory.nics).take(NICS_MAX).filter(move |(_, nic)| scope.takes(nic) && nic.unfit.is_none())
}

fn fastest(inventory: &Inventory<'_>, scope: Scope) -> u32 {
    fit(inventory, scope).map(|(_, nic)| nic.mbps).max().unwrap_or(0)
}

/// Less than half as fast as the fastest: sharing with it evenly would slow it down.
fn is_slow(nic: &Nic, fastest: u32) -> bool {
    nic.mbps > 0 && nic.mbps < fastest / 2
}

impl<S: AsRef<[Row]> + AsMut<[Row]>> Matrix<S> {
    /// By distance: a line for every place of `inventory`, and one for `*`, of those NICs of `scope` that are fit. The
    /// nearest are preferred, but for slow ones; the others follow by distance.
    pub fn discover(inventory: &Inventory<'_>, scope: Scope, rows: S) -> Result<Self, MatrixError> {
        let mut matrix = Self { rows, len: 0, scope: Some(scope) };
        let fastest = fastest(inventory, scope);
        for spot in inventory.spots {
            let rank = |nic: u8| {
                let nic = &inventory.nics[usize::from(nic)];
                let distance = Distance::between(&spot.at, &nic.at);
                Rank { nearness: distance.nearness, is_slow: is_slow(nic, fastest), hops: distance.hops }
            };
            let mut row = Row { place: spot.place, ..Row::EMPTY };
            for (nic, _) in fit(inventory, scope) {
                row.push(nic);
            }
            // By distance, then as the inventory has them. At most NICS_MAX of them, and nothing to allocate.
            let order = &mut row.order[..usize::from(row.len)];
            order.sort_unstable_by_key(|nic| (rank(*nic), *nic));
            // The fastest of the nearest are preferred; where the nearest are all slow, those are.
            let best = order.first().map(|nic| rank(*nic));
            let is_best = |nic: u8| {
                best.is_some_and(|best| (rank(nic).nearness, rank(nic).is_slow) == (best.nearness, best.is_slow))
            };
            row.preferred = u8::try_from(order.iter().take_while(|nic| is_best(**nic)).count()).unwrap_or(u8::MAX);
            matrix.insert(row)?;
        }
        if matrix.exact(&Place::ANY).is_none() {
            let mut any = Row::EMPTY;
            // Fast ones first; anywhere has no distance.
            for slow in [false, true] {
                for (nic, _) in fit(inventory, scope).filter(|(_, nic)| is_slow(nic, fastest) == slow) {
                    any.push(nic);
                }
                if !slow {
                    any.preferred = any.len;
                }
            }
            matrix.insert(any)?;
        }
        Ok(matrix)
    }

    /// An operator's matrix, without a line yet.
    #[must_use]
    pub fn configured(rows: S) -> Self {
        Self { rows, len: 0, scope: None }
    }

    /// Adds the line of a place by the NICs' names, best first. An `Err` adds nothing. NICs that are unfit now may be
    /// named: they are passed over while they are.
    pub fn add<'n>(
        &mut self,
        inventory: &Inventory<'_>,
        place: Place,
        preferred: impl IntoIterator<Item = &'n str>,
        available: impl IntoIterator<Item = &'n str>,
    ) -> Result<(), MatrixError> {
        let mut row = Row { place, ..Row::EMPTY };
        let push = |row: &mut Row, name: &str| {
            let listed: Name = name.parse().map_err(MatrixError::Name)?;
            let nic = inventory.nic(name).filter(|nic| usize::from(*nic) < NICS_MAX);
            let nic = nic.ok_or(MatrixError::UnknownNic(listed))?;
            let is_twice = row.order[..usize::from(row.len)].contains(&nic);
            if is_twice || row.push(nic).is_none() {
                return Err(MatrixError::TwiceInRow(listed));
            }
            Ok(())
        };
        for name in preferred {
            push(&mut row, name)?;
        }
        row.preferred = row.len;
        for name in available {
            push(&mut row, name)?;
        }
        self.insert(row)
    }

    fn insert(&mut self, row: Row) -> Result<(), MatrixError> {
        if self.exact(&row.place).is_some() {
            return Err(MatrixError::TwiceInMatrix(row.place));
        }
        let rows = self.rows.as_mut();
        let rows_max = rows.len();
        *rows.get_mut(self.len).ok_or(MatrixError::TooManyRows { rows_max })? = row;
        self.len += 1;
        Ok(())
    }

    /// All lines.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows.as_ref()[..self.len]
    }

    /// Which NICs it is about; `None`: it is an operator's.
    #[must_use]
    pub fn scope(&self) -> Option<Scope> {
        self.scope
    }

    fn exact(&self, place: &Place) -> Option<&Row> {
        self.rows().iter().find(|row| row.place == *place)
    }

    /// The line of a place, or of `*` where it has none.
    #[must_use]
    pub fn row(&self, place: &Place) -> Option<&Row> {
        self.exact(place).or_else(|| self.exact(&Place::ANY))
    }

    /// Why the NIC with that index stands where it does in `row`, a line of this matrix.
    #[must_use]
    pub fn why(&self, inventory: &Inventory<'_>, row: &Row, nic: u8) -> Why {
        let Some(found) = inventory.nics.get(usize::from(nic)) else { return Why::TooMany };
        if let Some(unfit) = found.unfit {
            return Why::Unfit(unfit);
        }
        let is_preferred = row.preferred().contains(&nic);
        let Some(scope) = self.scope else {
            return match (is_preferred, row.available().contains(&nic)) {
                (true, _) => Why::ConfiguredPreferred,
                (_, true) => Why::ConfiguredAvailable,
                _ => Why::NotConfigured,
            };
        };
        if usize::from(nic) >= NICS_MAX {
            return Why::TooMany;
        }
        if !scope.takes(found) {
            return Why::OtherScope;
        }
        let slower = Why::Slower { mbps: found.mbps, fastest: fastest(inventory, scope) };
        let Some(spot) = inventory.spots.iter().find(|spot| spot.place == row.place) else {
            return if is_preferred { Why::Anywhere } else { slower };
        };
        let from = |nic: &Nic| Distance::between(&spot.at, &nic.at);
        let distance = from(found);
        if is_preferred {
            return Why::Nearest(distance);
        }
        let best = row.preferred().first().and_then(|best| inventory.nics.get(usize::from(*best)));
        let best = best.map_or(distance.nearness, |best| from(best).nearness);
        if distance.nearness == best {
            return slower;
        }
        Why::Farther { distance, best }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use crate::topology::{At, Filter, Medium, PciPath, Spot};
    use std::format;
    use std::string::String;
    use std::vec;
    use std::vec::Vec;

    fn at(path: &str, node: Option<u32>) -> At {
        At { pci: PciPath::of_sysfs(&format!("/sys/devices/{path}")), node }
    }

    fn nic(name: &str, path: &str, node: Option<u32>) -> Nic {
        Nic::new(name.parse().expect("a name"), Medium::Roce, at(path, node))
    }

    fn names<'a>(nics: &'a [Nic], indexes: &[u8]) -> Vec<&'a str> {
        indexes.iter().map(|nic| nics[usize::from(*nic)].name.as_str()).collect()
    }

    fn row_of(nics: &[Nic], spots: &[Spot], place: &str) -> (Vec<String>, Vec<String>) {
        let inventory = Inventory { nics, spots };
        let matrix = Matrix::discover(&inventory, Scope::Rdma, [Row::EMPTY; 16]).expect("room");
        let row = matrix.row(&place.parse().expect("a place")).expect("a row");
        let owned = |indexes: &[u8]| names(nics, indexes).into_iter().map(Into::into).collect();
        (owned(row.preferred()), owned(row.available()))
    }

    #[test]
    fn the_nic_behind_the_gpus_own_switch_is_preferred() {
        let nics = [
            nic("far", "pci0000:80/0000:80:02.0/0000:81:00.0", Some(1)),
            nic("node", "pci0000:30/0000:30:02.0/0000:31:00.0", Some(0)),
            nic("bridge", "pci0000:16/0000:16:04.0/0000:20:00.0", Some(0)),
            nic("switch", "pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", Some(0)),
        ];
        let gpu = at("pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.0", Some(0));
        let spots = [
            Spot { place: Place::cpu(0), at: at("", Some(0)) },
            Spot { place: Place::cpu(1), at: at("", Some(1)) },
            Spot { place: "cuda:0".parse().expect("a place"), at: gpu },
        ];
        let (preferred, available) = row_of(&nics, &spots, "cuda:0");
        assert_eq!((preferred, available), (vec!["switch".into()], vec!["bridge".into(), "node".into(), "far".into()]));
        let (preferred, available) = row_of(&nics, &spots, "cpu:0");
        assert_eq!(preferred, ["node", "bridge", "switch"]);
        assert_eq!(available, ["far"]);
        assert_eq!(row_of(&nics, &spots, "cpu:1").0, ["far"]);
    }

    #[test]
    fn a_machine_that_names_no_numa_node_prefers_every_nic() {
        let nics = [nic("a", "pci0000:00/0000:00:03.0", None), nic("b", "pci0000:00/0000:00:04.0", None)];
        let spots = [
            Spot { place: Place::cpu(0), at: at("", Some(0)) },
            Spot { place: "cuda:0".parse().expect("a place"), at: at("pci0000:00/0000:00:05.0", None) },
        ];
        for place in ["cpu:0", "cuda:0", "*"] {
            assert_eq!(row_of(&nics, &spots, place), (vec!["a".into(), "b".into()], vec![]), "{place}");
        }
    }

    #[test]
    fn the_order_in_which_nics_are_listed_changes_nothing() {
        let mut nics = [
            nic("a", "pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:02.0/0000:1b:00.0", Some(0)),
            nic("b", "pci0000:16/0000:16:04.0/0000:20:00.0", Some(0)),
            nic("c", "pci0000:80/0000:80:02.0/0000:81:00.0", Some(1)),
        ];
        let gpu = at("pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0/0000:19:00.0", Some(0));
        let spots = [Spot { place: "cuda:0".parse().expect("a place"), at: gpu }];
        let before = row_of(&nics, &spots, "cuda:0");
        nics.reverse();
        assert_eq!(row_of(&nics, &spots, "cuda:0"), before);
    }

    #[test]
    fn a_slow_nic_as_near_as_a_fast_one_is_a_fallback() {
        let nics = [
            nic("slow", "pci0000:00/0000:00:03.0", Some(0)).with_mbps(1_000),
            nic("fast", "pci0000:00/0000:00:04.0", Some(0)).with_mbps(100_000),
            nic("half", "pci0000:00/0000:00:05.0", Some(0)).with_mbps(50_000),
            nic("silent", "pci0000:00/0000:00:06.0", Some(0)),
        ];
        let spots = [Spot { place: Place::cpu(0), at: at("", Some(0)) }];
        for place in ["cpu:0", "*"] {
            let (preferred, available) = row_of(&nics, &spots, place);
            assert_eq!(preferred, ["fast", "half", "silent"], "{place}");
            assert_eq!(available, ["slow"]);
        }
        let inventory = Inventory { nics: &nics, spots: &spots };
        let matrix = Matrix::discover(&inventory, Scope::Rdma, [Row::EMPTY; 2]).expect("room");
        let why = matrix.why(&inventory, &matrix.rows()[0], 0);
        assert_eq!(why, Why::Slower { mbps: 1_000, fastest: 100_000 });
        let any = matrix.row(&Place::ANY).expect("made by itself");
        assert_eq!(matrix.why(&inventory, any, 0), why);
        assert_eq!(matrix.why(&inventory, any, 1), Why::Anywhere);
    }

    #[test]
    fn unfit_nics_are_in_no_line_and_have_their_reason() {
        let mut nics = [nic("up", "pci0000:00/0000:00:03.0", None), nic("denied", "pci0000:00/0000:00:04.0", None)];
        Filter { allow: &[], deny: &["denied"] }.apply(&mut nics).expect("no list of allowed ones");
        let spots = [Spot { place: Place::cpu(0), at: At::default() }];
        let inventory = Inventory { nics: &nics, spots: &spots };
        let matrix = Matrix::discover(&inventory, Scope::best(&inventory), [Row::EMPTY; 2]).expect("room");
        for row in matrix.rows() {
            assert_eq!((row.preferred(), row.available()), (&[0][..], &[][..]));
            let why = matrix.why(&inventory, row, 1);
            assert_eq!((why, why.verdict()), (Why::Unfit(Unfit::Denied), "unused"));
        }
        let net = Matrix::discover(&inventory, Scope::Net, [Row::EMPTY; 2]).expect("room");
        assert_eq!(net.why(&inventory, &net.rows()[0], 0), Why::OtherScope);
    }

    #[test]
    fn a_configured_matrix_is_taken_by_name_and_bad_ones_are_refused_whole() {
        let nics = [nic("a", "pci0000:00/0000:00:03.0", None), nic("b", "pci0000:00/0000:00:04.0", None)];
        let inventory = Inventory { nics: &nics, spots: &[] };
        let mut matrix = Matrix::configured([Row::EMPTY; 2]);
        matrix.add(&inventory, Place::cpu(0), ["b"], ["a"]).expect("good");
        let twice = MatrixError::TwiceInRow("a".parse().expect("a name"));
        assert_eq!(matrix.add(&inventory, Place::cpu(1), ["a"], ["b", "a"]), Err(twice));
        assert_eq!(matrix.add(&inventory, Place::cpu(0), ["a"], []), Err(MatrixError::TwiceInMatrix(Place::cpu(0))));
        let unknown = MatrixError::UnknownNic("c".parse().expect("a name"));
        assert_eq!(matrix.add(&inventory, Place::cpu(1), ["a"], ["c"]), Err(unknown));
        assert_eq!(matrix.rows().len(), 1, "what was refused left nothing behind");
        let row = matrix.row(&Place::cpu(0)).expect("its line");
        assert_eq!((row.preferred(), row.available()), (&[1][..], &[0][..]));
        assert_eq!(matrix.why(&inventory, row, 1).verdict(), "preferred");
        assert!(matrix.row(&Place::cpu(1)).is_none(), "no line of its own, and none for `*`");
        matrix.add(&inventory, Place::ANY, [], ["a"]).expect("room for one more");
        let full = MatrixError::TooManyRows { rows_max: 2 };
        assert_eq!(matrix.add(&inventory, Place::cpu(2), ["a"], []), Err(full));
        assert_eq!(matrix.row(&Place::cpu(1)).expect("that of `*`").available(), [0]);
    }

    #[test]
    fn nics_beyond_the_bound_are_left_out_aloud() {
        let many: Vec<Nic> =
            (0..NICS_MAX + 2).map(|at| nic(&format!("n{at}"), "pci0000:00/0000:00:03.0", None)).collect();
        let inventory = Inventory { nics: &many, spots: &[] };
        let matrix = Matrix::discover(&inventory, Scope::Rdma, [Row::EMPTY; 1]).expect("room");
        let row = &matrix.rows()[0];
        assert_eq!(row.preferred().len(), NICS_MAX);
        assert_eq!(matrix.why(&inventory, row, 64), Why::TooMany);
    }
}
