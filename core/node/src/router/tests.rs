//! A router over nodes that do what the test says, under a clock that moves only when somebody sleeps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures::executor::block_on;
use futures::future::{BoxFuture, FutureExt, ready};
use futures::stream::{self, BoxStream, StreamExt};
use millpond_core::sched::colocate::Colocate;
use millpond_core::sched::conductor::Decision;
use millpond_core::time::{Duration, Instant};
use millpond_core::wire::message::serve::{
    FinishReason, Finished, GenerateRequest, Generated, Load, PrefillDone, Started,
};
use parking_lot::Mutex;

use super::link::{Link, Lost, Timers};
use super::service::{Known, Nodes};
use super::*;
use crate::metrics::Registry;
use crate::model::toy;

mod parallel;

/// What a fake decode node does with the next request.
enum Script {
    /// Streams these, then hangs unless the last one is finished or an error.
    Items(Vec<Result<Generated, Lost>>),
}

/// A decode node that follows its scripts, the last one for ever.
#[derive(Default)]
struct Fake {
    scripts: Mutex<VecDeque<Script>>,
    asked: Mutex<Vec<GenerateRequest>>,
    is_full: AtomicBool,
    is_gone: AtomicBool,
}

impl Link for Fake {
    fn generate(
        &self,
        request: GenerateRequest,
        _: &Decision,
        _: Instant,
    ) -> BoxStream<'static, Result<Generated, Lost>> {
        self.asked.lock().push(request);
        let mut scripts = self.scripts.lock();
        let items = match scripts.front() {
            None => vec![Err(Lost::Decode { detail: "connection refused".into() })],
            Some(Script::Items(items)) => items.clone(),
        };
        if scripts.len() > 1 {
            scripts.pop_front();
        }
        stream::iter(items).chain(stream::pending()).boxed()
    }

    fn load(&self, _: Instant) -> BoxFuture<'static, Result<Load, Lost>> {
        let busy = Lost::Busy { reason: "256 calls are open".into(), retry_after: Duration::ZERO };
        let gone = Lost::Prefill { detail: "connection refused".into() };
        ready(match (self.is_gone.load(Ordering::SeqCst), self.is_full.load(Ordering::SeqCst)) {
            (true, _) => Err(gone),
            (_, true) => Err(busy),
            _ => Ok(Load::default()),
        })
        .boxed()
    }
}

fn word(text: &str, finish: Option<FinishReason>) -> Result<Generated, Lost> {
    let sent = Some(PrefillDone { via: "tcp".into(), times: None });
    let finished = finish.map(|reason| Finished { reason: reason.into(), batch_max: 1, sent, ..Default::default() });
    Ok(Generated { tokens: text.bytes().map(u32::from).collect(), started: None, finished })
}

fn first(text: &str, cached_tokens: u32) -> Result<Generated, Lost> {
    let started = Some(Started { cached_tokens, ..Default::default() });
    word(text, None).map(|message| Generated { started, ..message })
}

fn dead() -> Script {
    Script::Items(vec![Err(Lost::Decode { detail: "connection refused".into() })])
}

fn prefill_dead() -> Script {
    Script::Items(vec![Err(Lost::Prefill { detail: "prefill-0 is gone".into() })])
}

fn answer() -> Script {
    Script::Items(vec![first("he", 3), word("llo", Some(FinishReason::Length))])
}

struct Bench {
    router: Router,
    timers: Timers,
    registry: Registry,
    prefills: Vec<Arc<Fake>>,
    decodes: Vec<Arc<Fake>>,
}

fn bench(prefills: usize, scripts: Vec<Vec<Script>>, limits: RouterLimits) -> Bench {
    scheduled(prefills, scripts, limits, &Scheduling::default())
}

