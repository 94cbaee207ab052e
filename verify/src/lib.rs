//! Model checks, the tidy test, end-to-end tests and benches of Millpond. They are under `tests` and `benches`, and here what
//! several of them need; the oracles are a crate of their own, `millpond-oracle`.
#![forbid(unsafe_code)]

pub mod binaries;
pub mod reference;
pub mod trio;
