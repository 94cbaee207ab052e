//! The scheduler with hand-computed cases, under virtual time.

extern crate std;

use std::collections::HashMap;
use std::vec;
use std::vec::Vec;

use super::*;
use crate::slab::Slot;
use crate::time::Instant;

type Boxed<T> = std::boxed::Box<[Slot<T>]>;

fn table<T>(count: usize) -> Boxed<T> {
    (0..count).map(|_| Slot::EMPTY).collect()
}

/// One peer, and jobs that are one large move each.
struct Rig {
    scheduler: Scheduler<Boxed<Job>, Boxed<Slice>, Boxed<Peer>>,
    now: Instant,
    peer: Handle,
    left: HashMap<Handle, u64>,
    is_once: bool,
    has_writes: bool,
}

/// What was posted: posting, path, bytes.
type Posted = (Posting, usize, u64);

const SHM: Transport = Transport(0);
const TCP: Transport = Transport(1);
const MB: u64 = 1_000_000;

fn path(index: usize) -> PathId {
    PathId::new(index).unwrap()
}

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

impl Rig {
    /// `specs` become paths 0, 1, …, all open.
    fn new(specs: &[PathSpec]) -> Self {
        Self::with_config(Config::default(), specs)
    }

    fn with_config(config: Config, specs: &[PathSpec]) -> Self {
        let now = Instant::from_nanos(1_000);
        let mut scheduler = Scheduler::new(config, table(64), table(64), table(4));
        let peer = scheduler.insert_peer(now).unwrap();
        let mut rig = Self { scheduler, now, peer, left: HashMap::new(), is_once: false, has_writes: true };
        for (index, spec) in specs.iter().enumerate() {
            rig.scheduler.declare(peer, path(index), *spec).unwrap();
            assert_eq!(rig.scheduler.on_open(now, peer, path(index)), 1);
        }
        rig
    }

    fn spec(&self, bytes: u64) -> JobSpec {
        JobSpec { has_writes: self.has_writes, ..JobSpec::new(self.peer, bytes) }
    }

    fn submit(&mut self, spec: JobSpec) -> Handle {
        let job = self.scheduler.submit(self.now, spec).unwrap();
        self.left.insert(job, spec.bytes);
        job
    }

    /// The next action; a new slice is cut.
    fn next(&mut self) -> Option<(Action, u64)> {
        let action = self.scheduler.poll(self.now)?;
        let mut bytes = 0;
        if let Action::Post { posting, job, cut: Some(limits), .. } = action {
            let left = self.left.get_mut(&job).unwrap();
            bytes = limits.bytes.min(*left);
            *left -= bytes;
            let (has_writes, is_once, is_last) = (self.has_writes, self.is_once, *left == 0);
            self.scheduler.on_cut(posting, Cut { bytes, moves: 1, has_writes, is_once, is_last });
        }
        Some((action, bytes))
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.next()).map(|(action, _)| action).collect()
    }

    /// All posts that are possible now; nothing else may be asked for, but dials.
    fn posts(&mut self) -> Vec<Posted> {
        let post = |(action, bytes)| match action {
            Action::Post { posting, path, .. } => Some((posting, path.index(), bytes)),
            Action::Dial { .. } => None,
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| self.next()).filter_map(post).collect()
    }

    fn post(&mut self) -> Posted {
        let posts = self.posts();
        assert_eq!(posts.len(), 1, "{posts:?}");
        posts[0]
    }

    fn done(&mut self, posting: Posting) {
        assert_eq!(self.scheduler.on_finished(self.now, posting, Outcome::DONE), Some(Answer::Over));
    }

    fn lost(&mut self, posting: Posting, fault: Fault, bytes: u64, far: Far) -> Option<Answer> {
        let kept = Load { bytes, moves: 1, slices: 0 };
        let outcome = Outcome { kept, refused: Load::NONE, fault: Some(fault), far };
        self.scheduler.on_finished(self.now, posting, outcome)
    }

    fn down(&mut self, index: usize, generation: u64) {
        self.scheduler.on_down(self.peer, path(index), generation);
    }

    fn after(&mut self, span: Duration) {
        self.now = self.now + span;
        if self.scheduler.next_wake() <= self.now {
            self.scheduler.on_timer(self.now);
        }
    }

    fn finished(&mut self) -> Finished {
        match self.actions()[..] {
            [Action::Finish(finished)] => finished,
            ref other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_slice_is_as_long_as_its_path_moves_in_the_slice_span() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(8 * MB));
    let (first, _, bytes) = rig.post();
    assert_eq!(bytes, 8 * MB, "nothing is known yet: as long as allowed");
    rig.now = rig.now + millis(8); // 1 GB/s
    rig.done(first);
    rig.finished();
    rig.submit(rig.spec(10 * MB));
    assert_eq!(rig.posts().iter().map(|post| post.2).collect::<Vec<_>>(), [4 * MB, 4 * MB, 2 * MB]);
}

