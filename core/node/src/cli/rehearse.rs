//! `millpond rehearse`: the live router under a trace, over synthetic nodes in scaled time, beside the simulator.
//!
//! Requests go through the HTTP face of a real router (parsed, tokenised, placed, admitted, answered as events) to nodes that
//! take the time of the default profile instead of computing. Both rows judge alike: the first token by the clock of whoever
//! asked, gaps between tokens by the nodes' own, since a scaled millisecond of this machine's scheduler is none of theirs.

use std::path::PathBuf;
use std::sync::Arc;

use futures::channel::mpsc;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::StreamExt;
use millpond_core::sched::{admission, placement};
use millpond_core::sim::trace::{Builder, Trace};
use millpond_core::sim::{Fate, Outcome, Setup, percentile, run as simulate};
use millpond_core::time::{Duration, Instant};
use serde_json::{Value as Json, json};

use super::failure::Failure;
use super::progress::Bar;
use super::replay::file;
use super::store_cmds::{Exit, Format, Output};
use crate::http::{Api, Handler, Method, Pages, Request};
use crate::metrics::Registry;
use crate::router::{Gaps, Synthetic, Timers, scaled, times};
use crate::runtime::Runtime;

/// Arguments of `rehearse`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A JSON object a line, as `replay` reads it.
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// Which prefill node serves a request; see `replay`.
    #[arg(long, value_name = "POLICY", default_value = "millpond")]
    policy: placement::Policy,
    /// Whether it is served; a list gives two rows each, live and simulated.
    #[arg(long, value_name = "POLICY", value_delimiter = ',', default_value = "millpond")]
    admission: Vec<admission::Policy>,
    /// Prefill nodes.
    #[arg(long, value_name = "N", default_value_t = 8)]
    prefill: usize,
    /// Decode nodes.
    #[arg(long, value_name = "M", default_value_t = 8)]
    decode: usize,
    /// The pace of requests, times the trace's.
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    speed: f64,
    /// How many times faster than the profile the whole cluster goes, requests included.
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    scale: f64,
    /// Requests are sent for so many seconds of this machine's time; what was sent is waited for.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    seconds: u64,
    /// Seed of the jitter.
    #[arg(long, value_name = "K", default_value_t = 1)]
    seed: u64,
    /// Arrivals are moved later by less than this, in milliseconds of the trace.
    #[arg(long, value_name = "MS", default_value_t = 3000)]
    jitter: u32,
    /// One in so many of the refused comes back when it was told to; 0: nobody does.
    #[arg(long, value_name = "N", default_value_t = 10)]
    retries: usize,
    /// Write the decision log to this file; with a list of admissions the last one's stays.
    #[arg(long, value_name = "FILE")]
    decisions: Option<PathBuf>,
}

/// A row of the table.
#[derive(Clone, Debug, Default, PartialEq)]
struct Row {
    effective: usize,
    missed: usize,
    early: usize,
    late: usize,
    failed: usize,
    ttft_mean_s: f64,
    ttft_p90_s: f64,
    live: Option<Live>,
}

/// What only a live run has.
#[derive(Clone, Debug, Default, PartialEq)]
struct Live {
    /// The slowest refusal on arrival, of this machine's time.
    refusal_max: Duration,
    /// Those who came back when they were told, and those of them who were served.
    retried: usize,
    retries_served: usize,
    /// By how much the latest request was sent too late, of the cluster's time.
    lag_max: Duration,
    /// Resident memory of the process, at the start and after each quarter of the requests was sent, in MiB.
    memory: Vec<u64>,
    /// Most requests in the router at once.
    open_max: u64,
}

/// What became of a request.
enum Seen {
    Served { ttft: Duration, gap: Duration },
    Refused { is_late: bool, took: Duration, retry: Option<bool> },
    Failed,
}

