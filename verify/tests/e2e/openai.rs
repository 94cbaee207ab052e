//! OpenAI's own client against a router; needs a Python that has it.

use std::path::Path;
use std::process::Command;

use crate::cluster::{Binary, Cluster, Plan};

/// Names a Python with the `openai` package.
const PYTHON: &str = "MILLPOND_OPENAI_PYTHON";

#[test]
#[ignore = "needs a Python that has the `openai` package, named by MILLPOND_OPENAI_PYTHON; .ci/run runs it"]
fn the_openai_client_is_content() {
    let python = std::env::var_os(PYTHON).expect("MILLPOND_OPENAI_PYTHON names a Python that has the `openai` package");
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
