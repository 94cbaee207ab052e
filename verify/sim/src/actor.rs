//! Somebody who moves bytes: opens the other node, as often as need be, and checks whatever it is told.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Waker};

use futures::FutureExt;
use millpond_core::time::{Duration, Instant};
use millpond_node::engine::{
    Arrival, Backing, Batch, Class, Engine, Failure, Far, Region, RemoteRegion, Report, Rights, Status, Transfer,
};
use millpond_node::runtime::{Runtime, sleep_until};
use parking_lot::Mutex;

use crate::shore::{Held, LENS, LIBRARY_LEN, POISON, Shore, book, offset};
use crate::virtual_time::{Random, Virtual};
use crate::world::{PROGRESS_DEADLINE, address};

/// A transfer that is cancelled, or past its deadline, may take so much longer: what a cancel is given before its lane is
/// closed, and a few turns.
const GRACE: Duration = Duration::from_millis(130);
/// The other node may be away for so long.
const PATIENCE: Duration = Duration::from_secs(30);

/// What all actors share with the director.
#[derive(Default)]
pub(crate) struct Stage {
    /// By actor.
    pub(crate) shores: BTreeMap<usize, Arc<Shore>>,
    /// Shores whose node died.
    pub(crate) ruins: Vec<Arc<Shore>>,
    pub(crate) acting: usize,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) wrong: Option<String>,
    /// Whoever waits for a transfer; and cancels it then.
    pub(crate) is_cancelled: bool,
    waiting: BTreeMap<usize, Waker>,
    /// Of everything that was told, in order.
    pub(crate) trace: u64,
}

impl Stage {
    /// Every transfer under way is cancelled by its actor; gives whom to wake.
    pub(crate) fn cancel_all(&mut self) -> Vec<Waker> {
        self.is_cancelled = true;
        std::mem::take(&mut self.waiting).into_values().collect()
    }

    fn note(&mut self, what: u64) {
        self.trace = (self.trace ^ what).wrapping_mul(0x0000_0100_0000_01b3);
    }
}

/// How an actor behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) transfers: u32,
    pub(crate) cancels: bool,
    pub(crate) deadlines: bool,
    /// Its own node may stand still, so that nothing can be said of how long things take.
    pub(crate) may_freeze: bool,
}

pub(crate) struct Actor {
    pub(crate) name: usize,
    pub(crate) to: usize,
    pub(crate) plan: Plan,
    pub(crate) engine: Engine<Virtual>,
    pub(crate) stage: Arc<Mutex<Stage>>,
    pub(crate) random: Random,
    next_value: u32,
    /// Raw: the places, then what is read.
    memory: Region,
    leased: Region,
}

/// The other node as it is now.
struct There {
    shore: Arc<Shore>,
    places: RemoteRegion,
    counted: RemoteRegion,
}

/// A batch, and what it means.
#[derive(Default)]
struct Errand {
    batch: Batch,
    writes: Vec<(usize, usize, u32, Held)>,
    /// Index of the request, offset in the library, length.
    reads: Vec<(usize, u64, u64)>,
    announces: Option<usize>,
    deadline: Option<Duration>,
}

impl Actor {
    pub(crate) fn new(
        name: usize,
        to: usize,
        plan: Plan,
        engine: Engine<Virtual>,
        stage: Arc<Mutex<Stage>>,
        random: Random,
    ) -> Self {
        let len = offset(LENS.len()) + LIBRARY_LEN;
        let memory = engine.allocate_raw(len, Backing::Heap, Rights::NONE).expect("there is memory");
        let leased = engine.allocate(4096, Backing::Heap).expect("there is memory");
        stage.lock().acting += 1;
        let incarnation = u32::try_from(engine.options().identity.incarnation).expect("few");
        // No two actors, and no two lives of one, write the same.
        let next_value = u32::try_from(name).expect("few") << 20 | incarnation << 14 | 1;
        let actor = Self { name, to, plan, engine, stage, random, next_value, memory, leased };
        actor.fill(0, len, POISON);
        actor
    }

    pub(crate) async fn act(mut self) {
        let outcome = self.run().await;
        let mut stage = self.stage.lock();
        stage.acting -= 1;
        if let Err(wrong) = outcome {
            let name = self.name;
            stage.wrong.get_or_insert_with(|| format!("actor {name}: {wrong}"));
        }
    }

    async fn run(&mut self) -> Result<(), String> {
        let mut there = None;
        for _ in 0..self.plan.transfers {
            let Some(met) = self.meet(there).await? else { return Ok(()) };
            let outcome = self.transfer(&met).await;
            met.shore.account.lock().is_busy = false;
            if !outcome? {
                return Ok(());
            }
            there = Some(met);
        }
        Ok(())
    }

