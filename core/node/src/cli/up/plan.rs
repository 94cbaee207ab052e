//! Which nodes a cluster has, and the configuration of each.

use std::net::SocketAddr;
use std::path::PathBuf;

use toml::{Table, Value};

use super::Args;
use super::child::Told;
use crate::model::Source;

/// Stages of a start: nodes of one start together, and end together.
pub(super) const STAGES: usize = 3;

/// A cluster as it is to be. Stage 0 is the store node with the directory, stage 1 whoever needs it, stage 2 the router.
pub(super) struct Plan {
    args: Args,
    model: String,
    key: String,
    data: Option<PathBuf>,
}

/// Names and addresses of the nodes that run already.
type Running = [(String, String)];

impl Plan {
    pub(super) fn new(args: &Args, source: &Source, key: String) -> Self {
        let model = match source {
            Source::Toy => crate::model::toy::ID.to_owned(),
            Source::File(path) => std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string(),
        };
        let data = args.data.as_ref().map(|data| std::path::absolute(data).unwrap_or_else(|_| data.clone()));
        Self { args: args.clone(), model, key, data }
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Where requests are to go.
    pub(super) fn http(&self) -> SocketAddr {
        self.args.http
    }

    pub(super) fn has_store(&self) -> bool {
        !self.args.no_store
    }

    /// Names and configurations of a stage's nodes.
    pub(super) fn nodes(&self, stage: usize, running: &Running) -> Vec<(String, String)> {
        let directory = if self.has_store() { running.first().map(|(_, address)| address.as_str()) } else { None };
        let many =
            |role: &str, from: u16, count: u16| (from..count).map(move |number| format!("{role}-{number}")).collect();
        let stores: Vec<String> = many("store", 1, self.args.store);
        let prefills: Vec<String> = many("prefill", 0, if self.args.colocated { 0 } else { self.args.prefill });
        let decodes: Vec<String> = many("decode", 0, self.args.decode);
        match stage {
            0 if self.has_store() => vec![self.node("store-0", None, self.store(true))],
            1 => {
                let mut nodes = Vec::new();
                if self.has_store() {
                    nodes.extend(stores.iter().map(|name| self.node(name, directory, self.store(false))));
                }
                nodes.extend(prefills.iter().map(|name| self.node(name, directory, section("prefill", []))));
                nodes.extend(decodes.iter().map(|name| self.node(name, directory, section("decode", []))));
                nodes
            }
            2 => {
                let of = |role: &str| {
                    let nodes = running.iter().filter(|(name, _)| name.starts_with(role));
                    Value::Array(nodes.map(|(_, address)| Value::String(address.clone())).collect())
                };
                let text = |text: &str| Value::String(text.to_owned());
                let mut keys = vec![("prefill", of("prefill-")), ("decode", of("decode-"))];
                keys.push(("placement", text(self.args.placement.name())));
                keys.push(("admission", text(self.args.admission.name())));
                if let Some(path) = &self.args.decisions {
                    let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                    keys.push(("decisions", text(&path.display().to_string())));
                }
                let router = section("router", keys);
                let (name, text) = self.node("router", directory, router);
                vec![(name, with_http(&text, &self.args.http.to_string()))]
            }
            _ => Vec::new(),
        }
    }

    fn store(&self, hosts_directory: bool) -> Table {
        let size = Value::String(self.args.store_size.clone());
        section("store", [("size", size), ("directory", Value::Boolean(hosts_directory))])
    }

    fn node(&self, name: &str, directory: Option<&str>, role: Table) -> (String, String) {
        let text = |text: &str| Value::String(text.to_owned());
        let mut node = Table::new();
        node.insert("name".into(), text(name));
        node.insert("listen".into(), text("127.0.0.1:0"));
        node.insert("http".into(), text("127.0.0.1:0"));
        node.insert("key".into(), text(&self.key));
        node.insert("via".into(), text(&self.args.via));
        if let Some(data) = &self.data {
            node.insert("data".into(), text(&data.join(name).display().to_string()));
        }
        let mut config = Table::new();
        config.insert("node".into(), node.into());
        if let Some(directory) = directory {
            config.extend(section("directory", [("address", text(directory))]));
        }
        if !role.contains_key("store") {
            config.extend(section("model", [("file", text(&self.model))]));
        }
        config.extend(role);
        (name.to_owned(), config.to_string())
    }
}

fn section<'a>(name: &str, keys: impl IntoIterator<Item = (&'a str, Value)>) -> Table {
    let keys: Table = keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Table::from_iter([(name.to_owned(), keys.into())])
}

/// `text` with the node's HTTP port.
fn with_http(text: &str, http: &str) -> String {
    with(text, &[("http", http)])
}

/// `text` with the ports at which the node serves now.
pub(super) fn pinned(text: &str, told: &Told) -> String {
    with(text, &[("listen", &told.address), ("http", &told.http.to_string())])
}

fn with(text: &str, settings: &[(&str, &str)]) -> String {
    let mut config: Table = text.parse().unwrap_or_default();
    if let Some(Value::Table(node)) = config.get_mut("node") {
        node.extend(settings.iter().map(|(key, value)| ((*key).to_owned(), Value::String((*value).to_owned()))));
    }
    config.to_string()
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches};

    use super::*;
    use crate::config::Config;

    fn plan(line: &[&str]) -> Plan {
        let matches = Args::augment_args(clap::Command::new("up")).get_matches_from([&["up"], line].concat());
        Plan::new(&Args::from_arg_matches(&matches).unwrap(), &Source::Toy, "secret".into())
    }

    #[test]
    fn every_configuration_of_a_plan_is_valid_and_comes_back_at_its_ports() {
        for line in [&["--store", "2", "--prefill", "2"][..], &["--colocated"], &["--no-store", "--decode", "3"]] {
            let plan = plan(line);
            let mut running = Vec::new();
            for stage in 0..STAGES {
                for (name, text) in plan.nodes(stage, &running) {
                    let config =
                        Config::parse(&text, |_| None).unwrap_or_else(|error| panic!("{name}: {error}\n{text}"));
                    assert_eq!(config.roles(), [name.split('-').next().unwrap()]);
                    let told = Told { address: "127.0.0.1:7123".into(), http: "127.0.0.1:8123".parse().unwrap() };
                    let again = Config::parse(&pinned(&text, &told), |_| None).unwrap();
                    assert_eq!((again.node.listen.port(), again.node.http.port()), (7123, 8123));
                    running.push((name, "127.0.0.1:7123".to_owned()));
                }
            }
            assert_eq!(running.last().unwrap().0, "router");
        }
    }
}
