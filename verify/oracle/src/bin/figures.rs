//! Figures of the scheduler on a trace: `figures TRACE [name=value ...]`, a line per run. `figures placement` times decisions.
//!
//! Names: `speed`, `seeds`, `placement`, `admission`, `order` (patience), `prefill`, `decode` and the others in `apply`.

use std::time::Instant as Wall;

use millpond_core::sched::cost::Profile;
use millpond_core::sched::placement::{Options, PrefillView, Prompt, place_prefill};
use millpond_core::sched::queue::Order;
use millpond_core::sim::trace::{Builder, Synthetic, Trace};
use millpond_core::sim::{Baseline, Fate, Outcome, Served, Setup, Tenant, run};
use millpond_core::time::{Duration, Instant};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("the path of a trace, `synthetic` or `placement`");
    if path == "placement" {
        return [64, 1_000].into_iter().for_each(time_placement);
    }
    let mut bench =
        Bench { setup: Setup::default(), speed: 1.0, seeds: 1, bin: 3_000, synthetic: Synthetic::default() };
    for argument in arguments {
        let (name, value) = argument.split_once('=').expect("name=value");
        bench.apply(name, value);
    }
    let trace = if path == "synthetic" { bench.synthetic.trace() } else { load(&path) };
    for seed in 1..=bench.seeds {
        let jittered = trace.clone().with_jitter(Duration::from_millis(bench.bin), seed).at_speed(bench.speed);
        let mut setup = bench.setup.clone();
        setup.seed = seed;
        let begun = Wall::now();
        let outcome = run(&jittered, &setup).expect("a cluster");
        print(&bench, seed, &outcome, begun.elapsed().as_secs_f64());
    }
}

struct Bench {
    setup: Setup,
    speed: f64,
    seeds: u64,
    bin: u64,
    synthetic: Synthetic,
}

impl Bench {
    fn apply(&mut self, name: &str, value: &str) {
        let setup = &mut self.setup;
        let float = || value.parse::<f64>().expect("a number");
        let count = || value.parse::<usize>().expect("a count");
        let small = || value.parse::<u32>().expect("a count");
        match name {
            "speed" => self.speed = float(),
            "seeds" => self.seeds = count() as u64,
            "jitter" => self.bin = count() as u64,
            "rate" => self.synthetic.rate = float(),
            "requests" => self.synthetic.requests = small(),
            "input" => self.synthetic.input_tokens = small()..=small(),
            "output" => self.synthetic.output_tokens = small(),
            "placement" => setup.placement.policy = value.parse().expect("a placement"),
            "admission" => {
                setup.admission.policy = *millpond_core::sched::admission::Policy::ALL
                    .iter()
                    .find(|policy| policy.name() == value)
                    .expect("an admission");
            }
            "order" => {
                let (patience, limit) = value.split_once(':').expect("patience:limit in ms");
                let limit = Duration::from_millis(limit.parse().expect("milliseconds"));
                setup.order = Some(Order::ShortFirst { patience: patience.parse().expect("a number"), limit });
            }
            "push" => setup.placement.push_back = float(),
            "threshold" => setup.placement.threshold = float(),
            "level" => setup.admission.level = float(),
            "hold" => setup.admission.hold = Duration::from_millis(count() as u64),
            "bonus" => setup.admission.bonus = float(),
            "turns" => setup.admission.turns = small(),
            "prefill" => setup.prefill = count(),
            "decode" => setup.decode = count(),
            "coupled" => (setup.prefill, setup.decode, setup.coupled) = (0, 0, count()),
            "baseline" => {
                setup.baseline = match value {
                    "plain" => Baseline::Plain,
                    "prefix" => Baseline::PrefixCaching,
                    _ => Baseline::ChunkedPrefill,
                }
            }
            "blocks" => setup.cache_blocks = Some(small()).filter(|&blocks| blocks < u32::MAX),
            "pooled" => setup.pooled = value == "yes",
            "evict" => setup.evict = value.parse().expect("a policy"),
            "bandwidth" => setup.profile.link.bytes_per_second = float(),
            "pipeline" => setup.pipeline = small(),
            "chunk" => setup.chunk = small(),
            "stale" => setup.staleness = Duration::from_millis(count() as u64),
            "loss" => setup.event_loss = float(),
            "noise" => setup.prefill_noise = float(),
            "decode_noise" => setup.decode_noise = float(),
            "hint" => setup.hint_noise = Some(float()),
            "tbt" => setup.slo.tbt = Duration::from_millis(count() as u64),
            "ttft" => setup.slo.ttft = Duration::from_secs(count() as u64),
            "tenants" => {
                setup.tenants =
                    value.split(':').map(|part| Tenant { offered: part.parse().expect("parts"), weight: 1.0 }).collect()
            }
            "together" => setup.together = Some(small()),
            "retries" => setup.retries = millpond_core::sim::Retries { share: float(), tries: 3 },
            _ => panic!("no such name: {name}"),
        }
    }
}

