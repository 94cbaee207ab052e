//! The scheduler as one machine: a router tells it what happens, and gets decisions.
//!
//! It keeps what placement and admission have to know: a line per prefill instance as far as it was sent there, the blocks
//! that each is believed to have ([`BlockCache`], [`Index`]) unless the router follows a store and says what that has, who is
//! on each decode instance, how long answers last, how far predictions were off. It sends nothing and knows no addresses: instances are numbers. The same inputs in the same order
//! give the same decisions, so a log of its inputs replays exactly.
//!
//! Whether its decode instance computes a prompt itself is chosen and recorded for each ([`super::colocate`]); as
//! long as it does, the prompt is in no line.
//!
//! Without prefill instances the decode instances compute prompts themselves: each is then also the prefill instance of the
//! same number, and a request is placed by its prompt.
//!
//! A refused request was told when to come back. If it does, under the same name and not before, it is served as if it had
//! the next higher priority: it was promised a place.
//!
//! Invariants: a request that was admitted holds a place in one line or computes, and a place at one decode instance, until
//! [`Conductor::on_prefilled`] and [`Conductor::on_left`]; nothing is held for one that was refused.

#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::admission::{self, Admission, Ask, Outlook, Shares, Slo, Verdict};
use super::block_cache::{BlockCache, Changes};
use super::colocate::{Ability, Choice, DecodeSide, Elsewhere};
use super::cost::{Band, Decode, Interval, Profile, Refined, Work};
use super::forecast::{Occupancy, Resident, State};
use super::index::{Change, Event, Index, Limits, Matches};
use super::placement::{self, Candidate, DecodeView, Placed, PrefillView, Prompt, place_decode};
use super::queue::{Line, Order, Waiting, nanos};
use super::record::{Log, Record};
use crate::hash::RouteHash;
use crate::prefix::Holder;
use crate::time::{Duration, Instant};

/// Instances of a kind at most.
pub const INSTANCES_MAX: usize = 192;
/// Words of a set of holders: room for [`INSTANCES_MAX`] and lives that ended.
const WORDS: usize = 4;
/// Share of first tokens that the predicted interval is to cover.
const COVERAGE: f64 = 0.9;
/// Promises that are kept in mind.
const PROMISES_MAX: usize = 4_096;
/// How long after its time a promise still holds.
const PROMISE_LASTS: Duration = Duration::from_secs(30);
/// Answers over which the pace of decode is taken.
const PACE_MEMORY: f64 = 32.0;

/// What a conductor works with.
///
/// ```
/// use millpond_core::sched::conductor::Setup;
/// let setup = Setup::new(8, 8);
/// assert_eq!(setup.profile.block_tokens, 512);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Setup {
    /// Prefill instances; 0: decode instances compute prompts.
    pub prefill: usize,
    /// Decode instances, at least one.
    pub decode: usize,
    /// Whether those compute prompts that they are sent without their KV.
    pub ability: Ability,
    /// What instances cost.
    pub profile: Profile,
    /// Whether the costs are refined by what is measured.
    pub learning: Learning,
    /// Who serves a request.
    pub placement: placement::Options,
    /// In which order prefill instances serve their lines.
    pub order: Order,
    /// Whether a request is served.
    pub admission: admission::Options,
    /// Blocks that each prefill instance is believed to keep.
    pub cache_blocks: u32,
    /// Whose turn is first among those that cost the same: routers over the same instances begin with different ones.
    pub first_turn: u64,
    /// The tenants' weights, each above 0; none: everybody is one tenant, whom nobody is favoured over.
    pub tenants: Vec<f64>,
}

/// Whether measured times change the profile.
///
/// ```
/// assert_eq!(millpond_core::sched::conductor::Learning::default(), millpond_core::sched::conductor::Learning::On);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Learning {
    /// They do: the profile is where it starts from.
    #[default]
    On,
    /// They do not: the profile is exact.
    Off,
}

