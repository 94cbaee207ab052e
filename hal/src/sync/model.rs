//! Loom's models of `sync` and of the shared-memory rings: all interleavings, all values that a weak machine may show.

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;

use super::{Desk, Held, Mailbox, Seeded, Words, WordsMut, full_fence, imp};
use crate::backend::shm::half::{Counter, ENTRY_WORDS, OwnHalf, PeerHalf, Ring};

/// Explores `model`; at most three switches at places where no thread has to wait, as loom's authors advise.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// `model` holds, and loom objects once `rule` is switched off.
fn holds_by(rule: Seeded, model: fn()) {
    explore(model);
    imp::select(Some(rule));
    let outcome = catch_unwind(AssertUnwindSafe(|| explore(model)));
    imp::select(None);
    assert!(outcome.is_err(), "loom found nothing although {rule:?} is broken");
}

fn serve(desk: &Desk<u64, u64>, held: Held<'_, u64>) {
    let mut next = Some(held);
    while let Some(mut held) = next {
        *held += desk.take_wishes(&held).into_iter().sum::<u64>();
        next = desk.release(held);
    }
}

#[test]
fn no_wish_stays_while_nobody_holds_the_lock() {
    holds_by(Seeded::DeskOnlyLooks, || {
        let desk = Arc::new(Desk::new(0));
        let wishers = [1, 2].map(|wish| {
            let desk = Arc::clone(&desk);
            thread::spawn(move || {
                if let Some(held) = desk.leave(wish) {
                    serve(&desk, held);
                }
            })
        });
        if let Some(held) = desk.try_lock() {
            serve(&desk, held);
        }
        wishers.into_iter().for_each(|wisher| wisher.join().unwrap());
        assert_eq!(*desk.lock(), 3, "a wish was left lying");
    });
}

#[test]
fn a_reader_that_sleeps_has_no_mail() {
    holds_by(Seeded::MailboxForgetsEarly, || {
        let (mailbox, signal) = (Arc::new(Mailbox::default()), Arc::new(AtomicBool::new(false)));
        let writers = [1, 2].map(|value| {
            let (mailbox, signal) = (Arc::clone(&mailbox), Arc::clone(&signal));
            thread::spawn(move || {
                if mailbox.push(value) {
                    signal.swap(true, Ordering::AcqRel); // a system call: nothing passes it
                }
            })
        });
        let mut values = Vec::new();
        let forget = || {
            signal.swap(false, Ordering::AcqRel);
        };
        mailbox.take(&mut values, forget);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        if signal.swap(false, Ordering::AcqRel) {
            signal.store(true, Ordering::Release);
            mailbox.take(&mut values, forget);
        }
        values.sort_unstable();
        assert_eq!(values, [1, 2], "the reader sleeps with mail in its box");
        // And it would be woken again.
        if mailbox.push(3) {
            signal.store(true, Ordering::Release);
        }
        assert!(signal.load(Ordering::Acquire), "the box is full and the signal was lost");
    });
}

/// The words of a half that a model touches: its counters, and the first entry of each ring.
#[derive(Clone)]
struct Few(Arc<Vec<AtomicU64>>);

const COUNTERS: usize = 9;
const RINGS_AT: usize = 16 * 8;

impl Few {
    fn new() -> Self {
        Self(Arc::new((0..COUNTERS + ENTRY_WORDS).map(|_| AtomicU64::new(0)).collect()))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.0[if at < RINGS_AT { at / 8 } else { COUNTERS + (at - RINGS_AT) % ENTRY_WORDS }]
    }
}

impl Words for Few {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).load(order)
    }
}

impl WordsMut for Few {
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }
}

const ENTRY: [u64; ENTRY_WORDS] = [1, 2, 3, 4, 5, 6, 7, 8];

#[test]
fn an_entry_is_whole_once_its_head_is_seen() {
    holds_by(Seeded::RingPublishesRelaxed, || {
        let words = Few::new();
        let mut own = OwnHalf::over(words.clone());
        let peer = PeerHalf::over(words).unwrap();
        let writer = thread::spawn(move || own.publish(Ring::Requests, &ENTRY));
        if peer.waiting(Ring::Requests, 0) == Some(1) {
            assert_eq!(peer.entry(Ring::Requests, 0), ENTRY, "an entry was seen half written");
        }
        writer.join().unwrap();
    });
}

#[test]
fn an_end_does_not_sleep_through_an_entry() {
    holds_by(Seeded::NoFullFence, || {
        let (ours, theirs) = (Few::new(), Few::new());
        let (mut own, sleeper) = (OwnHalf::over(ours.clone()), OwnHalf::over(theirs.clone()));
        let (us, them) = (PeerHalf::over(ours).unwrap(), PeerHalf::over(theirs).unwrap());
        let writer = thread::spawn(move || {
            own.publish(Ring::Requests, &ENTRY);
            full_fence();
            them.value(Counter::Sleep) % 2 == 1 // rings
        });
        sleeper.set(Counter::Sleep, 1);
        full_fence();
        let has_seen_it = us.waiting(Ring::Requests, 0) == Some(1);
        let was_rung = writer.join().unwrap();
        assert!(has_seen_it || was_rung, "it sleeps, and an entry waits");
    });
}

#[test]
fn bytes_copied_under_a_grant_that_still_holds_are_right() {
    holds_by(Seeded::NoFullFence, || {
        let (epoch, bytes) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(10)));
        let owner = thread::spawn({
            let (epoch, bytes) = (Arc::clone(&epoch), Arc::clone(&bytes));
            move || {
                epoch.store(0, Ordering::Release); // the grant is closed
                full_fence();
                bytes.store(99, Ordering::Relaxed); // somebody else's
            }
        });
        let copied = bytes.load(Ordering::Relaxed);
        full_fence();
        if epoch.load(Ordering::Acquire) == 1 {
            assert_eq!(copied, 10, "bytes of somebody else passed for the object's");
        }
        owner.join().unwrap();
    });
}