fn print(bench: &Bench, seed: u64, outcome: &Outcome, wall: f64) {
    let (setup, millis) = (&bench.setup, |span: Duration| span.as_secs_f64() * 1e3);
    println!(
        "{} {} x{} seed {seed}: effective {} early {} late {} missed {} waste {:.0} bound {:.0} | ttft {:.3} p50 {:.2} p90 {:.2} p99 {:.2} | tbt p50 {:.1} p90 {:.1} | hit {:.2} {:.2} prefill {:.3} | corr {:.2} cover {:.3} held {} pulls {} stale {} | {:016x} {wall:.2}s",
        setup.placement.policy.name(),
        setup.admission.policy.name(),
        bench.speed,
        outcome.effective(),
        outcome.count(Fate::RejectedEarly),
        outcome.count(Fate::RejectedLate),
        outcome.count(Fate::Missed),
        outcome.wasted_prefill_s,
        outcome.length_blind_bound,
        outcome.ttft_mean(),
        outcome.ttft_percentile(50.0).as_secs_f64(),
        outcome.ttft_percentile(90.0).as_secs_f64(),
        outcome.ttft_percentile(99.0).as_secs_f64(),
        millis(outcome.tbt_percentile(50.0)),
        millis(outcome.tbt_percentile(90.0)),
        outcome.hit_blocks_pct(512),
        outcome.hit_tokens_pct(),
        outcome.prefill_mean(),
        outcome.load_correlation(),
        outcome.coverage(),
        outcome.held,
        outcome.pulls,
        outcome.stale,
        outcome.decisions,
    );
    if std::env::var_os("DETAIL").is_some() {
        for tenant in 0..u32::try_from(outcome.tenants.len()).expect("few") {
            let fates = [Fate::Effective, Fate::Missed, Fate::RejectedEarly, Fate::RejectedLate];
            let of = |fate| outcome.served.iter().filter(|one| one.tenant == tenant && one.fate == fate).count();
            println!("  tenant {tenant}: {:?}", fates.map(|fate| (fate, of(fate))));
        }
        let mut order: Vec<_> = outcome.served.iter().collect();
        order.sort_by_key(|one| one.input);
        let served = |part: &[&Served]| part.iter().filter(|one| one.fate == Fate::Effective).count();
        let tenths = order.chunks(order.len().div_ceil(10));
        let prompts: Vec<f64> = tenths.map(|part| served(part) as f64 / part.len() as f64).collect();
        println!(
            "  deciles {:.2?} prompts {prompts:.2?} prefill {:?} decode {:?} tenants {:.1?}",
            outcome.deciles(),
            outcome.by_prefill,
            outcome.by_decode,
            outcome.tenants
        );
    }
}

/// How long one decision among so many instances takes.
fn time_placement(instances: u32) {
    let view = |instance: u32| PrefillView {
        wait: Duration::from_millis(u64::from(instance * 7919 % 1_000)),
        behind: instance % 3,
        matched: instance * 104_729 % 40,
        ..PrefillView::default()
    };
    let views: Vec<PrefillView> = (0..instances).map(view).collect();
    let (options, profile, mut considered) = (Options::default(), Profile::default(), Vec::new());
    let mut times: Vec<u128> = (0..20_000_u64)
        .map(|turn| {
            let begun = Wall::now();
            let prompt = Prompt { tokens: 12_000 + u32::try_from(turn % 4_096).expect("small"), turn };
            std::hint::black_box(place_prefill(&options, &profile, prompt, &views, &mut considered));
            begun.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    println!("placement over {instances}: p50 {} ns, p99 {} ns", times[10_000], times[19_800]);
}

/// Reads a trace of JSON lines as the Mooncake repository has them. Only what those hold is understood.
fn load(path: &str) -> Trace {
    let text = std::fs::read_to_string(path).expect("a trace that can be read");
    let mut builder = Builder::new();
    for line in text.lines() {
        let field = |name: &str| {
            let after = &line[line.find(name).expect("the field") + name.len() + 2..];
            after.trim_start().split([',', '}']).next().expect("a value").trim().parse::<u64>().expect("a number")
        };
        let blocks = &line[line.find('[').expect("blocks") + 1..line.find(']').expect("blocks")];
        let blocks: Vec<u64> = blocks.split(',').map(|block| block.trim().parse().expect("a block")).collect();
        let small = |value| u32::try_from(value).expect("a count");
        let at = Instant::from_nanos(field("timestamp") * 1_000_000);
        builder
            .push(at, small(field("input_length")), small(field("output_length")), &blocks)
            .expect("a valid request");
    }
    builder.build().expect("a valid trace")
}
