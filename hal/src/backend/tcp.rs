//! Kernel TCP: non-blocking, vectored I/O from and into registered memory, any number of lanes behind one descriptor.
//!
//! A lane is adopted after hello and authentication, as a connected socket and the bytes already read, or with the cipher
//! of an encrypted connection; this module never resolves, dials or accepts, and decides nothing but the order of frames.
//! Either end posts. The protocol is `millpond_core::wire::frame` (its `SPEC.md`). Data is copied once by each kernel and
//! nowhere else, except what came along with a head, and by a cipher. In steady state nothing is allocated without one.
//!
//! Invariants: a violation ends its lane only; memory of ours that peers use is resolved anew in each turn; a batch is
//! finished only when its last frame was answered, the peer said that it is quiet, or the socket is closed.
#![allow(unsafe_code)]

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod integrity;
mod lane;
mod proof;
mod receive;
mod serve;
mod socket;
#[cfg(test)]
mod tests;
mod ticket;
#[cfg(test)]
pub(super) mod toy;
mod transmit;
mod wire;

use core::mem::MaybeUninit;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken};
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::{Credit, Takings};
use millpond_core::wire::frame::Proof;
use rustix::event::epoll;

use self::lane::Lane;
use self::socket::Vectors;
use self::ticket::Tickets;
use self::transmit::{Style, Tools};
use self::wire::Wire;
use crate::contract::{
    Completions, Connection, Device, DeviceLimits, End, Event, Inbound, Lane as LaneFacts, LaneSide, LinkDownReason,
    LinkId, Memory, NotPosted, OpenError, Post, PostRefusal, RegionMemory, RegisterError, TURN_BYTES_MAX, TicketId,
    Transport, Turn, Wake,
};
use crate::mapping::HeaderPage;

/// Lanes of one device, at most.
pub const LANES_MAX: u32 = 4096;
/// Batches that one lane holds, at most.
pub const POSTS_MAX: u32 = 1024;
/// Batches that wait in a lane for the peer's credit, at most; more are refused as long as there is none.
pub const STARVED_POSTS_MAX: usize = 32;
/// Moves of one batch, at most.
pub const MOVES_MAX: u32 = 1 << 16;
/// Up to so many lanes every socket is simply tried; above, the kernel is asked which are ready.
const TRIED_LANES_MAX: usize = 2;
/// The least share of a turn that a lane gets.
const SHARE_LEN_MIN: u64 = 128 << 10;
/// Turns in a row without a byte after which a lane that nobody here waits for is tried in every so many turns only: asking
/// the socket costs more than all else in an idle turn, and what other lanes and devices wait for is found in such turns.
const LIVELY_TURNS: u32 = 16;
/// How many. Such turns are so much shorter that a byte is found about as soon.
const QUIET_TURNS: u32 = 8;
/// Up to four lanes have all that a lane may have; however many there are, one has room for four of the longest frames.
const TAKINGS: Takings =
    Takings { whole: Credit { bytes: 1 << 30, slices: 256 }, least: Credit { bytes: 64 << 20, slices: 4 } };
/// Where refused bytes are drained to.
const NOWHERE_LEN: usize = 64 << 10;

/// Whether payloads carry a checksum of our own, on top of TCP's.
///
/// ```
/// use millpond_hal::backend::tcp::Checksum;
/// assert_eq!(Checksum::default(), Checksum::None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checksum {
    /// TCP's only.
    #[default]
    None,
    /// CRC-32C of what this end writes and of what it reads; costs about 0.1 ms of CPU per MiB on each side.
    Crc32c,
}

/// What congestion control lanes to peers on this host get. Other lanes are left alone.
///
/// ```
/// use millpond_hal::backend::tcp::LocalPeers;
/// assert_eq!(LocalPeers::default(), LocalPeers::Unpaced);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LocalPeers {
    /// Reno, or else cubic: bbr paces, which halves the speed over loopback.
    #[default]
    Unpaced,
    /// Whatever the host uses.
    Unchanged,
}

