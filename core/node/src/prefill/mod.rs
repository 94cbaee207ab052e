//! The prefill role: a prompt's tokens become pages of KV and a first token.
//!
//! Blocks that the store has are loaded, the rest is computed in chunks, one chunk at a time over a role's requests, so a short
//! prompt waits for a chunk of a long one and not for all of it. KV leaves by an [`Outlet`] layer by layer while later
//! layers are computed; what was loaded leaves before, or, where all the rest is one chunk, once the first token is told,
//! which is not to wait for it. New full blocks go to the store as soon as a chunk completed them and they have left, so a process that
//! dies late loses little. The role works alone (colocated, the decode role calls it in the process and takes the pages over
//! by handle) or behind [`service`].

mod outlet;
pub mod service;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use futures::future::{Either, select};
use futures::stream::StreamExt;
use millpond_core::hash::BlockName;
use millpond_core::time::Duration;
use millpond_core::wire::message::serve::{PrefillTimes, Sampling};

use crate::engine::RegionBytes;
use crate::kv::{Blocks, Page, Pool, Tenants};
use crate::metrics::{Counter, Gauge, Holding, Latency, Registry};
use crate::model::sample::sample;
use crate::model::{Card, Interrupted, KvPages, Model, ModelError, Piece, next_chunk};
use crate::rpc::{Reason, Refusal};
use crate::runtime::{Runtime, blocking};

pub use outlet::{Outlet, Sender};

/// Blocks that are stored side by side for one request.
const BLOCKS_IN_FLIGHT: usize = 8;
/// How long somebody waits for pages before looking again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How a node prefills.
///
/// ```
/// assert!(millpond_node::prefill::Options::default().waiting_max > 0);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// Requests that may wait for their turn; more are refused as busy.
    pub waiting_max: usize,
    /// Tokens of one chunk; 0 is what the model likes. Rounded up to whole blocks; the last chunk may be half as long again.
    pub chunk_tokens: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { waiting_max: 256, chunk_tokens: 0 }
    }
}

/// The role. Clones are handles of the same one.
///
/// Example: `verify/tests/serving.rs`.
#[derive(Clone)]
pub struct Prefill<R> {
    inner: Arc<Inner<R>>,
}

struct Inner<R> {
    runtime: R,
    model: Arc<dyn Model>,
    pool: Pool,
    blocks: Option<Arc<dyn Blocks>>,
    tenants: Tenants,
    options: Options,
    /// Whose chunk is computed.
    turn: futures::lock::Mutex<()>,
    admitted: AtomicUsize,
    waiting_tokens: AtomicU64,
    metrics: Metrics,
}

struct Metrics {
    computed: Counter,
    cached: Counter,
    stored: Counter,
    running: Gauge,
    compute: Latency,
}

/// What to prefill.
///
/// ```
/// let prompt = millpond_node::prefill::Prompt { tokens: vec![1, 2, 3].into(), ..Default::default() };
/// assert_eq!(prompt.tenant, "");
/// ```
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// At least one token.
    pub tokens: Arc<[u32]>,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Whose blocks may be reused, and whose the new ones are.
    pub tenant: String,
}

/// A prompt that was computed.
///
/// Example: `verify/tests/serving.rs` (`Prefill`).
#[derive(Debug)]
pub struct Computed {
    /// Its pages, in block order.
    pub pages: Vec<Page>,
    /// The token that follows.
    pub next_token: u32,
    /// Tokens whose KV was loaded.
    pub cached_tokens: u32,
    /// Leading pages, loaded, that the outlet was not given: the first token is told before, then [`Outlet::loaded`] gets them.
    pub unsent_pages: usize,
    /// Leading blocks that the store has or is being given; see [`Prefill::keep`] for those after them.
    pub kept_blocks: usize,
    /// Where the time went.
    pub times: PrefillTimes,
}

