//! The yardstick over shared memory: the target copies from the initiator's read-only mapping into memory of its own.
//!
//! Each side writes one page of words and reads the other's, so that nobody maps foreign memory writable.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};

use super::{FOOTPRINT_LEN, Point};
use crate::mapping::{Backing, HeaderPage, Mapping};

/// Says in the initiator's word that there are no further operations.
const LAST: u64 = u64::MAX;
/// Rounds of spinning before others get the core, and how often that happens between looks at whether the peer still lives.
const ROUNDS: u32 = 1 << 14;
const YIELDS: u32 = 1 << 8;

/// A peer's descriptor, mapped read-only.
struct Peek {
    base: NonNull<u8>,
    len: usize,
}

impl Peek {
    fn new(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        // SAFETY: a null hint lets the kernel choose a range that nobody uses; the mapping is read-only.
        let base = unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, fd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// The first word.
    fn word(&self) -> u64 {
        // SAFETY: mapped for at least a page, page-aligned, and read atomically only.
        unsafe { AtomicU64::from_ptr(self.base.cast().as_ptr()) }.load(Ordering::Acquire)
    }
}

impl Drop for Peek {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and not used any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Tells the peer where to find descriptors of ours, and learns its own: paths in /proc, which it may open as the same user.
fn exchange(control: &mut TcpStream, ours: &[&OwnedFd], theirs: usize) -> io::Result<Vec<OwnedFd>> {
    for fd in ours {
        let words = [u64::from(std::process::id()), u64::try_from(fd.as_raw_fd()).map_err(io::Error::other)?];
        control.write_all(&words.map(u64::to_le_bytes).concat())?;
    }
    let mut opened = Vec::new();
    for _ in 0..theirs {
        let mut words = [0; 16];
        control.read_exact(&mut words)?;
        let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().unwrap_or_default());
        opened.push(std::fs::File::open(format!("/proc/{}/fd/{}", word(0), word(8)))?.into());
    }
    Ok(opened)
}

fn no_memfd() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "shared memory needs memfd, which this system does not have")
}

/// Spins until `seen` is happy; fails if the control connection ends first.
fn wait_until(control: &TcpStream, mut seen: impl FnMut() -> bool) -> io::Result<()> {
    loop {
        for _ in 0..YIELDS {
            for _ in 0..ROUNDS {
                if seen() {
                    return Ok(());
                }
                core::hint::spin_loop();
            }
            std::thread::yield_now();
        }
        control.set_nonblocking(true)?;
        let gone = matches!(control.peek(&mut [0]), Ok(0));
        control.set_nonblocking(false)?;
        if gone {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

pub(super) fn measure(control: &mut TcpStream, point: &Point) -> io::Result<(u64, f64, Vec<u64>)> {
    let source = Mapping::new(FOOTPRINT_LEN, Backing::Memfd).map_err(io::Error::other)?;
    // SAFETY: the mapping is ours alone so far and as long as said: every page of it is touched before the clock starts.
    unsafe { source.base().as_ptr().write_bytes(1, usize::try_from(FOOTPRINT_LEN).map_err(io::Error::other)?) };
    let words = HeaderPage::new(1, Backing::Memfd).map_err(io::Error::other)?;
    let ours = [source.shared().ok_or_else(no_memfd)?.as_ref(), words.shared().ok_or_else(no_memfd)?.as_ref()];
    let theirs = exchange(control, &ours, 1)?;
    let done = Peek::new(&theirs[0], 8)?;
    let result = super::repeat(point, |number| {
        words.set(0, number + 1);
        wait_until(control, || done.word() == number + 1)
    });
    words.set(0, LAST);
    result
}

pub(super) fn serve(control: &mut TcpStream, point: &Point, memory: &mut [u8]) -> io::Result<()> {
    let done = HeaderPage::new(1, Backing::Memfd).map_err(io::Error::other)?;
    let theirs = exchange(control, &[done.shared().ok_or_else(no_memfd)?.as_ref()], 2)?;
    let (source, words) = (Peek::new(&theirs[0], memory.len())?, Peek::new(&theirs[1], 8)?);
    let size = usize::try_from(point.size).map_err(io::Error::other)?;
    let slots = FOOTPRINT_LEN / point.size;
    let mut number = 0u64;
    loop {
        let mut word = 0;
        wait_until(control, || {
            word = words.word();
            word == number + 1 || word == LAST
        })?;
        if word == LAST {
            return Ok(());
        }
        for index in 0..point.batch {
            let at = usize::try_from((number * point.batch + index) % slots * point.size).map_err(io::Error::other)?;
            let target = &mut memory[at..at + size];
            // SAFETY: `at + size` lies inside the footprint, which is as long as the peer's mapping; the target is ours.
            unsafe { crate::copy::copy(source.base.as_ptr().add(at), target.as_mut_ptr(), size) };
        }
        number += 1;
        done.set(0, number);
    }
}