/// How a [`TcpDevice`] behaves.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_hal::backend::tcp::{Checksum, TcpOptions};
/// let options = TcpOptions { checksum: Checksum::Crc32c, ..TcpOptions::default() };
/// assert_eq!(options.progress_deadline, Duration::from_secs(5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// A lane on which a batch waits, or a ping, ends when nothing moved for so long.
    pub progress_deadline: Duration,
    /// A lane that heard nothing for so long is pinged.
    pub keepalive: Duration,
    /// A lane that was dialled here and that neither side used for so long is closed, with a goodbye: idle peers do not use
    /// up a node's connections. The side that accepted waits for the other, who alone can come back. [`Duration::MAX`]:
    /// never.
    pub idle_span_max: Duration,
    /// A lane that was idle ends when nothing at all comes back for so long after its next use: short enough that another
    /// one can be connected within the time that connecting may take.
    pub first_answer: Duration,
    /// Checksums of payloads.
    pub checksum: Checksum,
    /// Congestion control towards peers on this host.
    pub local_peers: LocalPeers,
    /// What all peers together may have asked for and not been answered, in bytes and frames, and each at least; divided
    /// evenly among the lanes that are open. A lane begins with what the protocol says, 64 frames and 256 MiB, and never
    /// has more; it comes down to its share as that is used up.
    pub takings: Takings,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            progress_deadline: Duration::from_secs(5),
            keepalive: Duration::from_secs(10),
            idle_span_max: Duration::MAX,
            first_answer: Duration::from_millis(400),
            checksum: Checksum::default(),
            local_peers: LocalPeers::default(),
            takings: TAKINGS,
        }
    }
}

/// The `tcp` backend.
///
/// ```
/// use millpond_hal::backend::tcp::{TcpDevice, TcpOptions};
/// use millpond_hal::contract::Device;
/// let device = TcpDevice::new(TcpOptions::default()).unwrap();
/// assert_eq!(device.name(), "tcp");
/// ```
pub struct TcpDevice {
    options: TcpOptions,
    epoll: OwnedFd,
    lanes: Vec<Option<Box<Lane>>>,
    /// Slots of open lanes, and which of them gets the first share of the next turn.
    open: Vec<u32>,
    turn_first: usize,
    tools: Tools,
    /// Regions of peers whose proof was sent, per lane.
    attached: HashMap<(LinkId, RegionId), Capability>,
    /// Batches that ended outside of a poll.
    over: VecDeque<TicketId>,
    next_check: Instant,
}

impl core::fmt::Debug for TcpDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TcpDevice")
            .field("options", &self.options)
            .field("lanes", &self.open.len())
            .finish_non_exhaustive()
    }
}

