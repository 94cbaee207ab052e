//! Slow, obvious oracles and the harnesses that compare the product against them.

pub mod directory;
