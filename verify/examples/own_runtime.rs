//! A runtime in 200 lines, with neither tokio nor smol: a thread per task, and one that waits for sockets and timers.
//! `own_runtime/serve.rs` serves on it: `cargo run -p millpond-verify --example own_runtime`, which fails loudly.

use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use futures::io::{AsyncRead, AsyncWrite};
use millpond_core::time::{Duration, Instant};
use millpond_node::runtime::{Readiness, Runtime, Stream, boot_time};
use rustix::event::epoll::{self, EventFlags as Flags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, acceptfrom_with, connect, send, socket_with,
};

const SOCKET: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

/// The runtime; clones are handles.
#[derive(Clone)]
pub(crate) struct Own(Arc<Shared>);

struct Shared {
    epoll: OwnedFd,
    bell: OwnedFd,
    wakers: Mutex<HashMap<u64, Vec<(Flags, Waker)>>>,
    timers: Mutex<BTreeMap<(Instant, u64), Waker>>,
    made: AtomicU64,
}

impl Own {
    pub(crate) fn start() -> io::Result<Self> {
        let (epoll, bell) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, eventfd(0, EventfdFlags::NONBLOCK)?);
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(u64::MAX), Flags::IN)?;
        let own =
            Self(Arc::new(Shared { epoll, bell, wakers: Mutex::default(), timers: Mutex::default(), made: 0.into() }));
        let reactor = own.clone();
        std::thread::spawn(move || reactor.wait_for_events());
        Ok(own)
    }

    fn wait_for_events(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            let next = self.0.timers.lock().unwrap().keys().next().map(|(due, _)| due.since(boot_time()));
            let timeout = next.map(|span| Timespec::try_from(std::time::Duration::from(span)).unwrap());
            let _ = epoll::wait(&self.0.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
            for event in events.drain(..) {
                let _ = event.data.u64() == u64::MAX && read(&self.0.bell, &mut [0; 8]).is_ok();
                let waiting = self.0.wakers.lock().unwrap().remove(&event.data.u64()).unwrap_or_default();
                waiting.into_iter().for_each(|(_, waker)| waker.wake());
            }
            let mut timers = self.0.timers.lock().unwrap();
            let later = timers.split_off(&(boot_time(), u64::MAX));
            std::mem::replace(&mut *timers, later).into_values().for_each(Waker::wake);
        }
    }

    fn source(&self, fd: OwnedFd) -> io::Result<Source> {
        let source = Source { fd, own: self.clone() };
        match epoll::add(&self.0.epoll, &source.fd, source.data(), epoll::EventFlags::ONESHOT) {
            Ok(()) | Err(Errno::EXIST) => Ok(source),
            Err(error) => Err(error.into()),
        }
    }
}

/// A descriptor in the epoll set: stream, listener, or somebody's.
pub(crate) struct Source {
    fd: OwnedFd,
    own: Own,
}

impl Source {
    fn data(&self) -> epoll::EventData {
        epoll::EventData::new_u64(u64::from(self.fd.as_raw_fd().unsigned_abs()))
    }

    /// Tries `work`, and is woken for another try when the descriptor is ready in the direction of `flags`.
    fn attempt<T>(&self, cx: &Context<'_>, flags: Flags, work: impl FnOnce() -> io::Result<T>) -> Poll<io::Result<T>> {
        match work() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut wakers = self.own.0.wakers.lock().unwrap();
                let waiting = wakers.entry(self.data().u64()).or_default();
                waiting.retain(|(other, _)| *other != flags);
                waiting.push((flags, cx.waker().clone()));
                let all = waiting.iter().fold(Flags::ONESHOT, |all, (flags, _)| all | *flags);
                epoll::modify(&self.own.0.epoll, &self.fd, self.data(), all)?;
                Poll::Pending
            }
            outcome => Poll::Ready(outcome),
        }
    }
}

impl Readiness for Source {
    async fn readable(&self) -> io::Result<()> {
        let is_ready = || match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&Timespec::default()))? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(()),
        };
        poll_fn(|cx| self.attempt(cx, Flags::IN, is_ready)).await
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Stream for Source {
    fn into_fd(self) -> io::Result<OwnedFd> {
        epoll::delete(&self.own.0.epoll, &self.fd)?;
        Ok(self.fd)
    }
}

impl AsyncRead for Source {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        self.attempt(cx, Flags::IN, || Ok(read(&self.fd, buf)?))
    }
}

impl AsyncWrite for Source {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.attempt(cx, Flags::OUT, || Ok(send(&self.fd, buf, SendFlags::NOSIGNAL)?))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(&self.fd, Shutdown::Write)?))
    }
}

impl Runtime for Own {
    type Stream = Source;
    type Listener = Source;
    type Readiness = Source;
    fn sleep(&self, span: Duration) -> impl Future<Output = ()> + Send + use<> {
        let (own, due) = (self.clone(), (boot_time() + span, self.0.made.fetch_add(1, Ordering::Relaxed)));
        poll_fn(move |cx| {
            if boot_time() >= due.0 {
                return Poll::Ready(());
            }
            own.0.timers.lock().unwrap().insert(due, cx.waker().clone());
            let _ = write(&own.0.bell, &1_u64.to_ne_bytes());
            Poll::Pending
        })
    }
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        std::thread::spawn(|| futures::executor::block_on(task));
    }
    fn spawn_blocking(&self, job: impl FnOnce() + Send + 'static) {
        std::thread::spawn(job);
    }
    fn dial(&self, peer: SocketAddr) -> impl Future<Output = io::Result<Source>> + Send + use<> {
        let own = self.clone();
        async move {
            let family = if peer.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
            let stream = own.source(socket_with(family, SocketType::STREAM, SOCKET, None)?)?;
            let connected = || match connect(&stream.fd, &peer) {
                Err(Errno::INPROGRESS | Errno::ALREADY) => Err(io::ErrorKind::WouldBlock.into()),
                Ok(()) | Err(Errno::ISCONN) => Ok(()),
                Err(error) => Err(error.into()),
            };
            poll_fn(|cx| stream.attempt(cx, Flags::OUT, connected)).await?;
            Ok(stream)
        }
    }
    fn listen(&self, local: SocketAddr) -> impl Future<Output = io::Result<Source>> + Send + use<> {
        let bind = TcpListener::bind(local).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        std::future::ready(bind.and_then(|listener| self.source(listener.into())))
    }
    async fn accept(&self, listener: &Source) -> io::Result<(Source, SocketAddr)> {
        let accept = || Ok(acceptfrom_with(&listener.fd, SOCKET)?);
        let (fd, peer) = poll_fn(|cx| listener.attempt(cx, Flags::IN, accept)).await?;
        let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok()).ok_or(io::ErrorKind::NotConnected)?;
        Ok((self.source(fd)?, peer))
    }
    fn readable(&self, fd: OwnedFd) -> io::Result<Source> {
        self.source(fd)
    }
}
