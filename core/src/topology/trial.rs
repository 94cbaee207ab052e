//! Byte tests: which one is due, what it moves, and what its result means.
//!
//! A path may be used once a pattern went over it both ways and was found unchanged, because drivers exist that report
//! success and moved nothing. This machine moves no byte: whoever runs a [`Trial`] fills the source, blanks the target, lets
//! the driver move, reads the target *by another way*, and reports. Invariants: a path is [`Verdict::Proven`] only after
//! both directions passed since its last link event; a result of an earlier run is ignored; who was found lying is not
//! tried again before a link event; who failed or was late is, ever more rarely; at most [`RUNNING_MAX`] run at a time.

use core::fmt;

use super::Unfit;
use crate::batch::MemoryKind;
use crate::slab::{Full, Handle, Slab, Slot};
use crate::time::{Duration, Instant};

/// Bytes that a trial moves: over several pages, and ending within a cache line.
pub const TRIAL_LEN: usize = (64 << 10) + 40;
/// Bytes before and after the target that must stay as they were.
pub const TRIAL_MARGIN: usize = 64;
/// How long one direction may take.
pub const TRIAL_WITHIN: Duration = Duration::from_secs(1);
/// Trials that run at a time, at most.
pub const RUNNING_MAX: u32 = 4;

/// First wait after a trial that failed or was late; doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// What is tested by itself: memory of one kind and device, over one NIC here and one of a peer.
///
/// Example: [`Trials`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// Kind and device of the memory here.
    pub memory: MemoryKind,
    /// The NIC here, by its index.
    pub nic: u8,
    /// The peer, by whatever handle the caller knows it.
    pub peer: Handle,
    /// The peer's NIC, by its index over there.
    pub peer_nic: u8,
}

impl Path {
    /// Stands for the NIC where a transport has none, such as shared memory.
    pub const NO_NIC: u8 = u8::MAX;
}

/// Which way bytes go.
///
/// ```
/// use millpond_core::topology::Direction;
/// assert_eq!(Direction::Write.to_string(), "write");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From here to the peer.
    Write,
    /// From the peer to here.
    Read,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Write => "write",
            Self::Read => "read",
        })
    }
}

/// What lay in the target after the driver reported success.
///
/// ```
/// use millpond_core::topology::Found;
/// assert!(Found::Same.is_good() && !Found::Nothing.is_good());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Found {
    /// The pattern, and nothing around it changed.
    Same,
    /// What was there before: nothing was moved.
    Nothing,
    /// The first bytes of the pattern, then what was there before.
    Short {
        /// How many of them.
        right: u32,
    },
    /// Other bytes.
    Wrong {
        /// The first of them.
        at: u32,
    },
    /// The pattern perhaps, and bytes beside the target changed.
    Beside,
}

impl Found {
    /// Whether the driver did what it said.
    #[must_use]
    pub const fn is_good(self) -> bool {
        matches!(self, Self::Same)
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.write_str("its driver moved all bytes"),
            Self::Nothing => f.write_str("its driver reported success and moved nothing"),
            Self::Short { right } => write!(f, "its driver reported success and moved {right} of {TRIAL_LEN} bytes"),
            Self::Wrong { at } => write!(f, "its driver reported success, and byte {at} is another one"),
            Self::Beside => f.write_str("its driver reported success, and wrote beside the target"),
        }
    }
}

/// Why a path is not used.
///
/// ```
/// use millpond_core::topology::{Direction, Fault, Found};
/// let fault = Fault::Bytes(Direction::Read, Found::Nothing);
/// assert_eq!(fault.to_string(), "its driver reported success and moved nothing (read)");
/// assert!(fault.is_lie());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The driver reported success, and the bytes say otherwise.
    Bytes(Direction, Found),
    /// The driver reported a failure, with its own code.
    Failed(Direction, i32),
    /// Nothing was reported within [`TRIAL_WITHIN`].
    Late(Direction),
    /// One of the NICs cannot be used.
    Unfit(Unfit),
}

