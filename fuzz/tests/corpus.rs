//! Every file of the corpus is run again: inputs that once found something, and inputs that reach far.

use std::fs;
use std::path::Path;

/// Runs each file of `corpus/NAME`; a corpus without files proves nothing and fails.
fn replay(name: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let files: Vec<_> = fs::read_dir(&folder).expect("the corpus is there").map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    for file in files {
        // The name is printed when the test fails.
        println!("{}", file.display());
        run(&fs::read(&file).unwrap());
    }
}

#[test]
fn wire_frames_of_the_corpus_hold() {
    replay("wire", millpond_fuzz::wire::run);
}

#[test]
fn hellos_of_the_corpus_hold() {
    replay("session", millpond_fuzz::session::run);
}

#[test]
fn page_lists_of_the_corpus_hold() {
    replay("page", |data| millpond_fuzz::panic_on(millpond_fuzz::page::run(&millpond_fuzz::ops(data))));
}

#[test]
fn extent_lists_of_the_corpus_hold() {
    replay("extent", |data| millpond_fuzz::panic_on(millpond_fuzz::extent::run(&millpond_fuzz::ops(data))));
}

#[test]
fn prefix_lists_of_the_corpus_hold() {
    replay("prefix", |data| millpond_fuzz::panic_on(millpond_fuzz::prefix::run(&millpond_fuzz::ops(data))));
}

#[test]
fn index_histories_of_the_corpus_hold() {
    replay("index", |data| millpond_fuzz::panic_on(millpond_fuzz::index::run(&millpond_fuzz::ops(data))));
}

#[test]
fn batch_lists_of_the_corpus_hold() {
    replay("batch", |data| millpond_fuzz::panic_on(millpond_fuzz::batch::run(&millpond_fuzz::ops(data))));
}

#[test]
fn transfer_histories_of_the_corpus_hold() {
    replay("transfer", |data| millpond_fuzz::panic_on(millpond_fuzz::transfer::run(&millpond_fuzz::ops(data))));
}

#[test]
fn directory_lists_of_the_corpus_hold() {
    replay("directory", |data| millpond_fuzz::panic_on(millpond_fuzz::directory::run(data)));
}