fn scheduled(prefills: usize, scripts: Vec<Vec<Script>>, limits: RouterLimits, scheduling: &Scheduling) -> Bench {
    let clock = Arc::new(AtomicU64::new(0));
    let now = Arc::clone(&clock);
    let timers = Timers {
        now: Arc::new(move || Instant::from_nanos(now.load(Ordering::SeqCst))),
        sleep: Arc::new(move |span| {
            let clock = Arc::clone(&clock);
            let mut slept = false;
            // Others get a turn first, as with a real timer.
            std::future::poll_fn(move |context| {
                if std::mem::replace(&mut slept, true) {
                    clock.fetch_add(span.as_nanos(), Ordering::SeqCst);
                    return std::task::Poll::Ready(());
                }
                context.waker().wake_by_ref();
                std::task::Poll::Pending
            })
            .boxed()
        }),
    };
    let decodes: Vec<Arc<Fake>> = scripts
        .into_iter()
        .map(|scripts| Arc::new(Fake { scripts: Mutex::new(scripts.into()), ..Fake::default() }))
        .collect();
    let known = |role: &str, index: usize, link: Arc<dyn Link>| Known { address: format!("{role}-{index}"), link };
    let prefills: Vec<_> = (0..prefills).map(|_| Arc::new(Fake::default())).collect();
    let computing =
        prefills.iter().enumerate().map(|(index, link)| known("prefill", index, Arc::clone(link) as _)).collect();
    let links = decodes.iter().enumerate().map(|(index, link)| known("decode", index, Arc::clone(link) as _)).collect();
    let registry = Registry::new();
    let nodes = Nodes { prefills: computing, decodes: links, store: None };
    let router = Router::new(toy::card(), nodes, limits, scheduling, timers.clone(), &registry).unwrap();
    Bench { router, timers, registry, prefills, decodes }
}

fn request(id: &str, prompt: &str) -> Generate {
    Generate::new(id, "toy", Prompt::Text(prompt.into()))
}

/// The whole text of an answer, or how it failed.
fn text(generation: Generation) -> Result<String, Failure> {
    block_on(generation.pieces.map(|piece| piece.map(|piece| piece.text)).collect::<Vec<_>>()).into_iter().collect()
}

#[test]
fn a_node_that_is_too_busy_to_say_how_it_is_is_not_down() {
    let bench = bench(0, vec![vec![answer()]], RouterLimits::default());
    assert!(bench.router.ready().is_err(), "nobody was asked yet");
    bench.decodes[0].is_full.store(true, Ordering::SeqCst);
    let mut watch = Box::pin(bench.router.watch());
    assert!((&mut watch).now_or_never().is_none());
    assert_eq!(bench.router.ready(), Ok(()));
}

#[test]
fn an_answer_comes_through_and_leaves_its_record() {
    let bench = bench(1, vec![vec![answer()]], RouterLimits::default());
    let generation = block_on(bench.router.generate(request("r", "hi there"))).unwrap();
    assert_eq!((generation.prompt_tokens, generation.cached_tokens), (8, 3));
    assert_eq!(text(generation).unwrap(), "hello");
    let record = bench.router.explain("r", None).unwrap();
    assert_eq!(record["outcome"], "length");
    assert_eq!(record["generated_tokens"], 5);
    assert_eq!(record["tries"][0]["prefill"], "prefill-0");
    assert_eq!(record["via"], "tcp");
    assert_eq!(bench.decodes[0].asked.lock()[0].prefill, "prefill-0");
    assert!(bench.registry.text().contains("millpond_router_requests_total{outcome=\"length\"} 1\n"));
    assert!(bench.registry.text().contains("millpond_router_requests_open 0\n"));
}

#[test]
fn a_node_that_dies_before_the_first_token_is_replaced() {
    let bench = bench(0, vec![vec![dead()], vec![answer()]], RouterLimits::default());
    for index in 0..4 {
        let generation = block_on(bench.router.generate(request(&index.to_string(), "hi"))).unwrap();
        assert_eq!(text(generation).unwrap(), "hello");
    }
    // It is down: once it failed, the other one is asked first.
    assert!(bench.decodes[0].asked.lock().len() <= 1);
}

