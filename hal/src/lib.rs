//! Millpond's hardware abstraction layer: one contract for every backend, one safe shell (`fabric`) in front of it.
#![deny(unsafe_code)]