impl<R: Runtime> Prefill<R> {
    /// The role for `model`, with pages from `pool`, which has the model's layout. Without `blocks` nothing is reused.
    ///
    /// # Panics
    /// The pool has another layout: a bug of the caller.
    pub fn new(
        runtime: R,
        model: Arc<dyn Model>,
        pool: Pool,
        blocks: Option<Arc<dyn Blocks>>,
        tenants: Tenants,
        options: Options,
        registry: &Registry,
    ) -> Self {
        assert_eq!(pool.layout(), &model.card().layout, "the pool has the model's layout");
        let tokens = |source| {
            registry.counter(
                "millpond_prefill_tokens_total",
                "Prompt tokens, by where their KV came from.",
                &[("source", source)],
            )
        };
        let metrics = Metrics {
            computed: tokens("computed"),
            cached: tokens("cached"),
            stored: registry.counter("millpond_prefill_blocks_stored_total", "Blocks given to the store.", &[]),
            running: registry.gauge("millpond_prefill_requests", "Prompts being prefilled or waiting.", &[]),
            compute: registry.latency("millpond_prefill_compute_seconds", "Computing one prompt.", &[]),
        };
        let inner = Inner {
            runtime,
            model,
            pool,
            blocks,
            tenants,
            options,
            turn: futures::lock::Mutex::new(()),
            admitted: AtomicUsize::new(0),
            waiting_tokens: AtomicU64::new(0),
            metrics,
        };
        Self { inner: Arc::new(inner) }
    }

    /// What is known about the model.
    #[must_use]
    pub fn card(&self) -> &Card {
        self.inner.model.card()
    }

    /// Its pages.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    /// Prompts in work or waiting, and their tokens not yet computed.
    #[must_use]
    pub fn load(&self) -> (usize, u64) {
        (self.inner.admitted.load(Ordering::Relaxed), self.inner.waiting_tokens.load(Ordering::Relaxed))
    }

    pub(crate) fn model(&self) -> &Arc<dyn Model> {
        &self.inner.model
    }

    pub(crate) fn runtime(&self) -> &R {
        &self.inner.runtime
    }

    /// Whether a prompt of `tokens` tokens can ever be computed here.
    ///
    /// # Errors
    /// It is empty, or exceeds the context or the pool.
    pub fn check(&self, tokens: &[u32], answer_tokens: u32) -> Result<(), Refusal> {
        let malformed = |error: ModelError| Refusal::new(Reason::Malformed, error.to_string());
        let (card, pool) = (self.card(), self.pool());
        if tokens.is_empty() {
            return Err(Refusal::new(Reason::Malformed, "the prompt has no tokens; send at least one"));
        }
        if let Some(&token) = tokens.iter().find(|token| **token >= card.limits.vocabulary) {
            return Err(malformed(ModelError::Vocabulary { token, vocabulary: card.limits.vocabulary }));
        }
        let total = tokens.len() as u64 + u64::from(answer_tokens);
        if total > u64::from(card.limits.context_tokens) {
            return Err(malformed(ModelError::Context { tokens: total, context_tokens: card.limits.context_tokens }));
        }
        let (needed, total) = (card.layout.pages_for(total), pool.counts().total());
        if needed > u64::from(total) {
            let detail = format!("the request needs {needed} KV pages and the node has {total}; give it more memory");
            return Err(Refusal::new(Reason::TooLarge, detail));
        }
        Ok(())
    }