impl TcpDevice {
    /// A device without lanes. Fails only if the process is out of descriptors.
    pub fn new(options: TcpOptions) -> Result<Self, OpenError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| failed("epoll_create", errno))?;
        Ok(Self {
            options,
            epoll,
            lanes: Vec::new(),
            open: Vec::new(),
            turn_first: 0,
            tools: Tools {
                tickets: Tickets::new(),
                vectors: Vectors::new(),
                extents: Vec::new(),
                nowhere: vec![0; NOWHERE_LEN].into_boxed_slice(),
                share: lane::INITIAL,
            },
            attached: HashMap::new(),
            over: VecDeque::new(),
            next_check: Instant::NEVER,
        })
    }

    fn lane(&mut self, link: LinkId) -> Option<&mut Lane> {
        self.lanes.get_mut(link.handle().slot as usize)?.as_deref_mut().filter(|lane| lane.link == link)
    }

    /// Lanes are tried without asking the kernel while they are few.
    fn tries_all(&self) -> bool {
        self.open.len() <= TRIED_LANES_MAX
    }

    fn adopt(
        &mut self,
        now: Instant,
        link: LinkId,
        wire: Wire,
        read_ahead: &[u8],
        facts: LaneFacts,
    ) -> Result<(), OpenError> {
        let slot = link.handle().slot;
        rustix::io::ioctl_fionbio(wire.fd(), true).map_err(|errno| failed("making the socket non-blocking", errno))?;
        let checksummed = self.options.checksum == Checksum::Crc32c;
        if self.options.local_peers == LocalPeers::Unpaced {
            socket::unpace_local_peer(wire.fd().as_fd());
        }
        let retires = facts.side == LaneSide::Dialed && self.options.idle_span_max != Duration::MAX;
        let style = Style { generation: facts.generation, checksummed, link, lane_slot: slot, retires };
        let data = epoll::EventData::new_u64(slot.into());
        epoll::add(&self.epoll, wire.fd(), data, epoll::EventFlags::IN)
            .map_err(|errno| failed("watching the socket", errno))?;
        let lane = Lane::new(now, wire, style, read_ahead)
            .ok_or(failed("taking over the bytes read", rustix::io::Errno::MSGSIZE))?;
        if self.lanes.len() <= slot as usize {
            self.lanes.resize_with(slot as usize + 1, || None);
        }
        self.next_check = self.next_check.min(lane.next_timer(&self.options));
        self.lanes[slot as usize] = Some(Box::new(lane));
        self.open.push(slot);
        self.divide();
        if self.open.len() == TRIED_LANES_MAX + 1 {
            // From now on the kernel is asked: nothing that it was not asked about so far may be missed.
            for lane in self.lanes.iter_mut().flatten() {
                lane.has_more = true;
            }
        }
        Ok(())
    }

    /// Each open lane has its share of what is taken.
    fn divide(&mut self) {
        let Credit { bytes, slices } = self.options.takings.share(u32::try_from(self.open.len()).unwrap_or(u32::MAX));
        self.tools.share = Credit { bytes: bytes.min(lane::INITIAL.bytes), slices: slices.min(lane::INITIAL.slices) };
    }

    /// Marks lanes that the kernel says are ready.
    fn ask_kernel(&mut self) {
        let mut ready = [const { MaybeUninit::uninit() }; 64];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut ready, Some(&zero)) else { return };
        for event in ready {
            let (data, flags) = (event.data, event.flags);
            let slot = usize::try_from(data.u64()).unwrap_or(usize::MAX);
            if let Some(Some(lane)) = self.lanes.get_mut(slot) {
                lane.has_more = true;
                lane.is_blocked &= !flags.contains(epoll::EventFlags::OUT);
            }
        }
    }

    /// Has the epoll set watch for what the lane needs.
    fn watch(epoll: &OwnedFd, slot: u32, lane: &mut Lane) {
        let wants = lane.wants();
        if wants == lane.watched {
            return;
        }
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, wants.0);
        flags.set(epoll::EventFlags::OUT, wants.1);
        if epoll::modify(epoll, lane.fd(), epoll::EventData::new_u64(slot.into()), flags).is_ok() {
            lane.watched = wants;
        }
    }

    fn check_timers(&mut self, now: Instant) {
        let mut next = Instant::NEVER;
        for slot in &self.open {
            if let Some(Some(lane)) = self.lanes.get_mut(*slot as usize) {
                lane.on_time(now, &self.options);
                next = next.min(lane.next_timer(&self.options));
            }
        }
        self.next_check = next;
    }

    /// Gives each lane with something to do a share of the turn.
    fn take_turns(&mut self, now: Instant, budget: u64, inbound: &mut dyn Inbound) -> bool {
        let (count, tries_all) = (self.open.len(), self.tries_all());
        if count == 0 {
            return false;
        }
        self.turn_first = (self.turn_first + 1) % count;
        let busy =
            self.open.iter().filter(|slot| self.lanes[**slot as usize].as_ref().is_some_and(|lane| lane.has_more));
        let share = (budget / busy.count().max(1) as u64).max(SHARE_LEN_MIN).min(budget);
        let mut moved = false;
        for index in 0..count {
            let slot = self.open[(self.turn_first + index) % count];
            let Some(Some(lane)) = self.lanes.get_mut(slot as usize) else { continue };
            let sends = !lane.is_blocked && lane.has_work(&mut self.tools);
            let is_tried = tries_all && lane.is_due();
            if lane.ended.is_none() && (is_tried || lane.has_more || sends) {
                moved |= lane.turn(now, share, &mut self.tools, inbound);
                if !tries_all {
                    Self::watch(&self.epoll, slot, lane);
                }
            }
        }
        moved
    }

    /// Ends the lanes that are over: finishes their batches, closes their sockets, tells.
    fn bury(&mut self, inbound: &mut dyn Inbound) -> bool {
        let mut index = 0;
        let mut any = false;
        while let Some(&slot) = self.open.get(index) {
            let lane = &mut self.lanes[slot as usize];
            let Some(reason) = lane.as_ref().and_then(|lane| lane.ended) else {
                index += 1;
                continue;
            };
            any = true;
            self.open.swap_remove(index);
            let Some(mut lane) = lane.take() else { continue };
            lane.say_goodbye(&mut self.tools);
            let (link, tickets) = (lane.link, core::mem::take(&mut lane.tickets));
            // Closing the socket is what makes memory quiet here; it leaves the epoll set by itself.
            drop(lane);
            for id in tickets {
                self.tools.tickets.finish(id, End::LinkDown(reason), &mut |event| inbound.event(event));
            }
            self.attached.retain(|(of, _), _| *of != link);
            inbound.event(Event::LinkDown { link, reason });
        }
        if any {
            self.divide();
        }
        any
    }

    fn finish_over(&mut self, inbound: &mut dyn Inbound) -> bool {
        let any = !self.over.is_empty();
        while let Some(id) = self.over.pop_front() {
            let slot = self.tools.tickets.get(id).map(|ticket| ticket.lane_slot as usize);
            self.tools.tickets.finish(id, End::Cancelled, &mut |event| inbound.event(event));
            if let Some(Some(lane)) = slot.and_then(|slot| self.lanes.get_mut(slot)) {
                lane.forget_finished(&mut self.tools);
            }
        }
        any
    }
}

