//! OpenAI's own client against a router; needs a Python that has it.

use std::path::Path;
use std::process::Command;

use crate::cluster::{Binary, Cluster, Plan};

/// Names a Python with the `openai` package.
const PYTHON: &str = "MILLPOND_OPENAI_PYTHON";

#[test]
fn the_openai_client_is_content() {
    let Some(python) = std::env::var_os(PYTHON) else {
        println!("SKIPPED: set {PYTHON} to a Python that has the `openai` package; .ci/run does");
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/openai_client.py");
    for binary in [Binary::Tokio, Binary::Smol] {
        let cluster = Cluster::start(Plan::of(binary));
        let output = Command::new(&python).arg(&script).arg(format!("http://{}", cluster.router.http)).output();
        let output = output.expect("that Python runs");
        let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
        assert!(output.status.success(), "{said}");
        print!("{said}");
    }
}
