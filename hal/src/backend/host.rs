//! Plain copies within one process: a link to oneself.
//!
//! It moves between regions and grants of its own fabric, for colocated roles and as the simplest backend there is. It does
//! not know the other side of a link to anybody else.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use millpond_core::batch::{MemoryKind, RegionId, RegionToken};
use millpond_core::time::Instant;

use super::attached::Attachments;
use super::tally::Tally;
use crate::contract::{
    Access, Completions, Connection, Device, DeviceLimits, Event, FarEnd, Inbound, LinkDownReason, LinkId, Memory,
    NotPosted, OpenError, Outcome, Post, PostRefusal, PostedMove, Refusal, RegionMemory, RegisterError, RemoteRange,
    TURN_CHUNK_LEN, TicketId, Transport, Turn, Wake,
};
use crate::copy::copy;
use crate::mapping::HeaderPage;

/// Bounds of the host backend.
pub const LIMITS: DeviceLimits = DeviceLimits { moves_max: 65_536, bytes_max: 1 << 40, posts_max: 256, links_max: 16 };

/// The backend. See the [module](self) and the example of [`crate::fabric`].
///
/// ```
/// use millpond_hal::contract::Device;
/// assert_eq!(millpond_hal::backend::host::Host::new().name(), "host");
/// ```
#[derive(Debug, Default)]
pub struct Host {
    links: HashMap<LinkId, Link>,
    queue: VecDeque<Job>,
    downs: Vec<(LinkId, LinkDownReason)>,
}

#[derive(Debug, Default)]
struct Link {
    attached: Attachments,
    posts: u32,
}

#[derive(Debug)]
struct Job {
    post: Post,
    index: usize,
    offset: u64,
    tally: Tally,
    all_done: bool,
    ended: Option<Ending>,
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    Cancelled,
    LinkDown(LinkDownReason),
}

impl Ending {
    fn outcome(self, far_end: FarEnd) -> Outcome {
        match self {
            Self::Cancelled => Outcome::cancelled(far_end),
            Self::LinkDown(reason) => Outcome::link_down(reason, far_end),
        }
    }
}

impl Host {
    /// A backend without links.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn drop_link(&mut self, link: LinkId, reason: LinkDownReason, inbound: &mut dyn Inbound) {
        // Bounded by the queue.
        for _ in 0..self.queue.len() {
            let Some(mut job) = self.queue.pop_front() else { break };
            if job.post.link == link {
                job.ended = Some(Ending::LinkDown(reason));
                job.finish(None, inbound);
            } else {
                self.queue.push_back(job);
            }
        }
        inbound.event(Event::LinkDown { link, reason });
    }
}

impl Job {
    /// Works off at most `budget` bytes. Returns what is left of it.
    fn run(&mut self, link: &mut Link, mut budget: u64, inbound: &mut dyn Inbound) -> u64 {
        while self.ended.is_none() && budget > 0 {
            let Some(&posted) = self.post.moves.get(self.index) else { break };
            let left = posted.remote.len - self.offset;
            let chunk = left.min(TURN_CHUNK_LEN);
            match step(self.post.link, link, &posted, self.offset, chunk, inbound) {
                Ok(()) => {
                    self.offset += chunk;
                    // A zero-length move costs a turn something too.
                    budget = budget.saturating_sub(chunk.max(1));
                    inbound.event(Event::Progress { ticket: self.post.ticket, bytes: chunk });
                    if self.offset == posted.remote.len {
                        self.next(Outcome::DONE, inbound);
                    }
                }
                Err(refusal) => {
                    self.all_done = false;
                    let far_end = if self.offset == 0 { FarEnd::Untouched } else { FarEnd::Unknown };
                    self.next(Outcome { far_end, ..Outcome::refused(refusal) }, inbound);
                }
            }
        }
        budget
    }

    fn next(&mut self, outcome: Outcome, inbound: &mut dyn Inbound) {
        self.tally.push(self.post.ticket, outcome, inbound);
        self.index += 1;
        self.offset = 0;
    }

    fn is_over(&self) -> bool {
        self.ended.is_some() || self.index == self.post.moves.len()
    }

    fn finish(mut self, link: Option<&mut Link>, inbound: &mut dyn Inbound) {
        let ticket = self.post.ticket;
        let mut empty = Outcome::DONE;
        if let Some(ending) = self.ended {
            empty = ending.outcome(FarEnd::Untouched);
            while self.index < self.post.moves.len() {
                let begun = self.offset > 0 && self.post.moves[self.index].access == Access::Write;
                let far_end = if begun { FarEnd::Unknown } else { FarEnd::Untouched };
                self.next(ending.outcome(far_end), inbound);
            }
        } else if let (true, Some(arrival), Some(link)) = (self.all_done, self.post.arrival, link)
            && let Err(refusal) = prove(self.post.link, link, arrival.region, inbound)
                .and_then(|()| inbound.arrive(self.post.link, arrival))
        {
            empty = Outcome { far_end: FarEnd::Done, ..Outcome::refused(refusal) };
            self.tally = Tally::default();
            self.post.moves.iter().for_each(|_| self.tally.push(ticket, empty, inbound));
        }
        self.tally.finish(ticket, empty, self.post.moves, inbound);
    }
}

/// Shows the capability of an attached region, once.
fn prove(id: LinkId, link: &mut Link, region: RegionId, inbound: &mut dyn Inbound) -> Result<(), Refusal> {
    link.attached.prove(region, |capability| inbound.prove(id, region, capability).map(drop))
}

