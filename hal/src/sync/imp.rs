//! What `sync` stands on when loom explores it: loom's atomics and locks, and rules that can be switched off.

use std::cell::Cell;

pub(super) use loom::sync::MutexGuard;
pub(super) use loom::sync::atomic::{AtomicBool, Ordering, fence};

/// Loom's mutex with the calls of the real one.
pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(super) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no thread of a model panics and goes on")
    }

    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

/// A rule that can be switched off, to see loom object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seeded {
    /// `Desk::release` looks for wishes by a load.
    DeskOnlyLooks,
    /// `Mailbox::take` clears its flag before the signal.
    MailboxForgetsEarly,
    /// `full_fence` does nothing.
    NoFullFence,
    /// A ring's head is published without ordering the entry before it.
    RingPublishesRelaxed,
}

thread_local! {
    // Loom runs the threads of a model on the thread that started it.
    static OFF: Cell<Option<Seeded>> = const { Cell::new(None) };
}

/// Whether a rule is switched off for the models of this thread.
pub(crate) fn seeded(rule: Seeded) -> bool {
    OFF.get() == Some(rule)
}

/// Switches one rule off for the models of this thread, or none.
#[cfg(test)]
pub(super) fn select(rule: Option<Seeded>) {
    OFF.set(rule);
}
