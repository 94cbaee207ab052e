//! Files of this engine: opened here, moved by the `file` backend, named by tokens like memory.
//!
//! The engine's files are a peer of their own kind (see `own`), with one path, a link of the `file` backend. [`Engine::attach`]
//! of a file's token to the engine itself leads there. The device is made with the first file. A peer's file is moved by the peer: see [`Stager`](super::Stager).

use std::path::PathBuf;

use millpond_core::time::Instant;
pub use millpond_hal::backend::file::DriverInfo;
use millpond_hal::backend::file::{FileDevice, FileDeviceError, FileDeviceOptions};
use millpond_hal::fabric::FabricError;
pub use millpond_hal::fabric::{FileGrant, FileRegion};
pub use millpond_hal::file::{Caching, FileAccess, FileError, FileOptions, OpenFile};

use super::batch::Via;
use super::grant::GrantErrorKind;
use super::options::Options;
use super::own::NoOwn;
use super::shard::Shard;
use super::{AllocateError, Engine, Rights};
use crate::runtime::{Runtime, blocking};

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
        self.core.locked(|shard| shard.files_driver)
    }
}

impl Shard {
    /// The backend of the engine's files, made when it is first needed.
    pub(super) fn files(&mut self, options: &Options, now: Instant) -> Result<(), OpenFileError> {
        if self.files_driver.is_some() {
            return Ok(());
        }
        let device = FileDevice::new(FileDeviceOptions::default())?;
        let driver = device.driver();
        if let Some(code) = driver.uring_refused {
            tracing::warn!(code, "io_uring is refused here; files are moved by threads that block, which is slower");
        }
        self.add_own(Via::File, Box::new(device), options, now).map_err(|error| match error {
            NoOwn::Fabric(error) => OpenFileError::Fabric(error),
            NoOwn::Full(why) => OpenFileError::Full { why },
        })?;
        self.files_driver = Some(driver);
        Ok(())
    }
}
