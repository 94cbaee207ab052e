//! A prefill node, or several that compute one prompt in a pipeline of chunks.
//!
//! Each stage takes a chunk when it has done the one before and the stage before has passed it on. The next prompt enters
//! when the first stage is free, behind the present one in all others.

use alloc::vec;
use alloc::vec::Vec;

use super::cluster::span;
use super::setup::Setup;
use crate::sched::cost::{Prefill, Work};
use crate::time::{Duration, Instant};

pub(super) struct Pipeline {
    model: Prefill,
    chunk: u32,
    hop: Duration,
    /// When each stage is free.
    stages: Vec<Instant>,
    scratch: Vec<Instant>,
}

impl Pipeline {
    pub(super) fn new(setup: &Setup) -> Self {
        let stages = vec![Instant::ZERO; setup.pipeline as usize];
        Self { model: setup.profile.prefill, chunk: setup.chunk, hop: setup.hop, scratch: stages.clone(), stages }
    }

    /// When the next prompt can begin.
    pub(super) fn free_at(&self) -> Instant {
        self.stages[0]
    }

    /// When a prompt that begins now would leave the first stage free, as the model has it.
    pub(super) fn predict(&mut self, now: Instant, work: Work) -> Instant {
        self.scratch.clone_from(&self.stages);
        self.work(now, work, 1.0);
        core::mem::swap(&mut self.scratch, &mut self.stages);
        self.scratch[0]
    }

    /// A prompt begins, `slower` times as slow as the model has it; when it is done.
    pub(super) fn begin(&mut self, now: Instant, work: Work, slower: f64) -> Instant {
        self.work(now, work, slower)
    }

    fn work(&mut self, now: Instant, work: Work, slower: f64) -> Instant {
        let stages = self.stages.len() as f64;
        // One stage needs no chunks, and the fixed part is paid once.
        let chunk = if self.stages.len() == 1 { work.new } else { self.chunk };
        let (mut done, mut prefix, mut fixed) = (now, work.prefix, self.model.fixed);
        while prefix < work.total() {
            let new = chunk.min(work.total() - prefix);
            let took = span((self.model.seconds(Work { new, prefix }) - self.model.fixed + fixed) / stages * slower);
            let mut from = now;
            for (place, stage) in self.stages.iter_mut().enumerate() {
                let hop = if place == 0 { Duration::ZERO } else { self.hop };
                *stage = (*stage).max(from + hop) + took;
                from = *stage;
            }
            (done, prefix, fixed) = (from, prefix + new, 0.0);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipeline(stages: u32, chunk: u32) -> Pipeline {
        let mut setup = Setup::default();
        (setup.pipeline, setup.chunk, setup.hop) = (stages, chunk, Duration::from_millis(1));
        setup.profile.prefill = Prefill { fixed: 0.0, linear: 1e-3, quadratic: 0.0 };
        Pipeline::new(&setup)
    }

    fn millis(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn one_node_takes_what_the_model_says() {
        let mut one = pipeline(1, 10);
        assert_eq!(one.predict(millis(5), Work { new: 40, prefix: 0 }), millis(45));
        assert_eq!((one.begin(millis(5), Work { new: 40, prefix: 0 }, 2.0), one.free_at()), (millis(85), millis(85)));
    }

    #[test]
    fn two_stages_overlap_the_chunks() {
        let mut two = pipeline(2, 10);
        // Chunks of 5 ms a stage: 5, 10, 15, 20 and 11, 16, 21, 26.
        assert_eq!(two.begin(millis(0), Work { new: 40, prefix: 0 }, 1.0), millis(26));
        assert_eq!(two.free_at(), millis(20));
        // The next enters at 20 and follows: 25, and max(26, 26) + 5.
        assert_eq!((two.begin(millis(20), Work { new: 10, prefix: 0 }, 1.0), two.free_at()), (millis(31), millis(25)));
    }

    #[test]
    fn a_prompt_of_one_chunk_gains_nothing_but_its_parts() {
        let mut four = pipeline(4, 100);
        assert_eq!(four.begin(millis(0), Work { new: 40, prefix: 0 }, 1.0), millis(43));
    }
}
