//! Tenants in a file: a section each, with its API keys and its weight.
//!
//! ```toml
//! [alice]
//! keys = ["sk-1f0c", "sk-77aa"]    # whoever sends one of them is alice
//! weight = 2                       # her fair share, beside that of others; 1 if it is not said
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use super::table::{Field, FileError, Table, Value};
use crate::router::{ApiKeys, Tenant};

/// Tenants at most: each has metrics of its own.
const TENANTS_MAX: usize = 256;
/// Bytes of a name.
const NAME_LEN_MAX: usize = 64;

/// Reads tenants and their keys.
///
/// # Errors
/// The file cannot be read, or makes no sense: the first line that does not. No key is ever part of an error.
///
/// ```no_run
/// let keys = millpond_node::config::tenants("tenants.toml".as_ref()).unwrap();
/// ```
pub fn tenants(path: &Path) -> Result<ApiKeys, FileError> {
    read(&Table::read(path)?)
}

fn read(table: &Table) -> Result<ApiKeys, FileError> {
    let mut keys = ApiKeys::default();
    if let Some((name, field)) = table.sections[0].fields.iter().next() {
        return Err(table.wrong(field.line, name, "it stands outside a section; write it below one such as [alice]"));
    }
    for section in &table.sections[1..] {
        let name = &section.name;
        if name.len() > NAME_LEN_MAX {
            return Err(table.wrong(section.line, name, format!("a name has at most {NAME_LEN_MAX} bytes")));
        }
        if let Some((unknown, field)) =
            section.fields.iter().find(|(name, _)| !["keys", "weight"].contains(&name.as_str()))
        {
            return Err(table.unknown(field.line, &format!("{name}.{unknown}"), ["keys", "weight"].into_iter()));
        }
        let weight = weight(table, name, &section.fields)?;
        let field = section.fields.get("keys");
        let line = field.map_or(section.line, |field| field.line);
        let wrong = |what: &str| Err(table.wrong(line, &format!("{name}.keys"), what));
        let Some(Value::Texts(texts)) = field.map(|field| &field.value) else {
            return wrong("it must be a string or an array of strings: the keys by which the tenant is known");
        };
        if texts.is_empty() || texts.iter().any(String::is_empty) {
            return wrong("it must hold at least one key, and none that is empty");
        }
        if keys.len() >= TENANTS_MAX {
            return wrong("there are more tenants than 256");
        }
        if !keys.add(Tenant { name: name.clone(), weight }, texts) {
            return wrong("one of these keys belongs to another tenant, or stands here twice");
        }
    }
    if keys.is_empty() {
        return Err(table.wrong(1, "file", "no tenant is in it; a section is like [alice] with keys = [\"sk-...\"]"));
    }
    Ok(keys)
}

fn weight(table: &Table, name: &str, fields: &BTreeMap<String, Field>) -> Result<f64, FileError> {
    let Some(field) = fields.get("weight") else { return Ok(1.0) };
    match field.value {
        Value::Number(weight) if weight > 0.0 && weight.is_finite() => Ok(weight),
        _ => Err(table.wrong(field.line, &format!("{name}.weight"), "it must be a number above 0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<ApiKeys, String> {
        let table = Table::parse(Path::new("t.toml"), text).map_err(|error| error.to_string())?;
        read(&table).map_err(|error| error.to_string())
    }

    #[test]
    fn tenants_are_known_by_any_of_their_keys() {
        let keys = parsed("[bob]\nkeys = \"k3\"\n[alice]\nkeys = [\"k1\", \"k2\"]\nweight = 2.5\n").unwrap();
        let name = |key| keys.tenant(Some(key)).map(|tenant| tenant.unwrap().name.clone());
        assert_eq!((name("k1"), name("k2"), name("k3")), (Ok("alice".into()), Ok("alice".into()), Ok("bob".into())));
        let weight = |key| keys.tenant(Some(key)).unwrap().unwrap().weight;
        assert_eq!((weight("k2"), weight("k3")), (2.5, 1.0));
        assert!(!format!("{keys:?}").contains("k1"), "keys are not shown");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_no_key_is_shown() {
        for (text, said) in [
            ("", "t.toml, line 1: file: no tenant is in it"),
            ("keys = \"secret\"", "t.toml, line 1: keys: it stands outside a section"),
            (
                "[a]\nkeys = \"secret\"\nwieght = 2",
                "t.toml, line 3: a.wieght: there is no such field; did you mean `weight`?",
            ),
            ("[a]\nkeys = \"secret\"\nweight = 0", "t.toml, line 3: a.weight: it must be a number above 0"),
            ("[a]\nweight = 1", "t.toml, line 1: a.keys: it must be a string or an array"),
            ("[a]\nkeys = []", "t.toml, line 2: a.keys: it must hold at least one key"),
            (
                "[a]\nkeys = \"secret\"\n[b]\nkeys = [\"x\", \"secret\"]",
                "t.toml, line 4: b.keys: one of these keys belongs",
            ),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.starts_with(said) && !error.contains("secret"), "{error}");
        }
    }
}
