//! A directory whose files a node publishes: opened by name for peers, with the rights that its operator gave.
//!
//! A name is one component of a path and begins with no dot, so nothing outside of the directory is reached but what its
//! operator linked there. It is not a file system: there is no listing, no renaming, no removing. Invariants: at most
//! `open_max` files are open at a time, the one unused for longest makes room; a file that peers may write is open once; who
//! asked to read has a token that does not write; a name that leads to another file by now is opened again.

use std::path::PathBuf;
use std::sync::Arc;

use futures::lock::Mutex;
use millpond_core::wire::message::file::{METHOD_OPEN, NAME_LEN_MAX, OpenReply, OpenRequest};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::FileService;
use crate::engine::{FileAccess, FileError, FileOptions, FileRegion, OpenFileError, RegionToken, Rights};
use crate::rpc::{Context, Reason, Refusal, Router};
use crate::runtime::{Runtime, blocking};

/// What peers may do with the files of a directory; each is more than the one before.
///
/// ```
/// use millpond_node::files::FolderRights;
/// assert!(FolderRights::Create > FolderRights::Write && FolderRights::Write > FolderRights::Read);
/// assert_eq!("write".parse(), Ok(FolderRights::Write));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FolderRights {
    /// Read them.
    #[default]
    Read,
    /// Change their bytes too, within their lengths.
    Write,
    /// Make new ones too.
    Create,
}

impl std::str::FromStr for FolderRights {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "read" => Ok(Self::Read),
            "write" => Ok(Self::Write),
            "create" => Ok(Self::Create),
            _ => Err(format!("{name:?} is none of read, write, create")),
        }
    }
}

/// What a node publishes, and how much of it at a time.
///
/// ```
/// use millpond_node::files::{FolderOptions, FolderRights};
/// let options = FolderOptions::new("/srv/kv");
/// assert_eq!(options.rights, FolderRights::Read);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FolderOptions {
    /// Where the files are.
    pub directory: PathBuf,
    /// What peers may do with them. Default: read.
    pub rights: FolderRights,
    /// Files open at a time. Default: 64.
    pub open_max: usize,
    /// Bytes of a file that a peer makes, at most. Default: 64 GiB.
    pub len_max: u64,
    /// Names in the directory, from which on peers make no more. Default: 1024.
    pub files_max: usize,
}

impl FolderOptions {
    /// That directory, to be read.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        let (rights, open_max, len_max, files_max) = (FolderRights::Read, 64, 64 << 30, 1024);
        Self { directory: directory.into(), rights, open_max, len_max, files_max }
    }
}

/// A published directory. Clones are handles of the same one.
///
/// Example: `verify/tests/engine_file.rs` (`Folder`).
#[derive(Clone, Debug)]
pub struct Folder<R> {
    service: FileService<R>,
    options: Arc<FolderOptions>,
    /// Held while one is opened, so that none is opened twice.
    opened: Arc<Mutex<Vec<Opened>>>,
}

#[derive(Debug)]
struct Opened {
    name: String,
    access: FileAccess,
    file: FileRegion,
    token: RegionToken,
}

impl<R: Runtime> Folder<R> {
    /// Publishes a directory; its files are moved by `service`.
    #[must_use]
    pub fn new(service: FileService<R>, options: FolderOptions) -> Self {
        Self { service, options: Arc::new(options), opened: Arc::default() }
    }

    /// The methods of the directory and of its service, for the node port.
    #[must_use]
    pub fn router(&self) -> Router {
        let folder = self.clone();
        self.service.router().call(METHOD_OPEN, move |_: Context, request: OpenRequest| {
            let folder = folder.clone();
            async move { folder.open(request).await }
        })
    }

    /// Opens a file, or makes one, for whoever asks.
    ///
    /// # Errors
    /// The name is none, or of no file; the rights do not allow it; there is no room.
    pub async fn open(&self, request: OpenRequest) -> Result<OpenReply, Refusal> {
        let access = self.access(&request)?;
        let mut opened = self.opened.lock().await;
        let is_it = |one: &Opened| one.name == request.name && one.access == access;
        if let Some(known) = opened.iter().find(|one| is_it(one)) {
            if known.file.file().is_at_its_name() && !known.file.file().is_truncated() {
                return Ok(OpenReply { token: known.token.as_bytes().to_vec(), len: known.token.len });
            }
            self.service.withdraw(&known.token);
            opened.retain(|one| !is_it(one));
        }
        while opened.len() >= self.options.open_max.max(1) {
            let Some(oldest) = self.service.least_used(opened.iter().map(|one| &one.token)) else { break };
            self.service.withdraw(&oldest);
            opened.retain(|one| one.token.region != oldest.region);
        }
        let (file, token) = self.open_file(&request, access).await?;
        opened.push(Opened { name: request.name, access, file, token });
        Ok(OpenReply { token: token.as_bytes().to_vec(), len: token.len })
    }

