//! Memory of devices through the engine: within it, to peers and from them, on a machine without a device.
//!
//! A backend of `hal::conformance` plays the device, over memory that the CPU may not touch: whoever takes its addresses for the
//! CPU's, be it the engine or another backend, ends this process at once.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use millpond_core::batch::MemoryKind;
use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_core::wire::message::file::FileMove;
use millpond_hal::conformance::Supply;
use millpond_hal::conformance::player::Player;
use millpond_hal::conformance::untouchable::Untouchable;
use millpond_node::engine::{
    Arrival, AttachError, Backing, Batch, Cause, Engine, Far, Fence, FenceState, Gpus, Mode, Options, Peer, Region,
    Report, Rights, Status, SubmitErrorKind, Via,
};
use millpond_node::files::{FileService, RemoteFile, Sync, is_done};
use millpond_node::node::{self, Node};
use millpond_node::rpc::Client;
use millpond_node::runtime::{Runtime, Stop};
use millpond_node::session::Credentials;
use millpond_tokio::Tokio;

const KIND: MemoryKind = MemoryKind::Cuda { device: 0 };
const BOTH: fn() -> Rights = || Rights::REMOTE_READ | Rights::REMOTE_WRITE;

fn run<F: Future<Output = ()>>(test: impl FnOnce(Tokio) -> F) {
    millpond_tokio::run(test).unwrap();
}

/// An engine with a device that is played.
struct Here {
    engine: Engine<Tokio>,
    device: Untouchable,
}

impl Here {
    fn new(runtime: &Tokio, node: u8, transports: &[Via]) -> Self {
        let device = Untouchable::new(KIND);
        let played = device.clone();
        let host = HostIdentity { boot: [7; 16], namespaces: [u64::from(std::process::id()); 3] };
        // Names of sockets are made of it: tests run side by side, in one process and in several.
        static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let incarnation = u64::from(std::process::id()) << 32 | COUNT.fetch_add(1, Ordering::Relaxed);
        let mut options = Options::new(Identity { node: [node; 16], incarnation, host });
        options.gpus = Some(Gpus::new(move || Ok(Box::new(Player::new(played.clone(), KIND)))));
        options.transports = transports.to_vec();
        Self { engine: Engine::start(runtime.clone(), options).unwrap(), device }
    }

    fn region(&self, len: u64, mode: Mode) -> Region {
        self.engine.register(self.device.mapping(len), mode).unwrap()
    }

    fn bytes(&self, region: &Region, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; index(len)];
        self.device.read(region, offset, &mut bytes);
        bytes
    }
}

fn index(len: u64) -> usize {
    usize::try_from(len).unwrap()
}

fn pattern(seed: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (at.wrapping_mul(31).wrapping_add(at >> 9).wrapping_add(seed * 7) % 251).to_le_bytes()[0])
        .collect()
}

fn cause(report: &Report, index: usize) -> Option<&Cause> {
    match &report.outcomes()[index].status {
        Status::Failed(failure) => Some(&failure.cause),
        _ => None,
    }
}

async fn joined(here: &Here, there: &Here) -> Peer {
    let address = there.engine.listen(([127, 0, 0, 1], 0).into(), &Stop::new()).await.unwrap();
    here.engine.open(address).await.unwrap()
}

