//! Files: moves between host memory and file regions of this process, past the page cache where the file system can.
//!
//! A link of it is a link to oneself: the far side of a move is a file of the same fabric, named by a grant
//! (`Fabric::grant_file`). A peer's file is reached by the peer itself, which moves the bytes and stages them through memory
//! of its own. Requests go to the kernel by io_uring, at most [`DEPTH`] at a time over all batches; where that is not
//! allowed, by a few threads that block, and [`FileDevice::driver`] says so.
//!
//! **Alignment.** Whole blocks travel straight from and into the caller's memory if that is aligned ([`Caching::Direct`] says
//! to what), otherwise through a buffer. A write of part of a block reads the block, changes its bytes and writes it back;
//! meanwhile nothing else of this device writes that block, and further parts of it join the same round. So bytes beside a
//! move stay right whatever moves at the same time. The last page of a file whose length is no multiple of a page, and files
//! that have no O_DIRECT, go through the page cache.
//!
//! **Done** means visible to every reader of the file on this host, also after our death; durable only after
//! `Batch::sync`. What the kernel says of a move ends that move: `NoSpace`, `Truncated`, `Medium`, `Failed`. A batch that was
//! cancelled, or whose link was closed, ends when the kernel has let go of its memory.
//!
//! **Not promised.** A file that somebody cuts while we write past its new end is noticed at the next move, not in that one.
#![allow(unsafe_code)]

mod driver;
mod job;
mod op;
mod plan;
mod threads;
mod uring;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId, RegionToken};
use millpond_core::time::Instant;
use rustix::io::Errno;

use self::driver::Driver;
use self::job::{Ending, Job, Progress, Sync};
use self::op::{Op, Ops};
use super::attached::Attachments;
use crate::contract::{
    Access, Completions, Connection, Device, DeviceLimits, Event, Inbound, LinkDownReason, LinkId, Memory, NotPosted,
    OpenError, Post, PostRefusal, Refusal, RegionMemory, RegisterError, Transport, Turn, Wake,
};
use crate::contract::{RemoteRange, TicketId};
use crate::file::OpenFile;
use crate::mapping::HeaderPage;

#[allow(unused_imports, reason = "named by the module's documentation")]
use crate::file::Caching;

/// Bounds of the file backend.
pub const LIMITS: DeviceLimits = DeviceLimits { moves_max: 65_536, bytes_max: 1 << 40, posts_max: 256, links_max: 16 };
/// Requests with the kernel at most, over all links and files.
pub const DEPTH: u32 = 64;
/// Length of a buffer for what is not aligned, in bytes.
pub const BOUNCE_LEN: u64 = 256 << 10;
/// Buffers at most; made when they are first needed.
pub const BOUNCES_MAX: usize = 16;
/// Spare lists kept.
const SPARES_MAX: usize = 64;

/// Which way to the kernel to take.
///
/// ```
/// use millpond_hal::backend::file::{FileDevice, FileDeviceOptions, Way};
/// let device = FileDevice::new(FileDeviceOptions { way: Way::Threads }).unwrap();
/// assert_eq!(device.driver().name, "threads");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Threads.
    Threads,
}

/// How the backend works.
///
/// Example: [`Way`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileDeviceOptions {
    /// The way to the kernel.
    pub way: Way,
}

/// The backend could not be made.
///
/// ```
/// use millpond_hal::backend::file::FileDeviceError;
/// assert!(FileDeviceError::Uring { code: 1 }.to_string().contains("seccomp"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileDeviceError {
    /// io_uring was named and is refused.
    #[error(
        "io_uring is refused with system error {code} (seccomp, kernel.io_uring_disabled or an old kernel); use threads"
    )]
    Uring {
        /// The error number.
        code: i32,
    },
    /// No threads.
    #[error("threads for files: system error {code}; raise the limit of threads or open files")]
    Threads {
        /// The error number.
        code: i32,
    },
}

/// The way to the kernel that is used.
///
/// ```
/// use millpond_hal::backend::file::{FileDevice, FileDeviceOptions};
/// let driver = FileDevice::new(FileDeviceOptions::default()).unwrap().driver();
/// assert!(driver.name == "io_uring" || driver.uring_refused.is_some());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// `io_uring` or `threads`.
    pub name: &'static str,
    /// The error number with which the kernel refused io_uring, if it was asked.
    pub uring_refused: Option<i32>,
}

