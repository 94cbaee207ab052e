//! io_uring: requests go to the kernel by the batch, one system call for all of a turn.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

use super::driver::{Done, Driver, Io, What};

/// A ring.
pub(super) struct Uring {
    ring: IoUring,
}

impl Uring {
    /// A ring for `depth` requests; the error with which the kernel refuses one, or one of the operations.
    pub(super) fn new(depth: u32) -> Result<Self, Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let ring = IoUring::new(depth).map_err(errno)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(errno)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
        if needed.into_iter().all(|code| probe.is_supported(code)) { Ok(Self { ring }) } else { Err(Errno::NOSYS) }
    }
}

impl core::fmt::Debug for Uring {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Uring")
    }
}

// SAFETY:
// - a request is reaped when its completion was taken out of the ring; the kernel posts that once, when it is through with
//   the request's memory.
unsafe impl Driver for Uring {
    unsafe fn push(&mut self, io: Io) {
        let fd = types::Fd(io.fd);
        let entry = match io.what {
            What::Read { into, len, offset } => opcode::Read::new(fd, into, len).offset(offset).build(),
            What::Write { from, len, offset } => opcode::Write::new(fd, from, len).offset(offset).build(),
            What::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        let entry = entry.user_data(u64::from(io.key));
        // SAFETY: descriptor and memory stay valid until the completion is reaped: this function's own duty.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "never more requests under way than the ring has entries");
    }

    fn submit(&mut self) -> bool {
        if self.ring.submission().is_empty() {
            return true;
        }
        // What the kernel did not take (EAGAIN, EBUSY, EINTR) stays in the ring for the next time.
        let _ = self.ring.submit();
        self.ring.submission().is_empty()
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        for entry in self.ring.completion() {
            let result = u32::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result()));
            // The key of `push`: 32 bits of the 64.
            done.push(Done { key: entry.user_data() as u32, result });
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor, and outlives the borrow of `self`.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}
