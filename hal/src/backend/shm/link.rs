//! One link: what both of its roles share, and how it ends.
//!
//! The asking side lives in `ask`, the serving side in `serve`. Invariant: once `down` is set nothing is published or
//! applied any more, and our half says that it is closed before any batch is reported as finished.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use millpond_core::batch::RegionId;
use millpond_core::time::Instant;

use super::half::{Counter, ENTRY_WORDS, Entry, OwnHalf, PeerHalf, PeerMap, Ring};
use super::socket::{Kind, Received, Socket};
use super::{LocalRegion, Regions, ask::Asking, serve::Serving};
use crate::contract::{Event, Inbound, Lane, LinkDownReason, LinkId};
use crate::mapping::HeaderPage;
use crate::sync::full_fence;

/// Regions of one peer that we map at a time, at most.
const PEER_REGIONS_MAX: usize = 1024;

/// A region as a word.
pub(super) fn bits_of(region: RegionId) -> u64 {
    u64::from(region.epoch) << 32 | u64::from(region.slot)
}

/// The region of such a word.
#[allow(clippy::cast_possible_truncation)] // the halves are taken apart on purpose
pub(super) fn region_of(bits: u64) -> RegionId {
    RegionId { slot: bits as u32, epoch: (bits >> 32) as u32 }
}

/// What the peer showed us of itself.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) half: PeerHalf,
    pub(super) header: PeerMap,
}

/// Both ends' memory and the socket between them.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) id: LinkId,
    pub(super) socket: Socket,
    pub(super) own: OwnHalf,
    pub(super) peer: Option<Peer>,
    /// Regions of the peer, mapped.
    pub(super) maps: BTreeMap<u64, PeerMap>,
    /// Regions of ours that the peer was shown.
    shown: BTreeSet<u64>,
    generation: u64,
    rung_sleep: u64,
    /// Whether something was published or consumed that the peer, asleep, should know.
    pub(super) news: bool,
    pub(super) last_progress: Instant,
    /// Why the link is over.
    pub(super) down: Option<LinkDownReason>,
}

/// One link of the device.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) shared: Shared,
    pub(super) asking: Asking,
    serving: Serving,
}

impl Shared {
    /// Ends the link: from here on the peer uses nothing that it copies out of our memory.
    pub(super) fn end(&mut self, reason: LinkDownReason) {
        if self.down.is_none() {
            self.down = Some(reason);
            self.own.set(Counter::Closed, 1);
            full_fence();
            self.socket.wake();
        }
    }

    /// Whether the peer ended the link: what we copied from its memory must not be used.
    pub(super) fn peer_closed(&self) -> bool {
        full_fence();
        self.peer.as_ref().is_none_or(|peer| peer.half.value(Counter::Closed) != 0)
    }

    /// Room in one of our rings.
    pub(super) fn room(&self, ring: Ring) -> u64 {
        self.peer.as_ref().map_or(0, |peer| self.own.room(ring, &peer.half))
    }

    /// Publishes an entry for which there is room.
    pub(super) fn publish(&mut self, ring: Ring, entry: Entry) {
        self.own.publish(ring, &entry);
        self.news = true;
    }

    /// Shows the peer a region, once. False while it is not sure that the peer will have it before what is published next.
    pub(super) fn show(&mut self, region: &LocalRegion) -> bool {
        let bits = region.bits;
        if let (false, Some(fd)) = (self.shown.contains(&bits), &region.shared) {
            let record = record(Kind::Region, &[bits, region.len]);
            if !self.socket.send(record, vec![fd.clone()]) {
                return false;
            }
            self.shown.insert(bits);
        }
        self.socket.is_flushed()
    }

    /// Tells the peer to unmap a region.
    pub(super) fn forget(&mut self, bits: u64) {
        if self.shown.remove(&bits) && !self.socket.send(record(Kind::Forget, &[bits]), Vec::new()) {
            self.end(LinkDownReason::Stalled);
        }
    }

    /// Reads the socket until nothing is left. True if anything came.
    pub(super) fn receive(&mut self) -> bool {
        let mut worked = false;
        while self.down.is_none() {
            match self.socket.receive() {
                Received::Nothing => break,
                Received::Record(record) => self.on_record(&record),
                Received::TooManyFds => self.end(LinkDownReason::Violation("more descriptors than a record can have")),
                Received::End => {
                    let said = self.peer.as_ref().is_some_and(|peer| peer.half.value(Counter::Closed) != 0);
                    self.end(if said { LinkDownReason::PeerClosed } else { LinkDownReason::PeerGone });
                }
            }
            worked = true;
        }
        worked
    }

    fn on_record(&mut self, record: &Entry) {
        match Kind::from_word(record[0]) {
            Some(Kind::Wake) => {}
            Some(Kind::Hello) => self.on_hello(record),
            Some(Kind::Region) => self.on_region(record),
            Some(Kind::Forget) => drop(self.maps.remove(&record[1])),
            None => self.end(LinkDownReason::Violation("a record of no known kind")),
        }
    }

