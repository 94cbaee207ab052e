//! The verbs that the backend uses, as one table: behind it stand libibverbs (`rdma_verbs`) and, in tests, a NIC that counts.
//!
//! Nearly one method for one verb, with plain values instead of C structs. It is not a binding for general use: reliable
//! connected queue pairs only, one piece of memory for each request. Objects are named by opaque numbers; a name is good
//! from its creation until it was destroyed, and only for the table that made it.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::os::fd::BorrowedFd;

use super::gid::GidEntry;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// Example: `hal/src/backend/rdma/fake.rs`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub usize);
    };
}

handle!(
    /// A protection domain: keys of one mean nothing in another.
    Domain
);
handle!(
    /// A completion queue.
    Completions
);
handle!(
    /// A queue pair.
    QueuePair
);
handle!(
    /// A registration of memory.
    Registered
);

/// A verb failed.
///
/// Example: `hal/src/backend/rdma/fake.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{verb} failed with system error {code}")]
pub struct VerbsError {
    /// Which verb.
    pub verb: &'static str,
    /// The error number.
    pub code: i32,
}

/// Bounds of a NIC, and of its port where they are the port's.
///
/// Example: `hal/src/backend/rdma/fake.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicLimits {
    /// Longest registration, in bytes.
    pub registration_len_max: u64,
    /// Longest message, in bytes.
    pub message_len_max: u32,
    /// Queue pairs.
    pub queue_pairs_max: u32,
    /// Work requests of one queue.
    pub depth_max: u32,
    /// Entries of one completion queue.
    pub completions_max: u32,
    /// Reads in flight that one queue pair answers, and asks for.
    pub reads_max: u8,
}

/// State of the port.
///
/// Example: `hal/src/backend/rdma/fake.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    /// Whether it can be used.
    pub is_active: bool,
    /// Bytes that a packet carries.
    pub mtu_len: u32,
    /// Local identifier, InfiniBand only.
    pub lid: u16,
    /// Whether it is Ethernet (RoCE).
    pub is_ethernet: bool,
}

/// What a registration is for.
///
/// Example: `hal/src/backend/rdma/memory.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Our own requests read and write it; peers do not reach it.
    Local,
    /// Peers may read it.
    RemoteRead,
    /// Peers may write it.
    RemoteWrite,
    /// Peers may do both.
    RemoteReadWrite,
}

/// Registered memory, with the keys that name it.
///
/// Example: `hal/src/backend/rdma/memory.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// For deregistering.
    pub handle: Registered,
    /// Names it in our own requests.
    pub local_key: u32,
    /// Names it in requests of peers.
    pub remote_key: u32,
}

/// How deep a queue pair is.
///
/// Example: `hal/src/backend/rdma/endpoint.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// Send requests.
    pub send: u32,
    /// Receive requests.
    pub receive: u32,
    /// Bytes that a request should be able to carry inline; the device may give less.
    pub inline_len: u32,
}

/// A queue pair that was made; it takes receive requests, but is not connected.
///
/// Example: `hal/src/backend/rdma/endpoint.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// Its name.
    pub handle: QueuePair,
    /// Its number on the wire.
    pub number: u32,
    /// Bytes that a request of it carries inline.
    pub inline_len_max: u32,
}

/// Where a queue pair is to be connected to.
///
/// Example: `hal/src/backend/rdma/record.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Number of the peer's queue pair.
    pub number: u32,
    /// The first sequence number that the peer sends.
    pub peer_sequence: u32,
    /// The first sequence number that we send.
    pub own_sequence: u32,
    /// The peer's address.
    pub gid: [u8; 16],
    /// The peer's local identifier, InfiniBand only.
    pub lid: u16,
    /// Which of our addresses to use.
    pub gid_index: u8,
    /// Bytes of a packet: no more than either port carries.
    pub mtu_len: u32,
    /// Reads in flight.
    pub reads_max: u8,
    /// `RdmaOptions::ack_timeout_exponent`.
    pub ack_timeout_exponent: u8,
}

/// What a send request does.
///
/// Example: `hal/src/backend/rdma/queue.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A message into the peer's next receive request.
    Send,
    /// A write at the peer.
    Write,
    /// A write at the peer that also completes its next receive request, with this number.
    WriteWithImmediate(u32),
    /// A read from the peer.
    Read,
}

/// A send request.
///
/// Example: `hal/src/backend/rdma/queue.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest {
    /// Comes back in its completion.
    pub id: u64,
    /// What to do.
    pub operation: Operation,
    /// First local byte, an address.
    pub local: u64,
    /// Length in bytes.
    pub len: u32,
    /// Names the local memory; not looked at for inline requests.
    pub local_key: u32,
    /// First byte at the peer, an address; not for messages.
    pub remote: u64,
    /// Names the peer's memory; not for messages.
    pub remote_key: u32,
    /// Whether its success is reported. Failures always are.
    pub is_signalled: bool,
    /// Whether the bytes are copied now; then local memory is quiet once posting returned.
    pub is_inline: bool,
}

/// A receive request.
///
/// Example: `hal/src/backend/rdma/endpoint.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Comes back in its completion.
    pub id: u64,
    /// First byte to receive into, an address.
    pub local: u64,
    /// Length in bytes; 0 for one that only counts an immediate.
    pub len: u32,
    /// Names the memory.
    pub local_key: u32,
}

