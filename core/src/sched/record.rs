//! Decisions as they were taken: what was known, what was considered, what was chosen and why.
//!
//! A [`Record`] holds its own inputs, so it can be decided again: [`Record::replays`] does so and compares every bit. A
//! [`Log`] keeps the last ones and a hash over all there ever were: two runs with equal hashes took the same decisions in
//! the same order. Of an admission the figures and the verdict are replayed; how long a refused request is told to wait
//! depends on all refusals before it, and is hashed only.

use alloc::vec::Vec;

use super::admission::{Answer, Figures, Verdict};
use super::colocate::{self, DecodeSide};
use super::cost::Profile;
use super::placement::{Candidate, Options, Placed, PrefillView, Prompt, place_prefill};
use crate::time::{Duration, Instant};

/// One decision. Buffers are used again: [`Record::begin`] empties it.
///
/// ```
/// use millpond_core::sched::cost::Profile;
/// use millpond_core::sched::placement::{Options, PrefillView, Prompt};
/// use millpond_core::sched::record::Record;
/// use millpond_core::time::Instant;
/// let profile = Profile::default();
/// let mut record = Record::default();
/// record.begin(Instant::ZERO, 7, Prompt { tokens: 6_000, turn: 0 }, 1);
/// record.prefill.push(PrefillView::default());
/// assert!(record.place(&Options::default(), &profile).is_some());
/// assert!(record.replays(&profile));
/// record.prefill[0].matched = 3; // not what was known then
/// assert!(!record.replays(&profile));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// When it was taken.
    pub now: Instant,
    /// The request.
    pub id: u64,
    /// Its prompt.
    pub prompt: Prompt,
    /// The version of the prefix index that the matches come from.
    pub index_version: u64,
    /// How it was to be placed.
    pub options: Options,
    /// What was known of each prefill instance.
    pub prefill: Vec<PrefillView>,
    /// What was considered.
    pub candidates: Vec<Candidate>,
    /// What was chosen; `None` if all were down.
    pub placed: Option<Placed>,
    /// Whether it is served, and the decode instance.
    pub answer: Option<Answer>,
    /// Whether the decode instance computes the prompt, and why.
    pub colocation: Option<colocate::Choice>,
}

impl Record {
    /// Begins the record of a new decision.
    pub fn begin(&mut self, now: Instant, id: u64, prompt: Prompt, index_version: u64) {
        (self.now, self.id, self.prompt, self.index_version) = (now, id, prompt, index_version);
        self.prefill.clear();
        self.candidates.clear();
        (self.placed, self.answer, self.colocation) = (None, None, None);
    }

    /// Places the prompt among the instances that were put into [`Record::prefill`].
    pub fn place(&mut self, options: &Options, profile: &Profile) -> Option<Placed> {
        self.options = *options;
        self.placed = place_prefill(options, profile, self.prompt, &self.prefill, &mut self.candidates);
        self.placed
    }

    /// Chooses whether the decode instance of `side` computes the prompt; `None` where it was not placed.
    pub fn colocate(&mut self, profile: &Profile, side: DecodeSide) -> Option<colocate::Choice> {
        let placed = self.placed?;
        self.colocation = Some(colocate::choose(&self.options, profile, self.prompt, &placed.chosen, side));
        self.colocation
    }

    /// Whether the same inputs give the same decision. Allocates; not for the hot path.
    #[must_use]
    pub fn replays(&self, profile: &Profile) -> bool {
        let mut candidates = Vec::new();
        let placed = place_prefill(&self.options, profile, self.prompt, &self.prefill, &mut candidates);
        let judged = self.answer.is_none_or(|answer| match answer.verdict {
            Verdict::Admit => answer.figures.judge().is_none(),
            Verdict::Refuse { reason, .. } => answer.figures.judge() == Some(reason),
        });
        let chosen =
            |side| placed.map(|placed| colocate::choose(&self.options, profile, self.prompt, &placed.chosen, side));
        let colocated = self.colocation.is_none_or(|choice| chosen(choice.side) == Some(choice));
        placed == self.placed && candidates == self.candidates && judged && colocated
    }

