//! Prefill and decode nodes that work through a trace, event by event, in nanoseconds.
//!
//! A request is placed and admitted on arrival by the code of [`crate::sched`]; pulls its prefix, waits and is computed;
//! its KV streams to its decode node while it is computed; there it joins the batch with the next step, is held, or is
//! refused; who is refused may come back when it was told to. The decode node sends the first token when the request joins (an answer of one token is sent by the prefill
//! node), so time to first token has the wait for a step's end in it, and gaps between tokens are steps.
//!
//! Events of the same moment happen in the order in which they were foreseen, so a run depends on nothing but its inputs.

use alloc::collections::{BTreeMap, BinaryHeap};
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;

use super::batch::{Batch, Joining};
use super::memory::Memory;
use super::network::Network;
use super::outcome::{Fate, Load, Outcome, Served, TenantUse};
use super::people::{People, Person};
use super::pipeline::Pipeline;
use super::setup::Setup;
use super::trace::Trace;
use crate::random::Random;
use crate::sched::admission::{Admission, Arrival, Ask, Door, Outlook, Shares, Verdict};
use crate::sched::colocate::{Ability, DecodeSide, Elsewhere};
use crate::sched::cost::{Band, Interval, Profile, Work};
use crate::sched::forecast::{Occupancy, Resident};
use crate::sched::placement::{Candidate, PrefillView, Prompt};
use crate::sched::queue::{Line, Waiting, nanos};
use crate::sched::record::{Log, Record};
use crate::time::{Duration, Instant};

/// Share of first tokens that the predicted interval is to cover.
const COVERAGE: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A prompt is computed.
    Prefilled(u32),
    /// A prefill node can begin with the next.
    Free(u32),
    /// Transfers end, unless others began or ended since.
    Transfers(u64),
    /// A decode node's step ends.
    Step(u32),
    /// A prompt was held for as long as may be.
    Expired(u32),
    /// Who was refused comes back.
    Returns(u32),
}

struct Run {
    ask: Ask,
    output: u32,
    node: u32,
    decode: u32,
    work: Work,
    predicted: Interval,
    /// Whose prefill has to be over first: it computes part of the prefix.
    after: Option<u32>,
    loaded: bool,
    computed: bool,
    streamed: bool,
    held: bool,
    /// Whoever has a higher one goes first at the door, and is not passed there.
    rank: u16,
    prefilled: Instant,
    /// When and with which step it joined its batch.
    joined: Instant,
    step: u64,
    /// How often it comes back if it is refused.
    tries: u32,
}

struct PrefillNode {
    line: Line,
    pipeline: Pipeline,
}

#[derive(Default)]
struct DecodeNode {
    batch: Batch,
    /// How long the step that is being done takes.
    step: Option<Duration>,
    held: Vec<u32>,
    /// Deadlines between tokens of those in the batch, and of how many.
    deadlines: BTreeMap<Duration, u32>,
}