impl Fault {
    /// Whether the driver said what is not so: only a link event is a reason to believe it again.
    #[must_use]
    pub const fn is_lie(&self) -> bool {
        matches!(self, Self::Bytes(..))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(direction, found) => write!(f, "{found} ({direction})"),
            Self::Failed(direction, code) => write!(f, "its byte test failed with code {code} ({direction})"),
            Self::Late(direction) => write!(f, "its byte test did not end within {TRIAL_WITHIN} ({direction})"),
            Self::Unfit(unfit) => write!(f, "{unfit}"),
        }
    }
}

/// Whether a path may be used.
///
/// Example: [`Trials`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Both directions moved right bytes since the last link event.
    Proven,
    /// No test has said anything yet, or not of both directions.
    Untested,
    /// Not to be used.
    Refuted(Fault),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Proven => f.write_str("its byte test passed both ways"),
            Self::Untested => f.write_str("its byte test has not passed yet"),
            Self::Refuted(fault) => write!(f, "{fault}"),
        }
    }
}

/// Names one run of one trial.
///
/// Example: [`Trials`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrialId {
    entry: Handle,
    run: u32,
}

/// A test to run now. The one side's source holds [`Trial::fill`], the other's target [`Trial::blank`], which is longer by a
/// margin at each end; the driver moves [`TRIAL_LEN`] bytes from the source to [`TRIAL_MARGIN`] within the target.
///
/// ```
/// use millpond_core::batch::MemoryKind;
/// use millpond_core::slab::{Handle, Slot};
/// use millpond_core::time::Instant;
/// use millpond_core::topology::*;
/// let mut trials = Trials::new([Slot::EMPTY; 1], 7);
/// trials.add(Path { memory: MemoryKind::Host, nic: 0, peer: Handle::default(), peer_nic: 0 }).unwrap();
/// let trial = trials.poll(Instant::ZERO).unwrap();
/// let (mut source, mut target) = ([0; TRIAL_LEN], [0; TRIAL_LEN + 2 * TRIAL_MARGIN]);
/// trial.fill(&mut source);
/// trial.blank(&mut target);
/// assert_eq!(trial.look(&target), Found::Nothing);
/// target[TRIAL_MARGIN..][..TRIAL_LEN].copy_from_slice(&source);
/// assert_eq!(trial.look(&target), Found::Same);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// For [`Trials::on_end`].
    pub id: TrialId,
    /// Over which path.
    pub path: Path,
    /// Which way.
    pub direction: Direction,
    /// When it is given up.
    pub deadline: Instant,
    seed: u64,
}

