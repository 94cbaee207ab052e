//! Mooncake's priority matrix as JSON: read strictly, written as its users know it.
//!
//! `{"cpu:0": [["mlx5_2"], ["mlx5_3"]], "cuda:0": [[…], […]]}`: for each place the preferred NICs and those available
//! besides, by name. A file that is odd in any way is refused whole, with the line that is at fault.

use std::fmt;

use millpond_core::topology::{Inventory, Matrix, MatrixError, Place, Row};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

/// The largest text that is read, in bytes.
pub const MATRIX_LEN_MAX: usize = 1 << 20;
/// Lines of a matrix at most.
pub const ROWS_MAX: usize = 256;

/// A text is no matrix of this machine.
///
/// ```
/// use millpond_core::topology::Inventory;
/// use millpond_hal::probe::matrix::parse;
/// let none = Inventory { nics: &[], spots: &[] };
/// let error = parse(r#"{"cpu:0": [["mlx5_9"], []]}"#, &none).unwrap_err();
/// assert!(error.to_string().contains("cpu:0: the matrix names mlx5_9, which this machine does not have"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Larger than [`MATRIX_LEN_MAX`].
    #[error("the matrix has {len} bytes; {MATRIX_LEN_MAX} are the most that is read")]
    TooLong {
        /// Its length.
        len: usize,
    },
    /// Not an object whose values are arrays of exactly two arrays of names.
    #[error("the matrix is no object of places with two lists of NICs each: {0}")]
    Json(#[from] serde_json::Error),
    /// A line is at fault.
    #[error("{place}: {why}")]
    Row {
        /// The line's place as it was written.
        place: String,
        /// Why.
        why: MatrixError,
    },
}

/// The lines in their order, doubles kept: a map would drop them in silence.
struct Lines(Vec<(String, Sides)>);

/// Preferred and available. A tuple: exactly two.
type Sides = (Vec<String>, Vec<String>);

impl<'de> Deserialize<'de> for Lines {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reading;

        impl<'de> Visitor<'de> for Reading {
            type Value = Lines;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of places")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Lines, A::Error> {
                let mut lines = Vec::new();
                // Bounded by the text.
                while let Some(line) = map.next_entry()? {
                    lines.push(line);
                }
                Ok(Lines(lines))
            }
        }

        deserializer.deserialize_map(Reading)
    }
}

/// Reads a matrix for the machine of `inventory`.
///
/// ```
/// use millpond_core::topology::{At, Inventory, Medium, Nic, Place};
/// use millpond_hal::probe::matrix::{parse, print};
/// let nics = ["mlx5_2", "mlx5_3"].map(|name| Nic::new(name.parse().unwrap(), Medium::Roce, At::default()));
/// let inventory = Inventory { nics: &nics, spots: &[] };
/// let text = r#"{ "cpu:0": [["mlx5_3"], ["mlx5_2"]] }"#;
/// let matrix = parse(text, &inventory).unwrap();
/// assert_eq!(matrix.row(&Place::cpu(0)).unwrap().preferred(), [1]);
/// assert_eq!(parse(&print(&matrix, &inventory), &inventory).unwrap().rows(), matrix.rows());
/// ```
pub fn parse(text: &str, inventory: &Inventory<'_>) -> Result<Matrix<Box<[Row]>>, ParseError> {
    if text.len() > MATRIX_LEN_MAX {
        return Err(ParseError::TooLong { len: text.len() });
    }
    let Lines(lines) = serde_json::from_str(text)?;
    let mut matrix = Matrix::configured(vec![Row::EMPTY; lines.len().min(ROWS_MAX)].into_boxed_slice());
    for (name, (preferred, available)) in lines {
        let added = name.parse::<Place>().map_err(MatrixError::Name).and_then(|place| {
            matrix.add(inventory, place, preferred.iter().map(String::as_str), available.iter().map(String::as_str))
        });
        added.map_err(|why| ParseError::Row { place: name, why })?;
    }
    Ok(matrix)
}

