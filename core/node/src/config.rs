//! The configuration of one node: which roles it has, where it listens, whom it knows.
//!
//! A TOML file with a section per subject; a role is on if its section is there. `MILLPOND_SECTION_KEY` in the environment
//! overrides a key. A key that does not exist is an error that names the nearest one; nothing is silently ignored.
//!
//! ```toml
//! [node]
//! name = "decode-0"
//! listen = "127.0.0.1:7001"
//!
//! [model]
//! file = "toy"
//!
//! [decode]
//! memory = "256MiB"
//! ```

mod profile;
mod settings;
mod table;
#[cfg(feature = "http")]
mod tenants;

use std::net::SocketAddr;
use std::path::PathBuf;

use millpond_core::sched::colocate::Colocate;
use millpond_core::sched::{admission, placement};
use millpond_core::time::Duration;

pub use self::profile::profile;
pub use self::settings::{Origin, Setting};
use self::settings::{Reader, Value};
pub use self::table::FileError;
#[cfg(feature = "http")]
pub use self::tenants::tenants;
use crate::files::FolderOptions;
use crate::tls::Files;

/// Why a configuration cannot be used.
///
/// ```
/// use millpond_node::config::Config;
/// let error = Config::parse("[store]\nsiez = \"1GiB\"", |_| None).unwrap_err();
/// assert_eq!(error.to_string(), "line 2: there is no key `store.siez`; did you mean `store.size`?");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is no TOML.
    #[error("line {line}: {reason}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// A key before the first section.
    #[error("line {line}: `{key}` stands outside a section; write it below one such as [node]")]
    OutsideSection {
        /// The key.
        key: String,
        /// Counted from 1.
        line: usize,
    },
    /// There is no such section.
    #[error("line {line}: there is no section `{section}`; did you mean `{nearest}`?")]
    UnknownSection {
        /// Its name.
        section: String,
        /// Counted from 1.
        line: usize,
        /// The existing one most like it.
        nearest: String,
    },
    /// There is no such key.
    #[error("line {line}: there is no key `{key}`; did you mean `{nearest}`?")]
    UnknownKey {
        /// Section and name.
        key: String,
        /// Counted from 1.
        line: usize,
        /// The existing one most like it.
        nearest: String,
    },
    /// A value is of the wrong type.
    #[error("`{key}` ({origin}) must be {wants}")]
    Type {
        /// Section and name.
        key: String,
        /// Where it was set.
        origin: Origin,
        /// What it must be.
        wants: &'static str,
    },
    /// A value makes no sense.
    #[error("`{key}` ({origin}): {reason}")]
    Value {
        /// Section and name.
        key: String,
        /// Where it was set.
        origin: Origin,
        /// What is wrong with it.
        reason: String,
    },
    /// The sections do not go together.
    #[error("{reason}")]
    Roles {
        /// What is missing or contradicts.
        reason: String,
    },
    /// The file cannot be read.
    #[error("{path}: {error}")]
    File {
        /// Its path.
        path: String,
        /// What the system said.
        error: std::io::Error,
    },
}

/// The configuration of one node.
///
/// ```
/// use millpond_node::config::Config;
/// let config = Config::parse("[store]\nsize = \"64MiB\"\ndirectory = true", |_| None).unwrap();
/// assert_eq!(config.store.unwrap().size, 64 << 20);
/// assert!(config.prefill.is_none());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// What every node has.
    pub node: Node,
    /// The certificates of its node port, if sessions and lanes are encrypted.
    pub tls: Option<Files>,
    /// Which NICs may be used, and for which memory.
    pub topology: NicChoice,
    /// Where the directory is, for those who use the store: `host:port`; empty if there is no store.
    pub directory: String,
    /// The store role.
    pub store: Option<Store>,
    /// The model, for the roles that need one.
    pub model: Model,
    /// The prefill role.
    pub prefill: Option<Prefill>,
    /// The decode role.
    pub decode: Option<Decode>,
    /// The router role.
    pub router: Option<Router>,
    /// The directory whose files it publishes.
    pub files: Option<FolderOptions>,
    settings: Vec<Setting>,
    unknown_variables: Vec<(String, String)>,
}

