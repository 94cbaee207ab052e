//! A store node: one segment, its link to the directory, its counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millpond_core::directory::{NodeId, Owner, SegmentFacts};
use millpond_core::evict::Kind;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::store::Facts;
use parking_lot::Mutex;

use super::segment::{ReserveError, Reserved, Segment, SegmentError, Shape, SlotId};
use crate::directory::Link;
use crate::directory::Signal;
use crate::engine::{AllocateError, Backing, Engine};
use crate::runtime::{Runtime, boot_time};

/// What a store node lends and how it behaves when that runs out.
///
/// ```
/// use millpond_node::store::StoreConfig;
/// let config = StoreConfig { capacity: 64 << 20, ..StoreConfig::default() };
/// assert!(config.high_permille > config.low_permille);
/// ```
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Payload bytes of memory.
    pub capacity: u64,
    /// Objects at once; 0 chooses one per 4 KiB of memory, within bounds.
    pub slots_max: u32,
    /// What goes first. The default is the best classic policy that was never far below another on our traces.
    pub policy: Kind,
    /// Eviction starts above this fill, ahead of demand.
    pub high_permille: u32,
    /// And ends below this one.
    pub low_permille: u32,
    /// How often the directory hears from this node.
    pub heartbeat: Duration,
    /// How long a call to the directory may take.
    pub directory_span: Duration,
    /// How long nothing of a transfer may move before it is given up.
    pub progress_deadline: Duration,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            capacity: 1 << 30,
            slots_max: 0,
            policy: Kind::Lru,
            high_permille: 950,
            low_permille: 900,
            heartbeat: Duration::from_millis(200),
            directory_span: Duration::from_secs(2),
            progress_deadline: Duration::from_secs(5),
        }
    }
}

/// Bytes that get their pages at a time.
const POPULATED_LEN: usize = 8 << 20;
const SLOTS_MIN: u64 = 1 << 10;
const SLOTS_MAX: u64 = 1 << 19;

impl StoreConfig {
    fn shape(&self, epoch: u64) -> Shape {
        let chosen = (self.capacity / 4096).clamp(SLOTS_MIN, SLOTS_MAX);
        let slots_max = if self.slots_max == 0 { u32::try_from(chosen).unwrap_or(u32::MAX) } else { self.slots_max };
        Shape { facts: SegmentFacts::dram(0, epoch, self.capacity), slots_max, policy: self.policy }
    }
}

/// A store node could not be started.
///
/// Example: `verify/tests/store.rs` (`StoreNode`).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The memory is not to be had.
    #[error("{capacity} bytes of memory for the store are not to be had: {source}; lend less")]
    Memory {
        /// What was asked for.
        capacity: u64,
        /// Why not.
        source: AllocateError,
    },
    /// The segment cannot be made.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

/// Since the start.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) evicted: AtomicU64,
    pub(super) spared_leased: AtomicU64,
    pub(super) spared_pinned: AtomicU64,
    pub(super) refused_full: AtomicU64,
    pub(super) damaged: AtomicU64,
}

impl Tally {
    pub(super) fn add(counter: &AtomicU64, amount: usize) {
        counter.fetch_add(amount as u64, Ordering::Relaxed);
    }
}

/// A store node. Clones are handles of the same one.
///
/// `verify/tests/store.rs` runs one with its directory and a client in one process, and several in processes of their own.
///
/// Example: `verify/tests/store.rs`.
#[derive(Debug)]
pub struct StoreNode<R> {
    pub(super) inner: Arc<Inner<R>>,
}

impl<R> Clone for StoreNode<R> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

#[derive(Debug)]
pub(super) struct Inner<R> {
    pub(super) engine: Engine<R>,
    pub(super) owner: Owner,
    pub(super) config: StoreConfig,
    pub(super) link: Link<R>,
    pub(super) segment: Mutex<Segment>,
    /// Puts that found the segment above its high watermark.
    pub(super) pressure: Signal,
    pub(super) tally: Tally,
    /// Whether the directory knows this node.
    pub(super) is_joined: AtomicBool,
    /// Sealed values whose commit got no answer: they are committed again, or freed.
    pub(super) uncertain: Mutex<Vec<super::put::Uncertain>>,
}

