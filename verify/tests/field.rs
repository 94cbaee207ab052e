//! `verify/FIELD.md` says the truth: each number is there once, and each test that it names exists.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("verify lies in the workspace").to_owned()
}

/// All that is wrong with a table, given whether a test of that name exists; and how many of its entries have no test yet.
fn check(table: &str, exists: impl Fn(&str) -> bool) -> (Vec<String>, usize) {
    let (mut wrong, mut expected, mut rows, mut not_yet) = (Vec::new(), Vec::new(), BTreeMap::new(), 0);
    for line in table.lines() {
        if let Some(numbers) = line.strip_prefix("Entries: ") {
            expected.extend(numbers.trim_end_matches('.').split(", ").map(str::to_owned));
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", number, kind, pinned, ""] = cells[..] else { continue };
        if number == "entry" || number.starts_with('-') {
            continue;
        }
        if kind.is_empty() {
            wrong.push(format!("{number}: it does not say what goes wrong"));
        }
        *rows.entry(number.to_owned()).or_insert(0) += 1;
        let named: Vec<&str> = pinned.split('`').skip(1).step_by(2).collect();
        wrong.extend(named.iter().filter(|name| !exists(name)).map(|name| format!("{number}: no test {name}")));
        let is_excused = pinned.starts_with("does not apply because ");
        let is_missing = pinned.contains("not yet: ");
        not_yet += usize::from(is_missing);
        if named.is_empty() && !is_excused && !is_missing {
            wrong.push(format!("{number}: neither a test, nor `does not apply because`, nor `not yet:`"));
        }
    }
    wrong.extend(rows.iter().filter(|(_, count)| **count > 1).map(|(number, _)| format!("{number}: more than once")));
    wrong.extend(rows.keys().filter(|number| !expected.contains(number)).map(|number| format!("{number}: unexpected")));
    wrong.extend(
        expected.iter().filter(|number| !rows.contains_key(*number)).map(|number| format!("{number}: missing")),
    );
    let mut sorted = expected.clone();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() != expected.len() {
        wrong.push("a number is expected twice".to_owned());
    }
    (wrong, not_yet)
}

/// Names of the tests in a file: functions behind `#[test]`, and those that a macro makes tests of.
fn tests(text: &str, is_suite: bool) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut names = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some((before, rest)) = line.split_once("fn ") else { continue };
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let is_test =
            lines[at.saturating_sub(3)..at].iter().rev().take_while(|line| line.trim_start().starts_with("#["));
        let is_test = is_test.into_iter().any(|line| line.contains("#[test]"));
        // A suite over runtimes names each of its functions once more, in the list that makes them tests.
        let is_listed = is_suite && text.matches(name).count() > 1;
        if !name.is_empty() && !before.contains("//") && (is_test || is_listed) {
            names.push(name.to_owned());
        }
    }
    names
}

fn all_tests() -> Vec<String> {
    let (root, mut names) = (root(), Vec::new());
    let mut folders: Vec<PathBuf> =
        ["core", "hal", "runtime-smol", "runtime-tokio", "fuzz", "verify"].map(|folder| root.join(folder)).into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() && entry.file_name().is_none_or(|name| name != "target") {
                folders.push(entry);
            } else if entry.extension().is_some_and(|extension| extension == "rs") {
                let is_suite = entry.to_string_lossy().contains("verify/tests/runtimes/");
                names.extend(tests(&fs::read_to_string(&entry).expect("a text file"), is_suite));
            }
        }
    }
    names
}

#[test]
fn every_entry_of_the_field_is_pinned_once_by_tests_that_exist() {
    let table = fs::read_to_string(root().join("verify/FIELD.md")).expect("verify/FIELD.md");
    let names = all_tests();
    assert!(names.len() > 300, "only {} tests were found: the check would prove little", names.len());
    let (wrong, not_yet) = check(&table, |name| names.iter().any(|known| known == name));
    assert!(wrong.is_empty(), "verify/FIELD.md:\n{}", wrong.join("\n"));
    eprintln!("{not_yet} entries wait for a test, in part or whole");
}

#[test]
fn a_table_that_is_wrong_is_seen() {
    let good = "Entries: 1, W2, 3.\n| entry | what goes wrong | pinned by |\n|---|---|---|\n\
        | 1 | it breaks | `one` and `two` |\n| W2 | it hangs | does not apply because it has none |\n\
        | 3 | it leaks | not yet: it is being built |\n";
    let exists = |name: &str| ["one", "two"].contains(&name);
    assert_eq!(check(good, exists), (vec![], 1));
    for (from, to, said) in [
        ("`two`", "`three`", "1: no test three"),
        ("| 3 | it leaks", "| 1 | it leaks", "1: more than once"),
        ("| 3 | it leaks", "| 4 | it leaks", "4: unexpected"),
        ("| 3 | it leaks | not yet: it is being built |\n", "", "3: missing"),
        ("does not apply because it has none", "fine", "W2: neither a test"),
        ("| 1 | it breaks", "| 1 | ", "1: it does not say what goes wrong"),
        ("1, W2, 3.", "1, W2, 3, 3.", "a number is expected twice"),
    ] {
        let (wrong, _) = check(&good.replace(from, to), exists);
        assert!(wrong.iter().any(|line| line.contains(said)), "{said}: {wrong:?}");
    }
}

#[test]
fn only_what_runs_counts_as_a_test() {
    let text =
        "#[test]\nfn one() {}\n\nfn helper() {}\n\n#[test]\n#[ignore = \"slow\"]\n    fn two() {}\n// fn gone() {}\n";
    assert_eq!(tests(text, false), ["one", "two"]);
    assert_eq!(tests("all!(three);\npub(crate) async fn three() {}\nfn helper() {}", true), ["three"]);
}

/// A library that is embedded leaves its host's process alone.
#[test]
fn no_library_changes_limits_environment_or_signals_of_its_host() {
    let words = ["set_var(", "setrlimit(", "sigaction(", "signal_hook", "libc::signal(", "process::abort(", "_exit("];
    let mut found = Vec::new();
    for folder in ["core/src", "hal/src", "core/node/src/engine", "core/node/src/store", "core/node/src/client"] {
        let mut folders = vec![root().join(folder)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).expect("a readable folder").map(|entry| entry.expect("an entry").path())
            {
                if entry.is_dir() {
                    folders.push(entry);
                } else if entry.ends_with("tests.rs") {
                    // A test that forks ends its child.
                } else if let Ok(text) = fs::read_to_string(&entry) {
                    let code = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<String>();
                    found.extend(words.iter().filter(|word| code.contains(**word)).map(|word| (entry.clone(), *word)));
                }
            }
        }
    }
    assert!(found.is_empty(), "a library changes its host: {found:?}");
}