#[test]
fn memory_of_a_device_is_moved_directly_within_the_engine() {
    run(|runtime| async move {
        let here = Here::new(&runtime, 1, &[Via::Local, Via::Tcp]);
        let gpu = here.region(1 << 20, Mode::Raw(BOTH()));
        let there = here.engine.attach(&here.engine.itself(), &here.engine.expose(&gpu).unwrap()).unwrap();
        let host = here.engine.allocate(200_000, Backing::Memfd).unwrap();
        let mut source = host.carve(0, 100_000).unwrap();
        source.copy_from_slice(&pattern(1, 100_000));
        let batch = Batch::new().write(source.freeze(), there.extent(5, 100_000).unwrap());
        let report = here.engine.submit(batch).unwrap().await;
        assert_eq!((report.is_done(), report.via()), (true, Some(Via::Cuda)), "{:?}", report.outcomes());
        assert!(here.bytes(&gpu, 5, 100_000) == pattern(1, 100_000));
        // From one place of it to another, leased and raw.
        let leased = here.region(100_000, Mode::Leased);
        let batch =
            Batch::new().read(there.extent(5, 100_000).unwrap(), leased.carve(0, 100_000).unwrap()).via(Via::Cuda);
        let buffer = here.engine.submit(batch).unwrap().await.into_buffers().unwrap().remove(0);
        assert!(here.bytes(&leased, 0, 100_000) == pattern(1, 100_000));
        drop(buffer);
        let batch = Batch::new().read(there.extent(5, 9).unwrap(), host.carve(150_000, 9).unwrap());
        assert_eq!(here.engine.submit(batch).unwrap().await.into_buffers().unwrap()[0][..], pattern(1, 9)[..]);
        let plain = Engine::start(runtime, Options::new(Identity { node: [3; 16], ..here.engine.options().identity }));
        let plain = plain.unwrap();
        let mut token = there.token();
        token.incarnation = plain.options().identity.incarnation;
        assert_eq!(plain.attach(&plain.itself(), &token).unwrap_err(), AttachError::Kind, "it has no backend for it");
    });
}

#[test]
fn memory_of_a_device_goes_to_a_peer_and_comes_from_it_through_buffers() {
    // More than all buffers hold, and no multiple of anything.
    const LEN: u64 = 21_000_003;
    run(|runtime| async move {
        for via in [Via::Tcp, Via::Shm] {
            let transports = [Via::Local, Via::Tcp, via];
            let (here, there) = (Here::new(&runtime, 1, &transports), Here::new(&runtime, 2, &transports));
            let peer = joined(&here, &there).await;
            let gpu = here.region(LEN + 100, Mode::Leased);
            here.device.write(&gpu, 100, &pattern(2, LEN));
            let memory = there.engine.allocate(LEN, Backing::Memfd).unwrap();
            let target = there.engine.grant_write(vec![memory.carve(0, LEN).unwrap()]).unwrap();
            let remote = here.engine.attach(&peer, &target.token()).unwrap();
            let source = gpu.carve(100, LEN).unwrap().freeze();
            let batch = || Batch::new().write(source.clone(), remote.whole());
            let named = here.engine.submit(batch().via(Via::Cuda)).unwrap_err();
            assert!(matches!(named.kind, SubmitErrorKind::NoPath { .. }), "{named}");
            drop(named);
            // The transport that is named is that of the half to the peer.
            let report = here.engine.submit(batch().via(via)).unwrap().await;
            assert!(report.is_done(), "{:?}", report.outcomes());
            let why = here.engine.explain(report.id()).unwrap();
            assert_eq!(why.legs, [(Via::Cuda, via)], "{why}");
            assert!(why.to_string().contains(&format!("in over cuda and out over {via}")), "{why}");
            drop(report);
            let arrival = Arrival { counter: 4, amount: 1 };
            let (arrived, report) = futures::join!(target.arrived(arrival, Duration::from_secs(60)), async {
                here.engine.submit(batch().arrival(arrival)).unwrap().await
            });
            arrived.unwrap();
            assert!(report.is_done(), "{via}: {:?}", report.outcomes());
            assert!(matches!(report.via(), Some(Via::Tcp | Via::Shm)), "{:?}", report.via());
            drop(report);
            let written = target.close().await.remove(0);
            assert!(written[..] == pattern(2, LEN)[..], "{via}: other bytes were written");

            // Back into other memory of the device; the buffer comes back with the report.
            let read_grant = there.engine.grant_read(vec![written.freeze()]).unwrap();
            let remote = here.engine.attach(&peer, &read_grant.token()).unwrap();
            let other = here.region(LEN, Mode::Leased);
            let batch = Batch::new().read(remote.whole(), other.carve(0, LEN).unwrap());
            let buffers = here.engine.submit(batch).unwrap().await.into_buffers().unwrap();
            assert_eq!((buffers[0].offset(), buffers[0].len()), (0, index(LEN)));
            assert!(here.bytes(&other, 0, LEN) == pattern(2, LEN), "{via}: other bytes were read");
            drop((buffers, source));
            assert_eq!((gpu.lease_count(), other.lease_count()), (0, 0));
            // A grant that is closed fails it, and the buffer comes back all the same.
            drop(read_grant);
            let batch = Batch::new().read(remote.extent(0, 4096).unwrap(), other.carve(0, 4096).unwrap());
            let mut report = here.engine.submit(batch).unwrap().await;
            assert!(matches!(cause(&report, 0), Some(Cause::Refused { .. })), "{:?}", report.outcomes());
            assert_eq!(report.take_buffer(0).map(|buffer| buffer.len()), Some(4096));
        }
    });
}

