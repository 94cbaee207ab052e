//! What [`Runtime`] promises, checked on every runtime.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures::{AsyncReadExt, AsyncWriteExt, future};
use millpond_core::time::{Duration, Instant};
use millpond_node::runtime::{
    Elapsed, Readiness, Runtime, Stop, Stopped, Stream, blocking, by, local_addr, peer_addr, read_exact_by,
    sleep_until, start, within,
};

/// A loopback address with a free port.
pub(crate) fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Two ends of one connection.
pub(crate) async fn pair<R: Runtime>(runtime: &R) -> (R::Stream, R::Stream) {
    let listener = runtime.listen(loopback()).await.unwrap();
    let address = local_addr(&listener).unwrap();
    let (near, far) = future::join(runtime.dial(address), runtime.accept(&listener)).await;
    (near.unwrap(), far.unwrap().0)
}

async fn a_timer_is_never_early<R: Runtime>(runtime: R) {
    for millis in [0, 1, 7, 20] {
        let start = runtime.now();
        runtime.sleep(Duration::from_millis(millis)).await;
        assert!(runtime.now().since(start) >= Duration::from_millis(millis));
    }
    let deadline = runtime.now() + Duration::from_millis(5);
    sleep_until(&runtime, deadline).await;
    assert!(runtime.now() >= deadline);
}

async fn work_past_its_deadline_is_dropped<R: Runtime>(runtime: R) {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicBool::new(false));
    let guard = Dropped(dropped.clone());
    let endless = async move {
        future::pending::<()>().await;
        drop(guard);
    };
    assert_eq!(within(&runtime, Duration::from_millis(5), endless).await, Err(Elapsed));
    assert!(dropped.load(Ordering::SeqCst));
    assert_eq!(by(&runtime, Instant::ZERO, async { 7 }).await, Ok(7));
    assert_eq!(by(&runtime, Instant::NEVER, async { 8 }).await, Ok(8));
}