/// What every node has.
///
/// ```
/// let config = millpond_node::config::Config::parse("[store]\ndirectory = true", |_| None).unwrap();
/// assert!(config.node.listen.ip().is_loopback());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Node {
    /// Its name in logs and listings; its id is made from it, so no two nodes of a cluster may share one. Default: its
    /// roles and where it listens.
    pub name: String,
    /// The node port: control sessions and lanes.
    pub listen: SocketAddr,
    /// Where peers reach the node port, `host:port`; several, divided by commas, where it is in several networks, the best
    /// first. Empty: where it listens.
    pub advertise: String,
    /// The HTTP port: the API of a router, and the pages every node has.
    pub http: SocketAddr,
    /// Where it keeps what outlives it; without it, nothing does.
    pub data: Option<PathBuf>,
    /// The key that all nodes of a cluster share; empty lets anybody in and is for loopback only.
    pub key: String,
    /// The transport to use: `auto`, `tcp`, `shm`, `rdma`.
    pub via: String,
    /// How long a node that was told to stop may take.
    pub drain: Duration,
    /// Whether payloads over tcp carry a checksum of our own.
    pub checksums: bool,
    /// A tcp lane that nobody used for so long is closed, until it is used again.
    pub lane_idle: Duration,
}

/// What an operator may lay down about NICs.
///
/// ```
/// use millpond_node::config::NicChoice;
/// let config = "[decode]\n[topology]\nnic_deny = [\"mlx5_1\"]";
/// let choice = millpond_node::config::Config::parse(config, |_| None).unwrap().topology;
/// assert_eq!(choice, NicChoice { deny: vec!["mlx5_1".into()], ..NicChoice::default() });
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NicChoice {
    /// Only these, by name, or by the start of it and a `*`; none: all.
    pub allow: Vec<String>,
    /// Not these, allowed or not.
    pub deny: Vec<String>,
    /// A file with a priority matrix to use instead of the discovered one.
    pub matrix: Option<PathBuf>,
}

/// The store role.
///
/// ```
/// let config = millpond_node::config::Config::parse("[store]\ndirectory = true", |_| None).unwrap();
/// assert!(config.store.unwrap().hosts_directory);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Store {
    /// Bytes of memory it lends.
    pub size: u64,
    /// Whether it hosts the directory.
    pub hosts_directory: bool,
}

/// The model.
///
/// ```
/// let config = millpond_node::config::Config::parse("[prefill]", |_| None).unwrap();
/// assert_eq!(config.model.file, "toy");
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Model {
    /// `toy`, or the path of a GGUF file.
    pub file: String,
    /// Its name in requests; empty is the model's own.
    pub name: String,
    /// Threads that compute; 0 is one per core.
    pub threads: usize,
}

/// The prefill role.
///
/// ```
/// let config = millpond_node::config::Config::parse("[prefill]\nmemory = \"8MiB\"", |_| None).unwrap();
/// assert_eq!(config.prefill.unwrap().memory, 8 << 20);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Prefill {
    /// Bytes of KV pages.
    pub memory: u64,
    /// Requests that may wait for their turn.
    pub waiting_max: u64,
}

/// The decode role.
///
/// ```
/// let config = millpond_node::config::Config::parse("[decode]\nbatch_max = 4", |_| None).unwrap();
/// assert_eq!(config.decode.unwrap().batch_max, 4);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Decode {
    /// Bytes of KV pages.
    pub memory: u64,
    /// Requests decoded together.
    pub batch_max: u64,
    /// Requests that may wait for pages.
    pub waiting_max: u64,
    /// What happens to a prompt that would slow down the batch too much.
    pub admission: admission::Policy,
}

/// The router role.
///
/// ```
/// let text = "[router]\ndecode = [\"127.0.0.1:7001\"]";
/// let router = millpond_node::config::Config::parse(text, |_| None).unwrap().router.unwrap();
/// assert!(router.prefill.is_empty(), "decode nodes compute prompts themselves");
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Router {
    /// The node ports of the prefill nodes, `host:port`; none: decode nodes compute prompts themselves.
    pub prefill: Vec<String>,
    /// The node ports of the decode nodes.
    pub decode: Vec<String>,
    /// Requests served at a time.
    pub running_max: u64,
    /// Requests that may wait.
    pub waiting_max: u64,
    /// A request that lasts longer is given up.
    pub deadline: Duration,
    /// Who serves a request.
    pub placement: placement::Policy,
    /// Whether decode nodes may compute prompts although there are prefill nodes.
    pub colocate: Colocate,
    /// Whether it is served.
    pub admission: admission::Policy,
    /// Deadlines of requests that name none.
    pub slo: admission::Slo,
    /// Where the decision log is written, if it is.
    pub decisions: Option<PathBuf>,
    /// What nodes cost until it is measured, see [`profile`]; without it, as in the default profile.
    pub profile: Option<PathBuf>,
    /// Who may use it, see `config::tenants`; without it, everybody.
    pub tenants: Option<PathBuf>,
}

