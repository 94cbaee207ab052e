//! How work is divided among paths of one rank: by what they complete, from the first batch on.

use std::collections::VecDeque;

use super::*;

/// A link that lets `burst` bytes pass at once and then `rate` bytes a millisecond, one slice after the other, and answers
/// `latency` later.
#[derive(Clone, Copy)]
struct Link {
    rate: u64,
    burst: u64,
    latency: Duration,
}

impl Link {
    fn of(rate: u64) -> Self {
        Self { rate, burst: 0, latency: Duration::from_micros(100) }
    }
}

/// What became of a batch.
#[derive(Debug)]
struct Moved {
    bytes: Vec<u64>,
    span: Duration,
}

/// Paths over these links, nothing known of any of them.
struct Ways {
    rig: Rig,
    links: Vec<Link>,
    free_at: Vec<Instant>,
}

impl Ways {
    fn new(links: &[Link], spec: PathSpec) -> Self {
        let mut rig =
            Rig { scheduler: Scheduler::new(Config::default(), table(64), table(999), table(4)), ..Rig::new(&[]) };
        rig.peer = rig.scheduler.insert_peer(rig.now).unwrap();
        for index in 0..links.len() {
            rig.scheduler.declare(rig.peer, path(index), spec).unwrap();
            rig.scheduler.on_open(rig.now, rig.peer, path(index));
        }
        Self { free_at: vec![rig.now; links.len()], rig, links: links.to_vec() }
    }

    /// One job to its end.
    fn batch(&mut self, total: u64) -> Moved {
        let Self { rig, links, free_at } = self;
        let start = rig.now;
        rig.submit(rig.spec(total));
        let mut queues = vec![VecDeque::new(); links.len()];
        let (mut bytes, mut bursts) = (vec![0; links.len()], links.iter().map(|link| link.burst).collect::<Vec<_>>());
        while bytes.iter().sum::<u64>() < total || queues.iter().any(|queue| !queue.is_empty()) {
            for (posting, path, len) in rig.posts() {
                let paid = len - len.min(bursts[path]);
                bursts[path] -= len - paid;
                let span = Duration::from_nanos(paid * 1_000_000 / links[path].rate);
                free_at[path] = free_at[path].max(rig.now) + span;
                queues[path].push_back((free_at[path] + links[path].latency, posting));
                bytes[path] += len;
            }
            let next = queues.iter().filter_map(|queue| queue.front()).map(|(at, _)| *at).min().unwrap();
            rig.now = next;
            for queue in &mut queues {
                if let Some((_, posting)) = queue.pop_front_if(|(at, _)| *at == next) {
                    rig.done(posting);
                }
            }
        }
        rig.finished();
        Moved { bytes, span: rig.now.since(start) }
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn the_first_batch_is_divided_as_its_paths_complete_although_nothing_is_known_of_them() {
    // 125 MB/s is a link of 1 Gbit/s. What passes at once at first would make a path look faster than it is.
    for (fast, slow) in [(125_000, 125_000), (300_000, 100_000), (24_000, 8_000)] {
        for burst_ms in [0, 8] {
            let link = |rate| Link { burst: rate * burst_ms, ..Link::of(rate) };
            let mut ways = Ways::new(&[link(fast), link(slow)], PathSpec::new(TCP, 0));
            let moved = ways.batch(64 * MIB);
            let ratio = moved.bytes[0] as f64 / moved.bytes[1] as f64 / (fast as f64 / slow as f64);
            assert!((0.9..1.1).contains(&ratio), "{moved:?} at {fast} to {slow}, {burst_ms} ms at once");
        }
    }
}

#[test]
fn the_first_batch_over_fast_paths_ends_within_a_slice_of_when_it_could() {
    let mut ways = Ways::new(&[Link::of(3_000_000), Link::of(1_000_000)], PathSpec::new(TCP, 0));
    let moved = ways.batch(64 * MIB);
    assert!(moved.span < millis(64 * MIB / 4_000_000) + SLICE_SPAN, "{moved:?}");
}

#[test]
fn the_first_batch_over_two_like_paths_takes_little_more_than_half_the_time_of_one() {
    for total in [16 * MIB, 64 * MIB] {
        let alone = Ways::new(&[Link::of(125_000)], PathSpec::new(TCP, 0)).batch(total);
        let both = Ways::new(&[Link::of(125_000); 2], PathSpec::new(TCP, 0)).batch(total);
        let gain = alone.span.as_nanos() as f64 / both.span.as_nanos() as f64;
        assert!(gain > 1.8, "{gain}: {alone:?}, {both:?}");
    }
}

#[test]
fn a_path_that_is_far_slower_delays_the_first_batch_by_no_more_than_a_short_slice_and_later_ones_hardly() {
    let links = [Link::of(1_000_000), Link::of(10_000)];
    let short = PathSpec::new(TCP, 0).slice_len_min;
    let alone = Ways::new(&links[..1], PathSpec::new(TCP, 0)).batch(64 * MIB).span;
    for order in [[0, 1], [1, 0]] {
        let mut ways = Ways::new(&order.map(|at| links[at]), PathSpec::new(TCP, 0));
        let first = ways.batch(64 * MIB);
        let lent = Duration::from_nanos(short * 1_000_000 / 10_000);
        assert!(first.span < alone + lent + millis(1), "{first:?}, and {alone:?} alone");
        let later = ways.batch(64 * MIB);
        assert!(later.span < alone + millis(8), "{later:?}, and {alone:?} alone");
    }
}

#[test]
fn a_path_that_is_alone_is_lent_all_that_fits() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
    rig.down(1, 1);
    rig.submit(rig.spec(60 * MIB));
    let lens: Vec<u64> = rig.posts().iter().map(|post| post.2).collect();
    assert_eq!(lens, [16 * MIB, 16 * MIB, 16 * MIB, 12 * MIB]);
}

#[test]
fn jobs_of_a_short_slice_do_not_wait_until_a_path_has_shown_what_it_can() {
    let mut rig = Rig::new(&[PathSpec::new(TCP, 0), PathSpec::new(TCP, 0)]);
    for _ in 0..32 {
        rig.submit(rig.spec(256 << 10));
    }
    assert_eq!(rig.posts().len(), 32);
    rig.submit(rig.spec(MIB));
    assert_eq!(rig.posts().len(), 0, "a longer one does");
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
