//! What happened to the latest requests, for `explain`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

/// The latest records by tenant and request id: tenants do not see, nor replace, what is of others. Clones are handles of the same ones.
///
/// ```
/// use millpond_node::router::Records;
/// let records = Records::new(1);
/// records.update(None, "a", |record| record["tokens"] = 3.into());
/// records.update(None, "b", |_| ());
/// assert!(records.find(None, "a").is_none(), "only the latest are kept");
/// ```
#[derive(Clone, Debug)]
pub struct Records {
    count_max: usize,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<(String, String), Value>,
    /// Oldest first; exactly the keys of `by_id`.
    order: VecDeque<(String, String)>,
}

impl Records {
    /// Keeps the latest `count_max` records.
    #[must_use]
    pub fn new(count_max: usize) -> Self {
        Self { count_max: count_max.max(1), kept: Arc::default() }
    }

    /// Changes the record of a tenant's `id`, an object with its id if it is new. A forgotten one starts anew.
    pub fn update(&self, tenant: Option<&str>, id: &str, change: impl FnOnce(&mut Value)) {
        let (mut kept, key) = (self.kept.lock(), key(tenant, id));
        if !kept.by_id.contains_key(&key) {
            if kept.order.len() >= self.count_max
                && let Some(oldest) = kept.order.pop_front()
            {
                kept.by_id.remove(&oldest);
            }
            kept.order.push_back(key.clone());
        }
        change(kept.by_id.entry(key).or_insert_with(|| serde_json::json!({"id": id})));
    }

    /// The record of a tenant's `id`, unless it is unknown or forgotten.
    #[must_use]
    pub fn find(&self, tenant: Option<&str>, id: &str) -> Option<Value> {
        self.kept.lock().by_id.get(&key(tenant, id)).cloned()
    }
}

fn key(tenant: Option<&str>, id: &str) -> (String, String) {
    (tenant.unwrap_or_default().into(), id.into())
}
