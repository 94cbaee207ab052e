//! `--set NAME=VALUE`: the knobs of the simulator that have no flag of their own, and `--profile`: what nodes cost.

use std::path::Path;

use millpond_core::sched::admission::Slo;
use millpond_core::sched::cost::{Decode, Link, Prefill, Profile};
use millpond_core::sched::queue::Order;
use millpond_core::sim::trace::Synthetic;
use millpond_core::sim::{Class, Retries, Setup, Tenant};
use millpond_core::time::Duration;
use serde::Deserialize;

use crate::cli::failure::Failure;

/// What knobs change.
#[derive(Clone, Debug)]
pub(super) struct Panel {
    pub(super) setup: Setup,
    /// The workload of `replay synthetic`.
    pub(super) workload: Synthetic,
}

/// A knob: its name, what it takes and does, and how; `None`: the value is no such thing.
struct Knob(&'static str, &'static str, fn(&mut Panel, &str) -> Option<()>);

const KNOBS: [Knob; 28] = [
    Knob("threshold", "TIMES more prefix elsewhere, for the paper's placements to pull", |panel, value| {
        float(value).map(|times| panel.setup.placement.threshold = times)
    }),
    Knob("push_back", "what millpond counts a second of pushing somebody back, in SECONDS", |panel, value| {
        float(value).map(|seconds| panel.setup.placement.push_back = seconds)
    }),
    Knob("order", "PATIENCE:LIMIT_MS of short prompts first, or fifo", |panel, value| {
        let order = if value == "fifo" { Order::Fifo } else { short_first(value)? };
        panel.setup.order = Some(order);
        Some(())
    }),
    Knob("level", "CHANCE of missing a deadline that millpond accepts", |panel, value| {
        float(value).map(|level| panel.setup.admission.level = level)
    }),
    Knob("hold_ms", "how long millpond holds a prompt before its decode node, in MS", |panel, value| {
        millis(value).map(|hold| panel.setup.admission.hold = hold)
    }),
    Knob("bonus", "REQUESTS a decode node that who is favoured may have beyond the level", |panel, value| {
        float(value).map(|bonus| panel.setup.admission.bonus = bonus)
    }),
    Knob("turns", "one in N of those that cost too much is served all the same", |panel, value| {
        value.parse().ok().map(|turns| panel.setup.admission.turns = turns)
    }),
    Knob("ttft_ms", "deadline of the first token, in MS", |panel, value| {
        millis(value).map(|ttft| panel.setup.slo.ttft = ttft)
    }),
    Knob("tbt_ms", "deadline between tokens, in MS", |panel, value| millis(value).map(|tbt| panel.setup.slo.tbt = tbt)),
    Knob("class", "SHARE:TTFT_MS:TBT_MS:PRIORITY of some requests; may come several times", |panel, value| {
        let [share, ttft, tbt, priority] = parts(value)?;
        let slo = Slo { ttft: millis(ttft)?, tbt: millis(tbt)? };
        panel.setup.classes.push(Class { share: float(share)?, slo, priority: priority.parse().ok()? });
        Some(())
    }),
    Knob("tenants", "PART:PART:... of the requests, each a tenant", |panel, value| {
        let each = value.split(':').map(|part| Some(Tenant { offered: float(part)?, weight: 1.0 }));
        panel.setup.tenants = each.collect::<Option<_>>()?;
        Some(())
    }),
    Knob("weights", "WEIGHT:WEIGHT:... of the tenants, after them", |panel, value| {
        let weights: Vec<f64> = value.split(':').map(float).collect::<Option<_>>()?;
        let tenants = &mut panel.setup.tenants;
        (weights.len() == tenants.len()).then(|| {
            tenants.iter_mut().zip(weights).for_each(|(tenant, weight)| tenant.weight = weight);
        })
    }),
    Knob("retries", "SHARE:TRIES of those who are refused and come back when told to", |panel, value| {
        let [share, tries] = parts(value)?;
        panel.setup.retries = Retries { share: float(share)?, tries: tries.parse().ok()? };
        Some(())
    }),
    Knob(
        "hint_noise",
        "requests announce their answers, off by this standard deviation (0.5: 50 %)",
        |panel, value| float(value).map(|noise| panel.setup.hint_noise = Some(noise)),
    ),
    Knob("pooled", "yes: one cache of all nodes' blocks", |panel, value| {
        panel.setup.pooled = ["no", "yes"].iter().position(|word| *word == value)? == 1;
        Some(())
    }),
    Knob("pipeline", "NODES that compute one prompt together, in chunks", |panel, value| {
        value.parse().ok().map(|nodes| panel.setup.pipeline = nodes)
    }),
    Knob("chunk", "TOKENS of a chunk", |panel, value| value.parse().ok().map(|tokens| panel.setup.chunk = tokens)),
    Knob("hop_ms", "from one stage of the pipeline to the next, in MS", |panel, value| {
        millis(value).map(|hop| panel.setup.hop = hop)
    }),
    Knob("together", "REQUESTS that a coupled instance works on at once", |panel, value| {
        value.parse().ok().map(|most| panel.setup.together = Some(most))
    }),
    Knob("staleness_ms", "how late the index hears of blocks, in MS", |panel, value| {
        millis(value).map(|delay| panel.setup.staleness = delay)
    }),
    Knob("event_loss", "SHARE of that which it never hears", |panel, value| {
        float(value).map(|share| panel.setup.event_loss = share)
    }),
    Knob("prefill_noise", "standard deviation of a prefill, as a SHARE of it", |panel, value| {
        float(value).map(|noise| panel.setup.prefill_noise = noise)
    }),
    Knob("decode_noise", "the same of a decode step", |panel, value| {
        float(value).map(|noise| panel.setup.decode_noise = noise)
    }),
    Knob("sample_ms", "how often loads are sampled, in MS", |panel, value| {
        millis(value).map(|sample| panel.setup.sample = sample)
    }),
    Knob("rate", "of `synthetic`: REQUESTS a second", |panel, value| {
        float(value).filter(|rate| *rate > 0.0).map(|rate| panel.workload.rate = rate)
    }),
    Knob("requests", "of `synthetic`: how MANY", |panel, value| {
        value.parse().ok().map(|requests| panel.workload.requests = requests)
    }),
    Knob("lengths", "of `synthetic`: FROM:TO tokens in, each length as likely, :OUT tokens out", |panel, value| {
        let [from, to, out] = parts(value)?;
        let (from, to): (u32, u32) = (from.parse().ok()?, to.parse().ok()?);
        (panel.workload.input_tokens, panel.workload.output_tokens) = (from..=to, out.parse().ok()?);
        (from > 0 && from <= to).then_some(())
    }),
    Knob(
        "shared",
        "of `synthetic`: SHARE:DOCUMENTS, the part of a prompt that one of so many begins with",
        |panel, value| {
            let [share, documents] = parts(value)?;
            let (share, documents): (f64, u32) = (float(share)?, documents.parse().ok()?);
            (panel.workload.prefix_share, panel.workload.documents) = (share, documents);
            ((0.0..=1.0).contains(&share) && documents > 0).then_some(())
        },
    ),
];

