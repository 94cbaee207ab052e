//! Millpond's async layers that know no runtime: they compose core's decisions and hal's moves into nodes.
#![forbid(unsafe_code)]
