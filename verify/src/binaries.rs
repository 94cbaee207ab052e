//! The binaries under test: Cargo does not build them for tests of another package.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Names a folder with both binaries; they are not built then.
const BINARIES: &str = "MILLPOND_E2E_BINARIES";

/// The folder that `millpond` and `millpond-smol` lie in: that of the calling test's profile. Built if they are not up to date.
///
/// # Panics
/// They do not build.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| std::env::var_os(BINARIES).map_or_else(build, PathBuf::from))
}

fn build() -> PathBuf {
    let test = std::env::current_exe().expect("a test is a file");
    let folder = test.ancestors().nth(2).expect("tests lie in target/PROFILE/deps").to_owned();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "-p", "millpond-tokio", "-p", "millpond-smol", "--bins"]);
    if folder.file_name().is_some_and(|name| name == "release") {
        cargo.arg("--release");
    }
    let target = folder.parent().expect("a profile's folder lies in the target folder");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("verify lies in the workspace");
    let built = cargo.current_dir(root).arg("--target-dir").arg(target).status().expect("cargo built this test");
    assert!(built.success(), "the binaries under test do not build");
    folder
}