/// The backend. See the [module](self) and the example of [`FileRegion`](crate::fabric::FileRegion).
///
/// ```
/// use millpond_hal::backend::file::{FileDevice, FileDeviceOptions};
/// use millpond_hal::contract::Device;
/// assert_eq!(FileDevice::new(FileDeviceOptions::default()).unwrap().name(), "file");
/// ```
#[derive(Debug)]
pub struct FileDevice {
    ops: Ops,
    driver: DriverInfo,
    links: HashMap<LinkId, Link>,
    files: Files,
    jobs: HashMap<TicketId, Job>,
    /// Jobs of which something is to be started, in turns.
    order: VecDeque<TicketId>,
    downs: Vec<(LinkId, LinkDownReason)>,
    /// Empty between turns; kept for its allocation.
    over: Vec<TicketId>,
    spare: Vec<Vec<Progress>>,
    /// Something can be started or told at once.
    has_more: bool,
}

/// The files of the fabric.
#[derive(Debug, Default)]
struct Files {
    by_region: HashMap<RegionId, Arc<OpenFile>>,
    /// Those whose length was looked at in this turn.
    looked_at: Vec<RegionId>,
}

#[derive(Debug, Default)]
struct Link {
    attached: Attachments,
    posts: u32,
}

/// What came of trying to start a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// It is with the kernel, or done, or refused.
    Started,
    /// Something under way must end first.
    Blocked,
    /// Nothing of the job is left to start.
    Exhausted,
}

impl FileDevice {
    /// A backend without links and files.
    pub fn new(options: FileDeviceOptions) -> Result<Self, FileDeviceError> {
        let uring = match options.way {
            Way::Threads => None,
            Way::Auto | Way::Uring => Some(uring::Uring::new(DEPTH)),
        };
        let refused = uring.as_ref().and_then(|made| made.as_ref().err()).map(|error| error.raw_os_error());
        match (uring, options.way) {
            (Some(Ok(uring)), _) => {
                Ok(Self::with(Box::new(uring), DriverInfo { name: "io_uring", uring_refused: None }))
            }
            (Some(Err(error)), Way::Uring) => Err(FileDeviceError::Uring { code: error.raw_os_error() }),
            _ => {
                let failed = |error: Errno| FileDeviceError::Threads { code: error.raw_os_error() };
                let threads = threads::Threads::new().map_err(failed)?;
                Ok(Self::with(Box::new(threads), DriverInfo { name: "threads", uring_refused: refused }))
            }
        }
    }

    fn with(driver: Box<dyn Driver>, info: DriverInfo) -> Self {
        Self {
            ops: Ops::new(driver),
            driver: info,
            links: HashMap::new(),
            files: Files::default(),
            jobs: HashMap::new(),
            order: VecDeque::new(),
            downs: Vec::new(),
            over: Vec::new(),
            spare: Vec::new(),
            has_more: false,
        }
    }

    /// The way to the kernel that is used, and why not the better one.
    #[must_use]
    pub fn driver(&self) -> DriverInfo {
        self.driver
    }

    /// Works off what the kernel has ended.
    fn reap(&mut self, budget: &mut u64, inbound: &mut dyn Inbound) -> bool {
        let worked = self.ops.reap();
        // Bounded by what was reaped, and by the budget.
        while *budget > 0 {
            let more = self.ops.next_done(budget, &mut |part, result| {
                let Some(job) = self.jobs.get_mut(&part.ticket) else { return };
                job.open -= 1;
                match (result, part.index) {
                    (Ok(()), Some(index)) => {
                        job.moves[index].open -= 1;
                        inbound.event(Event::Progress { ticket: part.ticket, bytes: part.len });
                    }
                    (Err(refusal), Some(index)) => {
                        job.moves[index].open -= 1;
                        job.refuse(index, refusal);
                    }
                    (Ok(()), None) => job.sync = Sync::Over,
                    (Err(refusal), None) => job.sync = Sync::Refused(refusal),
                }
            });
            if !more {
                break;
            }
        }
        worked
    }

    /// Gives the kernel as much as it may have, a piece of each job in turns.
    fn start(&mut self, budget: &mut u64, inbound: &mut dyn Inbound) -> bool {
        let (mut blocked, mut worked) = (0, false);
        // Each round costs budget, or counts towards `blocked`, or takes a job out.
        while *budget > 0 && self.ops.has_room() && blocked < self.order.len() {
            let Some(ticket) = self.order.pop_front() else { break };
            match self.start_piece(ticket, budget, inbound) {
                Start::Started => {
                    (blocked, worked) = (0, true);
                    self.order.push_back(ticket);
                }
                Start::Blocked => {
                    blocked += 1;
                    self.order.push_back(ticket);
                }
                Start::Exhausted => worked = true,
            }
        }
        self.has_more |= *budget == 0 && self.ops.has_room() && !self.order.is_empty();
        worked
    }

