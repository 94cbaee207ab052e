//! Files as memory: how one is opened, and how its bytes may be reached.
//!
//! An [`OpenFile`] has a fixed length and fixed rights. `Fabric::add_file` makes it a region of kind `File`, which batches
//! reach over a link of the [`file`](crate::backend::file) backend. It is not a file system's view: it does not grow, it has
//! no position, and its name does not matter once it is open.
//!
//! Its bytes bypass the page cache (`O_DIRECT`) where the file system can do that, and [`OpenFile::caching`] says why where
//! not. Invariants: a file that may be written is open once on this host (`flock`), since writing part of a block is a read
//! and a write; a file that was found to be shorter than its region is refused from then on.

use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

/// The largest file region, in bytes: what file systems take at most.
pub const FILE_LEN_MAX: u64 = 1 << 62;
/// Blocks and memory are aligned to this where the file system does not say what it wants.
const ALIGN_DEFAULT: u64 = 4096;
/// The unit of the page cache.
const PAGE_LEN: u64 = 4096;
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// What may be done with an open file.
///
/// ```
/// use millpond_hal::file::FileAccess;
/// assert!(FileAccess::ReadWrite > FileAccess::ReadOnly);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileAccess {
    /// Reads only.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// How a file is opened.
///
/// ```
/// use millpond_hal::file::{FileOptions, OpenFile};
/// let path = std::env::temp_dir().join(format!("millpond-doc-options-{}", std::process::id()));
/// let file = OpenFile::open(&path, FileOptions::create(1 << 20)).unwrap(); // space is reserved
/// assert_eq!(file.len(), 1 << 20);
/// assert!(OpenFile::open(&path, FileOptions::read_write()).is_err()); // open for writing already
/// drop(file);
/// assert!(OpenFile::open(&path, FileOptions::read_only().through_the_cache()).is_ok());
/// std::fs::remove_file(path).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    access: FileAccess,
    create: Option<u64>,
    cached: bool,
}

impl FileOptions {
    /// An existing file, to be read.
    #[must_use]
    pub const fn read_only() -> Self {
        Self { access: FileAccess::ReadOnly, create: None, cached: false }
    }

    /// An existing file, to be read and written within its present length.
    #[must_use]
    pub const fn read_write() -> Self {
        Self { access: FileAccess::ReadWrite, create: None, cached: false }
    }

    /// A new file of `len` zero bytes, whose space is reserved where the file system can; refused if the name is taken.
    #[must_use]
    pub const fn create(len: u64) -> Self {
        Self { access: FileAccess::ReadWrite, create: Some(len), cached: false }
    }

    /// Through the page cache, even if the file system could do without.
    #[must_use]
    pub const fn through_the_cache(self) -> Self {
        Self { cached: true, ..self }
    }
}

/// A file was not opened.
///
/// ```
/// use millpond_hal::file::{FileError, FileOptions, OpenFile};
/// let missing = OpenFile::open("/nonexistent/file".as_ref(), FileOptions::read_only());
/// assert!(matches!(missing.unwrap_err(), FileError::System { code: 2, .. }));
/// let folder = OpenFile::open("/".as_ref(), FileOptions::read_only());
/// assert!(matches!(folder.unwrap_err(), FileError::NotAFile { .. }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A folder, a pipe, a device.
    #[error("{} is no regular file; name one", path.display())]
    NotAFile {
        /// Its name.
        path: PathBuf,
    },
    /// No bytes, or more than a file system takes.
    #[error("{} would have {len} bytes; a file region has 1 to {FILE_LEN_MAX}", path.display())]
    Len {
        /// Its name.
        path: PathBuf,
        /// Its length.
        len: u64,
    },
    /// Open for writing already, here or in another process.
    #[error("{} is open for writing already; close it there first", path.display())]
    InUse {
        /// Its name.
        path: PathBuf,
    },
    /// There is no room for it; nothing was left behind.
    #[error("{} needs {len} bytes, and the file system has no room for them; free space or ask for less", path.display())]
    NoSpace {
        /// Its name.
        path: PathBuf,
        /// The length asked for.
        len: u64,
    },
    /// The operating system refused.
    #[error("{action} of {} failed with system error {code}; check the name and its permissions", path.display())]
    System {
        /// What was tried.
        action: &'static str,
        /// The file's name.
        path: PathBuf,
        /// The error number.
        code: i32,
    },
}

