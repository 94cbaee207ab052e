//! Instruction-count gates: what one operation of the core's hot structures costs, counted by callgrind, held against a table.
//!
//! Counts do not depend on how busy the machine is, so a change that makes an operation dearer is refused where a clock
//! would only mumble. `gates` counts every gate and compares; `gates --accept` writes the table anew; `gates work NAME COUNT
//! STRIDE` is what runs under callgrind. Each gate is also shown to be able to fail: with every fourth operation done twice,
//! it must refuse.

mod table;
mod work;

use std::path::Path;
use std::process::{Command, ExitCode};

use table::{Table, Verdict};

/// Operations of one counted run; a second run does twice as many, and the difference is free of start and set-up.
const OPERATIONS: u64 = 4_096;
/// No slowdown: no operation is done twice.
const NO_STRIDE: u64 = u64::MAX;
/// Every fourth operation is done twice: 25 % more instructions.
const SLOW_STRIDE: u64 = 4;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["work", name, count, stride] => {
            let number = |text: &str| text.parse().expect("a number");
            work::run(name, number(count), number(stride));
            ExitCode::SUCCESS
        }
        [] => check(),
        ["--accept"] => accept(),
        _ => {
            eprintln!("gates, or gates --accept; not {words:?}");
            ExitCode::from(2)
        }
    }
}

/// Instructions of one run of a gate's work under callgrind.
fn instructions(name: &str, count: u64, stride: u64) -> Result<u64, String> {
    let itself = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(itself)
        .args(["work", name, &count.to_string(), &stride.to_string()])
        .output()
        .map_err(|error| format!("valgrind does not start ({error}); install it"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    collected.filter(|_| output.status.success()).ok_or_else(|| format!("{name}: valgrind failed:\n{said}"))
}

/// Instructions per operation.
fn cost(name: &str, stride: u64) -> Result<u64, String> {
    let (once, twice) = (instructions(name, OPERATIONS, stride)?, instructions(name, 2 * OPERATIONS, stride)?);
    Ok(twice.saturating_sub(once).div_ceil(OPERATIONS))
}

fn table_path() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/gates.txt"))
}

fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn check() -> ExitCode {
    let table = std::fs::read_to_string(table_path()).map_err(|error| error.to_string());
    let table = match table.and_then(|text| Table::parse(&text)) {
        Ok(table) => table,
        Err(why) => {
            eprintln!("{}: {why}", table_path().display());
            return ExitCode::FAILURE;
        }
    };
    if table.machine != std::env::consts::ARCH {
        eprintln!("the table is for {}, this is {}: nothing to compare with", table.machine, std::env::consts::ARCH);
        return ExitCode::FAILURE;
    }
    let margin = table.margin(&compiler());
    println!("instructions per operation, at most {margin} % above {}", table_path().display());
    println!("{:<32} {:>9} {:>9}", "gate", "table", "now");
    let mut refused = Vec::new();
    for name in work::NAMES {
        match gate(&table, name, margin) {
            Ok(line) => println!("{line}"),
            Err(why) => refused.push(why),
        }
    }
    if refused.is_empty() {
        println!("each gate refuses an operation that costs a quarter more");
        return ExitCode::SUCCESS;
    }
    eprintln!("{}", refused.join("\n"));
    eprintln!("If a change is worth it, accept the new figures and say why in the commit:");
    eprintln!("    cargo run --profile gates -p millpond-oracle --bin gates -- --accept");
    ExitCode::FAILURE
}

/// The line of a gate that holds; `Err` says why one does not.
fn gate(table: &Table, name: &str, margin: u64) -> Result<String, String> {
    let (now, slow) = (cost(name, NO_STRIDE)?, cost(name, SLOW_STRIDE)?);
    let before = table.figure(name).ok_or_else(|| format!("{name}: costs {now} and has no figure in the table"))?;
    match table::verdict(now, before, margin) {
        Verdict::TooDear => return Err(format!("{name}: {before} instructions in the table, {now} now")),
        Verdict::Cheaper => println!("{name}: cheaper than the table says; accept the new figure to keep it so"),
        Verdict::Holds => {}
    }
    match table::verdict(slow, now, table::MARGIN) {
        Verdict::TooDear => Ok(format!("{name:<32} {before:>9} {now:>9}")),
        _ => Err(format!("{name}: {now}, and {slow} with each fourth operation done twice: the gate cannot fail")),
    }
}

fn accept() -> ExitCode {
    let mut figures = Vec::new();
    for name in work::NAMES {
        match cost(name, NO_STRIDE) {
            Ok(now) => figures.push((name.to_owned(), now)),
            Err(why) => {
                eprintln!("{why}");
                return ExitCode::FAILURE;
            }
        }
    }
    let table = Table { machine: std::env::consts::ARCH.to_owned(), compiler: compiler(), figures };
    match std::fs::write(table_path(), table.to_string()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", table_path().display());
            ExitCode::FAILURE
        }
    }
}
