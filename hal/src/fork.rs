//! Whether this process is a forked child of the one that made something.
//!
//! What a fabric stands on is not the child's: its links are the parent's sockets and rings, its threads are gone, and shared
//! memory is not even mapped there. So each fabric, and each engine, holds a mark that the system wipes in a child, and does
//! nothing there but say so. Cost of a look: one load. Invariant: a mark that was made tells the truth, also in the child of a
//! child.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// What is mapped for a mark, in bytes.
const PAGE_LEN: usize = 4096;

/// A page that reads as zeros in a forked child.
///
/// ```
/// use millpond_hal::fork::ForkMark;
/// assert!(!ForkMark::new().unwrap().is_in_child());
/// ```
#[derive(Debug)]
pub struct ForkMark {
    page: NonNull<AtomicU64>,
}

// SAFETY:
// - `page` blocks both. The page is this mark's own until drop, and is only ever accessed by an atomic.
//   Test: `fabric::tests::a_forked_child_is_told_so_and_neither_reads_nor_writes_what_is_the_parents`.
unsafe impl Send for ForkMark {}
// SAFETY: as for Send.
unsafe impl Sync for ForkMark {}

impl ForkMark {
    /// A mark of this process.
    ///
    /// # Errors
    /// There is no page for it, or the system (Linux before 4.14) cannot do this.
    pub fn new() -> std::io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a null hint lets the kernel choose a range that nobody uses.
        let page = unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), PAGE_LEN, protection, flags) }?;
        let page = NonNull::new(page.cast::<AtomicU64>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let mark = Self { page };
        // SAFETY: the page is this mark's, mapped in the lines above; the advice changes nothing in this process.
        unsafe { rustix::mm::madvise(page.as_ptr().cast(), PAGE_LEN, Advice::LinuxWipeOnFork) }?;
        mark.word().store(1, Ordering::Relaxed);
        Ok(mark)
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped for as long as `self`, which the borrow is bound to; a page is aligned for a word.
        unsafe { self.page.as_ref() }
    }

    /// Whether this process was forked after the mark was made.
    #[must_use]
    pub fn is_in_child(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }
}

impl Drop for ForkMark {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; nobody holds a reference into it. An error would leave it mapped.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE_LEN) };
    }
}