fn failed(action: &'static str, errno: rustix::io::Errno) -> OpenError {
    OpenError::System { transport: "tcp", action, code: errno.raw_os_error() }
}

// SAFETY: for all four traits, duty by duty:
// - touch only what is lent: local memory is reached through `Ticket::pieces` and `Ticket::target` only, of tickets that
//   are in the table, that is, between `post` and `Finished`; peers' requests through `Inbound::resolve`, in each turn anew:
//   `Vectors` are filled and used inside one `flush` or `receive`.
// - no references: `socket` hands addresses to the kernel and copies by `crate::copy`.
// - `Finished` is quiet and comes once: `Tickets::finish` takes the ticket out of the table first.
// - told honestly, right bytes: a write is done at the ack that the peer sends after the bytes lie there; a read only at the
//   ack behind all its data (`Ticket::on_slice_ended` counts it).
// - arrivals: `receive::on_written` calls `arrive` after the data and only without failures; a batch of several frames
//   sends its arrival alone, after all acks.
// - untrusted input: everything passes `wire::frame::parse`; what a ticket makes no sense of is a violation.
// - closing: `bury` runs in every poll.
unsafe impl Memory for TcpDevice {
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool {
        let by_cpu = |kind| matches!(kind, MemoryKind::Host | MemoryKind::Pinned);
        by_cpu(local) && by_cpu(remote)
    }

    fn share_header(&mut self, _header: &Arc<HeaderPage>) {}

    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError> {
        if self.moves(memory.kind, memory.kind) { Ok(()) } else { Err(RegisterError::Kind(memory.kind)) }
    }

    fn release(&mut self, _region: RegionId) {}

    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError> {
        let proof = Proof::new(token.region, token.capability);
        // Another token for the same region is proven too; what the owner has accepted before stays accepted.
        let known = self.attached.insert((link, token.region), token.capability);
        let is_new = known.is_none_or(|known| !known.matches(&token.capability));
        if is_new && let Some(lane) = self.lane(link) {
            lane.prove(proof);
        }
        Ok(())
    }

