//! The store by hand: arguments of its commands, and the node that carries them out.

use std::ffi::OsString;
use std::future::Future;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use millpond_core::time::Duration;
use millpond_core::wire::hello::Identity;
use millpond_core::wire::session::Key as ClusterKey;

use super::cluster::At;
use super::failure::Failure;
use super::store_cmds::{self, CommandError, Exit, Output, Selection};
use crate::client::{Options, PutOptions, RemoveOptions, StoreClient};
use crate::config::parse_span;
use crate::engine::{self, Engine};
use crate::node::{self, Node};
use crate::runtime::Runtime;
use crate::tls::Tls;

/// A key on the command line: text, or any bytes.
#[derive(Debug, clap::Args)]
pub(super) struct Name {
    /// The key: 1 to 1,024 bytes.
    #[arg(value_name = "KEY")]
    key: OsString,
    /// The key is written in hexadecimal.
    #[arg(long)]
    hex: bool,
}

impl Name {
    fn bytes(self) -> Result<Vec<u8>, Failure> {
        whole_key(self.key, self.hex)
    }
}

/// A key that can be stored; told here, since the store has it simply as not there.
fn whole_key(key: OsString, hex: bool) -> Result<Vec<u8>, Failure> {
    let bytes = key_bytes(key, hex)?;
    match millpond_core::directory::Key::new(&bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(Failure::Said(error.to_string())),
    }
}

fn key_bytes(key: OsString, hex: bool) -> Result<Vec<u8>, Failure> {
    let bytes = key.into_vec();
    if !hex {
        return Ok(bytes);
    }
    let wrong = || {
        let shown = bytes.escape_ascii();
        Failure::Usage(format!("{shown} is not hexadecimal; write two digits per byte, as in 00ff10"))
    };
    let digits = bytes.iter().map(|digit| char::from(*digit).to_digit(16)).collect::<Option<Vec<u32>>>();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2)).ok_or_else(wrong)?;
    digits.chunks_exact(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).map_err(|_| wrong())).collect()
}

/// Arguments of `put`.
#[derive(Debug, clap::Args)]
pub(super) struct Put {
    #[command(flatten)]
    name: Name,
    /// The value; - is standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Copies on different nodes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    replicas: u32,
    /// Replace a value that is there; without it the old one is kept.
    #[arg(long)]
    upsert: bool,
    #[command(flatten)]
    at: At,
}

/// Arguments of `get`.
#[derive(Debug, clap::Args)]
pub(super) struct Get {
    #[command(flatten)]
    name: Name,
    /// Where the value goes; - is standard output.
    #[arg(value_name = "FILE", default_value = "-")]
    file: PathBuf,
    #[command(flatten)]
    at: At,
}

/// Arguments of commands about one key.
#[derive(Debug, clap::Args)]
pub(super) struct Key {
    #[command(flatten)]
    name: Name,
    #[command(flatten)]
    at: At,
}

/// Arguments of `rm`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["keys", "prefix", "all"]))]
pub(super) struct Remove {
    /// The keys.
    #[arg(value_name = "KEY")]
    keys: Vec<OsString>,
    /// The keys are written in hexadecimal.
    #[arg(long)]
    hex: bool,
    /// Whatever begins with this.
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<OsString>,
    /// Everything, for good: what an absent node still holds does not come back either.
    #[arg(long)]
    all: bool,
    /// Also what somebody reads now.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    at: At,
}

/// Arguments of `ls`.
#[derive(Debug, clap::Args)]
pub(super) struct List {
    /// Only keys that begin with this.
    #[arg(value_name = "PREFIX", default_value = "")]
    prefix: OsString,
    #[command(flatten)]
    at: At,
}

/// Arguments of `watch`.
#[derive(Debug, clap::Args)]
pub(super) struct Watch {
    /// How long: 10s, 5m, 1h.
    #[arg(long = "for", value_name = "SPAN", default_value = "24h", value_parser = parse_span)]
    span: Duration,
    #[command(flatten)]
    at: At,
}