/// Bytes over two paths, each with that window, of which the second takes `slow` times as long for a slice; after both were
/// measured.
fn shared_bytes(window: u64, slow: u64) -> [u64; 2] {
    let spec = PathSpec { window: Window { bytes: window, moves: 999, slices: 999 }, ..PathSpec::new(TCP, 0) };
    let spec = PathSpec { slice_len_min: MB, slice_len_max: MB, ..spec };
    let config = Config { window_per_peer: Window { bytes: 2 * window, moves: 999, slices: 999 }, ..Config::default() };
    let mut rig = Rig { scheduler: Scheduler::new(config, table(64), table(999), table(4)), ..Rig::new(&[]) };
    rig.peer = rig.scheduler.insert_peer(rig.now).unwrap();
    for index in 0..2 {
        rig.scheduler.declare(rig.peer, path(index), spec).unwrap();
        rig.scheduler.on_open(rig.now, rig.peer, path(index));
    }
    let (mut queues, mut free_at, mut bytes) = ([vec![], vec![]], [rig.now; 2], [0; 2]);
    for total in [40 * MB, 400 * MB] {
        rig.submit(rig.spec(total));
        bytes = [0; 2];
        while bytes[0] + bytes[1] < total || queues.iter().any(|queue| !queue.is_empty()) {
            for (posting, path, len) in rig.posts() {
                free_at[path] = free_at[path].max(rig.now) + millis([1, slow][path]);
                queues[path].push((free_at[path], posting));
                bytes[path] += len;
            }
            let next = queues.iter().filter_map(|queue| queue.first()).min_by_key(|(at, _)| *at).unwrap().0;
            rig.now = next;
            for queue in &mut queues {
                if queue.first().is_some_and(|(at, _)| *at == next) {
                    let (_, posting) = queue.remove(0);
                    rig.done(posting);
                }
            }
        }
        rig.finished();
    }
    bytes
}

#[test]
fn two_paths_of_one_transport_share_by_what_they_complete() {
    // Windows of a few slices, and such that all is posted at once.
    for window in [8 * MB, 400 * MB] {
        for slow in [1, 3] {
            let bytes = shared_bytes(window, slow);
            let ratio = bytes[0] as f64 / bytes[1] as f64 / slow as f64;
            assert!((0.94..1.06).contains(&ratio), "{bytes:?} in windows of {window}, {slow} to 1");
        }
    }
}

#[test]
fn a_path_that_was_slow_is_tried_again_after_others_worked_for_a_while() {
    let spec = PathSpec { slice_len_min: MB, slice_len_max: MB, ..PathSpec::new(TCP, 0) };
    let mut rig = Rig::new(&[spec, spec]);
    // Jobs of two slices, one after the other. Gives how many went over path 1, on which each takes longer by `slow`.
    let run = |rig: &mut Rig, slow: Duration| {
        rig.submit(rig.spec(2 * MB));
        let mut posts = rig.posts();
        posts.sort_by_key(|(_, path, _)| *path);
        for (posting, path, _) in &posts {
            rig.after([millis(1), slow][*path]);
            rig.done(*posting);
        }
        rig.finished();
        posts.iter().filter(|(_, path, _)| *path == 1).count()
    };
    assert_eq!(run(&mut rig, millis(100)), 1, "nothing is known of either");
    let healed = rig.now;
    while run(&mut rig, millis(0)) == 0 {
        assert!(rig.now.since(healed) < Duration::from_secs(10), "it is never used again");
    }
    assert!(rig.now.since(healed) > Duration::from_secs(5));
    let used: usize = (0..100).map(|_| run(&mut rig, millis(0))).sum();
    assert!(used > 90, "{used}");
}

#[test]
fn a_failed_slice_goes_the_same_way_then_another_then_another_transport() {
    let mut rig = Rig::new(&[PathSpec::new(SHM, 0), PathSpec::new(SHM, 0), PathSpec::new(TCP, 1)]);
    let job = rig.submit(rig.spec(100));
    let mut ways = vec![];
    for attempt in 1..=4 {
        let (posting, way, _) = rig.post();
        assert_eq!(posting.attempt, attempt);
        ways.push(way);
        let answer = rig.lost(posting, Fault::Transient, 100, Far::Untouched).unwrap();
        let failure = Failure { cause: Cause::PathLost, far: Far::Untouched };
        assert_eq!(answer, if attempt < 4 { Answer::Again } else { Answer::Failed(failure) });
    }
    assert_eq!(ways, [0, 0, 1, 2]);
    let finished = rig.finished();
    assert_eq!((finished.job, finished.explanation.retries(), finished.explanation.detours()), (job, 3, 1));
}