fn float(value: &str) -> Option<f64> {
    value.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)
}

fn millis(value: &str) -> Option<Duration> {
    value.parse().ok().map(Duration::from_millis)
}

fn parts<const N: usize>(value: &str) -> Option<[&str; N]> {
    value.split(':').collect::<Vec<_>>().try_into().ok()
}

fn short_first(value: &str) -> Option<Order> {
    let [patience, limit] = parts(value)?;
    Some(Order::ShortFirst { patience: float(patience)?, limit: millis(limit)? })
}

/// Turns a knob.
pub(super) fn turn(panel: &mut Panel, setting: &str) -> Result<(), Failure> {
    let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
    let Some(Knob(_, what, apply)) = KNOBS.iter().find(|knob| knob.0 == name) else {
        let near = KNOBS
            .iter()
            .map(|knob| knob.0)
            .max_by(|a, b| strsim::jaro_winkler(name, a).total_cmp(&strsim::jaro_winkler(name, b)));
        let near = near.unwrap_or_default();
        return Err(Failure::Usage(format!("--set {name}: there is no such knob; is it {near}? `--help` lists them")));
    };
    let wrong = || Failure::Usage(format!("--set {name}: {value:?} does not do; it takes: {what}"));
    apply(panel, value).ok_or_else(wrong)
}

/// The text of `--help`.
pub(super) fn help() -> String {
    let knob = |Knob(name, what, _): &Knob| format!("  {name:<14}{what}\n");
    format!("Turns a knob of the simulator; may come several times.\n\n{}", KNOBS.iter().map(knob).collect::<String>())
}

