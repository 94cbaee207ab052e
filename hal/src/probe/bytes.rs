//! Runs byte tests over a driver: a path is used only after right bytes went over it both ways.
//!
//! Which test is due and what its result means is [`Trials`]' business; here the bytes are put in place, moved by the
//! driver, and looked at *by another way* than the one tested: a driver that reports success and moves nothing is only
//! found by who does not ask it.

use millpond_core::slab::Slot;
use millpond_core::time::Instant;
use millpond_core::topology::{Ended, Entry, Path, TRIAL_LEN, TRIAL_MARGIN, Trial, Trials, Verdict};

/// Bytes of scratch memory at each end.
pub const SCRATCH_LEN: usize = TRIAL_LEN + 2 * TRIAL_MARGIN;

/// Which end of a path.
///
/// Example: `hal/src/probe/bytes.rs` (`run`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The memory here that the path is about.
    Here,
    /// The peer's scratch memory.
    There,
}

/// What moves bytes over paths, with [`SCRATCH_LEN`] bytes of scratch memory at each end of each. Failures are told by a
/// code of the driver's own, such as an error number.
///
/// Example: `hal/src/probe/bytes.rs` (`run`).
pub trait Driver {
    /// Writes the whole scratch memory of one end, not by the path: by the CPU, or a copy of the device's own.
    fn put(&mut self, path: &Path, side: Side, bytes: &[u8]) -> Result<(), i32>;

    /// Moves [`TRIAL_LEN`] bytes at [`TRIAL_MARGIN`] of the one end's scratch memory to the same place of the other's, over
    /// the path, and returns when the driver says that they are there.
    fn transfer(&mut self, trial: &Trial) -> Result<(), i32>;

    /// Reads the whole scratch memory of one end, not by the path.
    fn take(&mut self, path: &Path, side: Side, into: &mut [u8]) -> Result<(), i32>;
}

/// Runs one test.
///
/// ```
/// use millpond_core::batch::MemoryKind;
/// use millpond_core::slab::{Handle, Slot};
/// use millpond_core::time::Instant;
/// use millpond_core::topology::*;
/// use millpond_hal::probe::bytes::{Driver, SCRATCH_LEN, Side, run};
///
/// /// Reports success, and moves nothing.
/// struct Liar([Vec<u8>; 2]);
///
/// impl Driver for Liar {
///     fn put(&mut self, _: &Path, side: Side, bytes: &[u8]) -> Result<(), i32> {
///         self.0[usize::from(side == Side::There)] = bytes.to_vec();
///         Ok(())
///     }
///     fn transfer(&mut self, _: &Trial) -> Result<(), i32> {
///         Ok(())
///     }
///     fn take(&mut self, _: &Path, side: Side, into: &mut [u8]) -> Result<(), i32> {
///         into.copy_from_slice(&self.0[usize::from(side == Side::There)]);
///         Ok(())
///     }
/// }
///
/// let mut trials = Trials::new([Slot::EMPTY; 1], 3);
/// trials.add(Path { memory: MemoryKind::Host, nic: 0, peer: Handle::default(), peer_nic: 0 }).unwrap();
/// let trial = trials.poll(Instant::ZERO).unwrap();
/// assert_eq!(run(&mut Liar(Default::default()), &trial), Ended::Moved(Found::Nothing));
/// ```
pub fn run(driver: &mut dyn Driver, trial: &Trial) -> Ended {
    match attempt(driver, trial) {
        Ok(ended) => ended,
        Err(code) => Ended::Failed(code),
    }
}

fn attempt(driver: &mut dyn Driver, trial: &Trial) -> Result<Ended, i32> {
    use millpond_core::topology::Direction;
    let (from, to) = match trial.direction {
        Direction::Write => (Side::Here, Side::There),
        Direction::Read => (Side::There, Side::Here),
    };
    let mut scratch = vec![0; SCRATCH_LEN];
    trial.fill(&mut scratch[TRIAL_MARGIN..][..TRIAL_LEN]);
    driver.put(&trial.path, from, &scratch)?;
    trial.blank(&mut scratch);
    driver.put(&trial.path, to, &scratch)?;
    driver.transfer(trial)?;
    driver.take(&trial.path, to, &mut scratch)?;
    Ok(Ended::Moved(trial.look(&scratch)))
}

/// Runs every test that is due now, and tells what became of each.
pub fn run_due<S: AsRef<[Slot<Entry>]> + AsMut<[Slot<Entry>]>>(
    driver: &mut dyn Driver,
    trials: &mut Trials<S>,
    mut now: impl FnMut() -> Instant,
    mut said: impl FnMut(&Trial, Verdict),
) {
    let started = now();
    // Bounded: what fails is not due again at the instant at which this began, and what passes is not due at all.
    while let Some(trial) = trials.poll(started) {
        let ended = run(driver, &trial);
        if let Some(verdict) = trials.on_end(now(), trial.id, ended) {
            said(&trial, verdict);
        }
    }
}
