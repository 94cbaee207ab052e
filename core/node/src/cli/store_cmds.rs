//! The store by hand: put, get, rm, ls, stat, explain-miss, watch.
//!
//! Each command talks to one [`StoreClient`], writes text or one JSON object per line to the writer it is given, and says
//! how it ended; parsing arguments and finding the cluster are the caller's business. Keys are bytes: text output escapes
//! what cannot be printed, JSON output carries them as text if they are UTF-8 and as hexadecimal otherwise.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use millpond_core::directory::{Change, Event, Explanation, Location, Pin, Stamp, Stat, Tier};
use millpond_core::time::Duration;
use serde_json::{Value as Json, json};

use crate::client::{ClientError, Got, MissReason, Put, PutOptions, RemoveOptions, Source, StoreClient};
use crate::engine::{AllocateError, Backing};
use crate::rpc::Reason;
use crate::runtime::Runtime;

/// How a command ended; the number is the exit code.
///
/// ```
/// use millpond_node::cli::store_cmds::Exit;
/// assert_eq!(Exit::Missing.code(), 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done,
    /// The key is not there.
    Missing,
    /// The store said no.
    Refused,
}

impl Exit {
    /// The process's exit code; errors end with 1.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Missing => 2,
            Self::Refused => 3,
        }
    }
}

/// How a command writes.
///
/// Example: [`Output`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// A JSON object per line.
    Json,
}

/// A command failed.
///
/// ```
/// use millpond_node::cli::store_cmds::CommandError;
/// assert!(CommandError::TooLong { len: u64::MAX }.to_string().contains("does not fit"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The store.
    #[error(transparent)]
    Store(#[from] ClientError),
    /// No store node could be reached.
    #[error("not stored: {reason}: {detail}")]
    Unavailable {
        /// What kind of failure it was.
        reason: Reason,
        /// What happened.
        detail: String,
    },
    /// A file, or the terminal.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Memory for the value.
    #[error("no memory for a value of {len} bytes: {source}")]
    Memory {
        /// Its length.
        len: u64,
        /// Why not.
        source: AllocateError,
    },
    /// The value is longer than this machine's addresses.
    #[error("a value of {len} bytes does not fit into this machine's memory")]
    TooLong {
        /// Its length.
        len: u64,
    },
}

/// Where a command writes, and how.
///
/// ```
/// use millpond_node::cli::store_cmds::{Format, Output};
/// let mut written = Vec::new();
/// let output = Output { writer: &mut written, format: Format::Json };
/// assert_ne!(output.format, Format::Text);
/// ```
pub struct Output<'a> {
    /// Where.
    pub writer: &'a mut (dyn Write + Send),
    /// How.
    pub format: Format,
}

impl std::fmt::Debug for Output<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("format", &self.format).finish_non_exhaustive()
    }
}

impl Output<'_> {
    pub(super) fn line(&mut self, text: &str, json: Json) -> Result<(), CommandError> {
        let written = match self.format {
            Format::Text => writeln!(self.writer, "{text}"),
            Format::Json => writeln!(self.writer, "{json}"),
        };
        written.and_then(|()| self.writer.flush()).map_err(|source| file_error("output", source))
    }
}

fn file_error(path: impl Into<String>, source: io::Error) -> CommandError {
    CommandError::File { path: path.into(), source }
}

/// A key for people.
fn shown(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => key.escape_ascii().to_string(),
    }
}

/// A key that may be refused for its length, for people.
fn shortened(name: String) -> String {
    const CHARS_MAX: usize = 80;
    match name.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name,
    }
}

fn key_json(key: &[u8]) -> Json {
    match std::str::from_utf8(key) {
        Ok(text) => json!({ "text": text }),
        Err(_) => json!({ "hex": key.iter().map(|byte| format!("{byte:02x}")).collect::<String>() }),
    }
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Ssd => "ssd",
        _ => "dram",
    }
}

fn location_json(location: &Location) -> Json {
    let Location { node, segment, slot, generation, .. } = location;
    json!({ "node": node.to_string(), "segment": segment, "slot": slot, "generation": generation })
}