    /// The node to talk to, opened again if it is another than before; its memory is this actor's then. `None`: our own
    /// node ended.
    async fn meet(&mut self, mut known: Option<There>) -> Result<Option<There>, String> {
        let runtime = self.engine.runtime().clone();
        let end = runtime.now() + PATIENCE;
        loop {
            let current = self.stage.lock().shores.get(&self.name).cloned();
            let is_same = |there: &There| current.as_ref().is_some_and(|shore| Arc::ptr_eq(shore, &there.shore));
            known = known.filter(is_same);
            if known.is_none()
                && let Some(shore) = current
            {
                known = match self.engine.open(address(self.to)).await {
                    Ok(peer) => {
                        let attach = |token| self.engine.attach(&peer, &token).ok();
                        let both = attach(shore.token).zip(attach(shore.counted()));
                        both.map(|(places, counted)| There { shore, places, counted })
                    }
                    Err(millpond_node::engine::OpenError::ShutDown) => return Ok(None),
                    Err(_) => None,
                };
            }
            if let Some(there) =
                known.take_if(|there| !std::mem::replace(&mut there.shore.account.lock().is_busy, true))
            {
                return Ok(Some(there));
            }
            if runtime.now() >= end {
                return Err("the other node could not be opened".to_owned());
            }
            runtime.sleep(Duration::from_millis(2)).await;
        }
    }

    fn fill(&self, at: u64, len: u64, value: u32) {
        let words = usize::try_from(len / 4).expect("small");
        self.memory.write_at(at, &value.to_le_bytes().repeat(words)).expect("it is inside");
    }

