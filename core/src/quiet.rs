//! When memory that somebody else writes may be touched again: the rules of reserve, post, fence and quarantine.
//!
//! Two machines, one per end. The [`Target`] owns memory, reserves it for a writer, and says of every frame whether its
//! bytes may land; the [`Initiator`] posts attempts and says of each what is known about the far end. Neither moves a
//! byte, opens a socket or knows a clock: a deadline is somebody calling [`Initiator::on_lost`] and [`Target::fence`].
//! It is not a protocol: acknowledgements and hellos are carried by whoever calls.
//!
//! Invariants, checked exhaustively by `verify/tests/quiet_model.rs`:
//! - no byte lands in memory that was given to somebody else since: [`Target::admit`] holds only for a current lane
//!   generation and a current reservation, and is asked again for every piece that is copied;
//! - memory is freed only when it is [`Memory::Quiet`]: fenced, and no device of a peer can reach it;
//! - an attempt said to be fenced or untouched never lands afterwards;
//! - every attempt ends, as done, untouched, fenced or lost, since closing a lane is always in our power.

use crate::seeded::{Bug, on};
use crate::slab::{Full, Handle, Slab, Slot};

/// Lanes that one initiator may have to one target at a time.
pub const LANES_PER_PEER_MAX: usize = 8;
/// Attempts per slice: the first and its repetitions.
pub const ATTEMPTS_PER_SLICE_MAX: u8 = 4;

/// What an initiator knows about the far end of a request that ended here.
///
/// ```
/// use millpond_core::quiet::Far;
/// assert!(Far::Unknown.may_have_changed() && !Far::Untouched.may_have_changed());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Far {
    /// All bytes are there and visible.
    Done,
    /// Nothing was applied, and nothing of it ever will be.
    Untouched,
    /// Some, all or nothing was applied; the target fences before it gives the memory to anybody else.
    Unknown,
}

impl Far {
    /// Whether memory over there may differ from before.
    #[must_use]
    pub const fn may_have_changed(self) -> bool {
        !matches!(self, Self::Untouched)
    }
}

/// A lane of an initiator, from its hello: a connection is one generation of one lane.
///
/// ```
/// use millpond_core::quiet::{Initiator, LaneName};
/// use millpond_core::slab::Slot;
/// let mut writer = Initiator::new(5, [Slot::EMPTY; 4]);
/// assert_eq!(writer.dial(2), LaneName { incarnation: 5, index: 2, generation: 1 });
/// assert_eq!(writer.dial(2).generation, 2); // the same lane, opened anew
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneName {
    /// The initiator's incarnation: new at each start, larger than those before.
    pub incarnation: u64,
    /// Which of its lanes, below [`LANES_PER_PEER_MAX`].
    pub index: u8,
    /// How often it was dialled: grows with each connection, from 1.
    pub generation: u64,
}

/// What every frame of an attempt carries.
///
/// ```
/// use millpond_core::quiet::Initiator;
/// use millpond_core::slab::Slot;
/// let mut writer = Initiator::new(5, [Slot::EMPTY; 4]);
/// let name = writer.dial(0);
/// writer.on_opened(name);
/// let (first, second) = (writer.post(0, 1, 0).unwrap(), writer.post(0, 1, 0).unwrap());
/// assert_eq!((first.attempt, second.attempt), (0, 1)); // one slice, posted twice
/// assert!(second.serial > first.serial);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// The lane it was posted on.
    pub lane: LaneName,
    /// Position among all that was posted in this incarnation, cancels included; grows.
    pub serial: u64,
    /// The batch.
    pub ticket: u64,
    /// The slice of the batch.
    pub slice: u32,
    /// Which attempt at that slice, from 0.
    pub attempt: u8,
}

/// Who stands between a lane and the memory.
///
/// Example: [`Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reach {
    /// The target copies, and asks [`Target::admit`] for every piece: tcp, shm, host.
    Checked,
    /// The peer's device writes by itself (rdma, NVLink): only destroying the queue pair or the registration stops it.
    Direct,
}

