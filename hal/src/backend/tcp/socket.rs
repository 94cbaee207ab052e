//! The two system calls that move bytes between a lane's socket and memory, and the socket's options.
//!
//! Scattered memory is handed to the kernel as addresses, never as Rust references: a peer or the owner may write it at the
//! same time. Invariant: a [`Vectors`] is filled and used within one turn and empty between turns.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::contract::LinkDownReason;

/// Pieces of memory in one system call, at most. The kernel takes 1,024; longer lists do not pay.
pub(super) const VECTORS_MAX: usize = 512;

/// Scattered memory for one system call.
pub(super) struct Vectors {
    list: Vec<libc::iovec>,
    len: usize,
}

// SAFETY:
// - raw pointers in `list` block Send. The list is emptied before each use and means nothing between turns (see the module
//   doc), so a device that moves to another thread carries no address along. Test: conformance moves a device.
unsafe impl Send for Vectors {}

impl Vectors {
    pub(super) fn new() -> Self {
        Self { list: Vec::with_capacity(VECTORS_MAX + 2), len: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.len = 0;
    }

    /// Bytes in all pieces.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether more pieces are welcome.
    pub(super) fn has_room(&self) -> bool {
        self.list.len() < VECTORS_MAX
    }

    /// Adds a piece; empty ones are left out.
    ///
    /// # Safety
    /// - Until [`Vectors::clear`], `base .. base + len` is valid for reads if the list is sent, for writes if it is
    ///   received into, and nobody holds a Rust reference that this would contradict.
    pub(super) unsafe fn push(&mut self, base: NonNull<u8>, len: usize) {
        if len > 0 {
            self.list.push(libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len });
            self.len += len;
        }
    }

    /// CRC-32C of the first `len` bytes, on top of `digest`.
    ///
    /// # Safety
    /// - The pieces are still valid for reads.
    pub(super) unsafe fn digest(&self, len: usize, digest: &mut crc_fast::Digest) {
        let mut rest = len;
        for piece in &self.list {
            let piece_len = piece.iov_len.min(rest);
            if let Some(base) = NonNull::new(piece.iov_base.cast::<u8>()) {
                // SAFETY: inside a piece, which the caller says is valid.
                unsafe { digest_memory(base, piece_len, digest) };
            }
            rest -= piece_len;
            if rest == 0 {
                break;
            }
        }
    }

    /// Copies the pieces from `cursor` on into `target`, as far as both go. Says how many bytes.
    ///
    /// # Safety
    /// - The pieces are still valid for reads, and none of them lies in `target`.
    pub(super) unsafe fn gather(&self, cursor: &mut Cursor, target: &mut [u8]) -> usize {
        let mut len = 0;
        while let Some((base, piece_len)) = self.next_piece(cursor, target.len() - len) {
            // SAFETY: inside a piece, which the caller says is valid; `target` has room for `piece_len` more.
            unsafe { crate::copy::copy(base.as_ptr(), target[len..].as_mut_ptr(), piece_len) };
            len += piece_len;
        }
        len
    }

    /// Copies `bytes` into the pieces from `cursor` on, as far as both go. Says how many.
    ///
    /// # Safety
    /// - The pieces are still valid for writes, and none of them lies in `bytes`.
    pub(super) unsafe fn scatter(&self, cursor: &mut Cursor, bytes: &[u8]) -> usize {
        let mut len = 0;
        while let Some((base, piece_len)) = self.next_piece(cursor, bytes.len() - len) {
            // SAFETY: inside a piece, which the caller says is valid.
            unsafe { copy_in(&bytes[len..len + piece_len], base) };
            len += piece_len;
        }
        len
    }

    /// The next stretch of a piece, at most `len_max` bytes; none if there is nothing left, here or there.
    fn next_piece(&self, cursor: &mut Cursor, len_max: usize) -> Option<(NonNull<u8>, usize)> {
        let piece = self.list.get(cursor.piece).filter(|_| len_max > 0)?;
        let len = (piece.iov_len - cursor.offset).min(len_max);
        // Wrapping, so that computing an address is not an access; it lies inside the piece.
        let base = NonNull::new(piece.iov_base.cast::<u8>().wrapping_add(cursor.offset))?;
        cursor.offset += len;
        cursor.taken += len;
        if cursor.offset == piece.iov_len {
            (cursor.piece, cursor.offset) = (cursor.piece + 1, 0);
        }
        Some((base, len))
    }

    fn header(&mut self) -> libc::msghdr {
        // SAFETY: all-zero bytes are a valid msghdr: null pointers and zero lengths.
        let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
        header.msg_iov = self.list.as_mut_ptr();
        header.msg_iovlen = self.list.len() as _;
        header
    }
}

/// A place in [`Vectors`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    piece: usize,
    offset: usize,
    taken: usize,
}

impl Cursor {
    /// Bytes before it.
    pub(super) fn taken(self) -> usize {
        self.taken
    }
}

