//! The binary on smol.

use std::process::ExitCode;

fn main() -> ExitCode {
    millpond_smol::main()
}
