//! Files of this engine: opened here, moved by the `file` backend, named by tokens like memory.
//!
//! The engine's files are a peer of their own kind: it has one path, a link of the `file` backend, so that batches, classes,
//! windows and endings are what they are for every peer; a path that is lost is dialled again, by opening the next link. [`Engine::attach`] of a file's token to the engine itself leads
//! there. The device is made with the first file. A peer's file is moved by the peer: see [`Stager`](super::Stager).

use std::path::PathBuf;
use std::sync::Arc;

use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
pub use millpond_hal::backend::file::DriverInfo;
use millpond_hal::backend::file::{FileDevice, FileDeviceError, FileDeviceOptions};
use millpond_hal::contract::{Connection, LaneSide};
use millpond_hal::fabric::{FabricError, LinkOptions};
pub use millpond_hal::fabric::{FileGrant, FileRegion};
pub use millpond_hal::file::{Caching, FileAccess, FileError, FileOptions, OpenFile};

use super::batch::Via;
use super::grant::GrantErrorKind;
use super::options::Options;
use super::peer::PeerInner;
use super::peers::{Lane, path_of};
use super::shard::{Files, Shard};
use super::{AllocateError, Engine, Rights};
use crate::runtime::{Runtime, blocking};
use crate::session::Permit;

/// A disk may be busy for longer than a network is silent.
const PROGRESS_DEADLINE: Duration = Duration::from_secs(30);

/// A file was not opened by an engine.
///
/// ```
/// use millpond_node::engine::{FileError, OpenFileError};
/// let error = OpenFileError::from(FileError::InUse { path: "kv.segment".into() });
/// assert!(error.to_string().contains("open for writing already"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenFileError {
    /// The file itself.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is no way to the kernel.
    #[error(transparent)]
    Device(#[from] FileDeviceError),
    /// The engine has no room for the device.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The table of regions is full.
    #[error(transparent)]
    Regions(#[from] AllocateError),
    /// The table of peers is full, or a link of the file backend could not be opened.
    #[error("the engine has no room for files: {why}")]
    Full {
        /// What is full.
        why: &'static str,
    },
    /// The engine was shut down.
    #[error("the engine was shut down")]
    ShutDown,
}

impl<R: Runtime> Engine<R> {
    /// Opens or makes a file, which becomes a region of this engine: grant ranges of it, attach the token to
    /// [the engine itself](Engine::itself), and read and write them in batches. `Done` means visible to every reader of the
    /// file here; durable after [`OpenFile::sync`]. Closed when the last handle, grant and request of it are gone.
    pub async fn open_file(&self, path: impl Into<PathBuf>, options: FileOptions) -> Result<FileRegion, OpenFileError> {
        if self.core.is_shut_down() {
            return Err(OpenFileError::ShutDown);
        }
        let path = path.into();
        let file = blocking(&self.runtime, move || OpenFile::open(&path, options)).await?;
        let opened = self.core.locked(|shard| {
            shard.files(&self.core.options, self.core.now())?;
            Ok(shard.fabric.add_file(file)?)
        });
        self.core.kick();
        opened
    }

    /// Lets whoever has the token read or write these `(offset, len)` ranges of a file, until the grant is dropped.
    pub fn grant_file(
        &self,
        file: &FileRegion,
        ranges: &[(u64, u64)],
        rights: Rights,
    ) -> Result<FileGrant, GrantErrorKind> {
        if self.core.is_shut_down() {
            return Err(GrantErrorKind::ShutDown);
        }
        Ok(self.core.locked(|shard| shard.fabric.grant_file(file, ranges, rights))?)
    }

    /// How files reach the kernel; `None` before the first was opened.
    #[must_use]
    pub fn files_driver(&self) -> Option<DriverInfo> {
        self.core.locked(|shard| shard.files.as_ref().map(|files| files.driver))
    }
}

impl Shard {
    /// The engine's files as a peer, made when they are first needed.
    pub(super) fn files(&mut self, options: &Options, now: Instant) -> Result<Handle, OpenFileError> {
        if let Some(files) = &self.files {
            return Ok(files.peer);
        }
        let full = |why| OpenFileError::Full { why };
        let device = FileDevice::new(FileDeviceOptions::default())?;
        let driver = device.driver();
        if let Some(code) = driver.uring_refused {
            tracing::warn!(code, "io_uring is refused here; files are moved by threads that block, which is slower");
        }
        let device = self.fabric.add_device(Box::new(device))?;
        let identity = options.identity;
        let inner = |key| Arc::new(PeerInner { is_files: true, ..PeerInner::new(key, identity, None, true) });
        let peer = self.add_peer(inner, options, now).ok_or(full("all peers are in use"))?;
        self.files = Some(Files { device, peer, driver });
        self.open_files_lane(now);
        match self.peers.get(peer) {
            Some(entry) if entry.has_lanes() => Ok(peer),
            _ => Err(full("no link of the file backend could be opened")),
        }
    }

    /// Who stands for the files, if there are any.
    pub(super) fn files_peer(&self) -> Option<Arc<PeerInner>> {
        let files = self.files.as_ref()?;
        self.peers.get(files.peer).map(|peer| Arc::clone(&peer.inner))
    }

    /// The one lane of the files, at first and after a disk that stood still. What went over the last one is the kernel's
    /// no more once its ticket ends, so a new one fences it as a peer's answer does.
    pub(super) fn open_files_lane(&mut self, now: Instant) {
        let Some(Files { device, peer, .. }) = self.files else { return };
        let (Some(path), Some(entry)) = (path_of(LaneSide::Dialed, 0), self.peers.get_mut(peer)) else { return };
        let with = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
        let Ok(link) = self.fabric.open(now, device, Connection::Loopback, with) else {
            return self.brain.on_dial_failed(now, entry.brain, path);
        };
        self.links.insert(link, (peer, path));
        let generation = self.brain.on_open(now, entry.brain, path);
        self.statistics.lanes_open += 1;
        let (via, _permit, _session) = (Via::File, Permit::default(), None);
        entry.lanes[path.index()] = Some(Lane { link, via, generation, _permit, _session });
    }
}