    /// Memory here that no transfer uses is as it was left.
    fn check_here(&self, at: u64, len: u64, is_right: impl Fn(usize, u32) -> bool) -> Result<(), String> {
        let mut bytes = vec![0; usize::try_from(len).expect("small")];
        self.memory.read_at(at, &mut bytes).expect("it is inside");
        for (index, word) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes(word.try_into().expect("four bytes"));
            if !is_right(index, word) {
                return Err(format!("word {index} at {at} here is {word:#x}"));
            }
        }
        Ok(())
    }

    fn errand(&mut self, there: &There) -> Errand {
        let mut errand = Errand::default();
        self.next_value += 1;
        // All four bytes of a value differ from those of others, nearly always.
        let value = self.next_value.wrapping_mul(0x9e37_79b1);
        if self.random.one_in(5) {
            let mut source = self.leased.carve(0, 64).expect("it is free");
            source.fill(7);
            errand.announces = Some(errand.batch.push_write(source.freeze(), there.counted.whole()));
            there.shore.on_announced();
            errand.batch = errand.batch.arrival(Arrival { counter: 0, amount: 1 });
        } else {
            // The large place is rare, or little else would happen.
            let most = if self.random.one_in(4) { LENS.len() } else { LENS.len() - 1 };
            for (place, len) in LENS.into_iter().enumerate().take(most) {
                if self.random.one_in(2) {
                    self.fill(offset(place), len, value);
                    let target = there.places.extent(offset(place), len).expect("it is inside");
                    let index = errand.batch.push_write_raw(&self.memory, offset(place), target);
                    errand.writes.push((index, place, value, there.shore.on_start(place, value)));
                }
            }
            if errand.batch.is_empty() || self.random.one_in(3) {
                let at = self.random.below(LIBRARY_LEN / 8) * 4;
                let len = 4 + self.random.below((LIBRARY_LEN - at) / 4) * 4;
                let library = offset(LENS.len());
                let source = there.places.extent(library + at, len).expect("it is inside");
                let index = errand.batch.push_read_raw(source, &self.memory, library + at);
                errand.reads.push((index, at, len));
            }
        }
        let classes = Class::ALL;
        errand.batch = errand.batch.class(classes[usize::try_from(self.random.below(3)).expect("small")]);
        if self.plan.deadlines && self.random.one_in(3) {
            let deadline = Duration::from_micros(100) + self.random.span(PROGRESS_DEADLINE);
            errand.deadline = Some(deadline);
            errand.batch = errand.batch.deadline(deadline);
        }
        errand
    }

    /// One transfer from its start to its end. `false`: our own node ended.
    async fn transfer(&mut self, there: &There) -> Result<bool, String> {
        let mut errand = self.errand(there);
        let (batch, deadline) = (std::mem::take(&mut errand.batch), errand.deadline);
        let count = batch.len();
        let start = self.engine.runtime().now();
        let transfer = match self.engine.submit(batch) {
            Ok(transfer) => transfer,
            Err(refused) => {
                for (_, place, _, before) in errand.writes {
                    there.shore.on_untouched(place, before)?;
                }
                if errand.announces.is_some() {
                    there.shore.on_arrival(Some(false))?;
                }
                drop(refused.batch);
                self.engine.runtime().sleep(Duration::from_millis(1)).await;
                return Ok(refused.kind != millpond_node::engine::SubmitErrorKind::ShutDown);
            }
        };
        let cancel_at = if self.plan.cancels && self.random.one_in(2) {
            start + self.random.span(Duration::from_millis(4))
        } else {
            Instant::NEVER
        };
        let (report, cancelled_at) = self.end_of(transfer, cancel_at).await;
        let now = self.engine.runtime().now();
        let latest = deadline.map_or(Instant::NEVER, |span| start + span).min(cancelled_at);
        if latest != Instant::NEVER && now > latest + GRACE && !self.plan.may_freeze {
            return Err(format!("it ended {} after it should have: {report:?}", now.since(latest)));
        }
        if report.outcomes().len() != count {
            return Err(format!("{count} requests, and outcomes: {report:?}"));
        }
        {
            let mut stage = self.stage.lock();
            *(if report.is_done() { &mut stage.done } else { &mut stage.failed }) += 1;
            stage.note(now.as_nanos());
            stage.note(u64::from(report.retries()) << 8 | u64::from(report.is_done()));
        }
        self.settle(there, errand, &report)?;
        drop(report);
        if self.leased.lease_count() != 0 {
            return Err("memory of a transfer that ended did not come back".to_owned());
        }
        // What its memory was filled with after its end is still there, after a while too.
        if self.random.one_in(2) {
            self.engine.runtime().sleep(self.random.span(Duration::from_millis(1))).await;
        }
        self.check_here(0, offset(LENS.len()) + LIBRARY_LEN, |_, word| word == POISON)?;
        Ok(true)
    }

    /// Takes the report at its word, there and here. Memory here is filled with something else from now on.
    fn settle(&self, there: &There, errand: Errand, report: &Report) -> Result<(), String> {
        let Errand { writes, reads, announces, .. } = errand;
        for (index, place, value, before) in writes {
            self.fill(offset(place), LENS[place], POISON);
            match far(report, index)? {
                None => there.shore.on_done(place, value)?,
                Some(Far::Untouched) => there.shore.on_untouched(place, before)?,
                Some(_) => there.shore.check(place)?,
            }
        }
        let library = offset(LENS.len());
        for (index, at, len) in reads {
            if far(report, index)?.is_none() {
                let first = usize::try_from(at / 4).expect("small");
                self.check_here(library + at, len, |index, word| word == book(first + index))?;
            }
            self.fill(library + at, len, POISON);
        }
        if let Some(index) = announces {
            match far(report, index)? {
                None => there.shore.on_arrival(Some(true))?,
                Some(Far::Untouched) => there.shore.on_arrival(Some(false))?,
                Some(_) => there.shore.on_arrival(None)?,
            }
        }
        Ok(())
    }

    /// The report, and when it was cancelled.
    async fn end_of(&self, transfer: Transfer, cancel_at: Instant) -> (Report, Instant) {
        let runtime = self.engine.runtime();
        let (mut transfer, mut alarm) = (transfer, pin!(sleep_until(runtime, cancel_at).fuse()));
        let mut cancelled_at = Instant::NEVER;
        let report = poll_fn(|context| {
            if cancelled_at == Instant::NEVER {
                let is_due = alarm.as_mut().poll(context).is_ready();
                let mut stage = self.stage.lock();
                if is_due || stage.is_cancelled {
                    drop(stage);
                    cancelled_at = runtime.now();
                    transfer.cancel();
                } else {
                    stage.waiting.insert(self.name, context.waker().clone());
                }
            }
            match transfer.poll_unpin(context) {
                Poll::Ready(report) => Poll::Ready(report),
                Poll::Pending => Poll::Pending,
            }
        });
        (report.await, cancelled_at)
    }
}

/// What a failure means over there; `None`: it was done.
fn far(report: &Report, index: usize) -> Result<Option<Far>, String> {
    match &report.outcomes()[index].status {
        Status::Done => Ok(None),
        Status::Failed(Failure { far, .. }) => Ok(Some(*far)),
        other => Err(format!("a request of a transfer that ended is {other:?}")),
    }
}
