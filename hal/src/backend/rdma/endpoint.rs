//! An endpoint: the queue pairs and the small memory of one link, from their making until their end.
//!
//! One control queue pair carries messages. Data queue pairs go one way each: `out` for what we post, `back` for what the
//! peer posts. So a peer whose key was revoked breaks a queue of its own and nothing else. `back` and the ring that the peer
//! writes arrivals into are in a domain of the link's own: no key of another link works there.
//!
//! Life: made ([`super::Nic::endpoint`]) → its record is carried to the peer and the peer's comes back, over a session that
//! both have already → connected ([`Endpoint::connect`]) → opened as a link. hal dials nobody.
#![allow(unsafe_code)]

use std::hash::{BuildHasher, RandomState};

use super::control::{CONTROL_DEPTH, WINDOW, receive_request};
use super::gid::{NoGid, choose};
use super::message::{ARRIVAL_LEN, MESSAGE_LEN_MAX, Remade};
use super::nic::Nic;
use super::record::{Number, Record, RecordError};
use super::verbs::{
    Completions, Depths, Domain, Made, Path, PostedSome, Reach, ReceiveRequest, Registration, Verbs, VerbsError,
};
use super::wire_id::{Id, Kind};
use crate::contract::{Connection, Lane, OwnConnection};
use crate::copy::{copy, copy_in};
use crate::mapping::{Backing, MapError, Mapping};

/// Arrivals on their way on one queue, at most.
pub(crate) const RING_LEN: u16 = 32;
/// Requests of one data queue.
pub(crate) const OUT_DEPTH: u32 = 128;
/// A write of at most this length goes inline, where the NIC can.
const INLINE_LEN: u32 = 128;
/// Bytes that a confirming read brings.
pub(crate) const CONFIRM_LEN: u32 = 8;
const SLOT_LEN: usize = MESSAGE_LEN_MAX;
const WORD_LEN: usize = 64;
/// 24 bits of a sequence number.
const SEQUENCE_MASK: u64 = 0x00FF_FFFF;

/// No endpoint.
///
/// ```
/// use millpond_hal::backend::rdma::EndpointError;
/// assert!(EndpointError::PortDown.to_string().contains("port"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The port does not work now.
    #[error("the port is down; use another path until it is up")]
    PortDown,
    /// The port has no address to use.
    #[error(transparent)]
    NoGid(#[from] NoGid),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// The NIC refuses: out of queue pairs, memory or rights.
    #[error("{0}; close links, or raise the limit of locked memory")]
    Verbs(#[from] VerbsError),
    /// The peer's record does not fit.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// See the [module](self).
///
/// Example: `hal/tests/rdma_guest.rs`.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) nic: Nic,
    domain: Domain,
    pub(crate) completions: Completions,
    pub(crate) control: Made,
    pub(crate) out: Vec<Made>,
    back: Vec<Made>,
    local: Mapping,
    local_registration: Registration,
    ring: Mapping,
    ring_registration: Registration,
    record: Record,
    gid_index: u8,
    random: RandomState,
    made: u64,
}

/// An endpoint that knows its peer: what a link is opened from.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) endpoint: Endpoint,
    pub(crate) peer: Record,
    pub(crate) lane: Lane,
}

impl OwnConnection for Connected {
    fn into_any(self: Box<Self>) -> Box<dyn core::any::Any + Send> {
        self
    }
}

/// Parts of an endpoint, destroyed in their order unless they came together.
struct Parts<'a> {
    verbs: &'a dyn Verbs,
    queue_pairs: Vec<Made>,
    completions: Option<Completions>,
    registrations: Vec<Registration>,
    domain: Option<Domain>,
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        self.queue_pairs.drain(..).for_each(|made| self.verbs.destroy_queue_pair(made.handle));
        self.completions.take().into_iter().for_each(|completions| self.verbs.destroy_completions(completions));
        for registration in self.registrations.drain(..) {
            // No queue pair uses it any more; nothing better can be done about a NIC that refuses.
            let _ = self.verbs.deregister(registration.handle);
        }
        self.domain.take().into_iter().for_each(|domain| self.verbs.destroy_domain(domain));
    }
}

fn rings_len(queues: u16) -> usize {
    usize::from(queues) * usize::from(RING_LEN) * ARRIVAL_LEN
}