impl Setup {
    /// Of so many instances of the default profile, by `millpond`'s policies.
    #[must_use]
    pub fn new(prefill: usize, decode: usize) -> Self {
        let profile = Profile::default();
        Self {
            prefill,
            decode,
            ability: Ability::Able,
            profile,
            learning: Learning::On,
            placement: placement::Options::default(),
            order: Order::Fifo,
            admission: admission::Options::default(),
            cache_blocks: profile.cache_blocks,
            first_turn: 0,
            tenants: Vec::new(),
        }
    }
}

/// A request that arrives, or is tried again.
///
/// Example: [`Conductor`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arrival {
    /// The router's number for it: unused, and used until it left.
    pub id: u64,
    /// The client's name for it, hashed: who was refused comes back under the same one.
    pub name: u64,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// The prompt's whole blocks.
    pub blocks: Vec<RouteHash>,
    /// What a store that all instances load from has of them; `None`: there is none that is followed, and an instance is
    /// believed to have what it was sent.
    pub stored: Option<Stored>,
    /// Tokens of its answer, if somebody has an idea.
    pub hint: Option<u32>,
    /// Its deadlines, from now on.
    pub slo: Slo,
    /// Whom it is for: an index of [`Setup::tenants`].
    pub tenant: u32,
    /// Those of higher priority are served first, and longer.
    pub priority: u8,
    /// Whether it was admitted before and is placed again, because a node failed it: then it is not refused.
    pub is_retry: bool,
    /// Prefill instances that are not to be used; if none is left, all are.
    pub prefill_down: Vec<u32>,
    /// Decode instances that are not to be used; if none is left, all are.
    pub decode_down: Vec<u32>,
    /// Steps that each decode instance has done, as far as is known.
    pub steps: Vec<u64>,
}

/// What a store has of a prompt, as far as its events were heard.
///
/// ```
/// use millpond_core::sched::conductor::{Arrival, Conductor, Setup, Stored};
/// use millpond_core::time::Instant;
/// let mut conductor = Conductor::new(Setup::new(2, 2));
/// let stored = Some(Stored { blocks: 10, version: 7 });
/// let arrival = Arrival { id: 1, tokens: 6_000, stored, ..Arrival::default() };
/// assert_eq!(conductor.on_arrival(Instant::ZERO, &arrival).placed.chosen.reused, 5_120);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stored {
    /// Leading blocks of the prompt that are there.
    pub blocks: u32,
    /// The last event that this rests on, for the record.
    pub version: u64,
}

/// What is to be done with a request.
///
/// Example: [`Conductor`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Whether it is served.
    pub verdict: Verdict,
    /// The prefill instance and how much is reused.
    pub placed: Placed,
    /// The decode instance.
    pub decode: u32,
    /// Whether that computes the prompt, and not the instance in `placed`.
    pub is_colocated: bool,
    /// Its rank in the line of the prefill instance.
    pub rank: u64,
    /// Whether it was promised a place.
    pub was_promised: bool,
    /// Whether its tenant asks for no more than its fair share while not all can be served.
    pub is_favoured: bool,
    /// Predicted seconds to the first token.
    pub ttft: Interval,
    /// Predicted seconds between tokens, when it joins.
    pub tbt: f64,
}

/// What a prefill was measured to take.
///
/// Example: [`Conductor`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// What was computed.
    pub work: Work,
    /// How long that took.
    pub seconds: f64,
}

