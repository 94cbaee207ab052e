//! The scheduler: which instances serve a request, from inputs only. It never sees a clock, a message or a byte of KV.

pub mod feed;
pub mod index;
pub mod replicate;
pub mod spread;
