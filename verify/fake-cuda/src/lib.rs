//! A libcuda.so.1 without a GPU, for tests of the `cuda` backend.
//!
//! Memory of its GPUs is a memfd that is mapped without any right where callers are told that it is, and a second time for the
//! fake's own copies: whoever touches it by CPU dies of it. What is put into a stream is done later, by a thread of the fake's,
//! in an order among streams that a seed draws, or step by step as a test allows. Copies from and to the host are refused
//! unless the memory is page-locked by one registration. Calls are counted, and fail when a test wants them to.
//!
//! Tests load it by path (`tests/unproven/fake.rs`) before anything asks for libcuda; whoever asks then gets it. For a whole
//! process, `LD_PRELOAD` does the same. `MILLPOND_FAKE_CUDA_GPUS` says how many GPUs it shows, `MILLPOND_FAKE_CUDA_INIT` with
//! which number `cuInit` fails. What it does is what the driver's documentation says; whether a driver does that, only a GPU
//! can tell.

// The driver's addresses are 64 bits, and so is a usize where there is a driver.
#![allow(clippy::cast_possible_truncation)]

mod calls;
mod control;
mod memory;
mod state;
mod worker;
