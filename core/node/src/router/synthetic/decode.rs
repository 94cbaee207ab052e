//! A decode node: a batch that takes a step after the other, and a door before it.

use futures::channel::mpsc;
use futures::future::{Either, select};
use futures::stream::StreamExt;
use millpond_core::sched::admission::{Admission, Arrival, Ask, Door};
use millpond_core::sched::cost::Profile;
use millpond_core::sched::placement::DecodeView;
use millpond_core::sim::mean_of_longest;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{FinishReason, Finished, Generated};

use super::{Gaps, Lost, Synthetic, TOKEN, Timers, span};

/// How long an idle node sleeps at most.
const IDLE: Duration = Duration::from_secs(3_600);
/// A prompt whose KV is there.
pub(super) struct Arrived {
    pub(super) id: String,
    pub(super) ask: Ask,
    /// Tokens of its answer.
    pub(super) output: u32,
    pub(super) arrived: Instant,
    pub(super) prefilled: Instant,
    /// When it can join.
    pub(super) ready: Instant,
    pub(super) listener: mpsc::UnboundedSender<Result<Generated, Lost>>,
}

/// A request in the batch.
struct Resident {
    arrived: Arrived,
    /// Tokens it still gets.
    left: u32,
    gaps: Vec<u64>,
    joined: Instant,
}

pub(super) struct Node {
    profile: Profile,
    timers: Timers,
    admission: Admission,
    gaps: Gaps,
    batch: Vec<Resident>,
    context: u64,
    /// Whoever has a higher priority goes first.
    held: Vec<Arrived>,
    joining: Vec<Arrived>,
    /// When the present step ends, and how long it takes.
    step: Option<(Instant, Duration)>,
}

impl Node {
    pub(super) fn new(synthetic: &Synthetic, timers: Timers, gaps: Gaps) -> Self {
        Self {
            profile: synthetic.profile,
            timers,
            admission: Admission::new(synthetic.admission),
            gaps,
            batch: Vec::new(),
            context: 0,
            held: Vec::new(),
            joining: Vec::new(),
            step: None,
        }
    }

    /// Works until nobody can send it anything any more.
    pub(super) async fn run(mut self, mut arrivals: mpsc::UnboundedReceiver<Arrived>) {
        loop {
            let now = self.timers.now();
            self.advance(now);
            let wake = self.step.map_or(now + IDLE, |(end, _)| end);
            let wake = self.held.iter().map(|held| self.patience(held)).fold(wake, Instant::min);
            match select(arrivals.next(), (self.timers.sleep)(wake.since(now))).await {
                Either::Left((Some(arrived), _)) => {
                    // Steps that ended before it came end before it is looked at.
                    self.advance(arrived.ready);
                    self.on_arrived(arrived);
                }
                Either::Left((None, _)) => return,
                Either::Right(_) => {}
            }
        }
    }

    /// Ends and begins steps until `now`, and sends away whoever was held for too long.
    fn advance(&mut self, now: Instant) {
        while let Some((end, took)) = self.step.filter(|(end, _)| *end <= now) {
            self.end_step(end, took);
            self.look_at_held(end);
            self.begin_step(end);
        }
        let expired = |held: &Arrived, node: &Self| node.patience(held) <= now;
        for place in (0..self.held.len()).rev() {
            if expired(&self.held[place], self) {
                refuse(self.held.remove(place));
            }
        }
    }

    fn patience(&self, held: &Arrived) -> Instant {
        self.admission.patience(&held.ask, self.at(held))
    }

    fn at(&self, held: &Arrived) -> Arrival {
        Arrival { arrived: held.arrived, prefilled: held.prefilled, tbt: held.ask.slo.tbt }
    }

    fn view(&self) -> DecodeView {
        let joining: u64 = self.joining.iter().map(|one| u64::from(one.ask.tokens)).sum();
        let batch = u32::try_from(self.batch.len() + self.joining.len()).unwrap_or(u32::MAX);
        DecodeView { down: false, batch, context: self.context + joining }
    }

    fn on_arrived(&mut self, arrived: Arrived) {
        if arrived.output <= 1 {
            // The prefill node's token is the whole answer.
            say(&arrived, true);
            return;
        }
        let ready = arrived.ready;
        let passes = self.held.first().is_some_and(|first| first.ask.priority > arrived.ask.priority);
        match self.admission.at_door(&arrived.ask, self.at(&arrived), self.view(), &self.profile) {
            Door::Join if !passes => self.joining.push(arrived),
            Door::Refuse => refuse(arrived),
            Door::Join | Door::Hold(_) => {
                let place = self.held.partition_point(|held| held.ask.priority >= arrived.ask.priority);
                self.held.insert(place, arrived);
            }
        }
        if self.step.is_none() {
            self.begin_step(ready);
        }
    }

    /// Whoever is held joins if there is room now; one with little context passes one with much that does not fit.
    fn look_at_held(&mut self, now: Instant) {
        let mut place = 0;
        while let Some(held) = self.held.get(place) {
            if held.listener.is_closed() || self.patience(held) <= now {
                refuse(self.held.remove(place));
                continue;
            }
            let passes = self.held[0].ask.priority > held.ask.priority;
            match self.admission.at_door(&held.ask, self.at(held), self.view(), &self.profile) {
                Door::Join if !passes => {
                    let joins = self.held.remove(place);
                    self.joining.push(joins);
                }
                Door::Refuse => refuse(self.held.remove(place)),
                _ => place += 1,
            }
        }
    }

    /// Lets those in who join; their first tokens are out with the beginning of the step.
    fn begin_step(&mut self, now: Instant) {
        for arrived in std::mem::take(&mut self.joining) {
            say(&arrived, false);
            self.context += u64::from(arrived.ask.tokens);
            let left = arrived.output - 1;
            self.batch.push(Resident { arrived, left, gaps: Vec::new(), joined: now });
        }
        self.step = None;
        if !self.batch.is_empty() {
            let took = span(self.profile.decode.seconds(self.view().batch, self.context));
            self.step = Some((now + took, took));
        }
    }

    fn end_step(&mut self, now: Instant, took: Duration) {
        self.context += u64::try_from(self.batch.len()).unwrap_or(u64::MAX);
        for place in (0..self.batch.len()).rev() {
            let resident = &mut self.batch[place];
            resident.gaps.push(took.as_nanos());
            resident.left -= 1;
            let is_over = resident.left == 0;
            if is_over {
                // Before whoever asked hears of the end and looks for it.
                let gap = mean_of_longest(&mut resident.gaps);
                self.gaps.by_id.lock().insert(resident.arrived.id.clone(), gap);
                let lasted = now.since(resident.joined);
                self.admission.on_ended(now, resident.arrived.output, None, lasted);
            }
            say(&resident.arrived, is_over);
            if is_over || resident.arrived.listener.is_closed() {
                let resident = self.batch.swap_remove(place);
                let given = resident.arrived.output - 1 - resident.left;
                self.context -= u64::from(resident.arrived.ask.tokens) + u64::from(given);
            }
        }
    }
}

/// One token, maybe the last. Whoever asked may have left.
fn say(to: &Arrived, is_last: bool) {
    let finished = is_last.then(|| Finished { reason: FinishReason::Length.into(), ..Finished::default() });
    let _ = to.listener.unbounded_send(Ok(Generated { tokens: vec![TOKEN], started: None, finished }));
}

fn refuse(arrived: Arrived) {
    let _ = arrived.listener.unbounded_send(Err(Lost::Late));
}
