//! Threads that block in `pread`, `pwrite` and `fdatasync`, where io_uring is not allowed.
//!
//! A few threads and a bounded queue; their end is announced by an eventfd. Dropping it waits for what they are in.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::driver::{Done, Driver, Io, What};

/// How many threads there are.
pub(super) const THREADS: usize = 4;

/// The threads and what they share.
#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<Shared>,
    pushed: Vec<Io>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    done: Mutex<Vec<Done>>,
    event: OwnedFd,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Io>,
    stopped: bool,
}

impl Threads {
    /// Starts the threads.
    pub(super) fn new() -> Result<Self, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (queue, done) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { queue, work: Condvar::new(), done, event });
        let mut threads = Self { shared, pushed: Vec::new(), threads: Vec::new() };
        for _ in 0..THREADS {
            let shared = Arc::clone(&threads.shared);
            let started = std::thread::Builder::new().name("millpond-file".into()).spawn(move || shared.work());
            // Dropping `threads` ends those that were started.
            threads.threads.push(started.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?);
        }
        Ok(threads)
    }
}

impl Shared {
    fn work(&self) {
        let mut queue = self.queue.lock();
        loop {
            let Some(io) = queue.waiting.pop_front() else {
                if queue.stopped {
                    return;
                }
                self.work.wait(&mut queue);
                continue;
            };
            drop(queue);
            // SAFETY: `io` was pushed and is not reaped before `done` has it.
            let result = unsafe { carry(&io) };
            self.done.lock().push(Done { key: io.key, result });
            // A full counter is readable already.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
            queue = self.queue.lock();
        }
    }
}

/// Does it, here and now.
///
/// # Safety
/// - As for [`Driver::push`], until this returns.
pub(super) unsafe fn carry(io: &Io) -> Result<u32, Errno> {
    let position = |offset: u64| libc::off_t::try_from(offset).map_err(|_| Errno::OVERFLOW);
    // SAFETY: descriptor and memory are valid by this function's own duty; the kernel checks the rest. Raw calls, since
    // others may touch the memory of raw regions meanwhile, so that there must be no reference to it.
    let moved = unsafe {
        match io.what {
            What::Read { into, len, offset } => libc::pread(io.fd, into.cast(), len as usize, position(offset)?),
            What::Write { from, len, offset } => libc::pwrite(io.fd, from.cast(), len as usize, position(offset)?),
            What::Sync => libc::fdatasync(io.fd) as isize,
        }
    };
    u32::try_from(moved).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

// SAFETY:
// - a request is in `done` once, after the only call that touches its memory has returned.
unsafe impl Driver for Threads {
    unsafe fn push(&mut self, io: Io) {
        self.pushed.push(io);
    }

    fn submit(&mut self) -> bool {
        if !self.pushed.is_empty() {
            self.shared.queue.lock().waiting.extend(self.pushed.drain(..));
            self.shared.work.notify_all();
        }
        true
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        // Emptied first: what ends after this line writes to it again.
        let _ = rustix::io::read(&self.shared.event, &mut [0u8; 8]);
        done.append(&mut self.shared.done.lock());
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.queue.lock().stopped = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing left in its hands.
            let _ = thread.join();
        }
    }
}
