//! Pieces with the kernel: their buffers, who may write which block now, and what comes after each step.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::driver::{Done, Driver, Io, What};
use super::plan::{Piece, Way, next_piece};
use super::{BOUNCE_LEN, BOUNCES_MAX, DEPTH};
use crate::contract::{Access, PostedMove, Refusal, TicketId};
use crate::copy::copy;
use crate::file::OpenFile;
use crate::mapping::{Backing, Mapping};

/// How often a request is given to the kernel again that it interrupted or could not take.
const RETRIES_MAX: u8 = 100;
/// How long a device that is dropped waits for the kernel, in steps of a tenth of a second.
const DROP_STEPS_MAX: u32 = 100;

/// A part of a move: whose it is, and where its bytes are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) ticket: TicketId,
    /// Which move of the ticket; `None`: its sync.
    pub(super) index: Option<usize>,
    pub(super) len: u64,
    /// First byte of the file.
    offset: u64,
    local: NonNull<u8>,
}

// SAFETY: `local` blocks Send. It is memory of a posted move, which may be polled from any one thread (`PostedMove`).
unsafe impl Send for Part {}

/// What a started piece costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) len: u64,
    /// Bytes copied by CPU now.
    pub(super) copied: u64,
}

/// Something under way must end first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Busy;

/// What is done with the bytes at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Read,
    Write,
    /// A block is read, to be changed and written.
    Fetch,
    Sync,
}

/// A piece, from its start until it has ended.
#[derive(Debug)]
pub(super) struct Op {
    part: Part,
    piece: Piece,
    file: Arc<OpenFile>,
    step: Step,
    /// Bytes of this step that the kernel has moved.
    moved: u64,
    retries: u8,
    buffer: Option<Mapping>,
    /// Further parts of the same block that are written in the same round.
    joined: Vec<Part>,
}

impl Op {
    /// The piece of a move that begins `at` bytes into it.
    pub(super) fn of(posted: &PostedMove, at: u64, file: &Arc<OpenFile>, ticket: TicketId, index: usize) -> Self {
        let (offset, left) = (posted.remote.offset + at, posted.remote.len - at);
        debug_assert!(at < posted.remote.len);
        // SAFETY: inside the local range of the move, which is as long as the remote one.
        let local = unsafe { posted.local.add(at as usize) };
        let piece = next_piece(file.shape(), offset, local.as_ptr().addr() as u64, left);
        let step = match (posted.access, piece.way) {
            (Access::Read, _) => Step::Read,
            (Access::Write, Way::Edge) => Step::Fetch,
            (Access::Write, _) => Step::Write,
        };
        let part = Part { ticket, index: Some(index), len: piece.len, offset, local };
        Self { part, piece, file: Arc::clone(file), step, moved: 0, retries: 0, buffer: None, joined: Vec::new() }
    }

    /// First byte and length in the file of what the kernel moves in this step: the whole block for an edge.
    fn span(&self) -> (u64, u64) {
        let block = self.file.shape().block;
        match self.piece.way {
            Way::Edge => (self.part.offset & !(block - 1), block),
            _ => (self.part.offset, self.part.len),
        }
    }

    fn is_write(&self) -> bool {
        matches!(self.step, Step::Write | Step::Fetch)
    }

    /// Whether a write of this piece and one of the other must not be under way together, although their bytes may differ.
    fn excludes(&self, other: &Self) -> bool {
        let by_blocks = self.piece.way == Way::Edge || other.piece.way == Way::Edge;
        let ((first, len), (other_first, other_len)) = (self.span(), other.span());
        let overlap = first < other_first + other_len && other_first < first + len;
        by_blocks && overlap && self.is_write() && other.is_write() && Arc::ptr_eq(&self.file, &other.file)
    }

    /// What is left of this step, for the kernel.
    fn io(&self, key: u32) -> Io {
        let fd = match self.piece.way {
            Way::Cached => self.file.cached_fd(),
            _ if self.step == Step::Sync => self.file.cached_fd(),
            _ => self.file.direct_fd(),
        };
        let (first, len) = self.span();
        let base = self.buffer.as_ref().map_or(self.part.local, Mapping::base);
        let at = base.as_ptr().wrapping_add(self.moved as usize);
        // At most `PIECE_MAX`.
        let (offset, len) = (first + self.moved, (len - self.moved) as u32);
        let what = match self.step {
            Step::Read | Step::Fetch => What::Read { into: at, len, offset },
            Step::Write => What::Write { from: at, len, offset },
            Step::Sync => What::Sync,
        };
        Io { key, fd: fd.as_raw_fd(), what }
    }

