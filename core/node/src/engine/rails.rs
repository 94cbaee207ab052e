//! Which NIC here is joined with which of a peer's, and what byte tests found: the tables behind the rails to one peer.
//!
//! A rail is a link over one NIC here and one of the peer's. Which pairs there are, in which order, and what a test means is
//! said by `core::topology`; what is said to the peer, and when bytes are moved to test, by `rail`. Invariants: a rail is a
//! path of the scheduler only after both ends found that right bytes go over its pair both ways since the last event of
//! either NIC; a pair whose driver was found lying is not tried again before such an event.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Place;

use futures::channel::oneshot;
use millpond_core::batch::{Extent, MemoryKind, RegionId, RegionToken};
use millpond_core::slab::{Handle, Slot};
use millpond_core::time::Instant;
use millpond_core::topology::{
    Direction, End, Ended, Entry, Name, Pair, Path, TRIAL_LEN, TRIAL_MARGIN, Trial, Trials, Verdict, pairs,
};
use millpond_core::wire::message::rail::RailNic;
use millpond_hal::contract::{Connection, LaneSide, LinkDownReason, LinkId, Outcome};
use millpond_hal::fabric::{self, LinkOptions, PostOptions};

use super::Region;
use super::batch::Via;
use super::nics::{OwnNic, Side, told};
use super::options::Options;
use super::paths::PathEnd;
use super::peers::{RAIL_LANES, path_of};
use super::shard::{Entering, Shard};
use crate::session::Permit;

/// Rails to one peer, at most, for each side that dials.
pub(super) const RAILS_MAX: u8 = 3;

type PairTrials = Trials<[Slot<Entry>; 1]>;

/// What is known of the rails to one peer.
#[derive(Debug, Default)]
pub(super) struct Rails {
    /// The peer's NICs as it told them last.
    theirs: Vec<RailNic>,
    trials: BTreeMap<(u8, u8), PairTrials>,
    /// The pair of each rail that we dialled and that is open or being opened.
    taken: [Option<Pair>; RAILS_MAX as usize],
    /// Events of our NICs that are accounted for in the trials.
    events: Vec<u64>,
    /// The peer said that it has no NICs, or knows nothing of them.
    has_none: bool,
    /// Somebody was warned that a pair was found unfit since the last event.
    pub(super) was_warned_of: bool,
}

/// A rail that is being opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rail {
    pub(super) peer: Handle,
    pub(super) side: LaneSide,
    pub(super) index: u8,
    pub(super) lane_generation: u64,
    pub(super) pair: Pair,
    pub(super) link: LinkId,
}

/// A trial's own batch, under way.
#[derive(Debug)]
pub(super) struct Tried {
    ticket: fabric::Ticket,
    remote: RegionId,
    ended: oneshot::Sender<Outcome>,
}

fn as_path(peer: Handle, pair: Pair) -> Path {
    // Engines have host memory only.
    Path { memory: MemoryKind::Host, nic: pair.nic, peer, peer_nic: pair.peer_nic }
}

impl Rails {
    /// Accounts for what happened to NICs since the last time.
    fn note_events(&mut self, ours: &[RailNic], now: Instant) {
        self.events.resize(ours.len(), 0);
        for (nic, (known, told)) in (0..).zip(self.events.iter_mut().zip(ours)) {
            if std::mem::replace(known, told.events) != told.events {
                self.trials.values_mut().for_each(|trials| trials.on_link_event(now, nic));
                self.was_warned_of = false;
            }
        }
    }

    fn note_theirs(&mut self, peer: Handle, theirs: Vec<RailNic>, now: Instant) {
        let same_names = self.theirs.len() == theirs.len()
            && self.theirs.iter().zip(&theirs).all(|(known, told)| known.name == told.name);
        if !same_names {
            // Another numbering: nothing that was found applies.
            self.trials.clear();
        }
        for (nic, (known, told)) in (0..).zip(self.theirs.iter().zip(&theirs)) {
            if known.events != told.events {
                self.trials.values_mut().for_each(|trials| trials.on_peer_link_event(now, peer, nic));
                self.was_warned_of = false;
            }
        }
        self.theirs = theirs;
    }