/// Eight bytes that differ by place and seed (the output function of SplitMix64).
fn word(seed: u64, at: u64) -> [u8; 8] {
    let mut mixed = seed.wrapping_add((at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ (mixed >> 31)).to_le_bytes()
}

fn write_pattern(seed: u64, into: &mut [u8]) {
    for (chunk, at) in into.chunks_mut(8).zip(0..) {
        chunk.copy_from_slice(&word(seed, at)[..chunk.len()]);
    }
}

/// How many of the first bytes are the pattern's, which is looked at from its byte `skip` on.
fn matching(seed: u64, skip: usize, bytes: &[u8]) -> usize {
    let mut count = 0;
    while count < bytes.len() {
        let (at, within) = ((skip + count) / 8, (skip + count) % 8);
        let expected = &word(seed, at as u64)[within..];
        let len = expected.len().min(bytes.len() - count);
        let same = bytes[count..].iter().zip(expected).take_while(|(byte, expected)| byte == expected).count();
        count += same;
        if same < len {
            break;
        }
    }
    count
}

impl Trial {
    /// What the target holds before, so that bytes that were not moved are told from those that were.
    const fn before(&self) -> u64 {
        !self.seed
    }

    /// Writes the pattern that is to be moved, as much as fits.
    pub fn fill(&self, source: &mut [u8]) {
        write_pattern(self.seed, source);
    }

    /// Writes what the target and its margins hold before.
    pub fn blank(&self, target: &mut [u8]) {
        write_pattern(self.before(), target);
    }

    /// Compares a target of `TRIAL_LEN + 2 * TRIAL_MARGIN` bytes, read by another way than the tested one; another length
    /// is `Beside`.
    #[must_use]
    pub fn look(&self, target: &[u8]) -> Found {
        if target.len() != TRIAL_LEN + 2 * TRIAL_MARGIN {
            return Found::Beside;
        }
        let (front, rest) = target.split_at(TRIAL_MARGIN);
        let (bytes, back) = rest.split_at(TRIAL_LEN);
        let is_blank = |skip: usize, bytes: &[u8]| matching(self.before(), skip, bytes) == bytes.len();
        if !is_blank(0, front) || !is_blank(TRIAL_MARGIN + TRIAL_LEN, back) {
            return Found::Beside;
        }
        let right = matching(self.seed, 0, bytes);
        let at = u32::try_from(right).unwrap_or(u32::MAX);
        if right == bytes.len() {
            Found::Same
        } else if is_blank(TRIAL_MARGIN, bytes) {
            Found::Nothing
        } else if right > 0 && is_blank(TRIAL_MARGIN + right, &bytes[right..]) {
            Found::Short { right: at }
        } else {
            Found::Wrong { at }
        }
    }
}

/// How a trial ended, as its driver and the memory say.
///
/// Example: [`Trials`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ended {
    /// The driver reported success; this is what lies in the target.
    Moved(Found),
    /// The driver reported this failure.
    Failed(i32),
}

/// One path among the [`Trials`]; make `Slot::EMPTY`s of it as storage.
///
/// Example: [`Trials`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    path: Path,
    /// Grows with each run: a result with an older one is stale, and so is one of a run that is not under way any more.
    run: u32,
    passed_write: bool,
    passed_read: bool,
    running: Option<Instant>,
    not_before: Instant,
    failures: u32,
    fault: Option<Fault>,
}

impl Entry {
    /// The path.
    #[must_use]
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Whether it may be used.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.fault {
            Some(fault) => Verdict::Refuted(fault),
            None if self.passed_write && self.passed_read => Verdict::Proven,
            None => Verdict::Untested,
        }
    }

    const fn next(&self) -> Option<Direction> {
        match (self.passed_write, self.passed_read) {
            (false, _) => Some(Direction::Write),
            (true, false) => Some(Direction::Read),
            (true, true) => None,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let is_final = self.fault.is_some_and(|fault| fault.is_lie());
        self.running.is_none() && !is_final && self.next().is_some() && self.not_before <= now
    }

    /// A run that goes on is nobody's from now on: the next one has another number.
    fn forget(&mut self, now: Instant) {
        *self = Self { run: self.run, not_before: now, ..Self::new(self.path) };
    }

    const fn new(path: Path) -> Self {
        Self {
            path,
            run: 0,
            passed_write: false,
            passed_read: false,
            running: None,
            not_before: Instant::ZERO,
            failures: 0,
            fault: None,
        }
    }

    /// Nothing of earlier passes counts: a path that fails once has both directions before it again.
    fn fail(&mut self, fault: Fault, now: Instant) {
        let wait = RETRY_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        (self.passed_write, self.passed_read) = (false, false);
        self.not_before = now + wait;
        self.fault = Some(fault);
    }
}

