//! Time that passes when nobody has anything to do: whole clusters of tasks on one thread, the same run every time.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};

use futures::executor::LocalPool;
use futures::future::{BoxFuture, FutureExt};
use futures::task::{LocalSpawnExt, SpawnExt};
use millpond_core::time::Instant;
use parking_lot::Mutex;

use super::Timers;

#[derive(Clone, Default)]
pub(crate) struct VirtualTime {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    now: AtomicU64,
    /// By when they wake, and the order in which they went to sleep.
    sleepers: Mutex<BTreeMap<(u64, u64), Option<Waker>>>,
    slept: AtomicU64,
    spawned: Mutex<Vec<BoxFuture<'static, ()>>>,
}

/// One that sleeps, or slept.
struct Sleeper {
    shared: Arc<Shared>,
    key: (u64, u64),
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.shared.sleepers.lock().remove(&self.key);
    }
}

impl VirtualTime {
    pub(crate) fn timers(&self) -> Timers {
        let (clock, alarm) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        Timers {
            now: Arc::new(move || Instant::from_nanos(clock.now.load(Ordering::SeqCst))),
            sleep: Arc::new(move |span| {
                let at = alarm.now.load(Ordering::SeqCst).saturating_add(span.as_nanos());
                let key = (at, alarm.slept.fetch_add(1, Ordering::SeqCst));
                let sleeper = Sleeper { shared: Arc::clone(&alarm), key };
                poll_fn(move |context| {
                    let Sleeper { shared, key } = &sleeper;
                    if shared.now.load(Ordering::SeqCst) >= key.0 {
                        return Poll::Ready(());
                    }
                    shared.sleepers.lock().insert(*key, Some(context.waker().clone()));
                    Poll::Pending
                })
                .boxed()
            }),
        }
    }

    pub(crate) fn spawner(&self) -> Arc<dyn Fn(BoxFuture<'static, ()>) + Send + Sync> {
        let shared = Arc::clone(&self.shared);
        Arc::new(move |task| shared.spawned.lock().push(task))
    }

    /// Runs `work` and whatever is spawned until it is done; what is still running then is dropped.
    pub(crate) fn run<T: 'static>(&self, work: impl Future<Output = T> + 'static) -> T {
        let mut pool = LocalPool::new();
        let mut result = pool.spawner().spawn_local_with_handle(work).expect("the pool runs");
        loop {
            pool.run_until_stalled();
            if let Some(output) = (&mut result).now_or_never() {
                return output;
            }
            let spawned = std::mem::take(&mut *self.shared.spawned.lock());
            if !spawned.is_empty() {
                spawned.into_iter().for_each(|task| pool.spawner().spawn(task).expect("the pool runs"));
                continue;
            }
            let next = self.shared.sleepers.lock().pop_first();
            let ((at, _), waker) = next.expect("all wait for each other: nobody sleeps");
            self.shared.now.fetch_max(at, Ordering::SeqCst);
            waker.into_iter().for_each(Waker::wake);
        }
    }
}
