//! One lane: a socket, its two halves, and the clocks that say whether it still lives.
//!
//! Invariants: a lane that ended touches its socket no more; its batches finish before its end is told.

use std::os::fd::{AsFd, OwnedFd};

use millpond_core::time::{Duration, Instant};
use millpond_core::transfer::Credit;
use millpond_core::wire::frame::{Frame, GoodbyeReason, HEADER_LEN, Proof};

use super::proof::{Guarded, Refused};
use super::receive::{Received, Receiver};
use super::socket;
use super::transmit::{Flushed, Style, Tools, Transmitter};
use super::wire::Wire;
use super::{LIVELY_TURNS, QUIET_TURNS, TcpOptions};
use crate::contract::{Inbound, LinkDownReason, LinkId, Post, TicketId};

/// What a lane begins with: write and read frames, and bytes of them. Part of the protocol.
pub(super) const INITIAL: Credit = Credit { bytes: 256 << 20, slices: 64 };

/// A lane.
pub(super) struct Lane {
    pub(super) link: LinkId,
    wire: Wire,
    generation: u64,
    pub(super) out: Transmitter,
    pub(super) into: Receiver,
    /// Batches posted and not finished.
    pub(super) tickets: Vec<TicketId>,
    pub(super) ended: Option<LinkDownReason>,
    /// The socket took less than it was given; it will become writable.
    pub(super) is_blocked: bool,
    /// The last turn left something to do at once.
    pub(super) has_more: bool,
    /// What the epoll set watches for: (readable, writable).
    pub(super) watched: (bool, bool),
    received_at: Instant,
    progress_at: Instant,
    /// When a batch of either side last moved on.
    used_at: Instant,
    /// It ends when nobody used it for long.
    retires: bool,
    ping_sent_at: Option<Instant>,
    /// That ping went before the first batch after the lane was idle.
    is_first_use: bool,
    /// Turns in a row in which nothing came or went.
    pub(super) quiet_turns: u32,
    seen: (u64, u64),
    asked: u64,
    ping_nonce: u64,
    /// Sending failed; what the peer said before is read first.
    broken: Option<LinkDownReason>,
    refused: Refused,
}

/// A lane that heard nothing for so long has to show at its next use that it is still there.
const IDLE_SPAN: Duration = Duration::from_millis(200);

impl Lane {
    pub(super) fn new(now: Instant, mut wire: Wire, style: Style, read_ahead: &[u8]) -> Option<Self> {
        socket::set_no_delay(wire.fd().as_fd());
        let has_more = !read_ahead.is_empty() || wire.has_unread();
        Some(Self {
            link: style.link,
            wire,
            generation: style.generation,
            out: Transmitter::new(style, INITIAL),
            into: Receiver::new(style, INITIAL, read_ahead)?,
            tickets: Vec::new(),
            ended: None,
            is_blocked: false,
            has_more,
            watched: (true, false),
            received_at: now,
            progress_at: now,
            used_at: now,
            retires: style.retires,
            ping_sent_at: None,
            is_first_use: false,
            quiet_turns: 0,
            seen: (0, 0),
            asked: 0,
            ping_nonce: 0,
            broken: None,
            refused: Refused::default(),
        })
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        self.wire.fd()
    }

    /// Whether something could be sent if the socket takes it.
    pub(super) fn has_work(&self, tools: &mut Tools) -> bool {
        self.wire.has_unsent() || self.out.has_work(&mut tools.tickets)
    }

    /// What the epoll set should watch for now.
    pub(super) fn wants(&self) -> (bool, bool) {
        (!self.out.is_clogged(), self.is_blocked)
    }

    /// Takes a batch and sends what the socket takes at once.
    pub(super) fn post(&mut self, now: Instant, budget: u64, lane_slot: u32, post: Post, tools: &mut Tools) {
        if self.tickets.is_empty() {
            // The wait begins now; what was idle before was not stuck.
            self.progress_at = now;
            // Somebody between may have forgotten the connection meanwhile, in silence.
            if now >= self.received_at + IDLE_SPAN && self.ping_sent_at.is_none() {
                self.ping(now);
                self.is_first_use = true;
            }
        }
        if self.is_first_use && post.arrival.is_some() {
            // Whether an arrival that was sent was counted is unknown once the lane is lost, and it is not sent twice: first
            // the peer shows that it is there.
            self.out.hold(true);
        }
        let id = post.ticket;
        tools.tickets.insert(lane_slot, post);
        self.tickets.push(id);
        self.out.queue(id);
        if !self.is_blocked {
            self.flush(budget, tools, None);
        }
    }