impl Config {
    /// Reads a file, with the process's environment over it.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn read(path: &std::path::Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::File { path: path.display().to_string(), error })?;
        let mut config = Self::parse(&text, |name| std::env::var(name).ok())?;
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        config.unknown_variables = settings::unknown_variables(names, &config.settings);
        Ok(config)
    }

    /// Reads TOML, with `environment` over it.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn parse(text: &str, environment: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut reader = Reader::new(text, &environment)?;
        let node = node(&mut reader)?;
        let tls = tls(&mut reader)?;
        reader.section("topology");
        let topology = NicChoice {
            allow: reader.texts("topology.nic_allow")?,
            deny: reader.texts("topology.nic_deny")?,
            matrix: path(&mut reader, "topology.matrix")?,
        };
        reader.section("directory");
        let directory = reader.text("directory.address", "")?.0;
        let has_store = reader.section("store");
        let store = Store {
            size: reader.size("store.size", "1GiB")?,
            hosts_directory: reader.flag("store.directory", Value::Flag(false))?,
        };
        reader.section("model");
        let model = Model {
            file: reader.text("model.file", "toy")?.0,
            name: reader.text("model.name", "")?.0,
            threads: to_usize(reader.integer("model.threads", 0, 0..=1_024)?),
        };
        let has_prefill = reader.section("prefill");
        let prefill = Prefill {
            memory: reader.size("prefill.memory", "256MiB")?,
            waiting_max: reader.integer("prefill.waiting_max", 256, 0..=65_536)?,
        };
        let has_decode = reader.section("decode");
        let decode = Decode {
            memory: reader.size("decode.memory", "512MiB")?,
            batch_max: reader.integer("decode.batch_max", 64, 1..=4_096)?,
            waiting_max: reader.integer("decode.waiting_max", 256, 0..=65_536)?,
            admission: reader.parsed("decode.admission", "millpond", named)?,
        };
        let router = router(&mut reader)?;
        let files = files(&mut reader)?;
        let mut config = Self {
            node,
            tls,
            topology,
            directory,
            store: has_store.then_some(store),
            model,
            prefill: has_prefill.then_some(prefill),
            decode: has_decode.then_some(decode),
            router,
            files,
            settings: reader.finish()?,
            unknown_variables: Vec::new(),
        };
        config.check()?;
        if config.node.name.is_empty() {
            config.node.name = default_name(&config);
            if let Some(setting) = config.settings.iter_mut().find(|setting| setting.key == "node.name") {
                setting.value = toml::Value::from(config.node.name.as_str()).to_string();
            }
        }
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let wrong = |reason: &str| Err(ConfigError::Roles { reason: reason.into() });
        if self.roles().is_empty() {
            return wrong("no role is configured; add a section [store], [prefill], [decode], [router] or [files]");
        }
        match &self.router {
            Some(router) if router.decode.is_empty() && self.decode.is_none() => {
                return wrong("`router.decode` names no node; give at least one, such as [\"127.0.0.1:7001\"]");
            }
            _ => {}
        }
        match &self.store {
            Some(store) if !store.hosts_directory && self.directory.is_empty() => {
                return wrong("a store node needs a directory; set `store.directory` = true or `directory.address`");
            }
            _ => {}
        }
        if self.node.key.is_empty() && self.tls.is_none() && !self.node.listen.ip().is_loopback() {
            return wrong(
                "`node.listen` is not loopback, so `node.key` or [tls] must be set: without them anybody is let in",
            );
        }
        Ok(())
    }

    /// The names of the roles this node has.
    #[must_use]
    pub fn roles(&self) -> Vec<&'static str> {
        let roles = [
            ("store", self.store.is_some()),
            ("prefill", self.prefill.is_some()),
            ("decode", self.decode.is_some()),
            ("router", self.router.is_some()),
            ("files", self.files.is_some()),
        ];
        roles.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect()
    }

    /// Variables of the environment that look like settings and are none, and the nearest that is one. They are no error:
    /// an orchestrator may set such names for purposes of its own.
    #[must_use]
    pub fn unknown_variables(&self) -> &[(String, String)] {
        &self.unknown_variables
    }

    /// Every setting that is in force and where it came from.
    #[must_use]
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }
}