/// The machine.
///
/// ```
/// use millpond_core::hash::RouteHash;
/// use millpond_core::sched::admission::Verdict;
/// use millpond_core::sched::conductor::{Arrival, Conductor, Measured, Setup};
/// use millpond_core::sched::cost::Work;
/// use millpond_core::time::Instant;
/// let mut conductor = Conductor::new(Setup::new(2, 2));
/// let blocks: Vec<_> = (0..10).map(RouteHash).collect();
/// let arrival = Arrival { id: 1, tokens: 6_000, blocks, ..Arrival::default() };
/// let first = conductor.on_arrival(Instant::ZERO, &arrival);
/// assert_eq!((first.verdict, first.placed.chosen.reused), (Verdict::Admit, 0));
/// conductor.on_prefilled(Instant::from_nanos(7), 1, Some(Measured { work: Work { new: 6_000, prefix: 0 }, seconds: 0.7 }));
/// conductor.on_joined(Instant::from_nanos(8), 1, 0);
/// conductor.on_left(Instant::from_nanos(9), 1, Some(20));
/// // Its blocks are where it was computed.
/// let second = conductor.on_arrival(Instant::from_nanos(10), &Arrival { id: 2, ..arrival });
/// assert_eq!((second.placed.chosen.instance, second.placed.chosen.reused), (first.placed.chosen.instance, 5_120));
/// ```
pub struct Conductor {
    setup: Setup,
    /// The setup's, as it was refined.
    profile: Profile,
    refined: Refined,
    /// Measured gaps between tokens over predicted ones.
    pace: f64,
    lanes: Vec<Lane>,
    index: Index<RouteHash, WORDS>,
    matches: Matches<WORDS>,
    changes: Changes,
    occupancy: Occupancy,
    decode_down: Vec<bool>,
    /// Prompts that each decode instance computes although there are prefill instances.
    beside: Vec<Beside>,
    /// Steps of each decode instance: who tells of them may be overtaken by others who know of more.
    steps: Vec<u64>,
    admission: Admission,
    shares: Shares,
    band: Band,
    log: Log,
    record: Record,
    turn: u64,
    requests: BTreeMap<u64, Request>,
    promises: BTreeMap<u64, Instant>,
    promised: VecDeque<u64>,
}

/// What is known of a prefill instance.
struct Lane {
    line: Line,
    computes: Option<u64>,
    cache: BlockCache,
    /// Its life and its last event, for the index.
    life: u64,
    number: u64,
}

/// Prompts that a decode instance computes beside its batch.
#[derive(Clone, Copy, Default)]
struct Beside {
    count: u32,
    /// When they are done.
    until: Instant,
}

struct Request {
    arrived: Instant,
    tokens: u32,
    hint: Option<u32>,
    blocks: Vec<RouteHash>,
    /// Whose line it is in; `None` if its decode instance computes it beside its batch.
    prefill: Option<u32>,
    decode: u32,
    predicted: Interval,
    is_prefilled: bool,
    joined: Option<Instant>,
}

impl core::fmt::Debug for Conductor {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Conductor").field("requests", &self.requests.len()).finish_non_exhaustive()
    }
}

