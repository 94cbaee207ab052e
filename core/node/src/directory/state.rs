//! What a shard must remember over a restart: its term, what was cleared, who owned segments. A few lines of text, replaced
//! as a whole and flushed before the change is answered.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use millpond_core::directory::{NodeId, Stamp};

/// The state file cannot be used.
///
/// Example: `core/node/src/directory/state.rs`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// It cannot be read or written.
    #[error("the directory's state file {path} cannot be used: {source}; check the directory and its permissions", path = .path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It holds something else.
    #[error("{path} is no directory state: line {line} makes no sense; remove the file if the store may start empty", path = .path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// Where.
        line: usize,
    },
}

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) term: u64,
    pub(super) cleared: Stamp,
    pub(super) nodes: Vec<NodeId>,
}

const NAME: &str = "directory.state";

/// Where the state lies in `dir`.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join(NAME)
}

/// The state in `dir`; `None` if there never was one.
pub(super) fn read(dir: &Path) -> Result<Option<State>, StateError> {
    let path = path(dir);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(StateError::Io { path, source }),
    };
    let mut state = State::default();
    for (number, line) in (1..).zip(text.lines()) {
        parse(line, &mut state).ok_or(StateError::Malformed { path: path.clone(), line: number })?;
    }
    Ok(Some(state))
}

fn parse(line: &str, state: &mut State) -> Option<()> {
    let mut words = line.split(' ');
    match words.next()? {
        "term" => state.term = words.next()?.parse().ok()?,
        "cleared" => {
            state.cleared = Stamp { term: words.next()?.parse().ok()?, n: words.next()?.parse().ok()? };
        }
        "node" => {
            let digits = words.next().filter(|digits| digits.len() == 32)?;
            state.nodes.push(NodeId(u128::from_str_radix(digits, 16).ok()?.to_be_bytes()));
        }
        _ => return None,
    }
    words.next().is_none().then_some(())
}

/// Replaces the state in `dir`, durably.
pub(super) fn write(dir: &Path, state: &State) -> Result<(), StateError> {
    let path = path(dir);
    let mut text = format!("term {}\ncleared {} {}\n", state.term, state.cleared.term, state.cleared.n);
    for node in &state.nodes {
        text.push_str(&format!("node {:032x}\n", u128::from_be_bytes(node.0)));
    }
    replace(dir, &path, text.as_bytes()).map_err(|source| StateError::Io { path, source })
}

fn replace(dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reads_back_as_it_was_and_garbage_names_its_line() {
        let dir = std::env::temp_dir().join(format!("millpond-state-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        assert_eq!(read(&dir).unwrap(), None);
        let nodes = vec![NodeId([0; 16]), NodeId([0xfe; 16])];
        let state = State { term: 7, cleared: Stamp { term: 6, n: 5 }, nodes };
        write(&dir, &state).unwrap();
        assert_eq!(read(&dir).unwrap(), Some(state));
        fs::write(path(&dir), "term 7\nsurprise\n").unwrap();
        assert!(matches!(read(&dir), Err(StateError::Malformed { line: 2, .. })));
        fs::remove_dir_all(&dir).unwrap();
    }
}
