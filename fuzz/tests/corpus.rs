//! Replays every file of the corpora: what a fuzzer once found, and one valid example of each frame, stays right.

use std::path::Path;

fn replay(target: &str, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).expect("each target has a corpus") {
        let path = entry.expect("a readable folder").path();
        println!("{}", path.display());
        run(&std::fs::read(&path).expect("a readable file"));
        count += 1;
    }
    assert!(count > 0, "{} is empty: a replay of nothing proves nothing", folder.display());
}

fn replay_ops(target: &str, run: impl Fn(&[millpond_fuzz::Op]) -> Result<(), String>) {
    replay(target, |data| {
        if let Err(difference) = run(&millpond_fuzz::ops(data)) {
            panic!("{difference}");
        }
    });
}

#[test]
fn the_corpus_of_frames_parses_or_is_refused() {
    replay("wire", millpond_fuzz::wire::run);
}

#[test]
fn the_corpus_of_hellos_ends_in_a_session_or_a_refusal() {
    replay("session", millpond_fuzz::session::run);
}

#[test]
fn the_corpus_of_the_directory_agrees_with_its_rules() {
    replay("directory", millpond_fuzz::directory::run);
}

#[test]
fn the_corpora_of_the_structures_agree_with_the_oracles() {
    replay_ops("page", millpond_fuzz::page::run);
    replay_ops("extent", millpond_fuzz::extent::run);
    replay_ops("prefix", millpond_fuzz::prefix::run);
}