#[test]
fn a_transport_that_is_named_for_memory_of_a_device_and_cannot_be_had_is_waited_for_once() {
    // Three times as many rounds as there are buffers.
    const LEN: u64 = 40 << 20;
    run(|runtime| async move {
        let here = Here::new(&runtime, 1, &[Via::Local, Via::Shm, Via::Tcp]);
        let there = Here::new(&runtime, 2, &[Via::Local, Via::Tcp]);
        let peer = joined(&here, &there).await;
        let gpu = here.region(LEN, Mode::Leased);
        let memory = there.engine.allocate(LEN, Backing::Memfd).unwrap();
        let target = there.engine.grant_write(vec![memory.carve(0, LEN).unwrap()]).unwrap();
        let remote = here.engine.attach(&peer, &target.token()).unwrap();
        let batch = Batch::new().write(gpu.carve(0, LEN).unwrap().freeze(), remote.whole()).via(Via::Shm);
        let report = here.engine.submit(batch).unwrap().await;
        assert!(matches!(cause(&report, 0), Some(Cause::NoPath { via: Via::Shm, .. })), "{:?}", report.outcomes());
        let once = here.engine.options().connect_deadline;
        assert!(report.elapsed() < once + once, "{:?}", report.elapsed());
    });
}

#[test]
fn a_peer_has_the_owner_move_between_its_device_and_host_memory() {
    const LEN: u64 = 5_000_001;
    run(|runtime| async move {
        let (owner, here) =
            (Here::new(&runtime, 1, &[Via::Local, Via::Tcp]), Here::new(&runtime, 2, &[Via::Local, Via::Tcp]));
        let service = FileService::new(&owner.engine).unwrap();
        let node = Node::new(runtime.clone(), node::Options::new(owner.engine.options().identity));
        let address = node.open_with(service.router(), &owner.engine).await.unwrap();
        let peer = here.engine.open(address).await.unwrap();
        let gpu = owner.region(LEN, Mode::Raw(BOTH()));
        let token = service.publish_region(&gpu).unwrap();

        let client = Client::new(runtime.clone(), address.into(), Credentials::new(here.engine.options().identity));
        let within = || runtime.now() + Duration::from_secs(60);
        let remote = RemoteFile::new(client, token);
        let region = here.engine.allocate(2 * LEN, Backing::Memfd).unwrap();
        let mut source = region.carve(0, LEN).unwrap();
        source.copy_from_slice(&pattern(3, LEN));
        let readable = here.engine.grant_read(vec![source.freeze()]).unwrap();
        let moves = [
            FileMove { file_offset: 7, memory_offset: 7, len: LEN - 7 },
            FileMove { file_offset: 0, memory_offset: 0, len: 7 },
            FileMove { file_offset: LEN - 1, memory_offset: 0, len: 2 },
        ];
        let outcomes = remote.write(&readable.token(), &moves, Sync::Yes, within()).await.unwrap();
        assert_eq!(outcomes.iter().map(is_done).collect::<Vec<_>>(), [true, true, false], "{outcomes:?}");
        assert!(owner.bytes(&gpu, 0, LEN) == pattern(3, LEN));
        let target = here.engine.grant_write(vec![region.carve(LEN, LEN).unwrap()]).unwrap();
        let back = [FileMove { file_offset: 0, memory_offset: LEN, len: LEN }];
        assert!(remote.read(&target.token(), &back, within()).await.unwrap().iter().all(is_done));
        assert!(target.close().await[0][..] == pattern(3, LEN)[..]);

        // Who names it in a batch of its own is told that nothing reaches it, and touches nothing.
        let there = here.engine.attach(&peer, &token).unwrap();
        let batch = Batch::new().read(there.extent(0, 4096).unwrap(), region.carve(LEN, 4096).unwrap());
        let report = here.engine.submit(batch).unwrap().await;
        assert!(matches!(cause(&report, 0), Some(Cause::NoPath { .. })), "{:?}", report.outcomes());
        service.withdraw(&token);
        assert!(remote.write(&readable.token(), &moves, Sync::No, within()).await.is_err());
        node.drain().await;
    });
}

