//! HTTP/1.1 for nodes: the server, the pages every node has, and the OpenAI-compatible API of a router.
//!
//! It is not a general web framework: requests have bounded whole bodies, replies are whole or a stream of chunks, and
//! every wait has a limit. Every reply carries `x-request-id`; every error has OpenAI's JSON shape. A client that goes
//! away drops the future or the stream that was working for it, and so cancels the work.

mod answer;
mod api;
mod client;
mod fields;
mod io;
mod message;
mod openai;
mod pages;
mod server;

#[cfg(test)]
mod tests;

pub use api::Api;
pub use client::{Bearer, FetchError, fetch, fetch_as};
pub use message::{ApiError, Handler, Method, Reply, Request};
pub use pages::Pages;
pub use server::{Limits, serve, serve_stream, start};
