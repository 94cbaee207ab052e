//! Wakes everybody who waits for a change.

use std::future::{Future, poll_fn};
use std::task::{Poll, Waker};

use parking_lot::Mutex;

/// A count of changes that can be waited on. Waiters are woken at each change; none is missed.
#[derive(Debug, Default)]
pub(crate) struct Signal(Mutex<(u64, Vec<Waker>)>);

impl Signal {
    /// Something changed.
    pub(crate) fn notify(&self) {
        let waiters = {
            let mut state = self.0.lock();
            state.0 += 1;
            std::mem::take(&mut state.1)
        };
        waiters.into_iter().for_each(Waker::wake);
    }

    /// Changes so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.lock().0
    }

    /// Completes once there were more than `seen` changes.
    pub(crate) fn changed(&self, seen: u64) -> impl Future<Output = ()> + Send + '_ {
        poll_fn(move |context| {
            let mut state = self.0.lock();
            if state.0 > seen {
                return Poll::Ready(());
            }
            if !state.1.iter().any(|waker| waker.will_wake(context.waker())) {
                state.1.push(context.waker().clone());
            }
            Poll::Pending
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_before_the_wait_is_not_missed() {
        let signal = Signal::default();
        let seen = signal.count();
        signal.notify();
        futures::executor::block_on(signal.changed(seen));
        assert_eq!(signal.count(), seen + 1);
    }
}