#[test]
fn a_slice_whose_path_broke_takes_another_path_of_the_transport_first() {
    let mut rig = Rig::new(&[PathSpec::new(SHM, 0), PathSpec::new(SHM, 0), PathSpec::new(TCP, 1)]);
    rig.submit(rig.spec(100));
    let (posting, way, _) = rig.post();
    assert_eq!(way, 0);
    rig.down(0, 1);
    rig.lost(posting, Fault::PathLost, 100, Far::Untouched);
    let (posting, way, _) = rig.post();
    assert_eq!(way, 1);
    rig.down(1, 1);
    rig.lost(posting, Fault::PathLost, 100, Far::Untouched);
    assert_eq!(rig.post().1, 2);
}

#[test]
fn a_post_that_is_refused_goes_another_way_at_once() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(100));
    let (first, way, _) = rig.post();
    rig.scheduler.on_refused(rig.now, first, Refusal::Full);
    let (second, other, _) = rig.post();
    assert_eq!((way, other, second), (0, 1, first), "it is still the first attempt");
    rig.scheduler.on_refused(rig.now, second, Refusal::Full);
    assert_eq!(rig.posts(), []);
    rig.after(millis(1));
    assert_eq!(rig.post().1, 0, "a full device is asked again");
    assert_eq!(rig.scheduler.load(rig.peer), Some(Load { bytes: 100, moves: 1, slices: 1 }));
}

#[test]
fn windows_bound_what_is_under_way_per_path_and_per_peer() {
    let window = Window { bytes: 10, moves: 9, slices: 2 };
    let spec = PathSpec { window, slice_len_min: 4, slice_len_max: 4, ..PathSpec::new(TCP, 0) };
    let config = Config { window_per_peer: Window { bytes: 99, moves: 3, slices: 99 }, ..Config::default() };
    let mut rig = Rig::with_config(config, &[spec, spec]);
    rig.submit(rig.spec(40));
    let posts = rig.posts();
    assert_eq!(posts.iter().map(|post| (post.1, post.2)).collect::<Vec<_>>(), [(0, 4), (1, 4), (0, 4)]);
    rig.done(posts[1].0);
    assert_eq!(rig.posts().len(), 1, "the peer's three moves are taken again");
    assert_eq!(rig.scheduler.path_load(rig.peer, path(0)), Some(Load { bytes: 8, moves: 2, slices: 2 }));
}

#[test]
fn nothing_is_posted_beyond_the_receivers_credit_and_late_news_of_it_changes_nothing() {
    let credit = Credit { bytes: 8, slices: 9 };
    let spec = PathSpec { slice_len_min: 4, slice_len_max: 4, credit, ..PathSpec::new(TCP, 0) };
    let mut rig = Rig::new(&[spec]);
    rig.submit(rig.spec(40));
    let posts = rig.posts();
    assert_eq!(posts.len(), 2);
    posts.iter().for_each(|post| rig.done(post.0));
    assert_eq!(rig.posts(), [], "what was done does not come back by itself: totals count");
    rig.scheduler.on_credit(rig.peer, path(0), 1, Credit { bytes: 12, slices: 9 });
    assert_eq!(rig.posts().len(), 1);
    rig.scheduler.on_credit(rig.peer, path(0), 1, Credit { bytes: 8, slices: 9 });
    rig.scheduler.on_credit(rig.peer, path(0), 0, Credit { bytes: 99, slices: 9 });
    assert_eq!(rig.posts(), []);
}

/// When a node with that seed dials a peer that does not answer.
fn redials(seed: u64) -> Vec<Instant> {
    let mut rig = Rig::with_config(Config { dial_seed: seed, ..Config::default() }, &[PathSpec::new(TCP, 0)]);
    rig.down(0, 1);
    let spec = rig.spec(10);
    rig.submit(spec);
    let mut dials = Vec::new();
    for _ in 0..3_000 {
        if let [Action::Dial { .. }] = rig.actions()[..] {
            dials.push(rig.now);
            rig.scheduler.on_dial_failed(rig.now, rig.peer, path(0));
        }
        rig.after(millis(1));
    }
    dials
}

