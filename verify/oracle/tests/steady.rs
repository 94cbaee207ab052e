//! In steady state the cluster index allocates nothing: neither look-ups, nor events, nor lives that end, nor snapshots. Nor do
//! decisions: placement, admission, their record and its hash.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use millpond_core::hash::RouteHash;
use millpond_core::prefix::Holder;
use millpond_core::sched::admission::{Admission, Ask, Options, Outlook, Shares, Verdict};
use millpond_core::sched::cost::{Band, Profile};
use millpond_core::sched::forecast::{Occupancy, Resident};
use millpond_core::sched::index::{Change, Event, Index, Limits, Outcome};
use millpond_core::sched::placement::{self, PrefillView, Prompt};
use millpond_core::sched::record::{Log, Record};
use millpond_core::time::{Duration, Instant};

struct Counting;

thread_local! {
    /// Of this thread: the one that runs the tests may print meanwhile.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(base, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn look_ups_events_restarts_and_snapshots_allocate_nothing() {
    let limits = Limits { blocks_max: 1 << 14, sets_max: 1 << 12, ..Limits::default() };
    let mut index: Index<RouteHash, 16> = Index::new(limits, 7);
    let mut matches = index.new_matches();
    let mut lives = vec![(1_u64, 0_u64); 1_000];
    let names: Vec<RouteHash> =
        (0..4_096_u64).map(|name| RouteHash(name.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    let mut round = |step: usize| {
        let number = step.wrapping_mul(7_919) % 1_000;
        let holder = Holder(u16::try_from(number).unwrap());
        let chain = &names[step.wrapping_mul(31) % 4_000..][..24];
        let (life, last) = &mut lives[number];
        if step.is_multiple_of(97) {
            (*life, *last) = (*life + 1, 0);
        }
        *last += 1;
        let change = if step.is_multiple_of(3) { Change::Removed(chain) } else { Change::Stored(chain) };
        index.on_event(&Event { holder, life: *life, number: *last, change });
        if step.is_multiple_of(89) && index.begin_snapshot(holder, *life, *last) == Outcome::Applied {
            index.on_snapshot(holder, *life, chain);
            index.end_snapshot(holder, *life);
        }
        index.matches(chain, &mut matches);
    };
    (0..4_000).for_each(&mut round);
    let before = ALLOCATIONS.get();
    (4_000..12_000).for_each(&mut round);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(matches.longest() > 0 && index.totals().version > 8_000, "something happened");
}

#[test]
fn decisions_allocate_nothing() {
    let (profile, options) = (Profile::default(), placement::Options::default());
    let (mut admission, mut occupancy) = (Admission::new(Options::default()), Occupancy::new(8));
    let (mut shares, mut band) = (Shares::new(&[1.0, 2.0]), Band::new(0.9));
    let (mut record, mut log, mut verdicts) = (Record::default(), Log::new(0), [0_u32; 2]);
    let mut round = |id: u64| {
        let now = Instant::ZERO + Duration::from_millis(100 * id);
        let tokens = 1_000 + u32::try_from(id * 7_919 % 20_000).unwrap();
        record.begin(now, id, Prompt { tokens, turn: id }, id);
        for instance in 0..64_u32 {
            let wait = Duration::from_millis(u64::from(instance) * id % 2_000);
            record.prefill.push(PrefillView { wait, matched: instance % 20, ..PrefillView::default() });
        }
        let placed = record.place(&options, &profile).unwrap();
        let ask = Ask { id, tokens, tenant: u32::try_from(id % 2).unwrap(), ..Ask::default() };
        let ttft = band.interval(placed.chosen.ttft.as_secs_f64());
        let prefill = placed.chosen.prefill.as_secs_f64();
        let outlook = Outlook { ttft, prefill, occupancy: &occupancy, profile: &profile };
        let answer = admission.on_arrival(now, &ask, outlook, &shares);
        record.answer = Some(answer);
        log.push(&mut record);
        shares.on_asked(now, ask.tenant, prefill);
        band.on_measured(ttft, ttft.expected * 1.1);
        verdicts[usize::from(answer.verdict == Verdict::Admit)] += 1;
        if let (Verdict::Admit, Some(decode)) = (answer.verdict, answer.decode) {
            occupancy.reserve(
                decode,
                Resident { id, tokens, hint: None, tbt: ask.slo.tbt, join: answer.join, joined: None },
            );
            occupancy.on_joined(decode, id, now);
        }
        // Answers last 30 seconds.
        for decode in 0..8 {
            occupancy.on_steps(decode, id);
            if id >= 300 && occupancy.on_left(decode, id - 300).is_some() {
                admission.on_ended(now, 300, None, Duration::from_secs(30));
            }
        }
    };
    (0..4_000).for_each(&mut round);
    let before = ALLOCATIONS.get();
    (4_000..12_000).for_each(&mut round);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(verdicts.iter().all(|&count| count > 500), "some were served and some refused: {verdicts:?}");
}
