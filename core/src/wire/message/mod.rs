//! Messages of the control plane (prost), a file per family. Method ids are `0xFFNN`: family, number.
//!
//! A number is never used again for something else. Messages grow by new fields only, so that mixed versions understand
//! each other. `rpc` is what all families travel in.

pub mod directory;
pub mod file;
pub mod rail;
pub mod rpc;
pub mod serve;
pub mod store;

#[cfg(test)]
mod tests;

/// The name of a method, for metrics and messages; `None` for one that this version does not know.
///
/// ```
/// use millpond_core::wire::message::{method_name, store::METHOD_PUT};
/// assert_eq!(method_name(METHOD_PUT), Some("store.put"));
/// assert_eq!(method_name(0xffff), None);
/// ```
#[must_use]
pub const fn method_name(method: u16) -> Option<&'static str> {
    Some(match method {
        directory::METHOD_LOCATE => "directory.locate",
        directory::METHOD_EXISTS => "directory.exists",
        directory::METHOD_STAT => "directory.stat",
        directory::METHOD_LIST => "directory.list",
        directory::METHOD_REMOVE => "directory.remove",
        directory::METHOD_CLEAR => "directory.clear",
        directory::METHOD_EXPLAIN_MISS => "directory.explain_miss",
        directory::METHOD_VIEW => "directory.view",
        directory::METHOD_WATCH => "directory.watch",
        directory::METHOD_JOIN => "directory.join",
        directory::METHOD_HEARTBEAT => "directory.heartbeat",
        directory::METHOD_INVENTORY => "directory.inventory",
        directory::METHOD_COMMIT => "directory.commit",
        directory::METHOD_EVICT => "directory.evict",
        directory::METHOD_DROPPED => "directory.dropped",
        store::METHOD_PUT => "store.put",
        store::METHOD_GET => "store.get",
        store::METHOD_FACTS => "store.facts",
        file::METHOD_MOVE => "file.move",
        file::METHOD_OPEN => "file.open",
        serve::METHOD_GENERATE => "serve.generate",
        serve::METHOD_PREFILL => "serve.prefill",
        serve::METHOD_LOAD => "serve.load",
        _ => return None,
    })
}
