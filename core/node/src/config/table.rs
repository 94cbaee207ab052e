//! Small TOML files that a configuration names: sections of fields. What is wrong with one is said by file, line and field.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::settings::{line_of, nearest};

/// A file that a configuration names cannot be used.
///
/// ```
/// use millpond_node::config::FileError;
/// let error = FileError::Line { path: "p.toml".into(), line: 3, field: "link.latency".into(), what: "-1 is below 0".into() };
/// assert_eq!(error.to_string(), "p.toml, line 3: link.latency: -1 is below 0");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A line is wrong.
    #[error("{}, line {line}: {field}: {what}", path.display())]
    Line {
        /// Of which file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// Which field; `file` if it is no TOML.
        field: String,
        /// What is wrong with it.
        what: String,
    },
}

/// What stands at a field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Number(f64),
    Texts(Vec<String>),
}

/// A field with its line.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) value: Value,
    pub(super) line: usize,
}

/// A section with its line; that without a name holds what stands before the first.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) name: String,
    pub(super) line: usize,
    pub(super) fields: BTreeMap<String, Field>,
}

/// A file that was read.
pub(super) struct Table {
    path: PathBuf,
    pub(super) sections: Vec<Section>,
}

impl Table {
    pub(super) fn read(path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path);
        Self::parse(path, &text.map_err(|source| FileError::File { path: path.to_owned(), source })?)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let wrong = |line, field: &str, what: &str| FileError::Line {
            path: path.to_owned(),
            line,
            field: field.to_owned(),
            what: what.to_owned(),
        };
        let table = DeTable::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            wrong(line, "file", error.message().trim())
        })?;
        let mut sections = vec![Section { name: String::new(), line: 1, fields: BTreeMap::new() }];
        for (name, value) in table.get_ref().iter() {
            let (key, line) = (name.get_ref().to_string(), line_of(text, name.span().start));
            let DeValue::Table(fields) = value.get_ref() else {
                let value = read(value.get_ref()).ok_or_else(|| wrong(line, &key, WANTS))?;
                sections[0].fields.insert(key, Field { value, line });
                continue;
            };
            let mut section = Section { name: key, line, fields: BTreeMap::new() };
            for (name, value) in fields.iter() {
                let line = line_of(text, name.span().start);
                let field = format!("{}.{}", section.name, name.get_ref());
                let value = read(value.get_ref()).ok_or_else(|| wrong(line, &field, WANTS))?;
                section.fields.insert(name.get_ref().to_string(), Field { value, line });
            }
            sections.push(section);
        }
        Ok(Self { path: path.to_owned(), sections })
    }

    /// The error that a line is.
    pub(super) fn wrong(&self, line: usize, field: &str, what: impl Into<String>) -> FileError {
        FileError::Line { path: self.path.clone(), line, field: field.to_owned(), what: what.into() }
    }

    /// The error that a name is which is none of `known`.
    pub(super) fn unknown<'n>(&self, line: usize, field: &str, known: impl Iterator<Item = &'n str>) -> FileError {
        self.wrong(line, field, format!("there is no such field; did you mean `{}`?", nearest(field, known)))
    }
}

const WANTS: &str = "it must be a number, a string or an array of strings";

fn read(value: &DeValue<'_>) -> Option<Value> {
    match value {
        DeValue::Float(number) => number.as_str().parse().ok().map(Value::Number),
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse().ok().map(Value::Number),
        DeValue::String(text) => Some(Value::Texts(vec![text.to_string()])),
        DeValue::Array(values) => {
            let texts = values.iter().map(|value| value.get_ref().as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>().map(Value::Texts)
        }
        _ => None,
    }
}