/// What a system call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// So many bytes moved; never 0.
    Bytes(usize),
    /// Nothing could be moved without waiting.
    Blocked,
    /// The peer closed its side.
    End,
    /// The connection is broken.
    Broken(LinkDownReason),
}

/// Sends the start of what `vectors` names, without waiting and without a signal.
///
/// # Safety
/// - The pieces are valid for reads.
pub(super) unsafe fn send(fd: BorrowedFd<'_>, vectors: &mut Vectors) -> Transfer {
    let header = vectors.header();
    // SAFETY: the header points at `list`, whose pieces the caller vouches for; the kernel only reads them.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    outcome(sent, Transfer::Blocked)
}

/// Receives into the start of what `vectors` names, without waiting.
///
/// # Safety
/// - The pieces are valid for writes.
pub(super) unsafe fn receive(fd: BorrowedFd<'_>, vectors: &mut Vectors) -> Transfer {
    let mut header = vectors.header();
    // SAFETY: the header points at `list`, whose pieces the caller vouches for; the kernel writes nothing else.
    let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, libc::MSG_DONTWAIT) };
    outcome(received, Transfer::End)
}

/// Sends bytes of ours if the socket takes them at once; otherwise they are lost.
pub(super) fn send_bytes(fd: BorrowedFd<'_>, bytes: &[u8], vectors: &mut Vectors) {
    vectors.clear();
    // SAFETY: `bytes` outlives the call and is only read.
    unsafe {
        vectors.push(NonNull::from(bytes).cast(), bytes.len());
        send(fd, vectors);
    }
    vectors.clear();
}

fn outcome(result: isize, at_zero: Transfer) -> Transfer {
    match usize::try_from(result) {
        Ok(0) => at_zero,
        Ok(len) => Transfer::Bytes(len),
        Err(_) => {
            let errno = std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
            fault(errno)
        }
    }
}

/// What it means that a system call moved nothing.
pub(super) fn fault(errno: Errno) -> Transfer {
    match errno {
        Errno::AGAIN | Errno::INTR | Errno::NOBUFS => Transfer::Blocked,
        Errno::CONNRESET | Errno::PIPE | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::CONNABORTED => {
            Transfer::Broken(LinkDownReason::PeerGone)
        }
        other => Transfer::Broken(system(other)),
    }
}

/// The operating system's error as the reason of a link's end.
pub(super) fn system(errno: Errno) -> LinkDownReason {
    core::num::NonZeroI32::new(errno.raw_os_error()).map_or(LinkDownReason::PeerGone, LinkDownReason::System)
}

/// Copies `bytes` to `target`.
///
/// # Safety
/// - `target` is valid for writes of as many bytes, and none of them lie in `bytes`.
pub(super) unsafe fn copy_in(bytes: &[u8], target: NonNull<u8>) {
    // SAFETY: `bytes` is valid for reads; the rest is the caller's promise.
    unsafe { crate::copy::copy(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
}

/// CRC-32C of memory that may change meanwhile: taken over copies of small pieces, never over the memory itself.
///
/// # Safety
/// - `base .. base + len` is valid for reads.
pub(super) unsafe fn digest_memory(base: NonNull<u8>, len: usize, digest: &mut crc_fast::Digest) {
    let mut piece = [0u8; 4096];
    let mut at = 0;
    while at < len {
        let piece_len = piece.len().min(len - at);
        // SAFETY: `at + piece_len <= len`, and `piece` is our own.
        unsafe { crate::copy::copy(base.as_ptr().add(at), piece.as_mut_ptr(), piece_len) };
        digest.update(&piece[..piece_len]);
        at += piece_len;
    }
}

/// Small frames leave at once. Failure is no reason to refuse a lane: a socket that is not TCP has no such option.
pub(super) fn set_no_delay(fd: BorrowedFd<'_>) {
    let _ = rustix::net::sockopt::set_tcp_nodelay(fd, true);
}

/// For a peer on this host: a congestion control that does not pace (bbr, a common default, does), reno or else cubic.
/// Measured on 2 cores: 64 KiB 27 against 75 us, 16 MiB 7.1 against 3.8 GB/s. Remote peers are left alone.
pub(super) fn unpace_local_peer(fd: BorrowedFd<'_>) {
    if is_on_this_host(fd) && rustix::net::sockopt::set_tcp_congestion(fd, "reno").is_err() {
        let _ = rustix::net::sockopt::set_tcp_congestion(fd, "cubic");
    }
}

/// Whether both ends of a TCP connection have the same address, as they do on one host, over loopback or not.
fn is_on_this_host(fd: BorrowedFd<'_>) -> bool {
    use std::net::SocketAddr;
    let (Ok(ours), Ok(Some(theirs))) = (rustix::net::getsockname(fd), rustix::net::getpeername(fd)) else {
        return false;
    };
    match (SocketAddr::try_from(ours), SocketAddr::try_from(theirs)) {
        (Ok(ours), Ok(theirs)) => ours.ip() == theirs.ip() || theirs.ip().is_loopback(),
        _ => false,
    }
}
