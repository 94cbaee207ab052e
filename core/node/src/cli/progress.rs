//! How far a long command is, on standard error, where somebody watches.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that goes when it is dropped; nothing is shown if standard error is no terminal.
pub(super) struct Bar(ProgressBar);

impl Bar {
    /// A bar of `steps` steps.
    pub(super) fn new(steps: usize) -> Self {
        let bar = ProgressBar::new(u64::try_from(steps).unwrap_or(u64::MAX));
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len}  {elapsed}, {eta} left");
        Self(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// One step is done.
    pub(super) fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