/// Whether a file's bytes go through the page cache.
///
/// ```
/// use millpond_hal::file::{Caching, FileOptions, OpenFile};
/// let path = std::env::temp_dir().join(format!("millpond-doc-caching-{}", std::process::id()));
/// let file = OpenFile::open(&path, FileOptions::create(5000).through_the_cache()).unwrap();
/// assert_eq!(file.caching(), Caching::Cached { why: "it was asked for" });
/// std::fs::remove_file(path).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// They bypass it.
    Direct {
        /// What offsets and lengths are multiples of, in bytes; what is not goes through a buffer.
        block: u64,
        /// What addresses of memory are multiples of, in bytes; other memory goes through a buffer.
        memory_align: u64,
    },
    /// They go through it.
    Cached {
        /// Why.
        why: &'static str,
    },
}

/// The geometry that decides how a range of a file moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// A power of two.
    pub(crate) block: u64,
    /// A power of two.
    pub(crate) memory_align: u64,
    /// From here on bytes go through the page cache: the incomplete last page, which no block may be written over, or all.
    pub(crate) cached_from: u64,
}

/// An open file. Closed when its region, its grants and everything posted are gone.
///
/// Example: [`FileOptions`].
#[derive(Debug)]
pub struct OpenFile {
    /// As it was opened; what lies there now may be another file.
    path: PathBuf,
    cached: OwnedFd,
    direct: Option<OwnedFd>,
    len: u64,
    access: FileAccess,
    shape: Shape,
    why_cached: &'static str,
    truncated: AtomicBool,
    last_error: AtomicI32,
}

impl OpenFile {
    /// Opens or makes a regular file. Blocks as long as the file system takes.
    pub fn open(path: &Path, options: FileOptions) -> Result<Self, FileError> {
        let failed = |action| system(action, path);
        let access = match options.access {
            FileAccess::ReadOnly => OFlags::RDONLY,
            FileAccess::ReadWrite => OFlags::RDWR,
        };
        // Not to be stopped by a pipe without a writer.
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let made = if options.create.is_some() { OFlags::CREATE | OFlags::EXCL } else { OFlags::empty() };
        let cached = match rustix::fs::open(path, flags | made, Mode::RUSR | Mode::WUSR) {
            Err(Errno::ISDIR) => return Err(FileError::NotAFile { path: path.to_owned() }),
            opened => opened.map_err(failed("opening"))?,
        };
        let opened = Self::of(&cached, path, options);
        if opened.is_err() && options.create.is_some() {
            // It was made by the call above and is of no use to anybody.
            let _ = rustix::fs::unlink(path);
        }
        let (len, direct) = opened?;
        let (shape, direct, why_cached) = match direct {
            Ok((shape, direct)) => (shape, Some(direct), ""),
            Err(why) => (Shape { block: 1, memory_align: 1, cached_from: 0 }, None, why),
        };
        let (truncated, last_error) = (AtomicBool::new(false), AtomicI32::new(0));
        let (path, access) = (path.to_owned(), options.access);
        Ok(Self { path, cached, direct, len, access, shape, why_cached, truncated, last_error })
    }

