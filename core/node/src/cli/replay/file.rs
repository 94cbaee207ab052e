//! Trace files: a JSON object a line, with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and
//! `hash_ids`, one for each 512 tokens of the prompt begun; other fields are ignored. The format of the traces that come
//! with the FAST'25 Mooncake paper.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use millpond_core::sim::trace::{Builder, Invalid, Reason, Trace};
use millpond_core::time::Instant;
use serde::Deserialize;
use serde_json::Value as Json;

#[derive(Debug, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// A file is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A line is wrong.
    #[error("{}, line {line}: {field}: {what}", path.display())]
    Line {
        /// Of which file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The field that is wrong; `line` if it has no fields.
        field: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// There is no line.
    #[error("{}: no requests are in it; a line is like {EXAMPLE}", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
}

const EXAMPLE: &str = r#"{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}"#;

/// Reads a trace; its time starts with the first request.
///
/// # Errors
/// The file cannot be read, or a line is not of the format or breaks an invariant of [`Trace`]: the first one that does.
pub(crate) fn read(path: &Path) -> Result<Trace, TraceError> {
    let unreadable = |source| TraceError::File { path: path.to_owned(), source };
    parse(path, BufReader::new(File::open(path).map_err(unreadable)?))
}

fn parse(path: &Path, reader: impl BufRead) -> Result<Trace, TraceError> {
    let wrong = |line, field, what| TraceError::Line { path: path.to_owned(), line, field, what };
    let (mut builder, mut lines, mut start) = (Builder::new(), Vec::new(), None);
    for (text, number) in reader.lines().zip(1..) {
        let text = text.map_err(|source| match source.kind() {
            io::ErrorKind::InvalidData => {
                wrong(number, "line", "it is no text in UTF-8; unpack a packed file first".to_owned())
            }
            _ => TraceError::File { path: path.to_owned(), source },
        })?;
        if text.trim().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_str(&text).map_err(|error| {
            let (field, what) = diagnose(&text).unwrap_or_else(|| ("line", broken(&error)));
            wrong(number, field, what)
        })?;
        if !line.timestamp.is_finite() || line.timestamp < 0.0 {
            return Err(wrong(number, "timestamp", format!("{} is no time in milliseconds", line.timestamp)));
        }
        let at = nanos(line.timestamp);
        // One that goes back before the start is refused for going back.
        let at = at.checked_sub(*start.get_or_insert(at)).ok_or(Reason::Backwards);
        lines.push(number);
        let pushed = at.map_err(|reason| Invalid { request: lines.len() - 1, reason }).and_then(|at| {
            builder.push(Instant::from_nanos(at), line.input_length, line.output_length, &line.hash_ids)
        });
        pushed.map_err(|invalid| wrong(number, field_of(invalid.reason), invalid.reason.to_string()))?;
    }
    if lines.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    builder
        .build()
        .map_err(|invalid| wrong(lines[invalid.request], field_of(invalid.reason), invalid.reason.to_string()))
}

/// What is wrong with a line that is not JSON.
fn broken(error: &serde_json::Error) -> String {
    if error.is_eof() {
        return "it ends before its object does; was the file cut off?".to_owned();
    }
    // The text was one line: which it is in the file is said before.
    error.to_string().replace(" at line 1 column ", " at column ")
}

fn field_of(reason: Reason) -> &'static str {
    match reason {
        Reason::Backwards => "timestamp",
        Reason::NoInput => "input_length",
        _ => "hash_ids",
    }
}

/// A field, what it should be, and whether it is.
type Check<'a> = (&'static str, &'static str, &'a dyn Fn(&Json) -> bool);

/// Which field keeps a line of JSON from being a request, and why; `None` if it is not JSON.
fn diagnose(text: &str) -> Option<(&'static str, String)> {
    let value: Json = serde_json::from_str(text).ok()?;
    let Json::Object(fields) = value else { return Some(("line", format!("it is no object like {EXAMPLE}"))) };
    let is_count = |value: &Json| value.as_u64().is_some_and(|count| u32::try_from(count).is_ok());
    let is_id = |ids: &Vec<Json>| ids.iter().all(Json::is_u64);
    let checks: [Check<'_>; 4] = [
        ("timestamp", "a number of milliseconds", &Json::is_number),
        ("input_length", "a number of tokens below 2^32", &is_count),
        ("output_length", "a number of tokens below 2^32", &is_count),
        ("hash_ids", "a list of whole numbers from 0 to 2^64 - 1", &|value| value.as_array().is_some_and(is_id)),
    ];
    checks.into_iter().find_map(|(field, wanted, is_right)| match fields.get(field) {
        None => Some((field, format!("it is missing; it is {wanted}"))),
        Some(value) if !is_right(value) => {
            let mut found = value.to_string();
            if found.chars().count() > FOUND_CHARS_MAX {
                found = found.chars().take(FOUND_CHARS_MAX).chain("...".chars()).collect();
            }
            Some((field, format!("it is {wanted}, not {found}")))
        }
        Some(_) => None,
    })
}

/// Of what stands in place of a field, this much is shown.
const FOUND_CHARS_MAX: usize = 60;