#[test]
fn who_lost_one_peer_do_not_come_back_to_it_in_step() {
    assert_eq!(redials(1), redials(1), "the seed alone decides");
    let clients: Vec<Vec<Instant>> = (0..64).map(redials).collect();
    for client in &clients {
        let waits: Vec<Duration> = client.windows(2).map(|pair| pair[1].since(pair[0])).collect();
        assert!(waits.iter().all(|wait| (millis(10)..=millis(501)).contains(wait)), "{waits:?}");
        assert!(waits[7] >= millis(250), "it grows to the whole nevertheless: {waits:?}");
    }
    for nth in [4, 6] {
        let mut times: Vec<Instant> = clients.iter().map(|client| client[nth]).collect();
        times.sort_unstable();
        let together =
            times.iter().map(|from| times.iter().filter(|at| (*from..*from + millis(10)).contains(at)).count());
        assert!(together.max().unwrap() < 24, "dial {nth}: {times:?}");
    }
}

#[test]
fn queued_work_waits_for_a_lane_until_its_own_deadline() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.down(0, 1);
    let early = rig.submit(JobSpec { deadline: rig.now + millis(300), ..rig.spec(10) });
    let late = rig.submit(rig.spec(10));
    assert_eq!(rig.actions(), [Action::Dial { peer: rig.peer, path: path(0) }]);
    rig.scheduler.on_dial_failed(rig.now, rig.peer, path(0));
    assert_eq!(rig.actions(), []);
    rig.after(millis(20));
    assert_eq!(rig.actions(), [Action::Dial { peer: rig.peer, path: path(0) }], "after the first wait");
    rig.after(millis(280));
    let finished = rig.finished();
    let failure = Failure { cause: Cause::Deadline, far: Far::Untouched };
    assert_eq!((finished.job, finished.rest), (early, Some(failure)));
    rig.scheduler.on_open(rig.now, rig.peer, path(0));
    let (posting, ..) = rig.post();
    rig.done(posting);
    assert_eq!(rig.finished().job, late);
}

#[test]
fn a_refused_dial_fails_what_waits_at_once_unless_another_path_may_come() {
    let mut rig = Rig::new(&[PathSpec::new(SHM, 0), PathSpec::new(TCP, 1)]);
    (0..2).for_each(|index| rig.down(index, 1));
    rig.submit(rig.spec(10));
    let dials = [0, 1].map(|index| Action::Dial { peer: rig.peer, path: path(index) });
    assert_eq!(rig.actions(), dials);
    rig.scheduler.on_dial_refused(rig.now, rig.peer, path(0));
    assert_eq!(rig.actions(), [], "the other one is on its way");
    rig.scheduler.on_dial_refused(rig.now, rig.peer, path(1));
    let failure = Failure { cause: Cause::PathLost, far: Far::Untouched };
    assert_eq!(rig.finished().rest, Some(failure));
    rig.submit(rig.spec(10));
    assert_eq!(rig.finished().rest, Some(failure), "until it is dialled again nothing is new");
    rig.after(millis(20));
    let job = rig.submit(rig.spec(10));
    assert_eq!(rig.actions(), dials, "then it is tried");
    rig.scheduler.on_dial_refused(rig.now, rig.peer, path(0));
    rig.scheduler.on_open(rig.now, rig.peer, path(1));
    let (posting, ..) = rig.post();
    rig.done(posting);
    assert_eq!(rig.finished().job, job);
}

#[test]
fn a_refused_dial_of_one_way_to_a_peer_waits_for_another_that_is_due() {
    let mut rig = Rig::new(&[PathSpec { dialling: Dialling::OursBeside, ..PathSpec::new(TCP, 0) }; 2]);
    (0..2).for_each(|index| rig.down(index, 1));
    rig.scheduler.want(rig.now, rig.peer, path(0));
    let dials = [0, 1].map(|index| Action::Dial { peer: rig.peer, path: path(index) });
    assert_eq!(rig.actions(), dials[..1]);
    rig.scheduler.on_dial_refused(rig.now, rig.peer, path(0));
    rig.submit(rig.spec(10));
    assert_eq!(rig.actions(), dials[1..], "the other one was closed while nobody used it, and may be there");
    rig.scheduler.on_dial_refused(rig.now, rig.peer, path(1));
    assert_eq!(rig.finished().rest, Some(Failure { cause: Cause::PathLost, far: Far::Untouched }));
}

