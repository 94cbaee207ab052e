//! What happens in a run, and when; and what must hold in its end.

use std::fmt;
use std::sync::Arc;

use futures::future::pending;
use millpond_core::time::{Duration, Instant};
use millpond_hal::backend::sim::{Faults, Order};
use millpond_node::engine::Window;
use millpond_node::runtime::Runtime;
use parking_lot::Mutex;

use crate::actor::{Actor, Plan, Stage};
use crate::shore::Shore;
use crate::virtual_time::Random;
use crate::world::{PROGRESS_DEADLINE, World, address};

/// The node that all others write to and read from.
const RECEIVER: usize = 0;
/// Disturbances go on for so long, then everything heals.
const TROUBLE: Duration = Duration::from_millis(1500);
/// Polls of a whole run, at most.
const STEPS_MAX: u64 = 2_000_000;
/// By then all that was under way has ended.
const HEALED: Duration = Duration::from_secs(60);

/// Which things happen again and again in a run.
///
/// Example: the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mix {
    /// Nothing.
    Calm,
    /// Nothing, over windows of one slice.
    Narrow,
    /// One frame in a hundred is lost.
    Lossy,
    /// Frames overtake each other, and some are slow.
    Reordered,
    /// Completions come late, and twice.
    Late,
    /// Connections stand still for a while, and dials fail.
    Stalls,
    /// Nodes stand still for a while.
    Freezes,
    /// The receiver dies and is back under the same name.
    Restarts,
    /// Senders die and are back under the same name.
    SenderRestarts,
    /// Sixteen senders write into one receiver.
    Many,
    /// All of that.
    Everything,
}

impl Mix {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Calm,
        Self::Narrow,
        Self::Lossy,
        Self::Reordered,
        Self::Late,
        Self::Stalls,
        Self::Freezes,
        Self::Restarts,
        Self::SenderRestarts,
        Self::Many,
        Self::Everything,
    ];

    fn faults(self) -> Faults {
        let mut faults = Faults::default();
        if matches!(self, Self::Lossy | Self::Everything) {
            faults.loss_per_million = 10_000;
        }
        if matches!(self, Self::Reordered) {
            faults.order = Order::Free;
        }
        if matches!(self, Self::Reordered | Self::Stalls | Self::Everything) {
            faults.delay_max = Duration::from_millis(2);
        }
        if matches!(self, Self::Late | Self::Everything) {
            (faults.late_max, faults.doubled_per_million) = (Duration::from_millis(3), 300_000);
        }
        faults
    }
}

/// Something that happens once, at a point of the run that is counted.
///
/// ```
/// use millpond_verify_sim::{Disturbance, Mix, Scenario, run};
/// let mut scenario = Scenario::new(Mix::Calm, 1);
/// scenario.once = Some(Disturbance::Cancel(40));
/// run(&scenario).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disturbance {
    /// The frame of that number is lost.
    Lose(u64),
    /// At that step everything under way is cancelled.
    Cancel(u64),
    /// At that step the receiver dies for good.
    Death(u64),
    /// At that step the receiver dies, and is back at once.
    Restart(u64),
    /// At that step all connections stand still until it heals.
    Stall(u64),
}

/// A run, whole.
///
/// Example: the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Scenario {
    /// What goes wrong.
    pub mix: Mix,
    /// Draws everything else.
    pub seed: u64,
    /// And that, once.
    pub once: Option<Disturbance>,
    /// Transfers of each actor.
    pub transfers: u32,
}

impl Scenario {
    /// That mix under that seed.
    #[must_use]
    pub const fn new(mix: Mix, seed: u64) -> Self {
        Self { mix, seed, once: None, transfers: 8 }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mix, seed, once, transfers } = self;
        write!(f, "mix {mix:?}, seed {seed}, {transfers} transfers, {once:?}")
    }
}

/// What came of a run.
///
/// Example: the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// How often a task was polled until all transfers had ended.
    pub steps: u64,
    /// Frames on the network until then.
    pub frames: u64,
    /// Transfers of which everything was done.
    pub done: u64,
    /// The others.
    pub failed: u64,
    /// A hash of when each transfer ended, and how.
    pub trace: u64,
}

/// Runs a scenario from its start to after its end.
///
/// # Errors
/// What did not hold.
pub fn run(scenario: &Scenario) -> Result<Summary, String> {
    let mut play = Play::new(*scenario);
    play.trouble()?;
    play.end()
}

