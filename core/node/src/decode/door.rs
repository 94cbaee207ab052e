//! The door of a decode node: a prompt that was computed for it joins, waits or is refused, by what steps take now.
//!
//! The router decided on a forecast; this is the double check with the node's own measurements. A prompt joins if the step
//! with it would stay within the deadlines between tokens of all who are there and its own. Otherwise it is held, its first
//! token not yet sent, or refused, as the node's admission says (`core::sched::admission`). Whoever names no deadline
//! joins. Before a step was measured nobody is refused: nothing is known.
//!
//! Invariant: a request counts from the moment it is let in until its [`Place`] is dropped, wherever it ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};

use millpond_core::sched::admission::{self, Admission, Arrival, Ask};
use millpond_core::sched::cost::{Decode, Profile};
use millpond_core::sched::placement::DecodeView;
use millpond_core::seeded::{self, Bug};
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

use crate::metrics::{Counter, Gauge, Registry};

/// Steps over which the pace is taken.
const MEMORY: f64 = 16.0;

/// The door. Share it by `Arc`.
pub(super) struct Door {
    state: Mutex<State>,
    held: Gauge,
    refused: Counter,
}

struct State {
    admission: Admission,
    /// Those who were let in and did not leave.
    seats: BTreeMap<u64, Arc<Seat>>,
    /// Those who are held, in the order in which they are let in.
    waiting: BTreeSet<Rank>,
    next: u64,
    /// Measured seconds of steps over those of the default profile; `None` before the first.
    pace: Option<f64>,
    stepped: Instant,
    /// Counts what can change an answer: a step was measured, somebody left, whoever was before goes away.
    version: u64,
    /// Those who are to ask again when it does.
    wakers: Vec<Waker>,
}

/// Higher priority first, then who came first.
type Rank = (Reverse<u8>, u64);

struct Seat {
    /// Of its context.
    tokens: AtomicU64,
    tbt: Duration,
}

/// A place in the batch of a node.
pub(super) struct Place {
    door: Arc<Door>,
    number: u64,
    seat: Arc<Seat>,
    prompt: u64,
}

/// Somebody before the door; dropping it goes away.
pub(super) struct Caller {
    door: Arc<Door>,
    ask: Ask,
    at: Arrival,
    rank: Rank,
}

/// What a caller hears.
pub(super) enum Answer {
    Join(Place),
    /// Ask again when [`Caller::changed`] of this version says so, and then at the latest.
    Hold(Instant, u64),
    Refuse,
}

impl Door {
    pub(super) fn new(options: admission::Options, registry: &Registry) -> Arc<Self> {
        let state = State {
            admission: Admission::new(options),
            seats: BTreeMap::new(),
            waiting: BTreeSet::new(),
            next: 0,
            pace: None,
            stepped: Instant::ZERO,
            version: 0,
            wakers: Vec::new(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            held: registry.gauge("millpond_decode_held", "Prompts that are computed and wait for a place.", &[]),
            refused: registry.counter(
                "millpond_decode_refused_late_total",
                "Prompts that were computed and found no place in time.",
                &[],
            ),
        })
    }

    /// A step over so many requests with so much context took so long.
    pub(super) fn on_step(&self, now: Instant, batch: usize, context: u64, took: Duration) {
        let base = Profile::default().decode.seconds(u32::try_from(batch).unwrap_or(u32::MAX), context);
        let mut state = self.state.lock();
        let ratio = took.as_secs_f64() / base;
        state.pace = Some(state.pace.map_or(ratio, |pace| pace + (ratio - pace) / MEMORY));
        state.stepped = now;
        state.changed();
    }

    /// A prompt is computed; `ask` has its deadlines.
    pub(super) fn call(self: &Arc<Self>, ask: Ask, arrived: Instant, prefilled: Instant) -> Caller {
        let mut state = self.state.lock();
        let rank = (Reverse(ask.priority), state.next);
        state.next += 1;
        state.waiting.insert(rank);
        self.held.set(state.waiting.len() as u64);
        drop(state);
        let at = Arrival { arrived, prefilled, tbt: Duration::MAX };
        Caller { door: Arc::clone(self), ask, at, rank }
    }
}

