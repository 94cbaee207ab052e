//! What is said to a caller whose batch was not started.

use millpond_core::time::Duration;

use super::batch::{Batch, Via};

/// A batch that was not started; it comes back as it was.
///
/// ```
/// use millpond_node::engine::{Batch, SubmitError, SubmitErrorKind};
/// let refused = SubmitError { kind: SubmitErrorKind::Empty, batch: Batch::new() };
/// assert!(refused.to_string().contains("add a read or a write"));
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct SubmitError {
    /// Why.
    pub kind: SubmitErrorKind,
    /// What was handed in.
    pub batch: Batch,
}

/// Why a batch was not started.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_node::engine::SubmitErrorKind;
/// let busy = SubmitErrorKind::Busy { retry_after: Duration::from_millis(2) };
/// assert!(busy.to_string().contains("again in 2ms"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitErrorKind {
    /// It has no requests.
    #[error("the batch is empty; add a read or a write")]
    Empty,
    /// A bound was reached.
    #[error("too much is under way; try again in {retry_after}")]
    Busy {
        /// When there is likely to be room.
        retry_after: Duration,
    },
    /// It is larger than any queue.
    #[error("the batch moves {bytes} bytes, and the bound per peer is {bytes_max}; cut it into several")]
    TooLarge {
        /// Its bytes.
        bytes: u64,
        /// The bound.
        bytes_max: u64,
    },
    /// The transport named does not reach a peer of the batch.
    #[error("{via} does not reach this peer ({why}); use `auto` or another transport")]
    NoPath {
        /// The transport.
        via: Via,
        /// Why not.
        why: &'static str,
    },
    /// Memory of the batch belongs to another engine.
    #[error("a buffer of the batch is not registered with this engine; allocate it there")]
    ForeignRegion,
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
    /// This process is a forked child of the one that started the engine: nothing of it works here.
    #[error("this process was forked from the one whose engine it is; start another engine here")]
    Forked,
}
