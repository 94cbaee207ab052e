//! Memory of GPUs: had, adopted, locked, shown to NICs, and what there is to say where it cannot be.

use millpond_core::batch::{Extent, MemoryKind};
use millpond_core::time::Instant;
use millpond_hal::backend::cuda::{Cuda, CudaError, CudaMemoryError, DmabufRefusal, GRANULE_LEN, PIN_LEN};
use millpond_hal::fabric::{Batch, LinkOptions, PostOptions};
use millpond_hal::mapping::{Backing, MapError, Mapping};
use millpond_hal::region::{LeaseError, Mode, Region};

use crate::fake::{self, address};

fn leased(mapping: Mapping) -> Region {
    Region::unregistered(mapping, Mode::Leased)
}

#[test]
fn gpus_are_named_by_what_they_are_called_everywhere() {
    let Some(_fake) = fake::alone(20) else { return };
    let gpus = Cuda::open().unwrap().gpus();
    assert_eq!(gpus.iter().map(|gpu| gpu.ordinal).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(gpus.iter().map(|gpu| &*gpu.pci).collect::<Vec<_>>(), ["0000:3a:00.0", "0000:3b:00.0"]);
    assert_ne!(gpus[0].uuid, gpus[1].uuid);
    assert!(gpus.iter().all(|gpu| gpu.dmabuf && gpu.memory_len == 16 << 30 && gpu.name.starts_with("Fake GPU")));
}

#[test]
fn memory_of_a_gpu_is_cleared_and_takes_whole_granules() {
    let Some(fake) = fake::alone(21) else { return };
    let cuda = Cuda::open().unwrap();
    let before = fake.left_over();
    let mapping = cuda.allocate(1, GRANULE_LEN + 1).unwrap();
    assert_eq!((mapping.kind(), mapping.len()), (MemoryKind::Cuda { device: 1 }, GRANULE_LEN + 1));
    assert!(mapping.dmabuf().is_some() && mapping.shared().is_none() && !mapping.is_for_cpu());
    let region = leased(mapping);
    // To the end of the second granule, which is nobody else's.
    let mut bytes = vec![1; 2 * GRANULE_LEN as usize];
    fake.peek(address(&region, 0), &mut bytes);
    assert!(bytes.iter().all(|&byte| byte == 0));
    drop(region);
    assert_eq!(fake.left_over(), before, "all of it was given back");
    assert_eq!(cuda.allocate(2, 1).unwrap_err(), CudaMemoryError::NoSuchGpu { ordinal: 2 });
    assert_eq!(cuda.allocate(0, 0).unwrap_err(), CudaMemoryError::Len(MapError::Len { len: 0 }));
    fake.fail(c"cuMemAlloc", 2, 0);
    let out = CudaError { call: "cuMemAlloc", code: 2, name: "CUDA_ERROR_OUT_OF_MEMORY" };
    assert_eq!(cuda.allocate(0, 1).unwrap_err(), CudaMemoryError::Driver(out));
    fake.assert_clean();
}

#[test]
fn nobody_gets_a_reference_to_memory_of_a_gpu() {
    let Some(_fake) = fake::alone(22) else { return };
    let cuda = Cuda::open().unwrap();
    let region = leased(cuda.allocate(0, 4096).unwrap());
    let buffer = region.carve(0, 100).unwrap();
    assert_eq!((buffer.len(), buffer.is_empty()), (100, false));
    let bytes = buffer.freeze();
    assert_eq!(bytes.slice(10..).len(), 90);
    let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bytes[0]));
    let said = *looked.unwrap_err().downcast::<String>().unwrap();
    assert!(said.contains("move it to host memory first"), "{said}");
    let raw = Region::unregistered(cuda.allocate(0, 4096).unwrap(), Mode::Raw(millpond_core::batch::Rights::NONE));
    let refused = LeaseError::NotForCpu(MemoryKind::Cuda { device: 0 });
    assert_eq!(raw.read_at(0, &mut [0]).unwrap_err(), refused);
    assert_eq!(raw.write_at(0, &[0]).unwrap_err(), refused);
}