    /// What is to be done with it, if that may be asked for.
    fn access(&self, request: &OpenRequest) -> Result<FileAccess, Refusal> {
        let name = &request.name;
        let is_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        if !is_name || name.len() > NAME_LEN_MAX {
            let why = format!("{name:?} is no name of a published file: one has no `/`, and no dot first");
            return Err(Refusal::new(Reason::Malformed, why));
        }
        let needed = match (request.writes, request.create_len) {
            (false, 0) => FolderRights::Read,
            (false, _) => return Err(Refusal::new(Reason::Malformed, "a file that is made is to be written")),
            (true, 0) => FolderRights::Write,
            (true, _) => FolderRights::Create,
        };
        if needed > self.options.rights {
            let why = format!("`files.rights` here is {:?}, and this takes {needed:?}", self.options.rights);
            return Err(Refusal::new(Reason::Denied, why.to_lowercase()));
        }
        if request.create_len > self.options.len_max {
            let why = format!("files made here have at most {} bytes (`files.len_max`)", self.options.len_max);
            return Err(Refusal::new(Reason::Full, why));
        }
        Ok(if request.writes { FileAccess::ReadWrite } else { FileAccess::ReadOnly })
    }

    async fn open_file(&self, request: &OpenRequest, access: FileAccess) -> Result<(FileRegion, RegionToken), Refusal> {
        let path = self.options.directory.join(&request.name);
        let engine = &self.service.engine;
        let (options, rights) = match access {
            FileAccess::ReadOnly => (FileOptions::read_only(), Rights::REMOTE_READ),
            FileAccess::ReadWrite => (FileOptions::read_write(), Rights::REMOTE_READ | Rights::REMOTE_WRITE),
        };
        let file = match engine.open_file(path.clone(), options).await {
            Err(error) if request.create_len > 0 && refusal(&error).reason == Reason::NotFound => {
                self.check_room().await?;
                engine.open_file(path, FileOptions::create(request.create_len)).await
            }
            opened => opened,
        };
        let file = file.map_err(|error| refusal(&error))?;
        let grant = engine.grant_file(&file, &[(0, file.len())], rights);
        let grant = grant.map_err(|error| Refusal::new(Reason::Full, error.to_string()))?;
        Ok((file, self.service.publish(grant)))
    }

    /// Whether one more may be made.
    async fn check_room(&self) -> Result<(), Refusal> {
        let (directory, files_max) = (self.options.directory.clone(), self.options.files_max);
        let count = blocking(self.service.engine.runtime(), move || {
            std::fs::read_dir(directory).map(|entries| entries.take(files_max).count())
        });
        let count = count.await.map_err(|error| Refusal::new(Reason::Failed, error.to_string()))?;
        if count >= files_max {
            let why = format!("the directory has {files_max} files (`files.files_max`), and takes no more");
            return Err(Refusal::new(Reason::Full, why));
        }
        Ok(())
    }
}

fn refusal(error: &OpenFileError) -> Refusal {
    let reason = match error {
        OpenFileError::File(FileError::System { code, .. }) if *code == Errno::NOENT.raw_os_error() => Reason::NotFound,
        OpenFileError::File(FileError::System { code, .. }) if *code == Errno::ACCESS.raw_os_error() => Reason::Denied,
        OpenFileError::File(FileError::NotAFile { .. } | FileError::Len { .. }) => Reason::NotFound,
        OpenFileError::File(FileError::InUse { .. }) => Reason::Busy,
        OpenFileError::File(FileError::NoSpace { .. }) | OpenFileError::Full { .. } | OpenFileError::Regions(_) => {
            Reason::Full
        }
        OpenFileError::ShutDown => Reason::Draining,
        _ => Reason::Failed,
    };
    Refusal::new(reason, error.to_string())
}
