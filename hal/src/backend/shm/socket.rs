//! The unix socket of a shared-memory link: hands over descriptors, wakes the other end, and tells when it died.
//!
//! Records of 64 bytes, some with descriptors attached. Nothing on it is on the data path while both ends are awake.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use super::half::{ENTRY_WORDS, Entry};

/// Bytes of a record.
const RECORD_LEN: usize = ENTRY_WORDS * 8;
/// Descriptors of one record, at most.
const FDS_MAX: usize = 2;
/// Records that wait to be sent, at most.
const QUEUE_MAX: usize = 4096;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Kind {
    /// Look at the rings.
    Wake = 1,
    /// Our half and our header page: two descriptors. Words: 1 generation.
    Hello = 2,
    /// A region: one descriptor. Words: 1 region, 2 length.
    Region = 3,
    /// A region is gone; unmap it. Words: 1 region.
    Forget = 4,
}

impl Kind {
    /// The kind with that number.
    pub(super) const fn from_word(word: u64) -> Option<Self> {
        match word {
            1 => Some(Self::Wake),
            2 => Some(Self::Hello),
            3 => Some(Self::Region),
            4 => Some(Self::Forget),
            _ => None,
        }
    }
}

/// What came of reading.
#[derive(Debug)]
pub(super) enum Received {
    /// A whole record; its descriptors wait in [`Socket::take_fd`].
    Record(Entry),
    /// Nothing more for now.
    Nothing,
    /// The other end is gone.
    End,
    /// It sent more descriptors than records can have.
    TooManyFds,
}

/// One end of the socket.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    partial: [u8; RECORD_LEN],
    partial_len: usize,
    ahead: VecDeque<u8>,
    fds: VecDeque<OwnedFd>,
    queue: VecDeque<(Entry, Vec<Arc<OwnedFd>>)>,
}

impl Socket {
    /// Over a connected, non-blocking socket and what was already read from it.
    pub(super) fn new(fd: OwnedFd, read_ahead: Vec<u8>) -> Self {
        let (partial, partial_len) = ([0; RECORD_LEN], 0);
        Self { fd, partial, partial_len, ahead: read_ahead.into(), fds: VecDeque::new(), queue: VecDeque::new() }
    }

    /// Queues a record. False: the queue is at its bound, the peer does not read.
    pub(super) fn send(&mut self, record: Entry, fds: Vec<Arc<OwnedFd>>) -> bool {
        if self.queue.len() >= QUEUE_MAX {
            return false;
        }
        self.queue.push_back((record, fds));
        self.flush();
        true
    }

    /// Whether nothing waits to be sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends what it can. A broken socket is noticed by [`Socket::receive`].
    pub(super) fn flush(&mut self) {
        while let Some((record, fds)) = self.queue.front() {
            match send_record(&self.fd, record, fds) {
                Ok(()) => drop(self.queue.pop_front()),
                Err(_) => return,
            }
        }
    }

    /// A wake-up; if it does not fit, the peer has something to read already.
    pub(super) fn wake(&mut self) {
        if self.queue.is_empty() {
            let mut record = [0; ENTRY_WORDS];
            record[0] = Kind::Wake as u64;
            let _ = send_record(&self.fd, &record, &[]);
        }
    }

    /// The next record.
    pub(super) fn receive(&mut self) -> Received {
        loop {
            while self.partial_len < RECORD_LEN {
                let Some(byte) = self.ahead.pop_front() else { break };
                self.partial[self.partial_len] = byte;
                self.partial_len += 1;
            }
            if self.partial_len == RECORD_LEN {
                self.partial_len = 0;
                return Received::Record(words_of(&self.partial));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let into = &mut self.partial[self.partial_len..];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let read = match rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(into)], &mut control, flags) {
                Ok(message) => message.bytes,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Received::Nothing,
                Err(_) => return Received::End,
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    self.fds.extend(fds);
                }
            }
            if self.fds.len() > 2 * FDS_MAX {
                return Received::TooManyFds;
            }
            if read == 0 {
                return Received::End;
            }
            self.partial_len += read;
        }
    }

    /// The next descriptor that came along.
    pub(super) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.pop_front()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn words_of(bytes: &[u8; RECORD_LEN]) -> Entry {
    let mut words = [0; ENTRY_WORDS];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
    }
    words
}

fn send_record(fd: &OwnedFd, record: &Entry, fds: &[Arc<OwnedFd>]) -> Result<(), Errno> {
    let mut bytes = [0; RECORD_LEN];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(record) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // A record is far smaller than any socket buffer: the kernel takes all of it or none.
    match rustix::net::sendmsg(fd, &[IoSlice::new(&bytes)], &mut control, flags)? {
        RECORD_LEN => Ok(()),
        _ => Err(Errno::IO),
    }
}