impl Conductor {
    /// A conductor of instances that have nothing to do.
    ///
    /// # Panics
    /// Without a decode instance, or with more than [`INSTANCES_MAX`] of a kind.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        assert!(setup.decode > 0, "requests need a decode instance");
        assert!(setup.prefill.max(setup.decode) <= INSTANCES_MAX, "at most {INSTANCES_MAX} instances of a kind");
        let count = if setup.prefill == 0 { setup.decode } else { setup.prefill };
        let lane = || Lane {
            line: Line::default(),
            computes: None,
            cache: BlockCache::new(setup.cache_blocks),
            life: 1,
            number: 0,
        };
        let blocks_max = u32::try_from(count).unwrap_or(u32::MAX).saturating_mul(setup.cache_blocks).clamp(64, 1 << 20);
        let holders_max = u16::try_from(count).unwrap_or(u16::MAX);
        let limits = Limits { holders_max, blocks_max, sets_max: blocks_max / 8, ..Limits::default() };
        let index = Index::new(limits, 0x6d69_6c6c_706f_6e64);
        Self {
            profile: setup.profile,
            refined: Refined::new(setup.profile.prefill),
            pace: 1.0,
            lanes: (0..count).map(|_| lane()).collect(),
            matches: index.new_matches(),
            index,
            changes: Changes::default(),
            occupancy: Occupancy::new(setup.decode),
            decode_down: alloc::vec![false; setup.decode],
            beside: alloc::vec![Beside::default(); setup.decode],
            steps: alloc::vec![0; setup.decode],
            admission: Admission::new(setup.admission),
            shares: Shares::new(&setup.tenants),
            band: Band::new(COVERAGE),
            log: Log::new(0),
            record: Record::default(),
            turn: setup.first_turn,
            requests: BTreeMap::new(),
            promises: BTreeMap::new(),
            promised: VecDeque::new(),
            setup,
        }
    }

    /// What it was set up with.
    #[must_use]
    pub const fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The costs, as they were refined.
    #[must_use]
    pub const fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The last decision with all that it rests on.
    #[must_use]
    pub const fn record(&self) -> &Record {
        &self.record
    }

    /// The hash over all decisions.
    #[must_use]
    pub const fn hash(&self) -> u64 {
        self.log.hash()
    }

    /// How many decisions there were.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.log.count()
    }

    /// How many requests wait for each prefill instance or are computed there.
    pub fn lines(&self) -> impl Iterator<Item = usize> + '_ {
        self.lanes.iter().map(|lane| lane.line.len() + usize::from(lane.computes.is_some()))
    }

    /// The requests of a decode instance, those on their way to it among them.
    #[must_use]
    pub fn batch(&self, decode: u32) -> DecodeView {
        self.occupancy.view(decode)
    }

    /// Decides about a request. O(instances + blocks + requests on decode instances).
    pub fn on_arrival(&mut self, now: Instant, arrival: &Arrival) -> Decision {
        self.note_states(arrival);
        let prompt = Prompt { tokens: arrival.tokens, turn: self.turn };
        self.turn = self.turn.wrapping_add(1);
        let version = arrival.stored.map_or(self.index.totals().version, |stored| stored.version);
        self.record.begin(now, arrival.id, prompt, version);
        let rank = self.view_prefill(now, arrival);
        let placed = self.record.place(&self.setup.placement, &self.profile);
        let placed = placed.expect("some instance is always up: see note_states");
        let ttft = self.band.interval(placed.chosen.ttft.as_secs_f64());
        let was_promised = self.was_promised(now, arrival.name);
        let priority = arrival.priority.saturating_add(u8::from(was_promised));
        let Arrival { id, tokens, hint, slo, tenant, .. } = *arrival;
        let ask = Ask { id, tokens, hint, slo, tenant, priority };
        let prefill = placed.chosen.prefill.as_secs_f64();
        let outlook = Outlook { ttft, prefill, occupancy: &self.occupancy, profile: &self.profile };
        let is_favoured = self.shares.favours(tenant);
        let mut answer = self.admission.on_arrival(now, &ask, outlook, &self.shares);
        if self.setup.prefill == 0 {
            answer.decode = Some(placed.chosen.instance);
        }
        self.record.answer = Some(answer);
        let side = self.decode_side(now, arrival, &placed, answer.decode);
        let choice = self.record.colocate(&self.profile, side).expect("it was placed");
        let is_colocated = choice.reason.is_colocated();
        let seconds =
            if is_colocated && self.setup.prefill > 0 { choice.colocated.as_secs_f64() } else { ttft.expected };
        let ttft = self.band.interval(seconds + answer.door.as_secs_f64());
        self.log.push(&mut self.record);
        let verdict = if arrival.is_retry { Verdict::Admit } else { answer.verdict };
        let decode = side.instance;
        let (cost, is_new) = (self.cost(&ask, prefill), !arrival.is_retry);
        if is_new {
            self.shares.on_asked(now, tenant, cost);
        }
        match verdict {
            Verdict::Admit => {
                if is_new {
                    self.shares.on_served(now, tenant, cost);
                }
                let resident = Resident { id, tokens, hint, tbt: slo.tbt, join: answer.join, joined: None };
                self.occupancy.reserve(decode, resident);
                self.dispatch(now, arrival, &placed, rank, ttft, &choice);
            }
            Verdict::Refuse { retry_after, .. } => self.promise(arrival.name, now + retry_after),
        }
        Decision {
            verdict,
            placed,
            decode,
            is_colocated,
            rank,
            was_promised,
            is_favoured,
            ttft,
            tbt: answer.step.seconds,
        }
    }

    /// What is known of the decode instance that a request goes to.
    fn decode_side(&self, now: Instant, arrival: &Arrival, placed: &Placed, decode: Option<u32>) -> DecodeSide {
        let instance = decode.unwrap_or_else(|| self.roomiest(arrival.tokens));
        let view = self.occupancy.view(instance);
        let elsewhere = match self.setup.prefill {
            0 => Elsewhere::Nobody,
            count if arrival.prefill_down.len() >= count => Elsewhere::Down,
            _ => Elsewhere::Up,
        };
        let reused = match (elsewhere, arrival.stored) {
            (Elsewhere::Nobody, _) => placed.chosen.reused,
            // What the store has every instance loads; beside it a decode instance keeps nothing.
            (_, stored) => {
                stored.map_or(0, |stored| stored.blocks).min(arrival.tokens / self.profile.block_tokens)
                    * self.profile.block_tokens
            }
        };
        DecodeSide {
            instance,
            ability: self.setup.ability,
            elsewhere,
            reused,
            wait: match elsewhere {
                Elsewhere::Nobody => placed.chosen.wait,
                _ => self.beside[instance as usize].until.since(now),
            },
            batch: view.batch,
            context: view.context,
            tbt: self.occupancy.strictest(instance),
            behind: self.record.prefill[placed.chosen.instance as usize].behind,
        }
    }

    /// Seconds of instances that a request takes: its prefill after hits, and what it adds to the steps of its answer.
    fn cost(&self, ask: &Ask, prefill: f64) -> f64 {
        let Decode { per_request, per_token, .. } = self.profile.decode;
        prefill + (per_request + per_token * f64::from(ask.tokens)) * self.admission.survival().mean(ask.hint)
    }

    /// The decode instance whose step would be shortest, whether or not it has room.
    fn roomiest(&self, tokens: u32) -> u32 {
        let views: Vec<DecodeView> = (0..self.setup.decode).zip(0..).map(|(_, at)| self.occupancy.view(at)).collect();
        let roomy = Profile { decode_tokens_max: u64::MAX >> 1, ..self.profile };
        place_decode(&roomy, tokens, &views).map_or(0, |(instance, _)| instance)
    }

    /// Who is up. If nobody of a kind is, all count as up: whoever is sent there waits for a restart.
    fn note_states(&mut self, arrival: &Arrival) {
        for (at, &steps) in (0_u32..).zip(&arrival.steps) {
            self.on_steps(at, steps);
        }
        let all = arrival.decode_down.len() >= self.setup.decode;
        for (at, was_down) in (0_u32..).zip(&mut self.decode_down) {
            let is_down = !all && arrival.decode_down.contains(&at);
            if is_down != *was_down {
                *was_down = is_down;
                self.occupancy.on_state(at, if is_down { State::Down } else { State::Up });
                self.occupancy.on_steps(at, self.steps[at as usize]);
            }
        }
    }

    /// A decode instance has done at least so many steps.
    fn on_steps(&mut self, decode: u32, steps: u64) {
        if let Some(known) = self.steps.get_mut(decode as usize) {
            *known = (*known).max(steps);
            self.occupancy.on_steps(decode, *known);
        }
    }

    /// Puts what is known of each prefill instance into the record; the rank of the request in a line.
    fn view_prefill(&mut self, now: Instant, arrival: &Arrival) -> u64 {
        let profile = &self.profile;
        if arrival.stored.is_none() {
            self.index.matches(&arrival.blocks, &mut self.matches);
        }
        let best = arrival.stored.map_or_else(|| self.matches.longest(), |stored| stored.blocks);
        let best = best.min(arrival.tokens / profile.block_tokens);
        let shortest = profile.prefill.seconds(Work::of_prompt(arrival.tokens, best * profile.block_tokens));
        let rank = self.setup.order.rank(now, span(shortest));
        let down = if self.setup.prefill == 0 { &arrival.decode_down } else { &arrival.prefill_down };
        let all = down.len() >= self.lanes.len();
        for (at, lane) in (0_u16..).zip(&self.lanes) {
            let (matched, ready) = match arrival.stored {
                // All load from the store alike, and what it has is whole.
                Some(_) => (best, Duration::ZERO),
                None => {
                    let matched = self.matches.len_of(Holder(at));
                    (matched, lane.cache.ready(&arrival.blocks, matched).since(now))
                }
            };
            let ahead = lane.line.ahead(now, rank);
            self.record.prefill.push(PrefillView {
                down: !all && down.contains(&u32::from(at)),
                // What is still computed of its prefix has to be there first, whatever the ranks.
                wait: if matched > 0 { ahead.wait.max(ready) } else { ahead.wait },
                behind: ahead.behind,
                matched,
                ready,
                sending: 0,
                receiving: 0,
            });
        }
        rank
    }

    fn dispatch(
        &mut self,
        now: Instant,
        arrival: &Arrival,
        placed: &Placed,
        rank: u64,
        predicted: Interval,
        choice: &Choice,
    ) {
        let chosen = &placed.chosen;
        let DecodeSide { instance: decode, elsewhere, .. } = choice.side;
        let is_beside = choice.reason.is_colocated() && elsewhere != Elsewhere::Nobody;
        let request = Request {
            arrived: now,
            tokens: arrival.tokens,
            hint: arrival.hint,
            blocks: arrival.blocks.clone(),
            prefill: (!is_beside).then_some(chosen.instance),
            decode,
            predicted,
            is_prefilled: false,
            joined: None,
        };
        self.requests.insert(arrival.id, request);
        if is_beside {
            let beside = &mut self.beside[decode as usize];
            (beside.count, beside.until) = (beside.count + 1, now + choice.colocated);
            return;
        }
        let lane = &mut self.lanes[chosen.instance as usize];
        if arrival.stored.is_none() {
            lane.believe(now, arrival, chosen, &mut self.changes, &mut self.index);
        }
        lane.line.push(Waiting { id: arrival.id, rank, cost: chosen.prefill });
        lane.begin(now);
    }

    /// A request's prompt is computed; what that took, if it was told.
    pub fn on_prefilled(&mut self, now: Instant, id: u64, measured: Option<Measured>) {
        if let (Some(Measured { work, seconds }), Learning::On) = (measured, self.setup.learning) {
            self.refined.on_measured(work, seconds);
            self.profile.prefill = self.refined.model();
        }
        self.leave_line(now, id);
    }

    fn leave_line(&mut self, now: Instant, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if core::mem::replace(&mut request.is_prefilled, true) {
            return;
        }
        let Some(prefill) = request.prefill else {
            let beside = &mut self.beside[request.decode as usize];
            beside.count -= 1;
            if beside.count == 0 {
                beside.until = now;
            }
            return;
        };
        let lane = &mut self.lanes[prefill as usize];
        lane.cache.on_computed(now, &request.blocks, id);
        if lane.computes == Some(id) {
            lane.computes = None;
            lane.line.on_busy(now);
        } else {
            lane.line.take(|waiting| waiting.id == id);
        }
        lane.begin(now);
    }

    /// A request joined the batch of its decode instance, which had done so many steps.
    pub fn on_joined(&mut self, now: Instant, id: u64, steps: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if request.joined.replace(now).is_some() {
            return;
        }
        self.band.on_measured(request.predicted, now.since(request.arrived).as_secs_f64());
        let decode = request.decode;
        self.on_steps(decode, steps);
        self.occupancy.on_joined(decode, id, now);
    }

    /// A request is over: it ended after so many tokens, or (`None`) was given up, failed or was refused after all.
    pub fn on_left(&mut self, now: Instant, id: u64, tokens: Option<u32>) {
        self.leave_line(now, id);
        let Some(request) = self.requests.remove(&id) else { return };
        let batch = self.occupancy.view_now(request.decode);
        self.occupancy.on_left(request.decode, id);
        let (Some(tokens), Some(joined)) = (tokens, request.joined) else { return };
        let lasted = now.since(joined);
        self.admission.on_ended(now, tokens, request.hint, lasted);
        if self.setup.learning == Learning::On && tokens > 1 && batch.batch > 0 {
            let base = self.setup.profile.decode;
            let ratio = lasted.as_secs_f64() / f64::from(tokens - 1) / base.seconds(batch.batch, batch.context);
            self.pace += (ratio.clamp(1e-3, 1e3) - self.pace) / PACE_MEMORY;
            let scaled = |seconds: f64| seconds * self.pace;
            let decode = &mut self.profile.decode;
            (decode.fixed, decode.per_request) = (scaled(base.fixed), scaled(base.per_request));
            decode.per_token = scaled(base.per_token);
        }
    }

    /// A request that was admitted is refused by its decode instance after all; when to come back.
    pub fn on_late(&mut self, now: Instant, id: u64, name: u64) -> Duration {
        let tokens = self.requests.get(&id).map_or(0, |request| request.tokens);
        self.on_left(now, id, None);
        let hint = self.retry_hint(tokens);
        self.promise(name, now + hint);
        hint
    }

    fn retry_hint(&self, tokens: u32) -> Duration {
        let instance = self.roomiest(tokens);
        let view = self.occupancy.view_now(instance);
        self.admission.retry_late(view, &self.profile)
    }

    /// A prefill instance was restarted, or turned out to have nothing.
    pub fn on_cleared(&mut self, prefill: u32) {
        let Some(lane) = self.lanes.get_mut(prefill as usize) else { return };
        lane.cache.clear();
        (lane.life, lane.number) = (lane.life + 1, 0);
        let holder = Holder(u16::try_from(prefill).expect("instances are few"));
        self.index.on_position(holder, lane.life, 0);
    }

    fn promise(&mut self, name: u64, at: Instant) {
        if self.promises.insert(name, at).is_none() {
            self.promised.push_back(name);
        }
        if self.promised.len() > PROMISES_MAX
            && let Some(oldest) = self.promised.pop_front()
        {
            self.promises.remove(&oldest);
        }
    }

    fn was_promised(&mut self, now: Instant, name: u64) -> bool {
        let Some(&at) = self.promises.get(&name) else { return false };
        if now < at {
            return false;
        }
        self.promises.remove(&name);
        self.promised.retain(|other| *other != name);
        now.since(at) <= PROMISE_LASTS
    }
}

impl Lane {
    /// Whoever is sent a prompt will have its blocks.
    fn believe(
        &mut self,
        now: Instant,
        arrival: &Arrival,
        chosen: &Candidate,
        changes: &mut Changes,
        index: &mut Index<RouteHash, WORDS>,
    ) {
        self.cache.admit(now, &arrival.blocks, arrival.id, now + chosen.ttft, changes);
        let holder = Holder(u16::try_from(chosen.instance).expect("instances are few"));
        for change in [Change::Removed(&changes.removed), Change::Stored(&changes.stored)] {
            self.number += 1;
            index.on_event(&Event { holder, life: self.life, number: self.number, change });
        }
    }

    /// The next in the line is computed, if nobody is.
    fn begin(&mut self, now: Instant) {
        if self.computes.is_none()
            && let Some(next) = self.line.take(|_| true)
        {
            self.computes = Some(next.id);
            self.line.on_busy(now + next.cost);
        }
    }
}

fn span(seconds: f64) -> Duration {
    Duration::from_nanos(nanos(seconds * 1e9))
}
