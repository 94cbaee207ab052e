//! Hand-over between threads that is not just a lock: the one place where the order of memory accesses is ours to get right.
//!
//! Everything else that threads share is behind a mutex, an `AtomicWaker`, or a counter that publishes nothing. What is here is
//! explored by loom, every interleaving and every value that a weak machine may show (`RUSTFLAGS="--cfg loom" cargo test -p
//! millpond-hal --lib --target-dir target/loom sync`), and each rule that it rests on can be switched off there to see loom object.
//!
//! It knows no fabric, no ring and no shard. Invariants: see the types.

use core::fmt;
use core::ops::{Deref, DerefMut};

use imp::{AtomicBool, Mutex, MutexGuard, Ordering};
pub(crate) use imp::{Seeded, seeded};

#[cfg(not(loom))]
mod imp {
    pub(super) use core::sync::atomic::{AtomicBool, Ordering, fence};
    pub(super) use parking_lot::{Mutex, MutexGuard};

    /// A rule that can be switched off, under loom only.
    #[derive(Clone, Copy)]
    pub(crate) enum Seeded {
        DeskOnlyLooks,
        MailboxForgetsEarly,
        NoFullFence,
        RingPublishesRelaxed,
    }

    /// Whether a rule is switched off: never.
    pub(crate) const fn seeded(_rule: Seeded) -> bool {
        false
    }
}

#[cfg(loom)]
mod imp;
#[cfg(all(loom, test))]
mod model;

/// State behind a lock that nobody has to wait for: who finds it taken leaves a wish, and the holder grants it.
///
/// Invariant: no wish stays on the desk while nobody holds the lock, provided that whoever gets a [`Held`] takes the wishes and
/// goes on until [`Desk::release`] gives none back. Values move in and out by ownership; nothing here blocks but [`Desk::lock`].
///
/// ```
/// use millpond_hal::sync::{Desk, Held};
///
/// /// Adds up what is wished for.
/// fn serve(desk: &Desk<u64, u64>, held: Held<'_, u64>) {
///     let mut next = Some(held);
///     while let Some(mut held) = next {
///         *held += desk.take_wishes(&held).into_iter().sum::<u64>();
///         next = desk.release(held);
///     }
/// }
/// let desk = Desk::new(0);
/// let held = desk.lock();
/// assert!(desk.leave(7).is_none()); // taken: the holder will see to it
/// serve(&desk, held);
/// assert_eq!(*desk.lock(), 7);
/// ```
pub struct Desk<S, W> {
    state: Mutex<S>,
    wishes: Mutex<Vec<W>>,
    has_wishes: AtomicBool,
}

/// The lock of a [`Desk`], held; its state. Hand it to [`Desk::release`] rather than drop it.
///
/// Example: [`Desk`].
pub struct Held<'a, S>(MutexGuard<'a, S>);

impl<S, W> Desk<S, W> {
    /// A desk without wishes.
    pub fn new(state: S) -> Self {
        Self { state: Mutex::new(state), wishes: Mutex::new(Vec::new()), has_wishes: AtomicBool::new(false) }
    }

    /// The lock; waits for it.
    pub fn lock(&self) -> Held<'_, S> {
        Held(self.state.lock())
    }

    /// The lock, unless somebody has it.
    pub fn try_lock(&self) -> Option<Held<'_, S>> {
        self.state.try_lock().map(Held)
    }

    /// Leaves a wish. `None`: whoever holds the lock will find it. Otherwise the caller holds the lock, and grants it.
    pub fn leave(&self, wish: W) -> Option<Held<'_, S>> {
        self.wishes.lock().push(wish);
        // An exchange, as in `release`: of the two, one comes second and sees what the other did before its own.
        self.has_wishes.swap(true, Ordering::AcqRel);
        self.try_lock()
    }

    /// What was wished for since the last call, in order. For the holder.
    pub fn take_wishes(&self, _held: &Held<'_, S>) -> Vec<W> {
        if !self.has_wishes.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut wishes = self.wishes.lock();
        self.has_wishes.swap(false, Ordering::AcqRel);
        core::mem::take(&mut *wishes)
    }

    /// Lets go of the lock. Gives it back if a wish was left meanwhile that nobody else will see.
    pub fn release<'a>(&'a self, held: Held<'a, S>) -> Option<Held<'a, S>> {
        drop(held);
        // Not a load: after unlocking, a load may still answer from before a wish whose owner found the lock taken.
        let has_wishes = if seeded(Seeded::DeskOnlyLooks) {
            self.has_wishes.load(Ordering::SeqCst)
        } else {
            self.has_wishes.fetch_or(false, Ordering::AcqRel)
        };
        if has_wishes { self.try_lock() } else { None }
    }
}

