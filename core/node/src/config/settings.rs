//! Where each setting's value comes from: the file, the environment, or a default.
//!
//! A key is declared by reading it, in one place, with its default; so the list of known keys, the names of environment
//! variables and what `--print-config` shows cannot differ from what is used. What the file holds beyond that is an error.

use std::collections::BTreeMap;
use std::fmt;

use toml::de::{DeTable, DeValue};

use super::{ConfigError, parse_size};

/// The setting whose value nobody is shown.
const SECRET: &str = "node.key";

/// Where a value came from.
///
/// ```
/// use millpond_node::config::Origin;
/// assert_eq!(Origin::File { line: 3 }.to_string(), "line 3");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The file, at this line.
    File {
        /// Counted from 1.
        line: usize,
    },
    /// This environment variable.
    Environment {
        /// Its name.
        name: String,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { line } => write!(f, "line {line}"),
            Self::Environment { name } => f.write_str(name),
        }
    }
}

/// One setting as it is in force.
///
/// ```
/// let config = millpond_node::config::Config::parse("[decode]\nmemory = \"2GiB\"", |_| None).unwrap();
/// let memory = config.settings().iter().find(|setting| setting.key == "decode.memory").unwrap();
/// assert_eq!((memory.value.as_str(), memory.origin.to_string().as_str()), ("\"2GiB\"", "line 2"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Section and name, with a dot between.
    pub key: String,
    /// The value in TOML.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

/// A value in the file or the environment.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Text(String),
    Integer(u64),
    Flag(bool),
    Texts(Vec<String>),
}

impl Value {
    fn shown(&self) -> String {
        match self {
            Self::Text(text) => toml::Value::from(text.as_str()).to_string(),
            Self::Integer(integer) => integer.to_string(),
            Self::Flag(flag) => flag.to_string(),
            Self::Texts(texts) => toml::Value::from(texts.clone()).to_string(),
        }
    }
}

#[derive(Clone, Debug)]
struct Given {
    value: Value,
    line: usize,
}

/// The file's and the environment's values, on their way to becoming settings.
pub(super) struct Reader<'a> {
    given: BTreeMap<String, Given>,
    /// Sections of the file and their lines, also empty ones.
    sections: BTreeMap<String, usize>,
    environment: &'a dyn Fn(&str) -> Option<String>,
    settings: Vec<Setting>,
    known_sections: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(text: &str, environment: &'a dyn Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let syntax = |error: toml::de::Error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            ConfigError::Syntax { line, reason: error.message().trim().to_owned() }
        };
        let table = DeTable::parse(text).map_err(syntax)?;
        let mut reader = Self {
            given: BTreeMap::new(),
            sections: BTreeMap::new(),
            environment,
            settings: Vec::new(),
            known_sections: Vec::new(),
        };
        for (section, value) in table.get_ref().iter() {
            let line = line_of(text, section.span().start);
            let DeValue::Table(fields) = value.get_ref() else {
                let key = section.get_ref().to_string();
                return Err(ConfigError::OutsideSection { key, line });
            };
            reader.sections.insert(section.get_ref().to_string(), line);
            for (name, value) in fields.iter() {
                let key = format!("{}.{}", section.get_ref(), name.get_ref());
                let line = line_of(text, name.span().start);
                let value = file_value(value.get_ref()).ok_or_else(|| ConfigError::Type {
                    key: key.clone(),
                    origin: Origin::File { line },
                    wants: "a string, a whole number from 0, true or false, or an array of strings",
                })?;
                reader.given.insert(key, Given { value, line });
            }
        }
        Ok(reader)
    }

    /// Declares a section; says whether the file has it.
    pub(super) fn section(&mut self, name: &'static str) -> bool {
        self.known_sections.push(name);
        self.sections.contains_key(name)
    }

    /// Takes the value of `key` and where it came from, noting it as in force.
    fn take(&mut self, key: &'static str, default: Value) -> (Value, Origin) {
        let given = self.given.remove(key);
        let name = variable(key);
        let (value, origin) = match ((self.environment)(&name), given) {
            (Some(text), _) => (from_environment(text, &default), Origin::Environment { name }),
            (None, Some(given)) => (given.value, Origin::File { line: given.line }),
            (None, None) => (default, Origin::Default),
        };
        let is_secret = key == SECRET && origin != Origin::Default;
        let shown = if is_secret { "(set)".to_owned() } else { value.shown() };
        self.settings.push(Setting { key: key.into(), value: shown, origin: origin.clone() });
        (value, origin)
    }

    /// A text; the empty one where nothing is set and `default` is empty.
    pub(super) fn text(&mut self, key: &'static str, default: &str) -> Result<(String, Origin), ConfigError> {
        match self.take(key, Value::Text(default.into())) {
            (Value::Text(text), origin) => Ok((text, origin)),
            (_, origin) => Err(ConfigError::Type { key: key.into(), origin, wants: "a string" }),
        }
    }

    /// A text that `parse` understands.
    pub(super) fn parsed<T>(
        &mut self,
        key: &'static str,
        default: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<T, ConfigError> {
        let (text, origin) = self.text(key, default)?;
        parse(&text).map_err(|reason| ConfigError::Value { key: key.into(), origin, reason })
    }

    /// A size: a text with a unit, or a number of bytes.
    pub(super) fn size(&mut self, key: &'static str, default: &str) -> Result<u64, ConfigError> {
        let (text, origin) = match self.take(key, Value::Text(default.into())) {
            (Value::Text(text), origin) => (text, origin),
            (Value::Integer(bytes), origin) => (bytes.to_string(), origin),
            (_, origin) => {
                return Err(ConfigError::Type { key: key.into(), origin, wants: "a size such as \"4KiB\"" });
            }
        };
        parse_size(&text).map_err(|reason| ConfigError::Value { key: key.into(), origin, reason })
    }

    /// A whole number within `range`.
    pub(super) fn integer(
        &mut self,
        key: &'static str,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<u64, ConfigError> {
        match self.take(key, Value::Integer(default)) {
            (Value::Integer(integer), _) if range.contains(&integer) => Ok(integer),
            (Value::Integer(integer), origin) => {
                let reason = format!("{integer} is not from {} to {}", range.start(), range.end());
                Err(ConfigError::Value { key: key.into(), origin, reason })
            }
            (_, origin) => Err(ConfigError::Type { key: key.into(), origin, wants: "a whole number from 0" }),
        }
    }

    /// True or false.
    pub(super) fn flag(&mut self, key: &'static str, default: Value) -> Result<bool, ConfigError> {
        match self.take(key, default) {
            (Value::Flag(flag), _) => Ok(flag),
            (_, origin) => Err(ConfigError::Type { key: key.into(), origin, wants: "true or false" }),
        }
    }

    /// Texts; none by default.
    pub(super) fn texts(&mut self, key: &'static str) -> Result<Vec<String>, ConfigError> {
        match self.take(key, Value::Texts(Vec::new())) {
            (Value::Texts(texts), _) => Ok(texts),
            (Value::Text(text), _) => Ok(vec![text]),
            (_, origin) => Err(ConfigError::Type { key: key.into(), origin, wants: "an array of strings" }),
        }
    }

    /// The settings in force; an error if the file holds anything that was not asked for.
    pub(super) fn finish(self) -> Result<Vec<Setting>, ConfigError> {
        for (section, line) in &self.sections {
            if !self.known_sections.contains(&section.as_str()) {
                let nearest = nearest(section, self.known_sections.iter().copied());
                return Err(ConfigError::UnknownSection { section: section.clone(), line: *line, nearest });
            }
        }
        match self.given.iter().next() {
            None => Ok(self.settings),
            Some((key, given)) => {
                let nearest = nearest(key, self.settings.iter().map(|setting| setting.key.as_str()));
                Err(ConfigError::UnknownKey { key: key.clone(), line: given.line, nearest })
            }
        }
    }
}

