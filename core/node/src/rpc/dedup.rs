//! Mutations are done once, however often they are asked for.
//!
//! A caller gives a mutation an id and repeats both when it hears no answer. The target remembers the answers of those
//! that were done, and lets a repetition wait for the one that is still being done. What failed is forgotten: trying
//! again is what the caller wants then. Bounded by [`ANSWERS_MAX`] answers and [`ANSWERS_LEN_MAX`] bytes, oldest first.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt, Shared, WeakShared};
use millpond_core::wire::message::rpc::Refusal;
use millpond_core::wire::session::Peer;
use parking_lot::Mutex;

/// Answers that are remembered.
const ANSWERS_MAX: usize = 16 << 10;

/// Bytes of the answers that are remembered.
const ANSWERS_LEN_MAX: usize = 32 << 20;

pub(super) type Outcome = Result<Vec<u8>, Refusal>;
type Work = BoxFuture<'static, Arc<Outcome>>;

/// Which mutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    node: [u8; 16],
    incarnation: u64,
    method: u16,
    id: NonZeroU64,
}

impl Key {
    pub(super) fn new(peer: &Peer, method: u16, id: NonZeroU64) -> Self {
        let identity = &peer.hello.identity;
        Self { node: identity.node, incarnation: identity.incarnation, method, id }
    }
}

#[derive(Debug)]
enum Entry {
    /// Being done, by its `serial`-th start; if this cannot be upgraded, it is about to be forgotten.
    Running {
        work: WeakShared<Work>,
        serial: u64,
    },
    Done(Arc<Outcome>),
}

#[derive(Debug, Default)]
struct Answers {
    entries: HashMap<Key, Entry>,
    order: VecDeque<(Key, usize)>,
    len: usize,
    starts: u64,
}

/// The mutations that a node remembers.
#[derive(Clone, Debug, Default)]
pub(super) struct Dedup {
    answers: Arc<Mutex<Answers>>,
}

impl Dedup {
    /// The outcome of the mutation `key`: remembered, waited for, or made by `start`.
    pub(super) async fn once(&self, key: Key, start: impl FnOnce() -> BoxFuture<'static, Outcome>) -> Outcome {
        let work = self.join(key, start);
        Outcome::clone(&*work.await)
    }

    fn join(&self, key: Key, start: impl FnOnce() -> BoxFuture<'static, Outcome>) -> Shared<Work> {
        let mut answers = self.answers.lock();
        match answers.entries.get(&key) {
            Some(Entry::Done(outcome)) => return futures::future::ready(outcome.clone()).boxed().shared(),
            Some(Entry::Running { work, .. }) => {
                if let Some(work) = work.upgrade() {
                    return work;
                }
            }
            None => {}
        }
        answers.starts += 1;
        let serial = answers.starts;
        let (outcome, end) = (start(), Forget { dedup: self.clone(), key, serial });
        let work = async move {
            let outcome = Arc::new(outcome.await);
            if outcome.is_ok() {
                end.dedup.remember(key, outcome.clone());
            }
            outcome
        };
        let work = work.boxed().shared();
        if let Some(weak) = work.downgrade() {
            answers.entries.insert(key, Entry::Running { work: weak, serial });
        }
        work
    }

    fn remember(&self, key: Key, outcome: Arc<Outcome>) {
        let mut answers = self.answers.lock();
        let len = outcome.as_ref().as_ref().map_or(0, Vec::len);
        answers.entries.insert(key, Entry::Done(outcome));
        answers.order.push_back((key, len));
        answers.len += len;
        while answers.order.len() > ANSWERS_MAX || answers.len > ANSWERS_LEN_MAX {
            let Some((oldest, len)) = answers.order.pop_front() else { break };
            answers.entries.remove(&oldest);
            answers.len -= len;
        }
    }
}

/// Takes a mutation out of the table that failed or was dropped half-way.
struct Forget {
    dedup: Dedup,
    key: Key,
    serial: u64,
}

impl Drop for Forget {
    fn drop(&mut self) {
        let mut answers = self.dedup.answers.lock();
        // It may be done, and remembered, or started anew since; neither is ours to forget.
        if matches!(answers.entries.get(&self.key), Some(Entry::Running { serial, .. }) if *serial == self.serial) {
            answers.entries.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::channel::oneshot;
    use futures::executor::block_on;
    use futures::future::poll_immediate;
    use millpond_core::wire::message::rpc::Reason;

    use super::*;

    fn key(id: u64) -> Key {
        Key { node: [1; 16], incarnation: 1, method: 2, id: NonZeroU64::new(id).unwrap() }
    }

    #[test]
    fn a_repetition_waits_for_the_first_even_if_that_one_goes_away() {
        let (dedup, starts) = (Dedup::default(), AtomicUsize::new(0));
        let (sender, receiver) = oneshot::channel::<Vec<u8>>();
        let start = || {
            starts.fetch_add(1, Ordering::Relaxed);
            async move { Ok(receiver.await.unwrap()) }.boxed()
        };
        let mut first = Box::pin(dedup.once(key(1), start));
        assert!(block_on(poll_immediate(&mut first)).is_none());
        let mut second = Box::pin(dedup.once(key(1), || unreachable!()));
        assert!(block_on(poll_immediate(&mut second)).is_none());
        drop(first);
        sender.send(vec![7]).unwrap();
        assert_eq!(block_on(second), Ok(vec![7]));
        assert_eq!(block_on(dedup.once(key(1), || unreachable!())), Ok(vec![7]));
        assert_eq!(starts.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_failed_or_was_dropped_is_done_again_and_leaves_nothing_behind() {
        let dedup = Dedup::default();
        let no = || async { Err(Refusal::new(Reason::Busy, "")) }.boxed();
        assert!(block_on(dedup.once(key(1), no)).is_err());
        assert!(dedup.answers.lock().entries.is_empty());
        let mut dropped = Box::pin(dedup.once(key(1), || futures::future::pending().boxed()));
        assert!(block_on(poll_immediate(&mut dropped)).is_none());
        assert_eq!(dedup.answers.lock().entries.len(), 1);
        drop(dropped);
        assert!(dedup.answers.lock().entries.is_empty());
        let yes = || async { Ok(vec![1]) }.boxed();
        assert_eq!(block_on(dedup.once(key(1), yes)), Ok(vec![1]));
        assert_eq!(block_on(dedup.once(key(1), || unreachable!())), Ok(vec![1]));
    }

    #[test]
    fn the_oldest_answers_are_forgotten() {
        let dedup = Dedup::default();
        let long = ANSWERS_LEN_MAX / 4;
        for id in 1..=6 {
            block_on(dedup.once(key(id), || async move { Ok(vec![0; long]) }.boxed())).unwrap();
        }
        let answers = dedup.answers.lock();
        assert!(answers.len <= ANSWERS_LEN_MAX && answers.entries.len() == 4);
        assert!(!answers.entries.contains_key(&key(2)) && answers.entries.contains_key(&key(3)));
    }
}