/// All paths with their tests. `S` stores entries (`[Slot<Entry>; N]`, `Box<[Slot<Entry>]>`, …), from the caller. Each call
/// costs O(paths).
///
/// ```
/// use millpond_core::batch::MemoryKind;
/// use millpond_core::slab::{Handle, Slot};
/// use millpond_core::time::Instant;
/// use millpond_core::topology::*;
/// let mut trials = Trials::new([Slot::EMPTY; 8], 42);
/// let path = Path { memory: MemoryKind::Cuda { device: 0 }, nic: 1, peer: Handle::default(), peer_nic: 0 };
/// trials.add(path).unwrap();
/// assert_eq!(trials.verdict(&path), Verdict::Untested); // not to be used yet
///
/// let now = Instant::ZERO;
/// let write = trials.poll(now).unwrap();
/// trials.on_end(now, write.id, Ended::Moved(Found::Same));
/// let read = trials.poll(now).unwrap();
/// trials.on_end(now, read.id, Ended::Moved(Found::Same));
/// assert_eq!(trials.verdict(&path), Verdict::Proven);
///
/// trials.on_link_event(now, 1); // our NIC 1 went down and up: what was proven is proven no more
/// assert_eq!(trials.verdict(&path), Verdict::Untested);
/// ```
#[derive(Clone, Debug)]
pub struct Trials<S> {
    entries: Slab<Entry, S>,
    seed: u64,
}

impl<S: AsRef<[Slot<Entry>]> + AsMut<[Slot<Entry>]>> Trials<S> {
    /// Without a path. `seed` is random: patterns of two runs, or of two processes, have nothing in common.
    pub fn new(storage: S, seed: u64) -> Self {
        Self { entries: Slab::new(storage), seed }
    }

    /// Adds a path, untested; one that is there already stays as it is. `Err`: the table is full.
    pub fn add(&mut self, path: Path) -> Result<(), Full<Path>> {
        if self.entries.iter().any(|(_, entry)| entry.path == path) {
            return Ok(());
        }
        self.entries.insert(Entry::new(path)).map(drop).map_err(|full| Full(full.0.path))
    }

    /// Forgets the paths to a peer.
    pub fn remove_peer(&mut self, peer: Handle) {
        // Bounded: each round removes one, or ends.
        loop {
            let found = self.entries.iter().find(|(_, entry)| entry.path.peer == peer).map(|(handle, _)| handle);
            let Some(handle) = found else { return };
            self.entries.remove(handle);
        }
    }

    /// Whether a path may be used. One that was never added is untested.
    #[must_use]
    pub fn verdict(&self, path: &Path) -> Verdict {
        let found = self.entries.iter().find(|(_, entry)| entry.path == *path);
        found.map_or(Verdict::Untested, |(_, entry)| entry.verdict())
    }

