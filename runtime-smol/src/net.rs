//! Sockets and readiness on smol's reactor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::io::{AsyncRead, AsyncWrite};
use millpond_node::runtime::{Readiness, Stream};
use smol::Async;

/// A connected TCP socket on smol.
///
/// ```
/// use futures::{AsyncReadExt, AsyncWriteExt};
/// use millpond_node::runtime::{Runtime, local_addr};
/// millpond_smol::run(|smol| async move {
///     let listener = smol.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
///     let mut near = smol.dial(local_addr(&listener).unwrap()).await.unwrap();
///     let (mut far, _) = smol.accept(&listener).await.unwrap();
///     near.write_all(b"pond").await.unwrap();
///     let mut word = [0; 4];
///     far.read_exact(&mut word).await.unwrap();
///     assert_eq!(&word, b"pond");
/// })
/// .unwrap();
/// ```
#[derive(Debug)]
pub struct TcpStream(pub(crate) Async<std::net::TcpStream>);

/// A listening TCP socket on smol; see [`TcpStream`].
///
/// Example: `verify/tests/runtimes/runtime.rs` (`listen`).
#[derive(Debug)]
pub struct TcpListener(pub(crate) Async<std::net::TcpListener>);

/// Readiness of any descriptor on smol.
///
/// ```
/// use millpond_node::runtime::{Readiness, Runtime};
/// millpond_smol::run(|smol| async move {
///     let (reader, writer) = std::io::pipe().unwrap();
///     let readable = smol.readable(reader.into()).unwrap();
///     drop(writer);
///     readable.readable().await.unwrap();
/// })
/// .unwrap();
/// ```
#[derive(Debug)]
pub struct Readable(Async<OwnedFd>);

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
        self.0.into_inner().map(OwnedFd::from)
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_read(context, buf)
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

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.get_ref().shutdown(std::net::Shutdown::Write))
    }
}

impl Readable {
    /// Registers `fd` with the reactor.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        Async::new_nonblocking(fd).map(Self)
    }
}

impl Readiness for Readable {
    async fn readable(&self) -> io::Result<()> {
        // The reactor asks the kernel anew for every wait, so this is a level already.
        self.0.readable().await
    }
}
