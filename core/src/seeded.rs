//! Bugs that can be switched on, so that a checker can be shown to find them.
//!
//! Without the feature `seeded-bugs` the question is answered `false` at compile time and nothing of this is left in the
//! program. With it, a test selects at most one bug for its own thread.

/// One deliberate bug.
///
/// Example: `verify/tests/structures.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bug {
    /// `extent`: a freed range is not joined with a free range before it.
    ExtentForgetsToCoalesce,
    /// `extent`: alignment is ignored where the first fitting range is not aligned itself.
    ExtentIgnoresAlignment,
    /// `page`: freeing a page leaves its epoch alone, so an old handle stays good.
    PageKeepsEpoch,
    /// `page`: a leased page may be freed.
    PageFreesLeased,
    /// `prefix`: splitting a run forgets who holds its head.
    PrefixSplitLosesHolder,
    /// `prefix`: eviction takes no notice of pins.
    PrefixEvictsPinned,
    /// `batch`: neighbours join when only their sources continue each other.
    BatchCoalescesOneSide,
    /// `batch`: the last piece of a split keeps the whole length.
    BatchSplitOverlaps,
    /// `sched::index`: what a holder held stays known when it is cleared.
    IndexKeepsCleared,
    /// `sched::index`: a column is given away before the last block has lost it.
    IndexReusesColumnEarly,
    /// `sched::index`: events of an earlier life are taken.
    IndexTakesOldLife,
    /// `sched::index`: a missing event is not noticed.
    IndexMissesGap,
    /// `sched::index`: blocks that share a set lose a holder together.
    IndexChangesSharedSet,
    /// `quiet`: frames of replaced lanes are admitted.
    QuietSkipsLaneCheck,
    /// `quiet`: frames that name fenced or freed memory are admitted.
    QuietSkipsFenceCheck,
    /// `quiet`: memory that a direct lane still reaches is freed.
    QuietFreesExposed,
    /// `transfer`: a piece that was cut off a larger request counts twice.
    TransferCountsBytesTwice,
    /// `transfer`: a completion of an earlier attempt ends the present one.
    TransferTakesStaleCompletions,
    /// `transfer`: a job that is ended is over while slices of it are posted.
    TransferEndsBeforeQuiet,
    /// `transfer`: writes do not wait until a lost path is fenced, and what arrived does not either.
    TransferSkipsFence,
    /// `transfer`: what failed is still counted as under way.
    TransferLeaksWindow,
    /// `transfer`: slices are posted without the receiver's credit.
    TransferIgnoresCredit,
    /// `transfer`: a slice to be tried again is forgotten.
    TransferForgetsRetry,
    /// `transfer`: a slice that may not be repeated is.
    TransferRepeatsOnce,
}

/// Whether `bug` is switched on for this thread.
#[cfg(not(feature = "seeded-bugs"))]
pub(crate) const fn on(_bug: Bug) -> bool {
    false
}

#[cfg(feature = "seeded-bugs")]
std::thread_local! {
    static SELECTED: core::cell::Cell<Option<Bug>> = const { core::cell::Cell::new(None) };
}

/// Whether `bug` is switched on for this thread.
#[cfg(feature = "seeded-bugs")]
pub(crate) fn on(bug: Bug) -> bool {
    SELECTED.get() == Some(bug)
}

/// Switches `bug` on for this thread, or all bugs off.
#[cfg(feature = "seeded-bugs")]
pub fn select(bug: Option<Bug>) {
    SELECTED.set(bug);
}
