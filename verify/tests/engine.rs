//! The engine as its callers see it, with itself as the peer.

use millpond_core::time::Duration;
use millpond_core::wire::hello::{HostIdentity, Identity};
use millpond_node::engine::{
    Arrival, Backing, Batch, Cause, Engine, Far, NotArrived, Options, RefusalReason, Status, SubmitErrorKind, Via,
};
use millpond_node::runtime::Runtime;
use millpond_tokio::Tokio;

fn options(node: u8) -> Options {
    Options::new(Identity { node: [node; 16], incarnation: 1, host: HostIdentity::UNKNOWN })
}

fn with_engine<F: Future<Output = ()>>(test: impl FnOnce(Engine<Tokio>) -> F) {
    millpond_tokio::run(|runtime| test(Engine::start(runtime, options(1)).unwrap())).unwrap();
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn bytes_written_into_a_grant_are_there_when_it_is_closed() {
    with_engine(|engine| async move {
        let region = engine.allocate(8192, Backing::Heap).unwrap();
        let grant = engine.grant_write(vec![region.carve(4096, 100).unwrap()]).unwrap();
        let remote = engine.attach(&engine.itself(), &grant.token()).unwrap();
        let mut source = region.carve(0, 50).unwrap();
        source.fill(7);
        let arrival = Arrival { counter: 3, amount: 2 };
        let batch = Batch::new().write(source.freeze(), remote.extent(4100, 50).unwrap()).arrival(arrival);
        let report = engine.submit(batch).unwrap().await;
        assert!(report.is_done());
        assert_eq!(report.via(), Some(Via::Local));
        assert_eq!(grant.arrived(arrival, SECOND).await, Ok(2));
        let memory = grant.close().await;
        assert!(memory[0][..4].iter().all(|&byte| byte == 0) && memory[0][4..54].iter().all(|&byte| byte == 7));
        assert_eq!(engine.statistics().bytes_written, 50);
    });
}

#[test]
fn a_read_gives_its_buffer_back_filled_and_a_stale_one_unfilled() {
    with_engine(|engine| async move {
        let region = engine.allocate(4096, Backing::Heap).unwrap();
        let mut shared = region.carve(0, 64).unwrap();
        shared.fill(9);
        let grant = engine.grant_read(vec![shared.freeze()]).unwrap();
        let remote = engine.attach(&engine.itself(), &grant.token()).unwrap();
        let batch = Batch::new().read(remote.extent(8, 8).unwrap(), region.carve(100, 8).unwrap());
        let buffers = engine.submit(batch).unwrap().await.into_buffers().unwrap();
        assert_eq!(buffers[0][..], [9; 8]);
        drop(grant);
        let batch = Batch::new().read(remote.whole(), region.carve(200, 64).unwrap());
        let mut report = engine.submit(batch).unwrap().await;
        let Status::Failed(failure) = &report.outcomes()[0].status else { panic!("a stale read was done") };
        assert_eq!((&failure.cause, failure.far), (&Cause::Refused { reason: RefusalReason::Stale }, Far::Untouched));
        assert_eq!(report.take_buffer(0).unwrap().len(), 64);
    });
}

#[test]
fn waiting_for_arrivals_ends_with_its_time_or_with_the_grant() {
    with_engine(|engine| async move {
        let region = engine.allocate(4096, Backing::Heap).unwrap();
        let grant = engine.grant_write(vec![region.carve(0, 64).unwrap()]).unwrap();
        let wanted = Arrival { counter: 0, amount: 1 };
        let late = grant.arrived(wanted, Duration::from_millis(5)).await;
        assert_eq!(late, Err(NotArrived::Late { count: 0 }));
        let waiting = grant.arrived(wanted, SECOND);
        let (closed, _) = futures::join!(waiting, grant.close());
        assert_eq!(closed, Err(NotArrived::Closed));
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_comes_back() {
    with_engine(|engine| async move {
        let refused = engine.submit(Batch::new()).unwrap_err();
        assert_eq!(refused.kind, SubmitErrorKind::Empty);
        let region = engine.allocate(4096, Backing::Heap).unwrap();
        let grant = engine.grant_write(vec![region.carve(0, 64).unwrap()]).unwrap();
        let remote = engine.attach(&engine.itself(), &grant.token()).unwrap();
        assert!(remote.extent(60, 5).is_err() && remote.extent(u64::MAX, 2).is_err());
        let batch = Batch::new().write(region.carve(64, 64).unwrap().freeze(), remote.whole()).via(Via::Tcp);
        let refused = engine.submit(batch).unwrap_err();
        assert!(matches!(refused.kind, SubmitErrorKind::NoPath { via: Via::Tcp, .. }));
        assert_eq!(refused.batch.len(), 1);
        engine.shut_down().await;
        assert_eq!(engine.submit(refused.batch).unwrap_err().kind, SubmitErrorKind::ShutDown);
        assert!(engine.runtime().now().as_nanos() > 0);
    });
}

#[test]
fn a_thread_without_a_runtime_moves_a_batch_itself() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let engine = Engine::start(Tokio::new(runtime.handle().clone()), options(1)).unwrap();
    let blocking = engine.blocking();
    let region = engine.allocate(4096, Backing::Heap).unwrap();
    let grant = engine.grant_write(vec![region.carve(0, 64).unwrap()]).unwrap();
    let remote = engine.attach(&engine.itself(), &grant.token()).unwrap();
    let source = region.carve(64, 64).unwrap().freeze();
    let report =
        std::thread::spawn(move || blocking.run(Batch::new().write(source, remote.whole())).unwrap()).join().unwrap();
    assert!(report.is_done());
}