struct Play {
    scenario: Scenario,
    world: World,
    stage: Arc<Mutex<Stage>>,
    random: Random,
    senders: usize,
    /// Actors of each sender.
    actors: usize,
    once: Option<Disturbance>,
}

impl Play {
    fn new(scenario: Scenario) -> Self {
        let mut random = Random::new(scenario.seed ^ 0xa076_1d64_78bd_642f);
        let (senders, actors) = match scenario.mix {
            Mix::Many => (16, 1),
            _ if scenario.once.is_some() => (1, 1),
            Mix::Everything if random.one_in(4) => (16, 1),
            _ => (1 + usize::try_from(random.below(2)).expect("small"), 2),
        };
        let is_narrow = scenario.mix == Mix::Narrow || scenario.mix == Mix::Everything && random.one_in(3);
        let window = is_narrow.then_some(Window { bytes: 8192, moves: 1, slices: 1 });
        let world = World::new(scenario.seed, window);
        let mut play = Self { scenario, world, stage: Arc::default(), random, senders, actors, once: scenario.once };
        play.world.set_faults(scenario.mix.faults());
        play.start_receiver();
        for sender in 1..=senders {
            play.start_sender(sender);
        }
        if let Some(Disturbance::Lose(frame)) = play.once.take_if(|once| matches!(once, Disturbance::Lose(_))) {
            play.world.net.lose(frame);
        }
        play
    }

    fn plan(&self) -> Plan {
        let is_calm = matches!(self.scenario.mix, Mix::Calm | Mix::Narrow);
        Plan {
            transfers: self.scenario.transfers,
            cancels: !is_calm,
            deadlines: !is_calm,
            may_freeze: matches!(self.scenario.mix, Mix::Freezes | Mix::Everything),
        }
    }

    /// Starts the receiver, with fresh memory for each actor.
    fn start_receiver(&mut self) {
        let engine = self.world.start(RECEIVER);
        let mut stage = self.stage.lock();
        for actor in 0..self.senders * self.actors {
            let fresh = Arc::new(Shore::new(&engine));
            let old = stage.shores.insert(actor, fresh);
            stage.ruins.extend(old);
        }
        drop(stage);
        (1..=self.senders).for_each(|sender| self.open_back(sender));
    }

    /// The receiver dials a sender, too, so that two paths join them.
    fn open_back(&self, sender: usize) {
        let Some(engine) = self.world.engine(RECEIVER) else { return };
        let runtime = engine.runtime().clone();
        runtime.clone().spawn(async move {
            for _ in 0..100 {
                if let Ok(_held) = engine.open(address(sender)).await {
                    return pending().await;
                }
                runtime.sleep(Duration::from_millis(5)).await;
            }
        });
    }

    fn start_sender(&mut self, sender: usize) {
        let engine = self.world.start(sender);
        for nth in 0..self.actors {
            let name = (sender - 1) * self.actors + nth;
            let random = Random::new(self.random.next());
            let (stage, plan) = (Arc::clone(&self.stage), self.plan());
            let actor = Actor::new(name, RECEIVER, plan, engine.clone(), stage, random);
            engine.runtime().spawn(actor.act());
        }
        self.open_back(sender);
    }

    fn restart_receiver(&mut self) {
        if self.world.kill(RECEIVER).is_some() {
            self.start_receiver();
        }
    }

    /// Steps until everybody is done, or the time of trouble is over.
    fn trouble(&mut self) -> Result<(), String> {
        let end = self.world.now() + TROUBLE;
        let mut next = self.world.runtime.steps() + 1 + self.random.below(100);
        while self.world.runtime.step(end) && !self.is_over() {
            self.happen_once();
            if self.world.runtime.steps() < next {
                continue;
            }
            next = self.world.runtime.steps() + 1 + self.random.below(400);
            self.disturb();
            self.check(Shore::check_some)?;
        }
        self.check(Shore::check_all)
    }

    /// Whether all is said: nobody acts any more, or something is wrong.
    fn is_over(&self) -> bool {
        if self.world.runtime.steps() > STEPS_MAX {
            self.stage.lock().wrong.get_or_insert_with(|| "somebody is busy for ever, and no time passes".to_owned());
        }
        let stage = self.stage.lock();
        stage.wrong.is_some() || stage.acting == 0
    }

