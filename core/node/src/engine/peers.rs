//! What the shard knows of one peer: its lanes, what waits for them, and which lane a part takes.
//!
//! Nothing here posts or dials. Invariants: a lane index has at most one open lane per side; while frames of a lost lane may
//! still be applied by the peer, no part that writes is given a lane (quiet has two ends: the lane's next generation
//! fences them).

use std::collections::VecDeque;
use std::sync::Arc;

use millpond_core::quiet::LANES_PER_PEER_MAX;
use millpond_core::slab::Handle;
use millpond_core::time::{Duration, Instant};
use millpond_hal::contract::{LaneSide, LinkId};

use super::batch::{Class, Via};
use super::options::Options;
use super::peer::PeerInner;
use super::statistics::DowngradeReason;
use crate::session::Permit;

/// Bytes posted on one lane before the next part waits.
const LANE_BYTES_MAX: u64 = 64 << 20;
/// Batches posted on one lane before the next part waits.
const LANE_POSTS_MAX: u32 = 256;
/// Bytes posted on all lanes from which a further lane is worth its dial.
const SECOND_LANE_BYTES: u64 = 8 << 20;
/// The first lane index of shared memory; those below are TCP's.
pub(super) const SHM_LANES: u8 = 4;
/// First wait after a failed dial; doubles up to [`REDIAL_MAX`].
const REDIAL_MIN: Duration = Duration::from_millis(20);
const REDIAL_MAX: Duration = Duration::from_millis(500);

const CLASSES: usize = 3;
const VIAS: usize = 4;
/// Parts a class may send while others wait, per round.
const SHARES: [u32; CLASSES] = [8, 2, 1];

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) link: LinkId,
    pub(super) via: Via,
    pub(super) side: LaneSide,
    pub(super) index: u8,
    pub(super) posted_bytes: u64,
    pub(super) posts: u32,
    /// The device said so; until something ends on it.
    pub(super) is_full: bool,
    /// The place among the acceptor's sessions.
    pub(super) _permit: Permit,
}

/// Dialling of one lane index.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dialling {
    pub(super) busy: bool,
    pub(super) failures: u32,
    pub(super) not_before: Instant,
    /// When the first of the failures in a row happened.
    pub(super) failing_since: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) inner: Arc<PeerInner>,
    pub(super) same_host: bool,
    pub(super) lanes: Vec<Lane>,
    queues: [[VecDeque<Handle>; VIAS]; CLASSES],
    credits: [u32; CLASSES],
    pub(super) queued: u32,
    pub(super) open_bytes: u64,
    pub(super) dialling: [Dialling; LANES_PER_PEER_MAX],
    /// Newest generation of each of the peer's lanes to us.
    pub(super) accepted: [u64; LANES_PER_PEER_MAX],
    /// When the last of them was opened: the next one may be on its way.
    accepted_at: Instant,
    /// Lane indexes of ours, and of the peer's, whose last loss left writes in doubt.
    pub(super) unfenced: [u8; 2],
    /// The peer is known to have been replaced: nothing reaches it any more.
    pub(super) is_gone: bool,
    /// A transport that it cannot be reached over was warned about, until it can.
    was_warned_of: bool,
}

/// What becomes of a part now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// It takes that lane.
    Lane(usize),
    /// It waits for room, a dial or the peer.
    Wait,
    /// It can never go.
    Never(&'static str),
}

/// A lane that is to be dialled.
#[derive(Clone, Debug)]
pub(super) struct WantedLane {
    pub(super) peer: Handle,
    pub(super) inner: Arc<PeerInner>,
    pub(super) index: u8,
}

fn side(side: LaneSide) -> usize {
    match side {
        LaneSide::Dialed => 0,
        LaneSide::Accepted => 1,
    }
}

fn class(class: Class) -> usize {
    match class {
        Class::Foreground => 0,
        Class::Background => 1,
        Class::Bulk => 2,
    }
}