#[test]
fn lack_of_progress_ends_a_job_and_size_does_not() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(10 * MB));
    let (posting, ..) = rig.post();
    for step in 1..=20 {
        rig.now = rig.now + millis(1_000);
        rig.scheduler.on_moved(rig.now, posting, step);
        rig.scheduler.on_timer(rig.now);
    }
    assert_eq!(rig.actions(), [], "20 s, but always moving");
    rig.after(millis(4_999));
    assert_eq!(rig.actions(), []);
    rig.after(millis(1));
    assert_eq!(rig.actions(), [Action::Cancel { posting }]);
    let answer = rig.lost(posting, Fault::Cancelled, 10 * MB, Far::Unknown);
    assert_eq!(answer, Some(Answer::Failed(Failure { cause: Cause::NoProgress, far: Far::Unknown })));
    assert_eq!(rig.finished().end, Some(Cause::NoProgress));
}

#[test]
fn a_path_that_stands_still_is_closed_when_another_one_works() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(100));
    let (posting, ..) = rig.post();
    rig.after(millis(2_500));
    let close = Action::Close { peer: rig.peer, path: path(0), why: PathDown::Stalled };
    assert_eq!(rig.actions(), [close]);
    rig.down(0, 1);
    assert_eq!(rig.lost(posting, Fault::Stalled, 100, Far::Untouched), Some(Answer::Again));
    assert!(rig.actions().iter().any(|action| matches!(action, Action::Post { path, .. } if path.index() == 1)));
}

#[test]
fn time_in_which_nobody_looked_makes_no_path_stall_and_ends_no_job() {
    for looks in [true, false] {
        let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
        let mut lapse = Lapse::new(rig.now);
        rig.submit(rig.spec(100));
        rig.post();
        rig.after(millis(1_000));
        lapse.on_look(rig.now);
        lapse.on_wait(rig.scheduler.next_wake());
        // Stopped for a minute. An engine that does not notice shows what would be: the first look closes the path.
        rig.now = rig.scheduler.next_wake() + Duration::from_secs(60);
        let span = lapse.on_look(rig.now).filter(|_| looks);
        assert_eq!(span, looks.then_some(Duration::from_secs(60)));
        if let Some(span) = span {
            rig.scheduler.on_stopped(rig.now, span);
        }
        rig.scheduler.on_timer(rig.now);
        let actions = rig.actions();
        assert_eq!(actions.is_empty(), looks, "{actions:?}");
        if looks {
            // What is left of its time is what was left before, and then it counts.
            rig.after(millis(1_200));
            assert_eq!(rig.actions(), []);
            rig.after(millis(100));
            assert_eq!(rig.actions(), [Action::Close { peer: rig.peer, path: path(0), why: PathDown::Stalled }]);
        }
    }
}

#[test]
fn a_cancel_is_waited_for_and_a_rate_measured_without_the_time_in_which_nobody_looked() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    let job = rig.submit(rig.spec(10 * MB));
    let (posting, ..) = rig.post();
    rig.now = rig.now + Duration::from_secs(3) + millis(10);
    rig.scheduler.on_stopped(rig.now, Duration::from_secs(3));
    rig.done(posting);
    rig.finished();
    let known = rig.scheduler.peers.get(rig.peer).unwrap().paths[0].unwrap().rate.per_second();
    assert_eq!(known, Some(1_000 * MB), "10 MB in 10 ms");
    let late = rig.submit(rig.spec(100));
    assert_ne!(job, late);
    let (posting, ..) = rig.post();
    rig.scheduler.cancel(rig.now, late);
    assert_eq!(rig.actions(), [Action::Cancel { posting }]);
    rig.now = rig.now + Duration::from_secs(3);
    rig.scheduler.on_stopped(rig.now, Duration::from_secs(3));
    rig.scheduler.on_timer(rig.now);
    assert_eq!(rig.actions(), [], "its answer may lie there unread");
    rig.after(millis(100));
    assert_eq!(rig.actions(), [Action::Close { peer: rig.peer, path: path(0), why: PathDown::CancelLate }]);
}

#[test]
fn the_only_path_is_not_closed_before_the_jobs_deadline() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(100));
    rig.post();
    rig.after(millis(4_000));
    assert_eq!(rig.actions(), []);
}

#[test]
fn a_cancelled_job_is_over_when_its_last_slice_is_quiet_here() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    let job = rig.submit(rig.spec(100));
    let (posting, ..) = rig.post();
    rig.scheduler.cancel(rig.now, job);
    assert_eq!(rig.actions(), [Action::Cancel { posting }]);
    rig.after(millis(99));
    assert_eq!(rig.actions(), []);
    rig.after(millis(1));
    assert_eq!(rig.actions(), [Action::Close { peer: rig.peer, path: path(0), why: PathDown::CancelLate }]);
    rig.after(millis(10_000));
    assert_eq!(rig.actions(), [], "a timer is no proof");
    rig.down(0, 1);
    rig.lost(posting, Fault::PathLost, 100, Far::Unknown);
    assert_eq!(rig.finished().end, Some(Cause::Cancelled));
    assert_eq!(rig.scheduler.in_doubt(rig.peer).collect::<Vec<_>>(), [path(0)]);
}