    /// Computes `prompt` into `pages`, which are as many as it needs. KV leaves by `outlet` as it becomes complete. Dropping
    /// the future stops the computation within a layer; the pages then go back by themselves.
    ///
    /// # Errors
    /// Too many wait, or the outlet failed.
    pub async fn run(
        &self,
        prompt: &Prompt,
        pages: Vec<Page>,
        outlet: Option<Box<dyn Outlet>>,
    ) -> Result<(Computed, Option<Box<dyn Outlet>>), Refusal> {
        let inner = &*self.inner;
        let place = inner.admit(prompt.tokens.len())?;
        let mut times = PrefillTimes::default();
        let names = inner.names(prompt);
        let start = inner.runtime.now();
        let (pages, hits) = self.load_blocks(prompt, &names, pages).await?;
        times.load_ns = inner.runtime.now().since(start).as_nanos();
        let block = self.card().layout.shape().block_tokens as usize;
        place.progressed(hits * block);
        let mut work = Work {
            tokens: Arc::clone(&prompt.tokens),
            done: hits * block,
            pages,
            outlet,
            logits: vec![0.0; self.card().limits.vocabulary as usize],
            stop: Arc::new(AtomicBool::new(false)),
            failure: None,
        };
        let _stop = StopOnDrop(Arc::clone(&work.stop));
        let cached_tokens = u32::try_from(work.done).unwrap_or(u32::MAX);
        let (chunk, mut kept_blocks) = (inner.chunk_tokens(), hits);
        // Copying takes the cores that compute: what is computed in one go comes first, and the first token is told.
        let left = work.tokens.len() - work.done;
        let is_short = next_chunk(left, chunk) == left;
        if !is_short {
            work.send_loaded(hits)?;
        }
        while work.done < work.tokens.len() {
            let asked = inner.runtime.now();
            let turn = inner.turn.lock().await;
            let begun = inner.runtime.now();
            let before = work.done;
            let model = Arc::clone(&inner.model);
            work = blocking(&inner.runtime, move || work.chunk(&*model, chunk)).await.map_err(|error| *error)?;
            drop(turn);
            times.queue_ns += begun.since(asked).as_nanos();
            times.compute_ns += inner.runtime.now().since(begun).as_nanos();
            place.progressed(work.done - before);
            inner.metrics.computed.add((work.done - before) as u64);
            if work.done < work.tokens.len() {
                kept_blocks = self.keep_complete(&names, kept_blocks, work.done / block, &mut work.pages);
            }
        }
        inner.metrics.cached.add(cached_tokens.into());
        inner.metrics.compute.observe(Duration::from_nanos(times.compute_ns));
        let position = u32::try_from(work.tokens.len()).unwrap_or(u32::MAX);
        let next_token = sample(&work.logits, &prompt.sampling, position);
        kept_blocks = self.keep_complete(&names, kept_blocks, work.done / block, &mut work.pages);
        let unsent_pages = if is_short && work.outlet.is_some() { hits } else { 0 };
        Ok((Computed { pages: work.pages, next_token, cached_tokens, unsent_pages, kept_blocks, times }, work.outlet))
    }

    /// Loads the leading blocks that the store has into the first pages; how many, and all pages. At least one token is
    /// left to compute, for its logits.
    async fn load_blocks(
        &self,
        prompt: &Prompt,
        names: &[BlockName],
        mut pages: Vec<Page>,
    ) -> Result<(Vec<Page>, usize), Refusal> {
        let inner = &*self.inner;
        let block = self.card().layout.shape().block_tokens as usize;
        let most = (prompt.tokens.len() - 1) / block;
        let Some(blocks) = inner.blocks.as_ref().filter(|_| most > 0) else { return Ok((pages, 0)) };
        // All are asked for at once: looking first which are there would be another trip.
        let wanted = names.iter().zip(&mut pages[..most]).map_while(|(name, page)| Some((*name, page.lend()?)));
        let loaded = blocks.load(wanted.collect()).await;
        let hits = loaded.iter().take_while(|page| page.is_ok()).count();
        let count = pages.len();
        let (mut whole, mut lent) = (Vec::with_capacity(count), pages.drain(..loaded.len()));
        for (mut page, loaded) in lent.by_ref().zip(loaded) {
            // A page whose memory is still out is given up; which page takes its place is all the same behind the hits.
            if let Ok(buf) = loaded.or_else(|missing| missing.page.ok_or(())) {
                page.give_back(buf);
                whole.push(page);
            }
        }
        drop(lent);
        whole.append(&mut pages);
        let lost = u32::try_from(count - whole.len()).unwrap_or(u32::MAX);
        if lost > 0 {
            whole.append(&mut inner.take(lost).await);
        }
        Ok((whole, hits))
    }

    /// Gives the full blocks of `tokens` from block `first` on to the store, in the background. The pages are held until
    /// that ended. Without a store they come free at once.
    pub fn keep(&self, tenant: &str, tokens: &[u32], first: usize, mut pages: Vec<Page>) {
        let prompt = Prompt { tokens: tokens.into(), tenant: tenant.into(), ..Default::default() };
        let names = self.inner.names(&prompt);
        let puts = self.puts(&names, first, names.len(), &mut pages);
        self.put(puts, pages);
    }

