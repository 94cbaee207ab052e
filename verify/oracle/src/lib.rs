//! Slow, obvious oracles of the core's data structures: maps and linear scans, no index, no links, no cleverness.
//!
//! They stand below `fuzz`, whose operation lists drive the product and an oracle side by side.
#![forbid(unsafe_code)]

pub mod batch;

pub mod page;

pub mod extent;

pub mod prefix;

pub mod directory;

pub mod index;