#[test]
fn a_lone_prefill_node_that_restarts_is_waited_for() {
    let scripts = vec![prefill_dead(), prefill_dead(), prefill_dead(), answer()];
    let bench = bench(1, vec![scripts], RouterLimits::default());
    let generation = block_on(bench.router.generate(request("r", "hi"))).unwrap();
    assert_eq!(text(generation).unwrap(), "hello");
    assert_eq!(bench.router.explain("r", None).unwrap()["tries"].as_array().unwrap().len(), 4);
    assert!(bench.registry.text().contains("millpond_router_retries_total{role=\"prefill\"} 3\n"));
}

#[test]
fn nodes_that_stay_away_are_an_error_in_bounded_time() {
    let bench = bench(1, vec![vec![dead()]], RouterLimits::default());
    let failure = block_on(bench.router.generate(request("r", "hi"))).unwrap_err();
    assert!(matches!(failure, Failure::NoNode { role: "decode", .. }), "{failure}");
    let record = bench.router.explain("r", None).unwrap();
    let took = record["took_us"].as_u64().unwrap();
    assert!((15_000_000..16_000_000).contains(&took), "{took}");
    assert_eq!(record["outcome"], "failed");
}

#[test]
fn a_node_that_dies_in_mid_answer_is_an_error_that_counts_the_tokens() {
    let gone = Script::Items(vec![first("he", 0), Err(Lost::Decode { detail: "reset".into() })]);
    let bench = bench(1, vec![vec![gone]], RouterLimits::default());
    let mut generation = block_on(bench.router.generate(request("r", "hi"))).unwrap();
    assert!(block_on(generation.pieces.next()).unwrap().is_ok());
    let failure = block_on(generation.pieces.next()).unwrap().unwrap_err();
    assert_eq!(failure, Failure::NodeLost { role: "decode", tokens: 2, detail: "reset".into() });
    assert!(block_on(generation.pieces.next()).is_none());
}

#[test]
fn a_client_that_leaves_gives_everything_back() {
    let hanging = Script::Items(vec![first("he", 0)]);
    let limits = RouterLimits { line: LineLimits { running_max: 1, waiting_max: 0 }, ..RouterLimits::default() };
    let bench = bench(1, vec![vec![hanging]], limits);
    let generation = block_on(bench.router.generate(request("r", "hi"))).unwrap();
    let busy = block_on(bench.router.generate(request("s", "hi"))).unwrap_err();
    assert!(matches!(busy, Failure::Busy { .. }), "{busy}");
    assert_eq!(bench.router.view()["decode"][0]["requests"], 1);
    drop(generation);
    assert_eq!(bench.router.explain("r", None).unwrap()["outcome"], "cancelled");
    assert_eq!(bench.router.view()["decode"][0]["requests"], 0);
    assert_eq!(bench.router.view()["prefill"][0]["requests"], 0);
    assert_eq!(bench.router.view()["running"], 0);
}

#[test]
fn a_prefix_goes_where_it_was_before() {
    let bench = bench(2, vec![vec![answer()]], RouterLimits::default());
    let shared = "x".repeat(64);
    for index in 0..6 {
        let generation =
            block_on(bench.router.generate(request(&index.to_string(), &format!("{shared}{index}")))).unwrap();
        text(generation).unwrap();
    }
    let asked = bench.decodes[0].asked.lock();
    assert!(asked.iter().all(|request| request.prefill == asked[0].prefill));
}

#[test]
fn prompts_that_nobody_knows_spread_over_idle_nodes() {
    let bench = bench(2, vec![vec![answer()]], RouterLimits::default());
    bench.router.presume_up();
    for index in 0..448 {
        let asked = request(&index.to_string(), &format!("{index:<64}"));
        text(block_on(bench.router.generate(asked)).unwrap()).unwrap();
    }
    let first = bench.decodes[0].asked.lock().iter().filter(|asked| asked.prefill == "prefill-0").count();
    assert!((448 * 45..=448 * 55).contains(&(100 * first)), "{first} of 448");
}