    /// Locks, sizes and reopens what was opened.
    #[allow(clippy::type_complexity)] // the two halves of an open file, taken apart at the only caller
    fn of(
        cached: &OwnedFd,
        path: &Path,
        options: FileOptions,
    ) -> Result<(u64, Result<(Shape, OwnedFd), &'static str>), FileError> {
        let failed = |action| system(action, path);
        let stat = rustix::fs::fstat(cached).map_err(failed("looking"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(FileError::NotAFile { path: path.to_owned() });
        }
        if options.access == FileAccess::ReadWrite {
            match rustix::fs::flock(cached, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => return Err(FileError::InUse { path: path.to_owned() }),
                locked => locked.map_err(failed("locking"))?,
            }
        }
        let len = options.create.unwrap_or(u64::try_from(stat.st_size).unwrap_or(0));
        if len == 0 || len > FILE_LEN_MAX {
            return Err(FileError::Len { path: path.to_owned(), len });
        }
        if options.create.is_some() {
            reserve(cached, path, len)?;
        }
        if options.cached {
            return Ok((len, Err("it was asked for")));
        }
        Ok((len, reopened(cached, options.access, len)))
    }

    /// Length in bytes, as it was when the file was opened.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes; never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What may be done with it.
    #[must_use]
    pub fn access(&self) -> FileAccess {
        self.access
    }

    /// Whether its bytes go through the page cache, and why.
    #[must_use]
    pub fn caching(&self) -> Caching {
        match self.direct {
            Some(_) => Caching::Direct { block: self.shape.block, memory_align: self.shape.memory_align },
            None => Caching::Cached { why: self.why_cached },
        }
    }

    /// Whether the file was found to be shorter than its region. Moves of it are refused from then on, also if somebody made
    /// it longer again: what lay there is gone.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.truncated.load(Ordering::Relaxed)
    }

    /// Whether its name still leads to it: not if it was removed, or another file took its name. Two system calls.
    #[must_use]
    pub fn is_at_its_name(&self) -> bool {
        match (rustix::fs::stat(&self.path), rustix::fs::fstat(&self.cached)) {
            (Ok(there), Ok(own)) => (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino),
            _ => false,
        }
    }

    /// The last error number with which the system refused a move of it; 0 if there was none.
    #[must_use]
    pub fn last_error(&self) -> i32 {
        self.last_error.load(Ordering::Relaxed)
    }

    /// Brings what was written to it, by moves that are done, to stable storage. Blocks until the device says so; inside a
    /// batch `Batch::sync` does the same without.
    pub fn sync(&self) -> Result<(), FileError> {
        let failed =
            |error: Errno| FileError::System { action: "syncing", path: self.path.clone(), code: error.raw_os_error() };
        rustix::fs::fdatasync(&self.cached).map_err(failed)
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The descriptor that goes through the page cache.
    pub(crate) fn cached_fd(&self) -> BorrowedFd<'_> {
        self.cached.as_fd()
    }

    /// The one that does not, if there is one.
    pub(crate) fn direct_fd(&self) -> BorrowedFd<'_> {
        self.direct.as_ref().unwrap_or(&self.cached).as_fd()
    }

    /// Looks whether it is as long as it was; one system call.
    pub(crate) fn is_whole(&self) -> bool {
        let is_short = || match rustix::fs::fstat(&self.cached) {
            Ok(stat) => u64::try_from(stat.st_size).is_ok_and(|len| len < self.len),
            Err(_) => false,
        };
        if !self.is_truncated() && is_short() {
            self.mark_truncated();
        }
        !self.is_truncated()
    }

    pub(crate) fn mark_truncated(&self) {
        self.truncated.store(true, Ordering::Relaxed);
    }

    pub(crate) fn note_error(&self, code: i32) {
        self.last_error.store(code, Ordering::Relaxed);
    }
}

fn system<'a>(action: &'static str, path: &'a Path) -> impl Fn(Errno) -> FileError + 'a {
    move |error| FileError::System { action, path: path.to_owned(), code: error.raw_os_error() }
}

/// Gives a new file its length, and the space for it where the file system knows how.
fn reserve(file: &OwnedFd, path: &Path, len: u64) -> Result<(), FileError> {
    let no_space = || FileError::NoSpace { path: path.to_owned(), len };
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(file, len).map_err(system("sizing", path)),
        Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Err(no_space()),
        Err(error) => Err(system("reserving space", path)(error)),
    }
}