    /// Shows a capability before the next frame that needs it.
    pub(super) fn prove(&mut self, proof: Proof) {
        let generation = self.generation;
        self.out.answer(&Frame::Prove { generation, proofs: &[proof] });
        // It leaves with that frame; alone it is in no hurry.
    }

    /// Stops a batch: what was not sent is not sent. True if it is over already; else the peer was asked.
    pub(super) fn cancel(&mut self, id: TicketId, tools: &mut Tools) -> bool {
        self.out.drop_queued(id, &mut tools.tickets);
        let generation = self.generation;
        let Some(ticket) = tools.tickets.get(id) else { return false };
        if ticket.is_cancelled() {
            return false;
        }
        ticket.cancel();
        if ticket.is_over() {
            return true;
        }
        let tag = ticket.tag(generation, 0);
        self.out.answer(&Frame::Cancel { tag });
        self.has_more = true;
        false
    }

    /// Forgets batches that are over.
    pub(super) fn forget_finished(&mut self, tools: &mut Tools) {
        self.tickets.retain(|id| tools.tickets.get(*id).is_some());
    }

    /// Whether the socket is to be asked in this turn, which counts.
    pub(super) fn is_due(&mut self) -> bool {
        self.quiet_turns = self.quiet_turns.saturating_add(1);
        let is_lively = self.quiet_turns <= LIVELY_TURNS || self.is_waited_for();
        is_lively || self.quiet_turns.is_multiple_of(QUIET_TURNS)
    }

    /// Receives, acts, sends. Says whether anything moved.
    pub(super) fn turn(&mut self, now: Instant, budget: u64, tools: &mut Tools, inbound: &mut dyn Inbound) -> bool {
        self.has_more = false;
        let mut refused = core::mem::take(&mut self.refused);
        let moved = self.guarded_turn(now, budget, tools, &mut Guarded { inbound, refused: &mut refused });
        self.refused = refused;
        moved
    }

    fn guarded_turn(&mut self, now: Instant, budget: u64, tools: &mut Tools, inbound: &mut dyn Inbound) -> bool {
        let received = self.into.turn(&mut self.wire, budget, tools, &mut self.out, inbound);
        self.into.grant(tools.share, &mut self.out);
        match (received, self.broken) {
            (Received::All, Some(reason)) => self.end(reason),
            (Received::All, None) => {}
            (Received::More, _) => self.has_more = true,
            (Received::Ended(reason), _) => self.end(reason),
        }
        if self.ended.is_some() {
            return true;
        }
        if self.into.received_len != self.seen.0 {
            self.out.hold(false);
        }
        if self.has_work(tools) {
            self.flush(budget, tools, Some(inbound));
        }
        if self.into.finished > 0 {
            self.into.finished = 0;
            self.forget_finished(tools);
        }
        let seen = (self.into.received_len, self.into.progress + self.out.sent_len);
        let moved = seen != self.seen;
        if moved {
            self.quiet_turns = 0;
        }
        if seen.0 != self.seen.0 {
            self.received_at = now;
            self.ping_sent_at = None;
            self.is_first_use = false;
        }
        if seen.1 != self.seen.1 {
            self.progress_at = now;
        }
        let asked = self.into.asked();
        if seen.1 != self.seen.1 || asked != self.asked || !self.is_idle() {
            self.used_at = now;
        }
        self.asked = asked;
        self.seen = seen;
        moved
    }