#[test]
fn who_would_miss_its_deadline_is_refused_with_a_hint_and_what_was_predicted() {
    let bench = bench(1, vec![vec![answer()]], RouterLimits::default());
    let mut hurried = request("r", "hi");
    hurried.tbt_slo = Some(Duration::from_millis(1));
    // Alone it is decoded as fast as can be: only beside others it would be too slow.
    let held = block_on(bench.router.generate(request("other", "hello"))).unwrap();
    let failure = block_on(bench.router.generate(hurried)).unwrap_err();
    let Failure::Overloaded { stage, reason, retry_after, .. } = failure else { panic!("{failure}") };
    assert_eq!((stage, reason), (Stage::Early, "tbt"));
    assert!(retry_after >= Duration::from_secs(1));
    let record = bench.router.explain("r", None).unwrap();
    assert_eq!(record["placement"]["admission"]["verdict"], "refuse");
    assert_eq!(record["placement"]["candidates"].as_array().unwrap().len(), 1);
    assert!(bench.registry.text().contains("millpond_router_refusals_total{stage=\"early\",reason=\"tbt\"} 1\n"));
    assert_eq!(bench.decodes[0].asked.lock().len(), 1, "no node was asked");
    drop(held);
}

#[test]
fn full_nodes_are_passed_over_and_if_all_are_full_the_client_is_told_when_to_return() {
    let full = || {
        let retry_after = Duration::from_secs(3);
        Script::Items(vec![Err(Lost::Busy { reason: "no pages".into(), retry_after })])
    };
    let one = bench(0, vec![vec![full()], vec![answer()]], RouterLimits::default());
    assert_eq!(text(block_on(one.router.generate(request("r", "hi"))).unwrap()).unwrap(), "hello");
    let both = bench(0, vec![vec![full()], vec![full()]], RouterLimits::default());
    let failure = block_on(both.router.generate(request("r", "hi"))).unwrap_err();
    assert_eq!(failure, Failure::Busy { reason: "no pages".into(), retry_after: Duration::from_secs(3) });
}

#[test]
fn a_stop_text_cancels_the_rest_and_is_not_part_of_the_answer() {
    let endless = Script::Items(vec![first("one st", 0), word("op two", None)]);
    let bench = bench(0, vec![vec![endless]], RouterLimits::default());
    let mut asked = request("r", "hi");
    asked.stop = vec!["stop".into()];
    let generation = block_on(bench.router.generate(asked)).unwrap();
    assert_eq!(text(generation).unwrap(), "one ");
    assert_eq!(bench.router.explain("r", None).unwrap()["outcome"], "stop");
}

#[test]
fn who_waits_in_line_past_the_deadline_is_told_so() {
    let limits = RouterLimits { line: LineLimits { running_max: 1, waiting_max: 1 }, ..RouterLimits::default() };
    let bench = bench(0, vec![vec![Script::Items(vec![first("he", 0)])]], limits);
    let _running = block_on(bench.router.generate(request("r", "hi"))).unwrap();
    let mut hurried = request("s", "hi");
    hurried.deadline = Some(Duration::from_millis(5));
    let failure = block_on(bench.router.generate(hurried)).unwrap_err();
    assert_eq!(failure, Failure::Deadline { limit: Duration::from_millis(5) });
}

#[test]
fn readiness_names_what_is_missing() {
    let bench = bench(1, vec![vec![answer()]], RouterLimits::default());
    assert!(bench.router.ready().unwrap_err().contains("decode-0"));
    // The fakes answer at once, so a turn of the watch is enough.
    assert!(bench.router.watch().now_or_never().is_none());
    assert_eq!(bench.router.ready(), Ok(()));
}

