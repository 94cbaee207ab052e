//! The socket of a lane, in the clear or under a cipher.
//!
//! In the clear, memory goes to the kernel and comes from it without a stop. Under a cipher it is gathered in pieces of one
//! record, encrypted, and sent from a buffer of ours; what comes in is decrypted and scattered from there. Invariants: bytes
//! that were taken are quiet where they came from; records leave in order; a short count says that the socket is full, or
//! empty, with or without a cipher.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{RecvFlags, SendFlags};

use super::socket::{self, Cursor, Transfer, Vectors};
use crate::contract::{Cipher, LinkDownReason};

/// Plain bytes sealed at a time: what one TLS record holds.
const PLAIN_LEN: usize = 16 << 10;
/// Bytes of records read at a time.
const INCOMING_LEN: usize = 64 << 10;
/// Bytes of records waiting to leave from which on no more is sealed.
const SEALED_LEN_MAX: usize = 256 << 10;

/// A lane's socket.
pub(super) struct Wire {
    fd: OwnedFd,
    secure: Option<Box<Secure>>,
}

/// What a cipher needs around it.
struct Secure {
    cipher: Box<dyn Cipher>,
    plain: Box<[u8]>,
    /// Records on their way out, and how many bytes of them left.
    sealed: Vec<u8>,
    sent: usize,
    /// Records that came in and were not looked at: from `start` to `end`.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Wire {
    pub(super) fn new(fd: OwnedFd, cipher: Option<Box<dyn Cipher>>) -> Self {
        let secure = |cipher| {
            Box::new(Secure {
                cipher,
                plain: vec![0; PLAIN_LEN].into_boxed_slice(),
                sealed: Vec::new(),
                sent: 0,
                incoming: vec![0; INCOMING_LEN].into_boxed_slice(),
                start: 0,
                end: 0,
            })
        };
        Self { fd, secure: cipher.map(secure) }
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether bytes that were taken wait here for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.secure.as_ref().is_some_and(|secure| secure.sent < secure.sealed.len())
    }

    /// Whether bytes that came in wait here: the socket does not announce them.
    pub(super) fn has_unread(&mut self) -> bool {
        self.secure.as_mut().is_some_and(|secure| secure.start < secure.end || !secure.cipher.opened().is_empty())
    }

    /// Sends what waits here; true if nothing is left.
    pub(super) fn flush(&mut self) -> Result<bool, LinkDownReason> {
        self.secure.as_mut().map_or(Ok(true), |secure| secure.flush(&self.fd))
    }

    /// Sends the start of what `vectors` names, without waiting and without a signal.
    ///
    /// # Safety
    /// - The pieces are valid for reads.
    pub(super) unsafe fn send(&mut self, vectors: &mut Vectors) -> Transfer {
        let Some(secure) = &mut self.secure else {
            // SAFETY: the caller's promise.
            return unsafe { socket::send(self.fd.as_fd(), vectors) };
        };
        let mut cursor = Cursor::default();
        // Bounded: every round seals bytes, or is the last.
        loop {
            match secure.flush(&self.fd) {
                Ok(true) if cursor.taken() < vectors.len() => {}
                Ok(_) if cursor.taken() == 0 => return Transfer::Blocked,
                Ok(_) => return Transfer::Bytes(cursor.taken()),
                Err(reason) => return Transfer::Broken(reason),
            }
            while secure.sealed.len() < SEALED_LEN_MAX {
                // SAFETY: the caller's promise; the buffer is our own.
                let len = unsafe { vectors.gather(&mut cursor, &mut secure.plain) };
                if len == 0 {
                    break;
                }
                secure.cipher.seal(&secure.plain[..len], &mut secure.sealed);
            }
        }
    }

    /// Receives into the start of what `vectors` names, without waiting.
    ///
    /// # Safety
    /// - The pieces are valid for writes.
    pub(super) unsafe fn receive(&mut self, vectors: &mut Vectors) -> Transfer {
        let Some(secure) = &mut self.secure else {
            // SAFETY: the caller's promise.
            return unsafe { socket::receive(self.fd.as_fd(), vectors) };
        };
        let mut cursor = Cursor::default();
        // Bounded: every round fills memory, uses bytes that came in, reads some, or returns.
        let ending = loop {
            let opened = secure.cipher.opened();
            if !opened.is_empty() {
                // SAFETY: the caller's promise; the cipher's memory is none of the pieces.
                let len = unsafe { vectors.scatter(&mut cursor, opened) };
                secure.cipher.take(len);
                if cursor.taken() == vectors.len() {
                    return Transfer::Bytes(cursor.taken());
                }
                continue;
            }
            if secure.start == secure.end {
                match rustix::net::recv(&self.fd, &mut secure.incoming[..], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => break Transfer::End,
                    Ok((len, _)) => (secure.start, secure.end) = (0, len),
                    Err(errno) => break socket::fault(errno),
                }
            }
            match secure.cipher.accept(&secure.incoming[secure.start..secure.end]) {
                Ok(len) => secure.start += len,
                Err(_) => break Transfer::Broken(LinkDownReason::Violation("records that cannot be opened")),
            }
        };
        // What came before the end is told first; the end is found again.
        if cursor.taken() > 0 { Transfer::Bytes(cursor.taken()) } else { ending }
    }

    /// Sends bytes of ours if the socket takes them at once; otherwise they are lost.
    pub(super) fn send_bytes(&mut self, bytes: &[u8], vectors: &mut Vectors) {
        match &mut self.secure {
            None => socket::send_bytes(self.fd.as_fd(), bytes, vectors),
            Some(secure) => {
                secure.cipher.seal(bytes, &mut secure.sealed);
                // The lane ends next, whatever comes of it.
                let _ = secure.flush(&self.fd);
            }
        }
    }
}

impl Secure {
    fn flush(&mut self, fd: &OwnedFd) -> Result<bool, LinkDownReason> {
        if self.sealed.is_empty() {
            // What the connection itself has to say: the answer to a new key of the peer.
            self.cipher.seal(&[], &mut self.sealed);
        }
        // Bounded: every round sends bytes, or returns.
        while self.sent < self.sealed.len() {
            match rustix::net::send(fd, &self.sealed[self.sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(len) => self.sent += len,
                Err(errno) => match socket::fault(errno) {
                    Transfer::Broken(reason) => return Err(reason),
                    _ => return Ok(false),
                },
            }
        }
        self.sealed.clear();
        self.sent = 0;
        Ok(true)
    }
}