/// Stores the bytes of `path` (`-`: standard input) under `key`.
pub async fn put<R: Runtime>(
    client: &StoreClient<R>,
    key: &[u8],
    path: &Path,
    options: &PutOptions,
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let source = read_source(client, path)?;
    let len = source.len();
    let (name, key_json) = (shown(key), key_json(key));
    match client.put(key, source, options).await? {
        Put::Stored(receipt) => {
            let copies = receipt.locations.len();
            let nodes: Vec<String> = receipt.locations.iter().map(|place| place.node.to_string()).collect();
            let mut text = format!("stored {name}: {len} bytes, version {}, on {}", receipt.version, nodes.join(", "));
            if receipt.copies_missing > 0 {
                text.push_str(&format!("; {} copies fewer than asked for", receipt.copies_missing));
            }
            let places: Vec<Json> = receipt.locations.iter().map(location_json).collect();
            output.line(
                &text,
                json!({ "outcome": "stored", "key": key_json, "len": len, "version": receipt.version.to_string(),
                    "copies": copies, "copies_missing": receipt.copies_missing, "locations": places }),
            )?;
            Ok(Exit::Done)
        }
        Put::AlreadyThere { version } => {
            let text = format!("{name} is there already, version {version}; the old value was kept");
            output
                .line(&text, json!({ "outcome": "already_there", "key": key_json, "version": version.to_string() }))?;
            Ok(Exit::Done)
        }
        // Nobody said no: nobody was there to ask.
        Put::Refused { reason: reason @ Reason::Unavailable, detail, .. } => {
            Err(CommandError::Unavailable { reason, detail })
        }
        Put::Refused { reason, detail, retry_after } => {
            let hint = retry_after.map_or_else(String::new, |span| format!("; retry after {span}"));
            let text = format!("refused {}: {reason}: {detail}{hint}", shortened(name));
            let retry_ms = retry_after.map(Duration::as_millis);
            output.line(
                &text,
                json!({ "outcome": "refused", "key": key_json, "reason": reason.to_string(), "detail": detail,
                    "retry_after_ms": retry_ms }),
            )?;
            Ok(Exit::Refused)
        }
    }
}

/// A file is read straight into registered memory; a pipe has no length, so it is collected first.
fn read_source<R: Runtime>(client: &StoreClient<R>, path: &Path) -> Result<Source, CommandError> {
    let name = path.display().to_string();
    if path == Path::new("-") {
        let mut bytes = Vec::new();
        io::stdin().lock().read_to_end(&mut bytes).map_err(|source| file_error("standard input", source))?;
        return Ok(bytes.into());
    }
    let failed = |source| file_error(name.clone(), source);
    let mut file = File::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    if len == 0 {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        return Ok(bytes.into());
    }
    let region = client.engine().allocate(len, Backing::Memfd);
    let region = region.map_err(|source| CommandError::Memory { len, source })?;
    let mut buffer = region.carve(0, len).map_err(|_| CommandError::TooLong { len })?;
    file.read_exact(&mut buffer).map_err(failed)?;
    Ok(Source::Region(buffer.freeze()))
}

/// Writes the value of `key` to `path` (`-`: standard output, with nothing else on it).
pub async fn get<R: Runtime>(
    client: &StoreClient<R>,
    key: &[u8],
    path: &Path,
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let value = match client.get(key).await? {
        Got::Hit(value) => value,
        Got::Miss { reason, .. } if path == Path::new("-") => {
            let mut aside = io::stderr();
            return missing(key, reason, &mut Output { writer: &mut aside, format: output.format });
        }
        Got::Miss { reason, .. } => return missing(key, reason, output),
    };
    if path == Path::new("-") {
        let mut out = io::stdout().lock();
        let written = out.write_all(&value).and_then(|()| out.flush());
        written.map_err(|source| file_error("standard output", source))?;
        return Ok(Exit::Done);
    }
    let failed = |source| file_error(path.display().to_string(), source);
    File::create(path).and_then(|mut file| file.write_all(&value)).map_err(failed)?;
    let text = format!("{}: {} bytes, version {}", shown(key), value.len(), value.version);
    let version = value.version.to_string();
    output.line(&text, json!({ "outcome": "hit", "key": key_json(key), "len": value.len(), "version": version }))?;
    Ok(Exit::Done)
}