async fn bytes_cross_a_connection_in_order<R: Runtime>(runtime: R) {
    let (mut near, mut far) = pair(&runtime).await;
    assert_eq!(peer_addr(&near).unwrap(), local_addr(&far).unwrap());
    let sent: Vec<u8> = (0..3_000_000_u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let copy = sent.clone();
    let writer = start(&runtime, async move {
        near.write_all(&copy).await.unwrap();
        near.close().await.unwrap();
    });
    let mut received = Vec::new();
    far.read_to_end(&mut received).await.unwrap();
    writer.await;
    assert!(sent == received);
}

async fn a_socket_taken_out_still_carries_bytes<R: Runtime>(runtime: R) {
    let (mut near, far) = pair(&runtime).await;
    near.write_all(b"before").await.unwrap();
    let mut far = std::net::TcpStream::from(far.into_fd().unwrap());
    let would_block = loop {
        let mut word = [0; 6];
        match far.read_exact(&mut word) {
            Ok(()) => {
                assert_eq!(&word, b"before");
                break far.read(&mut word).unwrap_err();
            }
            // The bytes are still on their way through the loopback.
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(would_block.kind(), ErrorKind::WouldBlock, "the socket stays non-blocking");
    far.write_all(b"after").unwrap();
    let mut word = [0; 5];
    near.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"after");
}

async fn a_silent_peer_costs_a_read_its_deadline<R: Runtime>(runtime: R) {
    let (mut near, mut far) = pair(&runtime).await;
    near.write_all(b"ha").await.unwrap();
    let mut word = [0; 4];
    let deadline = runtime.now() + Duration::from_millis(10);
    let error = read_exact_by(&runtime, &mut far, &mut word, deadline).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let (near, mut far) = pair(&runtime).await;
    drop(near);
    let error = read_exact_by(&runtime, &mut far, &mut word, Instant::NEVER).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
}

async fn a_closed_port_refuses_and_a_used_one_is_named<R: Runtime>(runtime: R) {
    let listener = runtime.listen(loopback()).await.unwrap();
    let address = local_addr(&listener).unwrap();
    let taken = runtime.listen(address).await.err().map(|error| error.kind());
    assert_eq!(taken, Some(ErrorKind::AddrInUse));
    drop(listener);
    let refused = runtime.dial(address).await.err().map(|error| error.kind());
    assert_eq!(refused, Some(ErrorKind::ConnectionRefused));
}

async fn readiness_is_a_level_for_pipes_and_epoll_sets<R: Runtime>(runtime: R) {
    use rustix::event::epoll;
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let (mut reader, mut writer) = io::pipe().unwrap();
    let data = epoll::EventData::new_u64(1);
    epoll::add(&set, &reader, data, epoll::EventFlags::IN).unwrap();
    let readable = runtime.readable(set).unwrap();
    let quiet = within(&runtime, Duration::from_millis(10), readable.readable()).await;
    assert!(matches!(quiet, Err(Elapsed)), "nothing was written yet");
    for _ in 0..3 {
        writer.write_all(b"ab").unwrap();
        // One of two bytes is left unread in between: the level stays up.
        readable.readable().await.unwrap();
        readable.readable().await.unwrap();
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        readable.readable().await.unwrap();
        reader.read_exact(&mut byte).unwrap();
        let quiet = within(&runtime, Duration::from_millis(10), readable.readable()).await;
        assert!(matches!(quiet, Err(Elapsed)), "everything was read");
    }
    // A wait that began before the news ends with it.
    let late = runtime.clone();
    let wait = start(&runtime, async move { readable.readable().await });
    late.sleep(Duration::from_millis(5)).await;
    writer.write_all(b"c").unwrap();
    within(&late, Duration::from_secs(5), wait).await.unwrap().unwrap();
}

async fn futures_of_a_runtime_run_on_any_thread<R: Runtime>(runtime: R) {
    let outside = runtime.clone();
    let thread = std::thread::spawn(move || {
        futures::executor::block_on(async move {
            outside.sleep(Duration::from_millis(1)).await;
            let (mut near, mut far) = pair(&outside).await;
            near.write_all(b"x").await.unwrap();
            let mut byte = [0];
            far.read_exact(&mut byte).await.unwrap();
            assert!(!outside.resolve("localhost", 80).await.unwrap().is_empty());
            start(&outside, async move { byte[0] }).await
        })
    });
    assert_eq!(blocking(&runtime, move || thread.join().unwrap()).await, b'x');
}

async fn blocking_work_does_not_hold_up_tasks<R: Runtime>(runtime: R) {
    let release = Arc::new(std::sync::Barrier::new(9));
    let jobs: Vec<_> = (0..8)
        .map(|i| {
            let release = release.clone();
            blocking(&runtime, move || {
                release.wait();
                i
            })
        })
        .collect();
    // Eight jobs block, and a timer and a task still run.
    runtime.sleep(Duration::from_millis(1)).await;
    assert_eq!(start(&runtime, async { 5 }).await, 5);
    release.wait();
    assert_eq!(future::join_all(jobs).await, (0..8).collect::<Vec<_>>());
}

async fn a_dropped_task_is_cancelled_and_a_detached_one_is_not<R: Runtime>(runtime: R) {
    let count = Arc::new(AtomicUsize::new(0));
    let tick = |rounds: usize| {
        let (runtime, count) = (runtime.clone(), count.clone());
        async move {
            for _ in 0..rounds {
                runtime.sleep(Duration::from_millis(1)).await;
                count.fetch_add(1, Ordering::SeqCst);
            }
        }
    };
    drop(start(&runtime, tick(usize::MAX)));
    start(&runtime, tick(3)).detach();
    within(&runtime, Duration::from_secs(5), async {
        while count.load(Ordering::SeqCst) < 3 {
            runtime.sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    // The cancelled one would have gone on counting.
    let before = count.load(Ordering::SeqCst);
    runtime.sleep(Duration::from_millis(20)).await;
    assert!(count.load(Ordering::SeqCst) <= before + 1);
}

async fn a_panicking_task_takes_only_itself_down<R: Runtime>(runtime: R) {
    runtime.spawn(async { panic!("this panic is part of the test") });
    let task = start(&runtime, async { panic!("this panic is part of the test") });
    let caught = future::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(async move {
        let (): () = task.await;
    }))
    .await;
    assert!(caught.is_err());
    assert_eq!(start(&runtime, async { 1 }).await, 1);
    assert_eq!(blocking(&runtime, || 2).await, 2);
}

async fn a_stop_reaches_children_and_not_parents<R: Runtime>(runtime: R) {
    let root = Stop::new();
    let (left, right) = (root.child(), root.child());
    let leaf = left.child();
    let waiter = {
        let leaf = leaf.clone();
        start(&runtime, async move { leaf.or_stopped(future::pending::<()>()).await })
    };
    left.stop();
    assert_eq!(waiter.await, Err(Stopped));
    assert!(leaf.is_stopped() && !root.is_stopped() && !right.is_stopped());
    assert_eq!(right.or_stopped(async { 3 }).await, Ok(3));
    root.stop();
    right.stopped().await;
}

async fn names_and_literals_resolve<R: Runtime>(runtime: R) {
    let literal = runtime.resolve("[::1]", 7).await.unwrap();
    assert_eq!(literal, ["[::1]:7".parse().unwrap()]);
    assert_eq!(runtime.resolve("10.1.2.3", 9).await.unwrap(), ["10.1.2.3:9".parse().unwrap()]);
    assert!(runtime.resolve("no such host", 1).await.is_err());
}

async fn sockets_are_closed_on_exec<R: Runtime>(runtime: R) {
    let listener = runtime.listen(loopback()).await.unwrap();
    let (near, far) = pair(&runtime).await;
    for fd in [listener.as_fd(), near.as_fd(), far.as_fd()] {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "descriptor {}", fd.as_raw_fd());
    }
}

/// Both handlers are there before the signal is sent, so it ends nobody.
#[test]
fn a_signal_stops_the_token_and_not_the_process() {
    use rustix::process::{Signal, getpid, kill_process};
    let smol = |tokio: Stop| {
        move |smol: millpond_smol::Smol| async move {
            let token = smol.terminated().unwrap();
            assert!(!token.is_stopped() && !tokio.is_stopped());
            kill_process(getpid(), Signal::TERM).unwrap();
            within(&smol, Duration::from_secs(5), future::join(token.stopped(), tokio.stopped())).await.unwrap();
        }
    };
    millpond_tokio::run(|tokio| async move {
        let token = tokio.terminated().unwrap();
        blocking(&tokio, move || millpond_smol::run(smol(token)).unwrap()).await;
    })
    .unwrap();
}

macro_rules! suite {
    ($runtime:ident, $run:path, [$($name:ident),* $(,)?]) => {
        mod $runtime {
            $(#[test]
            fn $name() {
                $run(super::$name).unwrap();
            })*
        }
    };
}

macro_rules! on {
    ($runtime:ident, $run:path) => {
        suite!(
            $runtime,
            $run,
            [
                a_timer_is_never_early,
                work_past_its_deadline_is_dropped,
                bytes_cross_a_connection_in_order,
                a_socket_taken_out_still_carries_bytes,
                a_silent_peer_costs_a_read_its_deadline,
                a_closed_port_refuses_and_a_used_one_is_named,
                readiness_is_a_level_for_pipes_and_epoll_sets,
                futures_of_a_runtime_run_on_any_thread,
                blocking_work_does_not_hold_up_tasks,
                a_dropped_task_is_cancelled_and_a_detached_one_is_not,
                a_panicking_task_takes_only_itself_down,
                a_stop_reaches_children_and_not_parents,
                names_and_literals_resolve,
                sockets_are_closed_on_exec,
            ]
        );
    };
}

on!(tokio, millpond_tokio::run);
on!(smol, millpond_smol::run);
on!(own, super::own);

fn own<F: Future>(work: impl FnOnce(crate::own_runtime::Own) -> F) -> io::Result<F::Output> {
    Ok(futures::executor::block_on(work(crate::own_runtime::Own::start()?)))
}

#[test]
fn a_runtime_of_our_own_serves_a_store() {
    crate::own_runtime::main();
}
