//! `status`: the nodes of a cluster, whether they serve, and what the store holds.

use futures::future::join_all;
use millpond_core::directory::OwnerView;
use millpond_core::time::Duration;
use serde_json::{Value, json};

use super::cluster::{At, Cluster, Node};
use super::failure::Failure;
use super::store;
use super::store_cmds::{Exit, Output};
use crate::http::{Method, fetch};
use crate::runtime::Runtime;
use crate::serve::DOWNGRADES;

/// How long a node may take to say how it is.
const PATIENCE: Duration = Duration::from_secs(2);

/// Fails unless every node serves, so that scripts can ask.
pub(super) async fn run<R: Runtime>(runtime: &R, at: &At, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let mut silent = 0;
    let mut has_store = true;
    if at.node.is_none() {
        let cluster = Cluster::find()?;
        output.line(
            &format!("requests go to http://{}/v1; process {} looks after the cluster", cluster.http, cluster.pid),
            json!({"http": cluster.http, "pid": cluster.pid}),
        )?;
        for Asked { node, state, downgrades, follower, log } in
            join_all(cluster.nodes.iter().map(|node| ask(runtime, node))).await
        {
            silent += usize::from(state["status"] != "ready");
            let (status, reason) = (text(&state["status"]), text(&state["reason"]));
            let line =
                format!("{:<12} {status:<12} node {:<21} http {:<21} {reason}", node.name, node.address, node.http);
            output.line(
                line.trim_end(),
                json!({"node": node.name, "address": node.address, "http": node.http,
                "status": state["status"], "reason": state["reason"]}),
            )?;
            for Downgrades { from, to, reason, count } in downgrades {
                output.line(
                    &format!("{:<12} downgraded   {count} posts over {to} instead of {from}: {reason}", node.name),
                    json!({"node": node.name, "downgraded": {"from": from, "to": to, "reason": reason, "count": count}}),
                )?;
            }
            if log["is_whole"] == false {
                let path = text(&log["path"]);
                output.line(
                    &format!(
                        "{:<12} log ended    {path} could not be written any more; the router's log says why",
                        node.name
                    ),
                    json!({"node": node.name, "decision_log": log}),
                )?;
            }
            if let Some(view) = follower {
                output.line(
                    &format!("{:<12} {}", node.name, followed(&view)),
                    json!({"node": node.name, "follows": view}),
                )?;
            }
        }
        has_store = !cluster.directory.is_empty();
    }
    if has_store {
        let client = store::connect(runtime, at)?;
        let view = client.view().await;
        client.engine().shut_down().await;
        for owner in view? {
            show(&owner, output)?;
        }
    }
    match silent {
        0 => Ok(Exit::Done),
        count => Err(Failure::Said(format!("{count} nodes do not serve; their reasons are above"))),
    }
}

fn show(owner: &OwnerView, output: &mut Output<'_>) -> Result<(), Failure> {
    let capacity: u64 = owner.segments.iter().map(|segment| segment.facts.capacity).sum();
    let replicas: u64 = owner.segments.iter().map(|segment| segment.replicas).sum();
    let (free, health) = (owner.free(), format!("{:?}", owner.health).to_lowercase());
    let used = capacity.saturating_sub(free);
    let line = format!(
        "store        {health:<12} node {:<21} {replicas} objects, {:.1} of {:.1} MiB used",
        owner.address,
        mebibytes(used),
        mebibytes(capacity)
    );
    let json = json!({"store": owner.owner.node.to_string(), "address": owner.address.as_ref(), "health": health,
        "objects": replicas, "used": used, "capacity": capacity});
    Ok(output.line(&line, json)?)
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// What a node says of itself.
struct Asked<'n> {
    node: &'n Node,
    state: Value,
    downgrades: Vec<Downgrades>,
    /// What it knows of the store, if it is a router that follows one.
    follower: Option<Value>,
    /// Where it writes what it decides, and whether it still can, if it is a router that does.
    log: Value,
}

