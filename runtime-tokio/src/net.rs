//! Sockets and readiness on tokio's reactor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::io::{AsyncRead, AsyncWrite};
use millpond_node::runtime::{Readiness, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead as _, AsyncWrite as _, Interest, ReadBuf};

/// A connected TCP socket on tokio.
///
/// ```
/// use futures::{AsyncReadExt, AsyncWriteExt};
/// use millpond_node::runtime::{Runtime, local_addr};
/// millpond_tokio::run(|tokio| async move {
///     let listener = tokio.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
///     let mut near = tokio.dial(local_addr(&listener).unwrap()).await.unwrap();
///     let (mut far, _) = tokio.accept(&listener).await.unwrap();
///     near.write_all(b"pond").await.unwrap();
///     let mut word = [0; 4];
///     far.read_exact(&mut word).await.unwrap();
///     assert_eq!(&word, b"pond");
/// })
/// .unwrap();
/// ```
#[derive(Debug)]
pub struct TcpStream(pub(crate) tokio::net::TcpStream);

/// A listening TCP socket on tokio; see [`TcpStream`].
///
/// Example: `verify/tests/runtimes/runtime.rs` (`listen`).
#[derive(Debug)]
pub struct TcpListener(pub(crate) tokio::net::TcpListener);

/// Readiness of any descriptor on tokio.
///
/// ```
/// use millpond_node::runtime::{Readiness, Runtime};
/// millpond_tokio::run(|tokio| async move {
///     let (reader, writer) = std::io::pipe().unwrap();
///     let readable = tokio.readable(reader.into()).unwrap();
///     drop(writer);
///     readable.readable().await.unwrap();
/// })
/// .unwrap();
/// ```
#[derive(Debug)]
pub struct Readable(AsyncFd<OwnedFd>);

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Stream for TcpStream {
    fn into_fd(self) -> io::Result<OwnedFd> {
        self.0.into_std().map(OwnedFd::from)
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut buf = ReadBuf::new(buf);
        ready!(Pin::new(&mut self.0).poll_read(context, &mut buf))?;
        Poll::Ready(Ok(buf.filled().len()))
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, bufs)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

impl Readable {
    /// Registers `fd` with the runtime that is entered.
    #[expect(deprecated, reason = "its unsafe successor guards against descriptors that change; an OwnedFd does not")]
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        AsyncFd::with_interest(fd, Interest::READABLE).map(Self)
    }
}

impl Readiness for Readable {
    async fn readable(&self) -> io::Result<()> {
        // tokio watches edges; asking the kernel makes it a level. Each turn consumes an edge, so the loop waits for news.
        loop {
            let mut guard = self.0.readable().await?;
            let mut fds = [PollFd::new(self.0.get_ref(), PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0 {
                guard.retain_ready();
                return Ok(());
            }
            guard.clear_ready();
        }
    }
}
