//! `explain`: what became of a request, as its router remembers it, or what was decided, as a router's decision log has it.

use std::fs::File;
use std::io::BufReader;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use millpond_core::time::Duration;
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::failure::Failure;
use super::store_cmds::{Exit, Output};
use crate::http::{Bearer, fetch_as};
use crate::router;
use crate::runtime::Runtime;

const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of a request id.
const ID_LEN_MAX: usize = 256;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The request's id, from the header x-request-id of its reply.
    #[arg(value_name = "ID", value_parser = id, required_unless_present = "log")]
    id: Option<String>,
    /// The API key of the tenant whose request it is, where the router has tenants.
    #[arg(long, value_name = "KEY", env = "MILLPOND_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Take all decisions of this log again (`router.decisions` of a router's configuration) and compare each; with ID,
    /// show those about that request.
    #[arg(long, value_name = "FILE", conflicts_with = "http")]
    log: Option<PathBuf>,
    /// The router's HTTP port, instead of that of the cluster that `up` started.
    #[arg(long, value_name = "HOST:PORT")]
    http: Option<SocketAddr>,
}

fn id(text: &str) -> Result<String, &'static str> {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"/?#%".contains(&byte);
    if text.is_empty() || text.len() > ID_LEN_MAX || !text.bytes().all(is_plain) {
        return Err("that is no request id; ids are in the header x-request-id of replies");
    }
    Ok(text.to_owned())
}

pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let asked = args.id.as_deref();
    if let Some(path) = &args.log {
        return replay(path, asked, output);
    }
    let Some(asked) = asked else { return Err(Failure::Usage("give an ID, or --log FILE".into())) };
    let http = match args.http {
        Some(http) => http,
        None => Cluster::find()?.http,
    };
    let (path, deadline) = (format!("/v1/requests/{asked}"), runtime.now() + PATIENCE);
    let (status, body) = fetch_as(runtime, http, &Bearer(args.api_key.clone()), &path, deadline).await?;
    let answer: Value = serde_json::from_slice(&body)
        .map_err(|error| Failure::Said(format!("{http} answers no JSON ({error}); is it a router of Millpond?")))?;
    if status != 200 {
        let message = answer["error"]["message"].as_str().unwrap_or("it does not say why").to_owned();
        if status != 404 {
            return Err(Failure::Said(format!("{http} answers {status}: {message}")));
        }
        output.line(&message, answer)?;
        return Ok(Exit::Missing);
    }
    let mut text = String::new();
    tree(&answer, 0, &mut text);
    output.line(text.trim_end(), answer)?;
    Ok(Exit::Done)
}

/// Takes the decisions of a log again, and shows those about `id`.
fn replay(path: &Path, id: Option<&str>, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let failed = |reason: String| Failure::Said(format!("{}: {reason}", path.display()));
    let log = BufReader::new(File::open(path).map_err(|error| failed(error.to_string()))?);
    let replayed = match id {
        Some(id) => router::explain(log, id),
        None => router::replay(log).map(|replayed| (replayed, Vec::new())),
    };
    let (router::Replayed { decisions, hash }, about) = replayed.map_err(|error| failed(error.to_string()))?;
    let text = format!("{decisions} decisions, each as it was taken; their hash is {hash:016x}");
    let value = json!({"log": path.display().to_string(), "decisions": decisions, "hash": format!("{hash:016x}")});
    output.line(&text, value)?;
    for decision in &about {
        let mut text = String::new();
        tree(decision, 0, &mut text);
        output.line(text.trim_end(), decision.clone())?;
    }
    match id {
        Some(id) if about.is_empty() => {
            output.line(&format!("none is about request {id}"), Value::Null)?;
            Ok(Exit::Missing)
        }
        _ => Ok(Exit::Done),
    }
}

/// JSON as indented `name: value` lines.
fn tree(value: &Value, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                item(&format!("{indent}{name}:"), value, depth, text);
            }
        }
        Value::Array(values) => {
            for value in values {
                item(&format!("{indent}-"), value, depth, text);
            }
        }
        leaf => text.push_str(&format!("{indent}{leaf}\n")),
    }
}

fn item(head: &str, value: &Value, depth: usize, text: &mut String) {
    match value {
        Value::Object(_) | Value::Array(_) => {
            text.push_str(&format!("{head}\n"));
            tree(value, depth + 1, text);
        }
        Value::String(string) => text.push_str(&format!("{head} {string}\n")),
        leaf => text.push_str(&format!("{head} {leaf}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_shown_as_a_tree() {
        let mut text = String::new();
        tree(&serde_json::json!({"a": {"b": [1, "x"]}, "c": null}), 0, &mut text);
        assert_eq!(text, "a:\n  b:\n    - 1\n    - x\nc: null\n");
    }
}
