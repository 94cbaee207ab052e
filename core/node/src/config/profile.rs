//! Cost profiles in files: what a class of instances costs and holds (`core::sched::cost`).
//!
//! ```toml
//! block_tokens = 512
//! kv_bytes_per_token = 327680
//! cache_blocks = 5859
//! decode_tokens_max = 1373291
//! [prefill]                     # seconds: fixed + linear * new + quadratic * (all^2 - reused^2)
//! fixed = 0.0
//! linear = 1.155e-4
//! quadratic = 7.2e-10
//! [decode]                      # seconds of a step: fixed + per_request * requests + per_token * tokens of context
//! fixed = 0.026
//! per_request = 0.003
//! per_token = 3.6e-8
//! [link]
//! bytes_per_second = 87e9
//! latency = 1e-4
//! ```

use std::path::Path;

use millpond_core::sched::cost::Profile;

use super::table::{Field, FileError, Table, Value};

/// Reads a profile; what the file does not say is as in `base`.
///
/// # Errors
/// The file cannot be read, or a field is unknown or out of range: the first one, with its line.
///
/// ```no_run
/// use millpond_core::sched::cost::Profile;
/// let profile = millpond_node::config::profile("h800.toml".as_ref(), Profile::default()).unwrap();
/// ```
pub fn profile(path: &Path, base: Profile) -> Result<Profile, FileError> {
    read(&Table::read(path)?, base)
}

/// Seconds and rates.
const REALS: [&str; 8] = [
    "prefill.fixed",
    "prefill.linear",
    "prefill.quadratic",
    "decode.fixed",
    "decode.per_request",
    "decode.per_token",
    "link.bytes_per_second",
    "link.latency",
];
/// Whole numbers.
const WHOLES: [&str; 4] = ["block_tokens", "kv_bytes_per_token", "cache_blocks", "decode_tokens_max"];
/// The largest whole number that every one up to it is exact in a file.
const WHOLE_MAX: f64 = (1_u64 << 53) as f64;

fn read(table: &Table, mut profile: Profile) -> Result<Profile, FileError> {
    for section in &table.sections {
        for (name, field) in &section.fields {
            let key = if section.name.is_empty() { name.clone() } else { format!("{}.{name}", section.name) };
            set(table, &mut profile, &key, field)?;
        }
        let known = ["", "prefill", "decode", "link"];
        if !known.contains(&section.name.as_str()) && section.fields.is_empty() {
            return Err(table.unknown(section.line, &section.name, known.into_iter().skip(1)));
        }
    }
    Ok(profile)
}

fn set(table: &Table, profile: &mut Profile, key: &str, field: &Field) -> Result<(), FileError> {
    let Value::Number(number) = field.value else { return Err(table.wrong(field.line, key, "it must be a number")) };
    let wrong = |what: String| Err(table.wrong(field.line, key, what));
    if let Some(target) = real(profile, key) {
        // A prompt takes time for each of its tokens, and bytes take time.
        let is_positive = matches!(key, "prefill.linear" | "link.bytes_per_second");
        if !number.is_finite() || number < 0.0 || is_positive && number == 0.0 {
            let least = if is_positive { "above 0" } else { "0 or more" };
            return wrong(format!("it must be a number {least}, not {number}"));
        }
        *target = number;
        return Ok(());
    }
    if !WHOLES.contains(&key) {
        return Err(table.unknown(field.line, key, REALS.into_iter().chain(WHOLES)));
    }
    if number.fract() != 0.0 || !(1.0..=WHOLE_MAX).contains(&number) {
        return wrong(format!("it must be a whole number from 1, not {number}"));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "whole, from 1, and exact: checked above"
    )]
    let whole = number as u64;
    let small = u32::try_from(whole);
    match (key, small) {
        ("kv_bytes_per_token", _) => profile.kv_bytes_per_token = whole,
        ("decode_tokens_max", _) => profile.decode_tokens_max = whole,
        ("block_tokens", Ok(small)) => profile.block_tokens = small,
        ("cache_blocks", Ok(small)) => profile.cache_blocks = small,
        _ => return wrong(format!("it must be below 2^32, not {number}")),
    }
    Ok(())
}

fn real<'p>(profile: &'p mut Profile, key: &str) -> Option<&'p mut f64> {
    let Profile { prefill, decode, link, .. } = profile;
    Some(match key {
        "prefill.fixed" => &mut prefill.fixed,
        "prefill.linear" => &mut prefill.linear,
        "prefill.quadratic" => &mut prefill.quadratic,
        "decode.fixed" => &mut decode.fixed,
        "decode.per_request" => &mut decode.per_request,
        "decode.per_token" => &mut decode.per_token,
        "link.bytes_per_second" => &mut link.bytes_per_second,
        "link.latency" => &mut link.latency,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Profile, String> {
        let table = Table::parse(Path::new("p.toml"), text).map_err(|error| error.to_string())?;
        read(&table, Profile::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_may_say_all_or_a_part() {
        let text = "block_tokens = 16\n[prefill]\nlinear = 2e-4\n[link]\nbytes_per_second = 190000000000\n";
        let profile = parsed(text).unwrap();
        assert_eq!((profile.block_tokens, profile.prefill.linear), (16, 2e-4));
        assert_eq!((profile.link.bytes_per_second, profile.decode), (190e9, Profile::default().decode));
        assert_eq!(parsed("").unwrap(), Profile::default());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_field() {
        for (text, said) in [
            (
                "\n[prefill]\nliner = 1.0",
                "p.toml, line 3: prefill.liner: there is no such field; did you mean `prefill.linear`?",
            ),
            ("[decode]\nfixed = \"fast\"", "p.toml, line 2: decode.fixed: it must be a number"),
            ("[decode]\n\nfixed = -1", "p.toml, line 3: decode.fixed: it must be a number 0 or more, not -1"),
            (
                "[link]\nbytes_per_second = 0.0",
                "p.toml, line 2: link.bytes_per_second: it must be a number above 0, not 0",
            ),
            ("[link]\nlatency = inf", "p.toml, line 2: link.latency: it must be a number 0 or more, not inf"),
            ("block_tokens = 1.5", "p.toml, line 1: block_tokens: it must be a whole number from 1, not 1.5"),
            ("cache_blocks = 4294967296", "p.toml, line 1: cache_blocks: it must be below 2^32, not 4294967296"),
            ("[prefil]", "p.toml, line 1: prefil: there is no such field; did you mean `prefill`?"),
            (
                "[link]\nlatency = true",
                "p.toml, line 2: link.latency: it must be a number, a string or an array of strings",
            ),
        ] {
            assert_eq!(parsed(text).unwrap_err(), said);
        }
        assert!(parsed("[link\n").unwrap_err().starts_with("p.toml, line 1: file: "));
        let missing = profile(Path::new("/there/is/none"), Profile::default()).unwrap_err().to_string();
        assert!(missing.starts_with("/there/is/none: "), "{missing}");
    }
}
