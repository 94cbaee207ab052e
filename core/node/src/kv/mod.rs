//! KV memory of the serving roles: pages of a region, names of blocks, and the store as those roles see it.

mod blocks;
mod pool;
mod tenants;

pub use blocks::{Blocks, LocalBlocks, Missing, StoreBlocks};
pub use pool::{Page, Pool, PoolError, Taken};
pub use tenants::Tenants;