#[test]
fn adopted_memory_is_what_the_driver_says_that_it_is() {
    let Some(_fake) = fake::alone(23) else { return };
    let cuda = Cuda::open().unwrap();
    let whole = leased(cuda.allocate(1, GRANULE_LEN).unwrap());
    let start = address(&whole, 0);
    // SAFETY: `whole` outlives what is adopted, and nobody touches it.
    let adopted = unsafe { cuda.adopt(1, start + 4096, 8192, Box::new(())).unwrap() };
    assert_eq!((adopted.kind(), adopted.len()), (MemoryKind::Cuda { device: 1 }, 8192));
    // SAFETY: as above.
    let beyond = unsafe { cuda.adopt(1, start + 4096, GRANULE_LEN, Box::new(())).unwrap_err() };
    let end = start + GRANULE_LEN;
    assert_eq!(beyond, CudaMemoryError::OutOfAllocation { address: start + 4096, len: GRANULE_LEN, end });
    // SAFETY: as above.
    let other = unsafe { cuda.adopt(0, start, 4096, Box::new(())).unwrap_err() };
    assert_eq!(other, CudaMemoryError::OtherGpu { asked: 0, found: 1 });
    let host = Mapping::new(4096, Backing::Heap).unwrap();
    let address = host.base().addr().get() as u64;
    // SAFETY: as above.
    let of_host = unsafe { cuda.adopt(0, address, 4096, Box::new(())).unwrap_err() };
    assert_eq!(of_host, CudaMemoryError::NotOfGpu { address });
}

#[test]
fn two_regions_in_one_allocation_come_and_go_by_themselves() {
    let Some(fake) = fake::alone(24) else { return };
    let cuda = Cuda::open().unwrap();
    let whole = leased(cuda.allocate(0, GRANULE_LEN).unwrap());
    let (mut fabric, link) = fake::fabric(&cuda, LinkOptions::default());
    let mut half = |n: u64| {
        // SAFETY: `whole` outlives both halves, and nobody else touches them.
        let mapping = unsafe { cuda.adopt(0, address(&whole, n * 8192), 8192, Box::new(())).unwrap() };
        fabric.insert_region(mapping, Mode::Leased).unwrap()
    };
    let (first, second) = (half(0), half(1));
    fabric.release(first).unwrap();
    let grant = fabric.grant_write(vec![second.carve(0, 8192).unwrap()]).unwrap();
    let there = fabric.attach(grant.token()).unwrap();
    let source = fabric.allocate(8192, Default::default()).unwrap();
    let mut bytes = source.carve(0, 8192).unwrap();
    bytes.fill(3);
    let mut batch = Batch::new();
    batch.write(bytes.freeze(), Extent::new(there, 0, 8192));
    let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
    }
    assert!(fabric.take(ticket).unwrap().is_done());
    let mut found = vec![0; 2 * 8192];
    fake.peek(address(&whole, 0), &mut found);
    assert!(found[..8192].iter().all(|&byte| byte == 0) && found[8192..].iter().all(|&byte| byte == 3));
    fake.assert_clean();
}

#[test]
fn memory_without_dmabuf_says_why() {
    let Some(fake) = fake::alone(25) else { return };
    let cuda = Cuda::open().unwrap();
    let region = leased(cuda.allocate(0, 4096).unwrap());
    assert!(cuda.dmabuf(&region).is_ok());
    let host = leased(Mapping::new(4096, Backing::Memfd).unwrap());
    assert_eq!(cuda.dmabuf(&host).unwrap_err(), DmabufRefusal::NotOfGpu);
    // SAFETY: `region` outlives it, and nobody touches it.
    let askew = leased(unsafe { cuda.adopt(0, address(&region, 256), 256, Box::new(())).unwrap() });
    assert_eq!(cuda.dmabuf(&askew).unwrap_err(), DmabufRefusal::NotOnPage { address: address(&region, 256) });
    fake.fail(c"cuMemGetHandleForAddressRange", 801, 0);
    let refused = cuda.dmabuf(&region).unwrap_err();
    assert_eq!(refused.to_string(), "cuMemGetHandleForAddressRange failed: CUDA_ERROR_NOT_SUPPORTED (801)");
    // An older driver: the memory is had, and has none.
    fake.dmabuf(false);
    let old = Cuda::open().unwrap();
    let region = leased(old.allocate(1, 4096).unwrap());
    assert_eq!(old.dmabuf(&region).unwrap_err(), DmabufRefusal::NotSupported { ordinal: 1 });
}