    fn verdict(&self, peer: Handle, pair: Pair) -> Verdict {
        let trials = self.trials.get(&(pair.nic, pair.peer_nic));
        trials.map_or(Verdict::Untested, |trials| trials.verdict(&as_path(peer, pair)))
    }

    /// The pair that a rail of that index takes: the best that is not found unfit, over NICs that no other rail uses.
    fn choose(&self, peer: Handle, index: usize, nics: &[OwnNic], now: Instant) -> Result<Pair, String> {
        let sides = Side::of(&told(nics)).zip(Side::of(&self.theirs));
        let (ours, theirs) = sides.ok_or("the peer's NICs make no sense")?;
        let (here, there) = (End { nics: &ours.nics, row: &ours.row }, End { nics: &theirs.nics, row: &theirs.row });
        let others = || self.taken.iter().enumerate().filter(|(at, _)| *at != index).filter_map(|(_, pair)| *pair);
        let mut why = "no NIC here speaks the same as one of the peer's".to_owned();
        let mut shared = None;
        for (_, pair) in pairs(here, there) {
            let is_waiting =
                || self.trials.get(&(pair.nic, pair.peer_nic)).is_some_and(|trials| trials.next_at() > now);
            match self.verdict(peer, pair) {
                Verdict::Refuted(fault) if fault.is_lie() || is_waiting() => {
                    why = format!(
                        "{} to {}: {fault}",
                        ours.nics[usize::from(pair.nic)].name,
                        self.theirs[usize::from(pair.peer_nic)].name
                    );
                }
                _ if nics[usize::from(pair.nic)].nic.is_down() => {
                    why = format!("{} is down", ours.nics[usize::from(pair.nic)].name);
                }
                _ if others().any(|other| other.nic == pair.nic) => {}
                _ if others().any(|other| other.peer_nic == pair.peer_nic) => shared = shared.or(Some(pair)),
                _ => return Ok(pair),
            }
        }
        shared.ok_or(why)
    }

    fn names(&self, pair: Pair, nics: &[OwnNic]) -> Option<(Name, Name)> {
        let own = nics.get(usize::from(pair.nic))?.about.name;
        Some((own, self.theirs.get(usize::from(pair.peer_nic))?.name.parse().ok()?))
    }
}

/// The place of a rail among those that we dial.
fn place(index: u8) -> Option<usize> {
    index.checked_sub(RAIL_LANES).filter(|at| *at < RAILS_MAX).map(usize::from)
}

impl Shard {
    /// The pair for a rail that is to be dialled; it is taken until [`Shard::give_rail_up`]. Without `theirs`, by what the peer
    /// told last; `Ok(None)`: it never told.
    pub(super) fn take_rail(
        &mut self,
        peer: Handle,
        index: u8,
        theirs: Option<Vec<RailNic>>,
        options: &Options,
        now: Instant,
    ) -> Result<Option<Pair>, String> {
        let rails = self.peers.get_mut(peer).map(|peer| &mut peer.rails).ok_or("the peer is forgotten")?;
        let at = place(index).ok_or("there is no such rail")?;
        rails.note_events(&told(&options.nics), now);
        match theirs {
            Some(theirs) => rails.note_theirs(peer, theirs, now),
            None if rails.has_none => return Err("the peer has no NIC for a rail".to_owned()),
            None if rails.theirs.is_empty() => return Ok(None),
            None => {}
        }
        rails.taken[at] = None;
        let pair = rails.choose(peer, at, &options.nics, now)?;
        rails.taken[at] = Some(pair);
        Ok(Some(pair))
    }

