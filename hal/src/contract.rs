//! What a backend promises, and what it is promised: the one contract between [`crate::fabric`] and every device.
//!
//! A backend moves bytes between memory that the fabric gives it and a peer. It decides nothing: handles, bounds, rights,
//! epochs, capabilities and limits are checked by the fabric, once for all backends; policy (paths, retries, slices) lives
//! above. Nothing here knows what a store is.
//!
//! Life of a move: **register → post → finish (here) + arrive (there)**.
//!
//! # What the fabric promises
//! - It calls a device from one thread at a time, and never from inside an [`Inbound`] call.
//! - `local .. local + len` of each [`PostedMove`] is memory of one registered region, valid from [`Transport::post`] until
//!   the device reports [`Event::Finished`] for the ticket. For [`Access::Read`] nobody else touches it in that time; for
//!   [`Access::Write`] nobody writes to it, except that raw regions may be changed by their owner at any time.
//! - A pointer from [`Inbound::resolve`] is good for exactly the range asked for, with the access asked for, until the
//!   `poll` during which it was given returns. What [`Inbound::lend`] gives is good until [`Memory::revoke`] returns, which is
//!   called before anybody else gets those bytes.
//! - A ticket is posted once; ids are not reused before [`Event::Finished`]. A posted list keeps within
//!   [`DeviceLimits`]; all its moves go over one link. Lengths may be zero.
//! - A region stays mapped from [`Memory::register`] until [`Memory::release`] returns.
//!
//! # What a device promises (the duties that `unsafe impl` signs)
//! - **Touch only what is lent.** Local memory is touched only through posted moves, between `post` and `Finished`, and only
//!   inside the ranges posted: a [`Access::Write`] move is read from, a [`Access::Read`] move is written to. A peer's
//!   request is served only through [`Inbound::resolve`], asked again in every `poll`; no pointer it gave outlives the poll.
//!   A one-sided device may instead give the peer keys to what [`Inbound::lend`] named, for that link, those ranges and those
//!   rights; when [`Memory::revoke`] returns, no key reaches those bytes any more.
//! - **No references.** Memory that a device or peer may write is handled by pointer and copy, never as `&` or `&mut`.
//! - **`Finished` is quiet.** Once `Finished` is reported for a ticket the device never touches its local memory again.
//!   It is reported exactly once for each ticket that `post` accepted, and for no other.
//! - **The far end is told honestly.** [`FarEnd::Done`]: the peer has confirmed that the move is visible there.
//!   [`FarEnd::Untouched`]: the peer has confirmed, or it is certain, that it neither did nor will do any of it.
//!   Everything else is [`FarEnd::Unknown`]. A read is `Done` when its bytes are in local memory and were the peer's.
//! - **Done is visible, a sync is durable.** `Done` means that whoever reads the target from then on gets the bytes, also
//!   after the death of either process; it does not mean that they outlive a loss of power. [`Post::sync`] asks for that: such
//!   a batch is done only once its own writes, and all writes to that memory that were done before, are on stable storage.
//! - **Right bytes or an error.** A move is reported done only if exactly the bytes of the source lie in the target. A
//!   source that was revoked before the copy was complete makes it [`End::Refused`].
//! - **Arrivals follow their writes.** [`Inbound::arrive`] is called once for a batch, after every write of it was applied,
//!   and not at all if one was refused. Where the owner refuses to count, the batch ends refused, with far end `Done`.
//! - **Peer input is untrusted.** No byte from a peer reaches an `assert!` or an unchecked index; what does not parse ends
//!   that link with [`LinkDownReason::Violation`] and nothing else.
//! - **It can be closed.** After [`Transport::close`] the next `poll` reports `Finished` for every ticket of that link, then
//!   [`Event::LinkDown`], once. A link that dies by itself does the same. A peer never keeps a device from doing so; the
//!   kernel or an engine that copies may: where it still reads or writes local memory (`file`, `cuda`), both come in the first
//!   poll after it let go.
//! - **It does not block or spin.** `post`, `poll`, `cancel`, `close` and `arm` return without waiting for a peer; `poll`
//!   copies at most `budget_bytes` by CPU, give or take one move's chunk of [`TURN_CHUNK_LEN`].
//! - **Overlap is refused.** A move whose two sides overlap in one memory (raw regions, link to oneself) may be refused.
//! - **It wakes.** After [`Wake::Readable`] the descriptor becomes readable when a `poll` would have something to do.
//! - **It knows limits.** Every queue has a bound; at the bound `post` gives the batch back.

