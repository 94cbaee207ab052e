//! What engine, store and KV pages count themselves, shown among the node's metrics.

use millpond_core::page::Counts as Pages;
use millpond_core::wire::message::store::Facts;
use parking_lot::Mutex;

use crate::engine::{Downgrade, Engine, Statistics};
use crate::kv::Pool;
use crate::metrics::{Counter, Registry};
use crate::runtime::Runtime;

type Read<T> = fn(&T) -> u64;

const ENGINE_TOTALS: [(&str, &str, Read<Statistics>); 10] = [
    ("millpond_transfers_started_total", "Batches that the engine accepted.", |s| s.transfers_started),
    ("millpond_transfers_done_total", "Batches of which every request was done.", |s| s.transfers_done),
    ("millpond_transfers_failed_total", "Batches of which some request failed.", |s| s.transfers_failed),
    ("millpond_transfers_refused_total", "Batches refused at a bound.", |s| s.transfers_refused),
    ("millpond_transfer_bytes_written_total", "Bytes written to peers.", |s| s.bytes_written),
    ("millpond_transfer_bytes_read_total", "Bytes read from peers.", |s| s.bytes_read),
    ("millpond_transfer_retries_total", "Requests posted again over another lane or path.", |s| s.retries),
    ("millpond_lanes_opened_total", "Lanes dialled and accepted.", |s| s.lanes_dialled + s.lanes_accepted),
    ("millpond_lanes_lost_total", "Lanes that ended.", |s| s.lanes_lost),
    ("millpond_nic_pairs_refuted_total", "Byte tests that found a pair of NICs unfit.", |s| s.pairs_refuted),
];

/// Automatic choices below the best path; `status` shows those that are not zero.
pub(crate) const DOWNGRADES: &str = "millpond_path_downgrade_total";
const DOWNGRADES_HELP: &str = "Posts over a transport that is not the best one both sides share.";

const ENGINE_NOW: [(&str, &str, Read<Statistics>); 3] = [
    ("millpond_transfers_open", "Batches queued or under way.", |s| s.transfers_open),
    ("millpond_lanes_open", "Lanes that are open.", |s| s.lanes_open),
    ("millpond_peers_known", "Peers known, each incarnation for itself, and the engine itself.", |s| s.peers_known),
];

const STORE_TOTALS: [(&str, &str, Read<Facts>); 5] = [
    ("millpond_store_evicted_total", "Objects evicted.", |f| f.evicted),
    ("millpond_store_spared_leased_total", "Victims that stayed because of a lease.", |f| f.spared_leased),
    ("millpond_store_spared_pinned_total", "Victims that stayed because of a pin.", |f| f.spared_pinned),
    ("millpond_store_refused_full_total", "Puts refused for lack of room.", |f| f.refused_full),
    ("millpond_store_damaged_chunks_total", "Chunks whose checksum was wrong.", |f| f.damaged),
];

const STORE_NOW: [(&str, &str, Read<Facts>); 5] = [
    ("millpond_store_capacity_bytes", "Payload bytes in all.", |f| f.capacity),
    ("millpond_store_free_bytes", "Payload bytes not handed out.", |f| f.free),
    ("millpond_store_objects", "Sealed objects.", |f| f.sealed),
    ("millpond_store_objects_writing", "Objects that are being written.", |f| f.writing),
    ("millpond_store_objects_leaving", "Objects on their way out.", |f| f.leaving),
];

const POOL_NOW: [(&str, &str, Read<Pages>); 3] = [
    ("millpond_kv_pages_total", "KV pages in all.", |c| c.total().into()),
    ("millpond_kv_pages_free", "KV pages that nobody holds.", |c| c.free.into()),
    ("millpond_kv_pages_quarantined", "KV pages whose memory is still out.", |c| c.quarantined.into()),
];

/// The pages of each role.
pub(super) type Pools = Vec<(&'static str, Pool)>;

/// Reads the counters of engine, store and KV pages whenever somebody asks.
pub(super) struct Counts<R> {
    registry: Registry,
    engine: Engine<R>,
    store: Option<Box<dyn Fn() -> Facts + Send + Sync>>,
    pools: Pools,
    /// One reader at a time, so that no difference is added twice.
    reading: Mutex<()>,
}

impl<R: Runtime> Counts<R> {
    pub(super) fn new(registry: &Registry, engine: Engine<R>) -> Self {
        Self { registry: registry.clone(), engine, store: None, pools: Pools::new(), reading: Mutex::default() }
    }

    pub(super) fn with_store(self, facts: impl Fn() -> Facts + Send + Sync + 'static) -> Self {
        Self { store: Some(Box::new(facts)), ..self }
    }

    pub(super) fn with_pools(self, pools: Pools) -> Self {
        Self { pools, ..self }
    }

    /// All metrics of the node in Prometheus's text format.
    pub(super) fn text(&self) -> String {
        let _reading = self.reading.lock();
        let statistics = self.engine.statistics();
        self.show(&statistics, &ENGINE_TOTALS, &ENGINE_NOW);
        for Downgrade { from, to, reason, count, .. } in statistics.downgrades() {
            let labels = [("from", &*from.to_string()), ("to", &*to.to_string()), ("reason", reason.name())];
            catch_up(&self.registry.counter(DOWNGRADES, DOWNGRADES_HELP, &labels), count);
        }
        if let Some(facts) = &self.store {
            self.show(&facts(), &STORE_TOTALS, &STORE_NOW);
        }
        for (role, pool) in &self.pools {
            let counts = pool.counts();
            for (name, help, read) in &POOL_NOW {
                self.registry.gauge(name, help, &[("role", role)]).set(read(&counts));
            }
        }
        self.registry.text()
    }

    fn show<T>(&self, of: &T, totals: &[(&str, &str, Read<T>)], now: &[(&str, &str, Read<T>)]) {
        for (name, help, read) in totals {
            catch_up(&self.registry.counter(name, help, &[]), read(of));
        }
        for (name, help, read) in now {
            self.registry.gauge(name, help, &[]).set(read(of));
        }
    }
}

fn catch_up(counter: &Counter, total: u64) {
    counter.add(total.saturating_sub(counter.value()));
}
