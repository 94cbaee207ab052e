//! A NIC of our own, in memory, that counts: for what Soft-RoCE hides or does not do on request.
//!
//! It does what the verbs promise: requests of a queue pair go in order, at most a few in each poll; unsignalled success is
//! silent; a key works in its domain, for its range and reach; a refused request breaks its queue pair and its peer's, and
//! flushes the rest; send queues and completion queues have the depth that was asked for. What real NICs leave open, such as
//! timing and packets, it does not show.
//!
//! Tests of other crates (feature `fake-nic`) make NICs, take them up and down, break their queue pairs, and have them lie.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use super::gid::{GidEntry, GidKind};
use super::verbs::*;

const EINVAL: i32 = 22;
const ENOMEM: i32 = 12;
const EOPNOTSUPP: i32 = 95;
/// Requests that one poll does.
const STEPS: usize = 2;

/// What was asked of the NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) doorbells: u64,
    pub(crate) longest_chain: usize,
    pub(crate) requests: u64,
    pub(crate) signalled: u64,
    pub(crate) inline: u64,
    pub(crate) inline_longest: u32,
    pub(crate) writes: u64,
    pub(crate) immediates: u64,
    pub(crate) reads: u64,
    pub(crate) messages: u64,
    pub(crate) registrations: u64,
    pub(crate) deregistrations: u64,
    pub(crate) queue_pairs_made: u64,
    pub(crate) queue_pairs_destroyed: u64,
    pub(crate) notifications: u64,
}

#[derive(Debug)]
struct Pair {
    cq: usize,
    domain: usize,
    path: Option<Path>,
    sends: VecDeque<(SendRequest, Vec<u8>, u64)>,
    receives: VecDeque<ReceiveRequest>,
    is_error: bool,
    depths: Depths,
    posted: u64,
    reclaimed: u64,
    manners: Arc<Manners>,
}

/// How a NIC treats the bytes it is given, and how many it was.
#[derive(Debug, Default)]
struct Manners {
    /// Writes and reads are reported done, and nothing is moved.
    lies: AtomicBool,
    moved: AtomicU64,
}

#[derive(Debug)]
struct Memory {
    domain: usize,
    start: u64,
    len: u64,
    /// Where the bytes are.
    base: usize,
    reach: Reach,
    remote_key: u32,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(Completion, Option<(u32, u64)>)>,
    entries: usize,
    /// Of the NIC, once somebody asked to be woken.
    wake: Option<Arc<OwnedFd>>,
}

fn wake(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).expect("a counter that is read before it is full");
}

#[derive(Debug, Default)]
struct World {
    next: usize,
    pairs: BTreeMap<u32, Pair>,
    queues: HashMap<usize, Queue>,
    memory: BTreeMap<u32, Memory>,
}

/// What joins NICs.
///
/// ```
/// use millpond_hal::backend::rdma::fake::{FakeNic, Wire};
/// use millpond_hal::backend::rdma::{Nic, RdmaOptions};
/// let nic = FakeNic::named(&Wire::default(), "mlx5_0");
/// assert_eq!(Nic::new(Box::new(nic), RdmaOptions::default()).unwrap().name(), "mlx5_0");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Wire(Arc<Mutex<World>>);

/// What a test may change.
#[derive(Debug)]
pub(crate) struct Knobs {
    pub(crate) limits: NicLimits,
    pub(crate) port: PortState,
    pub(crate) gids: Vec<GidEntry>,
    pub(crate) inline_len_max: u32,
    pub(crate) takes_dmabuf: bool,
    pub(crate) refuses_deregistering: bool,
    pub(crate) events: VecDeque<NicEvent>,
    pub(crate) is_frozen: bool,
    pub(crate) counts: Counts,
    /// Ends the next request so.
    pub(crate) fails_next: Option<Status>,
}

/// One NIC, by its verbs. Clones are the same one.
///
/// Example: [`Wire`].
#[derive(Clone, Debug)]
pub struct FakeNic {
    name: String,
    wire: Wire,
    knobs: Arc<Mutex<Knobs>>,
    manners: Arc<Manners>,
    wake: Arc<OwnedFd>,
}

pub(crate) fn gid(last: u8) -> GidEntry {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, last]);
    GidEntry { index: 1, gid, kind: GidKind::RoceV2, interface: Some("eth0".into()) }
}