use core::ptr::NonNull;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::{Capability, MemoryKind, RegionId, RegionToken, Rights};
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};

use crate::file::OpenFile;

mod cipher;
mod fence;
mod refusal;
pub use cipher::{Cipher, CipherError};
pub use fence::{Fence, FenceState};
pub use refusal::{LinkDownReason, Refusal};

/// The most bytes a device copies by CPU in one turn.
pub const TURN_BYTES_MAX: u64 = 1 << 20;
/// A device may overrun its turn by at most one piece of this length.
pub const TURN_CHUNK_LEN: u64 = 256 << 10;

/// A link between this fabric and one peer, over one device.
///
/// ```
/// use millpond_core::slab::Handle;
/// use millpond_hal::contract::LinkId;
/// assert_eq!(LinkId::new(Handle { slot: 1, epoch: 3 }).handle().slot, 1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(Handle);

/// A posted batch, from its post until its outcome was taken.
///
/// ```
/// use millpond_core::slab::Handle;
/// use millpond_hal::contract::TicketId;
/// let ticket = TicketId::new(Handle { slot: 1, epoch: 3 });
/// assert_eq!(TicketId::from_bits(ticket.to_bits()), ticket);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketId(Handle);

impl LinkId {
    /// The link with this handle in a fabric's table.
    #[must_use]
    pub const fn new(handle: Handle) -> Self {
        Self(handle)
    }

    /// Its handle.
    #[must_use]
    pub const fn handle(self) -> Handle {
        self.0
    }
}

impl TicketId {
    /// The ticket with this handle in a fabric's table.
    #[must_use]
    pub const fn new(handle: Handle) -> Self {
        Self(handle)
    }

    /// Its handle.
    #[must_use]
    pub const fn handle(self) -> Handle {
        self.0
    }

    /// As one number, for the wire: a peer only ever echoes it.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        (self.0.epoch as u64) << 32 | self.0.slot as u64
    }

    /// The ticket of [`TicketId::to_bits`].
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // the halves are taken apart on purpose
    pub const fn from_bits(bits: u64) -> Self {
        Self(Handle { slot: bits as u32, epoch: (bits >> 32) as u32 })
    }
}

/// What a move does to the peer's memory.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Bytes come from the peer's memory into local memory.
    Read,
    /// Bytes go from local memory into the peer's memory.
    Write,
}

impl Access {
    /// The right that a peer needs for it.
    #[must_use]
    pub const fn right(self) -> Rights {
        match self {
            Self::Read => Rights::REMOTE_READ,
            Self::Write => Rights::REMOTE_WRITE,
        }
    }
}

/// A range as a peer names it.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    /// The whole region or grant, in the owner's table.
    pub region: RegionId,
    /// First byte, an offset in the memory that the region or grant lies in.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// One copy between local memory and a peer's, checked by the fabric.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug)]
pub struct PostedMove {
    /// First local byte.
    pub local: NonNull<u8>,
    /// The local region that `local` lies in.
    pub local_region: RegionId,
    /// Where in that region, in bytes.
    pub local_offset: u64,
    /// The peer's memory; as long as the local range.
    pub remote: RemoteRange,
    /// Which way the bytes go.
    pub access: Access,
}

// SAFETY:
// - `local` blocks Send. The fabric lends the memory behind it to the device until `Finished`, whatever thread polls; the
//   leases that make it so are Send themselves (`region`). Test: `conformance` moves a posted fabric to another thread.
#[allow(unsafe_code)]
unsafe impl Send for PostedMove {}

/// "Count `amount` on `counter` of `region` once this batch's writes are applied."
///
/// Example: `hal/src/backend/sim/net.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostedArrival {
    /// A region or grant of the peer that the batch writes to.
    pub region: RegionId,
    /// Which counter of it.
    pub counter: u64,
    /// How much to add.
    pub amount: u64,
}

