//! A socket that hands out TLS records one by one, so that nothing behind them is read.
//!
//! A hello may be followed by bytes of another protocol on the same socket: it must be left where it is. The first byte also
//! tells whether the other end speaks TLS at all.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::io::{AsyncRead, AsyncWrite};

/// Bytes of a record's head: type, version, length.
const HEAD_LEN: usize = 5;
/// The types of records there are, from "change cipher spec" to "application data".
const TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// The socket below TLS.
#[derive(Debug)]
pub(super) struct Records<S> {
    pub(super) socket: S,
    head: [u8; HEAD_LEN],
    head_len: usize,
    body_len: usize,
}

/// The other end does not speak TLS.
#[derive(Debug, thiserror::Error)]
#[error("the peer speaks no TLS; set [tls] on both nodes or on neither")]
pub(super) struct NoTls;

impl<S> Records<S> {
    pub(super) fn new(socket: S) -> Self {
        Self { socket, head: [0; HEAD_LEN], head_len: 0, body_len: 0 }
    }

    /// What was read of a first record that is none; nothing else was read.
    pub(super) fn first_bytes(&self) -> &[u8] {
        &self.head[..self.head_len]
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Records<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let rest = if this.body_len > 0 { this.body_len } else { HEAD_LEN - this.head_len };
        let want = rest.min(into.len());
        let len = ready!(Pin::new(&mut this.socket).poll_read(context, &mut into[..want]))?;
        if this.body_len > 0 {
            this.body_len -= len;
            return Poll::Ready(Ok(len));
        }
        this.head[this.head_len..this.head_len + len].copy_from_slice(&into[..len]);
        this.head_len += len;
        if this.head_len > 0 && !TYPES.contains(&this.head[0]) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, NoTls)));
        }
        if this.head_len == HEAD_LEN {
            this.body_len = usize::from(u16::from_be_bytes([this.head[3], this.head[4]]));
            this.head_len = 0;
        }
        Poll::Ready(Ok(len))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Records<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write(context, from)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(context)
    }

    fn poll_close(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_close(context)
    }
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;
    use futures::io::{AsyncReadExt, Cursor};

    use super::*;

    #[test]
    fn not_a_byte_behind_a_record_is_read() {
        let two = [&[22, 3, 3, 0, 3, 1, 2, 3], &[23u8, 3, 3, 0, 1, 9][..], b"frames"].concat();
        let mut records = Records::new(Cursor::new(two));
        block_on(async {
            let mut bytes = [0; 64];
            let mut seen = Vec::new();
            while seen.len() < 14 {
                let len = records.read(&mut bytes).await.unwrap();
                seen.extend_from_slice(&bytes[..len]);
            }
            assert_eq!(seen, [22, 3, 3, 0, 3, 1, 2, 3, 23, 3, 3, 0, 1, 9]);
            assert_eq!(records.socket.position(), 14);
        });
    }

    #[test]
    fn who_speaks_no_tls_is_known_by_the_first_byte() {
        let mut records = Records::new(Cursor::new(b"GET / HTTP/1.1".to_vec()));
        let error = block_on(records.read(&mut [0; 64])).unwrap_err();
        assert!(error.to_string().contains("speaks no TLS"), "{error}");
        assert_eq!(records.first_bytes(), b"GET /");
    }
}