impl FakeNic {
    /// A NIC on that wire, up.
    ///
    /// # Panics
    /// The process is out of descriptors.
    #[must_use]
    pub fn named(wire: &Wire, name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::new(wire) }
    }

    /// Takes its port up or down, as a cable does: with an event, and every queue pair of the wire that used it at its end.
    pub fn set_up(&self, is_up: bool) {
        let mut knobs = self.knobs();
        knobs.port.is_active = is_up;
        knobs.events.push_back(if is_up { NicEvent::PortUp } else { NicEvent::PortDown });
        drop(knobs);
        wake(&self.wake);
    }

    /// Has every queue pair of this NIC fail, as somebody else's mistake or an operator would.
    pub fn break_queue_pairs(&self) {
        let mut world = self.world();
        let own = |pair: &&mut Pair| Arc::ptr_eq(&pair.manners, &self.manners);
        world.pairs.values_mut().filter(own).for_each(|pair| pair.is_error = true);
        drop(world);
        wake(&self.wake);
    }

    /// Has it report success for writes and reads, and move nothing.
    pub fn set_lying(&self, lies: bool) {
        self.manners.lies.store(lies, Ordering::Relaxed);
    }

    /// Bytes of writes and reads that it reported done, whether or not it moved them.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        self.manners.moved.load(Ordering::Relaxed)
    }

    pub(crate) fn new(wire: &Wire) -> Self {
        let limits = NicLimits {
            registration_len_max: 1 << 40,
            message_len_max: 1 << 30,
            queue_pairs_max: 1 << 16,
            depth_max: 1 << 15,
            completions_max: 1 << 20,
            reads_max: 16,
        };
        let port = PortState { is_active: true, mtu_len: 1024, lid: 0, is_ethernet: true };
        let knobs = Knobs {
            limits,
            port,
            gids: vec![gid(1)],
            inline_len_max: 220,
            takes_dmabuf: false,
            refuses_deregistering: false,
            events: VecDeque::new(),
            is_frozen: false,
            counts: Counts::default(),
            fails_next: None,
        };
        let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let (knobs, manners) = (Arc::new(Mutex::new(knobs)), Arc::default());
        Self { name: "fake0".to_owned(), wire: wire.clone(), knobs, manners, wake: Arc::new(wake) }
    }

    pub(crate) fn knobs(&self) -> MutexGuard<'_, Knobs> {
        self.knobs.lock().unwrap()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.knobs().counts
    }

    /// What somebody else's program, or an operator, would do: every queue pair of the wire goes to error.
    pub(crate) fn break_all(&self) {
        self.world().pairs.values_mut().for_each(|pair| pair.is_error = true);
    }

    /// Registrations that exist on the wire, those of the NIC's own use included.
    pub(crate) fn registered(&self) -> usize {
        self.world().memory.len()
    }

    pub(crate) fn queue_pairs(&self) -> usize {
        self.world().pairs.len()
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.wire.0.lock().unwrap()
    }
}

