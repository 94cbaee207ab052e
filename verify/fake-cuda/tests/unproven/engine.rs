//! The engine over the backend: memory of a GPU goes to a peer and comes back through locked buffers, after a stream's work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::executor::block_on;
use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_hal::backend::cuda::{Cuda, CudaDevice};
use millpond_node::engine::{Backing, Batch, Engine, Gpus, Mode, Options, Via};
use millpond_node::runtime::Stop;

use crate::fake::{self, address};
use crate::own_runtime::Own;

/// More than all buffers of an engine hold, and no multiple of anything.
const LEN: u64 = 17_000_003;

fn engine(runtime: &Own, node: u8, cuda: Option<&Cuda>) -> Engine<Own> {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let incarnation = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut options = Options::new(Identity { node: [node; 16], incarnation, host: HostIdentity::UNKNOWN });
    options.transports = vec![Via::Local, Via::Tcp];
    // The fake works on one thread beside everything else.
    options.progress_deadline = Duration::from_secs(30);
    options.gpus = cuda.cloned().map(|cuda| Gpus::new(move || Ok(Box::new(CudaDevice::new(&cuda)?))));
    Engine::start(runtime.clone(), options).unwrap()
}

#[test]
fn memory_of_a_gpu_goes_to_a_peer_and_comes_back_after_the_work_of_a_stream() {
    let Some(fake) = fake::alone(90) else { return };
    {
        let cuda = Cuda::open().unwrap();
        let runtime = Own::start().unwrap();
        let (here, there) = (engine(&runtime, 1, Some(&cuda)), engine(&runtime, 2, None));
        block_on(async {
            let address_there = there.listen(([127, 0, 0, 1], 0).into(), &Stop::new()).await.unwrap();
            let peer = here.open(address_there).await.unwrap();
            let gpu = here.register(cuda.allocate(0, LEN).unwrap(), Mode::Leased).unwrap();
            let sent: Vec<u8> = (0..LEN).map(|at| (at * 37 + at / 253).to_le_bytes()[0]).collect();
            fake.poke(address(&gpu, 0), &sent);
            let memory = there.allocate(LEN, Backing::Memfd).unwrap();
            let target = there.grant_write(vec![memory.carve(0, LEN).unwrap()]).unwrap();
            let remote = here.attach(&peer, &target.token()).unwrap();
            let stream = fake.foreign_stream(0);
            fake.block(stream, true);
            // SAFETY: a stream of the primary context of GPU 0, which the test made and keeps.
            let fence = unsafe { cuda.fence(0, stream).unwrap() };
            let source = gpu.carve(0, LEN).unwrap().freeze();
            let transfer = here.submit(Batch::new().write(source, remote.whole()).after(Arc::clone(&fence))).unwrap();
            // What precedes the fence in its stream changes what is sent.
            fake.poke(address(&gpu, 0), b"last");
            assert!(!transfer.is_over());
            fake.block(stream, false);
            let report = transfer.await;
            assert_eq!((report.is_done(), report.via()), (true, Some(Via::Tcp)), "{:?}", report.outcomes());
            drop(report);
            let written = target.close().await.remove(0);
            assert!(&written[..4] == b"last" && written[4..] == sent[4..], "other bytes were written");
            let grant = there.grant_read(vec![written.freeze()]).unwrap();
            let remote = here.attach(&peer, &grant.token()).unwrap();
            let other = here.register(cuda.allocate(0, LEN).unwrap(), Mode::Leased).unwrap();
            let batch = Batch::new().read(remote.whole(), other.carve(0, LEN).unwrap());
            drop(here.submit(batch).unwrap().await.into_buffers().unwrap());
            let mut back = vec![0; sent.len()];
            fake.peek(address(&other, 0), &mut back);
            assert!(&back[..4] == b"last" && back[4..] == sent[4..], "other bytes came back");
            here.shut_down().await;
            there.shut_down().await;
        });
    }
    fake.settle();
    // The engines' tasks let go of the driver when they have ended, each on a thread of its own.
    for _ in 0..1000 {
        if fake.left_over() == 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    fake.assert_clean();
}