    fn start_piece(&mut self, ticket: TicketId, budget: &mut u64, inbound: &mut dyn Inbound) -> Start {
        let Some(job) = self.jobs.get_mut(&ticket) else { return Start::Exhausted };
        let Some(link) = self.links.get_mut(&job.post.link) else {
            return Start::Exhausted;
        };
        if job.is_started() {
            return Start::Exhausted;
        }
        let (index, state) = (job.index, job.moves[job.index]);
        let posted = job.post.moves[index];
        if state.refused.is_some() {
            job.index += 1;
            *budget = budget.saturating_sub(1);
            return Start::Started;
        }
        let (at, left) = (state.started, posted.remote.len - state.started);
        // The whole move is checked at its first piece, so that a refusal leaves the file untouched.
        let range = RemoteRange { offset: posted.remote.offset + at, len: left, ..posted.remote };
        let file = match admit(job.post.link, link, &mut self.files, range, posted.access, inbound) {
            Ok(file) => file,
            Err(refusal) => {
                job.refuse(index, refusal);
                return Start::Started;
            }
        };
        if left == 0 {
            job.index += 1;
            *budget = budget.saturating_sub(1);
            return Start::Started;
        }
        match self.ops.start(Op::of(&posted, at, file, ticket, index)) {
            Ok(cost) => {
                let len = cost.len;
                job.open += 1;
                job.moves[index].open += 1;
                job.moves[index].started += len;
                if len == left {
                    job.index += 1;
                }
                *budget = budget.saturating_sub(cost.copied.max(1));
                Start::Started
            }
            Err(op::Busy) => Start::Blocked,
        }
    }

    /// Starts syncs that are due, and ends jobs that are over.
    fn end(&mut self, inbound: &mut dyn Inbound) -> bool {
        let mut over = core::mem::take(&mut self.over);
        for (ticket, job) in &mut self.jobs {
            if job.sync == Sync::Wanted && job.ended.is_none() && job.open == 0 && job.all_done() {
                let Some(link) = self.links.get_mut(&job.post.link) else { continue };
                start_sync(*ticket, job, link, &mut self.files, &mut self.ops, inbound);
            }
            if job.is_over() {
                over.push(*ticket);
            }
        }
        let any_over = !over.is_empty();
        for ticket in over.drain(..) {
            let Some(job) = self.jobs.remove(&ticket) else { continue };
            self.order.retain(|other| *other != ticket);
            let (id, arrival) = (job.post.link, job.post.arrival);
            let mut link = self.links.get_mut(&id);
            if let Some(link) = &mut link {
                link.posts -= 1;
            }
            let spare = job.finish(inbound, |inbound| {
                let (Some(arrival), Some(link)) = (arrival, link) else { return Ok(()) };
                prove(id, link, arrival.region, inbound)?;
                inbound.arrive(id, arrival)
            });
            if self.spare.len() < SPARES_MAX {
                self.spare.push(spare);
            }
        }
        self.over = over;
        any_over
    }

    /// Reports links down whose last job has ended.
    fn report_downs(&mut self, inbound: &mut dyn Inbound) -> bool {
        let before = self.downs.len();
        self.downs.retain(|(link, reason)| {
            let is_quiet = !self.jobs.values().any(|job| job.post.link == *link);
            if is_quiet {
                inbound.event(Event::LinkDown { link: *link, reason: *reason });
            }
            !is_quiet
        });
        self.downs.len() < before
    }
}

fn start_sync(
    ticket: TicketId,
    job: &mut Job,
    link: &mut Link,
    files: &mut Files,
    ops: &mut Ops,
    inbound: &mut dyn Inbound,
) {
    let Some(range) = job.post.sync.filter(|_| ops.has_room()) else { return };
    match admit(job.post.link, link, files, range, Access::Write, inbound) {
        Ok(file) => {
            ops.start_sync(Arc::clone(file), ticket);
            (job.open, job.sync) = (job.open + 1, Sync::Open);
        }
        Err(refusal) => job.sync = Sync::Refused(refusal),
    }
}

/// Shows the capability of an attached grant, once.
fn prove(id: LinkId, link: &mut Link, region: RegionId, inbound: &mut dyn Inbound) -> Result<(), Refusal> {
    link.attached.prove(region, |capability| inbound.prove(id, region, capability).map(drop))
}