fn router(reader: &mut Reader<'_>) -> Result<Option<Router>, ConfigError> {
    let has_router = reader.section("router");
    let router = Router {
        prefill: reader.texts("router.prefill")?,
        decode: reader.texts("router.decode")?,
        running_max: reader.integer("router.running_max", 256, 1..=65_536)?,
        waiting_max: reader.integer("router.waiting_max", 1_024, 0..=1_048_576)?,
        deadline: reader.parsed("router.deadline", "10m", parse_span)?,
        placement: reader.parsed("router.placement", "millpond", named)?,
        colocate: reader.parsed("router.colocate", "never", named)?,
        admission: reader.parsed("router.admission", "millpond", named)?,
        slo: admission::Slo {
            ttft: reader.parsed("router.ttft_slo", "2m", parse_span)?,
            tbt: reader.parsed("router.tbt_slo", "10s", parse_span)?,
        },
        decisions: path(reader, "router.decisions")?,
        profile: path(reader, "router.profile")?,
        tenants: path(reader, "router.tenants")?,
    };
    Ok(has_router.then_some(router))
}

/// A path; nothing where none is set.
fn path(reader: &mut Reader<'_>, key: &'static str) -> Result<Option<PathBuf>, ConfigError> {
    let text = reader.text(key, "")?.0;
    Ok(Some(text).filter(|path| !path.is_empty()).map(PathBuf::from))
}

/// A policy by its name.
fn named<P: std::str::FromStr<Err: std::fmt::Display>>(name: &str) -> Result<P, String> {
    name.parse().map_err(|error: P::Err| error.to_string())
}

fn node(reader: &mut Reader<'_>) -> Result<Node, ConfigError> {
    reader.section("node");
    let address = |text: &str| {
        text.parse::<SocketAddr>().map_err(|_| format!("{text:?} is no address; write it like \"127.0.0.1:7001\""))
    };
    let via = |text: &str| match text {
        "auto" | "tcp" | "shm" | "rdma" => Ok(text.to_owned()),
        _ => Err(format!("{text:?} is no transport of this version; use auto, tcp, shm or rdma")),
    };
    let name = |text: &str| match text.len() {
        0..=64 => Ok(text.to_owned()),
        len => Err(format!("a name has at most 64 bytes, not {len}")),
    };
    let data = reader.text("node.data", "")?.0;
    Ok(Node {
        name: reader.parsed("node.name", "", name)?,
        listen: reader.parsed("node.listen", "127.0.0.1:7000", address)?,
        advertise: reader.texts("node.advertise")?.join(","),
        http: reader.parsed("node.http", "127.0.0.1:8000", address)?,
        data: (!data.is_empty()).then(|| PathBuf::from(data)),
        key: reader.text("node.key", "")?.0,
        via: reader.parsed("node.via", "auto", via)?,
        drain: reader.parsed("node.drain", "5s", parse_span)?,
        checksums: reader.flag("node.checksums", Value::Flag(false))?,
        lane_idle: reader.parsed("node.lane_idle", "10m", parse_span)?,
    })
}

/// The names are those of Prometheus' `tls_config`.
fn tls(reader: &mut Reader<'_>) -> Result<Option<Files>, ConfigError> {
    let has_section = reader.section("tls");
    let keys = ["tls.cert_file", "tls.key_file", "tls.ca_file"];
    let mut paths = Vec::new();
    for key in keys {
        paths.push(reader.text(key, "")?.0);
    }
    let server_name = reader.text("tls.server_name", "")?.0;
    let bind_nodes = reader.flag("tls.bind_nodes", Value::Flag(false))?;
    let reload_interval = reader.parsed("tls.reload_interval", "10s", parse_span)?;
    if !has_section && paths.iter().all(String::is_empty) {
        return Ok(None);
    }
    if let Some(missing) = paths.iter().position(String::is_empty) {
        let reason = format!("[tls] needs `{}` too: both ends of every connection show a certificate", keys[missing]);
        return Err(ConfigError::Roles { reason });
    }
    let [cert_file, key_file, ca_file] = &paths[..] else { return Ok(None) };
    let mut files = Files::new(cert_file, key_file, ca_file);
    (files.server_name, files.bind_nodes, files.reload_interval) = (server_name, bind_nodes, reload_interval);
    Ok(Some(files))
}

