//! The store, as prefill and decode see it: named blocks of KV, each one page long.

use std::collections::HashMap;

use futures::future::{BoxFuture, FutureExt, ready};
use millpond_core::hash::BlockName;
use parking_lot::Mutex;

use crate::engine::{RegionBuf, RegionBytes};

/// Where full blocks are kept and found again. A cache: what it lost is computed once more.
pub trait Blocks: Send + Sync + 'static {
    /// How many of `names`, counted from the first, are there.
    fn leading(&self, names: Vec<BlockName>) -> BoxFuture<'static, usize>;

    /// Fills `page` with a block; the page comes back, filled in `Ok`.
    fn load(&self, name: BlockName, page: RegionBuf) -> BoxFuture<'static, Result<RegionBuf, Missing>>;

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

/// Blocks in the memory of this process, for runs without a store: at most so many, the oldest go first.
///
/// ```
/// use millpond_core::hash::BlockName;
/// use millpond_node::kv::{Blocks, LocalBlocks};
/// let blocks = LocalBlocks::new(16);
/// assert_eq!(futures::executor::block_on(blocks.leading(vec![BlockName([1; 16])])), 0);
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
    fn leading(&self, names: Vec<BlockName>) -> BoxFuture<'static, usize> {
        let state = self.state.lock();
        ready(names.iter().take_while(|name| state.blocks.contains_key(name)).count()).boxed()
    }

    fn load(&self, name: BlockName, mut page: RegionBuf) -> BoxFuture<'static, Result<RegionBuf, Missing>> {
        let state = self.state.lock();
        let result = match state.blocks.get(&name).filter(|block| block.len() == page.len()) {
            Some(block) => {
                page.copy_from_slice(block);
                Ok(page)
            }
            None => Err(Missing { page: Some(page) }),
        };
        ready(result).boxed()
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
