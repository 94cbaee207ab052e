//! The binary on tokio.

use std::process::ExitCode;

fn main() -> ExitCode {
    millpond_tokio::main()
}
