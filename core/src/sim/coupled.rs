//! Instances that both compute prompts and decode, as vLLM 0.5.1 does: what disaggregation is compared with.
//!
//! An instance works in iterations. A plain one computes a whole prompt whenever one waits and has room, while its batch
//! stands still; else it does a decode step. With chunked prefill an iteration is a step and a chunk of a prompt together.
//! Everybody is admitted.
//!
//! Requests are placed by [`Setup::placement`]. A policy that knows prefixes or loads counts what a cache-aware router of
//! coupled instances has to: the line, the prefill after hits, and what an answer of mean length takes in the batch that will be
//! there (those who wait are part of it). Nothing is pulled.

use alloc::collections::BinaryHeap;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;

use super::batch::{Batch, Joining};
use super::cluster::{factor, least, span};
use super::memory::Memory;
use super::outcome::{Fate, Outcome, Served};
use super::people::{People, Person};
use super::setup::{Baseline, Setup};
use super::trace::Trace;
use crate::random::Random;
use crate::sched::admission::Slo;
use crate::sched::cost::Work;
use crate::sched::forecast::Survival;
use crate::sched::placement::{self, Policy, PrefillView, Prompt, place_prefill};
use crate::sched::queue::{Line, Waiting};
use crate::time::{Duration, Instant};

struct Run {
    node: u32,
    work: Work,
    slo: Slo,
    first: Instant,
    step: u64,
    first_gap: Duration,
}

#[derive(Default)]
struct Node {
    line: Line,
    batch: Batch,
    /// The prompt that is being computed, and how many of its tokens are done.
    computing: Option<(u32, u32)>,
    /// Prompts in the line and the one that is being computed, and their tokens.
    waiting: (u32, u64),
    /// Decodes in this iteration.
    stepping: bool,
    busy: bool,
    /// When the last step ended: gaps count from there.
    stepped: Instant,
    /// Requests whose first gap ends with this step.
    fresh: Vec<u32>,
}

pub(super) struct Coupled<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    placement: placement::Options,
    now: Instant,
    events: BinaryHeap<Reverse<(Instant, u64, u32)>>,
    foreseen: u64,
    nodes: Vec<Node>,
    memory: Memory,
    noise: Random,
    people: People,
    /// How long answers are, of those that ended.
    answers: Survival,
    seen: Vec<bool>,
    requests: Vec<Run>,
    matched: Vec<u32>,
    out: Outcome,
}

impl<'a> Coupled<'a> {
    pub(super) fn new(trace: &'a Trace, setup: &'a Setup) -> Self {
        let mut placement = setup.placement;
        if matches!(placement.policy, Policy::MooncakeFast25 | Policy::MooncakeArxiv | Policy::Millpond) {
            placement.policy = Policy::LocalPrefix;
        }
        let capacity = setup.cache_blocks.unwrap_or(u32::MAX);
        let people = People::new(trace, setup);
        let bound = people.length_blind_bound(trace, setup);
        Self {
            trace,
            setup,
            placement,
            now: Instant::ZERO,
            events: BinaryHeap::new(),
            foreseen: 0,
            nodes: (0..setup.coupled).map(|_| Node::default()).collect(),
            memory: Memory::new(setup.coupled, capacity, trace.distinct_blocks(), setup.evict),
            noise: Random::new(setup.seed ^ 0x6e6f_6973_6500),
            people,
            answers: Survival::default(),
            seen: vec![false; trace.distinct_blocks() as usize],
            requests: Vec::with_capacity(trace.requests().len()),
            matched: vec![0; setup.coupled],
            out: Outcome { by_prefill: vec![0; setup.coupled], length_blind_bound: bound, ..Outcome::default() },
        }
    }

    pub(super) fn run(mut self) -> Outcome {
        let arrivals = self.trace.requests();
        let mut next = 0;
        loop {
            let event = self.events.peek().map(|Reverse((at, ..))| *at);
            match (arrivals.get(next), event) {
                (Some(request), event) if event.is_none_or(|at| request.at < at) => {
                    self.now = request.at;
                    self.on_arrival(u32::try_from(next).expect("requests are numbered with 32 bits"));
                    next += 1;
                }
                (_, Some(_)) => {
                    let Some(Reverse((at, _, node))) = self.events.pop() else { break };
                    self.now = at;
                    self.on_iteration(node);
                    self.begin(node);
                }
                (_, None) => break,
            }
        }
        self.out.ended = self.now;
        self.out
    }

    fn on_arrival(&mut self, id: u32) {
        let request = &self.trace.requests()[id as usize];
        let blocks = self.trace.blocks_of(request);
        let keeps = self.setup.baseline == Baseline::PrefixCaching;
        if keeps {
            self.memory.matches(self.now, blocks, &mut self.matched);
        }
        let rank = self.now.as_nanos();
        let Person { tenant, priority, slo, .. } = self.people.next(request.output_tokens);
        let (decode, answer) = (&self.setup.profile.decode, self.answers.mean(None));
        let views = self.nodes.iter().zip(&self.matched).map(|(node, &matched)| {
            let (batch, waiting) = (node.batch.view(), node.waiting);
            let context = batch.context + waiting.1 + u64::from(request.input_tokens);
            let decoding = span(answer * decode.seconds(batch.batch + waiting.0 + 1, context));
            PrefillView { wait: node.line.ahead(self.now, rank).wait + decoding, matched, ..PrefillView::default() }
        });
        let views: Vec<PrefillView> = views.collect();
        let prompt = Prompt { tokens: request.input_tokens, turn: u64::from(id) };
        let placed = place_prefill(&self.placement, &self.setup.profile, prompt, &views, &mut Vec::new());
        let chosen = placed.expect("no simulated node is down").chosen;
        let node = chosen.instance;
        if keeps {
            self.memory.admit(self.now, node, blocks, id, self.now);
        }
        self.out.by_prefill[node as usize] += 1;
        self.out.served.push(Served {
            at: self.now,
            input: request.input_tokens,
            output: request.output_tokens,
            reused: chosen.reused,
            prefill_least: least(&self.setup.profile, blocks, request.input_tokens, &mut self.seen),
            tenant,
            priority,
            ..Served::default()
        });
        let unknown = Instant::ZERO;
        self.requests.push(Run { node, work: chosen.work(), slo, first: unknown, step: 0, first_gap: Duration::ZERO });
        let waiting = Waiting { id: u64::from(id), rank, cost: chosen.prefill };
        let target = &mut self.nodes[node as usize];
        target.line.push(waiting);
        target.waiting = (target.waiting.0 + 1, target.waiting.1 + u64::from(request.input_tokens));
        if !self.nodes[node as usize].busy {
            self.begin(node);
        }
    }