    fn flush(&mut self, budget: u64, tools: &mut Tools, inbound: Option<&mut dyn Inbound>) {
        let was_clogged = self.out.is_clogged();
        let flushed = match self.wire.flush() {
            Ok(true) => self.out.flush(&mut self.wire, budget, tools, inbound),
            Ok(false) => Flushed::Blocked,
            Err(reason) => Flushed::Broken(reason),
        };
        self.is_blocked = flushed == Flushed::Blocked || self.wire.has_unsent();
        match flushed {
            Flushed::All | Flushed::Blocked => {}
            Flushed::More => self.has_more = true,
            // What the peer said last may still be unread: let the receiver end the lane.
            Flushed::Broken(reason) => {
                self.broken = Some(reason);
                self.has_more = true;
            }
        }
        // Bytes left in the buffer while it was clogged are announced by nobody.
        let has_unread = self.into.has_unread() || self.wire.has_unread();
        self.has_more |= was_clogged && !self.out.is_clogged() && has_unread;
    }

    /// The lane is over; the first reason counts.
    pub(super) fn end(&mut self, reason: LinkDownReason) {
        self.ended.get_or_insert(reason);
    }

    /// Says goodbye if the stream is between frames and the socket takes it at once.
    pub(super) fn say_goodbye(&mut self, tools: &mut Tools) {
        let reason = match self.ended {
            Some(LinkDownReason::Violation(_)) => GoodbyeReason::Violation,
            Some(LinkDownReason::Stalled) => GoodbyeReason::Stalled,
            Some(LinkDownReason::Superseded) => GoodbyeReason::Replaced,
            Some(LinkDownReason::Closed) => GoodbyeReason::Draining,
            Some(LinkDownReason::Idle) => GoodbyeReason::Idle,
            _ => return,
        };
        if !self.out.is_mid_frame() {
            let mut bytes = [0; HEADER_LEN];
            let frame = Frame::Goodbye { generation: self.generation, reason };
            if frame.encode(&mut bytes).is_ok() {
                self.wire.send_bytes(&bytes, &mut tools.vectors);
            }
        }
        let _ = rustix::net::shutdown(self.wire.fd(), rustix::net::Shutdown::Write);
    }

    /// When the clocks must be looked at again.
    pub(super) fn next_timer(&self, options: &TcpOptions) -> Instant {
        let keepalive = match self.ping_sent_at {
            Some(sent_at) => sent_at + self.pong_within(options),
            None => self.received_at + self.ping_after(options),
        };
        if self.is_waited_for() {
            return keepalive.min(self.progress_at + options.progress_deadline);
        }
        if self.retires { keepalive.min(self.used_at + options.idle_span_max) } else { keepalive }
    }

    /// No batch is under way, of ours or of the peer.
    fn is_idle(&self) -> bool {
        self.tickets.is_empty() && self.into.has_answered(&self.out)
    }

    /// Somebody here waits for the peer.
    fn is_waited_for(&self) -> bool {
        !self.tickets.is_empty()
    }

    fn pong_within(&self, options: &TcpOptions) -> Duration {
        if self.is_first_use { options.first_answer } else { options.progress_deadline }
    }

    fn ping(&mut self, now: Instant) {
        self.ping_nonce += 1;
        let (generation, nonce) = (self.generation, self.ping_nonce);
        self.out.answer(&Frame::Ping { generation, nonce });
        self.ping_sent_at = Some(now);
    }

    /// In the middle of a frame of the peer silence is suspicious sooner.
    fn ping_after(&self, options: &TcpOptions) -> Duration {
        if self.into.is_mid_frame() { options.progress_deadline } else { options.keepalive }
    }

    /// Looks at the clocks: sends a ping, or ends the lane.
    pub(super) fn on_time(&mut self, now: Instant, options: &TcpOptions) {
        if self.is_waited_for() && now >= self.progress_at + options.progress_deadline {
            return self.end(LinkDownReason::Stalled);
        }
        if self.retires && self.is_idle() && now >= self.used_at + options.idle_span_max {
            return self.end(LinkDownReason::Idle);
        }
        match self.ping_sent_at {
            Some(sent_at) if now >= sent_at + self.pong_within(options) => self.end(LinkDownReason::Stalled),
            None if now >= self.received_at + self.ping_after(options) => {
                self.ping(now);
                self.has_more = true;
            }
            _ => {}
        }
    }
}