    fn happen_once(&mut self) {
        let steps = self.world.runtime.steps();
        let Some(once) = self.once.take_if(|once| match once {
            Disturbance::Lose(_) => false,
            Disturbance::Cancel(at) | Disturbance::Death(at) | Disturbance::Restart(at) | Disturbance::Stall(at) => {
                steps >= *at
            }
        }) else {
            return;
        };
        match once {
            Disturbance::Lose(_) => {}
            Disturbance::Cancel(_) => {
                let wakers = self.stage.lock().cancel_all();
                wakers.into_iter().for_each(std::task::Waker::wake);
            }
            Disturbance::Death(_) => drop(self.world.kill(RECEIVER)),
            Disturbance::Restart(_) => self.restart_receiver(),
            Disturbance::Stall(_) => (0..self.world.pairs()).for_each(|pair| self.world.net.stall(pair)),
        }
    }

    /// Something that the mix has happens now.
    fn disturb(&mut self) {
        let mix = self.scenario.mix;
        let is_one_of = |mixes: &[Mix]| mix == Mix::Everything || mixes.contains(&mix);
        let kind = self.random.below(8);
        let sender = 1 + usize::try_from(self.random.below(self.senders as u64)).expect("small");
        match kind {
            0 | 1 if is_one_of(&[Mix::Stalls]) && self.world.pairs() > 0 => {
                let pair = usize::try_from(self.random.below(self.world.pairs() as u64)).expect("small");
                self.world.net.stall(pair);
            }
            2 | 3 if is_one_of(&[Mix::Stalls]) => {
                (0..self.world.pairs()).for_each(|pair| self.world.net.resume(pair));
                let failures = self.random.below(500);
                self.world.set_dial_failures(failures);
            }
            4 if is_one_of(&[Mix::Freezes]) => {
                let node = if self.random.one_in(2) { RECEIVER } else { sender };
                self.world.freeze(node);
            }
            5 | 6 if is_one_of(&[Mix::Freezes]) => (0..=self.senders).for_each(|node| self.world.runtime.thaw(node)),
            // Rarely, or nothing would ever come to an end.
            7 if is_one_of(&[Mix::Restarts]) && self.random.one_in(3) => self.restart_receiver(),
            0 if is_one_of(&[Mix::SenderRestarts]) && self.random.one_in(2) => {
                drop(self.world.kill(sender));
                self.start_sender(sender);
            }
            _ => {}
        }
    }

    /// What was told so far is true.
    fn check(&self, look: impl Fn(&Shore) -> Result<(), String>) -> Result<(), String> {
        let stage = self.stage.lock();
        if let Some(wrong) = &stage.wrong {
            return Err(wrong.clone());
        }
        stage.shores.values().chain(&stage.ruins).try_for_each(|shore| look(shore))
    }

    /// Everything works again: what was under way ends, and nothing is left of it.
    fn end(mut self) -> Result<Summary, String> {
        self.world.heal();
        if self.world.engine(RECEIVER).is_none() {
            self.start_receiver();
        }
        let end = self.world.now() + HEALED;
        while self.world.runtime.step(end) && !self.is_over() {
            self.happen_once();
        }
        self.check(Shore::check_all)?;
        let (steps, frames) = (self.world.runtime.steps(), self.world.net.sent());
        if self.stage.lock().acting > 0 {
            return Err(format!("somebody still waits {HEALED} after everything healed"));
        }
        // What may still land would have by now: it is given as much time as a stalled lane gets.
        self.pass(PROGRESS_DEADLINE);
        self.check(Shore::check_all)?;
        for engine in self.world.engines() {
            let counted = engine.statistics();
            let is_clean = (counted.transfers_open, counted.slices_open, counted.bytes_open) == (0, 0, 0)
                && counted.transfers_started == counted.transfers_done + counted.transfers_failed;
            if !is_clean {
                return Err(format!("left over: {counted:?}"));
            }
        }
        let stage = self.stage.lock();
        let (done, failed, trace) = (stage.done, stage.failed, stage.trace);
        Ok(Summary { steps, frames, done, failed, trace })
    }

    fn pass(&mut self, span: Duration) {
        let end: Instant = self.world.now() + span;
        while self.world.runtime.step(end) {}
    }
}