/// A batch on its way to a device. The device keeps `moves` until it reports [`Event::Finished`], and gives it back there,
/// so that the fabric can use the allocation again.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Debug)]
pub struct Post {
    /// Names the batch in events.
    pub ticket: TicketId,
    /// The link to use.
    pub link: LinkId,
    /// Which attempt at the same work this is, counted from 0.
    pub attempt: u32,
    /// What to move.
    pub moves: Vec<PostedMove>,
    /// What to count at the peer afterwards.
    pub arrival: Option<PostedArrival>,
    /// What to bring to stable storage after the writes and before the arrival: an empty range of a region of a kind that
    /// [`Memory::syncs`] names.
    pub sync: Option<RemoteRange>,
    /// What has to be done on a device before any of it moves, on a device that [`Transport::waits_for_fences`].
    pub after: Option<Arc<dyn Fence>>,
}

/// A device did not take a batch; nothing was started and the batch comes back.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Debug)]
pub struct NotPosted {
    /// The batch, unchanged.
    pub post: Post,
    /// Why.
    pub reason: PostRefusal,
}

/// Why a device does not take a batch.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostRefusal {
    /// The link's queue is at its bound.
    #[error("the link's queue is full; post again after a batch on it has finished")]
    Full,
    /// The link is not, or no longer, open on this device.
    #[error("the link is closed; open another one")]
    LinkClosed,
    /// The device cannot reach that local memory from the peer's side (not shareable, wrong kind).
    #[error("this transport cannot share that local memory; allocate it with a memfd or use another transport")]
    NotShareable,
}

/// What the peer's memory has seen of a move that ended.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FarEnd {
    /// All of it.
    Done,
    /// None of it, and it never will.
    Untouched,
    /// It cannot be told.
    Unknown,
}

/// How a move ended here.
///
/// Example: `hal/src/backend/sim.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The bytes are where they should be.
    Done,
    /// The peer refused it.
    Refused(Refusal),
    /// It was cancelled.
    Cancelled,
    /// The link ended first.
    LinkDown(LinkDownReason),
}

/// The outcome of one request (move) of a batch.
///
/// ```
/// use millpond_hal::contract::Outcome;
/// assert!(Outcome::DONE.is_done());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How it ended here.
    pub end: End,
    /// What the far end has seen of it.
    pub far_end: FarEnd,
}

impl Outcome {
    /// Moved, and visible at the target.
    pub const DONE: Self = Self { end: End::Done, far_end: FarEnd::Done };

    /// Refused by the peer, which did nothing.
    #[must_use]
    pub const fn refused(refusal: Refusal) -> Self {
        Self { end: End::Refused(refusal), far_end: FarEnd::Untouched }
    }

    /// Cancelled.
    #[must_use]
    pub const fn cancelled(far_end: FarEnd) -> Self {
        Self { end: End::Cancelled, far_end }
    }

    /// Ended with its link.
    #[must_use]
    pub const fn link_down(reason: LinkDownReason, far_end: FarEnd) -> Self {
        Self { end: End::LinkDown(reason), far_end }
    }

    /// Whether the bytes are where they should be.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self.end, End::Done)
    }
}

/// What a device tells the fabric, only from inside `poll`.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// Bytes of this ticket moved; holds off the progress deadline.
    Progress {
        /// Whose.
        ticket: TicketId,
        /// How many more.
        bytes: u64,
    },
    /// Some moves of a ticket ended otherwise than the rest will. Local memory may still be touched until `Finished`.
    Ended {
        /// Whose.
        ticket: TicketId,
        /// Index of the first of them in the posted list.
        first: u32,
        /// How many.
        count: u32,
        /// How they ended.
        outcome: Outcome,
    },
    /// All of a ticket ended and its local memory is quiet.
    Finished {
        /// Whose.
        ticket: TicketId,
        /// How every move ended that no `Ended` named.
        outcome: Outcome,
        /// The posted list, for reuse.
        moves: Vec<PostedMove>,
    },
    /// A link ended; all its tickets were finished before.
    LinkDown {
        /// Which.
        link: LinkId,
        /// Why.
        reason: LinkDownReason,
    },
}