/// Where a reservation stands.
///
/// Example: [`Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Set aside for a writer; its bytes may be landing.
    Reserved,
    /// One attempt is completely there: the bytes may be used, but another attempt may still write the same ones.
    Usable,
    /// Checked frames are refused; a direct lane can still reach it.
    Fenced,
    /// Nobody else can write it any more: it may be freed and given to somebody else.
    Quiet,
}

/// Why a frame is not applied. It is counted and dropped, and its lane stays.
///
/// Example: [`Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Discard {
    /// From a lane generation or incarnation that was replaced or closed.
    StaleLane,
    /// Overtaken by a cancel on its lane.
    Cancelled,
    /// The same frame came before, or a later one of its lane did. Not to be answered: the first one is.
    Duplicate,
    /// Names a reservation that is fenced, free, or somebody else's by now.
    StaleReservation,
}

/// Why a hello does not become a lane.
///
/// ```
/// use millpond_core::quiet::{LaneName, Reach, Refused, Target};
/// use millpond_core::slab::Slot;
/// let mut target = Target::new([Slot::EMPTY; 4], [Slot::EMPTY; 2]);
/// let name = |generation| LaneName { incarnation: 1, index: 0, generation };
/// target.open([7; 16], name(2), Reach::Checked).unwrap();
/// assert_eq!(target.open([7; 16], name(1), Reach::Checked), Err(Refused::Stale)); // overtaken by its successor
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refused {
    /// A newer generation or incarnation of the same lane was seen before.
    Stale,
    /// The lane index is [`LANES_PER_PEER_MAX`] or more.
    IndexTooLarge,
    /// No room for another peer; try again later.
    TableFull,
    /// An older direct lane can still write: destroy it, call [`Target::cut`], then ask again.
    CutFirst(Lane),
}

/// The reservation is not quiet, or gone.
///
/// ```
/// use millpond_core::quiet::{Memory, NotFree, Target};
/// use millpond_core::slab::Slot;
/// let mut target = Target::new([Slot::EMPTY; 4], [Slot::EMPTY; 2]);
/// let memory = target.reserve().unwrap();
/// assert_eq!(target.free(memory), Err(NotFree::NotQuiet(Memory::Reserved))); // fence it first
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NotFree {
    /// It was freed before, or never existed.
    Stale,
    /// Somebody may still write it; it stays in quarantine.
    NotQuiet(Memory),
}

macro_rules! display_by {
    ($($type:ident: $text:expr;)*) => {$(
        impl core::fmt::Display for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                let text: fn(&Self) -> &'static str = $text;
                f.write_str(text(self))
            }
        }
        impl core::error::Error for $type {}
    )*};
}

display_by! {
    Discard: |why| match why {
        Discard::StaleLane => "the frame comes from a lane that was replaced; post it again on a current lane",
        Discard::Cancelled => "the frame was overtaken by its cancel",
        Discard::Duplicate => "the frame, or a later one of its lane, came before",
        Discard::StaleReservation => "the memory named is not reserved any more; ask for a new grant",
    };
    Refused: |why| match why {
        Refused::Stale => "a newer generation or incarnation of this lane was seen; dial with a larger one",
        Refused::IndexTooLarge => "the lane index is above the ceiling per peer; reuse a lane",
        Refused::TableFull => "no room for another peer; try again later",
        Refused::CutFirst(_) => "an older lane can still write; destroy it first",
    };
    NotFree: |why| match why {
        NotFree::Stale => "the reservation was freed before",
        NotFree::NotQuiet(_) => "the memory is not quiet; fence it and cut the lanes that reach it first",
    };
}

/// Names one open lane at the target.
///
/// Example: [`Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    peer: Handle,
    index: u8,
    generation: u64,
}

/// One reservation of a [`Target`]; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reservation {
    state: Memory,
    /// The peer whose direct lanes may reach it, and which of them.
    exposed_to: Handle,
    exposed: u8,
}

