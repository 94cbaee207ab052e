//! The rules of ARCHITECTURE.md and STYLE.md that a machine can check: arrows between layers, sizes, where `unsafe` lives.

use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 800;
const RUNTIME_LINES_MAX: usize = 1_200;
const TOP_LEVEL: [&str; 18] = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "STYLE.md",
    "UNSAFE.md",
    "core",
    "deny.toml",
    "fuzz",
    "hal",
    "runtime-smol",
    "runtime-tokio",
    "verify",
    "target",
    ".ci",
];

/// A crate, and the workspace crates and runtimes that it must not name.
const ARROWS: [(&str, &[&str]); 6] = [
    (
        "core/src",
        &["millpond_hal", "millpond_node", "millpond_tokio", "millpond_smol", "tokio", "smol", "async_io", "std::net"],
    ),
    ("hal/src", &["millpond_node", "millpond_tokio", "millpond_smol", "tokio", "smol", "async_io", "futures"]),
    (
        "core/node/src",
        &["millpond_tokio", "millpond_smol", "tokio", "smol", "async_io", "millpond_fuzz", "millpond_verify"],
    ),
    ("runtime-tokio/src", &["millpond_smol", "smol", "millpond_fuzz", "millpond_verify"]),
    ("runtime-smol/src", &["millpond_tokio", "tokio", "millpond_fuzz", "millpond_verify"]),
    ("fuzz/src", &["millpond_node", "millpond_tokio", "millpond_smol", "millpond_verify"]),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("verify lies in the workspace").to_owned()
}

/// Every Rust file below `folder`, with its path relative to the root.
fn sources(folder: &str) -> Vec<(String, String)> {
    let (root, mut found) = (root(), Vec::new());
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder").map(|entry| entry.expect("an entry").path()) {
            let name = entry.strip_prefix(&root).expect("below the root").display().to_string();
            if entry.is_dir() && entry.file_name().is_none_or(|name| name != "target") {
                folders.push(entry);
            } else if entry.extension().is_some_and(|extension| extension == "rs") {
                found.push((name, fs::read_to_string(&entry).expect("a text file")));
            }
        }
    }
    assert!(!found.is_empty(), "{folder} has no sources: the check would prove nothing");
    found
}

fn all_sources() -> Vec<(String, String)> {
    ["core", "hal", "runtime-smol", "runtime-tokio", "fuzz", "verify"]
        .iter()
        .flat_map(|folder| sources(folder))
        .collect()
}

/// Lines that a compiler sees: no comments.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.trim_start().starts_with("//"))
}

/// Whether a line of code names a crate by path (`tokio::…`, `use tokio`).
fn names(line: &str, krate: &str) -> bool {
    let path = format!("{krate}::");
    line.match_indices(&path).any(|(at, _)| {
        !line[..at].chars().next_back().is_some_and(|before| before.is_alphanumeric() || before == '_' || before == ':')
    })
}

#[test]
fn arrows_point_down_only() {
    let mut wrong = Vec::new();
    for (folder, forbidden) in ARROWS {
        for (name, text) in sources(folder) {
            // core/src and core/node/src are two crates; tests inside a crate obey the same arrows.
            for line in code(&text) {
                wrong.extend(
                    forbidden.iter().filter(|krate| names(line, krate)).map(|krate| format!("{name}: {krate}")),
                );
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that ARCHITECTURE.md does not have:\n{}", wrong.join("\n"));
}

#[test]
fn a_forbidden_arrow_is_seen() {
    assert!(names("    tokio::spawn(async {});", "tokio"));
    assert!(names("use smol::Timer;", "smol"));
    assert!(!names("use millpond_tokio::Tokio;", "tokio"));
}

#[test]
fn files_are_small() {
    let big: Vec<String> = all_sources()
        .into_iter()
        .map(|(name, text)| (text.lines().count(), name))
        .filter(|(lines, _)| *lines > FILE_LINES_MAX)
        .map(|(lines, name)| format!("{name}: {lines} lines"))
        .collect();
    assert!(big.is_empty(), "files over {FILE_LINES_MAX} lines:\n{}", big.join("\n"));
}

#[test]
fn runtime_crates_are_thin() {
    for folder in ["runtime-tokio", "runtime-smol"] {
        let lines: usize = sources(&format!("{folder}/src")).iter().map(|(_, text)| text.lines().count()).sum();
        assert!(lines <= RUNTIME_LINES_MAX, "{folder} has {lines} lines; what a node does belongs in core/node");
    }
}

#[test]
fn unsafe_lives_where_unsafe_md_says() {
    let listed = fs::read_to_string(root().join("UNSAFE.md")).expect("UNSAFE.md");
    let mut wrong = Vec::new();
    for folder in ["core", "hal", "runtime-smol", "runtime-tokio", "fuzz", "verify/fake-cuda"] {
        for (name, text) in sources(folder) {
            let uses = code(&text).any(|line| {
                ["unsafe {", "unsafe impl", "unsafe fn", "unsafe trait"].iter().any(|word| line.contains(word))
            });
            if uses && !listed.contains(&format!("`{name}`")) {
                wrong.push(name);
            }
        }
    }
    assert!(wrong.is_empty(), "files with unsafe code that UNSAFE.md does not list:\n{}", wrong.join("\n"));
}

#[test]
fn core_and_node_forbid_unsafe() {
    for library in ["core/src/lib.rs", "core/node/src/lib.rs"] {
        let text = fs::read_to_string(root().join(library)).expect("a library");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{library} must forbid unsafe code");
    }
}

#[test]
fn no_left_overs() {
    // Put together here, so that this file does not find itself.
    let words = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("todo", "!("), concat!("unimplemented", "!(")];
    let mut found = Vec::new();
    for (name, text) in all_sources() {
        found.extend(words.iter().filter(|word| text.contains(**word)).map(|word| format!("{name}: {word}")));
    }
    assert!(found.is_empty(), "left-overs:\n{}", found.join("\n"));
}

/// A public type: its file, its name, and the lines of its documentation.
struct Documented {
    file: String,
    name: String,
    doc: Vec<String>,
}

/// The public structs, enums and traits of a file. Lint `unreachable_pub` sees to it that what says `pub` can be named.
fn public_types(file: &str, text: &str) -> Vec<Documented> {
    let (mut doc, mut found) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "unsafe").collect();
        match words[..] {
            ["pub", "struct" | "enum" | "trait", name, ..] if line.starts_with("pub") => {
                let name = name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default().to_owned();
                found.push(Documented { file: file.to_owned(), name, doc: std::mem::take(&mut doc) });
            }
            ["///", ..] => doc.push(line.trim_start_matches("/// ").to_owned()),
            // An item that is none of ours, or a blank line, ends the documentation; attributes do not.
            [] => doc.clear(),
            [first, ..] if ["pub", "fn", "impl", "use", "mod", "const", "type", "}"].contains(&first) => doc.clear(),
            _ => {}
        }
    }
    found
}