/// Writes a matrix, a place per line. The line of `*` is written only if an operator gave it: readers make it themselves
/// of all NICs.
#[must_use]
pub fn print<S: AsRef<[Row]> + AsMut<[Row]>>(matrix: &Matrix<S>, inventory: &Inventory<'_>) -> String {
    let names = |indexes: &[u8]| -> Vec<&str> {
        indexes.iter().filter_map(|nic| inventory.nics.get(usize::from(*nic))).map(|nic| nic.name.as_str()).collect()
    };
    let is_shown = |row: &&Row| row.place() != Place::ANY || matrix.scope().is_none();
    // Names are visible ASCII: JSON's escapes are those of `serde_json`.
    let line = |row: &Row| {
        let sides = serde_json::json!([names(row.preferred()), names(row.available())]);
        format!("  {}: {sides}", serde_json::json!(row.place().as_str()))
    };
    let lines: Vec<String> = matrix.rows().iter().filter(is_shown).map(line).collect();
    match lines.is_empty() {
        true => "{}".to_owned(),
        false => format!("{{\n{}\n}}", lines.join(",\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millpond_core::topology::{At, Medium, Nic, Scope, Spot};

    fn nics() -> Vec<Nic> {
        ["mlx5_0", "mlx5_1", "mlx5_2"].map(|name| Nic::new(name.parse().unwrap(), Medium::Roce, At::default())).to_vec()
    }

    fn refused(text: &str) -> String {
        let nics = nics();
        let inventory = Inventory { nics: &nics, spots: &[] };
        parse(text, &inventory).expect_err("it is odd").to_string()
    }

    #[test]
    fn what_is_no_matrix_is_refused_and_says_where() {
        for (text, part) in [
            ("", "EOF"),
            ("[]", "an object of places"),
            ("{}x", "trailing"),
            (r#"{"cpu:0": []}"#, "tuple of size 2"),
            (r#"{"cpu:0": [["mlx5_0"]]}"#, "tuple of size 2"),
            (r#"{"cpu:0": [["mlx5_0"], [], []]}"#, "trailing characters"),
            (r#"{"cpu:0": [["mlx5_0"], [1]]}"#, "expected a string"),
            (r#"{"cpu:0": "mlx5_0"}"#, "expected a tuple"),
            (r#"{"cpu": [["mlx5_0"], []]}"#, "cpu: a place is"),
            (r#"{"cpu:0": [["mlx5_7"], []]}"#, "mlx5_7, which this machine does not have"),
            (r#"{"cpu:0": [["mlx5_0"], ["mlx5_0"]]}"#, "names mlx5_0 twice"),
            (r#"{"cpu:0": [["mlx5_0"], []], "cpu:0": [["mlx5_1"], []]}"#, "two lines for cpu:0"),
        ] {
            let said = refused(text);
            assert!(said.contains(part), "{text}: {said}");
        }
        assert!(refused(&" ".repeat(MATRIX_LEN_MAX + 1)).contains("the most that is read"));
        let many: Vec<String> = (0..=ROWS_MAX).map(|node| format!(r#""cpu:{node}": [["mlx5_0"], []]"#)).collect();
        assert!(refused(&format!("{{{}}}", many.join(","))).contains("more than 256 lines"));
    }

    #[test]
    fn an_operators_matrix_is_written_as_it_was_read() {
        let nics = nics();
        let inventory = Inventory { nics: &nics, spots: &[] };
        let text = "{\n  \"cuda:0\": [[\"mlx5_2\",\"mlx5_1\"],[\"mlx5_0\"]],\n  \"*\": [[],[\"mlx5_0\"]]\n}";
        assert_eq!(print(&parse(text, &inventory).expect("a matrix"), &inventory), text);
        assert_eq!(print(&parse("{}", &inventory).expect("a matrix"), &inventory), "{}");
    }

    #[test]
    fn a_discovered_matrix_leaves_the_line_of_anywhere_to_its_reader() {
        let nics = nics();
        let spots = [Spot { place: Place::cpu(0), at: At::default() }];
        let inventory = Inventory { nics: &nics, spots: &spots };
        let matrix = Matrix::discover(&inventory, Scope::Rdma, vec![Row::EMPTY; 2]).expect("room");
        assert_eq!(print(&matrix, &inventory), "{\n  \"cpu:0\": [[\"mlx5_0\",\"mlx5_1\",\"mlx5_2\"],[]]\n}");
    }
}