/// What the owner of a region or grant knows about it once its capability was proven.
///
/// Example: `hal/src/conformance/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proven {
    /// The region that it lies in.
    pub memory: RegionId,
    /// What peers may do with it.
    pub rights: Rights,
    /// The bytes of `memory` that it admits, `start..end`, if they are in one piece.
    pub range: Option<(u64, u64)>,
}

/// What a one-sided device may give a peer keys to.
///
/// Example: `hal/src/backend/rdma/memory.rs`.
#[derive(Clone, Debug)]
pub struct Lent {
    /// The region that the bytes lie in.
    pub memory: RegionId,
    /// Sorted, disjoint `start..end` ranges, offsets in the region.
    pub ranges: Vec<(u64, u64)>,
    /// What the peer may do there.
    pub rights: Rights,
}

/// The fabric as a device sees it while it is polled.
///
/// # Safety
/// - Every pointer that [`Inbound::resolve`] gives is valid for the range and access asked for until the `poll` in which it
///   was given returns; for [`Access::Write`] nobody else reads or writes there meanwhile, except that raw regions may be
///   touched by their owner, by copies, at any time.
/// - The ranges that [`Inbound::lend`] gives are valid, and nobody else's in the same way, until [`Memory::revoke`] of that
///   region or grant returns.
///
/// Example: `hal/src/backend/host.rs`.
#[allow(unsafe_code)]
pub unsafe trait Inbound {
    /// The peer on `link` shows the capability of `region`. Once this was `Ok` the link may name it until it closes.
    fn prove(&mut self, link: LinkId, region: RegionId, capability: Capability) -> Result<Proven, Refusal>;

    /// Where the bytes of `range` are, for a request of the peer on `link`. The pointer is good for `range.len` bytes, for
    /// this access only, until the current `poll` returns: ask again in the next one. Zero-length ranges resolve too. What has
    /// no address for the CPU (a file, memory of a GPU) is [`Refusal::NotShareable`].
    fn resolve(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<NonNull<u8>, Refusal>;

    /// Where all bytes of `region`, which the peer on `link` has proven, are: for devices whose peers reach memory by
    /// themselves. The device answers for them until [`Memory::revoke`].
    fn lend(&mut self, link: LinkId, region: RegionId) -> Result<Lent, Refusal> {
        let _ = (link, region);
        Err(Refusal::NotShareable)
    }

    /// Whether the peer on `link` may do `access` to `range` now, and in which region of ours that lies: for regions without
    /// addresses (files), whose backend asks before it starts each piece. Pieces that were started run on when the grant
    /// ends; the batch's `Finished` says when the last of them ended.
    fn admit(&mut self, link: LinkId, range: RemoteRange, access: Access) -> Result<RegionId, Refusal>;

    /// The writes of a batch of the peer on `link` are applied; count them.
    fn arrive(&mut self, link: LinkId, arrival: PostedArrival) -> Result<(), Refusal>;

    /// Something happened.
    fn event(&mut self, event: Event);
}

/// When to poll a device next.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug)]
pub enum Wake<'a> {
    /// At once: there is work that no descriptor would announce.
    Now,
    /// When `fd` is readable, or after `within` at the latest.
    Readable {
        /// Belongs to the device, the same one for all its life.
        fd: BorrowedFd<'a>,
        /// The device's own next timer.
        within: Option<Duration>,
    },
    /// After that long; nothing else can happen before.
    After(Duration),
    /// Not before something is posted.
    Idle,
}

/// Bounds of a device.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Most moves in one batch.
    pub moves_max: u32,
    /// Most bytes in one batch.
    pub bytes_max: u64,
    /// Most batches that one link holds before `post` answers [`PostRefusal::Full`].
    pub posts_max: u32,
    /// Most links.
    pub links_max: u32,
}

/// A region as a device sees it.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Debug)]
pub struct RegionMemory {
    /// Its name in the fabric's table.
    pub id: RegionId,
    /// First byte; dangling for a file, which has no address; an address that only the device knows for memory of a GPU.
    pub base: NonNull<u8>,
    /// Length in bytes.
    pub len: u64,
    /// What sort of memory.
    pub kind: MemoryKind,
    /// The file that it is, for [`MemoryKind::File`].
    pub file: Option<Arc<OpenFile>>,
    /// A sealed descriptor that peers on this host may map read-only, or, for memory of a GPU, its dma-buf; `None` if it cannot
    /// be shared.
    pub shared: Option<Arc<OwnedFd>>,
}