async fn ask<'n, R: Runtime>(runtime: &R, node: &'n Node) -> Asked<'n> {
    let deadline = runtime.now() + PATIENCE;
    let state = match fetch(runtime, node.http, Method::Get, "/ready", Vec::new(), deadline).await {
        Ok((_, body)) => serde_json::from_slice(&body).unwrap_or_else(|_| json!({"status": "confused"})),
        Err(error) => {
            let state = json!({"status": "silent", "reason": error.to_string()});
            return Asked { node, state, downgrades: Vec::new(), follower: None, log: Value::Null };
        }
    };
    let downgrades = match fetch(runtime, node.http, Method::Get, "/metrics", Vec::new(), deadline).await {
        Ok((200, body)) => String::from_utf8_lossy(&body).lines().filter_map(Downgrades::parse).collect(),
        _ => Vec::new(),
    };
    let mut router = match fetch(runtime, node.http, Method::Get, "/debug/explain", Vec::new(), deadline).await {
        Ok((200, body)) => {
            serde_json::from_slice::<Value>(&body).map(|mut view| view["router"].take()).unwrap_or_default()
        }
        _ => Value::Null,
    };
    if !router.is_object() {
        return Asked { node, state, downgrades, follower: None, log: Value::Null };
    }
    let follower = Some(router["store"].take()).filter(Value::is_object);
    Asked { node, state, downgrades, follower, log: router["decision_log"].take() }
}

/// A router's view of the store in a line: whether it is followed, how far, and since when nothing was heard.
fn followed(view: &Value) -> String {
    let number = |name: &str| view[name].as_u64().unwrap_or(0);
    let ago =
        |name: &str| view[name].as_u64().map(|millis| format!("{}.{} s ago", millis / 1_000, millis % 1_000 / 100));
    let heard = ago("heard_ms_ago").map_or_else(|| "never heard".into(), |ago| format!("heard {ago}"));
    let state = match text(&view["state"]) {
        "current" => "follows      ".to_owned(),
        "snapshot" => "resyncs      ".to_owned(),
        _ => {
            let current = ago("current_ms_ago").unwrap_or_else(|| "never".into());
            format!("does not follow the directory: {}; all was known last {current}; ", text(&view["why"]))
        }
    };
    // The first snapshot is none of a gap.
    let resyncs = number("snapshots").saturating_sub(1);
    let (term, event, behind, blocks) = (number("term"), number("event"), number("events_behind"), number("blocks"));
    format!("{state}{blocks} blocks, term {term}, event {event}, {behind} behind, {resyncs} resyncs, {heard}")
}

/// How often a node took less than the best path, from its metrics.
#[derive(Debug, PartialEq, Eq)]
struct Downgrades {
    from: String,
    to: String,
    reason: String,
    count: u64,
}

impl Downgrades {
    /// Of a line of `/metrics`; `None` for others, and where it never happened.
    fn parse(line: &str) -> Option<Self> {
        let (labels, count) = line.strip_prefix(DOWNGRADES)?.strip_prefix('{')?.split_once("} ")?;
        // None of the values has a quote in it.
        let label = |name: &str| {
            let mut pairs = labels.split(',').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"').to_owned())
        };
        let count = count.parse().ok().filter(|count| *count > 0)?;
        Some(Self { from: label("from")?, to: label("to")?, reason: label("reason")?, count })
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_that_does_not_follow_says_why_and_since_when() {
        let mut view = json!({"state": "current", "why": null, "term": 3, "event": 120, "events_behind": 0,
            "blocks": 412, "snapshots": 2, "heard_ms_ago": 460, "current_ms_ago": 460});
        let line = "follows      412 blocks, term 3, event 120, 0 behind, 1 resyncs, heard 0.4 s ago";
        assert_eq!(followed(&view), line);
        (view["state"], view["why"], view["heard_ms_ago"]) = ("lost".into(), "refused".into(), 12_000.into());
        let line = "does not follow the directory: refused; all was known last 0.4 s ago; 412 blocks, term 3, event 120, \
             0 behind, 1 resyncs, heard 12.0 s ago";
        assert_eq!(followed(&view), line);
        let never = followed(&json!({"state": "lost", "why": "it was not asked yet"}));
        assert!(never.contains("known last never; 0 blocks") && never.ends_with("never heard"), "{never}");
    }

    #[test]
    fn only_downgrades_that_happened_are_shown() {
        let line = r#"millpond_path_downgrade_total{from="shm",to="tcp",reason="unreachable"} 12"#;
        let found = Downgrades::parse(line).unwrap();
        assert_eq!((&*found.from, &*found.to, &*found.reason, found.count), ("shm", "tcp", "unreachable", 12));
        assert_eq!(
            Downgrades::parse(r#"millpond_path_downgrade_total{from="shm",to="tcp",reason="connecting"} 0"#),
            None
        );
        assert_eq!(Downgrades::parse("millpond_transfers_done_total 12"), None);
        assert_eq!(Downgrades::parse("# TYPE millpond_path_downgrade_total counter"), None);
    }
}
