//! What tests ask of the fake, and have it do.

use std::ffi::{CStr, c_char, c_int};

use crate::state::{CHANGED, Failure, StreamState, code, state};

/// # Safety
/// - `text` ends with a nul.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's duty.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// How often a function was called, by its name without a version.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_count(call: *const c_char) -> u64 {
    // SAFETY: tests pass literals.
    state().counts.get(&unsafe { text(call) }).copied().unwrap_or(0)
}

/// Answers `code` to a call of that name, after `after` that work.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_fail(call: *const c_char, code: c_int, after: u64) {
    // SAFETY: tests pass literals.
    let call = unsafe { text(call) };
    state().failures.push(Failure { call, code, after });
}

/// A GPU fails: all that is asked of it answers so from now on.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_kill(ordinal: u16) {
    state().kill(ordinal, code::ILLEGAL_ADDRESS);
    CHANGED.notify_all();
}

/// Does nothing more, but `steps` pieces of work.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_hold(steps: u64) {
    state().steps = Some(steps);
    CHANGED.notify_all();
}

/// Does all there is.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_go() {
    state().steps = None;
    CHANGED.notify_all();
}

/// What is in a stream takes for ever, until it does not.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_block(stream: u64, is_blocked: c_int) {
    if let Some(stream) = state().streams.get_mut(&(stream as usize)) {
        stream.is_blocked = is_blocked != 0;
    }
    CHANGED.notify_all();
}

/// Waits until nothing is left that may be done: the steps are used up, or the streams are empty.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_settle() {
    let mut held = state();
    let has_work = |stream: &StreamState| !stream.is_blocked && !stream.work.is_empty();
    while (held.steps != Some(0) && held.streams.values().any(has_work))
        || held.streams.values().any(|stream| stream.is_busy)
    {
        held = CHANGED.wait(held).unwrap_or_else(std::sync::PoisonError::into_inner);
    }
}

/// Whether GPUs have dma-buf.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_dmabuf(has: c_int) {
    state().dmabuf = has != 0;
}

/// Forgets what was counted, failures and failed GPUs, and what these kept locked; draws the order from that seed.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_reset(seed: u64) {
    let mut state = state();
    state.counts.clear();
    state.failures.clear();
    state.dead.clear();
    state.violations.clear();
    state.pinned.retain(|_, (_, is_ours)| *is_ours);
    (state.steps, state.dmabuf, state.seed) = (None, true, seed | 1);
    CHANGED.notify_all();
}

/// How often something happened that must not; told on standard error.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_violations() -> u64 {
    let state = state();
    state.violations.iter().for_each(|violation| eprintln!("fake-cuda: {violation}"));
    state.violations.len() as u64
}

/// Allocations, locked ranges, streams and events that nobody gave back.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_left_over() -> u64 {
    state().left_over() as u64
}

/// Copies bytes of a GPU's memory out. Whether they are there.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_peek(address: u64, into: *mut u8, len: usize) -> c_int {
    let state = state();
    let Some(at) = state.reach(address as usize, len) else { return 0 };
    // SAFETY: inside the open mapping of an allocation, which stays while the state is held; tests pass a buffer of that length.
    unsafe { into.copy_from_nonoverlapping(std::ptr::with_exposed_provenance(at), len) };
    1
}

/// Copies bytes in.
#[unsafe(no_mangle)]
unsafe extern "C" fn fake_cuda_poke(address: u64, from: *const u8, len: usize) -> c_int {
    let state = state();
    let Some(at) = state.reach(address as usize, len) else { return 0 };
    // SAFETY: as for `fake_cuda_peek`, with the roles exchanged.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).copy_from_nonoverlapping(from, len) };
    1
}
