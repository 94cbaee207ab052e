//! What handles outside the fabric's lock leave behind when they are dropped, and how they wake the fabric.

use core::sync::atomic::{AtomicBool, Ordering};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::RegionId;
use parking_lot::Mutex;

use crate::contract::TicketId;
use crate::region::OnRegionDrop;

/// A handle that is gone; the fabric reaps it in its next turn.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Dropped {
    Ticket(TicketId),
    Grant(RegionId),
    Region(RegionId),
}

#[derive(Debug)]
pub(crate) struct Shared {
    list: Mutex<Vec<Dropped>>,
    pending: AtomicBool,
    event: OwnedFd,
}

impl Shared {
    pub(super) fn new(event: OwnedFd) -> Self {
        Self { list: Mutex::default(), pending: AtomicBool::new(false), event }
    }

    /// Each handle is dropped once, so the list is bounded by the fabric's tables.
    pub(super) fn dropped(&self, what: Dropped) {
        self.list.lock().push(what);
        self.wake();
    }

    pub(super) fn wake(&self) {
        if !self.pending.swap(true, Ordering::SeqCst) {
            // A full counter is readable already, which is all that is wanted.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// Moves what was dropped since the last call into `into`.
    pub(super) fn drain(&self, into: &mut Vec<Dropped>) {
        if !self.pending.load(Ordering::Relaxed) {
            return;
        }
        // The event is cleared before the flag: a wake-up in between writes again, and is at worst one too many.
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        self.pending.store(false, Ordering::SeqCst);
        into.append(&mut self.list.lock());
    }

    pub(super) fn event(&self) -> &OwnedFd {
        &self.event
    }
}

impl OnRegionDrop for Shared {
    fn region_dropped(&self, region: RegionId) {
        self.dropped(Dropped::Region(region));
    }
}

/// Makes the fabric's descriptor readable from any thread.
#[derive(Clone, Debug)]
pub struct Waker(pub(super) Arc<Shared>);

impl Waker {
    /// Wakes whoever waits on the fabric's descriptor. A system call, unless one is due already.
    pub fn wake(&self) {
        self.0.wake();
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.event.as_fd()
    }
}
