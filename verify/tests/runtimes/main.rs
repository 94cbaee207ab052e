//! One suite for every runtime: what `runtime`, `session` and `rpc` promise, seen on each of them.

mod runtime;
