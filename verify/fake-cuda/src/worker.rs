//! Does what was put into streams: each in its own order, among streams in an order drawn by a seed, on a thread of its own.
//!
//! Nothing is done in the call that puts it in. While the fake is held, nothing is done but what a test allows step by step.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::state::{CHANGED, State, Work, code, state};

/// Starts the thread, once.
pub(crate) fn start(state: &mut State) {
    if !std::mem::replace(&mut state.has_worker, true) {
        std::thread::spawn(run);
    }
}

fn run() {
    loop {
        let mut held = state();
        let picked = loop {
            match pick(&mut held) {
                Some(picked) => break picked,
                None => held = CHANGED.wait(held).unwrap_or_else(std::sync::PoisonError::into_inner),
            }
        };
        drop(held);
        done(picked);
    }
}

/// A stream, and the first of its work, which may be done now.
type Picked = (usize, Work);

fn pick(state: &mut State) -> Option<Picked> {
    if state.steps == Some(0) {
        return None;
    }
    let ready: Vec<usize> = state.streams.iter().filter(|(_, stream)| is_ready(stream)).map(|(id, _)| *id).collect();
    // xorshift: any order will do, as long as the seed gives the same one.
    state.seed ^= state.seed << 13;
    state.seed ^= state.seed >> 7;
    state.seed ^= state.seed << 17;
    let index = usize::try_from(state.seed % (ready.len().max(1) as u64)).unwrap_or(0);
    let stream = *ready.get(index)?;
    let queue = state.streams.get_mut(&stream)?;
    queue.is_busy = true;
    let work = queue.work.pop_front()?;
    state.steps = state.steps.map(|steps| steps - 1);
    Some((stream, work))
}

fn is_ready(stream: &crate::state::StreamState) -> bool {
    !stream.is_busy
        && !stream.is_blocked
        && match stream.work.front() {
            None => false,
            Some(Work::Wait(event, recording)) => event.has_happened(*recording),
            Some(_) => true,
        }
}

fn done((id, work): Picked) {
    match work {
        Work::Call(function, data) => {
            // SAFETY: what `cuLaunchHostFunc` was given, called once; its caller promised that it may be.
            unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
        }
        Work::Record(event, recording) => {
            event.happened.fetch_max(recording, Ordering::AcqRel);
        }
        Work::Wait(event, _) => drop::<Arc<_>>(event),
        Work::Clear { target, len } => {
            let mut state = state();
            match state.reach(target, len) {
                // SAFETY: inside the open mapping of an allocation, which stays while the state is held.
                Some(at) => unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).write_bytes(0, len) },
                None => fail(&mut state, id),
            }
        }
        Work::Copy { source, target, len } => copy(id, source, target, len),
    }
    let mut state = state();
    if let Some(stream) = state.streams.get_mut(&id) {
        stream.is_busy = false;
        if stream.is_doomed && stream.work.is_empty() {
            state.streams.remove(&id);
        }
    }
    CHANGED.notify_all();
}

fn copy(id: usize, source: usize, target: usize, len: usize) {
    let mut state = state();
    let place = |address| state.reach(address, len).or_else(|| state.is_pinned(address, len).then_some(address));
    let (Some(from), Some(to)) = (place(source), place(target)) else { return fail(&mut state, id) };
    // SAFETY: each side lies in an open mapping or in page-locked memory, looked up just now under the lock that giving them
    // back needs. They may overlap.
    unsafe {
        let from = std::ptr::with_exposed_provenance::<u8>(from);
        std::ptr::copy(from, std::ptr::with_exposed_provenance_mut(to), len);
    }
}

/// A copy reached memory that is not there: its GPU fails, as a real one does.
fn fail(state: &mut State, stream: usize) {
    let Some(ordinal) = state.streams.get(&stream).map(|stream| stream.ordinal) else { return };
    state.kill(ordinal, code::ILLEGAL_ADDRESS);
}

impl State {
    /// From now on all that is asked of a GPU answers so, and what is in its streams is dropped.
    pub(crate) fn kill(&mut self, ordinal: u16, code: i32) {
        self.dead.insert(ordinal, code);
        for stream in self.streams.values_mut().filter(|stream| stream.ordinal == ordinal) {
            stream.work.clear();
        }
    }
}
