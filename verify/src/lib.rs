//! Model checks, the tidy test, end-to-end tests and benches of Millpond. Everything is under `tests` and `benches`; the
//! oracles are a crate of their own, `millpond-oracle`.
#![forbid(unsafe_code)]

pub mod reference;
pub mod trio;