impl World {
    fn name(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    fn complete(&mut self, cq: usize, completion: Completion, reclaims: Option<(u32, u64)>) {
        let queue = self.queues.get_mut(&cq).expect("a queue pair's completion queue exists");
        assert!(queue.waiting.len() < queue.entries, "the completion queue is overrun");
        queue.waiting.push_back((completion, reclaims));
        queue.wake.take().into_iter().for_each(|fd| wake(&fd));
    }

    fn local(&self, domain: usize, request: &SendRequest) -> Option<usize> {
        let memory = self.memory.get(&request.local_key).filter(|memory| memory.domain == domain)?;
        memory.place(request.local, request.len.into())
    }

    fn remote(&self, domain: usize, request: &SendRequest) -> Option<usize> {
        let found = self.memory.values().find(|it| it.remote_key == request.remote_key && it.domain == domain)?;
        let writes = matches!(found.reach, Reach::RemoteWrite | Reach::RemoteReadWrite);
        let reads = matches!(found.reach, Reach::RemoteRead | Reach::RemoteReadWrite);
        let admits = if request.operation == Operation::Read { reads } else { writes };
        found.place(request.remote, request.len.into()).filter(|_| admits)
    }

    /// Does the first request of a queue pair. `false` if it cannot go on now.
    fn step(&mut self, number: u32, forced: Option<Status>) -> bool {
        let Some(pair) = self.pairs.get_mut(&number) else { return false };
        let Some((request, inline, at)) = pair.sends.front().cloned() else { return false };
        let (cq, is_error, path) = (pair.cq, pair.is_error, pair.path);
        let result = if is_error { Err(Status::Flushed) } else { self.run(number, path, &request, &inline) };
        let result = forced.filter(|_| !is_error).map_or(result, Err);
        let Some(pair) = self.pairs.get_mut(&number) else { return false };
        let status = match result {
            Ok(false) => return false,
            Ok(true) => Status::Done,
            Err(status) => status,
        };
        pair.sends.pop_front();
        pair.is_error |= status != Status::Done;
        if status == Status::RemoteAccess
            && let Some(there) = path.and_then(|path| self.pairs.get_mut(&path.number))
        {
            there.is_error = true;
        }
        if status != Status::Done || request.is_signalled {
            self.complete(cq, Completion { id: request.id, status, immediate: None, len: 0 }, Some((number, at)));
        }
        true
    }

    /// `Ok(false)`: the peer has no receive request.
    fn run(&mut self, number: u32, path: Option<Path>, request: &SendRequest, inline: &[u8]) -> Result<bool, Status> {
        let path = path.expect("requests are posted to connected queue pairs only");
        let domain = self.pairs[&number].domain;
        let there = self.pairs.get(&path.number).ok_or(Status::NoAnswer)?;
        let is_mutual = there.path.is_some_and(|back| {
            back.number == number && (back.peer_sequence, back.own_sequence) == (path.own_sequence, path.peer_sequence)
        });
        if !is_mutual || there.is_error {
            return Err(Status::NoAnswer);
        }
        let (cq, far_domain) = (there.cq, there.domain);
        let takes = matches!(request.operation, Operation::Send | Operation::WriteWithImmediate(_));
        let receive = there.receives.front().copied();
        if takes && receive.is_none() {
            return Ok(false);
        }
        let near = if request.is_inline {
            inline.as_ptr().addr()
        } else {
            self.local(domain, request).ok_or(Status::Other(4))?
        };
        let len = request.len as usize;
        let manners = Arc::clone(&self.pairs[&number].manners);
        let is_data = matches!(request.operation, Operation::Write | Operation::Read);
        if is_data {
            manners.moved.fetch_add(request.len.into(), Ordering::Relaxed);
        }
        if is_data && manners.lies.load(Ordering::Relaxed) {
            return Ok(true);
        }
        match request.operation {
            Operation::Send => {
                let into = receive.expect("looked at above");
                assert!(into.len >= request.len, "a message is longer than its receive request");
                let memory = self.memory.get(&into.local_key).expect("receive memory is registered");
                let far = memory.place(into.local, into.len.into()).expect("in range");
                // SAFETY: both ranges are registered, so mapped (checked above); slots of two endpoints do not overlap.
                unsafe { crate::copy::copy(near as *const u8, far as *mut u8, len) };
            }
            Operation::Write | Operation::WriteWithImmediate(_) => {
                let far = self.remote(far_domain, request).ok_or(Status::RemoteAccess)?;
                // SAFETY: both ranges are registered, so mapped (checked above); tests move between different memory.
                unsafe { crate::copy::copy(near as *const u8, far as *mut u8, len) };
            }
            Operation::Read => {
                let far = self.remote(far_domain, request).ok_or(Status::RemoteAccess)?;
                // SAFETY: as above.
                unsafe { crate::copy::copy(far as *const u8, near as *mut u8, len) };
            }
        }
        if takes {
            let into = receive.expect("looked at above");
            self.pairs.get_mut(&path.number).expect("looked at above").receives.pop_front();
            let immediate = match request.operation {
                Operation::WriteWithImmediate(immediate) => Some(immediate),
                _ => None,
            };
            self.complete(cq, Completion { id: into.id, status: Status::Done, immediate, len: request.len }, None);
        }
        Ok(true)
    }
}

impl Memory {
    fn place(&self, address: u64, len: u64) -> Option<usize> {
        let offset = address.checked_sub(self.start)?;
        (offset.checked_add(len)? <= self.len).then(|| self.base + usize::try_from(offset).unwrap())
    }
}

// SAFETY: memory is touched in `World::run` only, through registrations that exist; a deregistered key or a destroyed queue
// pair is out of the tables, and everything happens under one lock. Inline bytes are copied in `post_send`.
unsafe impl Verbs for FakeNic {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> NicLimits {
        self.knobs().limits
    }

    fn port(&self) -> Result<PortState, VerbsError> {
        Ok(self.knobs().port)
    }

    fn gids(&self) -> Result<Vec<GidEntry>, VerbsError> {
        Ok(self.knobs().gids.clone())
    }