#[test]
fn what_arrived_twice_is_done_when_the_first_path_is_fenced_and_later_writes_wait() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
    let job = rig.submit(rig.spec(100));
    let (first, ..) = rig.post();
    rig.down(0, 1);
    assert_eq!(rig.lost(first, Fault::PathLost, 100, Far::Unknown), Some(Answer::Again));
    let actions = rig.actions();
    let Action::Post { posting: second, path: way, .. } = actions[0] else { panic!("{actions:?}") };
    assert_eq!(way.index(), 1, "the same bytes to the same place may go again");
    assert_eq!(actions[1..], [Action::Dial { peer: rig.peer, path: path(0) }], "to have it fenced");
    assert_eq!(rig.scheduler.on_finished(rig.now, second, Outcome::DONE), Some(Answer::Arrived));
    rig.submit(rig.spec(10));
    assert_eq!(rig.actions(), [], "another write could be overtaken by the lost one");
    rig.has_writes = false;
    rig.submit(JobSpec { class: Class::Bulk, ..rig.spec(10) });
    assert_eq!(rig.post().1, 1, "a read could not");
    rig.scheduler.on_open(rig.now, rig.peer, path(0));
    let actions = rig.actions();
    assert_eq!(actions[0], Action::Settle { slice: first.slice, job });
    assert!(matches!(actions[1], Action::Finish(Finished { job: over, .. }) if over == job));
    assert!(matches!(actions[2], Action::Post { .. }), "and the write goes");
}

#[test]
fn what_arrived_but_cannot_be_fenced_in_time_is_not_called_done() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
    let job = rig.submit(rig.spec(100));
    let (first, ..) = rig.post();
    rig.down(0, 1);
    rig.lost(first, Fault::PathLost, 100, Far::Unknown);
    let (second, ..) = rig.post();
    rig.scheduler.on_finished(rig.now, second, Outcome::DONE);
    rig.after(millis(5_000));
    let actions = rig.actions();
    let failure = Failure { cause: Cause::Unfenced, far: Far::Unknown };
    assert_eq!(actions[0], Action::Fail { slice: first.slice, job, failure });
    rig.scheduler.on_fenced(rig.peer, path(0), 1);
    assert_eq!(rig.scheduler.in_doubt(rig.peer).count(), 0, "another way to fence it");
}

#[test]
fn what_may_not_be_repeated_is_not_if_it_may_have_been_applied() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.is_once = true;
    rig.submit(rig.spec(100));
    let (posting, ..) = rig.post();
    assert_eq!(rig.lost(posting, Fault::Transient, 100, Far::Untouched), Some(Answer::Again));
    let (posting, ..) = rig.post();
    let failure = Failure { cause: Cause::NotRepeatable, far: Far::Unknown };
    assert_eq!(rig.lost(posting, Fault::PathLost, 100, Far::Unknown), Some(Answer::Failed(failure)));
}

#[test]
fn a_peer_has_a_budget_of_retries_that_success_refills() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    while rig.scheduler.peers.get_mut(rig.peer).unwrap().spend() {}
    rig.submit(rig.spec(10));
    let (posting, ..) = rig.post();
    let failure = Failure { cause: Cause::RetriesSpent, far: Far::Untouched };
    assert_eq!(rig.lost(posting, Fault::Transient, 10, Far::Untouched), Some(Answer::Failed(failure)));
    rig.finished();
    for _ in 0..SLICES_PER_RETRY {
        rig.submit(rig.spec(10));
        let (posting, ..) = rig.post();
        rig.done(posting);
        rig.finished();
    }
    rig.submit(rig.spec(10));
    let (posting, ..) = rig.post();
    assert_eq!(rig.lost(posting, Fault::Transient, 10, Far::Untouched), Some(Answer::Again));
}