    fn on_hello(&mut self, record: &Entry) {
        let fds = (self.socket.take_fd(), self.socket.take_fd());
        let (Some(half), Some(header), None, true) = (&fds.0, &fds.1, &self.peer, record[1] == self.generation) else {
            return self.end(LinkDownReason::Violation("a hello that does not fit the lane"));
        };
        match (PeerHalf::new(half), PeerMap::new(header, record[2])) {
            (Ok(half), Ok(header)) => self.peer = Some(Peer { half, header }),
            _ => self.end(LinkDownReason::Violation("halves or headers that cannot be mapped")),
        }
    }

    fn on_region(&mut self, record: &Entry) {
        let Some(fd) = self.socket.take_fd() else {
            return self.end(LinkDownReason::Violation("a region without its descriptor"));
        };
        if self.maps.len() >= PEER_REGIONS_MAX {
            return self.end(LinkDownReason::Violation("more regions than a link can have"));
        }
        match PeerMap::new(&fd, record[2]) {
            Ok(map) => drop(self.maps.insert(record[1], map)),
            Err(_) => self.end(LinkDownReason::Violation("a region that cannot be mapped")),
        }
    }

    /// Wakes the peer if it sleeps and there is news.
    pub(super) fn ring(&mut self) {
        if !core::mem::take(&mut self.news) {
            return;
        }
        full_fence();
        let Some(peer) = &self.peer else { return };
        let sleep = peer.half.value(Counter::Sleep);
        if sleep % 2 == 1 && sleep != self.rung_sleep {
            self.rung_sleep = sleep;
            self.socket.wake();
        }
    }
}

impl Link {
    /// A link over a connected socket; says hello. `None` without a header page that can be shown.
    pub(super) fn new(
        now: Instant,
        id: LinkId,
        (fd, read_ahead, lane): (OwnedFd, Vec<u8>, Lane),
        header: &Arc<HeaderPage>,
    ) -> Option<Self> {
        let own = OwnHalf::new().ok()?;
        let fds = vec![own.shared()?.clone(), header.shared()?.clone()];
        let mut socket = Socket::new(fd, read_ahead);
        socket.send(record(Kind::Hello, &[lane.generation, u64::from(header.words()) * 8]), fds);
        let shared = Shared {
            id,
            socket,
            own,
            peer: None,
            maps: BTreeMap::new(),
            shown: BTreeSet::new(),
            generation: lane.generation,
            rung_sleep: 0,
            news: false,
            last_progress: now,
            down: None,
        };
        Some(Self { shared, asking: Asking::default(), serving: Serving::default() })
    }

    /// One turn. Returns bytes copied, and whether anything was done.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        budget: u64,
        regions: &Regions,
        inbound: &mut dyn Inbound,
    ) -> (u64, bool) {
        let mut left = budget;
        if !self.shared.socket.is_flushed() {
            self.shared.socket.flush();
        }
        let mut worked = self.asking.on_replies(&mut self.shared, inbound);
        worked |= self.asking.publish(&mut self.shared, regions);
        worked |= self.serving.turn(&mut self.shared, &mut left, regions, inbound);
        worked |= self.asking.finish(&mut self.shared, &mut left, inbound);
        if worked || self.asking.is_idle() {
            self.shared.last_progress = now;
        }
        self.shared.ring();
        (budget - left, worked)
    }

    /// Reports every batch as finished and the link as down. Replies that came before the end still count.
    pub(super) fn bury(&mut self, reason: LinkDownReason, inbound: &mut dyn Inbound) {
        self.asking.on_replies(&mut self.shared, inbound);
        self.asking.abandon(reason, inbound);
        inbound.event(Event::LinkDown { link: self.shared.id, reason });
    }

    /// Marks our end as asleep or awake.
    pub(super) fn set_asleep(&mut self, asleep: Asleep) {
        let sleep = self.shared.own.value(Counter::Sleep);
        if (sleep % 2 == 1) != (asleep == Asleep::Yes) {
            self.shared.own.set(Counter::Sleep, sleep + 1);
        }
    }

    /// Whether a turn would find something to do.
    pub(super) fn has_work(&self) -> bool {
        self.shared.down.is_some() || self.serving.has_work(&self.shared) || self.asking.has_work(&self.shared)
    }
}

/// Whether an end waits for its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asleep {
    /// It does.
    Yes,
    /// It looks at the rings.
    No,
}

/// A socket record.
fn record(kind: Kind, words: &[u64]) -> Entry {
    let mut record = [0; ENTRY_WORDS];
    record[0] = kind as u64;
    record[1..=words.len()].copy_from_slice(words);
    record
}