/// A client of the store that `at` names, at a node of this process that nobody else reaches.
pub(super) fn connect<R: Runtime>(runtime: &R, at: &At) -> Result<StoreClient<R>, Failure> {
    let (directory, key) = at.directory()?;
    let mut own = [0; 16];
    getrandom::fill(&mut own).map_err(|error| Failure::Said(format!("the system gives no random bytes: {error}")))?;
    let tls = at.tls.load().map_err(|error| Failure::Said(error.to_string()))?;
    // A certificate that is made for one node makes this one of it.
    let own = tls.as_ref().and_then(Tls::own_node).unwrap_or(own);
    let identity = Identity { node: own, ..node::identity("command", None)? };
    let key = (!key.is_empty()).then(|| ClusterKey::new(key.as_bytes()));
    let (mut options, mut engine_options) = (node::Options::new(identity), engine::Options::new(identity));
    (options.key, engine_options.key) = (key, key);
    (options.tls, engine_options.tls) = (tls.clone(), tls);
    let engine = Engine::start(runtime.clone(), engine_options)?;
    let node = Node::new(runtime.clone(), options);
    let client = StoreClient::connect(&node, engine, directory, Options::default());
    client.map_err(|error| Failure::Said(format!("no memory for values on their way: {error}")))
}

/// Runs `work` on a client, and ends its engine afterwards.
async fn with<R, F>(runtime: &R, at: &At, work: impl FnOnce(StoreClient<R>) -> F) -> Result<Exit, Failure>
where
    R: Runtime,
    F: Future<Output = Result<Exit, CommandError>>,
{
    let client = connect(runtime, at)?;
    let ending = work(client.clone()).await;
    client.engine().shut_down().await;
    Ok(ending?)
}

pub(super) async fn put<R: Runtime>(runtime: &R, args: Put, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let key = args.name.bytes()?;
    let options = PutOptions { replicas: args.replicas, upsert: args.upsert, ..PutOptions::default() };
    let work = |client| async move { store_cmds::put(&client, &key, &args.file, &options, output).await };
    with(runtime, &args.at, work).await
}

pub(super) async fn get<R: Runtime>(runtime: &R, args: Get, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let key = args.name.bytes()?;
    with(runtime, &args.at, |client| async move { store_cmds::get(&client, &key, &args.file, output).await }).await
}

pub(super) async fn remove<R: Runtime>(runtime: &R, args: Remove, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let selection = match (args.all, args.prefix) {
        (true, _) => Selection::Clear,
        (false, Some(prefix)) => Selection::Prefix(key_bytes(prefix, args.hex)?),
        (false, None) => {
            let keys = args.keys.into_iter().map(|key| whole_key(key, args.hex));
            Selection::Keys(keys.collect::<Result<_, _>>()?)
        }
    };
    let options = RemoveOptions { force: args.force };
    with(runtime, &args.at, |client| async move { store_cmds::remove(&client, &selection, options, output).await })
        .await
}

pub(super) async fn list<R: Runtime>(runtime: &R, args: List, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let prefix = args.prefix.into_vec();
    with(runtime, &args.at, |client| async move { store_cmds::list(&client, &prefix, output).await }).await
}

pub(super) async fn stat<R: Runtime>(runtime: &R, args: Key, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let key = args.name.bytes()?;
    with(runtime, &args.at, |client| async move { store_cmds::stat(&client, &key, output).await }).await
}

pub(super) async fn explain_miss<R: Runtime>(runtime: &R, args: Key, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let key = args.name.bytes()?;
    with(runtime, &args.at, |client| async move { store_cmds::explain_miss(&client, &key, output).await }).await
}

pub(super) async fn watch<R: Runtime>(runtime: &R, args: Watch, output: &mut Output<'_>) -> Result<Exit, Failure> {
    with(runtime, &args.at, |client| async move { store_cmds::watch(&client, None, args.span, output).await }).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_bytes_or_hexadecimal() {
        assert_eq!(key_bytes("schlüssel".into(), false).unwrap(), "schlüssel".as_bytes());
        assert_eq!(key_bytes("00fF10".into(), true).unwrap(), [0, 0xff, 0x10]);
        for wrong in ["0", "0x", "zz", "é"] {
            assert!(key_bytes(wrong.into(), true).is_err(), "{wrong}");
        }
    }
}