/// Which side of a lane we are, and what the hello agreed on.
///
/// Example: `hal/src/backend/tcp.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Who dialed.
    pub side: LaneSide,
    /// Generation of the lane, the same on both sides.
    pub generation: u64,
    /// Our incarnation.
    pub incarnation: u64,
    /// The peer's incarnation.
    pub peer_incarnation: u64,
}

/// Who dialed a lane. Both sides may post on it.
///
/// Example: `hal/examples/lane.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneSide {
    /// We did.
    Dialed,
    /// The peer did.
    Accepted,
}

/// What a link is made of. A device takes the kinds it knows and gives the rest back.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Connection {
    /// To ourselves; nothing is needed.
    Loopback,
    /// A connected, non-blocking stream socket after hello and authentication: TCP for `tcp`, a unix socket for `shm`.
    Stream {
        /// The socket. The runtime has let go of it.
        fd: OwnedFd,
        /// Bytes that were read beyond the hello.
        read_ahead: Vec<u8>,
        /// What the hello agreed on.
        lane: Lane,
    },
    /// The same under a cipher: the hello was said inside an encrypted connection, which goes on. For `tcp`.
    Secured {
        /// The socket. The runtime has let go of it.
        fd: OwnedFd,
        /// The state of the connection; bytes that were read beyond the hello are in it.
        cipher: Box<dyn Cipher>,
        /// What the hello agreed on.
        lane: Lane,
    },
    /// Something of the backend's own (a port of the simulated network).
    Own(Box<dyn OwnConnection>),
}

/// A connection that only its own backend understands.
///
/// Example: `hal/src/backend/sim/net.rs`.
pub trait OwnConnection: core::fmt::Debug + Send {
    /// For the backend to recognise its own.
    fn into_any(self: Box<Self>) -> Box<dyn core::any::Any + Send>;
}

/// A link was not opened; the connection was dropped, which closes its socket.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The device does not take that sort of connection.
    #[error("transport {transport} cannot use such a connection; open the link on another device")]
    WrongConnection {
        /// The device's name.
        transport: &'static str,
    },
    /// At the bound.
    #[error("transport {transport} has all its {links_max} links open; close one first")]
    Full {
        /// The device's name.
        transport: &'static str,
        /// The bound.
        links_max: u32,
    },
    /// The operating system refused.
    #[error("transport {transport}: {action} failed with system error {code}")]
    System {
        /// The device's name.
        transport: &'static str,
        /// What was tried.
        action: &'static str,
        /// The error number.
        code: i32,
    },
}

/// A device cannot use a region.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// It does not move memory of that kind.
    #[error("this transport does not move memory of kind {0:?}; stage it through host memory")]
    Kind(MemoryKind),
    /// At a bound.
    #[error("the transport's region table is full; release a region first")]
    Full,
    /// The device or its driver cannot register memory of a GPU by dma-buf.
    #[error("this device cannot register memory of kind {0:?} by dma-buf; stage it through host memory")]
    NoDmabuf(MemoryKind),
    /// The operating system refused.
    #[error("registration failed with system error {0}")]
    System(i32),
}

/// Registered memory of a device.
///
/// # Safety
/// - An implementation keeps every duty of the [module's contract](self).
///
/// Example: `hal/src/backend/host.rs`.
#[allow(unsafe_code)]
pub unsafe trait Memory {
    /// Whether a move between these kinds is possible.
    fn moves(&self, local: MemoryKind, remote: MemoryKind) -> bool;

    /// Whether it can bring such memory to stable storage ([`Post::sync`]).
    fn syncs(&self, _remote: MemoryKind) -> bool {
        false
    }

    /// The header page of this fabric, given once before anything else: its words say which tokens still hold.
    fn share_header(&mut self, header: &Arc<crate::mapping::HeaderPage>);

    /// A local region that batches may name from now on.
    ///
    /// # Safety
    /// - `memory` describes memory that stays mapped until [`Memory::release`] of it returns.
    unsafe fn register(&mut self, memory: &RegionMemory) -> Result<(), RegisterError>;