/// One initiator known to a [`Target`]; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    node: [u8; 16],
    incarnation: u64,
    lanes: [LaneState; LANES_PER_PEER_MAX],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LaneState {
    /// The newest generation seen; frames of others are stale.
    generation: u64,
    /// Frames with a smaller serial were overtaken by a cancel.
    floor: u64,
    /// One more than the largest serial seen: a frame below it comes twice, or too late.
    next: u64,
    reach: Reach,
    is_open: bool,
}

const NO_LANE: LaneState = LaneState { generation: 0, floor: 0, next: 0, reach: Reach::Checked, is_open: false };

/// The end that owns memory. `R` stores reservations, `P` peers, both from the caller.
///
/// ```
/// use millpond_core::quiet::{Discard, Initiator, Memory, Reach, Target};
/// use millpond_core::slab::Slot;
/// let mut target = Target::new([Slot::EMPTY; 4], [Slot::EMPTY; 2]);
/// let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
/// let name = writer.dial(0);
/// let lane = target.open([7; 16], name, Reach::Checked).unwrap();
/// writer.on_opened(name);
/// let memory = target.reserve().unwrap();
/// let stamp = writer.post(0, 1, 0).unwrap();
/// assert_eq!(target.admit(lane, &stamp, memory), Ok(()));
/// assert_eq!(target.fence(memory), Ok(Memory::Quiet)); // nobody but `admit` lets bytes in
/// assert_eq!(target.admit(lane, &stamp, memory), Err(Discard::StaleReservation));
/// target.free(memory).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target<R, P> {
    reservations: Slab<Reservation, R>,
    peers: Slab<Peer, P>,
}