impl State {
    /// The answer to whoever is held may be another one now.
    fn changed(&mut self) {
        self.version += 1;
        if !seeded::on(Bug::DoorWakesNobody) {
            self.wakers.drain(..).for_each(Waker::wake);
        }
    }

    fn view(&self) -> DecodeView {
        let context = self.seats.values().map(|seat| seat.tokens.load(Ordering::Relaxed)).sum();
        DecodeView { down: false, batch: u32::try_from(self.seats.len()).unwrap_or(u32::MAX), context }
    }

    /// The default profile at the pace that was measured. A node that is out of pages pauses requests: it is never full.
    fn profile(&self, pace: f64) -> Profile {
        let mut profile = Profile::default();
        let Decode { fixed, per_request, per_token } = profile.decode;
        let [fixed, per_request, per_token] = [fixed, per_request, per_token].map(|seconds| seconds * pace);
        profile.decode = Decode { fixed, per_request, per_token };
        profile.decode_tokens_max = u64::MAX >> 1;
        profile
    }

    /// Whether the first of those who wait joins.
    fn judge(&self, ask: &Ask, at: Arrival) -> admission::Door {
        let Some(pace) = self.pace.filter(|_| ask.slo.tbt < Duration::MAX) else { return admission::Door::Join };
        let others = self.seats.values().filter(|_| !seeded::on(Bug::DoorForgetsOthers));
        let tbt = others.map(|seat| seat.tbt).fold(Duration::MAX, Duration::min);
        self.admission.at_door(ask, Arrival { tbt, ..at }, self.view(), &self.profile(pace))
    }
}

impl Caller {
    /// Whether there is a place now.
    pub(super) fn ask(&self, now: Instant) -> Answer {
        let mut state = self.door.state.lock();
        let is_first = state.waiting.first() == Some(&self.rank) || seeded::on(Bug::DoorForgetsOrder);
        // Who comes first goes first, unless others may not wait at all.
        let verdict = match state.judge(&self.ask, self.at) {
            admission::Door::Join if !is_first => admission::Door::Hold(state.admission.patience(&self.ask, self.at)),
            verdict => verdict,
        };
        match verdict {
            admission::Door::Join => {
                let prompt = u64::from(self.ask.tokens);
                let seat = Arc::new(Seat { tokens: AtomicU64::new(prompt), tbt: self.ask.slo.tbt });
                state.seats.insert(self.rank.1, Arc::clone(&seat));
                Answer::Join(Place { door: Arc::clone(&self.door), number: self.rank.1, seat, prompt })
            }
            admission::Door::Hold(until) if now < until || seeded::on(Bug::DoorHoldsForGood) => {
                Answer::Hold(until, state.version)
            }
            admission::Door::Hold(_) | admission::Door::Refuse => {
                self.door.refused.add(1);
                Answer::Refuse
            }
        }
    }

    /// Done once an answer of `version` may be another one.
    pub(super) fn changed(&self, version: u64) -> impl Future<Output = ()> + Send + '_ {
        std::future::poll_fn(move |context| {
            let mut state = self.door.state.lock();
            if state.version != version {
                return Poll::Ready(());
            }
            state.wakers.push(context.waker().clone());
            Poll::Pending
        })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let mut state = self.door.state.lock();
        state.waiting.remove(&self.rank);
        state.changed();
        self.door.held.set(state.waiting.len() as u64);
    }
}