/// The file that a range lies in, if it may be moved now.
fn admit<'a>(
    id: LinkId,
    link: &mut Link,
    files: &'a mut Files,
    range: RemoteRange,
    access: Access,
    inbound: &mut dyn Inbound,
) -> Result<&'a Arc<OpenFile>, Refusal> {
    prove(id, link, range.region, inbound)?;
    let memory = inbound.admit(id, range, access)?;
    let file = files.by_region.get(&memory).ok_or(Refusal::NotShareable)?;
    // Reads find out by themselves; a write would silently make it longer again.
    if access == Access::Write && !files.looked_at.contains(&memory) {
        files.looked_at.push(memory);
        file.is_whole();
    }
    if file.is_truncated() { Err(Refusal::Truncated) } else { Ok(file) }
}

// SAFETY:
// - local memory is touched by `ops` only: by requests that were pushed for a posted move, and by copies from and to buffers
//   when they were reaped; both between `post` and `Finished`, since a job is `over` only when nothing of it is open.
// - no pointer of a peer is ever had: files have no addresses.
// - `Finished` comes from `Job::finish` only, which consumes the job, which was taken out of `jobs`: once per ticket.
// - outcomes are told as the kernel tells them; what was started and did not end well is `Unknown`.
unsafe impl Memory for FileDevice {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        matches!(local, MemoryKind::Host | MemoryKind::Pinned) && remote == MemoryKind::File
    }

    fn syncs(&self, remote: MemoryKind) -> bool {
        remote == MemoryKind::File
    }

    fn share_header(&mut self, _header: &Arc<HeaderPage>) {}

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        match (memory.kind, &memory.file) {
            (MemoryKind::Host | MemoryKind::Pinned, _) => Ok(()),
            (MemoryKind::File, Some(file)) => {
                self.files.by_region.insert(memory.id, Arc::clone(file));
                Ok(())
            }
            (kind, _) => Err(RegisterError::Kind(kind)),
        }
    }

    fn release(&mut self, region: RegionId) {
        self.files.by_region.remove(&region);
    }

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        self.links.get_mut(&link).map_or(Ok(()), |link| link.attached.attach(token))
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        if let Some(link) = self.links.get_mut(&link) {
            link.attached.detach(region);
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Transport for FileDevice {
    fn open(&mut self, _now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        if !matches!(connection, Connection::Loopback) {
            return Err(OpenError::WrongConnection { transport: "file" });
        }
        if self.links.len() >= LIMITS.links_max as usize {
            return Err(OpenError::Full { transport: "file", links_max: LIMITS.links_max });
        }
        self.links.insert(link, Link::default());
        Ok(())
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if self.links.remove(&link).is_some() {
            let jobs = self.jobs.values_mut().filter(|job| job.post.link == link);
            jobs.for_each(|job| job.end(Ending::LinkDown(reason)));
            self.downs.push((link, reason));
            self.has_more = true;
        }
    }

    unsafe fn post(&mut self, _now: Instant, post: Post) -> Result<(), NotPosted> {
        match self.links.get_mut(&post.link) {
            None => Err(NotPosted { post, reason: PostRefusal::LinkClosed }),
            Some(link) if link.posts >= LIMITS.posts_max => Err(NotPosted { post, reason: PostRefusal::Full }),
            Some(link) => {
                link.posts += 1;
                self.order.push_back(post.ticket);
                let spare = self.spare.pop().unwrap_or_default();
                self.jobs.insert(post.ticket, Job::new(post, spare));
                self.has_more = true;
                Ok(())
            }
        }
    }

    fn cancel(&mut self, _now: Instant, ticket: TicketId) {
        if let Some(job) = self.jobs.get_mut(&ticket) {
            job.end(Ending::Cancelled);
            self.has_more = true;
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Completions for FileDevice {
    fn poll(&mut self, _now: Instant, mut budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let had_more = core::mem::take(&mut self.has_more);
        self.files.looked_at.clear();
        let mut worked = self.reap(&mut budget_bytes, inbound);
        worked |= self.start(&mut budget_bytes, inbound);
        worked |= self.end(inbound);
        worked |= self.report_downs(inbound);
        // What ended may have made room for what waited for it.
        self.has_more |= worked && !self.order.is_empty() && self.ops.has_room();
        self.has_more |= self.ops.has_done() | !self.ops.submit();
        if worked || had_more { Turn::Worked } else { Turn::Idle }
    }

    fn arm(&mut self, _now: Instant) -> Wake<'_> {
        if self.has_more {
            Wake::Now
        } else if self.ops.is_idle() {
            Wake::Idle
        } else {
            Wake::Readable { fd: self.ops.fd(), within: None }
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Device for FileDevice {
    fn name(&self) -> &'static str {
        "file"
    }

    fn limits(&self) -> DeviceLimits {
        LIMITS
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