pub(super) async fn run<R: Runtime>(runtime: &R, args: Args, output: &mut Output<'_>) -> Result<Exit, Failure> {
    for (name, value) in [("speed", args.speed), ("scale", args.scale)] {
        if !(value.is_finite() && value > 0.0) {
            return Err(Failure::Usage(format!("--{name} is a number above 0, not {value}")));
        }
    }
    let trace = file::read(&args.trace).map_err(|error| Failure::Said(error.to_string()))?;
    let trace = trace.with_jitter(Duration::from_millis(args.jitter.into()), args.seed).at_speed(args.speed);
    let trace = Arc::new(until(&trace, args.seconds, args.scale));
    let mut setup = Setup::default();
    (setup.prefill, setup.decode, setup.seed) = (args.prefill, args.decode, args.seed);
    setup.placement.policy = args.policy;
    setup.check().map_err(|error| Failure::Usage(error.to_string()))?;
    if output.format == Format::Text {
        let Args { prefill, decode, speed, scale, .. } = &args;
        let head = format!(
            "{} requests at {speed}x, {prefill} prefill and {decode} decode nodes, time runs {scale} times as fast\n\n{}",
            trace.requests().len(),
            line(["admission", "", "effective", "missed", "early", "late", "failed", "TTFT mean", "TTFT p90"])
        );
        output.line(&head, Json::Null)?;
    }
    for &admission in &args.admission {
        setup.admission.policy = admission;
        let tasks = runtime.clone();
        let machine = Machine {
            timers: scaled(runtime, args.scale),
            spawn: Arc::new(move |task| tasks.spawn(task)),
            scale: args.scale,
        };
        let more = More { retries: args.retries, decisions: args.decisions.clone() };
        let live = rehearse(machine, &setup, &trace, more).await?;
        write(output, admission, "live", &live)?;
        let simulated = simulate(&trace, &setup).map_err(|error| Failure::Usage(error.to_string()))?;
        write(output, admission, "simulated", &Row::of(&simulated))?;
    }
    Ok(Exit::Done)
}

/// The requests that are sent in so many seconds of this machine's time.
fn until(trace: &Trace, seconds: u64, scale: f64) -> Trace {
    let mut builder = Builder::new();
    for request in trace.requests() {
        if request.at.as_nanos() as f64 / 1e9 > seconds as f64 * scale {
            break;
        }
        let (input, answer) = (request.input_tokens, request.output_tokens.max(1));
        let pushed = builder.push(request.at, input, answer, trace.blocks_of(request));
        pushed.expect("a part of a trace is one");
    }
    builder.build().expect("a part of a trace is one")
}

impl Row {
    fn of(outcome: &Outcome) -> Self {
        Self {
            effective: outcome.effective(),
            missed: outcome.count(Fate::Missed),
            early: outcome.count(Fate::RejectedEarly),
            late: outcome.count(Fate::RejectedLate),
            failed: 0,
            ttft_mean_s: outcome.ttft_mean(),
            ttft_p90_s: outcome.ttft_percentile(90.0).as_secs_f64(),
            live: None,
        }
    }
}

/// What a rehearsal runs on: the cluster's clock, and tasks.
#[derive(Clone)]
struct Machine {
    timers: Timers,
    spawn: Arc<dyn Fn(BoxFuture<'static, ()>) + Send + Sync>,
    /// How many times faster than this machine's clock the cluster's is.
    scale: f64,
}

/// What a rehearsal does beside sending requests.
struct More {
    /// One in so many of the refused comes back; 0: nobody does.
    retries: usize,
    decisions: Option<PathBuf>,
}

/// What the requests go through.
struct Stage {
    machine: Machine,
    api: Api,
    gaps: Gaps,
}

impl Stage {
    /// The cluster's time.
    fn now(&self) -> Instant {
        self.machine.timers.now()
    }

    async fn sleep(&self, span: Duration) {
        (self.machine.timers.sleep)(span).await;
    }