fn via_place(via: Via) -> usize {
    match via {
        Via::Auto => 0,
        Via::Local => 1,
        Via::Shm => 2,
        Via::Tcp => 3,
    }
}

const QUEUED_VIAS: [Via; VIAS] = [Via::Auto, Via::Local, Via::Shm, Via::Tcp];

impl PeerState {
    pub(super) fn new(inner: Arc<PeerInner>, same_host: bool) -> Self {
        Self {
            inner,
            same_host,
            lanes: Vec::new(),
            queues: Default::default(),
            credits: SHARES,
            queued: 0,
            open_bytes: 0,
            dialling: Default::default(),
            accepted: [0; LANES_PER_PEER_MAX],
            accepted_at: Instant::ZERO,
            unfenced: [0; 2],
            is_gone: false,
            was_warned_of: false,
        }
    }

    pub(super) fn enqueue(&mut self, part: Handle, of: (Class, Via), at: Place) {
        let queue = &mut self.queues[class(of.0)][via_place(of.1)];
        match at {
            Place::Back => queue.push_back(part),
            Place::Front => queue.push_front(part),
        }
        self.queued += 1;
    }

    /// The head of each queue with its class, those classes first that are due.
    pub(super) fn heads_now(&self) -> [Option<(Class, Via, Handle)>; CLASSES * VIAS] {
        let classes = [Class::Foreground, Class::Background, Class::Bulk];
        let mut heads = [None; CLASSES * VIAS];
        let mut count = 0;
        for due in [true, false] {
            for of in classes.into_iter().filter(|of| (self.credits[class(*of)] > 0) == due) {
                for (queue, via) in self.queues[class(of)].iter().zip(QUEUED_VIAS) {
                    if let Some(head) = queue.front() {
                        heads[count] = Some((of, via, *head));
                        count += 1;
                    }
                }
            }
        }
        heads
    }

    /// Takes the head of a queue out, and charges its class.
    pub(super) fn pop(&mut self, of: Class, via: Via) -> Option<Handle> {
        let head = self.queues[class(of)][via_place(via)].pop_front()?;
        self.queued -= 1;
        let credit = &mut self.credits[class(of)];
        *credit = credit.saturating_sub(1);
        let is_due = |(queues, credit): (&[VecDeque<Handle>; VIAS], &u32)| {
            *credit > 0 && queues.iter().any(|queue| !queue.is_empty())
        };
        if !self.queues.iter().zip(&self.credits).any(is_due) {
            self.credits = SHARES;
        }
        Some(head)
    }

    /// Takes a part out of its queue, wherever it stands.
    pub(super) fn unqueue(&mut self, part: Handle, of: (Class, Via)) -> bool {
        let queue = &mut self.queues[class(of.0)][via_place(of.1)];
        let Some(at) = queue.iter().position(|queued| *queued == part) else { return false };
        queue.remove(at);
        self.queued -= 1;
        true
    }

    /// All queued parts, taken out.
    pub(super) fn drain(&mut self) -> Vec<Handle> {
        self.queued = 0;
        self.queues.iter_mut().flatten().flat_map(|queue| queue.drain(..)).collect()
    }

    /// Whether writes may not be posted because a lost lane's frames are not fenced.
    fn is_in_doubt(&self) -> bool {
        self.unfenced != [0; 2]
    }

    fn best(&self, via: Via, bytes: u64) -> Option<usize> {
        let has_room = |lane: &Lane| {
            !lane.is_full
                && lane.posts < LANE_POSTS_MAX
                && (lane.posts == 0 || lane.posted_bytes + bytes <= LANE_BYTES_MAX)
        };
        let open = self.lanes.iter().enumerate().filter(|(_, lane)| lane.via == via && has_room(lane));
        open.min_by_key(|(_, lane)| lane.posted_bytes).map(|(at, _)| at)
    }

    fn has(&self, via: Via) -> bool {
        self.lanes.iter().any(|lane| lane.via == via)
    }