const OUT: Depths = Depths { send: OUT_DEPTH, receive: 1, inline_len: INLINE_LEN };
const BACK: Depths = Depths { send: 1, receive: RING_LEN as u32, inline_len: 0 };
const CONTROL: Depths = Depths { send: CONTROL_DEPTH, receive: WINDOW, inline_len: INLINE_LEN };

/// Completions that can wait at once, with those of queues that were made anew.
fn completions_len(queues: u16) -> u32 {
    CONTROL_DEPTH + WINDOW + 2 * u32::from(queues) * (OUT_DEPTH + u32::from(RING_LEN))
}

impl Endpoint {
    pub(crate) fn new(nic: Nic) -> Result<Self, EndpointError> {
        let (verbs, queues) = (nic.verbs(), nic.options().queues);
        let port = verbs.port()?;
        if !port.is_active {
            return Err(EndpointError::PortDown);
        }
        let gids = verbs.gids()?;
        let gid = choose(&gids, nic.options().gid_index)?.clone();
        let mut parts =
            Parts { verbs, queue_pairs: Vec::new(), completions: None, registrations: Vec::new(), domain: None };
        let domain = *parts.domain.insert(verbs.create_domain()?);
        let completions = *parts.completions.insert(verbs.create_completions(completions_len(queues))?);
        let local_len = 2 * WINDOW as usize * SLOT_LEN + rings_len(queues) + WORD_LEN;
        let local = Mapping::new(local_len as u64, Backing::Heap)?;
        let ring = Mapping::new((rings_len(queues) + WORD_LEN) as u64, Backing::Heap)?;
        // SAFETY: for both: the mappings live in the endpoint, whose drop deregisters before it drops them; the first is
        // touched by our own requests only, the second by the peer, and read by copies.
        let (local_registration, ring_registration) = unsafe {
            let local = verbs.register(nic.domain(), local.base(), local.len(), Reach::Local)?;
            parts.registrations.push(local);
            let ring = verbs.register(domain, ring.base(), ring.len(), Reach::RemoteReadWrite)?;
            parts.registrations.push(ring);
            (local, ring)
        };
        let mut make = |domain, depths| {
            let made = verbs.create_queue_pair(domain, completions, depths)?;
            parts.queue_pairs.push(made);
            Ok::<_, VerbsError>(made)
        };
        let control = make(nic.domain(), CONTROL)?;
        let out = (0..queues).map(|_| make(nic.domain(), OUT)).collect::<Result<Vec<_>, _>>()?;
        let back = (0..queues).map(|_| make(domain, BACK)).collect::<Result<Vec<_>, _>>()?;
        let random = RandomState::new();
        let sequence = |made: &Made| Number { number: made.number, sequence: start_of(&random, made.number, 0) };
        let record = Record {
            gid: gid.gid,
            lid: port.lid,
            is_ethernet: port.is_ethernet,
            mtu_len: port.mtu_len,
            reads_max: nic.limits().reads_max,
            ring_address: ring.base().as_ptr().addr() as u64,
            ring_key: ring_registration.remote_key,
            control: sequence(&control),
            queues: out.iter().zip(&back).map(|(out, back)| (sequence(out), sequence(back))).collect(),
        };
        parts.queue_pairs.clear();
        parts.registrations.clear();
        (parts.completions, parts.domain) = (None, None);
        drop(parts);
        let endpoint = Self {
            nic,
            domain,
            completions,
            control,
            out,
            back,
            local,
            local_registration,
            ring,
            ring_registration,
            record,
            gid_index: gid.index,
            random,
            made: 0,
        };
        endpoint.receive()?;
        Ok(endpoint)
    }

    /// Posts all receive requests, so that a peer that is early finds them.
    fn receive(&self) -> Result<(), VerbsError> {
        let failed = |some: PostedSome| VerbsError { verb: "ibv_post_recv", code: some.code };
        let slots: Vec<_> = (0..WINDOW).map(|slot| receive_request(self, slot)).collect();
        // SAFETY: the slots are registered under their key, and looked at only once they completed (`Control::take`).
        unsafe { self.nic.verbs().post_receive(self.control.handle, &slots) }.map_err(failed)?;
        (0..self.back.len()).try_for_each(|index| self.receive_arrivals(index, 0, RING_LEN)).map_err(failed)
    }

    /// Posts `count` receive requests for arrivals on a queue of the peer's.
    pub(crate) fn receive_arrivals(&self, index: usize, generation: u16, count: u16) -> Result<(), PostedSome> {
        let id = Id::new(Kind::Back, u8::try_from(index).unwrap_or(u8::MAX), generation, 0).bits();
        let empty = [ReceiveRequest { id, local: 0, len: 0, local_key: 0 }; RING_LEN as usize];
        // SAFETY: they name no memory.
        unsafe { self.nic.verbs().post_receive(self.back[index].handle, &empty[..usize::from(count)]) }
    }

