//! Messages of the control plane (prost), a file per family. Method ids are `0xFFNN`: family, number.

pub mod serve;