#[test]
fn without_a_prefill_node_it_is_ready_where_decode_nodes_compute_prompts() {
    for (colocate, is_ready) in [(Colocate::Never, false), (Colocate::Sooner, true)] {
        let mut scheduling = Scheduling::default();
        scheduling.placement.colocate = colocate;
        let bench = scheduled(1, vec![vec![answer()]], RouterLimits::default(), &scheduling);
        bench.prefills[0].is_gone.store(true, Ordering::SeqCst);
        assert!(bench.router.watch().now_or_never().is_none());
        assert_eq!(bench.router.ready().is_ok(), is_ready, "{colocate:?}");
    }
}

#[test]
fn a_tenant_neither_sees_nor_replaces_the_record_of_another_ones_request() {
    let bench = bench(0, vec![vec![answer()]], RouterLimits::default());
    for tenant in ["alice", "bob"] {
        let asked = Generate { tenant: Some(tenant.into()), ..request("same", "hi") };
        drop(block_on(bench.router.generate(asked)).unwrap());
    }
    for tenant in ["alice", "bob"] {
        assert_eq!(bench.router.explain("same", Some(tenant)).unwrap()["tenant"], tenant);
    }
    assert!(bench.router.explain("same", None).is_none());
}

#[test]
fn the_log_of_a_router_that_died_is_kept_beside_the_next_one() {
    let path = std::env::temp_dir().join(format!("millpond-kept-log-{}", std::process::id()));
    let kept = path.with_extension("1");
    let scheduling = Scheduling { decisions: Some(path.clone()), ..Scheduling::default() };
    let first = scheduled(0, vec![vec![answer()]], RouterLimits::default(), &scheduling);
    drop(block_on(first.router.generate(request("r", "hi"))).unwrap());
    // It never ends its log.
    let second = scheduled(0, vec![vec![answer()]], RouterLimits::default(), &scheduling);
    assert_eq!(second.router.view()["decision_log"]["is_whole"], true);
    let lines = |path: &std::path::Path| std::fs::read_to_string(path).unwrap().lines().count();
    assert!(lines(&kept) > 1 && lines(&path) == 1);
    drop((first, second));
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(&kept).unwrap();
}