    /// What the peer needs to connect to this; carry it over a session that both ends have, and that is authenticated.
    #[must_use]
    pub fn record(&self) -> Vec<u8> {
        self.record.to_bytes()
    }

    /// Connects the queue pairs to the peer's, whose record this is, and gives what `Fabric::open` takes. Does not wait for
    /// the peer: who dialed (`lane`) speaks first, so the other end, which has this end's record, connects before it sends
    /// its own record back. Takes milliseconds.
    ///
    /// # Errors
    /// The record does not fit, or a verb failed.
    pub fn connect(self, record: &[u8], lane: Lane) -> Result<Connection, EndpointError> {
        let peer = Record::parse(record)?;
        self.record.check(&peer)?;
        let verbs = self.nic.verbs();
        let path = |own: Number, to| {
            self.record.path(&peer, own.sequence, to, (self.gid_index, self.nic.options().ack_timeout_exponent))
        };
        verbs.connect(self.control.handle, &path(self.record.control, peer.control))?;
        let ends = self.record.queues.iter().zip(&peer.queues).zip(self.out.iter().zip(&self.back));
        for (((own_out, own_back), (peer_out, peer_back)), (out, back)) in ends {
            verbs.connect(out.handle, &path(*own_out, *peer_back))?;
            verbs.connect(back.handle, &path(*own_back, *peer_out))?;
        }
        Ok(Connection::Own(Box::new(Connected { endpoint: self, peer, lane })))
    }

    /// Bytes of a packet towards `peer`: what fits into one is done or not, never half.
    pub(crate) fn packet_len(&self, peer: &Record) -> u32 {
        self.record.mtu_len.min(peer.mtu_len)
    }

    /// The domain whose keys the peer may hold.
    pub(crate) fn domain(&self) -> Domain {
        self.domain
    }

    pub(crate) fn queues(&self) -> usize {
        self.out.len()
    }

    fn path_to(&self, peer: &Record, own: &Made, own_sequence: u32, to: Number) -> Result<(), VerbsError> {
        let path: Path =
            self.record.path(peer, own_sequence, to, (self.gid_index, self.nic.options().ack_timeout_exponent));
        self.nic.verbs().connect(own.handle, &path)
    }

    fn next_sequence(&mut self, number: u32) -> u32 {
        self.made += 1;
        start_of(&self.random, number, self.made)
    }

    /// Destroys a broken queue of ours and makes it anew, not yet connected. Nothing of the old one touches memory any more.
    pub(crate) fn remake_out(&mut self, index: usize, generation: u16) -> Result<Remade, VerbsError> {
        let made = self.nic.verbs().create_queue_pair(self.nic.domain(), self.completions, OUT)?;
        self.nic.verbs().destroy_queue_pair(self.out[index].handle);
        self.out[index] = made;
        let sequence = self.next_sequence(made.number);
        self.record.queues[index].0 = Number { number: made.number, sequence };
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        Ok(Remade { index, generation, number: made.number, sequence })
    }

    /// Connects a queue of ours that was made anew.
    pub(crate) fn connect_out(&self, peer: &Record, remade: &Remade) -> Result<(), VerbsError> {
        let index = usize::from(remade.index);
        let to = Number { number: remade.number, sequence: remade.sequence };
        self.path_to(peer, &self.out[index], self.record.queues[index].0.sequence, to)
    }

    /// Replaces the queue that the peer's queue was connected to, which broke, by one that is connected to its new one.
    pub(crate) fn remake_back(&mut self, peer: &Record, remade: &Remade) -> Result<Remade, VerbsError> {
        let index = usize::from(remade.index);
        self.nic.verbs().destroy_queue_pair(self.back[index].handle);
        let made = self.nic.verbs().create_queue_pair(self.domain, self.completions, BACK)?;
        self.back[index] = made;
        self.receive_arrivals(index, remade.generation, RING_LEN)
            .map_err(|some| VerbsError { verb: "ibv_post_recv", code: some.code })?;
        let sequence = self.next_sequence(made.number);
        self.path_to(peer, &made, sequence, Number { number: remade.number, sequence: remade.sequence })?;
        Ok(Remade { number: made.number, sequence, ..*remade })
    }