fn missing(key: &[u8], reason: MissReason, output: &mut Output<'_>) -> Result<Exit, CommandError> {
    let (word, text) = match reason {
        MissReason::Lost => ("lost", "it was there a moment ago".to_owned()),
        MissReason::Rebuilding { retry_after } => {
            ("rebuilding", format!("the directory is collecting inventories; retry after {retry_after}"))
        }
        _ => ("absent", "`explain-miss` tells why, as far as it is known".to_owned()),
    };
    let name = shown(key);
    output.line(
        &format!("{name} is not there: {text}"),
        json!({ "outcome": "miss", "key": key_json(key), "reason": word }),
    )?;
    Ok(Exit::Missing)
}

/// What a removal is to take.
///
/// Example: `core/node/src/cli/store.rs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// These keys.
    Keys(Vec<Vec<u8>>),
    /// Whatever begins with this; empty: whatever is there.
    Prefix(Vec<u8>),
    /// Everything, for good: what an absent node still holds does not come back either.
    Clear,
}

/// Removes objects.
pub async fn remove<R: Runtime>(
    client: &StoreClient<R>,
    selection: &Selection,
    options: RemoveOptions,
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let removed = match selection {
        Selection::Keys(keys) => client.remove(keys, options).await?,
        Selection::Prefix(prefix) => client.remove_prefix(prefix, options).await?,
        Selection::Clear => {
            let objects = client.clear().await?;
            millpond_core::directory::Removed { objects, ..Default::default() }
        }
    };
    let mut text = format!("removed {} objects", removed.objects);
    if removed.leased > 0 {
        text.push_str(&format!("; {} stay: somebody reads them (--force removes them, too)", removed.leased));
    }
    if removed.owners_unreachable > 0 {
        text.push_str(&format!("; {} nodes are silent and free the space later", removed.owners_unreachable));
    }
    output.line(
        &text,
        json!({ "removed": removed.objects, "leased": removed.leased,
            "owners_unreachable": removed.owners_unreachable }),
    )?;
    let found_none = matches!(selection, Selection::Keys(_)) && removed.objects == 0;
    Ok(match removed.leased {
        0 if found_none => Exit::Missing,
        0 => Exit::Done,
        _ => Exit::Refused,
    })
}

/// Lists keys that begin with `prefix`.
pub async fn list<R: Runtime>(
    client: &StoreClient<R>,
    prefix: &[u8],
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let mut listing = client.list(prefix);
    while let Some(page) = listing.next().await? {
        for row in page.rows {
            let text = format!("{:>14} {:>2}x {}", row.len, row.replicas, shown(&row.key));
            let version = row.version.to_string();
            output.line(
                &text,
                json!({ "key": key_json(&row.key), "len": row.len, "replicas": row.replicas, "version": version }),
            )?;
        }
    }
    Ok(Exit::Done)
}

/// Shows what is known of `key`.
pub async fn stat<R: Runtime>(
    client: &StoreClient<R>,
    key: &[u8],
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let stat: Stat = match client.stat(key).await? {
        Ok(stat) => stat,
        Err(reason) => return missing(key, reason, output),
    };
    let pin = match stat.pin {
        Pin::Soft { ttl } => format!("soft for {ttl}"),
        Pin::Hard => "hard".to_owned(),
        _ => "none".to_owned(),
    };
    let places: Vec<String> =
        stat.replicas.iter().map(|(place, tier)| format!("{} ({})", place.node, tier_name(*tier))).collect();
    let text = format!(
        "{}\n  length   {} bytes\n  version  {}{}\n  replicas {}\n  age      {}\n  lease    {}\n  pin      {pin}",
        shown(key),
        stat.len,
        stat.version,
        if stat.mutable { ", upserted" } else { "" },
        places.join(", "),
        stat.age,
        stat.lease_left,
    );
    let replica = |(place, tier): &(Location, Tier)| {
        let mut row = location_json(place);
        row["tier"] = tier_name(*tier).into();
        row
    };
    let replicas: Vec<Json> = stat.replicas.iter().map(replica).collect();
    output.line(
        &text,
        json!({ "key": key_json(key), "len": stat.len, "version": stat.version.to_string(), "replicas": replicas,
            "age_ms": stat.age.as_millis(), "lease_left_ms": stat.lease_left.as_millis(), "pin": pin,
            "mutable": stat.mutable }),
    )?;
    Ok(Exit::Done)
}