    /// Forgets a local region. No batch in flight names it. When this returns the device holds no pointer into it.
    fn release(&mut self, region: RegionId);

    /// A region or grant of ours that was lent ([`Inbound::lend`]) ends. When this returns, no peer reaches its bytes through
    /// this device. Devices that were not lent it do nothing.
    fn revoke(&mut self, exposure: RegionId) {
        let _ = exposure;
    }

    /// A peer's region or grant that batches on `link` may name from now on; the device proves the capability to the peer
    /// before, or with, the first batch that does. Called again for one it knows it does nothing, unless the capability is
    /// another one, which is then proven too; what was accepted before stays accepted. A proof that the peer refuses ends
    /// the moves that need it, not the link.
    fn attach(&mut self, link: LinkId, token: &RegionToken) -> Result<(), RegisterError>;

    /// Forgets a peer's region on `link`. No batch in flight names it.
    fn detach(&mut self, link: LinkId, region: RegionId);
}

/// Links of a device and the batches on them.
///
/// # Safety
/// - An implementation keeps every duty of the [module's contract](self).
///
/// Example: `hal/src/backend/host.rs`.
#[allow(unsafe_code)]
pub unsafe trait Transport {
    /// Makes a link of a connection. An `Err` dropped the connection.
    fn open(&mut self, now: Instant, link: LinkId, connection: Connection) -> Result<(), OpenError>;

    /// Ends a link: says goodbye if that needs no waiting. The events follow in the next `poll`. Unknown links are ignored.
    fn close(&mut self, link: LinkId, reason: LinkDownReason);

    /// Whether it holds a batch back until its [`Fence`] is passed ([`Post::after`]). Waiting so is progress: it takes as long as
    /// the work before it takes, and ends with the batch's deadline, a cancel or the link.
    fn waits_for_fences(&self) -> bool {
        false
    }

    /// Starts a batch, and pushes it as far as it goes without waiting. An `Err` started nothing.
    ///
    /// # Safety
    /// - Each local range of the list is valid until `Finished` was reported for the ticket: for [`Access::Write`] moves for
    ///   reads, for [`Access::Read`] moves for writes, with nobody else touching it (raw regions: see the module).
    #[allow(clippy::result_large_err)] // the batch comes back by design, once per refused post
    unsafe fn post(&mut self, now: Instant, post: Post) -> Result<(), NotPosted>;

    /// Makes one read now, on this thread, if nothing of it concerns anybody else. True: the right bytes are here. False: it
    /// has to be posted, for whatever reason; the local range may have been written to.
    ///
    /// # Safety
    /// - As for `post`, until this returns.
    unsafe fn read_at_once(&mut self, _link: LinkId, _posted: &PostedMove) -> bool {
        false
    }

    /// Asks a batch to end early. `Finished` follows, also if the peer must be asked first. Unknown tickets are ignored.
    fn cancel(&mut self, now: Instant, ticket: TicketId);
}

/// Events of a device and how to wait for them.
///
/// # Safety
/// - An implementation keeps every duty of the [module's contract](self).
///
/// Example: `hal/src/backend/host.rs`.
#[allow(unsafe_code)]
pub unsafe trait Completions {
    /// One turn: serves peers, moves bytes, reports events. Copies at most about `budget_bytes` by CPU. Returns whether it
    /// did anything, or has more to do at once.
    fn poll(&mut self, now: Instant, budget_bytes: u64, inbound: &mut dyn Inbound) -> Turn;

    /// When to poll next. Nothing that happened before this call is missed by the wake-up it names.
    fn arm(&mut self, now: Instant) -> Wake<'_>;
}

/// What a turn came to.
///
/// Example: `hal/src/backend/host.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing was to do.
    Idle,
    /// Something was done; there may be more.
    Worked,
}

/// A backend: memory, transport and completions of one kind. Dyn-compatible; one virtual call per batch.
///
/// # Safety
/// - An implementation keeps every duty of the [module's contract](self).
///
/// Example: `hal/src/backend/host.rs`.
#[allow(unsafe_code)]
pub unsafe trait Device: Memory + Transport + Completions + Send {
    /// Its name: `tcp`, `shm`, `host`, …
    fn name(&self) -> &'static str;

    /// Its bounds.
    fn limits(&self) -> DeviceLimits;
}
