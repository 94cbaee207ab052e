//! The `cuda` backend over the fake driver. None of this is proven: no GPU was asked.
//!
//! The fake does what the driver's documentation says. With `MILLPOND_CUDA=real` the conformance suite runs on the GPU of this
//! machine instead, which is what would prove it; the other tests need the fake's hands and say that they are skipped.

// As in the fake: a usize has 64 bits.
#![allow(clippy::cast_possible_truncation)]

mod conformance;
mod engine;
mod fake;
mod ipc;
mod memory;
mod order;
#[path = "../../../examples/own_runtime.rs"]
mod own_runtime;

#[test]
fn this_is_unproven_unless_a_gpu_is_asked() {
    let what = if fake::is_real() { "a GPU is asked" } else { "UNPROVEN: the fake driver was asked, and no GPU" };
    eprintln!("cuda: {what}");
}