/// Says why a get of `key` finds nothing.
pub async fn explain_miss<R: Runtime>(
    client: &StoreClient<R>,
    key: &[u8],
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let name = shown(key);
    let (text, json) = match client.explain_miss(key).await? {
        Explanation::Present { replicas, suspect } => (
            format!("{name} is there: {replicas} replicas, {suspect} of them on silent nodes"),
            json!({ "state": "present", "replicas": replicas, "suspect": suspect }),
        ),
        Explanation::Lost(lost) => (
            format!(
                "{name} was there ({} bytes, version {}) and left node {} {} ago: {}",
                lost.len, lost.version, lost.node, lost.ago, lost.reason
            ),
            json!({ "state": "lost", "reason": lost.reason.to_string(), "node": lost.node.to_string(),
                "ago_ms": lost.ago.as_millis(), "len": lost.len, "version": lost.version.to_string() }),
        ),
        Explanation::NeverStored { removals_remembered } => (
            format!(
                "nothing is known of {name}: it was never stored, or it went before the directory was started, or \
                 longer ago than the last {removals_remembered} removals"
            ),
            json!({ "state": "never_stored", "removals_remembered": removals_remembered }),
        ),
        Explanation::Rebuilding { retry_after } => (
            format!("the directory is collecting inventories and will know in {retry_after}"),
            json!({ "state": "rebuilding", "retry_after_ms": retry_after.as_millis() }),
        ),
        _ => (format!("{name}: the directory gives a reason that this version does not know"), json!({})),
    };
    output.line(&text, json)?;
    Ok(Exit::Done)
}

/// Shows changes after `after`, or from now on, for `span`.
pub async fn watch<R: Runtime>(
    client: &StoreClient<R>,
    after: Option<Stamp>,
    span: Duration,
    output: &mut Output<'_>,
) -> Result<Exit, CommandError> {
    let deadline = client.engine().runtime().now() + span;
    let mut changes = client.watch(after, deadline).await?;
    while let Some(batch) = changes.next().await {
        let batch = batch?;
        if batch.gap {
            let text = format!("events were lost before {}; list everything to catch up", batch.next);
            output.line(&text, json!({ "gap": true, "next": batch.next.to_string() }))?;
        }
        for event in &batch.events {
            let (text, json) = describe(event);
            output.line(&text, json)?;
        }
    }
    Ok(Exit::Done)
}

fn describe(event: &Event) -> (String, Json) {
    let at = event.at.to_string();
    match &event.change {
        Change::Stored { key, version, len, location, tier } => {
            let (name, tier) = (shown(key), tier_name(*tier));
            (
                format!("{at} stored {name}: {len} bytes, version {version}, on {} ({tier})", location.node),
                json!({ "at": at, "event": "stored", "key": key_json(key), "version": version.to_string(), "len": len,
                    "tier": tier, "location": location_json(location) }),
            )
        }
        Change::Removed { key, location, reason, replicas_left, .. } => (
            format!("{at} removed {} from {}: {reason}; {replicas_left} replicas left", shown(key), location.node),
            json!({ "at": at, "event": "removed", "key": key_json(key), "reason": reason.to_string(),
                "replicas_left": replicas_left, "location": location_json(location) }),
        ),
        Change::Left { owner, reason } => (
            format!("{at} left: {}, incarnation {}: {reason}", owner.node, owner.incarnation),
            json!({ "at": at, "event": "left", "node": owner.node.to_string(), "incarnation": owner.incarnation,
                "reason": reason.to_string() }),
        ),
        Change::Cleared => (format!("{at} cleared"), json!({ "at": at, "event": "cleared" })),
        _ => (format!("{at} something this version does not know"), json!({ "at": at, "event": "unknown" })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_as_text_or_escaped() {
        assert_eq!(shown("schlüssel".as_bytes()), "schlüssel");
        assert_eq!(shown(b"a\xff\n"), "a\\xff\\n");
        assert_eq!(key_json(&[0xab, 0xff]), json!({ "hex": "abff" }));
    }
}
