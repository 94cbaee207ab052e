//! The binary; everything it does will live in `millpond_node::cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    eprintln!("millpond-smol: the command line is not wired up yet; use the library crates (README.md, 'What stands')");
    ExitCode::FAILURE
}