fn files(reader: &mut Reader<'_>) -> Result<Option<FolderOptions>, ConfigError> {
    let has_section = reader.section("files");
    let mut options = FolderOptions::new(reader.text("files.directory", "")?.0);
    options.rights = reader.parsed("files.rights", "read", str::parse)?;
    options.open_max = to_usize(reader.integer("files.open_max", 64, 1..=4_096)?);
    options.len_max = reader.size("files.len_max", "64GiB")?;
    options.files_max = to_usize(reader.integer("files.files_max", 1_024, 1..=1_048_576)?);
    let is_named = !options.directory.as_os_str().is_empty();
    if has_section && !is_named {
        let reason = "[files] needs `files.directory`: peers may open whatever lies in it".to_owned();
        return Err(ConfigError::Roles { reason });
    }
    Ok(is_named.then_some(options))
}

/// Nodes that listen on a port of their own choosing are told apart by their processes.
fn default_name(config: &Config) -> String {
    let (roles, listen) = (config.roles().join("+"), config.node.listen);
    match config.node.advertise.as_str() {
        "" if listen.port() == 0 => format!("{roles}@{}#{}", listen.ip(), std::process::id()),
        "" => format!("{roles}@{listen}"),
        advertise => format!("{roles}@{advertise}"),
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Parses a size in bytes: `4096`, `4KiB`, `1.5MiB`, `2GB`.
///
/// ```
/// assert_eq!(millpond_node::config::parse_size("1.5MiB"), Ok(1_572_864));
/// ```
///
/// # Errors
/// What is wrong with `text`, for people.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(format!("{text:?} is no size; write it like 4096, 4KiB or 1.5MiB"));
    }
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(format!("{unit:?} is no unit; use B, KiB, MiB, GiB, TiB, KB, MB or GB")),
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let whole: u64 = whole.parse().map_err(|_| format!("{text:?} is no size; write it like 4096, 4KiB or 1.5MiB"))?;
    let bytes = whole.checked_mul(factor).ok_or_else(|| format!("{text:?} is more than can be counted"))?;
    let part: u64 = match part {
        "" => 0,
        part if part.len() <= 6 => {
            let digits: u64 = part.parse().map_err(|_| format!("{text:?} is no size"))?;
            // At most 10^6 times 2^40: fits.
            digits * factor / 10u64.pow(u32::try_from(part.len()).unwrap_or(6))
        }
        _ => return Err(format!("{text:?} has more than six decimals")),
    };
    match bytes.saturating_add(part) {
        0 => Err("a size must be at least one byte".into()),
        bytes => Ok(bytes),
    }
}