pub(super) struct Cluster<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    now: Instant,
    events: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    foreseen: u64,
    prefill: Vec<PrefillNode>,
    decode: Vec<DecodeNode>,
    memory: Memory,
    network: Network,
    transfers: u64,
    occupancy: Occupancy,
    admission: Admission,
    shares: Shares,
    band: Band,
    log: Log,
    record: Record,
    people: People,
    noise: Random,
    requests: Vec<Run>,
    /// Decisions so far.
    turn: u64,
    /// Which blocks came before.
    seen: Vec<bool>,
    /// Pulls that wait until another request is computed.
    pulls: Vec<(u32, u32, u32, u64)>,
    matched: Vec<u32>,
    sampled: Instant,
    out: Outcome,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(trace: &'a Trace, setup: &'a Setup) -> Self {
        let line = || PrefillNode { line: Line::default(), pipeline: Pipeline::new(setup) };
        let caches = if setup.pooled { 1 } else { setup.prefill };
        let each = setup.cache_blocks.unwrap_or(u32::MAX);
        let capacity =
            if setup.pooled { each.saturating_mul(u32::try_from(setup.prefill).unwrap_or(u32::MAX)) } else { each };
        let memory = Memory::new(caches, capacity, trace.distinct_blocks(), setup.evict);
        let weights: Vec<f64> = setup.tenants.iter().map(|tenant| tenant.weight).collect();
        let people = People::new(trace, setup);
        let out = Outcome {
            by_prefill: vec![0; setup.prefill],
            by_decode: vec![0; setup.decode],
            length_blind_bound: people.length_blind_bound(trace, setup),
            tenants: weights.iter().map(|&weight| TenantUse { weight, ..TenantUse::default() }).collect(),
            ..Outcome::default()
        };
        Self {
            trace,
            setup,
            now: Instant::ZERO,
            events: BinaryHeap::new(),
            foreseen: 0,
            prefill: (0..setup.prefill).map(|_| line()).collect(),
            decode: (0..setup.decode).map(|_| DecodeNode::default()).collect(),
            memory: memory.lagging(setup.staleness, setup.event_loss, setup.seed),
            network: Network::new(setup.prefill + setup.decode, setup.profile.link),
            transfers: 0,
            occupancy: Occupancy::new(setup.decode),
            admission: Admission::new(setup.admission),
            shares: Shares::new(&weights),
            band: Band::new(COVERAGE),
            log: Log::new(0),
            record: Record::default(),
            people,
            noise: Random::new(setup.seed ^ 0x6e6f_6973_6500),
            requests: Vec::with_capacity(trace.requests().len()),
            turn: 0,
            seen: vec![false; trace.distinct_blocks() as usize],
            pulls: Vec::new(),
            matched: vec![0; setup.prefill],
            sampled: Instant::ZERO,
            out,
        }
    }

    /// Works through the whole trace.
    pub(super) fn run(mut self) -> Outcome {
        let arrivals = self.trace.requests();
        let mut next = 0;
        loop {
            let event = self.events.peek().map(|Reverse((at, ..))| *at);
            match (arrivals.get(next), event) {
                (Some(request), event) if event.is_none_or(|at| request.at < at) => {
                    self.sample(request.at);
                    self.now = request.at;
                    self.on_arrival(u32::try_from(next).expect("requests are numbered with 32 bits"));
                    next += 1;
                }
                (_, Some(_)) => {
                    let Some(Reverse((at, _, event))) = self.events.pop() else { break };
                    if next < arrivals.len() {
                        self.sample(at);
                    }
                    self.now = at;
                    self.on_event(event);
                }
                (_, None) => break,
            }
        }
        self.out.decisions = self.log.hash();
        self.out.ended = self.now;
        self.out
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Prefilled(id) => self.on_prefilled(id),
            Event::Free(node) => self.begin_prefill(node),
            Event::Transfers(version) if version == self.transfers => self.on_transfers(),
            Event::Transfers(_) => {}
            Event::Step(node) => self.on_step(node),
            Event::Expired(id) => self.on_expired(id),
            Event::Returns(id) => self.on_return(id),
        }
    }

    fn foresee(&mut self, at: Instant, event: Event) {
        self.events.push(Reverse((at, self.foreseen, event)));
        self.foreseen += 1;
    }

    /// Samples loads up to `until`, as they have been since the last event.
    fn sample(&mut self, until: Instant) {
        while self.sampled <= until {
            let waits = self.prefill.iter().map(|node| node.line.ahead(self.sampled, u64::MAX).wait.as_secs_f64());
            let decode = &self.setup.profile.decode;
            let steps =
                self.decode.iter().map(|node| node.batch.view()).map(|view| decode.seconds(view.batch, view.context));
            let prefill = waits.sum::<f64>() / self.setup.prefill as f64 / self.setup.slo.ttft.as_secs_f64();
            let decode = steps.sum::<f64>() / self.setup.decode as f64 / self.setup.slo.tbt.as_secs_f64();
            self.out.loads.push(Load { prefill, decode });
            self.sampled = self.sampled + self.setup.sample;
        }
    }

    fn on_arrival(&mut self, id: u32) {
        let request = &self.trace.requests()[id as usize];
        let (input, output) = (request.input_tokens, request.output_tokens);
        let Person { hint, tenant, priority, slo, tries } = self.people.next(output);
        let prefill_least = least(&self.setup.profile, self.trace.blocks_of(request), input, &mut self.seen);
        let row = Served { at: self.now, input, output, tenant, priority, prefill_least, ..Served::default() };
        self.out.served.push(row);
        let ask = Ask { id: u64::from(id), tokens: input, hint, slo, tenant, priority };
        self.requests.push(Run::new(ask, output, tries));
        self.decide(id);
    }

    /// Who was refused is here again, as it was told to: it was promised a place, and has the next higher priority.
    fn on_return(&mut self, id: u32) {
        let (row, run) = (&mut self.out.served[id as usize], &mut self.requests[id as usize]);
        (row.at, row.returns) = (self.now, row.returns + 1);
        let ask = Ask { priority: row.priority.saturating_add(1), ..run.ask };
        *run = Run::new(ask, run.output, run.tries - 1);
        self.out.returns += 1;
        self.decide(id);
    }

    /// Places a request and admits it, or refuses it.
    fn decide(&mut self, id: u32) {
        let (trace, setup) = (self.trace, self.setup);
        let request = &trace.requests()[id as usize];
        let (ask, is_new) = (self.requests[id as usize].ask, self.out.served[id as usize].returns == 0);
        for (node, decode) in (0..).zip(&self.decode) {
            self.occupancy.on_steps(node, decode.batch.steps());
        }
        self.record.begin(self.now, ask.id, Prompt { tokens: ask.tokens, turn: self.turn }, self.turn);
        self.turn += 1;
        let rank = self.view_prefill(trace.blocks_of(request), ask.tokens);
        let placed = self.record.place(&setup.placement, &setup.profile).expect("no simulated node is down");
        let predicted = self.band.interval(placed.chosen.ttft.as_secs_f64());
        let prefill = placed.chosen.prefill.as_secs_f64();
        let outlook = Outlook { ttft: predicted, prefill, occupancy: &self.occupancy, profile: &setup.profile };
        let answer = self.admission.on_arrival(self.now, &ask, outlook, &self.shares);
        self.record.answer = Some(answer);
        let decode = answer.decode.unwrap_or(0);
        let behind = self.record.prefill[placed.chosen.instance as usize].behind;
        self.record.colocate(&setup.profile, self.decode_side(decode, behind));
        self.log.push(&mut self.record);
        let predicted = self.band.interval(predicted.expected + answer.door.as_secs_f64());
        let cost = setup.profile.prefill.seconds(placed.chosen.work()) + self.people.decode_cost(request.output_tokens);
        // Who comes back asks for what it asked for before.
        if is_new {
            self.shares.on_asked(self.now, ask.tenant, cost);
            if let Some(tenant) = self.out.tenants.get_mut(ask.tenant as usize) {
                tenant.asked += cost;
            }
        }
        match answer.verdict {
            Verdict::Admit => {
                let favoured = self.shares.favours(ask.tenant);
                self.requests[id as usize].on_placed(&placed.chosen, decode, predicted, favoured);
                self.shares.on_served(self.now, ask.tenant, cost);
                let Ask { tokens, hint, slo, .. } = ask;
                let resident = Resident { id: ask.id, tokens, hint, tbt: slo.tbt, join: answer.join, joined: None };
                self.occupancy.reserve(decode, resident);
                self.dispatch(id, &placed.chosen, rank);
            }
            Verdict::Refuse { retry_after, .. } => self.refuse(id, retry_after, Fate::RejectedEarly),
        }
    }

    /// What is known of a decode node, which computes no prompts here: their figures are recorded all the same.
    fn decode_side(&self, instance: u32, behind: u32) -> DecodeSide {
        let view = self.occupancy.view(instance);
        DecodeSide {
            instance,
            ability: Ability::Unable,
            elsewhere: Elsewhere::Up,
            reused: 0,
            wait: Duration::ZERO,
            batch: view.batch,
            context: view.context,
            tbt: self.occupancy.strictest(instance),
            behind,
        }
    }

    /// Tells a request to come back, which it may do.
    fn refuse(&mut self, id: u32, retry_after: Duration, fate: Fate) {
        self.out.refusals += 1;
        if self.requests[id as usize].tries > 0 {
            self.foresee(self.now + retry_after, Event::Returns(id));
        } else {
            self.out.served[id as usize].fate = fate;
        }
    }

    /// Puts what is known of each prefill node into the record; the rank of the request in a line.
    fn view_prefill(&mut self, blocks: &[u64], tokens: u32) -> u64 {
        let profile = &self.setup.profile;
        if self.setup.pooled {
            let mut pool = [0];
            self.memory.matches(self.now, blocks, &mut pool);
            self.matched.fill(pool[0]);
        } else {
            self.memory.matches(self.now, blocks, &mut self.matched);
        }
        let best = self.matched.iter().copied().max().unwrap_or(0).min(tokens / profile.block_tokens);
        let shortest = profile.prefill.seconds(Work::of_prompt(tokens, best * profile.block_tokens));
        let order = self.setup.order.unwrap_or(self.setup.placement.policy.order());
        let rank = order.rank(self.now, span(shortest));
        for (instance, node) in (0..).zip(&self.prefill) {
            let matched = self.matched[instance as usize];
            let ready = self.memory.ready(self.cache_of(instance), blocks, matched).since(self.now);
            let ahead = node.line.ahead(self.now, rank);
            self.record.prefill.push(PrefillView {
                down: false,
                // What others still compute of its prefix has to be there first, whatever the ranks.
                wait: if matched > 0 { ahead.wait.max(ready) } else { ahead.wait },
                behind: ahead.behind,
                matched,
                ready,
                sending: self.network.sending(instance),
                receiving: self.network.receiving(instance),
            });
        }
        rank
    }

    const fn cache_of(&self, instance: u32) -> u32 {
        if self.setup.pooled { 0 } else { instance }
    }

    /// Sends an admitted request on its way.
    fn dispatch(&mut self, id: u32, chosen: &Candidate, rank: u64) {
        let (trace, block) = (self.trace, self.setup.profile.block_tokens);
        let blocks = trace.blocks_of(&trace.requests()[id as usize]);
        let cache = self.cache_of(chosen.instance);
        let run = &mut self.requests[id as usize];
        let whole = |matched: u32| matched.min(run.ask.tokens / block) * block;
        let local = whole(self.memory.matched(cache, blocks));
        // What the index believes may be gone: then less is pulled, and more computed.
        let pulled =
            chosen.source.map_or(0, |source| whole(self.memory.matched(source, blocks)).min(local + chosen.pulled));
        let reused = local.max(pulled);
        let believed = chosen.reused;
        run.work = Work::of_prompt(run.ask.tokens, reused);
        self.out.stale += u32::from(run.work.prefix < believed);
        self.out.by_prefill[chosen.instance as usize] += 1;
        self.out.by_decode[run.decode as usize] += 1;
        run.after = self.memory.maker(cache, blocks, local / block);
        let makes = chosen.source.and_then(|source| self.memory.maker(source, blocks, pulled / block));
        let ready = self.now + chosen.ttft;
        self.memory.admit(self.now, cache, blocks, id, ready);
        self.prefill[chosen.instance as usize].line.push(Waiting { id: u64::from(id), rank, cost: chosen.prefill });
        if let (Some(source), true) = (chosen.source, pulled > local) {
            self.out.pulls += 1;
            self.requests[id as usize].loaded = false;
            let bytes = self.setup.profile.kv_len(pulled - local);
            match makes {
                Some(maker) => self.pulls.push((maker, id, source, bytes)),
                None => self.pull(id, source, bytes),
            }
        }
        self.begin_prefill(chosen.instance);
    }

    fn pull(&mut self, id: u32, source: u32, bytes: u64) {
        let target = self.requests[id as usize].node;
        self.network.start(self.now, 2 * u64::from(id), source, target, bytes);
        self.foresee_transfers();
    }

    fn foresee_transfers(&mut self) {
        self.transfers += 1;
        if let Some(at) = self.network.next() {
            self.foresee(at, Event::Transfers(self.transfers));
        }
    }

    fn on_transfers(&mut self) {
        while let Some(flow) = self.network.ended(self.now) {
            let id = u32::try_from(flow / 2).expect("transfers are numbered by requests");
            let run = &mut self.requests[id as usize];
            let node = run.node;
            if flow % 2 == 0 {
                run.loaded = true;
                self.begin_prefill(node);
            } else {
                run.streamed = true;
                if run.computed {
                    self.at_door(id);
                }
            }
        }
        self.foresee_transfers();
    }

    /// Begins the first prompt in the line that has all it needs, if the node is free.
    fn begin_prefill(&mut self, node: u32) {
        let Self { prefill, requests, now, .. } = self;
        let instance = &mut prefill[node as usize];
        if instance.pipeline.free_at() > *now {
            return;
        }
        let computed = |id: u32| requests[id as usize].computed;
        let may = |waiting: &Waiting| {
            let run = &requests[usize::try_from(waiting.id).expect("requests index memory")];
            run.loaded && run.after.is_none_or(computed)
        };
        let Some(Waiting { id, .. }) = instance.line.take(may) else { return };
        let id = u32::try_from(id).expect("requests are numbered with 32 bits");
        let (work, decode, streams) = {
            let run = &requests[id as usize];
            (run.work, run.decode, run.output > 1)
        };
        let noise = factor(&mut self.noise, self.setup.prefill_noise);
        let instance = &mut self.prefill[node as usize];
        let predicted = instance.pipeline.predict(self.now, work);
        let done = instance.pipeline.begin(self.now, work, noise);
        instance.line.on_busy(predicted);
        let free = instance.pipeline.free_at();
        let row = &mut self.out.served[id as usize];
        (row.reused, row.prefill) = (work.prefix, self.setup.profile.prefill.seconds(work) * noise);
        self.foresee(done, Event::Prefilled(id));
        self.foresee(free, Event::Free(node));
        if streams {
            let target = u32::try_from(self.setup.prefill).unwrap_or(u32::MAX) + decode;
            self.network.start(self.now, 2 * u64::from(id) + 1, node, target, self.setup.profile.kv_len(work.total()));
            self.foresee_transfers();
        }
    }

    fn on_prefilled(&mut self, id: u32) {
        let trace = self.trace;
        let run = &mut self.requests[id as usize];
        (run.computed, run.prefilled, run.joined) = (true, self.now, self.now);
        let (node, streamed, ends) = (run.node, run.streamed, run.output <= 1);
        let cache = self.cache_of(node);
        self.memory.unpin(self.now, cache, trace.blocks_of(&trace.requests()[id as usize]), id);
        while let Some(place) = self.pulls.iter().position(|pull| pull.0 == id) {
            let (_, id, source, bytes) = self.pulls.remove(place);
            self.pull(id, source, bytes);
        }
        // Those whose prefix it computed may begin.
        self.begin_prefill(node);
        if ends {
            self.requests[id as usize].measure(self.now, &mut self.out.served[id as usize], &mut self.band);
            self.finish(id, Duration::ZERO);
        } else if streamed {
            self.at_door(id);
        }
    }

    /// A prompt is at its decode node: it joins, waits or is refused. Whether it is there no more.
    fn at_door(&mut self, id: u32) -> bool {
        let run = &self.requests[id as usize];
        let node = &mut self.decode[run.decode as usize];
        let strictest = node.deadlines.first_key_value().map_or(run.ask.slo.tbt, |(&tbt, _)| tbt);
        let at = Arrival { arrived: self.out.served[id as usize].at, prefilled: run.prefilled, tbt: strictest };
        let (held, ask, decode) = (run.held, run.ask, run.decode);
        let passes = node.held.first().is_some_and(|&first| self.requests[first as usize].rank > run.rank);
        let until = match self.admission.at_door(&ask, at, node.batch.view(), &self.setup.profile) {
            Door::Join if !passes => {
                self.join(id);
                return true;
            }
            Door::Refuse => {
                self.refuse_late(id);
                return true;
            }
            Door::Join => self.admission.patience(&ask, at),
            Door::Hold(until) => until,
        };
        if !held {
            let rank = run.rank;
            self.requests[id as usize].held = true;
            self.out.held += 1;
            let requests = &self.requests;
            let node = &mut self.decode[decode as usize];
            let place = node.held.partition_point(|&other| requests[other as usize].rank >= rank);
            node.held.insert(place, id);
            if until != Instant::NEVER {
                self.foresee(until, Event::Expired(id));
            }
        }
        false
    }

    fn on_expired(&mut self, id: u32) {
        let decode = self.requests[id as usize].decode;
        let held = &mut self.decode[decode as usize].held;
        if let Some(place) = held.iter().position(|&other| other == id) {
            held.remove(place);
            self.refuse_late(id);
        }
    }

    fn refuse_late(&mut self, id: u32) {
        let run = &self.requests[id as usize];
        self.occupancy.on_left(run.decode, run.ask.id);
        self.out.wasted_prefill_s += self.out.served[id as usize].prefill;
        let views = (0..self.setup.decode).zip(0..).map(|(_, node)| self.occupancy.view_now(node));
        let view = views.min_by_key(|view| (view.batch, view.context)).unwrap_or_default();
        let retry_after = self.admission.retry_late(view, &self.setup.profile);
        self.refuse(id, retry_after, Fate::RejectedLate);
    }

    fn join(&mut self, id: u32) {
        let run = &self.requests[id as usize];
        let node = &mut self.decode[run.decode as usize];
        *node.deadlines.entry(run.ask.slo.tbt).or_default() += 1;
        node.batch.join(Joining { id, tokens: run.ask.tokens, output: run.output - 1 });
        if node.step.is_none() {
            let decode = run.decode;
            self.begin_step(decode);
        }
    }

    fn begin_step(&mut self, node: u32) {
        let Self { decode, requests, occupancy, band, out, now, .. } = self;
        let decode = &mut decode[node as usize];
        let steps = decode.batch.steps();
        let view = decode.batch.begin(|id, step| {
            let run = &mut requests[id as usize];
            (run.step, run.joined) = (step, *now);
            run.measure(*now, &mut out.served[id as usize], band);
            occupancy.on_steps(node, steps);
            occupancy.on_joined(node, run.ask.id, *now);
        });
        decode.step = None;
        if view.batch > 0 {
            let noise = factor(&mut self.noise, self.setup.decode_noise);
            let took = span(self.setup.profile.decode.seconds(view.batch, view.context) * noise);
            decode.step = Some(took);
            self.foresee(self.now + took, Event::Step(node));
        }
    }

    fn on_step(&mut self, node: u32) {
        let decode = &mut self.decode[node as usize];
        let Some(took) = decode.step else { return };
        decode.batch.end(took);
        while let Some(id) = self.decode[node as usize].batch.ended() {
            let run = &self.requests[id as usize];
            let DecodeNode { batch, deadlines, .. } = &mut self.decode[node as usize];
            let tbt = batch.tbt(run.step, None);
            batch.on_left(run.ask.tokens, run.output - 1);
            let left = deadlines.get_mut(&run.ask.slo.tbt).map_or(0, |count| {
                *count -= 1;
                *count
            });
            if left == 0 {
                deadlines.remove(&run.ask.slo.tbt);
            }
            self.finish(id, tbt);
        }
        // Whoever was held may join; one with little context passes one with much that still does not fit.
        let mut place = 0;
        while let Some(&id) = self.decode[node as usize].held.get(place) {
            if self.at_door(id) {
                self.decode[node as usize].held.remove(place);
            } else {
                place += 1;
            }
        }
        self.begin_step(node);
    }

    fn finish(&mut self, id: u32, tbt: Duration) {
        let run = &self.requests[id as usize];
        let row = &mut self.out.served[id as usize];
        (row.ttft, row.tbt) = (run.joined.since(row.at), tbt);
        let effective = row.ttft <= run.ask.slo.ttft && tbt <= run.ask.slo.tbt;
        row.fate = if effective { Fate::Effective } else { Fate::Missed };
        self.occupancy.on_left(run.decode, run.ask.id);
        let lasted = if run.output > 1 { self.now.since(run.joined) } else { Duration::ZERO };
        self.admission.on_ended(self.now, run.output, run.ask.hint, lasted);
        if effective {
            self.out.goodput_tokens += u64::from(run.output);
            let cost = self.setup.profile.prefill.seconds(run.work) + self.people.decode_cost(run.output);
            if let Some(tenant) = self.out.tenants.get_mut(run.ask.tenant as usize) {
                tenant.served += cost;
            }
        }
    }
}