/// A profile as a file has it; what is not there is of the default one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    block_tokens: Option<u32>,
    kv_bytes_per_token: Option<u64>,
    cache_blocks: Option<u32>,
    decode_tokens_max: Option<u64>,
    prefill: Option<PrefillFile>,
    decode: Option<DecodeFile>,
    link: Option<LinkFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PrefillFile {
    fixed_s: f64,
    linear_s: f64,
    quadratic_s: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DecodeFile {
    fixed_s: f64,
    per_request_s: f64,
    per_token_s: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFile {
    bytes_per_second: f64,
    latency_s: f64,
}

/// Reads what nodes cost from a TOML file.
pub(super) fn profile(path: &Path) -> Result<Profile, Failure> {
    let text = std::fs::read_to_string(path).map_err(Failure::system(path.display().to_string()))?;
    parse_profile(&text).map_err(|what| Failure::Said(format!("{}: {what}", path.display())))
}

fn parse_profile(text: &str) -> Result<Profile, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut profile = Profile::default();
    profile.block_tokens = file.block_tokens.unwrap_or(profile.block_tokens);
    profile.kv_bytes_per_token = file.kv_bytes_per_token.unwrap_or(profile.kv_bytes_per_token);
    profile.cache_blocks = file.cache_blocks.unwrap_or(profile.cache_blocks);
    profile.decode_tokens_max = file.decode_tokens_max.unwrap_or(profile.decode_tokens_max);
    if let Some(PrefillFile { fixed_s, linear_s, quadratic_s }) = file.prefill {
        profile.prefill = Prefill { fixed: fixed_s, linear: linear_s, quadratic: quadratic_s };
    }
    if let Some(DecodeFile { fixed_s, per_request_s, per_token_s }) = file.decode {
        profile.decode = Decode { fixed: fixed_s, per_request: per_request_s, per_token: per_token_s };
    }
    if let Some(LinkFile { bytes_per_second, latency_s }) = file.link {
        profile.link = Link { bytes_per_second, latency: latency_s };
    }
    let Profile { prefill, decode, link, .. } = profile;
    let seconds = [prefill.fixed, prefill.quadratic, decode.per_request, decode.per_token, link.latency];
    let at_least = |value: f64, least: f64| value.is_finite() && value >= least;
    if !seconds.into_iter().all(|value| at_least(value, 0.0)) {
        return Err("times are numbers of seconds, 0 or more".to_owned());
    }
    let needed = [prefill.linear, decode.fixed, link.bytes_per_second].map(|value| at_least(value, f64::MIN_POSITIVE));
    if needed.contains(&false) {
        return Err("prefill.linear_s, decode.fixed_s and link.bytes_per_second are above 0".to_owned());
    }
    if profile.block_tokens != millpond_core::sim::trace::BLOCK_TOKENS {
        return Err("block_tokens is 512: traces name blocks of so many tokens".to_owned());
    }
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel() -> Panel {
        Panel { setup: Setup::default(), workload: Synthetic::default() }
    }

    #[test]
    fn every_knob_turns_something_and_refuses_nonsense() {
        let values = [
            "threshold=2",
            "push_back=0.5",
            "order=3:2000",
            "level=0.3",
            "hold_ms=5",
            "bonus=2",
            "turns=9",
            "ttft_ms=7",
            "tbt_ms=8",
            "class=0.1:5000:50:1",
            "tenants=1:9",
            "weights=1:2",
            "retries=0.5:2",
            "hint_noise=0.5",
            "pooled=yes",
            "pipeline=2",
            "chunk=512",
            "hop_ms=2",
            "together=1",
            "staleness_ms=9",
            "event_loss=0.01",
            "prefill_noise=0.1",
            "decode_noise=0.1",
            "sample_ms=500",
            "rate=2",
            "requests=5",
            "lengths=5:6:7",
            "shared=0.3:4",
        ];
        assert_eq!(values.map(|setting| setting.split('=').next()), KNOBS.each_ref().map(|knob| Some(knob.0)));
        let mut turned = panel();
        for setting in values {
            let before = turned.clone();
            turn(&mut turned, setting).unwrap();
            assert_ne!((&before.setup, &before.workload), (&turned.setup, &turned.workload), "{setting}");
            let name = setting.split('=').next().unwrap();
            for nonsense in ["x", "", "-1", "1:2:3:4:5"] {
                if name != "tenants" || nonsense.contains('x') {
                    assert!(turn(&mut panel(), &format!("{name}={nonsense}")).is_err(), "{name}={nonsense}");
                }
            }
        }
        assert_eq!(turned.setup.check(), Ok(()));
        let said = turn(&mut panel(), "stalenes_ms=5").unwrap_err().to_string();
        assert!(said.contains("is it staleness_ms?"), "{said}");
        assert!(help().contains("\n  retries "), "{}", help());
    }

    #[test]
    fn a_profile_has_what_the_file_says_and_the_default_for_the_rest() {
        let profile =
            parse_profile("cache_blocks = 7\n[decode]\nfixed_s = 0.01\nper_request_s = 0\nper_token_s = 1e-8\n");
        let profile = profile.unwrap();
        assert_eq!(
            (profile.cache_blocks, profile.decode.fixed, profile.prefill),
            (7, 0.01, Profile::default().prefill)
        );
        for (text, what) in [
            ("cache_block = 7", "cache_block"),
            ("[link]\nbytes_per_second = 0\nlatency_s = 0", "above 0"),
            ("[prefill]\nfixed_s = -1\nlinear_s = 1\nquadratic_s = 0", "0 or more"),
            ("[prefill]\nfixed_s = 1", "linear_s"),
            ("block_tokens = 16", "512"),
        ] {
            let said = parse_profile(text).unwrap_err();
            assert!(said.contains(what), "{text}: {said}");
        }
    }
}