#[test]
fn pages_of_the_host_are_locked_where_they_are_copied_and_unlocked_with_their_region() {
    let Some(fake) = fake::alone(26) else { return };
    let cuda = Cuda::open().unwrap();
    let (mut fabric, link) = fake::fabric(&cuda, LinkOptions::default());
    let host = fabric.allocate(3 * PIN_LEN, Default::default()).unwrap();
    let target = fabric.insert_region(cuda.allocate(0, 4096).unwrap(), Mode::Leased).unwrap();
    let grant = fabric.grant_write(vec![target.carve(0, 4096).unwrap()]).unwrap();
    let there = fabric.attach(grant.token()).unwrap();
    let mut batch = Batch::new();
    // The first chunk is touched twice, the middle one not at all.
    for (offset, len) in [(0, 10), (100, 10), (2 * PIN_LEN, 10)] {
        batch.write(host.carve(offset, len).unwrap().freeze(), Extent::new(there, 0, len));
    }
    let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
    }
    assert!(fabric.take(ticket).unwrap().is_done());
    assert_eq!(fake.count(c"cuMemHostRegister"), 2);
    fabric.release(host).unwrap();
    assert_eq!(fake.count(c"cuMemHostUnregister"), 2);
    // Memory that comes locked is not locked again.
    let pinned = fabric.insert_region(cuda.allocate_pinned(0, 4096).unwrap(), Mode::Leased).unwrap();
    assert_eq!(pinned.kind(), MemoryKind::Pinned);
    let mut batch = Batch::new();
    let mut bytes = pinned.carve(0, 10).unwrap();
    bytes.fill(4);
    batch.write(bytes.freeze(), Extent::new(there, 20, 10));
    let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
    }
    assert!(fabric.take(ticket).unwrap().is_done());
    assert_eq!(fake.count(c"cuMemHostRegister"), 2);
    fake.assert_clean();
}

#[test]
fn all_that_the_backend_made_is_given_back() {
    let Some(fake) = fake::alone(27) else { return };
    let cuda = Cuda::open().unwrap();
    let before = fake.left_over();
    for _ in 0..20 {
        let (mut fabric, link) = fake::fabric(&cuda, LinkOptions::default());
        let host = fabric.allocate(100_000, Default::default()).unwrap();
        let target = fabric.insert_region(cuda.allocate(0, 100_000).unwrap(), Mode::Leased).unwrap();
        let grant = fabric.grant_write(vec![target.carve(0, 100_000).unwrap()]).unwrap();
        let there = fabric.attach(grant.token()).unwrap();
        let mut batch = Batch::new();
        batch.write(host.carve(0, 100_000).unwrap().freeze(), Extent::new(there, 0, 100_000));
        let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
        while !fabric.is_finished(&ticket) {
            fabric.poll(Instant::ZERO);
        }
    }
    fake.settle();
    assert_eq!(fake.left_over(), before);
    fake.assert_clean();
}

/// Runs by itself in another process.
#[test]
#[ignore = "`a_host_without_cuda_says_what_is_missing` runs it, with and without the fake"]
fn says_what_is_missing() {
    match Cuda::open() {
        Ok(cuda) => println!("found {} GPUs", cuda.gpus().len()),
        Err(absent) => println!("found {absent}."),
    }
}

fn found(variables: &[(&str, &str)], with_fake: bool) -> String {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "memory::says_what_is_missing", "--ignored", "--nocapture"]);
    child.envs(variables.iter().copied());
    if with_fake {
        child.env("LD_PRELOAD", fake::path());
    }
    String::from_utf8_lossy(&child.output().unwrap().stdout).into_owned()
}

#[test]
fn a_host_without_cuda_says_what_is_missing() {
    let no_device = found(&[("MILLPOND_FAKE_CUDA_GPUS", "0")], true);
    assert!(no_device.contains("found no device: cuInit failed: CUDA_ERROR_NO_DEVICE (100)."), "{no_device}");
    let mismatch = found(&[("MILLPOND_FAKE_CUDA_INIT", "803")], true);
    assert!(
        mismatch.contains("found no driver: cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)."),
        "{mismatch}"
    );
    assert!(found(&[("MILLPOND_FAKE_CUDA_GPUS", "3")], true).contains("found 3 GPUs"));
    let nothing = found(&[], false);
    if nothing.contains("found no driver: libcuda.so.1 cannot be opened") {
        return;
    }
    eprintln!("SKIPPED: this host has a driver of its own, so that it has none cannot be seen: {nothing}");
}
