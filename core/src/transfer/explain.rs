//! Why a job took the paths it took.
//!
//! Written while the scheduler chooses, read when the job is over; it never takes part in a choice.

use super::{PATHS_PER_PEER_MAX, PathId};

/// What was last thought of one path when a slice of the job was placed.
///
/// ```
/// use millpond_core::transfer::Verdict;
/// assert_eq!(Verdict::Backoff.to_string(), "left alone after failures");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// It was not looked at: the peer has no such path, or it was not asked for.
    #[default]
    Unseen,
    /// It was taken.
    Chosen,
    /// Another one of the same rank was done sooner.
    Slower,
    /// A better transport worked.
    WorseRank,
    /// Its window, its device or the receiver's credit was full.
    Full,
    /// It was not open.
    NotOpen,
    /// Its breaker was open.
    Backoff,
    /// The slice had failed there.
    Tried,
}

impl core::fmt::Display for Verdict {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Unseen => "not considered",
            Self::Chosen => "chosen",
            Self::Slower => "another was done sooner",
            Self::WorseRank => "a better transport worked",
            Self::Full => "full",
            Self::NotOpen => "not connected",
            Self::Backoff => "left alone after failures",
            Self::Tried => "tried before",
        })
    }
}

/// Why the last slice went where it went.
///
/// ```
/// use millpond_core::transfer::Why;
/// assert_eq!(Why::Nowhere.to_string(), "no path was open");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// It went nowhere.
    #[default]
    Nowhere,
    /// The best transport that was open had one path.
    Best,
    /// Of several it would be done there soonest.
    Soonest,
    /// To see whether a path works again.
    Probe,
    /// Again over the same path.
    SamePath,
    /// Again over another path of the transport.
    OtherPath,
    /// Again over another transport.
    OtherTransport,
}

impl core::fmt::Display for Why {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Nowhere => "no path was open",
            Self::Best => "the best path that was open",
            Self::Soonest => "the path that would be done soonest",
            Self::Probe => "to see whether the path works again",
            Self::SamePath => "again over the same path",
            Self::OtherPath => "again over another path of the transport",
            Self::OtherTransport => "again over another transport",
        })
    }
}

/// What became of one job: paths considered, slices per path, retries.
///
/// ```
/// use millpond_core::transfer::{Explanation, PathId, Verdict};
/// let never_sent = Explanation::default();
/// let path = PathId::new(0).unwrap();
/// assert_eq!((never_sent.slices(path), never_sent.verdict(path)), (0, Verdict::Unseen));
/// assert_eq!(never_sent.paths().count(), 0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    pub(super) slices: [u16; PATHS_PER_PEER_MAX],
    pub(super) verdicts: [Verdict; PATHS_PER_PEER_MAX],
    pub(super) why: Why,
    pub(super) retries: u32,
    pub(super) detours: u32,
}

impl Explanation {
    /// Slices that were posted over `path`, attempts included; at most `u16::MAX` are counted.
    #[must_use]
    pub fn slices(&self, path: PathId) -> u16 {
        self.slices[path.index()]
    }

    /// What was last thought of `path`.
    #[must_use]
    pub fn verdict(&self, path: PathId) -> Verdict {
        self.verdicts[path.index()]
    }

    /// The paths that were considered, with the last verdict and the slices that went there.
    pub fn paths(&self) -> impl Iterator<Item = (PathId, Verdict, u16)> + '_ {
        let all = (0..PATHS_PER_PEER_MAX).filter_map(PathId::new);
        let seen = all.map(|path| (path, self.verdict(path), self.slices(path)));
        seen.filter(|(_, verdict, slices)| *verdict != Verdict::Unseen || *slices > 0)
    }

    /// Why the last slice went where it went.
    #[must_use]
    pub const fn why(&self) -> Why {
        self.why
    }

    /// Slices that were posted again.
    #[must_use]
    pub const fn retries(&self) -> u32 {
        self.retries
    }

    /// Slices that went over a transport although the peer has a better one.
    #[must_use]
    pub const fn detours(&self) -> u32 {
        self.detours
    }
}