    /// Whether `via` can join this peer and us at all.
    pub(super) fn joins(&self, via: Via, options: &Options) -> Result<(), &'static str> {
        match via {
            _ if !options.allows(via) => Err("the transport is switched off here"),
            Via::Auto => Ok(()),
            Via::Local if self.inner.is_self => Ok(()),
            Via::Local => Err("the peer is another process"),
            _ if self.inner.is_self => Err("the peer is this engine itself"),
            Via::Shm if !self.same_host => Err("the peer runs on another host, or in other namespaces"),
            _ => Ok(()),
        }
    }

    /// Which lane a part takes. Lanes that are missing and worth a dial are pushed to `wanted`.
    pub(super) fn choose(
        &mut self,
        part: (Via, u64, bool),
        options: &Options,
        now: Instant,
        wanted: &mut Vec<WantedLane>,
    ) -> Choice {
        let (via, bytes, has_writes) = part;
        if let Err(why) = self.joins(via, options) {
            return Choice::Never(why);
        }
        if self.is_gone {
            return Choice::Never("the peer was restarted; open it again");
        }
        let try_order: &[Via] = match via {
            Via::Auto if self.inner.is_self => &[Via::Local],
            Via::Auto => &[Via::Shm, Via::Tcp],
            Via::Local => &[Via::Local],
            Via::Shm => &[Via::Shm],
            Via::Tcp => &[Via::Tcp],
        };
        let usable = try_order.iter().copied().filter(|via| self.joins(*via, options).is_ok()).collect::<Usable>();
        if has_writes && self.is_in_doubt() {
            for via in usable.iter() {
                self.want(via, now, wanted);
            }
            return Choice::Wait;
        }
        for via in usable.iter() {
            if let Some(at) = self.best(via, bytes) {
                if via == Via::Tcp && self.lanes[at].posted_bytes >= SECOND_LANE_BYTES {
                    self.want_another(options, now, wanted);
                }
                return Choice::Lane(at);
            }
            if self.has(via) {
                return Choice::Wait;
            }
            self.want(via, now, wanted);
            // While a better path is being dialled the next one carries the part.
        }
        let hopeless = usable.iter().all(|via| self.is_hopeless(via, options, now));
        let is_named = via != Via::Auto;
        if hopeless && is_named {
            Choice::Never("it could not be connected within the connect deadline")
        } else {
            Choice::Wait
        }
    }

    /// Whether dialling `via` has failed for the whole connect deadline, or the peer, who alone can dial, did not in that time.
    fn is_hopeless(&self, via: Via, options: &Options, now: Instant) -> bool {
        let Some(first) = first_index(via) else { return true };
        let since = self.dialling[usize::from(first)].failing_since;
        since.is_some_and(|since| now.since(since) >= options.connect_deadline)
            || self.inner.address.is_none() && !self.has(via) && now.since(self.accepted_at) >= options.connect_deadline
    }

    /// The transport that a part should have taken, and why `lane` carries it instead; `None`: there is no better one.
    pub(super) fn downgrade(&self, lane: Via, options: &Options, now: Instant) -> Option<(Via, DowngradeReason)> {
        if lane != Via::Tcp || self.joins(Via::Shm, options).is_err() {
            return None;
        }
        let has_failed =
            first_index(Via::Shm).is_some_and(|first| self.dialling[usize::from(first)].failing_since.is_some());
        let is_awaited = self.inner.address.is_some() || now.since(self.accepted_at) < options.connect_deadline;
        let is_connecting = self.has(Via::Shm) || (!has_failed && is_awaited);
        Some((Via::Shm, if is_connecting { DowngradeReason::Connecting } else { DowngradeReason::Unreachable }))
    }

    /// Whether nobody was warned yet that a transport cannot be connected; from now on somebody was, until it can.
    pub(super) fn is_news(&mut self, reason: DowngradeReason) -> bool {
        reason == DowngradeReason::Unreachable && !std::mem::replace(&mut self.was_warned_of, true)
    }

    /// Asks for the first lane of a transport, or for those whose loss left writes in doubt.
    fn want(&mut self, via: Via, now: Instant, wanted: &mut Vec<WantedLane>) {
        let Some(first) = first_index(via) else { return };
        let doubt = self.unfenced[0];
        for index in (first..first + SHM_LANES).filter(|index| *index == first || doubt & (1 << index) != 0) {
            self.want_index(index, now, wanted);
        }
    }

    fn want_another(&mut self, options: &Options, now: Instant, wanted: &mut Vec<WantedLane>) {
        let ceiling = options.lanes_per_peer_max.clamp(1, SHM_LANES);
        let is_open = |index: &u8| self.lanes.iter().any(|lane| lane.side == LaneSide::Dialed && lane.index == *index);
        if let Some(index) = (0..ceiling).find(|index| !is_open(index)) {
            self.want_index(index, now, wanted);
        }
    }

    pub(super) fn want_index(&mut self, index: u8, now: Instant, wanted: &mut Vec<WantedLane>) {
        let is_open = self.lanes.iter().any(|lane| lane.side == LaneSide::Dialed && lane.index == index);
        let dialling = &mut self.dialling[usize::from(index)];
        if is_open || dialling.busy || now < dialling.not_before || self.inner.address.is_none() {
            return;
        }
        dialling.busy = true;
        wanted.push(WantedLane { peer: self.inner.key, inner: Arc::clone(&self.inner), index });
    }

    pub(super) fn on_dial_failed(&mut self, index: u8, now: Instant) {
        let dialling = &mut self.dialling[usize::from(index)];
        dialling.busy = false;
        let wait = REDIAL_MIN.saturating_mul(1 << dialling.failures.min(5));
        dialling.failures += 1;
        dialling.failing_since.get_or_insert(now);
        dialling.not_before = now + wait.min(REDIAL_MAX);
    }

    /// A lane is there; frames of its earlier generations are fenced.
    pub(super) fn on_lane(&mut self, lane: Lane, now: Instant) {
        self.unfenced[side(lane.side)] &= !(1 << lane.index);
        match lane.side {
            LaneSide::Dialed => self.dialling[usize::from(lane.index)] = Dialling::default(),
            LaneSide::Accepted => self.accepted_at = now,
        }
        self.was_warned_of &= lane.via != Via::Shm;
        self.lanes.push(lane);
    }

    /// A lane is gone. `in_doubt`: writes on it may still be applied.
    pub(super) fn on_lane_down(&mut self, link: LinkId) -> Option<Lane> {
        let at = self.lanes.iter().position(|lane| lane.link == link)?;
        Some(self.lanes.swap_remove(at))
    }

    pub(super) fn doubt(&mut self, lane: (LaneSide, u8)) {
        self.unfenced[side(lane.0)] |= 1 << lane.1;
    }

    pub(super) fn lane_mut(&mut self, link: LinkId) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.link == link)
    }

    /// When the next dial may be tried, if somebody waits for one.
    pub(super) fn next_dial(&self, now: Instant) -> Instant {
        let waits = |dialling: &&Dialling| !dialling.busy && dialling.failures > 0 && dialling.not_before > now;
        self.dialling.iter().filter(waits).map(|dialling| dialling.not_before).min().unwrap_or(Instant::NEVER)
    }
}

/// Where in a queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Back,
    Front,
}

fn first_index(via: Via) -> Option<u8> {
    match via {
        Via::Tcp => Some(0),
        Via::Shm => Some(SHM_LANES),
        Via::Auto | Via::Local => None,
    }
}

/// At most two transports, in order, without a heap.
#[derive(Clone, Copy, Default)]
struct Usable([Option<Via>; 2]);

impl Usable {
    fn iter(self) -> impl Iterator<Item = Via> {
        self.0.into_iter().flatten()
    }
}

impl FromIterator<Via> for Usable {
    fn from_iter<I: IntoIterator<Item = Via>>(vias: I) -> Self {
        let mut usable = Self::default();
        usable.0.iter_mut().zip(vias).for_each(|(slot, via)| *slot = Some(via));
        usable
    }
}
