//! The cluster that `up` started, as other commands find it: a file in the user's runtime directory.
//!
//! The file holds the cluster's key, so only its owner may read it, and a file or folder of somebody else is refused.

use std::fs;
use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, getuid, test_kill_process};
use serde::{Deserialize, Serialize};

use crate::session::{SessionError, Target};
use crate::tls::{Files, Tls, TlsError};

/// Names another cluster file.
pub(super) const VARIABLE: &str = "MILLPOND_CLUSTER";

/// Where to find the cluster.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct At {
    /// The node with the store's directory, host:port, instead of the cluster that `up` started.
    #[arg(long, value_name = "HOST:PORT", value_parser = target)]
    pub(super) node: Option<Target>,
    /// The cluster's key; only with --node. Better in the environment than in the list of processes.
    #[arg(
        id = "cluster-key",
        long = "key",
        value_name = "KEY",
        env = "MILLPOND_NODE_KEY",
        hide_env_values = true,
        default_value = ""
    )]
    pub(super) key: String,
    #[command(flatten)]
    pub(super) tls: TlsArgs,
}

/// Certificates of a cluster whose nodes have a section [tls]; all three, and only with --node.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct TlsArgs {
    /// This command's certificate, of the cluster's CA.
    #[arg(long = "tls-cert-file", value_name = "FILE", env = "MILLPOND_TLS_CERT_FILE", requires_all = ["key_file", "ca_file"])]
    cert_file: Option<PathBuf>,
    /// Its private key.
    #[arg(long = "tls-key-file", value_name = "FILE", env = "MILLPOND_TLS_KEY_FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// The cluster's CA.
    #[arg(long = "tls-ca-file", value_name = "FILE", env = "MILLPOND_TLS_CA_FILE", requires = "cert_file")]
    ca_file: Option<PathBuf>,
}

impl TlsArgs {
    /// What they stand for, if they are given.
    pub(super) fn load(&self) -> Result<Option<Tls>, TlsError> {
        match (&self.cert_file, &self.key_file, &self.ca_file) {
            (Some(cert), Some(key), Some(ca)) => Tls::load(&Files::new(cert, key, ca)).map(Some),
            _ => Ok(None),
        }
    }

    /// The arguments again, for another process of this program.
    pub(super) fn as_args(&self) -> Vec<String> {
        let flags = [
            ("--tls-cert-file", &self.cert_file),
            ("--tls-key-file", &self.key_file),
            ("--tls-ca-file", &self.ca_file),
        ];
        let given =
            flags.into_iter().filter_map(|(flag, path)| Some([flag.to_owned(), path.as_ref()?.display().to_string()]));
        given.flatten().collect()
    }
}

fn target(text: &str) -> Result<Target, String> {
    Target::parse(text).map_err(|error| error.to_string())
}

/// A cluster on this machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Cluster {
    /// The process that looks after it.
    pub(super) pid: i32,
    /// The router's HTTP port.
    pub(super) http: SocketAddr,
    /// The node with the store's directory; empty without a store.
    pub(super) directory: String,
    /// The key its nodes share.
    pub(super) key: String,
    /// Its nodes.
    pub(super) nodes: Vec<Node>,
}

/// A node of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Node {
    /// Its name.
    pub(super) name: String,
    /// Its node port.
    pub(super) address: String,
    /// Its HTTP port.
    pub(super) http: SocketAddr,
}

/// Why there is no cluster to talk to.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClusterError {
    #[error("no cluster runs here ({path} is not there); start one with `millpond up`, or name a node with --node")]
    None { path: String },
    #[error("the cluster of {path} is gone (process {pid} ended); start one with `millpond up`")]
    Gone { path: String, pid: i32 },
    #[error("{path} cannot be used ({reason}); set XDG_RUNTIME_DIR, MILLPOND_CLUSTER or --data to a place of your own")]
    Unusable { path: String, reason: String },
    #[error("the cluster was started with --no-store; there is nothing to put into or get from")]
    NoStore,
    #[error("the cluster's directory: {0}")]
    Directory(#[from] SessionError),
}

/// The folder of this user's running clusters: in the runtime directory if there is one, else under /tmp.
pub(super) fn run_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("millpond"),
        None => PathBuf::from(format!("/tmp/millpond-{}", getuid().as_raw())),
    }
}

/// Where the file lies: `MILLPOND_CLUSTER`, or the user's runtime directory.
fn path() -> PathBuf {
    let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    named.map_or_else(|| run_dir().join("cluster.json"), PathBuf::from)
}

fn unusable(path: &Path, reason: impl ToString) -> ClusterError {
    ClusterError::Unusable { path: path.display().to_string(), reason: reason.to_string() }
}

/// Makes a folder that only this user can look into.
pub(super) fn private_dir(dir: &Path) -> Result<(), ClusterError> {
    let failed = |error: std::io::Error| unusable(dir, error);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    let facts = fs::symlink_metadata(dir).map_err(failed)?;
    if facts.uid() != getuid().as_raw() || !facts.is_dir() {
        return Err(unusable(dir, "it belongs to somebody else"));
    }
    if facts.permissions().mode() & 0o077 != 0 {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(failed)?;
    }
    Ok(())
}

/// Writes a file that only this user can read; whole, or not at all.
pub(super) fn private_file(path: &Path, text: &str) -> Result<(), ClusterError> {
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    // What an earlier process of this number left; a link that somebody planted is not followed either.
    let _ = fs::remove_file(&fresh);
    let write = || {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&fresh);
        unusable(path, error)
    })
}

impl Cluster {
    /// Leaves the cluster's address for other commands, in a folder that is there.
    pub(super) fn write(&self) -> Result<(), ClusterError> {
        let path = path();
        let text = serde_json::to_string_pretty(self).map_err(|error| unusable(&path, error))?;
        private_file(&path, &text)
    }

    /// Takes the address back, if it is still this cluster's.
    pub(super) fn remove(&self) {
        if Self::parse(&path()).is_ok_and(|there| there.pid == self.pid) {
            // Somebody else removed it first, or will find it stale.
            let _ = fs::remove_file(path());
        }
    }

    fn parse(path: &Path) -> Result<Self, ClusterError> {
        let shown = path.display().to_string();
        let facts = match fs::symlink_metadata(path) {
            Ok(facts) => facts,
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(ClusterError::None { path: shown }),
            Err(error) => return Err(unusable(path, error)),
        };
        if facts.uid() != getuid().as_raw() {
            return Err(unusable(path, "it belongs to somebody else"));
        }
        let text = fs::read_to_string(path).map_err(|error| unusable(path, error))?;
        serde_json::from_str(&text).map_err(|error| unusable(path, error))
    }

    /// The running cluster.
    pub(super) fn find() -> Result<Self, ClusterError> {
        let path = path();
        let cluster = Self::parse(&path)?;
        let is_alive = Pid::from_raw(cluster.pid).is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH));
        if !is_alive {
            return Err(ClusterError::Gone { path: path.display().to_string(), pid: cluster.pid });
        }
        Ok(cluster)
    }
}

impl At {
    /// The directory to talk to, and the cluster's key.
    pub(super) fn directory(&self) -> Result<(Target, String), ClusterError> {
        if let Some(node) = &self.node {
            return Ok((node.clone(), self.key.clone()));
        }
        let cluster = Cluster::find()?;
        if cluster.directory.is_empty() {
            return Err(ClusterError::NoStore);
        }
        Ok((Target::parse(&cluster.directory)?, cluster.key))
    }
}
