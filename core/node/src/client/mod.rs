//! The store's client, embedded in whoever uses the store.
//!
//! It asks the directory where things lie, keeps what it learns for as long as its leases run, chooses owners for new
//! values from the placement view, and falls over to another replica when one does not answer. Identity is checked by the
//! owner and integrity here, so a stale entry costs a retry, never wrong bytes. Every call ends: by its answer, or by a
//! deadline that grows with the bytes it moves.

mod connect;
mod get;
mod index;
mod owners;
mod pool;
mod put;
mod types;

use std::collections::HashMap;
use std::sync::Arc;

use millpond_core::directory::{Found, Stamp};
use millpond_core::time::{Duration, Instant};
use parking_lot::Mutex;

pub use index::{Batch, Changes, Listing, Rows};
pub use types::{
    ClientError, Got, MissReason, Options, Put, PutOptions, Receipt, RemoveOptions, Source, Target, Value,
};

use crate::directory::Link;
use crate::engine::{AllocateError, Engine};
use crate::runtime::Runtime;
use crate::session::Credentials;
use crate::store::StoreNode;
use owners::Owners;
use pool::Pool;

/// Locations kept at most; beyond that all are forgotten and learned again.
const LOCATIONS_MAX: usize = 1 << 18;

/// A client of one store. Clones are handles of the same one.
///
/// `verify/tests/store.rs` shows every operation.
///
/// Example: `verify/examples/own_runtime/serve.rs`.
#[derive(Debug)]
pub struct StoreClient<R> {
    inner: Arc<Inner<R>>,
}

impl<R> Clone for StoreClient<R> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

#[derive(Debug)]
struct Inner<R> {
    engine: Engine<R>,
    link: Link<R>,
    options: Options,
    owners: Owners<R>,
    pool: Pool,
    locations: Mutex<HashMap<Box<[u8]>, Known>>,
}

/// A location that was told, and until when its lease runs for sure.
#[derive(Clone, Debug)]
struct Known {
    found: Found,
    until: Instant,
}

impl<R: Runtime> StoreClient<R> {
    /// A client at `engine`'s node, of the store whose directory `link` leads to. `credentials` open sessions to owners;
    /// `own` is the store node in this process, if there is one: it is called without a session.
    pub fn new(
        engine: Engine<R>,
        link: Link<R>,
        credentials: Credentials,
        own: Option<StoreNode<R>>,
        options: Options,
    ) -> Result<Self, AllocateError> {
        let pool = Pool::new(&engine, options.pool_len)?;
        let owners = Owners::new(engine.clone(), credentials, own, options.clone());
        let locations = Mutex::default();
        Ok(Self { inner: Arc::new(Inner { engine, link, options, owners, pool, locations }) })
    }

    /// The engine whose memory zero-copy values are allocated from.
    #[must_use]
    pub fn engine(&self) -> &Engine<R> {
        &self.inner.engine
    }
}

impl<R: Runtime> Inner<R> {
    fn now(&self) -> Instant {
        self.engine.runtime().now()
    }

    fn short_deadline(&self) -> Instant {
        self.now() + self.options.call_span
    }

    /// A deadline for a call that moves `len` bytes: bounded by lack of progress, so it grows with them.
    fn deadline_for(&self, len: u64) -> Instant {
        let span = self.options.progress_deadline + Duration::from_nanos(len.saturating_mul(20));
        self.now() + span
    }

    /// What the cache knows of `key`, if its lease still runs.
    fn known(&self, key: &[u8]) -> Option<Found> {
        let now = self.now();
        self.locations.lock().get(key).filter(|known| now < known.until).map(|known| known.found.clone())
    }

    fn learn(&self, key: &[u8], asked_at: Instant, found: &Found) {
        let mut locations = self.locations.lock();
        if locations.len() >= LOCATIONS_MAX {
            locations.clear();
        }
        locations.insert(key.into(), Known { found: found.clone(), until: asked_at + found.lease });
    }

    fn forget(&self, key: &[u8], version: Option<Stamp>) {
        let mut locations = self.locations.lock();
        if version.is_none_or(|version| locations.get(key).is_some_and(|known| known.found.version == version)) {
            locations.remove(key);
        }
    }
}
