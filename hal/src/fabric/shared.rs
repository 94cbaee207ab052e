//! What handles outside the fabric's lock leave behind when they are dropped, and how they wake the fabric.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use millpond_core::batch::RegionId;

use crate::contract::TicketId;
use crate::region::OnRegionDrop;
use crate::sync::Mailbox;

/// A handle that is gone; the fabric reaps it in its next turn.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Dropped {
    Ticket(TicketId),
    Grant(RegionId),
    Region(RegionId),
}

#[derive(Debug)]
pub(crate) struct Shared {
    mailbox: Mailbox<Dropped>,
    event: OwnedFd,
}

impl Shared {
    pub(super) fn new(event: OwnedFd) -> Self {
        Self { mailbox: Mailbox::default(), event }
    }

    /// Each handle is dropped once, so the mailbox is bounded by the fabric's tables.
    pub(super) fn dropped(&self, what: Dropped) {
        if self.mailbox.push(what) {
            self.signal();
        }
    }

    pub(super) fn wake(&self) {
        if self.mailbox.call() {
            self.signal();
        }
    }

    fn signal(&self) {
        // A full counter is readable already, which is all that is wanted.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub(super) fn is_pending(&self) -> bool {
        self.mailbox.is_pending()
    }

    /// Moves what was dropped since the last call into `into`.
    pub(super) fn drain(&self, into: &mut Vec<Dropped>) {
        self.mailbox.take(into, || {
            // An event that somebody else read already is as good.
            let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        });
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
///
/// ```
/// use millpond_core::time::Instant;
/// use millpond_hal::fabric::{Fabric, FabricOptions, FabricWake};
/// let mut fabric = Fabric::new(FabricOptions::new([0; 32])).unwrap();
/// let waker = fabric.waker();
/// std::thread::spawn(move || waker.wake()).join().unwrap();
/// assert!(matches!(fabric.arm(Instant::ZERO), FabricWake::Now));
/// ```
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