impl<R, P> Target<R, P>
where
    R: AsRef<[Slot<Reservation>]> + AsMut<[Slot<Reservation>]>,
    P: AsRef<[Slot<Peer>]> + AsMut<[Slot<Peer>]>,
{
    /// A target without lanes and reservations over the given storage.
    pub fn new(reservations: R, peers: P) -> Self {
        Self { reservations: Slab::new(reservations), peers: Slab::new(peers) }
    }

    /// Sets memory aside; the handle travels in every frame that may write it. `Err`: all reservations are taken.
    pub fn reserve(&mut self) -> Result<Handle, Full<()>> {
        let fresh = Reservation { state: Memory::Reserved, exposed_to: Handle::default(), exposed: 0 };
        self.reservations.insert(fresh).map_err(|_| Full(()))
    }

    /// Takes the hello of a lane. Frames of older generations of it, and of older incarnations of its node, are discarded
    /// from here on, so answering the hello tells the initiator that they are fenced. O(peers) for a new peer, else O(1).
    pub fn open(&mut self, node: [u8; 16], name: LaneName, reach: Reach) -> Result<Lane, Refused> {
        let index = usize::from(name.index);
        if index >= LANES_PER_PEER_MAX {
            return Err(Refused::IndexTooLarge);
        }
        let known = self.peers.iter().find(|(_, peer)| peer.node == node).map(|(handle, _)| handle);
        let handle = match known {
            Some(handle) => handle,
            None => {
                let fresh = Peer { node, incarnation: name.incarnation, lanes: [NO_LANE; LANES_PER_PEER_MAX] };
                self.peers.insert(fresh).map_err(|_| Refused::TableFull)?
            }
        };
        let Some(peer) = self.peers.get_mut(handle) else { return Err(Refused::TableFull) };
        if name.incarnation < peer.incarnation {
            return Err(Refused::Stale);
        }
        let is_newer = name.incarnation > peer.incarnation;
        if !is_newer && name.generation <= peer.lanes[index].generation {
            return Err(Refused::Stale);
        }
        for (old, lane) in (0u8..).zip(peer.lanes.iter()) {
            if lane.is_open && lane.reach == Reach::Direct && (is_newer || old == name.index) {
                return Err(Refused::CutFirst(Lane { peer: handle, index: old, generation: lane.generation }));
            }
        }
        if is_newer {
            peer.incarnation = name.incarnation;
            peer.lanes = [NO_LANE; LANES_PER_PEER_MAX];
        }
        peer.lanes[index] = LaneState { generation: name.generation, reach, is_open: true, ..NO_LANE };
        Ok(Lane { peer: handle, index: name.index, generation: name.generation })
    }

    fn lane(&self, lane: Lane) -> Option<(&Peer, &LaneState)> {
        let peer = self.peers.get(lane.peer)?;
        let state = &peer.lanes[usize::from(lane.index)];
        (state.is_open && state.generation == lane.generation).then_some((peer, state))
    }

    /// A frame of an attempt begins. Once per frame, before the first [`Target::admit`]: what comes twice is told apart
    /// here, so that a refusal afterwards truly says that nothing landed. O(1).
    pub fn on_frame(&mut self, lane: Lane, stamp: &Stamp) -> Result<(), Discard> {
        let (peer, state) = self.lane(lane).ok_or(Discard::StaleLane)?;
        if stamp.lane.incarnation != peer.incarnation || stamp.lane.generation != state.generation {
            return Err(Discard::StaleLane);
        }
        if stamp.serial < state.next {
            return Err(Discard::Duplicate);
        }
        if let Some(peer) = self.peers.get_mut(lane.peer) {
            peer.lanes[usize::from(lane.index)].next = stamp.serial.saturating_add(1);
        }
        Ok(())
    }

    /// Whether bytes of this frame may land in `reservation` now. Ask for each piece that is copied, and copy before
    /// anything else is done to this machine: between two pieces the memory may have been fenced. O(1).
    pub fn admit(&self, lane: Lane, stamp: &Stamp, reservation: Handle) -> Result<(), Discard> {
        if !on(Bug::QuietSkipsLaneCheck) {
            let (peer, state) = self.lane(lane).ok_or(Discard::StaleLane)?;
            if stamp.lane.incarnation != peer.incarnation || stamp.lane.generation != state.generation {
                return Err(Discard::StaleLane);
            }
            if stamp.serial < state.floor {
                return Err(Discard::Cancelled);
            }
        }
        if on(Bug::QuietSkipsFenceCheck) {
            return Ok(());
        }
        match self.reservations.get(reservation).map(|entry| entry.state) {
            Some(Memory::Reserved | Memory::Usable) => Ok(()),
            _ => Err(Discard::StaleReservation),
        }
    }

    /// All bytes of an attempt landed, each admitted: the memory is usable. Answer with a done acknowledgement.
    pub fn on_arrived(&mut self, lane: Lane, stamp: &Stamp, reservation: Handle) -> Result<(), Discard> {
        self.admit(lane, stamp, reservation)?;
        if let Some(entry) = self.reservations.get_mut(reservation) {
            entry.state = Memory::Usable;
        }
        Ok(())
    }

    /// A cancel came over `lane`: frames of it that were posted before the cancel are discarded from here on, so answering
    /// tells the initiator that they are fenced. `Err`: the lane is not current; nothing of it lands anyway.
    pub fn on_cancel(&mut self, lane: Lane, serial: u64) -> Result<(), Discard> {
        self.lane(lane).ok_or(Discard::StaleLane)?;
        let peer = self.peers.get_mut(lane.peer).ok_or(Discard::StaleLane)?;
        let state = &mut peer.lanes[usize::from(lane.index)];
        state.floor = serial.max(state.floor);
        state.next = serial.saturating_add(1).max(state.next);
        Ok(())
    }

    /// Lets the device behind a direct lane reach the memory. Call before its key or address travels. One peer per
    /// reservation; a checked lane needs no exposure.
    pub fn expose(&mut self, reservation: Handle, lane: Lane) -> Result<(), Discard> {
        self.lane(lane).ok_or(Discard::StaleLane)?;
        let entry = self.reservations.get_mut(reservation).ok_or(Discard::StaleReservation)?;
        let is_current = matches!(entry.state, Memory::Reserved | Memory::Usable);
        if !is_current || (entry.exposed != 0 && entry.exposed_to != lane.peer) {
            return Err(Discard::StaleReservation);
        }
        entry.exposed_to = lane.peer;
        entry.exposed |= 1 << lane.index;
        Ok(())
    }

    /// The lane is closed here and its device can write nothing any more: socket closed, queue pair or registration
    /// destroyed, or the peer's death proven. A timer is no proof. Fenced memory that only it reached becomes quiet.
    pub fn cut(&mut self, lane: Lane) {
        if self.lane(lane).is_none() {
            return;
        }
        if let Some(peer) = self.peers.get_mut(lane.peer) {
            peer.lanes[usize::from(lane.index)].is_open = false;
        }
        for entry in self.reservations.iter_mut().map(|(_, entry)| entry) {
            if entry.exposed_to == lane.peer {
                entry.exposed &= !(1 << lane.index);
            }
            if entry.state == Memory::Fenced && entry.exposed == 0 {
                entry.state = Memory::Quiet;
            }
        }
    }

    /// Takes the memory back from its writer: no frame is admitted from here on. Quiet at once unless a direct lane
    /// reaches it; then it stays in quarantine until [`Target::cut`]. Idempotent.
    pub fn fence(&mut self, reservation: Handle) -> Result<Memory, NotFree> {
        let entry = self.reservations.get_mut(reservation).ok_or(NotFree::Stale)?;
        entry.state = if entry.exposed == 0 { Memory::Quiet } else { Memory::Fenced };
        Ok(entry.state)
    }

    /// Where the reservation stands; `None` if it was freed.
    pub fn memory(&self, reservation: Handle) -> Option<Memory> {
        self.reservations.get(reservation).map(|entry| entry.state)
    }

    /// Ends the reservation; its memory may be given to somebody else. Refused unless it is quiet.
    pub fn free(&mut self, reservation: Handle) -> Result<(), NotFree> {
        match self.memory(reservation).ok_or(NotFree::Stale)? {
            Memory::Fenced if on(Bug::QuietFreesExposed) => {
                self.reservations.remove(reservation);
                Ok(())
            }
            Memory::Quiet => {
                self.reservations.remove(reservation);
                Ok(())
            }
            other => Err(NotFree::NotQuiet(other)),
        }
    }
}