/// How a request ended.
///
/// Example: `hal/src/backend/rdma/link.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done; for a write: received, not yet visible.
    Done,
    /// Never started: the queue pair was in error before.
    Flushed,
    /// The peer's memory is not, or not any more, reachable by that key.
    RemoteAccess,
    /// The peer does not answer.
    NoAnswer,
    /// The peer has no receive request, for too long.
    NotReady,
    /// Anything else, by its number.
    Other(u32),
}

/// A completion.
///
/// Example: `hal/src/backend/rdma/link.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's id.
    pub id: u64,
    /// How it ended.
    pub status: Status,
    /// The number that came with it, for receive requests.
    pub immediate: Option<u32>,
    /// Bytes received, for receive requests.
    pub len: u32,
}

/// What a NIC reports by itself.
///
/// Example: `hal/src/backend/rdma/tests.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NicEvent {
    /// The port works again.
    PortUp,
    /// The port does not work.
    PortDown,
    /// Addresses of the port changed: the next endpoint ranks them anew.
    AddressesChanged,
    /// The device is gone.
    DeviceGone,
    /// A queue pair failed; its completions say so too.
    QueuePairFailed,
    /// A path moved to its alternative, or another event that needs nothing done.
    Other(u32),
}

/// Not all requests were posted.
///
/// Example: `hal/src/backend/rdma/fake.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostedSome {
    /// How many were, from the first on.
    pub posted: usize,
    /// The error number of the next one.
    pub code: i32,
}

/// The verbs of one port of one opened NIC.
///
/// # Safety
/// - Memory is touched only through registrations, by requests posted and not completed, or by peers with the remote key.
/// - After `deregister` returned `Ok` nothing touches memory through that registration.
/// - After `destroy_queue_pair` returned nothing touches memory for its requests, and none of them completes any more.
/// - An inline request's bytes are read before `post_send` returns.
///
/// Example: `hal/src/backend/rdma/fake.rs`.
pub unsafe trait Verbs: Send + Sync + core::fmt::Debug {
    /// Name of the NIC.
    fn name(&self) -> &str;
    /// Its bounds.
    fn limits(&self) -> NicLimits;
    /// State of its port now.
    fn port(&self) -> Result<PortState, VerbsError>;
    /// Addresses of its port now.
    fn gids(&self) -> Result<Vec<GidEntry>, VerbsError>;

    /// A protection domain.
    fn create_domain(&self) -> Result<Domain, VerbsError>;
    /// Nothing of the domain exists any more.
    fn destroy_domain(&self, domain: Domain);

    /// Registers host memory.
    ///
    /// # Safety
    /// - `base .. base + len` stays mapped until it was deregistered, and may be touched as `reach` says.
    unsafe fn register(
        &self,
        domain: Domain,
        base: NonNull<u8>,
        len: u64,
        reach: Reach,
    ) -> Result<Registration, VerbsError>;

    /// Registers memory of a device by its dma-buf: `len` bytes from `offset` on, named by addresses from `base` on.
    ///
    /// # Safety
    /// - As for [`Verbs::register`].
    unsafe fn register_dmabuf(
        &self,
        domain: Domain,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        base: u64,
        len: u64,
        reach: Reach,
    ) -> Result<Registration, VerbsError>;

    /// Ends a registration.
    fn deregister(&self, registered: Registered) -> Result<(), VerbsError>;

    /// A completion queue for at least that many entries.
    fn create_completions(&self, entries: u32) -> Result<Completions, VerbsError>;
    /// No queue pair uses it any more.
    fn destroy_completions(&self, completions: Completions);
    /// Appends completions to `into`, a bounded number. Returns whether there may be more.
    fn poll(&self, completions: Completions, into: &mut Vec<Completion>) -> Result<bool, VerbsError>;
    /// Makes [`Verbs::wake_fd`] readable at the next completion.
    fn notify(&self, completions: Completions) -> Result<(), VerbsError>;

    /// A queue pair, ready for receive requests.
    fn create_queue_pair(&self, domain: Domain, completions: Completions, depths: Depths) -> Result<Made, VerbsError>;
    /// Connects it: from now on it receives and sends.
    fn connect(&self, queue_pair: QueuePair, path: &Path) -> Result<(), VerbsError>;
    /// Destroys it.
    fn destroy_queue_pair(&self, queue_pair: QueuePair);

    /// Posts a chain of send requests with one doorbell.
    ///
    /// # Safety
    /// - Local memory of each request is registered under its key, and stays untouched by others until the request completed
    ///   or its queue pair was destroyed; of inline requests, until this returns.
    unsafe fn post_send(&self, queue_pair: QueuePair, requests: &[SendRequest]) -> Result<(), PostedSome>;

    /// Posts receive requests with one doorbell.
    ///
    /// # Safety
    /// - As for [`Verbs::post_send`].
    unsafe fn post_receive(&self, queue_pair: QueuePair, requests: &[ReceiveRequest]) -> Result<(), PostedSome>;

    /// One descriptor, the same for life: readable when a completion queue that asked for it has something, or an event waits.
    fn wake_fd(&self) -> BorrowedFd<'_>;
    /// Makes the descriptor unreadable again, until the next notification.
    fn quiet_wake_fd(&self);
    /// The next event.
    fn next_event(&self) -> Option<NicEvent>;
}