impl<S, W> fmt::Debug for Desk<S, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").finish_non_exhaustive()
    }
}

impl<S> Deref for Held<'_, S> {
    type Target = S;
    fn deref(&self) -> &S {
        &self.0
    }
}

impl<S> DerefMut for Held<'_, S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.0
    }
}

impl<S: fmt::Debug> fmt::Debug for Held<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Values from any thread for one reader, who sleeps on a signal (an eventfd, say) while there are none.
///
/// Invariant: while the mailbox has a value, either it is pending and the signal was or is about to be given, or the reader is
/// in [`Mailbox::take`]. The signal is given once per emptying, not once per value.
///
/// ```
/// let mailbox = millpond_hal::sync::Mailbox::default();
/// assert!(mailbox.push(1)); // give the signal
/// assert!(!mailbox.push(2)); // it was given
/// let mut values = Vec::new();
/// mailbox.take(&mut values, || { /* clear the signal */ });
/// assert_eq!((values, mailbox.is_pending()), (vec![1, 2], false));
/// ```
pub struct Mailbox<T> {
    values: Mutex<Vec<T>>,
    is_pending: AtomicBool,
}

impl<T> Mailbox<T> {
    /// Leaves a value. `true`: the caller must give the signal now.
    #[must_use = "the reader sleeps on unless it is given the signal"]
    pub fn push(&self, value: T) -> bool {
        self.values.lock().push(value);
        self.call()
    }

    /// Calls the reader without a value. `true`: the caller must give the signal now.
    #[must_use = "the reader sleeps on unless it is given the signal"]
    pub fn call(&self) -> bool {
        !self.is_pending.swap(true, Ordering::AcqRel)
    }

    /// Whether the reader was called since it last took the values.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire)
    }

    /// For the reader: clears the signal with `forget` and moves the values into `into`, in order of their pushing.
    pub fn take(&self, into: &mut Vec<T>, forget: impl FnOnce()) {
        if !self.is_pending() {
            return;
        }
        // The signal is cleared before the flag: a call in between gives it again, and is at worst one too many.
        if seeded(Seeded::MailboxForgetsEarly) {
            self.is_pending.swap(false, Ordering::AcqRel);
            forget();
        } else {
            forget();
            self.is_pending.swap(false, Ordering::AcqRel);
        }
        into.append(&mut self.values.lock());
    }
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self { values: Mutex::new(Vec::new()), is_pending: AtomicBool::new(false) }
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("is_pending", &self.is_pending()).finish_non_exhaustive()
    }
}

/// 64-bit words that another process looks at too. An index beyond the end reads as 0 or panics, as the memory's owner likes.
pub(crate) trait Words {
    /// The word number `at`.
    fn load(&self, at: usize, order: core::sync::atomic::Ordering) -> u64;
}

/// Words that are this process's to write.
pub(crate) trait WordsMut: Words {
    /// Sets the word number `at`.
    fn store(&self, at: usize, value: u64, order: core::sync::atomic::Ordering);
}

/// Orders everything before it against everything after it, also across processes: "I publish, then look whether you sleep".
pub(crate) fn full_fence() {
    if !seeded(Seeded::NoFullFence) {
        imp::fence(Ordering::SeqCst);
    }
}