#[test]
fn a_transport_asked_for_by_name_is_had_within_the_connect_deadline_or_not_at_all() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 1)]);
    rig.scheduler.declare(rig.peer, path(4), PathSpec::new(SHM, 0)).unwrap();
    let none = rig.submit(JobSpec { asked: Asked::Only(Transport(5)), ..rig.spec(10) });
    let shm = rig.submit(JobSpec { asked: Asked::Only(SHM), ..rig.spec(10) });
    let start = rig.now;
    let mut ends = vec![];
    while ends.len() < 2 {
        for action in rig.actions() {
            match action {
                Action::Dial { path, .. } => rig.scheduler.on_dial_failed(rig.now, rig.peer, path),
                Action::Finish(finished) => ends.push((finished.job, finished.end, rig.now.since(start))),
                other => panic!("{other:?}"),
            }
        }
        rig.after(millis(10));
    }
    assert_eq!(ends[0], (none, Some(Cause::NoPath), Duration::ZERO));
    assert_eq!((ends[1].0, ends[1].1), (shm, Some(Cause::CannotConnect)));
    assert!((900..=920).contains(&ends[1].2.as_millis()), "{:?}", ends[1]);
}

#[test]
fn completions_that_are_late_unknown_or_double_change_nothing() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(10));
    let (first, ..) = rig.post();
    rig.lost(first, Fault::Transient, 10, Far::Untouched);
    let (second, ..) = rig.post();
    assert_eq!(rig.scheduler.on_finished(rig.now, first, Outcome::DONE), None);
    assert_eq!(rig.scheduler.load(rig.peer), Some(Load { bytes: 10, moves: 1, slices: 1 }));
    rig.done(second);
    assert_eq!(rig.scheduler.on_finished(rig.now, second, Outcome::DONE), None);
    rig.finished();
    let counters = rig.scheduler.counters();
    assert_eq!((counters.ignored, counters.bytes_done, counters.done), (2, 10, 1));
}

#[test]
fn traffic_leaves_a_path_that_fails_is_back_after_a_probe_and_says_so() {
    let mut rig = Rig::new(&[PathSpec::new(SHM, 0), PathSpec::new(TCP, 1)]);
    let fail = |rig: &mut Rig, ways: &[usize]| {
        rig.submit(rig.spec(10));
        for (at, expected) in ways.iter().enumerate() {
            let (posting, way, _) = rig.post();
            assert_eq!(way, *expected);
            if at + 1 == ways.len() {
                rig.done(posting);
            } else {
                rig.lost(posting, Fault::Transient, 10, Far::Untouched);
            }
        }
        rig.finished()
    };
    fail(&mut rig, &[0, 0, 1]);
    fail(&mut rig, &[0, 1]); // the third failure in a row
    let explanation = fail(&mut rig, &[1]).explanation;
    assert_eq!((explanation.verdict(path(0)), explanation.detours()), (Verdict::Backoff, 1));
    assert_eq!(rig.scheduler.counters().breakers_opened, 1);
    rig.after(millis(20));
    rig.submit(rig.spec(10 * MB));
    let posts = rig.posts();
    assert_eq!((posts[0].1, posts[0].2), (0, 256 << 10), "a probe is a short slice");
    assert!(posts[1..].iter().all(|post| post.1 == 1), "and goes alone");
    posts.iter().for_each(|post| rig.done(post.0));
    let finished = rig.finished();
    assert_eq!((finished.explanation.slices(path(0)), finished.explanation.verdict(path(1))), (1, Verdict::Chosen));
    rig.submit(rig.spec(10));
    assert_eq!(rig.post().1, 0, "it works again");
}

#[test]
fn classes_share_a_peers_window_by_weight() {
    let window = Window { bytes: 1 << 20, moves: 1, slices: 1 };
    let len = 64 << 10;
    let mut rig = Rig::new(&[PathSpec { window, slice_len_min: len, slice_len_max: len, ..PathSpec::new(TCP, 0) }]);
    let jobs = Class::ALL.map(|class| rig.submit(JobSpec { class, ..rig.spec(1 << 30) }));
    let mut given = [0; 3];
    for _ in 0..1_100 {
        let Some((Action::Post { posting, job, .. }, bytes)) = rig.next() else { panic!("it stands still") };
        given[jobs.iter().position(|other| *other == job).unwrap()] += bytes / len;
        rig.done(posting);
    }
    assert_eq!(given, [800, 200, 100]);
}

