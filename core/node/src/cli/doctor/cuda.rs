//! The byte test of GPUs: random bytes go to the memory of each and come back, compared.

use std::time::{Duration, Instant as Clock};

use millpond_core::batch::Extent;
use millpond_core::time::Instant;
use millpond_hal::backend::cuda::{Cuda, CudaAbsent, CudaDevice, GpuInfo};
use millpond_hal::contract::{Connection, LinkId};
use millpond_hal::fabric::{Batch, Completion, Fabric, FabricOptions, LinkOptions, PostOptions};
use millpond_hal::region::Mode;

use super::trial::said;
use super::{Finding, Row};

/// Bytes that a GPU has to take and give.
const LEN: u64 = 1 << 20;
/// How long a GPU may take for them, once its context stands.
const WITHIN: Duration = Duration::from_secs(5);

/// What there is of CUDA on this machine, a line for each GPU, or one that says what is missing.
pub(super) fn rows() -> Vec<Row> {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(absent) => return vec![missing(&absent)],
    };
    cuda.gpus().iter().map(|gpu| tried(gpu, moved(&cuda, gpu.ordinal))).collect()
}

fn missing(absent: &CudaAbsent) -> Row {
    ("cuda", Finding::Note, format!("not used: {absent}"))
}

fn tried(gpu: &GpuInfo, moved: Result<(), String>) -> Row {
    let name = format!("cuda:{}, {} at {}", gpu.ordinal, gpu.name, gpu.pci);
    let dmabuf = if gpu.dmabuf { "NICs can reach it by dma-buf" } else { "it has no dma-buf for NICs" };
    match moved {
        Ok(()) => {
            let text = format!("usable: {} KiB went to {name} and came back unchanged; {dmabuf}", LEN >> 10);
            ("cuda", Finding::Good, format!("{text}; nodes of this version keep KV in host memory"))
        }
        Err(reason) => ("cuda", Finding::Bad, format!("not usable: {name}: {reason}")),
    }
}

/// Whether random bytes come back from a GPU unchanged.
fn moved(cuda: &Cuda, ordinal: u16) -> Result<(), String> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(said)?;
    let mut fabric = Fabric::new(FabricOptions::new(secret)).map_err(said)?;
    let device = fabric.add_device(Box::new(CudaDevice::new(cuda).map_err(said)?)).map_err(said)?;
    let link = fabric.open(Instant::ZERO, device, Connection::Loopback, LinkOptions::default()).map_err(said)?;
    let host = fabric.allocate(2 * LEN, Default::default()).map_err(said)?;
    let gpu = fabric.insert_region(cuda.allocate(ordinal, LEN).map_err(said)?, Mode::Leased).map_err(said)?;
    let mut bytes = host.carve(0, LEN).map_err(said)?;
    getrandom::fill(&mut bytes).map_err(said)?;
    let bytes = bytes.freeze();

    let grant = fabric.grant_write(vec![gpu.carve(0, LEN).map_err(said)?]).map_err(said)?;
    let there = fabric.attach(grant.token()).map_err(said)?;
    let mut batch = Batch::new();
    batch.write(bytes.clone(), Extent::new(there, 0, LEN));
    drop(run(&mut fabric, link, batch)?);
    let there_bytes = fabric.close(grant).into_iter().map(|buffer| buffer.freeze()).collect();
    let grant = fabric.grant_read(there_bytes).map_err(said)?;
    let there = fabric.attach(grant.token()).map_err(said)?;
    let mut batch = Batch::new();
    batch.read(Extent::new(there, 0, LEN), host.carve(LEN, LEN).map_err(said)?);
    drop(run(&mut fabric, link, batch)?);
    if host.carve(LEN, LEN).map_err(said)?[..] == bytes[..] {
        Ok(())
    } else {
        Err("other bytes came back than were sent".to_owned())
    }
}

/// Runs a batch to its end. A fabric that is dropped before leaks what a GPU may still touch.
fn run(fabric: &mut Fabric, link: LinkId, batch: Batch) -> Result<Completion, String> {
    let start = Clock::now();
    let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).map_err(said)?;
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
        if start.elapsed() > WITHIN {
            return Err(format!("moved nothing within {WITHIN:?}"));
        }
        std::thread::yield_now();
    }
    let completion = fabric.take(ticket).map_err(|_| "its ticket is not known".to_owned())?;
    if completion.is_done() { Ok(completion) } else { Err(format!("{:?}", completion.outcome(0).end)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_is_usable_or_says_what_is_missing() {
        let rows = rows();
        assert!(!rows.is_empty());
        for (subject, finding, text) in rows {
            assert_eq!(subject, "cuda");
            match finding {
                Finding::Good => assert!(text.starts_with("usable: "), "{text}"),
                Finding::Note => assert!(text.starts_with("not used: no "), "{text}"),
                Finding::Bad => assert!(text.starts_with("not usable: "), "{text}"),
            }
        }
        let reason = "cuInit failed: CUDA_ERROR_NO_DEVICE (100)".to_owned();
        let (_, finding, text) = missing(&CudaAbsent::NoDevice { reason });
        assert_eq!(finding, Finding::Note);
        assert_eq!(text, "not used: no device: cuInit failed: CUDA_ERROR_NO_DEVICE (100)");
    }
}
