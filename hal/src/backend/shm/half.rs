//! The two halves of a shared-memory link: each end writes one and looks at the other.
//!
//! A half is a sealed memfd that its owner alone can map writable: counters, a ring of requests and a ring of replies, all
//! of 64-bit words that are only ever read and written atomically. What a peer's half says is untrusted: an entry is copied
//! out once and checked afterwards. Invariants: a ring's head counts entries ever published and moves only forward; an
//! entry is written before the head that publishes it, and not written again before the peer's consumed count passed it.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use crate::mapping::{Backing, MapError, Mapping, REGION_LEN_MAX, SEALS};
use crate::sync::{Seeded, Words, WordsMut, seeded};

/// Entries of each ring; a power of two.
pub(super) const RING_LEN: u64 = 1024;
/// Words of one entry.
pub(crate) const ENTRY_WORDS: usize = 8;
/// One request, reply or socket record.
pub(crate) type Entry = [u64; ENTRY_WORDS];

/// The first word: the layout's version.
const LAYOUT: u64 = 0x4d50_5348_4d00_0000 | super::LAYOUT_VERSION as u64;
const CACHE_LINE_WORDS: usize = 8;
const RINGS_AT: usize = 16 * CACHE_LINE_WORDS;
const HALF_WORDS: usize = RINGS_AT + 2 * (RING_LEN as usize) * ENTRY_WORDS;

/// A counter of a half; each has a cache line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Counter {
    /// The layout's version.
    Layout = 0,
    /// Requests that the half's owner published.
    RequestHead = 1,
    /// Replies that it published.
    ReplyHead = 2,
    /// Requests of the other end that it consumed.
    RequestsConsumed = 3,
    /// Replies of the other end that it consumed.
    RepliesConsumed = 4,
    /// Odd while it sleeps until its socket wakes it; grows with each sleep.
    Sleep = 5,
    /// 1 once it closed the link: what is copied out of its memory from then on must not be used.
    Closed = 6,
    /// Bytes that it copied for the other end's requests, ever.
    BytesApplied = 7,
    /// The ticket that it wants cut short.
    Cut = 8,
}

/// Which ring of a half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ring {
    /// What the half's owner asks for.
    Requests,
    /// What it answers.
    Replies,
}

impl Ring {
    const fn head(self) -> Counter {
        match self {
            Self::Requests => Counter::RequestHead,
            Self::Replies => Counter::ReplyHead,
        }
    }

    /// The counter in the other end's half that says how far it consumed this ring.
    const fn consumed(self) -> Counter {
        match self {
            Self::Requests => Counter::RequestsConsumed,
            Self::Replies => Counter::RepliesConsumed,
        }
    }

    fn word_of(self, index: u64) -> usize {
        let ring = if self == Self::Requests { 0 } else { RING_LEN as usize };
        RINGS_AT + (ring + slot(index)) * ENTRY_WORDS
    }
}

#[allow(clippy::cast_possible_truncation)] // below RING_LEN
fn slot(index: u64) -> usize {
    (index % RING_LEN) as usize
}

/// Our half: we write it, the peer looks at it.
#[derive(Debug)]
pub(crate) struct OwnHalf<W = OwnWords> {
    words: W,
    published: [u64; 2],
    /// What the peer had consumed of each ring when we looked last.
    consumed: [Cell<u64>; 2],
}

impl OwnHalf {
    /// A half with empty rings.
    pub(super) fn new() -> Result<Self, MapError> {
        Ok(Self::over(OwnWords(Mapping::new((HALF_WORDS * 8) as u64, Backing::Memfd)?)))
    }

    /// The descriptor that the peer maps.
    pub(super) fn shared(&self) -> Option<&Arc<OwnedFd>> {
        self.words.0.shared()
    }
}

impl<W: WordsMut> OwnHalf<W> {
    /// A half with empty rings in words that are all 0.
    pub(crate) fn over(words: W) -> Self {
        let half = Self { words, published: [0; 2], consumed: [const { Cell::new(0) }; 2] };
        half.set(Counter::Layout, LAYOUT);
        half
    }

    /// Sets a counter; what was written before is visible to whoever reads it.
    pub(crate) fn set(&self, counter: Counter, value: u64) {
        self.words.store(counter as usize * CACHE_LINE_WORDS, value, Ordering::Release);
    }

    /// Our own counter.
    pub(super) fn value(&self, counter: Counter) -> u64 {
        self.words.load(counter as usize * CACHE_LINE_WORDS, Ordering::Relaxed)
    }

    /// How many entries of `ring` can be published now, or fewer. An impossible count of the peer's reads as none.
    pub(super) fn room<P: Words>(&self, ring: Ring, peer: &PeerHalf<P>) -> u64 {
        let (published, seen) = (self.published[ring as usize], &self.consumed[ring as usize]);
        let room = |consumed: u64| RING_LEN.saturating_sub(published.wrapping_sub(consumed));
        // While half of the ring is known to be free, the peer's count stays in its own cache.
        if room(seen.get()) < RING_LEN / 2 {
            seen.set(peer.value(ring.consumed()));
        }
        room(seen.get())
    }

    /// Publishes an entry; the caller saw room for it.
    pub(crate) fn publish(&mut self, ring: Ring, entry: &Entry) {
        let head = self.published[ring as usize];
        let at = ring.word_of(head);
        for (word, value) in entry.iter().enumerate() {
            self.words.store(at + word, *value, Ordering::Relaxed);
        }
        self.published[ring as usize] = head + 1;
        if seeded(Seeded::RingPublishesRelaxed) {
            self.words.store(ring.head() as usize * CACHE_LINE_WORDS, head + 1, Ordering::Relaxed);
        } else {
            self.set(ring.head(), head + 1);
        }
    }
}