/// Copies one piece of a move.
fn step(
    id: LinkId,
    link: &mut Link,
    posted: &PostedMove,
    offset: u64,
    len: u64,
    inbound: &mut dyn Inbound,
) -> Result<(), Refusal> {
    let region = posted.remote.region;
    prove(id, link, region, inbound)?;
    // The whole move is checked at its first piece, so that a refusal leaves the target untouched.
    let first = offset == 0;
    let asked_len = if first { posted.remote.len } else { len };
    let range = RemoteRange { region, offset: posted.remote.offset + offset, len: asked_len };
    let remote = inbound.resolve(id, range, posted.access)?.as_ptr();
    // Fits: the local range is memory of this process.
    let (len, skipped) = (len as usize, offset as usize);
    let local = posted.local.as_ptr().wrapping_add(skipped);
    let (source, target) = match posted.access {
        Access::Write => (local, remote),
        Access::Read => (remote, local),
    };
    if source == target {
        return Ok(());
    }
    if source.addr().abs_diff(target.addr()) < len {
        // Two overlapping parts of a raw region: there is no right answer to copy.
        return Err(Refusal::OutOfBounds);
    }
    // SAFETY:
    // - the local side: the contract lends `posted`'s range until `Finished`; `skipped + len` is inside it.
    // - the remote side: resolved above for at least `len` bytes, in this poll.
    // - no overlap: compared above. Others reach raw regions by copies only.
    unsafe { copy(source, target, len) };
    Ok(())
}

// SAFETY:
// - only posted ranges and resolved pointers are touched, in `step`, by `copy`; resolved ones are not kept.
// - `Finished` comes from `Job::finish` only, which consumes the job: nothing of it is touched afterwards, and it comes once.
// - outcomes are told as they are known here: both ends are this process.
unsafe impl Memory for Host {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        local == MemoryKind::Host && remote == MemoryKind::Host
    }

    fn share_header(&mut self, _header: &Arc<HeaderPage>) {}

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        if memory.kind == MemoryKind::Host { Ok(()) } else { Err(RegisterError::Kind(memory.kind)) }
    }

    fn release(&mut self, _region: RegionId) {}

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
unsafe impl Transport for Host {
    fn open(&mut self, _now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        if !matches!(connection, Connection::Loopback) {
            return Err(OpenError::WrongConnection { transport: "host" });
        }
        if self.links.len() >= LIMITS.links_max as usize {
            return Err(OpenError::Full { transport: "host", links_max: LIMITS.links_max });
        }
        self.links.insert(link, Link::default());
        Ok(())
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if self.links.remove(&link).is_some() {
            self.downs.push((link, reason));
        }
    }

    unsafe fn post(&mut self, _now: Instant, post: Post) -> Result<(), NotPosted> {
        match self.links.get_mut(&post.link) {
            None => Err(NotPosted { post, reason: PostRefusal::LinkClosed }),
            Some(link) if link.posts >= LIMITS.posts_max => Err(NotPosted { post, reason: PostRefusal::Full }),
            Some(link) => {
                link.posts += 1;
                self.queue.push_back(Job {
                    post,
                    index: 0,
                    offset: 0,
                    tally: Tally::default(),
                    all_done: true,
                    ended: None,
                });
                Ok(())
            }
        }
    }

    fn cancel(&mut self, _now: Instant, ticket: TicketId) {
        if let Some(job) = self.queue.iter_mut().find(|job| job.post.ticket == ticket) {
            job.ended = Some(Ending::Cancelled);
        }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Completions for Host {
    fn poll(&mut self, _now: Instant, mut budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let mut turn = Turn::Idle;
        for (link, reason) in core::mem::take(&mut self.downs) {
            self.drop_link(link, reason, inbound);
            turn = Turn::Worked;
        }
        // Bounded by the queue and the budget.
        while let Some(mut job) = self.queue.pop_front() {
            turn = Turn::Worked;
            let Some(link) = self.links.get_mut(&job.post.link) else {
                job.ended = Some(Ending::LinkDown(LinkDownReason::Closed));
                job.finish(None, inbound);
                continue;
            };
            budget_bytes = job.run(link, budget_bytes, inbound);
            if job.is_over() {
                link.posts -= 1;
                job.finish(Some(link), inbound);
            } else {
                self.queue.push_front(job);
            }
            if budget_bytes == 0 {
                break;
            }
        }
        turn
    }

    fn arm(&mut self, _now: Instant) -> Wake<'_> {
        if self.queue.is_empty() && self.downs.is_empty() { Wake::Idle } else { Wake::Now }
    }
}

// SAFETY: as for `Memory`.
unsafe impl Device for Host {
    fn name(&self) -> &'static str {
        "host"
    }

    fn limits(&self) -> DeviceLimits {
        LIMITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Clock, PROGRESS_DEADLINE, Pair, run};
    use crate::fabric::{Fabric, FabricOptions, LinkOptions};

    #[test]
    fn the_host_backend_conforms() {
        run(&mut || {
            let mut fabric = Fabric::new(FabricOptions::new([1; 32])).unwrap();
            let host = fabric.add_device(Box::new(Host::new())).unwrap();
            let options = LinkOptions::with_progress_deadline(PROGRESS_DEADLINE);
            let link = fabric.open(Instant::ZERO, host, Connection::Loopback, options).unwrap();
            Pair::alone(fabric, link, Clock::Virtual(Instant::ZERO))
        });
    }
}