/// Where one attempt stands, for its initiator.
///
/// ```
/// use millpond_core::quiet::{Far, Initiator, Progress};
/// use millpond_core::slab::Slot;
/// let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
/// let name = writer.dial(0);
/// writer.on_opened(name);
/// let stamp = writer.post(0, 1, 0).unwrap();
/// assert_eq!(writer.progress(&stamp), Some(Progress::Posted));
/// writer.on_ack(&stamp, Far::Done);
/// assert_eq!(writer.progress(&stamp), Some(Progress::Done));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// Under way.
    Posted,
    /// Acknowledged as done.
    Done,
    /// Refused before a byte was applied.
    Untouched,
    /// The target discards it from now on; what was applied before is unknown.
    Fenced,
    /// Its lane was closed here: nothing of ours is touched any more, but frames may still travel.
    Lost,
}

/// One attempt of an [`Initiator`]; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Initiator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    stamp: Stamp,
    progress: Progress,
}

/// What is known about one slice.
///
/// ```
/// use millpond_core::quiet::{Far, Initiator};
/// use millpond_core::slab::Slot;
/// let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
/// let name = writer.dial(0);
/// writer.on_opened(name);
/// let stamp = writer.post(0, 1, 0).unwrap();
/// writer.on_ack(&stamp, Far::Done);
/// let verdict = writer.verdict(1, 0);
/// assert!(verdict.is_arrived && verdict.is_quiet_here && verdict.is_quiet_there);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Verdict {
    /// One attempt is done: the bytes are usable over there.
    pub is_arrived: bool,
    /// No attempt touches our memory any more: a posted one holds it.
    pub is_quiet_here: bool,
    /// No attempt will land any more: the same place may be written anew.
    pub is_quiet_there: bool,
    /// The answer for the far end if the slice ended now.
    pub far: Far,
}