/// The words of our half, in memory that the peer can map and only we can write.
#[derive(Debug)]
pub(crate) struct OwnWords(Mapping);

impl OwnWords {
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < HALF_WORDS, "a half has {HALF_WORDS} words");
        // SAFETY:
        // - in bounds by the line above: the mapping is `8 * HALF_WORDS` long; aligned: a mapping starts on a page.
        // - lives as long as the borrow: the mapping is owned by `self`; every access, ours and the peer's, is atomic.
        unsafe { AtomicU64::from_ptr(self.0.base().cast::<u64>().as_ptr().add(at)) }
    }
}

impl Words for OwnWords {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).load(order)
    }
}

impl WordsMut for OwnWords {
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }
}

/// The peer's half: we only look at it.
#[derive(Debug)]
pub(crate) struct PeerHalf<W = PeerMap> {
    words: W,
}

impl PeerHalf {
    /// Maps what the peer sent.
    pub(super) fn new(fd: &OwnedFd) -> Result<Self, PeerMapError> {
        Self::over(PeerMap::new(fd, (HALF_WORDS * 8) as u64)?)
    }
}

impl<W: Words> PeerHalf<W> {
    /// The half in these words, if its layout is ours.
    pub(crate) fn over(words: W) -> Result<Self, PeerMapError> {
        let half = Self { words };
        if half.value(Counter::Layout) == LAYOUT { Ok(half) } else { Err(PeerMapError::Layout) }
    }

    /// A counter of the peer's.
    pub(crate) fn value(&self, counter: Counter) -> u64 {
        self.words.load(counter as usize * CACHE_LINE_WORDS, Ordering::Acquire)
    }

    /// How many entries wait beyond the `consumed` first ones; `None` if the peer's head is impossible.
    pub(crate) fn waiting(&self, ring: Ring, consumed: u64) -> Option<u64> {
        let waiting = self.value(ring.head()).wrapping_sub(consumed);
        (waiting <= RING_LEN).then_some(waiting)
    }

    /// The entry number `index`, copied out. The caller saw that it is waiting.
    pub(crate) fn entry(&self, ring: Ring, index: u64) -> Entry {
        let at = ring.word_of(index);
        core::array::from_fn(|word| self.words.load(at + word, Ordering::Acquire))
    }
}

/// What a peer sent cannot be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerMapError {
    /// It is not a sealed memory file of the length it claims.
    NotSealed,
    /// Its layout is of another version.
    Layout,
    /// The operating system refused.
    System(i32),
}

/// Memory of a peer on this host, mapped read-only. Sealed, so that it cannot shrink under us.
#[derive(Debug)]
pub(crate) struct PeerMap {
    base: NonNull<u8>,
    mapped_len: usize,
    len: u64,
}

// SAFETY:
// - `base` blocks Send. The mapping is this value's own until drop and is only read, by atomics and by `copy`, both of which
//   allow other processes to write meanwhile. Test: `shm::tests` moves devices between threads.
unsafe impl Send for PeerMap {}

impl PeerMap {
    /// Maps the first `len` bytes of `fd`, after checking that it is long enough and can never shrink.
    pub(super) fn new(fd: &OwnedFd, len: u64) -> Result<Self, PeerMapError> {
        let system = |error: rustix::io::Errno| PeerMapError::System(error.raw_os_error());
        let seals = rustix::fs::fcntl_get_seals(fd.as_fd()).map_err(|_| PeerMapError::NotSealed)?;
        let file_len = u64::try_from(rustix::fs::fstat(fd).map_err(system)?.st_size).unwrap_or(0);
        if !seals.contains(SEALS) || len == 0 || len > file_len || file_len > REGION_LEN_MAX {
            return Err(PeerMapError::NotSealed);
        }
        let mapped_len = usize::try_from(file_len).map_err(|_| PeerMapError::NotSealed)?;
        // SAFETY:
        // - a null hint lets the kernel choose a range that nobody uses.
        // - `fd` has `mapped_len` bytes (fstat above) and cannot shrink (seals above).
        let base =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), mapped_len, ProtFlags::READ, MapFlags::SHARED, fd, 0) }
                .map_err(system)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(PeerMapError::System(12))?;
        Ok(Self { base, mapped_len, len })
    }

    /// The 64-bit word number `index`; 0 beyond the end.
    pub(super) fn word(&self, index: usize) -> u64 {
        self.load(index, Ordering::Acquire)
    }

    /// The first of `len` bytes at `offset`, if they are all in the memory.
    pub(super) fn pointer(&self, offset: u64, len: u64) -> Option<*const u8> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        // SAFETY: `offset` is within the mapping: `end <= len <= mapped_len`.
        Some(unsafe { self.base.as_ptr().add(usize::try_from(offset).ok()?) })
    }
}

impl Words for PeerMap {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        if (at as u64) >= self.len / 8 {
            return 0;
        }
        // SAFETY:
        // - in bounds by the lines above; aligned: a mapping starts on a page.
        // - mapped until drop; the owner writes it with atomics, and an atomic load needs no write access.
        unsafe { AtomicU64::from_ptr(self.base.cast::<u64>().as_ptr().add(at)) }.load(order)
    }
}

impl Drop for PeerMap {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; pointers into it do not outlive the turn that asked for them.
        unsafe {
            // An error here would leave the memory mapped: a leak, not a hazard.
            let _ = rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_len);
        }
    }
}