    /// All of it, in one fixed order.
    fn encode(&self, out: &mut Vec<u8>) {
        let mut put = |value: u64| out.extend_from_slice(&value.to_le_bytes());
        let head = [self.now.as_nanos(), self.id, u64::from(self.prompt.tokens), self.prompt.turn, self.index_version];
        head.into_iter().for_each(&mut put);
        put(self.options.policy as u64);
        [self.options.threshold, self.options.push_back].map(f64::to_bits).into_iter().for_each(&mut put);
        put(u64::from(self.options.near.parts_per_thousand));
        put(self.options.near.slack);
        put(self.options.colocate as u64);
        for view in &self.prefill {
            put(u64::from(view.down) << 32 | u64::from(view.matched));
            put(u64::from(view.sending) << 32 | u64::from(view.receiving));
            [view.wait.as_nanos(), u64::from(view.behind), view.ready.as_nanos()].into_iter().for_each(&mut put);
        }
        self.candidates.iter().for_each(|candidate| encode_candidate(candidate, &mut put));
        if let Some(placed) = &self.placed {
            encode_candidate(&placed.chosen, &mut put);
            put(placed.reason as u64);
            put(placed.margin.map_or(u64::MAX, |margin| margin));
        }
        if let Some(answer) = &self.answer {
            let (reason, retry) = match answer.verdict {
                Verdict::Admit => (u64::MAX, Duration::ZERO),
                Verdict::Refuse { reason, retry_after } => (reason as u64, retry_after),
            };
            [reason, retry.as_nanos(), answer.join.as_nanos(), answer.door.as_nanos()].into_iter().for_each(&mut put);
            put(answer.decode.map_or(u64::MAX, u64::from));
            let Figures { late, slow, level, cost } = answer.figures;
            let step = answer.step;
            [step.batch, step.seconds, step.spread, late, slow, level].map(f64::to_bits).into_iter().for_each(&mut put);
            put(cost as u64);
        }
        if let Some(choice) = &self.colocation {
            encode_choice(choice, &mut put);
        }
    }
}

fn encode_candidate(candidate: &Candidate, put: &mut impl FnMut(u64)) {
    put(u64::from(candidate.instance) << 32 | u64::from(candidate.source.unwrap_or(u32::MAX)));
    put(u64::from(candidate.new) << 32 | u64::from(candidate.reused));
    put(u64::from(candidate.pulled));
    let spans = [candidate.wait, candidate.transfer, candidate.prefill, candidate.ttft];
    spans.map(Duration::as_nanos).into_iter().for_each(&mut *put);
    put(candidate.score);
}

fn encode_choice(choice: &colocate::Choice, put: &mut impl FnMut(u64)) {
    let colocate::Choice { side, reason, hop, apart, prefill, colocated, scores } = choice;
    put(u64::from(side.instance) << 32 | u64::from(side.reused));
    put((side.ability as u64) << 32 | side.elsewhere as u64);
    put(u64::from(side.batch) << 32 | u64::from(side.behind));
    put(side.context);
    put(*reason as u64);
    [side.wait, side.tbt, *hop, *apart, *prefill, *colocated].map(Duration::as_nanos).into_iter().for_each(&mut *put);
    scores.iter().copied().for_each(put);
}

/// The last decisions, and a hash over all.
///
/// ```
/// use millpond_core::sched::record::{Log, Record};
/// let (mut log, mut other) = (Log::new(2), Log::new(5));
/// for id in 0..3 {
///     log.push(&mut Record { id, ..Record::default() });
///     other.push(&mut Record { id, ..Record::default() });
/// }
/// assert_eq!((log.hash(), log.count()), (other.hash(), 3));
/// assert_eq!(log.records().map(|record| record.id).collect::<Vec<_>>(), [1, 2]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Log {
    hash: u64,
    count: u64,
    kept: Vec<Record>,
    keep: usize,
    bytes: Vec<u8>,
}

impl Log {
    /// Keeps the last `keep` records.
    #[must_use]
    pub const fn new(keep: usize) -> Self {
        Self { hash: 0, count: 0, kept: Vec::new(), keep, bytes: Vec::new() }
    }

    /// Adds a record, and leaves an old one in its place whose buffers can be used again.
    pub fn push(&mut self, record: &mut Record) {
        self.bytes.clear();
        record.encode(&mut self.bytes);
        self.hash = xxhash_rust::xxh3::xxh3_64_with_seed(&self.bytes, self.hash);
        if self.kept.len() < self.keep {
            self.kept.push(core::mem::take(record));
        } else if let Some(oldest) = self.oldest() {
            core::mem::swap(&mut self.kept[oldest], record);
        }
        self.count += 1;
    }

    /// The hash over all records.
    #[must_use]
    pub const fn hash(&self) -> u64 {
        self.hash
    }

