//! Millpond's async layers that know no runtime: they compose core's decisions and hal's moves into nodes.
//!
//! Everything here is generic over [`runtime::Runtime`]; the adapters `millpond-tokio` and `millpond-smol` implement it.
#![forbid(unsafe_code)]

#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "store")]
pub mod client;
pub mod config;
#[cfg(feature = "http")]
pub mod decode;
#[cfg(feature = "store")]
pub mod directory;
#[cfg(feature = "engine")]
pub mod engine;
#[cfg(feature = "engine")]
pub mod files;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "http")]
pub mod kv;
pub mod metrics;
#[cfg(feature = "http")]
pub mod model;
#[cfg(feature = "engine")]
pub mod node;
#[cfg(feature = "http")]
pub mod prefill;
#[cfg(feature = "http")]
pub mod router;
#[cfg(feature = "engine")]
pub mod rpc;
pub mod runtime;
#[cfg(feature = "http")]
pub mod serve;
#[cfg(feature = "engine")]
pub mod session;
#[cfg(feature = "store")]
pub mod store;
#[cfg(feature = "engine")]
pub mod tls;
#[cfg(feature = "engine")]
pub mod topology;