    fn create_domain(&self) -> Result<Domain, VerbsError> {
        Ok(Domain(self.world().name()))
    }

    fn destroy_domain(&self, domain: Domain) {
        let world = self.world();
        assert!(world.pairs.values().all(|pair| pair.domain != domain.0), "a domain in use is destroyed");
        assert!(world.memory.values().all(|memory| memory.domain != domain.0), "a domain in use is destroyed");
    }

    unsafe fn register(
        &self,
        domain: Domain,
        base: NonNull<u8>,
        len: u64,
        reach: Reach,
    ) -> Result<Registration, VerbsError> {
        let mut knobs = self.knobs();
        if len == 0 || len > knobs.limits.registration_len_max {
            return Err(VerbsError { verb: "register", code: EINVAL });
        }
        knobs.counts.registrations += 1;
        let mut world = self.world();
        let name = u32::try_from(world.name()).unwrap();
        let (base, start) = (base.as_ptr().expose_provenance(), base.as_ptr().addr() as u64);
        let remote_key = name.wrapping_mul(0x9E37_79B9);
        world.memory.insert(name, Memory { domain: domain.0, start, len, base, reach, remote_key });
        Ok(Registration { handle: Registered(name as usize), local_key: name, remote_key })
    }

    unsafe fn register_dmabuf(
        &self,
        domain: Domain,
        _dmabuf: BorrowedFd<'_>,
        _offset: u64,
        base: u64,
        len: u64,
        reach: Reach,
    ) -> Result<Registration, VerbsError> {
        if !self.knobs().takes_dmabuf {
            return Err(VerbsError { verb: "register_dmabuf", code: EOPNOTSUPP });
        }
        let base = NonNull::new(core::ptr::with_exposed_provenance_mut(usize::try_from(base).unwrap())).unwrap();
        // SAFETY: the same duty; here a device's memory is host memory.
        unsafe { self.register(domain, base, len, reach) }
    }

    fn deregister(&self, registered: Registered) -> Result<(), VerbsError> {
        let mut knobs = self.knobs();
        if core::mem::take(&mut knobs.refuses_deregistering) {
            return Err(VerbsError { verb: "deregister", code: EINVAL });
        }
        knobs.counts.deregistrations += 1;
        let known = self.world().memory.remove(&u32::try_from(registered.0).unwrap());
        known.map(drop).ok_or(VerbsError { verb: "deregister", code: EINVAL })
    }

    fn create_completions(&self, entries: u32) -> Result<Completions, VerbsError> {
        let mut world = self.world();
        let name = world.name();
        world.queues.insert(name, Queue { waiting: VecDeque::new(), entries: entries as usize, wake: None });
        Ok(Completions(name))
    }

    fn destroy_completions(&self, completions: Completions) {
        let mut world = self.world();
        assert!(world.pairs.values().all(|pair| pair.cq != completions.0), "a completion queue in use is destroyed");
        world.queues.remove(&completions.0);
    }

    fn poll(&self, completions: Completions, into: &mut Vec<Completion>) -> Result<bool, VerbsError> {
        let mut knobs = self.knobs();
        let (is_frozen, mut forced) = (knobs.is_frozen, knobs.fails_next);
        let mut world = self.world();
        let numbers: Vec<u32> =
            world.pairs.iter().filter(|(_, pair)| pair.cq == completions.0).map(|(number, _)| *number).collect();
        let mut left = if is_frozen { 0 } else { STEPS };
        for number in numbers {
            while left > 0 {
                let hit = forced.filter(|_| !world.pairs[&number].sends.is_empty());
                if !world.step(number, hit) {
                    break;
                }
                if hit.is_some() {
                    forced = None;
                    knobs.fails_next = None;
                }
                left -= 1;
            }
        }
        let queue = world.queues.get_mut(&completions.0).expect("polled while it exists");
        let taken: Vec<_> = queue.waiting.drain(..queue.waiting.len().min(16)).collect();
        let more = !queue.waiting.is_empty();
        for (completion, reclaims) in taken {
            if let Some((number, at)) = reclaims
                && let Some(pair) = world.pairs.get_mut(&number)
            {
                pair.reclaimed = pair.reclaimed.max(at);
            }
            into.push(completion);
        }
        Ok(more)
    }

