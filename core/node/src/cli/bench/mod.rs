//! `millpond bench`: what this machine moves, measured between processes that it starts itself on loopback.
//!
//! The processes are the same binary, told so by a hidden command; they end when the one that started them does. Every
//! point ends with a look at all bytes it moved: a wrong one is an error, not a row. A row says how many cores others used
//! meanwhile; above 0.2 it is no result. Nothing here moves bytes in another way than any user of the engine would.

mod bare;
mod child;
mod file;
mod pattern;
mod point;
mod store;
mod transfer;

use std::io::{self, Write};

use millpond_hal::bare::{FOOTPRINT_LEN, Row};
use serde_json::{Value as Json, json};

use super::store_cmds::{Exit, Format, Output};
use crate::client::ClientError;
use crate::config::parse_size;
use crate::engine::{
    AllocateError, AttachError, GrantErrorKind, OpenError, OpenFileError, StartError, SubmitErrorKind,
};
use crate::runtime::Runtime;
use crate::tls::TlsError;

/// What to measure.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// The least a program must do to move bytes between two processes: the yardstick.
    Bare(bare::Args),
    /// The transfer engine: batches of writes and reads between the memory of two processes.
    Transfer(transfer::Args),
    /// The store: values put, got and looked up by a client, owned by other processes.
    Store(store::Args),
    /// What the measurements start: the other process.
    #[command(hide = true)]
    Child(child::Args),
}

/// What all measurements can be asked for.
#[derive(Clone, Debug, clap::Args)]
struct Common {
    /// Bytes of a piece or value; a list gives a row each.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,16MiB")]
    #[arg(value_parser = piece_size)]
    size: Vec<u64>,
    /// Pieces or values per operation; a list gives a row each.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1024))]
    batch: Vec<u64>,
    /// How long to measure each point.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    seconds: f64,
}

impl Common {
    /// Every size with every batch.
    fn shapes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.batch.iter().flat_map(|batch| self.size.iter().map(|size| (*size, *batch)))
    }
}

fn piece_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size if size > FOOTPRINT_LEN => Err(format!("{text} is more than the 256 MiB that a measurement uses")),
        size => Ok(size),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("{text:?} is no time from 0.001 to 3600 seconds")),
    }
}