#[test]
fn a_tenant_is_counted_by_name_and_its_requests_carry_it_to_the_nodes() {
    let mut scheduling = Scheduling::default();
    for (name, weight) in [("alice", 3.0), ("bob", 1.0)] {
        assert!(scheduling.keys.add(Tenant { name: name.into(), weight }, &[format!("sk-{name}")]));
    }
    let bench = scheduled(0, vec![vec![answer()]], RouterLimits::default(), &scheduling);
    assert!(matches!(bench.router.tenant(Some("sk-eve")), Err(Failure::Unauthorized { .. })));
    let mut asked = request("r", "hi");
    asked.tenant = bench.router.tenant(Some("sk-bob")).unwrap();
    assert_eq!(text(block_on(bench.router.generate(asked)).unwrap()).unwrap(), "hello");
    {
        let asked = bench.decodes[0].asked.lock();
        assert_eq!(asked[0].tenant, "bob");
        assert_eq!((asked[0].tbt_slo_ns, asked[0].ttft_slo_ns), (10_000_000_000, 120_000_000_000), "the router's own");
    }
    assert_eq!(bench.router.explain("r", Some("bob")).unwrap()["tenant"], "bob");
    // Others in its batch would be too slow for it.
    let _held = block_on(bench.router.generate(request("other", "hello"))).unwrap();
    let mut hurried = request("s", "hi");
    (hurried.tenant, hurried.tbt_slo) = (Some("alice".into()), Some(Duration::from_millis(1)));
    assert!(block_on(bench.router.generate(hurried)).is_err());
    let metrics = bench.registry.text();
    for line in [
        "millpond_router_tenant_requests_total{tenant=\"bob\",outcome=\"length\"} 1\n",
        "millpond_router_tenant_requests_total{tenant=\"alice\",outcome=\"failed\"} 1\n",
        "millpond_router_tenant_refusals_total{tenant=\"alice\",stage=\"early\"} 1\n",
        "millpond_router_tenant_tokens_total{tenant=\"bob\",kind=\"prompt\"} 2\n",
        "millpond_router_tenant_tokens_total{tenant=\"bob\",kind=\"generated\"} 5\n",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}

#[test]
fn whether_a_decode_node_computes_a_prompt_is_in_its_record_with_the_figures_that_decided() {
    let mut scheduling = Scheduling::default();
    scheduling.placement.colocate = Colocate::Sooner;
    let served = |bench: &Bench| {
        assert_eq!(text(block_on(bench.router.generate(request("r", "hi"))).unwrap()).unwrap(), "hello");
        let record = bench.router.explain("r", None).unwrap();
        let asked = bench.decodes[0].asked.lock().last().unwrap().prefill.clone();
        (record["placement"]["colocation"].clone(), record["tries"][0]["prefill"].clone(), asked)
    };
    // Nobody has looked whether the prefill node is up.
    let alone = scheduled(1, vec![vec![answer()]], RouterLimits::default(), &scheduling);
    let (choice, tried, asked) = served(&alone);
    assert_eq!((&choice["chosen"], &choice["reason"]), (&true.into(), &"prefill_instances_down".into()));
    assert_eq!((tried, &*asked), (serde_json::Value::Null, ""));
    alone.router.presume_up();
    let (choice, _, asked) = served(&alone);
    assert_eq!((&choice["reason"], &*asked), (&"sooner".into(), ""), "the hop takes longer than nothing: {choice}");
    assert!(choice["hop_ms"].as_f64() > Some(0.0) && choice["apart_ms"].as_f64() > choice["colocated_ms"].as_f64());

    let apart = bench(1, vec![vec![answer()]], RouterLimits::default());
    let (choice, tried, asked) = served(&apart);
    assert_eq!((&choice["chosen"], &choice["reason"]), (&false.into(), &"never".into()), "{choice}");
    assert_eq!((tried, &*asked), ("prefill-0".into(), "prefill-0"));
    let nobody = bench(0, vec![vec![answer()]], RouterLimits::default());
    assert_eq!(served(&nobody).0["reason"], "no_prefill_instances");
}

#[test]
fn a_decode_node_that_cannot_compute_a_prompt_after_all_is_not_asked_again_at_once() {
    let mut scheduling = Scheduling::default();
    scheduling.placement.colocate = Colocate::Sooner;
    let bench = scheduled(1, vec![vec![prefill_dead()]], RouterLimits::default(), &scheduling);
    let failure = block_on(bench.router.generate(request("r", "hi"))).unwrap_err();
    assert!(matches!(failure, Failure::NoNode { role: "prefill", .. }), "{failure}");
    let tries = bench.decodes[0].asked.lock().len();
    assert!((2..100).contains(&tries), "{tries} in 15 s with growing pauses");
}

#[test]
fn a_late_refusal_of_a_decode_node_is_counted_and_tells_when_to_come_back() {
    let late = Script::Items(vec![Err(Lost::Late)]);
    let bench = bench(1, vec![vec![late, answer()]], RouterLimits::default());
    let failure = block_on(bench.router.generate(request("r", "hi"))).unwrap_err();
    let Failure::Overloaded { stage, retry_after, .. } = failure else { panic!("{failure}") };
    assert!(stage == Stage::Late && retry_after >= Duration::from_secs(1), "{retry_after}");
    assert!(bench.registry.text().contains("millpond_router_refusals_total{stage=\"late\",reason=\"tbt\"} 1\n"));
    // It comes back as it was told, and goes before others.
    block_on((bench.timers.sleep)(retry_after));
    assert_eq!(text(block_on(bench.router.generate(request("r", "hi"))).unwrap()).unwrap(), "hello");
    assert_eq!(bench.decodes[0].asked.lock()[1].priority, 1);
}