    /// How many records there were.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The records that are kept, the oldest first.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        let oldest = if self.kept.len() < self.keep { 0 } else { self.oldest().unwrap_or(0) };
        self.kept[oldest..].iter().chain(&self.kept[..oldest])
    }

    fn oldest(&self) -> Option<usize> {
        usize::try_from(self.count.checked_rem(u64::try_from(self.keep).ok()?)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::admission::Reason;
    use crate::sched::colocate::{Ability, Colocate, Elsewhere};

    fn record() -> Record {
        let mut record = Record::default();
        record.begin(Instant::from_nanos(5), 1, Prompt { tokens: 9_000, turn: 3 }, 17);
        let busy = PrefillView { wait: Duration::from_secs(2), matched: 12, sending: 1, ..PrefillView::default() };
        record.prefill.extend([busy, PrefillView::default()]);
        record.place(&Options::default(), &Profile::default());
        let side = DecodeSide {
            instance: 1,
            ability: Ability::Able,
            elsewhere: Elsewhere::Up,
            reused: 0,
            wait: Duration::ZERO,
            batch: 3,
            context: 20_000,
            tbt: Duration::from_millis(100),
            behind: 0,
        };
        record.colocate(&Profile::default(), side).expect("it was placed");
        record
    }

    fn side(record: &mut Record) -> &mut DecodeSide {
        &mut record.colocation.as_mut().expect("it was chosen").side
    }

    fn hash(record: &Record) -> u64 {
        let mut log = Log::new(0);
        log.push(&mut record.clone());
        log.hash()
    }

    #[test]
    fn every_field_counts_in_the_hash() {
        let (first, mut others) = (record(), Vec::new());
        let mut changed = |change: fn(&mut Record)| {
            let mut other = first.clone();
            change(&mut other);
            others.push(hash(&other));
        };
        changed(|record| record.now = Instant::from_nanos(6));
        changed(|record| record.index_version += 1);
        changed(|record| record.options.threshold = 2.0);
        changed(|record| record.options.near.parts_per_thousand = 50);
        changed(|record| record.options.near.slack = 1);
        changed(|record| record.prefill[1].receiving = 1);
        changed(|record| record.candidates[0].score += 1);
        changed(|record| record.placed = None);
        changed(|record| record.options.colocate = Colocate::Sooner);
        changed(|record| record.colocation = None);
        changed(|record| side(record).instance = 0);
        changed(|record| side(record).ability = Ability::Unable);
        changed(|record| side(record).elsewhere = Elsewhere::Down);
        changed(|record| side(record).reused = 1);
        changed(|record| side(record).wait = Duration::from_nanos(1));
        changed(|record| side(record).batch = 4);
        changed(|record| side(record).context += 1);
        changed(|record| side(record).tbt = Duration::MAX);
        changed(|record| side(record).behind = 1);
        changed(|record| {
            let figures = Figures { late: 0.0, slow: 0.0, level: 0.5, cost: crate::sched::admission::Cost::Fine };
            let refused = Verdict::Refuse { reason: Reason::Tbt, retry_after: Duration::ZERO };
            record.answer = Some(Answer {
                verdict: refused,
                decode: None,
                join: Instant::ZERO,
                door: Duration::ZERO,
                step: crate::sched::forecast::Step::default(),
                figures,
            });
        });
        others.push(hash(&first));
        others.sort_unstable();
        others.dedup();
        assert_eq!(others.len(), 21);
    }

    #[test]
    fn a_record_replays_and_one_that_was_touched_does_not() {
        let (profile, record) = (Profile::default(), record());
        assert!(record.replays(&profile) && record.placed.is_some());
        let mut touched = record.clone();
        touched.candidates[1].prefill = Duration::ZERO;
        assert!(!touched.replays(&profile));
        let mut touched = record.clone();
        side(&mut touched).batch = 0;
        assert!(!touched.replays(&profile), "another batch is pushed back");
        let mut touched = record;
        touched.prefill[0].wait = Duration::ZERO;
        assert!(!touched.replays(&profile));
    }

    #[test]
    fn the_order_of_decisions_counts() {
        let push = |order: [u64; 2]| {
            let mut log = Log::new(1);
            order.into_iter().for_each(|id| log.push(&mut Record { id, ..Record::default() }));
            log.hash()
        };
        assert_ne!(push([1, 2]), push([2, 1]));
    }
}