    /// The same for blocks `first..end` of a prompt whose pages are still in use, as far as they can be shared by now;
    /// where the next ones begin.
    fn keep_complete(&self, names: &[BlockName], first: usize, end: usize, pages: &mut [Page]) -> usize {
        let puts = self.puts(names, first, end, pages);
        let next = first + puts.len();
        self.put(puts, Vec::new());
        next
    }

    fn puts(&self, names: &[BlockName], first: usize, end: usize, pages: &mut [Page]) -> Vec<Put> {
        if self.inner.blocks.is_none() {
            return Vec::new();
        }
        let blocks = names.iter().zip(pages).enumerate().take(end).skip(first);
        let puts = blocks.map_while(|(index, (name, page))| {
            let parent = index.checked_sub(1).map(|before| names[before]);
            page.join().then(|| Put { name: *name, parent, bytes: page.share() })
        });
        puts.collect()
    }

    fn put(&self, puts: Vec<Put>, pages: Vec<Page>) {
        let Some(blocks) = self.inner.blocks.clone().filter(|_| !puts.is_empty()) else { return };
        let stored = self.inner.metrics.stored.clone();
        self.inner.runtime.spawn(async move {
            let puts = puts.into_iter().map(|Put { name, parent, bytes }| blocks.keep(name, parent, bytes));
            let mut kept = futures::stream::iter(puts).buffer_unordered(BLOCKS_IN_FLIGHT);
            while let Some(is_kept) = kept.next().await {
                stored.add(u64::from(is_kept));
            }
            drop(pages);
        });
    }

    /// Waits for pages, in the order of asking.
    pub(crate) async fn pages(&self, tokens: usize) -> Vec<Page> {
        let count = self.card().layout.pages_for(tokens as u64);
        self.inner.take(u32::try_from(count).unwrap_or(u32::MAX)).await
    }
}

/// A block on its way to the store.
struct Put {
    name: BlockName,
    parent: Option<BlockName>,
    bytes: RegionBytes,
}

impl<R: Runtime> Inner<R> {
    async fn take(&self, count: u32) -> Vec<Page> {
        let mut taken = self.pool.taken(count);
        loop {
            // Memory of a page that was given up early may come back without a sign.
            let again = Box::pin(self.runtime.sleep(LOOK_AGAIN));
            if let Either::Left((pages, _)) = select(&mut taken, again).await {
                return pages;
            }
        }
    }
}

impl<R> Inner<R> {
    fn chunk_tokens(&self) -> usize {
        let card = self.model.card();
        let wanted = if self.options.chunk_tokens == 0 { card.limits.chunk_tokens } else { self.options.chunk_tokens };
        (wanted.max(1)).next_multiple_of(card.layout.shape().block_tokens) as usize
    }

    fn names(&self, prompt: &Prompt) -> Vec<BlockName> {
        let card = self.model.card();
        let namer = self.tenants.namer(&prompt.tenant, card);
        namer.chain(&prompt.tokens, card.layout.shape().block_tokens as usize).collect()
    }

    fn admit(&self, tokens: usize) -> Result<Place<'_, R>, Refusal> {
        if self.admitted.fetch_add(1, Ordering::Relaxed) >= self.options.waiting_max {
            self.admitted.fetch_sub(1, Ordering::Relaxed);
            let detail = format!("{} prompts are waiting for prefill", self.options.waiting_max);
            let (prompts, span) = self.metrics.compute.totals();
            let mean = Duration::from_nanos(span.as_nanos() / prompts.max(1));
            return Err(Refusal::new(Reason::Busy, detail).retry_after(mean.max(Duration::from_millis(10))));
        }
        self.waiting_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        let _counted = self.metrics.running.hold();
        Ok(Place { inner: self, left: AtomicU64::new(tokens as u64), _counted })
    }
}

/// A prompt's place among those in work, with its tokens that are neither loaded nor computed yet.
struct Place<'a, R> {
    inner: &'a Inner<R>,
    left: AtomicU64,
    _counted: Holding,
}

impl<R> Place<'_, R> {
    fn progressed(&self, tokens: usize) {
        self.left.fetch_sub(tokens as u64, Ordering::Relaxed);
        self.inner.waiting_tokens.fetch_sub(tokens as u64, Ordering::Relaxed);
    }
}

