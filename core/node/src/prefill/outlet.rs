//! How KV leaves the prefill role.

use futures::future::{BoxFuture, FutureExt, join_all};
use millpond_core::time::Duration;
use millpond_core::wire::message::serve::{KvTarget, PrefillDone};

use super::Stopped;
use crate::engine::{Arrival, Batch, Engine, RemoteRegion, Transfer, Via};
use crate::kv::Page;
use crate::rpc::{Reason, Refusal};
use crate::runtime::Runtime;

/// Takes KV away as it becomes complete. Called from a thread that computes: it must not wait.
///
/// Example: `verify/tests/serving.rs` (`Prefill`).
pub trait Outlet: Send + Sync {
    /// The first pages are complete in all layers; they were loaded.
    ///
    /// # Errors
    /// The KV has nowhere to go.
    fn loaded(&mut self, pages: &mut [Page]) -> Result<(), Stopped>;

    /// One layer of the pages from `first` on is complete.
    ///
    /// # Errors
    /// The KV has nowhere to go.
    fn layer(&mut self, layer: u32, first: usize, pages: &mut [Page]) -> Result<(), Stopped>;

    /// Ends once all of it has arrived; pages may be written again then.
    fn finish(self: Box<Self>) -> BoxFuture<'static, Result<PrefillDone, Stopped>>;
}

/// Writes KV into a grant of the decode node, one batch per layer and chunk.
///
/// Example: `verify/tests/serving.rs` (`Prefill`).
pub struct Sender<R> {
    engine: Engine<R>,
    remote: RemoteRegion,
    offsets: Vec<u64>,
    counter: u64,
    layers: u64,
    via: Via,
    progress_deadline: Duration,
    transfers: Vec<Transfer>,
    sent_bytes: u64,
}

impl<R: Runtime> Sender<R> {
    /// Writes to the pages of `target`, which `remote` was attached for.
    pub fn new(engine: Engine<R>, remote: RemoteRegion, target: &KvTarget, layers: u32, via: Via) -> Self {
        Self {
            engine,
            remote,
            offsets: target.page_offsets.clone(),
            counter: target.counter,
            layers: layers.into(),
            via,
            progress_deadline: Duration::from_secs(5),
            transfers: Vec::new(),
            sent_bytes: 0,
        }
    }

    fn post(&mut self, batch: Batch, arrivals: u64) -> Result<(), Stopped> {
        self.sent_bytes += batch.bytes();
        let batch = batch
            .via(self.via)
            .progress_deadline(self.progress_deadline)
            .arrival(Arrival { counter: self.counter, amount: arrivals });
        let transfer = self.engine.submit(batch).map_err(|error| stopped(Reason::Busy, error))?;
        self.transfers.push(transfer);
        Ok(())
    }

    fn offset(&self, page: usize) -> Result<u64, Stopped> {
        let missing = || Stopped(Refusal::new(Reason::Malformed, "the target has fewer pages than the prompt"));
        self.offsets.get(page).copied().ok_or_else(missing)
    }
}

fn stopped(reason: Reason, error: impl std::fmt::Display) -> Stopped {
    Stopped(Refusal::new(reason, format!("KV cannot be sent to the decode node: {error}")))
}

impl<R: Runtime> Outlet for Sender<R> {
    fn loaded(&mut self, pages: &mut [Page]) -> Result<(), Stopped> {
        if pages.is_empty() {
            return Ok(());
        }
        let mut batch = Batch::with_capacity(pages.len());
        for (index, page) in pages.iter_mut().enumerate() {
            let bytes = page.share();
            let target = self.remote.extent(self.offset(index)?, bytes.len() as u64);
            batch.push_write(bytes, target.map_err(|error| stopped(Reason::Malformed, error))?);
        }
        let arrivals = pages.len() as u64 * self.layers;
        self.post(batch, arrivals)
    }

    fn layer(&mut self, layer: u32, first: usize, pages: &mut [Page]) -> Result<(), Stopped> {
        let mut batch = Batch::with_capacity(pages.len());
        for (index, page) in pages.iter_mut().enumerate() {
            let Some(bytes) = page.share_layer(layer) else {
                return Err(stopped(Reason::Failed, "a page is not split into layers; this is a bug"));
            };
            let offset = self.offset(first + index)? + u64::from(layer) * bytes.len() as u64;
            let target = self.remote.extent(offset, bytes.len() as u64);
            batch.push_write(bytes, target.map_err(|error| stopped(Reason::Malformed, error))?);
        }
        self.post(batch, pages.len() as u64)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, Result<PrefillDone, Stopped>> {
        let Self { transfers, sent_bytes, .. } = *self;
        async move {
            let mut via = None;
            for report in join_all(transfers).await {
                let report = report.into_done().map_err(|error| stopped(Reason::Unavailable, error))?;
                via = report.via().or(via);
            }
            let via = via.map_or_else(String::new, |via| via.to_string());
            let times = Some(millpond_core::wire::message::serve::PrefillTimes { sent_bytes, ..Default::default() });
            Ok(PrefillDone { via, times })
        }
        .boxed()
    }
}