    /// Copies a part between the caller's memory and the buffer, which holds the file's bytes from the span's first on.
    fn copy_part(&self, part: &Part, access: Access) {
        let Some(buffer) = &self.buffer else { return };
        let (first, span_len) = self.span();
        let at = part.offset - first;
        assert!(at + part.len <= span_len && span_len <= buffer.len(), "a part lies in the span of its piece");
        // SAFETY:
        // - the buffer: the line above; it is this piece's alone, and the kernel is not at it between two steps.
        // - the caller's side: `local` is good for `part.len` bytes until `Finished`, which waits for this piece.
        // - no overlap: the buffer is a mapping of its own.
        unsafe {
            let inside = buffer.base().as_ptr().add(at as usize);
            match access {
                Access::Write => copy(part.local.as_ptr(), inside, part.len as usize),
                Access::Read => copy(inside, part.local.as_ptr(), part.len as usize),
            }
        }
    }
}

/// All pieces with the kernel.
#[derive(Debug)]
pub(super) struct Ops {
    driver: Box<dyn Driver>,
    ops: Vec<Option<Op>>,
    free: Vec<u32>,
    buffers: Vec<Mapping>,
    buffers_made: usize,
    reaped: Vec<Done>,
    /// Reaped and not worked off.
    done: VecDeque<Done>,
}

