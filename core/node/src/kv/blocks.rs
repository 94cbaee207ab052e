//! The store, as prefill and decode see it: named blocks of KV, each one page long.

use std::collections::HashMap;

use futures::future::{BoxFuture, FutureExt, ready};
use millpond_core::hash::BlockName;
use parking_lot::Mutex;

use crate::client::{ClientError, Got, Put, PutOptions, StoreClient, Target};
use crate::engine::{RegionBuf, RegionBytes};
use crate::runtime::Runtime;

/// Where full blocks are kept and found again. A cache: what it lost is computed once more.
///
/// Example: `verify/tests/serving.rs`.
pub trait Blocks: Send + Sync + 'static {
    /// Fills each page with its block, if it is there; the pages come back in order, filled in `Ok`.
    fn load(&self, wanted: Vec<(BlockName, RegionBuf)>) -> BoxFuture<'static, Vec<Result<RegionBuf, Missing>>>;

    /// Keeps a block that follows `parent`; whether it is kept now.
    fn keep(&self, name: BlockName, parent: Option<BlockName>, page: RegionBytes) -> BoxFuture<'static, bool>;
}

/// A block that could not be loaded, and the page that was to take it, unless it was lost with the attempt.
///
/// ```
/// assert!(millpond_node::kv::Missing { page: None }.page.is_none());
/// ```
#[derive(Debug)]
pub struct Missing {
    /// The page; its bytes are undefined.
    pub page: Option<RegionBuf>,
}

/// Blocks in the store of the cluster, under `kv/` and their names in hexadecimal.
///
/// Example: `verify/tests/serving.rs`.
pub struct StoreBlocks<R> {
    client: StoreClient<R>,
}

impl<R: Runtime> StoreBlocks<R> {
    /// Blocks that `client` reaches.
    pub fn new(client: StoreClient<R>) -> Self {
        Self { client }
    }
}

fn key(name: BlockName) -> Vec<u8> {
    format!("kv/{name}").into_bytes()
}

impl<R: Runtime> Blocks for StoreBlocks<R> {
    fn load(&self, wanted: Vec<(BlockName, RegionBuf)>) -> BoxFuture<'static, Vec<Result<RegionBuf, Missing>>> {
        let client = self.client.clone();
        async move {
            let wanted = wanted.into_iter().map(|(name, page)| (key(name), Target::Into(page))).collect();
            let got = client.get_batch(wanted).await;
            got.into_iter()
                .map(|got| match got {
                    Ok(Got::Hit(value)) => value.into_buffer().ok_or(Missing { page: None }),
                    Ok(Got::Miss { buffer, .. }) => Err(Missing { page: buffer }),
                    Err(ClientError::Owners { buffer, .. }) => Err(Missing { page: buffer }),
                    Err(ClientError::BufferLength { buffer, .. }) => Err(Missing { page: Some(buffer) }),
                    Err(error) => {
                        tracing::warn!(%error, "a block cannot be loaded; it is computed");
                        Err(Missing { page: None })
                    }
                })
                .collect()
        }
        .boxed()
    }

    fn keep(&self, name: BlockName, parent: Option<BlockName>, page: RegionBytes) -> BoxFuture<'static, bool> {
        let client = self.client.clone();
        async move {
            let options = PutOptions { parent: parent.map(key), ..PutOptions::default() };
            match client.put(&key(name), page, &options).await {
                Ok(Put::Stored(_) | Put::AlreadyThere { .. }) => true,
                Ok(Put::Refused { reason, detail, .. }) => {
                    tracing::debug!(%reason, detail, "a block was not stored");
                    false
                }
                Err(error) => {
                    tracing::warn!(%error, "a block was not stored");
                    false
                }
            }
        }
        .boxed()
    }
}

/// Blocks in the memory of this process, for runs without a store: at most so many, the oldest go first.
///
/// ```
/// let blocks = millpond_node::kv::LocalBlocks::new(16);
/// assert!(blocks.is_empty());
/// ```
#[derive(Debug)]
pub struct LocalBlocks {
    state: Mutex<State>,
    count_max: usize,
}

#[derive(Debug, Default)]
struct State {
    blocks: HashMap<BlockName, Box<[u8]>>,
    order: std::collections::VecDeque<BlockName>,
}

impl LocalBlocks {
    /// Room for `count_max` blocks.
    #[must_use]
    pub fn new(count_max: usize) -> Self {
        Self { state: Mutex::default(), count_max: count_max.max(1) }
    }

    /// Blocks that are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state.lock().blocks.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Blocks for LocalBlocks {
    fn load(&self, wanted: Vec<(BlockName, RegionBuf)>) -> BoxFuture<'static, Vec<Result<RegionBuf, Missing>>> {
        let state = self.state.lock();
        let load = |(name, mut page): (BlockName, RegionBuf)| match state.blocks.get(&name) {
            Some(block) if block.len() == page.len() => {
                page.copy_from_slice(block);
                Ok(page)
            }
            _ => Err(Missing { page: Some(page) }),
        };
        ready(wanted.into_iter().map(load).collect()).boxed()
    }

    fn keep(&self, name: BlockName, _: Option<BlockName>, page: RegionBytes) -> BoxFuture<'static, bool> {
        let mut state = self.state.lock();
        if state.blocks.insert(name, Box::from(&page[..])).is_none() {
            state.order.push_back(name);
        }
        while state.blocks.len() > self.count_max {
            if let Some(oldest) = state.order.pop_front() {
                state.blocks.remove(&oldest);
            }
        }
        ready(true).boxed()
    }
}
