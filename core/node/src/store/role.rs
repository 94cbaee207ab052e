//! A store node with its place in the cluster: it hosts the directory, or knows where it is.

use std::sync::Arc;

use super::{StoreConfig, StoreError, StoreNode};
use crate::directory::{Link, Shard, ShardConfig, StartError};
use crate::engine::Engine;
use crate::rpc::{Client, Router};
use crate::runtime::{Runtime, Stop};

/// Where a store node finds the directory.
///
/// Example: `verify/tests/store_processes.rs`.
#[derive(Debug)]
pub enum Place<R> {
    /// In this process.
    Here(ShardConfig),
    /// At another node.
    At(Client<R>),
}

/// A store role could not be started.
///
/// Example: `verify/tests/store_processes.rs` (`StoreRole`).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoleError {
    /// The directory.
    #[error(transparent)]
    Directory(#[from] StartError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The store role of a node: serve [`StoreRole::router`], then run [`StoreRole::run`].
///
/// `verify/tests/store_processes.rs` runs some in processes of their own.
///
/// Example: `verify/tests/store_processes.rs`.
#[derive(Debug)]
pub struct StoreRole<R> {
    store: StoreNode<R>,
    shard: Option<Arc<Shard>>,
    link: Link<R>,
}

impl<R: Runtime> StoreRole<R> {
    /// Lends memory of `engine`'s node.
    pub fn start(engine: Engine<R>, place: Place<R>, config: StoreConfig) -> Result<Self, RoleError> {
        let (shard, link) = match place {
            Place::Here(config) => {
                let shard = Shard::start(config)?;
                (Some(Arc::clone(&shard)), Link::local(shard, engine.runtime().clone()))
            }
            Place::At(client) => (None, Link::remote(client)),
        };
        let store = StoreNode::start(engine, link.clone(), config)?;
        Ok(Self { store, shard, link })
    }

    /// The methods of the store and, if it is here, of the directory.
    #[must_use]
    pub fn router(&self) -> Router {
        let router = self.store.router();
        match &self.shard {
            Some(shard) => router.merge(shard.router(self.store.inner.engine.runtime().clone())),
            None => router,
        }
    }

    /// The store node.
    #[must_use]
    pub fn store(&self) -> &StoreNode<R> {
        &self.store
    }

    /// The way to the directory, for a client in this process.
    #[must_use]
    pub fn link(&self) -> &Link<R> {
        &self.link
    }

    /// Joins the directory as the node at `address`, and keeps store and directory going until `stop`.
    pub async fn run(self, address: String, stop: Stop) {
        let runtime = self.store.inner.engine.runtime().clone();
        if let Some(shard) = self.shard {
            runtime.spawn(shard.run(runtime.clone(), stop.clone()));
        }
        self.store.run(address, stop).await;
    }
}
