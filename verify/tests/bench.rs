//! `millpond bench` as a user calls it, with both binaries: every measurement gives rows that a program can read, and
//! leaves no process behind.

use std::path::PathBuf;
use std::process::{Command, Output};

use millpond_verify::binaries;
use serde_json::Value;

fn binaries() -> [PathBuf; 2] {
    ["millpond", "millpond-smol"].map(|name| binaries::folder().join(name))
}

fn bench(binary: &PathBuf, words: &str) -> Output {
    let mut command = Command::new(binary);
    command.args(["bench"]).args(words.split_whitespace()).args(["--json", "--seconds", "0.05"]);
    command.output().unwrap()
}

/// The rows of a measurement, each with all its figures.
fn rows(binary: &PathBuf, words: &str) -> Vec<Value> {
    let output = bench(binary, words);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "bench {words}: {err}");
    let rows: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for row in &rows {
        let figure = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        assert!(row["peer"].is_string() && row["op"].is_string(), "{row}");
        assert!(figure("ops_s") > 0.0 && figure("threads") >= 1.0 && figure("batch") >= 1.0, "{row}");
        assert!(figure("p50_us") > 0.0 && figure("p99_us") >= figure("p50_us"), "{row}");
        if row["op"] != "exists" {
            assert!(figure("GBps") > 0.0 && figure("cpu_s_per_GB") >= 0.0 && figure("size") > 0.0, "{row}");
        }
    }
    rows
}

fn is(rows: &[Value], key: &str, wanted: &[&str]) {
    let found: Vec<String> = rows.iter().map(|row| row[key].to_string().replace('"', "")).collect();
    assert_eq!(found, wanted);
}

#[test]
fn the_yardstick_gives_a_row_per_mode_and_size() {
    for binary in binaries() {
        let rows = rows(&binary, "bare --mode blocking,spin,shm --size 4KiB,64KiB --batch 2");
        is(&rows, "peer", &["bare-blocking", "bare-blocking", "bare-spin", "bare-spin", "bare-shm", "bare-shm"]);
        is(&rows, "size", &["4096", "65536", "4096", "65536", "4096", "65536"]);
    }
}

#[test]
fn transfers_are_measured_over_both_transports() {
    for binary in binaries() {
        let rows = rows(&binary, "transfer --via tcp,shm --op write,read,mixed --size 4KiB --batch 3 --threads 1,2");
        let peers = [["millpond-tcp"; 6], ["millpond-shm"; 6]].concat();
        is(&rows, "peer", &peers);
        is(&rows[..6], "op", &["write", "write", "read", "read", "mixed", "mixed"]);
        is(&rows[..4], "threads", &["1", "2", "1", "2"]);
        let odd = self::rows(&binary, "transfer --size 1000,17MiB");
        is(&odd, "size", &["1000", "17825792"]);
    }
}

#[test]
fn a_file_is_measured_with_bytes_from_here_and_from_another_process() {
    for binary in binaries() {
        let rows = rows(&binary, "transfer --via file --op write,read,mixed --size 64KiB,100000 --batch 300");
        is(&rows, "peer", &["millpond-file"; 6]);
        is(&rows, "op", &["write", "write", "read", "read", "mixed", "mixed"]);
        let output = bench(&binary, "transfer --via file --threads 2");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("one thread"), "{said}");
    }
}

#[test]
fn the_store_is_measured_with_one_copy_and_with_two() {
    for binary in binaries() {
        let rows = rows(&binary, "store --op put,get,exists --size 4KiB,1MiB --replicas 1,2 --batch 2");
        is(&rows, "op", &["put", "put", "get", "get", "exists", "put", "put", "get", "get", "exists"]);
        is(&rows, "replicas", &["1", "1", "1", "1", "1", "2", "2", "2", "2", "2"]);
        is(&rows[..1], "peer", &["millpond-store-tcp"]);
    }
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_is_started() {
    for binary in binaries() {
        for (words, hint) in [
            ("transfer --via pigeon", "tcp"),
            ("transfer --size 16MiB --batch 32", "512 MiB"),
            ("store --op write", "exists"),
            ("bare --size 1GiB", "256 MiB"),
        ] {
            let output = bench(&binary, words);
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && output.stdout.is_empty(), "{words}");
            assert!(err.contains(hint), "{words}: {err}");
        }
    }
}
