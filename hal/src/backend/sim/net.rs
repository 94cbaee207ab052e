//! The network between simulated devices: who sent what, and when it comes.

use core::fmt;
use std::collections::BTreeMap;
use std::sync::Arc;

use millpond_core::batch::{Capability, RegionId};
use millpond_core::random::Random;
use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::Credit;
use parking_lot::Mutex;

use crate::contract::{Connection, OwnConnection, PostedArrival, Refusal, RemoteRange, TicketId};

/// What goes wrong on a simulated network, and how slow it is.
///
/// ```
/// use millpond_core::time::Duration;
/// use millpond_hal::backend::sim::Faults;
/// let slow = Faults { delay_max: Duration::from_millis(5), ..Faults::default() };
/// assert_eq!(slow.loss_per_million, 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Shortest time on the way.
    pub delay_min: Duration,
    /// Longest time on the way.
    pub delay_max: Duration,
    /// Frames lost, of a million.
    pub loss_per_million: u32,
    /// Whether frames of one direction may overtake each other.
    pub order: Order,
    /// How long the death of an end goes unnoticed.
    pub death_notice: Duration,
    /// How long after its end a batch may be reported, at most.
    pub late_max: Duration,
    /// Ends of batches that are reported again somewhat later, of a million.
    pub doubled_per_million: u32,
}

/// Whether frames keep their order.
///
/// ```
/// use millpond_hal::backend::sim::{Faults, Order, SimNet};
/// let net = SimNet::new(7, Faults { order: Order::Free, ..Faults::default() }); // frames overtake each other
/// assert_eq!(net.lost(), 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As sent.
    Kept,
    /// As the delays come out. Proofs and what needs them may swap too.
    Free,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            delay_min: Duration::from_micros(5),
            delay_max: Duration::from_micros(50),
            loss_per_million: 0,
            order: Order::Kept,
            death_notice: Duration::from_millis(1),
            late_max: Duration::ZERO,
            doubled_per_million: 0,
        }
    }
}

/// A piece of the protocol on its way.
#[derive(Debug)]
pub(super) enum Frame {
    Prove {
        region: RegionId,
        capability: Capability,
    },
    Write {
        ticket: TicketId,
        index: usize,
        whole: RemoteRange,
        range: RemoteRange,
        data: Vec<u8>,
    },
    Read {
        ticket: TicketId,
        index: usize,
        whole: RemoteRange,
        range: RemoteRange,
        at: u64,
    },
    Arrive {
        ticket: TicketId,
        arrival: PostedArrival,
    },
    Cancel {
        ticket: TicketId,
    },
    Forget {
        ticket: TicketId,
    },
    /// `credit`: what the owner takes of this link in all, for requests for pieces.
    Reply {
        ticket: TicketId,
        reply: Reply,
        credit: Credit,
    },
    Goodbye,
}

/// An owner's answer. `Ok(false)`: discarded, since the batch was cancelled.
#[derive(Debug)]
pub(super) enum Reply {
    Piece { index: usize, applied: Result<bool, Refusal>, data: Option<(u64, Vec<u8>)> },
    Arrival(Result<bool, Refusal>),
    Cancelled,
}

impl Frame {
    /// What it takes of a turn's budget, in bytes.
    pub(super) fn cost(&self) -> u64 {
        let len = match self {
            Self::Write { data, .. } => data.len(),
            Self::Read { range, .. } => return range.len.max(1),
            Self::Reply { reply: Reply::Piece { data: Some((_, data)), .. }, .. } => data.len(),
            _ => 0,
        };
        (len as u64).max(1)
    }
}

#[derive(Debug, Default)]
struct Wire {
    /// By time of coming and number.
    frames: BTreeMap<(Instant, u64), Frame>,
    last_at: Instant,
    stalled: bool,
    /// Its reader or writer is gone.
    closed: bool,
    died_at: Option<Instant>,
}

struct State {
    random: Random,
    faults: Faults,
    sent: u64,
    lost: u64,
    /// The frame of that number is lost, whatever the chances.
    lose: Option<u64>,
    /// Wire `2 n` leads from the first end of pair n to the second, `2 n + 1` back.
    wires: Vec<Wire>,
}

/// A simulated network. Clones name the same one.
///
/// ```
/// use millpond_hal::backend::sim::{Faults, SimNet};
/// let net = SimNet::new(1, Faults::default());
/// let _ends = net.pair();
/// net.stall(0);
/// assert_eq!(net.sent(), 0);
/// ```
#[derive(Clone)]
pub struct SimNet(Arc<Mutex<State>>);

impl SimNet {
    /// A network without ends. The same seed gives the same delays and losses.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        let state = State {
            random: Random::new(seed ^ 0x9E37_79B9_7F4A_7C15),
            faults,
            sent: 0,
            lost: 0,
            lose: None,
            wires: Vec::new(),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Two connected ends: the connections of a link for two fabrics.
    #[must_use]
    pub fn pair(&self) -> (Connection, Connection) {
        let mut state = self.0.lock();
        let first = state.wires.len();
        state.wires.extend([Wire::default(), Wire::default()]);
        let port = |out, into| Connection::Own(Box::new(SimPort { net: self.clone(), out, into }));
        (port(first, first + 1), port(first + 1, first))
    }

