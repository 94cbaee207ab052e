//! Who carries requests to the kernel: io_uring, or threads that block where io_uring is not allowed.
#![allow(unsafe_code)]

use core::fmt;
use std::os::fd::{BorrowedFd, RawFd};

use rustix::io::Errno;

/// What one request does.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    /// From the file into memory.
    Read {
        /// First byte of memory.
        into: *mut u8,
        /// Bytes.
        len: u32,
        /// First byte of the file.
        offset: u64,
    },
    /// From memory into the file.
    Write {
        /// First byte of memory.
        from: *const u8,
        /// Bytes.
        len: u32,
        /// First byte of the file.
        offset: u64,
    },
    /// What was written to the file to stable storage.
    Sync,
}

/// One request, named by its key until it is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Io {
    pub(super) key: u32,
    pub(super) fd: RawFd,
    pub(super) what: What,
}

// SAFETY: the pointers block Send. The promise of `Driver::push` holds for whatever thread uses them, and `FileDevice`, whose
// memory they are, is polled from one thread at a time. Test: `conformance` moves a posted fabric to another thread.
unsafe impl Send for Io {}

/// A request that ended: bytes moved, or the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) key: u32,
    pub(super) result: Result<u32, Errno>,
}

/// Carries requests. Bounded by its user: never more than [`super::DEPTH`] are under way.
///
/// # Safety
/// - A request that was reaped is over: nothing touches its memory any more, and each is reaped once.
pub(super) unsafe trait Driver: Send + fmt::Debug {
    /// Takes a request, to be carried by the next `submit`.
    ///
    /// # Safety
    /// - Until the request is reaped its descriptor stays open and its memory stays valid: for writes of `len` bytes if it
    ///   reads from the file, for reads if it writes, with nobody else touching it but by copies or devices.
    unsafe fn push(&mut self, io: Io);

    /// Hands over what was pushed. Does not wait for it. `false` if some of it could not be handed over yet.
    fn submit(&mut self) -> bool;

    /// What ended since the last call.
    fn reap(&mut self, done: &mut Vec<Done>);

    /// Readable when there is something to reap.
    fn fd(&self) -> BorrowedFd<'_>;
}
