//! Operation lists for the data structures and parsers: one list serves proptest, the fuzzer and the corpus.
#![forbid(unsafe_code)]

pub mod session;

pub mod wire;

pub mod directory;
