//! The conformance suite over GPUs: each side's memory a GPU's, or the host's.

use std::rc::Rc;

use millpond_hal::backend::cuda::Cuda;
use millpond_hal::conformance::{Clock, PROGRESS_DEADLINE, Pair, Supply, run};
use millpond_hal::fabric::LinkOptions;

use crate::fake::{self, Gpu};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Host,
    Gpu(u16),
}

fn conforms(here: Memory, there: Memory, seed: u64) {
    let fake = fake::alone(seed).map(Rc::new);
    let cuda = Cuda::open().expect("a driver with GPUs");
    let supply = |memory| -> Option<Rc<dyn Supply>> {
        match memory {
            Memory::Host => None,
            Memory::Gpu(ordinal) => Some(Gpu::supply(&cuda, ordinal, fake.clone())),
        }
    };
    run(&mut || {
        let (fabric, link) = fake::fabric(&cuda, LinkOptions::with_progress_deadline(PROGRESS_DEADLINE));
        let mut pair = Pair::alone(fabric, link, Clock::Real(std::time::Instant::now()));
        (pair.supply, pair.supply_there) = (supply(here), supply(there));
        pair
    });
    if let Some(fake) = fake {
        fake.assert_clean();
        assert!(fake.count(c"cuEventRecord") > 0, "nothing was asked of the fake: the suite proves nothing");
    }
}

#[test]
fn the_cuda_backend_conforms_from_gpu_to_host() {
    conforms(Memory::Gpu(0), Memory::Host, 1);
}

#[test]
fn the_cuda_backend_conforms_from_host_to_gpu() {
    conforms(Memory::Host, Memory::Gpu(0), 2);
}

#[test]
fn the_cuda_backend_conforms_within_a_gpu() {
    conforms(Memory::Gpu(0), Memory::Gpu(0), 3);
}

#[test]
fn the_cuda_backend_conforms_between_gpus() {
    if fake::is_real() && Cuda::open().expect("a driver").gpus().len() < 2 {
        eprintln!("SKIPPED: there is one GPU");
        return;
    }
    conforms(Memory::Gpu(0), Memory::Gpu(1), 4);
}