/// Milliseconds in nanoseconds, to the nearest; what is too long saturates.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked: not negative; the rest saturates"
)]
fn nanos(millis: f64) -> u64 {
    (millis * 1e6).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        parse(Path::new("a.jsonl"), text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_trace_is_read_with_empty_lines_more_fields_and_a_late_start() {
        let text = concat!(
            r#"{"timestamp": 5000, "input_length": 600, "output_length": 0, "hash_ids": [9, 18446744073709551615]}"#,
            "\n\n",
            r#"{"timestamp": 5000.5, "input_length": 512, "output_length": 7, "hash_ids": [9], "round": 2}"#,
        );
        let trace = parse(Path::new("a.jsonl"), text.as_bytes()).unwrap();
        let [first, second] = trace.requests() else { panic!("two requests") };
        assert_eq!((first.at.as_nanos(), second.at.as_nanos()), (0, 500_000));
        assert_eq!((trace.blocks_of(first), trace.blocks_of(second)), (&[0, 1][..], &[0][..]));
        assert_eq!((second.input_tokens, second.output_tokens), (512, 7));
    }

    #[test]
    fn whatever_a_file_holds_it_is_refused_by_line_and_field() {
        let whole = r#""input_length": 600, "output_length": 3, "hash_ids": [1, 2]"#;
        for (line, start) in [
            (format!(r#"{{"timestamp": 1e999, {whole}}}"#), "line: number out of range"),
            (format!(r#"{{"timestamp": null, {whole}}}"#), "timestamp: it is a number"),
            (format!(r#"{{"timestamp": true, {whole}}}"#), "timestamp: it is a number"),
            (format!(r#"{{"timestamp": 1, "timestamp": 2, {whole}}}"#), "line: duplicate field `timestamp`"),
            (format!(r#"{{"timestamp": 1, {whole}}} {{}}"#), "line: trailing characters"),
            (
                r#"{"timestamp": 1, "input_length": 4294967296, "output_length": 3, "hash_ids": []}"#.into(),
                "input_length: ",
            ),
            (r#"{"timestamp": 1, "input_length": 600.5, "output_length": 3, "hash_ids": []}"#.into(), "input_length: "),
            (
                r#"{"timestamp": 1, "input_length": 6, "output_length": 3, "hash_ids": {}}"#.into(),
                "hash_ids: it is a li",
            ),
            (
                r#"{"timestamp": 1, "input_length": 6, "output_length": 3, "hash_ids": [-1]}"#.into(),
                "hash_ids: it is a li",
            ),
            (
                r#"{"timestamp": 1, "input_length": 6, "output_length": 3, "hash_ids": [[1]]}"#.into(),
                "hash_ids: it is a li",
            ),
            (
                r#"{"timestamp": 1, "input_length": 6, "output_length": 3, "hash_ids": [18446744073709551616]}"#.into(),
                "hash_ids: ",
            ),
            (
                r#"{"timestamp": 1, "input_length": 4294967295, "output_length": 3, "hash_ids": [1]}"#.into(),
                "hash_ids: 4294967295",
            ),
            ("null".into(), "line: it is no object"),
            ("\u{feff}{}".into(), "line: "),
            ("[".repeat(200), "line: "),
            (r#"{"timestamp": 1"#.into(), "line: it ends before"),
        ] {
            let said = refused(&line);
            assert!(said.starts_with(&format!("a.jsonl, line 1: {start}")), "{line} -> {said}");
        }
        // Not text at all, and a line that never ends: an error, no panic.
        let bytes = parse(Path::new("a.jsonl"), &b"\xff\xfe\x00\n"[..]).unwrap_err().to_string();
        assert!(bytes.starts_with("a.jsonl, line 1: line: it is no text in UTF-8; unpack"), "{bytes}");
        assert!(read(Path::new("/")).unwrap_err().to_string().starts_with("/: "));
    }

    #[test]
    fn errors_name_line_and_field() {
        let good = r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#;
        let with = |line: &str| refused(&format!("{good}\n\n{line}\n"));
        assert_eq!(
            with(r#"{"timestamp": 5, "input_length": "600", "output_length": 3, "hash_ids": [1, 2]}"#),
            r#"a.jsonl, line 3: input_length: it is a number of tokens below 2^32, not "600""#
        );
        assert_eq!(
            with(r#"{"timestamp": 5, "input_length": 600, "hash_ids": [1, 2]}"#),
            "a.jsonl, line 3: output_length: it is missing; it is a number of tokens below 2^32"
        );
        for (line, start) in [
            (
                r#"{"timestamp": 4, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#,
                "timestamp: it arrives",
            ),
            (
                r#"{"timestamp": -4, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#,
                "timestamp: -4 is no",
            ),
            (r#"{"timestamp": 6, "input_length": 600, "output_length": -3, "hash_ids": [1, 2]}"#, "output_length: "),
            (r#"{"timestamp": 6, "input_length": 0, "output_length": 3, "hash_ids": []}"#, "input_length: its prompt"),
            (
                r#"{"timestamp": 6, "input_length": 600, "output_length": 3, "hash_ids": [1]}"#,
                "hash_ids: 600 tokens are 2",
            ),
            (
                r#"{"timestamp": 6, "input_length": 600, "output_length": 3, "hash_ids": [3, 2]}"#,
                "hash_ids: block 2 foll",
            ),
            (
                r#"{"timestamp": 6, "input_length": 600, "output_length": 3, "hash_ids": [3, 3]}"#,
                "hash_ids: block 3 is i",
            ),
            (
                r#"{"timestamp": 6, "input_length": 600, "output_length": 3, "hash_ids": [3, 2.5]}"#,
                "hash_ids: it is a li",
            ),
            ("[]", "line: it is no object"),
            ("{", "line: it ends before"),
        ] {
            let said = with(line);
            assert!(said.starts_with(&format!("a.jsonl, line 3: {start}")), "{line} -> {said}");
        }
        assert!(refused("\n").starts_with("a.jsonl: no requests"));
        assert!(read(Path::new("/there/is/none")).unwrap_err().to_string().starts_with("/there/is/none: "));
    }
}