/// Parses a span of time: `500us`, `20ms`, `5s`, `10m`, `1h`.
///
/// ```
/// use millpond_core::time::Duration;
/// assert_eq!(millpond_node::config::parse_span("10m"), Ok(Duration::from_secs(600)));
/// ```
///
/// # Errors
/// What is wrong with `text`, for people.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 =
        number.parse().map_err(|_| format!("{text:?} is no span of time; write it like 20ms, 5s or 10m"))?;
    let unit = match unit.trim() {
        "us" => Duration::from_micros(1),
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3_600),
        _ => return Err(format!("{text:?} needs a unit: us, ms, s, m or h")),
    };
    match unit.saturating_mul(number) {
        Duration::ZERO => Err("a span of time must be longer than nothing".into()),
        span => Ok(span),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse(text, |_| None).unwrap_err().to_string()
    }

    #[test]
    fn what_does_not_exist_is_named_with_its_line_and_the_nearest_that_does() {
        assert_eq!(
            error("[decode]\n\nbatch = 4"),
            "line 3: there is no key `decode.batch`; did you mean `decode.batch_max`?"
        );
        assert_eq!(error("[stroe]\nsize = \"1GiB\""), "line 1: there is no section `stroe`; did you mean `store`?");
        assert!(error("size = 3").contains("outside a section"));
        assert!(error("[store\n").starts_with("line 1: "));
    }

    #[test]
    fn wrong_types_and_values_say_what_is_wanted_and_where() {
        assert_eq!(error("[node]\nname = 3"), "`node.name` (line 2) must be a string");
        assert!(error("[decode]\nbatch_max = 0").contains("`decode.batch_max` (line 2): 0 is not from 1"));
        assert!(error("[store]\nsize = \"lots\"").contains("\"lots\" is no size"));
        assert!(error("[store]\nsize = \"4lots\"").contains("\"lots\" is no unit"));
        assert!(error("[store]\nsize = true").contains("4KiB"));
        assert_eq!(
            Config::parse("[store]\nsize = 4096\ndirectory = true", |_| None).unwrap().store.unwrap().size,
            4096
        );
        assert!(error("[node]\nlisten = \"here\"\n[decode]").contains("no address"));
        assert!(error("[decode]\nbatch_max = -1").contains("a whole number from 0"));
    }

    #[test]
    fn the_environment_is_over_the_file_and_both_are_shown() {
        let environment = |name: &str| (name == "MILLPOND_DECODE_BATCH_MAX").then(|| "7".to_owned());
        let config = Config::parse("[decode]\nbatch_max = 4\nmemory = \"1MiB\"", environment).unwrap();
        assert_eq!(config.decode.as_ref().unwrap().batch_max, 7);
        let origin =
            |key: &str| config.settings().iter().find(|setting| setting.key == key).unwrap().origin.to_string();
        assert_eq!(origin("decode.batch_max"), "MILLPOND_DECODE_BATCH_MAX");
        assert_eq!(origin("decode.memory"), "line 3");
        assert_eq!(origin("node.drain"), "default");
        let wrong = Config::parse("[decode]", |name| (name == "MILLPOND_DECODE_BATCH_MAX").then(|| "x".into()));
        assert!(wrong.unwrap_err().to_string().contains("MILLPOND_DECODE_BATCH_MAX"));
    }

    #[test]
    fn a_router_decides_as_millpond_does_unless_told() {
        let router = |text: &str| Config::parse(&format!("[router]\ndecode = [\"127.0.0.1:7001\"]\n{text}"), |_| None);
        let default = router("").unwrap().router.unwrap();
        assert_eq!((default.placement.name(), default.admission.name()), ("millpond", "millpond"));
        assert_eq!((default.slo.ttft, default.decisions), (Duration::from_secs(120), None));
        let chosen =
            router("placement = \"random\"\nadmission = \"late\"\ntbt_slo = \"100ms\"").unwrap().router.unwrap();
        assert_eq!((chosen.placement.name(), chosen.admission.name()), ("random", "late"));
        assert_eq!(chosen.slo.tbt, Duration::from_millis(100));
        let wrong = router("placement = \"fastest\"").unwrap_err().to_string();
        assert!(wrong.contains("`router.placement` (line 3)") && wrong.contains("one of: random"), "{wrong}");
    }

    #[test]
    fn roles_that_cannot_work_are_refused() {
        assert!(error("").contains("no role"));
        assert!(error("[store]").contains("store.directory"));
        assert!(error("[router]").contains("router.decode"));
        assert!(error("[decode]\n[node]\nlisten = \"0.0.0.0:7000\"").contains("node.key"));
        assert!(error("[decode]\n[tls]\ncert_file = \"a\"\nca_file = \"b\"").contains("tls.key_file"));
        assert!(error("[decode]\n[tls]").contains("tls.cert_file"));
        assert!(error("[files]").contains("files.directory"));
        assert!(error("[files]\ndirectory = \"/srv\"\nrights = \"all\"").contains("read, write, create"));
        let secured =
            "[decode]\n[node]\nlisten = \"0.0.0.0:7000\"\n[tls]\ncert_file = \"a\"\nkey_file = \"b\"\nca_file = \"c\"";
        assert_eq!(Config::parse(secured, |_| None).unwrap().tls, Some(Files::new("a", "b", "c")));
    }

    #[test]
    fn nodes_without_a_name_are_told_apart_by_where_they_are() {
        let name = |text: &str| Config::parse(text, |_| None).unwrap().node.name;
        let host = |address: &str| {
            name(&format!("[decode]\n[node]\nlisten = \"0.0.0.0:7001\"\nkey = \"k\"\nadvertise = \"{address}:7001\""))
        };
        assert_ne!(host("10.0.0.1"), host("10.0.0.2"));
        assert_eq!(name("[store]\ndirectory = true"), "store@127.0.0.1:7000");
        assert!(name("[decode]\n[node]\nlisten = \"127.0.0.1:0\"").ends_with(&std::process::id().to_string()));
    }

    #[test]
    fn the_key_is_not_shown() {
        let config = Config::parse("[decode]\n[node]\nkey = \"xyzzy\"", |_| None).unwrap();
        assert_eq!(config.node.key, "xyzzy");
        assert!(config.settings().iter().all(|setting| !setting.value.contains("xyzzy")));
    }

    #[test]
    fn sizes_and_spans_need_sense() {
        for wrong in ["", "0", "MiB", "4 parsecs", "-1", "1..5", "99999999999TiB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "5", "0s", "s", "5 parsecs"] {
            assert!(parse_span(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_size("4KiB"), Ok(4_096));
        assert_eq!(parse_size("2GB"), Ok(2_000_000_000));
    }
}