    fn pair_wires(&self, pair: usize, change: impl Fn(&mut Wire)) {
        let mut state = self.0.lock();
        // A pair that does not exist has no wires to change.
        for wire in [2 * pair, 2 * pair + 1] {
            if let Some(wire) = state.wires.get_mut(wire) {
                change(wire);
            }
        }
    }

    /// From now on nothing arrives on that pair, in the order of [`SimNet::pair`], counted from 0; it is kept.
    pub fn stall(&self, pair: usize) {
        self.pair_wires(pair, |wire| wire.stalled = true);
    }

    /// What was kept back arrives.
    pub fn resume(&self, pair: usize) {
        self.pair_wires(pair, |wire| wire.stalled = false);
    }

    /// The second end of that pair dies: nothing it sent arrives, and the first end hears of it after the notice time.
    pub fn kill(&self, pair: usize, now: Instant) {
        self.pair_wires(pair, |wire| {
            wire.died_at = Some(now);
            wire.frames.clear();
        });
    }

    /// From now on the network behaves so.
    pub fn set_faults(&self, faults: Faults) {
        self.0.lock().faults = faults;
    }

    /// The frame that makes [`SimNet::sent`] this number is lost.
    pub fn lose(&self, number: u64) {
        self.0.lock().lose = Some(number);
    }

    /// Frames sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.0.lock().sent
    }

    /// Frames that are on their way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.0.lock().wires.iter().map(|wire| wire.frames.len()).sum()
    }

    /// Frames lost so far.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.0.lock().lost
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.lock();
        f.debug_struct("SimNet").field("sent", &state.sent).field("lost", &state.lost).finish_non_exhaustive()
    }
}

/// One end of a simulated pair, before a link is made of it.
///
/// Example: [`SimNet`].
#[derive(Debug)]
pub struct SimPort {
    net: SimNet,
    out: usize,
    into: usize,
}

impl OwnConnection for SimPort {
    fn into_any(self: Box<Self>) -> Box<dyn core::any::Any + Send> {
        self
    }
}

impl SimPort {
    pub(super) fn into_end(self) -> End {
        End { net: self.net, out: self.out, into: self.into }
    }
}

/// An end in use.
#[derive(Debug)]
pub(super) struct End {
    net: SimNet,
    out: usize,
    into: usize,
}

impl End {
    pub(super) fn send(&mut self, now: Instant, frame: Frame) {
        let mut state = self.net.0.lock();
        state.sent += 1;
        let (chance, spread) = (state.random.next_u64() % 1_000_000, state.random.next_u64());
        let faults = state.faults;
        let number = state.sent;
        if state.wires[self.out].closed || state.wires[self.out].died_at.is_some() {
            return;
        }
        if chance < u64::from(faults.loss_per_million) || state.lose == Some(number) {
            state.lost += 1;
            return;
        }
        let span = faults.delay_max.as_nanos().saturating_sub(faults.delay_min.as_nanos()).saturating_add(1);
        let mut at = now + faults.delay_min + Duration::from_nanos(spread % span);
        let wire = &mut state.wires[self.out];
        if faults.order == Order::Kept {
            at = at.max(wire.last_at);
        }
        wire.last_at = wire.last_at.max(at);
        wire.frames.insert((at, number), frame);
    }

    /// When a batch that ended now is reported.
    pub(super) fn report_at(&mut self, now: Instant) -> Instant {
        let mut state = self.net.0.lock();
        let late_max = state.faults.late_max.as_nanos();
        if late_max == 0 { now } else { now + Duration::from_nanos(state.random.next_u64() % (late_max + 1)) }
    }

    /// When the end of a batch is reported again; `None`: once is enough.
    pub(super) fn doubled_at(&mut self, now: Instant) -> Option<Instant> {
        let mut state = self.net.0.lock();
        let (chance, faults) = (state.faults.doubled_per_million, state.faults);
        if chance == 0 || state.random.next_u64() % 1_000_000 >= u64::from(chance) {
            return None;
        }
        let span = faults.delay_max.as_nanos().max(1);
        Some(now + Duration::from_nanos(state.random.next_u64() % span))
    }

    pub(super) fn receive(&mut self, now: Instant) -> Option<Frame> {
        let mut state = self.net.0.lock();
        let wire = &mut state.wires[self.into];
        if wire.stalled {
            return None;
        }
        let first = wire.frames.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(first.remove())
    }

    /// When the next frame comes.
    pub(super) fn next_at(&self) -> Option<Instant> {
        let state = self.net.0.lock();
        let wire = &state.wires[self.into];
        let notice = wire.died_at.map(|died_at| died_at + state.faults.death_notice);
        let next = wire.frames.keys().next().map(|key| key.0).filter(|_| !wire.stalled);
        [notice, next].into_iter().flatten().min()
    }

    pub(super) fn peer_is_dead(&self, now: Instant) -> bool {
        let state = self.net.0.lock();
        state.wires[self.into].died_at.is_some_and(|died_at| died_at + state.faults.death_notice <= now)
    }

    /// Nothing more is sent or received here.
    pub(super) fn close(&mut self) {
        let mut state = self.net.0.lock();
        state.wires[self.into].frames.clear();
        state.wires[self.into].closed = true;
        // What was sent, the goodbye above all, is still on its way.
        state.wires[self.out].closed = true;
    }
}