    fn detach(&mut self, link: LinkId, region: RegionId) {
        self.attached.remove(&(link, region));
    }
}

// SAFETY: see `Memory`.
unsafe impl Transport for TcpDevice {
    fn open(&mut self, now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError> {
        let (wire, read_ahead, lane) = match connection {
            Connection::Stream { fd, read_ahead, lane } => (Wire::new(fd, None), read_ahead, lane),
            Connection::Secured { fd, cipher, lane } => (Wire::new(fd, Some(cipher)), Vec::new(), lane),
            _ => return Err(OpenError::WrongConnection { transport: "tcp" }),
        };
        if self.open.len() >= LANES_MAX as usize {
            return Err(OpenError::Full { transport: "tcp", links_max: LANES_MAX });
        }
        self.adopt(now, link, wire, &read_ahead, lane)
    }

    fn close(&mut self, link: LinkId, reason: LinkDownReason) {
        if let Some(lane) = self.lane(link) {
            lane.end(reason);
        }
    }

    unsafe fn post(&mut self, now: Instant, post: Post) -> Result<(), NotPosted> {
        let slot = post.link.handle().slot;
        let lanes = self.lanes.get_mut(slot as usize).and_then(Option::as_deref_mut);
        let Some(lane) = lanes.filter(|lane| lane.link == post.link && lane.ended.is_none()) else {
            return Err(NotPosted { post, reason: PostRefusal::LinkClosed });
        };
        if lane.tickets.len() >= POSTS_MAX as usize || lane.out.is_starved() {
            return Err(NotPosted { post, reason: PostRefusal::Full });
        }
        let (id, is_empty) = (post.ticket, post.moves.is_empty() && post.arrival.is_none());
        lane.post(now, TURN_BYTES_MAX, slot, post, &mut self.tools);
        if is_empty {
            self.over.push_back(id);
        }
        self.next_check = self.next_check.min(lane.next_timer(&self.options));
        Ok(())
    }

    fn cancel(&mut self, _now: Instant, ticket: TicketId) {
        let Some(slot) = self.tools.tickets.get(ticket).map(|ticket| ticket.lane_slot) else { return };
        if let Some(Some(lane)) = self.lanes.get_mut(slot as usize)
            && lane.cancel(ticket, &mut self.tools)
        {
            self.over.push_back(ticket);
        }
    }
}

// SAFETY: see `Memory`.
unsafe impl Completions for TcpDevice {
    fn poll(&mut self, now: Instant, budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn {
        let mut worked = self.finish_over(inbound);
        if now >= self.next_check {
            self.check_timers(now);
        }
        if !self.tries_all() {
            self.ask_kernel();
        }
        worked |= self.take_turns(now, budget_bytes.min(TURN_BYTES_MAX), inbound);
        worked |= self.bury(inbound);
        if worked { Turn::Worked } else { Turn::Idle }
    }

    fn arm(&mut self, now: Instant) -> Wake<'_> {
        if !self.over.is_empty() {
            return Wake::Now;
        }
        if self.open.is_empty() {
            return Wake::Idle;
        }
        for slot in &self.open {
            let Some(Some(lane)) = self.lanes.get_mut(*slot as usize) else { continue };
            let sends = !lane.is_blocked && lane.has_work(&mut self.tools);
            if lane.has_more || lane.ended.is_some() || sends {
                return Wake::Now;
            }
            // Whoever wakes for it finds it in its first turn.
            lane.quiet_turns = 0;
            Self::watch(&self.epoll, *slot, lane);
        }
        let within = (self.next_check != Instant::NEVER).then(|| self.next_check.since(now));
        Wake::Readable { fd: self.epoll.as_fd(), within }
    }
}

// SAFETY: see `Memory`.
unsafe impl Device for TcpDevice {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { moves_max: MOVES_MAX, bytes_max: 1 << 40, posts_max: POSTS_MAX, links_max: LANES_MAX }
    }
}