/// The public functions and methods of a file that have an example.
fn shown_functions(text: &str) -> Vec<String> {
    let (mut has_example, mut found) = (false, Vec::new());
    for line in text.lines().map(str::trim_start) {
        let signature = line.strip_prefix("pub fn ").or_else(|| line.strip_prefix("pub const fn "));
        match signature {
            Some(rest) if has_example => {
                found.extend(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned));
            }
            _ => {}
        }
        has_example = line.starts_with("/// ```") || has_example && (line.starts_with("///") || line.starts_with("#["));
    }
    found
}

/// Whether a type is shown in use: by an example of its own, or by one that it names, which has to exist. `shown` are the
/// names with an example of their own.
fn is_shown(item: &Documented, shown: &[String], read: impl Fn(&str) -> Option<String>) -> bool {
    if item.doc.iter().any(|line| line.starts_with("```")) {
        return true;
    }
    let Some(example) = item.doc.iter().find_map(|line| line.strip_prefix("Example: ")) else { return false };
    let quoted: Vec<&str> = example.split('`').skip(1).step_by(2).collect();
    match quoted[..] {
        [path, ref word @ ..] if path.ends_with(".rs") => {
            let wanted = word.first().copied().unwrap_or(&item.name);
            let has = |text: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|other| other == wanted);
            read(path).is_some_and(|text| has(&text))
        }
        // Of a method, the last part.
        [name, ..] => shown.iter().any(|other| name.rsplit("::").next() == Some(other)),
        [] => false,
    }
}

#[test]
fn every_public_type_is_shown_in_use() {
    let folders = ["core/src", "core/node/src", "hal/src", "runtime-smol/src", "runtime-tokio/src"];
    let files = folders.iter().flat_map(|folder| sources(folder)).collect::<Vec<_>>();
    let items: Vec<Documented> = files.iter().flat_map(|(name, text)| public_types(name, text)).collect();
    assert!(items.len() > 400, "only {} public types: the check would prove little", items.len());
    // Types, and functions whose example shows several types at once.
    let mut shown: Vec<String> = items
        .iter()
        .filter(|item| item.doc.iter().any(|line| line.starts_with("```")))
        .map(|item| item.name.clone())
        .collect();
    shown.extend(files.iter().flat_map(|(_, text)| shown_functions(text)));
    let read = |path: &str| fs::read_to_string(root().join(path)).ok();
    let hidden: Vec<String> = items
        .iter()
        .filter(|item| !is_shown(item, &shown, read))
        .map(|item| format!("{}: {}", item.file, item.name))
        .collect();
    let advice =
        "give them an example, or a line `Example: [`Type`]`, `Example: `path.rs`` or `Example: `path.rs` (`word`)`";
    assert!(hidden.is_empty(), "public types without an example; {advice}:\n{}", hidden.join("\n"));
}

#[test]
fn a_type_without_an_example_is_seen() {
    let text = "/// A page.\n///\n/// Example: `page.rs` (`take`).\n#[derive(Debug)]\npub struct Page {\n}\n\n/// Bare.\npub enum Bare {}";
    let items = public_types("file.rs", text);
    assert_eq!(items.iter().map(|item| &*item.name).collect::<Vec<_>>(), ["Page", "Bare"]);
    assert!(is_shown(&items[0], &[], |_| Some("pages.take()".to_owned())));
    assert!(!is_shown(&items[0], &[], |_| Some("pages.give()".to_owned())), "the file does not show it");
    assert!(!is_shown(&items[0], &[], |_| None), "there is no such file");
    assert!(!is_shown(&items[1], &["Page".to_owned()], |_| None));
}

#[test]
fn every_file_says_what_it_is() {
    let silent: Vec<String> =
        all_sources().into_iter().filter(|(_, text)| !text.starts_with("//!")).map(|(name, _)| name).collect();
    assert!(silent.is_empty(), "files without a module doc in their first line:\n{}", silent.join("\n"));
}

#[test]
fn the_top_level_has_its_shape() {
    let unknown: Vec<String> = fs::read_dir(root())
        .expect("the root")
        .map(|entry| entry.expect("an entry").file_name().display().to_string())
        .filter(|name| {
            !TOP_LEVEL.contains(&name.as_str())
                && !name.starts_with(".git")
                && name != ".rustfmt.toml"
                && name != ".cargo"
        })
        .collect();
    assert!(unknown.is_empty(), "entries that the top level does not have: {}", unknown.join(", "));
}
