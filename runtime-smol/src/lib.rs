//! Millpond on smol: the thin adapter that gives `millpond-node` sockets, timers and threads.
//!
//! [`Smol`] implements [`millpond_node::runtime::Runtime`]; what a node does with it lives in `millpond-node`.
#![forbid(unsafe_code)]

mod net;
mod runtime;

pub use net::{Readable, TcpListener, TcpStream};
pub use runtime::{Smol, run};
