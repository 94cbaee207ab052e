//! The control queue pair of a link: messages in order, with credit, so that none finds the peer without a receive request.
//!
//! Each end posted [`WINDOW`] receive requests before it was connected and posts one anew for each message that it took. A
//! message says how many its sender has taken. The last place of the window is kept for [`Message::Credit`], so that two ends
//! whose windows are full still tell each other.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use super::endpoint::Endpoint;
use super::message::{MESSAGE_LEN_MAX, Message};
use super::verbs::{Completion, Operation, PostedSome, ReceiveRequest, SendRequest, Verbs};
use super::wire_id::{Id, Kind};

/// Messages on their way, at most.
pub(crate) const WINDOW: u32 = 64;
/// One of so many sends is signalled, so that the send queue is known to be free again.
const SIGNALLED_EVERY: u32 = 16;
/// Depth of its send queue: the window, and what is not yet known to be done.
pub(crate) const CONTROL_DEPTH: u32 = WINDOW + 2 * SIGNALLED_EVERY;

/// What is to be said, and how far saying got.
#[derive(Debug, Default)]
pub(crate) struct Control {
    queue: VecDeque<Message>,
    sent: u32,
    /// What the peer says it has taken.
    taken_there: u32,
    taken: u32,
    /// What the peer was told that we took.
    told: u32,
    scratch: Vec<u8>,
}

impl Control {
    /// Queues a message.
    pub(crate) fn say(&mut self, message: Message) {
        self.queue.push_back(message);
    }

    /// Queues a message before all others.
    pub(crate) fn say_first(&mut self, message: Message) {
        self.queue.push_front(message);
    }

    /// Whether nothing waits to be sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.queue.is_empty()
    }

    /// Number of the last message that was sent.
    pub(crate) fn last_sent(&self) -> u32 {
        self.sent.wrapping_sub(1)
    }

    /// Whether another ping would say anything: none is needed while messages that the peer did not take are on their way.
    pub(crate) fn may_ping(&self) -> bool {
        self.queue.is_empty() && self.sent.wrapping_sub(self.taken_there) < WINDOW / 2
    }

    /// Whether a message waits and the window admits it.
    pub(crate) fn can_send(&self) -> bool {
        !self.queue.is_empty() && self.sent.wrapping_sub(self.taken_there) < WINDOW - 1
    }

    /// Sends what the window admits. One doorbell for each message: they are rare.
    pub(crate) fn flush(&mut self, verbs: &dyn Verbs, endpoint: &Endpoint) -> Result<(), PostedSome> {
        // Bounded by the window.
        loop {
            let on_the_way = self.sent.wrapping_sub(self.taken_there);
            if on_the_way < WINDOW - 1
                && let Some(message) = self.queue.pop_front()
            {
                self.send(verbs, endpoint, &message)?;
            } else if on_the_way < WINDOW && self.taken.wrapping_sub(self.told) >= WINDOW / 2 {
                self.send(verbs, endpoint, &Message::Credit)?;
            } else {
                return Ok(());
            }
        }
    }

    /// Sends a message at once and out of turn, if there is room: the last one of a link.
    pub(crate) fn part(&mut self, verbs: &dyn Verbs, endpoint: &Endpoint) {
        self.queue.clear();
        if self.sent.wrapping_sub(self.taken_there) < WINDOW {
            // A goodbye that cannot be said is a link that is found dead.
            let _ = self.send(verbs, endpoint, &Message::Goodbye);
        }
    }

    fn send(&mut self, verbs: &dyn Verbs, endpoint: &Endpoint, message: &Message) -> Result<(), PostedSome> {
        message.write(self.taken, &mut self.scratch);
        let slot = self.sent % WINDOW;
        let local = endpoint.fill_send_slot(slot, &self.scratch);
        let must_signal = matches!(message, Message::Ping | Message::Goodbye);
        let request = SendRequest {
            id: Id::new(Kind::ControlSend, 0, 0, self.sent).bits(),
            operation: Operation::Send,
            local,
            len: u32::try_from(self.scratch.len()).expect("a message is short"),
            local_key: endpoint.local_key(),
            remote: 0,
            remote_key: 0,
            is_signalled: must_signal || self.sent % SIGNALLED_EVERY == SIGNALLED_EVERY - 1,
            is_inline: self.scratch.len() <= endpoint.control.inline_len_max as usize,
        };
        // SAFETY:
        // - the slot is registered under that key for as long as the endpoint lives, which destroys the queue pair first.
        // - nobody writes to it before the request is done: its last message was taken by the peer, as the window says.
        unsafe { verbs.post_send(endpoint.control.handle, core::slice::from_ref(&request)) }?;
        self.sent = self.sent.wrapping_add(1);
        self.told = self.taken;
        Ok(())
    }

    /// The message of a receive completion, after which its slot receives again. `None`: the peer broke the protocol.
    pub(crate) fn take(
        &mut self,
        verbs: &dyn Verbs,
        endpoint: &Endpoint,
        completion: &Completion,
        slot: u32,
    ) -> Option<Message> {
        let len = (completion.len as usize).min(MESSAGE_LEN_MAX);
        endpoint.copy_receive_slot(slot, len, &mut self.scratch);
        let (message, taken_there) = Message::parse(&self.scratch)?;
        let (advance, on_the_way) =
            (taken_there.wrapping_sub(self.taken_there), self.sent.wrapping_sub(self.taken_there));
        if advance > on_the_way {
            return None;
        }
        self.taken_there = taken_there;
        self.taken = self.taken.wrapping_add(1);
        // SAFETY: the slot is registered under its key for as long as the endpoint lives; it was just copied out.
        unsafe { verbs.post_receive(endpoint.control.handle, &[receive_request(endpoint, slot)]) }.ok()?;
        Some(message)
    }
}

/// The request that receives into a slot.
pub(crate) fn receive_request(endpoint: &Endpoint, slot: u32) -> ReceiveRequest {
    ReceiveRequest {
        id: Id::new(Kind::ControlReceive, 0, 0, slot).bits(),
        local: endpoint.receive_slot(slot),
        len: u32::try_from(MESSAGE_LEN_MAX).expect("short"),
        local_key: endpoint.local_key(),
    }
}
