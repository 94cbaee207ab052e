//! The bounded line in front of a router: so many requests run, so many wait in order, the next is told when to come back.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::channel::oneshot;
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

use super::request::Failure;

/// Weight of the newest service time in the running mean, as a divisor.
const MEAN_DIVISOR: u64 = 8;
/// What a request is taken to last until one has ended.
const SERVICE_GUESS: Duration = Duration::from_secs(1);

/// The line. Clones are handles of the same one.
///
/// ```
/// use millpond_core::time::Instant;
/// use millpond_node::router::{Line, LineLimits};
/// let line = Line::new(LineLimits { running_max: 1, waiting_max: 0 });
/// let first = futures::executor::block_on(line.enter()).unwrap();
/// assert!(futures::executor::block_on(line.enter()).is_err(), "full: an answer, not a wait");
/// first.leave(Instant::ZERO, Instant::ZERO);
/// assert!(futures::executor::block_on(line.enter()).is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct Line {
    limits: LineLimits,
    state: Arc<Mutex<State>>,
}

/// How many may run, and wait.
///
/// ```
/// assert_eq!(millpond_node::router::LineLimits::default().running_max, 256);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LineLimits {
    /// Requests served at a time.
    pub running_max: usize,
    /// Requests that wait for one of those to end.
    pub waiting_max: usize,
}

impl Default for LineLimits {
    fn default() -> Self {
        Self { running_max: 256, waiting_max: 1_024 }
    }
}

#[derive(Debug)]
struct State {
    running: usize,
    waiting: VecDeque<oneshot::Sender<Place>>,
    service_mean: Duration,
}

/// A place among the running ones; dropping it lets the next in.
///
/// Example: [`Line`].
#[derive(Debug)]
pub struct Place {
    line: Line,
}

impl Line {
    /// An empty line.
    #[must_use]
    pub fn new(limits: LineLimits) -> Self {
        let state = State { running: 0, waiting: VecDeque::new(), service_mean: SERVICE_GUESS };
        Self { limits, state: Arc::new(Mutex::new(state)) }
    }

    /// Waits for a place; first come, first served. Dropping the future gives up the wait.
    ///
    /// # Errors
    /// [`Failure::Busy`] at once if too many wait already, with a hint from how long requests lasted lately.
    pub async fn enter(&self) -> Result<Place, Failure> {
        let receiver = {
            let mut state = self.state.lock();
            if state.running < self.limits.running_max {
                state.running += 1;
                return Ok(Place { line: self.clone() });
            }
            state.waiting.retain(|waiter| !waiter.is_canceled());
            let waiting = state.waiting.len();
            if waiting >= self.limits.waiting_max {
                let rounds = u64::try_from(waiting / self.limits.running_max.max(1)).unwrap_or(u64::MAX);
                let retry_after = state.service_mean.saturating_mul(rounds.saturating_add(1));
                let reason = format!("{} requests run and {waiting} wait", state.running);
                return Err(Failure::Busy { reason, retry_after });
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back(sender);
            receiver
        };
        // The sender is dropped unsent only with the whole line.
        receiver
            .await
            .map_err(|_| Failure::Busy { reason: "the router is stopping".into(), retry_after: SERVICE_GUESS })
    }

    /// Requests that run, and that wait.
    #[must_use]
    pub fn lengths(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.running, state.waiting.iter().filter(|waiter| !waiter.is_canceled()).count())
    }
}

impl Place {
    /// Leaves and notes how long it took, for the hints of others.
    pub fn leave(self, began: Instant, now: Instant) {
        let mut state = self.line.state.lock();
        let mean = state.service_mean.as_nanos();
        let mean = mean - mean / MEAN_DIVISOR + now.since(began).as_nanos() / MEAN_DIVISOR;
        state.service_mean = Duration::from_nanos(mean);
        drop(state);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The place goes to the first who still waits; bounded by the line's length. A waiter that leaves at this very
        // moment hands it on by dropping it, outside the lock.
        let mut state = self.line.state.lock();
        while let Some(waiter) = state.waiting.pop_front() {
            if waiter.is_canceled() {
                continue;
            }
            drop(state);
            let place = Place { line: self.line.clone() };
            // Refused: the returned place is dropped here and goes to the next.
            drop(waiter.send(place));
            return;
        }
        state.running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use futures::executor::block_on;

    fn line(running_max: usize, waiting_max: usize) -> Line {
        Line::new(LineLimits { running_max, waiting_max })
    }

    #[test]
    fn places_go_to_those_who_wait_in_order() {
        let line = line(1, 2);
        let first = block_on(line.enter()).unwrap();
        let (mut second, mut third) = (Box::pin(line.enter()), Box::pin(line.enter()));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        assert_eq!(line.lengths(), (1, 2));
        drop(first);
        assert!(third.as_mut().now_or_never().is_none());
        let second = second.now_or_never().unwrap().unwrap();
        drop(second);
        drop(third.now_or_never().unwrap().unwrap());
        assert_eq!(line.lengths(), (0, 0));
    }

    #[test]
    fn who_gives_up_waiting_frees_the_place_in_the_line() {
        let line = line(1, 1);
        let first = block_on(line.enter()).unwrap();
        let mut second = Box::pin(line.enter());
        assert!(second.as_mut().now_or_never().is_none());
        drop(second);
        let mut third = Box::pin(line.enter());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.now_or_never().unwrap().is_ok());
        assert_eq!(line.lengths(), (0, 0));
    }

    #[test]
    fn the_hint_follows_how_long_requests_last() {
        let line = line(1, 0);
        for _ in 0..100 {
            let place = block_on(line.enter()).unwrap();
            place.leave(Instant::ZERO, Instant::ZERO + Duration::from_secs(8));
        }
        let _place = block_on(line.enter()).unwrap();
        match block_on(line.enter()) {
            Err(Failure::Busy { retry_after, .. }) => assert_eq!(retry_after.as_millis() / 500, 15, "{retry_after}"),
            other => panic!("{other:?}"),
        }
    }
}