/// Work that the test finishes, or fails.
#[derive(Debug, Default)]
struct Work {
    state: AtomicU8,
    wake: parking_lot::Mutex<Option<Arc<OwnedFd>>>,
    announces: bool,
}

impl Work {
    fn end(&self, state: u8) {
        self.state.store(state, Ordering::SeqCst);
        if let Some(wake) = &*self.wake.lock() {
            rustix::io::write(&**wake, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

impl Fence for Work {
    fn state(&self) -> FenceState {
        match self.state.load(Ordering::SeqCst) {
            0 => FenceState::Pending,
            1 => FenceState::Passed,
            _ => FenceState::Failed,
        }
    }

    fn notify(&self, wake: &Arc<OwnedFd>) -> bool {
        *self.wake.lock() = Some(Arc::clone(wake));
        self.announces
    }
}

#[test]
fn a_batch_follows_work_on_a_device_over_any_transport() {
    run(|runtime| async move {
        let (here, there) =
            (Here::new(&runtime, 1, &[Via::Local, Via::Tcp]), Here::new(&runtime, 2, &[Via::Local, Via::Tcp]));
        let peer = joined(&here, &there).await;
        let memory = there.engine.allocate_raw(4096, Backing::Memfd, BOTH()).unwrap();
        let remote = here.engine.attach(&peer, &there.engine.expose(&memory).unwrap()).unwrap();
        let gpu = here.region(4096, Mode::Leased);
        let host = here.engine.allocate(4096, Backing::Memfd).unwrap();
        for announces in [true, false] {
            let work = Arc::new(Work { announces, ..Work::default() });
            let batch = Batch::new().write(gpu.carve(0, 4096).unwrap().freeze(), remote.whole()).after(work.clone());
            let transfer = here.engine.submit(batch).unwrap();
            // Others are not held up.
            let other = Batch::new().read(remote.whole(), host.carve(0, 4096).unwrap());
            here.engine.submit(other).unwrap().await.into_buffers().unwrap();
            assert!(!transfer.is_over());
            // What the work leaves there is what is sent.
            here.device.write(&gpu, 0, &pattern(u64::from(announces), 4096));
            work.end(1);
            assert!(transfer.await.is_done());
            let mut bytes = vec![0; 4096];
            memory.read_at(0, &mut bytes).unwrap();
            assert!(bytes == pattern(u64::from(announces), 4096));
        }
        let plain = |work: &Arc<Work>| {
            Batch::new().write(host.carve(0, 8).unwrap().freeze(), remote.extent(0, 8).unwrap()).after(work.clone())
        };
        let work = Arc::new(Work::default());
        let transfer = here.engine.submit(plain(&work).via(Via::Tcp)).unwrap();
        work.end(2);
        let report = transfer.await;
        let Status::Failed(failure) = &report.outcomes()[0].status else { panic!("it followed nothing") };
        assert_eq!((&failure.cause, failure.far), (&Cause::Fence, Far::Untouched));
        drop(report);
        let never = Arc::new(Work { announces: true, ..Work::default() });
        let transfer = here.engine.submit(plain(&never)).unwrap();
        transfer.cancel();
        assert_eq!(cause(&transfer.await, 0), Some(&Cause::Cancelled));
        let late = here.engine.submit(plain(&never).deadline(Duration::from_millis(20))).unwrap().await;
        assert_eq!(cause(&late, 0), Some(&Cause::Deadline));
        drop(late);
        let transfer = here.engine.submit(plain(&never)).unwrap();
        here.engine.shut_down().await;
        assert_eq!(cause(&transfer.await, 0), Some(&Cause::ShutDown));
        assert_eq!(host.lease_count(), 0);
    });
}
