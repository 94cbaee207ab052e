//! Memory of a GPU in two processes.

use std::process::Command;

use millpond_core::batch::Extent;
use millpond_core::time::Instant;
use millpond_hal::backend::cuda::{Cuda, CudaMemoryError, GRANULE_LEN, IpcHandle};
use millpond_hal::contract::LinkId;
use millpond_hal::fabric::{Batch, Completion, Fabric, LinkOptions, PostOptions};
use millpond_hal::mapping::{Backing, Mapping};
use millpond_hal::region::{Mode, Region};

use crate::fake::{self, address};

const HANDLE: &str = "MILLPOND_TEST_IPC_HANDLE";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> [u8; IpcHandle::LEN] {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

#[test]
fn another_process_moves_bytes_of_exported_memory_and_the_exporter_sees_them() {
    let Some(fake) = fake::alone(30) else { return };
    let cuda = Cuda::open().unwrap();
    let whole = Region::unregistered(cuda.allocate(1, GRANULE_LEN).unwrap(), Mode::Leased);
    // SAFETY: `whole` outlives it.
    let part = unsafe { cuda.adopt(1, address(&whole, 4096), 10_000, Box::new(())).unwrap() };
    let part = Region::unregistered(part, Mode::Leased);
    fake.poke(address(&part, 0), &[5; 10_000]);
    let handle = cuda.export(&part).unwrap();
    assert_eq!(IpcHandle::from_bytes(&handle.to_bytes()), handle);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "ipc::child", "--ignored", "--nocapture"]).env(HANDLE, hex(&handle.to_bytes()));
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut bytes = vec![0; 12_000];
    fake.peek(address(&whole, 4096 - 1000), &mut bytes);
    assert!(bytes[1000..11_000].iter().all(|&byte| byte == 6), "the child's bytes are here");
    assert!(bytes[..1000].iter().chain(&bytes[11_000..]).all(|&byte| byte == 0), "and nowhere else");
}

/// The other process: reads the memory, finds fives, and writes sixes.
#[test]
#[ignore = "`another_process_moves_bytes_of_exported_memory_and_the_exporter_sees_them` runs it"]
fn child() {
    let fake = fake::alone(31).unwrap();
    let cuda = Cuda::open().unwrap();
    let handle = IpcHandle::from_bytes(&from_hex(&std::env::var(HANDLE).unwrap()));
    let before = fake.left_over();
    {
        let (mut fabric, link) = fake::fabric(&cuda, LinkOptions::default());
        // SAFETY: the exporter waits for this process before it lets go, and touches nothing meanwhile.
        let (once, twice) = unsafe { (cuda.import(&handle).unwrap(), cuda.import(&handle).unwrap()) };
        drop(once); // the other one still holds it
        let theirs = fabric.insert_region(twice, Mode::Leased).unwrap();
        assert_eq!((theirs.len(), theirs.kind()), (10_000, millpond_core::batch::MemoryKind::Cuda { device: 1 }));
        let host = fabric.allocate(10_000, Default::default()).unwrap();
        let grant = fabric.grant_read(vec![theirs.carve(0, 10_000).unwrap().freeze()]).unwrap();
        let there = fabric.attach(grant.token()).unwrap();
        let mut batch = Batch::new();
        batch.read(Extent::new(there, 0, 10_000), host.carve(0, 10_000).unwrap());
        drop(run(&mut fabric, link, batch));
        let mut bytes = host.carve(0, 10_000).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 5));
        fabric.revoke(grant);
        bytes.fill(6);
        let grant = fabric.grant_write(vec![theirs.carve(0, 10_000).unwrap()]).unwrap();
        let there = fabric.attach(grant.token()).unwrap();
        let mut batch = Batch::new();
        batch.write(bytes.freeze(), Extent::new(there, 0, 10_000));
        drop(run(&mut fabric, link, batch));
    }
    fake.settle();
    assert_eq!(fake.left_over(), before);
    fake.assert_clean();
}

fn run(fabric: &mut Fabric, link: LinkId, batch: Batch) -> Completion {
    let ticket = fabric.post(Instant::ZERO, link, batch, PostOptions::default()).unwrap();
    while !fabric.is_finished(&ticket) {
        fabric.poll(Instant::ZERO);
    }
    let completion = fabric.take(ticket).unwrap();
    assert!(completion.is_done(), "{completion:?}");
    completion
}

#[test]
fn what_cannot_be_exported_or_opened_is_refused() {
    let Some(_fake) = fake::alone(32) else { return };
    let cuda = Cuda::open().unwrap();
    let host = Region::unregistered(Mapping::new(4096, Backing::Memfd).unwrap(), Mode::Leased);
    assert!(matches!(cuda.export(&host), Err(CudaMemoryError::NotOfGpu { .. })));
    let region = Region::unregistered(cuda.allocate(0, 4096).unwrap(), Mode::Leased);
    let own = cuda.export(&region).unwrap();
    // SAFETY: nothing is opened.
    let refused = |handle: &IpcHandle| unsafe { cuda.import(handle).unwrap_err() };
    assert!(refused(&own).to_string().contains("CUDA_ERROR_INVALID_CONTEXT"), "a process does not open its own");
    let mut bytes = own.to_bytes();
    bytes[..16].fill(9);
    assert_eq!(refused(&IpcHandle::from_bytes(&bytes)), CudaMemoryError::GpuNotVisible);
    let mut bytes = own.to_bytes();
    bytes[16..80].fill(0);
    assert!(matches!(refused(&IpcHandle::from_bytes(&bytes)), CudaMemoryError::Driver(_)));
}