impl Run {
    /// Its first token is out.
    fn measure(&self, now: Instant, row: &mut Served, band: &mut Band) {
        let seconds = now.since(row.at).as_secs_f64();
        row.covered = Some(self.predicted.covers(seconds));
        band.on_measured(self.predicted, seconds);
    }

    /// It is served, by these.
    fn on_placed(&mut self, chosen: &Candidate, decode: u32, predicted: Interval, favoured: bool) {
        (self.node, self.decode, self.work, self.predicted) = (chosen.instance, decode, chosen.work(), predicted);
        self.rank += u16::from(favoured);
    }

    fn new(ask: Ask, output: u32, tries: u32) -> Self {
        Self {
            ask,
            output,
            node: 0,
            decode: 0,
            work: Work::default(),
            predicted: Interval { low: 0.0, expected: 0.0, high: 0.0 },
            after: None,
            loaded: true,
            computed: false,
            streamed: output <= 1,
            held: false,
            rank: u16::from(ask.priority) * 2,
            prefilled: Instant::ZERO,
            joined: Instant::ZERO,
            step: 0,
            tries,
        }
    }
}

/// Seconds of a prompt's prefill if all leading blocks that came before are cached; notes its own.
pub(super) fn least(profile: &Profile, blocks: &[u64], tokens: u32, seen: &mut [bool]) -> f64 {
    let at = |block: u64| usize::try_from(block).expect("blocks of a trace index memory");
    let known = blocks.iter().take_while(|&&block| seen[at(block)]).count();
    blocks.iter().for_each(|&block| seen[at(block)] = true);
    let known = u32::try_from(known).unwrap_or(u32::MAX).saturating_mul(profile.block_tokens);
    profile.prefill.seconds(Work::of_prompt(tokens, known))
}

/// A factor around 1 with that standard deviation, at least a fifth.
pub(super) fn factor(random: &mut Random, deviation: f64) -> f64 {
    if deviation > 0.0 { (1.0 + deviation * normal(random)).max(0.2) } else { 1.0 }
}

/// A standard normal number (Box and Muller).
pub(super) fn normal(random: &mut Random) -> f64 {
    let radius = libm::sqrt(2.0 * random.exponential());
    radius * libm::cos(2.0 * core::f64::consts::PI * random.unit())
}

pub(super) fn span(seconds: f64) -> Duration {
    Duration::from_nanos(nanos(seconds * 1e9))
}