    fn notify(&self, completions: Completions) -> Result<(), VerbsError> {
        let mut knobs = self.knobs();
        knobs.counts.notifications += 1;
        let mut world = self.world();
        // Requests are done when somebody polls: where some wait, somebody has to.
        let waits = |pair: &Pair| pair.cq == completions.0 && !pair.sends.is_empty();
        if !knobs.is_frozen && world.pairs.values().any(waits) {
            wake(&self.wake);
        } else if let Some(queue) = world.queues.get_mut(&completions.0) {
            queue.wake = Some(Arc::clone(&self.wake));
        }
        Ok(())
    }

    fn create_queue_pair(&self, domain: Domain, completions: Completions, depths: Depths) -> Result<Made, VerbsError> {
        let mut knobs = self.knobs();
        knobs.counts.queue_pairs_made += 1;
        let mut world = self.world();
        if world.pairs.len() >= knobs.limits.queue_pairs_max as usize {
            return Err(VerbsError { verb: "create_queue_pair", code: ENOMEM });
        }
        let number = u32::try_from(world.name()).unwrap();
        let pair = Pair {
            cq: completions.0,
            domain: domain.0,
            path: None,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            is_error: false,
            depths,
            posted: 0,
            reclaimed: 0,
            manners: Arc::clone(&self.manners),
        };
        world.pairs.insert(number, pair);
        let inline_len_max = depths.inline_len.min(knobs.inline_len_max);
        Ok(Made { handle: QueuePair(number as usize), number, inline_len_max })
    }

    fn connect(&self, queue_pair: QueuePair, path: &Path) -> Result<(), VerbsError> {
        let mut world = self.world();
        let pair = world.pairs.get_mut(&u32::try_from(queue_pair.0).unwrap()).expect("connected while it exists");
        assert!(pair.path.is_none(), "connected twice");
        pair.path = Some(*path);
        Ok(())
    }

    fn destroy_queue_pair(&self, queue_pair: QueuePair) {
        self.knobs().counts.queue_pairs_destroyed += 1;
        let number = u32::try_from(queue_pair.0).unwrap();
        self.world().pairs.remove(&number).expect("destroyed once");
    }

    unsafe fn post_send(&self, queue_pair: QueuePair, requests: &[SendRequest]) -> Result<(), PostedSome> {
        let mut knobs = self.knobs();
        let counts = &mut knobs.counts;
        counts.doorbells += 1;
        counts.longest_chain = counts.longest_chain.max(requests.len());
        let mut world = self.world();
        let pair = world.pairs.get_mut(&u32::try_from(queue_pair.0).unwrap()).expect("posted to while it exists");
        for (posted, request) in requests.iter().enumerate() {
            if pair.posted - pair.reclaimed >= u64::from(pair.depths.send) {
                return Err(PostedSome { posted, code: ENOMEM });
            }
            counts.requests += 1;
            counts.signalled += u64::from(request.is_signalled);
            match request.operation {
                Operation::Send => counts.messages += 1,
                Operation::Write => counts.writes += 1,
                Operation::WriteWithImmediate(_) => counts.immediates += 1,
                Operation::Read => counts.reads += 1,
            }
            let mut inline = Vec::new();
            if request.is_inline {
                assert!(request.operation != Operation::Read, "a read has nothing to carry");
                assert!(request.len <= pair.depths.inline_len, "more inline than was asked for");
                counts.inline += 1;
                counts.inline_longest = counts.inline_longest.max(request.len);
                let from = core::ptr::with_exposed_provenance::<u8>(usize::try_from(request.local).unwrap());
                inline.resize(request.len as usize, 0);
                // SAFETY: the caller's range is valid until this returns, by the duty of `post_send`.
                unsafe { crate::copy::copy(from, inline.as_mut_ptr(), inline.len()) };
            }
            pair.posted += 1;
            let at = pair.posted;
            pair.sends.push_back((*request, inline, at));
        }
        Ok(())
    }

    unsafe fn post_receive(&self, queue_pair: QueuePair, requests: &[ReceiveRequest]) -> Result<(), PostedSome> {
        let mut world = self.world();
        let pair = world.pairs.get_mut(&u32::try_from(queue_pair.0).unwrap()).expect("posted to while it exists");
        for (posted, request) in requests.iter().enumerate() {
            if pair.receives.len() >= pair.depths.receive as usize {
                return Err(PostedSome { posted, code: ENOMEM });
            }
            pair.receives.push_back(*request);
        }
        Ok(())
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn quiet_wake_fd(&self) {
        // Nothing to read says the same.
        let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
    }

    fn next_event(&self) -> Option<NicEvent> {
        self.knobs().events.pop_front()
    }
}