impl Ops {
    pub(super) fn new(driver: Box<dyn Driver>) -> Self {
        let ops = (0..DEPTH).map(|_| None).collect();
        Self {
            driver,
            ops,
            free: (0..DEPTH).collect(),
            buffers: Vec::new(),
            buffers_made: 0,
            reaped: Vec::new(),
            done: VecDeque::new(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.ops.len()
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.driver.fd()
    }

    /// Hands all that was started to the kernel. `false`: it did not take all of it yet.
    pub(super) fn submit(&mut self) -> bool {
        self.driver.submit()
    }

    /// Looks what the kernel has ended. Whether there is anything to work off.
    pub(super) fn reap(&mut self) -> bool {
        if !self.is_idle() {
            self.driver.reap(&mut self.reaped);
            self.done.extend(self.reaped.drain(..));
        }
        self.has_done()
    }

    /// Whether something was reaped and not worked off.
    pub(super) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Starts a piece, or lets it join one that is about to write the same block. There is room.
    pub(super) fn start(&mut self, mut op: Op) -> Result<Cost, Busy> {
        let mut cost = Cost { len: op.part.len, copied: 0 };
        if op.is_write() {
            let busy = |other: &&mut Option<Op>| other.as_ref().is_some_and(|other| op.excludes(other));
            if let Some(other) = self.ops.iter_mut().find(busy).and_then(Option::as_mut) {
                let joins = op.step == Step::Fetch && other.step == Step::Fetch && other.joined.len() < DEPTH as usize;
                if joins {
                    other.joined.push(op.part);
                    return Ok(cost);
                }
                return Err(Busy);
            }
        }
        match op.piece.way {
            Way::Direct => {}
            Way::Cached => cost.copied = cost.len,
            Way::Bounced | Way::Edge => {
                op.buffer = Some(self.buffer().ok_or(Busy)?);
                if op.step == Step::Write {
                    op.copy_part(&op.part, Access::Write);
                    cost.copied = cost.len;
                }
            }
        }
        self.push(op);
        Ok(cost)
    }

    /// Starts a sync of a ticket. There is room.
    pub(super) fn start_sync(&mut self, file: Arc<OpenFile>, ticket: TicketId) {
        let part = Part { ticket, index: None, len: 0, offset: 0, local: NonNull::dangling() };
        let piece = Piece { len: 0, way: Way::Cached };
        self.push(Op { part, piece, file, step: Step::Sync, moved: 0, retries: 0, buffer: None, joined: Vec::new() });
    }

    fn push(&mut self, op: Op) {
        let key = self.free.pop().expect("the caller has looked that there is room");
        let io = op.io(key);
        self.ops[key as usize] = Some(op);
        self.push_io(io);
    }

    fn push_io(&mut self, io: Io) {
        // SAFETY:
        // - the descriptor: the op in the table holds the open file until `on_done` takes it out, after it was reaped.
        // - the memory: a buffer that the op holds likewise, or the local range of a posted move, which the fabric lends
        //   until `Finished`: `FileDevice::end` waits for every op of a job. Its length is at most what is left of either.
        unsafe { self.driver.push(io) };
    }

    /// A buffer, if there is one left; its pages are found when it is first used.
    fn buffer(&mut self) -> Option<Mapping> {
        if let Some(buffer) = self.buffers.pop() {
            return Some(buffer);
        }
        if self.buffers_made == BOUNCES_MAX {
            return None;
        }
        let buffer = Mapping::new(BOUNCE_LEN, Backing::Heap).ok()?;
        self.buffers_made += 1;
        Some(buffer)
    }

    /// Works off one step that the kernel has ended. `told` hears of every part that has ended with it. `false`: there is
    /// none.
    pub(super) fn next_done(&mut self, budget: &mut u64, told: &mut dyn FnMut(Part, Result<(), Refusal>)) -> bool {
        let Some(done) = self.done.pop_front() else { return false };
        let Some(mut op) = self.ops.get_mut(done.key as usize).and_then(Option::take) else { return true };
        let ending = match after(&mut op, done.result) {
            Next::Again => {
                let io = op.io(done.key);
                self.ops[done.key as usize] = Some(op);
                self.push_io(io);
                return true;
            }
            Next::Complete => Ok(()),
            Next::Failed(refusal) => Err(refusal),
        };
        if ending.is_ok() && op.buffer.is_some() && op.step == Step::Read {
            op.copy_part(&op.part, Access::Read);
            *budget = budget.saturating_sub(op.part.len);
        }
        self.free.push(done.key);
        self.buffers.extend(op.buffer.take());
        told(op.part, ending);
        op.joined.drain(..).for_each(|part| told(part, ending));
        true
    }
}

/// What comes after a step.
enum Next {
    /// The rest of the step, or the next one.
    Again,
    Complete,
    Failed(Refusal),
}

fn after(op: &mut Op, result: Result<u32, Errno>) -> Next {
    let moved = match result {
        Ok(_) if op.step == Step::Sync => return Next::Complete,
        Ok(moved) => u64::from(moved),
        // A thread that ended takes with it what the kernel did on its behalf.
        Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED) if op.retries < RETRIES_MAX => {
            op.retries += 1;
            return Next::Again;
        }
        Err(error) => {
            op.file.note_error(error.raw_os_error());
            return Next::Failed(refusal_of(error));
        }
    };
    // A step that ended within a block goes on from the block's start: neither offset nor memory may be unaligned.
    let block = if op.piece.way == Way::Cached { 1 } else { op.file.shape().block };
    let (_, len) = op.span();
    let before = op.moved;
    op.moved = if before + moved >= len { len } else { (before + moved) & !(block - 1) };
    if op.moved == before {
        // Nothing where there should be something: the end of the file is where it was not.
        return Next::Failed(if op.step == Step::Write {
            Refusal::Failed
        } else {
            op.file.mark_truncated();
            Refusal::Truncated
        });
    }
    if op.moved < len {
        return Next::Again;
    }
    if op.step != Step::Fetch {
        return Next::Complete;
    }
    op.copy_part(&op.part, Access::Write);
    op.joined.iter().for_each(|part| op.copy_part(part, Access::Write));
    (op.step, op.moved) = (Step::Write, 0);
    Next::Again
}

fn refusal_of(error: Errno) -> Refusal {
    match error {
        Errno::NOSPC | Errno::DQUOT => Refusal::NoSpace,
        Errno::IO | Errno::NODEV | Errno::NXIO | Errno::REMOTEIO => Refusal::Medium,
        Errno::AGAIN | Errno::INTR | Errno::CANCELED | Errno::NOMEM | Errno::BUSY => Refusal::Busy,
        _ => Refusal::Failed,
    }
}

impl Drop for Ops {
    /// Waits for the kernel to let go of our buffers, within bounds; what it keeps is leaked, never freed.
    fn drop(&mut self) {
        for _ in 0..DROP_STEPS_MAX {
            if self.is_idle() {
                return;
            }
            self.driver.submit();
            self.reap();
            while let Some(ended) = self.done.pop_front() {
                if self.ops[ended.key as usize].take().is_some() {
                    self.free.push(ended.key);
                }
            }
            let wait = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let fd = self.driver.fd();
            let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait));
        }
        self.ops.drain(..).flatten().for_each(core::mem::forget);
    }
}
