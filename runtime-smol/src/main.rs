//! The binary on smol; what it does lives in `millpond_node::cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let ending = millpond_smol::run(|runtime| async move {
        match runtime.terminated() {
            Ok(ended) => Ok(millpond_node::cli::run(runtime, ended).await),
            Err(error) => Err(error),
        }
    });
    match ending.and_then(|ending| ending) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("millpond: the system gives no runtime: {error}");
            ExitCode::FAILURE
        }
    }
}
