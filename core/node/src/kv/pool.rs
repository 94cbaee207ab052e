//! Pages of KV in registered memory: who has which, and who waits for some.
//!
//! A page belongs to one request from [`Pool::take`] until it is dropped. Its memory may be lent out meanwhile (to a grant,
//! to a batch, to the store); a page whose memory is still out when it is dropped is quarantined and used again once the
//! memory came back. Invariant: nobody gets a page whose bytes somebody else may still read or write, since the region
//! leases each range once.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use millpond_core::layout::Layout;
use millpond_core::page::{self, Counts, Exhausted};
use millpond_core::slab::Handle;
use millpond_hal::fabric::AllocateError;
use millpond_hal::mapping::Backing;
use parking_lot::Mutex;
use thiserror::Error;

use crate::engine::{Engine, LeaseError, Region, RegionBuf, RegionBytes};
use crate::model::{Interrupted, KvPages};
use crate::runtime::Runtime;

/// Pages start at multiples of this: no two share a cache line, and direct I/O to them is possible.
const ALIGNMENT: u64 = 4096;

/// The pages of one node. Clones are handles of the same one.
///
/// Example: `verify/tests/serving.rs`.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

struct Inner {
    region: Region,
    layout: Layout,
    state: Mutex<State>,
}

struct State {
    table: page::Pages<Box<[page::Page]>>,
    /// Given up, but their memory was still out when last looked at.
    quarantined: Vec<Handle>,
    /// Who waits, first come first served.
    line: VecDeque<u64>,
    wakers: BTreeMap<u64, Waker>,
    next_ticket: u64,
    freed: Vec<Waker>,
    freed_count: u64,
}

/// Why there is no pool.
///
/// Example: `verify/tests/serving.rs` (`Pool`).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The memory does not hold a single page.
    #[error("{len} bytes hold no page of {page_len} bytes; give KV more memory")]
    TooSmall {
        /// Bytes given.
        len: u64,
        /// Bytes of one page.
        page_len: u64,
    },
    /// The memory is not to be had.
    #[error(transparent)]
    Map(#[from] AllocateError),
}

impl Pool {
    /// As many pages of `layout` as fit `len` bytes, in memory of `engine`.
    ///
    /// # Errors
    /// No memory, or too little for one page.
    pub fn new<R: Runtime>(engine: &Engine<R>, layout: Layout, len: u64) -> Result<Self, PoolError> {
        let stride = stride(&layout);
        let count = u32::try_from(len / stride).unwrap_or(u32::MAX);
        let Some(_) = count.checked_sub(1) else {
            return Err(PoolError::TooSmall { len, page_len: layout.page_len() });
        };
        let region = engine.allocate(u64::from(count) * stride, Backing::Memfd)?;
        let pages = (0..count).map(|_| page::Page::EMPTY).collect();
        let state = State {
            table: page::Pages::new(pages),
            quarantined: Vec::new(),
            line: VecDeque::new(),
            wakers: BTreeMap::new(),
            next_ticket: 0,
            freed: Vec::new(),
            freed_count: 0,
        };
        Ok(Self { inner: Arc::new(Inner { region, layout, state: Mutex::new(state) }) })
    }

    /// The geometry of its pages.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.inner.layout
    }

    /// How many pages are in which state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut state = self.inner.state.lock();
        self.inner.look_again(&mut state);
        state.table.counts()
    }

    /// Takes `count` pages now, ahead of those who wait; all or none.
    ///
    /// # Errors
    /// Too few are free.
    pub fn take(&self, count: u32) -> Result<Vec<Page>, Exhausted> {
        let mut pages = Vec::with_capacity(count as usize);
        let mut state = self.inner.state.lock();
        self.inner.look_again(&mut state);
        let mut out = Vec::new();
        while pages.len() < count as usize {
            let Ok(handle) = state.table.allocate() else { break };
            match self.inner.carve(handle) {
                Ok(buf) => pages.push(Page { inner: Arc::clone(&self.inner), handle, memory: Memory::Own(buf) }),
                Err(_) => out.push(handle),
            }
        }
        for handle in out {
            let _ = state.table.quarantine(handle);
            state.quarantined.push(handle);
        }
        let free = state.table.counts().free;
        drop(state);
        if pages.len() < count as usize {
            let free = free + u32::try_from(pages.len()).unwrap_or(0);
            return Err(Exhausted { free });
        }
        Ok(pages)
    }

    /// Takes `count` pages as soon as they are there, in the order of asking.
    pub fn taken(&self, count: u32) -> Taken {
        let mut state = self.inner.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.line.push_back(ticket);
        Taken { pool: self.clone(), ticket, count }
    }

    /// How many wait in [`Pool::taken`].
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inner.state.lock().line.len()
    }

    /// Completes when the next page is given up.
    pub fn freed(&self) -> impl Future<Output = ()> + Send + use<> {
        let inner = Arc::clone(&self.inner);
        let before = inner.state.lock().freed_count;
        std::future::poll_fn(move |context| {
            let mut state = inner.state.lock();
            if state.freed_count != before {
                return Poll::Ready(());
            }
            state.freed.push(context.waker().clone());
            Poll::Pending
        })
    }
}