/// A measurement ended without its rows.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The flags do not go together.
    #[error("{what}")]
    Point {
        /// What does not, and what to do.
        what: String,
    },
    /// The other process.
    #[error("the process {name} that was started to measure against: {source}")]
    Child {
        /// Which.
        name: &'static str,
        /// What happened.
        source: io::Error,
    },
    /// Bytes are not where they should be.
    #[error(
        "wrong bytes after {what}: the first at offset {offset}; this is a fault of the transport, please report it"
    )]
    WrongBytes {
        /// What was measured.
        what: String,
        /// Where, in the memory of the receiving side.
        offset: u64,
    },
    /// A batch did not end well.
    #[error("the batch failed: {0}")]
    Batch(crate::engine::Failure),
    /// A batch was not taken.
    #[error("the batch was refused: {0}")]
    Submit(SubmitErrorKind),
    /// An engine did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The other engine is not reached.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Memory.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// Memory of the other engine.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Memory that was not to be exposed.
    #[error(transparent)]
    Grant(#[from] GrantErrorKind),
    /// The file that is measured.
    #[error(transparent)]
    File(#[from] OpenFileError),
    /// The certificates to measure under.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The store.
    #[error(transparent)]
    Store(#[from] ClientError),
    /// The store said no.
    #[error("the store did not {op}: {why}")]
    Refused {
        /// What was asked.
        op: &'static str,
        /// What it answered.
        why: String,
    },
    /// The node that serves a measurement.
    #[error(transparent)]
    Node(#[from] crate::node::NodeError),
    /// The store role that serves a measurement.
    #[error(transparent)]
    Role(#[from] crate::store::RoleError),
    /// Output, or a system call of the measurement.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Measures, and writes a row per point.
pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, output: &mut Output<'_>) -> Result<Exit, Error> {
    let mut rows = Rows { output, count: 0, busy: 0 };
    match args.what {
        What::Bare(args) => bare::run(runtime, args, &mut rows).await?,
        What::Transfer(args) => transfer::run(runtime, args, &mut rows).await?,
        What::Store(args) => store::run(runtime, args, &mut rows).await?,
        What::Child(args) => child::run(runtime, args).await?,
    }
    rows.end();
    Ok(Exit::Done)
}

/// Writes rows: a table, or JSON lines.
struct Rows<'a, 'b> {
    output: &'a mut Output<'b>,
    count: usize,
    busy: usize,
}

/// Cores that others may use while a row is taken.
const BUSY_CORES_MAX: f64 = 0.2;

impl Rows<'_, '_> {
    /// Writes one; `more` is added to the JSON object.
    fn write(&mut self, row: &Row, more: &[(&str, Json)]) -> io::Result<()> {
        self.busy += usize::from(row.other_cores.is_some_and(|cores| cores > BUSY_CORES_MAX));
        self.count += 1;
        let out = &mut self.output.writer;
        if self.output.format == Format::Json {
            let mut line = row.to_json();
            for (key, value) in more {
                line.truncate(line.len() - 1);
                line.push_str(&format!(",\"{key}\":{value}}}"));
            }
            writeln!(out, "{line}")?;
            return out.flush();
        }
        if self.count == 1 {
            let titles =
                ["peer", "op", "size", "threads", "batch", "GB/s", "ops/s", "p50 us", "p99 us", "cpu s/GB", "others"];
            writeln!(out, "{}", table_line(titles.map(str::to_owned)))?;
        }
        let optional = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let cells = [
            row.peer.to_owned(),
            row.op.to_owned(),
            size_name(row.size),
            row.threads.to_string(),
            row.batch.to_string(),
            format!("{:.3}", row.gbps),
            format!("{:.0}", row.ops_s),
            format!("{:.1}", row.p50_us),
            format!("{:.1}", row.p99_us),
            optional(row.cpu_s_per_gb),
            optional(row.other_cores),
        ];
        let more: String = more.iter().map(|(key, value)| format!("  {key} {value}")).collect();
        writeln!(out, "{}{more}", table_line(cells))?;
        out.flush()
    }

    /// Says so if the machine was not quiet.
    fn end(&self) {
        let (busy, count) = (self.busy, self.count);
        if busy > 0 {
            eprintln!("{busy} of {count} rows are no results: others used more than {BUSY_CORES_MAX} cores meanwhile");
        }
    }
}

fn table_line(cells: [String; 11]) -> String {
    let widths = [18, 6, 9, 7, 5, 9, 10, 10, 10, 8, 6];
    let mut line = String::new();
    for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
        // Names to the left, figures to the right.
        line.push_str(&if at < 2 { format!("{cell:<width$}  ") } else { format!("{cell:>width$}  ") });
    }
    line.trim_end().to_owned()
}

fn size_name(size: u64) -> String {
    for (unit, name) in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if size >= unit && size.is_multiple_of(unit) {
            return format!("{} {name}", size / unit);
        }
    }
    format!("{size} B")
}

/// For a row's JSON.
fn replicas_field(replicas: u32) -> [(&'static str, Json); 1] {
    [("replicas", json!(replicas))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(words: &str) -> Result<Args, String> {
        let line = Line::try_parse_from(std::iter::once("bench").chain(words.split_whitespace()));
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    fn refusal(words: &str) -> String {
        parse(words).expect_err(words)
    }

    #[test]
    fn lists_and_defaults_are_read() {
        let What::Transfer(args) =
            parse("transfer --via tcp,shm --op read --size 4KiB,1MiB --batch 1,128").unwrap().what
        else {
            panic!("another command")
        };
        assert_eq!(args.common.size, [4096, 1 << 20]);
        assert_eq!(args.common.batch, [1, 128]);
        assert_eq!(args.points().unwrap().len(), 4);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        assert!(refusal("transfer --via carrier-pigeon").contains("tcp"));
        assert!(refusal("transfer --op put").contains("mixed"));
        assert!(refusal("store --op write").contains("exists"));
        assert!(refusal("bare --mode fast").contains("spin"));
        assert!(refusal("bare --size 1GiB").contains("256 MiB"));
        assert!(refusal("bare --size lots").contains("no size"));
        assert!(refusal("bare --batch 0").contains("1..=1024"));
        assert!(refusal("bare --seconds 0").contains("0.001"));
        assert!(refusal("transfer --threads 0").contains("1..="));
        assert!(refusal("store --replicas 9").contains("1..="));
        assert!(refusal("").contains("transfer"));
        assert!(!refusal("").contains("child"), "hidden");
    }

    #[test]
    fn points_that_do_not_fit_are_refused_before_anything_runs() {
        let What::Transfer(args) = parse("transfer --size 16MiB --batch 32").unwrap().what else {
            panic!("another command")
        };
        let error = args.points().unwrap_err().to_string();
        assert!(error.contains("512 MiB") && error.contains("256 MiB"), "{error}");
        let What::Transfer(args) = parse("transfer --op mixed --size 256MiB").unwrap().what else {
            panic!("another command")
        };
        assert!(args.points().unwrap_err().to_string().contains("mixed"));
    }

    #[test]
    fn sizes_are_named_by_their_unit() {
        assert_eq!(size_name(4096), "4 KiB");
        assert_eq!(size_name(1 << 30), "1 GiB");
        assert_eq!(size_name(1500), "1500 B");
    }
}