#[test]
fn a_full_peer_says_when_to_come_back() {
    let config = Config { bytes_per_peer_max: 16 * MB, ..Config::default() };
    let mut rig = Rig::with_config(config, &[PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(8 * MB));
    let (posting, ..) = rig.post();
    rig.now = rig.now + millis(80); // 100 MB/s
    rig.done(posting);
    rig.finished();
    rig.submit(rig.spec(10 * MB));
    let refused = rig.scheduler.submit(rig.now, rig.spec(10 * MB));
    assert_eq!(refused, Err(SubmitError::Busy { retry_after: millis(100) }));
    rig.scheduler.on_peer_gone(rig.peer);
    assert_eq!(rig.scheduler.submit(rig.now, rig.spec(1)), Err(SubmitError::PeerGone));
}

#[test]
fn another_path_is_dialled_when_those_of_its_transport_are_busy() {
    let spare = PathSpec { dialling: Dialling::OursWhenBusy, ..PathSpec::new(TCP, 0) };
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.scheduler.declare(rig.peer, path(1), spare).unwrap();
    rig.submit(rig.spec(7 << 20));
    assert_eq!(rig.posts().len(), 1);
    rig.submit(rig.spec(8 << 20));
    assert_eq!(rig.posts().len(), 1, "7 MiB are not much");
    rig.submit(rig.spec(10));
    let actions = rig.actions();
    assert_eq!(actions[1..], [Action::Dial { peer: rig.peer, path: path(1) }], "{actions:?}");
}

#[test]
fn another_way_to_a_peer_is_dialled_also_while_the_first_works_and_again_after_it_was_lost() {
    let beside = PathSpec { dialling: Dialling::OursBeside, ..PathSpec::new(TCP, 0) };
    let mut rig = Rig::new(&[beside]);
    for index in [1, 2] {
        rig.scheduler.declare(rig.peer, path(index), beside).unwrap();
    }
    let dialled = |rig: &mut Rig| -> Vec<usize> {
        let actions = rig.actions();
        let paths = actions.iter().filter_map(|action| match action {
            Action::Dial { path, .. } => Some(path.index()),
            _ => None,
        });
        paths.collect()
    };
    rig.submit(rig.spec(10));
    assert_eq!(dialled(&mut rig), [1, 2]);
    // One that fails does not hold up the other, and is tried again in its own time.
    rig.scheduler.on_dial_failed(rig.now, rig.peer, path(1));
    rig.scheduler.on_open(rig.now, rig.peer, path(2));
    rig.submit(rig.spec(10));
    assert_eq!(dialled(&mut rig), []);
    rig.now = rig.now + REDIAL_MIN;
    rig.submit(rig.spec(10));
    assert_eq!(dialled(&mut rig), [1]);
    rig.scheduler.on_open(rig.now, rig.peer, path(1));
    rig.scheduler.on_down(rig.peer, path(0), 1);
    rig.submit(rig.spec(10));
    assert_eq!(dialled(&mut rig), [0]);
}

#[test]
fn a_transport_asked_for_by_name_is_refused_in_time_also_while_a_dial_takes_long() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 1)]);
    rig.scheduler.declare(rig.peer, path(1), PathSpec::new(SHM, 0)).unwrap();
    let named = JobSpec { asked: Asked::Only(SHM), ..rig.spec(10) };
    rig.submit(named);
    let dial = Action::Dial { peer: rig.peer, path: path(1) };
    assert_eq!(rig.actions(), [dial], "and nobody says how it went");
    let deadline = rig.now + Config::default().connect_deadline;
    assert!(rig.scheduler.next_wake() <= deadline);
    rig.now = deadline;
    rig.scheduler.on_timer(rig.now);
    let actions = rig.actions();
    let refused = |action: &Action| matches!(action, Action::Finish(done) if done.end == Some(Cause::CannotConnect));
    assert!(actions.iter().any(refused), "{actions:?}");
    // One that was under way waits for its path to come back, by its own deadline.
    rig.scheduler.on_open(rig.now, rig.peer, path(1));
    rig.submit(named);
    let (posting, ..) = rig.post();
    rig.lost(posting, Fault::PathLost, 10, Far::Untouched);
    rig.scheduler.on_down(rig.peer, path(1), 1);
    rig.now = rig.now + millis(1_500);
    rig.scheduler.on_timer(rig.now);
    assert!(!rig.actions().iter().any(|action| matches!(action, Action::Finish(_))));
}

#[test]
fn a_shut_down_scheduler_ends_everything_and_is_empty() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0)]);
    rig.submit(rig.spec(40 * MB));
    let posted = rig.posts();
    rig.submit(JobSpec { asked: Asked::Only(TCP), ..rig.spec(10) });
    rig.scheduler.shut_down(rig.now);
    assert!(rig.actions().iter().all(|action| !matches!(action, Action::Post { .. })));
    for (posting, _, bytes) in posted {
        rig.lost(posting, Fault::Cancelled, bytes, Far::Unknown);
    }
    rig.actions();
    assert_eq!((rig.scheduler.jobs(), rig.scheduler.slices(), rig.scheduler.load(rig.peer)), (0, 0, Some(Load::NONE)));
    assert!(rig.scheduler.remove_peer(rig.peer));
}
