//! Millpond on tokio: the thin adapter that gives `millpond-node` sockets, timers and threads.
//!
//! [`Tokio`] implements [`millpond_node::runtime::Runtime`]; what a node does with it lives in `millpond-node`.
#![forbid(unsafe_code)]

mod net;
mod runtime;

pub use net::{Readable, TcpListener, TcpStream};
pub use runtime::{Tokio, run};

/// The binary: reads the process's arguments and does what they say; see `millpond_node::cli`.
///
/// It lives in the library so that what is generic over the runtime is compiled for tokio once, and tests that link it share that.
#[must_use]
pub fn main() -> std::process::ExitCode {
    let ending = run(|runtime| {
        let ended = runtime.terminated();
        millpond_node::cli::run(runtime, ended)
    });
    ending.unwrap_or_else(|error| millpond_node::cli::no_runtime(&error))
}