fn stride(layout: &Layout) -> u64 {
    layout.page_len().next_multiple_of(ALIGNMENT)
}

impl Inner {
    fn carve(&self, handle: Handle) -> Result<RegionBuf, LeaseError> {
        self.region.carve(u64::from(handle.slot) * stride(&self.layout), self.layout.page_len())
    }

    /// Frees pages whose memory has come back meanwhile.
    fn look_again(&self, state: &mut State) {
        let State { table, quarantined, .. } = state;
        quarantined.retain(|handle| {
            let is_back = self.carve(*handle).is_ok();
            if is_back {
                // It is in quarantine, and its handle is nobody else's.
                let _ = table.quiet(*handle);
            }
            !is_back
        });
    }
}

impl State {
    fn wake(&mut self) {
        self.freed_count += 1;
        self.freed.drain(..).for_each(Waker::wake);
        if let Some(waker) = self.line.front().and_then(|first| self.wakers.get(first)) {
            waker.wake_by_ref();
        }
    }
}

/// Waits for pages; made by [`Pool::taken`]. Dropping it leaves the line.
///
/// Example: `verify/tests/serving.rs` (`Pool`).
#[must_use = "futures do nothing unless awaited"]
pub struct Taken {
    pool: Pool,
    ticket: u64,
    count: u32,
}

impl Future for Taken {
    type Output = Vec<Page>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Vec<Page>> {
        let mut state = self.pool.inner.state.lock();
        state.wakers.insert(self.ticket, context.waker().clone());
        let is_first = state.line.front() == Some(&self.ticket);
        drop(state);
        match is_first.then(|| self.pool.take(self.count)) {
            Some(Ok(pages)) => Poll::Ready(pages),
            _ => Poll::Pending,
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut state = self.pool.inner.state.lock();
        state.line.retain(|ticket| *ticket != self.ticket);
        state.wakers.remove(&self.ticket);
        if let Some(waker) = state.line.front().and_then(|first| state.wakers.get(first)) {
            waker.wake_by_ref();
        }
    }
}

/// One page of a request, in one of these forms: its own (writable), shared (read-only, whole), layer by layer, or away.
///
/// Example: `verify/tests/serving.rs` (`Pool`).
pub struct Page {
    inner: Arc<Inner>,
    handle: Handle,
    memory: Memory,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({})", self.handle)
    }
}

enum Memory {
    Own(RegionBuf),
    Shared(RegionBytes),
    Layers(Vec<LayerMemory>),
    Away,
}

enum LayerMemory {
    Own(RegionBuf),
    Shared(RegionBytes),
}

impl Page {
    /// Where it lies in the region of its pool, in bytes.
    #[must_use]
    pub fn offset(&self) -> u64 {
        u64::from(self.handle.slot) * stride(&self.inner.layout)
    }

    /// Takes its memory away, to be lent to somebody who writes it; `None` if it is shared or away.
    pub fn lend(&mut self) -> Option<RegionBuf> {
        match std::mem::replace(&mut self.memory, Memory::Away) {
            Memory::Own(buf) => Some(buf),
            other => {
                self.memory = other;
                None
            }
        }
    }

    /// Gives its memory back.
    ///
    /// # Panics
    /// The memory is another page's, or this one has its own: a bug of the caller.
    pub fn give_back(&mut self, buf: RegionBuf) {
        assert!(matches!(self.memory, Memory::Away) && buf.offset() == self.offset(), "the memory is this page's");
        self.memory = Memory::Own(buf);
    }

