//! The slow, obvious directory: lists, linear scans, no index. Same answers, or one of the two is wrong.

mod oracle;

pub use oracle::Oracle;

use millpond_core::directory::{Directory, SeededBug};
use millpond_core::time::Instant;
use millpond_fuzz::directory::{Op, Subject, World, config};

/// Runs `ops` on the product and on the oracle. The first difference, in words.
///
/// # Errors
/// The number of the operation, the call, and both answers.
pub fn compare(first: u8, ops: &[Op], seeded_bug: Option<SeededBug>) -> Result<(), String> {
    let mut world = World::default();
    let mut product = Directory::new(Instant::ZERO, config(first, seeded_bug));
    let mut oracle = Oracle::new(config(first, None));
    for (number, op) in ops.iter().enumerate() {
        let (now, call) = world.call(*op);
        let (got, expected) = (product.apply(now, &call), oracle.apply(now, &call));
        if got != expected {
            return Err(format!("operation {number}, {call:?}\nproduct: {got:?}\noracle:  {expected:?}"));
        }
        if let Some(broken) = product.broken_invariant() {
            return Err(format!("operation {number}, {call:?}: {broken}"));
        }
        world.observe(&got);
    }
    Ok(())
}