impl Place {
    /// It has one token more.
    pub(super) fn grow(&self) {
        self.seat.tokens.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.door.state.lock();
        if !seeded::on(Bug::DoorKeepsSeats) {
            state.seats.remove(&self.number);
        }
        let tokens = self.seat.tokens.load(Ordering::Relaxed).saturating_sub(self.prompt);
        let (now, tokens) = (state.stepped, u32::try_from(tokens).unwrap_or(u32::MAX));
        // How long it took decides nothing here.
        state.admission.on_ended(now, tokens, None, Duration::ZERO);
        state.changed();
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use millpond_core::sched::admission::{Options, Policy, Slo};

    use super::*;

    fn door(policy: Policy) -> (Arc<Door>, Registry) {
        let (mut options, registry) = (Options::default(), Registry::new());
        (options.policy, options.hold) = (policy, Duration::from_secs(2));
        (Door::new(options, &registry), registry)
    }

    fn at(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    /// A prompt of 1,000 tokens that bears `tbt` milliseconds between tokens; 0: any time.
    fn call(door: &Arc<Door>, tbt: u64, priority: u8) -> Caller {
        let tbt = if tbt == 0 { Duration::MAX } else { Duration::from_millis(tbt) };
        let slo = Slo { ttft: Duration::from_secs(30), tbt };
        door.call(Ask { tokens: 1_000, slo, priority, ..Ask::default() }, at(0), at(100))
    }

    fn joins(caller: &Caller, now: Instant) -> Place {
        let Answer::Join(place) = caller.ask(now) else { panic!("it does not join") };
        place
    }

    /// Two are there and a step takes 32 ms, as in the profile.
    fn two_are_there(door: &Arc<Door>) -> Vec<Place> {
        let places = (0..2).map(|_| joins(&call(door, 40, 0), at(0))).collect();
        door.on_step(at(0), 2, 2_000, Duration::from_secs_f64(Profile::default().decode.seconds(2, 2_000)));
        places
    }

    trait Seconds {
        fn from_secs_f64(seconds: f64) -> Duration;
    }

    impl Seconds for Duration {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // floats saturate
        fn from_secs_f64(seconds: f64) -> Duration {
            Duration::from_nanos((seconds * 1e9) as u64)
        }
    }

    #[test]
    fn who_would_slow_down_the_batch_too_much_is_refused_where_nobody_is_held() {
        let (door, registry) = door(Policy::Late);
        let mut places = two_are_there(&door);
        // A third makes it 35 ms, a fourth 38, a fifth 41: one more than those who are there bear.
        places.extend((0..2).map(|_| joins(&call(&door, 100, 0), at(1))));
        assert!(matches!(call(&door, 100, 0).ask(at(1)), Answer::Refuse));
        assert!(registry.text().contains("millpond_decode_refused_late_total 1\n"));
        places.pop();
        places.push(joins(&call(&door, 40, 0), at(2)));
        assert!(matches!(call(&door, 30, 0).ask(at(2)), Answer::Refuse), "its own deadline counts too");
        drop(places);
        joins(&call(&door, 30, 0), at(3));
    }

    #[test]
    fn who_is_held_joins_when_there_is_room_and_is_refused_when_its_time_is_up() {
        let (door, registry) = door(Policy::Millpond);
        let mut places = two_are_there(&door);
        places.push(joins(&call(&door, 100, 0), at(1)));
        places.push(joins(&call(&door, 100, 0), at(1)));
        let first = call(&door, 100, 0);
        // Two seconds after its prompt was computed.
        assert!(matches!(first.ask(at(1)), Answer::Hold(until, _) if until == at(2_100)));
        let urgent = call(&door, 100, 5);
        assert!(registry.text().contains("millpond_decode_held 2\n"));
        places.pop();
        assert!(matches!(first.ask(at(500)), Answer::Hold(..)), "somebody goes before it");
        places.push(joins(&urgent, at(500)));
        drop(urgent);
        assert!(matches!(first.ask(at(2_099)), Answer::Hold(..)));
        assert!(matches!(first.ask(at(2_100)), Answer::Refuse));
        drop(first);
        assert!(registry.text().contains("millpond_decode_held 0\n"));
    }

    #[test]
    fn whoever_names_no_deadline_joins_and_so_does_everybody_before_a_step_was_measured() {
        let (door, _) = door(Policy::Late);
        let mut places: Vec<Place> = (0..50).map(|_| joins(&call(&door, 1, 0), at(0))).collect();
        door.on_step(at(0), 50, 50_000, Duration::from_millis(500));
        assert!(matches!(call(&door, 1, 0).ask(at(0)), Answer::Refuse));
        places.push(joins(&call(&door, 0, 0), at(0)));
        let (open, _) = self::door(Policy::None);
        open.on_step(at(0), 50, 50_000, Duration::from_secs(5));
        joins(&call(&open, 1, 0), at(0));
    }

    #[test]
    fn whoever_is_held_is_woken_by_a_step_by_one_who_leaves_and_by_one_who_gives_up() {
        let (door, _) = door(Policy::Millpond);
        let mut places = two_are_there(&door);
        places.extend((0..2).map(|_| joins(&call(&door, 100, 0), at(1))));
        let (urgent, held) = (call(&door, 100, 5), call(&door, 100, 0));
        let version = || match held.ask(at(2)) {
            Answer::Hold(_, version) => version,
            Answer::Join(_) | Answer::Refuse => panic!("it is not held"),
        };
        let mut step = || door.on_step(at(3), 4, 4_000, Duration::from_millis(38));
        let wakes = |happens: &mut dyn FnMut()| {
            let (count, waker) = counting_waker();
            let (mut changed, mut context) = (Box::pin(held.changed(version())), Context::from_waker(&waker));
            assert!(changed.as_mut().poll(&mut context).is_pending(), "nothing changed yet");
            happens();
            assert!(changed.as_mut().poll(&mut context).is_ready());
            count.load(Ordering::Relaxed)
        };
        assert_eq!(wakes(&mut step), 1);
        let mut urgent = Some(urgent);
        assert_eq!(wakes(&mut || drop(urgent.take())), 1);
        // What happened between the answer and the wait is no reason to wait.
        let before = version();
        step();
        assert!(Box::pin(held.changed(before)).as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
        assert_eq!(wakes(&mut || drop(places.pop())), 1);
    }

    /// A waker that counts how often it is woken.
    fn counting_waker() -> (Arc<AtomicU64>, Waker) {
        struct Count(Arc<AtomicU64>);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let count = Arc::new(AtomicU64::new(0));
        (Arc::clone(&count), Arc::new(Count(count)).into())
    }

    #[test]
    fn each_of_these_tests_finds_the_bug_it_is_there_for() {
        let tests: [(Bug, fn()); 5] = [
            (Bug::DoorForgetsOrder, who_is_held_joins_when_there_is_room_and_is_refused_when_its_time_is_up),
            (Bug::DoorHoldsForGood, who_is_held_joins_when_there_is_room_and_is_refused_when_its_time_is_up),
            (Bug::DoorKeepsSeats, who_would_slow_down_the_batch_too_much_is_refused_where_nobody_is_held),
            (Bug::DoorForgetsOthers, who_would_slow_down_the_batch_too_much_is_refused_where_nobody_is_held),
            (Bug::DoorWakesNobody, whoever_is_held_is_woken_by_a_step_by_one_who_leaves_and_by_one_who_gives_up),
        ];
        for (bug, test) in tests {
            seeded::select(Some(bug));
            let outcome = std::panic::catch_unwind(test);
            seeded::select(None);
            assert!(outcome.is_err(), "{bug:?} was not found");
        }
    }

    #[test]
    fn what_is_generated_counts() {
        let (door, _) = door(Policy::Late);
        let places = two_are_there(&door);
        // 36 ns a token: 200,000 more make it 7.2 ms longer.
        (0..200_000).for_each(|_| places[0].grow());
        assert!(matches!(call(&door, 40, 0).ask(at(1)), Answer::Refuse));
    }
}
