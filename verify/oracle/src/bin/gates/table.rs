//! The table of accepted figures, and the comparison with it.

use std::fmt;

/// Percent that an operation may cost more than the table says.
pub(crate) const MARGIN: u64 = 10;
/// The same where another compiler made the program than the table's.
pub(crate) const MARGIN_OTHER_COMPILER: u64 = 25;

/// Accepted instructions per operation, on one architecture and by one compiler.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// The architecture, as Rust calls it.
    pub(crate) machine: String,
    /// What `rustc --version` said.
    pub(crate) compiler: String,
    /// Gate and instructions per operation.
    pub(crate) figures: Vec<(String, u64)>,
}

/// How a count compares with the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Within the margin.
    Holds,
    /// Below it by more than the margin.
    Cheaper,
    /// Above it by more than the margin.
    TooDear,
}

/// Compares a count with the accepted one; `margin` is in percent.
pub(crate) fn verdict(now: u64, before: u64, margin: u64) -> Verdict {
    if now * 100 > before * (100 + margin) {
        Verdict::TooDear
    } else if now * (100 + margin) < before * 100 {
        Verdict::Cheaper
    } else {
        Verdict::Holds
    }
}

impl Table {
    /// Reads a table. `Err` says which line is no figure.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut table = Self { machine: String::new(), compiler: String::new(), figures: Vec::new() };
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            let (name, value) = line.split_once(" = ").ok_or_else(|| format!("no `name = value`: {line}"))?;
            match name {
                "machine" => value.clone_into(&mut table.machine),
                "compiler" => value.clone_into(&mut table.compiler),
                _ => {
                    let figure = value.parse().map_err(|_| format!("not a number of instructions: {line}"))?;
                    table.figures.push((name.to_owned(), figure));
                }
            }
        }
        Ok(table)
    }

    /// Percent that this compiler's program may cost more.
    pub(crate) fn margin(&self, compiler: &str) -> u64 {
        if self.compiler == compiler { MARGIN } else { MARGIN_OTHER_COMPILER }
    }

    /// The accepted figure of a gate.
    pub(crate) fn figure(&self, name: &str) -> Option<u64> {
        self.figures.iter().find(|(other, _)| other == name).map(|(_, figure)| *figure)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# Instructions per operation, counted by callgrind. `cargo run --profile gates -p millpond-oracle --bin gates`"
        )?;
        writeln!(f, "# compares; with `-- --accept` it writes this file anew.")?;
        writeln!(f, "machine = {}\ncompiler = {}", self.machine, self.compiler)?;
        self.figures.iter().try_for_each(|(name, figure)| writeln!(f, "{name} = {figure}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_margin_is_too_dear_and_the_margin_is_not() {
        assert_eq!(verdict(110, 100, 10), Verdict::Holds);
        assert_eq!(verdict(111, 100, 10), Verdict::TooDear);
        assert_eq!((verdict(91, 100, 10), verdict(90, 100, 10)), (Verdict::Holds, Verdict::Cheaper));
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let table = Table {
            machine: "x86_64".into(),
            compiler: "rustc 1.95.0 (59807616e 2026-04-14)".into(),
            figures: vec![("page/allocate+free".into(), 57)],
        };
        assert_eq!(Table::parse(&table.to_string()).as_ref(), Ok(&table));
        assert_eq!((table.margin(&table.compiler), table.margin("rustc 2")), (MARGIN, MARGIN_OTHER_COMPILER));
        assert!(Table::parse("page = many").is_err());
    }
}
