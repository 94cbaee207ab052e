//! The command line, the same in both binaries.

pub mod store_cmds;
