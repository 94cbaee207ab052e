//! Small loads worked out by hand.

use super::*;
use crate::sched::cost::{Interval, Profile};
use crate::sched::forecast::{Occupancy, Resident};
use crate::sched::placement::DecodeView;
use crate::time::Instant;

const TTFT: Interval = Interval { low: 0.9, expected: 1.0, high: 1.1 };

fn admission(policy: Policy) -> Admission {
    Admission::new(Options { policy, ..Options::default() })
}

/// `batch` requests of 12,000 tokens on each of two instances, joined or still on their way.
fn occupied(batch: u64, joined: bool, join: Instant) -> Occupancy {
    let mut occupancy = Occupancy::new(2);
    for instance in 0..2 {
        for id in 0..batch {
            occupancy.reserve(
                instance,
                Resident { id, tokens: 12_000, hint: None, tbt: Slo::default().tbt, join, joined: joined.then_some(0) },
            );
        }
    }
    occupancy
}

fn ask() -> Ask {
    Ask { id: 99, tokens: 12_000, ..Ask::default() }
}

fn decide(admission: &mut Admission, occupancy: &Occupancy, ask: &Ask) -> Verdict {
    let profile = Profile::default();
    let outlook = Outlook { ttft: TTFT, prefill: 1.0, occupancy, profile: &profile };
    admission.on_arrival(Instant::ZERO, ask, outlook, &Shares::default()).verdict
}

#[test]
fn none_admits_into_a_full_cluster_and_late_leaves_it_to_the_door() {
    let full = occupied(40, true, Instant::ZERO);
    assert_eq!(decide(&mut admission(Policy::None), &full, &ask()), Verdict::Admit);
    assert_eq!(decide(&mut admission(Policy::Late), &full, &ask()), Verdict::Admit);
    let view = full.view_now(0);
    let at = Arrival { arrived: Instant::ZERO, prefilled: Instant::ZERO, tbt: Slo::default().tbt };
    assert_eq!(admission(Policy::None).at_door(&ask(), at, view, &Profile::default()), Door::Join);
    assert_eq!(admission(Policy::Late).at_door(&ask(), at, view, &Profile::default()), Door::Refuse);
}

#[test]
fn early_sees_the_batch_of_now_and_not_what_is_on_its_way() {
    let refused = |verdict| matches!(verdict, Verdict::Refuse { reason: Reason::Tbt, .. });
    assert!(refused(decide(&mut admission(Policy::Early), &occupied(21, true, Instant::ZERO), &ask())));
    assert_eq!(decide(&mut admission(Policy::Early), &occupied(20, true, Instant::ZERO), &ask()), Verdict::Admit);
    let coming = occupied(100, false, Instant::ZERO + Duration::from_millis(500));
    assert_eq!(decide(&mut admission(Policy::Early), &coming, &ask()), Verdict::Admit);
    assert!(refused(decide(&mut admission(Policy::EarlyUniform), &coming, &ask())));
    assert!(refused(decide(&mut admission(Policy::Millpond), &coming, &ask())));
}

#[test]
fn early_uniform_takes_out_who_is_there_for_longer_than_the_mean() {
    let mut admission = admission(Policy::EarlyUniform);
    (0..2_000).for_each(|_| admission.on_ended(Instant::ZERO, 100, None, Duration::from_secs(5)));
    let old = occupied(40, true, Instant::ZERO);
    let profile = Profile::default();
    let mut at = |secs| {
        let outlook = Outlook { ttft: TTFT, prefill: 1.0, occupancy: &old, profile: &profile };
        admission.on_arrival(Instant::ZERO + Duration::from_secs(secs), &ask(), outlook, &Shares::default()).verdict
    };
    assert!(matches!(at(2), Verdict::Refuse { .. }) && at(6) == Verdict::Admit);
}

#[test]
fn a_first_token_that_would_be_late_is_refused_by_all_but_none() {
    let profile = Profile::default();
    let idle = Occupancy::new(1);
    for policy in Policy::ALL {
        let ttft = Interval { low: 30.0, expected: 32.0, high: 35.0 };
        let outlook = Outlook { ttft, prefill: 1.0, occupancy: &idle, profile: &profile };
        let verdict = admission(policy).on_arrival(Instant::ZERO, &ask(), outlook, &Shares::default()).verdict;
        let refused = Verdict::Refuse { reason: Reason::Ttft, retry_after: Duration::from_secs(5) };
        assert_eq!(verdict, if policy == Policy::None { Verdict::Admit } else { refused }, "{policy:?}");
        let patient = Ask { slo: Slo { ttft: Duration::from_secs(60), ..Slo::default() }, ..ask() };
        assert_eq!(
            admission(policy).on_arrival(Instant::ZERO, &patient, outlook, &Shares::default()).verdict,
            Verdict::Admit
        );
    }
}