/// Why nothing was posted.
///
/// ```
/// use millpond_core::quiet::{Initiator, PostRefused};
/// use millpond_core::slab::Slot;
/// let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
/// assert_eq!(writer.post(0, 1, 0), Err(PostRefused::NotOpen));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PostRefused {
    /// The lane is not open: dial it, and wait for the answer.
    NotOpen,
    /// [`ATTEMPTS_PER_SLICE_MAX`] were made.
    TooManyAttempts,
    /// The attempt table is full; end other tickets first.
    TableFull,
}

display_by! {
    PostRefused: |why| match why {
        PostRefused::NotOpen => "the lane is not open; dial it first",
        PostRefused::TooManyAttempts => "the slice was tried often enough; end its ticket",
        PostRefused::TableFull => "too many attempts are under way; end other tickets first",
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OwnLane {
    generation: u64,
    is_open: bool,
}

/// The end that posts, towards one target. `S` stores attempts.
///
/// ```
/// use millpond_core::quiet::{Far, Initiator};
/// use millpond_core::slab::Slot;
/// let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
/// let name = writer.dial(0);
/// writer.on_opened(name);
/// writer.post(0, 1, 0).unwrap();
/// writer.on_lost(name);
/// assert_eq!(writer.verdict(1, 0).far, Far::Unknown); // frames may still travel
/// let name = writer.dial(0);
/// writer.on_opened(name); // the target discards older frames since it answered
/// assert!(writer.verdict(1, 0).is_quiet_there);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Initiator<S> {
    incarnation: u64,
    next_serial: u64,
    lanes: [OwnLane; LANES_PER_PEER_MAX],
    attempts: Slab<Attempt, S>,
}

impl<S: AsRef<[Slot<Attempt>]> + AsMut<[Slot<Attempt>]>> Initiator<S> {
    /// An initiator without lanes. `incarnation` is larger than that of every earlier start of this node.
    pub fn new(incarnation: u64, attempts: S) -> Self {
        let lane = OwnLane { generation: 0, is_open: false };
        Self { incarnation, next_serial: 0, lanes: [lane; LANES_PER_PEER_MAX], attempts: Slab::new(attempts) }
    }

    /// Starts a new generation of a lane; the one before is closed here. Its name goes into the hello.
    ///
    /// # Panics
    /// If `index` is not below [`LANES_PER_PEER_MAX`].
    pub fn dial(&mut self, index: u8) -> LaneName {
        let lane = &mut self.lanes[usize::from(index)];
        *lane = OwnLane { generation: lane.generation + 1, is_open: false };
        let name = LaneName { incarnation: self.incarnation, index, generation: lane.generation };
        self.lose(|stamp| stamp.lane.index == index);
        name
    }

    /// The target answered the hello: attempts on older generations of this lane are fenced.
    pub fn on_opened(&mut self, name: LaneName) {
        let Some(lane) = self.lanes.get_mut(usize::from(name.index)) else { return };
        if name.incarnation != self.incarnation || name.generation != lane.generation {
            return; // an answer to an earlier dial
        }
        lane.is_open = true;
        for (_, attempt) in self.attempts.iter_mut() {
            let at = attempt.stamp.lane;
            if at.index == name.index && at.generation < name.generation && attempt.progress == Progress::Lost {
                attempt.progress = Progress::Fenced;
            }
        }
    }

    /// A lane was closed here, by us or by an error. Stale names are ignored.
    pub fn on_lost(&mut self, name: LaneName) {
        let Some(lane) = self.lanes.get_mut(usize::from(name.index)) else { return };
        if name.incarnation == self.incarnation && name.generation == lane.generation {
            lane.is_open = false;
            self.lose(|stamp| stamp.lane == name);
        }
    }

    fn lose(&mut self, is_hit: impl Fn(&Stamp) -> bool) {
        for (_, attempt) in self.attempts.iter_mut() {
            if attempt.progress == Progress::Posted && is_hit(&attempt.stamp) {
                attempt.progress = Progress::Lost;
            }
        }
    }

    /// Posts a slice, or posts it again. A second attempt on the same slice writes the same bytes to the same place: it
    /// makes the slice usable earlier and quiet later.
    pub fn post(&mut self, index: u8, ticket: u64, slice: u32) -> Result<Stamp, PostRefused> {
        let lane = self.lanes.get(usize::from(index)).filter(|lane| lane.is_open).ok_or(PostRefused::NotOpen)?;
        let generation = lane.generation;
        let made = self.of_slice(ticket, slice).map(|attempt| attempt.stamp.attempt + 1).max().unwrap_or(0);
        if made >= ATTEMPTS_PER_SLICE_MAX {
            return Err(PostRefused::TooManyAttempts);
        }
        let lane = LaneName { incarnation: self.incarnation, index, generation };
        let stamp = Stamp { lane, serial: self.next_serial, ticket, slice, attempt: made };
        let fresh = Attempt { stamp, progress: Progress::Posted };
        self.attempts.insert(fresh).map_err(|_| PostRefused::TableFull)?;
        self.next_serial += 1;
        Ok(stamp)
    }

    /// An acknowledgement came. Late, unknown and duplicate ones change nothing and give `false`.
    pub fn on_ack(&mut self, stamp: &Stamp, far: Far) -> bool {
        let Some((_, attempt)) = self.attempts.iter_mut().find(|(_, attempt)| attempt.stamp == *stamp) else {
            return false;
        };
        let before = attempt.progress;
        attempt.progress = match (far, before) {
            // The bytes were all there when this was said, whatever was concluded since.
            (Far::Done, Progress::Posted | Progress::Lost | Progress::Fenced) => Progress::Done,
            (Far::Untouched, Progress::Posted | Progress::Lost | Progress::Fenced) => Progress::Untouched,
            (_, unchanged) => unchanged,
        };
        before != attempt.progress
    }

    /// A serial for a cancel frame on a lane: everything posted on it before is fenced once the target answered.
    pub fn cancel(&mut self) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        serial
    }

    /// The target answered a cancel on lane `name` with this serial.
    pub fn on_cancelled(&mut self, name: LaneName, serial: u64) {
        for (_, attempt) in self.attempts.iter_mut() {
            let is_overtaken = attempt.stamp.lane == name && attempt.stamp.serial < serial;
            if is_overtaken && matches!(attempt.progress, Progress::Posted | Progress::Lost) {
                attempt.progress = Progress::Fenced;
            }
        }
    }

    fn of_slice(&self, ticket: u64, slice: u32) -> impl Iterator<Item = &Attempt> {
        let is_hit = move |stamp: &Stamp| stamp.ticket == ticket && stamp.slice == slice;
        self.attempts.iter().map(|(_, attempt)| attempt).filter(move |attempt| is_hit(&attempt.stamp))
    }

    /// Where one attempt stands; `None` once its ticket was ended.
    pub fn progress(&self, stamp: &Stamp) -> Option<Progress> {
        self.attempts.iter().find(|(_, attempt)| attempt.stamp == *stamp).map(|(_, attempt)| attempt.progress)
    }

    /// What is known about a slice. A slice that was never posted is quiet and untouched. O(attempts).
    pub fn verdict(&self, ticket: u64, slice: u32) -> Verdict {
        let start = Verdict { is_arrived: false, is_quiet_here: true, is_quiet_there: true, far: Far::Untouched };
        self.of_slice(ticket, slice).fold(start, |so_far, attempt| {
            let progress = attempt.progress;
            let is_arrived = so_far.is_arrived || progress == Progress::Done;
            let far = match progress {
                _ if is_arrived => Far::Done,
                Progress::Untouched => so_far.far,
                _ => Far::Unknown,
            };
            Verdict {
                is_arrived,
                is_quiet_here: so_far.is_quiet_here && progress != Progress::Posted,
                is_quiet_there: so_far.is_quiet_there && !matches!(progress, Progress::Posted | Progress::Lost),
                far,
            }
        })
    }

    /// Forgets a ticket's attempts: nobody asks about it any more. `Err(n)`: that many attempts still hold our memory;
    /// close their lanes first.
    pub fn end(&mut self, ticket: u64) -> Result<(), usize> {
        let is_hit = |attempt: &Attempt| attempt.stamp.ticket == ticket;
        let posted = |attempt: &Attempt| is_hit(attempt) && attempt.progress == Progress::Posted;
        let held = self.attempts.iter().filter(|(_, attempt)| posted(attempt)).count();
        if held > 0 {
            return Err(held);
        }
        loop {
            let next = self.attempts.iter().find(|(_, attempt)| is_hit(attempt)).map(|(handle, _)| handle);
            let Some(handle) = next else { return Ok(()) };
            self.attempts.remove(handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: [u8; 16] = [1; 16];

    fn name(incarnation: u64, index: u8, generation: u64) -> LaneName {
        LaneName { incarnation, index, generation }
    }

    #[test]
    fn a_late_hello_of_an_older_generation_is_refused() {
        let mut target = Target::new([Slot::EMPTY; 1], [Slot::EMPTY; 1]);
        target.open(NODE, name(1, 0, 2), Reach::Checked).unwrap();
        assert_eq!(target.open(NODE, name(1, 0, 1), Reach::Checked), Err(Refused::Stale));
        target.open(NODE, name(2, 0, 1), Reach::Checked).unwrap();
        assert_eq!(target.open(NODE, name(1, 1, 9), Reach::Checked), Err(Refused::Stale));
    }

    #[test]
    fn memory_a_direct_lane_reaches_stays_in_quarantine_until_the_lane_is_cut() {
        let mut target = Target::new([Slot::EMPTY; 1], [Slot::EMPTY; 1]);
        let lane = target.open(NODE, name(1, 3, 1), Reach::Direct).unwrap();
        let memory = target.reserve().unwrap();
        target.expose(memory, lane).unwrap();
        assert_eq!(target.fence(memory), Ok(Memory::Fenced));
        assert_eq!(target.free(memory), Err(NotFree::NotQuiet(Memory::Fenced)));
        assert_eq!(target.open(NODE, name(2, 0, 1), Reach::Checked), Err(Refused::CutFirst(lane)));
        target.cut(lane);
        assert_eq!(target.free(memory), Ok(()));
        assert_eq!(target.free(memory), Err(NotFree::Stale));
    }

    #[test]
    fn a_frame_overtaken_by_its_cancel_is_discarded_and_later_ones_are_not() {
        let mut target = Target::new([Slot::EMPTY; 1], [Slot::EMPTY; 1]);
        let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
        let name = writer.dial(0);
        let lane = target.open(NODE, name, Reach::Checked).unwrap();
        writer.on_opened(name);
        let memory = target.reserve().unwrap();
        let early = writer.post(0, 1, 0).unwrap();
        let cancel = writer.cancel();
        let late = writer.post(0, 2, 0).unwrap();
        target.on_cancel(lane, cancel).unwrap();
        assert_eq!(target.admit(lane, &early, memory), Err(Discard::Cancelled));
        assert_eq!(target.admit(lane, &late, memory), Ok(()));
        writer.on_cancelled(name, cancel);
        assert!(writer.verdict(1, 0).is_quiet_there && !writer.verdict(2, 0).is_quiet_there);
    }

    #[test]
    fn a_slice_posted_twice_is_arrived_with_one_and_quiet_with_both() {
        let mut writer = Initiator::new(1, [Slot::EMPTY; 4]);
        let names = [writer.dial(0), writer.dial(1)];
        names.iter().for_each(|&name| writer.on_opened(name));
        let first = writer.post(0, 1, 0).unwrap();
        writer.post(1, 1, 0).unwrap();
        assert!(writer.on_ack(&first, Far::Done) && !writer.on_ack(&first, Far::Done));
        let verdict = writer.verdict(1, 0);
        assert!(verdict.is_arrived && !verdict.is_quiet_here && !verdict.is_quiet_there);
        assert_eq!(writer.end(1), Err(1));
        writer.on_lost(names[1]);
        assert_eq!((writer.verdict(1, 0).is_quiet_here, writer.verdict(1, 0).far), (true, Far::Done));
        assert_eq!(writer.end(1), Ok(()));
    }
}
