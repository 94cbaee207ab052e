//! Millpond's hardware abstraction layer: one contract for every backend, one safe shell (`fabric`) in front of it.
//!
//! `contract` says what a backend promises; `fabric` checks once for all of them; `region` decides who may touch which bytes.
//! hal moves what it is told to move: it never resolves, dials or accepts, and does not know what a store is.
//!
//! # Where `unsafe` lives
//! Only in `contract` (the traits), `mapping`, `region`, `copy` (and `copy_x86`, `copy_libc`, `copy_plain`, one of which is
//! compiled), `fork`, `fabric::{memory, post, table}`, `bare::shm`, `conformance::{player, untouchable}`, and the files of `backend` that say
//! so in their first lines.
#![deny(unsafe_code)]
// Lengths and offsets of mapped memory fit a usize: what was mapped was mapped by this process.
#![allow(clippy::cast_possible_truncation)]

pub mod backend;
pub mod bare;
pub mod conformance;
pub mod contract;
pub mod copy;
#[cfg_attr(all(target_arch = "x86_64", not(miri)), path = "copy_x86.rs")]
#[cfg_attr(all(not(target_arch = "x86_64"), not(miri)), path = "copy_libc.rs")]
#[cfg_attr(miri, path = "copy_plain.rs")]
mod copy_arch;
pub mod fabric;
pub mod file;
pub mod fork;
pub mod mapping;
pub mod probe;
pub mod region;
pub mod sync;