    /// All paths, for explanations.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().map(|(_, entry)| entry)
    }

    /// The next test to run, if one is due and fewer than [`RUNNING_MAX`] run. Gives up those that are late.
    pub fn poll(&mut self, now: Instant) -> Option<Trial> {
        let mut running = 0;
        for (_, entry) in self.entries.iter_mut() {
            match (entry.running, entry.next()) {
                (Some(deadline), Some(direction)) if deadline <= now => {
                    // What comes of it later is stale.
                    entry.running = None;
                    entry.fail(Fault::Late(direction), now);
                }
                (Some(_), _) => running += 1,
                (None, _) => {}
            }
        }
        if running >= RUNNING_MAX {
            return None;
        }
        self.seed = self.seed.wrapping_add(1);
        let seed = u64::from_le_bytes(word(self.seed, 0));
        let (handle, entry) = self.entries.iter_mut().find(|(_, entry)| entry.is_due(now))?;
        let (direction, deadline) = (entry.next()?, now + TRIAL_WITHIN);
        entry.run = entry.run.wrapping_add(1);
        entry.running = Some(deadline);
        let id = TrialId { entry: handle, run: entry.run };
        Some(Trial { id, path: entry.path, direction, deadline, seed })
    }

    /// When to poll again, unless something happens before: the next deadline of a running test, or the next one due.
    #[must_use]
    pub fn next_at(&self) -> Instant {
        let at = |entry: &Entry| match entry.running {
            Some(deadline) => deadline,
            None if entry.is_due(entry.not_before) => entry.not_before,
            None => Instant::NEVER,
        };
        self.entries.iter().map(|(_, entry)| at(entry)).min().unwrap_or(Instant::NEVER)
    }

    /// A test ended. `None`: it is a stale run (late, or overtaken by an event), and means nothing.
    pub fn on_end(&mut self, now: Instant, id: TrialId, ended: Ended) -> Option<Verdict> {
        let entry = self.entries.get_mut(id.entry).filter(|entry| entry.run == id.run)?;
        entry.running.take()?;
        let direction = entry.next()?;
        match ended {
            Ended::Moved(found) if found.is_good() => {
                match direction {
                    Direction::Write => entry.passed_write = true,
                    Direction::Read => entry.passed_read = true,
                }
                if entry.next().is_none() {
                    entry.fault = None;
                    entry.failures = 0;
                }
            }
            Ended::Moved(found) => entry.fail(Fault::Bytes(direction, found), now),
            Ended::Failed(code) => entry.fail(Fault::Failed(direction, code), now),
        }
        Some(entry.verdict())
    }

    /// Something happened to a NIC here (link down or up, another GID, a reset): its paths are tested again.
    pub fn on_link_event(&mut self, now: Instant, nic: u8) {
        self.forget(now, |path| path.nic == nic);
    }

    /// The same for a NIC of a peer.
    pub fn on_peer_link_event(&mut self, now: Instant, peer: Handle, peer_nic: u8) {
        self.forget(now, |path| (path.peer, path.peer_nic) == (peer, peer_nic));
    }

    fn forget(&mut self, now: Instant, mut of: impl FnMut(&Path) -> bool) {
        for (_, entry) in self.entries.iter_mut().filter(|(_, entry)| of(&entry.path)) {
            entry.forget(now);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec;
    use std::vec::Vec;

    const PEER: Handle = Handle { slot: 3, epoch: 1 };

    fn path(nic: u8, peer_nic: u8) -> Path {
        Path { memory: MemoryKind::Cuda { device: 1 }, nic, peer: PEER, peer_nic }
    }

    fn trials(paths: &[Path]) -> Trials<[Slot<Entry>; 8]> {
        let mut trials = Trials::new([Slot::EMPTY; 8], 1);
        for path in paths {
            trials.add(*path).expect("room");
        }
        trials
    }

    fn at(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    /// Runs whatever is due as `driver` says, and gives what was run.
    fn run(
        trials: &mut Trials<[Slot<Entry>; 8]>,
        now: Instant,
        mut driver: impl FnMut(&Trial) -> Ended,
    ) -> Vec<(u8, Direction)> {
        let mut ran = Vec::new();
        while let Some(trial) = trials.poll(now) {
            ran.push((trial.path.nic, trial.direction));
            let ended = driver(&trial);
            trials.on_end(now, trial.id, ended).expect("it is the current run");
        }
        ran
    }

    const GOOD: Ended = Ended::Moved(Found::Same);

    #[test]
    fn a_path_is_proven_only_after_both_directions() {
        let mut trials = trials(&[path(0, 0)]);
        let write = trials.poll(at(0)).expect("due");
        assert_eq!(write.direction, Direction::Write);
        assert_eq!(trials.on_end(at(1), write.id, GOOD), Some(Verdict::Untested));
        let read = trials.poll(at(1)).expect("due");
        assert_eq!(read.direction, Direction::Read);
        assert_eq!(trials.on_end(at(2), read.id, GOOD), Some(Verdict::Proven));
        assert_eq!((trials.poll(at(3)), trials.next_at()), (None, Instant::NEVER));
    }

    #[test]
    fn a_driver_that_moves_nothing_is_never_believed_again_but_after_a_link_event() {
        let mut trials = trials(&[path(0, 0), path(1, 0)]);
        let lies_on_0 = |trial: &Trial| if trial.path.nic == 0 { Ended::Moved(Found::Nothing) } else { GOOD };
        run(&mut trials, at(0), lies_on_0);
        let fault = Fault::Bytes(Direction::Write, Found::Nothing);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Refuted(fault));
        assert_eq!(trials.verdict(&path(1, 0)), Verdict::Proven, "the other pair is judged by itself");
        assert_eq!((trials.poll(at(1 << 40)), trials.next_at()), (None, Instant::NEVER));
        trials.on_link_event(at(5), 0);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Untested);
        assert_eq!(run(&mut trials, at(5), lies_on_0), [(0, Direction::Write)]);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Refuted(fault), "and was found lying again");
    }

    #[test]
    fn who_lies_about_reads_only_is_not_used_for_writes_either() {
        let mut trials = trials(&[path(0, 0)]);
        let driver = |trial: &Trial| match trial.direction {
            Direction::Write => GOOD,
            Direction::Read => Ended::Moved(Found::Short { right: 4096 }),
        };
        assert_eq!(run(&mut trials, at(0), driver), [(0, Direction::Write), (0, Direction::Read)]);
        let fault = Fault::Bytes(Direction::Read, Found::Short { right: 4096 });
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Refuted(fault));
    }

    #[test]
    fn who_fails_is_tried_again_ever_more_rarely_and_has_both_directions_before_it() {
        let mut trials = trials(&[path(0, 0)]);
        let driver = |trial: &Trial| match trial.direction {
            Direction::Write => GOOD,
            Direction::Read => Ended::Failed(-5),
        };
        let mut now = at(0);
        for wait in [100, 200, 400, 800] {
            assert_eq!(run(&mut trials, now, driver), [(0, Direction::Write), (0, Direction::Read)]);
            assert_eq!(trials.verdict(&path(0, 0)), Verdict::Refuted(Fault::Failed(Direction::Read, -5)));
            assert_eq!(trials.next_at().since(now), Duration::from_millis(wait));
            now = trials.next_at();
        }
        for _ in 0..20 {
            run(&mut trials, now, driver);
            assert!(trials.next_at().since(now) <= RETRY_MAX);
            now = trials.next_at();
        }
        run(&mut trials, now, |_| GOOD);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Proven, "a path that heals is used again");
    }

    #[test]
    fn a_late_trial_is_a_fault_and_its_late_result_means_nothing() {
        let mut trials = trials(&[path(0, 0)]);
        let trial = trials.poll(at(0)).expect("due");
        assert_eq!(trials.next_at(), trial.deadline);
        assert_eq!(trials.poll(trial.deadline), None);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Refuted(Fault::Late(Direction::Write)));
        assert_eq!(trials.on_end(trial.deadline, trial.id, GOOD), None);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Refuted(Fault::Late(Direction::Write)));
    }

    #[test]
    fn a_link_event_in_mid_test_makes_its_result_stale() {
        let mut trials = trials(&[path(0, 2), path(1, 3)]);
        let (first, second) = (trials.poll(at(0)).expect("due"), trials.poll(at(0)).expect("due"));
        trials.on_peer_link_event(at(1), PEER, 2);
        assert_eq!(trials.on_end(at(2), first.id, GOOD), None, "it ran on a link that is another one now");
        assert_eq!(trials.on_end(at(2), second.id, GOOD), Some(Verdict::Untested), "the other NIC had no event");
        assert_eq!(run(&mut trials, at(3), |_| GOOD).len(), 3);
        assert_eq!(trials.on_end(at(4), first.id, Ended::Failed(1)), None, "and stays so");
        assert_eq!(trials.verdict(&path(0, 2)), Verdict::Proven);
    }

    #[test]
    fn a_result_is_taken_once() {
        let mut trials = trials(&[path(0, 0)]);
        let trial = trials.poll(at(0)).expect("due");
        trials.on_end(at(1), trial.id, GOOD).expect("the first");
        assert_eq!(trials.on_end(at(1), trial.id, GOOD), None);
        assert_eq!(trials.verdict(&path(0, 0)), Verdict::Untested, "a write told twice is no read");
    }

    #[test]
    fn no_more_run_at_a_time_than_may() {
        let paths: Vec<Path> = (0..6).map(|nic| path(nic, 0)).collect();
        let mut trials = trials(&paths);
        let running: Vec<Trial> = core::iter::from_fn(|| trials.poll(at(0))).collect();
        assert_eq!(running.len(), 4);
        trials.on_end(at(1), running[0].id, GOOD);
        assert!(trials.poll(at(1)).is_some() && trials.poll(at(1)).is_none());
    }

    #[test]
    fn a_full_table_says_so_and_a_removed_peer_makes_room() {
        let paths: Vec<Path> = (0..8).map(|nic| path(nic, 0)).collect();
        let mut trials = trials(&paths);
        assert_eq!(trials.add(path(0, 0)), Ok(()), "it is there already");
        assert_eq!(trials.add(path(8, 0)), Err(Full(path(8, 0))));
        let running = trials.poll(at(0)).expect("due");
        trials.remove_peer(PEER);
        assert_eq!(trials.on_end(at(1), running.id, GOOD), None);
        trials.add(path(8, 0)).expect("room");
    }

    #[test]
    fn every_way_of_not_moving_the_bytes_is_told_apart() {
        let mut trials = trials(&[path(0, 0)]);
        let trial = trials.poll(at(0)).expect("due");
        let mut source = vec![0; TRIAL_LEN];
        trial.fill(&mut source);
        let look = |change: &dyn Fn(&mut [u8])| {
            let mut target = vec![0; TRIAL_LEN + 2 * TRIAL_MARGIN];
            trial.blank(&mut target);
            change(&mut target);
            trial.look(&target)
        };
        let moved = |target: &mut [u8], len: usize| target[TRIAL_MARGIN..][..len].copy_from_slice(&source[..len]);
        assert_eq!(look(&|_| {}), Found::Nothing);
        assert_eq!(look(&|target| moved(target, TRIAL_LEN)), Found::Same);
        assert_eq!(look(&|target| moved(target, 4096)), Found::Short { right: 4096 });
        assert_eq!(look(&|target| moved(target, TRIAL_LEN - 8)), Found::Short { right: 65_568 });
        let flipped = |at: usize| {
            look(&move |target: &mut [u8]| {
                target[TRIAL_MARGIN..][..TRIAL_LEN].copy_from_slice(&source_of(&trial));
                target[TRIAL_MARGIN + at] ^= 1;
            })
        };
        assert_eq!(flipped(0), Found::Wrong { at: 0 });
        assert_eq!(flipped(TRIAL_LEN - 1), Found::Wrong { at: 65_575 });
        assert_eq!(look(&|target| target[TRIAL_MARGIN..].fill(0)), Found::Beside);
        assert_eq!(look(&|target| target[TRIAL_MARGIN - 1] ^= 1), Found::Beside);
        // One byte further than it should.
        assert_eq!(look(&|target| target[TRIAL_MARGIN + 1..][..TRIAL_LEN].copy_from_slice(&source)), Found::Beside);
        assert_eq!(trial.look(&source), Found::Beside, "no target at all");
    }

    fn source_of(trial: &Trial) -> Vec<u8> {
        let mut source = vec![0; TRIAL_LEN];
        trial.fill(&mut source);
        source
    }

    #[test]
    fn what_an_earlier_trial_moved_is_not_taken_for_this_one() {
        let mut trials = trials(&[path(0, 0)]);
        let write = trials.poll(at(0)).expect("due");
        let old = source_of(&write);
        trials.on_end(at(0), write.id, GOOD);
        let read = trials.poll(at(0)).expect("due");
        let mut target = vec![0; TRIAL_LEN + 2 * TRIAL_MARGIN];
        read.blank(&mut target);
        target[TRIAL_MARGIN..][..TRIAL_LEN].copy_from_slice(&old);
        assert_eq!(read.look(&target), Found::Wrong { at: 0 });
    }
}
