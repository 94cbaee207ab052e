//! The bare benchmark by itself: `cargo run --release -p millpond-hal --example bare -- spin 4096 1`.

use std::process::{Command, ExitCode};
use std::time::Duration;

use millpond_hal::bare::{self, Mode, Point};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", addr] => bare::serve(addr),
        [mode, size, batch] => point(mode, size, batch).and_then(|point| {
            let program = std::env::current_exe()?;
            let command = |addr: &str| {
                let mut command = Command::new(program);
                command.args(["serve", addr]);
                command
            };
            bare::run(&[point], command, |row| println!("{}", row.to_json()))
        }),
        _ => {
            eprintln!("usage: bare blocking|spin|shm SIZE BATCH");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn point(mode: &str, size: &str, batch: &str) -> std::io::Result<Point> {
    let number = |text: &str| text.parse::<u64>().map_err(std::io::Error::other);
    let mode: Mode = mode.parse().map_err(std::io::Error::other)?;
    Ok(Point { mode, size: number(size)?, batch: number(batch)?, time: Duration::from_secs(1) })
}
