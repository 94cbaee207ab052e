//! `explain`: what became of a request, as its router remembers it.

use std::net::SocketAddr;

use millpond_core::time::Duration;
use serde_json::Value;

use super::cluster::Cluster;
use super::failure::Failure;
use super::store_cmds::{Exit, Output};
use crate::http::{Method, fetch};
use crate::runtime::Runtime;

const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of a request id.
const ID_LEN_MAX: usize = 256;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The request's id, from the header x-request-id of its reply.
    #[arg(value_name = "ID", value_parser = id)]
    id: String,
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
    let http = match args.http {
        Some(http) => http,
        None => Cluster::find()?.http,
    };
    let (path, deadline) = (format!("/v1/requests/{}", args.id), runtime.now() + PATIENCE);
    let (status, body) = fetch(runtime, http, Method::Get, &path, Vec::new(), deadline).await?;
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
