//! Why a command failed.

use crate::config::ConfigError;
use crate::engine;
use crate::http::FetchError;
use crate::node::NodeError;
use crate::serve::ServeError;

use super::cluster::ClusterError;
use super::store_cmds::CommandError;

/// Why a command failed; exit code 1, or 64 for [`Failure::Usage`].
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The node.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// A node for the command itself.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Its engine.
    #[error("the transfer engine cannot start: {0}")]
    Engine(#[from] engine::StartError),
    /// The store.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cluster that `up` started.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A node's HTTP port.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// A measurement.
    #[error(transparent)]
    Bench(#[from] super::bench::Error),
    /// The system.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// Its answer.
        source: std::io::Error,
    },
    /// Anything else that is said in one sentence.
    #[error("{0}")]
    Said(String),
    /// The command line makes no sense.
    #[error("{0}")]
    Usage(String),
    /// Ctrl-C or SIGTERM.
    #[error("interrupted")]
    Interrupted,
}

impl Failure {
    /// `what` was tried and the system answered with an error.
    pub(super) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}

impl From<crate::client::ClientError> for Failure {
    fn from(error: crate::client::ClientError) -> Self {
        Self::Command(error.into())
    }
}
