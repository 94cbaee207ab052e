//! The HTTP server under clients that behave and clients that do not, over real sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration as Wait, Instant};

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, StreamExt};
use millpond_core::time::Duration;
use millpond_node::http::{FetchError, Handler, Limits, Method, Reply, Request, fetch, start};
use millpond_node::runtime::{Runtime, Stop};

/// Echoes, hangs or streams for ever; counts what it began of the latter two and what was dropped of it.
#[derive(Clone, Default)]
struct Subject {
    began: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
}

impl Subject {
    fn guard(&self) -> Guard {
        self.began.fetch_add(1, Ordering::SeqCst);
        Guard(Arc::clone(&self.dropped))
    }
}

struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Handler for Subject {
    fn answer(&self, request: Request) -> BoxFuture<'static, Reply> {
        let subject = self.clone();
        match request.path.as_str() {
            "/hang" => async move {
                let _guard = subject.guard();
                futures::future::pending().await
            }
            .boxed(),
            "/stream" => async move {
                let guard = subject.guard();
                let first = stream::iter([b"data: 1\n\n".to_vec()]);
                Reply::events(first.chain(stream::once(async move {
                    let _guard = guard;
                    futures::future::pending().await
                })))
            }
            .boxed(),
            "/flood" => async move {
                let guard = subject.guard();
                Reply::events(stream::repeat(vec![b'x'; 64 << 10]).map(move |chunk| {
                    let _guard = &guard;
                    chunk
                }))
            }
            .boxed(),
            _ => async move { Reply::whole(200, "text/plain", request.body) }.boxed(),
        }
    }
}

/// Runs `test` in a thread of its own against a server with `limits`.
fn served(limits: Limits, test: impl FnOnce(SocketAddr, Subject, Stop) + Send + 'static) {
    millpond_tokio::run(|tokio| async move {
        let (subject, stop) = (Subject::default(), Stop::new());
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (address, server) =
            start(&tokio, any, Arc::new(subject.clone()), limits, &stop).await.expect("a free port on loopback");
        let stopping = stop.clone();
        millpond_node::runtime::blocking(&tokio, move || test(address, subject, stopping)).await;
        stop.stop();
        server.await;
    })
    .expect("a runtime");
}

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Wait::from_secs(10))).unwrap();
    stream
}

/// Reads one reply with a content-length: head and body.
fn reply(stream: &mut TcpStream) -> (String, Vec<u8>) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("a reply's head");
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let len =
        head.split("content-length: ").nth(1).map_or(0, |rest| rest.split("\r\n").next().unwrap().parse().unwrap());
    let mut body = vec![0; len];
    stream.read_exact(&mut body).expect("a reply's body");
    (head, body)
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Wait::from_secs(10), "never came true: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_connection_is_kept_for_the_next_request_and_ids_go_through() {
    served(Limits::default(), |address, _, _| {
        let mut stream = dial(address);
        stream.write_all(b"POST /e HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nx-request-id: mine\r\n\r\nabc").unwrap();
        let (head, body) = reply(&mut stream);
        assert!(head.starts_with("http/1.1 200") && head.contains("x-request-id: mine\r\n"), "{head}");
        assert_eq!(body, b"abc");
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: not a sane one\r\n\r\n").unwrap();
        let (head, _) = reply(&mut stream);
        assert!(head.contains("x-request-id: req-"), "{head}");
    });
}

#[test]
fn a_body_over_the_limit_is_refused_announced_or_not() {
    let mut limits = Limits::default();
    limits.body_len_max = 1_000;
    served(limits, |address, _, _| {
        let mut stream = dial(address);
        stream.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n").unwrap();
        let (head, body) = reply(&mut stream);
        assert!(head.starts_with("http/1.1 413"), "{head}");
        assert!(String::from_utf8(body).unwrap().contains("1000 bytes"));
        let mut stream = dial(address);
        stream.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
        stream.write_all(format!("400\r\n{}\r\n0\r\n\r\n", "y".repeat(0x400)).as_bytes()).unwrap();
        assert!(reply(&mut stream).0.starts_with("http/1.1 413"));
    });
}