impl<R: Runtime> StoreNode<R> {
    /// Lends memory of `engine`'s node; `link` leads to the directory. Serve [`StoreNode::router`] and run
    /// [`StoreNode::run`].
    pub fn start(engine: Engine<R>, link: Link<R>, config: StoreConfig) -> Result<Self, StoreError> {
        let identity = engine.options().identity;
        let owner = Owner { node: NodeId(identity.node), incarnation: identity.incarnation };
        let shape = config.shape(owner.incarnation);
        let region = engine
            .allocate(shape.region_len(), Backing::Memfd)
            .map_err(|source| StoreError::Memory { capacity: config.capacity, source })?;
        let segment = Segment::new(owner.node, region, shape)?;
        Ok(Self {
            inner: Arc::new(Inner {
                engine,
                owner,
                config,
                link,
                segment: Mutex::new(segment),
                pressure: Signal::default(),
                tally: Tally::default(),
                is_joined: AtomicBool::new(false),
                uncertain: Mutex::default(),
            }),
        })
    }

    /// Has the system find pages for all the memory that is lent, which puts would wait for otherwise; about 0.2 s per GiB.
    /// Blocks, so it belongs on a thread that may; ends early with the last other handle. The node serves meanwhile.
    pub fn populate(self) {
        let (inner, region) = (Arc::downgrade(&self.inner), self.inner.segment.lock().region().clone());
        drop(self);
        for offset in (0..region.len()).step_by(POPULATED_LEN) {
            if inner.strong_count() == 0 {
                return;
            }
            if let Err(error) = region.populate(offset, POPULATED_LEN as u64) {
                tracing::debug!(%error, "the store's memory gets its pages at first use");
                return;
            }
        }
    }

    /// Exact counts of what it holds and did.
    #[must_use]
    pub fn facts(&self) -> Facts {
        self.inner.facts()
    }

    /// Whether the directory knew this node when it was last asked; until then nobody stores here.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.inner.is_joined.load(Ordering::Relaxed)
    }
}

impl<R: Runtime> Inner<R> {
    pub(super) fn facts(&self) -> Facts {
        let (counts, capacity) = {
            let mut segment = self.segment.lock();
            segment.sweep();
            (segment.counts(), segment.facts().capacity)
        };
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Facts {
            capacity,
            free: counts.free,
            writing: counts.writing,
            sealed: counts.sealed,
            leaving: counts.leaving,
            evicted: read(&self.tally.evicted),
            spared_leased: read(&self.tally.spared_leased),
            spared_pinned: read(&self.tally.spared_pinned),
            refused_full: read(&self.tally.refused_full),
            damaged: read(&self.tally.damaged),
        }
    }

    pub(super) fn directory_deadline(&self) -> Instant {
        boot_time() + self.config.directory_span
    }

    /// Sets space aside; the guard gives it back unless it is kept.
    pub(super) fn reserve(self: &Arc<Self>, len: u64) -> Result<(Reservation<R>, Reserved), ReserveError> {
        let reserved = self.segment.lock().reserve(len)?;
        Ok((Reservation { inner: Arc::clone(self), id: reserved.id, is_kept: false }, reserved))
    }
}

/// Space in the segment that goes back when this is dropped: a put that ends early, because its client died or its call
/// was cancelled, leaves nothing behind.
#[derive(Debug)]
pub(super) struct Reservation<R: Runtime> {
    inner: Arc<Inner<R>>,
    pub(super) id: SlotId,
    is_kept: bool,
}

impl<R: Runtime> Reservation<R> {
    /// The slot stays.
    pub(super) fn keep(mut self) -> SlotId {
        self.is_kept = true;
        self.id
    }
}

impl<R: Runtime> Drop for Reservation<R> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.inner.segment.lock().release(boot_time(), self.id);
        }
    }
}
