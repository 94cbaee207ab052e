//! The binary; everything it does lives in `millpond_node::cli`.
fn main() {}