/// The environment's name for a setting.
fn variable(key: &str) -> String {
    format!("MILLPOND_{}", key.replace('.', "_").to_uppercase())
}

/// Of `names`, those that begin like a section's settings and are none, and the nearest that is one.
pub(super) fn unknown_variables(names: impl Iterator<Item = String>, settings: &[Setting]) -> Vec<(String, String)> {
    let known: Vec<String> = settings.iter().map(|setting| variable(&setting.key)).collect();
    let section = |key: &str| variable(key.split('.').next().unwrap_or(key)) + "_";
    let looks_like_one = |name: &String| settings.iter().any(|setting| name.starts_with(&section(&setting.key)));
    let unknown = names.filter(|name| looks_like_one(name) && !known.contains(name));
    let with_nearest = |name: String| {
        let nearest = nearest(&name, known.iter().map(String::as_str));
        (name, nearest)
    };
    unknown.map(with_nearest).collect()
}

pub(super) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1
}

fn file_value(value: &DeValue<'_>) -> Option<Value> {
    match value {
        DeValue::String(text) => Some(Value::Text(text.to_string())),
        DeValue::Integer(integer) => u64::from_str_radix(integer.as_str(), integer.radix()).ok().map(Value::Integer),
        DeValue::Boolean(flag) => Some(Value::Flag(*flag)),
        DeValue::Array(values) => {
            let texts = values.iter().map(|value| value.get_ref().as_str().map(str::to_owned));
            texts.collect::<Option<Vec<_>>>().map(Value::Texts)
        }
        _ => None,
    }
}

/// The environment holds text only: it is read as what the default is; what does not fit stays text and is refused later.
fn from_environment(text: String, default: &Value) -> Value {
    let read = match default {
        Value::Text(_) => None,
        Value::Integer(_) => text.parse().ok().map(Value::Integer),
        Value::Flag(_) => text.parse().ok().map(Value::Flag),
        Value::Texts(_) => {
            let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
            Some(Value::Texts(parts.map(str::to_owned).collect()))
        }
    };
    read.unwrap_or(Value::Text(text))
}

/// The known name that is most like `name`.
pub(super) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> String {
    known
        .max_by(|a, b| strsim::jaro_winkler(name, a).total_cmp(&strsim::jaro_winkler(name, b)))
        .unwrap_or("")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_told_apart_from_other_peoples() {
        let setting = |key: &str| Setting { key: key.into(), value: String::new(), origin: Origin::Default };
        let names = ["MILLPOND_NODE_LISTN", "MILLPOND_NODE_LISTEN", "MILLPOND_LOG", "PATH"].map(str::to_owned);
        let unknown = unknown_variables(names.into_iter(), &[setting("node.listen"), setting("store.size")]);
        assert_eq!(unknown, [("MILLPOND_NODE_LISTN".to_owned(), "MILLPOND_NODE_LISTEN".to_owned())]);
    }
}
