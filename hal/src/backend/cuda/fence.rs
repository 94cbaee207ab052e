//! A point in somebody's stream: an event that was recorded there.

use core::sync::atomic::{AtomicBool, Ordering};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use super::driver::{Driver, Event, Stream};
use crate::contract::{Fence, FenceState};

/// What `Cuda::fence` makes. The stream that it was recorded in gets nothing else: who wants to hear of it waits in a stream
/// of the fence's own.
#[derive(Debug)]
pub(super) struct StreamFence {
    driver: Arc<Driver>,
    event: Event,
    gate: OnceLock<Option<Stream>>,
    is_announced: AtomicBool,
}

impl StreamFence {
    pub(super) fn new(driver: Arc<Driver>, event: Event) -> Self {
        Self { driver, event, gate: OnceLock::new(), is_announced: AtomicBool::new(false) }
    }
}

impl Fence for StreamFence {
    fn state(&self) -> FenceState {
        match self.event.has_happened() {
            Ok(true) => FenceState::Passed,
            Ok(false) => FenceState::Pending,
            Err(_) => FenceState::Failed,
        }
    }

    fn notify(&self, wake: &Arc<OwnedFd>) -> bool {
        if self.is_announced.swap(true, Ordering::Relaxed) {
            return true;
        }
        let gate = self.gate.get_or_init(|| self.driver.stream(self.event.ordinal()).ok());
        gate.as_ref().is_some_and(|gate| gate.wait_for(&self.event).and_then(|()| gate.notify(wake)).is_ok())
    }
}