    /// Sends a request and reads its answer to the end. The error's code and hint if it is refused.
    async fn send(&self, id: &str, body: Vec<u8>) -> Result<Duration, Option<(String, Duration)>> {
        let mut request = Request::new(Method::Post, "/v1/completions", body);
        request.id = id.to_owned();
        let sent = self.now();
        let reply = self.api.answer(request).await;
        if reply.status() != 200 {
            let error: Json = reply.text().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
            let hint = reply.header("retry-after").and_then(|secs| secs.parse().ok()).map(Duration::from_secs);
            return Err(error["error"]["code"].as_str().map(str::to_owned).zip(hint));
        }
        let (mut events, mut ttft, mut tail) = (reply.into_chunks(), None, Vec::new());
        while let Some(event) = events.next().await {
            ttft.get_or_insert_with(|| self.now().since(sent));
            tail = event;
        }
        // An answer that broke off ends without its mark.
        let is_whole = tail.windows(6).any(|part| part == b"[DONE]");
        ttft.filter(|_| is_whole).ok_or(None)
    }

    async fn ask(&self, number: usize, body: Vec<u8>, comes_back: bool) -> Seen {
        let (id, sent) = (format!("rehearsal-{number}"), self.now());
        match self.send(&id, body.clone()).await {
            Ok(ttft) => Seen::Served { ttft, gap: self.gaps.take(&id).unwrap_or_default() },
            Err(None) => Seen::Failed,
            Err(Some((code, hint))) => {
                let took = times(self.now().since(sent), 1.0 / self.machine.scale);
                let mut retry = None;
                if comes_back {
                    self.sleep(hint).await;
                    retry = Some(self.send(&id, body).await.is_ok());
                    let _ = self.gaps.take(&id);
                }
                Seen::Refused { is_late: code == "refused_late", took, retry }
            }
        }
    }
}

/// The live run.
async fn rehearse(machine: Machine, setup: &Setup, trace: &Arc<Trace>, more: More) -> Result<Row, Failure> {
    let cluster = Synthetic {
        prefill: setup.prefill,
        decode: setup.decode,
        profile: setup.profile,
        placement: setup.placement,
        admission: setup.admission,
        slo: setup.slo,
        decisions: more.decisions,
    };
    let registry = Registry::new();
    let (router, gaps) = cluster.start(&machine.timers, &*machine.spawn, &registry).map_err(Failure::Said)?;
    let open = registry.gauge("millpond_router_requests_open", "Requests that wait or run.", &[]);
    let api = Api::new(Arc::new(router), Pages::new("router"));
    let stage = Arc::new(Stage { machine, api, gaps });
    let (told, results) = mpsc::unbounded();
    let sender = (Arc::clone(&stage), Arc::clone(trace), more.retries);
    let sending = async move {
        let (stage, trace, retries) = sender;
        let began = stage.now();
        let mut live = Live { memory: vec![resident()], ..Live::default() };
        let quarter = trace.requests().len().div_ceil(4).max(1);
        for (number, request) in trace.requests().iter().enumerate() {
            stage.sleep(request.at.since(Instant::ZERO + stage.now().since(began))).await;
            live.lag_max = live.lag_max.max((Instant::ZERO + stage.now().since(began)).since(request.at));
            live.open_max = live.open_max.max(open.value());
            if number % quarter == quarter - 1 {
                live.memory.push(resident());
            }
            let (each, told) = (Arc::clone(&stage), told.clone());
            let comes_back = retries > 0 && number % retries == 0;
            let body = body(request.input_tokens, request.output_tokens, trace.blocks_of(request));
            (stage.machine.spawn)(
                async move {
                    // Nobody listens any more once the command was interrupted.
                    let _ = told.unbounded_send(each.ask(number, body, comes_back).await);
                }
                .boxed(),
            );
        }
        live
    };
    let bar = Bar::new(trace.requests().len());
    let seen = results.inspect(|_| bar.step()).collect::<Vec<_>>();
    let (live, seen) = futures::future::join(sending, seen).await;
    Ok(counted(&seen, live, setup))
}

fn counted(seen: &[Seen], mut live: Live, setup: &Setup) -> Row {
    let (mut row, mut ttfts) = (Row::default(), Vec::new());
    for one in seen {
        match one {
            Seen::Served { ttft, gap } => {
                ttfts.push(*ttft);
                let is_effective = *ttft <= setup.slo.ttft && *gap <= setup.slo.tbt;
                *(if is_effective { &mut row.effective } else { &mut row.missed }) += 1;
            }
            Seen::Refused { is_late, took, retry } => {
                *(if *is_late { &mut row.late } else { &mut row.early }) += 1;
                if !is_late {
                    live.refusal_max = live.refusal_max.max(*took);
                }
                live.retried += usize::from(retry.is_some());
                live.retries_served += usize::from(*retry == Some(true));
            }
            Seen::Failed => row.failed += 1,
        }
    }
    ttfts.sort_unstable();
    let sum: f64 = ttfts.iter().map(|ttft| ttft.as_secs_f64()).sum();
    row.ttft_mean_s = sum / ttfts.len().max(1) as f64;
    row.ttft_p90_s = percentile(&ttfts, 90.0).as_secs_f64();
    row.live = Some(live);
    row
}

/// A prompt whose blocks are equal where the trace's are: each begins with its number, and the rest is zeros.
fn body(input: u32, output: u32, blocks: &[u64]) -> Vec<u8> {
    let block_tokens = usize::try_from(millpond_core::sim::trace::BLOCK_TOKENS).unwrap_or(usize::MAX);
    let input = usize::try_from(input).unwrap_or(usize::MAX);
    let mut body = format!(
        r#"{{"model":"synthetic","max_tokens":{output},"stream":true,"ignore_eos":true,"temperature":0,"prompt":["#
    );
    for at in 0..input {
        let first = blocks.get(at / block_tokens).filter(|_| at % block_tokens == 0);
        let separator = if at == 0 { "" } else { "," };
        body.push_str(separator);
        match first {
            Some(block) => body.push_str(&(block + 1).to_string()),
            None => body.push('0'),
        }
    }
    body.push_str("]}");
    body.into_bytes()
}

/// Resident memory of this process in MiB; 0 where the system does not say.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages: Option<u64> = pages.and_then(|text| text.split(' ').nth(1)?.parse().ok());
    (pages.unwrap_or(0) * rustix::param::page_size() as u64) >> 20
}

