//! What happened to the latest requests, for `explain`.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

/// The latest records by request id. Clones are handles of the same ones.
///
/// ```
/// use millpond_node::router::Records;
/// let records = Records::new(1);
/// records.update("a", |record| record["tokens"] = 3.into());
/// records.update("b", |_| ());
/// assert!(records.find("a").is_none(), "only the latest are kept");
/// ```
#[derive(Clone, Debug)]
pub struct Records {
    count_max: usize,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, Value>,
    /// Oldest first; exactly the keys of `by_id`.
    order: VecDeque<String>,
}

impl Records {
    /// Keeps the latest `count_max` records.
    #[must_use]
    pub fn new(count_max: usize) -> Self {
        Self { count_max: count_max.max(1), kept: Arc::default() }
    }

    /// Changes the record of `id`, an object with its id if it is new. A forgotten one starts anew.
    pub fn update(&self, id: &str, change: impl FnOnce(&mut Value)) {
        let mut kept = self.kept.lock();
        if !kept.by_id.contains_key(id) {
            if kept.order.len() >= self.count_max
                && let Some(oldest) = kept.order.pop_front()
            {
                kept.by_id.remove(&oldest);
            }
            kept.order.push_back(id.into());
        }
        change(kept.by_id.entry(id.into()).or_insert_with(|| serde_json::json!({"id": id})));
    }

    /// The record of `id`, unless it is unknown or forgotten.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<Value> {
        self.kept.lock().by_id.get(id).cloned()
    }
}