#[test]
fn millpond_holds_at_the_door_until_the_first_tokens_deadline_at_most() {
    let admission = admission(Policy::Millpond);
    let view = DecodeView { batch: 21, context: 260_000, ..DecodeView::default() };
    let door = |prefilled_secs| {
        let prefilled = Instant::ZERO + Duration::from_secs(prefilled_secs);
        let at = Arrival { arrived: Instant::ZERO, prefilled, tbt: Slo::default().tbt };
        admission.at_door(&ask(), at, view, &Profile::default())
    };
    assert_eq!(door(1), Door::Hold(Instant::ZERO + Duration::from_secs(1) + Options::default().hold));
    assert_eq!(door(29), Door::Hold(Instant::ZERO + Duration::from_secs(30)));
}

#[test]
fn the_strictest_deadline_of_a_batch_rules_at_the_door() {
    let admission = admission(Policy::Late);
    let view = DecodeView { batch: 10, context: 100_000, ..DecodeView::default() };
    let with = |tbt_ms| {
        let at = Arrival { arrived: Instant::ZERO, prefilled: Instant::ZERO, tbt: Duration::from_millis(tbt_ms) };
        admission.at_door(&ask(), at, view, &Profile::default())
    };
    assert_eq!((with(70), with(60)), (Door::Join, Door::Refuse));
}

#[test]
fn an_empty_instance_takes_a_request_that_no_instance_could_serve_in_time() {
    let hurried = Ask { slo: Slo { tbt: Duration::from_millis(1), ..Slo::default() }, ..ask() };
    let at = Arrival { arrived: Instant::ZERO, prefilled: Instant::ZERO, tbt: Duration::MAX };
    assert_eq!(admission(Policy::Late).at_door(&hurried, at, DecodeView::default(), &Profile::default()), Door::Join);
    assert_eq!(decide(&mut admission(Policy::Millpond), &Occupancy::new(1), &hurried), Verdict::Admit);
}

#[test]
fn higher_priorities_get_places_that_others_do_not() {
    let (mut low, mut high) = (0, 0);
    for batch in 15..30 {
        let full = occupied(batch, true, Instant::ZERO);
        let admitted =
            |priority| decide(&mut admission(Policy::Millpond), &full, &Ask { priority, ..ask() }) == Verdict::Admit;
        low += u32::from(admitted(0));
        high += u32::from(admitted(2));
    }
    assert_eq!(high, low + 2, "two places each by two steps of priority");
}

#[test]
fn refusals_are_told_to_come_back_one_after_the_other() {
    let full = occupied(24, true, Instant::ZERO);
    let mut admission = admission(Policy::Millpond);
    // Two endings a second.
    (0..60).for_each(|_| admission.on_ended(Instant::ZERO, 300, None, Duration::from_secs(10)));
    let mut last = Duration::ZERO;
    for n in 0..10 {
        let Verdict::Refuse { reason: Reason::Tbt, retry_after } = decide(&mut admission, &full, &ask()) else {
            panic!()
        };
        let gap = (retry_after - last).as_millis();
        assert!(n == 0 || (499..=501).contains(&gap), "{n}: {gap}");
        last = retry_after;
    }
    let mut many = admission;
    (0..1_000).for_each(|_| assert!(matches!(decide(&mut many, &full, &ask()), Verdict::Refuse { retry_after, .. } if retry_after <= Duration::from_secs(60))));
}

#[test]
fn where_places_are_short_long_answers_are_refused_first_but_some_are_served() {
    let mut admission = admission(Policy::Millpond);
    let (full, idle) = (occupied(40, true, Instant::ZERO), occupied(0, true, Instant::ZERO));
    let hinted = |hint| Ask { hint: Some(hint), ..ask() };
    assert_eq!(decide(&mut admission, &idle, &hinted(3_000)), Verdict::Admit);
    (0..200).for_each(|_| assert_ne!(decide(&mut admission, &full, &hinted(100)), Verdict::Admit));
    assert_eq!(decide(&mut admission, &idle, &hinted(20)), Verdict::Admit);
    let served = (0..80).filter(|_| decide(&mut admission, &idle, &hinted(3_000)) == Verdict::Admit).count();
    assert_eq!(served, 20, "one in four");
}

#[test]
fn without_an_instance_requests_are_refused() {
    for policy in Policy::ALL {
        let Verdict::Refuse { reason, .. } = decide(&mut admission(policy), &Occupancy::new(0), &ask()) else {
            panic!()
        };
        assert_eq!(reason, Reason::Down);
    }
}
