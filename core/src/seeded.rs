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
    /// `transfer::grant`: a sender is told of bytes and never of slices.
    GrantForgetsSlices,
    /// `transfer::grant`: what was granted shrinks with the share.
    GrantShrinks,
    /// `transfer::grant`: what is not answered yet is granted again.
    GrantCountsAsked,
    /// `transfer::grant`: a sender may send more than it was granted.
    GrantTakesOverruns,
    /// `transfer`: a slice to be tried again is forgotten.
    TransferForgetsRetry,
    /// `transfer`: a slice that may not be repeated is.
    TransferRepeatsOnce,
    /// `sched::feed`: pages are taken although events are missing.
    FeedMissesGap,
    /// `sched::feed`: what a node had is still known when it left.
    FeedKeepsLeft,
    /// `sched::feed`: the position stays where it was.
    FeedStaysBehind,
    /// A router's follower believes for good what it knew of a directory that is gone.
    FollowerBelievesForGood,
    /// A router's follower waits for a directory that says nothing.
    FollowerWaitsForGood,
    /// A router's follower does not count what was not found.
    FollowerHidesMissing,
    /// A decode node's door lets whoever asks go before those who came first.
    DoorForgetsOrder,
    /// A decode node's door holds prompts for good.
    DoorHoldsForGood,
    /// A decode node's door still counts those who left.
    DoorKeepsSeats,
    /// A decode node's door asks only the newcomer's deadline.
    DoorForgetsOthers,
    /// A decode node's door wakes nobody.
    DoorWakesNobody,
}

/// Whether `bug` is switched on for this thread.
#[cfg(not(feature = "seeded-bugs"))]
#[must_use]
pub const fn on(_bug: Bug) -> bool {
    false
}

#[cfg(feature = "seeded-bugs")]
std::thread_local! {
    static SELECTED: core::cell::Cell<Option<Bug>> = const { core::cell::Cell::new(None) };
}

/// Whether `bug` is switched on for this thread.
#[cfg(feature = "seeded-bugs")]
#[must_use]
pub fn on(bug: Bug) -> bool {
    SELECTED.get() == Some(bug)
}

/// Switches `bug` on for this thread, or all bugs off.
#[cfg(feature = "seeded-bugs")]
pub fn select(bug: Option<Bug>) {
    SELECTED.set(bug);
}