impl<R> Drop for Place<'_, R> {
    fn drop(&mut self) {
        // What a cancelled prompt leaves undone waits no more.
        self.inner.waiting_tokens.fetch_sub(*self.left.get_mut(), Ordering::Relaxed);
        self.inner.admitted.fetch_sub(1, Ordering::Relaxed);
    }
}

struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Why KV could not leave.
///
/// ```
/// use millpond_node::prefill::Stopped;
/// use millpond_node::rpc::{Reason, Refusal};
/// let stopped = Stopped(Refusal::new(Reason::Failed, "the target is gone"));
/// assert!(stopped.refusal().detail.contains("gone"));
/// ```
#[derive(Clone, Debug)]
pub struct Stopped(pub Refusal);

impl Stopped {
    /// The reason, for the caller of the role.
    #[must_use]
    pub fn refusal(self) -> Refusal {
        self.0
    }
}

/// A prompt in work; moves to a blocking thread and back for each chunk.
struct Work {
    tokens: Arc<[u32]>,
    done: usize,
    pages: Vec<Page>,
    outlet: Option<Box<dyn Outlet>>,
    logits: Vec<f32>,
    stop: Arc<AtomicBool>,
    failure: Option<Refusal>,
}

impl Work {
    /// Lets the pages that were loaded leave.
    fn send_loaded(&mut self, hits: usize) -> Result<(), Refusal> {
        let Self { outlet, pages, .. } = self;
        outlet.as_mut().map_or(Ok(()), |outlet| outlet.loaded(&mut pages[..hits])).map_err(Stopped::refusal)
    }

    /// Computes the next chunk; chunks of `len` tokens run well.
    fn chunk(mut self, model: &dyn Model, len: usize) -> Result<Self, Box<Refusal>> {
        let block = model.card().layout.shape().block_tokens as usize;
        let tokens = Arc::clone(&self.tokens);
        let end = self.done + next_chunk(tokens.len() - self.done, len);
        let first = self.done / block;
        let last = (end - 1) / block;
        if self.outlet.is_some() {
            self.pages[first..=last].iter_mut().for_each(Page::split);
        }
        let start = u32::try_from(self.done).expect("checked against the context");
        let mut logits = std::mem::take(&mut self.logits);
        let is_last = end == tokens.len();
        let mut kv = Chunk { work: &mut self, first, last };
        let piece =
            Piece { tokens: &tokens[start as usize..end], start, kv: &mut kv, logits: is_last.then_some(&mut logits) };
        let result = model.forward(&mut [piece]);
        self.logits = logits;
        self.done = end;
        match (result, self.failure.take()) {
            (Ok(()), _) => Ok(self),
            (Err(_), Some(refusal)) => Err(Box::new(refusal)),
            (Err(ModelError::Interrupted(_)), None) => {
                Err(Box::new(Refusal::new(Reason::Cancelled, "the prompt was cancelled")))
            }
            (Err(error), None) => Err(Box::new(Refusal::new(Reason::Failed, error.to_string()))),
        }
    }
}

/// The pages of a prompt during one chunk.
struct Chunk<'a> {
    work: &'a mut Work,
    first: usize,
    last: usize,
}

impl KvPages for Chunk<'_> {
    fn page_count(&self) -> u32 {
        self.work.pages.page_count()
    }

    fn page(&self, page: u32, layer: u32) -> &[u8] {
        self.work.pages.page(page, layer)
    }

    fn page_mut(&mut self, page: u32, layer: u32) -> &mut [u8] {
        self.work.pages.page_mut(page, layer)
    }

    fn open_layer(&mut self, _: u32) -> Result<(), Interrupted> {
        if self.work.stop.load(Ordering::Relaxed) { Err(Interrupted) } else { Ok(()) }
    }

    fn close_layer(&mut self, layer: u32) -> Result<(), Interrupted> {
        let Work { outlet, pages, failure, .. } = &mut *self.work;
        let Some(outlet) = outlet else { return Ok(()) };
        outlet.layer(layer, self.first, &mut pages[self.first..=self.last]).map_err(|stopped| {
            *failure = Some(stopped.refusal());
            Interrupted
        })
    }
}