fn line(cells: [&str; 9]) -> String {
    let [admission, place, rest @ ..] = cells;
    format!("{admission:<14}{place:<11}") + &rest.map(|cell| format!("{cell:>11}")).concat()
}

fn write(output: &mut Output<'_>, admission: admission::Policy, place: &str, row: &Row) -> Result<(), Failure> {
    let Row { effective, missed, early, late, failed, ttft_mean_s, ttft_p90_s, live } = row;
    let counts = [effective, missed, early, late, failed].map(|count| count.to_string());
    let seconds = [ttft_mean_s, ttft_p90_s].map(|seconds| format!("{seconds:.2} s"));
    let [effective_cell, missed_cell, early_cell, late_cell, failed_cell] = &counts;
    let [mean_cell, p90_cell] = &seconds;
    let mut text = line([
        admission.name(),
        place,
        effective_cell,
        missed_cell,
        early_cell,
        late_cell,
        failed_cell,
        mean_cell,
        p90_cell,
    ]);
    let mut value = json!({
        "admission": admission.name(), "place": place, "effective": effective, "missed": missed,
        "rejected_early": early, "rejected_late": late, "failed": failed, "ttft_mean_s": ttft_mean_s,
        "ttft_p90_s": ttft_p90_s,
    });
    if let Some(live) = live {
        let Live { refusal_max, retried, retries_served, lag_max, memory, open_max } = live;
        text.push_str(&format!(
            "\n    slowest refusal {refusal_max}; {retries_served} of {retried} served when they came back as told; \
             at most {open_max} in the router; memory {memory:?} MiB; sent at most {lag_max} late"
        ));
        value["refusal_max_ms"] = (refusal_max.as_micros() as f64 / 1e3).into();
        value["retried"] = json!({"asked": retried, "served": retries_served});
        value["memory_mib"] = json!(memory);
        value["open_max"] = json!(open_max);
        value["lag_max_ms"] = (lag_max.as_micros() as f64 / 1e3).into();
    }
    Ok(output.line(&text, value)?)
}

#[cfg(test)]
mod tests;