    /// Shares all of it read-only from now on.
    ///
    /// # Panics
    /// It is away or in layers: a bug of the caller.
    pub fn share(&mut self) -> RegionBytes {
        let bytes = match std::mem::replace(&mut self.memory, Memory::Away) {
            Memory::Own(buf) => buf.freeze(),
            Memory::Shared(bytes) => bytes,
            Memory::Layers(_) | Memory::Away => panic!("only a whole page that is here can be shared"),
        };
        self.memory = Memory::Shared(bytes.clone());
        bytes
    }

    /// Cuts a page of its own into layers, so that each can be shared as soon as it is complete.
    pub fn split(&mut self) {
        if let Memory::Own(mut rest) = std::mem::replace(&mut self.memory, Memory::Away) {
            let mut layers = Vec::new();
            for _ in 1..self.inner.layout.shape().layer_count {
                let Ok(next) = rest.split_off(self.inner.layout.layer_len()) else { break };
                layers.push(LayerMemory::Own(rest));
                rest = next;
            }
            layers.push(LayerMemory::Own(rest));
            self.memory = Memory::Layers(layers);
        }
    }

    /// Shares one layer of a split page read-only from now on; `None` if the page is not split.
    pub fn share_layer(&mut self, layer: u32) -> Option<RegionBytes> {
        let Memory::Layers(layers) = &mut self.memory else { return None };
        let index = layer as usize;
        let bytes = match layers.remove(index) {
            LayerMemory::Own(buf) => buf.freeze(),
            LayerMemory::Shared(bytes) => bytes,
        };
        layers.insert(index, LayerMemory::Shared(bytes.clone()));
        Some(bytes)
    }

    /// Makes a split page whole again; `false` if somebody still holds a layer, or all of it is away: try again later.
    pub fn join(&mut self) -> bool {
        let Memory::Layers(layers) = &mut self.memory else { return !matches!(self.memory, Memory::Away) };
        let own = std::mem::take(layers).into_iter().map(|layer| match layer {
            LayerMemory::Own(buf) => LayerMemory::Own(buf),
            LayerMemory::Shared(bytes) => bytes.try_unwrap().map_or_else(LayerMemory::Shared, LayerMemory::Own),
        });
        *layers = own.collect();
        if layers.iter().any(|layer| matches!(layer, LayerMemory::Shared(_))) {
            return false;
        }
        let own = std::mem::take(layers).into_iter().filter_map(|layer| match layer {
            LayerMemory::Own(buf) => Some(buf),
            LayerMemory::Shared(_) => None,
        });
        // They are what `split` cut one buffer into, in order.
        let whole = own.reduce(|whole, next| whole.unsplit(next).expect("layers of a page are adjacent"));
        self.memory = whole.map_or(Memory::Away, Memory::Own);
        !matches!(self.memory, Memory::Away)
    }

    fn layer(&self, layer: u32) -> &[u8] {
        match &self.memory {
            Memory::Own(buf) => &buf[self.range(layer)],
            Memory::Shared(bytes) => &bytes[self.range(layer)],
            Memory::Layers(layers) => match &layers[layer as usize] {
                LayerMemory::Own(buf) => buf,
                LayerMemory::Shared(bytes) => bytes,
            },
            Memory::Away => &[],
        }
    }

    fn layer_mut(&mut self, layer: u32) -> &mut [u8] {
        let range = self.range(layer);
        match &mut self.memory {
            Memory::Own(buf) => &mut buf[range],
            Memory::Layers(layers) => match &mut layers[layer as usize] {
                LayerMemory::Own(buf) => buf,
                LayerMemory::Shared(_) => &mut [],
            },
            Memory::Shared(_) | Memory::Away => &mut [],
        }
    }

    fn range(&self, layer: u32) -> std::ops::Range<usize> {
        let range = self.inner.layout.layer_range(layer);
        let place = |offset| usize::try_from(offset).expect("pages fit the address space");
        place(range.start)..place(range.end)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.memory = Memory::Away;
        let mut state = self.inner.state.lock();
        // The handle is this page's alone.
        let _ = state.table.free(self.handle);
        state.wake();
    }
}

/// The pages of one request, in the order of its blocks.
impl KvPages for Vec<Page> {
    fn page_count(&self) -> u32 {
        u32::try_from(self.len()).unwrap_or(u32::MAX)
    }

    fn page(&self, page: u32, layer: u32) -> &[u8] {
        self[page as usize].layer(layer)
    }

    fn page_mut(&mut self, page: u32, layer: u32) -> &mut [u8] {
        self[page as usize].layer_mut(layer)
    }

    fn close_layer(&mut self, _: u32) -> Result<(), Interrupted> {
        Ok(())
    }
}