#[test]
fn a_client_that_dawdles_is_cut_off() {
    let mut limits = Limits::default();
    limits.head_wait_max = Duration::from_millis(50);
    limits.body_wait_max = Duration::from_millis(50);
    served(limits, |address, _, _| {
        let mut stream = dial(address);
        stream.write_all(b"GET / HT").unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).expect("closed, not left waiting");
        let mut stream = dial(address);
        stream.write_all(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc").unwrap();
        assert!(reply(&mut stream).0.starts_with("http/1.1 408"));
    });
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let mut limits = Limits::default();
    limits.stall_max = Duration::from_millis(50);
    served(limits, |address, subject, _| {
        let mut stream = dial(address);
        stream.write_all(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        eventually("the flood was dropped", || subject.dropped.load(Ordering::SeqCst) == 1);
    });
}

#[test]
fn one_connection_too_many_is_told_so() {
    let mut limits = Limits::default();
    limits.connections_max = 2;
    served(limits, |address, _, _| {
        let mut kept: Vec<TcpStream> = (0..2).map(|_| dial(address)).collect();
        for stream in &mut kept {
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
            reply(stream);
        }
        let (head, body) = reply(&mut dial(address));
        assert!(head.starts_with("http/1.1 503") && head.contains("retry-after: 1"), "{head}");
        assert!(String::from_utf8(body).unwrap().contains("too many connections"));
        drop(kept);
        eventually("room again", || {
            let mut stream = dial(address);
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").is_ok() && {
                let mut start = [0; 12];
                stream.read_exact(&mut start).is_ok() && &start == b"HTTP/1.1 200"
            }
        });
    });
}

#[test]
fn a_client_that_goes_away_cancels_its_request_and_its_stream() {
    served(Limits::default(), |address, subject, _| {
        let mut stream = dial(address);
        stream.write_all(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        eventually("the request arrived", || subject.began.load(Ordering::SeqCst) == 1);
        drop(stream);
        eventually("the hanging request was dropped", || subject.dropped.load(Ordering::SeqCst) == 1);
        let mut stream = dial(address);
        stream.write_all(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut seen = Vec::new();
        let mut bytes = [0; 256];
        while !String::from_utf8_lossy(&seen).contains("data: 1") {
            let len = stream.read(&mut bytes).unwrap();
            assert_ne!(len, 0);
            seen.extend_from_slice(&bytes[..len]);
        }
        drop(stream);
        eventually("the stream was dropped", || subject.dropped.load(Ordering::SeqCst) == 2);
    });
}

#[test]
fn a_stop_closes_idle_connections_and_cuts_off_what_drains_too_long() {
    let mut limits = Limits::default();
    limits.drain_max = Duration::from_millis(50);
    served(limits, |address, subject, stop| {
        let mut idle = dial(address);
        idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        reply(&mut idle);
        let mut busy = dial(address);
        busy.write_all(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        eventually("the request arrived", || subject.began.load(Ordering::SeqCst) == 1);
        stop.stop();
        let mut rest = Vec::new();
        idle.read_to_end(&mut rest).expect("closed");
        eventually("the hanging request was dropped", || subject.dropped.load(Ordering::SeqCst) == 1);
        eventually("nobody listens", || {
            TcpStream::connect(address).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        });
    });
}

#[test]
fn garbage_gets_a_400_and_the_next_client_is_served() {
    served(Limits::default(), |address, _, _| {
        let mut stream = dial(address);
        stream.write_all(b"\x16\x03\x01 not http at all\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        // Closed after the answer; a reset after it is as good.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&answer));
        let mut stream = dial(address);
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        assert!(reply(&mut stream).0.starts_with("http/1.1 200"));
    });
}

#[test]
fn a_fetch_brings_the_answer_or_says_who_did_not_give_one() {
    millpond_tokio::run(|tokio| async move {
        let stop = Stop::new();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (address, server) =
            start(&tokio, any, Arc::new(Subject::default()), Limits::default(), &stop).await.expect("a free port");
        let soon = || tokio.now() + Duration::from_secs(10);
        let long = vec![b'z'; 1 << 20];
        let (status, body) = fetch(&tokio, address, Method::Post, "/echo", long.clone(), soon()).await.unwrap();
        assert!(status == 200 && body == long);
        let hurry = tokio.now() + Duration::from_millis(50);
        let late = fetch(&tokio, address, Method::Get, "/hang", Vec::new(), hurry).await;
        assert!(matches!(late, Err(FetchError::Deadline { .. })), "{late:?}");
        stop.stop();
        server.await;
        let gone = fetch(&tokio, address, Method::Get, "/", Vec::new(), soon()).await;
        assert!(matches!(gone, Err(FetchError::Dial { .. })), "{gone:?}");
    })
    .expect("a runtime");
}