    /// Destroys all data queues: their requests are over, here and, as far as they came from the peer, there.
    pub(crate) fn destroy_data_queues(&mut self) {
        let verbs = self.nic.verbs();
        self.out.drain(..).chain(self.back.drain(..)).for_each(|made| verbs.destroy_queue_pair(made.handle));
    }

    pub(crate) fn local_key(&self) -> u32 {
        self.local_registration.local_key
    }

    fn local_address(&self, offset: usize) -> u64 {
        debug_assert!((offset as u64) < self.local.len());
        self.local.base().as_ptr().addr() as u64 + offset as u64
    }

    /// Puts a message where it is sent from; the address.
    pub(crate) fn fill_send_slot(&self, slot: u32, message: &[u8]) -> u64 {
        self.fill(slot as usize % WINDOW as usize * SLOT_LEN, message)
    }

    fn fill(&self, offset: usize, bytes: &[u8]) -> u64 {
        assert!(
            bytes.len() <= SLOT_LEN && offset + bytes.len() <= self.local.len() as usize,
            "slots are in the mapping"
        );
        // SAFETY: in bounds by the line above; the mapping is this endpoint's own.
        unsafe { copy_in(bytes, self.local.base().as_ptr().add(offset)) };
        self.local_address(offset)
    }

    pub(crate) fn receive_slot(&self, slot: u32) -> u64 {
        self.local_address((WINDOW + slot % WINDOW) as usize * SLOT_LEN)
    }

    /// Copies what was received out of its slot.
    pub(crate) fn copy_receive_slot(&self, slot: u32, len: usize, into: &mut Vec<u8>) {
        assert!(len <= SLOT_LEN, "a message fits its slot");
        into.clear();
        into.resize(len, 0);
        let offset = (WINDOW + slot % WINDOW) as usize * SLOT_LEN;
        // SAFETY: both sides are `len` bytes long, by the lines above and by the layout; they are different memory.
        unsafe { copy(self.local.base().as_ptr().add(offset), into.as_mut_ptr(), len) };
    }

    /// Puts an arrival record where it is written from; the address.
    pub(crate) fn fill_arrival(&self, index: usize, slot: u16, record: &[u8; ARRIVAL_LEN]) -> u64 {
        self.fill(2 * WINDOW as usize * SLOT_LEN + ring_offset(index, slot), record)
    }

    /// Where a confirming read brings its bytes.
    pub(crate) fn landing(&self) -> u64 {
        self.local_address(2 * WINDOW as usize * SLOT_LEN + rings_len(self.nic.options().queues))
    }

    /// Where an arrival of ours is written to, at the peer.
    pub(crate) fn ring_slot_there(peer: &Record, index: usize, slot: u16) -> u64 {
        peer.ring_address.wrapping_add(ring_offset(index, slot) as u64)
    }

    /// The word at the peer that a confirming read asks for.
    pub(crate) fn word_there(&self, peer: &Record) -> u64 {
        peer.ring_address.wrapping_add(rings_len(self.nic.options().queues) as u64)
    }

    /// Copies the arrival record that the peer wrote; `None` where there is no such slot.
    pub(crate) fn arrival(&self, index: usize, slot: u32) -> Option<[u8; ARRIVAL_LEN]> {
        let slot = u16::try_from(slot).ok().filter(|slot| *slot < RING_LEN)?;
        let mut record = [0; ARRIVAL_LEN];
        let offset = ring_offset(index, slot);
        assert!(offset + ARRIVAL_LEN <= self.ring.len() as usize, "the ring has a slot for each queue and place");
        // SAFETY: in bounds by the line above; the peer may write there meanwhile, which `copy` allows.
        unsafe { copy(self.ring.base().as_ptr().add(offset), record.as_mut_ptr(), ARRIVAL_LEN) };
        Some(record)
    }
}

fn ring_offset(index: usize, slot: u16) -> usize {
    (index * usize::from(RING_LEN) + usize::from(slot)) * ARRIVAL_LEN
}

fn start_of(random: &RandomState, number: u32, made: u64) -> u32 {
    u32::try_from(random.hash_one((number, made)) & SEQUENCE_MASK).expect("24 bits")
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.destroy_data_queues();
        drop(Parts {
            verbs: self.nic.verbs(),
            queue_pairs: vec![self.control],
            completions: Some(self.completions),
            registrations: vec![self.local_registration, self.ring_registration],
            domain: Some(self.domain),
        });
    }
}