    /// Begins the next iteration, if there is anything to do.
    fn begin(&mut self, number: u32) {
        let (profile, chunked) = (&self.setup.profile, self.setup.baseline == Baseline::ChunkedPrefill);
        let node = &mut self.nodes[number as usize];
        if node.computing.is_none() {
            let batch = node.batch.view();
            let requests = &self.requests;
            let room = |waiting: &Waiting| {
                let tokens = requests[usize::try_from(waiting.id).expect("requests index memory")].work.total();
                let has_place = self.setup.together.is_none_or(|most| batch.batch < most);
                batch.batch == 0 || has_place && batch.context + u64::from(tokens) <= profile.decode_tokens_max
            };
            // First come, first served: who has no room keeps the others waiting.
            let mut first = true;
            let taken = node.line.take(|waiting| core::mem::take(&mut first) && room(waiting));
            node.computing =
                taken.map(|taken| (u32::try_from(taken.id).expect("requests are numbered with 32 bits"), 0));
        }
        let (requests, fresh) = (&mut self.requests, &mut node.fresh);
        node.stepping = node.computing.is_none() || chunked;
        let mut seconds = 0.0;
        if node.stepping {
            let view = node.batch.begin(|id, step| {
                requests[id as usize].step = step;
                fresh.push(id);
            });
            node.stepping = view.batch > 0;
            if view.batch > 0 {
                seconds +=
                    profile.decode.seconds(view.batch, view.context) * factor(&mut self.noise, self.setup.decode_noise);
            }
        }
        if let Some((id, done)) = node.computing {
            let work = self.requests[id as usize].work;
            let new = if chunked { self.setup.chunk.min(work.new - done) } else { work.new };
            let part = profile.prefill.seconds(Work { new, prefix: work.prefix + done });
            let fixed = if done > 0 { profile.prefill.fixed } else { 0.0 };
            let took = (part - fixed) * factor(&mut self.noise, self.setup.prefill_noise);
            self.out.served[id as usize].prefill += took;
            node.computing = Some((id, done + new));
            seconds += took;
        }
        node.busy = node.computing.is_some() || node.stepping;
        if node.busy {
            let ends = self.now + span(seconds);
            node.line.on_busy(ends);
            self.events.push(Reverse((ends, self.foreseen, number)));
            self.foreseen += 1;
        }
    }

    fn on_iteration(&mut self, number: u32) {
        let node = &mut self.nodes[number as usize];
        if node.stepping {
            node.batch.end(self.now.since(node.stepped));
            node.stepped = self.now;
            for id in node.fresh.drain(..) {
                self.requests[id as usize].first_gap = self.now.since(self.requests[id as usize].first);
            }
            while let Some(id) = self.nodes[number as usize].batch.ended() {
                self.finish(id);
            }
        }
        let node = &mut self.nodes[number as usize];
        let Some((id, done)) = node.computing else { return };
        let run = &mut self.requests[id as usize];
        if done < run.work.new {
            return;
        }
        node.computing = None;
        run.first = self.now;
        let request = &self.trace.requests()[id as usize];
        node.waiting = (node.waiting.0 - 1, node.waiting.1 - u64::from(request.input_tokens));
        self.memory.unpin(self.now, number, self.trace.blocks_of(request), id);
        if node.batch.view().batch == 0 {
            node.stepped = self.now;
        }
        if request.output_tokens > 1 {
            node.batch.join(Joining { id, tokens: request.input_tokens, output: request.output_tokens - 1 });
        } else {
            self.end(id, Duration::ZERO);
        }
    }

    fn finish(&mut self, id: u32) {
        let run = &self.requests[id as usize];
        let batch = &mut self.nodes[run.node as usize].batch;
        let tbt = batch.tbt(run.step, Some(run.first_gap));
        let request = &self.trace.requests()[id as usize];
        batch.on_left(request.input_tokens, request.output_tokens - 1);
        self.end(id, tbt);
    }

    fn end(&mut self, id: u32, tbt: Duration) {
        let (row, slo) = (&mut self.out.served[id as usize], self.requests[id as usize].slo);
        self.answers.on_ended(row.output, None);
        (row.ttft, row.tbt) = (self.requests[id as usize].first.since(row.at), tbt);
        let effective = row.ttft <= slo.ttft && tbt <= slo.tbt;
        row.fate = if effective { Fate::Effective } else { Fate::Missed };
        if effective {
            self.out.goodput_tokens += u64::from(row.output);
        }
    }
}
