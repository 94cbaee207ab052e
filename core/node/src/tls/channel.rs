//! The bytes of a session, in the clear or under TLS.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::io::{AsyncRead, AsyncWrite};
use futures_rustls::TlsStream;
use millpond_hal::contract::Cipher;
use rustls::pki_types::CertificateDer;

use super::records::{NoTls, Records};
use super::{LaneCipher, Tls};
use crate::runtime::Stream;

/// A connection after its handshake, if it has one. What is written may wait until it is flushed.
///
/// Example: `verify/tests/runtimes/session.rs` (`stream`).
#[derive(Debug)]
pub struct Channel<S>(Inner<S>);

#[derive(Debug)]
enum Inner<S> {
    Plain(S),
    Secured(Box<TlsStream<Records<S>>>),
}

/// Why a connection that came in does not become a channel; the socket is given back for last words.
#[derive(Debug)]
pub(crate) enum Rejected<S> {
    /// The peer does not speak TLS, and began with these bytes.
    Plain(S, Vec<u8>),
    /// The handshake failed.
    Failed(S, io::Error),
}

impl<S> Channel<S> {
    /// A connection without TLS.
    pub(crate) fn plain(socket: S) -> Self {
        Self(Inner::Plain(socket))
    }

    /// The peer's certificate, under TLS.
    pub(crate) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        let certificates = match &self.0 {
            Inner::Plain(_) => None,
            Inner::Secured(stream) => stream.get_ref().1.peer_certificates(),
        };
        certificates.and_then(<[_]>::first)
    }

    /// The socket, which goes on without TLS from here.
    pub(crate) fn into_socket(self) -> S {
        match self.0 {
            Inner::Plain(socket) => socket,
            Inner::Secured(stream) => match *stream {
                TlsStream::Client(stream) => stream.into_inner().0.socket,
                TlsStream::Server(stream) => stream.into_inner().0.socket,
            },
        }
    }
}

impl<S: Stream> Channel<S> {
    /// Takes the connection out of the runtime, with the cipher that it goes on under.
    ///
    /// # Errors
    /// What the runtime's deregistration reports; the socket is closed then.
    pub fn into_fd(self) -> io::Result<(OwnedFd, Option<Box<dyn Cipher>>)> {
        let (socket, connection) = match self.0 {
            Inner::Plain(socket) => return Ok((socket.into_fd()?, None)),
            Inner::Secured(stream) => match *stream {
                TlsStream::Client(stream) => {
                    let (records, connection) = stream.into_inner();
                    (records.socket, connection.into())
                }
                TlsStream::Server(stream) => {
                    let (records, connection) = stream.into_inner();
                    (records.socket, connection.into())
                }
            },
        };
        Ok((socket.into_fd()?, Some(Box::new(LaneCipher::new(connection)))))
    }
}

impl Tls {
    /// The dialing end of the handshake.
    pub(crate) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, socket: S) -> io::Result<Channel<S>> {
        let (connector, name) = self.connector();
        let stream = connector.connect(name, Records::new(socket)).await?;
        Ok(Channel(Inner::Secured(Box::new(stream.into()))))
    }

    /// The accepting end of the handshake.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, socket: S) -> Result<Channel<S>, Rejected<S>> {
        match self.acceptor().accept(Records::new(socket)).into_fallible().await {
            Ok(stream) => Ok(Channel(Inner::Secured(Box::new(stream.into())))),
            Err((error, records)) if error.get_ref().is_some_and(|source| source.is::<NoTls>()) => {
                let first = records.first_bytes().to_vec();
                Err(Rejected::Plain(records.socket, first))
            }
            Err((error, records)) => Err(Rejected::Failed(records.socket, error)),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Channel<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().0 {
            Inner::Plain(socket) => Pin::new(socket).poll_read(context, into),
            Inner::Secured(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Channel<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().0 {
            Inner::Plain(socket) => Pin::new(socket).poll_write(context, from),
            Inner::Secured(stream) => Pin::new(stream).poll_write(context, from),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().0 {
            Inner::Plain(socket) => Pin::new(socket).poll_write_vectored(context, from),
            Inner::Secured(stream) => Pin::new(stream).poll_write_vectored(context, from),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Inner::Plain(socket) => Pin::new(socket).poll_flush(context),
            Inner::Secured(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_close(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().0 {
            Inner::Plain(socket) => Pin::new(socket).poll_close(context),
            Inner::Secured(stream) => Pin::new(stream).poll_close(context),
        }
    }
}
