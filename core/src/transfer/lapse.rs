//! Time in which nobody looked, although somebody meant to.
//!
//! A process can be stopped, or get no core, for longer than it waits for peers. When it goes on, what they did meanwhile
//! lies in buffers, and clocks would call them stalled before it was read. This only notices; [`Scheduler::on_stopped`]
//! makes good for it.
//!
//! [`Scheduler::on_stopped`]: super::Scheduler::on_stopped

use crate::time::{Duration, Instant};

/// Who looks less than this too late was only busy.
pub const LAPSE_MIN: Duration = Duration::from_millis(100);

/// When a driver looks next, at the latest, and whether it came to it.
///
/// ```
/// use millpond_core::time::{Duration, Instant};
/// use millpond_core::transfer::Lapse;
/// let at = |millis| Instant::ZERO + Duration::from_millis(millis);
/// let mut lapse = Lapse::new(at(0));
/// lapse.on_wait(at(500)); // it sleeps, on purpose
/// assert_eq!(lapse.on_look(at(501)), None);
/// assert_eq!(lapse.on_look(at(4_001)), Some(Duration::from_millis(3_500))); // it was awake, and then it was not
/// assert_eq!(lapse.on_look(at(3_800)), None); // another one, whose clock was read before
/// assert_eq!(lapse.on_look(at(4_002)), None);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Lapse {
    due: Instant,
    /// The latest look: several may look, and not in the order in which they read the clock.
    looked: Instant,
}

impl Lapse {
    /// Somebody looks at `now`.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { due: now, looked: now }
    }

    /// Somebody looks, and looks again at once unless [`Lapse::on_wait`] follows. For how long nobody did, if that was long.
    pub fn on_look(&mut self, now: Instant) -> Option<Duration> {
        let late = now.since(self.due.max(self.looked));
        self.looked = self.looked.max(now);
        self.due = self.looked;
        (late >= LAPSE_MIN).then_some(late)
    }

    /// Nobody looks before `until`, unless something happens.
    pub const fn on_wait(&mut self, until: Instant) {
        self.due = until;
    }
}
