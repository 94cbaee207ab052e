//! Fields of a JSON object, taken out one by one with errors that name them.
//!
//! `null` is the same as absent, and fields that nobody asks for are accepted, as OpenAI's clients expect.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::message::ApiError;

/// One JSON object and the path that leads to it (empty at the top).
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
}

/// Parses a body; errors name line and column.
pub(super) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    if body.is_empty() {
        return Err(ApiError::invalid("the body is empty; send a JSON object"));
    }
    serde_json::from_slice(body)
        .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")).coded("invalid_json"))
}

impl<'a> Fields<'a> {
    pub(super) fn of(value: &'a Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(object) => Ok(Self { object, path: path.into() }),
            other => {
                let place = if path.is_empty() { "the body".into() } else { format!("`{path}`") };
                let error = ApiError::invalid(format!("{place} must be a JSON object, not {}", kind(other)));
                Err(if path.is_empty() { error } else { error.about(path) })
            }
        }
    }

    /// The path of field `name`.
    pub(super) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    /// The field `name` unless it is absent or null.
    pub(super) fn value(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// The error for a field of the wrong type or outside its range.
    pub(super) fn wrong(&self, name: &str, wants: &str, value: &Value) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(format!("`{path}` must be {wants}, not {}", shown(value))).about(path)
    }

    /// The error for a required field that is absent.
    pub(super) fn missing(&self, name: &str, wants: &str) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(format!("`{path}` is missing; it must be {wants}")).about(path)
    }

    /// A text, if present.
    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", other)),
        }
    }

    /// A text that must be there.
    pub(super) fn text_needed(&self, name: &str) -> Result<&'a str, ApiError> {
        self.text(name)?.ok_or_else(|| self.missing(name, "a string"))
    }

    /// `true` or `false`, false if absent.
    pub(super) fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.value(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(name, "true or false", other)),
        }
    }

    /// An integer within `range`, if present.
    pub(super) fn integer(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value.as_u64() {
            Some(integer) if range.contains(&integer) => Ok(Some(integer)),
            _ => {
                let wants = format!("an integer from {} to {}", range.start(), range.end());
                Err(self.wrong(name, &wants, value))
            }
        }
    }

    /// A number within `range`, if present.
    pub(super) fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let wants = format!("a number from {} to {}", range.start(), range.end());
                Err(self.wrong(name, &wants, value))
            }
        }
    }

    /// A text or up to `count_max` non-empty texts; empty if absent.
    pub(super) fn texts(&self, name: &str, count_max: usize) -> Result<Vec<String>, ApiError> {
        let wants = format!("a non-empty string or up to {count_max} of them");
        let texts = match self.value(name) {
            None => return Ok(Vec::new()),
            Some(value @ Value::String(_)) => std::slice::from_ref(value),
            Some(Value::Array(values)) => values.as_slice(),
            Some(other) => return Err(self.wrong(name, &wants, other)),
        };
        if texts.len() > count_max {
            let path = self.path(name);
            return Err(ApiError::invalid(format!("`{path}` must be {wants}, not {}", texts.len())).about(path));
        }
        texts
            .iter()
            .map(|value| match value {
                Value::String(text) if !text.is_empty() => Ok(text.clone()),
                other => Err(self.wrong(name, &wants, other)),
            })
            .collect()
    }

    /// Refuses a feature this server lacks, unless the field says that it is not wanted.
    pub(super) fn unsupported(&self, name: &str, unwanted: &[Value]) -> Result<(), ApiError> {
        match self.value(name) {
            None => Ok(()),
            Some(value) if unwanted.iter().any(|other| same(value, other)) => Ok(()),
            Some(value) => {
                let path = self.path(name);
                let message = format!("`{path}` = {} is not supported here; leave it out", shown(value));
                Err(ApiError::invalid(message).about(path).coded("unsupported_parameter"))
            }
        }
    }
}

/// Equal, taking 0 and 0.0 for the same.
fn same(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The value itself while it is short, otherwise its kind.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).into(),
        Value::String(text) if text.len() > 40 => kind(value).into(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn malformed_json_is_reported_with_line_and_column() {
        let error = parse(b"{\n \"model\": }").unwrap_err();
        assert!(error.message.contains("line 2 column 11"), "{error}");
    }

    #[test]
    fn a_wrong_type_names_field_wish_and_value() {
        let value = json!({"n": "one", "t": 3.5, "s": ["a", ""]});
        let fields = Fields::of(&value, "").unwrap();
        let error = fields.integer("n", 1..=5).unwrap_err();
        assert_eq!(error.message, "`n` must be an integer from 1 to 5, not \"one\"");
        assert_eq!(error.param.as_deref(), Some("n"));
        assert!(fields.number("t", 0.0..=2.0).is_err());
        assert!(fields.texts("s", 4).is_err());
        assert!(fields.texts("s", 1).is_err());
    }

    #[test]
    fn null_is_the_same_as_absent() {
        let value = json!({"n": null});
        let fields = Fields::of(&value, "").unwrap();
        assert_eq!(fields.integer("n", 1..=5).unwrap(), None);
        assert!(fields.unsupported("n", &[]).is_ok());
    }
}
