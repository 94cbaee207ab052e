//! Work on a device that a batch waits for.

use core::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A point in somebody's stream of work on a device: what was put in before it has to be done before a batch that waits for it
/// starts ([`Batch::after`](crate::fabric::Batch::after)). It is passed once, and stays so.
///
/// Example: `verify/fake-cuda/tests/unproven/order.rs`.
pub trait Fence: Debug + Send + Sync {
    /// Where the work is. Never waits.
    fn state(&self) -> FenceState;

    /// Has one added to the eventfd once the fence is passed or failed, at about that time: a hint to look, and no promise.
    /// `false` if nothing will be: look by time instead. Asked again it need not do more.
    fn notify(&self, wake: &Arc<OwnedFd>) -> bool;
}

/// Where the work before a fence is.
///
/// Example: `verify/fake-cuda/tests/unproven/order.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceState {
    /// Not done.
    Pending,
    /// Done.
    Passed,
    /// It will not be: its device failed. A batch that waits for it is refused and moves nothing.
    Failed,
}