    /// A peer takes part in no rails, until it is started anew.
    pub(super) fn has_no_rails(&mut self, peer: Handle) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.rails.has_none = true;
        }
    }

    /// The pair that the peer asks for, of NICs as it tells them.
    pub(super) fn meet_rail(
        &mut self,
        peer: Handle,
        theirs: Vec<RailNic>,
        pair: Pair,
        options: &Options,
        now: Instant,
    ) -> Result<(), String> {
        let rails = self.peers.get_mut(peer).map(|peer| &mut peer.rails).ok_or("the peer is forgotten")?;
        rails.note_events(&told(&options.nics), now);
        rails.note_theirs(peer, theirs, now);
        let is_there = usize::from(pair.nic) < options.nics.len() && usize::from(pair.peer_nic) < rails.theirs.len();
        if !is_there || Side::of(&rails.theirs).is_none() {
            return Err("there is no such NIC".to_owned());
        }
        match rails.verdict(peer, pair) {
            Verdict::Refuted(fault) if fault.is_lie() => Err(fault.to_string()),
            _ => Ok(()),
        }
    }

    /// A rail that was dialled is not there, or not any more.
    pub(super) fn give_rail_up(&mut self, peer: Handle, index: u8) {
        if let (Some(peer), Some(at)) = (self.peers.get_mut(peer), place(index)) {
            peer.rails.taken[at] = None;
        }
    }

    /// A link over a NIC here, of an endpoint that knows its peer. No path leads over it yet.
    pub(super) fn open_rail_link(
        &mut self,
        nic: u8,
        connection: Connection,
        options: &Options,
        now: Instant,
    ) -> Result<LinkId, String> {
        let device = self.rdma_device(nic).ok_or("the NIC has no device")?;
        let with = LinkOptions::with_progress_deadline(options.progress_deadline);
        self.fabric.open(now, device, connection, with).map_err(|error| error.to_string())
    }

    /// The next byte test of a rail's pair, if one is due.
    pub(super) fn next_trial(&mut self, rail: &Rail, now: Instant) -> Result<Option<Trial>, String> {
        let peer = self.peers.get_mut(rail.peer).ok_or("the peer is forgotten")?;
        let trials = match peer.rails.trials.entry((rail.pair.nic, rail.pair.peer_nic)) {
            Place::Occupied(known) => known.into_mut(),
            Place::Vacant(new) => {
                let mut seed = [0; 8];
                getrandom::fill(&mut seed).map_err(|error| error.to_string())?;
                let mut trials = Trials::new([Slot::EMPTY; 1], u64::from_le_bytes(seed));
                trials.add(as_path(rail.peer, rail.pair)).map_err(|error| error.to_string())?;
                new.insert(trials)
            }
        };
        Ok(trials.poll(now))
    }

    /// Whether bytes may go over a rail's pair.
    pub(super) fn rail_verdict(&self, rail: &Rail) -> Verdict {
        self.peers.get(rail.peer).map_or(Verdict::Untested, |peer| peer.rails.verdict(rail.peer, rail.pair))
    }

    /// A byte test ended. What was found out is warned about once.
    pub(super) fn on_trial_end(&mut self, rail: &Rail, trial: &Trial, ended: Ended, options: &Options, now: Instant) {
        let Some(peer) = self.peers.get_mut(rail.peer) else { return };
        let rails = &mut peer.rails;
        let key = (rail.pair.nic, rail.pair.peer_nic);
        let verdict = rails.trials.get_mut(&key).and_then(|trials| trials.on_end(now, trial.id, ended));
        if let (Some(Verdict::Refuted(fault)), Some((own, theirs))) = (verdict, rails.names(rail.pair, &options.nics)) {
            self.statistics.pairs_refuted += 1;
            if !std::mem::replace(&mut rails.was_warned_of, true) {
                tracing::warn!(nic = %own, peer_nic = %theirs, %fault, "a pair of NICs is not used; another path is, until its link changes");
            }
        }
    }

    /// Posts a trial's batch over a link that is no path yet. What it comes to is sent.
    pub(super) fn post_trial(
        &mut self,
        link: LinkId,
        direction: Direction,
        own: &Region,
        token: RegionToken,
        now: Instant,
    ) -> Result<oneshot::Receiver<Outcome>, String> {
        let remote = self.fabric.attach(token).map_err(|error| error.to_string())?;
        let (at, len) = (TRIAL_MARGIN as u64, TRIAL_LEN as u64);
        let (here, there) = (own.extent(at, len), Extent::new(remote, at, len));
        let mut batch = fabric::Batch::new();
        match direction {
            Direction::Write => batch.write_raw(here, there),
            Direction::Read => batch.read_raw(there, here),
        };
        let ticket = self.fabric.post(now, link, batch, PostOptions::default()).map_err(|refused| {
            let why = refused.reason.to_string();
            // Just attached, and in no batch.
            let _ = self.fabric.detach(remote);
            why
        })?;
        let (ended, outcome) = oneshot::channel();
        self.tried.insert(ticket.id(), Tried { ticket, remote, ended });
        Ok(outcome)
    }

    /// A batch that is none of the scheduler's ended.
    pub(super) fn on_tried(&mut self, id: millpond_hal::contract::TicketId) {
        let Some(Tried { ticket, remote, ended }) = self.tried.remove(&id) else { return };
        if let Ok(completion) = self.fabric.take(ticket) {
            // Whoever asked may have given up.
            let _ = ended.send(completion.overall());
        }
        let _ = self.fabric.detach(remote);
    }

    /// Both ends proved a rail: from now on it is a path. `session` ends with it.
    pub(super) fn enter_rail(
        &mut self,
        rail: &Rail,
        session: oneshot::Sender<()>,
        permit: Permit,
        options: &Options,
        now: Instant,
    ) -> Result<(), String> {
        let path = path_of(rail.side, rail.index).ok_or("there is no lane of that index")?;
        if self.fabric.link(rail.link).is_none_or(|link| link.closing) {
            return Err("the link ended meanwhile".to_owned());
        }
        let peer = self.peers.get(rail.peer).filter(|peer| !peer.is_gone).ok_or("the peer is gone")?;
        let newest = peer.accepted.get(usize::from(rail.index));
        if rail.side == LaneSide::Accepted && newest != Some(&rail.lane_generation) {
            return Err("a newer generation of the rail took over".to_owned());
        }
        let nics = peer.rails.names(rail.pair, &options.nics);
        let end = PathEnd { via: Via::Rdma, at: None, nics };
        let entering =
            Entering { side: rail.side, via: Via::Rdma, link: rail.link, permit, end, session: Some(session) };
        self.enter_lane(rail.peer, path, entering, options, now)
    }

    /// Ends a link, by what became of the session beside it.
    pub(super) fn end_link(&mut self, link: LinkId, reason: LinkDownReason, options: &Options, now: Instant) {
        self.fabric.close_link_for(link, reason);
        self.turn(options, now);
    }
}

impl Rails {
    /// Whether the peer has NICs too.
    pub(super) fn are_shared(&self) -> bool {
        !self.theirs.is_empty()
    }

    /// Whether a byte test found one of the pairs unfit.
    pub(super) fn is_refuted(&self, peer: Handle) -> bool {
        let mut pairs = self.trials.keys().map(|(nic, peer_nic)| Pair { nic: *nic, peer_nic: *peer_nic });
        pairs.any(|pair| matches!(self.verdict(peer, pair), Verdict::Refuted(_)))
    }

    /// Whether a driver was found lying.
    pub(super) fn has_liar(&self, peer: Handle) -> bool {
        let mut pairs = self.trials.keys().map(|(nic, peer_nic)| Pair { nic: *nic, peer_nic: *peer_nic });
        pairs.any(|pair| matches!(self.verdict(peer, pair), Verdict::Refuted(fault) if fault.is_lie()))
    }
}