/// The same file once more, past the page cache; or why that cannot be.
fn reopened(cached: &OwnedFd, access: FileAccess, len: u64) -> Result<(Shape, OwnedFd), &'static str> {
    let file_system = rustix::fs::fstatfs(cached).map_err(|_| "its file system cannot be told")?;
    // Kernels differ in whether these take the flag; there is no device behind them either way.
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)] // the type differs between architectures
    if matches!(file_system.f_type as u64, TMPFS_MAGIC | RAMFS_MAGIC) {
        return Err("its file system is memory (tmpfs), there is no device to move from");
    }
    let statx = rustix::fs::statx(cached, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let told = statx.ok().filter(|stat| StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN));
    let (memory_align, block) = match told {
        Some(stat) if stat.stx_dio_offset_align == 0 => return Err("its file system says that it has no O_DIRECT"),
        Some(stat) => (u64::from(stat.stx_dio_mem_align), u64::from(stat.stx_dio_offset_align)),
        None => (ALIGN_DEFAULT, ALIGN_DEFAULT),
    };
    if !block.is_power_of_two() || !memory_align.is_power_of_two() || block > crate::backend::file::BOUNCE_LEN {
        return Err("its file system wants an alignment that is not used here");
    }
    let access = if access == FileAccess::ReadOnly { OFlags::RDONLY } else { OFlags::RDWR };
    let name = format!("/proc/self/fd/{}", cached.as_raw_fd());
    let direct = rustix::fs::open(name, access | OFlags::CLOEXEC | OFlags::DIRECT, Mode::empty());
    let direct = direct.map_err(|_| "its file system refused O_DIRECT (or /proc is hidden)")?;
    let unit = block.max(PAGE_LEN);
    Ok((Shape { block, memory_align, cached_from: len / unit * unit }, direct))
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("millpond-file-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_file_that_may_be_written_is_open_once() {
        let path = path("once");
        let file = OpenFile::open(&path, FileOptions::create(8192)).unwrap();
        let again = OpenFile::open(&path, FileOptions::read_write()).unwrap_err();
        assert_eq!(again, FileError::InUse { path: path.clone() });
        assert!(OpenFile::open(&path, FileOptions::read_only()).is_ok(), "readers do not disturb");
        assert!(matches!(OpenFile::open(&path, FileOptions::create(1)), Err(FileError::System { code: 17, .. })));
        drop(file);
        let file = OpenFile::open(&path, FileOptions::read_write()).unwrap();
        assert!(file.len() == 8192 && file.is_at_its_name());
        std::fs::remove_file(&path).unwrap();
        assert!(!file.is_at_its_name());
        std::fs::write(&path, b"another").unwrap();
        assert!(!file.is_at_its_name());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_that_does_not_fit_leaves_nothing_behind() {
        let path = path("large");
        let refused = OpenFile::open(&path, FileOptions::create(FILE_LEN_MAX)).unwrap_err();
        assert!(matches!(refused, FileError::NoSpace { .. }), "{refused:?}");
        assert!(matches!(OpenFile::open(&path, FileOptions::create(0)), Err(FileError::Len { len: 0, .. })));
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_file_is_refused() {
        for name in ["/", "/dev/null", "/proc/self/fd"] {
            let refused = OpenFile::open(name.as_ref(), FileOptions::read_only());
            assert!(matches!(refused, Err(FileError::NotAFile { .. })), "{name}: {refused:?}");
        }
    }

    #[test]
    fn memory_is_cached_and_says_so() {
        let path = PathBuf::from(format!("/dev/shm/millpond-file-{}", std::process::id()));
        let file = match OpenFile::open(&path, FileOptions::create(4096)) {
            Ok(file) => file,
            Err(error) => return eprintln!("SKIPPED: no /dev/shm here: {error}"),
        };
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(file.caching(), Caching::Cached { why } if why.contains("tmpfs")), "{:?}", file.caching());
    }

    #[test]
    fn a_file_that_was_cut_is_never_whole_again() {
        let path = path("cut");
        let file = OpenFile::open(&path, FileOptions::create(8192)).unwrap();
        let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        assert!(file.is_whole());
        other.set_len(4096).unwrap();
        assert!(!file.is_whole());
        other.set_len(8192).unwrap();
        assert!(!file.is_whole() && file.is_truncated());
        std::fs::remove_file(path).unwrap();
    }
}
